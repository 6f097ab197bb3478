"""Several seeds of each of several settings: means with 95 % intervals, differences by seed, curves with bands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from workbench.base.errors import SettingError, unknown
from workbench.functional.passes import half_width
from workbench.replay.run import Run, load_run
from workbench.views import document as doc
from workbench.views.curves import Series, cell_figure, colour, dress, label, legend, png

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

Curve: TypeAlias = "dict[int, float]"


class Interval(NamedTuple):
    """A mean over seeds with its 95 % interval by Student's t; low and high are NaN for a single seed."""

    mean: float
    low: float
    high: float
    seeds: int


@dataclass(frozen=True, repr=False)
class Seeds(doc.View):
    """Result of `views.seeds`: the curves of one metric, by setting and seed."""

    metric: str
    last: int
    """Number of last steps of a run whose values are averaged."""
    curves: Mapping[str, Mapping[int, Curve]]
    """Name → seed → step → value."""
    unit: bool = False
    """Whether all rewards behind the metric were between 0 and 1; intervals are then cut to [0, 1]."""

    def values(self, name: str) -> dict[int, float]:
        """Return seed → mean of the metric over the run's last steps."""
        return {
            seed: fmean([curve[step] for step in sorted(curve)[-self.last :]])
            for seed, curve in self.curves[name].items()
        }

    def difference(self, name: str, base: str) -> Interval | None:
        """Compute the mean difference `name` − `base` over the seeds that both have, with its interval; None without a
        common seed.
        """
        one, other = self.values(name), self.values(base)
        both = sorted(set(one) & set(other))
        return (
            interval([one[seed] - other[seed] for seed in both], (-1.0, 1.0) if self.unit else None) if both else None
        )

    @property
    def _bounds(self) -> tuple[float, float] | None:
        return (0.0, 1.0) if self.unit else None

    @property
    def table(self) -> pd.DataFrame:
        """A DataFrame with a line for each name: seeds, mean, low, high; the difference to the first name by seed, its
        interval and its seeds.
        """
        import pandas as pd

        base, lines = next(iter(self.curves)), {}
        for name in self.curves:
            mine = interval(list(self.values(name).values()), self._bounds)
            pair = self.difference(name, base) if name != base else None
            lines[name] = {
                "seeds": mine.seeds, "mean": mine.mean, "low": mine.low, "high": mine.high,
                "difference": pair.mean if pair else np.nan, "difference low": pair.low if pair else np.nan,
                "difference high": pair.high if pair else np.nan, "common seeds": pair.seeds if pair else 0,
            }  # fmt: skip
        return pd.DataFrame.from_dict(lines, orient="index")

    def figure(self) -> Figure:
        """Draw for each name the mean over seeds as a line, in a band of its 95 % intervals; only the line for a single
        seed.
        """
        figure = cell_figure(7, 3.4, layout="constrained")
        axes = figure.subplots()
        steps = [step for seeds_ in self.curves.values() for curve in seeds_.values() for step in curve]
        dress(axes, (min(steps) - 0.5, max(steps) + 0.5), ticks=8)
        handles = []
        for place, by_seed in enumerate(self.curves.values()):
            shared = sorted(set.intersection(*(set(curve) for curve in by_seed.values())))
            at = [interval([curve[step] for curve in by_seed.values()], self._bounds) for step in shared]
            handles += axes.plot(shared, [one.mean for one in at], color=colour(place), linewidth=1.8)
            if len(by_seed) > 1:
                lows, highs = [one.low for one in at], [one.high for one in at]
                axes.fill_between(shared, lows, highs, color=colour(place), alpha=0.15, linewidth=0)
        axes.set_xlabel("step", fontsize=8)
        axes.set_ylabel(label(self.metric), fontsize=8, parse_math=False)
        names = [f"{label(name, 40)} ({doc.counted(len(by_seed), 'seed')})" for name, by_seed in self.curves.items()]
        legend(axes, handles, names, fontsize=8, frameon=False)
        return figure

    def document(self) -> doc.Part:
        """Build the display: the table, a sentence on how to read it, and in HTML the figure."""
        base, rows = next(iter(self.curves)), list[list[doc.Part]]()
        for name, row in self.table.iterrows():
            pairs = int(row["common seeds"])
            change = doc.number(row["difference"], "+") if pairs else "–" if name == base else "no common seed"
            mine = [str(name), f"{row['seeds']:.0f}", doc.number(row["mean"]), _range(row["low"], row["high"])]
            apart = _range(row["difference low"], row["difference high"])
            rows.append([*mine, change, apart, str(pairs) if pairs else ""])
        header = ["", "seeds", "mean", "95 % interval", f"minus {base}, by seed", "95 % interval", "pairs"]
        title = f"{self.metric}, mean of the last {doc.counted(self.last, 'step')}"
        return (
            doc.line(doc.bold(title)),
            doc.Table(header, rows, right=True),
            doc.line(doc.faint("Student's t over seeds; a difference whose interval contains 0 may be chance")),
            doc.Image(lambda: png(self.figure()), title),
        )


