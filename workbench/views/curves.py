"""Metrics rows as curves, as a panel to look at and as figures for a paper: matplotlib `Figure` objects, never pyplot.

A plot has lines, bands and held-out dots, with scale, key and marks on the time axis.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np

from workbench.base.errors import SettingError, message, nearest, unknown
from workbench.base.files import write_bytes
from workbench.base.shown import Shown, number, plain
from workbench.runs.folder import STEP
from workbench.runs.symptoms import Rows, Symptom
from workbench.views.document import cut

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# --- one plot ---------------------------------------------------------------------------------------

LINE_WORDS = {
    "critic/score/mean": "training batch",
    "actor/kl_loss": "to the reference",
    "actor/reward_kl_penalty": "to the reference, in the reward",
    "actor/ppo_kl": "of the update",
    "actor/lr": "policy",
    "critic/lr": "critic",
    "response_length/mean": "mean",
    "timing_s/step": "the whole step",
}
EXACT = {"actor/lr", "critic/lr"}
"""Settings, not measurements: they are drawn without a running mean."""
HELD_OUT = "val/reward"
GREY = "#666666"
MARK = "#a3341f"
_DASHES = ("-", (0, (1, 1.2)), (0, (4, 1.5)))


@dataclass(frozen=True)
class Look:
    """The style of a plot: sizes in points, and the weight of the past in the running mean (0 draws the values
    themselves).
    """

    line: float = 1.8
    faint: float = 1.0
    dot: float = 6.0
    text: float = 7.5
    smoothing: float = 0.7
    apart: frozenset[str] = frozenset()
    """Metrics whose symptoms are pale in all plots but their own."""


class Plotted(NamedTuple):
    """What `draw` drew into one plot: its legend entries, and the last value."""

    key: dict[str, Any]
    """Legend text → the matplotlib artist (line, band or dot) that it names; empty where nothing is recorded."""
    last: float | None
    """The last value of the only curve; None where there are more."""


class Line(NamedTuple):
    """One line of a plot, as the picture and the page draw it: a metric of one run."""

    run: int
    """The run's place among the drawn ones."""
    name: str
    words: str
    colour: str
    dash: int
    dots: bool
    """Whether it is held-out means, which are dots."""
    banded: bool
    """Whether the spread within a step's batch is drawn around it."""

    @property
    def smoothed(self) -> bool:
        """Whether a running mean is drawn over the steps' own numbers."""
        return self.name not in EXACT and not self.dots


def lines(wanted: Sequence[str], runs: Sequence[Series]) -> list[Line]:
    """Return the lines of one plot. A single run's metrics differ by colour, those of several runs by dashes."""
    there, made, one = lines_of(wanted, runs), list[Line](), len(runs) == 1
    alone = one and PHASES not in wanted and len({*there} - {HELD_OUT}) == 1
    for place, name in enumerate(there):
        dots = name == HELD_OUT and HELD_OUT not in wanted
        words = "held out" if dots else LINE_WORDS.get(name, name.removeprefix("timing_s/"))
        for at, run in enumerate(runs):
            shade = colour(place) if one and not dots else run.colour
            made.append(Line(at, name, words, shade, 0 if one or dots else place, dots, alone and not dots))
    return made


# --- curves ---------------------------------------------------------------------------------------


def draw(axes: Axes, wanted: Sequence[str], runs: Sequence[Series], look: Look, marks: Sequence[Symptom]) -> Plotted:
    """Draw one plot's metrics, a legend where its title does not name them all, and a line for each symptom in `marks`:
    with its number where its own metric is drawn, pale elsewhere.
    """
    plotted = _curves(axes, wanted, runs, look)
    # several things, or one of several that the title could mean
    one_of = (len(wanted) > 1 and not EXACT.issuperset(wanted)) or PHASES in wanted
    names = [label(name, 40) for name in plotted.key if len(plotted.key) > 1 or one_of]
    columns = 2 if max(map(len, names), default=0) < 16 else 1
    high = math.ceil(len(names) / columns)
    _above(axes, 0.11 * high + (0.18 if marks else 0.0))
    if names:
        pale = {"labelcolor": GREY, "frameon": False, "handlelength": 1.4, "borderaxespad": 0.1, "columnspacing": 1.0}
        legend(axes, plotted.key.values(), names, loc="upper left", ncols=columns, fontsize=look.text, **pale)
    drawn = lines_of(wanted, runs) if marks else ()
    for place, one in enumerate(marks):  # neighbours' numbers are at different heights
        top = 0.99 - 0.11 * high
        own = one.metric not in look.apart or one.metric in drawn
        axes.axvline(
            one.since, 0, top, color=MARK, linewidth=0.8, linestyle=(0, (2, 2)), alpha=0.7 if own else 0.2, zorder=1.5
        )
        axes.text(one.since, top - 0.09 * (place % 2), f" {place + 1}" * own, transform=axes.get_xaxis_transform(),
                  color=MARK, fontsize=look.text, va="top", zorder=6)  # fmt: skip
    return plotted


