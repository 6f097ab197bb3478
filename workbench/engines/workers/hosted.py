"""An engine in a worker: a process of this machine or a Ray actor holds it (`Host`), and the driver's `Hosted` asks it.

Every question is a future of its own, so that agent loops, groups and judges share one engine; while any is unanswered, one
thread carries questions and answers. A worker that is started again after it was lost has the weights of its folder until
weights are pushed.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from workbench.base import runtime
from workbench.base.activity import recorded
from workbench.base.child import Questions
from workbench.base.errors import EngineError, Interrupted, WorkbenchError, WorkerLost, first_line
from workbench.engines.local_engine.classifier import classifier
from workbench.engines.local_engine.engine import local
from workbench.engines.protocol import Classified, Closing, Request, Sample, switches_of
from workbench.engines.vllm_server.engine import vllm, vllm_classifier
from workbench.engines.vllm_server.process import Piece
from workbench.engines.weights import Receiving
from workbench.engines.workers.processes import FIRST_DEADLINE, Deadlines, Ranks

KINDS: dict[str, Any] = {"local": local, "vllm": vllm, "classifier": classifier, "vllm_classifier": vllm_classifier}
EXCHANGE_SECONDS = 0.03
"""Longest that a question waits before it is sent while others are unanswered."""
GATHER_SECONDS = 0.005
"""Answers that come so soon after the first are sent with it."""
LEAVE_SECONDS = 5.0


Question = tuple[int, str, Any]
"""Number, method of the engine, its argument."""
Answer = tuple[int, Any]
"""Number, and the value or the exception."""


def host(rank: int, size: int, *, kind: str, path: str, settings: Mapping[str, Any], threads: int = 0) -> Host:
    """Open an engine of a kind in `KINDS` inside a worker; returns its `Host`. The factory that `Ranks` is given."""
    if threads:
        torch.set_num_threads(threads)
    return Host(KINDS[kind](path, **settings))


class Host:
    """An engine inside a worker process: takes questions, and returns each answer as soon as it is ready."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._out: dict[int, asyncio.Task[Any]] = {}

    def about(self) -> tuple[Any, ...]:
        """The engine's tokenizer, chat template arguments, `max_length`, `describe()` and repr."""
        one = self._engine
        return one.tokenizer, switches_of(one), one.max_length, one.describe(), repr(one)

    def exchange(self, asked: Sequence[Question], given_up: Sequence[int], seconds: float) -> list[Answer]:
        """Start the questions `asked`, cancel those `given_up`, and return the answers that are ready within `seconds`."""
        return runtime.run(self._exchange(asked, given_up, seconds))

    async def _exchange(self, asked: Sequence[Question], given_up: Sequence[int], seconds: float) -> list[Answer]:
        for number in given_up:
            if number in self._out:
                self._out.pop(number).cancel()
        # all in one go: an engine that gathers waves must see those that come together together
        self._out |= {number: asyncio.create_task(self._answer(method, it)) for number, method, it in asked}
        if self._out and (await asyncio.wait(self._out.values(), timeout=seconds, return_when="FIRST_COMPLETED"))[0]:
            await asyncio.wait(self._out.values(), timeout=GATHER_SECONDS)
        ended = [number for number, task in self._out.items() if task.done()]
        return [(number, self._out.pop(number).result()) for number in ended]

    async def _answer(self, method: str, argument: Any) -> Any:
        try:
            return await getattr(self._engine, method)(argument)
        except Exception as error:  # noqa: BLE001 - the driver raises it to whoever asked
            return error if isinstance(error, WorkbenchError) else EngineError(first_line(error))

    def do(self, method: str, *arguments: Any) -> Any:
        """Call a method of the engine; one without arguments may be missing."""
        return getattr(self._engine, method, lambda: None)(*arguments)


