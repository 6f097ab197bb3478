"""Every fenced command and YAML of the seed documents: it trains two steps on the tiny worlds, or a line says what it lacks."""

from __future__ import annotations

import importlib.util
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import workbench as wb
from workbench.base.errors import SettingError

SEEDS = Path(__file__).parents[3] / "shared" / "seeds"
NOT_OURS = {
    ("002", 0): "the environment of Ray's workers: wb.cluster(runtime_env=…)",
    ("002", 1): "ray start", ("002", 2): "ray start", ("002", 3): "a folder's own script",
    ("003", 0): "pip", ("003", 1): "downloads", ("003", 3): "tensorboard", ("003", 4): "ls", ("003", 10): "prepares data",
    ("003", 11): "tools: agents.load_tools", ("003", 15): "names of files", ("003", 17): "the name of a file",
    ("003", 24): "a part of reward.reward_manager: wb.reward_from",
}  # fmt: skip
"""Fenced blocks that are no command of verl's, by seed and number."""
LACKS = {("003", 12): ["--config-path=examples/sglang_multiturn/config"]}
"""What is refused of a block; it trains without that."""
REWARD = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return float(ground_truth in solution_str)\n"
MAIN = "python3 -m verl.trainer.main_ppo "
QUOTED = {
    "000 reward": MAIN + "reward.num_workers=8 reward.reward_manager.name=prime reward.sandbox_fusion.max_concurrent=128 "
    "reward.sandbox_fusion.url='http://localhost:9/run_code' algorithm.adv_estimator=grpo",
    "001 interaction": MAIN + "data.train_batch_size=256 data.max_prompt_length=512 data.max_response_length=512 "
    "actor_rollout_ref.model.path=meta-llama/Llama-3.1-8B-Instruct actor_rollout_ref.rollout.name=sglang algorithm.adv_estimator=grpo "
    "interaction_config_path=./config/interaction_config/math_interaction.yaml actor_rollout_ref.rollout.multi_turn.max_assistant_turns=3",
    "003 grpo": MAIN + "algorithm.adv_estimator=grpo \\\n  algorithm.group_size=4 \\    # GRPO\n  data.train_files=\"['~/data/gsm8k/train.parquet']\" "
    "\\\n actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.rollout.name=vllm trainer.total_epochs=10",
    "004 ppo": MAIN + "data.train_files=$HOME/data/gsm8k/train.parquet data.train_batch_size=1024 actor_rollout_ref.actor.ppo_mini_batch_size=256 "
    "critic.optim.lr=1e-5 critic.model.path=deepseek-ai/deepseek-llm-7b-chat critic.model.fsdp_config.param_offload=False "
    "algorithm.kl_ctrl.kl_coef=0.001 trainer.critic_warmup=0 trainer.logger='[\"console\",\"wandb\"]' trainer.save_freq=-1 trainer.total_epochs=15 $@",
}  # fmt: skip
"""The most important commands, shortened, for a clone that stands alone."""


def blocks() -> Iterator[tuple[tuple[str, int], str]]:
    """((seed, number), text) of every fenced shell and YAML block."""
    for path in sorted(SEEDS.glob("*")):
        if path.name.startswith("003") and path.suffix == ".txt":
            continue  # the decoded one is read
        text = path.read_text(encoding="utf-8", errors="replace")
        found = re.finditer(r"^[ >]*```(?:bash|yaml)\n(.*?)^[ >]*```", text, re.DOTALL | re.MULTILINE)
        yield from (((path.name[:3], number), textwrap.dedent(one[1])) for number, one in enumerate(found))


def commands() -> list[Any]:
    """A parameter for every command of the blocks; scripts may have several."""
    made = []
    for (seed, number), text in blocks():
        if (seed, number) not in NOT_OURS:
            several = text.count("main_ppo") if "main_ppo" in text else 1
            made += [pytest.param((seed, number), text, at, id=f"{seed}-{number}-{at}") for at in range(several)]
    return made or [pytest.param(("", 0), "", 0, marks=pytest.mark.skip(reason=f"no seed documents at {SEEDS}"))]


def opened(text: str, at: int, folder: Path, **more: Any) -> tuple[Any, Any, Any, dict[str, Any]]:
    """The command on the tiny worlds."""
    job = wb.compat.verl(text, command=at if text.count("main_ppo") > 1 else None)
    tools = "tool" in text or "interaction" in text
    world: dict[str, Any] = {
        "model": f"data/tiny-arith{'-tools' if tools else ''}",
        "train_files": "data/arith/train.parquet",
    }
    if "dataset_weights" in text:
        world["train_files"] = ["data/arith/train.parquet", "data/arith/test.parquet", "data/arith/train.parquet"]
    if "interaction" in text:
        world["train_files"] = "data/arith-interaction/train.parquet"
        more["interaction_config_path"] = "data/arith-interaction/interaction.yaml"
    if "gsm8k_tool_config" in text:
        more["actor_rollout_ref.rollout.multi_turn.tool_config_path"] = "data/arith-tools/tools.yaml"
    if "custom_reward_function.path" in text:
        (folder / "my_reward.py").write_text(REWARD)
        more["custom_reward_function.path"] = str(folder / "my_reward.py")
    return job.open(**world, train_batch_size=4, max_response_length=8, steps=2, run=str(folder / "run"), **more)


@pytest.fixture(autouse=True)
def _reward_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKBENCH_CODE_ROOTS", str(tmp_path))


def test_every_block_is_a_command_or_said_to_be_none() -> None:
    if not SEEDS.is_dir():
        pytest.skip(f"no seed documents at {SEEDS}")
    for key, text in blocks():
        if key in NOT_OURS:
            continue
        job = wb.compat.verl(text, command=0 if text.count("main_ppo") > 1 else None)
        assert [row.key for row in job.refused] == LACKS.get(key, []), (key, job.refused)
        assert {row.key for row in job.rows} >= {*job.settings}


@pytest.mark.long
@pytest.mark.parametrize(("block", "text", "at"), commands())
def test_a_command_trains_two_steps(block: tuple[str, int], text: str, at: int, tmp_path: Path) -> None:
    if "lora" in text and importlib.util.find_spec("peft") is None:
        pytest.skip("LoRA needs peft")
    if block in LACKS:
        with pytest.raises(SettingError, match=re.escape(LACKS[block][0])):
            opened(text, at, tmp_path)
    pipe, rows, held, how = opened(text, at, tmp_path, without=LACKS.get(block, []))
    run = wb.train_blocking(pipe, rows, eval_rows=held, display=None, **how)
    assert run.summary["steps"] == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=pytest.mark.long if one in ("000 reward", "004 ppo") else []) for one in QUOTED]
)
def test_a_quoted_command_steps(name: str, tmp_path: Path) -> None:
    pipe, rows, _, how = opened(QUOTED[name], 0, tmp_path)
    stepper = wb.Stepper(pipe, rows.batch(how["batch_size"])).run()
    assert stepper.trace["update_actor"].metrics
    assert how["steps"] == 2 and how["batch_size"] == 4
