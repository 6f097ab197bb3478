"""Metrics rows as a panel of curves: matplotlib `Figure` objects, never pyplot."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Rows: TypeAlias = Sequence[Mapping[str, Any]]
STEP = "training/global_step"
PANEL: Mapping[str, tuple[str, ...]] = {
    "reward": ("critic/score/mean",),
    "KL": ("actor/kl_loss", "actor/reward_kl_penalty", "actor/ppo_kl"),
    "response length (tokens)": ("response_length/mean",),
    "entropy (nats)": ("actor/entropy",),
    "clip fraction": ("actor/pg_clipfrac",),
    "gradient norm": ("actor/grad_norm",),
}
"""Title → the metrics drawn there, those of them that a run has."""
_WORDS = {
    "critic/score/mean": "training batch",
    "actor/kl_loss": "to the reference",
    "actor/reward_kl_penalty": "to the reference, in the reward",
    "actor/ppo_kl": "of the update",
}
_COLOURS = ("#2f6db5", "#c8553d", "#3a8f5d", "#8a5fb0", "#b8862b", "#3c9aa5", "#a04668", "#6b7280")
_DASHES = ("-", (0, (1, 1.2)), (0, (4, 1.5)))
_COLUMNS = 3
_GREY = "#666666"


def panel(
    metrics: Rows | pd.DataFrame,
    keys: Mapping[str, Sequence[str]] | Sequence[str] | None = None,
    *,
    others: Mapping[str, Rows | pd.DataFrame] | None = None,
    title: str | None = None,
) -> Figure:
    """Curves over `training/global_step`, three to a row: one small plot for each title of `keys` (`PANEL`).

    `metrics` are the rows of a run's `metrics.jsonl`, or a DataFrame of them; `keys` maps titles to metric
    names, or lists metric names. A faint line is the step's own number, the strong one its running mean; dots
    in the reward are held-out means (`val/reward`) with their 95 % interval. A metric that is missing, NaN or
    infinite at a step has no point there. `others` (name → rows) are drawn over it with a legend.
    """
    plots = _plots(keys)
    named = [(title or "this run", metrics), *(others or {}).items()]
    runs = [_Run(name, _rows(rows), colour) for (name, rows), colour in zip(named, cycle(_COLOURS), strict=False)]
    figure, grid = _figure(len(plots), title=title, legend=bool(others))
    span = _span(runs)
    for axes, (name, wanted) in zip(grid, plots.items(), strict=True):
        _dress(axes, name, span)
        drawn = [key for key in wanted if any(_points(run.rows, key) for run in runs)]
        for key, dashes in zip(drawn, cycle(_DASHES), strict=False):
            _draw(axes, runs, key, dashes)
        held_out = "critic/score/mean" in wanted and _held_out(axes, runs)
        if drawn or held_out:
            _scale(axes)
            if held_out or len(wanted) > 1:
                _explain(axes)
        else:
            axes.text(0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center", color=_GREY, fontsize=9)
            axes.tick_params(labelleft=False)
            axes.grid(False)
        if len(runs) == len(drawn) == 1:
            last = smooth([value for _, value in _points(runs[0].rows, drawn[0])])[-1]
            axes.set_title(_number(last), fontsize=9, loc="right", color=runs[0].colour)
    if others:
        _legend(figure, runs)
    return figure


class _Run(NamedTuple):
    name: str
    rows: list[Mapping[str, Any]]
    colour: str


def _plots(keys: Mapping[str, Sequence[str]] | Sequence[str] | None) -> Mapping[str, Sequence[str]]:
    if keys is None:
        return PANEL
    return keys if isinstance(keys, Mapping) else {key: (key,) for key in keys}


def _rows(metrics: Rows | pd.DataFrame) -> list[Mapping[str, Any]]:
    return metrics.to_dict("records") if hasattr(metrics, "to_dict") else list(metrics)


def _points(rows: Rows, key: str) -> list[tuple[float, float]]:
    """(step, value) where the metric is a finite number; a row without a step counts from 0."""
    found = []
    for place, row in enumerate(rows):
        value = row.get(key)
        if value is not None and math.isfinite(value):
            found.append((row.get(STEP, place), value))
    return found


def _span(runs: Sequence[_Run]) -> tuple[float, float]:
    """From the first step to the last of any run, with a margin: the same for every plot."""
    steps = [row.get(STEP, place) for run in runs for place, row in enumerate(run.rows)] or [0]
    margin = max(0.02 * (max(steps) - min(steps)), 0.5)
    return min(steps) - margin, max(steps) + margin


def _draw(axes: Axes, runs: Sequence[_Run], key: str, dashes: Any) -> None:
    """One metric, of every run that has it."""
    for run in runs:
        points = _points(run.rows, key)
        if not points:
            continue
        steps, values = zip(*points, strict=True)
        axes.plot(steps, values, color=run.colour, alpha=0.28, linewidth=1, label="_number")
        mark = "o" if len(points) == 1 else ""
        axes.plot(
            steps, smooth(values), color=run.colour, linewidth=1.8, linestyle=dashes, marker=mark, ms=5, label=key
        )


def _held_out(axes: Axes, runs: Sequence[_Run]) -> bool:
    """Held-out means and their intervals; whether any run has them."""
    any_points = False
    for run in runs:
        rows = [row for row in run.rows if _points([row], "val/reward")]
        if not rows:
            continue
        any_points = True
        means = [row["val/reward"] for row in rows]
        # one prompt has a mean and no interval
        low = [max(mean - _or(row, "val/reward_low", mean), 0) for mean, row in zip(means, rows, strict=True)]
        high = [max(_or(row, "val/reward_high", mean) - mean, 0) for mean, row in zip(means, rows, strict=True)]
        steps = [step for step, _ in _points(run.rows, "val/reward")]
        drawn = axes.errorbar(
            steps, means, yerr=[low, high], fmt="o", color=run.colour, mec="white", ms=6, lw=1, capsize=2, zorder=3
        )
        drawn.set_label("held out, 95 %")
    return any_points


def _or(row: Mapping[str, Any], key: str, other: float) -> float:
    return row[key] if _points([row], key) else other


def _explain(axes: Axes) -> None:
    """A small key, for plots that can show more than their title says."""
    handles: dict[str, Any] = {}
    for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
        handles.setdefault(_WORDS.get(label, label), handle)
    axes.legend(handles.values(), handles.keys(), loc="best", fontsize=7.5, frameon=False, labelcolor=_GREY)


def _scale(axes: Axes) -> None:
    """From 0 where the numbers come near it; a constant gets a band, not digits of noise."""
    low, high = axes.dataLim.y0, axes.dataLim.y1
    if low == high:
        low, high = low - abs(low) * 0.1, high + (abs(high) * 0.1 or 0.1)
    if 0 <= low <= high / 2:
        low = 0.0
    margin = 0.05 * (high - low)
    axes.set_ylim(low - margin, high + margin)


def _number(value: float, place: int | None = None) -> str:
    """Three digits, as short as they go: 0.25, 12, 2.05e-4."""
    if value and abs(value) < 1e-3:
        digits, power = f"{value:.2e}".split("e")
        return f"{float(digits):g}e{int(power)}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.4g}"


def _dress(axes: Axes, name: str, span: tuple[float, float]) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set_title(name, fontsize=10, loc="left")
    axes.tick_params(labelsize=8, colors=_GREY, length=0)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(_number))
    axes.set_xlim(span)
    axes.grid(True, color="#ececec", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#cccccc")


def cell_figure(width: float, height: float, **options: Any) -> Figure:
    """A figure (inches) that a cell shows as a PNG: outside pyplot nobody has told the kernel how to."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    class Shown(Figure):
        def _repr_png_(self) -> bytes:
            return png(self)

    figure = Shown(figsize=(width, height), dpi=100, facecolor="white", **options)
    FigureCanvasAgg(figure)
    return figure


