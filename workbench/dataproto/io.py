"""Saves and loads batches: safetensors for tensors, parquet for objects, JSON for the rest; never pickle.

Object columns are stored as arrow where every cell is of one plain type, else as tagged JSON per cell; other objects
are refused. Of cells that are dicts of tensors each different tensor is stored once, as safetensors. Classes such as
rewards' `Score` have a registered codec. Loading reads only `meta.json`, which has checksums of all; a column is
read, memory-mapped, and compared with them at its first use. What a folder claims about itself is checked before
anything is allocated, because it may come from anybody: errors are a `WorkbenchError` that names the file, and the
limits are far above what a real batch has.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch

from workbench.base.errors import BatchError, WorkbenchError, describe, first_line
from workbench.base.files import FORMAT, check_file, check_format, record_of, sealed, unsealed
from workbench.base.memory import available
from workbench.dataproto.columns import COLUMNS, check_objects, check_tensor, letter_sizes
from workbench.dataproto.value import Lazy, Origin, Value, as_objects

TENSORS, OBJECTS, INNER = "tensors.safetensors", "objects.parquet", "inner.safetensors"
_TAG = "__workbench__"
_GROUP = 512
_BLOCK = 512
"""Rows of a tensor that share one checksum."""
DOCUMENT_LIMIT = 16 << 20
"""Most bytes of a JSON document (meta.json, trace.json)."""
DAMAGED = "take it from a copy, or record the step again"
"""Advice for a file that has changed."""
DEPTH_LIMIT = 100
"""Most levels of nested lists and dicts in a document or a cell."""
INNER_LIMIT = 2_000_000
"""Most lists and dicts in a document, or in all cells of a column."""
ROWS_LIMIT = 10_000_000
"""Most rows of a batch."""
COLUMNS_LIMIT = 10_000
"""Most columns of a batch."""
EXPANSION = 300
"""How many times its file's size a column of objects may decode to: equal cells are stored once, snappy saves 22 times."""
FLOOR = 32 << 20
"""Bytes to which a column of objects may always decode, even from a smaller file."""
_SNAPPY = 24
_PACKED = {"SNAPPY", "UNCOMPRESSED"}
_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*+(?:"|\Z)|[\[{\]}]', re.DOTALL)
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""safetensors' name of a dtype; one that is not here is not compared."""

# --- what a folder claims -----------------------------------------------------------------------


@contextmanager
def reading(place: Path, error: type[WorkbenchError] = BatchError) -> Iterator[None]:
    """Context manager that raises any exception inside as `error`, with `place` in the text; `FileNotFoundError` passes
    unchanged.
    """
    try:
        yield
    except FileNotFoundError:
        raise
    except Exception as cause:
        if isinstance(cause, WorkbenchError) and str(place) in str(cause):
            raise
        raise error(f"{place} cannot be read: {first_line(cause, 400)}") from cause


def inside(folder: Path, name: str) -> Path:
    """Return the path of a file or folder in `folder`. Raises `BatchError` for a symbolic link that leads out of
    `folder`.
    """
    path = folder / name
    if path.is_symlink() and not path.resolve().is_relative_to(folder.resolve()):
        raise BatchError(f"{path} is a symbolic link that leads out of its folder", do="replace the link by the file")
    return path


def read_document(path: Path, *, strict: bool) -> dict[str, Any]:
    """Read a JSON file as a dict; `strict` refuses NaN and infinities. Raises `BatchError` for a file that cannot be
    read safely.
    """
    if not path.is_file():  # neither missing nor a pipe that never ends
        raise BatchError(f"{path} is missing, or not a regular file")
    with path.open("rb") as file:
        text = file.read(DOCUMENT_LIMIT + 1).decode()
    check_text(text)
    text = unsealed(text, path, BatchError, DAMAGED)
    content = json.loads(text, parse_constant=_refuse) if strict else json.loads(text)
    if not isinstance(content, dict):
        raise BatchError(f"contents of {path}", expected="a JSON object", found=describe(content))
    return content


def _refuse(constant: str) -> Any:
    raise BatchError(f"{constant} is not valid in a JSON document")


def check_text(text: str) -> None:
    """Raise `BatchError` for a JSON text that is too long or nested too deep."""
    if len(text.encode(errors="surrogatepass")) > DOCUMENT_LIMIT:
        raise BatchError("size of a JSON document", expected=f"at most {DOCUMENT_LIMIT} bytes", found="more")
    check_depth(text)


def check_depth(*texts: str) -> None:
    """Raise `BatchError` for JSON that is nested too deep, or has too many lists and dicts, to be decoded safely."""
    counts = [text.count("[") + text.count("{") for text in texts]
    if sum(counts) > INNER_LIMIT:
        raise BatchError("lists and dicts in a JSON document", expected=f"at most {INNER_LIMIT}", found=sum(counts))
    for text, count in zip(texts, counts, strict=True):
        depth = 0
        for token in _BRACKETS.finditer(text) if count > DEPTH_LIMIT else ():
            sign = token[0]
            depth += (sign in "[{") - (sign in "]}")
            if depth > DEPTH_LIMIT:
                raise BatchError(f"a JSON document is nested deeper than {DEPTH_LIMIT} lists and dicts")


def check_columns(
    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]], objects: Mapping[str, str], rows: Any
) -> None:
    """Check the shapes, dtypes, kinds and number of rows that a saved batch claims to have. Raises `BatchError` or
    `ColumnInvalid`.
    """
    if not _whole(rows, ROWS_LIMIT) or len(tensors) + len(objects) > COLUMNS_LIMIT:
        found = f"{describe(rows)} rows, {len(tensors) + len(objects)} columns"
        raise BatchError("a saved batch", expected=f"at most {ROWS_LIMIT} rows, {COLUMNS_LIMIT} columns", found=found)
    for name, (shape, dtype) in tensors.items():
        if not shape or not all(_whole(size, 1 << 48) for size in shape) or shape[0] != rows:
            raise BatchError(f"shape of saved column {describe(name)}", expected=f"[{rows}, …]", found=describe(shape))
        check_tensor(name, shape, dtype)
    for name, kind in objects.items():
        if kind not in ("arrow", "json", "tensors") or name in tensors:
            expected = "arrow, json or tensors, once"
            raise BatchError(f"kind of column {describe(name)}", expected=expected, found=describe(kind))
        check_objects(name)
    letter_sizes({name: shape for name, (shape, _) in tensors.items()})


