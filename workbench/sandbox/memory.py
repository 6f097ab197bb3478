"""Holds a program's whole memory: in a control group where one can be written, else by samples and a filter of system calls.

A group counts whatever the kernel keeps for the program: pages of processes, memfd, shared memory, tmpfs, page cache,
buffers of pipes and sockets. Without one, memory that belongs to no process must not be had: the filter refuses the calls.
"""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import signal
import struct
import subprocess
import time
import warnings
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

ENTER = '{ echo 1000 >/proc/self/oom_score_adj; } 2>/dev/null; echo 0 >"$1" && { [ -z "$2" ] || exec 9<"$2"; } && shift 2 && exec "$@"'
"""Shell: become what a machine short of memory ends first, enter the group `$1`, open the filter `$2` as 9, run the rest."""
FILTER_FD = 9
LOAD = f"""
import ctypes, os, sys
code = os.read({FILTER_FD}, 1 << 16)
os.close({FILTER_FD})
class Filter(ctypes.Structure): _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_char_p)]
libc = ctypes.CDLL(None, use_errno=True)
if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, ctypes.byref(Filter(len(code) // 8, code))):
    sys.exit("the filter of system calls could not be loaded: " + os.strerror(ctypes.get_errno()))
os.execv(sys.argv[1], sys.argv[1:])
"""
"""Python: load the filter that is open as `FILTER_FD`, run the rest. Once, no filter is put on another."""
_INODE = 1 << 10
_SECONDS = 5.0


class ControlGroup:
    """A control group in the folder `place` for one program: the kernel ends a process when the group exceeds
    `memory_mb` MiB. `close` removes it."""

    def __init__(self, place: Path, memory_mb: int) -> None:
        self.path = place / f"workbench-{os.getpid()}-{os.urandom(4).hex()}"
        self.path.mkdir()
        self.second = (self.path / "memory.max").exists()  # of cgroup version 2
        size = memory_mb << 20
        first = {
            "memory.limit_in_bytes": size,
            "memory.memsw.limit_in_bytes": size,
            "memory.kmem.tcp.limit_in_bytes": size // 4,
        }
        second = {"memory.max": size, "memory.swap.max": 0, "memory.oom.group": 1}
        try:
            for name, value in (second if self.second else first).items():
                if (self.path / name).exists():  # without swap in the kernel, its files are not there
                    (self.path / name).write_text(str(value))
        except OSError:
            self.path.rmdir()
            raise

    @property
    def procs(self) -> Path:
        """The file that moves a process into the group, when its number is written there."""
        return self.path / "cgroup.procs"

    def met(self) -> bool:
        """Return whether the kernel has ended a process of the group for its memory."""
        words = (self.path / ("memory.events" if self.second else "memory.oom_control")).read_text().split()
        return int(words[words.index("oom_kill") + 1]) > 0

    def close(self) -> None:
        """Kill the processes that still run in the group, and remove the group."""
        deadline = time.monotonic() + _SECONDS
        while True:
            try:
                return self.path.rmdir()
            except OSError as error:  # busy: its last processes are still ending
                if not self.path.exists() or time.monotonic() > deadline:
                    warnings.warn(f"control group {self.path} could not be removed: {error}", stacklevel=2)
                    return None
            for pid in self.procs.read_text().split():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.002)


@contextlib.contextmanager
def group(memory_mb: int) -> Iterator[ControlGroup | None]:
    """Context manager: makes a control group for a program and removes it afterwards; yields None where this process
    cannot make one."""
    where = place()
    control = ControlGroup(where, memory_mb) if where else None
    try:
        yield control
    finally:
        if control:
            control.close()


