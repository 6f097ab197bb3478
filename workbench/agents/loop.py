"""The base class of agent loops, and the registry of their names."""

from __future__ import annotations

import asyncio
import copy
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import torch

from workbench.agents.episode import Episode, Transcript
from workbench.agents.protocol import AgentLoopOutput
from workbench.base.config import Remembering, require
from workbench.base.errors import SettingError, check_name, describe, unknown
from workbench.base.shown import Shown
from workbench.datasets.rendering import check_tools, encode, render
from workbench.engines.protocol import Sample, Sampler, SamplingSettings, switches_of

_QUESTION, _ANSWER = {"role": "user", "content": "question"}, "\u2e22answer\u2e23"


class AgentLoopBase(Remembering, Shown):
    """Base class of agent loops: a subclass defines `async run(sampling_params, **row) -> AgentLoopOutput`.

    Where an episode is several sequences (its context was compacted, a sub-agent had one of its own), `run` returns a list of
    outputs in order. Each is a row of the batch with the episode's number in the column `session`; the last one's response is
    what the reward scores. `max_tokens` limits each of them.

    A loop is made once, with its tools and limits; every row is then run by a shallow copy that is bound to the row's
    `Episode`, so that `run` may keep a row's state in `self`. Inside `run`, `self.generate(ids, sampling_params)` samples the
    next turn with the row's own seeds, and `self.tokenizer` is the sampler's. A loop that asks the model to check its
    answer::

        class Twice(AgentLoopBase):
            name = "twice"

            async def run(self, sampling_params, *, raw_prompt, **row):
                tokens = TurnTokens(self.tokenizer, roles=["user"])
                said = Transcript(tokens.prompt(raw_prompt), sampling_params["max_tokens"])
                for turn in range(2):
                    if turn:  # 0 in the mask: not trained on; False where it has no room
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
    (1 where the model wrote, 0 where others did), and may have `response_logprobs` (`Sample.log_probs`, 0.0 where the mask is
    0; by default those of what was sampled), all of one length, at most `max_tokens`: what is longer is cut. It may have
    `turns` for the transcript, and `extra` for rewards: `num_tool_calls`, `turn_scores`, `tool_rewards`, and any other key as `agent_extra`. `Transcript.say`, `.hear`
    and `.output` keep all of it consistent.

    A loop written for verl is given as a class (`agent=ItsLoop`), or by its registered name, where its constructor reads
    `rollout_config`. It has `apply_chat_template`, `process_vision_info`, `server_manager`, `tokenizer`, `processor` and
    `loop`, for text alone.
    """

    name: str = ""
    reads_pictures: bool = False
    """Whether rows may have pictures in their prompts."""
    processor: None = None
    """Always None: agent loops are for text models, as verl's loops have `processor` None for these."""
    _episode: Episode | None = None
    _response_length: int | None = None

    @property
    def lacks(self) -> str:
        """What the loop needs and does not have (`no tools`), or "". A loop that lacks something cannot be chosen by
        name only.
        """
        return ""

    async def run(self, sampling_params: Mapping[str, Any], **row: Any) -> AgentLoopOutput | Sequence[AgentLoopOutput]:
        """Run one row's episode, with `sampling_params` (`SamplingSettings` as a dict) and the row's object columns."""
        raise NotImplementedError(f"{type(self).__name__} does not define `async def run`")

    def prepare(self, sampler: Sampler) -> None:
        """Hook that is called before any row is run: a subclass raises here if it cannot work with the sampler's
        tokenizer."""

    def describe(self) -> dict[str, Any]:
        """Return the loop's settings by name: by default its public attributes that are str, int, float, bool or None."""
        plain = str | int | float | bool | None
        return {key: value for key, value in vars(self).items() if key[0] != "_" and isinstance(value, plain)}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name})"

    def bound(self, episode: Episode) -> Self:
        """Return a shallow copy of the loop, bound to one row's `episode`."""
        mine = copy.copy(self)
        mine._episode = episode
        return mine

    @property
    def episode(self) -> Episode:
        """The `Episode` of the row that is being run. Raises `SettingError` on a loop that is not bound to one."""
        if self._episode is None:
            what = f"agent loop {self.name or type(self).__name__!r} is not bound to an episode"
            raise SettingError(what, do="run the copy that bound(Episode(…)) returns")
        return self._episode

    @property
    def tokenizer(self) -> Any:
        """The sampler's tokenizer."""
        return self.episode.sampler.tokenizer

    @property
    def server_manager(self) -> ServerManager:
        """The object with which verl's agent loops sample: `await self.server_manager.generate(request_id,
        prompt_ids=…, …)`."""
        return ServerManager(self)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The running event loop."""
        return asyncio.get_running_loop()

    @property
    def rollout_config(self) -> LoopConfig:
        """The settings that verl's loops read as `config.actor_rollout_ref.rollout`: `prompt_length` and
        `response_length`.

        Raises `SettingError` on an object that was not made by the rollout.
        """
        if self._response_length is None:
            what = (
                f"the constructor of {type(self).__name__} reads verl's configuration, which only a rollout can give it"
            )
            raise SettingError(what, do=f"give the class, or its registered name: agent={type(self).__name__}")
        return LoopConfig(self._response_length)

    @property
    def config(self) -> LoopConfig:
        """The configuration that verl's loops read; its `actor_rollout_ref.rollout` is `rollout_config`."""
        return self.rollout_config

    async def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        images: Any = None,
        videos: Any = None,
        remove_system_prompt: bool = False,
        **media: Any,
    ) -> list[int]:
        """Encode a chat with the generation prompt as token ids, with the arguments that verl's loops pass.

        With `remove_system_prompt` only the ids that follow a turn which the model ended itself are returned. Raises
        `SettingError` for pictures and films.
        """
        _refuse({"images": images, "videos": videos, **media}, "apply_chat_template")
        switches = {**switches_of(self.episode.sampler), **({"tools": list(tools)} if tools else {})}
        chat = [dict(one) for one in messages]
        if not remove_system_prompt:
            ids = list(encode(self.tokenizer, chat, **switches))
            if tools:
                check_tools(self.tokenizer, tools, chat, self.tokenizer.decode(ids), switches)
            return ids
        answer = {"role": "assistant", "content": _ANSWER}
        (text,) = render(self.tokenizer, [[_QUESTION, answer, *chat]], add_generation_prompt=True, **switches)
        after = text.rpartition(_ANSWER)[2]
        rest = after.partition(self.tokenizer.eos_token or after)[2] or after
        return list(self.tokenizer(rest, add_special_tokens=False)["input_ids"])

    async def process_vision_info(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return {}, which means no pictures and no videos, as verl does for a model without a processor."""
        return {}

    process_multi_modal_info = process_vision_info

    async def generate(
        self,
        ids: Sequence[int],
        sampling_params: SamplingSettings | Mapping[str, Any],
        *,
        policy: str | None = None,
        pixels: Mapping[str, torch.Tensor] | None = None,
        **changes: Any,
    ) -> Sample:
        """Sample the next turn after the token ids `ids`. `changes` are sampling settings of this turn alone.

        `policy` names the policy that samples, where the rollout has several. All tokens of one sequence come from one
        policy, which its output names: `AgentLoopOutput(policy=…)`. `pixels` are the model's inputs of the pictures in
        `ids`.
        """
        if isinstance(sampling_params, SamplingSettings):
            sampling_params = sampling_params.to_dict()
        return await self.episode.generate(ids, {**sampling_params, **changes}, policy, pixels)


class TokenOutput(list[int]):
    """The result of `server_manager.generate` in the form of every verl version: a list of token ids (also `token_ids`)
    with `log_probs` (nats) and `stop_reason`."""

    def __init__(self, sample: Sample) -> None:
        super().__init__(sample.ids)
        self.token_ids = list(sample.ids)
        self.log_probs = list(sample.log_probs)
        self.stop_reason = sample.finish_reason
        self.num_preempted = self.routed_experts = None
        self.extra_fields: dict[str, Any] = {}


@dataclass(frozen=True)
class LoopConfig:
    """The part of verl's rollout configuration that agent loops read here: the lengths of prompt and response."""

    response_length: int
    """Limit of the response, in tokens."""
    prompt_length: int = sys.maxsize
    """Limit of the prompt, in tokens. Prompts are not cut: a longer prompt is an error when the policy samples from it.
    """

    @property
    def actor_rollout_ref(self) -> LoopConfig:
        """The part of the configuration that has `rollout`: this object."""
        return self

    @property
    def rollout(self) -> LoopConfig:
        """The rollout's part of the configuration: this object."""
        return self


def _refuse(media: Mapping[str, Any], where: str) -> None:
    if there := [name for name, one in media.items() if one]:
        raise SettingError(f"{there[0]} in a call of {where}", expected="text: token ids", found=there)


class ServerManager:
    """Samples inside an agent loop through verl's interface (the same method names); every loop has one as
    `server_manager`."""

    def __init__(self, loop: AgentLoopBase) -> None:
        self._loop = loop

    async def generate(
        self, request_id: Any = None, *, prompt_ids: Sequence[int], sampling_params: Mapping[str, Any], **media: Any
    ) -> TokenOutput:
        """Sample the next turn after `prompt_ids`. `request_id` has no effect, as a row's turns have seeds of their
        own.

        Raises `SettingError` for pictures and films (`media`).
        """
        _refuse(media, "server_manager.generate")
        return TokenOutput(await self._loop.generate(prompt_ids, sampling_params))


_LOOPS: dict[str, type[AgentLoopBase]] = {}
_ALIASES: dict[str, str] = {
    "single_turn_agent": "single_turn",
    "single_turn_agent_loop": "single_turn",
    "tool_agent_loop": "tool_agent",
}
"""Other names of the agent loops: those of verl, and those of the guide."""
C = TypeVar("C", bound=type[AgentLoopBase])


def register_agent_loop(name: str, cls: type[AgentLoopBase]) -> None:
    """Register an agent loop's class by name, for rows (`agent_name`) and settings; a later class replaces an earlier one.

    Raises `SettingError` for anything but a subclass of `AgentLoopBase` with an async `run` of its own.
    """
    fits = isinstance(cls, type) and issubclass(cls, AgentLoopBase) and cls.run is not AgentLoopBase.run
    if not fits or not inspect.iscoroutinefunction(cls.run):
        expected = "a subclass of AgentLoopBase with `async def run(self, sampling_params, **row)`"
        raise SettingError(f"agent loop {name!r}", expected=expected, found=describe(cls))
    _ALIASES.pop(name, None)
    _LOOPS[name] = cls


def register(name: str) -> Callable[[C], C]:
    """Decorator form of `register_agent_loop`: `@register("my_agent")` on a subclass of `AgentLoopBase`."""

    def mark(cls: C) -> C:
        register_agent_loop(name, cls)
        if not cls.__dict__.get("name"):
            cls.name = name
        return cls

    return mark


def agent_loop(name: str) -> type[AgentLoopBase]:
    """Return the agent loop class registered under this name or alias. Raises `SettingError`, with the nearest name,
    for others."""
    check_name("registered agent loop", name, (*_LOOPS, *_ALIASES))
    return _LOOPS[_ALIASES.get(name, name)]


class Loops:
    """The agent loops of a rollout; `named` finds the one that runs a row.

    Args:
        agent: a loop, or the name of one that needs no arguments: it runs every row, whatever the row's `agent_name`. Or a
            mapping of names to loops (or names): a row's `agent_name` chooses among these and the registered names.
        default: the name in the mapping that runs rows without `agent_name`; None: the first.
        response_length: limit of a response in tokens, for loops whose constructors read it (`rollout_config`).
    """

    def __init__(self, agent: Any, default: str | None = None, *, response_length: int | None = None) -> None:
        self._length = response_length
        self._alone = not isinstance(agent, Mapping)
        alone = agent if isinstance(agent, str) else str(getattr(agent, "name", "") or type(agent).__name__)
        named = dict(agent) if isinstance(agent, Mapping) else {alone: agent}
        self._loops = {_ALIASES.get(name, name): _make_agent(entry, response_length) for name, entry in named.items()}
        if not self._loops:
            raise SettingError("agent=", expected="at least one agent loop", found="an empty mapping")
        first = next(iter(self._loops))
        self.default = first if default is None else _ALIASES.get(default, default)
        self._by_row: dict[str, AgentLoopBase] = {}
        if self._alone and self.default not in self._loops:
            expected = f"none: the only agent, {first!r}, runs every row"
            do = "to choose by row, give agent= a mapping of names to loops"
            raise SettingError(f"default_agent {default!r}", expected=expected, do=do)
        for name, entry in named.items():
            lacks = "" if isinstance(entry, AgentLoopBase) else self._loops[_ALIASES.get(name, name)].lacks
            if lacks:
                do = "give an object: agent=ToolAgent([…], parser=…)"
                raise SettingError(f"agent {describe(entry)} has {lacks}", expected="a loop that has them", do=do)
        self.named(self.default)

    def named(self, name: str | None, place: str = "") -> AgentLoopBase:
        """Return the loop for a row with this `agent_name` (None: the default); errors call the row `place`.

        Raises `SettingError` for an unknown name, and for a registered loop that needs tools and was made without.
        """
        if self._alone:
            return next(iter(self._loops.values()))
        name = self.default if name is None else _ALIASES.get(str(name), str(name))
        if name in self._loops:
            return self._loops[name]
        if name not in self._by_row:
            if name not in _LOOPS:
                known = dict.fromkeys((*self._loops, *_LOOPS, *_ALIASES))
                why = unknown("registered agent loop", name, known)
                raise SettingError(f"agent_name of {place}: {why}" if place else why)
            self._by_row[name] = _make_agent(name, self._length)
        if self._by_row[name].lacks:
            what = f"rows name agent {name!r}, which has {self._by_row[name].lacks}"
            do = f"give agent={{{name!r}: loop}}, with a loop that has them"
            raise SettingError(what, found=f"that name in {place}" if place else None, do=do)
        return self._by_row[name]

    def describe(self) -> dict[str, Any]:
        """Return the settings of the loops that were passed as `agent`, by name."""
        return {name: loop.describe() for name, loop in self._loops.items()}


def _make_agent(agent: Any, response_length: int | None) -> AgentLoopBase:
    if isinstance(agent, str):
        agent = agent_loop(agent)
    if isinstance(agent, type) and issubclass(agent, AgentLoopBase):
        try:
            loop = agent.__new__(agent)
            loop._response_length = response_length
            loop.__init__()  # type: ignore[misc]
            return loop
        except TypeError as cause:
            what = f"agent loop {agent.__name__} needs arguments"
            raise SettingError(what, found=str(cause), do=f"give an object: agent={agent.__name__}(…)") from cause
    require(isinstance(agent, AgentLoopBase), "agent=", expected="an agent loop, or the name of one", found=agent)
    return agent


@register("single_turn")
class SingleTurn(AgentLoopBase):
    """Agent loop of a single model turn: samples the same tokens as a rollout without agents."""

    async def run(self, sampling_params: Mapping[str, Any], **row: Any) -> AgentLoopOutput:
        """Sample one answer to the row's `raw_prompt`."""
        switches = switches_of(self.episode.sampler)
        prompt = tuple(encode(self.tokenizer, row["raw_prompt"], **switches))
        transcript = Transcript(prompt, int(sampling_params["max_tokens"]))
        sample = await self.generate(prompt, sampling_params)
        transcript.say(sample, self.tokenizer.decode(list(sample.ids), skip_special_tokens=True))
        transcript.reason = sample.finish_reason
        return transcript.output(self.episode)
