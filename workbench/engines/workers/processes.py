"""A group of worker processes on this machine, without Ray: started, called over socket pairs, watched and ended.

What a worker prints goes to its own log, whose end is part of the error when it dies. Only bytes of our own parent process are
unpickled, over a socket pair that nobody else has an end of.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import queue
import shutil
import signal
import socket
import statistics
import tempfile
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from workbench.base import runtime
from workbench.base.child import Child, Line, importing
from workbench.base.errors import EngineError, Interrupted, WorkbenchError, WorkerLost, message

cloudpickle: Any = import_module("cloudpickle" if find_spec("cloudpickle") else "pickle")
"""Without it, as on a bare machine, only what has a name in a module can travel."""
START_SECONDS = 900.0
"""Seconds that a worker may take to start and make its object, which may be a large model; one that dies is seen at once."""
GRACE = 10.0
"""Seconds that the other ranks have to finish after one has raised; later they are taken to be stuck in a collective."""
FIRST_DEADLINE = 1800.0
"""Seconds that a call may take while nothing is known of its like."""
LEAST_DEADLINE = 30.0
TIMES = 10.0
"""A call may take so many times the median of its like."""
_STOP = b"stop"
_ENDED = "all workers of the group were ended; start another and restore a snapshot or load a checkpoint"


class Processes:
    """A group (`Ranks`) of `size` worker processes on this machine, each holding one object made by `factory(rank,
    size, **settings)`.

    `env` adds environment variables; by default a process has one thread, and sockets on loopback only. Raises
    `EngineError` with the traceback where a factory raises, `WorkerLost` where a process dies at once.
    """

    def __init__(
        self, factory: Callable[..., Any], size: int, *, env: Mapping[str, str] | None = None, **settings: Any
    ) -> None:
        self.size = size
        self._folder = Path(tempfile.mkdtemp(prefix="workbench-ranks-"))
        self._answers: queue.SimpleQueue[tuple[int, int, bytearray | None]] = queue.SimpleQueue()
        self._number = 0
        self._lock = threading.Lock()
        self.closed: str | None = None
        """Why the group is gone; None while it lives."""
        self._workers: list[Child] = []
        self._end = weakref.finalize(self, _end_all, self._workers, self._folder)
        for rank in range(size):
            worker = Child(__file__, env=_environment(env or {}), folder=self._folder, log=f"rank_{rank}.log")
            self._workers.append(worker)
            threading.Thread(target=_listen, args=(worker.line, rank, self._answers), daemon=True).start()
        each = [(factory, rank, size, settings) for rank in range(size)]
        try:
            self.call("", each=each, timeout=START_SECONDS)
        except BaseException:
            self.close()
            raise

    def call(
        self, method: str, *shared: Any, each: Sequence[tuple[Any, ...]] | None = None, timeout: float | None = None
    ) -> list[Any]:
        """Call a method of the object on every rank and return the results (see `Ranks.call`); one call runs at a time."""
        with self._lock:
            if self.closed is not None:
                raise WorkerLost("this group of workers has ended", found=self.closed, do="start a new group")
            self._number += 1
            blob = cloudpickle.dumps(shared)
            for rank in range(self.size):
                head = cloudpickle.dumps((self._number, method, each[rank] if each is not None else ()))
                self._send(rank, head, blob)
            return self._collect(self._number, timeout)

    def _send(self, rank: int, *frames: bytes) -> None:
        """Send frames to a worker from a thread of their own: a worker that is stopped (SIGSTOP) does not read, and the
        caller must not wait for it."""

        def send(line: Line = self._workers[rank].line) -> None:
            with contextlib.suppress(OSError):  # a dead worker is noticed by the thread that listens to it
                line.send(*frames)

        threading.Thread(target=send, daemon=True).start()

    def _collect(self, number: int, timeout: float | None) -> list[Any]:
        """Collect the answer of each rank to call `number`. Raises the one error that explains what went wrong."""
        end = time.monotonic() + timeout if timeout is not None else math.inf
        answers: dict[int, Any] = {}
        stopped: BaseException | None = None
        raised: BaseException | None = None
        while len(answers) < self.size:
            try:
                if stopped is None:
                    runtime.check()
                error = self._take(number, answers)
                if error is not None and raised is None:
                    raised, end = error, min(end, time.monotonic() + GRACE)
            except (Interrupted, KeyboardInterrupt) as interrupt:
                stopped, end = interrupt, time.monotonic() + runtime.PATIENCE
                for rank in range(self.size):
                    self._send(rank, _STOP + number.to_bytes(8, "little"))
            if time.monotonic() > end:
                overdue = self._overdue(answers, timeout, raised)
                raise stopped or overdue
        if (why := stopped or raised) is not None:
            raise why
        return [answers[rank] for rank in range(self.size)]

    def _take(self, number: int, answers: dict[int, Any]) -> BaseException | None:
        """Store the next answer, if one arrives soon; returns the error that a rank raised: a workbench error as it is,
        any other as `EngineError`."""
        try:
            rank, answered, body = self._answers.get(timeout=0.05)
        except queue.Empty:
            return None
        if body is None:
            raise self._lost_error(rank)
        if answered != number:
            return None
        ok, answers[rank] = cloudpickle.loads(body)  # bytes from our own child, over a socket pair
        if ok:
            return None
        error, name, text = answers[rank]
        there = EngineError(f"rank {rank} raised {name}:\n{text}")
        if isinstance(error, WorkbenchError):
            error.__cause__ = there
            return error
        return there

    def _lost_error(self, rank: int) -> WorkerLost:
        """Make the `WorkerLost` error for a dead worker, with the end of its log, and end the other workers."""
        worker = self._workers[rank]
        how = worker.how() or "still running, but its connection is closed"
        log = worker.tail()
        where = f"pid {worker.pid} on {socket.gethostname()}, of {self.size}"
        text = message(f"the worker of rank {rank} ({where}) died", found=how, do=_ENDED)
        self.close(f"rank {rank} (pid {worker.pid}) died: {how}")
        return WorkerLost(f"{text}; the end of its log:\n{log or '(empty)'}", rank=rank, exit=how, log=log)

    def _overdue(self, done: Mapping[int, Any], timeout: float | None, raised: BaseException | None) -> BaseException:
        """Make the error for a call past its deadline: late ranks write their stacks to their logs, and all workers are
        ended."""
        late = [rank for rank in range(self.size) if rank not in done]
        for rank in late:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._workers[rank].pid, signal.SIGUSR1)
        time.sleep(0.3)
        halted = [rank for rank in late if _state(self._workers[rank].pid) == "T"]
        pids = ", ".join(str(self._workers[rank].pid) for rank in late)
        logs = "\n".join(f"--- rank {rank}\n{self.log(rank)}" for rank in late)
        self.close(f"ranks {late} did not answer in time")
        if raised is not None:
            raised.add_note("the other ranks waited for this one in a collective: the group was ended")
            return raised
        what = f"ranks {late} of {self.size} did not answer in {timeout or 0:.0f} seconds (pids {pids} on {socket.gethostname()})"
        text = message(what, found=f"ranks {halted} are stopped (SIGSTOP)" if halted else None, do=_ENDED)
        return TimeoutError(f"{text}; their stacks, from their logs:\n{logs}")

    def log(self, rank: int, size: int = 2000) -> str:
        """The last `size` bytes of a worker's log, as text."""
        return self._workers[rank].tail(size)

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers, by rank."""
        return [worker.pid for worker in self._workers]

    def close(self, why: str = "it was closed") -> None:
        """End the workers and all processes that they started; later calls give `why` as the reason."""
        self.closed = self.closed or why
        self._end()

    def __repr__(self) -> str:
        return f"Processes({self.size} ranks, {self.closed or 'running: pids ' + ', '.join(map(str, self.pids))})"


processes = Processes


# --- the driver's side ----------------------------------------------------------------------


def _environment(env: Mapping[str, str]) -> dict[str, str]:
    """Build a worker's environment: one thread, and sockets on loopback only, unless `env` has other values."""
    loopback = {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}
    sockets = {key: name for name in loopback for key in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}
    return {**importing(os.environ), "PYTHONUNBUFFERED": "1", **sockets, **env}


