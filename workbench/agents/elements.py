"""Parsers of tool calls whose arguments are written one by one: in tags of their own, in Gemma's braces, or as a program's."""

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
    arguments_text,
    as_written,
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

# --- elements: a name, and a tag for each parameter -----------------------------------------------------


PYTHON_WORDS = MappingProxyType({"True": "true", "False": "false", "None": "null"})
_NO_TEXT = {"type": ["number", "boolean", "null", "array", "object"]}


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
            start, schema = one.end(), properties.get(one[1].strip(), {})
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
            given.append((one[1].strip(), self._typed(value, one, schema)))
            place = closed.end()
        return given, place

    def _behind_json(self, text: str, start: int, schema: Mapping[str, Any]) -> re.Match[str] | None:
        """The tag that closes a list or an object, as the schema has it, whatever tags its strings have; None for others."""
        if not (kinds := kinds_of(schema)) or not kinds <= {"array", "object"}:
            return None
        with contextlib.suppress(ValueError, RecursionError):
            return self._ended.match(text, DECODER.raw_decode(text, start + text.startswith("\n", start))[1])
        return None

    def _typed(self, value: str, opened: re.Match[str], schema: Mapping[str, Any]) -> Any:
        """A value as its opening tag says (a group `text`), or else as the schema does."""
        told = opened["text"] if "text" in opened.re.groupindex else None
        return value if told in ("true", "string") else typed(value, schema if told is None else _NO_TEXT)


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


@register_parser("deepseek_v32", "deepseek_v4")
class DeepSeekMarkupParser(Elements):
    """Parser of `<｜DSML｜invoke name="…"><｜DSML｜parameter name="key" string="true">value</｜DSML｜parameter>…` (DeepSeek V3.2, V4)."""

    OUTER = "｜DSML｜(?:function|tool)_calls"
    FUNCTION = (r'<｜DSML｜invoke name="([^"\n]{1,64})">', "</｜DSML｜invoke>")
    PARAMETER = (
        r'<｜DSML｜parameter name="([^"\n]{1,128})"(?: string="(?P<text>true|false)")?>', "", "</｜DSML｜parameter>",
    )  # fmt: skip


@register_parser("kimi_k3")
class KimiMarkupParser(Elements):
    """Parser of `<|open|>call tool="…" index="1"<|sep|><|open|>argument key="…" type="string"<|sep|>value<|close|>argument<|sep|>…`."""

    OUTER, TAGS = "tools", (r"<\|open\|>{}<\|sep\|>", r"<\|close\|>{}<\|sep\|>")
    FUNCTION = (r'<\|open\|>call tool="([^"\n]{1,64})"[^<\n]{0,64}<\|sep\|>', r"<\|close\|>call<\|sep\|>")
    PARAMETER = (
        r'<\|open\|>argument key="([^"\n]{1,128})" type="(?P<text>\w{1,16})"<\|sep\|>', "", r"<\|close\|>argument<\|sep\|>",
    )  # fmt: skip


@register_parser("hy_v3")
class HunyuanParser(Elements):
    """Parser of GLM's elements with `<tool_sep:opensource>` behind the name; a suffix is part of each tag (Hunyuan 3)."""

    OUTER = r"tool_calls:\w{1,16}"
    FUNCTION = (r"<tool_call:\w{1,16}>\s*([\w.-]{1,64})\s*<tool_sep:\w{1,16}>", r"</tool_call:\w{1,16}>")
    PARAMETER = (
        r"<arg_value:\w{1,16}>", r"<arg_key:\w{1,16}>([^<\n]{1,128})</arg_key:\w{1,16}>\s*", r"</arg_value:\w{1,16}>",
    )  # fmt: skip


