"""Simulated users: the base class with verl's names, the shipped ones, and conversations that are always finalised."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from workbench.agents.calls import named, not_async, within
from workbench.agents.protocol import Interaction, plain
from workbench.base import runtime
from workbench.base.errors import DataError, ForeignError, SettingError, boundary, describe, first_line, unknown
from workbench.base.shown import encodable
from workbench.rewards.scorers.gsm8k import compute_score, written_truth

LEAVE_SECONDS = 10.0
"""Time limit of `finalize_interaction`, in seconds."""
ReplyTuple = tuple[bool, str, float, dict[str, Any]]
"""A simulated user's answer: (whether to stop, the next message, score of the last assistant message, further values).
"""


class BaseInteraction(Interaction):
    """Base class of simulated users, with the methods of verl up to 0.7. Subclasses define `generate_response`.

    One object serves many conversations at once; the state of each belongs in a dict by its `instance_id`. `name` is
    `config["name"]`, which `load_interactions` fills in; the default is `interaction_agent`.

    The row's `interaction_kwargs`, without `name`, are the kwargs of `start_interaction` and of each `generate_response`::

        class Teacher(BaseInteraction):
            async def generate_response(self, instance_id, messages, *, ground_truth, **kwargs):
                right = ground_truth in messages[-1]["content"]  # the model's last turn
                return right, "Yes." if right else "No, try again.", float(right), {}

        agent = ToolAgent(interactions={"teacher": Teacher()})
    """

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        self.config: dict[str, Any] = dict(config or {})
        self.name: str = self.config.get("name", "interaction_agent")

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Start a conversation; return its id: `instance_id`, or a new one where that is None."""
        return instance_id or str(uuid4())

    async def finalize_interaction(self, instance_id: str | None = None, **kwargs: Any) -> None:
        """Called when the conversation is over, however it ended; does nothing by default."""


class Gsm8kInteraction(BaseInteraction):
    """Simulated user `gsm8k`: scores the last assistant message by `ground_truth`, in the strict form `#### <number>`.

    A right answer (score 1.0) ends the conversation with praise; after a wrong one the model is asked to try again.
    """

    RIGHT = "Your response is correct!"
    WRONG = "Your response is incorrect! You need to reflect on your answer and try again."

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        super().__init__({"name": "gsm8k", **(config or {})})
        self._instances: dict[str, dict[str, str]] = {}

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Start a conversation; return its id. Raises `SettingError` for a row whose `ground_truth` is not a number."""
        truth = written_truth(kwargs.get("ground_truth"))
        if truth is None:
            value = describe(kwargs.get("ground_truth"))
            raise SettingError("ground_truth in interaction_kwargs for 'gsm8k'", expected="a number", found=value)
        instance_id = instance_id or str(uuid4())
        self._instances[instance_id] = {"ground_truth": truth, "response": ""}
        return instance_id

    async def generate_response(self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any) -> ReplyTuple:
        """Score the last assistant message; returns (stop, praise or a request to try again, score, {})."""
        self._instances[instance_id]["response"] = last_message(messages)
        score = await self.calculate_score(instance_id)
        return (True, self.RIGHT, score, {}) if score == 1.0 else (False, self.WRONG, score, {})

    async def calculate_score(self, instance_id: str | None = None, **kwargs: Any) -> float:
        """Return the score of the last assistant message: 1.0 if it is right, else 0.0; 0.0 before the first."""
        state = self._instances.get(instance_id or "")
        return compute_score(state["response"], state["ground_truth"], method="strict") if state else 0.0

    async def finalize_interaction(self, instance_id: str | None = None, **kwargs: Any) -> None:
        """Drop the conversation's state; a second call does nothing."""
        self._instances.pop(instance_id or "", None)


