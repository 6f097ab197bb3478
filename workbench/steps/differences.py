"""Finds how one column of two batches differs, with rows aligned by uid and tokens aligned whatever the padding.

`compare` asks how far a column differs, `diverge` at which row and token first. What counts as the same is decided in
`dataproto.same`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from workbench.base.errors import BatchError
from workbench.base.shown import Shown
from workbench.dataproto.columns import declared, letter_sizes
from workbench.dataproto.core import DataProto
from workbench.dataproto.same import How, difference, held, one_place
from workbench.steps.trace import Trace

_AROUND = 4
_MASKS = {"T": "response_mask", "S": "prompt_mask", "S+T": "attention_mask"}
_IDS = {"T": "responses", "S": "prompts", "S+T": "input_ids"}

# --- records ------------------------------------------------------------------------------------


class Compared(NamedTuple):
    """How much `diverge` found to be the same: before the first difference, or in all where nothing differs."""

    phases: int = 0
    """Number of phases, without the batch before the first one."""
    columns: int = 0
    """Number of columns, counted once for each phase that wrote them."""
    metrics: int = 0
    """Number of metrics; timings are not compared."""


class Spread(NamedTuple):
    """One difference in `Divergence.later`: a column, a metric or a whole phase."""

    phase: str | None
    column: str | None
    """Column or metric; None where a whole phase differs."""
    rows: int
    """Rows in which it differs; all of them where the shape does, 0 for a metric."""
    largest: float | None
    """Largest absolute difference of floats; infinite where one side has NaN or nothing; None for everything else."""


class Beside(NamedTuple):
    """One token near the first difference, with its id and its value on both sides."""

    token: int
    """Position of the token in the first side's row; in the second's where only that has the token."""
    ids: tuple[int | None, int | None]
    """Token ids; None where a batch has no ids or no such place."""
    first: Any
    second: Any
    differs: bool
    here: bool
    """Whether the first difference is at this token."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Divergence(Shown):
    """What `diverge` found: the first difference of two traces or batches, or none."""

    why: str | None = None
    """Kind of the difference: `values`, `shape`, `dtype`, `column` or `phase` (one side lacks it), `order` (of phases),
    `rows` (one side has other rows), `metric`; None where nothing differs."""
    phase: str | None = None
    """The phase that differs, `"start"` for the batch before the first; None where it is not known who wrote the column."""
    column: str | None = None
    """The column that differs; for `metric` the metric's key."""
    row: int | None = None
    """Row number on the first side."""
    other_row: int | None = None
    """Number of the same row on the second side."""
    uid: Any = None
    """`uid` of that row (its prompt), where it is known."""
    token: int | None = None
    """Position on the second dim of the first side; of the second side where only that has the token."""
    token_ids: tuple[int | None, int | None] | None = None
    """Ids of that token on both sides; None where no batch has ids."""
    inside: str = ""
    """Place within an object or within further dims of a tensor: `.parts['right']`, `[2]`."""
    character: int | None = None
    """The first character in which two texts differ, from 0."""
    first: Any = None
    """The value on the first side; None where it has none."""
    second: Any = None
    """The value on the second side; None where it has none."""
    beside: tuple[Beside, ...] = ()
    """The token that differs, and a few before and after it."""
    rows: int = 0
    """Rows in which the column differs."""
    largest: float | None = None
    """Largest absolute difference of floats in it; infinite where one side has NaN or nothing."""
    notes: tuple[str, ...] = ()
    """What may explain it: settings that differ up to there, rows in another order, other dtypes, other weights."""
    compared: Compared = field(default_factory=Compared)
    """How much was the same before this difference."""
    further: Iterable[Divergence] = field(default=(), compare=False)
    """Iterator over the comparisons after this one, which `later` consumes."""

    @property
    def identical(self) -> bool:
        """Whether nothing differs; `compared` says how much was compared."""
        return self.why is None

    @cached_property
    def later(self) -> tuple[Spread, ...]:
        """All differences from the first one on; the remaining columns are read when this is first used."""
        every = (self, *self.further)
        return tuple(Spread(one.phase, one.column, one.rows, one.largest) for one in every if not one.identical)


