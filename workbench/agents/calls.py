"""Runs tool calls with a time limit: each is answered and recorded, whatever happens; long answers are cut with a mark."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import inspect
import math
import time
from collections.abc import Awaitable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from workbench.agents.parsers import read_json
from workbench.agents.protocol import FunctionCall, Tool, ToolCall, ToolResponse, as_text
from workbench.base import runtime
from workbench.base.config import require
from workbench.base.errors import DataError, SettingError, describe, first_line, nearest
from workbench.base.shown import encodable
from workbench.datasets.pictures import Picture
from workbench.rewards.score import Score

T = TypeVar("T")
SIDES = ("left", "right", "middle")
_STATUSES = {"no_answer": "refused", "crashed": "refused", "timeout": "refused", "infra_error": "error"}
"""Status in the record that a tool returns (`rewards.score.Status`) → status of the call (`ToolCall.status`)."""
END_SECONDS = 5.0
"""Time limit in seconds of the last calls of a tool or interaction (`release`, `calc_reward`), when the episode is
over."""
CUT = "...(truncated)..."


def truncate(text: str, limit: int, side: str) -> tuple[str, str]:
    """Cut a text to `limit` characters and a mark; returns (the text, a note on what was cut, "" where nothing was).

    `side` is the side that is cut off, as in verl since 0.8: `left` keeps the end, `right` keeps the beginning,
    `middle` keeps both ends. (Up to 0.7 verl's `left` kept the beginning.)
    """
    over, head = len(text) - limit, (limit + 1) // 2
    if over <= 0:
        return text, ""
    kept = {"left": CUT[3:] + text[over:], "right": text[:limit] + CUT[:-3]}
    middle = text[:head] + CUT + text[len(text) - limit + head :]
    return kept.get(side, middle), f"{over} of {len(text)} characters cut from the {side}"


async def within(work: Awaitable[T], seconds: float | None) -> T:
    """Await `work`; after `seconds` (None: never) raise `TimeoutError`, even where the work ignores its cancellation."""
    task = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        task.cancel()
        raise
    if not done:
        task.cancel()
        # nobody waits for it any more; asyncio would complain of an exception that was never looked at
        task.add_done_callback(lambda late: late.cancelled() or late.exception())
        raise TimeoutError(f"no answer within {seconds:g} s, the limit for a tool or simulated user")
    return task.result()


_TOOL = ("get_openai_tool_schema", "create", "execute", "calc_reward", "release")


def checked_tools(tools: Any) -> list[Tool]:
    """Return an agent's `tools=` (list or mapping) as a list. Raises `SettingError`, naming the entry, for an object
    that is not a tool."""
    if isinstance(tools, Mapping):
        tools = tools.values()
    alone = isinstance(tools, str | type) or inspect.isroutine(tools) or hasattr(tools, "get_openai_tool_schema")
    if alone or not isinstance(tools, Iterable):
        do = f"write tools=[{named(tools)}]" if alone and not isinstance(tools, str) else None
        raise SettingError("tools of an agent", expected="a list of tools", found=describe(tools), do=do)
    listed = list(tools)
    for place, tool in enumerate(listed):
        if do := _no_tool(tool):
            raise SettingError(f"tools[{place}] of an agent", expected="a tool", found=describe(tool), do=do)
        if plain := [name for name in _TOOL[1:] if not_async(getattr(tool, name))]:
            expected, do = f"`async def {plain[0]}`, as in BaseTool", "write `async` before it"
            raise SettingError(f"tool {tool.name!r}", expected=expected, found="a method that is not async", do=do)
    return listed


def _no_tool(tool: Any) -> str:
    """Return advice on how to make a tool of an object that is not a tool; "" for a tool."""
    if isinstance(tool, type):
        return f"make an object of it: {tool.__name__}(…)"
    if inspect.isroutine(tool):
        return f"decorate it with @function_tool, or give function_tool({named(tool)})"
    if not all(callable(getattr(tool, name, None)) for name in _TOOL) or not getattr(tool, "name", None):
        return f"it needs a name and {', '.join(_TOOL)}: a subclass of BaseTool has them"
    return ""


def not_async(method: Any) -> bool:
    """Return whether a method is written without `async`; False for other callables, where this cannot be seen."""
    return (inspect.ismethod(method) or inspect.isfunction(method)) and not inspect.iscoroutinefunction(method)


def named(value: Any) -> str:
    """Return the `__name__` of a function or class; for any other object the name of its class."""
    return str(getattr(value, "__name__", None) or type(value).__name__)


def not_run(call: FunctionCall, status: str) -> ToolCall:
    """Make the record of a call that is not run."""
    return ToolCall(call.name, call.arguments, status, tool_call_id=call.tool_call_id)


class Toolbox:
    """The tools of an agent loop, and the limits of each call: seconds, and characters of the answer."""

    def __init__(
        self, tools: Sequence[Tool], *, seconds_per_call: float, max_tool_response_length: int, truncate_side: str
    ) -> None:
        limit = max_tool_response_length
        require(seconds_per_call > 0, "seconds_per_call", expected="seconds > 0", found=seconds_per_call)
        require(limit > 0, "max_tool_response_length", expected="≥ 1 character", found=limit)
        require(truncate_side in SIDES, "tool_response_truncate_side", expected=f"one of {SIDES}", found=truncate_side)
        self.tools = {tool.name: tool for tool in tools}
        if len(self.tools) < len(tools):
            raise SettingError("names of the tools", expected="unique names", found=[tool.name for tool in tools])
        self.schemas = [tool.get_openai_tool_schema() for tool in tools]
        self.shows_pictures = False
        """Whether the model sees the images of the tools' answers."""
        self._seconds, self._limit, self._side = seconds_per_call, limit, truncate_side

    def seen(self, images: Sequence[Any]) -> tuple[tuple[Picture, ...], str]:
        """Read the images in a tool's answer; returns (the pictures that the model is shown, a note on the images that
        the model cannot see, and why, or "").
        """
        if images and not self.shows_pictures:
            return (), f"{len(images)} image{'s' * (len(images) > 1)} that this model cannot see"
        pictures, broken = [], ""
        for number, one in enumerate(images):
            try:
                pictures.append(Picture.read(one, f"image {number}"))
            except DataError as error:
                broken = f"an image that cannot be shown: {first_line(error)}"
        return tuple(pictures), broken

    def only(self, names: Iterable[str]) -> Toolbox:
        """Return a copy of the toolbox with only the tools of these names, in the toolbox's order."""
        chosen, wanted = copy.copy(self), set(names)
        chosen.tools = {name: tool for name, tool in self.tools.items() if name in wanted}
        chosen.schemas = [schema for name, schema in zip(self.tools, self.schemas, strict=True) if name in wanted]
        return chosen

    def opened(self, episode: str, row: Mapping[str, Any]) -> OpenTools:
        """Make the tools for the episode named `episode`, with the row's `tools_kwargs` (or those of its `extra_info`)
        as arguments."""
        kwargs = row.get("tools_kwargs") or (row.get("extra_info") or {}).get("tools_kwargs") or {}
        return OpenTools(self, episode, kwargs)


class OpenTools:
    """One episode's tools: a tool's instance is created at its first call, and released when the episode is over."""

    def __init__(self, box: Toolbox, episode: str, tools_kwargs: Mapping[str, Mapping[str, Any]]) -> None:
        self._box = box
        self._episode = episode
        self._given = tools_kwargs
        self._instances: dict[str, str] = {}
        self._creating: dict[str, asyncio.Lock] = {}
        self.seconds = 0.0
        self.errors: list[str] = []
        self.scores: dict[str, dict[str, Any]] = {}
        """Tool → its `Score` of the whole episode as a dict, of tools whose `calc_reward` returns one."""

    async def call(self, call: FunctionCall) -> ToolCall:
        """Run one tool call. A tool's exception is not raised: the call gets an error text for the model and reward
        0.0."""
        tool = self._box.tools.get(call.name)
        if tool is None:
            close = nearest(call.name, self._box.tools)
            hint = f"; did you mean {close}?" if close else ""
            known = ", ".join(self._box.tools) or "none"
            return self._failed(call, "unknown", f"Error: there is no tool named {call.name!r}; tools: {known}{hint}")
        try:
            arguments = read_json(call.arguments.strip() or "{}")
        except (ValueError, RecursionError) as error:
            return self._failed(call, "invalid", f"Error: the arguments of {call.name} are not valid JSON: {error}")
        if not isinstance(arguments, dict):
            kind = type(arguments).__name__
            return self._failed(call, "invalid", f"Error: the arguments of {call.name} are a {kind}, not a JSON object")
        began = time.perf_counter()
        seconds = getattr(tool, "seconds_per_call", self._box._seconds)  # a sub-agent has none
        try:
            return self._record_of(call, await within(self._execute(tool, arguments), seconds))
        except TimeoutError as error:
            status = "late" if time.perf_counter() - began >= (seconds or math.inf) else "error"
            return self._failed(call, status, f"Error when executing tool {call.name}: {error}")
        except Exception as error:  # noqa: BLE001 - a failing tool is an answer to the model
            return self._failed(call, "error", f"Error when executing tool {call.name}: {first_line(error)}")
        finally:
            self.seconds += time.perf_counter() - began

    async def _execute(self, tool: Tool, arguments: dict[str, Any]) -> Any:
        instance = await self._instance(tool)
        return await tool.execute(instance, arguments, **self._kwargs(tool, "execute"))

    async def _instance(self, tool: Tool) -> str:
        async with self._creating.setdefault(tool.name, asyncio.Lock()):  # parallel calls share the instance
            if tool.name not in self._instances:
                self._instances[tool.name] = await self._created(tool)
        return self._instances[tool.name]

    async def save(self) -> dict[str, Any]:
        """Save the state of the open tools that have `snapshot` and `restore`: tool name → snapshot."""
        can = [
            (name, instance)
            for name, instance in self._instances.items()
            if callable(getattr(self._box.tools[name], "snapshot", None))
        ]
        return {name: await self._box.tools[name].snapshot(instance) for name, instance in can}  # type: ignore[attr-defined]

    async def load(self, saved: Mapping[str, Any]) -> None:
        """Put tools into the states that `save` returned; a tool that is not open yet is opened."""
        for name, snapshot in saved.items():
            tool = self._box.tools[name]
            await tool.restore(await self._instance(tool), snapshot)  # type: ignore[attr-defined]

    async def _created(self, tool: Tool) -> str:
        """Create the tool's instance for the episode and return its id. One whose creation fails or takes too long is
        released at once."""
        key, kwargs = f"{self._episode}-{tool.name}", self._kwargs(tool, "create")
        try:
            # verl hands them over under one name, its own tools read them by theirs
            created = await tool.create(key, create_kwargs=kwargs, **kwargs)
        except BaseException:
            with contextlib.suppress(Exception):  # it may know nothing of the instance
                await runtime.to_its_end(within(tool.release(key, **self._kwargs(tool, "release")), END_SECONDS))
            raise
        # verl's up to 0.4 return the id alone
        return str((created if isinstance(created, str) else created[0]) or key)

    def _kwargs(self, tool: Tool, act: str) -> dict[str, Any]:
        """Return the row's arguments for a tool's method (`create`, `execute`, …), without those that are None, which
        parquet adds."""
        kwargs = (self._given.get(tool.name) or {}).get(f"{act}_kwargs") or {}
        return {key: value for key, value in kwargs.items() if value is not None}

    def _record_of(self, call: FunctionCall, executed: Any) -> ToolCall:
        response, reward, metrics = executed
        if not isinstance(response, ToolResponse):
            response = ToolResponse(text=None if response is None else as_text(response))
        if reward is not None and not math.isfinite(reward):
            raise ValueError(f"the tool's reward is {reward}; expected a finite number")
        text, cut = truncate(encodable(response.text or ""), self._box._limit, self._box._side)
        pictures, why_not = self._box.seen(response.image or [])
        if why_not:
            cut, text = "; ".join(filter(None, (cut, why_not))), f"{text}\n[{why_not}]".lstrip("\n")
        films = f"{len(response.video)} video left out" if response.video else ""
        cut, record = "; ".join(filter(None, (cut, films))), dict(metrics or {})
        status, why = _STATUSES.get(str(record.get("status")), "ok"), encodable(str(record.get("why", "")))
        number = None if reward is None else float(reward)
        answer = (status, text, number, cut, why, record, call.tool_call_id, pictures)
        return ToolCall(call.name, call.arguments, *answer)

    def _failed(self, call: FunctionCall, status: str, text: str) -> ToolCall:
        text, cut = truncate(encodable(text), self._box._limit, self._box._side)
        return ToolCall(call.name, call.arguments, status, text, 0.0, cut, tool_call_id=call.tool_call_id)

    async def close(self) -> dict[str, float]:
        """Release the tools' instances, even when cancelled: tool name → reward of the whole episode.

        Failures are kept in `errors`. A second call does nothing.
        """
        instances, self._instances = self._instances, {}
        return await runtime.to_its_end(self._released(instances))

    async def _released(self, instances: Mapping[str, str]) -> dict[str, float]:
        rewards: dict[str, float] = {}
        for name, instance in instances.items():
            tool = self._box.tools[name]
            with self._noting_errors(f"calc_reward of {name}"):
                work = tool.calc_reward(instance, **self._kwargs(tool, "calc_reward"))
                reward = await within(work, None if getattr(tool, "seconds_per_call", 1.0) is None else END_SECONDS)
                if isinstance(reward, Score):
                    self.scores[name] = reward.to_json()
                total = float(reward.value if isinstance(reward, Score) else reward)
                if not math.isfinite(total):
                    raise ValueError(f"the tool's reward of the episode is {total}; expected a finite number")
                if not isinstance(reward, Score) or reward.scored:
                    rewards[name] = total
            with self._noting_errors(f"release of {name}"):
                await within(tool.release(instance, **self._kwargs(tool, "release")), END_SECONDS)
        return rewards

    @contextmanager
    def _noting_errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - foreign code; the record says it
            self.errors.append(f"{what}: {first_line(error)}")
