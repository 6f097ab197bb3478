"""Compares two records of a step: how far they are apart (`compare`), and the first place where they part (`diverge`).

A local run and one on a cluster, a resumed run and an uninterrupted one, a step made by hand and the recorded one, our
batch and another library's dump: the last columns of such a pair all differ, and only the first difference says why.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from workbench.base.errors import BatchError, ColumnMissing
from workbench.base.shown import Shown, shows
from workbench.dataproto.columns import COLUMNS, nearest_column, writer_of
from workbench.dataproto.core import DataProto
from workbench.dataproto.same import How, same, unchanged
from workbench.functional import masked_mean
from workbench.steps import differences
from workbench.steps.differences import Compared, Divergence, Pair, opened, stored_as
from workbench.steps.trace import COMPUTED_BY, Phase, Trace, completed

_HOW = How(kinds=True)
"""The seconds that scoring took do not count."""


@dataclass(frozen=True, kw_only=True)
class ColumnChange:
    """How one column differs between the two batches that `compare` compared."""

    name: str
    rows: int
    """Rows in which it differs."""
    largest: float | None
    """Largest absolute difference; None for objects, NaN where shapes differ."""


@dataclass(frozen=True, kw_only=True)
class RowChange:
    """How the reward and the advantage of one row differ between two batches."""

    row: int
    uid: Any
    reward: tuple[float, float] | None
    """Before and after; None where a side has none."""
    advantage: tuple[float, float] | None
    """Mean over the row's response tokens, before and after."""

    @property
    def flipped(self) -> bool:
        """Whether the advantage changed sign."""
        return self.advantage is not None and self.advantage[0] * self.advantage[1] < 0

    @property
    def size(self) -> float:
        """The larger of the absolute changes of the row's reward and of its advantage; 0.0 where neither is known."""
        pairs = [pair for pair in (self.reward, self.advantage) if pair is not None]
        return max((abs(b - a) for a, b in pairs), default=0.0)


@dataclass(frozen=True, kw_only=True, repr=False)
class Comparison(Shown):
    """Result of `compare`: the columns, rows and metrics that differ, with the rows whose advantage changed sign first, then those that
    changed most."""

    columns: tuple[ColumnChange, ...]
    only: tuple[tuple[str, ...], tuple[str, ...]]
    """Columns that only the first side has, and columns that only the second has."""
    rows: tuple[RowChange, ...]
    metrics: dict[str, tuple[float, float]]
    """Metric → its value on the first and on the second side, where they differ; timings are left out."""
    traces: tuple[Trace, Trace] = field(repr=False)

    @property
    def identical(self) -> bool:
        """Whether the two sides have the same columns, values and metrics."""
        return not (self.columns or self.metrics or any(self.only))

    def row(self, number: int) -> Any:
        """One row on both sides: its responses as a text difference, rewards, their parts and verdicts side by side."""
        return shows(self, "row", number)

    @property
    def sign_flips(self) -> int:
        """Number of rows whose advantage changed sign."""
        return sum(row.flipped for row in self.rows)


def compare(first: Any, second: Any) -> Comparison:
    """Compare the last batches and the metrics of two records of a training step on the same rows.

    Each side is a `Trace`, a stepper, a batch, or the folder of a saved one. Raises `BatchError` where rows or uids differ.
    """
    sides = [opened(side, "compare", "traces, steppers or batches") for side in (first, second)]
    first, second = (Trace(side) if isinstance(side, DataProto) else side for side in sides)
    a, b = first.batch, second.batch
    _check_rows(a, b)
    only = (tuple(name for name in a.columns if name not in b), tuple(name for name in b.columns if name not in a))
    rows = tuple(sorted(_rows(a, b), key=lambda row: (not row.flipped, -row.size)))
    x, y = first.metrics, second.metrics
    keys = [key for key in x if key in y and not key.startswith("timing_s/")]
    metrics = {key: (x[key], y[key]) for key in keys if not _HOW.numbers(x[key], y[key])}
    return Comparison(columns=tuple(_changes(a, b)), only=only, rows=rows, metrics=metrics, traces=(first, second))


def _check_rows(a: DataProto, b: DataProto) -> None:
    if len(a) != len(b):
        raise BatchError("the two batches have different rows", expected=f"{len(a)} rows", found=f"{len(b)} rows")
    if "uid" in a and "uid" in b and list(a["uid"]) != list(b["uid"]):
        ours, theirs = set(a["uid"]), set(b["uid"])
        expected, found = "the same prompts in the same order", f"{len(ours & theirs)} of {len(ours)} prompts in both"
        do = "start both steppers from the same rows.batch(…), or call wb.diverge, which aligns the rows"
        raise BatchError("the two batches have different rows", expected=expected, found=found, do=do)


