"""Makes a run's pipeline again from its settings.json, with the exact weights of any of its steps.

Stages, losses, estimators, controllers and scorers of this package are looked up by name: no recorded source text is
executed. Engines are opened from their recorded paths, of their recorded kind where this machine can run it. What the
folder has by name alone comes back as `MissingStage`, which says so and can be replaced.

A step's weights need no checkpoint of their own: they are the newest checkpoint before it and the recorded updates since.
No rollout and no reward is run again: `standing_after(run, 137)` is checkpoint 120 and 17 updates. On the CPU, with as many
threads as the run had, the weights are those of the run bit for bit.

A folder's settings are what its sender wrote. They may name code (a reward's file, Python files beside a model) and addresses
that rows would be sent to: none of it runs until a person says `wb.load_run(path, trust=True)`. Whatever makes an object of a
record asks `Trust` first. A reward file of the person's own, outside the folder and with the recorded text, is what they named
themselves; it runs as recorded.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import importlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from workbench import stages
from workbench.base.errors import PipelineError, RunError, WorkbenchError, first_line, unknown
from workbench.base.metrics import Metric
from workbench.base.shown import Shown, hidden_in, shown
from workbench.compat.verl_reward import read_block, reward_from
from workbench.dataproto.core import DataProto
from workbench.dataproto.value import same, unchanged
from workbench.engines.fsdp_engine.engine import FsdpEngine, fsdp
from workbench.engines.local_engine.engine import LocalEngine, local, shared_reference
from workbench.engines.local_engine.loading import folder_of
from workbench.engines.local_engine.reward_model import reward_model
from workbench.engines.paired import Paired, paired
from workbench.engines.protocol import Sampler, switches_of
from workbench.engines.settings import FsdpSettings, LocalSettings
from workbench.rewards.reward import by_data_source
from workbench.runs import checkpoint, updates
from workbench.runs.folder import is_run, read_settings, step_folder
from workbench.runs.settings import MADE_AGAIN, WORDS, crc_of_class, files_crc32, place_of
from workbench.runs.updates import apply
from workbench.stages.pipeline import Pipeline
from workbench.stages.stage import BaseStage, Outcome, Stage, used
from workbench.steps.trace import Phase, Trace, of_log_probs

_GRANTING = (
    "custom_reward_function.",
    "reward_model.",
    "reward_manager.module.",
    "reward_manager.source",
    "sandbox_fusion.",
)
"""Settings of a verl block that name code, or where rows are sent."""
FUNCTIONS = ("workbench.functional.", "workbench.rewards.scorers.", "workbench.stages.")
"""Modules of this package whose functions a record may name: these functions only compute, and neither read files nor
start programs."""


class Untrusted(RunError):
    """Raised where a run's settings ask for something that only the person who opens the run may allow, such as running
    its code.
    """


@dataclass(frozen=True)
class Trust:
    """What the records of one run folder may do here; `given` is true where the person who opens it trusts all of it
    (`trust=True`).
    """

    folder: Path
    given: bool
    sources: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Stage → setting → source text, as recorded."""

    @property
    def advice(self) -> str:
        """The sentence that tells the person how to allow what was refused: `look at it; … wb.load_run('…', trust=True)
        runs it`.
        """
        return (
            f"look at it; if you trust whoever made the folder, wb.load_run({str(self.folder)!r}, trust=True) runs it"
        )

    def check_engine(self, path: Path, record: Mapping[str, Any]) -> None:
        """Raise `Untrusted` where a recorded engine would run code that comes with its model folder or from the hub."""
        remote, attention = record.get("trust_remote_code", False), str(record.get("attn_implementation"))
        if self.given or (remote in (None, False) and "/" not in attention):
            return
        code = [f"{file.relative_to(path)} ({_hash(file)})" for file in sorted(path.rglob("*.py"))]
        asks = f"trust_remote_code={remote!r}" if remote else f"attn_implementation={attention!r}, code of the hub"
        found = f"{asks}; in {path}: {', '.join(code[:8]) or 'no Python file'}{' …' * (len(code) > 8)}"
        raise Untrusted(f"{self.folder} asks to run code that comes with a model", found=found, do=self.advice)

    def against(self, name: str | None, arguments: Mapping[str, Any]) -> str | None:
        """Return why a stage with these recorded arguments is not made, as text; None where it may be.

        Refused are arguments that contain a secret, and a reward's `function` that names a file of other or untrusted
        source text.
        """
        if secrets := ", ".join(dict.fromkeys(hidden_in(arguments))):
            return f"{secrets}: a secret, which no file of the run has: pass it again"
        named = arguments.get("function")
        file = Path(named.partition(":")[0].removeprefix("file://")).resolve() if isinstance(named, str) else None
        if file is None or not file.is_file():
            return None  # nothing runs: it is said that it is missing
        recorded = self.sources.get(name or "", {}).get("function")
        if recorded is not None and shown(file.read_text("utf-8", "replace")) != recorded:
            was = hashlib.sha256(recorded.encode()).hexdigest()[:16]
            return f"{named} ({_hash(file)}), which had sha256 {was} in the run"
        if self.given or not (recorded is None or self._may_be_foreign(file)):
            return None
        return f"{named} ({_hash(file)}), which you have not named; {self.advice}"

    def against_block(self, settings: Mapping[str, Any]) -> str | None:
        """Return why settings of verl's reward (dotted names) are not followed, as text; None where they may be.
        Refused are those that name code or addresses.
        """
        asks = {key: value for key, value in settings.items() if key.startswith(_GRANTING)}
        if not asks or self.given:
            return None
        files = [Path(str(value).removeprefix("file://")) for key, value in asks.items() if key.endswith(".path")]
        hashes = [f"{file.name} ({_hash(file)})" for file in files if file.is_file()]
        return "; ".join((", ".join(f"{key}={value!r}" for key, value in asks.items()), *hashes, self.advice))

    def _may_be_foreign(self, file: Path) -> bool:
        """Return whether a file may come from whoever made the run folder: it lies in this or another run, in the
        folder of runs, or in an installed package.
        """
        here, run = Path.cwd().resolve(), self.folder.resolve()
        below = run.relative_to(here).parts if run.is_relative_to(here) else ()
        around = here / below[0] if below else run if here.is_relative_to(run.parent) else run.parent
        installed = {"site-packages", "dist-packages"} & {*file.parts}
        return bool(installed) or file.is_relative_to(around) or any(map(is_run, file.parents))


