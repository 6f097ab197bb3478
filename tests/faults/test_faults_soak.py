"""A run that is killed, stopped, cut off and starved at random, and started again each time, is the run that nobody disturbed.

WORKBENCH_SOAK=45 makes the long form forty-five minutes of blows; WORKBENCH_SOAK_RANKS=2 gives its learner two FSDP ranks,
which then are killed as well.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from support.patience import LONG, within
from test_faults_runs import alive, numbers, rows_in

import workbench as wb
from workbench.dataproto.value import same

ROOT = Path(__file__).parents[2]
DRIVER = Path(__file__).with_name("soak_driver.py")
MARK = "WORKBENCH_SOAK_OF"
"""A variable by which every process that a run starts is known."""
OUTAGES = ("503", "drops", "says nothing", "cuts its answers")


class Judge:
    """A reward model's service on loopback; `down` names the way in which it is out of order, or is empty."""

    def __init__(self) -> None:
        self.down = ""
        judge = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                text = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["input"]
                body = json.dumps({"data": [{"probs": [zlib.crc32(text.encode()) % 89 / 89]}]}).encode()
                while judge.down == "says nothing":
                    time.sleep(0.05)
                if judge.down == "drops":
                    return
                self.send_response(503 if judge.down == "503" else 200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body[:9] if judge.down == "cuts its answers" else body)

            def log_message(self, format: str, *args: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.handle_error = lambda *_: None  # type: ignore[method-assign] # who hung up is not told on our terminal
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"


@contextmanager
def small_disk(path: Path) -> Iterator[bool]:
    """A folder; whether it is a disk of its own, which can be full while the machine's is not."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256m", "tmpfs", str(path)]
    own = os.geteuid() == 0 and shutil.which("mount") is not None
    own = own and not subprocess.run(command, check=False, capture_output=True).returncode
    try:
        yield own
    finally:
        if own:
            subprocess.run(["umount", "--lazy", str(path)], check=True)


class Soak:
    """Starts the run in `folder` again and again, and gives it blows."""

    def __init__(self, folder: Path, seed: int, save_freq: int, ranks: int, full: bool) -> None:
        self.folder, self.run, self.full = folder, folder / "disk" / "run", full
        self.draw, self.judge, self.save_freq, self.ranks = random.Random(seed), Judge(), save_freq, ranks
        self.scratch = folder / "scratch"
        self.scratch.mkdir()
        self.going: subprocess.Popen[str] | None = None
        self.pids: set[int] = set()
        self.blows: Counter[str] = Counter()
        self.ends: Counter[str] = Counter()
        self.kinds = ["kill", "interrupt", "kill a worker", "stop a worker", "outage", *(["full disk"] if full else [])]

    def start(self, run: Path, steps: int) -> subprocess.Popen[str]:
        (self.folder / "pids").unlink(missing_ok=True)
        command = [
            sys.executable,
            str(DRIVER),
            str(run),
            str(steps),
            str(self.save_freq),
            self.judge.url,
            str(self.ranks),
        ]
        env = {**os.environ, "OMP_NUM_THREADS": "1", MARK: str(self.folder), "TMPDIR": str(self.scratch)}
        with (self.folder / "said").open("w") as said:
            return subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, text=True, env=env, cwd=ROOT)

    def workers(self) -> list[int]:
        """What the trainer last wrote down: workers of rewards, and ranks."""
        with suppress(OSError):
            return [int(pid) for pid in (self.folder / "pids").read_text().split()]
        return []

    def ended(self) -> None:
        """The trainer is gone, by a blow or because it said that it cannot go on; nothing of it is left."""
        assert self.going is not None
        code, said = self.going.wait(LONG), (self.folder / "said").read_text()
        told = f"signal {-code}" if code <= 0 else said.rpartition("ENDED ")[2][:200].strip()
        assert code <= 0 or told.startswith("workbench.base.errors."), said
        self.ends[told.partition(";")[0].removeprefix("workbench.base.errors.")[:60]] += 1
        print(f"         ended: {told}", flush=True)
        left = {self.going.pid, *self.workers()} | marked(self.folder)
        self.pids |= left
        assert within(lambda: not alive(left), LONG), [psutil.Process(pid) for pid in alive(left)]
        self.going = None

    def step(self, kind: str, steps: int) -> None:
        """Let the run do about so many steps, then one blow, and see what comes of it."""
        while (going := self.trained(steps)).poll() is not None:
            self.ended()  # of the blow before
        self.blows[kind] += 1
        print(f"{time.strftime('%X')} step {rows_in(self.run)}: {kind}", flush=True)
        self.blow(kind, going)
        if going.poll() is not None:
            self.ended()

    def trained(self, steps: int) -> subprocess.Popen[str]:
        """The trainer, started where there is none, after so many steps, or when it has ended before."""
        going = self.going = self.going or self.start(self.run, 1_000_000)
        enough = rows_in(self.run) + steps
        assert within(lambda: going.poll() is not None or rows_in(self.run) > enough, every=0.02), "it does not go on"
        time.sleep(self.draw.random() * 0.3)
        return going

    def blow(self, kind: str, going: subprocess.Popen[str]) -> None:
        if kind in ("kill", "interrupt"):
            going.send_signal(signal.SIGKILL if kind == "kill" else signal.SIGINT)
            going.wait(LONG)
        elif kind in ("kill a worker", "stop a worker"):
            if workers := self.workers():
                with suppress(ProcessLookupError):
                    os.kill(self.draw.choice(workers), signal.SIGKILL if kind == "kill a worker" else signal.SIGSTOP)
        elif kind == "outage":
            self.judge.down = self.draw.choice(OUTAGES)
            within(lambda: going.poll() is not None, self.draw.uniform(0.2, 6.0))
            self.judge.down = ""
        else:
            other, room = self.run.parent / "other", self.draw.choice([0, 10_000, 1_000_000, 15_000_000])
            with suppress(OSError):  # the run wrote meanwhile: it is full, too
                other.write_bytes(bytes(max(shutil.disk_usage(self.run).free - room, 0)))
            within(lambda: going.poll() is not None, self.draw.uniform(0.5, 5.0))
            other.unlink()

    def end(self) -> int:
        """Stop the run by hand; the step of its last checkpoint."""
        self.step("interrupt", 1)
        return wb.load_run(self.run).checkpoints[-1]


def marked(folder: Path) -> set[int]:
    """Processes that the run started, whoever is their parent now; those that are forks of a warm server do not show it."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if f"{MARK}={folder}".encode() in path.read_bytes():
                found.add(int(path.parent.name))
    return found


def shared_memory() -> set[str]:
    """POSIX shared memory that no living process has open, by its name."""
    held = set()
    for path in (*Path("/proc").glob("[0-9]*/map_files/*"), *Path("/proc").glob("[0-9]*/fd/*")):
        with suppress(OSError):
            held.add(os.readlink(path))
    return {path.name for path in Path("/dev/shm").iterdir() if str(path) not in held}


def left_by(folder: Path, pids: set[int]) -> list[str]:
    """Processes of the run, ports that they listen on, and SysV shared memory that one of `pids` made."""
    segments = [line.split() for line in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]]
    living = marked(folder)
    links = psutil.net_connections("inet") if living else []
    return [
        *(f"process {pid}" for pid in living),
        *(f"port {one.laddr.port}" for one in links if one.status == psutil.CONN_LISTEN and one.pid in living),
        *(f"SysV shared memory {fields[1]}" for fields in segments if int(fields[4]) in pids),
    ]