def _whole(value: Any, limit: int) -> bool:
    return type(value) is int and 0 <= value <= limit


def check_tensors(path: Path, claimed: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
    """Compare each claimed shape and dtype with a safetensors file. Raises `BatchError` where they differ."""
    from safetensors import safe_open

    if not path.is_file():  # a pipe would never end
        raise BatchError(f"{path} is missing, or not a safetensors file")
    with safe_open(str(path), framework="pt") as file:
        for name, (shape, dtype) in claimed.items():
            column = file.get_slice(name)
            stored = tuple(column.get_shape()), column.get_dtype()
            if stored != (shape, DTYPES.get(dtype, stored[1])):
                expected = f"{list(shape)} of {dtype}, as in meta.json"
                found = "{} of {}".format(*stored)
                raise BatchError(f"{path}: column {describe(name)}", expected=expected, found=found)


def check_room(size: int, what: str) -> None:
    """Raise `BatchError` where `size` bytes, which the message calls `what`, are more than half of the free memory."""
    free = available()
    if size > free // 2:
        expected = f"at most half of the {free / 2**30:.1f} GiB that are free"
        raise BatchError(f"{what} would take {size / 2**30:.1f} GiB", expected=expected)


def parquet_values(path: Path, name: str, kind: str, rows: int, start: int, stop: int) -> list[Any]:
    """Read rows `start` to `stop` (exclusive) of a parquet column. Raises `BatchError` where they decode to more than
    `budget_of` allows.
    """
    import pyarrow.parquet as pq

    values: list[Any] = []
    budget = budget_of(path)
    with pq.ParquetFile(path, memory_map=True) as file:
        column = _column_of(file, name, kind, rows)
        groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
        places = list(accumulate((group.num_rows for group in groups), initial=0))
        wanted = [number for number in range(len(groups)) if places[number] < stop and places[number + 1] > start]
        for number in wanted:
            # a cell is at most the whole chunk unpacked, so that a piece stays below the floor
            piece = FLOOR // (_SNAPPY * max(groups[number].column(column).total_compressed_size, 1))
            for part in file.iter_batches(min(max(piece, 1), 512), row_groups=[number], columns=[name]):
                budget -= part.nbytes
                if budget < 0:
                    raise BatchError(f"column {describe(name)} decodes to more than {EXPANSION} times its file's size")
                values += part.column(0).to_pylist()
    first = places[wanted[0]] if wanted else 0
    cells = values[max(start - first, 0) : max(stop - first, 0)]
    if len(cells) != max(min(stop, rows) - start, 0):
        raise BatchError(f"column {describe(name)} ends within rows {start} to {stop}", expected=f"{rows} rows")
    return cells


def budget_of(path: Path) -> int:
    """Return the bytes that one column of a parquet file may decode to."""
    return max(FLOOR, EXPANSION * path.stat().st_size)


def _column_of(file: Any, name: str, kind: str, rows: int) -> int:
    """Return the number of a parquet column, checked to be as `io.save` writes it: flat, of a plain type, snappy or
    uncompressed.
    """
    import pyarrow as pa

    schema, metadata = file.schema_arrow, file.metadata
    number = schema.get_field_index(name)
    if number < 0 or metadata.num_rows != rows or metadata.num_columns != len(schema):
        stored = f"{metadata.num_rows} rows, columns {', '.join(schema.names)}"
        raise BatchError(f"column {describe(name)} of {rows} rows is not in the file, or is nested", found=stored)
    plain = [pa.string()] if kind != "arrow" else [pa.string(), pa.int64(), pa.bool_(), pa.float64()]
    packed = {metadata.row_group(group).column(number).compression for group in range(file.num_row_groups)}
    if schema.field(number).type not in [*plain, *([pa.null()] if rows == 0 else [])] or packed - _PACKED:
        stored = f"{schema.field(number).type}, {', '.join(sorted(packed))}"
        expected = f"a column of {' or '.join(map(str, plain))}, with snappy compression or none"
        raise BatchError(f"parquet column {describe(name)}", expected=expected, found=stored)
    return number


def check_cells(name: str, values: list[Any]) -> None:
    """Check the cells of those object columns whose structure stages rely on. Raises `BatchError` for a wrong cell."""
    fits = _CELLS.get(name, lambda value: True)
    wrong = next((row for row, value in enumerate(values) if not fits(value)), None)
    if wrong is not None:
        raise BatchError(f"row {wrong} of column {name!r} ({COLUMNS[name].doc})", found=describe(values[wrong]))


def _chat(value: Any) -> bool:
    """Return whether a value is a prompt: None, a plain text, or a list of turns whose content is a text or a list of
    parts.
    """
    if not isinstance(value, list):
        return value is None or isinstance(value, str)
    contents = [turn.get("content") if isinstance(turn, dict) else 0 for turn in value]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return all(isinstance(one, str | list | None) for one in contents) and all(isinstance(one, dict) for one in parts)


_CELLS: Mapping[str, Callable[[Any], bool]] = {
    "raw_prompt": _chat,
    "uid": lambda value: value is None or isinstance(value, str | int | float | np.generic),
    "reward_model": lambda value: value is None or isinstance(value, dict),
    "score": lambda value: hasattr(value, "scored"),
}


# --- cells of objects ---------------------------------------------------------------------------

_CODECS: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {}
"""Tag → class, encode, decode."""


def register_codec(tag: str, kind: type, encode: Callable[[Any], Any], decode: Callable[[Any], Any]) -> None:
    """Make objects of class `kind` savable in batches: `encode` turns one into plain values, `decode` turns these back."""
    _CODECS[tag] = kind, encode, decode


def encode(value: Any) -> Any:
    """Turn an object into JSON values, with tags for arrays, tuples, infinities and registered classes. Raises
    `TypeError` for others.
    """
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
    """Turn the JSON values that `encode` made back into the object. Raises `BatchError` for an unknown tag."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    return _untagged({key: decode(item) for key, item in value.items()}) if isinstance(value, dict) else value


def _untagged(value: dict[str, Any]) -> Any:
    """Turn a tagged record, whose values are decoded already, into its object; an untagged one is returned unchanged."""
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
    """Return the dtype of a saved array. For texts it is no wider than they are, because a file could claim gigabytes
    for each.
    """
    dtype = np.dtype(text)
    if dtype.kind == "V":
        raise BatchError("dtype of a saved array", expected="plain numbers, texts or objects", found=describe(text))
    widest = max((len(item) for item in inner), default=1) if dtype.kind in "US" else 0
    return np.dtype(f"{dtype.kind}{max(widest, 1)}") if dtype.itemsize > 64 + 4 * widest else dtype


def _plain_type(values: np.ndarray) -> bool:
    """Return whether arrow stores a column exactly: all cells are str, int, bool, or finite float."""
    kinds = {type(value) for value in values}
    if kinds == {int}:
        return all(-(2**63) <= value < 2**63 for value in values)
    if kinds == {str}:
        return all(value.isprintable() or value.encode("utf-8", "replace").decode() == value for value in values)
    return kinds in ({bool}, {float})


# --- folders ------------------------------------------------------------------------------------


def save(batch: Value, path: str | Path) -> Path:
    """Save a batch in a new folder, completely or not at all. Raises `BatchError` where it exists or a cell cannot be
    saved.
    """
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
        check_text(text)
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
    """Return whether all cells of a column are dicts of tensors by name, and at least one is not empty."""
    whole = all(type(one) is dict and all(map(_named_tensor, one.items())) for one in values)
    return whole and any(map(len, values))


def _named_tensor(item: tuple[Any, Any]) -> bool:
    return isinstance(item[0], str) and isinstance(item[1], torch.Tensor)


def _apart(name: str, values: np.ndarray, inner: dict[str, torch.Tensor]) -> list[str]:
    """Turn cells that are dicts of tensors into JSON texts that name the tensors' places, and put each different tensor
    once into `inner`.
    """
    places: dict[int, str] = {}
    for cell in values:
        for tensor in cell.values():
            if id(tensor) not in places:
                places[id(tensor)] = f"{name}/{len(places)}"
                inner[places[id(tensor)]] = tensor.detach().cpu().contiguous().clone()
    return [json.dumps({key: places[id(one)] for key, one in cell.items()}) for cell in values]


def _together(file: Path, cells: list[dict[str, str]]) -> list[dict[str, torch.Tensor]]:
    """Load the tensors of cells that `_apart` saved, as dicts again; cells that shared a tensor share it again."""
    from safetensors import safe_open

    wanted = {place for cell in cells for place in cell.values()}
    with reading(file), safe_open(str(file), framework="pt") as stored:
        sizes = [8 * math.prod(stored.get_slice(place).get_shape()) for place in wanted]
        check_room(sum(sizes), "a column of tensors")
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
        check_depth(*cells)
        columns[name] = pa.array(cells, type=pa.string())
    if inner:
        save_file(inner, str(folder / INNER))
    if columns:
        # small groups, so that reading a few rows does not decode many
        table, path = pa.table(columns), folder / OBJECTS
        pq.write_table(table, path, row_group_size=_GROUP)
        if max(table.column(name).nbytes for name in columns) > budget_of(path):
            # cells that repeat shrink so far that loading would take the file for a bomb: they are stored uncompressed
            pq.write_table(table, path, row_group_size=_GROUP, use_dictionary=False, compression="none")
    return kinds


def load(path: str | Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Origin]]:
    """Open a saved batch: returns (tensors, objects, `meta_info`, origins), with columns that are `Lazy`.

    Raises `BatchError` where the folder holds no batch, or one of another format.
    """
    folder = Path(path)
    if not (folder / "meta.json").is_file():
        raise BatchError(f"no saved batch at {folder}", expected="a folder with meta.json")
    meta = inside(folder, "meta.json")
    with reading(meta):
        document = read_document(meta, strict=True)
        check_format(document.get("format"), f"batch {folder}", BatchError)
        rows, kinds = document["rows"], document["objects"]
        claimed = {name: (tuple(shape), _dtype(kind, folder)) for name, (kind, shape) in document["tensors"].items()}
        check_columns(claimed, kinds, rows)
        facts = dict(decode(document["meta_info"]))
        origins = {name: Origin(**made) for name, made in document["origins"].items()}
        stored = _Stored(folder, document["blocks"], document["files"])
    file, other = inside(folder, TENSORS), inside(folder, OBJECTS)
    if claimed and file.exists():  # a missing file is an error at the first use of one of its columns
        with reading(file):
            check_tensors(file, claimed)
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
    """Return the torch dtype with this name. Raises `BatchError` for anything else that torch has under the name."""
    dtype = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise BatchError(f"dtype of a column in batch {folder}", expected="a dtype of torch", found=describe(name))
    return dtype


def _crc32(part: torch.Tensor) -> int:
    """Compute the crc32 of a tensor's bytes."""
    return zlib.crc32(part.contiguous().flatten().view(torch.uint8).numpy().data)


@dataclass
class _Stored:
    """The files of a saved batch. Their content is compared with its checksums at the first read: of tensors only the
    blocks of rows that are read, of other files everything.
    """

    folder: Path
    blocks: Mapping[str, list[int]] = field(compare=False)
    files: Mapping[str, Mapping[str, int]] = field(compare=False)
    checked: set[tuple[str, int]] = field(default_factory=set, compare=False)
    """(column, number of a block) or (file, 0)."""

    def tensor(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Read a tensor column, or its rows `start` to `stop` (exclusive)."""
        from safetensors import safe_open

        path = self.folder / TENSORS
        with reading(path), safe_open(str(path), framework="pt") as file:
            stored = file.get_slice(name)
            shape = stored.get_shape()
            if stop is None:
                check_room(8 * math.prod(shape), f"column {describe(name)}")
            column = file.get_tensor(name) if stop is None else stored
            last = shape[0] if stop is None else min(stop, shape[0])
            for number in range(start // _BLOCK, -(-last // _BLOCK)):
                self._check(name, number, column)
            return column if stop is None else stored[start:stop]

    def _check(self, name: str, number: int, column: Any) -> None:
        """Compare a block of rows with its checksum, once. Raises `BatchError` where it has changed."""
        if (name, number) in self.checked:
            return
        begin, end = number * _BLOCK, (number + 1) * _BLOCK
        crc, expected = _crc32(column[begin:end]), self.blocks[name][number]
        if crc != expected:
            what = f"{self.folder / TENSORS}: rows {begin} to {end} of column {describe(name)} have changed since they were written"
            raise BatchError(what, expected=f"crc32 {expected}", found=f"crc32 {crc}", do=DAMAGED)
        self.checked.add((name, number))

    def _file(self, name: str) -> Path:
        """Return the path of a file after comparing the file with its checksum, once."""
        path = inside(self.folder, name)
        if (name, 0) not in self.checked:
            check_file(path, self.files[name], str(path), BatchError, DAMAGED)
            self.checked.add((name, 0))
        return path

    def objects(self, name: str, kind: str, count: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Read an object column of `count` rows, or its rows `start` to `stop` (exclusive)."""
        with reading(self.folder / OBJECTS):
            path = self._file(OBJECTS)
            values = parquet_values(path, name, kind, count, start, count if stop is None else stop)
            if kind != "arrow":  # decoded while it is parsed: ten thousand records in a few hundredths of a second
                check_depth(*values)
                values = [json.loads(text, object_hook=_untagged) for text in values]
            if kind == "tensors":
                values = _together(self._file(INNER), values)
            check_cells(name, values)
            return as_objects(name, values)
