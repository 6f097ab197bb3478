"""A child process that exchanges messages with its parent, in a separate session, and is ended together with all
processes that it started.

Both ends are in this file. The parent imports it. The child runs it by its path, so that it starts with the standard library
alone, and then runs the file that it was started for: a function `main(parent)` there takes messages from `parent.frames` and
answers with `parent.send`. Messages are bytes; their contents are up to the parent and its child.

Between the two stands a keeper, the process that the parent starts and that forks the child: no work runs in it, so that it
always can act. It inherits every process of the child's that loses its own parent, in whatever session. When the child ends,
when the parent asks, or when the parent is gone, it kills them all, and then ends as the child did.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import queue
import resource
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
from io import FileIO
from pathlib import Path
from typing import Any

_LENGTH = struct.Struct(">Q")
_BLOCK = 1 << 20
START_SECONDS, IDLE_SECONDS = 600.0, 60.0
"""Time limits in seconds for a child to start: of processor time, and of time without using the processor."""
_END_SECONDS = 5.0
"""Seconds that a keeper process may take to end its child; after that both are killed."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_RUN = "import runpy, sys; runpy.run_path(sys.argv[1])['_serve'](*sys.argv[2:])"


class TooLong(ConnectionError):
    """A message is longer than its receiver accepts, or the bytes that came are not a message."""


class Stuck(TimeoutError):
    """A child process did not answer, although the caller waited for as long as the child used the processor."""


class Line:
    """One end of a socket pair that carries whole messages: eight bytes of length, then the body.

    `beside` is (a pipe, a function that takes the pipe's output); the pipe is read while this end waits.
    """

    def __init__(self, end: socket.socket, beside: tuple[FileIO, Callable[[bytes], None]] | None = None) -> None:
        self._socket = end
        self._beside = beside
        self._sending, self._hearing = threading.Lock(), threading.Lock()

    def send(self, *bodies: bytes, seconds: float | None = None) -> None:
        """Send messages one after the other; messages of other threads wait until all are sent.

        Raises `OSError` where an end is closed, `TimeoutError` where not all could be sent within `seconds`.
        """
        end = None if seconds is None else time.monotonic() + seconds
        with self._sending:
            for body in bodies:
                head = _LENGTH.pack(len(body))
                for part in (head + body,) if len(body) < _BLOCK else (head, body):
                    left = memoryview(part)
                    while left:
                        self._wait(select.POLLOUT, end)
                        with contextlib.suppress(BlockingIOError):
                            left = left[self._socket.send(left[:_BLOCK], socket.MSG_DONTWAIT) :]

    def receive(self, seconds: float | None = None, most: int | None = None) -> bytearray | None:
        """Wait for the next message and return it; None where an end is closed.

        Raises `TimeoutError` after `seconds`, and `TooLong`, before it is read, for one of more than `most` bytes.
        """
        end = None if seconds is None else time.monotonic() + seconds
        head = self._exactly(_LENGTH.size, end)
        if head is None:
            return None
        size = _LENGTH.unpack(head)[0]
        if most is not None and size > most:
            raise TooLong(f"a message between processes has {size} bytes; expected at most {most}")
        return self._exactly(size, end)

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
        end = None if seconds is None else time.monotonic() + seconds
        while True:
            with self._hearing:
                beside = self._beside[0].fileno() if self._beside else -1
            if beside >= 0:
                poll.register(beside, select.POLLIN)
            left = None if end is None else max(end - time.monotonic(), 0.0) * 1000
            numbers = {number for number, _ in poll.poll(left)} - {beside}
            if not self._hear_beside() and beside >= 0 and self._beside is None:
                poll.unregister(beside)
            if numbers or (end is not None and time.monotonic() >= end):
                return bool(numbers)

    def _hear_beside(self) -> int:
        """Pass on one block of what the pipe beside holds, and return the block's size; 0 where it holds nothing."""
        with self._hearing:  # nobody closes it meanwhile: another file would get its number
            if self._beside is None:
                return 0
            pipe, take = self._beside
            block = pipe.read(_BLOCK)  # None where there is nothing yet
            if block == b"":
                pipe.close()
                self._beside = None
            if block:
                take(block)
            return len(block or b"")

    def drain(self) -> None:
        """Pass on what the second pipe (`beside`) holds now, at most 16 blocks: a child may never stop writing."""
        for _ in range(16):
            if not self._hear_beside():
                return

    def close(self) -> None:
        """Close this end; threads that wait at it wake up. May be called twice."""
        self.drain()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with self._hearing:
            if self._beside is not None:
                self._beside[0].close()
                self._beside = None


