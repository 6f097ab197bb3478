"""What can be done with rows and columns: verl's method names, each returning a new value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from workbench.dataproto.columns_map import missing
from workbench.errors import BatchError, SettingError, UnionConflict, describe, message

if TYPE_CHECKING:
    import pandas as pd

    from workbench.dataproto.core import DataProto


class RowOperations:
    """The half of `DataProto` that makes batches out of batches."""

    _meta: dict[str, Any]
    _rows: int

    # --- construction -----------------------------------------------------------------------

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, torch.Tensor] | None = None,
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ) -> DataProto:
        """Tensors and objects apart. Unlike verl's, lengths are checked for objects too."""
        return cast("Any", cls)(tensors, non_tensors, meta_info)

    @classmethod
    def from_single_dict(cls, data: Mapping[str, Any], meta_info: Mapping[str, Any] | None = None) -> DataProto:
        """One dict: tensors go to `batch`, everything else (lists too, unlike verl's) to objects."""
        tensors = {name: value for name, value in data.items() if isinstance(value, torch.Tensor)}
        objects = {name: value for name, value in data.items() if name not in tensors}
        return cast("Any", cls)(tensors, objects, meta_info)

    # --- columns ----------------------------------------------------------------------------

    def select(
        self: Any,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
    ) -> DataProto:
        """Some columns. None keeps all of a kind, except that naming columns of one kind alone, in
        `batch_keys`, may name objects as well. Any missing name is an error (verl drops missing objects silently)."""
        wanted = list(batch_keys) if batch_keys is not None else list(self._batch)
        objects = [name for name in wanted if name in self._objects]
        if non_tensor_batch_keys is not None:
            objects += list(non_tensor_batch_keys)
        elif batch_keys is None:
            objects = list(self._objects)
        for name in (*wanted, *objects):
            if name not in self:
                raise missing(name, self.columns)
        raw, raw_objects = self._batch.raw(), self._objects.raw()
        meta = self._meta
        if meta_info_keys is not None:
            absent = [name for name in meta_info_keys if name not in meta]
            if absent:
                raise BatchError(message(f"meta_info has no {absent}", found=", ".join(meta)))
            meta = {name: meta[name] for name in meta_info_keys}
        return self._new(
            {name: raw[name] for name in wanted if name in raw},
            {name: raw_objects[name] for name in objects},
            meta,
        )

    def pop(
        self: Any,
        batch_keys: Sequence[str] = (),
        non_tensor_batch_keys: Sequence[str] = (),
        meta_info_keys: Sequence[str] = (),
    ) -> tuple[DataProto, DataProto]:
        """(the named columns, the rest). verl's changes the batch in place and returns the first alone."""
        taken = self.select(list(batch_keys), list(non_tensor_batch_keys), list(meta_info_keys))
        rest = self.without(*batch_keys, *non_tensor_batch_keys)
        meta = {name: value for name, value in self._meta.items() if name not in meta_info_keys}
        return taken, rest._new(rest._batch.raw(), rest._objects.raw(), meta)

    def rename(self: Any, old_keys: str | Sequence[str], new_keys: str | Sequence[str]) -> DataProto:
        """Columns under other names, tensors and objects alike (verl renames tensors only, in place)."""
        old = [old_keys] if isinstance(old_keys, str) else list(old_keys)
        new = [new_keys] if isinstance(new_keys, str) else list(new_keys)
        if len(old) != len(new):
            raise BatchError(message("rename", expected=f"{len(old)} new names", found=len(new)))
        columns = {to: self[name] for name, to in zip(old, new, strict=True)}
        made = {to: self._origins[name] for name, to in zip(old, new, strict=True) if name in self._origins}
        kept = self.without(*old)
        clash = [name for name in columns if name in kept]
        if clash:
            raise BatchError(
                message("rename would overwrite", found=", ".join(clash), do="drop them first: without(…)")
            )
        renamed = kept.with_columns(columns)
        return renamed._new(renamed._batch.raw(), renamed._objects.raw(), origins={**renamed._origins, **made})

    def union(self: Any, other: DataProto) -> DataProto:
        """Columns and meta of both. What both have must agree; NaN equals NaN (in verl it does not).

        Raises `UnionConflict` where a shared column or meta item differs, `BatchError` for lengths.
        """
        if len(self.columns) and len(other.columns) and len(self) != len(other):
            raise BatchError(message("union of batches", expected=f"{len(self)} rows", found=len(other)))
        for name in self.columns:
            if name in other and not same_column(self[name], other[name]):
                raise UnionConflict(
                    message(
                        f"both batches have {name!r} and differ",
                        found=f"written by {_stage(self, name)} and by {_stage(other, name)}",
                        do="drop or rename one: without(…), rename(…)",
                    )
                )
        for key, value in other.meta_info.items():
            if key in self._meta and not same_object(self._meta[key], value):
                raise UnionConflict(
                    message(f"meta_info {key!r} differs", found=f"{describe(self._meta[key])} and {describe(value)}")
                )
        return self._new(
            {**self._batch.raw(), **_new_only(self, other.batch.raw())},
            {**self._objects.raw(), **_new_only(self, other.non_tensor_batch.raw())},
            {**self._meta, **other.meta_info},
            {**other.origins, **self._origins},
        )._checked()

    def _checked(self: Any) -> DataProto:
        """Letters have one size after columns of two batches came together."""
        from workbench.dataproto.columns_map import letter_sizes

        letter_sizes({name: tuple(value.shape) for name, value in self._batch.raw().items()})
        return self

    # --- rows -------------------------------------------------------------------------------

    def select_idxs(self: Any, idxs: Any) -> DataProto:
        """Rows by number (repeats allowed) or by a mask of B bools: list, array or tensor."""
        index = idxs if isinstance(idxs, torch.Tensor) else torch.as_tensor(np.asarray(idxs))
        if index.numel() == 0:
            index = index.long()
        if index.dim() != 1 or index.dtype.is_floating_point or index.dtype.is_complex:
            raise BatchError(message("rows", expected="a list of row numbers or a mask", found=describe(idxs)))
        if index.dtype == torch.bool:
            if len(index) != len(self):
                raise BatchError(message("a mask of rows", expected=f"{len(self)} bools", found=len(index)))
            index = index.nonzero().squeeze(-1)
        if index.numel() and not (-len(self) <= int(index.min()) and int(index.max()) < len(self)):
            raise IndexError(message("row numbers", expected=f"below {len(self)}", found=int(index.max())))
        index = index.long() % max(len(self), 1)
        numbers = index.numpy()
        return self._new(
            {name: self._batch[name][index.to(self._batch[name].device)] for name in self._batch},
            {name: self._objects[name][numbers] for name in self._objects},
        )

    def slice(self: Any, start: int | None = None, end: int | None = None, step: int | None = None) -> DataProto:
        """`data[start:end:step]`; tensors are views of this batch's."""
        where = slice(start, end, step)
        if step is not None and step < 0:
            return self.select_idxs(list(range(len(self)))[where])
        return self._new(
            {name: self._batch[name][where] for name in self._batch},
            {name: self._objects[name][where] for name in self._objects},
        )

    def reorder(self: Any, indices: torch.Tensor) -> DataProto:
        """Rows in another order (verl's does it in place and returns nothing)."""
        if sorted(torch.as_tensor(indices).tolist()) != list(range(len(self))):
            raise BatchError(message("reorder", expected=f"every row of {len(self)} once", found=describe(indices)))
        return self.select_idxs(indices)

    def repeat(self: Any, repeat_times: int = 2, interleave: bool = True) -> DataProto:
        """Every row `repeat_times` times: a a b b, or a b a b without `interleave`."""
        rows = torch.arange(len(self))
        return self.select_idxs(rows.repeat_interleave(repeat_times) if interleave else rows.repeat(repeat_times))

    def sample_level_repeat(self: Any, repeat_times: Any) -> DataProto:
        """Row i `repeat_times[i]` times."""
        times = torch.as_tensor(np.asarray(repeat_times)).long()
        if len(times) != len(self):
            raise BatchError(message("sample_level_repeat", expected=f"{len(self)} numbers", found=len(times)))
        return self.select_idxs(torch.arange(len(self)).repeat_interleave(times))

    def chunk(self: Any, chunks: int) -> list[DataProto]:
        """`chunks` equal parts. Raises where they cannot be equal: pad first (`pad_to_divisor`), or `split`."""
        if chunks < 1 or len(self) % chunks:
            raise BatchError(
                message(
                    f"{len(self)} rows cannot be cut into {chunks} equal chunks",
                    do=f"pad_to_divisor({chunks}) first, or split(size) for an uneven last one",
                )
            )
        return self.split(max(len(self) // chunks, 1))

    def split(self: Any, split_size: int) -> list[DataProto]:
        """Parts of `split_size` rows; the last may be short."""
        if split_size < 1:
            raise BatchError(message("split size", expected="≥ 1", found=split_size))
        return [self.slice(start, start + split_size) for start in range(0, len(self), split_size)]

    @staticmethod
    def concat(parts: Sequence[DataProto]) -> DataProto:
        """Rows of all parts. They must have the same columns, and meta_info must agree where shared.

        verl flattens the meta key `metrics`; here metrics stand beside the batch and need no such rule.
        """
        if not parts:
            raise BatchError(message("concat", expected="at least one batch", found="none"))
        first: Any = parts[0]
        meta = dict(first.meta_info)
        for number, part in enumerate(parts):
            if set(part.columns) != set(first.columns):
                odd = sorted(set(part.columns) ^ set(first.columns))
                raise BatchError(message(f"part {number} has other columns than part 0", found=", ".join(odd)))
            for key, value in part.meta_info.items():
                if key in meta and not same_object(meta[key], value):
                    raise UnionConflict(message(f"meta_info {key!r} differs in part {number}", found=describe(value)))
                meta[key] = value
        return first._new(
            {name: torch.cat([part.batch[name] for part in parts]) for name in first.batch},
            {name: np.concatenate([part.non_tensor_batch[name] for part in parts]) for name in first.non_tensor_batch},
            meta,
        )

    def make_iterator(
        self: Any, mini_batch_size: int, epochs: int = 1, seed: int | None = None, shuffle: bool | None = None
    ) -> Iterator[DataProto]:
        """Mini-batches over `epochs` passes, shuffled per epoch where a seed is given. The size must divide."""
        if mini_batch_size < 1 or len(self) % mini_batch_size:
            raise BatchError(message("mini_batch_size", expected=f"a divisor of {len(self)}", found=mini_batch_size))
        generator = torch.Generator().manual_seed(seed if seed is not None else 0)
        shuffled = seed is not None if shuffle is None else shuffle
        for _ in range(epochs):
            order = torch.randperm(len(self), generator=generator) if shuffled else torch.arange(len(self))
            for rows in order.split(mini_batch_size):
                yield self.select_idxs(rows)

    def pad_to_divisor(self: Any, divisor: int) -> tuple[DataProto, int]:
        """(the batch with rows cycled from the start until `divisor` divides it, how many were added)."""
        if divisor < 1 or not len(self):
            raise SettingError(message("pad_to_divisor", expected="a divisor ≥ 1 and some rows", found=divisor))
        added = -len(self) % divisor
        return (self.select_idxs([row % len(self) for row in range(len(self) + added)]) if added else self), added

    def unpad(self: Any, pad: int) -> DataProto:
        """Without the last `pad` rows."""
        return self.slice(0, len(self) - pad) if pad else self

    # --- elsewhere --------------------------------------------------------------------------

    def to(self: Any, device: Any) -> DataProto:
        """Tensors on a device; columns that are there already are shared."""
        return self._new({name: self._batch[name].to(device) for name in self._batch}, self._objects.raw())

    def to_tensordict(self: Any) -> Any:
        """A TensorDict: tensors, objects as NonTensorStack, meta as NonTensorData."""
        from tensordict import NonTensorData, NonTensorStack, TensorDict

        taken = [name for name in self._meta if name in self]
        if taken:
            raise BatchError(message("meta_info and columns share names", found=", ".join(taken)))
        data = TensorDict({name: self._batch[name] for name in self._batch}, batch_size=[len(self)])
        for name in self._objects:
            data[name] = NonTensorStack(*(NonTensorData(value) for value in self._objects[name]))
        for name, value in self._meta.items():
            data[name] = NonTensorData(value, batch_size=[len(self)])
        return data

    @classmethod
    def from_tensordict(cls, data: Any) -> DataProto:
        """The reverse of `to_tensordict`."""
        from tensordict import NonTensorData, NonTensorStack

        tensors: dict[str, Any] = {}
        objects: dict[str, Any] = {}
        meta: dict[str, Any] = {}
        for name in data.keys():  # noqa: SIM118 - a TensorDict iterates over its rows
            value = data.get(name)
            if isinstance(value, torch.Tensor):
                tensors[name] = value
            elif isinstance(value, NonTensorStack):
                objects[name] = [item.data for item in value.unbind(0)]
            elif isinstance(value, NonTensorData):
                meta[name] = value.data
            else:
                raise BatchError(message(f"entry {name!r} of the TensorDict", expected="a leaf", found=type(value)))
        return cast("Any", cls)(tensors, objects, meta)

    def to_pandas(self: Any) -> pd.DataFrame:
        """One line per row: numbers and objects as they are, longer tensors as lists.

        [B, T] response columns lose their padding where `response_mask` is there to say what that is.
        """
        import pandas as pd

        mask = self._batch["response_mask"].bool() if "response_mask" in self._batch else None
        columns: dict[str, Any] = {}
        for name in self._batch:
            tensor = self._batch[name].detach().cpu()
            if tensor.dim() == 1:
                columns[name] = tensor.tolist()
            elif mask is not None and tensor.shape == mask.shape and name != "response_mask":
                columns[name] = [row[: _length(keep)].tolist() for row, keep in zip(tensor, mask, strict=True)]
            else:
                columns[name] = [row.tolist() for row in tensor]
        columns.update({name: list(self._objects[name]) for name in self._objects})
        return pd.DataFrame(columns)


def _length(mask: torch.Tensor) -> int:
    """Up to the last 1 of a row's mask."""
    ones = mask.nonzero()
    return int(ones[-1]) + 1 if len(ones) else 0


def _new_only(batch: Any, columns: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in columns.items() if name not in batch}


def _stage(batch: DataProto, name: str) -> str:
    made = batch.origins.get(name)
    return repr(made.stage) if made else "somebody unnamed"


def same_column(a: Any, b: Any) -> bool:
    """Equal values, NaN equal to NaN."""
    if a is b:
        return True
    if isinstance(a, torch.Tensor) != isinstance(b, torch.Tensor):
        return False
    if isinstance(a, torch.Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        return bool(torch.equal(a, b) or (a.is_floating_point() and torch.allclose(a, b, 0, 0, equal_nan=True)))
    return len(a) == len(b) and all(same_object(x, y) for x, y in zip(a, b, strict=True))


def same_object(a: Any, b: Any) -> bool:
    """Deep equality over dicts, lists, arrays and tensors, NaN equal to NaN."""
    if a is b:
        return True
    if isinstance(a, torch.Tensor | np.ndarray) or isinstance(b, torch.Tensor | np.ndarray):
        return (
            type(a) is type(b) and same_column(torch.as_tensor(a), torch.as_tensor(b))
            if not _is_objects(a)
            else (_is_objects(b) and len(a) == len(b) and all(same_object(x, y) for x, y in zip(a, b, strict=True)))
        )
    if isinstance(a, float) and isinstance(b, float) and a != a and b != b:
        return True
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(same_object(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and type(a) is type(b):
        return len(a) == len(b) and all(same_object(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def _is_objects(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype == object
