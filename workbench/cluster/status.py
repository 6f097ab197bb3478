"""A cluster as it is now: nodes, pools, workers, calls that are out, and logs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from workbench.base.shown import Shown
from workbench.cluster.holding import Session
from workbench.cluster.pools import Node, nodes
from workbench.cluster.waiting import out, quietly
from workbench.engines.paired import Paired

ANSWER_SECONDS = 1.0
"""How long a look waits for the workers, all together."""
MUTE = "does not answer"


@dataclass(frozen=True)
class WorkerLine:
    """One row of a `Status`: what a worker is doing, and the memory that it uses."""

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
    """Number of calls that wait behind the one that runs."""
    gpu: tuple[int, int] | None = None
    """(used, total) bytes of its GPUs, whichever process uses them; None without a GPU."""
    seconds: float | None = None
    """Seconds in this state, by the worker's own clock; None where it does not answer."""


@dataclass(frozen=True)
class CallLine:
    """One row of a `Status`: a call of a group's method that is not answered yet."""

    group: str
    method: str
    stage: str
    """The stage that made it."""
    seconds: float
    """Seconds since it was sent."""


@dataclass(frozen=True, repr=False)
class Status(Shown):
    """Nodes, pools, workers and calls of a cluster at one moment. Made by `Cluster.status`."""

    title: str
    nodes: tuple[Node, ...]
    pools: tuple[tuple[str, int, str], ...]
    """(name, processes, hosts)."""
    workers: tuple[WorkerLine, ...]
    notes: tuple[str, ...] = ()
    calls: tuple[CallLine, ...] = ()
    at: float = 0.0
    """Seconds since the epoch."""
    again: Callable[[], Status] | None = field(default=None, repr=False, compare=False)
    """Makes a new `Status`; raises `EngineError` when the cluster is closed."""


def look(cluster: Session, asked: dict[Any, Any], again: Callable[[], Status]) -> Status:
    """Make a `Status` of the cluster, asking every worker; `asked` keeps requests that are unanswered for the next look."""
    answers, found = _answers(cluster, asked), nodes()
    hosts = {one.id: one.host for one in found}
    pools, workers, calls = [], [], []
    for pool in list(cluster.pools.values()):
        seats = dict.fromkeys(hosts.get(seat.node, "a lost node") for seat in pool.plan.of(pool.name))
        pools.append((pool.name, pool.size, ", ".join(seats)))
    for group in list(cluster.groups):
        out_now = group.calls
        calls += [CallLine(group.name, one.method, one.stage, one.seconds) for one in out_now]
        where = group.pool.name if group.pool is not None else ""
        for rank, (actor, fact) in enumerate(zip(group.actors, group.facts, strict=False)):
            who = (group.name, rank, fact["pid"], fact["host"], where, fact["gpus"])
            said = answers.get(actor)
            if said is None:
                workers.append(WorkerLine(*who, None, MUTE, len(out_now)))
                continue
            behind = max(len(out_now) - 1, 0) if said["doing"] else 0
            state = said["doing"] or "idle"
            workers.append(WorkerLine(*who, said["resident"], state, behind, said["gpu"], said["seconds"]))
    tables = tuple(found), tuple(pools), tuple(workers), (*cluster.notes, *_pushes(cluster)), tuple(calls)
    return Status(cluster.title, *tables, time.time(), again)


def _pushes(cluster: Session) -> list[str]:
    """A line for each engine whose weights were pushed: how, how many bytes and seconds."""
    placed = {id(pool.placed[1]): pool.placed[1] for pool in cluster.pools.values() if pool.placed is not None}
    pairs = [one for one in placed.values() if isinstance(one, Paired) and one.last_push is not None]
    return [f"weights of {one.path}, version {one.version}: {one.last_push}" for one in pairs]


def _answers(cluster: Session, asked: dict[Any, Any]) -> dict[Any, Mapping[str, Any] | None]:
    """Actor → its answer, or None. One that has not answered is not asked again before it has: no questions pile up."""
    # none that still starts
    actors = [actor for group in list(cluster.groups) if group.facts for actor in group.actors]
    refs = {actor: asked.get(actor) or actor.now.remote() for actor in actors}
    late = [actors[place] for place in out(list(refs.values()), ANSWER_SECONDS)] if refs else []
    asked.clear()
    asked |= {actor: refs.pop(actor) for actor in late}
    return {actor: quietly(ref, ANSWER_SECONDS, None) for actor, ref in refs.items()}


class Logs(Shown, str):
    """The last lines of one or more workers: a text, and in a cell one fold for each worker."""

    parts: tuple[tuple[str, str], ...]
    """(`rank 1 (pid 4711 on host)`, its lines)."""

    @staticmethod
    def of(parts: Sequence[tuple[str, str]]) -> Logs:
        """Make `Logs` of (worker, its lines) pairs: one worker's lines as they are, those of several under their names."""
        texts = [text for _, text in parts] if len(parts) == 1 else [f"--- {where}\n{text}" for where, text in parts]
        made = Logs("\n".join(texts))
        made.parts = tuple(parts)
        return made
