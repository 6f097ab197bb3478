"""A pool of killable processes for user's reward functions: order kept, a deadline per row, workers that really end."""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from workbench.errors import RewardError, message
from workbench.rewards.rate_limit import RateLimit
from workbench.rewards.worker import read_frame, write_frame

_PACKAGE = Path(__file__).parents[1]
_WORKER = str(Path(__file__).with_name("worker.py"))
START_SECONDS = 60.0
"""What a worker may take to start and load the function; a row's deadline counts from then."""


@dataclass(frozen=True)
class Answer:
    """What came back for one row."""

    ok: bool
    result: Any
    """The function's result, or None."""
    why: str = ""
    """One line, where not ok."""
    traceback: str | None = None
    seconds: float = 0.0
    printed: str = ""
    """The start of what the call printed in its worker."""


class _Worker:
    def __init__(self, function: bytes, memory_mb: int | None) -> None:
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)  # what we can import, it can
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        if memory_mb:
            env["WORKBENCH_WORKER_MEMORY_MB"] = str(memory_mb)
        self.process = subprocess.Popen(
            [sys.executable, "-c", f"import runpy; runpy.run_path({_WORKER!r}, run_name='__main__')"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,  # a buffer of ours could hold a frame that the selector then never announces
            env=env,
            start_new_session=True,
        )
        self.fresh = True
        self.row: int | None = None
        self.deadline = 0.0
        self.send(function)

    def send(self, body: bytes) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # a dead worker is found when its answer is read
            write_frame(self.process.stdin, body)  # type: ignore[arg-type]

    def end(self) -> None:
        self.process.kill()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        self.process.wait()


def _end_all(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.end()
    workers.clear()


def _by_value(function: Callable[..., Any]) -> bytes:
    """Pickled so that a worker need not import the module that the function stands in, where that is the user's own.

    A user's module usually imports workbench and torch at its top: seconds, for each worker. Installed
    packages are imported as they are.
    """
    import cloudpickle

    inner = function.func if isinstance(function, partial) else function
    module: Any = sys.modules.get(getattr(inner, "__module__", None) or "")
    file = getattr(module, "__file__", None) or ""
    installed = not file or module is sys.modules.get("__main__") or Path(file).resolve().is_relative_to(_PACKAGE)
    installed = installed or any(Path(file).is_relative_to(prefix) for prefix in {sys.prefix, sys.base_prefix})
    record = getattr(inner, "record", None)
    if callable(record):  # a file's function: its text travels, and is run there alone
        return cloudpickle.dumps(record())
    installed = installed and not getattr(module, "__by_value__", False)
    if installed or module.__name__ in cloudpickle.list_registry_pickle_by_value():
        return cloudpickle.dumps(function)
    cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps(function)
    finally:
        cloudpickle.unregister_pickle_by_value(module)


class Pool:
    """`Pool(function, workers=2, timeout=30.0)`; `map(list of keyword arguments)` gives answers in order.

    Processes start with the first call, stay for the next, and end with `close`, with the pool, or with us.
    Functions defined in a notebook cell travel by cloudpickle. Children import neither torch nor workbench
    unless the function does.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        workers: int = 2,
        timeout: float = 30.0,
        memory_mb: int | None = None,
        rate_limit: RateLimit | None = None,
    ) -> None:
        try:
            self._function = _by_value(function)
        except Exception as cause:
            name = getattr(function, "__name__", repr(function))
            raise RewardError(
                message(f"reward function {name} cannot be sent to a worker", found=cause, do="use in_process=True")
            ) from cause
        self._size = workers
        self._timeout = timeout
        self._memory_mb = memory_mb
        self._rate_limit = rate_limit
        self._wake = 0.0  # when the rate limit may let the next call in
        self._workers: list[_Worker] = []
        self._end = weakref.finalize(self, _end_all, self._workers)

    def close(self) -> None:
        """End all workers; the next `map` starts new ones."""
        _end_all(self._workers)

    def map(self, calls: Sequence[Mapping[str, Any]], limits: Sequence[float] | None = None) -> list[Answer]:
        """One answer a call, each with its own limit in seconds. A row that hangs past its deadline, or kills its
        worker, loses itself alone."""
        import cloudpickle

        limit = [self._timeout] * len(calls) if limits is None else limits
        bodies = [cloudpickle.dumps((number, dict(arguments))) for number, arguments in enumerate(calls)]
        waiting = deque(range(len(calls)))
        answers: dict[int, Answer] = {}
        try:
            while len(answers) < len(calls):
                self._hand_out(waiting, bodies, limit)
                self._collect(answers, limit)
        except BaseException:
            for worker in [worker for worker in self._workers if worker.row is not None]:
                self._free(worker)
            self.close()  # an interrupt must not leave rows of this call for the next one
            raise
        return [answers[number] for number in range(len(calls))]

    def _hand_out(self, waiting: deque[int], bodies: list[bytes], limits: Sequence[float]) -> None:
        idle = [worker for worker in self._workers if worker.row is None]
        while waiting and (idle or len(self._workers) < self._size):
            if not idle:
                self._workers.append(_Worker(self._function, self._memory_mb))
                idle.append(self._workers[-1])
            wait = self._rate_limit.try_enter() if self._rate_limit else 0.0
            if wait > 0:
                self._wake = time.monotonic() + wait
                return
            self._wake = 0.0
            worker = idle.pop()
            worker.row = waiting.popleft()
            worker.deadline = time.monotonic() + (START_SECONDS if worker.fresh else limits[worker.row])
            worker.send(bodies[worker.row])

    def _collect(self, answers: dict[int, Answer], limits: Sequence[float]) -> None:
        """Wait for the next answer or deadline, and take what is there."""
        busy = [worker for worker in self._workers if worker.row is not None]
        with selectors.DefaultSelector() as selector:
            for worker in busy:
                selector.register(worker.process.stdout, selectors.EVENT_READ, worker)  # type: ignore[arg-type]
            times = [worker.deadline for worker in busy] + ([self._wake] if self._wake else [])
            wait = max(min(times) - time.monotonic(), 0.0)
            ready = {key.data for key, _ in selector.select(wait)}
        for worker in busy:
            if worker in ready:
                self._take(worker, answers, limits)
            elif time.monotonic() >= worker.deadline:
                seconds = START_SECONDS if worker.fresh else limits[worker.row or 0]
                what = "its worker did not start" if worker.fresh else "no answer"
                self._lose(worker, answers, f"{what} within {seconds:g} s and was ended", seconds)

    def _take(self, worker: _Worker, answers: dict[int, Answer], limits: Sequence[float]) -> None:
        import cloudpickle

        assert worker.process.stdout is not None
        frame = read_frame(worker.process.stdout)  # type: ignore[arg-type]
        if frame is None:
            self._lose(worker, answers, f"the worker ended with exit code {worker.process.wait()}", 0.0)
            return
        record = cloudpickle.loads(frame)  # our own child, over a pipe
        if worker.fresh:  # the first frame says whether the function could be loaded
            worker.fresh = False
            assert worker.row is not None
            worker.deadline = time.monotonic() + limits[worker.row]
            if record is not None:
                self._lose(worker, answers, f"the function cannot be loaded in a worker: {record}", 0.0)
            return
        number, ok, result, seconds, printed = record
        why, text = ("", None) if ok else result
        self._free(worker)
        answers[number] = Answer(ok, result if ok else None, why, text, seconds, printed)

    def _lose(self, worker: _Worker, answers: dict[int, Answer], why: str, seconds: float) -> None:
        """The row has no answer, and the worker is no more."""
        assert worker.row is not None
        answers[worker.row] = Answer(False, None, why, None, seconds)
        self._free(worker)
        worker.end()
        self._workers.remove(worker)

    def _free(self, worker: _Worker) -> None:
        """The worker has no row any more, and the rate limit a place."""
        worker.row = None
        if self._rate_limit is not None:
            self._rate_limit.leave()
