"""Rollouts as a stream (`train(max_lag=k)`): groups are sampled continuously while the policy learns, none older than k
versions.

Prompts go to the sampler in the data's order. A group whose responses are all finished and scored waits in a buffer; a step
starts as soon as `batch_size` groups wait, the oldest first, wherever they are in the order. After an update the sampler gets
the new weights, and responses under way go on by them (`token_versions`).

The bound is kept by counting. A group that begins by the weights after b updates is learnt from in step b + k + 1 at the
latest, its deadline. A prompt is held back while more groups are out than the steps up to its deadline can take; a step takes
no newer group where an older one could then come too late. Where that holds a step up, `stale` says what is done: `keep` waits
for the older groups, `cancel` ends them and draws their prompts again, by the present weights and the same seeds, once each.

Each prompt of the order is learnt from exactly once. A checkpoint holds the groups that wait, and the numbers of those under
way, which a resumed run draws again.
"""

from __future__ import annotations

import copy
import functools
import inspect
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from workbench.base import runtime
from workbench.base.errors import RunError, VersionMismatch, boundary
from workbench.base.metrics import Count, Max, Mean, Metric, Min, Sum, reduce
from workbench.base.metrics import join as joined_metrics
from workbench.dataproto.core import SESSION, DataProto, is_last
from workbench.dataproto.value import apart
from workbench.engines.paired import Draw, Flow
from workbench.rewards.base import row_views, whole_episodes
from workbench.rewards.score import Score
from workbench.runs.folder import write_json
from workbench.stages.filtering import joined
from workbench.stages.pipeline import Pipeline
from workbench.stages.reward import Reward, of_rows
from workbench.steps.execute import DRAWN, sampler_of
from workbench.steps.trace import Phase, Trace, describe_settings, perform

log = logging.getLogger("workbench")

MOST_GROUPS = 256
"""Most groups that are sampled at the same time, each in a thread."""
TOKEN_VERSIONS = "token_versions"
_KINDS: dict[str, type[Metric]] = {one.__name__: one for one in (Mean, Max, Min, Sum, Count)}


def room(waiting: int, step: int, newest: int, size: int) -> int:
    """Return how many more prompts may begin with the deadline step `newest`, when `waiting` groups are unused before
    step `step`.

    Each step takes `size` groups, so that (newest - step + 1) · size can still be taken in time.

    >>> room(0, step=1, newest=2, size=4), room(8, step=1, newest=2, size=4)
    (8, 0)
    """
    return (newest - step + 1) * size - waiting


def chosen(finished: Sequence[int], waiting: Sequence[int], step: int, size: int) -> list[int] | None:
    """Choose the `size` groups that step `step` takes, those with the earliest deadlines; returns their places in
    `finished`.

    `finished` and `waiting` are deadlines, as step numbers: of the finished groups, and of all groups not yet used.
    Returns None where too few are finished, or where taking these would leave more groups than the steps up to some
    deadline can take.

    >>> chosen([3, 2, 3], waiting=[3, 2, 3, 2], step=1, size=2)
    [1, 0]
    >>> chosen([3, 3], waiting=[3, 3, 1], step=1, size=2) is None
    True
    """
    if len(finished) < size:
        return None
    order = sorted(range(len(finished)), key=lambda place: finished[place])[:size]
    taken = [finished[place] for place in order]
    for deadline in set(waiting):
        left = sum(one <= deadline for one in waiting) - sum(one <= deadline for one in taken)
        if left > (deadline - step) * size:
            return None
    return order


