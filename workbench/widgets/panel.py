"""The face of a training cell in a live notebook: pause and stop, progress, curves.

Its state lives in the kernel, so that a reloaded page shows it alive again. The same mimebundle holds a static form
(HTML and text) for everybody who shows no widgets; when training ends the static form alone is left.
"""

from __future__ import annotations

import time
from typing import Any

import ipywidgets
from IPython.display import display

from workbench.runs.display import Block, Live
from workbench.views.html import bar, image, text_block

STATIC_EVERY = 30.0
"""Seconds between refreshes of the static form: each makes the front end draw the widget anew."""


class TrainingPanel(Live):
    """Progress and curves with buttons. The buttons set flags of the loop's `Control` and nothing else."""

    def open(self) -> None:
        """Make the widgets and put them into the cell."""
        self._png = b""
        self._over = False
        self._refreshed = time.monotonic()
        self._pause = ipywidgets.Button(description="pause", tooltip="wait after the step in hand", icon="pause")
        self._stop = ipywidgets.Button(description="stop", tooltip="end after the step in hand, with a checkpoint")
        self._pause.on_click(self._on_pause)
        self._stop.on_click(self._on_stop)
        self._bar = ipywidgets.HTML(bar(self.share, self.line))
        self._picture = ipywidgets.Image(format="png", layout=ipywidgets.Layout(max_width="100%", display="none"))
        buttons = ipywidgets.HBox([self._pause, self._stop])
        self._box = ipywidgets.VBox([buttons, self._bar, self._picture])
        self._handle: Any = display(self, display_id=True)

    def _on_pause(self, _: Any) -> None:
        if self.control.paused:
            self.control.resume()
        else:
            self.control.pause()
        self._pause.description = "go on" if self.control.paused else "pause"
        self._pause.icon = "play" if self.control.paused else "pause"

    def _on_stop(self, _: Any) -> None:
        self.control.stop()
        self._stop.disabled = self._pause.disabled = True
        self._stop.description = "stopping"

    def show(self, line: str, share: float) -> None:
        """Update the bar; now and then the static form as well."""
        self._bar.value = Block(line, share, self.notes())._repr_html_()
        if self._shown - self._refreshed >= STATIC_EVERY:
            self._refreshed = self._shown
            self._handle.update(self)

    def draw(self, png: bytes) -> None:
        """Update the curves."""
        self._png = png
        self._picture.value = png
        self._picture.layout.display = None

    def close(self, stopped: str | None = None) -> None:
        """The last state; the buttons go."""
        super().close(stopped)
        self._over = True
        self._pause.layout.display = self._stop.layout.display = "none"
        self._handle.update(self)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        """The widget while there is something to press, and always the static form."""
        block = Block(self.status(), self.share, self.notes())
        parts = [block._repr_html_()]
        if not self._over:
            where = f"wb.load_run({str(self.path)!r})" if self.path is not None else "the run folder"
            parts.append(text_block(f"As of this moment; {where} has the present state."))
        if self._png:
            parts.append(image(self._png, "curves"))
        static = {"text/html": "".join(parts), "text/plain": repr(block)}
        if self._over:
            return static
        view = {"version_major": 2, "version_minor": 0, "model_id": self._box.model_id}
        return {"application/vnd.jupyter.widget-view+json": view, **static}
