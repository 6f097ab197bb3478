"""Log-probs of the sampled tokens, and their gap to the sampler's own: measured and limited."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from workbench.base.config import require, settings_hash
from workbench.base.metrics import Max, Mean, Metric
from workbench.dataproto.columns import EXPERTS, PIXELS
from workbench.dataproto.core import DataProto
from workbench.engines.protocol import LogProbModel, Stateful
from workbench.functional.masking import masked_mean
from workbench.stages.stage import BaseStage, Outcome, spread

SCORED_COLUMNS = ("input_ids", "attention_mask", "position_ids", "response_mask")
"""What any scoring pass reads."""


def scored_columns(batch: DataProto, policy: bool = False) -> list[str]:
    """List the batch's columns that a scoring pass reads: `SCORED_COLUMNS`, the model's inputs for pictures, and with
    `policy` the routed experts."""
    return [*SCORED_COLUMNS, *(PIXELS,) * (PIXELS in batch), *(EXPERTS,) * (policy and EXPERTS in batch)]


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
        self.optional: tuple[str, ...] = (PIXELS, *(EXPERTS,) * bool(self._learners))
        self.sum_pi_squared = sum_pi_squared
        further = {"entropy": ("entropys", entropy), "sum_pi_squared": ("sum_pi_squared", sum_pi_squared)}
        self._wanted = {"log_probs": column, **{key: name for key, (name, wanted) in further.items() if wanted}}
        self.writes = tuple(self._wanted.values())

    def __call__(self, batch: DataProto) -> Outcome:
        """Return the same B rows with their log-probs."""
        rows = batch.select(scored_columns(batch, policy=bool(self._learners)))
        scores = self._model.compute_log_probs(rows, tuple(self._wanted), self.temperature)
        columns, metrics = self.columns_of(batch, scores)
        return Outcome(self.written(batch, columns), metrics)

    def columns_of(self, batch: DataProto, scores: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Metric]]:
        """Turn the `scores` of a pass over a batch (as `compute_log_probs` returns them) into the stage's columns and
        metrics."""
        columns = {name: scores[key] for key, name in self._wanted.items()}
        metrics: dict[str, Metric] = {}
        if self.entropy:
            mask = batch["response_mask"]
            metrics["actor/entropy"] = Mean.of(masked_mean(scores["entropy"], mask).item(), mask.sum().item())
            if "rollout_log_probs" in batch and mask.any():
                metrics |= sampler_logprob_diff(scores["log_probs"], batch["rollout_log_probs"], mask)
                gaps = (scores["log_probs"] - batch["rollout_log_probs"]).abs().masked_fill(mask == 0, 0.0)
                columns["sampler_logprob_diff"] = gaps.amax(-1)
        policy = "policy_version" in batch and self.column == "old_log_probs"  # a reference has versions of its own
        for learner in self.learners() if policy else ():
            metrics |= version_lag(learner.version, batch["policy_version"])
        return columns, metrics

    def covers(self, other: LogProb) -> bool:
        """Whether this stage writes every column that the `other` stage writes, with the same numbers: from the same
        model at the same temperature."""
        same = self._model is other._model and self._wanted.items() >= other._wanted.items()
        return same and repr(self.temperature) == repr(other.temperature)

    def is_current(self, batch: DataProto) -> bool:
        """Whether the batch's column holds what this stage would write now, with its model's present weights at its
        temperature.

        This is judged from the column's `Origin`, where `state_id` names the weights; a column read from disk has none,
        and is never current.
        """
        origin, mine = batch.origins.get(self.column), self.signature(batch)
        if origin is None or origin.state_id is None or origin.state_id != mine.state_id:
            return False
        extras = [{"entropy": entropy, "sum_pi_squared": pi} for entropy in (True, False) for pi in (True, False)]
        return origin.settings in [settings_hash({**self.settings(), **extra}) for extra in extras]


class Values(BaseStage):
    """Compute the critic's value of every response token, `values` [B, T]."""

    name = "values"
    reads = SCORED_COLUMNS
    optional = (PIXELS,)
    writes = ("values",)

    def __init__(self, critic: LogProbModel) -> None:
        self._critic = critic
        self._learners = (critic,)

    def __call__(self, batch: DataProto) -> Outcome:
        """Return the same B rows with the critic's `values`."""
        values = self._critic.compute_log_probs(batch.select(scored_columns(batch)), ("values",))["values"]
        metrics = spread("critic/values", values[batch["response_mask"].bool()])
        return Outcome(self.written(batch, {"values": values}), metrics)