@cache
def place() -> Path | None:
    """Return the folder in which this process can make control groups that limit memory, or None; groups of dead
    processes are removed."""
    if not Path("/proc/self/cgroup").exists():  # a kernel without
        return None
    for folder in _folders(Path("/proc/self/cgroup").read_text(), Path("/proc/self/mountinfo").read_text()):
        if not os.access(folder, os.W_OK) or not os.access(folder / "cgroup.procs", os.W_OK):
            continue
        for left in folder.glob("workbench-*-*"):
            if not Path("/proc", left.name.split("-")[1]).exists():
                with contextlib.suppress(OSError):  # its last processes are still ending: another start removes it
                    left.rmdir()
        with contextlib.suppress(OSError, ValueError), contextlib.closing(ControlGroup(folder, 64)) as trial:
            entered = subprocess.run([*entering(trial, None), "true"], capture_output=True, check=False)
            if entered.returncode == 0 and not trial.met():
                return folder
    return None


def _folders(groups: str, mounts: str) -> Iterator[Path]:
    """Yield the folders whose new subfolders are control groups with memory limits, first of version 1, then of version
    2.

    `groups` and `mounts` are the texts of /proc/self/cgroup and /proc/self/mountinfo.
    """
    named = dict(line.split(":", 2)[1:] for line in groups.splitlines())
    paths = {"cgroup": next((path for names, path in named.items() if "memory" in names.split(",")), None)}
    paths["cgroup2"] = named.get("")
    mounted = [(line.split(), line.partition(" - ")[2].split()) for line in mounts.splitlines()]
    for kind in ("cgroup", "cgroup2"):
        for (_, _, _, root, point, *_), (found, _, options, *_) in mounted:
            path = paths[kind]
            if found != kind or path is None or not Path(path).is_relative_to(root):
                continue
            folder = Path(point) / Path(path).relative_to(root)
            if kind == "cgroup2":
                yield from (
                    above for above in (folder, *folder.parents) if above.is_relative_to(point) and _shares(above)
                )
            elif "memory" in options.split(","):
                yield folder


def _shares(folder: Path) -> bool:
    """Return whether a group of version 2 limits the memory of its subgroups; a group that has processes cannot."""
    try:
        return "memory" in (folder / "cgroup.subtree_control").read_text().split()
    except OSError:
        return False


def entering(group: ControlGroup | None, filter_of_calls: bytes | None) -> list[str]:
    """Return the command line to put before a program's: it enters the group, and opens the system-call filter as
    `FILTER_FD`."""
    procs = str(group.procs) if group else "/dev/null"
    opened = f"/proc/{os.getpid()}/fd/{_memory_file(filter_of_calls)}" if filter_of_calls else ""
    return ["/bin/sh", "-c", ENTER, "sh", procs, opened]


@cache
def _memory_file(content: bytes) -> int:
    """Write content to a file in memory and return its descriptor; each program that opens it by /proc reads it from
    the start."""
    file = os.memfd_create("workbench-filter")
    os.write(file, content)
    return file


# --- without a group ------------------------------------------------------------------------------


def held(tree: Sequence[int]) -> int:
    """Add up the bytes that a sandbox's processes hold: their pages, and the files in /tmp and sockets of their
    namespaces."""
    total = 0
    for one in tree:
        with contextlib.suppress(OSError, ValueError):  # it has ended meanwhile
            words = Path(f"/proc/{one}/smaps_rollup").read_text().split()
            total += int(words[words.index("Pss:") + 1]) << 10
    inside = tree[-1]
    if found := tmp(tree):
        total += (found.f_blocks - found.f_bfree) * found.f_frsize + (found.f_files - found.f_ffree) * _INODE
    with contextlib.suppress(OSError):
        if os.stat(f"/proc/{inside}/ns/net").st_ino != os.stat("/proc/self/ns/net").st_ino:
            # what an end has queued is not to be seen: all that it can, as programs cannot set it (`_SETSOCKOPT`)
            most = int(Path("/proc/sys/net/core/wmem_default").read_text())
            total += int(Path(f"/proc/{inside}/net/sockstat").read_text().split()[2]) * most
            for name in ("tcp", "tcp6"):  # these may queue more: bytes to be sent and received, in hexadecimal
                for line in Path(f"/proc/{inside}/net/{name}").read_text().splitlines()[1:]:
                    total += sum(int(part, 16) for part in line.split()[4].split(":"))
    return total


