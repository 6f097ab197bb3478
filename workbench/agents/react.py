"""ReAct: calls as lines of plain text, for models that know no call format. Yao et al. 2022, https://arxiv.org/abs/2210.03629."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

STOP = "Observation:"
"""The model must not go on to write the tool's answer itself."""


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
