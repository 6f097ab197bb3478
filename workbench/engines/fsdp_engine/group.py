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

from workbench.base.errors import EngineError
from workbench.engines.local_engine.states import read_record, read_weights
from workbench.engines.settings import FsdpSettings
from workbench.engines.workers.processes import FIRST_DEADLINE, Deadlines, Ranks, processes
from workbench.functional.balancing import balanced, workload

MEETING = 180.0
"""Seconds that ranks which have joined may take for their first sum: with a dead link NCCL alone waits for half an hour."""


def _meet(ranks: Ranks) -> None:
    """Have ranks that have joined add up one number. Raises `EngineError`, with what to try, where that does not end."""
    try:
        ranks.call("meet", timeout=MEETING)
    except TimeoutError as late:
        do = "NCCL_DEBUG=INFO says where it waits; NCCL_P2P_DISABLE=1 and NCCL_IB_DISABLE=1 leave out links that may be broken"
        what = "the ranks cannot communicate: their first all-reduce did not end"
        raise EngineError(what, expected=f"an end within {MEETING:g} s", found=late, do=do) from late


class Group:
    """Worker ranks of one process group, shared by several engines. After a worker was lost, the group is started again
    at its next use.

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
        """Number of ranks; reading it starts the workers if none run."""
        return self.start().size

    def start(self) -> Ranks:
        """Start the workers if none run, and return them as `Ranks`."""
        with self._lock:
            if self._ranks is None:
                ranks = self._make()
                try:
                    self.workers = ranks.call("join", *ranks.call("reserve")[0])
                    _meet(ranks)
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
        """Call a method on all ranks and return the results (see `Ranks.call`); after a lost worker or a time-out the
        next call starts new workers.

        Without a `timeout` the deadline follows from earlier calls like this one; `like` is (kind of call, amount of
        work), see `Deadlines`.
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
        """Return rank, pid, host and device of the workers on this machine; starts the workers if none run."""
        self.start()
        return [worker for worker in self.workers if worker["host"] == socket.gethostname()]

    def let_go(self, name: str) -> None:
        """Mark a model as unused; the ranks free it before the next call. Safe to call from a finaliser."""
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
        """Call all functions registered by `waits`, the newest first; an error of one is raised after all were called."""
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
    """A learner's state saved in a scratch folder, one file for each rank. `folder` is empty for a model in the state
    of its own files, which is loaded from these again.

    It outlives the workers; the folder is deleted together with this object.
    """

    def __init__(self, folder: str, state_id: str, version: int, trained: bool) -> None:
        self.folder = folder
        self.state_id = state_id
        self.version = version
        self.trained = trained
        self._gone = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)

    kind, nbytes = "disk", 0
    """Where it is, and the bytes of this process's memory that it holds."""

    def tensors(self) -> dict[int, torch.Tensor]:
        """The tensors in this process's memory: none, all are in the folder."""
        return {}

    def on_disk(self) -> dict[str, int]:
        """Size of the snapshot's folder in bytes, by the folder's name; empty without a folder."""
        size = sum(one.stat().st_size for one in Path(self.folder).iterdir()) if self.folder else 0
        return {self.folder: size} if size else {}

    def __getitem__(self, name: str) -> Any:
        """Return `weights` (whole tensors, read from the folder now), `version`, `state_id` or `steps`, as a local
        engine's snapshot does."""
        if name == "weights":
            return read_weights(self.folder)
        record = read_record(self.folder) if self.folder else {"steps": 0}
        return {"version": self.version, "state_id": self.state_id, **record}[name]

    def __repr__(self) -> str:
        return f"ShardedSnapshot({self.state_id}, version {self.version})"


def shared_out(lengths: Sequence[int], ranks: int) -> list[torch.Tensor]:
    """Split rows of these `lengths` (tokens) over ranks so that their loads are nearly equal; returns each rank's row
    numbers."""
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
    """Start, at its first use, a group of `ranks` processes on this machine for `fsdp(path, on=…)`, each with `threads`
    threads (default: cores divided by ranks).

    `wait` is how many seconds a rank waits for another inside torch.
    """
    each = threads or max((os.cpu_count() or 1) // ranks, 1)

    def start() -> Ranks:
        from workbench.engines.fsdp_engine.worker import shards  # torch's sharding, half a second of imports

        return processes(shards, ranks, env=env, device=device, threads=each, wait=wait)

    return Group(start)
