"""`fits` beside what a learner really takes: the peak of each rank's process over two steps, full and with an adapter, with
layers recomputed or not, on one and two ranks.

`fits` counts tensors. glibc's heap keeps what it is given back, in pieces, and takes up to two fifths more than they need; so the
ranks get blocks from 1 MiB on from the system, and give them back (`MALLOC_MMAP_THRESHOLD_`), but with `--heap`.

    .venv/bin/python tests/benchmarks/fitting.py [shape] [length] [rows] [--heap]
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from workbench.cluster import fits
from workbench.dataproto import DataProto
from workbench.engines.fsdp_engine.engine import fsdp
from workbench.engines.fsdp_engine.group import local_group
from workbench.engines.protocol import LossCounts
from workbench.testing.engines import LikelihoodLoss
from workbench.testing.models import make_shaped_model

CASES: dict[str, dict[str, Any]] = {
    "full, 1 rank": {"ranks": 1},
    "full, 2 ranks": {"ranks": 2},
    "recomputed, 2 ranks": {"ranks": 2, "gradient_checkpointing": True},
    "adapter, 2 ranks": {"ranks": 2, "lora_rank": 16},
    "adapter, recomputed, 1 rank": {"ranks": 1, "lora_rank": 16, "gradient_checkpointing": True},
}


def peak(pid: int) -> int:
    """The most bytes that a process has had in memory."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))


def rows_of(count: int, length: int) -> DataProto:
    """Rows of random tokens, a quarter of them response."""
    ids, start = torch.randint(5, 60, (count, length), generator=torch.Generator().manual_seed(0)), length * 3 // 4
    ones = torch.ones_like(ids)
    columns = {"input_ids": ids, "attention_mask": ones, "position_ids": torch.arange(length).repeat(count, 1)}
    return DataProto.from_dict({**columns, "responses": ids[:, start:], "response_mask": ones[:, start:]})


EXACT = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}


def measured(folder: Path, length: int, rows: int, env: Any = None, *, ranks: int, **settings: Any) -> tuple[int, int]:
    """(bytes that `fits` says, bytes that the fullest rank took) with micro-batches of `rows`, two a rank."""
    settings["micro_batch_tokens"] = rows * length
    said = fits(folder, tokens=length, memory=1 << 40, sampler=None, reference=False, ranks=ranks, **settings)
    group = local_group(ranks, threads=1, env=env)
    engine = fsdp(folder, on=group, self_check=False, check_memory=False, **settings)
    try:
        batch = rows_of(2 * rows * ranks, length)
        for _ in range(2):
            engine.learn(batch, LikelihoodLoss(), LossCounts(1.0, 1.0))
        return said.needed, max(peak(worker["pid"]) for worker in group.workers)
    finally:
        engine.close()


def lines(env: Any, shape: str, length: int, rows: int) -> Iterator[str]:
    """One line for each case."""
    with tempfile.TemporaryDirectory() as folder:
        model = make_shaped_model(Path(folder) / shape, shape)
        for name, settings in CASES.items():
            said, took = measured(model, length, rows, env, **settings)
            yield f"{name:<28} said {said / 2**20:8.0f} MiB   took {took / 2**20:8.0f} MiB   {said / took - 1:+.1%}"


if __name__ == "__main__":
    asked = [one for one in sys.argv[1:] if one != "--heap"] or ["60m", "128", "4"]
    for line in lines(None if "--heap" in sys.argv else EXACT, asked[0], *map(int, asked[1:])):
        print(line, flush=True)
