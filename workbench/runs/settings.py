"""Describes a run's plan, pipeline, engines and data as the plain values of settings.json.

From it `replay.rebuild` makes the pipeline again without executing recorded source text: stages, losses, estimators,
controllers and parts of agents of this package by name, engines by role. Everything else (a reward function from a cell, a
model that was only in memory) is recorded by its name alone.
"""

from __future__ import annotations

import inspect
import os
import platform
import subprocess
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal
from weakref import WeakKeyDictionary

from workbench import agents
from workbench.base.config import Settings, require, settings_hash, source_of
from workbench.base.errors import describe
from workbench.base.files import FORMAT, crc32_of
from workbench.base.shown import without_secrets
from workbench.datasets.rows import Rows, check_rows
from workbench.engines.local_engine.loading import folder_of, model_files
from workbench.engines.protocol import Described, FromFiles, Learner, SamplingSettings
from workbench.functional.losses import AdaptiveKL, FixedKL
from workbench.rewards.base import BaseReward
from workbench.runs.conditions import Condition, Goal, Observer, check_condition, named
from workbench.runs.trackers import check_trackers, default_trackers
from workbench.stages.correction import CorrectionSettings
from workbench.stages.distillation import Divergence
from workbench.stages.pipeline import Pipeline
from workbench.stages.policies import OfPolicy
from workbench.stages.preferences import Preference
from workbench.stages.stage import foreign_class
from workbench.stages.targets import BradleyTerry, CrossEntropy
from workbench.stages.terms import Term
from workbench.stages.trl import TrlLoss
from workbench.stages.update import PolicyLoss, ValueLoss
from workbench.steps.trace import describe_settings

OURS = "workbench."
_FROZEN = "frozen_"
_VERSIONS = ("torch", "transformers", "numpy", "tokenizers", "safetensors")
_first_seen: WeakKeyDictionary[Pipeline, dict[str, int]] = WeakKeyDictionary()


