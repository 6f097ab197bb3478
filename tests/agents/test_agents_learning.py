"""Training on episodes works: the tiny model with tools comes to call its calculator, because calling pays."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import pytest

import workbench as wb
from workbench.agents import ToolAgent
from workbench.agents.parsers import tool_parser
from workbench.agents.tools import load_tools


def calls(batch: wb.DataProto) -> float:
    """Per episode."""
    return mean(float(number) for number in batch["num_tool_calls"])


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "seed"), [(9, 0), *(pytest.param(12, seed, marks=pytest.mark.long) for seed in (0, 1, 2))]
)
def test_a_dozen_steps_raise_the_use_of_the_calculator_and_the_reward(tmp_path: Path, steps: int, seed: int) -> None:
    tools = load_tools("data/arith-tools/tools.yaml")
    agent = ToolAgent(list(tools.values()), parser=tool_parser("hermes"), max_assistant_turns=4)
    rows = wb.rows("data/arith-tools/train.parquet", max_prompt_length=256)
    eval_rows = wb.rows("data/arith-tools/test.parquet", max_prompt_length=256)[: 64 if steps < 12 else None]
    engine = wb.engines.local("data/tiny-arith-tools", lr=3e-4)
    before = wb.evaluate(engine, eval_rows, agent=agent, max_tokens=96, batch_size=256)
    pipe = wb.recipes.grpo(engine, agent=agent, group_size=8, kl_coef=0.001, max_tokens=96)
    run = wb.train_blocking(pipe, rows, steps=steps, batch_size=8, seed=seed, run=tmp_path / "run")
    after = wb.evaluate(engine, eval_rows, agent=agent, max_tokens=96, batch_size=256)
    assert 0.1 < calls(before.batch) < 0.6 and calls(after.batch) > calls(before.batch) + 0.4
    assert after.mean > before.mean + 0.25
    asked = run.metrics["agent_loop/num_tool_calls/mean"].dropna()
    assert len(asked) == steps and asked.iloc[-4:].mean() > asked.iloc[:4].mean() + 0.2
