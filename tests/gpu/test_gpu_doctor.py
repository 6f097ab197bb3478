"""The doctor on a real GPU: nothing is wrong, and what only a GPU has was looked at."""

from __future__ import annotations

import pytest
import torch

from workbench.jobs.doctor import doctor

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def test_nothing_is_wrong_and_the_gpu_was_looked_at() -> None:
    found = doctor(without=["ray"])
    assert found, repr(found)
    assert torch.cuda.get_device_name(0) in found["devices"].found
    assert "flash" in found["attention"].found and found["attention"].state == "ok"
    assert "nccl" in found["collectives"].found and "the GPU" in found["step"].found
    assert "from the CPU's" in found["numbers"].found and "GPUs" in found["shards"].found
    assert found["vllm"].state == "skipped" or "sleep freed" in found["vllm"].found