@dataclass(frozen=True, kw_only=True)
class TrainSettings(Settings):
    """The settings of `train`, checked when they are made: `SettingError` names the first one that is wrong."""

    steps: int | None = None
    """Training steps; or `epochs`."""
    epochs: float | None = None
    """Passes over the rows, in place of `steps`; an epoch's incomplete last batch is not a step."""
    run: str | Path | None = None
    """The run folder; None: the job's for its first training, else one in `runs` by the time."""
    batch_size: int = 16
    """Prompts of a step."""
    seed: int = 0
    """Of the order of the rows, and of validations."""
    ahead: int = 0
    """Steps that rows are sampled ahead."""
    max_lag: int | None = None
    """Policy versions that rows of a stream may be old; None: no stream."""
    stale: Literal["keep", "cancel"] = "keep"
    """What is done about groups under way that a step of a stream cannot leave for later."""
    eval_rows: Rows | None = None
    """Held-out rows of the validations."""
    test_freq: int = 0
    """Steps between validations; 0: only before the first step and after the last."""
    val_samples: int = 1
    """Responses to each held-out prompt."""
    save_freq: int = 0
    """Steps between checkpoints; 0: only after the last."""
    trace_freq: int = 10
    """Steps between recorded traces; 0: only the last step's."""
    keep_traces: int = 3
    """Recorded traces that stay on disk."""
    keep_checkpoints: int = 2
    """Checkpoints that stay on disk."""
    keep_updates: int = 1024
    """MiB of recorded update inputs."""
    keep_val: int = 10
    """Validations whose samples stay on disk."""
    max_recoveries: int = 3
    """Times that work is done again whose workers were lost."""
    max_rollout_kl: float | None = 0.2
    """Nats per token; where a sampler with the learner's version is further off, the run stops."""
    break_if: Condition | None = None
    """Of a step's metrics: whether the run stops before its update."""
    save_best: str | None = None
    """The validation metric whose best checkpoint is kept."""
    stop_when: str | None = None
    """The validation metric that has to improve."""
    patience: int = 3
    """Validations without that after which the run ends."""
    min_delta: float = 0.0
    """An improvement is larger."""
    resume: Literal["auto", "never"] | None = None
    """Whether a folder with a run is continued or refused; None: as the job says, else it is refused."""
    allow_changes: Sequence[str] = ()
    """Settings, such as `engines.actor.lr`, that a resumed run may change."""
    trackers: Sequence[str] | None = None
    """Names of loggers beside the run folder's own files; None: tensorboard where it is installed."""
    project: str = "workbench"
    """The project's name there."""
    experiment: str | None = None
    """The run's name there; None: its folder's."""
    display: str | None = "auto"
    """Live curves in a notebook, or None."""
    observers: Sequence[Observer] = ()
    """Called around the loop and after every step."""
    health: bool | int | None = None
    """Whether there is a health page, or its port."""

    def __post_init__(self) -> None:
        lengths = "neither" if self.steps is None else f"steps={self.steps} and epochs={self.epochs}"
        alone = (self.steps is None) != (self.epochs is None)
        require(alone, "how long to train", expected="steps=… or epochs=…", found=lengths)
        positive = self.epochs is None or self.epochs > 0
        require(positive, "argument epochs", expected="a number > 0", found=self.epochs)
        least = dict.fromkeys(("batch_size", "val_samples", "keep_traces", "keep_val", "patience"), 1)
        least |= dict.fromkeys(
            ("test_freq", "save_freq", "trace_freq", "keep_updates", "max_recoveries", "min_delta"), 0
        )
        for name, lowest in {"keep_checkpoints": 2, **least}.items():
            value = getattr(self, name)
            require(value >= lowest, f"argument {name}", expected=f"≥ {lowest}", found=value)
        require(self.steps is None or self.steps >= 1, "argument steps", expected="≥ 1", found=self.steps)
        require(self.ahead in (0, 1), "argument ahead", expected="0 or 1 steps", found=self.ahead)
        lag, limit = self.max_lag, self.max_rollout_kl
        require(lag is None or lag >= 1, "argument max_lag", expected="≥ 1 policy versions, or None", found=lag)
        clash = f"ahead=1, max_lag={lag}"
        require(not (lag and self.ahead), "arguments ahead and max_lag", expected="one of them", found=clash)
        require(limit is None or limit > 0, "argument max_rollout_kl", expected="nats > 0, or None", found=limit)
        require(self.display in ("auto", None), "argument display", expected="'auto' or None", found=self.display)
        check_trackers(self.trackers or ())
        self._check_conditions()

    def _check_conditions(self) -> None:
        rows = self.eval_rows
        if rows is not None:
            check_rows("argument eval_rows", rows)
        check_condition(self.break_if, validates=rows is not None)
        for setting in ("save_best", "stop_when"):
            if (text := getattr(self, setting)) is not None:
                Goal.of(text, setting)
                do = "hold some out: rows, held_out = rows.split(64); train(…, eval_rows=held_out)"
                require(rows is not None, f"{setting}={text!r}", expected="eval_rows", found=None, do=do)
        often, do = self.stop_when is None or self.test_freq >= 1, "set test_freq=10, say"
        require(often, "stop_when", expected="validations between steps", found="test_freq=0", do=do)

    def planned(self, rows: Rows) -> TrainPlan:
        """Complete the settings for a training on `rows`: steps from epochs, the run folder, and what a job's
        environment sets.
        """
        steps, run = self.steps, self.run
        if self.epochs is not None:
            steps = max(1, round(self.epochs * (len(rows) // self.batch_size)))
        if run is None:
            run = os.environ.pop("WORKBENCH_RUN", "") or Path("runs") / time.strftime("%Y%m%d-%H%M%S")
        left_open = {
            "steps": steps,
            "epochs": None,
            "run": Path(run),
            "resume": os.environ.get("WORKBENCH_RESUME", "never") if self.resume is None else self.resume,
            "trackers": default_trackers() if self.trackers is None else self.trackers,
        }
        return TrainPlan.from_parameters({**self.to_dict(), **left_open})  # the environment's values are read, too


@dataclass(frozen=True, kw_only=True)
class TrainPlan(TrainSettings):
    """The settings of one training, complete: steps instead of epochs, and a run folder, a way to resume and trackers."""

    steps: int
    run: Path
    resume: Literal["auto", "never"] = "never"
    trackers: Sequence[str] = ()

    def record(self) -> dict[str, Any]:
        """Return the settings as plain values for settings.json. Those of a stream, of goals and of `break_if` are left
        out where unused.
        """
        without = {"epochs", "run", "eval_rows", "resume", "allow_changes", "display", "observers", "health"}
        without |= set() if self.max_lag else {"max_lag", "stale"}
        without |= set() if self.save_best is not None else {"save_best"}
        without |= set() if self.stop_when is not None else {"stop_when", "patience", "min_delta"}
        without |= set() if self.break_if is not None else {"break_if"}
        values = self.to_dict() | {"trackers": list(self.trackers), "break_if": named(self.break_if)}
        return {name: value for name, value in values.items() if name not in without}

    def due(self, every: int, step: int) -> str:
        """Return in words why an action is due at `step`: `every 10 steps`, `the last step`, or "" where it is not due
        (`every=0`: only after the last step).
        """
        if every > 0 and step % every == 0:
            return f"every {every} steps" if every > 1 else "every step"
        return "the last step" if step == self.steps else ""


def resolved(pipeline: Pipeline, rows: Rows, plan: TrainPlan, prompts: Mapping[str, int]) -> dict[str, Any]:
    """Describe all settings of a run as plain values for settings.json; `prompts` are the prompt lengths that
    `preflight` measured.
    """
    held_out = plan.eval_rows
    described = {stage.name: describe_settings(stage) for stage in pipeline}
    stages = {name: settings for name, (settings, _) in described.items()}
    engines = described_engines(pipeline)
    plain = {
        "format": FORMAT,
        "stages": stages,
        "sources": {name: source for name, (_, source) in described.items() if source},
        "engines": engines,
        "train": plan.record(),
        "pipeline": _with_files(written_down(pipeline), engines),
        "settings_hash": settings_hash(stages),
        "began": {
            "versions": first_seen(pipeline),
            "controllers": pipeline.state(),
            "in_memory": [*in_memory(pipeline)],
        },
        "data_hash": rows.data_hash,
        "data": rows.source,
        "prompts": dict(prompts),
        "eval_rows": None if held_out is None else {"source": held_out.source, "data_hash": held_out.data_hash},
        "code": code_revision(),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in _VERSIONS}},
    }
    return dict(without_secrets(plain))


def with_history(
    settings: Mapping[str, Any], old: Mapping[str, Any] | None, step: int, changes: Sequence[str]
) -> dict[str, Any]:
    """Return the settings with a further entry in `history`: the first step of this start, the changed settings, and
    the code's versions.

    `old` is the present settings.json, whose history goes on.
    """
    entry = {"at": time.strftime("%Y-%m-%d %H:%M:%S"), "from_step": step, "changes": list(changes)}
    entry |= {name: settings[name] for name in ("code", "versions")}
    there = old or {}
    return {**settings, "began": there.get("began", settings["began"]), "history": [*there.get("history", []), entry]}


def code_revision() -> str | None:
    """Return the git commit of the package's folder, with `+changes` where files differ from it; None outside git."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+changes", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


# --- engines ------------------------------------------------------------------------------------


def described_engines(pipeline: Pipeline) -> dict[str, Any]:
    """Describe the engines: role → settings, with a crc32 over the files of the model that the engine was loaded from.

    A resumed run compares the crc32, because it makes the frozen reference from the same files.
    """
    records = {}
    for role, learner in pipeline.learners().items():
        record = dict(learner.describe()) if isinstance(learner, Described) else {}
        if record.get("path") and (path := folder_of(record["path"])).is_dir():
            record["files_crc32"] = files_crc32(path)
        records[role] = record
    return records


def files_crc32(model: Path) -> int:
    """Compute one crc32 over the names and contents of a model folder's weight, config and tokenizer files."""
    value = 0
    for path in model_files(model):
        value = crc32_of(path, zlib.crc32(path.name.encode(), value))
    return value


def _with_files(records: list[dict[str, Any]], engines: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Add to the records of frozen models the crc32 of their files, by which a replay checks that it uses the same
    files.
    """
    known = {record["path"]: record["files_crc32"] for record in engines.values() if "files_crc32" in record}
    for record in records:
        for value in record["arguments"].values():
            frozen = value.get("frozen") if isinstance(value, dict) else None
            if frozen is not None and "kept" not in frozen and (place := folder_of(frozen.get("path", ""))).is_dir():
                path = frozen["path"]
                frozen["files_crc32"] = known[path] if path in known else files_crc32(place)
    return records


def first_seen(pipeline: Pipeline) -> dict[str, int]:
    """Return the learners' versions, by role, at the time when this process first used the pipeline in a run.

    The pipeline's frozen reference was made from these weights or earlier ones, never from later ones.
    """
    versions = {role: learner.version for role, learner in pipeline.learners().items()}
    return _first_seen.setdefault(pipeline, versions)


def in_memory(pipeline: Pipeline) -> dict[str, Any]:
    """Return the models of a pipeline whose weights are in no file, by the names under which the checkpoint of step 0
    keeps them.

    They are learners, by role, and frozen models, such as a reference made from a policy that was already being
    trained.
    """
    arguments = [model for stage in pipeline for model in _inside(getattr(stage, "made_with", {}))]
    frozen = {
        id(model): model for model in arguments if isinstance(model, FromFiles) and not isinstance(model, Learner)
    }
    named = {f"{_FROZEN}{number}": model for number, model in enumerate(frozen.values())} | pipeline.learners()
    in_files = {
        name: model.as_loaded() if isinstance(model, FromFiles) else not model.version for name, model in named.items()
    }
    return {name: model for name, model in named.items() if not in_files[name]}


def _inside(value: Any) -> Iterator[Any]:
    """Yield a value, or the values in a mapping or in settings, such as the teacher of a loss."""
    if isinstance(value, Mapping | Settings):
        for one in (value if isinstance(value, Mapping) else vars(value)).values():
            yield from _inside(one)
    else:
        yield value


# --- the pipeline -------------------------------------------------------------------------------


def _of_controller(one: Any) -> Mapping[str, Any]:
    held = {"coef": getattr(one, "initial", one.value), **vars(one)}
    return {name: held[name] for name in inspect.signature(type(one)).parameters}


WORDS = {"settings": "values", "controller": "arguments", "part": "arguments"}
"""Key under which an object of this package is recorded → key of the arguments that make an equal one."""
MADE_AGAIN: Mapping[type, tuple[str, Callable[[Any], Mapping[str, Any]]]] = {
    **dict.fromkeys(
        (SamplingSettings, PolicyLoss, ValueLoss, CrossEntropy, BradleyTerry, CorrectionSettings, Preference, Term),
        ("settings", Settings.to_dict),
    ),
    Divergence: ("settings", lambda one: dict(vars(one))),
    TrlLoss: ("settings", Settings.to_dict),
    **dict.fromkeys((FixedKL, AdaptiveKL), ("controller", _of_controller)),
    **dict.fromkeys((agents.ToolAgent, agents.SingleTurn), ("part", lambda one: one.made_with)),
    **dict.fromkeys(
        (agents.Calculator, agents.Gsm8kAnswer),
        ("part", lambda one: {"config": one.config, "tool_schema": one.tool_schema}),
    ),
    agents.SubAgent: (
        "part",
        lambda one: (
            {name: getattr(one, name) for name in ("loop", "name", "system", "max_tokens", "policy")}
            | {"description": one.tool_schema["function"]["description"]}
        ),
    ),
    agents.Gsm8kInteraction: ("part", lambda one: {"config": one.config}),
    **dict.fromkeys(
        (type(agents.tool_parser(name)) for name in agents.parser_names()),
        ("part", lambda one: {}),
    ),
}
"""Class (subclasses do not count) → its key in `WORDS`, and the arguments that make an equal object."""


def written_down(pipeline: Pipeline) -> list[dict[str, Any]]:
    """Describe a pipeline as one plain record per stage: class, arguments, columns read and written, role it updates."""
    roles = {id(one): name for name, one in (in_memory(pipeline) | pipeline.learners()).items()}
    records = []
    for stage in pipeline:
        arguments: Mapping[str, Any] = getattr(stage, "made_with", {})
        records.append(
            {
                "name": stage.name,
                "class": type(stage).__name__ if type(stage).__module__.startswith(OURS) else None,
                **_own_class(stage),
                "arguments": {name: _argument(stage, name, value, roles) for name, value in arguments.items()},
                "reads": list(stage.reads),
                "optional": list(getattr(stage, "optional", ())),
                "writes": list(stage.writes),
                "updates": stage.name.removeprefix("update_") if stage.updates else None,
            }
        )
    return records


def _argument(stage: Any, name: str, value: Any, roles: Mapping[int, str]) -> Any:
    """Describe one argument of a stage as a plain value. A stage that is itself an argument is described by class and
    arguments.
    """
    if not (isinstance(stage, OfPolicy) and name == "stage" and type(value).__module__.startswith(OURS)):
        return _plain(value, roles)
    made = {key: _argument(value, key, one, roles) for key, one in value.made_with.items()}
    return {"stage": {"class": type(value).__name__, "arguments": made}}


def _own_class(stage: Any) -> dict[str, Any]:
    """Describe a class from outside this package by name and source crc32, as a replay recognises it; {} for a class of
    the package.
    """
    return {"own": crc_of_class(type(stage))} if foreign_class(stage) else {}


def crc_of_class(kind: type) -> list[Any]:
    """Return [name, crc32 of the source text] of a class; the crc32 is None where the text cannot be read."""
    text = source_of(kind)
    return [kind.__name__, None if text is None else zlib.crc32(text.encode())]


def _plain(value: Any, roles: Mapping[int, str]) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item, roles) for item in value]
    if id(value) in roles:
        return _model(value, roles[id(value)])
    if type(value) in MADE_AGAIN:
        word, arguments = MADE_AGAIN[type(value)]
        given = {key: _plain(part, roles) for key, part in arguments(value).items()}
        return {word: type(value).__name__, WORDS[word]: given}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {"mapping": {key: _plain(part, roles) for key, part in value.items()}}
    return _reward(value) if isinstance(value, BaseReward) else _record_by_name(value)


def _model(value: Any, name: str) -> dict[str, Any]:
    """Describe a learner by its role, or a frozen model by its settings and the name under which the checkpoint of step
    0 keeps it.
    """
    if not name.startswith(_FROZEN):
        return {"engine": name}
    return {"frozen": {key: one for key, one in value.describe().items() if key != "as_loaded"} | {"kept": name}}


def _record_by_name(value: Any) -> dict[str, Any]:
    """Describe an unchanged frozen model by its settings, a function of this package by its place, and anything else by
    its name.
    """
    frozen: dict[str, Any] = value.describe() if isinstance(value, Described) else {}
    if frozen.get("as_loaded"):
        return {"frozen": {key: one for key, one in frozen.items() if key != "as_loaded"}}
    place = place_of(value)
    if place and place.partition(":")[2].isidentifier():
        return {"function": place}
    if isinstance(value, agents.AgentLoopBase):
        return {"missing": f"agent loop {value.name or type(value).__name__!r}"}
    return {"missing": getattr(value, "__name__", None) or describe(value, 60)}


def _reward(value: BaseReward) -> dict[str, Any]:
    """Describe a reward by its name, or by settings from which it can be made again. A function of this package has its
    place, by which a resumed run recognises it.
    """
    if value.name == "by data_source":
        return {"reward": value.settings()}
    if value.block is not None:
        return {"block": dict(value.block)}
    place = place_of(getattr(value, "function", None))
    return {"missing": value.name, **({"of": place} if place else {})}


def place_of(value: Any) -> str | None:
    """Return `module:name` of a function of this package, else None."""
    module, name = getattr(value, "__module__", "") or "", getattr(value, "__qualname__", "")
    return f"{module}:{name}" if callable(value) and name and module.startswith(OURS) else None
