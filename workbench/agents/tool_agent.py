"""The tool agent: an episode of model turns, tool calls with their answers, and replies of a simulated user."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import torch

from workbench.agents.calls import OpenTools, Toolbox, checked_tools, not_run
from workbench.agents.episode import (
    COMPACT_PROMPT,
    RUNNING,
    ChatHistory,
    Past,
    Transcript,
    is_asked,
    mark_asked,
    summaries,
    with_summary,
)
from workbench.agents.formats import parser_of
from workbench.agents.interactions import Conversation, checked_interactions, select_interaction
from workbench.agents.loop import AgentLoopBase, register
from workbench.agents.parsers import STOP, calls_of, checked_parser, instructions, outside_reasoning, tool_parser
from workbench.agents.protocol import (
    AgentLoopOutput,
    FunctionCall,
    Interaction,
    Sequences,
    Tool,
    ToolCall,
    ToolParser,
    Turn,
    call_of,
    pixels_of,
)
from workbench.agents.tokens import TurnTokens
from workbench.base.config import require
from workbench.base.errors import DataError, describe, first_line, unknown
from workbench.datasets.pictures import IMAGES, Picture, text_of
from workbench.engines.protocol import Sample, Sampler, processor_of, switches_of

_TURN_LIMITS = ("max_assistant_turns", "max_user_turns", "max_parallel_calls", "max_tool_calls", "max_tokens_per_turn")


class AgentState(StrEnum):
    """State of a tool agent's episode: what it does next. The names are verl's."""

    PENDING = "pending"
    GENERATING = "generating"
    PROCESSING_TOOLS = "processing_tools"
    INTERACTING = "interacting"
    TERMINATED = "terminated"


@dataclass
class EpisodeState:
    """A tool agent's episode between two steps; `ToolAgent.advance` takes it from one `AgentState` to the next."""

    row: Mapping[str, Any]
    sampling: Mapping[str, Any]
    messages: list[dict[str, Any]]
    """The chat that the present sequence's prompt is made of."""
    transcript: Transcript
    """The present sequence."""
    tools: OpenTools
    user: Conversation | None = None
    """The conversation with the row's simulated user, where it has one."""
    state: AgentState = AgentState.PENDING
    calls: list[FunctionCall] = field(default_factory=list)
    """The tool calls of the last turn that have not been run."""
    errors: list[str] = field(default_factory=list)
    past: list[Past] = field(default_factory=list)
    """The sequences before the present one."""

    @property
    def first(self) -> list[dict[str, Any]]:
        """The chat before the first turn of the episode."""
        return self.past[0].messages if self.past else self.messages

    @property
    def said(self) -> list[Transcript]:
        """The transcripts of all sequences of the episode so far."""
        return [*(one.transcript for one in self.past), self.transcript]

    @property
    def turns(self) -> list[Turn]:
        """The turns of all sequences of the episode so far."""
        return [turn for one in self.said for turn in one.turns]


