"""Seed 002 (training reasoning reward models): its two reward functions as they are printed, as rewards of a policy that judges.

Not here: `DataSample`, `BasePromptTemplate`, `BaseTrainDataset` and the rule of `enable_thinking`: there are none yet.
"""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

import workbench as wb


def calculate_reward(predicted_score: Any, true_score: Any) -> float:
    if true_score is None:
        return 0.0
    abs_error = abs(predicted_score - true_score)
    max_error = 4
    reward = 1.0 - (abs_error / max_error)
    return max(0.0, reward)


def pointwise_reward(predicted_score: Any, true_score: Any) -> float:
    if true_score is None:
        return 0.0
    abs_error = abs(predicted_score - true_score)
    max_error = 4
    k = 2.0
    error_ratio = abs_error / max_error
    reward = math.exp(-k * error_ratio)
    return float(reward)


@pytest.mark.parametrize(
    ("function", "values"),
    [(calculate_reward, [1, 0.75, 0.5, 0.25, 0]), (pointwise_reward, [1, 0.6065, 0.3679, 0.2231, 0.1353])],
)
def test_the_seeds_functions_score_a_policy_that_judges(function: Any, values: list[float]) -> None:
    """The score is read from the text; a text without one is *no answer*, and no 0 of the rule's."""

    def judged(response: str, ground_truth: float) -> Any:
        found = re.search(r"<score>(\d)</score>", response)
        if found is None:
            return wb.Score(status=wb.Status.NO_ANSWER, why="no score")
        return {"score": function(float(found[1]), ground_truth), "error": abs(float(found[1]) - ground_truth)}

    row = {"prompt": "rate it", "data_source": "nvidia/helpsteer2", "reward_model": {"ground_truth": 0.0}}
    rows = [{**row, "response": f"<reason>a < b</reason><score>{error}</score>"} for error in range(5)]
    reward = wb.rewards.Reward(judged, in_process=True)
    found = [one.score for one in wb.rewards.dry_run({"it": reward}, [*rows, {**row, "response": "?"}]).judged["it"]]
    assert [score.value for score in found[:5]] == pytest.approx(values, abs=1e-4)
    assert [score.parts["error"] for score in found[:5]] == [0, 1, 2, 3, 4] and found[5].status is wb.Status.NO_ANSWER
