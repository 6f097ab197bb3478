"""A run's folder at an address that fsspec opens (`s3://…`, `https://…`), or on the Hugging Face hub, copied file by file as it is
read; never written."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote

import fsspec

from workbench.base.errors import RunError, first_line
from workbench.base.hub import Repository
from workbench.base.shown import shown
from workbench.runs.folder import held, step_folder

FRESH = 2.0
"""Seconds for which a copied small file of a run counts as up to date; `LISTED`: the same for the list of its files."""
LISTED = 15.0
INDEX = ("trace.json", "kept.json", "update.json", "manifest.json", "state.json")
"""Files of a step that are copied together with the list of files, so that the recorded steps are known."""
TEXT_LIMIT = 1 << 30
"""Bytes that a JSON file of a run on the hub may have."""
_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]+(::|://)")


def is_address(path: object) -> bool:
    """Return whether a path is an address (`s3://bucket/run`, `filecache::s3://…`) rather than a local path."""
    return isinstance(path, str) and bool(_ADDRESS.match(path))


@contextlib.contextmanager
def reading(address: str) -> Iterator[None]:
    """Context manager that turns errors of a file system's library, also its absence, into a `RunError` that names the
    address.
    """
    try:
        yield
    except ImportError as cause:
        do = f"install what fsspec needs for it: {first_line(cause)}"
        raise RunError(f"{shown(address)} cannot be read here", found="a library is missing", do=do) from cause
    except RunError:
        raise
    except Exception as cause:  # each library has its own errors
        raise RunError(f"{shown(address)} cannot be read", found=shown(first_line(cause, 200))) from cause


def opened(address: str) -> tuple[Any, str]:
    """Return the file system of an address, and the path in it. Raises `RunError` where it cannot be opened."""
    if address.startswith("hf://"):
        return (system := OnHub(address)), system.root
    with reading(address):
        system, root = fsspec.url_to_fs(address)
        return system, str(root).rstrip("/")


class OnHub:
    """The part of fsspec's interface that is used here, over a repository of the hub at one commit and through the hub's cache.

    Made of `hf://owner/name[@revision][/folder]`. Raises `RunError` for another form, and where there is no such repository.
    """

    _ADDRESS = re.compile(r"hf://(datasets/|models/)?([^/@]+/[^/@]+)(?:@((?:refs/[^/]+/)?[^/]+))?(?:/(.+))?")

    def __init__(self, address: str) -> None:
        found = self._ADDRESS.fullmatch(address.rstrip("/"))
        if found is None:
            expected = "hf://owner/name, hf://owner/name@revision or hf://owner/name/folder"
            raise RunError("address of a run on the hub", expected=expected, found=shown(address))
        kind, name, revision, folder = found.groups()
        what = "dataset" if kind == "datasets/" else "model"
        self._repository, self._top = Repository(what, name, (revision,), RunError, "repository"), f"{name}/"
        self.root = f"{name}/{folder or ''}".rstrip("/")
        """The folder's path, `owner/name/folder`."""

    @property
    def address(self) -> str:
        """The folder's address with the commit that is read."""
        kind, name = "datasets/" * (self._repository.kind == "dataset"), self._repository.name
        return f"hf://{kind}{name}@{self._repository.commit}{self.root.removeprefix(name)}"

    def invalidate_cache(self) -> None:
        """Do nothing: a commit does not change."""

    def find(self, root: str) -> list[str]:
        """List the files of a folder and of those below it."""
        return [self._top + one for one in self._repository.sizes if (self._top + one).startswith(f"{root}/")]

    def ls(self, root: str, detail: bool = False) -> list[str]:
        """List the files of a folder."""
        return [one for one in self.find(root) if "/" not in one[len(root) + 1 :]]

    def glob(self, pattern: str) -> list[str]:
        """List the files whose whole path matches a pattern, in which `*` stands for a part of one name."""
        return [one for one in self.find(self._top[:-1]) if PurePosixPath(one).match(pattern)]

    def get_file(self, path: str, target: str) -> None:
        """Put a file of the hub's cache at `target`, without a second copy of its bytes where the file system allows that."""
        name = path.removeprefix(self._top)
        if name.endswith((".json", ".jsonl")) and self._repository.sizes.get(name, 0) > TEXT_LIMIT:
            raise RunError(f"file {name} of {self._repository.name}", expected=f"at most {TEXT_LIMIT >> 20} MiB")
        cached = os.path.realpath(self._repository.get(name))
        try:
            os.link(cached, target)
        except OSError:  # another file system
            shutil.copyfile(cached, target)


@functools.cache
def _copies() -> tempfile.TemporaryDirectory[str]:
    """Make the temporary folder of this process's copies; it is deleted when the process ends."""
    return tempfile.TemporaryDirectory(prefix="workbench-runs-")


