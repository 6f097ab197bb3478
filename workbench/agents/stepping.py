"""One episode, turn by turn: what happened or what happens next; go back, say a turn by hand, run on."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from workbench import background
from workbench.agents.calls import within
from workbench.agents.episode import Episode, Transcript
from workbench.agents.loop import AgentLoopBase
from workbench.agents.protocol import AgentLoopOutput, FunctionCall, ToolCall, Turn
from workbench.agents.tool_agent import AgentState, Standing, ToolAgent
from workbench.config import require
from workbench.dataproto import DataProto
from workbench.engines.protocol import Sample
from workbench.errors import PipelineError, SettingError, describe, first_line, message

_WHO = {
    AgentState.PENDING: "assistant",
    AgentState.GENERATING: "assistant",
    AgentState.PROCESSING_TOOLS: "tool",
    AgentState.INTERACTING: "user",
}


@dataclass(frozen=True)
class Place:
    """What an episode's stepper needs of the rollout that it belongs to."""

    row: int
    """Of the rollout's rows."""
    batch_of: Callable[[AgentLoopOutput], DataProto]
    """A batch of the one row, with the rollout's columns."""
    log_probs: Callable[[Sequence[int], Sequence[int]], Sequence[float]]
    """(context, ids) → in nats, what the policy gives to ids that were written by hand."""
    lent: Callable[[], AbstractContextManager[None]]
    """Inside it the weights are those that this episode is sampled with."""


