"""The widget over a run's curves: uPlot draws them in the page, and a clicked point opens the step's samples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from workbench.widgets.layer import Layer, name_of

if TYPE_CHECKING:
    from workbench.views.curves import Live
    from workbench.views.plots import Plots


class CurvePlots(Layer, script="curves", library="uplot/uPlot"):
    """The widget of a figure of curves: its script asks once for all `columns`, and for the `samples` of a run's step."""

    def __init__(self, figure: Live) -> None:
        self._plots: Plots = figure.plots
        super().__init__()

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """The reply: the columns, or a step's samples as HTML with the line of code that shows them."""
        if asked["kind"] == "columns":
            return {"kind": "columns", **self._plots.columns()}
        number, step = int(asked["run"]), int(asked["step"])
        html = self._plots.samples(number, step)._repr_html_()
        code = f"wb.views.samples({name_of(list(self._plots.runs.values())[number], 'run')}.traces[{step}])"
        return {"kind": "samples", "html": html, "code": code}
