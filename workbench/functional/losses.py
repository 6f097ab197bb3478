"""Policy and value losses per token, and how token losses become one number."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from workbench.functional.masking import masked_sum


@dataclass(frozen=True)
class Surrogate:
    """A clipped surrogate, per token."""

    loss: torch.Tensor
    """[B, T], with gradient."""
    ratio: torch.Tensor
    """exp(new − old), [B, T]."""
    clipped: torch.Tensor
    """[B, T] bool: the clipped term is the larger one there."""
    clipped_lower: torch.Tensor
    """[B, T] bool: the dual clip holds there (negative advantage, ratio beyond c)."""


def ppo_clip(
    old_log_probs: torch.Tensor,
    log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_c: float = 3.0,
) -> Surrogate:
    """PPO's clipped surrogate with dual clip: max(−Aρ, −A·clip(ρ, 1−low, 1+high)), and for A < 0 at most −A·c.

    ρ = exp(clamp(new − old, ±20)). All inputs [B, T]. Schulman et al. 2017,
    https://arxiv.org/abs/1707.06347; dual clip: Ye et al. 2020, https://arxiv.org/abs/1912.09729.
    """
    ratio = (log_probs - old_log_probs).clamp(-20, 20).exp()
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    upper = torch.maximum(plain, bounded)
    floor = -advantages * clip_c
    negative = advantages < 0
    loss = torch.where(negative, torch.minimum(upper, floor), upper)
    inside = mask.bool()
    return Surrogate(
        loss=loss,
        ratio=ratio.detach(),
        clipped=(bounded > plain).detach() & inside,
        clipped_lower=(negative & (upper > floor)).detach() & inside,
    )


@dataclass(frozen=True)
class ValueLoss:
    """A clipped value loss, per token."""

    loss: torch.Tensor
    """[B, T], with gradient."""
    clipped: torch.Tensor
    """[B, T] bool: the clipped term is the larger one there."""


def value_loss(
    values: torch.Tensor, returns: torch.Tensor, old_values: torch.Tensor, mask: torch.Tensor, *, clip: float = 0.5
) -> ValueLoss:
    """½·max((v − R)², (clip(v, old ± clip) − R)²), [B, T]."""
    near = torch.minimum(torch.maximum(values, old_values - clip), old_values + clip)
    plain, bounded = (values - returns).square(), (near - returns).square()
    return ValueLoss(0.5 * torch.maximum(plain, bounded), (bounded > plain).detach() & mask.bool())


AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
"""Modes of `aggregate`."""


def aggregate(
    loss: torch.Tensor,
    mask: torch.Tensor,
    mode: str = "token-mean",
    *,
    tokens: float | None = None,
    sequences: float | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Token losses [B, T] as one number.

    `token-mean` Σ/tokens · `token-sum` Σ · `seq-mean-token-sum` Σ/sequences · `seq-mean-token-mean` the
    mean over sequences of their token means · `seq-mean-token-sum-norm` Σ/sequences/`scale` (T by default).
    `tokens` and `sequences` are the global counts of the mini-batch: given them, the micro-batches' results
    add up to the whole's. Rows without a token are left out. Raises `ValueError` for another mode.
    """
    tokens = float(mask.sum()) if tokens is None else tokens
    per_row = masked_sum(loss, mask, dim=-1)
    lengths = mask.sum(-1)
    sequences = float((lengths > 0).sum()) if sequences is None else sequences
    if mode == "token-mean":
        return per_row.sum() / max(tokens, 1)
    if mode == "token-sum":
        return per_row.sum()
    if mode == "seq-mean-token-sum":
        return per_row.sum() / max(sequences, 1)
    if mode == "seq-mean-token-mean":
        return (per_row / lengths.clamp(min=1)).sum() / max(sequences, 1)
    if mode == "seq-mean-token-sum-norm":
        return per_row.sum() / max(sequences, 1) / (scale if scale is not None else loss.shape[-1])
    raise ValueError(f"aggregation mode {mode!r}; expected one of {', '.join(AGGREGATIONS)}")