def seeds(
    groups: Mapping[str, Sequence[Run | str | Path]], metric: str = "critic/score/mean", *, last: int = 5
) -> Seeds:
    """Compare settings over seeds: name → runs (or their folders) that differ only in the seed.

    Shown are each name's mean of the metric over the `last` steps, with its 95 % interval over seeds, and the
    difference to the first name, computed seed by seed; `.figure()` draws the curves with bands, `.table` is a
    DataFrame.

    Raises `SettingError` where a name has no run or two of one seed, or a run lacks the metric.

    Example:
        >>> wb.views.seeds({"grpo": ["runs/g0", "runs/g1"], "rloo": ["runs/r0", "runs/r1"]})  # doctest: +SKIP
    """
    if last < 1:
        raise SettingError("argument last of seeds", expected="≥ 1 steps", found=last)
    if not groups or not all(groups.values()):
        raise SettingError("seeds has nothing to compare", expected="name → one run or more", found=dict(groups))
    opened = {name: [one if isinstance(one, Run) else load_run(one) for one in runs] for name, runs in groups.items()}
    unit = metric in _REWARDS and all(_within_unit(run) for runs in opened.values() for run in runs)
    return Seeds(metric, last, {name: _curves(name, runs, metric) for name, runs in opened.items()}, unit)


_REWARDS = ("reward", "critic/score/mean", "val/reward")


def _within_unit(run: Run) -> bool:
    """Whether all recorded rewards of a run are between 0 and 1."""
    ends = [row[name] for row in run.rows for name in ("critic/score/min", "critic/score/max") if name in row]
    return bool(ends) and all(value is not None and 0 <= value <= 1 for value in ends)


def _curves(name: str, runs: Sequence[Run], metric: str) -> dict[int, Curve]:
    curves: dict[int, Curve] = {}
    for run in runs:
        rows, seed = run.rows, int((run.settings.get("train") or {}).get("seed") or 0)
        if seed in curves:
            raise SettingError(f"{name!r} has two runs of seed {seed}: {run.path}", do="give one run for each seed")
        series = Series(name, rows, "")
        steps, values = series.points(metric)
        if not len(steps):
            raise SettingError(
                unknown(f"metric of the run {run.path}", metric, dict.fromkeys(key for row in rows for key in row))
            )
        curves[seed] = dict(zip(map(int, steps), map(float, values), strict=True))
    return curves


def interval(values: Sequence[float], bounds: tuple[float, float] | None = None) -> Interval:
    """Compute the mean of independent values with its 95 % interval: mean ± t · s/√n, s with n − 1, cut to the `bounds` that
    the mean itself cannot leave.
    """
    mean, number = fmean(values), len(values)
    half = half_width(values)
    low, high = mean - half, mean + half
    if bounds and number > 1:
        low, high = max(low, bounds[0]), min(high, bounds[1])
    return Interval(mean, low, high, number)


def _range(low: float, high: float) -> str:
    return "–" if low != low else f"[{doc.number(low)}, {doc.number(high)}]"
