"""`make real`: notebook 111 as a job, and what is said where there is no model."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_notebooks import SMALL

import workbench as wb
from workbench import cli

ROOT = Path(__file__).parents[2]


def make(**variables: Any) -> list[list[str]]:
    """Arguments of the two commands of `make real`: the check for the model, and the job; nothing is done."""
    given = [f"{name}={value}" for name, value in variables.items()]
    command = ["make", "-n", "-o", ".venv/.ready", "real", *given]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [shlex.split(line)[1:] for line in done.stdout.splitlines() if "bin/" in line]


def check(model: str) -> subprocess.CompletedProcess[str]:
    """Look for a model as `make real` does."""
    command = [sys.executable, "tools/real_model.py", "--check", model]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_command_is_the_notebook_as_a_job(tmp_path: Path) -> None:
    values = {**SMALL["111_real_model"], "run": tmp_path / "run"}
    small = shlex.join(word for name, value in values.items() for word in ("-p", f"{name}={value}"))
    looked, job = make(MODEL="data/tiny-arith", ARGS=small)
    assert looked == ["tools/real_model.py", "--check", "data/tiny-arith"] and job[0] == "train"
    assert cli.main(job) == 0
    run = wb.load_run(tmp_path / "run")
    assert run.summary["steps"] == 3 and "val/reward" in run.metrics and run.checkpoints


def test_without_a_folder_it_takes_the_model_of_the_hub() -> None:
    looked, job = make()
    assert looked[-1] == "HuggingFaceTB/SmolLM2-135M-Instruct" and f"model={looked[-1]}" in job


@pytest.mark.slow
def test_where_there_is_no_model_the_ways_to_one_are_said(tmp_path: Path) -> None:
    assert check("data/tiny-arith").returncode == 0
    done = check(str(tmp_path / "absent"))
    assert done.returncode == 1 and "no model at" in done.stderr
    assert all(way in done.stderr for way in ("hf download", "MODEL=folder", "tools/real_model.py folder"))
