"""Folders that 0.12.0 wrote are opened, done again and gone on with, and say what 0.12.0 said of them (README.md here)."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.recorded import (
    OUT,
    PIPELINES,
    STEPS,
    kept,
    of_batch,
    of_pins,
    of_trace,
    opened,
    replayed,
    resumed,
)

import workbench as wb

ROOT = Path(__file__).parents[2]
OTHERWISE = ("val/reward_low", "val/reward_high")
"""Metrics whose formula has changed since 0.12.0: the interval of held-out rewards. They are not compared."""


def measured(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics that mean the same as in 0.12.0."""
    return {name: one for name, one in metrics.items() if name not in OTHERWISE}


@functools.cache
def elsewhere() -> bool:
    """Whether this machine's kernels sum in another order than those that recorded: a recorded step's log-probs tell by their
    last digits. Such a machine may sample another token where a draw lies at an edge, so its numbers are compared nearly."""
    run, step = wb.load_run(OUT / "grpo"), STEPS["grpo"]
    again = run.stepper(step, at="old_log_prob").run(until="old_log_prob").batch
    return not torch.equal(again["old_log_probs"], run.traces[step].batch["old_log_probs"])


def differing(found: Any, said: Any, place: str = "", near: float = 1e-6) -> list[str]:
    """Where two say different things; numbers may differ by `near`, relative or absolute."""
    if isinstance(found, Mapping) and isinstance(said, Mapping):
        gone = [f"{place}/{name}: gone" for name in said if name not in found]
        new = [f"{place}/{name}: new" for name in found if name not in said]
        both = (differing(found[name], value, f"{place}/{name}", near) for name, value in said.items() if name in found)
        return [*gone, *new, *(one for each in both for one in each)]
    if isinstance(found, list | tuple) and isinstance(said, list) and len(found) == len(said):
        pairs = enumerate(zip(found, said, strict=True))
        return [one for number, (a, b) in pairs for one in differing(a, b, f"{place}[{number}]", near)]
    if isinstance(said, int | float) and isinstance(found, int | float) and not isinstance(said, bool):
        return [] if found == pytest.approx(said, rel=near, abs=near) else [f"{place}: {said} → {found}"]
    return [] if found == said else [f"{place}: {said} → {found}"]


def said_of(name: str) -> Any:
    return json.loads((ROOT / OUT / "expected" / f"{name}.json").read_text())


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A recorded run, where it may be written to."""
    return Path(shutil.copytree(ROOT / OUT / request.param, tmp_path / request.param))


runs = pytest.mark.parametrize("folder", list(PIPELINES), indirect=True)


# --- the folders ------------------------------------------------------------------------------------


@pytest.mark.slow
@runs
def test_a_run_is_opened(folder: Path) -> None:
    assert differing(opened(folder), said_of(folder.name)["opened"]) == []
    run = wb.load_run(folder)
    assert folder.name in repr(run) and repr(run.traces) and run.curves() is not None
    for step in run.checkpoints:
        assert run.checkpoint(step).is_dir()


@pytest.mark.slow
@runs
def test_a_recorded_step_is_done_again(folder: Path) -> None:
    """Elsewhere from the recorded responses on, and nearly."""
    found = replayed(folder, STEPS[folder.name], at="reward" if elsewhere() else None)
    said = said_of(folder.name)["replayed"]
    found["columns"].pop("new_log_probs/1", None)  # of each pass before the last, since 0.16
    if elsewhere():  # where a gradient is all but 0 Adam's step takes its sign from the last digits
        assert set(found.pop("weights")) == set(said.pop("weights"))
    parted = differing(found, said, near=1e-2 if elsewhere() else 1e-6)
    if elsewhere():  # and so KL and gradient of the next mini-batch, which start from that step
        assert {one.partition(":")[0] for one in parted} <= {"/metrics/actor/kl_loss", "/metrics/actor/grad_norm"}
        parted = differing(found, said, near=0.1)
    assert parted == []


@pytest.mark.slow
@runs
def test_its_weights_are_opened(folder: Path) -> None:
    assert differing(kept(folder), said_of(folder.name)["kept"]) == []


@pytest.mark.slow
@runs
def test_a_run_goes_on(folder: Path) -> None:
    found, said = resumed(folder), said_of(folder.name)["resumed"]
    found["last"], said["last"] = measured(found["last"]), measured(said["last"])
    if elsewhere():  # the step's responses were sampled here: its numbers may be others
        assert found["steps"] == said["steps"] and set(found["weights"]) == set(said["weights"])
        assert set(found["last"]) == set(said["last"])
    else:
        assert differing(found, said) == []


def test_a_batch_is_opened() -> None:
    assert differing(of_batch(wb.DataProto.load(OUT / "batch")), said_of("batch")) == []


def test_a_trace_is_opened() -> None:
    assert differing(of_trace(wb.Trace.load(OUT / "trace")), said_of("trace")) == []


def test_pinned_rows_are_opened() -> None:
    assert differing(of_pins(OUT / "pins.jsonl"), said_of("pins")) == []
