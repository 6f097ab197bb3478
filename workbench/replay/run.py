"""Opens run folders for reading, also while another process is writing them, and lists them; opens any recorded step again.

A recorded step opens in a stepper whose engines are opened when a stage needs them. The phases before are the recorded ones, and
so are the log-probs of later ones while the tokens are the same: another reward or estimator needs no model, no checkpoint
and no rollout. Where a stage needs a model, the weights that it had are restored.
"""

from __future__ import annotations

import asyncio
import functools
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast
from weakref import WeakSet

from workbench.base.config import require
from workbench.base.errors import PipelineError, RunError, first_line, unknown
from workbench.base.memory import gib, release, trim
from workbench.base.progress import clock, working
from workbench.base.shown import Shown, blocks, number, shows
from workbench.compat.dumps import read_dump
from workbench.dataproto.core import DataProto
from workbench.datasets.rows import Rows
from workbench.engines.local_engine.learning import park_moments
from workbench.engines.protocol import Differentiable, Estimates, Learner, LogProbModel, Sampler, WholeDistributions
from workbench.replay import publishing, rebuild, reuse
from workbench.replay.audit import Audit, audit_run
from workbench.replay.diagnosis import AUDITED, TRACES, Diagnosis, diagnosed, gathered
from workbench.replay.rebuild import (
    MissingStage,
    Untrusted,
    frozen_of,
    kinds_of,
    rebuilt,
    standing_after,
    start_of,
    trust_of,
)
from workbench.replay.remote import Remote, RunFiles, is_address, runs_at
from workbench.runs import checkpoint, updates
from workbench.runs.conditions import BEST, best_step
from workbench.runs.folder import (
    STEP,
    Kept,
    goes_on,
    is_run,
    read_json,
    read_kept,
    read_metrics,
    read_settings,
    seconds_of,
    step_files,
    step_folder,
    step_folders,
)
from workbench.runs.resume import lost_rows
from workbench.runs.symptoms import Symptoms, shown_by, symptoms
from workbench.stages.pipeline import Pipeline
from workbench.stages.stage import Stage
from workbench.steps.execute import DRAWN, read_once
from workbench.steps.stepper import Done, Snapshots, Stepper, StepState
from workbench.steps.trace import Phase, Trace, perform

if TYPE_CHECKING:
    import pandas as pd


State = Mapping[str, Mapping[str, float]]


class Weights:
    """The learners of a recorded step. All are loaded when one is first used; before that only the names of their
    states are known.

    Of all replayed steps in the process, one has its engines open: the one that is used next takes their place, and
    finds its own states again in files.

    `states` maps each role to the names of its recorded states: the one after the step before, and the one after the
    role's update in this step, if the step is opened at a later phase.
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
        self._calls = 0
        """Calls of the engines that are running now."""

    @property
    def opened(self) -> bool:
        """Whether the engines are open."""
        return self._engines is not None

    def __getitem__(self, role: str) -> Any:
        """Return a role's engine, opening all engines at the first use. Raises `RunError` where the weights cannot be
        restored.
        """
        with self._lock:
            if self._engines is None:
                try:
                    self._open()
                except RunError as error:
                    raise RunError(f"the weights of {role!r} are needed, but cannot be restored: {error}") from error
            return cast(Mapping[str, Any], self._engines)[role]

    def take(self, engines: Mapping[str, Any]) -> None:
        """Use open engines with the weights after the step before."""
        self._names |= {engine.state_id: self.states[role][0] for role, engine in engines.items()}
        self._engines = engines
        _OPEN.add(self)

    @contextmanager
    def calling(self, role: str) -> Iterator[Any]:
        """Context manager: yields a role's engine, which stays open inside."""
        with self._lock:
            engine = self[role]
            self._calls += 1
        try:
            yield engine
        finally:
            with self._lock:
                self._calls -= 1

    def close(self) -> None:
        """Write the engines' present states to files, unless they are recorded, and give the engines up. Does nothing
        while an engine is being used. The next use opens them again with these states.
        """
        with self._lock:
            if self._engines is None or self._calls:
                return
            for role in self._engines:  # no name may refer to an engine when its memory is released
                self._wanted[role] = name = self.state_of(role)
                if name not in self._kept and name != self.states[role][0]:
                    self._kept[name] = _filed(self._engines[role])
            self._engines = None
            _OPEN.discard(self)
            release()

    def _open(self) -> None:
        """Open the engines with the weights after the step before, repeat this step's updates up to the phase it is opened
        at, and restore the states that the engines had when they were given up.
        """
        make_room()
        pipeline = standing_after(self._folder, self._step - 1, self._trust)
        engines = pipeline.learners()
        self.take(engines)
        for role, (before, *after) in self.states.items():
            engine = engines[role]
            if after and self._trace is not None and before not in self._kept:
                stage = pipeline[f"update_{role}"]
                self._kept[before] = _filed(engine)
                perform(stage, _signed(self._trace.before(stage.name), engine.state_id))
                self._names[engine.state_id] = after[0]
                self._kept[after[0]] = _filed(engine)
            if self._names[engine.state_id] != self._wanted[role]:
                engine.restore(self._kept[self._wanted[role]])

    def state_of(self, role: str) -> str:
        """Return the recorded name of a role's present state, or the engine's own `state_id` after another update."""
        if self._engines is None:
            return self._wanted[role]
        return self._names.get(self._engines[role].state_id, self._engines[role].state_id)

    def recall(self, role: str, name: str) -> None:
        """Switch a role to another of its recorded states, without opening an engine for it."""
        self._wanted[role] = name
        if self._engines is not None:
            self._engines[role].restore(self._kept[name])


