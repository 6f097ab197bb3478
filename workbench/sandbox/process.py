"""Runs one sandboxed process from start to end: feeds it, reads it, watches its limits, kills all that it started."""

from __future__ import annotations

import asyncio
import contextlib
import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from workbench.base.child import code_of, end_group
from workbench.sandbox import memory
from workbench.sandbox.protocol import Limit, ProcessOutcome, last_line, ran_out_of_memory

T = TypeVar("T")
WATCH_SECONDS = 0.1
"""Seconds between two measurements of a running sandbox's memory and disk."""
MAX_ENTRIES = 10_000
"""Files and folders that a program may make."""
FILE_MB = 16
"""Size in MiB of the largest file that a program may make."""
_GRACE = 1.0
_OVER = 64
"""Output beyond the limit is read and dropped, up to this many times the limit; beyond that the program is ended."""


@dataclass(frozen=True, kw_only=True)
class ProcessLimits:
    """Limits of one sandboxed process and its child processes."""

    seconds: float
    """Seconds of wall time; the limit of processor time is two seconds more."""
    output_bytes: int
    """Bytes that are kept of each of stdout and stderr."""
    memory_mb: int
    """Limit in MiB of each process's address space, and of the memory of all processes together."""
    disk_mb: int


async def in_turn(threads: Executor, stop: threading.Event, work: Callable[..., T], *args: Any) -> T:
    """Do `work` in one of a sandbox's threads, as many as programs may run at a time; a cancellation sets `stop`."""
    try:
        return await asyncio.get_running_loop().run_in_executor(threads, work, *args)
    except asyncio.CancelledError:
        stop.set()
        raise


