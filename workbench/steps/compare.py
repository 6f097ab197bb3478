"""Compares two records of a step: how much they differ (`compare`), and the first place where they differ (`diverge`).

A local run and one on a cluster, a resumed run and an uninterrupted one, a step made by hand and the recorded one, our
batch and another library's dump: the last columns of such a pair all differ, and only the first difference says why.

Finds how one column of two batches differs, with rows aligned by uid and tokens aligned whatever the padding.

`compare` asks how far a column differs, `diverge` at which row and token first. What counts as the same is decided in
`dataproto.same`.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from workbench.base.errors import BatchError, ColumnMissing
from workbench.base.shown import Shown, shows
from workbench.dataproto.columns import COLUMNS, declared, letter_sizes, nearest_column, writer_of
from workbench.dataproto.core import DataProto
from workbench.dataproto.value import How, difference, held, one_place, same, unchanged
from workbench.functional.masking import masked_mean
from workbench.steps.trace import COMPUTED_BY, Phase, Trace, completed

_AROUND = 4
_MASKS = {"T": "response_mask", "S": "prompt_mask", "S+T": "attention_mask"}
_IDS = {"T": "responses", "S": "prompts", "S+T": "input_ids"}

# --- records ------------------------------------------------------------------------------------


class Compared(NamedTuple):
    """Counts of what `diverge` found equal: before the first difference, or in all where nothing differs."""

    phases: int = 0
    """Number of phases; the batch before the first phase does not count."""
    columns: int = 0
    """Number of columns, counted once for each phase that wrote them."""
    metrics: int = 0
    """Number of metrics; timings are not compared."""


class Mismatch(NamedTuple):
    """One difference among those in `Divergence.later`: a column, a metric or a whole phase."""

    phase: str | None
    column: str | None
    """Column or metric; None where a whole phase differs."""
    rows: int
    """Number of rows in which the column differs: all rows where the shapes differ, 0 for a metric."""
    largest: float | None
    """Largest absolute difference of floats: infinite where one side has NaN or no value, None for other types."""


class Beside(NamedTuple):
    """One token near the first difference, with its id and its value on both sides."""

    token: int
    """Position of the token in the first side's row, or in the second side's row where only the second has the token.
    """
    ids: tuple[int | None, int | None]
    """Token ids on both sides; None where a batch has no ids or no token at this position."""
    first: Any
    second: Any
    differs: bool
    here: bool
    """Whether the first difference is at this token."""


@dataclass(frozen=True, kw_only=True, repr=False)
class RunDivergence(Shown):
    """Result of `diverge`: the first difference of two traces or batches, or that there is none."""

    why: str | None = None
    """Kind of the difference: `values`, `shape`, `dtype`, `column` or `phase` (one side lacks it), `order` (of phases),
    `rows` (one side has other rows), `metric`; None where nothing differs."""
    phase: str | None = None
    """The phase that differs, `"start"` for the batch before the first; None where it is not known who wrote the column."""
    column: str | None = None
    """The column that differs; for `metric` the metric's key."""
    row: int | None = None
    """Number of the row on the first side."""
    other_row: int | None = None
    """Number of the same row on the second side."""
    uid: Any = None
    """`uid` of that row (its prompt), where it is known."""
    token: int | None = None
    """Index of the token in the second dim of the first side, or of the second side where only the second has the
    token."""
    token_ids: tuple[int | None, int | None] | None = None
    """Ids of that token on both sides; None where no batch has ids."""
    inside: str = ""
    """Place within an object or within further dims of a tensor: `.parts['right']`, `[2]`."""
    character: int | None = None
    """The first character in which two texts differ, from 0."""
    first: Any = None
    """The value on the first side; None where the side has none."""
    second: Any = None
    """The value on the second side; None where the side has none."""
    beside: tuple[Beside, ...] = ()
    """The token that differs, and a few before and after it."""
    rows: int = 0
    """Number of rows in which the column differs."""
    largest: float | None = None
    """Largest absolute difference of floats in the column; infinite where one side has NaN or no value."""
    notes: tuple[str, ...] = ()
    """Sentences that may explain the difference: settings that differ in earlier phases, rows in another order, other
    dtypes or weights."""
    compared: Compared = field(default_factory=Compared)
    """Counts of what was equal before this difference."""
    further: Iterable[RunDivergence] = field(default=(), compare=False)
    """Iterator over the comparisons after this one, which `later` consumes."""

    @property
    def identical(self) -> bool:
        """Whether nothing differs; `compared` says how much was compared."""
        return self.why is None

    @cached_property
    def later(self) -> tuple[Mismatch, ...]:
        """All differences from the first one on; the remaining columns are read when this is first used."""
        every = (self, *self.further)
        return tuple(Mismatch(one.phase, one.column, one.rows, one.largest) for one in every if not one.identical)


