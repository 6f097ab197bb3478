"""One plot of curves: lines, bands, held-out dots or stacked phases, with scale, key and marks on the time axis."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import cycle, pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np

from workbench.base.shown import plain
from workbench.runs.folder import STEP
from workbench.runs.symptoms import Rows, Symptom
from workbench.views.document import cut

if TYPE_CHECKING:
    from matplotlib.axes import Axes


WORDS = {
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
_PHASES = (
    "rollout", "old_log_prob", "ref_log_prob", "values", "reward", "advantage", "update_critic", "update_actor",
)  # fmt: skip


@dataclass(frozen=True)
class Look:
    """The style of a plot: sizes in points, and the weight of the past in the running mean (0: the values themselves)."""

    line: float = 1.8
    faint: float = 1.0
    dot: float = 6.0
    text: float = 7.5
    smoothing: float = 0.7


class Plotted(NamedTuple):
    """What `draw` put into one plot: legend entries, the last value, and whether phases are stacked."""

    key: dict[str, Any]
    """Words for a line, a band or a dot → one such artist; empty where nothing is recorded."""
    last: float | None
    """The last value of the only curve; None where there are more."""
    stacked: bool = False
    """Whether it is a stack of phases, whose names are beside it."""


# --- curves ---------------------------------------------------------------------------------------


def draw(axes: Axes, wanted: Sequence[str], runs: Sequence[Series], look: Look, marks: Sequence[Symptom]) -> Plotted:
    """Draw one plot's metrics, a legend where its title does not name them all, and a line for each symptom in `marks`."""
    alone = PHASES in wanted and len(runs) == 1 and bool(runs[0].phases())
    plotted = _stack(axes, runs[0], look) if alone else _curves(axes, wanted, runs, look)
    # several things, or one of several that the title could mean
    one_of = (len(wanted) > 1 and not EXACT.issuperset(wanted)) or PHASES in wanted
    if plotted.key and not plotted.stacked and (len(plotted.key) > 1 or one_of):
        pale = {"labelcolor": GREY, "framealpha": 0.6, "edgecolor": "none", "handlelength": 1.4, "borderaxespad": 0.3}
        names, corner = [label(name, 40) for name in plotted.key], _free_corner(axes, below=bool(marks))
        legend(axes, plotted.key.values(), names, loc=corner, fontsize=look.text, **pale)
    for place, one in enumerate(marks):  # neighbours' numbers are at different heights
        axes.axvline(one.since, color=MARK, linewidth=0.8, linestyle=(0, (2, 2)), alpha=0.7, zorder=1.5)
        axes.text(one.since, 0.99 - 0.1 * (place % 4), f" {place + 1}", transform=axes.get_xaxis_transform(),
                  color=MARK, fontsize=look.text, va="top", zorder=6)  # fmt: skip
    return plotted


def _curves(axes: Axes, wanted: Sequence[str], runs: Sequence[Series], look: Look) -> Plotted:
    """Draw those metrics of a plot that any run has, and scale it; whole steps where phases cannot be stacked."""
    drawn = [name for name in lines_of(wanted, runs) if name != HELD_OUT or name in wanted]
    key: dict[str, Any] = {}
    for name, dashes in zip(drawn, cycle(_DASHES), strict=False):
        there = [run for run in runs if len(run.points(name)[0])]
        lines = [_curve(axes, run, name, dashes, look, faint=len(runs) <= 4) for run in there]
        key[WORDS.get(name, name)] = lines[0]
    if "critic/score/mean" in wanted:
        dots = [_held_out(axes, run, look) for run in runs if len(run.points(HELD_OUT)[0])]
        key |= {"held out, 95 %": dots[0]} if dots else {}
    if len(runs) == len(drawn) == 1:
        return Plotted(key | _banded(axes, runs[0], drawn[0]), float(lines[0].get_ydata()[-1]))
    if key:
        _scale(axes, axes.dataLim.y0, axes.dataLim.y1)
    return Plotted(key, None)


def _banded(axes: Axes, run: Series, name: str) -> dict[str, Any]:
    """Scale the plot of a single curve, draw the spread recorded beside its `x/mean`, `x/std` or else `x/min` and `x/max`.

    Returns {what the band is: the band}. The axis fits the means: a wide band has at most three quarters of the height.
    """
    stem = name.removesuffix("mean")
    mean, deviation, lowest, highest = (run.column(stem + of) for of in ("mean", "std", "min", "max"))
    # never beyond what there was: rewards of 0 and 1 have no spread above 1
    lows, highs, word = np.fmax(mean - deviation, lowest), np.fmin(mean + deviation, highest), "± one deviation"
    if not np.isfinite(deviation).any():
        lows, highs, word = lowest, highest, "lowest to highest"
    there = np.isfinite(lows) & np.isfinite(highs)
    low, high, key = axes.dataLim.y0, axes.dataLim.y1, dict[str, Any]()
    if name.endswith("/mean") and there.any():
        steps, lows, highs = run.steps[there], lows[there], highs[there]
        if len(steps) > 2 * BINS:
            starts = stretches(len(steps))
            steps, lows, highs = steps[starts], np.minimum.reduceat(lows, starts), np.maximum.reduceat(highs, starts)
        key[word] = axes.fill_between(steps, lows, highs, color=run.colour, alpha=0.12, linewidth=0, zorder=1)
        below, above = max(low - float(lows.min()), 0.0), max(float(highs.max()) - high, 0.0)
        room = 3 * max(high - low, 0.1 * max(abs(low), abs(high)))
        share = min(room / (below + above), 1.0) if below + above else 0.0
        low, high = low - below * share, high + above * share
    _scale(axes, low, high)
    return key


