"""One episode, turn by turn: look at it, go back, write a turn by hand, and let it run on.

Branching: what continuations drawn from an episode's turns say of these turns: values, and credit by counterfactuals.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any

import torch

from workbench.agents.episode import Episode, Transcript, cut
from workbench.agents.loop import AgentLoopBase
from workbench.agents.protocol import AgentLoopOutput, FunctionCall, Sequences, ToolCall, Turn, call_of, sequences
from workbench.agents.tool_agent import AgentState, EpisodeState, ToolAgent
from workbench.base import runtime
from workbench.base.config import require
from workbench.base.errors import PipelineError, SettingError, describe, first_line
from workbench.base.shown import Shown, shows
from workbench.dataproto.core import DataProto
from workbench.engines.protocol import Sample
from workbench.functional.trees import node_numbers

Ran = tuple[tuple[str, str], ...]
"""Calls that were run, in order: (tool, arguments)."""
_KEPT = 16
"""Number of saved tool states that a stepper and its forks keep."""
_WHO = {
    AgentState.PENDING: "assistant",
    AgentState.GENERATING: "assistant",
    AgentState.PROCESSING_TOOLS: "tool",
    AgentState.INTERACTING: "user",
}


class EpisodeStepper(Shown):
    """Steps through one row's episode, turn by turn. Methods return the stepper, so that calls chain.

    `episode(row)` of a `Stepper` makes one: at the end of the sampled episode if the rollout has run, else before the first
    turn. A notebook cell shows its transcript. The model's turns are sampled with the rollout's seeds, so the same episode
    comes out again unless something is changed. After `back`, tools and the simulated user are made anew when they are next
    needed and get the earlier calls again, so that their state fits; the transcript keeps the earlier answers. A tool that
    has `snapshot` and `restore` is put back as it was instead, where this stepper or a fork of it has been there before.

    Args:
        loop: the row's `ToolAgent`; other loops have no turns to step and raise `SettingError`.
        episode: the row's `Episode`: its sampler and seeds.
        sampling: `SamplingSettings` as a dict.
        row: the row's object columns.
        recorded: the episode as it was sampled; None: it has not begun.
        row_number: the row's number in the rollout.
        number: the episode's number in the rollout: the row's, unless episodes are several rows.
        batch_of: function from episodes, each of its sequences, to a batch of their rows, with the rollout's columns.
        log_probs: function (context, its pictures' inputs or None, ids) → the policy's log-probs, in nats, of ids that were written by hand.
        lent: returns a context manager inside which the engine has the weights that this episode is sampled with.
    """

    def __init__(
        self,
        loop: AgentLoopBase,
        episode: Episode,
        sampling: Mapping[str, Any],
        row: Mapping[str, Any],
        recorded: Sequences | None = None,
        *,
        row_number: int,
        number: int,
        batch_of: Callable[[Sequence[Sequences]], DataProto],
        log_probs: Callable[[Sequence[int], Mapping[str, Any] | None, Sequence[int]], Sequence[float]],
        lent: Callable[[], AbstractContextManager[None]],
    ) -> None:
        if not isinstance(loop, ToolAgent):
            what = f"the agent loop of row {row_number} cannot be stepped turn by turn"
            do = "look at the whole transcript: views.transcript(batch, row)"
            raise SettingError(what, expected="a ToolAgent, or a subclass of it", found=loop, do=do)
        self.row, self.number = row_number, number
        """The row's number in the rollout, and the episode's."""
        self._log_probs, self._lent = log_probs, lent
        self.batch_of = batch_of
        """Function that makes a batch with the rollout's columns from episodes, each a tuple of sequences."""
        self._openings = itertools.count(1)
        self._saved: dict[Ran, dict[str, Any]] = {}
        self._loop = loop.bound(episode)
        self._now, self._fits = self._loop.start(sampling, **row), True
        self._outputs: Sequences | None = recorded
        if recorded is not None:
            episode.others = [output for output in recorded if call_of(output) != (0, 0)]
            main = [output for output in recorded if call_of(output) == (0, 0)]
            transcripts = [_transcript(self._now.transcript, output) for output in main]
            self._now, self._fits = self._state_after(transcripts), False
            self._now.state = AgentState.TERMINATED
            pairs = zip(transcripts, main, strict=True)
            episode.versions = [output.version for part, output in pairs for _ in range(part.count("assistant"))]

    # --- the episode so far ---------------------------------------------------------------

    @property
    def uid(self) -> Any:
        """The `uid` of the episode's prompt."""
        return self._loop.episode.uid

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The turns of the episode so far."""
        return tuple(self._now.turns)

    @property
    def next_role(self) -> str | None:
        """The role whose turn is next: `assistant`, `tool`, `user`; None when the episode is over."""
        return _WHO.get(self._now.state)

    @property
    def asked(self) -> tuple[FunctionCall, ...]:
        """The tool calls that run next; empty unless it is the tools' turn."""
        return tuple(self._loop.wanted(self._now)) if self.next_role == "tool" else ()

    @property
    def output(self) -> AgentLoopOutput:
        """The episode so far as an `AgentLoopOutput` (ids, mask, log-probs, turns); of several sequences the last one."""
        return self.outputs[-1]

    @property
    def outputs(self) -> Sequences:
        """The sequences of the episode so far: one, unless its context was compacted or sub-agents had their own."""
        return self._outputs or self._loop.sequences(self._now)

    @property
    def tokenizer(self) -> Any:
        """The sampler's tokenizer."""
        return self._loop.tokenizer

    @property
    def batch(self) -> DataProto:
        """The episode as a batch with one row per sequence and the rollout's columns: `pipeline["reward"](e.batch)`
        scores it."""
        return self.batch_of([self.outputs])

    # --- forwards -------------------------------------------------------------------------

    def next(self, attempt: int = 0, **sampling: Any) -> EpisodeStepper:
        """Go one turn further: sample the model's turn, run its tool calls, or ask the simulated user.

        Args:
            attempt: number of the try at the model's turn; another number gives another seed.
            sampling: sampling settings for this turn of the model: `temperature=0.2`, `max_tokens=100`.

        Raises `PipelineError` when the episode is over, and `SettingError` for arguments when it is not the model's
        turn.
        """
        self._expect()
        require(isinstance(attempt, int) and attempt >= 0, "attempt", expected="a whole number ≥ 0", found=attempt)
        if (attempt or sampling) and self.next_role != "assistant":
            what = "next() takes attempt and sampling settings for the model's turns only"
            raise SettingError(what, found=f"the {self.next_role}'s turn", do="call next() without arguments")
        self._loop.episode.attempt = attempt
        whole, self._now.sampling = self._now.sampling, {**self._now.sampling, **sampling}
        try:
            self._run_step(self._turn, samples=self.next_role == "assistant" or bool(self._loop.sub_agents))
        finally:
            self._loop.episode.attempt, self._now.sampling = 0, whole
        return self

    def run(self) -> EpisodeStepper:
        """Run the episode to its end."""
        while self.next_role is not None:
            self.next()
        return self

    def say(self, text: str | Sequence[str], *, end: bool = True) -> EpisodeStepper:
        """Write the next turn by hand: the model's words, a tool's answer or the user's; nothing is sampled and no tool
        is called.

        The model's words get the policy's log-probs, and are trained on. No limit cuts a tool's or user's text; where
        the response has no room for it the episode is over, as in a rollout.

        Args:
            text: the turn; where several calls were made, a list with an answer to each of `asked`.
            end: append the end-of-sequence token to the model's words; False: the model continues from there.

        Raises `PipelineError` when the episode is over; `SettingError` for words that do not fit into the response, or
        a wrong number of texts.
        """
        self._expect()
        texts = [text] if isinstance(text, str) or not isinstance(text, Sequence) else list(text)
        needed = len(self.asked) or 1
        if len(texts) != needed or not all(isinstance(one, str) for one in texts):
            expected = f"{needed} texts, one for each call in .asked" if needed > 1 else "a text"
            raise SettingError(f"text for the {self.next_role}'s turn", expected=expected, found=describe(text))
        words = self._by_hand(texts[0], end) if self.next_role == "assistant" else None
        self._run_step(lambda: self._put(texts, words, end), samples=words is not None and not end)
        return self

    async def _put(self, texts: Sequence[str], sample: Sample | None, end: bool) -> None:
        """Append these texts as the next turn; `sample` has the model's words as tokens, where it is the model's turn."""
        if self._now.state is AgentState.PENDING:
            await self._loop.advance(self._now)
        if self.next_role is None:  # its user could not start
            pass
        elif sample is not None:
            await self._open_tools(always=self._now.user is not None)
            if end:
                self._loop.episode.versions.append(sample.version)
            whole = sample if end else await self._continued(sample)
            self._now.state = await self._loop.spoken(self._now, whole, edited=True)
        else:
            self._now.state = self._answered(texts)
            self._now.transcript.note(edited=True)
        await self._ended()

    # --- backwards ------------------------------------------------------------------------

    def back(self, to: int | None = None) -> EpisodeStepper:
        """Go back to before turn `to` (None: the last turn). Raises `PipelineError` if there is no such turn."""
        count = len(self.turns)
        to = count - 1 if to is None else to
        if to == count and self.next_role is not None:
            return self
        if not isinstance(to, int) or not 0 <= to < count:
            known = f"one of turns 0 to {count - 1}" if count else "an episode with at least one turn"
            found = f"turn {to!r}" if count else "no turns"
            raise PipelineError("the turn to go back to in this episode", expected=known, found=found)
        self._now, self._outputs, self._fits = self._state_after(cut(self._now.said, to)), None, False
        return self

    def replace(self, turn: int, text: str | Sequence[str], *, end: bool = True) -> EpisodeStepper:
        """Go back to turn `turn` and write it by hand (see `say`); later turns are dropped, `run` continues from there.

        If a simulated user's turn is replaced, the score that came with it is kept. If `say` raises, nothing changes.
        """
        kept = self._now, self._outputs, self._fits
        turns = self.turns
        self.back(turn)
        try:
            self.say(text, end=end)
        except SettingError:
            self._now, self._outputs, self._fits = kept
            raise
        if turns[turn:] and turns[turn].role == "user":
            where, place = next(
                (one, turn - 1 - before) for one, before in self._spans() if turn - 1 < before + len(one.turns)
            )
            where.turns[place] = replace(where.turns[place], score=turns[turn - 1].score, extra=turns[turn - 1].extra)
        return self

    def fork(self) -> EpisodeStepper:
        """Make a second stepper at the same place, with tools and a simulated user of its own."""
        twin = copy.copy(self)
        here = self._loop.episode
        twin._loop = self._loop.bound(replace(here, versions=list(here.versions), others=list(here.others), called={}))
        kept: dict[str, Any] = {"transcript": self._now.transcript.copy(), "errors": list(self._now.errors)}
        kept["past"] = [replace(one, transcript=one.transcript.copy()) for one in self._now.past]
        tools, user = twin._loop.opened(self._now.row)
        twin._now = replace(self._now, **kept, tools=tools, user=user)
        twin._fits = False
        return twin

    def branch(self, turn: int | None = None, n: int = 8) -> tuple[EpisodeStepper, ...]:
        """Draw `n` continuations from turn `turn` (None: the next one) to the episode's end, all at once; return them
        as steppers.

        Turn `turn` is the first that is drawn again; the turns before it are shared. Every continuation has tools and a
        simulated user of its own, brought to that place as after `back`, and its own seeds, which are equal at every
        call. This stepper stays where it is. Raises `PipelineError` if there is no such turn.
        """
        require(isinstance(n, int) and n >= 1, "n", expected="a whole number ≥ 1", found=n)
        start = self.fork().back(len(self.turns) if turn is None else turn)
        forks, spoken = [start.fork() for _ in range(n)], sum(one.role == "assistant" for one in start.turns)
        for number, one in enumerate(forks):
            one._loop.episode.branches += ((spoken, number),)
        with self._lent():
            runtime.run_all(EpisodeStepper.finished, forks)
        return tuple(forks)

    async def finished(self) -> Sequences:
        """Run the episode to its end as a coroutine, so that many can run at once; return its sequences.

        Tools and user are released where it is cancelled or fails.
        """
        try:
            while self.next_role is not None:
                self._counted()
                await self._turn()
        except BaseException:
            await self._loop.close(self._now)
            raise
        return self.outputs

    def close(self) -> None:
        """Release the tools and the simulated user, as at the end of an episode. Later steps make them anew."""
        runtime.run(self._loop.close(self._now))
        self._fits = False

    # --- inside ---------------------------------------------------------------------------

    def _state_after(self, transcripts: Sequence[Transcript]) -> EpisodeState:
        """Make the state after the turns of exactly these sequences, with the present tools and user."""
        state, episode = self._loop.at(self._now, transcripts), self._loop.episode
        answered = sum(turn.role == "assistant" for turn in state.turns[:-1])
        episode.others = [one for one in episode.others if call_of(one)[0] <= answered]
        episode.called = {}
        return state

    def _spans(self) -> list[tuple[Transcript, int]]:
        """Pair each sequence with the number of turns before it."""
        parts = self._now.said
        return list(zip(parts, itertools.accumulate((len(one.turns) for one in parts), initial=0), strict=False))

    def _expect(self) -> None:
        if self.next_role is None:
            found = f"finish_reason {self._now.transcript.reason!r} after {len(self.turns)} turns"
            raise PipelineError("this episode is over", found=found, do="go back by back(to=…) or replace(turn, text)")

    def _run_step(self, work: Callable[[], Any], samples: bool) -> None:
        self._counted()
        kept = [one.copy() for one in self._now.said]
        try:
            with self._lent() if samples else nullcontext():
                runtime.run(work())
        except BaseException:  # interrupted half-way: as if the turn had not begun
            self._now, self._outputs, self._fits = self._state_after(kept), None, False
            raise

    def _counted(self) -> None:
        """Store the number of turns so far in the episode, before the next turn."""
        episode = self._loop.episode
        episode.turn = sum(one.count("assistant") for one in self._now.said)
        episode.versions = episode.versions[: episode.turn]
        self._outputs = None

    async def _turn(self) -> None:
        count = len(self.turns)
        while len(self.turns) == count and self.next_role is not None:
            await self._open_tools(always=self._now.user is not None or self.next_role == "tool")
            if self.next_role is not None:
                await self._loop.advance(self._now)
        if self._fits and self.turns and self.turns[-1].role == "tool":
            await self._save()
        await self._ended()

    async def _ended(self) -> None:
        if self._now.state is AgentState.TERMINATED:
            await self._open_tools(always=True)
            self._now.state = AgentState.TERMINATED
            self._outputs = sequences(await self._loop.finish(self._now), self._loop.name)
            self._fits = False

    async def _open_tools(self, always: bool) -> None:
        """Make tools and user anew, and repeat the earlier calls, where their state does not fit the transcript."""
        if self._fits or not always:
            return
        loop, now = self._loop, self._now
        await loop.close(now)
        loop.episode.opening = next(self._openings)
        now.tools, now.user = loop.opened(now.row)
        if await loop.begin(now) is AgentState.TERMINATED:
            now.state = AgentState.TERMINATED
        await self._asked_again()
        self._fits = True

    async def _asked_again(self) -> None:
        """Repeat the earlier calls and questions to tools and user, except those whose answers were written by hand."""
        now = self._now
        known, saved = await self._restored()
        done = 0
        for count, turn, answer in self._asked_before():
            for call in (call for call in turn.calls if call.ran and call.name not in self._loop.sub_agents):
                done += 1
                if done > known or call.name not in saved:
                    await now.tools.call(FunctionCall(call.name, call.arguments))
            replied = turn.score is not None or (answer is not None and answer.role == "user")
            if not replied or now.user is None:
                continue
            try:
                await now.user.ask(self._loop.chat(now, count))
            except Exception as error:  # noqa: BLE001 - a row's user, not the notebook
                now.errors.append(f"asked again: {first_line(error)}")
        if done > known:
            await self._save()

    def _asked_before(self) -> Iterator[tuple[int, Turn, Turn | None]]:
        """Yield (number of turns, assistant's turn, its answer) for each model's turn so far whose answer was not
        written by hand."""
        turns = self._now.turns
        for count, (turn, answer) in enumerate(itertools.zip_longest(turns, turns[1:]), 1):
            if turn.role == "assistant" and not (answer is not None and answer.edited):
                yield count, turn, answer

    def _ran(self) -> Ran:
        calls = [call for _, turn, _ in self._asked_before() for call in turn.calls if call.ran]
        return tuple((call.name, call.arguments) for call in calls if call.name not in self._loop.sub_agents)

    async def _save(self) -> None:
        """Keep the present state of the tools that can be saved."""
        if saved := await self._now.tools.save():
            self._saved[self._ran()] = saved
            for oldest in list(self._saved)[:-_KEPT]:
                del self._saved[oldest]

    async def _restored(self) -> tuple[int, dict[str, Any]]:
        """Restore the tools' last saved state that fits the transcript: (how many of the calls that ran it covers, tool
        → state)."""
        ran = self._ran()
        known = next((count for count in range(len(ran), 0, -1) if ran[:count] in self._saved), 0)
        saved = self._saved.get(ran[:known], {})
        await self._now.tools.load(saved)
        return known, saved

    def _answered(self, texts: Sequence[str]) -> AgentState:
        if self.next_role == "user":
            return self._loop.replied(self._now, texts[0])
        pairs = zip(self.asked, texts, strict=True)
        records = [ToolCall(call.name, call.arguments, result=text) for call, text in pairs]
        return self._loop.answered(self._now, records)

    def _by_hand(self, text: str, end: bool) -> Sample:
        transcript = self._now.transcript
        ids = tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        if not 0 < len(ids) < transcript.room:
            room, found = f"1 to {transcript.room - 1} tokens", f"{len(ids)} tokens"
            do = "shorten it, or raise max_tokens"
            raise SettingError("text for the model's turn", expected=room, found=found, do=do)
        ids += (self.tokenizer.eos_token_id,) if end else ()
        with self._lent():
            log_probs = self._log_probs(*self._loop.read(transcript), ids)
            return Sample(ids, tuple(log_probs), "stop", self._loop.episode.sampler.version)

    async def _continued(self, sample: Sample) -> Sample:
        """Let the model continue its turn, whose beginning was written by hand."""
        (context, pixels), room = self._loop.read(self._now.transcript), self._now.transcript.room - len(sample.ids)
        more = await self._loop.generate((*context, *sample.ids), self._now.sampling, pixels=pixels, max_tokens=room)
        whole = (*sample.ids, *more.ids), (*sample.log_probs, *more.log_probs)
        return Sample(*whole, more.finish_reason, more.version)


def _transcript(empty: Transcript, output: AgentLoopOutput) -> Transcript:
    """Convert a recorded sequence to a transcript."""
    lists: dict[str, Any] = {"ids": list(output.response_ids), "mask": list(output.response_mask)}
    lists |= {"log_probs": list(output.response_logprobs), "turns": list(output.turns), "seen": list(output.seen)}
    return replace(empty, prompt_ids=output.prompt_ids, reason=output.finish_reason, **lists)


def call_text(call: ToolCall) -> str:
    """Write a tool call as one line of text: `name(arguments) → status, reward: answer`."""
    reward = f", reward {call.reward:g}" if call.reward is not None else ""
    arguments, result = (" ".join(text.split())[:200] for text in (call.arguments, call.result))
    return f"{call.name}({arguments}) → {call.status}{reward}: {result}"


def only_sequence(outputs: Sequences) -> AgentLoopOutput:
    """Return the sequence of an episode that has one. Raises `SettingError` for several, as each leaf of a tree is one
    row."""
    if len(outputs) > 1:
        do = "branch an agent without compaction, sub-agents and history='template'"
        raise SettingError("sequences of an episode to branch", expected="one", found=f"{len(outputs)}", do=do)
    return outputs[0]


@dataclass(frozen=True)
class TurnValue:
    """A mean reward of continuations, with its standard error."""

    mean: float
    """Mean reward; NaN without scored continuations."""
    error: float
    """Standard error of the mean: deviation (n − 1) / √n; 0 for a single recorded reward, NaN for a single draw."""
    count: int
    """Number of scored continuations."""

    @classmethod
    def of(cls, rewards: Sequence[float]) -> TurnValue:
        """Make the estimate of a list of drawn rewards."""
        count = len(rewards)
        error = stdev(rewards) / math.sqrt(count) if count > 1 else math.nan
        return cls(fmean(rewards) if count else math.nan, error, count)

    def minus(self, other: TurnValue) -> TurnValue:
        """Return the difference from an independent estimate, with its standard error."""
        return TurnValue(self.mean - other.mean, math.hypot(self.error, other.error), min(self.count, other.count))


@dataclass(frozen=True)
class TreeNode:
    """The turns of a tree's episodes from one branching to the next."""

    number: int
    parent: int | None
    """Number of the parent node; None for the root."""
    first: int
    """Number of the node's first turn in the episode."""
    turns: tuple[Turn, ...]
    leaves: tuple[int, ...]
    """The batch's rows below this node, including the recorded episode's."""
    value: TurnValue
    """Mean reward of the continuations drawn from the node's end; for a leaf, the reward of its row."""
    credit: TurnValue
    """`value` minus the mean reward of the other continuations drawn from the node's first turn; NaN without any."""
    recorded: bool
    """Whether the node belongs to the recorded episode, which was branched."""

    @property
    def places(self) -> str:
        """Its turn numbers as text: `2` or `2 to 4`; "" where it has no turns."""
        last = self.first + len(self.turns) - 1
        return f"{self.first} to {last}" if last > self.first else str(self.first) if self.turns else ""


@dataclass(frozen=True, repr=False, eq=False)
class EpisodeTree(Shown):
    """An episode with continuations drawn from some of its turns, all scored: `Stepper.branch` returns it.

    The value V before a turn is the mean reward of the continuations drawn from it. The recorded episode counts in no
    value, as it may have been chosen for its reward. The worth of the turns between two branchings is V after − V
    before (`credit`).
    """

    leaves: tuple[EpisodeStepper, ...]
    """The episodes: first the recorded one, then the continuations in the turns' order. Each can be opened, and branched."""
    starts: tuple[int, ...]
    """The first turn that was drawn for each leaf; −1 for the recorded one."""
    batch: DataProto
    """The leaves as rows of one `uid`, with the columns of rollout and reward and the tree's `nodes`."""

    @classmethod
    def of(
        cls, recorded: EpisodeStepper, drawn: Mapping[int, Sequence[EpisodeStepper]], batch: DataProto
    ) -> EpisodeTree:
        """Make the tree of an episode and its continuations by turn; `batch` has the scored rows of all, in this order."""
        starts = [(turn, leaf) for turn in sorted(drawn) for leaf in drawn[turn]]
        leaves, numbers = (recorded, *(leaf for _, leaf in starts)), (-1, *(turn for turn, _ in starts))
        tokens = torch.tensor([0, *(recorded.turns[turn].first for turn, _ in starts)])
        lengths = torch.tensor([len(only_sequence(leaf.outputs).response_ids) for leaf in leaves])
        root = torch.zeros(len(leaves), dtype=torch.long)
        nodes = node_numbers(root, tokens, lengths, root)
        wide = torch.zeros(len(leaves), batch["responses"].shape[1], dtype=torch.long)
        wide[:, : nodes.shape[1]] = nodes
        return cls(leaves, numbers, batch.with_columns({"nodes": wide}))

    @property
    def points(self) -> tuple[int, ...]:
        """The turns from which continuations were drawn."""
        return tuple(sorted({one for one in self.starts if one >= 0}))

    def value(self, turn: int) -> TurnValue:
        """Return V before turn `turn`: the mean reward of its continuations. Raises `PipelineError` for a turn without
        any."""
        if turn not in self.points:
            expected = f"one of turns {', '.join(map(str, self.points))}"
            do = f"branch there, too: turns={sorted({*self.points, turn})}" if isinstance(turn, int) else None
            what = "this tree of continuations was not branched at the turn"
            raise PipelineError(what, expected=expected, found=describe(turn), do=do)
        return TurnValue.of(self._rewards(self._drawn(turn)))

    @property
    def nodes(self) -> tuple[TreeNode, ...]:
        """All nodes, each before its descendants: the shared turns, then the drawn continuations and the recorded
        turns."""
        return tuple(self._nodes())

    def credit(self) -> Any:
        """Make a DataFrame of what the recorded episode's turns were worth, with a line for each stretch between
        branchings.

        `before` and `after` are values with their standard errors; after the last turn it is the recorded reward, of
        error 0. `advantage` is their difference, `error` its standard error, `n` how many continuations the value
        before is of.
        """
        return shows(self, "credit")

    def to_pandas(self) -> Any:
        """Make a DataFrame with a line for each node: parent, turns, leaves, value and credit with their standard
        errors."""
        return shows(self, "frame")

    # --- inside ---------------------------------------------------------------------------

    def _drawn(self, turn: int) -> list[int]:
        return [row for row, start in enumerate(self.starts) if start == turn]

    def _rewards(self, rows: Sequence[int]) -> list[float]:
        return [float(self.batch["reward"][row]) for row in rows if self.batch["scored"][row]]

    def _recorded(self) -> TurnValue:
        rewards = self._rewards([0])
        return TurnValue(rewards[0], 0.0, 1) if rewards else TurnValue(math.nan, math.nan, 0)

    def _nodes(self) -> Iterator[TreeNode]:
        recorded, points = self.leaves[0].turns, self.points
        below = [row for row in range(len(self.leaves))]
        nothing = TurnValue(math.nan, math.nan, 0)
        trunk, number = 0, 0
        yield TreeNode(0, None, 0, recorded[: points[0]], tuple(below), self.value(points[0]), nothing, True)
        for point, until in zip(points, (*points[1:], None), strict=True):
            drawn, before = self._drawn(point), self.value(point)
            for row in drawn:
                number += 1
                rewards = self._rewards([row])
                value = TurnValue(rewards[0], 0.0, 1) if rewards else nothing
                others = TurnValue.of(self._rewards([one for one in drawn if one != row]))
                turns = self.leaves[row].turns[point:]
                yield TreeNode(number, trunk, point, turns, (row,), value, value.minus(others), False)
            number += 1
            value = self._recorded() if until is None else self.value(until)
            below = [0, *(row for row in below if self.starts[row] > point)]
            yield TreeNode(number, trunk, point, recorded[point:until], tuple(below), value, value.minus(before), True)
            trunk = number
