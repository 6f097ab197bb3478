"""Losses: where the columns of a batch meet the formulas of an update."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from workbench.config import Settings, require
from workbench.dataproto import DataProto
from workbench.engines.protocol import LossOutput, Normalisers
from workbench.errors import SettingError, unknown
from workbench.functional import (
    AGGREGATIONS,
    POLICY_LOSSES,
    Surrogate,
    aggregate,
    kl_penalty,
    masked_mean,
    value_loss,
)
from workbench.metrics import Mean, Metric, Sum


def loss_mask(rows: DataProto) -> torch.Tensor:
    """[B, T] float: 1 on the model's own tokens of rows that were scored."""
    mask = rows["response_mask"].float()
    return mask * rows["scored"].float()[:, None] if "scored" in rows else mask


def _mean(values: torch.Tensor, mask: torch.Tensor) -> Mean:
    return Mean.of(masked_mean(values.detach().float(), mask).item(), mask.sum().item())


TRL_AGGREGATIONS: Mapping[str, str] = {
    "grpo": "seq-mean-token-mean",
    "bnpo": "token-mean",
    "dapo": "token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
}
"""TRL's `loss_type` → `loss_agg_mode`. Its `bnpo` divides by a local batch's tokens, ours by the whole mini-batch's, so that
it is `dapo`; its `dr_grpo` divides by the longest completion allowed: set `loss_scale_factor` to `max_tokens`."""


@dataclass(frozen=True, kw_only=True)
class PolicyLoss(Settings):
    """A policy loss by name, less an entropy bonus, plus a KL to the reference.

    loss = pg − entropy_coeff·H + kl_loss_coef·KL, each aggregated by `loss_agg_mode` over the whole
    mini-batch (global counts), so that micro-batches and ranks cannot change it.
    """

    ALIASES: ClassVar[Mapping[str, str]] = {
        "clip_low": "clip_ratio_low",
        "clip_high": "clip_ratio_high",
        "clip_c": "clip_ratio_c",
        "kl_coef": "kl_loss_coef",
        "kl_type": "kl_loss_type",
    }
    """The recipes' names."""

    loss_mode: str = "vanilla"
    """Which: a name of `functional.POLICY_LOSSES` (verl's)."""
    clip_ratio_low: float = 0.2
    """Lower edge of the clip range: 1 − this."""
    clip_ratio_high: float = 0.2
    """Upper edge: 1 + this; raise it alone for DAPO's clip-higher."""
    clip_ratio_c: float = 3.0
    """Dual clip: bound of the ratio where the advantage is negative."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus."""
    kl_loss_coef: float = 0.0
    """Weight of KL(policy‖reference) in the loss; 0 needs no reference."""
    kl_loss_type: str = "low_var_kl"
    """Estimator of that KL: see `functional.kl_penalty`."""
    loss_agg_mode: str = "token-mean"
    """How token losses become one number: see `functional.aggregate`."""
    loss_scale_factor: float | None = None
    """What `seq-mean-token-sum-norm` divides by; None: the mini-batch's width."""
    rollout_is: bool = False
    """Weigh every token by the column `rollout_is_weights` (see `stages.RolloutCorrection`)."""
    tau_pos: float = 1.0
    """sapo: steepness of the gate for positive advantages."""
    tau_neg: float = 1.05
    """sapo: the same for negative ones."""
    dro_beta: float = 0.1
    """dro: weight of the quadratic."""
    clip_cov_ratio: float = 0.0002
    """clip_cov: share of tokens that is left out."""
    clip_cov_lb: float = 1.0
    """clip_cov: lowest covariance that is looked at."""
    clip_cov_ub: float = 5.0
    """clip_cov: highest."""
    kl_cov_ratio: float = 0.0002
    """kl_cov: share of tokens that is held back."""
    ppo_kl_coef: float = 0.1
    """kl_cov: how strongly."""

    def __post_init__(self) -> None:
        if self.loss_mode not in POLICY_LOSSES:
            raise SettingError(unknown("loss_mode", self.loss_mode, POLICY_LOSSES))
        if self.loss_agg_mode not in AGGREGATIONS:
            raise SettingError(unknown("loss_agg_mode", self.loss_agg_mode, AGGREGATIONS))
        require(self.clip_ratio_low >= 0, "clip_ratio_low", expected="≥ 0", found=self.clip_ratio_low)
        require(self.clip_ratio_high >= 0, "clip_ratio_high", expected="≥ 0", found=self.clip_ratio_high)
        require(self.clip_ratio_c > 1, "clip_ratio_c", expected="> 1", found=self.clip_ratio_c)

    @property
    def reads(self) -> tuple[str, ...]:
        """Columns it needs beside those of a scoring pass."""
        reads = ("old_log_probs", "advantages")
        return reads + ("ref_log_prob",) * bool(self.kl_loss_coef) + ("rollout_is_weights",) * self.rollout_is

    @property
    def writes(self) -> tuple[str, ...]:
        """What it keeps per token."""
        return ("new_log_probs", "clipped")

    @property
    def want(self) -> tuple[str, ...]:
        """Entropy costs a pass over the vocabulary, so it is asked for only where it has a weight."""
        return ("log_probs", "entropy") if self.entropy_coeff else ("log_probs",)

    def __call__(self, outputs: Mapping[str, torch.Tensor], rows: DataProto, normalisers: Normalisers) -> LossOutput:
        """The loss of one micro-batch, its metrics, and `new_log_probs` and `clipped`."""
        mask = loss_mask(rows)
        new, old = outputs["log_probs"], rows["old_log_probs"]
        surrogate = self._surrogate(old, new, rows["advantages"], mask)
        weighted = surrogate.loss * rows["rollout_is_weights"] if self.rollout_is else surrogate.loss
        loss = pg_loss = self._aggregate(weighted, mask, normalisers, surrogate.aggregation)
        metrics: dict[str, Metric] = {
            "actor/pg_loss": Sum(pg_loss.item()),
            "actor/pg_clipfrac": _mean(surrogate.clipped, mask),
            "actor/pg_clipfrac_lower": _mean(surrogate.clipped_lower, mask),
            "actor/ppo_kl": _mean(old - new, mask),
        }
        if self.entropy_coeff:
            entropy = self._aggregate(outputs["entropy"], mask, normalisers)
            loss = loss - self.entropy_coeff * entropy
            metrics["actor/entropy_loss"] = Sum(entropy.item())
        if self.kl_loss_coef:
            kl = self._aggregate(kl_penalty(new, rows["ref_log_prob"], self.kl_loss_type), mask, normalisers)
            loss = loss + self.kl_loss_coef * kl
            metrics["actor/kl_loss"] = Sum(kl.item())
            metrics["actor/kl_coef"] = Mean(self.kl_loss_coef)
        clipped = surrogate.clipped | surrogate.clipped_lower
        columns = {"new_log_probs": (new * rows["response_mask"]).detach(), "clipped": clipped & mask.bool()}
        return LossOutput(loss, metrics, columns)

    def _surrogate(
        self, old: torch.Tensor, new: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor
    ) -> Surrogate:
        """The chosen loss, with those of the settings that it takes."""
        function = POLICY_LOSSES[self.loss_mode]
        known = {
            "clip_low": self.clip_ratio_low,
            "clip_high": self.clip_ratio_high,
            "clip_c": self.clip_ratio_c,
            **self.to_dict(),
        }
        taken = inspect.signature(function).parameters
        return function(old, new, advantages, mask, **{name: value for name, value in known.items() if name in taken})

    def _aggregate(
        self, values: torch.Tensor, mask: torch.Tensor, normalisers: Normalisers, mode: str | None = None
    ) -> torch.Tensor:
        return aggregate(
            values,
            mask,
            mode or self.loss_agg_mode,
            tokens=normalisers.tokens,
            sequences=normalisers.sequences,
            scale=self.loss_scale_factor or normalisers.width,
        )


