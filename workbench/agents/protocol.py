"""The records and protocols of agents: an episode's output, its turns and calls; tools, parsers and simulated users.

Foreign values, such as what a tool returns, become JSON types (`plain`) and text that a file can hold (`as_text`).

The names are verl's (`verl.experimental.agent_loop`, `verl.tools`, and `verl.interactions` up to 0.7): a class written for
verl needs only a new import line.
"""

from __future__ import annotations

import json
import math
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import InitVar, dataclass, field, fields, is_dataclass, replace
from datetime import date, time
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import PurePath
from typing import Any, Protocol, runtime_checkable
from uuid import UUID

import torch

from workbench.base.config import check_nesting
from workbench.base.errors import DataError, ForeignError, SettingError, describe
from workbench.base.shown import encodable


@dataclass(frozen=True)
class FunctionCall:
    """A tool call as the model wrote it."""

    name: str
    arguments: str
    """The arguments as JSON text, as the model wrote it: it may be invalid JSON."""
    tool_call_id: str | None = None
    """The model's own id of the call, where its format has one (Kimi's)."""


@dataclass(frozen=True)
class ToolResponse:
    """A tool's answer to a call."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None

    def __post_init__(self) -> None:
        if self.text is not None and not isinstance(self.text, str):
            raise DataError("text of a tool's response", expected="a text, or None", found=describe(self.text))
        for name in ("image", "video"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, list):
                raise DataError(f"{name} of a tool's response", expected="a list", found=type(value).__name__)


@dataclass(frozen=True)
class ToolCall:
    """The record of one tool call and its result."""

    name: str
    arguments: str
    status: str = "ok"
    """`ok`, `unknown` (no such tool), `invalid` (arguments that are not a JSON object), `refused` (the tool reports that the
    call was wrong), `error`, `late` (past its time limit), `ignored` (more calls in one turn than are allowed) or `not run`
    (the episode had reached a limit)."""
    result: str = ""
    """The text that the model read as the call's result; empty where it read none."""
    reward: float | None = None
    """The reward that the tool gave this call; None where it gave none."""
    cut: str = ""
    """Which part of the tool's text the model did not see, in words."""
    why: str = ""
    """The reason that the tool gave (`why` in its metrics); else empty."""
    metrics: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """The tool's other metrics; a saved transcript does not have them."""
    tool_call_id: str | None = None
    """The model's own id of the call, where its format has one."""
    pictures: tuple[Any, ...] = field(default=(), compare=False)
    """The `Picture`s of the tool's answer that the model sees; not kept with the transcript."""

    @property
    def ran(self) -> bool:
        """Whether the call got an answer: from the tool, as an error text, or written by hand."""
        return self.status not in ("ignored", "not run")


@dataclass(frozen=True)
class Turn:
    """One entry of an episode's transcript."""

    role: str
    """`assistant`, `tool` or `user`."""
    text: str
    """The model's text without special tokens, or the message that the model was given."""
    first: int
    """Index of its first token in the response."""
    last: int
    """Index of its last token in the response, inclusive: `first - 1` where it has no token there."""
    calls: tuple[ToolCall, ...] = ()
    """An assistant's calls, ignored ones included."""
    score: float | None = None
    """An interaction's score of this assistant turn."""
    cut: str = ""
    """What was left out or cut short, and why, in words."""
    error: str = ""
    """What failed while the turn was answered."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    edited: bool = False
    """Whether the turn was written by hand (`EpisodeStepper.say`)."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Turn:
        """Make a turn from the dict that `to_dict` returned. Raises `DataError` for anything else."""
        try:
            return cls(**{**values, "calls": tuple(ToolCall(**call) for call in values.get("calls", ()))})
        except (TypeError, AttributeError) as cause:
            raise DataError("a turn of a transcript", expected="the dict of Turn.to_dict", found=str(cause)) from cause

    def to_dict(self) -> dict[str, Any]:
        """Return the turn as plain values, so that a transcript can be saved, or sent to a reward in another process.

        The tools' metrics and images are left out: the same episode gives the same values every time.
        """
        calls = [
            {key: value for key, value in vars(call).items() if key not in ("metrics", "pictures")}
            for call in self.calls
        ]
        return {**vars(self), "calls": calls, "extra": plain(self.extra, describe)}


