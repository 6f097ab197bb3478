"""`RateLimit`: limits of a service for the whole run, in one object shared by all rewards that call the service."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from workbench.base.config import require

_POLL = 0.02
"""Seconds between two checks for a free place: nothing wakes a caller that waits for one."""
_MINUTE = 60.0
_ROUNDING = 1e-7
"""Seconds by which clocks are rounded: a wait that was slept must be enough."""


class RateLimit:
    """`RateLimit(max_concurrent=8, max_rpm=500, max_tpm=100_000)`: limits on calls of a service.

    Limits concurrent calls, calls per minute and tokens per minute; None is no limit. A call costs the `tokens` that it
    passes, or `estimated_tokens_per_request`. Pass one object to all rewards that use the service: the limits hold for
    them together (verl's hold for each worker). The names are those of verl's `rate_limited` manager.

    Example:
        >>> limit = RateLimit(max_concurrent=8, max_rpm=500)  # doctest: +SKIP
        >>> Rubric({"a": Judge(model, rate_limit=limit), "b": Judge(model, rate_limit=limit)})  # doctest: +SKIP
    """

    def __init__(
        self,
        *,
        max_concurrent: int | None = None,
        max_rpm: float | None = None,
        max_tpm: float | None = None,
        estimated_tokens_per_request: int = 2000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        for name, value in (("max_concurrent", max_concurrent), ("max_rpm", max_rpm), ("max_tpm", max_tpm)):
            require(value is None or value > 0, name, expected="a number > 0, or None", found=value)
        self.max_concurrent, self.max_rpm, self.max_tpm = max_concurrent, max_rpm, max_tpm
        self.estimated_tokens_per_request = estimated_tokens_per_request
        self._clock = clock
        self._lock = threading.Lock()
        self._going = 0
        self._full: dict[str, float] = {}  # when a budget's store of a minute will be full again

    def try_enter(self, tokens: int | None = None) -> float:
        """Try to start a call: 0.0 where it may start now (call `leave` after it), else seconds until the next try."""
        costs = {"max_rpm": 1, "max_tpm": self.estimated_tokens_per_request if tokens is None else tokens}
        seconds = {name: _MINUTE * cost / getattr(self, name) for name, cost in costs.items() if getattr(self, name)}
        with self._lock:
            now = self._clock()
            if self.max_concurrent is not None and self._going >= self.max_concurrent:
                return _POLL
            full = {name: max(self._full.get(name, now), now) for name in seconds}
            # a call that costs more than a store holds waits until that is full
            wait = max((full[name] - now + min(each, _MINUTE) - _MINUTE for name, each in seconds.items()), default=0.0)
            if wait > _ROUNDING:
                return wait
            self._full = {name: full[name] + each for name, each in seconds.items()}
            self._going += 1
            return 0.0

    def leave(self) -> None:
        """Report the end of a call that `try_enter` let start, so that another may start."""
        with self._lock:
            self._going -= 1

    @asynccontextmanager
    async def slot(self, tokens: int | None = None) -> AsyncIterator[None]:
        """Async context manager around a call: waits until it may start; its end frees the place, also on an exception."""
        while (wait := self.try_enter(tokens)) > 0:
            await asyncio.sleep(wait)
        try:
            yield
        finally:
            self.leave()

    def __repr__(self) -> str:
        return f"RateLimit(max_concurrent={self.max_concurrent}, max_rpm={self.max_rpm}, max_tpm={self.max_tpm})"
