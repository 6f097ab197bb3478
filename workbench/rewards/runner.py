"""`Pool`: worker processes for users' reward functions, with a deadline for each row; a worker that hangs is killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from workbench.base import runtime
from workbench.base.activity import HERE
from workbench.base.child import Child, Stuck, TooLong, importing
from workbench.base.errors import RewardError, describe, first_line
from workbench.base.memory import total
from workbench.rewards.files import FileFunction
from workbench.rewards.rate_limit import RateLimit
from workbench.rewards.score import Score
from workbench.rewards.worker import IMPORTED, IMPORTS, MAX_RESULT, TOKEN

T = TypeVar("T")
cloudpickle: Any = import_module("cloudpickle" if find_spec("cloudpickle") else "pickle")
"""Without it, as on a bare machine, only what has a name in a module can travel."""
_PACKAGE = Path(__file__).parents[1]
_WORKER = str(Path(__file__).with_name("worker.py"))
START_SECONDS = 600.0
"""What a worker may take to load the function, and a call to import what it needs, while it uses the processor; a row's
deadline does not count it."""
BEGIN_SECONDS = 10.0
"""What a worker may take to begin with a row. One that does not, because of what an earlier row left in it, is replaced."""
LINES, LINES_SECONDS = 20, 5.0
"""So many lines of what workers print are shown in so many seconds."""


@dataclass(frozen=True)
class Answer:
    """The result of one call of a function in a worker process."""

    ok: bool
    result: Any
    """The function's result, or None."""
    why: str = ""
    """One line, where not ok."""
    traceback: str | None = None
    seconds: float = 0.0
    printed: str = ""
    """The start of what the call printed in its worker."""
    lost: bool = False
    """Whether there was no worker process: the machine's failure, not the function's."""


def _by_value(function: Callable[..., Any]) -> bytes:
    """The pickled function; where its module is the user's own, so that a worker does not import that module.

    A user's module usually imports workbench and torch at its top, which takes each worker seconds. Functions of
    installed packages are pickled by name.
    """
    inner = function.func if isinstance(function, partial) else function
    if isinstance(inner, FileFunction):  # its text travels, and is run in the worker alone
        return cloudpickle.dumps(inner.record(function.keywords if isinstance(function, partial) else {}))
    module: Any = sys.modules.get(getattr(inner, "__module__", None) or "")
    file = getattr(module, "__file__", None) or ""
    folders = {str(_PACKAGE), sys.prefix, sys.base_prefix}
    installed = any(path.is_relative_to(one) for path in (Path(file), Path(file).resolve()) for one in folders)
    by_name = not file or module is sys.modules.get("__main__") or installed
    by_name = by_name and not getattr(module, "__by_value__", False)
    if by_name or module.__name__ in cloudpickle.list_registry_pickle_by_value():
        return cloudpickle.dumps(function)
    cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps(function)
    finally:
        cloudpickle.unregister_pickle_by_value(module)


