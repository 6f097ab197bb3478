"""The live layers as Python objects: what they answer, what they leave without a kernel."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.lint import lint

import workbench as wb
from workbench.base import progress, runtime
from workbench.dataproto.core import DataProto
from workbench.rewards import Score, Status
from workbench.testing.rewards import answered
from workbench.views.samples import SamplesView
from workbench.widgets import layer
from workbench.widgets.layer import SamplesTable, StepperFace, TokenView


def judged(rows: int = 60) -> wb.DataProto:
    values = [float(row % 3 == 0) for row in range(rows)]
    batch = answered([f"text {row} #### {row}" for row in range(rows)], uid=[f"p{row // 4}" for row in range(rows)])
    return batch.with_columns(
        {
            "reward": torch.tensor(values),
            "scored": torch.ones(rows, dtype=torch.bool),
            "score": [Score(value=value, answer=str(row), why="so") for row, value in enumerate(values)],
            "advantages": torch.ones(rows, batch["responses"].shape[1]),
        }
    )


def test_pages_follow_each_other_and_the_view_follows_the_table() -> None:
    view = wb.views.samples(judged())
    table = SamplesTable(view)
    asked = {"kind": "rows", "low": 0.5, "high": None, "search": "", "count": 15}
    first = table.answer({**asked, "order": "index", "start": 0})
    assert first["columns"][:3] == ["row", "reward", "response"] and table.columns == []
    second = table.answer({**asked, "order": "index", "start": 15})
    assert first["total"] == 20 and first["of"] == 60 and len(first["rows"]) == 15 and len(second["rows"]) == 5
    assert [row["row"] for row in (*first["rows"], *second["rows"])] == list(range(0, 60, 3))
    assert view.selected.tolist() == list(range(0, 60, 3))
    backwards = table.answer({"kind": "rows", "order": "-row", "status": "scored", "start": 0, "count": 2})
    assert [row["row"] for row in backwards["rows"]] == [59, 58]
    assert first["rows"][1]["cells"]["response"] == "text 3 #### 3" and json.dumps(first)


def test_by_prompt_each_group_has_a_line() -> None:
    table = SamplesTable(wb.views.samples(judged()))
    page = table.answer({"kind": "rows", "order": "index", "by_group": True, "start": 0, "count": 8})
    assert [row["group"] for row in page["rows"]] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert list(page["groups"]) == ["0", "1"]
    prompt, words, dots = page["groups"]["0"]
    assert words.startswith("4 samples · reward mean 0.5, std 0.5774") and prompt == "question 0"
    assert [row for row, _ in dots] == [0, 1, 2, 3]


def test_a_click_is_known_in_python() -> None:
    view = wb.views.samples(judged())
    table = SamplesTable(view)
    table.picked = 7
    assert view.picked == 7
    assert table.answer({"kind": "pick", "row": 7})["html"] == view.row(7)._repr_html_()


def test_a_sample_is_seen_in_tokens_compared_and_copied() -> None:
    view = wb.views.samples(judged())
    table = SamplesTable(view)
    assert table.headline.startswith("60 samples · ") and sum(one[2] for one in table.bins) == 60
    assert table.statuses == [["scored", 60]]
    card = table.answer({"kind": "pick", "row": 7})
    assert [row for row, _ in card["siblings"]] == view.row(7).siblings and card["code"].endswith(".row(7)")
    assert table.answer({"kind": "tokens", "row": 7})["html"] == wb.views.tokens(view.thing, 7)._repr_html_()
    assert "row 7 → row 6" in table.answer({"kind": "diff", "row": 7, "other": 6})["html"]
    assert table.answer({"kind": "text", "row": 3})["text"] == "text 3 #### 3"


@pytest.fixture
def forgetful() -> Iterator[None]:
    """Columns that a test chooses are forgotten after it."""
    yield
    SamplesView.remembered = None


def test_chosen_columns_are_remembered_and_stand_in_the_static_form(forgetful: None) -> None:
    view = wb.views.samples(judged(), rows=2, order="index")
    table = SamplesTable(view)
    asked = {"kind": "rows", "order": "index", "start": 0, "count": 2}
    usual = table.answer(asked)["columns"]
    page = table.answer({**asked, "choose": ["why", "reward", "no such"]})
    assert page["columns"] == ["reward", "why"] == table.columns and set(page["rows"][0]["cells"]) == {"reward", "why"}
    later = wb.views.samples(judged(), rows=2, order="index")
    for one in (view, later):
        assert one.columns == ["reward", "why"] and lint(one.html()) == []
        assert re.findall("<th [^>]*>([^<]*)<", one.html()) == ["reward", "why"] and "text 0" not in one.html()
    assert SamplesTable(later).columns == ["reward", "why"]
    assert wb.views.samples(judged(), columns=["row", "tokens"]).columns == ["row", "tokens"], "code goes before"
    assert "answer 1" in wb.views.samples(judged(), columns=["answer"]).text() and "answer 1" not in later.text()
    assert table.answer({**asked, "choose": []})["columns"] == usual
    assert wb.views.samples(judged()).columns is None
    with pytest.raises(ValueError, match="'rewrad' is not a column of the samples table.*did you mean 'reward'"):
        wb.views.samples(judged(), columns=["rewrad"])


def test_to_pandas_is_a_line_that_makes_what_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    import __main__

    batch = judged()
    monkeypatch.setattr(__main__, "mine", batch, raising=False)
    for where in (None, {"group": [0, 1, 2]}, {"reward": [1.0]}, lambda frame: frame["group"] > 3):
        table = SamplesTable(wb.views.samples(batch, where=where))
        asked = {"order": "-row", "search": "text", "by_group": False, "low": 0.5, "high": None, "status": "scored"}
        shown = table.answer({"kind": "rows", "start": 0, "count": 50, **asked})
        line = table.answer({"kind": "code", **asked})["text"]
        made = eval(line, {"wb": wb, "mine": batch})  # noqa: S307 - the line that was made here
        assert line.startswith("wb.views.samples(mine") and made.index.tolist() == [row["row"] for row in shown["rows"]]
        assert table._samples.to_pandas().equals(made) and len(made) > 2
    line = SamplesTable(wb.views.samples(batch)).answer({"kind": "code", "order": "worst"})["text"]
    assert line == "wb.views.samples(mine).to_pandas()"


def test_rows_left_out_have_a_tab() -> None:
    batch = judged()
    scores = [
        replace(one, why="HTTP 500 <b>", status=Status.INFRA_ERROR) if row == 7 else one
        for row, one in enumerate(batch["score"])
    ]
    batch = batch.with_columns({"scored": torch.arange(60) != 7, "score": scores})
    table = SamplesTable(wb.views.samples(batch))
    assert table.tabs == [["samples (60)", "the rows of the step"], ["left out (1)", "1 row left out: 1 × infra error"]]
    asked = {"kind": "rows", "order": "worst", "start": 0, "count": 5, "tab": "left"}
    page = table.answer(asked)
    assert page["total"] == page["of"] == 1 and page["columns"][:2] == ["row", "left_out"]
    assert (
        page["rows"][0]["cells"]["left_out"] == "infra error: HTTP 500 <b>" and page["rows"][0]["cells"]["of_row"] == 7
    )
    card = table.answer({"kind": "pick", "row": 0, "tab": "left"})
    assert "infra error: HTTP 500 &lt;b&gt;" in card["html"] and card["code"].endswith(".left_out).row(0)")
    assert table.answer({"kind": "tokens", "row": 0, "tab": "left"})["html"] == wb.views.tokens(batch, 7).html()
    assert table.answer({**asked, "kind": "code"})["text"].endswith("(wb.views.samples(batch).left_out).to_pandas()")
    assert len(wb.views.samples(wb.views.samples(batch).left_out).to_pandas()) == 1
    assert len(SamplesTable(wb.views.samples(judged())).tabs) == 1


def test_a_sample_lies_beside_the_same_row_of_another_side(tmp_path: Any) -> None:
    batch = judged()
    other = batch.with_columns({"reward": batch["reward"] + 1, "reward/form": torch.full((60,), 0.5)})
    table = SamplesTable(wb.views.samples(batch, against=other))
    card = table.answer({"kind": "pick", "row": 3})
    assert card["more"] == [["beside", "row 3 of the other side"]]
    html = table.answer({"kind": "beside", "row": 3})["html"]
    assert lint(html) == [] and "reward/form" in html and "<b>2</b>" in html and "one response" in html
    moved = SamplesTable(wb.views.samples(batch, against=other.select_idxs(list(range(4, 60)))))
    replies = heard(moved, {"kind": "beside", "row": 0, "asked": 1})
    assert replies[0]["kind"] == "error" and "prompt p1" in replies[0]["text"]


def test_what_python_asked_for_stays_below_the_pages_filters() -> None:
    for where in ({"tokens": (0, 14)}, lambda frame: frame["tokens"] <= 14, {"group": [0, 1]}):
        view = wb.views.samples(judged(), where=where, order="index")
        before = view.selected.tolist()
        table = SamplesTable(view)
        asked = {"kind": "rows", "order": "index", "start": 0, "count": 50}
        assert [row["row"] for row in table.answer(asked)["rows"]] == before
        table.answer({**asked, "low": 0.5})
        assert view.selected.tolist() == [row for row in before if row % 3 == 0]
        assert table.answer({**asked, "status": "no such"})["total"] == 0


def test_two_tables_of_one_view_do_not_mix_their_pages() -> None:
    view = wb.views.samples(judged(), order="index")
    one, two = SamplesTable(view), SamplesTable(view)
    asked = {"kind": "rows", "order": "index", "count": 5}
    one.answer({**asked, "start": 0})
    two.answer({**asked, "order": "-row", "start": 0})
    assert [row["row"] for row in one.answer({**asked, "start": 5})["rows"]] == [5, 6, 7, 8, 9]


def test_a_row_is_pinned_with_the_score_it_should_have(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    table = SamplesTable(wb.views.samples(judged()))
    said = table.answer({"kind": "pin", "row": 3, "expected": "1", "note": "a good one"})
    assert said["text"] == "pinned, 1 in pins.jsonl"
    table.answer({"kind": "pin", "row": 4, "expected": "unscored", "note": ""})
    kept = wb.rewards.pins()
    assert len(kept) == 2 and {pin.expected for pin in kept} == {1.0, "unscored"}
    replies = heard(table, {"kind": "pin", "row": 4, "expected": "", "asked": 9})
    assert replies[0]["kind"] == "error" and "unscored" in replies[0]["text"] and replies[0]["asked"] == 9


def heard(widget: Any, message: dict[str, Any]) -> list[dict[str, Any]]:
    """What a front end hears after a message."""
    said: list[dict[str, Any]] = []
    widget.send = lambda content, buffers=None: said.append(content)
    widget._on_message(widget, message, [])
    return said


def test_colours_and_numbers_of_all_rows() -> None:
    view = wb.views.tokens(judged(), 3, "advantage", against_row=5)
    widget = TokenView(view)
    rows = widget.answer({"kind": "tokens"})["rows"]
    assert len(rows) == 2 and len(rows[0]["texts"]) == len(rows[0]["ids"]) == 13
    found = widget.answer({"kind": "colours", "colour": "mask"})
    assert len(found["colours"][0]) == 13 and view.colour == "mask"
    assert heard(widget, {"kind": "colours", "colour": "no such", "asked": 1})[0]["kind"] == "error"


@pytest.mark.slow
def test_buttons_do_what_their_line_says(tiny: str) -> None:
    engine = wb.engines.local(tiny, device="cpu", lr=1e-3)
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256)
    s = wb.Stepper(wb.recipes.grpo(engine, group_size=2, max_tokens=8), rows.batch(2))
    face = StepperFace(s)
    assert face.answer({"kind": "look"})["next_stage"] == "rollout"
    said = face.answer({"kind": "next", "stands": 0})
    assert said["code"] == "s.next()" and s.position == 1 and "rollout" in said["html"]
    said = face.answer({"kind": "run", "phase": "advantage", "stands": 1})
    assert said["code"] == 's.run(until="advantage")' and s.next_stage == "update_actor"
    again = face.answer({"kind": "run", "phase": "advantage", "stands": s.position})
    assert s.next_stage == "update_actor" and again["note"] == "", "pressed twice it does nothing twice"
    said = face.answer({"kind": "back to", "phase": "reward", "stands": s.position})
    assert said["code"] == 's.back(to="reward")' and s.next_stage == "reward"
    assert face.answer({"kind": "back", "stands": s.position})["code"] == "s.back()" and s.next_stage == "rollout"
    assert heard(face, {"kind": "back", "stands": 0, "asked": 3})[0]["kind"] == "error", "nothing is before it"
    s.run(until="old_log_prob")
    shown = face.answer({"kind": "show", "phase": "rollout", "stands": 3})
    assert s.position == 3 and shown["code"] == 's.trace["rollout"]' and shown["shown"] == "rollout"
    assert (
        "bookkeeping columns" in shown["html"] and "token_level_scores" not in shown["html"].partition("<details>")[0]
    )
    assert [one["mark"] for one in shown["chips"]] == ["●", "●", "●", "▶", "○", "○"] and "right" in shown["chips"][1][
        "headline"
    ]
    assert face.answer({"kind": "look"})["shown"] == "old_log_prob", "the last one again"
    assert heard(face, {"kind": "show", "phase": "advantage", "stands": 3, "asked": 4})[0]["kind"] == "error"
    s.back(to="reward")
    gone = face.answer({"kind": "show", "phase": "reward", "stands": 3})
    assert "had changed" in gone["note"] and gone["shown"] == "rollout", "pressed on an old face"
    s.back()
    s.next()  # a cell moves it
    stale = face.answer({"kind": "next", "stands": 0})
    assert s.position == 1 and "had changed" in stale["note"] and stale["stands"] == 1


def test_a_press_that_is_sent_five_times_steps_once(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = wb.engines.local(tiny, device="cpu", lr=1e-3)
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256)
    s = wb.Stepper(wb.recipes.grpo(engine, group_size=2, max_tokens=8), rows.batch(2))
    face = StepperFace(s)
    press = {"kind": "next", "stands": 0, "asked": "page 1"}
    running, stepped = heard(face, press)
    assert running == {"kind": "running", "text": "rollout", "asked": "page 1"}
    assert stepped["kind"] == "face" and stepped["stands"] == s.position == 1
    assert [heard(face, press) for _ in range(3)] == [[], [], []], "from the same queue: the answer is on its way"
    monkeypatch.setattr(layer.time, "monotonic", lambda: stepped["at"] + 5)
    assert heard(face, press) == [stepped], "the answer was lost: it comes again"
    # back at the place where the press was made: the id decides, not the place
    assert heard(face, {"kind": "back", "stands": 1, "asked": "page 2"})[0]["stands"] == s.position == 0
    monkeypatch.setattr(layer.time, "monotonic", lambda: stepped["at"] + 50)
    assert heard(face, press) == [stepped] and s.position == 0
    assert [one["kind"] for one in heard(face, {**press, "asked": "page 3"})] == ["running", "face"] and s.position == 1


def test_a_copy_that_comes_while_the_first_is_at_work_hears_that_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    table = SamplesTable(wb.views.samples(judged(4)))
    question, copies, answers = {"kind": "pin", "asked": "page 1"}, [], []

    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        answers.append(asked)
        copies.append(table.reply(question))  # as on a kernel's other thread
        return {"kind": "pinned", "text": "pinned, 1"}

    monkeypatch.setattr(table, "answer", answer)
    assert heard(table, question)[0]["text"] == "pinned, 1"
    assert len(answers) == 1 and [one["kind"] for one in copies] == ["running"]
    for number in range(3 * layer.KEPT):
        table.reply({"kind": "pin", "asked": f"other {number}"})
    assert len(table._replies) == layer.KEPT, "old replies are let go"


def test_the_last_view_of_a_stepper_follows_what_a_cell_does(
    tiny: str, shown: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell()
    monkeypatch.setattr(layer, "get_ipython", lambda: shell)
    monkeypatch.setattr(layer, "_alive", layer.deque())
    engine = wb.engines.local(tiny, device="cpu", lr=1e-3)
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256)
    s = wb.Stepper(wb.recipes.grpo(engine, group_size=2, max_tokens=8), rows.batch(2))
    s._ipython_display_()
    s.next()
    s._ipython_display_()
    wb.views.samples(judged(4))._ipython_display_()
    shell.user_ns["s"] = s
    assert shell.run_cell("_ = s.next()").success
    first, last = [one.face["stands"] for one in layer._alive if isinstance(one, StepperFace)]
    assert (first, last) == (0, 2), "what its own cell did; where the stepper stands"


def test_an_interrupt_is_said_and_let_through(monkeypatch: pytest.MonkeyPatch) -> None:
    table = SamplesTable(wb.views.samples(judged(4)))
    said: list[dict[str, Any]] = []
    monkeypatch.setattr(table, "send", lambda content, buffers=None: said.append(content))

    def interrupted(asked: dict[str, Any]) -> dict[str, Any]:
        raise KeyboardInterrupt

    monkeypatch.setattr(table, "answer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        table._on_message(table, {"kind": "rows", "asked": 5}, [])
    assert [(one["kind"], one["text"], one["asked"]) for one in said] == [("error", "interrupted", 5)]
    assert table.reply({"kind": "rows", "asked": 5})["text"] == "interrupted", "no copy is told that it still runs"


def test_only_so_many_are_alive(shown: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "MOST", 2)
    monkeypatch.setattr(layer, "_alive", layer.deque())
    view = wb.views.samples(judged(4))
    for _ in range(4):
        view._ipython_display_()
    assert len(layer._alive) == 2


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(layer, "display", lambda bundle, raw: found.append(bundle))
    monkeypatch.setattr(layer, "in_notebook", lambda: True)
    yield found


def test_the_static_form_is_an_output_of_its_own(shown: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    view = wb.views.samples(judged(4))
    view._ipython_display_()
    static, widget = shown
    assert view.html() in static["text/html"] and "workbench-static" in static["text/html"]
    assert static["text/plain"] == repr(view)
    assert "application/vnd.jupyter.widget-view+json" in widget and widget["text/html"] == ""
    shown.clear()
    monkeypatch.setenv("WORKBENCH_JOB", "1")
    view._ipython_display_()
    assert [list(bundle) for bundle in shown] == [["text/html", "text/plain"]], "nobody clicks in a job"


def test_outside_a_notebook_it_is_text(shown: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "in_notebook", lambda: False)
    view = wb.views.samples(judged(4))
    view._ipython_display_()
    assert shown == [{"text/plain": repr(view)}]


def test_a_page_of_ten_thousand_rows_is_small() -> None:
    rows = 10_000
    frame = wb.DataProto(
        {"reward": torch.rand(rows)},
        {"response_text": ["x" * 500] * rows, "uid": [str(row // 8) for row in range(rows)]},
    )
    table = SamplesTable(wb.views.samples(frame))
    page = table.answer({"kind": "rows", "order": "best", "start": 0, "count": 10_000})
    assert len(page["rows"]) == 200 and page["total"] == rows and len(json.dumps(page)) < 200_000
    assert len(json.dumps({name: getattr(table, name) for name in ("columns", "query", "statuses")})) < 2_000


def test_a_press_runs_beside_the_kernel_says_how_far_it_is_and_stops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(layer, "in_notebook", lambda: True)
    monkeypatch.setattr(progress, "AFTER", 0.05)
    monkeypatch.setattr(layer, "_alive", layer.deque())
    begun = threading.Event()

    class Slow(wb.stages.BaseStage):
        name, reads, writes = "slow", ("uid",), ("late",)

        def __call__(self, batch: DataProto) -> wb.Outcome:
            with progress.present().rows(len(batch)):
                for _ in range(1000):
                    begun.set()
                    runtime.check()
                    time.sleep(0.02)
            return wb.Outcome(batch)

    class Before(wb.stages.BaseStage):
        name, reads, writes = "before", ("uid",), ()

        def __call__(self, batch: DataProto) -> wb.Outcome:
            return wb.Outcome(batch)

    s = wb.Stepper([Before(), Slow()], judged(4)).next()
    face, said = StepperFace(s), list[dict[str, Any]]()
    layer._alive.append(face)
    monkeypatch.setattr(face, "send", lambda content, buffers=None: said.append(content))
    face._on_message(face, {"kind": "next", "stands": 1, "asked": 1}, [])
    assert begun.wait(60), "the message's handler has returned while the reward runs"
    while not any(one["kind"] == "progress" for one in said):
        time.sleep(0.01)
    face._on_message(face, {"kind": "stop"}, [])
    layer._pressed(None)
    lines = [one["text"] for one in said if one["kind"] == "progress"]
    assert "slow · 0 of 4 rows" in lines[0] and "stopped" in lines[-1]
    assert said[-1]["kind"] == "error" and "interrupted" in said[-1]["text"] and s.position == 1
    runtime.check()  # what comes next is not stopped
    assert s.back().next().position == 1
