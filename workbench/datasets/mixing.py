"""Rows made of other rows: `mix` draws from several by weight, `stages` from one after the other.

Everything that reads data (the loop, checks before a run, resume, dynamic sampling, evaluation, views) has `Rows`, and these
are `Rows`. What a kind of its own decides is in three methods, each a function of its arguments alone:

- `_drawn(asks, seed)`: the rows of the last of some steps, given how many rows each of them takes;
- `_position(asks, seed)`: where that leaves every part, for the cursor that checkpoints keep;
- `_further(size, step, seed)`: more rows for a step (DAPO).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from workbench.base.errors import DataError, check_name, describe
from workbench.base.seeds import derive
from workbench.dataproto.core import DataProto
from workbench.datasets.rows import Cursor, Drawn, Rows, check_rows, common_limit, permutation, place

T = TypeVar("T")
_GOLDEN = 0x9E3779B97F4A7C15
"""2^64 / golden section, odd: multiples of it modulo 2^64 fill the range evenly, however many there are."""


def asks_of(size: int, steps: int) -> np.ndarray:
    """Make the array of steps 1, 2, … with `size` rows each: [steps, 2] of step and number of rows."""
    return np.stack([np.arange(1, steps + 1), np.full(steps, size)], 1)


def spread_offsets(number: int, seed: int) -> np.ndarray:
    """Make [number] float64 in [0, 1), evenly spread from a seeded start, which decide whether a share is rounded up or
    down."""
    steps = np.arange(number, dtype=np.uint64) * np.uint64(_GOLDEN) + np.uint64(seed)
    return (steps >> np.uint64(11)) * 2.0**-53


def with_sizes(asks: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return the steps of `asks` with other numbers of rows: [K, 2] of step and number of rows."""
    return np.stack([asks[:, 0], sizes], 1)


def shuffled(drawn: Sequence[T], seed: int, number: int) -> list[T]:
    """Shuffle a batch's rows by the seed, so that each mini-batch has rows of every part."""
    return [drawn[place] for place in permutation(len(drawn), seed, number)]


class Composite(Rows):
    """Rows made of other rows. Slices and `select` are plain `Rows`; `filter` and `fitting` work on each part."""

    learns = False
    """Whether the rows change during a run."""

    def __init__(self, parts: Sequence[Rows], rows: Sequence[dict[str, Any]], source: str) -> None:
        self._parts = tuple(parts)
        self._fill(rows, common_limit(parts), source, "")
        self._offsets = np.cumsum([0, *map(len, parts)]).tolist()

    def _with(self, parts: Sequence[Rows]) -> Rows:
        """Make rows of this kind, with the same settings, from other parts."""
        raise NotImplementedError(f"{type(self).__name__} does not define this hook of Composite")

    def _identity(self) -> tuple[Any, ...]:
        """Return the settings that `data_hash` covers besides the parts, such as a mix's weights."""
        raise NotImplementedError(f"{type(self).__name__} does not define this hook of Composite")

    @property
    def data_hash(self) -> str:
        """Sixteen hex digits that change when a row, a part or a weight changes."""
        text = repr((type(self).__name__, self._identity(), [part.data_hash for part in self._parts]))
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def batch(self, size: int, step: int = 1, seed: int = 0) -> DataProto:
        """Return the `size` prompts that training sees at `step` (from 1); the same arguments always give the same
        prompts."""
        place(self._span, size, step)
        epoch = (step - 1) * size // self._offsets[-1]
        return self._batch(self._drawn(asks_of(size, step), seed), step=step, epoch=epoch, seed=seed)

    def cursor(self, step: int, batch_size: int, seed: int) -> Cursor:
        """Return the position in the data (epoch and rows taken) after `step` training steps, and that of every part."""
        epoch, offset = divmod(step * batch_size, self._offsets[-1])
        known = {"step": step, "epoch": epoch, "offset": offset, "data_hash": self.data_hash}
        parts = self._position(asks_of(batch_size, step), seed)
        return Cursor(**known, seed=seed, batch_size=batch_size, parts=parts)

    def check_steps(self, size: int, steps: int, seed: int) -> None:
        """Raise `DataError` where there are not prompts for all these steps, because a part or the stages end earlier."""
        self._position(asks_of(size, steps), seed)

    def filter(self, keep: Callable[[dict[str, Any]], bool]) -> Rows:
        """Return these rows with only the rows of each part for which `keep` is true."""
        return self._with([part.filter(keep) for part in self._parts])

    def fitting(self, tokenizer: Any, *, overlong: str = "error", **switches: Any) -> Rows:
        """As `Rows.fitting`; `overlong="drop"` removes the rows whose prompts are too long from each part."""
        if overlong != "drop":
            return super().fitting(tokenizer, overlong=overlong, **switches)
        return self._with([part.fitting(tokenizer, overlong="drop", **switches) for part in self._parts])

    def split(self, held_out: int | float, seed: int = 0) -> tuple[Rows, Rows]:
        """Raise `DataError`: the parts have no common order that could be split."""
        what = f"a {type(self).__name__.lower()} cannot be split: its parts have no common order"
        raise DataError(what, do="split its parts, and make two of them")

    def __add__(self, other: Rows) -> Rows:
        what = f"a {type(self).__name__.lower()} cannot be joined by +: its shares would be lost"
        raise DataError(what, do="join its parts, or take wb.datasets.mix")

    def __radd__(self, other: Rows) -> Rows:
        return self.__add__(other)

    def _shifted(self, number: int, drawn: Sequence[Drawn]) -> list[Drawn]:
        return [(self._offsets[number] + index, draw) for index, draw in drawn]


