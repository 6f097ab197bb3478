"""A plain typed function as a tool: its schema from hints and docstring, its result whatever it likes to return."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import json
import re
import threading
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, overload

from workbench.agents.protocol import ToolResponse
from workbench.agents.tools.base import BaseTool, Executed, answered, broken
from workbench.errors import SettingError, describe, first_line, message

MAX_THREADS = 1024
"""Threads of synchronous tools at one time, those that were given up on included."""
_SCALARS = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
_threads = 0
_lock = threading.Lock()


class FunctionTool(BaseTool):
    """A function that a model calls by name; `function_tool` makes it.

    A synchronous function runs in a thread of its own, so that a slow one holds up nobody. `timeout` (seconds; None: the
    caller's deadline alone) bounds a call; after it, or when the caller cancels, the answer is not waited for any more.
    **A thread cannot be killed**: a function that never returns keeps its thread until the process ends (it does not keep
    the process alive). Code that nobody trusts, a model's above all, belongs in the sandbox (`PythonTool`), never here.

    The function may return text, a dict, a list or a number (the model reads it as JSON), a `ToolResponse`, or a tuple
    of one of these with a reward, or with a reward and a record. What it raises becomes a text for the model and a record
    of ours, *machinery failed*.
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
        wanted, given = (one["function"]["parameters"]["properties"] for one in (derived, self.tool_schema))
        if set(given) != set(wanted):
            raise SettingError(
                message(
                    f"the schema of tool {self.name!r}", expected=f"arguments {sorted(wanted)}", found=sorted(given)
                )
            )
        self.function = function
        self.timeout = timeout
        self._floats = [key for key, hint in _hints(function).items() if hint is float]
        self.__name__ = self.name
        self.__doc__ = function.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function itself, for a cell or another tool."""
        return self.function(*args, **kwargs)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Executed:
        """Ask the function, once its arguments fit."""
        if wrong := self.refusal(parameters):
            return wrong
        arguments = {key: float(value) if key in self._floats else value for key, value in parameters.items()}
        try:
            async with asyncio.timeout(self.timeout):
                if inspect.iscoroutinefunction(self.function):
                    result = await self.function(**arguments)
                else:
                    result = await in_thread(self.function, **arguments)
            return normalised(result)
        except TimeoutError as cause:
            why = f"no answer within {self.timeout:g} s" if self.timeout else first_line(cause)
            return broken(f"Error when executing tool {self.name}: {why}", why)
        except Exception as cause:  # noqa: BLE001 - a foreign function; the record says what it raised
            why = first_line(cause)
            return broken(f"Error when executing tool {self.name}: {why}", why)


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
    """`@function_tool`, or with settings: a plain typed function, sync or async, becomes a tool.

    Name and description are the function's own and its docstring's first part; what `Args:` says describes the
    parameters. Raises `SettingError` that names a parameter without a hint, or of a type that JSON has not.
    """
    if function is None:
        return lambda one: FunctionTool(one, name=name, description=description, timeout=timeout)
    return FunctionTool(function, name=name, description=description, timeout=timeout)


tool = function_tool


def normalised(result: Any) -> Executed:
    """What a function returned, as `execute` returns it. Raises `TypeError` for what no tool may return."""
    if isinstance(result, tuple):
        if not 1 <= len(result) <= 3:
            raise TypeError(
                f"a tool returned a tuple of {len(result)}; expected (answer, reward, record) or a part of it"
            )
        filled: list[Any] = [*result, None, None]
        answer, reward, record = filled[:3]
        if isinstance(answer, tuple) or isinstance(reward, str | Mapping) or not isinstance(record or {}, Mapping):
            raise TypeError(f"a tool returned {describe(result)}; expected (answer, reward, record) or a part of it")
        text, _, status = normalised(answer)
        return text, None if reward is None else float(reward), {**status, **(record or {})}
    if isinstance(result, Mapping) and result and set(result) <= {"text", "image", "video"}:
        result = ToolResponse(**result)
    if not isinstance(result, ToolResponse):
        return answered(result if isinstance(result, str) else json.dumps(result, ensure_ascii=False))
    for kind in ("image", "video"):
        if not isinstance(getattr(result, kind), list | None):
            raise TypeError(f"a tool's {kind} must be a list, not {describe(getattr(result, kind))}")
    return result, *answered("")[1:]


async def in_thread(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function in a daemon thread of its own and wait for it, for as long as the caller waits.

    Not the loop's executor: that has few threads, and one that hangs would be missing from then on and would hold up
    the interpreter's end. Raises what the function raises, and `RuntimeError` where `MAX_THREADS` are out.
    """
    global _threads
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def settle(result: Any, error: BaseException | None) -> None:
        if answer.done():  # nobody waits any more
            return
        if error is None:
            answer.set_result(result)
        else:  # a future cannot hold a StopIteration
            answer.set_exception(RuntimeError(first_line(error)) if isinstance(error, StopIteration) else error)

    def work() -> None:
        global _threads
        result, error = None, None
        try:
            result = context.run(function, *args, **kwargs)
        except BaseException as cause:  # noqa: BLE001 - it is raised where it is awaited
            error = cause if isinstance(cause, Exception) else RuntimeError(first_line(cause))
        with _lock:
            _threads -= 1
        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, error)

    with _lock:
        if _threads >= MAX_THREADS:
            raise RuntimeError(f"{_threads} tool threads are out already; a tool that never returns keeps its own")
        _threads += 1
    threading.Thread(target=work, name="workbench-tool", daemon=True).start()
    return await answer


