"""Data files (parquet, json, jsonl, csv, arrow) as lists of plain records, and records as parquet; every error names file and line."""

from __future__ import annotations

import codecs
import csv
import io
import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from workbench.base.errors import DataError, boundary, unknown
from workbench.base.files import strict_json, unsealed, write_bytes

SUFFIXES = (".parquet", ".json", ".jsonl", ".csv", ".tsv", ".arrow", ".feather")
LINE_LIMIT = 64 << 20
"""Most bytes of a line of JSON."""
SIZE_LIMIT = 8 << 30
"""Most bytes to which a file may decode: two kilobytes of parquet can decode to twenty gigabytes."""
_FIRST = 64
"""Rows that are decoded at a time; from the first ones the size of all is estimated."""
ABOUT = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
"""Files beside the data in a folder that Hugging Face's `datasets` saved."""
SPLIT = re.compile(r"(?<![a-z])(train|test|validation|valid|val|dev|eval)(?![a-z])")
_AS_JSON, _CRC32 = b"workbench.json", b"workbench.crc32"
"""Keys of a parquet file's metadata: names of the columns whose cells `write` wrote as JSON, and a crc32 over all cells."""


def find(path: str | Path | Sequence[str | Path]) -> list[Path]:
    """List the files meant by a path, a folder, a pattern (`data/train-*.parquet`: its files by name) or several of
    these.

    `~` is the home folder. Raises `DataError` for a pattern that no file matches, and for a folder without data files,
    with files of several kinds, or of several splits. Whether a file exists is not checked here: `read` does that.
    """
    files: list[Path] = []
    for entry in [path] if isinstance(path, str | Path) else path:
        place = Path(entry).expanduser()
        if _is_folder(place):
            files += _data_files(place)
            continue
        if not any(sign in str(place) for sign in "*?") or os.path.exists(place):
            files.append(place)
            continue
        folder = Path(place.anchor)
        matched = sorted(each for each in folder.glob(str(place.relative_to(folder))) if each.suffix in SUFFIXES)
        if not matched:
            raise DataError(f"no data file matches the pattern {str(place)!r}", do=_checked(place))
        files += matched
    return files


def _checked(path: Path) -> str:
    """Say what to do about a path that leads to nothing, which may be the text of a prompt."""
    prompts = "; a text is read as a path, so pass prompts as [{'prompt': text}, …]"
    return "check the path; a relative one starts where Python runs" + prompts * (" " in path.name)


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError as cause:  # a name too long, a folder that may not be entered
        raise DataError(f"no data file at {str(path)[:200]!r}", found=str(cause)[:100]) from cause


def _data_files(folder: Path) -> list[Path]:
    """List the data files of a folder and of those below it, by name."""
    inside = sorted(one for one in folder.rglob("*") if one.suffix in SUFFIXES and one.name not in ABOUT)
    names = [str(one.relative_to(folder)) for one in inside]
    kinds = sorted({one.suffix for one in inside})
    splits = list(dict.fromkeys(split for name in names for split in SPLIT.findall(name.lower())))
    what = f"{str(folder)!r} is a folder"
    if not inside:
        raise DataError(what, expected=f"files of {', '.join(SUFFIXES)} in it", found="none")
    if len(kinds) > 1 or len(splits) > 1:
        expected = "data files of one kind and one split in it"
        do = f"name the files: wb.rows({str(folder / names[0])!r}), or a pattern"
        raise DataError(what, expected=expected, found=", ".join(names[:8]), do=do)
    return inside


def read(path: Path) -> list[Any]:
    """Read the records of one file, in order; the cells of a csv or tsv are texts, an empty one is None.

    Raises `DataError` where the file is missing, of another kind, too large, not UTF-8, not strict JSON (NaN and
    numbers beyond float64 are refused), or where a line of a csv does not have as many cells as its first.
    """
    if _is_folder(path) or not path.is_file():
        raise DataError(f"no data file at {str(path)!r}", do=_checked(path))
    if path.suffix not in SUFFIXES:
        raise DataError(unknown("suffix of a data file", path.suffix or "(none)", SUFFIXES))
    if path.suffix == ".parquet":
        return _read_parquet(path)
    if path.suffix in (".arrow", ".feather"):
        return _read_arrow(path)
    if path.suffix == ".jsonl":
        return [parse(raw, place) for place, raw in raw_lines(path)]
    _refuse_size(path, path.stat().st_size)
    if path.suffix in (".csv", ".tsv"):
        return _read_csv(path)
    with boundary(f"reading {str(path)!r}", DataError):
        records = parse(path.read_bytes().removeprefix(codecs.BOM_UTF8), str(path))
    if not isinstance(records, list):
        raise DataError(f"contents of {path}", expected="a list of rows", found=type(records).__name__)
    return records


def raw_lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield ("file:line", bytes) of each line that is not blank, one at a time. Raises `DataError` for a line above
    `LINE_LIMIT`.

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


def _read_csv(path: Path) -> list[dict[str, str | None]]:
    """Read rows of texts under the names in the first line; the separator is the one of `,`, `;` and tab that occurs
    there most."""
    with boundary(f"reading {str(path)!r} as csv", DataError), path.open(encoding="utf-8-sig", newline="") as file:
        separator = max(",;\t", key=file.readline().count)
        file.seek(0)
        csv.field_size_limit(LINE_LIMIT)
        lines = csv.reader(file, delimiter=separator, strict=True)
        names = next(lines, [])
        if len({*names}) < len(names) or "" in names:
            raise DataError(f"first line of {path}", expected="the names of the columns, each once", found=names)
        rows: list[dict[str, str | None]] = []
        for cells in filter(None, lines):
            if len(cells) != len(names):
                expected, found = f"{len(names)} cells ({', '.join(names)})", f"{len(cells)}"
                raise DataError(f"{path}:{lines.line_num}", expected=expected, found=found)
            rows.append({name: cell or None for name, cell in zip(names, cells, strict=True)})
        return rows


