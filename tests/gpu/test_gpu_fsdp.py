"""Shards on real GPUs: one rank a GPU over NCCL, against the local engine on one of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from workbench.engines import local
from workbench.engines.fsdp_engine.engine import fsdp
from workbench.testing.engines import EngineContract, LikelihoodLoss

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("offload", ["none", "optimizer", "all"])
def test_shards_on_gpus_equal_the_local_engine(offload: str, tmp_path: Path) -> None:
    here = local("data/tiny-arith", dtype="float32", lr=1e-4)
    there = fsdp("data/tiny-arith", ranks=torch.cuda.device_count(), dtype="float32", lr=1e-4, offload=offload)
    try:
        batch = EngineContract().batch(here, 4)
        counts = EngineContract.counts(batch)
        gap = there.compute_log_probs(batch)["log_probs"] - here.compute_log_probs(batch)["log_probs"]
        assert gap.abs().max() < 1e-4
        for _ in range(2):
            a, b = (engine.learn(batch, LikelihoodLoss(), counts) for engine in (there, here))
            assert a.metrics["grad_norm"].result() == pytest.approx(b.metrics["grad_norm"].result(), rel=1e-4)
        kept = there.snapshot()
        there.learn(batch, LikelihoodLoss(), counts)
        there.restore(kept)
        there.save(tmp_path / "model")
        opened = local(tmp_path / "model", dtype="float32")
        assert (
            there.compute_log_probs(batch)["log_probs"] - opened.compute_log_probs(batch)["log_probs"]
        ).abs().max() < 1e-4
        assert all(one["peak"] > 0 for one in there.memory())
    finally:
        there.close()