def same_tensors(one: Path, two: Path) -> bool:
    """Whether two checkpoints hold the same tensors: ranks may have laid them out in another order."""
    names = [sorted(str(path.relative_to(top)) for path in top.rglob("*.safetensors")) for top in (one, two)]
    for name in names[0]:
        mine, theirs = load_file(one / name), load_file(two / name)
        if mine.keys() != theirs.keys() or not all(same(mine[key], theirs[key]) for key in mine):
            return False
    return names[0] == names[1]


def soaked(folder: Path, blows: Iterator[tuple[str, int]], *, save_freq: int, ranks: int = 0) -> Counter[str]:
    """A run under `blows` (kinds, each after so many steps), then one without: equal, and nothing is left of either."""
    before = shared_memory()
    with small_disk(folder / "disk") as full:
        soak = Soak(folder, 7, save_freq, ranks, full)
        for kind, steps in blows:
            if kind in soak.kinds:
                soak.step(kind, steps)
        last = soak.end()
        shutil.copytree(soak.run, folder / "rough")
    calm = soak.start(folder / "quiet", last)
    assert calm.wait(4 * 3600) == 0, (folder / "said").read_text()
    soak.judge.server.shutdown()
    soak.judge.server.server_close()
    rough, quiet = wb.load_run(folder / "rough"), wb.load_run(folder / "quiet")
    print(f"{last} steps; blows {dict(soak.blows)}; ends {dict(soak.ends)}")
    for one, two in zip(numbers(rough.rows[:last]), numbers(quiet.rows), strict=True):
        apart = {
            name: (one.get(name), two.get(name)) for name in one.keys() | two.keys() if one.get(name) != two.get(name)
        }
        assert not apart, (one["training/global_step"], apart)
    assert same_tensors(rough.checkpoint(last), quiet.checkpoint(last)), "weights and optimizers, bit for bit"
    both = set(rough.traces) & set(quiet.traces)
    for step in both:
        mine, theirs = rough.traces[step].batch, quiet.traces[step].batch
        assert torch.equal(mine["responses"], theirs["responses"]) and torch.equal(mine["reward"], theirs["reward"])
    assert both
    left = [path for path in rough.path.rglob("*") if path.name.startswith(".") or path.name == "lock.json"]
    left += [path for path in soak.scratch.iterdir() if not path.name.startswith("torchinductor")]  # torch's own
    assert not left
    assert not left_by(folder, soak.pids) and not shared_memory() - before
    return soak.blows


KINDS = ("kill", "interrupt", "kill a worker", "stop a worker", "outage", "full disk")


@pytest.mark.long
@pytest.mark.slow
def test_a_run_that_meets_every_fault_once_ends_as_the_quiet_run(tmp_path: Path) -> None:
    blows = soaked(
        tmp_path, iter([(kind, 1) for kind in KINDS if kind != "interrupt"]), save_freq=2
    )  # which comes last
    assert set(blows) >= set(KINDS) - {"full disk"}


@pytest.mark.long
def test_A1_a_killed_driver_of_two_ranks_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    soaked(tmp_path, iter([("kill", 2)]), save_freq=2, ranks=2)


@pytest.mark.long
@pytest.mark.timeout(4 * 3600)
def test_minutes_of_kills_hangs_outages_and_full_disks_end_as_the_quiet_run(tmp_path: Path) -> None:
    draw, end = random.Random(11), time.monotonic() + 60 * float(os.environ.get("WORKBENCH_SOAK", "5"))

    def blows() -> Iterator[tuple[str, int]]:
        while time.monotonic() < end:
            for kind in draw.sample(KINDS, len(KINDS)):  # each in its turn: a choice may leave one out
                yield kind, draw.randrange(1, 12)

    made = soaked(tmp_path, blows(), save_freq=5, ranks=int(os.environ.get("WORKBENCH_SOAK_RANKS", "0")))
    assert set(made) >= set(KINDS) - {"full disk"}
