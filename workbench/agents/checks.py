"""What a tool agent is made from, looked at before any row is run: tools, a parser, simulated users."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from workbench.agents.interactions import BaseInteraction
from workbench.agents.parsers import ReActParser, tool_parser
from workbench.agents.protocol import Interaction, Tool, ToolParser
from workbench.errors import SettingError, describe, message

_TOOL = ("get_openai_tool_schema", "create", "execute", "calc_reward", "release")


def checked_tools(tools: Any) -> list[Tool]:
    """The tools of a list, or the values of a mapping. Raises `SettingError` for what is no list of tools."""
    if isinstance(tools, Mapping):
        tools = tools.values()
    alone = isinstance(tools, str | type) or inspect.isroutine(tools) or hasattr(tools, "get_openai_tool_schema")
    if alone or not isinstance(tools, Iterable):
        what = f"tools=[{_called(tools)}]" if alone and not isinstance(tools, str) else None
        raise SettingError(message("tools", expected="a list of tools", found=describe(tools), do=what))
    listed = list(tools)
    for place, tool in enumerate(listed):
        if isinstance(tool, type):
            do = f"make one: {tool.__name__}(…)"
        elif inspect.isroutine(tool):
            do = f"decorate it with @function_tool, or give function_tool({_called(tool)})"
        elif not all(callable(getattr(tool, name, None)) for name in _TOOL) or not _name(tool):
            do = f"it needs a name and {', '.join(_TOOL)}: a subclass of BaseTool has them"
        else:
            continue
        raise SettingError(message(f"tools[{place}]", expected="a tool", found=describe(tool), do=do))
    return listed


def checked_parser(parser: Any, *, format: str, tools: bool) -> ToolParser | None:
    """The parser; one by its name; ReAct's own where that is the format. Raises `SettingError` for what is none.

    Without `tools` there need not be one.
    """
    if parser is None:
        if tools and format == "function_calling":
            raise SettingError(message("tool_agent has tools and no parser", do="give parser=, or format='react'"))
        return ReActParser() if tools else None
    found = tool_parser(parser) if isinstance(parser, str) else parser
    if isinstance(found, type) or not callable(getattr(found, "extract_tool_calls", None)):
        do = f"make one: {found.__name__}()" if isinstance(found, type) else None
        expected = "a name, or an object with extract_tool_calls(text, tools)"
        raise SettingError(message("parser", expected=expected, found=describe(found), do=do))
    if format == "react" and not isinstance(found, ReActParser):
        expected = "a ReActParser: the format tells the model to write its calls as Action lines"
        do = "leave parser= out, or give format='function_calling'"
        raise SettingError(message("parser of format='react'", expected=expected, found=describe(found), do=do))
    return found


def checked_interactions(interactions: Any) -> dict[str, Interaction]:
    """Name → simulated user, of a list or a mapping. Raises `SettingError` for what no row could speak to."""
    if hasattr(interactions, "generate_response"):
        do = f"interactions=[{_called(interactions)}{'()' if isinstance(interactions, type) else ''}]"
        raise SettingError(message("interactions", expected="a list", found=describe(interactions), do=do))
    if isinstance(interactions, str) or not isinstance(interactions, Iterable):
        raise SettingError(message("interactions", expected="a list of them", found=describe(interactions)))
    pairs = list(interactions.items()) if isinstance(interactions, Mapping) else [(_name(i), i) for i in interactions]
    for name, one in pairs:
        _check_interaction(name, one)
    found = dict(pairs)
    if len(found) < len(pairs):
        raise SettingError(message("interactions", expected="names that differ", found=[name for name, _ in pairs]))
    return found


def _check_interaction(name: Any, one: Any) -> None:
    if isinstance(one, type):
        do = f"make one: {one.__name__}()"
        raise SettingError(message("interactions", expected="objects", found=f"the class {one.__name__}", do=do))
    kind = type(one).__name__
    asked = getattr(one, "generate_response", None)
    own = getattr(type(one), "generate_response", None) is not BaseInteraction.generate_response
    if not callable(asked) or not own:
        do = "give the class `async def generate_response(self, instance_id, messages, **kwargs)`"
        raise SettingError(message(f"interaction {kind} has no generate_response of its own", do=do))
    for method in ("start_interaction", "generate_response", "finalize_interaction"):
        written = getattr(one, method, None)
        plain = inspect.ismethod(written) or inspect.isfunction(written)
        if not callable(written) or (plain and not inspect.iscoroutinefunction(written)):
            found = "a plain one" if callable(written) else "none"
            raise SettingError(message(f"interaction {kind}", expected=f"`async def {method}`", found=found))
    if not isinstance(name, str) or not name:
        do = "give it a name: rows choose their user by it (`interaction_kwargs`)"
        raise SettingError(message(f"interaction {kind}", expected="a text as its `name`", found=describe(name), do=do))


def _name(one: Any) -> Any:
    return getattr(one, "name", None)


def _called(one: Any) -> str:
    return str(getattr(one, "__name__", None) or type(one).__name__)