def _curves(axes: Axes, wanted: Sequence[str], runs: Sequence[Series], look: Look) -> Plotted:
    """Draw those metrics of a plot that any run has, and scale the plot."""
    key, drawn = dict[str, Any](), [line for line in lines(wanted, runs) if len(runs[line.run].points(line.name)[0])]
    for line in drawn:
        run = runs[line.run]
        artist = _held_out(axes, run, look) if line.dots else _curve(axes, run, line, look, faint=len(runs) <= 4)
        key.setdefault("held out, 95 %" if line.dots else line.words, artist)
    if alone := [line for line in drawn if line.banded]:
        last = float(runs[0].points(alone[0].name)[1][-1])
        return Plotted(key | _banded(axes, runs[0], alone[0].name), last)
    high = axes.dataLim.y1
    if PHASES in wanted and drawn:  # the first steps may wait for caches and compilers: they do not flatten all others
        high = min(high, 3 * max(float(np.median(runs[line.run].points(line.name)[1])) for line in drawn) or high)
    if key:
        _scale(axes, axes.dataLim.y0, high)
    return Plotted(key, None)


def _banded(axes: Axes, run: Series, name: str) -> dict[str, Any]:
    """Scale the plot of a single curve, and draw the spread recorded beside `x/mean`: `x/std`, or else `x/min` and
    `x/max`.

    Returns {text for the band: its swatch}. The axis fits the means: a wide band gets at most three quarters of the
    height, and fades towards its ends where these are cut.
    """
    from matplotlib.patches import Patch

    word, lows, highs = spread(run, name)
    there = np.isfinite(lows) & np.isfinite(highs) & name.endswith("/mean")
    low, high = axes.dataLim.y0, axes.dataLim.y1
    if not there.any():
        _scale(axes, low, high)
        return {}
    starts = stretches(int(there.sum()))
    steps, means = run.steps[there][starts], run.column(name)[there][starts]
    lows, highs = np.minimum.reduceat(lows[there], starts), np.maximum.reduceat(highs[there], starts)
    below, above = max(low - float(lows.min()), 0.0), max(float(highs.max()) - high, 0.0)
    room = 3 * max(high - low, 0.1 * max(abs(low), abs(high)), 1e-9)
    share = room / max(below + above, room)
    _scale(axes, low - below * share, high + above * share)
    look: dict[str, Any] = {"color": run.colour, "alpha": 0.12 if share == 1 else 0.04, "linewidth": 0, "zorder": 1}
    axes.fill_between(steps, lows, highs, **look)
    for layer in range(1, 8 if share < 1 else 1):
        edges = (means + (end.clip(*axes.get_ylim()) - means) * (layer / 8) ** 2 for end in (lows, highs))
        axes.fill_between(steps, *edges, **look)
    return {word: Patch(color=run.colour, alpha=0.12)}


def spread(run: Series, name: str) -> tuple[str, Array, Array]:
    """Return the spread recorded beside `x/mean`: what it is, and its lower and upper end at every row; NaN for none."""
    stem = name.removesuffix("mean")
    mean, deviation, lowest, highest = (run.column(stem + of) for of in ("mean", "std", "min", "max"))
    if not np.isfinite(deviation).any():
        return "lowest to highest", lowest, highest
    # never beyond what there was: rewards of 0 and 1 have no spread above 1
    return "± one deviation", np.fmax(mean - deviation, lowest), np.fmin(mean + deviation, highest)


