"""Two traces side by side: columns that differ, rows that changed most, metrics."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from workbench.dataproto import DataProto
from workbench.errors import BatchError, message
from workbench.trace import Trace


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
        from workbench.views.traces import comparison_text

        return comparison_text(self)

    def _repr_html_(self) -> str:
        from workbench.views.traces import comparison_html

        return comparison_html(self)


def compare(first: Trace, second: Trace) -> Comparison:
    """Compare two traces of the same rows, at the phases that both have reached.

    Raises `BatchError` where they do not hold the same rows (by uid and number).
    """
    a, b = first.batch, second.batch
    if len(a) != len(b) or ("uid" in a and "uid" in b and list(a["uid"]) != list(b["uid"])):
        raise BatchError(
            message("the two steps hold different rows", expected=f"{len(a)} rows of the same prompts", found=len(b))
        )
    shared = [name for name in a.columns if name in b]
    changes = (_column(name, a[name], b[name]) for name in shared)
    rows = sorted(_rows(a, b), key=lambda row: -row.size)
    return Comparison(
        columns=tuple(change for change in changes if change is not None),
        only=(
            tuple(name for name in a.columns if name not in b),
            tuple(name for name in b.columns if name not in a),
        ),
        rows=tuple(row for row in rows if row.size > 0),
        metrics=_metrics(first.metrics, second.metrics),
        traces=(first, second),
    )


def _column(name: str, a: Any, b: Any) -> ColumnChange | None:
    if a is b:
        return None
    if not isinstance(a, torch.Tensor):
        differing = sum(not _same(x, y) for x, y in zip(a, b, strict=True))
        return ColumnChange(name=name, rows=differing, largest=None) if differing else None
    if a.shape != b.shape:
        return ColumnChange(name=name, rows=len(a), largest=float("nan"))
    unequal = (a != b) & ~(a.isnan() & b.isnan()) if a.is_floating_point() else a != b
    if not unequal.any():
        return None
    largest = (a.double() - b.double()).abs().nan_to_num(nan=float("inf")).max().item()
    return ColumnChange(name=name, rows=int(unequal.reshape(len(a), -1).any(-1).sum()), largest=largest)


def _same(x: Any, y: Any) -> bool:
    return x is y or repr(x) == repr(y)


def _rows(a: DataProto, b: DataProto) -> list[RowChange]:
    pairs = {name: (_per_row(a, name), _per_row(b, name)) for name in ("reward", "advantages")}

    def pair(name: str, row: int) -> tuple[float, float] | None:
        x, y = pairs[name]
        return None if x is None or y is None else (x[row].item(), y[row].item())

    uids = a["uid"] if "uid" in a else range(len(a))
    return [
        RowChange(row=row, uid=uids[row], reward=pair("reward", row), advantage=pair("advantages", row))
        for row in range(len(a))
    ]


def _per_row(batch: DataProto, name: str) -> torch.Tensor | None:
    if name not in batch:
        return None
    values = batch[name].double()
    if values.dim() == 1:
        return values
    mask = batch["response_mask"]
    return (values * mask).sum(-1) / mask.sum(-1).clamp(min=1)


def _metrics(a: dict[str, float], b: dict[str, float]) -> dict[str, tuple[float, float]]:
    keys = [key for key in a if key in b and not key.startswith("timing_s/")]
    return {key: (a[key], b[key]) for key in keys if a[key] != b[key] and not (a[key] != a[key] and b[key] != b[key])}