@dataclass(eq=False)
class StreamGroup:
    """One prompt of the data's order in a stream, with its responses, their scores and its metrics."""

    place: int
    """The prompt's number in the data's order, from 0."""
    born: int
    """Number of updates of the weights with which the group began."""
    tries: int
    """How often the group was cancelled before."""
    start: DataProto
    """The prompt, a batch of one row."""
    heals: int = 0
    """Number of losses of workers before the group began."""
    draw: Draw = field(default_factory=Draw)
    batch: DataProto | None = None
    """The sampled rows of the group."""
    scores: Sequence[Score] = ()
    """Scores of the group's rows or episodes, before the reward's policy `on_failure`, which applies to whole steps."""
    seconds: tuple[float, float] = (0.0, 0.0)
    """Seconds of sampling and of scoring."""
    metrics: dict[str, Metric] = field(default_factory=dict)
    """Metrics of the rollout."""


@dataclass(frozen=True)
class Waiting:
    """What a checkpoint holds of a stream: the finished groups that no step has used, and the numbers of the prompts to
    draw again.
    """

    next: int
    """Number, in the data's order, of the next prompt that has not begun."""
    again: Mapping[int, int]
    """Number of a prompt under way → how often it was cancelled."""
    groups: Sequence[StreamGroup]

    def save(self, path: Path) -> None:
        """Write `stream.json` to a new folder, and with it the prompts and rows of the waiting groups, if there are
        any.
        """
        path.mkdir(parents=True)
        records = [
            {
                "place": group.place,
                "born": group.born,
                "uid": str(group.start["uid"][0]),
                "seconds": list(group.seconds),
                "metrics": {
                    key: [type(metric).__name__, *vars(metric).values()] for key, metric in group.metrics.items()
                },
            }
            for group in self.groups
        ]
        write_json(path / "stream.json", {"next": self.next, "again": list(self.again.items()), "groups": records})
        if self.groups:
            _join_prompts([group.start for group in self.groups]).save(path / "start")
            joined(_with_token_versions([_scored(group) for group in self.groups])).save(path / "rows")

    @classmethod
    def load(cls, path: Path) -> Waiting:
        """Read a folder that `save` wrote into memory. Raises `RunError` where the folder holds no stream."""
        if not (path / "stream.json").is_file():
            raise RunError(f"no stream in {path}", found="rows of ahead=1", do="resume with ahead=1, as the run began")
        record, groups = json.loads((path / "stream.json").read_text()), []
        if record["groups"]:
            start, rows = (_load_in_memory(path / name) for name in ("start", "rows"))
            uids, prompts = list(rows["uid"]), list(start["uid"])
            for entry in record["groups"]:
                chosen_rows = torch.tensor([uid == entry["uid"] for uid in uids])
                first = start.select_idxs(torch.tensor([prompts.index(entry["uid"])]))
                metrics = {key: _KINDS[kind](*values) for key, (kind, *values) in entry["metrics"].items()}
                seconds = (float(entry["seconds"][0]), float(entry["seconds"][1]))
                batch = rows.select_idxs(chosen_rows)
                scores = _of_episodes(batch) if "score" in batch else ()
                made = StreamGroup(
                    entry["place"], entry["born"], 0, first, batch=batch.without("score") if scores else batch
                )
                groups.append(replace(made, scores=scores, seconds=seconds, metrics=metrics))
        return cls(record["next"], {int(place): int(tries) for place, tries in record["again"]}, groups)


