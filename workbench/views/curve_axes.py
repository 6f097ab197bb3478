"""One plot of curves: lines, bands, held-out dots, a stack of phases, its scale, its key, marks on its time axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from workbench.views.curve_parts import BINS, PHASES, Array, Series, colour, label, number_text, smooth, stretches, thin

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
}
EXACT = {"actor/lr", "critic/lr"}
"""Settings, not measurements: a running mean of them would show what never was."""
GREY = "#666666"
MARK = "#a3341f"
_DASHES = ("-", (0, (1, 1.2)), (0, (4, 1.5)))
_PHASES = (
    "rollout", "old_log_prob", "ref_log_prob", "values", "reward", "advantage", "update_critic", "update_actor",
)  # fmt: skip


class Mark(Protocol):
    """What is marked on the time axis; a `runs.symptoms.Symptom` is one."""

    @property
    def name(self) -> str:
        """What looks wrong."""

    @property
    def found(self) -> str:
        """The numbers."""

    @property
    def since(self) -> int:
        """The step that it is marked at."""


@dataclass(frozen=True)
class Look:
    """Sizes, in points, and how much a running mean remembers (0: nothing)."""

    line: float = 1.8
    faint: float = 1.0
    dot: float = 6.0
    text: float = 7.5
    smoothing: float = 0.7


class Plotted(NamedTuple):
    """What was drawn into one plot."""

    key: dict[str, Any]
    """What a line, a band or a dot stands for → one of them; empty where nothing is recorded."""
    last: float | None
    """Where the only curve ends; None where there are more."""
    stacked: bool = False
    """Whether it is a stack of phases, which has its names beside it."""


# --- curves ---------------------------------------------------------------------------------------


def plot(axes: Axes, wanted: Sequence[str], runs: Sequence[Series], look: Look) -> Plotted:
    """Draw the metrics of a plot, those of them that any run has, and scale it."""
    if PHASES in wanted:
        alone = len(runs) == 1 and bool(runs[0].phases())
        return _stack(axes, runs[0], look) if alone else _seconds(axes, runs, look)
    drawn = [name for name in wanted if any(len(run.points(name)[0]) for run in runs)]
    key: dict[str, Any] = {}
    for name, dashes in zip(drawn, cycle(_DASHES), strict=False):
        for run in runs:
            if len(run.points(name)[0]):
                line = _curve(axes, run, name, dashes, look, faint=len(runs) <= 4)
                key.setdefault(WORDS.get(name, name), line)
    if "critic/score/mean" in wanted:
        dots = [_held_out(axes, run, look) for run in runs if len(run.points("val/reward")[0])]
        key |= {"held out, 95 %": dots[0]} if dots else {}
    if not key:
        return Plotted({}, None)
    low, high = axes.dataLim.y0, axes.dataLim.y1
    band = _band(runs[0], drawn[0]) if len(runs) == len(drawn) == 1 else None
    if band is not None:
        at, lows, highs, word = band
        key[word] = axes.fill_between(at, lows, highs, color=runs[0].colour, alpha=0.12, linewidth=0, zorder=1)
        low, high = _with_band(low, high, float(lows.min()), float(highs.max()))
    _scale(axes, low, high)
    last = _smooth(runs[0].points(drawn[0])[1], drawn[0], look)[-1] if len(runs) == len(drawn) == 1 else None
    return Plotted(key, last)


def _smooth(values: Array, name: str, look: Look) -> Array:
    return np.array(smooth(values.tolist(), 0.0 if name in EXACT else look.smoothing))


def _curve(axes: Axes, run: Series, name: str, dashes: Any, look: Look, *, faint: bool) -> Any:
    """One metric of one run: the step's own numbers faint, their running mean strong."""
    steps, values = run.points(name)
    if faint:
        axes.plot(*thin(steps, values), color=run.colour, alpha=0.28, linewidth=look.faint)
    strong: dict[str, Any] = {"color": run.colour, "linewidth": look.line, "linestyle": dashes}
    if len(values) == 1:
        strong |= {"marker": "o", "ms": look.dot - 1}
    return axes.plot(*thin(steps, _smooth(values, name, look)), **strong)[0]


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


def _band(run: Series, name: str) -> tuple[Array, Array, Array, str] | None:
    """(steps, lower, upper, what it is) of a metric `x/mean` with a spread beside it: `x/std`, else `x/min` and `x/max`."""
    base = name.removesuffix("/mean")
    if base == name:
        return None
    mean, deviation = run.column(name), run.column(f"{base}/std")
    lowest, highest = run.column(f"{base}/min"), run.column(f"{base}/max")
    # never beyond what there was: rewards of 0 and 1 have no spread above 1
    low, high, word = np.fmax(mean - deviation, lowest), np.fmin(mean + deviation, highest), "± one deviation"
    if not np.isfinite(deviation).any():
        low, high, word = lowest, highest, "lowest to highest"
    there = np.isfinite(low) & np.isfinite(high)
    if not there.any():
        return None
    steps, low, high = run.steps[there], low[there], high[there]
    if len(steps) > 2 * BINS:
        starts = stretches(len(steps))
        steps, low, high = steps[starts], np.minimum.reduceat(low, starts), np.maximum.reduceat(high, starts)
    return steps, low, high, word


