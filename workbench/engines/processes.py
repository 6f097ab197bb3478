"""A group of worker processes on this machine, without Ray: spawned, called over socket pairs, watched, and really ended.

A worker's prints go to a log of its own, whose tail stands in the error when it dies. Only bytes of our own parent process
are unpickled, over a socket pair that nobody else has an end of.
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
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from workbench import background
from workbench.errors import EngineError, Interrupted, WorkbenchError, WorkerLost, message

START_SECONDS = 180.0
"""What a worker may take to start and make its object; a busy machine imports torch in twenty."""
GRACE = 10.0
"""Seconds that the others have to finish after one rank has raised; who has not is stuck waiting for it."""
_TAIL = 2_000
_SERVE = "import sys; from workbench.engines.processes import serve; serve(int(sys.argv[1]))"


def processes(
    factory: Callable[..., Any], size: int, *, env: Mapping[str, str] | None = None, **settings: Any
) -> Processes:
    """`size` processes of this machine, each holding `factory(rank, size, **settings)`.

    `env` is laid over the environment; one thread a process and sockets on loopback are the defaults. Raises
    `EngineError` with the traceback where a factory raises, `WorkerLost` where a process dies at once.
    """
    return Processes(factory, size, env or {}, settings)


class Processes:
    """`Ranks` over processes of this machine; see `engines.ranks`."""

    def __init__(
        self, factory: Callable[..., Any], size: int, env: Mapping[str, str], settings: Mapping[str, Any]
    ) -> None:
        self.size = size
        self._folder = Path(tempfile.mkdtemp(prefix="workbench-ranks-"))
        self._answers: queue.SimpleQueue[tuple[int, int, bytes | None]] = queue.SimpleQueue()
        self._number = 0
        self._lock = threading.Lock()
        self._ended = ""
        self._workers: list[subprocess.Popen[bytes]] = []
        self._lines: list[_Line] = []
        self._end = weakref.finalize(self, _end_all, self._workers, self._folder)
        for rank in range(size):
            self._start(rank, env)
        each = [(factory, rank, size, dict(settings)) for rank in range(size)]
        try:
            self.call("", each=each, timeout=START_SECONDS)
        except BaseException:
            self.close()
            raise

    def _start(self, rank: int, env: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair()
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)  # what we can import, it can
        with theirs, open(self._log(rank), "wb") as log:
            worker = subprocess.Popen(
                [sys.executable, "-c", _SERVE, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **_quiet(), "PYTHONPATH": path, **env},
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C in a terminal is the driver's; what a worker starts ends with it
            )
        line = _Line(Connection(ours.detach()))
        self._workers.append(worker)
        self._lines.append(line)
        threading.Thread(target=line.listen, args=(rank, self._answers), daemon=True).start()

    def call(
        self, method: str, *shared: Any, each: Sequence[tuple[Any, ...]] | None = None, timeout: float | None = None
    ) -> list[Any]:
        """As `Ranks.call`; one call at a time."""
        import cloudpickle

        with self._lock:
            if self._ended:
                raise WorkerLost(message("this group of workers has ended", found=self._ended, do="start another"))
            self._number += 1
            blob = cloudpickle.dumps(shared)
            for rank in range(self.size):
                head = cloudpickle.dumps((self._number, method, each[rank] if each is not None else ()))
                # a worker that was stopped does not read: whoever sends to it must not wait for it
                threading.Thread(target=self._lines[rank].send, args=(head, blob), daemon=True).start()
            return self._collect(self._number, timeout)

    def _collect(self, number: int, timeout: float | None) -> list[Any]:
        """One answer of each rank, or the one error that explains."""
        end = time.monotonic() + timeout if timeout is not None else math.inf
        found: dict[int, tuple[bool, Any]] = {}
        stopped: BaseException | None = None
        failed = -1
        while len(found) < self.size:
            try:
                if stopped is None:
                    background.check()
                self._take(number, found)
            except (Interrupted, KeyboardInterrupt) as interrupt:
                stopped, end = interrupt, time.monotonic() + background.PATIENCE
                self._interrupt(number)
            if failed < 0 and (bad := [rank for rank, (ok, _) in found.items() if not ok]):
                failed, end = bad[0], min(end, time.monotonic() + GRACE)
            if time.monotonic() > end:
                overdue = self._overdue(found, timeout)
                raise stopped or (_stuck(_as_error(*found[failed][1], rank=failed)) if failed >= 0 else overdue)
        if stopped is not None:
            raise stopped
        if failed >= 0:
            raise _as_error(*found[failed][1], rank=failed)
        return [found[rank][1] for rank in range(self.size)]

    def _take(self, number: int, found: dict[int, tuple[bool, Any]]) -> None:
        """The next answer, if one comes soon."""
        import cloudpickle

        try:
            rank, answered, body = self._answers.get(timeout=0.05)
        except queue.Empty:
            return
        if body is None:
            raise self._lost(rank)
        if answered == number:
            found[rank] = cloudpickle.loads(body)  # bytes from our own child, over a socket pair

    def _interrupt(self, number: int) -> None:
        for line in self._lines:
            threading.Thread(target=line.send, args=(_STOP + number.to_bytes(8, "little"),), daemon=True).start()

    def _lost(self, rank: int) -> WorkerLost:
        """The error for a dead worker; the others are ended."""
        worker = self._workers[rank]
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.wait(2.0)
        code = worker.returncode
        how = "still running, its line is cut" if code is None else _exit_of(code)
        log = self.log(rank)
        self._ended = f"rank {rank} of it (pid {worker.pid}) died: {how}"
        self._end()
        told = message(
            f"the worker of rank {rank} (pid {worker.pid}, of {self.size}) died",
            found=how,
            do="the group was ended; start another and restore a snapshot or load a checkpoint",
        )
        return WorkerLost(f"{told}; the end of its log:\n{log or '(empty)'}", rank=rank, exit=how, log=log)

    def _overdue(self, found: Mapping[int, Any], timeout: float | None) -> TimeoutError:
        """What to raise past a deadline: the stacks of who did not answer are in their logs; everybody is ended."""
        late = [rank for rank in range(self.size) if rank not in found]
        for rank in late:
            with contextlib.suppress(ProcessLookupError):
                self._workers[rank].send_signal(signal.SIGUSR1)
        time.sleep(0.3)
        halted = [rank for rank in late if _state(self._workers[rank].pid) == "T"]
        logs = "\n".join(f"--- rank {rank}\n{self.log(rank)}" for rank in late)
        self._ended = f"ranks {late} of it did not answer in time"
        self._end()
        told = message(
            f"ranks {late} of {self.size} did not answer in {timeout or 0:.0f} seconds",
            found=f"ranks {halted} are stopped (SIGSTOP)" if halted else None,
            do="the group was ended; start another and restore a snapshot or load a checkpoint",
        )
        return TimeoutError(f"{told}; where they were:\n{logs}")

    def _log(self, rank: int) -> Path:
        return self._folder / f"rank_{rank}.log"

    def log(self, rank: int, size: int = _TAIL) -> str:
        """The last `size` bytes that a worker wrote, as text."""
        with contextlib.suppress(OSError), open(self._log(rank), "rb") as file:
            file.seek(max(os.path.getsize(self._log(rank)) - size, 0))
            return file.read().decode("utf-8", "replace").strip()
        return ""

    @property
    def pids(self) -> list[int]:
        """Of the workers, by rank."""
        return [worker.pid for worker in self._workers]

    def close(self) -> None:
        """End the workers and whatever they started."""
        self._ended = self._ended or "it was closed"
        self._end()

    def __repr__(self) -> str:
        return f"Processes({self.size} ranks, {self._ended or 'running: pids ' + ', '.join(map(str, self.pids))})"


# --- the driver's side ----------------------------------------------------------------------

_STOP = b"stop"


def _quiet() -> dict[str, str]:
    """One thread each, and sockets on loopback alone."""
    loopback = {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}
    sockets = {key: name for name in loopback for key in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}
    return {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **sockets}


class _Line:
    """One worker's socket pair: whole messages go out one at a time, answers come in by a thread."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()

    def send(self, *frames: bytes) -> None:
        """In a thread: a worker that was stopped does not read."""
        with self._sending, contextlib.suppress(OSError):  # a dead worker is found by whoever listens to it
            for frame in frames:
                self._connection.send_bytes(frame)

    def listen(self, rank: int, answers: queue.SimpleQueue[tuple[int, int, bytes | None]]) -> None:
        """In a thread: answers until the worker's end of the line is gone."""
        try:
            while True:
                number = int.from_bytes(self._connection.recv_bytes(), "little")
                answers.put((rank, number, self._connection.recv_bytes()))
        except (EOFError, OSError):
            answers.put((rank, 0, None))
            self._connection.close()