class Stream:
    """Samples the groups of a training's data order in threads while the policy learns, and gives each step its rows."""

    def __init__(
        self,
        pipeline: Pipeline,
        batch_of: Callable[[int], DataProto],
        *,
        done: int,
        last: int,
        size: int,
        max_lag: int,
        stale: str = "keep",
        pending: Path | None = None,
    ) -> None:
        """Prepare the stream; sampling begins with the first `take`. Raises `SettingError` as `sampler_of` does.

        `batch_of(step)` returns the `size` prompts of a step in the data's order; prompts of steps after `last` are not
        drawn. `done` steps were done before, and `pending` is the folder in which their checkpoint saved the stream.
        """
        self._engine: Any = sampler_of(pipeline, f"max_lag={max_lag}")
        self._rollout, self._reward = streamed(pipeline)
        self._batch_of = functools.lru_cache(maxsize=max_lag + 3)(batch_of)
        self._size, self._last, self._lag, self._stale = size, last, max_lag, stale
        held = Waiting.load(pending) if pending is not None else Waiting(done * size, {}, ())
        self._next, self._again = held.next, dict(held.again)
        self._finished = {one.place: one for one in held.groups}
        self._under_way: dict[int, StreamGroup] = {}
        self._failed: list[tuple[StreamGroup, BaseException]] = []
        self._taken: tuple[int, list[StreamGroup], float, dict[str, float]] = (0, [], 0.0, {})
        self._trace: Trace | None = None
        self._step, self._fresh, self._heals, self._ill = done + 1, done, 0, False
        self._flow: Flow | None = None
        self._turn = threading.Condition()
        self._closed = False
        self.judging: AbstractContextManager[Any] = threading.RLock() if _one_at_a_time(self._reward) else nullcontext()
        """Lock around calls of a reward function that runs in this process, so that only one thread calls it at a time.
        """
        self._counts = {"tokens": 0, "tokens_cancelled": 0, "cancelled": 0}
        self._idle_since: float | None = None
        self._idle = 0.0

    # --- the loop's side ------------------------------------------------------------------------

    def take(self, batch: DataProto) -> Trace:
        """Return the trace of the rollout and the reward of one step, with as many groups as the step's `batch` has
        prompts.

        Waits until they are finished. Called again for the same step, after workers were lost, it returns the same
        rows. Raises what sampling raised, and `VersionMismatch` where a row is older than `max_lag` allows.
        """
        step = int(batch.meta_info["step"])
        if self._taken[0] != step:
            self._taken = self._waited(step)
        if self._trace is None:
            groups, waited, stream_metrics = self._taken[1:]
            self._trace = self._made(batch, sorted(groups, key=lambda one: one.place), waited, dict(stream_metrics))
        self._check(self._trace, step)
        return self._trace

    def _waited(self, step: int) -> tuple[int, list[StreamGroup], float, dict[str, float]]:
        """Wait for the groups of a step, and return (step, groups, seconds waited, the stream's metrics since the step
        before).
        """
        began = time.perf_counter()
        self._open(step)
        with self._turn:
            self._step = step
            self._fill()
            while (groups := self._choose(step)) is None:
                self._turn.wait(0.05)
                runtime.check()
            for one in groups:
                del self._finished[one.place]
            self._step, self._trace = step + 1, None
            counts, self._counts = self._counts, dict.fromkeys(self._counts, 0)
            counts |= {"groups": len(groups), "buffer": len(self._finished), "under_way": len(self._under_way)}
            idle, self._idle = self._idle, 0.0
            waited = time.perf_counter() - began
            stream_metrics = {f"streaming/{name}": float(value) for name, value in counts.items()}
            stream_metrics |= {"timing_s/trainer_wait": waited, "timing_s/sampler_wait": idle}
            return step, groups, waited, stream_metrics

    def learnt(self, step: int) -> None:
        """After a step's update, give the sampler the new weights and let further prompts begin.

        A sampler that has to finish its responses before it can change weights keeps its weights while they are less
        than `max_lag` updates old.
        """
        if step < self._last and self._flow is not None and (not self._flow.waits or step - self._fresh >= self._lag):
            self._renew(step)

    def settle(self, step: int) -> AbstractContextManager[Any]:
        """Give the sampler the weights after `step` for a validation; within the returned context manager no group is
        scored.
        """
        if self._flow is not None:
            self._renew(step)
        return self.judging

    def lost(self, step: int) -> None:
        """Called after workers were lost. Does nothing here: groups that failed begin anew in the next `take`."""

    def pending(self, after: int) -> Waiting:
        """Return what a checkpoint after step `after` has to hold of the stream."""
        with self._turn:
            taken = self._taken[1] if self._taken[0] == after + 1 else []
            failed = {group.place: group.tries for group, _ in self._failed}
            again = self._again | failed | {place: one.tries for place, one in self._under_way.items()}
            late = {place: one.tries for place, one in self._finished.items() if one.born > after}  # of weights undone
            kept = [one for one in self._finished.values() if one.place not in late]
            return Waiting(self._next, again | late, [*kept, *taken])

    def close(self, after: int = 0, patience: float | None = None) -> str:
        """End sampling; the prompts under way stay noted for `pending`. May be called twice. The arguments are not
        used.
        """
        with self._turn:
            self._closed = True
            for group in self._under_way.values():
                group.draw.cancel()
            self._turn.wait_for(lambda: not any(one.draw.tasks for one in self._under_way.values()), 1.0)
        if self._flow is not None:
            self._flow.close()
            self._flow = None
        return ""

    # --- inside ---------------------------------------------------------------------------------

    def _open(self, step: int) -> None:
        """Connect to the sampler before the first step; after a loss of workers, send it the learner's weights again."""
        if self._flow is None:
            self._flow = self._engine.flow(self._size * (self._rollout.group_size + self._rollout.greedy_baseline))
            self._fresh = step - 1
        elif self._ill:
            self._flow.renew(restart=True)
            self._fresh, self._ill = step - 1, False

    def _renew(self, step: int) -> None:
        if self._fresh < step:
            assert self._flow is not None
            self._flow.renew()
            with self._turn:
                self._fresh = step
                self._fill()

    def _fill(self) -> None:
        """Begin as many prompts as the lag allows: first those to be drawn again, then the next ones in the data's
        order.
        """
        if self._closed:
            return
        free = MOST_GROUPS - len(self._under_way)
        for place in sorted(self._again)[: max(free, 0)]:
            self._begin(place, self._again.pop(place))
            free -= 1
        out = len(self._under_way) + len(self._finished) + len(self._failed) + len(self._again)
        newest = self._fresh + self._lag + 1
        more = min(room(out, self._step, newest, self._size), free, self._last * self._size - self._next)
        for place in range(self._next, self._next + max(more, 0)):
            self._begin(place, 0)
            self._next = place + 1
        self._watch_idle()

    def _begin(self, place: int, tries: int) -> None:
        part, row = divmod(place, self._size)
        start = self._batch_of(part + 1).select_idxs(torch.tensor([row]))
        group = StreamGroup(place, self._fresh, tries, start, heals=self._heals)
        self._under_way[place] = group
        runtime.in_thread("workbench-stream", runtime.releasing_team(functools.partial(self._drawn, group)))

    def _watch_idle(self) -> None:
        """Count the seconds in which the sampler has nothing to do although steps are still to come."""
        now = time.perf_counter()
        if self._idle_since is not None:
            self._idle += now - self._idle_since
        self._idle_since = None if self._under_way or self._next >= self._last * self._size else now

    def _drawn(self, group: StreamGroup) -> None:
        """In a thread: sample the responses of one group, score them, and put the group among the finished or the
        failed ones.
        """
        error: BaseException | None = None
        try:
            assert self._flow is not None
            with self._flow.drawing(group.draw):
                phase = perform(self._rollout, group.start, group.metrics)
                began = time.perf_counter()
                if self._reward is not None:
                    group.scores = self._judged(self._reward, phase.batch)
            group.batch, group.seconds = phase.batch, (phase.seconds, time.perf_counter() - began)
        except BaseException as raised:  # noqa: BLE001 - raised again in the step that needs the rows
            error = raised
        with self._turn:
            self._counts["tokens"] += group.draw.tokens
            if self._under_way.get(group.place) is not group:  # it was cancelled, and begun anew
                self._counts["tokens_cancelled"] += group.draw.tokens
                return
            del self._under_way[group.place]
            if error is None:
                self._finished[group.place] = group
            elif self._closed or group.heals < self._heals:
                self._again[group.place] = group.tries
            else:
                self._failed.append((group, error))
            self._fill()
            self._turn.notify_all()

    def _judged(self, reward: Reward, batch: DataProto) -> list[Score]:
        """Score one group's rows or, for a reward of whole episodes, its episodes."""
        function, rows = reward.function, whole_episodes(batch) if reward.sessions else batch
        with self.judging, boundary(f"stage {reward.name!r}"):
            function.check_signature(rows.columns)
            return function.judged(row_views(rows))

    def _choose(self, step: int) -> list[StreamGroup] | None:
        """Choose the groups that a step takes, or return None while it has to wait. With `stale="cancel"` it cancels
        old groups that hold the step up. Raises the error of a group that failed.
        """
        if self._failed:
            error = self._failed[0][1]
            self._again |= {group.place: group.tries for group, _ in self._failed}
            self._failed, self._ill = [], True
            self._heals += 1
            raise error
        finished = list(self._finished.values())
        while True:
            out = [self._deadline(member) for member in (*finished, *self._under_way.values())]
            out += [self._fresh + self._lag + 1] * len(self._again)
            order = chosen([self._deadline(member) for member in finished], out, step, self._size)
            if order is not None:
                return [finished[place] for place in order]
            under_way = self._under_way.values()
            old = [member for member in under_way if not member.tries and member.born < self._fresh]
            if self._stale == "keep" or len(finished) < self._size or not old:
                return None
            oldest = min(old, key=lambda member: (member.born, member.place))
            oldest.draw.cancel()
            self._counts["cancelled"] += 1
            self._begin(oldest.place, oldest.tries + 1)

    def _deadline(self, group: StreamGroup) -> int:
        return group.born + self._lag + 1

    def _made(
        self, batch: DataProto, groups: list[StreamGroup], waited: float, stale_metrics: dict[str, float]
    ) -> Trace:
        """Build the trace of a step's rollout and reward from its groups, as if the step had sampled them itself."""
        meta = {"step": int(batch.meta_info["step"]), "epoch": batch.meta_info["epoch"]}
        start = _signed(_join_prompts([group.start for group in groups]).with_meta(**meta), meta["step"])
        parts = [_batch(group) for group in groups]
        rolled = _signed(joined(_with_token_versions(_renumbered(parts))).with_meta(**meta), meta["step"])
        rows = torch.arange(len(groups)).repeat_interleave(torch.tensor([len(part) for part in parts]))
        wrote = tuple(name for name in rolled.columns if name in self._rollout.writes or name not in start)
        settings, source = describe_settings(self._rollout)
        sampling, judging = (max(group.seconds[part] for group in groups) for part in (0, 1))
        sampling = max(sampling, waited - judging)
        stale_metrics |= {"timing_s/overlapped": sampling + judging - waited}
        metrics = reduce([joined_metrics(group.metrics for group in groups)]) | _version_metrics(rolled) | stale_metrics
        marked = {**settings, DRAWN: self._lag}
        what: dict[str, Any] = {"wrote": wrote, "metrics": metrics, "settings": marked, "source": source, "rows": rows}
        trace = Trace(start, (Phase(stage=self._rollout.name, batch=rolled, seconds=sampling, **what),))
        if self._reward is None:
            return trace
        reward = copy.copy(self._reward)  # the stage itself scores other groups meanwhile
        with reward.given(lambda: [score for group in groups for score in group.scores]):
            phase = perform(reward, rolled)
        return trace.add(replace(phase, seconds=judging, settings={**phase.settings, DRAWN: self._lag}))

    def _check(self, trace: Trace, step: int) -> None:
        versions, mine = trace.batch["policy_version"], int(self._engine.version)
        if len(versions) and not 0 <= mine - int(versions.min()) <= self._lag:
            what = f"rows of step {step} are older than max_lag={self._lag} allows"
            found = f"version {int(versions.min())}, where the learner has {mine}"
            raise VersionMismatch(what, expected=f"at most {self._lag} versions old", found=found)


