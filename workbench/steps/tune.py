"""Before training, on one machine: what each phase takes in seconds and memory, and which settings take less.

Two steps are run and taken back, then the phases that a learner works in once more under each other setting. Nothing of it stays:
weights, optimizer, version, controllers and random generators are afterwards what they were, bit for bit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from traceback import clear_frames
from typing import Any

import torch

from workbench.base import memory
from workbench.base.config import require
from workbench.base.errors import OutOfMemory, first_line
from workbench.base.memory import gib
from workbench.base.progress import working
from workbench.base.shown import Shown
from workbench.datasets.rows import Rows
from workbench.engines.local_engine.products import product
from workbench.engines.local_engine.scoring import in_order
from workbench.engines.protocol import Adjustable, Described, Tunable
from workbench.stages.pipeline import Pipeline
from workbench.steps.stepper import Stepper

FASTER, SLOWER, LESS = 0.9, 1.05, 0.9
"""A setting is proposed for at least 10 % less time, or at least 10 % less memory at no more than 5 % more time;
smaller changes are noise."""
FAST = 1.5
"""bfloat16 is tried where the CPU multiplies bfloat16 matrices at least this many times as fast as float32 ones, and float32 in
place of bfloat16 where it multiplies those so much faster."""
REPEATS, SHORT = 3, 2.0
"""Number of times that a setting is measured (the fastest counts), for phases that take fewer than so many seconds."""
RESERVE = 0.1
"""Share of a GPU's memory that is left for the runtime, graphs and fragments."""


@dataclass(frozen=True)
class Measured:
    """Seconds and peak memory of one phase."""

    phase: str
    seconds: float
    host: int
    """Bytes in memory of this process and the learners' workers at its peak, kept states of the stepper left out; 0: unknown."""
    device: int
    """Bytes of tensors on the fullest GPU at its peak; 0 without one."""


@dataclass(frozen=True)
class Trial:
    """Seconds and peak memory of one learner's phases under some settings."""

    role: str
    changes: Mapping[str, Any]
    """Setting → value; empty: the present settings."""
    seconds: float
    host: int
    device: int
    error: str = ""
    """The error that ended the trial (out of memory); else empty."""
    cost: str = ""
    """How far the trial changes the numbers, beyond float32's rounding; else empty."""

    @property
    def peak(self) -> int:
        """The peak memory in bytes that counts: on a GPU the device's, else the host's."""
        return self.device or self.host

    def __str__(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.changes.items()) or "as it is"


