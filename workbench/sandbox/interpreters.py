"""The interpreter of sandboxed programs and the files that it needs: of a home folder, nothing else is shown."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from workbench.base.errors import SandboxError

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
"""Folders of the system that programs see, read-only."""
_TOOLS = "/etc/alternatives"
"""Links by which some systems choose among programs of one name (awk, vi, c++)."""
_STANDARD = "/usr/bin/python3"
_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/box",
    "LANG": "C.UTF-8",
    "PYTHONUTF8": "1",
    "OMP_NUM_THREADS": "1",  # a BLAS that reserves memory for many threads meets the memory limit
    "OPENBLAS_NUM_THREADS": "1",
}
_PARTS = r"""
import ctypes, json, os, site, sys, sysconfig
standard, objects = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib")], []
class Object(ctypes.Structure): _fields_ = [("address", ctypes.c_void_p), ("name", ctypes.c_char_p)]
@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Object), ctypes.c_size_t, ctypes.c_void_p)
def note(item, size, data):
    objects.append(os.fsdecode(item.contents.name or b""))
    return 0
for folder, _, names in os.walk(os.path.join(standard[1], "lib-dynload")):
    for name in names:
        try: ctypes.CDLL(os.path.join(folder, name))
        except OSError: pass
ctypes.CDLL(None).dl_iterate_phdr(note, None)
base = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
parts = {"base": base, "prefix": sys.base_prefix, "standard": standard, "objects": objects, "sites": site.getsitepackages()}
print(json.dumps({**parts, "version": "%d.%d" % sys.version_info[:2]}))
"""
"""Python: prints where an interpreter's parts lie; `objects` are the shared libraries that it and its standard library load."""


@dataclass(frozen=True, kw_only=True)
class World:
    """What sandboxed programs see beside the system's folders, and are started with."""

    python: str
    environment: Mapping[str, str]
    shown: tuple[str, ...]
    """Files and folders, read-only; none lies in another."""
    hidden: tuple[str, ...]
    """Folders inside those that programs see empty."""

    @property
    def closed(self) -> dict[str, str]:
        """Path of `shown` that other users cannot reach → the outermost folder that stops them."""
        stops = {one: [str(above) for above in Path(one).parents if not _passable(above)] for one in self.shown}
        return {one: above[-1] for one, above in stops.items() if above}


def _passable(folder: Path) -> bool:
    return bool(folder.stat().st_mode & stat.S_IXOTH)


def homes() -> list[str]:
    """The folders that homes lie in, and this user's own home, wherever that is."""
    own = os.path.realpath(os.path.expanduser("~"))
    return ["/home", "/root", *([] if own == "/" or _inside(own, SYSTEM) else [own])]


def _inside(path: str, folders: Iterable[str]) -> bool:
    return any(Path(path).is_relative_to(folder) for folder in folders)


def installed(package: str) -> bool:
    """Whether a package of this name is installed beside this process: no module of the standard library or of a project."""
    return PathFinder.find_spec(package, _sites()) is not None


def _sites() -> list[str]:
    return [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]


def worlds(python: str | None, packages: bool) -> Iterator[World]:
    """The worlds to try, the best first: of the interpreter that is named; else of this process's, and of the system's.

    Raises `SandboxError` for an interpreter that cannot be run, and for `packages` of another version than the named one.
    """
    if packages and not _sites():
        what, do = "packages=True, but Python has no site-packages folder", "set packages=False"
        raise SandboxError(what, expected="one on sys.path", found=sys.path, do=do)
    if python is not None:
        yield _named(python, packages)
        return
    own = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    programs = [own] if not os.access(_STANDARD, os.X_OK) else [own, _STANDARD]
    if os.geteuid() == 0 and not all(map(_passable, Path(own).parents)):
        programs.reverse()  # the system's is at hand where ours lies in a folder of root's
    for program in programs:
        if program == own or not packages or _parts(program)["version"] == _version():
            yield _world(program, _sites() if packages else [])


def _named(python: str, packages: bool) -> World:
    program = shutil.which(python) or python
    if not os.path.isabs(program) or not os.access(program, os.X_OK) or os.path.isdir(program):
        raise _no_python(program)
    if packages and _parts(program)["version"] != _version():
        do = "leave python= out, give it an interpreter of that version, or set packages=False"
        what, found = f"packages=True with python={python!r}, which is of another version", _parts(program)["version"]
        raise SandboxError(what, expected=f"Python {_version()}", found=f"Python {found}", do=do)
    return _world(program, _sites() if packages else [], named=True)


def _version() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def _world(program: str, sites: list[str], *, named: bool = False) -> World:
    shown, hidden, environment = [_TOOLS], list[str](), dict(_ENVIRONMENT)
    if not _inside(program, SYSTEM):
        sites = [*sites, *(_parts(program)["sites"] if named else ())]  # of a virtual environment: its base has others
        program = _parts(program)["base"]
        parts = _parts(program)
        shown += [program, *parts["standard"], *filter(os.path.isabs, parts["objects"])]
        if _inside(parts["prefix"], homes()):
            hidden = [one for one in parts["sites"] if one not in sites and os.path.isdir(one)]
        else:
            shown.append(parts["prefix"])
        used = {os.path.dirname(os.path.normpath(one)) for one in parts["objects"]}
        environment["LD_LIBRARY_PATH"] = ":".join(used.intersection(os.environ.get("LD_LIBRARY_PATH", "").split(":")))
    environment["PYTHONPATH"] = ":".join(sites)
    with_conda = [(site, Path(site).parents) for site in sites]  # its packages lean on shared libraries two folders up
    shown += [str(above[1]) if (above[2] / "conda-meta").is_dir() else site for site, above in with_conda]
    settings = {name: value for name, value in environment.items() if value}
    return World(python=program, environment=settings, shown=_outermost(shown), hidden=tuple(hidden))


def _outermost(paths: Iterable[str]) -> tuple[str, ...]:
    """Those that are there and lie in none of the others, nor in the system's folders."""
    kept: list[str] = []
    for path in sorted({os.path.normpath(one) for one in paths if os.path.exists(one)}):
        if not _inside(path, (*SYSTEM, *kept)):
            kept.append(path)
    return tuple(kept)


@cache
def _parts(program: str) -> dict[str, Any]:
    """What `_PARTS` prints, run by an interpreter. Raises `SandboxError` for what is none."""
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    ran = subprocess.run([program, "-I", "-c", _PARTS], env=kept, capture_output=True, text=True, check=False)
    try:
        parts: dict[str, Any] = json.loads(ran.stdout)
    except ValueError as cause:
        raise _no_python(f"{program}: {ran.stderr.strip().rpartition(chr(10))[2][:200]}") from cause
    return parts


def _no_python(found: str) -> SandboxError:
    do = "give python= the path of an interpreter, or leave it out"
    return SandboxError("python of the sandbox", expected="a program that can be run", found=found, do=do)
