"""The widget over a run's curves: uPlot draws them in the page, and a clicked point opens the step's samples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import traitlets

from workbench.widgets.layer import Layer, name_of

if TYPE_CHECKING:
    from workbench.views.plots import Plots


class Drawn(Protocol):
    """A figure of curves, `views.curves.Live`: of a run that goes on, `plots` are those of the moment."""

    alone: bool

    @property
    def plots(self) -> Plots:
        """What is drawn."""


class CurvePlots(Layer):
    """The widget of a figure of curves: its script asks for all `columns`, again when `version` changes, and for the `samples`
    of a run's step."""

    script = "curves"
    library = "uplot/uPlot"

    version = traitlets.Int().tag(sync=True)
    """Counts the times that the curves went on."""
    alone = traitlets.Bool().tag(sync=True)
    """Whether no static form lies above it, which it would hide."""

    def __init__(self, figure: Drawn) -> None:
        self._figure = figure
        super().__init__(alone=figure.alone)

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """The reply: the columns (`keys`: those of other metrics), or a step's samples as HTML with the code that shows them."""
        plots = self._figure.plots
        if asked["kind"] == "columns":
            return {"kind": "columns", **plots.columns(tuple(map(str, asked.get("keys") or ())))}
        number, step = int(asked["run"]), int(asked["step"])
        html = plots.samples(number, step)._repr_html_()
        code = f"wb.views.samples({name_of(list(plots.runs.values())[number], 'run')}.traces[{step}])"
        return {"kind": "samples", "html": html, "code": code}
