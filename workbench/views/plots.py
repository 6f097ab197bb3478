"""A run's curves as columns of numbers for the page that draws them, and the samples that a clicked point opens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from workbench.base.errors import RunError
from workbench.runs.symptoms import Symptom
from workbench.views import curves as draw
from workbench.views.curves import Array, Line, Series, label
from workbench.views.samples import SamplesView, samples


class Recorded(Protocol):
    """Protocol of what the plots read of a `Run`: its metrics rows and its traces."""

    @property
    def rows(self) -> Sequence[Mapping[str, Any]]:
        """The rows of metrics.jsonl."""

    @property
    def traces(self) -> Mapping[int, Any]:
        """Step → trace."""


@dataclass(frozen=True)
class Plots:
    """The curves of several runs, name → run. `marks` are the symptoms of the first run; `keys` choose plots as in
    `views.figure`; `drawn` names the runs that are drawn at first (empty: all of them).
    """

    runs: Mapping[str, Recorded]
    keys: Sequence[str] = ()
    marks: Sequence[Symptom] = ()
    drawn: Sequence[str] = ()

    def columns(self, keys: Sequence[str] = (), names: Sequence[str] = ()) -> dict[str, Any]:
        """Return everything to draw, or the curves of other `keys` or of the runs `names`, as JSON values: numbers with
        six digits, None where missing or not finite.

        `steps`: all drawn runs' steps, ascending, [steps]. `known`: label and colour of each run that can be drawn, which it
        keeps, and `names` their names. `runs`: of the drawn ones name, colour, place among the known ones, and the steps that have a
        trace. `plots`:
        title and lines; each line has its run (an index), words, colour, `dash` (an index), whether it is smoothed or
        only has dots, its values, [steps], and the band around it. `chosen`: whether plots were asked for. `marks`: the
        step and the text of each symptom. `smooth`: the weight
        with which a slider begins.
        """
        known = {name: draw.colour(place) for place, name in enumerate(self.runs)}
        wanted = [name for name in known if name in (names or self.drawn or known)]
        curves = [Series(name, self.runs[name].rows, known[name]) for name in wanted]
        chosen, marks = keys or self.keys, self.marks if next(iter(known)) in wanted else ()
        plots = draw.pick(chosen, curves) if chosen else draw.behind(curves, marks)
        plots = {title: metrics for title, metrics in plots.items() if draw.recorded(curves, metrics)}
        steps = np.unique(np.concatenate([run.steps for run in curves]))
        runs = [{"name": label(name), "colour": known[name], "place": [*known].index(name)} for name in wanted]
        runs = [run | {"traces": list(self.runs[name].traces)} for name, run in zip(wanted, runs, strict=True)]
        return {
            "steps": steps.astype(int).tolist(),
            "known": [{"name": label(name), "colour": shade} for name, shade in known.items()],
            "names": list(known),
            "runs": runs,
            "plots": [
                {"title": label(title), "lines": [_line(line, curves, steps) for line in draw.lines(metrics, curves)]}
                for title, metrics in plots.items()
            ],
            "chosen": bool(chosen),
            "marks": [{"step": int(mark.since), "text": label(mark, 400), "metric": mark.metric} for mark in marks],
            "smooth": round(draw.memory(curves), 3),
        }

    def samples(self, run: int, step: int) -> SamplesView:
        """Return the samples that run number `run` recorded in a step. Raises `RunError` where the step has no trace."""
        traces = list(self.runs.values())[run].traces
        if step not in list(traces):  # `in` alone would open the trace
            there = sorted(traces, key=lambda one: (abs(one - step), one))
            expected = f"one of the steps {sorted(there[:6])}" if there else "a run that records its steps"
            do = "train(…, trace_freq=1) keeps the trace of every step"
            raise RunError(f"step {step} has no trace, so there are no samples to show", expected=expected, do=do)
        return samples(traces[step])


class Growing(draw.LiveFigure):
    """Curves without a picture, for a widget: `read` is called each time that they are looked at."""

    alone = True

    def __init__(self, read: Callable[[], Plots]) -> None:
        self._read = read

    @property
    def plots(self) -> Plots:
        """The curves as they are now."""
        return self._read()


def _line(line: Line, runs: Sequence[Series], steps: Array) -> dict[str, Any]:
    run = runs[line.run]
    column, band = _column(*run.points(line.name), steps), _band(run, line.name, steps) if line.banded else None
    return {**line._asdict(), "words": label(line.words), "smoothed": line.smoothed, "values": column, "band": band}


def _band(run: Series, name: str, steps: Array) -> list[Any] | None:
    """Return the spread beside a mean as [what it is, lower ends, upper ends], both [steps]; None where there is none."""
    words, lows, highs = draw.spread(run, name)
    there = np.isfinite(lows) & np.isfinite(highs)
    if not name.endswith("/mean") or not there.any():
        return None
    return [words, *(_column(run.steps[there], ends[there], steps) for ends in (lows, highs))]


def _column(at: Array, values: Array, steps: Array) -> list[float | None]:
    """Return a metric's value at each of `steps`, [steps], of its finite values at some; None elsewhere."""
    column: list[float | None] = [None] * len(steps)
    for index, value in zip(np.searchsorted(steps, at).tolist(), values.tolist(), strict=True):
        column[index] = float(f"{value:.6g}")
    return column