# --- sides and rows -----------------------------------------------------------------------------


def opened(side: Any, what: str, expected: str) -> Trace | DataProto:
    """Return the trace or batch that an argument of the function `what` stands for: itself, a stepper's trace, or the
    content of a folder.

    Raises `BatchError`, with the text `expected`, for anything else.
    """
    if isinstance(side, str | Path):
        folder = Path(side)
        if (folder / "trace.json").is_file():
            return Trace.load(folder)
        if (folder / "meta.json").is_file():
            return DataProto.load(folder)
        raise BatchError(f"nothing to compare at {folder}", expected="a folder with trace.json or meta.json")
    record = side if isinstance(side, DataProto) else getattr(side, "trace", side)
    if not isinstance(record, Trace | DataProto):
        advice = "pass one of the run's recorded steps: run.traces[step]" if hasattr(side, "traces") else None
        raise BatchError(f"an argument of {what}()", expected=expected, found=type(side).__name__, do=advice)
    return record


@dataclass(frozen=True)
class Pair:
    """Two batches to compare, and which rows of the first correspond to which rows of the second."""

    batches: tuple[DataProto, DataProto]
    rows: tuple[tuple[int, int], ...] | None = None
    """(row of the first, row of the second); None where all correspond in order."""
    found: RunDivergence | None = None
    """The difference where the two batches do not have the same rows, else None."""
    note: str = ""

    def row(self, number: int) -> tuple[int, int]:
        """Return the row numbers that aligned row `number` has in the two batches."""
        return (number, number) if self.rows is None else self.rows[number]

    def aligned(self, x: Any, side: int) -> Any:
        """Select from column `x` of batch `side` (0 or 1) the rows that both batches have, in the first batch's order."""
        return x if self.rows is None else x[[pair[side] for pair in self.rows]]

    @cached_property
    def sizes(self) -> tuple[dict[str, int], dict[str, int]]:
        """Sizes of the dims in each batch, by letter (`S`, `T`, `S+T`); S is computed where S+T and T are known."""
        first, second = map(_sizes, self.batches)
        return first, second


def _sizes(batch: DataProto) -> dict[str, int]:
    sizes = letter_sizes({name: tuple(column.shape) for name, column in batch.batch.raw().items()})
    return {**sizes, "S": sizes["S+T"] - sizes["T"]} if {"S+T", "T"} <= sizes.keys() else sizes


def aligned(a: DataProto, b: DataProto) -> Pair:
    """Align the rows of two batches by uid; in order where a batch has no uid, or where the same groups have other
    uids."""
    if "uid" not in a or "uid" not in b:
        if len(a) == len(b):
            return Pair((a, b))
        common, most = min(len(a), len(b)), max(len(a), len(b))
        found = RunDivergence(why="rows", row=common, first=f"{len(a)} rows", second=f"{len(b)} rows", rows=most)
        return Pair((a, b), tuple((row, row) for row in range(common)), found)
    if one_place(held(a, "uid"), held(b, "uid")):
        return Pair((a, b))
    keys, others = _keys(read(a, "uid")), _keys(read(b, "uid"))
    if keys == others:
        return Pair((a, b))
    places = {key: row for row, key in enumerate(others)}
    rows = tuple((row, places[key]) for row, key in enumerate(keys) if key in places)
    if len(rows) == len(keys) == len(others):
        return Pair((a, b), rows, note="the rows have another order: aligned by uid")
    if not rows and len(keys) == len(others) and _groups(keys) == _groups(others):
        return Pair((a, b), note="the batches share no uid: rows are compared in their order")
    return Pair((a, b), rows, _other_rows(keys, others, len(rows)))


