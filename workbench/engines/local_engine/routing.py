"""Routing replay: the experts that a mixture's routers chose while a row was sampled are used again when it is scored and learned.

Sampler and trainer round differently, so that for some tokens they choose other experts, and their log-probs are far apart. The
column `routed_experts` holds what the sampler chose; weights are of the scorer's own router. Ma et al. 2025, R3,
https://arxiv.org/abs/2510.11370.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from workbench.base.distribution import version_of
from workbench.base.errors import EngineError


def experts_of(model: Any) -> dict[str, Any]:
    """A model's layers of experts by name: modules that transformers lets compute by another function than their own."""
    return {name: one for name, one in model.named_modules() if {"has_gate", "is_transposed"} <= vars(one).keys()}


class Routing:
    """What the routers of a model choose; as `model.workbench_routing` it is there where the setting `routing_replay` is on."""

    def __init__(self, model: Any) -> None:
        found = experts_of(model)
        if not found:
            expected = "layers of experts in transformers' common form (Mixtral, Qwen3-MoE, DeepSeek, gpt-oss …)"
            what = f"routing_replay with {type(model).__name__}"
            do = "pip install -U transformers: newer ones have more such models"
            raise EngineError(
                what, expected=expected, found=f"none in transformers {version_of('transformers')}", do=do
            )
        self.chosen: Tensor | None = None
        """[N, L, k] experts of the tokens of the next passes, -1: the router's own choice; None: of all."""
        self.recording = False
        self._layers = model.config.get_text_config().num_hidden_layers
        self._seen: dict[int, Tensor] = {}
        for name, experts in found.items():
            layer = next(int(part) for part in name.split(".") if part.isdecimal())
            block = model.get_submodule(name.rpartition(".")[0])
            block.forward = partial(self._route, layer, experts.num_experts, type(block).forward, block)

    def seen(self) -> Tensor:
        """[N, L, k] int16 on the CPU: the experts of the last pass, where it was recorded; -1 in layers without."""
        none = torch.full_like(next(iter(self._seen.values())), -1)
        return torch.stack([self._seen.get(layer, none) for layer in range(self._layers)], 1).to("cpu", torch.int16)

    def _route(self, layer: int, count: int, forward: Any, block: Any, *given: Any, **named: Any) -> Any:
        """In place of the forward of a layer's block of experts and router."""
        if self.chosen is None and not self.recording:
            return forward(block, *given, **named)
        with _Choice(count, None if self.chosen is None else self.chosen[:, layer].long()) as choice:
            found = forward(block, *given, **named)
        if choice.made is None:
            what = f"routing_replay with {type(block).__name__}"
            raise EngineError(what, expected=f"a router that chooses by topk of {count} scores", found="another one")
        self._seen[layer] = choice.made
        return found


class _Choice(TorchFunctionMode):
    """Sees the call of `topk` in which a router chooses, and gives another choice where there is one [n, k], not -1."""

    def __init__(self, experts: int, chosen: Tensor | None) -> None:
        super().__init__()
        self._experts, self._chosen = experts, chosen
        self.made: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk) or args[0].dim() != 2 or args[0].shape[-1] != self._experts:
            return found
        if self._chosen is not None and found.indices.shape == self._chosen.shape:
            index = torch.where(self._chosen < 0, found.indices, self._chosen)
            found = type(found)((args[0].gather(-1, index), index))
        elif self._chosen is not None:
            return found
        self.made = found.indices
        return found


def replay(model: Any, chosen: Tensor | None) -> None:
    """Let a model's next pass, and its backward pass, use the experts `chosen` [N, L, k] where its routing is replayed."""
    routing: Routing | None = getattr(model, "workbench_routing", None)
    if routing is not None:
        routing.chosen = chosen


@contextmanager
def recorded(model: Any) -> Iterator[Routing | None]:
    """Context manager: what the routers choose is recorded; yields the model's routing, None where it has none."""
    routing: Routing | None = getattr(model, "workbench_routing", None)
    if routing is None:
        yield None
        return
    routing.chosen, routing.recording = None, True
    try:
        yield routing
    finally:
        routing.recording = False
