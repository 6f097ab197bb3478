"""The ranks that engines share, what outlives them, and how rows are shared out to them."""

from __future__ import annotations

import atexit
import os
import shutil
import socket
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from workbench.engines.fsdp_settings import FsdpSettings
from workbench.engines.memory import learning_estimate
from workbench.engines.processes import processes
from workbench.engines.ranks import Ranks
from workbench.engines.sharded_files import read_record, read_weights
from workbench.errors import WorkerLost
from workbench.functional.balancing import balanced, workload


class Group:
    """Ranks that have met, shared by the engines on them; started again when they are needed after a worker was lost.

    `make` starts the workers with `fsdp_worker.shards` as their factory and gives a `Ranks`.
    """

    def __init__(self, make: Callable[[], Ranks]) -> None:
        self._make = make
        self._ranks: Ranks | None = None
        self._unused: list[str] = []
        self._waiting: list[Callable[[], None]] = []
        self._lock = threading.RLock()
        self.generation = 0
        """How often the workers were started."""
        self.workers: list[dict[str, Any]] = []
        """Rank, pid, host and device of each."""

    @property
    def alive(self) -> bool:
        """Whether the workers run."""
        return self._ranks is not None

    @property
    def size(self) -> int:
        """How many ranks."""
        return self.start().size

    def start(self) -> Ranks:
        """The workers, started where there are none."""
        with self._lock:
            if self._ranks is None:
                ranks = self._make()
                try:
                    where = ranks.call("reserve")[0]
                    self.workers = ranks.call("join", *where)
                except BaseException:
                    ranks.close()
                    raise
                self._ranks, self.generation = ranks, self.generation + 1
                self._unused.clear()
            return self._ranks

    def call(
        self, method: str, *shared: Any, each: Sequence[tuple[Any, ...]] | None = None, timeout: float | None = None
    ) -> list[Any]:
        """As `Ranks.call`; where a worker is lost or overdue, the group is gone until it is needed again."""
        with self._lock:
            ranks = self.start()
            try:
                while self._unused:
                    ranks.call("drop", self._unused.pop(), timeout=timeout)
                return ranks.call(method, *shared, each=each, timeout=timeout)
            except (WorkerLost, TimeoutError):
                self._end()
                raise

    def here(self) -> list[dict[str, Any]]:
        """Those of the workers that are on this machine."""
        self.start()
        return [worker for worker in self.workers if worker["host"] == socket.gethostname()]

    def let_go(self, name: str) -> None:
        """A model that nobody uses any more: dropped before the next call. Safe in a finaliser."""
        self._unused.append(name)

    def waits(self, finish: Callable[[], None]) -> None:
        """`finish` is called before the workers are ended, and before the interpreter is: something is on its way to disk."""
        self._waiting.append(finish)
        # the newest is called first: before anything that started workers ends them
        atexit.unregister(self.finish)
        atexit.register(self.finish)

    def waits_no_more(self, finish: Callable[[], None]) -> None:
        """It has come to its end."""
        self._waiting = [one for one in self._waiting if one != finish]
        if not self._waiting:
            atexit.unregister(self.finish)

    def finish(self) -> None:
        """Call whoever waits, in turn; the first error when all were called."""
        waiting, self._waiting = self._waiting, []
        atexit.unregister(self.finish)
        errors = []
        for one in waiting if self.alive else ():
            try:
                one()
            except Exception as error:  # noqa: BLE001 - raised below
                errors.append(error)
        if errors:
            raise errors[0]

    def close(self) -> None:
        """Finish what is being written, and end the workers."""
        try:
            self.finish()
        finally:
            self._end()

    def _end(self) -> None:
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            ranks.close()


class ShardedSnapshot:
    """A learner's state in a scratch folder, one file a rank: it outlives the workers, and goes with this object."""

    def __init__(self, folder: str, state_id: str, version: int, taught: bool) -> None:
        self.folder = folder
        self.state_id = state_id
        self.version = version
        self.taught = taught
        self._gone = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)

    def __getitem__(self, name: str) -> Any:
        """`weights` (whole, read now), `version`, `state_id`, `steps`: a local engine's snapshot by its keys."""
        if name == "weights":
            return read_weights(self.folder)
        return {"version": self.version, "state_id": self.state_id, **read_record(self.folder)}[name]

    def __repr__(self) -> str:
        return f"ShardedSnapshot({self.state_id}, version {self.version})"


def shared_out(lengths: Sequence[int], ranks: int) -> list[torch.Tensor]:
    """Row numbers for each rank, loads nearly equal; empty where there are fewer rows than ranks."""
    if len(lengths) < ranks:
        parts = [[row] for row in range(len(lengths))] + [[] for _ in range(ranks - len(lengths))]
    else:
        parts = balanced([workload(length) for length in lengths], ranks)
    return [torch.tensor(part, dtype=torch.long) for part in parts]


def memory_of(model: Any, settings: FsdpSettings, group: Group) -> tuple[torch.device, dict[str, int]]:
    """(device, bytes by part) that learning will add on one device of this machine; on a CPU all its ranks share one."""
    here = group.here()
    parts = learning_estimate(model, settings.micro_batch_tokens, settings.gradient_checkpointing)
    device = torch.device(here[0]["device"] if here else "cpu")
    sharing = len(here) if device.type == "cpu" else min(len(here), 1)
    away = {"none": (), "optimizer": ("optimizer",), "all": ("gradients", "optimizer")}[settings.offload]
    away = away if device.type == "cuda" else ()
    each = {name: size if name == "activations" else size // group.size for name, size in parts.items()}
    return device, {name: size * sharing for name, size in each.items() if name not in away}


def local_group(
    ranks: int, *, device: str = "auto", threads: int | None = None, env: Mapping[str, str] | None = None
) -> Group:
    """A group of processes on this machine; `threads` of a rank, by default the cores divided by the ranks."""
    each = threads or max((os.cpu_count() or 1) // ranks, 1)

    def start() -> Ranks:
        from workbench.engines.fsdp_worker import shards  # torch's sharding, half a second of imports

        return processes(shards, ranks, env=env, device=device, threads=each)

    return Group(start)
