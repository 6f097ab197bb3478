"""The sandbox on this machine: every program in a fresh process that is shut in, limited and swept away."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from workbench.config import require
from workbench.errors import SandboxError, message, unknown
from workbench.sandbox import probe, tiers
from workbench.sandbox.process import Bounds, contained
from workbench.sandbox.protocol import Phase, Program, Result, SyncDoors, status_of
from workbench.sandbox.tiers import Limits

MAX_FETCHED = 16 << 20
"""Bytes of a file that is brought back."""


@dataclass(frozen=True)
class _Language:
    file: str
    run: tuple[str, ...]
    build: tuple[str, ...] = ()


class LocalSandbox(SyncDoors):
    """`sandbox.local()`: runs programs here, isolated by the best tier that passes its probe.

    `tier` is `bubblewrap` or `namespaces` (None: the first that works). A tier counts only when its probe, a
    program that tries to get out, has failed to (`probe.py` lists what it tries). Where none passes, this
    raises `SandboxError` that says why; `allow_unsafe=True` then runs model code as an ordinary process of
    your own user, with your files and your network: only for code that you would run by hand.

    `python` is the interpreter inside (by default ours if another user can reach it, else the system's);
    `packages` shows it our installed packages, read-only. `memory_limit_mb` holds for each process, and
    twice that for all of a program's together; `output_limit` is bytes of stdout and of stderr that are kept.
    """

    def __init__(
        self,
        *,
        tier: str | None = None,
        allow_unsafe: bool = False,
        python: str | None = None,
        packages: bool = False,
        max_concurrent: int | None = None,
        memory_limit_mb: int = 1024,
        disk_limit_mb: int = 64,
        output_limit: int = 1 << 20,
    ) -> None:
        require(memory_limit_mb >= 64, "memory_limit_mb", expected="≥ 64 (an interpreter's own)", found=memory_limit_mb)
        require(output_limit >= 1024, "output_limit", expected="≥ 1024 bytes", found=output_limit)
        self.max_concurrent = max_concurrent or os.cpu_count() or 1
        require(self.max_concurrent >= 1, "max_concurrent", expected="≥ 1", found=max_concurrent)
        if tier is not None and tier not in tiers.TIERS:
            raise SandboxError(unknown("tier of isolation", tier, tiers.TIERS))
        self.memory_limit_mb = memory_limit_mb
        self.output_limit = output_limit
        self._limits = Limits(memory_mb=memory_limit_mb, disk_mb=disk_limit_mb)
        self.python, self._readable, self._environment = _interpreter(python, packages)
        self._threads = ThreadPoolExecutor(self.max_concurrent, thread_name_prefix="workbench-sandbox")
        self._languages = {
            "python": _Language("main.py", (self.python, "-s", "-B", "main.py")),
            "bash": _Language("main.sh", ("/bin/bash", "main.sh")),
            "cpp": _Language(
                "main.cpp", ("./main.out",), ("/usr/bin/g++", "-std=c++17", "-O1", "main.cpp", "-o", "main.out")
            ),
        }
        self.tier = self._choose(tier, allow_unsafe)

    def _choose(self, tier: str | None, allow_unsafe: bool) -> str:
        reasons = []
        for name in (tier,) if tier else tiers.TIERS:
            found = probe.failures(self, name)
            if not found:
                return name
            reasons.append(f"{name}: {', '.join(found)}")
        if allow_unsafe:
            return "unsafe"
        raise SandboxError(
            message(
                "model code cannot be run safely here",
                expected="a tier of isolation that passes its probe",
                found="; ".join(reasons),
                do="install bubblewrap, use a remote sandbox, or say allow_unsafe=True to run it as your own user",
            )
        )

    @property
    def languages(self) -> tuple[str, ...]:
        """Those whose programs are installed: python always, bash and C++ where their tools are."""
        there = {"python": True, "bash": Path("/bin/bash").exists(), "cpp": Path("/usr/bin/g++").exists()}
        return tuple(name for name, found in there.items() if found)

    def describe(self) -> str:
        """Its tier and limits."""
        note = " (NO ISOLATION)" if self.tier == "unsafe" else ""
        return f"local sandbox, {self.tier}{note}, {self.memory_limit_mb} MiB, {self.max_concurrent} at a time"

    def __repr__(self) -> str:
        return f"LocalSandbox({self.tier!r}, python={self.python!r}, max_concurrent={self.max_concurrent})"

    async def execute(self, program: Program) -> Result:
        """Run one program in a fresh process and folder. Cancelling ends its processes."""
        stop = threading.Event()
        work = asyncio.get_running_loop().run_in_executor(self._threads, self.execute_in, self.tier, program, stop)
        try:
            return await work
        except asyncio.CancelledError:
            stop.set()
            raise

    def execute_in(self, tier: str, program: Program, stop: threading.Event | None = None) -> Result:
        """The same in a stated tier, waiting here; the probe's door."""
        if program.language not in self.languages:
            found = f"{program.language} is not installed here; {', '.join(self.languages)} are"
            return Result(status="SandboxError", message=found, where=tier)
        language, stop = self._languages[program.language], stop or threading.Event()
        with _folders() as (box, root):
            _write(box, {**program.files, language.file: program.code.encode("utf-8", "surrogatepass")})
            built: Phase | None = None
            if language.build:
                # a compiler needs more room than the program that it makes
                roomy = replace(program, memory_limit_mb=max(self._memory(program), 2048), stdin=None)
                built = self._phase(tier, (box, root), language.build, roomy, program.compile_timeout, stop)
            ran: Phase | None = None
            if built is None or built.return_code == 0:
                ran = self._phase(tier, (box, root), language.run, program, program.run_timeout, stop)
            files = {name: body for name in program.fetch_files if (body := _fetch(box, name)) is not None}
        broken = next((phase.stderr for phase in (built, ran) if phase and phase.status == "Error"), "")
        return Result(status=status_of(built, ran), run=ran, compile=built, files=files, message=broken, where=tier)

    def _memory(self, program: Program) -> int:
        return program.memory_limit_mb if program.memory_limit_mb > 0 else self.memory_limit_mb

    def _phase(
        self,
        tier: str,
        folders: tuple[Path, Path],
        command: tuple[str, ...],
        program: Program,
        seconds: float,
        stop: threading.Event,
    ) -> Phase:
        box, root = folders
        limits = replace(self._limits, memory_mb=self._memory(program), cpu_seconds=int(seconds) + 2)
        front = tiers.command(
            tier, box=box, root=root, limits=limits, readable=self._readable, environment=self._environment
        )
        bounds = Bounds(
            seconds=seconds,
            output_bytes=self.output_limit,
            memory_mb=2 * limits.memory_mb,
            disk_mb=limits.disk_mb,
        )
        stdin = (program.stdin or "").encode("utf-8", "surrogatepass")
        return contained([*front, *command], stdin, box, bounds, stop)


@contextmanager
def _folders() -> Iterator[tuple[Path, Path]]:
    """A box for the program and an empty folder to mount over, gone afterwards whatever is in them."""
    made = [Path(tempfile.mkdtemp(prefix=f"workbench-{kind}-")) for kind in ("box", "root")]
    try:
        if os.geteuid() == 0:
            for folder in made:
                os.chown(folder, tiers.UID, tiers.UID)
        yield made[0], made[1]
    finally:
        for folder in made:
            _remove(folder)


def _remove(folder: Path) -> None:
    try:
        shutil.rmtree(folder)
    except (OSError, RecursionError):
        # folders without rights, or nested deeper than Python recurses: the system's own tools can
        subprocess.run(["chmod", "-R", "u+rwx", "--", str(folder)], check=False, capture_output=True)
        subprocess.run(["rm", "-rf", "--", str(folder)], check=False, capture_output=True)


def _write(box: Path, files: Mapping[str, bytes]) -> None:
    for name, body in files.items():
        path = box / PurePosixPath(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)
    if os.geteuid() == 0:
        for path in box.rglob("*"):
            os.chown(path, tiers.UID, tiers.UID)


def _fetch(box: Path, name: str) -> bytes | None:
    """A plain file of the box; None for what is missing, too big, or reached through a link."""
    *folders, last = PurePosixPath(name).parts
    opened = [os.open(box, os.O_RDONLY | os.O_DIRECTORY)]
    try:
        for part in folders:
            opened.append(os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=opened[-1]))
        opened.append(os.open(last, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=opened[-1]))
        found = os.fstat(opened[-1])
        if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_FETCHED:
            return None
        with os.fdopen(os.dup(opened[-1]), "rb") as file:
            return file.read(MAX_FETCHED)
    except OSError:
        return None
    finally:
        for descriptor in opened:
            with contextlib.suppress(OSError):
                os.close(descriptor)


