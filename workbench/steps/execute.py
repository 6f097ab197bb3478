"""Runs the stages of a step: in order, with the reward beside other stages, or with the rollout one step ahead.

- `phases` runs one stage after the other and yields the trace so far.
- `Pipeline.streaming_rewards()`: a streaming reward scores rows as the rollout finishes them (`StreamingReward`), and
  stages that do not read the reward, log-probs mostly, run beside it.
- `max_lag=k` of a training job: `runs.streaming` samples groups without end.
- `ahead=1` of a training job: during a step's update `Ahead` samples the next step's rows, with the weights of before.

The trace always looks as if the stages had run one after the other. What runs beside the reward reads nothing of it, so
its numbers are the same; rows sampled ahead are one policy version older, which `policy_version` records. A log-prob stage
that is left to the update (`Pipeline.in_training`) gets the columns of the update's own pass.
"""

from __future__ import annotations

import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from workbench.base import runtime
from workbench.base.errors import SettingError, VersionMismatch, first_line
from workbench.dataproto.core import DataProto
from workbench.dataproto.value import Columns, Lazy
from workbench.engines.protocol import PinnedWeights, Sample, WeightPin
from workbench.rewards.base import BaseReward, row_view
from workbench.rewards.score import Score
from workbench.stages.correction import RolloutCorrection
from workbench.stages.filtering import FilterGroups, Overlong
from workbench.stages.pipeline import Pipeline
from workbench.stages.reward import Reward
from workbench.stages.rollout import Baseline, Rollout
from workbench.stages.stage import Stage
from workbench.stages.targets import DataResponses
from workbench.steps.trace import Phase, Trace, completed, perform

log = logging.getLogger("workbench")

MOST = 1
"""Most steps that rows may be sampled ahead, and most policy versions that they may be behind."""
DRAWN = "drawn_ahead"
"""The setting that marks a trace's phase as done during the update of the step before."""


def phases(pipeline: Pipeline, batch: DataProto | Trace) -> Iterator[Trace]:
    """Run a pipeline on a batch, stage by stage, and yield the trace after each phase, an empty one first.

    Given a trace, only the stages that it lacks are run. An exception raised by a stage carries the trace so far as its
    attribute `trace`.
    """
    trace = batch if isinstance(batch, Trace) else Trace(batch)
    yield trace
    run = _overlapped if pipeline.overlap else _in_order
    done = run(pipeline.in_training()[len(trace) :], trace)
    try:
        for trace in done:
            yield completed(trace) if pipeline.left_out else trace
    except Exception as error:
        error.trace = trace  # type: ignore[attr-defined]
        raise


def _in_order(stages: list[Stage], trace: Trace) -> Iterator[Trace]:
    for stage in stages:
        trace = trace.add(perform(stage, trace.batch))
        yield trace


# --- a reward beside the other stages -----------------------------------------------------------

_SAME_ROWS = ("old_log_prob", "ref_log_prob", "values", "exact_kl")
"""Stages that may run beside a reward: they neither drop nor reorder rows."""


class StreamingReward:
    """Scores rows in a background thread while the rollout still samples others; `finish()` returns all scores in row
    order."""

    def __init__(self, reward: BaseReward) -> None:
        self._reward = reward
        self._arrived: queue.SimpleQueue[tuple[int, Mapping[str, Any]] | None] = queue.SimpleQueue()
        self._scores, _ = runtime.in_thread("workbench-early-reward", self._scored)

    def arrive(self, row: int, columns: Mapping[str, Any], sample: Sample) -> None:
        """Queue a finished row (or episode) of number `row` for scoring, with its columns and sampled response."""
        self._arrived.put((row, row_view(columns, columns["response_text"], sample.ids)))

    def end(self) -> None:
        """Signal that all rows have arrived."""
        self._arrived.put(None)

    def finish(self) -> list[Score]:
        """Wait until all rows are scored and return the scores in row order. Raises what the reward function raised."""
        scores = self._scores.result()
        return [scores[row] for row in sorted(scores)]

    def _scored(self) -> dict[int, Score]:
        scores: dict[int, Score] = {}
        going = True
        while going:
            waiting = [self._arrived.get()]
            while not self._arrived.empty():
                waiting.append(self._arrived.get())
            going = None not in waiting
            if rows := dict(item for item in waiting if item is not None):
                scores.update(zip(rows, self._reward.judged(list(rows.values())), strict=True))
        return scores