class RemoteInteraction(BaseInteraction):
    """An interaction whose state lives in another process, such as a Ray actor: `RemoteInteraction(actor, name)`.

    `actor` has methods that are called by `method.remote(…)` and return an awaitable: the handle of
    `ray.remote(MyInteraction).options(max_concurrency=64).remote(config)`. All workers with the handle share the state.
    Rows select it by `name`. An actor may run calls out of order: a conversation whose start timed out or was cancelled is
    finalised only after the actor has answered the start.
    """

    def __init__(self, actor: Any, name: str, config: Mapping[str, Any] | None = None) -> None:
        super().__init__({**(config or {}), "name": name})
        self.actor = actor
        self._beginning: dict[str, Any] = {}

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Start a conversation in the actor; returns its id."""
        instance_id = instance_id or str(uuid4())
        self._beginning[instance_id] = answer = self.actor.start_interaction.remote(instance_id, **kwargs)
        name = await maybe_awaited(answer)
        self._beginning.pop(instance_id, None)
        return str(name or instance_id)

    async def generate_response(self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any) -> ReplyTuple:
        """Let the actor reply to `messages`; returns (stop, text, score, extra)."""
        return await maybe_awaited(self.actor.generate_response.remote(instance_id, messages, **kwargs))

    async def calculate_score(self, instance_id: str | None = None, **kwargs: Any) -> float:
        """Return the score that the actor gives the conversation."""
        return await maybe_awaited(self.actor.calculate_score.remote(instance_id, **kwargs))

    async def finalize_interaction(self, instance_id: str | None = None, **kwargs: Any) -> None:
        """End the conversation in the actor, once a start that is still under way has been answered."""
        began = self._beginning.pop(instance_id or "", None)
        try:
            if not (isinstance(began, asyncio.Future) and began.done()):
                with contextlib.suppress(Exception):  # raised where it was awaited first
                    await maybe_awaited(began)
        finally:  # also after a cancellation
            answer = self.actor.finalize_interaction.remote(instance_id, **kwargs)
        await maybe_awaited(answer)


async def maybe_awaited(value: Any) -> Any:
    """Return a value, or, where it is awaitable, its result: for calls of functions that may be sync or async."""
    return await value if inspect.isawaitable(value) else value


@dataclass(frozen=True)
class UserReply:
    """A simulated user's answer, after its types have been checked."""

    stop: bool
    text: str
    score: float | None
    """Score of the last assistant message; None where the user returned no score."""
    extra: dict[str, Any]


@dataclass
class Conversation:
    """One conversation with one simulated user; made by `interacting`, and by a `ToolAgent` for each episode."""

    interaction: Any
    kwargs: Mapping[str, Any]
    seconds: float | None = None
    """Time limit of the start and of each reply, in seconds; None: none."""
    instance_id: str = ""
    open: bool = False
    """Whether the conversation still has to be finalised."""
    scores: list[float] = field(default_factory=list)
    """The scores of the assistant messages so far."""
    trouble: str = ""
    """The error of `finalize_interaction` in one line; empty where there was none."""

    @property
    def name(self) -> str:
        """The simulated user's name."""
        return getattr(self.interaction, "name", type(self.interaction).__name__)

    async def start(self, instance_id: str) -> None:
        """Start the interaction under `instance_id`. One whose start fails or is cancelled is still finalised by `end`."""
        self.instance_id, self.open = instance_id, True
        begun = self.interaction.start_interaction(instance_id, **self.kwargs)
        self.instance_id = await within(begun, self.seconds) or instance_id

    async def ask(self, messages: Sequence[Mapping[str, Any]]) -> UserReply:
        """Ask the user to answer `messages`. Raises the user's errors, `TimeoutError`, or `ForeignError` for an answer
        of another form."""
        chat = [dict(one) for one in messages]
        answer = self.interaction.generate_response(self.instance_id, chat, **self.kwargs)
        reply: Any = await within(answer, self.seconds) if inspect.isawaitable(answer) else answer
        return _check_reply(self.name, reply)

    async def respond(self, messages: Sequence[Mapping[str, Any]]) -> UserReply:
        """Ask the simulated user to answer the conversation so far, and keep the score that it gives.

        Raises `ForeignError`, naming the interaction, if it raises, takes more than `seconds`, or does not return
        (bool, str, finite number, dict).
        """
        with boundary(f"interaction {self.name!r}"):
            reply = await self.ask(messages)
        self.scores += [] if reply.score is None else [reply.score]
        return reply

    async def score(self) -> float:
        """Return the simulated user's score of the conversation (`calculate_score`). Raises `ForeignError` as `respond`
        does."""
        with boundary(f"interaction {self.name!r}"):
            number = await within(self.interaction.calculate_score(self.instance_id), self.seconds)
        return _finite_number(self.name, "calculate_score", number)

    async def end(self) -> None:
        """Finalise the conversation, even when cancelled; a second call does nothing. A failure is kept in `trouble`."""
        if self.open:
            self.open = False
            await runtime.to_its_end(self._finish())

    async def _finish(self) -> None:
        try:
            await within(self.interaction.finalize_interaction(self.instance_id), LEAVE_SECONDS)
        except Exception as cause:  # noqa: BLE001 - reported; the conversation's own outcome is not changed
            self.trouble = f"finalising interaction {self.name!r} failed: {first_line(cause)}"


