"""Sync doors, async rooms: one event loop on one background thread per process.

Engines and rewards are async inside; stages are called synchronously, from a script, a cell
or a worker thread. `run` carries a coroutine to the background loop and waits for it, so that
it works under Jupyter's own running loop without patching asyncio.

An interrupt is a flag: `interrupt()` raises it, and long work calls `check()` between decode
steps and micro-batches, where stopping is safe.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from workbench.errors import Interrupted

Q = TypeVar("Q")
T = TypeVar("T")
PATIENCE = 4.0
"""Seconds that an interrupt waits for work to let go: the prompt is back within five."""

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_stop = threading.Event()
_here = threading.local()
_under_way: list[Callable[[], bool]] = []


def loop() -> asyncio.AbstractEventLoop:
    """The background loop, started on first use; its thread is a daemon."""
    global _loop
    with _lock:
        if _loop is None or _loop.is_closed():
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="workbench-loop", daemon=True).start()
        return _loop


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the background loop and wait for its result.

    A `KeyboardInterrupt` while waiting raises the interrupt flag, cancels the work, waits until it
    has let go, and is raised again.
    """
    if threading.current_thread().name == "workbench-loop":
        work.close()
        raise RuntimeError("background.run was called from the background loop itself; await the coroutine instead")
    future = asyncio.run_coroutine_threadsafe(work, loop())
    try:
        return future.result()
    except KeyboardInterrupt:
        with interrupting():
            future.cancel()
            _settle()
        raise


def run_all(ask: Callable[[Q], Coroutine[Any, Any, T]], questions: Iterable[Q]) -> list[T]:
    """Ask everything at once and wait for all answers, in order: the synchronous door of what is asked one by one."""

    async def together() -> list[T]:
        return list(await asyncio.gather(*(ask(question) for question in questions)))

    return run(together())


def _settle() -> None:
    """Wait until the loop has run everything that was ready and threads have let go of what was given up, for seconds only:
    a thread that is busy in one long call is stopped by its next check()."""
    end = time.monotonic() + PATIENCE
    try:
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop()).result(timeout=PATIENCE)
    except TimeoutError:
        return
    while time.monotonic() < end and any(given_up() for given_up in tuple(_under_way)):
        time.sleep(0.002)


def interrupt() -> None:
    """Ask all work of this process to stop at its next safe place."""
    _stop.set()


def clear() -> None:
    """Take the request back: the next piece of work starts afresh."""
    _stop.clear()


@contextmanager
def interrupting() -> Iterator[None]:
    """The flag is up inside the block and down after it."""
    interrupt()
    try:
        yield
    finally:
        clear()


def check() -> None:
    """Raise `Interrupted` if somebody asked the work to stop, or nobody waits for this thread's work any more."""
    given_up: Callable[[], bool] | None = getattr(_here, "given_up", None)
    if _stop.is_set() or (given_up is not None and given_up()):
        raise Interrupted("the work was interrupted; everything finished before is kept")


@contextmanager
def unless(given_up: Callable[[], bool]) -> Iterator[None]:
    """Inside the block `check()` on this thread also asks `given_up`: work that was cancelled ends at its next safe place."""
    before, _here.given_up = getattr(_here, "given_up", None), given_up
    _under_way.append(given_up)
    try:
        yield
    finally:
        _under_way.remove(given_up)
        _here.given_up = before


async def beside(function: Callable[..., T], *args: Any) -> T:
    """Run blocking work in a thread beside the caller's loop, so that buttons and displays stay alive.

    When the awaiting task is cancelled (a cell is interrupted) the work is asked to stop, waited for,
    and the cancellation goes on.
    """
    work = asyncio.ensure_future(asyncio.to_thread(function, *args))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        with interrupting():
            await asyncio.wait([work])
        raise
