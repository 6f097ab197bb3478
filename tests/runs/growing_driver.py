"""A small job on growing, adaptive data that can be told to die: run by test_growing as a process of its own.

python growing_driver.py RUN STEPS [KILL]      KILL: as in resume_driver, or line:4 (within the 4th write of a learned line)
"""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

import torch
from resume_driver import arm, die

import workbench as wb
from workbench.datasets import feedback


def reward(response: str, **_: Any) -> dict[str, Any]:
    """Right by its letters; of every third response a new question comes."""
    number = sum(map(ord, response)) % 7
    new = {"prompt": f"{number} + {len(response)} =", "reward_model": {"ground_truth": str(number + len(response))}}
    return {"score": number / 6, "new_row": new if number % 3 == 0 else None}


def in_the_middle_of(line: int) -> None:
    """Kill us when half of the bytes of this write are in the file."""
    calls = []

    def dying(handle: int) -> None:
        calls.append(1)
        if len(calls) == line:
            os.ftruncate(handle, os.fstat(handle).st_size - 20)
            die()
        os.fsync(handle)

    feedback.os = SimpleNamespace(fsync=dying)  # type: ignore[assignment]


def main() -> None:
    run, steps, *kill = sys.argv[1:]
    torch.set_num_threads(1)
    reward.in_process = True  # type: ignore[attr-defined]
    engine = wb.engines.local("data/tiny-arith", lr=1e-3, device="cpu")
    data = wb.rows("data/arith/train.parquet", max_prompt_length=256, limit=60)
    mixed = wb.datasets.mix({"few": data[:6], "many": data[6:30]}, weights=[1, 2])
    staged = wb.datasets.stages([(mixed, 3), (data[30:60], None)])
    rows = wb.datasets.adaptive(wb.datasets.growing(staged, max_rows=12), low=0.2, high=0.8)
    observers = []
    if kill and kill[0].startswith("line:"):
        in_the_middle_of(int(kill[0].partition(":")[2]))
    elif kill:
        observers = arm(kill[0])
    pipeline = wb.recipes.grpo(engine, reward, group_size=2, max_tokens=8)
    settings: dict[str, Any] = {"batch_size": 4, "save_freq": 2, "trace_freq": 1, "keep_traces": 100, "trackers": []}
    wb.train_blocking(pipeline, rows, steps=int(steps), run=run, resume="auto", observers=observers, **settings)


if __name__ == "__main__":
    main()