def _curve(axes: Axes, run: Series, name: str, dashes: Any, look: Look, *, faint: bool) -> Any:
    """One metric of one run: the step's own numbers faint, their running mean strong."""
    steps, values = run.points(name)
    if faint:
        axes.plot(*thin(steps, values), color=run.colour, alpha=0.28, linewidth=look.faint)
    strong: dict[str, Any] = {"color": run.colour, "linewidth": look.line, "linestyle": dashes}
    if len(values) == 1:
        strong |= {"marker": "o", "ms": look.dot - 1}
    means = smooth(values, 0.0 if name in EXACT else look.smoothing)
    return axes.plot(*thin(steps, means), **strong)[0]


def _held_out(axes: Axes, run: Series, look: Look) -> Any:
    """Held-out means and their 95 % intervals; one prompt has a mean and no interval."""
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
    """Start the axis at 0 where the numbers come near it; a constant gets ±10 %, not digits of noise."""
    if low == high:
        low, high = low - abs(low) * 0.1, high + (abs(high) * 0.1 or 0.1)
    if 0 <= low <= high / 2:
        low = 0.0
    margin = 0.05 * (high - low)
    axes.set_ylim(low - margin, high + margin)


def _stack(axes: Axes, run: Series, look: Look) -> Plotted:
    """One run: its phases over each other, the first at the bottom, each named at its end in its own colour."""
    names = run.phases()
    numbers = np.stack([np.nan_to_num(run.column(f"timing_s/{name}")) for name in names])
    there: Array = np.asarray(numbers.any(0))
    if not there.any():  # phases of no time at all
        there[:] = True
    steps = run.steps[there]
    means = np.stack([smooth(row, look.smoothing) for row in numbers[:, there]])
    ends = means[:, -1]
    if len(steps) > 2 * BINS:
        starts = stretches(len(steps))
        means = np.add.reduceat(means, starts, axis=1) / np.diff([*starts, len(steps)])
        steps = steps[starts]
    if len(steps) == 1:  # an area has a width
        steps, means = np.array([steps[0] - 0.4, steps[0] + 0.4]), np.repeat(means, 2, axis=1)
    colours = [colour(_PHASES.index(name) if name in _PHASES else 8 + place) for place, name in enumerate(names)]
    areas = axes.stackplot(steps, means, colors=colours, alpha=0.75, linewidth=0)
    total = means.sum(0)
    # the first steps may wait for caches and compilers: they do not flatten all others
    _scale(axes, 0.0, float(min(total.max(), 3 * np.median(total))))
    _name_phases(axes, names, ends, colours, look)
    return Plotted(dict(zip(names, areas, strict=True)), float(ends.sum()), stacked=True)


def _name_phases(axes: Axes, names: Sequence[str], ends: Array, colours: Sequence[str], look: Look) -> None:
    """Write each area's name and seconds beside it, pushed apart where they would overlap."""
    bottom, top = axes.get_ylim()
    centres = (np.cumsum(ends) - ends / 2 - bottom) / (top - bottom)
    figure: Any = axes.get_figure(root=True)
    height = axes.get_position().height * figure.get_figheight() * 72
    gap = 1.25 * look.text / height
    places: list[float] = []
    for centre in centres:
        places.append(max(float(centre), places[-1] + gap) if places else float(centre))
    over = 1.0
    for number in range(len(places) - 1, -1, -1):
        places[number] = over = min(places[number], over)
        over -= gap
    for name, seconds, shade, place in zip(names, ends, colours, places, strict=True):
        text = f"{label(name, 24)} {number_text(float(f'{seconds:.2g}'))}"
        axes.text(1.02, place, text, transform=axes.transAxes, color=shade, fontsize=look.text, va="center",
                  parse_math=False)  # fmt: skip


# --- words and axes -------------------------------------------------------------------------------