class Mix(Composite):
    """Rows of several data sets, drawn by weight: see `mix`."""

    def __init__(self, parts: Mapping[str, Rows], weights: Sequence[float], exhausted: str) -> None:
        self.weights = {name: weight / sum(weights) for name, weight in zip(parts, weights, strict=True)}
        self._exhausted = exhausted
        rows = [_labelled(row, name) for name, part in parts.items() for row in part._rows]
        shown = [f"{name} × {self.weights[name]:.3g} ({part.source or 'memory'})" for name, part in parts.items()]
        super().__init__(list(parts.values()), rows, f"a mix of {', '.join(shown)}")

    def _with(self, parts: Sequence[Rows]) -> Rows:
        return mix(dict(zip(self.weights, parts, strict=True)), weights=self.weights, exhausted=self._exhausted)

    def _identity(self) -> tuple[Any, ...]:
        return tuple(self.weights.items()), self._exhausted

    def _counts(self, asks: np.ndarray, seed: int) -> list[np.ndarray]:
        """Return for each part its number of rows in each step, [K]: the exact share, rounded so that the parts' totals
        keep the weights."""
        sizes = asks[:, 1]
        exact = np.outer(sizes, np.cumsum([0.0, *self.weights.values()]))
        upto = np.floor(exact + spread_offsets(len(asks), derive(seed, "mix"))[:, None])
        upto[:, -1] = sizes
        counts = np.diff(np.minimum(upto, sizes[:, None])).astype(np.int64)
        for name, part, used in zip(self.weights, self._parts, np.cumsum(counts, 0).T, strict=True):
            if self._exhausted == "stop" and len(used) and used[-1] > len(part):
                last = int(asks[int(np.argmax(used > len(part))), 0]) - 1
                what, found = f"part {name!r} of the mix is exhausted", f"its {len(part)} rows last until step {last}"
                raise DataError(what, found=found, do="take fewer steps, another weight, or exhausted='cycle'")
        return list(counts.T)

    def _asks_of_parts(self, asks: np.ndarray, seed: int) -> list[tuple[Rows, np.ndarray, int]]:
        """Return each part with the steps and row numbers asked of it, [K, 2], and its seed."""
        each = zip(self.weights, self._parts, self._counts(asks, seed), strict=True)
        return [(part, with_sizes(asks, counts), derive(seed, "part", name)) for name, part, counts in each]

    def _drawn(self, asks: np.ndarray, seed: int) -> list[Drawn]:
        parts = enumerate(self._asks_of_parts(asks, seed))
        drawn = [one for number, (part, ask, sub) in parts for one in self._shifted(number, part._drawn(ask, sub))]
        return shuffled(drawn, derive(seed, "mixed"), len(asks))

    def _position(self, asks: np.ndarray, seed: int) -> dict[str, Any]:
        parts = self._asks_of_parts(asks, seed)
        return {name: part._position(ask, sub) for name, (part, ask, sub) in zip(self.weights, parts, strict=True)}

    def _further(self, size: int, step: int, seed: int) -> list[int]:
        parts = enumerate(self._asks_of_parts(np.array([[step, size]]), seed))
        rows = [
            self._offsets[number] + index
            for number, (part, ask, sub) in parts
            for index in part._further(int(ask[0, 1]), step, sub)
        ]
        return shuffled(rows, seed, 1)


