"""A training on ranks that are killed at random."""

from __future__ import annotations

import functools
import gc
import os
import random
import signal
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

import workbench as wb
from workbench.cluster import Cluster
from workbench.engines.fsdp_engine.engine import fsdp
from workbench.engines.fsdp_engine.group import Group
from workbench.engines.fsdp_engine.worker import shards

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
    """An observer that kills a rank of a group at a random moment within every so manieth step, from a thread."""

    def __init__(self, where: Group, every: int, most: int, seed: int = 7) -> None:
        self._where, self._every, self._most = where, every, most
        self._random = random.Random(seed)
        self.killed: list[int] = []

    def on_start(self, start: int, steps: int) -> None:
        self._last = steps

    def on_step(self, report: Any) -> None:
        if report.step % self._every == 0 and len(self.killed) < self._most and report.step < self._last:
            self.killed.append(self._random.choice(self._where.workers)["pid"])
            threading.Timer(self._random.uniform(0.0, 0.2), os.kill, (self.killed[-1], signal.SIGKILL)).start()

    def on_end(self, error: BaseException | None) -> None: ...


def train(pipe: wb.Pipeline, run: Path, steps: int, *observers: Any) -> wb.Run:
    """A training that may lose its workers as often as it likes."""
    often: dict[str, Any] = {"save_freq": 5, "trace_freq": 0, "max_recoveries": 10_000, "trackers": ()}
    return wb.train_blocking(
        pipe, rows()[:32], steps=steps, batch_size=2, run=run, seed=3, observers=observers, **often
    )


def numbers(metrics: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    """Without times."""
    return [{name: value for name, value in row.items() if not name.startswith(("timing", "perf"))} for row in metrics]


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