# --- sides and rows -----------------------------------------------------------------------------


def opened(side: Any, what: str, expected: str) -> Trace | DataProto:
    """The trace or batch that an argument of the function `what` stands for: itself, a stepper's trace, or the content of a
    folder. Raises `BatchError`, with the text `expected`, for anything else."""
    if isinstance(side, str | Path):
        folder = Path(side)
        if (folder / "trace.json").is_file():
            return Trace.load(folder)
        if (folder / "meta.json").is_file():
            return DataProto.load(folder)
        raise BatchError(f"nothing to compare at {folder}", expected="a folder with trace.json or meta.json")
    found = side if isinstance(side, DataProto) else getattr(side, "trace", side)
    if not isinstance(found, Trace | DataProto):
        advice = "take one of its recorded steps: run.traces[step]" if hasattr(side, "traces") else None
        raise BatchError(f"an argument of {what}()", expected=expected, found=type(side).__name__, do=advice)
    return found


@dataclass(frozen=True)
class Pair:
    """Two batches, and which rows of the first correspond to which rows of the second."""

    batches: tuple[DataProto, DataProto]
    rows: tuple[tuple[int, int], ...] | None = None
    """(row of the first, row of the second); None where all correspond in order."""
    found: Divergence | None = None
    """The difference where the two batches do not have the same rows, else None."""
    note: str = ""

    def row(self, number: int) -> tuple[int, int]:
        """The row numbers that aligned row `number` has in both batches."""
        return (number, number) if self.rows is None else self.rows[number]

    def aligned(self, x: Any, side: int) -> Any:
        """Select from column `x` of batch `side` (0 or 1) the rows that both batches have, in the first batch's order."""
        return x if self.rows is None else x[[pair[side] for pair in self.rows]]

    @cached_property
    def sizes(self) -> tuple[dict[str, int], dict[str, int]]:
        """For each batch, letter of a dim (`S`, `T`, `S+T`) → its size; S is computed where S+T and T are known."""
        first, second = map(_sizes, self.batches)
        return first, second


def _sizes(batch: DataProto) -> dict[str, int]:
    sizes = letter_sizes({name: tuple(column.shape) for name, column in batch.batch.raw().items()})
    return {**sizes, "S": sizes["S+T"] - sizes["T"]} if {"S+T", "T"} <= sizes.keys() else sizes


def aligned(a: DataProto, b: DataProto) -> Pair:
    """Align the rows of two batches by uid; in order where a batch has no uid, or other uids for the same groups."""
    if "uid" not in a or "uid" not in b:
        if len(a) == len(b):
            return Pair((a, b))
        common, most = min(len(a), len(b)), max(len(a), len(b))
        found = Divergence(why="rows", row=common, first=f"{len(a)} rows", second=f"{len(b)} rows", rows=most)
        return Pair((a, b), tuple((row, row) for row in range(common)), found)
    if one_place(held(a, "uid"), held(b, "uid")):
        return Pair((a, b))
    keys, others = _keys(read(a, "uid")), _keys(read(b, "uid"))
    if keys == others:
        return Pair((a, b))
    places = {key: row for row, key in enumerate(others)}
    rows = tuple((row, places[key]) for row, key in enumerate(keys) if key in places)
    if len(rows) == len(keys) == len(others):
        return Pair((a, b), rows, note="the rows stand in another order: aligned by uid")
    if not rows and len(keys) == len(others) and _groups(keys) == _groups(others):
        return Pair((a, b), note="no uid is shared: rows are compared as they stand")
    return Pair((a, b), rows, _other_rows(keys, others, len(rows)))


