"""A step whose reward is judged beside the other stages: rows as they are finished, log-probs meanwhile.

The trace looks as if the stages had run one after the other, and the numbers are the same: what runs beside the
reward reads nothing of it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from workbench.dataproto import DataProto
from workbench.engines.protocol import Sample
from workbench.rewards.base import BaseReward, row_view
from workbench.rewards.score import Score
from workbench.stages import Pipeline, Reward, Rollout, Stage
from workbench.trace import Phase, Trace, perform


class Early:
    """Judges rows as they arrive, in a thread of its own; `finish()` gives all records in the rows' order."""

    def __init__(self, reward: BaseReward) -> None:
        self._reward = reward
        self._arrived: queue.SimpleQueue[tuple[int, Mapping[str, Any]] | None] = queue.SimpleQueue()
        self._scores: dict[int, Score] = {}
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="workbench-early-reward", daemon=True)
        self._thread.start()

    def arrive(self, row: int, columns: Mapping[str, Any], sample: Sample) -> None:
        """A row is finished."""
        self._arrived.put((row, row_view(columns, columns["response_text"], sample.ids)))

    def end(self) -> None:
        """No more rows come."""
        self._arrived.put(None)

    def finish(self) -> list[Score]:
        """Wait for the last record. Raises what judging raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return [self._scores[row] for row in sorted(self._scores)]

    def _work(self) -> None:
        try:
            going = True
            while going:
                waiting = [self._arrived.get()]
                while not self._arrived.empty():
                    waiting.append(self._arrived.get())
                going = None not in waiting
                rows = [item for item in waiting if item is not None]
                if rows:
                    self._scores.update(
                        zip([row for row, _ in rows], self._reward.judged([view for _, view in rows]), strict=True)
                    )
        except BaseException as error:  # noqa: BLE001 - raised again by whoever waits for the records
            self._error = error


def phases(pipeline: Pipeline, batch: DataProto | Trace) -> Iterator[Trace]:
    """The trace as it grows, empty at first, a phase at a time, in the pipeline's order; a trace goes on after its
    phases. What a stage raises carries the trace before it as `.trace`."""
    trace = batch if isinstance(batch, Trace) else Trace(batch)
    yield trace
    try:
        for grown in _grown(pipeline, trace):
            trace = grown
            yield trace
    except Exception as error:
        error.trace = trace  # type: ignore[attr-defined]
        raise


def _grown(pipeline: Pipeline, trace: Trace) -> Iterator[Trace]:
    if not pipeline.overlap:
        for stage in list(pipeline)[len(trace) :]:
            trace = trace.add(perform(stage, trace.batch))
            yield trace
        return
    stages = list(pipeline)[len(trace) :]
    with ThreadPoolExecutor(1, thread_name_prefix="workbench-reward") as beside:
        while stages:
            stage = stages.pop(0)
            if isinstance(stage, Rollout) and stages and isinstance(stages[0], Reward) and stages[0].function.streams:
                reward = stages.pop(0)
                early = Early(reward.function)  # type: ignore[attr-defined]
                try:
                    with stage.telling(early.arrive):
                        rolled = perform(stage, trace.batch)
                finally:
                    early.end()
                trace = trace.add(rolled)
                yield trace
                found = beside.submit(_with_early, reward, early, trace.batch)
            elif isinstance(stage, Reward):
                reward = stage
                found = beside.submit(perform, reward, trace.batch)
            else:
                trace = trace.add(perform(stage, trace.batch))
                yield trace
                continue
            for grown in _beside(trace, reward, found, stages):
                trace = grown
                yield trace


def _with_early(reward: Any, early: Early, batch: DataProto) -> Phase:
    reward.function.check_signature(batch.columns)
    with reward.given(early.finish):
        return perform(reward, batch)


def _beside(trace: Trace, reward: Stage, found: Future[Phase], stages: list[Stage]) -> Iterator[Trace]:
    """Stages that need nothing of the reward, while it is judged; then the reward's phase, and theirs after it."""
    batch, done = trace.batch, []
    while stages and _independent(stages[0], reward, batch):
        phase = perform(stages.pop(0), batch)
        done.append(phase)
        batch = phase.batch
    judged = found.result()
    trace = trace.add(judged)
    yield trace
    columns = judged.batch.without(*(name for name in judged.batch.columns if name not in judged.wrote))
    for phase in done:
        trace = trace.add(replace(phase, batch=phase.batch.union(columns.with_meta(**phase.batch.meta_info))))
        yield trace


def _independent(stage: Stage, reward: Stage, batch: DataProto) -> bool:
    """Whether a stage can run before the reward is known: it reads nothing of it, changes no weights, moves no rows."""
    ours = {name for name in stage.reads if name in reward.writes or name.startswith("reward")}
    ready = all(name in batch for name in stage.reads)
    return ready and not ours and not stage.updates and stage.name in _SAME_ROWS


_SAME_ROWS = ("old_log_prob", "ref_log_prob", "values", "exact_kl")
