"""The Stepper runs one batch through a pipeline a phase at a time: go back, change one thing, run on, compare.

s = Stepper(pipeline, rows.batch(8)).run(until="advantage")
t = s.fork().back(to="reward").replace("reward", other_reward).run(until="advantage")
s.compare(t)
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from workbench.agents.stepping import EpisodeStepper, Tree, only_sequence
from workbench.base.config import require, source_of
from workbench.base.errors import DataError, PipelineError, describe
from workbench.base.memory import forget_last_error
from workbench.base.metrics import reduce
from workbench.base.shown import Shown
from workbench.dataproto.core import DataProto
from workbench.dataproto.same import unchanged
from workbench.engines.protocol import Losable, Stateful
from workbench.stages.episodes import EpisodeRollout
from workbench.stages.pipeline import Pipeline
from workbench.stages.reward import Reward
from workbench.stages.stage import Stage, used
from workbench.steps.compare import Comparison, compare
from workbench.steps.snapshots import Price, Snapshots, SnapshotSettings
from workbench.steps.trace import Phase, Trace, describe_settings, perform
from workbench.steps.what_if import WhatIf, what_if


def states(learners: Mapping[str, Any]) -> dict[str, str]:
    """Role → the learner's present `state_id`."""
    return {role: learner.state_id for role, learner in learners.items()}


@dataclass(frozen=True)
class StepState:
    """A stepper's state before a phase: each role's weights by `state_id`, each stage's controllers by value."""

    weights: dict[str, str]
    controllers: dict[str, dict[str, float]]


@dataclass(frozen=True)
class Done:
    """A phase that has run and may be reused: its stage, the batch it read, and the weights (`state_id`) it used."""

    stage: Stage
    before: DataProto
    weights: tuple[str, ...]
    phase: Phase


