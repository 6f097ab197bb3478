"""Parsers of tool calls in the formats of model families, and which of them a chat template asks for.

Names are those of vLLM's `--tool-call-parser`, beside verl's. The formats are what the families' own chat templates write.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from workbench.agents.parsers import (
    DECODER,
    FindsCalls,
    Found,
    TaggedJson,
    arguments_text,
    as_written,
    calls_in_json,
    dumped,
    loose_json,
    matching_tags,
    next_mark,
    parameters_of,
    register_parser,
    typed,
)
from workbench.agents.protocol import FunctionCall
from workbench.base.errors import SettingError

# --- a name, and arguments in JSON -----------------------------------------------------------------------


class NamedJson(TaggedJson):
    """Base of the parsers of calls whose opening tag holds the tool's name (a group `name`), and JSON its arguments."""

    SECTION: re.Pattern[str] | None = None
    """Tags around all calls that are no content."""

    def extract_tool_calls(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> tuple[str, list[FunctionCall]]:
        """Find the tool calls in a model's text; returns (the text without them and their section's tags, the calls)."""
        content, calls = super().extract_tool_calls(text, tools)
        return self.SECTION.sub("", content) if calls and self.SECTION else content, calls

    def _calls(self, opened: re.Match[str], written: str) -> tuple[FunctionCall, ...]:
        name = next(filter(None, (opened[key] for key in opened.re.groupindex if key.startswith("name"))), "")
        return (FunctionCall(name.strip(), arguments_text(loose_json(written), written), self._id(opened)),)

    def _id(self, opened: re.Match[str]) -> str | None:
        return opened["id"] if "id" in opened.re.groupindex else None


@register_parser("tool_args")
class ToolArgsParser(NamedJson):
    """Parser of `<tool>calculator</tool><args>{"expression": "1 + 1"}</args>`."""

    OPEN, CLOSE = re.compile(r"<tool>\s*(?P<name>[\w.-]{1,64})\s*</tool>\s*<args>"), re.compile("</args>")


@register_parser("kimi", "kimi_k2")
class KimiParser(NamedJson):
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

    def _id(self, opened: re.Match[str]) -> str | None:
        return opened["id"] or None


@register_parser("deepseek_v3", "deepseek_v31", "deepseek_r1")
class DeepSeekParser(NamedJson):
    """Parser of DeepSeek's calls: `function<｜tool▁sep｜>name` and a JSON block (V3, R1), or `name<｜tool▁sep｜>{…}` (V3.1)."""

    OPEN = re.compile(
        r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>(?:[^<\n]{0,64}<｜tool▁sep｜>(?P<name>[^<\n{]{1,64})\n```json\s*"
        r"|(?P<name_31>[^<\n]{1,64})<｜tool▁sep｜>(?=\s*\{))"
    )
    CLOSE = re.compile(r"(?:```\s*)?<｜tool▁call▁end｜>")
    SECTION = re.compile(r"<｜tool▁calls▁end｜>")


@register_parser("gpt_oss", "openai")
class HarmonyParser(NamedJson):
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


@register_parser("mistral")
class MistralParser(NamedJson):
    """Parser of `[TOOL_CALLS]name[ARGS]{…}` (Mistral's tokenizers since v11) and `[TOOL_CALLS][{"name": …, "arguments": …}]`."""

    OPEN = re.compile(
        r"\[TOOL_CALLS\]\s*(?:(?P<name>[\w.-]{1,64})\s*(?:\[CALL_ID\](?P<id>[\w-]{1,64})\s*)?\[ARGS\]|(?=[\[{]))"
    )
    CLOSE, KINDS = re.compile("</s>"), (dict, list)

    def _calls(self, opened: re.Match[str], written: str) -> tuple[FunctionCall, ...]:
        return super()._calls(opened, written) if opened["name"] else calls_in_json(written, many=True)


@register_parser("llama3_json", "llama3", "llama4_json")
class LlamaParser(NamedJson):
    """Parser of Llama 3's calls: `<|python_tag|>{"name": …, "parameters": {…}}` and `<function=name>{…}</function>`.

    A turn that is nothing but such JSON, several calls apart by `;`, is a call without the tag.
    """

    OPEN = re.compile(r"<\|python_tag\|>\s*(?=\{)|<function=(?P<name>[\w.-]{1,64})>")
    CLOSE = re.compile(r"</function>|<\|eom_id\|>")
    _ALONE = re.compile(r'(?:\A|(?<=\})\s*;)\s*(?=\{\s*"(?:name|type)"\s*:)')
    _END = re.compile(r"\s*(?:<\|e(?:om|ot)_id\|>\s*)?(?:;|\Z)")

    def extract_tool_calls(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> tuple[str, list[FunctionCall]]:
        """Find the tool calls in a model's text; returns (the text without them, the calls)."""
        return ("", alone) if (alone := self._whole(text)) else super().extract_tool_calls(text, tools)

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

    def _calls(self, opened: re.Match[str], written: str) -> tuple[FunctionCall, ...]:
        return super()._calls(opened, written) if opened["name"] else calls_in_json(written)


@register_parser("granite", "phi4_mini_json", "jamba", "minimax", "internlm")
class JsonListParser(TaggedJson):
    """Parser of calls as a JSON object or list after a tag: Granite 3, Phi-4 mini, Jamba and MiniMax M1, InternLM 2."""

    OPEN = re.compile(r"(?:<\|tool_call\|>|functools|<tool_calls>|<\|action_start\|>\s*<\|plugin\|>)\s*(?=[\[{])")
    CLOSE, KINDS = re.compile(r"</tool_calls>|<\|action_end\|>"), (dict, list)

    def _calls(self, opened: re.Match[str], written: str) -> tuple[FunctionCall, ...]:
        return calls_in_json(written, many=True)


# --- elements: a name, and a tag for each parameter -----------------------------------------------------


class Elements(FindsCalls):
    """Base of the parsers of calls in which each parameter has tags of its own.

    The outer tag may be missing, and so may a closing tag where the next tag tells where the value ends. A value is text, or
    JSON where the tool's schema has another type than string; tags in it that are closed belong to it. Anything else, and
    the same parameter twice, are arguments that do not parse.
    """

    OUTER: str
    """The name of the tag around a call."""
    FUNCTION: tuple[str, str]
    """Patterns of the tag that opens a call, with its name, and of the one that closes it."""
    PARAMETER: tuple[str, str, str]
    """Patterns of the tag that opens a value, of what stands before it (one of both has the name), and of its closing tag."""
    WRAP = ""
    """What stands around a value."""

    def __init_subclass__(cls) -> None:
        outer, closing = f"<{cls.OUTER}>", f"</{cls.OUTER}>"
        (function, end), (value, before, ended) = cls.FUNCTION, cls.PARAMETER
        opening = function if outer in function else rf"{outer}\s*{function}"
        cls._function = re.compile(function if outer in function else rf"(?:{outer}\s*)?{function}")
        cls._parameter = re.compile(rf"\s*{before}{value}")
        cls._tag = re.compile(f"({value})|{ended}")
        cls._stop = re.compile(rf"{ended}|(?=\s*(?:{before}{value}|{end}|{closing}))|(?={opening})")
        last = rf"(?:\s*{closing})?" if end != closing else ""
        cls._close = re.compile(rf"\s*(?:{end}{last}|{closing}|(?={function}|{outer}|\Z))")
        cls._outer = re.compile(outer)

    _function: re.Pattern[str]
    _parameter: re.Pattern[str]
    _tag: re.Pattern[str]
    _stop: re.Pattern[str]
    _close: re.Pattern[str]
    _outer: re.Pattern[str]

    def _next(self, text: str, place: int, tools: Sequence[Mapping[str, Any]]) -> Found | None:
        while opened := self._function.search(text, place):
            name = opened[1].strip()
            given, place = self._given(text, opened.end(), parameters_of(name, tools).get("properties") or {})
            end = self._close.match(text, place)
            if end and (given or end[0].strip()) and len(dict(given)) == len(given):
                return opened.start(), end.end(), (FunctionCall(name, dumped(dict(given))),)
            if given or self._parameter.match(text, place):
                stop = end.end() if end else next_mark(text, place, self._function)
                return opened.start(), stop, (FunctionCall(name, text[opened.end() : stop].strip()),)
        return None

    def _given(self, text: str, place: int, properties: Mapping[str, Any]) -> tuple[list[tuple[str, Any]], int]:
        """(the parameters from `place` on that are whole, where the last of them ends)."""
        given: list[tuple[str, Any]] = []
        matching: dict[int, re.Match[str]] | None = None
        stop = -1
        while one := self._parameter.match(text, place):
            start = one.end()
            matching = matching_tags(self._tag, text, start) if matching is None else matching
            if (closed := matching.get(start)) is None:
                stop = stop if stop >= start else next_mark(text, start)
                closed = self._stop.search(text, start, stop)
            if closed is None or self._outer.match(text, closed.end()):
                break
            value = text[start : closed.start()].removeprefix(self.WRAP).removesuffix(self.WRAP)
            given.append((one[1].strip(), typed(value, properties.get(one[1].strip(), {}))))
            place = closed.end()
        return given, place


@register_parser("qwen3_coder", "qwen_xml", "step3p5", "mimo")
class Qwen3CoderParser(Elements):
    """Parser of `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>` (Qwen3-Coder)."""

    OUTER, WRAP = "tool_call", "\n"
    FUNCTION = (r"<function=([^>\n]{1,64})>", "</function>")
    PARAMETER = (r"<parameter=([^>\n]{1,128})>", "", "</parameter>")


@register_parser("seed_oss")
class SeedParser(Qwen3CoderParser):
    """Parser of Qwen3-Coder's elements in `<seed:tool_call>`, values without line breaks around them (Seed-OSS)."""

    OUTER, WRAP = "seed:tool_call", ""


@register_parser("glm45", "glm47", "glm4_moe")
class GlmParser(Elements):
    """Parser of `<tool_call>name <arg_key>key</arg_key> <arg_value>value</arg_value></tool_call>` (GLM-4.5 to 4.7)."""

    OUTER = "tool_call"
    FUNCTION = (r"<tool_call>\s*([\w.-]{1,64})(?=\s*(?:<arg_key>|</tool_call>))", "</tool_call>")
    PARAMETER = ("<arg_value>", r"<arg_key>([^<\n]{1,128})</arg_key>\s*", "</arg_value>")


@register_parser("minimax_m2")
class MiniMaxParser(Elements):
    """Parser of `<minimax:tool_call><invoke name="…"><parameter name="key">value</parameter></invoke></minimax:tool_call>`."""

    OUTER = "minimax:tool_call"
    FUNCTION = (r'<invoke name="([^"\n]{1,64})">', "</invoke>")
    PARAMETER = (r'<parameter name="([^"\n]{1,128})">', "", "</parameter>")


@register_parser("deepseek_v32")
class DeepSeekMarkupParser(Elements):
    """Parser of `<｜DSML｜invoke name="…"><｜DSML｜parameter name="key" string="true">value</｜DSML｜parameter>…` (DeepSeek V3.2)."""

    OUTER = "｜DSML｜function_calls"
    FUNCTION = (r'<｜DSML｜invoke name="([^"\n]{1,64})">', "</｜DSML｜invoke>")
    PARAMETER = (
        r'<｜DSML｜parameter name="([^"\n]{1,128})"(?: string="(?:true|false)")?>', "", "</｜DSML｜parameter>",
    )  # fmt: skip


# --- as a program --------------------------------------------------------------------------------------


@register_parser("pythonic", "llama4_pythonic", "olmo3", "gemma3")
class PythonicParser(FindsCalls):
    """Parser of `[name(key="value", other=[1, 2])]`: Llama 3.2 and 4, OLMo 3, Gemma 3's `tool_code` blocks.

    The list stands at the beginning of a line, or between a family's tags. Arguments are keywords with literals (JSON, or
    Python's `True`, `None`, strings in single quotes); others do not parse. Nothing is evaluated.
    """

    _CALL = re.compile(r"\s*([A-Za-z_][\w.]{0,63})\(")
    _OPEN = re.compile(
        r"(?:<\|python_start\|>\s*\[?|<function_calls>\s*|^[ \t]*```tool_code[ \t]*\n|^[ \t]*\[(?=\s*[A-Za-z_][\w.]{0,63}\(\s*(?:\)|\w+\s*=)))"
        rf"(?={_CALL.pattern})",
        re.M,
    )
    _BETWEEN = re.compile(r"\s*[,;\n]")
    _ENDS = re.compile(r"\s*\]?\s*(?:<\|python_end\|>|</function_calls>|```)?")
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
        """(the keyword arguments that begin at `start` as JSON, where their parenthesis ends, or -1 where it does not)."""
        parts, closes = ["{"], [")"]
        for one in self._PART.finditer(text, start):
            _, bracket, word, equals = one.groups()
            if bracket and bracket in "([{":
                closes.append({"(": ")", "[": "]", "{": "}"}[bracket])
            elif bracket:
                if bracket != closes.pop():
                    return "", -1
                if not closes:
                    found = loose_json("".join([*parts, "}"]))
                    return arguments_text(found, text[start : one.start()]), one.end()
            named = bool(word and equals and len(closes) == 1)
            parts.append(f'"{word}":' if named else one[0])
        return "", -1


# --- which of them -----------------------------------------------------------------------------------

_SIGNS: Sequence[tuple[str, str]] = (
    ("<｜DSML｜", "deepseek_v32"),
    ("<｜tool▁call▁begin｜>", "deepseek_v3"),
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("<minimax:tool_call>", "minimax_m2"),
    ("<arg_key>", "glm45"),
    ("<function=", "qwen3_coder"),
    ("to=functions.", "gpt_oss"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|python_start|>", "pythonic"),
    ("<function_calls>", "pythonic"),
    ("<|action_start|>", "internlm"),
    ("functools[", "phi4_mini_json"),
    ("<|tool_call|>", "granite"),
    ("<tool_calls>", "jamba"),
    ("<|python_tag|>", "llama3_json"),
    ('"parameters": dictionary of argument name and its value', "llama3_json"),
    ("<tool_call>", "hermes"),
)
"""What a template writes before a call → the parser; the first that is there."""


def parser_of(template: str | Mapping[str, str] | None) -> str:
    """The name of the parser for the calls that a chat template (or one of several) writes.

    Raises `SettingError` where it writes none, or none that is known.
    """
    texts = list(template.values()) if isinstance(template, Mapping) else [template or ""]
    for sign, name in _SIGNS:
        if any(sign in text for text in texts):
            return name
    what, expected = (
        "the tool agent has tools and no parser",
        "a chat template that writes tool calls in a known format",
    )
    do = "give parser='hermes' or another of agents.parser_names(), a parser of your own, or format='react'"
    found = "one that writes none" if any(texts) else "a tokenizer without a chat template"
    raise SettingError(what, expected=expected, found=found, do=do)
