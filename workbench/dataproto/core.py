"""DataProto: the batch that stages carry, as a frozen value that shares its tensors."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from workbench.dataproto.columns_map import (
    Columns,
    Lazy,
    as_objects,
    check_objects,
    check_tensor,
    letter_sizes,
    missing,
)
from workbench.dataproto.foreign import MutableDataProto
from workbench.dataproto.ops import RowOperations
from workbench.errors import BatchError, ColumnInvalid, describe, message


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Who wrote a column."""

    stage: str
    """Name of the stage, or `dataset`."""
    step: int | None = None
    """Training step, from 1."""
    policy_version: int | None = None
    """Version of the weights that it used."""
    settings: str | None = None
    """Hash of the stage's settings."""


@dataclass(frozen=True)
class DataProtoItem:
    """One row: tensors without their first dim, objects as they are."""

    batch: Mapping[str, torch.Tensor]
    non_tensor_batch: Mapping[str, Any]
    meta_info: Mapping[str, Any]


class DataProto(RowOperations):
    """A batch of B rows: `batch` (tensors), `non_tensor_batch` (one object per row), `meta_info`.

    verl's `DataProto` with its method names and results, and these differences: every method returns
    a new value and changes nothing in place; `meta_info` is never shared; lengths are checked for tensors
    and objects alike; known columns (`workbench.columns`) are checked for dtype and dims, and a shape
    letter has one size; every column knows who wrote it (`origins`).

    Raises `ColumnInvalid` where a column does not fit.
    """

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
            raise ColumnInvalid(message("a column is a tensor or objects, not both", found=", ".join(sorted(twice))))
        for name, tensor in tensors.items():
            if not isinstance(tensor, torch.Tensor) or tensor.dim() == 0:
                raise ColumnInvalid(message(f"column {name!r}", expected="a tensor [B, …]", found=describe(tensor)))
            check_tensor(name, tuple(tensor.shape), tensor.dtype)
        for name in objects:
            check_objects(name)
        letter_sizes({name: tuple(tensor.shape) for name, tensor in tensors.items()})
        self._set(tensors, objects, dict(meta_info or {}), dict(origins or {}))

    def _set(
        self, tensors: dict[str, Any], objects: dict[str, Any], meta: dict[str, Any], origins: dict[str, Origin]
    ) -> None:
        rows = _rows(tensors, objects)
        self._rows = rows
        self._batch = Columns(tensors, rows)
        self._objects = Columns(objects, rows)
        self._meta = copy.deepcopy(meta)
        self._origins = {name: origins[name] for name in (*tensors, *objects) if name in origins}

    def _new(
        self,
        tensors: dict[str, Any],
        objects: dict[str, Any],
        meta: Mapping[str, Any] | None = None,
        origins: Mapping[str, Origin] | None = None,
    ) -> DataProto:
        """A value made of columns that were checked before: only lengths are looked at again."""
        new = object.__new__(DataProto)
        new._set(
            tensors,
            objects,
            dict(self._meta if meta is None else meta),
            dict(self._origins if origins is None else origins),
        )
        return new

    # --- parts ----------------------------------------------------------------------------

    @property
    def batch(self) -> Columns:
        """Name → tensor [B, …], read-only."""
        return self._batch

    @property
    def non_tensor_batch(self) -> Columns:
        """Name → object array [B], read-only."""
        return self._objects

    @property
    def meta_info(self) -> Mapping[str, Any]:
        """Facts about the whole batch; this value's own copy, read-only."""
        return MappingProxyType(self._meta)

    @property
    def origins(self) -> Mapping[str, Origin]:
        """Column → who wrote it, where that is known."""
        return MappingProxyType(self._origins)

    @property
    def columns(self) -> tuple[str, ...]:
        """All names, in the order in which they came."""
        return (*self._batch, *self._objects)

    # --- access ---------------------------------------------------------------------------

    def __len__(self) -> int:
        return self._rows

    def __contains__(self, name: object) -> bool:
        return name in self._batch or name in self._objects

    def __getitem__(self, key: Any) -> Any:
        """A column by name; a row by number; rows by slice, list, array or tensor (numbers or a mask).

        verl refuses names here; it has only `data.batch["…"]`, which works as well.
        """
        if isinstance(key, str):
            if key in self._batch:
                return self._batch[key]
            if key in self._objects:
                return self._objects[key]
            raise missing(key, self.columns)
        if isinstance(key, int | np.integer):
            return self._item(int(key))
        return self.slice(key.start, key.stop, key.step) if isinstance(key, slice) else self.select_idxs(key)

    def __getattr__(self, name: str) -> Any:
        # reached only where no attribute has the name; during unpickling there are no columns yet
        if name.startswith("_") or "_batch" not in self.__dict__:
            raise AttributeError(name)
        return self[name]

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *(name for name in self.columns if name.isidentifier())]

    def __iter__(self) -> Iterator[DataProtoItem]:
        return (self._item(row) for row in range(self._rows))

    def _item(self, row: int) -> DataProtoItem:
        if not -self._rows <= row < self._rows:
            raise IndexError(message("row", expected=f"below {self._rows}", found=row))
        return DataProtoItem(
            {name: self._batch[name][row] for name in self._batch},
            {name: self._objects[name][row] for name in self._objects},
            self.meta_info,
        )

    # --- new values with other columns ------------------------------------------------------

    def with_columns(self, columns: Mapping[str, Any], *, origin: Origin | None = None) -> DataProto:
        """These columns added or replaced: tensors go to `batch`, everything else to objects."""
        fresh = DataProto(
            {name: value for name, value in columns.items() if isinstance(value, torch.Tensor)},
            {name: value for name, value in columns.items() if not isinstance(value, torch.Tensor)},
        )
        tensors, objects = self._batch.raw(), self._objects.raw()
        for name in columns:
            tensors.pop(name, None)
            objects.pop(name, None)
        tensors.update(fresh.batch.raw())
        objects.update(fresh.non_tensor_batch.raw())
        letter_sizes({name: tuple(tensor.shape) for name, tensor in tensors.items()})
        origins = {name: made for name, made in self._origins.items() if name not in columns}
        if origin is not None:
            origins.update(dict.fromkeys(columns, origin))
        return self._new(tensors, objects, origins=origins)

    def with_meta(self, **items: Any) -> DataProto:
        """`meta_info` with some items set."""
        return self._new(self._batch.raw(), self._objects.raw(), {**self._meta, **items})

    def without(self, *names: str) -> DataProto:
        """The other columns."""
        for name in names:
            if name not in self:
                raise missing(name, self.columns)
        return self._new(
            {name: value for name, value in self._batch.raw().items() if name not in names},
            {name: value for name, value in self._objects.raw().items() if name not in names},
        )

    def mutable(self) -> MutableDataProto:
        """A verl-shaped copy for foreign code that expects to write; nothing of it comes back."""
        return MutableDataProto(
            {name: self._batch[name].clone() for name in self._batch},
            {name: copy.deepcopy(self._objects[name]) for name in self._objects},
            copy.deepcopy(self._meta),
        )

    # --- travel ---------------------------------------------------------------------------

    def __reduce__(self) -> tuple[Any, ...]:
        """Cheap for Ray: the columns themselves, numpy views in protocol 5, no storage beyond the rows."""
        tensors = {name: _portable(self._batch[name]) for name in self._batch}
        objects = {name: self._objects[name] for name in self._objects}
        return _rebuild, (tensors, objects, self._meta, self._origins)

    def __deepcopy__(self, memo: dict[int, Any]) -> DataProto:
        return DataProto(
            {name: self._batch[name].clone() for name in self._batch},
            {name: copy.deepcopy(self._objects[name], memo) for name in self._objects},
            self._meta,
            origins=self._origins,
        )

    def __copy__(self) -> DataProto:
        return self._new(self._batch.raw(), self._objects.raw())

    def save(self, path: Any) -> Any:
        """Write a new folder: safetensors, parquet, json; see `dataproto.io`."""
        from workbench.dataproto.io import save

        return save(self, path)

    @staticmethod
    def load(path: Any) -> DataProto:
        """Open what `save` wrote; a column is read when it is looked at."""
        from workbench.dataproto.io import load

        return load(path)

    # --- looking --------------------------------------------------------------------------

    def __repr__(self) -> str:
        from workbench.views.batches import batch_text

        return batch_text(self)

    def _repr_html_(self) -> str:
        from workbench.views.batches import batch_html

        return batch_html(self)