class Stepper(Shown):
    """Runs one batch through a pipeline, one phase at a time. Most methods return a stepper, so that calls chain.

    Forks share the engines: before a stage runs, its stepper's own weights are restored. After `back`,
    a stage whose input columns have not changed is not run again, and its outputs are reused: rollout
    and log-probs after a change of reward or estimator.

    Before an update the weights are kept, to go back to. What that takes in memory is said before, in the repr and the log;
    `stepper.snapshots` lists what is kept. With a local engine weights as loaded cost nothing, and LoRA's adapters little.

    Args:
        pipeline: a `Pipeline`, or a list of stages, of which the first may read any column of the batch: a batch that was made
            by hand is stepped without a model by `Stepper([Advantage(functional.grpo)], batch)`.
        batch: the prompts of one step: `rows.batch(8)`.
        settings: of `SnapshotSettings`. `snapshots`: where weights are kept: `"memory"`, `"disk"`, or `"replay"` (the updates
            since an earlier state are done again, bit for bit: no copies, but the time of those updates); by default copies
            of what is small beside the free memory, and replay of the rest. `keep_snapshots=4`: most states of a learner;
            `snapshot_memory`, `snapshot_disk`: most GiB of all of them; `snapshot_folder`: where those on disk go.

    Raises `OutOfMemory` before an update whose weights cannot be kept.
    """

    _keeper: type[Snapshots] = Snapshots

    def __init__(self, pipeline: Pipeline | Sequence[Stage], batch: DataProto, **settings: Any) -> None:
        if not isinstance(batch, DataProto):
            do = "take one of rows: wb.rows(…).batch(8)"
            raise DataError("batch of a stepper", expected="a DataProto", found=describe(batch), do=do)
        self._pipeline = pipeline if isinstance(pipeline, Pipeline) else Pipeline(pipeline, given=batch.columns)
        self._pipeline.check(batch)
        self._trace = Trace(batch)
        self._snapshots = self._keeper(SnapshotSettings.from_parameters(settings))
        self._snapshots.shared_with(self)
        self._standings = [self._standing()]
        self._done: dict[str, Done] = {}

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline with all replacements so far, which `train` can run."""
        return self._pipeline

    @property
    def trace(self) -> Trace:
        """The record of the phases that have run, in order: batch, metrics and seconds after each."""
        return self._trace

    @property
    def batch(self) -> DataProto:
        """The batch after the last phase."""
        return self._trace.batch

    @property
    def position(self) -> int:
        """How many phases have run."""
        return len(self._trace)

    @property
    def next_stage(self) -> str | None:
        """The stage that `next` will run; None after the last."""
        return self._pipeline.names[self.position] if self.position < len(self._pipeline) else None

    @property
    def snapshots(self) -> Snapshots:
        """The weights that this stepper and its forks can go back to, and what they take."""
        return self._snapshots

    def wanted_states(self) -> set[str]:
        """The `state_id` of all weights that this stepper can go back to."""
        return {state for standing in self._standings for state in standing.weights.values()}

    def prices(self) -> dict[str, Price]:
        """What keeping the weights before the next phase takes, where it is an update, by role."""
        stage = self._pipeline[self.position] if self.next_stage is not None else None
        updated = stage.learners() if stage is not None and stage.updates else ()
        roles = self._pipeline.learners().items()
        return {
            role: self._snapshots.price(one, self._tokens())
            for role, one in roles
            if any(one is each for each in updated)
        }

    # --- forwards -------------------------------------------------------------------------

    def next(self) -> Stepper:
        """Run the next phase. Raises `PipelineError` where all phases have run."""
        if self.next_stage is None:
            found = f"all {len(self._pipeline)} phases have run"
            do = "go back with back(to=…), or make a Stepper of the next batch: rows.batch(n, step=2)"
            raise PipelineError("no next phase: this step is over", found=found, do=do)
        stage = self._pipeline[self.position]
        forget_last_error()  # an interrupted cell holds its locals, until here
        self._align()
        gradients = torch.is_grad_enabled()
        try:
            if (phase := self._reusable(stage)) is None:
                for learner in stage.learners() if stage.updates else ():
                    self._snapshots.take(learner, stage.name.removeprefix("update_"), self._tokens())
                phase = perform(stage, self.batch)
                if not stage.updates:
                    self._done[stage.name] = Done(stage, self.batch, self._weights(stage), phase)
            trace, standings = self._trace.add(phase), [*self._standings, self._standing()]
            # one statement without a call: an interrupt comes before both or after both
            self._trace, self._standings = trace, standings
        except BaseException:
            torch.set_grad_enabled(gradients)  # an interrupt at the end of a `no_grad` leaves them off
            # an update that stopped half-way has changed weights and controllers; workers that died are started again
            # when they are needed, not while their error waits to be raised
            self._align(lost=False)
            raise
        return self

    def run(self, until: str | None = None) -> Stepper:
        """Run the next phases up to and including `until`; without it, to the end of the step."""
        last = len(self._pipeline) if until is None else self._pipeline.index(until) + 1
        while self.position < last:
            self.next()
        return self

    def from_trace(self, trace: Trace) -> Stepper:
        """Continue from a trace of this batch whose phases ran elsewhere (rows that were sampled one step ahead).

        After `back` they are reused, as if this stepper had run them. Raises `PipelineError` for phases of other stages.
        """
        if trace.names != self._pipeline.names[: len(trace)]:
            expected, found = (", ".join(names) for names in (self._pipeline.names, trace.names))
            raise PipelineError("from_trace got phases of another pipeline", expected=expected, found=found)
        for stage, phase in zip(self._pipeline, trace, strict=False):
            self._done[stage.name] = Done(stage, trace.before(stage.name), self._weights(stage), phase)
        self._trace, self._standings = trace, [self._standings[0]] * (len(trace) + 1)
        return self

    # --- backwards ------------------------------------------------------------------------

    def back(self, to: str | None = None) -> Stepper:
        """Go back to before the phase `to` (without it: before the last one that ran).

        Weights, optimizer and controllers are restored to that moment. Raises `PipelineError` where `to` has not run yet.
        """
        position = self._pipeline.index(to) if to is not None else self.position - 1
        if not 0 <= position <= self.position:
            what, ran = f"cannot go back to {to or 'an earlier phase'}", ", ".join(self._trace.names) or "none has run"
            raise PipelineError(what, expected=f"a phase that has run ({ran})", do="use run(until=…) to go forwards")
        self._stand(position)
        self._align()
        return self

    def _stand(self, position: int) -> None:
        self._trace = self._trace.first(position)
        self._standings = self._standings[: position + 1]

    # --- what if --------------------------------------------------------------------------

    def replace(self, name: str, other: Any = None, **settings: Any) -> Stepper:
        """Replace a stage that has not run yet by another one, or give it another function or other settings.

        `s.back(to="reward").replace("reward", mine)`, `s.back().replace("advantage", kl_type="k3")`,
        `s.replace("update_actor", clip_ratio_high=0.28)`, `s.back(to="rollout").replace("rollout", temperature=0.7)`.

        Raises `PipelineError` where that phase has run already: go back first.
        """
        position = self._pipeline.index(name)
        if position < self.position:
            raise PipelineError(f"phase {name!r} has run already", do=f"back(to={name!r}).replace({name!r}, …)")
        self._pipeline = self._pipeline.replace(name, other, **settings)
        self._pipeline.check(self._trace.start)
        return self

    def fork(self) -> Stepper:
        """Make another stepper at the same position, which shares the batch, the weights and the snapshots."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin._standings = list(self._standings)
        twin._done = dict(self._done)
        self._snapshots.shared_with(twin)
        return twin

    def compare(self, other: Stepper | Trace) -> Comparison:
        """Compare this step with another: columns and metrics that differ, and the rows that changed most."""
        return compare(self._trace, other.trace if isinstance(other, Stepper) else other)

    def what_if(self, *, updates: int = 4, probe: Any = None, **changes: Any) -> WhatIf:
        """Compare the update on this batch with one under another loss, advantage estimator, set of rows or mask.

        `s.what_if(clip_ratio_high=0.28, updates=4, probe=eval_rows)`: see `workbench.what_if` for what can be changed.
        Both start from the weights before the update; afterwards the engines have again what they had, and the stepper stays
        where it is.
        """
        if self.position > self._pipeline.index("update_actor"):
            with self._lent():
                return self.fork().back(to="update_actor").what_if(updates=updates, probe=probe, **changes)
        self._align()
        return what_if(self._pipeline, self.batch, updates=updates, probe=probe, **changes)

    # --- episodes -------------------------------------------------------------------------

    def episode(self, row: int) -> EpisodeStepper:
        """Return an `EpisodeStepper` on one row's episode, to run its turns, go back, or write a turn by hand.

        After the rollout it stands at the end of the sampled episode, before the rollout at the first turn. This stepper
        stays where it is; model turns are sampled with the rollout's weights, and the present ones are restored afterwards.
        Raises `PipelineError` where the rollout has no agent, and `IndexError` where the batch has no such row.
        """
        stage, fork = self._agents(), self.fork()
        if stage.name not in self._trace.names:
            return stage.episode(self.batch, row, lent=fork._lent)
        fork._stand(self._pipeline.index(stage.name))
        return stage.episode(fork.batch, row, recorded=self._trace[stage.name].batch, lent=fork._lent)

    def with_episodes(self, *episodes: EpisodeStepper) -> Stepper:
        """Make a fork after the rollout with these episodes in place of the sampled ones of their rows. An episode of more or
        fewer sequences than it had moves the rows behind it.

        `t = s.with_episodes(s.episode(3).replace(1, "41").run()).run(); s.compare(t)`. Raises `PipelineError` before the
        rollout, for an episode that is not over, and for one of another batch.
        """
        stage = self._agents()
        if stage.name not in self._trace.names:
            raise PipelineError("no episodes yet: the rollout has not run", do=f"run(until={stage.name!r}) first")
        phase, before = self._trace[stage.name], self._trace.before(stage.name)
        numbers = [one.number for one in episodes if isinstance(one, EpisodeStepper)]
        if len(set(numbers)) < len(episodes):
            expected = "episodes as s.episode(row) returns them, at most one for each row (or episode)"
            raise PipelineError("arguments of with_episodes", expected=expected, found=episodes)
        for one in episodes:
            what = f"the episode of row {one.row}"
            if one.next_role is not None:
                raise PipelineError(f"{what} is not over", found=f"{one.next_role} turn next", do="run() it first")
            if one.row >= len(phase.batch) or one.uid != phase.batch["uid"][one.row]:
                raise PipelineError(f"{what} is of another batch", do=f"make it from this stepper: episode({one.row})")
        outcome = stage.rewritten(before, phase.batch, {one.number: one.outputs for one in episodes})
        settings = {**phase.settings, "edited_rows": ", ".join(str(one.row) for one in episodes)}
        metrics = {**phase.metrics, **reduce([outcome.metrics])}
        changed = replace(phase, batch=outcome.batch, metrics=metrics, settings=settings, rows=outcome.rows)
        position = self._trace.names.index(stage.name)
        return self.fork().back(to=stage.name).from_trace(self._trace.first(position).add(changed))

    def branch(
        self,
        row: int | EpisodeStepper,
        turn: int | None = None,
        n: int = 8,
        *,
        turns: Sequence[int] | str = (),
        reward: Any = None,
    ) -> Tree:
        """Draw `n` continuations of an episode from a turn, or from each of several, score them, and return the `Tree`.

        How much did that call help? `s.branch(3, turns="all").credit()` has the value before and after each turn of row 3's
        episode, and the difference, with standard errors. Turn `turn` is the first that is drawn again, with other seeds; at a
        tool's or user's turn these answer once more and the model's next turn is the first. Turns before are shared; tools are
        brought to their state by the earlier calls. This stepper stays where it is.

        Args:
            row: number of the row in the rollout's output, or an episode that `episode` returned, run to its end.
            turn: number of the turn; None: the first, unless `turns` are given.
            n: continuations of each turn.
            turns: several turns, or `"all"`: every turn of the model.
            reward: scores the continuations; None: the pipeline's reward. Rows that it cannot score leave the means.

        Raises `PipelineError` where the rollout has no agent or a turn is not there, `SettingError` for an agent that cannot be
        stepped.

        Example:
            >>> s.branch(0, turn=2, n=8)  # doctest: +SKIP
        """
        recorded = row if isinstance(row, EpisodeStepper) else self.episode(row)
        if recorded.next_role is not None:
            if recorded is row:
                what, found = "this episode is not over", f"{recorded.next_role} turn next"
                raise PipelineError(what, found=found, do="run() it first")
            recorded.run()
        model = [place for place, one in enumerate(recorded.turns) if one.role == "assistant"]
        if isinstance(turns, str):
            require(turns == "all", "turns", expected="numbers of turns, or 'all'", found=turns)
            turns = model
        chosen = [*turns, *([turn] if turn is not None else [])] or [0]
        drawn = {one: recorded.branch(one, n) for one in dict.fromkeys(chosen)}
        outputs = [
            (only_sequence(one.outputs),)
            for one in (recorded, *(one for place in sorted(drawn) for one in drawn[place]))
        ]
        stage = self._pipeline["reward"] if reward is None else Reward(reward)
        return Tree.of(recorded, drawn, stage(recorded.batch_of(outputs)).batch)

    def _agents(self) -> EpisodeRollout:
        for stage in self._pipeline:
            if isinstance(stage, EpisodeRollout):
                return stage
        found, do = None, "pass agent=… to the recipe that makes the pipeline"
        for stage in self._pipeline:
            if "turns" in stage.writes:
                found = f"recorded episodes of stage {stage.name!r}, whose agent is not in this process"
                do = f"give the agent: back(to={stage.name!r}).replace({stage.name!r}, agent=…)"
        what = "this pipeline has no episodes that can be stepped"
        raise PipelineError(what, expected="a rollout with an agent", found=found, do=do)

    # --- inside ---------------------------------------------------------------------------

    def _tokens(self) -> int:
        """Tokens of the batch, padding included."""
        return int(self.batch["input_ids"].numel()) if "input_ids" in self.batch else 0

    def _standing(self) -> StepState:
        return StepState(states(self._pipeline.learners()), self._pipeline.state())

    def _align(self, *, lost: bool = True) -> None:
        """Restore the weights and controllers of this position; `lost=False` leaves learners out whose workers died."""
        standing = self._standings[-1]
        for role, learner in self._pipeline.learners().items():
            if role in standing.weights and (lost or not (isinstance(learner, Losable) and learner.lost)):
                self._snapshots.align(role, learner, standing.weights[role])
        for name, values in standing.controllers.items():
            if self._pipeline[name].state().keys() == values.keys():
                self._pipeline[name].load_state(values)

    @contextmanager
    def _lent(self) -> Iterator[None]:
        """Inside, the weights of this position are in the engines; after it those that were there before."""
        learners = self._pipeline.learners()
        present = states(learners)
        with self._snapshots.lending(present):
            try:
                for role, state in self._standings[-1].weights.items():
                    self._snapshots.align(role, learners[role], state)
                yield
            finally:
                for role, state in present.items():
                    self._snapshots.align(role, learners[role], state)

    @staticmethod
    def _weights(stage: Stage) -> tuple[str, ...]:
        return tuple(one.state_id if isinstance(one, Stateful) else "" for one in stage.learners())

    def _reusable(self, stage: Stage) -> Phase | None:
        """What the stage would write, where nothing that it reads has changed since it last ran here.

        A stage with a controller is always run: its controller must see the batch.
        """
        done = self._done.get(stage.name)
        if done is None or done.stage is not stage or stage.state() or done.weights != self._weights(stage):
            return None
        if done.phase.source != describe_settings(stage)[1]:  # a helper that it calls was defined anew
            return None
        if not all(
            unchanged(name, done.before, self.batch) for name in {*used(stage, done.before), *used(stage, self.batch)}
        ):
            return None
        batch = done.phase.batch if done.phase.rows is not None else done.phase.written_into(self.batch)
        return replace(done.phase, batch=batch, seconds=0.0, reused=True)


