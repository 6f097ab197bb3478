"""The one place that waits for Ray: every wait has a deadline, every way to fail has a name."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.errors import first_line


@dataclass(frozen=True)
class Gone:
    """A worker is dead, or what it made is lost with it."""

    why: str


@dataclass(frozen=True)
class Raised:
    """A call raised on its rank."""

    kind: str
    text: str
    trace: str
    error: Exception | None = None
    """The error itself where it is one of ours."""


@dataclass(frozen=True)
class Done:
    """A call returned."""

    value: Any


@dataclass(frozen=True)
class Arrival:
    """What came of one rank's call; times in seconds since the epoch, on the worker's clock."""

    rank: int
    outcome: Done | Raised | Gone
    began: float = 0.0
    ended: float = 0.0


LOOK_SECONDS = 0.1
_USED = re.compile(r"was ([\d.]+) ?GB used / ([\d.]+) ?GB")
USERS = 5
"""Of memory that are named."""
COMMAND = 60
"""Characters of a command."""


def arrivals(refs: Mapping[int, Any], until: float, look: Callable[[], None] = lambda: None) -> Iterator[Arrival]:
    """Each rank's outcome as it comes; `look` is called while nothing does, and may raise.

    Raises `TimeoutError` at `until` (`time.monotonic`) where some are still out.
    """
    import ray

    waiting = {ref: rank for rank, ref in refs.items()}
    while waiting:
        left = until - time.monotonic()
        ready, _ = ray.wait(list(waiting), num_returns=1, timeout=max(min(left, LOOK_SECONDS), 0.0))
        if not ready and left > 0:
            look()
            continue
        if not ready:
            raise TimeoutError(f"no answer from rank {', '.join(str(rank) for rank in sorted(waiting.values()))}")
        yield _arrival(waiting.pop(ready[0]), ready[0], until)


def _arrival(rank: int, ref: Any, until: float) -> Arrival:
    import ray
    from ray.exceptions import GetTimeoutError, OutOfMemoryError, RayError, RayTaskError

    try:
        kind, value, began, ended = ray.get(ref, timeout=max(until - time.monotonic(), 5.0))
    except GetTimeoutError as error:
        raise TimeoutError(f"the answer of rank {rank} does not arrive") from error
    except (
        RayTaskError
    ) as error:  # not from the call itself: its answer could not be sent, or its arguments not be read
        return Arrival(rank, Raised(type(error.cause).__name__, str(error.cause), str(error)))
    except RayError as error:
        # of any sudden death Ray says that it may have been the OOM killer; of its own kills it says how much was used
        hungry = isinstance(error, OutOfMemoryError) or _USED.search(str(error)) is not None
        return Arrival(rank, Gone(for_memory(str(error)) if hungry else reason(error)))
    return Arrival(rank, Done(value) if kind == "done" else Raised(*value), began, ended)


def out(refs: Sequence[Any], seconds: float) -> list[int]:
    """Which of these are still out after so many seconds."""
    import ray

    _, late = ray.wait(list(refs), num_returns=len(refs), timeout=max(seconds, 0.0))
    return [place for place, ref in enumerate(refs) if ref in late]


def fetch(ref: Any, seconds: float, what: str) -> Any:
    """One value. Raises `TimeoutError` naming `what`; Ray's own errors pass."""
    import ray
    from ray.exceptions import GetTimeoutError

    try:
        return ray.get(ref, timeout=seconds)
    except GetTimeoutError as error:
        raise TimeoutError(f"{what}: no answer in {seconds:g} s") from error


def quietly(ref: Any, seconds: float, instead: Any) -> Any:
    """One value, or `instead` where the other side does not answer or is gone."""
    from ray.exceptions import RayError

    try:
        return fetch(ref, seconds, "")
    except (RayError, TimeoutError):
        return instead


def reason(error: BaseException) -> str:
    """What Ray says of a death, in one line."""
    lines = [line.strip() for line in str(error).splitlines()]
    telling = [line for line in lines if "exit" in line.lower() or "killed" in line.lower() or "died" in line.lower()]
    return " ".join(telling[-2:]) or first_line(error)


def for_memory(text: str) -> str:
    """What Ray says where it killed for memory, in a line: how much the node had, and who had most of it."""
    used = _USED.search(text)
    users = re.findall(r"^(\d+)\t([\d.]+)\t(.+)$", text, re.MULTILINE)
    most = ", ".join(f"{size} GB by {command[:COMMAND]} (pid {pid})" for pid, size, command in users[:USERS])
    node = f"the node used {used[1]} of {used[2]} GB" if used else text.splitlines()[0][:200]
    return f"killed for memory: {node}" + (f"; most of it: {most}" if most else "")
