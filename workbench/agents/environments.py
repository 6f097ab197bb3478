"""Gym-like environments (`reset`, `step`) and `verifiers` environments as simulated users; neither package is needed."""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

from workbench.agents.interactions import BaseInteraction, Said, last_message, maybe_awaited
from workbench.agents.tools.functions import in_thread
from workbench.base.errors import ForeignError, SettingError, describe


class GymInteraction(BaseInteraction):
    """A Gym-like environment as simulated user: each conversation plays one environment, with `reset` and `step`.

    Takes Gymnasium's step results (observation, reward, terminated, truncated, info) and Gym's older four. The score of a
    turn is its reward, `calculate_score` their sum. The row's `interaction_kwargs` may have `seed` and `options` for
    `reset`; the first observation belongs in the prompt (`environment_rows`).

    Args:
        make: function without arguments that returns a new environment.
        name: the name by which rows select this simulated user.
        action: function from the model's text to an action; if it raises `ValueError`, the model is told, without a step.
        show: function from an observation to text.
        threads: run `make`, `reset`, `step` and `close` in threads, one at a time but not always the same; False: in the
            event loop's thread, for an environment that is bound to a thread.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        *,
        name: str = "gym",
        action: Callable[[str], Any] = str.strip,
        show: Callable[[Any], str] = str,
        threads: bool = True,
    ) -> None:
        super().__init__({"name": name})
        self._make, self._action, self._show, self._threads = make, action, show, threads
        self._instances: dict[str, dict[str, Any]] = {}

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Make an environment and reset it with the row's `seed` and `options`; returns the conversation's id."""
        env, instance_id = await self._run(self._make), instance_id or str(uuid4())
        self._instances[instance_id] = state = {"env": env, "rewards": [], "over": False}
        state["observation"], state["info"] = await self._run(_reset, env, kwargs.get("seed"), kwargs.get("options"))
        return instance_id

    def opening(self, instance_id: str) -> str:
        """The first observation of the conversation `instance_id`, as text."""
        return self._show(self._instances[instance_id]["observation"])

    async def generate_response(self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any) -> Said:
        """Step the environment by the last assistant message; returns (whether it is over, observation, reward, extra)."""
        state = self._instances[instance_id]
        if state["over"]:
            return True, "The episode is over.", 0.0, {}
        try:
            action = self._action(last_message(messages))
        except ValueError as error:
            return False, f"This is no action: {error}", 0.0, {"action": None}
        found = await self._run(state["env"].step, action)
        if not isinstance(found, tuple) or len(found) not in (4, 5):
            expected = "a tuple (observation, reward, terminated, truncated, info)"
            what = f"the result of the environment's step in interaction {self.name!r}"
            raise ForeignError(what, expected=expected, found=describe(found))
        observation, reward, *ended, info = found
        state["rewards"].append(float(reward))
        state["over"] = any(map(bool, ended))
        names = ("terminated", "truncated") if len(ended) == 2 else ("done",)
        flags = dict(zip(names, map(bool, ended), strict=True))
        return state["over"], self._show(observation), float(reward), {**flags, "action": action, "info": info}

    async def calculate_score(self, instance_id: str | None = None, **kwargs: Any) -> float:
        """The sum of the conversation's rewards so far."""
        return float(sum(self._instances.get(instance_id or "", {}).get("rewards", ())))

    async def finalize_interaction(self, instance_id: str | None = None, **kwargs: Any) -> None:
        """Close the conversation's environment; a second call does nothing."""
        if state := self._instances.pop(instance_id or "", None):
            await self._run(_close, state["env"])

    async def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        return await in_thread(function, *args) if self._threads else function(*args)


