"""Influence: which rows and tokens of a batch help, or hurt, a held-out objective."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from workbench.config import require
from workbench.dataproto import DataProto
from workbench.engines.protocol import LossOutput, Normalisers
from workbench.errors import PipelineError, message
from workbench.metrics import Max, Mean, Metric, Min
from workbench.stages.log_prob import SCORED_COLUMNS
from workbench.stages.stage import BaseStage, Outcome


class _Objective:
    """−J of held-out rows: J = mean over their tokens of A·log π, with A = 1 where they have no advantages."""

    want = ("log_probs",)

    def __call__(self, outputs: Mapping[str, torch.Tensor], rows: DataProto, normalisers: Normalisers) -> LossOutput:
        mask = rows["response_mask"].float()
        weight = rows["advantages"] * mask if "advantages" in rows else mask
        return LossOutput(-(outputs["log_probs"] * weight).sum() / max(normalisers.tokens, 1))


class Influence(BaseStage):
    """Write `influence` [B, T]: how much a small plain-SGD step on each token would raise a held-out objective.

    To first order a step on token t's policy loss moves the weights along A_t·∇log π_t, and the objective J by its
    product with ∇J: (log π_t(θ + ε·∇J) − log π_t(θ)) / ε · A_t, one backward pass over the held-out rows and one forward
    pass with nudged weights. J is the mean over the held-out tokens of A·log π (A = 1 without a column `advantages`:
    making those responses likelier). Units: nats per unit of learning rate and token; a row's influence is the sum over
    its tokens; below 0 it hurts. Adam, clipping and the ratio are left out. Changes no weight.
    Pruthi et al. 2020 (TracIn), https://arxiv.org/abs/2002.08484, with a finite difference in place of the dot product.
    """

    name = "influence"
    reads = (*SCORED_COLUMNS, "advantages")
    writes = ("influence",)

    def __init__(self, engine: Any, heldout: DataProto, *, length: float = 1e-2, temperature: float = 1.0) -> None:
        require(length > 0, "length of the nudge", expected="> 0", found=length)
        if not (hasattr(engine, "gradient") and hasattr(engine, "nudged")):
            raise PipelineError(message("influence", expected="an engine that gives gradients and can be nudged"))
        missing = [name for name in SCORED_COLUMNS if name not in heldout]
        if missing:
            raise PipelineError(message("influence: held-out rows", expected="responses", found=f"no {missing[0]}"))
        self._engine = engine
        self._heldout = heldout.select([*SCORED_COLUMNS, *(("advantages",) * ("advantages" in heldout))])
        self.length = length
        self.temperature = temperature

    def learners(self) -> tuple[Any, ...]:
        """Whose gradients it asks for."""
        return (self._engine,)

    def __call__(self, batch: DataProto) -> Outcome:
        """B rows in, B rows with their influence out."""
        heldout, mask = self._heldout, batch["response_mask"]
        normalisers = Normalisers(tokens=float(heldout["response_mask"].sum()), sequences=float(len(heldout)))
        uphill = {
            name: -values
            for name, values in self._engine.gradient(heldout, _Objective(), normalisers, self.temperature).items()
        }
        norm = float(torch.stack([values.double().norm() for values in uphill.values()]).norm()) if uphill else 0.0
        if norm == 0:
            influence = torch.zeros(mask.shape)
        else:
            scale, rows = self.length / norm, batch.select(list(SCORED_COLUMNS))
            before = self._engine.score(rows, ("log_probs",), self.temperature)["log_probs"]
            with self._engine.nudged(uphill, scale):
                after = self._engine.score(rows, ("log_probs",), self.temperature)["log_probs"]
            influence = (after - before) / scale * batch["advantages"] * mask
        per_row = influence.sum(-1)
        metrics: dict[str, Metric] = {
            "influence/mean": Mean.of(float(per_row.double().mean()), len(batch)),
            "influence/max": Max(float(per_row.max())),
            "influence/min": Min(float(per_row.min())),
            "influence/gradient_norm": Mean.of(norm),
        }
        return Outcome(self.written(batch, {"influence": influence}), metrics)
