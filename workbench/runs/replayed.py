"""A recorded step opened at any of its phases, in a stepper whose engines are made when a stage needs them.

The phases before are there as they were recorded, and the log-probs of the later ones are taken as recorded as long as
the tokens are the same: judging and estimating again need no model, no checkpoint and no rollout. Where weights are
needed they are those that the run had, exactly: a checkpoint and the recorded updates since.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.ahead import DRAWN
from workbench.dataproto import DataProto
from workbench.dataproto.columns_map import Lazy
from workbench.errors import PipelineError, RunError, message, unknown
from workbench.runs import checkpoint, updates
from workbench.runs.folder import read_json
from workbench.runs.keeping import read_kept
from workbench.runs.late import LateLearner, Opened, Opening, Recalling
from workbench.runs.rebuild import Missing, rebuilt
from workbench.runs.replay import frozen_of, standing_after, start_of
from workbench.stages import Pipeline
from workbench.stepper import Done, Stepper, Stood
from workbench.trace import Phase, Trace, perform

State = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Source:
    """Where a replayed step comes from."""

    folder: Path
    step: int
    given: tuple[str, ...] = ()
    """Roles whose engines the caller gave."""
    opening: Opening | None = None
    """The engines to come; None where they were opened at once."""


class Replayed(Stepper):
    """A stepper on a recorded step of a run; `notes` says what in it is recorded and which weights it has."""

    def __init__(self, pipeline: Pipeline, start: DataProto, source: Source) -> None:
        super().__init__(pipeline, start)
        self._source = source
        self._snapshots = Recalling()
        self._recorded: dict[str, Phase] = {}

    @property
    def notes(self) -> tuple[str, ...]:
        """What is recorded here and what was run, one sentence each."""
        source = self._source
        found = [f"step {source.step} of {source.folder}", self._weights_note()]
        still = [name for name in self._trace.names if name in self._recorded and self._is_recorded(name)]
        if still:
            found.append(f"as recorded, not run again: {', '.join(still)}")
        for stage in self._pipeline:
            if isinstance(stage, Missing):
                how = "its recorded outputs, not run again" if stage.has_record else "cannot be run again, replace it"
                found.append(f"{stage.name}: {how} (made with {stage.what})")
        return (*found, *self._age_note(still))

    def _age_note(self, still: list[str]) -> tuple[str, ...]:
        """Rows that were drawn one step ahead are of weights that this stepper does not have."""
        step = self._source.step
        if step < 2 or not read_json(self._source.folder / "settings.json")["train"].get("ahead"):
            return ()
        drawn = [name for name, phase in self._recorded.items() if DRAWN in phase.settings]
        whose = f"drawn one step ahead, by the weights after step {step - 2}"
        if not drawn:
            return (f"rollout: {whose}; those after step {step - 1}, which stand here, write other tokens",)
        kept = drawn[0] in still or drawn[0] not in self._trace.names
        here = "as recorded" if kept else f"run again here by those after step {step - 1}, so that tokens differ"
        return (f"{drawn[0]}: {whose}; {here}",)

    def recall(self, trace: Trace) -> None:
        """Use the phases of a trace that were drawn one step ahead again, as long as nobody changes what they read."""
        for stage in self._pipeline:
            if stage.name not in trace.names or DRAWN not in trace[stage.name].settings:
                continue
            self._recorded[stage.name] = phase = trace[stage.name]
            if not isinstance(stage, Missing):
                self._done[stage.name] = Done(stage, trace.before(stage.name), self._weights(stage), phase)

    def _is_recorded(self, name: str) -> bool:
        """Whether a phase is the recorded one: running it anew puts another in its place."""
        phase, recorded, done = self._trace[name], self._recorded[name], self._done.get(name)
        return phase is recorded or (phase.reused and done is not None and done.phase is recorded)

    def _weights_note(self) -> str:
        source = self._source
        if source.given:
            return f"weights: those of the engines that were given for {', '.join(source.given)}"
        if source.opening is None or source.opening.done:
            updated = any(stage.updates for stage in list(self._pipeline)[: self.position])
            since = ", and the updates of this step since" if updated else ""
            return f"weights: those of the run after step {source.step - 1}, exactly{since}"
        return "weights: no engine is open; one is opened when a stage needs it"

    def stand(self, trace: Trace, position: int, before: State, after: State) -> None:
        """Stand before phase `position` of a trace, with its phases done and its model outputs there to be used again.

        `before` and `after` are the controllers' states around the step.
        """
        names, given = self._pipeline.names, self._source.given
        learners, initial = self._pipeline.learners(), self._pipeline.state()
        standings = []
        for place in range(position + 1):
            past = names[:place]
            weights = {role: _state(learner, f"update_{role}" in past) for role, learner in learners.items()}
            held = {one: dict((after if one in past else before).get(one, old)) for one, old in initial.items()}
            standings.append(Stood(weights, held))
        self._trace, self._standings = trace.first(position), standings
        roles = {id(learner): role for role, learner in learners.items()}
        models = _asking_models(self._source.folder)
        for place, stage in enumerate(self._pipeline):
            used = [roles[id(one)] for one in stage.learners() if id(one) in roles]
            later = place > position and stage.name in models and not set(used) & set(given)
            if stage.updates or stage.name not in trace.names or not (place < position or later):
                continue
            self._recorded[stage.name] = trace[stage.name]
            if not isinstance(stage, Missing):
                states = tuple(_state(learners[role], f"update_{role}" in names[:place]) for role in used)
                self._done[stage.name] = Done(stage, trace.before(stage.name), states, trace[stage.name])
        self._recorded |= {name: trace[name] for name in names[:position]}
        self._align()

    def __repr__(self) -> str:
        from workbench.views.replays import notes_text

        return f"{super().__repr__()}\n{notes_text(self.notes)}"

    def _repr_html_(self) -> str:
        from workbench.views.replays import notes_html

        return super()._repr_html_() + notes_html(self.notes)


def _state(learner: Any, updated: bool) -> str:
    """Name of a learner's state at a place of the step; an engine that was given has one."""
    states = learner.recallable if isinstance(learner, LateLearner) else ()
    return states[-1 if updated else 0] if states else str(learner.state_id)


