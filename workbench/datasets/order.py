"""Which rows a step sees: a pure function of the seed, the batch size and the step."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from numbers import Integral
from typing import Any

import torch

from workbench.errors import DataError, message
from workbench.seeds import derive


def permutation(rows: int, seed: int, epoch: int) -> list[int]:
    """The order of one epoch (from 0)."""
    generator = torch.Generator().manual_seed(derive(seed, "order", epoch))
    return torch.randperm(rows, generator=generator).tolist()


def place(rows: int, batch_size: int, step: int) -> tuple[int, int]:
    """(epoch from 0, first position in it) of a step (from 1). An epoch's uneven rest is dropped.

    Raises `DataError` where a batch is larger than the data or the step is below 1.
    """
    if not isinstance(batch_size, Integral) or not 1 <= batch_size <= rows:
        raise DataError(message("batch size", expected=f"1 to {rows}, the rows there are", found=batch_size))
    if not isinstance(step, Integral) or step < 1:
        raise DataError(message("step", expected="a whole number ≥ 1", found=step))
    per_epoch = rows // batch_size
    epoch, index = divmod(step - 1, per_epoch)
    return epoch, index * batch_size


@dataclass(frozen=True, kw_only=True)
class Cursor:
    """Where a run stands in its data: for checkpoints, verified on resume."""

    step: int
    """Steps done."""
    epoch: int
    """Epoch of the next step, stored and not computed from a loader's length."""
    offset: int
    """First position of the next step in it."""
    data_hash: str
    """Of the rows."""
    seed: int
    """Of the order."""
    batch_size: int
    """Prompts a step."""

    @classmethod
    def after(cls, step: int, *, rows: int, data_hash: str, seed: int, batch_size: int) -> Cursor:
        """The cursor when `step` steps are done."""
        epoch, offset = place(rows, batch_size, step + 1)
        return cls(step=step, epoch=epoch, offset=offset, data_hash=data_hash, seed=seed, batch_size=batch_size)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)
