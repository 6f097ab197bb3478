"""The first day's checks (`tests/benchmarks/gpu_first_day.py`): on a GPU all of them, on a CPU their rehearsal."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from support.models import make_shaped_model

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
    ended = module.carried_out(day, CHECKS)
    assert "FAILED" not in ended.values(), ended


def test_a_check_that_hangs_or_ends_its_process_loses_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, lines = first_day(), list[str]()
    script = tmp_path / "child.py"
    script.write_text(
        "import os, sys, time\n"
        "for name in sys.argv[2:]:\n"
        "    print('begin', name, flush=True)\n"
        "    time.sleep(60) if name == 'decodes' else os._exit(3) if name == 'groups' else print('fact', flush=True)\n"
        "    print('end', name, 'holds', flush=True)\n"
    )
    monkeypatch.setattr(module, "DEADLINE", 1.0)
    monkeypatch.setattr(module, "DEADLINES", {})
    ended = module.watched([sys.executable, str(script)], CHECKS[:5], 60.0, lines.append)
    assert [how.split(":")[0] for how in ended.values()] == ["holds", "FAILED", "FAILED", "holds", "holds"]
    assert "(3)" in ended["groups"] and lines.count("fact") == 3
    assert set(module.watched(["false"], CHECKS[:2], -1.0, lines.append).values()) == {"left out: no time"}


@on_gpu
@pytest.mark.parametrize("name", CHECKS)
def test_a_check_holds_on_this_gpu(name: str, tmp_path: Path) -> None:
    module = first_day()
    day = module.Day(make_shaped_model(tmp_path / "model", "0.5b", device="cuda"))
    assert list(module.CHECKS[name](day))
