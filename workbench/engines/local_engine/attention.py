"""Attention of our own inside transformers' models: a plan says which tokens attend to which, in place of a mask.

Models call their attention through transformers' `AttentionInterface`, so that one function here serves every architecture that
does. The plan of a forward pass travels as its attention mask, a tensor of four dimensions, which models hand on untouched. That
a model really does so is not assumed: see `selfcheck`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from workbench.base.errors import EngineError

NAME, UNCAPPED = "workbench", "workbench_uncapped"


@dataclass(frozen=True)
class Layer:
    """One layer's call of its attention: its new tokens, and the layer's own settings."""

    index: int
    """Number of the layer (`layer_idx`)."""
    query: Tensor
    """[b, H, q, D], rotated."""
    key: Tensor
    """[b, K, q, D] of the same tokens; K heads, each shared by H / K of the query's."""
    value: Tensor
    """[b, K, q, D'] of the same tokens."""
    scaling: float
    """What the products of queries and keys are multiplied by."""
    window: int | None = None
    """A token sees this many tokens up to itself; None: all."""
    softcap: float | None = None
    """Scores become cap·tanh(score / cap)."""
    sinks: Tensor | None = None
    """[H]: a score that takes its share of each softmax and adds nothing (gpt-oss)."""

    @property
    def plain(self) -> bool:
        """Whether it is a softmax and no more, as torch's own kernels compute it."""
        return self.softcap is None and self.sinks is None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None, *, causal: bool = False) -> Tensor:
        """Attention [b, H, q, D'] of queries [b, H, q, D] over keys and values [b, K, k, ·], with this layer's settings.

        `seen` [b, 1, q, k] is true where a query sees a key (of a `plain` layer also what is added to the scores); None: each
        sees all, or of a plain layer with `causal` those up to its own number.
        """
        groups = query.shape[1] // key.shape[1]
        grouped = self.plain and query.device.type == "cpu"  # torch's kernel there reads shared heads where they are
        if groups > 1 and not grouped:
            key, value = (one.repeat_interleave(groups, 1) for one in (key, value))
        if self.plain:
            return functional.scaled_dot_product_attention(
                query, key, value, seen, is_causal=causal, scale=self.scaling, enable_gqa=groups > 1 and grouped
            )
        scores = query @ key.transpose(-1, -2) * self.scaling
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if seen is not None:
            scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
        if self.sinks is not None:
            sink = self.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            return (
                torch.softmax(torch.cat([scores, sink], -1), -1, dtype=torch.float32)[..., :-1].to(value.dtype) @ value
            )
        return torch.softmax(scores, -1, dtype=torch.float32).to(value.dtype) @ value


class Plan(Protocol):
    """Protocol of what a forward pass attends to: asked once a layer."""

    def attend(self, layer: Layer) -> Tensor:
        """The layer's attention [b, H, q, D'], where `layer` has the new tokens [b, ·, q, ·]."""


@contextmanager
def planned(model: Any, plan: Plan) -> Iterator[Tensor]:
    """Context manager: yields the `attention_mask` with which the model attends by `plan`.

    Raises `EngineError` where the model asks for a kind of attention that a plan does not know.
    """
    with switched(model):
        mask: Any = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=model.device)  # mixed precision casts floating ones
        mask.plan = plan
        yield mask


@contextmanager
def switched(model: Any) -> Iterator[None]:
    """Context manager: the model attends by plans. A backward pass with gradient checkpointing attends again: keep it inside."""
    _register()
    configs = {id(one): one for one in (getattr(part, "config", None) for part in model.modules()) if one is not None}
    before = {key: one._attn_implementation for key, one in configs.items() if hasattr(one, "_attn_implementation")}
    try:
        for key, name in before.items():
            configs[key]._attn_implementation_internal = UNCAPPED if name in ("sdpa", UNCAPPED) else NAME
        yield
    finally:
        for key, name in before.items():
            configs[key]._attn_implementation_internal = name


def _register() -> None:
    interface = sys.modules["transformers.modeling_utils"].AttentionInterface
    interface.register(NAME, _attention)
    interface.register(UNCAPPED, _uncapped)


_IGNORED = {"is_causal", "position_ids", "use_cache", "output_attentions", "cu_seq_lens_q", "cu_seq_lens_k"}


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **further: Any,
) -> tuple[Tensor, None]:
    """What transformers calls: `query`, `key` and `value` [b, heads, q, D] → [b, q, heads, D']."""
    plan: Plan | None = getattr(attention_mask, "plan", None)
    unknown = {name for name, one in further.items() if one is not None} - _IGNORED
    if plan is None or dropout or "position_bias" in unknown:
        what = f"attention of {type(module).__name__}"
        found = "another mask" if plan is None else f"dropout {dropout}" if dropout else ", ".join(sorted(unknown))
        raise EngineError(what, expected="a plan as its mask, and no dropout or bias", found=found)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer = Layer(module.layer_idx, query, key, value, scale, sliding_window, softcap, s_aux)
    return plan.attend(layer).transpose(1, 2).contiguous(), None


def _uncapped(*given: Any, softcap: float | None = None, **named: Any) -> tuple[Tensor, None]:
    """In place of transformers' `sdpa`, which leaves a soft-cap out: the same numbers as the model's own."""
    return _attention(*given, **named)
