"""What one episode samples with, and the growing record of what was said in it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from workbench.agents.protocol import AgentLoopOutput, Turn
from workbench.engines.protocol import Request, Sample, Sampler, SamplingSettings
from workbench.errors import DataError, message
from workbench.seeds import derive


class LockStep:
    """Lets the episodes of a batch sample their n-th turns as one wave, in the rows' order, before any samples its next.

    Which rows share a wave then depends on nothing that is timed, and on a CPU the same seed gives the same bits.
    An episode that ends calls `leave`; one that waits for its tools holds the others up.
    """

    def __init__(self, sampler: Sampler, rows: Sequence[int]) -> None:
        self._sampler = sampler
        self._going = set(rows)
        self._waiting: dict[int, list[tuple[Request, asyncio.Future[Sample]]]] = {}
        self._wave: asyncio.Task[None] | None = None
        self.waves: list[int] = []
        """Requests of each wave so far."""

    async def sample(self, row: int, request: Request) -> Sample:
        """One response, when every episode that goes on has asked for its own."""
        future: asyncio.Future[Sample] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(row, []).append((request, future))
        self._look()
        return await future

    def leave(self, row: int) -> None:
        """The row's episode is over, however it ended."""
        self._going.discard(row)
        self._waiting.pop(row, None)
        self._look()

    def _look(self) -> None:
        if self._waiting and self._wave is None and self._going <= set(self._waiting):
            asked = [pair for row in sorted(self._waiting) for pair in self._waiting[row]]
            self._waiting = {}
            self.waves.append(len(asked))
            self._wave = asyncio.create_task(self._sampled(asked))

    async def _sampled(self, asked: Sequence[tuple[Request, asyncio.Future[Sample]]]) -> None:
        tasks = [asyncio.ensure_future(self._sampler.sample(request)) for request, _ in asked]
        for (_, future), task in zip(asked, tasks, strict=True):
            future.add_done_callback(partial(_given_up, task))
        found = await asyncio.gather(*tasks, return_exceptions=True)
        self._wave = None
        for (_, future), answer in zip(asked, found, strict=True):
            if future.done():
                continue
            if isinstance(answer, BaseException):
                future.set_exception(answer)
            else:
                future.set_result(answer)
        self._look()


def _given_up(task: asyncio.Future[Sample], future: asyncio.Future[Sample]) -> None:
    """An episode that is given up gives up its request."""
    if future.cancelled():
        task.cancel()


@dataclass
class Episode:
    """Where one row's turns come from: its sampler, and the name that its seeds are derived from."""

    sampler: Sampler
    uid: Any = ""
    sample: int = 0
    run_seed: int = 0
    purpose: str = "rollout"
    step: int = 0
    row: int = 0
    """Its place in the batch."""
    max_prompt_length: int | None = None
    lock_step: LockStep | None = None
    progress: Callable[[Transcript], None] | None = None
    """Told of the episode after each of its states, by loops that can."""
    turn: int = 0
    """How many turns were sampled."""
    attempt: int = 0
    """Of the next turn: another one gives another sample from the same place."""
    opening: int = 0
    """How often its tools and its user were opened again, by whoever steps it."""
    seconds: float = 0.0
    """Spent waiting for the sampler."""
    versions: list[int] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Unique among a batch's episodes, and the same when the step is repeated: an instance's id."""
        again = f"~{self.opening}" if self.opening else ""
        return f"{self.purpose}-{self.step}-{self.uid}-{self.sample}-{self.row}{again}"

    def seed(self, turn: int, attempt: int = 0) -> int:
        """The seed of one turn: (run seed, purpose, step, uid, sample, turn, attempt), as `seeds.derive` has it."""
        return derive(self.run_seed, self.purpose, self.step, self.uid, self.sample, turn, attempt)

    async def generate(
        self, ids: Sequence[int], sampling: SamplingSettings | Mapping[str, Any], *, attempt: int | None = None
    ) -> Sample:
        """The episode's next turn after `ids`. Raises `DataError` for a first prompt that is empty or too long."""
        turn, self.turn = self.turn, self.turn + 1
        if turn == 0:
            self._fits(len(ids))
        settings = sampling if isinstance(sampling, SamplingSettings) else SamplingSettings.from_parameters(sampling)
        request = Request(tuple(ids), settings, self.seed(turn, self.attempt if attempt is None else attempt))
        began = time.perf_counter()
        try:
            if self.lock_step is not None:
                found = await self.lock_step.sample(self.row, request)
            else:
                found = await self.sampler.sample(request)
        finally:
            self.seconds += time.perf_counter() - began
        self.versions.append(found.version)
        return found

    def _fits(self, length: int) -> None:
        if length == 0 or (self.max_prompt_length is not None and length > self.max_prompt_length):
            raise DataError(
                message(
                    f"prompt of row {self.row} (uid {self.uid}), as its agent loop writes it",
                    expected=f"1 to {self.max_prompt_length or 'any number of'} tokens",
                    found=length,
                    do="raise max_prompt_length, or take rows.fitting(tokenizer, overlong='drop'): tools need room, too",
                )
            )


