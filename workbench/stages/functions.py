"""`stage`: a function of a cell or a file as a stage; at the front it is `wb.stage`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch

from workbench.base.config import parameters_of, source_of
from workbench.base.errors import ColumnMissing, PipelineError, SettingError, describe, unknown
from workbench.dataproto.core import DataProto
from workbench.stages.stage import BaseStage, Outcome, used


class FunctionStage(BaseStage):
    """Base of the classes that `wb.stage` makes: the function's keyword arguments are the constructor's settings."""

    _function: Callable[..., Any]

    def __call__(self, batch: DataProto) -> Outcome:
        """B rows in, the same rows out, with the columns that the function returns."""
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
            expected = "a dict of columns, or (that, a dict of metrics)"
            raise PipelineError(f"what stage {self.name!r} returned", expected=expected, found=describe(result))
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
    """The parameters after the batch, as keywords."""
    what = f"function {getattr(function, '__name__', describe(function))!r} as a stage"
    if not inspect.isfunction(function) or inspect.iscoroutinefunction(function):
        raise SettingError(what, expected="a plain function", found=describe(function))
    parameters = parameters_of(function, what)
    others = [*parameters.values()][1:]
    named = all(one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY) for one in others)
    if not (parameters and named):
        expected = "the batch, then settings with names: (batch, power=1.0)"
        found = f"{function.__name__}{inspect.signature(function)}"
        raise SettingError(what, expected=expected, found=found)
    if taken := [one.name for one in others if hasattr(FunctionStage, one.name) or one.name == "source"]:
        found, do = f"a setting called {taken[0]!r}", "give it another name: every stage has an attribute of that one"
        raise SettingError(what, found=found, do=do)
    return [one.replace(kind=one.KEYWORD_ONLY) for one in others]


def _constructor(name: str, settings: Sequence[inspect.Parameter]) -> Callable[..., None]:
    """`__init__` with these settings as keyword arguments, kept as attributes."""
    known = {one.name: one.default for one in settings}

    def __init__(self: Any, **given: Any) -> None:
        for one in given:
            if one not in known:
                raise SettingError(unknown(f"setting of stage {name!r}", one, known))
        values = {**known, **given}
        if lacking := [one for one, value in values.items() if value is inspect.Parameter.empty]:
            do = f"{name}({', '.join(f'{one}=…' for one in lacking)})"
            raise SettingError(f"stage {name!r} lacks {', '.join(lacking)}, which have no default", do=do)
        vars(self).update(values)

    mine = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    __init__.__signature__ = inspect.Signature([mine, *settings])  # type: ignore[attr-defined]
    return __init__


def _column(value: Any) -> Any:
    """Numbers as a tensor, floats in float32; anything else as it is: one object per row."""
    if isinstance(value, list | tuple) and value and all(isinstance(one, bool | int | float) for one in value):
        value = np.asarray(value)
    if isinstance(value, np.ndarray) and value.dtype != object and value.dtype.kind in "biuf":
        tensor = torch.as_tensor(value)
        return tensor.float() if tensor.is_floating_point() else tensor
    return value
