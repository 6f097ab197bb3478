"""The policy behind an OpenAI-compatible address of this machine, for harnesses that run their episodes themselves.

`PolicyTokens` makes messages token ids, and samples messages; a `Recording` makes an episode's requests sequences. Each answer
is a node of a tree. A request whose messages go on after an answer is that node's child: its sequence goes on with the very
ids that were sampled, and the template's delta for what is new. Any other request begins a new tree.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from workbench.agents.episode import Episode, Transcript
from workbench.agents.formats import parser_of
from workbench.agents.parsers import REASONING, calls_of, checked_parser, read_json, tool_parser
from workbench.agents.protocol import AgentLoopOutput, FunctionCall, ToolCall, ToolParser
from workbench.agents.streaming import Live, before_calls, held_back
from workbench.agents.tokens import TurnTokens
from workbench.base import runtime
from workbench.base.errors import SettingError, WorkbenchError, first_line
from workbench.base.loopback import WORKING, HttpRequest, serving
from workbench.base.seeds import derive
from workbench.engines.http.openai_form import (
    ChatAnswer,
    ChatRequest,
    Refusal,
    Reply,
    chat_request,
    chat_stream,
    completion_request,
    completion_stream,
    refusal_of,
    refused,
)
from workbench.engines.http.responses_form import response_request, response_stream, response_whole
from workbench.engines.protocol import Bounded, Constrains, Sample, Sampler, SamplingSettings, Streams, switches_of

Message = Mapping[str, Any]


@dataclass(eq=False)
class AnswerNode:
    """One answer of the policy in the tree of an episode's requests, and the token ids that the policy read since the
    previous answer."""

    parent: AnswerNode | None
    heard: tuple[int, ...]
    """Ids of the prompt, or of the template's delta after the parent's answer."""
    new: tuple[Message, ...]
    """The messages that the ids in `heard` encode."""
    asked: str
    """Hash of the messages before the answer (see `chain`)."""
    number: int
    """Number of the request, in order of arrival; all answers to a request (`n > 1`) share the number."""
    sample: Sample
    message: Message
    """The answer as it was sent: `content`, `tool_calls`, `reasoning_content`."""
    text: str = ""
    """The answer as the model wrote it, without special tokens."""
    delivered: bool = False
    """Whether the client was still connected when the answer was sent."""

    @property
    def path(self) -> list[AnswerNode]:
        """The answers of the node's sequence, from the first one to this one."""
        nodes: list[AnswerNode] = []
        node: AnswerNode | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    @property
    def ids(self) -> list[int]:
        """Token ids of the node's sequence, up to and including this answer."""
        return [one for node in self.path for one in (*node.heard, *node.sample.ids)]


def chain(messages: Iterable[Message], first: str = "", *, reasoning: bool = False) -> list[str]:
    """Hash the beginnings of a chat: the n-th hash stands for its first n + 1 messages, after the context that the hash
    `first` stands for.

    Chats have equal hashes if they differ only in white space around contents, in the calls' ids and in how a call's
    JSON was written; the reasoning counts only with `reasoning`.
    """
    names: list[str] = []
    name = first
    for message in messages:
        calls = [(call["function"]["name"], _canonical_json(call["function"]["arguments"])) for call in _calls(message)]
        thought = (message.get("reasoning_content") or "").strip() if reasoning else ""
        key = json.dumps([name, message["role"], (message.get("content") or "").strip(), calls, thought])
        name = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
        names.append(name)
    return names


def _calls(message: Message) -> Sequence[Mapping[str, Any]]:
    return message.get("tool_calls") or ()


