"""Rubrics, group rewards, rate limits: sums and gates by hand, statuses that pass through, clocks that are fake."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from workbench.base.errors import RewardError, SettingError
from workbench.rewards import Ensemble, RateLimit, Reward, Rubric, Score, Status, gsm8k
from workbench.rewards.reward import COMBINED
from workbench.rewards.score import bounded
from workbench.stages import Reward as RewardStage
from workbench.testing.rewards import RewardContract, answered

ROWS = answered(["#### 4", "#### 5", "six"], ["4", "4", "6"])


@bounded
def short(response: str) -> dict[str, Any]:
    return {"score": 1.0 if len(response) < 5 else 0.5, "length": len(response)}


@bounded
def only_digits(response: str) -> float | None:
    return None if "six" in response else 1.0


class TestRubric(RewardContract):
    def make_reward(self) -> Any:
        return Rubric({"correct": gsm8k.gsm8k, "short": short}, weights={"short": 0.1})


def test_sums_parts_and_columns_by_hand() -> None:
    rubric = Rubric({"correct": gsm8k.gsm8k, "short": short}, weights={"correct": 2.0, "short": 0.1})
    scores = rubric.score(ROWS)
    assert [score.value for score in scores] == pytest.approx([2.05, 0.05, 0.1])
    assert scores[0].answer == "4" and scores[0].extra["parts"]["correct"]["why"] == "the answer is right"
    batch = RewardStage(rubric)(ROWS).batch
    assert batch["reward/correct"].tolist() == [1, 0, 0] and batch["reward/short.length"].tolist() == [6, 6, 3]
    assert "2·correct + 0.1·short" in repr(rubric) and "gsm8k" in rubric.source
    normalised = Rubric({"correct": gsm8k.gsm8k, "short": short}, weights={"correct": 3.0}, normalise=True)
    assert normalised.score(ROWS)[0].value == pytest.approx((3 + 0.5) / 4)


def test_gates_shut_and_parts_that_do_not_apply_leave_the_sum() -> None:
    gated = Rubric({"correct": gsm8k.gsm8k, "safe": short}, gates={"safe": 0.9}, gated=-1.0)
    scores = gated.score(ROWS)
    assert [score.value for score in scores] == [-1, -1, 0] and "gated by safe" in scores[0].why
    rubric = Rubric({"digits": only_digits, "short": short}, normalise=True)
    assert rubric.score(ROWS)[2].value == 1.0  # short alone
    alone = Rubric({"digits": only_digits})
    assert alone.score(ROWS)[2].status is Status.NOT_APPLICABLE


def test_a_part_whose_machinery_failed_takes_the_judgement_with_it() -> None:
    def fragile(response: str) -> float:
        if response == "six":
            raise ValueError("no digits")
        return 1.0

    mixed = Rubric({"correct": gsm8k.gsm8k, "fragile": Reward(fragile, in_process=True)})
    scores = mixed.score(ROWS)
    assert [score.scored for score in scores] == [True, True, False] and "fragile: ValueError" in scores[2].why
    assert scores[2].parts == {"correct": 0.0} and "Traceback" in (scores[2].error or "")
    counted = Rubric({"correct": gsm8k.gsm8k, "fragile": Reward(fragile, in_process=True, on_failure="value=-1")})
    assert [score.value for score in counted.score(ROWS)] == [2, 1, -1]
    with pytest.raises(RewardError, match="no digits"):
        Rubric({"fragile": Reward(fragile, in_process=True, on_failure="raise")}).score(ROWS)
    with pytest.raises(RewardError, match="all 3 rows"):
        Rubric({"broken": Reward(lambda response: 1 / 0, in_process=True)}).score(ROWS)


def test_a_stage_with_options_takes_a_rubric_in_its_place() -> None:
    stage = RewardStage(lambda response: 1.0, timeout=44.0, workers=1)
    rubric = Rubric({"short": short})
    assert stage.with_function(rubric).function is rubric
    assert stage.with_function(short).function.timeout == 44.0  # type: ignore[attr-defined]


def test_a_rubric_is_refused_with_the_nearest_part() -> None:
    with pytest.raises(RewardError, match="did you mean 'correct'"):
        Rubric({"correct": gsm8k.gsm8k}, weights={"corect": 1.0})
    with pytest.raises(SettingError, match="at least one"):
        Rubric({})
    with pytest.raises(RewardError, match="gruond_truth"):
        Rubric({"bad": lambda response, gruond_truth: 0.0}).score(ROWS)


# --- the whole group ------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_group_reward_sees_its_group() -> None:
    sizes = []

    def rank(responses: list[str], ground_truths: list[str]) -> list[float]:
        sizes.append(len(responses))
        return [float(sorted(responses, key=len).index(text)) for text in responses]

    rows = answered(["aaa", "b", "cc", "dd", "e"]).with_columns({"uid": ["p", "q", "p", "q", "p"]})
    scores = Reward(rank, in_process=True, per="group").score(rows)
    assert [score.value for score in scores] == [2, 0, 1, 1, 0] and sorted(sizes) == [2, 3]
    short_list = Reward(lambda responses: [1.0], in_process=True, per="group")
    with pytest.raises(RewardError, match="a list of 3 rewards; found 1"):
        short_list.score(rows)
    pooled = Reward(rank, workers=1, per="group").score(rows)
    assert [score.value for score in pooled] == [2, 0, 1, 1, 0]


# --- limits ----------------------------------------------------------------------------------------


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_requests_and_tokens_a_minute_on_a_fake_clock() -> None:
    clock = Clock()
    limit = RateLimit(max_rpm=60, max_tpm=600, estimated_tokens_per_request=100, clock=clock)
    entered = 0
    while limit.try_enter() == 0:
        entered += 1
    assert entered == 6, "a full bucket of 600 tokens"
    assert limit.try_enter() == pytest.approx(10.0)  # 100 tokens at 10 a second
    clock.now += 10.0
    assert limit.try_enter() == 0 and limit.try_enter() > 0
    clock.now += 3600
    assert sum(limit.try_enter(tokens=0) == 0 for _ in range(100)) == 60, "no more is saved up than a minute's"
    big = RateLimit(max_tpm=50, clock=Clock())
    assert big.try_enter(tokens=10_000) == 0, "a call above the whole budget waits for a full bucket, not for ever"


def test_places_are_given_back_whatever_happens() -> None:
    limit = RateLimit(max_concurrent=1)

    async def fails() -> None:
        async with limit.slot():
            raise ValueError

    with pytest.raises(ValueError, match=""):
        asyncio.run(fails())
    assert limit.try_enter() == 0
    assert limit.try_enter() > 0
    limit.leave()
    with pytest.raises(SettingError, match="max_rpm"):
        RateLimit(max_rpm=0)


@pytest.mark.slow
def test_limits_hold_in_pools_and_for_async_functions() -> None:
    limit = RateLimit(max_concurrent=1)

    def stamped(response: str) -> dict[str, Any]:
        import time

        began = time.time()
        time.sleep(0.05)
        return {"score": 1.0, "began": began, "ended": time.time()}

    scores = Reward(stamped, workers=3, rate_limit=limit).score(answered(["a", "b", "c", "d"]))
    spans = sorted((score.parts["began"], score.parts["ended"]) for score in scores)
    assert all(ended <= began for (_, ended), (began, _) in itertools.pairwise(spans))
    going = {"now": 0, "most": 0}

    async def service(response: str) -> float:
        going["now"] += 1
        going["most"] = max(going["most"], going["now"])
        await asyncio.sleep(0.01)
        going["now"] -= 1
        return 1.0

    Reward(service, in_process=True).score(ROWS)
    assert going["most"] == 3, "async functions run together"
    going["most"] = 0
    Reward(service, in_process=True, rate_limit=limit).score(ROWS)
    assert going["most"] == 1


@pytest.mark.slow
def test_async_functions_are_cancelled_at_their_limit() -> None:
    cancelled = []

    async def hangs(response: str) -> float:
        try:
            await asyncio.sleep(60 if response == "six" else 0)
        except asyncio.CancelledError:
            cancelled.append(response)
            raise
        return 1.0

    scores = Reward(hangs, in_process=True, timeout=0.2).score(ROWS)
    assert [score.scored for score in scores] == [True, True, False] and cancelled == ["six"]
    assert "0.2 s" in scores[2].why


def test_scores_keep_their_meaning_when_they_are_counted() -> None:
    score = Score(value=1.0, parts={"a": 1.0}).with_value(2.0, b=3.0).with_extra({"x": 1})
    assert score.value == 2 and score.parts == {"a": 1.0, "b": 3.0} and score.extra == {"x": 1}


def test_a_scorers_module_stands_for_its_function() -> None:
    rubric = Rubric({"right": gsm8k, "short": short})
    assert rubric.parts["right"].name == "gsm8k"
    [score] = rubric.score(answered(["#### 4"], ["4"]))
    assert score.value == 1.5 and score.parts["right"] == 1.0 and score.answer == "4"
    assert "1·right + 1·short" in repr(rubric) and "reward/short" in rubric._repr_html_()


class TestEnsemble(RewardContract):
    def make_reward(self) -> Any:
        return Ensemble([gsm8k.gsm8k, short])


def test_an_ensemble_by_hand() -> None:
    """Values 1 and 0.5: mean 0.75, worst 0.5, deviation 0.25, mean − 2 · 0.0625 = 0.625."""
    made = {how: Ensemble({"a": gsm8k.gsm8k, "b": short}, combine=how, coef=2.0) for how in COMBINED}
    values = {how: [score.value for score in one.score(ROWS)] for how, one in made.items()}
    assert values["mean"] == pytest.approx([0.75, 0.25, 0.5]) and values["worst"] == pytest.approx([0.5, 0, 0])
    assert values["uncertainty"] == pytest.approx([0.625, 0.125, 0.0])
    batch = RewardStage(made["worst"])(ROWS).batch
    assert batch["reward/disagreement"].tolist() == pytest.approx([0.25, 0.25, 0.5])
    assert batch["reward/a"].tolist() == [1, 0, 0] and batch["reward"].tolist() == [0.5, 0, 0]
    assert made["uncertainty"].settings()["coef"] == 2.0 and "coef" not in made["mean"].settings()
    assert repr(made["worst"]) == "Ensemble(worst of a, b)" and "worst of 2 parts" in made["worst"]._repr_html_()
    assert set(Ensemble([short, short]).parts) == {"member_1", "member_2"}
    with pytest.raises(SettingError, match="two or more"):
        Ensemble([short])
    with pytest.raises(SettingError, match="mean, worst, uncertainty"):
        Ensemble([short, short], combine="median")


@pytest.mark.slow
def test_an_ensemble_of_one_model_never_disagrees() -> None:
    import workbench as wb

    model = wb.rewards.RewardModel(wb.engines.classifier("data/tiny-reward-model", device="cpu"))
    alone, scores = model.score(ROWS), Ensemble([model, model], combine="worst").score(ROWS)
    assert [one.value for one in scores] == pytest.approx([one.value for one in alone], abs=1e-5)
    assert all(one.parts["disagreement"] < 1e-5 for one in scores)
