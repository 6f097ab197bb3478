"""A cluster as it is now: nodes, pools, workers, calls that are out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from workbench.cluster.pools import Node
from workbench.cluster.waiting import out, quietly

if TYPE_CHECKING:
    from workbench.cluster.session import Cluster

ANSWER_SECONDS = 1.0
"""How long a look waits for the workers, all together."""
MUTE = "does not answer"


@dataclass(frozen=True)
class WorkerLine:
    """One worker."""

    group: str
    rank: int
    pid: int
    host: str
    pool: str
    gpus: str
    """Device numbers."""
    resident: int | None
    """Bytes in memory; None where it does not answer."""
    state: str
    """`idle`, the method that runs, or `does not answer`."""
    waiting: int
    """Calls behind the one that runs."""
    gpu: tuple[int, int] | None = None
    """Bytes (used, there) of its GPUs, by whomever; None without one."""
    seconds: float | None = None
    """How long it has been in this state, by its own word."""


@dataclass(frozen=True)
class CallLine:
    """One call that nobody has had the answer of yet."""

    group: str
    method: str
    stage: str
    """The stage that asked."""
    seconds: float
    """Since it was sent."""


@dataclass(frozen=True)
class Status:
    """Nodes, pools, workers, calls, and notes."""

    title: str
    nodes: tuple[Node, ...]
    pools: tuple[tuple[str, int, str], ...]
    """(name, processes, where)."""
    workers: tuple[WorkerLine, ...]
    notes: tuple[str, ...] = ()
    calls: tuple[CallLine, ...] = ()
    at: float = 0.0
    """Seconds since the epoch."""
    again: Callable[[], Status] | None = field(default=None, repr=False, compare=False)
    """Looks once more; raises `EngineError` when the cluster is closed."""

    def __repr__(self) -> str:
        from workbench.views.clusters import status_text

        return status_text(self)

    def _repr_html_(self) -> str:
        from workbench.views.clusters import status_html

        return status_html(self)

    def _ipython_display_(self) -> None:
        from workbench.widgets.cluster import ClusterTable
        from workbench.widgets.layer import show

        show(self, lambda: ClusterTable(self))


def nodes() -> list[Node]:
    """The cluster's nodes, dead ones included, with what is free on each."""
    import ray
    from ray._private.state import available_resources_per_node

    free: Mapping[str, Mapping[str, float]] = available_resources_per_node()
    found = []
    for one in ray.nodes():
        has, left = one["Resources"], free.get(one["NodeID"], {})
        used, total = _store(one) if one["Alive"] else (0, 0)
        found.append(
            Node(
                id=one["NodeID"],
                host=one["NodeManagerHostname"],
                address=one["NodeManagerAddress"],
                alive=bool(one["Alive"]),
                cpus=has.get("CPU", 0.0),
                gpus=has.get("GPU", 0.0),
                free_cpus=left.get("CPU", 0.0),
                free_gpus=left.get("GPU", 0.0),
                memory=int(has.get("memory", 0)),
                store=total or int(has.get("object_store_memory", 0)),
                store_used=used,
            )
        )
    return found


def _store(node: Mapping[str, Any]) -> tuple[int, int]:
    """Bytes (used, there) of a node's object store; (0, 0) where the node does not say."""
    from grpc import RpcError
    from ray._private.internal_api import node_stats

    try:
        stats = node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], include_memory_info=False).store_stats
    except RpcError:
        return 0, 0
    return int(stats.object_store_bytes_used), int(stats.object_store_bytes_avail)


class Looking:
    """Looks at a cluster, one look at a time, from whichever thread; `end` waits for the one that is under way."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._lock = threading.Lock()
        self._asked: dict[Any, Any] = {}

    def look(self) -> Status:
        """What there is, and what each worker says that it does. Raises `EngineError` when the cluster is closed."""
        with self._lock:
            self._cluster._check()
            return self._status()

    def end(self) -> None:
        """Nothing is asked of Ray after this, when the cluster is marked as closed: it must not go while a look is under way."""
        if self._lock.acquire(timeout=10 * ANSWER_SECONDS):
            self._asked.clear()
            self._lock.release()

    def _status(self) -> Status:
        cluster, said = self._cluster, self._answers()
        found = nodes()
        hosts = {one.id: one.host for one in found}
        pools = tuple(
            (
                pool.name,
                pool.size,
                ", ".join(dict.fromkeys(hosts.get(seat.node, "a lost node") for seat in pool.plan.of(pool.name))),
            )
            for pool in list(cluster.pools.values())
        )
        workers, calls = [], []
        for group in list(cluster.groups):
            calls += [CallLine(group.name, one.method, one.stage, one.seconds) for one in group.calls]
            pool = group.pool.name if group.pool is not None else ""
            for rank, (actor, fact) in enumerate(zip(group.actors, group.facts, strict=False)):
                workers.append(_line(group.name, rank, pool, fact, said.get(actor), len(group.calls)))
        return Status(
            cluster.title,
            tuple(found),
            pools,
            tuple(workers),
            tuple(cluster.notes),
            tuple(calls),
            time.time(),
            self.look,
        )

    def _answers(self) -> dict[Any, Mapping[str, Any]]:
        """Actor → its answer. One that did not answer is not asked again before it has: nothing piles up at its door."""
        actors = [actor for group in list(self._cluster.groups) for actor in group.actors]
        self._asked = {actor: self._asked.get(actor) or actor.now.remote() for actor in actors}
        refs = list(self._asked.values())
        late = set(out(refs, ANSWER_SECONDS)) if refs else set()
        ready = [actor for place, actor in enumerate(actors) if place not in late]
        found = {actor: quietly(self._asked.pop(actor), ANSWER_SECONDS, None) for actor in ready}
        return {actor: answer for actor, answer in found.items() if answer is not None}


def _line(
    group: str, rank: int, pool: str, fact: Mapping[str, Any], said: Mapping[str, Any] | None, out: int
) -> WorkerLine:
    who = (group, rank, fact["pid"], fact["host"], pool, fact["gpus"])
    if said is None:
        return WorkerLine(*who, None, MUTE, out)
    behind = max(out - 1, 0) if said["doing"] else 0
    return WorkerLine(*who, said["resident"], said["doing"] or "idle", behind, said["gpu"], said["seconds"])
