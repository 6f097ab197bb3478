"""An engine that stands in a worker elsewhere: a process of this machine or a Ray actor holds it (`host`), this object asks.

Every question is a future of its own, so that agent loops, groups and judges share one engine; while any is out, one thread
carries questions and answers. The worker is started where it is needed and started anew after it was lost: with the weights of
its folder, until weights are pushed.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Any, NoReturn, Self

import torch

from workbench import background
from workbench.engines.protocol import Classified, Request, Sample
from workbench.engines.ranks import Ranks
from workbench.errors import EngineError, Interrupted, WorkerLost, message

EXCHANGE_SECONDS = 0.03
"""Longest that a question waits before it is carried while others are out."""
LEAVE_SECONDS = 5.0
DEADLINE = 1800.0
"""Seconds that any call of the worker may take, and that it may work without finishing a single question."""


class Hosted:
    """One engine in one worker. `make` starts it with `host.host` as its factory, and gives a `Ranks` of one."""

    def __init__(
        self, make: Callable[[], Ranks], *, name: str = "engine", deadline: float = DEADLINE, start: bool = True
    ) -> None:
        self._make = make
        self.name = name
        self._deadline = deadline
        self._ranks: Ranks | None = None
        self._about: Mapping[str, Any] = {}
        self._lock = threading.Lock()
        self._call = threading.Lock()
        self._number = 0
        self._asked: list[tuple[int, str, Any]] = []
        self._given_up: list[int] = []
        self._out: dict[int, Future[Any]] = {}
        self._carrier: threading.Thread | None = None
        self.starts = 0
        """How often its worker was started: one that was started again has lost what was pushed."""
        self.version = 0
        """Of the weights that it was given last."""
        if start:
            self.restart()

    # --- its worker ---------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """Whether its worker runs, as far as is known."""
        return self._ranks is not None

    def restart(self) -> None:
        """A new worker, with the model's own weights, whatever became of the old one."""
        self.close()
        ranks = self._make()
        try:
            self._about = ranks.call("about")[0]
        except BaseException:
            ranks.close()
            raise
        self._ranks = ranks
        self.starts += 1
        self.version = 0

    def close(self) -> None:
        """End the worker; what is out fails. Twice is fine."""
        ranks, self._ranks = self._ranks, None
        if ranks is None:
            return
        self._fail(EngineError(message(f"{self.name} was closed", do="call restart(), or make a new one")))
        with contextlib.suppress(EngineError, TimeoutError), self._call:
            ranks.call("leave", timeout=LEAVE_SECONDS)
        ranks.close()

    def _do(self, method: str, *shared: Any, timeout: float | None = None) -> Any:
        """One call of the worker; a worker that is lost or late is gone for everybody."""
        with self._call:
            ranks = self._ranks
            if ranks is None:
                raise WorkerLost(message(f"the worker of {self.name} is gone", do="call restart()"))
            try:
                return ranks.call(method, *shared, timeout=self._deadline if timeout is None else timeout)[0]
            except (WorkerLost, TimeoutError) as error:
                self._ranks = None
                ranks.close()
                if isinstance(error, WorkerLost):
                    raise
                raise WorkerLost(str(error), exit="past its deadline") from error

    # --- questions ----------------------------------------------------------------------------

    async def _ask(self, method: str, argument: Any) -> Any:
        background.check()
        future: Future[Any] = Future()
        with self._lock:
            self._number += 1
            number = self._number
            self._out[number] = future
            self._asked.append((number, method, argument))
            if self._carrier is None:
                self._carrier = threading.Thread(target=self._carry, name=f"workbench-{self.name}", daemon=True)
                self._carrier.start()
        future.add_done_callback(lambda done: self._drop(number) if done.cancelled() else None)
        return await asyncio.wrap_future(future)

    def _drop(self, number: int) -> None:
        with self._lock:
            if self._out.pop(number, None) is not None:
                self._given_up.append(number)

    def _carry(self) -> None:
        """In a thread, while anything is out. A worker that answers and never finishes anything is as good as dead."""
        finished = time.monotonic()
        try:
            while True:
                with self._lock:
                    asked, self._asked = self._asked, []
                    given_up, self._given_up = self._given_up, []
                    if not self._out and not given_up:
                        self._carrier = None
                        return
                    out = set(self._out)
                wanted = [one for one in asked if one[0] in out]
                try:
                    answers = self._do("exchange", wanted, given_up, EXCHANGE_SECONDS)
                except Interrupted as error:
                    # what was asked since, when the interrupt was over, is nobody's to stop
                    self._fail(error, out)
                    continue
                for number, outcome in answers:
                    with self._lock:
                        future = self._out.pop(number, None)
                    _give(future, outcome)
                if answers:
                    finished = time.monotonic()
                elif time.monotonic() - finished > self._deadline:
                    self._condemn()
        except BaseException as error:  # noqa: BLE001 - raised by whoever asked
            self._fail(error)

    def _condemn(self) -> NoReturn:
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            ranks.close()
        how = f"answers, and has finished nothing for {self._deadline:g} s"
        raise WorkerLost(message(f"the worker of {self.name} {how}", do="call restart()"), exit=how)

    def _fail(self, error: BaseException, numbers: Collection[int] | None = None) -> None:
        """Raise it for these questions; without `numbers` for all, and nobody carries any more."""
        with self._lock:
            failed = set(self._out) if numbers is None else set(numbers) & set(self._out)
            left = [self._out.pop(number) for number in failed]
            self._asked = [one for one in self._asked if one[0] in self._out]
            if numbers is None:
                self._given_up, self._carrier = [], None
        for future in left:
            _give(future, copy.copy(error))  # a raised error gathers the traceback of everybody who meets it

    # --- Sampler and Classifier ---------------------------------------------------------------

    @property
    def tokenizer(self) -> Any:
        """The model's own."""
        return self._about["tokenizer"]

    @property
    def template_switches(self) -> Mapping[str, Any]:
        """What goes to the chat template."""
        return self._about["template_switches"]

    @property
    def max_length(self) -> int | None:
        """Longest prompt and response together."""
        return self._about["max_length"]

    async def sample(self, request: Request) -> Sample:
        """One response. Raises `WorkerLost` where the worker dies or is late, else what the engine raises."""
        return await self._ask("sample", request)

    async def classify(self, text: str) -> Classified:
        """One scalar."""
        return await self._ask("classify", text)

    def sample_many(self, requests: Sequence[Request]) -> list[Sample]:
        """All responses, in order: the synchronous door."""
        return background.run_all(self.sample, requests)

    def load_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """All weights of a model by their Hugging Face names, in place; `version` is theirs."""
        self._do("load_weights", dict(weights), version)
        self.version = version

    def sleep(self) -> None:
        """Give the device's memory back."""
        self._do("sleep")

    def wake(self) -> None:
        """Take it again."""
        self._do("wake")

    def describe(self) -> Any:
        """What the engine says of itself."""
        return self._about["record"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Hosted({self.name}: {self._about.get('text', 'not started')}{'' if self.alive else ', worker gone'})"


def _give(future: Future[Any] | None, outcome: Any) -> None:
    with contextlib.suppress(InvalidStateError):  # given up meanwhile
        if isinstance(outcome, BaseException) and future is not None:
            future.set_exception(outcome)
        elif future is not None:
            future.set_result(outcome)
