"""Other people's environments as interactions: Gym-like `reset`/`step`, and `verifiers` environments. By duck type; optional."""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

from workbench.agents.interactions import BaseInteraction, last_message
from workbench.agents.tools.functions import in_thread
from workbench.errors import ForeignError, SettingError, describe, message


class GymInteraction(BaseInteraction):
    """`GymInteraction(make)`: each conversation plays one environment that `make()` builds, with `reset` and `step`.

    `action` turns the model's text into an action (the stripped text itself); a `ValueError` of it is told to the model
    and costs a turn, no step. `show` turns an observation into text. Gymnasium's results (observation, reward, terminated,
    truncated, info) and Gym's older four are taken. The score of a turn is its reward, `calculate_score` their sum.

    The row's `interaction_kwargs` may have `seed` and `options` for `reset`. What `reset` shows belongs in the prompt:
    `environment_rows` makes such rows. `make`, `reset`, `step` and `close` run in threads, never two at once for one
    environment, but not always the same one; `threads=False` runs them here, where an environment is bound to a thread.
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
        self._make = make
        self._action = action
        self._show = show
        self._threads = threads
        self._playing: dict[str, dict[str, Any]] = {}

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """A fresh environment, reset with the row's seed."""
        instance_id = instance_id or str(uuid4())
        env = await self._run(self._make)
        self._playing[instance_id] = {"env": env, "rewards": [], "over": False}
        observation, info = await self._run(_reset, env, kwargs.get("seed"), kwargs.get("options"))
        self._playing[instance_id] |= {"observation": observation, "info": info}
        return instance_id

    def opening(self, instance_id: str) -> str:
        """What `reset` showed."""
        return self._show(self._playing[instance_id]["observation"])

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """One step with the last assistant message as action."""
        state = self._playing[instance_id]
        if state["over"]:
            return True, "The episode is over.", 0.0, {}
        try:
            action = self._action(last_message(messages))
        except ValueError as error:
            return False, f"This is no action: {error}", 0.0, {"action": None}
        found = await self._run(state["env"].step, action)
        if not isinstance(found, tuple) or len(found) not in (4, 5):
            expected = "(observation, reward, terminated, truncated, info)"
            raise ForeignError(message(f"step of {self.name!r} returned", expected=expected, found=describe(found)))
        observation, reward, *ended, info = found
        state["rewards"].append(float(reward))
        state["over"] = any(map(bool, ended))
        flags = dict(zip(("terminated", "truncated") if len(ended) == 2 else ("done",), map(bool, ended), strict=True))
        return state["over"], self._show(observation), float(reward), {**flags, "action": action, "info": info}

    async def calculate_score(self, instance_id: str | None = None, **kwargs: Any) -> float:
        """The sum of the rewards so far."""
        return float(sum(self._playing.get(instance_id or "", {}).get("rewards", ())))

    async def finalize_interaction(self, instance_id: str | None = None, **kwargs: Any) -> None:
        """Close the environment. Twice is fine."""
        state = self._playing.pop(instance_id or "", None)
        if state is not None and callable(close := getattr(state["env"], "close", None)):
            await self._run(close)

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
    """`number` rows in verl's schema: each prompt is what `reset(seed=seed + i)` shows, to be played from the same seed."""
    rows = []
    for index in range(number):
        env = make()
        try:
            observation, _ = _reset(env, seed + index, None)
        finally:
            if callable(close := getattr(env, "close", None)):
                close()
        prompt = [{"role": "system", "content": system}] if system else []
        rows.append(
            {
                "data_source": data_source,
                "prompt": [*prompt, {"role": "user", "content": show(observation)}],
                "reward_model": {"style": "rule", "ground_truth": ""},
                "extra_info": {"index": index, "interaction_kwargs": {"name": name, "seed": seed + index}},
            }
        )
    return rows


