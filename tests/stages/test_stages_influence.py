"""Influence, checked against leaving the row out for real: one plain-SGD step with it and one without."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import workbench as wb
from workbench.base.errors import PipelineError
from workbench.engines.protocol import LossCounts, LossOutput
from workbench.rewards import Reward


def varied(response: str) -> float:
    return (sum(map(ord, response)) % 7) / 6


class Plain:
    """−Σ A·log π / tokens: what a plain-SGD step goes down on."""

    want = ("log_probs",)

    def __call__(self, outputs: Any, rows: wb.DataProto, loss_counts: LossCounts) -> LossOutput:
        weight = rows["advantages"] * rows["response_mask"]
        return LossOutput(-(outputs["log_probs"] * weight).sum() / loss_counts.tokens)


@pytest.fixture(scope="module")
def made() -> tuple[Any, wb.DataProto, wb.DataProto]:
    engine = wb.engines.local("data/tiny-arith", lr=1e-3, device="cpu")
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256, limit=16)
    pipe = wb.recipes.grpo(engine, Reward(varied, in_process=True), group_size=4, max_tokens=12, kl_coef=0.0)
    batch, eval_rows = (wb.Stepper(pipe, rows.batch(4, step=step)).run(until="advantage").batch for step in (1, 2))
    return engine, batch, eval_rows


def objective(engine: Any, eval_rows: wb.DataProto) -> float:
    logs = engine.compute_log_probs(eval_rows, ("log_probs",))["log_probs"].double()
    return float((logs * eval_rows["advantages"] * eval_rows["response_mask"]).sum() / eval_rows["response_mask"].sum())


@pytest.mark.slow
def test_it_is_what_leaving_a_row_out_does(made: Any) -> None:
    engine, batch, eval_rows = made
    before = engine.snapshot()["weights"]
    out = wb.stages.Influence(engine, eval_rows)(batch)
    per_row = out.batch["influence"].sum(-1)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), engine.snapshot()["weights"].values(), strict=True))
    tokens = float(batch["response_mask"].sum())
    rate, found, expected = 0.02, [], []
    every = torch.arange(len(batch))
    whole = engine.gradient(batch, Plain(), LossCounts(tokens=tokens, sequences=1.0))
    with engine.perturbed(whole, -rate):
        with_all = objective(engine, eval_rows)
    for row in range(0, len(batch), 2):
        rest = batch.select_idxs(every[every != row])
        less = engine.gradient(rest, Plain(), LossCounts(tokens=tokens, sequences=1.0))
        with engine.perturbed(less, -rate):
            found.append((with_all - objective(engine, eval_rows)) / rate * tokens)
        expected.append(float(per_row[row]))
    left_out, first_order = torch.tensor(found), torch.tensor(expected)
    correlation = torch.corrcoef(torch.stack([left_out, first_order]))[0, 1]
    assert float(correlation) > 0.97, (left_out, first_order)
    clear = first_order.abs() > first_order.abs().max() / 4
    assert torch.equal(left_out[clear].sign(), first_order[clear].sign())


def test_a_batch_helps_itself(made: Any) -> None:
    engine, batch, _ = made
    out = wb.stages.Influence(engine, batch)(batch)
    assert float(out.batch["influence"].sum()) > 0 and (out.batch["influence"][batch["response_mask"] == 0] == 0).all()
    still = batch.with_columns({"advantages": torch.zeros_like(batch["advantages"])})
    assert float(wb.stages.Influence(engine, still)(batch).batch["influence"].abs().sum()) == 0.0


def test_what_cannot_be_asked(made: Any) -> None:
    engine, batch, _ = made
    with pytest.raises(PipelineError, match="gives gradients"):
        wb.stages.Influence(object(), batch)
    with pytest.raises(PipelineError, match="expected responses"):
        wb.stages.Influence(engine, batch.without("input_ids"))