def _other_rows(keys: list[tuple[Any, int]], others: list[tuple[Any, int]], shared: int) -> RunDivergence:
    """Describe the difference of two batches with different rows: the first row that only one side has."""
    ours, theirs = set(keys), set(others)
    row = next((row for row, key in enumerate(keys) if key not in theirs), None)
    first = None if row is None else keys[row][0]
    row = next(row for row, key in enumerate(others) if key not in ours) if row is None else row
    second = others[row][0] if row < len(others) else None
    inside = f"{len(keys)} rows against {len(others)}, {shared} of them in both"
    uid, rows = second if first is None else first, len(keys) + len(others) - 2 * shared
    return RunDivergence(why="rows", row=row, uid=uid, first=first, second=second, inside=inside, rows=rows)


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


# --- one column ---------------------------------------------------------------------------------


def read(batch: DataProto, name: str) -> Any:
    """Read a column without caching it where it is on disk; a tensor is returned detached and on the CPU."""
    if name in batch.batch:
        return batch.batch.passing(name).detach().cpu()
    return batch.non_tensor_batch.passing(name)


def stored_as(batch: DataProto, name: str) -> str | None:
    """Return a column's dtype as text (`float32`, `int64`, `objects`) without reading the column; None where the batch
    lacks it."""
    return _dtype(held(batch, name)) if name in batch else None


def _dtype(x: Any) -> str:
    found = getattr(x, "dtype", None)
    return str(found).removeprefix("torch.") if isinstance(found, torch.dtype) else "objects"


def _kind(name: str, x: Any) -> str:
    if not isinstance(x, torch.Tensor):
        return "objects"
    if name.endswith("mask"):  # may be bool, int or float
        return "mask"
    return "float" if x.is_floating_point() else "bool" if x.dtype == torch.bool else "int"


def column_difference(name: str, pair: Pair, how: How, *, everywhere: bool = False) -> RunDivergence | None:
    """Find the first difference (row, token) of one column between two aligned batches; None where the column is the
    same.

    Masked tokens and padding are compared only with `everywhere=True`.
    """
    a, b = pair.batches
    if name not in a or name not in b:
        rows = len(pair.rows or a)
        return RunDivergence(why="column", first=stored_as(a, name), second=stored_as(b, name), rows=rows)
    if pair.rows is None and one_place(held(a, name), held(b, name)):
        return None
    x, y = read(a, name), read(b, name)
    if _kind(name, x) != _kind(name, y):
        return RunDivergence(why="dtype", first=_dtype(x), second=_dtype(y), rows=len(a))
    x, y = pair.aligned(x, 0), pair.aligned(y, 1)
    if not isinstance(x, torch.Tensor):
        return _objects(x, y, pair, how)
    return _tensors(name, pair, x, y, how, everywhere)


def _tensors(
    name: str, pair: Pair, x: torch.Tensor, y: torch.Tensor, how: How, everywhere: bool
) -> RunDivergence | None:
    if x.shape == y.shape and x.dtype == y.dtype and torch.equal(x, y):
        return None
    laid = lay(name, pair, x, y)
    shapes = RunDivergence(why="shape", first=tuple(x.shape), second=tuple(y.shape), rows=len(x))
    if laid is None:
        return shapes
    mask, flat = name in _MASKS.values(), x.dim() == 1
    counts = None if mask or flat or everywhere else laid.counts(real=name == "responses")
    if counts is None and not mask and bool(laid.alone.any()):
        return shapes
    unequal = ~how.tensors(laid.left, laid.right)
    if not mask:
        unequal |= _like(laid.alone, laid.left)
    if counts is not None:
        unequal &= _like(counts, laid.left)
    return _first(laid, unequal, counts, flat) if unequal.any() else None


def _objects(x: np.ndarray, y: np.ndarray, pair: Pair, how: How) -> RunDivergence | None:
    every = [difference(one, two, how) for one, two in zip(x, y, strict=True)]
    differing = [(number, cells) for number, cells in enumerate(every) if cells is not None]
    if not differing:
        return None
    number, cells = differing[0]
    row, other = pair.row(number)
    a, b = cells[1:]
    character = None
    if isinstance(a, str) and isinstance(b, str):
        equal = min(len(a), len(b))
        character = next((n for n in range(equal) if a[n] != b[n]), equal)
    return RunDivergence(
        why="values", row=row, other_row=other, character=character, rows=len(differing), **cells._asdict()
    )