def tmp(tree: Sequence[int]) -> os.statvfs_result | None:
    """Return the size and use of a sandbox's /tmp; None while its namespace is not made yet, and after its end."""
    for inside in reversed(tree):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            there = Path("/proc", str(inside), "root", "tmp")
            if there.stat().st_dev != os.stat("/tmp").st_dev:
                return os.statvfs(there)
    return None


_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
_REFUSED = {  # number on x86_64, on aarch64
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "shmat": (30, 196), "msgget": (68, 186),
    "semget": (64, 190), "mq_open": (240, 180), "fallocate": (285, 47), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "perf_event_open": (298, 241), "bpf": (321, 280),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "pidfd_getfd": (438, 438),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "seccomp": (317, 277),
}  # fmt: skip
"""Calls that no program of the sandbox needs: memory that is nobody's, and doors of the kernel with a history."""
_PRCTL, _SET_SECCOMP = (157, 167), 22
_SOCKET, _FAMILIES = (41, 198), (1, 2, 10, 16)  # Unix, IPv4, IPv6, netlink: vsock is of no network namespace
_SETSOCKOPT, _SOL_SOCKET, _SO_SNDBUF, _SO_RCVBUF = (54, 208), 1, 7, 8
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, (16, 24, 32)  # offsets in the kernel's struct seccomp_data


@cache
def filter_of_calls() -> bytes | None:
    """Make a seccomp filter (classic BPF, as bubblewrap loads it) that refuses `_REFUSED`; None for an unknown
    processor."""
    if platform.machine() not in _ARCHITECTURES:
        return None
    architecture, column = _ARCHITECTURES[platform.machine()]
    refuse = (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)
    code = [(_LOAD, 0, 0, _ARCHITECTURE), (_EQUAL, 1, 0, architecture), refuse, (_LOAD, 0, 0, _NUMBER)]
    code += [(_AT_LEAST, 0, 1, 0x40000000), refuse]  # x32's numbers for the same calls
    for name, numbers in _REFUSED.items():
        # the C library then writes the file itself
        answer = (_RETURN, 0, 0, _ERRNO | errno.EOPNOTSUPP) if name == "fallocate" else refuse
        code += [(_EQUAL, 0, 1, numbers[column]), answer]
    allow = (_RETURN, 0, 0, _ALLOW)
    code += [(_EQUAL, 0, 4, _PRCTL[column]), (_LOAD, 0, 0, _ARGUMENTS[0]), (_EQUAL, 0, 1, _SET_SECCOMP), refuse, allow]
    code += [(_EQUAL, 0, 3 + len(_FAMILIES), _SOCKET[column]), (_LOAD, 0, 0, _ARGUMENTS[0])]
    code += [(_EQUAL, len(_FAMILIES) - n, 0, family) for n, family in enumerate(_FAMILIES)]
    code += [(_RETURN, 0, 0, _ERRNO | errno.EAFNOSUPPORT), allow]
    code += [(_EQUAL, 0, 6, _SETSOCKOPT[column]), (_LOAD, 0, 0, _ARGUMENTS[1]), (_EQUAL, 0, 4, _SOL_SOCKET)]
    code += [(_LOAD, 0, 0, _ARGUMENTS[2]), (_EQUAL, 1, 0, _SO_SNDBUF), (_EQUAL, 0, 1, _SO_RCVBUF)]
    code += [(_RETURN, 0, 0, _ERRNO), allow]  # it succeeds and sets nothing: a size is only a wish to the kernel, too
    return b"".join(struct.pack("=HBBI", *one) for one in code)
