"""How one column of two batches differs, at the first row and token where it does, whatever the padding of either side."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from workbench.columns import declared
from workbench.dataproto import DataProto
from workbench.dataproto.columns_map import letter_sizes
from workbench.divergence.rows import Rows
from workbench.divergence.same import Beside, Cells, Difference, How, cell, first_character, held, read

_AROUND = 4
_MASKS = {"T": "response_mask", "S": "prompt_mask", "S+T": "attention_mask"}
_IDS = {"T": "responses", "S": "prompts", "S+T": "input_ids"}


def column_difference(name: str, a: DataProto, b: DataProto, rows: Rows, how: How) -> Difference | None:
    """How one column differs; None where it does not."""
    if name not in a or name not in b:
        there = [_dtype(held(side, name)) if name in side else None for side in (a, b)]
        return Difference(why="column", first=there[0], second=there[1], rows=len(rows.pairs or a))
    if held(a, name) is held(b, name) and rows.pairs is None:
        return None
    x, y = read(a, name), read(b, name)
    if isinstance(x, torch.Tensor) != isinstance(y, torch.Tensor) or _kind(name, x) != _kind(name, y):
        return Difference(why="dtype", first=_dtype(x), second=_dtype(y), rows=len(a))
    x, y = rows.of(x, 0), rows.of(y, 1)
    if not isinstance(x, torch.Tensor):
        return _objects(x, y, rows, how)
    if x.shape == y.shape and x.dtype == y.dtype and torch.equal(x, y):
        return None
    return _Laid(name, a, b, rows, how).difference(x, y)


def dtypes(name: str, a: DataProto, b: DataProto) -> tuple[str, str]:
    """What both sides store the column as; nothing is read for it."""
    return _dtype(held(a, name)), _dtype(held(b, name))


def _dtype(x: Any) -> str:
    """`float32`, `int64`, `objects`."""
    found = getattr(x, "dtype", None)
    return str(found).removeprefix("torch.") if isinstance(found, torch.dtype) else "objects"


def _kind(name: str, x: Any) -> str:
    if not isinstance(x, torch.Tensor) or name.endswith("mask"):  # a mask may be bool, int or float
        return ""
    return "float" if x.is_floating_point() else "bool" if x.dtype == torch.bool else "int"


def _dims(name: str) -> tuple[str, ...]:
    known = declared(name)
    return known.dims if known else ()


class _Over(NamedTuple):
    """Two tensors [B, width, …] laid over each other, rows of the one by those of the other."""

    left: torch.Tensor
    right: torch.Tensor
    unequal: torch.Tensor
    counts: torch.Tensor | None
    """[B or 1, width]: where either side's mask has a token; None: everywhere."""
    places: tuple[torch.Tensor, torch.Tensor]
    """[width]: the position of each token on either side, −1 where a side has none."""

    def position(self, place: int) -> int:
        """Of a token in the first; in the second, where only that has it."""
        first = int(self.places[0][place])
        return first if first >= 0 else int(self.places[1][place])

    def values(self, row: int, place: int, deeper: list[int]) -> tuple[Any, Any]:
        """Of one token on both sides; None where a side has none."""
        first, second = (
            _value(side[row, place], places[place], deeper)
            for side, places in zip((self.left, self.right), self.places, strict=True)
        )
        return first, second

    def largest(self) -> float | None:
        """The largest absolute difference of floats; None for other kinds."""
        if not (self.left.is_floating_point() or self.right.is_floating_point()):
            return None
        apart = (self.left.double() - self.right.double()).abs().nan_to_num(nan=math.inf, posinf=math.inf)
        alone = (self.places[0] < 0) | (self.places[1] < 0)
        return apart.masked_fill(_like(alone, apart), math.inf)[self.unequal].max().item()


