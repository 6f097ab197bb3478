"""Log-probs of the sampled tokens, and their gap to the sampler's own: measured, limited, corrected."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from workbench.base.config import require
from workbench.base.errors import SettingError, unknown
from workbench.base.metrics import Max, Mean, Metric, Min
from workbench.dataproto.core import DataProto
from workbench.engines.protocol import LogProbModel, Stateful
from workbench.functional.correction import (
    REJECTIONS,
    effective_sample_size,
    importance_weights,
    log_ratio,
    off_policy,
    rejected,
)
from workbench.functional.masking import masked_mean
from workbench.stages.stage import BaseStage, Outcome, spread

SCORED_COLUMNS = ("input_ids", "attention_mask", "position_ids", "response_mask")
"""What any scoring pass reads."""


class LogProb(BaseStage):
    """Compute the log-prob of every response token under a model, at the temperature that it was sampled with.

    Args:
        model: the policy, or a frozen reference.
        name: the name of the stage.
        column: the column in which the log-probs [B, T] are written, in nats.
        entropy: write `entropys` [B, T] and the metric `actor/entropy` as well; where the batch has the rollout's own
            log-probs, also measure how far they are (see `OffPolicy`), with each row's largest difference as the column
            `sampler_logprob_diff`.
        temperature: what the logits are divided by.
        sum_pi_squared: write `sum_pi_squared` [B, T], which the optimal token baselines read.
    """

    def __init__(
        self,
        model: LogProbModel,
        *,
        name: str = "old_log_prob",
        column: str = "old_log_probs",
        entropy: bool = False,
        temperature: float = 1.0,
        sum_pi_squared: bool = False,
    ) -> None:
        self._model = model
        self._learners = (model,) if isinstance(model, Stateful) else ()  # a frozen reference owns no version
        self.name = name
        self.column = column
        self.entropy = entropy
        self.temperature = temperature
        self.reads = SCORED_COLUMNS
        self.sum_pi_squared = sum_pi_squared
        further = {"entropy": ("entropys", entropy), "sum_pi_squared": ("sum_pi_squared", sum_pi_squared)}
        self._wanted = {"log_probs": column, **{key: name for key, (name, wanted) in further.items() if wanted}}
        self.writes = tuple(self._wanted.values())

    def __call__(self, batch: DataProto) -> Outcome:
        """B rows in, B rows with log-probs out."""
        rows = batch.select(list(SCORED_COLUMNS))
        scores = self._model.compute_log_probs(rows, tuple(self._wanted), self.temperature)
        columns = {name: scores[key] for key, name in self._wanted.items()}
        metrics: dict[str, Metric] = {}
        if self.entropy:
            mask = batch["response_mask"]
            metrics["actor/entropy"] = Mean.of(masked_mean(scores["entropy"], mask).item(), mask.sum().item())
            if "rollout_log_probs" in batch and mask.any():
                metrics |= sampler_logprob_diff(scores["log_probs"], batch["rollout_log_probs"], mask)
                gaps = (scores["log_probs"] - batch["rollout_log_probs"]).abs().masked_fill(mask == 0, 0.0)
                columns["sampler_logprob_diff"] = gaps.amax(-1)
        for learner in self.learners() if "policy_version" in batch else ():
            metrics |= version_lag(learner.version, batch["policy_version"])
        return Outcome(self.written(batch, columns), metrics)


class Values(BaseStage):
    """Compute the critic's value of every response token, `values` [B, T]."""

    name = "values"
    reads = SCORED_COLUMNS
    writes = ("values",)

    def __init__(self, critic: LogProbModel) -> None:
        self._critic = critic
        self._learners = (critic,)

    def __call__(self, batch: DataProto) -> Outcome:
        """B rows in, B rows with `values` out."""
        values = self._critic.compute_log_probs(batch.select(list(SCORED_COLUMNS)), ("values",))["values"]
        metrics = spread("critic/values", values[batch["response_mask"].bool()])
        return Outcome(self.written(batch, {"values": values}), metrics)


KL = "training/rollout_kl"
GAP = "training/rollout_probs_diff_mean"
LAG = "training/policy_lag/max"
_FAR = 20.0
"""Nats; a ratio beyond is as good as infinite, and its exponential must not be."""