def _above(axes: Axes, share: float) -> None:
    """Make room for a share of a plot's height above what is drawn in it, so that no name covers data."""
    bottom, top = axes.get_ylim()
    axes.set_ylim(bottom, bottom + (top - bottom) / (1 - share))


def _curve(axes: Axes, run: Series, line: Line, look: Look, *, faint: bool) -> Any:
    """Draw one metric of one run: each step's number faint, the running mean strong."""
    steps, values = run.points(line.name)
    if faint:
        axes.plot(*thin(steps, values), color=line.colour, alpha=0.28, linewidth=look.faint)
    dash = _DASHES[line.dash % len(_DASHES)]
    strong: dict[str, Any] = {"color": line.colour, "linewidth": look.line, "linestyle": dash}
    if len(values) == 1:
        strong |= {"marker": "o", "ms": look.dot - 1}
    means = smooth(values, look.smoothing if line.smoothed else 0.0)
    return axes.plot(*thin(steps, means), **strong)[0]


def _held_out(axes: Axes, run: Series, look: Look) -> Any:
    """Draw held-out means with their 95 % intervals; the mean of a single prompt has no interval."""
    means = run.column("val/reward")
    there = np.isfinite(means)
    means = means[there]
    edges = [run.column(f"val/reward_{edge}")[there] for edge in ("low", "high")]
    low, high = (np.where(np.isfinite(edge), edge, means) for edge in edges)
    return axes.errorbar(
        run.steps[there], means, yerr=[np.maximum(means - low, 0), np.maximum(high - means, 0)],
        fmt="o", color=run.colour, mec="white", ms=look.dot, lw=1, capsize=2, zorder=3,
    )  # fmt: skip


def _scale(axes: Axes, low: float, high: float) -> None:
    """Set the y axis: from 0 where the numbers come near it; around a constant ±10 %, so that noise is not enlarged."""
    if low == high:
        low, high = low - abs(low) * 0.1, high + (abs(high) * 0.1 or 0.1)
    if 0 <= low <= high / 2:
        low = 0.0
    margin = 0.05 * (high - low)
    axes.set_ylim(low - margin, high + margin)


# --- words and axes -------------------------------------------------------------------------------