def _end_all(workers: list[subprocess.Popen[bytes]], folder: Path) -> None:
    """Nothing of the group is left when this returns."""
    for worker in workers:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(worker.pid, signal.SIGKILL)
    for worker in workers:
        worker.wait()
    shutil.rmtree(folder, ignore_errors=True)


def _state(pid: int) -> str:
    """The kernel's letter for a process (`T`: stopped); empty where it does not say."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]
    return ""


def _exit_of(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"


def _as_error(error: BaseException | None, name: str, text: str, *, rank: int) -> BaseException:
    """An error of ours as it was, with its rank's traceback as the cause; anything else as an EngineError."""
    there = EngineError(f"rank {rank} raised {name}:\n{text}")
    if isinstance(error, WorkbenchError):
        error.__cause__ = there
        return error
    return there


def _stuck(error: BaseException) -> BaseException:
    error.add_note("the other ranks waited for this one in a collective: the group was ended")
    return error


# --- the worker's side ----------------------------------------------------------------------


def serve(descriptor: int) -> None:
    """A worker's whole life: make the object, answer calls, end when the driver is gone."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    line = Connection(descriptor)
    calls: queue.SimpleQueue[tuple[bytes, bytes]] = queue.SimpleQueue()
    stop = [0]
    threading.Thread(target=_hear, args=(line, calls, stop), daemon=True).start()
    held: Any = None
    while True:
        held = _answered(held, *calls.get(), line, stop)


def _answered(held: Any, head: bytes, blob: bytes, line: Connection, stop: list[int]) -> Any:
    """One call, its answer sent; the object that the worker holds from then on."""
    import cloudpickle

    number, method, mine = cloudpickle.loads(head)  # bytes from our own parent, over a socket pair
    if stop[0] != number:
        background.clear()
    try:
        if method:
            result = getattr(held, method)(*mine, *cloudpickle.loads(blob))
        else:
            factory, rank, size, settings = mine
            held, result = factory(rank, size, **settings), None
        body = cloudpickle.dumps((True, result))
    except Exception as error:  # noqa: BLE001 - told to the driver, which raises it
        traceback.print_exc()
        text = "".join(traceback.format_exception(error))
        ours = error if isinstance(error, WorkbenchError) else None
        body = _packed(ours, type(error).__name__, text)
    line.send_bytes(number.to_bytes(8, "little"))
    line.send_bytes(body)
    return held


def _packed(ours: WorkbenchError | None, name: str, text: str) -> bytes:
    import cloudpickle

    if ours is not None:
        ours = ours.with_traceback(None)
        ours.__cause__ = ours.__context__ = None
        with contextlib.suppress(Exception):  # one that cannot travel goes as text
            return cloudpickle.dumps((False, (ours, name, text)))
    return cloudpickle.dumps((False, (None, name, text)))


def _hear(line: Connection, calls: queue.SimpleQueue[tuple[bytes, bytes]], stop: list[int]) -> None:
    """In a thread: calls go to the queue, an interrupt raises the flag, and the driver's end is our end."""
    try:
        while True:
            head = line.recv_bytes()
            if head.startswith(_STOP):
                stop[0] = int.from_bytes(head[len(_STOP) :], "little")
                background.interrupt()
            else:
                calls.put((head, line.recv_bytes()))
    except (EOFError, OSError):
        os._exit(0)
