"""A small training job that can be told to die: run by test_resume as a process of its own.

python resume_driver.py RUN STEPS [KILL]      KILL: step:3 | inside:4 | fsync:30 | rename:2
With AHEAD=1 in the environment rows are drawn one step ahead by a second engine. RECIPE is ppo, distill (the student itself, with a
hint, is the teacher), dpo or rft.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

import workbench as wb


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arm(kill: str) -> list[Any]:
    """Observers that kill us after a step; patches that kill us inside a checkpoint or a metrics write."""
    what, _, number = kill.partition(":")

    class AfterStep:
        def on_start(self, start: int, steps: int) -> None: ...

        def on_step(self, report: Any) -> None:
            if report.step == int(number):
                die()

        def on_end(self, error: BaseException | None) -> None: ...

    if what == "step":
        return [AfterStep()]
    if what in ("fsync", "rename"):  # the n-th: rows have an fsync each, checkpoints one for every file and a rename
        real, calls = getattr(os, what), []

        def dying(*args: Any, **options: Any) -> Any:
            calls.append(1)
            if len(calls) == int(number):
                die()
            return real(*args, **options)

        setattr(os, what, dying)
    if what == "inside":  # in the middle of the checkpoint of step n, when its weights are half of the files
        from workbench.engines import LocalEngine

        plain = LocalEngine.save_state

        def saving(self: Any, path: Path) -> None:
            if f"step_{int(number):06d}" in str(path):
                die()
            plain(self, path)

        LocalEngine.save_state = saving  # type: ignore[method-assign]
    return []


def pairs(rows: Any) -> Any:
    """Each row's solution against its beginning."""
    solved = [(row["prompt"], row["extra_info"]["answer"]) for row in rows]
    return wb.rows([{"prompt": chat, "chosen": text, "rejected": text[:6]} for chat, text in solved])


def main() -> None:
    run, steps, *kill = sys.argv[1:]
    torch.set_num_threads(1)
    engine = wb.engines.local("data/tiny-arith", lr=1e-3, schedule="cosine", total_steps=12, device="cpu")
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256, limit=10)
    eval_rows = wb.rows("data/arith/test.parquet", limit=8)
    ahead = int(os.environ.get("AHEAD", "0"))
    policy = wb.engines.paired(engine, wb.engines.local("data/tiny-arith", device="cpu")) if ahead else engine
    recipe, short = os.environ.get("RECIPE", "ppo"), {"ppo_mini_batch_size": 2}
    if recipe == "distill":
        how = {"hint": "extra_info.answer", "top_k": 8, "reward": wb.rewards.by_data_source(), "group_size": 2}
        pipe = wb.recipes.distill(engine, "self", max_tokens=16, **how, **short)
    elif recipe == "rft":
        how = {"k": 2, "above": 0.5, "group_size": 4}
        pipe = wb.recipes.rft(engine, wb.rewards.by_data_source(), max_tokens=16, **how, **short)
    elif recipe == "dpo":
        rows, eval_rows = pairs(rows), pairs(eval_rows)
        pipe = wb.recipes.dpo(engine, max_tokens=64, **short)
    else:
        how = {"group_size": 2, "kl_coef": 0.01, "kl_target": 0.05, "kl_horizon": 50, "critic_lr": 1e-3}
        pipe = wb.recipes.ppo(policy, max_tokens=16, **how, **short)
    wb.train_blocking(
        wb.recipes.with_rollout_correction(pipe, "decoupled_token_is") if ahead else pipe,
        rows,
        ahead=ahead,
        steps=int(steps),
        batch_size=4,
        run=run,
        eval_rows=eval_rows,
        test_freq=2,
        save_freq=2,
        trace_freq=1,
        keep_traces=100,
        resume="auto",
        observers=arm(kill[0]) if kill else [],
    )
    state = {**engine.snapshot()["weights"], **{f"o|{k}": v for k, v in engine.snapshot()["optimizer"].items()}}
    torch.save(state, Path(run) / "final.pt")


if __name__ == "__main__":
    main()
