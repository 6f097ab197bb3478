"""A mutable, verl-shaped copy of a batch, for foreign code that expects to write into what it gets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass
class MutableItem:
    """One row, as verl's `DataProtoItem`."""

    batch: dict[str, torch.Tensor]
    non_tensor_batch: dict[str, Any]
    meta_info: dict[str, Any]


@dataclass
class MutableDataProto:
    """`batch`, `non_tensor_batch` and `meta_info` as plain dicts; `len`, `[int]` and iteration."""

    batch: dict[str, torch.Tensor]
    non_tensor_batch: dict[str, np.ndarray]
    meta_info: dict[str, Any]

    def __len__(self) -> int:
        columns: list[Any] = [*self.batch.values(), *self.non_tensor_batch.values()]
        return len(columns[0]) if columns else 0

    def __getitem__(self, row: int) -> MutableItem:
        if not -len(self) <= row < len(self):
            raise IndexError(row)
        return MutableItem(
            {name: tensor[row] for name, tensor in self.batch.items()},
            {name: values[row] for name, values in self.non_tensor_batch.items()},
            self.meta_info,
        )
