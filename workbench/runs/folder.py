"""A run on disk: one folder that holds everything, written by one process and read by any number.

settings.json  metrics.jsonl  tensorboard/  traces/step_000010/  checkpoints/step_000010/
summary.json   curves.png     notebook.ipynb  superseded/  lock.json
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from pathlib import Path
from typing import Any

from workbench.errors import RunError, describe, message


def write_json(path: Path, document: Any) -> None:
    """Atomically: a reader sees the old file or the new one."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(document, indent=1, default=str))
    os.replace(part, path)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Rows of a metrics file. A torn last line (a process killed while writing) is left out."""
    if not path.is_file():
        return []
    rows = []
    lines = path.read_text().split("\n")
    for number, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as cause:
            if number == len(lines) - 1:
                break  # no newline behind it: it was being written
            raise RunError(message(f"{path} line {number + 1} is not JSON", found=describe(line))) from cause
    return rows


class RunFolder:
    """The writing side. One process at a time: a lock file names it."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock()

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
    def metrics(self) -> Path:
        """The metrics file."""
        return self.path / "metrics.jsonl"

    # --- lock ---------------------------------------------------------------------------------

    def _lock(self) -> None:
        lock = self.path / "lock.json"
        mine = {"pid": os.getpid(), "host": socket.gethostname(), "started": time.strftime("%Y-%m-%d %H:%M:%S")}
        if lock.is_file():
            try:
                held = json.loads(lock.read_text())
            except json.JSONDecodeError:
                held = {}  # torn by a kill: nobody holds it
            if _alive(held) and held.get("pid") != os.getpid():
                raise RunError(
                    message(
                        f"run {self.path} is being written by another process",
                        found=f"pid {held['pid']} on {held['host']} since {held['started']}",
                        do="wait for it, stop it, or choose another run folder",
                    )
                )
        write_json(lock, mine)

    def release(self) -> None:
        """Let go of the lock."""
        (self.path / "lock.json").unlink(missing_ok=True)

    # --- writing ------------------------------------------------------------------------------

    def append_metrics(self, row: dict[str, Any]) -> None:
        """One line, on disk when this returns. NaN becomes null: JSON has none."""
        clean = {key: None if isinstance(value, float) and value != value else value for key, value in row.items()}
        with self.metrics.open("a") as file:
            file.write(json.dumps(clean, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def trace_path(self, step: int) -> Path:
        """Where the trace of a step stands."""
        return self.traces / f"step_{step:06d}"

    def prune_traces(self, keep: int) -> None:
        """Delete all but the last `keep`."""
        for path in sorted(self.traces.glob("step_*"))[:-keep]:
            shutil.rmtree(path)

    def supersede(self, after: int) -> list[str]:
        """Move everything past step `after` aside, so that a resumed run can write it again: rows, traces,
        refused checkpoints, events.

        Nothing is deleted: it goes to superseded/<time>/. Says what was moved.
        """
        notes = []
        aside = self.path / "superseded" / f"{time.strftime('%Y%m%d-%H%M%S')}-after-{after}-{os.getpid()}"
        rows = read_metrics(self.metrics)
        past = [row for row in rows if row["training/global_step"] > after]
        torn = self.metrics.is_file() and not self.metrics.read_text().endswith("\n") and bool(rows or past)
        if past or torn:
            aside.mkdir(parents=True, exist_ok=True)
            shutil.copy2(self.metrics, aside / "metrics.jsonl")
            kept = [json.dumps(row) for row in rows if row["training/global_step"] <= after]
            part = self.metrics.with_name(".metrics.jsonl.part")
            part.write_text("".join(line + "\n" for line in kept))
            os.replace(part, self.metrics)
            notes.append(f"{len(past)} metrics rows")
        for path in sorted(self.traces.glob("step_*")):
            if int(path.name.removeprefix("step_")) > after or not (path / "trace.json").is_file():
                (aside / "traces").mkdir(parents=True, exist_ok=True)
                path.rename(aside / "traces" / path.name)
                notes.append(f"trace {path.name}")
        for path in sorted(self.checkpoints.glob("step_*")):
            if int(path.name.removeprefix("step_")) > after:  # refused ones: the run will write that step again
                (aside / "checkpoints").mkdir(parents=True, exist_ok=True)
                path.rename(aside / "checkpoints" / path.name)
                notes.append(f"checkpoint {path.name}")
        events = self.path / "tensorboard"
        if past and events.is_dir():
            aside.mkdir(parents=True, exist_ok=True)
            events.rename(aside / "tensorboard")
            notes.append("TensorBoard events (rows that stay are written again)")
        return notes


def _alive(held: dict[str, Any]) -> bool:
    """Whether the process of a lock still runs on this host."""
    if held.get("host") != socket.gethostname() or "pid" not in held:
        return bool(held) and held.get("host") != socket.gethostname()
    try:
        os.kill(int(held["pid"]), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
