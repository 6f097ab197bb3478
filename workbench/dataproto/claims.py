"""Checks what a saved batch claims about itself before anything is allocated: the folder may come from anybody.

Errors are a `WorkbenchError` that names the file. The limits are far above what a real batch has.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch

from workbench.base.errors import BatchError, WorkbenchError, describe, first_line
from workbench.base.files import unsealed
from workbench.base.memory import available
from workbench.dataproto.columns import COLUMNS, check_objects, check_tensor, letter_sizes

DOCUMENT_LIMIT = 16 << 20
"""Bytes of a JSON document (meta.json, trace.json)."""
DAMAGED = "take it from a copy, or record the step again"
"""What to do about a file that has changed."""
DEPTH_LIMIT = 100
"""Lists and dicts inside each other, in a document or a cell."""
INNER_LIMIT = 2_000_000
"""Lists and dicts in a document, or in all cells of a column."""
ROWS_LIMIT = 10_000_000
"""Rows of a batch."""
COLUMNS_LIMIT = 10_000
"""Columns of a batch."""
EXPANSION = 300
"""How many times its file's size a column of objects may decode to: equal cells are stored once, snappy saves 22 times."""
FLOOR = 32 << 20
"""Bytes that a column of objects may decode to, however small its file is."""
_SNAPPY = 24
_PACKED = {"SNAPPY", "UNCOMPRESSED"}
_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*+(?:"|\Z)|[\[{\]}]', re.DOTALL)
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""safetensors' name of a dtype; one that is not here is not compared."""


@contextmanager
def reading(place: Path, error: type[WorkbenchError] = BatchError) -> Iterator[None]:
    """Context manager: raises any exception inside as `error`, with `place` in the text; `FileNotFoundError` passes."""
    try:
        yield
    except FileNotFoundError:
        raise
    except Exception as cause:
        if isinstance(cause, WorkbenchError) and str(place) in str(cause):
            raise
        raise error(f"{place} cannot be read: {first_line(cause, 400)}") from cause


def inside(folder: Path, name: str) -> Path:
    """The path of a file or folder in `folder`. Raises `BatchError` for a symbolic link that leads out of `folder`."""
    path = folder / name
    if path.is_symlink() and not path.resolve().is_relative_to(folder.resolve()):
        raise BatchError(f"{path} is a symbolic link that leads out of its folder", do="put the file itself there")
    return path


def document(path: Path, *, strict: bool) -> dict[str, Any]:
    """Read a JSON file as a dict; `strict` refuses NaN and infinities. Raises `BatchError`."""
    if not path.is_file():  # neither missing nor a pipe that never ends
        raise BatchError(f"{path} is missing, or not a regular file")
    with path.open("rb") as file:
        text = file.read(DOCUMENT_LIMIT + 1).decode()
    check_text(text)
    text = unsealed(text, path, BatchError, DAMAGED)
    found = json.loads(text, parse_constant=_refuse) if strict else json.loads(text)
    if not isinstance(found, dict):
        raise BatchError(f"contents of {path}", expected="a JSON object", found=describe(found))
    return found


def _refuse(constant: str) -> Any:
    raise BatchError(f"{constant} is not valid in JSON")


def check_text(text: str) -> None:
    """Raises `BatchError` for a document that is too long, or nested too deep."""
    if len(text.encode(errors="surrogatepass")) > DOCUMENT_LIMIT:
        raise BatchError("size of a JSON document", expected=f"at most {DOCUMENT_LIMIT} bytes", found="more")
    check_depth(text)


def check_depth(*texts: str) -> None:
    """Raises `BatchError` for JSON that is nested too deep, or has too many lists and dicts, to be decoded safely."""
    counts = [text.count("[") + text.count("{") for text in texts]
    if sum(counts) > INNER_LIMIT:
        raise BatchError("lists and dicts in a JSON document", expected=f"at most {INNER_LIMIT}", found=sum(counts))
    for text, count in zip(texts, counts, strict=True):
        depth = 0
        for token in _BRACKETS.finditer(text) if count > DEPTH_LIMIT else ():
            sign = token[0]
            depth += (sign in "[{") - (sign in "]}")
            if depth > DEPTH_LIMIT:
                raise BatchError(f"JSON nested deeper than {DEPTH_LIMIT} lists and dicts")


def check_columns(
    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]], objects: Mapping[str, str], rows: Any
) -> None:
    """Checks a saved batch's tensors (shape, dtype), objects (storage), row count. Raises `BatchError`, `ColumnInvalid`."""
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


