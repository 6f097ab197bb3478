"""Weights that a sampler holds still while rows are drawn with them beside the learner's work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any


class Held:
    """From `Paired.hold()` until `release()` nobody pushes other weights to the sampler.

    What runs inside `drawing()`, on its thread and in what it awaits, samples with these weights and is told their
    version; everybody else who asks the pair for a sample of newer ones waits until they are let go.
    """

    def __init__(self, engine: Any, version: int, starts: int, let_go: Callable[[], None]) -> None:
        self.engine = engine
        self.version = version
        """Policy version of the weights."""
        self.starts = starts
        """Which start of the sampler's process holds them."""
        self._let_go = let_go

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Inside, the pair is a sampler of these weights."""
        before = _present.set(self)
        try:
            yield
        finally:
            _present.reset(before)

    def release(self) -> None:
        """Let the sampler follow the learner again; a second time does nothing."""
        self._let_go()


_present: ContextVar[Held | None] = ContextVar("workbench_held", default=None)


def present(engine: Any) -> Held | None:
    """The held weights that whoever asks draws with; None outside of `drawing()`."""
    held = _present.get()
    return held if held is not None and held.engine is engine else None
