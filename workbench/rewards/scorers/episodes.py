"""Rewards over whole episodes: layered ones, that ask for the columns of an agent's rollout by name.

`num_tool_calls`, `num_turns`, `turns` (the transcript, as plain dicts), `turn_scores`, `tool_rewards` and `agent_extra` (what the loop
adds: `tool_totals` of a tool agent) are columns that every episode has; any reward function can name them among its arguments. These are examples of that, and of use as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from workbench.config import require
from workbench.rewards.score import Score, Status, bounded, no_truth
from workbench.rewards.scorers.gsm8k import gsm8k

Task = Callable[[str, Any], Score]
_RUN = ("ok", "refused", "error", "late")
"""A call's status, where it was run at all: `refused` is the call's own fault, the last two are not."""


def task_minus_calls(task: Task = gsm8k, *, free: int = 3, cost: float = 0.1) -> Callable[..., Score]:
    """A scorer: the task's score − `cost` for every tool call beyond `free`. Parts: `task`, `calls` (≤ 0)."""
    require(free >= 0, "free", expected="≥ 0 calls", found=free)
    require(0 <= cost < math.inf, "cost", expected="a number ≥ 0", found=cost)

    @bounded
    def scorer(response: str, ground_truth: Any, num_tool_calls: int = 0) -> Score:
        over = max(0, int(num_tool_calls) - free)
        return _layered(task(response, ground_truth), calls=0.0 - cost * over, why=f"{num_tool_calls} calls")

    scorer.__name__ = "task_minus_calls"
    return scorer


def task_minus_flat(task: Task = gsm8k, *, most: int = 5, penalty: float = 0.5) -> Callable[..., Score]:
    """A scorer: the task's score, less `penalty` once where there were more than `most` calls. Parts: `task`, `calls`."""
    require(0 <= penalty < math.inf, "penalty", expected="a number ≥ 0", found=penalty)

    @bounded
    def scorer(response: str, ground_truth: Any, num_tool_calls: int = 0) -> Score:
        over = -penalty if int(num_tool_calls) > most else 0.0
        return _layered(task(response, ground_truth), calls=over, why=f"{num_tool_calls} calls")

    scorer.__name__ = "task_minus_flat"
    return scorer


def episode(
    task: Task = gsm8k, *, turn_weight: float = 1.0, tool_weight: float = 1.0, total_weight: float = 0.0
) -> Callable[..., Score]:
    """A scorer: the task's score + the weighted sums of `turn_scores`, of `tool_rewards`, and of the tools' totals.

    Parts: `task`, `turns`, `tools`, and `totals` where a tool gave one: what each tool's `calc_reward` said of the whole
    episode (`agent_extra["tool_totals"]`). Their weight is 0 unless you say otherwise, because most tools sum up there what
    they gave call by call, and it would count twice; the numbers by tool are in the score's extra all the same.
    """
    weights = {"turn_weight": turn_weight, "tool_weight": tool_weight, "total_weight": total_weight}
    for name, weight in weights.items():
        require(math.isfinite(weight), name, expected="a finite number", found=weight)

    @bounded
    def scorer(
        response: str,
        ground_truth: Any,
        turn_scores: Sequence[float] = (),
        tool_rewards: Sequence[float] = (),
        agent_extra: Mapping[str, Any] | None = None,
    ) -> Score:
        totals = dict((agent_extra or {}).get("tool_totals") or {})
        parts = {"turns": turn_weight * sum(turn_scores) + 0.0, "tools": tool_weight * sum(tool_rewards) + 0.0}
        if totals:
            parts["totals"] = total_weight * sum(totals.values()) + 0.0
        why = f"{len(turn_scores)} turn scores, {len(tool_rewards)} tool rewards"
        score = _layered(task(response, ground_truth), why=why, **parts)
        return score.with_extra({"tool_totals": totals}) if totals else score

    scorer.__name__ = "episode"
    return scorer


def code_that_ran(*, tool: str = "python", partial: float = 0.5, tolerance: float = 1e-6) -> Callable[..., Score]:
    """A scorer of the episode's last call of `tool`: 1 where its last line of output is the ground truth, `partial` where the
    program ran and printed something else, 0 where it failed or there was no such call.

    A call that our side could not run is *machinery failed*: no judgement. Numbers are compared within `tolerance`.
    """

    @bounded
    def scorer(ground_truth: Any, turns: Sequence[Mapping[str, Any]] = ()) -> Score:
        if ground_truth is None:
            return no_truth()
        calls = [call for turn in turns for call in turn.get("calls", ()) if call.get("name") == tool]
        called = next((call for call in reversed(calls) if call.get("status") in _RUN), None)
        if called is None:
            return Score(status=Status.MODEL_FAILED, why=f"no call of {tool}")
        said = str(called.get("why") or called.get("result", ""))[:100]
        if called["status"] in ("error", "late"):
            return Score(status=Status.MACHINERY_FAILED, why=f"{tool} could not be run: {said}")
        if called["status"] == "refused":
            return Score(status=Status.MODEL_FAILED, why=f"the program failed: {said}")
        lines = str(called.get("result", "")).strip().splitlines()
        answer = lines[-1].strip() if lines else ""
        right = _same(answer, str(ground_truth), tolerance)
        return Score(
            value=1.0 if right else partial,
            answer=answer,
            why="the program printed the answer" if right else f"the program ran; the answer is {ground_truth}",
        )

    scorer.__name__ = "code_that_ran"
    return scorer


def _layered(score: Score, *, why: str, **parts: float) -> Score:
    """The task's judgement with further parts; what is no judgement stays as it is."""
    if not isinstance(score, Score):
        score = Score(value=float(score))
    if not score.scored:
        return score
    value = score.value + sum(parts.values())
    told = Score(value=value, answer=score.answer, why=f"{score.why}; {why}" if score.why else why, status=score.status)
    return told.with_value(value, **{**score.parts, "task": score.value, **parts})


def _same(answer: str, truth: str, tolerance: float) -> bool:
    try:
        return abs(float(answer.replace(",", "")) - float(truth.replace(",", ""))) <= tolerance
    except ValueError:
        return answer == truth
