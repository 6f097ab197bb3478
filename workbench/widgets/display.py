"""What a training cell shows while it runs: progress as an HTML block (and as text), and the curves as a PNG.

`LiveDisplay` updates both in place by `display_id`, so that the executed notebook keeps the last state. In a notebook that a
person looks at it is `TrainingPanel`: the same with buttons and curves to point at, which still work after a page reload.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from workbench.base import progress, runtime
from workbench.base.distribution import optional
from workbench.base.errors import PackageMissing, first_line
from workbench.base.runtime import Control
from workbench.base.shown import shows
from workbench.replay.run import Run, Traces
from workbench.runs.folder import STEP, goes_on, seconds_of, strict
from workbench.runs.symptoms import Symptom, Watch
from workbench.runs.trackers import append_line, progress_line
from workbench.views import curves
from workbench.views.document import Image, Part, View, bar, block, html, small
from workbench.views.plots import Growing, Plots

log = logging.getLogger("workbench")

CURVES_EVERY = 6.0
LIVE_EVERY = 2.0
"""Seconds between refreshes of the curves, drawn as a picture or by the page."""
STEPS_A_SECOND = 500
"""Steps whose curves are sent or drawn per second, at most: curves of a long run are refreshed less often."""
BLOCK_EVERY = 1.0
STATIC_EVERY = 30.0
"""Seconds between refreshes of the panel's static form, each with a picture of the curves."""
HEARTBEAT = 20.0
"""Seconds after which a static block is updated even if no step has ended, so that a cell shows that it works, and is
saved."""


def in_notebook() -> bool:
    """Return whether this process is a Jupyter kernel, without importing IPython."""
    module = sys.modules.get("IPython")
    shell = module.get_ipython() if module is not None else None
    return shell is not None and hasattr(shell, "kernel")


def open_display(steps: int, rows: list[dict[str, Any]], control: Control, path: Path) -> LiveDisplay | None:
    """Open the display of a training: a `TrainingLine` outside notebooks, a static `LiveDisplay` in a job, else a
    `TrainingPanel`.
    """
    kinds = (LiveDisplay,) if os.environ.get("WORKBENCH_JOB") else (TrainingPanel, LiveDisplay)
    for kind in kinds if in_notebook() else (TrainingLine,):
        try:
            return kind(steps, rows, control, path)
        except PackageMissing as error:
            log.warning("%s cannot be shown: %s", kind.__name__, first_line(error))
        except Exception:  # another version of a library: a display is no reason to lose a run
            log.exception("%s cannot be shown", kind.__name__)
    return None


def working_cell() -> progress.Show | None:
    """Show the progress of work in the cell that waits for it, and for a job also in its terminal; None outside
    notebooks. An executed notebook keeps the last line.
    """
    if not in_notebook():
        return None
    from IPython.display import display

    handle: Any = display(Block(""), display_id=True)
    log = progress.seldom(append_line)

    def show(line: str, share: float, over: bool) -> None:
        stops = "stopping at the next safe place" if runtime.stopping() else "■ stops it"
        handle.update(Block(small(line) if over else bar(share, f"{line} · {stops}")))
        log(line, share, over)

    return show


class Block(View):
    """A view of progress: its parts, such as a bar with a line of text while work runs, and the symptoms so far."""

    def __init__(self, *parts: Part) -> None:
        self._parts = parts

    def document(self) -> Part:
        """Build the display."""
        return self._parts


