"""Batches of different widths side by side: prompts are padded on the left, responses on the right, as a rollout does."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from workbench.columns import declared
from workbench.dataproto import DataProto


def joined(parts: Sequence[DataProto], pad_id: int = 0) -> DataProto:
    """Rows of all parts; their meta_info is the first one's. Columns must be the same, widths S and T may differ."""
    width_s = max(part["prompts"].shape[1] for part in parts)
    width_t = max(part["responses"].shape[1] for part in parts)
    first = parts[0].meta_info
    return DataProto.concat([_widened(part, width_s, width_t, pad_id).with_meta(**first) for part in parts])


def _widened(part: DataProto, width_s: int, width_t: int, pad_id: int) -> DataProto:
    s, t = width_s - part["prompts"].shape[1], width_t - part["responses"].shape[1]
    if not s and not t:
        return part
    changed = {}
    for name in part.batch:
        column = declared(name)
        dims = column.dims if column is not None else ()
        value = pad_id if name in ("prompts", "responses", "input_ids") else 0
        left, right = s * ("S" in dims or "S+T" in dims), t * ("T" in dims or "S+T" in dims)
        if left or right:
            filler = False if part[name].dtype == torch.bool else value
            changed[name] = pad(part[name], (left, right), value=filler)
    objects = {name: part[name] for name in part.non_tensor_batch}
    rest = {name: part[name] for name in part.batch if name not in changed}
    return DataProto({**rest, **changed}, objects, dict(part.meta_info), origins=dict(part.origins))
