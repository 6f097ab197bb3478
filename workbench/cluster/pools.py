"""Resource pools: `{"global": [8, 8], "rollout": [4]}` is a name and the number of processes on each of its nodes.

`plan` says which process would run on which node and starts nothing; `hold` reserves the resources of a plan: a pool becomes
one Ray placement group, each process a bundle of it on the node that the plan names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

from workbench.base.errors import EngineError, SettingError, describe
from workbench.base.shown import Shown
from workbench.cluster.ray_internals import free_resources, store_bytes
from workbench.cluster.transport import quietly

READY_SECONDS = 20.0


@dataclass(frozen=True)
class Node:
    """A node of the Ray cluster: its resources, and how much of them is free now."""

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


def nodes() -> list[Node]:
    """List the cluster's nodes, dead ones included, with what is free on each."""
    import ray
    from grpc import RpcError

    free = free_resources()
    listed = []
    for entry in ray.nodes():
        has, left = entry["Resources"], free.get(entry["NodeID"], {})
        used, store = 0, int(has.get("object_store_memory", 0))
        host, address, alive = entry["NodeManagerHostname"], entry["NodeManagerAddress"], bool(entry["Alive"])
        if alive:
            with suppress(RpcError):  # a node that does not answer now
                used, available = store_bytes(address, entry["NodeManagerPort"])
                store = available or store
        cpus, free_cpus = (counts.get("CPU", 0.0) for counts in (has, left))
        gpus, free_gpus = (counts.get("GPU", 0.0) for counts in (has, left))
        room = cpus, gpus, free_cpus, free_gpus, int(has.get("memory", 0))
        listed.append(Node(entry["NodeID"], host, address, alive, *room, store, used))
    return listed


def free_text() -> str:
    """Return the free CPUs and GPUs of each live node as one line of text."""
    what = "{0.host} has {0.free_cpus:g} of {0.cpus:g} CPUs and {0.free_gpus:g} of {0.gpus:g} GPUs free"
    return "; ".join(what.format(one) for one in nodes() if one.alive)


@dataclass(frozen=True)
class Seat:
    """The place of one process of a pool: its number `rank` in the pool, and the node on which it runs."""

    pool: str
    rank: int
    node: str
    """Node id."""


