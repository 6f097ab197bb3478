"""The immutable value under `DataProto`: read-only columns, `meta_info`, origins, and values with other columns; and
whether two columns or objects are the same: numbers within tolerances, NaN equal to NaN, shared columns by identity."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, is_dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import numpy as np
import torch

from workbench.base.config import check_nesting
from workbench.base.errors import BatchError, ColumnInvalid, ColumnMissing, describe
from workbench.dataproto.columns import check_objects, check_tensor, letter_sizes, nearest_column, writer_of


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Record of which stage wrote a column of a batch, and at which step."""

    stage: str
    """Name of the stage, or `dataset`."""
    step: int | None = None
    """Training step, from 1."""
    policy_version: int | None = None
    """Version of the policy's weights when the column was written."""
    settings: str | None = None
    """Hash of the stage's settings (`settings_hash`)."""
    state_id: str | None = field(default=None, compare=False, repr=False)
    """Name of the learner's exact weights when the column was written; known only in this process, and not saved."""


@dataclass(eq=False)
class Lazy:
    """A column on disk that is read at its first use: `read()` reads all of it, `part(start, stop)` some rows."""

    read: Callable[[], Any]
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    part: Callable[[int, int], Any]


class Columns(Mapping[str, Any]):
    """A read-only mapping of name → column. A missing name raises `ColumnMissing`, which says which stage would write
    it.
    """

    def __init__(self, columns: dict[str, Any], rows: int) -> None:
        self._columns, self._rows = columns, rows

    def __getitem__(self, name: str) -> Any:
        try:
            value = self._columns[name]
        except KeyError:
            raise missing(name, tuple(self._columns)) from None
        if isinstance(value, Lazy):
            value = self._columns[name] = value.read()
        return value

    def __contains__(self, name: object) -> bool:
        return name in self._columns  # asked often: it must neither read a column nor look for the nearest name

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    @property
    def batch_size(self) -> torch.Size:
        """`torch.Size([B])`, as of a TensorDict."""
        return torch.Size([self._rows])

    def part(self, name: str, start: int, stop: int) -> Any:
        """Return rows `start` to `stop` of a column; of a column on disk only these are read, and nothing is cached."""
        value = self.held(name)
        return value.part(start, stop) if isinstance(value, Lazy) else self[name][start:stop]

    def passing(self, name: str) -> Any:
        """Return a whole column; one on disk is read and, unlike with `[name]`, not cached."""
        value = self.held(name)
        return value.read() if isinstance(value, Lazy) else self[name]

    def held(self, name: str) -> Any:
        """Return a column without reading it: `Lazy` where it is on disk; None where there is no such column."""
        return self._columns.get(name)

    def raw(self) -> dict[str, Any]:
        """Return all columns in a new dict, without reading those on disk."""
        return dict(self._columns)

    def __repr__(self) -> str:
        return f"Columns({', '.join(self._columns)})"


def missing(name: str, present: tuple[str, ...]) -> ColumnMissing:
    """Make the error for a missing column, with the stage that writes it and the nearest name."""
    writer, close = writer_of(name), nearest_column(name, present)
    advice = [f"stage {writer!r} writes it"] if writer else []
    advice += [f"did you mean {close!r}?"] if close and close != name else []
    found = ", ".join(present) or "no columns"
    error = ColumnMissing(f"this batch has no column {name!r}", found=found, do="; ".join(advice) or None)
    error.name = name
    return error


def as_objects(name: str, values: Any) -> np.ndarray:
    """Turn a sequence of one Python object per row into a one-dimensional object array. Raises `ColumnInvalid` for
    anything else.
    """
    if isinstance(values, np.ndarray) and values.dtype == object and values.ndim == 1:
        return values
    if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__len__"):
        raise ColumnInvalid(f"column {name!r}", expected="one object per row", found=type(values).__name__)
    array = np.empty(len(values), dtype=object)
    for row, value in enumerate(values):
        array[row] = value
    return array


