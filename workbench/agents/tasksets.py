"""Task sets of the current `verifiers` (its v1 interface): their tasks as rows, and their own rewards for our episodes."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from itertools import islice
from typing import Any

from workbench.base.errors import DataError, SettingError, describe
from workbench.rewards.score import Score

ENDPOINT = "let the environment play by itself: it asks an OpenAI endpoint, which agents.Harness serves it"
"""What to do with an environment that cannot be played turn by turn here."""


def taskset_of(given: Any) -> Any | None:
    """The task set that this is, or that an environment of verifiers' v1 interface has; None for anything else."""
    for one in (given, getattr(given, "taskset", None)):
        if all(hasattr(one, name) for name in ("load", "task_type", "bounded", "__iter__")):
            return one
    return None


def taskset_rows(taskset: Any, number: int, data_source: str) -> list[dict[str, Any]]:
    """The first `number` tasks (−1: all) as rows in verl's schema; `extra_info.task` has a task's data as JSON.

    Raises `SettingError` for all of a task set without end, `DataError` for a task without a prompt.
    """
    if number < 0 and not taskset.bounded:
        what = f"all tasks of {type(taskset).__name__}, which has no last one"
        raise SettingError(what, expected="a number of rows", found=number, do="write verifiers_rows(taskset, 64)")
    rows = []
    for index, task in enumerate(islice(taskset, number if number >= 0 else None)):
        data = task.data
        prompt = data.prompt if not isinstance(data.prompt, str) else [{"role": "user", "content": data.prompt}]
        chat = [dict(one) if isinstance(one, Mapping) else one.model_dump(exclude_none=True) for one in prompt or ()]
        if not chat:
            do = "it opens its conversations itself; " + ENDPOINT
            raise DataError(
                f"prompt of task {index} of {type(taskset).__name__}", expected="a text or messages", found=None, do=do
            )
        if data.system_prompt and chat[0]["role"] != "system":
            chat = [{"role": "system", "content": data.system_prompt}, *chat]
        answer = getattr(data, "answer", None)
        extra = {"index": index, "task": json.dumps(data.model_dump(mode="json", exclude_none=True))}
        truth = {"style": "rule", "ground_truth": answer if isinstance(answer, str) else ""}
        rows.append({"data_source": data_source, "prompt": chat, "reward_model": truth, "extra_info": extra})
    return rows


def verifiers_reward(env: Any) -> Callable[..., Any]:
    """Make a reward function of a task set's own rewards (`@reward`, `@metric`, judges), for the rows of `verifiers_rows`.

    `env` is a task set of verifiers' v1 interface, or an environment that has one. A row's task is scored with the episode as
    its trace, by `Task.score`, without a runtime; the value is the weighted sum of its rewards, and these and its metrics are
    the parts. For tasks of one turn, and of tools that are ours::

        taskset = vf.load_taskset(vf.TasksetConfig(id="my-taskset"))
        pipeline = recipes.grpo(engine, agents.verifiers_reward(taskset))
        rows = wb.rows(agents.verifiers_rows(taskset, 256))

    Raises `SettingError` for what has no tasks, and for tasks whose rewards look into the container that the harness ran in.
    """
    taskset = taskset_of(env)
    if taskset is None:
        expected = "a task set of verifiers' v1 interface, or an environment that has one"
        raise SettingError("env of verifiers_reward", expected=expected, found=describe(env))
    tasks, coming = list[Any](), iter(taskset)
    _check(_upto(0, tasks, coming))

    async def scorer(
        response: str, prompt: Any, extra_info: Mapping[str, Any], turns: Sequence[Mapping[str, Any]] = ()
    ) -> Score:
        task = _upto(int(extra_info["index"]), tasks, coming)
        trace = _trace(task, prompt, turns or [{"role": "assistant", "text": response}])
        await task.score(trace, None)
        parts = {name: float(one.value) for name, one in trace.rewards.items() if one is not None}
        parts |= {name: float(one) for name, one in trace.metrics.items() if one is not None}
        return Score(value=float(trace.reward), parts=parts)

    scorer.in_process = True  # type: ignore[attr-defined]
    scorer.__name__ = f"verifiers_reward_of_{type(taskset).__name__}"
    return scorer


def _upto(index: int, tasks: list[Any], coming: Iterator[Any]) -> Any:
    """The task of this number, read from the task set as far as needed."""
    while len(tasks) <= index:
        try:
            tasks.append(next(coming))
        except StopIteration:
            raise DataError(
                f"task {index} of the task set", expected=f"one of {len(tasks)} tasks", found=index
            ) from None
    return tasks[index]


def _check(task: Any) -> None:
    needs = [one.__name__ for one in task.hooks("reward") if _wants_runtime(one)]
    if needs or task.NEEDS_CONTAINER:
        what = f"rewards of {type(task).__name__}"
        found = f"{', '.join(needs) or 'a task'} that looks into the harness's container"
        raise SettingError(what, expected="rewards of the conversation alone", found=found, do=ENDPOINT)


def _wants_runtime(function: Callable[..., Any]) -> bool:
    wanted = inspect.signature(function).parameters.get("runtime")
    return wanted is not None and wanted.default is wanted.empty


def _trace(task: Any, prompt: Any, turns: Sequence[Mapping[str, Any]]) -> Any:
    """An episode as a trace of verifiers."""
    vf = import_module("verifiers.v1")
    chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    made = {"system": vf.SystemMessage, "user": vf.UserMessage, "assistant": vf.AssistantMessage}
    said = [(str(one["role"]), one.get("content"), False) for one in chat]
    said += [(str(one["role"]), one.get("text"), one["role"] == "assistant") for one in turns]
    nodes = []
    for place, (role, text, sampled) in enumerate(said):
        message = made[role](content=text) if role in made else vf.ToolMessage(tool_call_id=str(place), content=text)
        nodes.append(vf.MessageNode(message=message, parent=place - 1 if place else None, sampled=sampled))
    about = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
    info = vf.AgentInfo(config=vf.AgentConfig())
    return vf.Trace(task=about, agent=info, nodes=nodes, is_completed=True, ok=True)
