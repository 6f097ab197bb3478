"""Checkpoints: complete or not there, checked, never overwritten, at least two kept."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from workbench.errors import CheckpointError, SettingError
from workbench.runs import checkpoint


def fill(folder: Path) -> None:
    (folder / "actor").mkdir()
    (folder / "actor" / "model.safetensors").write_bytes(bytes(range(256)) * 40)
    (folder / "notes.json").write_text("{}")


def write(folder: Path, step: int, **options: Any) -> Path:
    return checkpoint.write(folder, step, fill, {"step": step}, **options)


def test_the_newest_complete_one_is_found_and_older_ones_go(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write(tmp_path, step)
    assert checkpoint.steps(tmp_path) == [2, 3]
    found = checkpoint.latest(tmp_path)
    assert found.step == 3 and found.path == tmp_path / "step_000003" and found.notes == ()
    with pytest.raises(CheckpointError, match="never overwritten"):
        write(tmp_path, 3)
    with pytest.raises(SettingError, match="≥ 2"):
        write(tmp_path, 4, keep=1)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda p: flip(p / "actor" / "model.safetensors"), "model.safetensors.*crc32"),
        (lambda p: os.truncate(p / "actor" / "model.safetensors", 10), "model.safetensors.*10240 bytes; found 10"),
        (lambda p: (p / "notes.json").unlink(), "notes.json.*missing"),
        (lambda p: (p / "manifest.json").unlink(), "incomplete"),
        (lambda p: (p / "manifest.json").write_text("{"), "manifest.json cannot be read"),
        (lambda p: (p / "manifest.json").write_text('{"format": 9, "files": {}}'), "format 1; found 9"),
    ],
)
def test_damage_is_named_and_the_one_before_is_taken(tmp_path: Path, damage: Any, match: str) -> None:
    write(tmp_path, 1)
    damage(write(tmp_path, 2))
    with pytest.raises(CheckpointError, match=match):
        checkpoint.verify(tmp_path / "step_000002")
    found = checkpoint.latest(tmp_path)
    assert found.step == 1 and "refused step_000002" in found.notes[0]


def test_a_damaged_newest_never_costs_the_good_one(tmp_path: Path) -> None:
    for step in (1, 2):
        write(tmp_path, step)
    (tmp_path / "step_000002" / "manifest.json").unlink()
    write(tmp_path, 3)
    assert checkpoint.latest(tmp_path).step == 3 and (tmp_path / "step_000001").exists()


@pytest.mark.parametrize("name", ["fsync", "rename"])
def test_whenever_a_write_dies_the_one_before_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    class Killed(BaseException):
        pass

    write(tmp_path, 1)
    real, calls = getattr(os, name), []
    for at in range(1, 12):
        calls.clear()

        def dying(*args: Any, at: int = at) -> Any:
            calls.append(1)
            if len(calls) == at:
                raise Killed
            return real(*args)

        monkeypatch.setattr(os, name, dying)
        try:
            write(tmp_path, 2)
            died = False
        except Killed:
            died = True
        monkeypatch.setattr(os, name, real)
        found = checkpoint.latest(tmp_path, clean=True)
        if not died:
            assert found.step == 2 and at > 1
            return
        # a kill after the rename leaves the new one, complete; before it the old one and a leftover that is cleaned
        assert found.step == (2 if (tmp_path / "step_000002").exists() else 1)
        assert found.step == 2 or any("cut off" in note for note in found.notes)
        if found.step == 2:
            return
    pytest.fail("the write never finished")


def test_a_full_disk_is_said_and_hurts_nothing(tmp_path: Path) -> None:
    write(tmp_path, 1)

    def full(folder: Path) -> None:
        (folder / "part").write_text("x")
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match=r"step 2 could not be written.*No space left.*MiB free"):
        checkpoint.write(tmp_path, 2, full, {})
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"] and checkpoint.latest(tmp_path).step == 1


def test_generators_come_back() -> None:
    state = checkpoint.rng_state()
    first = (random.random(), np.random.rand(), torch.rand(1).item())
    checkpoint.restore_rng(state)
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == first
