"""A plain typed function as a tool: its schema comes from type hints and docstring."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import re
import threading
import types
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints, overload

from workbench.agents.protocol import ToolResponse, as_text
from workbench.agents.tools.base import BaseTool, Executed, answered, same_arguments
from workbench.base.config import parameters_of
from workbench.base.errors import SettingError, describe
from workbench.rewards import runner

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
        """Call the Python function itself."""
        return self.function(*args, **kwargs)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Executed:
        """Call the function with the model's arguments; those that do not fit the schema get an error text."""
        if wrong := self.refusal(parameters):
            return wrong
        arguments = {key: float(value) if key in self._floats else value for key, value in parameters.items()}
        own = inspect.iscoroutinefunction(self.function)
        try:
            async with asyncio.timeout(self.timeout):
                work = self.function(**arguments) if own else in_thread(self.function, **arguments)
                return _executed(await work)
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


def _executed(result: Any) -> Executed:
    """What a function returned, as `execute` returns it. Raises `TypeError` for what no tool may return."""
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
    """Run a function in a daemon thread of its own, and await its result.

    The event loop's executor has few threads: one that hangs would be missing from then on, and keep the process alive.
    Raises what the function raises, and `RuntimeError` where `MAX_THREADS` are running.
    """
    if not _threads.acquire(blocking=False):
        raise RuntimeError(f"no thread is free for a tool: {MAX_THREADS} are running, or never returned")
    context = contextvars.copy_context()

    def work() -> Any:
        try:
            return context.run(function, *args, **kwargs)
        finally:
            _threads.release()

    return await runner.in_thread(work, "workbench-tool")


def schema_of(
    function: Callable[..., Any], *, name: str | None = None, description: str | None = None
) -> dict[str, Any]:
    """The tool schema of a typed function with a Google-style docstring. Raises `SettingError` as `function_tool` does."""
    called = name or getattr(function, "__name__", type(function).__name__)
    summary, described = _documented(inspect.getdoc(function) or "")
    taken = parameters_of(function, f"function {called}")  # before its hints: of what wraps itself those have no end
    hints = _hints(function)
    properties: dict[str, Any] = {}
    required = []
    for key, parameter in taken.items():
        place = f"parameter {key!r} of {called}"
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise SettingError(place, expected="a parameter that can be given by name", found=str(parameter))
        if key not in hints:
            raise SettingError(place, expected="a type hint", do="add one: the tool's schema is made of it")
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
        return _joined([_typed(one, place) for one in args])
    if origin is Literal and set(map(type, args)) <= set(_SCALARS):
        kind, *others = dict.fromkeys(_SCALARS[type(one)] for one in args)
        return {"type": [kind, *others] if others else kind, "enum": list(args)}
    if origin is list:
        return {"type": "array", **({"items": _typed(args[0], place)} if args else {})}
    if origin is dict and args[:1] in ((), (str,)):
        return {"type": "object", **({"additionalProperties": _typed(args[1], place)} if args else {})}
    expected = "str, int, float, bool, None, Literal, Any, list[…], dict[str, …] or a union of these"
    raise SettingError(f"the type of {place}", expected=expected, found=describe(hint))


def _joined(members: list[dict[str, Any]]) -> dict[str, Any]:
    plain = all(set(one) == {"type"} for one in members)
    return {"type": [one["type"] for one in members]} if plain else {"anyOf": members}


def _documented(text: str) -> tuple[str, dict[str, str]]:
    """(the docstring's text before its sections, parameter → its text in `Args:`)."""
    sections = _SECTION.split(text)
    described: dict[str, str] = {}
    for title, body in zip(sections[1::2], sections[2::2], strict=True):
        for entry in re.split(r"\n(?=\S)", inspect.cleandoc(body)):
            found = _ENTRY.match(entry)
            if found and title in ("Args", "Arguments", "Parameters"):
                described[found[1]] = " ".join(found[2].split())
    return " ".join(sections[0].split()), described
