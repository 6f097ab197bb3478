"""Pipelines, traces, steppers and comparisons, as text and HTML, of one literal step."""

from __future__ import annotations

from pathlib import Path

import torch
from support.lint import lint

import workbench as wb
from workbench.steps.compare import compare
from workbench.steps.trace import Phase, Trace, perform
from workbench.views.document import number
from workbench.views.traces import headline


def start() -> wb.DataProto:
    scores = torch.zeros(4, 3)
    scores[:, -1] = torch.tensor([1.0, 0.0, 1.0, 0.0])
    return wb.DataProto(
        {"response_mask": torch.ones(4, 3, dtype=torch.long), "token_level_scores": scores, "reward": scores.sum(-1)},
        {"uid": ["a", "a", "b", "b"], "response_text": ["<b>w</b>", "x", "y", "z"]},
        {"step": 7},
    )


def traced(sign: float = 1.0) -> Trace:
    def estimator(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return sign * scores[:, None] * mask

    return Trace(start()).add(perform(wb.stages.Advantage(estimator), start()))


def test_numbers_are_short() -> None:
    assert [number(value) for value in (0.123456, 12345.678, 2.0, float("nan"))] == ["0.1235", "12350", "2", "–"]
    assert [number(value) for value in (12346, 999_999, -0.0, None)] == ["12346", "999999", "0", "–"]
    assert [number(value) for value in (0.000123456, -1234567.0, float("inf"))] == ["1.235e-4", "-1.235e6", "inf"]
    assert [number(value, "+") for value in (0.5, -0.5, 0.0002)] == ["+0.5", "-0.5", "+2e-4"]


def test_a_phase_has_a_headline() -> None:
    assert headline(traced()["advantage"]) == "1 largest advantage · 50% of the rows have advantage 0"
    empty = Phase(stage="mine", batch=start(), wrote=(), metrics={}, settings={})
    assert headline(empty) == "" and headline(Phase(**{**vars(empty), "metrics": {"x/y": 0.5}})) == "0.5 x/y"
    update = {"actor/grad_norm": 0.25, "actor/pg_clipfrac": 0.125, "actor/loss": 1.0}
    phase = Phase(**{**vars(empty), "stage": "update_actor", "metrics": update})
    assert headline(phase) == "0.25 gradient norm · 12.5% clipped"


def test_a_phase_with_rewards_says_what_the_samples_table_says() -> None:
    phase = Phase(stage="mine", batch=start(), wrote=("reward",), metrics={}, settings={})
    assert headline(phase) == wb.views.samples(start()).index.headline == "4 samples · 2 right · 2 wrong"
    foreign = start().with_columns({"score": ["good", "bad", "good", "bad"]})
    assert headline(Phase(**{**vars(phase), "batch": foreign})) == "4 samples · 2 right · 2 wrong", (
        "scores of another kind are left out"
    )


def test_columns_of_ids_masks_and_positions_are_folded() -> None:
    trace = wb.Trace.load("data/arith-batch")
    text, html = repr(trace["rollout"]), trace["rollout"]._repr_html_()
    assert "  7 bookkeeping columns: prompts, prompt_mask, responses, " in text and "position_ids" in text
    assert not any(line.split()[0] == "prompts" for line in text.splitlines())
    assert html.index("response_text") < html.index("7 bookkeeping columns</summary>") < html.index("position_ids")
    assert lint(html) == [] and ", 7 bookkeeping columns" in repr(trace)


def test_a_trace_says_what_each_phase_wrote() -> None:
    trace = traced()
    text = repr(trace)
    assert text.startswith("Trace of step 7: 1 phases, 4 rows") and "advantages f32[4,3]" in text
    html = trace._repr_html_()
    assert lint(html) == [] and "source of estimator" in html and "critic/advantages/mean" in html
    assert "return sign * scores" in trace["advantage"].source["estimator"]


def test_a_comparison_shows_flips_first_and_escapes_texts() -> None:
    found = compare(traced(), traced(-1.0))
    assert found.sign_flips == 2 and [row.row for row in found.rows] == [0, 2] and found.rows[0].flipped
    assert {change.name for change in found.columns} == {"advantages", "returns"}
    text, html = repr(found), found._repr_html_()
    assert "2 advantages changed sign" in text and text.count("flipped") == 2 and "<b>w</b>" in text
    assert lint(html) == [] and "&lt;b&gt;w" in html and "<b>w</b>" not in html
    assert compare(traced(), traced())._repr_html_() == "<div>Nothing differs.</div>"


def test_columns_of_one_side_are_named() -> None:
    found = compare(Trace(start()), traced())
    assert found.only == ((), ("token_level_rewards", "advantages", "returns")) and not found.identical
    assert "only in the second step: token_level_rewards" in repr(found)


def test_looking_at_a_trace_on_disk_reads_parts_and_keeps_nothing(tmp_path: Path) -> None:
    from workbench.dataproto.value import Lazy

    trace = wb.Trace.load(wb.Trace.load("data/arith-batch").save(tmp_path / "t"))
    shown = trace._repr_html_() + repr(trace) + trace.batch._repr_html_() + trace["reward"]._repr_html_()
    shown += wb.views.samples(trace)._repr_html_() + wb.views.tokens(trace, 3)._repr_html_()
    assert "response_text" in shown
    written = [name for phase in trace for name in phase.wrote]
    raw = {**trace.batch.batch.raw(), **trace.batch.non_tensor_batch.raw()}
    assert len(written) > 10 and all(isinstance(raw[name], Lazy) for name in written)