class Stages(Composite):
    """Rows of several data sets, one after the other: see `stages`."""

    def __init__(self, parts: Sequence[tuple[Rows, int | None]]) -> None:
        self.steps = tuple(steps for _, steps in parts)
        self._last = [sum(steps or 0 for steps in self.steps[: number + 1]) for number in range(len(parts))]
        rows = [row for part, _ in parts for row in part._rows]
        shown = [f"{part.source or 'memory'} for {steps or 'all further'} steps" for part, steps in parts]
        super().__init__([part for part, _ in parts], rows, ", then ".join(shown))

    def _with(self, parts: Sequence[Rows]) -> Rows:
        return stages(list(zip(parts, self.steps, strict=True)))

    def _identity(self) -> tuple[Any, ...]:
        return self.steps

    @property
    def _span(self) -> int:
        return min(part._span for part in self._parts)

    def stage_at(self, step: int) -> int:
        """Return the number of the stage (from 0) that a step (from 1) is in. Raises `DataError` for a step after the
        last stage."""
        for number, (last, steps) in enumerate(zip(self._last, self.steps, strict=True)):
            if steps is None or step <= last:
                return number
        do = "take fewer steps, or None for the steps of the last stage: it then goes on"
        raise DataError(f"the stages end after step {self._last[-1]}", found=f"step {step}", do=do)

    def _inside(self, asks: np.ndarray, number: int) -> np.ndarray:
        """Return the steps of `asks`, [K, 2], that are in the stage `number`."""
        first = self._last[number] - (self.steps[number] or 0)
        last = math.inf if self.steps[number] is None else self._last[number]
        return asks[(asks[:, 0] > first) & (asks[:, 0] <= last)]

    def _drawn(self, asks: np.ndarray, seed: int) -> list[Drawn]:
        number = self.stage_at(int(asks[-1, 0]))
        drawn = self._parts[number]._drawn(self._inside(asks, number), derive(seed, "stage", number))
        return self._shifted(number, drawn)

    def _position(self, asks: np.ndarray, seed: int) -> dict[str, Any]:
        self.stage_at(len(asks) and int(asks[-1, 0]))
        return {
            f"stage {number}": part._position(self._inside(asks, number), derive(seed, "stage", number))
            for number, part in enumerate(self._parts)
        }

    def _further(self, size: int, step: int, seed: int) -> list[int]:
        number = self.stage_at(step)
        indices = self._parts[number]._further(size, step, derive(seed, "stage", number))
        return [self._offsets[number] + index for index in indices]

    def learn(self, step: int, batches: Sequence[DataProto]) -> dict[str, float]:
        """Return the metric `data/stage`: the number of the step's stage, from 0."""
        return {"data/stage": float(self.stage_at(step))}


def _labelled(row: dict[str, Any], part: str) -> dict[str, Any]:
    inner = f"/{row['data_part']}" if row.get("data_part") else ""
    return {**row, "data_part": f"{part}{inner}"}


def check_part(part: Any, what: str) -> Rows:
    """Return a part of other rows. Raises `DataError` for what is no `Rows`, has no rows, or changes with a run."""
    check_rows(what, part)
    if isinstance(part, Composite) and part.learns:
        kind = type(part).__name__.lower()
        do = f"make the mix or the stages first, then wb.datasets.{kind}(…)"
        raise DataError(f"{what} is {kind} rows, which cannot be a part of other rows", do=do)
    if not len(part):
        raise DataError(f"{what} has no rows")
    return part


