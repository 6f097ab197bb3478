"""What curves are made of: a run's columns, running means, lines thinned for drawing, colours, names made safe."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from workbench.views.html import plain

if TYPE_CHECKING:
    import pandas as pd

Rows: TypeAlias = Sequence[Mapping[str, Any]]
Array: TypeAlias = "np.ndarray[Any, Any]"
STEP = "training/global_step"
PHASES = "timing_s/*"
"""Stands for the seconds of every phase that a run has."""
_COLOURS = ("#2f6db5", "#c8553d", "#3a8f5d", "#8a5fb0", "#b8862b", "#3c9aa5", "#a04668", "#6b7280")
_TWICE = {"gen": "rollout", "ref": "ref_log_prob", "adv": "advantage"}
"""verl's names of phases that are there under our own."""
_NO_PHASE = {"step", "testing", "*"}
BINS = 400


@dataclass
class Series:
    """One run: its name, its colour, and its columns, each read once."""

    name: str
    metrics: Rows | pd.DataFrame
    colour: str
    _columns: dict[str, Array] = field(default_factory=dict)

    def column(self, key: str) -> Array:
        """The metric at every row, [rows] float64; NaN where it is missing or no number."""
        if key not in self._columns:
            self._columns[key] = self._read(key)
        return self._columns[key]

    def _read(self, key: str) -> Array:
        rows: Any = self.metrics
        if hasattr(rows, "columns"):
            values = rows[key].tolist() if key in rows.columns else [None] * len(rows)
        else:
            values = [row.get(key) for row in rows]
        try:
            return np.array(values, dtype=float)  # None becomes NaN
        except (TypeError, ValueError):  # a word among the numbers
            return np.array([value if isinstance(value, int | float) else math.nan for value in values], dtype=float)

    @property
    def steps(self) -> Array:
        """The step of every row, [rows]; a row without one counts from 0."""
        steps = self.column(STEP)
        return np.where(np.isfinite(steps), steps, np.arange(len(steps)))

    def points(self, key: str) -> tuple[Array, Array]:
        """(steps, values), both [points], where the metric is a finite number."""
        values = self.column(key)
        there = np.isfinite(values)
        return self.steps[there], values[there]

    def phases(self) -> list[str]:
        """Phases with seconds of their own, in the order in which they run."""
        if hasattr(self.metrics, "columns"):
            names = [str(name) for name in self.metrics.columns]
        else:  # a phase may come late (a critic's warm-up), but not for one step in hundreds
            rows: Any = self.metrics
            some = [*rows[:: max(len(rows) // 200, 1)], *rows[-1:]]
            names = list(dict.fromkeys(name for row in some for name in row))
        found = [name.removeprefix("timing_s/") for name in names if name.startswith("timing_s/")]
        return [
            name
            for name in found
            if name not in _NO_PHASE
            and "/" not in name
            and not (name in _TWICE and _TWICE[name] in found)
            and len(self.points(f"timing_s/{name}")[0])
        ]


def colour(place: int) -> str:
    """A colour for the n-th run or phase: eight, then the same paler, and paler again."""
    base = _COLOURS[place % len(_COLOURS)]
    white = (place // len(_COLOURS)) % 3 * 0.33
    parts = [int(base[start : start + 2], 16) for start in (1, 3, 5)]
    return "#" + "".join(f"{round(part + (255 - part) * white):02x}" for part in parts)


def label(text: object, limit: int = 60) -> str:
    """A foreign name for a picture: on one line, what cannot be seen made visible, cut to `limit` characters.

    Give it to artists with `parse_math=False`: a `$` in it is a dollar.
    """
    seen = plain(str(text).encode("utf-8", "backslashreplace").decode())
    seen = seen.replace("\n", "\\n").replace("\t", "\\t")
    return seen if len(seen) <= limit else seen[: limit - 1] + "…"


def smooth(values: Iterable[float], weight: float = 0.7) -> list[float]:
    """A running mean that starts unbiased: Σ wⁱ·v / Σ wⁱ over the past; `weight` 0 gives the values themselves."""
    total = count = 0.0
    smoothed = []
    for value in values:
        total, count = weight * total + value, weight * count + 1
        smoothed.append(total / count)
    return smoothed


def thin(steps: Array, values: Array, bins: int = BINS) -> tuple[Array, Array]:
    """A line that looks the same with at most 2·`bins` + 2 points: the lowest and the highest of each stretch, and both ends."""
    if len(values) <= 2 * bins + 2:
        return steps, values
    edges = np.linspace(0, len(values), bins + 1).astype(int)
    kept = {0, len(values) - 1}
    for start, end in pairwise(edges.tolist()):
        stretch = values[start:end]
        kept.update((start + int(stretch.argmin()), start + int(stretch.argmax())))
    places = np.array(sorted(kept))
    return steps[places], values[places]


def stretches(length: int) -> Array:
    """First places of `BINS` stretches of a long column, [≤ BINS] int64."""
    return np.unique(np.linspace(0, length, BINS + 1).astype(int)[:-1])


def memory(runs: Sequence[Series]) -> float:
    """The weight of the past in a running mean: 0.7, and in long runs what remembers a fiftieth of the steps."""
    longest = max((len(run.steps) for run in runs), default=0)
    return max(0.7, 1 - 50 / max(longest, 1))


def span_of(runs: Sequence[Series]) -> tuple[float, float]:
    """From the first step to the last of any run, with a margin: the same for every plot."""
    steps = np.concatenate([run.steps for run in runs])
    low, high = (float(steps.min()), float(steps.max())) if len(steps) else (0.0, 0.0)
    margin = max(0.02 * (high - low), 0.5)
    return low - margin, high + margin


def number_text(value: float, place: int | None = None) -> str:
    """Three digits, as short as they go: 0.25, 12, 2.05e-4."""
    if value and abs(value) < 1e-3:
        digits, power = f"{value:.2e}".split("e")
        return f"{float(digits):g}e{int(power)}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.4g}"
