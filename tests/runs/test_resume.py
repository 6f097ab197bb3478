"""A job killed with SIGKILL and resumed is, from there on, the job that was never killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.patience import LONG

import workbench as wb
from workbench.base.errors import RunError
from workbench.runs.folder import read_metrics

DRIVER = Path(__file__).with_name("resume_driver.py")
STEPS = 5


def drive(run: Path, kill: str | None = None, steps: int = STEPS, ahead: int = 0, recipe: str = "ppo") -> int:
    command = [sys.executable, str(DRIVER), str(run), str(steps), *([kill] if kill else [])]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "AHEAD": str(ahead), "RECIPE": recipe}
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONG, check=False, env=env)
    assert done.returncode in (0, -9), done.stderr
    return done.returncode


def numbers(run: Path) -> list[dict[str, Any]]:
    """Metrics rows, timings and speeds aside."""
    skip = ("timing_", "perf/")
    return [{k: v for k, v in row.items() if not k.startswith(skip)} for row in read_metrics(run / "metrics.jsonl")]


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("quiet") / "run"
    assert drive(run) == 0
    return run


@pytest.fixture(scope="module")
def quiet_ahead(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("quiet-ahead") / "run"
    assert drive(run, ahead=1) == 0
    return run


def long(*kills: str) -> list[Any]:
    """Moments of a kill that are tried in `make test-all`."""
    return [pytest.param(kill, marks=pytest.mark.long) for kill in kills]


@pytest.mark.slow
@pytest.mark.parametrize("kill", ["inside:4", *long("step:1", "step:3", "rename:2", "fsync:40")])
def test_rows_drawn_ahead_survive_a_kill(quiet_ahead: Path, tmp_path: Path, kill: str) -> None:
    run = tmp_path / "run"
    assert drive(run, kill, ahead=1) == -9
    assert drive(run, ahead=1) == 0
    assert numbers(run) == numbers(quiet_ahead)
    finals = [torch.load(one / "final.pt", weights_only=True) for one in (run, quiet_ahead)]
    assert all(torch.equal(finals[0][k], finals[1][k]) for k in finals[1])
    lags = [row["training/policy_lag/max"] for row in numbers(run)[1:]]
    assert lags == [0, *[1] * (STEPS - 1)]
    for step in range(1, STEPS + 1):
        a, b = (wb.load_run(one).traces[step].batch for one in (run, quiet_ahead))
        assert torch.equal(a["responses"], b["responses"]) and torch.equal(a["policy_version"], b["policy_version"])


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("recipe", ["distill", "dpo", "rft"])
def test_a_teacher_and_pairs_survive_a_kill(tmp_path: Path, recipe: str) -> None:
    quiet = tmp_path / "quiet"
    assert drive(quiet, recipe=recipe) == 0
    for kill in ("step:3", "inside:4"):
        run = tmp_path / kill.replace(":", "_")
        assert drive(run, kill, recipe=recipe) == -9
        assert drive(run, recipe=recipe) == 0
        assert numbers(run) == numbers(quiet)
        finals = [torch.load(folder / "final.pt", weights_only=True) for folder in (run, quiet)]
        assert finals[0].keys() == finals[1].keys() and all(torch.equal(finals[0][k], finals[1][k]) for k in finals[0])
        assert wb.load_run(run).audit().agrees


@pytest.mark.slow
@pytest.mark.parametrize("kill", ["step:3", *long("inside:4", "step:1", "step:2", "rename:2", "fsync:30")])
def test_killed_and_resumed_is_identical(quiet: Path, tmp_path: Path, kill: str) -> None:
    run = tmp_path / "run"
    assert drive(run, kill) == -9
    assert len(read_metrics(run / "metrics.jsonl")) < STEPS + 1 and not (run / "summary.json").exists()
    assert drive(run) == 0
    assert numbers(run) == numbers(quiet)
    finals = torch.load(run / "final.pt", weights_only=True), torch.load(quiet / "final.pt", weights_only=True)
    assert finals[0].keys() == finals[1].keys() and all(torch.equal(finals[0][k], finals[1][k]) for k in finals[0])
    ours, theirs = wb.load_run(run), wb.load_run(quiet)
    assert list(ours.traces) == list(theirs.traces) == list(range(1, STEPS + 1))
    for step in (1, 4, STEPS):
        a, b = ours.traces[step].batch, theirs.traces[step].batch
        assert torch.equal(a["responses"], b["responses"]) and torch.equal(a["advantages"], b["advantages"])
    assert tensorboard(run) == tensorboard(quiet)
    assert not list((run / "checkpoints").glob(".staging*")) and not (run / "lock.json").exists()


def tensorboard(run: Path) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars("critic/score/mean")]


@pytest.mark.slow
@pytest.mark.long
def test_a_flipped_bit_falls_back_to_the_checkpoint_before(quiet: Path, tmp_path: Path) -> None:
    import shutil

    run = Path(shutil.copytree(quiet, tmp_path / "run"))
    newest = run / "checkpoints" / f"step_{STEPS:06d}" / "actor" / "model.safetensors"
    content = bytearray(newest.read_bytes())
    content[5000] ^= 4
    newest.write_bytes(bytes(content))
    with pytest.raises(RunError, match="model.safetensors.*crc32"):
        wb.load_run(run).checkpoint()
    assert drive(run) == 0
    aside = next((run / "superseded").iterdir())
    assert (aside / "checkpoints" / newest.parents[1].name).exists() and wb.load_run(run).checkpoint()
    assert numbers(run) == numbers(quiet)


@pytest.mark.slow
def test_nothing_left_to_do_and_more_to_do(quiet: Path, tmp_path: Path) -> None:
    import shutil

    run = Path(shutil.copytree(quiet, tmp_path / "run"))
    before = (run / "metrics.jsonl").read_text()
    assert drive(run) == 0 and (run / "metrics.jsonl").read_text() == before
    assert drive(run, steps=STEPS + 1) == 0
    assert [row["training/global_step"] for row in numbers(run)] == list(range(STEPS + 2))
    assert [step for step, _ in tensorboard(run)] == list(range(1, STEPS + 2))
    assert json.loads((run / "summary.json").read_text())["steps"] == STEPS + 1
