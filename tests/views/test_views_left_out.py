"""Rows that were left out of a step, each with the reason: of a trace, of a batch, from disk, of an older trace."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.lint import lint

import workbench as wb
from workbench.dataproto.value import Origin
from workbench.rewards import Score, Status
from workbench.stages.filtering import NO_SIGNAL, SURPLUS
from workbench.stages.stage import LEFT_OUT
from workbench.steps.trace import Phase
from workbench.testing.rewards import answered

REWARDS = [0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 1.0]


def judged() -> wb.DataProto:
    """Four prompts of two: the first says nothing; row 3 was not scored, row 5 counts as 0, row 7's episode failed."""
    batch = answered([f"text {row} <b>" for row in range(8)], uid=[f"p{row // 2}" for row in range(8)])
    scores = [Score(value=value, why="so") for value in REWARDS]
    scores[3] = Score(status=Status.INFRA_ERROR, why="HTTP 500", error="Traceback")
    scores[5] = Score(status=Status.COUNTED, why="counted as 0 by policy: HTTP 500")
    extra: list[dict[str, object]] = [{} for _ in range(8)]
    extra[7] = {"errors": ["the parser failed"]}
    return batch.with_columns(
        {
            "reward": torch.tensor(REWARDS),
            "scored": torch.tensor([row != 3 for row in range(8)]),
            "score": scores,
            "agent_extra": extra,
        }
    )


def filtered(batch: wb.DataProto, staying: list[int], **told: object) -> wb.Trace:
    """The batch after its reward, then after a stage that kept some rows."""
    reward = Phase(stage="reward", batch=batch, wrote=batch.columns, metrics={}, settings={})
    kept = Phase(stage="filter_groups", batch=batch.select_idxs(staying), wrote=(), metrics={}, settings={}, **told)  # type: ignore[arg-type]
    return wb.Trace(answered([]).without("response_text"), (reward, kept))


UNTRAINED = {
    3: "infra error: HTTP 500",
    5: "counted: counted as 0 by policy: HTTP 500",
    7: "failed episode: the parser failed",
}


def test_a_batch_says_which_rows_were_not_judged_as_they_should_be() -> None:
    view = wb.views.samples(judged(), order="index")
    left = view.left_out
    assert left is not None and left.left_out is None
    frame = left.frame
    assert dict(zip(frame["of_row"], frame[LEFT_OUT], strict=True)) == UNTRAINED
    assert frame["tokens"].tolist() == view.frame["tokens"][[3, 5, 7]].tolist()
    title = "3 rows left out: 1 × infra error, 1 × counted, 1 × failed episode"
    assert f"{title}: see .left_out" in view.text()
    page = view.html()
    assert lint(page) == [] and f'<summary style="cursor:pointer">{title}' in page and "<details open" not in page
    assert "text 3 &lt;b&gt;" in page and "infra error: HTTP 500" in left.row(0).text()


def test_what_a_stage_dropped_is_told_from_its_trace(tmp_path: Path) -> None:
    rows = [2, 3, 4, 5, 6, 7]
    trace = filtered(judged(), rows, rows=torch.tensor(rows))
    for one in (trace, wb.Trace.load(trace.save(tmp_path / "t"))):
        left = wb.views.samples(one).left_out
        assert left is not None
        frame = left.frame
        assert frame[LEFT_OUT].tolist()[:2] == [NO_SIGNAL] * 2 and frame["of_row"].tolist() == [None, None, 1, 3, 5]
        assert frame["response"].tolist()[0] == "text 0 <b>" and left.index.headline.startswith("5 samples")
        assert "5 rows left out: 2 × all samples of its prompt have one reward" in repr(one)
        page = one._repr_html_()
        assert page is not None and lint(page) == [] and "text 0 &lt;b&gt;" in page


def test_what_a_stage_recorded_is_kept_on_disk(tmp_path: Path) -> None:
    told = wb.DataProto(
        {"reward": torch.tensor([1.0]), "scored": torch.tensor([True])},
        {"uid": ["x"], "response_text": ["beyond"], LEFT_OUT: [SURPLUS], "score": [Score(value=1.0)]},
    )
    trace = wb.Trace.load(filtered(judged(), list(range(8)), dropped=told).save(tmp_path / "t"))
    left = wb.views.samples(trace).left_out
    assert left is not None and left.frame[LEFT_OUT].tolist() == [SURPLUS, *UNTRAINED.values()]
    assert left.frame["tokens"].isna().tolist() == [True, False, False, False], (
        "no tokens are kept of what was thrown away"
    )
    assert "beyond" in left.text() and lint(left.html()) == []


def test_an_older_trace_that_recorded_no_rows_tells_by_its_prompts() -> None:
    left = wb.views.samples(filtered(judged(), [2, 3, 4, 5, 6, 7])).left_out
    assert left is not None and left.frame[LEFT_OUT].tolist()[:2] == [NO_SIGNAL] * 2


def test_rejected_rows_and_rows_of_other_stages() -> None:
    batch = judged().without("agent_extra", "score")
    mask = batch["response_mask"].clone()
    mask[4] = 0
    batch = batch.with_columns({"loss_mask": mask}, origin=Origin(stage="rollout_correction", step=1))
    trace = filtered(batch, [0, 1, 2, 3, 4, 5, 6], rows=torch.tensor([0, 1, 2, 3, 4, 5, 6]))
    kept = replace(trace.phases[1], stage="mine")
    left = wb.views.samples(wb.Trace(trace.start, (trace.phases[0], kept))).left_out
    assert left is not None
    assert left.frame[LEFT_OUT].tolist() == [
        "dropped by the stage mine",
        "not scored",
        "rejected: rollout_correction masks all tokens of the row",
    ]
    assert wb.views.samples(batch.without("loss_mask", "scored")).left_out is None


@pytest.mark.parametrize("rows", [400])
def test_many_rows_left_out_stay_small(rows: int) -> None:
    batch = answered(["word " * 200] * rows, uid=[str(row) for row in range(rows)])
    batch = batch.with_columns({"reward": torch.zeros(rows), "scored": torch.arange(rows) % 2 == 0})
    view = wb.views.samples(batch)
    assert view.left_out is not None and len(view.left_out.index.frame) == rows // 2 and len(view.html()) < 60_000