def _other_rows(keys: list[tuple[Any, int]], others: list[tuple[Any, int]], shared: int) -> Divergence:
    """The first row that one side alone has."""
    ours, theirs = set(keys), set(others)
    row = next((row for row, key in enumerate(keys) if key not in theirs), None)
    first = None if row is None else keys[row][0]
    row = next(row for row, key in enumerate(others) if key not in ours) if row is None else row
    second = others[row][0] if row < len(others) else None
    inside = f"{len(keys)} rows against {len(others)}, {shared} of them in both"
    uid, rows = second if first is None else first, len(keys) + len(others) - 2 * shared
    return Divergence(why="rows", row=row, uid=uid, first=first, second=second, inside=inside, rows=rows)


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
    """A column's dtype as text (`float32`, `int64`, `objects`) without reading the column; None for no such column."""
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


def column_difference(name: str, pair: Pair, how: How, *, everywhere: bool = False) -> Divergence | None:
    """The first difference (row, token) of one column between two aligned batches; None where the column is the same.

    Masked tokens and padding are compared only with `everywhere=True`.
    """
    a, b = pair.batches
    if name not in a or name not in b:
        rows = len(pair.rows or a)
        return Divergence(why="column", first=stored_as(a, name), second=stored_as(b, name), rows=rows)
    if pair.rows is None and one_place(held(a, name), held(b, name)):
        return None
    x, y = read(a, name), read(b, name)
    if _kind(name, x) != _kind(name, y):
        return Divergence(why="dtype", first=_dtype(x), second=_dtype(y), rows=len(a))
    x, y = pair.aligned(x, 0), pair.aligned(y, 1)
    if not isinstance(x, torch.Tensor):
        return _objects(x, y, pair, how)
    return _tensors(name, pair, x, y, how, everywhere)


def _tensors(name: str, pair: Pair, x: torch.Tensor, y: torch.Tensor, how: How, everywhere: bool) -> Divergence | None:
    if x.shape == y.shape and x.dtype == y.dtype and torch.equal(x, y):
        return None
    laid = lay(name, pair, x, y)
    shapes = Divergence(why="shape", first=tuple(x.shape), second=tuple(y.shape), rows=len(x))
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


def _objects(x: np.ndarray, y: np.ndarray, pair: Pair, how: How) -> Divergence | None:
    every = [difference(one, two, how) for one, two in zip(x, y, strict=True)]
    found = [(number, cells) for number, cells in enumerate(every) if cells is not None]
    if not found:
        return None
    number, cells = found[0]
    row, other = pair.row(number)
    a, b = cells[1:]
    character = None
    if isinstance(a, str) and isinstance(b, str):
        equal = min(len(a), len(b))
        character = next((n for n in range(equal) if a[n] != b[n]), equal)
    return Divergence(why="values", row=row, other_row=other, character=character, rows=len(found), **cells._asdict())