def environment_rows(
    make: Callable[[], Any],
    number: int,
    *,
    name: str = "gym",
    seed: int = 0,
    system: str = "",
    show: Callable[[Any], str] = str,
    data_source: str = "workbench/environment",
) -> list[dict[str, Any]]:
    """Rows in verl's schema for `GymInteraction`: each prompt is the first observation of an environment with its own seed.

    Args:
        make: function without arguments that returns a new environment.
        number: how many rows.
        name: name of the `GymInteraction` that plays them.
        seed: row i is played from `reset(seed=seed + i)`.
        system: a system message before the observation; empty: none.
        show: function from an observation to text.
        data_source: the rows' `data_source`.
    """
    rows = []
    for index in range(number):
        env = make()
        try:
            observation, _ = _reset(env, seed + index, None)
        finally:
            _close(env)
        prompt = [{"role": "system", "content": system}] if system else []
        chat = [*prompt, {"role": "user", "content": show(observation)}]
        rows.append(_row(data_source, chat, "", index, {"name": name, "seed": seed + index}))
    return rows


class VerifiersInteraction(BaseInteraction):
    """A `MultiTurnEnv` of the `verifiers` package (0.1, its v0 interface) as simulated user, for rows of `verifiers_rows`.

    `setup_state`, `is_completed`, `env_response`, `rubric.score_rollout` and `cleanup` are called as in its own rollout,
    with either signature, (state) or (messages, state), sync or async. The rubric scores once, at the end or when
    `calculate_score` is called; other turns have score 0. The model's tool calls reach it as text only. Environments of
    verifiers' v1 interface (task sets that drive a harness over HTTP) have no such turns and are refused.

    Raises `SettingError` for an object without `env_response`, `is_completed` or `rubric`.
    """

    def __init__(self, env: Any, *, name: str = "verifiers") -> None:
        super().__init__({"name": name})
        missing = [one for one in ("env_response", "is_completed", "rubric") if not hasattr(env, one)]
        if missing:
            expected = "a MultiTurnEnv of verifiers' v0 interface"
            raise SettingError(f"environment {type(env).__name__} has no {', '.join(missing)}", expected=expected)
        self.env = env
        self._instances: dict[str, Any] = {}

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Make a conversation's state from the row's `prompt`, `answer`, `info` and `task`; returns its id."""
        instance_id = instance_id or str(uuid4())
        self._instances[instance_id] = first = _state(kwargs)
        if callable(setup := getattr(self.env, "setup_state", None)):
            self._instances[instance_id] = await maybe_awaited(setup(first)) or first
        return instance_id

    async def generate_response(self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any) -> Said:
        """The environment's answer to the last assistant message; at the end of the episode also the rubric's reward."""
        state = self._instances[instance_id]
        reply = _Message(role="assistant", content=last_message(messages))
        before = [*state["prompt"], *state["completion"]]
        state["completion"] = [*state["completion"], reply]
        state["turn"] += 1
        step = {"prompt": before, "completion": [reply], "response": None, "tokens": None, "reward": None}
        state["trajectory"].append({**step, "advantage": None, "is_truncated": False, "extras": {}})
        heard = [*before, reply]
        if await self._over(heard, state):
            return True, "", await self.calculate_score(instance_id), _extra(state)
        found = await maybe_awaited(self.env.env_response(heard, state))
        if isinstance(found, tuple):
            found, changed = found
            state = self._instances[instance_id] = changed or state
        answers = _messages(found if found is not None else state.get("final_env_response"))
        state["completion"] = [*state["completion"], *answers]
        text = "\n".join(last_message([one], one["role"]) for one in answers)
        if state.get("final_env_response") is not None or await self._over([*heard, *answers], state):
            return True, text, await self.calculate_score(instance_id), _extra(state)
        return False, text, 0.0, {}

    async def calculate_score(self, instance_id: str | None = None, **kwargs: Any) -> float:
        """The rubric's reward of the conversation, computed at the first call."""
        state = self._instances.get(instance_id or "")
        if state is None:
            return 0.0
        if state.get("reward") is None:
            given = {key: state.get(key) for key in ("prompt", "completion", "answer", "task", "info")}
            found = await maybe_awaited(_by_name(self.env.rubric.score_rollout, {"state": state, **given}))
            if state.get("reward") is None:  # the older form returns it
                state["reward"] = float(getattr(found, "reward", found))
                state["metrics"] = dict(getattr(found, "metrics", {}) or {})
        return float(state["reward"])

    async def finalize_interaction(self, instance_id: str | None = None, **kwargs: Any) -> None:
        """Call the environment's clean-up handlers; a second call does nothing."""
        state = self._instances.pop(instance_id or "", None)
        leave = getattr(self.env, "cleanup", None) or getattr(self.env, "_cleanup", None)
        if state is not None and callable(leave):
            await maybe_awaited(leave(state))

    async def _over(self, messages: list[dict[str, Any]], state: Any) -> bool:
        older = "messages" in inspect.signature(self.env.is_completed).parameters
        return bool(await maybe_awaited(self.env.is_completed(*([messages] if older else []), state)))


