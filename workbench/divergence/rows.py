"""Which row of one batch belongs to which row of another."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from workbench.dataproto import DataProto
from workbench.divergence.same import Difference, held, read


@dataclass(frozen=True)
class Rows:
    """Which row of one side belongs to which of the other."""

    pairs: tuple[tuple[int, int], ...] | None = None
    """(row of the first, row of the second); None: all, as they stand."""
    found: Difference | None = None
    """Where the sides do not hold the same rows."""
    note: str = ""

    def first(self, row: int) -> int:
        """Its number on the first side."""
        return row if self.pairs is None else self.pairs[row][0]

    def second(self, row: int) -> int:
        """Its number on the second side."""
        return row if self.pairs is None else self.pairs[row][1]

    def of(self, x: Any, side: int) -> Any:
        """A column's rows that the other side has as well, in the order of the first."""
        return x if self.pairs is None else x[[pair[side] for pair in self.pairs]]


def align(a: DataProto, b: DataProto) -> Rows:
    """Rows by uid and number within it; as they stand where a side has no uid, or other names for the same groups."""
    if "uid" not in a or "uid" not in b:
        if len(a) == len(b):
            return Rows()
        common = min(len(a), len(b))
        found = Difference(
            why="rows", row=common, first=f"{len(a)} rows", second=f"{len(b)} rows", rows=max(len(a), len(b))
        )
        return Rows(tuple((row, row) for row in range(common)), found)
    if held(a, "uid") is held(b, "uid"):
        return Rows()
    keys, others = _keys(read(a, "uid")), _keys(read(b, "uid"))
    if keys == others:
        return Rows()
    places = {key: row for row, key in enumerate(others)}
    pairs = tuple((row, places[key]) for row, key in enumerate(keys) if key in places)
    if len(pairs) == len(keys) == len(others):
        return Rows(pairs, note="the rows stand in another order: aligned by uid")
    if not pairs and len(keys) == len(others) and _groups(keys) == _groups(others):
        return Rows(note="no uid is shared: rows are compared as they stand")
    return Rows(pairs, _others(keys, others, len(pairs)))


def _others(keys: list[tuple[Any, int]], others: list[tuple[Any, int]], shared: int) -> Difference:
    """The first row that one side alone has."""
    known = set(others)
    alone = next((row for row, key in enumerate(keys) if key not in known), None)
    if alone is None:
        known = set(keys)
        alone = next(row for row, key in enumerate(others) if key not in known)
        uid, first, second = others[alone][0], None, others[alone][0]
    else:
        uid = first = keys[alone][0]
        second = others[alone][0] if alone < len(others) else None
    return Difference(
        why="rows",
        row=alone,
        uid=uid,
        first=first,
        second=second,
        inside=f"{len(keys)} rows against {len(others)}, {shared} of them in both",
        rows=len(keys) + len(others) - 2 * shared,
    )


def _keys(uids: Any) -> list[tuple[Any, int]]:
    seen: Counter[Any] = Counter()
    keys = []
    for value in uids:
        uid = value if isinstance(value, str | int) else repr(value)
        keys.append((uid, seen[uid]))
        seen[uid] += 1
    return keys


def _groups(keys: list[tuple[Any, int]]) -> list[int]:
    numbers: dict[Any, int] = {}
    return [numbers.setdefault(uid, len(numbers)) for uid, _ in keys]