@dataclass(frozen=True)
class Seen:
    """The pictures of one turn, or of the prompt, as the model of a `Multimodal` sampler reads them."""

    first: int
    """Index of the turn's first token in the response; -1 for the prompt."""
    count: int
    """Number of pictures."""
    pixels: Mapping[str, torch.Tensor] = field(compare=False)
    """The model's inputs by name, in the order of the pictures."""


def pixels_of(seen: Sequence[Seen]) -> dict[str, torch.Tensor]:
    """Join the inputs of all pictures of a sequence, in order: the value of a row in the column `multi_modal_inputs`."""
    names = dict.fromkeys(name for one in seen for name in one.pixels)
    return {name: torch.cat([one.pixels[name] for one in seen if name in one.pixels]) for name in names}


@dataclass(frozen=True)
class AgentLoopOutput:
    """A finished episode, or one of its sequences: a prompt, and a response of the model's, tools' and users' tokens with a mask.

    `AgentLoopBase` has an example. Without `response_logprobs` it gets those with which the rollout's sampler drew the model's
    own tokens (`Episode.with_log_probs`). Raises `DataError` without a prompt, where ids, mask and log-probs differ in length, for
    mask values other than 0 and 1, and for log-probs that are not finite.
    """

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    response_mask: tuple[int, ...]
    """1 = the model's own token, 0 = tool or user text."""
    response_logprobs: tuple[float, ...] = None  # type: ignore[assignment]
    """In nats; 0.0 where the mask is 0."""
    num_turns: int = 2
    """User turns + assistant turns + 1, as verl counts."""
    finish_reason: str = "stop"
    """`stop`, `length` (the response has no room for more), `abort`, or `turns` (a limit of turns or of tool calls)."""
    version: int = 0
    """Policy version of the first generated token; `metrics` has `min_version` and `max_version`."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Seconds (`generate_sequences`, `tool_calls`) and counts."""
    turns: tuple[Turn, ...] = ()
    """The transcript."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Stable keys: `turn_scores`, `tool_rewards`, `num_tool_calls`; a loop may add its own."""
    seen: tuple[Seen, ...] = ()
    """What the model read of pictures, by turn."""
    policy: str | None = None
    """Name of the policy that sampled the tokens with mask 1, where the rollout has several policies; None: the first
    one."""
    versions: tuple[int, ...] = ()
    """Policy version of each response token, where the weights changed on the way (`train(max_lag=…)`); else empty."""
    extra_fields: InitVar[Mapping[str, Any] | None] = None
    """verl's name for `extra`."""
    multi_modal_data: InitVar[Mapping[str, Any] | None] = None
    """Accepted only if empty, like `routed_experts`: agent loops are for text."""
    routed_experts: InitVar[Any] = None

    def __post_init__(self, extra_fields: Any, multi_modal_data: Any, routed_experts: Any) -> None:
        what = "an agent loop's output"
        _refuse_media(what, multi_modal_data=multi_modal_data, routed_experts=routed_experts)
        extra = {**(extra_fields or {}), **self.extra}
        object.__setattr__(self, "extra", extra)
        object.__setattr__(self, "extra_fields", extra)
        recorded = () if self.response_logprobs is None else ("response_logprobs",)
        for name in ("prompt_ids", "response_ids", "response_mask", *recorded, "turns"):
            value = getattr(self, name)
            if not isinstance(value, Iterable) or isinstance(value, str | bytes | Mapping):
                raise DataError(f"{name} of {what}", expected="a sequence", found=describe(value))
            object.__setattr__(self, name, tuple(value))
        if not self.prompt_ids:
            raise DataError(f"prompt_ids of {what}", expected="at least one token id", found="none")
        ids, mask, log_probs = map(len, (self.response_ids, self.response_mask, self.response_logprobs or ()))
        if ids != mask or (recorded and ids != log_probs):
            found = f"{ids} response ids, {mask} mask values, {log_probs} log-probs"
            expected = "response_ids, response_mask and response_logprobs of one length"
            raise DataError(what, expected=expected, found=found)
        _check_each("response_mask", self.response_mask, lambda one: one in (0, 1), "0 or 1 for each response id")
        _check_each("response_logprobs", self.response_logprobs or (), _finite, "finite numbers")

    def within(self, limit: int) -> AgentLoopOutput:
        """Return the episode with its response cut to `limit` tokens, as in verl; unchanged where it is not longer."""
        if len(self.response_ids) <= limit:
            return self
        why = f"cut: the response has {len(self.response_ids)} tokens, and max_tokens is {limit}"
        turns = [replace(turn, first=min(turn.first, limit), last=min(turn.last, limit - 1)) for turn in self.turns]
        if turns:
            turns[-1] = replace(turns[-1], cut="; ".join(filter(None, (turns[-1].cut, why))))
        columns = ("response_ids", "response_mask", "response_logprobs", "versions")
        kept: dict[str, Any] = {name: getattr(self, name)[:limit] for name in columns}
        seen = tuple(one for one in self.seen if one.first < limit)
        return replace(self, **kept, finish_reason="length", turns=tuple(turns), seen=seen)


