"""One episode, turn by turn: look at it, go back, write a turn by hand, and let it run on."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from workbench.agents.episode import Episode, Transcript
from workbench.agents.loop import AgentLoopBase
from workbench.agents.protocol import AgentLoopOutput, FunctionCall, ToolCall, Turn
from workbench.agents.tool_agent import AgentState, EpisodeState, ToolAgent
from workbench.base import runtime
from workbench.base.config import require
from workbench.base.errors import PipelineError, SettingError, describe, first_line
from workbench.base.shown import Shown
from workbench.dataproto.core import DataProto
from workbench.engines.protocol import Sample

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
    needed and get the earlier calls again, so that their state fits; the transcript keeps the earlier answers.

    Args:
        loop: the row's `ToolAgent`; other loops have no turns to step and raise `SettingError`.
        episode: the row's `Episode`: its sampler and seeds.
        sampling: `SamplingSettings` as a dict.
        row: the row's object columns.
        recorded: the episode as it was sampled; None: it has not begun.
        row_number: the row's number in the rollout.
        batch_of: function from outputs to a batch of a row for each, with the rollout's columns.
        log_probs: function (context, ids) → the policy's log-probs, in nats, of ids that were written by hand.
        lent: returns a context manager inside which the engine has the weights that this episode is sampled with.
    """

    def __init__(
        self,
        loop: AgentLoopBase,
        episode: Episode,
        sampling: Mapping[str, Any],
        row: Mapping[str, Any],
        recorded: AgentLoopOutput | None = None,
        *,
        row_number: int,
        batch_of: Callable[[Sequence[AgentLoopOutput]], DataProto],
        log_probs: Callable[[Sequence[int], Sequence[int]], Sequence[float]],
        lent: Callable[[], AbstractContextManager[None]],
    ) -> None:
        if not isinstance(loop, ToolAgent):
            what = f"the agent loop of row {row_number} cannot be stepped turn by turn"
            do = "look at the whole transcript: views.transcript(batch, row)"
            raise SettingError(what, expected="a ToolAgent, or a subclass of it", found=loop, do=do)
        self.row = row_number
        """The row's number in the rollout."""
        self._log_probs, self._lent = log_probs, lent
        self.batch_of = batch_of
        """Function from `AgentLoopOutput`s to a batch with a row of the rollout's columns for each."""
        self._openings = itertools.count(1)
        self._loop = loop.bound(episode)
        self._now, self._fits = self._loop.start(sampling, **row), True
        self._output: AgentLoopOutput | None = recorded
        if recorded is not None:
            said = replace(self._now.transcript, prompt_ids=recorded.prompt_ids, reason=recorded.finish_reason)
            said.ids, said.mask = list(recorded.response_ids), list(recorded.response_mask)
            said.log_probs, said.turns = list(recorded.response_logprobs), list(recorded.turns)
            self._now, self._fits = self._at(said), False
            self._now.state = AgentState.TERMINATED
            episode.versions = [recorded.version] * said.count("assistant")

    # --- the episode so far ---------------------------------------------------------------

    @property
    def uid(self) -> Any:
        """The `uid` of the episode's prompt."""
        return self._loop.episode.uid

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The turns of the episode so far."""
        return tuple(self._now.transcript.turns)

    @property
    def next_role(self) -> str | None:
        """Whose turn it is: `assistant`, `tool`, `user`; None when the episode is over."""
        return _WHO.get(self._now.state)

    @property
    def asked(self) -> tuple[FunctionCall, ...]:
        """The tool calls that are run next; empty unless it is the tools' turn."""
        return tuple(self._loop.wanted(self._now)) if self.next_role == "tool" else ()

    @property
    def output(self) -> AgentLoopOutput:
        """The episode so far, as an `AgentLoopOutput`: ids, mask, log-probs, turns."""
        return self._output or self._now.transcript.output(self._loop.episode)

    @property
    def tokenizer(self) -> Any:
        """The sampler's tokenizer."""
        return self._loop.tokenizer

    @property
    def batch(self) -> DataProto:
        """The episode as a batch of one row with the rollout's columns: `pipeline["reward"](e.batch)` scores it."""
        return self.batch_of([self.output])

    # --- forwards -------------------------------------------------------------------------

    def next(self, attempt: int = 0, **sampling: Any) -> EpisodeStepper:
        """Go one turn further: sample the model's turn, run its tool calls, or ask the simulated user.

        Args:
            attempt: number of the try at the model's turn; another number is another seed.
            sampling: sampling settings for this turn of the model: `temperature=0.2`, `max_tokens=100`.

        Raises `PipelineError` when the episode is over, `SettingError` for arguments when it is not the model's turn.
        """
        self._expect()
        require(isinstance(attempt, int) and attempt >= 0, "attempt", expected="a whole number ≥ 0", found=attempt)
        if (attempt or sampling) and self.next_role != "assistant":
            what = "attempt and sampling settings are for the model's turns only"
            raise SettingError(what, found=f"the {self.next_role}'s turn", do="call next() without arguments")
        self._loop.episode.attempt = attempt
        whole, self._now.sampling = self._now.sampling, {**self._now.sampling, **sampling}
        try:
            self._do(self._turn, samples=self.next_role == "assistant")
        finally:
            self._loop.episode.attempt, self._now.sampling = 0, whole
        return self

    def run(self) -> EpisodeStepper:
        """Run the episode to its end."""
        while self.next_role is not None:
            self.next()
        return self

    def say(self, text: str | Sequence[str], *, end: bool = True) -> EpisodeStepper:
        """Write the next turn by hand: the model's words, a tool's answer or the user's; nothing is sampled or called.

        The model's words have the policy's log-probs, and are trained on. A tool's or user's text is not cut by any limit;
        where the response has no room for it the episode is over, as in a rollout.

        Args:
            text: the turn; where several calls were made, a list with an answer to each of `asked`.
            end: append the end-of-sequence token to the model's words; False: the model continues from there.

        Raises `PipelineError` when the episode is over; `SettingError` for words that do not fit into the response, or a
        wrong number of texts.
        """
        self._expect()
        texts = [text] if isinstance(text, str) or not isinstance(text, Sequence) else list(text)
        needed = len(self.asked) or 1
        if len(texts) != needed or not all(isinstance(one, str) for one in texts):
            expected = f"{needed} texts, one for each call in .asked" if needed > 1 else "a text"
            raise SettingError(f"words for the {self.next_role}'s turn", expected=expected, found=describe(text))
        said = self._by_hand(texts[0], end) if self.next_role == "assistant" else None
        self._do(lambda: self._put(texts, said, end), samples=said is not None and not end)
        return self

    async def _put(self, texts: Sequence[str], said: Sample | None, end: bool) -> None:
        """Make these texts the next turn; `said` are the model's words as tokens, where it is the model's turn."""
        if self._now.state is AgentState.PENDING:
            await self._loop.advance(self._now)
        if self.next_role is None:  # its user could not start
            pass
        elif said is not None:
            await self._opened(always=self._now.user is not None)
            if end:
                self._loop.episode.versions.append(said.version)
            whole = said if end else await self._continued(said)
            self._now.state = await self._loop.spoken(self._now, whole, edited=True)
        else:
            self._now.state = self._answered(texts)
            self._now.transcript.note(edited=True)
        await self._ended()

    # --- backwards ------------------------------------------------------------------------

    def back(self, to: int | None = None) -> EpisodeStepper:
        """Go back to the place before turn `to` (None: the last turn). Raises `PipelineError` if there is no such turn."""
        count = len(self.turns)
        to = count - 1 if to is None else to
        if to == count and self.next_role is not None:
            return self
        if not isinstance(to, int) or not 0 <= to < count:
            known = f"one of turns 0 to {count - 1}" if count else "an episode with at least one turn"
            found = f"turn {to!r}" if count else "no turns"
            raise PipelineError("no such turn to go back to in this episode", expected=known, found=found)
        self._now, self._output, self._fits = self._at(self._now.transcript.first(to)), None, False
        return self

    def replace(self, turn: int, text: str | Sequence[str], *, end: bool = True) -> EpisodeStepper:
        """Go back to turn `turn` and write it by hand (see `say`); later turns are dropped, `run` continues from there.

        If a simulated user's turn is replaced, the score that came with it is kept. If `say` raises, nothing changes.
        """
        kept = self._now, self._output, self._fits
        said = self.turns
        self.back(turn)
        try:
            self.say(text, end=end)
        except SettingError:
            self._now, self._output, self._fits = kept
            raise
        if said[turn:] and said[turn].role == "user":
            turns, scored = self._now.transcript.turns, said[turn - 1]
            turns[turn - 1] = replace(turns[turn - 1], score=scored.score, extra=scored.extra)
        return self

    def fork(self) -> EpisodeStepper:
        """A second stepper at the same place, with tools and a simulated user of its own."""
        twin = copy.copy(self)
        twin._loop = self._loop.bound(replace(self._loop.episode, versions=list(self._loop.episode.versions)))
        kept: dict[str, Any] = {"transcript": self._now.transcript.copy(), "errors": list(self._now.errors)}
        tools, user = twin._loop.opened(self._now.row)
        twin._now = replace(self._now, **kept, tools=tools, user=user)
        twin._fits = False
        return twin

    def branch(self, turn: int | None = None, n: int = 8) -> tuple[EpisodeStepper, ...]:
        """Draw `n` continuations from turn `turn` (None: the next one) to the episode's end, all at once.

        Turn `turn` is the first that is drawn again; those before are shared. Every continuation has tools and a simulated
        user of its own, brought to that place as after `back`, and seeds of its own, the same each time. This stepper stays
        where it is. Returns the continuations, as steppers. Raises `PipelineError` if there is no such turn.
        """
        require(isinstance(n, int) and n >= 1, "n", expected="a whole number ≥ 1", found=n)
        start = self.fork().back(len(self.turns) if turn is None else turn)
        made = [start.fork() for _ in range(n)]
        for number, one in enumerate(made):
            one._loop.episode.branches += ((start._now.transcript.count("assistant"), number),)
        with self._lent():
            runtime.run_all(EpisodeStepper.finished, made)
        return tuple(made)

    async def finished(self) -> AgentLoopOutput:
        """`run` for many at once: await the episode's end; returns its output. Released where it is cancelled or breaks."""
        try:
            while self.next_role is not None:
                self._counted()
                await self._turn()
        except BaseException:
            await self._loop.close(self._now)
            raise
        return self.output

    def close(self) -> None:
        """Release the tools and the simulated user, as at the end of an episode. Later steps make them anew."""
        runtime.run(self._loop.close(self._now))
        self._fits = False

    # --- inside ---------------------------------------------------------------------------

    def _at(self, said: Transcript) -> EpisodeState:
        """The state after exactly these turns, with the present tools and user."""
        state = replace(self._now, transcript=said, state=AgentState.GENERATING, calls=[], errors=[])
        if said.turns and said.turns[-1].role == "assistant":
            last = said.turns[-1]
            state.calls = self._loop.parsed(state, said.ids[last.first : last.last + 1])
            unasked = AgentState.INTERACTING if state.user is not None else AgentState.TERMINATED
            state.state = AgentState.PROCESSING_TOOLS if state.calls else unasked
        return state

    def _expect(self) -> None:
        if self.next_role is None:
            found = f"finish_reason {self._now.transcript.reason!r} after {len(self.turns)} turns"
            raise PipelineError("this episode is over", found=found, do="go back by back(to=…) or replace(turn, text)")

    def _do(self, work: Callable[[], Any], samples: bool) -> None:
        self._counted()
        kept = self._now.transcript.copy()
        try:
            with self._lent() if samples else nullcontext():
                runtime.run(work())
        except BaseException:  # interrupted half-way: as if the turn had not begun
            self._now, self._output, self._fits = self._at(kept), None, False
            raise

    def _counted(self) -> None:
        """Tell the episode how many turns it has, before the next."""
        episode = self._loop.episode
        episode.turn = self._now.transcript.count("assistant")
        episode.versions = episode.versions[: episode.turn]
        self._output = None

    async def _turn(self) -> None:
        count = len(self.turns)
        while len(self.turns) == count and self.next_role is not None:
            await self._opened(always=self._now.user is not None or self.next_role == "tool")
            if self.next_role is not None:
                await self._loop.advance(self._now)
        await self._ended()

    async def _ended(self) -> None:
        if self._now.state is AgentState.TERMINATED:
            await self._opened(always=True)
            self._now.state = AgentState.TERMINATED
            self._output = await self._loop.finish(self._now)
            self._fits = False

    async def _opened(self, always: bool) -> None:
        """Open tools and user again where their state does not fit the transcript."""
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
        """Ask tools and user what they were asked before, except for answers that were written by hand."""
        now, turns = self._now, self._now.transcript.turns
        for count, (turn, answer) in enumerate(itertools.zip_longest(turns, turns[1:]), 1):
            if turn.role != "assistant" or (answer is not None and answer.edited):
                continue
            for call in (call for call in turn.calls if call.ran):
                await now.tools.call(FunctionCall(call.name, call.arguments))
            replied = turn.score is not None or (answer is not None and answer.role == "user")
            if not replied or now.user is None:
                continue
            try:
                await now.user.ask(self._loop.chat(now, count))
            except Exception as error:  # noqa: BLE001 - a row's user, not the notebook
                now.errors.append(f"asked again: {first_line(error)}")

    def _answered(self, texts: Sequence[str]) -> AgentState:
        if self.next_role == "user":
            return self._loop.replied(self._now, texts[0])
        pairs = zip(self.asked, texts, strict=True)
        records = [ToolCall(call.name, call.arguments, result=text) for call, text in pairs]
        return self._loop.answered(self._now, records)

    def _by_hand(self, text: str, end: bool) -> Sample:
        said = self._now.transcript
        ids = tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        if not 0 < len(ids) < said.room:
            room, found = f"1 to {said.room - 1} tokens", f"{len(ids)} tokens"
            do = "shorten it, or raise max_tokens"
            raise SettingError("text of the model's turn", expected=room, found=found, do=do)
        ids += (self.tokenizer.eos_token_id,) if end else ()
        with self._lent():
            log_probs = self._log_probs(said.context, ids)
            return Sample(ids, tuple(log_probs), "stop", self._loop.episode.sampler.version)

    async def _continued(self, said: Sample) -> Sample:
        """The model's turn, continued from its beginning that was written by hand."""
        context, room = self._now.transcript.context, self._now.transcript.room - len(said.ids)
        more = await self._loop.generate((*context, *said.ids), self._now.sampling, max_tokens=room)
        whole = (*said.ids, *more.ids), (*said.log_probs, *more.log_probs)
        return Sample(*whole, more.finish_reason, more.version)


def call_text(call: ToolCall) -> str:
    """A tool call as one line of text: `name(arguments) → status, reward: answer`."""
    reward = f", reward {call.reward:g}" if call.reward is not None else ""
    asked, result = (" ".join(text.split())[:200] for text in (call.arguments, call.result))
    return f"{call.name}({asked}) → {call.status}{reward}: {result}"