def _extra(state: Mapping[str, Any]) -> dict[str, Any]:
    return {"metrics": dict(state.get("metrics") or {}), "stop_condition": state.get("stop_condition")}


def verifiers_rows(
    env: Any, number: int = -1, *, name: str = "verifiers", data_source: str = "verifiers"
) -> list[dict[str, Any]]:
    """The first `number` rows (−1: all) of a verifiers environment's data set, in verl's schema, for `VerifiersInteraction`."""
    rows = []
    for index, record in enumerate(islice(env.get_dataset(), number if number >= 0 else None)):
        prompt = [dict(one) for one in _messages(record["prompt"])]
        kwargs = {key: record[key] for key in ("answer", "task") if record.get(key) is not None}
        if record.get("info") is not None:
            kwargs["info"] = record["info"] if isinstance(record["info"], str) else json.dumps(record["info"])
        asked = {"name": name, "prompt": prompt, **kwargs}
        rows.append(_row(data_source, prompt, str(record.get("answer") or ""), index, asked))
    return rows


def _row(source: str, prompt: list[Any], truth: str, index: int, interaction_kwargs: dict[str, Any]) -> dict[str, Any]:
    return {
        "data_source": source,
        "prompt": prompt,
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"index": index, "interaction_kwargs": interaction_kwargs},
    }


def _state(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What verifiers' own `init_state` gives, without what only its client needs."""
    info = kwargs.get("info") or {}
    times = SimpleNamespace(start=time.time(), end=0.0, spans=[])
    names = ("generation", "setup", "scoring", "env", "model")
    given = {
        "prompt": _messages(kwargs.get("prompt")),
        "answer": kwargs.get("answer", ""),
        "info": json.loads(info) if isinstance(info, str) else dict(info),
        "task": kwargs.get("task", "default"),
        "example_id": kwargs.get("example_id", 0),
    }
    return {
        **given,
        "input": dict(given),
        **{name: [] for name in ("completion", "trajectory", "responses")},
        **dict.fromkeys(("reward", "metrics", "error", "final_env_response")),
        **dict.fromkeys(("is_completed", "is_truncated"), False),
        "turn": 0,
        "trajectory_id": uuid4().hex,
        "timing": SimpleNamespace(**dict.fromkeys(names, times)),
    }


class _Message(dict[str, Any]):
    """A message that is read by key or by attribute: verifiers' environments do both."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the message has no key {name!r}") from None


def _messages(given: Any) -> list[dict[str, Any]]:
    """Messages as dicts, from text, dicts, or objects with `role` and `content`."""
    if isinstance(given, str):
        return [_Message(role="user", content=given)]
    listed: Sequence[Any] = given if isinstance(given, list | tuple) else [] if given is None else [given]
    plain = [one if isinstance(one, Mapping) else {"role": str(one.role), "content": one.content} for one in listed]
    return [_Message(one) for one in plain]


def _close(env: Any) -> None:
    if callable(close := getattr(env, "close", None)):
        close()


def _reset(env: Any, seed: Any, options: Any) -> tuple[Any, Any]:
    """(observation, info); `reset` may or may not take `seed` and `options`, and return info."""
    given = {"seed": seed, "options": options}
    found = _by_name(env.reset, {key: one for key, one in given.items() if one is not None})
    pair = isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], Mapping)
    return found if pair else (found, {})


def _by_name(function: Callable[..., Any], given: Mapping[str, Any]) -> Any:
    """Call a function with those of the arguments that it takes."""
    wanted = inspect.signature(function).parameters
    everything = any(one.kind is one.VAR_KEYWORD for one in wanted.values())
    return function(**{key: value for key, value in given.items() if everything or key in wanted})
