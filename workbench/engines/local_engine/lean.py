"""One decode step of Llama-shaped models (Llama, Mistral, Qwen 2 and 3) over their own weights, without their modules' overhead.

It reads the weights where they are, so updates need no care. Which models have the shape is decided by the names and types of
all their parts, and proven by `prefix.deviation`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from workbench.engines.local_engine.attention import Layer, Plan
from workbench.engines.local_engine.head import Head, linear_head

_MODEL = {"embed_tokens", "layers", "norm", "rotary_emb"}
_BLOCK = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}

Step = Callable[[Tensor, Tensor, Plan], Tensor]
"""Takes tokens [n], positions [n] and a plan → [n, V] logits."""


def lean_step(model: Any) -> Step | None:
    """A function that does one decode step of the model; None where the model has another shape."""
    inner = getattr(model, "model", None)
    if inner is None or _parts(inner) != _MODEL or not all(map(_fits, inner.layers)):
        return None
    head = linear_head(model)

    def step(tokens: Tensor, positions: Tensor, plan: Plan) -> Tensor:
        return _step(inner, head, tokens, positions, plan)

    return step


def _parts(module: Any) -> set[str]:
    return {name for name, _ in module.named_children()}


def _fits(block: Any) -> bool:
    """Whether a layer has these parts and no other, all its linear layers being plain."""
    if (
        _parts(block) != _BLOCK
        or _parts(block.mlp) != _MLP
        or _parts(block.self_attn) - {"q_norm", "k_norm"} != _ATTENTION
    ):
        return False
    linear = [getattr(block.self_attn, name) for name in _ATTENTION] + [
        getattr(block.mlp, f"{name}_proj") for name in ("gate", "up", "down")
    ]
    return all(type(one) is nn.Linear for one in linear) and all(
        map(_is_norm, (block.input_layernorm, block.post_attention_layernorm))
    )


def _is_norm(module: Any) -> bool:
    return hasattr(module, "variance_epsilon") and [name for name, _ in module.named_parameters()] == ["weight"]


def _norm(module: Any, states: Tensor) -> Tensor:
    return functional.rms_norm(states.float(), module.weight.shape, module.weight, module.variance_epsilon)


def _rotated(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[n, heads, D] turned by the angles of its positions; `sin` has the sign of the first half changed."""
    return torch.addcmul(states * cos, states.roll(states.shape[-1] // 2, -1), sin)


def _step(inner: Any, head: Head, tokens: Tensor, positions: Tensor, plan: Plan) -> Tensor:
    states = inner.embed_tokens(tokens)
    cos, sin = (one.transpose(0, 1) for one in inner.rotary_emb(states[None], positions[None]))
    half = sin.shape[-1] // 2
    sin = torch.cat([-sin[..., :half], sin[..., half:]], -1)
    for block in inner.layers:
        attention, mlp = block.self_attn, block.mlp
        normed = _norm(block.input_layernorm, states)
        query, key, value = (
            functional.linear(normed, one.weight, one.bias).view(len(tokens), -1, attention.head_dim)
            for one in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        if hasattr(attention, "q_norm"):
            query, key = _norm(attention.q_norm, query), _norm(attention.k_norm, key)
        query, key = _rotated(query, cos, sin), _rotated(key, cos, sin)
        layer = Layer(
            attention.layer_idx,
            *(one[:, :, None] for one in (query, key, value)),
            attention.scaling,
            getattr(attention if hasattr(attention, "sliding_window") else attention.config, "sliding_window", None),
        )
        states = states + attention.o_proj(plan.attend(layer).reshape(len(tokens), -1))
        normed = _norm(block.post_attention_layernorm, states)
        states = states + mlp.down_proj(mlp.act_fn(mlp.gate_proj(normed)) * mlp.up_proj(normed))
    return head.logits(_norm(inner.norm, states))
