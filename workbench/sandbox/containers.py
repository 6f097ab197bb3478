"""`Containers`: workspaces that are containers of Docker or Podman, each with an image's file system of its own."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import shutil
import subprocess
import tarfile
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Event

from workbench.base.config import require
from workbench.base.errors import SandboxError, first_line
from workbench.sandbox import boxes
from workbench.sandbox.process import ProcessLimits, contained, in_turn
from workbench.sandbox.protocol import ProcessOutcome, Result, checked, opened, status_of

ENGINES = ("podman", "docker")
"""Container engines in order of preference: Podman needs no daemon that runs as root."""
_SECONDS = 120.0
"""Time limit in seconds of the engine's operations other than commands: starting, copying, saving."""
_KILL_SECONDS = 10.0
_PROCESSES = 256


class Containers:
    """`sandbox.container(image)`: workspaces in containers, for episodes that need an image's system (SWE tasks).

    A workspace is one container that waits; commands run in it by `exec`, as its image's user, without network, further
    rights or capabilities. Its whole file system stays from command to command, and a snapshot is an image of it (`commit`);
    `/tmp` is in memory and is not saved. When a command ends, all its processes are killed. A container shares the kernel with
    this machine, as the local sandbox does; with Docker its root is this machine's, too, unless the daemon maps users.

    Memory, processes and processor time are limited by the engine. The disk is measured after each command, and each file
    limited: what a command may write meanwhile is bounded by its seconds alone.

    Args:
        image: the image of workspaces that name none; None: each must. It is not fetched: there must be a local one.
        engine: `podman` or `docker`; None: the first that answers.
        folder: the working folder, for files and commands; it is made where the image lacks it.
        max_concurrent: commands at a time; None: this machine's processors.
        memory_limit_mb: MiB of memory of a container.
        disk_limit_mb: MiB that a container may add to its image.
        cpus: processors of a container.
        output_limit: bytes of stdout, and of stderr, that are kept.
        ready: containers of `image` that are started ahead, so that opening a workspace need not wait.

    Raises `SandboxError` where no engine answers.
    """

    def __init__(
        self,
        image: str | None = None,
        *,
        engine: str | None = None,
        folder: str = "/box",
        max_concurrent: int | None = None,
        memory_limit_mb: int = 1024,
        disk_limit_mb: int = 1024,
        cpus: float = 1.0,
        output_limit: int = 1 << 20,
        ready: int = 0,
    ) -> None:
        require(engine in (None, *ENGINES), "engine", expected=f"one of {ENGINES}, or None", found=engine)
        require(folder.startswith("/"), "folder", expected="an absolute path in the container", found=folder)
        require(cpus > 0, "cpus", expected="> 0", found=cpus)
        require(ready == 0 or image is not None, "ready", expected="0 without an image", found=ready)
        self.engine = answering(engine)
        self.image, self.folder, self.ready = image, folder, ready
        self.memory_limit_mb, self.disk_limit_mb, self.cpus = memory_limit_mb, disk_limit_mb, cpus
        self.output_limit = output_limit
        self.max_concurrent = max_concurrent or os.cpu_count() or 1
        self.threads = ThreadPoolExecutor(self.max_concurrent, thread_name_prefix="workbench-container")
        self._ahead: list[asyncio.Future[ContainerWorkspace]] = []

    def describe(self) -> str:
        """Describe the engine and the limits in one line."""
        return f"containers of {self.engine}, {self.memory_limit_mb} MiB and {self.cpus:g} processors each, no network"

    def __repr__(self) -> str:
        return f"Containers({self.image!r}, engine={self.engine!r})"

    async def workspace(
        self, files: Mapping[str, bytes | str] | None = None, *, image: str | None = None
    ) -> ContainerWorkspace:
        """Start a container of `image` with these files in its working folder. Raises `SandboxError` where it cannot
        start."""
        chosen = image or self.image
        if chosen is None:
            raise SandboxError("image of a workspace", expected="image= here, or in Containers(image)", found="none")
        if chosen == self.image and self.ready:
            wanted = self.ready + 1 - len(self._ahead)
            self._ahead += [asyncio.ensure_future(self.started(chosen)) for _ in range(wanted)]
            workspace = await self._ahead.pop(0)
        else:
            workspace = await self.started(chosen)
        return await opened(workspace, files)

    async def started(self, image: str) -> ContainerWorkspace:
        """Start a new container of `image`, and return it as a workspace."""
        workspace = ContainerWorkspace(self, f"workbench-{os.getpid()}-{os.urandom(6).hex()}")
        await asyncio.to_thread(output_of, [self.engine, *self.start(image, workspace.name)])
        return workspace

    def start(self, image: str, name: str) -> list[str]:
        """Return the engine's arguments that start a container which waits for commands."""
        memory = f"{self.memory_limit_mb}m"
        return [
            *("run", "--detach", "--pull=never", "--name", name, "--hostname", "sandbox", "--network", "none"),
            *("--memory", memory, "--memory-swap", memory, "--cpus", f"{self.cpus:g}", "--pids-limit", str(_PROCESSES)),
            *("--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--ipc", "private"),
            *("--ulimit", "core=0", "--ulimit", f"fsize={self.disk_limit_mb << 20}", "--ulimit", "nofile=1024"),
            *("--tmpfs", f"/tmp:rw,exec,mode=1777,size={self.disk_limit_mb}m", "--workdir", self.folder),
            *("--entrypoint", "/bin/sh", image, "-c", "while :; do sleep 3600; done"),
        ]

    def command(self, name: str, command: str, environment: Mapping[str, str]) -> list[str]:
        """Return the engine's arguments that run a shell command in a container."""
        variables = [part for key, value in environment.items() for part in ("--env", f"{key}={value}")]
        return ["exec", "--interactive", "--workdir", self.folder, *variables, name, "/bin/sh", "-c", command]

    def run_in(
        self, name: str, command: str, seconds: float, environment: Mapping[str, str], stop: Event
    ) -> ProcessOutcome:
        """Run a command in a container and end all its processes; where these cannot be ended the container is started
        anew."""
        with boxes.folder("root") as empty:
            limits = ProcessLimits(seconds=seconds, output_bytes=self.output_limit, memory_mb=1 << 20, disk_mb=1)
            line = [*_client(), self.engine, *self.command(name, command, environment)]
            ran = contained(line, b"", empty, limits, stop)
        try:
            output_of([self.engine, "exec", name, "/bin/sh", "-c", "kill -9 -1"], seconds=_KILL_SECONDS)
        except SandboxError:  # no room for one more process: they go with the container, its files stay
            output_of([self.engine, "kill", name])
            output_of([self.engine, "start", name])
        size = output_of([self.engine, "container", "inspect", "--size", "--format", "{{.SizeRw}}", name])
        full = ran.limit is None and int(size or 0) > self.disk_limit_mb << 20
        return replace(ran, limit="disk") if full else ran