@dataclass(frozen=True, repr=False)
class Tuning(Shown):
    """Result of `tune`: `phases` measured as they are, `trials` with other settings, and `lines` to paste into the
    engine's call."""

    phases: tuple[Measured, ...]
    trials: tuple[Trial, ...]
    lines: tuple[str, ...]
    """Lines of Python: keyword arguments, each with a comment, and comment lines."""
    proposed: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Role → settings that take less time or memory; {} where none does."""


@working("tune")
def tune(pipeline: Pipeline, rows: Rows, *, batch_size: int = 8, seconds: float = 120.0) -> Tuning:
    """Run two steps of `batch_size` prompts, measure each phase, try other settings, and propose those that take less.

    `print(wb.tune(pipe, rows))` shows the table and the lines to paste. The settings `micro_batch_tokens`, `pack`,
    `gradient_checkpointing` and, on a GPU, `offload` are tried one at a time; on a CPU that multiplies the other of bfloat16 and
    float32 `FAST` times as fast also `dtype`, whose line is a comment that says how far log-probs move. For a sampler on the
    same GPU its share of memory is computed. After `seconds` no further setting is tried. All changes are undone, also
    where something raises. Raises `OutOfMemory` where memory runs out in a phase in which no learner works.
    """
    require(batch_size >= 1, "batch_size", expected="≥ 1 prompt", found=batch_size)
    every = pipeline.learners()
    learners = {role: one for role, one in every.items() if isinstance(one, Tunable)}
    deadline, trials, limits = time.monotonic() + seconds, list[Trial](), list[str]()
    first = Stepper(pipeline, rows.batch(batch_size))
    for role, learner in every.items():
        first.snapshots.take(learner, role)
    with _undone_after(first):
        _run(first, learners)  # it warms up
        first.back(to=pipeline.names[0])
        second = Stepper(pipeline, rows.batch(batch_size, step=2))
        phases, failure = _run(second, learners)
        for role, learner in learners.items():
            if failure is None or failure[0] in _phases_of(pipeline, learner):
                tried = _trials(second, role, learner, deadline)
                trials += tried
                limits += [_limit(second, learner, tried[0])] if "attention_mask" in second.batch else []
        if failure is not None and not trials:
            raise failure[1]
    return _result(phases, trials, learners, [*filter(None, limits)])


# --- measuring ------------------------------------------------------------------------------------


@contextmanager
def _undone_after(stepper: Stepper) -> Iterator[None]:
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            stepper.back(to=stepper.pipeline.names[0])


def _run(
    stepper: Stepper, learners: Mapping[str, Tunable], last: str | None = None
) -> tuple[list[Measured], tuple[str, OutOfMemory] | None]:
    """Run and measure the remaining phases, up to `last`; returns the measurements and, where memory ran out, (phase,
    error)."""
    measures: list[Measured] = []
    every = list({id(learner): learner for learner in learners.values()}.values())
    while (name := stepper.next_stage) is not None and (not measures or measures[-1].phase != last):
        memory.peak(begin=True)
        for learner in every:
            learner.peaks(begin=True)
        try:
            stepper.next()
        except OutOfMemory as error:
            for each in filter(None, (error, error.__cause__, error.__context__)):
                clear_frames(each.__traceback__)  # what they hold would be missing in the next trial
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()
            return measures, (name, error)
        peaks = [learner.peaks() for learner in every]
        own = memory.peak()
        host = max(own + sum(learner["host"] for learner in peaks) - stepper.snapshots.nbytes, 0) if own else 0
        device = max((learner["device"] for learner in peaks), default=0)
        measures.append(Measured(name, stepper.trace[name].seconds, host, device))
    return measures, None


def _phases_of(pipeline: Pipeline, learner: Any) -> list[str]:
    """List the phases in which a learner scores or learns; sampling is left out, because it has other settings."""
    return [
        stage.name
        for stage in pipeline
        if any(one is learner for one in stage.learners()) and "responses" not in stage.writes
    ]


def _references(pipeline: Pipeline) -> list[Adjustable]:
    """List the pipeline's frozen models, which have the settings of the engine that they were made from."""
    held = [one for stage in pipeline for one in getattr(stage, "made_with", {}).values()]
    return [one for one in held if isinstance(one, Adjustable) and not isinstance(one, Tunable)]


def _trials(stepper: Stepper, role: str, learner: Any, deadline: float) -> list[Trial]:
    """Measure a learner's phases with its present settings, then with each other candidate until the deadline."""
    every = ({}, *_candidates(learner, stepper))
    return [_try(stepper, role, learner, one) for one in every if time.monotonic() < deadline or not one]


