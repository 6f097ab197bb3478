"""The training loop: take the next prompts, run the stages, let observers look at the trace; and the session of one call of
`train`, the observer that writes the run folder, from restoring random generators to the summary.

The stages run in order (rollout, reward, log-probs, values, advantage, updates). With `ahead` a step's rows were sampled
during the update of the step before, with `max_lag` while earlier steps went on (`runs.streaming`). Each step writes its metrics row first, then the trace, the update and the checkpoint
as planned: nothing on disk belongs to a step without a row.

Recovers a training from workers that were lost: a learner's rank or a sampler that died, was stopped, or is hung.

The state after the last whole step is made again, exactly: the newest good checkpoint, or how the session began, and the
recorded updates since. No rollout and no reward of a recorded step is run again, and nothing on disk is written twice. Then
what was going on is done again from its beginning. Each recovery is a line of recoveries.jsonl:

    {"time", "step", "stage", "rank", "exit", "error", "state", "seconds"}

After `max_recoveries` in one call of `train` the loss is raised, and the run can be resumed. What nothing brings back: this
process, a Ray cluster whose head is gone, and steps since the last checkpoint whose updates are not recorded (`keep_updates`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from workbench.base import runtime
from workbench.base.errors import EngineError, Interrupted, RunError, WorkerLost, first_line
from workbench.base.memory import trim
from workbench.base.metrics import reduce
from workbench.base.progress import working
from workbench.base.runtime import Control
from workbench.dataproto.core import DataProto
from workbench.datasets.rows import Rows
from workbench.engines.protocol import Losable
from workbench.runs import checkpoint, updates
from workbench.runs.batch_metrics import devices_of, lag_metrics, part_metrics, push_metrics, timing_metrics
from workbench.runs.conditions import Goal, Guard, Observer, StepReport
from workbench.runs.evaluate import keep_samples, validated
from workbench.runs.folder import (
    STEP,
    Kept,
    RunFolder,
    goes_on,
    keep_trace,
    prune_traces,
    read_metrics,
    read_settings,
    seconds_of,
    step_folder,
    step_folders,
    strict,
    write_json,
    written,
)
from workbench.runs.resume import Start, restore_rows
from workbench.runs.settings import TrainPlan, in_memory
from workbench.runs.streaming import Stream
from workbench.runs.symptoms import Watch
from workbench.runs.trackers import TRACKERS, append_line, progress_line, shown_samples, traces_of
from workbench.stages.log_prob import KL, LAG
from workbench.stages.measures import data_metrics
from workbench.stages.pipeline import Pipeline
from workbench.steps.execute import Ahead, loaded, phases
from workbench.steps.stepper import Stepper, states
from workbench.steps.trace import Trace

T = TypeVar("T")
PAUSE = 1.0
"""Seconds before the second recovery of the same work; each further pause is twice as long."""
LONGEST_PAUSE = 60.0


class Recovery:
    """Repeats work whose worker processes were lost, after restoring the state from before it, at most `most` times in
    a training.

    `start` is the step before the training's first one; `ahead` says that rows are sampled ahead.
    """

    def __init__(self, folder: RunFolder, pipeline: Pipeline, start: int, most: int, *, ahead: bool) -> None:
        self._folder, self._pipeline, self._start, self._most = folder, pipeline, start, most
        self.count = 0
        """Number of recoveries so far."""
        self.notes: list[str] = []
        """A sentence about each recovery."""
        self._controllers = pipeline.state()
        self._began: dict[str, Any] = {}
        """The learners' states at the start of the session, by role, to go back to while there is no checkpoint."""
        found = [one for one in pipeline.learners().values() if isinstance(one, Losable) and one.lost is not None]
        if most and not checkpoint.steps(folder.checkpoints) and (found or ahead):
            for role, learner in pipeline.learners().items():
                self._began[role] = learner.snapshot("memory")

    def attempt(self, step: int, work: Callable[[], T], restore: Callable[[], str]) -> T:
        """Call `work` and return its result. Where workers are lost in it, call `restore` (it returns in words what it
        restored) and call `work` again. Raises the loss where no recovery is left or restoring is impossible.
        """
        pause = 0.0
        while True:
            try:
                return work()
            except Exception as error:
                if not self._lost(error):
                    raise
                self._recover(step, error, restore, pause)
                pause = min(max(2 * pause, PAUSE), LONGEST_PAUSE)

    def _lost(self, error: BaseException) -> bool:
        """Return whether an error, its cause or its context says that workers were lost. A time-out counts where
        processes are gone.
        """
        errors = (error, error.__cause__, error.__context__)
        if isinstance(error, Interrupted):
            return False
        late = any(isinstance(one, TimeoutError) for one in errors)
        return any(isinstance(one, WorkerLost) for one in errors) or (late and self.gone())

    def gone(self) -> bool:
        """Return whether processes that held a learner's weights are gone."""
        return any(isinstance(one, Losable) and one.lost for one in self._pipeline.learners().values())

    def _recover(self, step: int, error: Exception, restore: Callable[[], str], pause: float) -> None:
        why = f"train(max_recoveries={self._most}) allows no further recovery"
        while self.count < self._most:
            self.count += 1
            self._wait(pause)
            began = time.monotonic()
            self._say(f"step {step}: {first_line(error, 400)}; recovering ({self.count} of at most {self._most})")
            try:
                state = restore()
            except RunError as again:
                why = first_line(again)
                break
            except Interrupted:
                raise
            except Exception as again:  # noqa: BLE001 - new workers died, found no room, or have no cluster: tried again
                why, pause = first_line(again), min(max(2 * pause, PAUSE), LONGEST_PAUSE)
                self._record(step, error, f"not restored: {why}", began)
            else:
                self._record(step, error, state, began)
                self.notes.append(f"step {step} was done again from {state}: {first_line(error)}")
                self._say(f"step {step}: recovered in {time.monotonic() - began:.0f} s, from {state}; it is done again")
                return
        error.add_note(f"not recovered after {self.count} of at most {self._most} recoveries: {why}")
        raise error

    @staticmethod
    def _wait(seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            runtime.check()
            time.sleep(0.05)

    @staticmethod
    def _say(text: str) -> None:
        log.warning(text)
        append_line(text)

    def _record(self, step: int, error: BaseException, state: str, began: float) -> None:
        trace, names = getattr(error, "trace", None), self._pipeline.names
        stage = names[len(trace)] if isinstance(trace, Trace) and len(trace) < len(names) else None
        lost = next((one for one in (error, error.__cause__, error.__context__) if isinstance(one, WorkerLost)), None)
        event = {
            "time": time.strftime("%Y-%m-%d %H:%M:%S"),
            "step": step,
            "stage": stage,
            "rank": None if lost is None else lost.rank,
            "exit": None if lost is None else lost.exit,
            "error": first_line(error, 1000),
            "state": state,
            "seconds": round(time.monotonic() - began, 2),
        }
        with (self._folder.path / "recoveries.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(event) + "\n")

    def bring_back(self, step: int, state: Mapping[str, Any], before_last: Callable[[], None] | None = None) -> str:
        """Restore the state after `step`: weights and optimizers, and from `state` the controllers and random
        generators.

        `before_last`, if given, is called when the state after `step - 1` is restored. Returns in words what was
        restored. Raises `RunError` where neither checkpoints nor recorded updates reach that step.
        """
        base, origin = self._restored(step, step - 1 if before_last is not None else step)
        for number in range(base + 1, step + 1):
            if number == step and before_last is not None:
                before_last()
            updates.apply(self._pipeline, (update := updates.read(self._folder.updates, number)))
            self._pipeline.load_state(update.controllers)
        self._pipeline.load_state(state["controllers"])
        checkpoint.restore_rng(state["rng"])
        return f"{origin} and {step - base} updates" if step > base else origin

    def _restored(self, step: int, most: int) -> tuple[int, str]:
        """Restore the newest state up to step `most` from which all updates up to `step` are recorded; returns its step
        and its name.
        """
        recorded, learners = updates.steps(self._folder.updates), self._pipeline.learners().items()
        needed = {number for number in range(self._start + 1, step + 1) if number not in recorded}
        there = checkpoint.latest(self._folder.checkpoints, most=most)
        if there.path is not None and there.step >= max(needed, default=self._start):
            for role, learner in learners:
                learner.load_state(there.path / role, there.path / f"{role}_state")
            self._pipeline.load_state(checkpoint.read_state(there.path)["controllers"])
            return there.step, f"checkpoint {there.step}"
        if self._began and not needed:
            for role, learner in learners:
                learner.restore(self._began[role])
            self._pipeline.load_state(self._controllers)
            return self._start, "the weights that the training began with"
        what = f"the state after step {step} cannot be computed again"
        found = f"checkpoint {there.step or None}, recorded updates {updates.ranges(recorded)}"
        raise RunError(what, found=found, do="set save_freq, or a larger keep_updates, and go on with resume='auto'")


log = logging.getLogger("workbench")


def run_step(pipeline: Pipeline, batch: DataProto | Trace) -> Trace:
    """Run one training step, every stage once and in order, and return its trace. An exception of a stage has the trace
    so far as `.trace`.
    """
    *_, trace = phases(pipeline, batch)
    return trace


@dataclass(frozen=True)
class Ending:
    """How a training loop ended: after its last step, or stopped by `break_if` before the update of a step."""

    step: int
    """The last step whose update is in the weights."""
    stopped: Stepper | None = None
    """A stepper before the update of the step that met `break_if`."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the stopped step, as they would have been recorded."""
    why: str = ""
    """Why the loop ended early for lack of progress; else empty."""


# --- one call of `train` --------------------------------------------------------------------------


class TrainingLoop:
    """Runs the training loop of one `train` call and writes its run folder; `display` shows it live, as
    `widgets.display.Live`.
    """

    def __init__(
        self,
        folder: RunFolder,
        pipeline: Pipeline,
        rows: Rows,
        plan: TrainPlan,
        settings: Mapping[str, Any],
        start: Start,
        *,
        begun: str,
        control: Control,
        display: Any,
        draw: Callable[[Path], None],
    ) -> None:
        self._folder, self._plan, self._start, self._settings = folder, plan, start, settings
        self._pipeline, self._rows, self._eval_rows, self._begun = pipeline, rows, plan.eval_rows, begun
        self._control, self._display, self._draw = control, display, draw
        self._began = time.perf_counter()
        past = read_metrics(folder.metrics)
        names = plan.project, plan.experiment or folder.path.name
        self._trackers = {f"tracker {name!r}": TRACKERS[name](folder.path, *names) for name in plan.trackers}
        self._left_out: dict[str, str] = {}
        """Tracker or display that has failed → a sentence about the failure."""
        for row in past:  # a resumed run's events are written again: the old files were moved aside
            for name, tracker in self._trackers.items():
                numbers = {key: value for key, value in row.items() if isinstance(value, int | float)}
                self._showing(name, tracker.log, numbers, row[STEP])
        self._samples: dict[str, list[Any]] = {}
        """The table of a validation's samples, until the metrics of its step are on disk."""
        self._ahead: Ahead | Stream | None = None
        if plan.max_lag:
            limits: dict[str, Any] = {"max_lag": plan.max_lag, "stale": plan.stale}
            limits |= {"done": start.step - 1, "last": plan.steps, "size": plan.batch_size}
            self._ahead = Stream(pipeline, self._batch, pending=start.pending, **limits)
        elif plan.ahead:
            pending = loaded(start.pending) if start.pending is not None else None
            self._ahead = Ahead(pipeline, self._batch, last=plan.steps, pending=pending)
        self._last: StepReport | None = None
        """The last step of this process whose row is on disk."""
        self._state: dict[str, Any] = {}
        self._before: Mapping[str, Mapping[str, float]] = {}
        self._sizes: dict[int, int] = {}
        self._watch = Watch(past, looks=1)
        self._weights = states(pipeline.learners())
        self._recovery = Recovery(folder, pipeline, start.step - 1, plan.max_recoveries, ahead=self._ahead is not None)
        self._measures: dict[str, Any] = {}
        """The metrics of the step that was done last."""
        self._past = past
        self._in_memory: list[str] = settings["began"].get("in_memory", [])
        """Names of models with weights that only the checkpoint of step 0 has."""
        goals = {"save_best": plan.save_best, "stop_when": plan.stop_when}
        self._goals = {name: Goal.of(text, name) for name, text in goals.items() if text is not None}

    async def run(self) -> Ending:
        """Restore the random generators, run the training loop and write the summary, which says why a run ended early.

        Raises `CancelledError`, whose message has the step and the checkpoint, where an interrupt stopped the loop.
        """
        if self._start.rng is not None:
            checkpoint.restore_rng(self._start.rng)
        watching = asyncio.create_task(self._display.watch()) if self._display is not None else None
        try:
            try:
                ending = await self._loop([self, *self._plan.observers])
            except BaseException as error:
                why = await runtime.beside(self._broke, error)
                if isinstance(error, asyncio.CancelledError):
                    raise asyncio.CancelledError(why) from None
                raise
            why = await runtime.beside(self._finish, ending, getattr(self._plan.break_if, "why", None))
        finally:
            if watching is not None:
                watching.cancel()
        if self._control.interrupted:
            raise asyncio.CancelledError(why)
        return ending

    async def _loop(self, observers: Sequence[Observer]) -> Ending:
        """Run the plan's steps, each in a thread so that the caller's event loop stays free; `control` pauses or stops
        between two steps.
        """
        plan, control, start = self._plan, self._control, self._start.step
        error: BaseException | None = None
        try:
            for observer in observers:
                await control.carry(observer.on_start, start, plan.steps)
            validates = self._eval_rows is not None
            guard = None if plan.break_if is None else Guard(plan.break_if, self._past, validates=validates)
            for step in range(start, plan.steps + 1):
                if why := self._no_progress():
                    return Ending(step - 1, why=why)
                if not await control.gate():
                    return Ending(step - 1)
                batch = self._batch(step)
                done = await control.carry(self._done_step, batch, guard)
                if isinstance(done, Ending):
                    return done
                for observer in observers:
                    await control.carry(observer.on_step, done)
                self._refuse_other_policy(done)
            return Ending(plan.steps)
        except BaseException as raised:
            error = raised
            raise
        finally:
            for observer in observers:
                observer.on_end(error)

    def _done_step(self, batch: DataProto, guard: Guard | None) -> StepReport | Ending:
        """Run one step and measure it; where workers were lost, restore and run it again. Returns the loop's ending
        where `break_if` stopped it.
        """
        step, epoch = batch.meta_info["step"], batch.meta_info["epoch"]

        def once() -> tuple[StepReport, Stepper | None]:
            sampled = Trace(batch) if self._ahead is None else self._ahead.take(batch)
            stepper = None if guard is None else Stepper(self._pipeline, sampled.start).from_trace(sampled)
            trace = run_step(self._pipeline, sampled) if stepper is None else _run(stepper)
            if self._ahead is not None and guard is None:
                self._ahead.learnt(step)
            report = StepReport(step=step, epoch=epoch, metrics=trace.metrics, trace=trace)
            self._measures = self._measured(report)
            return report, stepper

        report, stepper = self._recovery.attempt(step, once, self._bring_back)
        self._measures |= self._rows.learn(step, [_scored(report.trace), report.trace.batch])
        if guard is None or stepper is None:
            return report
        stops = True
        try:
            stops = guard(self._measures)
        finally:  # an error in the condition, too, leaves the state after the step before
            if stops:
                update = next(stage.name for stage in self._pipeline if stage.updates)
                self._recovery.attempt(step, lambda: stepper.back(to=update), self._bring_back)
                restore_rows(self._folder, self._pipeline, self._rows, step - 1, self._settings)
        if stops:
            return Ending(step - 1, stepper, self._measures)
        if self._ahead is not None:
            self._ahead.learnt(step)
        return report

    def _refuse_other_policy(self, report: StepReport) -> None:
        """Raise `EngineError` where rows that claim to be sampled by the present weights differ from them by more than
        `max_rollout_kl`.
        """
        limit, kl = self._plan.max_rollout_kl, report.metrics.get(KL, 0.0)
        if limit is None or not kl > limit or report.metrics.get(LAG, 0) > 0:
            return
        what = f"the sampler does not have the policy that learns: {KL} of step {report.step}"
        do = "open both from the same model and see that the sampler takes the weights that are pushed to it; "
        do += "a larger train(max_rollout_kl=…) allows this step, None every step"
        raise EngineError(what, expected=f"≤ {limit:g} nats per token", found=f"{kl:.3g}", do=do)

    def _bring_back(self) -> str:
        """Restore the state after the last step that has a metrics row, when workers were lost; returns in words what
        it was restored from.
        """
        step, learners, state = int(self._state["step"]), self._pipeline.learners(), self._state
        again = self._ahead.lost(step + 1) if self._ahead is not None else None
        if again is None and not self._recovery.gone() and states(learners) == self._weights:
            self._pipeline.load_state(state["controllers"])
            checkpoint.restore_rng(state["rng"])
            return "weights as they were"
        restored = self._recovery.bring_back(step, state, again)
        self._weights = states(learners)
        return restored

    def _batch(self, step: int) -> DataProto:
        """Return the prompts of a step. They depend only on the step, the seed and the batch size, so that a resumed
        run gets the same ones.
        """
        return self._rows.batch(self._plan.batch_size, step=step, seed=self._plan.seed)

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for the user: weights that were kept at the beginning, recoveries, and trackers or displays that
        have failed.
        """
        begun = (self._begun,) if self._in_memory and self._start.step == 1 else ()
        return (*begun, *self._recovery.notes, *self._left_out.values())

    def _showing(self, name: str, show: Callable[..., object], *args: Any) -> None:
        """Call `show`, a tracker or display of the run. Where it raises, log that once and skip it from then on: it
        does not end the run.
        """
        if name in self._left_out:
            return
        try:
            show(*args)
        except Exception as error:  # noqa: BLE001 - a library's, a closed terminal, a full disk
            self._left_out[name] = f"{name} failed and is left out from then on: {first_line(error)}"
            log.warning(self._left_out[name])

    # --- the loop's observer --------------------------------------------------------------------

    def on_start(self, start: int, steps: int) -> None:
        """Observer hook before step 1: save weights that no file has, and validate the untrained policy where there are
        held-out rows.
        """
        self._state = self._present_state(start - 1)
        if start > 1:
            return
        if self._in_memory:
            self._save()
            append_line(self._begun)
        if (rows := self._eval_rows) is not None and not any(row[STEP] == 0 for row in self._past):
            held_out = self._recovery.attempt(0, lambda: self._validated(rows), self._bring_back)
            self._write(0, {STEP: 0, "training/epoch": 0, **held_out})
            if self._best() == 0:
                self._save()

    def _best(self) -> int | None:
        """Return the step with the best validation so far where `save_best` is set, else None."""
        return self._goals["save_best"].progress(self._past)[0] if "save_best" in self._goals else None

    def _no_progress(self) -> str:
        """Return why the run ends for lack of progress (`stop_when`), or "" while it goes on."""
        if "stop_when" not in self._goals:
            return ""
        goal, plan = self._goals["stop_when"], self._plan
        best, value, since = goal.progress(self._past, plan.min_delta)
        if since < plan.patience:
            return ""
        way = "below" if goal.lower else "above"
        return f"{since} validations without {goal.metric} {way} {value:.4g}, that of step {best}: stopped"

    def on_step(self, report: StepReport) -> None:
        """Observer hook after a step: write its metrics, then its trace, recorded update and checkpoint where they are
        due.

        A trace is kept of every k-th step (`trace_freq`), of the last one, and of a step in which a symptom begins.
        """
        step, plan = report.step, self._plan
        metrics = self._measures
        self._write(step, metrics)
        self._rows.record()
        begun = [one.name for one in self._watch.look(strict(metrics))]
        self._before = self._state.get("controllers", {})
        self._last, self._state, self._weights = report, self._present_state(step), states(self._pipeline.learners())
        due = plan.due(plan.trace_freq, step)
        if begun:
            log.warning("step %d: %s; its trace is kept", step, ", ".join(begun))
        if due or begun:
            self._save_trace(due, begun)
        if plan.keep_updates:  # last: a run without a checkpoint goes on after it, and does not write the trace again
            updates.write(self._folder.updates, step, report.trace, self._pipeline, self._state["rng"])
            oldest, kept = min(checkpoint.steps(self._folder.checkpoints), default=0), step_folders(self._folder.traces)
            updates.prune(self._folder.updates, oldest, plan.keep_updates << 20, self._sizes, kept)
        if plan.due(plan.save_freq, step) or self._best() == step:
            self._recovery.attempt(step, self._save, self._bring_back)

    def on_end(self, error: BaseException | None) -> None:
        """Observer hook after the loop: close the trackers, which then write what they have buffered."""
        for name, tracker in self._trackers.items():
            self._showing(name, tracker.close)

    def _measured(self, report: StepReport) -> dict[str, Any]:
        """Compute all metrics of a step, including those of held-out rows where a validation is due."""
        batch = report.trace.batch
        metrics: dict[str, Any] = {STEP: report.step, "training/epoch": report.epoch, **report.metrics}
        metrics |= reduce([data_metrics(batch)]) | part_metrics(_scored(report.trace))
        metrics = lag_metrics(batch, self._state["versions"].get("actor")) | metrics
        engines = self._pipeline.learners().values()
        metrics |= timing_metrics(report.metrics, batch, devices_of(engines)) | push_metrics(engines)
        if self._eval_rows is not None and self._plan.due(self._plan.test_freq, report.step):
            # rows that are being sampled use the same reward
            with nullcontext() if self._ahead is None else self._ahead.settle(report.step):
                metrics |= self._validated(self._eval_rows)
        return metrics

    def _validated(self, eval_rows: Rows) -> dict[str, float]:
        metrics, self._samples = validated(self._pipeline, eval_rows, self._plan.seed, self._plan.val_samples)
        for goal in self._goals.values():
            goal.check(metrics)
        return metrics

    def _write(self, step: int, metrics: dict[str, Any]) -> None:
        """Write a metrics row to the run folder, the trackers, the log and the display; then the samples of its
        validation, if any.
        """
        if lost := self._folder.append_metrics(metrics):
            log.warning("step %d: %s is NaN or infinite, written as null", step, ", ".join(lost))
        if any(goal.metric in metrics for goal in self._goals.values()) or not step:
            self._past.append(strict(metrics))
        for name, tracker in self._trackers.items():
            self._showing(name, tracker.log, metrics, step)
        if self._samples:
            keep_samples(self._folder.val, step, self._samples, self._plan.keep_val)
            for name, tracker in self._trackers.items():
                self._showing(name, tracker.table, shown_samples(self._samples), step)
            self._samples = {}
        done = max(step - self._start.step + 1, 1)
        eta = (time.perf_counter() - self._began) / done * (self._plan.steps - step)
        line = progress_line(metrics, self._plan.steps, eta)
        append_line(line)
        log.info(line)
        if self._display is not None:
            self._showing("the display", self._display.on_row, metrics, eta)

    def _present_state(self, step: int) -> dict[str, Any]:
        """Return all state except the weights that the next step depends on: the content of a checkpoint's state.json."""
        return {
            "step": step,
            "cursor": self._rows.cursor(step, self._plan.batch_size, self._plan.seed).to_json(),
            "controllers": self._pipeline.state(),
            "versions": {role: learner.version for role, learner in self._pipeline.learners().items()},
            "settings_hash": self._settings["settings_hash"],
            "rng": checkpoint.rng_state(),
        }

    def _save_trace(self, due: str, flagged: Sequence[str] = ()) -> None:
        """Write the trace of the last step, with the reason for keeping it, unless it is on disk already."""
        if (last := self._last) is None:
            return
        target = step_folder(self._folder.traces, last.step)
        if not target.exists():
            around = {"before": self._before, "after": self._state["controllers"]}
            keep_trace(last.trace, target, Kept(due=due, flagged=tuple(flagged), **around))
            prune_traces(self._folder.traces, self._plan.keep_traces)
            for name, tracker in self._trackers.items():
                if tracker.traces is not None:
                    self._showing(name, tracker.traces, traces_of(last.trace.batch, last.step), last.step)

    def _save(self) -> int | None:
        """Write a checkpoint of the last step that has a metrics row, unless there is one, and return that step.

        Returns None where the next step has already begun to change the weights. A resumed run then does the last step
        again from the checkpoint before.
        """
        learners = self._pipeline.learners()
        if not self._state or states(learners) != self._weights:
            return None
        step = int(self._state["step"])
        if step in checkpoint.steps(self._folder.checkpoints):
            return step
        pending = self._ahead.pending(step) if self._ahead is not None else None

        def fill(staging: Path) -> None:
            write_json(staging / "settings.json", self._settings)
            if pending is not None:
                pending.save(staging / checkpoint.PENDING)
            for role, learner in learners.items():
                learner.save(staging / role)
                learner.save_state(staging / f"{role}_state")
            for name in self._in_memory if not step else ():
                if name not in learners:
                    in_memory(self._pipeline)[name].save(staging / name)

        keep, spared = self._plan.keep_checkpoints, (self._best(), 0 if self._in_memory else None)
        with working(f"saving checkpoint {step}"):
            checkpoint.write(self._folder.checkpoints, step, fill, self._state, keep=keep, spared=spared)
        return step

    # --- ends -----------------------------------------------------------------------------------

    def _finish(self, ending: Ending, why: Callable[[Mapping[str, float]], str] | None) -> str:
        """Write curves and summary, and return how the run ended. Where the loop was stopped early, also write the last
        trace and a checkpoint. `why` explains `break_if` from the metrics.
        """
        stopped = None
        if ending.stopped is not None:
            trace, step = ending.stopped.trace, ending.step + 1
            stopped = f"break_if at step {step}" + (f": {why(ending.metrics)}" if why is not None else "")
            target = step_folder(self._folder.traces, step)
            if not target.exists():
                around = {"before": self._state["controllers"], "after": self._pipeline.state()}
                keep_trace(trace, target, Kept(due="break_if was met", **around))
            self._end_draw(ending.step)
            self._save()
        elif ending.step < self._plan.steps:
            how = ending.why or ("interrupted" if self._control.interrupted else "stopped by hand")
            stopped = f"{how} after step {ending.step}{self._keep()}"
        return self._closed(stopped)

    def _broke(self, error: BaseException) -> str:
        """After an error in the loop, keep the last complete step where possible and save the failed one for
        inspection; returns why the run ended. An error while doing so does not replace the first one.
        """
        interrupted = isinstance(error, KeyboardInterrupt | asyncio.CancelledError | Interrupted)
        step = self._done()
        why = f"interrupted after step {step}" if interrupted else first_line(error)
        trace = getattr(error, "trace", None)
        try:
            if trace is not None and not interrupted:
                target = step_folder(self._folder.path / "failed", step + 1)
                if not target.exists():
                    written(target, trace.save)
                error.add_note(f"the phases of step {step + 1} before the error are saved: Trace.load({str(target)!r})")
            kept = self._keep()
            if not interrupted and (there := checkpoint.steps(self._folder.checkpoints)):
                error.add_note(f"checkpoint {there[-1]} is safe; to go on from it: {goes_on(self._folder.path)}")
            return self._closed(why + kept)
        except Exception as second:  # noqa: BLE001 - a full disk, say: libraries name it in their own ways
            return f"{why}; how it ended could not be written: {first_line(second)}"

    def _done(self) -> int:
        return self._last.step if self._last is not None else self._start.step - 1

    def _keep(self) -> str:
        """Keep trace and checkpoint of the last complete step, and return a sentence about it, such as `; checkpoint
        40, go on with resume='auto'`.
        """
        note = self._end_draw(self._done())
        try:
            self._save_trace("the run ended here")
            step = self._save() if self._last is not None else None
        except Exception as error:  # noqa: BLE001 - a full disk, say
            return f"; it could not be kept: {first_line(error)}"
        steps = checkpoint.steps(self._folder.checkpoints)
        if step is None and not steps:
            begins = ", the same call begins again" if not self._done() else ""
            return f"; no checkpoint yet{begins}{note}"
        return f"; checkpoint {steps[-1]}, go on with resume='auto'{note}"

    def _end_draw(self, last: int) -> str:
        """End sampling ahead when the loop has ended, and return a sentence about it; after an interrupt it waits only
        the grace period.
        """
        patience = self._control.grace if self._control.interrupted else None
        return "" if self._ahead is None else self._ahead.close(last, patience)

    def _closed(self, stopped: str | None) -> str:
        write_summary(self._folder.path, self._eval_rows, stopped)
        self._showing("the picture of the curves", self._draw, self._folder.path)
        if (self._folder.path / "curves.png").exists():
            write_summary(self._folder.path, self._eval_rows, stopped)  # its paths have the picture, too
        if stopped is not None:
            append_line(stopped)
        if isinstance(self._ahead, Stream):
            self._ahead.close()
        if self._display is not None:
            self._showing("the display", self._display.close, stopped)
        trim()  # what the steps used is not held between two cells
        return stopped or "done"


def _run(stepper: Stepper) -> Trace:
    """Run a stepper to its end and return its trace. An exception of a stage has the trace so far as `.trace`."""
    try:
        return stepper.run().trace
    except Exception as error:
        error.trace = stepper.trace  # type: ignore[attr-defined]
        raise


def _scored(trace: Trace) -> DataProto:
    """Return a step's batch as the reward stage left it, before rows were dropped; without a reward stage the step's
    last batch.
    """
    return trace["reward"].batch if "reward" in trace.names else trace.batch


def write_summary(path: Path, eval_rows: Rows | None, stopped: str | None) -> None:
    """Write summary.json from the files of the run folder: steps, seconds, why the run stopped, and held-out rewards
    before and after.
    """
    rows = read_metrics(path / "metrics.jsonl")
    summary: dict[str, Any] = {
        "steps": rows[-1][STEP] if rows else 0,
        "seconds": round(seconds_of(rows), 2),
        "stopped": stopped,
        "num_eval_rows": len(eval_rows) if eval_rows is not None else 0,
    }
    held = [row for row in rows if row.get("val/reward") is not None]
    for when, row in zip(("before", "after"), (*held[:1], *held[-1:]), strict=False):
        summary[f"reward_{when}"] = row["val/reward"]
        summary[f"interval_{when}"] = [row["val/reward_low"], row["val/reward_high"]]
        summary[f"greedy_{when}"] = row["val/greedy"]
    summary["settings_hash"] = (settings := read_settings(path)).get("settings_hash")
    summary["checkpoints"] = checkpoint.steps(path / "checkpoints")
    if best := settings["train"].get("save_best"):
        summary["best"], summary["best_value"], _ = Goal.of(best, "save_best").progress(rows)
    places = ("metrics.jsonl", "tensorboard", "traces", "updates", "checkpoints", "val", "curves.png", "notebook.ipynb")
    summary["paths"] = {name.split(".")[0]: str(path / name) for name in places if (path / name).exists()}
    write_json(path / "summary.json", summary)