def _first(laid: Laid, unequal: torch.Tensor, counts: torch.Tensor | None, flat: bool) -> Divergence:
    number, place, *deeper = unequal.nonzero()[0].tolist()
    row, other = laid.pair.row(number)
    shown = counts if counts is None else counts.expand(len(unequal), -1)[number]
    beside = () if flat else laid.beside(number, place, unequal[number], shown)
    ids = next((one.ids for one in beside if one.here), (None, None))
    first, second = laid.values(number, place, deeper)
    return Divergence(
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
    for one, two in zip(x.split(block(x)), y.split(block(x)), strict=True):
        unequal = one != two
        if not unequal.any():
            continue
        apart = (one.double() - two.double()).abs()
        top = apart.max().item()
        if top != top:  # NaN equals NaN, and is infinitely far from a number
            unequal &= ~(one.isnan() & two.isnan())
            top = apart[unequal].nan_to_num(nan=math.inf).max().item() if unequal.any() else 0.0
        rows += int(unequal.reshape(len(one), -1).any(-1).sum())
        largest = max(largest, top)
    return rows, largest


def block(values: torch.Tensor) -> int:
    """Number of rows of a tensor that hold about 2¹⁷ elements, which fit into the processor's cache."""
    return max(1, (1 << 17) // max(values[0].numel(), 1)) if len(values) else 1


# --- tokens -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Laid:
    """Two tensors [B, width, …] of one column with their rows and tokens aligned."""

    pair: Pair
    letter: str | None
    """The letter of the second dim: `S`, `T` or `S+T`; None where it is not known."""
    left: torch.Tensor
    right: torch.Tensor
    places: tuple[torch.Tensor, torch.Tensor]
    """[width] for each side: the position of each token there, −1 where the side lacks the token."""

    @property
    def alone(self) -> torch.Tensor:
        """[width] bool: the tokens that only one of both sides has."""
        return (self.places[0] >= 0) != (self.places[1] >= 0)

    def position(self, place: int) -> int:
        """Position of aligned token `place` in the first tensor; in the second where only that has the token."""
        first, second = (int(places[place]) for places in self.places)
        return first if first >= 0 else second

    def values(self, row: int, place: int, deeper: list[int]) -> tuple[Any, Any]:
        """The values of one token on both sides; None for a side that lacks the token."""
        first, second = (
            side[(row, place, *deeper)].tolist() if int(places[place]) >= 0 else None
            for side, places in zip((self.left, self.right), self.places, strict=True)
        )
        return first, second

    def largest(self, unequal: torch.Tensor) -> float | None:
        """Largest absolute difference where `unequal`: infinite where one side lacks a token, None without floats."""
        if not (self.left.is_floating_point() or self.right.is_floating_point()):
            return None
        if bool((unequal & _like(self.alone, unequal)).any()):
            return math.inf
        return extent(self.left.masked_fill(~unequal, 0), self.right.masked_fill(~unequal, 0))[1]

    def masks(self, *, real: bool) -> list[torch.Tensor | None]:
        """For each side [B, width] bool: tokens in its mask, or with `real` all but padding; None where it has no mask."""
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
        """[B or 1, width] bool: the tokens that either side's mask includes; None where no side has a mask."""
        masks = self.masks(real=real)
        if masks[0] is None and masks[1] is None:
            return None
        # without a mask, a side's own places count where the other has none
        own = [(places >= 0)[None] & self.alone[None] for places in self.places]
        first, second = (own[side] if mask is None else mask for side, mask in enumerate(masks))
        return first | second

    def beside(self, row: int, place: int, unequal: torch.Tensor, shown: torch.Tensor | None) -> tuple[Beside, ...]:
        """The tokens near `place` in a row: `unequal` [width, …] marks what differs, `shown` [width] what to return."""
        name = _IDS.get(str(self.letter), "")
        ids: list[Any] = [
            batch.batch.part(name, at, at + 1)[0].tolist() if name in batch.batch else None
            for batch, at in zip(self.pair.batches, self.pair.row(row), strict=True)
        ]
        found = []
        for near in range(max(place - _AROUND, 0), min(place + _AROUND + 1, len(self.places[0]))):
            if shown is not None and not shown[near]:
                continue
            at = [int(places[near]) for places in self.places]
            tokens = [None if ids[side] is None or at[side] < 0 else ids[side][at[side]] for side in (0, 1)]
            values, differs = self.values(row, near, []), bool(unequal[near].any())
            found.append(Beside(self.position(near), (tokens[0], tokens[1]), *values, differs, near == place))
        return tuple(found)


def lay(name: str, pair: Pair, x: torch.Tensor, y: torch.Tensor) -> Laid | None:
    """Align the tokens of a column's two tensors [B, …]; None where shapes differ and the second dim is not declared."""
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
    """For every token of the wider layout its position on either side, −1 where a side has none."""
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
    """[B, own width, …] → [B, common width, …], 0 where a side has no such place."""
    if len(places) == tensor.shape[1] and bool((places >= 0).all()):
        return tensor
    if not tensor.shape[1]:
        return tensor.new_zeros((len(tensor), len(places), *tensor.shape[2:]))
    return tensor[:, places.clamp(min=0)].masked_fill(_like(places < 0, tensor), 0)


def _like(flags: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """[width], [1, width] or [B, width] flags with the rows and further dims of a tensor."""
    flags = flags if flags.dim() > 1 else flags[None, :]
    flags = flags.reshape(*flags.shape, *[1] * (tensor.dim() - 2))
    return flags.expand(len(tensor), flags.shape[1], *tensor.shape[2:])
