"""Rows with pictures: what a vision-language model's own forward is given, and its own cache over such rows.

They go through the model padded. A picture's token in a response, which no picture belongs to, is read as `STAND_IN`, in
sampling as in scoring: the model would look for its picture.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from workbench.engines.local_engine.decode import PaddedRows
from workbench.engines.protocol import Request

STAND_IN = 0
_TYPES = ("mm_token_type_ids", "token_type_ids")
"""Names of the input that marks a picture's tokens by 1."""


def joined(cells: Sequence[Mapping[str, Tensor]], device: Any) -> dict[str, Tensor]:
    """The inputs of all rows' pictures as one: those of one row after those of another."""
    names = dict.fromkeys(name for cell in cells for name in cell)
    return {name: torch.cat([cell[name] for cell in cells if name in cell]).to(device) for name in names}


def given(
    model: Any, ids: Tensor, mask: Tensor, cells: Sequence[Mapping[str, Tensor]], own: Tensor | None = None
) -> dict[str, Tensor]:
    """Arguments of a forward pass of rows [b, s], whose pictures' inputs are `cells`; `own` [b, s] marks responses."""
    pixels = joined(cells, ids.device)
    seen = ids == model.config.image_token_id
    if own is not None:
        ids, seen = ids.masked_fill(seen & own, STAND_IN), seen & ~own
    taken = [inspect.signature(type(one).forward).parameters for one in (model, model.base_model)]
    types = {name: seen.long() for name in _TYPES if all(name in one for one in taken)}
    positions = _positions(model, ids, mask, seen, pixels)
    return {"input_ids": ids, "attention_mask": mask, "position_ids": positions, **types, **pixels}


def _positions(model: Any, ids: Tensor, mask: Tensor, seen: Tensor, pixels: Mapping[str, Tensor]) -> Tensor:
    """Positions [b, s], or [3, b, s] of models that place a picture's patches in time, height and width (Qwen)."""
    index = getattr(model.base_model, "get_rope_index", None)
    if index is None or not pixels:
        return (mask.cumsum(-1) - 1).clamp(min=0)
    told = {"input_ids": ids, "attention_mask": mask, "mm_token_type_ids": seen.int(), **pixels}
    taken = inspect.signature(index).parameters
    positions: Tensor = index(**{name: one for name, one in told.items() if name in taken})[0]
    return positions


class PicturedRows(PaddedRows):
    """The model's own cache over left-padded rows with pictures, which all enter at once."""

    def __init__(self, model: Any, requests: Sequence[Request]) -> None:
        super().__init__(model)
        self._requests = requests

    def seat(self, order: Sequence[int], prompts: Mapping[int, tuple[int, ...]]) -> None:
        """Prefill each different prompt with its pictures once, or drop rows."""
        if prompts:
            order = self._prefill()
        super().seat(order, {})
        self._ahead = self._ahead[torch.tensor(order, device=self._ahead.device)]

    def _prefill(self) -> list[int]:
        """One forward pass of the different prompts; returns the number of each request's."""
        from transformers import DynamicCache

        device, keys = self._model.device, [(one.ids, id(one.pixels)) for one in self._requests]
        different = {key: one for key, one in zip(keys, self._requests, strict=True)}
        width = max(len(one.ids) for one in different.values())
        ids = torch.tensor([[0] * (width - len(one.ids)) + list(one.ids) for one in different.values()], device=device)
        rows = [[0] * (width - len(one.ids)) + [1] * len(one.ids) for one in different.values()]
        self._mask, self._cache = torch.tensor(rows, device=device), DynamicCache(config=self._model.config)
        told = given(self._model, ids, self._mask, [one.pixels or {} for one in different.values()])
        last = told["position_ids"][..., -1]
        last = last.amax(0) if last.dim() > 1 else last
        self._ahead = last - (self._mask.sum(-1) - 1)  # how far positions are from the number of tokens before
        self._logits = self._model(**told, **{self._name: self._cache}, use_cache=True, logits_to_keep=1).logits[:, -1]
        places = {key: place for place, key in enumerate(different)}
        return [places[key] for key in keys]

    def _forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        read = ids.masked_fill(ids == self._model.config.image_token_id, STAND_IN)
        return super()._forward(read, positions + self._ahead[:, None])