class EpisodeStepper:
    """One row's episode. Methods return it, so that calls chain; a cell that ends in it shows the transcript.

    `s.episode(row)` gives one: after the rollout the episode that was sampled, standing at its end, before it the episode that
    will be, before its first turn. The model's turns come from the seeds that the rollout has for them, so the same episode is
    sampled again unless something was changed.

    After `back` tools and the simulated user are opened anew when they are next needed, and asked what they were asked before,
    so that what they remember fits; the transcript keeps the answers that it has.
    """

    def __init__(
        self,
        loop: AgentLoopBase,
        episode: Episode,
        sampling: Mapping[str, Any],
        row: Mapping[str, Any],
        place: Place,
        recorded: AgentLoopOutput | None = None,
    ) -> None:
        if not isinstance(loop, ToolAgent):
            raise SettingError(
                message(
                    f"episode of row {place.row}: its loop cannot be stepped",
                    expected="a ToolAgent, or a subclass of it",
                    found=loop,
                    do="look at it as a whole: views.transcript(batch, row)",
                )
            )
        self._place = place
        self._openings = itertools.count(1)
        self._take(loop, episode)
        self._start = self._loop.start(sampling, **row)
        self._now, self._fits = self._own(self._start), True
        self._output: AgentLoopOutput | None = recorded
        if recorded is not None:
            said = replace(self._now.transcript, prompt_ids=recorded.prompt_ids, reason=recorded.finish_reason)
            said.ids, said.mask = list(recorded.response_ids), list(recorded.response_mask)
            said.log_probs, said.turns = list(recorded.response_logprobs), list(recorded.turns)
            self._now, self._fits = self._at(said), False
            self._now.state = AgentState.TERMINATED
            episode.versions = [recorded.version] * said.count("assistant")

    # --- what there is --------------------------------------------------------------------

    @property
    def row(self) -> int:
        """Which of the rollout's rows."""
        return self._place.row

    @property
    def uid(self) -> Any:
        """Its prompt's."""
        return self._loop.episode.uid

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The transcript so far."""
        return tuple(self._now.transcript.turns)

    @property
    def upcoming(self) -> str | None:
        """Whose turn it is: `assistant`, `tool`, `user`; None when the episode is over."""
        return _WHO.get(self._now.state)

    @property
    def asked(self) -> tuple[FunctionCall, ...]:
        """The calls that are run next."""
        return tuple(self._loop.wanted(self._now)) if self.upcoming == "tool" else ()

    @property
    def output(self) -> AgentLoopOutput:
        """The episode as it stands: ids, mask, log-probs, turns."""
        return self._output or self._now.transcript.output(self._loop.episode)

    @property
    def tokenizer(self) -> Any:
        """The sampler's."""
        return self._loop.tokenizer

    @property
    def batch(self) -> DataProto:
        """The episode as a batch of one row with the rollout's columns: `pipeline["reward"](e.batch)` judges it."""
        return self._place.batch_of(self.output)

    # --- forwards -------------------------------------------------------------------------

    def next(self, attempt: int = 0, **sampling: Any) -> EpisodeStepper:
        """One turn further: the model speaks, its calls are run, or the simulated user answers.

        Of the model's turn another `attempt` is another seed, and `sampling` other settings (`temperature=0.2`, `max_tokens` of
        this turn). Raises `PipelineError` when the episode is over, and `SettingError` for another's turn with such changes.
        """
        self._expect()
        require(isinstance(attempt, int) and attempt >= 0, "attempt", expected="a whole number ≥ 0", found=attempt)
        if (attempt or sampling) and self.upcoming != "assistant":
            raise SettingError(
                message("attempt and sampling are for the model's turns", found=f"{self.upcoming}'s turn")
            )
        self._loop.episode.attempt = attempt
        whole, self._now.sampling = self._now.sampling, {**self._now.sampling, **sampling}
        try:
            self._do(self._turn, samples=self.upcoming == "assistant")
        finally:
            self._loop.episode.attempt, self._now.sampling = 0, whole
        return self

    def run(self) -> EpisodeStepper:
        """Run on to the end."""
        while self.upcoming is not None:
            self.next()
        return self

    def say(self, text: str | Sequence[str], *, end: bool = True) -> EpisodeStepper:
        """The turn that is next is `text`, and nobody is asked: the model's words, a tool's answer, the user's.

        Where several calls were made, a list with an answer for each of `asked`; one turn holds them all. The model's words
        become tokens as the tokenizer writes them and, unless `end=False`, the token that ends an answer: without it the model
        goes on from there. Their log-probs are the policy's, and gradients reach them. A tool's or user's text stands as it is,
        no limit cuts it; where the response has no room for it the episode is over, as in a rollout.

        Raises `PipelineError` when the episode is over; `SettingError` for words that have no room, or a wrong number of texts.
        """
        self._expect()
        texts = [text] if isinstance(text, str) or not isinstance(text, Sequence) else list(text)
        needed = len(self.asked) or 1
        if len(texts) != needed or not all(isinstance(one, str) for one in texts):
            expected = f"{needed} texts, one for each call in .asked" if needed > 1 else "a text"
            raise SettingError(message(f"the {self.upcoming}'s turn", expected=expected, found=describe(text)))
        said = self._in_its_mouth(texts[0], end) if self.upcoming == "assistant" else None

        async def put() -> None:
            if self._now.state is AgentState.PENDING:
                await self._loop.advance(self._now)
            if self.upcoming is None:  # its user could not start
                pass
            elif said is not None:
                await self._opened(always=self._now.interaction is not None)
                if end:
                    self._loop.episode.versions.append(said.version)
                whole = said if end else await self._continued(said)
                self._now.state = await self._loop.spoken(self._now, whole, edited=True)
            else:
                self._now.state = self._answered(texts)
                self._now.transcript.note(edited=True)
            await self._ended()

        self._do(put, samples=said is not None and not end)
        return self

    # --- backwards ------------------------------------------------------------------------

    def back(self, to: int | None = None) -> EpisodeStepper:
        """Stand before turn `to` again (without it: before the last one). Raises `PipelineError` for a turn that there is not."""
        count = len(self.turns)
        to = count - 1 if to is None else to
        if to == count and self.upcoming is not None:
            return self
        if not isinstance(to, int) or not 0 <= to < count:
            known = f"turns 0 to {count - 1}" if count else "a turn that was said"
            found = to if count else "nothing has been said"
            raise PipelineError(message("cannot go back in this episode", expected=known, found=found))
        self._stand(self._now.transcript.first(to))
        return self

    def replace(self, turn: int, text: str | Sequence[str], *, end: bool = True) -> EpisodeStepper:
        """Go back to a turn and say it by hand (see `say`); what came after it is gone, `run` goes on from there.

        A score that the user gave along with words of its own stays. Where `say` refuses the text nothing has changed.
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
            turns, judged = self._now.transcript.turns, said[turn - 1]
            turns[turn - 1] = replace(turns[turn - 1], score=judged.score, extra=judged.extra)
        return self

    def fork(self) -> EpisodeStepper:
        """Another one at the same place, with tools and a user of its own."""
        twin = copy.copy(self)
        twin._take(self._loop, replace(self._loop.episode, versions=list(self._loop.episode.versions)))
        twin._now = twin._own(self._now)
        twin._now.instance, twin._fits = None, False
        return twin

    def close(self) -> None:
        """Let tools and the simulated user go; the end of an episode does. Stepping on opens them again."""
        background.run(self._loop.close(self._now))
        self._fits = False

    # --- inside ---------------------------------------------------------------------------

    def _take(self, loop: ToolAgent, episode: Episode) -> None:
        self._loop = loop.bound(episode)

    def _own(self, standing: Standing) -> Standing:
        kept: dict[str, Any] = {name: list(getattr(standing, name)) for name in ("messages", "calls", "errors")}
        return replace(standing, **kept, transcript=standing.transcript.copy(), tools=self._loop.opened(standing.row))

    def _stand(self, said: Transcript) -> None:
        """Stand where exactly these turns have been said; tools and user are let go of when they are opened anew."""
        before, self._now = self._now, self._at(said)
        self._now.tools, self._now.instance = before.tools, before.instance
        self._output, self._fits = None, False

    def _at(self, said: Transcript) -> Standing:
        """The episode where exactly these turns have been said."""
        standing = self._own(replace(self._start, transcript=said))
        standing.state = AgentState.GENERATING
        for turn in said.turns:
            standing.messages += self._messages(said, turn)
        if said.turns and said.turns[-1].role == "assistant":
            last = said.turns[-1]
            standing.calls = self._loop.parsed(standing, said.ids[last.first : last.last + 1])
            user = AgentState.INTERACTING if standing.interaction is not None else AgentState.TERMINATED
            standing.state = AgentState.PROCESSING_TOOLS if standing.calls else user
        return standing

    def _messages(self, said: Transcript, turn: Turn) -> list[dict[str, Any]]:
        if turn.role != "tool":
            return [{"role": turn.role, "content": turn.text}]
        asking = said.turns[said.turns.index(turn) - 1]
        return self._loop.messages([call for call in asking.calls if call.ran])

    def _expect(self) -> None:
        if self.upcoming is None:
            why = self._now.transcript.reason
            raise PipelineError(
                message("this episode is over", found=f"{why}, after {len(self.turns)} turns", do="back(to=…), or replace(turn, text)")
            )  # fmt: skip

    def _do(self, work: Callable[[], Any], samples: bool) -> None:
        episode, said = self._loop.episode, self._now.transcript
        episode.turn = said.count("assistant")
        episode.versions = episode.versions[: episode.turn]
        self._output = None
        kept = said.copy()
        try:
            with self._place.lent() if samples else nullcontext():
                background.run(work())
        except BaseException:
            # interrupted half-way: as if nobody had been asked
            self._stand(kept)
            raise

    async def _turn(self) -> None:
        count = len(self.turns)
        while len(self.turns) == count and self.upcoming is not None:
            await self._opened(always=self._now.interaction is not None or self.upcoming == "tool")
            if self.upcoming is not None:
                await self._loop.advance(self._now)
        await self._ended()

    async def _ended(self) -> None:
        if self._now.state is AgentState.TERMINATED:
            await self._opened(always=True)
            self._now.state = AgentState.TERMINATED
            self._output = await self._loop.finish(self._now)
            self._fits = False

    async def _opened(self, always: bool) -> None:
        """Tools and user that know what was said, opened anew where they do not."""
        if self._fits or not always:
            return
        loop, now = self._loop, self._now
        await loop.close(now)
        loop.episode.opening = next(self._openings)
        now.tools = loop.opened(now.row)
        if now.interaction is not None and await loop.begin(now) is AgentState.TERMINATED:
            now.state = AgentState.TERMINATED
        await self._told()
        self._fits = True

    async def _told(self) -> None:
        """Ask tools and user what they were asked before; answers that were written by hand were asked of nobody."""
        now, turns = self._now, self._now.transcript.turns
        heard = len(self._start.messages)
        for place, turn in enumerate(turns):
            answer = turns[place + 1] if place + 1 < len(turns) else None
            heard += len(self._messages(now.transcript, turn))
            if turn.role != "assistant" or (answer is not None and answer.edited):
                continue
            for call in (call for call in turn.calls if call.ran):
                await now.tools.call(FunctionCall(call.name, call.arguments))
            judged = turn.score is not None or (answer is not None and answer.role == "user")
            if judged and now.interaction is not None and now.instance is not None:
                chat = [dict(one) for one in now.messages[:heard]]
                again = now.interaction.generate_response(now.instance, chat, **now.given)
                try:
                    await within(again, self._loop.seconds_per_call)
                except Exception as error:  # noqa: BLE001 - a row's user, not the notebook
                    now.errors.append(f"asked again: {first_line(error)}")

    def _answered(self, texts: Sequence[str]) -> AgentState:
        if self.upcoming == "user":
            return self._loop.replied(self._now, texts[0])
        records = [
            ToolCall(call.name, call.arguments, result=text) for call, text in zip(self.asked, texts, strict=True)
        ]
        return self._loop.answered(self._now, records)

    def _in_its_mouth(self, text: str, end: bool) -> Sample:
        said = self._now.transcript
        ids = tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        if not 0 < len(ids) < said.room:
            room = f"1 to {said.room - 1} tokens"
            raise SettingError(
                message("the model's turn", expected=room, found=len(ids), do="shorten it, or raise max_tokens")
            )
        ids += (self.tokenizer.eos_token_id,) if end else ()
        with self._place.lent():
            log_probs = self._place.log_probs(said.context, ids)
            return Sample(ids, tuple(log_probs), "stop", self._loop.episode.sampler.version)

    async def _continued(self, said: Sample) -> Sample:
        """What the model makes of the beginning of its turn."""
        context, room = self._now.transcript.context, self._now.transcript.room - len(said.ids)
        more = await self._loop.generate((*context, *said.ids), self._now.sampling, max_tokens=room)
        whole = (*said.ids, *more.ids), (*said.log_probs, *more.log_probs)
        return Sample(*whole, more.finish_reason, more.version)

    # --- looking --------------------------------------------------------------------------

    def __repr__(self) -> str:
        from workbench.views.transcripts import episode_text

        return episode_text(self)

    def _repr_html_(self) -> str:
        from workbench.views.transcripts import episode_html

        return episode_html(self)

    def _ipython_display_(self) -> None:
        from workbench.widgets.episodes import EpisodeFace
        from workbench.widgets.layer import show

        show(self, lambda: EpisodeFace(self))


def call_text(call: ToolCall) -> str:
    """`name(arguments) → status, reward: answer`, in a line."""
    reward = f", reward {call.reward:g}" if call.reward is not None else ""
    asked, result = (" ".join(text.split())[:200] for text in (call.arguments, call.result))
    return f"{call.name}({asked}) → {call.status}{reward}: {result}"
