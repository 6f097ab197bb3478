"""`WorkerPool`: worker processes for users' reward functions, with a deadline for each row; a worker that hangs is killed.

Functions of Python files are read in this process and run only in worker processes. Importing a file runs its code. The
trainer's process therefore only reads the text, takes signatures from its syntax tree, and sends the text to the worker
processes, which execute it as a module; where it imports anything of the package that it is in, as one of the package's
modules, whose `__init__.py` files are run before it. Only files below an allowed root are read: the current folder, and those
in `WORKBENCH_CODE_ROOTS`; such a package must lie there as a whole.

`RateLimit` has the limits of a service for the whole run, in one object shared by all rewards that call the service.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import hashlib
import inspect
import itertools
import json
import os
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from workbench.base import runtime
from workbench.base.activity import HERE
from workbench.base.child import Child, Stuck, TooLong, importing
from workbench.base.config import require
from workbench.base.errors import DataError, RewardError, WorkbenchError, describe, first_line, unknown
from workbench.base.memory import total
from workbench.rewards.score import Score
from workbench.rewards.worker import IMPORTED, IMPORTS, MAX_RESULT, TOKEN

MAX_BYTES = 4 << 20
"""Largest size of a reward file in bytes; a larger file is refused."""
ROOTS = "WORKBENCH_CODE_ROOTS"
"""Environment variable with further allowed folders, separated as in PATH."""


def called(function: Any) -> str:
    """Return the name of a function, also of the one in a partial; for a callable object the name of its class."""
    function = function.func if isinstance(function, partial) else function
    return str(getattr(function, "__name__", type(function).__name__))


class FileFunction:
    """A function of a Python file, made by `load_function`: only worker processes run it. `sha256` is the hash of the
    file's text."""

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
        """Return the file name, function name and SHA-256 of the file's text, for the run's record."""
        return {"path": self.path.name, "function": self.__name__, "sha256": self.sha256}

    def record(self, more: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
        """Return what a worker process needs to load the function: path, module, name, source text and bound arguments
        (also those in `more`)."""
        kwargs = {**self.kwargs, **more}
        inside = self.package.count(".") + 1 if self.package else 0
        # a file that imports nothing of its package needs none of it, which may not be importable here
        alone = f"workbench_reward_{self.path.stem}"
        module = f"{self.package}.{self.path.stem}" if self.package and self.inside else alone
        functions = {name: value.record() for name, value in kwargs.items() if isinstance(value, FileFunction)}
        return {
            "path": str(self.path),
            "root": str(self.path.parents[inside]),
            "module": module.removesuffix(".__init__"),
            "name": self.__name__,
            "text": self.text,
            "kwargs": {name: value for name, value in kwargs.items() if name not in functions},
            "functions": functions,
            "construct": self.construct,
        }

    def __call__(self, **arguments: Any) -> Any:
        """Raise `DataError`: a call would run the file's code in the trainer's process."""
        do = "leave out in_process=True, or import the function yourself and pass it"
        raise DataError(f"{self.__name__} of {self.path.name} can be called only in worker processes", do=do)

    def __repr__(self) -> str:
        return f"{self.__name__} of {self.path.name} ({self.sha256[:8]})"


def load_function(
    path: str | Path, name: str = "compute_score", *, roots: Sequence[str | Path] = (), **reward_kwargs: Any
) -> FileFunction:
    """Load a function of a Python file, to be run by a `Reward`'s worker processes.

    `reward_kwargs` are bound to the function and win over a call's arguments; `roots` are further folders from which
    code may be loaded. Raises `DataError` where the file is missing, outside every allowed folder, not Python, or
    without such a function.
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
        arguments = functions[name].args
        taken = [arg.arg for arg in (*arguments.args, *arguments.kwonlyargs)]
        if strange := next((one for one in reward_kwargs if one not in taken), None):
            raise DataError(f"{str(path)!r}: " + unknown(f"argument of {name}", strange, taken))
    signature = _signature(functions.get(name), reward_kwargs)
    return FileFunction(file, text, name, reward_kwargs, signature, package, dots > 0 or _imports(tree, package))


def _imports(tree: ast.Module, package: str) -> bool:
    """Return whether a file imports anything of the package that it is in, by an absolute import."""
    names = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    return bool(package) and package.partition(".")[0] in {name.partition(".")[0] for name in names}


def _package(file: Path, dots: int, allowed: Sequence[Path]) -> str:
    """Return the dotted name of the package that a file is in, at least as deep as the `dots` of its relative imports;
    "" for none.

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
    """Raise `error` unless `places` is not empty and every place is below an allowed folder; `what` and `do` go into
    its message."""
    if not places or not all(any(place.is_relative_to(root) for root in allowed) for place in places):
        what, found = f"{what} lies outside the folders from which code may be loaded", ", ".join(map(str, places))
        expected, do = f"below {', '.join(map(str, allowed))}", f"{do}, pass roots=[…], or name its folder in {ROOTS}"
        raise error(what, expected=expected, found=found or "a built-in module", do=do)


def _assigned(tree: ast.Module) -> set[str]:
    targets = [target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets]
    classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    return {target.id for target in targets if isinstance(target, ast.Name)} | classes


class DefaultText(str):
    """The source text of a default value in a file's signature; the value itself is never computed in this process."""

    __repr__ = str.__str__


_VERL = ("data_source", "solution_str", "ground_truth", "extra_info")


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef | None, bound: Mapping[str, Any]) -> inspect.Signature:
    """Make a function's signature from its syntax tree, without the `bound` arguments; without a tree it has verl's
    four arguments."""
    kinds = inspect.Parameter
    if node is None:
        return inspect.Signature([kinds(name, kinds.KEYWORD_ONLY) for name in _VERL if name not in bound])
    args = node.args
    plain = [*args.posonlyargs, *args.args]
    pairs = [*zip(plain[len(plain) - len(args.defaults) :], args.defaults, strict=True)]
    pairs += [
        (arg, default) for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True) if default is not None
    ]
    optional = {arg.arg: DefaultText(ast.unparse(default)) for arg, default in pairs}
    groups: list[tuple[Any, Sequence[ast.arg | None]]] = [
        (kinds.POSITIONAL_ONLY, args.posonlyargs),
        (kinds.POSITIONAL_OR_KEYWORD, args.args),
        (kinds.VAR_POSITIONAL, [args.vararg]),
        (kinds.KEYWORD_ONLY, args.kwonlyargs),
        (kinds.VAR_KEYWORD, [args.kwarg]),
    ]
    parameters = [kinds(arg.arg, kind) for kind, several in groups for arg in several if arg and arg.arg not in bound]
    parameters = [one.replace(default=optional[one.name]) if one.name in optional else one for one in parameters]
    return inspect.Signature(parameters, __validate_parameters__=False)


