"""The Ray actor that runs in a worker: one object, whose methods are called by name. It is pickled by value, so that
neither workbench nor torch is imported before the environment is set.

Calls come one after the other on one thread; `stop`, `stacks` and `now` have threads of their own and are answered while a
call runs, unless C code holds the interpreter's lock: no answer says just that.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
import traceback
from typing import Any

import ray


class Worker:
    """Ray actor of one rank of a group: it holds one object and calls the object's methods."""

    def __init__(self) -> None:
        self.held: Any = None
        self.stopped = -1
        self.number = -1
        self.changing = threading.Lock()
        self.doing = ("", 0.0)
        self.profiler: Any = None
        self.asked_gpus: tuple[float, tuple[int, int] | None] = (-_ASK_GPUS, None)

    def setup(self, env: dict[str, str], paths: list[str]) -> dict[str, Any]:
        """Set variables and the driver's import path before any import; returns pid, host, node, GPUs and log files.

        Where Ray gave the worker no GPU, all GPUs are hidden from it.
        """
        gpus = ",".join(map(str, ray.get_gpu_ids()))
        os.environ.update({} if gpus else {"CUDA_VISIBLE_DEVICES": ""}, **env)
        address = ray.util.get_node_ip_address()
        os.environ.setdefault("WORKBENCH_ADDRESS", address)  # where ranks of a process group meet
        if address.startswith("127.") and sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # else gloo listens on the address of the host's name
        there = [path for path in paths if os.path.exists(path)]
        sys.path[:] = [*there, *(path for path in sys.path if path not in there)]
        node = ray.get_runtime_context().get_node_id()
        where = {"pid": os.getpid(), "host": socket.gethostname(), "node": node}
        return {**where, "gpus": gpus, "logs": [_target(1), _target(2)]}

    def make(self, number: int, packed: Any) -> tuple[Any, ...]:
        """Make the object that this worker holds; `packed` is (factory, rank, size, settings). Returns what `call`
        returns.
        """

        def work() -> None:
            factory, rank, size, settings = packed
            self.held = factory(rank, size, **settings)

        return self._answer(number, "starting", work)

    def call(self, number: int, method: str, own: Any, shared: Any) -> tuple[Any, ...]:
        """Call a method of the held object; returns (`done` or `raised`, result or error, start, end in epoch seconds)."""
        return self._answer(number, method, lambda: getattr(self.held, method)(*own, *shared))

    def profile(self, number: int, start: bool) -> tuple[Any, ...]:
        """Start torch's profiler, or end it; the result is then its gzipped Chrome trace. Queued like a `call`, and
        returns as it does.
        """
        return self._answer(number, "profile", self._start_profile if start else self._end_profile)

    def _start_profile(self) -> None:
        import torch
        from torch._C._profiler import _ExperimentalConfig
        from torch.profiler import ProfilerActivity, profile

        kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
        # engines work on threads of their own, too
        made = profile(activities=kinds, experimental_config=_ExperimentalConfig(profile_all_threads=True))
        made.start()
        self.profiler = made

    def _end_profile(self) -> bytes:
        import tempfile

        profiler, self.profiler = self.profiler, None
        if profiler is None:
            return b""
        profiler.stop()
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "trace.json.gz")
            profiler.export_chrome_trace(path)
            with open(path, "rb") as file:
                return file.read()

    def _answer(self, number: int, name: str, work: Any) -> tuple[Any, ...]:
        from workbench.base import runtime
        from workbench.base.errors import Interrupted, WorkbenchError
        from workbench.cluster.transport import pack

        began = time.time()
        try:
            with self.changing:  # else a stop of the last call could reach this one
                runtime.clear()
                self.number = number
            self.doing = (name, began)
            if number <= self.stopped:
                raise Interrupted(f"the call of {name} was stopped before it began")
            return "done", pack(work()), began, time.time()
        except BaseException as error:  # noqa: BLE001 - the driver raises it
            trace = "".join(traceback.format_exception(error))
            ours = error if isinstance(error, WorkbenchError) else None
            return "raised", (type(error).__name__, str(error), trace, ours), began, time.time()
        finally:
            self.doing = ("", time.time())
            sys.stdout.flush()
            sys.stderr.flush()

    @ray.method(concurrency_group="control")
    def stop(self, number: int) -> None:
        """Ask the calls numbered up to `number` to stop at their next safe point; they raise `Interrupted` there."""
        from workbench.base import runtime

        with self.changing:
            self.stopped = max(self.stopped, number)
            if self.number <= number:
                runtime.interrupt()

    @ray.method(concurrency_group="control")
    def stacks(self) -> str:
        """Return the Python stacks of the threads that are running a call, as text."""
        names = {one.ident: one.name for one in threading.enumerate()}
        parts = []
        for ident, frame in sys._current_frames().items():
            lines = traceback.format_stack(frame)
            if any("in call" in line or "in make" in line for line in lines):
                parts.append(f"thread {names.get(ident, ident)}\n{''.join(lines[-6:])}")
        return "\n".join(parts) or "no call is running"

    @ray.method(concurrency_group="control")
    def now(self) -> dict[str, Any]:
        """Return what runs now: `doing` (a method or ""), its `seconds`, `resident` bytes, `gpu` (used, total) bytes or
        None.
        """
        import psutil

        name, since = self.doing
        resident = psutil.Process().memory_info().rss
        return {"doing": name, "seconds": time.time() - since, "resident": resident, "gpu": self._gpu_memory()}

    def _gpu_memory(self) -> tuple[int, int] | None:
        """Return (used, total) bytes of this worker's GPUs: from torch if it uses them here, else from `nvidia-smi` at
        most every few seconds.
        """
        ids = [str(one) for one in ray.get_gpu_ids()]
        torch = sys.modules.get("torch") if ids else None
        if torch is not None and torch.cuda.is_initialized():
            pairs = [torch.cuda.mem_get_info(number) for number in range(torch.cuda.device_count())]
            return sum(total - free for free, total in pairs), sum(total for _, total in pairs)
        if ids and time.monotonic() > self.asked_gpus[0] + _ASK_GPUS:
            self.asked_gpus = (time.monotonic(), _nvidia_smi(ids))
        return self.asked_gpus[1]


_ASK_GPUS = 5.0


def _nvidia_smi(ids: list[str]) -> tuple[int, int] | None:
    """Return (used, total) bytes of these GPUs together, from `nvidia-smi`; None where it fails."""
    query = ["--query-gpu=memory.used,memory.total", "--format=csv,noheader,nounits"]
    try:
        command = ["nvidia-smi", f"--id={','.join(ids)}", *query]
        output = subprocess.run(command, capture_output=True, text=True, timeout=3.0, check=True).stdout
        pairs = [[int(cell) << 20 for cell in line.split(",")] for line in output.splitlines() if line.strip()]
    except (OSError, subprocess.SubprocessError, ValueError):  # not installed, failed, or no numbers
        return None
    return sum(used for used, _ in pairs), sum(total for _, total in pairs)


def _target(descriptor: int) -> str:
    """Return the file that a file descriptor writes to; "" where the system does not tell."""
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""
