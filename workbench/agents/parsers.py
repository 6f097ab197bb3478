"""Tool calls in a model's text: hermes and qwen forms and ReAct, tolerant of broken JSON within stated bounds.

No text makes a parser raise. A call whose JSON cannot be read, even with the repairs of `loose_json`, comes back as a call
all the same, with the arguments as they were written: whoever executes it can tell the model what is wrong.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from workbench.agents.loose_json import loose_json
from workbench.agents.protocol import FunctionCall, ToolParser
from workbench.errors import SettingError, unknown

MAX_CALLS = 64
"""Calls of one text; what follows them is left in the content."""
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_NAMED = re.compile(r"""["']name["']\s*:\s*["']([\w.-]{1,64})["']""")
_PARSERS: dict[str, type[Any]] = {}


def register_parser(*names: str) -> Callable[[type[Any]], type[Any]]:
    """A decorator: the class is found under these names. Raises `SettingError` where one is taken."""

    def register(cls: type[Any]) -> type[Any]:
        for name in names:
            if name in _PARSERS:
                raise SettingError(f"a tool parser {name!r} is registered already: {_PARSERS[name].__name__}")
            _PARSERS[name] = cls
        return cls

    return register


def tool_parser(name: str) -> ToolParser:
    """A parser by name. Raises `SettingError` with the names that there are, and the nearest."""
    if name not in _PARSERS:
        raise SettingError(unknown("tool parser", name, _PARSERS))
    return _PARSERS[name]()


def parser_names() -> tuple[str, ...]:
    """The names that `tool_parser` knows."""
    return tuple(_PARSERS)


@register_parser("hermes", "qwen", "qwen2.5", "qwen3", "function_calling")
class HermesParser:
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`: hermes, Qwen 2.5 and Qwen 3.

    A missing close tag ends with the JSON, with the next `<tool_call>` or with the text; a close tag inside a string of
    sound JSON closes nothing.
    """

    def extract_tool_calls(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> tuple[str, list[FunctionCall]]:
        """The text without its calls, and the calls in order."""
        content: list[str] = []
        calls: list[FunctionCall] = []
        place = 0
        while len(calls) < MAX_CALLS and (start := text.find(_OPEN, place)) >= 0:
            content.append(text[place:start])
            written, place = _body(text, start + len(_OPEN))
            calls.append(_from_json(written))
        content.append(text[place:])
        return "".join(content), calls


@register_parser("qwen3_coder", "qwen_xml")
class Qwen3CoderParser:
    """`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`; the outer tag may be missing.

    A value is text; where the tool's schema says another type, and only then, it is read as JSON.
    """

    _FUNCTION = re.compile(r"(?:<tool_call>\s*)?<function=([^>\n]{1,64})>(.*?)(?:</function>|(?=<function=)|\Z)", re.S)
    _PARAMETER = re.compile(r"<parameter=([^>\n]{1,128})>(.*?)(?:</parameter>|(?=<parameter=)|\Z)", re.S)

    def extract_tool_calls(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> tuple[str, list[FunctionCall]]:
        """The text without its calls, and the calls in order."""
        content: list[str] = []
        calls: list[FunctionCall] = []
        place = 0
        while len(calls) < MAX_CALLS and (found := self._FUNCTION.search(text, place)):
            content.append(text[place : found.start()])
            properties = _properties(found[1], tools)
            given = {
                one[1]: _typed(_unwrapped(one[2]), properties.get(one[1], {}))
                for one in self._PARAMETER.finditer(found[2])
            }
            calls.append(FunctionCall(found[1].strip(), json.dumps(given, ensure_ascii=False)))
            place = found.end()
            closed = re.compile(r"\s*</tool_call>").match(text, place)
            place = closed.end() if closed else place
        content.append(text[place:])
        return "".join(content), calls


@register_parser("react")
class ReActParser:
    """`Action: name` and `Action Input: {…}`, up to `Observation:`.

    An input that is no JSON object is the value of the tool's only required argument, or of its only argument. What a
    model writes after `Observation:` it made up: it is left in the content and no call is read from it. Nor from what
    follows `Final Answer:`.
    """

    _END = re.compile(r"^[ \t]*(?:Observation|Final Answer)[ \t]*:", re.M | re.I)
    _ACTION = re.compile(
        r"^[ \t]*Action[ \t]*:[ \t]*`?([\w.-]{1,64})`?[ \t]*\n[ \t]*Action[ \t]*Input[ \t]*:"
        r"(.*?)(?=^[ \t]*(?:Thought|Action)[ \t]*:|\Z)",
        re.M | re.I | re.S,
    )

    def extract_tool_calls(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> tuple[str, list[FunctionCall]]:
        """The text without its calls, and the calls in order."""
        end = self._END.search(text)
        read, rest = (text[: end.start()], text[end.start() :]) if end else (text, "")
        content: list[str] = []
        calls: list[FunctionCall] = []
        place = 0
        for found in self._ACTION.finditer(read):
            if len(calls) == MAX_CALLS:
                break
            content.append(read[place : found.start()])
            calls.append(FunctionCall(found[1], _input(found[1], found[2], tools)))
            place = found.end()
        return "".join([*content, read[place:], rest]), calls


@register_parser("tool_args")
class ToolArgsParser:
    """`<tool>calculator</tool><args>{"expression": "1 + 1"}</args>`."""

    _CALL = re.compile(r"<tool>\s*([\w.-]{1,64})\s*</tool>\s*<args>(.*?)(?:</args>|(?=<tool>)|\Z)", re.S)

    def extract_tool_calls(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> tuple[str, list[FunctionCall]]:
        """The text without its calls, and the calls in order."""
        content: list[str] = []
        calls: list[FunctionCall] = []
        place = 0
        for found in self._CALL.finditer(text):
            if len(calls) == MAX_CALLS:
                break
            content.append(text[place : found.start()])
            calls.append(FunctionCall(found[1], _arguments(loose_json(found[2]), found[2])))
            place = found.end()
        return "".join([*content, text[place:]]), calls


def _body(text: str, start: int) -> tuple[str, int]:
    """(What one call says, where it ends)."""
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
    """JSON text of the arguments; what was written, where they are no JSON."""
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
    required: Sequence[str] = _function(name, tools).get("parameters", {}).get("required") or []
    known = _properties(name, tools)
    names = list(required if len(required) == 1 else known)
    if len(names) == 1:
        value = _typed(_unfenced(written), known.get(names[0], {}))
        return json.dumps({names[0]: value}, ensure_ascii=False)
    return written.strip()


def _function(name: str, tools: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    return next((one["function"] for one in tools if one.get("function", {}).get("name") == name), {})


def _properties(name: str, tools: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    return _function(name.strip(), tools).get("parameters", {}).get("properties") or {}


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


def _unwrapped(value: str) -> str:
    value = value[1:] if value.startswith("\n") else value
    return value[:-1] if value.endswith("\n") else value


def _unfenced(text: str) -> str:
    fenced = re.fullmatch(r"\s*```[\w+-]*\n(.*?)\n?```\s*", text, re.S)
    return fenced[1] if fenced else text.strip().strip("`")
