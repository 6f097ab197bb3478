"""Engines in workers: a process of this machine or a Ray actor holds one (`Host`), the driver's `Hosted` asks it.

Every question is a future of its own, so that agent loops, groups and judges share one engine; while any is
unanswered, one thread carries questions and answers. A worker that is started again after it was lost has the weights
of its folder until weights are pushed.

`Replicas` are several engines with the same weights: questions are shared out, and those of a member that is lost go
to the others, the same requests with the same seeds, each answered once. The member is started again before the next
weights are loaded, and answers nothing before it has them.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from workbench.base import runtime
from workbench.base.activity import recorded
from workbench.base.child import Questions
from workbench.base.config import require
from workbench.base.errors import EngineError, Interrupted, WorkbenchError, WorkerLost, first_line
from workbench.engines.local_engine.classifier import classifier
from workbench.engines.local_engine.engine import local
from workbench.engines.protocol import Classified, Closable, Closing, Request, Restartable, Sample, switches_of
from workbench.engines.vllm_server.engine import vllm, vllm_classifier
from workbench.engines.vllm_server.process import Piece
from workbench.engines.weights import Receiving, WeightReceiver
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
    """Open an engine of a kind in `KINDS` inside a worker process, and return its `Host`. `Ranks` calls this factory on
    its worker."""
    if threads:
        torch.set_num_threads(threads)
    return Host(KINDS[kind](path, **settings))


class Host:
    """An engine inside a worker process: it is sent questions (method calls), and returns each answer as soon as it is
    ready."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._out: dict[int, asyncio.Task[Any]] = {}

    def about(self) -> tuple[Any, ...]:
        """Return the engine's tokenizer, chat template arguments, `max_length`, `describe()` and repr."""
        one = self._engine
        return one.tokenizer, switches_of(one), one.max_length, one.describe(), repr(one)

    def exchange(self, questions: Sequence[Question], given_up: Sequence[int], seconds: float) -> list[Answer]:
        """Start the questions `asked`, cancel those whose numbers are in `given_up`, and return the answers that are
        ready within `seconds`."""
        return runtime.run(self._exchange(questions, given_up, seconds))

    async def _exchange(self, questions: Sequence[Question], given_up: Sequence[int], seconds: float) -> list[Answer]:
        for number in given_up:
            if number in self._out:
                self._out.pop(number).cancel()
        # all in one go: an engine that gathers waves must see those that come together together
        self._out |= {number: asyncio.create_task(self._answer(method, it)) for number, method, it in questions}
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
        """Call a method of the engine and return its result; None where the engine has no such method and there are no
        arguments."""
        return getattr(self._engine, method, lambda: None)(*arguments)


