"""Tests that every reward must pass: inherit `RewardContract` and give `make_reward`::

    class TestMyReward(RewardContract):
        def make_reward(self):
            return wb.rewards.Reward(my_function)

A failing assertion says what is wrong.
"""

from __future__ import annotations

import pickle
from typing import Any

import torch

from workbench.dataproto.core import DataProto
from workbench.rewards.reward import Reward
from workbench.rewards.score import Score


def answered(texts: list[str], truths: list[str] | None = None, **columns: Any) -> DataProto:
    """A batch with the given response texts as from a rollout, one token per character; `truths` default to the texts."""
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
        """A new reward, which must be able to score any text."""
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
