"""What the child process of a user's reward function runs (`base.child`), by its path: it imports nothing of workbench.

Messages are a token and cloudpickle bytes from our own parent process (never from a file). First comes the function, then the
arguments of call after call. Each is answered twice: by the token when it is begun, and when it is done by the token and the
fields of an `CallResult` (`rewards.runner`) as JSON, since no object of a function's making may run code in the parent.
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import dataclasses
import functools
import importlib
import importlib.abc
import importlib.util
import inspect
import io
import json
import numbers
import os
import resource
import signal
import sys
import threading
import time
import traceback
import types
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any

TOKEN = 16
"""Bytes that begin every message."""
IMPORTS, IMPORTED = b"+", b"-"
"""What follows the token of a call that begins to import a module, and has."""
MAX_RESULT = 16 << 20
"""Most bytes of an answer."""
PRINTED = 4000
"""Characters of what a call prints that are kept: people look into a function by printing."""
LONGEST = 20_000
"""Most characters of a traceback or an error line."""


async def awaited(result: Any) -> Any:
    """Await the result of an async function, as a coroutine that `asyncio.run` takes."""
    return await result


def written(result: Any, depth: int = 0) -> Any:
    """Convert a result to JSON's types: a dataclass to a dict, a `Score` to a dict under the key `Score`, a tensor or
    array to a list.

    What is neither plain data nor a number becomes its repr, which is not a valid reward.
    """
    if result is None or isinstance(result, bool | str):
        return result
    if isinstance(result, numbers.Number) and not isinstance(result, complex):
        return number(result)
    return shown(result) if depth > 50 else _of_parts(result, depth)


def _of_parts(result: Any, depth: int) -> Any:
    if dataclasses.is_dataclass(result) and not isinstance(result, type):
        return written(fields_of(result), depth + 1)
    if isinstance(result, Mapping):
        return {str(name): written(one, depth + 1) for name, one in result.items()}
    if isinstance(result, list | tuple):
        return [written(one, depth + 1) for one in result]
    return written(result.tolist(), depth + 1) if callable(getattr(result, "tolist", None)) else shown(result)


def fields_of(record: Any) -> dict[str, Any]:
    """Return a dataclass as a dict of its fields; a `Score` as a dict with the one key `Score`."""
    found = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
    ours = (type(record).__module__, type(record).__name__) == ("workbench.rewards.score", "Score")
    return {"Score": found} if ours else found


def number(value: Any) -> float | int | str:
    """Convert a number to int or float; an integer of 4096 bits or more to a description such as "an integer of 9000
    bits"."""
    if isinstance(value, numbers.Integral):
        return int(value) if int(value).bit_length() < 4096 else f"an integer of {int(value).bit_length()} bits"
    return float(value)


def shown(value: Any) -> str:
    """Return the repr of a value that is not plain data, cut to 200 characters."""
    return f"<{type(value).__name__}> {value!r}"[:200]


class Printed(io.TextIOBase):
    """Standard output during a call: keeps the first characters, and passes everything on to the process's own output."""

    def __init__(self, there: Any) -> None:
        self.there, self.kept = there, ""

    def write(self, text: str) -> int:
        """Write text to the process's own output, and keep it while fewer than `PRINTED` characters are kept."""
        self.kept += text[: PRINTED - len(self.kept)]
        with contextlib.suppress(OSError, ValueError):  # closed, or not of its encoding
            self.there.write(text.encode("utf-8", "backslashreplace").decode())
        return len(text)

    def flush(self) -> None:
        """Flush the process's own output."""
        self.there.flush()