@register("tool_agent")
class ToolAgent(AgentLoopBase):
    """Agent loop with tools and simulated users, as verl's `tool_agent`, made of objects instead of configuration files.

    An episode ends when a turn makes no call and no user answers it, when the response or the sampler's longest sequence has
    no room, and at the limits of turns and calls (calls of the turn that reaches one are not run, but a simulated user still scores it). A simulated user that fails
    ends the episode as `abort`, and it is not scored.

    With `history="template"`, `compact_at` or sub-agents (`SubAgent`) an episode is several sequences, each a row of the
    batch, the agent's last one behind all others. `max_tokens` limits each; the limits of turns and calls hold for the episode.

    Args:
        tools: a list of tools, or a mapping of names to tools.
        parser: finds the calls in the model's text: an object, or a name (`tool_parser`); None: as the chat template writes
            them (`parser_of`).
        format: `function_calling` (the chat template shows the tools, answers have role `tool`) or `react` (the first message
            describes the tools, calls are `Action` lines, answers are user messages that begin `Observation: `).
        interactions: simulated users, a list or mapping; a row's `extra_info.interaction_kwargs` chooses one by `name`, and
            is passed to it. A single user speaks in every row, and need not be named.
        max_assistant_turns: limit of the model's turns; None: none.
        max_user_turns: limit of tools' and users' turns; None: none.
        max_parallel_calls: how many calls of one turn are run, concurrently; the others are recorded as ignored.
        max_tool_calls: how many calls of a whole episode are run; the turn that calls once more ends it. None: no limit.
        max_tokens_per_turn: limit of one turn; `max_tokens` of the sampling is for the whole response, tool and user tokens
            included.
        seconds_per_call: time limit of a tool's or user's answer, in seconds.
        max_tool_response_length: limit of a tool's text, in characters.
        tool_response_truncate_side: the side that is cut off (see `calls.truncate`).
        tool_role: role of tool answers, for templates that have no `tool`.
        tools_in: `template` shows the tools; or, where it shows none, the `system` message, with the parser's `call_form`.
        history: `append`: what was sampled stays in the context, whatever the template would make of it. `template`: a new
            sequence begins wherever the template, given the conversation so far, writes something else than what the model
            read and wrote (it strips earlier reasoning, say): its prompt is the template's text. The model's turns are put
            to the template as they were written.
        compact_at: number of tokens of prompt and response from which on the model, beside the next message to it, is asked for
            a summary, which ends the sequence and is trained on; the next one begins with the task and the summary. None:
            never. Leave room below the sampler's longest context for that message and the summary.
        compact_prompt: the request for the summary.
        max_sequences: how many sequences an episode may have, sub-agents' aside; at the next it ends as `turns`.
        name: the agent's name, for rows (`agent_name`) and errors.

    Raises `SettingError` at construction for settings, tools, a parser or users that cannot work, and in `prepare` for a
    chat template that does not tell the model of the tools, or with which turns cannot be appended.
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
        max_tool_calls: int | None = None,
        max_tokens_per_turn: int | None = None,
        seconds_per_call: float = 30.0,
        max_tool_response_length: int = 256,
        tool_response_truncate_side: str = "middle",
        tool_role: str | None = None,
        tools_in: str = "template",
        history: str = "append",
        compact_at: int | None = None,
        compact_prompt: str = COMPACT_PROMPT,
        max_sequences: int = 16,
        name: str = "tool_agent",
    ) -> None:
        require(format in ("function_calling", "react"), "format", expected="function_calling or react", found=format)
        listed = checked_tools(tools)
        self.name, self.format, self.tools_in = name, format, tools_in
        self.max_assistant_turns, self.max_user_turns = max_assistant_turns, max_user_turns
        self.max_parallel_calls, self.max_tool_calls = max_parallel_calls, max_tool_calls
        self.max_tokens_per_turn = max_tokens_per_turn
        self.seconds_per_call = seconds_per_call
        self.max_tool_response_length = max_tool_response_length
        self.tool_response_truncate_side = tool_response_truncate_side
        for key in _TURN_LIMITS:
            value = getattr(self, key)
            require(value is None or value >= 1, key, expected="≥ 1, or None", found=value)
        self.tool_role = tool_role or ("user" if format == "react" else "tool")
        self._history = ChatHistory(history, compact_at, compact_prompt, max_sequences)
        self._parser = checked_parser(parser, format=format, tools=bool(listed))
        self._by_template = bool(listed) and self._parser is None
        self._box = Toolbox(
            listed,
            seconds_per_call=seconds_per_call,
            max_tool_response_length=max_tool_response_length,
            truncate_side=tool_response_truncate_side,
        )
        self._interactions = checked_interactions(interactions)
        self._tokenizer: Any = None
        self._tokens: dict[tuple[str, ...], TurnTokens] = {}

    def describe(self) -> dict[str, Any]:
        """Return the agent's settings by name: limits, the tools' schemas, the names of parser and interactions."""
        parser = type(self._parser).__name__ if self._parser else None
        parts = {"tools": self._box.schemas, "parser": parser, "interactions": sorted(self._interactions)}
        settings = {**super().describe(), **parts, **self._history.settings}
        if self.sub_agents:
            settings["sub_agents"] = {name: one.describe() for name, one in self.sub_agents.items()}
        usual = {"max_tool_calls": None, "tools_in": "template"}  # runs of before there were these go on
        return {name: value for name, value in settings.items() if name not in usual or value != usual[name]}

    def __repr__(self) -> str:
        parts = [f"{self.name}: {', '.join((*self._box.tools, *self._interactions)) or 'no tools'}"]
        parts += [f"{type(self._parser).__name__} ({self.format})"] if self._parser else []
        parts += ["parser by the chat template"] if self._by_template and not self._parser else []
        usual = inspect.signature(ToolAgent).parameters
        limits = {name: getattr(self, name) for name in (*_TURN_LIMITS, "seconds_per_call", "max_tool_response_length")}
        parts += [f"{name}={value}" for name, value in limits.items() if value != usual[name].default]
        return f"{type(self).__name__}({', '.join(parts)})"

    @property
    def sub_agents(self) -> dict[str, Any]:
        """The agent's tools that are sub-agents (`SubAgent`), by name."""
        return {name: tool for name, tool in self._box.tools.items() if getattr(tool, "delegates", False)}

    @property
    def lacks(self) -> str:
        """`no tools` if the agent has neither tools nor a simulated user, else empty."""
        return "" if self._box.tools or self._interactions else "no tools"

    def prepare(self, sampler: Sampler) -> None:
        """Check the sampler's chat template. Raises `SettingError` if turns cannot be appended with it, or no parser is known."""
        if self._tokenizer is not sampler.tokenizer:
            self._tokenizer, self._tokens = sampler.tokenizer, {}
            if self._by_template:
                self._parser = tool_parser(parser_of(sampler.tokenizer.chat_template))
            for one in self.sub_agents.values():
                one.prepare(sampler)
        offered = tuple(self._box.tools)
        if offered not in self._tokens:
            roles = [*([self.tool_role] if offered else []), *(["user"] if self._interactions else [])]
            shown = self._box.schemas if self.format == "function_calling" else []
            terms = {"tools": shown, "tools_in": self.tools_in, "parser": self._parser, **switches_of(sampler)}
            self._tokens[offered] = TurnTokens(sampler.tokenizer, roles=roles, processor=processor_of(sampler), **terms)

    @property
    def tokens(self) -> TurnTokens:
        """The `TurnTokens` that turn messages into token ids by the sampler's chat template."""
        self.prepare(self.episode.sampler)
        return self._tokens[tuple(self._box.tools)]

    # --- one episode ---------------------------------------------------------------------------

    async def run(self, sampling_params: Mapping[str, Any], **row: Any) -> AgentLoopOutput | Sequence[AgentLoopOutput]:
        """Run one row's episode; return its sequence, or its sequences.

        Reads `raw_prompt`, `tool_config` (`available_tools`: those of the agent's tools that this row may use) and, of
        `extra_info`, `interaction_kwargs` and `tools_kwargs`.
        """
        episode = self.start(sampling_params, **row)
        try:
            while episode.state is not AgentState.TERMINATED:
                await self.advance(episode)
                if self.episode.progress is not None:
                    self.episode.progress(episode.transcript)
        except BaseException:
            await self.close(episode)
            raise
        return await self.finish(episode)

    def start(self, sampling_params: Mapping[str, Any], **row: Any) -> EpisodeState:
        """Make the state of a new episode, before its first turn. Raises `DataError` for a bad prompt, interaction or
        `tool_config`."""
        self._box = self._offered(row)
        self._box.shows_pictures = self.reads_pictures and processor_of(self.episode.sampler) is not None
        prompt = row["raw_prompt"]
        chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if not isinstance(chat, Sequence) or not chat:
            raise DataError("raw_prompt of a row", expected="a text, or a list of messages", found=describe(prompt))
        messages = [dict(one) for one in chat]
        sampling = dict(sampling_params)
        if self.format == "react" and self._box.tools:
            messages[0]["content"] = instructions(self._box.schemas) + str(messages[0]["content"])
            sampling["stop"] = tuple(dict.fromkeys((*sampling.get("stop", ()), STOP)))
        return EpisodeState(
            row, sampling, messages, self._new_transcript(messages, sampling, row.get(IMAGES) or ()), *self.opened(row)
        )

    @property
    def reads_pictures(self) -> bool:  # type: ignore[override]
        """Whether the model may see pictures, of rows and of tools' answers; False where the agent rewrites or compacts
        its context."""
        return self._history.kind == "append" and self._history.compact_at is None

    def _new_transcript(
        self, messages: Sequence[Mapping[str, Any]], sampling: Mapping[str, Any], pictures: Sequence[Picture] = ()
    ) -> Transcript:
        """Begin a sequence: make the transcript whose prompt is this chat."""
        prompt, seen = self.tokens.pictured_prompt(messages, pictures)
        limit = int(min(sampling["max_tokens"], self.episode.room(prompt)))
        return Transcript(prompt, limit, seen=[seen] if seen else [])

    def _offered(self, row: Mapping[str, Any]) -> Toolbox:
        """Return the toolbox with the tools that the row's `tool_config` lists as `available_tools`, or with all."""
        extra = row.get("extra_info")
        config = row.get("tool_config") or (extra.get("tool_config") if isinstance(extra, Mapping) else None) or {}
        what = f"tool_config of {self._place}"
        if not isinstance(config, Mapping):
            raise DataError(what, expected="{available_tools: […], tool_format: …}", found=describe(config))
        terms = {str(key): value for key, value in config.items() if value is not None}
        for key in terms:
            if key not in ("available_tools", "tool_format"):
                raise DataError(f"{what}: " + unknown("key of tool_config", key, ("available_tools", "tool_format")))
        if terms.get("tool_format", self.format) != self.format:
            do = "give rows of the other format another agent (column agent_name)"
            raise DataError(f"tool_format in {what}", expected=self.format, found=describe(terms["tool_format"]), do=do)
        names = terms.get("available_tools", list(self._box.tools))
        if isinstance(names, str) or not isinstance(names, Iterable):
            raise DataError(f"available_tools in {what}", expected="a list of names", found=describe(names))
        for name in (names := list(names)):
            if name not in self._box.tools:
                why = unknown("tool of the agent", str(name), self._box.tools)
                raise DataError(f"available_tools in {what}: {why}")
        return self._box.only(names)

    @property
    def _place(self) -> str:
        return f"row {self.episode.row} (uid {self.episode.uid})"

    def opened(self, row: Mapping[str, Any]) -> tuple[OpenTools, Conversation | None]:
        """Make the tools and the simulated user of one episode of `row` (None if the row has none); neither is started."""
        user, kwargs = select_interaction(self._interactions, row, self._place)
        session = None if user is None else Conversation(user, kwargs, self.seconds_per_call)
        return self._box.opened(self.episode.name, row), session

    async def advance(self, episode: EpisodeState) -> AgentState:
        """Do the next step, which `episode.state` names; store the new state there, and return it."""
        if episode.state is AgentState.PENDING:
            episode.state = await self.begin(episode)
        elif episode.state is AgentState.GENERATING:
            part = episode.transcript
            longest = min(part.room, self.max_tokens_per_turn or part.room, int(episode.sampling["max_tokens"]))
            context, pixels = self.read(part)
            sample = await self.generate(context, episode.sampling, pixels=pixels, max_tokens=longest)
            episode.state = await self.spoken(episode, sample)
        elif episode.state is AgentState.PROCESSING_TOOLS:
            RUNNING.set((self.episode, episode.sampling))  # in this task: a sub-agent looks there
            records = await asyncio.gather(*map(episode.tools.call, self.wanted(episode)))
            episode.state = self.answered(episode, records)
        elif episode.state is AgentState.INTERACTING:
            stop, text = await self._asked_user(episode)
            episode.state = AgentState.TERMINATED if stop else self.replied(episode, text)
        return episode.state

    def read(self, part: Transcript) -> tuple[tuple[int, ...], dict[str, torch.Tensor] | None]:
        """Return the model inputs of a sequence so far: (its token ids, the inputs of its pictures or None)."""
        if not part.seen:
            return part.context, None
        return (*part.prompt_ids, *self.tokens.readable(part.ids, part.mask)), pixels_of(part.seen)

    async def finish(self, episode: EpisodeState) -> AgentLoopOutput | Sequences:
        """Release the episode's tools and simulated user; return its sequence, or all of them if there are several,
        those of sub-agents first."""
        rewards = await self.close(episode)
        errors = [*episode.errors, *episode.tools.errors]
        errors += [episode.user.trouble] if episode.user and episode.user.trouble else []
        episode.transcript.tool_seconds = episode.tools.seconds
        scores = {"tool_scores": episode.tools.scores} if episode.tools.scores else {}
        outputs = self.sequences(episode, tool_totals=rewards, errors=errors, **scores)
        return outputs if len(outputs) > 1 else outputs[0]

    def sequences(self, episode: EpisodeState, **extra: Any) -> Sequences:
        """Return the sequences of an episode so far as outputs; `extra` is added to the last one's."""
        outputs, versions = [], list(self.episode.versions)
        for transcript in episode.said:
            last, number = transcript is episode.transcript, transcript.count("assistant")
            mine, versions = (versions, []) if last else (versions[:number], versions[number:])
            of = replace(self.episode, versions=mine, seconds=self.episode.seconds if last else 0.0)
            outputs.append(transcript.output(of, **(extra if last else {})))
        return (*sorted(self.episode.others, key=call_of), *outputs)

    async def close(self, episode: EpisodeState) -> dict[str, float]:
        """Release an episode's tools and simulated user; return tool name → reward. A second call does nothing."""
        try:
            return await episode.tools.close()
        finally:
            if episode.user is not None:
                await episode.user.end()

    async def begin(self, episode: EpisodeState) -> AgentState:
        """Start the episode's simulated user, if it has one; return the next state."""
        try:
            if episode.user is not None:
                await episode.user.start(self.episode.name)
        except Exception as error:  # noqa: BLE001 - a row's user, not the run
            return self._abort(episode, f"start_interaction: {first_line(error)}")
        return AgentState.GENERATING

    async def spoken(self, episode: EpisodeState, sample: Sample, *, edited: bool = False) -> AgentState:
        """Append the model's turn, sampled or written by hand (`edited`); return the next state."""
        transcript = episode.transcript
        text = self.tokenizer.decode(list(sample.ids), skip_special_tokens=True)
        short = sample.finish_reason == "length"
        transcript.say(sample, text, cut=f"cut short at {len(sample.ids)} tokens" if short else "")
        if edited:
            transcript.note(edited=True)
        episode.calls = [] if is_asked(episode.turns[-2:-1]) else self.parsed(episode, sample.ids)
        transcript.reason = sample.finish_reason
        if is_asked(episode.turns[-2:-1]) and transcript.reason != "abort":
            return self._next_sequence(episode, with_summary(episode.first, outside_reasoning(text).strip()))
        if transcript.reason == "abort" or transcript.room <= 0:
            return await self._ended(episode, "abort" if transcript.reason == "abort" else "length")
        if self._at_a_limit(episode):
            return await self._ended(episode, "turns" if episode.calls or episode.user else None)
        if episode.calls:
            return AgentState.PROCESSING_TOOLS
        return AgentState.INTERACTING if episode.user is not None else AgentState.TERMINATED

    def _at_a_limit(self, episode: EpisodeState) -> bool:
        """Return whether a limit forbids any turn after the model's, or all of its calls."""
        turns = episode.turns
        heard = sum(turn.role != "assistant" for turn in turns)
        spoken = len(turns) - heard - sum(summaries(turns))
        full = spoken >= (self.max_assistant_turns or math.inf) or heard >= (self.max_user_turns or math.inf)
        return full or (bool(episode.calls) and not self.wanted(episode))

    def wanted(self, episode: EpisodeState) -> list[FunctionCall]:
        """Return the tool calls of the last turn that will be run: the first `max_parallel_calls`, as far as
        `max_tool_calls` allows."""
        ran = sum(call.ran for turn in episode.turns for call in turn.calls)
        left = len(episode.calls) if self.max_tool_calls is None else max(0, self.max_tool_calls - ran)
        return episode.calls[: min(self.max_parallel_calls, left)]

    def answered(self, episode: EpisodeState, records: Sequence[ToolCall]) -> AgentState:
        """Append the answers (`records`) to the `wanted` tool calls; return the next state."""
        ignored = [not_run(call, "ignored") for call in episode.calls[len(records) :]]
        episode.transcript.note(calls=(*records, *ignored))
        episode.calls = []
        cut = "; ".join(f"{one.name}: {one.cut}" for one in records if one.cut)
        pictures = [one for record in records for one in record.pictures]
        return self._append_messages(episode, "tool", self.messages(records), cut, pictures)

    def messages(self, records: Sequence[ToolCall]) -> list[dict[str, Any]]:
        """Write the chat messages that tell the model the results of tool calls (`records`)."""
        if self.format == "react":
            return [{"role": self.tool_role, "content": _content(one, "Observation: ")} for one in records]
        answers = [{"role": self.tool_role, "content": _content(one), "name": one.name} for one in records]
        ids = [{} if one.tool_call_id is None else {"tool_call_id": one.tool_call_id} for one in records]
        return [{**answer, **id_of_call} for answer, id_of_call in zip(answers, ids, strict=True)]

    def chat(self, episode: EpisodeState, count: int | None = None) -> list[dict[str, Any]]:
        """Return the prompt and the first `count` turns (None: all) as messages, for the simulated user to read."""
        turns, messages = episode.turns[:count], list(episode.first)
        for place, (turn, summary) in enumerate(zip(turns, summaries(turns), strict=True)):
            if turn.role == "tool":
                messages += self.messages([call for call in turns[place - 1].calls if call.ran])
            elif not summary:
                messages.append({"role": turn.role, "content": self._history.heard(turn)})
        return messages

    def replied(self, episode: EpisodeState, text: str) -> AgentState:
        """Append the simulated user's reply; return the next state."""
        return self._append_messages(episode, "user", [{"role": "user", "content": text}], "")

    def _append_messages(
        self,
        episode: EpisodeState,
        role: str,
        messages: list[dict[str, Any]],
        cut: str,
        pictures: Sequence[Picture] = (),
    ) -> AgentState:
        transcript = episode.transcript
        last = transcript.turns[-1]
        wrote = transcript.ids[last.first : last.last + 1]
        ids, seen = self.tokens.pictured_delta(messages, wrote, pictures)
        if asking := self._history.is_full(len(transcript.context) + len(ids)):
            messages = self._history.asking(messages)
            ids = self.tokens.delta(messages, wrote)
        text, state = "\n".join(str(text_of(one["content"])) for one in messages), AgentState.GENERATING
        by_template = self._history.kind == "template"
        chat = [*episode.messages, *self._written(episode), *messages] if by_template else []
        if chat and self._rewrites(chat, transcript.context):
            transcript.hear(role, text, (), cut=cut)  # its tokens are in the next prompt
            state = self._next_sequence(episode, chat)
        elif not transcript.hear(role, text, ids, cut=cut, seen=seen):
            transcript.reason, state = "length", AgentState.TERMINATED
        if asking:
            mark_asked(transcript)
        return state

    def _written(self, episode: EpisodeState) -> list[dict[str, Any]]:
        """Write the turns of the present sequence as messages for the template; the model's turns keep their sampled
        text."""
        transcript, messages = episode.transcript, []
        for place, turn in enumerate(transcript.turns):
            ids = transcript.ids[turn.first : turn.last + 1]
            if turn.role == "tool":
                messages += self.messages([call for call in transcript.turns[place - 1].calls if call.ran])
            elif turn.role == "user":
                messages.append({"role": "user", "content": turn.text})
            else:
                text = self.tokenizer.decode(ids[:-1] if ids[-1:] == [self.tokenizer.eos_token_id] else ids)
                messages.append({"role": "assistant", "content": text})
        return messages

    def _rewrites(self, chat: Sequence[Mapping[str, Any]], context: Sequence[int]) -> bool:
        """Return whether the template's text of the chat differs from the tokens that the model has read and written so
        far."""
        whole, there = (self.tokenizer.decode(list(ids)) for ids in (self.tokens.prompt(chat), context))
        return not whole.startswith(there)

    def _next_sequence(self, episode: EpisodeState, chat: list[dict[str, Any]]) -> AgentState:
        """Begin the next sequence with this chat; return the next state, which is the end where the episode has
        `max_sequences`."""
        if len(episode.past) + 1 >= self._history.max_sequences:
            episode.transcript.reason = "turns"
            return AgentState.TERMINATED
        episode.past.append(Past(episode.messages, episode.transcript))
        episode.messages, episode.transcript = chat, self._new_transcript(chat, episode.sampling)
        return AgentState.GENERATING

    def at(self, episode: EpisodeState, transcripts: Sequence[Transcript]) -> EpisodeState:
        """Rebuild the state of an episode at the end of these sequences, with the tools and the simulated user of
        `episode`."""
        now = replace(episode, past=[], messages=episode.first, transcript=transcripts[0], errors=[], calls=[])
        for part in transcripts[1:]:
            turns, last = now.turns, now.transcript.turns[-1]
            if last.role == "assistant":
                chat = with_summary(now.first, outside_reasoning(last.text).strip())
            else:
                of = self.messages([call for call in turns[-2].calls if call.ran]) if last.role == "tool" else []
                of = of or [{"role": last.role, "content": self._history.heard(last)}]
                kept = replace(now, transcript=now.transcript.first(len(now.transcript.turns) - 1))
                is_request = is_asked(turns[-1:])
                chat = [*now.messages, *self._written(kept), *(self._history.asking(of) if is_request else of)]
            now = replace(now, past=[*now.past, Past(now.messages, now.transcript)], messages=chat, transcript=part)
        turns = now.transcript.turns
        now.state = AgentState.GENERATING
        if turns and is_asked(now.turns[-2:-1]):
            now.state = AgentState.TERMINATED  # its summary was one too many
        elif turns and turns[-1].role == "assistant":
            last = turns[-1]
            now.calls = self.parsed(now, now.transcript.ids[last.first : last.last + 1])
            unasked = AgentState.INTERACTING if now.user is not None else AgentState.TERMINATED
            now.state = AgentState.PROCESSING_TOOLS if now.calls else unasked
        return now

    async def _asked_user(self, episode: EpisodeState) -> tuple[bool, str]:
        """Ask the simulated user for its reply: (whether to stop, text). Its score is noted at the assistant's turn."""
        assert episode.user is not None
        try:
            reply = await episode.user.ask(self.chat(episode))
        except Exception as error:  # noqa: BLE001 - a row's user, not the run
            self._abort(episode, f"generate_response: {first_line(error, 300).removeprefix('ForeignError: ')}")
            return True, ""
        episode.transcript.note(score=reply.score, extra=reply.extra)
        return reply.stop, reply.text

    async def _ended(self, episode: EpisodeState, reason: str | None) -> AgentState:
        """End the episode at a limit: calls are not run; a simulated user still scores the turn, but its answer is not
        appended."""
        transcript = episode.transcript
        if reason is not None:
            transcript.reason = reason
        if episode.calls:
            transcript.note(calls=tuple(not_run(call, "not run") for call in episode.calls))
        elif episode.user is not None and reason != "abort":
            stop, text = await self._asked_user(episode)
            if stop and transcript.reason == "turns":
                transcript.reason = "stop"
            elif text:
                transcript.note(
                    cut="; ".join(filter(None, (transcript.turns[-1].cut, f"the user's answer was left out: {text}")))
                )
        return AgentState.TERMINATED

    def _abort(self, episode: EpisodeState, why: str) -> AgentState:
        episode.errors.append(why)
        episode.transcript.reason = "abort"
        if episode.transcript.turns:
            episode.transcript.note(error=why)
        return AgentState.TERMINATED

    def parsed(self, episode: EpisodeState, ids: Sequence[int]) -> list[FunctionCall]:
        """Parse the tool calls in the model's last turn, whose token ids are `ids`, outside its reasoning.

        Where the turn was cut short, an unfinished call is left out. A parser's exception is recorded in the turn.
        """
        if self._parser is None or not self._box.tools:
            return []
        # special tokens are kept, because some models write their calls with them; the end token is not
        written = list(ids[:-1] if ids and ids[-1] == self.tokenizer.eos_token_id else ids)
        text = self.tokenizer.decode(written, skip_special_tokens=False)
        try:
            reasoning, cut = self.tokens.reasoning, bool(episode.transcript.turns[-1].cut)
            return calls_of(self._parser, text, self._box.schemas, reasoning=reasoning, cut=cut)
        except Exception as error:  # noqa: BLE001 - what a model wrote is a row's data, whatever it does to a parser
            why = f"the parser failed: {first_line(error)}"
            episode.errors.append(why)
            episode.transcript.note(error=why)
            return []


def _content(record: ToolCall, before: str = "") -> Any:
    """Write the content of the message with a call's result: a text, or a list of parts where the result has images."""
    text = before + record.result
    if not record.pictures:
        return text
    return [*([{"type": "text", "text": text}] if text else []), *({"type": "image"} for _ in record.pictures)]
