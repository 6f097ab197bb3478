"""Opens a recorded step at any of its phases, in a stepper whose engines are opened when a stage needs them.

The phases before are the recorded ones, and so are the log-probs of later ones while the tokens are the same: another
reward or estimator needs no model, no checkpoint and no rollout. Where weights are needed they are exactly those that the
run had: a checkpoint and the recorded updates since.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from workbench.base.errors import PipelineError, RunError, unknown
from workbench.dataproto import DataProto
from workbench.engines.protocol import Differentiable, Estimates, Learner, LogProbModel, Sampler, WholeDistributions
from workbench.replay.rebuild import Missing, frozen_of, kinds_of, rebuilt, standing_after, start_of, trust_of
from workbench.replay.trust import Untrusted
from workbench.runs import checkpoint, updates
from workbench.runs.folder import read_settings, step_folder, step_folders
from workbench.runs.kept_traces import read_kept
from workbench.stages.pipeline import Pipeline
from workbench.stages.stage import Stage
from workbench.steps.execute import DRAWN, read_once
from workbench.steps.snapshots import Snapshots
from workbench.steps.stepper import Done, Stepper, StepState
from workbench.steps.trace import Phase, Trace, perform

State = Mapping[str, Mapping[str, float]]


class Weights:
    """The learners of a recorded step, all loaded when one is first used; before that only their states' names are known.

    `states` lists the names of each role's recorded states: that after the step before, and where the step is opened at a
    phase after the role's update, the state after that update.
    """

    def __init__(
        self, folder: Path, step: int, roles: Iterable[str], trace: Trace | None, past: Sequence[str], trust: bool
    ) -> None:
        self._folder, self._step, self._trace, self._trust = folder, step, trace, trust
        self.states = {role: [f"{role} after step {step - 1}"] for role in roles}
        for role in [role for role in self.states if f"update_{role}" in past]:
            self.states[role].append(f"{role} after its update of step {step}")
        self._wanted = {role: states[-1] for role, states in self.states.items()}
        self._engines: Mapping[str, Any] | None = None
        self._names: dict[str, str] = {}
        """An engine's `state_id` → the recorded name of that state."""
        self._kept: dict[str, Any] = {}
        """Name → snapshot, of learners with two states."""
        self._lock = threading.RLock()

    @property
    def opened(self) -> bool:
        """Whether the engines are open."""
        return self._engines is not None

    def __getitem__(self, role: str) -> Any:
        """A role's engine. Raises `RunError` where the weights cannot be made."""
        with self._lock:
            if self._engines is None:
                try:
                    self._engines = self._open()
                except RunError as error:
                    raise RunError(f"the weights of {role!r} are needed, but cannot be restored: {error}") from error
            return self._engines[role]

    def _open(self) -> Mapping[str, Any]:
        """The engines after the step before, with the step's own updates up to there done again on the recorded batch."""
        pipeline = standing_after(self._folder, self._step - 1, self._trust)
        engines = pipeline.learners()
        self._names = {engine.state_id: self.states[role][0] for role, engine in engines.items()}
        for role, (before, *after) in self.states.items():
            if after and self._trace is not None:
                stage, engine = pipeline[f"update_{role}"], engines[role]
                self._kept[before] = engine.snapshot()
                perform(stage, _signed(self._trace.before(stage.name), engine.state_id))
                self._names[engine.state_id] = after[0]
                self._kept[after[0]] = engine.snapshot()
                if self._wanted[role] == before:
                    engine.restore(self._kept[before])
        return engines

    def state_of(self, role: str) -> str:
        """The recorded name of a role's present state, or the engine's own `state_id` after another update."""
        if self._engines is None:
            return self._wanted[role]
        return self._names.get(self._engines[role].state_id, self._engines[role].state_id)

    def recall(self, role: str, name: str) -> None:
        """Switch a role to another of its recorded states; no engine is opened for it."""
        self._wanted[role] = name
        if self._engines is not None:
            self._engines[role].restore(self._kept[name])


