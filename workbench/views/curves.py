"""Metrics rows as a panel of curves: matplotlib `Figure` objects, never pyplot."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.views.curve_axes import (
    GREY,
    MARK,
    Look,
    Mark,
    Plotted,
    dress,
    explain,
    mark,
    needs_key,
    plot,
    recorded,
    say,
    wipe,
)
from workbench.views.curve_parts import (
    PHASES,
    STEP,
    Rows,
    Series,
    colour,
    label,
    memory,
    number_text,
    smooth,
    span_of,
)

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["PANEL", "PHASES", "STEP", "cell_figure", "panel", "png", "save_png", "smooth"]

PANEL: Mapping[str, tuple[str, ...]] = {
    "reward": ("critic/score/mean",),
    "KL": ("actor/kl_loss", "actor/reward_kl_penalty", "actor/ppo_kl"),
    "response length (tokens)": ("response_length/mean",),
    "entropy (nats)": ("actor/entropy",),
    "clip fraction": ("actor/pg_clipfrac",),
    "gradient norm": ("actor/grad_norm",),
    "learning rate": ("actor/lr", "critic/lr"),
    "seconds per phase": (PHASES,),
}
"""Title → the metrics drawn there, those of them that a run has."""
_WIDTH, _HEIGHT = 10.5, 1.75
"""Inches: of the panel, as wide as a notebook's output, and of one plot."""
_ROOM = 0.97
"""Inches for the names of phases, beside their plot."""
_LINE = 0.17
"""Inches that a line of small text takes."""


def panel(
    metrics: Rows | pd.DataFrame,
    keys: Mapping[str, Sequence[str]] | Sequence[str] | None = None,
    *,
    others: Mapping[str, Rows | pd.DataFrame] | None = None,
    title: str | None = None,
    marks: Sequence[Mark] | None = None,
    empty: bool = True,
    over: Figure | None = None,
) -> Figure:
    """Curves over `training/global_step`: one small plot for each title of `keys` (`PANEL`), three or four to a row.

    `metrics` are the rows of a run's `metrics.jsonl`, or a DataFrame of them; `keys` maps titles to metric
    names, or lists metric names. A faint line is the step's own number, the strong one its running mean; the
    band is the spread within the step's batch (`x/std`, else `x/min` to `x/max` beside `x/mean`); dots in the
    reward are held-out means (`val/reward`) with their 95 % interval. A metric that is missing, NaN or
    infinite at a step has no point there. `timing_s/*` stands for the seconds of each phase, over each other.

    `others` (name → rows) are drawn over it with a legend, without bands, and with whole steps for phases.
    `marks` (`run.symptoms`) are numbered lines on the time axis, said beneath. With `empty` a plot that nothing
    is recorded for keeps its place and says so: while a run trains, plots must not jump (a critic's warm-up
    has no KL yet); without, it is left out. `over` is a panel that is drawn over where it has the same places: a
    third quicker than a new one.
    """
    named = [(title or "this run", metrics), *(others or {}).items()]
    runs = [Series(name, rows, colour(place)) for place, (name, rows) in enumerate(named)]
    plots = _plots(keys)
    if not empty:
        plots = {name: wanted for name, wanted in plots.items() if recorded(runs, wanted)} or plots
    places = (
        tuple(plots.items()),
        tuple(run.name for run in runs),
        len(marks or ()),
    )
    if over is not None and getattr(over, "places", None) == places:
        figure, grid = over, over.axes[: len(plots)]
    else:
        figure, grid = _figure(len(plots), runs=runs if others else [], title=title, marks=len(marks or ()))
        figure.places = places  # type: ignore[attr-defined]
    for number, (one, text) in enumerate(zip(marks or (), figure.texts[-len(marks or ()) :], strict=False)):
        text.set_text(label(f"{number + 1}  {one.name} (step {one.since} on): {one.found}", 150))
    span, look = span_of(runs), Look(smoothing=memory(runs))
    for axes, (name, wanted) in zip(grid, plots.items(), strict=True):
        if figure is over:
            wipe(axes, span)
        else:
            # a title with a height of its own spares matplotlib the search for one: a quarter of the drawing
            axes.set_title(label(name), fontsize=9.5, loc="left", y=1.0, parse_math=False)
            dress(axes, span, ticks=8)
            if PHASES in wanted and not others:
                _make_room(axes)
        plotted = plot(axes, wanted, runs, look)
        _say(axes, plotted, runs[0].colour)
        if needs_key(wanted, plotted):
            explain(axes, plotted.key, look, below=bool(marks))
        mark(axes, marks or (), look)
    return figure


