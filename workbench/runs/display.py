"""What a training cell shows while it runs: one HTML block with a text twin, and one PNG of the curves.

Both are updated in place by `display_id`, so that the executed notebook keeps the last state; the block at most
once a second, the curves every few seconds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

from workbench.runs.folder import STEP
from workbench.runs.recorder import progress_line

CURVES_EVERY = 6.0
BLOCK_EVERY = 1.0


def in_notebook() -> bool:
    """Whether a kernel that can show things runs us; IPython is not imported to find out."""
    module = sys.modules.get("IPython")
    shell = module.get_ipython() if module is not None else None
    return shell is not None and hasattr(shell, "kernel")


class Live:
    """Progress and curves of one run."""

    def __init__(self, steps: int, rows: list[dict[str, Any]]) -> None:
        from IPython.display import display

        self._steps = steps
        self._rows = list(rows)
        self._shown = self._drawn = 0.0
        self._line = "waiting for the first step"
        self._block = display(_Block(self._line, 0.0), display_id=True)
        self._image = display(_Block("curves follow", 0.0), display_id=True)

    def on_row(self, row: Mapping[str, Any], eta: float) -> None:
        """One more metrics row."""
        self._rows.append(dict(row))
        self._line = progress_line(row, self._steps, eta)
        share = row[STEP] / max(self._steps, 1)
        now = time.monotonic()
        last = row[STEP] >= self._steps
        if last or now - self._shown >= BLOCK_EVERY:
            self._block.update(_Block(self._line, share))
            self._shown = now
        if last or now - self._drawn >= CURVES_EVERY:
            self._draw()
            self._drawn = now

    def _draw(self) -> None:
        from IPython.display import Image

        from workbench.views.curves import panel, png

        if len(self._rows) > 1:
            self._image.update(Image(png(panel(self._rows))))


class _Block:
    """A progress bar with its line."""

    def __init__(self, line: str, share: float) -> None:
        self._line, self._share = line, share

    def __repr__(self) -> str:
        return self._line

    def _repr_html_(self) -> str:
        from workbench.views.html import bar

        return bar(self._share, self._line)
