"""Functions of Python files: read in this process, run only in worker processes.

Importing a file runs its code. The trainer's process therefore only reads the text, takes signatures from its syntax tree,
and sends the text to the worker processes, which execute it as a module; where it imports anything of the package that it is
in, as one of the package's modules, whose `__init__.py` files are run before it. Only files below an allowed root are read: the current folder, and
those in `WORKBENCH_CODE_ROOTS`; such a package must lie there as a whole.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import itertools
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from workbench.base.errors import DataError, WorkbenchError, unknown

MAX_BYTES = 4 << 20
"""A longer file is refused."""
ROOTS = "WORKBENCH_CODE_ROOTS"
"""Environment variable with further allowed folders, separated as in PATH."""


def called(function: Any) -> str:
    """The name of a function, and of a partial's; of a callable object its class's."""
    function = function.func if isinstance(function, partial) else function
    return str(getattr(function, "__name__", type(function).__name__))


class FileFunction:
    """A function of a Python file, from `load_function`: only worker processes run it. `sha256` is of the file's text."""

    construct = False
    """True for a name that is a class: a worker makes an object of it with the kwargs, and calls the object."""

    def __init__(
        self,
        path: Path,
        text: str,
        name: str,
        kwargs: Mapping[str, Any],
        signature: inspect.Signature,
        package: str = "",
        inside: bool = False,
    ) -> None:
        self.path = path
        self.text = text
        self.package = package
        self.inside = inside
        self.kwargs = dict(kwargs)
        self.sha256 = hashlib.sha256(text.encode()).hexdigest()
        self.__name__ = name
        self.__signature__ = signature

    def describe(self) -> dict[str, str]:
        """File name, function name and SHA-256 of the file's text, for the run's record."""
        return {"path": self.path.name, "function": self.__name__, "sha256": self.sha256}

    def record(self, more: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
        """What a worker process needs to load the function: path, module, name, source text, arguments bound here or in `more`."""
        kwargs = {**self.kwargs, **more}
        inside = self.package.count(".") + 1 if self.package else 0
        # a file that imports nothing of its package needs none of it, which may not be importable here
        alone = f"workbench_reward_{self.path.stem}"
        module = f"{self.package}.{self.path.stem}" if self.package and self.inside else alone
        functions = {name: one.record() for name, one in kwargs.items() if isinstance(one, FileFunction)}
        return {
            "path": str(self.path),
            "root": str(self.path.parents[inside]),
            "module": module.removesuffix(".__init__"),
            "name": self.__name__,
            "text": self.text,
            "kwargs": {name: one for name, one in kwargs.items() if name not in functions},
            "functions": functions,
            "construct": self.construct,
        }

    def __call__(self, **arguments: Any) -> Any:
        """Raise `DataError`: a call would run the file's code in the trainer's process."""
        do = "leave out in_process=True, or import the function yourself and pass it"
        raise DataError(f"{self.__name__} of {self.path.name} can be called in worker processes alone", do=do)

    def __repr__(self) -> str:
        return f"{self.__name__} of {self.path.name} ({self.sha256[:8]})"


def load_function(
    path: str | Path, name: str = "compute_score", *, roots: Sequence[str | Path] = (), **reward_kwargs: Any
) -> FileFunction:
    """A function of a Python file, to be run by a `Reward`'s worker processes.

    `reward_kwargs` are bound to the function and win over a call's arguments; `roots` go to `allowed_roots`. Raises
    `DataError` where the file is missing, outside every allowed folder, not Python, or without such a function.
    """
    file = Path(str(path).removeprefix("file://"))
    if not file.is_file():
        raise DataError(f"no reward file at {str(path)!r}", expected="a Python file", do="check the path")
    file = file.resolve()
    check_roots(f"reward file {str(path)!r}", [file], allowed_roots(roots), DataError, "move the file there")
    if file.stat().st_size > MAX_BYTES:
        raise DataError(f"reward file {str(path)!r} is too large", expected=f"at most {MAX_BYTES >> 20} MiB")
    try:
        text = file.read_text(encoding="utf-8")
        tree = ast.parse(text, filename=file.name)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as cause:
        raise DataError(f"reward file {str(path)!r}", expected="valid Python", found=cause) from cause
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    # a name that is assigned (a partial, an object of a class) may be callable too; its signature cannot be read
    if name not in functions and name not in _assigned(tree):
        raise DataError(f"{str(path)!r}: " + unknown("function of this file", name, functions))
    dots = max((node.level for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)), default=0)
    package = _package(file, dots, allowed_roots(roots))
    if name in functions and functions[name].args.kwarg is None:
        own = functions[name].args
        taken = [arg.arg for arg in (*own.args, *own.kwonlyargs)]
        if strange := next((one for one in reward_kwargs if one not in taken), None):
            raise DataError(f"{str(path)!r}: " + unknown(f"argument of {name}", strange, taken))
    signature = _signature(functions.get(name), reward_kwargs)
    return FileFunction(file, text, name, reward_kwargs, signature, package, dots > 0 or _imports(tree, package))


