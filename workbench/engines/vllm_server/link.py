"""The driver's end of vLLM's process: starts it, sends requests, watches it, and leaves nothing of it behind."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from workbench.base.child import Child, Questions
from workbench.base.distribution import install
from workbench.base.errors import EngineError, WorkerLost
from workbench.engines.vllm_server import process

Answer = Future[dict[str, Any]]
_LOOK_SECONDS = 0.5
_GRACE_SECONDS = 5.0
_LOG_BYTES = 1 << 20
_CAUSE = re.compile(r"(?:^|\s|\])((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|OutOfMemory)\b: .+)$")
_SHARED = re.compile(r"/dev/shm/(?:psm_|vllm_|sem\.mp-)[^\s/]+")
_REFERS = re.compile(
    r"Engine core initialization failed|EngineCore encountered an issue|Failed core proc|EngineDeadError"
)


class Link:
    """The driver's connection to a process that runs vLLM, with its unanswered requests; ended by `close()`. If the process
    fails, every waiting request raises the error."""

    def __init__(
        self, python: str, environment: Mapping[str, str], first: Mapping[str, Any], *, stall_seconds: float
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="workbench-vllm-"))
        self._stall = stall_seconds
        self._lock = threading.Lock()
        self._asked = Questions()
        self._stoppable: set[int] = set()
        self._error: EngineError | None = None
        self._shared: set[Path] = set()
        self._closed = False
        self._heard = time.monotonic()
        self._first, self.ready = self._asked.open()
        # its own name in a folder of its own: see `process`
        file = shutil.copy(process.__file__, self.folder / f"{process.MODULE}.py")
        paths = [str(self.folder), *filter(None, [environment.get("PYTHONPATH", "")])]
        env = {**environment, "PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}
        try:
            self._child = Child(file, env=env, python=python, folder=self.folder)
        except OSError as cause:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise EngineError(f"cannot start the interpreter {python!r} for vLLM", found=cause) from cause
        self.pid = self._child.pid
        self._send(first)
        threading.Thread(target=self._listen, name="workbench-vllm", daemon=True).start()

    # --- asking -----------------------------------------------------------------------------

    def check(self) -> None:
        """Raises `EngineError` where it is closed, `WorkerLost` where its process has ended."""
        if self._closed:
            raise EngineError("this vLLM engine is closed", do="call its restart(), or make a new one")
        if self._error is not None:
            raise copy.copy(self._error)  # each raise adds its traceback to the error

    def ask(self, op: str, *, stoppable: bool = False, **fields: Any) -> Answer:
        """Send a request, and return a future of its answer. Cancelling the future of a `stoppable` request aborts it."""
        with self._lock:
            self.check()
            number, answer = self._asked.open()
            if stoppable:
                if not self._under_way():
                    self._heard = time.monotonic()
                self._stoppable.add(number)
                answer.add_done_callback(lambda done: self._abort(self._asked.given_up()) if done.cancelled() else None)
        self._send({"op": op, "id": number, **fields})
        return answer

    def _under_way(self) -> set[int]:
        """Numbers of the requests that are being sampled."""
        self._stoppable &= self._asked.numbers()
        return set(self._stoppable)

    def _abort(self, numbers: Collection[int]) -> None:
        self._send({"op": "abort", "id": 0, "ids": list(numbers)})

    def _send(self, body: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the listener reports a process that has gone, with its reason
            self._child.line.send(json.dumps(body).encode(), seconds=self._stall)

    # --- listening --------------------------------------------------------------------------

    def _listen(self) -> None:
        """In a thread, until the process ends: hand on what it says, and end it where it says nothing for too long."""
        while True:
            message: dict[str, Any] = {"op": "nothing"}
            try:
                if self._child.line.ready(_LOOK_SECONDS):
                    message = json.loads(self._child.line.receive() or b'{"op": "end"}')
                    self._heard = time.monotonic()
                elif self._child.how(0):
                    message = {"op": "end"}
            except (OSError, ValueError):  # closed by another thread
                message = {"op": "end"}
            if not self.ready.done():
                self._note_shared()
            if message["op"] == "end":
                return self._fail(self._why_it_ended())
            if message["op"] == "failed":
                return self._fail(self._why_it_failed(message))
            if message["op"] in ("ready", "answer"):
                self._asked.answer(message.get("id", self._first), message)
            elif message["op"] == "refused":
                self._asked.answer(message["id"], EngineError("vLLM refused the request", found=message["error"]))
            with self._lock:
                waiting = bool(self._under_way())
            if waiting and time.monotonic() - self._heard > self._stall:
                how = f"has said nothing for {self._stall:g} s"
                return self._fail(WorkerLost(f"vLLM's process {self.pid} {how}", do=_AGAIN, exit=how, log=self.tail()))

    def _fail(self, error: EngineError) -> None:
        """Raise the error to everybody who waits, and to everybody who asks later."""
        with self._lock:
            self._error = error
            left = self._asked.numbers()
        self._kill()  # first: who gets the error may look for what is left
        self._asked.fail(error, left)

    # --- why --------------------------------------------------------------------------------

    def tail(self, lines: int = 20) -> str:
        """The last lines of the process's log."""
        return "\n".join(self._child.tail(_LOG_BYTES).splitlines()[-lines:])

    def _why_it_failed(self, heard: Mapping[str, Any]) -> EngineError:
        found = heard["error"]
        if heard["kind"] in ("ImportError", "ModuleNotFoundError") and "vllm" in found:
            return EngineError("vLLM is not installed", found=found, do=install("vllm"))
        what = "vLLM failed" if self.ready.done() else "vLLM did not start"
        if _REFERS.search(found):  # the engine's process gives the cause in the log only
            found = cause_in(self._child.tail(_LOG_BYTES)) or found
        return EngineError(what, found=found, do=_AGAIN if self.ready.done() else None)

    def _why_it_ended(self) -> EngineError:
        how, tail = self._child.how(_GRACE_SECONDS), self.tail()
        by = "was ended by" if how.startswith(("SIG", "signal")) else "ended with"
        what = f"{by} {how}" if how else "closed its connection"
        when = "" if self.ready.done() else " while it started"
        log = f"its log ends:\n{tail}\n" if tail else "an empty log"
        return WorkerLost(f"vLLM's process {self.pid} {what}{when}", found=log, do=_AGAIN, exit=how or what, log=tail)

    # --- ending -----------------------------------------------------------------------------

    def _kill(self) -> None:
        """End the process and everything that it started, and remove the memory that they shared."""
        self._note_shared()
        self._child.close()
        for path in self._shared:
            path.unlink(missing_ok=True)

    def _note_shared(self) -> None:
        """Remember the memory that its processes share now: who made it may die, or leave it behind at a clean end."""
        if self._child.process.returncode is None:
            self._shared |= _shared_memory(self.pid)

    def close(self) -> None:
        """Ask the process to end, kill it where it does not, and remove its temporary folder."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._note_shared()
        self._send({"op": "stop", "id": 0})
        self._child.how(_GRACE_SECONDS if self.ready.done() else 0)
        self._kill()
        shutil.rmtree(self.folder, ignore_errors=True)


_AGAIN = "call restart() on the engine, or make a new one, and run the stage again"


def _shared_memory(group: int) -> set[Path]:
    """Files of vLLM's shared memory that processes of a group hold: with several ranks they outlive even a clean end."""
    found: set[Path] = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile, or is not ours
            if int((folder / "stat").read_text().rpartition(")")[2].split()[2]) == group:
                found.update(map(Path, _SHARED.findall((folder / "maps").read_text())))
    return found


def cause_in(log: str) -> str:
    """The first error in a log that does not merely refer to another one; "" where there is none."""
    for line in log.splitlines():
        found = _CAUSE.search(line)
        if found and not _REFERS.search(line):
            return found[1].strip()
    return ""
