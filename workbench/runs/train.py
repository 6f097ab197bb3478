"""`train`: the loop with a run folder around it."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from workbench import background, loop
from workbench.config import require
from workbench.datasets import Rows
from workbench.errors import Interrupted, RunError, first_line, message
from workbench.observer import Condition, Ending, Observer
from workbench.runs import checkpoint
from workbench.runs.display import Live, in_notebook
from workbench.runs.facts import resolved, with_history, write_summary
from workbench.runs.folder import STEP, RunFolder, write_json
from workbench.runs.recorder import Plan, Recorder, Validator, append_line, progress_line
from workbench.runs.resume import Start, begin
from workbench.runs.run import Run
from workbench.runs.trackers import check_trackers, make_trackers
from workbench.stages import Pipeline

log = logging.getLogger("workbench")


class RunStopped(RunError):
    """`break_if` stopped a job before the update of a step; the run folder has the trace and the state before it."""


async def train(
    pipeline: Pipeline,
    rows: Rows,
    *,
    steps: int,
    run: str | Path | None = None,
    batch_size: int = 16,
    seed: int = 0,
    heldout: Rows | None = None,
    test_freq: int = 0,
    val_samples: int = 1,
    save_freq: int = 0,
    trace_freq: int = 10,
    keep_traces: int = 3,
    keep_checkpoints: int = 2,
    break_if: Condition | None = None,
    resume: str = "never",
    may_change: Sequence[str] = (),
    trackers: Sequence[str] = ("tensorboard",),
    display: str | None = "auto",
    observers: Sequence[Observer] = (),
) -> Run:
    """Train with the stages of a pipeline, and keep everything in a run folder.

    `batch_size` counts prompts. The `*_freq` settings say every how many steps to validate on `heldout` (with
    `val_samples` per prompt), to save a checkpoint, to record a trace; 0 means after the last step only, and
    validation also comes before the first. `break_if` gets a step's metrics; where it is true the loop stops before
    that step's update: the returned run's `.stopped` is a Stepper standing there (a job saves the trace and raises
    `RunStopped`). `resume="auto"` goes on from the newest good checkpoint, exactly; settings that differ from the
    run's are refused unless `may_change` names them (`["engines.actor.micro_batch_tokens"]`). In a notebook:
    `await train(…)`; progress and curves update in the cell, unless `display` is None.
    """
    plan = Plan(
        steps=steps,
        batch_size=batch_size,
        seed=seed,
        test_freq=test_freq,
        val_samples=val_samples,
        save_freq=save_freq,
        trace_freq=trace_freq,
        keep_traces=keep_traces,
        keep_checkpoints=keep_checkpoints,
    )
    _check_arguments(plan, resume, display, trackers)
    rows, heldout = _checked(pipeline, rows, heldout, batch_size)
    path = Path(run) if run is not None else Path("runs") / time.strftime("%Y%m%d-%H%M%S")
    settings = resolved(pipeline, rows, plan, heldout, trackers)
    folder = RunFolder(path)
    try:
        start = begin(folder, pipeline, rows, settings, resume=resume, may_change=may_change)
        if start.step > steps:
            return _nothing_to_do(path, start, steps, heldout)
        write_json(path / "settings.json", with_history(settings, start))
        session = _Session(folder, pipeline, rows, plan, heldout, trackers, settings, start, shown=display == "auto")
        ending = await session.run(observers, break_if)
    finally:
        folder.release()
    return _result(path, ending, start.notes)


def train_blocking(pipeline: Pipeline, rows: Rows, **settings: Any) -> Run:
    """`train` for scripts: no event loop of the caller's is needed, or used."""
    return asyncio.run(train(pipeline, rows, **settings))


def _result(path: Path, ending: Ending, notes: tuple[str, ...]) -> Run:
    if ending.stopped is not None and os.environ.get("WORKBENCH_JOB"):
        raise RunStopped(
            message(
                f"break_if was met at step {ending.stopped.trace.step}; the run stopped before its update",
                found=f"the trace and a checkpoint of step {ending.step} in {path}",
            )
        )
    return Run(path, stopped=ending.stopped, notes=notes)


def _nothing_to_do(path: Path, start: Start, steps: int, heldout: Rows | None) -> Run:
    """Say so; a run that was killed after its last checkpoint gets the curves and the summary that it lacks."""
    note = f"nothing left to do: {start.step - 1} of {steps} steps are done"
    append_line(note)
    if not (path / "summary.json").is_file():
        write_summary(path, heldout, stopped=None)
    return Run(path, notes=(*start.notes, note))


