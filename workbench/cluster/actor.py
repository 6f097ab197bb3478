"""What runs in a worker: one object, called by name. Sent by value, so that nothing of ours (torch least of all) is imported
before the environment is set.

Two doors: calls come one after the other on one thread; `stop`, `stacks` and `ping` have threads of their own and are answered
while a call runs, unless C code holds the interpreter's lock, which is itself an answer.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import traceback
from typing import Any

import ray


class Worker:
    """One rank of a group."""

    def __init__(self) -> None:
        self.held: Any = None
        self.stopped = -1
        self.number = -1

    def setup(self, env: dict[str, str], paths: list[str]) -> dict[str, Any]:
        """Set the environment, and look for modules where the driver does; who and where this worker is.

        Comes before anything that imports.
        """
        os.environ.update(env)
        address = ray.util.get_node_ip_address()
        os.environ.setdefault("WORKBENCH_ADDRESS", address)  # where ranks that meet shall wait for each other
        if address.startswith("127.") and sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # gloo listens where it is told, else on the host's name
        there = [path for path in paths if os.path.exists(path)]
        sys.path[:] = [*there, *(path for path in sys.path if path not in there)]
        return {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "node": ray.get_runtime_context().get_node_id(),
            "actor": ray.get_runtime_context().get_actor_id(),
            "gpus": ",".join(str(one) for one in ray.get_gpu_ids()),
            "logs": [_target(1), _target(2)],
        }

    def make(self, number: int, packed: Any) -> tuple[Any, ...]:
        """Hold `factory(rank, size, **settings)`."""

        def work(factory: Any, rank: int, size: int, settings: dict[str, Any]) -> None:
            self.held = factory(rank, size, **settings)

        return self._answer(number, lambda: work(*packed))

    def call(self, number: int, method: str, own: Any, shared: Any) -> tuple[Any, ...]:
        """`(what came of it, seconds since the epoch when it began and ended)`; a raised error is a value, too."""
        return self._answer(number, lambda: getattr(self.held, method)(*own, *shared))

    def _answer(self, number: int, work: Any) -> tuple[Any, ...]:
        from workbench import background
        from workbench.cluster.transport import pack
        from workbench.errors import Interrupted, WorkbenchError

        began = time.time()
        try:
            background.clear()
            self.number = number
            if number <= self.stopped:
                raise Interrupted("stopped before it began")
            return "done", pack(work()), began, time.time()
        except BaseException as error:  # noqa: BLE001 - said to the driver, which raises it there
            trace = "".join(traceback.format_exception(error))
            ours = error if isinstance(error, WorkbenchError) else None
            return "raised", (type(error).__name__, str(error), trace, ours), began, time.time()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()

    @ray.method(concurrency_group="control")
    def stop(self, number: int) -> None:
        """Ask calls up to this number to end at their next safe place."""
        from workbench import background

        self.stopped = max(self.stopped, number)
        if self.number <= number:
            background.interrupt()

    @ray.method(concurrency_group="control")
    def stacks(self) -> str:
        """What every thread is doing."""
        names = {one.ident: one.name for one in threading.enumerate()}
        parts = []
        for ident, frame in sys._current_frames().items():
            lines = traceback.format_stack(frame)
            if any("in call" in line or "in make" in line for line in lines):
                parts.append(f"thread {names.get(ident, ident)}\n{''.join(lines[-6:])}")
        return "\n".join(parts) or "no call is running"

    @ray.method(concurrency_group="control")
    def ping(self) -> float:
        """The worker's clock, in seconds since the epoch."""
        return time.time()


def _target(descriptor: int) -> str:
    """The file that an output goes to; empty where the system does not say."""
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""
