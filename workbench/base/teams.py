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
_working = threading.RLock()
_waiting: list[int] = []
"""Threads that wait to work `alone`."""


def _works() -> bool:
    """Whether this thread works `alone`. The lock itself knows, wherever an interrupt came between two lines here."""
    return _working._is_owned()  # type: ignore[attr-defined]


@lru_cache(maxsize=1)
def _pause() -> Callable[[int], int] | None:
    """OpenMP's `omp_pause_resource_all`; None where torch came without OpenMP, or with one before version 5."""
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
    """Context manager around an engine's work: one thread of the process works at a time, with the only team.

    While another thread works, `check` is called every tenth of a second and may raise. Work inside work does not wait.
    """
    if _works():
        yield
        return
    try:
        _waiting.append(me := threading.get_ident())
        try:
            while not _working.acquire(timeout=0.1):
                check()
        finally:
            _waiting.remove(me)
        yield
    finally:
        release()
        while _works():
            _working.release()


def wanted() -> bool:
    """Whether a thread waits to work `alone`."""
    return bool(_waiting)


@contextmanager
def waiting() -> Iterator[None]:
    """Context manager around a wait for another thread: its work may be done inside, also where this thread works `alone`."""
    release()
    worked = _works()
    while _works():
        _working.release()
    try:
        yield
    finally:
        if worked:
            _working.acquire()