def _filed(engine: Any) -> Any:
    """Keep an engine's present state in a file."""
    return engine.snapshot("disk", tempfile.gettempdir())


_OPEN: WeakSet[Weights] = WeakSet()
"""Those whose engines are open."""


def make_room() -> None:
    """Make room for the engines of a replayed step: give up those of other replayed steps, whose states are kept in files,
    and keep the large optimizer moments of this process's engines in files until they are used next.
    """
    for weights in list(_OPEN):
        weights.close()
    park_moments()


class LateLearner:
    """A learner whose engine is opened at its first use; reading `state_id` does not open it. `late_learner` makes its
    classes.
    """

    def __init__(self, role: str, weights: Weights) -> None:
        self.role, self._all = role, weights

    @property
    def opened(self) -> bool:
        """Whether the learner's engine is open."""
        return self._all.opened

    @property
    def state_id(self) -> str:
        """Name of the learner's present state: the recorded name, or the engine's own `state_id` after another update."""
        return self._all.state_of(self.role)

    @property
    def lost(self) -> Any:
        """Whether the engine's worker processes are gone; None where it has none, or has not been opened."""
        return getattr(self._all[self.role], "lost", None) if self.opened else None

    @property
    def states(self) -> list[str]:
        """Names of the learner's recorded states, in order; only the present state's where a single one is recorded."""
        recorded = self._all.states[self.role]
        return recorded if len(recorded) > 1 else [self.state_id]

    def recall(self, name: str) -> None:
        """Switch the learner to its recorded state `name`."""
        self._all.recall(self.role, name)

    def _do(self, name: str, *args: Any, **options: Any) -> Any:
        with self._all.calling(self.role) as engine:
            return getattr(engine, name)(*args, **options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"a learner of a replayed step has no attribute {name!r}")
        return getattr(self._all[self.role], name)

    def __repr__(self) -> str:
        return repr(self._all[self.role]) if self.opened else f"LateLearner({self.state_id}, not opened)"


@functools.cache
def late_learner(kinds: tuple[type, ...]) -> type[LateLearner]:
    """Make a subclass of `LateLearner` with the protocol methods of these engine classes.

    Stages check protocols by `isinstance`; with these methods such a check opens no engine.
    """
    protocols = (Sampler, LogProbModel, Learner, Differentiable, WholeDistributions, Estimates)
    methods = {name for one in protocols for name, what in vars(one).items() if callable(what) and name[0] != "_"}
    there = [name for name in sorted(methods) if any(callable(getattr(kind, name, None)) for kind in kinds)]
    return type("LateLearner", (LateLearner,), {name: functools.partialmethod(LateLearner._do, name) for name in there})


def late_learners(weights: Weights, settings: Mapping[str, Any]) -> dict[str, LateLearner]:
    """Make a learner of `weights` for each role of a run's settings."""
    return {role: late_learner(kinds_of(record))(role, weights) for role, record in settings["engines"].items()}


class Recalling(Snapshots):
    """Snapshots of a stepper that can also restore a learner's recorded states."""

    def align(self, role: str, learner: Any, state_id: str) -> None:
        """Restore the weights called `state_id`, as `Snapshots.align` does; for a recorded state no snapshot is needed."""
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
        """Make the stepper before the first phase. `given` are the roles whose engines the caller passed; `late` are
        weights that are opened when a stage needs them.
        """
        super().__init__(pipeline, start)
        self._folder, self._step, self._given, self._late = folder, step, given, late
        self._settings = read_settings(folder)
        self._recorded: dict[str, Phase] = {}

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences that say what is recorded here, what was run again, and with which weights."""
        lines = [f"step {self._step} of {self._folder}", self._weights_note()]
        still = [name for name in self._trace.names if name in self._recorded and self._is_recorded(name)]
        if still:
            lines.append(f"as recorded, not run again: {', '.join(still)}")
        for stage in self._pipeline:
            if isinstance(stage, MissingStage):
                how = "its recorded outputs, not run again" if stage.has_record else "cannot be run again, replace it"
                lines.append(f"{stage.name}: {how} (made with {stage.what})")
        return (*lines, *self._memory_note(), *self._age_note(still))

    def next(self) -> Stepper:
        """Run the next phase, and return the memory that it used to the system."""
        super().next()
        trim()
        return self

    def _memory_note(self) -> tuple[str, ...]:
        """A note on what this stepper keeps in memory; none where no engine of its own is open."""
        learners = [learner for role, learner in self._pipeline.learners().items() if role not in self._given]
        live = [learner for learner in learners if isinstance(learner, Estimates) and getattr(learner, "opened", True)]
        if not live:
            return ()
        size, kept = sum(learner.checkpoint_bytes() for learner in live), self.snapshots.nbytes
        return (f"memory: up to {gib(size)} for its engines, {gib(kept)} for kept states, until nothing refers to it",)

    def _age_note(self, still: list[str]) -> tuple[str, ...]:
        """Return a note on rows that older weights sampled (`ahead`, `max_lag`), which this stepper does not have; ()
        where there are none.
        """
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
        """Reuse those phases of a trace that were sampled one step ahead, as long as none of their inputs changes."""
        for stage in self._pipeline:
            if stage.name in trace.names and DRAWN in trace[stage.name].settings:
                self._reuse(stage, trace, self._weights(stage))

    def _reuse(self, stage: Stage, trace: Trace, states: tuple[str, ...]) -> None:
        """Use a stage's recorded phase, made by learners in the named states, as long as nothing that the stage reads
        changes.
        """
        self._recorded[stage.name] = phase = trace[stage.name]
        if not isinstance(stage, MissingStage):
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
        """Place the stepper before phase number `position` of a trace, and reuse the trace's earlier phases and later
        model outputs.

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
        """Use a stage's recorded phase. A later stage (`before` is false) is run again where it uses an engine that the
        caller passed.
        """
        roles = {id(learner): role for role, learner in self._pipeline.learners().items()}
        used = [(roles[id(learner)], learner) for learner in stage.learners() if id(learner) in roles]
        others = not before and any(role in self._given for role, _ in used)
        if not stage.updates and stage.name in trace.names and not others:
            self._reuse(stage, trace, tuple(_state(learner, f"update_{role}" in past) for role, learner in used))