def _overlapped(stages: list[Stage], trace: Trace) -> Iterator[Trace]:
    """Run the stages and yield the trace after each phase; a reward runs at the same time as the rollout before it and
    the log-probs after it."""
    with ThreadPoolExecutor(1, thread_name_prefix="workbench-reward") as beside:
        while stages:
            stage = stages.pop(0)
            if isinstance(stage, Rollout) and stages and isinstance(stages[0], Reward) and stages[0].streams:
                reward = stages.pop(0)
                streaming = StreamingReward(reward.function)  # type: ignore[attr-defined]
                try:
                    with stage.telling(streaming.arrive):
                        rolled = perform(stage, trace.batch)
                finally:
                    streaming.end()
                trace = trace.add(rolled)
                yield trace
                scoring = beside.submit(_streamed, reward, streaming, trace.batch)
            elif isinstance(stage, Reward):
                reward = stage
                scoring = beside.submit(perform, reward, trace.batch)
            else:
                trace = trace.add(perform(stage, trace.batch))
                yield trace
                continue
            for grown in _beside(trace, reward, scoring, stages):
                trace = grown
                yield trace


def _streamed(reward: Any, streaming: StreamingReward, batch: DataProto) -> Phase:
    reward.function.check_signature(batch.columns)
    with reward.given(streaming.finish):
        return perform(reward, batch)


def _beside(trace: Trace, reward: Stage, scoring: Future[Phase], stages: list[Stage]) -> Iterator[Trace]:
    """Run stages that do not read the reward while it is being computed; yields the trace with the reward's phase
    first, then with theirs."""
    batch, done = trace.batch, []
    while stages and _independent(stages[0], reward, batch):
        done.append(perform(stages.pop(0), batch))
        batch = done[-1].batch
    scored = scoring.result()
    trace = trace.add(scored)
    yield trace
    columns = scored.delta()
    for phase in done:
        trace = trace.add(replace(phase, batch=phase.batch.union(columns.with_meta(**phase.batch.meta_info))))
        yield trace


def _independent(stage: Stage, reward: Stage, batch: DataProto) -> bool:
    """Whether a stage can run before the reward is known: it reads nothing of the reward, changes no weights and moves
    no rows."""
    ready = all(name in batch and name not in reward.writes and not name.startswith("reward") for name in stage.reads)
    return ready and not stage.updates and stage.name in _SAME_ROWS


# --- a rollout one step ahead -------------------------------------------------------------------


def drawn_stages(pipeline: Pipeline) -> Pipeline:
    """Return the leading stages of a pipeline that can run one step ahead: rollout, reward, filtering, overlong,
    baseline."""
    stages = list(pipeline)
    known = (Rollout, Reward, Overlong, FilterGroups, Baseline)
    count = next((place for place, one in enumerate(stages) if not isinstance(one, known) or one.state()), len(stages))
    return Pipeline(stages[:count], overlap=pipeline.overlap, given=pipeline.given)


