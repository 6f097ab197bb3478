"""Calls of tools: within a time limit, answered whatever happens, recorded; long answers are cut in plain sight."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from workbench.agents.protocol import FunctionCall, Tool, ToolCall, ToolResponse
from workbench.config import require
from workbench.errors import SettingError, first_line, message, nearest

T = TypeVar("T")
SIDES = ("left", "right", "middle")
_STATUSES = {"model failed": "refused", "machinery failed": "error"}
"""What a tool's own record says in the words of `rewards.score.Status`."""
END_SECONDS = 5.0
"""What a tool's or an interaction's last calls may take, when the episode is over."""
CUT = "...(truncated)..."


def truncate(text: str, limit: int, side: str) -> tuple[str, str]:
    """(text of at most `limit` characters and a mark, what was cut in words).

    `side` is the side that is lost, as in verl since 0.8: `left` keeps the end, `right` keeps the beginning, `middle`
    keeps both ends. (Up to 0.7 verl's `left` kept the beginning.)
    """
    over = len(text) - limit
    if over <= 0:
        return text, ""
    said = f"{over} of {len(text)} characters cut from the {side}"
    if side == "left":
        return CUT[3:] + text[over:], said
    if side == "right":
        return text[:limit] + CUT[:-3], said
    head = (limit + 1) // 2
    return text[:head] + CUT + (text[-(limit - head) :] if limit > head else ""), said


async def within(work: Coroutine[Any, Any, T], seconds: float) -> T:
    """The result of foreign async work; raises `TimeoutError` after `seconds` even where the work will not be cancelled."""
    task = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        task.cancel()
        raise
    if not done:
        task.cancel()
        task.add_done_callback(_looked_at)
        raise TimeoutError(f"no answer within {seconds:g} s")
    return task.result()


