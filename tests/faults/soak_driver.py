"""A run of some hundred quick steps: started, killed, interrupted and resumed by the soak test.

python soak_driver.py RUN STEPS SAVE_FREQ
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import workbench as wb


def main() -> None:
    run, steps, save_freq = sys.argv[1:]
    torch.set_num_threads(1)
    engine = wb.engines.local("data/tiny-arith", lr=1e-4, schedule="cosine", total_steps=int(steps), device="cpu")
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256, limit=30)
    pipe = wb.recipes.ppo(
        engine, group_size=2, max_tokens=6, kl_coef=0.01, kl_target=0.02, kl_horizon=100, critic_lr=1e-4
    )
    wb.train_blocking(
        pipe,
        rows,
        steps=int(steps),
        batch_size=4,
        run=run,
        save_freq=int(save_freq),
        trace_freq=0,
        resume="auto",
        trackers=(),
    )
    parts = {f"{role}|{part}|{name}": tensor for role, learner in pipe.learners().items()
             for part in ("weights", "optimizer") for name, tensor in learner.snapshot()[part].items()}  # fmt: skip
    torch.save(parts, Path(run) / "final.pt")


if __name__ == "__main__":
    main()