def _asking_models(folder: Path) -> set[str]:
    """Stages that were made with an engine or a frozen model."""
    records = read_json(folder / "settings.json").get("pipeline", [])
    kinds = {"engine", "frozen"}
    return {
        one["name"]
        for one in records
        if any(isinstance(value, dict) and kinds & value.keys() for value in one["arguments"].values())
    }


def stepper_at(folder: Path, step: int, at: str | None = None, engines: Mapping[str, Any] | None = None) -> Replayed:
    """A stepper on a recorded step: before its first phase on the run's weights, or before the phase `at`.

    `engines` (role → engine) stand in place of the run's, with the weights that they have. Raises `RunError` where
    the step is not recorded as far as that, or its weights are needed and cannot be made, saying which can.
    """
    settings = read_json(folder / "settings.json")
    records = settings.get("pipeline", [])
    names = [one["name"] for one in records]
    if at is not None and at not in names:
        raise PipelineError(unknown("phase of this run", at, names))
    strange = sorted(set(engines or ()) - set(settings["engines"]))
    if strange:
        raise RunError(unknown("role of this run", strange[0], settings["engines"]))
    path = folder / "traces" / f"step_{step:06d}"
    trace = _shared(Trace.load(path)) if (path / "trace.json").is_file() else None
    position = names.index(at) if at is not None else 0
    if position and (trace is None or list(trace.names[:position]) != names[:position]):
        raise RunError(_not_recorded(folder, step, at, trace))
    if at is None and not engines:
        return _at_the_start(folder, step, trace)
    opening = Opening(functools.partial(_made, folder, step, trace, position))
    learners = {role: _late(role, step, opening, names[:position]) for role in settings["engines"]} | dict(
        engines or {}
    )
    pipeline = _with_records(rebuilt(records, learners, frozen_of(settings)), trace)
    before, after = controllers(folder, step)
    unknown_states = set(names) if before is None else set(names[:position]) if after is None else set()
    pipeline = _without_unknown(pipeline, records, trace, unknown_states)
    source = Source(folder, step, tuple(engines or ()), opening)
    stepper = Replayed(pipeline, trace.start if trace is not None else start_of(folder, step), source)
    stepper.stand(trace if trace is not None else Trace(stepper.batch), position, before or {}, after or {})
    return stepper


