"""ExactKL: the KL to the reference over the whole vocabulary, beside the one-token estimates."""

from __future__ import annotations

from typing import Any

from workbench.dataproto import DataProto
from workbench.errors import PipelineError, message
from workbench.functional import kl_penalty, masked_mean
from workbench.metrics import Max, Mean, Metric
from workbench.stages.log_prob import SCORED_COLUMNS
from workbench.stages.stage import BaseStage, Outcome


class ExactKL(BaseStage):
    """Write `full_kl` [B, T], KL(policy‖reference) of every next-token distribution, in nats.

    Where the batch has both log-probs the estimators k1 and k3 stand beside it in the metrics: their mean is the same in
    expectation, their spread is not. Takes two forward passes and no gradient; an engine in this process can give it.
    Where a stage reads `full_kl` from a reward or an advantage function it is the penalty without sampling noise.
    """

    name = "exact_kl"
    reads = SCORED_COLUMNS
    writes = ("full_kl",)

    def __init__(self, engine: Any, reference: Any, *, temperature: float = 1.0) -> None:
        if not hasattr(engine, "full_kl") or not hasattr(reference, "model"):
            raise PipelineError(
                message(
                    "exact_kl", expected="an engine of this process and its reference()", do="use a one-token estimate"
                )
            )
        self._engine = engine
        self._reference = reference
        self.temperature = temperature

    def learners(self) -> tuple[Any, ...]:
        """The policy."""
        return (self._engine,)

    def __call__(self, batch: DataProto) -> Outcome:
        """B rows in, B rows with the exact KL out."""
        mask = batch["response_mask"]
        found = self._engine.full_kl(batch.select(list(SCORED_COLUMNS)), self._reference, self.temperature)
        metrics: dict[str, Metric] = {
            "actor/full_kl": Mean.of(float(masked_mean(found, mask)), float(mask.sum())),
            "actor/full_kl_max": Max(float((found * mask).max())),
        }
        if "old_log_probs" in batch and "ref_log_prob" in batch:
            for kind in ("k1", "k3"):
                estimate = kl_penalty(batch["old_log_probs"], batch["ref_log_prob"], kind)
                metrics[f"actor/full_kl_{kind}"] = Mean.of(float(masked_mean(estimate, mask)), float(mask.sum()))
        return Outcome(self.written(batch, {"full_kl": found}), metrics)
