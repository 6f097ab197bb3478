"""The engines on a real GPU, as `tests/benchmarks/gpu.py` measures them: figures that must hold wherever one is."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support.models import make_shaped_model

from workbench.engines.rehearsal import unmeasured
from workbench.engines.settings import LocalSettings

pytestmark = [pytest.mark.slow]
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: torch.cuda finds none here")


def benchmark() -> ModuleType:
    path = Path(__file__).parents[1] / "benchmarks" / "gpu.py"
    spec = importlib.util.spec_from_file_location("workbench_gpu_benchmark", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def lines(shape: str, device: str, tmp_path: Path, **changes: Any) -> dict[str, Any]:
    gpu = benchmark()
    work = gpu.Work(shape=shape, device=device, **changes)
    folder = make_shaped_model(tmp_path / "model", shape)
    return {line.what: line for line in gpu.local_lines(work, folder, {})}


def test_the_measurements_themselves_run_on_a_cpu(tmp_path: Path) -> None:
    found = lines("tiny", "cpu", tmp_path, rows=4, prompt=8, response=8, repeats=1)
    assert list(found) == [
        "local: sampling",
        "local: log-probs",
        "local: log-probs, sampler to trainer",
        "local: update",
    ]
    update = found["local: update"]
    assert update.rate == pytest.approx(4 * 16 / update.seconds) and update.memory > 50 << 20
    equal = [line.what for line in benchmark().equality("cpu")]
    assert equal == [f"tiny shape, {dtype} on cpu to float32 on the CPU" for dtype in ("float32", "bfloat16")]


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_the_local_engine_and_the_plain_loop_do_the_same_work(lora_rank: int, tmp_path: Path) -> None:
    if lora_rank:
        pytest.importorskip("peft")
    gpu = benchmark()
    work = gpu.Work(shape="tiny", device="cpu", rows=6, prompt=8, response=8, micro_batch_tokens=32, repeats=1)
    folder = make_shaped_model(tmp_path / "model", "tiny")
    # it compares their gradients itself; adapters start at random
    theirs, ours = gpu.plain_lines(work, folder, lora_rank=lora_rank, checkpointing=bool(lora_rank))
    assert ours.note == f"{theirs.seconds / ours.seconds:.2f} times as fast as the plain loop"
    assert theirs.what.startswith("tiny LoRA 4" if lora_rank else "tiny full")


@on_gpu
@pytest.mark.parametrize("shape", ["0.5b", "7b"])
def test_the_local_engine_is_as_fast_as_a_plain_loop(shape: str, tmp_path: Path) -> None:
    gpu = benchmark()
    work = gpu.Work(shape=shape, rows=64, prompt=256, response=256)
    if shape == "7b":
        pytest.importorskip("peft")
        *_, ours = gpu.large_lines(work, tmp_path)
    else:
        *_, ours = gpu.plain_lines(work, make_shaped_model(tmp_path / "model", shape))
    assert float(ours.note.split()[0]) >= 0.95, ours


@on_gpu
def test_log_probs_on_the_gpu_are_those_of_the_cpu() -> None:
    assert len(list(benchmark().equality("cuda"))) == 2  # asserts the gap in float32 itself


@on_gpu
def test_a_half_billion_shape_samples_scores_and_learns_on_one_gpu(tmp_path: Path) -> None:
    found = lines("0.5b", "cuda", tmp_path, rows=64, prompt=128, response=64, repeats=1)
    update = found["local: update"]
    settings = LocalSettings(dtype="bfloat16", micro_batch_tokens=16_384)
    expected = unmeasured(tmp_path / "model", settings, 64 * (128 + 64), "cuda").learning
    assert 0.8 * expected < update.memory < 1.05 * expected, (update, expected)  # an H200 took 0.93 to 0.95 of it
    assert found["local: log-probs"].rate > found["local: sampling"].rate > 0
