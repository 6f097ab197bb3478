"""Reward functions of other libraries, from their own sources, unchanged: a right answer, a wrong one, and none.

`WORKBENCH_SOURCES` names a folder with check-outs of the repositories (`verl`, `slime`, `AReaL`, …; of verl the wheel's
contents do). A row is skipped, saying so, where its file or a package that it imports is absent.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from workbench.rewards import Reward, load_function
from workbench.testing.rewards import answered

SOURCES = os.environ.get("WORKBENCH_SOURCES", "")
ANSWERS = [
    "<think>2 and 2</think> so \\boxed{4}\n#### 4\n<answer>4</answer>",
    "<think>no</think> it is \\boxed{5}\n#### 5\n<answer>5</answer>",
    "I do not know",
]
ACTION = {"rename": {"action": "response"}}
_MATH = SimpleNamespace(custom_rm_path=None, rm_type="math")
RIGHT, FORMAT, SIGNED = [1.0, 0.0, 0.0], [1.0, 0.1, 0.0], [1.0, -1.0, -1.0]
CASES: list[tuple[str, str, list[float], dict[str, Any]]] = [
    ("verl/verl/utils/reward_score/gsm8k.py", "compute_score", RIGHT, {}),
    ("verl/verl/utils/reward_score/math_reward.py", "compute_score", RIGHT, {}),
    ("verl/verl/utils/reward_score/math_dapo.py", "compute_score", SIGNED, {}),
    ("verl/verl/utils/reward_score/math_verify.py", "compute_score", RIGHT, {}),
    ("verl/verl/utils/reward_score/math_batch.py", "compute_score_batched", RIGHT, {}),
    ("verl/verl/utils/reward_score/geo3k.py", "compute_score", FORMAT, {}),
    ("verl/verl/utils/reward_score/prime_math/__init__.py", "compute_score", RIGHT, {}),
    ("slime/slime/rollout/rm_hub/__init__.py", "async_rm", RIGHT, {"args": _MATH}),
    ("slime/slime/rollout/rm_hub/deepscaler.py", "get_deepscaler_rule_based_reward", RIGHT, {}),
    ("slime/slime/rollout/rm_hub/gpqa.py", "compute_gpqa_reward", RIGHT, {}),
    ("slime/slime/rollout/rm_hub/f1.py", "f1_score", [0.25, 0.0, 0.0], {"rename": {"prediction": "response"}}),
    ("AReaL/areal/reward/gsm8k.py", "gsm8k_reward_fn", RIGHT, {}),
    ("AReaL/areal/reward/geometry3k.py", "geometry3k_reward_fn", RIGHT, {}),
    ("EasyR1/examples/reward_function/math.py", "compute_score", FORMAT, {}),
    ("EasyR1/examples/reward_function/r1v.py", "compute_score", [0.5, 0.0, 0.0], {}),
    ("trl/trl/rewards/accuracy_rewards.py", "accuracy_reward", RIGHT, {}),
    ("trl/trl/rewards/accuracy_rewards.py", "reasoning_accuracy_reward", RIGHT, {}),
    ("trl/trl/rewards/format_rewards.py", "think_format_reward", [1.0, 1.0, 0.0], {}),
    ("rllm/rllm/rewards/math_reward.py", "rllm_reward_fn_math", RIGHT, {}),
    ("rllm/rllm/rewards/reward_fn.py", "math_reward_fn", RIGHT, ACTION),
    ("rllm/rllm/rewards/reward_fn.py", "f1_reward_fn", [0.25, 0.0, 0.0], ACTION),
    ("RL/nemo_rl/environments/rewards.py", "math_expression_reward", RIGHT, {}),
    ("RL/nemo_rl/environments/rewards.py", "geo3k_reward", FORMAT, {}),
    ("SkyRL/skyrl-gym/skyrl_gym/envs/gsm8k/utils.py", "compute_score", RIGHT, {}),
    ("SkyRL/skyrl-agent/skyrl_agent/tasks/verifiers/torl/math_verify.py", "compute_score", SIGNED, {"reward_type": 1}),
]
"""(file, function, its scores by reading it, constants and renames)."""


@pytest.mark.parametrize(("path", "name", "expected", "given"), CASES, ids=[f"{c[0]}:{c[1]}" for c in CASES])
def test_a_function_scores_as_its_own_library_has_it(
    path: str, name: str, expected: Any, given: dict[str, Any]
) -> None:
    file = Path(SOURCES, path)
    if not SOURCES or not file.is_file():
        pytest.skip(f"no {path}: set WORKBENCH_SOURCES to a folder with check-outs")
    constants = {key: one for key, one in given.items() if key != "rename"}
    function = load_function(file, name, roots=[Path(SOURCES, path.partition("/")[0])], **constants)
    reward = Reward(function, workers=1, timeout=60, rename=given.get("rename"), on_failure="value=-9")
    prompts = torch.tensor([[0, 5, 6]] * 3)
    columns = {name: ["4"] * 3 for name in ("answer", "solution")}
    batch = answered(ANSWERS, ["4"] * 3, **columns, question=["2 + 2?"] * 3)
    batch = batch.with_columns({"prompts": prompts, "prompt_mask": (prompts > 0).long()})
    try:
        scores = reward.score(batch)
    finally:
        reward.close()
    if absent := re.search(r"No module named '[^']*'", scores[0].why):
        pytest.skip(f"{path} needs what is not installed: {absent[0]}")
    assert [score.value for score in scores] == expected, scores[0].why
