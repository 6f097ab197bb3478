"""What the tiny model with tools learns in twenty steps: calls per episode and reward, before and after, three seeds.

Prints a table; `tests/benchmarks/README.md` has the last one, with date and machine.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import mean, median

import torch

import workbench as wb
from workbench.agents import ToolAgent
from workbench.agents.parsers import tool_parser
from workbench.agents.tools import load_tools

CALLS = "agent_loop/num_tool_calls/mean"


def pipeline(lr: float, group_size: int) -> tuple[wb.Pipeline, ToolAgent]:
    """As notebook 106 trains."""
    tools = load_tools("data/arith-tools/tools.yaml")
    agent = ToolAgent(list(tools.values()), parser=tool_parser("hermes"), max_assistant_turns=4, seconds_per_call=5.0)
    engine = wb.engines.local("data/tiny-arith-tools", lr=lr)
    return wb.recipes.grpo(engine, agent=agent, group_size=group_size, kl_coef=0.001, max_tokens=96), agent


def measure(seed: int, folder: Path, options: argparse.Namespace) -> str:
    """One run, as a row of the table; calls held out are those of the same validation episodes as the reward."""
    rows = wb.rows("data/arith-tools/train.parquet", max_prompt_length=256)
    eval_rows = wb.rows("data/arith-tools/test.parquet", max_prompt_length=256)
    pipe, agent = pipeline(options.lr, options.group_size)
    engine = pipe["rollout"].sampler
    calls = []

    def held_out_calls() -> float:
        found = wb.evaluate(engine, eval_rows, agent=agent, max_tokens=96, batch_size=256, seed=seed)
        return float(mean(found.batch["num_tool_calls"]))

    calls.append(held_out_calls())
    run = wb.train_blocking(
        pipe,
        rows,
        steps=options.steps,
        batch_size=options.batch_size,
        seed=seed,
        run=folder / f"agents-{seed}",
        eval_rows=eval_rows,
        test_freq=10,
    )
    calls.append(held_out_calls())
    summary, taken = run.summary, run.rows[1:]
    low, high = summary["interval_after"]
    middle = [f"{row['val/reward']:.3f}" for row in taken if "val/reward" in row]
    trained = [row[CALLS] for row in taken]
    columns = [
        seed,
        f"{calls[0]:.2f} → {calls[1]:.2f}",
        f"{mean(trained[:3]):.2f} → {mean(trained[-3:]):.2f}",
        " → ".join([f"{summary['reward_before']:.3f}", *middle]),
        f"[{low:.3f}, {high:.3f}]",
        f"{summary['greedy_before']:.3f} → {summary['greedy_after']:.3f}",
        f"{median(row['timing_s/step'] for row in taken):.2f}",
        f"{summary['seconds']:.0f}",
    ]
    return "| " + " | ".join(str(column) for column in columns) + " |"


def main() -> None:
    """All seeds, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--group_size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(
        "| seed | calls an episode, held out | in training, first and last three steps | held-out reward before, after "
        "10, 20 steps | 95 % at the end | greedy | s a step | s in all |"
    )
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for seed in options.seeds:
            print(measure(seed, Path(folder), options), flush=True)


if __name__ == "__main__":
    main()
