"""A batch over ranks: who gets which rows, and how what comes back is put together in the old order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from workbench.dataproto import DataProto
from workbench.errors import BatchError, EngineError, message
from workbench.functional.balancing import balanced, workload


@dataclass(frozen=True)
class Shares:
    """Row numbers of each rank; padded rows repeat rows that somebody has, and are dropped again."""

    rows: tuple[tuple[int, ...], ...]
    """Per rank, its own rows first, then padding."""
    own: tuple[int, ...]
    """Per rank, how many of them are its own."""
    total: int
    """Rows of the batch."""

    def parts(self, batch: DataProto) -> list[DataProto]:
        """The batch's rows, a batch a rank (some may be empty)."""
        return [batch.select_idxs(list(rows)) for rows in self.rows]

    def joined(self, results: Sequence[Any]) -> Any:
        """One result of all ranks', rows in the batch's order.

        Batches and tensors [b, …] lose their padding and are put together; dicts of them entry by entry; anything else
        (`None`, metrics) comes back as the list by rank. Raises `EngineError` where a rank's rows are not as many as it got.
        """
        first = next((one for one, own in zip(results, self.own, strict=True) if own), None)
        if (
            isinstance(first, dict)
            and first
            and all(isinstance(one, DataProto | torch.Tensor) for one in first.values())
        ):
            return {
                name: self.joined([one[name] if own else None for one, own in self._with(results)]) for name in first
            }
        if not isinstance(first, DataProto | torch.Tensor):
            return list(results)
        kept = []
        for rank, (one, own) in enumerate(self._with(results)):
            if own and len(one) != len(self.rows[rank]):
                raise EngineError(
                    message(f"the result of rank {rank}", expected=f"{len(self.rows[rank])} rows", found=len(one))
                )
            if own:
                kept.append(one[:own])
        together = DataProto.concat(kept) if isinstance(first, DataProto) else torch.cat(kept)
        order = [row for rows, own in zip(self.rows, self.own, strict=True) for row in rows[:own]]
        back = torch.argsort(torch.tensor(order, dtype=torch.long))
        return together.select_idxs(back) if isinstance(together, DataProto) else together[back]

    def _with(self, results: Sequence[Any]) -> list[tuple[Any, int]]:
        return list(zip(results, self.own, strict=True))


def share(batch: DataProto, size: int, *, balance: bool = True, pad: bool = False) -> Shares:
    """Who gets which rows of a batch of any size.

    `balance` evens out the work (24576·L + L² of a row of L tokens, verl's) where there is an `attention_mask`; else rows go
    in order, the first ranks one more. `pad` gives every rank as many rows, repeating some; without it a rank may get none.
    Raises `BatchError` for an empty batch.
    """
    total = len(batch)
    if total == 0 or size < 1:
        raise BatchError(
            message("sharing out rows", expected="at least one row and one rank", found=f"{total} rows, {size} ranks")
        )
    loads = _loads(batch) if balance else None
    if loads is not None and total >= size:
        rows = balanced(loads, size, equal_size=total % size == 0)
    else:
        least, more = divmod(total, size)
        ends = [least * rank + min(rank, more) for rank in range(size + 1)]
        rows = [list(range(start, stop)) for start, stop in pairwise(ends)]
    own = tuple(len(one) for one in rows)
    if pad:
        width = max(own)
        rows = [one + [(one or [0])[place % max(len(one), 1)] for place in range(width - len(one))] for one in rows]
    return Shares(tuple(tuple(one) for one in rows), own, total)


def _loads(batch: DataProto) -> list[float] | None:
    if "attention_mask" not in batch.batch:
        return None
    return [workload(float(length)) for length in batch.batch["attention_mask"].sum(-1).tolist()]


def imbalance(shares: Shares, batch: DataProto) -> Mapping[str, float]:
    """`min`, `max`, `mean` work of the ranks, padding included, and `minmax_diff`."""
    from workbench.functional.balancing import imbalance as measured

    loads = _loads(batch) or [1.0] * len(batch)
    return measured(loads, shares.rows)
