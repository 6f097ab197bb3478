"""Buttons for an episode: next, back, run, say; each shows the line of code that it stands for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import traitlets

from workbench.widgets.layer import Layer, name_of

if TYPE_CHECKING:
    from workbench.agents import EpisodeStepper


class EpisodeFace(Layer, script="episodes"):
    """The episode's own view, and what moves it. The episode is the same object that the notebook has."""

    face: Any = traitlets.Dict().tag(sync=True)
    """What stood there when the cell ended."""

    def __init__(self, episode: EpisodeStepper) -> None:
        self._episode = episode
        super().__init__(face=self._face())

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Do it, and say how the episode looks now. A face that shows another transcript than the episode's is only drawn anew:
        cells and other faces move it, too."""
        if asked["kind"] != "look" and asked.get("stands") != self._stands():
            return self._face(note="the episode stands elsewhere by now")
        return self._face(self._move(asked))

    def _face(self, code: str = "", note: str = "") -> dict[str, Any]:
        episode = self._episode
        return {
            "kind": "face",
            "html": episode._repr_html_(),
            "code": code,
            "note": note,
            "stands": self._stands(),
            "turns": [{"role": turn.role, "text": turn.text} for turn in episode.turns],
            "upcoming": episode.upcoming,
        }

    def _stands(self) -> str:
        """What tells one transcript from another."""
        return f"{self._episode.upcoming} {hash(self._episode.output.response_ids)} {len(self._episode.turns)}"

    def _move(self, asked: dict[str, Any]) -> str:
        """The line of code for what was asked, after doing that."""
        episode, name, kind = self._episode, name_of(self._episode, "e"), asked["kind"]
        if kind in ("next", "run"):
            getattr(episode, kind)()
            return f"{name}.{kind}()"
        if kind == "back":
            to = int(asked["turn"])
            episode.back(to=to)
            return f"{name}.back(to={to})"
        if kind == "say":
            text, turn = str(asked["text"]), asked.get("turn")
            if turn is not None:
                episode.back(to=int(turn))
            # answers to several calls: a line each
            said = text.split("\n") if len(episode.asked) > 1 else text
            episode.say(said)
            return f"{name}.say({said!r})" if turn is None else f"{name}.replace({turn}, {said!r})"
        return ""
