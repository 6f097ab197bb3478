"""Systems other than Linux: macOS, as far as Linux without what macOS lacks can show it (`macos/`), and Windows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.patience import LONG

ROOT = Path(__file__).parents[1]
MACOS = """
import sys, matplotlib.figure, pandas, pyarrow.parquet, torch, transformers
from transformers.models.auto import modeling_auto
sys.platform = "darwin"
import workbench as wb
from workbench.base.files import memory_file
"""
ROAD = """
def short(solution_str, ground_truth, **_):
    return float(len(solution_str) < 20)

rows = wb.rows("data/arith/train.parquet", max_prompt_length=256)
pipe = wb.recipes.grpo(wb.engines.local("data/tiny-arith", lr=2e-4), reward=short, group_size=2, max_tokens=8)
stepper = wb.Stepper(pipe, rows.batch(2)).run(until="advantage")
wb.views.samples(stepper)._repr_html_()
again = stepper.fork().back(to="reward").run(until="advantage")
assert stepper.compare(again)
run = wb.train_blocking(pipe, rows, steps=2, batch_size=2, run=sys.argv[1], trace_freq=1)
assert 0.1 < run.metrics["perf/max_rss_gb"].iloc[-1] * 1024 < 100  # as bytes: Linux counts KiB
print(wb.diverge(run.stepper(2).run(), run.traces[2]))
"""
SANDBOX = """
with memory_file("workbench-test") as (file, path):
    file.write(b"some bytes")
    assert open(path, "rb").read() == b"some bytes" and not path.startswith("/proc")
assert not __import__("os").path.exists(path)
try:
    wb.sandbox.local(allow_unsafe=True)
except wb.WorkbenchError as error:
    print(error)
"""


def on_macos(program: str, *args: str) -> str:
    """What a program prints that runs on the simulated macOS."""
    path = os.pathsep.join([str(ROOT / "tests" / "macos"), str(ROOT)])
    env = {**os.environ, "PYTHONPATH": path, "MPLBACKEND": "agg", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", MACOS + program, *args]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=LONG)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
def test_macos_steps_compares_trains_and_replays(tmp_path: Path) -> None:
    assert "identical" in on_macos(ROAD, str(tmp_path / "run"))


def test_macos_has_files_for_other_processes_and_no_local_sandbox() -> None:
    refusal = on_macos(SANDBOX)
    assert "expected Linux" in refusal and "found darwin" in refusal and "sandbox.container()" in refusal


def test_windows_is_refused_before_anything_is_imported() -> None:
    program = "import sys; sys.platform = 'win32'; import workbench"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "Linux and macOS" in done.stderr and "WSL" in done.stderr
