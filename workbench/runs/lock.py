"""One writer per run folder, enforced by the kernel: a lock that ends with the process that holds it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from pathlib import Path
from typing import IO, Any

from workbench.errors import RunError, message


class Lock:
    """`lock.json`: an exclusive `flock`, and for people who holds it (pid, host, start).

    A process that dies, however it dies, lets go: what it leaves is taken over, and `note` says so. A second
    writer is refused, in the same process as well. Raises `RunError` there. On a network file system that does not
    share locks between hosts, two hosts are not kept apart.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = self._open()
        left = _read(self._file)
        self.note = ""
        if left:
            self.note = f"took over the lock of {_who(left)}, which no longer runs"
        mine = {"pid": os.getpid(), "host": socket.gethostname(), "started": time.strftime("%Y-%m-%d %H:%M:%S")}
        self._file.seek(0)
        self._file.truncate()
        self._file.write(json.dumps(mine))
        self._file.flush()

    def _open(self) -> IO[str]:
        while True:
            file = self._path.open("a+")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as cause:
                holder = _read(file)
                file.close()
                if cause.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    raise RunError(
                        message(f"{self._path.parent} cannot be locked", found=cause, do="use a local disk")
                    ) from cause
                raise RunError(
                    message(
                        f"run {self._path.parent} is being written",
                        found=_who(holder),
                        do="wait for it, stop it, or choose another run folder",
                    )
                ) from cause
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), os.stat(self._path)):
                    return file
            file.close()  # the holder removed the file between our open and our lock: this is not the file any more

    def release(self) -> None:
        """Let go; the file goes too."""
        if not self._file.closed:
            self._path.unlink(missing_ok=True)
            self._file.close()


def held(path: Path) -> bool:
    """Whether somebody writes the run at this moment, by the lock's own word; nothing is changed."""
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError as cause:
        return cause.errno in (errno.EWOULDBLOCK, errno.EACCES)
    return False


def _read(file: IO[str]) -> dict[str, Any]:
    file.seek(0)
    try:
        document = json.loads(file.read() or "{}")
    except ValueError:
        return {"pid": "?"}  # torn by a kill while it was written
    return document if isinstance(document, dict) else {}


def _who(held: dict[str, Any]) -> str:
    return f"pid {held.get('pid', '?')} on {held.get('host', '?')} since {held.get('started', '?')}"
