"""Engines on a cluster: which worker holds which part of a model, and what a recipe gets for it.

Stages never know: what stands here is an engine like `engines.local`, whose parts are a worker group of FSDP ranks and workers
that sample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.cluster.status import nodes
from workbench.config import require
from workbench.engines.fsdp import FsdpEngine, fsdp
from workbench.engines.fsdp_group import Group
from workbench.engines.fsdp_settings import FsdpSettings
from workbench.engines.host import KINDS, host
from workbench.engines.hosted import Hosted
from workbench.engines.loading import resolve
from workbench.engines.local_engine import local
from workbench.engines.paired import Paired, check_tokens, paired
from workbench.engines.ranks import Ranks
from workbench.engines.replicas import Replicas
from workbench.engines.vllm import vllm
from workbench.errors import SettingError, message, unknown

if TYPE_CHECKING:
    from workbench.cluster.pools import Pool
    from workbench.cluster.ranks import RayRanks
    from workbench.cluster.session import Cluster

CPU_RANKS = 2
"""Ranks of a learner where the cluster has no GPU and nobody says how many."""
START_SECONDS = 900.0
"""Longest start of one worker's engine: vLLM compiles large models for minutes."""


class Placed(Paired):
    """A pair whose learner and sampler stand on a cluster; `close()` gives back what was held for it."""

    def __init__(self, learner: Any, sampler: Any, *, share_device: bool, give_back: Callable[[], None]) -> None:
        super().__init__(learner, sampler, share_device=share_device)
        self._give_back = give_back

    def close(self) -> None:
        """End the workers; the pools that were held for them are free again."""
        try:
            super().close()
        finally:
            self._give_back()

    def __repr__(self) -> str:
        return f"Placed(learner={self.learner!r}, sampler={self.sampler!r})"


