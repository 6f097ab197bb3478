"""The tool agent: the model speaks, its calls are run, it reads the answers and speaks again; a simulated user may speak, too."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from inspect import isawaitable
from typing import Any

from workbench.agents import react
from workbench.agents.calls import END_SECONDS, OpenTools, Toolbox, within
from workbench.agents.checks import checked_interactions, checked_parser, checked_tools
from workbench.agents.episode import Transcript
from workbench.agents.interactions import checked_reply, chosen_interaction
from workbench.agents.loop import AgentLoopBase, register
from workbench.agents.protocol import AgentLoopOutput, FunctionCall, Interaction, Tool, ToolCall, ToolParser
from workbench.agents.tokens import TurnTokens
from workbench.config import require
from workbench.engines.protocol import Sample, Sampler
from workbench.errors import DataError, describe, first_line, message

_LIMITS: Mapping[str, float | None] = {
    **{"max_assistant_turns": None, "max_user_turns": None, "max_parallel_calls": 1, "max_tokens_per_turn": None},
    **{"seconds_per_call": 30.0, "max_tool_response_length": 256},
}
"""What a loop is limited to unless it is told; its repr shows the others."""


class AgentState(StrEnum):
    """Where an episode stands; verl's names."""

    PENDING = "pending"
    GENERATING = "generating"
    PROCESSING_TOOLS = "processing_tools"
    INTERACTING = "interacting"
    TERMINATED = "terminated"


@dataclass
class Standing:
    """An episode of the tool agent between two of its states: what `ToolAgent.advance` moves on."""

    row: Mapping[str, Any]
    sampling: Mapping[str, Any]
    messages: list[dict[str, Any]]
    """The chat so far, as an interaction reads it."""
    transcript: Transcript
    tools: OpenTools
    state: AgentState = AgentState.PENDING
    calls: list[FunctionCall] = field(default_factory=list)
    """What the last turn asks for and has not been run."""
    interaction: Interaction | None = None
    instance: str | None = None
    """The interaction's, once it has started."""
    given: dict[str, Any] = field(default_factory=dict)
    """The row's `interaction_kwargs`, less the name."""
    errors: list[str] = field(default_factory=list)