def _read_arrow(path: Path) -> list[dict[str, Any]]:
    """Read all rows of an Arrow file, or of an Arrow stream as Hugging Face's `datasets` writes it."""
    import pyarrow as pa

    with boundary(f"reading {str(path)!r} as arrow", DataError):
        try:
            table = pa.ipc.open_file(path).read_all()
        except pa.ArrowInvalid:
            with path.open("rb") as file:
                table = pa.ipc.open_stream(file).read_all()
        return _rows(path, table.num_rows, table.to_batches(_FIRST))


def _read_parquet(path: Path) -> list[dict[str, Any]]:
    """Read all rows; a file is refused before it is decoded where the size of its first rows shows that all would be
    too large."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with boundary(f"reading {str(path)!r} as parquet", DataError):
        file = pq.ParquetFile(path)
        about = file.schema_arrow.metadata or {}
        names, expected = json.loads(about.get(_AS_JSON, b"[]")), about.get(_CRC32)
        try:
            rows = _rows(path, file.metadata.num_rows, file.iter_batches(batch_size=_FIRST))
        except (
            pa.ArrowNotImplementedError
        ):  # a nested column that passes 2 GiB in one batch: its rows are read one by one
            rows = _rows(path, file.metadata.num_rows, pq.ParquetFile(path).iter_batches(batch_size=1))
        if expected is not None and int(expected) != (found := _crc32(rows)):
            what, do = f"{path} has changed since it was written", "take it from a copy, or write it again"
            raise DataError(what, expected=f"crc32 {int(expected)} over its cells", found=f"crc32 {found}", do=do)
        for name, row in ((name, row) for name in names for row in rows):
            row[name] = json.loads(row[name])
        return rows


def write(path: Path, columns: Mapping[str, Sequence[Any]]) -> list[str]:
    """Write columns as a parquet file, atomically; return the names of the columns that are left out, because no file
    can hold them.

    Cells that arrow would give back changed (dicts with different keys, numbers of two types, NaN) are written as JSON,
    and `read` reads them as they were.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    arrays = {name: array for name, cells in columns.items() if (array := _exact(cells)) is not None}
    texts = {name: text for name, cells in columns.items() if name not in arrays and (text := _json(cells)) is not None}
    arrays |= {name: pa.array(text, pa.string()) for name, text in texts.items()}
    table, target = pa.table({name: arrays[name] for name in columns if name in arrays}), io.BytesIO()
    about = {_AS_JSON: json.dumps(list(texts)), _CRC32: str(_crc32(table.to_pylist()))}
    pq.write_table(table.replace_schema_metadata(about), target, compression="zstd")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, target.getvalue())
    return [name for name in columns if name not in arrays]


def _exact(cells: Sequence[Any]) -> Any:
    """Convert cells to an arrow array; None where arrow would give them back changed."""
    import pyarrow as pa

    try:
        array = pa.array(cells)
        same = "struct<>" not in str(array.type) and _text(array.to_pylist()) == _text(cells)
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        return None
    return array if same else None


def _json(cells: Sequence[Any]) -> list[str] | None:
    """Write each cell as JSON; None where one is a picture, another object, or contains itself."""
    try:
        return [json.dumps(cell) for cell in cells]
    except (TypeError, ValueError, RecursionError):
        return None


def _text(cells: Sequence[Any]) -> str:
    """Write cells as text to compare them: 1 and 1.0 differ, NaN equals NaN, a tuple equals a list."""
    return json.dumps(list(cells), default=repr)


def _crc32(rows: Iterable[Mapping[str, Any]]) -> int:
    """Compute the crc32 over the names and cells of all rows."""
    value = 0
    for row in rows:
        value = zlib.crc32(json.dumps(row, default=repr).encode(), value)
    return value


def _rows(path: Path, total: int, batches: Iterable[Any]) -> list[dict[str, Any]]:
    """Collect the rows of record batches of at most `_FIRST` rows; `total` is the number of all rows.

    Raises `DataError` as soon as they are too large, or the first batch shows that all of them would be; sizes are
    without dictionary encoding.
    """
    rows: list[dict[str, Any]] = []
    size = 0
    for batch in batches:
        plain = [one.dictionary_decode() if hasattr(one, "dictionary_decode") else one for one in batch.columns]
        size += sum(one.nbytes for one in plain)
        _refuse_size(path, size if rows else size * total // max(batch.num_rows, 1))
        rows += batch.to_pylist()
    return rows


def _refuse_size(path: Path, size: int) -> None:
    if size > SIZE_LIMIT:
        what, expected = f"{path} would take about {size / 2**30:.1f} GiB", f"at most {SIZE_LIMIT / 2**30:.1f} GiB"
        do = "read a part of it: split the file, or keep the rows that are needed"
        raise DataError(what, expected=expected, do=do)


def parse(text: bytes, place: str) -> Any:
    """Parse strict JSON in UTF-8. Raises `DataError`, naming `place`, for anything else, such as NaN, infinity or
    1e999.

    It also raises for a line that workbench sealed with a checksum and that has changed since.
    """
    try:
        return strict_json(unsealed(text.decode(), place, DataError))
    except DataError:
        raise
    except UnicodeDecodeError as cause:
        raise DataError(f"{place} is not UTF-8", found=cause) from cause
    except (ValueError, RecursionError) as cause:  # ValueError: bad JSON, and integers of thousands of digits
        raise DataError(f"{place} is not JSON", found=str(cause)) from cause
