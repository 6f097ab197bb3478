"""How a widget lies over the static form of the same thing.

The static form (HTML and text, made by `views`) is an output of its own, and so is the widget; where the widget's script runs
it hides the static output above it. One mimebundle with both would be tidier, but a front end that trusts the notebook
draws the widget's half alone, and when the kernel has gone that is an error message in place of the table
(docs/decisions/012).
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anywidget
from IPython.display import display

from workbench.errors import first_line
from workbench.runs.display import in_notebook

STATIC = "workbench-static"
"""Class of the wrapper that the scripts look for."""
MOST = 24
"""Widgets that are alive at once: each holds what it shows, a stepper with its snapshots, say."""
_alive: deque[Layer] = deque()
_SCRIPTS = Path(__file__).parent / "static"


def static_bundle(thing: Any) -> dict[str, str]:
    """The mimebundle that needs no kernel and no script."""
    return {"text/html": f'<div class="{STATIC}">{thing._repr_html_()}</div>', "text/plain": repr(thing)}


def live() -> bool:
    """Whether somebody may click: a kernel, and not a job of ours."""
    return in_notebook() and not os.environ.get("WORKBENCH_JOB")


def show(thing: Any, widget: Callable[[], Any]) -> None:
    """Display the static form, and in a live notebook the widget over it."""
    if not in_notebook():
        display({"text/plain": repr(thing)}, raw=True)
        return
    display(static_bundle(thing), raw=True)
    if live():
        layer = widget()
        _alive.append(layer)
        if len(_alive) > MOST:
            _alive.popleft().close()  # the static form beneath it comes back
        view = {"version_major": 2, "version_minor": 0, "model_id": layer.model_id}
        # nothing beside the view: what cannot draw it has the static form above
        display({"application/vnd.jupyter.widget-view+json": view, "text/html": "", "text/plain": ""}, raw=True)


class Layer(anywidget.AnyWidget):
    """A widget whose script asks and whose `answer` replies: pages of data travel as messages, never as state."""

    _esm: Any = ""
    _css: Any = ""

    def __init_subclass__(cls, script: str = "", **options: Any) -> None:
        if script:
            cls._esm = script_text("common.js") + script_text(f"{script}.js")
            cls._css = script_text("style.css")
        super().__init_subclass__(**options)

    def __init__(self, **traits: Any) -> None:
        super().__init__(**traits)
        self.on_msg(self._on_message)

    def _on_message(self, _: Any, content: Any, buffers: Any) -> None:
        try:
            reply = self.answer(dict(content))
        except KeyboardInterrupt:  # said, so that nobody waits for an answer, and then let through
            self.send({"kind": "error", "text": "interrupted", "asked": content.get("asked")})
            raise
        except Exception as error:  # noqa: BLE001 - said where the person looks
            reply = {"kind": "error", "text": first_line(error, 400)}
        self.send({**reply, "asked": content.get("asked")})

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """What to say to a message."""
        raise NotImplementedError


def script_text(name: str) -> str:
    """A file of `widgets/static`."""
    return (_SCRIPTS / name).read_text()


def name_of(thing: Any, otherwise: str) -> str:
    """What the notebook calls it; `otherwise` where it has no name."""
    names = vars(sys.modules["__main__"]).items()
    return next((name for name, value in names if value is thing and not name.startswith("_")), otherwise)
