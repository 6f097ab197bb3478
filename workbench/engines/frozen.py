"""Weights that never change, behind one method: what a reference is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from workbench.dataproto import DataProto


class FrozenModel:
    """Weights that never change, behind `score` alone: an engine of their own, or the base of one with LoRA."""

    def __init__(self, engine: Any, *, as_loaded: bool = False, base: bool = False) -> None:
        self._engine = engine
        self._as_loaded = as_loaded
        self._base = base

    def describe(self) -> dict[str, Any]:
        """Path and settings, and whether the weights are still those of the path."""
        plain = {"lora_rank": 0} if self._base else {}
        return {**self._engine.describe(), **plain, "as_loaded": self._as_loaded}

    @contextmanager
    def model(self) -> Iterator[Any]:
        """The transformers model, for who needs whole distributions; with LoRA the adapter is off meanwhile."""
        if self._base:
            with self._engine.model_of_base() as model:
                yield model
        else:
            yield self._engine._model

    def score(
        self, batch: DataProto, want: Sequence[str] = ("log_probs",), temperature: float = 1.0
    ) -> dict[str, torch.Tensor]:
        """As the engine's; with LoRA the adapter is off meanwhile."""
        if self._base:
            return self._engine.score_base(batch, want, temperature)
        return self._engine.score(batch, want, temperature)

    def __repr__(self) -> str:
        return f"FrozenModel({self._engine!r})"