class RunFiles:
    """A run's folder on this machine, where every file is present already. `Remote` is the version for an address."""

    def __init__(self, folder: str | Path) -> None:
        self.address = str(folder)
        """The folder's address, as messages show it."""
        self.local = Path(folder)
        """Where its files are read."""

    def look(self) -> None:
        """Make the folder's JSON files present in their current state; nothing to do for a local folder."""

    def index(self) -> None:
        """Make the files present that name the run's steps, checkpoints and validations; nothing to do for a local
        folder."""

    def fetch(self, *names: str) -> None:
        """Make the folders or files of these names present, or without a name all of the run; nothing to do for a local
        folder."""

    def fetch_steps(self, part: str, *steps: int) -> None:
        """Make the folders of these steps in `traces` or `checkpoints` present; nothing to do for a local folder."""

    def locked(self) -> bool:
        """Return whether a process is writing the run."""
        return held(self.local / "lock.json")


class Remote(RunFiles):
    """A run folder at an address, with a local copy of what was fetched of it so far."""

    def __init__(self, address: str) -> None:
        self._system, self._root = opened(address)
        name = PurePosixPath(unquote(self._root)).name or "run"
        super().__init__(Path(tempfile.mkdtemp(dir=_copies().name)) / name)
        self.address = self._system.address if isinstance(self._system, OnHub) else shown(address)
        self.local.mkdir()
        self._looked = self._listed = -1e9
        self.names: list[str] = []
        """Files of the folder, as they were listed last."""

    def look(self) -> None:
        """Copy the JSON files at the top of the folder, unless that was done in the last 2 seconds; delete local ones
        that no longer exist there.
        """
        if time.monotonic() - self._looked < FRESH:
            return
        with reading(self.address):
            self._system.invalidate_cache()
            there = {self._name(path) for path in self._system.ls(self._root, detail=False)}
        wanted = {name for name in there if name.endswith((".json", ".jsonl")) and "/" not in name}
        for gone in (one for one in self.local.glob("*.json*") if one.name not in wanted):
            gone.unlink()
        for name in wanted:
            self._get(name)
        if "settings.json" in wanted:
            with contextlib.suppress(Exception):  # not every file system knows when a file was written
                when = self._system.modified(f"{self._root}/settings.json").timestamp()
                os.utime(self.local / "settings.json", (when, when))
        self._looked = time.monotonic()

    def index(self) -> None:
        """List all files, copy the small ones that describe steps (`INDEX`), and make an empty file for each
        validation's samples.
        """
        if time.monotonic() - self._listed < LISTED:
            return
        with reading(self.address):
            self._system.invalidate_cache()
            found = map(self._name, self._system.find(self._root))
            self.names = [name for name in found if name and ".." not in PurePosixPath(name).parts]
        for name in self.names:
            if name.startswith("val/") and not (self.local / name).exists():
                (self.local / name).parent.mkdir(exist_ok=True)
                (self.local / name).touch()
            elif name.rpartition("/")[2] in INDEX and "/" in name and not (self.local / name).exists():
                self._get(name)
        self._listed = time.monotonic()

    def fetch(self, *names: str) -> None:
        """Copy folders or files of these names that are not here yet; without a name the whole run."""
        self.index()
        for name in self.names:
            if not names or any(name == one or name.startswith(f"{one}/") for one in names):
                here = self.local / name
                if not here.exists() or not here.stat().st_size:
                    self._get(name)

    def fetch_steps(self, part: str, *steps: int) -> None:
        """Copy the folders of these steps in `traces` or `checkpoints`."""
        if steps:
            self.fetch(*(f"{part}/{step_folder(Path(), step).name}" for step in steps))

    def locked(self) -> bool:
        """Return whether the run has a lock file. Whether a process really holds the lock cannot be seen from here."""
        self.look()
        return (self.local / "lock.json").is_file()

    def _name(self, path: str) -> str:
        """Turn a path of the file system into the file's path within the run folder."""
        return unquote(str(path)).removeprefix(unquote(self._root)).strip("/")

    def _get(self, name: str) -> None:
        target = self.local / name
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f".{target.name}.part")
        with reading(f"{self.address}/{name}"):
            self._system.get_file(f"{self._root}/{name}", str(part))
        part.replace(target)


def runs_at(address: str) -> dict[str, str]:
    """Find the folders under an address, up to two levels down, that may be runs: name → address."""
    system, root = opened(address)
    protocol = address[: len(address) - len(root)] if address.rstrip("/").endswith(root) else ""
    with reading(address):
        found = [path for depth in ("", "/*", "/*/*") for path in system.glob(f"{root}{depth}/settings.json")]
    names = [str(path).removesuffix("/settings.json") for path in found]
    return {
        unquote(path).removeprefix(unquote(root)).strip("/") or PurePosixPath(path).name: f"{protocol}{path}"
        for path in names
    }
