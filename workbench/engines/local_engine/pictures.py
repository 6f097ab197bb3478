"""Rows with pictures: what a vision-language model's own forward is given.

They go through the model padded. A picture's token in a response, which no picture belongs to, is read as `STAND_IN`, in
sampling as in scoring: the model would look for its picture.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

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
