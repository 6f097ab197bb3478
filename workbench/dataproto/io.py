"""Saves and loads batches: safetensors for tensors, parquet for objects, JSON for the rest; never pickle.

Object columns are stored as arrow where every cell is of one plain type, else as tagged JSON per cell; other objects are
refused. Of cells that are dicts of tensors each different tensor is stored once, as safetensors. Classes such as rewards'
`Score` have a registered codec. Loading reads only `meta.json`, which has checksums of all; a column is read, memory-mapped,
and compared with them at its first use.
"""

from __future__ import annotations

import json
import math
import shutil
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from workbench.base.errors import BatchError, describe
from workbench.base.files import check_file, record_of, sealed
from workbench.base.formats import FORMAT, check_format
from workbench.dataproto import claims
from workbench.dataproto.value import Lazy, Origin, Value, as_objects

TENSORS, OBJECTS, INNER = "tensors.safetensors", "objects.parquet", "inner.safetensors"
_TAG = "__workbench__"
_GROUP = 512
_BLOCK = 512
"""Rows of a tensor that have a checksum."""

_CODECS: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {}
"""Tag → class, encode, decode."""


def register_codec(tag: str, kind: type, encode: Callable[[Any], Any], decode: Callable[[Any], Any]) -> None:
    """Make objects of class `kind` savable in batches: `encode` turns one into plain values, `decode` turns these back."""
    _CODECS[tag] = kind, encode, decode


# --- cells --------------------------------------------------------------------------------------


def encode(value: Any) -> Any:
    """An object as JSON values, with tags for arrays, tuples, infinities and registered classes; `TypeError` for others."""
    if value is None or isinstance(value, bool | str) or type(value) is int:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {_TAG: "float", "value": repr(value)}
    if isinstance(value, np.generic):
        return {_TAG: "numpy", "dtype": value.dtype.str, "value": encode(value.item())}
    if isinstance(value, np.ndarray):
        items = encode(value.reshape(-1).tolist())
        return {_TAG: "array", "dtype": value.dtype.str, "shape": list(value.shape), "value": items}
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, tuple):
        return {_TAG: "tuple", "value": encode(list(value))}
    if isinstance(value, dict):
        return _encoded_dict(value)
    tag = next((tag for tag, (kind, *_) in _CODECS.items() if isinstance(value, kind)), None)
    if tag is None:
        raise TypeError(f"no codec is registered for class {type(value).__name__}")
    return {_TAG: tag, "value": encode(_CODECS[tag][1](value))}


def _encoded_dict(value: dict[Any, Any]) -> dict[str, Any]:
    if all(isinstance(key, str) for key in value) and _TAG not in value:
        return {key: encode(item) for key, item in value.items()}
    return {_TAG: "dict", "value": [[encode(key), encode(item)] for key, item in value.items()]}


def decode(value: Any) -> Any:
    """The object that `encode` turned into these JSON values. Raises `BatchError` for an unknown tag."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    return _untagged({key: decode(item) for key, item in value.items()}) if isinstance(value, dict) else value


def _untagged(value: dict[str, Any]) -> Any:
    """The object of a tagged record, whose values are decoded already."""
    tag = value.get(_TAG)
    if tag is None:
        return value
    inner = value["value"]
    if tag == "float":
        return float(inner)
    if tag == "numpy":
        return np.dtype(value["dtype"]).type(inner)
    if tag == "array":
        flat = np.empty(len(inner), dtype=_dtype_of_cell(value["dtype"], inner))
        flat[:] = inner
        return flat.reshape(value["shape"])
    if tag == "tuple":
        return tuple(inner)
    if tag == "dict":
        return dict(map(tuple, inner))
    if tag not in _CODECS:
        raise BatchError(f"a saved object has the unknown tag {tag!r}", expected=f"one of {', '.join(_CODECS)}")
    return _CODECS[tag][2](inner)


def _dtype_of_cell(text: Any, inner: list[Any]) -> np.dtype[Any]:
    """An array's dtype; of texts one no wider than they are, because a file can claim gigabytes for each."""
    dtype = np.dtype(text)
    if dtype.kind == "V":
        raise BatchError("dtype of a saved array", expected="plain numbers, texts or objects", found=describe(text))
    widest = max((len(item) for item in inner), default=1) if dtype.kind in "US" else 0
    return np.dtype(f"{dtype.kind}{max(widest, 1)}") if dtype.itemsize > 64 + 4 * widest else dtype


def _plain_type(values: np.ndarray) -> bool:
    """Whether arrow stores it exactly: all str, all int, all bool, or all finite float."""
    kinds = {type(value) for value in values}
    if kinds == {int}:
        return all(-(2**63) <= value < 2**63 for value in values)
    if kinds == {str}:
        return all(value.isprintable() or value.encode("utf-8", "replace").decode() == value for value in values)
    return kinds in ({bool}, {float})