@dataclass
class Transcript:
    """An episode as it grows: ids, masks, log-probs and turns; nothing in it is written twice."""

    prompt_ids: tuple[int, ...]
    limit: int
    """Tokens that the response may have."""
    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    reason: str = "stop"
    tool_seconds: float = 0.0

    @property
    def room(self) -> int:
        """Tokens that the response may still have."""
        return self.limit - len(self.ids)

    @property
    def context(self) -> tuple[int, ...]:
        """All that the model has read and written."""
        return (*self.prompt_ids, *self.ids)

    def count(self, *roles: str) -> int:
        """Turns of these roles that stand in the response."""
        return sum(one.role in roles and one.last >= one.first for one in self.turns)

    def say(self, sample: Sample, text: str, *, cut: str = "") -> Turn:
        """The model's turn, as it was sampled."""
        return self._put("assistant", text, sample.ids, sample.log_probs, 1, cut)

    def hear(self, role: str, text: str, ids: Sequence[int], *, cut: str = "") -> bool:
        """Another's turn; False, and left out of the response, where the model would have no room to answer it."""
        if len(ids) >= self.room:
            left = f"left out: {len(ids)} tokens, and the response has room for {self.room}"
            self._put(role, text, (), (), 0, "; ".join(filter(None, (cut, left))))
            return False
        self._put(role, text, ids, [0.0] * len(ids), 0, cut)
        return True

    def copy(self) -> Transcript:
        """One that grows by itself."""
        kept: dict[str, Any] = {name: list(getattr(self, name)) for name in ("ids", "mask", "log_probs", "turns")}
        return replace(self, **kept)

    def first(self, count: int) -> Transcript:
        """As it stood when `count` turns had been said, and nobody had answered the last of them."""
        turns = list(self.turns[:count])
        if turns and turns[-1].role == "assistant" and count < len(self.turns):
            turns[-1] = replace(turns[-1], calls=(), score=None, error="", extra={})
        end = turns[-1].last + 1 if turns else 0
        kept: dict[str, Any] = {"ids": self.ids[:end], "mask": self.mask[:end], "log_probs": self.log_probs[:end]}
        return replace(self, **kept, turns=turns, reason=self.reason if count == len(self.turns) else "stop")

    def note(self, **changes: Any) -> None:
        """Change the record of the last turn: its calls, score, error."""
        self.turns[-1] = replace(self.turns[-1], **changes)

    def _put(self, role: str, text: str, ids: Sequence[int], log_probs: Sequence[float], own: int, cut: str) -> Turn:
        first = len(self.ids)
        self.ids += [int(one) for one in ids]
        self.mask += [own] * len(ids)
        self.log_probs += [float(one) for one in log_probs]
        self.turns.append(Turn(role, text, first, len(self.ids) - 1, cut=cut))
        return self.turns[-1]

    def output(self, episode: Episode, **extra: Any) -> AgentLoopOutput:
        """The episode as it stands, with verl's stable extra keys."""
        calls = [call for one in self.turns for call in one.calls]
        ran = [call for call in calls if call.ran]
        said, heard = sum(one.role == "assistant" for one in self.turns), self.count("tool", "user")
        versions = episode.versions or [episode.sampler.version]
        return AgentLoopOutput(
            prompt_ids=self.prompt_ids,
            response_ids=tuple(self.ids),
            response_mask=tuple(self.mask),
            response_logprobs=tuple(self.log_probs),
            num_turns=said + heard + 1,
            finish_reason=self.reason,
            version=versions[0],
            metrics={
                "generate_sequences": episode.seconds,
                "tool_calls": self.tool_seconds,
                "num_tool_calls": len(ran),
                "min_version": min(versions),
                "max_version": max(versions),
            },
            turns=tuple(self.turns),
            extra={
                "turn_scores": [one.score for one in self.turns if one.score is not None],
                "tool_rewards": [call.reward for call in ran if call.reward is not None],
                "num_tool_calls": len(ran),
                **extra,
            },
        )
