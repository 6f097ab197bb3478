"""A function by its file: read here, never imported here; its text runs in the workers alone.

Importing a file is running it. The trainer's process reads the text, takes signatures from its syntax tree,
and sends text and hash to the pool's processes, where it is executed as the module that it is. Only files
below an allowed root are taken: the folder that Python was started in, and those in `WORKBENCH_CODE_ROOTS`.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from workbench.errors import DataError, message, unknown

MAX_BYTES = 4 << 20
"""A longer file is no reward file."""
ROOTS = "WORKBENCH_CODE_ROOTS"
"""Environment variable with further allowed folders, separated as in PATH."""


class FileFunction:
    """A function of a Python file that only worker processes run. `sha256` is of the text that will run."""

    def __init__(self, path: Path, text: str, name: str, kwargs: Mapping[str, Any], signature: inspect.Signature):
        self.path = path
        self.text = text
        self.kwargs = dict(kwargs)
        self.sha256 = hashlib.sha256(text.encode()).hexdigest()
        self.construct = False
        self.__name__ = name
        self.__signature__ = signature

    def describe(self) -> dict[str, str]:
        """Where it is from, for the run's record."""
        return {"path": self.path.name, "function": self.__name__, "sha256": self.sha256}

    def constructed(self, **arguments: Any) -> FileFunction:
        """The same name as a class: a worker makes an object of it with these arguments and calls that."""
        made = FileFunction(self.path, self.text, self.__name__, arguments, self.__signature__)
        made.construct = True
        return made

    def record(self) -> dict[str, Any]:
        """What a worker needs to run it."""
        named = {"path": str(self.path), "text": self.text, "name": self.__name__, "kwargs": self.kwargs}
        return {**named, "construct": self.construct}

    def __call__(self, **arguments: Any) -> Any:
        """Refused: that would run the file's code in the trainer."""
        raise DataError(
            message(
                f"{self.__name__} of {self.path.name} runs in worker processes alone",
                do="leave in_process=True away, or import the function yourself and pass that",
            )
        )

    def __repr__(self) -> str:
        return f"{self.__name__} of {self.path.name} ({self.sha256[:8]})"


def load_function(
    path: str | Path, name: str = "compute_score", *, roots: Sequence[str | Path] = (), **reward_kwargs: Any
) -> FileFunction:
    """A function from a Python file, to be run by a `Reward`'s workers; `reward_kwargs` are bound and win over a call's.

    `roots` allows further folders. Raises `DataError` where the file is missing, outside every root, not Python, or
    without such a function (the functions there are, are listed).
    """
    file = Path(str(path).removeprefix("file://"))
    if not file.is_file():
        raise DataError(message(f"no reward file at {str(path)!r}", expected="a Python file", do="check the path"))
    file = file.resolve()
    _check_root(file, roots)
    if file.stat().st_size > MAX_BYTES:
        raise DataError(message(f"reward file {str(path)!r}", expected=f"at most {MAX_BYTES >> 20} MiB of Python"))
    try:
        text = file.read_text(encoding="utf-8")
        tree = ast.parse(text, filename=file.name)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as cause:
        raise DataError(message(f"reward file {str(path)!r}", expected="Python", found=cause)) from cause
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    # a name that is assigned (a partial, a class's instance) is callable too; its signature is not to be seen
    if name not in functions and name not in _assigned(tree):
        raise DataError(f"{str(path)!r}: " + unknown("function of that file", name, functions))
    return FileFunction(file, text, name, reward_kwargs, _signature(functions.get(name), reward_kwargs))


def _check_root(file: Path, roots: Sequence[str | Path]) -> None:
    named = [entry for entry in os.environ.get(ROOTS, "").split(os.pathsep) if entry]
    allowed = [Path(root).resolve() for root in (Path.cwd(), *named, *roots)]
    if not any(file.is_relative_to(root) for root in allowed):
        raise DataError(
            message(
                f"reward file {str(file)!r} lies outside the folders that code is taken from",
                expected=f"below {', '.join(map(str, allowed))}",
                do=f"move it there, pass roots=[…], or name its folder in {ROOTS}",
            )
        )


def _assigned(tree: ast.Module) -> set[str]:
    targets = [target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets]
    classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    return {target.id for target in targets if isinstance(target, ast.Name)} | classes


_VERL = ("data_source", "solution_str", "ground_truth", "extra_info")


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef | None, given: Mapping[str, Any]) -> inspect.Signature:
    """From the syntax tree; a name without a visible signature is taken to speak verl's."""
    kinds = inspect.Parameter
    if node is None:
        return inspect.Signature([kinds(name, kinds.KEYWORD_ONLY) for name in _VERL if name not in given])
    plain = [*node.args.posonlyargs, *node.args.args]
    optional = {arg.arg for arg in plain[len(plain) - len(node.args.defaults) :]}
    optional |= {a.arg for a, d in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True) if d is not None}
    found = [kinds(arg.arg, kinds.POSITIONAL_ONLY) for arg in node.args.posonlyargs]
    found += [kinds(arg.arg, kinds.POSITIONAL_OR_KEYWORD) for arg in node.args.args]
    if node.args.vararg:
        found.append(kinds(node.args.vararg.arg, kinds.VAR_POSITIONAL))
    found += [kinds(arg.arg, kinds.KEYWORD_ONLY) for arg in node.args.kwonlyargs]
    if node.args.kwarg:
        found.append(kinds(node.args.kwarg.arg, kinds.VAR_KEYWORD))
    # a default's value stays in the file: that there is one is all that is needed
    found = [one.replace(default=None) if one.name in optional else one for one in found if one.name not in given]
    return inspect.Signature(found, __validate_parameters__=False)