STRANGER = Trust(Path(), False)
"""The trust of a record without a known source: none of its code runs."""


def _hash(file: Path) -> str:
    return f"sha256 {hashlib.sha256(file.read_bytes()).hexdigest()[:16]}"


class MissingStage(BaseStage):
    """Placeholder for a recorded stage that cannot be made again, such as a reward function from a notebook cell.

    With the record of its step (`recorded`) it returns the recorded outputs as long as its inputs equal the recorded
    ones; otherwise calling it raises `PipelineError`, and it must be replaced.
    """

    _phase: Phase | None = None
    _before: DataProto | None = None

    def __init__(
        self, record: Mapping[str, Any], what: str, learner: Any = None, remake: Callable[..., Stage] | None = None
    ) -> None:
        self.name, self.what = record["name"], what
        self.reads, self.writes = tuple(record["reads"]), tuple(record["writes"])
        self.optional = tuple(record.get("optional", ()))
        self.updates = learner is not None
        self._record, self._learner, self._remake = record, learner, remake

    def recorded(self, trace: Trace) -> MissingStage:
        """Return a copy that gives the outputs recorded in `trace`; itself for update stages and where the trace lacks
        the stage.
        """
        if self.updates or self.name not in trace.names:
            return self
        twin = copy.copy(self)
        twin._phase, twin._before = trace[self.name], trace.before(self.name)
        return twin

    @property
    def has_record(self) -> bool:
        """Whether the placeholder has recorded outputs to return."""
        return self._phase is not None

    def settings(self) -> dict[str, Any]:
        """Return the settings for display: what the stage was made with, and whether its outputs are the recorded ones."""
        return {"made_with": self.what, **({"outputs": "recorded, not run again"} if self.has_record else {})}

    def learners(self) -> tuple[Any, ...]:
        """Return the learner that the stage would update; () for other stages."""
        return (self._learner,) if self.updates else ()

    def with_function(self, function: Callable[..., Any]) -> Stage:
        """Make the stage again with another function: a reward, an advantage estimator, or the agent loop of a rollout."""
        if self._record["class"] in ("EpisodeRollout", "TreeRollout"):
            return self.with_settings(agent=function)
        if self._record["class"] not in ("Reward", "Advantage"):
            return super().with_function(function)
        return getattr(stages, self._record["class"])(function)

    def with_settings(self, **changes: Any) -> Stage:
        """Make the stage again with changed settings and the missing arguments, as in `replace("rollout", agent=mine)`.

        Raises `PipelineError` where a part is still missing.
        """
        what = self.what
        if self._remake is not None:
            try:
                return self._remake(changes)
            except _Gone as gone:
                what = str(gone)
        raise PipelineError(f"settings of stage {self.name!r} cannot be changed", do=self._advice(what))

    def _advice(self, what: str) -> str:
        lacks = [key for key, one in self._record["arguments"].items() if _lacks(one)]
        again = f"replace({self.name!r}, {', '.join(f'{key}=…' for key in lacks)})" if lacks and self._remake else ""
        if "own" in self._record:
            again = f"run the cell that defines {self._record['own'][0]} and do this again"
        ways = " or ".join(filter(None, (again, f"replace({self.name!r}, …) with another stage or function")))
        return f"the stage was made with {what}, which cannot be made again from the run folder alone: {ways}"

    def __call__(self, batch: DataProto) -> Outcome:
        """Return the recorded outputs where the batch equals the recorded one, with the metric `recorded/<stage>` = 1.

        Raises `PipelineError` where the batch differs or nothing is recorded.
        """
        differing = self._differing(batch)
        if self._phase is None or differing:
            what = f"stage {self.name!r} of the run cannot be run again here"
            expected = f"the recorded {', '.join(differing)} as its input, to reuse its outputs" if differing else None
            found = "other values" if differing else None
            raise PipelineError(what, expected=expected, found=found, do=self._advice(self.what))
        metrics: dict[str, Metric | float] = {**self._phase.metrics, f"recorded/{self.name}": 1.0}
        if self._phase.rows is not None:
            return Outcome(self._phase.batch, metrics, self._phase.rows)
        return Outcome(self._phase.written_into(batch), metrics)

    def _differing(self, batch: DataProto) -> list[str]:
        """Return the columns that differ from the recorded ones, among those that the stage reads and those of the data
        set.
        """
        before = self._before
        if self._phase is None or before is None:
            return []
        if len(batch) != len(before):
            return ["rows"]
        every, origins = self._phase.rows is not None, before.origins
        read = [name for name in before.columns if every or name not in origins or origins[name].stage == "dataset"]
        names = dict.fromkeys((*used(self, before), *used(self, batch), *read))
        moved = [name for name in names if not unchanged(name, before, batch)]
        return [name for name in moved if not (name in before and name in batch and same(before[name], batch[name]))]