@contextlib.asynccontextmanager
async def interacting(
    interaction: Interaction | Mapping[str, Interaction],
    row: Mapping[str, Any],
    *,
    instance_id: str | None = None,
    seconds: float | None = None,
) -> AsyncIterator[Conversation]:
    """Async context manager that starts a conversation with a simulated user and yields it.

    `async with interacting(interactions, row) as talk: await talk.respond(messages)`. The conversation is finalised
    however the block ends, also if its start fails. That may take `LEAVE_SECONDS`; its failure is kept in the
    conversation's `trouble`, and in a note on the error that ended the block.

    Args:
        interaction: an interaction, or a mapping of names to interactions.
        row: a row with `extra_info.interaction_kwargs`, or these kwargs; their `name` selects among several.
        instance_id: the conversation's id; None: a new one.
        seconds: time limit of the start and of each reply; None: none.

    Raises `DataError` for a row that selects no interaction.
    """
    if isinstance(interaction, Mapping):
        chosen, kwargs = select_interaction(interaction, row, needed=True)
    else:
        chosen, kwargs = interaction, {key: value for key, value in interaction_kwargs(row).items() if key != "name"}
    session = Conversation(chosen, kwargs, seconds)
    try:
        with boundary(f"interaction {chosen.name!r}"):
            await session.start(instance_id or str(uuid4()))
        yield session
    except BaseException as error:
        await session.end()
        if session.trouble:
            error.add_note(session.trouble)
        raise
    else:
        await session.end()


