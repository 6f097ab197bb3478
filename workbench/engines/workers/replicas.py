"""Several engines with the same weights used as one: questions are shared out, and an engine that fails is started again.

The questions of a member that is lost go to the others: the same requests with the same seeds, each answered once. The member
is started again before the next weights are loaded, and answers nothing before it has them.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from workbench.base.config import require
from workbench.base.errors import EngineError, WorkerLost
from workbench.engines.protocol import Classified, Closable, Closing, Request, Restartable, Sample
from workbench.engines.vllm_server.process import Piece
from workbench.engines.weights import Receiving, WeightReceiver

FAILURES = 3
"""A member that fails so many questions in a row is taken for lost."""
RESTARTS = 3
"""A member that is lost more often than this within `RESTART_SECONDS` is not started again."""
RESTART_SECONDS = 600.0
BACK_OFF = 1.0
"""Seconds: a member that was lost twice in a row is started again after so long, and twice as long with every further time."""


def _of_first(name: str, doc: str) -> Any:
    """A property that is read from the first member: all members have the same."""
    return property(lambda self: getattr(self.members[0], name), doc=doc)


class Replicas(Receiving, Closing):
    """Several engines with the same weights (`Hosted`, `VllmEngine` …) as one `Sampler` or `Classifier`."""

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
        """The member for a prompt: in turn as new prompts come, so that the choice does not depend on speed."""
        able = [number for number, serving in enumerate(self._serving) if serving and number not in refused]
        if not able:
            raise WorkerLost(f"no engine of {self.name!r} is left to ask", do="call restart() to start them again")
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
        """Load weights into all members, starting those that were lost; returns the seconds taken.

        Raises `WorkerLost` where none could take them.
        """
        if self.receives() is not None:
            return super().load_weights(weights, version)
        began = time.monotonic()
        self._all("load_weights", weights, version)
        return time.monotonic() - began

    def receives(self) -> dict[str, Any] | None:
        """Where the members are, all of them, and what they take, as `WeightReceiver.receives`; starts those that were lost.

        None where a member takes no buckets.
        """
        self._revive()
        if not all(isinstance(one, WeightReceiver) for one in self.members):
            return None
        found = self._all("receives")
        joined = {name: [one for each in found for one in each[name]] for name in ("machines", "pids", "devices")}
        self._processes = [each["processes"] for each in found]
        return {**found[0], **joined, "processes": sum(self._processes)}

    def begin_weights(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Begin a push to all members. Raises `WorkerLost` where none is left."""
        self._all("begin_weights", shapes)

    def take_weights(self, pieces: Sequence[Piece], place: Mapping[str, Any]) -> None:
        """Load one bucket into all members, side by side."""
        self._all("take_weights", pieces, place)

    def end_weights(self, version: int) -> int:
        """Serve the new weights as a policy version. Raises `EngineError` where a member has another one."""
        return self._agreed(self._all("end_weights", version), version)

    def cancel_weights(self) -> None:
        """End a push that broke off."""
        self._all("cancel_weights")

    def load_adapter(self, folder: str, version: int) -> int:
        """Serve the base with the LoRA adapter of a peft folder, on all members."""
        return self._agreed(self._all("load_adapter", folder, version), version)

    def join_group(self, host: str, port: int, first: int, size: int, backend: str) -> None:
        """Join a broadcast, each member with as many ranks as it has processes."""
        firsts = [first + sum(self._processes[:place]) for place in range(len(self._processes))]
        self._all("join_group", host, port, size=size, backend=backend, each=[{"first": one} for one in firsts])

    def _agreed(self, found: Sequence[int], version: int) -> int:
        wrong = [one for one in found if one != version]
        if wrong:
            what = f"a member of {self.name} does not serve the weights that were pushed to it"
            raise EngineError(what, expected=f"policy version {version}", found=f"version {wrong[0]}", do="restart it")
        return version

    def _all(
        self, method: str, *given: Any, each: Sequence[Mapping[str, Any]] | None = None, **named: Any
    ) -> list[Any]:
        """Call a method of all members that serve, side by side. Those that are lost are left out; where none is left, raises."""
        able = [number for number, serving in enumerate(self._serving) if serving]
        own = each or [{}] * len(able)
        found = []
        with ThreadPoolExecutor(max(len(able), 1)) as pool:
            calls = [
                pool.submit(getattr(self.members[place], method), *given, **named, **mine)
                for place, mine in zip(able, own, strict=True)
            ]
        for place, call in zip(able, calls, strict=True):
            try:
                found.append(call.result())
            except WorkerLost as error:
                self._lose(place, error)
        if not found:
            raise WorkerLost(f"no engine of {self.name!r} could load the weights", do="call restart() to start them")
        return found

    def _revive(self) -> None:
        """Start lost members; one that is lost again and again stays out while others serve."""
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
        """How often members were started; a new process does not have the weights that were pushed to the old one."""
        return sum(one.starts for one in self._restartable)

    def restart(self) -> None:
        """Start every lost member, however often it was lost."""
        self._ended = [[] for _ in self.members]
        self._revive()

    def sleep(self, level: int = 1) -> None:
        """Free the device memory of all members; level 2 drops the weights, too."""
        self._all("sleep", level)

    def wake(self, tags: Sequence[str] | None = None) -> None:
        """Allocate the device memory of all members again, after `sleep()`; `tags` out of `weights`, `kv_cache`."""
        self._all("wake", tags)

    # --- what they are ------------------------------------------------------------------------

    tokenizer = _of_first("tokenizer", "The model's own tokenizer.")
    template_switches = _of_first("template_switches", "Extra arguments of the chat template.")
    max_length = _of_first("max_length", "Longest prompt and response together, in tokens.")
    version = _of_first("version", "Policy version of the members' weights.")

    def describe(self) -> Any:
        """The `describe()` of one member; a dict has the number of members under `replicas`."""
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
