"""Simulated users: the base class by verl's names, the one that is shipped, yaml files, and a session that always ends."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from workbench.agents.classes import find_class, placed, read_yaml
from workbench.agents.protocol import Interaction
from workbench.errors import DataError, ForeignError, SettingError, boundary, describe, first_line, message, unknown
from workbench.rewards.scorers.gsm8k import compute_score

LEAVE_SECONDS = 10.0
"""What `finalize_interaction` may take."""


class BaseInteraction:
    """A simulated user, by the names and return shapes of verl up to 0.7. Subclasses give `generate_response`.

    One object serves many conversations at once, each by its `instance_id`; its state belongs in a dict by that id.
    `name` is `config["name"]`, which `load_interactions` fills in; a class made by hand has `interaction_agent`.

    The row's `interaction_kwargs`, less `name`, are the kwargs of `start_interaction` and of each `generate_response`::

        class Teacher(BaseInteraction):
            async def generate_response(self, instance_id, messages, *, ground_truth, **kwargs):
                right = ground_truth in messages[-1]["content"]  # what the model has just said
                return right, "Yes." if right else "No, try again.", float(right), {}

        agent = ToolAgent(interactions={"teacher": Teacher()})
    """

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        self.config: dict[str, Any] = dict(config or {})
        self.name: str = self.config.get("name", "interaction_agent")

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """A conversation begins: its id, a fresh one where none is given. `kwargs` are the row's `interaction_kwargs`."""
        return instance_id or str(uuid4())

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """(whether to stop, the user's next message, the score of the last assistant message, anything else)."""
        raise NotImplementedError(f"{type(self).__name__}.generate_response")

    async def calculate_score(self, instance_id: str | None = None, **kwargs: Any) -> float:
        """The score as it stands."""
        return 0.0

    async def finalize_interaction(self, instance_id: str | None = None, **kwargs: Any) -> None:
        """The conversation is over, however it ended."""


class Gsm8kInteraction(BaseInteraction):
    """`gsm8k`: scores the last assistant message against `ground_truth` by the strict form `#### <number>`.

    It stops with praise at 1.0; otherwise it asks for another try.
    """

    RIGHT = "Your response is correct!"
    WRONG = "Your response is incorrect! You need to reflect on your answer and try again."

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        super().__init__({"name": "gsm8k", **(config or {})})
        self._instances: dict[str, dict[str, Any]] = {}

    async def start_interaction(self, instance_id: str | None = None, ground_truth: Any = None, **kwargs: Any) -> str:
        """Raises `SettingError` for a row without `ground_truth`."""
        if ground_truth is None:
            what = "interaction_kwargs of a row for 'gsm8k'"
            raise SettingError(message(what, expected="ground_truth", found=", ".join(kwargs) or "nothing"))
        instance_id = instance_id or str(uuid4())
        self._instances[instance_id] = {"ground_truth": str(ground_truth), "response": ""}
        return instance_id

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """Praise and an end, or a request to try again."""
        self._instances[instance_id]["response"] = last_message(messages)
        score = await self.calculate_score(instance_id)
        right = score == 1.0
        return right, self.RIGHT if right else self.WRONG, score, {}

    async def calculate_score(self, instance_id: str | None = None, **kwargs: Any) -> float:
        """1.0 or 0.0, of the last message that was heard; 0.0 before."""
        state = self._instances.get(instance_id or "")
        return compute_score(state["response"], state["ground_truth"], method="strict") if state else 0.0

    async def finalize_interaction(self, instance_id: str | None = None, **kwargs: Any) -> None:
        """Forget it. Twice is fine."""
        self._instances.pop(instance_id or "", None)


class RemoteInteraction(BaseInteraction):
    """`RemoteInteraction(actor)`: an interaction whose state lives elsewhere, in a Ray actor for instance.

    `actor` is anything whose methods are asked by `method.remote(…)` and answer with something that can be awaited: the
    handle of `ray.remote(MyInteraction).options(max_concurrency=64).remote(config)`. Every worker that holds the handle
    speaks to the same state. `name` is how rows select it. An actor may run calls in another order than they were asked in:
    a conversation whose beginning was given up on is finalised when that has been answered, not before.
    """

    def __init__(self, actor: Any, name: str, config: Mapping[str, Any] | None = None) -> None:
        super().__init__({**(config or {}), "name": name})
        self.actor = actor
        self._beginning: dict[str, Any] = {}

    async def _ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        answer = getattr(self.actor, method).remote(*args, **kwargs)
        return await answer if inspect.isawaitable(answer) else answer

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """The actor's."""
        instance_id = instance_id or str(uuid4())
        self._beginning[instance_id] = answer = self.actor.start_interaction.remote(instance_id, **kwargs)
        found = await answer if inspect.isawaitable(answer) else answer
        self._beginning.pop(instance_id, None)
        return str(found or instance_id)

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """The actor's."""
        return await self._ask("generate_response", instance_id, messages, **kwargs)

    async def calculate_score(self, instance_id: str | None = None, **kwargs: Any) -> float:
        """The actor's."""
        return await self._ask("calculate_score", instance_id, **kwargs)

    async def finalize_interaction(self, instance_id: str | None = None, **kwargs: Any) -> None:
        """The actor's."""
        began = self._beginning.pop(instance_id or "", None)
        try:
            if inspect.isawaitable(began) and not (isinstance(began, asyncio.Future) and began.done()):
                with contextlib.suppress(Exception):  # told where it was awaited first
                    await began
        finally:  # also where nobody waits any longer
            answer = self.actor.finalize_interaction.remote(instance_id, **kwargs)
        if inspect.isawaitable(answer):
            await answer


