"""`train`: the loop with a run folder around it."""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from workbench import background, loop
from workbench.config import require, settings_hash
from workbench.datasets import Rows
from workbench.errors import RunError, message
from workbench.observer import Condition, Ending, Observer
from workbench.runs import checkpoint
from workbench.runs.display import Live, in_notebook
from workbench.runs.folder import RunFolder, write_json
from workbench.runs.recorder import Plan, Recorder, Validator, append_line, progress_line
from workbench.runs.resume import Start, begin
from workbench.runs.run import Run
from workbench.runs.trackers import make_trackers
from workbench.stages import Pipeline
from workbench.trace import describe_settings

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
    save_freq: int = 0,
    trace_freq: int = 10,
    keep_traces: int = 3,
    keep_checkpoints: int = 2,
    break_if: Condition | None = None,
    resume: str = "never",
    trackers: Sequence[str] = ("tensorboard",),
    observers: Sequence[Observer] = (),
) -> Run:
    """Train with the stages of a pipeline, and keep everything in a run folder.

    `batch_size` counts prompts. The `*_freq` settings say every how many steps to validate on `heldout`, to save a
    checkpoint, to record a trace; 0 means after the last step only, and validation also comes before the first.
    `break_if` gets a step's metrics; where it is true the loop stops before that step's update: the returned run's
    `.stopped` is a Stepper standing there (a job saves the trace and raises `RunStopped`). `resume="auto"` goes on from
    the newest good checkpoint, exactly. In a notebook: `await train(…)`; progress and curves update in the cell.
    """
    require(steps >= 1, "steps", expected="≥ 1", found=steps)
    plan = Plan(
        steps=steps,
        batch_size=batch_size,
        seed=seed,
        test_freq=test_freq,
        save_freq=save_freq,
        trace_freq=trace_freq,
        keep_traces=max(keep_traces, 1),
        keep_checkpoints=keep_checkpoints,
    )
    rows, heldout = _checked(pipeline, rows, heldout, batch_size)
    path = Path(run) if run is not None else Path("runs") / time.strftime("%Y%m%d-%H%M%S")
    settings = resolved(pipeline, rows, plan, heldout, trackers)
    folder = RunFolder(path)
    try:
        start = begin(folder, pipeline, rows, settings, resume)
        write_json(path / "settings.json", settings)
        if start.step > steps:
            note = f"nothing left to do: {start.step - 1} of {steps} steps are done"
            append_line(note)
            return Run(path, notes=(*start.notes, note))
        session = _Session(folder, pipeline, rows, plan, heldout, tuple(trackers), settings, start.step)
        watching = [session.recorder, *observers]
        ending = await session.loop(start, watching, break_if)
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


def _checked(pipeline: Pipeline, rows: Rows, heldout: Rows | None, batch_size: int) -> tuple[Rows, Rows | None]:
    """Everything that can be refused before work starts is refused here."""
    rollout: Any = pipeline["rollout"]
    reward: Any = pipeline["reward"]
    tokenizer = rollout._sampler.tokenizer
    switches = getattr(rollout._sampler, "template_switches", {})
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
        trackers: tuple[str, ...],
        settings: Mapping[str, Any],
        start: int,
    ) -> None:
        self._folder, self._plan, self._first = folder, plan, start
        self._pipeline, self._rows = pipeline, rows
        self._heldout = heldout
        self._settings = settings
        self._began = time.perf_counter()
        past = Run(folder.path).rows
        made = make_trackers(trackers, folder.path)
        for row in past:  # a resumed run's events are written again: the old files were moved aside
            for tracker in made:
                tracker.log({k: v for k, v in row.items() if isinstance(v, int | float)}, row["training/global_step"])
        self._live = Live(plan.steps, past) if in_notebook() else None
        self.recorder = Recorder(
            folder,
            pipeline,
            rows,
            plan,
            validator=Validator(pipeline, heldout, plan.seed) if heldout is not None else None,
            trackers=made,
            settings_hash=settings_hash(dict(settings["stages"])),
            on_row=self._on_row,
        )

    async def loop(self, start: Start, watching: list[Observer], break_if: Condition | None) -> Ending:
        """The loop itself; generators are restored last, when everything else is built."""
        if start.rng is not None:
            checkpoint.restore_rng(start.rng)
        plan = self._plan
        ending = await loop.train(
            self._pipeline,
            self._rows,
            steps=plan.steps,
            batch_size=plan.batch_size,
            seed=plan.seed,
            start=start.step,
            observers=watching,
            break_if=break_if,
        )
        await background.beside(self.finish, ending)
        return ending

    def _on_row(self, row: Mapping[str, Any]) -> None:
        done = row["training/global_step"] - self._first + 1
        eta = (time.perf_counter() - self._began) / max(done, 1) * (self._plan.steps - row["training/global_step"])
        line = progress_line(row, self._plan.steps, eta)
        append_line(line)
        log.info(line)
        if self._live is not None:
            self._live.on_row(row, eta)

    def finish(self, ending: Ending) -> None:
        """Curves and summary; where the loop was stopped, the trace and the state before the update as well."""
        from workbench.views.curves import panel, save_png

        path = self._folder.path
        if ending.stopped is not None:
            target = self._folder.trace_path(ending.step + 1)
            if not target.exists():
                ending.stopped.trace.save(target)
            if ending.step not in checkpoint.steps(self._folder.checkpoints):
                self.recorder.save(ending.step)
        run = Run(path)
        save_png(panel(run.rows, title=path.name), path / "curves.png")
        stopped = None if ending.stopped is None else f"break_if at step {ending.step + 1}"
        write_json(path / "summary.json", summary(run.rows, self._heldout, stopped))


def summary(rows: Sequence[Mapping[str, Any]], heldout: Rows | None, stopped: str | None) -> dict[str, Any]:
    """The few numbers that people ask for first."""
    validated = [row for row in rows if "val/reward" in row]
    found: dict[str, Any] = {
        "steps": rows[-1]["training/global_step"] if rows else 0,
        "seconds": round(sum(row.get("timing_s/step", 0.0) + row.get("timing_s/testing", 0.0) for row in rows), 2),
        "stopped": stopped,
        "heldout_rows": len(heldout) if heldout is not None else 0,
    }
    if validated:
        for when, row in (("before", validated[0]), ("after", validated[-1])):
            found[f"reward_{when}"] = row["val/reward"]
            found[f"interval_{when}"] = [row["val/reward_low"], row["val/reward_high"]]
            found[f"greedy_{when}"] = row["val/greedy"]
    return found


def resolved(
    pipeline: Pipeline, rows: Rows, plan: Plan, heldout: Rows | None, trackers: Sequence[str]
) -> dict[str, Any]:
    """Everything that a run was started with, plain."""
    from importlib.metadata import version

    described = {stage.name: describe_settings(stage) for stage in pipeline}
    names = ("torch", "transformers", "numpy")
    return {
        "stages": {name: settings for name, (settings, _) in described.items()},
        "sources": {name: source for name, (_, source) in described.items() if source},
        "engines": {role: getattr(learner, "describe", dict)() for role, learner in pipeline.learners().items()},
        "train": {**vars(plan), "trackers": list(trackers)},
        "data_hash": rows.data_hash,
        "data": rows.source,
        "heldout": None if heldout is None else {"source": heldout.source, "data_hash": heldout.data_hash},
        "code": code_revision(),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in names}},
    }


def code_revision() -> str | None:
    """The commit that the package's folder stands on, with `+changes` where files differ; None outside git."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+changes", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
