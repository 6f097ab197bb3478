"""A run of quick steps: started, and started again after each blow, by the soak test.

python soak_driver.py RUN STEPS SAVE_FREQ JUDGE RANKS
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
import zlib
from pathlib import Path
from typing import Any

import torch

import workbench as wb

SECONDS = 4.0
"""What a row's reward, and the judge's answer to a row, may take."""
SAVE_SECONDS = 60.0
"""What a save may take: a rank that is stopped in one is noticed after these, and by default after ten minutes."""


def digest(response: str) -> float:
    """Another reward for every other text: the tokens of all steps are in the metrics."""
    return zlib.crc32(response.encode()) % 997 / 997


class Tells:
    """Writes down which processes work for this one, after every step; a name beside the scratch folder."""

    def __init__(self, pool: wb.rewards.Reward, engine: Any) -> None:
        self._pool, self._engine, self._file = pool, engine, Path(os.environ["TMPDIR"]).with_name("pids")

    def on_start(self, start: int, steps: int) -> None: ...

    def on_step(self, report: Any) -> None:
        workers = [worker.pid for worker in self._pool._pool._workers] if self._pool._pool is not None else []
        ranks = [
            rank["pid"]
            for rank in getattr(getattr(getattr(self._engine, "learner", None), "_group", None), "workers", ())
        ]
        self._file.write_text(" ".join(map(str, [*workers, *ranks])))

    def on_end(self, error: BaseException | None) -> None: ...


def main() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it
    run, steps, save_freq, judge, ranks = sys.argv[1:]
    torch.set_num_threads(1)
    settings = {"lr": 1e-4, "schedule": "cosine", "total_steps": 500, "device": "cpu"}
    model = "data/tiny-arith"
    engine: Any = wb.engines.local(model, **settings)
    if int(ranks):
        learner = wb.engines.fsdp(model, ranks=int(ranks), threads=1, save_deadline=SAVE_SECONDS, **settings)
        engine = wb.engines.paired(learner, engine)
    service = wb.engines.classify(judge, "judge", attempts=4, timeout=1.0, deadline=SECONDS)
    pool = wb.rewards.Reward(digest, workers=2, timeout=SECONDS, on_failure="retry(1)")
    parts = {
        "digest": pool,
        "judge": wb.rewards.RewardModel(service, template="question_answer"),
    }
    reward = wb.rewards.Rubric(parts, on_failure="raise")
    pipe = wb.recipes.ppo(
        engine, reward, group_size=2, max_tokens=6, kl_coef=0.01, kl_target=0.02, kl_horizon=100, critic_lr=1e-4
    )
    wb.train_blocking(
        pipe,
        wb.rows("data/arith/train.parquet", max_prompt_length=256, limit=30),
        steps=int(steps),
        batch_size=4,
        run=run,
        save_freq=int(save_freq),
        trace_freq=2,
        keep_traces=20,
        resume="auto",
        trackers=(),
        observers=[Tells(pool, engine)],
    )


if __name__ == "__main__":
    try:
        main()
    except Exception as error:  # noqa: BLE001 - whatever it is, the test looks at its kind
        traceback.print_exc()
        words = " ".join(str(error).split())
        sys.exit(f"ENDED {type(error).__module__}.{type(error).__name__}: {words}")
