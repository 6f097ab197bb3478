"""What recording everything costs: the main job with every step's update and trace kept, beside the same without.

Pairs in one run, in turn ABBA; medians. Prints the share of the job's time that went into recording, measured inside the
recording runs, and the ratio of the paired times; `tests/benchmarks/README.md` has the last figures.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

import workbench as wb
from workbench.runs import updates
from workbench.steps.trace import Trace

EVERYTHING: dict[str, Any] = {"keep_updates": 1024, "trace_freq": 1, "keep_traces": 1000}
NOTHING: dict[str, Any] = {"keep_updates": 0, "trace_freq": 0}


def timed(owner: Any, name: str, spent: list[float]) -> None:
    """Let a function add its seconds to `spent`."""
    plain = getattr(owner, name)

    def counting(*args: Any, **options: Any) -> Any:
        began = time.perf_counter()
        try:
            return plain(*args, **options)
        finally:
            spent.append(time.perf_counter() - began)

    setattr(owner, name, counting)


def job(steps: int, folder: Path, recording: dict[str, Any]) -> tuple[float, int]:
    """(seconds in all steps and between them, bytes on disk) of notebook 201's job."""
    engine = wb.engines.local("data/tiny-arith", lr=4e-5)
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256)
    pipe = wb.recipes.grpo(engine, group_size=8, kl_coef=0.001, max_tokens=64, ppo_mini_batch_size=1)
    wb.train_blocking(pipe, rows, steps=1, batch_size=16, run=folder / "warm", **NOTHING)
    engine = wb.engines.local("data/tiny-arith", lr=4e-5)
    pipe = wb.recipes.grpo(engine, group_size=8, kl_coef=0.001, max_tokens=64, ppo_mini_batch_size=1)
    began = time.perf_counter()
    wb.train_blocking(pipe, rows, steps=steps, batch_size=16, run=folder / "run", **recording)
    seconds = time.perf_counter() - began
    kept = [folder / "run" / name for name in ("updates", "traces")]
    size = sum(path.stat().st_size for one in kept for path in one.rglob("*") if path.is_file())
    return seconds, size


def main() -> None:
    """All pairs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    spent: list[float] = []
    for owner, name in ((updates, "write"), (updates, "prune"), (Trace, "save")):
        timed(owner, name, spent)
    shares, ratios, sizes = [], [], []
    for pair in range(options.pairs):
        seconds = {}
        for kind in ("with", "without") if pair % 2 else ("without", "with"):
            with tempfile.TemporaryDirectory() as folder:
                spent.clear()
                seconds[kind], size = job(options.steps, Path(folder), EVERYTHING if kind == "with" else NOTHING)
                if kind == "with":
                    shares.append(sum(spent) / seconds[kind])
                    sizes.append(size / options.steps)
        ratios.append(seconds["with"] / seconds["without"])
        print(
            f"pair {pair}: {seconds['without']:.2f} s without, {seconds['with']:.2f} s with, {shares[-1]:.2%} recording"
        )
    print(f"median of {options.pairs} pairs of {options.steps} steps, {options.threads} threads:")
    print(f"  recording {median(shares):.2%} of the job's time, with/without {median(ratios):.3f}")
    print(f"  {median(sizes) / 2**20:.2f} MiB a step on disk (update and trace)")


if __name__ == "__main__":
    main()