class Pool:
    """Worker processes that call a function: `Pool(function).map(list of keyword arguments)` returns answers in order.

    Processes start with the first call, stay for the next, and end with `close`, with the pool, or with this process.
    Functions defined in a notebook cell are sent by cloudpickle. Workers import neither torch nor workbench unless the
    function does.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        workers: int = 2,
        timeout: float = 30.0,
        memory_mb: int | None = None,
        rate_limit: RateLimit | None = None,
    ) -> None:
        try:
            self._function = _by_value(function)
        except Exception as cause:
            what = f"reward function {getattr(function, '__name__', describe(function))} cannot be sent to a worker process"
            raise RewardError(what, found=cause, do="pass in_process=True") from cause
        self._size = workers
        self._timeout = timeout
        self._env = {"WORKBENCH_WORKER_MEMORY_MB": str(memory_mb or (total() >> 21) // workers)}
        self._rate_limit = rate_limit
        self._screen = Screen(getattr(function, "__name__", type(function).__name__))
        self._workers: set[Child] = set()
        self._idle: list[Child] = []
        self._failed_starts, self._failed = 0, Answer(False, None)
        self._seats: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None

    def close(self) -> None:
        """End all worker processes; the next `map` starts new ones."""
        self._idle.clear()
        while self._workers:
            self._workers.pop().close()

    def map(self, calls: Sequence[Mapping[str, Any]], limits: Sequence[float] | None = None) -> list[Answer]:
        """Call the function with each of `calls` (keyword arguments): one `Answer` per call, in order. `limits` are seconds
        per call, by default the pool's `timeout`. A call that runs past its limit, or kills its worker, fails alone."""
        bodies = [_packed(arguments) for arguments in calls]
        seconds = [self._timeout] * len(calls) if limits is None else limits
        places, slot = self._places(), (self._rate_limit or RateLimit()).slot
        self._failed_starts = 0

        async def ask(number: int) -> Answer:
            body = bodies[number]
            if isinstance(body, Answer):
                return body
            asked, answer = HERE.enter("reward"), None
            try:
                async with places, slot():
                    HERE.begin(asked)
                    worker = self._idle.pop() if self._idle else None
                    answer = await in_thread(lambda: self._answer(worker, body, seconds[number]))
                return answer
            finally:
                HERE.end(asked, "done" if answer is not None and answer.ok else "raised")

        try:
            return runtime.run_all(ask, range(len(calls)))
        except BaseException:
            self.close()  # an interrupt waits for no row
            raise

    def _places(self) -> asyncio.Semaphore:
        """As many as workers, for all calls of `map` together: several threads may call it at once."""
        if self._seats is None or self._seats[0] is not runtime.loop():
            self._seats = runtime.loop(), asyncio.Semaphore(self._size)
        return self._seats[1]

    def _answer(self, worker: Child | None, body: bytes, limit: float) -> Answer:
        """The answer of a worker, or of a new one: then the call's time starts when that has the function."""
        token = os.urandom(TOKEN)
        if worker is not None and not _begun(worker, token, body):  # an earlier row's doing, not this one's
            self._workers.discard(worker)
            worker = None
        if worker is None:
            if self._failed_starts >= max(self._size, 2):
                return self._given_up()
            worker = Child(
                _WORKER, env={**importing(os.environ), **self._env}, output=partial(self._screen.take, bytearray())
            )
            self._workers.add(worker)
            answer = _loaded(worker, token, self._function)
            if answer.ok and not _begun(worker, token, body):
                answer = Answer(False, None, f"the worker process did not begin within {BEGIN_SECONDS:g} s")
            if not answer.ok:
                self._failed_starts, self._failed = self._failed_starts + 1, answer
                worker.close()
                self._workers.discard(worker)
                return answer
            self._failed_starts = 0
        answer = _answered(worker, token, limit)
        if worker.alive:
            self._idle.append(worker)
        else:
            self._workers.discard(worker)
        return answer

    def _given_up(self) -> Answer:
        """The answer for a row once a few starts in a row have failed. Raises `RewardError` where the machine is to blame."""
        times = f"{self._failed_starts} times in a row"
        if self._failed.lost:
            do = "the reward is not to blame: see what the machine lacks (memory, processes, disk: `workbench doctor`)"
            raise RewardError(f"no worker process could be started, {times}", found=self._failed.why, do=do)
        return Answer(False, None, f"no worker process could load the function, {times}")


class Screen:
    """Shows what worker processes print in this process's standard output: whole lines, marked with the function's name, no
    control characters, `LINES` of them in `LINES_SECONDS`; of more lines their number."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._since, self._left, self._hidden = 0.0, LINES, 0

    def __reduce__(self) -> tuple[Any, ...]:
        return Screen, (self._name,)  # a pool that goes to a Ray worker has a lock of its own there

    def take(self, begun: bytearray, block: bytes) -> None:
        """Show the lines of a block of output; `begun` holds the start of the process's next line, at most 1000 bytes."""
        lines = (begun + block).split(b"\n", LINES)
        count = block.count(b"\n")
        begun[:] = (begun + block).rpartition(b"\n")[2][:1000]
        with self._lock:
            now = time.monotonic()
            shown = []
            if now - self._since > LINES_SECONDS:
                if self._hidden:
                    shown.append(f"… {self._hidden} more lines")
                self._since, self._left, self._hidden = now, LINES, 0
            lines = lines[: min(count, self._left)]
            for line in lines:
                text = line[:1000].decode("utf-8", "replace")[:200]
                shown.append("".join(one if one.isprintable() else repr(one)[1:-1] for one in text))
            if self._left and count > len(lines):
                shown.append("… more lines than are shown here: each row keeps the first of its own as `printed`")
            self._left, self._hidden = self._left - len(lines), self._hidden + count - len(lines)
        if shown:
            with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
                sys.stdout.write("".join(f"[{self._name}] {line}\n" for line in shown))
                sys.stdout.flush()


