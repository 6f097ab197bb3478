"""The first day's checks (`tests/benchmarks/gpu_first_day.py`): on a GPU all of them, on a CPU their rehearsal."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from workbench.testing.models import make_shaped_model

PLACE = Path(__file__).parents[1] / "benchmarks" / "gpu_first_day.py"
CHECKS = (
    "learns", "decodes", "groups", "out_of_memory", "adapters", "bandwidth", "shared", "push", "flash", "gsm8k",
)  # fmt: skip
pytestmark = [pytest.mark.slow]
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: torch.cuda finds none here")


def first_day() -> ModuleType:
    spec = importlib.util.spec_from_file_location("workbench_gpu_first_day", PLACE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["groups", "out_of_memory", "flash"])
def test_a_check_runs_on_a_cpu_with_a_tiny_model(name: str, tmp_path: Path) -> None:
    module = first_day()
    assert tuple(module.CHECKS) == CHECKS
    day = module.rehearsal(make_shaped_model(tmp_path / "model", "tiny"))
    assert list(module.CHECKS[name](day))


@pytest.mark.long
def test_the_whole_day_is_rehearsed_on_a_cpu(tmp_path: Path) -> None:
    module = first_day()
    day = module.rehearsal(make_shaped_model(tmp_path / "model", "tiny"))
    ended = module.carried_out(day, CHECKS, 600.0)
    assert "FAILED" not in ended.values(), ended


@on_gpu
@pytest.mark.parametrize("name", CHECKS)
def test_a_check_holds_on_this_gpu(name: str, tmp_path: Path) -> None:
    module = first_day()
    day = module.Day(make_shaped_model(tmp_path / "model", "0.5b", device="cuda"))
    assert list(module.CHECKS[name](day))
