"""A run's folder: its files and their formats, its writer and its lock. One process writes it, any number read it.

settings.json  metrics.jsonl  tensorboard/  traces/step_000010/  checkpoints/step_000010/  updates/step_000011/
summary.json   curves.png     notebook.ipynb  job.json  superseded/  lock.json  val/step_000010.parquet  recoveries.jsonl

Keeps some steps' traces on disk, each with the reason for it.

    traces/step_000012/{start/, 00_rollout/, …, trace.json, kept.json}

A trace is written to a temporary folder and renamed when it is complete. Its `kept.json` says whether it was due (every
k-th step, the last one), which symptoms began in that step, and the controllers' state before and after it. Of those that
were due the last `keep_traces` are kept, of those with a symptom the last `KEEP_FLAGGED`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import math
import os
import re
import shlex
import shutil
import socket
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

from workbench.base.errors import RunError, WorkbenchError, describe, first_line
from workbench.base.files import FORMAT, MANIFEST, check_format, sealed, unsealed, write_text
from workbench.steps.trace import Trace

STEP = "training/global_step"
_STEP_FOLDER = re.compile(r"step_(\d{6,})")
_STEP_FILE = re.compile(r"step_(\d{6,})\.parquet")
_STEP_OF = re.compile(rf'"{STEP}": (\d+)')
_TAKE_OUT = "restore the line from a copy, or delete it: the run then goes on without that row, and reports it"


def strict(value: Any) -> Any:
    """Replace NaN and infinities by None, at any depth of a value, because JSON has no such numbers."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: strict(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [strict(inner) for inner in value]
    return value


def write_json(path: Path, document: Any) -> None:
    """Write a JSON object to a file atomically, NaN and infinities as null, with its checksum."""
    write_text(path, sealed(json.dumps(strict(document), indent=1, default=str, allow_nan=False)))


def read_json(path: Path, do: str = "") -> Any:
    """Read a JSON file of a run folder and check its checksum. Raises `RunError`, with the advice `do`, where the file
    is missing, cannot be read or was changed.
    """
    try:
        return json.loads(unsealed(path.read_text(encoding="utf-8"), path, RunError, do))
    except (OSError, ValueError) as cause:
        raise RunError(f"{path} cannot be read", found=first_line(cause), do=do or None) from cause


def goes_on(path: Path) -> str:
    """Return the line that goes on with a run that ended early: a command of its job, or a call of `train`."""
    job = f"workbench train --resume {shlex.quote(str(path))}"
    return job if (path / "job.json").is_file() else f"wb.train(…, run={str(path)!r}, resume='auto')"


def is_run(folder: Path) -> bool:
    """Whether a folder is a run's: it has settings, and is not a checkpoint, which holds a copy of them."""
    return (folder / "settings.json").is_file() and not (folder / MANIFEST).is_file()


def read_settings(run: Path) -> dict[str, Any]:
    """Read a run's settings.json. Raises `RunError` for a missing or damaged file, and for one of another format."""
    path = run / "settings.json"
    document = read_json(path, "the run's newest checkpoint has a copy: resume the run, or copy it here")
    try:
        check_format(document.get("format"), f"run {run}", RunError)
        return dict(document)
    except (AttributeError, KeyError, TypeError) as cause:
        raise RunError(f"{path} is damaged", found=first_line(cause)) from cause


