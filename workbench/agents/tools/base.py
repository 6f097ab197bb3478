"""The base class of tools, with verl's names and return shapes; a tool's schema in OpenAI's form, and calls checked against it.

A plain typed function is a tool, too: its schema comes from type hints and docstring.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import itertools
import math
import re
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints, overload
from uuid import uuid4

from workbench.agents.protocol import Tool, ToolResponse, as_text
from workbench.base.config import parameters_of, require
from workbench.base.errors import SettingError, describe, first_line, nearest
from workbench.rewards import runner
from workbench.rewards.score import Status

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_TYPES = ("string", "integer", "number", "boolean", "array", "object", "null")


def tool_schema(given: Any) -> dict[str, Any]:
    """Convert a tool's schema to OpenAI's form, `{"type": "function", "function": {name, description, parameters}}`.

    `parameters` become `{type, properties, required}`. `given` may be in that form, its inner part, an object with
    `model_dump` (verl's and MCP's pydantic models), or the short form of a hand-written yaml, where `parameters` are
    the properties themselves and all of them required. Raises `SettingError` for anything else.
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
"""`tool_schema` under another name, for functions with a parameter `tool_schema`."""


def _mapping(what: str, value: Any, expected: str = "a mapping") -> Mapping[str, Any]:
    require(isinstance(value, Mapping), what, expected=expected, found=value)
    return value


def _parameters(name: str, schema: Any) -> dict[str, Any]:
    whole = _mapping(f"parameters of tool {name!r}", schema)
    short = whole.get("type") != "object"
    properties = whole if short else _mapping(f"properties of tool {name!r}", whole.get("properties") or {})
    required = list(properties if short else whole.get("required") or ())
    for key, value in properties.items():
        place = f"{key!r} of tool {name!r}"
        for kind in _as_list(_mapping(f"parameter {place}", value, "a mapping such as {type: string}").get("type")):
            require(kind in _TYPES, f"type of {place}", expected=f"one of {', '.join(_TYPES)}", found=kind)
    for key in required:
        if key not in properties:
            raise SettingError(f"required argument {key!r} of tool {name!r}", expected=f"one of {list(properties)}")
    plain = {str(key): dict(value) for key, value in properties.items()}
    return {**({} if short else whole), "type": "object", "properties": plain, "required": required}


def same_arguments(own: Mapping[str, Any], schema: Mapping[str, Any]) -> None:
    """Raise `SettingError` unless the `schema` given for a tool has the same arguments as the tool's `own` schema."""
    wanted, names = (sorted(one["function"]["parameters"]["properties"]) for one in (own, schema))
    if wanted != names:
        what = f"the schema of tool {schema['function']['name']!r}"
        raise SettingError(what, expected=f"the arguments {wanted}", found=names)


def check_arguments(schema: Mapping[str, Any], arguments: Any) -> str | None:
    """Check a call's arguments against a schema of `tool_schema`'s form: None, or an error text for the model.

    Checks names, types, `enum`, `items`, `anyOf`, nested `properties` and finite numbers; the rest of JSON schema is left to
    the tool. Never raises, whatever the arguments are.
    """
    function = schema["function"]
    parameters = function["parameters"]
    name, properties = function["name"], parameters["properties"]
    if not isinstance(arguments, Mapping):
        return f"Error: the arguments of {name} must be a JSON object, not {_kind_of(arguments)}."
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
    wrong = (_faults(str(key), value, properties.get(key)) for key, value in arguments.items())
    try:
        first = next(itertools.chain.from_iterable(wrong), None)
    except RecursionError:
        first = "lists and objects are nested too deep"
    return f"Error: {name}: {first}." if first else None


