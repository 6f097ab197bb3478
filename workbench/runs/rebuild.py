"""A pipeline written down as plain values, and made again from them without running anybody's text.

Stages, losses, estimators, controllers and scorers of ours are named and looked up in this package; engines are opened
from their recorded paths. What is not ours (a reward function from a cell, a model that only memory had) is written
down by its name alone: its stage comes back as `Missing`, which says so and takes a `replace`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from workbench import functional, rewards, stages
from workbench.config import Settings
from workbench.dataproto import DataProto
from workbench.dataproto.ops import same_column
from workbench.engines.protocol import SamplingSettings
from workbench.errors import PipelineError, RunError, WorkbenchError, describe, first_line, message
from workbench.metrics import Metric
from workbench.runs import agents_written
from workbench.stages import Outcome, Pipeline, Stage
from workbench.stages.stage import BaseStage
from workbench.trace import Phase, Trace, unchanged

_OURS = "workbench."
_SETTINGS: Mapping[str, type[Settings]] = {
    one.__name__: one for one in (SamplingSettings, stages.PolicyLoss, stages.ValueLoss)
}
_CONTROLLERS: Mapping[str, Any] = {one.__name__: one for one in (functional.FixedKL, functional.AdaptiveKL)}


def written_down(pipeline: Pipeline) -> list[dict[str, Any]]:
    """One plain record a stage: class, arguments, and what a `Missing` needs."""
    roles = {id(learner): role for role, learner in pipeline.learners().items()}
    records = []
    for stage in pipeline:
        made: Mapping[str, Any] = getattr(stage, "made_with", {})
        records.append(
            {
                "name": stage.name,
                "class": type(stage).__name__ if type(stage).__module__.startswith(_OURS) else None,
                "arguments": {name: _plain(value, roles) for name, value in made.items()},
                "reads": list(stage.reads),
                "writes": list(stage.writes),
                "updates": stage.name.removeprefix("update_") if stage.updates else None,
            }
        )
    return records


def _plain(value: Any, roles: Mapping[int, str]) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item, roles) for item in value]
    if id(value) in roles:
        return {"engine": roles[id(value)]}
    kind = type(value).__name__
    if isinstance(value, Settings) and kind in _SETTINGS:
        return {"settings": kind, "values": {key: _plain(one, roles) for key, one in value.to_dict().items()}}
    if kind in _CONTROLLERS and isinstance(value, _CONTROLLERS[kind]):
        names = inspect.signature(_CONTROLLERS[kind]).parameters
        held = {"coef": getattr(value, "initial", value.value), **vars(value)}
        return {"controller": kind, "arguments": {name: held[name] for name in names}}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {"mapping": {key: _plain(one, roles) for key, one in value.items()}}
    if (part := agents_written.arguments_of(value)) is not None:
        return {"part": part[0], "arguments": {key: _plain(one, roles) for key, one in part[1].items()}}
    if isinstance(value, rewards.BaseReward):
        return {"missing": value.name} if value.name != "by data_source" else {"reward": value.settings()}
    frozen: dict[str, Any] = getattr(value, "describe", dict)()
    if frozen.get("as_loaded"):
        return {"frozen": {key: one for key, one in frozen.items() if key != "as_loaded"}}
    module, name = getattr(value, "__module__", "") or "", getattr(value, "__qualname__", "")
    if callable(value) and module.startswith(_OURS) and name.isidentifier():
        return {"function": f"{module}:{name}"}
    return {"missing": agents_written.name_of(value) or getattr(value, "__name__", None) or describe(value, 60)}


class Missing(BaseStage):
    """Stands for a stage that cannot be made again here. With the record of its step it gives what it gave then, as long
    as it is given what it was given then; in any other case it must be replaced.
    """

    def __init__(
        self,
        record: Mapping[str, Any],
        what: str,
        learner: Any = None,
        *,
        phase: Phase | None = None,
        before: DataProto | None = None,
        remake: Callable[[Mapping[str, Any]], Stage] | None = None,
    ) -> None:
        self.name = record["name"]
        self.what = what
        self.reads = tuple(record["reads"])
        self.writes = tuple(record["writes"])
        self.updates = learner is not None
        self._learner = learner
        self._record = record
        self._phase = phase
        self._before = before
        self._remake = remake

    def recorded(self, trace: Trace) -> Missing:
        """The same, with what it did in a recorded step; of an update that is not enough."""
        if self.updates or self.name not in trace.names:
            return self
        return Missing(
            self._record, self.what, phase=trace[self.name], before=trace.before(self.name), remake=self._remake
        )

    @property
    def has_record(self) -> bool:
        """Whether its recorded outputs are there."""
        return self._phase is not None

    def settings(self) -> dict[str, Any]:
        """What it was made with, and that its outputs are the recorded ones."""
        return {"made_with": self.what, **({"outputs": "recorded, not run again"} if self.has_record else {})}

    def learners(self) -> tuple[Any, ...]:
        """Whose weights the stage would change."""
        return (self._learner,) if self.updates else ()

    def with_function(self, function: Callable[..., Any]) -> Stage:
        """The stage around what is here: a reward, an estimator with its own defaults; a rollout with an agent loop."""
        if self._record["class"] == "EpisodeRollout":
            return self.with_settings(agent=function)
        if self._record["class"] not in ("Reward", "Advantage"):
            return super().with_function(function)
        return getattr(stages, self._record["class"])(function)

    def with_settings(self, **changes: Any) -> Stage:
        """The stage as it was made, with what is not here given anew: `replace("rollout", agent=mine)`.

        Raises `PipelineError` where something is still not there.
        """
        what = self.what
        if self._remake is not None:
            try:
                return self._remake(changes)
            except _Gone as gone:
                what = str(gone)
        raise PipelineError(
            message(
                f"settings of stage {self.name!r} cannot be changed",
                found=f"it was made with {what}, which the run folder has by name alone",
                do=self._advice(),
            )
        )

    def _advice(self) -> str:
        lacks = [key for key, one in self._record["arguments"].items() if _lacks(one)]
        again = f"replace({self.name!r}, {', '.join(f'{key}=…' for key in lacks)})" if lacks and self._remake else ""
        return " or ".join(filter(None, (again, f"replace({self.name!r}, …) with what should stand there")))

    def __call__(self, batch: DataProto) -> Outcome:
        """The recorded outputs, where the batch is the recorded one; `recorded/<stage>` among the metrics says so."""
        differing = self._differing(batch)
        if self._phase is None or differing:
            raise PipelineError(
                message(
                    f"stage {self.name!r} of the run cannot be run again here",
                    expected=f"the recorded {', '.join(differing)}, for its recorded outputs" if differing else None,
                    found=f"it was made with {self.what}, which the run folder has by name alone",
                    do=self._advice(),
                )
            )
        metrics: dict[str, Metric | float] = {**self._phase.metrics, f"recorded/{self.name}": 1.0}
        if self._phase.rows is not None:
            return Outcome(self._phase.batch, metrics, self._phase.rows)
        written = self._phase.delta()
        kept = batch.without(*(name for name in written.columns if name in batch))
        return Outcome(kept.union(written), metrics)

    def _differing(self, batch: DataProto) -> list[str]:
        """Columns that it may have looked at and that are not what they were: those it names, and those of the data."""
        if self._phase is None or self._before is None:
            return []
        if len(batch) != len(self._before):
            return ["rows"]
        before, origins = self._before, self._before.origins
        whole = self._phase.rows is not None
        looked_at = [
            name for name in before.columns if whole or name not in origins or origins[name].stage == "dataset"
        ]
        return [name for name in dict.fromkeys((*self.reads, *looked_at)) if not _as_it_was(name, before, batch)]


def _as_it_was(name: str, before: DataProto, batch: DataProto) -> bool:
    return unchanged(name, before, batch) or (name in batch and same_column(before[name], batch[name]))


class _Gone(Exception):
    """An argument is not here; carries its name."""


def rebuilt(records: list[dict[str, Any]], learners: Mapping[str, Any], open_frozen: Callable[..., Any]) -> Pipeline:
    """The pipeline that was written down, on these learners. `open_frozen(record)` opens a frozen model.

    Raises `RunError` where the records are from a run that did not write any.
    """
    if not records:
        raise RunError(message("the run does not say how its pipeline was made", do="pass pipeline=…"))
    made = []
    for record in records:
        remake = functools.partial(_stage, record, learners, open_frozen)
        learner = learners.get(record["updates"])
        try:
            made.append(remake({}))
        except _Gone as gone:
            made.append(Missing(record, str(gone), learner, remake=remake))
        except (TypeError, WorkbenchError) as error:  # this version's stage does not take what that version's took
            made.append(Missing(record, f"arguments of its time ({first_line(error)})", learner, remake=remake))
    return Pipeline(made)


def _stage(
    record: Mapping[str, Any], learners: Mapping[str, Any], open_frozen: Callable[..., Any], given: Mapping[str, Any]
) -> Stage:
    """One stage from its record, with some arguments or settings given anew. Raises `_Gone`."""
    if record["class"] not in stages.__all__:
        raise _Gone(f"a stage of another package ({record['name']})")
    of_it = record["arguments"]
    arguments = {key: given[key] if key in given else _value(one, learners, open_frozen) for key, one in of_it.items()}
    stage: Stage = getattr(stages, record["class"])(**arguments)
    rest = {key: one for key, one in given.items() if key not in of_it}
    return stage.with_settings(**rest) if rest else stage


def _lacks(plain: Any) -> bool:
    """Whether something in a recorded argument is there by name alone."""
    if isinstance(plain, list):
        return any(map(_lacks, plain))
    return isinstance(plain, dict) and ("missing" in plain or any(map(_lacks, plain.values())))


def _value(plain: Any, learners: Mapping[str, Any], open_frozen: Callable[..., Any]) -> Any:
    if isinstance(plain, list):
        return tuple(_value(item, learners, open_frozen) for item in plain)
    if not isinstance(plain, dict):
        return plain
    if "engine" in plain:
        return learners[plain["engine"]]
    if "settings" in plain:
        if plain["settings"] not in _SETTINGS:
            raise _Gone(plain["settings"])
        values = {key: _value(one, learners, open_frozen) for key, one in plain["values"].items()}
        return _SETTINGS[plain["settings"]](**values)
    if "controller" in plain:
        if plain["controller"] not in _CONTROLLERS:
            raise _Gone(plain["controller"])
        return _CONTROLLERS[plain["controller"]](**plain["arguments"])
    if "reward" in plain:
        return rewards.by_data_source(**plain["reward"])
    if "function" in plain:
        return _function(plain["function"])
    if "frozen" in plain:
        return open_frozen(plain["frozen"])
    if "mapping" in plain:
        return {key: _value(one, learners, open_frozen) for key, one in plain["mapping"].items()}
    if "part" in plain:
        return _part(plain, learners, open_frozen)
    raise _Gone(plain["missing"])


def _part(plain: Mapping[str, Any], learners: Mapping[str, Any], open_frozen: Callable[..., Any]) -> Any:
    name = plain["part"]
    try:
        arguments = {key: _value(one, learners, open_frozen) for key, one in plain["arguments"].items()}
        return agents_written.made(name, arguments)
    except _Gone as gone:
        raise _Gone(f"{gone} in a {name}") from gone
    except KeyError as error:  # renamed since
        raise _Gone(name) from error


def _function(place: str) -> Any:
    """A function of this package; nothing else is imported because a file says so."""
    module, _, name = place.partition(":")
    if not module.startswith(_OURS):
        raise _Gone(place)
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError:  # moved since
        found = None
    if found is None:
        raise _Gone(place)
    return found


def fields_of(settings: Mapping[str, Any], kind: Any) -> dict[str, Any]:
    """Those of some recorded settings that a settings class has."""
    names = {field.name for field in dataclasses.fields(kind)}
    return {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items() if key in names}