@dataclass(frozen=True)
class Reply:
    """What a simulated user said, checked."""

    stop: bool
    text: str
    score: float | None
    """None where it gave none."""
    extra: dict[str, Any]


@dataclass
class Session:
    """One conversation with one interaction; `interacting` opens it."""

    interaction: Any
    instance_id: str
    kwargs: Mapping[str, Any]
    seconds: float | None = None
    """What a reply may take."""
    scores: list[float] = field(default_factory=list)
    """Of each assistant message so far."""
    trouble: str = ""
    """What went wrong when it was finalised, in a line."""

    async def respond(self, messages: Sequence[Mapping[str, Any]]) -> Reply:
        """The user's answer to the conversation so far.

        Raises `ForeignError` naming the interaction for what it raises, for an answer past its time, and for one that
        is not (bool, str, finite number, dict).
        """
        name = self.interaction.name
        with boundary(f"interaction {name!r}"):
            async with asyncio.timeout(self.seconds):
                told = [dict(one) for one in messages]
                found = await self.interaction.generate_response(self.instance_id, told, **self.kwargs)
        reply = checked_reply(name, found)
        self.scores += [] if reply.score is None else [reply.score]
        return reply

    async def score(self) -> float:
        """`calculate_score` as it stands. Raises `ForeignError` as `respond` does."""
        with boundary(f"interaction {self.interaction.name!r}"):
            async with asyncio.timeout(self.seconds):
                found = await self.interaction.calculate_score(self.instance_id)
        return _number(self.interaction.name, "calculate_score", found)


@asynccontextmanager
async def interacting(
    interaction: Interaction | Mapping[str, Interaction],
    row: Mapping[str, Any],
    *,
    instance_id: str | None = None,
    seconds: float | None = None,
) -> AsyncIterator[Session]:
    """`async with interacting(interactions, row) as session`: begun with the row's kwargs, and finalised however it ends.

    `row` has `extra_info.interaction_kwargs`, or is these kwargs; where several interactions are given its `name` selects.
    Finalising happens after an error, after a cancellation, and where the beginning failed; it is given `LEAVE_SECONDS`, and
    what goes wrong in it hides nothing: it is told in `session.trouble`, and as a note on the error that ended the block.
    """
    given = interaction_kwargs(row)
    chosen = select_interaction(interaction, given) if isinstance(interaction, Mapping) else interaction
    kwargs = {key: value for key, value in given.items() if key != "name"}
    session = Session(chosen, instance_id or str(uuid4()), kwargs, seconds)
    try:
        with boundary(f"interaction {chosen.name!r}"):
            async with asyncio.timeout(seconds):
                session.instance_id = (
                    await chosen.start_interaction(session.instance_id, **kwargs) or session.instance_id
                )
        yield session
    except BaseException as error:
        await _finalised(session)
        if session.trouble:
            error.add_note(session.trouble)
        raise
    else:
        await _finalised(session)


async def _finalised(session: Session) -> None:
    async def leave() -> None:
        try:
            async with asyncio.timeout(LEAVE_SECONDS):
                await session.interaction.finalize_interaction(session.instance_id)
        except Exception as cause:  # noqa: BLE001 - told, and the conversation's own outcome stands
            session.trouble = f"finalising interaction {session.interaction.name!r} failed: {first_line(cause)}"

    work = asyncio.ensure_future(leave())
    try:
        await asyncio.shield(work)
    except asyncio.CancelledError:  # cancelled while leaving: leave all the same
        await asyncio.wait([work])
        raise


def interaction_kwargs(row: Mapping[str, Any]) -> dict[str, Any]:
    """`extra_info.interaction_kwargs` (or `interaction_kwargs`) of a row; a mapping without either is taken for them.

    A parquet file gives every row the keys of all: those that are None in this one are left out.
    """
    extra = row.get("extra_info")
    for place in (extra if isinstance(extra, Mapping) else {}, row):
        found = place.get("interaction_kwargs")
        if isinstance(found, Mapping):
            return {str(key): value for key, value in found.items() if value is not None}
    if "extra_info" in row or "prompt" in row or "raw_prompt" in row:
        return {}
    return dict(row)