class LiveDisplay:
    """Progress and curves of one run, updated in place in a notebook's cell. `on_row` may be called from any thread."""

    heartbeat = HEARTBEAT

    def __init__(
        self, steps: int, rows: list[dict[str, Any]], control: Control | None = None, path: Path | None = None
    ) -> None:
        self.steps, self.rows, self.path = steps, list(rows), path
        self.control = control or Control()
        done = self.rows[-1][STEP] if self.rows else 0
        self.line = f"goes on after step {done}/{steps}" if done else "waiting for the first step"
        self.share = done / max(steps, 1)
        self._shown = self._drawn = 0.0
        self._said = (False, False, False)
        self._over = False
        self._watch = Watch(self.rows)
        self.open()

    # --- what comes in --------------------------------------------------------------------------

    def on_row(self, row: Mapping[str, Any], eta: float) -> None:
        """Add a step's metrics and update the display; rows of this step or later ones are replaced. `eta` is the
        seconds left.
        """
        if self.rows and self.rows[-1][STEP] >= row[STEP]:
            self.rows = [one for one in self.rows if one[STEP] < row[STEP]]
            self._watch = Watch(self.rows)
        self.rows.append(strict(dict(row)))
        self._watch.look(self.rows[-1])
        self.line = progress_line(row, self.steps, eta)
        self.share = row[STEP] / max(self.steps, 1)
        now = time.monotonic()
        last = row[STEP] >= self.steps
        if last or now - self._shown >= BLOCK_EVERY:
            self._show(now)
        if last or now - self._drawn >= max(self.every(), len(self.rows) / STEPS_A_SECOND):
            self._draw(now)

    def every(self) -> float:
        """Return the seconds between refreshes of the curves."""
        return CURVES_EVERY

    async def watch(self) -> None:
        """Show, beside the training loop and until its end, that the loop is paused or stops, or that a long step is
        still running.
        """
        while not self._over:
            await asyncio.sleep(0.25)
            now = time.monotonic()
            wishes = (self.control.paused, self.control.holding, self.control.stopping)
            if self._said != wishes or now - self._shown >= self.heartbeat:
                if self._said != wishes:  # who pauses wants to see all that there is
                    self._draw(now)
                self._said = wishes
                self._show(now)

    def close(self, stopped: str | None = None) -> None:
        """Show the final state, with the reason `stopped` if the run was stopped."""
        self._said, self._over = (False, False, False), True
        if stopped is not None:
            self.line = f"{self.line.partition('  eta ')[0]}  ·  {stopped}" if self.rows else stopped
        elif self.rows:
            where = [] if self.path is None else [str(self.path)]
            spent = f"{progress.clock(seconds_of(self.rows))} in steps"
            self.line = "  ·  ".join(["finished", self.line, spent, *where])
        now = time.monotonic()
        self._show(now)
        self._draw(now)

    # --- what goes out --------------------------------------------------------------------------

    def status(self) -> str:
        """Return the progress line, a note if the run is paused or stops, and what runs now for longer than a second."""
        paused, holding, stopping = self._said
        note = ("paused" if holding else "pauses when this step ends") if paused else ""
        if stopping:
            dropped = "stops within seconds: this step is dropped if it cannot end, the steps before it are kept"
            note = dropped if self.control.interrupted else "stops when this step ends"
        return "  ·  ".join(filter(None, (self.line, note, "" if holding else progress.now())))

    @property
    def marks(self) -> list[Symptom]:
        """The symptoms of failing training found so far."""
        return list(self._watch.marks)

    def notes(self) -> list[str]:
        """Return one line for each symptom found so far, beginning with the number that marks it in the curves."""
        return [f"{number}  {one}" for number, one in enumerate(self.marks, 1)]

    def _show(self, now: float) -> None:
        self._shown = now
        self.show(self.status(), self.share)

    def _draw(self, now: float) -> None:
        self._drawn = now
        if picture := self.picture():
            self.draw(picture)

    def picture(self) -> bytes:
        """Draw the curves as a PNG, without the list of symptoms, which the block above has; b"" before the second step, and where they cannot be drawn."""
        if len(self.rows) < 2:
            return b""
        try:
            return curves.png(curves.panel(self.rows, marks=self._watch.marks, listed=False))
        except Exception:  # a picture is no reason to lose a run
            log.exception("the curves could not be drawn")
            return b""

    def open(self) -> None:
        """Display the progress block in the cell, and below it a place for the curves."""
        from IPython.display import display

        self._block = display(Block(bar(0.0, self.line)), display_id=True)
        self._image = display(Block(bar(0.0, "curves follow")), display_id=True)

    def show(self, line: str, share: float) -> None:
        """Update the progress block: its text `line`, its bar filled to `share` (0 to 1), and the symptoms."""
        self._block.update(Block(bar(share, line), self.notes()))

    def draw(self, png: bytes) -> None:
        """Replace the displayed curves by a PNG."""
        from IPython import display

        self._image.update(display.Image(png))


class TrainingLine(LiveDisplay):
    """Progress of a run as a line on standard error, for scripts."""

    heartbeat = LIVE_EVERY

    def open(self) -> None:
        """Open the progress line on standard error."""
        self._line = progress.on_stderr()

    def picture(self) -> bytes:
        """Return b"": a line has no picture."""
        return b""

    def show(self, line: str, share: float) -> None:
        """Replace the progress line by `line`."""
        self._line(line, share, False)

    def close(self, stopped: str | None = None) -> None:
        """Keep the last progress line, with the reason `stopped` if the run was stopped."""
        super().close(stopped)
        self._line(self.line, self.share, True)


class Progress(NamedTuple):
    """The rows and traces so far of a run that is being trained in this process."""

    rows: Sequence[Mapping[str, Any]]
    traces: Mapping[int, Any]


