"""The stage that corrects for a sampler whose probabilities are not the trainer's: it measures, weighs and rejects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.base.config import require
from workbench.dataproto.core import DataProto
from workbench.functional.correction import CorrectionSettings, corrected
from workbench.stages.stage import BaseStage, Outcome

PREFIX = "rollout_corr/"
"""What verl's names of these metrics begin with."""


class RolloutCorrection(BaseStage):
    """Measure the gap between sampler and trainer every step; weight or reject tokens and rows where asked.

    verl's `algorithm.rollout_correction`, decoupled: from `old_log_probs` and `rollout_log_probs` over `response_mask`.
    Without arguments it only measures. Formulas and names of metrics: `functional.correction`. The settings are those of
    `CorrectionSettings`; `recipes.with_rollout_correction` puts the stage where it belongs and sets the loss.

    Args:
        rollout_is: `token` or `sequence`: write importance weights as `rollout_is_weights` [B, T], which a
            `PolicyLoss(rollout_is=True)` multiplies with. They are those of the whole mask, whatever is rejected.
        rollout_is_threshold: where weights are truncated; lower and upper, `"0.5_5.0"`: outside they are 0.
        rollout_is_batch_normalize: divide the weights by their mean over the batch's tokens, or rows for `sequence`.
        rollout_rs: kinds of rejection, `"token_k1,seq_max_k2"`, or kind → threshold: write `loss_mask` [B, T], which is
            `response_mask` without the rejected tokens. `response_mask` stays as it is.
        rollout_rs_threshold: one threshold for all kinds, or one for each: `"0.5_2.0,0.01"`.
        bypass_mode: write the sampler's log-probs as the old ones, so that no old-log-prob stage is needed, and nothing
            else: weights, rejection and metrics then come from `PolicyLoss(bypass=CorrectionSettings(…))`, which knows
            the trainer's. Other settings beside it are refused.
    """

    name = "rollout_correction"

    def __init__(
        self,
        *,
        rollout_is: str | None = None,
        rollout_is_threshold: str | float | tuple[float, float] = 2.0,
        rollout_is_batch_normalize: bool = False,
        rollout_rs: str | Mapping[str, Any] | None = None,
        rollout_rs_threshold: str | float | None = None,
        bypass_mode: bool = False,
    ) -> None:
        self.correction = CorrectionSettings(
            rollout_is=rollout_is,
            rollout_is_threshold=rollout_is_threshold,
            rollout_is_batch_normalize=rollout_is_batch_normalize,
            rollout_rs=rollout_rs,
            rollout_rs_threshold=rollout_rs_threshold,
        )
        self.bypass_mode = bypass_mode
        weights, rejects = self.correction.rollout_is is not None, bool(self.correction.rejections)
        if bypass_mode:
            what, asked = "bypass_mode of the stage", " and ".join(["rollout_is"] * weights + ["rollout_rs"] * rejects)
            do = "take recipes.with_rollout_correction(pipeline, …), or give them to PolicyLoss(bypass=…)"
            expected = "neither weights nor rejection: both need the trainer's log-probs, which the loss has"
            require(not asked, what, expected=expected, found=asked, do=do)
        self.reads = ("rollout_log_probs", "response_mask") + (("old_log_probs",) if not bypass_mode else ())
        written = {"old_log_probs": bypass_mode, "rollout_is_weights": weights, "loss_mask": rejects}
        self.writes = tuple(name for name, wanted in written.items() if wanted)

    def settings(self) -> dict[str, Any]:
        """The settings of the correction, and `bypass_mode`, in one flat dict of numbers and texts."""
        return {**self.correction.to_dict(), "bypass_mode": self.bypass_mode}

    def __call__(self, batch: DataProto) -> Outcome:
        """B rows in, the same rows out with weights and the loss mask, where asked for."""
        rollout = batch["rollout_log_probs"]
        if self.bypass_mode:
            return Outcome(self.written(batch, {"old_log_probs": rollout.clone()}))
        made = corrected(batch["old_log_probs"], rollout, batch["response_mask"], self.correction)
        columns = {"rollout_is_weights": made.weights, "loss_mask": made.mask}
        metrics = {f"{PREFIX}{key}": value for key, value in made.metrics.items()}
        return Outcome(self.written(batch, {name: columns[name] for name in self.writes}), metrics)
