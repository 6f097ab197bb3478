"""Layered rewards of episodes, by hand; the columns reach them by name through a reward."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import workbench as wb
from workbench.base.errors import SettingError
from workbench.rewards import Rubric, Score, as_reward, gsm8k, load_function
from workbench.rewards.score import Status
from workbench.rewards.scorers.episodes import code_that_ran, episode, task_minus_calls, task_minus_flat
from workbench.stages import Reward
from workbench.testing.rewards import answered

GUIDE = Path(__file__).parents[4] / "shared" / "seeds" / "003_5645a92f59f5ef64.decoded.md"


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


def test_what_tools_say_of_the_episode_is_a_part_without_weight() -> None:
    told = {"tool_totals": {"gsm8k": 1.0, "search": 0.5}, "errors": []}
    score = episode()("#### 4", "4", tool_rewards=[0.25], agent_extra=told)
    assert score.value == 1.25 and dict(score.parts) == {"task": 1.0, "turns": 0.0, "tools": 0.25, "totals": 0.0}
    assert score.extra == {"tool_totals": {"gsm8k": 1.0, "search": 0.5}}
    weighed = episode(tool_weight=0.0, total_weight=0.5)("#### 4", "4", tool_rewards=[0.25], agent_extra=told)
    assert weighed.value == 1.75 and weighed.parts["totals"] == 0.75 == sum(weighed.parts.values()) - 1.0
    assert "totals" not in episode()("#### 4", "4", agent_extra={}).parts  # a loop that has no tools
    with pytest.raises(SettingError, match="total_weight"):
        episode(total_weight=float("nan"))


EPISODES: dict[str, list[Any]] = {
    "num_tool_calls": [5, 0],
    "turn_scores": [[0.0, 1.0], []],
    "tool_rewards": [[-0.05, 0.0], []],
    "agent_extra": [{"tool_totals": {"gsm8k": 1.0}}, {"tool_totals": {}}],
}


@pytest.mark.slow
def test_a_rubric_weighs_what_episodes_bring() -> None:
    def turns(turn_scores: list[float]) -> float:
        return sum(turn_scores)

    def totals(agent_extra: dict[str, Any]) -> float | None:
        found = agent_extra["tool_totals"]
        return sum(found.values()) if found else None

    def calls(extra_info: dict[str, Any]) -> float:  # as verl hands it over
        return -float(extra_info["num_tool_calls"])

    parts = {"task": gsm8k, "turns": turns, "totals": totals, "calls": calls}
    rubric = Rubric(parts, weights={"turns": 0.5, "totals": 0.25, "calls": 0.1})
    judged = Reward(rubric)(answered(["#### 4", "#### 4"], ["4", "4"], **EPISODES)).batch
    assert judged["reward"].tolist() == pytest.approx([1 + 0.5 + 0.25 - 0.5, 1.0])
    assert judged["reward/totals"][0] == 1.0 and judged["reward/totals"][1].isnan()
    rubric.close()


def test_the_parts_are_seen_beside_the_samples() -> None:
    stage = Reward(episode(total_weight=0.5))
    judged = stage(answered(["#### 4", "#### 5"], ["4", "4"], **EPISODES)).batch
    parts = {name: judged[f"reward/{name}"].tolist() for name in ("task", "turns", "tools", "totals")}
    assert parts["task"] == [1.0, 0.0] and parts["turns"] == [1.0, 0.0] and parts["totals"][0] == 0.5
    assert parts["tools"] == pytest.approx([-0.05, 0.0]) and judged["reward"].tolist() == pytest.approx([2.45, 0.0])
    seen = wb.views.samples(judged)
    html = seen.html()
    for part, value in (("task", "1"), ("turns", "1"), ("tools", "-0.05"), ("totals", "0.5")):
        assert part in html and value in html
    assert seen.frame["reward/turns"].tolist()[::-1] == [1.0, 0.0] and "2 turn scores, 2 tool rewards" in seen.text()


CHECK = "def check_answer(said, truth):\n    return said.split()[-1] == truth\n\n\n"
"""What the guide's layered reward calls and does not define."""


@pytest.mark.slow
@pytest.mark.skipif(not GUIDE.is_file(), reason="the seed documents are not beside the repository")
def test_the_guides_own_functions_give_what_these_give(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8", errors="ignore"), re.DOTALL)
    layered = next(block for block in blocks if block.startswith("def compute_agent_reward"))
    flat = next(block for block in blocks if "base_score - 0.5" in block)
    assert "compute_score(...)" in flat  # it is an outline: head and task are left out
    flat = flat.replace("(...)", "(data_source, solution_str, ground_truth, extra_info)").replace(
        "base_score = ...", "base_score = 1.0 if check_answer(solution_str, ground_truth) else 0.0"
    )
    columns = {"num_tool_calls": [0, 3, 4, 5, 6, 9], "turn_scores": [[]] * 6, "tool_rewards": [[]] * 6}
    batch = answered(["#### 4"] * 3 + ["#### 5"] * 3, ["4"] * 6, **columns)
    for name, text, mine in (
        ("compute_agent_reward", layered, task_minus_calls()),
        ("compute_score", flat, task_minus_flat()),
    ):
        (tmp_path / f"{name}.py").write_text(CHECK + text)
        theirs = as_reward(load_function(tmp_path / f"{name}.py", name, roots=[tmp_path]))
        ours = as_reward(mine)
        found = [score.value for score in theirs.score(batch)]
        assert found == pytest.approx([score.value for score in ours.score(batch)]) and len(set(found)) > 2
        theirs.close()


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
        ([call("Traceback", "refused", why="error while running: NameError")], 0.0, Status.CRASHED),
        ([], 0.0, Status.NO_ANSWER),
        ([call("12", name="calculator")], 0.0, Status.NO_ANSWER),
        ([call("12"), call("11", "ignored")], 1.0, Status.SCORED),
        ([call("", "late")], 0.0, Status.INFRA_ERROR),
        ([call("Error", "error", why="sandbox error: no room")], 0.0, Status.INFRA_ERROR),
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