def _rows(tensors: Mapping[str, Any], objects: Mapping[str, Any]) -> int:
    lengths = {name: int(value.shape[0]) for name, value in (*tensors.items(), *objects.items())}
    if len(set(lengths.values())) > 1:
        first = next(iter(lengths))
        wrong = {name: size for name, size in lengths.items() if size != lengths[first]}
        raise BatchError(
            message("columns of one batch have one length", expected=f"{lengths[first]} rows", found=wrong)
        )
    return next(iter(lengths.values()), 0)


def _portable(tensor: torch.Tensor) -> Any:
    """A numpy view where numpy has the dtype (pickled out of band), else a compact tensor."""
    tensor = tensor.detach().cpu()
    if tensor.dtype in (torch.bfloat16,) or tensor.is_complex():
        return tensor.clone()
    return np.ascontiguousarray(tensor.numpy())


def _rebuild(
    tensors: dict[str, Any], objects: dict[str, Any], meta: dict[str, Any], origins: dict[str, Origin]
) -> DataProto:
    def tensor(value: Any) -> torch.Tensor:
        # arrays from shared memory are read-only, and a tensor over them would be a writable alias
        return (
            value
            if isinstance(value, torch.Tensor)
            else torch.from_numpy(value if value.flags.writeable else value.copy())
        )

    new = object.__new__(DataProto)
    new._set({name: tensor(value) for name, value in tensors.items()}, objects, meta, origins)
    return new


__all__ = ["DataProto", "DataProtoItem", "Lazy", "Origin"]
