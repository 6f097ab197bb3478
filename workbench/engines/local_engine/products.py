"""Products of float32 matrices on processors where torch's own leave half of the speed unused.

On a CPU torch multiplies float32 by MKL, which uses AVX-512 on Intel's processors alone. oneDNN, by which torch multiplies
bfloat16, uses it on AMD's, too, and takes about half the time. Both round in float32, in another order.

Both read weights in an order of their own, and copy plain ones into it at each product. While many tokens are decoded these
copies are kept (`weights_laid_out`). The numbers are the same to the last bit, but for MKL's with fewer than 16 rows, of
which torch has other kernels: they are those of many rows then, and so those that scoring computes.

Without AVX-512 torch's products are as fast, but those of few rows with a large weight, such as the output layer: oneDNN's
kept copy of it takes two thirds of the time of MKL's product, and errs by 5e-7 of the outputs' size, twice as much as MKL.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from workbench.base.memory import available
from workbench.engines.torch_internals import mkl_layout, mkl_product, onednn_layout, onednn_product

_LEAST = 1 << 20
"""Multiplications below which oneDNN's start costs more than it saves (measured)."""
_SMALL = 1 << 16
"""Numbers of a weight below which a kept copy gains nothing in bfloat16."""
_LARGE = 1 << 24
"""Numbers of a float32 weight from which oneDNN's order is faster than MKL's product without AVX-512, too (measured)."""
_TOKENS = 25
"""Tokens up to which laying weights out takes longer than it saves (measured)."""
_STEPS = 8
"""Steps of as many rows after which MKL's order for so many rows is worth its copy (measured)."""
_Laid = tuple[int, int, Tensor | None]
"""Rows of a layer's last product (0: any number), products of so many rows before it, and the weight laid out for so many."""
_LAID: ContextVar[dict[nn.Module, _Laid] | None] = ContextVar("workbench_laid_out", default=None)
"""The laid out weights of layers, of the thread that decodes."""
_PROCESSORS = Path("/proc/cpuinfo")
_ONEDNN, _VECTORS = torch.backends.mkldnn.is_available(), torch.backends.cpu.get_cpu_capability()
LAYS = _ONEDNN and _VECTORS == "AVX512"
"""Whether laid out weights are faster on this machine's processor."""
LAYS_LARGE = _ONEDNN and _VECTORS == "AVX2"
"""Whether those of large weights alone are."""
FASTER = LAYS and _PROCESSORS.is_file() and "AuthenticAMD" in _PROCESSORS.read_text(encoding="utf-8")
"""Whether oneDNN multiplies float32 faster than MKL on this machine's processor."""


def use_faster_products(model: nn.Module) -> None:
    """Let the linear layers of a model on a CPU compute by `product`, with weights in the library's order, where this
    is faster than torch."""
    for part in model.modules():
        if type(part) is nn.Linear and (LAYS or (LAYS_LARGE and part.weight.numel() >= _LARGE)):
            part.__class__ = Linear


@contextmanager
def weights_laid_out(model: nn.Module, rows: int, tokens: int) -> Iterator[None]:
    """Context manager: keeps each weight, once this thread has multiplied by it, in the library's order until the end;
    the weights must not change inside. Nothing is kept for a single row or few tokens, or if the weights would need
    more than an eighth of the free memory.
    """
    half = torch.is_autocast_enabled("cpu")
    size = sum(part.weight.numel() for part in model.modules() if type(part) is Linear) * (2 if half else 4)
    kept = _LAID.set({} if rows > 1 and tokens > _TOKENS and size < available() // 8 else None)
    try:
        yield
    finally:
        _LAID.reset(kept)


def product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """left·rightᵀ + bias, [..., N], of left [..., K], right [N, K] and bias [N], without gradient, by the faster library;
    under autocast as torch does it."""
    single = left.dtype == right.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    if FASTER and left.is_cpu and single and left.numel() * len(right) >= _LEAST:
        return onednn_product(left, right, bias)
    return functional.linear(left, right, bias)


def is_plain(layer: Any) -> TypeGuard[nn.Linear]:
    """Whether a module is a linear layer whose output is W·x + b of whole tensors: no adapter, no shard."""
    return type(layer) in (nn.Linear, Linear) and not hasattr(layer.weight, "device_mesh")


class Linear(nn.Linear):
    """A linear layer that multiplies by `product` where it has plain float32 tensors on a CPU."""

    def forward(self, input: Tensor) -> Tensor:
        """The layer's output [..., N] of states [..., K]."""
        if type(input) is not Tensor or type(self.weight) is not nn.Parameter:
            return super().forward(input)
        kept = None if torch.is_grad_enabled() else _LAID.get()
        if kept is not None and (kind := self._laid_out_in(input)) is not None:
            if kind == torch.float32 and LAYS and not FASTER:
                return self._by_mkl(input, kept)
            if self not in kept:
                kept[self] = (0, 0, onednn_layout(self.weight.detach().to(kind)))
            laid = cast(Tensor, kept[self][-1])
            return onednn_product(input.to(kind), laid, None if self.bias is None else self.bias.to(kind))
        if not FASTER or torch.is_autocast_enabled("cpu"):
            return super().forward(input)
        run = _Product.apply if torch.is_grad_enabled() else product
        return cast(Tensor, run(input, self.weight, self.bias))

    def _laid_out_in(self, states: Tensor) -> torch.dtype | None:
        """The type in which a laid out weight gives the very numbers of the plain one; None where it does not."""
        kinds, size = {states.dtype, self.weight.dtype}, states.numel()
        if torch.is_autocast_enabled("cpu"):
            halves = torch.get_autocast_dtype("cpu") == torch.bfloat16 and kinds <= {torch.bfloat16, torch.float32}
            return torch.bfloat16 if LAYS and halves and self.weight.numel() >= _SMALL else None
        # of a single row oneDNN multiplies plain float32 weights by another kernel, and MKL lays out for no other number of rows
        same = kinds == {torch.float32} and size > self.in_features and size * self.out_features >= _LEAST
        decodes = torch.backends.mkl.is_available() and size == len(states) * self.in_features
        return torch.float32 if same and (FASTER or decodes) else None

    def _by_mkl(self, states: Tensor, kept: dict[nn.Module, _Laid]) -> Tensor:
        """The layer's output of states [n, ..., K], by a weight that is laid out for n rows at once, and again for another
        number of rows after `_STEPS` of these."""
        rows, count, laid = kept.get(self, (len(states), _STEPS, None))
        if rows != len(states):
            count, laid = 0, None
        if laid is None and count >= _STEPS:
            laid = mkl_layout(self.weight.detach(), len(states))
        kept[self] = (len(states), count + 1, laid)
        return super().forward(states) if laid is None else mkl_product(states, laid, self.weight, self.bias)


class _Product(torch.autograd.Function):
    """`product` with gradients."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(left, right)
        return product(left, right, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        left, right = ctx.saved_tensors
        rows, wanted = slope.flatten(0, -2), ctx.needs_input_grad
        return (
            product(rows, right.T).view_as(left) if wanted[0] else None,
            product(rows.T, left.flatten(0, -2).T) if wanted[1] else None,
            rows.sum(0) if wanted[2] else None,
        )
