"""Tests that every reward, scorer and judge must pass.

Inherit `RewardContract` and give `make_reward`, `ScorerContract` and give `make_scorer`; `JudgeContract` is for judges::

    class TestMyReward(RewardContract):
        def make_reward(self):
            return wb.rewards.Reward(my_function)

    class TestMine(ScorerContract):
        right = ("#### 4", "4")

        def make_scorer(self):
            return my_scorer

A failing assertion says what is wrong.
"""

from __future__ import annotations

import inspect
import math
import pickle
from collections.abc import Callable
from typing import Any

import torch

from workbench.base import runtime
from workbench.base.errors import WorkbenchError
from workbench.dataproto.core import DataProto
from workbench.rewards.reward import Reward
from workbench.rewards.score import Score, Status
from workbench.testing import TEXTS, VALUES, answer


def answered(texts: list[str], truths: list[str] | None = None, **columns: Any) -> DataProto:
    """Make a batch with these response texts, as from a rollout, one token per character; `truths` default to the
    texts."""
    number = len(texts)
    lengths = torch.tensor([len(text) for text in texts])
    mask = (torch.arange(max([1, *lengths.tolist()])) < lengths[:, None]).long()
    return DataProto.from_single_dict(
        {
            "responses": mask.clone(),
            "response_mask": mask,
            "response_text": texts,
            "raw_prompt": [[{"role": "user", "content": f"question {row}"}] for row in range(number)],
            "uid": [f"u{row}" for row in range(number)],
            "data_source": ["workbench/arith"] * number,
            "reward_model": [{"style": "rule", "ground_truth": truth} for truth in truths or texts],
            "extra_info": [{"index": row} for row in range(number)],
            **columns,
        }
    )


class RewardContract:
    """Pytest tests of a reward: inherit this class and override `make_reward`."""

    def make_reward(self) -> Reward:
        """Return a new reward, which must be able to score any text."""
        raise NotImplementedError("override make_reward: return a new reward that scores any text")

    def test_one_record_a_row_in_order_and_the_same_twice(self) -> None:
        """`score` gives one `Score` per row, in order and each time the same, for an empty response too."""
        reward = self.make_reward()
        batch = answered(["#### 4", "", "so it is 5", "#### 7"], ["4", "1", "5", "6"])
        first, again = reward.score(batch), reward.score(batch)
        backwards = reward.score(batch[::-1])[::-1]
        reward.close()
        assert len(first) == 4 and all(isinstance(score, Score) for score in first), "one Score a row"
        values = [[score.value for score in scores] for scores in (first, again, backwards)]
        assert values[0] == values[1] == values[2], "the same rows in any order get the same scores"

    def test_records_travel(self) -> None:
        """A `Score` survives pickle and JSON unchanged."""
        reward = self.make_reward()
        score = reward.score(answered(["#### 4"]))[0]
        reward.close()
        pickled = pickle.loads(pickle.dumps(score))  # noqa: S301 - our own bytes
        assert pickled == score == Score.from_json(score.to_json()), "a Score survives pickle and JSON"


BAD_TRUTHS = {
    name: value
    for name, value in VALUES.items()
    if name in ("text: empty", "text: blank")
    or not (name in ("true", "int", "huge int", "float") or name.startswith("text: "))
}
"""Truths that no rule can read: missing, blank, NaN, infinite, or no scalar at all."""


def settled(call: Callable[[], Any]) -> Any:
    """Call `call`, which may be async, and return its result, or the `WorkbenchError` that it raised."""

    def waited() -> Any:
        result = call()
        if not inspect.isawaitable(result):
            return result

        async def wait() -> Any:
            return await result

        return runtime.run(wait())

    return answer(waited)