@dataclass(frozen=True, repr=False)
class Plan(Shown):
    """Which process would run on which node. Made by `Cluster.plan`; a cell shows it as a picture."""

    spec: Mapping[str, tuple[int, ...]]
    seats: tuple[Seat, ...]
    nodes: tuple[Node, ...]
    cpus: float
    """CPUs per process."""
    gpus: float
    """GPUs per process."""
    roles: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Pool → names of what will run in it; the picture shows them."""

    def of(self, pool: str) -> tuple[Seat, ...]:
        """Return the seats (process and node) of a pool, in order of rank."""
        return tuple(seat for seat in self.seats if seat.pool == pool)


def plan(
    spec: Mapping[str, Sequence[int]],
    nodes: Sequence[Node],
    *,
    cpus: float = 1.0,
    gpus: float | None = None,
    roles: Mapping[str, Sequence[str]] | None = None,
) -> Plan:
    """Plan on which node every process of some pools would run; nothing is started.

    `{"global": [8, 8]}` is a pool of 8 processes on each of two nodes: the entries of one pool go to different nodes, the
    largest first, each to the node with the most room. `cpus` and `gpus` are those of each process (`gpus=None`: one where
    the cluster has any); `roles` says what will run in a pool, for the picture.

    Raises `SettingError` naming the pool that finds no place, what it needs and what every node has left.
    """
    wanted = {name: _counts(name, counts) for name, counts in spec.items()}
    odd = [name for name in roles or {} if name not in wanted]
    if odd:
        raise SettingError(f"roles for unknown pool {', '.join(odd)}", expected=f"one of {', '.join(wanted)}")
    there = [node for node in nodes if node.alive]
    each = gpus if gpus is not None else float(any(node.gpus for node in there))
    places = _places(wanted, there, cpus, each)
    seats = []
    for name, counts in wanted.items():
        where = [places[name, share] for share, count in enumerate(counts) for _ in range(count)]
        seats += [Seat(name, rank, node) for rank, node in enumerate(where)]
    shown = {name: tuple(one) for name, one in (roles or {}).items()}
    return Plan(wanted, tuple(seats), tuple(there), cpus, each, shown)


def _places(
    wanted: Mapping[str, Sequence[int]], nodes: Sequence[Node], cpus: float, gpus: float
) -> dict[tuple[str, int], str]:
    """Choose a node for each entry of each pool: (pool, number of the entry) → node id. The largest entries choose
    first, the emptiest node.
    """
    room = {node.id: [node.free_cpus, node.free_gpus] for node in nodes}
    places: dict[tuple[str, int], str] = {}
    shares = [(name, share, count) for name, counts in wanted.items() for share, count in enumerate(counts)]
    for name, share, count in sorted(shares, key=lambda lot: (-lot[2], lot[0], lot[1])):
        taken = {place for (pool, _), place in places.items() if pool == name}
        needs = (cpus * count - 1e-6, gpus * count - 1e-6)
        fitting = [host for host, (c, g) in room.items() if host not in taken and c >= needs[0] and g >= needs[1]]
        if not fitting:
            total = f"{count * cpus:g} CPUs and {count * gpus:g} GPUs" if gpus else f"{count * cpus:g} CPUs"
            others = f", apart from the pool's {len(wanted[name]) - 1} other nodes" if len(wanted[name]) > 1 else ""
            has = [f"{node.host} has {room[node.id][0]:g} CPUs and {room[node.id][1]:g} GPUs left" for node in nodes]
            what = f"pool {name!r} needs {total} on one node for {count} processes{others}"
            found = f"{len(nodes)} nodes: {', '.join(has)}" if nodes else "no node"
            do = "ask for fewer, end what uses the nodes (cluster.status() lists it), or add a node"
            raise SettingError(what, found=found, do=do)
        best = max(fitting, key=lambda host: (room[host][1], room[host][0]))
        room[best] = [room[best][0] - cpus * count, room[best][1] - gpus * count]
        places[name, share] = best
    return places


def _counts(name: str, counts: Any) -> tuple[int, ...]:
    whole = [one for one in counts if isinstance(one, int) and one > 0] if isinstance(counts, list | tuple) else []
    if not whole or len(whole) != len(counts):
        raise SettingError(f"pool {name!r}", expected="a list of processes per node, as [8, 8]", found=describe(counts))
    return tuple(whole)


class Pool:
    """Reserved resources of some processes, each shared by up to `colocated` worker groups. Made by `Cluster.hold`."""

    def __init__(self, name: str, made: Plan, group: Any, colocated: int) -> None:
        self.name = name
        self.plan = made
        self.colocated = colocated
        self.group = group
        """Ray's placement group; None once given back."""
        self.placed: tuple[Any, Any] | None = None
        """(arguments of `Cluster.place`, the engine that it started) where `place` uses the pool, else None."""

    @property
    def size(self) -> int:
        """Number of processes in the pool."""
        return len(self.plan.of(self.name))

    def give_back(self) -> None:
        """Give the resources back to the cluster; Ray ends workers that still run on them."""
        from ray.util import remove_placement_group

        if self.group is not None:
            remove_placement_group(self.group)
        self.group = None

    def options(self, seat: int) -> dict[str, Any]:
        """Return the Ray actor options of a worker on process number `seat`, with 1/`colocated` of that process's
        resources.
        """
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        share = {"num_cpus": self.plan.cpus / self.colocated, "num_gpus": self.plan.gpus / self.colocated}
        return {**share, "scheduling_strategy": PlacementGroupSchedulingStrategy(self.group, seat)}

    def __repr__(self) -> str:
        hosts = {node.id: node.host for node in self.plan.nodes}
        seats = ", ".join(f"{seat.rank} on {hosts[seat.node]}" for seat in self.plan.of(self.name))
        return f"Pool {self.name!r}" + (", given back" if self.group is None else f": {self.size} processes ({seats})")


def hold(plan: Plan, colocated: int) -> dict[str, Pool]:
    """Reserve the resources of a plan and wait until Ray has them; returns the pools by name.

    Raises `SettingError` for `colocated` below 1, `EngineError` where the resources were taken since the plan was made.
    """
    from ray.util import placement_group

    if colocated < 1:
        raise SettingError("argument colocated", expected="≥ 1 groups that share a process", found=colocated)
    pools: dict[str, Pool] = {}
    bundle = {"CPU": plan.cpus} | ({"GPU": plan.gpus} if plan.gpus else {})
    with ExitStack() as ends:
        for name in plan.spec:
            where = [{"ray.io/node-id": seat.node} for seat in plan.of(name)]
            group = placement_group([bundle] * len(where), bundle_label_selector=where)
            pools[name] = Pool(name, plan, group, colocated)
            ends.callback(pools[name].give_back)
            if quietly(group.ready(), READY_SECONDS, None) is None:
                what = f"pool {name!r} could not be reserved in {READY_SECONDS:g} s"
                found = "resources that other work uses, or a lost node"
                raise EngineError(what, found=found, do="see cluster.status(), and try again")
        ends.pop_all()
    return pools
