"""What the child process of a user's reward function runs (`base.child`), by its path: it imports nothing of workbench.

Messages are cloudpickle bytes from our own parent process (never from a file). First comes the function, then the arguments
of call after call; each is answered by the fields of an `Answer` (`rewards.runner`).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import importlib
import importlib.abc
import importlib.util
import inspect
import io
import os
import resource
import sys
import time
import traceback
import types
from typing import Any


async def awaited(result: Any) -> Any:
    """Await the result of an async function, for `asyncio.run`."""
    return await result


def plain(result: Any) -> Any:
    """A result without classes of the function's file, which the parent process does not have: a dataclass as a dict."""
    ours = type(result).__module__.startswith("workbench.")
    if dataclasses.is_dataclass(result) and not isinstance(result, type) and not ours:
        return {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
    return [plain(one) for one in result] if type(result) is list else result


PRINTED = 4000
"""Characters of what a call prints that are kept: people look into a function by printing."""


def answer(function: Any, arguments: dict[str, Any]) -> tuple[Any, ...]:
    """Call the function: (ok, result, error line, traceback, seconds, printed). All its exceptions are caught."""
    printed = io.StringIO()
    began = time.perf_counter()
    found: tuple[Any, ...]
    try:
        with contextlib.redirect_stdout(printed):
            result = function(**arguments)
            result = asyncio.run(awaited(result)) if inspect.isawaitable(result) else result
            found = (True, plain(result), "", None)
    except BaseException as error:  # noqa: BLE001 - scorers raise BaseException time-outs too; the row keeps it
        found = (False, None, f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error)))
    return *found, time.perf_counter() - began, printed.getvalue()[:PRINTED]


class TextLoader(importlib.abc.InspectLoader):
    """Loads a module from the source text that the trainer read and hashed, even where the file has changed since."""

    def __init__(self, path: str, text: str) -> None:
        self.path, self.text = path, text

    def is_package(self, fullname: str) -> bool:
        """Whether it is the `__init__.py` of a package."""
        return os.path.basename(self.path) == "__init__.py"

    def get_source(self, fullname: str) -> str:
        """The module's source text."""
        return self.text

    def get_code(self, fullname: str) -> types.CodeType:
        """The module's code, compiled under the file's own path, so that tracebacks show its lines."""
        return self.source_to_code(self.text, self.path)


def from_file(record: dict[str, Any]) -> Any:
    """Load the function of a `FileFunction.record`, from its text.

    The folder of the file is put on `sys.path`, for a file of a package behind that of the package: there its neighbours hide
    no other modules, and processes that the function starts can import the file by its name. With `construct` in the record the name is a class (a reward manager written for verl), and an object of it is
    returned. `functions` are records of functions of files among the arguments.
    """
    if record.get("construct"):
        stand_in_for_verl()
    kwargs = {**record["kwargs"], **{name: from_file(one) for name, one in record["functions"].items()}}
    sys.path[:] = [record["root"], *sys.path, os.path.dirname(record["path"])]
    name = record["module"]
    if record["relative"] and "." in name:
        imported(name.rpartition(".")[0], record["root"])
    spec = importlib.util.spec_from_loader(name, TextLoader(record["path"], record["text"]), origin=record["path"])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    module.__file__ = record["path"]
    if spec.submodule_search_locations is not None:
        spec.submodule_search_locations.append(os.path.dirname(record["path"]))
    sys.modules[name] = module  # dataclasses and pickle look a class up by its module
    spec.loader.exec_module(module)
    function = getattr(module, record["name"])
    if record.get("construct"):
        return function(**kwargs)
    return functools.partial(function, **kwargs) if kwargs else function


def imported(package: str, root: str) -> None:
    """Import a package below the folder `root`, and those that it is in. One that cannot be imported, as it needs what is not
    installed, is left empty: modules in it can be imported all the same."""
    if parent := package.rpartition(".")[0]:
        imported(parent, root)
    try:
        importlib.import_module(package)
    except ImportError:
        module = types.ModuleType(package)
        module.__path__ = [os.path.join(root, *package.split("."))]
        sys.modules[package] = module


def stand_in_for_verl() -> None:
    """Put the few names that verl's reward managers import into `sys.modules`, where verl is not installed."""
    if importlib.util.find_spec("verl") is not None:
        return
    names = ("verl", "verl.workers", "verl.workers.reward_manager", "verl.workers.reward_manager.abstract")
    made = {name: types.ModuleType(name) for name in names}
    sys.modules.update(made)
    vars(made["verl"])["DataProto"] = object
    for name in names[2:]:
        vars(made[name]).update(AbstractRewardManager=object, register=lambda _: lambda kind: kind)


def limit_memory() -> None:
    """Limit this process to `WORKBENCH_WORKER_MEMORY_MB`, where that is set: beyond it Python raises `MemoryError`."""
    limit = os.environ.pop("WORKBENCH_WORKER_MEMORY_MB", None)
    if limit:
        resource.setrlimit(resource.RLIMIT_AS, (int(limit) << 20, int(limit) << 20))


def main(parent: Any) -> None:
    """Load the function that the parent process sends, then answer call after call until the parent ends this process."""
    import cloudpickle

    limit_memory()
    try:
        function = cloudpickle.loads(parent.frames.get())  # bytes from our own parent, over a socket pair
        if isinstance(function, dict):
            function = from_file(function)
    except BaseException as error:  # noqa: BLE001 - said to the parent, which knows which function it was
        why = f"the function cannot be loaded in a worker: {type(error).__name__}: {error}"
        parent.send(cloudpickle.dumps((False, None, why)))
        return
    parent.send(cloudpickle.dumps((True, None)))  # ready: deadlines count from here
    while True:
        found = answer(function, cloudpickle.loads(parent.frames.get()))
        try:
            body = cloudpickle.dumps(found)
        except Exception as error:  # noqa: BLE001 - a result that cannot travel is that row's failure
            body = cloudpickle.dumps((False, None, f"the function's result cannot be pickled: {error}", "", *found[4:]))
        parent.send(body)