# --- tensors ------------------------------------------------------------------------------------


def check_tensors(path: Path, claimed: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
    """Checks each claimed shape and dtype against a safetensors file. Raises `BatchError` where they differ."""
    from safetensors import safe_open

    if not path.is_file():  # a pipe would never end
        raise BatchError(f"{path} is missing, or not a safetensors file")
    with safe_open(str(path), framework="pt") as file:
        for name, (shape, dtype) in claimed.items():
            column = file.get_slice(name)
            found = tuple(column.get_shape()), column.get_dtype()
            if found != (shape, DTYPES.get(dtype, found[1])):
                expected = f"{list(shape)} of {dtype}, as in meta.json"
                raise BatchError(f"{path}: column {describe(name)}", expected=expected, found="{} of {}".format(*found))


def check_room(size: int, what: str) -> None:
    """Raises `BatchError` where `size` bytes, of what `what` names, are more than half of the free memory."""
    free = available()
    if size > free // 2:
        expected = f"at most half of the {free / 2**30:.1f} GiB that are free"
        raise BatchError(f"{what} would take {size / 2**30:.1f} GiB", expected=expected)


# --- objects ------------------------------------------------------------------------------------


def parquet_values(path: Path, name: str, kind: str, rows: int, start: int, stop: int) -> list[Any]:
    """Rows `start` to `stop` (exclusive) of a parquet column. Raises `BatchError` if they exceed `budget_of` the file."""
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
    found = values[max(start - first, 0) : max(stop - first, 0)]
    if len(found) != max(min(stop, rows) - start, 0):
        raise BatchError(f"column {describe(name)} ends within rows {start} to {stop}", expected=f"{rows} rows")
    return found


def budget_of(path: Path) -> int:
    """Bytes that one column of a parquet file may decode to."""
    return max(FLOOR, EXPANSION * path.stat().st_size)


def _column_of(file: Any, name: str, kind: str, rows: int) -> int:
    """The number of a column, checked to be as `io.save` writes them: flat, of a plain type, with snappy or uncompressed."""
    import pyarrow as pa

    schema, metadata = file.schema_arrow, file.metadata
    number = schema.get_field_index(name)
    if number < 0 or metadata.num_rows != rows or metadata.num_columns != len(schema):
        found = f"{metadata.num_rows} rows, columns {', '.join(schema.names)}"
        raise BatchError(f"column {describe(name)} of {rows} rows is not in the file, or is nested", found=found)
    plain = [pa.string()] if kind != "arrow" else [pa.string(), pa.int64(), pa.bool_(), pa.float64()]
    packed = {metadata.row_group(group).column(number).compression for group in range(file.num_row_groups)}
    if schema.field(number).type not in [*plain, *([pa.null()] if rows == 0 else [])] or packed - _PACKED:
        found = f"{schema.field(number).type}, {', '.join(sorted(packed))}"
        expected = f"a column of {' or '.join(map(str, plain))}, with snappy compression or none"
        raise BatchError(f"parquet column {describe(name)}", expected=expected, found=found)
    return number


def check_cells(name: str, values: list[Any]) -> None:
    """Checks the cells of the declared object columns whose structure stages use. Raises `BatchError` for a wrong cell."""
    fits = _CELLS.get(name, lambda value: True)
    wrong = next((row for row, value in enumerate(values) if not fits(value)), None)
    if wrong is not None:
        raise BatchError(f"row {wrong} of column {name!r} ({COLUMNS[name].doc})", found=describe(values[wrong]))


def _chat(value: Any) -> bool:
    """None, a plain text, or turns whose content is a text or parts."""
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
