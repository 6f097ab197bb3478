"""Several engines with the same weights as one: questions are shared out, and one that fails is replaced.

A member that is lost hands its questions to the others: the same requests with the same seeds, each answered once. It is started
again before the next weights are given, and answers nothing before it has them.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import torch

from workbench import background
from workbench.config import require
from workbench.engines.protocol import Classified, Request, Sample
from workbench.errors import EngineError, WorkerLost, message

FAILURES = 3
"""So many failed questions in a row condemn a member that is alive."""
RESTARTS = 3
"""A member that is lost so often within `RESTART_SECONDS` is not started again."""
RESTART_SECONDS = 600.0


class Replicas:
    """Sampler or Classifier over members that are one (`Hosted`, `VllmEngine` …)."""

    def __init__(self, members: Sequence[Any], *, name: str = "replicas") -> None:
        require(len(members) > 0, "members", expected="at least one engine", found=0)
        self.members = list(members)
        self.name = name
        self._serving = [True] * len(members)
        self._failures = [0] * len(members)
        self._out = [0] * len(members)
        self._ended: list[list[float]] = [[] for _ in members]
        self._homes: dict[Any, int] = {}
        self._turn = 0

    # --- who answers --------------------------------------------------------------------------

    async def sample(self, request: Request) -> Sample:
        """One response; requests with one prompt go to one member, whose cache has read it.

        Raises `WorkerLost` where no member is left.
        """
        return await self._answered("sample", request, request.ids)

    async def classify(self, text: str) -> Classified:
        """One scalar."""
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
                self._blame(place, error)
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
        """The member for a prompt: in turn as new prompts come, which does not depend on who is quick."""
        able = [number for number, serving in enumerate(self._serving) if serving and number not in refused]
        if not able:
            raise WorkerLost(message(f"no member of {self.name} is left", do="restart() starts them"))
        home = self._homes.get(key)
        if home not in able:
            home = able[self._turn % len(able)]
            self._turn += 1
            self._homes[key] = home
        return home

    def _blame(self, place: int, error: EngineError) -> None:
        """A member that lives and fails everything is as good as dead, where others do better."""
        self._failures[place] += 1
        if self._failures[place] >= FAILURES and sum(self._serving) > 1:
            self._lose(place, error)

    def _lose(self, place: int, error: BaseException) -> None:
        if self._serving[place]:
            self._serving[place] = False
            self._ended[place].append(time.monotonic())
            warnings.warn(f"member {place} of {self.name} was lost: {str(error).splitlines()[0]}", stacklevel=2)

    # --- weights ------------------------------------------------------------------------------

    def load_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """To all members, those that were lost being started first. Raises where none could take them."""
        self._revive()
        able = [number for number, serving in enumerate(self._serving) if serving]

        def load(place: int) -> BaseException | None:
            try:
                self.members[place].load_weights(weights, version)
            except WorkerLost as error:
                return error
            return None

        with ThreadPoolExecutor(len(able)) as pool:
            for place, error in zip(able, pool.map(load, able), strict=True):
                if error is not None:
                    self._lose(place, error)
        if not any(self._serving):
            raise WorkerLost(message(f"no member of {self.name} took the weights", do="restart() starts them"))

    def _revive(self) -> None:
        """Start what was lost; one that is lost again and again stays out while others serve."""
        errors: list[EngineError] = []
        for place, serving in enumerate(self._serving):
            if serving:
                continue
            recent = [when for when in self._ended[place] if time.monotonic() - when < RESTART_SECONDS]
            self._ended[place] = recent
            if len(recent) > RESTARTS:
                errors.append(EngineError(message(f"member {place} of {self.name}", found=f"lost {len(recent)} times in {RESTART_SECONDS:g} s", do="look at its log, then restart()")))  # fmt: skip
                continue
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
        """How often members were started: one that was started again has lost what was pushed."""
        return sum(getattr(one, "starts", 0) for one in self.members)

    def restart(self) -> None:
        """Start every member that does not serve, however often it was lost."""
        self._ended = [[] for _ in self.members]
        self._revive()

    def sleep(self) -> None:
        """All members give the device's memory back."""
        self._each("sleep")

    def wake(self) -> None:
        """All take it again."""
        self._each("wake")

    def _each(self, method: str) -> None:
        for member, serving in zip(self.members, self._serving, strict=True):
            if serving:
                getattr(member, method)()

    # --- what they are ------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Any:
        """The model's own."""
        return self.members[0].tokenizer

    @property
    def template_switches(self) -> Mapping[str, Any]:
        """What goes to the chat template."""
        return self.members[0].template_switches

    @property
    def max_length(self) -> int | None:
        """Longest prompt and response together."""
        return self.members[0].max_length

    @property
    def version(self) -> int:
        """Of the weights that they have."""
        return self.members[0].version

    def sample_many(self, requests: Sequence[Request]) -> list[Sample]:
        """All responses, in order: the synchronous door."""
        return background.run_all(self.sample, requests)

    def describe(self) -> Any:
        """A member's own record; where it is a dict, with how many there are."""
        told = self.members[0].describe()
        return {**told, "replicas": len(self.members)} if isinstance(told, dict) else told

    def close(self) -> None:
        """End all members."""
        for member in self.members:
            if hasattr(member, "close"):
                member.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def __repr__(self) -> str:
        serving = f"{sum(self._serving)} of {len(self.members)} serve"
        return f"Replicas({self.name}: {serving}, {self.members[0]!r})"