def _with_band(low: float, high: float, lowest: float, highest: float) -> tuple[float, float]:
    """The scale belongs to the means: a wide band takes at most three quarters of the height, and runs out of the plot."""
    room = 3 * max(high - low, 0.1 * max(abs(low), abs(high)))
    below, above = max(low - lowest, 0.0), max(highest - high, 0.0)
    share = min(room / (below + above), 1.0) if below + above else 0.0
    return low - below * share, high + above * share


def _scale(axes: Axes, low: float, high: float) -> None:
    """From 0 where the numbers come near it; a constant gets a band, not digits of noise."""
    if low == high:
        low, high = low - abs(low) * 0.1, high + (abs(high) * 0.1 or 0.1)
    if 0 <= low <= high / 2:
        low = 0.0
    margin = 0.05 * (high - low)
    axes.set_ylim(low - margin, high + margin)


# --- seconds --------------------------------------------------------------------------------------


def _seconds(axes: Axes, runs: Sequence[Series], look: Look) -> Plotted:
    """Several runs, or one that does not tell its phases: a line each for the whole step."""
    there = [run for run in runs if len(run.points("timing_s/step")[0])]
    lines = [_curve(axes, run, "timing_s/step", "-", look, faint=len(runs) <= 4) for run in there]
    if not lines:
        return Plotted({}, None)
    _scale(axes, axes.dataLim.y0, axes.dataLim.y1)
    return Plotted({"the whole step": lines[0]}, None)


def _stack(axes: Axes, run: Series, look: Look) -> Plotted:
    """One run: its phases over each other, the first at the bottom, each named at its end in its own colour."""
    names = run.phases()
    numbers = np.stack([np.nan_to_num(run.column(f"timing_s/{name}")) for name in names])
    there: Array = np.asarray(numbers.any(0))
    if not there.any():  # phases of no time at all
        there[:] = True
    steps = run.steps[there]
    means = np.stack([np.array(smooth(row.tolist(), look.smoothing)) for row in numbers[:, there]])
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
    """Beside each area its name and seconds, pushed apart where they would lie on each other."""
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
    """Ticks, grid and spines, as every plot of curves has them."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.tick_params(labelsize=ticks, colors=GREY, length=0)
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))
    axes.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(number_text))
    axes.set_xlim(span)
    axes.grid(True, color="#ececec", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#cccccc")


def wipe(axes: Axes, span: tuple[float, float]) -> None:
    """Take away what was drawn, and keep what is slow to make: the axes with their ticks."""
    from matplotlib.transforms import Bbox

    for artist in [*axes.lines, *axes.collections, *axes.texts]:
        artist.remove()
    axes.containers.clear()
    axes.dataLim.set_points(Bbox.null().get_points())
    axes.ignore_existing_data_limits = True
    legend = axes.get_legend()
    if legend is not None:
        legend.remove()
    axes.set_title("", loc="right")
    axes.tick_params(labelleft=True)
    axes.grid(True)
    axes.set_xlim(span)


def recorded(runs: Sequence[Series], wanted: Sequence[str]) -> bool:
    """Whether any run has a number for a plot of these metrics."""
    asked = [*wanted]
    asked += ["val/reward"] if "critic/score/mean" in wanted else []
    asked += ["timing_s/step"] if PHASES in wanted else []
    alone = len(runs) == 1 and PHASES in wanted and bool(runs[0].phases())
    return alone or any(len(run.points(key)[0]) for run in runs for key in asked)


def needs_key(wanted: Sequence[str], plotted: Plotted) -> bool:
    """Whether a plot shows more than its title says, or one of the things that it could mean."""
    one_of = len(wanted) > 1 and not EXACT.issuperset(wanted)
    return bool(plotted.key) and not plotted.stacked and (len(plotted.key) > 1 or one_of or PHASES in wanted)


def explain(axes: Axes, key: Mapping[str, Any], look: Look, *, below: bool = False) -> None:
    """A small key, for plots that show more than their title says; rather `below`, where marks have their numbers above."""
    legend = axes.legend(
        list(key.values()), ["·"] * len(key), loc=_free_corner(axes, below), fontsize=look.text, labelcolor=GREY,
        framealpha=0.6, edgecolor="none", handlelength=1.4, borderaxespad=0.3,
    )  # fmt: skip
    say(legend, [label(name, 40) for name in key])


def _free_corner(axes: Axes, below: bool) -> Any:
    """Where the fewest points of the lines are: matplotlib's own "best" takes as long as all lines together."""
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


def say(legend: Any, names: Sequence[str]) -> None:
    """Names into a legend as they stand: matplotlib would read `$` as mathematics and leave out what begins with `_`."""
    for text, name in zip(legend.get_texts(), names, strict=True):
        text.set_parse_math(False)
        text.set_text(name)


def mark(axes: Axes, marks: Sequence[Mark], look: Look) -> None:
    """A thin line at the step of each mark, with its number; neighbours' numbers stand at different heights."""
    for number, one in enumerate(marks):
        axes.axvline(one.since, color=MARK, linewidth=0.8, linestyle=(0, (2, 2)), alpha=0.7, zorder=1.5)
        axes.text(one.since, 0.99 - 0.1 * (number % 4), f" {number + 1}", transform=axes.get_xaxis_transform(),
                  color=MARK, fontsize=look.text, va="top", zorder=6)  # fmt: skip