def streamed(pipeline: Pipeline) -> tuple[Any, Reward | None]:
    """Return the stages of a pipeline that run group by group: the rollout, and the reward after it unless that scores
    whole batches.
    """
    stages = list(pipeline)
    reward = stages[1] if len(stages) > 1 and isinstance(stages[1], Reward) else None
    if reward is not None and getattr(reward.function, "per", "row") == "batch":
        reward = None
    return stages[0], reward


def _one_at_a_time(reward: Reward | None) -> bool:
    """Return whether a reward is a plain function of this process that is not async, so that two threads must not call
    it at once.
    """
    function = None if reward is None else reward.function
    return bool(getattr(function, "in_process", False)) and not inspect.iscoroutinefunction(
        getattr(function, "function", None)
    )


def _batch(group: StreamGroup) -> DataProto:
    assert group.batch is not None
    return group.batch


def _scored(group: StreamGroup) -> DataProto:
    """Return a group's rows with their scores as a column `score`."""
    batch = _batch(group)
    each = group.scores if len(group.scores) == len(batch) else of_rows(batch, group.scores)
    return batch.with_columns({"score": list(each)}) if group.scores else batch


def _of_episodes(batch: DataProto) -> list[Score]:
    """Return one score for each episode of a batch; every row of an episode carries the episode's score."""
    return [score for score, last in zip(batch["score"], is_last(batch).tolist(), strict=True) if last]


