"""Losses: where the columns of a batch meet the formulas of an update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from workbench.config import Settings, require
from workbench.dataproto import DataProto
from workbench.engines.protocol import LossOutput, Normalisers
from workbench.functional import aggregate, kl_penalty, masked_mean, ppo_clip, value_loss
from workbench.metrics import Mean, Metric, Sum


def loss_mask(rows: DataProto) -> torch.Tensor:
    """[B, T] float: 1 on the model's own tokens of rows that were scored."""
    mask = rows["response_mask"].float()
    return mask * rows["scored"].float()[:, None] if "scored" in rows else mask


def _mean(values: torch.Tensor, mask: torch.Tensor) -> Mean:
    return Mean.of(masked_mean(values.detach().float(), mask).item(), mask.sum().item())


@dataclass(frozen=True, kw_only=True)
class PolicyLoss(Settings):
    """PPO's clipped surrogate with dual clip, less an entropy bonus, plus a KL to the reference.

    loss = pg − entropy_coeff·H + kl_loss_coef·KL, each aggregated by `loss_agg_mode` over the whole
    mini-batch (global counts), so that micro-batches and ranks cannot change it.
    """

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

    def __post_init__(self) -> None:
        require(self.clip_ratio_low >= 0, "clip_ratio_low", expected="≥ 0", found=self.clip_ratio_low)
        require(self.clip_ratio_high >= 0, "clip_ratio_high", expected="≥ 0", found=self.clip_ratio_high)
        require(self.clip_ratio_c > 1, "clip_ratio_c", expected="> 1", found=self.clip_ratio_c)

    @property
    def reads(self) -> tuple[str, ...]:
        """Columns it needs beside those of a scoring pass."""
        return ("old_log_probs", "advantages") + (("ref_log_prob",) if self.kl_loss_coef else ())

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
        surrogate = ppo_clip(
            old,
            new,
            rows["advantages"],
            mask,
            clip_low=self.clip_ratio_low,
            clip_high=self.clip_ratio_high,
            clip_c=self.clip_ratio_c,
        )
        loss = pg_loss = self._aggregate(surrogate.loss, mask, normalisers)
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

    def _aggregate(self, values: torch.Tensor, mask: torch.Tensor, normalisers: Normalisers) -> torch.Tensor:
        return aggregate(
            values,
            mask,
            self.loss_agg_mode,
            tokens=normalisers.tokens,
            sequences=normalisers.sequences,
            scale=normalisers.width,
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
