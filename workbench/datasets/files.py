"""Data files (parquet, json, jsonl) as lists of plain records, and records as parquet; every error names file and line."""

from __future__ import annotations

import codecs
import io
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from workbench.base.errors import DataError, boundary, unknown
from workbench.base.files import write_bytes

SUFFIXES = (".parquet", ".json", ".jsonl")
LINE_LIMIT = 64 << 20
"""Bytes that a line of JSON may have."""
SIZE_LIMIT = 8 << 30
"""Bytes that a file may decode to: two kilobytes of parquet can decode to twenty gigabytes."""
_FIRST = 64
"""Rows from which the decoded size is estimated."""
_AS_JSON = b"workbench.json"
"""Key of a parquet file's metadata: names of the columns whose cells `write` wrote as JSON."""


def find(path: str | Path | Sequence[str | Path]) -> list[Path]:
    """The files meant by a path, a pattern (`data/train-*.parquet`: its files by name) or several of them; `~` is the home folder.

    Raises `DataError` for a pattern that no file matches. Paths are not checked here: `read` does that.
    """
    found: list[Path] = []
    for given in [path] if isinstance(path, str | Path) else path:
        one = Path(given).expanduser()
        if not any(sign in str(one) for sign in "*?") or os.path.exists(one):
            found.append(one)
            continue
        folder = Path(one.anchor)
        matched = sorted(each for each in folder.glob(str(one.relative_to(folder))) if each.suffix in SUFFIXES)
        if not matched:
            raise DataError(f"no file matches {str(one)!r}")
        found += matched
    return found


def read(path: Path) -> list[Any]:
    """The records of one file, in order.

    Raises `DataError` where the file is missing, a folder (its data files are listed), of another kind, too large, not
    UTF-8, or not strict JSON (NaN and numbers beyond float64 are refused).
    """
    try:
        path.exists()
    except OSError as cause:  # a name too long, a folder that may not be entered
        raise DataError(f"no data file at {str(path)[:200]!r}", found=str(cause)[:100]) from cause
    if path.is_dir():
        inside = sorted(str(one.relative_to(path)) for one in path.rglob("*") if one.suffix in SUFFIXES)
        expected, found = "a data file, or a pattern such as 'folder/train-*.parquet'", ", ".join(inside[:8])
        raise DataError(f"{str(path)!r} is a folder", expected=expected, found=found or "no data file in it")
    if not path.is_file():
        raise DataError(f"no data file at {str(path)!r}", do="check the path; a relative one starts where Python runs")
    if path.suffix not in SUFFIXES:
        raise DataError(unknown("suffix of a data file", path.suffix or "(none)", SUFFIXES))
    if path.suffix == ".parquet":
        return _read_parquet(path)
    if path.suffix == ".jsonl":
        return [parse(raw, place) for place, raw in raw_lines(path)]
    _refuse_size(path, path.stat().st_size)
    with boundary(f"reading {str(path)!r}", DataError):
        records = parse(path.read_bytes().removeprefix(codecs.BOM_UTF8), str(path))
    if not isinstance(records, list):
        raise DataError(f"contents of {path}", expected="a list of rows", found=type(records).__name__)
    return records


def raw_lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yields ("file:line", bytes) of each line that is not blank, one at a time. Raises `DataError` for an endless line.

    Lines end at a newline alone: U+2028 and its like are ordinary characters inside a JSON string.
    """
    with path.open("rb") as file:
        for number, raw in enumerate(iter(lambda: file.readline(LINE_LIMIT + 1), b""), 1):
            place = f"{path}:{number}"
            if len(raw) > LINE_LIMIT:
                raise DataError(f"{place}: the line is too long", expected=f"at most {LINE_LIMIT} bytes")
            raw = raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw
            if raw.strip():
                yield place, raw


def _read_parquet(path: Path) -> list[dict[str, Any]]:
    """All rows; refused before they are decoded where the size of the first ones says that all would be too large."""
    import pyarrow.parquet as pq

    with boundary(f"reading {str(path)!r} as parquet", DataError):
        file = pq.ParquetFile(path)
        total = file.metadata.num_rows
        first = next(file.iter_batches(batch_size=_FIRST), None)
        if first is not None and first.num_rows:
            # as Python will have them: with their dictionaries written out
            plain = [one.dictionary_decode() if hasattr(one, "dictionary_decode") else one for one in first.columns]
            _refuse_size(path, sum(one.nbytes for one in plain) // first.num_rows * total)
        names = json.loads((file.schema_arrow.metadata or {}).get(_AS_JSON, b"[]"))
        rows: list[dict[str, Any]] = file.read().to_pylist()
        for name, row in ((name, row) for name in names for row in rows):
            row[name] = json.loads(row[name])
        return rows


def write(path: Path, columns: Mapping[str, Sequence[Any]]) -> list[str]:
    """Write columns as a parquet file, atomically; returns the names of those left out, because no file can hold them.

    Cells that arrow would give back changed (dicts of other keys, numbers of two kinds) are written as JSON, and `read` reads
    them as they were; NaN too.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    made = {name: array for name, cells in columns.items() if (array := _exact(cells)) is not None}
    texts = {name: text for name, cells in columns.items() if name not in made and (text := _json(cells)) is not None}
    made |= {name: pa.array(text, pa.string()) for name, text in texts.items()}
    about = {_AS_JSON: json.dumps(list(texts))} if texts else None
    table, target = pa.table({name: made[name] for name in columns if name in made}, metadata=about), io.BytesIO()
    pq.write_table(table, target, compression="zstd")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, target.getvalue())
    return [name for name in columns if name not in made]


def _exact(cells: Sequence[Any]) -> Any:
    """Cells as an array of arrow, None where it would give them back changed."""
    import pyarrow as pa

    try:
        found = pa.array(cells)
        same = "struct<>" not in str(found.type) and _text(found.to_pylist()) == _text(cells)
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        return None
    return found if same else None


def _json(cells: Sequence[Any]) -> list[str] | None:
    """Each cell as JSON, None where one is a picture, an object, or holds itself."""
    try:
        return [json.dumps(cell) for cell in cells]
    except (TypeError, ValueError, RecursionError):
        return None


def _text(cells: Sequence[Any]) -> str:
    """Cells to compare: 1 and 1.0 differ, NaN equals NaN, a tuple equals a list."""
    return json.dumps(list(cells), default=repr)


def _refuse_size(path: Path, size: int) -> None:
    if size > SIZE_LIMIT:
        what, expected = f"{path} would take about {size / 2**30:.1f} GiB", f"at most {SIZE_LIMIT / 2**30:.1f} GiB"
        do = "read a part of it: split the file, or keep the rows that are needed"
        raise DataError(what, expected=expected, do=do)


def parse(text: bytes, place: str) -> Any:
    """Parse strict JSON in UTF-8. Raises `DataError`, naming `place`, for anything else, such as NaN, infinity or 1e999."""

    def refuse(constant: str) -> Any:
        raise DataError(f"{place}: {constant} is not valid in JSON")

    def number(digits: str) -> float:
        value = float(digits)
        if value in (float("inf"), float("-inf")):
            raise DataError(f"{place}: a number too large for a float", found=digits)
        return value

    try:
        return json.loads(text.decode(), parse_constant=refuse, parse_float=number)
    except DataError:
        raise
    except UnicodeDecodeError as cause:
        raise DataError(f"{place} is not UTF-8", found=cause) from cause
    except (ValueError, RecursionError) as cause:  # ValueError: bad JSON, and integers of thousands of digits
        raise DataError(f"{place} is not JSON", found=str(cause)) from cause
