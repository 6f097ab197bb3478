"""A grid of jobs: one notebook under every combination of some parameters, so many at a time, resumed where it was cut.

A sweep's folder has a run folder and a log for each job, and `sweep.json`: which jobs are done, with which parameters. Each
job is a process of its own, which ends, with a checkpoint, when the sweep is stopped or killed.
"""

from __future__ import annotations

import ast
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.base import runtime
from workbench.base.config import require
from workbench.base.errors import SettingError
from workbench.base.files import crc32_of
from workbench.jobs.parameters import resolve
from workbench.jobs.runner import FAILED, OK, STOPPED, kernel_of, run_notebook
from workbench.replay.run import list_runs
from workbench.runs.folder import check_place, held, read_json, write_json

SWEEP = "sweep.json"
MOST = 10_000
"""Jobs of one sweep."""
_CHILD = "from workbench.jobs.sweep import _child; _child()"


@dataclass(frozen=True)
class Sweep:
    """How a sweep ended: the worst exit code of its jobs, and a table with one row for each."""

    code: int
    """0: every job is done; 1: some failed; 3: some were stopped by `break_if`; 130, 143: the sweep was stopped."""
    table: Any
    """A DataFrame: the parameters that differ, and the columns of `list_runs`."""


def values_of(text: str) -> list[Any]:
    """Parse the values of a grid's parameter: `1e-4,3e-4` are two, `0..2` are three; `[1,2]` and `'a,b'` are one.

    Raises `SettingError` for an open bracket or quote, a missing value, and a range that ends before it begins.
    """
    parts, piece = list[str](), ""
    for one in text.split(","):
        piece = f"{piece},{one}" if piece else one
        if _closed(piece):
            parts.append(piece.strip())
            piece = ""
    if piece or (len(parts) > 1 and "" in parts):
        raise SettingError("values of a sweep's grid", expected="values with commas between them", found=repr(text))
    values: list[Any] = []
    for part in parts:
        if ends := re.fullmatch(r"([+-]?\d+)\.\.([+-]?\d+)", part):
            first, last = map(int, ends.groups())
            if not first <= last < first + MOST:
                expected = f"first..last, both included, at most {MOST}"
                raise SettingError("a range of values in a sweep's grid", expected=expected, found=part)
            values += range(first, last + 1)
        else:
            values.append(ast.literal_eval(part) if part[:1] in ("'", '"') else part)
    return values


def _closed(text: str) -> bool:
    """Return whether a text closes every bracket and quote that it opens."""
    bare = re.sub(r"'[^']*'|\"[^\"]*\"", "", text)
    opened, closed = (sum(map(bare.count, signs)) for signs in ("[{(", "]})"))
    return opened == closed and not {"'", '"'} & {*bare}