@contextlib.contextmanager
def as_before() -> Iterator[None]:
    """Context manager around a call: restores working folder, environment, umask, signal handlers and alarms for the
    next row."""
    folder, env, mask = "", dict(os.environ), os.umask(0o077)
    os.umask(mask)
    with contextlib.suppress(OSError):  # it was removed
        folder = os.getcwd()
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in handlers.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)
        os.umask(mask)
        if dict(os.environ) != env:
            os.environ.clear()
            os.environ.update(env)
        with contextlib.suppress(OSError):
            os.chdir(folder)


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Context manager that raises `TimeoutError` in a call that takes more than `seconds` of processor time.

    The error is raised again every second until the call has ended, because libraries may catch it.
    """

    def late(*_: Any) -> None:
        raise TimeoutError(f"the call takes more than {seconds:g} s of processor time")

    signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def answer(function: Any, arguments: dict[str, Any]) -> bytes:
    """Call the function and return (ok, result, error line, traceback, seconds, printed) as JSON. All its exceptions
    are caught."""
    printed = Printed(sys.stdout)
    began = time.perf_counter()
    outcome: tuple[Any, ...]
    limit = getattr(function, "processor_seconds", None)
    try:
        with contextlib.redirect_stdout(printed), as_before(), within(limit) if limit else contextlib.nullcontext():
            passed, logs = with_logs(arguments)
            result = function(**passed)
            result = asyncio.run(awaited(result)) if inspect.isawaitable(result) else result
            text = json.dumps(written({"rewards": result, "extra_logs": logs} if logs else result))
            outcome = (True, None, "", None)
            if len(text) > MAX_RESULT:
                why = f"the function's result has {len(text)} bytes; expected at most {MAX_RESULT}: return less"
                outcome, text = (False, None, why, None), "null"
            del result
    except BaseException as error:  # noqa: BLE001 - scorers raise BaseException time-outs too; the row keeps it
        outcome, text = (False, None, *texts_of(error)), "null"
        if limit and isinstance(error, TimeoutError):  # the response's doing: it counts as 0
            outcome, text = (True, None, "", None), json.dumps({"score": 0.0, "status": "timeout", "why": str(error)})
    rest = json.dumps([*outcome[2:], time.perf_counter() - began, printed.kept])
    return f"[{json.dumps(outcome[0])}, {text}, {rest[1:]}".encode()


def with_logs(arguments: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Replace the arguments `log_extra` and `log_metric`, which TRL's functions take, by functions that collect what
    they log.

    Returns (the call's arguments, the logged values: name → one value per row, as in OpenRLHF's `extra_logs`).
    """
    logs: dict[str, list[Any]] = {}

    def log_extra(column: str, values: Any) -> None:
        logs.setdefault(column, []).extend(values)

    def log_metric(name: str, value: Any) -> None:
        logs[name] = [value] * len(arguments["completions"])

    functions = {function.__name__: function for function in (log_extra, log_metric)}
    return {
        name: functions[name] if name in functions and isinstance(value, str) and value == name else value
        for name, value in arguments.items()
    }, logs


def texts_of(error: BaseException) -> tuple[str, str]:
    """Format an exception as (one line, traceback), both cut to `LONGEST` characters."""
    limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
    within = f" (this worker may take {limit >> 20} MiB: memory_limit_mb)" if isinstance(error, MemoryError) else ""
    text = "".join(traceback.format_exception(error))
    return f"{type(error).__name__}: {error}{within}"[:LONGEST], text[-LONGEST:]


class TextLoader(importlib.abc.InspectLoader):
    """Imports a module from the source text that the trainer read and hashed, even where the file has changed since."""

    def __init__(self, path: str, text: str) -> None:
        self.path, self.text = path, text

    def is_package(self, fullname: str) -> bool:
        """Return whether the file is the `__init__.py` of a package."""
        return os.path.basename(self.path) == "__init__.py"

    def get_source(self, fullname: str) -> str:
        """Return the module's source text."""
        return self.text

    def get_code(self, fullname: str) -> types.CodeType:
        """Compile the module under the file's own path, so that tracebacks show its lines."""
        return self.source_to_code(self.text, self.path)


def from_file(record: dict[str, Any]) -> Any:
    """Load the function of a `FileFunction.record`, from its source text.

    The folder of the file is put on `sys.path`; for a file in a package it comes after the package's folder, so that
    modules beside the file hide no others. Processes that the function starts can import the module by its name, from
    the same text. If the record has `construct`, the name is a class (a reward manager written for verl), and an object
    of it is returned. `functions` are records of other files' functions among the arguments.
    """
    if record.get("construct"):
        stand_in_for_verl()
    kwargs = {**record["kwargs"], **{name: from_file(one) for name, one in record["functions"].items()}}
    sys.path[:] = [record["root"], *sys.path, os.path.dirname(record["path"])]
    name = record["module"]
    if "." in name:
        imported(name.rpartition(".")[0], record["root"])
    else:
        importable(name, record["text"])
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
    """Import a package below the folder `root`, and the packages that it is in.

    A package that cannot be imported, as it needs what is not installed, is replaced by an empty one, so that its
    modules can be imported.
    """
    if parent := package.rpartition(".")[0]:
        imported(parent, root)
    try:
        importlib.import_module(package)
    except ImportError:
        module = types.ModuleType(package)
        module.__path__ = [os.path.join(root, *package.split("."))]
        sys.modules[package] = module


