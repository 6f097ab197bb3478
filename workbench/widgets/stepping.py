"""Buttons for a stepper: next, back, run until; each shows the line of code that it stands for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import traitlets

from workbench.widgets.layer import Layer

if TYPE_CHECKING:
    from workbench.stepper import Stepper


class StepperFace(Layer, script="stepping"):
    """The stepper's own view, and what moves it. The stepper is the same object that the notebook has."""

    names: Any = traitlets.List().tag(sync=True)

    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper
        super().__init__(names=list(stepper.pipeline.names))

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Do it, and say how the stepper looks now."""
        code = ""
        stepper = self._stepper
        if asked["kind"] == "next":
            stepper.next()
            code = "s.next()"
        elif asked["kind"] == "back":
            stepper.back()
            code = "s.back()"
        elif asked["kind"] == "run":
            until = str(asked["until"])
            if stepper.pipeline.index(until) < stepper.position:
                stepper.back(to=until)
                code = f's.back(to="{until}")'
            else:
                stepper.run(until=until)
                code = f's.run(until="{until}")'
        return {
            "kind": "face",
            "html": stepper._repr_html_(),
            "code": code,
            "position": stepper.position,
            "upcoming": stepper.upcoming,
        }
