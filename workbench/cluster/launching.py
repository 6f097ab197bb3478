"""Actors of a group: asked for, introduced, and ended for certain."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from workbench.cluster import found
from workbench.cluster.environment import Environment
from workbench.cluster.profiling import nsight_options
from workbench.cluster.waiting import fetch, out, quietly, reason
from workbench.errors import EngineError, message

if TYPE_CHECKING:
    from workbench.cluster.pools import Pool
    from workbench.cluster.session import Cluster

GONE_SECONDS = 6.0
HEAR_SECONDS = 1.0


def actors(
    seats: Sequence[int],
    pool: Pool | None,
    environment: Environment,
    cpus: float,
    gpus: float,
    nsight: str | Mapping[str, str] | None = None,
) -> list[Any]:
    """Ask for one actor a rank, each on its seat of a pool: never restarted, never detached, its calls never repeated."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    from workbench.cluster import actor as actor_module

    more = nsight_options(nsight) if nsight is not None else {}
    # for good: another thread may start a group beside this one
    ray.cloudpickle.register_pickle_by_value(actor_module)
    doors: dict[str, Any] = {"concurrency_groups": {"control": 2}}
    remote = ray.remote(**doors)(actor_module.Worker)
    made = []
    for seat in seats:
        options: dict[str, Any] = {
            "num_cpus": cpus,
            "num_gpus": gpus,
            "max_restarts": 0,
            "max_task_retries": 0,
        }
        runtime = {"env_vars": environment.at_start()} if environment.at_start() else {}
        if runtime or more:
            options["runtime_env"] = {**runtime, **more}
        if pool is not None:
            group, bundle = pool.slot(seat)
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group, bundle)
        made.append(remote.options(**options).remote())
    return made


def introduced(made: Sequence[Any], environment: Environment, until: float, cluster: Cluster) -> list[dict[str, Any]]:
    """Set every worker's variables; who they are. Raises `EngineError` naming the ranks that do not come up."""
    from ray.exceptions import RayError

    paths = [os.path.abspath(path) for path in sys.path]
    refs = [actor.setup.remote(dict(environment.variables), paths) for actor in made]
    ranks = out(refs, until - time.monotonic())
    if ranks:
        raise EngineError(
            message(
                f"rank {', '.join(map(str, ranks))} of {len(refs)} did not start in time",
                found=cluster.free_text(),
                do="free what holds the cluster (cluster.status()), or give start_timeout more seconds",
            )
        )
    try:
        facts: list[dict[str, Any]] = [fetch(ref, 10.0, "a worker's introduction") for ref in refs]
    except RayError as error:
        raise EngineError(environment.redact(message("a worker did not start", found=reason(error)))) from None
    for fact in facts:
        fact["process"] = found.process(fact["pid"]) if fact["host"] == socket.gethostname() else None
    return facts


def kill(made: Sequence[Any], facts: Sequence[Mapping[str, Any]]) -> None:
    """End actors, and wait until they do not answer and, on this host, their processes are gone."""
    import ray

    if not ray.is_initialized():
        return
    for actor in made:
        ray.kill(actor, no_restart=True)
    here = [fact["process"] for fact in facts if fact["process"] is not None]
    if found.end(here, HEAR_SECONDS):  # Ray gives a stopped process five seconds
        found.end(here, GONE_SECONDS)
    if len(here) == len(made):
        return
    end = time.monotonic() + GONE_SECONDS
    for actor in made:
        quietly(actor.ping.remote(), max(end - time.monotonic(), 0.1), None)