def _state(learner: Any, updated: bool) -> str:
    """Return the name of a learner's state before or after its update of the step; an engine that the caller passed has
    one state.
    """
    states = learner.states if isinstance(learner, LateLearner) else [str(learner.state_id)]
    return states[-1 if updated else 0]


def _asks_models(settings: Mapping[str, Any], stage: str) -> bool:
    """Return whether a stage was made with an engine or a frozen model."""
    made = next(one["arguments"].values() for one in settings["pipeline"] if one["name"] == stage)
    return any(isinstance(value, dict) and ("engine" in value or "frozen" in value) for value in made)


@working("opening the step")
def stepper_at(folder: Path, step: int, at: str | None, values: Mapping[str, Any], trust: bool = False) -> Replayed:
    """Open a recorded step in a stepper: see `Run.stepper`. `values` are the caller's engines by role; with `trust` the
    folder's code may run.
    """
    settings = read_settings(folder)
    records: list[dict[str, Any]] = settings.get("pipeline", [])
    names = [one["name"] for one in records]
    if at is not None and at not in names:
        raise PipelineError(unknown("phase of this run", at, names))
    for role in sorted(values.keys() - settings["engines"].keys()):
        raise RunError(unknown("role of this run", role, settings["engines"]))
    past = names[: names.index(at)] if at is not None else []
    trace = _recorded(folder, step, at, past)
    if at is None and not values:
        return _at_the_start(folder, step, trace, trust)
    weights = Weights(folder, step, settings["engines"], trace, past, trust)
    late = late_learners(weights, settings)
    trace = _of_weights(trace, weights, values)
    before, after = controllers(folder, step)
    nowhere = names if before is None else past if after is None else []
    word = trust_of(folder, settings, trust)
    elsewhere = [str(engine.path) for engine in values.values() if getattr(engine, "path", None)]
    pipeline = rebuilt(records, {**late, **values}, frozen_of(settings, folder, word, elsewhere), word)
    pipeline = _with_records(pipeline, trace, records, nowhere)
    trace = trace or Trace(start_of(folder, step))
    stepper = Replayed(pipeline, trace.start, folder, step, given=tuple(values), late=weights)
    stepper.stand(trace, len(past), before or {}, after or {})
    return stepper


def _of_weights(trace: Trace | None, weights: Weights, given: Mapping[str, Any]) -> Trace | None:
    """Mark the old log-probs of a trace as computed by the recorded state of the actor, unless the caller passed
    another actor.
    """
    if trace is None or "actor" in given or "actor" not in weights.states:
        return trace
    state = weights.states["actor"][0]
    return Trace(trace.start, tuple(replace(one, batch=_signed(one.batch, state)) for one in trace))


def _signed(batch: DataProto, state_id: str) -> DataProto:
    """Mark the old log-probs of a recorded batch as computed by the weights called `state_id`."""
    origin = batch.origins.get("old_log_probs")
    if origin is None or origin.policy_version is None:
        return batch
    return batch.with_columns({"old_log_probs": batch["old_log_probs"]}, origin=replace(origin, state_id=state_id))


def _at_the_start(folder: Path, step: int, trace: Trace | None, trust: bool) -> Replayed:
    """Make a stepper that stands before the first phase of a step, with all engines opened at once."""
    start = start_of(folder, step)
    try:
        standing = standing_after(folder, step - 1, trust, make_room)
    except Untrusted:
        raise
    except RunError as error:
        if trace is None or not trace.names:
            raise
        opens = f"stepper({step}, at={trace.names[-1]!r}) opens the trace without weights"
        do = f"the trace of step {step} is recorded: {opens}"
        raise RunError(str(error), do=do) from error
    settings = read_settings(folder)
    weights = Weights(folder, step, settings["engines"], None, (), trust)
    weights.take(standing.learners())
    trim()
    word = trust_of(folder, settings, trust)
    pipeline = rebuilt(
        settings.get("pipeline", []), late_learners(weights, settings), frozen_of(settings, folder, word), word
    )
    pipeline.load_state(standing.state())
    pipeline = _with_records(pipeline, trace)
    if trace is None or not any(DRAWN in phase.settings for phase in trace):
        return Replayed(pipeline, start, folder, step)
    stepper = Replayed(pipeline, trace.start, folder, step)
    stepper.recall(trace)
    return stepper


