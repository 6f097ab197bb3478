"""Metrics rows as curves, as a panel to look at and as figures for a paper: matplotlib `Figure` objects, never pyplot."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.base.errors import SettingError, message, nearest, unknown
from workbench.base.files import write_bytes
from workbench.base.shown import Shown
from workbench.runs.symptoms import Rows, Symptom
from workbench.views import curve_axes as plot
from workbench.views.curve_axes import PHASES, Series, label

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
"""Height of a line of small text, in inches."""
WORDS: Mapping[str, str] = {
    "critic/score/mean": "mean reward",
    "actor/pg_loss": "policy loss",
    "actor/pg_clipfrac": "clip fraction",
    "actor/ppo_kl": "KL from before the update",
    "actor/kl_loss": "KL to the reference",
    "actor/grad_norm": "gradient norm",
    "actor/entropy": "nats entropy",
    "critic/vf_loss": "value loss",
    "response_length/mean": "tokens a response",
    "critic/values/mean": "mean value",
    "critic/advantages/max": "largest advantage",
}
"""The main metrics, in this order → the words for them."""


def panel(
    metrics: Rows | pd.DataFrame,
    keys: Mapping[str, Sequence[str]] | Sequence[str] | None = None,
    *,
    others: Mapping[str, Rows | pd.DataFrame] | None = None,
    title: str | None = None,
    marks: Sequence[Symptom] | None = None,
    empty: bool = True,
) -> Figure:
    """Draw metrics over training steps: one small plot for each title of `keys` (default: `PANEL`), three or four to a row.

    A faint line is the step's own number, the strong one its running mean; the band is the spread within the step's batch
    (`x/std`, else `x/min` to `x/max` beside `x/mean`); dots in the reward are held-out means (`val/reward`) with their
    95 % interval. A metric that is missing, NaN or infinite at a step has no point there.

    Args:
        metrics: the rows of a run's `metrics.jsonl`, or a DataFrame of them.
        keys: titles → metric names, or a list of metric names; `timing_s/*` is the seconds of each phase, stacked.
        others: name → rows of other runs, drawn over it with a legend, without bands, and with whole steps for phases.
        marks: symptoms (`run.symptoms`), drawn as numbered lines on the time axis and listed beneath.
        empty: keep the place of a plot that nothing is recorded for, so that plots do not jump while a run trains (a
            critic's warm-up has no KL yet); otherwise it is left out.

    Example:
        >>> wb.views.panel(run.rows, others={"without KL": other.rows})  # doctest: +SKIP
    """
    runs, marks = series(title or "this run", metrics, others), marks or ()
    plots = keys if isinstance(keys, Mapping) else PANEL if keys is None else {key: (key,) for key in keys}
    if not empty:
        plots = {name: wanted for name, wanted in plots.items() if plot.recorded(runs, wanted)} or plots
    figure, grid = _figure(len(plots), runs=runs if others else [], title=title, marks=marks)
    span, look = plot.span_of(runs), plot.Look(smoothing=plot.memory(runs))
    for axes, (name, wanted) in zip(grid, plots.items(), strict=True):
        # a title with a height of its own spares matplotlib the search for one: a quarter of the drawing
        axes.set_title(label(name), fontsize=9.5, loc="left", y=1.0, parse_math=False)
        plot.dress(axes, span, ticks=8)
        if PHASES in wanted and not others:  # its areas' names are beside it
            place = axes.get_position()
            axes.set_position((place.x0, place.y0, place.width - _ROOM / _WIDTH, place.height))
        _say(axes, plot.draw(axes, wanted, runs, look, marks), runs[0].colour)
    return figure


def series(
    name: str, metrics: Rows | pd.DataFrame, others: Mapping[str, Rows | pd.DataFrame] | None = None
) -> list[Series]:
    """The runs as columns: the first is called `name`, and each has a colour of its own."""
    tables: list[tuple[str, Any]] = [(name, metrics), *(others or {}).items()]
    rows = [table.to_dict("records") if hasattr(table, "to_dict") else table for _, table in tables]
    return [Series(one, rows[place], plot.colour(place)) for place, (one, _) in enumerate(tables)]


def _say(axes: Axes, plotted: plot.Plotted, shade: str) -> None:
    """Write the last value of the only curve above a plot, or that nothing is recorded."""
    if not plotted.key:
        axes.text(0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center", color=plot.GREY, fontsize=9)
        axes.tick_params(labelleft=False)
        axes.grid(False)
    elif plotted.stacked and plotted.last is not None:
        axes.annotate(
            plot.number_text(plotted.last), (1, 1), (_ROOM * 72, 6), xycoords="axes fraction", textcoords="offset points",
            fontsize=9, color=plot.GREY, ha="right",
        )  # fmt: skip
    elif plotted.last is not None:
        axes.set_title(plot.number_text(plotted.last), fontsize=9, loc="right", color=shade, y=1.0)


class Live(Shown):
    """What a figure has beside matplotlib's: `plots`, from which its widget draws the same curves; None has no widget."""

    plots: Any = None
    alone = False
    """Whether no picture of it is displayed, which its widget would lie over."""

    def _ipython_display_(self) -> None:
        if self.plots is None:
            raise NotImplementedError("this figure has no widget")  # IPython goes on with the PNG
        super()._ipython_display_()


def cell_figure(width: float, height: float, *, dpi: float = 100, **options: Any) -> Figure:
    """A matplotlib `Figure` of this size in inches that a notebook shows as a PNG, although pyplot is not imported."""
    from matplotlib.figure import Figure

    class Shown(Figure, Live):  # its name stands in the text form
        def _repr_png_(self) -> bytes:
            return png(self)

    return Shown(figsize=(width, height), dpi=dpi, facecolor="white", **options)


def _figure(
    plots: int, *, runs: Sequence[Series], title: str | None, marks: Sequence[Symptom]
) -> tuple[Figure, list[Axes]]:
    """A figure for so many plots, and the plots; with a legend for `runs`, and a line of text for each mark.

    Margins are set in inches: matplotlib's own layout engines draw everything twice.
    """
    columns = 4 if plots in (7, 8) or plots > 9 else 3
    lines = max(math.ceil(plots / columns), 1)
    longest = max((len(label(run.name)) for run in runs), default=1)
    in_line = max(min(len(runs), 5, int((_WIDTH - 0.8) / (0.55 + 0.085 * longest))), 1)
    legend = 0.15 + 0.2 * math.ceil(len(runs) / in_line) if runs else 0.0
    said = _LINE * len(marks) + (0.1 if marks else 0.0)
    top, bottom = (0.58 if title else 0.3), 0.5 + legend + said
    height = _HEIGHT * lines + 0.55 * (lines - 1) + top + bottom
    figure = cell_figure(_WIDTH, height)
    figure.subplots_adjust(
        left=0.6 / _WIDTH, right=1 - 0.15 / _WIDTH, top=1 - top / height, bottom=bottom / height,
        wspace=0.2 if columns == 3 else 0.3, hspace=0.33,
    )  # fmt: skip
    if title:
        figure.suptitle(
            label(title, 140), x=0.6 / _WIDTH, y=1 - 0.08 / height, ha="left", va="top", fontsize=10, color=plot.GREY,
            parse_math=False,
        )  # fmt: skip
    grid = list(figure.subplots(lines, columns, squeeze=False).flat)
    for place, axes in enumerate(grid):
        axes.set_visible(place < plots)
        if place + columns >= plots:
            axes.set_xlabel("step", fontsize=8, color=plot.GREY)
            axes.xaxis.set_label_coords(0.5, -0.24 / _HEIGHT)
    if runs:
        _legend(
            figure, runs, loc="lower center", bbox_to_anchor=(0.5, (0.03 + said) / height), borderaxespad=0.2,
            ncols=in_line, fontsize=9,
        )  # fmt: skip
    for number, one in enumerate(marks, 1):
        text = label(f"{number}  {one.name} (step {one.since} on): {one.found}", 150)
        figure.text(0.6 / _WIDTH, (0.08 + _LINE * (len(marks) - number)) / height, text, fontsize=8, color=plot.MARK,
                    parse_math=False)  # fmt: skip
    return figure, grid[:plots]


def _legend(figure: Figure, runs: Sequence[Series], line: float = 1.5, **options: Any) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=run.colour, linewidth=line) for run in runs]
    plot.legend(figure, handles, [label(run.name) for run in runs], frameon=False, **options)


