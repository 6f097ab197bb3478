"""Limits of a service that hold for the whole run: one object, shared by whatever calls the service."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from workbench.config import require

_POLL = 0.02
"""Seconds between two looks for a free place; places are given back without a sound."""


class _Bucket:
    """`per_minute` units a minute, at most that many saved up; full at the start."""

    def __init__(self, per_minute: float, now: float) -> None:
        self.per_second = per_minute / 60.0
        self.size = per_minute
        self.left = per_minute
        self.seen = now

    def wait_for(self, amount: float, now: float) -> float:
        """Seconds until `amount` is there; 0 if it is. An amount above the size waits for a full bucket."""
        self.left = min(self.size, self.left + (now - self.seen) * self.per_second)
        self.seen = now
        # the tolerance is for the clock's rounding: a wait that was slept must be enough
        short = min(amount, self.size) - self.left
        return short / self.per_second if short > 1e-9 * self.size else 0.0

    def take(self, amount: float) -> None:
        self.left -= amount


class RateLimit:
    """`RateLimit(max_concurrent=8, max_rpm=500, max_tpm=100_000)`: concurrency, requests and tokens a minute.

    None is no limit. A call costs `estimated_tokens_per_request` of the token budget unless it says otherwise. Give
    the same object to every reward that uses the service: verl's limits are per worker, ours are not. The names are
    those of verl's `rate_limited` manager.
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
        now = clock()
        self._requests = _Bucket(max_rpm, now) if max_rpm else None
        self._tokens = _Bucket(max_tpm, now) if max_tpm else None

    def try_enter(self, tokens: int | None = None) -> float:
        """0.0 where the call may start now (then `leave` after it), else seconds after which to ask again."""
        cost = float(self.estimated_tokens_per_request if tokens is None else tokens)
        with self._lock:
            now = self._clock()
            if self.max_concurrent is not None and self._going >= self.max_concurrent:
                return _POLL
            waits = [bucket.wait_for(amount, now) for bucket, amount in self._costs(cost)]
            if waits and max(waits) > 0:
                return max(waits)
            for bucket, amount in self._costs(cost):
                bucket.take(amount)
            self._going += 1
            return 0.0

    def _costs(self, tokens: float) -> list[tuple[_Bucket, float]]:
        pairs = ((self._requests, 1.0), (self._tokens, tokens))
        return [(bucket, amount) for bucket, amount in pairs if bucket is not None]

    def leave(self) -> None:
        """A call that was let in is over."""
        with self._lock:
            self._going -= 1

    @asynccontextmanager
    async def slot(self, tokens: int | None = None) -> AsyncIterator[None]:
        """`async with limit.slot(): …` waits its turn, and gives the place back whatever happens."""
        while (wait := self.try_enter(tokens)) > 0:
            await asyncio.sleep(wait)
        try:
            yield
        finally:
            self.leave()

    def __repr__(self) -> str:
        return f"RateLimit(max_concurrent={self.max_concurrent}, max_rpm={self.max_rpm}, max_tpm={self.max_tpm})"