def _recorded(folder: Path, step: int, at: str | None, past: list[str]) -> Trace | None:
    """Load a step's trace; None where there is none and no phase of `past` is needed. Raises `RunError` where it lacks
    phases of `past`.
    """
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
    """Give stages that cannot be made again their recorded outputs.

    Stages in `unknown` that have a controller count as such, because the controller's state was not recorded.
    """
    for record in records:
        stage = pipeline[record["name"]]
        if stage.name in unknown and stage.state() and not stage.updates:
            missing = MissingStage(record, "a controller whose state at that step was not kept")
            pipeline = pipeline.with_stage(stage.name, missing)
    for stage in pipeline:
        if trace is not None and isinstance(stage, MissingStage):
            pipeline = pipeline.with_stage(stage.name, stage.recorded(trace))
    return pipeline


def controllers(folder: Path, step: int) -> tuple[State | None, State | None]:
    """Return the controllers' states, by stage name, before and after a step; None where they were not recorded."""
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


class Traces(Shown, Mapping[int, Trace]):
    """The recorded traces of a run, step → trace, each loaded on access; displayed as a table with each step's main
    metrics.

    `files` are the files of the run; at an address a trace is copied when it is opened.
    """

    def __init__(self, folder: Path, files: RunFiles | None = None) -> None:
        self._folder = folder
        self._files = files or RunFiles(folder.parent)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of the run's metrics.jsonl, one dict per step."""
        return read_metrics(self._folder.parent / "metrics.jsonl")

    def why(self, step: int) -> Kept:
        """Return why the trace of a step was kept: it was due, or a symptom began in the step."""
        return read_kept(self._path(step))

    def reasons(self) -> dict[int, Kept]:
        """Return step → why its trace was kept. Traces that are deleted meanwhile are left out."""
        found = {step: (path, read_kept(path)) for step, path in self._there().items()}
        return {step: kept for step, (path, kept) in found.items() if path.is_dir()}

    def _there(self) -> dict[int, Path]:
        self._files.index()
        return {step: path for step, path in step_folders(self._folder).items() if (path / "trace.json").is_file()}

    def _path(self, step: int) -> Path:
        whole = isinstance(step, int) and not isinstance(step, bool)
        path = step_folder(self._folder, step if whole else 0)
        if not (path / "trace.json").is_file():
            known = list(self._there())
            expected = f"one of the steps {known}" if known else "a run with recorded steps (trace_freq)"
            do = "trace_freq=1, keep_traces=… of train keep more; run.stepper(step) does one of run.restorable_steps again"
            raise RunError(f"no trace of step {step!r}", expected=expected, do=do)
        return path

    def __getitem__(self, step: int) -> Trace:
        self._files.index()
        path = self._path(step)
        self._files.fetch(f"traces/{path.name}")
        return Trace.load(path)

    def __iter__(self) -> Iterator[int]:
        return iter(self._there())

    def __len__(self) -> int:
        return len(self._there())


