"""A stage maps a `DataProto` to a `DataProto` plus metrics: the protocol, and a base class that implements most of the
protocol.

`stage`: a function of a cell or a file as a stage; at the front it is `wb.stage`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
import torch

from workbench.base.config import Remembering, Settings, parameters_of, settings_hash, source_of
from workbench.base.errors import ColumnMissing, PipelineError, SettingError, check_name, describe, unknown
from workbench.base.metrics import Max, Mean, Metric, Min
from workbench.base.shown import Shown
from workbench.dataproto.core import DataProto
from workbench.dataproto.value import Origin

LEFT_OUT = "left_out"
"""The column of `Outcome.dropped` that has the reasons."""


@dataclass(frozen=True, repr=False)
class Outcome(Shown):
    """Result of a stage: the batch with its columns, metrics, and which input rows the rows came from."""

    batch: DataProto
    """The batch with the stage's columns."""
    metrics: Mapping[str, Metric | float] = field(default_factory=dict)
    rows: torch.Tensor | None = None
    """[B] int64: for each row of the result the row of the input that it came from; None: the same rows."""
    dropped: DataProto | None = None
    """Rows that were left out and that `rows` cannot tell, such as those that the stage sampled itself: their texts and scores,
    and in the column `left_out` the reason for each."""


@runtime_checkable
class Stage(Protocol):
    """Protocol of a stage, one phase of a training step: a callable from a `DataProto` to an `Outcome`.

    All settings are given at construction. The same input and seed give the same output. State is kept only in engines
    (weights) and in what `state` returns.
    """

    name: str = ""
    """The stage's name in the pipeline, in the trace and in `timing_s/<name>`."""
    reads: tuple[str, ...] = ()
    """Columns that the stage needs, with the settings that it was constructed with."""
    writes: tuple[str, ...] = ()
    """Columns that the stage writes."""
    updates: bool = False
    """Whether the stage changes weights."""

    def __call__(self, batch: DataProto) -> Outcome:
        """Run the stage on a batch."""

    def settings(self) -> dict[str, Any]:
        """The stage's settings by name: all public attributes except `name`, `reads`, `optional`, `writes` and `updates`."""
        contract = {"name", "reads", "optional", "writes", "updates"}
        return {key: value for key, value in vars(self).items() if not key.startswith("_") and key not in contract}

    def learners(self) -> tuple[Any, ...]:
        """Engines whose weights the stage uses, each with its policy `version`; () by default."""
        return ()

    def state(self) -> dict[str, float]:
        """State for a checkpoint, as plain numbers by name (such as the β of an adaptive KL); {} by default."""
        return {}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Restore the state from a dict that `state` returned. Raises `PipelineError` if the stage keeps none."""
        if state:
            raise PipelineError(f"state to load into stage {self.name!r}", expected="none", found=describe(dict(state)))

    def with_function(self, function: Callable[..., Any]) -> Stage:
        """A copy of the stage with another function (reward, estimator). Raises `PipelineError` if the stage has none."""
        found = f"the function {getattr(function, '__name__', describe(function))}"
        do = "construct the new stage and pass it in place of the function"
        what = f"stage {self.name!r} is not built around a function"
        raise PipelineError(what, expected="a stage to replace it", found=found, do=do)

    def with_settings(self, **changes: Any) -> Stage:
        """A copy of the stage with some of its settings changed."""


class BaseStage(Remembering, Stage):
    """Base class of stages: a subclass defines `name`, `reads`, `writes` and `__call__`.

    Example:
        >>> class Doubled(BaseStage):  # doctest: +SKIP
        ...     name, reads, writes = "doubled", ("token_level_scores",), ("token_level_scores",)
        ...     def __call__(self, batch):
        ...         return Outcome(self.written(batch, {"token_level_scores": 2 * batch["token_level_scores"]}))
    """

    optional: tuple[str, ...] = ()
    """Columns that the stage uses where the batch has them."""
    _learners: tuple[Any, ...] = ()

    def __init_subclass__(cls, **options: Any) -> None:
        """Wrap the subclass's `__call__`, so that it first refuses a batch that has columns of another step."""
        super().__init_subclass__(**options)
        if "__call__" in vars(cls):
            cls.__call__ = _refusing_other_steps(vars(cls)["__call__"])  # type: ignore[method-assign]

    def learners(self) -> tuple[Any, ...]:
        """Engines whose weights the stage uses; () by default."""
        return self._learners

    def with_settings(self, **changes: Any) -> Stage:
        """A copy of the stage with some settings changed, given by name.

        They are arguments of the constructor, or fields of a settings object among these (`temperature` of a rollout's
        sampling, `clip_ratio_high` of an update's loss). Raises `PipelineError` for a name that the stage does not have.
        """
        _, *parameters = inspect.signature(type(self).__init__).parameters.values()
        accepted = [settings.name for settings in parameters if settings.kind is not inspect.Parameter.VAR_KEYWORD]
        arguments = {**self.made_with, **{name: value for name, value in changes.items() if name in accepted}}
        present = {name: arguments.get(name, getattr(self, name, None)) for name in accepted}
        nested = {name: value for name, value in present.items() if isinstance(value, Settings)}
        inner: dict[str, dict[str, Any]] = {}
        for name in sorted(changes.keys() - {*accepted}):
            holder = next((held for held, settings in nested.items() if name in settings.field_names()), None)
            # a constructor with **keywords may know the name
            if name in arguments or (holder is None and len(accepted) < len(parameters)):
                arguments[name] = changes[name]
            elif holder is not None:
                inner.setdefault(holder, {})[name] = changes[name]
            else:
                fields = [field for settings in nested.values() for field in settings.field_names()]
                raise PipelineError(unknown(f"setting of stage {self.name!r}", name, [*accepted, *fields]))
        for holder, settings in inner.items():  # all of its changes at once: one alone may be impossible
            arguments[holder] = nested[holder].replace(**settings)
        return type(self)(**arguments)

    def written(self, batch: DataProto, columns: Mapping[str, Any]) -> DataProto:
        """`batch` with these columns added, each with the stage's `signature` as its `Origin`."""
        return batch.with_columns(columns, origin=self.signature(batch))

    def signature(self, batch: DataProto) -> Origin:
        """Return the `Origin` of the columns that the stage writes now: its name, the batch's step, the weights'
        version, its settings."""
        learners = self.learners()
        versions = [learner.version for learner in learners]
        return Origin(
            stage=self.name,
            step=batch.meta_info.get("step"),
            policy_version=max(versions) if versions else None,
            settings=settings_hash({**self.settings(), **foreign_class(self)}),
            state_id=getattr(learners[0], "state_id", None) if len(learners) == 1 else None,
        )

    def __repr__(self) -> str:
        settings = ", ".join(f"{key}={_short(value)}" for key, value in self.settings().items())
        return f"{type(self).__name__}({settings})"


