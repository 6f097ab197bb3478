"""A cluster as it is now: nodes, pools, workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from workbench.cluster.pools import Node
from workbench.cluster.waiting import quietly

if TYPE_CHECKING:
    from workbench.cluster.session import Cluster


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
    """Bytes in memory; None on another host."""
    state: str
    """`idle`, the method that runs, or `does not answer`."""
    waiting: int
    """Calls behind the one that runs."""


@dataclass(frozen=True)
class Status:
    """Nodes, pools, workers, and notes."""

    title: str
    nodes: tuple[Node, ...]
    pools: tuple[tuple[str, int, str], ...]
    """(name, processes, where)."""
    workers: tuple[WorkerLine, ...]
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        from workbench.views.clusters import status_text

        return status_text(self)

    def _repr_html_(self) -> str:
        from workbench.views.clusters import status_html

        return status_html(self)


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


def status(cluster: Cluster) -> Status:
    """What there is, and what each worker of this session does."""
    found = nodes()
    hosts = {one.id: one.host for one in found}
    pools = tuple(
        (
            pool.name,
            pool.size,
            ", ".join(dict.fromkeys(hosts.get(seat.node, "a lost node") for seat in pool.plan.of(pool.name))),
        )
        for pool in cluster.pools.values()
    )
    pings = [(group, rank, actor.ping.remote()) for group in cluster.groups for rank, actor in enumerate(group.actors)]
    workers = []
    for group, rank, ping in pings:
        out, fact = group.out, group.facts[rank]
        answers = quietly(ping, 2.0, None) is not None
        state = (out[0] if out else "idle") if answers else "does not answer"
        pool = group.pool.name if group.pool is not None else ""
        workers.append(
            WorkerLine(
                group.name,
                rank,
                fact["pid"],
                fact["host"],
                pool,
                fact["gpus"],
                _resident(fact),
                state,
                max(len(out) - 1, 0),
            )
        )
    return Status(cluster.title, tuple(found), pools, tuple(workers), tuple(cluster.notes))


def _resident(fact: Mapping[str, Any]) -> int | None:
    import socket

    import psutil

    if fact["host"] != socket.gethostname():
        return None
    try:
        return int(psutil.Process(fact["pid"]).memory_info().rss)
    except psutil.Error:
        return None
