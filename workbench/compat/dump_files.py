"""The records of a dump, from files, a DataFrame or a list, each with its place; damage is named by file and line."""

from __future__ import annotations

import json
import math
import numbers
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workbench.datasets import files
from workbench.errors import DataError, boundary, describe, first_line, message

_NAMES_LIMIT = 1000
_STEP_IN_NAME = re.compile(r"(?:completions_)?(\d{1,15})", re.ASCII)
_HALF = re.compile("[\ud800-\udfff]")
_HALF_ESCAPED = re.compile(rb"\\u[dD][89a-fA-F]")


@dataclass(kw_only=True)
class Records:
    """Records as they were read, and where each of them stands."""

    records: list[Mapping[str, Any]] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    """File and line, or row."""
    named: list[int | None] = field(default_factory=list)
    """The step in the name of each record's file."""
    starts: list[int] = field(default_factory=list)
    """The first record of each file."""
    torn: list[str] = field(default_factory=list)
    """Last lines that were cut off, and left out."""

    def __len__(self) -> int:
        return len(self.records)

    def add(self, found: Iterable[tuple[str, Any]], named: int | None = None) -> None:
        """One more file's. Raises `DataError` where one is no record."""
        start = len(self)
        for place, record in found:
            if not isinstance(record, Mapping):
                raise DataError(message(place, expected="a record with named values", found=describe(record)))
            self.records.append(record)
            self.places.append(place)
        if len(self) > start:
            self.starts.append(start)
            self.named += [named] * (len(self) - start)

    def steps(self) -> list[int] | None:
        """Each record's step, by its own word or by its file's name; None where none has one.

        Raises `DataError` for a step that is no whole number, or that some records alone have.
        """
        found: list[int] = []
        without = None
        for record, place, named in zip(self.records, self.places, self.named, strict=True):
            value = record.get("step")
            if isinstance(value, str) and value.strip().isdecimal():  # TRL's tables for trackers
                value = int(value)
            value = named if absent(value) else value
            if value is None:
                without = without or place
            elif _whole(value):
                found.append(int(value))
            else:
                raise DataError(message(f"{place}: step", expected="a whole number", found=describe(value)))
        if without and found:
            raise DataError(message(f"{without}: no step", expected="one in every row, or in none"))
        return found or None

    def of_step(self, step: int) -> Records:
        """The records of one step. Raises `DataError` where there is none, with the steps that there are."""
        steps = self.steps() or []
        kept = [number for number, one in enumerate(steps) if one == step]
        if not kept:
            found = ", ".join(map(str, sorted(set(steps))[:20])) or "no steps"
            raise DataError(message(f"no row of step {step}", found=found))
        starts = [next((place for place, number in enumerate(kept) if number >= start), None) for start in self.starts]
        return Records(
            records=[self.records[number] for number in kept],
            places=[self.places[number] for number in kept],
            named=[self.named[number] for number in kept],
            starts=sorted({start for start in starts if start is not None}),
            torn=self.torn,
        )

    def table(self) -> dict[str, list[Any]]:
        """Name → one plain value a record, None where a record has none."""
        names = dict.fromkeys(name for record in self.records for name in record)
        if len(names) > _NAMES_LIMIT:
            raise DataError(message("a dump", expected=f"at most {_NAMES_LIMIT} columns", found=len(names)))
        return {str(name): [plain(record.get(name)) for record in self.records] for name in names}


def read_records(source: Any, step: int | None = None) -> Records:
    """Everything that a path, a pattern, a folder, a DataFrame or a list holds; of `step` alone where files' names say it."""
    rows = Records()
    if hasattr(source, "to_dict") and hasattr(source, "columns"):
        source = source.to_dict("records")
    if isinstance(source, list | tuple) and not (source and isinstance(source[0], str | Path)):
        rows.add((f"row {number}", record) for number, record in enumerate(source))
        return rows
    if not isinstance(source, str | Path | list | tuple):
        expected = "a path, a DataFrame or a list of dicts"
        raise DataError(message("a dump", expected=expected, found=type(source).__name__))
    for path in _files(source, step):
        if path.suffix == ".jsonl" and path.is_file():
            found = _lines(path, rows.torn)
        else:
            found = [(f"{path}, row {number}", record) for number, record in enumerate(files.read(path))]
        rows.add(found, _step_in(path))
    return rows


