"""transformers' private names, all of them here: each says what public way is missing (seen in transformers 5.5 to 5.24)."""

from __future__ import annotations

from typing import Any


def opens_text(config: Any) -> bool:
    """Whether a causal language model is made of such a configuration. The public way to ask is to open one."""
    from transformers import AutoModelForCausalLM

    return type(config) in AutoModelForCausalLM._model_mapping


def opens_pictures(config: Any) -> bool:
    """Whether a model of text and pictures is made of such a configuration."""
    from transformers import AutoModelForImageTextToText

    return type(config) in AutoModelForImageTextToText._model_mapping


def has_attention(config: Any) -> bool:
    """Whether a configuration names an attention implementation. Its public name is an argument of opening."""
    return hasattr(config, "_attn_implementation")


def attention_of(config: Any) -> str | None:
    """The attention implementation of a configuration; None where it has none, or names none."""
    name: str | None = getattr(config, "_attn_implementation", None)
    return name


def set_attention(config: Any, name: str | None) -> None:
    """Change it for the next forward pass. The public `set_attn_implementation` checks and walks the whole model each time."""
    config._attn_implementation_internal = name


def asks_attention_interface(model: Any) -> bool:
    """Whether a model's layers call the function that the attention interface has under the chosen name."""
    return bool(getattr(model, "_supports_attention_backend", False))


def whole_blocks(module: Any) -> set[str]:
    """Names of the classes of a model's layers, which are placed, gathered and recomputed as a whole."""
    return set(getattr(module, "_no_split_modules", None) or ())


def may_lack(model: Any) -> tuple[str, ...]:
    """Patterns of a model's weights that its folder may lack."""
    return tuple(model._keys_to_ignore_on_load_missing or ())


def may_have(model: Any) -> tuple[str, ...]:
    """Patterns of weights that its folder may have beyond the model's."""
    return tuple(model._keys_to_ignore_on_load_unexpected or ())


def never_saved(model: Any) -> tuple[str, ...]:
    """Names of weights that are not saved."""
    return tuple(model._keys_to_ignore_on_save or ())
