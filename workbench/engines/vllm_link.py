"""The driver's end of a process that holds vLLM: starts it, asks it, watches it, and leaves nothing of it behind."""

from __future__ import annotations

import contextlib
import copy
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from pathlib import Path
from typing import Any

from workbench import background
from workbench.engines import vllm_process
from workbench.engines.vllm_process import receive, send
from workbench.errors import EngineError, Interrupted, WorkerLost, message

Answer = Future[dict[str, Any]]
_LOOK_SECONDS = 0.05
_IDLE_SECONDS = 0.5
_GRACE_SECONDS = 5.0
_TAIL_LINES = 20
_CAUSE = re.compile(r"(?:^|\s|\])((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|OutOfMemory)\b: .+)$")
_SHARED = re.compile(r"/dev/shm/(?:psm_|vllm_|sem\.mp-)[^\s/]+")
_REFERS = re.compile(
    r"Engine core initialization failed|EngineCore encountered an issue|Failed core proc|EngineDeadError"
)


class Link:
    """One process and its answers. Made by `Link(...)`, ended by `close()`; every failure of the process is an error to
    whoever waits, never a wait without end."""

    def __init__(
        self, python: str, environment: Mapping[str, str], first: Mapping[str, Any], *, stall_seconds: float
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="workbench-vllm-"))
        self.log = self.folder / "log.txt"
        self._stall = stall_seconds
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._answers: dict[int, Answer] = {}
        self._stoppable: set[int] = set()
        self._count = 0
        self._error: EngineError | None = None
        self._shared: set[Path] = set()
        self._closed = False
        self._heard = time.monotonic()
        self.ready: Answer = Future()
        self._socket, theirs = socket.socketpair()
        # its own name in a folder of its own: see vllm_process
        shutil.copy(vllm_process.__file__, self.folder / f"{vllm_process.MODULE}.py")
        paths = [str(self.folder), *filter(None, [environment.get("PYTHONPATH", "")])]
        with self.log.open("wb") as log, theirs:
            try:
                self._process = subprocess.Popen(
                    [python, "-P", str(self.folder / f"{vllm_process.MODULE}.py"), str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**environment, "PYTHONPATH": os.pathsep.join(paths)},
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # its workers end with it
                )
            except OSError as cause:
                self._socket.close()
                shutil.rmtree(self.folder, ignore_errors=True)
                raise EngineError(message(f"cannot start {python!r} for vLLM", found=cause)) from cause
        self.pid = self._process.pid
        send(self._socket, dict(first))
        threading.Thread(target=self._listen, name="workbench-vllm", daemon=True).start()

    # --- asking -----------------------------------------------------------------------------

    def ask(self, op: str, *, stoppable: bool = False, **fields: Any) -> Answer:
        """Send a message; its answer comes as a future. Cancelling the future of a stoppable one aborts the request."""
        answer: Answer = Future()
        with self._lock:
            if self._error is not None:
                raise copy.copy(self._error)  # a raised error gathers the traceback of everybody who meets it
            if self._closed:
                raise EngineError(message("this vLLM engine is closed", do="make a new one, or call restart()"))
            self._count += 1
            number = self._count
            self._answers[number] = answer
            if stoppable:
                self._stoppable.add(number)
                if len(self._stoppable) == 1:
                    self._heard = time.monotonic()
        if stoppable:
            answer.add_done_callback(lambda done: self._give_up([number]) if done.cancelled() else None)
        self._send({"op": op, "id": number, **fields})
        return answer

    def _give_up(self, numbers: Sequence[int]) -> None:
        with self._lock:
            for number in numbers:
                self._answers.pop(number, None)
                self._stoppable.discard(number)
        self._send({"op": "abort", "ids": list(numbers)})

    def _send(self, body: dict[str, Any]) -> None:
        # a process that has gone is told of by the listener, with its reason
        with contextlib.suppress(OSError), self._sending:
            send(self._socket, body)

    # --- listening --------------------------------------------------------------------------

    def _listen(self) -> None:
        while True:
            try:
                waiting = bool(self._stoppable)
                readable, _, _ = select.select([self._socket], [], [], _LOOK_SECONDS if waiting else _IDLE_SECONDS)
                told = receive(self._socket) if readable else {"op": "nothing"}
            except (OSError, ValueError):  # closed under us
                told = None
            if told is None or (not readable and self._ended()):
                return self._fail(self._why_it_ended())
            if not self.ready.done():
                self._note_shared()
            if readable:
                self._heard = time.monotonic()
            if told["op"] == "failed":
                return self._fail(self._why_it_failed(told))
            self._deliver(told)
            self._stop_if_asked()
            if waiting and time.monotonic() - self._heard > self._stall:
                self._kill()
                how = f"has said nothing for {self._stall:g} s"
                return self._fail(
                    WorkerLost(message(f"vLLM's process {self.pid} {how}", do=_AGAIN), exit=how, log=self.tail())
                )

    def _deliver(self, told: dict[str, Any]) -> None:
        if told["op"] == "ready":
            self.ready.set_result(told)
        if told["op"] not in ("answer", "refused"):
            return
        with self._lock:
            answer = self._answers.pop(told["id"], None)
            self._stoppable.discard(told["id"])
        if answer is not None and told["op"] == "answer":
            _give(answer, told)
        elif answer is not None:
            _give(answer, EngineError(message("vLLM refused the request", found=told["error"])))

    def _stop_if_asked(self) -> None:
        """An interrupt of this process aborts what is being sampled."""
        if not self._stoppable:
            return
        try:
            background.check()
        except Interrupted as asked:
            with self._lock:
                stopped = {number: self._answers[number] for number in self._stoppable}
            self._give_up(list(stopped))
            for answer in stopped.values():
                _give(answer, Interrupted(str(asked)))

    def _fail(self, error: EngineError) -> None:
        """Everybody who waits, and everybody who asks later, is told."""
        with self._lock:
            self._error = None if self._closed else error
            left, self._answers = list(self._answers.values()), {}
            self._stoppable.clear()
        self._kill()  # who is told may look for what is left
        for answer in [self.ready, *left]:
            _give(answer, copy.copy(error))

    # --- why --------------------------------------------------------------------------------

    def tail(self, lines: int = _TAIL_LINES) -> str:
        """The last lines that the process wrote."""
        text = self.log.read_text(errors="replace") if self.log.is_file() else ""
        return "\n".join(text.splitlines()[-lines:])

    def _why_it_failed(self, told: Mapping[str, Any]) -> EngineError:
        found = told["error"]
        if told["kind"] in ("ImportError", "ModuleNotFoundError") and "vllm" in found:
            return EngineError(message("vLLM is not installed", found=found, do="pip install 'workbench[vllm]'"))
        what = "vLLM failed" if self.ready.done() else "vLLM did not start"
        if _REFERS.search(found):  # the engine's process says why in the log only
            found = cause_in(self.log.read_text(errors="replace")) or found
        return EngineError(message(what, found=found, do=_AGAIN if self.ready.done() else None))

    def _why_it_ended(self) -> EngineError:
        end = time.monotonic() + _GRACE_SECONDS
        while not self._ended() and time.monotonic() < end:
            time.sleep(0.02)
        status = self._status()
        how = (
            "went away" if status is None else f"was ended by {_signal(-status)}" if status < 0 else f"exited {status}"
        )
        when = "" if self.ready.done() else " while it started"
        tail = self.tail()
        words = f"its last words:\n{tail}\n" if tail else "no last words"
        return WorkerLost(
            message(f"vLLM's process {self.pid} {how}{when}", found=words, do=_AGAIN),
            exit=how.removeprefix("was ended by "),
            log=tail,
        )

    def _status(self) -> int | None:
        """Exit status as `Popen.returncode`, the process not being reaped by it: its number stays its own until `_kill`."""
        if self._process.returncode is not None:
            return self._process.returncode
        try:
            found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return self._process.poll()
        if found is None:
            return None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    def _ended(self) -> bool:
        return self._status() is not None

    # --- ending -----------------------------------------------------------------------------

    def _kill(self) -> None:
        """The process and all that it started, and the memory that they shared."""
        with self._sending:
            if self._process.returncode is not None:
                return
            self._note_shared()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
            for path in self._shared:
                path.unlink(missing_ok=True)

    def _note_shared(self) -> None:
        """What its processes share now: who makes a segment may die, or leave it behind at a clean end."""
        if self._process.returncode is None:
            self._shared |= _shared_memory(self.pid)

    def close(self) -> None:
        """Ask it to end, see to it that it does, and remove its folder."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._note_shared()
        self._send({"op": "stop", "id": 0})
        end = time.monotonic() + (_GRACE_SECONDS if self.ready.done() else 0)
        while not self._ended() and time.monotonic() < end:
            time.sleep(0.02)
        self._kill()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        shutil.rmtree(self.folder, ignore_errors=True)


_AGAIN = "call restart() on the engine, or make a new one, and run the stage again"


def _give(answer: Answer, value: dict[str, Any] | BaseException) -> None:
    with contextlib.suppress(InvalidStateError):  # given up meanwhile
        give: Callable[[Any], None] = answer.set_exception if isinstance(value, BaseException) else answer.set_result
        give(value)


def _shared_memory(group: int) -> set[Path]:
    """Named shared memory of vLLM's that processes of a group hold: with several ranks it outlives even a clean end."""
    found: set[Path] = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile, or is not ours
            if int((folder / "stat").read_text().rpartition(")")[2].split()[2]) == group:
                found.update(map(Path, _SHARED.findall((folder / "maps").read_text())))
    return found


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def cause_in(log: str) -> str:
    """The first error of a log that is not merely about another one; "" where there is none."""
    for line in log.splitlines():
        found = _CAUSE.search(line)
        if found and not _REFERS.search(line):
            return found[1].strip()
    return ""
