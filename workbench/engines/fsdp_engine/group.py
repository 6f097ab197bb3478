"""A group of ranks that engines share, snapshots, and how rows are shared out to ranks."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import socket
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from workbench.engines.local_engine.states import read_record, read_weights
from workbench.engines.settings import FsdpSettings
from workbench.engines.workers.processes import FIRST_DEADLINE, Deadlines, Ranks, processes
from workbench.functional.balancing import balanced, workload


class Group:
    """Ranks of one process group, shared by the engines on them; restarted at the next use after a worker was lost.

    `make` starts the workers with `worker.shards` as their factory and returns a `Ranks`.
    """

    def __init__(self, make: Callable[[], Ranks]) -> None:
        self._make = make
        self._ranks: Ranks | None = None
        self._unused: list[str] = []
        self._waiting: list[Callable[[], None]] = []
        self._lock = threading.RLock()
        self._deadlines = Deadlines()
        self.generation = 0
        """How often the workers were started."""
        self.workers: list[dict[str, Any]] = []
        """Rank, pid, host, device and card of each worker, as dicts."""

    @property
    def alive(self) -> bool:
        """Whether the workers are running."""
        return self._ranks is not None

    @property
    def size(self) -> int:
        """Number of ranks; asking for it starts the workers where none run."""
        return self.start().size

    def start(self) -> Ranks:
        """Start the workers where none run; returns them as `Ranks`."""
        with self._lock:
            if self._ranks is None:
                ranks = self._make()
                try:
                    self.workers = ranks.call("join", *ranks.call("reserve")[0])
                except BaseException:
                    ranks.close()
                    raise
                self._ranks, self.generation = ranks, self.generation + 1
                self._unused.clear()
            return self._ranks

    def call(
        self,
        method: str,
        *shared: Any,
        each: Sequence[tuple[Any, ...]] | None = None,
        timeout: float | None = None,
        like: tuple[str, int] | None = None,
    ) -> list[Any]:
        """Call a method on all ranks, as `Ranks.call`; after a lost worker or a time-out the next call starts new ones.

        Without a `timeout` it may take as long as `Deadlines` says of calls `like` this one: (what, size).
        """
        with self._lock:
            ranks = self.start()
            try:
                while self._unused:
                    ranks.call("drop", self._unused.pop(), timeout=FIRST_DEADLINE)
                with self._deadlines.watched(*(like or (method,))) as seconds:
                    return ranks.call(method, *shared, each=each, timeout=timeout or seconds)
            finally:
                if ranks.closed is not None:
                    self._end()

    def here(self) -> list[dict[str, Any]]:
        """Rank, pid, host and device of the workers on this machine; starts them where there are none."""
        self.start()
        return [worker for worker in self.workers if worker["host"] == socket.gethostname()]

    def let_go(self, name: str) -> None:
        """Mark a model as unused, to be freed on the ranks before the next call. Safe in a finaliser."""
        self._unused.append(name)

    def waits(self, finish: Callable[[], None]) -> None:
        """Register `finish`, which waits for a background save, to be called before the workers or the interpreter end."""
        self._waiting.append(finish)
        # the newest is called first: before anything that started workers ends them
        atexit.unregister(self.finish)
        atexit.register(self.finish)

    def waits_no_more(self, finish: Callable[[], None]) -> None:
        """Unregister a `finish` that was registered by `waits`."""
        self._waiting = [one for one in self._waiting if one != finish]
        if not self._waiting:
            atexit.unregister(self.finish)

    def finish(self) -> None:
        """Call all functions registered by `waits`, the newest first; raises an error of theirs after all were called."""
        waiting, self._waiting = self._waiting, []
        atexit.unregister(self.finish)
        with contextlib.ExitStack() as stack:  # calls them all, and raises when the last was called
            for one in waiting if self.alive else ():
                stack.callback(one)

    def close(self) -> None:
        """Wait for saves in the background, then end the workers."""
        try:
            self.finish()
        finally:
            self._end()

    def _end(self) -> None:
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            ranks.close()


class ShardedSnapshot:
    """A learner's state in a scratch folder, one file a rank; of a model as it was loaded without one (`folder` is empty).

    It outlives the workers; the folder is removed with this object.
    """

    def __init__(self, folder: str, state_id: str, version: int, taught: bool) -> None:
        self.folder = folder
        self.state_id = state_id
        self.version = version
        self.taught = taught
        self._gone = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)

    kind, nbytes = "disk", 0
    """Where it is, and the bytes of this process's memory that it holds."""

    def tensors(self) -> dict[int, torch.Tensor]:
        """None: all are in its folder."""
        return {}

    def on_disk(self) -> dict[str, int]:
        """The bytes of its folder by its name."""
        size = sum(one.stat().st_size for one in Path(self.folder).iterdir()) if self.folder else 0
        return {self.folder: size} if size else {}

    def __getitem__(self, name: str) -> Any:
        """`weights` (whole tensors, read now), `version`, `state_id`, `steps`: the keys of a local engine's snapshot."""
        if name == "weights":
            return read_weights(self.folder)
        record = read_record(self.folder) if self.folder else {"steps": 0}
        return {"version": self.version, "state_id": self.state_id, **record}[name]

    def __repr__(self) -> str:
        return f"ShardedSnapshot({self.state_id}, version {self.version})"


def shared_out(lengths: Sequence[int], ranks: int) -> list[torch.Tensor]:
    """Split rows of these `lengths` (tokens) over ranks, with nearly equal loads; returns each rank's row numbers."""
    if len(lengths) < ranks:
        parts = [[row] for row in range(len(lengths))] + [[] for _ in range(ranks - len(lengths))]
    else:
        parts = balanced([workload(length) for length in lengths], ranks)
    return [torch.tensor(part, dtype=torch.long) for part in parts]


def local_group(
    ranks: int,
    *,
    device: str = "auto",
    threads: int | None = None,
    env: Mapping[str, str] | None = None,
    wait: float = FsdpSettings.group_deadline,
) -> Group:
    """A group of `ranks` processes on this machine, with `threads` each (default: cores divided by ranks): `fsdp(path, on=…)`.

    `wait`: seconds that a rank waits for another inside torch.
    """
    each = threads or max((os.cpu_count() or 1) // ranks, 1)

    def start() -> Ranks:
        from workbench.engines.fsdp_engine.worker import shards  # torch's sharding, half a second of imports

        return processes(shards, ranks, env=env, device=device, threads=each, wait=wait)

    return Group(start)
