"""Sums, means and whitening under a mask. Masks are 1 where a position counts; [B, T] unless said otherwise.

Values outside a mask are ignored, NaN included. Conventions are verl's `torch_functional`. Half precision is computed
in float32, and the result rounded to the type of x. Large batches are computed in blocks of rows, so that what a
formula makes on its way stays in the processor's cache: a formula over [B, T] makes a dozen tensors of that size, and
fresh memory costs more than its numbers.
"""

from __future__ import annotations

import functools
import math
import mmap
from collections.abc import Callable, Sequence
from dataclasses import is_dataclass, replace
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

_HALF = (torch.float16, torch.bfloat16)
P = ParamSpec("P")
R = TypeVar("R")

ELEMENTS = 2**17
"""Numbers of a tensor in a block: half a megabyte of float32."""
LARGE = 2**23
"""Bytes from which a result is worth huge pages."""


def precise(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator that computes half-precision tensors in float32; where the first one is in half precision, results are
    rounded to its type.
    """

    @functools.wraps(function)
    def computed(*args: P.args, **options: P.kwargs) -> R:
        wide = [_single(one) for one in args]
        found = function(*wide, **{name: _single(one) for name, one in options.items()})
        real = [one for one in (*args, *options.values()) if isinstance(one, Tensor) and one.is_floating_point()]
        return _rounded(found, real[0].dtype) if real and real[0].dtype in _HALF else found

    return computed


def _single(one: Any) -> Any:
    return one.float() if isinstance(one, Tensor) and one.dtype in _HALF else one


def _rounded(result: Any, dtype: torch.dtype) -> Any:
    """Convert the tensors of a result to this type."""
    if isinstance(result, tuple):
        return tuple(_rounded(one, dtype) for one in result)
    if isinstance(result, dict):
        return {name: _rounded(one, dtype) for name, one in result.items()}
    if is_dataclass(result) and not isinstance(result, type):
        return replace(result, **_rounded(vars(result), dtype))
    return result.to(dtype) if isinstance(result, Tensor) and result.is_floating_point() else result


def by_rows(formula: Callable[..., Sequence[Tensor]], *columns: Tensor, elements: int = ELEMENTS) -> Sequence[Tensor]:
    """Call `formula(*columns)` on tensors [B, …] a block of rows at a time, and join the results. Each result row
    depends only on its row.

    The formula gets all rows at once where they are few, on a GPU, where the columns have different numbers of rows,
    and where a gradient flows, because autograd keeps the intermediate tensors anyway. The results are the same.
    """
    number, rows = max([column.numel() for column in columns]), columns[0].shape[:1]
    if number <= elements or not all(_can_be_cut(column, rows) for column in columns):
        return formula(*columns)
    step = max(1, elements * rows.numel() // number)
    whole: list[Tensor] = []
    for at in range(0, rows.numel(), step):
        made = formula(*(column[at : at + step] for column in columns))
        whole = whole or [_empty(part, (*rows, *part.shape[1:])) for part in made]
        for target, part in zip(whole, made, strict=True):
            target[at : at + step] = part
    return whole


def _can_be_cut(one: Tensor, rows: torch.Size) -> bool:
    flows = one.requires_grad and torch.is_grad_enabled()
    return one.shape[:1] == rows and one.dim() > 1 and one.is_cpu and not flows


def _empty(like: Tensor, shape: Sequence[int]) -> Tensor:
    """Allocate an uninitialised tensor, on huge pages if it is large: 64 MiB are then 32 page faults, not 16,384."""
    number = math.prod(shape)
    if number * like.element_size() < LARGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return like.new_empty(shape)
    memory = mmap.mmap(-1, number * like.element_size(), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=like.dtype, count=number).view(shape)


def sloped(values: Tensor, slope: Tensor, leaf: Tensor) -> Tensor:
    """Attach a gradient to `values`, computed from `leaf` without autograd: `slope` = ∂values/∂leaf of each number, or
    of its row.

    Where the slope or the incoming gradient is 0, as outside a mask, so is the gradient, even if the other is NaN.
    There is no second derivative.
    """
    return _Sloped.apply(values, slope, leaf) if leaf.requires_grad and torch.is_grad_enabled() else values


class _Sloped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, slope: Tensor, leaf: Tensor) -> Tensor:
        ctx.save_for_backward(slope)
        return values.view_as(values)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, Tensor]:
        (slope,) = ctx.saved_tensors
        return None, None, by_rows(_product, gradient, slope)[0]


def _product(gradient: Tensor, slope: Tensor) -> tuple[Tensor]:
    product = gradient * slope
    if product.is_cpu and math.isfinite(product.sum()):  # no factor is NaN or infinite
        return (product,)
    return (kept(kept(product, slope.abs()), gradient.abs()),)


_above = torch.ops.aten.threshold_backward.default
"""(x, m, 0) → x where m > 0, else 0."""


def kept(x: Tensor, mask: Tensor) -> Tensor:
    """Return x where the mask is above 0, else 0, also where x is NaN: as torch.where, but many numbers at a time."""
    if not x.is_floating_point():
        return torch.where(mask > 0, x, 0)
    return _above(x, mask if mask.dtype is x.dtype else mask.to(x.dtype), 0)


# --- sums and means ---------------------------------------------------------------------------------

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
    """Compute x·m, with 0 where the mask is 0, also where x is NaN."""
    weights = mask.to(x.dtype) if x.is_floating_point() else mask
    return kept(x, weights) * weights


class _RowSums(torch.autograd.Function):
    """Autograd function Σ x·m of each row. Its gradient is the mask, which is all that it keeps."""

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
    """Compute mean and variance over the mask."""
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
