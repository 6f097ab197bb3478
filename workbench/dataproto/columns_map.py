"""The two read-only mappings of a batch, and how a value becomes a column."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from workbench.columns import declared, nearest_column, writer_of
from workbench.errors import ColumnInvalid, ColumnMissing, message


class Lazy:
    """A column that is read when somebody looks at it: `read()` all of it, `part(start, stop)` some rows."""

    def __init__(
        self,
        read: Callable[[], Any],
        shape: tuple[int, ...],
        dtype: torch.dtype | None,
        part: Callable[[int, int], Any],
    ) -> None:
        self.read = read
        self.part = part
        self.shape = shape
        self.dtype = dtype


class Columns(Mapping[str, Any]):
    """Name → column, read-only. A missing name is an error that says what there is and who would write it."""

    def __init__(self, columns: dict[str, Any], rows: int) -> None:
        self._columns = columns
        self._rows = rows

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
        """`torch.Size([B])`, as a TensorDict would say it."""
        return torch.Size([self._rows])

    def part(self, name: str, start: int, stop: int) -> Any:
        """Rows `start` to `stop` of a column; of one that is on disk nothing else is read, and nothing is kept."""
        value = self._columns.get(name)
        return value.part(start, stop) if isinstance(value, Lazy) else self[name][start:stop]

    def passing(self, name: str) -> Any:
        """A whole column for one look: one that is on disk is read and not kept."""
        value = self._columns.get(name)
        return value.read() if isinstance(value, Lazy) else self[name]

    def raw(self) -> dict[str, Any]:
        """The columns as they are held, lazy ones unread, in a new dict."""
        return dict(self._columns)

    def __repr__(self) -> str:
        return f"Columns({', '.join(self._columns)})"


def missing(name: str, present: tuple[str, ...]) -> ColumnMissing:
    """The error for a column that is not there."""
    writer, close = writer_of(name), nearest_column(name, present)
    advice = [
        f"stage {writer!r} writes it" if writer else "",
        f"did you mean {close!r}?" if close and close != name else "",
    ]
    return ColumnMissing(
        message(
            f"this batch has no {name!r}",
            found=", ".join(present) or "no columns",
            do="; ".join(part for part in advice if part) or None,
        )
    )


def as_objects(name: str, values: Any) -> np.ndarray:
    """One Python object per row, as a one-dimensional object array."""
    if isinstance(values, np.ndarray) and values.dtype == object and values.ndim == 1:
        return values
    if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__len__"):
        raise ColumnInvalid(message(f"column {name!r}", expected="one object per row", found=type(values).__name__))
    array = np.empty(len(values), dtype=object)
    for row, value in enumerate(values):
        array[row] = value
    return array


def check_tensor(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """A known column has its declared dtype and number of dims."""
    column = declared(name)
    if column is None:
        return
    if not column.is_tensor:
        raise ColumnInvalid(
            message(f"column {name!r}", expected="one object per row", found=f"a tensor {tuple(shape)}")
        )
    kinds = {
        "float": dtype.is_floating_point,
        "int": not dtype.is_floating_point and dtype != torch.bool and not dtype.is_complex,
        "bool": dtype == torch.bool,
    }
    # a mask may come as bool, int or float: all of them count
    if not kinds[column.dtype] and not (name.endswith("mask") and not dtype.is_complex):
        raise ColumnInvalid(message(f"column {name!r}", expected=f"dtype {column.dtype}", found=str(dtype)))
    if len(shape) != len(column.dims):
        raise ColumnInvalid(
            message(f"column {name!r}", expected=f"dims [{', '.join(column.dims)}]", found=f"shape {tuple(shape)}")
        )


def check_objects(name: str) -> None:
    """A column that is declared a tensor must not come as objects."""
    column = declared(name)
    if column is not None and column.is_tensor:
        raise ColumnInvalid(
            message(f"column {name!r}", expected=f"a {column.dtype} tensor [{', '.join(column.dims)}]", found="objects")
        )


def letter_sizes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Letter → size over all known tensor columns; refuses a letter with two sizes.

    A compound such as `S+T` is a letter of its own, checked against its parts where both are there.
    """
    sizes: dict[str, int] = {}
    named: dict[str, str] = {}
    for name, shape in shapes.items():
        column = declared(name)
        if column is None or not column.is_tensor:
            continue
        for letter, size in zip(column.dims[1:], shape[1:], strict=True):
            if sizes.setdefault(letter, size) != size:
                raise ColumnInvalid(f"{name!r} has {letter}={size} but {named[letter]!r} has {letter}={sizes[letter]}")
            named.setdefault(letter, name)
    if {"S", "T", "S+T"} <= sizes.keys() and sizes["S"] + sizes["T"] != sizes["S+T"]:
        raise ColumnInvalid(
            message("input_ids", expected=f"S+T = {sizes['S']}+{sizes['T']} tokens", found=f"{sizes['S+T']}")
        )
    return sizes
