"""The walk over two lists of phases, in order: rows, the columns that a phase wrote as it wrote them, metrics."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from workbench.divergence.rows import Rows, align
from workbench.divergence.same import Difference, How
from workbench.divergence.sides import Side, pairs, writer
from workbench.divergence.tokens import column_difference, dtypes
from workbench.trace import Phase

_TIMES = ("timing_s/", "perf/")
_MERE = (int, float, str, bool, type(None))


@dataclass(frozen=True)
class Seen:
    """One thing that was compared."""

    number: int
    """Which pair of phases."""
    kind: str
    """`column`, `metric`, `rows` or `phase`."""
    phase: str | None
    column: str | None
    found: Difference | None = None


class Walk:
    """Everything that two sides have, compared in order; can be walked again."""

    def __init__(self, sides: tuple[Side, Side], how: How, columns: tuple[str, ...] | None, begin: int = 0) -> None:
        self.sides, self.how, self.columns, self.begin = sides, how, columns, begin
        self.notes: list[str] = []
        self._pairs = list(pairs(*sides))

    def __iter__(self) -> Iterator[Seen]:
        self.notes.clear()
        rows: Rows | None = None
        order_said = False
        for number, (one, two, later) in list(enumerate(self._pairs))[self.begin :]:
            if one is None or two is None:
                there = one or two
                if there is not None and any(self._wanted(name) for name in there.wrote):
                    named = (one and one.stage, two and two.stage)
                    found = Difference(why="phase", first=named[0], second=named[1], rows=len(there.batch))
                    yield Seen(number, "phase", there.stage, None, found)
                continue
            if later and not order_said and self.columns is None:
                order_said = True
                order = [" ".join(phase.stage for phase in side[1:]) for side in self.sides]
                yield Seen(number, "phase", one.stage, None, Difference(why="order", first=order[0], second=order[1]))
            self._note(*_settings(one, two), *_facts(one, two, everything=not number))
            aligned = align(one.batch, two.batch)
            self._note(aligned.note)
            if aligned.found is not None and aligned != rows:
                yield Seen(number, "rows", one.stage or writer("uid", one.batch, two.batch), "uid", aligned.found)
            rows = aligned
            yield from self._columns(number, one, two, aligned)
            yield from self._metrics(number, one, two)

    def _columns(self, number: int, one: Phase, two: Phase, rows: Rows) -> Iterator[Seen]:
        for name in (*one.wrote, *(name for name in two.wrote if name not in one.wrote)):
            if not self._wanted(name):
                continue
            phase = one.stage or writer(name, one.batch, two.batch)
            both = name in one.batch and name in two.batch
            if name == "uid" and both:  # the rows were aligned by it
                found = None
            else:
                found = column_difference(name, one.batch, two.batch, rows, self.how)
            stored = dtypes(name, one.batch, two.batch) if both else ("", "")
            if stored[0] != stored[1]:
                self._note(f"{name}: {stored[0]} → {stored[1]}")
            yield Seen(number, "column", phase, name, found)

    def _metrics(self, number: int, one: Phase, two: Phase) -> Iterator[Seen]:
        if self.columns is not None:
            return
        for key in dict.fromkeys((*one.metrics, *two.metrics)):
            if key.startswith(_TIMES):
                continue
            a, b = one.metrics.get(key), two.metrics.get(key)
            found = None
            if a is None or b is None or not self.how.numbers(a, b):
                largest = abs(a - b) if a is not None and b is not None else float("inf")
                found = Difference(why="metric", first=a, second=b, largest=largest)
            yield Seen(number, "metric", one.stage, key, found)

    def _wanted(self, name: str) -> bool:
        return self.columns is None or name in self.columns

    def _note(self, *notes: str) -> None:
        self.notes += [note for note in dict.fromkeys(notes) if note and note not in self.notes]

    def uid(self, seen: Seen, row: int) -> Any:
        """The prompt of the first side's row."""
        phase = self._pairs[seen.number][0]
        if phase is None or "uid" not in phase.batch.non_tensor_batch or row >= len(phase.batch):
            return None
        return phase.batch.non_tensor_batch.part("uid", row, row + 1)[0]

    def weights(self, seen: Seen) -> Iterator[str]:
        """Whether the column was written under other weights."""
        one, two, _ = self._pairs[seen.number]
        made = [phase.batch.origins.get(seen.column or "") if phase is not None else None for phase in (one, two)]
        versions = [origin.policy_version if origin is not None else None for origin in made]
        if None not in versions and versions[0] != versions[1]:
            yield f"{seen.column} was written under policy version {versions[0]} → {versions[1]}"


# --- what may explain it ------------------------------------------------------------------------


def _settings(one: Phase, two: Phase) -> Iterator[str]:
    for key in dict.fromkeys((*one.settings, *two.settings)):
        a, b = (_said(phase.settings, key) for phase in (one, two))
        if a != b:
            yield f"{one.stage}.{key}: {a} → {b}"
        elif one.source.get(key, "") != two.source.get(key, "") and key in one.source and key in two.source:
            yield f"{one.stage}.{key}: another source under the same name, {a}"


def _facts(one: Phase, two: Phase, *, everything: bool) -> Iterator[str]:
    """Items of `meta_info` that differ, once: at the start."""
    if not everything:
        return
    a, b = one.batch.meta_info, two.batch.meta_info
    for key in dict.fromkeys((*a, *b)):
        if isinstance(a.get(key), _MERE) and isinstance(b.get(key), _MERE) and a.get(key) != b.get(key):
            yield f"meta_info {key}: {_said(a, key)} → {_said(b, key)}"


def _said(values: Mapping[str, Any], key: str) -> str:
    """A setting for a note; addresses of objects left out, because they differ always."""
    if key not in values:
        return "not there"
    value = values[key]
    return re.sub(r" at 0x[0-9a-f]+", "", value if isinstance(value, str) else repr(value))[:100]