def _interpreter(python: str | None, packages: bool) -> tuple[str, tuple[str, ...], dict[str, str]]:
    """(path, folders to show, environment) of the Python inside."""
    base = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    chosen = Path(python) if python else base if _reachable(base) else Path("/usr/bin/python3")
    readable = [] if chosen.is_relative_to("/usr") else [str(_prefix(chosen))]
    environment = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": "/box",
        "LANG": "C.UTF-8",
        "PYTHONUTF8": "1",
        "OMP_NUM_THREADS": "1",  # a BLAS that reserves memory for many threads meets the memory limit
        "OPENBLAS_NUM_THREADS": "1",
    }
    if packages:
        site = next((path for path in sys.path if path.endswith("site-packages")), None)
        if site is None:
            raise SandboxError(message("packages=True", expected="an installed site-packages", found=sys.path))
        if not chosen.is_relative_to(base.parents[1]):
            _same_version(chosen)
        readable.append(site)
        environment["PYTHONPATH"] = site
    return str(chosen), tuple(readable), environment


def _prefix(python: Path) -> Path:
    return python.parents[1]


def _reachable(path: Path) -> bool:
    """Whether another user can run it: every folder above is open to all."""
    if os.geteuid() != 0:
        return True
    return all(folder.stat().st_mode & stat.S_IXOTH for folder in path.parents)


def _same_version(python: Path) -> None:
    ours = f"{sys.version_info.major}.{sys.version_info.minor}"
    asked = [str(python), "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    found = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    if found != ours:
        do = "give python= one of the same version that other users can reach"
        raise SandboxError(message(f"packages=True with {python}", expected=f"Python {ours}", found=found, do=do))
