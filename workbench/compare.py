"""Two traces side by side: columns that differ, rows that changed most, metrics."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from workbench.columns import declared
from workbench.dataproto import DataProto
from workbench.dataproto.ops import same_object
from workbench.errors import BatchError, message
from workbench.rewards.score import Score
from workbench.trace import Trace, unchanged


@dataclass(frozen=True, kw_only=True)
class ColumnChange:
    """How one column differs."""

    name: str
    rows: int
    """Rows in which it differs."""
    largest: float | None
    """Largest absolute difference; None for objects, NaN where shapes differ."""


@dataclass(frozen=True, kw_only=True)
class RowChange:
    """How one row differs."""

    row: int
    uid: Any
    reward: tuple[float, float] | None
    """Before and after; None where a side has none."""
    advantage: tuple[float, float] | None
    """Mean over the row's response tokens, before and after."""

    @property
    def flipped(self) -> bool:
        """Whether the advantage changed its sign."""
        return self.advantage is not None and self.advantage[0] * self.advantage[1] < 0

    @property
    def size(self) -> float:
        """How much it changed: the larger of both differences."""
        pairs = [pair for pair in (self.reward, self.advantage) if pair is not None]
        return max((abs(b - a) for a, b in pairs), default=0.0)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What `compare` found; `rows` are those that changed, most first."""

    columns: tuple[ColumnChange, ...]
    only: tuple[tuple[str, ...], tuple[str, ...]]
    """Columns that one side alone has."""
    rows: tuple[RowChange, ...]
    metrics: dict[str, tuple[float, float]]
    """Metrics of both that differ (times left out), first and second."""
    traces: tuple[Trace, Trace] = field(repr=False)

    @property
    def identical(self) -> bool:
        """Nothing differs."""
        return not (self.columns or self.metrics or any(self.only))

    @property
    def sign_flips(self) -> int:
        """Rows whose advantage changed its sign."""
        return sum(row.flipped for row in self.rows)

    def __repr__(self) -> str:
        from workbench.views.comparisons import comparison_text

        return comparison_text(self)

    def _repr_html_(self) -> str:
        from workbench.views.comparisons import comparison_html

        return comparison_html(self)


def compare(first: Any, second: Any) -> Comparison:
    """Compare two traces (or steppers) of the same rows, at the phases that both have reached.

    Raises `BatchError` where they do not hold the same rows (by uid and number).
    """
    first, second = _trace_of(first), _trace_of(second)
    a, b = first.batch, second.batch
    _check_rows(a, b)
    shared = [name for name in a.columns if name in b and not unchanged(name, a, b)]
    changes = (_column(name, *_of_one_width(name, a, b)) for name in shared)
    return Comparison(
        columns=tuple(change for change in changes if change is not None),
        only=(
            tuple(name for name in a.columns if name not in b),
            tuple(name for name in b.columns if name not in a),
        ),
        rows=tuple(sorted(_rows(a, b), key=lambda row: -row.size)),
        metrics=_metrics(first.metrics, second.metrics),
        traces=(first, second),
    )


def _trace_of(side: Any) -> Trace:
    if isinstance(side, DataProto):
        return Trace(side)
    found = getattr(side, "trace", side)
    if not isinstance(found, Trace):
        advice = "take one of its recorded steps: run.traces[step]" if hasattr(side, "traces") else None
        expected = "traces, steppers or batches"
        raise BatchError(message("compare", expected=expected, found=type(side).__name__, do=advice))
    return found


def _check_rows(a: DataProto, b: DataProto) -> None:
    if len(a) != len(b):
        raise BatchError(message("the two hold different rows", expected=f"{len(a)} rows", found=f"{len(b)} rows"))
    if "uid" in a and "uid" in b and list(a["uid"]) != list(b["uid"]):
        ours, theirs = set(a["uid"]), set(b["uid"])
        raise BatchError(
            message(
                "the two hold different rows",
                expected="the same prompts in the same order",
                found=f"{len(ours & theirs)} of {len(ours)} prompts in both",
                do="start both steppers from the same rows.batch(…), or let wb.diverge align them",
            )
        )


_WIDTHS = ("attention_mask", "responses")
"""Columns whose widths are S + T and T."""


def _of_one_width(name: str, a: DataProto, b: DataProto) -> tuple[Any, Any]:
    """A column of both; [B, tokens] that are padded to different widths are laid over each other: padding is no difference."""
    x, y = a[name], b[name]
    if not (isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor) and x.dim() == y.dim() == 2):
        return x, y
    shapes = [[one.batch.raw()[part].shape for part in _WIDTHS if part in one.batch.raw()] for one in (a, b)]
    if len(shapes[0]) < len(_WIDTHS) or len(shapes[1]) < len(_WIDTHS) or shapes[0] == shapes[1]:
        return x, y
    sides = [_real(batch) for batch in (a, b)]
    widths = [max(one[part].shape[1] for one in sides) for part in (0, 1)]
    column = declared(name)
    letter = column.dims[1] if column is not None and len(column.dims) == 2 else "T"
    laid = [_laid(values, letter, real, widths) for values, real in zip((x, y), sides, strict=True)]
    return (laid[0], laid[1]) if laid[0] is not None and laid[1] is not None else (x, y)


def _real(batch: DataProto) -> tuple[torch.Tensor, torch.Tensor]:
    """Which places of prompts [B, S] and of responses [B, T] are no padding."""
    width = batch["responses"].shape[1]
    mask = batch["attention_mask"].bool()
    return mask[:, :-width], mask[:, -width:]


def _laid(
    values: torch.Tensor, letter: str, real: tuple[torch.Tensor, torch.Tensor], widths: list[int]
) -> torch.Tensor | None:
    """Prompts to the right, responses to the left, zeros in all padding; None for what has another width than it should."""
    left, right = (width - part.shape[1] for width, part in zip(widths, real, strict=True))
    whole = torch.cat(real, dim=1)
    known = {"S": (real[0], (left, 0)), "T": (real[1], (0, right)), "S+T": (whole, (left, right))}
    if letter not in known or values.shape[1] != known[letter][0].shape[1]:
        return None
    mask, around = known[letter]
    return torch.nn.functional.pad(values.masked_fill(~mask, 0), around)


def _column(name: str, a: Any, b: Any) -> ColumnChange | None:
    if a is b:
        return None
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        differing = sum(not _same(x, y) for x, y in zip(a, b, strict=True))
        return ColumnChange(name=name, rows=differing, largest=None) if differing else None
    if a.shape != b.shape:
        return ColumnChange(name=name, rows=len(a), largest=float("nan"))
    if a.dtype == b.dtype and torch.equal(a, b):
        return None
    rows, largest = 0, 0.0
    for x, y in zip(a.split(_block(a)), b.split(_block(a)), strict=True):  # blocks that stay in the processor's cache
        unequal = x != y
        if not unequal.any():
            continue
        apart = (x.double() - y.double()).abs()
        top = apart.max().item()
        if top != top:  # NaN equals NaN, and is infinitely far from a number
            unequal &= ~(x.isnan() & y.isnan())
            top = apart[unequal].nan_to_num(nan=float("inf")).max().item() if unequal.any() else 0.0
        rows += int(unequal.reshape(len(x), -1).any(-1).sum())
        largest = max(largest, top)
    return ColumnChange(name=name, rows=rows, largest=largest) if rows else None


def _block(values: torch.Tensor) -> int:
    """Rows of about 2¹⁷ elements in all."""
    return max(1, (1 << 17) // max(values[0].numel(), 1)) if len(values) else 1


_FLAT = (str, int, bool, type(None))


def _same(x: Any, y: Any) -> bool:
    """Equal; of two judgements the time that they took does not count."""
    if x is y:
        return True
    if isinstance(x, Score) and isinstance(y, Score):
        a, b = vars(x), vars(y)
        return all(a[key] is b[key] or _same(a[key], b[key]) for key in a if key != "seconds")
    if type(x) is type(y):  # most cells: nothing to look into
        if type(x) in _FLAT:
            return bool(x == y)
        if type(x) is float:
            return bool(x == y) or (x != x and y != y)
        if type(x) in (dict, list):
            with suppress(ValueError):  # arrays within do not say whether they are equal
                if bool(x == y):
                    return True
    return same_object(x, y)


def _rows(a: DataProto, b: DataProto) -> list[RowChange]:
    """The rows whose reward or mean advantage differs."""
    pairs = {name: _per_row(a, b, name) for name in ("reward", "advantages")}
    changed = torch.zeros(len(a), dtype=torch.bool)
    for values in pairs.values():
        if values is not None:
            changed |= (values[1] - values[0]).abs() > 0
    numbers = changed.nonzero()[:, 0]

    def listed(name: str) -> list[tuple[float, float]] | list[None]:
        values = pairs[name]
        if values is None:
            return [None] * len(numbers)
        return list(zip(*(one[numbers].tolist() for one in values), strict=True))

    uids = a["uid"] if "uid" in a else range(len(a))
    return [
        RowChange(row=row, uid=uids[row], reward=reward, advantage=advantage)
        for row, reward, advantage in zip(numbers.tolist(), listed("reward"), listed("advantages"), strict=True)
    ]


def _per_row(a: DataProto, b: DataProto, name: str) -> tuple[torch.Tensor, torch.Tensor] | None:
    """[B] float64 of both sides; None where one has no such column. One that both hold is worked out once."""
    if name not in a or name not in b:
        return None
    first = _means(a, name)
    same = unchanged(name, a, b) and (a[name].dim() == 1 or unchanged("response_mask", a, b))
    return first, (first if same else _means(b, name))


def _means(batch: DataProto, name: str) -> torch.Tensor:
    values = batch[name]
    if values.dim() == 1:
        return values.double()
    mask = batch["response_mask"]
    blocks = zip(values.split(_block(values)), mask.split(_block(values)), strict=True)
    sums = [x.masked_fill(m == 0, 0).sum(-1, dtype=torch.float64) / m.sum(-1).clamp(min=1) for x, m in blocks]
    return torch.cat(sums) if sums else torch.zeros(0, dtype=torch.float64)


def _metrics(a: dict[str, float], b: dict[str, float]) -> dict[str, tuple[float, float]]:
    keys = [key for key in a if key in b and not key.startswith("timing_s/")]
    return {key: (a[key], b[key]) for key in keys if a[key] != b[key] and not (a[key] != a[key] and b[key] != b[key])}
