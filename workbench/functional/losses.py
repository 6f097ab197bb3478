"""Policy and value losses per token, and how token losses become one number."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from workbench.functional.masking import masked_sum


@dataclass(frozen=True)
class Surrogate:
    """A clipped surrogate, per token."""

    loss: torch.Tensor
    """[B, T], with gradient; 0 outside the mask."""
    ratio: torch.Tensor
    """exp(new − old), [B, T]; 1 outside the mask."""
    clipped: torch.Tensor
    """[B, T] bool: the clipped term is the larger one there."""
    clipped_lower: torch.Tensor
    """[B, T] bool: the dual clip holds there (negative advantage, ratio beyond c)."""
    aggregation: str | None = None
    """The one mode that the loss is defined with; None: the caller's choice."""


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

    ρ = exp(clamp(new − old, ±20)). All inputs [B, T]; what stands outside the mask, NaN among it, touches
    neither loss nor gradient. Raises `ValueError` for a negative clip range or `clip_c` ≤ 1. Schulman et al. 2017,
    https://arxiv.org/abs/1707.06347; dual clip: Ye et al. 2020, https://arxiv.org/abs/1912.09729.
    """
    if clip_low < 0 or clip_high < 0 or clip_c <= 1:
        raise ValueError(
            f"clip ranges are ≥ 0 and clip_c > 1; found low {clip_low}, high {clip_high} and clip_c {clip_c}"
        )
    inside = mask.bool()
    ratio = torch.where(inside, log_probs - old_log_probs, 0.0).clamp(-20, 20).exp()
    advantages = torch.where(inside, advantages, 0.0)
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    upper = torch.maximum(plain, bounded)
    floor = -advantages * clip_c
    negative = advantages < 0
    loss = torch.where(negative, torch.minimum(upper, floor), upper)
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
    """[B, T], with gradient; 0 outside the mask."""
    clipped: torch.Tensor
    """[B, T] bool: the clipped term is the larger one there."""


def value_loss(
    values: torch.Tensor, returns: torch.Tensor, old_values: torch.Tensor, mask: torch.Tensor, *, clip: float = 0.5
) -> ValueLoss:
    """½·max((v − R)², (clip(v, old ± clip) − R)²): the worse of both, so that a value gains nothing by jumping.

    All inputs [B, T]; what stands outside the mask, NaN among it, touches neither loss nor gradient.
    Schulman et al. 2017's reference implementation; the clip's worth is doubted: Andrychowicz et al. 2021,
    https://arxiv.org/abs/2006.05990, §3.3.
    """
    inside = mask.bool()
    values, returns, old_values = (torch.where(inside, x, 0.0) for x in (values, returns, old_values))
    near = torch.minimum(torch.maximum(values, old_values - clip), old_values + clip)
    plain, bounded = (values - returns).square(), (near - returns).square()
    return ValueLoss(0.5 * torch.maximum(plain, bounded), (bounded > plain).detach() & inside)


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
    add up to the whole's, if `scale` is given too where a mode has one (T may differ from part to part, so
    it is no default there). Rows without a token are left out; an empty mask gives 0. Values outside the
    mask are ignored, NaN among them. Raises `ValueError` for another mode or a missing `scale`.
    """
    if mode not in AGGREGATIONS:
        raise ValueError(f"aggregation mode {mode!r}; expected one of {', '.join(AGGREGATIONS)}")
    if mode == "seq-mean-token-sum-norm" and scale is None:
        if sequences is not None:
            raise ValueError(f"aggregation {mode!r} of a part of a mini-batch needs scale: the parts' widths differ")
        scale = loss.shape[-1]
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
    return per_row.sum() / max(sequences, 1) / (scale or 1)
