"""`train`: the loop with a run folder around it."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from workbench.ahead import MOST
from workbench.config import require
from workbench.datasets import Rows
from workbench.errors import RunError, message
from workbench.observer import Condition, Ending, Observer
from workbench.runs.facts import resolved, with_history, write_summary
from workbench.runs.folder import RunFolder, check_place, write_json
from workbench.runs.preflight import Checked, preflight
from workbench.runs.recorder import Plan, append_line
from workbench.runs.resume import Start, begin, check_resumable
from workbench.runs.run import Run
from workbench.runs.session import Session
from workbench.runs.trackers import check_trackers
from workbench.stages import Pipeline


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
    ahead: int = 0,
    heldout: Rows | None = None,
    test_freq: int = 0,
    val_samples: int = 1,
    save_freq: int = 0,
    trace_freq: int = 10,
    keep_traces: int = 3,
    keep_checkpoints: int = 2,
    keep_updates: int = 1024,
    break_if: Condition | None = None,
    resume: str = "never",
    may_change: Sequence[str] = (),
    trackers: Sequence[str] = ("tensorboard",),
    display: str | None = "auto",
    observers: Sequence[Observer] = (),
) -> Run:
    """Train with the stages of a pipeline, and keep everything in a run folder.

    `batch_size` counts prompts. With `ahead=1` a step's rows are drawn while the step before is learnt from, by weights one
    version older: see `workbench.ahead`. The `*_freq` settings say every how many steps to validate on `heldout` (with
    `val_samples` per prompt), to save a checkpoint, to record a trace; 0 means after the last step only, and validation
    also comes before the first. `keep_updates` bounds, in MiB, the recorded inputs of updates by which any step's weights
    can be made again (`run.stepper`, `run.engine`); 0 records none. `break_if` gets a step's metrics; where it is true
    the loop stops before that step's update: the returned run's `.stopped` is a Stepper standing there (a job saves the
    trace and raises `RunStopped`). `resume="auto"` goes on from the newest good checkpoint, exactly; settings that differ
    are refused unless `may_change` names them (`["engines.actor.micro_batch_tokens"]`). In a notebook: `await train(…)`;
    progress, curves, and buttons to pause and stop are in the cell, unless `display` is None.

    An interrupt (or SIGTERM, in a job) lets the step in hand end if that takes seconds only, leaves a checkpoint of the
    last whole step, and raises `CancelledError`. A stage that raises leaves one too, and its step's batch in `failed/`.
    """
    given = locals()
    plan = Plan(**{field.name: given[field.name] for field in dataclasses.fields(Plan)})
    _check_arguments(plan, resume, display, trackers)
    path = Path(run) if run is not None else Path("runs") / time.strftime("%Y%m%d-%H%M%S")
    check_place(path)
    found = preflight(pipeline, rows, heldout, plan, path)
    settings = resolved(pipeline, found.rows, plan, found.heldout, trackers)
    if os.environ.get("WORKBENCH_CHECK"):
        check_resumable(path, settings, resume, may_change)
        raise Checked(repr(found))
    folder = RunFolder(path)
    try:
        start = begin(folder, pipeline, found.rows, settings, resume=resume, may_change=may_change)
        if start.step > steps:
            return _nothing_to_do(path, start, steps, found.heldout)
        write_json(path / "settings.json", with_history(settings, start))
        session = Session(folder, pipeline, found, plan, trackers, settings, start, shown=display == "auto")
        ending = await session.run(observers, break_if)
    finally:
        folder.release()
    return _result(path, ending, start.notes, break_if)


def train_blocking(pipeline: Pipeline, rows: Rows, **settings: Any) -> Run:
    """`train` for scripts: no event loop of the caller's is needed, or used."""
    return asyncio.run(train(pipeline, rows, **settings))


def _result(path: Path, ending: Ending, notes: tuple[str, ...], limit: Any) -> Run:
    if ending.stopped is not None and os.environ.get("WORKBENCH_JOB"):
        why = f"{limit.why(ending.stopped.trace.metrics)}; " if hasattr(limit, "why") else ""
        raise RunStopped(
            message(
                f"break_if was met at step {ending.stopped.trace.step}; the run stopped before its update",
                found=f"{why}the trace and a checkpoint of step {ending.step} in {path}",
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
    whole = isinstance(plan.ahead, int) and not isinstance(plan.ahead, bool)
    require(whole and 0 <= plan.ahead <= MOST, "ahead", expected=f"0 or {MOST} steps", found=plan.ahead)
    for name in ("test_freq", "save_freq", "trace_freq", "keep_updates"):
        require(getattr(plan, name) >= 0, name, expected="≥ 0", found=getattr(plan, name))
    require(resume in ("never", "auto"), "resume", expected="'never' or 'auto'", found=repr(resume))
    require(display in ("auto", None), "display", expected="'auto' or None", found=repr(display))
    check_trackers(trackers)