@register("tool_agent")
class ToolAgent(AgentLoopBase):
    """verl's tool agent loop, from objects: tools, a parser of calls, simulated users.

    - `format`: `function_calling` (the chat template shows the tools, `parser` finds the calls, answers have role `tool`)
      or `react` (the tools are told in the first message, calls are `Action` lines, answers are user messages that begin
      `Observation: `). `tool_role` changes the role of answers, for templates that have no `tool`.
    - An episode ends when a turn makes no call and no user answers it, when the response has no room (`max_tokens` of the
      sampling is for the whole response, the others' tokens included; `max_tokens_per_turn` bounds a single turn), and at
      `max_assistant_turns` or `max_user_turns` (tool answers count as user turns): calls of the turn that reaches one are
      not run, but a simulated user still gives it a score.
    - Of the calls in one turn the first `max_parallel_calls` are run, at once; others stand in the transcript as ignored.
    - A tool has `seconds_per_call`; of its text `max_tool_response_length` characters are kept, and
      `tool_response_truncate_side` is the side that is lost (see `calls.truncate`).
    - A row's `extra_info.interaction_kwargs` chooses its user by `name` (which may be missing where there is one only) and
      is given to it. A user that fails ends the episode as `abort`, and is finalised like any other; no reward judges
      such an episode.

    `parser` may be a name (`tool_parser`), `tools` and `interactions` a mapping. Raises `SettingError` at construction for
    settings, tools, a parser or users that cannot work, and in `prepare` for a chat template that gives no delta.
    """

    def __init__(
        self,
        tools: Sequence[Tool] | Mapping[str, Tool] = (),
        *,
        parser: ToolParser | str | None = None,
        format: str = "function_calling",
        interactions: Sequence[Interaction] | Mapping[str, Interaction] = (),
        max_assistant_turns: int | None = None,
        max_user_turns: int | None = None,
        max_parallel_calls: int = 1,
        max_tokens_per_turn: int | None = None,
        seconds_per_call: float = 30.0,
        max_tool_response_length: int = 256,
        tool_response_truncate_side: str = "middle",
        tool_role: str | None = None,
        name: str = "tool_agent",
    ) -> None:
        require(format in ("function_calling", "react"), "format", expected="function_calling or react", found=format)
        listed = checked_tools(tools)
        self.name = name
        self.format = format
        self.max_assistant_turns, self.max_user_turns = max_assistant_turns, max_user_turns
        self.max_parallel_calls, self.max_tokens_per_turn = max_parallel_calls, max_tokens_per_turn
        self.seconds_per_call = seconds_per_call
        self.max_tool_response_length = max_tool_response_length
        self.tool_response_truncate_side = tool_response_truncate_side
        for key in ("max_assistant_turns", "max_user_turns", "max_parallel_calls", "max_tokens_per_turn"):
            value = getattr(self, key)
            require(value is None or value >= 1, key, expected="≥ 1, or None", found=value)
        self.tool_role = tool_role or ("user" if format == "react" else "tool")
        self._parser = checked_parser(parser, format=format, tools=bool(listed))
        self._box = Toolbox(
            listed,
            seconds_per_call=seconds_per_call,
            max_tool_response_length=max_tool_response_length,
            truncate_side=tool_response_truncate_side,
        )
        self._interactions = checked_interactions(interactions)
        self._tokens: tuple[Any, TurnTokens] | None = None

    def describe(self) -> dict[str, Any]:
        """Limits, the tools' schemas, the names of parser and interactions."""
        return {
            **super().describe(),
            "tools": self._box.schemas,
            "parser": type(self._parser).__name__ if self._parser else None,
            "interactions": sorted(self._interactions),
        }

    def __repr__(self) -> str:
        parts = [f"{self.name}: {', '.join((*self._box.tools, *self._interactions)) or 'no tools'}"]
        parts += [f"{type(self._parser).__name__} ({self.format})"] if self._parser else []
        limits = {name: getattr(self, name) for name in _LIMITS}
        parts += [f"{name}={value}" for name, value in limits.items() if value != _LIMITS[name]]
        return f"{type(self).__name__}({', '.join(parts)})"

    @property
    def lacks(self) -> str:
        """Tools, where it has no user either."""
        return "" if self._box.tools or self._interactions else "no tools"

    def prepare(self, sampler: Sampler) -> None:
        """Raises `SettingError`, naming the chat template, where turns cannot be appended with it."""
        if self._tokens is not None and self._tokens[0] is sampler.tokenizer:
            return
        roles = [*([self.tool_role] if self._box.tools else []), *(["user"] if self._interactions else [])]
        shown = self._box.schemas if self.format == "function_calling" else []
        switches = getattr(sampler, "template_switches", {})
        made = TurnTokens(sampler.tokenizer, tools=shown, roles=list(dict.fromkeys(roles)), **switches)
        self._tokens = (sampler.tokenizer, made)

    @property
    def tokens(self) -> TurnTokens:
        """How turns become tokens, by the sampler's template."""
        if self._tokens is None:
            self.prepare(self.episode.sampler)
        assert self._tokens is not None
        return self._tokens[1]

    # --- one episode ---------------------------------------------------------------------------

    async def run(self, sampling_params: Mapping[str, Any], **row: Any) -> AgentLoopOutput:
        """Reads `raw_prompt`, and of `extra_info` `interaction_kwargs` and `tools_kwargs`."""
        standing = self.start(sampling_params, **row)
        try:
            while standing.state is not AgentState.TERMINATED:
                await self.advance(standing)
                if self.episode.progress is not None:
                    self.episode.progress(standing.transcript)
        except BaseException:
            await self.close(standing)
            raise
        return await self.finish(standing)

    def start(self, sampling_params: Mapping[str, Any], **row: Any) -> Standing:
        """The episode before its first turn. Raises `DataError` for an interaction that there is not."""
        messages = [dict(one) for one in _chat(row["raw_prompt"])]
        if self.format == "react" and self._box.tools:
            messages[0]["content"] = react.instructions(self._box.schemas) + str(messages[0]["content"])
        sampling = dict(sampling_params)
        if self.format == "react" and self._box.tools:
            sampling["stop"] = tuple(dict.fromkeys((*sampling.get("stop", ()), react.STOP)))
        place = f"row {self.episode.row} (uid {self.episode.uid})"
        interaction, given = chosen_interaction(self._interactions, row, place)
        return Standing(
            row=row,
            sampling=sampling,
            messages=messages,
            transcript=Transcript(self.tokens.prompt(messages), int(sampling["max_tokens"])),
            tools=self.opened(row),
            interaction=interaction,
            given=given,
        )

    def opened(self, row: Mapping[str, Any]) -> OpenTools:
        """The episode's own tools; each is made when it is first called."""
        return self._box.opened(self.episode.name, row)

    async def advance(self, standing: Standing) -> AgentState:
        """One state further; the new one is in `standing.state`, too."""
        doing = {
            AgentState.PENDING: self.begin,
            AgentState.GENERATING: self._generate,
            AgentState.PROCESSING_TOOLS: self._call,
            AgentState.INTERACTING: self._interact,
        }
        if standing.state in doing:
            standing.state = await doing[standing.state](standing)
        return standing.state

    async def finish(self, standing: Standing) -> AgentLoopOutput:
        """What the episode has become; its tools and its user are let go."""
        rewards = await self.close(standing)
        errors = [*standing.errors, *standing.tools.errors]
        standing.transcript.tool_seconds = standing.tools.seconds
        return standing.transcript.output(self.episode, tool_totals=rewards, errors=errors)

    async def close(self, standing: Standing) -> dict[str, float]:
        """Let tools and user go, also when the episode was cancelled; twice is fine. The tools' rewards of the episode."""
        instance, standing.instance = standing.instance, None
        try:
            return await standing.tools.close()
        finally:
            if standing.interaction is not None and instance is not None:
                try:
                    await within(standing.interaction.finalize_interaction(instance), END_SECONDS)
                except Exception as error:  # noqa: BLE001 - foreign code; the record says it
                    standing.errors.append(f"finalize_interaction: {first_line(error)}")

    async def begin(self, standing: Standing) -> AgentState:
        """The user, where there is one, starts."""
        if standing.interaction is None:
            return AgentState.GENERATING
        # the id is there before its first call, so that what fails or is cancelled half-way is finalised all the same
        standing.instance = self.episode.name
        try:
            started = standing.interaction.start_interaction(standing.instance, **standing.given)
            standing.instance = await within(started, self.seconds_per_call) or standing.instance
        except Exception as error:  # noqa: BLE001 - a row's user, not the run
            return self._broken(standing, f"start_interaction: {first_line(error)}")
        return AgentState.GENERATING

    async def _generate(self, standing: Standing) -> AgentState:
        said = standing.transcript
        longest = min(said.room, self.max_tokens_per_turn or said.room, int(standing.sampling["max_tokens"]))
        sample = await self.generate(said.context, standing.sampling, max_tokens=longest)
        return await self.spoken(standing, sample)

    async def spoken(self, standing: Standing, sample: Sample, *, edited: bool = False) -> AgentState:
        """The model has said this, or is made to (`edited`): what follows from it."""
        said = standing.transcript
        text = self.tokenizer.decode(list(sample.ids), skip_special_tokens=True)
        short = sample.finish_reason == "length"
        said.say(sample, text, cut=f"cut short at {len(sample.ids)} tokens" if short else "")
        if edited:
            said.note(edited=True)
        standing.messages.append({"role": "assistant", "content": text})
        standing.calls = self.parsed(standing, sample.ids)
        said.reason = sample.finish_reason
        if sample.finish_reason == "abort" or said.room <= 0:
            return await self._ended(standing, "abort" if sample.finish_reason == "abort" else "length")
        if self._at_limit(said):
            return await self._ended(standing, "turns" if standing.calls or standing.interaction else None)
        if standing.calls:
            return AgentState.PROCESSING_TOOLS
        return AgentState.INTERACTING if standing.interaction is not None else AgentState.TERMINATED

    async def _call(self, standing: Standing) -> AgentState:
        return self.answered(standing, await _together([standing.tools.call(call) for call in self.wanted(standing)]))

    def wanted(self, standing: Standing) -> list[FunctionCall]:
        """Of what the last turn asks for, what is run."""
        return standing.calls[: self.max_parallel_calls]

    def answered(self, standing: Standing, records: Sequence[ToolCall]) -> AgentState:
        """The calls that were `wanted` have come to this."""
        ignored = [ToolCall(call.name, call.arguments, "ignored") for call in standing.calls[len(records) :]]
        standing.transcript.note(calls=(*records, *ignored))
        standing.calls = []
        cut = "; ".join(f"{one.name}: {one.cut}" for one in records if one.cut)
        return self._heard(standing, "tool", self.messages(records), cut)

    def messages(self, records: Sequence[ToolCall]) -> list[dict[str, Any]]:
        """What is put to the model of calls that were run."""
        prefix = "Observation: " if self.format == "react" else ""
        return [
            {"role": self.tool_role, "content": prefix + one.result, **({"name": one.name} if not prefix else {})}
            for one in records
        ]

    async def _interact(self, standing: Standing) -> AgentState:
        stop, text = await self._judged(standing)
        if standing.state is AgentState.TERMINATED or stop:
            return AgentState.TERMINATED
        return self.replied(standing, text)

    def replied(self, standing: Standing, text: str) -> AgentState:
        """The user has said this."""
        return self._heard(standing, "user", [{"role": "user", "content": text}], "")

    def _heard(self, standing: Standing, role: str, messages: list[dict[str, Any]], cut: str) -> AgentState:
        said = standing.transcript
        last = said.turns[-1]
        ids = self.tokens.delta(messages, said.ids[last.first : last.last + 1])
        standing.messages += messages
        if said.hear(role, "\n".join(str(one["content"]) for one in messages), ids, cut=cut):
            return AgentState.GENERATING
        said.reason = "length"
        return AgentState.TERMINATED

    async def _judged(self, standing: Standing) -> tuple[bool, str]:
        """(stop, feedback) of the simulated user, whose score is noted at the assistant's turn."""
        assert standing.interaction is not None and standing.instance is not None
        name = getattr(standing.interaction, "name", type(standing.interaction).__name__)
        try:
            asked = standing.interaction.generate_response(
                standing.instance, [dict(one) for one in standing.messages], **standing.given
            )
            reply = checked_reply(name, await within(asked, self.seconds_per_call) if isawaitable(asked) else asked)
        except Exception as error:  # noqa: BLE001 - a row's user, not the run
            why = first_line(error, 300).removeprefix("ForeignError: ")
            standing.state = self._broken(standing, f"generate_response: {why}")
            return True, ""
        standing.transcript.note(score=reply.score, extra=reply.extra)
        return reply.stop, reply.text

    async def _ended(self, standing: Standing, reason: str | None) -> AgentState:
        """At a limit: calls are not run, a user still judges, and neither is answered any more."""
        said = standing.transcript
        if reason is not None:
            said.reason = reason
        if standing.calls:
            said.note(calls=tuple(ToolCall(call.name, call.arguments, "not run") for call in standing.calls))
        elif standing.interaction is not None and reason != "abort":
            stop, text = await self._judged(standing)
            if stop and said.reason == "turns":
                said.reason = "stop"
            elif text:
                said.note(cut="; ".join(filter(None, (said.turns[-1].cut, f"the user's answer was left out: {text}"))))
        return AgentState.TERMINATED

    def _broken(self, standing: Standing, why: str) -> AgentState:
        standing.errors.append(why)
        standing.transcript.reason = "abort"
        if standing.transcript.turns:
            standing.transcript.note(error=why)
        return AgentState.TERMINATED

    def _at_limit(self, said: Transcript) -> bool:
        spoken, heard = said.count("assistant"), said.count("tool", "user")
        return (self.max_assistant_turns is not None and spoken >= self.max_assistant_turns) or (
            self.max_user_turns is not None and heard >= self.max_user_turns
        )

    def parsed(self, standing: Standing, ids: Sequence[int]) -> list[FunctionCall]:
        """The calls in what the model wrote."""
        if self._parser is None or not self._box.tools:
            return []
        # special tokens stay: some models write their calls with them; the end of the text is none of the call
        written = list(ids)
        if written and written[-1] == self.tokenizer.eos_token_id:
            written.pop()
        text = self.tokenizer.decode(written, skip_special_tokens=False)
        try:
            return list(self._parser.extract_tool_calls(text, self._box.schemas)[1])
        except Exception as error:  # noqa: BLE001 - what a model wrote is a row's data, whatever it does to a parser
            why = f"the parser failed: {first_line(error)}"
            standing.errors.append(why)
            standing.transcript.note(error=why)
            return []


async def _together(calls: Sequence[Any]) -> list[ToolCall]:
    return list(await asyncio.gather(*calls))


def _chat(prompt: Any) -> list[Mapping[str, Any]]:
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if not isinstance(prompt, Sequence) or not prompt:
        raise DataError(message("raw_prompt", expected="a chat with a message in it", found=describe(prompt)))
    return list(prompt)