# --- folders ------------------------------------------------------------------------------------


def save(batch: Value, path: str | Path) -> Path:
    """Save a batch in a new folder, whole or not at all. Raises `BatchError` where it exists or a cell cannot be saved."""
    from safetensors.torch import save_file

    folder = Path(path)
    if folder.exists():
        raise BatchError(f"{folder} exists, and a saved batch is never overwritten", do="save in a new folder")
    staging = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        tensors = {name: batch.batch[name].detach().cpu().contiguous() for name in batch.batch}
        kinds = _write_objects(batch, staging)
        # safetensors refuses tensors that share storage: expanded views get their own
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, str(staging / TENSORS))
        document = {
            "format": FORMAT,
            "rows": len(batch),
            "tensors": {name: [str(tensor.dtype), list(tensor.shape)] for name, tensor in tensors.items()},
            "objects": kinds,
            "meta_info": _encoded("meta_info", dict(batch.meta_info), "leave it out of meta_info"),
            "origins": {name: _kept(made) for name, made in batch.origins.items()},
            "blocks": {name: [_crc32(part) for part in tensor.split(_BLOCK)] for name, tensor in tensors.items()},
            "files": {name: record_of(staging / name) for name in (OBJECTS, INNER) if (staging / name).is_file()},
        }
        text = json.dumps(document, allow_nan=False)
        claims.check_text(text)
        (staging / "meta.json").write_text(sealed(text))
        staging.rename(folder)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    return folder


def _encoded(what: str, value: Any, do: str) -> Any:
    try:
        return encode(value)
    except TypeError as cause:
        expected = "plain values, NumPy arrays, or classes with a registered codec"
        raise BatchError(f"{what} cannot be saved", expected=expected, found=cause, do=do) from cause


def _tensor_cells(values: np.ndarray) -> bool:
    """Whether all cells are dicts of tensors by name, and one is not empty."""
    whole = all(type(one) is dict and all(map(_named_tensor, one.items())) for one in values)
    return whole and any(map(len, values))


def _named_tensor(item: tuple[Any, Any]) -> bool:
    return isinstance(item[0], str) and isinstance(item[1], torch.Tensor)


def _apart(name: str, values: np.ndarray, inner: dict[str, torch.Tensor]) -> list[str]:
    """Cells of tensors as JSON with the places of the tensors, which are put into `inner`: each different one once."""
    places: dict[int, str] = {}
    for cell in values:
        for tensor in cell.values():
            if id(tensor) not in places:
                places[id(tensor)] = f"{name}/{len(places)}"
                inner[places[id(tensor)]] = tensor.detach().cpu().contiguous().clone()
    return [json.dumps({key: places[id(one)] for key, one in cell.items()}) for cell in values]


def _together(file: Path, cells: list[dict[str, str]]) -> list[dict[str, torch.Tensor]]:
    """The cells that `_apart` took apart; those that shared a tensor share it again."""
    from safetensors import safe_open

    wanted = {place for cell in cells for place in cell.values()}
    with claims.reading(file), safe_open(str(file), framework="pt") as stored:
        sizes = [8 * math.prod(stored.get_slice(place).get_shape()) for place in wanted]
        claims.check_room(sum(sizes), "a column of tensors")
        found = {place: stored.get_tensor(place) for place in wanted}
    return [{key: found[place] for key, place in cell.items()} for cell in cells]


def _write_objects(batch: Value, folder: Path) -> dict[str, str]:
    import pyarrow as pa
    import pyarrow.parquet as pq
    from safetensors.torch import save_file

    kinds: dict[str, str] = {}
    inner: dict[str, torch.Tensor] = {}
    columns: dict[str, Any] = {}
    for name in batch.non_tensor_batch:
        values = batch.non_tensor_batch[name]
        kinds[name] = "arrow" if _plain_type(values) else "json"
        if kinds[name] == "arrow":
            columns[name] = pa.array(list(values))
            continue
        if _tensor_cells(values):
            kinds[name], columns[name] = "tensors", pa.array(_apart(name, values, inner), type=pa.string())
            continue
        what, do = f"column {name!r}", f"drop the column first: without({name!r})"
        cells = [json.dumps(_encoded(what, value, do), allow_nan=False) for value in values]
        claims.check_depth(*cells)
        columns[name] = pa.array(cells, type=pa.string())
    if inner:
        save_file(inner, str(folder / INNER))
    if columns:
        # small groups, so that reading a few rows does not decode many
        made, path = pa.table(columns), folder / OBJECTS
        pq.write_table(made, path, row_group_size=_GROUP)
        if max(made.column(name).nbytes for name in columns) > claims.budget_of(path):
            # cells that repeat shrink so far that loading would take the file for a bomb: they are stored uncompressed
            pq.write_table(made, path, row_group_size=_GROUP, use_dictionary=False, compression="none")
    return kinds