# --- cells that have changed since -----------------------------------------------------------------

_DEPTH = 5


def outdated(pipeline: Pipeline) -> list[str]:
    """List, as sentences, the stages made with a function or class that a notebook cell has redefined since.

    Checked are each stage's class and the functions and objects among its settings, down into rewards and their parts.
    A cell that was run again unchanged, or whose name is gone, is not reported.
    """
    found = []
    for stage in pipeline:
        if _redefined(type(stage)):
            name = type(stage).__qualname__
            do = f"make a new {name}(…) and replace({stage.name!r}, …) with it"
            found.append(f"{stage.name} is of an earlier definition of {name}: {do}")
        settings = tuple(stage.settings().values())
        # a function that the stage is built around can replace it; a part of something needs that made anew
        around = list(_within(settings, 3))
        for one in filter(_redefined, _within(settings, _DEPTH + 1)):
            name = one.__qualname__
            by = name if inspect.isfunction(one) and any(each is one for each in around) else "…"
            do = f"replace({stage.name!r}, {by}) uses the new one"
            found.append(f"{stage.name} was made with an earlier definition of {name}: {do}")
    return list(dict.fromkeys(found))


def _within(value: Any, depth: int) -> Iterator[Any]:
    """Functions and classes of `__main__` in a value: itself, what a partial or method holds, members, attributes."""
    if depth == 0 or value is None or isinstance(value, str | int | float):
        return
    if not (inspect.isfunction(value) or inspect.isclass(value)):
        for one in _inner(value):
            yield from _within(one, depth - 1)
    elif value.__module__ == "__main__":
        yield value


def _inner(value: Any) -> Iterable[Any]:
    if isinstance(value, functools.partial):
        return value.func, *value.args, *value.keywords.values()
    if inspect.ismethod(value):
        return (value.__self__,)
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, list | tuple):
        return value
    kind = type(value)
    own = kind.__module__ == "__main__"
    members = getattr(value, "__dict__", {}).values() if own or kind.__module__.startswith("workbench.") else ()
    return *((kind,) * own), *members


def _redefined(held: Any) -> bool:
    """Whether `__main__` now has something with another source text under this name."""
    if held.__module__ != "__main__":
        return False
    now: Any = sys.modules["__main__"]
    for part in held.__qualname__.split("."):
        now = getattr(now, part, None)  # one that was local to a function has no name to be found by
    if now is None or now is held:
        return False
    # a decorator of ours may have put an object around it: what counts is the function inside
    named = [one for one in _within(now, _DEPTH) if one.__qualname__ == held.__qualname__]
    if not named or any(one is held for one in named):
        return False
    text = source_of(held)
    return text is None or all(source_of(one) != text for one in named)
