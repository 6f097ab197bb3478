"""The page that tells the algorithm.

A training step is: take the next prompts, run the stages in order (rollout, reward, log-probs, values, advantage,
updates), and let whoever watches look at the trace: metrics files, checkpoints, validation, displays. With `ahead`
the step's rows have been drawn while the step before was learnt from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from workbench.ahead import Ahead
from workbench.control import Control
from workbench.dataproto import DataProto
from workbench.observer import Condition, Ending, Observer, StepReport
from workbench.overlap import phases
from workbench.stages import Pipeline
from workbench.stepper import Stepper
from workbench.trace import Trace


def run_step(pipeline: Pipeline, batch: DataProto | Trace) -> Trace:
    """One training step: every stage once, in order. What a stage raises carries the trace before it as `.trace`."""
    *_, trace = phases(pipeline, batch)
    return trace


def run_step_unless(
    pipeline: Pipeline, batch: DataProto, met: Condition | None, ahead: Ahead | None = None
) -> tuple[Trace, Stepper | None]:
    """One training step that is taken back to before its first update where its metrics meet a condition.

    A condition on a metric that the step has not measured yet counts as not met.
    """
    drawn = Trace(batch) if ahead is None else ahead.take(batch)
    if met is None:
        return run_step(pipeline, drawn), None
    stepper = Stepper(pipeline, drawn.start).after(drawn).run()
    if not _holds(met, stepper.trace.metrics):
        return stepper.trace, None
    return stepper.trace, stepper.back(to=next(stage.name for stage in pipeline if stage.updates))


def _holds(condition: Condition, metrics: Mapping[str, float]) -> bool:
    try:
        return bool(condition(metrics))
    except KeyError:
        return False


async def train(
    pipeline: Pipeline,
    rows: Any,
    *,
    steps: int,
    batch_size: int,
    seed: int = 0,
    start: int = 1,
    observers: Sequence[Observer] = (),
    break_if: Condition | None = None,
    control: Control | None = None,
    ahead: Ahead | None = None,
) -> Ending:
    """Steps `start` to `steps`, each beside the caller's event loop; `control` can pause or stop it between two.

    `rows.batch(batch_size, step=…, seed=…)` is a function of the step, so that a resumed loop sees the same.
    """
    control = control or Control()
    error: BaseException | None = None
    try:
        for observer in observers:
            await control.carry(observer.on_start, start, steps)
        for step in range(start, steps + 1):
            if not await control.gate():
                return Ending(step - 1)
            batch = rows.batch(batch_size, step=step, seed=seed)
            trace, stopped = await control.carry(run_step_unless, pipeline, batch, break_if, ahead)
            if stopped is not None:
                return Ending(step - 1, stopped)
            report = StepReport(step=step, epoch=batch.meta_info["epoch"], metrics=trace.metrics, trace=trace)
            for observer in observers:
                await control.carry(observer.on_step, report)
        return Ending(steps)
    except BaseException as raised:
        error = raised
        raise
    finally:
        for observer in observers:
            observer.on_end(error)
