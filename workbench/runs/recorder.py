"""Watches a loop and writes the run folder: metrics, trackers, validation, traces, checkpoints."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.ahead import Ahead
from workbench.datasets import Rows
from workbench.observer import StepReport
from workbench.runs import checkpoint, updates
from workbench.runs.evaluate import Evaluation, score_rows
from workbench.runs.folder import STEP, RunFolder, read_metrics, strict
from workbench.runs.keeping import Kept, keep, prune
from workbench.runs.metrics_of_batch import aliases, data_metrics, lag_metrics, timing_metrics
from workbench.runs.metrics_of_samples import sample_metrics
from workbench.runs.symptoms import Watch
from workbench.runs.trackers import Tracker
from workbench.snapshots import states
from workbench.stages import Pipeline, Reward, Rollout, validation_rollout
from workbench.trace import Trace

log = logging.getLogger("workbench")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """When what is written."""

    steps: int
    batch_size: int
    seed: int
    test_freq: int
    val_samples: int
    save_freq: int
    trace_freq: int
    keep_traces: int
    keep_checkpoints: int
    keep_updates: int = 1024
    """MiB."""
    ahead: int = 0
    """Steps that rows are drawn ahead."""

    def due(self, every: int, step: int) -> bool:
        """Every n-th step and the last; 0: the last alone."""
        return step == self.steps or (every > 0 and step % every == 0)

    def reason(self, every: int, step: int) -> str:
        """Why it is due, in words; empty where it is not."""
        if every > 0 and step % every == 0:
            return f"every {every} steps" if every > 1 else "every step"
        return "the last step" if step == self.steps else ""


class Validator:
    """Held-out rewards, sampled as in training and greedy; draws from no generator that training uses."""

    def __init__(self, pipeline: Pipeline, heldout: Rows, seed: int, samples: int = 1) -> None:
        rollout: Any = pipeline["rollout"]
        self._reward: Any = pipeline["reward"]
        self._heldout = heldout
        self._seed = seed
        self._sampled = validation_rollout(rollout, group_size=samples)
        self._greedy = validation_rollout(rollout, greedy=True)

    def _run(self, rollout: Rollout) -> Evaluation:
        reward: Reward = self._reward
        return score_rows(rollout, reward, self._heldout.in_order(256, self._seed))

    def metrics(self) -> dict[str, float]:
        """verl's `val-core` and `val-aux` (see `sample_metrics`), and `val/reward` with its interval, `val/greedy`, `accuracy`.

        `val/unscored` counts sampled and greedy rows without a judgement: they are in no mean.
        """
        began = time.perf_counter()
        sampled, greedy = self._run(self._sampled), self._run(self._greedy)
        return {
            **sample_metrics(sampled.batch),
            "val/reward": sampled.mean,
            "val/reward_low": sampled.interval[0],
            "val/reward_high": sampled.interval[1],
            "val/greedy": greedy.mean,
            "val/unscored": sampled.unscored + greedy.unscored,
            "accuracy": sampled.mean,
            "timing_s/testing": time.perf_counter() - began,
        }


class Recorder:
    """The observer that keeps the run folder true: a row a step, then traces and checkpoints as planned."""

    def __init__(
        self,
        folder: RunFolder,
        pipeline: Pipeline,
        rows: Rows,
        plan: Plan,
        *,
        validator: Validator | None,
        trackers: list[Tracker],
        settings_hash: str,
        on_row: Callable[[Mapping[str, Any]], None],
        ahead: Ahead | None = None,
    ) -> None:
        self._folder = folder
        self._pipeline = pipeline
        self._rows = rows
        self._plan = plan
        self._validator = validator
        self._trackers = trackers
        self._hash = settings_hash
        self._on_row = on_row
        self._ahead = ahead
        self.last: StepReport | None = None
        """The last step of this process whose row is on disk."""
        self._state: dict[str, Any] = {}
        self._before: Mapping[str, Mapping[str, float]] = {}
        self._sizes: dict[int, int] = {}
        self._watch = Watch(read_metrics(folder.metrics), looks=1)
        self._weights = states(pipeline.learners())

    def on_start(self, start: int, steps: int) -> None:
        """Before the first step of a run: how good is the policy as it is?"""
        self._state = self._stands(start - 1)
        if start == 1 and self._validator is not None:
            self._write(0, {STEP: 0, "training/epoch": 0, **self._validator.metrics()})

    def on_step(self, report: StepReport) -> None:
        """Metrics first, then the update, the trace, the checkpoint: what is on disk is never ahead of its row.

        A trace is kept every k-th step, of the last one, and of a step in which a symptom begins.
        """
        step, plan = report.step, self._plan
        metrics: dict[str, Any] = {STEP: step, "training/epoch": report.epoch, **report.metrics}
        metrics |= data_metrics(report.trace.batch)
        metrics = lag_metrics(report.trace.batch, self._state["versions"].get("actor")) | metrics
        metrics |= timing_metrics(report.metrics, report.trace.batch)
        metrics |= aliases(metrics)
        if self._validator is not None and plan.due(plan.test_freq, step):
            if self._ahead is not None:
                self._ahead.pending(step)  # a draw under way asks the same reward
            metrics |= self._validator.metrics()
        self._write(step, metrics)
        begun = [one.name for one in self._watch.look(strict(metrics))]
        self._before = self._state.get("controllers", {})
        self.last, self._state, self._weights = report, self._stands(step), states(self._pipeline.learners())
        if plan.keep_updates:
            updates.write(self._folder.updates, step, report.trace, self._pipeline)
            updates.prune(self._folder.updates, self._oldest(), plan.keep_updates << 20, self._sizes)
        due = plan.reason(plan.trace_freq, step)
        if begun:
            log.warning("step %d: %s; its trace is kept", step, ", ".join(begun))
        if due or begun:
            self.save_trace(due, begun)
        if plan.due(plan.save_freq, step):
            self.save()

    def _oldest(self) -> int:
        return min(checkpoint.steps(self._folder.checkpoints), default=0)

    def save_trace(self, due: str = "the run ended here", flagged: Sequence[str] = ()) -> None:
        """The trace of the last step, where it is not on disk yet, with the reason for it."""
        if self.last is None or self._folder.trace_path(self.last.step).exists():
            return
        kept = Kept(due=due, flagged=tuple(flagged), before=self._before, after=self._state["controllers"])
        keep(self.last.trace, self._folder.trace_path(self.last.step), kept)
        prune(self._folder.traces, self._plan.keep_traces)

    def save_stopped(self, trace: Trace, step: int) -> None:
        """The trace of a step that `break_if` ended before its update."""
        target = self._folder.trace_path(step)
        if not target.exists():
            states_ = {"before": self._state["controllers"], "after": self._pipeline.state()}
            keep(trace, target, Kept(due="break_if was met", **states_))

    def on_end(self, error: BaseException | None) -> None:
        """Let trackers write what is waiting."""
        for tracker in self._trackers:
            tracker.close()

    def _write(self, step: int, metrics: dict[str, Any]) -> None:
        lost = self._folder.append_metrics(metrics)
        if lost:
            log.warning("step %d: %s is NaN or infinite, written as null", step, ", ".join(lost))
        for tracker in self._trackers:
            tracker.log(metrics, step)
        self._on_row(metrics)

    def _stands(self, step: int) -> dict[str, Any]:
        """Everything but the weights that the next step depends on, as it is now."""
        return {
            "step": step,
            "cursor": self._rows.cursor(step, self._plan.batch_size, self._plan.seed).to_json(),
            "controllers": self._pipeline.state(),
            "versions": {role: learner.version for role, learner in self._pipeline.learners().items()},
            "settings_hash": self._hash,
            "rng": checkpoint.rng_state(),
        }

    def save(self) -> int | None:
        """A checkpoint of the last step on disk, unless there is one; its step.

        None where a later step has begun to change the weights: what they were has gone, and the next resume does
        that step again from the checkpoint before.
        """
        learners = self._pipeline.learners()
        if not self._state or states(learners) != self._weights:
            return None
        step = int(self._state["step"])
        if step in checkpoint.steps(self._folder.checkpoints):
            return step
        pending = self._ahead.pending(step) if self._ahead is not None else None

        def fill(staging: Path) -> None:
            if pending is not None:
                pending.save(staging / checkpoint.PENDING)
            for role, learner in learners.items():
                learner.save(staging / role)
                learner.save_state(staging / f"{role}_state")

        keep = self._plan.keep_checkpoints
        checkpoint.write(self._folder.checkpoints, step, fill, self._state, keep=keep)
        return step


KL = ("actor/kl_loss", "actor/reward_kl_penalty", "actor/ppo_kl")
"""The first of these that a run measures stands for KL in a progress line."""


def progress_line(row: Mapping[str, Any], steps: int, eta: float) -> str:
    """`step 12/60  reward 0.531  kl 0.00210  1.3 s  eta 01:02`."""
    step = row[STEP]
    parts = [f"step {step}/{steps}"]
    if row.get("critic/score/mean") is not None:
        parts.append(f"reward {row['critic/score/mean']:.3f}")
    kl = next((row[key] for key in KL if row.get(key) is not None), None)
    if kl is not None:
        parts.append(f"kl {kl:.5f}")
    if "timing_s/step" in row:
        parts.append(f"{row['timing_s/step']:.1f} s")
        parts.append(f"eta {int(eta) // 60:02d}:{int(eta) % 60:02d}")
    if row.get("val/reward") is not None and row.get("val/greedy") is not None:
        parts.append(f"held-out {row['val/reward']:.3f} (greedy {row['val/greedy']:.3f})")
    return "  ".join(parts)


def append_line(line: str) -> None:
    """To the file that our runner reads while the cell runs, where it named one."""
    path = os.environ.get("WORKBENCH_PROGRESS")
    if path:
        with open(path, "a") as file:
            file.write(line + "\n")
