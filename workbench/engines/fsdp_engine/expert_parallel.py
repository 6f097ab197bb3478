"""Expert parallelism: a mixture's experts spread over ranks, and each token sent to the ranks that have its experts.

Routers and shared experts stay on every rank. A layer sends each of its tokens by all-to-all to the ranks of the experts that the
router chose, which compute as the model does, and add up the gradients of all tokens that came. Lepikhin et al. 2020, GShard,
https://arxiv.org/abs/2006.16668.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed
from torch._subclasses.fake_tensor import is_fake
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from workbench.base.errors import EngineError, SettingError
from workbench.engines.fsdp_engine.exchange import Exchange
from workbench.engines.local_engine.forward import experts_of


def check(model: Any, size: int) -> None:
    """Raise `EngineError` where a model's experts cannot be spread, `SettingError` where not over `size` ranks."""
    what, found = f"mesh ep={size} with {type(model).__name__}", experts_of(model)
    if not found:
        expected = "layers of experts in transformers' common form (Mixtral, Qwen3-MoE, DeepSeek, gpt-oss …)"
        raise EngineError(what, expected=expected, found="none", do="leave ep out of the mesh: dp shards any model")
    for name, experts in found.items():
        if experts.num_experts % size:
            raise SettingError(
                what, expected="an ep that divides its experts", found=f"{experts.num_experts} in {name}"
            )
        for leaf, parameter in experts.named_parameters():
            if parameter.shape[0] != experts.num_experts:
                expected, shape = f"{experts.num_experts} experts in its first dimension", tuple(parameter.shape)
                raise EngineError(what, expected=expected, found=f"{name}.{leaf} of shape {shape}")


def apply(model: Any, mesh: Any) -> None:
    """Give each rank of a mesh of one dimension its part of the experts, as `DTensor`s of their first dimension."""
    check(model, mesh.size())
    for experts in experts_of(model).values():
        for name, weight in list(experts.named_parameters(recurse=False)):
            part = distribute_tensor(weight.detach(), mesh, [Shard(0)], src_data_rank=None)
            setattr(experts, name, torch.nn.Parameter(part, requires_grad=weight.requires_grad))
        experts.forward = partial(_forward, experts, type(experts).forward, mesh.get_group())


def shard(model: Any, mesh: Any, **how: Any) -> None:
    """Shard each rank's part of the experts over a mesh by FSDP2, all of them in their second dimension."""
    for experts in experts_of(model).values():
        fully_shard(experts, mesh=mesh, shard_placement_fn=lambda parameter: Shard(1), **how)


class _Part:
    """A layer of experts as one that has this rank's experts alone."""

    def __init__(self, experts: Any, size: int) -> None:
        self._experts, self.num_experts = experts, experts.num_experts // size
        vars(self).update({name: one.to_local() for name, one in experts.named_parameters(recurse=False)})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._experts, name)


def _forward(
    experts: Any, compute: Callable[..., Tensor], group: Any, hidden: Tensor, chosen: Tensor, weights: Tensor
) -> Tensor:
    """In place of the layer's own forward: states [n, H], numbers [n, k] of their experts and [n, k] weights → [n, H]."""
    size, shape, most = group.size(), hidden.shape, chosen.shape[-1]
    part = _Part(experts, size)
    hidden, flat = hidden.reshape(-1, shape[-1]), chosen.flatten()
    order = torch.argsort(flat, stable=True)
    leaving = flat.new_zeros(experts.num_experts).scatter_add_(0, flat, torch.ones_like(flat))
    coming = torch.empty_like(leaving)
    distributed.all_to_all_single(coming, leaving, group=group)
    there, here = (_rows(one.view(size, -1).sum(1), len(flat)) for one in (leaving, coming))
    states = Exchange.apply(hidden[order // most], there, here, group)
    numbers = torch.arange(part.num_experts, device=flat.device).repeat(size)
    own = numbers.repeat_interleave(coming, output_size=sum(here))
    # a state of zeros, so that a rank to which no token came computes, and has gradients, too
    states = torch.cat([states, states.new_zeros(1, shape[-1])])
    own = torch.cat([own, own.new_zeros(1)])[:, None]
    made = compute(part, states, own, states.new_ones(own.shape))[:-1]
    back = Exchange.apply(made, here, there, group)[torch.argsort(order)]
    return (back.view(*chosen.shape, -1) * weights[..., None]).sum(-2).to(hidden.dtype).view(shape)


def _rows(counts: Tensor, every: int) -> list[int]:
    """Numbers of rows for, or of, each rank; where memory is measured without data (`rehearsal`) as many of each."""
    if not is_fake(counts):
        return [int(one) for one in counts.tolist()]
    return [every * (rank + 1) // len(counts) - every * rank // len(counts) for rank in range(len(counts))]
