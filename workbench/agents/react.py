"""ReAct: calls as lines of plain text, for models that know no call format. Yao et al. 2022, https://arxiv.org/abs/2210.03629."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from workbench.agents.protocol import FunctionCall

STOP = "Observation:"
"""The model must not go on to write the tool's answer itself."""
_CALL = re.compile(r"^[ \t]*Action[ \t]*:[ \t]*(?P<name>[^\n]*)\n[ \t]*Action Input[ \t]*:[ \t]*", re.MULTILINE)
_END = re.compile(r"^[ \t]*(?:Observation|Thought|Action|Final Answer)[ \t]*:", re.MULTILINE)


class ReActParser:
    """`Action: tool` and, on the next line, `Action Input: {"argument": …}`, up to the next such word.

    An input that is no JSON object is the value of the tool's one argument (its one required one, where there are
    more), as people write `Action Input: 2 + 2`.
    """

    def extract_tool_calls(self, text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, list[FunctionCall]]:
        """(text before the first call, calls)."""
        calls = []
        found = list(_CALL.finditer(text))
        for match in found:
            rest = text[match.end() :]
            end = _END.search(rest)
            written = (rest[: end.start()] if end else rest).strip()
            name = match["name"].strip()
            calls.append(FunctionCall(name, _arguments(name, written, tools)))
        return (text[: found[0].start()] if found else text), calls


def _arguments(name: str, written: str, tools: Sequence[Mapping[str, Any]]) -> str:
    try:
        if isinstance(json.loads(written), dict):
            return written
    except (ValueError, RecursionError):
        if written.startswith("{"):
            return written  # meant as JSON, and broken: the model is told so
    schema: Mapping[str, Any] = next((one["function"] for one in tools if one["function"]["name"] == name), {})
    parameters = schema.get("parameters") or {}
    required = parameters.get("required") or []
    names = list(required if len(required) == 1 else parameters.get("properties") or {})
    return json.dumps({names[0]: written}) if len(names) == 1 else written


def instructions(tools: Sequence[Mapping[str, Any]]) -> str:
    """What tells a model of the tools and of the format."""
    listed = "\n".join(
        f"- {one['function']['name']}: {one['function'].get('description', '')} "
        f"Arguments: {json.dumps((one['function'].get('parameters') or {}).get('properties', {}))}"
        for one in tools
    )
    names = ", ".join(one["function"]["name"] for one in tools)
    return (
        f"You can use these tools:\n{listed}\n\nWrite:\nThought: what to do next\nAction: one of {names}\n"
        "Action Input: the arguments as a JSON object\n\nThen an Observation is given to you. "
        "When you know the answer, write it without an Action.\n\n"
    )