def dress(axes: Axes, span: tuple[float, float], ticks: float) -> None:
    """Set the ticks, grid and spines that every plot of curves has."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.tick_params(labelsize=ticks, colors=GREY, length=0)
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))
    axes.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, place: number(value)))
    axes.set_xlim(span)
    axes.grid(True, color="#ececec", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color("#cccccc")


def bare(axes: Axes, grid: Literal["both", "x"] | None = "both") -> None:
    """Set small tick labels, a light grid, and no frame above and to the right: for pictures other than curves."""
    axes.tick_params(labelsize=8)
    if grid is not None:
        axes.grid(axis=grid, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def recorded(runs: Sequence[Series], wanted: Sequence[str]) -> bool:
    """Return whether any run has a number for one of these metrics, so that their plot would not be empty."""
    return bool(lines_of(wanted, runs))


def _values(wanted: Sequence[str], runs: Sequence[Series]) -> set[float]:
    return {float(value) for name in lines_of(wanted, runs) for run in runs for value in run.points(name)[1]}


def lines_of(wanted: Sequence[str], runs: Sequence[Series]) -> list[str]:
    """Return the metrics of a plot that any run has a number for.

    `timing_s/*` stands for each phase of a single run, and for the whole step of several runs. Held-out rewards are
    added to the batch's rewards.
    """
    phases = [f"timing_s/{phase}" for phase in runs[0].phases()] if len(runs) == 1 else []
    names = [one for name in wanted for one in (phases or ["timing_s/step"] if name == PHASES else [name])]
    names += [HELD_OUT] if "critic/score/mean" in wanted and HELD_OUT not in names else []
    return [name for name in names if any(len(run.points(name)[0]) for run in runs)]


def legend(owner: Any, handles: Iterable[Any], names: Sequence[str], **options: Any) -> None:
    """Draw a legend with the names unchanged: matplotlib would read `$` as mathematics and drop names that start with
    `_`.
    """
    drawn = owner.legend(list(handles), ["·"] * len(names), **options)
    for text, name in zip(drawn.get_texts(), names, strict=True):
        text.set_parse_math(False)
        text.set_text(name)


Array: TypeAlias = "np.ndarray[Any, Any]"
PHASES = "timing_s/*"
"""In a list of metrics: the seconds of every phase that a run has."""
_COLOURS = ("#2f6db5", "#c8553d", "#3a8f5d", "#8a5fb0", "#b8862b", "#3c9aa5", "#a04668", "#6b7280")
_TWICE = {"gen": "rollout", "ref": "ref_log_prob", "adv": "advantage"}
"""verl's names of phases → workbench's, which are recorded too."""
_NO_PHASE = {"step", "testing", "*"}
BINS = 400


@dataclass
class Series:
    """The metrics of one run, with its name and colour; each column is read once."""

    name: str
    rows: Rows
    colour: str
    _columns: dict[str, Array] = field(default_factory=dict)

    def column(self, key: str) -> Array:
        """The metric at every row, [rows] float64; NaN where it is missing or not a number."""
        import pandas as pd

        if key not in self._columns:
            values = pd.Series([row.get(key) for row in self.rows], dtype=object)
            self._columns[key] = pd.to_numeric(values, errors="coerce").to_numpy(dtype=float)
        return self._columns[key]

    @property
    def steps(self) -> Array:
        """The step of every row, [rows]; a row without a step has its index."""
        steps = self.column(STEP)
        return np.where(np.isfinite(steps), steps, np.arange(len(steps)))

    def points(self, key: str) -> tuple[Array, Array]:
        """(steps, values), both [points], where the metric is a finite number."""
        values = self.column(key)
        there = np.isfinite(values)
        return self.steps[there], values[there]

    def names(self) -> list[str]:
        """Return the names of the metrics in the run's rows, in the order in which they first occur."""
        # one may come late (a critic's warm-up), but not for one step in hundreds
        some = [*self.rows[:: max(len(self.rows) // 200, 1)], *self.rows[-1:]]
        return list(dict.fromkeys(name for row in some for name in row))

    def phases(self) -> list[str]:
        """Return the training phases whose seconds (`timing_s/<phase>`) the run records, in the order in which they
        run.
        """
        names = [name for name in self.names() if name.startswith("timing_s/")]
        found = [name.removeprefix("timing_s/") for name in names]
        own = [name for name in found if "/" not in name and name not in _NO_PHASE and _TWICE.get(name) not in found]
        return [name for name in own if len(self.points(f"timing_s/{name}")[0])]


def colour(place: int) -> str:
    """Return the colour of the n-th run or phase: eight colours, then the same eight paler, then paler still."""
    base = _COLOURS[place % len(_COLOURS)]
    white = (place // len(_COLOURS)) % 3 * 0.33
    parts = [int(base[start : start + 2], 16) for start in (1, 3, 5)]
    return "#" + "".join(f"{round(part + (255 - part) * white):02x}" for part in parts)


def label(text: object, limit: int = 60) -> str:
    """Make a text usable as a name in a picture: on one line, invisible characters made visible, cut to `limit`
    characters.

    Pass it to artists with `parse_math=False`, because a `$` in it is a dollar.
    """
    seen = plain(str(text).encode("utf-8", "backslashreplace").decode())
    return cut(seen.replace("\n", "\\n").replace("\t", "\\t"), limit)


def smooth(values: Iterable[float], weight: float = 0.7) -> Array:
    """Compute a running mean, unbiased from the start: Σ wⁱ·v / Σ wⁱ over the past; `weight` 0 gives the values
    themselves.
    """
    import pandas as pd

    return pd.Series(values, dtype=float).ewm(alpha=1 - weight).mean().to_numpy()


def thin(steps: Array, values: Array, bins: int = BINS) -> tuple[Array, Array]:
    """Thin a curve to at most 2·`bins` + 2 points that look the same: lowest and highest of each stretch, and both
    ends.
    """
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
    """Return the indices at which the (at most `BINS`) equal stretches of a column of `length` values begin, [≤ BINS]
    int64.
    """
    return np.unique(np.linspace(0, length, BINS + 1).astype(int)[:-1])


def memory(runs: Sequence[Series]) -> float:
    """Return the weight of the past in a running mean: 0.7, and more in long runs, so that it spans a fiftieth of the
    steps.
    """
    longest = max((len(run.steps) for run in runs), default=0)
    return max(0.7, 1 - 50 / max(longest, 1))


def span_of(runs: Sequence[Series]) -> tuple[float, float]:
    """Return the limits of the step axis that all plots share: first and last step of all runs, with a margin."""
    steps = np.concatenate([run.steps for run in runs])
    low, high = (float(steps.min()), float(steps.max())) if len(steps) else (0.0, 0.0)
    margin = max(0.02 * (high - low), 0.5)
    return low - margin, high + margin


# --- panels of plots --------------------------------------------------------------------------------

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
"""Title of a plot → its metrics; a plot draws those that a run has."""
_WIDTH, _HEIGHT = 10.5, 1.75
"""Width of the panel (that of a notebook's output) and height of one plot, in inches."""
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
TITLES: Mapping[str, str] = {
    **WORDS,
    "critic/score/max": "highest reward",
    "critic/score/min": "lowest reward",
    "critic/rewards/mean": "mean with KL penalty",
    "critic/rewards/max": "highest with KL penalty",
    "critic/rewards/min": "lowest with KL penalty",
    "critic/score/std": "deviation of the reward",
    "advantage/zero_share": "share with advantage 0",
    "response/cut_ratio": "share cut off",
    "response_length/max": "longest response",
    "response_length/min": "shortest response",
}
"""These and further metrics → short titles for them."""


def panel(
    metrics: Rows | pd.DataFrame,
    keys: Mapping[str, Sequence[str]] | Sequence[str] | None = None,
    *,
    others: Mapping[str, Rows | pd.DataFrame] | None = None,
    title: str | None = None,
    marks: Sequence[Symptom] | None = None,
    empty: bool = True,
    listed: bool = True,
) -> Figure:
    """Draw metrics over training steps: one small plot for each title of `keys` (default: `PANEL`), three or four to a
    row.

    A faint line is the step's own number, the strong one its running mean; the band is the spread within the step's
    batch (`x/std`, else `x/min` to `x/max` beside `x/mean`); dots in the reward are held-out means (`val/reward`) with
    their 95 % interval. The number above a plot is its last step's own. A metric that is missing, NaN or infinite at a
    step has no point there.

    Args:
        metrics: the rows of a run's `metrics.jsonl`, or a DataFrame of them.
        keys: titles → metric names, or a list of metric names; `timing_s/*` is the seconds of each phase.
        others: name → rows of other runs, drawn over it with a legend, without bands, and with whole steps for phases.
        marks: symptoms (`run.symptoms`), drawn as numbered lines on the time axis, each with a plot of the metric behind
            it, and listed beneath unless `listed` is False.
        empty: keep the place of a plot that nothing is recorded for, so that plots do not jump while a run trains (a
            critic's warm-up has no KL yet); otherwise it is left out, and main metrics that are the same at all steps are
            named in a line.

    Example:
        >>> wb.views.panel(run.rows, others={"without KL": other.rows})  # doctest: +SKIP
    """
    runs, marks = series(title or "this run", metrics, others), marks or ()
    plots = (
        keys if isinstance(keys, Mapping) else behind(runs, marks) if keys is None else {key: (key,) for key in keys}
    )
    notes = [
        (f"{place}  {one.name} (step {one.since} on): {one.found}", MARK) for place, one in enumerate(marks, 1)
    ] * listed
    if not empty:
        plots = {name: wanted for name, wanted in plots.items() if recorded(runs, wanted)} or plots
        main = plots if keys is None else {}
        still = {name: values.pop() for name, wanted in main.items() if len(values := _values(wanted, runs)) == 1}
        if 0 < len(still) < len(plots):
            plots = {name: wanted for name, wanted in plots.items() if name not in still}
            notes.append(
                (f"the same at all steps: {' · '.join(f'{name} {number(one)}' for name, one in still.items())}", GREY)
            )
    figure, grid = _figure(len(plots), runs=runs if others else [], title=title, notes=notes)
    apart = frozenset(name for wanted in plots.values() for name in lines_of(wanted, runs))
    span, look = span_of(runs), Look(smoothing=memory(runs), apart=apart)
    for axes, (name, wanted) in zip(grid, plots.items(), strict=True):
        # a title with a height of its own spares matplotlib the search for one: a quarter of the drawing
        axes.set_title(label(name), fontsize=9.5, loc="left", y=1.0, parse_math=False)
        dress(axes, span, ticks=8)
        _say(axes, draw(axes, wanted, runs, look, marks), runs[0].colour)
    return figure


def behind(runs: Sequence[Series], marks: Sequence[Symptom]) -> dict[str, Sequence[str]]:
    """Return the main plots, and one more for the metric behind each symptom that they do not show."""
    seen = {name for wanted in PANEL.values() for name in wanted}
    more = [one.metric for one in marks if one.metric not in seen and recorded(runs, [one.metric])]
    return {**PANEL, **{TITLES.get(name, name): (name,) for name in more}}


def series(
    name: str, metrics: Rows | pd.DataFrame, others: Mapping[str, Rows | pd.DataFrame] | None = None
) -> list[Series]:
    """Make a `Series` of each run, each with a different colour; the first is called `name`."""
    tables: list[tuple[str, Any]] = [(name, metrics), *(others or {}).items()]
    rows = [table.to_dict("records") if hasattr(table, "to_dict") else table for _, table in tables]
    return [Series(one, rows[place], colour(place)) for place, (one, _) in enumerate(tables)]


def _say(axes: Axes, plotted: Plotted, shade: str) -> None:
    """Write above a plot the last step's number of its only curve, as the live form does, or in an empty plot that
    nothing is recorded.
    """
    if not plotted.key:
        axes.text(0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center", color=GREY, fontsize=9)
        axes.tick_params(labelleft=False)
        axes.grid(False)
    elif plotted.last is not None:
        axes.set_title(number(plotted.last), fontsize=9, loc="right", color=shade, y=1.0)


class LiveFigure(Shown):
    """Base of figures that may have a widget: `plots` has the curves for the widget; with None there is no widget."""

    plots: Any = None
    alone = False
    """Whether the figure is displayed only as a widget, without a picture under it."""

    def _ipython_display_(self) -> None:
        if self.plots is None:
            raise NotImplementedError("this figure has no widget")  # IPython goes on with the PNG
        super()._ipython_display_()


def cell_figure(width: float, height: float, *, dpi: float = 100, **options: Any) -> Figure:
    """Make a matplotlib `Figure` of this size in inches that a notebook shows as a PNG although pyplot is not imported."""
    from matplotlib.figure import Figure

    class Shown(Figure, LiveFigure):  # its name stands in the text form
        def _repr_png_(self) -> bytes:
            return png(self)

    return Shown(figsize=(width, height), dpi=dpi, facecolor="white", **options)


def _figure(
    plots: int, *, runs: Sequence[Series], title: str | None, notes: Sequence[tuple[str, str]]
) -> tuple[Figure, list[Axes]]:
    """Make a figure for a number of plots, with room for a legend of `runs` and for `notes`, lines of (text, colour);
    returns it and its plots.

    Margins are set in inches, because matplotlib's layout engines draw everything twice.
    """
    columns = max(math.ceil(plots / math.ceil(max(plots, 1) / 4)), 3)  # rows of about the same number of plots
    lines = max(math.ceil(plots / columns), 1)
    longest = max((len(label(run.name)) for run in runs), default=1)
    in_line = max(min(len(runs), 5, int((_WIDTH - 0.8) / (0.55 + 0.085 * longest))), 1)
    legend_room = 0.15 + 0.2 * math.ceil(len(runs) / in_line) if runs else 0.0
    notes_room = _LINE * len(notes) + (0.1 if notes else 0.0)
    top, bottom = (0.58 if title else 0.3), 0.5 + legend_room + notes_room
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
        _legend(
            figure, runs, loc="lower center", bbox_to_anchor=(0.5, (0.03 + notes_room) / height), borderaxespad=0.2,
            ncols=in_line, fontsize=9,
        )  # fmt: skip
    for place, (text, shade) in enumerate(notes, 1):
        figure.text(
            0.6 / _WIDTH,
            (0.08 + _LINE * (len(notes) - place)) / height,
            label(text, 150),
            fontsize=8,
            color=shade,
            parse_math=False,
        )
    return figure, grid[:plots]


def _legend(figure: Figure, runs: Sequence[Series], line: float = 1.5, **options: Any) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=run.colour, linewidth=line) for run in runs]
    legend(figure, handles, [label(run.name) for run in runs], frameon=False, **options)


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

    Text is 7 and 8 points, sans-serif; there is no title, since a paper has a caption. Raises `SettingError` for a name
    that no run has, before anything is written. `metrics` and `marks` are those of `panel`.

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
    plots = pick(keys, runs)
    inches = _width(width)
    columns = 1 if inches < 5 else {2: 2, 4: 2}.get(len(plots), min(len(plots), 3))
    lines = math.ceil(len(plots) / columns)
    with rc_context(_RC):
        drawn = cell_figure(
            inches, height or (_ROW["column" if columns == 1 else "page"] * lines + 0.3 + 0.2 * bool(others)),
            dpi=200, layout="constrained",
        )  # fmt: skip
        grid = list(drawn.subplots(lines, columns, squeeze=False).flat)
        weight = memory(runs) if smooth is None else smooth
        look = Look(line=1.2, faint=0.5, dot=3.5, text=6.5, smoothing=weight)
        for axes in grid[len(plots) :]:
            axes.remove()
        for place, (axes, (words, wanted)) in enumerate(zip(grid, plots.items(), strict=False)):
            dress(axes, span_of(runs), ticks=7)
            axes.set_ylabel(label(words), fontsize=8, parse_math=False)
            axes.set_xlabel("step" if place + columns >= len(plots) else "", fontsize=8)
            draw(axes, wanted, runs, look, marks or ())
        if others:
            longest = max(len(label(run.name)) for run in runs)
            columns = max(min(len(runs), int(drawn.get_figwidth() / (0.4 + 0.065 * longest))), 1)
            _legend(drawn, runs, 1.2, loc="outside upper center", ncols=columns, fontsize=7, handlelength=1.4)
        drawn.draw_without_rendering()  # ticks are made now, while the style holds
        if path is not None:
            save_figure(drawn, path)
    return drawn


def _width(width: str | float) -> float:
    if isinstance(width, str) and width not in WIDTHS:
        raise SettingError(unknown("figure width", width, [*WIDTHS, "a number of inches"]))
    inches = WIDTHS[width] if isinstance(width, str) else float(width)
    if not 1 <= inches <= 40:
        raise SettingError("width of a figure", expected="1 to 40 inches, 'column' or 'page'", found=width)
    return inches


def pick(keys: Mapping[str, Sequence[str]] | Sequence[str] | str, runs: Sequence[Series]) -> dict[str, Sequence[str]]:
    """Turn the plots that were asked for into label of the axis → metrics; each metric is recorded by at least one run.

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
        raise SettingError("argument keys of a figure", expected="at least one title or metric", found=list(keys))
    for words, wanted in plots.items():
        if not recorded(runs, wanted):
            raise SettingError(_not_there(words, runs))
    return plots


def _matching(key: str, runs: Sequence[Series]) -> dict[str, Sequence[str]]:
    """Return one plot for a metric, or for each metric that a pattern matches; the key itself where it matches nothing."""
    if key == PHASES or recorded(runs, [key]) or not set(key) & set("*?["):
        return {key: (key,)}
    names = dict.fromkeys(name for run in runs for name in run.names())
    found = [name for name in names if fnmatchcase(name, key) and recorded(runs, [name])]
    return {name: (name,) for name in found} or {key: (key,)}


def _not_there(key: str, runs: Sequence[Series]) -> str:
    """Make the error text for a plot that nothing is recorded for: the nearest name, and how the names begin."""
    titles = [title for title in PANEL if recorded(runs, PANEL[title])]
    names = list(dict.fromkeys(name for run in runs for name in run.names()))
    close = nearest(key, [*titles, *(title.split(" (")[0] for title in titles), *names])
    hint = f"; did you mean {close!r}?" if close else ""
    groups = sorted({f"{name.partition('/')[0]}/*" for name in names if "/" in name})
    what = f"{key!r} is not a plot or metric of these runs{hint}"
    return message(what, expected=f"one of {', '.join(titles)}, a metric, or a pattern ({', '.join(groups) or 'a*'})")


def save_figure(made: Figure, path: str | Path, *, dpi: float = 300) -> Path:
    """Write a figure to a `pdf`, `svg` or `png` file (`dpi` dots an inch), completely or not at all, and return the
    path.

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