class TrainingPanel(LiveDisplay):
    """Progress and curves with pause and stop buttons, which only set flags of the loop's `Control`.

    The widget's state is in the kernel, so that it works again in a reloaded page. An output before it holds the static form,
    with the curves as a picture; when training ends, or the kernel does, only the static form is seen.
    """

    heartbeat = BLOCK_EVERY

    def open(self) -> None:
        """Make the buttons, the progress bar and the curves, and display them in the cell."""
        from IPython.display import display

        with optional("widgets", "the buttons of a training"):
            import ipywidgets

        self._refreshed = time.monotonic()
        self._pause = ipywidgets.Button(description="pause", tooltip="pause after the present step", icon="pause")
        self._stop = ipywidgets.Button(description="stop", tooltip="end after the present step, save a checkpoint")
        self._pause.on_click(self._on_pause)
        self._stop.on_click(self._on_stop)
        self._bar = ipywidgets.HTML(Block(bar(self.share, self.line)).html())
        growing = Growing(self._plots)
        self._curves, self._cover = shows(growing, "widget"), shows(growing, "cover")
        if self.path is not None:  # the cell itself would be refused: there is a run in its folder
            self._cover.again = f"continue with {goes_on(self.path)}"
        buttons = ipywidgets.HBox([self._pause, self._stop])
        self._box = ipywidgets.VBox([self._cover, buttons, self._bar, self._curves])
        self._handle: Any = display(self, display_id=True)
        self._seen: Any = display(PanelOutput(self._box.model_id), display_id=True)

    def _plots(self) -> Plots:
        """Return the curves so far; the samples of a recorded step can be opened from them."""
        traces = Traces(self.path / "traces") if self.path is not None else {}
        return Plots({"this run": Progress(list(self.rows), traces)}, marks=self.marks)

    def _on_pause(self, _: Any) -> None:
        change = self.control.resume if self.control.paused else self.control.pause
        change()
        self._pause.description, self._pause.icon = ("go on", "play") if self.control.paused else ("pause", "pause")

    def _on_stop(self, _: Any) -> None:
        self.control.stop()
        self._stop.disabled = self._pause.disabled = True
        self._stop.description = "stopping"

    def show(self, line: str, share: float) -> None:
        """Update the progress bar, and at most every `STATIC_EVERY` seconds the static form."""
        self._bar.value = Block(bar(share, line)).html()  # the curves list the symptoms
        if self._shown - self._refreshed >= STATIC_EVERY:
            self._refreshed = self._shown
            self._handle.update(self)
            self._cover.renewed += 1

    def every(self) -> float:
        """Return the seconds between refreshes of the curves, which the page draws without a picture."""
        return LIVE_EVERY

    def _draw(self, now: float) -> None:
        self._drawn = now
        self._curves.version += 1

    def close(self, stopped: str | None = None) -> None:
        """Show the final state, as the static form without buttons."""
        super().close(stopped)
        self._pause.layout.display = self._stop.layout.display = "none"  # a page that was reloaded keeps the panel
        self._seen.update(PanelOutput(""))
        self._handle.update(self)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        """Return the static form: progress, symptoms and the curves as a picture."""
        shown = Block(bar(self.share, self.status()), self.notes())
        where = f"wb.load_run({str(self.path)!r})" if self.path is not None else "the run folder"
        moment = () if self._over else block(f"The state when the notebook was saved; {where} has the present state.")
        drawn = self.picture()
        picture = Image(lambda: drawn, "curves") if drawn else ()
        form = html((shown.document(), moment, picture))
        return {"text/html": f'<div class="workbench-static">{form}</div>', "text/plain": repr(shown)}


class PanelOutput(NamedTuple):
    """An output that displays the widget with this id, or nothing for ""; a page that cannot draw the widget shows
    nothing.
    """

    model_id: str

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        view = {"version_major": 2, "version_minor": 0, "model_id": self.model_id}
        shown = {"application/vnd.jupyter.widget-view+json": view} if self.model_id else {}
        return {**shown, "text/html": "", "text/plain": ""}


def run_tensorboard(run: Run) -> str:
    """Open TensorBoard on a run's folder in a live notebook's cell; return its command line, there and elsewhere."""
    # `%tensorboard` starts the first one in PATH, and there may be none where JupyterLab runs in another environment than
    # the kernel: it is told of the kernel's own, unless it is told another already
    own = Path(sys.executable).with_name("tensorboard")
    if own.is_file():
        os.environ.setdefault("TENSORBOARD_BINARY", str(own))
    options = f"--logdir {shlex.quote(str(run.path))}"
    if in_notebook() and not os.environ.get("WORKBENCH_JOB"):
        shell = sys.modules["IPython"].get_ipython()
        shell.run_line_magic("load_ext", "tensorboard")
        shell.run_line_magic("tensorboard", options)
    return f"tensorboard {options}"


def run_live(run: Run, steps: int) -> LiveDisplay:
    """Display the progress of a run that another process trains; the caller passes new metrics rows to `on_row`."""
    return LiveDisplay(steps, run.rows)