def seconds_of(rows: Iterable[Mapping[str, Any]]) -> float:
    """Return the seconds that the steps and validations of metrics rows took together."""
    return sum(row.get(name) or 0.0 for row in rows for name in ("timing_s/step", "timing_s/testing"))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a metrics.jsonl; [] where there is no file. A last line without a newline, whose writer was
    killed, is left out. Raises `RunError` for any other line that is not JSON or was changed.
    """
    if not path.is_file():
        return []
    rows = []
    *lines, _torn = path.read_text(errors="replace").split("\n")
    for number, line in enumerate(lines):
        if not line.strip():
            continue
        step = _STEP_OF.search(line)
        place = f"{path} line {number + 1}" + (f" (step {step[1]})" if step else "")
        try:
            rows.append(json.loads(unsealed(line, place, RunError, _TAKE_OUT)))
        except json.JSONDecodeError as cause:
            raise RunError(f"{place} is not JSON", found=describe(line), do=_TAKE_OUT) from cause
    return rows


def step_folders(parent: Path) -> dict[int, Path]:
    """Step → folder for every `step_000010` in a folder, ascending; other names are left out."""
    matches = ((_STEP_FOLDER.fullmatch(path.name), path) for path in parent.glob("step_*") if path.is_dir())
    return dict(sorted((int(match[1]), path) for match, path in matches if match))


def step_folder(parent: Path, step: int) -> Path:
    """The folder `step_000010` of a step in `parent`, the folder of all checkpoints, traces or updates."""
    return parent / f"step_{step:06d}"


def step_files(parent: Path) -> dict[int, Path]:
    """Step → file for every `step_000010.parquet` in a folder, ascending; other names are left out."""
    matches = ((_STEP_FILE.fullmatch(path.name), path) for path in parent.glob("step_*.parquet"))
    return dict(sorted((int(match[1]), path) for match, path in matches if match))


def step_file(parent: Path, step: int) -> Path:
    """The file `step_000010.parquet` of a step in `parent`, the folder of held-out samples."""
    return parent / f"step_{step:06d}.parquet"


def size_of(folder: Path) -> int:
    """Bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def check_place(path: Path) -> None:
    """Raise `RunError` for a path that cannot be a run folder.

    Refused are NUL and control characters, names over 200 bytes, `..`, a file of that name, and a symbolic link that leads
    out of the folder it is in.
    """
    what, parts = f"run folder {str(path)!r}", path.parts
    if re.match(r"[a-z][a-z0-9+.-]+:/", str(path)):
        do = "write to a local or mounted folder and copy it there; wb.load_run reads such an address"
        raise RunError(what, expected="a folder: runs at an address are only read", do=do)
    if any(ord(sign) < 32 or ord(sign) == 127 for sign in str(path)):
        raise RunError(f"run folder {str(path)[:60]!r}", found="a control character in its name")
    if any(len(part.encode()) > 200 for part in parts) or len(str(path).encode()) > 4000:
        raise RunError(f"run folder {str(path)[:60]!r}…", expected="names of at most 200 bytes")
    if ".." in parts:
        raise RunError(what, found="'..' in it", do="write the path without '..'")
    for one in (path, *path.parents):
        if one.is_symlink() and not one.resolve().is_relative_to(one.absolute().parent.resolve()):
            raise RunError(what, found=f"{one} is a link to {one.resolve()}", do="name the folder that it links to")
    if path.exists() and not path.is_dir():
        raise RunError(what, found="a file of that name")


PRUNED = ".pruned-"
"""First characters of the name of a folder that is being deleted."""


def written(target: Path, fill: Callable[[Path], None]) -> Path:
    """Write a folder completely or not at all: `fill` writes into a temporary folder beside `target`, which is then
    renamed to it. An existing `target` is replaced.
    """
    staging = target.with_name(f".{target.name}.part")
    shutil.rmtree(staging, ignore_errors=True)
    try:
        fill(staging)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    if target.exists():
        discard(target)
    staging.rename(target)
    return target


def discard(folder: Path) -> None:
    """Delete a folder after renaming it, so that an interrupted deletion leaves no incomplete folder under its name."""
    aside = folder.with_name(f"{PRUNED}{folder.name}")
    shutil.rmtree(aside, ignore_errors=True)
    folder.rename(aside)
    shutil.rmtree(aside)


_FULL, _FILES = (errno.ENOSPC, errno.EDQUOT), (errno.EMFILE, errno.ENFILE)


@contextlib.contextmanager
def room(path: Path) -> Iterator[None]:
    """Context manager around writes to the run folder `path`: turns errors of the file system into a `RunError` that
    says how to go on.

    It covers a full disk, too many open files, and a file of the folder that cannot be written or read. What was
    written before stays.
    """
    try:
        yield
    except WorkbenchError:
        raise
    except Exception as cause:  # libraries name a full disk in their own ways: safetensors' error is no OSError
        number, file = getattr(cause, "errno", None), getattr(cause, "filename", None)
        what, expected, do = f"run {path}: {file} failed", "a file that can be written and read", "repair the folder"
        if number in _FULL or "No space left" in str(cause):
            what, expected, do = f"the disk of run {path} is full", "space for a step's files", "free disk space"
        elif number in _FILES:
            what, expected = f"run {path} cannot open more files", "a free file descriptor"
            do = "raise the limit (ulimit -n 4096)"
        elif not isinstance(file, str | Path) or not Path(file).absolute().is_relative_to(path.absolute()):
            raise
        do = f"{do}, then go on with resume='auto': wb.train(…, run={str(path)!r}, resume='auto')"
        if os.environ.get("WORKBENCH_JOB"):
            do += f", or workbench train --resume {path}"
        raise RunError(what, expected=expected, found=first_line(cause), do=do) from cause


