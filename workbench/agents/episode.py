"""One episode: its sampler and the seeds of its turns (`Episode`), and the growing record of its turns (`Transcript`).

A tool agent's context keeps all of it, or sequences that begin anew where the template rewrites it or it is compacted
(`ChatHistory`).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from workbench.agents.protocol import AgentLoopOutput, Seen, Turn
from workbench.base.config import require
from workbench.base.errors import DataError, SettingError, unknown
from workbench.base.seeds import derive
from workbench.engines.protocol import Bounded, Request, Sample, Sampler, SamplingSettings


class LockStep:
    """Makes the episodes of a batch sample in waves: all their n-th turns, in the rows' order, before any turn n + 1.

    Which rows share a wave then does not depend on timing, and on a CPU the same seed gives the same bits. An episode
    that ends calls `leave`; the others wait while an episode runs its tools.
    """

    def __init__(self, sampler: Sampler, rows: Sequence[int]) -> None:
        self._sampler = sampler
        self._going = set(rows)
        self._waiting: dict[int, list[asyncio.Future[None]]] = {}
        self._sampling = 0
        self.waves: list[int] = []
        """Number of requests of each wave so far."""

    async def sample(self, row: int, request: Request, sampler: Sampler | None = None) -> Sample:
        """Sample one response for `row`, once every episode that is not over waits for its next response.

        `sampler` replaces the sampler of the first policy.
        """
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        self._waiting.setdefault(row, []).append(turn)
        loop.call_soon(self._start_if_all_wait)  # when this one waits, too
        try:
            await turn
            return await (sampler or self._sampler).sample(request)
        finally:
            if turn.done() and not turn.cancelled():  # else its wave has not begun
                self._sampling -= 1
                self._start_if_all_wait()

    def leave(self, row: int) -> None:
        """Report that the episode of `row` is over, however it ended, so that the others no longer wait for it."""
        self._going.discard(row)
        self._waiting.pop(row, None)
        self._start_if_all_wait()

    def _start_if_all_wait(self) -> None:
        if self._waiting and not self._sampling and self._going <= set(self._waiting):
            turns = [turn for row in sorted(self._waiting) for turn in self._waiting[row] if not turn.done()]
            self._waiting = {}
            self._sampling = len(turns)
            self.waves.append(len(turns))
            for turn in turns:  # they are taken up in this order
                turn.set_result(None)


RUNNING: ContextVar[tuple[Episode, Mapping[str, Any]]] = ContextVar("RUNNING")
"""The episode whose tools are run, and the sampling settings of the episode; a sub-agent reads both."""


@dataclass
class Episode:
    """One row's sampler, the values from which the seeds of its turns are derived, and the samples so far."""

    sampler: Sampler
    uid: Any = ""
    sample: int = 0
    run_seed: int = 0
    purpose: str = "rollout"
    step: int = 0
    row: int = 0
    """Index of the row in the batch."""
    max_prompt_length: int | None = None
    lock_step: LockStep | None = None
    progress: Callable[[Transcript], None] | None = None
    """Function that agent loops with states (`ToolAgent`) call with the transcript after each state of the episode."""
    policy: str | None = None
    """The name of the first policy, where the episode has several."""
    policies: Mapping[str, Sampler] = field(default_factory=dict)
    """The samplers of the other policies by name."""
    turn: int = 0
    """Number of turns sampled so far."""
    attempt: int = 0
    """Number of the attempt at the next turn: another number gives another seed."""
    branches: tuple[tuple[int, int], ...] = ()
    """(turn, number) for each branching of the episode: the model's turns from `turn` on have seeds derived from
    `number`."""
    opening: int = 0
    """How often an `EpisodeStepper` has created the episode's tools and simulated user again."""
    seconds: float = 0.0
    """Seconds spent waiting for the sampler."""
    samples: list[Sample] = field(default_factory=list)
    """What was sampled, turn by turn."""
    matched: set[int] = field(default_factory=set)
    """Numbers of the samples that `with_log_probs` has assigned to a sequence; a sample belongs to one sequence only.
    """
    versions: list[int] = field(default_factory=list)
    others: list[AgentLoopOutput] = field(default_factory=list)
    """Sequences of sub-agents; an episode's output lists them before the sequences of the episode itself."""
    called: dict[int, int] = field(default_factory=dict)
    """Number of turns sampled before a sub-agent was called → number of the last sub-agent call at that turn."""

    @property
    def name(self) -> str:
        """The episode's id for tools and simulated users: unique in a batch, and equal when the step is repeated."""
        again = f"~{self.opening}" if self.opening else ""
        return f"{self.purpose}-{self.step}-{self.uid}-{self.sample}-{self.row}{again}"

    def seed(self, turn: int, attempt: int = 0) -> int:
        """Derive the seed of one turn from run seed, purpose, step, uid, sample, turn and attempt, and from the
        branchings before the turn."""
        branches = [one for one in self.branches if turn >= one[0]]
        return derive(self.run_seed, self.purpose, self.step, self.uid, self.sample, turn, attempt, *branches)

    def sampler_of(self, policy: str | None) -> Sampler:
        """Return the sampler of a policy by its name; None: the first policy's. Raises `SettingError` for an unknown
        name."""
        if policy is None or policy == self.policy:
            return self.sampler
        if policy not in self.policies:
            do = "pass the policy's engine to the rollout: policies={…}"
            known = (*filter(None, [self.policy]), *self.policies)
            raise SettingError(unknown("policy of this episode", policy, known), do=do)
        return self.policies[policy]

    async def generate(
        self,
        ids: Sequence[int],
        sampling: SamplingSettings | Mapping[str, Any],
        policy: str | None = None,
        pixels: Mapping[str, torch.Tensor] | None = None,
    ) -> Sample:
        """Sample the next turn after the token ids `ids`, by the policy of that name (None: the first).

        `pixels` are the model's inputs of the pictures in `ids`. The turn ends where the sampler's longest sequence
        does. A turn for which no room is left is empty, with the finish reason `length`. Raises `DataError` when a
        further turn is asked for after that, and for a first prompt that is empty or too long.
        """
        turn, self.turn = self.turn, self.turn + 1
        room = self.room(ids, policy)
        if turn == 0:
            self._check_prompt(ids, room)
        settings = sampling if isinstance(sampling, SamplingSettings) else SamplingSettings.from_parameters(sampling)
        if room <= 0:
            return self._end_at_full(ids)
        settings = settings.within(int(min(settings.max_tokens, room)))
        return await self.draw(ids, settings, self.seed(turn, self.attempt), policy=policy, pixels=pixels)

    async def draw(
        self,
        ids: Sequence[int],
        settings: SamplingSettings,
        seed: int,
        *,
        policy: str | None = None,
        pixels: Mapping[str, torch.Tensor] | None = None,
        tops: int = 0,
        schema: str | None = None,
        listen: Callable[[int], None] | None = None,
    ) -> Sample:
        """Sample one answer after the token ids `ids` with a seed of the caller's, and keep it among the episode's samples.

        `tops`, `schema` and `listen` as in `Request`.
        """
        request = Request(tuple(ids), settings, seed, pixels or None, tops, schema, listen)
        began = time.perf_counter()
        try:
            waves = self.lock_step
            sampler = self.sampler_of(policy)
            sample = await (waves.sample(self.row, request, sampler) if waves else sampler.sample(request))
        finally:
            self.seconds += time.perf_counter() - began
        self.samples.append(sample)
        self.versions.append(sample.version)
        return sample

    def room(self, ids: Sequence[int], policy: str | None = None) -> float:
        """Return how many tokens the policy's sampler can write after `ids`; infinity where its limit is not known."""
        sampler = self.sampler_of(policy)
        longest = sampler.max_length if isinstance(sampler, Bounded) else None
        return math.inf if longest is None else longest - len(ids)

    def _check_prompt(self, ids: Sequence[int], room: float) -> None:
        longest = min(self.max_prompt_length or math.inf, len(ids) + room - 1)
        if not 0 < len(ids) <= longest:
            what = f"prompt of row {self.row} (uid {self.uid}), as its agent loop writes it"
            expected = f"1 to {'any number of' if longest == math.inf else int(longest)} tokens"
            do = "raise max_prompt_length (tool schemas need room), or use rows.fitting(tokenizer, overlong='drop')"
            raise DataError(what, expected=expected, found=f"{len(ids)} tokens", do=do)

    def _end_at_full(self, ids: Sequence[int]) -> Sample:
        if self.samples and not self.samples[-1].ids and self.samples[-1].finish_reason == "length":
            what, do = f"row {self.row} (uid {self.uid}): its loop samples too much", "end at finish_reason 'length'"
            raise DataError(what, found=f"{len(ids)} tokens, the sampler's maximum length", do=do)
        self.samples.append(Sample((), (), "length", self.sampler.version))
        return self.samples[-1]

    def with_log_probs(self, output: AgentLoopOutput) -> AgentLoopOutput:
        """Fill in an output's `response_logprobs` from what was sampled, where it has none.

        The output may leave out turns, and may cut the last one. Of an episode with several sequences each is passed
        once, in order. Raises `DataError` where the model's own tokens (mask 1) are not those that were sampled.
        """
        if output.response_logprobs is not None:
            return output
        sampled = [token for token, mask in zip(output.response_ids, output.response_mask, strict=True) if mask]
        log_probs: list[float] = []
        versions: list[int] = []
        for number, sample in enumerate(self.samples):
            rest = sampled[len(log_probs) :]
            if rest and number not in self.matched and rest[: len(sample.ids)] == list(sample.ids[: len(rest)]):
                log_probs += sample.log_probs[: len(rest)]
                versions += (sample.versions or (sample.version,) * len(sample.ids))[: len(rest)]
                self.matched.add(number)
        if len(log_probs) < len(sampled):
            what = f"row {self.row} (uid {self.uid}): an agent loop's output without response_logprobs"
            expected = "the sampled ids, in their order, as response ids where the mask is 1"
            do = "set response_logprobs: `Sample.log_probs` of sampled tokens, 0.0 where the mask is 0"
            found = f"token {len(log_probs)} of {len(sampled)}, which was not sampled"
            raise DataError(what, expected=expected, found=found, do=do)
        drawn, by = iter(log_probs), iter(versions)
        filled = tuple(next(drawn) if own else 0.0 for own in output.response_mask)
        each = tuple(next(by) if own else output.version for own in output.response_mask)
        return replace(output, response_logprobs=filled, versions=each if len(set(versions)) > 1 else ())