def sampler_of(pipeline: Pipeline, setting: str = "ahead=1") -> PinnedWeights:
    """Return the engine of a pipeline's rollout, whose sampler must be able to keep older weights than the learner's.

    Raises `SettingError`, naming `setting`, where it cannot: rows sampled while the weights change would belong to no
    policy version.
    """
    first = next(iter(pipeline))
    engine = first.sampler if isinstance(first, Rollout) and not isinstance(first, DataResponses) else None
    found = f"a pipeline that begins with stage {first.name!r}"
    if getattr(first, "policies", None):
        raise SettingError(f"{setting} with several policies", expected="one policy", do=f"leave out {setting}")
    if isinstance(engine, PinnedWeights):
        if not engine.share_device:
            return engine
        found = "an engine with share_device=True, whose sampler sleeps while the learner works"
    elif engine is not None:
        found = f"{type(engine).__name__}, which samples with the weights that it learns"
    expected = "a pipeline that begins with a rollout by a sampler with separate weights on a separate device"
    do = f"pass an engines.paired(learner, sampler), each with its own model, or leave out {setting}"
    raise SettingError(f"{setting} is not possible with this pipeline", expected=expected, found=found, do=do)


def correction(pipeline: Pipeline) -> str | None:
    """Describe in words how a pipeline corrects for rows sampled with older weights; None where it does not."""
    for stage in pipeline:
        if not isinstance(stage, RolloutCorrection):
            continue
        if stage.bypass_mode:
            return "the sampler's log-probs are the old ones"
        how = stage.correction
        if how.rollout_is is not None and pipeline["update_actor"].settings().get("rollout_is"):
            lower, upper = how.weights
            return f"{how.rollout_is} weights, {f'truncated at {upper}' if lower is None else f'0 outside {lower} to {upper}'}"
        if how.rejections:
            return f"rejection by {', '.join(how.rejections)}"
    return None