def _faults(place: str, value: Any, schema: Any) -> Iterator[str]:
    """Yield what is wrong with a value, as text, and with the values inside it."""
    schema = schema if isinstance(schema, Mapping) else {}
    kinds = _as_list(schema.get("type"))
    if schema.get("anyOf"):
        faults = [next(_faults(place, value, choice), None) for choice in schema["anyOf"]]
        if faults[0] and None not in faults:
            yield faults[0]
    elif "enum" in schema and (type(value), value) not in [(type(one), one) for one in schema["enum"]]:
        yield f"{place} must be one of {', '.join(map(repr, schema['enum']))}, not {describe(value)}"
    elif isinstance(value, float) and not math.isfinite(value):
        yield f"{place} must be a finite number"
    elif kinds and not any(kind in _kinds(value) for kind in kinds):
        yield f"{place} must be {_article(kinds)}, not {_kind_of(value)}"
    else:
        yield from _wrong_inside(place, value, schema)


def _wrong_inside(place: str, value: Any, schema: Mapping[str, Any]) -> Iterator[str]:
    if isinstance(value, list):
        for number, item in enumerate(value):
            yield from _faults(f"{place}[{number}]", item, schema.get("items"))
    elif isinstance(value, Mapping):
        if absent := [key for key in schema.get("required") or () if key not in value]:
            yield f"{place} is missing {_names(absent)}"
        known, others = schema.get("properties") or {}, schema.get("additionalProperties")
        for key, item in value.items():
            yield from _faults(f"{place}.{key}", item, known.get(key, others))


def _kinds(value: Any) -> list[str]:
    """Return the names of a value's JSON types, the narrowest first."""
    if value is None or isinstance(value, bool):
        return ["null" if value is None else "boolean"]
    if isinstance(value, int | float):
        return ["integer", "number"] if value == value // 1 else ["number"]
    plain = {str: "string", list: "array", tuple: "array", Mapping: "object"}
    return [kind for one, kind in plain.items() if isinstance(value, one)]


def _kind_of(value: Any) -> str:
    named = _kinds(value)
    return _article(named[:1]) if named else f"a {type(value).__name__}"


def _article(kinds: Iterable[str]) -> str:
    return " or ".join("null" if kind == "null" else f"a{'n' if kind[0] in 'aio' else ''} {kind}" for kind in kinds)


def _names(names: Iterable[str]) -> str:
    return ", ".join(repr(str(name)[:80]) for name in names)


def _as_list(value: Any) -> list[Any]:
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
        """Return the tool's schema: `{"type": "function", "function": {name, description, parameters}}`."""
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Make the tool's state for one episode from these arguments; returns (its id, an empty response).

        The id is new if none is given. verl passes a row's arguments in one mapping, as `create_kwargs`: both forms
        work.
        """
        more = kwargs.pop("create_kwargs", None) or {}
        instance_id = instance_id or str(uuid4())
        self.instances[instance_id] = {**kwargs, **more}
        return instance_id, ToolResponse()

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Drop the state of `instance_id`; a second call does nothing."""
        self.instances.pop(instance_id, None)

    def refusal(self, parameters: Any) -> Executed | None:
        """Return the result of a call whose arguments do not fit the schema; None where they fit."""
        wrong = check_arguments(self.tool_schema, parameters)
        return refused(wrong) if wrong else None

    def broken(self, cause: Exception, seconds: float | None) -> Executed:
        """Make the result of a call in which the tool raised `cause`, or took more than `seconds`."""
        late = isinstance(cause, TimeoutError) and seconds
        why = f"no answer within {seconds:g} s" if late else first_line(cause)
        return broken(f"Error when executing tool {self.name}: {why}", why)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"


def answered(text: str, reward: float | None = None, **record: Any) -> Executed:
    """Make the result of a call that worked."""
    return ToolResponse(text=text), reward, {"status": Status.SCORED.value, **record}


def refused(text: str, reward: float | None = 0.0, **record: Any) -> Executed:
    """Make the result of a call that was wrong: the model gets the reason as `text`, and the call has reward 0, as in
    verl."""
    return ToolResponse(text=text), reward, {"status": Status.NO_ANSWER.value, "why": text, **record}


def broken(text: str, why: str, **record: Any) -> Executed:
    """Make the result of a call in which the tool failed: the model gets `text`, the record has `why`, and there is no
    reward."""
    return ToolResponse(text=text), None, {"status": Status.INFRA_ERROR.value, "why": why, **record}


