"""Parsers of tool calls in a model's text: hermes and qwen forms and ReAct, with stated repairs of broken JSON.

No text makes a parser raise. A call whose JSON cannot be read, even with the repairs of `loose_json`, is returned with its
arguments as they were written: the tool's caller then answers the model what is wrong.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from workbench.agents.protocol import FunctionCall, ToolParser
from workbench.base.errors import SettingError, describe, unknown

MAX_CALLS = 64
"""Limit of the calls in one text; later ones are left in the content."""
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_NAMED = re.compile(r"""["']name["']\s*:\s*["']([\w.-]{1,64})["']""")
_PARSERS: dict[str, type[Any]] = {}


def register_parser(*names: str) -> Callable[[type[Any]], type[Any]]:
    """Class decorator that registers a parser under these names. Raises `SettingError` if one is taken."""

    def register(cls: type[Any]) -> type[Any]:
        for name in names:
            if name in _PARSERS:
                raise SettingError(f"a tool parser named {name!r} is registered already: {_PARSERS[name].__name__}")
            _PARSERS[name] = cls
        return cls

    return register


def tool_parser(name: str) -> ToolParser:
    """A new tool parser by its registered name. Raises `SettingError`, which lists the names, for an unknown one."""
    if name not in _PARSERS:
        raise SettingError(unknown("tool parser", name, _PARSERS))
    return _PARSERS[name]()


def checked_parser(parser: Any, *, format: str, tools: bool) -> ToolParser | None:
    """A tool agent's `parser=` (object, name or None) as a parser, or None for an agent without `tools`.

    None with format `react` gives a `ReActParser`. Raises `SettingError` for others, and for a parser of another format.
    """
    if parser is None:
        if tools and format == "function_calling":
            raise SettingError("the tool agent has tools and no parser", do="give parser='hermes', or format='react'")
        return ReActParser() if tools else None
    found = tool_parser(parser) if isinstance(parser, str) else parser
    if isinstance(found, type) or not callable(getattr(found, "extract_tool_calls", None)):
        do = f"make an object of it: {found.__name__}()" if isinstance(found, type) else None
        expected = "a name, or an object with extract_tool_calls(text, tools)"
        raise SettingError("parser", expected=expected, found=describe(found), do=do)
    if format == "react" and not isinstance(found, ReActParser):
        expected = "a ReActParser: the format tells the model to write its calls as Action lines"
        do = "leave parser= out, or give format='function_calling'"
        raise SettingError("parser of format='react'", expected=expected, found=describe(found), do=do)
    return found


def parser_names() -> tuple[str, ...]:
    """The names of the registered tool parsers."""
    return tuple(_PARSERS)


class _Finds:
    """Base of the parsers here: a subclass finds the places of the calls; what is between them is the content."""

    def extract_tool_calls(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> tuple[str, list[FunctionCall]]:
        """Find the tool calls in a model's text; returns (the text without them, the calls in order)."""
        content: list[str] = []
        calls: list[FunctionCall] = []
        place = 0
        for start, end, call in islice(self._calls(text, tools), MAX_CALLS):
            content.append(text[place:start])
            calls.append(call)
            place = end
        return "".join([*content, text[place:]]), calls

    def _calls(self, text: str, tools: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, int, FunctionCall]]:
        """(where it begins, where it ends, the call) of each call in the text."""
        raise NotImplementedError(f"{type(self).__name__} does not define _calls")


@register_parser("hermes", "qwen", "qwen2.5", "qwen3", "function_calling")
class HermesParser(_Finds):
    """Parser of `<tool_call>{"name": …, "arguments": {…}}</tool_call>`: the format of Hermes, Qwen 2.5 and Qwen 3.

    Without a close tag a call ends with its JSON, at the next `<tool_call>` or at the end of the text; a close tag inside
    a string of valid JSON is part of the string.
    """

    def _calls(self, text: str, tools: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, int, FunctionCall]]:
        place = 0
        while (start := text.find(_OPEN, place)) >= 0:
            written, place = _body(text, start + len(_OPEN))
            yield start, place, _from_json(written)


@register_parser("qwen3_coder", "qwen_xml")
class Qwen3CoderParser(_Finds):
    """Parser of `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>` (Qwen3-Coder).

    The outer tag may be missing. A value is text, or JSON where the tool's schema has another type than string.
    """

    _FUNCTION = re.compile(
        r"(?:<tool_call>\s*)?<function=([^>\n]{1,64})>(.*?)(?:</function>|(?=<function=)|\Z)(?:\s*</tool_call>)?", re.S
    )
    _PARAMETER = re.compile(r"<parameter=([^>\n]{1,128})>(.*?)(?:</parameter>|(?=<parameter=)|\Z)", re.S)

    def _calls(self, text: str, tools: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, int, FunctionCall]]:
        for found in self._FUNCTION.finditer(text):
            properties = _parameters(found[1].strip(), tools).get("properties") or {}
            given = {
                one[1]: _typed(one[2].removeprefix("\n").removesuffix("\n"), properties.get(one[1], {}))
                for one in self._PARAMETER.finditer(found[2])
            }
            yield found.start(), found.end(), FunctionCall(found[1].strip(), json.dumps(given, ensure_ascii=False))