def mix(
    parts: Mapping[str, Rows] | Sequence[Rows],
    *,
    weights: Mapping[str, float] | Sequence[float] | None = None,
    exhausted: str = "cycle",
) -> Rows:
    """Mix data sets: every batch has rows of each by its weight, to within one row, and over many batches exactly.

    Rows get the column `data_part`, the name of their part, by which metrics are grouped (`val-core/<part>/…`,
    `data/<part>/…`). Each part has its own order and epochs.

    Args:
        parts: name → rows; a list of rows is named by their `data_source`, where each has one of its own, else 0, 1, ….
        weights: > 0, at any scale, in the order of the parts or by name; None: by the numbers of rows.
        exhausted: what happens when all rows of a part are drawn: `"cycle"`, it begins again; `"stop"`, further steps
            are refused before training begins.

    Raises `DataError` for weights that are not one finite number above 0 for each part, empty parts, and unknown names.

    Example:
        >>> rows = wb.datasets.mix({"gsm8k": a, "math": b, "code": c}, weights=[.5, .3, .2])  # doctest: +SKIP
    """
    named = _name_parts(parts)
    check_name("value of exhausted", exhausted, ("cycle", "stop"), DataError)
    if isinstance(weights, Mapping):
        if strange := sorted(set(weights) ^ set(named), key=str):
            found = f"{strange[0]!r} without its part, or without its weight"
            raise DataError("weights of the mix", expected=f"one for each of {', '.join(named)}", found=found)
        weights = [weights[name] for name in named]
    shares = [len(part) for part in named.values()] if weights is None else list(weights)
    good = all(isinstance(share, int | float | np.number) and not isinstance(share, bool) for share in shares)
    if len(shares) != len(named) or not good or not all(0 < share < math.inf for share in shares):
        expected = f"{len(named)} finite numbers above 0, one for each of {', '.join(named)}"
        raise DataError("weights of the mix", expected=expected, found=weights)
    return Mix(named, [share / max(shares) for share in shares], exhausted)


def _name_parts(parts: Any) -> dict[str, Rows]:
    if isinstance(parts, Sequence) and not isinstance(parts, str):
        listed = [check_part(part, f"part {number} of the mix") for number, part in enumerate(parts)]
        sources = [set(map(str, part.values("data_source"))) for part in listed]
        alone = all(len(one) == 1 for one in sources) and len(set().union(*sources)) == len(sources)
        parts = {min(sources[number]) if alone else str(number): part for number, part in enumerate(listed)}
    if not isinstance(parts, Mapping) or not parts:
        expected = "a dict of name → rows, or a list of rows"
        raise DataError("parts of a mix", expected=expected, found=describe(parts))
    for name, part in parts.items():
        if not isinstance(name, str) or not name:
            raise DataError("name of a part of the mix", expected="a text", found=describe(name))
        check_part(part, f"part {name!r} of the mix")
    return dict(parts)


def stages(parts: Sequence[tuple[Rows, int | None]]) -> Rows:
    """Make a curriculum: rows of the first data set for some steps, then of the second, and so on, in one run.

    A number of steps of `None`, for the last data set alone, means all further steps; otherwise a run of more steps is
    refused before it starts. The metric `data/stage` says which stage (from 0) a step was in. A stage may be a `mix`.

    Example:
        >>> rows = wb.datasets.stages([(easy, 100), (medium, 100), (hard, None)])  # doctest: +SKIP
    """
    listed = list(parts)
    for number, pair in enumerate(listed):
        what = f"stage {number} of a curriculum"
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise DataError(what, expected="a pair: rows, number of steps", found=describe(pair))
        check_part(pair[0], f"{what}: its rows")
        endless = pair[1] is None and number == len(listed) - 1
        whole = isinstance(pair[1], int) and not isinstance(pair[1], bool) and pair[1] >= 1
        if not endless and not whole:
            expected = "a whole number ≥ 1; None for the last stage alone"
            raise DataError(f"{what}: its steps", expected=expected, found=pair[1])
    if not listed:
        raise DataError("stages of a curriculum", expected="at least one", found="none")
    return Stages([(rows, steps) for rows, steps in listed])
