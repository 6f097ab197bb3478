"""What drawing one step ahead saves: seconds of a step with ahead=0 and with ahead=1, in turn on the same pair of engines.

Blocks of steps in one process, ABBA; the first step of a block is left out (nothing has been drawn for it yet). Prints
medians of wall time from step to step, and the seconds of the rollout that ran beside the step before. `--sampler
vllm` needs WORKBENCH_VLLM_PYTHON; `--threads` are the learner's; a local sampler shares them.
"""

from __future__ import annotations

import argparse
import functools
import os
import time
from itertools import pairwise
from statistics import median
from typing import Any

import torch

import workbench as wb
from workbench.runs.loop import run_step
from workbench.steps.execute import Ahead


def block(
    pipe: Any, rows: Any, first: int, count: int, batch_size: int, ahead: bool
) -> tuple[list[float], list[float]]:
    """Seconds of each step but the first, and of rollout beside the step before."""
    at, overlapped, last = list[float](), list[float](), first + count - 1
    prompts = functools.partial(rows.batch, batch_size, seed=0)
    source = Ahead(pipe, lambda step: prompts(step=step), last=last) if ahead else None
    for step in range(first, last + 1):
        batch = prompts(step=step)
        trace = run_step(pipe, batch if source is None else source.take(batch))
        at.append(time.perf_counter())
        overlapped.append(trace.metrics.get("timing_s/overlapped", 0.0))
    return [b - a for a, b in pairwise(at)], overlapped[1:]


def main() -> None:
    """All blocks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sampler", choices=("local", "vllm"), default="local")
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--model", default="data/tiny-arith")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256)
    learner = wb.engines.local(asked.model, lr=1e-5)
    sampler: Any = wb.engines.local(asked.model)
    if asked.sampler == "vllm":
        sampler = wb.engines.vllm(asked.model, max_model_len=256)
    with wb.engines.paired(learner, sampler) as engine:
        reward = wb.rewards.Reward(lambda response: len(response) / 100, in_process=True)
        pipe = wb.recipes.with_rollout_correction(
            wb.recipes.grpo(engine, reward, group_size=8, max_tokens=64), "decoupled_token_is"
        )
        step, found = 1, {False: ([], []), True: ([], [])}  # type: dict[bool, tuple[list[float], list[float]]]
        block(pipe, rows, step, 2, 16, False)
        for pair in range(asked.pairs):
            for ahead in (False, True) if pair % 2 == 0 else (True, False):
                step += asked.steps + 1
                for whole, part in zip(found[ahead], block(pipe, rows, step, asked.steps + 1, 16, ahead), strict=True):
                    whole.extend(part)
        turns, beside = median(found[False][0]), median(found[True][0])
        print(f"{asked.sampler} sampler, {asked.threads} thread(s), load {os.getloadavg()[0]:.1f} of {os.cpu_count()}")
        print(f"ahead=0 {turns:.3f} s a step   ahead=1 {beside:.3f} s   ratio {beside / turns:.2f}")
        print(f"rollout beside the step before: {median(found[True][1]):.3f} s; {len(found[True][0])} steps each")


if __name__ == "__main__":
    main()
