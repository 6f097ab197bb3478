"""Seed 004 (reading verl's PPO on GSM8K): its scorer's signature, and the four functions that load rewards.

`load_reward_manager(config, tokenizer, n)` is `reward_from(block, tokenizer=…)`; a manager itself is `rewards.manager_class(name)(…)`,
`get_custom_reward_fn(config)` is `rewards.load_function(path, name, **kwargs)`, `compute_reward(data, fn)` is `fn(data, return_dict=True)`.
Not here: `TaskRunner`, `RayPPOTrainer` (the pages on clusters), and its command (the tests of verl's commands).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb
from workbench.compat.verl_reward import reward_from
from workbench.dataproto import DataProto


class Letters:
    """A tokenizer of characters."""

    def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
        return "".join(map(chr, ids))


def batch() -> DataProto:
    said = ["#### 18", "#### 17", "eighteen"]
    width = max(map(len, said))
    mask = torch.tensor([[1] * len(one) + [0] * (width - len(one)) for one in said])
    ids = torch.tensor([[*map(ord, one), *[0] * (width - len(one))] for one in said])
    tensors = {"prompts": torch.ones(3, 2, dtype=torch.long), "responses": ids, "response_mask": mask}
    attended = torch.cat([torch.ones(3, 2, dtype=torch.long), mask], 1)
    objects = {
        "data_source": ["openai/gsm8k"] * 3,
        "reward_model": [{"ground_truth": "18"}] * 3,
        "extra_info": [{}] * 3,
    }
    return DataProto.from_single_dict({**tensors, "attention_mask": attended, **objects})


@pytest.mark.parametrize(
    ("said", "options", "value"),
    [
        ("so 1 + 17\n#### 18", {}, 1.0),
        ("#### 17", {}, 0.0),
        ("#### 17", {"format_score": 0.1}, 0.1),
        ("it is 18", {}, 0),
        ("it is 18", {"method": "flexible", "score": 2.0}, 2.0),
    ],
)
def test_gsm8ks_scorer_has_the_seeds_signature(said: str, options: Any, value: float) -> None:
    from workbench.rewards.scorers.gsm8k import compute_score

    assert compute_score(solution_str=said, ground_truth="18", **options) == value


@pytest.mark.parametrize("name", ["naive", "prime", "dapo"])
def test_a_manager_is_made_and_asked_as_by_load_reward_manager_and_compute_reward(name: str) -> None:
    manager = wb.rewards.manager_class(name)(
        tokenizer=Letters(), num_examine=0, compute_score=None, reward_fn_key="data_source"
    )
    result = manager(batch(), return_dict=True)
    tensor, more = result["reward_tensor"], result.get("reward_extra_info", {})
    assert tensor.sum(-1).tolist() == [1, 0, 0] and tensor[0, 6] == 1 and len(more["score"]) == 3
    assert torch.equal(manager(batch()), tensor)
    block = reward_from({"reward_model": {"reward_manager": name}}, tokenizer=Letters())
    assert [score.value for score in block.score(batch().union(_texts()))] == [1, 0, 0]


def _texts() -> DataProto:
    return DataProto.from_single_dict({"response_text": ["#### 18", "#### 17", "eighteen"], "uid": ["a", "b", "c"]})


def test_get_custom_reward_fn_binds_the_settings_kwargs(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def compute_score(solution_str, ground_truth, bonus=0.0):\n    return bonus\n")
    block = {"custom_reward_function": {"path": str(tmp_path / "mine.py"), "name": "compute_score"}}
    block["custom_reward_function"]["reward_kwargs"] = {"bonus": 0.25}
    reward = reward_from({**block, "num_workers": 1}, tokenizer=Letters(), roots=(str(tmp_path),))
    assert [score.value for score in reward.score(batch().union(_texts()))] == [0.25] * 3
    reward.close()
    for wrong, message in (
        ({"path": "/nowhere/mine.py"}, "no reward file"),
        ({"name": "compute_scor"}, "did you mean"),
    ):
        with pytest.raises(wb.WorkbenchError, match=message):
            merged = {"custom_reward_function": {**block["custom_reward_function"], **wrong}}
            reward_from(merged, tokenizer=Letters(), roots=(str(tmp_path),))