class Hosted(Receiving, Closing):
    """The driver's handle to an engine in a worker process: a `Sampler` and `Classifier` that forwards requests to it.

    `make` starts the worker with `host` as its factory, and returns a `Ranks` of size 1.
    """

    def __init__(
        self, make: Callable[[], Ranks], *, name: str = "engine", deadline: float | None = None, start: bool = True
    ) -> None:
        """`deadline`: seconds that any call of the worker may take, and that it may work without answering a single question;
        None: for calls as `Deadlines` says, and half an hour for the first answer."""
        self._make = make
        self.name = name
        self._deadline = deadline
        self._deadlines = Deadlines()
        self._ranks: Ranks | None = None
        self._record: Any = None
        self._text = "not started"
        self._lock = threading.Lock()
        self._call = threading.Lock()
        self._asked: list[tuple[int, str, Any]] = []
        self._out = Questions()
        self._carrier: threading.Thread | None = None
        self.starts = 0
        """How often the worker was started; a new worker does not have the weights that were pushed to the old one."""
        self.version = 0
        """Policy version of the weights that were loaded last."""
        if start:
            self.restart()

    # --- its worker ---------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """Whether the worker runs, as far as the driver knows."""
        return self._ranks is not None

    def restart(self) -> None:
        """Start a new worker with the weights of the model's folder, whatever happened to the old one."""
        self.close()
        ranks = self._make()
        try:
            self.tokenizer, self.template_switches, self.max_length, self._record, self._text = ranks.call("about")[0]
        except BaseException:
            ranks.close()
            raise
        self._ranks = ranks
        self.starts += 1
        self.version = 0

    def close(self) -> None:
        """End the worker; unanswered questions fail. May be called twice."""
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            self._fail(EngineError(f"the engine {self.name!r} was closed", do="call its restart(), or make a new one"))
            with contextlib.suppress(EngineError, TimeoutError), self._call:
                ranks.call("do", "close", timeout=LEAVE_SECONDS)
            ranks.close()

    def _end(self) -> None:
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            ranks.close()

    def _do(self, method: str, *shared: Any) -> Any:
        """Call the worker; one that is lost or late is ended."""
        with self._call:
            ranks = self._ranks
            if ranks is None:
                raise WorkerLost(f"the worker of the engine {self.name!r} is gone", do="call the engine's restart()")
            try:
                with self._deadlines.watched(shared[0] if method == "do" else method) as seconds:
                    return ranks.call(method, *shared, timeout=self._deadline or seconds)[0]
            except (WorkerLost, TimeoutError) as error:
                self._end()
                if isinstance(error, WorkerLost):
                    raise
                raise WorkerLost(str(error), exit="past its deadline") from error

    # --- questions ----------------------------------------------------------------------------

    async def _ask(self, method: str, argument: Any) -> Any:
        runtime.check()
        with self._lock:
            number, future = self._out.open()
            self._asked.append((number, method, argument))
            if self._carrier is None:
                self._carrier = threading.Thread(target=self._carry, name=f"workbench-{self.name}", daemon=True)
                self._carrier.start()
        return await asyncio.wrap_future(future)

    def _carry(self) -> None:
        """In a thread, while any question is unanswered. A worker that reacts, but answers none, is taken for dead."""
        finished = time.monotonic()
        try:
            while True:
                with self._lock:
                    out, given_up = self._out.numbers(), self._out.given_up()
                    if not out and not given_up:
                        self._carrier = None
                        return
                    asked, self._asked = self._asked, []
                wanted = [one for one in asked if one[0] in out]
                try:
                    answers = self._do("exchange", wanted, given_up, EXCHANGE_SECONDS)
                except Interrupted as error:
                    # questions that were asked after the interrupt must not fail with it
                    self._out.fail(error, out)
                    continue
                for number, outcome in answers:
                    self._out.answer(number, outcome)
                if answers:
                    finished = time.monotonic()
                elif time.monotonic() - finished > (limit := self._deadline or FIRST_DEADLINE):
                    self._end()
                    how = f"responds, but has finished nothing for {limit:g} s"
                    raise WorkerLost(f"the worker of engine {self.name!r} {how}", do="restart() the engine", exit=how)
        except BaseException as error:  # noqa: BLE001 - raised where the questions were asked
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Raise the error for all questions, and stop carrying."""
        with self._lock:
            failed = self._out.numbers()
            self._asked.clear()
            self._carrier = None
        self._out.fail(error, failed)

    # --- Sampler and Classifier ---------------------------------------------------------------

    @recorded
    async def sample(self, request: Request) -> Sample:
        """Sample one response. Raises `WorkerLost` where the worker dies or is late, else the engine's error."""
        return await self._ask("sample", request)

    async def classify(self, text: str) -> Classified:
        """Score one text. Raises `WorkerLost` where the worker dies or is late, else the engine's error."""
        return await self._ask("classify", text)

    def receives(self) -> dict[str, Any]:
        """Where its engine is, and what it takes, as `WeightReceiver.receives`."""
        return dict(self._do("do", "receives"))

    def begin_weights(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Begin a push of tensors of these shapes."""
        self._do("do", "begin_weights", {name: tuple(shape) for name, shape in shapes.items()})

    def take_weights(self, pieces: Sequence[Piece], place: Mapping[str, Any]) -> None:
        """Load one bucket."""
        self._do("do", "take_weights", list(pieces), dict(place))

    def end_weights(self, version: int) -> int:
        """Serve the new weights as a policy version."""
        self.version = self._do("do", "end_weights", version)
        return self.version

    def cancel_weights(self) -> None:
        """End a push that broke off."""
        self._do("do", "cancel_weights")

    def load_adapter(self, folder: str, version: int) -> int:
        """Serve the base with the LoRA adapter of a peft folder."""
        self.version = self._do("do", "load_adapter", folder, version)
        return self.version

    def join_group(self, host: str, port: int, first: int, size: int, backend: str) -> None:
        """Join a broadcast with ranks from `first` on."""
        self._do("do", "join_group", host, port, first, size, backend)

    def sleep(self, level: int = 1) -> None:
        """Free the engine's device memory, until `wake()`; level 2 drops the weights, too."""
        self._do("do", "sleep", level)

    def wake(self, tags: Sequence[str] | None = None) -> None:
        """Allocate the engine's device memory again, after `sleep()`; `tags` out of `weights`, `kv_cache`."""
        self._do("do", "wake", tags)

    def describe(self) -> Any:
        """The engine's own `describe()`: path and settings, for a run's record."""
        return self._record

    def __repr__(self) -> str:
        return f"Hosted({self.name}: {self._text}{'' if self.alive else ', worker gone'})"