@register_parser("react")
class ReActParser(_Finds):
    """Parser of ReAct's `Action: name` and `Action Input: {…}`, up to `Observation:`.

    An input that is not a JSON object is the value of the tool's only required argument, or of its only argument. No call
    is read from what follows `Observation:`, which the model made up, or `Final Answer:`; it is left in the content.
    """

    _END = re.compile(r"^[ \t]*(?:Observation|Final Answer)[ \t]*:", re.M | re.I)
    _ACTION = re.compile(
        r"^[ \t]*Action[ \t]*:[ \t]*`?([\w.-]{1,64})`?[ \t]*\n[ \t]*Action[ \t]*Input[ \t]*:"
        r"(.*?)(?=^[ \t]*(?:Thought|Action)[ \t]*:|\Z)",
        re.M | re.I | re.S,
    )

    def _calls(self, text: str, tools: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, int, FunctionCall]]:
        end = self._END.search(text)
        for found in self._ACTION.finditer(text, 0, end.start() if end else len(text)):
            yield found.start(), found.end(), FunctionCall(found[1], _input(found[1], found[2], tools))


@register_parser("tool_args")
class ToolArgsParser(_Finds):
    """Parser of `<tool>calculator</tool><args>{"expression": "1 + 1"}</args>`."""

    _CALL = re.compile(r"<tool>\s*([\w.-]{1,64})\s*</tool>\s*<args>(.*?)(?:</args>|(?=<tool>)|\Z)", re.S)

    def _calls(self, text: str, tools: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, int, FunctionCall]]:
        for found in self._CALL.finditer(text):
            call = FunctionCall(found[1], _arguments(loose_json(found[2]), found[2]))
            yield found.start(), found.end(), call


def _body(text: str, start: int) -> tuple[str, int]:
    """(the text of one call, where it ends)."""
    begin = start + len(text[start:]) - len(text[start:].lstrip())
    try:
        _, end = json.JSONDecoder().raw_decode(text, begin)
        sound = text[begin:end]
    except (ValueError, RecursionError):
        sound, end = "", -1
    closed = text.find(_CLOSE, max(end, start))
    another = text.find(_OPEN, max(end, start))
    if sound.startswith("{"):
        after = text[end:].lstrip()
        return sound, closed + len(_CLOSE) if after.startswith(_CLOSE) else end
    stop = min((place for place in (closed, another) if place >= 0), default=len(text))
    return text[start:stop], stop + (len(_CLOSE) if stop == closed else 0)


def _from_json(written: str) -> FunctionCall:
    found = loose_json(written)
    if isinstance(found, Mapping) and isinstance(found.get("function"), Mapping):
        found = found["function"]  # OpenAI's own nesting
    if isinstance(found, Mapping) and isinstance(found.get("name"), str):
        given = found.get("arguments", found.get("parameters", {}))
        return FunctionCall(found["name"], _arguments(given, written))
    named = _NAMED.search(written)
    return FunctionCall(named[1] if named else "", written.strip())


def _arguments(given: Any, written: str) -> str:
    """The arguments as JSON text; as they were written, where they are not JSON."""
    if isinstance(given, str):  # JSON inside a JSON string: some models quote twice
        inner = loose_json(given)
        given = inner if isinstance(inner, Mapping) else given
    if given is None:
        return written.strip()
    return json.dumps(given, ensure_ascii=False)


def _input(name: str, written: str, tools: Sequence[Mapping[str, Any]]) -> str:
    found = loose_json(written)
    if isinstance(found, Mapping):
        return json.dumps(found, ensure_ascii=False)
    parameters = _parameters(name, tools)
    required, known = parameters.get("required") or [], parameters.get("properties") or {}
    names = list(required if len(required) == 1 else known)
    if len(names) != 1:
        return written.strip()
    fenced = re.fullmatch(r"\s*```[\w+-]*\n(.*?)\n?```\s*", written, re.S)
    value = _typed(fenced[1] if fenced else written.strip().strip("`"), known.get(names[0], {}))
    return json.dumps({names[0]: value}, ensure_ascii=False)


