"""What agents promise: how one prompt becomes one masked sequence, what a tool, a parser and a simulated user are.

The names are verl's (`verl.experimental.agent_loop`, `verl.tools`, and `verl.interactions` up to 0.7), so that classes
written for it need a new import line alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol, runtime_checkable

from workbench.errors import DataError, describe, message


@dataclass(frozen=True)
class FunctionCall:
    """A call as the model wrote it."""

    name: str
    arguments: str
    """JSON text; it need not parse."""


@dataclass(frozen=True)
class ToolResponse:
    """What a tool answers."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None

    def __post_init__(self) -> None:
        for name in ("image", "video"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, list):
                raise DataError(message(f"{name} of a tool's response", expected="a list", found=type(value).__name__))


@dataclass(frozen=True)
class ToolCall:
    """The record of one call: what was asked, what came of it."""

    name: str
    arguments: str
    status: str = "ok"
    """`ok`, `unknown` (no such tool), `invalid` (arguments that are no JSON object), `refused` (the tool says that the call was
    wrong), `error`, `late` (past its seconds), `ignored` (more calls in one turn than are allowed) or `not run` (the
    episode had come to a limit)."""
    result: str = ""
    """The text that the model read; empty where it read none."""
    reward: float | None = None
    """The tool's own reward of this call; None where it gave none."""
    cut: str = ""
    """What of the tool's text the model did not see, in words."""
    why: str = ""
    """The tool's own reason, where it gave one (`why` of its metrics)."""
    metrics: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """What else the tool said of the call; no part of the record that is kept."""

    @property
    def ran(self) -> bool:
        """Whether anybody was asked, or somebody answered in a tool's place."""
        return self.status not in ("ignored", "not run")


@dataclass(frozen=True)
class Turn:
    """One entry of an episode's transcript."""

    role: str
    """`assistant`, `tool` or `user`."""
    text: str
    """The model's text without special tokens, or the message that was put to it."""
    first: int
    """Place of its first token in the response."""
    last: int
    """Place of its last token in the response, inclusive: `first - 1` where it has no token there."""
    calls: tuple[ToolCall, ...] = ()
    """An assistant's calls, those that were ignored among them."""
    score: float | None = None
    """An interaction's score of this assistant turn."""
    cut: str = ""
    """What was left out or cut short, and why, in words."""
    error: str = ""
    """What failed while the turn was answered."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    edited: bool = False
    """Written by hand: nobody was asked."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Turn:
        """What `to_dict` gave. Raises `DataError` for what is none."""
        try:
            calls = tuple(ToolCall(**call) for call in values.get("calls", ()))
            return cls(**{**values, "calls": calls})
        except (TypeError, AttributeError) as cause:
            raise DataError(
                message("a turn of a transcript", expected="what Turn.to_dict gives", found=str(cause))
            ) from cause

    def to_dict(self) -> dict[str, Any]:
        """Plain values alone, so that a transcript can be saved, and can reach a reward in another process.

        What a tool measured is left out: the same episode twice gives the same values.
        """
        own = {one.name: getattr(self, one.name) for one in fields(self)}
        calls = [{one.name: getattr(call, one.name) for one in fields(call)} for call in self.calls]
        for call in calls:
            del call["metrics"]
        return {**own, "calls": calls, "extra": _plain(self.extra)}


def _plain(value: Any) -> Any:
    """Foreign values as JSON has them; what it has not is described."""
    if isinstance(value, str | int | float | None):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return describe(value)


