"""All-to-all with a gradient: how ranks exchange tokens for heads (context parallel) and tokens for experts (expert parallel)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, distributed


class Exchange(torch.autograd.Function):
    """All-to-all of rows [Σ there, …] → [Σ here, …]: so many to, and from, each rank. Its gradient goes the other way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, there: Sequence[int], here: Sequence[int], group: Any) -> Tensor:
        """Rows and how many go to, and come from, each rank of the group."""
        ctx.given = there, here, group
        received = rows.new_empty(sum(here), *rows.shape[1:])
        distributed.all_to_all_single(received, rows.contiguous(), list(here), list(there), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        """The gradients of what came, sent back."""
        there, here, group = ctx.given
        return Exchange.apply(gradients[0], here, there, group), None, None, None
