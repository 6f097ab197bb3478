"""What a session holds on a cluster: reserved pools, and groups of workers in these pools or on any free resources."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, count
from typing import Any

from workbench.base.errors import EngineError, SettingError
from workbench.base.shown import Shown
from workbench.cluster import pools
from workbench.cluster.pools import Plan, Pool, nodes
from workbench.cluster.ranks import Environment, RayRanks, started
from workbench.cluster.timeline import Event, Timeline, ordered

FREE_SECONDS = 4.0


class Session(Shown):
    """Base of `Cluster`: the resource pools and worker groups of one connection to a Ray cluster."""

    def __init__(self, title: str, environment: Environment, notes: list[str]) -> None:
        self.title = title
        """One line that says where the cluster is (`the local cluster at …`)."""
        self.environment = environment
        self.notes = notes
        """Sentences on what was found or done while connecting."""
        self.closed = False
        self.pools: dict[str, Pool] = {}
        self.groups: list[RayRanks] = []
        self._past: list[Event] = []
        self._began = time.time()
        self._freed = -FREE_SECONDS
        self._lock = threading.Lock()

    def check(self) -> None:
        """Raise `EngineError` where this connection was closed."""
        if self.closed:
            raise EngineError(f"{self.title} was closed", do="open a new one: workbench.cluster(…)")

    # --- who sits where -----------------------------------------------------------------------

    def plan(
        self,
        spec: Mapping[str, Sequence[int]],
        *,
        cpus: float = 1.0,
        gpus: float | None = None,
        roles: Mapping[str, Sequence[str]] | None = None,
    ) -> Plan:
        """Show which process would run on which node, as a picture; nothing starts. See `cluster.plan` for the
        arguments.
        """
        self.check()
        return pools.plan(spec, nodes(), cpus=cpus, gpus=gpus, roles=roles)

    def hold(
        self,
        spec: Mapping[str, Sequence[int]] | Plan,
        *,
        cpus: float = 1.0,
        gpus: float | None = None,
        colocated: int = 1,
    ) -> dict[str, Pool]:
        """Reserve the resources of a plan, or of a `spec` that is planned first; returns the pools by name.

        Up to `colocated` worker groups share each process's resources. Raises `SettingError` before anything starts where
        there is no room or a pool of that name is held, `EngineError` where other work takes the resources meanwhile.
        """
        self.check()
        twice = [name for name in (spec.spec if isinstance(spec, Plan) else spec) if name in self.pools]
        if twice:
            raise SettingError(f"pool {', '.join(twice)} is held already", do="cluster.release(name) gives it back")
        made = spec if isinstance(spec, Plan) else self._patiently(lambda: self.plan(spec, cpus=cpus, gpus=gpus))
        held = pools.hold(made, colocated)
        self.pools.update(held)
        return held

    def release(self, *names: str) -> None:
        """Give the named pools back (without names: all), ending the groups on them. Raises `SettingError` for an
        unknown name.
        """
        for name in (name for name in names if name not in self.pools):
            raise SettingError(f"pool {name!r} is not held", expected=f"one of {', '.join(self.pools) or '(none)'}")
        for name in names or tuple(self.pools):
            pool = self.pools.pop(name)
            for group in [one for one in self.groups if one.pool is pool]:
                group.close()
            pool.give_back()
            self._freed = time.monotonic()

    # --- workers --------------------------------------------------------------------------------

    def ranks(
        self,
        factory: Callable[..., Any],
        size: int,
        *,
        pool: Pool | str | None = None,
        seats: Sequence[int] | None = None,
        env: Mapping[str, str] | None = None,
        name: str | None = None,
        cpus: float = 1.0,
        gpus: float = 0.0,
        start_timeout: float = 300.0,
        nsight: str | Mapping[str, str] | None = None,
        **settings: Any,
    ) -> RayRanks:
        """Start a group of `size` workers (Ray actors), each holding `factory(rank, size, **settings)`.

        In a `pool` they run on the pool's processes numbered `seats` (None: the first `size`), each with a share of that
        process's resources; without one each takes `cpus` and `gpus` on any node. `env` is set in the workers before they
        import anything; `start_timeout` is in seconds. `nsight` (`"default"`, or options of `nsys profile`) runs them under
        NVIDIA's profiler, whose reports are in Ray's session folder, `logs/nsight` on each node.

        Raises `SettingError` at once where the cluster has no room, `EngineError` with the traceback where a factory raises,
        `WorkerLost` where a worker dies.
        """
        self.check()
        chairs = tuple(range(size) if seats is None else seats)
        wanted, environment = name or str(getattr(factory, "__name__", "workers")), self.environment.joined(env)
        if pool is None:
            self._patiently(lambda: self._room(size, cpus, gpus))
        with self._lock:  # groups are started side by side
            held = self._pool(pool, chairs)
            options = [held.options(seat) if held else {"num_cpus": cpus, "num_gpus": gpus} for seat in chairs]
            taken = [one.name for one in self.groups]
            names = chain([wanted], (f"{wanted}-{number}" for number in count(2)))
            free = next(one for one in names if one not in taken)
            group = RayRanks(free, started(options, environment, nsight), environment, self._ended, held, chairs)
            self.groups.append(group)
        group.begin(factory, settings, start_timeout)
        return group

    def _pool(self, pool: Pool | str | None, seats: Sequence[int]) -> Pool | None:
        if pool is None:
            return None
        if isinstance(pool, str):
            if pool not in self.pools:
                raise SettingError(f"pool {pool!r} is not held", expected=f"one of {', '.join(self.pools) or '(none)'}")
            pool = self.pools[pool]
        there = [group for group in self.groups if group.pool is pool]
        taken = Counter(seat for group in there for seat in group.seats)
        if any(seat >= pool.size or taken[seat] >= pool.colocated for seat in seats):
            expected = f"at most {pool.size} ranks and {pool.colocated} groups on it"
            occupants = f"groups {', '.join(group.name for group in there) or 'none'}"
            do = "close a group, or hold the pool with a larger colocated="
            what = f"pool {pool.name!r} has no room for {len(seats)} workers"
            raise SettingError(what, expected=expected, found=occupants, do=do)
        return pool

    def _room(self, size: int, cpus: float, gpus: float) -> None:
        seats = 0
        for node in nodes():
            by = [node.free_cpus // cpus if cpus else size, node.free_gpus // gpus if gpus else size]
            seats += int(min(by)) if node.alive else 0
        if seats < size:
            what, expected = f"no room: {size} workers of {cpus:g} CPUs and {gpus:g} GPUs", f"at most {seats} of them"
            do = "start fewer, or end what uses the cluster (cluster.status() lists it)"
            raise SettingError(what, expected=expected, found=pools.free_text(), do=do)

    def _patiently(self, work: Callable[[], Any]) -> Any:
        """Repeat `work` for up to `FREE_SECONDS` after something was released, because Ray counts released resources as
        free a moment later.
        """
        while True:
            try:
                return work()
            except SettingError:
                if time.monotonic() > self._freed + FREE_SECONDS:
                    raise
                time.sleep(0.1)

    def _ended(self, group: RayRanks) -> None:
        """Forget a group that has ended, and keep its events for the timeline."""
        self._freed = time.monotonic()
        if group in self.groups:
            self.groups.remove(group)
            self._past += group.timeline.events

    @property
    def timeline(self) -> Timeline:
        """All calls that this session's workers have run, and all requests that this process's samplers have answered,
        with their times.

        `.save(path)` writes a Chrome trace.
        """
        return ordered([*self._past, *(event for one in self.groups for event in one.timeline.events)], self._began)
