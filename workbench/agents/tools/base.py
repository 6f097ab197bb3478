"""The base class of tools, with verl's names and return shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar
from uuid import uuid4

from workbench.agents.protocol import Tool, ToolResponse
from workbench.agents.tools.schema import check_arguments
from workbench.agents.tools.schema import tool_schema as in_openai_form
from workbench.base.errors import SettingError, first_line
from workbench.rewards.score import Status

Executed = tuple[ToolResponse, float | None, dict[str, Any]]
"""What `execute` returns: the answer, the call's reward or None, and a record of the call."""


class BaseTool(Tool):
    """Base class of tools that a model calls: a subclass defines `execute`, and `create` if it needs state.

    The third value that `execute` returns, the record, has `status` (a `rewards.score.Status`: *scored*; *no_answer*: the
    call was wrong; *infra_error*: the tool failed), `why` in one line, and anything else worth keeping.

    Args:
        config: the tool's settings.
        tool_schema: the schema in OpenAI's form; None: the class's `SCHEMA`.

    Raises `SettingError` for a schema that is missing or invalid.
    """

    SCHEMA: ClassVar[Mapping[str, Any] | None] = None
    """The schema of tools that are made without `tool_schema`."""

    def __init__(self, config: Mapping[str, Any] | None = None, tool_schema: Any = None) -> None:
        self.config: dict[str, Any] = dict(config or {})
        chosen = tool_schema if tool_schema is not None else self.SCHEMA
        if chosen is None:
            do = "give tool_schema=, or define SCHEMA in the class"
            raise SettingError(f"the tool {type(self).__name__} has no schema", do=do)
        self.tool_schema = in_openai_form(chosen)
        self.name: str = self.tool_schema["function"]["name"]
        self.instances: dict[str, dict[str, Any]] = {}
        """Each instance's state, from `create` to `release`."""

    def get_openai_tool_schema(self) -> dict[str, Any]:
        """The tool's schema: `{"type": "function", "function": {name, description, parameters}}`."""
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Make the tool's state for one episode from these arguments; returns (its id, an empty response).

        The id is new if none is given. verl passes a row's arguments in one piece, as `create_kwargs`: both forms work.
        """
        given = kwargs.pop("create_kwargs", None) or {}
        instance_id = instance_id or str(uuid4())
        self.instances[instance_id] = {**kwargs, **given}
        return instance_id, ToolResponse()

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Drop the state of `instance_id`; a second call does nothing."""
        self.instances.pop(instance_id, None)

    def refusal(self, parameters: Any) -> Executed | None:
        """The result of a call whose arguments do not fit the schema; None where they fit."""
        wrong = check_arguments(self.tool_schema, parameters)
        return refused(wrong) if wrong else None

    def broken(self, cause: Exception, seconds: float | None) -> Executed:
        """The result of a call in which the tool raised `cause`, or took more than `seconds`."""
        late = isinstance(cause, TimeoutError) and seconds
        why = f"no answer within {seconds:g} s" if late else first_line(cause)
        return broken(f"Error when executing tool {self.name}: {why}", why)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"


def answered(text: str, reward: float | None = None, **record: Any) -> Executed:
    """The result of a call that worked."""
    return ToolResponse(text=text), reward, {"status": Status.SCORED.value, **record}


def refused(text: str, reward: float | None = 0.0, **record: Any) -> Executed:
    """The result of a call that was wrong: the model gets the reason as `text`, and the call reward 0, as in verl."""
    return ToolResponse(text=text), reward, {"status": Status.NO_ANSWER.value, "why": text, **record}


def broken(text: str, why: str, **record: Any) -> Executed:
    """The result of a call in which the tool failed: the model gets `text`, the record has `why`, and there is no reward."""
    return ToolResponse(text=text), None, {"status": Status.INFRA_ERROR.value, "why": why, **record}
