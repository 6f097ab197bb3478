"""Workspaces: a file system for many commands, that can be saved and put back; each command is isolated and limited by itself."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
import weakref
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from workbench.base.errors import SandboxError
from workbench.sandbox import boxes
from workbench.sandbox.process import too_big
from workbench.sandbox.protocol import Phase, Result, status_of

_SHELL = ("/bin/bash", "-c")
_OPEN_UP = "chmod -R u+rwX ."
_SECONDS = 20.0
"""Time limit of our own work in a workspace."""


@runtime_checkable
class Workspace(Protocol):
    """Protocol of workspaces. Their commands run one at a time, and no process of a command outlives it.

    Each method raises `SandboxError` where the sandbox fails, never for what a command does.
    """

    async def run(
        self, command: str, *, seconds: float = 10.0, memory_mb: int = -1, environment: Mapping[str, str] | None = None
    ) -> Result:
        """Run a shell command in the working folder, with `seconds` of wall time and `memory_mb` MiB (-1: the sandbox's)."""

    async def write(self, files: Mapping[str, bytes | str]) -> None:
        """Write files (relative path → content) into the working folder, in place of whatever has their names."""

    async def read(self, name: str) -> bytes | None:
        """A file of the working folder; None where there is no plain file of this name."""

    async def snapshot(self) -> Any:
        """Save the file system as it is now; the snapshot is dropped when nothing refers to it any more."""

    async def restore(self, snapshot: Any) -> None:
        """Put the file system back as it was when `snapshot` was taken, in this workspace or in another of its sandbox."""

    async def copy(self) -> Workspace:
        """A second workspace with the same files."""

    async def close(self) -> None:
        """Remove the workspace; a second call does nothing."""


@runtime_checkable
class Workspaces(Protocol):
    """Protocol of sandboxes that have workspaces: `LocalSandbox` and `Containers`."""

    async def workspace(self, files: Mapping[str, bytes | str] | None = None, *, image: str | None = None) -> Workspace:
        """Open a workspace with these files (relative path → content), of this container image where it is given."""


class _Runs(Protocol):
    """What a `LocalWorkspace` needs of its `LocalSandbox`."""

    tier: str
    memory_limit_mb: int
    disk_limit_mb: int

    @property
    def phase(self) -> Callable[..., Phase]: ...

    @property
    def in_turn(self) -> Callable[..., Awaitable[Any]]: ...


class LocalWorkspace:
    """A folder of this machine, which commands see as `/box`; made by `LocalSandbox.workspace`.

    The files in `/box` stay from one command to the next, within the sandbox's limits of disk and of files; `/tmp`, processes
    and the shell's state (variables, `cd`) are each command's own. A snapshot is a copy of the folder.
    """

    def __init__(self, sandbox: _Runs) -> None:
        self._sandbox = sandbox
        self._box, self._root = boxes.make("box"), boxes.make("root")
        self._turn = asyncio.Lock()
        self._left = weakref.finalize(self, _removed, self._box, self._root)

    async def run(
        self, command: str, *, seconds: float = 10.0, memory_mb: int = -1, environment: Mapping[str, str] | None = None
    ) -> Result:
        """Run a shell command in the folder. One that leaves more there than the disk limit has met it."""
        async with self._turn:
            return await self._ran(command, seconds, memory_mb, environment or {})

    async def _ran(self, command: str, seconds: float, memory_mb: int, environment: Mapping[str, str]) -> Result:
        self._check_open()
        sandbox, stop = self._sandbox, threading.Event()

        def work() -> Result:
            most = memory_mb if memory_mb > 0 else sandbox.memory_limit_mb
            given = (sandbox.tier, self._box, self._root, stop, (*_SHELL, command), most, seconds)
            ran = sandbox.phase(*given, environment=environment)
            if ran.limit is None and too_big(self._box, sandbox.disk_limit_mb << 20):
                ran = replace(ran, limit="disk")
            broken = ran.stderr if ran.status == "Error" else ""
            return Result(status=status_of(ran), run=ran, message=broken, where=sandbox.tier)

        return await sandbox.in_turn(stop, work)

    async def write(self, files: Mapping[str, bytes | str]) -> None:
        """Write files into the folder, in place of whatever has their names there; no link is followed."""
        async with self._turn:
            await self._own()
            await asyncio.to_thread(boxes.write, self._box, files)

    async def read(self, name: str) -> bytes | None:
        """A file of the folder; None where there is no plain file of this name, or it is reached through a link."""
        async with self._turn:
            self._check_open()
            return await asyncio.to_thread(boxes.fetch, self._box, name)

    async def snapshot(self) -> Snapshot:
        """Copy the folder."""
        async with self._turn:
            await self._own()
            return await asyncio.to_thread(Snapshot, self._box)

    async def restore(self, snapshot: Snapshot) -> None:
        """Put the folder back as it was."""
        async with self._turn:
            await self._own()
            await asyncio.to_thread(snapshot.put, self._box)

    async def copy(self) -> LocalWorkspace:
        """A second workspace with a copy of the folder."""
        other = LocalWorkspace(self._sandbox)
        await other.restore(await self.snapshot())
        return other

    async def close(self) -> None:
        """Remove the folder; a second call does nothing."""
        async with self._turn:
            await asyncio.to_thread(self._left)

    async def _own(self) -> None:
        """Make sure that we may read and write all of the folder: a command can have closed it to its owner."""
        self._check_open()
        if os.geteuid() != 0:
            await self._ran(_OPEN_UP, _SECONDS, -1, {})

    def _check_open(self) -> None:
        if not self._left.alive:
            raise SandboxError("this workspace is closed", do="open another one")

    def __repr__(self) -> str:
        return f"LocalWorkspace({self._sandbox.tier!r}{'' if self._left.alive else ', closed'})"


class Snapshot:
    """A copy of a workspace's folder, removed when nothing refers to it any more."""

    def __init__(self, box: Path) -> None:
        self._place = boxes.make("box")
        self._left = weakref.finalize(self, boxes.remove, self._place)
        boxes.copied(box, self._place / "files")

    def put(self, box: Path) -> None:
        """Make the folder `box` the same as the copy."""
        boxes.remove(box)
        shutil.rmtree(box, ignore_errors=True)
        boxes.copied(self._place / "files", box)


def _removed(*folders: Path) -> None:
    for folder in folders:
        boxes.remove(folder)
