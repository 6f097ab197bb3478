"""Layered rewards of episodes, by hand; the columns reach them by name through a reward."""

from __future__ import annotations

from typing import Any

import pytest

from workbench.rewards import Score, as_reward
from workbench.rewards.score import Status
from workbench.rewards.scorers.episodes import code_that_ran, episode, task_minus_calls, task_minus_flat
from workbench.testing.rewards import answered


@pytest.mark.parametrize(("calls", "value"), [(0, 1.0), (3, 1.0), (4, 0.9), (7, 0.6)])
def test_the_guides_layered_reward(calls: int, value: float) -> None:
    score = task_minus_calls()("#### 4", "4", num_tool_calls=calls)
    assert score.value == pytest.approx(value) and score.parts["task"] == 1.0
    assert score.parts["calls"] == pytest.approx(value - 1.0) and score.answer == "4"
    wrong = task_minus_calls()("#### 5", "4", num_tool_calls=calls)
    assert wrong.value == pytest.approx(value - 1.0) and wrong.scored


def test_the_guides_flat_penalty() -> None:
    assert [task_minus_flat()("#### 4", "4", num_tool_calls=calls).value for calls in (0, 5, 6, 60)] == [1, 1, 0.5, 0.5]


def test_turn_scores_and_tool_rewards_are_parts() -> None:
    score = episode(turn_weight=0.5, tool_weight=2.0)("#### 4", "4", turn_scores=[0.0, 1.0], tool_rewards=[-0.05, 0.0])
    assert score.value == pytest.approx(1.0 + 0.5 - 0.1)
    assert dict(score.parts) == pytest.approx({"task": 1.0, "turns": 0.5, "tools": -0.1})
    unjudged = episode(lambda response, truth: Score(status=Status.NOT_APPLICABLE))("", None, turn_scores=[1.0])
    assert not unjudged.scored


def turn(*calls: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "text": "", "calls": list(calls)}


def call(result: str, status: str = "ok", name: str = "python", why: str = "") -> dict[str, Any]:
    return {"name": name, "arguments": "{}", "status": status, "result": result, "why": why}


@pytest.mark.parametrize(
    ("calls", "value", "status"),
    [
        ([call("so\n12.0\n")], 1.0, Status.SCORED),
        ([call("11")], 0.5, Status.SCORED),
        ([call("12"), call("11")], 0.5, Status.SCORED),  # the last one counts
        ([call("Traceback", "refused", why="error while running: NameError")], 0.0, Status.MODEL_FAILED),
        ([], 0.0, Status.MODEL_FAILED),
        ([call("12", name="calculator")], 0.0, Status.MODEL_FAILED),
        ([call("12"), call("11", "ignored")], 1.0, Status.SCORED),
        ([call("", "late")], 0.0, Status.MACHINERY_FAILED),
        ([call("Error", "error", why="sandbox error: no room")], 0.0, Status.MACHINERY_FAILED),
    ],
)
def test_partial_credit_for_code_that_ran(calls: list[dict[str, Any]], value: float, status: Status) -> None:
    score = code_that_ran()("12", turns=[{"role": "user", "text": ""}, turn(*calls)])
    assert (score.value, score.status) == (value, status)


def test_the_columns_reach_them_by_name() -> None:
    columns = {"num_tool_calls": [4, 0], "turns": [[turn(call("4"))], []], "turn_scores": [[1.0], []]}
    batch = answered(["#### 4", "#### 4"], ["4", "4"], **columns, tool_rewards=[[0.5], []])
    for function, values in (
        (task_minus_calls(), [0.9, 1.0]),
        (episode(), [2.5, 1.0]),
        (code_that_ran(), [1.0, 0.0]),
    ):
        reward = as_reward(function)
        assert [score.value for score in reward.score(batch)] == pytest.approx(values)
        reward.close()
