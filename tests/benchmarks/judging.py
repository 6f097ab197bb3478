"""How a judge learns to judge: GRPO of data/tiny-pair-judge on pairs of answers, three seeds, held-out pairs before and after.

The judge prefers what stands first. Prints a table: accuracy beside the constant predictor's half, the swap consistency and the share of
"A", greedy and sampled; then what a policy learns under the judge before and after (`--policy`).

    .venv/bin/python tests/benchmarks/judging.py [--steps 60] [--seeds 3] [--policy 40]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
from pydantic import BaseModel, Field

import workbench as wb


class Preference(BaseModel):
    """What the judge writes: data/make_judges.py has the same."""

    reason: str = Field(description="the sums")
    better: Literal["A", "B"] = Field(description="A or B")


JUDGE = wb.rewards.reasoning(Preference, template="{prompt}\nA: {answer_a}\nB: {answer_b}\n{instructions}")
SHOWN = ("accuracy", "swap consistency", "says the first")


def judge_of(engine: Any, temperature: float = 0.0) -> Any:
    """The engine as a judge."""
    return JUDGE.judge(
        wb.engines.chat(engine), temperature=temperature, max_tokens=64, attempts=1, on_failure="value=0"
    )


def figures(engine: Any, pairs: Any, temperature: float) -> dict[str, float]:
    """The main figures of a report, of one verdict for each order."""
    report = wb.rewards.judge_report(judge_of(engine, temperature), pairs, seeds=1)
    return {name: report.figures[name].value for name in SHOWN if name in report.figures}


def trained(seed: int, steps: int, folder: Path) -> tuple[Any, Any]:
    """(the trained engine, its run)."""
    engine = wb.engines.local("data/tiny-pair-judge", lr=1e-4)
    rows = JUDGE.rows(wb.datasets.samples("data/arith-pairs/train.parquet"), engine=engine)
    pipe = wb.recipes.grpo(engine, JUDGE.reward(), group_size=8, kl_coef=0.001, max_tokens=64, ppo_mini_batch_size=8)
    return engine, wb.train_blocking(pipe, rows, steps=steps, batch_size=16, seed=seed, run=folder / f"judge-{seed}")


def policy(engine: Any, steps: int, seed: int, folder: Path) -> tuple[Any, dict[str, float]]:
    """(run of a policy under this judge, its true held-out reward before and after)."""
    student = wb.engines.local("data/tiny-arith", lr=4e-5)
    rows, held = (wb.rows(f"data/arith/{name}.parquet", max_prompt_length=256) for name in ("train", "test"))

    def true() -> float:
        return wb.evaluate(student, held, limit=64, max_tokens=64).mean

    before = true()
    pipe = wb.recipes.grpo(student, judge_of(engine), group_size=4, kl_coef=0.001, max_tokens=64)
    run = wb.train_blocking(pipe, rows, steps=steps, batch_size=8, seed=seed, run=folder)
    return run, {"before": before, "after": true()}


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--policy", type=int, default=0, help="steps of a policy under the judge, before and after")
    options = parser.parse_args()
    torch.set_num_threads(2)
    held = wb.datasets.samples("data/arith-pairs/test.parquet")
    print("| seed | sampling | " + " | ".join(f"{name} before → after" for name in SHOWN) + " | s/step |")
    print("|---|---|" + "---|" * (len(SHOWN) + 1))
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(options.first, options.first + options.seeds):
            raw = wb.engines.local("data/tiny-pair-judge")
            engine, run = trained(seed, options.steps, Path(folder))
            seconds = median(row["timing_s/step"] for row in run.rows[1:])
            for name, temperature in (("greedy", 0.0), ("T = 1", 1.0)):
                before, after = (figures(one, held, temperature) for one in (raw, engine))
                cells = [f"{before[one]:.2f} → {after[one]:.2f}" for one in SHOWN]
                print(f"| {seed} | {name} | " + " | ".join(cells) + f" | {seconds:.2f} |", flush=True)
            if options.policy:
                for name, judge in (("untrained", raw), ("trained", engine)):
                    _, got = policy(judge, options.policy, seed, Path(folder) / f"{name}-{seed}")
                    print(
                        f"| {seed} | policy under the {name} judge: true reward | {got['before']:.2f} → {got['after']:.2f} |",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
