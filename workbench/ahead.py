"""Rollouts one step ahead: while a step is scored and learnt from, the rows of the next one are drawn.

Step k learns from rows that the weights after step k − 2 wrote: the sampler gets the weights after step k − 1 when step
k begins, and draws step k + 1 with them. The staleness is one version, the same in every run, so that a run can be done
again as far as its engines can; the first step, and the first after a checkpoint without drawn rows, has none.

PPO's ratio, new over old log-probs, says nothing of it: the trainer computes the old ones with weights that are one
update further than those that wrote the row. `recipes.corrected` weighs each token by old / rollout probability
(truncated; decoupled PPO, Hilton et al. 2021, https://arxiv.org/abs/2110.00641).
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

from workbench import background
from workbench.dataproto import DataProto
from workbench.dataproto.columns_map import Lazy
from workbench.errors import SettingError, VersionMismatch, first_line, message
from workbench.overlap import phases
from workbench.stages import Baseline, FilterGroups, Overlong, Pipeline, Reward, Rollout, RolloutCorrection
from workbench.trace import Trace

log = logging.getLogger("workbench")

MOST = 1
"""Steps that rows may be drawn ahead, and versions that they may be behind."""
DRAWN = "drawn_ahead"
"""Marks, among the settings of a trace's phase, that it was done while the step before was learnt from."""


def drawn_stages(pipeline: Pipeline) -> Pipeline:
    """What can be done before the step begins: rollout and reward, and the stages behind them that filter and shape."""
    stages = list(pipeline)
    known = (Rollout, Reward, Overlong, FilterGroups, Baseline)
    count = next((place for place, one in enumerate(stages) if not isinstance(one, known) or one.state()), len(stages))
    return Pipeline(stages[:count], overlap=pipeline.overlap)


def sampler_of(pipeline: Pipeline) -> Any:
    """The engine that draws, where its sampler can hold weights of its own.

    Raises `SettingError` where it cannot: rows that are drawn while the weights change have no version.
    """
    first = next(iter(pipeline))
    engine = first.sampler if isinstance(first, Rollout) else None
    if engine is not None and hasattr(engine, "hold") and not getattr(engine, "_share", False):
        return engine
    shared = engine is not None and hasattr(engine, "hold")
    raise SettingError(
        message(
            "ahead=1",
            expected="a pipeline that begins with a rollout by a sampler with weights and a device of its own",
            found="share_device=True: the sampler sleeps while the learner works"
            if shared
            else f"{type(engine).__name__}, which samples with the weights that it learns"
            if engine is not None
            else f"stage {first.name!r} at its beginning",
            do="engines.paired(learner, sampler), each with its own model, or ahead=0",
        )
    )


def correction(pipeline: Pipeline) -> str | None:
    """How a pipeline corrects for rows of older weights, in words; None: it does not."""
    for stage in pipeline:
        if not isinstance(stage, RolloutCorrection):
            continue
        if stage.bypass:
            return "the sampler's log-probs are the old ones"
        if stage.rollout_is is not None and pipeline["update_actor"].settings().get("rollout_is"):
            return f"{stage.rollout_is} weights, truncated at {stage.rollout_is_threshold}"
        if stage.rollout_rs:
            return f"rejection by {', '.join(stage.rollout_rs)}"
    return None


