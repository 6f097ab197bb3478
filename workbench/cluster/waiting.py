"""Every wait for Ray: outcomes of calls as they arrive, single values with a deadline, and what Ray says of a death."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.base.errors import first_line

LOOK_SECONDS = 0.1
_USED = re.compile(r"was ([\d.]+) ?GB used / ([\d.]+) ?GB")
USERS = 5
"""Processes that are named where Ray killed for memory."""
COMMAND = 60
"""Characters of each one's command."""


@dataclass(frozen=True)
class Arrival:
    """The outcome of a call on one rank."""

    rank: int
    outcome: str
    """`done`, `raised` (the call raised there) or `lost` (the worker is dead, or its result is lost with it)."""
    value: Any
    """For `done` the result; for `raised` (type, message, traceback, `WorkbenchError` or None); for `lost` the reason."""
    began: float = 0.0
    """Seconds since the epoch, on the worker's clock; 0 where no answer came."""
    ended: float = 0.0


def arrivals(refs: Mapping[int, Any], until: float, look: Callable[[], None] = lambda: None) -> Iterator[Arrival]:
    """Yield each rank's outcome as it arrives; `look` is called every 0.1 s in which none does, and may raise.

    Raises `TimeoutError` at `until` (a `time.monotonic` time) where ranks have not answered.
    """
    import ray

    waiting = {ref: rank for rank, ref in refs.items()}
    while waiting:
        left = until - time.monotonic()
        ready, _ = ray.wait(list(waiting), num_returns=1, timeout=max(min(left, LOOK_SECONDS), 0.0))
        if ready:
            yield _arrival(waiting.pop(ready[0]), ready[0], until)
        elif left > 0:
            look()
        else:
            raise TimeoutError(f"no answer in time from rank {', '.join(map(str, sorted(waiting.values())))}")


def _arrival(rank: int, ref: Any, until: float) -> Arrival:
    import ray
    from ray.exceptions import GetTimeoutError, OutOfMemoryError, RayError, RayTaskError

    try:
        return Arrival(rank, *ray.get(ref, timeout=max(until - time.monotonic(), 5.0)))
    except GetTimeoutError:  # a TimeoutError, too
        raise
    except RayTaskError as error:  # not the call itself: its answer could not be sent, or its arguments not be read
        return Arrival(rank, "raised", (type(error.cause).__name__, str(error.cause), str(error), None))
    except RayError as error:
        # of any sudden death Ray says that it may have been the OOM killer; of its own kills it says how much was used
        hungry = isinstance(error, OutOfMemoryError) or _USED.search(str(error)) is not None
        return Arrival(rank, "lost", for_memory(str(error)) if hungry else reason(error))


def out(refs: Sequence[Any], seconds: float) -> list[int]:
    """Wait up to `seconds` for Ray object refs; returns the indices of those that are still not ready."""
    import ray

    _, late = ray.wait(list(refs), num_returns=len(refs), timeout=max(seconds, 0.0))
    return [place for place, ref in enumerate(refs) if ref in late]


def fetch(ref: Any, seconds: float) -> Any:
    """The value of a Ray object ref. Raises Ray's own errors; after `seconds` one that is also a `TimeoutError`."""
    import ray

    return ray.get(ref, timeout=seconds)


def quietly(ref: Any, seconds: float, instead: Any) -> Any:
    """The value of a Ray object ref, or `instead` where it is not there within `seconds` or its worker is dead."""
    from ray.exceptions import RayError

    try:
        return fetch(ref, seconds)
    except RayError:
        return instead


def reason(error: BaseException) -> str:
    """Why a worker died, in one line of Ray's error text."""
    lines = [line.strip() for line in str(error).splitlines()]
    telling = [line for line in lines if re.search("exit|killed|died", line, re.IGNORECASE)]
    return " ".join(telling[-2:]) or first_line(error)


def for_memory(text: str) -> str:
    """One line about a worker that Ray killed for lack of memory: how much the node used, and which processes used most."""
    used = _USED.search(text)
    users = re.findall(r"^(\d+)\t([\d.]+)\t(.+)$", text, re.MULTILINE)
    most = ", ".join(f"{size} GB by {command[:COMMAND]} (pid {pid})" for pid, size, command in users[:USERS])
    node = f"the node used {used[1]} of {used[2]} GB" if used else text.splitlines()[0][:200]
    return f"killed for memory: {node}" + (f"; most of it: {most}" if most else "")
