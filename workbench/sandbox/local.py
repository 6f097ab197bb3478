"""`LocalSandbox`: runs programs on this machine, each isolated and limited in a fresh process and folder.

A `LocalWorkspace` is a folder for many commands, that can be saved and put back; each command is isolated and limited by itself.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import sys
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from workbench.base.config import require
from workbench.base.errors import SandboxError, unknown
from workbench.sandbox import boxes, memory, tiers
from workbench.sandbox.process import ProcessLimits, contained, in_turn, too_big
from workbench.sandbox.protocol import ProcessOutcome, Program, Result, SyncSandbox, opened, status_of

_SHELL = ("/bin/bash", "-c")
_OPEN_UP = "chmod -R u+rwX ."
_OPEN_UP_SECONDS = 20.0
_NO_MODULE = re.compile(r"ModuleNotFoundError: No module named '(\w+)'")
_DO = (
    "if the interpreter fails, pass python= an interpreter outside of home folders; if bubblewrap is missing, install it; if users "
    "cannot make namespaces, allow it (Ubuntu: sysctl kernel.apparmor_restrict_unprivileged_userns=0); or "
)
_ELSEWHERE = "run programs elsewhere: sandbox.remote(url), or sandbox.container() with Docker"


class _Language(NamedTuple):
    file: str
    run: tuple[str, ...]
    build: tuple[str, ...] = ()


class LocalSandbox(SyncSandbox):
    """`sandbox.local()`: runs programs on this machine, isolated by the best tier of isolation that passes its probe.

    `tier` is `bubblewrap` or `namespaces` (None: the first that works). A tier is used only after its probe, programs
    that try to escape (`tiers.ESCAPES`) and to hold memory beyond their limit (`tiers.WAYS_TO_HOLD`), have failed to. Where
    no tier passes, this raises `SandboxError` with the reasons; `allow_unsafe=True` then runs model code as an ordinary
    process of your own user, with your files and your network: only for code that you would run by hand.

    `python` is the interpreter of programs; one that is named brings its packages. By default it is this process's, without
    packages, or the system's where that cannot be shown. Of a home folder (yours, and what lies in /home and /root) programs
    see the interpreter's program, standard library and shared libraries, and no other file; elsewhere they see its folder.

    `packages=True` shows programs this process's installed packages, read-only. `packages=False` says that programs are to
    do without: one that imports numpy fails by its own fault. None, the default, does not show them and leaves the question
    open: `hides` names what is installed here and was missing there, and `rewards.code` asks for the decision.

    `output_limit` is how many bytes of stdout and of stderr are kept, `disk_limit_mb` what a program may hold in its folder,
    and in /tmp.

    `memory_limit_mb` is all that a program holds: its processes, shared memory, memfd, files in /tmp, buffers of pipes and
    sockets. Where this process can make a control group (cgroup 1, or 2 as root or in a group that was delegated), the
    kernel counts and ends the program. Else it is measured every 0.1 s; `describe()` says which. In both tiers a filter of
    system calls refuses memory that belongs to no process, larger socket buffers, vsock, keyrings, ptrace and io_uring.

    What stays open: between two measurements, a program's folder and /tmp (and without a group its memory) can grow beyond
    the limit by what 0.1 s allow. Its files are also in the page cache, which the kernel frees on demand. Deleted files
    that wait inside a socket are not seen, at most 128 of 16 MiB; where this process is not root, nor is what is in
    folders that the program may write but not read. Without a group, a user's pipes hold up to 64 MiB more;
    with one of version 1, TCP's buffers a quarter of the limit more. Thousands of folders take the disk seconds to remove.
    A program can end on purpose as one does that met a limit (`raise MemoryError`, a signal's code): `limit` then names it.
    Where this process lacks CAP_SYS_RESOURCE, a program can lower its oom_score_adj from 1000 to ours, never below.
    On processors other than x86_64 and aarch64 there is no filter.
    Processor time is shared: nothing keeps a program from using all cores until its time is up.
    """

    def __init__(
        self,
        *,
        tier: str | None = None,
        allow_unsafe: bool = False,
        python: str | None = None,
        packages: bool | None = None,
        max_concurrent: int | None = None,
        memory_limit_mb: int = 1024,
        disk_limit_mb: int = 64,
        output_limit: int = 1 << 20,
    ) -> None:
        require(memory_limit_mb >= 64, "memory_limit_mb", expected="≥ 64 (for Python itself)", found=memory_limit_mb)
        require(output_limit >= 1024, "output_limit", expected="≥ 1024 bytes", found=output_limit)
        self.max_concurrent = (os.cpu_count() or 1) if max_concurrent is None else max_concurrent
        require(self.max_concurrent >= 1, "max_concurrent", expected="≥ 1", found=max_concurrent)
        if tier is not None and tier not in tiers.TIERS:
            raise SandboxError(unknown("tier of isolation", tier, tiers.TIERS))
        self.memory_limit_mb = memory_limit_mb
        self.output_limit = output_limit
        self.disk_limit_mb = disk_limit_mb
        self.packages = packages
        if sys.platform != "linux":
            what = "code that a model wrote cannot run on this system"
            expected = "Linux, whose namespaces isolate a program"
            raise SandboxError(what, expected=expected, found=sys.platform, do=_ELSEWHERE)
        self.threads = ThreadPoolExecutor(self.max_concurrent, thread_name_prefix="workbench-sandbox")
        self.python, self.tier = "", ""
        reasons = []
        for world in tiers.worlds(python, bool(packages)):
            self._enter(world)
            for name in (tier,) if tier else tiers.TIERS:
                failures = tiers.failures(self, name)
                if not failures:
                    self.tier = name
                    return
                reasons.append(f"{self.python} in {name}: {', '.join(failures)}")
        if not allow_unsafe:
            what, expected = "model code cannot be run safely here", "a tier of isolation that passes its probe"
            raise SandboxError(what, expected=expected, found="; ".join(reasons), do=_DO + _ELSEWHERE)
        self.tier = "unsafe"

    def _enter(self, world: tiers.World) -> None:
        self.world, self.python = world, world.python
        build = ("/usr/bin/g++", "-std=c++17", "-O1", "main.cpp", "-o", "main.out")
        self._languages = {
            "python": _Language("main.py", (self.python, "-s", "-B", "main.py")),
            "bash": _Language("main.sh", ("/bin/bash", "main.sh")),
            "cpp": _Language("main.cpp", ("./main.out",), build),
        }

    def hides(self, words: str) -> str:
        """Return the package that the sandbox hid from a failed program, where `packages` was left open; else "".

        `words` is the program's stderr with a ModuleNotFoundError. The package must be installed beside this process,
        so that no program can make up a name.
        """
        missing = _NO_MODULE.search(words)
        return missing[1] if missing and self.packages is None and tiers.installed(missing[1]) else ""

    @property
    def languages(self) -> tuple[str, ...]:
        """The languages that can be run here: python always, bash and C++ where the shell or the compiler is installed.

        C++ is left out where the temporary folder is mounted `noexec`, as compiled programs could not be run there.
        """
        noexec = os.statvfs(tempfile.gettempdir()).f_flag & os.ST_NOEXEC
        tools = {name: (one.build or one.run)[0] for name, one in self._languages.items() if not (one.build and noexec)}
        return tuple(name for name, tool in tools.items() if name == "python" or Path(tool).exists())

    def describe(self) -> str:
        """Describe the sandbox's tier of isolation and limits in one line."""
        note = " (NO ISOLATION)" if self.tier == "unsafe" else ""
        counted = "counted by the kernel" if memory.place() else "measured"
        size = f"{self.memory_limit_mb} MiB a program, {counted}"
        return f"local sandbox, {self.tier}{note}, {size}, {self.max_concurrent} at a time"

    def __repr__(self) -> str:
        return f"LocalSandbox({self.tier!r}, python={self.python!r}, max_concurrent={self.max_concurrent})"

    async def execute(self, program: Program) -> Result:
        """Run one program in a fresh process and folder. A cancellation ends its processes."""
        stop = threading.Event()
        return await in_turn(self.threads, stop, self.execute_in, self.tier, program, stop)

    def execute_in(self, tier: str, program: Program, stop: threading.Event | None = None) -> Result:
        """Run one program in the given tier of isolation and wait for its result; setting `stop` ends it."""
        if program.language not in self.languages:
            message = f"this sandbox cannot run {program.language}; it runs {', '.join(self.languages)}"
            return Result(status="SandboxError", message=message, where=tier)
        language, stop = self._languages[program.language], stop or threading.Event()
        most = program.memory_limit_mb if program.memory_limit_mb > 0 else self.memory_limit_mb
        with ExitStack() as stack:
            box, root = (stack.enter_context(boxes.folder(kind)) for kind in ("box", "root"))
            boxes.write(box, {**program.files, language.file: program.code.encode("utf-8", "surrogatepass")})
            phase = partial(self.phase, tier, box, root, stop)
            built = ran = None
            if language.build:  # a compiler needs more room than the program that it makes
                built = phase(language.build, max(most, 2048), program.compile_timeout)
            if built is None or built.return_code == 0:
                ran = phase(language.run, most, program.run_timeout, program.stdin or "")
            files = {name: body for name in program.fetch_files if (body := boxes.fetch(box, name)) is not None}
        broken = next((one.stderr for one in (built, ran) if one and one.status == "Error"), "")
        return Result(status=status_of(built, ran), run=ran, compile=built, files=files, message=broken, where=tier)

    def phase(
        self,
        tier: str,
        box: Path,
        root: Path,
        stop: threading.Event,
        command: Sequence[str],
        memory_mb: int,
        seconds: float,
        stdin: str = "",
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> ProcessOutcome:
        """Run one command in the folder `box`, with the empty folder `root` for mounts, and wait for its end."""
        sizes = {"output_bytes": self.output_limit, "memory_mb": memory_mb, "disk_mb": self.disk_limit_mb}
        limits = ProcessLimits(seconds=seconds, **sizes)
        world = replace(self.world, environment={**self.world.environment, **environment})
        fed = stdin.encode("utf-8", "surrogatepass")
        with ExitStack() as stack:
            try:
                group = stack.enter_context(memory.group(memory_mb))
            except OSError as error:
                return ProcessOutcome(status="Error", stderr=f"cannot make a control group: {error}")
            front = tiers.command(tier, group, box=box, root=root, limits=limits, world=world)
            return contained([*front, *command], fed, box, limits, stop, group)

    async def workspace(
        self, files: Mapping[str, bytes | str] | None = None, *, image: str | None = None
    ) -> LocalWorkspace:
        """Open a folder with these files for many commands (`sandbox.Workspace`), each isolated as a program is.

        Raises `SandboxError` for an `image`: programs here see this machine's system.
        """
        if image is not None:
            do = "use sandbox.container(), or leave the image out"
            raise SandboxError(f"image {image!r} of a workspace in the {self!r}", expected="none", found=image, do=do)
        return await opened(LocalWorkspace(self), files)


class LocalWorkspace:
    """A folder of this machine, which commands see as `/box`; made by `LocalSandbox.workspace`.

    The files in `/box` stay from one command to the next, within the sandbox's limits of disk and of files; `/tmp`, processes
    and the shell's state (variables, `cd`) are each command's own. A snapshot is a copy of the folder.
    """

    def __init__(self, sandbox: LocalSandbox) -> None:
        self._sandbox = sandbox
        self._box, self._root = boxes.make("box"), boxes.make("root")
        self._turn = asyncio.Lock()
        self._left = weakref.finalize(self, _removed, self._box, self._root)

    async def run(
        self, command: str, *, seconds: float = 10.0, memory_mb: int = -1, environment: Mapping[str, str] | None = None
    ) -> Result:
        """Run a shell command in the folder. A command that leaves more there than the disk limit allows gets the limit
        `disk`."""
        async with self._turn:
            return await self._ran(command, seconds, memory_mb, environment or {})

    async def _ran(self, command: str, seconds: float, memory_mb: int, environment: Mapping[str, str]) -> Result:
        self._check_open()
        sandbox, stop = self._sandbox, threading.Event()

        def work() -> Result:
            most = memory_mb if memory_mb > 0 else sandbox.memory_limit_mb
            arguments = (sandbox.tier, self._box, self._root, stop, (*_SHELL, command), most, seconds)
            ran = sandbox.phase(*arguments, environment=environment)
            if ran.limit is None and too_big(self._box, sandbox.disk_limit_mb << 20):
                ran = replace(ran, limit="disk")
            broken = ran.stderr if ran.status == "Error" else ""
            return Result(status=status_of(ran), run=ran, message=broken, where=sandbox.tier)

        return await in_turn(sandbox.threads, stop, work)

    async def write(self, files: Mapping[str, bytes | str]) -> None:
        """Write files into the folder, in place of whatever has their names there; no link is followed."""
        async with self._turn:
            await self._unlock_folder()
            await asyncio.to_thread(boxes.write, self._box, files)

    async def read(self, name: str) -> bytes | None:
        """Read a file of the folder; None where there is no plain file of this name, or it is reached through a link."""
        async with self._turn:
            self._check_open()
            return await asyncio.to_thread(boxes.fetch, self._box, name)

    async def snapshot(self) -> FolderSnapshot:
        """Copy the folder, and return the copy."""
        async with self._turn:
            await self._unlock_folder()
            return await asyncio.to_thread(FolderSnapshot, self._box)

    async def restore(self, snapshot: FolderSnapshot) -> None:
        """Put the folder back as it was when `snapshot` was taken."""
        async with self._turn:
            await self._unlock_folder()
            await asyncio.to_thread(snapshot.put, self._box)

    async def copy(self) -> LocalWorkspace:
        """Make a second workspace with a copy of the folder."""
        other = LocalWorkspace(self._sandbox)
        await other.restore(await self.snapshot())
        return other

    async def close(self) -> None:
        """Remove the folder; a second call does nothing."""
        async with self._turn:
            await asyncio.to_thread(self._left)

    async def _unlock_folder(self) -> None:
        """Make all of the folder readable and writable for this process, as a command may have closed it to its owner."""
        self._check_open()
        if os.geteuid() != 0:
            await self._ran(_OPEN_UP, _OPEN_UP_SECONDS, -1, {})

    def _check_open(self) -> None:
        if not self._left.alive:
            raise SandboxError("the workspace of the sandbox is closed", do="open another one: sandbox.workspace()")

    def __repr__(self) -> str:
        return f"LocalWorkspace({self._sandbox.tier!r}{'' if self._left.alive else ', closed'})"


class FolderSnapshot:
    """A copy of a workspace's folder, removed when nothing refers to it any more."""

    def __init__(self, box: Path) -> None:
        self._place = boxes.make("box")
        self._left = weakref.finalize(self, boxes.remove, self._place)
        boxes.copied(box, self._place / "files")

    def put(self, box: Path) -> None:
        """Replace the contents of the folder `box` by the copy."""
        boxes.remove(box)
        shutil.rmtree(box, ignore_errors=True)
        boxes.copied(self._place / "files", box)


def _removed(*folders: Path) -> None:
    for folder in folders:
        boxes.remove(folder)
