"""What counts as the same, and the record of how something is not: numbers within tolerances, NaN is NaN, objects by value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from workbench.dataproto import DataProto


@dataclass(frozen=True)
class How:
    """What counts as the same."""

    rtol: float = 0.0
    atol: float = 0.0
    everywhere: bool = False
    """Whether masked places count."""

    def numbers(self, a: Any, b: Any) -> bool:
        """Whether two numbers are the same: exactly for whole ones, NaN is NaN."""
        if a == b or (a != a and b != b):
            return True
        if not isinstance(a, float) and not isinstance(b, float):
            return False
        return math.isfinite(a) and math.isfinite(b) and abs(a - b) <= self.atol + self.rtol * abs(b)

    def tensors(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """The same for every element of two tensors of one shape."""
        if not (a.is_floating_point() or b.is_floating_point()):
            return a == b
        a, b = a.double(), b.double()
        near = a.isfinite() & b.isfinite() & ((a - b).abs() <= self.atol + self.rtol * b.abs())
        return (a == b) | near | (a.isnan() & b.isnan())


class Beside(NamedTuple):
    """One token near the place, on both sides."""

    token: int
    """Its position in the first (in the second, where only that has it)."""
    ids: tuple[int | None, int | None]
    """Token ids; None where a batch has no ids or no such place."""
    first: Any
    second: Any
    differs: bool
    here: bool
    """Whether it is the place itself."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How something differs, at the first place where it does; `Divergence` says what the fields mean."""

    why: str
    row: int | None = None
    other_row: int | None = None
    uid: Any = None
    token: int | None = None
    token_ids: tuple[int | None, int | None] | None = None
    inside: str = ""
    character: int | None = None
    first: Any = None
    second: Any = None
    rows: int = 0
    """Rows in which it differs."""
    largest: float | None = None
    """Largest absolute difference of floats; infinite where one side has NaN or nothing."""
    beside: tuple[Beside, ...] = ()


def held(batch: DataProto, name: str) -> Any:
    """A column as the batch holds it, unread where it is on disk: for `is`."""
    return (batch.batch if name in batch.batch else batch.non_tensor_batch).raw().get(name)


def read(batch: DataProto, name: str) -> Any:
    """A column for one look; a tensor detached and in main memory."""
    if name in batch.batch:
        return batch.batch.passing(name).detach().cpu()
    return batch.non_tensor_batch.passing(name)


class Cells(NamedTuple):
    """Where in two objects they differ, and the two values there."""

    inside: str
    first: Any
    second: Any


def first_character(a: str, b: str) -> int:
    """The first place, from 0, at which two texts differ."""
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def cell(x: Any, y: Any, how: How, inside: str = "") -> Cells | None:
    """The first difference inside two objects, with its path; None where they say the same. Records' `seconds` are left out."""
    x, y = _plain(x), _plain(y)
    if x is y:
        return None
    if is_dataclass(x) and type(x) is type(y):
        names = [one.name for one in fields(x) if one.name != "seconds"]
        found = (cell(getattr(x, name), getattr(y, name), how, f"{inside}.{name}") for name in names)
        return next((one for one in found if one is not None), None)
    if isinstance(x, Mapping) and isinstance(y, Mapping):
        for key in (*x, *(key for key in y if key not in x)):
            if key not in x or key not in y:
                return Cells(f"{inside}[{key!r}]", x.get(key), y.get(key))
            within = cell(x[key], y[key], how, f"{inside}[{key!r}]")
            if within is not None:
                return within
        return None
    if isinstance(x, list | tuple) and isinstance(y, list | tuple):
        found = (cell(one, two, how, f"{inside}[{n}]") for n, (one, two) in enumerate(zip(x, y, strict=False)))
        first = next((one for one in found if one is not None), None)
        return first or (None if len(x) == len(y) else Cells(f"the length of {inside or 'it'}", len(x), len(y)))
    if isinstance(x, int | float) and isinstance(y, int | float):
        return None if how.numbers(x, y) else Cells(inside, x, y)
    same = x == y if isinstance(x, str | bytes) or isinstance(y, str | bytes) else repr(x) == repr(y)
    return None if same else Cells(inside, x, y)


def _plain(x: Any) -> Any:
    """Arrays, tensors and their scalars as lists and numbers."""
    return x.tolist() if isinstance(x, np.ndarray | np.generic | torch.Tensor) else x
