"""What a training cell shows beside the steps: pauses, long steps, runs that go on elsewhere."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import workbench as wb
from workbench.base.progress import hidden, shown_by, working
from workbench.base.runtime import Control
from workbench.runs.folder import Lock
from workbench.runs.symptoms import Watch
from workbench.widgets import display


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[list[Any]]:
    import IPython.display

    found: list[list[Any]] = []

    def show(first: Any, display_id: bool) -> Any:
        found.append([first])
        return SimpleNamespace(update=found[-1].append)

    monkeypatch.setattr(IPython.display, "display", show)
    return found


def row(step: int) -> dict[str, Any]:
    return {"training/global_step": step, "critic/score/mean": 0.5, "timing_s/step": 1.0}


def test_without_ipywidgets_a_training_shows_its_progress_and_one_line_that_enables_the_buttons(
    shown: list[list[Any]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(display, "in_notebook", lambda: True)
    monkeypatch.setitem(sys.modules, "ipywidgets", None)  # type: ignore[arg-type] # its import raises ModuleNotFoundError
    live = display.open_display(9, [], Control(), tmp_path)
    assert type(live) is display.LiveDisplay and len(shown) == 2
    (line,) = caplog.messages
    assert (
        line.endswith("expected the package ipywidgets; pip install 'rl-workbench[widgets]'")
        and not caplog.records[0].exc_info
    )


@pytest.mark.slow
def test_a_pause_and_a_long_step_are_said(shown: list[list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(display.LiveDisplay, "heartbeat", 0.6)
    control = Control()
    live = display.LiveDisplay(9, [], control)

    async def watched() -> None:
        watching = asyncio.create_task(live.watch())
        live.on_row(row(1), 8.0)
        control.pause()
        await asyncio.sleep(0.7)
        assert repr(shown[0][-1]).endswith("pauses when this step ends")
        gate = asyncio.create_task(control.gate())
        await asyncio.sleep(0.7)
        assert repr(shown[0][-1]).endswith("paused")
        control.resume()
        with shown_by(hidden), working("rollout") as work:
            work.expect(16)
            await asyncio.sleep(1.8)
            assert "step 1/9" in repr(shown[0][-1])
            assert re.search("rollout · 0 of 16 rows · [12] s", shown[0][-1]._repr_html_())
        assert await gate
        control.stop()
        await asyncio.sleep(0.4)
        assert repr(shown[0][-1]).endswith("stops when this step ends")
        control.interrupted, control.stopping = True, False
        await asyncio.sleep(0.4)
        control.stopping = True
        await asyncio.sleep(0.4)
        assert repr(shown[0][-1]).endswith("dropped if it cannot end, the steps before it are kept")
        watching.cancel()

    asyncio.run(watched())
    live.close("stopped by hand after step 1")
    assert repr(shown[0][-1]).endswith("stopped by hand after step 1")


@pytest.mark.slow
def test_a_control_holds_stops_and_lets_go() -> None:
    control = Control()

    async def go() -> list[Any]:
        assert await control.gate()
        control.pause()
        waiting = asyncio.create_task(control.gate())
        await asyncio.sleep(0.15)
        held = waiting.done()
        control.resume()
        passed = await waiting
        control.pause()
        control.stop()
        stopped = await control.gate()
        control.stopping = False
        waiting = asyncio.create_task(control.gate())
        await asyncio.sleep(0.06)
        waiting.cancel()
        return [held, passed, stopped, await waiting, control.interrupted]

    assert asyncio.run(go()) == [False, True, False, False, True]


def test_a_job_shows_static_blocks_and_a_person_the_panel(
    shown: list[list[Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert type(display.open_display(3, [], Control(), tmp_path)) is display.TrainingLine
    monkeypatch.setattr(display, "in_notebook", lambda: True)
    assert type(display.open_display(3, [], Control(), tmp_path)) is display.TrainingPanel
    monkeypatch.setenv("WORKBENCH_JOB", "1")
    assert type(display.open_display(3, [], Control(), tmp_path)) is display.LiveDisplay


@pytest.mark.slow
def test_a_run_that_goes_on_elsewhere_is_followed_to_its_end(shown: list[list[Any]], tmp_path: Path) -> None:
    run = tmp_path / "r"
    run.mkdir()
    (run / "settings.json").write_text(json.dumps({"format": 4, "train": {"steps": 3}}))
    (run / "metrics.jsonl").write_text(json.dumps(row(1)) + "\n")
    lock = Lock(run / "lock.json")

    async def elsewhere() -> None:
        for step in (2, 3):
            await asyncio.sleep(0.1)
            with (run / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(row(step)) + "\n")
        (run / "summary.json").write_text(json.dumps({"steps": 3, "stopped": None}))
        lock.release()

    async def both() -> wb.Run:
        other = asyncio.create_task(elsewhere())
        followed = await wb.load_run(run).follow(every=0.05)
        await other
        return followed

    assert asyncio.run(both()).state == "finished"
    assert "step 3/3" in repr(shown[0][-1]) and shown[1][-1].data[:4] == b"\x89PNG"


def collapsing(steps: int) -> list[dict[str, Any]]:
    """Entropy falls from 1.0 to 0.01 after step 10."""
    return [{**row(step), "actor/entropy": 1.0 if step <= 10 else 0.01} for step in range(1, steps + 1)]


@pytest.mark.slow
def test_a_symptom_is_said_once_and_marked_where_it_began(
    shown: list[list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(display, "BLOCK_EVERY", 0.0)
    monkeypatch.setattr(display, "CURVES_EVERY", 1e9)
    drawn: list[Any] = []
    panel = display.curves.panel
    monkeypatch.setattr(
        display.curves, "panel", lambda *args, **options: drawn.append(panel(*args, **options)) or drawn[-1]
    )
    live = display.LiveDisplay(20, [])
    for one in collapsing(20):
        live.on_row(one, 0.0)
    # the mean of the last five is first below a tenth of the first five's at step 15: its window begins at 11
    said = repr(shown[0][-1]).splitlines()
    assert said[0].startswith("step 20/20")
    assert said[1].startswith("1  entropy has collapsed (step 11 on): 1 → 0.01 nats a token") and len(said) == 2
    assert shown[0][-1]._repr_html_().count("entropy has collapsed") == 1
    assert len(repr(shown[0][14]).splitlines()) == 1 and len(repr(shown[0][15]).splitlines()) == 2
    numbers = [text.get_text().strip() for axes in drawn[-1].axes for text in axes.texts]
    assert "1" in numbers and not drawn[-1].texts, "the block says it, the curves number it"
    again = [{**row(step), "actor/entropy": 1.0} for step in range(21, 30)]
    for one in again:
        live.on_row(one, 0.0)
    assert [line.split(";")[0].endswith("nats a token (gone by now)") for line in live.notes()] == [True]
    live.close()
    assert repr(shown[0][-1]).split(";")[0].endswith("nats a token (gone by now)")


def test_a_run_that_was_there_is_looked_through() -> None:
    marks = Watch(collapsing(300)).marks
    assert [(one.name, one.found) for one in marks] == [("entropy has collapsed", "1 → 0.01 nats a token")]
    assert 11 <= marks[0].since <= 12
    assert Watch([]).marks == [] and Watch([{"training/global_step": 0}]).marks == []


def test_a_symptom_of_single_steps_is_marked_at_the_first_of_them() -> None:
    norms = [1.0, 1.0, 1.0, 50.0, 1.0, 1.0, 60.0]
    rows = [{**row(step), "actor/grad_norm": norm} for step, norm in enumerate(norms, 1)]
    (one,) = Watch(rows).marks
    assert one.since == 4 and one.steps == (4, 7)


def test_nobody_waited_before_the_first_step(shown: list[list[Any]]) -> None:
    live = display.LiveDisplay(9, [])
    live._show(1000.0)
    assert repr(shown[0][-1]) == "waiting for the first step"
    assert display.LiveDisplay(9, [row(1), row(2)]).status() == "goes on after step 2/9"


def test_a_step_that_comes_again_takes_the_place_of_what_was_there(shown: list[list[Any]]) -> None:
    live = display.LiveDisplay(9, [row(1), row(2), row(3)])
    live.on_row({**row(2), "critic/score/mean": 0.9}, 0.0)
    assert [(one["training/global_step"], one["critic/score/mean"]) for one in live.rows] == [(1, 0.5), (2, 0.9)]


def test_a_picture_that_fails_does_not_end_the_run(
    shown: list[list[Any]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from workbench.views import curves

    def broken(*_: Any, **__: Any) -> None:
        raise MemoryError("no room for a picture")

    monkeypatch.setattr(curves, "panel", broken)
    live = display.LiveDisplay(3, [row(1)])
    with caplog.at_level(logging.ERROR, logger="workbench"):
        live.on_row(row(3), 0.0)
    assert "the curves could not be drawn" in caplog.text and "no room for a picture" in caplog.text
    assert "step 3/3" in repr(shown[0][-1])


@pytest.mark.slow
def test_a_runs_curves_and_figures_come_from_its_folder(tmp_path: Path) -> None:
    for name, steps in (("a $b$", 20), ("other", 12)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "settings.json").write_text(json.dumps({"format": 4, "train": {"steps": steps}}))
        lines = [json.dumps(one) + "\n" for one in collapsing(steps)]
        (tmp_path / name / "metrics.jsonl").write_text("".join(lines))
    run, other = wb.load_run(tmp_path / "a $b$"), wb.load_run(tmp_path / "other")
    figure = run.curves(short=other)
    titles = [axes.get_title(loc="left") for axes in figure.axes if axes.get_visible()]
    assert titles == ["entropy (nats)"]  # what neither has is left out, and what never changes is a line
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a $b$", "short"]
    assert [text.get_text() for text in figure.texts][1].startswith("1  entropy has collapsed (step 11 on)")
    *_, still = [text.get_text() for text in figure.texts]
    assert still.startswith("the same at all steps: reward ") and "seconds per phase" in still
    assert len(run.curves(marks=False).texts) == 2
    made = run.figure("reward", "entropy", path=tmp_path / "f.pdf", others={"short": other}, width="page", marks=True)
    assert (tmp_path / "f.pdf").read_bytes()[:5] == b"%PDF-" and made.get_figwidth() == 6.75
    assert [text.get_text() for text in made.legends[0].get_texts()] == ["a $b$", "short"]
    assert [axes.get_ylabel() for axes in made.axes] == ["reward", "entropy (nats)"]


def test_tensorboard_finds_the_events_of_a_run_and_of_many(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

    from workbench.runs.trackers import TRACKERS

    for name in ("one", "two"):
        tracker = TRACKERS["tensorboard"](tmp_path / name, "workbench", name)
        for step in (1, 2):
            tracker.log({"critic/score/mean": step / 4, "timing_s/step": 1.0}, step)
        tracker.close()

    def found(logdir: Path) -> EventMultiplexer:
        """As `tensorboard --logdir` looks for them."""
        return EventMultiplexer().AddRunsFromDirectory(str(logdir)).Reload()

    one = found(tmp_path / "one")
    assert list(one.Runs()) == ["tensorboard"]
    assert one.Runs()["tensorboard"]["scalars"] == ["critic/score/mean", "timing_s/step"]
    points = one.Tensors if not one.Runs()["tensorboard"]["scalars"] else one.Scalars
    assert [(event.step, event.value) for event in points("tensorboard", "critic/score/mean")] == [(1, 0.25), (2, 0.5)]
    assert sorted(found(tmp_path).Runs()) == ["one/tensorboard", "two/tensorboard"]


@pytest.mark.slow
def test_tensorboard_is_the_kernels_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = []
    shell = SimpleNamespace(kernel=True, run_line_magic=lambda name, line: run.append((name, line)))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setenv("TENSORBOARD_BINARY", "")
    monkeypatch.delenv("TENSORBOARD_BINARY")
    place = tmp_path / "a run's"
    line = display.run_tensorboard(SimpleNamespace(path=place))
    assert Path(os.environ["TENSORBOARD_BINARY"]) == Path(sys.executable).parent / "tensorboard"
    assert run == [("load_ext", "tensorboard"), ("tensorboard", line.removeprefix("tensorboard "))]
    import shlex

    assert shlex.split(line) == ["tensorboard", "--logdir", str(place)]
    monkeypatch.setenv("TENSORBOARD_BINARY", "mine")
    monkeypatch.setenv("WORKBENCH_JOB", "1")  # a job starts no server
    assert (
        display.run_tensorboard(SimpleNamespace(path=place)) == line
        and os.environ["TENSORBOARD_BINARY"] == "mine"
        and len(run) == 2
    )
