"""Record one batch of the tiny world, up to its advantages: what notebook 103 compares algorithms on.

python data/make_batch.py        writes data/arith-batch/ (a Trace, about 150 kB)
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

import workbench as wb

OUT = Path(__file__).with_name("arith-batch")


def main() -> None:
    """Eight prompts, eight samples each, from the model as it is committed."""
    torch.set_num_threads(1)
    engine = wb.engines.local("data/tiny-arith", device="cpu")
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256)
    pipe = wb.recipes.grpo(engine, group_size=8, kl_coef=0.001, max_tokens=64)
    pipe = pipe.replace("old_log_prob", wb.stages.LogProb(engine, entropy=True, sum_pi_squared=True))
    trace = wb.Stepper(pipe, rows.batch(8, step=4)).run(until="advantage").trace
    shutil.rmtree(OUT, ignore_errors=True)
    trace.save(OUT)
    size = sum(path.stat().st_size for path in OUT.rglob("*") if path.is_file())
    print(
        f"{OUT}: {len(trace.batch)} rows, mean reward {float(trace.batch['reward'].mean()):.3f}, {size / 1000:.0f} kB"
    )


if __name__ == "__main__":
    main()
