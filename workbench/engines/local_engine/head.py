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
    """The model's output embeddings: a linear layer [V, H], with a bias or without."""
    factor: float = 1.0
    """What the layer's output is multiplied by (Granite, Cohere, Falcon-H1)."""
    softcap: float | None = None
    """Largest absolute logit (Gemma 2); None: no limit."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, V] float32 logits of hidden states [N, H], as the model's own forward gives them."""
        logits: Tensor = self.linear(hidden).float() * self.factor
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


_FACTORS: dict[str, Callable[[float], float]] = {
    "logits_scaling": lambda value: 1 / value,
    "logit_scale": float,
    "lm_head_multiplier": float,
}
"""Names in model configurations → the factor that they mean."""


def head_of(model: Any) -> Head:
    """The head of a transformers causal model, as its text configuration describes it."""
    config = model.config.get_text_config()
    factor = 1.0
    for name, meaning in _FACTORS.items():
        if getattr(config, name, None) is not None:
            factor *= meaning(getattr(config, name))
    return Head(model.get_output_embeddings(), factor, getattr(config, "final_logit_softcapping", None))
