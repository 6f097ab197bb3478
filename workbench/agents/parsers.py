"""Parsers of tool calls in a model's text: their base classes, the formats of Hermes and ReAct, and repairs of broken
JSON.

No text makes a parser raise, and reasoning has no calls. A call that cannot be read, even with the repairs of `loose_json`,
is returned with its arguments as they were written: the tool's caller then answers the model what is wrong.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any, cast

from workbench.agents.protocol import FunctionCall, ToolParser
from workbench.base.config import require
from workbench.base.errors import SettingError, check_name, describe
from workbench.base.files import strict_json

MAX_CALLS = 64
"""Limit of the calls in one text; later ones are left in the content."""
REASONING: Mapping[str, str] = {
    "<think>": "</think>",
    "<thinking>": "</thinking>",
    "<thought>": "</thought>",
    "<reasoning>": "</reasoning>",
    "<|begin_of_thought|>": "<|end_of_thought|>",
    "<seed:think>": "</seed:think>",
    "[THINK]": "[/THINK]",
    "◁think▷": "◁/think▷",
    "<mm:think>": "</mm:think>",
    "<think:opensource>": "</think:opensource>",
    "<|START_THINKING|>": "<|END_THINKING|>",
    "<|inner_prefix|>": "<|inner_suffix|>",
    "<|channel>thought": "<channel|>",
    "<|open|>think<|sep|>": "<|close|>think<|sep|>",
}
"""Opening tag of a model's reasoning → its closing tag."""
Found = tuple[int, int, tuple[FunctionCall, ...] | None]
"""(start, end, calls) of a piece of text with tool calls; None where the text has no more calls."""
_MARK = re.compile("|".join(map(re.escape, (*REASONING, *REASONING.values()))))
_ENDINGS = "|".join(f"(?<={re.escape(tag)})" for tag in REASONING.values())
AT_LINE = rf"(?:^|(?<=[{re.escape(''.join(sorted({tag[-1] for tag in REASONING.values()})))}])(?-i:{_ENDINGS}))[ \t]*"
"""Pattern of the beginning of a line, which the end of reasoning is, too; what a tag may end with is looked at first."""
_OPENING = re.compile(rf"\s*({'|'.join(map(re.escape, REASONING))})")
_NAMED = re.compile(r"""\0?\s*(?:```\w*\s*)?\[?\s*\{\s*["']?name["']?\s*:\s*["']([\w.-]{1,64})["']""")
_LIKE_JSON = re.compile(r"\s*(?:[{\[]|```)")
_SPACE = re.compile(r"\s*")
_MORE = re.compile(r",?\s*\{")
"""Another object beside one."""
_SURROGATE = re.compile("[\ud800-\udfff]")
DECODER = json.JSONDecoder(strict=False)
"""Reads the JSON that a text begins with; its strings may have line breaks."""
_PARSERS: dict[str, type[Any]] = {}


def register_parser(*names: str) -> Callable[[type[Any]], type[Any]]:
    """Class decorator that registers a parser under these names. Raises `SettingError` if a name is taken."""

    def register(cls: type[Any]) -> type[Any]:
        for name in names:
            if name in _PARSERS:
                raise SettingError(f"a tool parser named {name!r} is registered already: {_PARSERS[name].__name__}")
            _PARSERS[name] = cls
        return cls

    return register


def tool_parser(name: str) -> ToolParser:
    """Make the tool parser that is registered under a name. Raises `SettingError`, which lists the names, for an
    unknown one."""
    check_name("tool parser", name, _PARSERS)
    return _PARSERS[name]()


def checked_parser(parser: Any, *, format: str, tools: bool) -> ToolParser | None:
    """Return a tool agent's `parser=` (object, name or None) as a parser; None without `tools`, or where the chat
    template decides later.

    None with format `react` gives a `ReActParser`. Raises `SettingError` for anything else, and for a parser that does
    not fit the format.
    """
    if parser is None:
        return ReActParser() if tools and format == "react" else None
    chosen = tool_parser(parser) if isinstance(parser, str) else parser
    if isinstance(chosen, type) or not callable(getattr(chosen, "extract_tool_calls", None)):
        do = f"make an object of it: {chosen.__name__}()" if isinstance(chosen, type) else None
        expected = "a name, or an object with extract_tool_calls(text, tools)"
        raise SettingError("parser of a tool agent", expected=expected, found=describe(chosen), do=do)
    if inspect.iscoroutinefunction(chosen.extract_tool_calls):
        expected = "extract_tool_calls(text, tools), which is not async"
        do = "verl's parsers get token ids and are async: write extract_tool_calls so that it reads text and is not async"
        raise SettingError(f"parser {type(chosen).__name__}", expected=expected, found="an async method", do=do)
    if format == "react" and not isinstance(chosen, ReActParser):
        expected = "a ReActParser: the format tells the model to write its calls as Action lines"
        do = "leave parser= out, or give format='function_calling'"
        raise SettingError("parser of format='react'", expected=expected, found=describe(chosen), do=do)
    return chosen


