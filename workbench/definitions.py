"""Whether a pipeline still runs what a notebook's cells say: a function or class defined anew does not reach it by itself."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from workbench.sources import source_of
from workbench.stages import Pipeline, Stage

_DEPTH = 5


def outdated(pipeline: Pipeline) -> list[str]:
    """One sentence for each stage made with a definition from a cell that has since been given other text; [] mostly.

    Looked at are the stage's class and every function and object among its settings, down into rewards and their parts.
    A cell that was run again unchanged says nothing, and neither does a name that is gone.
    """
    found = []
    for stage in pipeline:
        if _redefined(type(stage)):
            name = type(stage).__qualname__
            found.append(
                f"{stage.name} is of an earlier definition of {name}: make a new {name}(…) and "
                f"replace({stage.name!r}, …) with it"
            )
        for one in _definitions(stage):
            name = one.__qualname__
            if _redefined(one):
                # one that the stage is built around can be given alone; a part of something needs that made anew
                around = [each for value in stage.settings().values() for each in _within(value, 2)]
                by = name if inspect.isfunction(one) and any(each is one for each in around) else "…"
                found.append(
                    f"{stage.name} was made with an earlier definition of {name}: "
                    f"replace({stage.name!r}, {by}) uses the new one"
                )
    return list(dict.fromkeys(found))


def _definitions(stage: Stage) -> Iterator[Any]:
    """Functions and classes of cells among a stage's settings."""
    for value in stage.settings().values():
        yield from _within(value, _DEPTH)


def _within(value: Any, depth: int) -> Iterator[Any]:
    """Those in a value: itself, what a partial or method is of, members, and what objects of ours are made of."""
    if depth == 0 or value is None or isinstance(value, str | int | float):
        return
    if inspect.isfunction(value) or inspect.isclass(value):
        if value.__module__ == "__main__":
            yield value
        return
    inner: list[Any] = []
    if isinstance(value, functools.partial):
        inner = [value.func, *value.args, *value.keywords.values()]
    elif inspect.ismethod(value):
        inner = [value.__self__]
    elif isinstance(value, Mapping):
        inner = list(value.values())
    elif isinstance(value, list | tuple):
        inner = list(value)
    elif type(value).__module__ == "__main__":
        inner = [type(value), *vars(value).values()] if hasattr(value, "__dict__") else [type(value)]
    elif type(value).__module__.startswith("workbench.") and hasattr(value, "__dict__"):
        inner = list(vars(value).values())
    for one in inner:
        yield from _within(one, depth - 1)


def _redefined(held: Any) -> bool:
    """Whether `__main__` now has another thing of other text under its name."""
    if held.__module__ != "__main__":
        return False
    now: Any = sys.modules["__main__"]
    for part in held.__qualname__.split("."):
        now = getattr(now, part, None)  # one that was local to a function has no name to be found by
    if now is None or now is held:
        return False
    # a decorator of ours may have put an object around it: what counts is the function inside
    named = [one for one in _within(now, _DEPTH) if one.__qualname__ == held.__qualname__]
    if not named or any(one is held for one in named):
        return False
    text = source_of(held)
    return text is None or all(source_of(one) != text for one in named)