class Ahead:
    """Samples the rows of the next step in a background thread while the present step goes on (`ahead=1`)."""

    def __init__(
        self, pipeline: Pipeline, batch_of: Callable[[int], DataProto], *, last: int, pending: Trace | None = None
    ) -> None:
        """`batch_of(step)` returns a step's prompts; nothing is sampled beyond step `last`. `pending` is the trace of
        rows that a checkpoint kept. Raises `SettingError` as `sampler_of` does."""
        self._engine, self._stages = sampler_of(pipeline), drawn_stages(pipeline)
        self._batch_of, self._last = batch_of, last
        self._drawn: dict[int, Future[Trace]] = {}
        self._threads: list[threading.Thread] = []
        if pending is not None and pending.step is not None:
            self._drawn[pending.step] = Future()
            self._drawn[pending.step].set_result(pending)

    def take(self, batch: DataProto) -> Trace:
        """Return the trace of the phases of this batch's step that ran ahead (or run them now), and start the next step's.

        Raises what these stages raised, and `VersionMismatch` where rows are more than one policy version old.
        """
        began = time.perf_counter()
        step = int(batch.meta_info["step"])
        waiting = self._drawn.get(step)
        trace = self._draw(batch, self._engine.hold()) if waiting is None else waiting.result()
        lag = self._lag(trace, step)
        self._drawn = {number: future for number, future in self._drawn.items() if number >= step}
        if step < self._last and step + 1 not in self._drawn:
            self._begin(step + 1)
        if waiting is None:
            return trace
        waited = time.perf_counter() - began
        log.debug("step %d: its rows are %d versions old; waited %.2f s for them", step, lag, waited)
        return _marked(trace, waited)

    def lost(self, step: int) -> Callable[[], None] | None:
        """Return a function that samples this step's rows again, if sampling them has failed; else None.

        The function uses the learner's weights at the time of its call, which must be those from before the last
        update.
        """
        future = self._drawn.get(step)
        if future is None or not future.done() or future.exception() is None:
            return None

        def again() -> None:
            fresh: Future[Trace] = Future()
            fresh.set_result(self._draw(self._batch_of(step), self._engine.hold()))
            self._drawn[step] = fresh

        return again

    def learnt(self, step: int) -> None:
        """Do nothing; it is called after each step's update, and other executors need it."""

    def settle(self, step: int) -> AbstractContextManager[Any]:
        """Wait for the rows of step `step` + 1, so that what follows has the sampler and the reward to itself; the
        context manager that is returned does nothing."""
        self.pending(step)
        return nullcontext()

    def pending(self, after: int) -> Trace | None:
        """Wait for the rows of step `after` + 1 and return their trace; None where none are sampled, or sampling failed."""
        future = self._drawn.get(after + 1)
        error = future.exception() if future is not None else None
        if error is not None:
            log.warning("the rows of step %d are not kept: %s", after + 1, first_line(error))
        return None if future is None or error is not None else future.result()

    def close(self, after: int, patience: float | None = None) -> str:
        """Stop sampling ahead; waits up to `patience` seconds (None: no limit) for the rows of step `after` + 1, which
        a checkpoint then keeps.

        Returns a sentence for the log where those rows were discarded, else an empty text.
        """
        wanted = self._drawn.get(after + 1)
        if wanted is not None:
            wait([wanted], timeout=patience)
        going = [thread for thread in self._threads if thread.is_alive()]
        if going and not all(future.done() for future in self._drawn.values()):
            with runtime.interrupting():
                wait(self._drawn.values(), timeout=runtime.PATIENCE)
        for thread in going:
            thread.join(runtime.PATIENCE)
        if wanted is None or (wanted.done() and wanted.exception() is None):
            return ""
        del self._drawn[after + 1]
        then = f"a resumed run draws them by the weights of step {after}"
        return f"; the rows of step {after + 1} were not finished: {then}"

    # --- inside ---------------------------------------------------------------------------------

    def _begin(self, step: int) -> None:
        prompts, held = self._batch_of(step), self._engine.hold()
        self._drawn[step], thread = runtime.in_thread("workbench-ahead", functools.partial(self._draw, prompts, held))
        self._threads = [one for one in self._threads if one.is_alive()] + [thread]

    def _draw(self, batch: DataProto, held: WeightPin) -> Trace:
        try:
            with held.drawing():
                *_, trace = phases(self._stages, batch)
            return trace
        finally:
            held.release()

    def _lag(self, trace: Trace, step: int) -> int:
        """Return how many policy versions the oldest row is behind the learner. Raises `VersionMismatch` for more than
        `MOST`."""
        versions = trace.batch["policy_version"]
        if not len(versions):
            return 0
        lag = self._engine.version - int(versions.min())
        if not 0 <= lag <= MOST or int(versions.max()) > self._engine.version:
            what = f"rows of step {step} were sampled by other weights than expected"
            expected = f"version {self._engine.version}, the learner's, or at most {MOST} older"
            found = f"versions {int(versions.min())} to {int(versions.max())}"
            do = "change no weights between two steps; resume from the last checkpoint with resume='auto'"
            raise VersionMismatch(what, expected=expected, found=found, do=do)
        return lag


def _marked(trace: Trace, waited: float) -> Trace:
    """Mark the phases of a trace that was sampled ahead, and record the seconds that they ran beside the previous step."""
    first, *others = [replace(one, settings={**one.settings, DRAWN: MOST}) for one in trace.phases]
    overlapped = sum(one.seconds for one in trace.phases) - waited
    first = replace(first, metrics={**first.metrics, "timing_s/overlapped": overlapped})
    return Trace(trace.start, (first, *others))


def loaded(path: Path) -> Trace:
    """Load a saved trace with all its columns into memory, so that its folder may be deleted."""
    trace = read_once(Trace.load(path))
    for columns in _held(trace):
        for name in columns:
            columns[name]
    return trace


def read_once(trace: Trace) -> Trace:
    """Return the same trace, changed so that each column is read from disk at most once and shared by all its batches."""
    for columns in _held(trace):
        for column in columns.raw().values():
            if isinstance(column, Lazy) and not hasattr(column.read, "cache_info"):
                column.read = functools.cache(column.read)
    return trace


def _held(trace: Trace) -> list[Columns]:
    batches = (trace.start, *(phase.batch for phase in trace))
    return [columns for batch in batches for columns in (batch.batch, batch.non_tensor_batch)]
