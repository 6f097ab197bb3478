"""The base class of tools, with verl's names and return shapes; a tool's schema in OpenAI's form, and calls checked against it."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar
from uuid import uuid4

from workbench.agents.protocol import Tool, ToolResponse
from workbench.base.errors import SettingError, describe, first_line, nearest
from workbench.rewards.score import Status

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_TYPES = ("string", "integer", "number", "boolean", "array", "object", "null")


def tool_schema(given: Any) -> dict[str, Any]:
    """A tool's schema in OpenAI's form, `{"type": "function", "function": {name, description, parameters}}`.

    `parameters` become `{type, properties, required}`. `given` may be that form, its inner part, an object with
    `model_dump` (verl's and MCP's pydantic models), or the short form of a hand-written yaml, where `parameters` are the
    properties themselves and all of them required. Raises `SettingError` for anything else.
    """
    dump = getattr(given, "model_dump", None)
    schema = _mapping("a tool's schema", dump(exclude_none=True) if callable(dump) else given)
    inner = schema["function"] if isinstance(schema.get("function"), Mapping) else schema
    name = inner.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise SettingError("a tool's name", expected="1 to 64 letters, digits, _ . or -", found=describe(name))
    description = inner.get("description") or ""
    parameters = _parameters(name, inner.get("parameters") or {})
    function = {"name": name, "description": str(description), "parameters": parameters}
    return {"type": "function", "function": function}


in_openai_form = tool_schema
"""The same, where `tool_schema` is a parameter."""


def _mapping(what: str, given: Any, expected: str = "a mapping") -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise SettingError(what, expected=expected, found=describe(given))
    return given


def _parameters(name: str, given: Any) -> dict[str, Any]:
    whole = _mapping(f"parameters of tool {name!r}", given)
    short = whole.get("type") != "object"
    properties = whole if short else _mapping(f"properties of tool {name!r}", whole.get("properties") or {})
    required = list(properties if short else whole.get("required") or ())
    for key, value in properties.items():
        place = f"{key!r} of tool {name!r}"
        for kind in _listed(_mapping(f"parameter {place}", value, "a mapping such as {type: string}").get("type")):
            if kind not in _TYPES:
                raise SettingError(f"type of {place}", expected=f"one of {', '.join(_TYPES)}", found=describe(kind))
    for key in required:
        if key not in properties:
            raise SettingError(f"required argument {key!r} of tool {name!r}", expected=f"one of {list(properties)}")
    plain = {str(key): dict(value) for key, value in properties.items()}
    return {**({} if short else whole), "type": "object", "properties": plain, "required": required}


def same_arguments(own: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raise `SettingError` unless the schema `given` for a tool has the same arguments as the tool's `own` schema."""
    wanted, found = (sorted(one["function"]["parameters"]["properties"]) for one in (own, given))
    if wanted != found:
        what = f"the schema of tool {given['function']['name']!r}"
        raise SettingError(what, expected=f"the arguments {wanted}", found=found)


def check_arguments(schema: Mapping[str, Any], arguments: Any) -> str | None:
    """Check a call's arguments against a schema of `tool_schema`'s form: None, or an error text for the model.

    Checks names, types, `enum`, `items`, `anyOf`, nested `properties` and finite numbers; the rest of JSON schema is left to
    the tool. Never raises, whatever the arguments are.
    """
    function = schema["function"]
    parameters = function["parameters"]
    name, properties = function["name"], parameters["properties"]
    if not isinstance(arguments, Mapping):
        return f"Error: the arguments of {name} must be a JSON object, not {_kind(arguments)}."
    listed = [f"{key}{'' if key in parameters['required'] else ' (optional)'}" for key in properties]
    usage = f"Its arguments: {', '.join(listed)}." if listed else "It takes no arguments."
    missing = [key for key in parameters["required"] if key not in arguments]
    if missing:
        return f"Error: {name} is missing the argument {_names(missing)}. {usage}"
    extra = [str(key) for key in arguments if key not in properties]
    if extra and not parameters.get("additionalProperties"):
        close = nearest(extra[0], properties)
        hint = f" Did you mean {close!r}?" if close else ""
        return f"Error: {name} has no argument {_names(extra[:5])}.{hint} {usage}"
    wrong = (_wrong(str(key), value, properties.get(key)) for key, value in arguments.items())
    try:
        first = next(itertools.chain.from_iterable(wrong), None)
    except RecursionError:
        first = "lists and objects are nested too deep"
    return f"Error: {name}: {first}." if first else None


def _wrong(place: str, value: Any, schema: Any) -> Iterator[str]:
    """What is wrong with a value, and with what is inside it."""
    schema = schema if isinstance(schema, Mapping) else {}
    kinds = _listed(schema.get("type"))
    if schema.get("anyOf"):
        found = [next(_wrong(place, value, choice), None) for choice in schema["anyOf"]]
        if found[0] and None not in found:
            yield found[0]
    elif "enum" in schema and (type(value), value) not in [(type(one), one) for one in schema["enum"]]:
        yield f"{place} must be one of {', '.join(map(repr, schema['enum']))}, not {describe(value)}"
    elif isinstance(value, float) and not math.isfinite(value):
        yield f"{place} must be a finite number"
    elif kinds and not any(kind in _kinds(value) for kind in kinds):
        yield f"{place} must be {_article(kinds)}, not {_kind(value)}"
    else:
        yield from _wrong_inside(place, value, schema)


