"""A run on ranks that may be killed at any time: steps, snapshots, and steps again from the last one."""

from __future__ import annotations

import functools
import gc
import os
import random
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

import workbench as wb
from workbench.base.errors import WorkerLost
from workbench.cluster import Cluster
from workbench.engines.fsdp_engine.engine import fsdp
from workbench.engines.fsdp_engine.group import Group
from workbench.engines.fsdp_engine.worker import shards
from workbench.runs.loop import run_step

MODEL = "data/tiny-arith"


def group(cluster: Cluster, ranks: int) -> Group:
    return Group(lambda: cluster.ranks(shards, ranks, name=f"fsdp{ranks}", cpus=0.5, host="auto", threads=1))


@functools.cache
def rows() -> Any:
    return wb.rows("data/arith/train.parquet", max_prompt_length=256)


def grpo(where: Group, scratch: Path, **settings: Any) -> tuple[Any, wb.Pipeline]:
    """A learner on the ranks, and GRPO with it and a sampler in this process."""
    learner = fsdp(MODEL, on=where, device="cpu", lr=1e-3, scratch=scratch, **settings)
    both = wb.engines.paired(learner, wb.engines.local(MODEL, device="cpu"))
    return learner, wb.recipes.grpo(both, group_size=2, max_tokens=6, kl_coef=0.001)


class Killer:
    """Kills a rank of a group at random moments within every so manieth step, from a thread."""

    def __init__(self, where: Group, every: int, most: int, seed: int = 7) -> None:
        self._where, self._every, self._most = where, every, most
        self._random = random.Random(seed)
        self._begun = 0
        self.killed: list[int] = []

    def begun(self) -> None:
        """A step begins."""
        self._begun += 1
        if self._begun % self._every == 0 and len(self.killed) < self._most:
            self.killed.append(self._random.choice(self._where.workers)["pid"])
            threading.Timer(self._random.uniform(0.0, 0.2), os.kill, (self.killed[-1], signal.SIGKILL)).start()


def train(
    learner: Any, pipe: wb.Pipeline, start: Any, steps: int, every: int = 5, begun: Callable[[], None] = lambda: None
) -> tuple[list[dict[str, float]], int]:
    """Steps from a snapshot; metrics of each, and how often it went back to one. Rows are a function of the step."""
    data = rows()[:32]
    kept, at, step, back = start, 0, 1, 0
    found: dict[int, dict[str, float]] = {}
    restore = True
    while step <= steps:
        try:
            if restore:
                learner.restore(kept)
                restore, step = False, at + 1
            begun()
            found[step] = dict(run_step(pipe, data.batch(2, step=step, seed=3)).metrics)
            if step % every == 0:
                kept, at = learner.snapshot(), step
            step += 1
        except WorkerLost:
            restore, back = True, back + 1
    return [found[number] for number in range(1, steps + 1)], back


def numbers(metrics: list[dict[str, float]]) -> list[dict[str, float]]:
    """Without times."""
    return [{name: value for name, value in row.items() if not name.startswith("timing")} for row in metrics]


def footprint() -> dict[str, set[Any]]:
    """What this process has beside itself: children, ports that it listens on, shared memory and scratch by our names."""
    gc.collect()
    me = psutil.Process()
    temporary = Path(os.environ.get("TMPDIR", "/tmp"))
    return {
        "processes": {one.pid for one in me.children(recursive=True) if one.status() != psutil.STATUS_ZOMBIE},
        "ports": {one.laddr.port for one in me.net_connections("inet") if one.status == psutil.CONN_LISTEN},
        "shared memory": {one.name for one in Path("/dev/shm").iterdir() if str(os.getpid()) in one.name},
        "scratch": {one.name for one in temporary.glob("workbench-[!c]*") if one.stat().st_uid == os.getuid()},
    }