def png(figure: Figure) -> bytes:
    """Render a matplotlib figure as PNG bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


# --- for a paper ---------------------------------------------------------------------------------

WIDTHS = {"column": 3.25, "page": 6.75}
"""Inches of one column and of a page in two columns, as the conferences' templates have them."""
FORMATS = {"pdf": {"CreationDate": None}, "svg": {"Date": None}, "png": {}}
"""Suffix → metadata that leaves out the date: the same figure gives the same bytes on any day."""
_RC: dict[Any, Any] = {
    "font.family": "sans-serif",
    "pdf.fonttype": 42,  # TrueType: Type 3 fonts are refused by the submission systems of IEEE and ACM
    "ps.fonttype": 42,
    "svg.fonttype": "path",
    "svg.hashsalt": "workbench",
    "text.usetex": False,
    "axes.linewidth": 0.6,
}
_ROW = {"column": 1.75, "page": 1.6}


def figure(
    metrics: Rows | pd.DataFrame,
    keys: Mapping[str, Sequence[str]] | Sequence[str] | str = "reward",
    *,
    path: str | Path | None = None,
    width: str | float = "column",
    height: float | None = None,
    name: str = "this run",
    others: Mapping[str, Rows | pd.DataFrame] | None = None,
    smooth: float | None = None,
    marks: Sequence[Symptom] | None = None,
) -> Figure:
    """Draw curves for a paper, and write them to a file where `path` is given.

    Text is 7 and 8 points, sans-serif; there is no title, since a paper has a caption. Raises `SettingError` for a
    name that no run has, before anything is written. `metrics` and `marks` are those of `panel`.

    Args:
        keys: titles of the panel (`reward`, `KL`, …), metrics or patterns (`critic/*`), or words on the axis → metrics.
        width: `column` (3.25 in; plots under each other), `page` (6.75 in; up to three beside each other), or inches.
        height: inches of the whole figure.
        others: name → rows of other runs, drawn over it; a legend names all.
        smooth: weight of the past in the running mean, from 0 (the numbers themselves) to below 1; None takes the panel's.

    Example:
        >>> wb.views.figure(run.rows, ["reward", "KL"], path="curves.pdf")  # doctest: +SKIP
    """
    from matplotlib import rc_context

    if smooth is not None and not 0 <= smooth < 1:
        what = "smooth is the weight of the past in a running mean"
        raise SettingError(what, expected="0 ≤ smooth < 1", found=smooth)
    runs = series(name, metrics, others)
    plots = asked(keys, runs)
    inches = _width(width)
    columns = 1 if inches < 5 else {2: 2, 4: 2}.get(len(plots), min(len(plots), 3))
    lines = math.ceil(len(plots) / columns)
    with rc_context(_RC):
        made = cell_figure(
            inches, height or (_ROW["column" if columns == 1 else "page"] * lines + 0.3 + 0.2 * bool(others)),
            dpi=200, layout="constrained",
        )  # fmt: skip
        grid = list(made.subplots(lines, columns, squeeze=False).flat)
        weight = plot.memory(runs) if smooth is None else smooth
        look = plot.Look(line=1.2, faint=0.5, dot=3.5, text=6.5, smoothing=weight)
        for axes in grid[len(plots) :]:
            axes.remove()
        for place, (axes, (words, wanted)) in enumerate(zip(grid, plots.items(), strict=False)):
            plot.dress(axes, plot.span_of(runs), ticks=7)
            axes.set_ylabel(label(words), fontsize=8, parse_math=False)
            axes.set_xlabel("step" if place + columns >= len(plots) else "", fontsize=8)
            plot.draw(axes, wanted, runs, look, marks or ())
        if others:
            longest = max(len(label(run.name)) for run in runs)
            columns = max(min(len(runs), int(made.get_figwidth() / (0.4 + 0.065 * longest))), 1)
            _legend(made, runs, 1.2, loc="outside upper center", ncols=columns, fontsize=7, handlelength=1.4)
        made.draw_without_rendering()  # ticks are made now, while the style holds
        if path is not None:
            save_figure(made, path)
    return made