def chosen_interaction(
    interactions: Mapping[str, Any], row: Mapping[str, Any], place: str
) -> tuple[Any, dict[str, Any]]:
    """(The user that a row asks for, its kwargs less the name); (None, {}) where there is none or the row asks for none.

    Raises `DataError` for a name that there is not, saying which row it is (`place`).
    """
    given = interaction_kwargs(row)
    if not interactions or not given:
        return None, {}
    name = given.pop("name", None)
    if name is None and len(interactions) == 1:
        name = next(iter(interactions))
    if name not in interactions:
        what = f"interaction_kwargs of {place}"
        if name is None:
            raise DataError(message(f"{what} have no name", expected=f"one of {', '.join(interactions)}"))
        kind = type(next(iter(interactions.values()))).__name__
        told = unknown("simulated user of the agent", str(name), interactions)
        raise DataError(f"{what}: {told}; give interactions={{{str(name)!r}: {kind}()}}")
    return interactions[name], given


def select_interaction(interactions: Mapping[str, Any], kwargs: Mapping[str, Any]) -> Any:
    """The interaction that a row's kwargs name; the only one there is, where they name none.

    Raises `SettingError` with the names that there are for an unknown one, and for none where there are several.
    """
    name = kwargs.get("name")
    if name is None and len(interactions) == 1:
        return next(iter(interactions.values()))
    if name is None:
        what = "extra_info.interaction_kwargs of a row has no name"
        raise SettingError(message(what, expected=f"one of {', '.join(interactions) or '(none)'}"))
    if name not in interactions:
        raise SettingError(unknown("configured interaction", str(name), interactions))
    return interactions[name]


CLASSES: Mapping[str, type] = {
    "gsm8k": Gsm8kInteraction,
    "verl.interactions.gsm8k_interaction.Gsm8kInteraction": Gsm8kInteraction,
}
"""Names that need no import."""


def load_interactions(path: str | Path, *, roots: Sequence[str | Path] = ()) -> dict[str, Any]:
    """The interactions of a yaml file by name: `interaction` is a mapping `{class_name, config, name}` or a list of them.

    A missing name is the class's without `Interaction`, in lower case. Classes come from below an allowed root
    (`classes.find_class`). Raises `SettingError` that names the entry, for duplicates too.
    """
    entries = read_yaml(path).get("interaction")
    entries = [entries] if isinstance(entries, Mapping) else entries
    if not isinstance(entries, list) or not entries:
        expected = "a mapping or a list under 'interaction'"
        raise SettingError(message(f"{str(path)!r}", expected=expected, found=describe(entries)))
    found: dict[str, Any] = {}
    for number, entry in enumerate(entries):
        with placed(f"interaction {number} of {str(path)!r}"):
            if not isinstance(entry, Mapping):
                raise SettingError(message("its entry", expected="a mapping", found=describe(entry)))
            cls = find_class(entry.get("class_name"), "interaction", CLASSES, roots)
            config = dict(entry.get("config") or {})
            name = str(entry.get("name") or config.get("name") or default_name(cls))
            if name in found:
                do = "give one of them another name"
                raise SettingError(message(f"two interactions are named {name!r}", found=cls.__name__, do=do))
            found[name] = cls({**config, "name": name})
            found[name].name = name
    return found


def default_name(cls: type) -> str:
    """The class's name without `Interaction`, in lower case."""
    return cls.__name__.removesuffix("Interaction").lower() or cls.__name__.lower()


def last_message(messages: Sequence[Mapping[str, Any]], role: str = "assistant") -> str:
    """The text of the last message of a role; empty where there is none."""
    found = next((one.get("content") for one in reversed(messages) if one.get("role") == role), "")
    if isinstance(found, list):  # content in parts
        return "".join(str(part.get("text", "")) for part in found if isinstance(part, Mapping))
    return found if isinstance(found, str) else ""


def checked_reply(name: str, found: Any) -> Reply:
    """What `generate_response` gave. Raises `ForeignError`, one message for whatever is wrong with it."""
    try:
        stop, text, score, extra = found if isinstance(found, tuple | list) else ()
        # 0 or 1, or numpy's bool, from a comparison of theirs: clear enough; a text such as "False" is not
        good = isinstance(text, str) and not isinstance(stop, str) and stop in (True, False)
        if not good or not isinstance(extra, Mapping | None):
            raise TypeError(found)
        return Reply(bool(stop), text, None if score is None else _number(name, "the score", score), dict(extra or {}))
    except (TypeError, ValueError, ForeignError) as cause:
        shape = "(stop: bool, text: str, score: a finite number, extra: dict)"
        found = f"{type(found).__name__} {describe(found)}"
        raise ForeignError(message(f"interaction {name!r} answered", expected=shape, found=found)) from cause


def _number(name: str, what: str, value: Any) -> float:
    try:
        number = math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        found = describe(value)
        raise ForeignError(message(f"{what} of interaction {name!r}", expected="a finite number", found=found))
    return number
