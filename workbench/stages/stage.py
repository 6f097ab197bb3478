"""A stage is `DataProto → DataProto` plus metrics: the contract, and the dull half of keeping it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch

from workbench.config import Settings, remembering, settings_hash
from workbench.dataproto import DataProto, Origin
from workbench.errors import PipelineError, describe, message, unknown
from workbench.metrics import Max, Mean, Metric, Min


@dataclass(frozen=True, repr=False)
class Outcome:
    """What a stage made of a batch."""

    batch: DataProto
    """The batch with the stage's columns."""
    metrics: Mapping[str, Metric | float] = field(default_factory=dict)
    rows: torch.Tensor | None = None
    """For each row of the result the row of the input that it came from, [B] int64; None: the same rows."""

    def __repr__(self) -> str:
        from workbench.views.judgements import outcome_text

        return outcome_text(self)

    def _repr_html_(self) -> str:
        from workbench.views.judgements import outcome_html

        return outcome_html(self)


@runtime_checkable
class Stage(Protocol):
    """One phase of a training step.

    All settings are given at construction. The same input and seed give the same output. State
    lives only in engines (weights) and stated controllers.
    """

    @property
    def name(self) -> str:
        """Its name in the pipeline, the trace and `timing_s/<name>`."""

    @property
    def reads(self) -> tuple[str, ...]:
        """Columns it needs, as constructed."""

    @property
    def writes(self) -> tuple[str, ...]:
        """Columns it leaves behind."""

    def __call__(self, batch: DataProto) -> Outcome:
        """Do it."""

    def settings(self) -> dict[str, Any]:
        """Every setting by name: plain values, and functions as they are."""

    def learners(self) -> tuple[Any, ...]:
        """Engines whose weights the stage uses (they own a version)."""

    @property
    def updates(self) -> bool:
        """Whether it changes weights."""

    def state(self) -> dict[str, float]:
        """Controllers (adaptive KL), plain numbers; {} for most."""

    def load_state(self, state: Mapping[str, float]) -> None:
        """Back to what `state` gave."""

    def with_function(self, function: Callable[..., Any]) -> Stage:
        """The same stage around another function (a reward, an estimator); refused where there is none."""

    def with_settings(self, **changes: Any) -> Stage:
        """The same stage with some of its settings changed."""


