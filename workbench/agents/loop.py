"""The base of agent loops, and the names that rows and settings call them by."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, TypeVar

from workbench.agents.episode import Episode
from workbench.agents.protocol import AgentLoopOutput
from workbench.config import remembering
from workbench.engines.protocol import Sample, Sampler, SamplingSettings
from workbench.errors import SettingError, describe, message, unknown


class AgentLoopBase:
    """One prompt → one masked sequence. A leaf gives `async run(sampling_params, **row) -> AgentLoopOutput`.

    A loop is made once, with its tools and limits; every row is then run by a shallow copy of it that is bound to the
    row's `Episode`, so that what `run` keeps in `self` is the row's own. Inside `run`, `self.generate(ids,
    sampling_params)` samples the next turn from the row's own seeds, and `self.tokenizer` is the sampler's. A loop that asks
    the model to look again at what it said::

        class Twice(AgentLoopBase):
            name = "twice"

            async def run(self, sampling_params, *, raw_prompt, **row):
                tokens = TurnTokens(self.tokenizer, roles=["user"])
                said = Transcript(tokens.prompt(raw_prompt), sampling_params["max_tokens"])
                for turn in range(2):
                    if turn:  # 0 in the mask: not learnt from; False where it has no room
                        again = [{"role": "user", "content": "Are you sure?"}]
                        if not said.hear("user", "Are you sure?", tokens.delta(again, said.ids)):
                            break
                    sample = await self.generate(said.context, sampling_params, max_tokens=said.room)
                    said.say(sample, self.tokenizer.decode(sample.ids, skip_special_tokens=True))
                    said.reason = sample.finish_reason
                return said.output(self.episode, sure=said.turns[-1].text)

        pipeline = recipes.grpo(engine, reward, agent=Twice())

    A `Sample` has `ids`, their `log_probs` (in nats), `finish_reason` (`stop`, `length` or `abort`) and `version`. An
    `AgentLoopOutput` that is made by hand needs `prompt_ids`, `response_ids` (all that follows the prompt), a `response_mask`
    (1 where the model wrote, 0 where others did) and `response_logprobs` (`Sample.log_probs`, 0.0 where the mask is 0), all
    three of one length, at most `max_tokens`: what is longer is cut. It may have `turns` for the transcript, and in `extra`
    what rewards ask for: `num_tool_calls`, `turn_scores`, `tool_rewards`, and whatever you like as `agent_extra`.
    `Transcript.say`, `.hear` and `.output` keep all of it in step.
    """

    name: str = ""
    _episode: Episode | None = None
    _made_with: Mapping[str, Any] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        """A loop remembers what it is constructed with, so that a run can write down how to make it again."""
        super().__init_subclass__(**options)
        if "__init__" in vars(cls):
            cls.__init__ = remembering(vars(cls)["__init__"])  # type: ignore[method-assign]

    @property
    def made_with(self) -> Mapping[str, Any]:
        """The arguments of its constructor by name."""
        return self._made_with

    @property
    def lacks(self) -> str:
        """What it was made without and is nothing without, in words: a row's `agent_name` alone does not choose it then."""
        return ""

    async def run(self, sampling_params: Mapping[str, Any], **row: Any) -> AgentLoopOutput:
        """`sampling_params` are `SamplingSettings` by name, `row` the object columns of the row by name."""
        raise NotImplementedError

    def prepare(self, sampler: Sampler) -> None:
        """Look at the sampler's tokenizer, before any row is run; raise where the loop cannot work with it."""

    def describe(self) -> dict[str, Any]:
        """Its settings, as plain values: public attributes that are plain, unless a leaf says more."""
        plain = str | int | float | bool | None
        return {key: value for key, value in vars(self).items() if key[0] != "_" and isinstance(value, plain)}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name})"

    def _repr_html_(self) -> str:
        from workbench.views.agents import loop_html

        return loop_html(self)

    def bound(self, episode: Episode) -> Self:
        """The loop for one row."""
        mine = copy.copy(self)
        mine._episode = episode
        return mine

    @property
    def episode(self) -> Episode:
        """The row's. Raises `SettingError` on a loop that is not bound to one."""
        if self._episode is None:
            raise SettingError(
                message(
                    f"agent loop {self.name or type(self).__name__!r} runs no row", do="run it by bound(Episode(…))"
                )
            )
        return self._episode

    @property
    def tokenizer(self) -> Any:
        """The model's own."""
        return self.episode.sampler.tokenizer

    async def generate(
        self, ids: Sequence[int], sampling_params: SamplingSettings | Mapping[str, Any], **changes: Any
    ) -> Sample:
        """The next turn after `ids`: token ids in, token ids out. `changes` are sampling settings of this turn."""
        if isinstance(sampling_params, SamplingSettings):
            sampling_params = sampling_params.to_dict()
        return await self.episode.generate(ids, {**sampling_params, **changes})


