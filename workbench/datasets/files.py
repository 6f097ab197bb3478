"""Data files as lists of plain records: parquet, json, jsonl; every refusal names the file and the line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from workbench.errors import DataError, boundary, message, unknown

SUFFIXES = (".parquet", ".json", ".jsonl")


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
    with boundary(f"reading {str(path)!r} as UTF-8 text", DataError):
        text = path.read_text(encoding="utf-8-sig")
    if path.suffix == ".jsonl":
        # not splitlines(): U+2028 and its like are ordinary characters inside a JSON string
        lines = enumerate(text.split("\n"), 1)
        return [parse(line, f"{path}:{number}") for number, line in lines if line.strip()]
    records = parse(text, str(path))
    if not isinstance(records, list):
        raise DataError(message(f"{path}", expected="a list of rows", found=type(records).__name__))
    return records


def _read_parquet(path: Path) -> list[dict[str, Any]]:
    import pyarrow.parquet as pq

    with boundary(f"reading {str(path)!r} as parquet", DataError):
        return pq.ParquetFile(path).read().to_pylist()


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