def _figure(plots: int, *, title: str | None, legend: bool) -> tuple[Figure, list[Axes]]:
    """A figure for so many plots, and the plots.

    Margins are set in inches: matplotlib's own layout engines draw everything twice.
    """
    lines = max(math.ceil(plots / _COLUMNS), 1)
    top, bottom = (0.58 if title else 0.3), (0.85 if legend else 0.5)
    width, height = 10.5, 1.75 * lines + 0.55 * (lines - 1) + top + bottom
    figure = cell_figure(width, height)
    figure.subplots_adjust(
        left=0.6 / width, right=1 - 0.15 / width, top=1 - top / height, bottom=bottom / height, wspace=0.2, hspace=0.33
    )
    if title:
        figure.suptitle(title, x=0.6 / width, y=1 - 0.08 / height, ha="left", va="top", fontsize=10, color=_GREY)
    grid = list(figure.subplots(lines, _COLUMNS, squeeze=False).flat)
    for place, axes in enumerate(grid):
        axes.set_visible(place < plots)
        if place + _COLUMNS >= plots:
            axes.set_xlabel("step", fontsize=8, color=_GREY)
    return figure, grid[:plots]


def _legend(figure: Figure, runs: Sequence[_Run]) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=run.colour, label=run.name) for run in runs]
    figure.legend(handles=handles, loc="lower center", ncols=min(len(runs), 5), frameon=False, fontsize=9)


def smooth(values: Sequence[float], weight: float = 0.7) -> list[float]:
    """A running mean that starts unbiased: Σ wⁱ·v / Σ wⁱ over the past."""
    total = count = 0.0
    smoothed = []
    for value in values:
        total, count = weight * total + value, weight * count + 1
        smoothed.append(total / count)
    return smoothed


def png(figure: Figure) -> bytes:
    """The figure as PNG bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def save_png(figure: Figure, path: str | Path) -> None:
    """The figure as a PNG file."""
    Path(path).write_bytes(png(figure))
