"""What the tiny world learns, and how fast: three seeds of GRPO, and PPO with a critic. `make bench`.

Prints a table; `tests/benchmarks/README.md` has the last one, with date and machine.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median

import torch

import workbench as wb


def grpo(seed: int) -> tuple[wb.Pipeline, int]:
    """As notebook 201 trains."""
    engine = wb.engines.local("data/tiny-arith", lr=4e-5)
    return wb.recipes.grpo(engine, group_size=8, kl_coef=0.001, max_tokens=64, ppo_mini_batch_size=1), 40


def ppo(seed: int) -> tuple[wb.Pipeline, int]:
    """With a critic, GAE, and the KL in the reward."""
    engine = wb.engines.local("data/tiny-arith", lr=2e-4)
    pipe = wb.recipes.ppo(engine, group_size=8, kl_coef=0.001, max_tokens=64, critic_lr=1e-3, critic_warmup=3, lam=0.95)
    return pipe, 40


def measure(name: str, seed: int, folder: Path) -> str:
    """One run, as a row of the table."""
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256)
    eval_rows = wb.rows("data/arith/test.parquet", max_prompt_length=256)
    pipe, steps = {"grpo": grpo, "ppo": ppo}[name](seed)
    run = wb.train_blocking(
        pipe,
        rows,
        steps=steps,
        batch_size=16,
        seed=seed,
        run=folder / f"{name}-{seed}",
        eval_rows=eval_rows,
        test_freq=10,
    )
    summary, steps_taken = run.summary, run.rows[1:]
    low, high = summary["interval_after"]
    middle = [f"{row['val/reward']:.3f}" for row in steps_taken if "val/reward" in row]
    columns = [
        name,
        seed,
        f"{summary['reward_before']:.3f}",
        " → ".join(middle),
        f"[{low:.3f}, {high:.3f}]",
        f"{summary['greedy_before']:.3f} → {summary['greedy_after']:.3f}",
        f"{median(row['timing_s/step'] for row in steps_taken):.2f}",
        f"{summary['seconds']:.0f}",
    ]
    return "| " + " | ".join(str(column) for column in columns) + " |"


def main() -> None:
    """All runs, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--recipes", nargs="+", default=["grpo", "ppo"])
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(
        "| recipe | seed | held-out before | after 10, 20, 30, 40 steps | 95 % at the end | greedy | s a step | s in all |"
    )
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name in options.recipes:
            for seed in options.seeds if name == "grpo" else options.seeds[:1]:
                print(measure(name, seed, Path(folder)), flush=True)


if __name__ == "__main__":
    main()