def jobs_of(notebook: str | Path, grid: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return name → parameters of every job of a grid: the product of all parameters' values.

    A list gives a parameter's values one by one; a text such as "1e-4,1e-5" has those that `values_of` reads.

    A job is named by what differs, `lr=0.0001,seed=0`. Raises `SettingError` for a parameter that the notebook does not
    have, for two equal jobs, and for more than `MOST` jobs.
    """
    axes = {name: values_of(given) if isinstance(given, str) else given for name, given in grid.items()}
    axes = {name: values if isinstance(values, list) else [values] for name, values in axes.items()}
    for name in ("run", "resume"):
        if name in axes:
            raise SettingError(
                f"parameter {name!r} of a sweep", do="leave it out: each job has a folder, and goes on there"
            )
    number = 1
    for values in axes.values():
        number *= len(values)
    require(1 <= number <= MOST, "number of jobs of a sweep", expected=f"1 to {MOST}", found=number)
    several, jobs = [name for name, values in axes.items() if len(values) > 1], dict[str, dict[str, Any]]()
    for combination in itertools.product(*axes.values()):
        values = resolve(notebook, dict(zip(axes, combination, strict=True)))
        name = ",".join(f"{one}={_plain(values[one])}" for one in several) or Path(notebook).stem
        if name in jobs:
            raise SettingError("two jobs of a sweep are the same", found=name, do="leave one of the values out")
        jobs[name] = values
    return jobs


def _plain(value: Any) -> str:
    """Turn a value into a part of a folder's name: readable, and different for different values."""
    text = re.sub(r"[^\w.+-]+", "_", str(value)).strip("_")
    same = text == str(value) and len(text) <= 40
    return text if same else f"{text[:30]}-{zlib.crc32(json.dumps(value).encode()):08x}"


def sweep(
    notebook: str | Path,
    grid: Mapping[str, Any],
    *,
    run: str | Path = "runs/sweep",
    jobs: int = 1,
    kernel: str | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Sweep:
    """Run a notebook as a job for every combination of the grid's values; the same call again goes on where it was cut.

    Args:
        grid: parameter → its values, as text (`"1e-4,3e-4"`, `"0..2"`, `"[1,2]"` for one list) or as a list.
        run: the sweep's folder, with a run folder for each job. Jobs that are done there, with the same parameters and
            notebook, are not run again; others go on from their checkpoints.
        jobs: how many run at a time, as processes that share the CPU's threads between them.
        kernel: name of the kernel; None: the notebook's.
        say: gets a line when a job begins and when it ends.

    Cells tagged `look` are left out. SIGINT and SIGTERM let each job save a checkpoint. Raises `SettingError`, before anything is
    written, where one job's parameters would be refused.
    """
    source, folder = Path(notebook), Path(run)
    if not isinstance(jobs, int) or isinstance(jobs, bool) or jobs < 1:
        raise SettingError("argument jobs of sweep", expected="≥ 1", found=jobs)
    wanted = jobs_of(source, grid)
    kernel_of(source, kernel)
    for name in wanted:
        check_place(folder / name)
    folder.mkdir(parents=True, exist_ok=True)
    state = _State(source, folder, read_json(folder / SWEEP) if (folder / SWEEP).is_file() else {})
    waiting = [name for name, values in wanted.items() if not state.done(name, values)]
    say(f"{len(wanted)} jobs in {folder}, {len(wanted) - len(waiting)} of them done already")
    runner = _Runner(state, wanted, min(jobs, len(waiting) or 1), kernel, say)
    with runtime.on_signals(runner.stop):
        runner.run(waiting)
    codes = {state.codes.get(name, OK) for name in wanted}
    code = FAILED if codes - {OK, STOPPED} else STOPPED if STOPPED in codes else OK
    if runner.received:
        code = 128 + runner.received[0]
    return Sweep(code, _table(folder, wanted, state))


class _State:
    """The content of `sweep.json`: job → parameters, the notebook's crc32, exit code."""

    def __init__(self, source: Path, folder: Path, document: Mapping[str, Any]) -> None:
        self.source, self.folder, self._crc = source, folder, crc32_of(source)
        self._jobs: dict[str, Any] = dict(document.get("jobs", {}))
        self.codes: dict[str, int] = {}
        """Job → exit code, of those that this sweep knows to have ended."""

    def done(self, name: str, values: Mapping[str, Any]) -> bool:
        """Return whether a job is done: it ended with exit code 0, with equal parameters and notebook, and its folder
        exists.
        """
        known = {"parameters": json.loads(json.dumps(values)), "crc32": self._crc, "code": OK}
        done = self._jobs.get(name) == known and (self.folder / name).is_dir()
        if done:
            self.codes[name] = OK
        return done

    def ended(self, name: str, values: Mapping[str, Any], code: int) -> None:
        """Record in `sweep.json` how a job ended."""
        self.codes[name] = code
        self._jobs[name] = {"parameters": dict(values), "crc32": self._crc, "code": code}
        write_json(self.folder / SWEEP, {"notebook": str(self.source), "jobs": self._jobs})


class _Runner:
    """Runs the jobs of a sweep as processes, at most `most` at a time."""

    def __init__(
        self,
        state: _State,
        wanted: Mapping[str, dict[str, Any]],
        most: int,
        kernel: str | None,
        say: Callable[[str], None],
    ) -> None:
        self._state, self._wanted, self._most, self._kernel, self._say = state, wanted, most, kernel, say
        self._running: dict[str, tuple[subprocess.Popen[bytes], float]] = {}
        self.received: list[int] = []
        """Signals, in order."""

    def run(self, waiting: list[str]) -> None:
        """Run these jobs until all have ended; after a signal only those that had begun."""
        left = list(waiting)
        while self._running or (left and not self.received):
            # a job of a sweep that was killed a moment ago may still be saving its checkpoint
            free = [name for name in left if not held(self._state.folder / name / "lock.json")]
            while free and len(self._running) < self._most and not self.received:
                left.remove(free[0])
                self._begin(free.pop(0))
            for name, (process, began) in list(self._running.items()):
                if process.poll() is not None:
                    del self._running[name]
                    self._state.ended(name, self._wanted[name], process.returncode)
                    how = (
                        "done" if process.returncode == OK else f"exit code {process.returncode}, see {self._log(name)}"
                    )
                    self._say(f"{name}: {how}, {time.monotonic() - began:.0f} s")
            time.sleep(0.1)

    def _log(self, name: str) -> Path:
        return self._state.folder / f"{name}.log"

    def _begin(self, name: str) -> None:
        run = self._state.folder / name
        values = {**self._wanted[name], "run": str(run), "resume": "auto"}
        job = {"notebook": str(self._state.source), "values": values, "kernel": self._kernel, "parent": os.getpid()}
        # macOS does not say which cores this process may use
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        threads = str(max(1, int(os.environ.get("OMP_NUM_THREADS") or cores) // self._most))
        environment = {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        with self._log(name).open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", _CHILD, json.dumps(job)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a terminal's Ctrl-C comes once, through the sweep
            )
        self._running[name] = (process, time.monotonic())
        self._say(f"{name}: began")

    def stop(self, number: int, _: Any) -> None:
        """Pass a signal on to the running jobs; no further job begins after it."""
        self.received.append(number)
        for process, _ in self._running.values():
            process.send_signal(number)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _child() -> None:
    """Run as a job's process: call `run_notebook`, and send this process SIGTERM when the sweep's process is gone."""
    job = json.loads(sys.argv[1])

    def ends_with_the_sweep() -> None:
        while os.getppid() == job["parent"]:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=ends_with_the_sweep, daemon=True).start()
    result = run_notebook(job["notebook"], job["values"], kernel=job["kernel"], skip_look=True, say=_say)
    _say(result.error)
    sys.exit(result.code)


def _table(folder: Path, wanted: Mapping[str, dict[str, Any]], state: _State) -> Any:
    """Make the table of a sweep, one row per job in the grid's order: the parameters that differ, how it ended, and its
    results.
    """
    frame = list_runs(folder, settings=False).reindex(list(wanted)).drop(columns="changed")
    codes = [state.codes.get(name) for name in wanted]
    frame.insert(
        0, "job", ["not run" if code is None else "done" if code == OK else f"exit code {code}" for code in codes]
    )
    for name in reversed(next(iter(wanted.values()))):
        values = [one[name] for one in wanted.values()]
        if len({*map(repr, values)}) > 1 and name not in frame:
            frame.insert(0, name, values)
    return frame
