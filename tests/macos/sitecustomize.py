"""Python starts like on macOS: without Linux's calls, /proc and limits of memory. `test_macos.py` puts this on the path.

`sys.platform` is set by the program, after it has imported libraries that are built for Linux.
"""

import builtins
import io
import os
import resource
import select
import socket
from typing import Any

for module, names in {
    os: "memfd_create pidfd_open pipe2 sched_getaffinity sched_setaffinity posix_fadvise copy_file_range eventfd waitid "
    "setresuid getresuid unshare setns ST_NOEXEC",
    resource: "prlimit",
    select: "epoll",
    socket: "SO_PEERCRED SOCK_CLOEXEC SOCK_NONBLOCK",
}.items():
    for name in filter(lambda name, module=module: hasattr(module, name), names.split()):
        delattr(module, name)


def refuse_proc(call: Any) -> Any:
    """`call`, which finds nothing in /proc."""

    def refusing(path: Any = ".", *args: Any, **options: Any) -> Any:
        if isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith("/proc"):
            raise FileNotFoundError(2, "No such file or directory", os.fspath(path))
        return call(path, *args, **options)

    return refusing


builtins.open = io.open = refuse_proc(open)
for name in ("open", "stat", "readlink", "listdir", "scandir"):
    setattr(os, name, refuse_proc(getattr(os, name)))
setrlimit = resource.setrlimit


def setrlimit_of_macos(number: int, limits: Any) -> None:
    """Limits of memory are refused."""
    if number in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
        raise ValueError("current limit exceeds maximum limit")
    setrlimit(number, limits)


resource.setrlimit = setrlimit_of_macos
