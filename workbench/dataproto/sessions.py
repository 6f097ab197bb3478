"""Episodes that are several sequences: rows with one `uid` and one value in the column `session` are one episode."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from workbench.dataproto.core import DataProto

SESSION = "session"
"""The column that is there where an episode of the batch is more than one row."""
POLICY = "policy"
"""The column that is there where several policies speak in an episode: the name of the one whose tokens a row holds."""


def last_rows(batch: DataProto, column: str | None = SESSION) -> Tensor:
    """For each row the number of its episode's last row: [B] int64. Without the column each row is an episode."""
    if column is None or column not in batch:
        return torch.arange(len(batch))
    uids = batch["uid"] if "uid" in batch else [None] * len(batch)
    names = list(zip(uids, batch[column], strict=True))
    last = {name: row for row, name in enumerate(names)}
    return torch.tensor([last[name] for name in names], dtype=torch.long)


def is_last(batch: DataProto) -> Tensor:
    """[B] bool: True on the last row of each episode, which stands for it where episodes are counted."""
    return last_rows(batch) == torch.arange(len(batch))


def episodes(batch: DataProto) -> list[list[int]]:
    """The row numbers of each episode, in the order of their first rows."""
    found: dict[int, list[int]] = {}
    for row, last in enumerate(last_rows(batch).tolist()):
        found.setdefault(last, []).append(row)
    return list(found.values())


def sequence_of(batch: DataProto, row: int) -> tuple[int, list[int]] | None:
    """(number of a row's episode, rows of that episode in order); None in a batch whose rows are episodes each."""
    if SESSION not in batch:
        return None
    return next((number, rows) for number, rows in enumerate(episodes(batch)) if row in rows)


def row_name(batch: DataProto, row: int) -> str:
    """`row 7`, or `row 7 (episode 3, sequence 2 of 3)`."""
    found = sequence_of(batch, row)
    if found is None:
        return f"row {row}"
    number, rows = found
    return f"row {row} (episode {number}, sequence {rows.index(row) + 1} of {len(rows)})"


def of_first_policy(batch: DataProto) -> DataProto:
    """The rows of the policy that `meta_info` names as the first; all rows where there is one policy."""
    if POLICY not in batch:
        return batch
    return batch.select_idxs([row for row, name in enumerate(batch[POLICY]) if name == batch.meta_info.get(POLICY)])


def alike(parts: Sequence[DataProto]) -> list[DataProto]:
    """Batches to concatenate: if one has the column `session`, all have it; where it was missing each row is an episode."""
    if not any(SESSION in part for part in parts):
        return list(parts)
    return [part if SESSION in part else part.with_columns({SESSION: list(range(len(part)))}) for part in parts]
