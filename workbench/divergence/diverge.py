"""The walk over two traces or batches, and the first place where they part.

A local run beside a cluster's, a killed and resumed run beside one that was not, a step made by hand beside the recorded
one, our batch beside another library's dump: the last columns of such a pair all differ, and only the first says why.

Phases are walked in order, in each the columns that it wrote, in the order of writing, then its metrics. So every column is
looked at once, and one on disk is read when its turn comes and not kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from workbench.divergence.same import Beside, Difference, How
from workbench.divergence.sides import START, check_names, opened, sides_of
from workbench.divergence.walk import Seen, Walk


class Compared(NamedTuple):
    """How much was found the same before the two part (or in all)."""

    phases: int
    """Phases, the start not counted."""
    columns: int
    """Columns, each counted where it was written."""
    metrics: int
    """Metrics; times are not compared."""


class Spread(NamedTuple):
    """One thing that differs."""

    phase: str | None
    column: str | None
    """Column or metric; None where a whole phase differs."""
    rows: int
    """Rows in which it differs; all of them where the shape does, 0 for a metric."""
    largest: float | None
    """Largest absolute difference of floats; infinite where one side has NaN or nothing; None for everything else."""


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """What `diverge` found: the first place where two traces or batches part, or that they do not."""

    why: str | None = None
    """What differs there: `values`, `shape`, `dtype`, `column` (one side has none), `phase` (one side has none), `order` (of
    phases), `rows` (a side has others), `metric`; None where nothing does."""
    phase: str | None = None
    """Its phase, `"start"` for the batch before the first; None where a batch alone does not say who wrote the column."""
    column: str | None = None
    """Its column; for `metric` the metric's key."""
    row: int | None = None
    """Its row, as the first side counts."""
    other_row: int | None = None
    """The same row, as the second side counts."""
    uid: Any = None
    """The prompt of that row, where it is known."""
    token: int | None = None
    """Its position on the second dim, as the first side counts (as the second does, where only that has the place)."""
    token_ids: tuple[int | None, int | None] | None = None
    """The token there on both sides; None where no batch has ids."""
    inside: str = ""
    """Where in an object or in a longer tensor: `.parts['right']`, `[2]`."""
    character: int | None = None
    """The first character in which two texts differ, from 0."""
    first: Any = None
    """The value on the first side; None where it has none."""
    second: Any = None
    """The value on the second side; None where it has none."""
    beside: tuple[Beside, ...] = ()
    """The token, and a few before and after."""
    notes: tuple[str, ...] = ()
    """What may explain it: settings that differ up to there, rows in another order, other dtypes, other weights."""
    compared: Compared
    """How much was the same before."""
    walk: Walk | None = field(default=None, compare=False)
    """What `later` goes on from."""

    @property
    def identical(self) -> bool:
        """Nothing differs; `compared` says of how much."""
        return self.why is None

    @cached_property
    def later(self) -> tuple[Spread, ...]:
        """Everything that differs from there on, the place itself first; the rest is read when this is asked for."""
        if self.walk is None:
            return ()
        found = ((one, one.found) for one in self.walk)
        return tuple(Spread(one.phase, one.column, how.rows, how.largest) for one, how in found if how is not None)

    def __repr__(self) -> str:
        from workbench.views.divergences import divergence_text

        return divergence_text(self)

    def _repr_html_(self) -> str:
        from workbench.views.divergences import divergence_html

        return divergence_html(self)


def diverge(
    first: Any,
    second: Any,
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    columns: Sequence[str] | None = None,
    everywhere: bool = False,
) -> Divergence:
    """The first phase, column, row and token at which two records of a step part.

    Each side is a `Trace`, something with a `.trace` (a stepper), a `DataProto`, or the folder of a saved trace or batch.
    With a batch on either side the end states are compared: columns in declared order, those of one side alone last, and
    `phase` is who wrote the column.

    - Floats are the same within |a − b| ≤ atol + rtol·|b|, and NaN is NaN; ids, masks and texts must be equal.
    - Padding neither hides nor makes a difference: a place counts where either side's mask has it (`response_mask` for
      [B, T]; for `responses` the attention mask, so that tool text counts), and wider padding is no difference.
      `everywhere=True` compares masked places, too, and wants one shape.
    - Rows in another order are aligned by uid and number within it. Where no uid is shared but the groups are the same
      (another library's names), rows are compared as they stand. Both are said in `notes`.
    - Records are compared field by field, their `seconds` left out; metrics that are times are left out, too.
    - A dtype of another width is a note, one of another kind (float, int, bool, objects) a difference.

    Only `columns` are compared where given, and no metrics. Raises `ColumnMissing` for a name that neither side has,
    `BatchError` for what is no trace and no batch.
    """
    sides = sides_of(opened(first), opened(second))
    check_names(sides, columns)
    walk = Walk(sides, How(rtol, atol, everywhere), None if columns is None else tuple(columns))
    kinds: Counter[str] = Counter()
    phases: dict[str | None, None] = {}
    for seen in walk:
        if seen.found is not None:
            same = Compared(len(phases.keys() - {START, None, seen.phase}), kinds["column"], kinds["metric"])
            return _divergence(walk, seen, seen.found, same)
        kinds[seen.kind] += 1
        phases[seen.phase] = None
    same = Compared(len(phases.keys() - {START, None}), kinds["column"], kinds["metric"])
    return Divergence(notes=tuple(walk.notes), compared=same)


def _divergence(walk: Walk, seen: Seen, found: Difference, same: Compared) -> Divergence:
    return Divergence(
        why=found.why,
        phase=seen.phase,
        column=seen.column,
        row=found.row,
        other_row=found.other_row,
        uid=found.uid if found.uid is not None or found.row is None else walk.uid(seen, found.row),
        token=found.token,
        token_ids=found.token_ids,
        inside=found.inside,
        character=found.character,
        first=found.first,
        second=found.second,
        beside=found.beside,
        notes=(*walk.notes, *walk.weights(seen)),
        compared=same,
        walk=Walk(walk.sides, walk.how, walk.columns, seen.number),
    )
