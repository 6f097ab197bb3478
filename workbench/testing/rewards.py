"""The contract of a reward as tests: inherit `RewardContract`, give `make_reward`."""

from __future__ import annotations

import pickle
from typing import Any

import torch

from workbench.dataproto import DataProto
from workbench.rewards import Reward, Score


def answered(texts: list[str], truths: list[str] | None = None, **columns: Any) -> DataProto:
    """Rows as they come out of a rollout, with these responses."""
    number = len(texts)
    width = max([1, *(len(text) for text in texts)])
    mask = torch.zeros(number, width, dtype=torch.long)
    for row, text in enumerate(texts):
        mask[row, : len(text)] = 1
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
    """What every reward must do. Override `make_reward`; it should judge any text."""

    def make_reward(self) -> Reward:
        """A fresh reward."""
        raise NotImplementedError

    def test_one_record_a_row_in_order_and_the_same_twice(self) -> None:
        """Whatever the responses are, the empty one too."""
        reward = self.make_reward()
        batch = answered(["#### 4", "", "so it is 5", "#### 7"], ["4", "1", "5", "6"])
        first, again = reward.score(batch), reward.score(batch)
        backwards = reward.score(batch[::-1])[::-1]
        reward.close()
        assert len(first) == 4 and all(isinstance(score, Score) for score in first)
        values = [[score.value for score in scores] for scores in (first, again, backwards)]
        assert values[0] == values[1] == values[2]

    def test_records_travel(self) -> None:
        """By pickle and by JSON."""
        reward = self.make_reward()
        score = reward.score(answered(["#### 4"]))[0]
        reward.close()
        assert pickle.loads(pickle.dumps(score)) == score == Score.from_json(score.to_json())  # noqa: S301 - our own bytes