def _plots(keys: Mapping[str, Sequence[str]] | Sequence[str] | None) -> Mapping[str, Sequence[str]]:
    if keys is None:
        return PANEL
    return keys if isinstance(keys, Mapping) else {key: (key,) for key in keys}


def _say(axes: Axes, plotted: Plotted, shade: str) -> None:
    """What a plot says beside its curves: where the only one ends, or that there is nothing."""
    if not plotted.key:
        axes.text(0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center", color=GREY, fontsize=9)
        axes.tick_params(labelleft=False)
        axes.grid(False)
    elif plotted.stacked and plotted.last is not None:
        axes.annotate(
            number_text(plotted.last), (1, 1), (_ROOM * 72, 6), xycoords="axes fraction", textcoords="offset points",
            fontsize=9, color=GREY, ha="right",
        )  # fmt: skip
    elif plotted.last is not None:
        axes.set_title(number_text(plotted.last), fontsize=9, loc="right", color=shade, y=1.0)


def _make_room(axes: Axes) -> None:
    """A narrower plot, with its areas' names beside it."""
    place = axes.get_position()
    axes.set_position((place.x0, place.y0, place.width - _ROOM / _WIDTH, place.height))


def cell_figure(width: float, height: float, *, dpi: float = 100, **options: Any) -> Figure:
    """A figure (inches) that a cell shows as a PNG: outside pyplot nobody has told the kernel how to."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    class Shown(Figure):
        def _repr_png_(self) -> bytes:
            return png(self)

    figure = Shown(figsize=(width, height), dpi=dpi, facecolor="white", **options)
    FigureCanvasAgg(figure)
    return figure


def _figure(plots: int, *, runs: Sequence[Series], title: str | None, marks: int) -> tuple[Figure, list[Axes]]:
    """A figure for so many plots, and the plots; a legend for `runs`, a line for each mark.

    Margins are set in inches: matplotlib's own layout engines draw everything twice.
    """
    columns = 4 if plots in (7, 8) or plots > 9 else 3
    lines = max(math.ceil(plots / columns), 1)
    in_line = _names_in_line(runs)
    legend = 0.15 + 0.2 * math.ceil(len(runs) / in_line) if runs else 0.0
    said = _LINE * marks + (0.1 if marks else 0.0)
    top, bottom = (0.58 if title else 0.3), 0.5 + legend + said
    height = _HEIGHT * lines + 0.55 * (lines - 1) + top + bottom
    figure = cell_figure(_WIDTH, height)
    figure.subplots_adjust(
        left=0.6 / _WIDTH, right=1 - 0.15 / _WIDTH, top=1 - top / height, bottom=bottom / height,
        wspace=0.2 if columns == 3 else 0.3, hspace=0.33,
    )  # fmt: skip
    if title:
        figure.suptitle(
            label(title, 140), x=0.6 / _WIDTH, y=1 - 0.08 / height, ha="left", va="top", fontsize=10, color=GREY,
            parse_math=False,
        )  # fmt: skip
    grid = list(figure.subplots(lines, columns, squeeze=False).flat)
    for place, axes in enumerate(grid):
        axes.set_visible(place < plots)
        if place + columns >= plots:
            axes.set_xlabel("step", fontsize=8, color=GREY)
            axes.xaxis.set_label_coords(0.5, -0.24 / _HEIGHT)
    if runs:
        _legend(figure, runs, in_line, (0.03 + said) / height)
    for number in range(marks):
        y = (0.08 + _LINE * (marks - 1 - number)) / height
        figure.text(0.6 / _WIDTH, y, "", fontsize=8, color=MARK, parse_math=False)
    return figure, grid[:plots]


def _names_in_line(runs: Sequence[Series]) -> int:
    """How many names of a legend stand beside each other."""
    longest = max((len(label(run.name)) for run in runs), default=1)
    return max(min(len(runs), 5, int((_WIDTH - 0.8) / (0.55 + 0.085 * longest))), 1)


def _legend(figure: Figure, runs: Sequence[Series], columns: int, bottom: float) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=run.colour) for run in runs]
    legend = figure.legend(
        handles, ["·"] * len(runs), loc="lower center", bbox_to_anchor=(0.5, bottom), borderaxespad=0.2,
        ncols=columns, frameon=False, fontsize=9,
    )  # fmt: skip
    say(legend, [label(run.name) for run in runs])


def png(figure: Figure) -> bytes:
    """The figure as PNG bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def save_png(figure: Figure, path: str | Path) -> None:
    """The figure as a PNG file."""
    put(Path(path), png(figure))


def put(path: Path, content: bytes) -> None:
    """Bytes into a file: it is there whole, or as it was before."""
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_bytes(content)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
