"""The child process that runs a user's reward function. Started by path: it imports nothing of workbench.

Frames on stdin and stdout: eight bytes of length, then cloudpickle bytes from our own parent process (never
from a file). First frame: the function, answered by None or why it cannot be loaded. Then each frame is (row number, batched, arguments), and each answer
(row number, ok, result or (error line, traceback), seconds). stdout is kept for frames; prints go to stderr.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
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


def answer(function: Any, arguments: dict[str, Any]) -> tuple[bool, Any, float]:
    """(ok, result or (error line, traceback), seconds). Every exception of foreign code is caught here."""
    began = time.perf_counter()
    try:
        return True, call(function, arguments), time.perf_counter() - began
    except BaseException as error:  # noqa: BLE001 - scorers raise BaseException time-outs too; the row keeps it
        text = "".join(traceback.format_exception(error))
        return False, (f"{type(error).__name__}: {error}", text), time.perf_counter() - began


def from_file(record: dict[str, Any]) -> Any:
    """A function of a file, executed as a module of its own; its folder can be imported from."""
    module = types.ModuleType("workbench_reward_" + os.path.splitext(os.path.basename(record["path"]))[0])
    module.__file__ = record["path"]
    sys.modules[module.__name__] = module  # dataclasses and pickle look a class up by its module
    sys.path.insert(0, os.path.dirname(record["path"]))
    # the text is what the trainer read and hashed, whatever the file has become
    exec(compile(record["text"], record["path"], "exec"), vars(module))  # noqa: S102 - the user's own reward file
    function = getattr(module, record["name"])
    return functools.partial(function, **record["kwargs"]) if record["kwargs"] else function


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
        ok, result, seconds = answer(function, arguments)
        try:
            body = cloudpickle.dumps((number, ok, result, seconds))
        except Exception as error:  # noqa: BLE001 - a result that cannot travel is that row's failure
            body = cloudpickle.dumps((number, False, (f"the result cannot be pickled: {error}", ""), seconds))
        write_frame(frames, body)


if __name__ == "__main__":
    main()
