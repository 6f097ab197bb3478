"""Rewards over whole agent episodes: a task's score combined with costs and rewards of turns and tool calls.

They ask for the columns of an agent's rollout by name, as any reward function can: `num_tool_calls`, `num_turns`, `turns`
(the transcript, as plain dicts), `turn_scores`, `tool_rewards` and `agent_extra` (`tool_totals` of a tool agent).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from workbench.base.config import require
from workbench.rewards.score import Score, Status, as_text, bounded, failed, no_answer, no_truth, unscorable_of
from workbench.rewards.scorers.gsm8k import gsm8k

Task = Callable[[str, Any], Score]
_RUN = ("ok", "refused", "error", "late")
"""Statuses of a call that was run: `refused` is the model's own fault, `error` and `late` are not."""


def task_minus_calls(task: Task = gsm8k, *, free: int = 3, cost: float = 0.1) -> Callable[..., Score]:
    """Make a scorer: the task's score − `cost` for every tool call beyond `free`. Parts: `task`, `calls` (≤ 0)."""
    require(free >= 0, "free", expected="≥ 0 calls", found=free)
    require(0 <= cost < math.inf, "cost", expected="a number ≥ 0", found=cost)

    @bounded
    def scorer(response: str, ground_truth: Any, num_tool_calls: int = 0) -> Score:
        over = max(0, int(num_tool_calls) - free)
        return _layered(task(response, ground_truth), calls=0.0 - cost * over, why=f"{num_tool_calls} calls")

    return _of(task, scorer)


def task_minus_flat(task: Task = gsm8k, *, most: int = 5, penalty: float = 0.5) -> Callable[..., Score]:
    """Make a scorer: the task's score − `penalty` once for more than `most` tool calls. Parts: `task`, `calls`."""
    require(0 <= penalty < math.inf, "penalty", expected="a number ≥ 0", found=penalty)

    @bounded
    def scorer(response: str, ground_truth: Any, num_tool_calls: int = 0) -> Score:
        over = -penalty if int(num_tool_calls) > most else 0.0
        return _layered(task(response, ground_truth), calls=over, why=f"{num_tool_calls} calls")

    return _of(task, scorer)


def episode(
    task: Task = gsm8k, *, turn_weight: float = 1.0, tool_weight: float = 1.0, total_weight: float = 0.0
) -> Callable[..., Score]:
    """Make a scorer: the task's score + the weighted sums of `turn_scores`, of `tool_rewards`, and of the tools' totals.

    Parts: `task`, `turns`, `tools`, and `totals` where a tool returned one: each tool's `calc_reward` over the whole episode
    (`agent_extra["tool_totals"]`). `total_weight` is 0 by default, because most tools sum up there what they returned call by
    call, which would count twice; the score's extra has the totals by tool in any case.
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

    return _of(task, scorer)


def harness() -> Callable[..., Score]:
    """Make a scorer that returns the `reward` that an external harness reported (`agents.Harness`); parts: the numbers
    in its `metrics`.

    An episode to which the harness gave no finite number is *infra_error*.
    """

    @bounded
    def scorer(agent_extra: Mapping[str, Any] | None = None) -> Score:
        result = agent_extra or {}
        value = _number(result.get("reward"))
        if value is None:
            return failed(f"the harness gave no reward; its result has {', '.join(map(str, result)) or 'nothing'}")
        metrics = result.get("metrics")
        named = metrics.items() if isinstance(metrics, Mapping) else ()
        parts = {str(name): number for name, one in named if (number := _number(one)) is not None}
        return Score(value=value, parts=parts, why="as the harness said")

    return scorer


def by_tool(tool: str = "terminal") -> Callable[..., Score]:
    """Make a scorer that returns the `Score` which `tool` gave the whole episode (its `calc_reward`), such as a
    terminal's hidden tests.

    An episode that never called the tool is *no_answer*. Where the tool failed at every call, or when it was to score,
    the row is *infra_error*.
    """

    @bounded
    def scorer(turns: Sequence[Mapping[str, Any]] = (), agent_extra: Mapping[str, Any] | None = None) -> Score:
        extra = dict(agent_extra or {})
        if (record := dict(extra.get("tool_scores") or {}).get(tool)) is not None:
            return Score.from_json(record)
        if tool in (totals := dict(extra.get("tool_totals") or {})):
            return Score(value=float(totals[tool]))
        calls = [call for turn in turns for call in turn.get("calls", ()) if call.get("name") == tool]
        ran = [call for call in calls if call.get("status") in ("ok", "refused", "error", "late")]
        if not ran:
            return no_answer(f"no call of {tool}")
        errors = [str(one) for one in extra.get("errors") or () if tool in str(one)]
        return failed(f"{tool} gave no score: {(errors or [ran[-1].get('result', '')])[0]}"[:300])

    return scorer


def code_that_ran(*, tool: str = "python", partial: float = 0.5, tolerance: float = 1e-6) -> Callable[..., Score]:
    """Make a scorer of the last call of `tool`: 1 where the last line of its output is the ground truth, `partial`
    where it is not.

    A program that failed has 0 (*crashed*), and so has a response without such a call (*no_answer*). A call that the
    tool could not run is *infra_error*. Numbers are compared within `tolerance`.
    """

    @bounded
    def scorer(ground_truth: Any, turns: Sequence[Mapping[str, Any]] = ()) -> Score:
        truth = as_text(ground_truth)
        if truth is None:
            return no_truth(ground_truth)
        calls = [call for turn in turns for call in turn.get("calls", ()) if call.get("name") == tool]
        called = next((call for call in reversed(calls) if call.get("status") in _RUN), None)
        if called is None:
            return no_answer(f"no call of {tool}")
        output = str(called.get("why") or called.get("result", ""))[:100]
        if called["status"] in ("error", "late"):
            return failed(f"{tool} could not be run: {output}")
        if called["status"] == "refused":
            return Score(status=Status.CRASHED, why=f"the program failed: {output}")
        answer = str(called.get("result", "")).strip().rpartition("\n")[2].strip()
        if _same(answer, truth, tolerance):
            return Score(value=1.0, answer=answer, why="the program printed the answer")
        return Score(value=partial, answer=answer, why=f"the program ran; the answer is {ground_truth}")

    scorer.unscorable = lambda ground_truth, **_: "" if as_text(ground_truth) else no_truth(ground_truth).why  # type: ignore[attr-defined]
    return scorer


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _of(task: Task, scorer: Callable[..., Score]) -> Callable[..., Score]:
    """Give a scorer the attribute `unscorable` of its task: rows that the task can never score, the scorer cannot score
    either."""
    scorer.unscorable = unscorable_of(task)  # type: ignore[attr-defined]
    return scorer


def _layered(score: Score, *, why: str, **parts: float) -> Score:
    """Add further parts to the task's score and to its value; return it unchanged where the task did not score the row."""
    if not isinstance(score, Score):
        score = Score(value=float(score))
    if not score.scored:
        return score
    value = score.value + sum(parts.values())
    why = f"{score.why}; {why}" if score.why else why
    parts = {**score.parts, "task": score.value, **parts}
    return Score(value=value, parts=parts, answer=score.answer, why=why, status=score.status)


def _same(answer: str, truth: str, tolerance: float) -> bool:
    try:
        return abs(float(answer.replace(",", "")) - float(truth.replace(",", ""))) <= tolerance
    except ValueError:
        return answer == truth