class BaseStage:
    """The dull half of a stage: no learners, no state, no function. Leaves state what they have."""

    name: str = ""
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    updates: bool = False
    _made_with: Mapping[str, Any] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        """Every stage remembers what it is constructed with, so that a run can write down how to make it again, and
        looks at a batch before it works on it."""
        super().__init_subclass__(**options)
        if "__init__" in vars(cls):
            cls.__init__ = remembering(vars(cls)["__init__"])  # type: ignore[method-assign]
        if "__call__" in vars(cls):
            cls.__call__ = _looking_first(vars(cls)["__call__"])  # type: ignore[method-assign]

    @property
    def made_with(self) -> Mapping[str, Any]:
        """The arguments of its constructor by name; starred keywords stand among them."""
        return self._made_with

    def settings(self) -> dict[str, Any]:
        """Every public attribute but the contract itself; engines are kept private by their stages."""
        contract = {"name", "reads", "writes", "updates"}
        return {key: value for key, value in vars(self).items() if not key.startswith("_") and key not in contract}

    def learners(self) -> tuple[Any, ...]:
        """None, unless a leaf says otherwise."""
        return ()

    def state(self) -> dict[str, float]:
        """Nothing to remember."""
        return {}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Nothing to restore; something to restore is a mistake."""
        if state:
            raise PipelineError(message(f"stage {self.name!r} keeps no state", found=describe(dict(state))))

    def with_function(self, function: Callable[..., Any]) -> Stage:
        """Refused: there is no function to replace."""
        name = getattr(function, "__name__", describe(function))
        raise PipelineError(
            message(
                f"stage {self.name!r} is not built around a function",
                expected="a stage in its place",
                found=f"the function {name}",
                do="construct the stage you want and pass that",
            )
        )

    def with_settings(self, **changes: Any) -> Stage:
        """The same stage with some settings changed: arguments of its constructor, or fields of a settings object among
        them (`temperature` of a rollout's sampling, `clip_high` of an update's loss).

        Raises `PipelineError` for a name that the stage does not have.
        """
        parameters = inspect.signature(type(self).__init__).parameters
        given = {name: self.made_with.get(name, getattr(self, name, None)) for name in parameters if name != "self"}
        nested = {name: value for name, value in given.items() if isinstance(value, Settings)}
        open_ended = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
        made = dict(self.made_with)
        for name, value in sorted(changes.items(), key=lambda item: item[0] not in parameters):  # arguments come first
            holder = next((held for held, one in nested.items() if one.name_of(name) is not None), None)
            if name in made or (name in parameters and parameters[name].kind is not inspect.Parameter.VAR_KEYWORD):
                made[name] = value
            elif holder is not None:
                settings = made.get(holder)
                settings = settings if isinstance(settings, Settings) else nested[holder]
                made[holder] = settings.replace(**{str(settings.name_of(name)): value})
            elif open_ended:  # the constructor knows
                made[name] = value
            else:
                fields = [field for one in nested.values() for field in one.field_names()]
                known = [*(name for name in parameters if name != "self"), *fields]
                raise PipelineError(unknown(f"setting of stage {self.name!r}", name, known))
        return type(self)(**made)  # type: ignore[return-value]

    def written(self, batch: DataProto, columns: Mapping[str, Any]) -> DataProto:
        """`batch` with the stage's columns, signed with who wrote them."""
        versions = [learner.version for learner in self.learners()]
        origin = Origin(
            stage=self.name,
            step=batch.meta_info.get("step"),
            policy_version=max(versions) if versions else None,
            settings=settings_hash({**self.settings(), **foreign_class(self)}),
        )
        return batch.with_columns(columns, origin=origin)

    def __repr__(self) -> str:
        settings = ", ".join(f"{key}={_short(value)}" for key, value in self.settings().items())
        return f"{type(self).__name__}({settings})"


def foreign_class(stage: Any) -> dict[str, type]:
    """{"class": a stage's class} where somebody else wrote it, in a cell or a file: its text is a setting then."""
    return {} if type(stage).__module__.startswith("workbench.") else {"class": type(stage)}


def _looking_first(call: Callable[..., Outcome]) -> Callable[..., Outcome]:
    @functools.wraps(call)
    def looks(self: Any, batch: DataProto) -> Outcome:
        refuse_other_steps(self, batch)
        return call(self, batch)

    return looks


def refuse_other_steps(stage: Any, batch: DataProto) -> None:
    """A cell run out of order: raises `PipelineError` where a column that a stage reads is of another step's batch."""
    step = batch.meta_info.get("step")
    for name in stage.reads:
        origin = batch.origins.get(name)
        if origin is not None and None not in (origin.step, step) and origin.step != step:
            raise PipelineError(
                message(
                    f"stage {stage.name!r} reads {name!r}",
                    expected=f"that of step {step}, as the batch is",
                    found=f"that of step {origin.step}, written by {origin.stage!r}",
                    do=f"run {origin.stage!r} on this batch first",
                )
            )


def _short(value: Any) -> str:
    name = getattr(value, "__name__", None)
    return name if isinstance(name, str) else describe(value, 60)


def spread(prefix: str, values: torch.Tensor) -> dict[str, Metric]:
    """`prefix/mean`, `/max`, `/min` of a flat tensor; {} when it is empty."""
    if values.numel() == 0:
        return {}
    values = values.double()
    return {
        f"{prefix}/mean": Mean.of(values.mean().item(), values.numel()),
        f"{prefix}/max": Max(values.max().item()),
        f"{prefix}/min": Min(values.min().item()),
    }
