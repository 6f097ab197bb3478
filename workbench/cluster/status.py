"""Looks at a cluster at work: its nodes, pools, workers, calls without an answer yet, logs, and torch's profiles of a
group."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from workbench.base.errors import EngineError, SettingError, WorkbenchError
from workbench.base.shown import Shown
from workbench.cluster.holding import Session
from workbench.cluster.pools import Node, nodes
from workbench.cluster.ranks import RayRanks
from workbench.cluster.transport import out, quietly
from workbench.engines.paired import Paired

ANSWER_SECONDS = 1.0
"""Seconds that a status waits for the answers of all workers together."""
MUTE = "does not answer"
UNPROVEN = (
    "float16, int8 and nf4 in a GPU's kernels",
    "flash_attention_2",
    "responses of more than 2,048 tokens",
    "vLLM with a generator for each row",
    "learner and vLLM that share a GPU for ten cycles",
    "NCCL between two GPUs",
    "CUDA graphs and compiled decoding, which are not built",
)
"""What no GPU has run yet; the guide on one GPU names the check that shows each."""


def unproven() -> str:
    """Return a sentence that lists what no GPU has run yet, and names the script that tries it."""
    check = "tests/benchmarks/gpu_first_day.py tries most of it in ten minutes"
    return f"no GPU has run yet: {', '.join(UNPROVEN)}; {check}"


@dataclass(frozen=True)
class WorkerLine:
    """One row of a `ClusterStatus`: what a worker is doing, and the memory that it uses."""

    group: str
    rank: int
    pid: int
    host: str
    pool: str
    gpus: str
    """Numbers of the worker's GPUs."""
    resident: int | None
    """Resident bytes of the worker's process; None where the worker does not answer."""
    state: str
    """`idle`, the method that runs, or `does not answer`."""
    waiting: int
    """Number of calls that wait behind the one that runs."""
    gpu: tuple[int, int] | None = None
    """(used, total) bytes of its GPUs, whichever process uses them; None without a GPU."""
    seconds: float | None = None
    """Seconds in this state, by the worker's clock; None where the worker does not answer."""


@dataclass(frozen=True)
class CallLine:
    """One row of a `ClusterStatus`: a call of a group's method that is not answered yet."""

    group: str
    method: str
    stage: str
    """The stage that made the call."""
    seconds: float
    """Seconds since the call was sent."""


@dataclass(frozen=True, repr=False)
class ClusterStatus(Shown):
    """Nodes, pools, workers and calls of a cluster at one moment. Made by `Cluster.status`."""

    title: str
    nodes: tuple[Node, ...]
    pools: tuple[tuple[str, int, str], ...]
    """(name, processes, hosts)."""
    workers: tuple[WorkerLine, ...]
    notes: tuple[str, ...] = ()
    calls: tuple[CallLine, ...] = ()
    at: float = 0.0
    """Seconds since the epoch."""
    again: Callable[[], ClusterStatus] | None = field(default=None, repr=False, compare=False)
    """Makes a new `ClusterStatus`; raises `EngineError` when the cluster is closed."""


def look(cluster: Session, unanswered: dict[Any, Any], again: Callable[[], ClusterStatus]) -> ClusterStatus:
    """Make a `ClusterStatus` of the cluster by asking every worker. `unanswered` keeps requests without an answer for the next
    look.
    """
    answers, machines = _answers(cluster, unanswered), nodes()
    hosts = {node.id: node.host for node in machines}
    pools, workers, calls = [], [], []
    for pool in list(cluster.pools.values()):
        seats = dict.fromkeys(hosts.get(seat.node, "a lost node") for seat in pool.plan.of(pool.name))
        pools.append((pool.name, pool.size, ", ".join(seats)))
    for group in list(cluster.groups):
        out_now = group.calls
        calls += [CallLine(group.name, call.method, call.stage, call.seconds) for call in out_now]
        where = group.pool.name if group.pool is not None else ""
        for rank, (actor, fact) in enumerate(zip(group.actors, group.facts, strict=False)):
            who = (group.name, rank, fact["pid"], fact["host"], where, fact["gpus"])
            answer = answers.get(actor)
            if answer is None:
                workers.append(WorkerLine(*who, None, MUTE, len(out_now)))
                continue
            behind = max(len(out_now) - 1, 0) if answer["doing"] else 0
            state = answer["doing"] or "idle"
            workers.append(WorkerLine(*who, answer["resident"], state, behind, answer["gpu"], answer["seconds"]))
    untried = [unproven()] if any(node.gpus for node in machines) else []
    tables = tuple(machines), tuple(pools), tuple(workers), (*cluster.notes, *_pushes(cluster), *untried), tuple(calls)
    return ClusterStatus(cluster.title, *tables, time.time(), again)