def foreign_class(stage: Any) -> dict[str, type]:
    """Return `{"class": type(stage)}` for a stage that is not one of workbench's own, so that its source counts as a
    setting; else {}."""
    return {} if type(stage).__module__.startswith("workbench.") else {"class": type(stage)}


def used(stage: Stage, batch: DataProto) -> tuple[str, ...]:
    """Return the columns of a batch that a stage uses: its `reads`, and those of its `optional` columns that the batch
    has."""
    return (*stage.reads, *(name for name in getattr(stage, "optional", ()) if name in batch))


def _refusing_other_steps(call: Callable[..., Outcome]) -> Callable[..., Outcome]:
    """Wrap a stage's `__call__` to raise `PipelineError` where it would read a column of another step, which happens
    when notebook cells run out of order."""

    @functools.wraps(call)
    def checked(self: Any, batch: DataProto) -> Outcome:
        step = batch.meta_info.get("step")
        for name in used(self, batch):
            origin = batch.origins.get(name)
            if origin is not None and None not in (origin.step, step) and origin.step != step:
                expected, do = f"values of step {step}, the batch's", f"run {origin.stage!r} on this batch first"
                found = f"values of step {origin.step}, written by {origin.stage!r}"
                raise PipelineError(f"stage {self.name!r} reads {name!r}", expected=expected, found=found, do=do)
        return call(self, batch)

    return checked


def _short(value: Any) -> str:
    name = getattr(value, "__name__", None)
    return name if isinstance(name, str) else describe(value, 60)


def spread(prefix: str, values: torch.Tensor) -> dict[str, Metric]:
    """Return the metrics `<prefix>/mean`, `<prefix>/max` and `<prefix>/min` of a flat tensor; {} if it is empty or not
    finite."""
    values = values.double()
    if values.numel() == 0 or not values.sum().isfinite():
        return {}
    return {
        f"{prefix}/mean": Mean.of(values.mean().item(), values.numel()),
        f"{prefix}/max": Max(values.max().item()),
        f"{prefix}/min": Min(values.min().item()),
    }


class FunctionStage(BaseStage):
    """Base of the classes that `wb.stage` makes from functions: the function's keyword arguments become the
    constructor's settings."""

    _function: Callable[..., Any]

    def __call__(self, batch: DataProto) -> Outcome:
        """Return the same B rows with the columns that the function returned."""
        seen = batch.select([*used(self, batch)])
        try:
            result = self._function(seen, **self.settings())
        except ColumnMissing as error:
            if error.name in batch and error.name not in seen:
                what = f"stage {self.name!r} reads column {error.name!r}, which it does not declare"
                do = f"add it to the decorator: reads={(*self.reads, error.name)}"
                raise PipelineError(what, expected=f"reads of {', '.join(self.reads)}", do=do) from error
            raise
        columns, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
        if not (isinstance(columns, Mapping) and isinstance(metrics, Mapping)):
            expected = "a dict of columns, or (dict of columns, dict of metrics)"
            raise PipelineError(f"the result of stage {self.name!r}", expected=expected, found=describe(result))
        for name in columns:
            if name not in self.writes:
                what = f"stage {self.name!r} returned column {name!r}, which it does not declare"
                do = f"add it to the decorator, writes={(*self.writes, name)}, or do not return it"
                raise PipelineError(what, expected=f"columns {', '.join(self.writes) or '(none)'}", do=do)
        written = {name: _column(value) for name, value in columns.items()}
        return Outcome(self.written(batch, written), dict(metrics))