def _try(stepper: Stepper, role: str, learner: Any, changes: Mapping[str, Any]) -> Trial:
    names, cost = _phases_of(stepper.pipeline, learner), ""
    reached = [name for name in names if name in stepper.trace.names]
    times, host, device = list[float](), 0, 0
    with ExitStack() as stack:
        for measure in (learner, *(_references(stepper.pipeline) if role == "actor" else ())):
            stack.enter_context(measure.trying(**changes))
        while len(times) < (REPEATS if sum(times) < SHORT else 1):
            fork = stepper.fork()
            fork._done.clear()  # it is the time that counts, not the columns
            if reached:
                fork.back(to=reached[0])
            found, failure = _run(fork, {role: learner}, names[-1])
            kept = [measure for measure in found if measure.phase in names]
            host = max([host, *(measure.host for measure in kept)])
            device = max([device, *(measure.device for measure in kept)])
            took = sum(measure.seconds for measure in kept)
            if failure is not None:
                return Trial(role, changes, took, host, device, first_line(failure[1], 300))
            times.append(took)
        halved = _log_probs(learner, stepper.batch) if "dtype" in changes else None
    if halved is not None:
        apart = (halved - _log_probs(learner, stepper.batch))[stepper.batch["response_mask"].bool()].abs()
        cost = f"log-probs {float(apart.mean()):.2g} nats apart on average, {float(apart.max()):.2g} at most"
    return Trial(role, changes, min(times), host, device, cost=cost)


def _log_probs(learner: Any, batch: Any) -> torch.Tensor:
    log_probs: torch.Tensor = learner.compute_log_probs(batch)["log_probs"]
    return log_probs


def product_rate(kind: torch.dtype, size: int = 512) -> float:
    """Measure how many floating-point operations a second this CPU takes in products of matrices [size, size] of a type."""
    matrix, times = torch.ones(size, size, dtype=kind), list[float]()
    for _ in range(5):
        began = time.perf_counter()
        product(matrix, matrix)
        times.append(time.perf_counter() - began)
    return 2 * size**3 / min(times)


def half_gain(size: int = 512) -> float:
    """Measure how many times as fast as in float32 this CPU multiplies matrices [size, size] in bfloat16."""
    return product_rate(torch.bfloat16, size) / product_rate(torch.float32, size)


def _limit(stepper: Stepper, learner: Any, base: Trial) -> str:
    """Describe what the matrix products of a learner's phases alone take on this CPU; empty for adapters, experts and a GPU.

    A token that rows share counts once, 2 operations a weight where it is scored and 6 where it is learned (Kaplan et al. 2020).
    """
    now, batch = learner.describe(), stepper.batch
    layout = [entry.shape for entry in learner.weight_layout().values()] if hasattr(learner, "weight_layout") else []
    matrices = [math.prod(shape) for shape in layout if len(shape) == 2][1:]  # the first is looked up, not multiplied
    if base.device or base.error or now.get("lora_rank") or not matrices or max(map(len, layout)) > 2:
        return ""
    rows = in_order(batch["input_ids"], batch["position_ids"], batch["attention_mask"])
    tokens = int((rows.lengths - rows.shared).sum())
    each = sum(6 if name.startswith("update") else 2 for name in _phases_of(stepper.pipeline, learner))
    rate = product_rate(torch.bfloat16 if now["dtype"] == "bfloat16" else torch.float32)
    work = each * tokens * sum(matrices)
    return (
        f"# {base.role}: {base.seconds:.2f} s; the products of its {tokens:,} distinct tokens alone take about "
        f"{work / rate:.2f} s ({work / 1e9:,.1f} GFLOP at {rate / 1e9:.0f} GFLOP/s)"
    )


def _candidates(learner: Any, stepper: Stepper) -> list[dict[str, Any]]:
    """List other settings that would change something on this batch."""
    now = learner.describe()
    gpu = learner.peaks()["total"] > 0
    budget = now["micro_batch_tokens"] or (16_384 if gpu else 4_096)
    batch = stepper.batch
    if "attention_mask" not in batch:
        return []
    lengths = batch["attention_mask"].sum(-1)
    longest, every = int(lengths.max()), int(batch["attention_mask"].numel())
    taken = min(budget, every)  # more than the batch has changes nothing
    budgets = {max(min(int(taken * by), every), longest) for by in (0.125, 0.25, 0.5, 2, 4)} - {taken}
    candidates: list[dict[str, Any]] = [{"micro_batch_tokens": one} for one in sorted(budgets, reverse=True)]
    candidates.append({"gradient_checkpointing": not now["gradient_checkpointing"]})
    if now["pack"] != "no":
        candidates.append({"pack": "no"})
    if gpu and now["offload"] == "none":
        candidates.append({"offload": "optimizer"})
    if "dtype" in getattr(learner, "tried", ()) and not gpu:
        gain, other = (1 / half_gain(), "float32") if now["dtype"] == "bfloat16" else (half_gain(), "bfloat16")
        candidates += [{"dtype": other}] if gain >= FAST else []
    return candidates