class ResponseContract:
    """Pytest tests of a scorer of responses: inherit this class and override `make_scorer`."""

    def make_scorer(self) -> Callable[..., Any]:
        """Return the scorer."""
        raise NotImplementedError("override make_scorer: return the scorer")

    def scored(self, response: Any, *further: Any) -> Any:
        """Score a response: the scorer's `Score`, or the `WorkbenchError` with which it refused."""
        return settled(lambda: self.make_scorer()(response, *further))

    def arguments(self) -> tuple[Any, ...]:
        """Return the further arguments of the scorer."""
        return ()

    def test_any_text_gives_a_value_or_a_status(self) -> None:
        """Any text as a response gives a `Score` with a finite value, or with a status and its reason."""
        for name, text in TEXTS.items():
            found = self.scored(text, *self.arguments())
            assert isinstance(found, Score) and math.isfinite(found.value), f"response {name}: {found!r}"
            assert found.status is Status.SCORED or found.why, f"response {name}: {found.status} says why"

    def test_a_response_that_is_no_text_is_refused(self) -> None:
        """A response of another type raises a `WorkbenchError` that names its type."""
        for name, value in VALUES.items():
            if not isinstance(value, str):
                refused = isinstance(self.scored(value, *self.arguments()), WorkbenchError)
                assert refused, f"response {name} is refused"


class ScorerContract(ResponseContract):
    """Pytest tests of a scorer `f(response, ground_truth)`: inherit this class, override `make_scorer` and `right`."""

    right: tuple[str, Any] = ("", "")
    """A response and the ground truth that it gets full marks for."""
    reads_lists = False
    """Whether a ground truth may be a list or a set of accepted answers."""

    def arguments(self) -> tuple[Any, ...]:
        """Return the ground truth, which is the scorer's further argument."""
        return self.right[1:]

    def test_a_truth_that_cannot_be_read_is_not_applicable(self) -> None:
        """A missing, empty or unreadable ground truth makes the row *not_applicable*, whatever the response, and never
        a 0."""
        lists = ("list", "set", "nested list") if self.reads_lists else ()
        for name, truth in BAD_TRUTHS.items():
            if name in lists:
                continue
            for response in (self.right[0], "", "no answer", str(truth)):
                score = self.scored(response, truth)
                assert isinstance(score, Score), f"truth {name}: {score!r}"
                assert score.status is Status.NOT_APPLICABLE, f"truth {name}, response {response[:40]!r}: {score}"
                assert score.why, "and it says why"

    def test_any_truth_gives_a_value_or_a_status(self) -> None:
        """With any value as ground truth the scorer gives a finite value, or a status; it never raises."""
        for name, truth in VALUES.items():
            found = self.scored(self.right[0], truth)
            assert isinstance(found, Score) and math.isfinite(found.value), f"truth {name}: {found!r}"

    def test_only_the_right_response_has_full_marks(self) -> None:
        """The right response is scored above 0, and every hostile text is scored, and lower."""
        best = self.scored(*self.right)
        assert isinstance(best, Score) and best.scored and best.value > 0, f"the right response is right: {best!r}"
        for name, text in TEXTS.items():
            found = self.scored(text, self.right[1])
            assert found.scored and found.value < best.value, f"response {name} is wrong, and scored: {found}"


class JudgeContract:
    """Pytest tests of a judge: inherit this class and override `make_judge`."""

    def make_judge(self, answer: Callable[[str], str]) -> Any:
        """Return a judge whose chat model replies with `answer(prompt)`."""
        raise NotImplementedError("override make_judge: return a judge whose model answers by the given function")

    def make_rows(self) -> list[dict[str, Any]]:
        """Return rows to be judged, as `row_views` makes them."""
        raise NotImplementedError("override make_rows: return the rows to judge")

    def test_a_reply_that_is_no_verdict_is_no_grade(self) -> None:
        """Whatever the model replies, a row without a verdict is *infra_error* with the reason, and never a number."""
        for name, text in TEXTS.items():
            for score in self.make_judge(lambda _, text=text: text).judge(self.make_rows()):  # type: ignore[misc]
                assert score.status is Status.INFRA_ERROR and score.why, f"reply {name}: {score}"

    def test_a_model_that_fails_is_no_grade(self) -> None:
        """An exception of the chat model makes the row *infra_error*."""

        def fails(_: str) -> str:
            raise ConnectionError("503")

        for score in self.make_judge(fails).judge(self.make_rows()):
            assert score.status is Status.INFRA_ERROR and "503" in score.why, str(score)
