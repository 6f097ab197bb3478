"""What a stream of rollouts saves where a few answers take very long: the same training in turn, with ahead=1 and with max_lag=k.

Rewards are real waits, as of a judge or of tests that are run: lognormal seconds per row, drawn by its uid and number, so that all
ways wait equally long for the same rows. Prints a row per way and seed, then medians: wall seconds of the training (validation
aside), the mean reward by quarters of the steps, held-out reward after the last, and how old the rows were.
`tests/benchmarks/README.md` has the last table, with date and machine.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

import workbench as wb
from workbench.rewards import Reward

WAYS: dict[str, dict[str, Any]] = {
    "in turn": {},
    "ahead=1": {"ahead": 1},
    **{f"max_lag={k}": {"max_lag": k} for k in (1, 2, 4)},
    "max_lag=1, cancel": {"max_lag": 1, "stale": "cancel"},
}


def waiting(middle: float, sigma: float, held: set[str]) -> Reward:
    """1 for the right number in the last line; the answer takes lognormal seconds, none for held-out rows."""

    async def judged(response: str, ground_truth: Any, uid: str) -> float:
        if uid not in held:
            await asyncio.sleep(random.Random(f"{uid} {response}").lognormvariate(0.0, sigma) * middle)
        found = "".join(letter if letter.isdigit() else " " for letter in response).split()
        return float(bool(found) and found[-1] == str(ground_truth))

    return Reward(judged, in_process=True, timeout=600)


def measure(seed: int, way: str, asked: Any, folder: Path) -> dict[str, Any]:
    """One training."""
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256)
    held = wb.rows("data/arith/test.parquet", max_prompt_length=256, limit=256)
    uids = {uid for batch in held.in_order(64, seed=seed) for uid in batch["uid"]}
    learner = wb.engines.local("data/tiny-arith", lr=asked.lr)
    pair = wb.engines.paired(learner, wb.engines.local("data/tiny-arith"))
    pipe = wb.recipes.grpo(pair, waiting(asked.middle, asked.sigma, uids), group_size=asked.group, max_tokens=64)
    pipe = wb.recipes.with_rollout_correction(pipe, "decoupled_token_is")
    told: dict[str, Any] = {
        "steps": asked.steps,
        "batch_size": asked.batch,
        "seed": seed,
        "trackers": (),
        "trace_freq": 0,
    }
    path = folder / f"{way}-{seed}"
    run = wb.train_blocking(pipe, rows, run=path, eval_rows=held, **told, **WAYS[way])
    taken = run.rows[1:]
    means = [row["critic/score/mean"] for row in taken]
    quarter = max(len(means) // 4, 1)
    return {
        "seconds": sum(row["timing_s/step"] for row in taken),
        "curve": [fmean(means[at : at + quarter]) for at in range(0, len(means), quarter)][:4],
        "held": taken[-1]["val/reward"],
        "lag": fmean(row["training/policy_lag/mean"] for row in taken),
        "oldest": max(row["training/policy_lag/max"] for row in taken),
        "cancelled": sum(row.get("streaming/cancelled", 0) for row in taken),
    }


def shown(way: str, seed: Any, one: dict[str, Any]) -> str:
    """A row of the table."""
    curve = " → ".join(f"{value:.2f}" for value in one["curve"])
    lags = f"{one['lag']:.2f}, {one['oldest']:.0f}"
    return f"| {way} | {seed} | {one['seconds']:.0f} | {curve} | {one['held']:.3f} | {lags} | {one['cancelled']:.0f} |"


def main() -> None:
    """All ways and seeds, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--ways", nargs="+", default=[*WAYS])
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--middle", type=float, default=0.4, help="median of a row's wait, seconds")
    parser.add_argument("--sigma", type=float, default=1.25)
    parser.add_argument("--lr", type=float, default=3e-4)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    print("| way | seed | s | reward by quarters of the steps | held out | lag mean, max | cancelled |")
    print("|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for way in asked.ways:
            found = [measure(seed, way, asked, Path(folder)) for seed in asked.seeds]
            for seed, one in zip(asked.seeds, found, strict=True):
                print(shown(way, seed, one), flush=True)
            middle = {key: median(one[key] for one in found) for key in found[0] if key != "curve"}
            middle["curve"] = [median(each) for each in zip(*(one["curve"] for one in found), strict=True)]
            print(shown(way, "median", middle), flush=True)


if __name__ == "__main__":
    main()
