"""Seed 000 (what verl's reward settings mean): its blocks and its conventions for what a reward returns.

Not here: the reward model's vLLM itself, which needs four GPUs (it is asked as a server, `reward_model.url`).
"""

from __future__ import annotations

from typing import Any

import pytest
from test_compat_verl_reward import SEED as RM

import workbench as wb
from workbench.base.errors import SettingError
from workbench.compat.verl_reward import reward_from
from workbench.engines.protocol import Classified
from workbench.rewards import RewardModel
from workbench.rewards.managers import PrimeRewardManager

SANDBOX = {
    "reward.sandbox_fusion.url": "https://xxxxxxxxx.apigateway-cn-beijing.volceapi.com/run_code",
    "reward.sandbox_fusion.max_concurrent": 128,
    "reward.reward_manager.name": "prime",
}
ROW = {"prompt": "2+2?", "response": "#### 4", "data_source": "openai/gsm8k", "reward_model": {"ground_truth": "4"}}


class Words:
    """A tokenizer of words."""

    def __call__(self, text: str, **_: Any) -> Any:
        return {"input_ids": list(range(len(text.split())))}


def scored(reward: Any, *rows: Any) -> list[Any]:
    return [one.score for one in wb.rewards.dry_run({"it": reward}, list(rows)).judged["it"]]


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that a served reward model is asked for; it says 0.5."""
    asked: list[str] = []

    async def classify(self: Any, text: str) -> Any:
        asked.append(text)
        return Classified(0.5, 3)

    monkeypatch.setattr(wb.engines.ClassifyEndpoint, "classify", classify)
    return asked


def test_the_reward_models_lines_ask_a_server_or_say_what_this_machine_lacks(
    answering: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reward = reward_from({**RM, "reward.reward_model.url": "http://127.0.0.1:8000"})
    assert isinstance(reward, RewardModel) and scored(reward, ROW)[0].value == 0.5
    assert answering == ["Question: 2+2?\nAnswer: #### 4"]  # section 4.2's template
    for said in ("num_workers=8", "tensor_model_parallel_size=4", "gpu_memory_utilization=0.8", "deepseek-llm-7b-chat"):
        assert said in repr(reward), said
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(SettingError, match="tensor_model_parallel_size=4.*1 GPUs.*vllm serve MODEL.*reward_model.url"):
        reward_from(RM)


def test_the_sandboxs_lines_make_the_prime_manager() -> None:
    reward = reward_from(SANDBOX, tokenizer=Words())
    assert isinstance(reward.manager, PrimeRewardManager) and scored(reward, ROW)[0].value == 1  # type: ignore[attr-defined]
    assert "max_concurrent=128" in repr(reward)


def test_prime_fuses_model_rule_and_sandbox(answering: list[str]) -> None:
    """Section 3.5: "fusing several sources of reward (RM + rule + sandbox)"."""
    block = {**RM, **SANDBOX, "reward.reward_model.url": "http://127.0.0.1:8000"}
    (score,) = scored(reward_from(block, tokenizer=Words()), ROW)
    assert score.value == 1.5 and (score.parts["rm"], score.parts["rule"]) == (0.5, 1.0)


def test_the_nested_block_of_section_five(answering: list[str]) -> None:
    rollout = {"name": "vllm", "gpu_memory_utilization": 0.8, "tensor_model_parallel_size": 4, "prompt_length": 256}
    model = {"enable": True, "model_path": "~/models/my-rm-v1", "rollout": {**rollout, "response_length": 128}}
    nested = {"reward": {"num_workers": 8, "reward_model": {**model, "url": "http://127.0.0.1:8000"}}}
    reward = reward_from(nested)
    assert isinstance(reward, RewardModel)
    assert reward.lengths.to_dict() == {"prompt_length": 256, "response_length": 128}


@pytest.mark.parametrize(
    ("returned", "value"), [({"score": 0.3}, 0.3), ({"reward_score": 0.3}, 0.3), (0.3, 0.3), (None, None)]
)
def test_what_a_reward_may_return(returned: Any, value: float | None) -> None:
    """Section 4.3: the name of the field does not matter; None is no score, and not 0."""
    (score,) = scored(wb.rewards.Reward(lambda response: returned, in_process=True), ROW)
    assert (score.value if score.scored else None) == value
