"""A run's curves as columns of numbers for the page that draws them, and the samples that a clicked point opens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from workbench.base.errors import RunError
from workbench.runs.symptoms import Symptom
from workbench.views import curves as draw
from workbench.views.curves import HELD_OUT, Array, Series, label, lines_of
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
    `views.figure`.
    """

    runs: Mapping[str, Recorded]
    keys: Sequence[str] = ()
    marks: Sequence[Symptom] = ()

    def columns(self, keys: Sequence[str] = ()) -> dict[str, Any]:
        """Return everything to draw, or the curves of other `keys`, as JSON values: numbers with six digits, None where
        missing or not finite.

        `steps`: all runs' steps, ascending, [steps]. `runs`: name, colour, and the steps that have a trace. `plots`:
        title and lines; each line has its run (an index), words, colour, `dash` (an index), whether it is smoothed or
        only has dots, its values, [steps], and the band around it. `chosen`: whether plots were asked for. `marks`: the
        step and the text of each symptom. `smooth`: the weight
        with which a slider begins.
        """
        (name, first), *others = self.runs.items()
        curves = draw.series(name, first.rows, {other: run.rows for other, run in others})
        chosen = keys or self.keys
        plots = (
            draw.pick(chosen, curves) if chosen else {t: w for t, w in draw.PANEL.items() if draw.recorded(curves, w)}
        )
        steps = np.unique(np.concatenate([run.steps for run in curves]))
        both = zip(curves, self.runs.values(), strict=True)
        return {
            "steps": steps.astype(int).tolist(),
            "runs": [
                {"name": label(line.name), "colour": line.colour, "traces": list(run.traces)} for line, run in both
            ],
            "plots": [
                {"title": label(title), "lines": _lines(wanted, curves, steps)} for title, wanted in plots.items()
            ],
            "chosen": bool(chosen),
            "marks": [{"step": int(mark.since), "text": label(mark, 400)} for mark in self.marks],
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


def _lines(wanted: Sequence[str], runs: Sequence[Series], steps: Array) -> list[dict[str, Any]]:
    """Return the lines of one plot. A single run's metrics differ by colour, those of several runs by dashes."""
    there, lines = lines_of(wanted, runs), []
    for place, name in enumerate(there):
        dots = name == HELD_OUT and len(there) > 1
        words = "held out" if dots else draw.LINE_WORDS.get(name, name.removeprefix("timing_s/"))
        for number, run in enumerate(runs):
            lines.append({
                "run": number,
                "words": label(words),
                "colour": draw.colour(place) if len(runs) == 1 and not dots else run.colour,
                "dash": place if len(runs) > 1 and not dots else 0,
                "smoothed": name not in draw.EXACT and not dots,
                "dots": dots,
                "values": _column(*run.points(name), steps),
                "band": _band(run, name, steps) if len(runs) == 1 == len({*there} - {HELD_OUT}) else None,
            })  # fmt: skip
    return lines


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
