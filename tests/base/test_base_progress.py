"""The line of work: what runs, how far, since when; where it is shown, and that short work is shown nowhere."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import workbench as wb
from workbench.base import progress, runtime
from workbench.base.progress import Work, clock, present, shown_by, working

Lines = list[tuple[str, float, bool]]


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lines]:
    monkeypatch.setattr(progress, "AFTER", 0.05)
    shown: Lines = []
    with shown_by(lambda *line: shown.append(line)):
        yield shown


def test_short_work_is_shown_nowhere(lines: Lines) -> None:
    with working("loading"):
        assert progress.now() == ""
    assert lines == [] and progress.now() == "" and present().name == ""


def test_the_outermost_work_is_shown_with_the_part_that_runs(lines: Lines) -> None:
    with working("what_if", 2, "updates") as work:
        with working("update_actor") as inner, inner.rows(8) as passed:
            passed(5)
            inner.add_tokens(40)
            time.sleep(0.12)
            assert "what_if · 0 of 2 updates · update_actor · 5 of 8 rows · 40 tokens, " in lines[-1][0]
        work.passed(1)
        time.sleep(0.12)
        assert "what_if · 1 of 2 updates · 40 tokens" in lines[-1][0] and lines[-1][1:] == (0.5, False)
        work.passed(1)
    assert lines[-1][0].startswith("what_if · 2 updates · ") and lines[-1][2]


def test_work_that_raises_says_that_it_was_stopped(lines: Lines) -> None:
    with pytest.raises(KeyboardInterrupt), working("evaluate"):
        time.sleep(0.12)
        raise KeyboardInterrupt
    assert lines[-1][0].startswith("evaluate: stopped · ") and progress.now() == ""
    with pytest.raises(ValueError), working("evaluate"):
        time.sleep(0.12)
        raise ValueError
    assert lines[-1][0].startswith("evaluate: failed · ")


def test_work_that_has_a_result_ends_with_it(lines: Lines) -> None:
    with working("opening the model") as work:
        time.sleep(0.12)
        work.result = "opened m: 135M parameters, cpu, float32"
    assert lines[-1][0] == "opened m: 135M parameters, cpu, float32 · 0 s"


def test_what_is_left_follows_the_speed_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(progress.time, "time", lambda: now[0])
    work = Work("what_if", 4, "updates")
    assert work.left == 0
    now[0] += 10
    work.passed(1)
    now[0] += 4
    assert work.left == 26.0, "three updates of 10 s, of which 4 s are over"
    sampling = Work("rollout")
    sampling.most = 100
    now[0] += 5
    sampling.add_tokens(25)
    assert sampling.left == 15.0 and sampling.share == 0.25
    assert sampling.line.endswith("25 tokens, 5 a second · 5 s · about 15 s left")
    now[0] += 45
    assert "25 tokens · 50 s" in sampling.line, "no speed of 0 tokens a second"
    assert Work("step", 5, "phases").left == 0
    assert [clock(s) for s in (34.2, 245, 3720)] == ["34 s", "4 min 05 s", "62 min 00 s"]


def test_rows_are_counted_once_in_other_threads_too(lines: Lines) -> None:
    async def twice(number: int) -> int:
        return number * 2

    with working("reward") as work:
        assert runtime.run_all(twice, range(3)) == [0, 2, 4]
        assert (work.done, work.total) == (3, 3)
        with work.rows(5) as passed:
            runtime.run_all(twice, range(7))
            passed(5)
        assert (work.done, work.total) == (8, 8)
    with working("what_if", 2, "updates") as work:
        runtime.run_all(twice, range(3))
        assert work.done == 0


def test_a_log_gets_few_lines_and_a_terminal_one(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    for terminal, expected in ((False, ["at 9", "at 19", "at 39", "at 40"]), (True, ["at 0"])):
        out: Any = io.StringIO()
        out.isatty = lambda terminal=terminal: terminal
        monkeypatch.setattr(progress.sys, "stderr", out)
        now[0] = 0.0
        show = progress.on_stderr()
        for second in range(40):
            now[0] = float(second)
            show(f"at {second}", 0.0, False)
        now[0] = 40.0
        show("at 40", 1.0, True)
        if terminal:
            assert out.getvalue().count("\n") == 1 and out.getvalue().endswith("at 40\n")
        else:
            assert out.getvalue().split("\n")[:-1] == expected


def test_a_step_counts_rows_and_tokens_of_each_phase(tiny: str, lines: Lines) -> None:
    engine = wb.engines.local(tiny, device="cpu")
    pipe = wb.recipes.grpo(engine, lambda response: float(len(response)), group_size=2, max_tokens=4)
    batch = wb.rows([{"prompt": f"{n}+1?"} for n in range(4)]).batch(4)
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            for one in [part for work in list(progress._running) for part in list(work.parts)]:
                seen.setdefault(one.name, one)

    seen: dict[str, Work] = {}
    watching = threading.Thread(target=look)
    watching.start()
    try:
        wb.Stepper(pipe, batch).run()
    finally:
        over.set()
        watching.join()
    rollout, update = seen["rollout"], seen["update_actor"]
    assert (rollout.done, rollout.total) == (8, 8) and 8 <= rollout.tokens == rollout.most <= 32
    assert (update.done, update.total) == (8, 8) and update.tokens > 16


def test_passing_work_leaves_no_line(lines: Lines) -> None:
    with working("checking the settings", passing=True):
        time.sleep(0.12)
        assert lines[-1][0].startswith("checking the settings")
    assert lines[-1] == ("", 0.0, True)
    with pytest.raises(ValueError), working("checking the settings", passing=True):
        time.sleep(0.12)
        raise ValueError
    assert lines[-1][0].startswith("checking the settings: failed")
