"""Parsers of tool calls in the formats of model families, and which of them a chat template asks for.

Names are those of vLLM's `--tool-call-parser`, beside verl's. The formats are what the families' own chat templates write.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

from workbench.agents.parsers import (
    AT_LINE,
    DECODER,
    MAX_DEPTH,
    FindsCalls,
    Found,
    TaggedJson,
    arguments_text,
    as_written,
    behind_reasoning,
    calls_in_json,
    dumped,
    kinds_of,
    loose_json,
    matching_tags,
    next_mark,
    parameters_of,
    register_parser,
    typed,
    unescaped,
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

    The text before the arguments is the call's `tool_call_id`, with which its answer is passed to the chat template.
    """

    OPEN = re.compile(
        r"(?:<\|tool_calls_section_begin\|>\s*)?<\|tool_call_begin\|>\s*"
        r"(?P<id>(?:functions\.)?(?P<name>[^<\n]{0,200}?)(?::\d+)?)\s*<\|tool_call_argument_begin\|>"
    )
    CLOSE = re.compile(r"<\|tool_call_end\|>")
    SECTION = re.compile(r"<\|tool_calls_section_end\|>")

    def extract_tool_calls(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> tuple[str, list[FunctionCall]]:
        """Find the tool calls in a model's text, if it has a section of calls; returns (the text without the section,
        the calls).
        """
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
    """Parser of gpt-oss's harmony format: `<|channel|>commentary to=functions.name
    <|constrain|>json<|message|>{…}<|call|>`.

    The recipient (`to=…`) may stand before the channel. The channel `analysis` is reasoning, in which no calls are
    read.
    """

    _TO = r"to=functions\.(?P<{}>[\w.-]{{1,64}})"
    OPEN = re.compile(
        rf"(?:<\|start\|>assistant)?(?:\s*{_TO.format('name')}\s*<\|channel\|>commentary|<\|channel\|>commentary\s+{_TO.format('name_after')})"
        r"[ \w]{0,16}(?:<\|constrain\|>\s*\w{1,16}\s*)?<\|message\|>"
    )
    CLOSE = re.compile(r"<\|call\|>")
    _ANALYSIS = re.compile(r"<\|channel\|>analysis[^<]{0,64}<\|message\|>.*?(?:<\|end\|>|(?=<\|start\|>)|\Z)", re.S)

    def _next(self, text: str, place: int, tools: Sequence[Mapping[str, Any]]) -> Found | None:
        while call := super()._next(text, place, tools):
            thought = self._ANALYSIS.search(text, place, call[0] + 1)
            thought = thought and self._ANALYSIS.match(text, thought.start())
            if thought is None:
                return call
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

    A turn that consists of such JSON alone is a call without the tag; `;` separates several calls.
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
        """Return the calls of a text that consists of calls alone; [] for any other text."""
        calls: list[FunctionCall] = []
        place = 0
        while place < len(text) and (opened := self._ALONE.match(text, place)):
            try:
                record, end = DECODER.raw_decode(text, opened.end())
            except (ValueError, RecursionError):
                return []
            if not isinstance(record.get("name"), str) or not isinstance(record.get("parameters"), dict):
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
    """Parser of calls as a JSON list, or as several JSON objects in a row, after an opening tag.

    Formats of Granite 3, Phi-4 mini, Jamba, MiniMax M1, InternLM 2, Nemotron Nano 2, Command R7B and A, GigaChat 3.
    """

    OPEN = re.compile(
        r"(?:<\|tool_call\|>|functools|<tool_calls>|<TOOLCALL>|<\|START_ACTION\|>|<\|function_call\|>"
        r"|<\|action_start\|>\s*<\|plugin\|>)\s*(?=[\[{])"
    )
    CLOSE = re.compile(r"</tool_calls>|</TOOLCALL>|<\|END_ACTION\|>|<\|action_end\|>")
    KINDS = (dict, list)
    _BETWEEN = re.compile(r"[\s,]*")

    def _body(self, text: str, start: int) -> tuple[str | None, int]:
        """Find the JSON between the tags, as `TaggedJson._body` does, and join several objects in a row to one list."""
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
        value = loose_json(written)
        listed = value if isinstance(value, list) else []
        if not listed or not all(isinstance(entry, Mapping) and len(entry) == 1 for entry in listed):
            return (FunctionCall("", as_written(written)),)
        return tuple(
            FunctionCall(name, arguments_text(values, written)) for entry in listed for name, values in entry.items()
        )


# --- elements: a name, and a tag for each parameter -----------------------------------------------------


PYTHON_WORDS = MappingProxyType({"True": "true", "False": "false", "None": "null"})
_NO_TEXT = {"type": ["number", "boolean", "null", "array", "object"]}


class ElementsParser(FindsCalls):
    """Base of the parsers of calls in which each parameter has tags of its own.

    The outer tag may be missing, and so may a closing tag where the next tag shows where the value ends. A value is
    text, or JSON where the tool's schema has another type than string; complete pairs of tags inside a value belong to
    it. Anything else, and the same parameter twice, become arguments that do not parse.
    """

    OUTER: str
    """The name of the tag around a call."""
    FUNCTION: tuple[str, str]
    """Patterns of the tag that opens a call, with its name, and of the one that closes it."""
    PARAMETER: tuple[str, str, str]
    """Patterns of the tag that opens a value, of what stands before it (one of both has the name), and of its closing tag."""
    WRAP = ""
    """What stands around a value."""
    TAGS = ("<{}>", "</{}>")
    """Patterns of the outer tag that opens and of the one that closes."""

    def __init_subclass__(cls) -> None:
        outer, closing = (tag.format(cls.OUTER) for tag in cls.TAGS)
        (function, end), (value, before, ended) = cls.FUNCTION, cls.PARAMETER
        opening = function if outer in function else rf"{outer}\s*{function}"
        cls._function = re.compile(function if outer in function else rf"(?:{outer}\s*)?{function}")
        cls._parameter = re.compile(rf"\s*{before}{value}")
        cls._tag = re.compile(f"({value})|{ended}")
        cls._stop = re.compile(rf"{ended}|(?=\s*(?:{before}{value}|{end}|{closing}))|(?={opening})")
        last = rf"(?:\s*{closing})?" if end != closing else ""
        cls._close = re.compile(rf"\s*(?:{end}{last}|{closing}|(?={function}|{outer}|\Z))")
        cls._outer, cls._ended = re.compile(outer), re.compile(rf"\s*{ended}")

    _function: re.Pattern[str]
    _parameter: re.Pattern[str]
    _tag: re.Pattern[str]
    _stop: re.Pattern[str]
    _close: re.Pattern[str]
    _outer: re.Pattern[str]
    _ended: re.Pattern[str]

    def _next(self, text: str, place: int, tools: Sequence[Mapping[str, Any]]) -> Found | None:
        while opened := self._function.search(text, place):
            name = opened[1].strip()
            arguments, place = self._given(text, opened.end(), parameters_of(name, tools).get("properties") or {})
            end = self._close.match(text, place)
            if end and (arguments or end[0].strip()) and len(dict(arguments)) == len(arguments):
                return opened.start(), end.end(), (FunctionCall(name, dumped(dict(arguments))),)
            if arguments or self._parameter.match(text, place):
                stop = end.end() if end else next_mark(text, place, self._function)
                return opened.start(), stop, (FunctionCall(name, text[opened.end() : stop].strip()),)
        return None

    def _given(self, text: str, place: int, properties: Mapping[str, Any]) -> tuple[list[tuple[str, Any]], int]:
        """Read the parameters from `place` on: ([(name, value), …] of those that are complete, where the last of them
        ends)."""
        arguments: list[tuple[str, Any]] = []
        matching: dict[int, re.Match[str]] | None = None
        stop = -1
        while match := self._parameter.match(text, place):
            start, schema = match.end(), properties.get(match[1].strip(), {})
            closed = self._behind_json(text, start, schema)
            if closed is None:
                matching = matching_tags(self._tag, text, start) if matching is None else matching
                closed = matching.get(start)
            if closed is None:
                stop = stop if stop >= start else next_mark(text, start)
                closed = self._stop.search(text, start, stop)
            if closed is None or self._outer.match(text, closed.end()):
                break
            value = text[start : closed.start()].removeprefix(self.WRAP).removesuffix(self.WRAP)
            arguments.append((match[1].strip(), self._typed(value, match, schema)))
            place = closed.end()
        return arguments, place

    def _behind_json(self, text: str, start: int, schema: Mapping[str, Any]) -> re.Match[str] | None:
        """Find the tag that closes a list or an object, whatever tags its strings contain; None where the schema has
        another type."""
        if not (kinds := kinds_of(schema)) or not kinds <= {"array", "object"}:
            return None
        with contextlib.suppress(ValueError, RecursionError):
            return self._ended.match(text, DECODER.raw_decode(text, start + text.startswith("\n", start))[1])
        return None

    def _typed(self, value: str, opened: re.Match[str], schema: Mapping[str, Any]) -> Any:
        """Convert a parameter's text to its value: as its opening tag says (group `text` of the match), or else as the
        schema does."""
        kind = opened["text"] if "text" in opened.re.groupindex else None
        return value if kind in ("true", "string") else typed(value, schema if kind is None else _NO_TEXT)


@register_parser("qwen3_coder", "qwen_xml", "step3p5", "mimo")
class Qwen3CoderParser(ElementsParser):
    """Parser of `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>` (Qwen3-Coder)."""

    OUTER, WRAP = "tool_call", "\n"
    FUNCTION = (r"<function=([^<>\n]{1,64})>", "</function>")
    PARAMETER = (r"<parameter=([^<>\n]{1,128})>", "", "</parameter>")


@register_parser("seed_oss")
class SeedParser(Qwen3CoderParser):
    """Parser of Qwen3-Coder's elements in `<seed:tool_call>`, values without line breaks around them (Seed-OSS)."""

    OUTER, WRAP = "seed:tool_call", ""


@register_parser("glm45", "glm47", "glm4_moe")
class GlmParser(ElementsParser):
    """Parser of `<tool_call>name <arg_key>key</arg_key> <arg_value>value</arg_value></tool_call>` (GLM-4.5 to 4.7)."""

    OUTER = "tool_call"
    FUNCTION = (r"<tool_call>\s*([\w.-]{1,64})(?=\s*(?:<arg_key>|</tool_call>))", "</tool_call>")
    PARAMETER = ("<arg_value>", r"<arg_key>([^<\n]{1,128})</arg_key>\s*", "</arg_value>")


@register_parser("minimax_m2")
class MiniMaxParser(ElementsParser):
    """Parser of `<minimax:tool_call><invoke name="…"><parameter name="key">value</parameter></invoke></minimax:tool_call>`."""

    OUTER = "minimax:tool_call"
    FUNCTION = (r'<invoke name="([^"\n]{1,64})">', "</invoke>")
    PARAMETER = (r'<parameter name="([^"\n]{1,128})">', "", "</parameter>")


@register_parser("deepseek_v32", "deepseek_v4")
class DeepSeekMarkupParser(ElementsParser):
    """Parser of `<｜DSML｜invoke name="…"><｜DSML｜parameter name="key" string="true">value</｜DSML｜parameter>…` (DeepSeek V3.2, V4)."""

    OUTER = "｜DSML｜(?:function|tool)_calls"
    FUNCTION = (r'<｜DSML｜invoke name="([^"\n]{1,64})">', "</｜DSML｜invoke>")
    PARAMETER = (
        r'<｜DSML｜parameter name="([^"\n]{1,128})"(?: string="(?P<text>true|false)")?>', "", "</｜DSML｜parameter>",
    )  # fmt: skip


@register_parser("kimi_k3")
class KimiMarkupParser(ElementsParser):
    """Parser of `<|open|>call tool="…" index="1"<|sep|><|open|>argument key="…" type="string"<|sep|>value<|close|>argument<|sep|>…`."""

    OUTER, TAGS = "tools", (r"<\|open\|>{}<\|sep\|>", r"<\|close\|>{}<\|sep\|>")
    FUNCTION = (r'<\|open\|>call tool="([^"\n]{1,64})"[^<\n]{0,64}<\|sep\|>', r"<\|close\|>call<\|sep\|>")
    PARAMETER = (
        r'<\|open\|>argument key="([^"\n]{1,128})" type="(?P<text>\w{1,16})"<\|sep\|>', "", r"<\|close\|>argument<\|sep\|>",
    )  # fmt: skip


@register_parser("hy_v3")
class HunyuanParser(ElementsParser):
    """Parser of `<tool_call:x>name<tool_sep:x><arg_key:x>key</arg_key:x><arg_value:x>value</arg_value:x>…`, with any
    suffix x (Hunyuan 3)."""

    OUTER = r"tool_calls:\w{1,16}"
    FUNCTION = (r"<tool_call:\w{1,16}>\s*([\w.-]{1,64})\s*<tool_sep:\w{1,16}>", r"</tool_call:\w{1,16}>")
    PARAMETER = (
        r"<arg_value:\w{1,16}>", r"<arg_key:\w{1,16}>([^<\n]{1,128})</arg_key:\w{1,16}>\s*", r"</arg_value:\w{1,16}>",
    )  # fmt: skip


@register_parser("minimax_m3")
class MiniMaxM3Parser(FindsCalls):
    """Parser of MiniMax M3's elements: `<invoke name="…">`, in it `<key>value</key>`, lists of `<item>`, and nested
    objects.

    `]<]minimax[>[` stands before every tag. A value is read as the type that the tool's schema gives it.
    """

    _TAG = re.compile(r"\]<\]minimax\[>\[<(/?)([^<>\n]{1,128})>")
    _PAIR = re.compile(r"(\]<\]minimax\[>\[<[^/<>\n][^<>\n]{0,127}>)|\]<\]minimax\[>\[</[^<>\n]{1,128}>")
    _OPEN = re.compile(r'(?:\]<\]minimax\[>\[<tool_call>\s*)?\]<\]minimax\[>\[<invoke name="([^"<>\n]{1,64})">')
    _CLOSE = re.compile(r"(?:\s*\]<\]minimax\[>\[</tool_call>)?")

    def _next(self, text: str, place: int, tools: Sequence[Mapping[str, Any]]) -> Found | None:
        opened = self._OPEN.search(text, place)
        if opened is None:
            return None
        schema = {"type": "object", **parameters_of(opened[1], tools)}
        with contextlib.suppress(ValueError):
            arguments, end = self._value(text, opened.end(), "invoke", schema, 0)
            end = cast(re.Match[str], self._CLOSE.match(text, end)).end()
            return opened.start(), end, (FunctionCall(opened[1], dumped(arguments)),)
        stop = next_mark(text, opened.end(), self._OPEN)
        return opened.start(), stop, (FunctionCall(opened[1], text[opened.end() : stop].strip()),)

    def _value(self, text: str, place: int, name: str, schema: Mapping[str, Any], depth: int) -> tuple[Any, int]:
        """Read the value up to the tag that closes `name`: (the value, where that tag ends). Raises `ValueError` where
        no tag closes it."""
        kinds, inside, start = kinds_of(schema), list[tuple[str, Any]](), place
        if kinds == {"string"} and (closed := matching_tags(self._PAIR, text, place).get(place)):
            return text[start : closed.start()], closed.end()
        while (tag := self._TAG.search(text, place)) and not tag[1] and depth <= MAX_DEPTH:
            inner = schema.get("items") if "array" in kinds else (schema.get("properties") or {}).get(tag[2])
            one, place = self._value(text, tag.end(), tag[2], inner or {}, depth + 1)
            inside.append((tag[2], one))
        if tag is None or (tag[1], tag[2]) != ("/", name):
            raise ValueError(f"the element {name!r} has no closing tag")
        return self._made(inside, text[start : tag.start()], schema), tag.end()

    def _made(self, inside: Sequence[tuple[str, Any]], text: str, schema: Mapping[str, Any]) -> Any:
        """Build a list, an object or a plain value of the elements `inside`, or of the text. Raises `ValueError` for a
        name twice."""
        kinds, names = kinds_of(schema), {name for name, _ in inside}
        if "array" in kinds or (names == {"item"} and "object" not in kinds):
            return [one for _, one in inside]
        if len(names) < len(inside):
            raise ValueError("the element has two parameters with the same name")
        return dict(inside) if inside or "object" in kinds else typed(text, schema)


# --- Gemma's braces ------------------------------------------------------------------------------------


@register_parser("functiongemma", "gemma4")
class GemmaParser(FindsCalls):
    """Parser of `<start_function_call>call:name{key:<escape>text<escape>,other:[1]}<end_function_call>`
    (FunctionGemma).

    Gemma 4 writes `<|tool_call>` and `<tool_call|>` around a call, and `<|"|>` around texts.
    """

    _OPEN = re.compile(r"(?:<start_function_call>|<\|tool_call>)\s*call:\s*([\w.-]{1,64})\s*\{")
    _CLOSE = re.compile(r"\s*(?:<end_function_call>|<tool_call\|>)?")
    # a call in a text belongs to it
    _CALL = r"(?:<start_function_call>call:.*?<end_function_call>|<\|tool_call>call:.*?<tool_call\|>)"
    _QUOTED = rf"""(<escape>|<\|"\|>)((?>{_CALL}|(?!\1).)*+)\1"""
    _KEY = re.compile(rf"""\s*(?:{_QUOTED}|"?([^\s"<:{{}}\[\],][^"<:{{}}\[\],]{{0,127}}?)"?)\s*:""", re.S)
    _PART = re.compile(rf"""\s*(?:{_QUOTED}|([{{}}\[\],])|("(?:[^"\\]|\\.)*")|([^\s"<{{}}\[\],]{{1,64}}))\s*""", re.S)

    def _next(self, text: str, place: int, tools: Sequence[Mapping[str, Any]]) -> Found | None:
        opened = self._OPEN.search(text, place)
        if opened is None:
            return None
        written, end = self._json(text, opened.end())
        if end < 0:  # cut short, or no such arguments
            stop = next_mark(text, opened.end(), self._OPEN)
            return opened.start(), stop, (FunctionCall(opened[1], as_written(text[opened.end() : stop])),)
        arguments = arguments_text(loose_json(written), text[opened.end() : end - 1])
        stop = cast(re.Match[str], self._CLOSE.match(text, end)).end()
        return opened.start(), stop, (FunctionCall(opened[1], arguments),)

    def _json(self, text: str, place: int) -> tuple[str, int]:
        """Convert the arguments that begin at `place` to JSON: (the JSON text, where their brace ends, or -1 where it
        does not end)."""
        parts, closes, named, value = ["{"], ["}"], True, False
        while closes:
            if named and (key := self._KEY.match(text, place)):
                parts.append(f"{dumped(''.join(filter(None, key.group(2, 3))))}:")
                place, named = key.end(), False
                continue
            part = self._PART.match(text, place)
            sign = part[3] if part else None
            ends = sign in ("}", "]")
            if part is None or (value and sign != "," and not ends) or (ends and sign != closes.pop()):
                return "", -1
            closes += {"{": "}", "[": "]"}.get(sign or "", "")
            place = part.end() if closes else part.end(3)
            named, value = sign in ("{", ",") and closes[-1] == "}", sign not in ("{", "[", ",")
            parts.append(self._sound(part))
        return "".join(parts), place

    @staticmethod
    def _sound(part: re.Match[str]) -> str:
        """Write one part of the arguments as JSON: a quoted text, a punctuation sign, a JSON string or a word."""
        quote, string, sign, sound, word = part.groups()
        return dumped(string) if quote else sign or sound or PYTHON_WORDS.get(word, word)


# --- as a program --------------------------------------------------------------------------------------


@register_parser("pythonic", "llama4_pythonic", "olmo3", "lfm2")
class PythonicParser(FindsCalls):
    """Parser of `[name(key="value", other=[1, 2])]`: Llama 3.2 and 4, OLMo 3, LFM 2, and `tool_code` blocks.

    The list stands at the beginning of a line, or between a family's tags. Arguments are keywords with literals: JSON,
    or Python's `True`, `None` and strings in single quotes. Other arguments do not parse. Nothing is evaluated.
    """

    _CALL = re.compile(r"\s*([A-Za-z_][\w.]{0,63})\(")
    _OPEN = re.compile(
        rf"(?:<\|(?:python|tool_call)_start\|>\s*\[?|<function_calls>\s*|{AT_LINE}```tool_code[ \t]*\n"
        rf"|{AT_LINE}\[(?=\s*[A-Za-z_][\w.]{{0,63}}\(\s*(?:\)|\w+\s*=)))(?={_CALL.pattern})",
        re.M,
    )
    _BETWEEN = re.compile(r"\s*[,;\n]")
    _ENDS = re.compile(r"\s*\]?\s*(?:<\|(?:python|tool_call)_end\|>|</function_calls>|```)?")
    _PART = re.compile(
        r"""("(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')|([()\[\]{}"'])|([A-Za-z_]\w*)(\s*=(?!=))?|.""", re.S
    )

    def _next(self, text: str, place: int, tools: Sequence[Mapping[str, Any]]) -> Found | None:
        while opened := self._OPEN.search(text, place):
            place = opened.end()
            calls: list[FunctionCall] = []
            while called := self._CALL.match(text, place):
                written, end = self._argument_text(text, called.end())
                if end < 0:  # the list is cut short
                    stop = next_mark(text, called.end(), self._OPEN)
                    calls.append(FunctionCall(called[1], as_written(text[called.end() : stop])))
                    return opened.start(), stop, tuple(calls)
                calls.append(FunctionCall(called[1], written))
                place = end
                if comma := self._BETWEEN.match(text, place):
                    place = comma.end()
            if calls:
                return opened.start(), cast(re.Match[str], self._ENDS.match(text, place)).end(), tuple(calls)
        return None

    def _argument_text(self, text: str, start: int) -> tuple[str, int]:
        """Convert the keyword arguments from `start` to JSON: (the JSON text, where their parenthesis ends, or -1 where
        it does not end)."""
        parts, closes = ["{"], [")"]
        for part in self._PART.finditer(text, start):
            string, bracket, word, equals = part.groups()
            if bracket and bracket in "([{":
                closes.append({"(": ")", "[": "]", "{": "}"}[bracket])
            elif bracket:
                if bracket != closes.pop():
                    return "", -1
                if not closes:
                    arguments = loose_json("".join([*parts, "}"]))
                    return arguments_text(arguments, text[start : part.start()]), part.end()
            if word and equals and len(closes) == 1:
                parts.append(f'"{word}":')
            elif string and string[0] == "'":
                parts.append(dumped(unescaped(string[1:-1])))
            else:
                parts.append(PYTHON_WORDS.get(part[0], part[0]))
        return "", -1


@register_parser("gemma3")
class Gemma3Parser(PythonicParser):
    """Parser of Python calls in a block of `tool_code` or `python`, each alone or inside `print(…)` (Gemma 3)."""

    _OPEN = re.compile(
        rf"{AT_LINE}```(?:tool_code|python|py)?[ \t]*\n\s*\[?\s*(?:print\()?(?=[A-Za-z_][\w.]{{0,63}}\(\s*(?:\)|\w+\s*=))"
        rf"|{PythonicParser._OPEN.pattern}",
        re.M,
    )
    _BETWEEN = re.compile(r"\)?\s*[,;\n]\s*(?:print\()?")
    _ENDS = re.compile(rf"\)?{PythonicParser._ENDS.pattern}")


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
    """Return the name of the parser for the calls that a chat template (or one of several templates) writes.

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
