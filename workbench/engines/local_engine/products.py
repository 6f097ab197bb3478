"""Products of float32 matrices on processors where torch's own leave half of the speed unused.

On a CPU torch multiplies float32 by MKL, which uses AVX-512 on Intel's processors alone. oneDNN, by which torch multiplies
bfloat16, uses it on AMD's, too, and takes about half the time. Both round in float32, in another order.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from workbench.engines.torch_internals import onednn_product

_LEAST = 1 << 20
"""Multiplications below which oneDNN's start costs more than it saves (measured)."""
_PROCESSORS = Path("/proc/cpuinfo")
FASTER = (
    torch.backends.mkldnn.is_available()
    and torch.backends.cpu.get_cpu_capability() == "AVX512"
    and _PROCESSORS.is_file()
    and "AuthenticAMD" in _PROCESSORS.read_text(encoding="utf-8")
)
"""Whether oneDNN multiplies float32 faster than MKL on this machine's processor."""


def use_faster_products(model: nn.Module) -> None:
    """Let the linear layers of a model on a CPU multiply by `product`, where that is faster (`FASTER`)."""
    for part in model.modules() if FASTER else ():
        if type(part) is nn.Linear:
            part.__class__ = Linear


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
        if type(input) is not Tensor or type(self.weight) is not nn.Parameter or torch.is_autocast_enabled("cpu"):
            return super().forward(input)
        run = _Product.apply if torch.is_grad_enabled() else product
        return cast(Tensor, run(input, self.weight, self.bias))


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
