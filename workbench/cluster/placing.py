"""Engines and rewards on a cluster: which worker holds which part of a model, and the objects that a recipe uses in its
place.

To a stage it is an engine like `engines.local`; its parts are a worker group of FSDP ranks, and workers that sample. The
workers of a reward score the rows of a batch side by side, and the scores come back in the rows' order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from workbench.base.config import require
from workbench.base.errors import SettingError, WorkerLost, check_name
from workbench.cluster.fitting import ALONE, Placement, spread
from workbench.cluster.holding import Session
from workbench.cluster.pools import Pool, nodes
from workbench.cluster.ranks import RayRanks
from workbench.engines.fsdp_engine.engine import fsdp
from workbench.engines.fsdp_engine.group import Group
from workbench.engines.fsdp_engine.meshes import ranks_of
from workbench.engines.local_engine.loading import resolve
from workbench.engines.paired import Paired, Policy, check_tokens
from workbench.engines.protocol import WeightSink
from workbench.engines.settings import FsdpSettings
from workbench.engines.workers.hosted import KINDS, Hosted, Replicas, host
from workbench.engines.workers.processes import Ranks
from workbench.rewards.base import Around, BaseReward
from workbench.rewards.reward import as_reward
from workbench.rewards.score import Score, failed

START_SECONDS = 900.0
"""Time limit in seconds for the start of a worker's engine: vLLM compiles large models for minutes."""
JUDGE_SECONDS = 1800.0


class Placed(Paired):
    """An engine whose learner and sampler run on a cluster. Made by `Cluster.place`; `close()` gives its pools back."""

    def __init__(self, learner: Policy, sampler: WeightSink, share_device: bool, ends: ExitStack) -> None:
        super().__init__(learner, sampler, share_device=share_device)
        self._ends = ends

    def close(self) -> None:
        """End the workers, and give back the pools that were held for them."""
        self._ends.close()


