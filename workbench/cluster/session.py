"""A cluster in a session: attached to by address, or started here; left as it was found.

Ray is imported when a cluster is asked for. A local cluster is always one of its own: whatever else runs on the machine, or is
named in the environment, is told of and not joined.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.cluster import connecting, found, pools
from workbench.cluster.environment import Environment
from workbench.cluster.logs import Logs, read_log
from workbench.cluster.profiling import Profile, nsight_options
from workbench.cluster.ranks import RayRanks
from workbench.cluster.status import Looking, Status, nodes
from workbench.cluster.timeline import Timeline, ordered
from workbench.errors import EngineError, SettingError, message

if TYPE_CHECKING:
    from workbench.cluster.fits import Fit
    from workbench.cluster.pools import Plan, Pool

FREE_SECONDS = 4.0
_open: Cluster | None = None


def cluster(
    address: str | None = None,
    *,
    gpus: int | None = None,
    cpus: int | None = None,
    runtime_env: str | Path | Mapping[str, Any] | None = None,
    object_store_memory: int | None = None,
    dashboard: bool = False,
    connect_timeout: float = 20.0,
) -> Cluster:
    """A Ray cluster: `address=None` starts one on this machine; `"auto"`, `"host:port"` or `"ray://…"` attach to a running one.

    `gpus`, `cpus`, `object_store_memory` (bytes) and `dashboard` (on loopback) are for one that is started; None: what the
    machine has. `runtime_env` is a dict or a yaml file; its `env_vars` reach workers, never a log, a repr or an error.
    The same call again, in a cell that is run twice, gives the same cluster. What a killed kernel left is ended first.

    Raises `EngineError` where nothing answers (saying what was found instead), where Ray is not installed, or where another
    cluster is open in this process; `SettingError` for settings that cannot be.
    """
    global _open
    asked = (address, gpus, cpus, str(runtime_env), object_store_memory, dashboard)
    if _open is not None and not _open.closed:
        if _open.asked == asked:
            return _open
        raise EngineError(
            message("a cluster is open in this process already", found=_open.title, do="close() it first")
        )
    environment = Environment.of(runtime_env)
    connecting.require_ray()
    notes = found.clear_left()
    if address is None:
        if "nsight" in environment.ray:
            nsight_options(environment.ray["nsight"])
        link = connecting.start(environment, gpus, cpus, object_store_memory, dashboard)
    else:
        if gpus is not None or cpus is not None or object_store_memory is not None or dashboard:
            raise SettingError(
                message(
                    "gpus, cpus, object_store_memory and dashboard",
                    expected="a cluster that is started here",
                    found=f"address {address!r}",
                )
            )
        link = connecting.attach(address, environment, connect_timeout)
    link.notes[:0] = notes
    _open = Cluster(link, environment, asked, link.notes)
    return _open


def opened() -> Cluster | None:
    """The cluster that is open in this process."""
    return _open if _open is not None and not _open.closed else None


class Cluster:
    """A connection to a Ray cluster and what this session has made on it. Made by `workbench.cluster`."""

    def __init__(
        self, link: connecting.Link, environment: Environment, asked: tuple[Any, ...], notes: list[str]
    ) -> None:
        self.link = link
        self.environment = environment
        self.asked = asked
        self.notes = notes
        """What was found or done on the way here, in sentences."""
        self.closed = False
        self.pools: dict[str, Pool] = {}
        self.groups: list[RayRanks] = []
        self.placed: dict[str, Any] = {}
        """Pool → (what was asked for, the engine) of pools that `place` holds."""
        self.looking = Looking(self)
        self._past: list[Any] = []
        self._freed = -FREE_SECONDS
        self._starting: set[str] = set()
        self._lock = threading.Lock()
        atexit.register(self.close)

    # --- who sits where -----------------------------------------------------------------------

    def plan(
        self,
        spec: Mapping[str, Sequence[int]],
        *,
        cpus: float = 1.0,
        gpus: float | None = None,
        roles: Mapping[str, Sequence[str]] | None = None,
    ) -> Plan:
        """Who would sit where, as a picture; nothing starts. See `pools.plan`."""
        self._check()
        return pools.plan(spec, nodes(), cpus=cpus, gpus=gpus, roles=roles)

    def hold(
        self,
        spec: Mapping[str, Sequence[int]] | Plan,
        *,
        cpus: float = 1.0,
        gpus: float | None = None,
        colocated: int = 1,
    ) -> dict[str, Pool]:
        """Hold a plan's resources: name → pool. `colocated` groups can share each process's resources.

        Raises `SettingError` before anything starts where there is no room or a pool of that name is held.
        """
        self._check()
        twice = [name for name in (spec.spec if isinstance(spec, pools.Plan) else spec) if name in self.pools]
        if twice:
            raise SettingError(
                message(f"pool {', '.join(twice)} is held already", do="cluster.release(name) gives it back")
            )
        made = (
            spec
            if isinstance(spec, pools.Plan)
            else self._patiently(lambda: pools.plan(spec, nodes(), cpus=cpus, gpus=gpus))
        )
        held = pools.hold(made, colocated)
        self.pools.update(held)
        return held

    def release(self, *names: str) -> None:
        """Give pools back (all of them, without names); groups on them end."""
        for name in names or tuple(self.pools):
            pool = self.pools.pop(name)
            for group in [one for one in self.groups if one.pool is pool]:
                group.close()
            pool.give_back()
            self._freed = time.monotonic()

    def fits(self, model: str | Path | Mapping[str, Any], *, tokens: int, **settings: Any) -> Fit:
        """Whether a model's training and sampling fit the memory of each process, as a table; see `fits.fits`."""
        from workbench.cluster.fits import fits

        self._check()
        return fits(model, tokens=tokens, nodes=nodes(), **settings)

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
        """A group of `size` workers, each holding `factory(rank, size, **settings)`: `engines.ranks.Ranks`.

        In a `pool` each gets its share of a process's resources there, on `seats` (numbers of the pool's processes; None:
        the first); without one `cpus` and `gpus` wherever there is room.
        `env` is set in the workers before they import anything. `nsight` (`"default"`, or options of `nsys profile`) runs them
        under NVIDIA's profiler; its reports are in Ray's session folder, `logs/nsight` on each node. Raises `SettingError` at once where the cluster has no
        room, `EngineError` with the traceback where a factory raises, `WorkerLost` where a worker dies.
        """
        self._check()
        chairs = tuple(range(size) if seats is None else seats)
        held = self._pool(pool, chairs)
        if held is not None:
            cpus, gpus = held.plan.cpus / held.colocated, held.plan.gpus / held.colocated
        else:
            self._patiently(lambda: self._room(size, cpus, gpus))
        chosen = self._name(name or str(getattr(factory, "__name__", "workers")))
        try:
            group = RayRanks(
                self, factory, size, pool=held, seats=chairs, env=env, name=chosen, cpus=cpus, gpus=gpus, settings=settings,
                start_timeout=start_timeout, nsight=nsight,
            )  # fmt: skip
            self.groups.append(group)
        finally:
            self._starting.remove(chosen)
        return group

    def _name(self, said: str) -> str:
        """A name that no group has, nor one that is being started in another thread."""
        with self._lock:
            taken = {*(one.name for one in self.groups), *self._starting}
            numbered = (f"{said}-{number}" for number in range(2, 10_000))
            chosen = next(one for one in (said, *numbered) if one not in taken)
            self._starting.add(chosen)
        return chosen

    def _pool(self, pool: Pool | str | None, seats: Sequence[int]) -> Pool | None:
        if pool is None:
            return None
        if isinstance(pool, str):
            if pool not in self.pools:
                raise SettingError(
                    message(f"pool {pool!r}", expected=f"one of {', '.join(self.pools) or '(none is held)'}")
                )
            pool = self.pools[pool]
        there = [one for one in self.groups if one.pool is pool]
        taken = Counter(seat for one in there for seat in one.seats)
        if any(seat >= pool.size or taken[seat] >= pool.colocated for seat in seats):
            raise SettingError(
                message(
                    f"pool {pool.name!r} has no room for {len(seats)} workers",
                    expected=f"at most {pool.size} ranks and {pool.colocated} groups on it",
                    found=f"groups {', '.join(one.name for one in there) or 'none'}",
                    do="close one, or hold the pool with a larger colocated=",
                )
            )
        return pool

    def _room(self, size: int, cpus: float, gpus: float) -> None:
        seats = 0
        for node in nodes():
            by = [node.free_cpus // cpus if cpus else size, node.free_gpus // gpus if gpus else size]
            seats += int(min(by)) if node.alive else 0
        if seats < size:
            raise SettingError(
                message(
                    f"{size} workers of {cpus:g} CPUs and {gpus:g} GPUs",
                    expected=f"at most {seats} of them",
                    found=self.free_text(),
                    do="ask for fewer, or free what holds the cluster: cluster.status()",
                )
            )

    def _patiently(self, work: Callable[[], Any]) -> Any:
        """Ray counts what was given back as free a moment later: look again for that long."""
        while True:
            try:
                return work()
            except SettingError:
                if time.monotonic() > self._freed + FREE_SECONDS:
                    raise
                time.sleep(0.1)

    def forget(self, group: RayRanks) -> None:
        """A group is gone; its events stay for the timeline."""
        self._freed = time.monotonic()
        if group in self.groups:
            self.groups.remove(group)
            self._past += group.timeline.events

    # --- engines and rewards --------------------------------------------------------------------

    def place(self, model: str | Path, **settings: Any) -> Any:
        """An engine for recipes whose learner and samplers stand on this cluster; see `placing.place`."""
        from workbench.cluster.placing import place

        self._check()
        return place(self, model, **settings)

    def serve(self, model: str | Path, engine: str = "vllm", **settings: Any) -> Any:
        """Engines that only answer: a judge's sampler, a reward model; see `placing.serve`."""
        from workbench.cluster.placing import serve

        self._check()
        return serve(self, model, engine, **settings)

    def judge(self, reward: Any, **settings: Any) -> Any:
        """A reward whose rows are judged by workers on this cluster; see `judging.judge`."""
        from workbench.cluster.judging import judge

        self._check()
        return judge(self, reward, **settings)

    # --- looking --------------------------------------------------------------------------------

    def status(self) -> Status:
        """Nodes, pools, workers and calls that are out, as a table; at the end of a cell it goes on looking."""
        return self.looking.look()

    def free_text(self) -> str:
        """What is free on each node, in a line."""
        return "; ".join(
            f"{one.host} has {one.free_cpus:g} of {one.cpus:g} CPUs and {one.free_gpus:g} of {one.gpus:g} GPUs free"
            for one in nodes()
            if one.alive
        )

    def logs(self, group: RayRanks | str, rank: int | None = None, lines: int = 100) -> Logs:
        """The last lines of a worker's outputs, dead or alive; without `rank` of all workers of the group, foldable in a cell."""
        group = self._group(group)
        ranks = range(len(group.facts)) if rank is None else [rank]
        return Logs.of([(group.where(one), group.logs(one, lines)) for one in ranks])

    def profile(self, group: RayRanks | str, path: str | Path, *, steps: Sequence[int] = ()) -> Profile:
        """torch's profiler in a group's workers, a Chrome trace a rank in `path`: `with c.profile("actor", "traces"): …`, or
        for chosen steps of a job `wb.train(…, observers=[c.profile("actor", "traces", steps=(3, 4))])`."""
        self._check()
        name = self._group(group).name
        return Profile(lambda: self._group(name), path, steps)  # by name: a group that was lost is made anew under it

    def _group(self, group: RayRanks | str) -> RayRanks:
        if not isinstance(group, str):
            return group
        known = {one.name: one for one in self.groups}
        if group not in known:
            raise SettingError(message(f"group {group!r}", expected=f"one of {', '.join(known) or '(none)'}"))
        return known[group]

    def read_log(self, facts: Mapping[str, Any], lines: int) -> str:
        """The last lines of a worker's outputs, by what it said of itself."""
        return read_log(facts, lines)

    @property
    def timeline(self) -> Timeline:
        """What every worker did when; `.save(path)` writes a Chrome trace."""
        return ordered([*self._past, *(event for one in self.groups for event in one.timeline.events)])

    @property
    def title(self) -> str:
        """Where it is, in a line."""
        return self.link.title

    # --- the end --------------------------------------------------------------------------------

    def close(self) -> None:
        """End what this session made: its groups and pools; and the cluster, where it was started here. Twice does nothing."""
        global _open
        if self.closed:
            return
        self.closed = True
        self.looking.end()
        atexit.unregister(self.close)
        try:
            for group in list(self.groups):
                group.close()
            self.release()
        finally:
            self.notes += connecting.leave(self.link)
            if _open is self:
                _open = None

    def _check(self) -> None:
        if self.closed:
            raise EngineError(message(f"{self.title} was closed", do="workbench.cluster(…) opens one"))

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        from workbench.views.clusters import cluster_text

        return cluster_text(self)

    def _repr_html_(self) -> str:
        from workbench.views.clusters import cluster_html

        return cluster_html(self)