Sequences = tuple[AgentLoopOutput, ...]
"""The sequences of one episode, in order; the last is the one whose response is scored."""


SUB_AGENT = "sub_agent"
"""Key of `extra` that marks a sub-agent's sequence: its name, and which call it answered."""


def call_of(output: AgentLoopOutput) -> tuple[int, int]:
    """Return which call of a sub-agent a sequence answered: (number of turns that the model had taken, number among the
    last turn's calls).

    A sequence of the agent itself gives (0, 0).
    """
    mark = output.extra.get(SUB_AGENT) or {}
    return int(mark.get("turn", 0)), int(mark.get("number", 0))


def sequences(result: Any, place: str) -> Sequences:
    """Return the result of the agent loop called `place` as a tuple of outputs. Raises `ForeignError` for anything but
    one or several outputs."""
    several = tuple(result) if isinstance(result, list | tuple) else (result,)
    if not several or not all(isinstance(one, AgentLoopOutput) for one in several):
        expected = "an AgentLoopOutput, or a list of them"
        raise ForeignError(f"result of {place}", expected=expected, found=describe(result))
    return several


def _check_each(name: str, values: Iterable[Any], holds: Callable[[Any], bool], expected: str) -> None:
    for place, one in enumerate(values):
        if not holds(one):
            found = f"{describe(one)} at index {place}"
            raise DataError(f"{name} of an agent loop's output", expected=expected, found=found)


def _refuse_media(what: str, **media: Any) -> None:
    for name, value in media.items():
        if value is not None and not (isinstance(value, Mapping) and not any(value.values())):
            raise DataError(f"{name} of {what}", expected="none: text alone", found=describe(value))


def _finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except (TypeError, ValueError, OverflowError):
        return False


@runtime_checkable
class Tool(Protocol):
    """A tool that the model can call, with the names of verl's `BaseTool`."""

    name: str

    def get_openai_tool_schema(self) -> dict[str, Any]:
        """Return the tool's schema: `{"type": "function", "function": {"name", "description", "parameters"}}`."""

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Make the tool's state for one episode; returns (its id, by which the other methods find it, a response)."""

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        """Run one call with the model's arguments, `parameters`; returns (response, the call's reward or None,
        metrics).
        """
        raise NotImplementedError(f"{type(self).__name__} does not define `async def execute`")

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """Return the tool's reward of the whole episode, or a `rewards.Score` of it; 0 by default."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Drop the tool's state: the episode is over."""