def _pushes(cluster: Session) -> list[str]:
    """Return a line for each engine whose weights were pushed: how, how many bytes and seconds."""
    placed = {id(pool.placed[1]): pool.placed[1] for pool in cluster.pools.values() if pool.placed is not None}
    pairs = [one for one in placed.values() if isinstance(one, Paired) and one.last_push is not None]
    return [f"weights of {one.path}, version {one.version}: {one.last_push}" for one in pairs]


def _answers(cluster: Session, pending: dict[Any, Any]) -> dict[Any, Mapping[str, Any] | None]:
    """Ask all actors and return actor → its answer, or None. An actor that has not answered yet is not asked again, so that
    no requests pile up.
    """
    # none that still starts
    actors = [actor for group in list(cluster.groups) if group.facts for actor in group.actors]
    refs = {actor: pending.get(actor) or actor.now.remote() for actor in actors}
    late = [actors[place] for place in out(list(refs.values()), ANSWER_SECONDS)] if refs else []
    pending.clear()
    pending |= {actor: refs.pop(actor) for actor in late}
    return {actor: quietly(ref, ANSWER_SECONDS, None) for actor, ref in refs.items()}


class Logs(Shown, str):
    """The last lines of one or more workers: a text, and in a cell one fold for each worker."""

    parts: tuple[tuple[str, str], ...]
    """(`rank 1 (pid 4711 on host)`, its lines)."""

    @staticmethod
    def of(parts: Sequence[tuple[str, str]]) -> Logs:
        """Make `Logs` from (worker, its lines) pairs: a single worker's lines unchanged, those of several under the
        workers' names.
        """
        texts = [text for _, text in parts] if len(parts) == 1 else [f"--- {where}\n{text}" for where, text in parts]
        made = Logs("\n".join(texts))
        made.parts = tuple(parts)
        return made


log = logging.getLogger("workbench")


# --- profiles ---------------------------------------------------------------------------------------


class Profile(Shown):
    """Profiles a worker group with torch's profiler: a context manager, or with `steps` an observer of a job.

    Made by `Cluster.profile`. Each rank's trace goes to folder `path` on this machine, as gzipped json for Perfetto or
    chrome://tracing.
    """

    def __init__(self, group: Callable[[], RayRanks], path: str | Path, steps: Sequence[int] = ()) -> None:
        odd = [step for step in steps if step < 1]
        if odd:
            raise SettingError("steps to profile", expected="numbers from 1 on", found=odd)
        self.path = Path(path)
        self.steps = frozenset(steps)
        self.files: list[Path] = []
        """The trace files written so far, in order of rank."""
        self._find = group
        self._group: RayRanks | None = None
        self._suffix = ""

    def __enter__(self) -> Profile:
        self._start("")
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._end(quiet=kind is not None)

    def on_start(self, start: int, steps: int) -> None:
        """Observer hook before a job: record its first step, `start`, if chosen. Raises `SettingError` without `steps`."""
        if not self.steps:
            raise SettingError("a profile as an observer of a job", expected="steps=(…) to record", found="none")
        self._before(start)

    def on_step(self, report: Any) -> None:
        """Observer hook after a step (`runs.loop.StepReport`): write its traces, and record the next step if chosen."""
        self._end(quiet=True)
        self._before(report.step + 1)

    def on_end(self, error: BaseException | None) -> None:
        """Observer hook after the job, also after an error: write the traces of a step that is being recorded."""
        self._end(quiet=True)

    def _before(self, step: int) -> None:
        if step not in self.steps:
            return
        try:
            self._start(f"-step{step}")
        except (WorkbenchError, TimeoutError) as error:  # a job is worth more than its profile
            log.warning("step %d is not profiled: %s", step, error)

    def _start(self, suffix: str) -> None:
        if self._group is not None:
            raise EngineError("this profile is already recording", do="leave its `with` block first")
        group = self._find()
        group.profile(True).result()
        self._group, self._suffix = group, suffix

    def _end(self, quiet: bool) -> None:
        group, self._group = self._group, None
        if group is None:
            return
        try:
            traces = group.profile(False).result()
        except (WorkbenchError, TimeoutError) as error:
            if not quiet:
                raise
            log.warning("the profile is lost: %s", error)
            return
        self.path.mkdir(parents=True, exist_ok=True)
        name = re.sub(r"[^\w.-]", "_", group.name)
        for rank, data in enumerate(traces):
            stem, numbers = self.path / f"{name}-rank{rank}{self._suffix}", count(2)
            file = Path(f"{stem}.json.gz")
            while file.exists():  # an earlier trace stays
                file = Path(f"{stem}-{next(numbers)}.json.gz")
            file.write_bytes(data)
            self.files.append(file)