def calls_of(
    parser: ToolParser, text: str, tools: Sequence[Mapping[str, Any]], *, reasoning: str | bool = "", cut: bool = False
) -> list[FunctionCall]:
    """Find the tool calls in a model's turn. Raises what the parser raises, and `TypeError` for results that are no
    `FunctionCall`s.

    Args:
        parser: a parser that is not derived from `FindsCalls` gets the text without reasoning (`outside_reasoning`).
        text: the turn, with its special tokens.
        tools: the tools' schemas.
        reasoning: the tag with which the prompt has opened the model's reasoning (True: `<think>`), or "".
        cut: whether the turn ended at a limit of tokens. A `FindsCalls` parser then leaves out calls that could read
            otherwise if the model had written on, and all calls after one that cannot be read without repairs.
    """
    text = (next(iter(REASONING)) if reasoning is True else reasoning or "") + text
    if not isinstance(parser, FindsCalls):
        text = outside_reasoning(text)
    elif cut:
        parser = copy.copy(parser)
        parser.cut = True
    calls = list(parser.extract_tool_calls(text, tools)[1])
    for place, call in enumerate(calls):
        if isinstance(call, FunctionCall) and call.arguments is None:  # how OpenAI's clients write a call without any
            calls[place] = call = replace(call, arguments="{}")
        if not isinstance(call, FunctionCall) or not isinstance(call.name, str) or not isinstance(call.arguments, str):
            raise TypeError(f"the parser's result: expected FunctionCalls of two texts, found {describe(call)}")
    if cut and calls and isinstance(parser, FindsCalls):
        longer = parser.extract_tool_calls(f"{text}0", tools)[1]
        calls = [one for one, _ in takewhile(_readings_agree, zip(calls, longer, strict=False))]
    return calls


def _readings_agree(pair: tuple[FunctionCall, FunctionCall]) -> bool:
    with contextlib.suppress(ValueError, RecursionError):
        return pair[0] == pair[1] and read_json(pair[0].arguments) is not None
    return False


def outside_reasoning(text: str) -> str:
    """Return a model's text without its reasoning; a closing tag that nothing opened ends reasoning that the prompt
    opened."""
    kept: list[str] = []
    place = 0
    while mark := _MARK.search(text, place):
        kept, place = [*kept, text[place : mark.start()]] if mark[0] in REASONING else [], mark.end()
        if mark[0] in REASONING:
            closed = text.find(REASONING[mark[0]], place)
            place = closed + len(REASONING[mark[0]]) if closed >= 0 else len(text)
    return "".join([*kept, text[place:]])


def behind_reasoning(text: str) -> str:
    """Return a model's text without the reasoning at its beginning."""
    place = 0
    while mark := _OPENING.match(text, place):
        closed = text.find(REASONING[mark[1]], mark.end())
        place = closed + len(REASONING[mark[1]]) if closed >= 0 else len(text)
    return text[place:]


def without_tags(text: str) -> str:
    """Return a text without the tags of reasoning; the text between the tags stays."""
    return _MARK.sub("", text)


def opens_reasoning(prompt: str) -> str:
    """Return the tag that opened the reasoning in which a generation prompt ends; "" where it ends outside of
    reasoning."""
    marks = _MARK.findall(prompt)
    return marks[-1] if marks and marks[-1] in REASONING else ""


def parser_names() -> tuple[str, ...]:
    """Return the names of the registered tool parsers."""
    return tuple(_PARSERS)


