"""A step that judges while it works gives the numbers of one that does not."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

import workbench as wb
from workbench.base.errors import RewardError
from workbench.engines.protocol import Sample
from workbench.runs.loop import run_step
from workbench.steps.execute import StreamingReward


def rows(engine: Any) -> Any:
    return wb.rows("data/arith/train.parquet", max_prompt_length=128)


def pipeline(reward: Any) -> tuple[Any, Any]:
    engine = wb.engines.local("data/tiny-arith", threads=1)
    return wb.recipes.grpo(engine, reward, group_size=4, max_tokens=24, kl_coef=0.01), rows(engine)


def length(response: str, response_ids: list[int]) -> dict[str, Any]:
    return {"score": len(response) / 10, "tokens": len(response_ids), "note": response[:3]}


@pytest.mark.slow
def test_the_trace_is_the_same_whichever_way() -> None:
    reward = wb.rewards.Reward(lambda response: len(response) / 10, in_process=True)
    plain, data = pipeline(reward)
    batch = data.batch(4, step=1, seed=3)
    one = run_step(plain, batch)
    over, _ = pipeline(reward)
    other = run_step(over.streaming_rewards(), batch)
    assert [phase.stage for phase in one.phases] == [phase.stage for phase in other.phases]
    for mine, theirs in zip(one.phases, other.phases, strict=True):
        assert set(mine.batch.columns) == set(theirs.batch.columns) and mine.wrote == theirs.wrote
        for name in mine.batch.batch:
            torch.testing.assert_close(mine.batch[name], theirs.batch[name], rtol=0, atol=0, equal_nan=True, msg=name)


@pytest.mark.slow
def test_rewards_begin_while_rows_are_still_generated_and_log_probs_go_on_beside_them() -> None:
    seen: list[tuple[str, float]] = []
    begun = threading.Event()

    def slow(response: str) -> float:
        begun.set()
        time.sleep(0.01)
        seen.append(("reward", time.perf_counter()))
        return 1.0

    made, data = pipeline(wb.rewards.Reward(slow, in_process=True))
    scored = made["old_log_prob"]
    original = type(scored).__call__

    def noted(self: Any, batch: Any) -> Any:
        seen.append(("log_prob", time.perf_counter()))
        return original(self, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(scored), "__call__", noted)
        run_step(made.streaming_rewards(), data.batch(8, step=1))
    places = [place for place, (what, _) in enumerate(seen) if what == "log_prob"]
    assert begun.is_set() and 0 < places[0] < len(seen) - 1, "log-probs ran between rewards"


@pytest.mark.slow
def test_what_judging_raises_is_raised_by_the_step_with_the_trace_before_it() -> None:
    def broken(response: str) -> float:
        raise ValueError("no")

    made, data = pipeline(wb.rewards.Reward(broken, in_process=True))
    with pytest.raises(RewardError, match="all 16 rows") as raised:
        run_step(made.streaming_rewards(), data.batch(4, step=1))
    assert [phase.stage for phase in raised.value.trace.phases] == ["rollout"]  # type: ignore[attr-defined]


def test_rows_come_back_in_order_whatever_order_they_arrive_in() -> None:
    early = StreamingReward(wb.rewards.Reward(lambda response: float(response), in_process=True))
    for row in (3, 0, 2, 1):
        early.arrive(row, {"response_text": str(row)}, Sample((1,), (0.0,), "stop", 0))
    early.end()
    assert [score.value for score in early.finish()] == [0, 1, 2, 3]


@pytest.mark.slow
def test_a_group_reward_waits_for_its_group() -> None:
    def rank(responses: list[str]) -> list[float]:
        return [float(sorted(responses).index(text)) for text in responses]

    reward = wb.rewards.Reward(rank, in_process=True, per="group")
    plain, data = pipeline(reward)
    batch = data.batch(2, step=1)
    one = run_step(plain, batch)
    over, _ = pipeline(reward)
    assert torch.equal(one.batch["reward"], run_step(over.streaming_rewards(), batch).batch["reward"])
