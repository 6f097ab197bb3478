"""Gym-like environments (`reset`, `step`) and environments of the `verifiers` package as simulated users; neither
package is needed.

Of the current `verifiers` (its v1 interface) also the task sets: their tasks as rows, and their own rewards for our episodes.
"""

from __future__ import annotations

import inspect
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from itertools import islice
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import numpy as np

from workbench.agents.interactions import BaseInteraction, ReplyTuple, last_message, maybe_awaited
from workbench.agents.tools.base import in_thread
from workbench.base.config import require
from workbench.base.errors import DataError, ForeignError, SettingError, describe
from workbench.rewards.score import Score

Show = Callable[..., str]
"""Function (observation) or (observation, environment) → the text that the model reads."""


class GymInteraction(BaseInteraction):
    """A Gym-like environment as simulated user: each conversation plays one environment, with `reset` and `step`.

    Takes Gymnasium's step results (observation, reward, terminated, truncated, info) and Gym's older four. The score of a
    turn is its reward, `calculate_score` their sum. The row's `interaction_kwargs` may have `seed` and `options` for
    `reset`; the first observation belongs in the prompt (`environment_rows`)::

        game = GymInteraction(lambda: gymnasium.make("FrozenLake-v1", render_mode="ansi"), action=["left", "down", "right", "up"])
        rows = environment_rows(game, 64, system="Reach G. Answer left, down, right or up.")

    Args:
        make: function without arguments that returns a new environment.
        name: the name by which rows select this simulated user.
        action: the names of a discrete space's actions, in their order, or a mapping of names to actions: the last name in
            the model's text is its action, in any case. Or a function from the text to an action; if it raises `ValueError`,
            the model is told, without a step, and so it is of a number outside a discrete space. None: a whole number for a
            discrete space, else the text.
        show: function from an observation, or from (observation, environment), to text; None: what `render` returns in
            the text modes (`render_mode` "ansi"), with `<red>…</red>` for its colours, else the observation.
        threads: run `make`, `reset`, `step`, `show` and `close` in threads, one at a time but not always the same;
            False: in the event loop's thread, for an environment that is bound to a thread.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        *,
        name: str = "gym",
        action: Callable[[str], Any] | Sequence[str] | Mapping[str, Any] | None = None,
        show: Show | None = None,
        threads: bool = True,
    ) -> None:
        super().__init__({"name": name})
        self.make, self.show, self._threads = make, show, threads
        self._action = action if action is None or callable(action) else _by_words(action)
        self._instances: dict[str, dict[str, Any]] = {}

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Make an environment and reset it with the row's `seed` and `options`; return the conversation's id."""
        env, instance_id = await self._run(self.make), instance_id or str(uuid4())
        self._instances[instance_id] = state = {"env": env, "rewards": [], "over": False}
        observation, state["info"] = await self._run(_reset, env, kwargs.get("seed"), kwargs.get("options"))
        state["opening"] = await self._run(_shown, self.show, observation, env)
        return instance_id

    def opening(self, instance_id: str) -> str:
        """Return the first observation of the conversation `instance_id`, as text."""
        return self._instances[instance_id]["opening"]

    async def generate_response(self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any) -> ReplyTuple:
        """Step the environment by the action in the last assistant message; returns (whether it is over, observation,
        reward, extra).
        """
        state = self._instances[instance_id]
        env = state["env"]
        if state["over"]:
            return True, "The episode is over.", 0.0, {}
        try:
            action = self._action_in(last_message(messages), getattr(env, "action_space", None))
        except ValueError as error:
            return False, f"This is not an action: {error}", 0.0, {"action": None}
        outcome = await self._run(env.step, action)
        if not isinstance(outcome, tuple) or len(outcome) not in (4, 5):
            expected = "a tuple (observation, reward, terminated, truncated, info)"
            what = f"the result of the environment's step in interaction {self.name!r}"
            raise ForeignError(what, expected=expected, found=describe(outcome))
        observation, reward, *ended, info = outcome
        state["rewards"].append(float(reward))
        state["over"] = any(map(bool, ended))
        names = ("terminated", "truncated") if len(ended) == 2 else ("done",)
        flags = dict(zip(names, map(bool, ended), strict=True))
        text = await self._run(_shown, self.show, observation, env)
        return state["over"], text, float(reward), {**flags, "action": action, "info": info}

    async def calculate_score(self, instance_id: str | None = None, **kwargs: Any) -> float:
        """Return the sum of the conversation's rewards so far."""
        return float(sum(self._instances.get(instance_id or "", {}).get("rewards", ())))

    async def finalize_interaction(self, instance_id: str | None = None, **kwargs: Any) -> None:
        """Close the conversation's environment; a second call does nothing."""
        if state := self._instances.pop(instance_id or "", None):
            await self._run(_close, state["env"])

    def _action_in(self, text: str, space: Any) -> Any:
        """Read the action in a text. Raises `ValueError`, whose text the model reads, where it names no action of a
        discrete `space`."""
        discrete = isinstance(getattr(space, "n", None), int | np.integer) and callable(
            getattr(space, "contains", None)
        )
        action: Any = text.strip()
        if self._action is not None:
            action = self._action(text)
        elif discrete and re.fullmatch(r"[-+]?\d{1,18}", action):
            action = int(action)
        if discrete and not space.contains(action):
            start = int(getattr(space, "start", 0))
            raise ValueError(f"{describe(action)}; expected a whole number from {start} to {start + int(space.n) - 1}")
        return action

    async def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        return await in_thread(function, *args) if self._threads else function(*args)


