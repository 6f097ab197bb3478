"""The Stepper: one batch through one phase at a time; back, change one thing, run on, compare.

s = Stepper(pipeline, rows.batch(8)).run(until="advantage")
t = s.fork().back(to="reward").replace("reward", other_reward).run(until="advantage")
s.compare(t)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from workbench.agents import EpisodeStepper
from workbench.compare import Comparison, compare
from workbench.dataproto import DataProto
from workbench.errors import PipelineError, message
from workbench.memory import forget_last_error
from workbench.metrics import reduce
from workbench.snapshots import Snapshots, states
from workbench.stages import EpisodeRollout, Pipeline, Stage
from workbench.trace import Phase, Trace, perform, unchanged
from workbench.what_if import WhatIf, what_if


@dataclass(frozen=True)
class Stood:
    """Where a stepper stood before a phase: weights by name, controllers by value."""

    weights: dict[str, str]
    controllers: dict[str, dict[str, float]]


@dataclass(frozen=True)
class Done:
    """A phase that may be used again: the very stage, the batch it read, and the weights it read it with."""

    stage: Stage
    before: DataProto
    weights: tuple[str, ...]
    phase: Phase


class Stepper:
    """Steps one batch through a pipeline. Every method returns the stepper, so that calls chain.

    A stepper owns a policy version: forks share weights until one of them updates, and a stage that
    runs at another version gets its own weights back first. A stage whose reads have not changed is
    not run again after `back`: rollouts and log-probs survive a change of reward or estimator.
    """

    def __init__(self, pipeline: Pipeline | Sequence[Stage], batch: DataProto) -> None:
        self._pipeline = pipeline if isinstance(pipeline, Pipeline) else Pipeline(pipeline)
        self._pipeline.check(batch)
        self._trace = Trace(batch)
        self._snapshots = Snapshots()
        self._standings = [self._standing()]
        self._done: dict[str, Done] = {}

    # --- what there is --------------------------------------------------------------------

    @property
    def pipeline(self) -> Pipeline:
        """The stages, as they are now: what `train` will run."""
        return self._pipeline

    @property
    def trace(self) -> Trace:
        """The phases that have run."""
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
    def upcoming(self) -> str | None:
        """The stage that `next` will run; None after the last."""
        return self._pipeline.names[self.position] if self.position < len(self._pipeline) else None

    # --- forwards -------------------------------------------------------------------------

    def next(self) -> Stepper:
        """Run one phase."""
        if self.upcoming is None:
            raise PipelineError(
                message(
                    "this step is over",
                    found=f"all {len(self._pipeline)} phases have run",
                    do="go back(to=…), or make a Stepper of the next batch: rows.batch(n, step=2)",
                )
            )
        stage = self._pipeline[self.position]
        forget_last_error()  # an interrupted cell holds its locals, until here
        self._align()
        gradients = torch.is_grad_enabled()
        try:
            phase = self._reusable(stage)
            if phase is None:
                before = self.batch
                phase = self._perform(stage)
                if not stage.updates:
                    self._done[stage.name] = Done(stage, before, self._weights(stage), phase)
            trace, standings = self._trace.add(phase), [*self._standings, self._standing()]
            # one statement without a call: an interrupt comes before both or after both
            self._trace, self._standings = trace, standings
        except BaseException:
            torch.set_grad_enabled(gradients)  # an interrupt at the end of a `no_grad` leaves them off
            # weights and controllers of where it stands: an update half-way has moved them; workers that died are
            # started again when they are needed, not while their error waits to be told
            self._align(lost=False)
            raise
        return self

    def run(self, until: str | None = None) -> Stepper:
        """Run on, the phase `until` included; without it, to the end of the step."""
        last = len(self._pipeline) if until is None else self._pipeline.index(until) + 1
        while self.position < last:
            self.next()
        return self

    def after(self, trace: Trace) -> Stepper:
        """Stand after the phases of a trace of this batch that were done elsewhere (rows that were drawn ahead).

        Going back over them and on uses them again, as those of this step's weights.
        """
        if trace.names != self._pipeline.names[: len(trace)]:
            raise PipelineError(
                message("phases of another pipeline", expected=", ".join(self._pipeline.names), found=trace.names)
            )
        for stage, phase in zip(self._pipeline, trace, strict=False):
            self._done[stage.name] = Done(stage, trace.before(stage.name), self._weights(stage), phase)
        self._trace, self._standings = trace, [self._standings[0]] * (len(trace) + 1)
        return self

    # --- backwards ------------------------------------------------------------------------

    def back(self, to: str | None = None) -> Stepper:
        """Stand before the phase `to` again (without it: before the last one that ran).

        Weights, optimizer and controllers are those of that moment, exactly.
        """
        position = self._pipeline.index(to) if to is not None else self.position - 1
        if not 0 <= position <= self.position:
            raise PipelineError(
                message(
                    f"cannot go back to {to or 'an earlier phase'}",
                    found=f"only {', '.join(self._trace.names) or 'nothing'} has run",
                    do="use run(until=…) to go forwards",
                )
            )
        self._stand(position)
        self._align()
        return self

    def _stand(self, position: int) -> None:
        self._trace = self._trace.first(position)
        self._standings = self._standings[: position + 1]

    # --- what if --------------------------------------------------------------------------

    def replace(self, name: str, other: Any = None, **settings: Any) -> Stepper:
        """Use another stage, another function in the same stage, or other settings of it, from here on.

        `s.back(to="reward").replace("reward", mine)`, `s.back().replace("advantage", kl_kind="k3")`,
        `s.replace("update_actor", clip_high=0.28)`, `s.back(to="rollout").replace("rollout", temperature=0.7)`.

        Raises `PipelineError` where that phase has run already: go back first.
        """
        position = self._pipeline.index(name)
        if position < self.position:
            raise PipelineError(
                message(f"phase {name!r} has run already", do=f"back(to={name!r}).replace({name!r}, …)")
            )
        self._pipeline = self._pipeline.replace(name, other, **settings)
        self._pipeline.check(self._trace.start)
        return self

    def fork(self) -> Stepper:
        """Another stepper at the same place; the batch, the weights and the snapshots are shared."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin._standings = list(self._standings)
        twin._done = dict(self._done)
        return twin

    def compare(self, other: Stepper | Trace) -> Comparison:
        """This step beside another: columns that differ, rows that changed most, metrics."""
        return compare(self._trace, other.trace if isinstance(other, Stepper) else other)

    def what_if(self, *, updates: int = 4, probe: Any = None, **changes: Any) -> WhatIf:
        """The consequences of another loss, estimator, choice of rows or mask for this batch, on scratch weights.

        `s.what_if(clip_high=0.28, updates=4, probe=heldout)`: see `workbench.what_if` for what can be changed. The stepper
        stays where it is; the question is asked before the update, also where that has run.
        """
        if self.position > self._pipeline.index("update_actor"):
            return self.fork().back(to="update_actor").what_if(updates=updates, probe=probe, **changes)
        self._align()
        return what_if(self._pipeline, self.batch, updates=updates, probe=probe, **changes)

    # --- episodes -------------------------------------------------------------------------

    def episode(self, row: int) -> EpisodeStepper:
        """The episode of one of the rollout's rows, turn by turn: go back in it, say a turn by hand, run on; see `put`.

        After the rollout it stands at the end of what was sampled, before it at the beginning of what will be. The stepper
        stays where it is, and so do the weights: the rollout's are lent to a turn that the model speaks. Raises `PipelineError` where the rollout has no agent, and `IndexError` for such a row.
        """
        stage, fork = self._agents(), self.fork()
        if stage.name not in self._trace.names:
            return stage.episode(self.batch, row, lent=fork._lent)
        fork._stand(self._pipeline.index(stage.name))
        return stage.episode(fork.batch, row, recorded=self._trace[stage.name].batch, lent=fork._lent)

    def put(self, *episodes: EpisodeStepper) -> Stepper:
        """A fork that stands after the rollout with these episodes in their rows; run on, and compare.

        `t = s.put(s.episode(3).replace(1, "41").run()).run(); s.compare(t)`. Raises `PipelineError` before the rollout, for an
        episode that is not over, and for one of another batch.
        """
        stage = self._agents()
        if stage.name not in self._trace.names:
            raise PipelineError(message("there are no episodes yet", do=f"run(until={stage.name!r}) first"))
        phase, before = self._trace[stage.name], self._trace.before(stage.name)
        rows = [one.row for one in episodes if isinstance(one, EpisodeStepper)]
        if len(set(rows)) < len(episodes):
            raise PipelineError(
                message("put", expected="episodes as s.episode(row) gives them, one a row", found=episodes)
            )
        for one in episodes:
            what = f"the episode of row {one.row}"
            if one.upcoming is not None:
                raise PipelineError(
                    message(f"{what} is not over", found=f"next: the {one.upcoming}", do="run() it first")
                )
            if one.row >= len(phase.batch) or one.uid != phase.batch["uid"][one.row]:
                raise PipelineError(message(f"{what} is of another batch", do=f"make it here: s.episode({one.row})"))
        outcome = stage.rewritten(before, phase.batch, {one.row: one.output for one in episodes})
        edited = {"edited_rows": ", ".join(str(one.row) for one in episodes)}
        changed = replace(
            phase,
            batch=outcome.batch,
            metrics={**phase.metrics, **reduce([outcome.metrics])},
            settings={**phase.settings, **edited},
        )
        position = self._trace.names.index(stage.name)
        return self.fork().back(to=stage.name).after(self._trace.first(position).add(changed))

    def _agents(self) -> EpisodeRollout:
        for stage in self._pipeline:
            if isinstance(stage, EpisodeRollout):
                return stage
        recorded = next((stage.name for stage in self._pipeline if "turns" in stage.writes), None)
        raise PipelineError(
            message(
                "this pipeline has no episodes that can be stepped",
                expected="a rollout by agents",
                found=f"recorded ones, of an agent that is not here ({recorded})" if recorded else None,
                do=f"s.back(to={recorded!r}).replace({recorded!r}, agent=…)"
                if recorded
                else "make the recipe with agent=…",
            )
        )

    # --- inside ---------------------------------------------------------------------------

    def _standing(self) -> Stood:
        return Stood(states(self._pipeline.learners()), self._pipeline.state())

    def _align(self, *, lost: bool = True) -> None:
        """Weights and controllers as they were when this stepper stood here; without those of lost workers, if so asked."""
        standing = self._standings[-1]
        for role, learner in self._pipeline.learners().items():
            if role in standing.weights and (lost or not getattr(learner, "lost", False)):
                self._snapshots.align(role, learner, standing.weights[role])
        for name, values in standing.controllers.items():
            if self._pipeline[name].state().keys() == values.keys():
                self._pipeline[name].load_state(values)

    @contextmanager
    def _lent(self) -> Iterator[None]:
        """The weights of where it stands, inside; after it those that were there."""
        learners = self._pipeline.learners()
        present = states(learners)
        try:
            for role, state in self._standings[-1].weights.items():
                self._snapshots.align(role, learners[role], state)
            yield
        finally:
            for role, state in present.items():
                self._snapshots.align(role, learners[role], state)

    def _perform(self, stage: Stage) -> Phase:
        """Run it, with what an update will change kept first."""
        for learner in stage.learners() if stage.updates else ():
            self._snapshots.take(learner)
        return perform(stage, self.batch)

    @staticmethod
    def _weights(stage: Stage) -> tuple[str, ...]:
        return tuple(getattr(learner, "state_id", "") for learner in stage.learners())

    def _reusable(self, stage: Stage) -> Phase | None:
        """What the stage would write, where nothing that it reads has changed since it last ran here.

        A stage with a controller is always run: its controller must see the batch.
        """
        done = self._done.get(stage.name)
        if done is None or done.stage is not stage or stage.state() or done.weights != self._weights(stage):
            return None
        if not all(unchanged(name, done.before, self.batch) for name in stage.reads):
            return None
        if done.phase.rows is not None:
            return _marked(done.phase, done.phase.batch)
        written = done.phase.delta()
        kept = self.batch.without(*(name for name in written.columns if name in self.batch))
        return _marked(done.phase, kept.union(written))

    # --- looking --------------------------------------------------------------------------

    def __repr__(self) -> str:
        from workbench.views.traces import stepper_text

        return stepper_text(self)

    def _repr_html_(self) -> str:
        from workbench.views.traces import stepper_html

        return stepper_html(self)

    def _ipython_display_(self) -> None:
        from workbench.widgets.layer import show
        from workbench.widgets.stepping import StepperFace

        show(self, lambda: StepperFace(self))


def _marked(phase: Phase, batch: DataProto) -> Phase:
    return replace(phase, batch=batch, seconds=0.0, reused=True)