class FindsCalls:
    """Base of the built-in parsers: a subclass finds the next call; all text that is neither a call nor reasoning is
    the content."""

    cut = False
    """Whether the text was cut off at the token limit: broken JSON is then not repaired."""

    def extract_tool_calls(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> tuple[str, list[FunctionCall]]:
        """Find the tool calls in a model's text; returns (the text without them, the calls in order).

        No call is read from reasoning (`REASONING`): from its opening tag to its closing tag, or to the end of the text
        where it is not closed; and from the beginning of the text to a closing tag that nothing opened. A tag inside a
        call is part of the call.
        """
        content: list[str] = []
        calls: list[FunctionCall] = []
        kept = place = looked = 0
        call = left = self._next(text, 0, tools)
        while (mark := _MARK.search(text, place, call[0] if call else len(text))) or call:
            if mark is None:
                start, place, more = cast(Found, call)
                if more is None:
                    break
                content.append(text[kept:start])
                calls += more[: MAX_CALLS - len(calls)]
                kept = place
            elif mark[0] not in REASONING:
                content, calls, kept, place = [], [], 0, mark.end()
            elif (closed := text.find(REASONING[mark[0]], mark.end())) < 0:
                break
            else:
                place = closed + len(REASONING[mark[0]])
            looked += mark is None
            if len(calls) == MAX_CALLS or looked > 4 * MAX_CALLS:
                call = None
            elif left and (call is None or call[0] < place):
                call = left = self._next(text, place, tools)
        return "".join([*content, text[kept:]]), calls

    def _next(self, text: str, place: int, tools: Sequence[Mapping[str, Any]]) -> Found | None:
        """Find the first call at or after `place`: (where it begins, where it ends, its `FunctionCall`s); None where
        there is none."""
        raise NotImplementedError(f"{type(self).__name__} does not define _next")


class TaggedJson(FindsCalls):
    """Base of the parsers of calls in JSON between two tags.

    The JSON is a call, or a list of calls where `KINDS` has lists. Where the opening tag holds the tool's name (a group
    `name…`), and maybe the call's `id`, the JSON is the arguments. Without a closing tag a call ends with its JSON, at
    the next opening tag, where reasoning begins or ends, or with the text. A tag inside a string of valid JSON is part
    of the string.
    """

    OPEN: re.Pattern[str]
    CLOSE: re.Pattern[str]
    KINDS: tuple[type, ...] = (dict,)
    """The Python types that the JSON between the tags may have."""
    SECTION: re.Pattern[str] | None = None
    """Pattern of the tags around all calls; they are removed from the content."""
    _TAG: re.Pattern[str]
    """An opening tag, as group 1, or a closing one."""

    def __init_subclass__(cls) -> None:
        if hasattr(cls, "OPEN"):  # else a base, too
            cls._TAG = re.compile(rf"({cls.OPEN.pattern})|{cls.CLOSE.pattern}", re.S)

    def extract_tool_calls(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> tuple[str, list[FunctionCall]]:
        """Find the tool calls in a model's text; returns (the text without them and without the tags of their section,
        the calls).
        """
        content, calls = super().extract_tool_calls(text, tools)
        return self.SECTION.sub("", content) if calls and self.SECTION else content, calls

    def _next(self, text: str, place: int, tools: Sequence[Mapping[str, Any]]) -> Found | None:
        while opened := self.OPEN.search(text, place):
            written, end = self._body(text, opened.end())
            if written is not None:
                return opened.start(), end, self._calls(opened, written)
            place = opened.end()
        return None

    def _calls(self, opened: re.Match[str], written: str) -> tuple[FunctionCall, ...]:
        """Make the calls whose opening tag is `opened`, with the text `written` between the tags."""
        groups = opened.groupdict()
        names = [text for key, text in groups.items() if key.startswith("name") and text is not None]
        if not names:
            return calls_in_json(written, many=list in self.KINDS)
        return (FunctionCall(names[0].strip(), arguments_text(loose_json(written), written), groups.get("id") or None),)

    def _body(self, text: str, start: int) -> tuple[str | None, int]:
        """Find (the text between the tags, where the call ends); the text is None for a tag that the model only
        mentions.

        A text that must not be repaired begins with a zero byte, as it is not known where the model meant it to end.
        """
        end, sole = start, ""
        if not _LIKE_JSON.match(text, start):
            tag = self._TAG.search(text, start)
            return (text[start : tag.start()], tag.end()) if tag and not tag[1] else (None, start)
        with contextlib.suppress(ValueError, RecursionError):
            begin = cast(re.Match[str], _SPACE.match(text, start)).end()
            value, end = DECODER.raw_decode(text, begin)
            if isinstance(value, self.KINDS):
                after = cast(re.Match[str], _SPACE.match(text, end)).end()
                if closed := self.CLOSE.match(text, after):
                    return text[begin:end], closed.end()
                if isinstance(value, list) or not _MORE.match(text, after):
                    return text[begin:end], end
                sole = "\0"  # another call in the same tag
        if self.cut and not sole:
            return f"\0{text[start:]}", len(text)
        tag = self._TAG.search(text, end)
        if tag and tag[1]:
            tag = matching_tags(self._TAG, text, start, end).get(start)
        if tag is not None:
            return sole + text[start : tag.start()], tag.end()
        stop = next_mark(text, end, self.OPEN)
        return text[start:stop] if stop == len(text) else f"\0{text[start:stop]}", stop


@register_parser("hermes", "qwen", "qwen2.5", "qwen3", "function_calling")
class HermesParser(TaggedJson):
    """Parser of `<tool_call>{"name": …, "arguments": {…}}</tool_call>`: the format of Hermes, Qwen 2.5 and Qwen 3."""

    OPEN, CLOSE = re.compile("<tool_call>"), re.compile("</tool_call>")
    call_form = '<tool_call>{"name": "NAME", "arguments": ARGUMENTS}</tool_call>'


@register_parser("react")
class ReActParser(FindsCalls):
    """Parser of ReAct's `Action: name` and `Action Input: {…}`, up to `Observation:`.

    An input that does not begin like a JSON object is the value of the tool's only required argument, or of its only
    argument. No call is read from the text after `Observation:`, which the model invented, or after `Final Answer:`;
    that text stays in the content.
    """

    # tags of reasoning are as they are written there, whatever their neighbours' case
    _END = re.compile(rf"{AT_LINE}(?:Observation|Final Answer)[ \t]*:", re.M | re.I)
    _ACTION = re.compile(
        rf"{AT_LINE}Action[ \t]*:[ \t]*`?([\w.-]{{1,64}})`?[ \t]*\n[ \t]*Action[ \t]*Input[ \t]*:\s*", re.M | re.I
    )
    _STOP = re.compile(rf"^[ \t]*(?:Thought|Action|Observation|Final Answer)[ \t]*:|(?-i:{_MARK.pattern})", re.M | re.I)
    _FENCED = re.compile(r"```[\w+-]*\n.*?\n?```", re.S)

    def _next(self, text: str, place: int, tools: Sequence[Mapping[str, Any]]) -> Found | None:
        action = self._ACTION.search(text, place)
        if ended := self._END.search(text, place, action.start() if action else len(text)):
            return ended.start(), len(text), None
        if action is None:
            return None
        start = action.end()
        fenced = self._FENCED.match(text, start)
        end, sound = fenced.end() if fenced else start, ""
        with contextlib.suppress(ValueError, RecursionError):
            if text.startswith("{", start):
                end = DECODER.raw_decode(text, start)[1]
                sound = text[start:end]
        if self.cut and not sound and text.startswith("{", start):
            return action.start(), len(text), (FunctionCall(action[1], text[start:]),)
        stop = self._STOP.search(text, end)
        end = stop.start() if stop else len(text)
        return action.start(), end, (FunctionCall(action[1], _input(action[1], sound or text[start:end], tools)),)


def matching_tags(tags: re.Pattern[str], text: str, start: int, place: int = 0) -> dict[int, re.Match[str]]:
    """Match opening and closing tags of a text, from `start` on, where an opening tag ends: place where an opening tag
    ends → its closing tag.

    `tags` is the pattern of both kinds; its group 1 matches opening tags alone.
    """
    opened, pairs = [start], dict[int, re.Match[str]]()
    for tag in tags.finditer(text, max(start, place)):
        if tag[1]:
            opened.append(tag.end())
        elif opened:
            pairs[opened.pop()] = tag
    return pairs


def next_mark(text: str, place: int, opening: re.Pattern[str] | None = None) -> int:
    """Return the place of the next beginning of a call (`opening`), beginning of reasoning or end of reasoning; without
    any of these, the end of the text."""
    other = opening.search(text, place) if opening else None
    end = other.start() if other else len(text)
    mark = _MARK.search(text, place, end)
    return mark.start() if mark else end


def calls_in_json(written: str, *, many: bool = False) -> tuple[FunctionCall, ...]:
    """Read the call in a JSON object, or with `many` the calls in a list of them: `name`, `arguments` (or
    `parameters`), `id`.

    A text that cannot be read is one call, with the text as its arguments.
    """
    value = loose_json(written)
    listed = value if many and isinstance(value, list) else [value]
    if not listed or not all(isinstance(call, Mapping) for call in listed):
        named = _NAMED.match(written)
        return (FunctionCall(named[1] if named else "", as_written(written)),)
    return tuple(_call_of(call, written) for call in listed)


def _call_of(record: Mapping[str, Any], written: str) -> FunctionCall:
    call = record["function"] if isinstance(record.get("function"), Mapping) else record  # OpenAI's own nesting
    name, values = call.get("name", call.get("tool_name")), call.get("arguments", call.get("parameters"))
    key = record.get("id", record.get("tool_call_id"))
    text = arguments_text({} if values is None else values, written)
    return FunctionCall(name if isinstance(name, str) else "", text, key if isinstance(key, str) else None)


def arguments_text(arguments: Any, written: str) -> str:
    """Write a call's arguments as JSON text; arguments that are not JSON stay as they were written."""
    if isinstance(arguments, str):  # JSON inside a JSON string: some models quote twice
        inner = loose_json(arguments) if arguments.strip() else {}
        arguments = inner if isinstance(inner, Mapping) else arguments
    return as_written(written) if arguments is None else dumped(arguments)


def as_written(written: str) -> str:
    """Return arguments that could not be read as the model wrote them, without the mark of unrepaired text."""
    return written.removeprefix("\0").strip()


def dumped(value: Any) -> str:
    """Write a value as JSON text that can be saved in a file: unpaired surrogates are escaped."""
    text = json.dumps(value, ensure_ascii=False)
    return json.dumps(value) if _SURROGATE.search(text) else text


def _input(name: str, written: str, tools: Sequence[Mapping[str, Any]]) -> str:
    arguments = loose_json(written)
    if isinstance(arguments, Mapping) or written.startswith("{"):
        return arguments_text(arguments, written)
    parameters = parameters_of(name, tools)
    required, known = parameters.get("required") or [], parameters.get("properties") or {}
    names = list(required if len(required) == 1 else known)
    if len(names) != 1:
        return as_written(written)
    fenced = re.fullmatch(r"\s*```[\w+-]*\n(.*?)\n?```\s*", written, re.S)
    value = typed(fenced[1] if fenced else written.strip().strip("`"), known.get(names[0], {}))
    return dumped({names[0]: value})


def parameters_of(name: str, tools: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the JSON schema of a tool's arguments; {} for a tool that is not among `tools`."""
    functions = (one.get("function", {}) for one in tools)
    return next((one.get("parameters", {}) for one in functions if one.get("name") == name), {})


def typed(text: str, schema: Mapping[str, Any]) -> Any:
    """Convert a parameter's text to the type in its `schema`; where it does not fit, the text is returned."""
    kinds = kinds_of(schema)
    if not kinds or kinds == {"string"}:
        return text
    if kinds <= {"array", "object"}:
        value = loose_json(text)
        return text if value is None else value
    try:
        value = read_json({"True": "true", "False": "false", "None": "null"}.get(text.strip(), text))
    except (ValueError, RecursionError):
        return text
    return text if "string" in kinds and value is not None and not isinstance(value, bool | int | float) else value


def kinds_of(schema: Mapping[str, Any]) -> set[str]:
    """Return the JSON types that a schema allows; an empty set where it names none."""
    kind = schema.get("type")
    kinds = {kind} if isinstance(kind, str) else set(kind or ())
    return kinds.union(*map(kinds_of, schema.get("anyOf") or ()))


STOP = "Observation:"
"""A stop text for ReAct: the model must not write the tool's answer itself."""


def instructions(tools: Sequence[Mapping[str, Any]]) -> str:
    """Write the text before the first message that tells a model in ReAct's format about the tools and how to call
    them."""
    listed = "\n".join(
        f"- {tool['function']['name']}: {tool['function'].get('description', '')} "
        f"Arguments: {json.dumps((tool['function'].get('parameters') or {}).get('properties', {}))}"
        for tool in tools
    )
    names = ", ".join(tool["function"]["name"] for tool in tools)
    return (
        f"You can use these tools:\n{listed}\n\nWrite:\nThought: what to do next\nAction: one of {names}\n"
        "Action Input: the arguments as a JSON object\n\nThen an Observation is given to you. "
        "When you know the answer, write it without an Action.\n\n"
    )


def tools_text(place: str, tools: Sequence[Mapping[str, Any]], parser: object) -> str:
    """Write the text by which a system message tells a model of tools and of the form of a call; "" where `place` is
    `template`.

    The parser's attribute `call_form` is a call with NAME and ARGUMENTS in their places. Raises `SettingError` for a
    parser without it, and for a `place` other than `template` and `system`.
    """
    require(place in ("template", "system"), "tools_in", expected="template or system", found=place)
    if place == "template" or not (tools or isinstance(parser, ReActParser)):
        return ""
    form = getattr(parser, "call_form", "")
    if not form:
        known = ", ".join(name for name, kind in _PARSERS.items() if getattr(kind, "call_form", ""))
        what = f"tools_in='system' with {type(parser).__name__}"
        expected = "a parser with call_form, which shows the format of a call"
        raise SettingError(what, expected=expected, found="none", do=f"parser= one of {known}, or format='react'")
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        f"You can call these functions:\n{listed}\n\nTo call one, write exactly this, with the function's name in place of NAME and "
        f"a JSON object of its arguments in place of ARGUMENTS:\n{form}\nIts result is then given to you."
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
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|U(00(?:0[0-9a-fA-F]|10)[0-9a-fA-F]{4})|(.))", re.S)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}


def read_json(text: str) -> Any:
    """Read JSON in which strings may have line breaks. Raises `ValueError` (or `RecursionError`) for anything else.

    It also refuses what JSON readers treat differently: a name twice in an object, `NaN`, numbers that are not finite
    as a float, and more than `MAX_DEPTH` levels.
    """
    value = strict_json(text, unique=True, strict=False)
    if text.count("{") + text.count("[") > MAX_DEPTH and _is_deeper(value, MAX_DEPTH):
        raise ValueError(f"the JSON is nested more than {MAX_DEPTH} levels deep")
    return value


def _is_deeper(value: Any, levels: int) -> bool:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels < 0 or any(_is_deeper(one, levels - 1) for one in inside)


def loose_json(text: str) -> Any:
    """Read the JSON object or array in a text, with common mistakes repaired; None where there is none. Never raises.

    Valid JSON is read by `read_json`. Otherwise these mistakes are repaired, and no others: a ``` fence around it;
    strings in single quotes; extra commas; brackets, and a last string, that are not closed; line breaks inside
    strings; `True`, `False`, `None`; keys without quotes; text after the end. Texts of more than `MAX_LENGTH`
    characters or `MAX_DEPTH` levels are not repaired.
    """
    fenced = _FENCE.match(text)
    text = (fenced[1] if fenced and text.lstrip().startswith("```") else text).strip()
    if not text.startswith(("{", "[")):
        return None
    try:
        return read_json(text)
    except (ValueError, RecursionError):
        if len(text) > MAX_LENGTH:
            return None
    try:
        return read_json(_mended_json(text))
    except (ValueError, LookupError, RecursionError):
        return None


def _mended_json(text: str) -> str:
    """Rewrite the object or array that a text begins with as valid JSON, with the repairs that `loose_json` lists."""
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
            written.append(sign or _json_token(token, named))
    return "".join([*written, *reversed(closes)])


def _json_token(token: re.Match[str], named: bool) -> str:
    """Write a token (a string, a number or a word) as JSON; a word is a key (`named`), or a value such as `True`."""
    _, quote, string, word, number = token.groups()
    if quote:
        return json.dumps(unescaped(string))
    if number:
        return json.dumps(float(number) if set(number) & set(".eE") else int(number))
    return json.dumps(word if named else _WORDS[word])


def unescaped(text: str) -> str:
    r"""Replace the escapes of JSON and Python (`\\n`, `\\u00e9`) in the text between the quotes of a string by the
    characters that they stand for."""
    return _ESCAPE.sub(_character, text)


def _character(escape: re.Match[str]) -> str:
    code = escape[1] or escape[2] or escape[3]
    return chr(int(code, 16)) if code else _ESCAPES.get(escape[4], escape[4])