def _listen(line: Line, rank: int, answers: queue.SimpleQueue[tuple[int, int, bytearray | None]]) -> None:
    """Run in a thread: put a worker's answers into the queue until its connection ends."""
    while (number := line.receive()) is not None and (body := line.receive()) is not None:
        answers.put((rank, int.from_bytes(number, "little"), body))
    answers.put((rank, 0, None))


def _end_all(workers: list[Child], folder: Path) -> None:
    for worker in workers:
        worker.close()
    shutil.rmtree(folder, ignore_errors=True)


def _state(pid: int) -> str:
    """Return the kernel's state letter of a process (`T`: stopped); empty where it cannot be read."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]
    return ""


# --- the worker's side ----------------------------------------------------------------------


def main(parent: Any) -> None:
    """Run a worker process: create the object, answer calls, and end with the driver."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    calls: queue.SimpleQueue[tuple[bytes, bytes]] = queue.SimpleQueue()
    stop = [0]
    threading.Thread(target=_read_calls, args=(parent, calls, stop), daemon=True).start()
    held: Any = None
    while True:
        held = _answer_call(held, *calls.get(), parent, stop)


def _answer_call(held: Any, head: bytes, blob: bytes, parent: Any, stop: list[int]) -> Any:
    """Make one call and send its answer to the driver; returns the object that the worker holds from then on."""
    number, method, mine = cloudpickle.loads(head)  # bytes from our own parent, over a socket pair
    if stop[0] != number:
        runtime.clear()
    try:
        if method:
            result = getattr(held, method)(*mine, *cloudpickle.loads(blob))
        else:
            factory, rank, size, settings = mine
            held, result = factory(rank, size, **settings), None
        body = cloudpickle.dumps((True, result))
    except Exception as error:  # noqa: BLE001 - sent to the driver, which raises it
        traceback.print_exc()
        name, text = type(error).__name__, "".join(traceback.format_exception(error))
        body = cloudpickle.dumps((False, (None, name, text)))
        if isinstance(error, WorkbenchError):
            error.__cause__ = error.__context__ = None
            with contextlib.suppress(Exception):  # one that cannot be pickled goes as text
                body = cloudpickle.dumps((False, (error.with_traceback(None), name, text)))
    parent.send(number.to_bytes(8, "little"), body)
    return held