class _Gone(Exception):
    """Raised where an argument cannot be made again here; its text names the argument."""


def trust_of(folder: Path, settings: Mapping[str, Any], given: bool) -> Trust:
    """Make the `Trust` of a run folder; `given` is true where the person trusts it."""
    return Trust(folder, given, settings.get("sources") or {})


def rebuilt(
    records: list[dict[str, Any]],
    learners: Mapping[str, Any],
    open_frozen: Callable[..., Any],
    trust: Trust = STRANGER,
) -> Pipeline:
    """Make a recorded pipeline again on these learners (by role). `open_frozen(record)` opens a frozen model.

    Stages that cannot be made become `MissingStage`. Raises `RunError` where there are no records, as in runs of an old
    version.
    """
    if not records:
        raise RunError("the run has no record of its pipeline", do="look at its recorded traces: run.traces[step]")
    maker, stages = _Maker(learners, open_frozen, trust), []
    for record in records:
        remake = functools.partial(maker.stage, record)
        learner = learners.get(record["updates"])
        try:
            stages.append(remake({}))
        except _Gone as gone:
            stages.append(MissingStage(record, str(gone), learner, remake))
        except (TypeError, WorkbenchError) as error:  # this version's stage does not take that version's arguments
            stages.append(MissingStage(record, f"arguments of another version ({first_line(error)})", learner, remake))
    return Pipeline(stages)


