"""Stages that only measure: the influence of rows and tokens on a held-out objective, and the exact KL."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from workbench.base.config import require
from workbench.base.errors import PipelineError
from workbench.base.metrics import Max, Mean, Metric
from workbench.dataproto.core import DataProto
from workbench.engines.protocol import (
    Differentiable,
    LogProbModel,
    LossCounts,
    LossOutput,
    WholeDistributions,
    WholeModel,
)
from workbench.functional.kl import kl_penalty
from workbench.functional.masking import masked_mean
from workbench.stages.log_prob import SCORED_COLUMNS, scored_columns
from workbench.stages.stage import BaseStage, Outcome, spread


class _Objective:
    """−J of held-out rows: J = mean over their tokens of A·log π, with A = 1 where they have no advantages."""

    want = ("log_probs",)

    def __call__(self, outputs: Mapping[str, torch.Tensor], rows: DataProto, loss_counts: LossCounts) -> LossOutput:
        mask = rows["response_mask"].float()
        weight = rows["advantages"] * mask if "advantages" in rows else mask
        return LossOutput(-(outputs["log_probs"] * weight).sum() / max(loss_counts.tokens, 1))


class Influence(BaseStage):
    """Write `influence` [B, T]: how much a small plain-SGD step on each token would raise a held-out objective.

    To first order a step on token t's policy loss moves the weights along A_t·∇log π_t, and the objective J by its
    product with ∇J: (log π_t(θ + ε·∇J) − log π_t(θ)) / ε · A_t with ε = `length`/‖∇J‖, one backward pass over the held-out
    rows and one forward pass with perturbed weights. J is the mean over the held-out tokens of A·log π (A = 1 without a
    column `advantages`: making those responses likelier). Units: nats per unit of learning rate and token; a row's
    influence is the sum over its tokens; below 0 it hurts. Adam, clipping and the ratio are left out. No weight is changed.
    Pruthi et al. 2020 (TracIn), https://arxiv.org/abs/2002.08484, with a finite difference in place of the dot product.
    """

    name = "influence"
    reads = (*SCORED_COLUMNS, "advantages")
    writes = ("influence",)

    def __init__(
        self, engine: Differentiable, eval_rows: DataProto, *, length: float = 1e-2, temperature: float = 1.0
    ) -> None:
        require(length > 0, "length (of the weight perturbation)", expected="> 0", found=length)
        if not (isinstance(engine, Differentiable) and isinstance(engine, LogProbModel)):
            expected, found = "one that gives gradients (local, FSDP)", type(engine).__name__
            raise PipelineError("engine of Influence", expected=expected, found=found)
        missing = [name for name in SCORED_COLUMNS if name not in eval_rows]
        if missing:
            raise PipelineError("eval_rows of Influence", expected="responses", found=f"no column {missing[0]!r}")
        self._engine = engine
        self._learners = (engine,)
        self._eval_rows = eval_rows.select(
            [*scored_columns(eval_rows, policy=True), *(("advantages",) * ("advantages" in eval_rows))]
        )
        self.length = length
        self.temperature = temperature

    def __call__(self, batch: DataProto) -> Outcome:
        """B rows in, B rows with their influence out."""
        eval_rows, mask = self._eval_rows, batch["response_mask"]
        loss_counts = LossCounts(tokens=float(eval_rows["response_mask"].sum()), sequences=float(len(eval_rows)))
        downhill = self._engine.gradient(eval_rows, _Objective(), loss_counts, self.temperature)
        uphill = {name: -values for name, values in downhill.items()}
        norm = float(torch.stack([values.double().norm() for values in uphill.values()]).norm()) if uphill else 0.0
        if norm == 0:
            influence = torch.zeros(mask.shape)
        else:
            scale, rows = self.length / norm, batch.select(scored_columns(batch, policy=True))
            before = self._engine.compute_log_probs(rows, ("log_probs",), self.temperature)["log_probs"]
            with self._engine.perturbed(uphill, scale):
                after = self._engine.compute_log_probs(rows, ("log_probs",), self.temperature)["log_probs"]
            influence = (after - before) / scale * batch["advantages"] * mask
        metrics = {**spread("influence", influence.sum(-1)), "influence/gradient_norm": Mean.of(norm)}
        return Outcome(self.written(batch, {"influence": influence}), metrics)


class ExactKL(BaseStage):
    """Write `full_kl` [B, T], KL(policy‖reference) of every next-token distribution, in nats.

    Where the batch has both log-probs, the metrics also have the estimators k1 and k3: their mean is the same in
    expectation, their variance is not. Takes two forward passes and no gradient, by a local or FSDP engine.
    A reward or advantage function that reads `full_kl` gets a KL penalty without sampling noise.
    """

    name = "exact_kl"
    reads = SCORED_COLUMNS
    optional = ("old_log_probs", "ref_log_prob")
    writes = ("full_kl",)

    def __init__(self, engine: WholeDistributions, reference: WholeModel, *, temperature: float = 1.0) -> None:
        if not isinstance(engine, WholeDistributions) or not isinstance(reference, WholeModel):
            expected, do = "a local or FSDP engine, and its reference()", "use a one-token estimate of the KL (kl_type)"
            raise PipelineError("engine and reference of ExactKL", expected=expected, do=do)
        self._engine = engine
        self._learners = (engine,)
        self._reference = reference
        self.temperature = temperature

    def __call__(self, batch: DataProto) -> Outcome:
        """B rows in, B rows with the exact KL out."""
        mask = batch["response_mask"]
        found = self._engine.full_kl(batch.select(scored_columns(batch)), self._reference, self.temperature)
        metrics: dict[str, Metric] = {
            "actor/full_kl": Mean.of(float(masked_mean(found, mask)), float(mask.sum())),
            "actor/full_kl_max": Max(float((found * mask).max())),
        }
        if "old_log_probs" in batch and "ref_log_prob" in batch:
            for kind in ("k1", "k3"):
                estimate = kl_penalty(batch["old_log_probs"], batch["ref_log_prob"], kind)
                metrics[f"actor/full_kl_{kind}"] = Mean.of(float(masked_mean(estimate, mask)), float(mask.sum()))
        return Outcome(self.written(batch, {"full_kl": found}), metrics)
