"""How a model's last hidden states become logits: its linear layer, and what the model itself does to the layer's output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Head:
    """logits = cap(factor · (W·h + b)), where cap(z) = softcap·tanh(z / softcap)."""

    linear: Any
    """The model's output embeddings: a linear layer [V, H], with a bias or without. None: states are the model's own logits
    (`states`), right for any model, and slower."""
    factor: float = 1.0
    """What the layer's output is multiplied by (Granite, Cohere, Falcon-H1)."""
    softcap: float | None = None
    """Largest absolute logit (Gemma 2); None: no limit."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, V] float32 logits of hidden states [N, H], as the model's own forward gives them."""
        if self.linear is None:
            return hidden.float()
        logits: Tensor = self.linear(hidden).float() * self.factor
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def states(self, model: Any, **given: Tensor) -> Tensor:
        """[b, s, H] last hidden states of a forward pass without a cache; logits [b, s, V] where the head has no layer."""
        if self.linear is None:
            return model(**given, use_cache=False).logits
        return model.base_model(**given, use_cache=False).last_hidden_state


OWN = Head(None)
"""The model's own way from tokens to logits."""

_FACTORS: dict[str, Callable[[float], float]] = {
    "logits_scaling": lambda value: 1 / value,
    "logit_scale": float,
    "lm_head_multiplier": float,
    "output_multiplier": float,
}
"""Names in model configurations → the factor that they mean."""
_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Names in model configurations for the largest absolute logit."""
_FACTORS_OF = {"hyperclovax": {"logits_scaling": float}}
"""Model types in which a name means something else."""


def hidden_size(model: Any) -> int:
    """Size H of the states that the model's output layer reads (OPT may project them to other than its `hidden_size`)."""
    linear = model.get_output_embeddings()
    return int(model.config.get_text_config().hidden_size if linear is None else linear.in_features)


def head_of(model: Any) -> Head:
    """The head of a transformers causal model: `linear_head`, or `OWN` where the self-check says so."""
    paths = getattr(model, "workbench_paths", None)
    return OWN if paths is not None and paths.own_head else linear_head(model)


def linear_head(model: Any) -> Head:
    """The head of a transformers causal model as its text configuration describes it; of a sequence classifier its `score`."""
    config = model.config.get_text_config()
    factor = 1.0
    for name, meaning in (_FACTORS | _FACTORS_OF.get(config.model_type, {})).items():
        if getattr(config, name, None) is not None:
            factor *= meaning(getattr(config, name))
    caps = [getattr(config, name) for name in _CAPS if getattr(config, name, None) is not None]
    linear = model.get_output_embeddings()
    return Head(getattr(model, "score", None) if linear is None else linear, factor, caps[0] if caps else None)