def _first(laid: Laid, unequal: torch.Tensor, counts: torch.Tensor | None, flat: bool) -> RunDivergence:
    number, place, *deeper = unequal.nonzero()[0].tolist()
    row, other = laid.pair.row(number)
    shown = counts if counts is None else counts.expand(len(unequal), -1)[number]
    beside = () if flat else laid.beside(number, place, unequal[number], shown)
    ids = next((one.ids for one in beside if one.here), (None, None))
    first, second = laid.values(number, place, deeper)
    return RunDivergence(
        why="values",
        row=row,
        other_row=other,
        token=None if flat else laid.position(place),
        token_ids=None if ids == (None, None) else ids,
        inside="".join(f"[{index}]" for index in deeper),
        first=first,
        second=second,
        rows=int(unequal.reshape(len(unequal), -1).any(-1).sum()),
        largest=laid.largest(unequal),
        beside=beside,
    )


def extent(x: torch.Tensor, y: torch.Tensor) -> tuple[int, float]:
    """Count rows in which two tensors of one shape differ, and the largest difference (infinite from NaN to a number)."""
    if x.dtype == y.dtype and torch.equal(x, y):
        return 0, 0.0
    rows, largest = 0, 0.0
    for ours, theirs in zip(x.split(block(x)), y.split(block(x)), strict=True):
        unequal = ours != theirs
        if not unequal.any():
            continue
        apart = (ours.double() - theirs.double()).abs()
        top = apart.max().item()
        if top != top:  # NaN equals NaN, and is infinitely far from a number
            unequal &= ~(ours.isnan() & theirs.isnan())
            top = apart[unequal].nan_to_num(nan=math.inf).max().item() if unequal.any() else 0.0
        rows += int(unequal.reshape(len(ours), -1).any(-1).sum())
        largest = max(largest, top)
    return rows, largest