class Run(Shown):
    """A run folder: metrics, curves, traces, checkpoints, settings and summary. Every access reads the disk again.

    A run at an address (`s3://…`, `https://…`, `hf://owner/name`) is read from a local copy and never written. A step's trace, a
    validation's samples and a checkpoint are copied when they are opened; the copy is deleted when this process ends. A
    stepper `at` a phase has no weights unless `run.fetch()` has copied everything. Raises `RunError` where the address
    cannot be read, naming the package that fsspec lacks for it.
    """

    elsewhere: ClassVar = {
        "log_history": "read run.rows, or run.metrics, a DataFrame",
        "plot": "draw run.curves()",
        "samples": "show a recorded step's: wb.views.samples(run.traces[step])",
        "save_model": "take run.checkpoint(), a model folder",
    }

    def __init__(
        self,
        path: str | Path,
        *,
        stopped: Stepper | None = None,
        notes: tuple[str, ...] = (),
        trust: bool = False,
    ) -> None:
        self._files = Remote(str(path)) if is_address(path) else RunFiles(path)
        self.trust = trust
        """Whether code that the folder brings or names may run here."""
        self.stopped = stopped
        self._notes = notes
        if not is_run(self.path):
            do = "check the address" if is_address(path) else "check the path"
            raise RunError(f"no run at {self.address!r}", expected="a folder with settings.json", do=do)
        read_settings(self.path)  # one of another format is refused here, not in the middle of something

    @property
    def path(self) -> Path:
        """The run's folder on this machine; of a run at an address the local copy, with its small files brought up to
        date.
        """
        self._files.look()
        return self._files.local

    @property
    def address(self) -> str:
        """Where the run is: its folder, or its address."""
        return self._files.address

    def fetch(self) -> Path:
        """Copy the whole run to this machine if it is at a remote address (`hf://…`, for example), and return its local folder."""
        self._files.fetch()
        return self._files.local

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about how the run began, and about rows that metrics.jsonl lacks although their steps were done."""
        done = max([0, *self.checkpoints, int(self.summary.get("steps") or 0)])
        return tuple(dict.fromkeys((*self._notes, *lost_rows(self.path, done))))

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl, one dict per step."""
        return read_metrics(self.path / "metrics.jsonl")

    @property
    def metrics(self) -> pd.DataFrame:
        """DataFrame of the metrics, indexed by `training/global_step`; step 0 is the validation before training."""
        import pandas as pd

        frame = pd.DataFrame(self.rows)
        return frame.set_index(STEP, drop=False) if len(frame) else frame

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that the run was started with, from settings.json."""
        return read_settings(self.path)

    @property
    def summary(self) -> Summary:
        """Rewards before and after, steps and seconds, from summary.json; empty while the run goes on."""
        path = self.path / "summary.json"
        return Summary(read_json(path) if path.is_file() else {})

    @property
    def traces(self) -> Traces:
        """The run's recorded traces by step."""
        return Traces(self.path / "traces", self._files)

    def val(self, step: int | None = None) -> DataProto:
        """The held-out samples of a validation (the newest by default) as a batch: `views.samples(run.val(20))`.

        Sampled responses come first, then greedy ones (column `greedy`); `rewards.evaluate_file` scores the file again.
        Raises `RunError` where that validation's samples are not on disk, naming those that are.
        """
        self._files.index()
        there = step_files(self.path / "val")
        wanted = max(there, default=None) if step is None else step
        if wanted is None or wanted not in there:
            what = "no held-out samples" if wanted is None else f"no held-out samples of step {wanted!r}"
            do = None if there else "validation needs eval_rows=… of train"
            raise RunError(
                f"{what} in {self.path}", expected=f"one of the steps {list(there)}" if there else None, do=do
            )
        self._files.fetch(f"val/{there[wanted].name}")
        return read_dump(there[wanted])

    def rollouts(self, steps: Iterable[int] | int | None = None, *, held_out: bool = False) -> DataProto:
        """The samples of recorded steps, with their rewards, as one batch, for example as a replay buffer;
        `views.samples` opens the batch.

        Column `from_run` says run, step, row, uid and policy version of each. `steps` are those of `run.traces`; None: all.
        Raises `RunError` where the run has no recorded samples or rewards, and without `held_out` where a sample answers a
        prompt that the run was measured on.
        """
        return reuse.rollouts(self, steps, held_out=held_out)

    def best(
        self,
        k: int = 1,
        above: float | None = None,
        steps: Iterable[int] | int | None = None,
        *,
        held_out: bool = False,
    ) -> Rows:
        """The k best different answers of each prompt, with a reward of at least `above`, as rows for `recipes.sft`
        (rejection sampling).

        A row has its prompt, the answer as its target, and in `extra_info["from_run"]` where it comes from, with the reward;
        the ground truth moves to `extra_info["ground_truth"]`. Raises `RunError` as `rollouts`, for episodes of agents, and where
        no answer is good enough.
        """
        return reuse.best(self.rollouts(steps, held_out=held_out), k, above)

    def pairs(self, margin: float = 0.0, steps: Iterable[int] | int | None = None, *, held_out: bool = False) -> Rows:
        """The best and the worst answer of each prompt whose rewards differ by more than `margin`, as rows with `chosen` and
        `rejected` for `recipes.dpo`, `recipes.reward_model` and `datasets.samples`. Otherwise as `best`."""
        return reuse.pairs(self.rollouts(steps, held_out=held_out), margin)

    @property
    def checkpoints(self) -> list[int]:
        """The steps that have a checkpoint, ascending."""
        self._files.index()
        return checkpoint.steps(self.path / "checkpoints")

    def checkpoint(self, step: int | str | None = None) -> Path:
        """The folder of a checkpoint (the newest by default, `"best"` that of `train(save_best=…)`), verified; `engines.local`
        opens it.

        Raises `RunError` where there is none, `CheckpointError` where it is damaged: no other one is taken instead.
        """
        if isinstance(step, str):
            require(step == BEST, "argument step of Run.checkpoint", expected=f"a number, or {BEST!r}", found=step)
            step = best_step(self.path)
        self._files.fetch_steps("checkpoints", *(self.checkpoints[-1:] if step is None else [step]))
        return checkpoint.verified(self.path, step)

    @working("saving the model")
    def save(
        self, folder: str | Path, form: str = "merged", *, dtype: str | None = None, step: int | str | None = None
    ) -> Path:
        """Write the trained model to a new folder, complete or not at all; returns the folder, or the GGUF file in it.

        Raises `RunError` for a folder that has files and for a step that cannot be restored, `EngineError` where the form
        cannot hold the model, `SettingError` for another form or dtype.

        Args:
            folder: a new or an empty folder.
            form: `merged`: a plain Hugging Face folder, adapters merged into the base, for transformers, vLLM and all that opens
                such; `adapter`: a LoRA run's adapter alone, for peft; `gguf`: one file, of Llama's, Qwen2's or Qwen3's
                architecture, for llama.cpp (needs the package `gguf`).
            dtype: `float32`, `bfloat16` or `float16`, None: that of the weights: of merged adapters float32, and float16
                where the base was kept in 4 or 8 bits; of a GGUF file `f32`, `f16` (the default), `bf16` or `q8_0`.
            step: the step whose weights are saved, `"best"`, or None: the newest checkpoint. A step without a checkpoint is
                restored (`restorable_steps`).

        Example:
            >>> run.save("my-model", dtype="bfloat16")  # doctest: +SKIP
            >>> run.save("my-gguf", "gguf", dtype="q8_0", step=40)  # doctest: +SKIP
        """
        return publishing.save(self, folder, form, dtype, step)

    def publish(
        self,
        name: str,
        *,
        private: bool = True,
        form: str = "merged",
        dtype: str | None = None,
        step: int | str | None = None,
        base: str = "",
        update: bool = False,
        dry_run: bool | None = None,
    ) -> publishing.Publication:
        """Upload the trained model to a repository `owner/name` of the Hugging Face hub, with a card; prints first what
        is uploaded and where.

        All files arrive as one commit, and a new repository is private until then. After an interruption the same call goes on:
        what has arrived is not sent again. The token is that of the hub's own login (`hf auth login`), and is written nowhere.
        Raises `RunError` where the login, the permission or the upload fails, and for a repository that has files.

        Args:
            name: the repository.
            private: whether only its owner sees it.
            form: what is uploaded; with `dtype` and `step` as in `save`.
            base: the base model's hub name, where the run began with a folder.
            update: add a commit to a repository that has files.
            dry_run: only show what would be uploaded; None: in a job (`workbench train`, papermill).

        Example:
            >>> run.publish("me/model", dtype="bfloat16", dry_run=True)  # doctest: +SKIP
        """
        how = {"form": form, "dtype": dtype, "step": step}
        asked = {"private": private, "base": base, "update": update, "dry_run": dry_run}
        return publishing.publish(self, name, how, asked)

    @property
    def symptoms(self) -> Symptoms:
        """The problems that show in the metrics, with advice; empty where there is none."""
        traces = self.traces
        return Symptoms(shown_by(self.rows, traces[max(traces)].batch if len(traces) else None))

    @working("diagnosing", passing=True)
    def diagnose(self) -> Diagnosis:
        """Find what is probably wrong with the run: causes, the surest first, each with what to look at and what to
        change.

        It reads the metrics, up to 1,024 samples of each of the last three recorded steps, and the audit of the last
        one where that has at most 2,048 rows. No model is opened.
        """
        traces, rows = self.traces, self.rows
        batches = {step: traces[step].batch for step in sorted(traces)[-TRACES:]}
        audit = self.audit(last) if batches and len(batches[last := max(batches)]) <= AUDITED else None
        died = f"{goes_on(self.path)}, {updates.kept_until(self.path)}" if self.state == "died" else ""
        known: dict[str, Any] = {"symptoms": self.symptoms, "settings": self.settings, "audit": audit}
        return diagnosed(gathered(rows, batches, died=died, **known))

    def history(self, prompt: Any) -> Any:
        """Show how one prompt's answers changed: the samples of the prompt at every step or validation that drew it and
        recorded its samples.

        `prompt` is a uid, the prompt's text (or a part that no other prompt has), a sample of any view
        (`samples(x).row(7)`), or a line of its table. A uid names one draw of a data row; the history joins all draws
        of that row. Displayed with one line per step and what changed; `.to_pandas()` gives a table, `.diff(10, 40)`
        compares two steps. Raises `RunError` for an unknown prompt, with the nearest one.
        """
        return shows(self, "history", prompt)

    @property
    def restorable_steps(self) -> str:
        """Steps whose exact weights can be restored, from checkpoints and recorded updates, such as `0, 3–6`."""
        self._files.index()
        return rebuild.restorable_steps(self.path)

    def audit(self, step: int | None = None) -> Audit:
        """Recompute the numbers of a recorded step (None: of every recorded step) by independent slow formulas, and
        compare.

        Columns and metrics that need the model, the clock or foreign code are listed with the reason. The tokenizer of
        the model folder is read; where that folder's files have changed since, this is listed too. No model is opened.
        Raises `RunError` where the step's trace is not on disk.
        """
        self._files.fetch("updates")
        self._files.fetch_steps("traces", *(self.traces if step is None else [step]))
        actor = (self.settings.get("engines") or {}).get("actor")
        report = audit_run(self.traces, self.rows, functools.partial(controllers, self.path), step, actor)
        there = bool(actor and actor.get("path") and Path(actor["path"]).is_dir())
        wrong = rebuild.wrong_files(actor) if actor and there else None
        return replace(report, left={**report.left, "tokenizer": wrong}) if wrong else report

    # --- any step again -------------------------------------------------------------------------

    def stepper(self, step: int, at: str | None = None, engines: Mapping[str, Any] | None = None) -> Replayed:
        """Open a recorded step in a stepper, before its first phase or before the phase `at`.

        Without `at` the engines are opened at once, with the weights of the newest checkpoint before and the recorded
        updates since. Running the step gives the run's own numbers, bit for bit on the CPU with the run's thread count.

        With `at` the step's trace must be on disk. Earlier phases are taken from it, and so are later log-probs and
        values while the tokens are the same. An engine is opened only when a stage needs one: `run.stepper(137,
        at="reward").replace("reward", other).run(until="advantage")` needs no model at all.

        A stage whose parts were recorded by name only (a reward function from a cell) returns its recorded outputs, and
        `notes` say so; where its input has changed it must be replaced. `engines` (role → engine) are used instead of
        the run's, with their present weights. Raises `RunError` where the step cannot be restored, naming those that
        can.
        """
        self._files.fetch_steps("traces", step)
        if at is None:
            self._fetch_weights(step - 1)
        return stepper_at(self.path, step, at, engines or {}, self.trust)

    def engine(self, step: int, role: str = "actor") -> Any:
        """A new engine with exactly the weights and optimizer after a step (0: before training)."""
        self._fetch_weights(step)
        return rebuild.standing_after(self.path, step, self.trust).learners()[role]

    def _fetch_weights(self, step: int) -> None:
        """Copy here what restores the weights after a step: all updates, the newest checkpoint up to the step, and that
        of step 0.
        """
        before = [one for one in self.checkpoints if one <= step]
        self._files.fetch("updates")
        self._files.fetch_steps("checkpoints", *before[-1:], *[0] * (0 in before))

    def counterfactual(
        self, step: int, *, uids: Sequence[str] = (), rows: Sequence[int] = (), until: int | None = None
    ) -> rebuild.Counterfactual:
        """Repeat the recorded updates from `step` on without some groups (`uids`) or `rows` of that step, and compare.

        `until` is the last update to repeat (the last recorded one by default). Later updates use the recorded tokens and
        advantages. Raises `RunError` where no such row is in the batch, or nothing would be left.
        """
        return rebuild.counterfactual(self.fetch(), step, self.trust, uids=uids, rows=rows, until=until)

    # --- while it goes on -----------------------------------------------------------------------

    @property
    def state(self) -> str:
        """`running`, `finished`, `stopped` (the summary says why), or `died` (no process writes the run and it has no
        summary).

        A run at an address counts as `running` while it has a lock file: whether a process holds it cannot be seen from
        here.
        """
        if self._files.locked():
            return "running"
        if not (summary := self.summary):
            return "died"
        return "stopped" if summary.get("stopped") else "finished"

    async def follow(self, every: float = 2.0) -> Run:
        """Show progress and curves of a run that another process is writing, until the run ends; the run is read every
        `every` seconds. Call it with `await`.
        """
        steps = int(self.settings["train"]["steps"])
        live, seen = shows(self, "live", steps), 0
        while True:
            over, rows = self.state != "running", self.rows
            for row in rows[seen:]:
                live.on_row(row, row.get("timing_s/step", 0.0) * (steps - row[STEP]))
            seen = len(rows)
            if over:
                live.close(self.summary.get("stopped") if self.summary else self.state)
                return self
            await asyncio.sleep(every)

    def curves(self, *metrics: str, marks: bool = True, **others: Run | str | Path) -> Any:
        """Draw the metric curves as a matplotlib figure; other runs (or their folders), passed by name, are overlaid.

        In a live notebook a widget lies over the figure: values under the pointer, zoom, smoothing, log scale, and the
        samples of a step that is clicked. `metrics` are those to draw instead of the main ones, by the panel's titles,
        by name or as patterns: `run.curves("KL", "critic/*", "mine/len")`. `marks` numbers this run's symptoms on the
        step axis and lists them beneath. `figure` has more settings. Raises `SettingError` for a name that no run has.
        """
        opened = {name: run if isinstance(run, Run) else load_run(run) for name, run in others.items()}
        return shows(self, "curves", *metrics, marks=marks, others=opened)

    def figure(self, *keys: str, others: Mapping[str, Run] | None = None, marks: bool = False, **options: Any) -> Any:
        """Draw curves for a paper in one call: `run.figure("reward", "KL", path="curves.pdf", others={"DAPO": other})`.

        `options` are those of `views.figure`: `path` (pdf, svg or png), `width` ("column", "page" or inches), `height`,
        `name`, `smooth`. `marks` numbers symptoms on the step axis; the caption says what they are.
        """
        return shows(self, "figure", *keys, others=others, marks=marks, **options)

    def tensorboard(self) -> str:
        """Show TensorBoard on this run in the cell; outside a notebook return its command line. Needs a browser that
        reaches its local port.
        """
        return str(shows(self, "tensorboard"))


