"""Synchronous calls of async code, by one event loop on a background thread of the process, and the interrupt flag.

Engines and rewards are async inside; stages are called synchronously, from a script, a cell or a worker thread. `run` takes a
coroutine to the background loop and waits for it, which works under Jupyter's own running loop without patching asyncio.

An interrupt is a flag: `interrupt()` sets it, and long work calls `check()` between decode steps and micro-batches, where
stopping is safe.

Each Python thread that computes has an OpenMP team: worker threads of torch. When a process has more of them than cores, idle
ones included, GNU's libgomp makes all of them wait in a slower way, and every operation of torch takes twice as long. A thread
therefore ends its team (`release_team`) when it hands its work on or has done it; its next operation makes a new one in 50 µs.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import ctypes
import functools
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

from workbench.base import progress
from workbench.base.errors import Interrupted, message

Q = TypeVar("Q")
T = TypeVar("T")
P = ParamSpec("P")
PATIENCE = 4.0
"""Seconds that an interrupt waits for work to stop: the prompt is back within five."""
_LOOK_SECONDS = 0.2
"""Seconds between two looks for an interrupt while another process works."""

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_stop = threading.Event()
_here = threading.local()
_under_way: list[Callable[[], bool]] = []
_idle: list[SimpleQueue[Callable[[], None]]] = []
"""The queues of threads that wait for the next work of `in_idle_thread`."""
os.register_at_fork(after_in_child=_idle.clear)  # a fork has none of these threads


def loop() -> asyncio.AbstractEventLoop:
    """Return the background event loop, which is started on first use in a daemon thread."""
    global _loop
    with _lock:
        if _loop is None or _loop.is_closed():
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="workbench-loop", daemon=True).start()
        return _loop


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the background loop and wait for its result.

    A `KeyboardInterrupt` while waiting sets the interrupt flag, cancels the work, waits until it has stopped, and is
    raised again. Raises `RuntimeError` when called on the background loop's own thread, which would wait for itself.
    """
    if threading.current_thread().name == "workbench-loop":
        work.close()
        what = "a call that waits for workbench's event loop was made on that loop's own thread"
        found = "an async tool, reward or agent loop that makes it"
        raise RuntimeError(message(what, found=found, do="call it in a thread: await asyncio.to_thread(…)"))
    with waiting():
        future = asyncio.run_coroutine_threadsafe(_releasing(work), loop())
        try:
            return future.result()
        except KeyboardInterrupt:
            with interrupting():
                future.cancel()
                _settle()
            raise


async def _releasing(work: Coroutine[Any, Any, T]) -> T:
    try:
        return await work
    finally:
        release_team()  # of the loop's thread