@dataclass(frozen=True)
class AgentLoopOutput:
    """One episode: a prompt and one masked response of model's, tools' and users' tokens. `AgentLoopBase` has an example.

    Raises `DataError` where ids, mask and log-probs are not of one length.
    """

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    response_mask: tuple[int, ...]
    """1 = the model's own token, 0 = tool or user text."""
    response_logprobs: tuple[float, ...]
    """In nats; 0.0 where the mask is 0."""
    num_turns: int = 2
    """User turns + assistant turns + 1, as verl counts."""
    finish_reason: str = "stop"
    """`stop`, `length` (the response has no room for more), `abort`, or `turns` (a limit of turns)."""
    version: int = 0
    """Policy version of the first generated token; `metrics` has `min_version` and `max_version`."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Seconds (`generate_sequences`, `tool_calls`) and counts."""
    turns: tuple[Turn, ...] = ()
    """The transcript."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Stable keys: `turn_scores`, `tool_rewards`, `num_tool_calls`; a loop may add its own."""

    def __post_init__(self) -> None:
        if self.response_logprobs is None:
            raise DataError(
                message(
                    "response_logprobs of an agent loop's output",
                    expected="a number a response id: `Sample.log_probs` of what was sampled, 0.0 where the mask is 0",
                    found=None,
                    do="losses correct by them what the sampler and the trainer see differently",
                )
            )
        for name in ("prompt_ids", "response_ids", "response_mask", "response_logprobs", "turns"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        lengths = {len(self.response_ids), len(self.response_mask), len(self.response_logprobs)}
        if len(lengths) > 1 or not self.prompt_ids or not set(self.response_mask) <= {0, 1}:
            raise DataError(
                message(
                    "an agent loop's output",
                    expected="a prompt, and response_ids, response_mask (0 or 1) and response_logprobs of one length",
                    found=f"{len(self.prompt_ids)} prompt ids; {len(self.response_ids)}, "
                    f"{len(self.response_mask)} and {len(self.response_logprobs)}",
                )
            )

    def within(self, limit: int) -> AgentLoopOutput:
        """The episode, cut to `limit` response tokens as verl cuts one that is longer; itself where it is not."""
        if len(self.response_ids) <= limit:
            return self
        told = f"cut: the response has {len(self.response_ids)} tokens, and max_tokens is {limit}"
        turns = [
            replace(one, first=min(one.first, limit), last=min(one.last, limit - 1)) if one.last >= limit else one
            for one in self.turns
        ]
        if turns:
            turns[-1] = replace(turns[-1], cut="; ".join(filter(None, (turns[-1].cut, told))))
        return replace(
            self,
            response_ids=self.response_ids[:limit],
            response_mask=self.response_mask[:limit],
            response_logprobs=self.response_logprobs[:limit],
            finish_reason="length",
            turns=tuple(turns),
        )


class AgentLoop(Protocol):
    """How one row becomes one episode."""

    async def run(self, sampling_params: Mapping[str, Any], **row: Any) -> AgentLoopOutput:
        """`row` are the row's object columns by name (`raw_prompt`, `extra_info`, …)."""


@runtime_checkable
class Tool(Protocol):
    """Something that the model can call; verl's `BaseTool` by names."""

    name: str

    def get_openai_tool_schema(self) -> dict[str, Any]:
        """`{"type": "function", "function": {"name", "description", "parameters"}}`."""

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """State for one episode; the id names it from here on."""

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        """One call: response, reward of the call, metrics."""

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """What the tool thinks of the whole episode."""

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """The episode is over."""


class ToolParser(Protocol):
    """Finds calls in the model's text."""

    def extract_tool_calls(self, text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, list[FunctionCall]]:
        """(content without the calls, calls); broken JSON is repaired, or comes as a call whose arguments do not parse."""


@runtime_checkable
class Interaction(Protocol):
    """A simulated user; the `BaseInteraction` of verl up to 0.7 by names."""

    name: str

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """State for one episode; the id names it from here on."""

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """(whether to stop, the user's next message, score of the last assistant turn, anything else)."""

    async def calculate_score(self, instance_id: str | None = None, **kwargs: Any) -> float:
        """The score as it stands."""

    async def finalize_interaction(self, instance_id: str | None = None, **kwargs: Any) -> None:
        """The episode is over, however it ended."""
