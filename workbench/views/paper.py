"""Curves for a paper in one call: vector files at the width of a column or a page, fonts embedded as fonts."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.errors import SettingError, message, unknown
from workbench.views.curve_axes import Look, Mark, dress, explain, mark, needs_key, plot, recorded, say
from workbench.views.curve_parts import Rows, Series, colour, label, memory, span_of
from workbench.views.curves import PANEL, cell_figure, put

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTHS = {"column": 3.25, "page": 6.75}
"""Inches of one column and of a page in two columns, as the conferences' templates have them."""
FORMATS = {"pdf": {"CreationDate": None}, "svg": {"Date": None}, "png": {}}
"""Suffix → what to say in the file: the same figure gives the same bytes on any day."""
_RC = {
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
    marks: Sequence[Mark] | None = None,
) -> Figure:
    """Curves for a paper, and the file where `path` is given: `figure(run.rows, ["reward", "KL"], path="curves.pdf")`.

    `keys` are titles of the panel (`reward`, `KL`, `entropy`, …) or metric names, or a mapping from the words on the
    axis to metric names. `width` is `column` (3.25 in; plots under each other), `page` (6.75 in; up to three beside
    each other), or inches; `height` inches of the whole. `smooth` is the weight of the past in the running mean, from
    0 (the numbers themselves) to below 1; None takes the panel's. `others` (name → rows) are drawn over it, and a legend names all.

    Text is 7 and 8 points, sans-serif; there is no title, since a paper has a caption. Raises `SettingError` for a
    name that no run has, before anything is written.
    """
    if smooth is not None and not 0 <= smooth < 1:
        raise SettingError(message("smooth is a weight of the past", expected="0 ≤ smooth < 1", found=smooth))
    named = [(name, metrics), *(others or {}).items()]
    runs = [Series(one, rows, colour(place)) for place, (one, rows) in enumerate(named)]
    plots = _asked(keys, runs)
    inches = _width(width)
    columns = 1 if inches < 5 else {2: 2, 4: 2}.get(len(plots), min(len(plots), 3))
    lines = math.ceil(len(plots) / columns)
    with _style():
        made = cell_figure(
            inches, height or (_ROW["column" if columns == 1 else "page"] * lines + 0.3 + 0.2 * bool(others)),
            dpi=200, layout="constrained",
        )  # fmt: skip
        grid = list(made.subplots(lines, columns, squeeze=False).flat)
        look = Look(line=1.2, faint=0.5, dot=3.5, text=6.5, smoothing=memory(runs) if smooth is None else smooth)
        for place, axes in enumerate(grid):
            if place >= len(plots):
                axes.remove()
                continue
            words, wanted = list(plots.items())[place]
            dress(axes, span_of(runs), ticks=7)
            axes.set_ylabel(label(words), fontsize=8, parse_math=False)
            axes.set_xlabel("step" if place + columns >= len(plots) else "", fontsize=8)
            _fill(axes, wanted, runs, look, marks or ())
        if others:
            _legend(made, runs)
        made.draw_without_rendering()  # ticks are made now, while the style holds
        if path is not None:
            save_figure(made, path)
    return made


def _fill(axes: Axes, wanted: Sequence[str], runs: Sequence[Series], look: Look, marks: Sequence[Mark]) -> None:
    plotted = plot(axes, wanted, runs, look)
    if needs_key(wanted, plotted):
        explain(axes, plotted.key, look, below=bool(marks))
    mark(axes, marks, look)


def _style() -> AbstractContextManager[None]:
    from matplotlib import rc_context

    return rc_context(_RC)  # type: ignore[arg-type]


def _width(width: str | float) -> float:
    if isinstance(width, str) and width not in WIDTHS:
        raise SettingError(unknown("width", width, [*WIDTHS, "or inches"]))
    inches = WIDTHS[width] if isinstance(width, str) else float(width)
    if not 1 <= inches <= 40:
        raise SettingError(message("width is in inches", expected="1 to 40, 'column' or 'page'", found=width))
    return inches


def _asked(
    keys: Mapping[str, Sequence[str]] | Sequence[str] | str, runs: Sequence[Series]
) -> dict[str, tuple[str, ...]]:
    """Words on the axis → metrics, all of which some run has."""
    if isinstance(keys, str):
        keys = [keys]
    if isinstance(keys, Mapping):
        plots = {words: tuple(wanted) for words, wanted in keys.items()}
    else:
        short = {title.split(" (")[0]: title for title in PANEL}
        titles = {key: short.get(key, key) for key in keys}
        plots = {title: PANEL.get(title, (title,)) for title in titles.values()}
    if not plots:
        raise SettingError(message("a figure needs a plot", expected="a title or a metric", found=list(keys)))
    for words, wanted in plots.items():
        if not recorded(runs, wanted):
            raise SettingError(
                unknown(
                    "plot or metric of these runs",
                    words,
                    [*(title for title in PANEL if recorded(runs, PANEL[title])), *_numbers(runs)],
                )
            )
    return plots


def _numbers(runs: Sequence[Series]) -> list[str]:
    """Names of the metrics that the first run's last row has."""
    metrics: Any = runs[0].metrics
    if hasattr(metrics, "columns"):
        return [str(name) for name in metrics.columns]
    return list(metrics[-1]) if len(metrics) else []


def _legend(made: Figure, runs: Sequence[Series]) -> None:
    from matplotlib.lines import Line2D

    longest = max(len(label(run.name)) for run in runs)
    columns = max(min(len(runs), int(made.get_figwidth() / (0.4 + 0.065 * longest))), 1)
    handles = [Line2D([], [], color=run.colour, linewidth=1.2) for run in runs]
    names = [label(run.name) for run in runs]
    legend = made.legend(
        handles, ["·"] * len(runs), loc="outside upper center", ncols=columns, frameon=False, fontsize=7,
        handlelength=1.4,
    )  # fmt: skip
    say(legend, names)


def save_figure(made: Figure, path: str | Path, *, dpi: float = 300) -> Path:
    """Write a figure by its suffix, `pdf`, `svg` or `png` (`dpi` dots an inch): whole, or not at all.

    Fonts are embedded as TrueType in a PDF, and are outlines in an SVG, so that it looks the same everywhere. Raises
    `SettingError` for another suffix, `OSError` where the file cannot be written.
    """
    path = Path(path)
    suffix = path.suffix.removeprefix(".").lower()
    if suffix not in FORMATS:
        raise SettingError(
            message(f"{path.name!r} has no format", expected=f"one of {', '.join(FORMATS)}", found=repr(path.suffix))
        )
    buffer = io.BytesIO()
    with _style():
        made.savefig(buffer, format=suffix, dpi=dpi, metadata=FORMATS[suffix])
    put(path, buffer.getvalue())
    return path