KL = "training/rollout_kl"
GAP = "training/rollout_probs_diff_mean"
LAG = "training/policy_lag/max"
_FAR = 20.0
"""Nats; a ratio beyond is as good as infinite, and its exponential must not be."""


def sampler_logprob_diff(mine: Tensor, sampled: Tensor, mask: Tensor) -> dict[str, Metric]:
    """Measure the gap between the trainer's (`mine`) and the sampler's (`sampled`) log-probs of the same tokens, [B,
    T].

    The metrics are differences and correlation of probabilities (under verl's names), the largest difference of
    log-probs, and the KL in nats per token.
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


class SyncReference(BaseStage):
    """Move the reference towards the policy after every `steps` training steps: π_ref ← α·π + (1 − α)·π_ref, of weights.

    TR-DPO, Gorbatovski et al. 2024, https://arxiv.org/abs/2404.09656; TRL's `sync_ref_model`. With α = 1 it is a copy of
    the policy, with 0 it stays. It is kept in checkpoints under the role `reference`. The metric `reference/synced` is 1
    in a step that moved it.

    Args:
        policy: the engine that is trained.
        reference: its `twin()`, which a `LogProb` stage scores with.
        steps: training steps between two moves.
        alpha: α, the policy's share.
        name: the name of the stage.
    """

    reads = ()
    writes = ()
    updates = True

    def __init__(
        self, policy: Any, reference: Any, *, steps: int = 512, alpha: float = 0.6, name: str = "update_reference"
    ) -> None:
        require(steps >= 1, "ref_sync_steps", expected="≥ 1 training steps", found=steps)
        require(0 <= alpha <= 1, "ref_mixup_alpha", expected="0 to 1", found=alpha)
        self._policy, self._reference, self._learners = policy, reference, (reference,)
        self.steps, self.alpha, self.name = steps, alpha, name

    def __call__(self, batch: DataProto) -> Outcome:
        """Return the same B rows."""
        step = batch.meta_info.get("step", 0)
        due = step > 0 and step % self.steps == 0
        if due:
            self._reference.mix(getattr(self._policy, "learner", self._policy), self.alpha)  # of a pair
        return Outcome(batch, {"reference/synced": Mean(float(due))})


def version_lag(version: int, rows: Tensor) -> dict[str, Metric]:
    """Measure how many policy versions the rows [B] are behind `version`, on average and at most; {} without rows."""
    if not len(rows):
        return {}
    lag = (version - rows).double()
    return {"training/policy_lag/mean": Mean.of(float(lag.mean()), len(rows)), LAG: Max(float(lag.max()))}


class OffPolicy:
    """A `break_if` for `train`: it stops a run before the update on rows that are too far off-policy:
    `break_if=OffPolicy(lag=0)`.

    A limit of None is not checked; a metric that is NaN is over its limit. Where sampler and trainer agree the gap is
    near 1e-6 in float32 and 1e-2 in bfloat16; the defaults leave room for the latter. Without this,
    `train(max_rollout_kl=0.2)` already stops a run after a step whose `training/rollout_kl` (normally near 1e-12 and
    1e-4) is larger, because then the sampler has another model or did not take its weights; rows of older weights
    (`ahead`) are exempt from that.

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
        """Whether one of a step's metrics is over its limit; a metric that was not measured never is."""
        return bool(self._over(metrics))

    def why(self, metrics: Mapping[str, Any]) -> str:
        """Return the metrics that are over their limits, with values and limits, as one line."""
        return ", ".join(f"{name} {metrics[name]:.3g}, limit {self.limits[name]:g}" for name in self._over(metrics))

    def _over(self, metrics: Mapping[str, Any]) -> list[str]:
        return [name for name, limit in self.limits.items() if name in metrics and not metrics[name] <= limit]

    def __repr__(self) -> str:
        return f"OffPolicy({', '.join(f'{name} ≤ {limit:g}' for name, limit in self.limits.items())})"