class Summary(Shown, dict[str, Any]):
    """summary.json as a dict, displayed as a table."""

    @property
    def why(self) -> str:
        """Why the run was stopped, such as `by hand after step 3`; "" where it was not."""
        return (self.get("stopped") or "").removeprefix("stopped ")

    def pairs(self) -> list[tuple[str, str]]:
        """Return (name, text) pairs of the main numbers, for display."""
        pairs = []
        for when in ("before", "after"):
            if f"reward_{when}" in self:
                found = self[f"reward_{when}"], *self[f"interval_{when}"], self[f"greedy_{when}"]
                mean, low, high, greedy = map(number, found)
                text = f"{mean}  (95 % in [{low}, {high}], greedy {greedy}, {self.get('num_eval_rows')} prompts)"
                pairs.append((f"held-out reward {when}", text))
        pairs += [("steps", str(self["steps"]))] if self.get("steps") else []
        pairs += [("time", clock(self["seconds"]))] if self.get("seconds") is not None else []
        return pairs + ([("stopped", self.why)] if self.get("stopped") is not None else [])


def load_run(path: str | Path, *, trust: bool = False) -> Run:
    """Open a run folder, of a finished or a running run; also at an address (`s3://…`), or in a repository of the Hugging Face
    hub (`hf://owner/name[@revision]`), to read it. Raises `RunError` where there is none.

    Without `trust` the folder is only data: code that it brings or names (Python files of a model, a reward file in it)
    does not run, and nothing is sent to addresses in its settings. A step that needs such code says so, with the hash
    of the file.
    """
    return Run(path, trust=trust)