def dress(axes: Axes, span: tuple[float, float], ticks: float) -> None:
    """Set the ticks, grid and spines that every plot of curves has."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.tick_params(labelsize=ticks, colors=GREY, length=0)
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))
    axes.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(number_text))
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
    """Whether a plot of these metrics would show anything."""
    return bool(lines_of(wanted, runs))


def lines_of(wanted: Sequence[str], runs: Sequence[Series]) -> list[str]:
    """The metrics of a plot that any run has a number for: of a single run each phase by name, of several the whole step;
    beside the batch's rewards the held-out ones."""
    phases = [f"timing_s/{phase}" for phase in runs[0].phases()] if len(runs) == 1 else []
    names = [one for name in wanted for one in (phases or ["timing_s/step"] if name == PHASES else [name])]
    names += [HELD_OUT] if "critic/score/mean" in wanted and HELD_OUT not in names else []
    return [name for name in names if any(len(run.points(name)[0]) for run in runs)]


def _free_corner(axes: Axes, below: bool) -> Any:
    """The corner with the fewest points of the lines, rather a lower one if `below`, since marks have numbers at the top."""
    # matplotlib's own "best" takes as long as drawing all lines
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    points = np.concatenate([np.asarray(line.get_xydata(), dtype=float) for line in axes.lines])
    across, up = (points[:, 0] - left) / (right - left), (points[:, 1] - bottom) / (top - bottom)
    corners = {
        f"{level} {side}": float(((up > 0.6 if level == "upper" else up < 0.4) & near).sum())
        for level in ("upper", "lower")
        for side, near in (("right", across > 0.4), ("left", across < 0.6))
    }
    extra = 0.15 * len(points) if below else 0.0
    return min(corners, key=lambda corner: corners[corner] + extra * corner.startswith("upper"))


def legend(owner: Any, handles: Iterable[Any], names: Sequence[str], **options: Any) -> None:
    """Draw a legend, names as they are: matplotlib reads `$` as mathematics and drops names that start with `_`."""
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
        """The names in the run's rows, in the order in which they come."""
        # one may come late (a critic's warm-up), but not for one step in hundreds
        some = [*self.rows[:: max(len(self.rows) // 200, 1)], *self.rows[-1:]]
        return list(dict.fromkeys(name for row in some for name in row))

    def phases(self) -> list[str]:
        """The training phases whose seconds (`timing_s/<phase>`) the run records, in the order in which they run."""
        names = [name for name in self.names() if name.startswith("timing_s/")]
        found = [name.removeprefix("timing_s/") for name in names]
        own = [name for name in found if "/" not in name and name not in _NO_PHASE and _TWICE.get(name) not in found]
        return [name for name in own if len(self.points(f"timing_s/{name}")[0])]


def colour(place: int) -> str:
    """The colour of the n-th run or phase: eight colours, then the same eight paler, then paler still."""
    base = _COLOURS[place % len(_COLOURS)]
    white = (place // len(_COLOURS)) % 3 * 0.33
    parts = [int(base[start : start + 2], 16) for start in (1, 3, 5)]
    return "#" + "".join(f"{round(part + (255 - part) * white):02x}" for part in parts)


def label(text: object, limit: int = 60) -> str:
    """A name for a picture: on one line, invisible characters made visible, cut to `limit` characters.

    Pass it to artists with `parse_math=False`: a `$` in it is a dollar.
    """
    seen = plain(str(text).encode("utf-8", "backslashreplace").decode())
    return cut(seen.replace("\n", "\\n").replace("\t", "\\t"), limit)


def smooth(values: Iterable[float], weight: float = 0.7) -> Array:
    """A running mean, unbiased from the start: Σ wⁱ·v / Σ wⁱ over the past; `weight` 0 gives the values themselves."""
    import pandas as pd

    return pd.Series(values, dtype=float).ewm(alpha=1 - weight).mean().to_numpy()


def thin(steps: Array, values: Array, bins: int = BINS) -> tuple[Array, Array]:
    """Thin a curve to at most 2·`bins` + 2 points that look the same: lowest and highest of each stretch, and both ends."""
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
    """The indices at which the (at most `BINS`) equal stretches of a column of `length` values begin, [≤ BINS] int64."""
    return np.unique(np.linspace(0, length, BINS + 1).astype(int)[:-1])


def memory(runs: Sequence[Series]) -> float:
    """The weight of the past in a running mean: 0.7, and in long runs higher, so that it spans a fiftieth of the steps."""
    longest = max((len(run.steps) for run in runs), default=0)
    return max(0.7, 1 - 50 / max(longest, 1))


def span_of(runs: Sequence[Series]) -> tuple[float, float]:
    """The limits of the step axis: first and last step of all runs, with a margin; the same for every plot."""
    steps = np.concatenate([run.steps for run in runs])
    low, high = (float(steps.min()), float(steps.max())) if len(steps) else (0.0, 0.0)
    margin = max(0.02 * (high - low), 0.5)
    return low - margin, high + margin


def number_text(value: float, place: int | None = None) -> str:
    """A number as an axis label, in three digits and as short as possible: 0.25, 12, 2.05e-4."""
    if value and abs(value) < 1e-3:
        digits, power = f"{value:.2e}".split("e")
        return f"{float(digits):g}e{int(power)}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.4g}"
