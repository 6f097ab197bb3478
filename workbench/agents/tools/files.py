"""Tools by a yaml file, in verl's form and in the short one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from workbench.agents.classes import find_class, placed, read_yaml
from workbench.agents.tools.arithmetic import Calculator
from workbench.agents.tools.base import BaseTool
from workbench.agents.tools.gsm8k import Gsm8kAnswer
from workbench.agents.tools.mcp_servers import MCPTool, mcp_tools
from workbench.agents.tools.python import PythonTool
from workbench.agents.tools.schema import tool_schema
from workbench.agents.tools.search import Search
from workbench.errors import SettingError, describe, message
from workbench.sandbox.protocol import Sandbox

CLASSES: Mapping[str, type] = {
    "calculator": Calculator,
    "python": PythonTool,
    "gsm8k_answer": Gsm8kAnswer,
    "search": Search,
    "verl.tools.gsm8k_tool.Gsm8kTool": Gsm8kAnswer,
    "verl.tools.sandbox_fusion_tools.SandboxFusionTool": PythonTool,
    "verl.tools.search_tool.SearchTool": Search,
    "verl.tools.mcp_base_tool.MCPBaseTool": MCPTool,
    "verl.tools.mcp_search_tool.MCPSearchTool": MCPTool,
}
"""Names that need no import: those of the tools here, and those that verl's examples use."""


def load_tools(
    path: str | Path, *, sandbox: Sandbox | None = None, roots: Sequence[str | Path] = ()
) -> dict[str, BaseTool]:
    """The tools of a yaml file by name.

    Each entry of `tools` is verl's (`class_name`, `config: {type: native | mcp, …}`, `tool_schema`; for MCP `mcp:
    {mcp_servers_config_path, tool_selected_list}`) or the short one of a tool that is shipped here (`name`, `description`,
    `parameters`, `config`). Classes of your own come from below an allowed root (`classes.find_class`). `sandbox` is where a
    `python` tool runs its code.
    Raises `SettingError` that names the entry.
    """
    entries = read_yaml(path).get("tools")
    if not isinstance(entries, list) or not entries:
        raise SettingError(message(f"{str(path)!r}", expected="a list under 'tools'", found=describe(entries)))
    made: list[BaseTool] = []
    for number, entry in enumerate(entries):
        place = f"tool {number} of {str(path)!r}"
        if not isinstance(entry, Mapping):
            raise SettingError(message(place, expected="a mapping", found=describe(entry)))
        with placed(place):
            made += _made(entry, sandbox, roots, Path(path).parent)
    return by_name(made)


def by_name(tools: Iterable[Any]) -> dict[str, Any]:
    """Tools by name. Raises `SettingError` where two have one name."""
    found: dict[str, Any] = {}
    for tool in tools:
        if tool.name in found:
            raise SettingError(message(f"two tools are named {tool.name!r}", do="give one of them another name"))
        found[tool.name] = tool
    return found


def _made(
    entry: Mapping[str, Any], sandbox: Sandbox | None, roots: Sequence[str | Path], folder: Path
) -> list[BaseTool]:
    config = dict(entry.get("config") or {})
    schema = entry.get("tool_schema")
    cls = find_class(entry.get("class_name", entry.get("name")), "tool", CLASSES, roots)
    if "class_name" not in entry:
        given = {key: entry[key] for key in ("name", "description", "parameters") if entry.get(key) is not None}
        schema = {**getattr(cls, "SCHEMA", {}), **given}
    kind = config.pop("type", "mcp" if cls is MCPTool else "native")
    if kind not in ("native", "mcp"):
        raise SettingError(message("config.type of a tool", expected="native or mcp", found=describe(kind)))
    if kind == "mcp":
        return list(_from_servers(entry, config, folder))
    made: BaseTool
    if issubclass(cls, PythonTool):
        if sandbox is None:
            raise SettingError(message("a tool that runs code needs a sandbox", do="pass sandbox=sandbox.local()"))
        made = cls(sandbox, config, schema)
    else:  # a tool's own arguments come first (Search's corpus); the two that every tool has are given by name
        made = cls(config=config, tool_schema=schema if schema is not None else getattr(cls, "SCHEMA", None))
    _same_arguments(made, cls)
    return [made]


def _same_arguments(made: BaseTool, cls: type) -> None:
    """A shipped tool reads its own argument names: a schema with others would promise the model what is not read."""
    if cls not in CLASSES.values() or getattr(cls, "SCHEMA", None) is None:
        return
    own = tool_schema(cls.SCHEMA)["function"]["parameters"]["properties"]  # type: ignore[attr-defined]
    given = made.tool_schema["function"]["parameters"]["properties"]
    if set(own) != set(given):
        what = f"the schema of {made.name!r}"
        raise SettingError(message(what, expected=f"the arguments {sorted(own)}", found=sorted(given)))


def _from_servers(entry: Mapping[str, Any], config: Mapping[str, Any], folder: Path) -> list[MCPTool]:
    told = {**(entry.get("mcp") or {}), **(config.get("mcp") or {})}
    servers = told.get("mcp_servers_config_path") or told.get("mcpServers") or config.get("mcpServers")
    if servers is None:
        raise SettingError(message("an MCP tool", expected="mcp.mcp_servers_config_path", found=sorted(told)))
    if isinstance(servers, str):
        near = folder / servers
        servers = near if near.is_file() else Path(servers)
    timeout = float(config.get("timeout", 30.0))
    return mcp_tools(servers, selected=told.get("tool_selected_list"), timeout=timeout)