def _packed(arguments: Mapping[str, Any]) -> bytes | Answer:
    try:
        return cloudpickle.dumps(dict(arguments))
    except Exception as error:  # noqa: BLE001 - a row that cannot travel is that row's failure
        return Answer(False, None, f"the row cannot be sent to a worker process: {first_line(error)}")


def _begun(worker: Child, token: bytes, body: bytes) -> bool:
    """Hand a row to a worker; whether it has begun with it. One that has not is closed."""
    try:
        begun = worker.exchange(token + body, BEGIN_SECONDS, TOKEN) == token
    except OSError:
        return False
    if not begun:
        worker.close()
    return begun


def _loaded(worker: Child, token: bytes, function: bytes) -> Answer:
    """A new worker's answer when it has loaded the function."""
    try:
        worker.line.send(token + function, seconds=START_SECONDS)
        worker.started(most=TOKEN)
    except OSError as error:
        return Answer(False, None, f"a worker process did not start: {error}", lost=True)
    return _answered(worker, token, None)


def _heard(worker: Child, limit: float | None) -> bytearray:
    """The worker's next message within `limit` seconds, not counting those in which it says that it imports; None: it loads."""
    imports, left, most = limit is None, [limit or 0.0, START_SECONDS], 2 * MAX_RESULT
    while True:
        began = time.monotonic()
        found = worker.started(left[1], most) if imports else worker.exchange(None, max(left[0], 0.0), most)
        left[imports] -= time.monotonic() - began
        if found[TOKEN:] not in (IMPORTS, IMPORTED):
            return found
        imports = found[TOKEN:] == IMPORTS


def _answered(worker: Child, token: bytes, limit: float | None) -> Answer:
    """The worker's answer; whatever else comes closes the worker."""
    try:
        found = _heard(worker, limit)
    except Stuck as error:
        return Answer(False, None, f"what the function loads or imports has no end: {error}")
    except TimeoutError:
        return Answer(False, None, f"the function gave no answer within {limit:g} s and was ended", None, limit or 0.0)
    except TooLong as error:
        return Answer(False, None, f"the worker process sent what is no answer: {error}")
    except OSError:
        return Answer(False, None, f"the worker process ended with {worker.how()}")
    try:
        if found[:TOKEN] != token:
            raise ValueError("the answer to another call")
        return Answer(*json.loads(found[TOKEN:], object_hook=_score))
    except Exception as error:  # noqa: BLE001 - it is that row's failure
        worker.close()
        return Answer(False, None, f"the worker process sent what is no answer: {first_line(error)}")


def _score(record: dict[str, Any]) -> Any:
    """A dict of an answer; what was a `Score` in the worker is one again."""
    return Score.from_json(record["Score"]) if record.keys() == {"Score"} else record


async def in_thread(work: Callable[[], T], name: str = "workbench-reward") -> T:
    """Run blocking work in a daemon thread of its own; the process can exit without waiting for it."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # a thread cannot be stopped: from now on it may always set its result

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - it is raised where it is awaited, where a StopIteration cannot be
            plain = isinstance(error, Exception) and not isinstance(error, StopIteration)
            future.set_exception(error if plain else RuntimeError(first_line(error)))

    threading.Thread(target=run, name=name, daemon=True).start()
    return await asyncio.wrap_future(future)