class LateLearner:
    """A learner whose engine is opened at its first use; reading `state_id` does not open it. Made by `late_learner`."""

    def __init__(self, role: str, weights: Weights) -> None:
        self.role, self._all = role, weights

    @property
    def opened(self) -> bool:
        """Whether the learner's engine is open."""
        return self._all.opened

    @property
    def state_id(self) -> str:
        """Name of the learner's recorded state, or the engine's own `state_id` after another update."""
        return self._all.state_of(self.role)

    @property
    def lost(self) -> Any:
        """Whether the engine's worker processes are gone; None where it has none, or has not been opened."""
        return getattr(self._all[self.role], "lost", None) if self.opened else None

    @property
    def states(self) -> list[str]:
        """Names of the learner's recorded states, in order; the present state alone where only one is recorded."""
        recorded = self._all.states[self.role]
        return recorded if len(recorded) > 1 else [self.state_id]

    def recall(self, name: str) -> None:
        """Switch the learner to the recorded state `name`."""
        self._all.recall(self.role, name)

    def _do(self, name: str, *args: Any, **options: Any) -> Any:
        return getattr(self._all[self.role], name)(*args, **options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"a learner of a replayed step has no attribute {name!r}")
        return getattr(self._all[self.role], name)

    def __repr__(self) -> str:
        return repr(self._all[self.role]) if self.opened else f"LateLearner({self.state_id}, not opened)"


@functools.cache
def late_learner(kinds: tuple[type, ...]) -> type[LateLearner]:
    """Make a `LateLearner` subclass with the protocol methods of these engine classes, so that `isinstance` checks of
    protocols, as stages make them, open no engine."""
    protocols = (Sampler, LogProbModel, Learner, Differentiable, WholeDistributions, Estimates)
    asked = {name for one in protocols for name, what in vars(one).items() if callable(what) and name[0] != "_"}
    there = [name for name in sorted(asked) if any(callable(getattr(kind, name, None)) for kind in kinds)]
    return type("LateLearner", (LateLearner,), {name: functools.partialmethod(LateLearner._do, name) for name in there})


class Recalling(Snapshots):
    """Snapshots that can also restore recorded states."""

    def align(self, role: str, learner: Any, state_id: str) -> None:
        """Restore the weights `state_id` as `Snapshots.align` does; a recorded state needs no snapshot."""
        recorded = isinstance(learner, LateLearner) and len(learner.states) > 1 and state_id in learner.states
        if not recorded:
            super().align(role, learner, state_id)
        elif learner.state_id != state_id:
            if learner.opened and learner.state_id in self._wanted():
                self.take(learner, role)
            learner.recall(state_id)


# --- the stepper --------------------------------------------------------------------------------