def _parameters(name: str, tools: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    functions = (one.get("function", {}) for one in tools)
    return next((one.get("parameters", {}) for one in functions if one.get("name") == name), {})


def _typed(text: str, schema: Mapping[str, Any]) -> Any:
    kinds = set(_kinds(schema))
    if not kinds or kinds == {"string"}:
        return text
    if kinds <= {"array", "object"}:
        found = loose_json(text)
        return text if found is None else found
    try:
        found = json.loads({"True": "true", "False": "false", "None": "null"}.get(text.strip(), text))
    except (ValueError, RecursionError):
        return text
    return text if "string" in kinds and found is not None and not isinstance(found, bool | int | float) else found


def _kinds(schema: Mapping[str, Any]) -> Iterator[str]:
    kind = schema.get("type")
    yield from [kind] if isinstance(kind, str) else kind or ()
    for one in schema.get("anyOf") or ():
        yield from _kinds(one)


STOP = "Observation:"
"""A stop text for ReAct: the model must not write the tool's answer itself."""


def instructions(tools: Sequence[Mapping[str, Any]]) -> str:
    """The text before the first message that tells a model in ReAct's format about the tools and how to call them."""
    listed = "\n".join(
        f"- {one['function']['name']}: {one['function'].get('description', '')} "
        f"Arguments: {json.dumps((one['function'].get('parameters') or {}).get('properties', {}))}"
        for one in tools
    )
    names = ", ".join(one["function"]["name"] for one in tools)
    return (
        f"You can use these tools:\n{listed}\n\nWrite:\nThought: what to do next\nAction: one of {names}\n"
        "Action Input: the arguments as a JSON object\n\nThen an Observation is given to you. "
        "When you know the answer, write it without an Action.\n\n"
    )


MAX_LENGTH = 1 << 16
"""Longest text that is repaired, in characters; valid JSON may be longer."""
MAX_DEPTH = 64
_FENCE = re.compile(r"\s*```(?:json)?\s*\n?(.*?)(?:```\s*)?\Z", re.S)
_TOKEN = re.compile(
    r"""\s*(?:([][{}:,])|(["'])((?:(?!\2)[^\\]|\\.)*)(?:\2|\\?\Z)|([A-Za-z_][\w-]*)"""
    r"""|(-?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?))""",
    re.S,
)
"""A sign, a string (the last one of a text need not be closed), a word, or a number."""
_WORDS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|(.))", re.S)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}


def loose_json(text: str) -> Any:
    """The JSON object or array in a text, with common mistakes repaired; None where there is none. Never raises.

    Valid JSON is read by the standard library. Otherwise these mistakes are repaired, and no others: a ``` fence around it;
    strings in single quotes; extra commas; brackets, and a last string, that are not closed; line breaks inside strings;
    `True`, `False`, `None`; keys without quotes; text after the end. Texts of more than `MAX_LENGTH` characters or
    `MAX_DEPTH` levels are not repaired.
    """
    fenced = _FENCE.match(text)
    text = (fenced[1] if fenced and text.lstrip().startswith("```") else text).strip()
    if not text.startswith(("{", "[")):
        return None
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        if len(text) > MAX_LENGTH:
            return None
    try:
        return json.loads(_mended(text))
    except (ValueError, LookupError, RecursionError):
        return None


def _mended(text: str) -> str:
    """The object or array that a text begins with, as sound JSON where only what `loose_json` repairs is wrong with it."""
    written, closes, place = [""], list[str](), 0
    while place == 0 or (closes and place < len(text)):
        token = _TOKEN.match(text, place)
        if token is None or len(closes) > MAX_DEPTH + 1:
            raise LookupError("the text is not JSON, even after the repairs of loose_json")
        place = token.end()
        sign = token[1]
        if sign in ("}", "]"):
            while closes:  # those that are missing before it, too
                written.append(closes.pop())
                if written[-1] == sign:
                    break
        elif sign == ":":
            written.append(sign)
        elif sign != ",":
            written += [","] if written[-1] not in ("", "{", "[", ":") else []
            named = closes[-1:] == ["}"] and written[-1] != ":"
            closes += {"{": "}", "[": "]"}.get(sign, "")
            written.append(sign or _sound(token, named))
    return "".join([*written, *reversed(closes)])


def _sound(token: re.Match[str], named: bool) -> str:
    """A string, a number or a word as JSON; a word is a name (`named`) or a value."""
    _, quote, string, word, number = token.groups()
    if quote:
        return json.dumps(_ESCAPE.sub(_unescaped, string))
    if number:
        return json.dumps(float(number) if set(number) & set(".eE") else int(number))
    return json.dumps(word if named else _WORDS[word])


def _unescaped(found: re.Match[str]) -> str:
    return chr(int(found[1], 16)) if found[1] else _ESCAPES.get(found[2], found[2])
