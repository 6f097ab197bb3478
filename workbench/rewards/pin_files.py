"""The file of pins on disk: read by line, replaced as a whole, one writer at a time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from workbench.errors import DataError, boundary, describe, first_line, message

WAIT_SECONDS = 10.0
"""How long a writer waits for another one, which needs milliseconds."""
_UNSEEN = re.compile("[\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")
_CONFLICT = ("<<<<<<<", "=======", ">>>>>>>")


def line_of(document: dict[str, Any]) -> str:
    """One line of JSON to read in a diff: text as it stands, but what would not show or would turn a line around."""
    text = json.dumps(document, ensure_ascii=False, allow_nan=False)
    return _UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def read_lines(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """(file and line, document) of each line; [] where there is no file. Raises `DataError` for a damaged line."""
    with boundary(f"reading {str(path)!r}", DataError):
        raw = path.read_bytes() if path.exists() else b""
    found = []
    for number, line in enumerate(raw.split(b"\n"), 1):
        place = f"{path}:{number}"
        if not line.strip():
            continue
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            document = json.loads(text, parse_constant=_refused)
        except (ValueError, RecursionError) as cause:
            merge = line[:7].decode("ascii", "replace") in _CONFLICT
            do = "a merge left it: keep the lines of both sides" if merge else "mend or delete the line"
            raise DataError(message(f"{place} is no pin", found=first_line(cause), do=do)) from cause
        if not isinstance(document, dict):
            raise DataError(message(f"{place} is no pin", expected="an object", found=describe(document)))
        found.append((place, document))
    return found


def _refused(constant: str) -> Any:
    raise ValueError(f"JSON has no {constant}")


def write_lines(path: Path, lines: Sequence[str]) -> None:
    """All lines in place of the file's, atomically; a link stays a link."""
    target = Path(os.path.realpath(path))
    part = target.with_name(f".{target.name}.part")  # one name will do: writers hold the lock
    with boundary(f"writing {str(path)!r}", DataError):
        with part.open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(f"{line}\n" for line in lines)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, target)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Inside the block nobody else writes the file, in this process or another; a writer that dies lets go.

    Raises `DataError` where the folder cannot be written, or another writer keeps the lock for `WAIT_SECONDS`.
    """
    target = Path(os.path.realpath(path))
    lock = target.with_name(f".{target.name}.lock")
    with boundary(f"writing {str(path)!r}", DataError):
        target.parent.mkdir(parents=True, exist_ok=True)
        file = _taken(lock, time.monotonic() + WAIT_SECONDS)
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(file)


def _taken(lock: Path, deadline: float) -> int:
    while True:
        file = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file), os.stat(lock)):
                    return file
        except OSError as cause:
            if cause.errno not in (errno.EWOULDBLOCK, errno.EACCES) or time.monotonic() > deadline:
                os.close(file)
                what = f"another process has been writing for {WAIT_SECONDS:g} s"
                raise DataError(
                    message(f"{lock} cannot be locked", found=what if deadline < time.monotonic() else cause)
                ) from cause
            time.sleep(0.01)
        os.close(file)  # taken by another, or removed between our open and our lock: this is not the file any more