async def to_its_end(work: Awaitable[T]) -> T:
    """Await `work`; a cancellation of the caller is raised only after the work has ended."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


def run_all(ask: Callable[[Q], Coroutine[Any, Any, T]], questions: Iterable[Q]) -> list[T]:
    """Run the coroutines `ask(question)` of all questions concurrently, wait, and return their results in order.

    When one raises, or the call is cancelled, the others are cancelled, and it waits until they have ended. Each is a row of
    the work that runs (`base.progress`).
    """
    waiting = list(questions)

    async def together(passed: Callable[[int], None]) -> list[T]:
        async def counted(question: Q) -> T:
            answer = await ask(question)
            passed(1)
            return answer

        tasks = [asyncio.ensure_future(counted(one)) for one in waiting]
        try:
            return list(await asyncio.gather(*tasks))
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    with progress.present().rows(len(waiting)) as passed:
        return run(together(passed))


def _settle() -> None:
    """Wait, for at most `PATIENCE` seconds, until threads have stopped the work that was cancelled."""
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
    """Clear the interrupt flag that `interrupt` sets."""
    _stop.clear()


def stopping() -> bool:
    """Return whether the interrupt flag is set."""
    return _stop.is_set()


@contextmanager
def interrupting() -> Iterator[None]:
    """Context manager: sets the interrupt flag, and clears it at the end."""
    interrupt()
    try:
        yield
    finally:
        clear()


def check() -> None:
    """Raise `Interrupted` if the interrupt flag is set, or if `given_up()` of an enclosing `unless` in this thread is
    true.
    """
    given_up: Callable[[], bool] | None = getattr(_here, "given_up", None)
    if _stop.is_set() or (given_up is not None and given_up()):
        raise Interrupted("the work was interrupted; everything finished before is kept")


async def unless_interrupted(work: Coroutine[Any, Any, T] | asyncio.Future[T]) -> T:
    """Await work that another process does, and raise `Interrupted` when this process is asked to stop.

    The work is cancelled then, as it is when the caller is cancelled, and has ended when this raises.
    """
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait([task], timeout=_LOOK_SECONDS))[0]:
            check()
        return task.result()
    except (asyncio.CancelledError, Interrupted):
        task.cancel()
        await asyncio.wait([task])
        raise


@contextmanager
def on_signals(handler: Callable[[int, Any], None], *numbers: int) -> Iterator[None]:
    """Context manager in which signals call `handler`: the given `numbers`, or SIGINT, SIGTERM and SIGHUP (a closed
    terminal).

    It works only in the main thread; elsewhere nothing is changed. SIGHUP that was ignored from the start (nohup) stays
    ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ending = numbers or (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    hung = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    before = {one: signal.signal(one, handler) for one in ending if hung or one != signal.SIGHUP}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def in_turn(method: Callable[P, T]) -> Callable[P, T]:
    """Decorate a method of an engine that computes, so that one thread of the process runs it at a time
    (`alone`).

    A waiting call raises `Interrupted` when the interrupt flag is set.
    """

    @functools.wraps(method)
    def turn(*args: P.args, **named: P.kwargs) -> T:
        with alone(check):
            return method(*args, **named)

    return turn


@contextmanager
def unless(given_up: Callable[[], bool]) -> Iterator[None]:
    """Context manager in which `check()` in this thread also raises once `given_up()` is true, because the work was
    cancelled.
    """
    before, _here.given_up = getattr(_here, "given_up", None), given_up
    _under_way.append(given_up)
    try:
        yield
    finally:
        _under_way.remove(given_up)
        _here.given_up = before


@functools.cache
def _steps() -> ThreadPoolExecutor:
    # one thread for all steps: malloc keeps for each thread what it freed, a step's activations for every one of a pool
    return ThreadPoolExecutor(1, thread_name_prefix="workbench-steps")


def in_steps(function: Callable[..., T], *args: object) -> Future[T]:
    """Run a blocking function in the one thread of all steps; returns a future of its result."""
    release_team()
    return _steps().submit(functools.partial(contextvars.copy_context().run, releasing_team(function), *args))


def _in_thread(function: Callable[..., T], *args: object) -> asyncio.Future[T]:
    return asyncio.wrap_future(in_steps(function, *args))


def in_thread(name: str, work: Callable[[], T]) -> tuple[Future[T], threading.Thread]:
    """Call `work` in a daemon thread, which does not keep the process alive; returns a future of its result, and the
    thread."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # a thread cannot be stopped: from now on it may always set its result

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised again by whoever asks for the result
            future.set_exception(error)

    thread = threading.Thread(target=contextvars.copy_context().run, args=(run,), name=name, daemon=True)
    thread.start()
    return future, thread


def in_idle_thread(work: Callable[[], T]) -> Future[T]:
    """Call `work` in a daemon thread whose earlier work has ended, or in a new one where there is none: starting a thread
    costs more than most reward functions. Returns a future of its result."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()
    try:
        waiting = _idle.pop()
    except IndexError:
        waiting = SimpleQueue()
        threading.Thread(target=_serve, args=(waiting,), name="workbench-idle", daemon=True).start()
    waiting.put(functools.partial(contextvars.copy_context().run, _settled, future, work, waiting))
    return future


def _serve(waiting: SimpleQueue[Callable[[], None]]) -> None:
    while True:
        waiting.get()()


def _settled(future: Future[T], work: Callable[[], T], waiting: SimpleQueue[Callable[[], None]]) -> None:
    """Give the future what `work` returns or raises, when its thread can already be found for the next work."""
    try:
        give: Callable[[], None] = functools.partial(future.set_result, work())
    except BaseException as error:  # noqa: BLE001 - raised again by whoever asks for the result
        give = functools.partial(future.set_exception, error)
    release_team()
    _idle.append(waiting)
    give()


async def beside(function: Callable[..., T], *args: Any) -> T:
    """Run a blocking function in a thread and await it, so that the caller's event loop (buttons, displays) goes on.

    When the awaiting task is cancelled (an interrupted cell), the interrupt flag is set until the function has ended,
    and then `CancelledError` is raised.
    """
    work = _in_thread(function, *args)
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        with interrupting():
            await asyncio.wait([work])
        raise


GRACE = 4.0
"""Seconds that an interrupted cell may take to end its step: a prompt must be back soon."""
JOB_GRACE = 15.0
"""Seconds that an interrupted job may take to end its step: schedulers allow half a minute or more after SIGTERM."""


class Control:
    """Stop and pause flags of a training loop: `stop()` ends it after the present step; `pause()` holds it there until
    `resume()`."""

    def __init__(self, grace: float | None = None) -> None:
        self.grace = (JOB_GRACE if os.environ.get("WORKBENCH_JOB") else GRACE) if grace is None else grace
        self.paused = False
        self.holding = False
        """Whether the loop waits because of `pause`: the last step has ended."""
        self.stopping = False
        self.interrupted = False
        """Whether the stop came from an interrupt: `CancelledError` is raised to the caller in the end."""

    def stop(self) -> None:
        """End the loop after the present step."""
        self.stopping = True

    def pause(self) -> None:
        """Hold the loop after the present step."""
        self.paused = True

    def resume(self) -> None:
        """Let a paused loop go on."""
        self.paused = False

    async def gate(self) -> bool:
        """Wait while the loop is paused, between two steps; returns whether to do another step."""
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
        """Run a blocking function in a thread and await it, so that the caller's event loop (buttons, displays) goes
        on.

        After a cancellation (an interrupted cell, a SIGTERM of a job) the function has `grace` seconds to end; then, or
        at a second cancellation, it is asked to stop at its next safe place. A function that ends returns its result,
        and `stopping` is set; for one that stopped half-way `CancelledError` is raised.
        """
        work = _in_thread(function, *args)
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


# --- OpenMP teams: torch's worker threads ----------------------------------------------------

_SOFT = 1
_working = threading.RLock()
_waiting: list[int] = []
"""Threads that wait to work `alone`."""


def _works() -> bool:
    """Return whether this thread works `alone`. The lock itself is asked, because an interrupt may come between any two
    lines here.
    """
    return _working._is_owned()  # type: ignore[attr-defined]


@lru_cache(maxsize=1)
def _pause() -> Callable[[int], int] | None:
    """Find OpenMP's `omp_pause_resource_all`; None where torch has no OpenMP, or one before version 5."""
    try:
        return ctypes.CDLL(None).omp_pause_resource_all
    except (AttributeError, OSError, TypeError):
        return None


def release_team() -> None:
    """End the OpenMP team of the calling thread, if it has one; the thread's next operation makes a new one."""
    if (pause := _pause()) is not None:
        pause(_SOFT)


def releasing_team(function: Callable[P, T]) -> Callable[P, T]:
    """Wrap a function so that the OpenMP team of the calling thread is ended after it."""

    def released(*args: P.args, **keywords: P.kwargs) -> T:
        try:
            return function(*args, **keywords)
        finally:
            release_team()

    return released


@contextmanager
def alone(check: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Context manager around an engine's work: one thread of the process works at a time, with the only OpenMP team.

    While another thread works, `check` is called every tenth of a second and may raise. Nested use does not wait.
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
        release_team()
        while _works():
            _working.release()


def wanted() -> bool:
    """Return whether another thread waits to work `alone`."""
    return bool(_waiting)


@contextmanager
def waiting() -> Iterator[None]:
    """Context manager around a wait for another thread. A thread that works `alone` lets the other one work meanwhile."""
    release_team()
    worked = _works()
    while _works():
        _working.release()
    try:
        yield
    finally:
        if worked:
            _working.acquire()
