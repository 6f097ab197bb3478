"""A batch on disk: safetensors for tensors, parquet for objects, json for the rest; never pickle.

Object columns are stored as arrow where every cell is of one plain type, else as tagged JSON per cell, else
refused by name. Records of ours (rewards' `Score`) are tagged by a registered codec. Loading reads the table of
contents alone; a column is read, memory-mapped, when somebody looks at it.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from workbench.dataproto import claims
from workbench.dataproto.columns_map import Lazy, as_objects
from workbench.dataproto.core import DataProto, Origin
from workbench.errors import BatchError, describe, message

FORMAT = 1
TENSORS, OBJECTS = "tensors.safetensors", "objects.parquet"
_TAG = "__workbench__"
_GROUP = 512


@dataclass(frozen=True)
class _Codec:
    tag: str
    kind: type
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


_CODECS: dict[str, _Codec] = {}


def register_codec(tag: str, kind: type, encode: Callable[[Any], Any], decode: Callable[[Any], Any]) -> None:
    """Let objects of a class be saved in cells: `encode` gives plain values, `decode` takes them."""
    _CODECS[tag] = _Codec(tag, kind, encode, decode)


# --- cells --------------------------------------------------------------------------------------


def encode(value: Any) -> Any:
    """A cell as JSON values; what JSON cannot say is tagged. Raises `TypeError` for anything else."""
    if value is None or isinstance(value, bool | str) or type(value) is int:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {_TAG: "float", "value": repr(value)}
    if isinstance(value, np.generic):
        return {_TAG: "numpy", "dtype": value.dtype.str, "value": encode(value.item())}
    if isinstance(value, np.ndarray):
        items = [encode(item) for item in value.reshape(-1).tolist()]
        return {_TAG: "array", "dtype": value.dtype.str, "shape": list(value.shape), "value": items}
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, tuple):
        return {_TAG: "tuple", "value": [encode(item) for item in value]}
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value) and _TAG not in value:
            return {key: encode(item) for key, item in value.items()}
        return {_TAG: "dict", "value": [[encode(key), encode(item)] for key, item in value.items()]}
    for codec in _CODECS.values():
        if isinstance(value, codec.kind):
            return {_TAG: codec.tag, "value": encode(codec.encode(value))}
    raise TypeError(type(value).__name__)


def decode(value: Any) -> Any:
    """The reverse of `encode`."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    return _untagged({key: decode(item) for key, item in value.items()})


def _untagged(value: dict[str, Any]) -> Any:
    """What a record stands for, its values decoded already."""
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
        raise BatchError(message(f"a saved cell is of kind {tag!r}", expected=f"one of {', '.join(_CODECS)}"))
    return _CODECS[tag].decode(inner)


def _dtype_of_cell(text: Any, inner: list[Any]) -> np.dtype[Any]:
    """An array's dtype; of texts one that is no wider than they are, for a file can claim gigabytes for each."""
    dtype = np.dtype(text)
    if dtype.kind == "V":
        raise BatchError(message("a saved array", expected="plain numbers, texts or objects", found=describe(text)))
    widest = max((len(item) for item in inner), default=1) if dtype.kind in "US" else 0
    return np.dtype(f"{dtype.kind}{max(widest, 1)}") if dtype.itemsize > 64 + 4 * widest else dtype


def _plain_type(values: np.ndarray) -> bool:
    """Whether arrow stores it exactly: all str, all int, all bool, or all finite float."""
    kinds = {type(value) for value in values}
    if len(kinds) != 1 or next(iter(kinds)) not in (str, int, bool, float):
        return False
    if next(iter(kinds)) is int:
        return all(-(2**63) <= value < 2**63 for value in values)
    if next(iter(kinds)) is str:
        return all(value.isprintable() or value.encode("utf-8", "replace").decode() == value for value in values)
    return True


# --- folders ------------------------------------------------------------------------------------


def save(batch: DataProto, path: str | Path) -> Path:
    """Write a new folder: complete or not there at all. Raises `BatchError` where it exists or a cell cannot be saved."""
    folder = Path(path)
    if folder.exists():
        raise BatchError(message("a saved batch is never overwritten", found=folder))
    staging = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        tensors = {name: batch.batch[name].detach().cpu().contiguous() for name in batch.batch}
        kinds = _write_objects(batch, staging)
        _write_tensors(tensors, staging)
        document = {
            "format": FORMAT,
            "rows": len(batch),
            "tensors": {name: [str(tensor.dtype), list(tensor.shape)] for name, tensor in tensors.items()},
            "objects": kinds,
            "meta_info": encode(dict(batch.meta_info)),
            "origins": {name: asdict(made) for name, made in batch.origins.items()},
        }
        text = json.dumps(document, allow_nan=False)
        claims.check_text(text)
        (staging / "meta.json").write_text(text)
        staging.rename(folder)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    return folder


def _write_tensors(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    from safetensors.torch import save_file

    # tensors that share storage are refused by safetensors: expanded views get their own
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, str(folder / TENSORS))