def interaction_kwargs(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row's `interaction_kwargs`, from its `extra_info` or the row; a mapping that is not a row is taken to be
    the kwargs.

    Keys whose value is None are left out, as a parquet file gives every row the keys of all rows.
    """
    extra = row.get("extra_info")
    for place in (extra if isinstance(extra, Mapping) else {}, row):
        kwargs = place.get("interaction_kwargs")
        if isinstance(kwargs, Mapping):
            return {str(key): value for key, value in kwargs.items() if value is not None}
    if "extra_info" in row or "prompt" in row or "raw_prompt" in row:
        return {}
    return dict(row)


def select_interaction(
    interactions: Mapping[str, Any], row: Mapping[str, Any], place: str = "a row", *, needed: bool = False
) -> tuple[Any, dict[str, Any]]:
    """Return (the simulated user that a row's `interaction_kwargs` name, the kwargs without `name`).

    With a single user the name, and the kwargs, may be missing. Where there are no users, a row without kwargs selects
    none, (None, {}), unless one is `needed`. Raises `DataError`, which calls the row `place` and lists the users, for
    an unknown or missing name, and for a row with kwargs where there are no users.
    """
    kwargs = interaction_kwargs(row)
    if not (needed or interactions or kwargs):
        return None, {}
    name = kwargs.pop("name", None)
    if name is None and len(interactions) == 1:
        name = next(iter(interactions))
    what = f"interaction_kwargs of {place}"
    if name is None:
        do = "name an interaction in each row; rows without a simulated user need another agent (column agent_name)"
        raise DataError(f"{what} have no name", expected=f"one of {', '.join(interactions) or '(none)'}", do=do)
    if name not in interactions:
        kind = type(next(iter(interactions.values()))).__name__ if interactions else "BaseInteraction"
        why = unknown("simulated user of the agent", str(name), interactions)
        raise DataError(f"{what}: {why}; give interactions={{{str(name)!r}: {kind}()}}")
    return interactions[name], kwargs


def checked_interactions(interactions: Any) -> dict[str, Interaction]:
    """Return an agent's `interactions=` (list or mapping) as name → simulated user. Raises `SettingError` for anything
    else."""
    alone = hasattr(interactions, "generate_response")
    if alone or isinstance(interactions, str) or not isinstance(interactions, Iterable):
        do = f"write [{named(interactions)}{'()' if isinstance(interactions, type) else ''}]" if alone else None
        raise SettingError("interactions", expected="a list of simulated users", found=describe(interactions), do=do)
    if isinstance(interactions, Mapping):
        pairs = list(interactions.items())
    else:
        pairs = [(getattr(one, "name", None), one) for one in interactions]
    for name, one in pairs:
        _check_interaction(name, one)
    if len(by_name := dict(pairs)) < len(pairs):
        raise SettingError("names of the interactions", expected="unique names", found=[name for name, _ in pairs])
    return by_name


def _check_interaction(name: Any, user: Any) -> None:
    if isinstance(user, type):
        do = f"make an object of it: {user.__name__}()"
        raise SettingError("interactions", expected="objects, not classes", found=f"the class {user.__name__}", do=do)
    kind = type(user).__name__
    method_of_user = getattr(user, "generate_response", None)
    overridden = getattr(type(user), "generate_response", None) is not BaseInteraction.generate_response
    if not callable(method_of_user) or not overridden:
        do = "give the class `async def generate_response(self, instance_id, messages, **kwargs)`"
        raise SettingError(f"interaction {kind} has no generate_response of its own", do=do)
    for method in ("start_interaction", "generate_response", "finalize_interaction"):
        written = getattr(user, method, None)
        if not callable(written) or not_async(written):
            found = "a method that is not async" if callable(written) else "no such method"
            raise SettingError(f"interaction {kind}", expected=f"`async def {method}`", found=found)
    if not isinstance(name, str) or not name:
        do = "set its `name`: rows choose their simulated user by it (`interaction_kwargs.name`)"
        raise SettingError(f"name of interaction {kind}", expected="a text", found=describe(name), do=do)


def default_name(cls: type) -> str:
    """Return the default name of an interaction: its class's name without `Interaction`, in lower case."""
    return cls.__name__.removesuffix("Interaction").lower() or cls.__name__.lower()


def last_message(messages: Sequence[Mapping[str, Any]], role: str = "assistant") -> str:
    """Return the text of the last message with role `role`; "" where there is none."""
    content = next((one.get("content") for one in reversed(messages) if one.get("role") == role), "")
    if isinstance(content, list):  # content in parts
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return content if isinstance(content, str) else ""


def _check_reply(name: str, answer: Any) -> UserReply:
    """Check the types of an interaction's answer. Raises `ForeignError` for one of another form."""
    try:
        stop, text, score, extra = answer if isinstance(answer, tuple | list) else ()
        # 0 or 1, or numpy's bool, from a comparison, are clear; a text such as "False" is not
        good = isinstance(text, str) and not isinstance(stop, str) and stop in (True, False)
        if not good or not isinstance(extra, Mapping | None):
            raise TypeError("the answer is not a tuple (stop, text, score, extra)")
        number = None if score is None else _finite_number(name, "the score", score)
        return UserReply(bool(stop), encodable(text), number, plain(extra or {}, describe))
    except (TypeError, ValueError, RecursionError, ForeignError) as cause:
        shape = "(stop: bool, text: str, score: a finite number, extra: dict)"
        found = f"{type(answer).__name__} {describe(answer)}"
        raise ForeignError(f"the answer of interaction {name!r}", expected=shape, found=found) from cause


def _finite_number(name: str, what: str, value: Any) -> float:
    with contextlib.suppress(TypeError, ValueError):
        if not isinstance(value, str) and math.isfinite(value):
            return float(value)
    raise ForeignError(f"{what} of interaction {name!r}", expected="a finite number", found=describe(value))
