"""How a process is shut in: bubblewrap, or the kernel's namespaces by util-linux's tools. Command lines only.

Both tiers show the same small world: system folders read-only, a fresh /proc with the sandbox's own
processes, a sized /tmp, one writable folder `/box`, no network, no further user namespaces, another user,
an empty environment. Started as root, the launcher first becomes `UID`, for a process limit does
not bind root and root's files must not be its own.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

UID = 61_999
"""The user that sandboxed programs run as when we are root: one that nobody on the machine uses."""
TIERS = ("bubblewrap", "namespaces")
"""Tiers with isolation, the better first. `unsafe` is none."""
MOUNTS = Path(__file__).with_name("mounts.sh")
_SYSTEM = ("/bin", "/sbin", "/lib", "/lib32", "/lib64")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Of one process, except `processes` and `disk_mb`, which are the sandbox's."""

    memory_mb: int = 1024
    processes: int = 64
    file_mb: int = 16
    disk_mb: int = 64
    open_files: int = 256
    cpu_seconds: int = 12

    def command(self) -> list[str]:
        """`prlimit …`: soft and hard limits that the program cannot raise."""
        return [
            _tool("prlimit"),
            f"--as={self.memory_mb << 20}",
            f"--nproc={self.processes}",
            f"--fsize={self.file_mb << 20}",
            f"--nofile={self.open_files}",
            f"--cpu={self.cpu_seconds}",
            "--core=0",
            "--",
        ]


def _tool(name: str) -> str:
    # by full path: the launcher's environment is empty
    return shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin:/usr/bin:/bin") or name


def needed(tier: str) -> tuple[str, ...]:
    """The programs that a tier is made of."""
    shared = ("prlimit", "setpriv") if os.geteuid() == 0 else ("prlimit",)
    own = {"bubblewrap": ("bwrap",), "namespaces": ("unshare", "setpriv", "mount", "pivot_root", "umount")}
    return (*own.get(tier, ()), *shared)


def missing(tier: str) -> list[str]:
    """Those that this machine lacks."""
    return [name for name in needed(tier) if shutil.which(_tool(name)) is None]


def command(
    tier: str, *, box: Path, root: Path, limits: Limits, readable: Sequence[str], environment: Mapping[str, str]
) -> list[str]:
    """What to put before a program's own command line. `root` is an empty folder that `namespaces` mounts over."""
    drop = _as_other_user() if os.geteuid() == 0 else []
    ends = [_tool("setpriv"), "--pdeathsig=KILL", "--"] if tier == "namespaces" else []  # bwrap sees to it itself
    if tier == "bubblewrap":
        return [*drop, *_bubblewrap(box, limits, readable, environment), *limits.command()]
    if tier == "namespaces":
        return [*drop, *ends, *_namespaces(box, root, limits, readable), *limits.command(), *_environment(environment)]
    # no process limit: outside a namespace it counts all processes of the user
    plain = [part for part in limits.command() if not part.startswith("--nproc")]
    return [*plain, *_environment(environment)]


def _as_other_user() -> list[str]:
    return [_tool("setpriv"), f"--reuid={UID}", f"--regid={UID}", "--clear-groups", "--"]


def _environment(environment: Mapping[str, str]) -> list[str]:
    return [_tool("env"), "-i", *(f"{name}={value}" for name, value in environment.items())]


def _bubblewrap(box: Path, limits: Limits, readable: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    view: list[str] = ["--ro-bind", "/usr", "/usr"]
    for folder in _SYSTEM:
        if os.path.islink(folder):
            view += ["--symlink", os.readlink(folder), folder]
        elif os.path.isdir(folder):
            view += ["--ro-bind", folder, folder]
    # before what is shown: that may lie in /tmp
    view += ["--size", str(limits.disk_mb << 20), "--tmpfs", "/tmp"]
    for folder in readable:
        view += ["--ro-bind", folder, folder]
    variables = [part for name, value in environment.items() for part in ("--setenv", name, value)]
    return [
        *(_tool("bwrap"), "--unshare-user", "--disable-userns", "--unshare-all", "--uid", "65534", "--gid", "65534"),
        *("--die-with-parent", "--new-session", "--hostname", "sandbox"),
        *view,
        *("--proc", "/proc", "--dev", "/dev"),
        *("--bind", str(box), "/box", "--chdir", "/box", "--clearenv", *variables, "--"),
    ]


def _namespaces(box: Path, root: Path, limits: Limits, readable: Sequence[str]) -> list[str]:
    folders = ["/usr", *(folder for folder in _SYSTEM if os.path.isdir(folder)), *readable]
    return [
        *(_tool("unshare"), "--user", "--map-root-user", "--mount", "--pid", "--net", "--ipc", "--uts", "--cgroup"),
        *("--fork", "--kill-child", "--", "/bin/sh", "-c", MOUNTS.read_text(), "sh"),
        *(str(root), str(box), str(limits.disk_mb << 20), ":".join(folders)),
        *(_tool("setpriv"), "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs", "--"),
    ]