class RunFolder:
    """Writes a run folder: its metrics rows, and moving aside what a resumed run does again. It holds the folder's
    `Lock`, so that there is one writer at a time.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.mkdir(parents=True, exist_ok=True)
        self.lock = Lock(self.path / "lock.json")
        parts = (self.path / part for part in ("checkpoints", "traces", "updates"))
        self.checkpoints, self.traces, self.updates = parts
        self.val = self.path / "val"
        self.metrics = self.path / "metrics.jsonl"

    def append_metrics(self, row: dict[str, Any]) -> list[str]:
        """Append a row to metrics.jsonl and sync the file. NaN and infinities are written as null; returns the names of
        those metrics.
        """
        clean = strict(row)
        with self.metrics.open("a") as file:
            file.write(sealed(json.dumps(clean, allow_nan=False)) + "\n")
            file.flush()
            os.fsync(file.fileno())
        return [name for name, value in row.items() if value is not None and clean[name] is None]

    # --- what a resumed run does again ----------------------------------------------------------

    def supersede(self, after: int, learned: Mapping[Path, str] = MappingProxyType({})) -> list[str]:
        """Move everything past step `after` aside, so that a resumed run can write it again: rows, traces, held-out
        samples, refused checkpoints, the summary, and TensorBoard's events, which are written again from the rows that
        stay.

        `learned` names further jsonl files, each with the key that holds a line's step. Files go to
        superseded/<number>-after-<step>/; nothing is deleted. Returns what was moved. A call that was interrupted is
        completed by the next one.
        """
        parent = self.path / "superseded"
        number = 1 + max((int(path.name[:3]) for path in parent.glob("[0-9][0-9][0-9]-*")), default=0)
        aside = parent / f"{number:03d}-after-{max(after, 0)}"  # made when something goes into it
        logs = {self.metrics: STEP, **learned}
        notes = [note for path, key in logs.items() for note in self._supersede_lines(path, key, after, aside)]
        for parent in (self.traces, self.updates):
            for leftover in (*parent.glob(f"{PRUNED}*"), *parent.glob(".*.part")):
                shutil.rmtree(leftover)
        for leftover in self.val.glob(".*.part"):
            leftover.unlink()
        for path in self._past(after):
            target = aside / path.relative_to(self.path)
            target.parent.mkdir(parents=True, exist_ok=True)
            path.rename(target)
            notes.append(str(path.relative_to(self.path)))
        return notes

    def _supersede_lines(self, path: Path, key: str, after: int, aside: Path) -> Iterator[str]:
        rows = read_metrics(path)
        text = path.read_text(errors="replace") if path.is_file() else ""
        lines = [line for line in text.split("\n")[:-1] if line.strip()]
        kept = [line for line, row in zip(lines, rows, strict=True) if row[key] <= after]
        if len(kept) == len(rows) and (not text or text.endswith("\n")):
            return
        aside.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, aside / path.name)
        write_text(path, "".join(f"{line}\n" for line in kept))
        yield f"{len(rows) - len(kept)} {path.stem} rows" if len(kept) < len(rows) else f"a torn {path.stem} line"

    def _past(self, after: int) -> Iterator[Path]:
        for parent in (self.traces, self.updates, self.checkpoints):
            for step, path in step_folders(parent).items():
                torn = parent == self.traces and not (path / "trace.json").is_file()
                if step > after or torn:
                    yield path
        yield from (path for step, path in step_files(self.val).items() if step > after)
        for name in ("tensorboard", "summary.json", "curves.png"):
            if (self.path / name).exists():
                yield self.path / name


class Lock:
    """Holds an exclusive `flock` on a run folder and on its `lock.json`, which says who holds it (pid, host, start).

    The lock of a process that died is taken over, and `note` says so. Raises `RunError` for a second writer, also one
    in the same process, even where `lock.json` was removed. On a file system that cannot lock a folder (NFS) only the
    file is locked; on one that does not share locks between hosts, two hosts are not kept apart.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        folder = os.open(path.parent, os.O_RDONLY)
        self._let_go = weakref.finalize(self, os.close, folder)
        if (cause := _locked(folder)) is not None and cause.errno in _HELD:
            raise self._refusal() from cause
        self._file = self._open()
        left = _lock_holder(self._file)
        self.note = f"took over the lock of {_holder_text(left)}, which no longer runs" if left else ""
        mine = {"pid": os.getpid(), "host": socket.gethostname(), "started": time.strftime("%Y-%m-%d %H:%M:%S")}
        self._file.seek(0)
        self._file.truncate()
        self._file.write(json.dumps(mine))
        self._file.flush()

    def _open(self) -> IO[str]:
        while True:
            file = self._path.open("a+")
            if (cause := _locked(file.fileno())) is not None:
                file.close()
                if cause.errno not in _HELD:
                    raise RunError(
                        f"{self._path.parent} cannot be locked", found=cause, do="use a local disk"
                    ) from cause
                raise self._refusal() from cause
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), os.stat(self._path)):
                    return file
            file.close()  # the holder removed the file between our open and our lock: this is not the file any more

    def _refusal(self) -> RunError:
        do = "wait for it, stop it, or choose another run folder"
        holder = "a process that has locked the folder; its lock.json was removed"
        with contextlib.suppress(FileNotFoundError), self._path.open() as file:
            holder = _holder_text(_lock_holder(file))
        return RunError(f"run {self._path.parent} is being written", found=holder, do=do)

    def release(self) -> None:
        """Release the lock and delete `lock.json`. Calling it twice does no harm."""
        if not self._file.closed:
            with contextlib.suppress(OSError):  # the folder cannot be written any more: the lock itself is not the file
                self._path.unlink(missing_ok=True)
            self._file.close()
            self._let_go()


