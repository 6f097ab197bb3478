"""The text of a function or class, wherever it was written: a file, or a cell of a notebook."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import linecache
from collections.abc import Callable
from typing import Any


def source_of(value: Any) -> str | None:
    """Source text of a function, a partial of one, a class, or an object with a `source` of its own; None where there is none.

    An object that is called (it has `__call__`) and is not of ours is taken by its class.
    """
    text = getattr(value, "source", None)
    if isinstance(text, str):
        return text
    if isinstance(value, functools.partial):
        return source_of(value.func)
    if not isinstance(value, Callable):  # type: ignore[arg-type]
        return None
    if not (inspect.isroutine(value) or inspect.isclass(value)):
        value = type(value)
        if value.__module__.startswith("workbench."):
            return None
    try:
        return inspect.getsource(value)
    except (OSError, TypeError):  # a builtin, or a cell whose text is gone
        return _class_in_a_cell(value) if inspect.isclass(value) else None


def _class_in_a_cell(kind: type) -> str | None:
    """Python looks for a class in its module's file, and a notebook has none; its methods know their cell."""
    found = [inspect.unwrap(one) for one in vars(kind).values() if inspect.isfunction(one)]
    own = [one.__code__ for one in found if one.__qualname__.rpartition(".")[0] == kind.__qualname__]
    for code in own:
        lines = linecache.getlines(code.co_filename)
        with contextlib.suppress(SyntaxError):  # a cell with magics
            for node in ast.walk(ast.parse("".join(lines))):
                if isinstance(node, ast.ClassDef) and node.name == kind.__name__:
                    first, last = node.lineno, node.end_lineno or node.lineno
                    if first <= code.co_firstlineno <= last:
                        return "".join(lines[first - 1 : last])
    return None