_ALWAYS = (
    "state", "steps", "reward before", "reward after", "training reward", "reward by step", "symptoms", "seconds", "changed",
)  # fmt: skip


def find_runs(folder: str | Path = "runs") -> list[Path]:
    """Find run folders in `folder`, up to two levels down, the newest last. Raises `RunError` where it does not exist."""
    root = Path(folder)
    if not root.is_dir():
        raise RunError(f"no folder {str(root)!r}", do="pass the folder that has the run folders")
    found = {path.parent for depth in ("", "*/", "*/*/") for path in root.glob(f"{depth}settings.json")}
    return sorted(filter(is_run, found), key=lambda path: (path / "settings.json").stat().st_mtime)


def list_runs(folder: str | Path = "runs", *, settings: bool = True) -> pd.DataFrame:
    """Make a DataFrame with one row per run: state, steps, held-out rewards, the last training reward, all training
    rewards as a line of bars, the number of symptoms that the run shows now, seconds; then the settings in which the
    runs differ, and the parameters of their notebooks that no setting shows. `folder` may be an address (`s3://…`).

    A run that cannot be read has the error as its state.
    """
    if is_address(folder):
        return table(runs_at(str(folder)), settings=settings)
    root = Path(folder)
    found = find_runs(root)
    return table({str(one.relative_to(root)) if one != root else one.name: one for one in found}, settings=settings)