class Ahead:
    """Gives each step its rows, and has the next step's drawn on a thread of its own meanwhile."""

    def __init__(
        self,
        pipeline: Pipeline,
        batch_of: Callable[[int], DataProto],
        *,
        last: int,
        pending: Trace | None = None,
    ) -> None:
        """`batch_of(step)` gives a step's prompts; nothing is drawn beyond step `last`. `pending` is what a checkpoint
        held. Raises `SettingError` as `sampler_of`."""
        self._engine = sampler_of(pipeline)
        self._stages = drawn_stages(pipeline)
        self._batch_of = batch_of
        self._last = last
        self._drawn: dict[int, Future[Trace]] = {}
        self._threads: list[threading.Thread] = []
        if pending is not None and pending.step is not None:
            self._drawn[pending.step] = Future()
            self._drawn[pending.step].set_result(pending)

    def take(self, batch: DataProto) -> Trace:
        """The phases of a step on these prompts that have been drawn, and the next step's begun.

        Raises what the draw raised, with its trace; `VersionMismatch` where rows are older than they may be.
        """
        began = time.perf_counter()
        step = int(batch.meta_info["step"])
        waiting = self._drawn.get(step)
        trace = self._draw(batch, self._engine.hold()) if waiting is None else waiting.result()
        lag = self._lag(trace, step)
        self._drawn = {number: future for number, future in self._drawn.items() if number >= step}
        if step < self._last:
            self._begin(step + 1)
        if waiting is None:
            return trace
        waited = time.perf_counter() - began
        log.debug("step %d: its rows are %d versions old; waited %.2f s for them", step, lag, waited)
        return _marked(trace, waited)

    def pending(self, after: int) -> Trace | None:
        """The rows of the step behind `after`, waited for; None where they are not drawn, or could not be."""
        future = self._drawn.get(after + 1)
        if future is None:
            return None
        error = future.exception()
        if error is not None:
            log.warning("the rows of step %d are not kept: %s", after + 1, first_line(error))
            return None
        return future.result()

    def close(self, after: int, patience: float | None = None) -> str:
        """End what is being drawn: for the step behind `after`, which a checkpoint keeps, wait `patience` seconds first
        (None: as long as it takes). What to say where its rows were thrown away."""
        wanted = self._drawn.get(after + 1)
        if wanted is not None:
            wait([wanted], timeout=patience)
        going = [thread for thread in self._threads if thread.is_alive()]
        if going and not all(future.done() for future in self._drawn.values()):
            with background.interrupting():
                wait(self._drawn.values(), timeout=background.PATIENCE)
        for thread in going:
            thread.join(background.PATIENCE)
        if wanted is None or (wanted.done() and wanted.exception() is None):
            return ""
        del self._drawn[after + 1]
        return (
            f"; the rows of step {after + 1} were not finished: a resumed run draws them by the weights of step {after}"
        )

    # --- inside ---------------------------------------------------------------------------------

    def _begin(self, step: int) -> None:
        prompts = self._batch_of(step)
        held = self._engine.hold()
        future: Future[Trace] = Future()

        def work() -> None:
            try:
                future.set_result(self._draw(prompts, held))
            except BaseException as error:  # noqa: BLE001 - raised again by the step that needs the rows
                future.set_exception(error)

        self._drawn[step] = future
        thread = threading.Thread(target=work, name="workbench-ahead", daemon=True)
        self._threads = [one for one in self._threads if one.is_alive()] + [thread]
        thread.start()

    def _draw(self, batch: DataProto, held: Any) -> Trace:
        try:
            with held.drawing():
                *_, trace = phases(self._stages, batch)
            return trace
        finally:
            held.release()

    def _lag(self, trace: Trace, step: int) -> int:
        """Versions between the oldest row and the learner; what is outside the bound is an error of ours."""
        versions = trace.batch["policy_version"]
        if not len(versions):
            return 0
        lag = self._engine.version - int(versions.min())
        if not 0 <= lag <= MOST or int(versions.max()) > self._engine.version:
            raise VersionMismatch(
                message(
                    f"rows of step {step} are not of the weights that they should be of",
                    expected=f"version {self._engine.version}, the learner's, or at most {MOST} older",
                    found=f"versions {int(versions.min())} to {int(versions.max())}",
                    do="nothing may change the weights between two steps; go on from the last checkpoint, resume='auto'",
                )
            )
        return lag


def _marked(trace: Trace, waited: float) -> Trace:
    """What was drawn ahead says so, and how much of it ran beside the step before."""
    first, *others = [replace(one, settings={**one.settings, DRAWN: MOST}) for one in trace.phases]
    overlapped = sum(one.seconds for one in trace.phases) - waited
    first = replace(first, metrics={**first.metrics, "timing_s/overlapped": overlapped})
    return Trace(trace.start, (first, *others))


def loaded(path: Path) -> Trace:
    """A saved trace with every column read: its folder may go."""
    trace = Trace.load(path)
    batches = (trace.start, *(phase.batch for phase in trace))
    held = [columns for batch in batches for columns in (batch.batch, batch.non_tensor_batch)]
    for columns in held:  # batches of a trace share columns: each is read once, and is one object in all of them
        for column in columns.raw().values():
            if isinstance(column, Lazy) and not hasattr(column.read, "cache_info"):
                column.read = functools.cache(column.read)
    for columns in held:
        for name in columns:
            columns[name]
    return trace
