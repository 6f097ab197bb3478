"""How far the policy that sampled is from the one that learns: measured in every step, and a limit to stop at."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from workbench.config import require
from workbench.metrics import Max, Mean, Metric

KL = "training/rollout_kl"
GAP = "training/rollout_probs_diff_mean"
LAG = "training/policy_lag/max"
_FAR = 20.0
"""Nats; a ratio beyond is as good as infinite, and its exponential must not be."""


def sampler_gap(mine: torch.Tensor, sampled: torch.Tensor, mask: torch.Tensor) -> dict[str, Metric]:
    """Trainer's and sampler's log-probs [B, T] of the same tokens: the differences of their probabilities (verl's names; the
    correlation is 1 where they agree), the largest of their log-probs, and KL(sampler ‖ trainer) in nats a token.
    """
    inside = mask.bool()
    logs = [values[inside].double() for values in (mine, sampled)]
    p, q = (values.exp() for values in logs)
    gap, count = (p - q).abs(), len(p)
    ratio = (logs[0] - logs[1]).clamp(-_FAR, _FAR)
    metrics: dict[str, Metric] = {
        "training/rollout_probs_diff_valid": Max(1.0),
        "training/rollout_probs_diff_max": Max(float(gap.max())),
        GAP: Mean.of(float(gap.mean()), count),
        "training/rollout_probs_diff_std": Mean.of(float(gap.std(unbiased=False)), count),
        "training/rollout_log_probs_diff_max": Max(float((logs[0] - logs[1]).abs().max())),
        KL: Mean.of(float((torch.expm1(ratio) - ratio).mean()), count),
    }
    if count > 1 and float(p.std()) > 0 and float(q.std()) > 0:
        correlation = float(torch.corrcoef(torch.stack([p, q]))[0, 1])
        metrics["training/rollout_actor_probs_pearson_corr"] = Mean.of(correlation, count)
    return metrics


def version_lag(version: int, rows: torch.Tensor) -> dict[str, Metric]:
    """How many versions the rows are behind the policy that learns from them: the mean, and of the oldest."""
    if not len(rows):
        return {}
    lag = (version - rows).double()
    return {"training/policy_lag/mean": Mean.of(float(lag.mean()), len(rows)), LAG: Max(float(lag.max()))}


class OffPolicy:
    """A `break_if` that stops before an update from rows of another policy: `train(…, break_if=OffPolicy(lag=0))`.

    `kl` bounds KL(sampler ‖ trainer) in nats a token, `gap` the mean difference of probabilities, `lag` the versions that
    rows may be behind; None does not look. Where two engines agree the gap is near 1e-6 in float32 and 1e-2 in bfloat16; the
    usual limits leave room for the latter. What is not a number is over its limit.
    """

    def __init__(self, *, kl: float | None = 0.02, gap: float | None = 0.05, lag: int | None = None) -> None:
        limits = {KL: kl, GAP: gap, LAG: lag}
        for name, limit in limits.items():
            require(limit is None or limit >= 0, name, expected="≥ 0, or None", found=limit)
        self.limits: dict[str, float] = {name: limit for name, limit in limits.items() if limit is not None}

    def __call__(self, metrics: Mapping[str, Any]) -> bool:
        """Whether a step's metrics are over a limit; one that was not measured is not."""
        return bool(self._over(metrics))

    def why(self, metrics: Mapping[str, Any]) -> str:
        """What is over its limit, in a line."""
        return ", ".join(f"{name} {metrics[name]:.3g}, limit {self.limits[name]:g}" for name in self._over(metrics))

    def _over(self, metrics: Mapping[str, Any]) -> list[str]:
        return [name for name, limit in self.limits.items() if name in metrics and not metrics[name] <= limit]

    def __repr__(self) -> str:
        return f"OffPolicy({', '.join(f'{name} ≤ {limit:g}' for name, limit in self.limits.items())})"
