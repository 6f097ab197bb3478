"""A cluster's table that goes on looking: a thread of its own reads what each worker says and sends what has changed.

It works while a cell runs (then nothing that a page asks is answered), and ends with its view, its cluster or its kernel.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import traitlets

from workbench.errors import EngineError, first_line
from workbench.widgets.layer import Layer

if TYPE_CHECKING:
    from workbench.cluster.status import Status

EVERY = 2.0
"""Seconds between looks."""
CALM = 20
"""A pause is so many times as long as the look before it: a cluster that answers slowly is asked seldom."""


class ClusterTable(Layer, script="cluster"):
    """`cluster.status()`, live: `face` is what stands there now."""

    face: Any = traitlets.Dict().tag(sync=True)

    def __init__(self, status: Status, every: float = EVERY) -> None:
        self._again = status.again
        self._every = every
        self._over = threading.Event()
        self._views: int | None = None
        super().__init__(face={"html": status._repr_html_(), "note": "", "live": True})
        self._thread = threading.Thread(target=self._work, name="workbench-cluster-table", daemon=True)
        self._thread.start()

    def look(self) -> bool:
        """Look once, and send it; False when there is nothing more to see. Never raises."""
        html, note, live = self.face["html"], "", self._again is not None
        try:
            if self._again is not None:
                html = self._again()._repr_html_()
        except EngineError:
            note, live = "the cluster is closed; this is how it last stood", False
        except Exception as error:  # noqa: BLE001 - busy or half-dead: said where the person looks, and tried again
            note = f"no answer: {first_line(error, 200)}"
        if not self._over.is_set():
            self.face = {"html": html, "note": note, "live": live}
        return live

    def _work(self) -> None:
        wait = self._every
        while not self._over.wait(wait):
            if self._views == 0:  # shut, or out of sight for the moment
                continue
            began = time.monotonic()
            if not self.look():
                self._over.set()
            wait = max(self._every, CALM * (time.monotonic() - began))

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """A view was opened or shut; while there is none, nothing is looked at."""
        self._views = max((self._views or 0) + (1 if asked["kind"] == "opened" else -1), 0)
        return {"kind": "heard"}

    def close(self) -> None:
        """End looking."""
        self._over.set()
        super().close()