def _read_calls(parent: Any, calls: queue.SimpleQueue[tuple[bytes, bytes]], stop: list[int]) -> None:
    """Run in a thread: put calls into the queue, and set the interrupt flag when the driver asks to stop."""
    while True:
        head = parent.frames.get()
        if head.startswith(_STOP):
            stop[0] = int.from_bytes(head[len(_STOP) :], "little")
            runtime.interrupt()
        else:
            calls.put((head, parent.frames.get()))


class Deadlines:
    """Deadlines of calls, learned from earlier ones: `FIRST_DEADLINE` until a call of the same kind has ended, then
    `TIMES` the median of the last ones, and at least `LEAST_DEADLINE`.

    Calls have a `size`, such as a number of tokens; the seconds of a smaller call are scaled up by the square of the
    ratio of sizes. After a late call the next one has the generous first deadline again, so that a machine that has
    become slow loses one call to it, and not each.
    """

    def __init__(self) -> None:
        self._took: dict[str, deque[tuple[float, int]]] = {}

    def of(self, method: str, size: int = 1) -> float:
        """Return the deadline, in seconds, of a call of `method` with this size."""
        took = [seconds * max(1.0, size / then) ** 2 for seconds, then in self._took.get(method, ())]
        return max(LEAST_DEADLINE, TIMES * statistics.median(took)) if took else FIRST_DEADLINE

    def took(self, method: str, seconds: float, size: int = 1) -> None:
        """Record that a call of `method` took so many seconds."""
        self._took.setdefault(method, deque(maxlen=101)).append((seconds, max(size, 1)))

    def late(self, method: str) -> None:
        """Record that a call of `method` was late: its next deadline is the first one again."""
        self._took.pop(method, None)

    @contextlib.contextmanager
    def watched(self, method: str, size: int = 1) -> Iterator[float]:
        """Context manager around a call: yields its deadline in seconds, and records how long it took."""
        began = time.monotonic()
        try:
            yield self.of(method, size)
        except TimeoutError:
            self.late(method)
            raise
        self.took(method, time.monotonic() - began, size)


@runtime_checkable
class Ranks(Protocol):
    """Protocol of a group of workers, each holding one object that was made on its rank."""

    size: int
    """Number of ranks."""
    closed: str | None
    """Why the group is gone; None while it lives."""

    def call(
        self, method: str, *shared: Any, each: Sequence[tuple[Any, ...]] | None = None, timeout: float | None = None
    ) -> list[Any]:
        """Call `method(*each[rank], *shared)` of the object on every rank at once; returns one result per rank, in
        order.

        An interrupt (`runtime.check()`) is passed on to every worker, which stops at its next safe point. Raises
        `WorkerLost` where a worker dies, `EngineError` with the rank's traceback where one raises (workbench errors
        keep their type), `TimeoutError` past `timeout` seconds. After a lost worker or a time-out the whole group has
        ended.
        """

    def close(self) -> None:
        """End the workers; may be called twice."""