MAX_THREADS = 1024
"""Limit of the threads of synchronous tools, including those that nobody waits for any more."""
_SCALARS = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
_PLAIN: dict[Any, dict[str, Any]] = {Any: {}, **{kind: {"type": name} for kind, name in _SCALARS.items()}}
_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns?|Raises|Yields|Examples?|Notes?):[ \t]*$", re.M)
_ENTRY = re.compile(r"\*{0,2}(\w+)[ \t]*(?:\([^)]*\))?:(.*)", re.S)
_threads = threading.BoundedSemaphore(MAX_THREADS)


class FunctionTool(BaseTool):
    """A Python function as a tool that a model calls by name; made by `function_tool`.

    A synchronous function runs in a thread of its own. **A thread cannot be killed**: a function that never returns keeps
    its thread until the process ends (it does not keep the process alive). Untrusted code, above all a model's, belongs in
    the sandbox (`PythonTool`), never here.

    The function may return text, another value (the model reads its JSON, `agents.protocol.plain`), a `ToolResponse`, or a tuple of
    one of these with a reward, or with a reward and a record. What it raises, and a value without a form in JSON, becomes a
    text for the model, and a record with status *infra_error*.

    Args:
        function: sync or async, with type hints.
        name: the tool's name; None: the function's.
        description: for the model; None: the docstring's first part.
        timeout: limit of a call in seconds; None: the caller's limit alone.
        tool_schema: a schema with the same arguments, in place of the one from hints and docstring.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        description: str | None = None,
        timeout: float | None = None,
        tool_schema: Any = None,
    ) -> None:
        derived = schema_of(function, name=name, description=description)
        super().__init__({"timeout": timeout}, tool_schema or derived)
        same_arguments(derived, self.tool_schema)
        self.function = function
        self.timeout = timeout
        self._floats = [key for key, hint in _hints(function).items() if hint is float]
        self.__name__ = self.name
        self.__doc__ = function.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the Python function itself, without a check of its arguments."""
        return self.function(*args, **kwargs)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Executed:
        """Call the function with the model's arguments; arguments that do not fit the schema get an error text."""
        if wrong := self.refusal(parameters):
            return wrong
        arguments = {key: float(value) if key in self._floats else value for key, value in parameters.items()}
        is_async = inspect.iscoroutinefunction(self.function)
        try:
            async with asyncio.timeout(self.timeout):
                work = self.function(**arguments) if is_async else in_thread(self.function, **arguments)
                return _as_executed(await work)
        except Exception as cause:  # noqa: BLE001 - a foreign function; the record says what it raised
            return self.broken(cause, self.timeout)


@overload
def function_tool(function: Callable[..., Any]) -> FunctionTool: ...
@overload
def function_tool(
    function: None = None, *, name: str | None = None, description: str | None = None, timeout: float | None = None
) -> Callable[[Callable[..., Any]], FunctionTool]: ...


def function_tool(
    function: Callable[..., Any] | None = None,
    *,
    name: str | None = None,
    description: str | None = None,
    timeout: float | None = None,
) -> Any:
    """Make a tool of a typed function, sync or async: `@function_tool`, or with settings `@function_tool(timeout=5)`.

    Name and description are those of the function and its docstring's first part; the docstring's `Args:` describe the
    parameters. Raises `SettingError`, naming the parameter, for one without a type hint, or of a type without JSON form.
    """
    make = functools.partial(FunctionTool, name=name, description=description, timeout=timeout)
    return make if function is None else make(function)


tool = function_tool


def _as_executed(result: Any) -> Executed:
    """Convert a function's return value to what `execute` returns. Raises `TypeError` for a value that no tool may
    return."""
    parts = result if isinstance(result, tuple) else (result,)
    answer, reward, record = (*parts, None, None)[:3] if 1 <= len(parts) <= 3 else (parts, None, None)
    if isinstance(answer, tuple) or isinstance(reward, str | Mapping) or not isinstance(record or {}, Mapping):
        raise TypeError(f"a tool returned {describe(result)}; expected (answer, reward, record) or its first parts")
    if isinstance(answer, Mapping) and answer and set(answer) <= {"text", "image", "video"}:
        answer = ToolResponse(**answer)
    if not isinstance(answer, ToolResponse):
        answer = ToolResponse(text=as_text(answer))
    status = answered("")[2]
    return answer, None if reward is None else float(reward), {**status, **(record or {})}