def schema_of(
    function: Callable[..., Any], *, name: str | None = None, description: str | None = None
) -> dict[str, Any]:
    """The schema of a typed function with a Google-style docstring. Raises `SettingError` naming the parameter."""
    called = name or getattr(function, "__name__", type(function).__name__)
    summary, told = _documented(inspect.getdoc(function) or "")
    hints = _hints(function)
    properties: dict[str, Any] = {}
    required = []
    for key, parameter in inspect.signature(function).parameters.items():
        place = f"parameter {key!r} of {called}"
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise SettingError(message(place, expected="one that is given by name", found=str(parameter)))
        if key not in hints:
            raise SettingError(message(place, expected="a type hint", do="write one: the model is told by it"))
        properties[key] = _typed(hints[key], place) | ({"description": told[key]} if key in told else {})
        if parameter.default is parameter.empty:
            required.append(key)
    parameters = {"type": "object", "properties": properties, "required": required}
    return {
        "type": "function",
        "function": {"name": called, "description": description or summary, "parameters": parameters},
    }


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        hints = typing.get_type_hints(function)
    except (NameError, TypeError, AttributeError) as cause:
        name = getattr(function, "__name__", describe(function))
        raise SettingError(message(f"the type hints of {name} cannot be read", found=cause)) from cause
    hints.pop("return", None)
    return hints


def _typed(hint: Any, place: str) -> dict[str, Any]:
    if hint is Any:
        return {}
    if hint in _SCALARS:
        return {"type": _SCALARS[hint]}
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        members = [_typed(one, place) for one in args]
        plain = [one["type"] for one in members if set(one) == {"type"}]
        return {"type": plain} if len(plain) == len(members) else {"anyOf": members}
    if origin is Literal and all(type(one) in _SCALARS for one in args):
        kinds = list(dict.fromkeys(_SCALARS[type(one)] for one in args))
        return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": list(args)}
    if hint is list or origin is list:
        return {"type": "array"} | ({"items": _typed(args[0], place)} if args else {})
    if hint is dict or (origin is dict and args[0] is str):
        return {"type": "object"} | ({"additionalProperties": _typed(args[1], place)} if args else {})
    expected = "str, int, float, bool, None, Literal, Any, list[…], dict[str, …] or a union of these"
    raise SettingError(message(f"the type of {place}", expected=expected, found=describe(hint)))


def _documented(text: str) -> tuple[str, dict[str, str]]:
    """(What stands before the sections, parameter → what `Args:` says of it)."""
    sections = re.split(
        r"^(Args|Arguments|Parameters|Returns?|Raises|Yields|Examples?|Notes?):[ \t]*$", text, flags=re.M
    )
    told: dict[str, str] = {}
    for title, body in zip(sections[1::2], sections[2::2], strict=True):
        if title in ("Args", "Arguments", "Parameters"):
            told |= dict(_entries(inspect.cleandoc(body)))
    return " ".join(sections[0].split()), told


def _entries(body: str) -> Iterator[tuple[str, str]]:
    for entry in re.split(r"\n(?=\S)", body):
        found = re.match(r"\*{0,2}(\w+)[ \t]*(?:\([^)]*\))?:(.*)", entry, flags=re.S)
        if found:
            yield found[1], " ".join(found[2].split())