@dataclass(frozen=True, kw_only=True)
class ValueLoss(Settings):
    """½·max((v − R)², (clip(v, old ± cliprange) − R)²), aggregated like the policy's."""

    cliprange_value: float = 0.5
    """How far a value may move from the one before the update and still be counted."""
    loss_agg_mode: str = "token-mean"
    """How token losses become one number."""

    @property
    def reads(self) -> tuple[str, ...]:
        """Columns it needs beside those of a scoring pass."""
        return ("values", "returns")

    @property
    def writes(self) -> tuple[str, ...]:
        """Nothing per token."""
        return ()

    @property
    def want(self) -> tuple[str, ...]:
        """The critic's output."""
        return ("values",)

    def __call__(self, outputs: Mapping[str, torch.Tensor], rows: DataProto, normalisers: Normalisers) -> LossOutput:
        """The loss of one micro-batch and its metrics."""
        mask = loss_mask(rows)
        result = value_loss(outputs["values"], rows["returns"], rows["values"], mask, clip=self.cliprange_value)
        loss = aggregate(
            result.loss,
            mask,
            self.loss_agg_mode,
            tokens=normalisers.tokens,
            sequences=normalisers.sequences,
            scale=normalisers.width,
        )
        metrics: dict[str, Metric] = {
            "critic/vf_loss": Sum(loss.item()),
            "critic/vf_clipfrac": _mean(result.clipped, mask),
            "critic/vpred_mean": _mean(outputs["values"], mask),
        }
        return LossOutput(loss, metrics)
