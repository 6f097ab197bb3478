"""How a policy's messages become token ids, and its samples messages, for endpoints in OpenAI's form."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from workbench.agents.formats import parser_of
from workbench.agents.parsers import REASONING, calls_of, checked_parser, tool_parser
from workbench.agents.protocol import FunctionCall, ToolParser
from workbench.agents.recording import Recording
from workbench.agents.tokens import TurnTokens
from workbench.base.errors import SettingError
from workbench.base.seeds import derive
from workbench.engines.http.openai_form import ChatRequest, Refusal
from workbench.engines.protocol import Sample, Sampler, switches_of


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
