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

from workbench.base.errors import BatchError, WorkbenchError, describe, first_line, message
from workbench.base.memory import available
from workbench.dataproto.columns import COLUMNS, check_objects, check_tensor, letter_sizes

DOCUMENT_LIMIT = 16 << 20
"""Bytes of a JSON document (meta.json, trace.json)."""
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
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""safetensors' name of a dtype; one that is not here is not compared."""


@contextmanager
def reading(place: Path, error: type[WorkbenchError] = BatchError) -> Iterator[None]:
    """Turns every error of reading inside into `error` with the name of `place`; `FileNotFoundError` passes as it is."""
    try:
        yield
    except FileNotFoundError:
        raise
    except Exception as cause:
        if isinstance(cause, WorkbenchError) and str(place) in str(cause):
            raise
        raise error(message(f"{place} cannot be read", found=first_line(cause, 400))) from cause


def inside(folder: Path, name: str) -> Path:
    """A file or folder of a folder. Raises `BatchError` where a symbolic link leads out of it."""
    path = folder / name
    if path.is_symlink() and not path.resolve().is_relative_to(folder.resolve()):
        raise BatchError(f"{path} is a link that leads out of its folder", do="put the file itself there")
    return path


def document(path: Path, *, strict: bool) -> dict[str, Any]:
    """A JSON file as a dict; `strict` refuses NaN and infinities."""
    if not path.is_file():  # neither missing nor a pipe that never ends
        raise BatchError(f"{path} is not a file")
    with path.open("rb") as file:
        text = file.read(DOCUMENT_LIMIT + 1).decode()
    check_text(text)
    found = json.loads(text, parse_constant=_refuse) if strict else json.loads(text)
    if not isinstance(found, dict):
        raise BatchError(f"{path}", expected="a JSON object", found=describe(found))
    return found


def _refuse(constant: str) -> Any:
    raise BatchError(f"JSON has no {constant}")


def check_text(text: str) -> None:
    """Raises `BatchError` for a document that is too long, or nested too deep."""
    if len(text) > DOCUMENT_LIMIT:
        raise BatchError("a JSON document", expected=f"at most {DOCUMENT_LIMIT} bytes", found="more")
    check_depth(text)


def check_depth(*texts: str) -> None:
    """Raises `BatchError` for JSON that is nested too deep, or has too many lists and dicts, to be decoded safely."""
    counts = [text.count("[") + text.count("{") for text in texts]
    if sum(counts) > INNER_LIMIT:
        raise BatchError("JSON", expected=f"at most {INNER_LIMIT} lists and dicts", found=sum(counts))
    for text, count in zip(texts, counts, strict=True):
        depth = 0
        for token in _BRACKETS.finditer(text) if count > DEPTH_LIMIT else ():
            sign = token[0]
            depth += (sign in "[{") - (sign in "]}")
            if depth > DEPTH_LIMIT:
                raise BatchError(f"JSON nested deeper than {DEPTH_LIMIT}")


def check_columns(
    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]], objects: Mapping[str, str], rows: Any
) -> None:
    """Checks row counts, and declared columns. Raises `BatchError` or `ColumnInvalid`."""
    if not _whole(rows, ROWS_LIMIT) or len(tensors) + len(objects) > COLUMNS_LIMIT:
        found = f"{describe(rows)} rows, {len(tensors) + len(objects)} columns"
        raise BatchError("a batch", expected=f"at most {ROWS_LIMIT} rows, {COLUMNS_LIMIT} columns", found=found)
    for name, (shape, dtype) in tensors.items():
        if not shape or not all(_whole(size, 1 << 48) for size in shape) or shape[0] != rows:
            raise BatchError(f"column {describe(name)}", expected=f"[{rows}, …]", found=describe(shape))
        check_tensor(name, shape, dtype)
    for name, kind in objects.items():
        if kind not in ("arrow", "json") or name in tensors:
            raise BatchError(f"column {describe(name)}", expected="arrow or json, once", found=describe(kind))
        check_objects(name)
    letter_sizes({name: shape for name, (shape, _) in tensors.items()})


def _whole(value: Any, limit: int) -> bool:
    return type(value) is int and 0 <= value <= limit


# --- tensors ------------------------------------------------------------------------------------


def check_tensors(path: Path, claimed: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
    """Checks each claimed shape and dtype against the safetensors file, whose reader has checked its header against its bytes."""
    from safetensors import safe_open

    if not path.is_file():  # a pipe would never end
        raise BatchError(f"{path} is not a safetensors file")
    with safe_open(str(path), framework="pt") as file:
        for name, (shape, dtype) in claimed.items():
            column = file.get_slice(name)
            found = tuple(column.get_shape()), column.get_dtype()
            if found != (shape, _DTYPES.get(dtype, found[1])):
                expected = f"{list(shape)} of {dtype}, as in meta.json"
                raise BatchError(f"{path}: column {describe(name)}", expected=expected, found=describe(found))


def check_room(size: int, what: str) -> None:
    """Raises `BatchError` where a column would take more than half of the memory that is free."""
    free = available()
    if size > free // 2:
        expected = f"at most half of the {free / 2**30:.1f} GiB that are free"
        raise BatchError(f"{what} would take {size / 2**30:.1f} GiB", expected=expected)


# --- objects ------------------------------------------------------------------------------------


def parquet_values(path: Path, name: str, kind: str, rows: int, start: int, stop: int) -> list[Any]:
    """Read rows `start` to `stop` (exclusive) of one Parquet column; `BatchError` where decoded they exceed the file's memory budget."""
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
                    raise BatchError(f"column {describe(name)} decodes to more than {EXPANSION} times its file")
                values += part.column(0).to_pylist()
    first = places[wanted[0]] if wanted else 0
    found = values[max(start - first, 0) : max(stop - first, 0)]
    if len(found) != max(min(stop, rows) - start, 0):
        raise BatchError(f"column {describe(name)}", expected=f"{rows} rows", found=f"{len(found)} of them")
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
        found = f"{metadata.num_rows} rows of {metadata.num_columns} columns"
        raise BatchError(f"column {describe(name)}", expected=f"{rows} rows of flat columns", found=found)
    plain = [pa.string()] if kind == "json" else [pa.string(), pa.int64(), pa.bool_(), pa.float64()]
    packed = {metadata.row_group(group).column(number).compression for group in range(file.num_row_groups)}
    if schema.field(number).type not in [*plain, *([pa.null()] if rows == 0 else [])] or packed - _PACKED:
        found = f"{schema.field(number).type}, {', '.join(sorted(packed))}"
        raise BatchError(f"column {describe(name)}", expected="a plain type, snappy", found=found)
    return number


def check_cells(name: str, values: list[Any]) -> None:
    """Checks the cells of columns that stages take apart. Raises `BatchError` for one that is not as declared."""
    fits = _CELLS.get(name, lambda value: True)
    wrong = next((row for row, value in enumerate(values) if not fits(value)), None)
    if wrong is not None:
        raise BatchError(f"column {name!r}, row {wrong}", expected=COLUMNS[name].doc, found=describe(values[wrong]))


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