class ToolParser(Protocol):
    """Finds tool calls in the model's text."""

    def extract_tool_calls(self, text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, list[FunctionCall]]:
        """Find the tool calls; returns (the text without the calls, the calls); broken JSON is repaired, or kept as
        arguments that do not parse.

        An agent passes the text without the model's reasoning. The text may have been cut short: a call that is not
        closed does not count.
        """


@runtime_checkable
class Interaction(Protocol):
    """A simulated user, with the names of `BaseInteraction` of verl up to 0.7."""

    name: str

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Start the conversation of one episode; return its id, by which the other methods find it."""

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """Reply to the messages; returns (whether to stop, the next message, score of the last assistant turn, further
        values).
        """
        raise NotImplementedError(f"{type(self).__name__} does not define `async def generate_response`")

    async def calculate_score(self, instance_id: str | None = None, **kwargs: Any) -> float:
        """Return the score of the conversation so far; 0 by default."""
        return 0.0

    async def finalize_interaction(self, instance_id: str | None = None, **kwargs: Any) -> None:
        """Drop the conversation's state: the episode is over, however it ended."""


# --- foreign values ---------------------------------------------------------------------------------------

Otherwise = Callable[[Any], Any] | None


def plain(value: Any, otherwise: Otherwise = None) -> Any:
    """Convert a value to JSON types: None, bool, int, float, str, list and dict.

    Arrays, tensors and their scalars become lists and numbers; sets sorted lists; bytes their UTF-8 text, else base64;
    dates and times ISO texts; enums their values; dataclasses objects; `Decimal`, `Fraction`, `UUID` and paths texts.
    Unpaired surrogates, which no file can hold, become `�`. Any other value becomes `otherwise(value)`, or raises
    `TypeError`, which names its type. Raises `SettingError` for a value that contains itself or is nested too deeply.
    """
    check_nesting(value, f"a value of type {type(value).__name__}", SettingError)
    return _plain_value(value, otherwise)


def _plain_value(value: Any, otherwise: Otherwise) -> Any:
    if value is None or type(value) in (bool, int, float):
        return value
    if isinstance(value, Enum):
        return _plain_value(value.value, otherwise)
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, Mapping):
        named = {_name(name): _plain_value(item, otherwise) for name, item in value.items()}
        if len(named) < len(value):
            raise TypeError(f"two keys of a {type(value).__name__} have the same text: {describe(list(value))}")
        return named
    if isinstance(value, list | tuple):
        return [_plain_value(item, otherwise) for item in value]
    if isinstance(value, Set):
        listed = [_plain_value(item, otherwise) for item in value]
        try:
            return sorted(listed)
        except TypeError:  # of several kinds
            return sorted(listed, key=lambda item: (type(item).__name__, str(item)))
    return _plain_unusual(value, otherwise)


def _plain_unusual(value: Any, otherwise: Otherwise) -> Any:
    if isinstance(value, bytes | bytearray | memoryview):
        try:
            return bytes(value).decode()
        except UnicodeDecodeError:
            return b64encode(value).decode()
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, Decimal | Fraction | UUID | PurePath):
        return encodable(str(value))
    if not isinstance(value, type):
        if is_dataclass(value):
            return {one.name: _plain_value(getattr(value, one.name), otherwise) for one in fields(value)}
        if callable(getattr(value, "tolist", None)):  # of numpy or torch; numpy's dates are numbers there
            dated = getattr(getattr(value, "dtype", None), "kind", None) in ("m", "M")
            found = (value.astype(str) if dated else value).tolist()
            if type(found) is not type(value):
                return _plain_value(found, otherwise)
        if isinstance(value, int | float):
            return value
    if otherwise is None:
        raise TypeError(f"a value of type {type(value).__name__} has no form in JSON: {describe(value)}")
    return otherwise(value)


def _name(key: Any) -> str:
    found = plain(key, describe)
    return found if isinstance(found, str) else json.dumps(found)


def as_text(value: Any) -> str:
    """Write a value as the text that a model reads: a text as it is, anything else as JSON (see `plain`)."""
    found = plain(value)
    return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)