def _canonical_json(arguments: str) -> str:
    """Write a call's arguments in one canonical JSON form, so that equal arguments give equal texts; text that is not
    JSON is stripped."""
    try:
        return json.dumps(read_json(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments.strip()


@dataclass
class Recording:
    """The tree of an episode's answers.

    `reasoning` says what happens when a client sends an answer back without its reasoning: True begins a new sequence,
    False continues the old one.
    """

    reasoning: bool = False
    nodes: list[AnswerNode] = field(default_factory=list)
    _by_answer: dict[str, AnswerNode] = field(default_factory=dict)
    _texts: dict[str, str] = field(default_factory=dict)

    def before(self, messages: Sequence[Message], first: str = "") -> tuple[AnswerNode | None, int, str]:
        """Find the answer that a request continues; returns (that answer or None, the number of messages up to and including
        it, the hash of all messages).

        The messages after an answer must come from others: an assistant's message that was not sampled here begins a
        new sequence.
        """
        names = chain(messages, first, reasoning=self.reasoning)
        for place in range(len(messages) - 1, -1, -1):
            if messages[place]["role"] == "assistant":
                node = self._by_answer.get(names[place]) if place < len(messages) - 1 else None
                return node, place + 1 if node else 0, names[-1]
        return None, 0, names[-1]

    def add(self, nodes: Sequence[AnswerNode]) -> None:
        """Append the answers to one request to the tree."""
        for node in nodes:
            self.nodes.append(node)
            (name,) = chain([{"role": "assistant", **node.message}], node.asked, reasoning=self.reasoning)
            self._by_answer.setdefault(name, node)
            (key,) = chain([{"role": "assistant", **node.message}])
            self._texts.setdefault(key, node.text)

    def as_written(self, message: Message) -> str | None:
        """Return the text with which the model gave this answer, for templates that cannot write calls; None where the
        model did not give it."""
        (key,) = chain([message])
        return self._texts.get(key)

    def leaves(self) -> list[AnswerNode]:
        """Return the last answers of the sequences, in the order in which they were requested.

        Only answers that a client received count. Of `n` answers to one request those count that were continued, and
        all where none was.
        """
        nodes = sorted((node for node in self.nodes if node.delivered), key=lambda one: one.number)
        continued = {id(node.parent) for node in nodes}
        chosen = {node.number for node in nodes if id(node) in continued}
        return [node for node in nodes if id(node) not in continued and node.number not in chosen]

    def sequences(self, episode: Episode, limit: int, reason: str | None = None, **extra: Any) -> list[AgentLoopOutput]:
        """Convert the tree to the episode's sequences; tokens that several share have mask 1 in the first of them
        alone.

        `limit` is the longest response in tokens. `reason` is the finish reason of the last sequence; None: that of its
        last answer.
        """
        leaves, learnt, outputs = self.leaves(), set[int](), list[AgentLoopOutput]()
        for leaf in leaves:
            path = leaf.path
            transcript = Transcript(path[0].heard, limit)
            for place, node in enumerate(path):
                if node.parent is not None:
                    text = "\n".join(str(one.get("content") or "") for one in node.new)
                    transcript.hear("tool" if node.new[-1]["role"] == "tool" else "user", text, node.heard)
                transcript.say(node.sample, node.text)
                after = path[place + 1].new if place + 1 < len(path) else ()
                transcript.note(calls=_records(node.message, after))
                if id(node) in learnt:
                    first = transcript.turns[-1].first
                    transcript.mask[first:] = [0] * len(node.sample.ids)
                    transcript.log_probs[first:] = [0.0] * len(node.sample.ids)
                learnt.add(id(node))
            transcript.reason = reason if reason and leaf is leaves[-1] else leaf.sample.finish_reason
            part = replace(episode, versions=[node.sample.version for node in path])
            outputs.append(transcript.output(part, **extra))
        return outputs


def _records(message: Message, after: Sequence[Message]) -> tuple[ToolCall, ...]:
    """Make the records of an answer's calls, with the results that the harness sent in the messages `after` it."""
    calls = [(call["id"], FunctionCall(**call["function"])) for call in _calls(message)]
    answers = [one for one in after if one["role"] == "tool"]
    named = {one.get("tool_call_id"): one for one in answers}
    records = []
    for place, (key, call) in enumerate(calls):
        answer = named.get(key) or (answers[place] if len(answers) == len(calls) else None)
        status, text = ("ok", str(answer["content"])) if answer else ("not run", "")
        records.append(ToolCall(call.name, call.arguments, status, text))
    return tuple(records)


class PolicyTokens:
    """Converts chat messages to token ids, and sampled answers to messages; all episodes of an endpoint share one."""

    def __init__(self, sampler: Sampler, parser: ToolParser | str | None, tools_in: str = "template") -> None:
        self._tools_in = tools_in
        self.sampler = sampler
        self.tokenizer = sampler.tokenizer
        self._parser = checked_parser(parser, format="function_calling", tools=True)
        self._made: dict[str, tuple[TurnTokens, frozenset[str]]] = {}

    def of(
        self, tools: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] = MappingProxyType({})
    ) -> tuple[TurnTokens, frozenset[str]]:
        """Return (the `TurnTokens` for these tools, the roles whose messages the template can append to a
        conversation).

        Raises `SettingError` where there are tools and no parser is known for the template, and `Refusal` where the
        template does not tell the model of the tools.
        """
        if tools and self._parser is None:
            self._parser = tool_parser(parser_of(self.tokenizer.chat_template))
        key = json.dumps([tools, variables], sort_keys=True, default=str)
        if key not in self._made:
            fixed = {"tools": tools, "tools_in": self._tools_in, "parser": self._parser}
            template = str(getattr(self.tokenizer, "chat_template", None))
            if unread := next((name for name in variables if name in fixed or str(name) not in template), None):
                why = f"chat_template_kwargs: the chat template reads no variable {unread!r}"
                raise Refusal(400, why, "unsupported", "chat_template_kwargs")
            switches = {**switches_of(self.sampler), **variables, **fixed}
            try:
                TurnTokens(self.tokenizer, **switches)
            except SettingError as error:
                raise Refusal(400, str(error), None, "tools") from error
            roles = []
            for role in ("user", "tool"):
                with suppress(SettingError):
                    TurnTokens(self.tokenizer, roles=[role], **switches)
                    roles.append(role)
            self._made[key] = TurnTokens(self.tokenizer, roles=roles, **switches), frozenset(roles)
        return self._made[key]

    def for_template(self, message: Mapping[str, Any], recording: Recording) -> dict[str, Any]:
        """Convert a message to the form that the chat template reads. If the template cannot write tool calls, the message's
        content is the text in which the model wrote its calls."""
        if not message.get("tool_calls") or "tool_calls" in str(getattr(self.tokenizer, "chat_template", "")):
            return dict(message)
        written = recording.as_written(message)
        if written is None:
            why = "an assistant's message has tool_calls that the model did not make, and its chat template writes none"
            raise Refusal(400, why, None, "messages")
        return {"role": "assistant", "content": written}

    def opening(self, request: ChatRequest, tokens: TurnTokens) -> str:
        """Return the text that an answer has to begin with, after which the model goes on: the start of a tool call
        that `tool_choice` forces (up to the tool's name, or its arguments where a tool is named), or the start for a
        `response_format`; else "". Raises `Refusal` where the parser's form of a call is not known.
        """
        if not request.force:
            return REASONING.get(tokens.reasoning, "") if request.response_format is not None else ""
        begun, _, after = getattr(self._parser, "call_form", "").partition("NAME")
        if not after:
            why = f"tool_choice: {type(self._parser).__name__} has no call_form to begin a call with; expected auto or none"
            raise Refusal(400, why, "unsupported", "tool_choice")
        if request.force != "*":
            begun += request.force + after.partition("ARGUMENTS")[0]
        # the sign and the space that open what follows are left to the model: its tokens hold them together with that
        return REASONING.get(tokens.reasoning, "") + begun.rstrip('" ')

    def check(self, request: ChatRequest) -> None:
        """Raise `Refusal` for a `response_format` that the sampler cannot constrain an answer to."""
        if request.response_format is None:
            return
        if request.tools and request.calls:
            why = "response_format beside tools: an answer constrained to JSON cannot call a tool; set tool_choice to none, or send no tools"
        elif not isinstance(self.sampler, Constrains):
            why = f"response_format: {type(self.sampler).__name__} cannot constrain an answer to JSON; expected none or text,"
            why += " or a tool with that schema and tool_choice"
        else:
            try:
                return self.sampler.check_schema(request.response_format)
            except WorkbenchError as error:
                why = f"response_format: {first_line(error, 400)}"
        raise Refusal(400, why, "unsupported", "response_format")

    def message(
        self, request: ChatRequest, tokens: TurnTokens, sample: Sample, seed: int, opening: str = ""
    ) -> tuple[dict[str, Any], str]:
        """Convert a sampled answer to a chat message; returns (the message, the text as the model wrote it, behind
        `opening`).
        """
        ids = list(sample.ids)
        written = ids[:-1] if ids and ids[-1] == self.tokenizer.eos_token_id else ids
        # special tokens are kept until all is found, because some models write calls and reasoning with them
        text = opening + self.tokenizer.decode(written, skip_special_tokens=False)
        thought, rest = ("", text) if request.raw is not None else split_reasoning(text, tokens.reasoning)
        calls = self._calls(request, tokens, text, cut=sample.finish_reason == "length")
        if calls:
            assert self._parser is not None
            rest = self._parser.extract_tool_calls(rest, request.tools)[0].strip()
        answer: dict[str, Any] = {"content": _without_stop(self._decoded(rest), request.sampling.get("stop", ()))}
        if thought:
            answer["reasoning_content"] = self._decoded(thought)
        if calls:
            answer["content"] = answer["content"] or None
            answer["tool_calls"] = [
                {
                    "id": call.tool_call_id or f"call_{derive(seed, number):016x}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for number, call in enumerate(calls[: None if request.parallel else 1])
            ]
        return answer, opening + self.tokenizer.decode(ids, skip_special_tokens=True)

    def settled(self, request: ChatRequest, tokens: TurnTokens, opening: str, ids: Sequence[int]) -> tuple[str, str]:
        """Return (the reasoning, the content) of an answer under way, as far as later tokens cannot change them."""
        text = opening + self.tokenizer.decode(ids, skip_special_tokens=False)
        stops = request.sampling.get("stop", ())
        text = held_back(text, [*self.tokenizer.all_special_tokens, *stops, *REASONING.values()])
        if request.raw is not None:
            return "", self._decoded(text)
        start = (tokens.reasoning + text).lstrip()
        if any(tag.startswith(start) for tag in REASONING):
            return "", ""
        thought, rest = split_reasoning(text, tokens.reasoning)
        if request.tools and request.calls:
            rest = before_calls(rest, getattr(self._parser, "call_form", ""))
        return self._decoded(thought), self._decoded(rest)

    def _calls(self, request: ChatRequest, tokens: TurnTokens, text: str, *, cut: bool) -> list[FunctionCall]:
        if self._parser is None or not request.tools or not request.calls:
            return []
        try:
            return calls_of(self._parser, text, request.tools, reasoning=tokens.reasoning, cut=cut)
        except Exception:  # noqa: BLE001 - what a model wrote is data, whatever it does to a parser: then it is text
            return []

    def _decoded(self, text: str) -> str:
        """Return a text without special tokens."""
        for token in self.tokenizer.all_special_tokens:
            text = text.replace(token, "")
        return text


def _without_stop(text: str, stops: Sequence[str]) -> str:
    """Return a text without the stop text that ended it."""
    return next((text[: -len(one)] for one in stops if one and text.endswith(one)), text)


def split_reasoning(text: str, opened: str = "") -> tuple[str, str]:
    """Split a model's text; returns (the reasoning at its beginning, the rest); `opened` is the tag with which the
    prompt began the reasoning.
    """
    start = (opened + text).lstrip()
    for tag, end in REASONING.items():
        if start.startswith(tag):
            thought, _, rest = start[len(tag) :].partition(end)
            return thought.strip(), rest.lstrip("\n")
    return "", text


_LONGEST = 1 << 20
"""Longest sequence in tokens where neither the model nor the rollout has a limit."""


@dataclass
class Limits:
    """Limits of an episode behind an endpoint. A request that exceeds a limit is refused (HTTP 400), and the finish
    reason says so."""

    max_assistant_turns: int | None = None
    """Most answers in an episode, of all its sequences together."""
    max_tokens: int | None = None
    """Longest response of a sequence in tokens: all that follows its prompt."""


@dataclass(eq=False)
class _Pending:
    """A request that is under way or answered; a client that repeats the request because it lost the answer gets that
    answer."""

    answers: asyncio.Future[tuple[Reply, list[AnswerNode]]]
    asked: HttpRequest | None

    @property
    def lost(self) -> bool:
        """Whether the client that sent the request has left without the answer."""
        return self.asked is not None and self.asked.gone()


@dataclass(eq=False)
class PolicySession:
    """One episode behind an endpoint: its key, its requests and answers so far. Made by `Endpoint.session`.

    An answer's seed is derived from `Episode.seed` of its place in its sequence, the token ids that the model read, the
    request's own `seed`, and how often the same request came before. So the same harness gets the same tokens,
    whichever of its parallel requests comes first.
    """

    base_url: str
    """For `OPENAI_BASE_URL`: the address with the key in its path."""
    api_key: str
    """For `OPENAI_API_KEY`: the key, which works with the endpoint's own address, too."""
    model: str
    episode: Episode
    policy: PolicyTokens
    sampling: Mapping[str, Any] | None
    limits: Limits
    recording: Recording
    failure: Exception | None = None
    """The exception that the engine raised, or None."""
    reason: str | None = None
    """`turns` or `length` where a limit has refused the last request."""
    refused: float | None = None
    """When the session first refused a request (`time.monotonic`); None while it refuses none."""
    _pending: dict[tuple[Any, ...], list[_Pending]] = field(default_factory=dict)
    _requests: int = 0
    _turns: int = 0
    _tasks: set[asyncio.Task[Any]] = field(default_factory=set)

    async def chat(self, **arguments: Any) -> dict[str, Any]:
        """Answer a chat request of this process without HTTP: OpenAI's arguments (`messages`, `tools`, …), and its
        reply as a dict.

        Raises `openai_form.Refusal`, which has the HTTP status and OpenAI's error, for a request that an endpoint would
        refuse.
        """
        request = chat_request({**arguments, "stream": False})
        return (await self.answer(request)).whole(request)

    async def answer(self, chat: ChatRequest, connection: HttpRequest | None = None, live: Live | None = None) -> Reply:
        """Answer a request by sampling, and record it; a repeated request gets the recorded answer again. `live` gets
        the tokens while they are sampled, if the sampler reports them. Raises `Refusal`."""
        tools = json.dumps([chat.tools, chat.switches, chat.raw is None], sort_keys=True, default=str)
        parent, taken, name = self.recording.before(chat.messages, tools)
        choices = (chat.calls, chat.force, chat.response_format, chat.parallel, chat.top_logprobs)
        settings = (chat.n, chat.max_tokens, chat.seed, *choices, *sorted(chat.sampling.items()))
        same = self._pending.setdefault((name, settings), [])
        again = connection is not None and (connection.headers.get("x-stainless-retry-count") or "0") != "0"
        pending = next((one for one in reversed(same) if one.lost or again), None)
        if pending is None:
            task = asyncio.ensure_future(self._sampled(chat, parent, taken, name, len(same), live))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            pending = _Pending(task, connection)
            same.append(pending)
        pending.asked = connection
        try:
            reply, nodes = await asyncio.shield(pending.answers)
        except BaseException as error:
            if pending in same and (live or isinstance(error, Exception)):
                same.remove(pending)
            if live is not None:  # nobody asks for the rest of a stream again
                pending.answers.cancel()
            raise
        if pending.asked is connection and not pending.lost:
            pending.asked = None
            for node in nodes:
                node.delivered = True
        return reply

    async def _sampled(
        self,
        request: ChatRequest,
        parent: AnswerNode | None,
        taken: int,
        name: str,
        again: int,
        live: Live | None = None,
    ) -> tuple[Reply, list[AnswerNode]]:
        """Sample the answers to a request that continues `parent`, the answer that ends its first `taken` messages."""
        number, began = self._requests, time.monotonic()
        self._requests += 1
        self.policy.check(request)
        tokens, roles = self.policy.of(request.tools, request.switches)
        new = request.messages[taken:]
        if parent is not None and any(message["role"] not in roles for message in new):
            parent, new = None, request.messages
        if request.raw is not None:
            raw = request.raw
            heard = tuple(self.policy.tokenizer(raw)["input_ids"]) if isinstance(raw, str) else raw
        elif parent is None:
            heard = tokens.prompt([self.policy.for_template(message, self.recording) for message in new])
        else:
            heard = tokens.delta([dict(message) for message in new], parent.sample.ids)
        opening = self.policy.opening(request, tokens)
        heard = (*heard, *self.policy.tokenizer(opening, add_special_tokens=False)["input_ids"]) if opening else heard
        before = () if parent is None else parent.ids
        prompt = heard if parent is None else parent.path[0].heard
        settings = self._settings(request, self._room(len(before) + len(heard), len(prompt)))
        self._count_answer()
        depth = 0 if parent is None else len(parent.path)
        seeds = self._seeds([*before, *heard], request, depth, again)
        reply = Reply(f"chatcmpl-{seeds[0]:016x}", self.model, len(before) + len(heard), (), self.policy.tokenizer)
        if live is not None:
            live.begin(reply.id, partial(self.policy.settled, request, tokens, opening))
        samples = await self._sample_answers([*before, *heard], settings, request, seeds, live)
        nodes = []
        for sample, seed in zip(samples, seeds, strict=True):
            said, text = self.policy.message(request, tokens, sample, seed, opening)
            nodes.append(AnswerNode(parent, tuple(heard), tuple(new), name, number, sample, said, text))
        self._record(nodes, began)
        answers = [ChatAnswer(node.message, _finish_reason(node), len(node.sample.ids), node.sample) for node in nodes]
        return replace(reply, answers=answers), nodes

    def _record(self, nodes: Sequence[AnswerNode], began: float) -> None:
        """Record the answers to a request that came at the time `began`, and mark the answer before them as read.

        A request that was answered after a refusal by length shows that the refusal is over.
        """
        if (parent := nodes[0].parent) is not None:
            parent.delivered = True
        self.recording.add(nodes)
        if self.refused is not None and self.reason == "length" and began > self.refused:
            self.reason = self.refused = None

    def _seeds(self, ids: Sequence[int], request: ChatRequest, depth: int, again: int) -> list[int]:
        """Derive the seeds of the `request.n` answers after the token ids `ids`."""
        read = hashlib.blake2b(array("q", ids).tobytes(), digest_size=16).hexdigest()
        first = derive(self.episode.seed(depth), read, request.seed, again)
        return [derive(first, place) if place else first for place in range(request.n)]

    async def _sample_answers(
        self,
        ids: Sequence[int],
        settings: SamplingSettings,
        request: ChatRequest,
        seeds: Sequence[int],
        live: Live | None,
    ) -> list[Sample]:
        """Sample one answer for each seed after the token ids `ids`. An engine's exception is also kept as `failure`."""
        streams = live if isinstance(self.policy.sampler, Streams) and self.policy.sampler.streams else None
        try:
            wanted = request.top_logprobs
            more: dict[str, Any] = {"tops": wanted, "schema": request.response_format}
            draws = (
                self.episode.draw(ids, settings, seed, listen=streams.listener(place) if streams else None, **more)
                for place, seed in enumerate(seeds)
            )
            samples = list(await asyncio.gather(*draws))
        except Exception as cause:
            if isinstance(cause, SettingError) and request.response_format is not None:
                why = f"response_format: {first_line(cause, 400)}"
                raise Refusal(400, why, "unsupported", "response_format") from cause
            self.failure = cause
            raise
        if any(one.finish_reason == "abort" for one in samples):
            raise Refusal(500, "the engine stopped before this answer was complete")
        if any(one.ids and not one.tops for one in samples if wanted):
            why = f"top_logprobs: {type(self.policy.sampler).__name__} does not give the likeliest tokens; expected 0"
            raise Refusal(400, why, "unsupported", "top_logprobs")
        return samples

    def _count_answer(self) -> None:
        """Count an answer that is about to be sampled. Raises `Refusal` where the episode has had as many as its limit
        allows."""
        most = self.limits.max_assistant_turns
        if most is not None and self._turns >= most:
            self._refused("turns")
            raise Refusal(400, f"the episode already has {most} answers (max_assistant_turns)", "turn_limit_exceeded")
        self._turns += 1

    def _refused(self, reason: str) -> None:
        self.reason, self.refused = reason, self.refused or time.monotonic()

    def _room(self, length: int, prompt: int) -> int:
        """Return how many tokens an answer may have after `length` tokens, of which `prompt` are the sequence's prompt.
        Raises `Refusal` for none."""
        sampler, most, limit = self.policy.sampler, self.episode.max_prompt_length, self.limits.max_tokens or _LONGEST
        longest = (sampler.max_length if isinstance(sampler, Bounded) else None) or _LONGEST
        room = min(longest - length, limit - (length - prompt))
        if prompt <= (most or prompt) and room >= 1:
            return room
        self._refused("length")
        allowed = f"{most or longest} of a prompt, {min(limit, longest)} of a response, {longest} in all"
        why = f"{length} tokens, {prompt} of them the sequence's prompt; allowed are {allowed}"
        # clients know this error by these words, some by nothing else
        why = f"This model's maximum context length is passed: {why}"
        raise Refusal(400, why, "context_length_exceeded", "messages")

    def _settings(self, request: ChatRequest, room: int) -> SamplingSettings:
        chosen = dict(request.sampling if self.sampling is None else self.sampling)
        chosen["stop"] = tuple(dict.fromkeys((*chosen.get("stop", ()), *request.sampling["stop"])))
        return SamplingSettings(**{**chosen, "max_tokens": min(request.max_tokens or room, room)})

    def sequences(self, reason: str | None = None, **extra: Any) -> list[AgentLoopOutput]:
        """Return the episode so far as a rollout's outputs (see `Recording.sequences`); `extra` is added to each."""
        limit = self.limits.max_tokens or _LONGEST
        return self.recording.sequences(self.episode, limit, reason or self.reason, **extra)

    def close(self) -> None:
        """Cancel the sampling that is still under way."""
        for task in tuple(self._tasks):
            task.get_loop().call_soon_threadsafe(task.cancel)


def _finish_reason(node: AnswerNode) -> str:
    """Return OpenAI's finish reason of an answer."""
    if node.message.get("tool_calls"):
        return "tool_calls"
    return "length" if node.sample.finish_reason == "length" else "stop"


class Endpoint:
    """The HTTP address of a policy; each episode has a session there, with a key of its own. Made by `endpoint`."""

    def __init__(
        self, sampler: Sampler, parser: ToolParser | str | None, model: str, tools_in: str = "template"
    ) -> None:
        self.address = ""
        """`127.0.0.1:port`."""
        self.model = model
        """The model name that `/v1/models` returns; requests may have any other name."""
        self._policy = PolicyTokens(sampler, parser, tools_in)
        self._sessions: dict[str, PolicySession] = {}

    @property
    def base_url(self) -> str:
        """The URL for clients that pass an episode's key as their API key."""
        return f"http://{self.address}/v1"

    @contextmanager
    def session(
        self,
        episode: Episode | None = None,
        *,
        sampling: SamplingSettings | Mapping[str, Any] | None = None,
        limits: Limits | None = None,
        keep_reasoning: bool = True,
    ) -> Iterator[PolicySession]:
        """Context manager that opens an episode, whose key is valid while the block runs.

        Args:
            episode: sampler and seeds; None: this endpoint's sampler and run seed 0.
            sampling: settings that override those of any request, except `max_tokens`; None: the request's own.
            limits: see `Limits`.
            keep_reasoning: what happens where a client leaves an answer's reasoning out of the messages. True: the
                sequence continues with the reasoning; False: the chat without it is a new sequence, as the template
                writes it.
        """
        key = secrets.token_urlsafe(18)
        if isinstance(sampling, SamplingSettings):
            sampling = sampling.to_dict()
        session = PolicySession(
            f"http://{self.address}/e/{key}/v1",
            key,
            self.model,
            episode or Episode(self._policy.sampler),
            self._policy,
            sampling,
            limits or Limits(),
            Recording(reasoning=not keep_reasoning),
        )
        self._sessions[key] = session
        try:
            yield session
        finally:
            del self._sessions[key]
            session.close()

    def answer(self, asked: HttpRequest) -> tuple[int, Any]:
        """Answer an HTTP request, in its connection's thread; returns (HTTP status, body)."""
        try:
            path = asked.path.partition("?")[0].rstrip("/")
            bearer = (asked.headers.get("Authorization") or "").removeprefix("Bearer ").strip()
            key, path = path[3:].split("/", 1) if path.startswith("/e/") and "/" in path[3:] else (bearer, path[1:])
            session = self._sessions.get(key)
            if session is None:
                why = "unknown key of an episode: give a session's api_key, or its base_url, while the episode goes on"
                raise Refusal(401, why, "invalid_api_key")
            if (asked.method, path) == ("GET", "v1/models"):
                model = {"id": self.model, "object": "model", "created": 0, "owned_by": "workbench"}
                return 200, {"object": "list", "data": [model]}
            if asked.method != "POST" or path not in FORMS:
                known = ", ".join(f"POST /{one}" for one in FORMS)
                raise Refusal(404, f"no such path: {asked.method} /{path[:100]}; expected {known} or GET /v1/models")
            read, write, stream = FORMS[path]
            request = read(asked.body)
            if not request.stream:
                return 200, write(runtime.run(session.answer(request, asked)), request)
            live = Live()
            pieces = live.pieces(session.answer(request, asked, live))
            return 200, _to_its_end(stream(request, self.model, pieces))
        except CancelledError:
            refusal = Refusal(401, "the episode is over", "invalid_api_key")
        except Exception as cause:  # noqa: BLE001 - whatever an engine raises, who asked is answered
            refusal = refusal_of(cause)
        return refusal.status, refusal.body


def _to_its_end(stream: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Write a stream; what fails on the way is its last object."""
    try:
        yield from stream
    except CancelledError:
        yield Refusal(401, "the episode is over", "invalid_api_key").body
    except Exception as cause:  # noqa: BLE001 - the status is sent; clients read the error in the stream
        yield refusal_of(cause).body


FORMS: Mapping[str, tuple[Callable[[Any], ChatRequest], Callable[[Reply, Any], Any], Callable[..., Any]]] = {
    "v1/chat/completions": (chat_request, Reply.whole, chat_stream),
    "v1/completions": (completion_request, Reply.completion, completion_stream),
    "v1/responses": (response_request, response_whole, response_stream),
}
"""Path → three functions: they read the request, write the reply, and write the reply as a stream."""


@contextmanager
def endpoint(
    engine: Sampler,
    *,
    parser: ToolParser | str | None = None,
    model: str = "policy",
    port: int = 0,
    tools_in: str = "template",
) -> Iterator[Endpoint]:
    """Context manager that serves the policy at an OpenAI-compatible address of this machine, and records what it
    samples.

    Serves `/v1/chat/completions` (`tools`, `n`, `stream`, `logprobs`, `stop`, …), `/v1/responses`, `/v1/completions` and
    `/v1/models` to clients that have an episode's key. A conversation with the policy as rows to train on::

        with agents.endpoint(engine, parser="hermes") as e, e.session() as episode:
            client = openai.OpenAI(base_url=episode.base_url, api_key=episode.api_key)
            client.chat.completions.create(model=e.model, messages=[{"role": "user", "content": "2 + 2?"}])
            outputs = episode.sequences()

    A stream is sent as its tokens are sampled, where the sampler `Streams` (`engines.local`, `engines.vllm`): as far as later
    tokens cannot change the text; calls come whole. A client that leaves a stream ends its sampling. `top_logprobs` are those of the policy,
    where the sampler gives them. `tool_choice="required"`, or a tool's name, begins the call for the model: these tokens
    belong to the prompt and are not learnt; the rest is the model's, and is a call where it writes one. A field has its
    effect, asks for nothing about the answer (`user`, `metadata`, `store`, …), or is refused by name, as what needs a store
    of earlier responses. `response_format` (`json_object`, `json_schema`) holds the answer to JSON where the sampler can
    (`engines.local` with xgrammar, `engines.vllm`) and there are no tools to call; log-probs remain the policy's. `recipes.grpo(engine, reward, agent=Harness(…))`
    plays whole batches in this way. `parser` finds the calls in the model's text (None: by the chat template); `model`
    is the name in `/v1/models`. The chat template tells the model of a client's `tools`, or with `tools_in="system"`
    the system message does (see `ToolAgent`). Who can reach the server: see `base.loopback.serving`.
    """
    policy = Endpoint(engine, parser, model, tools_in)
    with serving(policy.answer, name="workbench-policy", port=port, refusal=refused, connections=WORKING) as address:
        policy.address = address
        yield policy
