"""A run on ranks that may be killed at any time: steps, snapshots, and steps again from the last one."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

import workbench as wb
from workbench.cluster import Cluster
from workbench.engines.fsdp import fsdp
from workbench.engines.fsdp_group import Group
from workbench.engines.fsdp_worker import shards
from workbench.errors import WorkerLost
from workbench.loop import run_step

MODEL = "data/tiny-arith"


def group(cluster: Cluster, ranks: int) -> Group:
    return Group(lambda: cluster.ranks(shards, ranks, name=f"fsdp{ranks}", cpus=0.5, host="auto", threads=1))


def rows() -> Any:
    return wb.datasets.load("data/arith/train.parquet", max_prompt_length=256)


def grpo(where: Group, scratch: Path, **settings: Any) -> tuple[Any, wb.Pipeline]:
    """A learner on the ranks, and GRPO with it and a sampler in this process."""
    learner = fsdp(MODEL, on=where, device="cpu", lr=1e-3, scratch=scratch, **settings)
    both = wb.engines.paired(learner, wb.engines.local(MODEL, device="cpu"))
    return learner, wb.recipes.grpo(both, group_size=2, max_tokens=6, kl_coef=0.001)


class Killer:
    """Kills a rank of a group every so many seconds, drawn at random, from a thread."""

    def __init__(self, where: Group, seconds: tuple[float, float], most: int, seed: int = 7) -> None:
        self._where, self._seconds, self._most = where, seconds, most
        self._random = random.Random(seed)
        self._done = threading.Event()
        self.killed: list[int] = []
        self._thread = threading.Thread(target=self._work, daemon=True)

    def _work(self) -> None:
        while len(self.killed) < self._most and not self._done.wait(self._random.uniform(*self._seconds)):
            if self._where.alive and self._where.workers:
                pid = self._random.choice(self._where.workers)["pid"]
                if psutil.pid_exists(pid):
                    os.kill(pid, signal.SIGKILL)
                    self.killed.append(pid)

    def __enter__(self) -> Killer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()


def train(
    learner: Any, pipe: wb.Pipeline, start: Any, steps: int, every: int = 5
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


def within(seconds: float, holds: Callable[[], bool]) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end and not holds():
        time.sleep(0.1)
    return holds()