def _wrong_inside(place: str, value: Any, schema: Mapping[str, Any]) -> Iterator[str]:
    if isinstance(value, list):
        for number, item in enumerate(value):
            yield from _wrong(f"{place}[{number}]", item, schema.get("items"))
    elif isinstance(value, Mapping):
        if absent := [key for key in schema.get("required") or () if key not in value]:
            yield f"{place} is missing {_names(absent)}"
        known, others = schema.get("properties") or {}, schema.get("additionalProperties")
        for key, item in value.items():
            yield from _wrong(f"{place}.{key}", item, known.get(key, others))


def _kinds(value: Any) -> list[str]:
    """JSON's names for what a value is, the narrowest first."""
    if value is None or isinstance(value, bool):
        return ["null" if value is None else "boolean"]
    if isinstance(value, int | float):
        return ["integer", "number"] if value == value // 1 else ["number"]
    plain = {str: "string", list: "array", tuple: "array", Mapping: "object"}
    return [kind for one, kind in plain.items() if isinstance(value, one)]


def _kind(value: Any) -> str:
    named = _kinds(value)
    return _article(named[:1]) if named else f"a {type(value).__name__}"


def _article(kinds: Iterable[str]) -> str:
    return " or ".join("null" if kind == "null" else f"a{'n' if kind[0] in 'aio' else ''} {kind}" for kind in kinds)


def _names(names: Iterable[str]) -> str:
    return ", ".join(repr(str(name)[:80]) for name in names)


def _listed(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


Executed = tuple[ToolResponse, float | None, dict[str, Any]]
"""What `execute` returns: the answer, the call's reward or None, and a record of the call."""


class BaseTool(Tool):
    """Base class of tools that a model calls: a subclass defines `execute`, and `create` if it needs state.

    The third value that `execute` returns, the record, has `status` (a `rewards.score.Status`: *scored*; *no_answer*: the
    call was wrong; *infra_error*: the tool failed), `why` in one line, and anything else worth keeping.

    Args:
        config: the tool's settings.
        tool_schema: the schema in OpenAI's form; None: the class's `SCHEMA`.

    Raises `SettingError` for a schema that is missing or invalid.
    """

    SCHEMA: ClassVar[Mapping[str, Any] | None] = None
    """The schema of tools that are made without `tool_schema`."""

    def __init__(self, config: Mapping[str, Any] | None = None, tool_schema: Any = None) -> None:
        self.config: dict[str, Any] = dict(config or {})
        chosen = tool_schema if tool_schema is not None else self.SCHEMA
        if chosen is None:
            do = "give tool_schema=, or define SCHEMA in the class"
            raise SettingError(f"the tool {type(self).__name__} has no schema", do=do)
        self.tool_schema = in_openai_form(chosen)
        self.name: str = self.tool_schema["function"]["name"]
        self.instances: dict[str, dict[str, Any]] = {}
        """Each instance's state, from `create` to `release`."""

    def get_openai_tool_schema(self) -> dict[str, Any]:
        """The tool's schema: `{"type": "function", "function": {name, description, parameters}}`."""
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Make the tool's state for one episode from these arguments; returns (its id, an empty response).

        The id is new if none is given. verl passes a row's arguments in one piece, as `create_kwargs`: both forms work.
        """
        given = kwargs.pop("create_kwargs", None) or {}
        instance_id = instance_id or str(uuid4())
        self.instances[instance_id] = {**kwargs, **given}
        return instance_id, ToolResponse()

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Drop the state of `instance_id`; a second call does nothing."""
        self.instances.pop(instance_id, None)

    def refusal(self, parameters: Any) -> Executed | None:
        """The result of a call whose arguments do not fit the schema; None where they fit."""
        wrong = check_arguments(self.tool_schema, parameters)
        return refused(wrong) if wrong else None

    def broken(self, cause: Exception, seconds: float | None) -> Executed:
        """The result of a call in which the tool raised `cause`, or took more than `seconds`."""
        late = isinstance(cause, TimeoutError) and seconds
        why = f"no answer within {seconds:g} s" if late else first_line(cause)
        return broken(f"Error when executing tool {self.name}: {why}", why)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"


def answered(text: str, reward: float | None = None, **record: Any) -> Executed:
    """The result of a call that worked."""
    return ToolResponse(text=text), reward, {"status": Status.SCORED.value, **record}


def refused(text: str, reward: float | None = 0.0, **record: Any) -> Executed:
    """The result of a call that was wrong: the model gets the reason as `text`, and the call reward 0, as in verl."""
    return ToolResponse(text=text), reward, {"status": Status.NO_ANSWER.value, "why": text, **record}


def broken(text: str, why: str, **record: Any) -> Executed:
    """The result of a call in which the tool failed: the model gets `text`, the record has `why`, and there is no reward."""
    return ToolResponse(text=text), None, {"status": Status.INFRA_ERROR.value, "why": why, **record}
