"""Data files as lists of plain records: parquet, json, jsonl; every refusal names the file and the line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from workbench.errors import DataError, boundary, message, unknown

SUFFIXES = (".parquet", ".json", ".jsonl")
LINE_LIMIT = 64 << 20
"""Bytes that a line of JSON may have: a row is a prompt and an answer."""
SIZE_LIMIT = 8 << 30
"""Bytes that a file may decode to: two kilobytes of parquet can stand for twenty gigabytes."""
_FIRST = 64
"""Rows that the estimate looks at."""


def find(path: str | Path | Sequence[str | Path]) -> list[Path]:
    """The files meant by a path, a pattern (`data/train-*.parquet`: its files by name) or several of them.

    A folder is refused with its data files named: which split is meant is not ours to guess.
    """
    several = [path] if isinstance(path, str | Path) else list(path)
    found: list[Path] = []
    for one in several:
        if any(sign in str(one) for sign in "*?") and not Path(one).exists():
            matched = sorted(_glob(Path(one)))
            if not matched:
                raise DataError(message(f"no file matches {str(one)!r}"))
            found += matched
        else:
            found.append(Path(one))
    return found


def _glob(pattern: Path) -> list[Path]:
    anchor = Path(pattern.anchor) if pattern.is_absolute() else Path()
    relative = pattern.relative_to(anchor) if pattern.is_absolute() else pattern
    return [path for path in anchor.glob(str(relative)) if path.suffix in SUFFIXES]


def read(path: Path) -> list[Any]:
    """The records of one file, in order.

    Raises `DataError` where the file is missing, of another kind, not UTF-8, or not strict JSON (NaN and
    numbers beyond float64 are refused).
    """
    try:
        path.exists()
    except OSError as cause:  # a name too long, a folder that may not be entered
        raise DataError(message(f"no data file at {str(path)[:200]!r}", found=str(cause)[:100])) from cause
    if path.is_dir():
        inside = sorted(str(one.relative_to(path)) for one in path.rglob("*") if one.suffix in SUFFIXES)
        raise DataError(
            message(
                f"{str(path)!r} is a folder",
                expected="a data file, or a pattern such as 'folder/train-*.parquet'",
                found=", ".join(inside[:8]) or "no data file in it",
            )
        )
    if not path.is_file():
        raise DataError(
            message(f"no data file at {str(path)!r}", do="check the path; it starts where Python was started")
        )
    if path.suffix not in SUFFIXES:
        raise DataError(unknown("suffix of a data file", path.suffix or "(none)", SUFFIXES))
    if path.suffix == ".parquet":
        return _read_parquet(path)
    if path.suffix == ".jsonl":
        return [parse(line, f"{path}:{number}") for number, line in _lines(path) if line.strip()]
    _refuse_size(path, path.stat().st_size)
    with boundary(f"reading {str(path)!r} as UTF-8 text", DataError):
        text = path.read_text(encoding="utf-8-sig")
    records = parse(text, str(path))
    if not isinstance(records, list):
        raise DataError(message(f"{path}", expected="a list of rows", found=type(records).__name__))
    return records


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """(number from 1, text) of each line, never more than one in memory.

    Lines end at a newline alone: U+2028 and its like are ordinary characters inside a JSON string.
    """
    with path.open("rb") as file:
        for number, raw in enumerate(iter(lambda: file.readline(LINE_LIMIT + 1), b""), 1):
            place = f"{path}:{number}"
            if len(raw) > LINE_LIMIT:
                raise DataError(message(place, expected=f"at most {LINE_LIMIT} bytes in a line", found="more"))
            try:
                yield number, raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as cause:
                raise DataError(message(f"{place} is not UTF-8", found=str(cause))) from cause


def _read_parquet(path: Path) -> list[dict[str, Any]]:
    """All rows; refused before they are decoded where the first ones say that they would not fit."""
    import pyarrow.parquet as pq

    with boundary(f"reading {str(path)!r} as parquet", DataError):
        file = pq.ParquetFile(path)
        total = file.metadata.num_rows
        first = next(file.iter_batches(batch_size=_FIRST), None)
        if first is not None and first.num_rows:
            _refuse_size(path, _decoded(first) // first.num_rows * total)
        return file.read().to_pylist()


def _decoded(batch: Any) -> int:
    """Bytes of a record batch with its dictionaries written out, as Python will have them."""
    columns = [
        column.dictionary_decode() if hasattr(column, "dictionary_decode") else column for column in batch.columns
    ]
    return sum(column.nbytes for column in columns)


def _refuse_size(path: Path, size: int) -> None:
    if size > SIZE_LIMIT:
        raise DataError(
            message(
                f"{path} would take about {size / 2**30:.1f} GiB",
                expected=f"at most {SIZE_LIMIT / 2**30:.1f} GiB",
                do="read a part of it: split the file, or keep the rows that are needed",
            )
        )


def parse(text: str, place: str) -> Any:
    """Strict JSON: NaN, infinity and 1e999 are refused, with the place."""

    def refuse(constant: str) -> Any:
        raise DataError(message(f"{place}: JSON has no {constant}"))

    def number(digits: str) -> float:
        value = float(digits)
        if value in (float("inf"), float("-inf")):
            raise DataError(message(f"{place}: a number too large", found=digits))
        return value

    try:
        return json.loads(text, parse_constant=refuse, parse_float=number)
    except DataError:
        raise
    except (ValueError, RecursionError) as cause:  # ValueError: bad JSON, and integers of thousands of digits
        raise DataError(message(f"{place} is not JSON", found=str(cause))) from cause