def stage(
    *, reads: Sequence[str], writes: Sequence[str] = (), optional: Sequence[str] = ()
) -> Callable[[Callable[..., Any]], type[FunctionStage]]:
    """Make a stage class of the function below: `@wb.stage(reads=("response_text",), writes=("length_bonus",))`.

    The function takes the batch, with the columns that it reads and no others, and its settings as keyword arguments. It
    returns a dict of columns (tensors, or lists with a value per row), or that and a dict of metrics. It may not change
    which rows there are: for that, write a class (`stages.BaseStage`).

    Args:
        reads: names of the columns that the function needs; at least one.
        writes: names of the columns that it returns, no others; one that it reads too is changed.
        optional: columns that it uses where the batch has them.

    Returns:
        A class with the function's name, which is the stage's name too. It is constructed with the settings,
        `length_norm(power=2.0)`, and a pipeline takes it as it is where all have defaults.

    Raises `SettingError` for a signature that does not fit. As with a reward, a run records the source text: another text is
    refused when a run is resumed, and a recorded step runs the stage again where its cell has been run.

    Example:
        >>> @wb.stage(reads=("response_mask", "token_level_scores"), writes=("token_level_scores",))  # doctest: +SKIP
        ... def length_norm(batch, power=1.0):
        ...     length = batch["response_mask"].sum(-1, keepdim=True).clamp(min=1)
        ...     return {"token_level_scores": batch["token_level_scores"] / length**power}
        >>> pipe = pipe.insert_after("reward", length_norm(power=0.5))  # doctest: +SKIP
    """
    names = {"reads": reads, "writes": writes, "optional": optional}
    for key, given in names.items():
        if isinstance(given, str) or not all(isinstance(one, str) for one in given):
            raise SettingError(f"argument {key} of stage", expected="a tuple of column names", found=describe(given))
    if not reads:
        raise SettingError("argument reads of stage", expected="at least one column", found="none")

    def made(function: Callable[..., Any]) -> type[FunctionStage]:
        settings = _settings(function)
        body = {
            **{key: tuple(given) for key, given in names.items()},
            "name": function.__name__,
            "source": source_of(function),
            "_function": staticmethod(function),
            "__init__": _constructor(function.__name__, settings),
            "__doc__": inspect.getdoc(function),
            "__module__": function.__module__,
            "__qualname__": function.__qualname__,
        }
        return cast(type[FunctionStage], type(function.__name__, (FunctionStage,), body))

    return made


def _settings(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return a function's parameters after the batch as keyword-only settings. Raises `SettingError` for a signature
    that does not fit."""
    what = f"function {getattr(function, '__name__', describe(function))!r} as a stage"
    if not inspect.isfunction(function) or inspect.iscoroutinefunction(function):
        raise SettingError(what, expected="a plain function", found=describe(function))
    parameters = parameters_of(function, what)
    others = [*parameters.values()][1:]
    named = all(parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY) for parameter in others)
    if not (parameters and named):
        expected = "the batch, then settings with names: (batch, power=1.0)"
        found = f"{function.__name__}{inspect.signature(function)}"
        raise SettingError(what, expected=expected, found=found)
    if taken := [
        parameter.name for parameter in others if hasattr(FunctionStage, parameter.name) or parameter.name == "source"
    ]:
        found, do = f"a setting called {taken[0]!r}", "rename the setting: every stage has an attribute of that name"
        raise SettingError(what, found=found, do=do)
    return [parameter.replace(kind=parameter.KEYWORD_ONLY) for parameter in others]


def _constructor(name: str, settings: Sequence[inspect.Parameter]) -> Callable[..., None]:
    """Make an `__init__` that takes these settings as keyword arguments and keeps them as attributes."""
    known = {one.name: one.default for one in settings}

    def __init__(self: Any, **settings: Any) -> None:
        for setting in settings:
            check_name(f"setting of stage {name!r}", setting, known)
        values = {**known, **settings}
        if lacking := [setting for setting, value in values.items() if value is inspect.Parameter.empty]:
            do = f"{name}({', '.join(f'{setting}=…' for setting in lacking)})"
            raise SettingError(f"stage {name!r} lacks {', '.join(lacking)}, which have no default", do=do)
        vars(self).update(values)

    mine = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    __init__.__signature__ = inspect.Signature([mine, *settings])  # type: ignore[attr-defined]
    return __init__


def _column(value: Any) -> Any:
    """Convert a list or array of numbers to a tensor, floats to float32; anything else is returned unchanged, as one
    object per row."""
    if isinstance(value, list | tuple) and value and all(isinstance(one, bool | int | float) for one in value):
        value = np.asarray(value)
    if isinstance(value, np.ndarray) and value.dtype != object and value.dtype.kind in "biuf":
        tensor = torch.as_tensor(value)
        return tensor.float() if tensor.is_floating_point() else tensor
    return value
