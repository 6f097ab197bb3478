"""What this process does now: the phases that run, questions that wait for its engines and rewards, and the last requests.

Kept always, since it costs microseconds a request and bounded memory; health pages, metrics and timelines read it.
"""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

from workbench.base import runtime
from workbench.base.progress import Work, present, working

KEPT = 20_000
"""Number of finished requests that are kept; older ones are only counted."""


@dataclass(slots=True)
class QueuedRequest:
    """One request to an engine or a reward, with the times at which it was asked, begun and answered, in seconds since
    the epoch.
    """

    queue: str
    """Name of the sampler or reward that gets the request."""
    prompt: int
    """Number of prompt tokens."""
    asked: float
    began: float | None = None
    """When the request left the queue; None before that, and where the engine does not report it."""
    first: float | None = None
    """When the first token was sampled; None where the engine does not report it."""
    ended: float | None = None
    tokens: int = 0
    """Number of response tokens."""
    outcome: str = ""
    """`done`, `raised` or `given up`; empty while it is under way."""


@dataclass(slots=True)
class Queue:
    """The requests to one engine or reward: how many wait or run now, and sums over those that are over."""

    waiting: int = 0
    """Requests that have not begun; for an engine that does not report when a request begins, all open requests."""
    running: int = 0
    done: int = 0
    failed: int = 0
    """Requests that raised an error or were given up."""
    prompt_tokens: int = 0
    tokens: int = 0
    """Response tokens of finished requests."""
    begun: int = 0
    """Finished requests whose time in the queue is known."""
    queue_seconds: float = 0.0
    seconds: float = 0.0
    """Seconds from the request to the answer, summed over finished requests."""


@dataclass
class Activity:
    """Records what one process is doing: phases, requests and their queues. Every method may be called from any thread."""

    kept: int = KEPT
    left_out: int = 0
    """Finished requests that are no longer in `requests`."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _queues: dict[str, Queue] = field(default_factory=dict)
    _phases: list[Work] = field(default_factory=list)
    _names: WeakKeyDictionary[Any, str] = field(default_factory=WeakKeyDictionary, repr=False)
    _progressed: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self._requests: deque[QueuedRequest] = deque(maxlen=self.kept)

    # --- writing ----------------------------------------------------------------------------

    def progress(self) -> None:
        """Note that something has been finished; `idle` counts from here."""
        self._progressed = time.monotonic()

    @contextmanager
    def doing(self, phase: str) -> Iterator[None]:
        """Context manager that records that a phase (a stage's name) is running."""
        self.progress()
        with working(phase) as work:
            self._phases.append(work)
            try:
                yield
            finally:
                self._phases.remove(work)
                self.progress()

    def name_of(self, engine: Any) -> str:
        """Return the name of an engine: its `name`, or its class's; with a number where another engine has that name."""
        with self._lock:
            if (known := self._names.get(engine)) is not None:
                return known
            first = str(getattr(engine, "name", "") or type(engine).__name__)
            taken, number, name = set(self._names.values()), 1, first
            while name in taken:
                number += 1
                name = f"{first}-{number}"
            self._names[engine] = name
            return name

    def enter(self, queue: str, prompt: int = 0) -> QueuedRequest:
        """Record that a request is asked of `queue`, and return its record. `prompt` is its number of prompt tokens."""
        request = QueuedRequest(queue, prompt, time.time())
        with self._lock:
            self._queues.setdefault(queue, Queue()).waiting += 1
        return request

    def begin(self, request: QueuedRequest) -> None:
        """Record that a request leaves its queue, because the engine begins to work on it."""
        with self._lock:
            if request.began is None and not request.outcome:
                request.began = time.time()
                queue = self._queues[request.queue]
                queue.waiting, queue.running = queue.waiting - 1, queue.running + 1

    def end(
        self,
        request: QueuedRequest,
        outcome: str,
        tokens: int = 0,
        times: tuple[float, float] | None = None,
        keep: bool = False,
    ) -> None:
        """Record that a request is over. `outcome` is `done`, `raised` or `given up`, `tokens` its number of response
        tokens.

        `times` are when it began and had its first token, by the clock of the worker that answered. `keep` puts it into
        `requests`.
        """
        with self._lock:
            queue = self._queues[request.queue]
            if request.began is None:
                queue.waiting -= 1
            else:
                queue.running -= 1
            if times is not None:
                request.began, request.first = times
            request.ended, request.outcome, request.tokens = time.time(), outcome, tokens
            done = outcome == "done"
            queue.done, queue.failed = queue.done + done, queue.failed + (not done)
            if done:
                queue.tokens, queue.prompt_tokens = queue.tokens + tokens, queue.prompt_tokens + request.prompt
                queue.seconds += request.ended - request.asked
                queue.begun += request.began is not None
                queue.queue_seconds += request.began - request.asked if request.began is not None else 0.0
            if keep:
                self.left_out += len(self._requests) == self.kept
                self._requests.append(request)
        self.progress()

    # --- reading ----------------------------------------------------------------------------

    @property
    def idle(self) -> float:
        """Seconds since anything was finished: a phase, a request, a step."""
        return time.monotonic() - self._progressed

    @property
    def phases(self) -> list[tuple[str, float]]:
        """(phase, seconds that it has run) of all that run now, the oldest first."""
        return [(one.name, one.seconds) for one in list(self._phases)]

    @property
    def queues(self) -> dict[str, Queue]:
        """A copy of each queue, by name."""
        with self._lock:
            return {name: replace(one) for name, one in self._queues.items()}

    def requests(self, since: float = 0.0) -> tuple[QueuedRequest, ...]:
        """Return the last finished requests to samplers that were asked after `since` (epoch seconds), in the order in
        which they ended.
        """
        with self._lock:
            return tuple(one for one in self._requests if one.asked >= since)


HERE = Activity()
"""The activity of this process."""
REQUEST: ContextVar[QueuedRequest | None] = ContextVar("asked", default=None)
"""The record of the request that the calling task works for; None outside of a `recorded` method."""


def recorded(sample: Callable[[Any, Any], Coroutine[Any, Any, Any]]) -> Callable[[Any, Any], Coroutine[Any, Any, Any]]:
    """Decorate a sampler's `sample(request)` so that each request is recorded in `HERE`, with its times and number of
    tokens.
    """

    @functools.wraps(sample)
    async def asked(self: Any, request: Any) -> Any:
        if asyncio.get_running_loop() is not runtime.loop():  # a caller's own loop: engines live in ours
            there = asyncio.run_coroutine_threadsafe(asked(self, request), runtime.loop())
            return await asyncio.wrap_future(there)
        record, work = HERE.enter(HERE.name_of(self), len(request.ids)), present()
        work.most += request.settings.max_tokens
        before, outcome, completion = REQUEST.set(record), "raised", None
        try:
            completion = await sample(self, request)
            outcome = "done"
        except asyncio.CancelledError:
            outcome = "given up"
            raise
        finally:
            REQUEST.reset(before)
            tokens, times = (0, None) if completion is None else (len(completion.ids), completion.times)
            work.most -= request.settings.max_tokens - tokens
            work.add_tokens(0 if record.began else tokens)  # who says when it begins counts its tokens as they are made
            HERE.end(record, outcome, tokens, times, keep=True)
        return completion

    return asked
