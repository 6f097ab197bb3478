"""What a worker holds when an engine stands in it: the engine, and the questions that are out."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from workbench import background
from workbench.engines.classifier import classifier
from workbench.engines.local_engine import local
from workbench.engines.vllm import vllm
from workbench.engines.vllm_classifier import vllm_classifier
from workbench.errors import EngineError, WorkbenchError, first_line

KINDS: dict[str, Callable[..., Any]] = {
    "local": local,
    "vllm": vllm,
    "classifier": classifier,
    "vllm_classifier": vllm_classifier,
}
GATHER_SECONDS = 0.005
"""Answers that come so soon after the first are sent with it."""

Question = tuple[int, str, Any]
"""Number, method of the engine, its argument."""
Answer = tuple[int, Any]
"""Number, and what came of it: an exception in the place of a value."""


def host(rank: int, size: int, *, kind: str, path: str, settings: Mapping[str, Any], threads: int = 0) -> Host:
    """The factory for `Ranks`: one engine of `KINDS` on a rank."""
    if threads:
        torch.set_num_threads(threads)
    return Host(KINDS[kind](path, **settings))


class Host:
    """Questions in, answers out as they are ready: whoever asks never waits for the slowest of a batch."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._out: dict[int, asyncio.Task[None]] = {}
        self._ended: queue.SimpleQueue[Answer] = queue.SimpleQueue()

    def about(self) -> dict[str, Any]:
        """What the engine is: its tokenizer, longest sequence, record and description."""
        return {
            "tokenizer": self._engine.tokenizer,
            "template_switches": getattr(self._engine, "template_switches", {}),
            "max_length": self._engine.max_length,
            "record": self._engine.describe(),
            "text": repr(self._engine),
        }

    def exchange(self, asked: Sequence[Question], given_up: Sequence[int], seconds: float) -> list[Answer]:
        """Ask these, drop those, and what has been answered: at once where something has, else within `seconds`."""
        for number in given_up:
            task = self._out.pop(number, None)
            if task is not None:
                background.loop().call_soon_threadsafe(task.cancel)
        if asked:  # all in one go: an engine that gathers waves must see those that come together together
            background.run(self._start(asked))
        return self._answered(seconds)

    async def _start(self, asked: Sequence[Question]) -> None:
        for number, method, argument in asked:
            self._out[number] = asyncio.create_task(self._answer(number, method, argument))

    async def _answer(self, number: int, method: str, argument: Any) -> None:
        try:
            outcome = await getattr(self._engine, method)(argument)
        except WorkbenchError as error:
            outcome = error
        except Exception as error:  # noqa: BLE001 - the driver raises it to whoever asked
            outcome = EngineError(first_line(error))
        self._ended.put((number, outcome))

    def _answered(self, seconds: float) -> list[Answer]:
        found: list[Answer] = []
        while True:
            try:
                number, outcome = self._ended.get(timeout=GATHER_SECONDS if found else seconds)
            except queue.Empty:
                return found
            if self._out.pop(number, None) is not None:  # else it was given up
                found.append((number, outcome))

    def load_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """New weights, and their version."""
        self._engine.load_weights(weights, version)

    def sleep(self) -> None:
        """Give the device's memory back."""
        self._engine.sleep()

    def wake(self) -> None:
        """Take it again."""
        self._engine.wake()

    def leave(self) -> None:
        """The end."""
        if hasattr(self._engine, "close"):
            self._engine.close()