def _width(width: str | float) -> float:
    if isinstance(width, str) and width not in WIDTHS:
        raise SettingError(unknown("figure width", width, [*WIDTHS, "a number of inches"]))
    inches = WIDTHS[width] if isinstance(width, str) else float(width)
    if not 1 <= inches <= 40:
        raise SettingError("the width is in inches", expected="1 to 40, 'column' or 'page'", found=width)
    return inches


def asked(keys: Mapping[str, Sequence[str]] | Sequence[str] | str, runs: Sequence[Series]) -> dict[str, Sequence[str]]:
    """Words on the axis → metrics, all of which some run has.

    A key is a title of `PANEL` (also without its unit), a metric, or a pattern of metrics such as `critic/*`. Raises
    `SettingError` for a key that nothing is recorded for.
    """
    plots: dict[str, Sequence[str]] = {}
    if isinstance(keys, Mapping):
        plots = dict(keys)
    else:
        short = {title.split(" (")[0]: title for title in PANEL}
        for key in [keys] if isinstance(keys, str) else keys:
            title = short.get(key, key)
            plots |= {title: PANEL[title]} if title in PANEL else _matching(key, runs)
    if not plots:
        raise SettingError("a figure needs a plot: keys", expected="at least one title or metric", found=list(keys))
    for words, wanted in plots.items():
        if not plot.recorded(runs, wanted):
            raise SettingError(_not_there(words, runs))
    return plots