def _write_objects(batch: DataProto, folder: Path) -> dict[str, str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    kinds: dict[str, str] = {}
    columns: dict[str, Any] = {}
    for name in batch.non_tensor_batch:
        values = batch.non_tensor_batch[name]
        kinds[name] = "arrow" if _plain_type(values) else "json"
        if kinds[name] == "arrow":
            columns[name] = pa.array(list(values))
            continue
        try:
            cells = [json.dumps(encode(value), allow_nan=False) for value in values]
            claims.check_depth(*cells)
            columns[name] = pa.array(cells, type=pa.string())
        except TypeError as cause:
            raise BatchError(
                message(
                    f"column {name!r} cannot be saved",
                    expected="plain values, NumPy, or records with a registered codec",
                    found=f"a {cause}, as in {describe(values[0])}",
                    do=f"drop it first: without({name!r})",
                )
            ) from cause
    if columns:
        # small groups, so that a look at a few rows reads a few rows
        made, path = pa.table(columns), folder / OBJECTS
        pq.write_table(made, path, row_group_size=_GROUP)
        if max(made.column(name).nbytes for name in columns) > claims.budget_of(path):
            # cells that repeat shrink to next to nothing, as a bomb does: they are stored as they are
            pq.write_table(made, path, row_group_size=_GROUP, use_dictionary=False, compression="none")
    return kinds


def load(path: str | Path) -> DataProto:
    """Open a saved batch. Raises `BatchError` where the folder is not one, or of another format."""
    folder = Path(path)
    if not (folder / "meta.json").is_file():
        raise BatchError(message(f"no saved batch at {folder}", expected="a folder with meta.json"))
    meta = claims.inside(folder, "meta.json")
    with claims.reading(meta):
        document = claims.document(meta, strict=True)
        if document["format"] != FORMAT:
            raise BatchError(
                message(f"batch {folder}", expected=f"format {FORMAT}", found=describe(document["format"]))
            )
        rows, objects = document["rows"], document["objects"]
        claimed = {name: (tuple(shape), _dtype(kind, folder)) for name, (kind, shape) in document["tensors"].items()}
        claims.check_columns(claimed, objects, rows)
        origins = {name: Origin(**made) for name, made in document["origins"].items()}
        facts = dict(decode(document["meta_info"]))
    file, other = claims.inside(folder, TENSORS), claims.inside(folder, OBJECTS)
    if claimed and file.exists():  # one that is gone is missed when somebody looks at a column of it
        with claims.reading(file):
            claims.check_tensors(file, claimed)
    if objects and other.exists() and not other.is_file():
        raise BatchError(message(f"{other} is no file"))
    new = object.__new__(DataProto)
    new._set(_lazy_tensors(folder, claimed), _lazy_objects(folder, objects, rows), facts, origins)
    return new


def _lazy_tensors(folder: Path, claimed: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> dict[str, Any]:
    return {
        name: Lazy(partial(_read_tensor, folder, name), shape, dtype, partial(_tensor_rows, folder, name))
        for name, (shape, dtype) in claimed.items()
    }


def _lazy_objects(folder: Path, kinds: dict[str, str], rows: int) -> dict[str, Any]:
    return {
        name: Lazy(
            partial(_read_objects, folder, name, kind, rows),
            (rows,),
            None,
            partial(_object_rows, folder, name, kind, rows),
        )
        for name, kind in kinds.items()
    }


def _dtype(name: str, folder: Path) -> torch.dtype:
    """A dtype by the name that a file gives, and nothing else of torch's."""
    found = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise BatchError(message(f"batch {folder}", expected="a dtype of torch", found=describe(name)))
    return found


def _read_tensor(folder: Path, name: str) -> torch.Tensor:
    from safetensors import safe_open

    with claims.reading(folder / TENSORS), safe_open(str(folder / TENSORS), framework="pt") as file:
        claims.check_room(8 * math.prod(file.get_slice(name).get_shape()), f"column {describe(name)}")
        return file.get_tensor(name)


def _tensor_rows(folder: Path, name: str, start: int, stop: int) -> torch.Tensor:
    from safetensors import safe_open

    with claims.reading(folder / TENSORS), safe_open(str(folder / TENSORS), framework="pt") as file:
        return file.get_slice(name)[start:stop]


def _read_objects(folder: Path, name: str, kind: str, rows: int) -> np.ndarray:
    return _object_rows(folder, name, kind, rows, 0, rows)


def _object_rows(folder: Path, name: str, kind: str, rows: int, start: int, stop: int) -> np.ndarray:
    with claims.reading(folder / OBJECTS):
        return _cells(name, kind, claims.parquet_values(folder / OBJECTS, name, kind, rows, start, stop))


def _cells(name: str, kind: str, values: list[Any]) -> np.ndarray:
    if kind != "arrow":  # decoded while it is parsed: ten thousand records in a few hundredths of a second
        claims.check_depth(*values)
        values = [json.loads(text, object_hook=_untagged) for text in values]
    claims.check_cells(name, values)
    return as_objects(name, values)
