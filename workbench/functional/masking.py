"""Sums, means and whitening under a mask. Masks are 1 where a position counts; [B, T] unless said otherwise.

Values outside a mask are ignored, NaN included. Conventions are verl's `torch_functional`.
"""

from __future__ import annotations

import torch
from torch import Tensor

_EPS = 1e-8


def masked_sum(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum of x where the mask is 1, over `dim` (None: over all)."""
    weighted = _kept(x, mask) * mask
    return weighted.sum() if dim is None else weighted.sum(dim)


def _kept(x: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask.bool(), x, torch.zeros((), dtype=x.dtype, device=x.device))


def masked_mean(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of x where the mask is 1, Σ x·m / (Σ m + 1e-8), over `dim` (None: over all); an empty mask gives 0."""
    count = mask.sum() if dim is None else mask.sum(dim)
    return masked_sum(x, mask, dim) / (count + _EPS)


def masked_var(x: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Variance of x over the mask, a scalar (÷ n − 1 if `unbiased`). Raises `ValueError` for too few positions."""
    count = mask.sum()
    if count <= (1 if unbiased else 0):
        raise ValueError(f"the variance needs at least two positions; the mask has {int(count)}")
    # zeroed before it is squared: the gradient of a NaN's square is NaN, whatever it is multiplied with
    variance = masked_mean((_kept(x, mask) - masked_mean(x, mask)) ** 2, mask)
    return variance * count / (count - 1) if unbiased else variance


def masked_whiten(x: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Whiten x to mean 0, variance 1 over the mask: (x − mean)·rsqrt(var + 1e-8); `shift_mean=False` adds the mean again.

    Positions outside the mask are transformed like the others, not zeroed.
    """
    mean = masked_mean(x, mask)
    whitened = (x - mean) * torch.rsqrt(masked_var(x, mask) + _EPS)
    return whitened if shift_mean else whitened + mean


def response_lengths(mask: Tensor) -> Tensor:
    """Number of tokens of each row under the mask: [B, T] → [B] int64."""
    return mask.long().sum(-1)