class _Laid:
    """Two tensors laid over each other token by token, whatever the padding of either side."""

    def __init__(self, name: str, a: DataProto, b: DataProto, rows: Rows, how: How) -> None:
        self.name, self.batches, self.rows, self.how = name, (a, b), rows, how
        self.sizes = tuple(
            _sizes({key: tuple(raw.shape) for key, raw in batch.batch.raw().items()}) for batch in (a, b)
        )
        self.letter: str | None = None

    def difference(self, x: torch.Tensor, y: torch.Tensor) -> Difference | None:
        """The first place where they differ."""
        self.letter = self._letter(x, y)
        places = self._places(self.letter) if self.letter else None
        if places is None or x.shape[2:] != y.shape[2:]:
            if x.shape != y.shape:
                return Difference(why="shape", first=tuple(x.shape), second=tuple(y.shape), rows=len(x))
            width = torch.arange(x.shape[1]) if x.dim() > 1 else torch.zeros(1, dtype=torch.long)
            places = (width, width)
        flat = x.dim() == 1
        left, right = (_spread(t[:, None] if flat else t, place) for t, place in zip((x, y), places, strict=True))
        mask = self.name in _MASKS.values()
        counts = None if mask or flat else self._counts(places)
        alone = (places[0] >= 0) != (places[1] >= 0)
        if counts is None and not mask and bool(alone.any()):
            return Difference(why="shape", first=tuple(x.shape), second=tuple(y.shape), rows=len(x))
        unequal = ~self.how.tensors(left, right)
        if not mask:
            unequal |= _like(alone, left)
        if counts is not None:
            unequal &= _like(counts, left)
        if not unequal.any():
            return None
        return self._first(_Over(left, right, unequal, counts, places), flat)

    def _letter(self, x: torch.Tensor, y: torch.Tensor) -> str | None:
        if x.dim() < 2 or y.dim() < 2:
            return None
        known = _dims(self.name)
        if known:
            return known[1] if len(known) > 1 else None
        widths = tuple(sizes.get("T") for sizes in self.sizes)
        return "T" if None not in widths and widths == (x.shape[1], y.shape[1]) else None

    def _places(self, letter: str) -> tuple[torch.Tensor, torch.Tensor] | None:
        """For every token of the wider layout its position on either side, −1 where a side has none."""
        if letter == "S+T":
            head, tail = self._places("S"), self._places("T")
            if head is None or tail is None:
                return None
            both = [
                torch.cat([head[side], torch.where(tail[side] < 0, -1, tail[side] + self.sizes[side]["S"])])
                for side in (0, 1)
            ]
            return both[0], both[1]
        if any(letter not in sizes for sizes in self.sizes):
            return None
        widths = [sizes[letter] for sizes in self.sizes]
        every = torch.arange(max(widths))
        if letter == "S":  # padded on the left
            made = [(every - (max(widths) - width)).clamp(min=-1) for width in widths]
        else:
            made = [torch.where(every < width, every, -1) for width in widths]
        return made[0], made[1]

    def _counts(self, places: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor | None:
        """Where either side's mask has a token; None where no side has a mask."""
        if self.letter is None or self.how.everywhere:
            return None
        masks = [self._mask(side, places[side]) for side in (0, 1)]
        if masks[0] is None and masks[1] is None:
            return None
        # without a mask, a side's own places count where the other has none
        alone = ((places[0] >= 0) & (places[1] < 0))[None], ((places[1] >= 0) & (places[0] < 0))[None]
        first, second = (alone[side] if mask is None else mask for side, mask in enumerate(masks))
        return first | second

    def _mask(self, side: int, places: torch.Tensor) -> torch.Tensor | None:
        batch, name = self.batches[side], _MASKS[str(self.letter)]
        if self.name == "responses" and "attention_mask" in batch and "T" in self.sizes[side]:
            mask = read(batch, "attention_mask")[:, -self.sizes[side]["T"] :]
        elif name in batch:
            mask = read(batch, name)
        else:
            return None
        taken: torch.Tensor = self.rows.of(mask, side)
        return _spread(taken, places).bool()

    def _first(self, over: _Over, flat: bool) -> Difference:
        row, place, *deeper = over.unequal.nonzero()[0].tolist()
        whole = self.rows.first(row), self.rows.second(row)
        beside = () if flat else self._beside(over, row, whole, place)
        here = next((one.ids for one in beside if one.here), (None, None))
        first, second = over.values(row, place, deeper)
        return Difference(
            why="values",
            row=whole[0],
            other_row=whole[1],
            token=None if flat else over.position(place),
            token_ids=None if here == (None, None) else here,
            inside="".join(f"[{index}]" for index in deeper),
            first=first,
            second=second,
            rows=int(over.unequal.reshape(len(over.left), -1).any(-1).sum()),
            largest=over.largest(),
            beside=beside,
        )

    def _beside(self, over: _Over, row: int, whole: tuple[int, int], place: int) -> tuple[Beside, ...]:
        """A few tokens around the place; padding of both sides left out."""
        name = _IDS.get(str(self.letter), "")
        ids: list[Any] = [
            batch.batch.part(name, at, at + 1)[0].tolist() if name in batch.batch else None
            for batch, at in zip(self.batches, whole, strict=True)
        ]
        found = []
        for near in range(max(place - _AROUND, 0), min(place + _AROUND + 1, len(over.places[0]))):
            if over.counts is not None and not over.counts.expand(len(over.left), -1)[row, near]:
                continue
            at = [int(places[near]) for places in over.places]
            tokens = [None if ids[side] is None or at[side] < 0 else ids[side][at[side]] for side in (0, 1)]
            found.append(
                Beside(
                    over.position(near),
                    (tokens[0], tokens[1]),
                    *over.values(row, near, []),
                    differs=bool(over.unequal[row, near].any()),
                    here=near == place,
                )
            )
        return tuple(found)


def _sizes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Letter → size, with S where only S+T and T are there."""
    sizes = letter_sizes(shapes)
    if "S" not in sizes and {"S+T", "T"} <= sizes.keys():
        sizes["S"] = sizes["S+T"] - sizes["T"]
    return sizes


def _spread(tensor: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """[B, own width, …] → [B, common width, …], 0 where a side has no such place."""
    if len(places) == tensor.shape[1] and bool((places >= 0).all()):
        return tensor
    if not tensor.shape[1]:
        return tensor.new_zeros((len(tensor), len(places), *tensor.shape[2:]))
    return tensor[:, places.clamp(min=0)].masked_fill(_like((places < 0)[None, :], tensor), 0)


def _like(flags: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """[B or 1, width] flags with the further dims of a tensor."""
    flags = flags if flags.dim() > 1 else flags[None, :]
    flags = flags.reshape(*flags.shape, *[1] * (tensor.dim() - 2))
    return flags.expand(len(tensor), flags.shape[1], *tensor.shape[2:])


def _value(cell: torch.Tensor, place: torch.Tensor, deeper: list[int]) -> Any:
    if int(place) < 0:
        return None
    return cell[tuple(deeper)].tolist() if deeper else cell.tolist()


def _objects(x: np.ndarray, y: np.ndarray, rows: Rows, how: How) -> Difference | None:
    found: tuple[int, Cells] | None = None
    differing = 0
    for row, (one, two) in enumerate(zip(x, y, strict=True)):
        cells = cell(one, two, how)
        if cells is not None:
            differing += 1
            found = found or (row, cells)
    if found is None:
        return None
    row, cells = found
    texts = isinstance(cells.first, str) and isinstance(cells.second, str)
    return Difference(
        why="values",
        row=rows.first(row),
        other_row=rows.second(row),
        inside=cells.inside,
        character=first_character(cells.first, cells.second) if texts else None,
        first=cells.first,
        second=cells.second,
        rows=differing,
    )