@dataclass(frozen=True)
class _Maker:
    """Makes stages and arguments from the plain values that `runs.settings.written_down` wrote. Raises `_Gone` for what
    cannot be made.
    """

    learners: Mapping[str, Any]
    open_frozen: Callable[..., Any]
    trust: Trust

    def stage(self, record: Mapping[str, Any], inner: Mapping[str, Any]) -> Stage:
        """Make one stage from its record, with the arguments or settings in `inner` in place of the recorded ones."""
        kind = getattr(stages, record["class"]) if record["class"] in stages.__all__ else _own_class(record)
        of_it = record["arguments"]
        if why := self.trust.against(
            record.get("name"), {key: value for key, value in of_it.items() if key not in inner}
        ):
            raise _Gone(why)
        arguments = {key: inner[key] if key in inner else self.value(value) for key, value in of_it.items()}
        stage: Stage = kind(**arguments)
        rest = {key: value for key, value in inner.items() if key not in of_it}
        return stage.with_settings(**rest) if rest else stage

    def value(self, plain: Any) -> Any:
        """Make one argument of a stage from its recorded plain value."""
        if isinstance(plain, list):
            return tuple(map(self.value, plain))
        if not isinstance(plain, dict):
            return plain
        for word, inside in WORDS.items():
            if word in plain:
                return self.part(plain[word], plain[inside])
        if "mapping" in plain:
            return {key: self.value(one) for key, one in plain["mapping"].items()}
        if "engine" in plain:
            return self.learners[plain["engine"]]
        if "stage" in plain:
            return self.stage(plain["stage"], {})
        if "frozen" in plain:
            return self.open_frozen(plain["frozen"])
        if "reward" in plain:
            return by_data_source(**plain["reward"])
        if "block" in plain:
            if why := self.trust.against_block(read_block(plain["block"])):
                raise _Gone(why)
            return reward_from(plain["block"], tokenizer=_LateTokenizer(self.learners["actor"]))
        if "function" in plain:
            return _function(plain["function"])
        raise _Gone(plain["missing"])

    def part(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Make an object of one of the classes in `MADE_AGAIN`, such as a loss or a KL controller, from its recorded
        arguments.
        """
        kind = next((candidate for candidate in MADE_AGAIN if candidate.__name__ == name), None)
        if kind is None:
            raise _Gone(name)
        try:
            return kind(**{key: self.value(candidate) for key, candidate in arguments.items()})
        except _Gone as gone:
            raise _Gone(f"{gone} in a {name}") from gone


def _own_class(record: Mapping[str, Any]) -> type[Stage]:
    """Find the user's class of a recorded stage in this process, by its recorded name and source text. Raises `_Gone`
    where there is none.
    """
    name, crc = record.get("own") or (None, None)
    known: list[Any] = [BaseStage]
    for candidate in known:  # it grows
        known += candidate.__subclasses__()
    named = [candidate for candidate in known if candidate.__name__ == name]
    matching = [candidate for candidate in named if crc is not None and crc_of_class(candidate) == [name, crc]]
    if not matching:
        raise _Gone(f"a {name} of another source text" if named else f"a class of another package ({record['name']})")
    return matching[-1]


class _LateTokenizer:
    """Stands in for a learner's tokenizer, and opens the learner's engine only when the tokenizer is first used."""

    def __init__(self, learner: Any) -> None:
        self._learner = learner

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._learner.tokenizer(*args, **options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # a copy has no learner yet
            raise AttributeError(name)
        return getattr(self._learner.tokenizer, name)


def _lacks(plain: Any) -> bool:
    """Return whether some part of a recorded argument was recorded only by its name."""
    if isinstance(plain, list):
        return any(map(_lacks, plain))
    return isinstance(plain, dict) and ("missing" in plain or any(map(_lacks, plain.values())))


def _function(place: str) -> Any:
    """Import a function of this package by `module:name`. A record can name nothing outside `FUNCTIONS`; raises `_Gone`
    for all else.
    """
    module, _, name = place.partition(":")
    if not place.startswith(FUNCTIONS):
        raise _Gone(f"the function {place}")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):  # it has moved since
        raise _Gone(f"the function {place}") from None
    if place_of(function) != place:  # of another module, which this one imports
        raise _Gone(f"the function {place}")
    return function


# --- engines ------------------------------------------------------------------------------------

_BESIDE = {"path", "files_crc32", "ranks", "sampler"}
"""Keys of an engine's record that are not settings."""


def sharded_here(record: Mapping[str, Any]) -> bool:
    """Return whether a recorded engine was sharded (FSDP) and this machine has enough devices for it; if not, a local
    one is opened.
    """
    ranks, device = record.get("ranks"), record.get("device", "auto")
    if ranks is None:
        return False
    on_gpus = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    return int(ranks) <= (torch.cuda.device_count() if on_gpus else os.cpu_count() or 1)


def opened(
    path: str | Path, record: Mapping[str, Any], trust: Trust = STRANGER, door: Callable[..., Any] = local
) -> Any:
    """Open a model folder as a learner with a recorded engine's settings: sharded if the recorded engine was sharded
    and this machine has enough devices, else by `door`.

    Raises `RunError` for a setting that no such engine has, and `Untrusted` for code of the model without `trust`.
    """
    trust.check_engine(Path(path), record)
    whole = FsdpSettings if "ranks" in record else LocalSettings
    strange = [name for name in record if name not in _BESIDE and name not in whole.field_names()]
    if strange:
        raise RunError(unknown("setting of a recorded engine", strange[0], whole.field_names()))
    kind = FsdpSettings if sharded_here(record) else LocalSettings
    values = _settings(record, kind)
    return fsdp(path, ranks=record["ranks"], **values) if kind is FsdpSettings else door(path, **values)


def _settings(record: Mapping[str, Any], kind: type[LocalSettings]) -> dict[str, Any]:
    known = {name: one for name, one in record.items() if name in kind.field_names()}
    return {name: tuple(one) if isinstance(one, list) else one for name, one in known.items()}


def learner_of(role: str, path: Path, record: Mapping[str, Any], trust: Trust) -> Any:
    """Open the engine that trains a role from a model folder. `record` is the run's record of that engine: its path and
    settings.

    An engine that cannot sample is paired with a local sampler. For the role "critic" the engine's `critic()` is
    returned.
    """
    engine = opened(path, record, trust, reward_model if role == "reward_model" else local)
    engine.path = str(record["path"])
    if role == "critic":
        return engine.critic()
    if isinstance(engine, Sampler):
        return engine
    alike = {name: record[name] for name in ("device", "dtype", "attn_implementation") if name in record}
    return paired(engine, local(path, **alike))


def kinds_of(record: Mapping[str, Any]) -> tuple[type, ...]:
    """Return the engine classes that `learner_of` can return for a recorded engine."""
    return (Paired, FsdpEngine) if sharded_here(record) else (LocalEngine,)


class LateFrozen:
    """A frozen model, such as the reference policy, that is loaded at its first use.

    It is loaded from its recorded folder, or from a folder in `elsewhere` that has the same files. Loading raises
    `RunError` where there is none.
    """

    def __init__(self, record: Mapping[str, Any], trust: Trust, elsewhere: Sequence[str] = ()) -> None:
        self._record, self._trust, self._elsewhere = dict(record), trust, elsewhere
        self._made: Any = None

    def describe(self) -> dict[str, Any]:
        """Return path and settings of the frozen model; `as_loaded` says that its weights are those of the path."""
        return {**self._record, "as_loaded": True}

    def _opened(self) -> Any:
        if self._made is None:
            others = self._elsewhere if self._record.get("files_crc32") is not None else ()
            records = [self._record, *({**self._record, "path": path} for path in others)]
            record = next((one for one in records if wrong_files(one) is None), None)
            if record is None:
                what, wrong = "the frozen model of the run is needed here", wrong_files(self._record)
                raise RunError(what, expected="its model folder", found=wrong, do=passing("step", ["actor"]))
            path, settings = str(record["path"]), LocalSettings(**_settings(record, LocalSettings))
            shared = None if sharded_here(record) else shared_reference(path, settings)
            self._made = shared or opened(path, record, self._trust).reference()
        return self._made

    def compute_log_probs(self, *args: Any, **options: Any) -> Any:
        """Compute log-probs as `LogProbModel.compute_log_probs` does; loads the frozen model at the first call."""
        return self._opened().compute_log_probs(*args, **options)

    @property
    def tokenizer(self) -> Any:
        """The frozen model's tokenizer; loads the model at the first call."""
        return self._opened().tokenizer

    @property
    def template_switches(self) -> Mapping[str, Any]:
        """Further arguments of the frozen model's chat template."""
        return switches_of(self._opened())

    def top_log_probs(self, *args: Any, **options: Any) -> Any:
        """Score a batch as `GivesTops.top_log_probs` does; loads the frozen model at the first call."""
        return self._opened().top_log_probs(*args, **options)

    def distributions(self, *args: Any, **options: Any) -> Any:
        """Run the frozen model as `WholeTeacher.distributions` does; loads it at the first call."""
        return self._opened().distributions(*args, **options)

    @contextmanager
    def model(self) -> Iterator[Any]:
        """Context manager: loads the frozen model and yields its `nn.Module`."""
        with self._opened().model() as model:
            yield model

    def __repr__(self) -> str:
        return repr(self._made) if self._made is not None else f"LateFrozen({self._record['path']!r}, not opened)"


def passing(step: int | str, roles: Iterable[str]) -> str:
    """Return the advice for a run whose model is not at its path: to pass engines for `roles` to `run.stepper(step,
    engines=…)`.
    """
    engines = (f"{role!r}: wb.engines.local(folder){'.critic()' * (role == 'critic')}" for role in roles)
    return f"copy the model there, or pass one from its folder: run.stepper({step}, engines={{{', '.join(engines)}}})"


def frozen_of(
    settings: Mapping[str, Any], run: Path, trust: Trust, elsewhere: Sequence[str] = ()
) -> Callable[[Mapping[str, Any]], LateFrozen]:
    """Make the function by which `rebuilt` opens a recorded frozen model (a reference, a reward model) when it is needed.

    The model is read from the run's checkpoint of step 0 where it is kept there. Otherwise it is read from its recorded
    path, or from one of the folders `elsewhere`, and its files must have the recorded crc32.
    """
    known = {str(one["path"]): one.get("files_crc32") for one in settings["engines"].values()}

    def open_frozen(record: Mapping[str, Any]) -> LateFrozen:
        if "kept" not in record:
            return LateFrozen({"files_crc32": known.get(str(record["path"])), **record}, trust, elsewhere)
        place = step_folder(run / "checkpoints", 0) / record["kept"]
        return LateFrozen({**{key: one for key, one in record.items() if key != "kept"}, "path": str(place)}, trust)

    return open_frozen


def wrong_files(record: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the model folder of a recorded engine, as text; None where its files match their crc32,
    if there is one.
    """
    path = folder_of(str(record["path"]))
    if not path.is_dir():
        return f"no folder at {path}"
    if record.get("files_crc32") not in (None, files_crc32(path)):
        return f"other files than the run's at {path}"
    return None


# --- weights ------------------------------------------------------------------------------------


def standing_after(folder: Path, step: int, given: bool = False, ready: Callable[[], Any] = lambda: None) -> Pipeline:
    """Make a run's pipeline again with its weights, optimizers and controllers after `step` (0: before training). With
    `given` the folder's code is trusted and runs; `ready` is called before an engine is opened.

    Raises `RunError` where checkpoints and recorded updates do not reach that step, naming the steps that can be
    restored.
    """
    settings = read_settings(folder)
    trust = trust_of(folder, settings, given)
    base, engines = _nearest(folder, settings, step, trust, ready)
    pipeline = rebuilt(settings.get("pipeline", []), engines, frozen_of(settings, folder, trust), trust)
    pipeline.load_state(_controllers_at(folder, settings, base))
    for _ in updates.repeated(folder / "updates", pipeline, range((base or 0) + 1, step + 1)):
        pass
    return pipeline


def _twin(folder: Path, step: int, standing: Pipeline, trusted: bool) -> Pipeline:
    """Make a second pipeline of the run on separate engines, with all states of `standing`, which is at the end of
    `step`.
    """
    settings = read_settings(folder)
    trust = trust_of(folder, settings, trusted)
    _, engines = _nearest(folder, settings, step, trust)
    for role, learner in standing.learners().items():
        engines[role].restore(learner.snapshot())
    twin = rebuilt(settings.get("pipeline", []), engines, frozen_of(settings, folder, trust), trust)
    twin.load_state(standing.state())
    return twin


def _controllers_at(folder: Path, settings: Mapping[str, Any], base: int | None) -> dict[str, dict[str, float]]:
    """Return the controllers' states in the checkpoint of step `base`, or (None) those that the run began with.

    {} for runs of versions before 0.16.0, which began with the controllers as they are made.
    """
    if base is None:
        return dict(settings.get("began", {}).get("controllers", {}))
    return dict(checkpoint.read_state(step_folder(folder / "checkpoints", base))["controllers"])


def _nearest(
    folder: Path, settings: Mapping[str, Any], step: int, trust: Trust, ready: Callable[[], Any] = lambda: None
) -> tuple[int | None, dict[str, Any]]:
    """Open the engines, by role, of the newest checkpoint at or before `step` from which all updates are recorded;
    returns its step first.

    The step is None where the engines are of the model that the run began with. Raises `RunError` where there is
    neither.
    """
    recorded, why = updates.steps(folder / "updates"), []
    before = [one for one in checkpoint.steps(folder / "checkpoints") if one <= step]
    for base in (*reversed(before), None):
        lacking = [number for number in range((base or 0) + 1, step + 1) if number not in recorded]
        place = "the model that the run began with" if base is None else f"checkpoint {base}"
        if lacking:
            why.append(f"from {place}: the update of step {lacking[0]} is not recorded any more")
            continue
        ready()
        try:
            return base, _opened(folder, settings, base, trust)
        except Untrusted:
            raise
        except RunError as error:
            why.append(f"from {place}: {first_line(error)}")
    what = f"the weights after step {step} of {folder} cannot be restored"
    do = f"choose one of the steps that can: {restorable_steps(folder)}"
    if absent := [role for role, one in settings["engines"].items() if not folder_of(str(one["path"])).is_dir()]:
        do += f"; or {passing(step + 1, absent)}"
    raise RunError(what, found="; ".join(why), do=do)


def restorable_steps(folder: Path) -> str:
    """Return the steps whose weights can be restored, as text such as `0, 3–6`. Model folders are only checked to
    exist.
    """
    settings = read_settings(folder)
    there = all(folder_of(str(one.get("path", ""))).is_dir() for one in settings.get("engines", {}).values())
    steps = {*checkpoint.steps(folder / "checkpoints"), *([0] if there and not _in_memory(settings) else [])}
    for step in updates.steps(folder / "updates"):
        if step - 1 in steps:
            steps.add(step)
    return updates.ranges(sorted(steps))


def _in_memory(settings: Mapping[str, Any]) -> bool:
    """Return whether a run began with weights that are in no file but its checkpoint of step 0."""
    began = settings.get("began", {})
    return any(began.get("versions", {}).values()) or not settings["engines"].keys().isdisjoint(
        began.get("in_memory", ())
    )


def _opened(folder: Path, settings: Mapping[str, Any], base: int | None, trust: Trust) -> dict[str, Any]:
    """Open the engines, by role, from the checkpoint of step `base`, or with None from the model that the run began
    with.
    """
    records = settings["engines"]
    if base is not None:
        place = step_folder(folder / "checkpoints", base)
        checkpoint.verify(place)
        _check_models({role: one for role, one in records.items() if one.get("lora_rank")})  # the base of its adapters
        engines = {role: learner_of(role, place / role, record, trust) for role, record in records.items()}
        for role, engine in engines.items():
            engine.load_state(place / role, place / f"{role}_state")
        return engines
    if _in_memory(settings):
        raise RunError("the run began with weights in memory, and no checkpoint of step 0 has them")
    _check_models(records)
    return {role: learner_of(role, Path(record["path"]), record, trust) for role, record in records.items()}


def _check_models(records: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise `RunError` for a model folder that has other files than when the run began."""
    for role, record in records.items():
        if wrong := wrong_files(record):
            raise RunError(f"the model that {role!r} began with has changed", expected="its files", found=wrong)


def start_of(folder: Path, step: int) -> DataProto:
    """Load the batch with which a step began, before its rollout, from the update recorded for replay or from the step's
    trace. Raises `RunError` where neither is kept.
    """
    if step in updates.steps(folder / "updates"):
        return updates.read(folder / "updates", step).start
    saved = step_folder(folder / "traces", step) / "start"
    if saved.is_dir():
        return DataProto.load(saved)
    found = f"recorded updates of steps {updates.ranges(updates.steps(folder / 'updates'))}"
    raise RunError(f"the batch of step {step} was not kept", expected="its recorded update or its trace", found=found)


# --- what if it had not been there ---------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Counterfactual(Shown):
    """Result of `Run.counterfactual`: a run's updates, repeated with some rows left out of one of them."""

    step: int
    """The step from which rows were left out."""
    until: int
    left_out: tuple[int, ...]
    """Rows of that step's batch."""
    metrics: dict[int, dict[str, tuple[float, float]]] = field(repr=False)
    """Step → metric → (with all rows, without those rows)."""
    distance: dict[str, float]
    """Role → L2 distance between both weights after `until`, divided by how far training had moved them since `step`."""
    actual: dict[str, Any] = field(repr=False)
    """Role → engine with the run's weights after `until`."""
    without: dict[str, Any] = field(repr=False)
    """Role → engine with the weights after `until` that the updates without those rows give."""


def counterfactual(
    folder: Path,
    step: int,
    given: bool = False,
    *,
    uids: Sequence[str] = (),
    rows: Sequence[int] = (),
    until: int | None = None,
) -> Counterfactual:
    """Repeat a run's updates without some rows of one step: see `Run.counterfactual`.

    The result measures what these rows did to the weights through the recorded updates, not what the changed policy
    would have sampled. `given` is true where the folder's code is trusted.
    """
    recorded = updates.steps(folder / "updates")
    last = until if until is not None else max(recorded, default=0)
    update = updates.read(folder / "updates", step)
    chosen = _chosen(update.inputs, uids, rows, step)
    kept = torch.tensor([row for row in range(len(update.inputs)) if row not in chosen])
    actual = standing_after(folder, step - 1, given)
    other = _twin(folder, step - 1, actual, given)
    before = _weights(actual)
    metrics = {}
    for number in range(step, last + 1):
        update = updates.read(folder / "updates", number)
        inputs = update.inputs.select_idxs(kept) if number == step else None
        pairs = zip(apply(actual, update), apply(other, update, inputs), strict=True)
        both = [(a.metrics, b.metrics) for a, b in pairs]
        metrics[number] = {
            key: (value, b[key]) for a, b in both for key, value in a.items() if key in b and not of_log_probs(key)
        }
    one, two = _weights(actual), _weights(other)
    distance = {role: _norm(one[role], two[role]) / max(_norm(one[role], before[role]), 1e-30) for role in one}
    return Counterfactual(step, last, tuple(sorted(chosen)), metrics, distance, actual.learners(), other.learners())


def _chosen(inputs: DataProto, uids: Sequence[str], rows: Sequence[int], step: int) -> set[int]:
    present = list(inputs["uid"])
    strange = [uid for uid in uids if uid not in present] + [row for row in rows if not 0 <= row < len(inputs)]
    chosen = {row for row, uid in enumerate(present) if uid in set(uids)} | set(rows)
    if strange or not chosen or len(chosen) == len(inputs):
        expected = f"some and not all of its {len(inputs)} rows, or uids such as {list(dict.fromkeys(present))[:4]}"
        raise RunError(f"rows to leave out of step {step}", expected=expected, found=strange or sorted(chosen))
    return chosen


def _weights(pipeline: Pipeline) -> dict[str, dict[str, torch.Tensor]]:
    return {role: learner.snapshot()["weights"] for role, learner in pipeline.learners().items()}


def _norm(one: Mapping[str, torch.Tensor], two: Mapping[str, torch.Tensor]) -> float:
    return sum(float((one[name].double() - two[name].double()).pow(2).sum()) for name in one) ** 0.5
