"""What one call of `train` holds open: recorder, trackers, display, control, clock; and how it ends."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from workbench import background, loop
from workbench.ahead import Ahead, loaded
from workbench.control import Control
from workbench.errors import Interrupted, WorkbenchError, first_line
from workbench.observer import Condition, Ending, Observer
from workbench.runs import checkpoint
from workbench.runs.display import Live, open_display
from workbench.runs.facts import write_summary
from workbench.runs.folder import STEP, RunFolder
from workbench.runs.preflight import Preflight
from workbench.runs.recorder import Plan, Recorder, Validator, append_line, progress_line
from workbench.runs.resume import Start
from workbench.runs.run import Run
from workbench.runs.trackers import make_trackers
from workbench.stages import Pipeline

log = logging.getLogger("workbench")


class Session:
    """One call of `train`, from the restored generators to the summary."""

    def __init__(
        self,
        folder: RunFolder,
        pipeline: Pipeline,
        data: Preflight,
        plan: Plan,
        trackers: Sequence[str],
        settings: Mapping[str, Any],
        start: Start,
        *,
        shown: bool,
    ) -> None:
        self._folder, self._plan, self._start = folder, plan, start
        self._pipeline, self._rows, self._heldout = pipeline, data.rows, data.heldout
        self._began = time.perf_counter()
        self.control = Control()
        past = Run(folder.path).rows
        made = make_trackers(trackers, folder.path)
        for row in past:  # a resumed run's events are written again: the old files were moved aside
            for tracker in made:
                tracker.log({key: value for key, value in row.items() if isinstance(value, int | float)}, row[STEP])
        self._live: Live | None = open_display(plan.steps, past, self.control, folder.path) if shown else None
        self._break_if: Condition | None = None
        heldout = data.heldout
        self._ahead = self._drawing(pipeline, data, plan, start) if plan.ahead else None
        validator = Validator(pipeline, heldout, plan.seed, plan.val_samples) if heldout is not None else None
        self.recorder = Recorder(
            folder,
            pipeline,
            data.rows,
            plan,
            validator=validator,
            trackers=made,
            settings_hash=settings["settings_hash"],
            on_row=self._on_row,
            ahead=self._ahead,
        )

    @staticmethod
    def _drawing(pipeline: Pipeline, data: Preflight, plan: Plan, start: Start) -> Ahead:
        pending = loaded(start.pending) if start.pending is not None else None
        prompts = functools.partial(data.rows.batch, plan.batch_size, seed=plan.seed)
        return Ahead(pipeline, lambda step: prompts(step=step), last=plan.steps, pending=pending)

    async def run(self, observers: Sequence[Observer], break_if: Condition | None) -> Ending:
        """Restore the generators, now that everything is built, and loop. A run that breaks says why in its summary.

        Raises `CancelledError`, with the step and the checkpoint in its message, where an interrupt stopped it.
        """
        plan, start = self._plan, self._start
        self._break_if = break_if
        if start.rng is not None:
            checkpoint.restore_rng(start.rng)
        watching = asyncio.create_task(self._live.watch()) if self._live is not None else None
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
                control=self.control,
                ahead=self._ahead,
            )
        except BaseException as error:
            told = await background.beside(self._broke, error)
            if isinstance(error, asyncio.CancelledError):
                raise asyncio.CancelledError(told) from None
            raise
        finally:
            if watching is not None:
                watching.cancel()
        told = await background.beside(self._finish, ending)
        if self.control.interrupted:
            raise asyncio.CancelledError(told)
        return ending

    def _on_row(self, row: Mapping[str, Any]) -> None:
        done = row[STEP] - self._start.step + 1
        eta = (time.perf_counter() - self._began) / max(done, 1) * (self._plan.steps - row[STEP])
        line = progress_line(row, self._plan.steps, eta)
        append_line(line)
        log.info(line)
        if self._live is not None:
            self._live.on_row(row, eta)

    # --- ends -----------------------------------------------------------------------------------

    def _finish(self, ending: Ending) -> str:
        """Curves and summary; where the loop was stopped, the trace and the state it stands in as well."""
        stopped = None
        if ending.stopped is not None:
            why = getattr(self._break_if, "why", None)  # a named limit says which
            told = f": {why(ending.stopped.trace.metrics)}" if why is not None else ""
            stopped = f"break_if at step {ending.step + 1}{told}"
            self.recorder.save_stopped(ending.stopped.trace, ending.step + 1)
            self._end_draw(ending.step)
            self.recorder.save()
        elif ending.step < self._plan.steps:
            stopped = f"{'interrupted' if self.control.interrupted else 'stopped by hand'} after step {ending.step}"
            stopped += self._keep()
        return self._closed(stopped)

    def _broke(self, error: BaseException) -> str:
        """The loop raised: keep the last whole step where it can be kept, and the step that failed to be looked at."""
        interrupted = isinstance(error, KeyboardInterrupt | asyncio.CancelledError | Interrupted)
        step = self.recorder.last.step if self.recorder.last is not None else self._start.step - 1
        why = f"interrupted after step {step}" if interrupted else first_line(error)
        trace = getattr(error, "trace", None)
        if trace is not None and not interrupted:
            target = self._folder.path / "failed" / f"step_{step + 1:06d}"
            if not target.exists():
                trace.save(target)
            error.add_note(f"the batch of step {step + 1} up to there: Trace.load({str(target)!r})")
        return self._closed(why + self._keep())

    def _keep(self) -> str:
        """Trace and checkpoint of the last whole step; what to say about it. A full disk hides no other error."""
        last = self.recorder.last.step if self.recorder.last is not None else self._start.step - 1
        drawn = self._end_draw(last)
        if self.recorder.last is None:
            return drawn
        try:
            self.recorder.save_trace()
            step = self.recorder.save()
        except (OSError, WorkbenchError) as error:
            return f"; it could not be kept: {first_line(error)}"
        found = checkpoint.steps(self._folder.checkpoints)
        if step is None and not found:
            return f"; no checkpoint yet{drawn}"
        return f"; checkpoint {found[-1]}, go on with resume='auto'{drawn}"

    def _end_draw(self, last: int) -> str:
        """No thread draws on behind a loop that has ended. An interrupt does not wait long for it."""
        if self._ahead is None:
            return ""
        return self._ahead.close(last, self.control.grace if self.control.interrupted else None)

    def _closed(self, stopped: str | None) -> str:
        write_summary(self._folder.path, self._heldout, stopped=stopped)
        if stopped is not None:
            append_line(stopped)
        if self._live is not None:
            self._live.close(stopped)
        return stopped or "done"
