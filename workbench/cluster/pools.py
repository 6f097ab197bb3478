"""Resource pools: `{"global": [8, 8], "rollout": [4]}`, a name and so many processes on each of its nodes.

First a plan: who would sit where, held against what the cluster has; nothing starts. Then placement groups that are that plan:
each of a pool's shares is one group of bundles on the very node of the picture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from workbench.cluster.waiting import quietly
from workbench.errors import EngineError, SettingError, describe, message

READY_SECONDS = 20.0


@dataclass(frozen=True)
class Node:
    """A node and what it has; free is what nobody holds now."""

    id: str
    host: str
    address: str
    alive: bool
    cpus: float
    gpus: float
    free_cpus: float
    free_gpus: float
    memory: int
    """Bytes that Ray gives to processes."""
    store: int = 0
    """Bytes of the object store."""
    store_used: int = 0


@dataclass(frozen=True)
class Seat:
    """One process's place."""

    pool: str
    rank: int
    node: str
    """Node id."""
    share: int
    """Which entry of the pool's list."""
    bundle: int


@dataclass(frozen=True)
class Plan:
    """Who would sit where."""

    spec: Mapping[str, tuple[int, ...]]
    seats: tuple[Seat, ...]
    nodes: tuple[Node, ...]
    cpus: float
    """Per process."""
    gpus: float
    """Per process."""
    roles: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Pool → what is meant to run there, for the picture."""

    def of(self, pool: str) -> tuple[Seat, ...]:
        """A pool's seats, by rank."""
        return tuple(seat for seat in self.seats if seat.pool == pool)

    def __repr__(self) -> str:
        from workbench.views.clusters import plan_text

        return plan_text(self)

    def _repr_html_(self) -> str:
        from workbench.views.clusters import plan_html

        return plan_html(self)


def plan(
    spec: Mapping[str, Sequence[int]],
    nodes: Sequence[Node],
    *,
    cpus: float = 1.0,
    gpus: float | None = None,
    roles: Mapping[str, Sequence[str]] | None = None,
) -> Plan:
    """Seats for every process: the largest shares first, each on the node with most room, a pool's shares on different nodes.

    `gpus` per process: None is one where the cluster has any. Raises `SettingError` naming the pool that finds no place,
    what it needs and what every node has.
    """
    wanted = {name: _counts(name, counts) for name, counts in spec.items()}
    odd = [name for name in roles or {} if name not in wanted]
    if odd:
        raise SettingError(message(f"roles of {', '.join(odd)}", expected=f"pools out of {', '.join(wanted)}"))
    there = [node for node in nodes if node.alive]
    each = gpus if gpus is not None else float(any(node.gpus for node in there))
    room = {node.id: [node.free_cpus, node.free_gpus] for node in there}
    places: dict[tuple[str, int], str] = {}
    for count, name, number in sorted(((count, name, number) for name, counts in wanted.items() for number, count in enumerate(counts)), key=lambda one: (-one[0], one[1], one[2])):  # fmt: skip
        taken = {place for (pool, _), place in places.items() if pool == name}
        fitting = [
            node.id
            for node in there
            if node.id not in taken
            and room[node.id][0] >= cpus * count - 1e-6
            and room[node.id][1] >= each * count - 1e-6
        ]
        if not fitting:
            raise SettingError(_no_room(name, count, len(wanted[name]), cpus, each, there, room))
        best = max(fitting, key=lambda one: (room[one][1], room[one][0]))
        room[best][0] -= cpus * count
        room[best][1] -= each * count
        places[name, number] = best
    seats = []
    for name, counts in wanted.items():
        rank = 0
        for number, count in enumerate(counts):
            for bundle in range(count):
                seats.append(Seat(name, rank, places[name, number], number, bundle))
                rank += 1
    said = {name: tuple(one) for name, one in (roles or {}).items()}
    return Plan(wanted, tuple(seats), tuple(there), cpus, each, said)


def _counts(name: str, counts: Any) -> tuple[int, ...]:
    whole = [one for one in counts if isinstance(one, int) and one > 0] if isinstance(counts, list | tuple) else []
    if not whole or len(whole) != len(counts):
        raise SettingError(
            message(f"pool {name!r}", expected="processes on each node, as [8, 8]", found=describe(counts))
        )
    return tuple(whole)


def _no_room(
    name: str,
    count: int,
    shares: int,
    cpus: float,
    gpus: float,
    nodes: Sequence[Node],
    room: Mapping[str, Sequence[float]],
) -> str:
    has = ", ".join(f"{node.host} has {room[node.id][0]:g} CPUs and {room[node.id][1]:g} GPUs left" for node in nodes)
    needs = f"{count * cpus:g} CPUs and {count * gpus:g} GPUs" if gpus else f"{count * cpus:g} CPUs"
    apart = f", apart from the pool's {shares - 1} other nodes" if shares > 1 else ""
    return message(
        f"pool {name!r} needs {needs} on one node for {count} processes{apart}",
        found=f"{len(nodes)} nodes: {has}" if nodes else "no node",
        do="ask for fewer, free what holds them (cluster.status()), or add a node",
    )


class Pool:
    """A pool that is held: slots for the ranks of any number of groups, which share each process's resources."""

    def __init__(self, name: str, made: Plan, groups: Sequence[Any], colocated: int) -> None:
        self.name = name
        self.plan = made
        self.colocated = colocated
        self.groups = list(groups)
        """Placement groups, one a share."""

    @property
    def size(self) -> int:
        """Processes."""
        return len(self.plan.of(self.name))

    def slot(self, rank: int) -> tuple[Any, int]:
        """(placement group, bundle) of a rank; more ranks than seats is refused by `Cluster.ranks`."""
        seat = self.plan.of(self.name)[rank]
        return self.groups[seat.share], seat.bundle

    def give_back(self) -> None:
        """Give the resources back; workers that still sit there end."""
        from ray.util import remove_placement_group

        for group in self.groups:
            remove_placement_group(group)
        self.groups = []

    def __repr__(self) -> str:
        hosts = {node.id: node.host for node in self.plan.nodes}
        seats = ", ".join(f"{seat.rank} on {hosts[seat.node]}" for seat in self.plan.of(self.name))
        return (
            f"Pool {self.name!r}: {self.size} processes ({seats})" if self.groups else f"Pool {self.name!r}, given back"
        )


def hold(made: Plan, colocated: int) -> dict[str, Pool]:
    """Make the plan's placement groups and wait until they stand. Raises `EngineError` where somebody was faster."""
    from ray.util import placement_group

    if colocated < 1:
        raise SettingError(message("colocated", expected="≥ 1 groups on a process's resources", found=colocated))
    pools: dict[str, Pool] = {}
    try:
        for name, counts in made.spec.items():
            pools[name] = Pool(name, made, [], colocated)
            nodes = {seat.share: seat.node for seat in made.of(name)}
            for share, count in enumerate(counts):
                bundle = {"CPU": made.cpus} | ({"GPU": made.gpus} if made.gpus else {})
                where = {"ray.io/node-id": nodes[share]}
                group = placement_group([bundle] * count, strategy="STRICT_PACK", bundle_label_selector=[where] * count)
                pools[name].groups.append(group)
                if quietly(group.ready(), READY_SECONDS, None) is None:
                    raise EngineError(
                        message(
                            f"pool {name!r} could not be held in {READY_SECONDS:g} s",
                            found="somebody else took the resources, or a node is gone",
                            do="cluster.status() says who has what",
                        )
                    )
    except BaseException:
        for pool in pools.values():
            pool.give_back()
        raise
    return pools
