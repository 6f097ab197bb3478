"""What a training cell shows while it runs: progress as one HTML block with a text twin, and one PNG of the curves.

`Live` updates both in place by `display_id`, so that the executed notebook keeps the last state. In a notebook that a
person looks at, `widgets.TrainingPanel` takes its place: the same two with buttons, alive again after a page reload.
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
from typing import Any

from workbench.control import Control
from workbench.runs.folder import STEP, strict
from workbench.runs.recorder import progress_line
from workbench.runs.symptoms import Watch

log = logging.getLogger("workbench")

CURVES_EVERY = 6.0
BLOCK_EVERY = 1.0
HEARTBEAT = 20.0
"""Seconds after which something is shown even if no step has ended: a silent cell looks dead, and is saved by nobody."""


def in_notebook() -> bool:
    """Whether a kernel that can show things runs us; IPython is not imported to find out."""
    module = sys.modules.get("IPython")
    shell = module.get_ipython() if module is not None else None
    return shell is not None and hasattr(shell, "kernel")


def open_display(steps: int, rows: list[dict[str, Any]], control: Control, path: Path) -> Live | None:
    """None outside notebooks; static blocks in a job of ours, else the panel with buttons where ipywidgets is there."""
    if not in_notebook():
        return None
    if not os.environ.get("WORKBENCH_JOB"):
        try:
            from workbench.widgets.panel import TrainingPanel
        except ModuleNotFoundError:
            return Live(steps, rows, control, path)
        return TrainingPanel(steps, rows, control, path)
    return Live(steps, rows, control, path)


class Live:
    """Progress and curves of one run. `on_row` may be called on any thread."""

    def __init__(
        self, steps: int, rows: list[dict[str, Any]], control: Control | None = None, path: Path | None = None
    ) -> None:
        self.steps = steps
        self.rows = list(rows)
        self.control = control or Control()
        self.path = path
        self.line = "waiting for the first step"
        self.share = 0.0
        self._shown = self._drawn = 0.0
        self._since = 0.0
        self._said: tuple[bool, bool] = (False, False)
        self._watch = Watch(self.rows)
        self._figure: Any = None
        self.open()

    # --- what comes in --------------------------------------------------------------------------

    def on_row(self, row: Mapping[str, Any], eta: float) -> None:
        """One more metrics row; a step that is there already, and what followed it, gives way."""
        if self.rows and self.rows[-1][STEP] >= row[STEP]:
            self.rows = [one for one in self.rows if one[STEP] < row[STEP]]
            self._watch = Watch(self.rows)
        self.rows.append(strict(dict(row)))
        self._watch.look(self.rows[-1])
        self.line = progress_line(row, self.steps, eta)
        self.share = row[STEP] / max(self.steps, 1)
        now = self._since = time.monotonic()
        last = row[STEP] >= self.steps
        if last or now - self._shown >= BLOCK_EVERY:
            self._show(now)
        if last or now - self._drawn >= CURVES_EVERY:
            self._draw(now)

    async def watch(self) -> None:
        """Beside the loop: says that it is paused, and that a long step is still in hand."""
        while True:
            await asyncio.sleep(0.5)
            now = time.monotonic()
            asked = (self.control.paused, self.control.holding)
            if self._said != asked or now - self._shown >= HEARTBEAT:
                self._said = asked
                self._show(now)

    def close(self, stopped: str | None = None) -> None:
        """The last state, and why it ended where it was not at its end."""
        self._said = (False, False)
        if stopped is not None:
            self.line += f"  ·  {stopped}"
        now = self._since = time.monotonic()
        self._show(now)
        self._draw(now)

    # --- what goes out --------------------------------------------------------------------------

    def status(self) -> str:
        """The progress line, and what is to be known beside it."""
        waited = self._shown - self._since
        paused, holding = self._said
        if paused:
            return f"{self.line}  ·  {'paused' if holding else 'pausing after the step in hand'}"
        return f"{self.line}  ·  the next step is {waited:.0f} s in hand" if waited >= HEARTBEAT else self.line

    def notes(self) -> list[str]:
        """A line for each symptom so far, numbered as it is marked in the curves."""
        return [f"{number}  {one}" for number, one in enumerate(self._watch.marks, 1)]

    def _show(self, now: float) -> None:
        self._shown = now
        self._since = self._since or now  # the first step is in hand
        self.show(self.status(), self.share)

    def _draw(self, now: float) -> None:
        from workbench.views.curves import panel, png

        self._drawn = now
        if len(self.rows) < 2:
            return
        try:
            self._figure = panel(self.rows, marks=self._watch.marks, over=self._figure)
            self.draw(png(self._figure))
        except Exception:  # a picture is no reason to lose a run
            self._figure = None
            log.exception("the curves could not be drawn")

    def open(self) -> None:
        """Put the two displays into the cell."""
        from IPython.display import display

        self._block = display(Block(self.line, 0.0), display_id=True)
        self._image = display(Block("curves follow", 0.0), display_id=True)

    def show(self, line: str, share: float) -> None:
        """Update the block."""
        self._block.update(Block(line, share, self.notes()))

    def draw(self, png: bytes) -> None:
        """Update the curves."""
        from IPython.display import Image

        self._image.update(Image(png))


class Block:
    """A progress bar with its line, and what looks wrong, one line each."""

    def __init__(self, line: str, share: float, notes: Sequence[str] = ()) -> None:
        self._line, self._share, self._notes = line, share, list(notes)

    def __repr__(self) -> str:
        from workbench.views.html import terminal

        return terminal([self._line, *self._notes])

    def _repr_html_(self) -> str:
        from workbench.views.html import bar, text_block

        return bar(self._share, self._line) + "".join(text_block(note) for note in self._notes)


def tensorboard(path: Path) -> str:
    """Open TensorBoard on a run's folder, in the cell where a person looks; the command line that does it elsewhere.

    `%tensorboard` starts what stands first in PATH, which is not there where JupyterLab runs in another environment than
    the kernel: `TENSORBOARD_BINARY` is set to the kernel's own, unless it is set.
    """
    own = Path(sys.executable).with_name("tensorboard")
    if own.is_file():
        os.environ.setdefault("TENSORBOARD_BINARY", str(own))
    options = f"--logdir {shlex.quote(str(path))}"
    if in_notebook() and not os.environ.get("WORKBENCH_JOB"):
        shell = sys.modules["IPython"].get_ipython()
        shell.run_line_magic("load_ext", "tensorboard")
        shell.run_line_magic("tensorboard", options)
    return f"tensorboard {options}"