def place(
    cluster: Session,
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
    """Start an engine on the cluster: `c.place("my-7b", learner="fsdp", sampler="vllm", tensor_parallel_size=2,
    lr=1e-6)`.

    The learner's `ranks` run in the resource pool `pool` (None: as many as `mesh` has, else one per free GPU, or two
    without GPUs). The samplers (`vllm`, or `local` for transformers) run there too; vLLM's sleep while the learner
    works. `rollout` names a separate pool for the samplers instead. With `sampler=None` only the learner is returned,
    for a reference or a critic. There are `replicas` samplers (None: as many as the GPUs allow) of
    `tensor_parallel_size` GPUs each. Pools that are not held yet are held now.

    `settings` are `FsdpSettings`, `sampler_settings` those of the sampler (`VllmSettings`, `LocalSettings`). `threads`
    is torch's number of threads in each worker. `scratch` is a folder that all nodes see, for snapshots; a single node
    needs none. Placing the same model in the same pool again closes the engine that was there and replaces it.

    Raises `SettingError` before anything starts where there is no room or a name is unknown, `EngineError` with the
    worker's message where an engine does not start.
    """
    identity, tp = (str(model), sampler), tensor_parallel_size
    chosen, apart = FsdpSettings.from_parameters(settings), rollout is not None
    ranks = ranks_of(chosen.mesh, ranks)
    placement = Placement(chosen, ranks or 1, False, sampler, tp, apart, sampler_settings or {})
    _admit(cluster, learner, identity, ranks, pool, rollout)
    held, members = list[Pool](), None
    with ExitStack() as ends:  # what it has to end, the last first: where something fails, or with the engine
        ends.callback(_give_back, cluster, held)
        actors = _hold(cluster, pool, ranks, 2 if sampler and rollout is None else 1, 1, held)
        placement = replace(placement, ranks=ranks or actors.size, gpus=actors.plan.gpus > 0)
        group, workers = _group(cluster, actors, placement, threads, scratch)
        ends.callback(group.close)
        if sampler is not None:
            places = _sampling_seats(cluster, actors, rollout, replicas, tp, held)
            given = {"kind": sampler, "settings": placement.sampling, "threads": threads}
            members = _hosted(
                cluster, "rollout", model, _where(*places, workers if placement.shared else None), **given
            )
            ends.callback(members.close)
        engine: Any = fsdp(model, on=group, scratch=scratch, template_switches=template_switches, **settings)
        if members is not None:
            _start_all(members)
            check_tokens(engine, members)
        kept = ends.pop_all()
    engine = engine if members is None else Placed(engine, members, placement.shared and sampler == "vllm", kept)
    for one in held:
        one.placed = identity, engine
    return engine


def serve(
    cluster: Session,
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
    """Start inference engines for rewards: `RewardModel(c.serve("my-rm", "vllm_classifier"))`,
    `chat(c.serve("my-judge"))`.

    `engine` is one of `vllm`, `local`, `vllm_classifier`, `classifier`, with that engine's `settings`. Each of the
    `replicas` takes `cpus` and `gpus` (None: where the cluster has GPUs `tensor_parallel_size`, or 1), or one process
    of a held `pool`. `threads` is the number of torch's threads in each worker. Raises as `place` does.
    """
    cluster.check()
    check_name("engine", engine, KINDS)
    require(replicas > 0, "argument replicas of serve", expected="≥ 1", found=replicas)
    there = any(node.gpus for node in nodes())
    each = float(settings.get("tensor_parallel_size", 1) if there else 0) if gpus is None else gpus
    if pool is None and engine.startswith("vllm"):
        settings = {"gpu_memory_utilization": ALONE} | settings
    called = name or f"{engine}-{Path(str(model)).name}"
    where: list[Where] = [partial(dict, cpus=cpus, gpus=each)] * replicas
    if pool is not None:
        where = [partial(dict, pool=pool, seats=[number]) for number in range(replicas)]
    members = _hosted(cluster, called, model, where, kind=engine, settings=settings, threads=threads)
    _start_all(members)
    return members


def judge(
    cluster: Session, reward: Any, *, workers: int = 2, pool: str | None = None, cpus: float = 1.0
) -> PlacedReward:
    """Let workers on the cluster compute a reward: `grpo(engine, reward=c.judge(my_reward, workers=8))`.

    `reward` is whatever a recipe takes; it is pickled for the workers, its function too. A reward that scores groups or whole
    batches is refused where `workers` > 1: its rows must stay together. The workers run in a held `pool`, or take `cpus` each
    on any node. Raises `SettingError` where there is no room.
    """
    cluster.check()
    inner = as_reward(reward)
    per = getattr(inner, "per", "row")
    if workers > 1 and per != "row":
        raise SettingError(f"reward {inner.name!r} scores a {per} at once", expected="workers=1", found=workers)
    return PlacedReward(cluster, inner, workers, {"pool": pool} if pool is not None else {"cpus": cpus})


# --- pools ----------------------------------------------------------------------------------------


def _admit(
    cluster: Session,
    learner: str,
    identity: tuple[str, str | None],
    ranks: int | None,
    pool: str,
    rollout: str | None,
) -> None:
    """Refuse a placement that cannot work, and close the same model's engine in the pool, so that a cell can be run
    again.

    A pool that is held for another model is refused.
    """
    cluster.check()
    check_name("learner", learner, ("fsdp",))
    if rollout is not None and ranks is None and pool not in cluster.pools and any(node.gpus for node in nodes()):
        expected = f"the number of GPUs for the learner; the samplers in pool {rollout!r} get the others"
        raise SettingError("argument ranks of place is missing", expected=expected)
    for there in [cluster.pools[name] for name in {pool, rollout or pool} if name in cluster.pools]:
        if there.placed is not None:
            before, engine = there.placed
            if before != identity:
                do = "close() that engine, or name another pool (pool=, rollout=)"
                raise SettingError(f"pool {there.name!r} is held for another engine", found=repr(engine), do=do)
            engine.close()
            _give_back(cluster, [there])


def _give_back(cluster: Session, pools: Sequence[Pool]) -> None:
    for pool in pools:
        if cluster.pools.get(pool.name) is pool:
            cluster.release(pool.name)


def _hold(cluster: Session, name: str, size: int | None, groups: int, gpus: int, held: list[Pool]) -> Pool:
    """Return the pool of a name; one that is not held yet is held now with `size` processes, node after node."""
    if name in cluster.pools:
        pool = cluster.pools[name]
        if size is not None and size > pool.size:
            raise SettingError(f"pool {name!r} is too small", expected=f"{size} processes or more", found=pool.size)
        return pool
    there = [one for one in nodes() if one.alive]
    each = gpus if any(one.gpus for one in there) else 0
    held.append(cluster.hold({name: spread(there, size, each)}, gpus=float(each), colocated=groups)[name])
    return held[-1]


def _sampling_seats(
    cluster: Session, actors: Pool, rollout: str | None, replicas: int | None, tp: int, held: list[Pool]
) -> tuple[Pool, list[list[int]]]:
    """Return the samplers' pool and each sampler's seats: a block of the learner's seats, or one seat of a separate
    pool.
    """
    gpus = actors.plan.gpus > 0
    tp = tp if gpus else 1
    if rollout is not None:
        apart = _hold(cluster, rollout, replicas or (None if gpus else 1), 1, tp, held)
        if 0 < apart.plan.gpus < tp:
            expected, shortage = f"{tp} GPUs a process, for tensor_parallel_size={tp}", f"{apart.plan.gpus:g}"
            do = f"hold it with gpus={tp}: cluster.hold({{{rollout!r}: [1]}}, gpus={tp})"
            raise SettingError(f"pool {rollout!r}", expected=expected, found=shortage, do=do)
        return apart, [[seat] for seat in range(replicas or apart.size)]
    blocks = _blocks(actors, tp)
    count = replicas if replicas is not None else len(blocks) if gpus else 1
    if not blocks or count > len(blocks):
        shortage = f"room for {len(blocks)} in pool {actors.name!r} ({actors.size} processes)"
        do = "ask for fewer replicas, or a smaller tensor_parallel_size"
        raise SettingError(f"no room for {count} samplers of {tp} GPUs each on one node", found=shortage, do=do)
    return actors, blocks[:count]


def _blocks(pool: Pool, size: int) -> list[list[int]]:
    """Group a pool's seats into blocks of `size` on one node each; seats that are left over on a node are not used."""
    ranks = [[seat.rank for seat in seats] for _, seats in groupby(pool.plan.of(pool.name), lambda seat: seat.node)]
    return [one[first : first + size] for one in ranks for first in range(0, len(one) - size + 1, size)]


# --- workers --------------------------------------------------------------------------------------


def _group(
    cluster: Session, pool: Pool, placement: Placement, threads: int, scratch: str | Path | None
) -> tuple[Group, list[RayRanks]]:
    """Make a learner's group of ranks, not started yet, and a list that will hold its workers once it is started."""
    ranks = placement.ranks
    apart = len({seat.node for seat in pool.plan.of(pool.name)[:ranks]}) > 1
    if apart and scratch is None:
        expected, found = "a folder that all nodes see, for snapshots", "None, and ranks on several nodes"
        raise SettingError("argument scratch of place", expected=expected, found=found)
    workers: list[RayRanks] = []
    given: dict[str, Any] = {"threads": threads, "host": "auto" if apart else "127.0.0.1"}
    given["wait"] = placement.learner.group_deadline

    def start() -> Ranks:
        from workbench.engines.fsdp_engine.worker import shards  # torch's sharding, half a second of imports

        workers[:] = [cluster.ranks(shards, ranks, pool=pool, name=pool.name, start_timeout=START_SECONDS, **given)]
        return workers[0]

    return Group(start), workers


Where = Callable[[], Mapping[str, Any]]
"""Function that returns the arguments of `Cluster.ranks` that place a worker, called at each start of the worker."""


def _where(pool: Pool, blocks: Sequence[Sequence[int]], learners: Sequence[RayRanks] | None) -> list[Where]:
    """Return where each sampler runs. One with several GPUs runs on its first seat and sees the GPUs of all `learners`
    on its seats.
    """

    def seated(seats: Sequence[int]) -> Mapping[str, Any]:
        seating: dict[str, Any] = {"pool": pool, "seats": seats[:1]}
        if learners is not None:
            seen = ",".join(str(learners[0].facts[seat]["gpus"]) for seat in seats)
            seating["env"] = {"CUDA_VISIBLE_DEVICES": seen}
        return seating

    return [partial(seated, seats) for seats in blocks]


def _hosted(cluster: Session, name: str, model: str | Path, places: Sequence[Where], **given: Any) -> Replicas:
    """Make an engine in a worker for each of the places, not started yet; `given` are arguments of `host`."""
    folder = str(resolve(model))
    if Path(folder).exists():  # else a hub name; a worker may have another working directory
        folder = str(Path(folder).absolute())

    def make(called: str, where: Where) -> Ranks:
        return cluster.ranks(host, 1, name=called, path=folder, start_timeout=START_SECONDS, **given, **where())

    named = {f"{name}-{number}": where for number, where in enumerate(places)}
    members = [Hosted(partial(make, called, where), name=called, start=False) for called, where in named.items()]
    return Replicas(members, name=name)


def _start_all(members: Replicas) -> None:
    """Start all members in parallel. Where one does not start, all are closed and its error is raised."""
    try:
        with ThreadPoolExecutor(len(members.members)) as pool:
            list(pool.map(Hosted.restart, members.members))
    except BaseException:
        members.close()
        raise


# --- rewards ----------------------------------------------------------------------------------------


class _Scoring:
    """The object that a worker holds to score rows: the reward, with its own processes, time limits and records."""

    def __init__(self, rank: int, size: int, *, reward: BaseReward) -> None:
        self.reward = reward

    def score(self, rows: Sequence[Mapping[str, Any]]) -> list[Score]:
        return self.reward.judge(rows) if rows else []


class PlacedReward(Around):
    """A reward that workers on a cluster compute. Made by `Cluster.judge`; used as any other reward."""

    def __init__(self, cluster: Session, inner: BaseReward, workers: int, seats: Mapping[str, Any]) -> None:
        super().__init__(inner.name, inner.on_failure)
        self.inner = inner
        self.workers = workers
        self.reads = inner.reads
        self.streams = inner.streams
        self.in_process = inner.in_process
        self._cluster = cluster
        self._seats = dict(seats)
        self._group: RayRanks | None = None
        self._started()

    def settings(self) -> dict[str, Any]:
        """The settings of the reward that the workers compute, and how many workers there are."""
        return {**self.inner.settings(), "cluster_workers": self.workers}

    def _started(self) -> RayRanks:
        if self._group is None or self._group.closed is not None:
            name = f"reward-{self.name}"
            self._group = self._cluster.ranks(_Scoring, self.workers, name=name, reward=self.inner, **self._seats)
        return self._group

    def judge(self, rows: Sequence[Mapping[str, Any]]) -> list[Score]:
        """Score rows on the workers; returns one `Score` for each row, in order.

        Rows go to the workers in turn, so that rows of a slow kind are spread over all of them. If a worker dies or hangs,
        all are replaced and all rows scored once more; if that fails, too, every row is an *infra_error* with the reason.
        """
        each = [(rows[rank :: self.workers],) for rank in range(self.workers)]
        error = ""
        for _ in range(2):
            try:
                parts = self._started().call("score", each=each, timeout=JUDGE_SECONDS)
                return [parts[number % self.workers][number // self.workers] for number in range(len(rows))]
            except (WorkerLost, TimeoutError) as lost:
                error = str(lost).splitlines()[0]
        return [failed(f"the workers did not score this batch in two tries: {error}", error)] * len(rows)

    def close(self) -> None:
        """End the workers, and close the inner reward."""
        if self._group is not None:
            self._group.close()
        self.inner.close()