def importable(name: str, text: str) -> None:
    """Let processes that this one starts (by `multiprocessing`'s spawn) import the module `name`, from a zip file in
    memory on `sys.path`.

    It lasts as long as this process. A system without such files (macOS) cannot do it.
    """
    with contextlib.suppress(AttributeError, OSError):
        place = os.memfd_create(name)  # type: ignore[attr-defined,unused-ignore]
        with zipfile.ZipFile(os.fdopen(place, "wb", closefd=False), "w") as packed:
            packed.writestr(f"{name}.py", text)
        sys.path.append(f"/proc/{os.getpid()}/fd/{place}")


def stand_in_for_verl() -> None:
    """Put the few names that verl's reward managers import into `sys.modules`, where verl is not installed."""
    if importlib.util.find_spec("verl") is not None:
        return
    names = ("verl", "verl.workers", "verl.workers.reward_manager", "verl.workers.reward_manager.abstract")
    modules = {name: types.ModuleType(name) for name in names}
    sys.modules.update(modules)
    vars(modules["verl"])["DataProto"] = object
    for name in names[2:]:
        vars(modules[name]).update(AbstractRewardManager=object, register=lambda _: lambda kind: kind)


@contextlib.contextmanager
def reporting_imports(parent: Any, token: bytearray) -> Iterator[None]:
    """Context manager around a call that tells the parent process when the call begins and ends an import.

    Time spent on imports does not count against the call's limit, as a function that imports at its first call takes
    longer in a new worker.
    """
    plain, owner, inside = builtins.__import__, (os.getpid(), threading.get_ident()), list[str]()

    def reporting_import(name: str, *args: Any, **options: Any) -> Any:
        if inside or name in sys.modules or (os.getpid(), threading.get_ident()) != owner:
            return plain(name, *args, **options)
        inside.append(name)
        with contextlib.suppress(OSError):
            parent.send(token + IMPORTS)
        try:
            return plain(name, *args, **options)
        finally:
            inside.clear()
            with contextlib.suppress(OSError):
                parent.send(token + IMPORTED)

    builtins.__import__ = reporting_import
    try:
        yield
    finally:
        builtins.__import__ = plain


def main(parent: Any) -> None:
    """Load the function that the parent process sends, then answer call after call until the parent ends this process."""
    # as the parent has it
    cloudpickle = importlib.import_module("cloudpickle" if importlib.util.find_spec("cloudpickle") else "pickle")

    # beyond it Python raises `MemoryError`; address space that is only set aside, as CUDA does, does not count
    parent.limit(resource.RLIMIT_DATA, int(os.environ.pop("WORKBENCH_WORKER_MEMORY_MB")) << 20)
    pid = os.getpid()
    frame = parent.frames.get()
    parent.send(frame[:TOKEN])  # what follows is the function's own
    try:
        function = cloudpickle.loads(frame[TOKEN:])  # bytes from our own parent, over a socket pair
        if isinstance(function, dict):
            function = from_file(function)
        for name in getattr(function, "needs", ()):
            importlib.import_module(name)
        reply: list[Any] = [True, None]
    except BaseException as error:  # noqa: BLE001 - said to the parent, which knows which function it was
        line, trace = texts_of(error)
        reply = [False, None, f"the function cannot be loaded in a worker: {line}", trace]
    sys.stdout.flush()
    parent.send(frame[:TOKEN] + json.dumps(reply).encode())  # where it is ready: deadlines count from here
    while reply[0]:
        frame = parent.frames.get()
        parent.send(frame[:TOKEN])
        with reporting_imports(parent, frame[:TOKEN]):
            body = answer(function, cloudpickle.loads(frame[TOKEN:]))
        if os.getpid() != pid:  # a fork that the function made has come back: it is not asked
            os._exit(0)
        with contextlib.suppress(OSError, ValueError):  # somebody closed it
            sys.stdout.flush()
        parent.send(frame[:TOKEN] + body)