_HELD = (errno.EWOULDBLOCK, errno.EACCES)
"""Error numbers that mean that another process holds the lock."""


def _locked(handle: int) -> OSError | None:
    """Try for 0.1 seconds to lock an open file or folder, and return the error where that fails, else None.

    One failed try is not enough: `held` takes the lock for a moment to see whether it is free.
    """
    for turn in range(5):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return None
        except OSError as cause:
            if cause.errno not in _HELD or turn == 4:
                return cause
            time.sleep(0.02)
    return None


def held(path: Path) -> bool:
    """Return whether a process holds a run's lock at this moment; `path` is the run's `lock.json`. Nothing is changed."""
    for place in (path.parent, path):
        with contextlib.suppress(FileNotFoundError):
            handle = os.open(place, os.O_RDONLY)
            try:
                fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError as cause:
                if cause.errno in _HELD:
                    return True
            finally:
                os.close(handle)
    return False


def _lock_holder(file: IO[str]) -> dict[str, Any]:
    file.seek(0)
    try:
        document = json.loads(file.read() or "{}")
    except ValueError:
        return {"pid": "?"}  # torn by a kill while it was written
    return document if isinstance(document, dict) else {}


def _holder_text(held: dict[str, Any]) -> str:
    return f"pid {held.get('pid', '?')} on {held.get('host', '?')} since {held.get('started', '?')}"


log = logging.getLogger("workbench")

KEEP_FLAGGED = 8
"""Number of traces that are kept because of a symptom, in addition to those that were due."""


@dataclass(frozen=True, kw_only=True)
class Kept:
    """Why the trace of a step is kept on disk, and the controllers' state around that step."""

    due: str = ""
    """`every 10 steps`, `the last step`, … ; empty where only a symptom asked for it."""
    flagged: tuple[str, ...] = ()
    """Names of the symptoms that began in this step."""
    before: Mapping[str, Mapping[str, float]] | None = field(default=None, repr=False)
    """Stage name → state of its controllers before the step; None where it was not recorded."""
    after: Mapping[str, Mapping[str, float]] | None = field(default=None, repr=False)
    """Stage name → state of its controllers after the step; None where it was not recorded."""

    def __str__(self) -> str:
        """Join all reasons for keeping the trace, such as `every 10 steps; the gradient jumps`."""
        return "; ".join(part for part in (self.due, *self.flagged) if part)


def keep_trace(trace: Trace, target: Path, kept: Kept) -> Path:
    """Write a trace, and as `kept.json` the reason for keeping it, to the folder `target`, completely or not at all."""

    def fill(staging: Path) -> None:
        trace.save(staging)
        write_json(staging / "kept.json", {"format": FORMAT, **asdict(kept)})

    return written(target, fill)


def read_kept(folder: Path) -> Kept:
    """Read from a trace's folder why it was kept. A trace whose `kept.json` is missing or unreadable counts as due."""
    path = folder / "kept.json"
    if not path.is_file():
        return Kept(due="recorded")
    try:
        found = read_json(path)
        check_format(found.get("format"), str(path), RunError)
        known = {field.name: found[field.name] for field in fields(Kept) if field.name in found}
        return Kept(**known | {"flagged": tuple(known.get("flagged", ()))})
    except (RunError, AttributeError, TypeError) as error:
        # damaged, or of another format: the trace is there all the same
        log.warning("%s cannot be read: %s", path, error)
        return Kept(due="recorded")


def prune_traces(traces: Path, keep_traces: int, keep_flagged: int = KEEP_FLAGGED) -> None:
    """Delete traces, except the last `keep_traces` that were due and the last `keep_flagged` with a symptom."""
    reasons = {step: read_kept(path) for step, path in step_folders(traces).items()}
    due = [step for step, kept in reasons.items() if kept.due or not kept.flagged]
    flagged = [step for step, kept in reasons.items() if kept.flagged]
    staying = {*due[-keep_traces:], *(flagged[-keep_flagged:] if keep_flagged else ())}
    for step, path in step_folders(traces).items():
        if step not in staying:
            discard(path)