@dataclass
class Transcript:
    """The growing record of an episode: response ids, mask, log-probs, turns. Turns are appended and never tokenized
    again."""

    prompt_ids: tuple[int, ...]
    limit: int
    """Largest number of tokens of the response."""
    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    reason: str = "stop"
    tool_seconds: float = 0.0
    seen: list[Seen] = field(default_factory=list)
    """The pictures that the model read, by turn."""
    versions: dict[int, int] = field(default_factory=dict)
    """Number of a token → policy version of what the model wrote from there on."""

    @property
    def room(self) -> int:
        """How many more tokens the response may have."""
        return self.limit - len(self.ids)

    @property
    def context(self) -> tuple[int, ...]:
        """Token ids of the prompt and of the response so far, after which the next turn is sampled."""
        return (*self.prompt_ids, *self.ids)

    def count(self, *roles: str) -> int:
        """Count the turns of these roles that have tokens in the response."""
        return sum(one.role in roles and one.last >= one.first for one in self.turns)

    def say(self, sample: Sample, text: str, *, cut: str = "") -> Turn:
        """Append a turn that the model sampled, with mask 1; `text` is its decoded text, `cut` a note on what was cut."""
        first = len(self.ids)
        self.versions |= {
            first + n: one for n, one in enumerate(sample.versions or (sample.version,) * bool(sample.ids))
        }
        return self._add("assistant", text, sample.ids, sample.log_probs, 1, cut)

    def hear(self, role: str, text: str, ids: Sequence[int], *, cut: str = "", seen: Seen | None = None) -> bool:
        """Append a tool's or user's turn, which is not trained on (mask 0), and return True.

        If no room would be left for an answer, the turn's text is kept without its tokens, and False is returned. `cut`
        says in words how the text was shortened; `seen` has the model's inputs of the turn's pictures.
        """
        if len(ids) >= self.room:
            left = f"left out: {len(ids)} tokens, and the response has room for {self.room}"
            self._add(role, text, (), (), 0, f"{cut}; {left}" if cut else left)
            return False
        self.seen += [replace(seen, first=len(self.ids))] if seen else []
        self._add(role, text, ids, [0.0] * len(ids), 0, cut)
        return True

    def copy(self) -> Transcript:
        """Return an independent copy of the transcript."""
        kept: dict[str, Any] = {
            name: list(getattr(self, name)) for name in ("ids", "mask", "log_probs", "turns", "seen")
        }
        return replace(self, **kept, versions=dict(self.versions))

    def first(self, count: int) -> Transcript:
        """Return a copy that ends after the first `count` turns; if the last of them is the model's, its calls and
        score are removed."""
        turns = list(self.turns[:count])
        if turns and turns[-1].role == "assistant" and count < len(self.turns):
            turns[-1] = replace(turns[-1], calls=(), score=None, error="", extra={})
        end = turns[-1].last + 1 if turns else 0
        kept: dict[str, Any] = {"ids": self.ids[:end], "mask": self.mask[:end], "log_probs": self.log_probs[:end]}
        kept["seen"] = [one for one in self.seen if one.first < end]
        kept["versions"] = {first: one for first, one in self.versions.items() if first < end}
        return replace(self, **kept, turns=turns, reason=self.reason if count == len(self.turns) else "stop")

    def note(self, **changes: Any) -> None:
        """Change fields of the last `Turn`: `calls`, `score`, `error` and so on."""
        self.turns[-1] = replace(self.turns[-1], **changes)

    def _add(self, role: str, text: str, ids: Sequence[int], log_probs: Sequence[float], learnt: int, cut: str) -> Turn:
        first = len(self.ids)
        self.ids += [int(one) for one in ids]
        self.mask += [learnt] * len(ids)
        self.log_probs += [float(one) for one in log_probs]
        self.turns.append(Turn(role, text, first, len(self.ids) - 1, cut=cut))
        return self.turns[-1]

    def token_versions(self) -> tuple[int, ...]:
        """Return the policy version of each token; a tool's or user's token has that of the model's turn before. Empty
        if all are of one version."""
        if len(set(self.versions.values())) < 2:
            return ()
        versions, now = [], next(iter(self.versions.values()))
        for place in range(len(self.ids)):
            versions.append(now := self.versions.get(place, now))
        return tuple(versions)

    def output(self, episode: Episode, **extra: Any) -> AgentLoopOutput:
        """Return the episode as an `AgentLoopOutput`; `extra` is added to `turn_scores`, `tool_rewards` and
        `num_tool_calls`."""
        calls = [call for turn in self.turns for call in turn.calls if call.ran]
        spoken, heard = sum(turn.role == "assistant" for turn in self.turns), self.count("tool", "user")
        versions = episode.versions or [episode.sampler.version]
        metrics = {"generate_sequences": episode.seconds, "tool_calls": self.tool_seconds, "num_tool_calls": len(calls)}
        stable = {
            "turn_scores": [turn.score for turn in self.turns if turn.score is not None],
            "tool_rewards": [call.reward for call in calls if call.reward is not None],
            "num_tool_calls": len(calls),
        }
        return AgentLoopOutput(
            prompt_ids=self.prompt_ids,
            response_ids=tuple(self.ids),
            response_mask=tuple(self.mask),
            response_logprobs=tuple(self.log_probs),
            num_turns=spoken + heard + 1,
            finish_reason=self.reason,
            version=versions[0],
            versions=self.token_versions(),
            metrics={**metrics, "min_version": min(versions), "max_version": max(versions)},
            turns=tuple(self.turns),
            seen=tuple(self.seen),
            extra={**stable, **extra},
        )