def _step_in(path: Path) -> int | None:
    """3 for `3.jsonl` (verl) and `completions_00003.parquet` (TRL)."""
    named = _STEP_IN_NAME.fullmatch(path.stem)
    return int(named[1]) if named else None


def _files(source: Any, step: int | None) -> list[Path]:
    """The files, by step where their names say it."""
    found: list[Path] = []
    with boundary(f"looking for {describe(source)}", DataError):
        for path in files.find(source):
            found += _inside(path) if path.is_dir() else [path]
    steps = {path: _step_in(path) for path in found}
    if step is not None:
        found = [path for path in found if steps[path] == step] or found
    return sorted(found, key=lambda path: (math.inf if (named := steps[path]) is None else named, str(path)))


def _inside(folder: Path) -> list[Path]:
    entries = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    found = [path for path in entries if path.suffix in (".jsonl", ".parquet") and path.is_file()]
    if not found:
        deeper = [path.name for path in entries if path.is_dir()]
        raise DataError(
            message(
                f"no dump in {str(folder)!r}",
                expected="files such as 1.jsonl (verl) or completions_00001.parquet (TRL)",
                found=f"folders {', '.join(deeper[:8])}" if deeper else f"{len(entries)} other files",
                do="name the folder that holds them" if deeper else None,
            )
        )
    return found


def _lines(path: Path, torn: list[str]) -> list[tuple[str, Any]]:
    """(place, record) of each line. Python's writers put NaN and Infinity into their JSON, so these are read."""
    found = []
    with path.open("rb") as file:
        for number, raw in enumerate(iter(lambda: file.readline(files.LINE_LIMIT + 1), b""), 1):
            place = f"{path}:{number}"
            if len(raw) > files.LINE_LIMIT:
                raise DataError(message(place, expected=f"at most {files.LINE_LIMIT} bytes in a line", found="more"))
            if not raw.strip():
                continue
            try:
                record = json.loads(raw.decode("utf-8-sig" if number == 1 else "utf-8"))
                found.append((place, _whole_characters(record) if _HALF_ESCAPED.search(raw) else record))
            except (ValueError, RecursionError) as cause:  # ValueError: bad JSON, bad UTF-8, endless integers
                if raw.endswith(b"\n"):
                    raise DataError(message(f"{place} is not JSON", found=first_line(cause))) from cause
                torn.append(place)
    return found


def _whole_characters(value: Any) -> Any:
    """JSON can escape half a character; no file, frame or page can hold it, so it becomes U+FFFD."""
    if isinstance(value, str):
        return _HALF.sub("\ufffd", value)
    if isinstance(value, list):
        return [_whole_characters(one) for one in value]
    if isinstance(value, dict):
        return {_whole_characters(name): _whole_characters(one) for name, one in value.items()}
    return value


def _whole(value: Any) -> bool:
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return number and abs(value) < 2**53 and value % 1 == 0


def plain(value: Any) -> Any:
    """A cell as plain values: pandas gives lists as arrays, and says in its own ways what is missing."""
    if value is None or isinstance(value, str | float | int | list | dict):
        return value
    if type(value).__name__ in ("NAType", "NaTType"):
        return None
    return value.tolist() if hasattr(value, "tolist") else value


def absent(value: Any) -> bool:
    """None, NaN, or what pandas has for them."""
    return value is None or (isinstance(value, float) and value != value) or type(value).__name__ == "NAType"
