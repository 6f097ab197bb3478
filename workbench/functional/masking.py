"""Sums, means and whitening under a mask. Masks are 1 where a position counts; [B, T] unless said otherwise.

Values outside a mask are ignored, NaN included. Conventions are verl's `torch_functional`. Half precision is computed in float32,
and the result rounded to the type of x.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from workbench.functional.blocks import ELEMENTS, by_rows, kept, precise

_EPS = 1e-8


@precise
def masked_sum(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum of x where the mask is 1, over `dim` (None: over all)."""
    if x.numel() > ELEMENTS and x.dim() == 2 and x.shape == mask.shape and dim in (None, -1, 1):
        per_row = _RowSums.apply(x, mask)
        return per_row.sum() if dim is None else per_row
    weighted = _weighted(x, mask)
    return weighted.sum() if dim is None else weighted.sum(dim)


def _weighted(x: Tensor, mask: Tensor) -> Tensor:
    """x·m, 0 where the mask is 0, NaN included."""
    weights = mask.to(x.dtype) if x.is_floating_point() else mask
    return kept(x, weights) * weights


class _RowSums(torch.autograd.Function):
    """Σ x·m of each row; its gradient is the mask, of which nothing is kept but the mask."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(mask)
        ctx.dtype = x.dtype
        return by_rows(lambda rows, inside: (_weighted(rows, inside).sum(-1),), x, mask)[0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (mask,) = ctx.saved_tensors
        each = gradient[:, None].to(ctx.dtype)
        plain = each.is_cpu and bool(each.isfinite().all())  # a NaN must not reach what is outside the mask
        weighted = (lambda g, inside: (g * inside,)) if plain else (lambda g, inside: (_weighted(g, inside),))
        return by_rows(weighted, each, mask)[0], None


@precise
def masked_mean(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of x where the mask is 1, Σ x·m / (Σ m + 1e-8), over `dim` (None: over all); an empty mask gives 0."""
    count = mask.sum() if dim is None else mask.sum(dim)
    return masked_sum(x, mask, dim) / (count + _EPS)


@precise
def masked_var(x: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Variance of x over the mask, a scalar (÷ n − 1 if `unbiased`). Raises `ValueError` for too few positions."""
    return _moments(x, mask, unbiased)[1]


def _moments(x: Tensor, mask: Tensor, unbiased: bool = True) -> tuple[Tensor, Tensor]:
    """Mean and variance over the mask."""
    lengths, sums = by_rows(lambda rows, inside: (inside.sum(-1), _weighted(rows, inside).sum(-1)), x, mask)
    count = lengths.sum()
    if count <= (1 if unbiased else 0):
        raise ValueError(f"the variance needs at least two positions; the mask has {int(count)}")
    mean = sums.sum() / (count + _EPS)
    # zeroed before it is squared: the gradient of a NaN's square is NaN, whatever it is multiplied with
    squares = by_rows(lambda rows, inside: (_weighted((kept(rows, inside) - mean).square(), inside).sum(-1),), x, mask)
    variance = squares[0].sum() / (count + _EPS)
    return mean, variance * count / (count - 1) if unbiased else variance


@precise
def masked_whiten(x: Tensor, mask: Tensor, shift_mean: bool = True, zero_masked: bool = False) -> Tensor:
    """Whiten x to mean 0, variance 1 over the mask: (x − mean)·rsqrt(var + 1e-8); `shift_mean=False` adds the mean again.

    Positions outside the mask are transformed like the others; `zero_masked=True` makes them 0.
    """
    mean, variance = _moments(x, mask)
    scale, added = torch.rsqrt(variance + _EPS), 0.0 if shift_mean else mean

    def whitened(rows: Tensor, inside: Tensor) -> tuple[Tensor]:
        found = (rows - mean) * scale + added
        return (kept(found, inside) if zero_masked else found,)

    return by_rows(whitened, x, mask)[0]


def response_lengths(mask: Tensor) -> Tensor:
    """Number of tokens of each row under the mask: [B, T] → [B] int64."""
    return mask.long().sum(-1)
