"""What runs on this machine: clusters that could be attached to, and what a killed kernel of ours left behind."""

from __future__ import annotations

import json
import os
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil


@dataclass(frozen=True)
class Process:
    """A process for certain: ids are used again, start times are not."""

    pid: int
    born: float
    name: str

    def alive(self) -> bool:
        """Whether it is still that process, and not a zombie."""
        try:
            now = psutil.Process(self.pid)
            return abs(now.create_time() - self.born) < 0.1 and now.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False

    def kill(self) -> None:
        """End it at once."""
        with suppress(psutil.Error):
            if self.alive():
                psutil.Process(self.pid).kill()


def process(pid: int) -> Process:
    """The process that has this id now."""
    found = psutil.Process(pid)
    return Process(pid, found.create_time(), found.name())


def of_session(session: str) -> list[Process]:
    """Every process of a Ray session on this machine: those that name it, and their descendants."""
    found: dict[int, Process] = {}
    for one in psutil.process_iter():
        with suppress(psutil.Error):
            if one.pid != os.getpid() and session in " ".join(one.cmdline()) and "ray" in " ".join(one.cmdline()):
                for member in (one, *one.children(recursive=True)):
                    with suppress(psutil.Error):
                        found[member.pid] = Process(member.pid, member.create_time(), member.name())
    return list(found.values())


def half_started() -> list[Process]:
    """Ray's processes of a start of ours that failed: Ray itself ends them with this process only."""
    found = []
    for one in psutil.Process().children():
        with suppress(psutil.Error):
            words = " ".join(one.cmdline())
            if "/ray/" in words and "session_" in words:
                found += [process(member.pid) for member in (one, *one.children(recursive=True))]
    return found


def end(processes: Sequence[Process], seconds: float = 5.0) -> list[Process]:
    """Wait until they are gone, then kill those that are not; the killed."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and any(one.alive() for one in processes):
        time.sleep(0.05)
    late = [one for one in processes if one.alive()]
    for one in late:
        one.kill()
    return late


# --- records of what we started -----------------------------------------------------------------


@dataclass(frozen=True)
class Record:
    """A local cluster that a process of ours started."""

    driver: Process
    session: str
    processes: tuple[Process, ...]
    path: Path


def _folder() -> Path:
    folder = Path(tempfile.gettempdir()) / f"workbench-clusters-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to somebody else")
    return folder


def remember(session: str, processes: Sequence[Process]) -> Path:
    """Write down what this process has started."""
    path = _folder() / f"{session}.json"
    facts = {
        "driver": asdict(process(os.getpid())),
        "session": session,
        "processes": [asdict(one) for one in processes],
    }
    part = path.with_suffix(".part")
    part.write_text(json.dumps(facts), encoding="utf-8")
    part.replace(path)
    return path


def records() -> Iterator[Record]:
    """All that are written down; one that cannot be read is passed over."""
    for path in sorted(_folder().glob("*.json")):
        with suppress(OSError, ValueError, TypeError, KeyError):
            facts = json.loads(path.read_text(encoding="utf-8"))
            members = tuple(Process(**one) for one in facts["processes"])
            yield Record(Process(**facts["driver"]), str(facts["session"]), members, path)


def clear_left() -> list[str]:
    """End what kernels that were killed have left of clusters that they started; a sentence for each."""
    notes = []
    for record in records():
        if record.driver.alive():
            continue
        late = [one for one in {*record.processes, *of_session(record.session)} if one.alive()]
        for one in late:
            one.kill()
        if late:
            names = ", ".join(sorted({one.name for one in late}))
            notes.append(
                f"ended {len(late)} processes ({names}) that a killed kernel (pid {record.driver.pid}) had left"
            )
        record.path.unlink(missing_ok=True)
    return notes


# --- clusters that could be attached to ------------------------------------------------------------


def running() -> list[str]:
    """Addresses of heads that run on this machine, by their processes."""
    found = set()
    for one in psutil.process_iter(["name"]):
        with suppress(psutil.Error):
            if "gcs_server" in (one.info["name"] or "") and one.status() != psutil.STATUS_ZOMBIE:
                address = next(iter(_flag(one.cmdline(), "--node-ip-address")), "127.0.0.1")
                ports = [link.laddr.port for link in one.net_connections("tcp") if link.status == psutil.CONN_LISTEN]
                found |= {f"{address}:{port}" for port in ports}
    return sorted(found)


def _flag(words: Sequence[str], flag: str) -> list[str]:
    return [word.split("=", 1)[1] for word in words if word.startswith(f"{flag}=")]


def pointed_at() -> dict[str, str]:
    """Where an address is written → the address: the environment's `RAY_ADDRESS`, Ray's own pointer file."""
    found = {}
    if os.environ.get("RAY_ADDRESS"):
        found["RAY_ADDRESS"] = os.environ["RAY_ADDRESS"]
    file = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray" / "ray_current_cluster"
    with suppress(OSError, UnicodeDecodeError):
        text = file.read_text(encoding="utf-8").strip()
        if text:
            found[str(file)] = text
    return found


def answers(address: str, seconds: float = 3.0) -> str | None:
    """None where something listens at `host:port`, else why not."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=seconds):
            return None
    except (OSError, ValueError) as error:
        return str(error)


def shown(processes: Sequence[Any]) -> str:
    """`gcs_server 12, raylet 17`."""
    return ", ".join(f"{one.name} {one.pid}" for one in processes)
