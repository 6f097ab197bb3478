"""What a person, or a signal, may ask of a running loop: pause, go on, stop.

The asking only sets flags, so that a button's callback may do it on any thread; the loop looks at them between steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from typing import TypeVar

from workbench.background import interrupting
from workbench.errors import Interrupted

T = TypeVar("T")

GRACE = 4.0
"""Seconds that an interrupted cell may take to end its step: a prompt must be back soon."""
JOB_GRACE = 15.0
"""The same in a job: schedulers give half a minute or more after SIGTERM."""


class Control:
    """Flags of one loop. `stop` ends it after the step in hand; `pause` holds it there until `resume`."""

    def __init__(self, grace: float | None = None) -> None:
        self.grace = (JOB_GRACE if os.environ.get("WORKBENCH_JOB") else GRACE) if grace is None else grace
        self.paused = False
        self.holding = False
        """Whether the loop stands still because of `pause`: the step in hand has ended."""
        self.stopping = False
        self.interrupted = False
        """Whether the stop came from an interrupt: then the caller is told by `CancelledError` in the end."""

    def stop(self) -> None:
        """End after the step in hand."""
        self.stopping = True

    def pause(self) -> None:
        """Wait after the step in hand."""
        self.paused = True

    def resume(self) -> None:
        """Go on."""
        self.paused = False

    async def gate(self) -> bool:
        """Between steps: waits while paused; whether there shall be another step."""
        try:
            while self.paused and not self.stopping:
                self.holding = True
                await asyncio.sleep(0.05)
        except asyncio.CancelledError:
            self.interrupted = self.stopping = True
        finally:
            self.holding = False
        return not self.stopping

    async def carry(self, function: Callable[..., T], *args: object) -> T:
        """Run blocking work in a thread beside the caller's loop, so that buttons and displays stay alive.

        A cancellation (an interrupted cell, a SIGTERM that our engine passes on) asks for a stop after this work, where it
        is done within `grace` seconds or the caller cancels no second time; else the work is told to stop at its next
        safe place, waited for, and the cancellation goes on.
        """
        work = asyncio.ensure_future(asyncio.to_thread(function, *args))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            self.interrupted = self.stopping = True
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([work], timeout=self.grace)
            if not work.done():
                with interrupting():
                    await asyncio.wait([work])
            if isinstance(work.exception(), Interrupted | KeyboardInterrupt):
                raise
            return work.result()
