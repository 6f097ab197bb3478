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
from workbench.engines.protocol import Classified, Closable, Closing, Request, Restartable, Sample, SampleMany

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


class Replicas(SampleMany, Closing):
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

    def load_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Load weights into all members, starting those that were lost. Raises `WorkerLost` where none could take them."""
        self._revive()
        able = [number for number, serving in enumerate(self._serving) if serving]
        with ThreadPoolExecutor(len(able)) as pool:
            loads = [pool.submit(self.members[place].load_weights, weights, version) for place in able]
        for place, load in zip(able, loads, strict=True):
            try:
                load.result()
            except WorkerLost as error:
                self._lose(place, error)
        if not any(self._serving):
            raise WorkerLost(f"no engine of {self.name!r} could load the weights", do="call restart() to start them")

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

    def sleep(self) -> None:
        """Free the device memory of all members."""
        self._each("sleep")

    def wake(self) -> None:
        """Allocate the device memory of all members again, after `sleep()`."""
        self._each("wake")

    def _each(self, method: str) -> None:
        for member, serving in zip(self.members, self._serving, strict=True):
            if serving:
                getattr(member, method)()

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
