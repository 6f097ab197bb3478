"""One decode step of Llama-shaped models (Llama, Mistral, Qwen 2 and 3) over their own weights, without their modules' overhead.

It reads the weights where they are, so updates need no care. Which models it may decode is a list of transformers' modules whose
code was read: parts of the same names may do something else with them, beyond a length that no check comes to. `selfcheck`
proves it once more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from workbench.engines.local_engine.forward import Head, Layer, Plan, linear_head

_MODEL = {"embed_tokens", "layers", "norm", "rotary_emb"}
_LINEAR = {f"self_attn.{name}_proj" for name in "qkvo"} | {f"mlp.{name}_proj" for name in ("gate", "up", "down")}
_NORMS, _PERHAPS = {"input_layernorm", "post_attention_layernorm"}, {"self_attn.q_norm", "self_attn.k_norm"}

_READ = {
    f"transformers.models.{one}.modeling_{one}"
    for one in ("llama", "mistral", "ministral", "qwen2", "qwen3", "seed_oss", "cwm")
}
"""Modules whose attention, and all else of a model, does what `_step` does."""
_PLAIN = ("torch.nn.modules.", "transformers.activations")

Step = Callable[[Tensor, Tensor, Plan], Tensor]
"""Takes tokens [n], positions [n] and a plan → [n, V] logits."""


def lean_step(model: Any) -> Step | None:
    """A function that does one decode step of the model; None where the model has another shape, or any class of its own."""
    inner = getattr(model, "model", None)
    if inner is None or {name for name, _ in inner.named_children()} != _MODEL or not all(map(_fits, inner.layers)):
        return None
    classes = {type(part).__module__ for part in model.modules() if not type(part).__module__.startswith(_PLAIN)}
    if len(classes) != 1 or not classes <= _READ or any("forward" in vars(part) for part in model.modules()):
        return None
    head = linear_head(model)

    def step(tokens: Tensor, positions: Tensor, plan: Plan) -> Tensor:
        return _step(inner, head, tokens, positions, plan)

    return step


def _fits(block: Any) -> bool:
    """Whether a layer has these parts and no other, all its linear layers being plain."""
    parts = {name: one for name, one in block.named_modules() if not any(True for _ in one.children())}
    norms = parts.keys() - _LINEAR - {"mlp.act_fn"}
    plain = all(type(parts.get(name)) is nn.Linear for name in _LINEAR)
    return plain and norms - _PERHAPS == _NORMS and all(_is_norm(parts[name]) for name in norms)


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
        window = getattr(
            attention if hasattr(attention, "sliding_window") else attention.config, "sliding_window", None
        )
        query, key, value = query[:, :, None], key[:, :, None], value[:, :, None]
        layer = Layer(attention.layer_idx, query, key, value, attention.scaling, window)
        states = states + attention.o_proj(plan.attend(layer).reshape(len(tokens), -1))
        normed = _norm(block.post_attention_layernorm, states)
        states = states + mlp.down_proj(mlp.act_fn(mlp.gate_proj(normed)) * mlp.up_proj(normed))
    return head.logits(_norm(inner.norm, states))
