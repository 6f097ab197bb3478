"""The widget of a `Chat`: a field to write in, the models' answers beside each other while they are sampled, and buttons."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from workbench.base.errors import Interrupted
from workbench.base.shown import plain
from workbench.views import document as doc
from workbench.views.chats import answer_tokens
from workbench.widgets.layer import Face, name_of, static_form

if TYPE_CHECKING:
    from workbench.replay.chat import Chat

_NUMBERS = {"temperature": float, "top_p": float, "max_tokens": int}
_WORK = {"ask": "answering", "again": "answering", "score": "scoring"}


class ChatFace(Face):
    """The widget of a `Chat`: ask, ask again, a new chat, score, keep, and the tokens of an answer.

    While an answer is sampled its text is sent on the way. After each press the static form is renewed, which a saved notebook keeps.
    """

    script = "chat"
    noun = "chat"
    renews = True

    def work(self, request: dict[str, Any]) -> str:
        """Return what a button makes the kernel do (the models answer, or their answers are scored); "" for other
        buttons.
        """
        return _WORK.get(request["kind"], "") if request.get("stands") == self._stands() else ""

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Do what a button asks, and return the new view; of an answer's tokens their HTML alone."""
        if request["kind"] == "tokens":
            chat: Chat = self._stepped
            side = str(request["side"])
            shown = answer_tokens(chat.turns[int(request["turn"])].answers[side], chat.sides[side].tokenizer)
            return {"kind": "tokens", "html": doc.html(shown)}
        try:
            return super().answer(request)
        except Interrupted:
            return self._face(note="stopped")
        finally:
            if self.form is not None and request["kind"] != "look":
                self.form.update(static_form(self._stepped), raw=True)

    def _face(self, code: str = "", note: str = "") -> dict[str, Any]:
        chat: Chat = self._stepped
        turns = [
            {"text": plain(turn.text), "truth": turn.truth, "answers": {
                side: {"text": plain(answer.text), "note": plain(answer.note), "whole": answer.batch is not None}
                for side, answer in turn.answers.items()
            }} for turn in chat.turns
        ]  # fmt: skip
        settings = {name: getattr(chat.sampling, name) for name in _NUMBERS} | {"system": chat.system}
        view = {
            "kind": "face",
            "code": code,
            "note": note,
            "stands": self._stands(),
            "turns": turns,
            "settings": settings,
        }
        about = {"labels": chat.labels, "notes": chat.notes, "kept": len(chat.kept), "scores": chat.reward is not None}
        return {**view, **about}

    def _stands(self) -> str:
        return f"{self._stepped.drawn} {hash(repr(self._stepped))}"

    def _move(self, request: dict[str, Any]) -> str:
        chat, kind, changed = self._stepped, request["kind"], dict[str, Any]()
        takes = {"ask": "text", "score": "truth", "keep": "side"}
        texts = [str(request[takes[kind]])] if kind in takes and request[takes[kind]] else []
        options: dict[str, Any] = {}
        if kind in ("ask", "again"):
            chat.system, options = str(request["system"]), {"on_text": self._on_text}
            chosen = {key: read(request[key]) for key, read in _NUMBERS.items()}
            changed = {key: value for key, value in chosen.items() if value != getattr(chat.sampling, key)}
        elif kind not in (*takes, "clear"):
            return ""
        getattr(chat, kind)(*texts, **changed, **options)
        words = [*map(repr, texts), *(f"{key}={value}" for key, value in changed.items())]
        return f"{name_of(chat, 'chat')}.{kind}({', '.join(words)})"

    def _on_text(self, side: str, text: str) -> None:
        self.send({"kind": "text", "side": side, "text": plain(text)})