async def in_thread(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a function in a new daemon thread, and await its result.

    The event loop's executor has few threads: one that hangs would be missing from then on, and keep the process alive.
    Raises what the function raises, and `RuntimeError` where `MAX_THREADS` are running.
    """
    if not _threads.acquire(blocking=False):
        raise RuntimeError(f"no thread is free for a tool: {MAX_THREADS} are running, or never returned")

    def work() -> Any:
        try:
            return function(*args, **kwargs)
        finally:
            _threads.release()

    return await runner.in_thread(work)


def schema_of(
    function: Callable[..., Any], *, name: str | None = None, description: str | None = None
) -> dict[str, Any]:
    """Make the tool schema of a typed function with a Google-style docstring. Raises `SettingError` as `function_tool`
    does."""
    called = name or getattr(function, "__name__", type(function).__name__)
    summary, described = _documented(inspect.getdoc(function) or "")
    taken = parameters_of(function, f"function {called}")  # before its hints: of what wraps itself those have no end
    hints = _hints(function)
    properties: dict[str, Any] = {}
    required = []
    for key, parameter in taken.items():
        place = f"parameter {key!r} of {called}"
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise SettingError(place, expected="a parameter that can be passed by name", found=str(parameter))
        if key not in hints:
            raise SettingError(place, expected="a type hint", do="add one: the tool's schema is built from it")
        properties[key] = _typed(hints[key], place) | ({"description": described[key]} if key in described else {})
        if parameter.default is parameter.empty:
            required.append(key)
    parameters = {"type": "object", "properties": properties, "required": required}
    inner = {"name": called, "description": description or summary, "parameters": parameters}
    return {"type": "function", "function": inner}


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        hints = get_type_hints(function)
    except (NameError, TypeError, AttributeError) as cause:
        name = getattr(function, "__name__", describe(function))
        raise SettingError(f"the type hints of {name} cannot be read", found=cause) from cause
    hints.pop("return", None)
    return hints


def _typed(hint: Any, place: str) -> dict[str, Any]:
    if hint in _PLAIN:
        return {**_PLAIN[hint]}
    origin, args = get_origin(hint) or hint, get_args(hint)
    if origin in (Union, types.UnionType):
        return _union_schema([_typed(one, place) for one in args])
    if origin is Literal and set(map(type, args)) <= set(_SCALARS):
        kind, *others = dict.fromkeys(_SCALARS[type(one)] for one in args)
        return {"type": [kind, *others] if others else kind, "enum": list(args)}
    if origin is list:
        return {"type": "array", **({"items": _typed(args[0], place)} if args else {})}
    if origin is dict and args[:1] in ((), (str,)):
        return {"type": "object", **({"additionalProperties": _typed(args[1], place)} if args else {})}
    expected = "str, int, float, bool, None, Literal, Any, list[…], dict[str, …] or a union of these"
    raise SettingError(f"the type of {place}", expected=expected, found=describe(hint))


def _union_schema(members: list[dict[str, Any]]) -> dict[str, Any]:
    plain = all(set(one) == {"type"} for one in members)
    return {"type": [one["type"] for one in members]} if plain else {"anyOf": members}


def _documented(text: str) -> tuple[str, dict[str, str]]:
    """Split a docstring: (the text before its sections, parameter → its text in `Args:`)."""
    sections = _SECTION.split(text)
    described: dict[str, str] = {}
    for title, body in zip(sections[1::2], sections[2::2], strict=True):
        for entry in re.split(r"\n(?=\S)", inspect.cleandoc(body)):
            parameter = _ENTRY.match(entry)
            if parameter and title in ("Args", "Arguments", "Parameters"):
                described[parameter[1]] = " ".join(parameter[2].split())
    return " ".join(sections[0].split()), described