# --- what to paste --------------------------------------------------------------------------------


def _result(phases: list[Measured], trials: list[Trial], learners: Mapping[str, Any], limits: Sequence[str]) -> Tuning:
    lines = list(limits)
    proposed: dict[str, Mapping[str, Any]] = {}
    for role in dict.fromkeys(one.role for one in trials):
        proposed[role] = _best([one for one in trials if one.role == role and not one.cost])
        lines += _lines(role, learners[role], proposed[role], trials)
    lines += _cache_share(learners.get("actor"), phases)
    return Tuning(tuple(phases), tuple(trials), tuple(lines), proposed)


def _best(trials: list[Trial]) -> dict[str, Any]:
    """Choose for each setting the value that takes less time or memory; settings for which none does are left out."""
    if not trials:
        return {}
    base, *others = trials
    changes: dict[str, Any] = {}
    for name in dict.fromkeys(name for trial in others for name in trial.changes):
        ran = [trial for trial in others if name in trial.changes and not trial.error]
        if base.error and changes:
            break  # one that lets it run is enough
        good = [trial for trial in ran if base.error or _saves(base, trial)]
        if good:
            changes |= min(good, key=lambda trial: (trial.seconds > FASTER * base.seconds, trial.seconds)).changes
    return changes


def _saves(base: Trial, trial: Trial) -> bool:
    lean = base.peak and trial.peak <= LESS * base.peak
    return trial.seconds <= FASTER * base.seconds or bool(lean and trial.seconds <= SLOWER * base.seconds)


def _lines(role: str, learner: Any, proposed: Mapping[str, Any], trials: list[Trial]) -> list[str]:
    base, *others = [trial for trial in trials if trial.role == role]
    path = learner.describe().get("path", "")
    what = f"# {role}, {path}: " + (base.error or f"{base.seconds:.2f} s, peak {gib(base.peak)} as it is")
    lines = [what]
    for trial in others:
        outcome = (
            trial.error or f"{base.seconds:.2f} → {trial.seconds:.2f} s, peak {gib(base.peak)} → {gib(trial.peak)}"
        )
        if trial.cost:
            if _saves(base, trial):
                lines.append(f"# {trial} would take less: {outcome}; {trial.cost}")
        elif proposed.items() >= trial.changes.items():
            lines.append(f"{trial},  # {outcome}")
        elif not trial.error and base.peak and trial.peak <= LESS * base.peak:
            lines.append(f"# {trial} would take less memory: {outcome}")
    return lines if len(lines) > 1 else [f"{what}; no setting that was tried takes less"]


def _cache_share(actor: Any, phases: list[Measured]) -> list[str]:
    """Propose vLLM's share of a GPU that it uses together with the learner: what the learner holds during sampling
    stays free."""
    record = actor.describe() if isinstance(actor, Described) else {}
    sampler = record.get("sampler") if isinstance(record, Mapping) else None
    total = actor.peaks()["total"] if isinstance(actor, Tunable) else 0
    rollout = next((one for one in phases if one.phase == "rollout"), None)
    if not (total and rollout and isinstance(sampler, Mapping) and "gpu_memory_utilization" in sampler):
        return []
    share = int((1 - RESERVE - rollout.device / total) * 20) / 20
    text = f"of {gib(total)} the learner holds {gib(rollout.device)} while rows are sampled"
    return [f"sampler_settings={{'gpu_memory_utilization': {share}}},  # {text}"]
