"""Large batches in blocks of rows, so that what a formula makes on its way stays in the processor's cache.

A formula over [B, T] makes a dozen tensors of that size; whole, each is fresh memory, which costs more than its numbers.
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
    """Decorator: tensors in half precision are computed in float32; where the first one is, the results are rounded to its type."""

    @functools.wraps(function)
    def computed(*args: P.args, **options: P.kwargs) -> R:
        wide = [_single(one) for one in args]
        found = function(*wide, **{name: _single(one) for name, one in options.items()})
        real = [one for one in (*args, *options.values()) if isinstance(one, Tensor) and one.is_floating_point()]
        return _rounded(found, real[0].dtype) if real and real[0].dtype in _HALF else found

    return computed


def _single(one: Any) -> Any:
    return one.float() if isinstance(one, Tensor) and one.dtype in _HALF else one


def _rounded(found: Any, dtype: torch.dtype) -> Any:
    """The tensors of a result, in this type."""
    if isinstance(found, tuple):
        return tuple(_rounded(one, dtype) for one in found)
    if isinstance(found, dict):
        return {name: _rounded(one, dtype) for name, one in found.items()}
    if is_dataclass(found) and not isinstance(found, type):
        return replace(found, **_rounded(vars(found), dtype))
    return found.to(dtype) if isinstance(found, Tensor) and found.is_floating_point() else found


def by_rows(formula: Callable[..., Sequence[Tensor]], *given: Tensor, elements: int = ELEMENTS) -> Sequence[Tensor]:
    """formula(*given) of tensors [B, …], a block of rows at a time; each row it makes comes from its own row alone.

    It gets everything at once where that is little, on a GPU, where the rows are not the same number, and where a gradient flows: autograd
    keeps what is on the way. The results are the same.
    """
    number, rows = max([one.numel() for one in given]), given[0].shape[:1]
    if number <= elements or not all(_can_be_cut(one, rows) for one in given):
        return formula(*given)
    step = max(1, elements * rows.numel() // number)
    whole: list[Tensor] = []
    for at in range(0, rows.numel(), step):
        made = formula(*(one[at : at + step] for one in given))
        whole = whole or [_empty(one, (*rows, *one.shape[1:])) for one in made]
        for target, one in zip(whole, made, strict=True):
            target[at : at + step] = one
    return whole


def _can_be_cut(one: Tensor, rows: torch.Size) -> bool:
    flows = one.requires_grad and torch.is_grad_enabled()
    return one.shape[:1] == rows and one.dim() > 1 and one.is_cpu and not flows


def _empty(like: Tensor, shape: Sequence[int]) -> Tensor:
    """An uninitialised tensor, on huge pages if it is large: 64 MiB are then 32 page faults, not 16,384."""
    number = math.prod(shape)
    if number * like.element_size() < LARGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return like.new_empty(shape)
    memory = mmap.mmap(-1, number * like.element_size(), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=like.dtype, count=number).view(shape)


def sloped(values: Tensor, slope: Tensor, leaf: Tensor) -> Tensor:
    """`values`, made of `leaf` without autograd, with their gradient: `slope` = ∂values/∂leaf of each number, or of its row.

    Where the slope or what comes back is 0, as outside a mask, so is the gradient, even if the other is NaN. There is no
    second derivative.
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
    found = gradient * slope
    if found.is_cpu and math.isfinite(found.sum()):  # no factor is NaN or infinite
        return (found,)
    return (kept(kept(found, slope.abs()), gradient.abs()),)


_above = torch.ops.aten.threshold_backward.default
"""(x, m, 0) → x where m > 0, else 0."""


def kept(x: Tensor, mask: Tensor) -> Tensor:
    """x where the mask is above 0, else 0, NaN included: torch.where, but many numbers at a time."""
    if not x.is_floating_point():
        return torch.where(mask > 0, x, 0)
    return _above(x, mask if mask.dtype is x.dtype else mask.to(x.dtype), 0)
