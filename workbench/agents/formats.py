"""Parsers of tool calls in the formats of model families, and which of them a chat template asks for.

Names are those of vLLM's `--tool-call-parser`, beside verl's. The formats are what the families' own chat templates write.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from workbench.agents.parsers import (
    DECODER,
    Found,
    TaggedJson,
    arguments_text,
    as_written,
    behind_reasoning,
    calls_in_json,
    loose_json,
    register_parser,
)
from workbench.agents.protocol import FunctionCall
from workbench.base.errors import SettingError

# --- a name, and arguments in JSON -----------------------------------------------------------------------


@register_parser("tool_args")
class ToolArgsParser(TaggedJson):
    """Parser of `<tool>calculator</tool><args>{"expression": "1 + 1"}</args>`."""

    OPEN, CLOSE = re.compile(r"<tool>\s*(?P<name>[\w.-]{1,64})\s*</tool>\s*<args>"), re.compile("</args>")
    call_form = "<tool>NAME</tool><args>ARGUMENTS</args>"


@register_parser("kimi", "kimi_k2")
class KimiParser(TaggedJson):
    """Parser of `<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{…}<|tool_call_end|>` (Kimi K2).

    What stands before the arguments is the call's `tool_call_id`, with which its answer is given to the chat template.
    """

    OPEN = re.compile(
        r"(?:<\|tool_calls_section_begin\|>\s*)?<\|tool_call_begin\|>\s*"
        r"(?P<id>(?:functions\.)?(?P<name>[^<\n]{0,200}?)(?::\d+)?)\s*<\|tool_call_argument_begin\|>"
    )
    CLOSE = re.compile(r"<\|tool_call_end\|>")
    SECTION = re.compile(r"<\|tool_calls_section_end\|>")

    def extract_tool_calls(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> tuple[str, list[FunctionCall]]:
        """Find the tool calls in a model's text, where it has their section; returns (the text without it, the calls)."""
        return super().extract_tool_calls(text, tools) if "<|tool_calls_section_begin|>" in text else (text, [])


