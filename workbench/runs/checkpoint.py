"""Checkpoints that are complete or not there: staged, counted, checked, renamed; never overwritten, no pickle.

    checkpoints/step_000010/{actor/ (a Hugging Face folder), actor_state/, critic/, …, state.json, manifest.json}

A checkpoint is written in a staging folder beside its place. `manifest.json`, written last, holds the size and
crc32 of every file and is the commit record; then everything is fsynced, the folder renamed, verified, and only
then are older ones pruned. A folder whose manifest does not hold is refused with the file's name.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from workbench.config import require
from workbench.errors import CheckpointError, message

FORMAT = 1
_PREFIX, _STAGING, _MANIFEST = "step_", ".staging-", "manifest.json"


def folder_of(checkpoints: Path, step: int) -> Path:
    """Where the checkpoint of a step stands."""
    return checkpoints / f"{_PREFIX}{step:06d}"


def write(checkpoints: Path, step: int, fill: Callable[[Path], None], state: dict[str, Any], *, keep: int = 2) -> Path:
    """Write one checkpoint: `fill` puts the weights into the staging folder, `state` becomes state.json.

    The newest `keep` (≥ 2) complete ones stay. Raises `CheckpointError` where it exists already, or where
    the disk is full; what was there before is untouched.
    """
    require(keep >= 2, "checkpoints to keep", expected="≥ 2", found=keep)
    target = folder_of(checkpoints, step)
    if target.exists():
        raise CheckpointError(message("a checkpoint is never overwritten", found=target))
    staging = checkpoints / f"{_STAGING}{target.name}"
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        fill(staging)
        (staging / "state.json").write_text(json.dumps(state, allow_nan=False, indent=1))
        _commit(staging, step)
        os.rename(staging, target)
        _sync_folder(checkpoints)
    except OSError as cause:
        free = shutil.disk_usage(checkpoints).free
        shutil.rmtree(staging, ignore_errors=True)
        raise CheckpointError(
            message(
                f"the checkpoint of step {step} could not be written; earlier ones are untouched",
                found=f"{cause}, {free / 2**20:.0f} MiB free",
                do="free space on the disk, or keep fewer checkpoints",
            )
        ) from cause
    verify(target)
    prune(checkpoints, keep)
    return target


def _commit(staging: Path, step: int) -> None:
    """fsync every file, then write the manifest over them."""
    files = {}
    for path in sorted(staging.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
            files[str(path.relative_to(staging))] = {"size": path.stat().st_size, "crc32": _crc32(path)}
    for folder in (staging, *(path for path in staging.rglob("*") if path.is_dir())):
        _sync_folder(folder)
    manifest = staging / _MANIFEST
    manifest.write_text(json.dumps({"format": FORMAT, "step": step, "files": files}, indent=1))
    with manifest.open("rb") as file:
        os.fsync(file.fileno())
    _sync_folder(staging)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _crc32(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            value = zlib.crc32(block, value)
    return value


def verify(checkpoint: Path) -> None:
    """Raises `CheckpointError` naming the first file that is missing, short or changed."""
    manifest = checkpoint / _MANIFEST
    if not manifest.is_file():
        raise CheckpointError(message(f"checkpoint {checkpoint.name} is incomplete", found=f"no {_MANIFEST}"))
    try:
        document = json.loads(manifest.read_text())
        files = document["files"]
    except (json.JSONDecodeError, KeyError, UnicodeDecodeError) as cause:
        raise CheckpointError(
            message(f"checkpoint {checkpoint.name}: {_MANIFEST} cannot be read", found=cause)
        ) from cause
    if document["format"] != FORMAT:
        raise CheckpointError(
            message(f"checkpoint {checkpoint.name}", expected=f"format {FORMAT}", found=document["format"])
        )
    for name, record in files.items():
        path = checkpoint / name
        what = f"checkpoint {checkpoint.name}: file {name}"
        if not path.is_file():
            raise CheckpointError(message(what, found="it is missing"))
        if path.stat().st_size != record["size"]:
            raise CheckpointError(message(what, expected=f"{record['size']} bytes", found=path.stat().st_size))
        if _crc32(path) != record["crc32"]:
            raise CheckpointError(
                message(what, expected=f"crc32 {record['crc32']}", found="another: its content changed")
            )


def steps(checkpoints: Path) -> list[int]:
    """Steps with a checkpoint folder (complete or not), ascending."""
    return sorted(int(path.name.removeprefix(_PREFIX)) for path in checkpoints.glob(f"{_PREFIX}*") if path.is_dir())


@dataclass(frozen=True)
class Found:
    """What `latest` found."""

    step: int
    path: Path | None
    """None: no complete checkpoint."""
    notes: tuple[str, ...]
    """What was refused or cleaned on the way, for people."""


def latest(checkpoints: Path) -> Found:
    """The newest checkpoint that verifies. Refused ones and leftovers of unfinished writes are said in `notes`."""
    notes = []
    for leftover in sorted(checkpoints.glob(f"{_STAGING}*")):
        shutil.rmtree(leftover, ignore_errors=True)
        notes.append(f"removed {leftover.name}: a write that was cut off")
    for step in reversed(steps(checkpoints)):
        path = folder_of(checkpoints, step)
        try:
            verify(path)
        except CheckpointError as error:
            notes.append(f"refused {path.name}: {error}")
            continue
        return Found(step, path, tuple(notes))
    return Found(0, None, tuple(notes))


def prune(checkpoints: Path, keep: int) -> None:
    """Delete all but the newest `keep` complete checkpoints; damaged ones count for nothing and stay to be looked at."""
    good = []
    for step in reversed(steps(checkpoints)):
        if (folder_of(checkpoints, step) / _MANIFEST).is_file():
            good.append(step)
    for step in good[keep:]:
        shutil.rmtree(folder_of(checkpoints, step))


# --- random state -------------------------------------------------------------------------------


def rng_state() -> dict[str, Any]:
    """Python's, NumPy's and torch's global generators as plain JSON values."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": [version, list(internal), gauss],
        "numpy": [name, np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state().tolist(),
    }


def restore_rng(state: dict[str, Any]) -> None:
    """Back to what `rng_state` gave. Restore it last: building models and iterators draws from these."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))