def _check_arguments(plan: Plan, resume: str, display: str | None, trackers: Sequence[str]) -> None:
    for name, least in (
        ("steps", 1),
        ("batch_size", 1),
        ("val_samples", 1),
        ("keep_checkpoints", 2),
        ("keep_traces", 1),
    ):
        found = getattr(plan, name)
        require(isinstance(found, int) and found >= least, name, expected=f"≥ {least}", found=found)
    for name in ("test_freq", "save_freq", "trace_freq"):
        require(getattr(plan, name) >= 0, name, expected="≥ 0 (0: after the last step)", found=getattr(plan, name))
    require(resume in ("never", "auto"), "resume", expected="'never' or 'auto'", found=repr(resume))
    require(display in ("auto", None), "display", expected="'auto' or None", found=repr(display))
    check_trackers(trackers)


def _checked(pipeline: Pipeline, rows: Rows, heldout: Rows | None, batch_size: int) -> tuple[Rows, Rows | None]:
    """Everything about the data that can be refused before work starts is refused here."""
    rollout: Any = pipeline["rollout"]
    reward: Any = pipeline["reward"]
    tokenizer = rollout.sampler.tokenizer
    switches = getattr(rollout.sampler, "template_switches", {})
    rows = rows.fitting(tokenizer, **switches)
    heldout = heldout.fitting(tokenizer, **switches) if heldout is not None else None
    first = rows.batch(batch_size)
    pipeline.check(first)
    for part in (rows, heldout):
        if part is not None:
            reward.function.check_rows(part)
    reward.function.check_signature(first.columns)
    return rows, heldout


class _Session:
    """What one call of `train` holds open: recorder, trackers, display, clock."""

    def __init__(
        self,
        folder: RunFolder,
        pipeline: Pipeline,
        rows: Rows,
        plan: Plan,
        heldout: Rows | None,
        trackers: Sequence[str],
        settings: Mapping[str, Any],
        start: Start,
        *,
        shown: bool,
    ) -> None:
        self._folder, self._plan, self._start = folder, plan, start
        self._pipeline, self._rows, self._heldout = pipeline, rows, heldout
        self._began = time.perf_counter()
        past = Run(folder.path).rows
        made = make_trackers(trackers, folder.path)
        for row in past:  # a resumed run's events are written again: the old files were moved aside
            for tracker in made:
                tracker.log({key: value for key, value in row.items() if isinstance(value, int | float)}, row[STEP])
        self._live = Live(plan.steps, past) if shown and in_notebook() else None
        validator = Validator(pipeline, heldout, plan.seed, plan.val_samples) if heldout is not None else None
        self.recorder = Recorder(
            folder,
            pipeline,
            rows,
            plan,
            validator=validator,
            trackers=made,
            settings_hash=settings["settings_hash"],
            on_row=self._on_row,
        )

    async def run(self, observers: Sequence[Observer], break_if: Condition | None) -> Ending:
        """Restore the generators, now that everything is built, and loop. A run that breaks says why in its summary."""
        plan, start = self._plan, self._start
        if start.rng is not None:
            checkpoint.restore_rng(start.rng)
        try:
            ending = await loop.train(
                self._pipeline,
                self._rows,
                steps=plan.steps,
                batch_size=plan.batch_size,
                seed=plan.seed,
                start=start.step,
                observers=[self.recorder, *observers],
                break_if=break_if,
            )
        except BaseException as error:
            interrupted = isinstance(error, KeyboardInterrupt | asyncio.CancelledError | Interrupted)
            write_summary(self._folder.path, self._heldout, stopped="interrupted" if interrupted else first_line(error))
            raise
        await background.beside(self.finish, ending)
        return ending

    def _on_row(self, row: Mapping[str, Any]) -> None:
        done = row[STEP] - self._start.step + 1
        eta = (time.perf_counter() - self._began) / max(done, 1) * (self._plan.steps - row[STEP])
        line = progress_line(row, self._plan.steps, eta)
        append_line(line)
        log.info(line)
        if self._live is not None:
            self._live.on_row(row, eta)

    def finish(self, ending: Ending) -> None:
        """Curves and summary; where the loop was stopped, the trace and the state before the update as well."""
        stopped = None
        if ending.stopped is not None:
            stopped = f"break_if at step {ending.step + 1}"
            target = self._folder.trace_path(ending.step + 1)
            if not target.exists():
                ending.stopped.trace.save(target)
            if ending.step not in checkpoint.steps(self._folder.checkpoints):
                self.recorder.save(ending.step)
        write_summary(self._folder.path, self._heldout, stopped=stopped)
