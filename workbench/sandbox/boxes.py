"""Folders that sandboxed programs write to, and functions that read and write there without following any link."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from workbench.base.errors import SandboxError
from workbench.sandbox import tiers
from workbench.sandbox.protocol import checked

MAX_FETCHED = 16 << 20
"""Largest file in bytes that `fetch` brings back."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


def make(kind: str) -> Path:
    """Make a new empty folder that belongs to the user that programs run as."""
    path = Path(tempfile.mkdtemp(prefix=f"workbench-{kind}-"))
    if os.geteuid() == 0:
        os.chown(path, tiers.UID, tiers.UID)
    return path


@contextlib.contextmanager
def folder(kind: str) -> Iterator[Path]:
    """Context manager: makes a new folder, and removes it afterwards whatever is in it."""
    path = make(kind)
    try:
        yield path
    finally:
        remove(path)


def remove(folder: Path) -> None:
    """Remove a folder and everything in it."""
    try:
        shutil.rmtree(folder)
    except (OSError, RecursionError):
        # folders without rights, or nested deeper than Python recurses: the system's own tools can
        for tool in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
            subprocess.run([*tool, "--", str(folder)], check=False, capture_output=True)


def copied(folder: Path, target: Path) -> None:
    """Copy a folder with everything in it (links, times, owners) to `target`, which does not exist yet.

    Raises `SandboxError` where something cannot be copied.
    """
    command = ["cp", "-a", "--reflink=auto", "--", str(folder), str(target)]
    ran = subprocess.run(command, check=False, capture_output=True, text=True, errors="replace")
    if ran.returncode:
        remove(target)
        raise SandboxError("a folder of the sandbox could not be copied", found=ran.stderr.strip()[:300])


def write(box: Path, files: Mapping[str, bytes | str]) -> None:
    """Write files into a sandbox's folder; what is in their way (links, files, folders) is removed.

    A file whose content begins with `#!` becomes executable.
    """
    for name, body in files.items():
        *folders, last = checked(name).parts
        with _open_folder(box, folders, make_them=True) as inside:
            _remove_entry(inside, last)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            content = body.encode("utf-8", "surrogatepass") if isinstance(body, str) else body
            with open(os.open(last, flags, 0o755 if content[:2] == b"#!" else 0o644, dir_fd=inside), "wb") as file:
                file.write(content)
                if os.geteuid() == 0:
                    os.fchown(file.fileno(), tiers.UID, tiers.UID)


def fetch(box: Path, name: str) -> bytes | None:
    """Read a plain file of a sandbox's folder; None for a file that is missing, too big, or reached through a link."""
    *folders, last = PurePosixPath(name).parts
    try:
        with _open_folder(box, folders) as inside:
            file = os.open(last, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=inside)
    except OSError:
        return None
    try:
        facts = os.fstat(file)
        if not stat.S_ISREG(facts.st_mode) or facts.st_size > MAX_FETCHED:
            return None
        with open(file, "rb", closefd=False) as reader:
            return reader.read(MAX_FETCHED)
    finally:
        os.close(file)


@contextlib.contextmanager
def _open_folder(box: Path, folders: list[str], *, make_them: bool = False) -> Iterator[int]:
    """Context manager: opens a folder inside a sandbox's folder, following no link, and yields its descriptor."""
    opened = [os.open(box, os.O_RDONLY | os.O_DIRECTORY)]
    try:
        for part in folders:
            if make_them:
                _make(opened[-1], part)
            opened.append(os.open(part, _FOLDER, dir_fd=opened[-1]))
            if make_them:  # a program may have closed it to itself
                os.fchmod(opened[-1], stat.S_IMODE(os.fstat(opened[-1]).st_mode) | stat.S_IRWXU)
        yield opened[-1]
    finally:
        for descriptor in opened:
            os.close(descriptor)


def _make(inside: int, name: str) -> None:
    """Make sure that there is a folder `name`; a link or file of this name is removed."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISDIR(os.stat(name, dir_fd=inside, follow_symlinks=False).st_mode):
            return
        os.unlink(name, dir_fd=inside)
    os.mkdir(name, 0o755, dir_fd=inside)
    if os.geteuid() == 0:
        os.chown(name, tiers.UID, tiers.UID, dir_fd=inside, follow_symlinks=False)


def _remove_entry(inside: int, name: str) -> None:
    try:
        os.unlink(name, dir_fd=inside)
    except FileNotFoundError:
        return
    except (IsADirectoryError, PermissionError):
        shutil.rmtree(name, dir_fd=inside)