class Forwarding(Receiving, Closing):
    """Base class of `Hosted` and `Replicas`: implements the methods that only pass a call on to one engine or to all of
    several."""

    def _each(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of each engine and return the results. A subclass implements it."""
        raise NotImplementedError

    def _confirmed(self, versions: list[int], version: int) -> int:
        """Check which policy versions the engines report after `version` was loaded, and return the version served. A
        subclass implements it."""
        raise NotImplementedError

    def begin_weights(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Begin a push of tensors of these shapes on each engine."""
        self._each("begin_weights", {name: tuple(shape) for name, shape in shapes.items()})

    def take_weights(self, pieces: Sequence[Piece], place: Mapping[str, Any]) -> None:
        """Load one bucket on each engine: the `pieces` that were written to `place`."""
        self._each("take_weights", list(pieces), dict(place))

    def end_weights(self, version: int) -> int:
        """End a push: serve the new weights as policy `version`, which is returned. Raises `EngineError` where an
        engine serves another."""
        return self._confirmed(self._each("end_weights", version), version)

    def cancel_weights(self) -> None:
        """End a push that failed, on each engine."""
        self._each("cancel_weights")

    def load_adapter(self, folder: str, version: int) -> int:
        """Sample with the base weights and the LoRA adapter of a peft folder, as policy `version`."""
        return self._confirmed(self._each("load_adapter", folder, version), version)

    def sleep(self, level: int = 1) -> None:
        """Free the device memory of each engine until `wake()`; level 2 drops the weights, too."""
        self._each("sleep", level)

    def wake(self, tags: Sequence[str] | None = None) -> None:
        """Allocate the device memory again after `sleep()`: all of it, or with `tags` only that of `weights` or
        `kv_cache`."""
        self._each("wake", tags)


class Hosted(Forwarding):
    """The driver's handle to an engine in a worker process: a `Sampler` and `Classifier` that forwards requests to it.

    `make` starts the worker with `host` as its factory, and returns a `Ranks` of size 1.
    """

    def __init__(
        self, make: Callable[[], Ranks], *, name: str = "engine", deadline: float | None = None, start: bool = True
    ) -> None:
        """`deadline` is how many seconds any call of the worker may take, and how long it may work without answering a
        question. None: for calls as `Deadlines` says, and half an hour for the first answer."""
        self._make = make
        self.name = name
        self._deadline = deadline
        self._deadlines = Deadlines()
        self._ranks: Ranks | None = None
        self._record: Any = None
        self._text = "not started"
        self._lock = threading.Lock()
        self._call = threading.Lock()
        self._unsent: list[tuple[int, str, Any]] = []
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
        """Start a new worker with the weights in the model's folder, whatever state the old one is in."""
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
        """End the worker; questions without an answer fail. May be called twice."""
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
        """Call a method of the worker and return its result; a worker that dies or misses its deadline is ended, and
        `WorkerLost` is raised."""
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
            self._unsent.append((number, method, argument))
            if self._carrier is None:
                self._carrier = threading.Thread(target=self._carry, name=f"workbench-{self.name}", daemon=True)
                self._carrier.start()
        return await asyncio.wrap_future(future)

    def _carry(self) -> None:
        """Run in a thread while any question is unanswered: send questions to the worker and deliver its answers. A
        worker that responds but answers nothing for too long is ended."""
        finished = time.monotonic()
        try:
            while True:
                with self._lock:
                    out, given_up = self._out.numbers(), self._out.given_up()
                    if not out and not given_up:
                        self._carrier = None
                        return
                    questions, self._unsent = self._unsent, []
                wanted = [one for one in questions if one[0] in out]
                try:
                    answers = self._do("exchange", wanted, given_up, EXCHANGE_SECONDS)
                except Interrupted as error:
                    # questions that were questions after the interrupt must not fail with it
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
        except BaseException as error:  # noqa: BLE001 - raised where the questions were questions
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Raise the error for all questions without an answer, and end the carrier thread's work."""
        with self._lock:
            failed = self._out.numbers()
            self._unsent.clear()
            self._carrier = None
        self._out.fail(error, failed)

    # --- Sampler and Classifier ---------------------------------------------------------------

    @recorded
    async def sample(self, request: Request) -> Sample:
        """Sample one response. Raises `WorkerLost` where the worker dies or misses its deadline, and otherwise the
        engine's own errors."""
        return await self._ask("sample", request)

    async def classify(self, text: str) -> Classified:
        """Score one text. Raises `WorkerLost` where the worker dies or misses its deadline, and otherwise the engine's
        own errors."""
        return await self._ask("classify", text)

    def receives(self) -> dict[str, Any]:
        """Describe where the engine is and what it takes (see `WeightReceiver.receives`)."""
        return dict(self._do("do", "receives"))

    def _each(self, method: str, *arguments: Any) -> list[Any]:
        return [self._do("do", method, *arguments)]

    def _confirmed(self, versions: list[int], version: int) -> int:
        self.version = versions[0]
        return self.version

    def join_group(self, host: str, port: int, first: int, size: int, backend: str) -> None:
        """Join the process group of a broadcast, with ranks from `first` on."""
        self._do("do", "join_group", host, port, first, size, backend)

    def describe(self) -> Any:
        """Return the engine's own `describe()`: path and settings, for a run's record."""
        return self._record

    def __repr__(self) -> str:
        return f"Hosted({self.name}: {self._text}{'' if self.alive else ', worker gone'})"


FAILURES = 3
"""A member that fails so many questions in a row is taken for lost."""
RESTARTS = 3
"""A member that is lost more often than this within `RESTART_SECONDS` is not started again."""
RESTART_SECONDS = 600.0
BACK_OFF = 1.0
"""Seconds: a member that was lost twice in a row is started again after so long, and twice as long with every further time."""


def _of_first(name: str, doc: str) -> Any:
    """Make a property whose value is read from the first member, because all members have the same."""
    return property(lambda self: getattr(self.members[0], name), doc=doc)


class Replicas(Forwarding):
    """Several engines with the same weights (`Hosted`, `VllmEngine` …) used as one `Sampler` or `Classifier`."""

    def __init__(self, members: Sequence[Any], *, name: str = "replicas") -> None:
        require(len(members) > 0, "members", expected="at least one engine", found=0)
        self.members = list(members)
        self.name = name
        self._restartable = [one for one in members if isinstance(one, Restartable)]
        self._serving = [True] * len(members)
        self._failures = [0] * len(members)
        self._out = [0] * len(members)
        self._ended: list[list[float]] = [[] for _ in members]
        self._homes: dict[Any, int] = {}
        self._turn = 0
        self._processes: list[int] = []

    # --- questions ----------------------------------------------------------------------------

    async def sample(self, request: Request) -> Sample:
        """Sample one response; requests with the same prompt go to the same member, for its prefix cache.

        Raises `WorkerLost` where no member is left.
        """
        return await self._answered("sample", request, request.ids)

    async def classify(self, text: str) -> Classified:
        """Score one text with one of the members. Raises `WorkerLost` where no member is left."""
        return await self._answered("classify", text, text)

    async def _answered(self, method: str, question: Any, key: Any) -> Any:
        refused: set[int] = set()
        while True:
            place = self._home(key, refused)
            self._out[place] += 1
            try:
                answer = await getattr(self.members[place], method)(question)
            except WorkerLost as error:
                self._lose(place, error)
                if not any(self._serving):
                    raise
                continue
            except EngineError as error:
                refused.add(place)
                # a member that lives and fails everything is as good as dead, where others do better
                self._failures[place] += 1
                if self._failures[place] >= FAILURES and sum(self._serving) > 1:
                    self._lose(place, error)
                if all(not serving or number in refused for number, serving in enumerate(self._serving)):
                    raise  # the question's own fault, or nobody can
                continue
            finally:
                self._out[place] -= 1
                if not any(self._out):
                    self._homes.clear()
            self._failures[place] = 0
            return answer

    def _home(self, key: Any, refused: set[int]) -> int:
        """Choose the member for a prompt: the one that had it before, else the next in turn, so that the choice does
        not depend on speed."""
        able = [number for number, serving in enumerate(self._serving) if serving and number not in refused]
        if not able:
            raise WorkerLost(f"no engine of {self.name!r} is running", do="call restart() to start them again")
        home = self._homes.get(key)
        if home not in able:
            home = able[self._turn % len(able)]
            self._turn += 1
            self._homes[key] = home
        return home

    def _lose(self, place: int, error: BaseException) -> None:
        if self._serving[place]:
            self._serving[place] = False
            self._ended[place].append(time.monotonic())
            warnings.warn(f"member {place} of {self.name} was lost: {str(error).splitlines()[0]}", stacklevel=2)

    # --- weights ------------------------------------------------------------------------------

    def load_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> float:
        """Load weights into all members, after starting those that were lost; returns the seconds taken.

        Raises `WorkerLost` where no member could take them.
        """
        if self.receives() is not None:
            return super().load_weights(weights, version)
        began = time.monotonic()
        self._each("load_weights", weights, version)
        return time.monotonic() - began

    def receives(self) -> dict[str, Any] | None:
        """Describe where all members are and what they take (see `WeightReceiver.receives`), after starting those that
        were lost.

        Returns None where a member takes no buckets.
        """
        self._revive()
        if not all(isinstance(member, WeightReceiver) for member in self.members):
            return None
        facts = self._each("receives")
        joined = {name: [one for each in facts for one in each[name]] for name in ("machines", "pids", "devices")}
        self._processes = [each["processes"] for each in facts]
        return {**facts[0], **joined, "processes": sum(self._processes)}

    def join_group(self, host: str, port: int, first: int, size: int, backend: str) -> None:
        """Join the process group of a broadcast: each member takes as many ranks as it has processes, from `first` on."""
        firsts = [first + sum(self._processes[:place]) for place in range(len(self._processes))]
        self._each("join_group", host, port, size=size, backend=backend, each=[{"first": one} for one in firsts])

    def _confirmed(self, versions: list[int], version: int) -> int:
        wrong = [one for one in versions if one != version]
        if wrong:
            what = f"a member of {self.name} does not serve the weights that were pushed to it"
            raise EngineError(what, expected=f"policy version {version}", found=f"version {wrong[0]}", do="restart it")
        return version

    def _each(
        self, method: str, *arguments: Any, each: Sequence[Mapping[str, Any]] | None = None, **named: Any
    ) -> list[Any]:
        """Call a method of all serving members at the same time and return their results; lost members are left out.
        Raises `WorkerLost` where none is left."""
        able = [number for number, serving in enumerate(self._serving) if serving]
        further = each or [{}] * len(able)
        answers = []
        with ThreadPoolExecutor(max(len(able), 1)) as pool:
            calls = [
                pool.submit(getattr(self.members[place], method), *arguments, **named, **mine)
                for place, mine in zip(able, further, strict=True)
            ]
        for place, call in zip(able, calls, strict=True):
            try:
                answers.append(call.result())
            except WorkerLost as error:
                self._lose(place, error)
        if not answers:
            raise WorkerLost(f"no engine of {self.name!r} could load the weights", do="call restart() to start them")
        return answers

    def _revive(self) -> None:
        """Start lost members again; one that was lost too often stays out while others serve."""
        errors: list[EngineError] = []
        for place, serving in enumerate(self._serving):
            if serving:
                continue
            recent = [when for when in self._ended[place] if time.monotonic() - when < RESTART_SECONDS]
            self._ended[place] = recent
            if len(recent) > RESTARTS:
                what = f"member {place} of {self.name} is not started again"
                found = f"it was lost {len(recent)} times in {RESTART_SECONDS:g} s"
                errors.append(EngineError(what, found=found, do="see its log, then call restart()"))
                continue
            wait = recent[-1] + BACK_OFF * (2.0 ** (len(recent) - 1) - 1) - time.monotonic() if recent else 0.0
            if wait > 0 and any(self._serving):
                continue  # when the next weights come
            time.sleep(max(wait, 0.0))
            try:
                self.members[place].restart()
            except EngineError as error:
                self._ended[place].append(time.monotonic())
                errors.append(error)
                continue
            self._serving[place], self._failures[place] = True, 0
        if not any(self._serving):
            raise errors[0]

    @property
    def starts(self) -> int:
        """How often the members were started, in all; a new process does not have the weights that were pushed to the
        old one."""
        return sum(one.starts for one in self._restartable)

    def restart(self) -> None:
        """Start every lost member again, however often it was lost."""
        self._ended = [[] for _ in self.members]
        self._revive()

    # --- what they are ------------------------------------------------------------------------

    tokenizer = _of_first("tokenizer", "The model's own tokenizer.")
    template_switches = _of_first("template_switches", "Extra arguments of the chat template.")
    max_length = _of_first("max_length", "Longest prompt and response together, in tokens.")
    version = _of_first("version", "Policy version of the members' weights.")

    def describe(self) -> Any:
        """Return the `describe()` of one member; where it is a dict, the number of members is added as `replicas`."""
        record = self.members[0].describe()
        return {**record, "replicas": len(self.members)} if isinstance(record, dict) else record

    def close(self) -> None:
        """Close all members."""
        for member in self.members:
            if isinstance(member, Closable):
                member.close()

    def __repr__(self) -> str:
        serving = f"{sum(self._serving)} of {len(self.members)} serve"
        return f"Replicas({self.name}: {serving}, {self.members[0]!r})"
