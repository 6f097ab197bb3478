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
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from workbench.errors import Interrupted

T = TypeVar("T")

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_stop = threading.Event()


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


def _settle() -> None:
    """Wait until the loop has run everything that was ready, so that cancelled work has let go."""
    try:
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop()).result(timeout=30)
    except TimeoutError:
        return  # the room is busy in one long call; its next check() will stop it


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
    """Raise `Interrupted` if somebody asked the work to stop."""
    if _stop.is_set():
        raise Interrupted("the work was interrupted; everything finished before is kept")


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
