"""A tool's schema in OpenAI's form: brought into shape when a tool is made, and asked of every call's arguments."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from workbench.errors import SettingError, describe, message, nearest

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_TYPES = ("string", "integer", "number", "boolean", "array", "object", "null")


def tool_schema(given: Any) -> dict[str, Any]:
    """`{"type": "function", "function": {name, description, parameters: {type, properties, required}}}`.

    Takes that, the inner part alone, an object with `model_dump` (verl's and MCP's pydantic models), and the short form
    of a hand-written yaml, where `parameters` are the properties themselves and all of them required.
    Raises `SettingError` for anything else.
    """
    dump = getattr(given, "model_dump", None)
    schema = dump(exclude_none=True) if callable(dump) else given
    if not isinstance(schema, Mapping):
        raise SettingError(message("a tool's schema", expected="a mapping", found=describe(schema)))
    inner = schema["function"] if isinstance(schema.get("function"), Mapping) else schema
    name = inner.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise SettingError(
            message("a tool's name", expected="letters, digits, _ . or -, up to 64", found=describe(name))
        )
    description = inner.get("description") or ""
    parameters = _parameters(name, inner.get("parameters") or {})
    function = {"name": name, "description": str(description), "parameters": parameters}
    return {"type": "function", "function": function}


def _parameters(name: str, given: Any) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise SettingError(message(f"parameters of tool {name!r}", expected="a mapping", found=describe(given)))
    short = given.get("type") != "object"
    properties = given if short else given.get("properties") or {}
    required = list(properties) if short else list(given.get("required") or ())
    if not isinstance(properties, Mapping):
        raise SettingError(message(f"properties of tool {name!r}", expected="a mapping", found=describe(properties)))
    for key, value in properties.items():
        if not isinstance(value, Mapping):
            expected = "a mapping such as {type: string}"
            raise SettingError(message(f"parameter {key!r} of tool {name!r}", expected=expected, found=describe(value)))
        for kind in _listed(value.get("type")):
            if kind not in _TYPES:
                expected = f"one of {', '.join(_TYPES)}"
                raise SettingError(
                    message(f"type of {key!r} of tool {name!r}", expected=expected, found=describe(kind))
                )
    for key in required:
        if key not in properties:
            raise SettingError(message(f"tool {name!r} requires {key!r}", expected="one of its properties"))
    kept = {} if short else dict(given)
    return {
        **kept,
        "type": "object",
        "properties": {str(k): dict(v) for k, v in properties.items()},
        "required": required,
    }


def check_arguments(schema: Mapping[str, Any], arguments: Any) -> str | None:
    """None where the arguments fit a schema of `tool_schema`'s form, else a text that tells the model what does not.

    Asks for names, types, `enum`, `items`, `anyOf`, nested `properties` and finite numbers; the rest of JSON schema is
    left to the tool. Never raises for any arguments.
    """
    function = schema["function"]
    parameters = function["parameters"]
    name, properties = function["name"], parameters["properties"]
    if not isinstance(arguments, Mapping):
        return f"Error: the arguments of {name} must be a JSON object, not {_kind(arguments)}."
    missing = [key for key in parameters["required"] if key not in arguments]
    if missing:
        return f"Error: {name} is missing the argument {_names(missing)}. {_usage(properties, parameters['required'])}"
    extra = [str(key) for key in arguments if key not in properties]
    if extra and not parameters.get("additionalProperties"):
        close = nearest(extra[0], properties)
        hint = f" Did you mean {close!r}?" if close else ""
        known = _usage(properties, parameters["required"])
        return f"Error: {name} has no argument {_names(extra[:5])}.{hint} {known}"
    for key, value in arguments.items():
        wrong = _mismatch(str(key), value, properties.get(key, {}))
        if wrong:
            return f"Error: {name}: {wrong}."
    return None


def _mismatch(place: str, value: Any, schema: Mapping[str, Any]) -> str | None:
    choices = schema.get("anyOf")
    if choices:
        told = [_mismatch(place, value, choice) for choice in choices]
        return None if None in told else told[0]
    if "enum" in schema and not any(value == one and type(value) is type(one) for one in schema["enum"]):
        return f"{place} must be one of {', '.join(map(repr, schema['enum']))}, not {describe(value)}"
    if isinstance(value, float) and not math.isfinite(value):
        return f"{place} must be a finite number"
    kinds = _listed(schema.get("type"))
    if kinds and not any(_is(kind, value) for kind in kinds):
        return f"{place} must be {_article(kinds)}, not {_kind(value)}"
    if isinstance(value, list) and isinstance(schema.get("items"), Mapping):
        wrong = (_mismatch(f"{place}[{number}]", item, schema["items"]) for number, item in enumerate(value))
        return next(filter(None, wrong), None)
    if isinstance(value, Mapping):
        return _inside(place, value, schema)
    return None


def _inside(place: str, value: Mapping[str, Any], schema: Mapping[str, Any]) -> str | None:
    absent = [key for key in schema.get("required") or () if key not in value]
    if absent:
        return f"{place} is missing {_names(absent)}"
    others, known = schema.get("additionalProperties"), schema.get("properties") or {}
    for key, item in value.items():
        within = known.get(key, others if isinstance(others, Mapping) else {})
        wrong = _mismatch(f"{place}.{key}", item, within)
        if wrong:
            return wrong
    return None


def _is(kind: str, value: Any) -> bool:
    if isinstance(value, bool) or value is None:
        return kind == ("null" if value is None else "boolean")
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    there = {"string": isinstance(value, str), "array": isinstance(value, list | tuple), "integer": whole}
    there |= {"number": isinstance(value, int | float), "object": isinstance(value, Mapping)}
    return there.get(kind, False)


def _kind(value: Any) -> str:
    named = next(
        (kind for kind in ("null", "boolean", "integer", "number", "string", "array", "object") if _is(kind, value)),
        None,
    )
    return _article([named]) if named else f"a {type(value).__name__}"


def _article(kinds: Iterable[str]) -> str:
    return " or ".join("null" if kind == "null" else f"a{'n' if kind[0] in 'aio' else ''} {kind}" for kind in kinds)


def _usage(properties: Mapping[str, Any], required: Iterable[str]) -> str:
    told = [f"{key}{'' if key in required else ' (optional)'}" for key in properties]
    return f"Its arguments: {', '.join(told)}." if told else "It takes no arguments."


def _names(names: Iterable[str]) -> str:
    return ", ".join(repr(str(name)[:80]) for name in names)


def _listed(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]
