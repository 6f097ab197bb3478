"""Recovers a training from workers that were lost: a learner's rank or a sampler that died, was stopped, or is hung.

The state after the last whole step is made again, exactly: the newest good checkpoint, or how the session began, and the
recorded updates since. No rollout and no reward of a recorded step is run again, and nothing on disk is written twice. Then
what was going on is done again from its beginning. Each recovery is a line of recoveries.jsonl:

    {"time", "step", "stage", "rank", "exit", "error", "state", "seconds"}

After `max_recoveries` in one call of `train` the loss is raised, and the run can be resumed. What nothing brings back: this
process, a Ray cluster whose head is gone, and steps since the last checkpoint whose updates are not recorded (`keep_updates`).
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from workbench.base import runtime
from workbench.base.errors import Interrupted, RunError, WorkerLost, first_line
from workbench.engines.protocol import Losable
from workbench.runs import checkpoint, updates
from workbench.runs.folder import RunFolder
from workbench.runs.trackers import append_line
from workbench.stages.pipeline import Pipeline
from workbench.steps.trace import Trace

log = logging.getLogger("workbench")
T = TypeVar("T")
PAUSE = 1.0
"""Seconds before the second recovery of the same work; each further pause is twice as long."""
LONGEST_PAUSE = 60.0


class Recovery:
    """Does work again whose workers were lost, at most `most` times in a training that begins after step `start`."""

    def __init__(self, folder: RunFolder, pipeline: Pipeline, start: int, most: int, *, ahead: bool) -> None:
        self._folder, self._pipeline, self._start, self._most = folder, pipeline, start, most
        self.count = 0
        """How often work was done again."""
        self.notes: list[str] = []
        """Sentences about each time."""
        self._controllers = pipeline.state()
        self._began: dict[str, Any] = {}
        """The learners as the session began, by role: until there is a checkpoint, and where one may have to go back."""
        found = [one for one in pipeline.learners().values() if isinstance(one, Losable) and one.lost is not None]
        if most and not start and (found or ahead):
            for role, learner in pipeline.learners().items():
                self._began[role] = learner.snapshot("memory")

    def attempt(self, step: int, work: Callable[[], T], restore: Callable[[], str]) -> T:
        """Return what `work` returns. Where workers are lost in it, call `restore`, which says what it restored, and do `work`
        again; raises the loss where that does not help."""
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
        """Whether an error, or what it was raised from, says that workers were lost; a time-out does where they are gone."""
        told = (error, error.__cause__, error.__context__)
        if isinstance(error, Interrupted):
            return False
        late = any(isinstance(one, TimeoutError) for one in told)
        return any(isinstance(one, WorkerLost) for one in told) or (late and self.gone())

    def gone(self) -> bool:
        """Whether processes that held a learner's weights are gone."""
        return any(isinstance(one, Losable) and one.lost for one in self._pipeline.learners().values())

    def _recover(self, step: int, error: Exception, restore: Callable[[], str], pause: float) -> None:
        why = f"train(max_recoveries={self._most}) allows no other"
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
        """Make the state after `step` again: weights, optimizers, and of `state` the controllers and random generators.

        `before_last` is called when the state of the step before is there. Returns what was done, in words. Raises `RunError`
        where neither checkpoints nor recorded updates reach there.
        """
        base, said = self._restored(step, step - 1 if before_last is not None else step)
        for number in range(base + 1, step + 1):
            if number == step and before_last is not None:
                before_last()
            updates.apply(self._pipeline, (update := updates.read(self._folder.updates, number)))
            self._pipeline.load_state(update.controllers)
        self._pipeline.load_state(state["controllers"])
        checkpoint.restore_rng(state["rng"])
        return f"{said} and {step - base} updates" if step > base else said

    def _restored(self, step: int, most: int) -> tuple[int, str]:
        """Restore the newest state up to step `most` from which all updates up to `step` are recorded; its step and name."""
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
        what = f"the state after step {step} cannot be made again"
        found = f"checkpoint {there.step or None}, recorded updates {updates.ranges(recorded)}"
        raise RunError(what, found=found, do="set save_freq, or a larger keep_updates, and go on with resume='auto'")
