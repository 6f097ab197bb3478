"""Agents written down as plain values, and made again: loops, tools, parsers and users of ours, whose arguments say all.

A tool that is a function of yours, a sandbox or a server's connection is none of these: the loop that has one comes back by
name alone, and is handed in anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from workbench import agents
from workbench.agents import AgentLoopBase

_OURS: Mapping[str, Callable[[Any], Mapping[str, Any]]] = {
    "ToolAgent": lambda one: one.made_with,
    "SingleTurn": lambda one: one.made_with,
    "Calculator": lambda one: {"config": one.config, "tool_schema": one.tool_schema},
    "Gsm8kAnswer": lambda one: {"config": one.config, "tool_schema": one.tool_schema},
    "Gsm8kInteraction": lambda one: {"config": one.config},
    **dict.fromkeys(("HermesParser", "Qwen3CoderParser", "ReActParser", "ToolArgsParser"), lambda one: {}),
}
"""Class → the arguments that make an equal one."""


def arguments_of(value: Any) -> tuple[str, Mapping[str, Any]] | None:
    """(Class, constructor's arguments) of a part that can be made again; None for others, a subclass of yours among them."""
    name = type(value).__name__
    return (name, _OURS[name](value)) if name in _OURS and type(value) is getattr(agents, name) else None


def made(name: str, arguments: Mapping[str, Any]) -> Any:
    """The part again. Raises `KeyError` for a class that is none of these."""
    if name not in _OURS:
        raise KeyError(name)
    return getattr(agents, name)(**arguments)


def name_of(value: Any) -> str | None:
    """What a loop that cannot be made again is called; None for what is no loop."""
    return f"agent loop {value.name or type(value).__name__!r}" if isinstance(value, AgentLoopBase) else None
