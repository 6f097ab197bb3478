"""Metrics rows as a panel of curves: matplotlib `Figure` objects, never pyplot."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STEP = "training/global_step"
PANEL: Mapping[str, tuple[str, ...]] = {
    "reward": ("critic/score/mean",),
    "KL to the reference": ("actor/kl_loss", "actor/reward_kl_penalty", "actor/ppo_kl"),
    "response length (tokens)": ("response_length/mean",),
    "entropy (nats)": ("actor/entropy",),
    "clip fraction": ("actor/pg_clipfrac",),
    "gradient norm": ("actor/grad_norm",),
}
"""Title → the first of these metrics that a run has."""
_COLOURS = ("#2f6db5", "#c8553d", "#3a8f5d", "#8a5fb0", "#b8862b")
_GREY = "#666666"


def panel(
    rows: Sequence[Mapping[str, Any]],
    *,
    others: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
    title: str | None = None,
) -> Figure:
    """Reward, KL, response length, entropy, clip fraction, gradient norm over steps, 2 × 3.

    A faint line is the step's number, the strong one its running mean; dots in the reward are held-out means with
    their 95 % interval. `others` (name → rows) are drawn over it with a legend.
    """
    figure = _empty()
    runs = {title or "this run": rows, **(others or {})}
    for axes, (name, keys) in zip(figure.subplots(2, 3).flat, PANEL.items(), strict=True):
        _dress(axes, name)
        drawn = [_draw(axes, run, keys, colour) for run, colour in zip(runs.values(), _COLOURS, strict=False)]
        if name == "reward":
            for run, colour in zip(runs.values(), _COLOURS, strict=False):
                _held_out(axes, run, colour)
        if not any(drawn):
            axes.text(0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center", color=_GREY, fontsize=9)
    if others:
        from matplotlib.lines import Line2D

        handles = [Line2D([], [], color=colour, label=name) for name, colour in zip(runs, _COLOURS, strict=False)]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
    if title:
        figure.suptitle(title, fontsize=10, color=_GREY)
    return figure


def _dress(axes: Axes, name: str) -> None:
    axes.set_title(name, fontsize=10, loc="left")
    axes.tick_params(labelsize=8, colors=_GREY)
    axes.grid(True, color="#eeeeee")
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#cccccc")


def _draw(axes: Axes, rows: Sequence[Mapping[str, Any]], keys: tuple[str, ...], colour: str) -> bool:
    key = next((key for key in keys if any(row.get(key) is not None for row in rows)), None)
    if key is None:
        return False
    points = [(row[STEP], row[key]) for row in rows if row.get(key) is not None]
    steps, values = [step for step, _ in points], [value for _, value in points]
    axes.plot(steps, values, color=colour, alpha=0.3, linewidth=1)
    axes.plot(steps, smooth(values), color=colour, linewidth=1.8)
    return True


def _held_out(axes: Axes, rows: Sequence[Mapping[str, Any]], colour: str) -> None:
    points = [row for row in rows if row.get("val/reward") is not None]
    if points:
        means = [row["val/reward"] for row in points]
        # one prompt has a mean and no interval
        low = [mean - _or(row["val/reward_low"], mean) for mean, row in zip(means, points, strict=True)]
        high = [_or(row["val/reward_high"], mean) - mean for mean, row in zip(means, points, strict=True)]
        where = [row[STEP] for row in points]
        axes.errorbar(where, means, yerr=[low, high], fmt="o", color=colour, mec="white", ms=6, lw=1, capsize=2)


def _or(value: float | None, other: float) -> float:
    return other if value is None else value


def _empty() -> Figure:
    """A figure that a cell shows as a PNG: outside pyplot nobody has told the kernel how to."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    class Curves(Figure):
        def _repr_png_(self) -> bytes:
            return png(self)

    figure = Curves(figsize=(10.5, 5.0), dpi=100, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


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
