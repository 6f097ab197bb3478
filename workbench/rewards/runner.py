"""`Pool`: worker processes for users' reward functions, with a deadline for each row; a worker that hangs is killed."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import cloudpickle

from workbench.base import runtime
from workbench.base.child import Child, importing
from workbench.base.errors import RewardError, first_line
from workbench.rewards.files import FileFunction
from workbench.rewards.rate_limit import RateLimit

T = TypeVar("T")
_PACKAGE = Path(__file__).parents[1]
_WORKER = str(Path(__file__).with_name("worker.py"))
START_SECONDS = 60.0
"""What a worker may take to start and load the function; a row's deadline counts from then."""


@dataclass(frozen=True)
class Answer:
    """The result of one call of a function in a worker process."""

    ok: bool
    result: Any
    """The function's result, or None."""
    why: str = ""
    """One line, where not ok."""
    traceback: str | None = None
    seconds: float = 0.0
    printed: str = ""
    """The start of what the call printed in its worker."""


def _by_value(function: Callable[..., Any]) -> bytes:
    """The pickled function; where its module is the user's own, so that a worker does not import that module.

    A user's module usually imports workbench and torch at its top, which takes each worker seconds. Functions of
    installed packages are pickled by name.
    """
    inner = function.func if isinstance(function, partial) else function
    if isinstance(inner, FileFunction):  # its text travels, and is run in the worker alone
        return cloudpickle.dumps(inner.record(function.keywords if isinstance(function, partial) else {}))
    module: Any = sys.modules.get(getattr(inner, "__module__", None) or "")
    file = getattr(module, "__file__", None) or ""
    folders = {str(_PACKAGE), sys.prefix, sys.base_prefix}
    installed = any(path.is_relative_to(one) for path in (Path(file), Path(file).resolve()) for one in folders)
    by_name = not file or module is sys.modules.get("__main__") or installed
    by_name = by_name and not getattr(module, "__by_value__", False)
    if by_name or module.__name__ in cloudpickle.list_registry_pickle_by_value():
        return cloudpickle.dumps(function)
    cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps(function)
    finally:
        cloudpickle.unregister_pickle_by_value(module)


class Pool:
    """Worker processes that call a function: `Pool(function).map(list of keyword arguments)` returns answers in order.

    Processes start with the first call, stay for the next, and end with `close`, with the pool, or with this process.
    Functions defined in a notebook cell are sent by cloudpickle. Workers import neither torch nor workbench unless the
    function does.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        workers: int = 2,
        timeout: float = 30.0,
        memory_mb: int | None = None,
        rate_limit: RateLimit | None = None,
    ) -> None:
        try:
            self._function = _by_value(function)
        except Exception as cause:
            what = f"reward function {getattr(function, '__name__', repr(function))} cannot be sent to a worker process"
            raise RewardError(what, found=cause, do="pass in_process=True") from cause
        self._size = workers
        self._timeout = timeout
        self._env = {"WORKBENCH_WORKER_MEMORY_MB": str(memory_mb)} if memory_mb else {}
        self._rate_limit = rate_limit
        self._workers: set[Child] = set()
        self._idle: list[Child] = []

    def close(self) -> None:
        """End all worker processes; the next `map` starts new ones."""
        self._idle.clear()
        while self._workers:
            self._workers.pop().close()

    def map(self, calls: Sequence[Mapping[str, Any]], limits: Sequence[float] | None = None) -> list[Answer]:
        """Call the function with each of `calls` (keyword arguments): one `Answer` per call, in order. `limits` are seconds
        per call, by default the pool's `timeout`. A call that runs past its limit, or kills its worker, fails alone."""
        bodies = [_packed(arguments) for arguments in calls]
        seconds = [self._timeout] * len(calls) if limits is None else limits
        places, slot = asyncio.Semaphore(self._size), (self._rate_limit or RateLimit()).slot

        async def ask(number: int) -> Answer:
            body = bodies[number]
            if isinstance(body, Answer):
                return body
            async with places, slot():
                worker = self._idle.pop() if self._idle else None
                return await in_thread(lambda: self._answer(worker, body, seconds[number]))

        try:
            return runtime.run_all(ask, range(len(calls)))
        except BaseException:
            self.close()  # an interrupt waits for no row
            raise

    def _answer(self, worker: Child | None, body: bytes, limit: float) -> Answer:
        """The answer of a worker, or of a new one: then the call's time starts when that has the function."""
        answer = Answer(True, None)
        if worker is None:
            worker = Child(_WORKER, env={**importing(os.environ), **self._env})
            self._workers.add(worker)
            answer = _exchanged(worker, self._function, START_SECONDS, "the worker process did not start")
        if answer.ok:
            answer = _exchanged(worker, body, limit)
        else:
            worker.close()
        if worker.alive:
            self._idle.append(worker)
        else:
            self._workers.discard(worker)
        return answer


def _packed(arguments: Mapping[str, Any]) -> bytes | Answer:
    try:
        return cloudpickle.dumps(dict(arguments))
    except Exception as error:  # noqa: BLE001 - a row that cannot travel is that row's failure
        return Answer(False, None, f"the row cannot be sent to a worker process: {first_line(error)}")


def _exchanged(worker: Child, body: bytes, limit: float, late: str = "the function gave no answer") -> Answer:
    try:
        return Answer(*cloudpickle.loads(worker.exchange(body, limit)))  # our own child, over a socket pair
    except TimeoutError:
        return Answer(False, None, f"{late} within {limit:g} s and was ended", None, limit)
    except OSError:
        return Answer(False, None, f"the worker process ended with {worker.how()}")
    except Exception as error:  # noqa: BLE001 - a result that cannot travel is that row's failure
        return Answer(False, None, f"the function's result cannot be unpickled: {first_line(error)}")


async def in_thread(work: Callable[[], T], name: str = "workbench-reward") -> T:
    """Run blocking work in a daemon thread of its own; the process can exit without waiting for it."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # a thread cannot be stopped: from now on it may always set its result

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - it is raised where it is awaited, where a StopIteration cannot be
            plain = isinstance(error, Exception) and not isinstance(error, StopIteration)
            future.set_exception(error if plain else RuntimeError(first_line(error)))

    threading.Thread(target=run, name=name, daemon=True).start()
    return await asyncio.wrap_future(future)
