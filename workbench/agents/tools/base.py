"""The base class of tools, by verl's names and return shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar
from uuid import uuid4

from workbench.agents.protocol import ToolResponse
from workbench.agents.tools.schema import check_arguments
from workbench.agents.tools.schema import tool_schema as in_shape
from workbench.errors import SettingError, message
from workbench.rewards.score import Status

Executed = tuple[ToolResponse, float | None, dict[str, Any]]
"""What `execute` returns: the answer, the step's reward (None: none), and a record of what happened."""


class BaseTool:
    """A tool that a model calls. Subclasses give `execute`, and `create` where an instance has state.

    `tool_schema` is OpenAI's form; without one the class's `SCHEMA` stands. `config` are the tool's settings.
    The record that `execute` returns third has `status` (a `rewards.score.Status`: *scored*, *model failed*: the call was
    wrong, *machinery failed*: the tool was), `why` in one line, and whatever else is worth keeping.
    Raises `SettingError` for a schema that is none.
    """

    SCHEMA: ClassVar[Mapping[str, Any] | None] = None
    """The schema of a tool that is made without one."""

    def __init__(self, config: Mapping[str, Any] | None = None, tool_schema: Any = None) -> None:
        self.config: dict[str, Any] = dict(config or {})
        chosen = tool_schema if tool_schema is not None else self.SCHEMA
        if chosen is None:
            raise SettingError(message(f"{type(self).__name__} has no schema", do="give tool_schema=, or a SCHEMA"))
        self.tool_schema = in_shape(chosen)
        self.name: str = self.tool_schema["function"]["name"]
        self.instances: dict[str, dict[str, Any]] = {}
        """Each instance's state, from `create` to `release`."""

    def get_openai_tool_schema(self) -> dict[str, Any]:
        """`{"type": "function", "function": {name, description, parameters}}`."""
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """A new instance (a fresh id where none is given), whose state starts as these arguments.

        verl passes a row's arguments in one piece, as `create_kwargs`; they are taken either way.
        """
        given = kwargs.pop("create_kwargs", None) or {}
        instance_id = instance_id or str(uuid4())
        self.instances[instance_id] = {**kwargs, **given}
        return instance_id, ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Executed:
        """Answer one call."""
        raise NotImplementedError(f"{type(self).__name__}.execute")

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """What the instance has earned; nothing, unless a subclass says otherwise."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Forget the instance. Twice is fine."""
        self.instances.pop(instance_id, None)

    def refusal(self, parameters: Any) -> Executed | None:
        """The answer to arguments that do not fit the schema, or None where they fit."""
        wrong = check_arguments(self.tool_schema, parameters)
        return refused(wrong) if wrong else None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"


def answered(text: str, reward: float | None = None, **record: Any) -> Executed:
    """The tool did what it was asked to."""
    return ToolResponse(text=text), reward, {"status": Status.SCORED.value, **record}


def refused(text: str, reward: float | None = 0.0, **record: Any) -> Executed:
    """The call was wrong, the model hears why, and it is the model's: 0, as verl has it."""
    return ToolResponse(text=text), reward, {"status": Status.MODEL_FAILED.value, "why": text, **record}


def broken(text: str, why: str, **record: Any) -> Executed:
    """The tool itself failed: the model hears that much, the record says why, and no reward is a judgement on it."""
    return ToolResponse(text=text), None, {"status": Status.MACHINERY_FAILED.value, "why": why, **record}
