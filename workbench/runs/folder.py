"""A run on disk: one folder that holds everything, written by one process and read by any number.

settings.json  metrics.jsonl  tensorboard/  traces/step_000010/  checkpoints/step_000010/  updates/step_000011/
summary.json   curves.png     notebook.ipynb  job.json  superseded/  lock.json
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from workbench.errors import RunError, describe, first_line, message
from workbench.runs.lock import Lock

STEP = "training/global_step"
_STEP_FOLDER = re.compile(r"step_(\d{6,})")


def strict(value: Any) -> Any:
    """The value with NaN and infinities as None, at any depth: JSON has no such numbers."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: strict(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [strict(inner) for inner in value]
    return value


def write_json(path: Path, document: Any) -> None:
    """`write_text` of strict JSON."""
    write_text(path, json.dumps(strict(document), indent=1, default=str, allow_nan=False))


def write_text(path: Path, text: str) -> None:
    """Atomically: a reader sees the old file or the new one, also after a power cut."""
    part = path.with_name(f".{path.name}.part")
    with part.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


def read_json(path: Path) -> Any:
    """A JSON file of the run. Raises `RunError` where it is missing or cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as cause:
        raise RunError(message(f"{path} cannot be read", found=first_line(cause))) from cause


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Rows of a metrics file. A last line without its newline (its writer was killed) is left out."""
    if not path.is_file():
        return []
    rows = []
    *lines, _torn = path.read_text(errors="replace").split("\n")
    for number, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as cause:
            raise RunError(message(f"{path} line {number + 1} is not JSON", found=describe(line))) from cause
    return rows


def step_folders(parent: Path) -> dict[int, Path]:
    """Step → folder for every `step_000010` in a folder, ascending; other names are nobody's business here."""
    found = {}
    for path in parent.glob("step_*"):
        match = _STEP_FOLDER.fullmatch(path.name)
        if match and path.is_dir():
            found[int(match[1])] = path
    return dict(sorted(found.items()))


def crc32_of(path: Path) -> int:
    """crc32 of a file's content."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            value = zlib.crc32(block, value)
    return value


def check_place(path: Path) -> None:
    """Refuse, by reason, a run folder that cannot be made or is not where its name says (E7).

    Raises `RunError` for a NUL or control character, a name over 200 bytes, `..`, and a symbolic link that
    leads out of the folder it stands in.
    """
    what, parts = f"run folder {str(path)!r}", path.parts
    if any(ord(sign) < 32 or ord(sign) == 127 for sign in str(path)):
        raise RunError(message(f"run folder {str(path)[:60]!r}", found="a control character in its name"))
    if any(len(part.encode()) > 200 for part in parts) or len(str(path).encode()) > 4000:
        raise RunError(message(f"run folder {str(path)[:60]!r}…", expected="names of at most 200 bytes"))
    if ".." in parts:
        raise RunError(message(what, found="'..' in it", do="write the folder that is meant"))
    for one in (path, *path.parents):
        if one.is_symlink() and not one.resolve().is_relative_to(one.absolute().parent.resolve()):
            raise RunError(message(what, found=f"{one} is a link to {one.resolve()}", do="name the folder itself"))
    if path.exists() and not path.is_dir():
        raise RunError(message(what, found="a file of that name"))


def discard(folder: Path, prefix: str) -> None:
    """Delete a folder so that it is there whole or, by its name, not there: renamed aside first."""
    aside = folder.with_name(f"{prefix}{folder.name}")
    shutil.rmtree(aside, ignore_errors=True)
    folder.rename(aside)
    shutil.rmtree(aside)


class RunFolder:
    """The writing side. One writer at a time: see `Lock`."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.mkdir(parents=True, exist_ok=True)
        self.lock = Lock(self.path / "lock.json")

    # --- places -------------------------------------------------------------------------------

    @property
    def checkpoints(self) -> Path:
        """Folder of checkpoints."""
        return self.path / "checkpoints"

    @property
    def traces(self) -> Path:
        """Folder of traces."""
        return self.path / "traces"

    @property
    def updates(self) -> Path:
        """Folder of recorded updates."""
        return self.path / "updates"

    @property
    def metrics(self) -> Path:
        """The metrics file."""
        return self.path / "metrics.jsonl"

    def release(self) -> None:
        """Let go of the lock."""
        self.lock.release()

    # --- writing ------------------------------------------------------------------------------

    def append_metrics(self, row: dict[str, Any]) -> list[str]:
        """One line, on disk when this returns. NaN and infinities become null; the names of those are returned."""
        clean = strict(row)
        with self.metrics.open("a") as file:
            file.write(json.dumps(clean, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        return [name for name, value in row.items() if value is not None and clean[name] is None]

    def trace_path(self, step: int) -> Path:
        """Where the trace of a step stands."""
        return self.traces / f"step_{step:06d}"

    # --- what a resumed run does again ----------------------------------------------------------

    def supersede(self, after: int) -> list[str]:
        """Move everything past step `after` aside, so that a resumed run can write it again: rows, traces,
        refused checkpoints, the summary; and the events, which are written again from the rows that stay.

        Nothing is deleted: it goes to superseded/<number>-after-<step>/. Says what was moved. Each part is judged by
        what is on disk, so that a call cut off half-way is finished by the next.
        """
        aside = self._aside(after)
        notes = [*self._supersede_rows(after, aside)]
        for leftover in (
            *self.traces.glob(".pruned-*"),
            *self.traces.glob(".*.part"),
            *self.updates.glob(".pruned-*"),
            *self.updates.glob(".*.part"),
        ):
            shutil.rmtree(leftover)
        for path in self._past(after):
            target = aside / path.relative_to(self.path)
            target.parent.mkdir(parents=True, exist_ok=True)
            path.rename(target)
            notes.append(str(path.relative_to(self.path)))
        return notes

    def _aside(self, after: int) -> Path:
        """A folder that is not there yet; made when something goes into it."""
        parent = self.path / "superseded"
        number = 1 + max((int(path.name[:3]) for path in parent.glob("[0-9][0-9][0-9]-*")), default=0)
        return parent / f"{number:03d}-after-{max(after, 0)}"

    def _supersede_rows(self, after: int, aside: Path) -> Iterator[str]:
        rows = read_metrics(self.metrics)
        kept = [row for row in rows if row[STEP] <= after]
        text = self.metrics.read_text(errors="replace") if self.metrics.is_file() else ""
        if len(kept) == len(rows) and (not text or text.endswith("\n")):
            return
        aside.mkdir(parents=True, exist_ok=True)
        shutil.copy2(self.metrics, aside / "metrics.jsonl")
        part = self.metrics.with_name(".metrics.jsonl.part")
        part.write_text("".join(json.dumps(row) + "\n" for row in kept))
        os.replace(part, self.metrics)
        yield f"{len(rows) - len(kept)} metrics rows" if len(kept) < len(rows) else "a torn metrics line"

    def _past(self, after: int) -> Iterator[Path]:
        for step, path in step_folders(self.traces).items():
            if step > after or not (path / "trace.json").is_file():
                yield path
        for step, path in step_folders(self.updates).items():
            if step > after:
                yield path
        for step, path in step_folders(self.checkpoints).items():
            if step > after:  # refused ones: the run will write that step again
                yield path
        for name in ("tensorboard", "summary.json", "curves.png"):
            if (self.path / name).exists():
                yield self.path / name
