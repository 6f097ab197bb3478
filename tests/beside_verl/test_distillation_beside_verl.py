"""Distillation losses beside verl's recorded ones: loss and gradient on twenty ragged batches, to 1e-5."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor
from verl_distillation import BATCHES, MODES, RECORDED, Batch, answers

import workbench as wb
from workbench.compat.verl_account import DISTILLATION
from workbench.engines.protocol import LossCounts
from workbench.stages import Divergence, PolicyLoss, TeacherAdvantage


def ours(batch: Batch, settings: dict[str, Any]) -> tuple[Tensor, Tensor]:
    logits, mask = batch.logits.clone().requires_grad_(), batch.mask
    tops = settings["loss_mode"] == "forward_kl_topk"
    log_probs, teacher = batch.sampled(logits), batch.teacher.log_softmax(-1)
    likeliest = teacher.topk(batch.top_k)
    rows = wb.DataProto(
        {
            "response_mask": mask.long(),
            "old_log_probs": log_probs.detach(),
            "teacher_log_probs": batch.sampled(batch.teacher),
            "teacher_top_log_probs": likeliest.values,
            "teacher_top_ids": likeliest.indices,
            "scored": torch.ones(len(mask), dtype=torch.bool),
        }
    )
    estimator, most = DISTILLATION[settings["loss_mode"]], settings.get("loss_max_clamp")
    sums = LossCounts(float(mask.sum()), float(len(mask)), float(mask.shape[1]))
    outputs = {"log_probs": log_probs}
    loss: Any
    if settings.get("use_policy_gradient"):
        rows = TeacherAdvantage(kl_type=estimator, loss_max_clamp=most)(rows).batch
        loss = PolicyLoss(loss_agg_mode=batch.aggregation)
    else:
        kinds: dict[str, Any] = {"log_prob_min_clamp": settings.get("log_prob_min_clamp")}
        kinds |= {"beta": 0.0, "top_k": batch.top_k, "tail": False} if tops else {}
        loss = Divergence(estimator=estimator, loss_max_clamp=most, loss_agg_mode=batch.aggregation, **kinds)
    if tops:
        chosen = mask.bool()
        values = loss.compare(rows, 1.0)(logits[chosen], slice(0, int(chosen.sum())))
        outputs["compared"] = torch.zeros(mask.shape).masked_scatter(chosen, values)
    value = loss(outputs, rows, sums).loss
    value.backward()
    assert logits.grad is not None
    return value.detach(), logits.grad


@pytest.mark.parametrize("mode", MODES)
def test_loss_and_gradient_are_verls(mode: str) -> None:
    wanted = json.loads(RECORDED.read_text())[mode]
    assert len(wanted) == BATCHES
    found = answers(ours, [mode])[mode]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=1e-5, atol=1e-5)