class ContainerWorkspace:
    """A container as a workspace (`sandbox.Workspace`); made by `Containers.workspace`."""

    def __init__(self, containers: Containers, name: str) -> None:
        self._all, self.name = containers, name
        self._turn = asyncio.Lock()
        self._of: ContainerSnapshot | None = None
        self._left = weakref.finalize(self, _removed, [containers.engine, "rm", "--force", "--volumes", name])

    async def run(
        self, command: str, *, seconds: float = 10.0, memory_mb: int = -1, environment: Mapping[str, str] | None = None
    ) -> Result:
        """Run a shell command in the working folder; the memory limit is that of `Containers`, whatever `memory_mb` is."""
        async with self._turn:
            work, stop = self._all.run_in, Event()
            ran = await in_turn(self._all.threads, stop, work, self.name, command, seconds, environment or {}, stop)
        broken = ran.stderr if ran.status == "Error" else ""
        return Result(status=status_of(ran), run=ran, message=broken, where=self._all.engine)

    async def write(self, files: Mapping[str, bytes | str]) -> None:
        """Copy files into the working folder."""
        if files:
            await self._engine("cp", "-", f"{self.name}:{self._all.folder}", stdin=_packed(files))

    async def read(self, name: str) -> bytes | None:
        """Read a file of the working folder; None where there is no plain file of this name."""
        try:
            packed = await self._engine("cp", f"{self.name}:{self._all.folder}/{checked(name)}", "-")
        except SandboxError:
            return None
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            first = archive.next()
            content = archive.extractfile(first) if first and first.isfile() else None
            return content.read() if content else None

    async def snapshot(self) -> ContainerSnapshot:
        """Save the container's file system as an image."""
        return ContainerSnapshot(self._all.engine, (await self._engine("commit", self.name)).decode().strip())

    async def restore(self, snapshot: ContainerSnapshot) -> None:
        """Start the container anew from a snapshot."""
        await self._engine("rm", "--force", "--volumes", self.name)
        await self._engine(*self._all.start(snapshot.id, self.name))

    async def copy(self) -> ContainerWorkspace:
        """Make a second container with the same file system."""
        saved = await self.snapshot()
        other = await self._all.started(saved.id)
        other._of = saved  # its image must outlive it
        return other

    async def close(self) -> None:
        """Remove the container; a second call does nothing."""
        async with self._turn:
            await asyncio.to_thread(self._left)

    async def _engine(self, *arguments: str, stdin: bytes = b"") -> bytes:
        async with self._turn:
            return await asyncio.to_thread(output_of, [self._all.engine, *arguments], stdin)

    def __repr__(self) -> str:
        return f"ContainerWorkspace({self.name!r})"