@register_parser("deepseek_v3", "deepseek_v31", "deepseek_r1")
class DeepSeekParser(TaggedJson):
    """Parser of DeepSeek's calls: `function<｜tool▁sep｜>name` and a JSON block (V3, R1), or `name<｜tool▁sep｜>{…}` (V3.1)."""

    OPEN = re.compile(
        r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>(?:[^<\n]{0,64}<｜tool▁sep｜>(?P<name>[^<\n{]{1,64})\n```json\s*"
        r"|(?P<name_31>[^<\n]{1,64})<｜tool▁sep｜>(?=\s*\{))"
    )
    CLOSE = re.compile(r"(?:```\s*)?<｜tool▁call▁end｜>")
    call_form = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nARGUMENTS\n```<｜tool▁call▁end｜>"
    SECTION = re.compile(r"<｜tool▁calls▁end｜>")


@register_parser("gpt_oss", "openai")
class HarmonyParser(TaggedJson):
    """Parser of gpt-oss's harmony format: `<|channel|>commentary to=functions.name <|constrain|>json<|message|>{…}<|call|>`.

    The recipient may stand before the channel. The channel `analysis` is reasoning, and has no calls.
    """

    _TO = r"to=functions\.(?P<{}>[\w.-]{{1,64}})"
    OPEN = re.compile(
        rf"(?:<\|start\|>assistant)?(?:\s*{_TO.format('name')}\s*<\|channel\|>commentary|<\|channel\|>commentary\s+{_TO.format('name_after')})"
        r"[ \w]{0,16}(?:<\|constrain\|>\s*\w{1,16}\s*)?<\|message\|>"
    )
    CLOSE = re.compile(r"<\|call\|>")
    _ANALYSIS = re.compile(r"<\|channel\|>analysis[^<]{0,64}<\|message\|>.*?(?:<\|end\|>|(?=<\|start\|>)|\Z)", re.S)

    def _next(self, text: str, place: int, tools: Sequence[Mapping[str, Any]]) -> Found | None:
        while found := super()._next(text, place, tools):
            thought = self._ANALYSIS.search(text, place, found[0] + 1)
            thought = thought and self._ANALYSIS.match(text, thought.start())
            if thought is None:
                return found
            place = thought.end()
        return None


@register_parser("solar")
class SolarParser(TaggedJson):
    """Parser of `<|tool_call:begin|>id<|tool_call:name|>name<|tool_call:args|>{…}<|tool_call:end|>` (Solar Open)."""

    OPEN = re.compile(
        r"(?:<\|tool_calls\|>\s*)?<\|tool_call:begin\|>(?P<id>[^<\n]{0,64})<\|tool_call:name\|>(?P<name>[^<\n]{1,64})"
        r"<\|tool_call:args\|>"
    )
    CLOSE = re.compile(r"<\|tool_call:end\|>")
    SECTION = re.compile(r"<\|calls\|>")


@register_parser("mistral")
class MistralParser(TaggedJson):
    """Parser of `[TOOL_CALLS]name[ARGS]{…}` (Mistral's tokenizers since v11) and `[TOOL_CALLS][{"name": …, "arguments": …}]`."""

    OPEN = re.compile(
        r"\[TOOL_CALLS\]\s*(?:(?P<name>[\w.-]{1,64})\s*(?:\[CALL_ID\](?P<id>[\w-]{1,64})\s*)?\[ARGS\]|(?=[\[{]))"
    )
    CLOSE, KINDS = re.compile("</s>"), (dict, list)
    call_form = '[TOOL_CALLS][{"name": "NAME", "arguments": ARGUMENTS}]'


@register_parser("llama3_json", "llama3", "llama4_json")
class LlamaParser(TaggedJson):
    """Parser of Llama 3's calls: `<|python_tag|>{"name": …, "parameters": {…}}` and `<function=name>{…}</function>`.

    A turn that is nothing but such JSON, several calls apart by `;`, is a call without the tag.
    """

    OPEN = re.compile(r"<\|python_tag\|>\s*(?=\{)|<function=(?P<name>[\w.-]{1,64})>")
    CLOSE = re.compile(r"</function>|<\|eom_id\|>")
    call_form = '{"name": "NAME", "parameters": ARGUMENTS}'
    _ALONE = re.compile(r'(?:\A|(?<=\})\s*;)\s*(?=\{\s*"(?:name|type)"\s*:)')
    _END = re.compile(r"\s*(?:<\|e(?:om|ot)_id\|>\s*)?(?:;|\Z)")

    def extract_tool_calls(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> tuple[str, list[FunctionCall]]:
        """Find the tool calls in a model's text; returns (the text without them, the calls)."""
        alone = self._whole(behind_reasoning(text))
        return ("", alone) if alone else super().extract_tool_calls(text, tools)

    def _whole(self, text: str) -> list[FunctionCall]:
        """The calls of a text that is nothing else; none where it is anything else."""
        calls: list[FunctionCall] = []
        place = 0
        while place < len(text) and (opened := self._ALONE.match(text, place)):
            try:
                found, end = DECODER.raw_decode(text, opened.end())
            except (ValueError, RecursionError):
                return []
            if not isinstance(found.get("name"), str) or not isinstance(found.get("parameters"), dict):
                return []
            ended = self._END.match(text, end)
            if ended is None:
                return []
            calls += calls_in_json(text[opened.end() : end])
            place = ended.end() - ended[0].endswith(";")
        return calls if place >= len(text) else []


@register_parser(
    "granite", "phi4_mini_json", "jamba", "minimax", "internlm", "nemotron_json", "cohere_command3", "gigachat3"
)
class JsonListParser(TaggedJson):
    """Parser of calls as a JSON list, or as objects one after the other, behind a tag.

    Granite 3, Phi-4 mini, Jamba, MiniMax M1, InternLM 2, Nemotron Nano 2, Command R7B and A, GigaChat 3.
    """

    OPEN = re.compile(
        r"(?:<\|tool_call\|>|functools|<tool_calls>|<TOOLCALL>|<\|START_ACTION\|>|<\|function_call\|>"
        r"|<\|action_start\|>\s*<\|plugin\|>)\s*(?=[\[{])"
    )
    CLOSE = re.compile(r"</tool_calls>|</TOOLCALL>|<\|END_ACTION\|>|<\|action_end\|>")
    KINDS = (dict, list)
    _BETWEEN = re.compile(r"[\s,]*")

    def _body(self, text: str, start: int) -> tuple[str | None, int]:
        """As `TaggedJson._body`; objects one after the other are one list."""
        objects, place = list[str](), start
        with contextlib.suppress(ValueError, RecursionError):
            while text.startswith("{", place):
                end = DECODER.raw_decode(text, place)[1]
                objects.append(text[place:end])
                place = cast(re.Match[str], self._BETWEEN.match(text, end)).end()
        if len(objects) < 2 or text.startswith("{", place):
            return super()._body(text, start)
        closed = self.CLOSE.match(text, place)
        return f"[{','.join(objects)}]", closed.end() if closed else place


@register_parser("apertus")
class ApertusParser(TaggedJson):
    """Parser of `<|tools_prefix|>[{"name": {…}}, …]<|tools_suffix|>` (Apertus)."""

    OPEN, CLOSE = re.compile(r"<\|tools_prefix\|>\s*(?=\[)"), re.compile(r"<\|tools_suffix\|>")
    KINDS = (list,)

    def _calls(self, opened: re.Match[str], written: str) -> tuple[FunctionCall, ...]:
        found = loose_json(written)
        listed = found if isinstance(found, list) else []
        if not listed or not all(isinstance(one, Mapping) and len(one) == 1 for one in listed):
            return (FunctionCall("", as_written(written)),)
        return tuple(
            FunctionCall(name, arguments_text(given, written)) for one in listed for name, given in one.items()
        )


# --- which of them -----------------------------------------------------------------------------------

_SIGNS: Sequence[tuple[str, str]] = (
    ("｜DSML｜", "deepseek_v32"),
    ("<｜tool▁call▁begin｜>", "deepseek_v3"),
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("]<]minimax[>[", "minimax_m3"),
    ("minimax:tool_call", "minimax_m2"),
    ("seed:tool_call", "seed_oss"),
    ("<arg_key{}>", "hy_v3"),
    ("open_tag('call'", "kimi_k3"),
    ("<arg_key>", "glm45"),
    ("<function=example_function_name>{", "llama3_json"),
    ("<function=", "qwen3_coder"),
    ("<|channel|>commentary", "gpt_oss"),
    ("[TOOL_CALLS]", "mistral"),
    ("<start_function_call>", "functiongemma"),
    ("<|tool_call>call:", "gemma4"),
    ("<|tool_call:begin|>", "solar"),
    ("<|python_start|>", "pythonic"),
    ("<function_calls>", "pythonic"),
    ("<|tool_list_start|>", "lfm2"),
    ("<|action_start|>", "internlm"),
    ("functools[", "phi4_mini_json"),
    ("<|tool_call|>", "granite"),
    ("<TOOLCALL>", "nemotron_json"),
    ("<|START_ACTION|>", "cohere_command3"),
    ("<|function_call|>", "gigachat3"),
    ("<|tools_prefix|>", "apertus"),
    ("<tool_calls>", "jamba"),
    ("<|python_tag|>", "llama3_json"),
    ('"parameters": dictionary of argument name and its value', "llama3_json"),
    ("<tool_call>", "hermes"),
)
"""What a template writes before a call, or says of it → the parser; the first that is there."""


def parser_of(template: str | Mapping[str, str] | None) -> str:
    """The name of the parser for the calls that a chat template (or one of several) writes.

    Raises `SettingError` where it writes none, or none that is known.
    """
    texts = list(template.values()) if isinstance(template, Mapping) else [template or ""]
    for sign, name in _SIGNS:
        if any(sign in text for text in texts):
            return name
    what = "the tool agent has tools and no parser"
    expected = "a chat template that writes tool calls in a known format"
    do = "give parser='hermes' or another of agents.parser_names(), a parser of your own, or format='react'"
    found = "one that writes none" if any(texts) else "a tokenizer without a chat template"
    raise SettingError(what, expected=expected, found=found, do=do)
