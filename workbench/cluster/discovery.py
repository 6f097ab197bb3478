"""Ray on this machine: running clusters to attach to, and processes that a killed workbench kernel left behind."""

from __future__ import annotations

import json
import os
import re
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.cluster.ray_internals import heads_here

if TYPE_CHECKING:
    import psutil


@dataclass(frozen=True)
class Process:
    """A process of this machine. Its start time distinguishes it from a later process with the same id."""

    pid: int
    born: float
    name: str

    def alive(self) -> bool:
        """Return whether this process still runs: same pid and start time, and not a zombie."""
        import psutil

        try:
            now = psutil.Process(self.pid)
            return abs(now.create_time() - self.born) < 0.1 and now.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False


def process(pid: int) -> Process:
    """Return the `Process` that has this pid now. Raises `psutil.Error` where there is none."""
    import psutil

    found = psutil.Process(pid)
    return Process(pid, found.create_time(), found.name())


def of_session(session: str) -> list[Process]:
    """Return every process of a Ray session on this machine: those whose command line names it, and their descendants."""
    import psutil

    return _with_descendants(psutil.process_iter(), "ray", session)


class StartWatch:
    """Watches the processes of Ray that this process starts from now on, and notes when one of them has ended."""

    def __init__(self) -> None:
        import psutil

        self.ended = ""
        """The first process seen to have ended, with the last important line of its log; "" while all live."""
        self._before = {child.pid for child in psutil.Process().children()}
        self._names: dict[int, str] = {}
        self._logs = Path()

    def look(self) -> str:
        """Check the watched processes now, and return `ended`: "" while all of them live."""
        import psutil

        alive = set()
        for child in psutil.Process().children():
            with suppress(psutil.Error):
                if child.pid in self._before or child.name() not in ("raylet", "gcs_server"):
                    continue
                self._names[child.pid] = child.name()
                if child.status() != psutil.STATUS_ZOMBIE:
                    alive.add(child.pid)
                if folder := re.search(r"=([^= ]*/session_[^/ ]+)", " ".join(child.cmdline())):
                    self._logs = Path(folder[1], "logs")
        gone = next((pid for pid in self._names if pid not in alive), None)
        if gone is not None:
            name = self._names[gone]
            self.ended = f"{name} (pid {gone}) ended: {_last_line(self._logs, name)}"
        return self.ended


def _last_line(logs: Path, name: str) -> str:
    """Return the last error line (E, C or F) in a Ray process's log, else the log's last line."""
    lines: list[str] = []
    for path in sorted(logs.glob(f"{name}*")):
        with suppress(OSError):
            lines += filter(None, map(str.strip, path.read_text(encoding="utf-8", errors="replace").splitlines()))
    grave = [line for line in lines if re.search(r" [ECF] \d+ \d+\]", line)]
    return (grave or lines or ["no log lines"])[-1][:300]


def half_started() -> list[Process]:
    """Return the Ray processes that a failed start in this process left; Ray itself stops them only when this process
    exits.
    """
    import psutil

    return _with_descendants(psutil.Process().children(), "/ray/", "session_")


def _with_descendants(processes: Iterator[psutil.Process] | list[psutil.Process], *words: str) -> list[Process]:
    """Return the processes whose command line has all of these words, and their descendants."""
    import psutil

    members: dict[int, Process] = {}
    for candidate in processes:
        with suppress(psutil.Error):
            command = " ".join(candidate.cmdline())
            if candidate.pid != os.getpid() and all(word in command for word in words):
                for member in (candidate, *candidate.children(recursive=True)):
                    with suppress(psutil.Error):
                        members[member.pid] = process(member.pid)
    return list(members.values())


def end(processes: Sequence[Process], seconds: float = 5.0) -> list[Process]:
    """Wait up to `seconds` for processes to exit, then kill the rest; returns those that were killed."""
    import psutil

    until = time.monotonic() + seconds
    while time.monotonic() < until and any(process_.alive() for process_ in processes):
        time.sleep(0.05)
    late = [process_ for process_ in processes if process_.alive()]
    for straggler in late:
        with suppress(psutil.Error):
            psutil.Process(straggler.pid).kill()
    return late


# --- records of what we started -----------------------------------------------------------------


@dataclass(frozen=True)
class ClusterRecord:
    """A local Ray cluster that a workbench process (`driver`) started, as recorded in the file `path`."""

    driver: Process
    session: str
    processes: tuple[Process, ...]
    path: Path

    def members(self) -> list[Process]:
        """Return the cluster's processes: those recorded when it started, and those of its Ray session now."""
        return [*{*self.processes, *of_session(self.session)}]


def _folder() -> Path:
    folder = Path(tempfile.gettempdir()) / f"workbench-clusters-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} (records of clusters) belongs to another user; set TMPDIR to your own folder")
    return folder


def remember(session: str, processes: Sequence[Process]) -> ClusterRecord:
    """Write a `ClusterRecord` of a Ray session that this process started: its processes are then found after a crash."""
    path = _folder() / f"{session}.json"
    record = ClusterRecord(process(os.getpid()), session, tuple(processes), path)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(asdict(record), default=str), encoding="utf-8")
    part.replace(path)
    return record


def records() -> Iterator[ClusterRecord]:
    """Yield the `ClusterRecord` of every recorded local cluster; unreadable files are skipped."""
    for path in sorted(_folder().glob("*.json")):
        with suppress(OSError, ValueError, TypeError, KeyError):
            facts = json.loads(path.read_text(encoding="utf-8"))
            members = tuple(Process(**one) for one in facts["processes"])
            yield ClusterRecord(Process(**facts["driver"]), str(facts["session"]), members, path)


def clear_left() -> list[str]:
    """Kill what is left of local clusters whose driver (a killed kernel) is gone; returns a note for each cluster."""
    notes = []
    for record in records():
        if record.driver.alive():
            continue
        if late := end(record.members(), 0.0):
            names = ", ".join(sorted({one.name for one in late}))
            who = f"a killed kernel (pid {record.driver.pid}) had left"
            notes.append(f"ended {len(late)} processes ({names}) that {who}")
        record.path.unlink(missing_ok=True)
    return notes


# --- clusters that could be attached to ------------------------------------------------------------


def known() -> dict[str, str]:
    """Map the address of each known cluster to how it is known: a cluster runs there, or a variable or a file names it."""
    named = {address: f"{where} names {address}" for where, address in pointed_at().items()}
    return named | {address: f"a cluster runs at {address}" for address in heads_here()}


def pointed_at() -> dict[str, str]:
    """Map each place that names a cluster (`RAY_ADDRESS`, or the path of Ray's `ray_current_cluster`) to the address
    that it names.
    """
    addresses = {"RAY_ADDRESS": os.environ.get("RAY_ADDRESS", "")}
    file = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray" / "ray_current_cluster"
    with suppress(OSError, UnicodeDecodeError):
        addresses[str(file)] = file.read_text(encoding="utf-8").strip()
    return {where: address for where, address in addresses.items() if address}


def answers(address: str, seconds: float = 3.0) -> str | None:
    """Try a TCP connection to `host:port`; returns None where something listens, else the reason why it failed."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=seconds):
            return None
    except (OSError, ValueError) as error:
        return str(error)
