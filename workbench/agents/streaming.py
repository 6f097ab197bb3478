"""Answers sent while they are sampled: tokens become the pieces of text that later tokens cannot change."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

from workbench.base import runtime
from workbench.engines.http.openai_form import Reply, TextPiece

Settled = Callable[[list[int]], tuple[str, str]]
"""Token ids of an answer so far → (its reasoning, its content), as far as later tokens cannot change them."""
_CALL = re.compile(r"[<\[{`|＜◁]")
"""Characters with which a tool call may begin, in the formats of parsers that have a `call_form`."""
_NAMES = ("reasoning_content", "content")


class Live:
    """Answers that are being sampled; another thread than the one that samples reads their pieces of text."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[int, int] | None] = SimpleQueue()
        self._id = ""
        self._settled: Settled = lambda ids: ("", "")

    def begin(self, id: str, settled: Settled) -> None:
        """Store the reply's id and the function that turns its tokens into text, before the first token."""
        self._id, self._settled = id, settled

    def listener(self, number: int) -> Callable[[int], None]:
        """Return the function that receives the tokens of answer `number` one by one (`Request.listen`)."""
        return lambda token: self._queue.put((number, token))

    def pieces(self, work: Any) -> Iterator[TextPiece | Reply]:
        """Start the coroutine `work`, which returns the reply, and return its pieces, then the reply.

        Waits for the first token or the end; what `work` raises before is raised here. Closing the iterator cancels `work`.
        """
        future: Future[Reply] = asyncio.run_coroutine_threadsafe(work, runtime.loop())
        future.add_done_callback(lambda _: self._queue.put(None))
        first = self._queue.get()
        if first is None:
            future.result()
        return self._rest(first, future)

    def _rest(self, first: tuple[int, int] | None, future: Future[Reply]) -> Iterator[TextPiece | Reply]:
        ids: dict[int, list[int]] = {}
        sent: dict[tuple[int, str], str] = {}
        try:
            item = first
            while item is not None:
                ids.setdefault(item[0], []).append(item[1])
                if self._queue.empty():  # else one text for all that has come
                    for number, tokens in ids.items():
                        for name, text in zip(_NAMES, self._settled(tokens), strict=True):
                            yield from self._piece(sent, number, name, text)
                item = self._queue.get()
            reply = future.result()
            for number, answer in enumerate(reply.answers):
                for name in _NAMES:
                    yield from self._piece(sent, number, name, answer.message.get(name) or "")
            yield reply
        finally:
            future.cancel()

    def _piece(self, sent: dict[tuple[int, str], str], number: int, name: str, text: str) -> Iterator[TextPiece]:
        before = sent.get((number, name), "")
        if len(text) > len(before) and text.startswith(before):
            sent[number, name] = text
            yield TextPiece(self._id, number, name, text[len(before) :])


def held_back(text: str, marks: Collection[str]) -> str:
    """Return a text without an unfinished character at its end, and without an end that may be the beginning of a mark."""
    text = text.rstrip("\ufffd")
    for start in range(max(0, len(text) - max(map(len, marks), default=0)), len(text)):
        if any(mark.startswith(text[start:]) for mark in marks):
            return held_back(text[:start], marks)  # there may be another before it
    return text


def before_calls(text: str, form: str) -> str:
    """Return the part of a text before its first tool call, for a parser with this `call_form`; "" where the form is
    not known.
    """
    call = _CALL.search(text)
    return "" if not form or text[:1].isspace() else text[: call.start() if call else None].rstrip()