class _Pipe:
    """Keeps the first bytes of an output stream and counts the rest. It always reads on, as a full pipe would block the
    program."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.kept = bytearray()
        self.seen = 0

    def take(self, block: bytes) -> None:
        self.seen += len(block)
        self.kept += block[: max(self.limit - len(self.kept), 0)]

    @property
    def cut(self) -> bool:
        return self.seen > self.limit

    def text(self) -> str:
        try:
            # a character cut in two at the limit is no error of the program
            return self.kept.decode("utf-8", "ignore" if self.cut else "strict")
        except UnicodeDecodeError as error:
            return f"[DecodeError] {error}"  # the service's words


def contained(
    command: Sequence[str],
    stdin: bytes,
    box: Path,
    limits: ProcessLimits,
    stop: threading.Event,
    group: memory.ControlGroup | None = None,
) -> ProcessOutcome:
    """Run a command until it ends, meets a limit, or `stop` is set; its process group is ended before this returns.

    `group` is the control group that the command enters; without one its memory is measured every `WATCH_SECONDS`.
    """
    began = time.perf_counter()
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    try:  # without an environment: an init's can be read from inside
        process = subprocess.Popen(command, **pipes, env={}, cwd=box, start_new_session=True, bufsize=0)
    except OSError as error:
        return ProcessOutcome(status="Error", stderr=f"cannot start {command[0]}: {error}")
    out, err = _Pipe(limits.output_bytes), _Pipe(limits.output_bytes)
    with contextlib.ExitStack() as stack, process, selectors.DefaultSelector() as selector:
        _register(process, selector, stdin, out, err)
        if hasattr(os, "pidfd_open"):  # its end wakes the selector
            ended = os.pidfd_open(process.pid)
            stack.callback(os.close, ended)
            selector.register(ended, selectors.EVENT_READ, None)
        try:
            limit = _pump(process, selector, (out, err), box, limits, stop, group)
        finally:
            end_group(process)  # also after a clean end: in the weakest tier a child may outlive its parent
        left_behind = not _drain(selector)
    cut = out.cut or err.cut
    phase = ProcessOutcome(
        status="TimeLimitExceeded" if limit == "time" else "Finished",
        return_code=None if limit == "time" else process.returncode,
        stdout=out.text(),
        stderr=err.text(),
        seconds=time.perf_counter() - began,
        limit=limit or ("output" if cut else None),
        truncated=cut,
        left_behind=left_behind,
    )
    return phase if phase.limit else _with_kernel_limit(phase, limits)


def _register(
    process: subprocess.Popen[bytes], selector: selectors.BaseSelector, stdin: bytes, out: _Pipe, err: _Pipe
) -> None:
    assert process.stdin and process.stdout and process.stderr
    os.set_blocking(process.stdin.fileno(), False)
    selector.register(process.stdin, selectors.EVENT_WRITE, memoryview(stdin))
    selector.register(process.stdout, selectors.EVENT_READ, out)
    selector.register(process.stderr, selectors.EVENT_READ, err)
    for pipe in (process.stdin, process.stdout, process.stderr):
        os.fchmod(pipe.fileno(), 0o666)  # programs open /dev/stdin, and are another user's


def _pump(
    process: subprocess.Popen[bytes],
    selector: selectors.BaseSelector,
    pipes: tuple[_Pipe, _Pipe],
    box: Path,
    limits: ProcessLimits,
    stop: threading.Event,
    group: memory.ControlGroup | None,
) -> Limit | None:
    """Move the bytes of the pipes until the process ends or meets a limit; return that limit or None."""
    now = time.monotonic()
    deadline, watch = now + limits.seconds, now + WATCH_SECONDS
    while code_of(process) is None:
        now = time.monotonic()
        if now >= deadline or stop.is_set():
            return "time"
        if any(pipe.seen > pipe.limit * _OVER for pipe in pipes):
            return "output"
        if now >= watch:
            watch = now + WATCH_SECONDS
            tree = _tree(process.pid)
            if group.met() if group else memory.held(tree) > limits.memory_mb << 20:
                return "memory"
            inside = memory.tmp(tree)
            entries = inside.f_files - inside.f_ffree if inside else 0
            if too_big(box, (limits.disk_mb << 20) - _deleted(tree, box), entries):
                return "disk"
        _move(selector, min(deadline, watch) - now)
    return "memory" if group and group.met() else None


def _move(selector: selectors.BaseSelector, seconds: float) -> None:
    """Wait up to `seconds` for a pipe that is ready, and move one block."""
    for key, _ in selector.select(max(seconds, 0.0)):
        if isinstance(key.data, _Pipe):
            block = os.read(key.fd, 1 << 16)
            key.data.take(block)
            if not block:
                selector.unregister(key.fileobj)
        elif isinstance(key.data, memoryview):
            _feed_stdin(selector, key)


def _feed_stdin(selector: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
    left: memoryview = key.data
    try:
        left = left[os.write(key.fd, left[: 1 << 16]) :] if left else left
    except BlockingIOError:
        return
    except BrokenPipeError:  # it need not read its input
        left = left[:0]
    if left:
        selector.modify(key.fileobj, selectors.EVENT_WRITE, left)
    else:
        selector.unregister(key.fileobj)
        key.fileobj.close()  # type: ignore[union-attr]


def _drain(selector: selectors.BaseSelector) -> bool:
    """Read what the pipes still hold; return whether their other ends are closed. They stay open for a daemon in the
    weakest tier."""
    for key in [key for key in selector.get_map().values() if not isinstance(key.data, _Pipe)]:
        selector.unregister(key.fileobj)
    deadline = time.monotonic() + _GRACE
    while selector.get_map() and time.monotonic() < deadline:
        _move(selector, deadline - time.monotonic())
    return not selector.get_map()


def _with_kernel_limit(phase: ProcessOutcome, limits: ProcessLimits) -> ProcessOutcome:
    """Return the outcome with the limit that the kernel enforced, recognised by the exit code and the last words of
    stderr."""
    code = phase.return_code
    uncaught = code in (1, 128 + signal.SIGABRT, -signal.SIGABRT)  # what Python and C++ end with
    last = last_line(phase.stderr)
    if uncaught and (ran_out_of_memory(phase.stderr) or "Cannot allocate memory" in last):
        return replace(phase, limit="memory")
    possible = phase.seconds * (os.cpu_count() or 1) >= limits.seconds
    if possible and code in (128 + signal.SIGXCPU, -signal.SIGXCPU):
        return replace(phase, limit="time", status="TimeLimitExceeded", return_code=None)
    if code in (128 + signal.SIGXFSZ, -signal.SIGXFSZ) or (
        uncaught and ("File too large" in last or "No space left on device" in last)
    ):
        return replace(phase, limit="disk")
    return phase


def _tree(pid: int) -> list[int]:
    """Return the ids of a process and all its descendants."""
    parents = dict[int, int]()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    tree = [pid]
    for process in tree:  # children are appended while the list is read
        tree += [child for child, parent in parents.items() if parent == process]
    return tree


def _deleted(tree: Sequence[int], box: Path) -> int:
    """Add up the bytes of the box's deleted files that processes hold open or mapped; a mapped one counts as the
    largest allowed file."""
    device, sizes = box.stat().st_dev, dict[int, int]()
    for pid in tree:
        with contextlib.suppress(OSError):  # it has ended meanwhile
            for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
                if line.endswith(" (deleted)") and " /box/" in line:
                    sizes[int(line.split()[4])] = FILE_MB << 20
            for opened in os.scandir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    facts = opened.stat()
                    if facts.st_dev == device and facts.st_nlink == 0:
                        sizes[facts.st_ino] = facts.st_blocks * 512
    return sum(sizes.values())


def too_big(box: Path, limit: int, entries: int = 0) -> bool:
    """Return whether a folder holds too many bytes, too many entries (`entries` more are counted elsewhere) or too deep
    paths.

    Links are never followed.
    """
    waiting, size = [str(box)], 0
    while waiting:
        folder = waiting.pop()
        try:
            with os.scandir(folder) as listed:
                for entry in listed:
                    entries += 1
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                    else:
                        size += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entries > MAX_ENTRIES or size > limit:
                        return True
        except OSError as error:
            # it went while we looked, or the program closed it to us; else a path longer than the system takes
            if not isinstance(error, FileNotFoundError | PermissionError):
                return True
    return False