def table(runs: Mapping[str, str | Path], *, settings: bool = True) -> pd.DataFrame:
    """Make the DataFrame of `list_runs` over runs given by name."""
    import pandas as pd

    lines, differing, shown = {}, {}, list[tuple[str, list[str]]]()
    for name, path in runs.items():
        try:
            run = load_run(path)
            lines[name], differing[name] = _line(run), dict(_flat(run.settings)) | _parameters(run.path)
        except RunError as error:
            lines[name], differing[name] = {"state": first_line(error)}, {}
    frame = pd.DataFrame.from_dict(lines, orient="index", columns=list(_ALWAYS))
    if settings and len(frame) > 1:
        for key in dict.fromkeys(key for one in differing.values() for key in one):
            values = [one.get(key) for one in differing.values()]
            text = list(map(repr, values))
            if len(set(text)) == 1 or (key, text) in shown:  # the parameter `lr` beside `actor.lr` says nothing
                continue
            frame[key] = values
            shown.append((key.rpartition(".")[2], text))
    return frame


def _parameters(path: Path) -> dict[str, Any]:
    """Return the parameters of the job that wrote a run, set and default ones; {} for a run of a script."""
    try:
        job = read_json(path / "job.json") if (path / "job.json").is_file() else {}
    except RunError:
        return {}
    found = dict(job.get("all", {}))
    kept = {name: value for name, value in found.items() if name not in ("run", "resume", "steps", "seed")}
    return {f"job.{name}" if name in (*_ALWAYS, "data") else name: value for name, value in kept.items()}


def _line(run: Run) -> dict[str, Any]:
    rows, summary, plan = run.rows, run.summary, run.settings.get("train", {})
    metrics = ("val/reward", "critic/score/mean")
    held, training = ([row[name] for row in rows if row.get(name) is not None] for name in metrics)
    changed = time.strftime("%Y-%m-%d %H:%M", time.localtime((run.path / "settings.json").stat().st_mtime))
    more = {"stopped": summary.why, "died": f"goes on {updates.kept_until(run.path)}"}.get(state := run.state)
    return {
        "state": f"{state}: {more}"[:80] if more else state,
        "steps": f"{rows[-1][STEP] if rows else 0}/{plan.get('steps', '?')}",
        "reward before": held[0] if held else None,
        "reward after": held[-1] if len(held) > 1 else None,
        "training reward": training[-1] if training else None,
        "reward by step": blocks(training, 24) or None,
        "symptoms": len(symptoms(rows)),
        "seconds": round(seconds_of(rows), 1),
        "changed": changed,
    }


def _flat(settings: dict[str, Any]) -> list[tuple[str, Any]]:
    """List the settings that a person chose as pairs (`actor.lr`, value); settings that follow from others are left
    out.
    """
    train = settings.get("train") or {}
    pairs = [("data", settings.get("data")), ("seed", train.get("seed"))]
    left_out = {"files_crc32", "trackers", "steps", "seed"}
    groups = [*(settings.get("stages") or {}).items(), *(settings.get("engines") or {}).items(), ("train", train)]
    for group, values in groups:
        pairs += [(f"{group}.{key}", value) for key, value in values.items() if key not in left_out]
    return pairs