_LOOPS: dict[str, type[AgentLoopBase]] = {}
_ALIASES: dict[str, str] = {
    "single_turn_agent": "single_turn",
    "single_turn_agent_loop": "single_turn",
    "tool_agent_loop": "tool_agent",
}
"""verl's names, and those of the practice guide."""
C = TypeVar("C", bound=type[AgentLoopBase])


def register_agent_loop(name: str, cls: type[AgentLoopBase]) -> None:
    """Let rows (`agent_name`) and settings call a loop by name; a class that is registered again replaces the first.

    Raises `SettingError` for what is no subclass of `AgentLoopBase` with an async `run` of its own.
    """
    fits = isinstance(cls, type) and issubclass(cls, AgentLoopBase) and cls.run is not AgentLoopBase.run
    if not fits or not inspect.iscoroutinefunction(cls.run):
        raise SettingError(
            message(
                f"agent loop {name!r}",
                expected="a subclass of AgentLoopBase with `async def run(self, sampling_params, **row)`",
                found=describe(cls),
            )
        )
    _ALIASES.pop(name, None)
    _LOOPS[name] = cls


def register(name: str) -> Callable[[C], C]:
    """`@register("my_agent")` on a subclass of `AgentLoopBase`."""

    def mark(cls: C) -> C:
        register_agent_loop(name, cls)
        if not cls.__dict__.get("name"):
            cls.name = name
        return cls

    return mark


def known_name(name: str) -> str:
    """The house's name of a loop: an alias's own, others as they are."""
    return _ALIASES.get(name, name)


def agent_loop(name: str) -> type[AgentLoopBase]:
    """A loop's class by name or alias. Raises `SettingError` with the nearest one."""
    if known_name(name) not in _LOOPS:
        raise SettingError(unknown("registered agent loop", name, (*_LOOPS, *_ALIASES)))
    return _LOOPS[known_name(name)]


class Loops:
    """The loops of a rollout.

    `agent` is a loop, or the name of one that needs no arguments: it runs every row, whatever the row's `agent_name` says.
    Or it is a mapping of names to either: a row's `agent_name` chooses among them, and among the registered names that are
    not in it; `default` says which of the mapping's runs rows without a name (its first, unless said).
    """

    def __init__(self, agent: Any, default: str | None = None) -> None:
        self._alone = not isinstance(agent, Mapping)
        given = dict(agent) if isinstance(agent, Mapping) else {_name_of(agent): agent}
        self._loops = {known_name(name): _made(one) for name, one in given.items()}
        if not self._loops:
            raise SettingError(message("agent", expected="at least one agent loop", found="none"))
        self.default = known_name(default) if default is not None else next(iter(self._loops))
        self._found: dict[str, AgentLoopBase] = {}
        if self._alone and self.default not in self._loops:
            raise SettingError(
                message(
                    f"default_agent {default!r}",
                    expected=f"none: an agent given alone ({next(iter(self._loops))!r}) runs every row",
                    do="give agent= a mapping of names to loops",
                )
            )
        self.named(self.default)

    def named(self, name: str | None, place: str = "") -> AgentLoopBase:
        """The loop of a row that says `name`, or none; `place` is how errors call the row.

        Raises `SettingError` for an unknown name, with the nearest, and for a registered one that would have nothing to
        work with.
        """
        if self._alone:
            return next(iter(self._loops.values()))
        name = self.default if name is None else known_name(str(name))
        if name in self._loops:
            return self._loops[name]
        if name not in self._found:
            if name not in _LOOPS:
                known = dict.fromkeys((*self._loops, *_LOOPS, *_ALIASES))
                told = unknown("registered agent loop", name, known)
                raise SettingError(f"agent_name of {place}: {told}" if place else told)
            self._found[name] = _made(name)
        if self._found[name].lacks:
            what = f"rows name agent {name!r}, which has {self._found[name].lacks}"
            raise SettingError(message(what, found=place or None, do=f"give agent={{{name!r}: loop}}"))
        return self._found[name]

    def describe(self) -> dict[str, Any]:
        """Name → settings of each loop that was given."""
        return {name: loop.describe() for name, loop in self._loops.items()}


def _name_of(agent: Any) -> str:
    return agent if isinstance(agent, str) else str(getattr(agent, "name", "") or type(agent).__name__)


def _made(agent: Any) -> AgentLoopBase:
    if isinstance(agent, str):
        agent = agent_loop(agent)
    if isinstance(agent, type) and issubclass(agent, AgentLoopBase):
        try:
            return agent()
        except TypeError as cause:
            raise SettingError(
                message(f"agent loop {agent.__name__} needs arguments", found=str(cause), do="give a loop that is made")
            ) from cause
    if not isinstance(agent, AgentLoopBase):
        raise SettingError(message("agent", expected="an agent loop, or the name of one", found=describe(agent)))
    return agent