class VerifiersInteraction(BaseInteraction):
    """`VerifiersInteraction(env)`: a `MultiTurnEnv` of the `verifiers` package (0.1, its v0 interface) as the simulated user.

    Its `setup_state`, `is_completed`, `env_response`, `rubric.score_rollout` and `cleanup` are called as its own rollout
    does, in both of their forms (state alone; messages and state), sync or async; the model is ours. `verifiers_rows` gives its
    data set as rows. The rubric scores once, when the environment says that it is over or `calculate_score` is asked; other
    turns score 0. Tool calls of the model reach it as text alone. Environments of verifiers' v1 interface (task sets that
    drive a harness over HTTP) have no turns of this kind: they are refused.
    Raises `SettingError` for an object without `env_response` and `rubric`.
    """

    def __init__(self, env: Any, *, name: str = "verifiers") -> None:
        super().__init__({"name": name})
        missing = [one for one in ("env_response", "is_completed", "rubric") if not hasattr(env, one)]
        if missing:
            expected = "a MultiTurnEnv of verifiers' v0 interface"
            raise SettingError(message(f"{type(env).__name__} has no {', '.join(missing)}", expected=expected))
        self.env = env
        self._states: dict[str, Any] = {}

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """A fresh state from the row's `prompt`, `answer`, `info`, `task`."""
        instance_id = instance_id or str(uuid4())
        state = _state(kwargs)
        self._states[instance_id] = state
        if callable(setup := getattr(self.env, "setup_state", None)):
            self._states[instance_id] = await _maybe(setup(state)) or state
        return instance_id

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """The environment's answer, or its end with the rubric's reward."""
        state = self._states[instance_id]
        reply = _Message(role="assistant", content=last_message(messages))
        before = [*state["prompt"], *state["completion"]]
        state["completion"] = [*state["completion"], reply]
        state["turn"] += 1
        step = {"prompt": before, "completion": [reply], "response": None, "tokens": None, "reward": None}
        state["trajectory"].append({**step, "advantage": None, "is_truncated": False, "extras": {}})
        heard = [*before, reply]
        if await self._over(heard, state):
            return True, "", await self.calculate_score(instance_id), self._told(state)
        found = await _maybe(self.env.env_response(heard, state))
        if isinstance(found, tuple):
            found, changed = found
            state = self._states[instance_id] = changed or state
        answers = _messages(found if found is not None else state.get("final_env_response"))
        state["completion"] = [*state["completion"], *answers]
        text = "\n".join(last_message([one], one["role"]) for one in answers)
        if state.get("final_env_response") is not None or await self._over([*heard, *answers], state):
            return True, text, await self.calculate_score(instance_id), self._told(state)
        return False, text, 0.0, {}

    async def calculate_score(self, instance_id: str | None = None, **kwargs: Any) -> float:
        """The rubric's reward of the conversation, asked once."""
        state = self._states.get(instance_id or "")
        if state is None:
            return 0.0
        if state.get("reward") is None:
            score = self.env.rubric.score_rollout
            wanted = inspect.signature(score).parameters
            named = {
                "state": state,
                **{key: state.get(key) for key in ("prompt", "completion", "answer", "task", "info")},
            }
            everything = any(one.kind is one.VAR_KEYWORD for one in wanted.values())
            found = await _maybe(score(**{key: value for key, value in named.items() if everything or key in wanted}))
            if state.get("reward") is None:  # the older form returns it
                state["reward"] = float(getattr(found, "reward", found))
                state["metrics"] = dict(getattr(found, "metrics", {}) or {})
        return float(state["reward"])

    async def finalize_interaction(self, instance_id: str | None = None, **kwargs: Any) -> None:
        """Its clean-up handlers. Twice is fine."""
        state = self._states.pop(instance_id or "", None)
        leave = getattr(self.env, "cleanup", None) or getattr(self.env, "_cleanup", None)
        if state is not None and callable(leave):
            await _maybe(leave(state))

    async def _over(self, messages: list[dict[str, Any]], state: Any) -> bool:
        older = "messages" in inspect.signature(self.env.is_completed).parameters
        return bool(await _maybe(self.env.is_completed(messages, state) if older else self.env.is_completed(state)))

    def _told(self, state: Mapping[str, Any]) -> dict[str, Any]:
        return {"metrics": dict(state.get("metrics") or {}), "stop_condition": state.get("stop_condition")}


def verifiers_rows(
    env: Any, number: int = -1, *, name: str = "verifiers", data_source: str = "verifiers"
) -> list[dict[str, Any]]:
    """The rows of a verifiers environment's data set in verl's schema; `answer`, `info` and `task` go to the interaction."""
    rows = []
    for index, record in enumerate(_first(env.get_dataset(), number)):
        prompt = [dict(one) for one in _messages(record["prompt"])]
        kwargs = {key: record[key] for key in ("answer", "task") if record.get(key) is not None}
        if record.get("info") is not None:
            kwargs["info"] = record["info"] if isinstance(record["info"], str) else json.dumps(record["info"])
        asked = {"name": name, "prompt": prompt, **kwargs}
        rows.append(
            {
                "data_source": data_source,
                "prompt": prompt,
                "reward_model": {"style": "rule", "ground_truth": str(record.get("answer") or "")},
                "extra_info": {"index": index, "interaction_kwargs": asked},
            }
        )
    return rows


def _first(records: Iterable[Any], number: int) -> list[Any]:
    return [record for index, record in enumerate(records) if number < 0 or index < number]


def _state(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What verifiers' own `init_state` puts in, less what only its client needs."""
    prompt = kwargs.get("prompt") or []
    info = kwargs.get("info") or {}
    times = SimpleNamespace(start=time.time(), end=0.0, spans=[])
    given = {
        "prompt": _messages(prompt),
        "answer": kwargs.get("answer", ""),
        "info": json.loads(info) if isinstance(info, str) else dict(info),
        "task": kwargs.get("task", "default"),
        "example_id": kwargs.get("example_id", 0),
    }
    return {
        **given,
        "input": dict(given),
        "completion": [],
        "trajectory": [],
        "responses": [],
        "turn": 0,
        "trajectory_id": uuid4().hex,
        "is_completed": False,
        "is_truncated": False,
        "reward": None,
        "metrics": None,
        "error": None,
        "final_env_response": None,
        "timing": SimpleNamespace(generation=times, setup=times, scoring=times, env=times, model=times),
    }


class _Message(dict[str, Any]):
    """A message that is read by key and by attribute: verifiers' environments do either."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def _messages(given: Any) -> list[dict[str, Any]]:
    """Messages as dicts, from text, dicts, or objects with `role` and `content`."""
    if given is None:
        return []
    if isinstance(given, str):
        return [_Message(role="user", content=given)]
    one_by_one: Sequence[Any] = given if isinstance(given, list | tuple) else [given]
    return [
        _Message(one) if isinstance(one, Mapping) else _Message(role=str(one.role), content=one.content)
        for one in one_by_one
    ]


def _reset(env: Any, seed: Any, options: Any) -> tuple[Any, Any]:
    """(observation, info), from what takes `seed` and `options` or not, and returns info or not."""
    wanted = inspect.signature(env.reset).parameters
    everything = any(one.kind is one.VAR_KEYWORD for one in wanted.values())
    given = {"seed": seed, "options": options}
    found = env.reset(**{key: one for key, one in given.items() if one is not None and (everything or key in wanted)})
    pair = isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], Mapping)
    return found if pair else (found, {})


async def _maybe(found: Any) -> Any:
    return await found if inspect.isawaitable(found) else found
