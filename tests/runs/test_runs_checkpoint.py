"""Checkpoints: complete or not there, checked, never overwritten, at least two kept."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from workbench.base import files
from workbench.base.errors import CheckpointError, SettingError
from workbench.runs import checkpoint
from workbench.runs.folder import step_folder


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


def test_a_save_reads_its_files_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    plain = files.crc32_of
    monkeypatch.setattr(files, "crc32_of", lambda path: (read.append(path), plain(path))[1])
    for step in (1, 2, 3):
        read.clear()
        write(tmp_path, step)
        there = [path for path in (tmp_path / f"step_{step:06d}").rglob("*") if path.name != "manifest.json"]
        assert sorted(path.name for path in read) == sorted(path.name for path in there if path.is_file())
    flip(tmp_path / "step_000003" / "actor" / "model.safetensors")  # of the same size: read again, and not counted
    read.clear()
    write(tmp_path, 4)
    assert checkpoint.steps(tmp_path) == [2, 3, 4]
    assert sum("step_000003" in str(path) for path in read) == 1 and not any("step_000002" in str(one) for one in read)


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
        (lambda p: (p / "manifest.json").write_text('{"format": 9, "files": {}}'), "expected format 4; found 9"),
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


@pytest.mark.slow
def test_no_flipped_bit_of_the_manifest_is_believed(tmp_path: Path) -> None:
    path = write(tmp_path, 1) / "manifest.json"
    content = path.read_bytes()
    for bit in range(0, len(content) * 8, 3):  # 3 and 8 have no common factor: every position of a byte, every byte
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bytes(flipped))
        with pytest.raises(CheckpointError, match="step_000001"):
            checkpoint.verify(path.parent)
    path.write_bytes(content)
    checkpoint.verify(path.parent)


def test_a_manifest_belongs_to_its_folder_and_its_files(tmp_path: Path) -> None:
    path = checkpoint.write(tmp_path, 1, fill, {"settings_hash": "abcd"})
    assert json.loads((path / "manifest.json").read_text())["settings"] == "abcd"
    (path / "actor" / "adapter.safetensors").write_text("from elsewhere")
    with pytest.raises(CheckpointError, match=r"adapter.safetensors is not in its manifest.json"):
        checkpoint.verify(path)
    (path / "actor" / "adapter.safetensors").unlink()
    moved = path.rename(tmp_path / "step_000009")
    with pytest.raises(CheckpointError, match="found step 1"):
        checkpoint.verify(moved)


BOUNDARIES = ("open", "fsync", "rename", "mkdir", "unlink", "rmdir")
"""Every way in which a write or a deletion reaches the disk."""


def in_a_child_killed_at(call: int, work: Any) -> bool:
    """Fork, SIGKILL the child at its n-th call that reaches the disk; whether it lived to the end."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1] == 0
    calls = 0

    def counted(real: Any) -> Any:
        def dying(*args: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **options)

        return dying

    for name in BOUNDARIES:
        setattr(os, name, counted(getattr(os, name)))
    io.open = counted(io.open)  # what pathlib writes with
    work()
    os._exit(0)


@pytest.mark.slow
def test_killed_at_every_write_boundary_a_good_one_stands_and_can_be_gone_on_from(tmp_path: Path) -> None:
    seen = set()
    for call in range(1, 200):
        folder = tmp_path / str(call)
        for step in (1, 2):
            write(folder, step)
        lived = in_a_child_killed_at(call, lambda folder=folder: write(folder, 3))
        found = checkpoint.latest(folder, clean=True)
        assert found.step in (2, 3) and found.refused == ()
        assert {path.name for path in folder.iterdir()} <= {f"step_{step:06d}" for step in (1, 2, 3)}
        for step in checkpoint.steps(folder):  # nothing half-written and nothing half-deleted has a checkpoint's name
            checkpoint.verify(step_folder(folder, step))
        seen.add((found.step, len(checkpoint.steps(folder)), *(note.rsplit(": ", 1)[1] for note in found.notes)))
        if lived:
            break
        if found.step == 2:
            write(folder, 3)
    assert lived and call > 15
    # cut off while writing, after the rename, while the oldest was deleted, and not at all
    assert {(2, 2, "a write that was cut off"), (3, 3), (3, 2, "a deletion that was cut off"), (3, 2)} <= seen


def test_two_good_ones_are_kept_whatever_is_damaged(tmp_path: Path) -> None:
    for step in (1, 2):
        write(tmp_path, step)
    flip(tmp_path / "step_000002" / "actor" / "model.safetensors")
    write(tmp_path, 3)
    assert checkpoint.steps(tmp_path) == [1, 2, 3]  # 2 does not count, and stays to be looked at
    write(tmp_path, 4)
    assert checkpoint.steps(tmp_path) == [3, 4]


def test_foreign_names_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    write(tmp_path, 1)
    (tmp_path / "step_000001.bak").mkdir()
    (tmp_path / "step_000002").write_text("a file")
    assert checkpoint.steps(tmp_path) == [1] and checkpoint.latest(tmp_path, clean=True).step == 1
    assert (tmp_path / "step_000001.bak").exists()


class LibraryError(Exception):
    """Libraries name a full disk in their own ways."""


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), LibraryError("No space left on device")])
def test_a_full_disk_is_said_and_hurts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    write(tmp_path, 1)

    def full(folder: Path) -> None:
        (folder / "part").write_bytes(bytes(1 << 20))
        raise error

    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1 << 19))
    with pytest.raises(
        CheckpointError, match=r"step 2 could not.*No space left.*1\.0 MiB of it written, 0\.5 MiB free"
    ) as e:
        checkpoint.write(tmp_path, 2, full, {})
    assert "free space on the disk" in str(e.value) and e.value.__cause__ is error
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"] and checkpoint.latest(tmp_path).step == 1


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file in the way")
    with pytest.raises(CheckpointError, match="could not be written.*NotADirectoryError|could not be written.*Exists"):
        write(tmp_path / "checkpoints", 1)


def test_generators_come_back() -> None:
    state = checkpoint.rng_state()
    first = (random.random(), np.random.rand(), torch.rand(1).item())
    checkpoint.restore_rng(state)
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == first
