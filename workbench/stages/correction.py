"""Rollout correction: what to do about a sampler whose probabilities are not the trainer's."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from workbench.config import require
from workbench.dataproto import DataProto
from workbench.errors import SettingError, unknown
from workbench.functional.correction import (
    REJECTIONS,
    effective_sample_size,
    importance_weights,
    log_ratio,
    off_policy,
    rejected,
)
from workbench.functional.masking import masked_mean
from workbench.metrics import Max, Mean, Metric, Min
from workbench.stages.stage import BaseStage, Outcome


class RolloutCorrection(BaseStage):
    """Measure the gap between sampler and trainer every step; weigh or reject what is too far off, where asked.

    `rollout_is` (`token` or `sequence`) writes `rollout_is_weights`, which a `PolicyLoss(rollout_is=True)` multiplies with:
    truncated at `rollout_is_threshold`, or 0 outside a band where that is (lower, upper). `rollout_rs` maps kinds of
    rejection to their bound, a number or (lower, upper); what is rejected leaves `response_mask`. With neither it only
    measures. `bypass=True` takes the sampler's log-probs as the old ones, so that no old-log-prob stage is needed.
    verl's `algorithm.rollout_correction`.
    """

    name = "rollout_correction"

    def __init__(
        self,
        *,
        rollout_is: str | None = None,
        rollout_is_threshold: float | tuple[float, float] = 2.0,
        rollout_is_batch_normalize: bool = False,
        rollout_rs: Mapping[str, float | tuple[float, float]] | None = None,
        bypass: bool = False,
    ) -> None:
        require(
            rollout_is in (None, "token", "sequence"),
            "rollout_is",
            expected="token, sequence or None",
            found=rollout_is,
        )
        for kind in rollout_rs or {}:
            if kind not in REJECTIONS:
                raise SettingError(unknown("kind of rejection", kind, REJECTIONS))
        self.rollout_is = rollout_is
        self.rollout_is_threshold = rollout_is_threshold
        self.rollout_is_batch_normalize = rollout_is_batch_normalize
        self.rollout_rs = dict(rollout_rs or {})
        self.bypass = bypass
        self.reads = ("rollout_log_probs", "response_mask") + (("old_log_probs",) if not bypass else ())
        self.writes = (
            *(("old_log_probs",) * bypass),
            *(("rollout_is_weights",) * (rollout_is is not None)),
            *(("response_mask",) * bool(rollout_rs)),
        )

    def __call__(self, batch: DataProto) -> Outcome:
        """B rows in, B rows out; the mask may have lost tokens or rows."""
        mask, rollout = batch["response_mask"], batch["rollout_log_probs"]
        old = rollout if self.bypass else batch["old_log_probs"]
        columns: dict[str, torch.Tensor] = {"old_log_probs": rollout.clone()} if self.bypass else {}
        metrics: dict[str, Metric] = {key: Mean.of(value) for key, value in off_policy(old, rollout, mask).items()}
        if self.rollout_rs:
            columns["response_mask"] = kept = self._kept(old, rollout, mask, metrics)
            mask = kept
        if self.rollout_is is not None:
            columns["rollout_is_weights"] = self._weights(old, rollout, mask, metrics)
        return Outcome(self.written(batch, columns), {f"rollout_corr/{key}": value for key, value in metrics.items()})

    def _weights(
        self, old: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor, metrics: dict[str, Metric]
    ) -> torch.Tensor:
        lower, upper = _bounds(self.rollout_is_threshold)
        level = self.rollout_is or "token"
        weights = importance_weights(
            old, rollout, mask, level=level, upper=upper, lower=lower, batch_normalize=self.rollout_is_batch_normalize
        )
        inside = mask.bool()
        if inside.any():
            raw = log_ratio(old, rollout, mask)
            raw = raw.sum(-1, keepdim=True).expand_as(raw) if level == "sequence" else raw
            high, low = raw.exp() > upper, raw.exp() < (1 / upper if lower is None else lower)
            metrics |= {
                "rollout_is_mean": Mean.of(float(masked_mean(weights, mask))),
                "rollout_is_max": Max(float(weights[inside].max())),
                "rollout_is_min": Min(float(weights[inside].min())),
                "rollout_is_std": Mean.of(float(weights[inside].std(unbiased=False))),
                "rollout_is_eff_sample_size": Mean.of(effective_sample_size(weights, mask)),
                "rollout_is_ratio_fraction_high": Mean.of(float(masked_mean(high.float(), mask))),
                "rollout_is_ratio_fraction_low": Mean.of(float(masked_mean(low.float(), mask))),
                "rollout_is_oob_ratio": Mean.of(float(masked_mean((high | low).float(), mask))),
            }
            metrics |= _by_row(weights, mask)
        return weights

    def _kept(
        self, old: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor, metrics: dict[str, Metric]
    ) -> torch.Tensor:
        out = torch.zeros_like(mask, dtype=torch.bool)
        for kind, bound in self.rollout_rs.items():
            lower, upper = _bounds(bound)
            mine = rejected(old, rollout, mask, kind, upper=upper, lower=lower)
            metrics[f"rollout_rs_{kind}_fraction"] = Mean.of(float(masked_mean(mine.float(), mask)))
            out |= mine
        kept = mask * (~out).to(mask.dtype)
        rows = mask.sum(-1) > 0
        gone = (kept.sum(-1) == 0)[rows].double()
        metrics["rollout_rs_masked_fraction"] = Mean.of(float(masked_mean(out.float(), mask)))
        metrics["rollout_rs_seq_masked_fraction"] = Mean.of(float(gone.mean()) if len(gone) else 0.0)
        return kept


def _bounds(bound: float | tuple[float, float]) -> tuple[float | None, float]:
    return (None, float(bound)) if isinstance(bound, int | float) else (float(bound[0]), float(bound[1]))


def _by_row(weights: torch.Tensor, mask: torch.Tensor) -> dict[str, Metric]:
    """The rows' mean weights."""
    rows = masked_mean(weights, mask, dim=-1)[mask.sum(-1) > 0]
    return {
        "rollout_is_seq_mean": Mean.of(float(rows.mean())),
        "rollout_is_seq_std": Mean.of(float(rows.std(unbiased=False))),
        "rollout_is_seq_max": Max(float(rows.max())),
        "rollout_is_seq_min": Min(float(rows.min())),
        "rollout_is_seq_max_deviation": Max(float((rows - 1).abs().max())),
    }
