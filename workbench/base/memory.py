"""Memory that an error keeps: after an interrupt the prompt still holds all local variables of the traceback's frames.

Python keeps the last error that reached the prompt (`sys.last_value`), IPython keeps its traceback once more, and a
traceback keeps its frames: a gigabyte that a cell held when it was stopped is held until something else raises. `%debug`
needs it, so nothing is dropped before the next stage runs, or `free_memory()` is called.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import inspect
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import lru_cache
from traceback import walk_tb
from types import AsyncGeneratorType, CoroutineType, FrameType, GeneratorType
from typing import TypeVar

from workbench.base.errors import Interrupted, OutOfMemory, WorkerLost, first_line

log = logging.getLogger("workbench")
T = TypeVar("T")

_RUNS_ON = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_FRAMES = {GeneratorType: "gi_frame", CoroutineType: "cr_frame", AsyncGeneratorType: "ag_frame"}
_ARENA_MAX = -8
"""M_ARENA_MAX of glibc's malloc.h."""
_SEPARATE = {-3: 1 << 20, -1: 64 << 20, -2: 16 << 20}
"""M_MMAP_THRESHOLD, and for the blocks below it M_TRIM_THRESHOLD and M_TOP_PAD: the heap grows and shrinks seldom."""
_forgotten: BaseException | None = None


def free_memory() -> int:
    """Free the local variables that the last error's traceback holds, collect garbage, and return unused memory to the
    system.

    Returns by how many bytes this process became smaller (0 without /proc). Values that still have a name stay, and so
    do results that IPython keeps in `Out`. `%debug` of that error then has no local variables to show.
    """
    before = resident()
    forget_last_error()
    release()
    return max(before - resident(), 0)


def forget_last_error() -> bool:
    """Clear the local variables in the last traceback that reached the prompt; returns whether there was a new one.

    The error's message and lines stay, and so do frames that are still running. Then garbage is collected.
    """
    global _forgotten
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if error is None or error is _forgotten:
        return False
    _forgotten = error  # only its lines: the frames are empty
    frames = {id(frame): frame for item in _chain(error) for frame, _ in walk_tb(item.__traceback__)}
    runs_on = any(frame.f_code.co_flags & _RUNS_ON for frame in frames.values())
    held = [item for item in gc.get_objects() if type(item) in _FRAMES] if runs_on else []
    alive = {id(getattr(item, _FRAMES[type(item)])) for item in held}  # frames of generators that will go on
    for number, frame in frames.items():
        if number not in alive:  # clearing a suspended coroutine would end it
            _empty(frame)
    del frames
    gc.collect()
    trim()
    return True


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, its causes and contexts, and the members of exception groups, each once."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        link = waiting.pop()
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        waiting += [link.__cause__, link.__context__]
        if isinstance(link, BaseExceptionGroup):
            waiting += link.exceptions


def _empty(frame: FrameType) -> None:
    with contextlib.suppress(RuntimeError):  # it still runs: what it holds is in use
        frame.clear()
        # a debugger that looked has left a second dict of a function's locals; a module's is the namespace itself
        if frame.f_code.co_flags & inspect.CO_OPTIMIZED and isinstance(frame.f_locals, dict):
            frame.f_locals.clear()


def release() -> None:
    """Collect garbage, and return freed memory to the system."""
    gc.collect()
    trim()


def trim() -> None:
    """Return freed memory to the system, which glibc would keep for later; elsewhere nothing is done."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


@lru_cache(maxsize=1)
def share_arena() -> None:
    """Let all threads of this process take memory from one arena of glibc's malloc, so that one reuses what another has
    freed.

    Otherwise each thread has its own arena that keeps what was freed: 200 MB more with a training loop's threads.
    Nothing changes elsewhere, or where the environment has `MALLOC_ARENA_MAX`.
    """
    if "MALLOC_ARENA_MAX" not in os.environ:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).mallopt(_ARENA_MAX, 1)


@lru_cache(maxsize=1)
def separate_blocks() -> None:
    """Let this process take blocks of 1 MiB or more from the system, return each when it is freed, and use huge pages
    for them.

    Otherwise glibc keeps them in one heap, where small blocks in between keep free ones apart: a learner takes up to
    two fifths more than its tensors. Call it before the first tensor, because torch looks only once whether huge pages
    are wanted. Nothing changes elsewhere, or where the environment configures glibc's malloc (`MALLOC_…`,
    `GLIBC_TUNABLES`).
    """
    if not any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        with contextlib.suppress(OSError, AttributeError):
            for option, size in _SEPARATE.items():
                ctypes.CDLL(None).mallopt(option, size)
            os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def available() -> int:
    """Return the bytes of memory that are free, as the kernel estimates it; 4 EiB where /proc is missing."""
    with contextlib.suppress(OSError), open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 1 << 62


def total() -> int:
    """Return the bytes of memory of this machine, or the limit of this process's control group where that is less."""
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError), open("/sys/fs/cgroup/memory.max") as limit:
        size = min(size, int(limit.read()))  # "max" is none
    return size


def estimated(what: str, estimate: Callable[[], T], otherwise: T) -> T:
    """Return an estimate, or `otherwise` with a line in the log where estimating fails: a failed estimate does not end
    the work.

    Every estimate of bytes before some work goes through here. `OutOfMemory`, the verdict of an estimate, is raised,
    and so are `Interrupted` and `WorkerLost`, which concern the work itself.
    """
    try:
        return estimate()
    except (OutOfMemory, Interrupted, WorkerLost):
        raise
    except Exception as error:  # noqa: BLE001 - whatever the code of a model's configuration, or of a user's engine, raises
        _unknown(what, first_line(error))
        return otherwise


@lru_cache(maxsize=64)
def _unknown(what: str, why: str) -> None:
    """Log once that an estimate failed; the cache keeps repeated calls from logging it again."""
    log.warning("%s is not known, and the work goes on: %s", what, why)


def is_large(size: int) -> bool:
    """Return whether `size` bytes are better kept in a temporary file while nothing uses them: they are more than 1/64 of
    the free memory, and less than 1/16 of the free disk space.
    """
    return size > available() // 64 and size < shutil.disk_usage(tempfile.gettempdir()).free // 16


def gib(size: int) -> str:
    """Format a number of bytes: `1.25 GiB`, or in MiB below a tenth of a GiB."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 // 10 else f"{size / 2**20:.1f} MiB"


def resident() -> int:
    """Return the bytes of memory that this process holds; 0 where /proc is missing."""
    with contextlib.suppress(OSError), open("/proc/self/statm") as sizes:
        return int(sizes.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def peak(begin: bool = False) -> int:
    """Return the most bytes that this process held at once since the last call with `begin=True`; 0 where Linux does
    not report it.
    """
    size = 0
    with contextlib.suppress(OSError), open("/proc/self/status") as lines:
        size = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)
    if begin:
        with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as control:
            control.write("5")  # the peak is what is there now
    return size
