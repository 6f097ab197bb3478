"""verl's `reward.*` block: the seeds' own lines, unknown keys, and what this machine cannot do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import workbench as wb
from workbench.base.errors import SettingError
from workbench.compat.verl_reward import read_block, reward_from
from workbench.rewards import ManagerReward, RewardModel
from workbench.rewards.managers import PrimeRewardManager

SEED = {
    "reward.num_workers": 8,
    "reward.reward_model.enable": True,
    "reward.reward_model.model_path": "deepseek-ai/deepseek-llm-7b-chat",
    "reward.reward_model.rollout.name": "vllm",
    "reward.reward_model.rollout.gpu_memory_utilization": 0.8,
    "reward.reward_model.rollout.tensor_model_parallel_size": 4,
    "reward.reward_model.rollout.prompt_length": 256,
    "reward.reward_model.rollout.response_length": 128,
}


def test_the_seeds_reward_model_says_what_this_machine_cannot_do() -> None:
    block = read_block(SEED)
    assert block["num_workers"] == 8 and block["reward_model"]["rollout"]["prompt_length"] == 256
    with pytest.raises(SettingError) as raised:
        reward_from(SEED)
    for key in ("rollout.name='vllm'", "tensor_model_parallel_size=4", "gpu_memory_utilization=0.8"):
        assert key in str(raised.value)


def test_the_seeds_reward_model_on_this_machine() -> None:
    here = {"reward.reward_model.enable": True, "reward.reward_model.model_path": "data/tiny-reward-model",
            "reward.reward_model.rollout.prompt_length": 256, "reward.reward_model.rollout.response_length": 128}  # fmt: skip
    reward = reward_from(here)
    assert isinstance(reward, RewardModel) and reward.lengths.to_dict() == {
        "prompt_length": 256,
        "response_length": 128,
    }
    served = reward_from({**SEED, "reward.reward_model.url": "http://127.0.0.1:8000"})
    assert isinstance(served, RewardModel) and "deepseek" in served.classifier.describe()


def test_the_seeds_sandbox_and_manager() -> None:
    class Letters:
        def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
            return ""

    block = {
        "reward.sandbox_fusion.url": "https://sandbox.example/run_code",
        "reward.sandbox_fusion.max_concurrent": 128,
        "reward.reward_manager.name": "prime",
    }
    reward = reward_from(block, tokenizer=Letters())
    assert isinstance(reward, ManagerReward) and isinstance(reward.manager, PrimeRewardManager)
    assert reward.manager.num_workers == 8
    with pytest.raises(SettingError, match="the policy's tokenizer"):
        reward_from(block)
    with pytest.raises(Exception, match="did you mean 'prime'"):
        reward_from({"reward_manager": {"name": "prim"}}, tokenizer=Letters())


def test_custom_functions_win_and_older_roots_are_understood(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "def my_score(data_source, solution_str, ground_truth, extra_info=None, factor=1):\n    return factor * 1.0\n"
    )
    settings = {
        "custom_reward_function.path": str(file),
        "custom_reward_function.name": "my_score",
        "custom_reward_function.reward_kwargs": {"factor": 3},
        "reward_model": {"enable": True, "model_path": "anything"},
        "num_workers": 1,
    }
    engine = wb.engines.local("data/tiny-arith")
    reward = reward_from(settings, tokenizer=engine.tokenizer, roots=(str(tmp_path),))
    rows = wb.datasets.load("data/arith/train.parquet", max_prompt_length=128)
    step = wb.Stepper(wb.recipes.grpo(engine, reward, group_size=2, max_tokens=8), rows.batch(2)).run(until="reward")
    full = step.batch["response_mask"].sum(-1) > 0
    assert step.batch["reward"][full].tolist() == [3.0] * int(full.sum())
    reward.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reward.num_worker": 2}, "did you mean 'num_workers'"),
        ({"reward": {"sandbox_fusion": {"urls": "x"}}}, r"reward.sandbox_fusion.*did you mean 'url'"),
        ({"reward_model": True}, "expected settings"),
        ({"num_workers": 0}, "num_workers=0"),
        ({"reward_manager": {"source": "importlib"}}, "needs module.path"),
        ({"reward_model": {"enable": True}}, "needs model_path"),
        ({"reward_model": {"enable": True, "model_path": "x", "rollout": {"name": "trt"}}}, "rollout.name='trt'"),
    ],
)
def test_what_cannot_be_is_refused_by_name(settings: Any, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        reward_from(settings)