class Replayed(Stepper):
    """A stepper on a recorded step of a run; `notes` say which phases are recorded and which weights it has."""

    _keeper = Recalling

    def __init__(
        self,
        pipeline: Pipeline,
        start: DataProto,
        folder: Path,
        step: int,
        *,
        given: tuple[str, ...] = (),
        late: Weights | None = None,
    ) -> None:
        """`given` are roles whose engines the caller gave; `late` are weights that are opened when they are needed."""
        super().__init__(pipeline, start)
        self._folder, self._step, self._given, self._late = folder, step, given, late
        self._settings = read_settings(folder)
        self._recorded: dict[str, Phase] = {}

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences that say what is recorded here, what was run again, and with which weights."""
        found = [f"step {self._step} of {self._folder}", self._weights_note()]
        still = [name for name in self._trace.names if name in self._recorded and self._is_recorded(name)]
        if still:
            found.append(f"as recorded, not run again: {', '.join(still)}")
        for stage in self._pipeline:
            if isinstance(stage, Missing):
                how = "its recorded outputs, not run again" if stage.has_record else "cannot be run again, replace it"
                found.append(f"{stage.name}: {how} (made with {stage.what})")
        return (*found, *self._age_note(still))

    def _age_note(self, still: list[str]) -> tuple[str, ...]:
        """A note on rows that were sampled one step ahead, by weights that this stepper does not have."""
        step, lag = self._step, self._settings["train"].get("max_lag")
        if lag:
            what = f"drawn in a stream, by weights up to {lag} versions old (token_versions)"
            return (
                f"rollout: {what}; as recorded, which later phases are done again from: no draw of it can be repeated",
            )
        if step < 2 or not self._settings["train"].get("ahead"):
            return ()
        drawn = [name for name, phase in self._recorded.items() if DRAWN in phase.settings]
        whose = f"sampled one step ahead, by the weights after step {step - 2}"
        if not drawn:
            return (f"rollout: {whose}; those after step {step - 1}, which are here, sample other tokens",)
        kept = drawn[0] in still or drawn[0] not in self._trace.names
        here = "as recorded" if kept else f"run again here by those after step {step - 1}, so that tokens differ"
        return (f"{drawn[0]}: {whose}; {here}",)

    def recall(self, trace: Trace) -> None:
        """Reuse those phases of a trace that were sampled one step ahead, as long as none of their inputs has changed."""
        for stage in self._pipeline:
            if stage.name in trace.names and DRAWN in trace[stage.name].settings:
                self._reuse(stage, trace, self._weights(stage))

    def _reuse(self, stage: Stage, trace: Trace, states: tuple[str, ...]) -> None:
        """Use a stage's recorded phase, made with learners in these states, while nothing that it reads changes."""
        self._recorded[stage.name] = phase = trace[stage.name]
        if not isinstance(stage, Missing):
            self._done[stage.name] = Done(stage, trace.before(stage.name), states, phase)

    def _is_recorded(self, name: str) -> bool:
        phase, recorded, done = self._trace[name], self._recorded[name], self._done.get(name)
        return phase is recorded or (phase.reused and done is not None and done.phase is recorded)

    def _weights_note(self) -> str:
        if self._given:
            return f"weights: those of the engines that were given for {', '.join(self._given)}"
        if self._late is None or self._late.opened:
            updated = any(stage.updates for stage in list(self._pipeline)[: self.position])
            since = ", and the updates of this step since" if updated else ""
            return f"weights: those of the run after step {self._step - 1}, exactly{since}"
        return "weights: no engine is open; one is opened when a stage needs it"

    def stand(self, trace: Trace, position: int, before: State, after: State) -> None:
        """Position the stepper before phase number `position` of a trace, and reuse earlier phases and later model outputs.

        `before` and `after` are the controllers' states, by stage name, before and after the step.
        """
        names, learners, initial = self._pipeline.names, self._pipeline.learners(), self._pipeline.state()
        standings = []
        for place in range(position + 1):
            past = names[:place]
            weights = {role: _state(learner, f"update_{role}" in past) for role, learner in learners.items()}
            held = {one: dict((after if one in past else before).get(one, old)) for one, old in initial.items()}
            standings.append(StepState(weights, held))
        self._trace, self._standings = trace.first(position), standings
        for place, stage in enumerate(self._pipeline):
            if place < position or (place > position and _asks_models(self._settings, stage.name)):
                self._take(stage, trace, names[:place], before=place < position)
        self._recorded |= {name: trace[name] for name in names[:position]}
        self._align()

    def _take(self, stage: Stage, trace: Trace, past: Sequence[str], before: bool) -> None:
        """Use a stage's recorded phase; of a later stage (not `before`) only where it uses no engine that was given."""
        roles = {id(one): role for role, one in self._pipeline.learners().items()}
        used = [(roles[id(one)], one) for one in stage.learners() if id(one) in roles]
        others = not before and any(role in self._given for role, _ in used)
        if not stage.updates and stage.name in trace.names and not others:
            self._reuse(stage, trace, tuple(_state(one, f"update_{role}" in past) for role, one in used))


def _state(learner: Any, updated: bool) -> str:
    """Name of a learner's state before or after its update of the step; an engine that was given has one state."""
    states = learner.states if isinstance(learner, LateLearner) else [str(learner.state_id)]
    return states[-1 if updated else 0]


def _asks_models(settings: Mapping[str, Any], stage: str) -> bool:
    """Whether a stage was made with an engine or a frozen model."""
    made = next(one["arguments"].values() for one in settings["pipeline"] if one["name"] == stage)
    return any(isinstance(value, dict) and ("engine" in value or "frozen" in value) for value in made)


def stepper_at(folder: Path, step: int, at: str | None, given: Mapping[str, Any], trust: bool = False) -> Replayed:
    """Open a recorded step in a stepper: see `Run.stepper`; `given` are the caller's engines by role, `trust` their word for the
    folder's code."""
    settings = read_settings(folder)
    records: list[dict[str, Any]] = settings.get("pipeline", [])
    names = [one["name"] for one in records]
    if at is not None and at not in names:
        raise PipelineError(unknown("phase of this run", at, names))
    for role in sorted(given.keys() - settings["engines"].keys()):
        raise RunError(unknown("role of this run", role, settings["engines"]))
    past = names[: names.index(at)] if at is not None else []
    trace = _recorded(folder, step, at, past)
    if at is None and not given:
        return _at_the_start(folder, step, trace, trust)
    weights = Weights(folder, step, settings["engines"], trace, past, trust)
    late = {role: late_learner(kinds_of(record))(role, weights) for role, record in settings["engines"].items()}
    trace = _of_weights(trace, weights, given)
    before, after = controllers(folder, step)
    nowhere = names if before is None else past if after is None else []
    word = trust_of(folder, settings, trust)
    elsewhere = [str(engine.path) for engine in given.values() if getattr(engine, "path", None)]
    pipeline = rebuilt(records, {**late, **given}, frozen_of(settings, folder, word, elsewhere), word)
    pipeline = _with_records(pipeline, trace, records, nowhere)
    trace = trace or Trace(start_of(folder, step))
    stepper = Replayed(pipeline, trace.start, folder, step, given=tuple(given), late=weights)
    stepper.stand(trace, len(past), before or {}, after or {})
    return stepper