_POLL = 0.02
"""Seconds between two checks for a free place: nothing wakes a caller that waits for one."""
_MINUTE = 60.0
_ROUNDING = 1e-7
"""Seconds by which clocks are rounded: a wait that was slept must be enough."""


class RateLimit:
    """`RateLimit(max_concurrent=8, max_rpm=500, max_tpm=100_000)`: limits on calls of a service.

    Limits concurrent calls, calls per minute and tokens per minute; None means no limit. A call costs the `tokens` that
    it passes, or `estimated_tokens_per_request`. Pass one object to all rewards that use the service: the limits hold
    for them together (verl's hold for each worker). The names are those of verl's `rate_limited` manager.

    Example:
        >>> limit = RateLimit(max_concurrent=8, max_rpm=500)  # doctest: +SKIP
        >>> Rubric({"a": Judge(model, rate_limit=limit), "b": Judge(model, rate_limit=limit)})  # doctest: +SKIP
    """

    def __init__(
        self,
        *,
        max_concurrent: int | None = None,
        max_rpm: float | None = None,
        max_tpm: float | None = None,
        estimated_tokens_per_request: int = 2000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        for name, value in (("max_concurrent", max_concurrent), ("max_rpm", max_rpm), ("max_tpm", max_tpm)):
            require(value is None or value > 0, name, expected="a number > 0, or None", found=value)
        self.max_concurrent, self.max_rpm, self.max_tpm = max_concurrent, max_rpm, max_tpm
        self.estimated_tokens_per_request = estimated_tokens_per_request
        self._clock = clock
        self._lock = threading.Lock()
        self._going = 0
        self._full: dict[str, float] = {}  # when a budget's store of a minute will be full again

    def try_enter(self, tokens: int | None = None) -> float:
        """Try to start a call: 0.0 where it may start now (call `leave` after it), else seconds until the next try."""
        costs = {"max_rpm": 1, "max_tpm": self.estimated_tokens_per_request if tokens is None else tokens}
        seconds = {name: _MINUTE * cost / getattr(self, name) for name, cost in costs.items() if getattr(self, name)}
        with self._lock:
            now = self._clock()
            if self.max_concurrent is not None and self._going >= self.max_concurrent:
                return _POLL
            full = {name: max(self._full.get(name, now), now) for name in seconds}
            # a call that costs more than a store holds waits until that is full
            wait = max((full[name] - now + min(each, _MINUTE) - _MINUTE for name, each in seconds.items()), default=0.0)
            if wait > _ROUNDING:
                return wait
            self._full = {name: full[name] + each for name, each in seconds.items()}
            self._going += 1
            return 0.0

    def leave(self) -> None:
        """End a call that `try_enter` let start, so that another call may start."""
        with self._lock:
            self._going -= 1

    @asynccontextmanager
    async def slot(self, tokens: int | None = None) -> AsyncIterator[None]:
        """Async context manager around a call of the service: waits until the call may start, and ends it also on an
        exception."""
        while (wait := self.try_enter(tokens)) > 0:
            await asyncio.sleep(wait)
        try:
            yield
        finally:
            self.leave()

    def __repr__(self) -> str:
        return f"RateLimit(max_concurrent={self.max_concurrent}, max_rpm={self.max_rpm}, max_tpm={self.max_tpm})"


T = TypeVar("T")
cloudpickle: Any = import_module("cloudpickle" if find_spec("cloudpickle") else "pickle")
"""Without it, as on a bare machine, only what has a name in a module can travel."""
_PACKAGE = Path(__file__).parents[1]
_WORKER = str(Path(__file__).with_name("worker.py"))
START_SECONDS = 600.0
"""Limit of processor time, in seconds, for a worker to load the function and for a call to import modules; neither
counts towards a row's deadline."""
BEGIN_SECONDS = 10.0
"""Limit, in seconds, for a worker to begin with a row. A worker that does not begin (a thread of an earlier row blocks
it) is replaced."""
_TOGETHER, _TOGETHER_BYTES, _QUICK_SECONDS = 32, 1 << 16, 0.005
"""Most calls, and about how many bytes of them (no more than a socket holds unread), that are sent together to a worker
where a call takes less than so many seconds."""
LINES, LINES_SECONDS = 20, 5.0
"""At most this many printed lines of workers (first number) are shown in this many seconds (second number)."""


@dataclass(frozen=True)
class CallResult:
    """The result of one call of a function in a worker process, or why there is none."""

    ok: bool
    result: Any
    """The function's result, or None."""
    why: str = ""
    """The error in one line, where the call failed; else empty."""
    traceback: str | None = None
    seconds: float = 0.0
    printed: str = ""
    """The start of what the call printed in its worker."""
    lost: bool = False
    """Whether the call had no worker process, or lost it: then the machine failed, not the function."""


def _by_value(function: Callable[..., Any]) -> bytes:
    """Pickle the function; if its module is the user's own, with its code, so that a worker does not import that
    module.

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


class WorkerPool:
    """Worker processes that call a function: `WorkerPool(function).map(list of keyword arguments)` returns answers in order.

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
        self._failed_starts, self._failed = 0, CallResult(False, None)
        self._places_of_loop: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None

    def close(self) -> None:
        """End all worker processes; the next `map` starts new ones."""
        self._idle.clear()
        while self._workers:
            self._workers.pop().close()

    def map(self, calls: Sequence[Mapping[str, Any]], limits: Sequence[float] | None = None) -> list[CallResult]:
        """Call the function with each of `calls` (dicts of keyword arguments): one `CallResult` per call, in order.

        `limits` are seconds per call, by default the pool's `timeout`. A call that runs past its limit, or ends its
        worker process, fails alone.
        """
        packed = [_packed(arguments) for arguments in calls]
        bodies = {number: body for number, body in enumerate(packed) if isinstance(body, bytes)}
        queue = _Calls(bodies, [self._timeout] * len(calls) if limits is None else limits)
        places, slot = self._places(), (self._rate_limit or RateLimit()).slot
        shares = 2 * self._size if self._rate_limit is None else len(calls)
        self._failed_starts = 0

        async def ask(number: int) -> CallResult:
            if isinstance(failed := packed[number], CallResult):
                return failed
            async with places, slot():
                numbers = queue.take(shares)
                while numbers:
                    worker = self._idle.pop() if self._idle else None  # here, as all calls do it in the loop's thread
                    work = partial(self._answered_in_turn, worker, *queue.given(numbers))
                    numbers = queue.settle(numbers, await in_thread(work))
            return await queue.answers[number]

        try:
            return runtime.run_all(ask, range(len(calls)))
        except BaseException:
            queue.give_up()
            self.close()  # an interrupt waits for no row
            raise

    def _places(self) -> asyncio.Semaphore:
        """Return the semaphore with one place per worker, shared by all calls of `map`, as several threads may call it
        at once."""
        if self._places_of_loop is None or self._places_of_loop[0] is not runtime.loop():
            self._places_of_loop = runtime.loop(), asyncio.Semaphore(self._size)
        return self._places_of_loop[1]

    def _answered_in_turn(
        self, worker: Child | None, bodies: Sequence[bytes], limits: Sequence[float]
    ) -> list[CallResult]:
        """Run calls one after the other in `worker`, or in a new one; returns the answers of all, or of those up to the one
        in which the worker ended. The time of a new worker's first call starts once it has loaded the function."""
        tokens = [os.urandom(TOKEN) for _ in bodies]
        messages = [token + body for token, body in zip(tokens, bodies, strict=True)]
        if worker is not None and not _begins(worker, tokens[0], messages):  # an earlier row's doing, not this one's
            self._workers.discard(worker)
            worker = None
        if worker is None:
            if self._failed_starts >= max(self._size, 2):
                return [self._given_up()]
            worker = Child(
                _WORKER, env={**importing(os.environ), **self._env}, output=partial(self._screen.take, bytearray())
            )
            self._workers.add(worker)
            answer = _loaded(worker, tokens[0], self._function)
            if answer.ok and not _begins(worker, tokens[0], messages):
                answer = CallResult(False, None, f"the worker process did not begin within {BEGIN_SECONDS:g} s")
            if not answer.ok:
                self._failed_starts, self._failed = self._failed_starts + 1, answer
                worker.close()
                self._workers.discard(worker)
                return [answer]
            self._failed_starts = 0
        answers = [_answered(worker, tokens[0], limits[0])]
        for token, limit in zip(tokens[1:], limits[1:], strict=True):
            if not worker.alive or not _begins(worker, token):
                break
            answers.append(_answered(worker, token, limit))
        if worker.alive:
            self._idle.append(worker)
        else:
            self._workers.discard(worker)
        return answers

    def _given_up(self) -> CallResult:
        """Return the failed answer for a row after several failed worker starts in a row. Raises `RewardError` where no
        process could start at all."""
        times = f"{self._failed_starts} times in a row"
        if self._failed.lost:
            do = "the reward is not to blame: see what the machine lacks (memory, processes, disk: `workbench doctor`)"
            raise RewardError(f"no worker process could be started, {times}", found=self._failed.why, do=do)
        return CallResult(False, None, f"no worker process could load the function, {times}")


class _Calls:
    """The calls of one `WorkerPool.map`, by number: those that wait for a worker, and the answers of those that are done."""

    def __init__(self, bodies: Mapping[int, bytes], limits: Sequence[float]) -> None:
        self._bodies, self._limits = bodies, limits
        self._requests = {number: HERE.enter("reward") for number in bodies}
        self._waiting, self._quick = deque(bodies), False
        self.answers: dict[int, asyncio.Future[CallResult]] = {
            number: runtime.loop().create_future() for number in bodies
        }

    def take(self, shares: int) -> list[int]:
        """Take the next calls from the queue, which go to a worker together: one, or where a call takes less time than a
        message at most this share of those that wait."""
        most = min(_TOGETHER, len(self._waiting) // shares) if self._quick else 1
        numbers, size = list[int](), 0
        while self._waiting and len(numbers) < max(most, 1):
            size += len(self._bodies[self._waiting[0]])
            if numbers and size > _TOGETHER_BYTES:
                break
            numbers.append(self._waiting.popleft())
            HERE.begin(self._requests[numbers[-1]])
        return numbers

    def given(self, numbers: Sequence[int]) -> tuple[list[bytes], list[float]]:
        """Return the bodies and the limits of calls."""
        return [self._bodies[number] for number in numbers], [self._limits[number] for number in numbers]

    def settle(self, numbers: list[int], results: Sequence[CallResult]) -> list[int]:
        """Keep the results of the first calls of `numbers`, and return the other numbers."""
        self._quick = max(result.seconds for result in results) < _QUICK_SECONDS
        for number, result in zip(numbers, results, strict=False):
            self.answers[number].set_result(result)
            HERE.end(self._requests[number], "done" if result.ok else "raised")
        return numbers[len(results) :]

    def give_up(self) -> None:
        """Record that the calls without an answer are over."""
        for number, answer in self.answers.items():
            if answer.cancelled() or not answer.done():
                HERE.end(self._requests[number], "raised")


class Screen:
    """Shows the output of worker processes in this process's standard output: whole lines, marked with the function's
    name.

    Control characters are escaped. At most `LINES` lines are shown in `LINES_SECONDS`; of further lines only their
    number.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._since, self._left, self._hidden = 0.0, LINES, 0

    def __reduce__(self) -> tuple[Any, ...]:
        return Screen, (self._name,)  # a pool that goes to a Ray worker has a lock of its own there

    def take(self, begun: bytearray, block: bytes) -> None:
        """Show the lines in a block of output; `begun` keeps the unfinished last line for the next block, at most 1000
        bytes."""
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
                shown.append("… further lines are not shown here: each row keeps its first printed lines as `printed`")
            self._left, self._hidden = self._left - len(lines), self._hidden + count - len(lines)
        if shown:
            with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
                sys.stdout.write("".join(f"[{self._name}] {line}\n" for line in shown))
                sys.stdout.flush()


def _packed(arguments: Mapping[str, Any]) -> bytes | CallResult:
    try:
        return cloudpickle.dumps(dict(arguments))
    except Exception as error:  # noqa: BLE001 - a row that cannot travel is that row's failure
        return CallResult(False, None, f"the row cannot be sent to a worker process: {first_line(error)}")


def _begins(worker: Child, token: bytes, messages: Sequence[bytes] = ()) -> bool:
    """Send calls to a worker and return whether it has begun with that of the token in time; one that has not is closed."""
    begun = False
    with contextlib.suppress(OSError):
        worker.line.send(*messages, seconds=BEGIN_SECONDS)
        begun = worker.exchange(None, BEGIN_SECONDS, TOKEN) == token
    if not begun:
        worker.close()
    return begun


def _loaded(worker: Child, token: bytes, function: bytes) -> CallResult:
    """Send the function to a new worker and return its answer once it has loaded the function."""
    try:
        worker.line.send(token + function, seconds=START_SECONDS)
        worker.started(most=TOKEN)
    except OSError as error:
        return CallResult(False, None, f"a worker process did not start: {error}", lost=True)
    return _answered(worker, token, None)


def _next_message(worker: Child, limit: float | None) -> bytearray:
    """Return the worker's next message within `limit` seconds, not counting the time that it reports as spent on
    imports.

    None means that the worker is loading the function, for which `START_SECONDS` hold.
    """
    imports, left, most = limit is None, [limit or 0.0, START_SECONDS], 2 * MAX_RESULT
    while True:
        began = time.monotonic()
        frame = worker.started(left[1], most) if imports else worker.exchange(None, max(left[0], 0.0), most)
        left[imports] -= time.monotonic() - began
        if frame[TOKEN:] not in (IMPORTS, IMPORTED):
            return frame
        imports = frame[TOKEN:] == IMPORTS


def _answered(worker: Child, token: bytes, limit: float | None) -> CallResult:
    """Read the worker's answer to a call; close the worker if it sends anything else."""
    try:
        frame = _next_message(worker, limit)
    except Stuck as error:
        return CallResult(False, None, f"loading the function or one of its imports took too long: {error}")
    except TimeoutError:
        return CallResult(
            False, None, f"the function gave no answer within {limit:g} s and was ended", None, limit or 0.0
        )
    except TooLong as error:
        return CallResult(False, None, f"the worker process sent an invalid answer: {error}")
    except OSError:
        return CallResult(False, None, f"the worker process ended with {worker.how()}")
    try:
        if frame[:TOKEN] != token:
            raise ValueError("the message has the token of another call")
        return CallResult(*json.loads(frame[TOKEN:], object_hook=_score))
    except Exception as error:  # noqa: BLE001 - it is that row's failure
        worker.close()
        return CallResult(False, None, f"the worker process sent an invalid answer: {first_line(error)}")


def _score(record: dict[str, Any]) -> Any:
    """Restore a `Score` that a worker sent as a dict under the key `Score`; other dicts are returned unchanged."""
    return Score.from_json(record["Score"]) if record.keys() == {"Score"} else record


async def in_thread(work: Callable[[], T]) -> T:
    """Run blocking work in a daemon thread and await its result; the process can exit without waiting for it."""

    def plainly() -> T:
        try:
            return work()
        except BaseException as error:
            if isinstance(error, Exception) and not isinstance(error, StopIteration):
                raise
            raise RuntimeError(first_line(error)) from error  # what an event loop cannot pass on

    return await asyncio.wrap_future(runtime.in_idle_thread(plainly))