def apart(columns: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Split columns into (tensors, everything else); a `Lazy` one is a tensor where it has a dtype."""

    def is_tensor(value: Any) -> bool:
        return isinstance(value, torch.Tensor) or (isinstance(value, Lazy) and value.dtype is not None)

    tensors = {name: value for name, value in columns.items() if is_tensor(value)}
    return tensors, {name: value for name, value in columns.items() if name not in tensors}


class Value:
    """An immutable batch of B rows, the base of `DataProto`: methods return a new batch, which shares its columns."""

    def __init__(
        self,
        batch: Mapping[str, torch.Tensor] | None = None,
        non_tensor_batch: Mapping[str, Any] | None = None,
        meta_info: Mapping[str, Any] | None = None,
        *,
        origins: Mapping[str, Origin] | None = None,
    ) -> None:
        tensors = dict(batch.items()) if batch is not None else {}
        objects = {name: as_objects(name, values) for name, values in (non_tensor_batch or {}).items()}
        twice = tensors.keys() & objects.keys()
        if twice:
            raise ColumnInvalid("columns given both as tensors and as objects", found=", ".join(sorted(twice)))
        for name, tensor in tensors.items():
            if not isinstance(tensor, torch.Tensor) or tensor.dim() == 0:
                raise ColumnInvalid(f"column {name!r}", expected="a tensor [B, …]", found=describe(tensor))
            check_tensor(name, tuple(tensor.shape), tensor.dtype)
        for name, cells in objects.items():
            check_objects(name)
            for row, cell in enumerate(cells):
                check_nesting(cell, f"column {name!r}, row {row}", ColumnInvalid)
        check_letters(tensors)
        check_nesting(meta_info, "meta_info", BatchError)
        self._set(tensors, objects, dict(meta_info or {}), origins or {})

    def _set(
        self, tensors: dict[str, Any], objects: dict[str, Any], meta: dict[str, Any], origins: Mapping[str, Origin]
    ) -> None:
        self._rows = _rows({**tensors, **objects})
        self._names = dict.fromkeys((*tensors, *objects))  # asked for very often: one look into one dict
        self._batch = Columns(tensors, self._rows)
        self._objects = Columns(objects, self._rows)
        self._meta = copy.deepcopy(meta)
        self._origins = {name: made for name, made in origins.items() if name in self._names}

    def _new(
        self,
        *columns: Mapping[str, Any],
        meta: Mapping[str, Any] | None = None,
        origins: Mapping[str, Origin] | None = None,
    ) -> Self:
        """Make a value of columns that were checked before; only their lengths are checked again."""
        new = object.__new__(type(self))
        parts = apart({name: value for part in columns for name, value in part.items()})
        new._set(*parts, dict(self._meta if meta is None else meta), self._origins if origins is None else origins)
        return new

    def _raw(self) -> dict[str, Any]:
        """Return all columns in a new dict, without reading those on disk."""
        return {**self._batch.raw(), **self._objects.raw()}

    # --- parts ----------------------------------------------------------------------------

    @property
    def batch(self) -> Columns:
        """Columns of tensors: name → tensor [B, …], read-only."""
        return self._batch

    @property
    def non_tensor_batch(self) -> Columns:
        """Columns of Python objects: name → object array [B], read-only."""
        return self._objects

    @property
    def meta_info(self) -> Mapping[str, Any]:
        """Facts about the whole batch (step, epoch, …), read-only; each batch has a separate copy."""
        return MappingProxyType(self._meta)

    @property
    def origins(self) -> Mapping[str, Origin]:
        """Column → the stage, step and policy version that wrote it, where known."""
        return MappingProxyType(self._origins)

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of all columns: tensors first, then objects."""
        return tuple(self._names)

    def __len__(self) -> int:
        return self._rows

    def __contains__(self, name: object) -> bool:
        return name in self._names

    # --- new values with other columns ------------------------------------------------------

    def with_columns(self, columns: Mapping[str, Any], *, origin: Origin | None = None) -> Self:
        """Return the batch with columns added or replaced: tensors go to `batch`, everything else to objects."""
        fresh = Value(*apart(columns))
        kept = {name: value for name, value in self._raw().items() if name not in columns}
        origins = {name: made for name, made in self._origins.items() if name not in columns}
        check_letters({**apart(kept)[0], **fresh.batch.raw()})
        return self._new(kept, fresh._raw(), origins={**origins, **(dict.fromkeys(columns, origin) if origin else {})})

    def with_meta(self, **items: Any) -> Self:
        """Return the batch with some items of `meta_info` set."""
        check_nesting(items, "meta_info", BatchError)
        return self._new(self._raw(), meta={**self._meta, **items})

    def without(self, *names: str) -> Self:
        """Return the batch without these columns. Raises `ColumnMissing` for a name that it does not have."""
        for name in names:
            if name not in self:
                raise missing(name, self.columns)
        return self._new({name: value for name, value in self._raw().items() if name not in names})


def check_letters(tensors: Mapping[str, Any]) -> None:
    """Raise `ColumnInvalid` where a shape letter (S, T, …) has two sizes among the tensors."""
    letter_sizes({name: tuple(tensor.shape) for name, tensor in tensors.items()})


def _rows(columns: Mapping[str, Any]) -> int:
    lengths = {name: int(value.shape[0]) for name, value in columns.items()}
    if len(set(lengths.values())) > 1:
        first = next(iter(lengths))
        wrong = {name: size for name, size in lengths.items() if size != lengths[first]}
        expected = f"{lengths[first]} rows, as {first!r} has"
        raise BatchError("columns of one batch must have one length", expected=expected, found=wrong)
    return next(iter(lengths.values()), 0)


# --- whether columns and objects are the same -------------------------------------------------------


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
        """Return whether two numbers are the same: whole numbers exactly, floats within the tolerances; NaN equals NaN."""
        if a == b or (a != a and b != b):
            return True
        if not isinstance(a, float) and not isinstance(b, float):
            return False
        return math.isfinite(a) and math.isfinite(b) and abs(a - b) <= self.atol + self.rtol * abs(b)

    def tensors(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Compare two tensors of one shape element by element: returns a bool tensor of that shape, True where they are
        the same.
        """
        if not (a.is_floating_point() or b.is_floating_point()):
            return a == b
        return torch.isclose(a.double(), b.double(), rtol=self.rtol, atol=self.atol, equal_nan=True)


EXACT = How(kinds=True, times=True)
"""Everything counts; NaN equals NaN."""


def same(a: Any, b: Any, how: How = EXACT) -> bool:
    """Return whether two columns or objects are the same, counting only the differences that `how` counts."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return difference(a, b, how) is None
    if a.shape != b.shape or (how.kinds and a.dtype != b.dtype):
        return False
    return a is b or bool(torch.equal(a, b) or how.tensors(a, b).all())


def held(batch: Value, name: str) -> Any:
    """Return a column as the batch holds it, without reading it from disk: tensor, object array or `Lazy`; None where
    it is absent.
    """
    return (batch.batch if name in batch.batch else batch.non_tensor_batch).held(name)


def one_place(a: Any, b: Any) -> bool:
    """Return whether two columns from `held` are one object, or are read from one place on disk (saved batches never
    change).
    """
    if not isinstance(a, Lazy) or not isinstance(b, Lazy):
        return a is b
    x, y = (inspect.unwrap(column.read) for column in (a, b))
    return a is b or (isinstance(x, partial) and isinstance(y, partial) and (x.func, x.args) == (y.func, y.args))


def unchanged(name: str, before: Value, after: Value) -> bool:
    """Return whether two batches hold the very same object as a column; a column that both have on disk is not read for
    this.
    """
    if name not in before or name not in after:
        return False
    if one_place(held(before, name), held(after, name)):
        return True
    one, two = ((batch.batch if name in batch.batch else batch.non_tensor_batch)[name] for batch in (before, after))
    return one is two


# --- inside objects -----------------------------------------------------------------------------


class Cells(NamedTuple):
    """The first place where two objects differ, and the value of each at this place."""

    inside: str
    first: Any
    second: Any


_FLAT = (str, int, float, bool, type(None))
_ARRAYS = (np.ndarray, torch.Tensor)
_ABSENT: Any = object()


def difference(x: Any, y: Any, how: How = EXACT, inside: str = "") -> Cells | None:
    """Find the first difference inside two objects, with its path; None where they are the same."""
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
    """Turn arrays, tensors and their scalars into lists and numbers; anything else is returned unchanged."""
    return x.tolist() if isinstance(x, (*_ARRAYS, np.generic)) else x


def _alike(x: Any, y: Any, how: How) -> bool:
    """Return whether two objects without parts are the same."""
    if isinstance(x, int | float) and isinstance(y, int | float):
        return how.numbers(x, y)
    return bool(x == y or (not how.kinds and not isinstance(x, str | bytes) and repr(x) == repr(y)))


def _equal(x: Any, y: Any) -> bool:
    """Return whether two cells are plainly equal, as most are; then their parts need no comparing."""
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
    """Return what must agree where `How.kinds` is set: the class of a sequence, or dtype and shape of an array; None
    for others.
    """
    if isinstance(x, _ARRAYS):
        return type(x), x.dtype, tuple(x.shape)
    return type(x) if isinstance(x, list | tuple) else None


def _parts(x: Any, y: Any, how: How) -> Iterator[tuple[str, Any, Any]] | None:
    """Return the parts of two records, mappings or sequences side by side, as (step of the path, part of x, part of y);
    None for objects of other kinds.
    """
    if is_dataclass(x) and type(x) is type(y):
        names = [name for name in x.__dataclass_fields__ if how.times or name != "seconds"]
        return ((f".{name}", getattr(x, name), getattr(y, name)) for name in names)
    if isinstance(x, Mapping) and isinstance(y, Mapping):
        keys = (*x, *(key for key in y if key not in x))
        return ((f"[{key!r}]", x.get(key, _ABSENT), y.get(key, _ABSENT)) for key in keys)
    if isinstance(x, list | tuple) and isinstance(y, list | tuple):
        return ((f"[{number}]", a, b) for number, (a, b) in enumerate(zip(x, y, strict=False)))
    return None