def place(
    cluster: Cluster,
    model: str | Path,
    *,
    learner: str = "fsdp",
    sampler: str | None = "vllm",
    ranks: int | None = None,
    replicas: int | None = None,
    tensor_parallel_size: int = 1,
    pool: str = "actor",
    rollout: str | None = None,
    threads: int = 1,
    scratch: str | Path | None = None,
    sampler_settings: Mapping[str, Any] | None = None,
    template_switches: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Any:
    """An engine for recipes: `c.place("my-7b", learner="fsdp", sampler="vllm", tensor_parallel_size=2, lr=1e-6)`.

    The learner's `ranks` (None: one a GPU, without GPUs two) sit in `pool`; so do the samplers (`vllm`, or `local` for
    transformers; None: no sampler, the learner alone is returned, for a reference or a critic of its own), which sleep while
    the learner works. `rollout` names a pool of the samplers' own instead. Pools that are not held yet are held for this
    engine: `replicas` samplers (None: as many as there is room for) of `tensor_parallel_size` GPUs each.

    `settings` are `FsdpSettings`, `sampler_settings` those of the sampler (`VllmSettings`, `LocalSettings`). `threads` are
    torch's in each worker. `scratch` is a folder for snapshots that all nodes see; on one node there is no need of it.
    Placed again in the same pool, what was placed there before is closed. Raises `SettingError` before anything starts where
    there is no room or a name is unknown, `EngineError` with the worker's own words where an engine does not start.
    """
    if learner != "fsdp":
        raise SettingError(unknown("learner", learner, ("fsdp",)))
    order = _Order(
        cluster, model, sampler, ranks, replicas, tensor_parallel_size, pool, rollout, threads, scratch,
        dict(sampler_settings or {}), template_switches, settings,
    )  # fmt: skip
    order.check()
    for name in dict.fromkeys((pool, rollout) if rollout is not None else (pool,)):
        _make_room(cluster, name, order.asked)
    held: list[str] = []
    try:
        engine = _placed(order, held)
    except BaseException:
        for name in held:  # and whoever stands there
            cluster.release(name)
        raise
    cluster.placed |= {name: (order.asked, engine) for name in held}
    return engine


@dataclass(frozen=True)
class _Order:
    """What `place` was asked for."""

    cluster: Cluster
    model: str | Path
    sampler: str | None
    ranks: int | None
    replicas: int | None
    tensor_parallel_size: int
    pool: str
    rollout: str | None
    threads: int
    scratch: str | Path | None
    sampler_settings: Mapping[str, Any]
    template_switches: Mapping[str, Any] | None
    settings: Mapping[str, Any]

    @property
    def asked(self) -> tuple[str, str | None]:
        """What makes a second order the same as the first."""
        return str(self.model), self.sampler

    def check(self) -> None:
        """Refuse what cannot be, before anything starts."""
        if self.sampler is not None and self.sampler not in ("vllm", "local"):
            raise SettingError(unknown("sampler", self.sampler, ("vllm", "local")))
        tp = self.tensor_parallel_size
        require(tp > 0, "tensor_parallel_size", expected="≥ 1", found=tp)
        require(
            tp == 1 or self.sampler == "vllm", "tensor_parallel_size", expected="sampler='vllm'", found=self.sampler
        )
        FsdpSettings.from_parameters(dict(self.settings))
        open_to_all = self.ranks is None and self.pool not in self.cluster.pools
        if self.rollout is not None and open_to_all and any(node.gpus for node in nodes()):
            expected = f"how many of the GPUs learn: the others are for pool {self.rollout!r}"
            raise SettingError(message("ranks", expected=expected, found=None))


def _placed(order: _Order, held: list[str]) -> Any:
    """The engine; names of pools that were held for it go to `held`."""
    cluster = order.cluster
    shared = order.sampler is not None and order.rollout is None
    actors = _hold(cluster, order.pool, order.ranks, 1 + shared, 1, held)
    seats = _sampling_seats(order, actors, held) if order.sampler is not None else None
    engine, workers = _learner(order, actors)
    if seats is None:
        return engine
    on_gpus = shared and actors.plan.gpus > 0
    members = _members(order, *seats, workers if on_gpus else None)
    try:
        _start_all(members.members)
        check_tokens(engine, members)
    except BaseException:
        members.close()
        engine.close()
        raise

    def give_back() -> None:
        for name in held:
            if cluster.placed.pop(name, None) is not None and name in cluster.pools:
                cluster.release(name)

    return Placed(engine, members, share_device=on_gpus and order.sampler == "vllm", give_back=give_back)


def serve(
    cluster: Cluster,
    model: str | Path,
    engine: str = "vllm",
    *,
    replicas: int = 1,
    gpus: float | None = None,
    cpus: float = 1.0,
    pool: str | None = None,
    threads: int = 1,
    name: str | None = None,
    **settings: Any,
) -> Replicas:
    """Engines that only answer: `RewardModel(c.serve("my-rm", "vllm_classifier"))`, `engines.chat(c.serve("my-judge"))`.

    `engine` is one of `vllm`, `local`, `vllm_classifier`, `classifier`, with its own `settings`. Each of the `replicas` takes
    `gpus` (None: vLLM's `tensor_parallel_size`, else 1, where the cluster has GPUs) and `cpus`, or a seat of a `pool` that is
    held. Raises as `place`.
    """
    if engine not in KINDS:
        raise SettingError(unknown("engine", engine, KINDS))
    require(replicas > 0, "replicas", expected="≥ 1", found=replicas)
    there = any(node.gpus for node in nodes())
    each = float(settings.get("tensor_parallel_size", 1) if there else 0) if gpus is None else gpus
    folder, said = _absolute(model), name or f"{engine}-{Path(str(model)).name}"

    def member(number: int) -> Hosted:
        def make() -> Ranks:
            where = {"pool": pool, "seats": [number]} if pool is not None else {"cpus": cpus, "gpus": each}
            return cluster.ranks(
                host, 1, name=f"{said}-{number}", kind=engine, path=folder, settings=settings, threads=threads,
                start_timeout=START_SECONDS, **where,
            )  # fmt: skip

        return Hosted(make, name=f"{said}-{number}", start=False)

    members = Replicas([member(number) for number in range(replicas)], name=said)
    try:
        _start_all(members.members)
    except BaseException:
        members.close()
        raise
    return members


# --- pools ----------------------------------------------------------------------------------------


def _make_room(cluster: Cluster, name: str, asked: tuple[Any, ...]) -> None:
    """A cell that is run again places the same model anew; another model does not push it out."""
    if name not in cluster.placed:
        return
    before, engine = cluster.placed[name]
    if before != asked:
        do = "close() it, or name another pool (pool=, rollout=)"
        raise SettingError(message(f"pool {name!r} is held for another engine", found=repr(engine), do=do))
    engine.close()
    if cluster.placed.pop(name, None) is not None and name in cluster.pools:
        cluster.release(name)


def _hold(cluster: Cluster, name: str, size: int | None, groups: int, gpus: int, held: list[str]) -> Pool:
    """A pool by name, held now where it is not: `size` processes, filling node after node."""
    if name in cluster.pools:
        pool = cluster.pools[name]
        if size is not None and size > pool.size:
            raise SettingError(message(f"pool {name!r}", expected=f"at least {size} processes", found=pool.size))
        return pool
    there = sorted((one for one in nodes() if one.alive), key=lambda one: -(one.free_gpus or one.free_cpus))
    with_gpus = any(one.gpus for one in there)
    room = [int(min(one.free_gpus // gpus, one.free_cpus) if with_gpus else one.free_cpus) for one in there]
    wanted = size if size is not None else sum(room) if with_gpus else min(CPU_RANKS, sum(room))
    counts, left = [], wanted
    for seats in room:
        if left > 0 and seats > 0:
            counts.append(min(seats, left))
            left -= counts[-1]
    if left > 0:
        counts = [*counts[:-1], counts[-1] + left] if counts else [left]  # refused by the plan, in its words
    pool = cluster.hold({name: counts or [1]}, gpus=float(gpus if with_gpus else 0), colocated=groups)[name]
    held.append(name)
    return pool


def _sampling_seats(order: _Order, actors: Pool, held: list[str]) -> tuple[Pool, list[list[int]]]:
    """The samplers' pool, and each one's seats there: blocks of the learner's, or one of a pool of their own."""
    gpus = actors.plan.gpus > 0
    tp, replicas, rollout = order.tensor_parallel_size if gpus else 1, order.replicas, order.rollout
    if rollout is not None:
        apart = _hold(order.cluster, rollout, replicas or (None if gpus else 1), 1, tp, held)
        if 0 < apart.plan.gpus < tp:
            do = f"hold it with gpus={tp}: cluster.hold({{{rollout!r}: [1]}}, gpus={tp})"
            raise SettingError(message(f"pool {rollout!r}", expected=f"processes of {tp} GPUs, one a sampler", found=f"{apart.plan.gpus:g} each", do=do))  # fmt: skip
        return apart, [[seat] for seat in range(replicas or apart.size)]
    seats = actors.plan.of(actors.name)
    blocks: list[list[int]] = []
    for node in dict.fromkeys(seat.node for seat in seats):
        here = [seat.rank for seat in seats if seat.node == node]
        blocks += [here[first : first + tp] for first in range(0, len(here) - tp + 1, tp)]
    count = replicas if replicas is not None else len(blocks) if gpus else 1
    if not blocks or count > len(blocks):
        found = f"{len(blocks)} blocks in pool {actors.name!r} ({actors.size} processes)"
        raise SettingError(message(f"{count} samplers of {tp} GPUs each on one node", found=found, do="ask for fewer replicas, or a smaller tensor_parallel_size"))  # fmt: skip
    return actors, blocks[:count]


# --- workers --------------------------------------------------------------------------------------


def _learner(order: _Order, pool: Pool) -> tuple[FsdpEngine, Callable[[], Sequence[Mapping[str, Any]]]]:
    """The engine, and what is known of its workers by rank."""
    ranks = order.ranks or pool.size
    apart = len({seat.node for seat in pool.plan.of(pool.name)[:ranks]}) > 1
    if apart and order.scratch is None:
        raise SettingError(message("scratch", expected="a folder that all nodes see, for snapshots", found="none, and ranks on several nodes"))  # fmt: skip
    last: list[RayRanks] = []

    def start() -> Ranks:
        from workbench.engines.fsdp_worker import shards  # torch's sharding, half a second of imports

        said: dict[str, Any] = {"threads": order.threads, "host": "auto" if apart else "127.0.0.1"}
        last[:] = [order.cluster.ranks(shards, ranks, pool=pool, name=pool.name, start_timeout=START_SECONDS, **said)]
        return last[0]

    group = Group(start)
    try:
        engine = fsdp(
            order.model, on=group, scratch=order.scratch, template_switches=order.template_switches, **order.settings
        )
    except BaseException:
        group.close()
        raise
    return engine, lambda: last[0].facts


def _members(
    order: _Order,
    pool: Pool,
    blocks: Sequence[Sequence[int]],
    workers: Callable[[], Sequence[Mapping[str, Any]]] | None,
) -> Replicas:
    """The samplers, not started; on the learner's GPUs where its `workers` are given."""
    settings = dict(order.sampler_settings)
    if order.sampler == "vllm":
        chosen = {"tensor_parallel_size": order.tensor_parallel_size, "sleep_mode": workers is not None}
        settings = {**chosen, **settings}

    def member(number: int, seats: Sequence[int]) -> Hosted:
        name = f"rollout-{number}"

        def make() -> Ranks:
            env = None
            if workers is not None:  # a sampler of several GPUs sits on the first of its seats and sees those of all
                facts = workers()
                env = {"CUDA_VISIBLE_DEVICES": ",".join(str(facts[seat]["gpus"]) for seat in seats)}
            return order.cluster.ranks(
                host, 1, pool=pool, seats=seats[:1], env=env, name=name, kind=order.sampler, settings=settings,
                path=_absolute(order.model), threads=order.threads, start_timeout=START_SECONDS,
            )  # fmt: skip

        return Hosted(make, name=name, start=False)

    return Replicas([member(number, seats) for number, seats in enumerate(blocks)], name="rollout")


def _start_all(members: Sequence[Hosted]) -> None:
    """Side by side: each may take a minute. Raises the first that did not start, once all have ended their trying."""
    with ThreadPoolExecutor(len(members)) as pool:
        errors = [future.exception() for future in [pool.submit(one.restart) for one in members]]
    for error in errors:
        if error is not None:
            raise error


def _absolute(model: str | Path) -> str:
    """A folder by its whole path, a hub name as it is: a worker may stand elsewhere."""
    folder = str(resolve(model))
    return str(Path(folder).absolute()) if Path(folder).exists() else folder


def open_engine(
    model: str | Path, engine: str = "local", sampler: str = "local", *, address: str | None = None, **settings: Any
) -> Any:
    """An engine by two words, for notebooks that take them as parameters.

    `engine` is where the policy learns: `local` (this process) or `ray` (FSDP ranks on the cluster at `address`; None: the one
    that is open, or one that is started here). `sampler` is who samples: `local` (transformers) or `vllm`. `settings` are
    `LocalSettings`. Raises `SettingError` for another word, else what the engines raise.
    """
    if engine not in ("local", "ray"):
        raise SettingError(unknown("engine", engine, ("local", "ray")))
    if sampler not in ("local", "vllm"):
        raise SettingError(unknown("sampler", sampler, ("local", "vllm")))
    if engine == "ray":
        from workbench.cluster import session

        found = session.opened() if address is None else None
        return (found or session.cluster(address)).place(model, sampler=sampler, **settings)
    here = local(model, **settings)
    return paired(here, vllm(model)) if sampler == "vllm" else here