def _by_words(actions: Sequence[str] | Mapping[str, Any]) -> Callable[[str], Any]:
    """Make the function that reads an action by its name: of the names that stand in a text as whole words the last one
    counts."""
    listed = actions if isinstance(actions, Mapping) else {name: number for number, name in enumerate(actions)}
    known = {str(name).lower(): action for name, action in listed.items()}
    require(bool(known), "action of a GymInteraction", expected="at least one name", found=actions)
    longest = sorted(known, key=len, reverse=True)
    pattern = re.compile(rf"(?<!\w)({'|'.join(map(re.escape, longest))})(?!\w)")

    def read(text: str) -> Any:
        if not (names := pattern.findall(text.lower())):
            raise ValueError(f"{text.strip()[:100]!r}; expected one of {', '.join(map(str, listed))}")
        return known[names[-1]]

    return read


def _shown(show: Show | None, observation: Any, env: Any) -> str:
    """Write an observation as the text that the model reads."""
    if show is not None:
        return show(observation, env) if _takes_two(show) else show(observation)
    if getattr(env, "render_mode", None) in ("ansi", "ansi_list"):
        rendered = env.render()
        return _without_colours("".join(rendered) if isinstance(rendered, list) else str(rendered))
    return str(observation)


def _takes_two(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind(None, None)
    except (TypeError, ValueError):  # one argument; or a builtin that does not say
        return False
    return not isinstance(function, type)  # str takes more, and means other things by them


_COLOURS = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
_COLOURED = re.compile(r"\x1b\[(?:\d+;)*?(?:[349]|10)([0-7])(?:;\d+)*m([^\x1b]*)\x1b\[0?m")
_ESCAPE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")


def _without_colours(text: str) -> str:
    """Remove the escape codes from a terminal's text; coloured text is put between tags (`<red>…</red>`), as a colour
    may carry meaning."""

    def tagged(match: re.Match[str]) -> str:
        name = _COLOURS[int(match[1])]
        return f"<{name}>{match[2]}</{name}>"

    count = 1
    while count:  # from the inside: a colour on a colour
        text, count = _COLOURED.subn(tagged, text)
    return _ESCAPE.sub("", text)


def environment_rows(
    game: GymInteraction | Callable[[], Any],
    number: int,
    *,
    name: str = "gym",
    seed: int = 0,
    system: str = "",
    show: Show | None = None,
    data_source: str = "workbench/environment",
) -> list[dict[str, Any]]:
    """Make rows in verl's schema for `GymInteraction`: each prompt is the first observation of an environment with its
    own seed. Without a reward of the user's a row gets the sum of its turns' scores.

    Args:
        game: the `GymInteraction` that plays the rows, whose `name` and `show` are used; or a function that makes an
            environment.
        number: how many rows.
        name: name of the `GymInteraction`, where `game` is a function.
        seed: row i is played from `reset(seed=seed + i)`.
        system: a system message before the observation; empty: none.
        show: how observations become text, where `game` is a function.
        data_source: the rows' `data_source`.
    """
    if isinstance(game, GymInteraction):
        name, show = game.name, game.show
    make = game.make if isinstance(game, GymInteraction) else game
    rows = []
    for index in range(number):
        env = make()
        try:
            text = _shown(show, _reset(env, seed + index, None)[0], env)
        finally:
            _close(env)
        prompt = [{"role": "system", "content": system}] if system else []
        chat = [*prompt, {"role": "user", "content": text}]
        played = {"name": name, "seed": seed + index}
        rows.append(_row(data_source, chat, "", index, interaction_kwargs=played, score_by="sum of turns"))
    return rows


class VerifiersInteraction(BaseInteraction):
    """A `MultiTurnEnv` of the `verifiers` package up to 0.1 (its v0 interface) as simulated user, for `verifiers_rows`.

    `setup_state`, `is_completed`, `env_response`, `rubric.score_rollout` and `cleanup` are called as in its own rollout,
    with either signature, (state) or (messages, state), sync or async. The rubric scores once, at the end or when
    `calculate_score` is called; other turns have score 0. The model's tool calls reach it as text only. Environments of the
    current `verifiers` (v1: task sets that drive a harness over HTTP) have no such turns and are refused: `agents.Harness`
    lets them play, and `verifiers_reward` scores tasks that need no harness.

    Raises `SettingError` for an object without `env_response`, `is_completed` or `rubric`.
    """

    def __init__(self, env: Any, *, name: str = "verifiers") -> None:
        super().__init__({"name": name})
        missing = [one for one in ("env_response", "is_completed", "rubric") if not hasattr(env, one)]
        if missing:
            expected, do = "a MultiTurnEnv of verifiers' v0 interface", None
            if taskset_of(env) is not None:
                do = f"this is of its v1 interface: {ENDPOINT}; or, where no harness is needed, reward=verifiers_reward(env)"
            what = f"environment {type(env).__name__} has no {', '.join(missing)}"
            raise SettingError(what, expected=expected, do=do)
        self.env = env
        self._instances: dict[str, Any] = {}

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Make a conversation's state from the row's `prompt`, `answer`, `info` and `task`; return the conversation's
        id."""
        instance_id = instance_id or str(uuid4())
        self._instances[instance_id] = first = _state(kwargs)
        if callable(setup := getattr(self.env, "setup_state", None)):
            self._instances[instance_id] = await maybe_awaited(setup(first)) or first
        return instance_id

    async def generate_response(self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any) -> ReplyTuple:
        """Ask the environment to answer the last assistant message; at the end of the episode also score it by the
        rubric."""
        state = self._instances[instance_id]
        reply = _Message(role="assistant", content=last_message(messages))
        before = [*state["prompt"], *state["completion"]]
        state["completion"] = [*state["completion"], reply]
        state["turn"] += 1
        step = {"prompt": before, "completion": [reply], "response": None, "tokens": None, "reward": None}
        state["trajectory"].append({**step, "advantage": None, "is_truncated": False, "extras": {}})
        heard = [*before, reply]
        if await self._is_completed(heard, state):
            return True, "", await self.calculate_score(instance_id), _state_fields(state)
        response = await maybe_awaited(self.env.env_response(heard, state))
        if isinstance(response, tuple):
            response, changed = response
            state = self._instances[instance_id] = changed or state
        answers = _messages(response if response is not None else state.get("final_env_response"))
        state["completion"] = [*state["completion"], *answers]
        text = "\n".join(last_message([one], one["role"]) for one in answers)
        if state.get("final_env_response") is not None or await self._is_completed([*heard, *answers], state):
            return True, text, await self.calculate_score(instance_id), _state_fields(state)
        return False, text, 0.0, {}

    async def calculate_score(self, instance_id: str | None = None, **kwargs: Any) -> float:
        """Return the rubric's reward of the conversation, which is computed at the first call."""
        state = self._instances.get(instance_id or "")
        if state is None:
            return 0.0
        if state.get("reward") is None:
            values = {key: state.get(key) for key in ("prompt", "completion", "answer", "task", "info")}
            result = await maybe_awaited(_call_with_known(self.env.rubric.score_rollout, {"state": state, **values}))
            if state.get("reward") is None:  # the older form returns it
                state["reward"] = float(getattr(result, "reward", result))
                state["metrics"] = dict(getattr(result, "metrics", {}) or {})
        return float(state["reward"])

    async def finalize_interaction(self, instance_id: str | None = None, **kwargs: Any) -> None:
        """Call the environment's clean-up handlers; a second call does nothing."""
        state = self._instances.pop(instance_id or "", None)
        leave = getattr(self.env, "cleanup", None) or getattr(self.env, "_cleanup", None)
        if state is not None and callable(leave):
            await maybe_awaited(leave(state))

    async def _is_completed(self, messages: list[dict[str, Any]], state: Any) -> bool:
        older = "messages" in inspect.signature(self.env.is_completed).parameters
        return bool(await maybe_awaited(self.env.is_completed(*([messages] if older else []), state)))


def _state_fields(state: Mapping[str, Any]) -> dict[str, Any]:
    return {"metrics": dict(state.get("metrics") or {}), "stop_condition": state.get("stop_condition")}


def verifiers_rows(
    env: Any, number: int = -1, *, name: str = "verifiers", data_source: str = "verifiers"
) -> list[dict[str, Any]]:
    """Make rows in verl's schema of the first `number` entries (−1: all) of a verifiers environment's data set.

    Rows of a v0 environment are for `VerifiersInteraction`. `env` may also be a task set of the v1 interface, or an
    environment that has one: its rows have the task's data as JSON in `extra_info.task`, for a harness, and
    `verifiers_reward` scores them.
    """
    if (taskset := taskset_of(env)) is not None:
        return taskset_rows(taskset, number, data_source)
    rows = []
    for index, record in enumerate(islice(env.get_dataset(), number if number >= 0 else None)):
        prompt = [dict(one) for one in _messages(record["prompt"])]
        kwargs = {key: record[key] for key in ("answer", "task") if record.get(key) is not None}
        if record.get("info") is not None:
            kwargs["info"] = record["info"] if isinstance(record["info"], str) else json.dumps(record["info"])
        fields = {"name": name, "prompt": prompt, **kwargs}
        rows.append(_row(data_source, prompt, str(record.get("answer") or ""), index, interaction_kwargs=fields))
    return rows


def _row(source: str, prompt: list[Any], truth: Any, index: int, **extra: Any) -> dict[str, Any]:
    return {
        "data_source": source,
        "prompt": prompt,
        "reward_model": {"style": "rule", "ground_truth": truth if isinstance(truth, str) else ""},
        "extra_info": {"index": index, **extra},
    }


def _state(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Make the conversation state that verifiers' `init_state` makes, without the fields that only its client needs."""
    info = kwargs.get("info") or {}
    times = SimpleNamespace(start=time.time(), end=0.0, spans=[])
    names = ("generation", "setup", "scoring", "env", "model")
    fields = {
        "prompt": _messages(kwargs.get("prompt")),
        "answer": kwargs.get("answer", ""),
        "info": json.loads(info) if isinstance(info, str) else dict(info),
        "task": kwargs.get("task", "default"),
        "example_id": kwargs.get("example_id", 0),
    }
    return {
        **fields,
        "input": dict(fields),
        **{name: [] for name in ("completion", "trajectory", "responses")},
        **dict.fromkeys(("reward", "metrics", "error", "final_env_response")),
        **dict.fromkeys(("is_completed", "is_truncated"), False),
        "turn": 0,
        "trajectory_id": uuid4().hex,
        "timing": SimpleNamespace(**dict.fromkeys(names, times)),
    }


class _Message(dict[str, Any]):
    """A message whose fields can be read by key or by attribute, as verifiers' environments do both."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the message has no key {name!r}") from None


def _messages(chat: Any) -> list[dict[str, Any]]:
    """Convert messages to dicts, from text, dicts, or objects with `role` and `content`."""
    if isinstance(chat, str):
        return [_Message(role="user", content=chat)]
    listed: Sequence[Any] = chat if isinstance(chat, list | tuple) else [] if chat is None else [chat]
    plain = [one if isinstance(one, Mapping) else {"role": str(one.role), "content": one.content} for one in listed]
    return [_Message(one) for one in plain]


def _close(env: Any) -> None:
    if callable(close := getattr(env, "close", None)):
        close()


def _reset(env: Any, seed: Any, options: Any) -> tuple[Any, Any]:
    """Reset an environment: (observation, info). `seed` and `options` are passed where `reset` takes them; info is {}
    where it returns none."""
    wanted = {"seed": seed, "options": options}
    outcome = _call_with_known(env.reset, {key: one for key, one in wanted.items() if one is not None})
    pair = isinstance(outcome, tuple) and len(outcome) == 2 and isinstance(outcome[1], Mapping)
    return outcome if pair else (outcome, {})


def _call_with_known(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Call a function with those of the arguments whose names it takes."""
    wanted = inspect.signature(function).parameters
    everything = any(one.kind is one.VAR_KEYWORD for one in wanted.values())
    return function(**{key: value for key, value in arguments.items() if everything or key in wanted})


ENDPOINT = "let the environment run its own episodes against an OpenAI endpoint: agents.Harness serves one"
"""What to do with an environment that cannot be played turn by turn here."""


def taskset_of(env: Any) -> Any | None:
    """Return the task set that an object is, or that an environment of verifiers' v1 interface has; None for anything
    else."""
    for one in (env, getattr(env, "taskset", None)):
        if all(hasattr(one, name) for name in ("load", "task_type", "bounded", "__iter__")):
            return one
    return None


def taskset_rows(taskset: Any, number: int, data_source: str) -> list[dict[str, Any]]:
    """Make rows in verl's schema of the first `number` tasks (−1: all); `extra_info.task` has a task's data as JSON.

    Raises `SettingError` for all tasks of an endless task set, and `DataError` for a task without a prompt.
    """
    if number < 0 and not taskset.bounded:
        what = f"all tasks of {type(taskset).__name__}, which has no end"
        raise SettingError(what, expected="a number of rows", found=number, do="write verifiers_rows(taskset, 64)")
    rows = []
    for index, task in enumerate(islice(taskset, number if number >= 0 else None)):
        data = task.data
        prompt = data.prompt if not isinstance(data.prompt, str) else [{"role": "user", "content": data.prompt}]
        chat = [dict(one) if isinstance(one, Mapping) else one.model_dump(exclude_none=True) for one in prompt or ()]
        if not chat:
            do = "the environment opens the conversation itself; " + ENDPOINT
            what = f"prompt of task {index} of {type(taskset).__name__}"
            raise DataError(what, expected="a text or messages", found="none", do=do)
        if data.system_prompt and chat[0]["role"] != "system":
            chat = [{"role": "system", "content": data.system_prompt}, *chat]
        task_text = json.dumps(data.model_dump(mode="json", exclude_none=True))
        rows.append(_row(data_source, chat, getattr(data, "answer", None), index, task=task_text))
    return rows


def verifiers_reward(env: Any) -> Callable[..., Any]:
    """Make a reward function of a task set's own rewards (`@reward`, `@metric`, judges), for the rows of
    `verifiers_rows`.

    `env` is a task set of verifiers' v1 interface, or an environment that has one. `Task.score` scores a row's task
    with the episode as its trace, without a runtime. The value is the weighted sum of the task's rewards; the parts are
    these rewards and the task's metrics. It serves tasks of one turn, and tasks whose tools are this agent's::

        taskset = vf.load_taskset(vf.TasksetConfig(id="my-taskset"))
        pipeline = recipes.grpo(engine, agents.verifiers_reward(taskset))
        rows = wb.rows(agents.verifiers_rows(taskset, 256))

    Raises `SettingError` for an object without tasks, and for tasks whose rewards look into the container that the
    harness ran in.
    """
    taskset = taskset_of(env)
    if taskset is None:
        expected = "a task set of verifiers' v1 interface, or an environment that has one"
        raise SettingError("env of verifiers_reward", expected=expected, found=describe(env))
    tasks, coming = list[Any](), iter(taskset)
    _check(_task_number(0, tasks, coming))

    async def scorer(
        response: str, prompt: Any, extra_info: Mapping[str, Any], turns: Sequence[Mapping[str, Any]] = ()
    ) -> Score:
        task = _task_number(int(extra_info["index"]), tasks, coming)
        trace = _trace(task, prompt, turns or [{"role": "assistant", "text": response}])
        await task.score(trace, None)
        parts = {name: float(one.value) for name, one in trace.rewards.items() if one is not None}
        parts |= {name: float(one) for name, one in trace.metrics.items() if one is not None}
        return Score(value=float(trace.reward), parts=parts)

    scorer.in_process = True  # type: ignore[attr-defined]
    scorer.__name__ = f"verifiers_reward_of_{type(taskset).__name__}"
    return scorer


def _task_number(index: int, tasks: list[Any], coming: Iterator[Any]) -> Any:
    """Return the task with the number `index`; tasks are read from the iterator `coming` as far as needed, and kept in
    `tasks`."""
    while len(tasks) <= index:
        try:
            tasks.append(next(coming))
        except StopIteration:
            what, expected = "number of a task in the task set", f"below {len(tasks)}, its number of tasks"
            raise DataError(what, expected=expected, found=index) from None
    return tasks[index]


def _check(task: Any) -> None:
    needs = [one.__name__ for one in task.hooks("reward") if _wants_runtime(one)]
    if needs or task.NEEDS_CONTAINER:
        what = f"rewards of {type(task).__name__}"
        found = f"{', '.join(needs) or 'a task'}, which reads files of the harness's container"
        raise SettingError(what, expected="rewards that read the conversation only", found=found, do=ENDPOINT)


def _wants_runtime(function: Callable[..., Any]) -> bool:
    wanted = inspect.signature(function).parameters.get("runtime")
    return wanted is not None and wanted.default is wanted.empty


def _trace(task: Any, prompt: Any, turns: Sequence[Mapping[str, Any]]) -> Any:
    """Convert an episode to a trace of verifiers."""
    vf = import_module("verifiers.v1")
    chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    kinds = {"system": vf.SystemMessage, "user": vf.UserMessage, "assistant": vf.AssistantMessage}
    messages = [(str(one["role"]), one.get("content"), False) for one in chat]
    messages += [(str(one["role"]), one.get("text"), one["role"] == "assistant") for one in turns]
    nodes = []
    for place, (role, text, sampled) in enumerate(messages):
        message = kinds[role](content=text) if role in kinds else vf.ToolMessage(tool_call_id=str(place), content=text)
        nodes.append(vf.MessageNode(message=message, parent=place - 1 if place else None, sampled=sampled))
    about = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
    info = vf.AgentInfo(config=vf.AgentConfig())
    return vf.Trace(task=about, agent=info, nodes=nodes, is_completed=True, ok=True)