def _imports(tree: ast.Module, package: str) -> bool:
    """Whether a file imports anything of its own package, by the whole name."""
    names = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    return bool(package) and package.partition(".")[0] in {name.partition(".")[0] for name in names}


def _package(file: Path, dots: int, allowed: Sequence[Path]) -> str:
    """Dotted name of the package that a file is in, at least as deep as the `dots` of its imports; "" for none.

    Raises `DataError` for relative imports of a package that is not below an allowed folder.
    """
    marked = len(list(itertools.takewhile(lambda folder: (folder / "__init__.py").is_file(), file.parents)))
    folders = file.parents[: max(marked, dots)]
    if dots:
        what = f"the package of {file.name!r}, which has relative imports,"
        check_roots(what, folders[-1:], allowed, DataError, "move it there")
    inside = folders and any(folders[-1].is_relative_to(root) for root in allowed)
    return ".".join(folder.name for folder in reversed(folders)) if inside else ""


def allowed_roots(roots: Sequence[str | Path] = ()) -> list[Path]:
    """The folders from which code may be loaded: the current folder, those in `WORKBENCH_CODE_ROOTS`, and `roots`."""
    named = [entry for entry in os.environ.get(ROOTS, "").split(os.pathsep) if entry]
    return [Path(root).resolve() for root in (Path.cwd(), *named, *roots)]


def check_roots(
    what: str, places: Sequence[Path], allowed: Sequence[Path], error: type[WorkbenchError], do: str
) -> None:
    """Raise `error` unless there are places and all are below an allowed folder; `what` and `do` are for its message."""
    if not places or not all(any(place.is_relative_to(root) for root in allowed) for place in places):
        what, found = f"{what} lies outside the folders from which code may be loaded", ", ".join(map(str, places))
        expected, do = f"below {', '.join(map(str, allowed))}", f"{do}, pass roots=[…], or name its folder in {ROOTS}"
        raise error(what, expected=expected, found=found or "a built-in module", do=do)


def _assigned(tree: ast.Module) -> set[str]:
    targets = [target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets]
    classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    return {target.id for target in targets if isinstance(target, ast.Name)} | classes


class Written(str):
    """A default's source text: its value stays in the file."""

    __repr__ = str.__str__


_VERL = ("data_source", "solution_str", "ground_truth", "extra_info")


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef | None, given: Mapping[str, Any]) -> inspect.Signature:
    """From the syntax tree; a name without a visible signature is taken to have verl's arguments."""
    kinds = inspect.Parameter
    if node is None:
        return inspect.Signature([kinds(name, kinds.KEYWORD_ONLY) for name in _VERL if name not in given])
    own = node.args
    plain = [*own.posonlyargs, *own.args]
    pairs = [*zip(plain[len(plain) - len(own.defaults) :], own.defaults, strict=True)]
    pairs += [
        (arg, default) for arg, default in zip(own.kwonlyargs, own.kw_defaults, strict=True) if default is not None
    ]
    optional = {arg.arg: Written(ast.unparse(default)) for arg, default in pairs}
    groups: list[tuple[Any, Sequence[ast.arg | None]]] = [
        (kinds.POSITIONAL_ONLY, own.posonlyargs),
        (kinds.POSITIONAL_OR_KEYWORD, own.args),
        (kinds.VAR_POSITIONAL, [own.vararg]),
        (kinds.KEYWORD_ONLY, own.kwonlyargs),
        (kinds.VAR_KEYWORD, [own.kwarg]),
    ]
    found = [kinds(arg.arg, kind) for kind, several in groups for arg in several if arg and arg.arg not in given]
    found = [one.replace(default=optional[one.name]) if one.name in optional else one for one in found]
    return inspect.Signature(found, __validate_parameters__=False)