def block(values: torch.Tensor) -> int:
    """Return how many rows of a tensor hold about 2¹⁷ elements, which fit into the processor's cache."""
    return max(1, (1 << 17) // max(values[0].numel(), 1)) if len(values) else 1


# --- tokens -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Laid:
    """One column's tensors [B, width, …] of two batches, with rows and tokens aligned."""

    pair: Pair
    letter: str | None
    """The letter of the second dim: `S`, `T` or `S+T`; None where it is not known."""
    left: torch.Tensor
    right: torch.Tensor
    places: tuple[torch.Tensor, torch.Tensor]
    """[width] for each side: the position of each token there, −1 where the side lacks the token."""

    @property
    def alone(self) -> torch.Tensor:
        """Mask [width] of the tokens that only one of the two sides has."""
        return (self.places[0] >= 0) != (self.places[1] >= 0)

    def position(self, place: int) -> int:
        """Return the position of aligned token `place` in the first tensor, or in the second where only that has the
        token."""
        first, second = (int(places[place]) for places in self.places)
        return first if first >= 0 else second

    def values(self, row: int, place: int, deeper: list[int]) -> tuple[Any, Any]:
        """Return the values of one token on both sides; None for a side that lacks the token."""
        first, second = (
            side[(row, place, *deeper)].tolist() if int(places[place]) >= 0 else None
            for side, places in zip((self.left, self.right), self.places, strict=True)
        )
        return first, second

    def largest(self, unequal: torch.Tensor) -> float | None:
        """Return the largest absolute difference where `unequal` is true: infinite where one side lacks a token, None
        for columns without floats."""
        if not (self.left.is_floating_point() or self.right.is_floating_point()):
            return None
        if bool((unequal & _like(self.alone, unequal)).any()):
            return math.inf
        return extent(self.left.masked_fill(~unequal, 0), self.right.masked_fill(~unequal, 0))[1]

    def masks(self, *, real: bool) -> list[torch.Tensor | None]:
        """Return each side's mask [B, width] of the tokens that count, or with `real` of all but padding; None where a
        side has no mask."""
        return [self._mask(side, real) for side in (0, 1)]

    def _mask(self, side: int, real: bool) -> torch.Tensor | None:
        batch, sizes, letter = self.pair.batches[side], self.pair.sizes[side], str(self.letter)
        if real and "attention_mask" in batch and "T" in sizes and letter in _MASKS:
            mask = read(batch, "attention_mask")
            start = mask.shape[1] - sizes["T"]
            mask = mask[:, {"S": slice(start), "T": slice(start, None), "S+T": slice(None)}[letter]]
        elif _MASKS.get(letter, "") in batch:
            mask = read(batch, _MASKS[letter])
        else:
            return None
        return _spread(self.pair.aligned(mask, side), self.places[side]).bool()

    def counts(self, *, real: bool) -> torch.Tensor | None:
        """Return the mask [B or 1, width] of the tokens that either side's mask includes; None where no side has a
        mask."""
        masks = self.masks(real=real)
        if masks[0] is None and masks[1] is None:
            return None
        # without a mask, a side's own places count where the other has none
        own = [(places >= 0)[None] & self.alone[None] for places in self.places]
        first, second = (own[side] if mask is None else mask for side, mask in enumerate(masks))
        return first | second

    def beside(self, row: int, place: int, unequal: torch.Tensor, shown: torch.Tensor | None) -> tuple[Beside, ...]:
        """Return the tokens near `place` in a row: `unequal` [width, …] marks what differs, `shown` [width] which
        tokens to return."""
        name = _IDS.get(str(self.letter), "")
        ids: list[Any] = [
            batch.batch.part(name, at, at + 1)[0].tolist() if name in batch.batch else None
            for batch, at in zip(self.pair.batches, self.pair.row(row), strict=True)
        ]
        neighbours = []
        for near in range(max(place - _AROUND, 0), min(place + _AROUND + 1, len(self.places[0]))):
            if shown is not None and not shown[near]:
                continue
            at = [int(places[near]) for places in self.places]
            tokens = [None if ids[side] is None or at[side] < 0 else ids[side][at[side]] for side in (0, 1)]
            values, differs = self.values(row, near, []), bool(unequal[near].any())
            neighbours.append(Beside(self.position(near), (tokens[0], tokens[1]), *values, differs, near == place))
        return tuple(neighbours)


def lay(name: str, pair: Pair, x: torch.Tensor, y: torch.Tensor) -> Laid | None:
    """Align the tokens of a column's two tensors [B, …]; None where their shapes differ and the second dim is not
    declared."""
    letter = _letter(name, pair, x, y)
    places = _places(letter, pair.sizes) if letter else None
    if places is None or x.shape[2:] != y.shape[2:]:
        if x.shape != y.shape:
            return None
        places = (torch.arange(x.shape[1] if x.dim() > 1 else 1),) * 2
    left, right = (_spread(t if t.dim() > 1 else t[:, None], place) for t, place in zip((x, y), places, strict=True))
    return Laid(pair, letter, left, right, places)


def _letter(name: str, pair: Pair, x: torch.Tensor, y: torch.Tensor) -> str | None:
    if x.dim() < 2 or y.dim() < 2:
        return None
    known = declared(name)
    if known is not None and known.dims:
        return known.dims[1] if len(known.dims) > 1 else None
    widths = tuple(sizes.get("T") for sizes in pair.sizes)
    return "T" if None not in widths and widths == (x.shape[1], y.shape[1]) else None


def _places(letter: str, sizes: tuple[dict[str, int], dict[str, int]]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return for every token of the wider layout its position on each side, −1 where that side lacks it."""
    if letter == "S+T":
        head, tail = _places("S", sizes), _places("T", sizes)
        if head is None or tail is None:
            return None
        moved = [torch.where(tail[side] < 0, -1, tail[side] + sizes[side]["S"]) for side in (0, 1)]
        return torch.cat([head[0], moved[0]]), torch.cat([head[1], moved[1]])
    if letter not in sizes[0] or letter not in sizes[1]:
        return None
    first, second = (one[letter] for one in sizes)
    every = torch.arange(max(first, second))
    if letter == "S":  # padded on the left
        return (every - max(second - first, 0)).clamp(min=-1), (every - max(first - second, 0)).clamp(min=-1)
    return torch.where(every < first, every, -1), torch.where(every < second, every, -1)


def _spread(tensor: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Spread a tensor over the common layout: [B, its width, …] → [B, common width, …], 0 where the side lacks a token."""
    if len(places) == tensor.shape[1] and bool((places >= 0).all()):
        return tensor
    if not tensor.shape[1]:
        return tensor.new_zeros((len(tensor), len(places), *tensor.shape[2:]))
    return tensor[:, places.clamp(min=0)].masked_fill(_like(places < 0, tensor), 0)


def _like(flags: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Expand flags [width], [1, width] or [B, width] to the rows and further dims of a tensor."""
    flags = flags if flags.dim() > 1 else flags[None, :]
    flags = flags.reshape(*flags.shape, *[1] * (tensor.dim() - 2))
    return flags.expand(len(tensor), flags.shape[1], *tensor.shape[2:])


_HOW = How(kinds=True)
"""The seconds that scoring took do not count."""


@dataclass(frozen=True, kw_only=True)
class ColumnChange:
    """How one column differs between the two batches that `compare` compared."""

    name: str
    rows: int
    """Number of rows in which the column differs."""
    largest: float | None
    """Largest absolute difference; None for objects, NaN where shapes differ."""


@dataclass(frozen=True, kw_only=True)
class RowChange:
    """How the reward and the advantage of one row differ between two batches."""

    row: int
    uid: Any
    reward: tuple[float, float] | None
    """The row's reward on the first and on the second side; None where a side has none."""
    advantage: tuple[float, float] | None
    """Mean advantage over the row's response tokens, on the first and on the second side."""

    @property
    def flipped(self) -> bool:
        """Whether the row's advantage changed its sign."""
        return self.advantage is not None and self.advantage[0] * self.advantage[1] < 0

    @property
    def size(self) -> float:
        """The larger of the absolute changes of the row's reward and of its advantage; 0.0 where neither is known."""
        pairs = [pair for pair in (self.reward, self.advantage) if pair is not None]
        return max((abs(b - a) for a, b in pairs), default=0.0)


@dataclass(frozen=True, kw_only=True, repr=False)
class Comparison(Shown):
    """Result of `compare`: the columns, rows and metrics that differ; rows whose advantage changed sign come first,
    then those that changed most."""

    elsewhere: ClassVar = {
        "flipped": "read comparison.flips",
        "to_pandas": "make a table of its rows: pandas.DataFrame(map(vars, comparison.rows))",
    }

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

    @property
    def settings(self) -> tuple[str, ...]:
        """The settings in which stages of both sides differ, a text for each: `reward.function: exact → short`."""
        first, second = ({phase.stage: phase for phase in trace} for trace in self.traces)
        return tuple(text for stage in first if stage in second for text in _settings(first[stage], second[stage]))

    def row(self, number: int) -> Any:
        """Show one row on both sides: its responses as a text difference, and rewards, their parts and verdicts side by
        side."""
        return shows(self, "row", number)

    @property
    def flips(self) -> tuple[RowChange, ...]:
        """The rows whose advantage changed sign, the largest change first."""
        return tuple(row for row in self.rows if row.flipped)

    @property
    def sign_flips(self) -> int:
        """Number of rows whose advantage changed sign."""
        return len(self.flips)


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
            rows, largest = extent(x, y) if x.shape == y.shape else (len(x), float("nan"))
        if rows:
            yield ColumnChange(name=name, rows=rows, largest=largest)


def _without_padding(name: str, pair: Pair, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Align the tokens of two tensors [B, T] of different widths and set all padding to 0, so that padding is no
    difference. Unchanged for columns whose second dim is not declared."""
    laid = lay(name, pair, x, y) if x.dim() == y.dim() == 2 else None
    first, second = laid.masks(real=True) if laid is not None else (None, None)
    if laid is None or first is None or second is None:
        return x, y
    return laid.left.masked_fill(~first, 0), laid.right.masked_fill(~second, 0)


def _rows(a: DataProto, b: DataProto) -> list[RowChange]:
    """List the rows whose reward or mean advantage differs."""
    pairs = [_per_row(a, b, name) for name in ("reward", "advantages")]
    changed = torch.zeros(len(a), dtype=torch.bool)
    for values in pairs:
        if values is not None:
            changed |= (values[1] - values[0]).abs() > 0
    uids = a["uid"] if "uid" in a else range(len(a))
    lists = [None if values is None else [one.tolist() for one in values] for values in pairs]
    changes = []
    for row in changed.nonzero()[:, 0].tolist():
        reward, advantage = (None if values is None else (values[0][row], values[1][row]) for values in lists)
        changes.append(RowChange(row=row, uid=uids[row], reward=reward, advantage=advantage))
    return changes


def _per_row(a: DataProto, b: DataProto, name: str) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return both sides' values of a column for each row, [B] float64 (means over response tokens); None where a side
    lacks the column."""
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
_Seen = tuple[int, str, RunDivergence]
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
) -> RunDivergence:
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
    divergence, place, every = RunDivergence(), 0, walk.every()
    for number, kind, candidate in every:
        if not candidate.identical:
            divergence, place = candidate, number
            break
        kinds[kind] += 1
        phases.add(candidate.phase)
    compared = Compared(len(phases - {START, None, divergence.phase}), kinds["column"], kinds["metric"])
    if divergence.identical:
        return replace(divergence, notes=tuple(walk.notes), compared=compared)
    uid = walk.uid(place, divergence.row) if divergence.uid is None else divergence.uid
    notes = (*walk.notes, *walk.weights(place, divergence.column or ""))
    return replace(
        divergence, uid=uid, notes=notes, compared=compared, further=(candidate for _, _, candidate in every)
    )


class _Walk:
    """Compares all parts of two records in order: rows, columns and metrics, phase by phase."""

    def __init__(self, sides: tuple[Side, Side], how: How, columns: Sequence[str] | None, everywhere: bool) -> None:
        self.sides, self.how, self.columns, self.everywhere = sides, how, columns, everywhere
        self.notes: list[str] = []
        self._pairs = list(_pairs(*sides))

    def every(self) -> Iterator[_Seen]:
        """Yield the result of each comparison, in order, equal or not."""
        rows: RunDivergence | None = None
        order_reported = False
        for number, (ours, theirs, later) in enumerate(self._pairs):
            if ours is None or theirs is None:
                yield from self._alone(number, ours, theirs)
                continue
            if later and not order_reported and self.columns is None:
                order_reported = True
                order = [" ".join(phase.stage for phase in side[1:]) for side in self.sides]
                yield number, "phase", RunDivergence(why="order", phase=ours.stage, first=order[0], second=order[1])
            self._note(*(_reuse_note(ours, theirs) or _settings(ours, theirs)))
            self._note(*(_facts(ours, theirs) if number == 0 else ()))
            pair = aligned(ours.batch, theirs.batch)
            self._note(pair.note)
            if pair.found is not None and pair.found != rows:
                phase = ours.stage or _writer("uid", ours.batch, theirs.batch)
                yield number, "rows", replace(pair.found, phase=phase, column="uid")
            rows = pair.found
            yield from self._columns(number, ours, theirs, pair)
            yield from self._metrics(number, ours, theirs)

    def _alone(self, number: int, ours: Phase | None, theirs: Phase | None) -> Iterator[_Seen]:
        there = ours or theirs
        if there is not None and any(map(self._wanted, there.wrote)):
            first, second = (phase and phase.stage for phase in (ours, theirs))
            rows = len(there.batch)
            yield number, "phase", RunDivergence(why="phase", phase=there.stage, first=first, second=second, rows=rows)

    def _columns(self, number: int, ours: Phase, theirs: Phase, pair: Pair) -> Iterator[_Seen]:
        for name in filter(self._wanted, dict.fromkeys((*ours.wrote, *theirs.wrote))):
            first, second = (stored_as(batch, name) for batch in pair.batches)
            both = first is not None and second is not None
            if both and first != second:
                self._note(f"{name}: {first} → {second}")
            divergence = None
            if name != "uid" or not both:  # the rows were aligned by it
                divergence = column_difference(name, pair, self.how, everywhere=self.everywhere)
            phase = ours.stage or _writer(name, ours.batch, theirs.batch)
            yield number, "column", replace(divergence or RunDivergence(), phase=phase, column=name)

    def _metrics(self, number: int, ours: Phase, theirs: Phase) -> Iterator[_Seen]:
        for key in dict.fromkeys((*ours.metrics, *theirs.metrics)) if self.columns is None else ():
            if key.startswith((*_TIMES, _TAKEN_OVER)):
                continue
            divergence = RunDivergence(phase=ours.stage, column=key)
            a, b = ours.metrics.get(key), theirs.metrics.get(key)
            if a is None or b is None or not self.how.numbers(a, b):
                largest = abs(a - b) if a is not None and b is not None else float("inf")
                divergence = replace(divergence, why="metric", first=a, second=b, largest=largest)
            yield number, "metric", divergence

    def _wanted(self, name: str) -> bool:
        return self.columns is None or name in self.columns

    def _note(self, *notes: str) -> None:
        self.notes += [note for note in dict.fromkeys(notes) if note and note not in self.notes]

    def uid(self, number: int, row: int | None) -> Any:
        """Return the uid of the first side's row; None where it is not known."""
        phase = self._pairs[number][0]
        if row is None or phase is None or "uid" not in phase.batch.non_tensor_batch or row >= len(phase.batch):
            return None
        return phase.batch.non_tensor_batch.part("uid", row, row + 1)[0]

    def weights(self, number: int, column: str) -> Iterator[str]:
        """Yield a note where the two sides wrote the column under different policy versions."""
        origins = [phase and phase.batch.origins.get(column) for phase in self._pairs[number][:2]]
        versions = [origin and origin.policy_version for origin in origins]
        if None not in versions and versions[0] != versions[1]:
            yield f"{column} was written under policy version {versions[0]} → {versions[1]}"


# --- sides --------------------------------------------------------------------------------------


def _sides(first: Trace | DataProto, second: Trace | DataProto) -> tuple[Side, Side]:
    """Turn both records into tuples of phases, with the start as the first one. Where either is a batch alone, each
    becomes one nameless phase.

    Where one trace has its old log-probs from the update's own pass, the other is read so, too, because a stepper runs
    the log-prob stage. A batch alone may have only a few columns, so columns of one side alone come last.
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
    """Return the stage that wrote a column, by its origin, else by its declaration."""
    origin = a.origins.get(name) or b.origins.get(name)
    return origin.stage if origin is not None else writer_of(name)


def _declared_order(name: str, a: DataProto, b: DataProto) -> tuple[bool, int, bool, str]:
    """Sort key for columns: those of both sides come first, in the order of `COLUMNS`; undeclared ones come after those
    of the same stage."""
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
    """Pair the phases of two traces by name, in the first's order; yields (first's phase, second's phase, whether the
    second has it later). None where a side lacks the phase."""
    names, waiting = {phase.stage for phase in a}, list(b)
    for ours in a:
        while waiting and waiting[0].stage not in names:
            yield None, waiting.pop(0), False
        place = next((n for n, other in enumerate(waiting) if other.stage == ours.stage), None)
        if place is None:
            yield ours, None, False
        else:
            yield ours, waiting.pop(place), place > 0
    yield from ((None, other, False) for other in waiting)


# --- what may explain it ------------------------------------------------------------------------


def _reuse_note(ours: Phase, theirs: Phase) -> list[str]:
    """Return a note where only one side ran the stage and the other holds its recorded outputs; the settings are then
    not compared."""
    key = f"{_TAKEN_OVER}{ours.stage}"
    if (key in ours.metrics) == (key in theirs.metrics):
        return []
    return [f"{ours.stage}: not run again: the recorded outputs were used; replace({ours.stage!r}, …) runs it"]


def _settings(ours: Phase, theirs: Phase) -> Iterator[str]:
    for key in dict.fromkeys((*ours.settings, *theirs.settings)):
        a, b = (_setting_text(phase.settings, key) for phase in (ours, theirs))
        if a != b:
            yield f"{ours.stage}.{key}: {a} → {b}"
        elif ours.source.get(key, "") != theirs.source.get(key, "") and key in ours.source and key in theirs.source:
            yield f"{ours.stage}.{key}: the same name with another source text, {a}"


def _facts(ours: Phase, theirs: Phase) -> Iterator[str]:
    a, b = ours.batch.meta_info, theirs.batch.meta_info
    for key in dict.fromkeys((*a, *b)):
        if isinstance(a.get(key), _MERE) and isinstance(b.get(key), _MERE) and a.get(key) != b.get(key):
            yield f"meta_info {key}: {_setting_text(a, key)} → {_setting_text(b, key)}"


def _setting_text(values: Mapping[str, Any], key: str) -> str:
    """Return a setting as text, without memory addresses of objects, which always differ."""
    if key not in values:
        return "not there"
    value = values[key]
    return re.sub(r" at 0x[0-9a-f]+", "", value if isinstance(value, str) else repr(value))[:100]
