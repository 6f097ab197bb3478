"""Buttons for a stepper: next, back, run until; each shows the line of code that it stands for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import traitlets

from workbench.widgets.layer import Layer, name_of

if TYPE_CHECKING:
    from workbench.stepper import Stepper


class StepperFace(Layer, script="stepping"):
    """The stepper's own view, and what moves it. The stepper is the same object that the notebook has."""

    names: Any = traitlets.List().tag(sync=True)
    face: Any = traitlets.Dict().tag(sync=True)
    """What stood there when the cell ended."""

    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper
        super().__init__(names=list(stepper.pipeline.names), face=self._face())

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Do it, and say how the stepper looks now. A face that shows another place than the stepper's is only drawn anew:
        cells and other faces move it, too."""
        stepper, code, note = self._stepper, "", ""
        if asked["kind"] != "look" and asked.get("position") != stepper.position:
            note = "the stepper stands elsewhere by now"
        else:
            code = self._move(asked)
        return self._face(code, note)

    def _face(self, code: str = "", note: str = "") -> dict[str, Any]:
        return {
            "kind": "face",
            "html": self._stepper._repr_html_(),
            "code": code,
            "note": note,
            "position": self._stepper.position,
            "upcoming": self._stepper.upcoming,
        }

    def _move(self, asked: dict[str, Any]) -> str:
        """The line of code for what was asked, after doing that."""
        stepper, name = self._stepper, name_of(self._stepper, "s")
        if asked["kind"] == "next":
            stepper.next()
            return f"{name}.next()"
        if asked["kind"] == "back":
            stepper.back()
            return f"{name}.back()"
        if asked["kind"] == "run":
            stepper.run(until=str(asked["phase"]))
            return f'{name}.run(until="{asked["phase"]}")'
        if asked["kind"] == "back to":
            stepper.back(to=str(asked["phase"]))
            return f'{name}.back(to="{asked["phase"]}")'
        return ""