def sampler_logprob_diff(mine: Tensor, sampled: Tensor, mask: Tensor) -> dict[str, Metric]:
    """Metrics of the gap between the trainer's (`mine`) and the sampler's (`sampled`) log-probs of the same tokens, [B, T].

    Differences and correlation of probabilities (verl's names), the largest difference of log-probs, KL in nats per token.
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
        "training/rollout_probs_diff_std": Mean.of(float(gap.std(correction=min(1, count - 1))), count),
        "training/rollout_log_probs_diff_max": Max(float((logs[0] - logs[1]).abs().max())),
        KL: Mean.of(float((torch.expm1(ratio) - ratio).mean()), count),
    }
    if count > 1 and float(p.std()) > 0 and float(q.std()) > 0:
        correlation = float(torch.corrcoef(torch.stack([p, q]))[0, 1])
        metrics["training/rollout_actor_probs_pearson_corr"] = Mean.of(correlation, count)
    return metrics


def version_lag(version: int, rows: Tensor) -> dict[str, Metric]:
    """Metrics: how many policy versions the rows [B] are behind `version`, on average and at most; {} without rows."""
    if not len(rows):
        return {}
    lag = (version - rows).double()
    return {"training/policy_lag/mean": Mean.of(float(lag.mean()), len(rows)), LAG: Max(float(lag.max()))}


class OffPolicy:
    """A `break_if` for `train` that stops a run before it updates on rows too far off-policy: `break_if=OffPolicy(lag=0)`.

    None leaves a limit out; a metric that is NaN is over its limit. Where two engines agree the gap is near 1e-6 in float32
    and 1e-2 in bfloat16; the defaults leave room for the latter.

    Args:
        kl: limit of KL(sampler‖trainer), in nats per token.
        gap: limit of the mean difference of probabilities.
        lag: limit of the number of policy versions that rows are behind.
    """

    def __init__(self, *, kl: float | None = 0.02, gap: float | None = 0.05, lag: int | None = None) -> None:
        limits = {KL: kl, GAP: gap, LAG: lag}
        for name, limit in limits.items():
            require(limit is None or limit >= 0, f"limit of {name}", expected="≥ 0, or None", found=limit)
        self.limits: dict[str, float] = {name: limit for name, limit in limits.items() if limit is not None}

    def __call__(self, metrics: Mapping[str, Any]) -> bool:
        """Whether one of a step's metrics is over its limit; a metric that was not measured is not."""
        return bool(self._over(metrics))

    def why(self, metrics: Mapping[str, Any]) -> str:
        """The metrics that are over their limits, with values and limits, in one line."""
        return ", ".join(f"{name} {metrics[name]:.3g}, limit {self.limits[name]:g}" for name in self._over(metrics))

    def _over(self, metrics: Mapping[str, Any]) -> list[str]:
        return [name for name, limit in self.limits.items() if name in metrics and not metrics[name] <= limit]

    def __repr__(self) -> str:
        return f"OffPolicy({', '.join(f'{name} ≤ {limit:g}' for name, limit in self.limits.items())})"


class RolloutCorrection(BaseStage):
    """Measure the gap between sampler and trainer every step; weight or reject tokens and rows where asked.

    verl's `algorithm.rollout_correction`. Without arguments it only measures.

    Args:
        rollout_is: `token` or `sequence`: write importance weights as `rollout_is_weights`, which a
            `PolicyLoss(rollout_is=True)` multiplies with.
        rollout_is_threshold: where weights are truncated; (lower, upper): outside this band they are 0.
        rollout_is_batch_normalize: divide the weights by their mean over the batch.
        rollout_rs: kind of rejection → its bound, a number or (lower, upper); rejected tokens get 0 in `response_mask`.
        bypass: use the sampler's log-probs as the old ones, so that no old-log-prob stage is needed.
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
        levels = (None, "token", "sequence")
        require(rollout_is in levels, "rollout_is", expected="token, sequence or None", found=rollout_is)
        for kind in rollout_rs or {}:
            if kind not in REJECTIONS:
                raise SettingError(unknown("kind of rejection", kind, REJECTIONS))
        self.rollout_is = rollout_is
        self.rollout_is_threshold = rollout_is_threshold
        self.rollout_is_batch_normalize = rollout_is_batch_normalize
        self.rollout_rs = dict(rollout_rs or {})
        self.bypass = bypass
        self.reads = ("rollout_log_probs", "response_mask") + (("old_log_probs",) if not bypass else ())
        written = {"old_log_probs": bypass, "rollout_is_weights": rollout_is is not None, "response_mask": rollout_rs}
        self.writes = tuple(name for name, wanted in written.items() if wanted)

    def __call__(self, batch: DataProto) -> Outcome:
        """B rows in, B rows out; the mask may have lost tokens or rows."""
        mask, rollout = batch["response_mask"], batch["rollout_log_probs"]
        old = rollout if self.bypass else batch["old_log_probs"]
        columns: dict[str, Tensor] = {"old_log_probs": rollout.clone()} if self.bypass else {}
        metrics: dict[str, Metric] = {key: Mean.of(value) for key, value in off_policy(old, rollout, mask).items()}
        if self.rollout_rs:
            columns["response_mask"] = mask = self._kept(old, rollout, mask, metrics)
        if self.rollout_is is not None:
            columns["rollout_is_weights"] = self._weights(old, rollout, mask, metrics)
        return Outcome(self.written(batch, columns), {f"rollout_corr/{key}": value for key, value in metrics.items()})

    def _weights(self, old: Tensor, rollout: Tensor, mask: Tensor, metrics: dict[str, Metric]) -> Tensor:
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
            rows = masked_mean(weights, mask, dim=-1)[mask.sum(-1) > 0]
            shares = {"ratio_fraction_high": high, "ratio_fraction_low": low, "oob_ratio": high | low}
            metrics |= {
                **_spread("rollout_is", weights[inside], mean=masked_mean(weights, mask)),
                "rollout_is_eff_sample_size": Mean.of(effective_sample_size(weights, mask)),
                **{f"rollout_is_{key}": Mean.of(float(masked_mean(one.float(), mask))) for key, one in shares.items()},
                **_spread("rollout_is_seq", rows, mean=rows.mean()),
                "rollout_is_seq_max_deviation": Max(float((rows - 1).abs().max())),
            }
        return weights

    def _kept(self, old: Tensor, rollout: Tensor, mask: Tensor, metrics: dict[str, Metric]) -> Tensor:
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


def _spread(name: str, weights: Tensor, mean: Tensor) -> dict[str, Metric]:
    return {
        f"{name}_mean": Mean.of(float(mean)),
        f"{name}_std": Mean.of(float(weights.std(unbiased=False))),
        f"{name}_max": Max(float(weights.max())),
        f"{name}_min": Min(float(weights.min())),
    }
