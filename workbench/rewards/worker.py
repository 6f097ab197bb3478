"""The child process that runs a user's reward function. Started by path: it imports nothing of workbench.

Frames on stdin and stdout: eight bytes of length, then cloudpickle bytes from our own parent process (never
from a file). First frame: the function, answered by None or why it cannot be loaded. Then each frame is (row number, batched, arguments), and each answer
(row number, ok, result or (error line, traceback), seconds, what it printed). stdout is kept for frames.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.abc
import importlib.util
import inspect
import io
import os
import struct
import sys
import threading
import time
import traceback
import types
from typing import Any, BinaryIO


def read_frame(stream: BinaryIO) -> bytes | None:
    """One frame, or None where the stream has ended."""
    head = _read(stream, 8)
    return _read(stream, struct.unpack("<Q", head)[0]) if head is not None else None


def _read(stream: BinaryIO, size: int) -> bytes | None:
    """Exactly `size` bytes: an unbuffered pipe gives them in pieces."""
    parts = []
    while size:
        part = stream.read(size)
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def write_frame(stream: BinaryIO, body: bytes) -> None:
    """One frame, flushed."""
    left = memoryview(struct.pack("<Q", len(body)) + body)
    while left:
        left = left[stream.write(left) :]
    stream.flush()


def call(function: Any, arguments: dict[str, Any]) -> Any:
    """Call it; await what it returns where that is awaitable."""
    result = function(**arguments)
    if inspect.isawaitable(result):

        async def finish() -> Any:
            return await result

        return asyncio.run(finish())
    return result


PRINTED = 4000
"""Characters of what a call prints that are kept: people look into a function by printing."""


def answer(function: Any, arguments: dict[str, Any]) -> tuple[bool, Any, float, str]:
    """(ok, result or (error line, traceback), seconds, printed). Every exception of foreign code is caught here."""
    printed = io.StringIO()
    began = time.perf_counter()
    try:
        with contextlib.redirect_stdout(printed):
            result = call(function, arguments)
        return True, result, time.perf_counter() - began, printed.getvalue()[:PRINTED]
    except BaseException as error:  # noqa: BLE001 - scorers raise BaseException time-outs too; the row keeps it
        text = "".join(traceback.format_exception(error))
        said = (f"{type(error).__name__}: {error}", text)
        return False, said, time.perf_counter() - began, printed.getvalue()[:PRINTED]


class TextLoader(importlib.abc.InspectLoader):
    """Loads a module from a text that is here already: what the trainer read and hashed, whatever the file is now."""

    def __init__(self, path: str, text: str) -> None:
        self.path, self.text = path, text

    def get_source(self, fullname: str) -> str:
        """The text."""
        return self.text

    def get_code(self, fullname: str) -> types.CodeType:
        """Compiled under the file's own path, so that tracebacks show its lines."""
        return self.source_to_code(self.text, self.path)


def from_file(record: dict[str, Any]) -> Any:
    """A function of a file, loaded as a module of its own; its folder can be imported from.

    With `construct` the name is a class (a reward manager written for verl), and an object of it is what is called.
    """
    if record.get("construct"):
        stand_in_for_verl()
    sys.path.insert(0, os.path.dirname(record["path"]))
    name = "workbench_reward_" + os.path.splitext(os.path.basename(record["path"]))[0]
    spec = importlib.util.spec_from_loader(name, TextLoader(record["path"], record["text"]), origin=record["path"])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    module.__file__ = record["path"]
    sys.modules[name] = module  # dataclasses and pickle look a class up by its module
    spec.loader.exec_module(module)
    function = getattr(module, record["name"])
    if record.get("construct"):
        return function(**record["kwargs"])
    return functools.partial(function, **record["kwargs"]) if record["kwargs"] else function


def stand_in_for_verl() -> None:
    """The few names that verl's reward managers import, where verl itself is not installed."""
    if importlib.util.find_spec("verl") is not None:
        return
    names = ("verl", "verl.workers", "verl.workers.reward_manager", "verl.workers.reward_manager.abstract")
    made = {name: types.ModuleType(name) for name in names}
    sys.modules.update(made)
    vars(made["verl"])["DataProto"] = object
    for name in names[2:]:
        vars(made[name]).update(AbstractRewardManager=object, register=lambda _: lambda kind: kind)


def limit_memory() -> None:
    """An address space limit, where the trainer gave one: a runaway result is an error here and no swap there."""
    limit = os.environ.pop("WORKBENCH_WORKER_MEMORY_MB", None)
    if limit and sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (int(limit) << 20, int(limit) << 20))


def end_with_parent(parent: int) -> None:
    """A function that never returns does not look at stdin: leave when the parent has."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def main() -> None:
    """Serve until stdin closes."""
    import cloudpickle

    limit_memory()
    threading.Thread(target=end_with_parent, args=(os.getppid(),), daemon=True).start()
    frames = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever the function prints must not break the frames
    source = sys.stdin.buffer
    first = read_frame(source)
    if first is None:
        return
    try:
        function = cloudpickle.loads(first)  # bytes from our own parent, over a pipe
        if isinstance(function, dict):
            function = from_file(function)
    except BaseException as error:  # noqa: BLE001 - said to the parent, which knows which function it was
        write_frame(frames, cloudpickle.dumps(f"{type(error).__name__}: {error}"))
        return
    write_frame(frames, cloudpickle.dumps(None))  # ready: deadlines count from here
    while (frame := read_frame(source)) is not None:
        number, arguments = cloudpickle.loads(frame)
        ok, result, seconds, printed = answer(function, arguments)
        try:
            body = cloudpickle.dumps((number, ok, result, seconds, printed))
        except Exception as error:  # noqa: BLE001 - a result that cannot travel is that row's failure
            body = cloudpickle.dumps((number, False, (f"the result cannot be pickled: {error}", ""), seconds, printed))
        write_frame(frames, body)


if __name__ == "__main__":
    main()