def _at_the_start(folder: Path, step: int, trace: Trace | None) -> Replayed:
    """Before the first phase, on weights that are opened here and now."""
    start = start_of(folder, step)
    try:
        pipeline = standing_after(folder, step - 1).pipeline
    except RunError as error:
        if trace is None or not trace.names:
            raise
        raise RunError(
            message(str(error), do=f"its trace is recorded: stepper({step}, at={trace.names[-1]!r}) needs no weights")
        ) from error
    pipeline = _with_records(pipeline, trace)
    if trace is None or not any(DRAWN in phase.settings for phase in trace):
        return Replayed(pipeline, start, Source(folder, step))
    stepper = Replayed(pipeline, trace.start, Source(folder, step))
    stepper.recall(trace)
    return stepper


def _not_recorded(folder: Path, step: int, at: str | None, trace: Trace | None) -> str:
    found = [
        int(path.name[5:]) for path in sorted((folder / "traces").glob("step_*")) if (path / "trace.json").is_file()
    ]
    return message(
        f"step {step} cannot be opened at {at!r}",
        expected="a recorded trace that goes as far",
        found=f"traces of steps {found}" if trace is None else f"a trace of {', '.join(trace.names)}",
        do=f"stepper({step}) stands before the first phase, where the weights can be made",
    )


def _shared(trace: Trace) -> Trace:
    """The same trace, whose columns on disk are read once for all its batches: a stepper asks whether two batches hold
    the very same column."""
    for batch in (trace.start, *(phase.batch for phase in trace)):
        for column in (*batch.batch.raw().values(), *batch.non_tensor_batch.raw().values()):
            if isinstance(column, Lazy) and not hasattr(column.read, "cache_info"):
                column.read = functools.cache(column.read)
    return trace


def _late(role: str, step: int, opening: Opening, past: list[str]) -> LateLearner:
    names = [f"{role} after step {step - 1}"]
    if f"update_{role}" in past:
        names.append(f"{role} after its update of step {step}")
    return LateLearner(role, opening, tuple(names))


def _made(folder: Path, step: int, trace: Trace | None, position: int) -> dict[str, Opened]:
    """The learners as they stood before phase `position` of the step: those after the step before, and its own updates
    up to there done again on the recorded batch."""
    standing = standing_after(folder, step - 1)
    made = {
        role: Opened(engine, {engine.state_id: f"{role} after step {step - 1}"})
        for role, engine in standing.engines.items()
    }
    for phase in trace.phases[:position] if trace is not None else ():
        stage = standing.pipeline[phase.stage]
        if trace is None or not stage.updates:
            continue
        role = phase.stage.removeprefix("update_")
        one = made[role]
        one.kept[one.names[one.engine.state_id]] = one.engine.snapshot()
        perform(stage, trace.before(phase.stage))
        one.names[one.engine.state_id] = name = f"{role} after its update of step {step}"
        one.kept[name] = one.engine.snapshot()
    return made


def _with_records(pipeline: Pipeline, trace: Trace | None) -> Pipeline:
    """Stages that cannot be made again get what they did in that step."""
    for stage in pipeline:
        if trace is not None and isinstance(stage, Missing):
            pipeline = pipeline.replace(stage.name, stage.recorded(trace))
    return pipeline


def _without_unknown(
    pipeline: Pipeline, records: list[dict[str, Any]], trace: Trace | None, names: set[str]
) -> Pipeline:
    """Of these stages one whose controller stood nobody knows where is its recorded outputs alone."""
    for record in records:
        stage = pipeline[record["name"]]
        if record["name"] in names and stage.state() and not stage.updates:
            missing = Missing(record, "a controller whose state at that step was not kept")
            pipeline = pipeline.replace(stage.name, missing.recorded(trace) if trace is not None else missing)
    return pipeline


def controllers(folder: Path, step: int) -> tuple[State | None, State | None]:
    """Controllers' states before and after a step; None where nothing on disk says it."""
    kept = read_kept(folder / "traces" / f"step_{step:06d}")
    before = kept.before if kept.before is not None else _controllers_after(folder, step - 1)
    after = kept.after if kept.after is not None else _controllers_after(folder, step)
    return before, after


def _controllers_after(folder: Path, step: int) -> State | None:
    if step == 0:
        return {}  # as they are made
    update = updates.folder_of(folder / "updates", step) / "update.json"
    state = checkpoint.folder_of(folder / "checkpoints", step) / "state.json"
    for path in (update, state):
        if path.is_file():
            found: State = read_json(path)["controllers"]
            return found
    return None
