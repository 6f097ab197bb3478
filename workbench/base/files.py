"""Writes files so that they are complete on the disk when the function returns, with checksums by which a reader
detects changes.

A JSON document, or a line of a jsonl file, ends in a `text_crc32` of all text before it (`sealed`, `unsealed`). Other files
have their size and crc32 in such a document. docs/files.md says which file is covered by what.
"""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from workbench.base.errors import WorkbenchError, describe, first_line

MANIFEST = "manifest.json"
"""Name of the file in a folder that has the size and crc32 of the folder's other files."""
_SEAL = ', "text_crc32": '
_SEALED = re.compile(r"(\d{1,10})\}\s*")


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 text file atomically, as `write_bytes` does."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file atomically: a reader sees the old file or the new one, also after a power cut."""
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def fsync(path: Path) -> None:
    """Wait until a file's content, or a folder's entries, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def memory_file(name: str) -> Iterator[tuple[BinaryIO, str]]:
    """Context manager that yields a file in memory to write to, and the path by which this user's processes can read
    it.

    The file is in no folder (`memfd`): a small /dev/shm does not limit it, and a killed process leaves nothing behind.
    A system without memfd (macOS) gets a temporary file, which is removed at the end.
    """
    if hasattr(os, "memfd_create"):
        with os.fdopen(os.memfd_create(name), "wb", buffering=0) as memory:
            yield memory, f"/proc/{os.getpid()}/fd/{memory.fileno()}"
    else:
        with tempfile.NamedTemporaryFile(prefix=name, buffering=0) as file:
            yield cast(BinaryIO, file), file.name


# --- JSON ---------------------------------------------------------------------------------------


def strict_json(text: str, *, unique: bool = False, strict: bool = True) -> Any:
    """Parse JSON. Raises `ValueError` for what JSON does not have: `NaN`, infinities, and numbers too large for a float.

    With `unique` also for a name that an object has twice, of which no value can be preferred. `strict` as in
    `json.loads`: False allows line breaks in strings.
    """
    hook = _unique if unique else None
    return json.loads(text, strict=strict, object_pairs_hook=hook, parse_constant=_finite, parse_float=_finite)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    named = dict(pairs)
    if len(named) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for number, name in enumerate(names) if name in names[:number])
        raise ValueError(f"the JSON object has the name {twice!r} twice")
    return named


def _finite(digits: str) -> float:
    if not math.isfinite(value := float(digits)):
        raise ValueError(f"{digits} is not a finite number")
    return value


# --- checksums ----------------------------------------------------------------------------------


def crc32_of(path: Path, value: int = 0) -> int:
    """Compute the crc32 of a file's content, continuing from the crc32 `value`."""
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            value = zlib.crc32(block, value)
    return value


def sealed(text: str) -> str:
    """Append a key `text_crc32` to the text of a JSON object that is not empty: the crc32 of all text before it."""
    body = text.rstrip().removesuffix("}").rstrip()
    return f"{body}{_SEAL}{zlib.crc32(body.encode())}}}"


def unsealed(text: str, place: object, error: type[WorkbenchError], do: str = "", *, required: bool = False) -> str:
    """Return the text that was passed to `sealed`. Raises `error`, naming `place`, where it has changed since.

    A text without a checksum, which somebody changed by hand, is returned unchanged, or refused where one is
    `required`.
    """
    body, _, end = text.rpartition(_SEAL)
    stated, crc32 = _SEALED.fullmatch(end), zlib.crc32(body.encode(errors="surrogatepass"))
    if stated is None and not required:
        return text
    if stated is None or int(stated[1]) != crc32:
        expected = f"crc32 {stated[1]}" if stated else "text_crc32 at its end"
        do = do or "take it from a copy"
        do += "" if required else '; if you changed it yourself, take its last key "text_crc32" out'
        raise error(f"{place} has changed since it was written", expected=expected, found=f"crc32 {crc32}", do=do)
    return f"{body}}}"


def record_of(path: Path) -> dict[str, int]:
    """Return a file's size in bytes and its crc32."""
    return {"size": path.stat().st_size, "crc32": crc32_of(path)}


def check_file(
    path: Path, record: Mapping[str, int], what: str, error: type[WorkbenchError], do: str | None = None
) -> None:
    """Compare a file, which the message calls `what`, with its record. Raises `error` where it is missing, of another
    size, or changed.
    """
    if not path.is_file():
        raise error(f"{what} is missing", do=do)
    expected, size = record.get("size"), path.stat().st_size
    if expected not in (None, size):
        raise error(what, expected=f"{expected} bytes", found=f"{size} bytes", do=do)
    if (found := crc32_of(path)) != record["crc32"]:
        changed = f"crc32 {found}: its content changed"
        raise error(what, expected=f"crc32 {record['crc32']}", found=changed, do=do)


def write_manifest(folder: Path, files: Mapping[str, Mapping[str, int]], **facts: Any) -> None:
    """Write a folder's `manifest.json`: the records of its files by name, and further `facts`."""
    write_text(folder / MANIFEST, sealed(json.dumps({**facts, "files": files}, indent=1)))


def listed(folder: Path, error: type[WorkbenchError], do: str) -> dict[str, dict[str, int]]:
    """Return the records in a folder's `manifest.json`; {} where it has no manifest of this package. Raises `error` for
    a damaged one.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return {}
    try:
        document = json.loads(unsealed(path.read_text(errors="replace"), path, error, do))
    except ValueError as cause:
        raise error(f"{path} cannot be read", found=first_line(cause), do=do) from cause
    files = document.get("files") if isinstance(document, dict) else None
    found = files.items() if isinstance(files, dict) else ()
    return {name: record for name, record in found if isinstance(record, dict) and "crc32" in record}


def check_manifest(folder: Path, error: type[WorkbenchError], do: str) -> None:
    """Compare the files of a folder with its `manifest.json`, if it has one. Raises `error` for the first file that
    differs.
    """
    for name, record in listed(folder, error, do).items():
        check_file(folder / name, record, str(folder / name), error, do)


# --- the version number of file formats ---------------------------------------------------------


FORMAT = 4


def check_format(number: Any, what: str, error: type[WorkbenchError]) -> None:
    """Raise `error` where a document's format number is not `FORMAT`. `what` names the document; None stands for a
    missing number.
    """
    if type(number) is not int or number != FORMAT:
        found, do = "no number" if number is None else describe(number), "open it with the version that wrote it"
        raise error(f"{what}: unknown file format", expected=f"format {FORMAT}", found=found, do=do)
