"""A child process in a session of its own that exchanges messages with its parent, and is ended with all that it started.

Both ends are in this file. The parent imports it. The child runs it by its path, so that it starts with the standard library
alone, and then runs the file that it was started for: a function `main(parent)` there takes messages from `parent.frames` and
answers with `parent.send`. Messages are bytes; their contents are up to the parent and its child.
"""

from __future__ import annotations

import contextlib
import copy
import os
import queue
import runpy
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, InvalidStateError
from pathlib import Path
from typing import Any

_LENGTH = struct.Struct(">Q")
_BLOCK = 1 << 20
_RUN = "import runpy, sys; runpy.run_path(sys.argv[1])['_serve'](*sys.argv[2:])"


class Line:
    """One end of a socket pair that carries whole messages: eight bytes of length, then the body."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._sending = threading.Lock()

    def send(self, *bodies: bytes, seconds: float | None = None) -> None:
        """Send messages one after the other; messages of other threads wait until all are sent.

        Raises `OSError` where an end is closed, `TimeoutError` where not all could be sent within `seconds`.
        """
        end = None if seconds is None else time.monotonic() + seconds
        with self._sending:
            for part in (part for body in bodies for part in (_LENGTH.pack(len(body)), body)):
                left = memoryview(part)
                while left:
                    self._wait(select.POLLOUT, end)
                    with contextlib.suppress(BlockingIOError):
                        left = left[self._socket.send(left[:_BLOCK], socket.MSG_DONTWAIT) :]

    def receive(self, seconds: float | None = None) -> bytearray | None:
        """Wait for the next message and return it; None where an end is closed. Raises `TimeoutError` after `seconds`."""
        end = None if seconds is None else time.monotonic() + seconds
        head = self._exactly(_LENGTH.size, end)
        return None if head is None else self._exactly(_LENGTH.unpack(head)[0], end)

    def _exactly(self, count: int, end: float | None) -> bytearray | None:
        held = bytearray()
        while len(held) < count:
            try:
                self._wait(select.POLLIN, end)
                block = self._socket.recv(min(count - len(held), _BLOCK))
            except TimeoutError:
                raise
            except OSError:
                return None
            if not block:
                return None
            held += block
        return held

    def _wait(self, event: int, end: float | None) -> None:
        if not self.ready(None if end is None else end - time.monotonic(), event):
            raise TimeoutError("the process at the other end did not answer in time")

    def ready(self, seconds: float | None, event: int = select.POLLIN) -> bool:
        """Wait up to `seconds` (None: for ever) and return whether a read (with `POLLOUT` a write) would not block."""
        poll = select.poll()
        try:
            poll.register(self._socket, event)
        except ValueError as cause:
            raise ConnectionError("the connection to the other process was closed at this end") from cause
        return bool(poll.poll(None if seconds is None else max(seconds, 0.0) * 1000))


# --- the parent's side ----------------------------------------------------------------------------


def importing(env: Mapping[str, str]) -> dict[str, str]:
    """`env` for a child process with one thread and this process's import path (`OMP_NUM_THREADS`, `PYTHONPATH`)."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return {**env, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


class Child:
    """A child process that runs `main(parent)` of a Python file, until `close`, or this object or this process ends.

    Its standard input is empty. Its output goes to `log` in `folder`, where one is given; a child whose parent was killed
    removes the folder. Raises `OSError` where the interpreter cannot be started.
    """

    def __init__(
        self,
        file: str | Path,
        *,
        env: Mapping[str, str],
        python: str = sys.executable,
        folder: Path | None = None,
        log: str = "log.txt",
    ) -> None:
        ours, theirs = socket.socketpair()
        self.log = folder / log if folder is not None else None
        with theirs, open(self.log or os.devnull, "wb") as written:
            try:
                self.process = subprocess.Popen(
                    [python, "-c", _RUN, __file__, str(theirs.fileno()), str(file), str(folder or "")],
                    stdin=subprocess.DEVNULL,
                    stdout=written,
                    stderr=subprocess.STDOUT,
                    env=dict(env),
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # Ctrl-C reaches this process alone; what the child starts ends with it
                )
            except OSError:
                ours.close()
                raise
        self.line = Line(ours)
        self.pid = self.process.pid
        self._owner = os.getpid()
        self._end = weakref.finalize(self, _close, self.process, ours, self._owner)

    @property
    def alive(self) -> bool:
        """Whether the child runs and was started by this very process (in a fork of this process: False)."""
        return self._owner == os.getpid() and code_of(self.process) is None

    def exchange(self, body: bytes | None, seconds: float) -> bytearray:
        """Send `body` to the child (unless None), wait for the child's next message, and return it.

        Raises `TimeoutError` after `seconds`, and another `OSError` where the child has ended; both close the child.
        """
        end = time.monotonic() + seconds
        try:
            if body is not None:
                self.line.send(body, seconds=seconds)
            answer = self.line.receive(end - time.monotonic())
            if answer is None:
                raise ConnectionError("the child process has ended without an answer")
        except OSError:
            self.close()
            raise
        return answer

    def how(self, seconds: float = 2.0) -> str:
        """How the child ended, in words (`SIGKILL`, `exit code 3`); "" where it still runs after waiting `seconds`."""
        end = time.monotonic() + seconds
        while (code := code_of(self.process)) is None and time.monotonic() < end:
            time.sleep(0.02)
        return "" if code is None else _words(code)

    def tail(self, size: int = 2000) -> str:
        """The last `size` bytes of the child's output, as text."""
        if self.log is None or not self.log.is_file():
            return ""
        with self.log.open("rb") as file:
            file.seek(max(self.log.stat().st_size - size, 0))
            return file.read().decode("utf-8", "replace").strip()

    def close(self) -> None:
        """End the child and every process that it started; may be called twice."""
        self._end()
        self.process.wait()


