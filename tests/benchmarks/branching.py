"""What trees of episodes learn beside GRPO in the tool world of notebook 106: `python tests/benchmarks/branching.py`.

Same prompts, steps and learning rate, and eight leaves a prompt: a tree samples fewer tokens, because shared turns are sampled
once. With 11 leaves (14 with three branches) it samples as many as GRPO. Prints a row for each way and seed: held-out reward
along the run, its mean over the run, calls per episode, and the tokens that were sampled.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean

import torch

import workbench as wb
from workbench.agents import ToolAgent
from workbench.agents.tools import load_tools

COMMON = {"group_size": 8, "max_tokens": 96, "kl_coef": 0.0}
TREES = partial(wb.recipes.tree_grpo, **COMMON)
WAYS: dict[str, Callable[..., wb.Pipeline]] = {
    "grpo": partial(wb.recipes.grpo, **COMMON),
    "turn": partial(TREES, credit="turn"),
    "turn, branches=3": partial(TREES, credit="turn", branches=3),
    "turn, random": partial(TREES, credit="turn", branch_turns="random"),
    "turn, 11 leaves": partial(TREES, credit="turn", group_size=11),
    "turn, branches=3, 14 leaves": partial(TREES, credit="turn", branches=3, group_size=14),
    "arpo": partial(TREES, credit="arpo"),
    "arpo, every row": partial(TREES, credit="arpo", learn_once=False),
    "tree_rl, every row": partial(TREES, credit="tree_rl", learn_once=False),
    "tree_grpo, every row": partial(TREES, credit="tree_grpo", learn_once=False),
}


def measure(name: str, seed: int, steps: int, lr: float, folder: Path) -> str:
    """One run, as a row of the table."""
    agent = ToolAgent(load_tools("data/arith-tools/tools.yaml"), parser="hermes", max_assistant_turns=4)
    rows = wb.rows("data/arith-tools/train.parquet", max_prompt_length=256)
    eval_rows = wb.rows("data/arith-tools/test.parquet", max_prompt_length=256)[:256]
    pipe = WAYS[name](wb.engines.local("data/tiny-arith-tools", lr=lr), agent=agent)
    whole = {"steps": steps, "batch_size": 16, "seed": seed, "run": folder / f"{name}-{seed}"}
    run = wb.train_blocking(pipe, rows, eval_rows=eval_rows, test_freq=5, **whole)
    val = [row["val/reward"] for row in run.rows if "val/reward" in row]
    told = [row for row in run.rows if "agent_loop/num_turns/mean" in row]
    sampled = sum(row.get("tree/sampled_tokens", 16 * 8 * row["model_tokens/mean"]) for row in told)
    curve = " → ".join(f"{one:.3f}" for one in val)
    calls = f"{told[0]['agent_loop/num_tool_calls/mean']:.2f} → {told[-1]['agent_loop/num_tool_calls/mean']:.2f}"
    return f"| {name} | {seed} | {curve} | {fmean(val):.3f} | {calls} | {sampled / 1000:.0f}k |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("ways", nargs="*", default=list(WAYS))
    given = parser.parse_args()
    torch.set_num_threads(1)
    print("| way | seed | held-out reward | mean | calls per episode | sampled tokens |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name in given.ways:
            for seed in range(given.seeds):
                print(measure(name, seed, given.steps, given.lr, Path(folder)), flush=True)


if __name__ == "__main__":
    main()
