"""OpenMP teams: torch's worker threads, of which each Python thread that computes gets a team of its own.

With more of them in a process than cores, idle ones included, GNU's libgomp makes all of them wait in a slower way, and every
operation of torch takes twice as long. So a thread that hands its work on, or has done it, ends its team first; the next
operation of that thread makes a new one, in about 50 µs.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_SOFT = 1
_LONGEST = 60.0
_working = threading.RLock()


@lru_cache(maxsize=1)
def _pause() -> Callable[[int], int] | None:
    """OpenMP's `omp_pause_resource_all`; None where this process has no OpenMP (yet), or one before version 5."""
    try:
        return ctypes.CDLL(None).omp_pause_resource_all
    except (AttributeError, OSError, TypeError):
        return None


def release() -> None:
    """End the OpenMP team of the calling thread, if it has one; its next operation makes a new one."""
    if (pause := _pause()) is not None:
        pause(_SOFT)


def releasing(function: Callable[P, T]) -> Callable[P, T]:
    """A function that calls `function`, and then ends the team of the thread that it was called in."""

    def released(*args: P.args, **keywords: P.kwargs) -> T:
        try:
            return function(*args, **keywords)
        finally:
            release()

    return released


@contextmanager
def alone(check: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Context manager around an engine's work on the CPU: one thread of the process works at a time, with the only team.

    While another thread works, `check` is called every tenth of a second and may raise. After a minute the work begins
    beside the other's: that is slow, and a lock that is held by whoever waits for this thread must not stop it.
    """
    got, waits = False, int(_LONGEST / 0.1)
    while not got and waits:
        got, waits = _working.acquire(timeout=0.1), waits - 1
        if not got:
            check()
    try:
        yield
    finally:
        release()
        if got:
            _working.release()
