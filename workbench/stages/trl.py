"""TRL's GRPO loss as a loss of an `Update`, and the stage that leaves truncated responses out of the loss."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.base.config import require
from workbench.base.metrics import Mean, Metric
from workbench.dataproto.core import DataProto
from workbench.engines.protocol import LossCounts, LossOutput
from workbench.functional import trl
from workbench.functional.masking import kept
from workbench.stages.measures import mean
from workbench.stages.stage import BaseStage, Outcome
from workbench.stages.terms import loss_mask
from workbench.stages.update import PolicyLoss, _mean, _sum


@dataclass(frozen=True, kw_only=True)
class TrlLoss(PolicyLoss):
    """The loss of TRL 1.16's `GRPOTrainer`: pg·weights + kl_coef·KL as its `loss_type` divides, minus entropy_coeff·H.

    Of `PolicyLoss` it uses `clip_ratio_low`, `clip_ratio_high` (of cispo the cap itself), `tau_pos`, `tau_neg`, `kl_coef`,
    `entropy_coeff`, `rollout_is` and `loss_scale_factor` (`max_completion_length` of dr_grpo). There is no dual clip. Rows
    without a token are counted where rows are divided by. H is the mean over all tokens that the policy term learns from.
    A quantile of entropies is that of a micro-batch, as TRL's. Formulas: `functional.trl`.
    """

    loss_type: str = "dapo"
    """One of `functional.trl.LOSS_TYPES`."""
    importance_sampling_level: str = "token"
    """Whose ratio: `token`, or `sequence` (GSPO's mean over a row)."""
    delta: float | None = None
    """Largest ratio where the advantage is negative (two-sided clip); None: no bound."""
    vespo_pos: tuple[float, float] = (2.0, 3.0)
    """vespo: k and λ for advantages ≥ 0."""
    vespo_neg: tuple[float, float] = (3.0, 2.0)
    """vespo: k and λ for negative advantages."""
    use_bias_correction_kl: bool = True
    """Multiply the KL by the ratio, which is TRL's default."""
    off_policy_sampler: bool = False
    """Measure the distance of `off_policy_mask_threshold` from the sampler's log-probs, as TRL does with vLLM."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.bypass is None, "bypass of a TrlLoss", expected="None", found=self.bypass)
        for name, known in (("loss_type", trl.LOSS_TYPES), ("importance_sampling_level", trl.LEVELS)):
            require(getattr(self, name) in known, name, expected=", ".join(known), found=getattr(self, name))
        fits = self.delta is None or self.delta > 0
        require(fits, "delta", expected="a number > 0, or None", found=self.delta)

    def __call__(self, outputs: Mapping[str, Tensor], rows: DataProto, loss_counts: LossCounts) -> LossOutput:
        """Compute the loss of one micro-batch, its metrics, and the columns named in `writes`."""
        mask, new, old = loss_mask(rows), outputs["log_probs"], rows["old_log_probs"]
        names = inspect.signature(trl.trl_loss).parameters
        taken = {name: value for name, value in self.to_dict().items() if name in names}
        weights = rows["rollout_is_weights"] if self.rollout_is else None
        held = trl.trl_loss(old, new, rows["advantages"], mask, **taken, weights=weights)
        metrics: dict[str, Metric] = {f"actor/{name}": _mean(one, mask) for name, one in held.metrics.items()}
        near, chosen = self._acting(outputs, rows, old, mask, metrics)
        loss = pg_loss = self._divided(held.loss * near * chosen, mask, loss_counts)
        metrics |= {"actor/pg_loss": _sum(pg_loss), **self._measured(outputs, chosen)}
        if self.kl_coef:
            logs = trl.log_ratios(old, new, mask, self.importance_sampling_level)
            ratio = logs if self.use_bias_correction_kl else None
            kl = self._divided(trl.reference_kl(new, rows["ref_log_prob"], ratio, mask), mask, loss_counts)
            loss = loss + self.kl_coef * kl
            metrics |= {"actor/kl_loss": _sum(kl), "actor/kl_coef": Mean(self.kl_coef)}
        if self.entropy_coeff:
            tokens = loss_counts.tokens * chosen.sum() / mask.sum().clamp(min=1)
            entropy = (kept(outputs["entropy"], mask) * chosen).sum() / tokens.clamp(min=1)
            loss = loss - self.entropy_coeff * entropy
            metrics["actor/entropy_loss"] = _sum(entropy)
        columns = {"new_log_probs": (new * rows["response_mask"]).detach(), "clipped": held.clipped}
        return LossOutput(loss, metrics, columns)

    def _divided(self, values: Tensor, mask: Tensor, counts: LossCounts) -> Tensor:
        rows = counts.sequences if counts.rows is None else counts.rows
        longest = self.loss_scale_factor or counts.width or float(mask.shape[-1])
        by = trl.LOSS_TYPES[self.loss_type]
        return trl.divided(values, mask, by, tokens=counts.tokens, rows=rows, longest=longest)


class MaskTruncated(BaseStage):
    """Leave responses that were cut at `max_tokens` out of the loss, by `loss_mask`; their rewards stay in their groups.

    So the advantages of the others are what they were, and each stays with its row. Where every response was cut there is
    nothing to learn from. DAPO's overlong filtering, Yu et al. 2025, https://arxiv.org/abs/2503.14476, §3.4; TRL's
    `mask_truncated_completions`.
    """

    name = "mask_truncated"
    reads = ("response_mask", "finish_reason")
    writes = ("loss_mask",)
    optional = ("loss_mask",)

    def __call__(self, batch: DataProto) -> Outcome:
        """Return the same B rows with their `loss_mask`; the metric `mask_truncated/share` is the share of rows left out."""
        cut = torch.tensor([one == "length" for one in batch["finish_reason"]], dtype=torch.bool)
        mask = batch["loss_mask" if "loss_mask" in batch else "response_mask"]
        kept_rows = mask * (~cut)[:, None].to(mask.dtype)
        return Outcome(self.written(batch, {"loss_mask": kept_rows}), mean("mask_truncated/share", cut))
