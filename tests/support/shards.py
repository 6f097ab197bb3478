"""What tests of sharded engines share: rows, counts, and a disk that is slow when we say so."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from workbench.dataproto import DataProto
from workbench.engines import LossCounts, local
from workbench.engines.local_engine.states import write_whole
from workbench.testing.engines import EngineContract


def eleven_rows() -> DataProto:
    """Eleven rows of the tiny model, of different lengths, with what a policy loss reads."""
    engine = local("data/tiny-arith", device="cpu")
    rows = EngineContract().batch(engine, 4).slice(0, 11)
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randn(rows["response_mask"].shape, generator=generator)
    old = engine.compute_log_probs(rows)["log_probs"]
    mask = rows["response_mask"]
    return rows.with_columns(
        {
            "advantages": drawn * mask,
            "old_log_probs": old + 0.1 * drawn.flip(0) * mask,
            "scored": torch.ones(len(rows), dtype=torch.bool),
        }
    )


def counts(batch: DataProto) -> LossCounts:
    return LossCounts(float(batch["response_mask"].sum()), float(len(batch)), float(batch["response_mask"].shape[1]))


def difference(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> float:
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def relative(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> float:
    """The largest difference of a tensor of `a` from that of `b`, both as norms: a sum that is missing, or made twice, is 0.3 or more."""
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).norm() / b[name].norm().clamp(min=1e-6)) for name in b)


def steady(engine: Any, model: Path, folder: Path) -> None:
    """Load second moments of 1, as after many steps: AdamW's step is then proportional to the gradient.

    A first step is lr·sign of the gradient, also of one that is 0 but for rounding: of weights of which the loss does not
    depend (biases of keys that are not rotated), and of one weight in some thousands by chance.
    """
    tensors = {}
    for name, one in engine.full_weights().items():
        moments = {"exp_avg": torch.zeros_like(one), "exp_avg_sq": torch.ones_like(one), "step": torch.tensor(1e6)}
        tensors |= {f"{name}|{kind}": value for kind, value in moments.items()}
    write_whole(folder, tensors, {"version": 0, "steps": 1})
    engine.load_state(model, folder)


SLOW = """
import os, time
_fsync = os.fsync
def fsync(handle):
    while os.path.exists(os.path.join({folder!r}, f"stall-{{os.getpid()}}")):
        time.sleep(0.01)
    _fsync(handle)
os.fsync = fsync
"""


class Disk:
    """A disk that is slow for whom we say: a worker's `os.fsync` waits while there is a file `stall-<its pid>`.

    Workers started with `env` have it patched by a `sitecustomize` on their path.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "site").mkdir()
        (folder / "site" / "sitecustomize.py").write_text(SLOW.format(folder=str(folder)))
        path = os.pathsep.join([str(folder / "site"), *(entry or os.getcwd() for entry in sys.path)])
        self.env = {"PYTHONPATH": path}

    def stall(self, pid: int) -> None:
        (self.folder / f"stall-{pid}").touch()

    def go(self) -> None:
        for file in self.folder.glob("stall-*"):
            file.unlink()
