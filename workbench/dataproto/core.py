"""`DataProto`, the batch that stages read and write: an immutable value that shares its tensors, with verl's method names."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor

from workbench.base.distribution import optional
from workbench.base.errors import BatchError, SettingError, UnionConflict, describe, message
from workbench.base.shown import Shown
from workbench.dataproto import io
from workbench.dataproto.value import Origin, Value, apart, check_letters, missing, same

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class DataProtoItem:
    """One row of a batch: its tensors without the first dim, and its objects unchanged."""

    batch: Mapping[str, torch.Tensor]
    non_tensor_batch: Mapping[str, Any]
    meta_info: Mapping[str, Any]


def sent(tensor: torch.Tensor, device: Any) -> torch.Tensor:
    """Return the tensor on a device. A copy from the CPU does not wait for the device's work; to a GPU it goes through
    pinned memory.
    """
    kind = torch.device(device).type
    if not tensor.is_cpu or kind == "cpu":
        return tensor.to(device)
    return (tensor.pin_memory() if kind == "cuda" else tensor).to(device, non_blocking=True)


class DataProto(Value, Shown):
    """A batch of B rows: `batch` (tensors), `non_tensor_batch` (one object per row), `meta_info`.

    It has the method names and results of verl's `DataProto`, with these differences: every method returns
    a new value and changes nothing in place; `meta_info` is never shared; lengths are checked for tensors
    and objects alike; known columns (`workbench.COLUMNS`) are checked for dtype and dims, and a shape letter (B, S, T)
    has one size; `origins` says which stage wrote each column.

    Raises `ColumnInvalid` where a column does not fit.
    """

    def __getitem__(self, key: Any) -> Any:
        """Return a column by name, a row by number, or rows by slice, list, array or tensor (numbers or a mask).

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
            raise AttributeError(f"a batch has no attribute {name!r}")
        return self[name]

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *(name for name in self.columns if name.isidentifier())]

    def __iter__(self) -> Iterator[DataProtoItem]:
        return (self._item(row) for row in range(self._rows))

    def _item(self, row: int) -> DataProtoItem:
        if not -self._rows <= row < self._rows:
            raise IndexError(message("row number of a batch", expected=f"below {self._rows}", found=row))
        return DataProtoItem(*self._each(lambda column: column[row]), self.meta_info)

    def _each(self, tensors: Callable[[Any], Any], objects: Callable[[Any], Any] | None = None) -> tuple[Any, Any]:
        """Call `tensors` on every tensor column and `objects` (by default the same function) on every object column;
        returns both dicts.
        """
        objects = tensors if objects is None else objects
        return (
            {name: tensors(self._batch[name]) for name in self._batch},
            {name: objects(self._objects[name]) for name in self._objects},
        )

    # --- construction -----------------------------------------------------------------------

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, torch.Tensor] | None = None,
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ) -> Self:
        """Make a batch from tensors and objects. Unlike in verl, lengths of objects are checked too."""
        return cls(tensors, non_tensors, meta_info)

    @classmethod
    def from_single_dict(cls, data: Mapping[str, Any], meta_info: Mapping[str, Any] | None = None) -> Self:
        """Make a batch from one dict: tensors go to `batch`, everything else (lists too, unlike in verl) to objects."""
        return cls(*apart(data), meta_info)

    # --- columns ----------------------------------------------------------------------------

    def select(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
    ) -> Self:
        """Return a batch with some of the columns. None keeps all columns of a kind; `batch_keys` may name objects as
        well, and given alone drops all others. Raises `ColumnMissing` for a missing name (verl drops missing objects
        silently).
        """
        wanted = list(self._batch if batch_keys is None else batch_keys)
        if non_tensor_batch_keys is not None:
            wanted += non_tensor_batch_keys
        elif batch_keys is None:
            wanted += self._objects
        for name in wanted:
            if name not in self:
                raise missing(name, self.columns)
        raw, meta = self._raw(), self._meta
        if meta_info_keys is not None:
            absent = [name for name in meta_info_keys if name not in meta]
            if absent:
                raise BatchError(f"meta_info has no {absent}", found=f"the keys {', '.join(meta) or '(none)'}")
            meta = {name: meta[name] for name in meta_info_keys}
        return self._new({name: raw[name] for name in wanted}, meta=meta)

    def pop(
        self,
        batch_keys: Sequence[str] = (),
        non_tensor_batch_keys: Sequence[str] = (),
        meta_info_keys: Sequence[str] = (),
    ) -> tuple[Self, Self]:
        """Return (a batch of the named columns, a batch of the rest). verl's method pops in place and returns only the
        first.
        """
        taken = self.select(list(batch_keys), list(non_tensor_batch_keys), list(meta_info_keys))
        rest = self.without(*batch_keys, *non_tensor_batch_keys)
        meta = {name: value for name, value in self._meta.items() if name not in meta_info_keys}
        return taken, rest._new(rest._raw(), meta=meta)

    def rename(self, old_keys: str | Sequence[str], new_keys: str | Sequence[str]) -> Self:
        """Return the batch with columns under other names, tensors and objects alike (verl renames only tensors, in
        place).
        """
        old = [old_keys] if isinstance(old_keys, str) else list(old_keys)
        new = [new_keys] if isinstance(new_keys, str) else list(new_keys)
        if len(old) != len(new):
            raise BatchError("new_keys of rename", expected=f"{len(old)} new names", found=len(new))
        columns = {to: self[name] for name, to in zip(old, new, strict=True)}
        origins = {to: self._origins[name] for name, to in zip(old, new, strict=True) if name in self._origins}
        kept = self.without(*old)
        clash = [name for name in columns if name in kept]
        if clash:
            raise BatchError("rename would overwrite columns", found=", ".join(clash), do="drop them first: without(…)")
        renamed = kept.with_columns(columns)
        return renamed._new(renamed._raw(), origins={**renamed._origins, **origins})

    def union(self, other: DataProto) -> Self:
        """Return a batch with the columns and `meta_info` of both batches. Shared ones must agree; NaN equals NaN
        (unlike in verl).

        Raises `UnionConflict` where a shared column or meta item differs, `BatchError` where the numbers of rows
        differ.
        """
        if len(self.columns) and len(other.columns) and len(self) != len(other):
            raise BatchError("rows of the other batch in union", expected=f"{len(self)} rows", found=len(other))
        for name in self.columns:
            if name in other and not same(self[name], other[name]):
                writers = f"written by {_stage(self, name)} and by {_stage(other, name)}"
                do = "drop or rename one: without(…), rename(…)"
                raise UnionConflict(f"column {name!r} differs between the batches of union", found=writers, do=do)
        for key, value in other.meta_info.items():
            if key in self._meta and not same(self._meta[key], value):
                writers = f"{describe(self._meta[key])} and {describe(value)}"
                raise UnionConflict(f"meta_info {key!r} differs between the batches of union", found=writers)
        columns = {**self._raw(), **other._raw(), **self._raw()}  # its own first, and where both have one
        meta, origins = {**self._meta, **other.meta_info}, {**other.origins, **self._origins}
        joined = self._new(columns, meta=meta, origins=origins)
        check_letters(joined._batch.raw())
        return joined

    # --- rows -------------------------------------------------------------------------------

    def select_idxs(self, idxs: Any) -> Self:
        """Return a batch of the rows with these numbers (repeats allowed), or of a mask of B bools: a list, array or
        tensor.
        """
        index = idxs if isinstance(idxs, torch.Tensor) else torch.as_tensor(np.asarray(idxs))
        if index.numel() == 0:
            index = index.long()
        if index.dim() != 1 or index.dtype.is_floating_point or index.dtype.is_complex:
            raise BatchError("rows to select", expected="a list of row numbers or a mask", found=describe(idxs))
        if index.dtype == torch.bool:
            if len(index) != len(self):
                raise BatchError("length of a mask of rows", expected=f"{len(self)} bools", found=len(index))
            index = index.nonzero().squeeze(-1)
        if index.numel() and not (-len(self) <= int(index.min()) and int(index.max()) < len(self)):
            bounds = f"at least {-len(self)} and below {len(self)}"
            raise IndexError(message("row numbers to select", expected=bounds, found=describe(idxs)))
        index = index.long() % max(len(self), 1)
        numbers = index.numpy()
        return self._new(*self._each(lambda tensor: tensor[index.to(tensor.device)], lambda cells: cells[numbers]))

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> Self:
        """Return the rows `data[start:end:step]` as a batch; its tensors are views of this batch's, unless `step` is
        negative.
        """
        where = slice(start, end, step)
        if step is not None and step < 0:
            return self.select_idxs(list(range(len(self)))[where])
        return self._new(*self._each(lambda column: column[where]))

    def reorder(self, indices: torch.Tensor) -> Self:
        """Return the batch with its rows in the order of `indices` (verl reorders in place and returns nothing)."""
        if sorted(torch.as_tensor(indices).tolist()) != list(range(len(self))):
            raise BatchError("indices of reorder", expected=f"each of {len(self)} rows once", found=describe(indices))
        return self.select_idxs(indices)

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> Self:
        """Repeat every row `repeat_times` times: rows a, b become a a b b, or a b a b with `interleave=False`."""
        rows = torch.arange(len(self))
        return self.select_idxs(rows.repeat_interleave(repeat_times) if interleave else rows.repeat(repeat_times))

    def sample_level_repeat(self, repeat_times: Any) -> Self:
        """Repeat row i `repeat_times[i]` times."""
        times = torch.as_tensor(np.asarray(repeat_times)).long()
        if len(times) != len(self):
            raise BatchError("length of repeat_times", expected=f"{len(self)}, one per row", found=len(times))
        return self.select_idxs(torch.arange(len(self)).repeat_interleave(times))

    def unfold_column_chunks(self, n_split: int, split_keys: Sequence[str] | None = None) -> Self:
        """Make `n_split` rows of each row, with the columns in `split_keys` cut along their second dim: [B, n·k, …]
        becomes [B·n, k, …].

        All other columns are repeated, as a a b b. An object in a cut column must be a list, of which each row gets a
        part. Raises `BatchError` for a column whose second dim `n_split` does not divide.
        """
        if n_split < 1:
            raise BatchError("n_split of unfold_column_chunks", expected="≥ 1", found=n_split)
        cut = {name: _cut(name, self[name], n_split) for name in split_keys or ()}
        return self.without(*cut).repeat(n_split).with_columns(cut)

    def chunk(self, chunks: int) -> list[Self]:
        """Cut the rows into `chunks` equal batches. Raises `BatchError` where that is impossible: pad first, or use
        `split`.
        """
        if chunks < 1 or len(self) % chunks:
            do = f"pad_to_divisor({chunks}) first, or split(size) for a shorter last part"
            raise BatchError(f"{len(self)} rows cannot be cut into {chunks} equal chunks", do=do)
        return self.split(max(len(self) // chunks, 1))

    def split(self, split_size: int) -> list[Self]:
        """Cut the rows into batches of `split_size`; the last may be shorter."""
        if split_size < 1:
            raise BatchError("split_size of split", expected="≥ 1", found=split_size)
        return [self.slice(start, start + split_size) for start in range(0, len(self), split_size)]

    @staticmethod
    def concat(parts: Sequence[DataProto]) -> DataProto:
        """Join batches into one with the rows of all. They must have equal columns, and equal values in shared
        `meta_info` keys.

        verl flattens the meta key `metrics`; here metrics are not part of a batch.
        """
        if not parts:
            raise BatchError("parts of concat", expected="at least one batch", found="none")
        first = parts[0]
        meta = dict(first.meta_info)
        for number, part in enumerate(parts):
            if set(part.columns) != set(first.columns):
                odd = sorted(set(part.columns) ^ set(first.columns))
                raise BatchError(f"part {number} has other columns than part 0", found=f"only in one: {', '.join(odd)}")
            for key, value in part.meta_info.items():
                if key in meta and not same(meta[key], value):
                    found = f"{describe(value)}, and in the earlier part {describe(meta[key])}"
                    what = f"meta_info {key!r} of part {number} differs from that of an earlier part"
                    raise UnionConflict(what, found=found)
                meta[key] = value
        return first._new(
            {name: torch.cat([part.batch[name] for part in parts]) for name in first.batch},
            {name: np.concatenate([part.non_tensor_batch[name] for part in parts]) for name in first.non_tensor_batch},
            meta=meta,
        )

    def make_iterator(
        self, mini_batch_size: int, epochs: int = 1, seed: int | None = None, shuffle: bool | None = None
    ) -> Iterator[Self]:
        """Yield mini-batches over `epochs` passes, shuffled anew in each pass if a seed is given. The size must divide
        the number of rows.
        """
        if mini_batch_size < 1 or len(self) % mini_batch_size:
            raise BatchError("mini_batch_size", expected=f"a divisor of the {len(self)} rows", found=mini_batch_size)
        generator = torch.Generator().manual_seed(seed if seed is not None else 0)
        shuffled = seed is not None if shuffle is None else shuffle
        for _ in range(epochs):
            order = torch.randperm(len(self), generator=generator) if shuffled else torch.arange(len(self))
            for rows in order.split(mini_batch_size):
                yield self.select_idxs(rows)

    def pad_to_divisor(self, divisor: int) -> tuple[Self, int]:
        """Return (the batch with rows repeated from the start until `divisor` divides their number, how many were
        added).
        """
        if divisor < 1 or not len(self):
            found = f"divisor {divisor} and {len(self)} rows"
            raise SettingError("pad_to_divisor", expected="a divisor ≥ 1 and at least one row", found=found)
        added = -len(self) % divisor
        return (self.select_idxs([row % len(self) for row in range(len(self) + added)]) if added else self), added

    def unpad(self, pad: int) -> Self:
        """Return the batch without its last `pad` rows."""
        return self.slice(0, len(self) - pad) if pad else self

    # --- elsewhere --------------------------------------------------------------------------

    def to(self, device: Any) -> Self:
        """Return the batch with its tensors on a device; tensors that are there already are shared."""
        return self._new({name: sent(self._batch[name], device) for name in self._batch}, self._objects.raw())

    def to_tensordict(self) -> Any:
        """Return the batch as a TensorDict: tensors, objects as `NonTensorStack`, `meta_info` as `NonTensorData`."""
        with optional("verl", "to_tensordict"):
            from tensordict import NonTensorData, NonTensorStack, TensorDict

        taken = [name for name in self._meta if name in self]
        if taken:
            raise BatchError("to_tensordict: meta_info and columns share names", found=", ".join(taken))
        data = TensorDict({name: self._batch[name] for name in self._batch}, batch_size=[len(self)])
        for name in self._objects:
            data[name] = NonTensorStack(*(NonTensorData(value) for value in self._objects[name]))
        for name, value in self._meta.items():
            data[name] = NonTensorData(value, batch_size=[len(self)])
        return data

    @classmethod
    def from_tensordict(cls, data: Any) -> Self:
        """Make a batch from what `to_tensordict` returns. Raises `BatchError` for nested entries."""
        with optional("verl", "from_tensordict"):
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
                raise BatchError(f"entry {name!r} of the TensorDict", expected="a tensor or objects", found=type(value))
        return cls(tensors, objects, meta)

    def to_pandas(self) -> pd.DataFrame:
        """Return the batch as a DataFrame with one line per row; tensors of more than one dim become lists.

        [B, T] response columns lose their padding where `response_mask` is there to tell it apart.
        """
        import pandas as pd

        mask = self._batch["response_mask"].bool() if "response_mask" in self._batch else None
        columns: dict[str, Any] = {}
        for name in self._batch:
            tensor = self._batch[name].detach().cpu()
            if mask is not None and tensor.shape == mask.shape and name != "response_mask":
                columns[name] = [row[: _length(keep)].tolist() for row, keep in zip(tensor, mask, strict=True)]
            else:
                columns[name] = tensor.tolist()
        return pd.DataFrame(columns | {name: list(self._objects[name]) for name in self._objects})

    def mutable(self) -> MutableDataProto:
        """Return a copy that may be changed in place, as code written for verl's `DataProto` does; this batch stays as it is."""
        return MutableDataProto(*self._each(torch.Tensor.clone, copy.deepcopy), copy.deepcopy(self._meta))

    # --- travel ---------------------------------------------------------------------------

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle cheaply for Ray: columns as NumPy views, out of band in protocol 5, without storage beyond the batch's
        rows.
        """
        return _rebuild, (*self._each(_portable, lambda cells: cells), self._meta, self._origins)

    def __deepcopy__(self, memo: dict[int, Any]) -> DataProto:
        copied = self._each(torch.Tensor.clone, lambda cells: copy.deepcopy(cells, memo))
        return DataProto(*copied, self._meta, origins=self._origins)

    def __copy__(self) -> DataProto:
        return self._new(self._raw())

    def save(self, path: str | Path) -> Path:
        """Save in a new folder (safetensors, parquet, JSON) and return its path. Raises `BatchError` if it exists."""
        return io.save(self, path)

    @staticmethod
    def load(path: str | Path) -> DataProto:
        """Open a batch that `save` wrote; a column is read at its first use. Raises `BatchError` if `path` holds none."""
        new = object.__new__(DataProto)
        new._set(*io.load(path))
        return new


def _cut(name: str, values: Any, parts: int) -> Any:
    """Cut a column's second dim, or its lists, into `parts` equal parts, each of which becomes a row."""
    tensor = isinstance(values, torch.Tensor)
    widths = set(values.shape[1:2]) if tensor else {len(row) for row in values}
    if not widths or any(width % parts for width in widths):
        found = ", ".join(map(str, sorted(widths))) or "no second dim"
        raise BatchError(f"second dim of column {name!r}", expected=f"a multiple of {parts}", found=found)
    if tensor:
        return values.reshape(len(values) * parts, values.shape[1] // parts, *values.shape[2:])
    sizes = [(row, len(row) // parts) for row in values]
    return [row[part * size : (part + 1) * size] for row, size in sizes for part in range(parts)]


def _length(mask: torch.Tensor) -> int:
    """Return the number of tokens up to the last 1 of a row's mask."""
    ones = mask.nonzero()
    return int(ones[-1]) + 1 if len(ones) else 0


def _stage(batch: DataProto, name: str) -> str:
    made = batch.origins.get(name)
    return repr(made.stage) if made else "an unknown stage"


def _portable(tensor: torch.Tensor) -> Any:
    """Return a NumPy view of a tensor where NumPy has the dtype (it is pickled out of band), else a compact tensor."""
    tensor = tensor.detach().cpu()
    if tensor.dtype in (torch.bfloat16,) or tensor.is_complex():
        return tensor.clone()
    return np.ascontiguousarray(tensor.numpy())


def _rebuild(
    tensors: dict[str, Any], objects: dict[str, Any], meta: dict[str, Any], origins: dict[str, Origin]
) -> DataProto:
    def tensor(value: Any) -> torch.Tensor:
        # arrays from shared memory are read-only, and a tensor over them would be a writable alias
        if isinstance(value, torch.Tensor):
            return value
        return torch.from_numpy(value if value.flags.writeable else value.copy())

    new = object.__new__(DataProto)
    new._set({name: tensor(value) for name, value in tensors.items()}, objects, meta, origins)
    return new


@dataclass
class MutableDataProto:
    """A batch that may be changed in place, as in verl: three plain dicts. It has a length, and rows by number."""

    batch: dict[str, torch.Tensor]
    non_tensor_batch: dict[str, np.ndarray]
    meta_info: dict[str, Any]

    def __len__(self) -> int:
        columns: list[Any] = [*self.batch.values(), *self.non_tensor_batch.values()]
        return len(columns[0]) if columns else 0

    def __getitem__(self, row: int) -> DataProtoItem:
        if not -len(self) <= row < len(self):
            raise IndexError(message("row number of a batch", expected=f"below {len(self)}", found=row))
        tensors = {name: tensor[row] for name, tensor in self.batch.items()}
        objects = {name: cells[row] for name, cells in self.non_tensor_batch.items()}
        return DataProtoItem(tensors, objects, self.meta_info)


# --- episodes that are several sequences: rows with one `uid` and one value of `session` ------------

SESSION = "session"
"""The column of episode numbers, in batches where an episode is more than one row."""
POLICY = "policy"
"""The column with the name of the policy whose tokens a row holds, in batches where several policies take part in an
episode."""


def last_rows(batch: DataProto, column: str | None = SESSION) -> Tensor:
    """Return for each row the number of its episode's last row: [B] int64. Without the column each row is an episode."""
    if column is None or column not in batch:
        return torch.arange(len(batch))
    uids = batch["uid"] if "uid" in batch else [None] * len(batch)
    names = list(zip(uids, batch[column], strict=True))
    last = {name: row for row, name in enumerate(names)}
    return torch.tensor([last[name] for name in names], dtype=torch.long)


def is_last(batch: DataProto) -> Tensor:
    """Return [B] bool: True on the last row of each episode, which stands for the episode where episodes are counted."""
    return last_rows(batch) == torch.arange(len(batch))


def episodes(batch: DataProto) -> list[list[int]]:
    """Return the row numbers of each episode, in the order of the episodes' first rows."""
    members: dict[int, list[int]] = {}
    for row, last in enumerate(last_rows(batch).tolist()):
        members.setdefault(last, []).append(row)
    return list(members.values())


def sequence_of(batch: DataProto, row: int) -> tuple[int, list[int]] | None:
    """Return (number of a row's episode, rows of that episode in order); None in a batch where each row is an episode."""
    if SESSION not in batch:
        return None
    return next((number, rows) for number, rows in enumerate(episodes(batch)) if row in rows)


def row_name(batch: DataProto, row: int) -> str:
    """Name a row for people: `row 7`, or `row 7 (episode 3, sequence 2 of 3)`."""
    sequence = sequence_of(batch, row)
    if sequence is None:
        return f"row {row}"
    number, rows = sequence
    return f"row {row} (episode {number}, sequence {rows.index(row) + 1} of {len(rows)})"


def of_first_policy(batch: DataProto) -> DataProto:
    """Return the rows of the policy that `meta_info` names as the first; all rows where there is only one policy."""
    if POLICY not in batch:
        return batch
    return batch.select_idxs([row for row, name in enumerate(batch[POLICY]) if name == batch.meta_info.get(POLICY)])


def alike(parts: Sequence[DataProto]) -> list[DataProto]:
    """Prepare batches for `concat`: if one has the column `session`, all get it; rows without one become episodes of
    one row.
    """
    if not any(SESSION in part for part in parts):
        return list(parts)
    return [part if SESSION in part else part.with_columns({SESSION: list(range(len(part)))}) for part in parts]