def _changes(a: DataProto, b: DataProto) -> Iterator[ColumnChange]:
    pair = Pair((a, b))
    repadded = any(pair.sizes[0].get(letter) != pair.sizes[1].get(letter) for letter in ("S", "T"))
    for name in a.columns:
        if name not in b or unchanged(name, a, b):
            continue
        x, y = a[name], b[name]
        if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor):
            rows, largest = sum(not same(one, two, _HOW) for one, two in zip(x, y, strict=True)), None
        else:
            x, y = _without_padding(name, pair, x, y) if repadded else (x, y)
            rows, largest = differences.extent(x, y) if x.shape == y.shape else (len(x), float("nan"))
        if rows:
            yield ColumnChange(name=name, rows=rows, largest=largest)


def _without_padding(name: str, pair: Pair, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two [B, tokens] of different widths, tokens aligned and zeros in all padding, so that padding is no difference.
    Unchanged for columns whose second dim is not known."""
    laid = differences.lay(name, pair, x, y) if x.dim() == y.dim() == 2 else None
    first, second = laid.masks(real=True) if laid is not None else (None, None)
    if laid is None or first is None or second is None:
        return x, y
    return laid.left.masked_fill(~first, 0), laid.right.masked_fill(~second, 0)


def _rows(a: DataProto, b: DataProto) -> list[RowChange]:
    """The rows whose reward or mean advantage differs."""
    pairs = [_per_row(a, b, name) for name in ("reward", "advantages")]
    changed = torch.zeros(len(a), dtype=torch.bool)
    for values in pairs:
        if values is not None:
            changed |= (values[1] - values[0]).abs() > 0
    uids = a["uid"] if "uid" in a else range(len(a))
    lists = [None if values is None else [one.tolist() for one in values] for values in pairs]
    found = []
    for row in changed.nonzero()[:, 0].tolist():
        reward, advantage = (None if values is None else (values[0][row], values[1][row]) for values in lists)
        found.append(RowChange(row=row, uid=uids[row], reward=reward, advantage=advantage))
    return found


def _per_row(a: DataProto, b: DataProto, name: str) -> tuple[torch.Tensor, torch.Tensor] | None:
    """[B] float64 of both sides; None where one has no such column. A column that both share is computed once."""
    if name not in a or name not in b:
        return None
    first = _means(a, name)
    held = unchanged(name, a, b) and (a[name].dim() == 1 or unchanged("response_mask", a, b))
    return first, (first if held else _means(b, name))


def _means(batch: DataProto, name: str) -> torch.Tensor:
    values = batch[name].double()
    return values if values.dim() == 1 else masked_mean(values, batch["response_mask"], -1)


# --- the first difference -----------------------------------------------------------------------

START = "start"
"""The name of the phase that stands for the batch before the first one."""

Side = tuple[Phase, ...]
_Seen = tuple[int, str, Divergence]
"""Number of the pair of phases; `column`, `metric`, `rows` or `phase`; what was found there, also where it is the same."""
_TIMES = ("timing_s/", "perf/")
_TAKEN_OVER = "recorded/"
"""Metric of a replayed stage that could not be run again, and returned what the run had recorded."""
_MERE = (int, float, str, bool, type(None))


def diverge(
    first: Any,
    second: Any,
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    columns: Sequence[str] | None = None,
    everywhere: bool = False,
) -> Divergence:
    """Find the first phase, column, row and token at which two records of a training step differ.

    Each side is a `Trace`, something with a `.trace` (a stepper), a `DataProto`, or the folder of a saved trace or batch.
    Where either side is a batch, only the last batches are compared: columns in the order of their declaration, those of
    one side alone last; the result's `phase` is then the stage that wrote the column.

    - Floats are the same within |a − b| ≤ atol + rtol·|b|, and NaN equals NaN; ids, masks and texts must be equal.
    - Padding is ignored, however wide: a token is compared where either side's mask includes it (`response_mask` for
      [B, T]; for `responses` the attention mask, so that tool text is compared). `everywhere=True` compares masked tokens
      too; then tensors of another shape differ.
    - Rows in another order are aligned by uid, and rows of one uid by their order. Where no uid is shared but the rows form
      the same groups (another library's uids), rows are compared in their order. `notes` report both cases.
    - Objects such as `Score` are compared field by field, without their `seconds`; timing metrics are not compared.
    - A replayed stage that returned its recorded outputs (metric `recorded/<stage>`) is only a note.
    - Another width of a dtype (float32, bfloat16) is only a note; another kind (float, int, bool, objects) is a difference.

    With `columns`, only these are compared, and no metrics. Raises `ColumnMissing` for a name that neither side has,
    `BatchError` for a side that is neither a trace nor a batch.
    """
    expected = "a trace, a stepper, a batch, or the folder of a saved one"
    sides = _sides(*(opened(side, "diverge", expected) for side in (first, second)))
    _check_names(sides, columns)
    walk = _Walk(sides, How(rtol=rtol, atol=atol), columns, everywhere)
    kinds: Counter[str] = Counter()
    phases: set[str | None] = set()
    found, place, every = Divergence(), 0, walk.every()
    for number, kind, one in every:
        if not one.identical:
            found, place = one, number
            break
        kinds[kind] += 1
        phases.add(one.phase)
    compared = Compared(len(phases - {START, None, found.phase}), kinds["column"], kinds["metric"])
    if found.identical:
        return replace(found, notes=tuple(walk.notes), compared=compared)
    uid = walk.uid(place, found.row) if found.uid is None else found.uid
    notes = (*walk.notes, *walk.weights(place, found.column or ""))
    return replace(found, uid=uid, notes=notes, compared=compared, further=(one for _, _, one in every))


class _Walk:
    """Compares all parts of two sides in order."""

    def __init__(self, sides: tuple[Side, Side], how: How, columns: Sequence[str] | None, everywhere: bool) -> None:
        self.sides, self.how, self.columns, self.everywhere = sides, how, columns, everywhere
        self.notes: list[str] = []
        self._pairs = list(_pairs(*sides))

    def every(self) -> Iterator[_Seen]:
        """Yields all that is compared, in order."""
        rows: Divergence | None = None
        order_reported = False
        for number, (one, two, later) in enumerate(self._pairs):
            if one is None or two is None:
                yield from self._alone(number, one, two)
                continue
            if later and not order_reported and self.columns is None:
                order_reported = True
                order = [" ".join(phase.stage for phase in side[1:]) for side in self.sides]
                yield number, "phase", Divergence(why="order", phase=one.stage, first=order[0], second=order[1])
            self._note(*(_taken_over(one, two) or _settings(one, two)), *(_facts(one, two) if number == 0 else ()))
            pair = differences.aligned(one.batch, two.batch)
            self._note(pair.note)
            if pair.found is not None and pair.found != rows:
                phase = one.stage or _writer("uid", one.batch, two.batch)
                yield number, "rows", replace(pair.found, phase=phase, column="uid")
            rows = pair.found
            yield from self._columns(number, one, two, pair)
            yield from self._metrics(number, one, two)

    def _alone(self, number: int, one: Phase | None, two: Phase | None) -> Iterator[_Seen]:
        there = one or two
        if there is not None and any(map(self._wanted, there.wrote)):
            first, second = (phase and phase.stage for phase in (one, two))
            rows = len(there.batch)
            yield number, "phase", Divergence(why="phase", phase=there.stage, first=first, second=second, rows=rows)

    def _columns(self, number: int, one: Phase, two: Phase, pair: Pair) -> Iterator[_Seen]:
        for name in filter(self._wanted, dict.fromkeys((*one.wrote, *two.wrote))):
            first, second = (stored_as(batch, name) for batch in pair.batches)
            both = first is not None and second is not None
            if both and first != second:
                self._note(f"{name}: {first} → {second}")
            found = None
            if name != "uid" or not both:  # the rows were aligned by it
                found = differences.column_difference(name, pair, self.how, everywhere=self.everywhere)
            phase = one.stage or _writer(name, one.batch, two.batch)
            yield number, "column", replace(found or Divergence(), phase=phase, column=name)

    def _metrics(self, number: int, one: Phase, two: Phase) -> Iterator[_Seen]:
        for key in dict.fromkeys((*one.metrics, *two.metrics)) if self.columns is None else ():
            if key.startswith((*_TIMES, _TAKEN_OVER)):
                continue
            found = Divergence(phase=one.stage, column=key)
            a, b = one.metrics.get(key), two.metrics.get(key)
            if a is None or b is None or not self.how.numbers(a, b):
                largest = abs(a - b) if a is not None and b is not None else float("inf")
                found = replace(found, why="metric", first=a, second=b, largest=largest)
            yield number, "metric", found

    def _wanted(self, name: str) -> bool:
        return self.columns is None or name in self.columns

    def _note(self, *notes: str) -> None:
        self.notes += [note for note in dict.fromkeys(notes) if note and note not in self.notes]

    def uid(self, number: int, row: int | None) -> Any:
        """The uid of the first side's row, where it is known."""
        phase = self._pairs[number][0]
        if row is None or phase is None or "uid" not in phase.batch.non_tensor_batch or row >= len(phase.batch):
            return None
        return phase.batch.non_tensor_batch.part("uid", row, row + 1)[0]

    def weights(self, number: int, column: str) -> Iterator[str]:
        """A note where the two sides wrote the column under different policy versions."""
        made = [phase and phase.batch.origins.get(column) for phase in self._pairs[number][:2]]
        versions = [origin and origin.policy_version for origin in made]
        if None not in versions and versions[0] != versions[1]:
            yield f"{column} was written under policy version {versions[0]} → {versions[1]}"


# --- sides --------------------------------------------------------------------------------------


def _sides(first: Trace | DataProto, second: Trace | DataProto) -> tuple[Side, Side]:
    """Both as phases, the start as one of them; as one nameless phase where either is a batch alone.

    Where one has its old log-probs from the update's own pass, the other has those, too: a stage may have run for the eye.
    A batch alone may be a dump of a few columns, so those that one side alone has come last.
    """
    if isinstance(first, Trace) and isinstance(second, Trace):
        if any(COMPUTED_BY in phase.settings for side in (first, second) for phase in side):
            first, second = completed(first), completed(second)
        one, two = ((_single(START, side.start, side.start.columns), *side.phases) for side in (first, second))
        return one, two
    a, b = (side.batch if isinstance(side, Trace) else side for side in (first, second))
    names = sorted({*a.columns, *b.columns}, key=lambda name: _declared_order(name, a, b))
    return (_single("", a, names),), (_single("", b, names),)


def _single(stage: str, batch: DataProto, wrote: Sequence[str]) -> Phase:
    return Phase(stage=stage, batch=batch, wrote=tuple(wrote), metrics={}, settings={})


def _writer(name: str, a: DataProto, b: DataProto) -> str | None:
    """The stage that wrote a column, by its origin, else by its declaration."""
    made = a.origins.get(name) or b.origins.get(name)
    return made.stage if made is not None else writer_of(name)


def _declared_order(name: str, a: DataProto, b: DataProto) -> tuple[bool, int, bool, str]:
    """Sort key: columns of both first, in the order of `COLUMNS`; others come after those of their stage, else last."""
    places, known = list(COLUMNS), name in COLUMNS
    same = [n for n, other in enumerate(places) if COLUMNS[other].writer == _writer(name, a, b)]
    place = places.index(name) if known else max(same, default=len(places))
    return name not in a or name not in b, place, not known, name


def _check_names(sides: tuple[Side, Side], columns: Sequence[str] | None) -> None:
    known = tuple(dict.fromkeys(name for side in sides for phase in side for name in phase.batch.columns))
    for name in columns or ():
        if name not in known:
            close = nearest_column(name, known)
            do = f"did you mean {close!r}?" if close else None
            raise ColumnMissing(f"neither side has {name!r}", found=f"the columns {', '.join(known)}", do=do)


def _pairs(a: Side, b: Side) -> Iterator[tuple[Phase | None, Phase | None, bool]]:
    """Phases by name, in the first's order; None where a side has no such phase; and whether the second has it later."""
    names, waiting = {phase.stage for phase in a}, list(b)
    for one in a:
        while waiting and waiting[0].stage not in names:
            yield None, waiting.pop(0), False
        place = next((n for n, other in enumerate(waiting) if other.stage == one.stage), None)
        if place is None:
            yield one, None, False
        else:
            yield one, waiting.pop(place), place > 0
    yield from ((None, other, False) for other in waiting)


# --- what may explain it ------------------------------------------------------------------------


def _taken_over(one: Phase, two: Phase) -> list[str]:
    """A note where one side did not run the stage but has the recorded outputs; its settings are then the placeholder's."""
    key = f"{_TAKEN_OVER}{one.stage}"
    if (key in one.metrics) == (key in two.metrics):
        return []
    return [f"{one.stage}: not run again, its recorded outputs were used; replace({one.stage!r}, …) runs it"]


def _settings(one: Phase, two: Phase) -> Iterator[str]:
    for key in dict.fromkeys((*one.settings, *two.settings)):
        a, b = (_said(phase.settings, key) for phase in (one, two))
        if a != b:
            yield f"{one.stage}.{key}: {a} → {b}"
        elif one.source.get(key, "") != two.source.get(key, "") and key in one.source and key in two.source:
            yield f"{one.stage}.{key}: another source under the same name, {a}"


def _facts(one: Phase, two: Phase) -> Iterator[str]:
    a, b = one.batch.meta_info, two.batch.meta_info
    for key in dict.fromkeys((*a, *b)):
        if isinstance(a.get(key), _MERE) and isinstance(b.get(key), _MERE) and a.get(key) != b.get(key):
            yield f"meta_info {key}: {_said(a, key)} → {_said(b, key)}"


def _said(values: Mapping[str, Any], key: str) -> str:
    """A setting as text; without addresses of objects, which always differ."""
    if key not in values:
        return "not there"
    value = values[key]
    return re.sub(r" at 0x[0-9a-f]+", "", value if isinstance(value, str) else repr(value))[:100]
