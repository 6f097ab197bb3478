"""What an agent loop is made of: its tools, its users, its limits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.agents import AgentLoopBase
from workbench.views.html import escape, fold, pairs_table, table, text_block


def loop_html(loop: AgentLoopBase) -> str:
    """Tools with their arguments, simulated users, the parser, and every limit."""
    said = dict(loop.describe())
    tools = [one.get("function", {}) for one in said.pop("tools", [])]
    parts = [f"<div><b>{escape(type(loop).__name__)}</b> {escape(said.pop('name', ''))}</div>"]
    if tools:
        rows = [
            [escape(one.get("name", "")), escape(_arguments(one)), text_block(one.get("description", ""))]
            for one in tools
        ]
        parts.append(table(["tool", "arguments", "what it says of itself"], rows))
    users = said.pop("interactions", [])
    if users:
        parts.append(f"<div>users: {escape(', '.join(users))}</div>")
    parts.append(fold("settings", pairs_table([(name, str(value)) for name, value in said.items()])))
    return "".join(parts)


def _arguments(function: Mapping[str, Any]) -> str:
    parameters = function.get("parameters") or {}
    needed = set(parameters.get("required") or ())
    kinds = {name: str(one.get("type", "any")) for name, one in (parameters.get("properties") or {}).items()}
    return ", ".join(f"{name}: {kind}" + ("" if name in needed else " (optional)") for name, kind in kinds.items())