def _of_weights(trace: Trace | None, weights: Weights, given: Mapping[str, Any]) -> Trace | None:
    """The trace with old log-probs that are signed by the recorded name of the actor's weights, unless another was given."""
    if trace is None or "actor" in given or "actor" not in weights.states:
        return trace
    state = weights.states["actor"][0]
    return Trace(trace.start, tuple(replace(one, batch=_signed(one.batch, state)) for one in trace))


def _signed(batch: DataProto, state_id: str) -> DataProto:
    """A recorded batch whose old log-probs say that they are of the weights called `state_id`, which here they are."""
    made = batch.origins.get("old_log_probs")
    if made is None or made.policy_version is None:
        return batch
    return batch.with_columns({"old_log_probs": batch["old_log_probs"]}, origin=replace(made, state_id=state_id))


def _at_the_start(folder: Path, step: int, trace: Trace | None, trust: bool) -> Replayed:
    """A stepper before the first phase, on engines that are opened now."""
    start = start_of(folder, step)
    try:
        pipeline = standing_after(folder, step - 1, trust)
    except Untrusted:
        raise
    except RunError as error:
        if trace is None or not trace.names:
            raise
        do = f"its trace is recorded: stepper({step}, at={trace.names[-1]!r}) opens it without weights"
        raise RunError(str(error), do=do) from error
    pipeline = _with_records(pipeline, trace)
    if trace is None or not any(DRAWN in phase.settings for phase in trace):
        return Replayed(pipeline, start, folder, step)
    stepper = Replayed(pipeline, trace.start, folder, step)
    stepper.recall(trace)
    return stepper


def _recorded(folder: Path, step: int, at: str | None, past: list[str]) -> Trace | None:
    """The step's trace, or None. Raises `RunError` where it lacks phases of `past`."""
    path = step_folder(folder / "traces", step)
    trace = read_once(Trace.load(path)) if (path / "trace.json").is_file() else None
    if not past or (trace is not None and list(trace.names[: len(past)]) == past):
        return trace
    there = [one for one, path in step_folders(folder / "traces").items() if (path / "trace.json").is_file()]
    found = f"traces of steps {there}" if trace is None else f"a trace of {', '.join(trace.names)}"
    do = f"stepper({step}) opens it before the first phase, if its weights can be restored; train(…, trace_freq=1) keeps every trace"
    what, expected = f"step {step} cannot be opened at {at!r}", "its recorded trace up to there"
    raise RunError(what, expected=expected, found=found, do=do)


def _with_records(
    pipeline: Pipeline, trace: Trace | None, records: Sequence[Mapping[str, Any]] = (), unknown: Sequence[str] = ()
) -> Pipeline:
    """Gives stages that cannot be made again their recorded outputs; and those of `unknown` that have a controller, because
    the controller's state was not recorded."""
    for record in records:
        stage = pipeline[record["name"]]
        if stage.name in unknown and stage.state() and not stage.updates:
            missing = Missing(record, "a controller whose state at that step was not kept")
            pipeline = pipeline.replace(stage.name, missing)
    for stage in pipeline:
        if trace is not None and isinstance(stage, Missing):
            pipeline = pipeline.replace(stage.name, stage.recorded(trace))
    return pipeline


def controllers(folder: Path, step: int) -> tuple[State | None, State | None]:
    """Controllers' states, by stage name, before and after a step; None where they were not recorded."""
    kept = read_kept(step_folder(folder / "traces", step))
    before = kept.before if kept.before is not None else _controllers_after(folder, step - 1)
    return before, kept.after if kept.after is not None else _controllers_after(folder, step)


def _controllers_after(folder: Path, step: int) -> State | None:
    if step == 0:
        return dict(read_settings(folder).get("began", {}).get("controllers", {}))
    update, saved = (step_folder(folder / part, step) for part in ("updates", "checkpoints"))
    if (update / "update.json").is_file():
        return dict(updates.read_record(update)["controllers"])
    return checkpoint.read_state(saved)["controllers"] if (saved / "state.json").is_file() else None