def _load_in_memory(folder: Path) -> DataProto:
    """Load a saved batch with all its columns in memory."""
    batch = DataProto.load(folder)
    return DataProto(*apart({name: batch[name] for name in batch.columns}), batch.meta_info, origins=batch.origins)


def _join_prompts(starts: Sequence[DataProto]) -> DataProto:
    """Join prompts of several steps of the data's order into one batch, with the `meta_info` of the first."""
    return DataProto.concat([one.with_meta(**starts[0].meta_info) for one in starts])


def _with_token_versions(parts: Sequence[DataProto]) -> list[DataProto]:
    """Give every batch the column `token_versions`, so that the batches can be joined; it defaults to the row's
    `policy_version`.
    """
    return [
        part
        if TOKEN_VERSIONS in part
        else part.with_columns({TOKEN_VERSIONS: part["policy_version"][:, None] * _response_tokens(part)})
        for part in parts
    ]


def _response_tokens(batch: DataProto) -> torch.Tensor:
    """Return [B, T] int64: 1 on the tokens of the responses, 0 on padding."""
    return batch["attention_mask"][:, -batch["responses"].shape[1] :]


def _renumbered(parts: Sequence[DataProto]) -> list[DataProto]:
    """Renumber the episodes of several batches so that numbers stay unique when the batches are joined."""
    if not any(SESSION in part for part in parts):
        return list(parts)
    renumbered, first = [], 0
    for part in parts:
        own = list(part[SESSION]) if SESSION in part else list(range(len(part)))
        renumbered.append(part.with_columns({SESSION: [first + one for one in own]}))
        first += max(own, default=-1) + 1
    return renumbered


def _signed(batch: DataProto, step: int) -> DataProto:
    """Return the batch with its columns' origins set to this step and to the newest weights that wrote a token."""
    newest = int(batch["policy_version"].max()) if "policy_version" in batch else None
    if TOKEN_VERSIONS in batch:
        newest = int(batch[TOKEN_VERSIONS].max())
    origins = {
        name: replace(
            one, step=None if one.step is None else step, policy_version=None if one.policy_version is None else newest
        )
        for name, one in batch.origins.items()
    }
    return DataProto(*apart({name: batch[name] for name in batch.columns}), batch.meta_info, origins=origins)


def _version_metrics(batch: DataProto) -> dict[str, float]:
    """Compute `streaming/several_versions`: the share of rows whose tokens were written by weights of several versions."""
    own, versions = _response_tokens(batch).bool(), batch[TOKEN_VERSIONS]
    moved = ((versions != batch["policy_version"][:, None]) & own).any(-1)
    return {"streaming/several_versions": float(moved.double().mean())} if len(batch) else {}