def _close(process: subprocess.Popen[bytes], ours: socket.socket, owner: int) -> None:
    if owner != os.getpid():  # a fork of the parent leaves
        return
    end_group(process)
    with contextlib.suppress(OSError):
        ours.shutdown(socket.SHUT_RDWR)  # wakes the threads that listen
    ours.close()


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that leads a session, and all that it started there; none is left when this returns."""
    if process.returncode is None:  # no other process gets its id until it is waited for
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def code_of(process: subprocess.Popen[bytes]) -> int | None:
    """Exit code of a process, like `Popen.returncode`; None while it runs. It is not reaped, so its pid is not reused."""
    if process.returncode is not None:
        return process.returncode
    try:
        found = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return process.poll()
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def _words(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"


class Questions:
    """Unanswered questions: number → future. Each is answered, fails, or is given up (its future is cancelled) once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._out: dict[int, Future[Any]] = {}
        self._given_up: list[int] = []

    def open(self) -> tuple[int, Future[Any]]:
        """Add a question; returns its number and the future of its answer."""
        future: Future[Any] = Future()
        with self._lock:
            self._count += 1
            number = self._count
            self._out[number] = future
        future.add_done_callback(lambda done: self._drop(number) if done.cancelled() else None)
        return number, future

    def _drop(self, number: int) -> None:
        with self._lock:
            if self._out.pop(number, None) is not None:
                self._given_up.append(number)

    def answer(self, number: int, outcome: Any) -> None:
        """Answer a question with a value, or an exception that its future raises; does nothing where it was given up."""
        with self._lock:
            future = self._out.pop(number, None)
        if future is not None:
            with contextlib.suppress(InvalidStateError):  # given up meanwhile
                give: Callable[[Any], None]
                give = future.set_exception if isinstance(outcome, BaseException) else future.set_result
                give(outcome)

    def fail(self, error: BaseException, numbers: Collection[int]) -> None:
        """Answer the questions of these numbers with an exception, which their futures raise."""
        for number in numbers:
            self.answer(number, copy.copy(error))  # a raised error collects the traceback of every place that raises it

    def numbers(self) -> set[int]:
        """Numbers of all unanswered questions."""
        with self._lock:
            return set(self._out)

    def given_up(self) -> list[int]:
        """Numbers of the questions that were given up since the last call of this method."""
        with self._lock:
            numbers, self._given_up = self._given_up, []
            return numbers


# --- the child's side -----------------------------------------------------------------------------


class Parent(Line):
    """The child's line to its parent: `frames` is a queue of the parent's messages. This process ends with the parent."""

    def __init__(self, end: socket.socket, folder: str) -> None:
        super().__init__(end)
        self.frames: queue.SimpleQueue[bytearray] = queue.SimpleQueue()
        threading.Thread(target=self._hear, args=(folder, os.getppid()), daemon=True).start()

    def _hear(self, folder: str, parent: int) -> None:
        """In a thread, as work may never return. A fork may hold the parent's end open, so the parent's id is checked, too."""
        try:
            while os.getppid() == parent:
                if self.ready(1.0):
                    frame = self.receive()
                    if frame is None:
                        break
                    self.frames.put(frame)
        except BaseException:  # noqa: BLE001 - goes to the log; without messages the child cannot go on
            traceback.print_exc()
            os._exit(1)
        if folder:
            shutil.rmtree(folder, ignore_errors=True)
        os.killpg(os.getpgid(0), signal.SIGKILL)


def _serve(descriptor: str, file: str, folder: str) -> None:
    end = socket.socket(fileno=int(descriptor))
    end.set_inheritable(False)
    runpy.run_path(file)["main"](Parent(end, folder))