HISTORIES = ("append", "template")
COMPACT_PROMPT = (
    "Your context ends here. Write down in a few sentences what has been asked, done and found so far: "
    "you will go on from the task and these sentences alone."
)
_ASKED = "compact"
"""Key of a turn's `extra`: the turn ends with the request for a summary, and the next one is the summary."""
_SUMMARY = "What has been done so far: "


@dataclass
class Past:
    """One finished sequence of an episode that has several: the chat that its prompt was made of, and its
    transcript."""

    messages: list[dict[str, Any]]
    transcript: Transcript


@dataclass(frozen=True)
class ChatHistory:
    """The settings of a `ToolAgent` that say when a sequence of an episode ends and the next one begins."""

    kind: str = "append"
    compact_at: int | None = None
    compact_prompt: str = COMPACT_PROMPT
    max_sequences: int = 16
    settings: Mapping[str, Any] = field(init=False)
    """The settings that differ from the defaults, by the names of the agent's arguments."""

    def __post_init__(self) -> None:
        require(self.kind in HISTORIES, "history", expected=f"one of {HISTORIES}", found=self.kind)
        for name in ("compact_at", "max_sequences"):
            value = getattr(self, name)
            require(value is None or value >= 1, name, expected="≥ 1", found=value)
        require(bool(self.compact_prompt), "compact_prompt", expected="a text", found=self.compact_prompt)
        defaults = {"compact_at": None, "compact_prompt": COMPACT_PROMPT, "max_sequences": 16}
        changed = {name: getattr(self, name) for name, usual in defaults.items() if getattr(self, name) != usual}
        object.__setattr__(self, "settings", changed | ({"history": self.kind} if self.kind != "append" else {}))

    def is_full(self, tokens: int) -> bool:
        """Return whether a context of `tokens` tokens is to be compacted, by a summary."""
        return self.compact_at is not None and tokens >= self.compact_at

    def asking(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the messages with the request for a summary appended to the last one's text, so that no template sees
        two users' turns in a row."""
        *others, last = map(dict, messages)
        return [*others, {**last, "content": f"{last['content']}{self._request}"}]

    def heard(self, turn: Turn) -> str:
        """Return a turn's text without the request for a summary."""
        return turn.text.removesuffix(self._request) if turn.extra.get(_ASKED) else turn.text

    @property
    def _request(self) -> str:
        return f"\n\n{self.compact_prompt}"


def mark_asked(transcript: Transcript) -> None:
    """Mark the last turn as one that ends with the request for a summary."""
    transcript.note(extra={**transcript.turns[-1].extra, _ASKED: True})


def is_asked(turns: Sequence[Turn]) -> bool:
    """Return whether the last of these turns asks for a summary, so that the next turn is the summary."""
    return bool(turns) and turns[-1].role != "assistant" and bool(turns[-1].extra.get(_ASKED))


def summaries(turns: Sequence[Turn]) -> list[bool]:
    """Return for each turn whether it is a summary that the model was asked for."""
    return [turn.role == "assistant" and is_asked(turns[:place][-1:]) for place, turn in enumerate(turns)]


def with_summary(messages: Sequence[Mapping[str, Any]], summary: str) -> list[dict[str, Any]]:
    """Return the first messages of an episode, with a summary of the turns since then appended."""
    *others, last = map(dict, messages)
    text = _SUMMARY + summary
    if last["role"] == "user" and isinstance(last["content"], str):
        return [*others, {**last, "content": f"{last['content']}\n\n{text}"}]
    return [*others, last, {"role": "user", "content": text}]


def cut(transcripts: Iterable[Transcript], count: int) -> list[Transcript]:
    """Return copies of an episode's sequences, ended after the first `count` turns; where a sequence ends there, the
    next one is kept empty."""
    kept: list[Transcript] = []
    for transcript in transcripts:
        inside = len(transcript.turns)
        kept.append(transcript.copy() if inside <= count else transcript.first(count))
        if inside > count:
            break
        count -= inside
    return kept
