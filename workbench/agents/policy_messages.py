"""How a policy's messages become token ids, and its samples messages, for endpoints in OpenAI's form."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from workbench.agents.formats import parser_of
from workbench.agents.parsers import REASONING, calls_of, checked_parser, tool_parser
from workbench.agents.protocol import ToolParser
from workbench.agents.recording import Recording
from workbench.agents.tokens import TurnTokens
from workbench.base.errors import SettingError
from workbench.base.seeds import derive
from workbench.engines.http.openai_form import ChatRequest, Refusal
from workbench.engines.protocol import Sample, Sampler, switches_of


class PolicyTokens:
    """How a sampler's messages become token ids, and its answers messages: one for all episodes of an endpoint."""

    def __init__(self, sampler: Sampler, parser: ToolParser | str | None) -> None:
        self.sampler = sampler
        self.tokenizer = sampler.tokenizer
        self._parser = checked_parser(parser, format="function_calling", tools=True)
        self._made: dict[str, tuple[TurnTokens, frozenset[str]]] = {}

    def of(self, tools: Sequence[Mapping[str, Any]]) -> tuple[TurnTokens, frozenset[str]]:
        """(what tokenizes with these tools, the roles whose messages the template can append to a conversation).

        Raises `SettingError` where there are tools, and no parser is known for the template.
        """
        if tools and self._parser is None:
            self._parser = tool_parser(parser_of(self.tokenizer.chat_template))
        key = json.dumps(tools, sort_keys=True)
        if key not in self._made:
            switches = {"tools": tools, **switches_of(self.sampler)}
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
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        said: dict[str, Any] = {"content": text}
        if asked.tools and asked.calls and (found := self._calls(asked, tokens, sample, written)):
            said["content"], calls = found
            said["tool_calls"] = [
                {
                    "id": call.tool_call_id or f"call_{derive(seed, number):016x}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for number, call in enumerate(calls[: None if asked.parallel else 1])
            ]
        thought, said["content"] = split_reasoning(said["content"], tokens.reasoning)
        said["content"] = _before(said["content"], asked.sampling.get("stop", ()))
        if thought:
            said["reasoning_content"] = thought
        if said.get("tool_calls"):
            said["content"] = said["content"].strip() or None
        return said, text

    def _calls(
        self, asked: ChatRequest, tokens: TurnTokens, sample: Sample, written: list[int]
    ) -> tuple[str, list[Any]] | None:
        """(the text without its calls, the calls); None where there are none."""
        assert self._parser is not None
        text = self.tokenizer.decode(written, skip_special_tokens=False)
        begun = {"reasoning": tokens.reasoning, "cut": sample.finish_reason == "length"}
        try:
            calls = calls_of(self._parser, text, asked.tools, **begun)
            content = self._parser.extract_tool_calls(text, asked.tools)[0] if calls else ""
        except Exception:  # noqa: BLE001 - what a model wrote is data, whatever it does to a parser: then it is text
            return None
        return (_without(self.tokenizer, content), calls) if calls else None


def _without(tokenizer: Any, text: str) -> str:
    """A text without the tokenizer's special tokens."""
    for token in tokenizer.all_special_tokens:
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


def split_reasoning(text: str, opened: bool) -> tuple[str, str]:
    """(the reasoning that a model's text begins with, the rest); `opened`: the prompt has begun the reasoning."""
    start = text.lstrip()
    for tag, end in REASONING.items():
        inside = start.startswith(tag)
        if inside or (opened and end in text):
            thought, _, rest = (start[len(tag) :] if inside else text).partition(end)
            return thought.strip(), rest.lstrip("\n")
    return (text.strip(), "") if opened else ("", text)
