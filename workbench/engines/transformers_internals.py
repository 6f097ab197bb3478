"""transformers' private names, all of them here: each says what public way is missing (seen in transformers 5.5 to 5.24)."""

from __future__ import annotations

from typing import Any


def opens_text(config: Any) -> bool:
    """Whether transformers has a causal language model for this configuration. The public way to find out is to open
    one."""
    from transformers import AutoModelForCausalLM

    return type(config) in AutoModelForCausalLM._model_mapping


def opens_pictures(config: Any) -> bool:
    """Whether transformers has a model of text and pictures for this configuration."""
    from transformers import AutoModelForImageTextToText

    return type(config) in AutoModelForImageTextToText._model_mapping


def has_attention(config: Any) -> bool:
    """Whether a configuration names an attention implementation. Its public name is an argument of opening."""
    return hasattr(config, "_attn_implementation")


def attention_of(config: Any) -> str | None:
    """Return the attention implementation that a configuration names; None where it names none."""
    name: str | None = getattr(config, "_attn_implementation", None)
    return name


def set_attention(config: Any, name: str | None) -> None:
    """Set a configuration's attention implementation for the next forward pass. The public `set_attn_implementation`
    checks and walks the whole model each time."""
    config._attn_implementation_internal = name


def asks_attention_interface(model: Any) -> bool:
    """Whether a model's layers call their attention through transformers' `AttentionInterface`, so that another
    function can be registered."""
    return bool(getattr(model, "_supports_attention_backend", False))


def whole_blocks(module: Any) -> set[str]:
    """Return the class names of a model's layers that must be placed, gathered and recomputed as a whole."""
    return set(getattr(module, "_no_split_modules", None) or ())


def may_lack(model: Any) -> tuple[str, ...]:
    """Return patterns of the model's weight names that its folder may lack."""
    return tuple(model._keys_to_ignore_on_load_missing or ())


def may_have(model: Any) -> tuple[str, ...]:
    """Return patterns of weight names that a model's folder may contain without a place in the model."""
    return tuple(model._keys_to_ignore_on_load_unexpected or ())


def never_saved(model: Any) -> tuple[str, ...]:
    """Return the names of a model's weights that are not saved."""
    return tuple(model._keys_to_ignore_on_save or ())