@register_parser("minimax_m3")
class MiniMaxM3Parser(FindsCalls):
    """Parser of MiniMax M3's elements: `<invoke name="…">`, in it `<key>value</key>`, lists of `<item>`, objects in objects.

    `]<]minimax[>[` stands before every tag. A value is read as the tool's schema has it.
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
            given, end = self._value(text, opened.end(), "invoke", schema, 0)
            end = cast(re.Match[str], self._CLOSE.match(text, end)).end()
            return opened.start(), end, (FunctionCall(opened[1], dumped(given)),)
        stop = next_mark(text, opened.end(), self._OPEN)
        return opened.start(), stop, (FunctionCall(opened[1], text[opened.end() : stop].strip()),)

    def _value(self, text: str, place: int, name: str, schema: Mapping[str, Any], depth: int) -> tuple[Any, int]:
        """(what stands before the tag that closes `name`, where that tag ends). Raises `ValueError` where none closes it."""
        kinds, inside, start = kinds_of(schema), list[tuple[str, Any]](), place
        if kinds == {"string"} and (closed := matching_tags(self._PAIR, text, place).get(place)):
            return text[start : closed.start()], closed.end()
        while (tag := self._TAG.search(text, place)) and not tag[1] and depth <= MAX_DEPTH:
            inner = schema.get("items") if "array" in kinds else (schema.get("properties") or {}).get(tag[2])
            one, place = self._value(text, tag.end(), tag[2], inner or {}, depth + 1)
            inside.append((tag[2], one))
        if tag is None or (tag[1], tag[2]) != ("/", name):
            raise ValueError(f"{name!r} is not closed")
        return self._made(inside, text[start : tag.start()], schema), tag.end()

    def _made(self, inside: Sequence[tuple[str, Any]], text: str, schema: Mapping[str, Any]) -> Any:
        """A list, an object or a plain value, of the elements in it or of its text. Raises `ValueError` for a name twice."""
        kinds, names = kinds_of(schema), {name for name, _ in inside}
        if "array" in kinds or (names == {"item"} and "object" not in kinds):
            return [one for _, one in inside]
        if len(names) < len(inside):
            raise ValueError("a name is given twice")
        return dict(inside) if inside or "object" in kinds else typed(text, schema)


# --- Gemma's braces ------------------------------------------------------------------------------------


@register_parser("functiongemma", "gemma4")
class GemmaParser(FindsCalls):
    """Parser of `<start_function_call>call:name{key:<escape>text<escape>,other:[1]}<end_function_call>` (FunctionGemma).

    Gemma 4 has `<|tool_call>` and `<tool_call|>` around it, and `<|"|>` around texts.
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
        given = arguments_text(loose_json(written), text[opened.end() : end - 1])
        return (
            opened.start(),
            cast(re.Match[str], self._CLOSE.match(text, end)).end(),
            (FunctionCall(opened[1], given),),
        )

    def _json(self, text: str, place: int) -> tuple[str, int]:
        """(the arguments that begin at `place` as JSON, where their brace ends, or -1 where it does not)."""
        parts, closes, named, value = ["{"], ["}"], True, False
        while closes:
            if named and (key := self._KEY.match(text, place)):
                parts.append(f"{dumped(''.join(filter(None, key.group(2, 3))))}:")
                place, named = key.end(), False
                continue
            one = self._PART.match(text, place)
            sign = one[3] if one else None
            ends = sign in ("}", "]")
            if one is None or (value and sign != "," and not ends) or (ends and sign != closes.pop()):
                return "", -1
            closes += {"{": "}", "[": "]"}.get(sign or "", "")
            place = one.end() if closes else one.end(3)
            named, value = sign in ("{", ",") and closes[-1] == "}", sign not in ("{", "[", ",")
            parts.append(self._sound(one))
        return "".join(parts), place

    @staticmethod
    def _sound(part: re.Match[str]) -> str:
        """A text, a sign, JSON's own text or a word, as JSON."""
        quote, string, sign, sound, word = part.groups()
        return dumped(string) if quote else sign or sound or PYTHON_WORDS.get(word, word)


# --- as a program --------------------------------------------------------------------------------------


@register_parser("pythonic", "llama4_pythonic", "olmo3", "lfm2")
class PythonicParser(FindsCalls):
    """Parser of `[name(key="value", other=[1, 2])]`: Llama 3.2 and 4, OLMo 3, LFM 2, and `tool_code` blocks.

    The list stands at the beginning of a line, or between a family's tags. Arguments are keywords with literals (JSON, or
    Python's `True`, `None`, strings in single quotes); others do not parse. Nothing is evaluated.
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
        """(the keyword arguments that begin at `start` as JSON, where their parenthesis ends, or -1 where it does not)."""
        parts, closes = ["{"], [")"]
        for one in self._PART.finditer(text, start):
            string, bracket, word, equals = one.groups()
            if bracket and bracket in "([{":
                closes.append({"(": ")", "[": "]", "{": "}"}[bracket])
            elif bracket:
                if bracket != closes.pop():
                    return "", -1
                if not closes:
                    found = loose_json("".join([*parts, "}"]))
                    return arguments_text(found, text[start : one.start()]), one.end()
            if word and equals and len(closes) == 1:
                parts.append(f'"{word}":')
            elif string and string[0] == "'":
                parts.append(dumped(unescaped(string[1:-1])))
            else:
                parts.append(PYTHON_WORDS.get(one[0], one[0]))
        return "", -1


@register_parser("gemma3")
class Gemma3Parser(PythonicParser):
    """Parser of a program's calls in a block of `tool_code` or `python`, each alone or in `print(…)` (Gemma 3)."""

    _OPEN = re.compile(
        rf"{AT_LINE}```(?:tool_code|python|py)?[ \t]*\n\s*\[?\s*(?:print\()?(?=[A-Za-z_][\w.]{{0,63}}\(\s*(?:\)|\w+\s*=))"
        rf"|{PythonicParser._OPEN.pattern}",
        re.M,
    )
    _BETWEEN = re.compile(r"\)?\s*[,;\n]\s*(?:print\()?")
    _ENDS = re.compile(rf"\)?{PythonicParser._ENDS.pattern}")
