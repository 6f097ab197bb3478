"""Compares columns and objects: numbers within tolerances, NaN equal to NaN, objects by value, shared columns by identity.

`union` uses it for columns that must agree, `compare` and `diverge` for two records of a step.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, is_dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from workbench.dataproto.value import Lazy, Value


@dataclass(frozen=True, kw_only=True)
class How:
    """Which differences count when two columns or objects are compared."""

    rtol: float = 0.0
    atol: float = 0.0
    """Floats are the same within |a − b| ≤ atol + rtol·|b|."""
    kinds: bool = False
    """Whether a list differs from a tuple or an array of the same items, and an array from one of another dtype."""
    times: bool = False
    """Whether a difference in the `seconds` of records counts."""

    def numbers(self, a: Any, b: Any) -> bool:
        """Whether two numbers are the same: whole numbers exactly, floats within the tolerances; NaN equals NaN."""
        if a == b or (a != a and b != b):
            return True
        if not isinstance(a, float) and not isinstance(b, float):
            return False
        return math.isfinite(a) and math.isfinite(b) and abs(a - b) <= self.atol + self.rtol * abs(b)

    def tensors(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Whether each element of two tensors of one shape is the same, as a bool tensor of that shape."""
        if not (a.is_floating_point() or b.is_floating_point()):
            return a == b
        return torch.isclose(a.double(), b.double(), rtol=self.rtol, atol=self.atol, equal_nan=True)


EXACT = How(kinds=True, times=True)
"""Everything counts; NaN equals NaN."""


def same(a: Any, b: Any, how: How = EXACT) -> bool:
    """Whether two columns, or two objects, are the same as far as `how` counts differences."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return difference(a, b, how) is None
    if a.shape != b.shape or (how.kinds and a.dtype != b.dtype):
        return False
    return a is b or bool(torch.equal(a, b) or how.tensors(a, b).all())


def held(batch: Value, name: str) -> Any:
    """A column as the batch holds it, without reading it from disk: tensor, object array or `Lazy`; None if absent."""
    return (batch.batch if name in batch.batch else batch.non_tensor_batch).held(name)


def one_place(a: Any, b: Any) -> bool:
    """Whether two columns from `held` are one object, or are read from one place on disk (saved batches never change)."""
    if not isinstance(a, Lazy) or not isinstance(b, Lazy):
        return a is b
    x, y = (inspect.unwrap(column.read) for column in (a, b))
    return a is b or (isinstance(x, partial) and isinstance(y, partial) and (x.func, x.args) == (y.func, y.args))


def unchanged(name: str, before: Value, after: Value) -> bool:
    """Whether two batches hold the very same object as a column; a column that both have on disk is not read for this."""
    if name not in before or name not in after:
        return False
    if one_place(held(before, name), held(after, name)):
        return True
    one, two = ((batch.batch if name in batch.batch else batch.non_tensor_batch)[name] for batch in (before, after))
    return one is two


# --- inside objects -----------------------------------------------------------------------------


class Cells(NamedTuple):
    """The place inside two objects where they differ, and the value of each there."""

    inside: str
    first: Any
    second: Any


_FLAT = (str, int, float, bool, type(None))
_ARRAYS = (np.ndarray, torch.Tensor)
_ABSENT: Any = object()


def difference(x: Any, y: Any, how: How = EXACT, inside: str = "") -> Cells | None:
    """The first difference inside two objects, with its path; None where they are the same."""
    if _equal(x, y):
        return None
    if x is _ABSENT or y is _ABSENT or (how.kinds and _kind(x) != _kind(y)):
        return Cells(inside, _shown(x), _shown(y))
    x, y = _plain(x), _plain(y)
    parts = _parts(x, y, how)
    if parts is None:
        return None if _alike(x, y, how) else Cells(inside, x, y)
    for step, a, b in parts:
        found = None if a is b else difference(a, b, how, f"{inside}{step}")
        if found is not None:
            return found
    if isinstance(x, list | tuple) and len(x) != len(y):
        return Cells(f"the length of {inside or 'the list'}", len(x), len(y))
    return None


def _shown(x: Any) -> Any:
    return None if x is _ABSENT else x


def _plain(x: Any) -> Any:
    """Arrays, tensors and their scalars as lists and numbers."""
    return x.tolist() if isinstance(x, (*_ARRAYS, np.generic)) else x


def _alike(x: Any, y: Any, how: How) -> bool:
    """Whether two objects without parts are the same."""
    if isinstance(x, int | float) and isinstance(y, int | float):
        return how.numbers(x, y)
    return bool(x == y or (not how.kinds and not isinstance(x, str | bytes) and repr(x) == repr(y)))


def _equal(x: Any, y: Any) -> bool:
    """Whether two cells are plainly equal, as most are, so that no parts need comparing."""
    if x is y:
        return True
    if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
        return x.dtype == y.dtype and torch.equal(x, y)
    if type(x) is not type(y) or type(x) not in (*_FLAT, dict, list):
        return False
    with suppress(ValueError, RuntimeError):  # arrays and tensors within do not say whether they are equal
        return bool(x == y)
    return False


def _kind(x: Any) -> Any:
    """What must agree where kinds count: the class of a sequence; dtype and shape of an array."""
    if isinstance(x, _ARRAYS):
        return type(x), x.dtype, tuple(x.shape)
    return type(x) if isinstance(x, list | tuple) else None


def _parts(x: Any, y: Any, how: How) -> Iterator[tuple[str, Any, Any]] | None:
    """What two records, mappings or sequences hold, side by side: (step of the path, part of x, part of y); None for others."""
    if is_dataclass(x) and type(x) is type(y):
        names = [name for name in x.__dataclass_fields__ if how.times or name != "seconds"]
        return ((f".{name}", getattr(x, name), getattr(y, name)) for name in names)
    if isinstance(x, Mapping) and isinstance(y, Mapping):
        keys = (*x, *(key for key in y if key not in x))
        return ((f"[{key!r}]", x.get(key, _ABSENT), y.get(key, _ABSENT)) for key in keys)
    if isinstance(x, list | tuple) and isinstance(y, list | tuple):
        return ((f"[{number}]", a, b) for number, (a, b) in enumerate(zip(x, y, strict=False)))
    return None