def load(path: str | Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Origin]]:
    """Open a saved batch: (tensors, objects, `meta_info`, origins), whose columns are `Lazy`. Raises `BatchError` where the
    folder holds none, or one of another format."""
    folder = Path(path)
    if not (folder / "meta.json").is_file():
        raise BatchError(f"no saved batch at {folder}", expected="a folder with meta.json")
    meta = claims.inside(folder, "meta.json")
    with claims.reading(meta):
        document = claims.document(meta, strict=True)
        check_format(document.get("format"), f"batch {folder}", BatchError)
        rows, kinds = document["rows"], document["objects"]
        claimed = {name: (tuple(shape), _dtype(kind, folder)) for name, (kind, shape) in document["tensors"].items()}
        claims.check_columns(claimed, kinds, rows)
        facts = dict(decode(document["meta_info"]))
        origins = {name: Origin(**made) for name, made in document["origins"].items()}
        stored = _Stored(folder, document["blocks"], document["files"])
    file, other = claims.inside(folder, TENSORS), claims.inside(folder, OBJECTS)
    if claimed and file.exists():  # a missing file is an error at the first use of one of its columns
        with claims.reading(file):
            claims.check_tensors(file, claimed)
    if kinds and other.exists() and not other.is_file():
        raise BatchError(f"{other} is not a regular file")
    tensors = {name: partial(_Stored.tensor, stored, name) for name in claimed}
    objects = {name: partial(_Stored.objects, stored, name, kind, rows) for name, kind in kinds.items()}
    lazy = {name: Lazy(read, *claimed[name], read) for name, read in tensors.items()}
    lazy_objects = {name: Lazy(read, (rows,), None, read) for name, read in objects.items()}
    return lazy, lazy_objects, facts, origins


def _kept(made: Origin) -> dict[str, Any]:
    return {key: one for key, one in asdict(made).items() if key != "state_id"}


def _dtype(name: str, folder: Path) -> torch.dtype:
    """A torch dtype by its name in a file; no other attribute of torch."""
    found = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise BatchError(f"dtype of a column in batch {folder}", expected="a dtype of torch", found=describe(name))
    return found


def _crc32(part: torch.Tensor) -> int:
    """crc32 of a tensor's bytes."""
    return zlib.crc32(part.contiguous().flatten().view(torch.uint8).numpy().data)


@dataclass
class _Stored:
    """The files of a saved batch, whose content is compared with its checksums when it is first read: of tensors the blocks of
    rows that are read, of the other files all."""

    folder: Path
    blocks: Mapping[str, list[int]] = field(compare=False)
    files: Mapping[str, Mapping[str, int]] = field(compare=False)
    checked: set[tuple[str, int]] = field(default_factory=set, compare=False)
    """(column, number of a block) or (file, 0)."""

    def tensor(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """A column, or the rows from one number to another."""
        from safetensors import safe_open

        path = self.folder / TENSORS
        with claims.reading(path), safe_open(str(path), framework="pt") as file:
            stored = file.get_slice(name)
            shape = stored.get_shape()
            if stop is None:
                claims.check_room(8 * math.prod(shape), f"column {describe(name)}")
            column = file.get_tensor(name) if stop is None else stored
            last = shape[0] if stop is None else min(stop, shape[0])
            for number in range(start // _BLOCK, -(-last // _BLOCK)):
                self._check(name, number, column)
            return column if stop is None else stored[start:stop]

    def _check(self, name: str, number: int, column: Any) -> None:
        """Compare a block of rows with its checksum."""
        if (name, number) in self.checked:
            return
        begin, end = number * _BLOCK, (number + 1) * _BLOCK
        found, expected = _crc32(column[begin:end]), self.blocks[name][number]
        if found != expected:
            what = f"{self.folder / TENSORS}: rows {begin} to {end} of column {describe(name)} have changed since they were written"
            raise BatchError(what, expected=f"crc32 {expected}", found=f"crc32 {found}", do=claims.DAMAGED)
        self.checked.add((name, number))

    def _file(self, name: str) -> Path:
        """The path of a file, once compared with its checksum."""
        path = claims.inside(self.folder, name)
        if (name, 0) not in self.checked:
            check_file(path, self.files[name], str(path), BatchError, claims.DAMAGED)
            self.checked.add((name, 0))
        return path

    def objects(self, name: str, kind: str, count: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """A column of `count` rows, or the rows from one number to another."""
        with claims.reading(self.folder / OBJECTS):
            path = self._file(OBJECTS)
            values = claims.parquet_values(path, name, kind, count, start, count if stop is None else stop)
            if kind != "arrow":  # decoded while it is parsed: ten thousand records in a few hundredths of a second
                claims.check_depth(*values)
                values = [json.loads(text, object_hook=_untagged) for text in values]
            if kind == "tensors":
                values = _together(self._file(INNER), values)
            claims.check_cells(name, values)
            return as_objects(name, values)
