"""Context parallelism: the packed tokens of a micro-batch, cut over ranks (Ulysses).

Each rank has a slice of the tokens, but inside an attention all tokens and a slice of the heads: two all-to-alls a layer. What a
plan attends to (`local_engine.attention`), trees, windows, soft-caps and sinks, is computed as on one rank. Jacobs et al. 2023,
DeepSpeed Ulysses, https://arxiv.org/abs/2309.14509.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn import functional

from workbench.base.errors import EngineError, SettingError
from workbench.engines.fsdp_engine.exchange import Exchange
from workbench.engines.local_engine.forward import Head, Layer, Plan, planned, replay
from workbench.engines.local_engine.scoring import Tree


def check(model: Any, size: int, tensors: int = 1) -> None:
    """Raise `EngineError` where `size` ranks cannot share a model's tokens, `SettingError` where not its heads, cut by `tensors`."""
    config, name = model.config.get_text_config(), type(model).__name__
    do = "take cp=1 (more ranks in dp), or a model of attention alone"
    other = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"})
    if other or not getattr(model, "_supports_attention_backend", False):
        found = f"layers of {', '.join(other)}" if other else "layers that do not ask transformers' attention interface"
        raise EngineError(f"mesh cp={size} with {name}", expected="full or sliding attention", found=found, do=do)
    if (chosen := config._attn_implementation) not in (None, "sdpa", "eager"):
        do = "leave attn_implementation at None"
        raise EngineError(f"mesh cp={size}", expected="attn_implementation 'sdpa' or 'eager'", found=chosen, do=do)
    if config.num_attention_heads % (size * tensors):
        expected, found = "cp·tp that divides its heads", f"{config.num_attention_heads} heads"
        raise SettingError(f"mesh cp={size}, tp={tensors} with {name}", expected=expected, found=found)


def apply(model: Any, mesh: Any) -> None:
    """Let the ranks of a mesh of one dimension share the tokens of a model's packed rows (`scoring.layout`)."""
    check(model, mesh.size())
    model.workbench_share = lambda tree: Share(tree, mesh.get_group())


class Share:
    """A rank's share of a packed tree, a `scoring.Layout`: every rank gives its own states, and gets all values."""

    def __init__(self, tree: Tree, group: Any) -> None:
        self._tree, self._group = tree, group
        rank, size = group.rank(), group.size()
        self._count = -(-tree.count // size)  # the last ranks may have padding
        self._start = self._count * rank
        edges = torch.tensor([self._start, self._start + self._count])
        self._own = slice(*torch.searchsorted(tree.before, edges).tolist())
        self.labels = tree.labels[self._own]

    def spread(self, values: Tensor) -> Tensor:
        """Values [m] of this rank's `labels` → [b, T], the same on every rank; the gradient of each is its rank's alone."""
        return self._tree.spread(_Whole.apply(values.float(), self._own.start, len(self._tree.labels), self._group))

    def states(self, model: Any, head: Head) -> Tensor:
        """Hidden states [m, H] that predict this rank's `labels`."""
        chosen = self._tree.experts
        if chosen is not None:  # padding goes where it likes
            own = chosen[self._start : self._start + self._count]
            chosen = functional.pad(own, (0, 0, 0, 0, 0, self._count - len(own)), value=-1)
        replay(model, chosen)
        with planned(model, _Exchanged(self._tree.plan, self._tree.count, self._group)) as mask:
            given = {name: self._slice(one) for name, one in self._tree.given.items()}
            states = head.states(model, **given, attention_mask=mask)[0]
            return states[self._tree.predicting[self._own] - self._start]

    def _slice(self, tokens: Tensor) -> Tensor:
        """This rank's part [1, n] of [1, N], with zeros behind the end."""
        own = tokens[:, self._start : self._start + self._count]
        return functional.pad(own, (0, self._count - own.shape[1]))


class _Exchanged:
    """A plan whose layers have a slice of the tokens and all heads, computed with all tokens and a slice of the heads."""

    def __init__(self, plan: Plan, count: int, group: Any) -> None:
        self._plan, self._count, self._group = plan, count, group

    def attend(self, layer: Layer) -> Tensor:
        """The layer's attention [1, H, n, D'] of this rank's tokens."""
        size = self._group.size()
        # heads of keys and values that several ranks need go to each of them
        shared = math.lcm(layer.key.shape[1], size) // layer.key.shape[1]
        key, value = (one.repeat_interleave(shared, 1) if shared > 1 else one for one in (layer.key, layer.value))
        query, key, value = self._to_heads((layer.query, key, value))
        sinks = None if layer.sinks is None else layer.sinks.view(size, -1)[self._group.rank()]
        found = self._plan.attend(replace(layer, query=query, key=key, value=value, sinks=sinks))[0]
        own = layer.query.shape[2]
        found = functional.pad(found, (0, 0, 0, own * size - self._count))
        parts = found.view(len(found), size, own, -1).transpose(0, 1)
        return self._exchanged(parts).flatten(0, 1)[None]

    def _exchanged(self, parts: Tensor) -> Tensor:
        """Part i of [size, …] goes to rank i."""
        each = (1,) * self._group.size()
        found: Tensor = Exchange.apply(parts, each, each, self._group)
        return found

    def _to_heads(self, layers: Sequence[Tensor]) -> list[Tensor]:
        """[1, h, n, ·] of this rank's tokens → [1, h / size, N, ·] of all, in one exchange."""
        size, own = self._group.size(), layers[0].shape[2]
        shapes = [(size, one.shape[1] // size, own, one.shape[3]) for one in layers]
        flat = torch.cat([one.reshape(size, -1) for one in layers], 1)
        pieces = self._exchanged(flat).split([math.prod(shape[1:]) for shape in shapes], 1)
        whole = (piece.reshape(shape).transpose(0, 1) for piece, shape in zip(pieces, shapes, strict=True))
        return [one.flatten(1, 2)[None, :, : self._count] for one in whole]


class _Whole(torch.autograd.Function):
    """[m] of each rank → [M] of all; its gradient is this rank's part: the ranks' gradients of weights are added up."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, start: int, total: int, group: Any) -> Tensor:
        ctx.own = slice(start, start + len(values))
        whole = values.new_zeros((total, *values.shape[1:]))
        whole[ctx.own] = values
        distributed.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return gradients[0][ctx.own], None, None, None