def _looked_at(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()  # nobody waits for it any more; asyncio would complain


class Toolbox:
    """The tools of a loop, and how they may be called."""

    def __init__(
        self, tools: Sequence[Tool], *, seconds_per_call: float, max_tool_response_length: int, truncate_side: str
    ) -> None:
        require(seconds_per_call > 0, "seconds_per_call", expected="seconds > 0", found=seconds_per_call)
        require(
            max_tool_response_length > 0, "max_tool_response_length", expected="≥ 1", found=max_tool_response_length
        )
        require(truncate_side in SIDES, "tool_response_truncate_side", expected=f"one of {SIDES}", found=truncate_side)
        self.tools = {tool.name: tool for tool in tools}
        if len(self.tools) < len(tools):
            raise SettingError(message("tools", expected="names that differ", found=[tool.name for tool in tools]))
        self.schemas = [tool.get_openai_tool_schema() for tool in tools]
        self._seconds = seconds_per_call
        self._limit = max_tool_response_length
        self._side = truncate_side

    def opened(self, episode: str, row: Mapping[str, Any]) -> OpenTools:
        """For one episode: its instances of the tools are made as they are called."""
        given = row.get("tools_kwargs") or (row.get("extra_info") or {}).get("tools_kwargs") or {}
        return OpenTools(self, episode, given)


class OpenTools:
    """One episode's tools: an instance each, made at its first call and released when the episode is over."""

    def __init__(self, box: Toolbox, episode: str, given: Mapping[str, Mapping[str, Any]]) -> None:
        self._box = box
        self._episode = episode
        self._given = given
        self._instances: dict[str, str] = {}
        self.seconds = 0.0
        self.errors: list[str] = []

    async def call(self, call: FunctionCall) -> ToolCall:
        """Call a tool. Never raises for what a tool does: the model gets an error text, reward 0.0, and there is a record."""
        tool = self._box.tools.get(call.name)
        if tool is None:
            close = nearest(call.name, self._box.tools)
            hint = f"; did you mean {close}?" if close else ""
            known = ", ".join(self._box.tools) or "none"
            return self._failed(call, "unknown", f"Error: there is no tool named {call.name!r}; tools: {known}{hint}")
        try:
            arguments = json.loads(call.arguments or "{}")
        except (ValueError, RecursionError) as error:
            return self._failed(call, "invalid", f"Error: the arguments of {call.name} are not valid JSON: {error}")
        if not isinstance(arguments, dict):
            kind = type(arguments).__name__
            return self._failed(call, "invalid", f"Error: the arguments of {call.name} are a {kind}, not a JSON object")
        began = time.perf_counter()
        try:
            return self._answered(call, await within(self._executed(tool, arguments), self._box._seconds))
        except TimeoutError as error:
            late = time.perf_counter() - began >= self._box._seconds
            return self._failed(call, "late" if late else "error", f"Error when executing tool {call.name}: {error}")
        except Exception as error:  # noqa: BLE001 - a failing tool is an answer to the model
            return self._failed(call, "error", f"Error when executing tool {call.name}: {first_line(error)}")
        finally:
            self.seconds += time.perf_counter() - began

    async def _executed(self, tool: Tool, arguments: dict[str, Any]) -> Any:
        if tool.name not in self._instances:
            created = self._kwargs(tool, "create")
            # verl hands them over under one name, its own tools read them by theirs
            made, _ = await tool.create(f"{self._episode}-{tool.name}", create_kwargs=created, **created)
            self._instances[tool.name] = made
        return await tool.execute(self._instances[tool.name], arguments, **self._kwargs(tool, "execute"))

    def _kwargs(self, tool: Tool, act: str) -> dict[str, Any]:
        """What the row has for it. A parquet file gives every row the keys of all: those that are None are left out."""
        given = (self._given.get(tool.name) or {}).get(f"{act}_kwargs") or {}
        return {key: value for key, value in given.items() if value is not None}

    def _answered(self, call: FunctionCall, found: Any) -> ToolCall:
        response, reward, metrics = found
        if not isinstance(response, ToolResponse):
            response = ToolResponse(text=None if response is None else str(response))
        if reward is not None and not math.isfinite(reward):
            raise ValueError(f"the tool's reward is {reward}, not a finite number")
        text, cut = truncate(response.text or "", self._box._limit, self._box._side)
        seen = [f"{len(many)} {kind} left out" for kind in ("image", "video") if (many := getattr(response, kind))]
        said = dict(metrics or {})
        return ToolCall(
            call.name,
            call.arguments,
            _STATUSES.get(str(said.get("status")), "ok"),
            result=text,
            reward=None if reward is None else float(reward),
            cut="; ".join(filter(None, (cut, *seen))),
            why=str(said.get("why", "")),
            metrics=said,
        )

    def _failed(self, call: FunctionCall, status: str, text: str) -> ToolCall:
        text, cut = truncate(text, self._box._limit, self._box._side)
        return ToolCall(call.name, call.arguments, status, text, 0.0, cut)

    async def close(self) -> dict[str, float]:
        """Ask each instance for its reward of the whole episode, and release it. What fails is in `errors`."""
        rewards: dict[str, float] = {}
        for name, instance in self._instances.items():
            tool = self._box.tools[name]
            try:
                found = float(
                    await within(tool.calc_reward(instance, **self._kwargs(tool, "calc_reward")), END_SECONDS)
                )
                if not math.isfinite(found):
                    raise ValueError(f"{found} is not a finite number")
                rewards[name] = found
            except Exception as error:  # noqa: BLE001 - foreign code; the record says it
                self.errors.append(f"calc_reward of {name}: {first_line(error)}")
            finally:
                await self._released(tool, instance)
        self._instances = {}
        return rewards

    async def _released(self, tool: Tool, instance: str) -> None:
        try:
            await within(tool.release(instance, **self._kwargs(tool, "release")), END_SECONDS)
        except Exception as error:  # noqa: BLE001 - foreign code; the record says it
            self.errors.append(f"release of {tool.name}: {first_line(error)}")
