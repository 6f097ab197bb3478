"""Behind an endpoint in OpenAI's form: how a policy's messages become token ids, its samples messages, and an episode sequences.

Each answer is a node of a tree. A request whose messages go on after an answer is that node's child: its sequence goes on with
the very ids that were sampled, and the template's delta for what is new. Any other request begins a new tree.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from workbench.agents.episode import Episode, Transcript
from workbench.agents.formats import parser_of
from workbench.agents.parsers import REASONING, calls_of, checked_parser, read_json, tool_parser
from workbench.agents.protocol import AgentLoopOutput, FunctionCall, ToolCall, ToolParser
from workbench.agents.tokens import TurnTokens
from workbench.base.errors import SettingError
from workbench.base.seeds import derive
from workbench.engines.http.openai_form import ChatRequest, Refusal
from workbench.engines.protocol import Sample, Sampler, switches_of

Message = Mapping[str, Any]


@dataclass(eq=False)
class Node:
    """One answer of the policy, and what it was given to read since the answer before."""

    parent: Node | None
    heard: tuple[int, ...]
    """Ids of the prompt, or of the template's delta after the parent's answer."""
    new: tuple[Message, ...]
    """The messages that these ids are of."""
    asked: str
    """Name of the messages before the answer (`chain`)."""
    number: int
    """The requests of an episode are numbered as they came; the answers to one share its number."""
    sample: Sample
    message: Message
    """The answer as it was sent: `content`, `tool_calls`, `reasoning_content`."""
    text: str = ""
    """The answer as the model wrote it, without special tokens."""
    delivered: bool = False
    """Whether somebody was there to read it."""

    @property
    def path(self) -> list[Node]:
        """The answers of its sequence, from the first to itself."""
        found: list[Node] = []
        node: Node | None = self
        while node is not None:
            found.append(node)
            node = node.parent
        return found[::-1]

    @property
    def ids(self) -> list[int]:
        """Token ids of its sequence, itself at the end."""
        return [one for node in self.path for one in (*node.heard, *node.sample.ids)]


def chain(messages: Iterable[Message], first: str = "", *, reasoning: bool = False) -> list[str]:
    """The names of a chat's beginnings: the n-th is that of its first n + 1 messages, after what `first` names.

    Equal names are equal chats but for white space around contents, the calls' ids, and how a call's JSON was written; and for
    the reasoning, unless it counts (`reasoning`).
    """
    found: list[str] = []
    name = first
    for one in messages:
        calls = [(call["function"]["name"], _settled(call["function"]["arguments"])) for call in _calls(one)]
        thought = (one.get("reasoning_content") or "").strip() if reasoning else ""
        key = json.dumps([name, one["role"], (one.get("content") or "").strip(), calls, thought])
        name = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
        found.append(name)
    return found


def _calls(message: Message) -> Sequence[Mapping[str, Any]]:
    return message.get("tool_calls") or ()


def _settled(arguments: str) -> str:
    """A call's arguments, written in the one way that equal ones share; as they are, where they are not JSON."""
    try:
        return json.dumps(read_json(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments.strip()


@dataclass
class Recording:
    """The tree of an episode's answers.

    `reasoning`: whether an answer whose reasoning the client left out begins a new sequence; else it goes on with it.
    """

    reasoning: bool = False
    nodes: list[Node] = field(default_factory=list)
    _by_answer: dict[str, Node] = field(default_factory=dict)
    _texts: dict[str, str] = field(default_factory=dict)

    def before(self, messages: Sequence[Message], first: str = "") -> tuple[Node | None, int, str]:
        """(the last answer that the messages go on after, how many of them it is the end of, the name of them all).

        What comes after an answer must be another's: with an assistant's message that was not sampled here it is a new
        sequence.
        """
        names = chain(messages, first, reasoning=self.reasoning)
        for place in range(len(messages) - 1, -1, -1):
            if messages[place]["role"] == "assistant":
                found = self._by_answer.get(names[place]) if place < len(messages) - 1 else None
                return found, place + 1 if found else 0, names[-1]
        return None, 0, names[-1]

    def add(self, nodes: Sequence[Node]) -> None:
        """Append the answers to one request."""
        for node in nodes:
            self.nodes.append(node)
            (name,) = chain([{"role": "assistant", **node.message}], node.asked, reasoning=self.reasoning)
            self._by_answer.setdefault(name, node)
            (own,) = chain([{"role": "assistant", **node.message}])
            self._texts.setdefault(own, node.text)

    def as_written(self, message: Message) -> str | None:
        """What the model wrote where it gave this answer, for templates that write no calls; None where it did not."""
        (own,) = chain([message])
        return self._texts.get(own)

    def leaves(self) -> list[Node]:
        """The last answers of the sequences, in the order in which they were asked for.

        Answers that somebody was there to read count. Of `n` answers to one request those count that were continued, and all
        where none was.
        """
        nodes = sorted((node for node in self.nodes if node.delivered), key=lambda one: one.number)
        continued = {id(node.parent) for node in nodes}
        chosen = {node.number for node in nodes if id(node) in continued}
        return [node for node in nodes if id(node) not in continued and node.number not in chosen]

    def sequences(self, episode: Episode, limit: int, reason: str | None = None, **extra: Any) -> list[AgentLoopOutput]:
        """The episode's sequences; the mask of what several share is 1 in the first of them alone.

        `limit` is the longest response in tokens. `reason` is the finish reason of the last sequence, None: its last answer's.
        """
        leaves, learnt, found = self.leaves(), set[int](), list[AgentLoopOutput]()
        for leaf in leaves:
            path = leaf.path
            said = Transcript(path[0].heard, limit)
            for place, node in enumerate(path):
                if node.parent is not None:
                    text = "\n".join(str(one.get("content") or "") for one in node.new)
                    said.hear("tool" if node.new[-1]["role"] == "tool" else "user", text, node.heard)
                said.say(node.sample, node.text)
                after = path[place + 1].new if place + 1 < len(path) else ()
                said.note(calls=_records(node.message, after))
                if id(node) in learnt:
                    first = said.turns[-1].first
                    said.mask[first:] = [0] * len(node.sample.ids)
                    said.log_probs[first:] = [0.0] * len(node.sample.ids)
                learnt.add(id(node))
            said.reason = reason if reason and leaf is leaves[-1] else leaf.sample.finish_reason
            own = replace(episode, versions=[node.sample.version for node in path])
            found.append(said.output(own, **extra))
        return found


def _records(message: Message, after: Sequence[Message]) -> tuple[ToolCall, ...]:
    """An answer's calls, with the results that the harness gave in the messages after it."""
    calls = [(call["id"], FunctionCall(**call["function"])) for call in _calls(message)]
    answers = [one for one in after if one["role"] == "tool"]
    named = {one.get("tool_call_id"): one for one in answers}
    records = []
    for place, (key, call) in enumerate(calls):
        found = named.get(key) or (answers[place] if len(answers) == len(calls) else None)
        status, text = ("ok", str(found["content"])) if found else ("not run", "")
        records.append(ToolCall(call.name, call.arguments, status, text))
    return tuple(records)


class PolicyTokens:
    """How a sampler's messages become token ids, and its answers messages: one for all episodes of an endpoint."""

    def __init__(self, sampler: Sampler, parser: ToolParser | str | None, tools_in: str = "template") -> None:
        self._tools_in = tools_in
        self.sampler = sampler
        self.tokenizer = sampler.tokenizer
        self._parser = checked_parser(parser, format="function_calling", tools=True)
        self._made: dict[str, tuple[TurnTokens, frozenset[str]]] = {}

    def of(self, tools: Sequence[Mapping[str, Any]]) -> tuple[TurnTokens, frozenset[str]]:
        """(what tokenizes with these tools, the roles whose messages the template can append to a conversation).

        Raises `SettingError` where there are tools, and no parser is known for the template, and `Refusal` where that tells the
        model of none.
        """
        if tools and self._parser is None:
            self._parser = tool_parser(parser_of(self.tokenizer.chat_template))
        key = json.dumps(tools, sort_keys=True)
        if key not in self._made:
            switches = {"tools": tools, "tools_in": self._tools_in, "parser": self._parser, **switches_of(self.sampler)}
            try:
                TurnTokens(self.tokenizer, **switches)
            except SettingError as error:
                raise Refusal(400, str(error), None, "tools") from error
            roles = [role for role in ("user", "tool") if self._appends(role, switches)]
            self._made[key] = TurnTokens(self.tokenizer, roles=roles, **switches), frozenset(roles)
        return self._made[key]

    def _appends(self, role: str, switches: Mapping[str, Any]) -> bool:
        try:
            TurnTokens(self.tokenizer, roles=[role], **switches)
        except SettingError:
            return False
        return True

    def for_template(self, message: Mapping[str, Any], recording: Recording) -> dict[str, Any]:
        """A message as the chat template wants it: arguments of calls as objects; where it writes no calls, as the model
        itself wrote them."""
        if not message.get("tool_calls"):
            return dict(message)
        if "tool_calls" not in str(getattr(self.tokenizer, "chat_template", "")):
            written = recording.as_written(message)
            if written is None:
                why = "an assistant's message has tool_calls that the model did not make, and its chat template writes none"
                raise Refusal(400, why, None, "messages")
            return {"role": "assistant", "content": written}
        calls = [
            {**call, "function": {**call["function"], "arguments": _object(call["function"]["arguments"])}}
            for call in message["tool_calls"]
        ]
        return {**message, "tool_calls": calls}

    def message(self, asked: ChatRequest, tokens: TurnTokens, sample: Sample, seed: int) -> tuple[dict[str, Any], str]:
        """(an answer as a message, the text as the model wrote it)."""
        ids = list(sample.ids)
        written = ids[:-1] if ids and ids[-1] == self.tokenizer.eos_token_id else ids
        # special tokens are kept until all is found, because some models write calls and reasoning with them
        text = self.tokenizer.decode(written, skip_special_tokens=False)
        thought, rest = split_reasoning(text, tokens.reasoning)
        calls = self._calls(asked, tokens, text, cut=sample.finish_reason == "length")
        if calls:
            assert self._parser is not None
            rest = self._parser.extract_tool_calls(rest, asked.tools)[0].strip()
        said: dict[str, Any] = {"content": _before(self._plain(rest), asked.sampling.get("stop", ()))}
        if thought:
            said["reasoning_content"] = self._plain(thought)
        if calls:
            said["content"] = said["content"] or None
            said["tool_calls"] = [
                {
                    "id": call.tool_call_id or f"call_{derive(seed, number):016x}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for number, call in enumerate(calls[: None if asked.parallel else 1])
            ]
        return said, self.tokenizer.decode(ids, skip_special_tokens=True)

    def _calls(self, asked: ChatRequest, tokens: TurnTokens, text: str, *, cut: bool) -> list[FunctionCall]:
        if self._parser is None or not asked.tools or not asked.calls:
            return []
        try:
            return calls_of(self._parser, text, asked.tools, reasoning=tokens.reasoning, cut=cut)
        except Exception:  # noqa: BLE001 - what a model wrote is data, whatever it does to a parser: then it is text
            return []

    def _plain(self, text: str) -> str:
        """A text without special tokens."""
        for token in self.tokenizer.all_special_tokens:
            text = text.replace(token, "")
        return text


def _before(text: str, stops: Sequence[str]) -> str:
    """A text without the stop text that ended it."""
    return next((text[: -len(one)] for one in stops if one and text.endswith(one)), text)


def _object(text: str) -> Any:
    try:
        found = json.loads(text)
    except ValueError:
        return text
    return found if isinstance(found, dict) else text


def split_reasoning(text: str, opened: str = "") -> tuple[str, str]:
    """(the reasoning that a model's text begins with, the rest); `opened` is the tag with which the prompt has begun it."""
    start = (opened + text).lstrip()
    for tag, end in REASONING.items():
        if start.startswith(tag):
            thought, _, rest = start[len(tag) :].partition(end)
            return thought.strip(), rest.lstrip("\n")
    return "", text