# --- the parent's side ----------------------------------------------------------------------------


def importing(env: Mapping[str, str]) -> dict[str, str]:
    """Return `env` for a child process that uses one thread and this process's import path (`OMP_NUM_THREADS`,
    `PYTHONPATH`).
    """
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return {**env, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


class Child:
    """A child process that runs `main(parent)` of a Python file, until `close` is called or this object or this process
    ends.

    Its standard input is empty. Its output goes to the file `log` in `folder`, if one is given; where the parent is
    killed, the folder is removed. With `output`, that function gets the child's output in blocks instead, while
    somebody waits at `line`. Raises `OSError` where the interpreter cannot be started.
    """

    def __init__(
        self,
        file: str | Path,
        *,
        env: Mapping[str, str],
        python: str = sys.executable,
        folder: Path | None = None,
        log: str = "log.txt",
        output: Callable[[bytes], None] | None = None,
    ) -> None:
        ours, theirs = socket.socketpair()
        listening, tell = os.pipe()
        self.log = folder / log if folder is not None else None
        self._last = last = bytearray()
        beside, written = None, os.devnull if self.log is None else str(self.log)
        with theirs, contextlib.ExitStack() as stack:
            stack.callback(os.close, tell)
            if output is None:
                target = stack.enter_context(open(written, "wb", buffering=0))
            else:
                ends = os.pipe()
                os.set_blocking(ends[0], False)
                beside = FileIO(ends[0]), functools.partial(_hear, last, output)
                target = stack.enter_context(FileIO(ends[1], "wb"))
            self.line, self._told = Line(ours, beside), FileIO(listening)
            try:
                self.process = subprocess.Popen(
                    [python, "-c", _RUN, __file__, *map(str, (theirs.fileno(), tell, file, folder or ""))],
                    stdin=subprocess.DEVNULL,
                    stdout=target,
                    stderr=subprocess.STDOUT,
                    env=dict(env),
                    pass_fds=[theirs.fileno(), tell],
                    start_new_session=True,  # Ctrl-C reaches this process alone
                )
            except OSError:
                self.line.close()
                self._told.close()
                raise
        self._owner = os.getpid()
        self._end = weakref.finalize(self, _close, self.process, self.line, self._told, self._owner)

    @functools.cached_property
    def pid(self) -> int:
        """The child's process id, which is also that of its process group; reading it waits for the start. 0 where the
        child did not start.
        """
        with self._told:
            return int(self._told.read(20) or 0)

    @property
    def alive(self) -> bool:
        """Whether the child runs and this very process started it (False in a fork of this process)."""
        return self._owner == os.getpid() and code_of(self.process) is None

    def exchange(self, body: bytes | None, seconds: float, most: int | None = None) -> bytearray:
        """Send `body` to the child (unless None), wait for the child's next message, and return it.

        Raises `TimeoutError` after `seconds`, `TooLong` for a message of more than `most` bytes, and another `OSError` where
        the child has ended; each closes the child.
        """
        end = time.monotonic() + seconds
        try:
            if body is not None:
                self.line.send(body, seconds=seconds)
            answer = self.line.receive(end - time.monotonic(), most)
            if answer is None:
                raise ConnectionError("the child process has ended without an answer")
        except OSError:
            self.close()
            raise
        self.line.drain()
        return answer

    def started(self, seconds: float = START_SECONDS, most: int | None = None) -> bytearray:
        """Wait for the child's next message and return it. On a busy machine it waits for as long as the child uses the
        processor.

        Raises `Stuck` where the child and its processes use no processor for `IDLE_SECONDS`, or after `seconds`;
        `TooLong` as `exchange`; and another `OSError`, which says how the child ended and its last line, where it has
        ended. Each closes the child.
        """
        end = time.monotonic() + seconds
        used, idle = -1.0, end
        while not self.line.ready(min(0.5, max(end - time.monotonic(), 0.0))):
            now, cpu = time.monotonic(), _processor_seconds(self.process.pid)
            if cpu > used:
                used, idle = cpu, now + IDLE_SECONDS
            if now >= min(end, idle):
                self.close()
                why = f"used no CPU time for {IDLE_SECONDS:g} s" if now < end else f"was not ready after {seconds:g} s"
                raise Stuck(f"the child process {why} and was ended")
        try:
            return self.exchange(None, IDLE_SECONDS, most)
        except ConnectionError as cause:
            last = self.tail(500).rpartition("\n")[2]
            output = f"; it said: {last[:200]}" if last else ""
            raise type(cause)(f"the child process ended with {self.how() or 'no exit code'}{output}") from cause

    def how(self, seconds: float = 2.0) -> str:
        """Return how the child ended, in words (`SIGKILL`, `exit code 3`); "" where it still runs after `seconds`."""
        end = time.monotonic() + seconds
        while (code := code_of(self.process)) is None and time.monotonic() < end:
            time.sleep(0.02)
        return "" if code is None else _words(code)

    def tail(self, size: int = 2000) -> str:
        """Return the last `size` bytes of the child's output, as text."""
        if self.log is None or not self.log.is_file():
            return self._last[-size:].decode("utf-8", "replace").strip()
        with self.log.open("rb") as file:
            file.seek(max(self.log.stat().st_size - size, 0))
            return file.read().decode("utf-8", "replace").strip()

    def close(self) -> None:
        """End the child and every process that it started; may be called twice."""
        if self._end.alive:  # at the interpreter's end it may have been ended before what has it
            _ = self.pid  # it is asked for later, too
        self._end()
        self.process.wait()


def _hear(last: bytearray, output: Callable[[bytes], None], block: bytes) -> None:
    """Pass on a block of a child's output, and keep the last 2,000 bytes of all blocks in `last`."""
    last += block
    del last[:-2000]
    output(block)


def _processor_seconds(pid: int) -> float:
    """Sum the processor time of a process and of all processes below it, in clock ticks; 0 where /proc is missing."""
    seconds = 0.0
    with contextlib.suppress(OSError):  # it ends meanwhile
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        seconds = sum(map(float, fields[11:15]))
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            seconds += sum(map(_processor_seconds, map(int, children.read_text().split())))
    return seconds


def _close(keeper: subprocess.Popen[bytes], line: Line, pipe: FileIO, owner: int) -> None:
    if owner != os.getpid():  # a fork of the parent leaves
        return
    if keeper.returncode is None:
        for number in (signal.SIGTERM, signal.SIGCONT):  # its child may have stopped it
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(keeper.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            keeper.wait(_END_SECONDS)
        end_group(keeper)
    line.close()
    pipe.close()


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that leads a session, and all processes of that session; none is left when this returns."""
    if process.returncode is None:  # no other process gets its id until it is waited for
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def code_of(process: subprocess.Popen[bytes]) -> int | None:
    """Return the exit code of a process, like `Popen.returncode`; None while it runs. It is not reaped, so its pid is
    not reused.
    """
    if process.returncode is not None:
        return process.returncode
    if not hasattr(os, "waitid"):  # macOS before Python 3.13
        return process.poll()
    try:
        status = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return process.poll()
    if status is None:
        return None
    return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status


def _words(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"


class Questions:
    """Open questions to a child: number → future. Each is answered once, fails, or is given up (its future is
    cancelled).
    """

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
        """Answer a question with a value, or with an exception that its future raises. Does nothing for a question that
        was given up.
        """
        with self._lock:
            future = self._out.pop(number, None)
        if future is not None:
            with contextlib.suppress(InvalidStateError):  # given up meanwhile
                give: Callable[[Any], None]
                give = future.set_exception if isinstance(outcome, BaseException) else future.set_result
                give(outcome)

    def fail(self, error: BaseException, numbers: Collection[int]) -> None:
        """Answer the questions with these numbers with an exception, which their futures raise."""
        for number in numbers:
            self.answer(number, copy.copy(error))  # a raised error collects the traceback of every place that raises it

    def numbers(self) -> set[int]:
        """Return the numbers of all open questions."""
        with self._lock:
            return set(self._out)

    def given_up(self) -> list[int]:
        """Return the numbers of the questions that were given up since the last call of this method."""
        with self._lock:
            numbers, self._given_up = self._given_up, []
            return numbers


# --- the child's side -----------------------------------------------------------------------------


class Parent(Line):
    """The child's end of the connection to its parent. `frames` is a queue of the parent's messages."""

    def __init__(self, end: socket.socket) -> None:
        super().__init__(end)
        self.frames: queue.SimpleQueue[bytearray] = queue.SimpleQueue()
        threading.Thread(target=self._hear, daemon=True).start()  # work may never return

    @staticmethod
    def limit(kind: int, size: int) -> None:
        """Limit a resource of this process (`resource.RLIMIT_…`) to `size` bytes, or to the system's hard limit where
        that is less.
        """
        most = resource.getrlimit(kind)[1]
        size = size if most == resource.RLIM_INFINITY else min(size, most)
        with contextlib.suppress(OSError, ValueError):  # macOS has no limit of address space
            resource.setrlimit(kind, (size, size))

    def _hear(self) -> None:
        try:
            while (frame := self.receive()) is not None:
                self.frames.put(frame)
        except BaseException:  # noqa: BLE001 - goes to the log; without messages the child cannot go on
            traceback.print_exc()
            os._exit(1)


def _serve(descriptor: str, close_pipe: str, file: str, folder: str) -> None:
    """Run as the keeper process: fork the child that runs `file`, and wait to end it with all its processes."""
    end = socket.socket(fileno=int(descriptor))
    end.set_inheritable(False)
    parent, keeper = os.getppid(), os.getpid()
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    child = 0

    def leave(*_: Any) -> None:
        _end_below(child)
        os.kill(os.getpid(), signal.SIGKILL)

    before = signal.signal(signal.SIGTERM, leave)  # so the parent asks
    child = os.fork()
    if child:
        with open(int(close_pipe), "w") as pipe:
            pipe.write(str(child))
        _keep(child, end, parent, folder)
    signal.signal(signal.SIGTERM, before)
    os.close(int(close_pipe))
    os.setsid()  # not the keeper's: what stops or ends its own group leaves that
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # the keeper has one thread: this does not come before the process ends
    if os.getppid() != keeper:
        os._exit(1)
    runpy.run_path(file)["main"](Parent(end))


def _prctl(option: int, value: int) -> None:
    """Set an option of this process by Linux's `prctl`. On other systems nothing is set, and a keeper ends only its
    child's group.
    """
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _keep(child: int, end: socket.socket, parent: int, folder: str) -> None:
    """Wait until the child or the parent ends, kill all remaining processes, and end as the child did."""
    poll = select.poll()
    poll.register(end, 0)  # wakes up when the parent's end is closed
    if hasattr(os, "pidfd_open"):
        poll.register(os.pidfd_open(child), select.POLLIN)
    code = None
    # a fork of the parent may hold its end open, so its id is looked at, too
    while code is None and os.getppid() == parent and not _hung_up(end, poll):
        while code is None and (found := os.waitpid(-1, os.WNOHANG))[0]:
            code = os.waitstatus_to_exitcode(found[1]) if found[0] == child else None
    _end_below(child)
    if folder and (os.getppid() != parent or code is None):
        shutil.rmtree(folder, ignore_errors=True)
    _end_as(code)


def _end_as(code: int | None) -> None:
    """End this process with an exit code; with the signal of that number where the code is negative; with SIGKILL for
    None.
    """
    if code is None or code < 0:
        number = signal.SIGKILL if code is None else -code
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.kill(os.getpid(), number)
    os._exit(code or 0)


def _hung_up(end: socket.socket, poll: select.poll) -> bool:
    """Wait for a second, or until something ends; returns whether the parent has closed its end."""
    return end.fileno() in dict(poll.poll(1000))


def _end_below(child: int) -> None:
    """Kill the child's process group, and every process below this one until none is left. Orphans of the child become
    children of this process, so that they are found.
    """
    if child:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)
    end = time.monotonic() + _END_SECONDS / 2
    while time.monotonic() < end:
        with contextlib.suppress(OSError), open(f"/proc/self/task/{os.getpid()}/children") as below:
            for pid in map(int, below.read().split()):
                os.kill(pid, signal.SIGKILL)
        try:
            ended = os.waitpid(-1, os.WNOHANG)[0]
        except ChildProcessError:
            return
        if not ended:
            time.sleep(0.001)