def _matching(key: str, runs: Sequence[Series]) -> dict[str, Sequence[str]]:
    """A plot of its own for a metric, or for each one that a pattern matches; the key itself where it is no pattern."""
    if key == PHASES or plot.recorded(runs, [key]) or not set(key) & set("*?["):
        return {key: (key,)}
    names = dict.fromkeys(name for run in runs for name in run.names())
    found = [name for name in names if fnmatchcase(name, key) and plot.recorded(runs, [name])]
    return {name: (name,) for name in found} or {key: (key,)}


def _not_there(key: str, runs: Sequence[Series]) -> str:
    """The error text for a plot that nothing is recorded for: the nearest name first, and how the names begin."""
    titles = [title for title in PANEL if plot.recorded(runs, PANEL[title])]
    names = list(dict.fromkeys(name for run in runs for name in run.names()))
    close = nearest(key, [*titles, *(title.split(" (")[0] for title in titles), *names])
    hint = f"; did you mean {close!r}?" if close else ""
    groups = sorted({f"{name.partition('/')[0]}/*" for name in names if "/" in name})
    what = f"{key!r} is not a plot or metric of these runs{hint}"
    return message(what, expected=f"one of {', '.join(titles)}, a metric, or a pattern ({', '.join(groups) or 'a*'})")


def save_figure(made: Figure, path: str | Path, *, dpi: float = 300) -> Path:
    """Write a figure to a `pdf`, `svg` or `png` file (`dpi` dots an inch), whole or not at all. Returns the path.

    Fonts are embedded as TrueType in a PDF, and are outlines in an SVG, so that it looks the same everywhere. Raises
    `SettingError` for another suffix, `OSError` where the file cannot be written.
    """
    from matplotlib import rc_context

    path = Path(path)
    suffix = path.suffix.removeprefix(".").lower()
    if suffix not in FORMATS:
        expected = f"a name that ends in one of {', '.join(FORMATS)}"
        raise SettingError(f"{path.name!r} has no known format", expected=expected, found=repr(path.suffix))
    buffer = io.BytesIO()
    with rc_context(_RC):
        made.savefig(buffer, format=suffix, dpi=dpi, metadata=FORMATS[suffix])
    write_bytes(path, buffer.getvalue())
    return path