class ContainerSnapshot:
    """A snapshot of a container, as an image of the engine; the image is removed when nothing refers to it any more."""

    def __init__(self, engine: str, id: str) -> None:
        self.id = id
        self._left = weakref.finalize(self, _removed, [engine, "rmi", "--force", id])


def answering(engine: str | None = None) -> str:
    """Return the container engine that answers: `engine`, or the first of `ENGINES`. Raises `SandboxError` with each
    engine's reason."""
    reasons = []
    for name in (engine,) if engine else ENGINES:
        try:
            if shutil.which(name) is None:
                raise SandboxError(f"{name} is not installed")
            output_of([name, "info"], seconds=_KILL_SECONDS)
        except SandboxError as error:
            reasons.append(f"{name}: {first_line(error)}")
        else:
            return name
    do = "install and start Podman or Docker, or use sandbox.local(), which needs neither"
    raise SandboxError("no container engine works", expected="Podman or Docker", found="; ".join(reasons), do=do)


def output_of(command: Sequence[str], stdin: bytes = b"", *, seconds: float = _SECONDS) -> bytes:
    """Run a container engine's command and return what it prints. Raises `SandboxError` where it fails or takes more
    than `seconds`."""
    try:
        ran = subprocess.run(command, input=stdin, capture_output=True, timeout=seconds, check=False)
    except (OSError, subprocess.TimeoutExpired) as cause:
        raise SandboxError(f"{command[0]} {command[1]} failed", found=str(cause)) from cause
    if ran.returncode:
        stderr = ran.stderr.decode(errors="replace").strip()[-300:]
        raise SandboxError(f"{command[0]} {command[1]} failed with exit code {ran.returncode}", found=stderr)
    return ran.stdout


def _removed(command: Sequence[str]) -> None:
    with contextlib.suppress(SandboxError):
        output_of(command)


def _client() -> list[str]:
    """Return the command line `env NAME=…` that passes the variables by which the engine's client finds its daemon and
    settings."""
    names = ("HOME", "PATH", "DOCKER_HOST", "DOCKER_CONFIG", "DOCKER_CONTEXT", "CONTAINER_HOST", "XDG_RUNTIME_DIR")
    return ["/usr/bin/env", *(f"{name}={os.environ[name]}" for name in names if name in os.environ)]


def _packed(files: Mapping[str, bytes | str]) -> bytes:
    """Pack files as a tar archive; a file whose content begins with `#!` becomes executable."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, body in files.items():
            content = body.encode("utf-8", "surrogatepass") if isinstance(body, str) else body
            entry = tarfile.TarInfo(str(checked(name)))
            entry.size, entry.mode = len(content), 0o755 if content[:2] == b"#!" else 0o644
            archive.addfile(entry, io.BytesIO(content))
    return packed.getvalue()
