"""A class by the name that a yaml gives it: one of ours, or one of yours from below an allowed folder."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from workbench.errors import SettingError, WorkbenchError, boundary, first_line, message, unknown
from workbench.rewards.files import ROOTS

MAX_BYTES = 4 << 20
"""A larger yaml is no list of tools."""


@contextmanager
def placed(place: str) -> Iterator[None]:
    """Whatever is wrong inside the block is a `SettingError` that begins with the place."""
    try:
        with boundary("its code", SettingError):
            yield
    except WorkbenchError as error:
        raise SettingError(f"{place}: {error}") from error


def read_yaml(path: str | Path) -> Mapping[str, Any]:
    """A yaml file's mapping, by the safe loader. Raises `SettingError` naming the file."""
    import yaml

    file = Path(path)
    try:
        if file.stat().st_size > MAX_BYTES:
            raise SettingError(message(f"{str(path)!r}", expected=f"at most {MAX_BYTES >> 20} MiB of yaml"))
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as cause:
        raise SettingError(message(f"{str(path)!r} cannot be read as yaml", found=first_line(cause))) from cause
    if not isinstance(found, Mapping):
        raise SettingError(message(f"{str(path)!r}", expected="a mapping", found=type(found).__name__))
    return found


def find_class(name: Any, kind: str, aliases: Mapping[str, type], roots: Sequence[str | Path] = ()) -> type[Any]:
    """The class that `name` means: an alias, a class of `__main__` or of workbench, or `package.module.Class`.

    A module is imported only from below an allowed root: the folder that Python was started in, those in
    `WORKBENCH_CODE_ROOTS`, and `roots`. Importing runs it, in this process. Raises `SettingError` that names
    module and folders where it is not there, lies elsewhere, does not import, or has no such class.
    """
    if not isinstance(name, str) or not name:
        raise SettingError(message(f"class_name of a {kind}", expected="package.module.Class", found=repr(name)))
    if name in aliases:
        return aliases[name]
    dotted, _, last = name.rpartition(".")
    if not dotted:
        raise SettingError(unknown(kind, name, [one for one in aliases if "." not in one]))
    if dotted == "__main__":
        module = sys.modules["__main__"]
    elif dotted.startswith("workbench.agents."):
        with boundary(f"importing {dotted}", SettingError):
            module = importlib.import_module(dotted)
    else:
        module = _imported(dotted, kind, roots)
    found = getattr(module, last, None)
    if not isinstance(found, type):
        classes = [one for one, value in vars(module).items() if isinstance(value, type)]
        raise SettingError(f"{dotted}: " + unknown(f"class of that module ({kind})", last, classes))
    return found


def allowed_roots(roots: Sequence[str | Path] = ()) -> list[Path]:
    """The folders that code is taken from."""
    named = [entry for entry in os.environ.get(ROOTS, "").split(os.pathsep) if entry]
    return [Path(root).resolve() for root in (Path.cwd(), *named, *roots)]


def _imported(dotted: str, kind: str, roots: Sequence[str | Path]) -> ModuleType:
    parts = dotted.split(".")
    if not all(part.isidentifier() for part in parts):
        raise SettingError(message(f"class_name of a {kind}", expected="package.module.Class", found=dotted))
    allowed = allowed_roots(roots)
    there = sys.modules.get(dotted)
    if there is not None:
        return _below(there, dotted, allowed)
    for root in allowed:
        file = root.joinpath(*parts)
        if file.with_suffix(".py").is_file() or (file / "__init__.py").is_file():
            return _from(root, parts, allowed)
    raise SettingError(
        message(
            f"module {dotted!r} of a {kind} is not there",
            expected=f"{'/'.join(parts)}.py below {', '.join(map(str, allowed))}",
            do=f"start Python where it lies, pass roots=[…], or name its folder in {ROOTS}",
        )
    )


def _from(root: Path, parts: Sequence[str], allowed: Sequence[Path]) -> ModuleType:
    """Import package by package from this root alone: no other entry of sys.path can answer to the name."""
    folders, name, module = [str(root)], "", ModuleType("")
    for part in parts:
        name = f"{name}.{part}" if name else part
        if name in sys.modules:
            module = _below(sys.modules[name], name, allowed)
        else:
            spec = PathFinder.find_spec(name, folders)
            if spec is None:
                raise SettingError(message(f"module {name!r} in {folders[0]}", expected="Python"))
            module = module_from_spec(spec)
            if spec.submodule_search_locations is not None:  # a folder without __init__ would look along sys.path again
                module.__path__ = list(spec.submodule_search_locations)
            _below(module, name, allowed)
            sys.modules[name] = module
            try:
                with boundary(f"importing {name} from {folders[0]}", SettingError):
                    if spec.loader is not None:
                        spec.loader.exec_module(module)
            except BaseException:
                sys.modules.pop(name, None)
                raise
        folders = list(getattr(module, "__path__", []))
    return module


def _below(module: ModuleType, name: str, allowed: Sequence[Path]) -> ModuleType:
    places = [module.__file__] if getattr(module, "__file__", None) else list(getattr(module, "__path__", []))
    if not places or not all(any(Path(str(one)).resolve().is_relative_to(root) for root in allowed) for one in places):
        raise SettingError(
            message(
                f"module {name!r} lies outside the folders that code is taken from",
                expected=f"below {', '.join(map(str, allowed))}",
                found=", ".join(map(str, places)) or "a built-in module",
                do=f"rename yours, pass roots=[…], or name its folder in {ROOTS}",
            )
        )
    return module
