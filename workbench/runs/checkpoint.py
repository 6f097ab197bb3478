"""Checkpoints that are complete or not there: staged, counted, checked, renamed; never overwritten, no pickle.

    checkpoints/step_000010/{actor/ (a Hugging Face folder), actor_state/, critic/, …, state.json, manifest.json}

With rollouts one step ahead `pending/` is the next step's trace as far as it had been drawn; its rows say the version
that wrote them, and those weights are in no checkpoint any more.

A checkpoint is written in a staging folder beside its place. `manifest.json`, written last, holds the size and
crc32 of every file (and its own) and is the commit record; then everything is fsynced, the folder renamed, verified,
and only then are older ones pruned. A folder whose manifest does not hold is refused with the file's name.
"""

from __future__ import annotations

import json
import logging
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
from workbench.errors import CheckpointError, first_line, message
from workbench.runs.folder import crc32_of, discard, step_folders

log = logging.getLogger("workbench")

FORMAT = 1
PENDING = "pending"
"""The next step's rows, where they are drawn one step ahead."""
_STAGING, _PRUNED, _MANIFEST = ".staging-", ".pruned-", "manifest.json"


def folder_of(checkpoints: Path, step: int) -> Path:
    """Where the checkpoint of a step stands."""
    return checkpoints / f"step_{step:06d}"


def write(checkpoints: Path, step: int, fill: Callable[[Path], None], state: dict[str, Any], *, keep: int = 2) -> Path:
    """Write one checkpoint: `fill` puts the weights into the staging folder, `state` becomes state.json.

    The newest `keep` (≥ 2) good ones stay. Raises `CheckpointError` where it exists already, or where it
    could not be written (a full disk, say); what was there before is untouched then.
    """
    require(keep >= 2, "checkpoints to keep", expected="≥ 2", found=keep)
    target = folder_of(checkpoints, step)
    if target.exists():
        raise CheckpointError(message("a checkpoint is never overwritten", found=target))
    staging = checkpoints / f"{_STAGING}{target.name}"
    shutil.rmtree(staging, ignore_errors=True)
    try:
        staging.mkdir(parents=True)
        fill(staging)
        (staging / "state.json").write_text(json.dumps(state, allow_nan=False, indent=1))
        _commit(staging, step, state.get("settings_hash"))
        os.rename(staging, target)
        _sync_folder(checkpoints)
    except Exception as cause:  # libraries name a full disk in their own ways: safetensors' error is no OSError
        told = _failed(checkpoints, staging, step, cause)
        shutil.rmtree(staging, ignore_errors=True)
        raise CheckpointError(told) from cause
    verify(target)
    prune(checkpoints, keep)
    return target


def _failed(checkpoints: Path, staging: Path, step: int, cause: Exception) -> str:
    """Why, how much of it was there, and how much room is left."""
    before = [_size(path) for path in step_folders(checkpoints).values()]
    free = shutil.disk_usage(next(path for path in (checkpoints, *checkpoints.parents) if path.exists())).free
    needed = f", the one before takes {_mib(before[-1])}" if before else ""
    return message(
        f"the checkpoint of step {step} could not be written; earlier ones are untouched",
        found=f"{first_line(cause)} ({_mib(_size(staging))} of it written, {_mib(free)} free{needed})",
        do="free space on the disk, or keep fewer checkpoints" if free < 2 * max([1 << 20, *before]) else None,
    )


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def _commit(staging: Path, step: int, settings: str | None) -> None:
    """fsync every file, then write the manifest over them."""
    files = {}
    for path in sorted(staging.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
            files[str(path.relative_to(staging))] = {"size": path.stat().st_size, "crc32": crc32_of(path)}
    for folder in (staging, *(path for path in staging.rglob("*") if path.is_dir())):
        _sync_folder(folder)
    document = {"format": FORMAT, "step": step, "settings": settings, "files": files}
    with (staging / _MANIFEST).open("w") as file:
        file.write(json.dumps({**document, "crc32": _self_crc32(document)}, indent=1))
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(staging)


def _self_crc32(document: dict[str, Any]) -> int:
    """Of the manifest's own content: a flipped bit in it must not decide what is loaded."""
    content = {key: value for key, value in document.items() if key != "crc32"}
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def verify(checkpoint: Path) -> None:
    """Raises `CheckpointError` naming the first file that is missing, short, changed or not of the checkpoint."""
    manifest = _manifest(checkpoint)
    files = manifest["files"]
    for name, record in files.items():
        path = checkpoint / name
        what = f"checkpoint {checkpoint.name}: file {name}"
        if not path.is_file():
            raise CheckpointError(message(what, found="it is missing"))
        if path.stat().st_size != record["size"]:
            raise CheckpointError(message(what, expected=f"{record['size']} bytes", found=path.stat().st_size))
        if crc32_of(path) != record["crc32"]:
            raise CheckpointError(
                message(what, expected=f"crc32 {record['crc32']}", found="another: its content changed")
            )
    present = {str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file()}
    strange = sorted(present - files.keys() - {_MANIFEST})
    if strange:
        raise CheckpointError(
            message(f"checkpoint {checkpoint.name}: file {strange[0]}", found="it is not in the manifest")
        )


def _manifest(checkpoint: Path) -> dict[str, Any]:
    """The manifest, whole and of this format and step."""
    path, what = checkpoint / _MANIFEST, f"checkpoint {checkpoint.name}"
    if not path.is_file():
        raise CheckpointError(message(f"{what} is incomplete", found=f"no {_MANIFEST}"))
    try:
        document = json.loads(path.read_text())
        version = document["format"]
    except (ValueError, KeyError, TypeError) as cause:
        raise CheckpointError(message(f"{what}: {_MANIFEST} cannot be read", found=first_line(cause))) from cause
    if version != FORMAT:
        raise CheckpointError(
            message(what, expected=f"format {FORMAT}", found=version, do="open it with the version that wrote it")
        )
    if document.get("crc32") != _self_crc32(document):
        raise CheckpointError(message(f"{what}: {_MANIFEST}", expected="its own crc32", found="its content changed"))
    if folder_of(checkpoint.parent, document["step"]).name != checkpoint.name:
        raise CheckpointError(message(what, expected="the folder's own step", found=f"step {document['step']}"))
    return document


def steps(checkpoints: Path) -> list[int]:
    """Steps with a checkpoint folder (good or not), ascending."""
    return list(step_folders(checkpoints))


@dataclass(frozen=True)
class Found:
    """What `latest` found."""

    step: int
    path: Path | None
    """None: no good checkpoint."""
    notes: tuple[str, ...]
    """What was refused or cleaned on the way, for people."""
    refused: tuple[int, ...] = ()
    """Steps whose checkpoints are damaged."""


def latest(checkpoints: Path, *, clean: bool = False) -> Found:
    """The newest checkpoint that verifies; damaged ones are said in `notes`.

    `clean=True`, for the writer alone, removes what writes and deletions left that were cut off, and says so.
    """
    notes, refused = [], []
    if clean:
        for leftover in sorted((*checkpoints.glob(f"{_STAGING}*"), *checkpoints.glob(f"{_PRUNED}*"))):
            shutil.rmtree(leftover, ignore_errors=True)
            what = "a write" if leftover.name.startswith(_STAGING) else "a deletion"
            notes.append(f"removed {leftover.name}: {what} that was cut off")
    for step in reversed(steps(checkpoints)):
        path = folder_of(checkpoints, step)
        try:
            verify(path)
        except CheckpointError as error:
            notes.append(f"refused {path.name}: {error}")
            refused.append(step)
            continue
        return Found(step, path, tuple(notes), tuple(refused))
    return Found(0, None, tuple(notes), tuple(refused))


def prune(checkpoints: Path, keep: int) -> None:
    """Delete what is older than the newest `keep` good checkpoints.

    Damaged ones count for nothing and, while they are newer than those, stay to be looked at.
    """
    good = 0
    for step in reversed(steps(checkpoints)):
        path = folder_of(checkpoints, step)
        if good >= keep:
            discard(path, _PRUNED)
            continue
        try:
            verify(path)
        except CheckpointError as error:
            log.warning("%s; it is not counted among the %d checkpoints to keep", error, keep)
            continue
        good += 1


# --- random state -------------------------------------------------------------------------------


def rng_state() -> dict[str, Any]:
    """Python's, NumPy's and torch's global generators (GPUs' too, where they are in use) as plain JSON values."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    return {
        "python": [version, list(internal), gauss],
        "numpy": [name, np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state().tolist(),
        "cuda": [device.tolist() for device in devices],
    }


def restore_rng(state: dict[str, Any]) -> None:
    """Back to what `rng_state` gave. Restore it last: building models and iterators draws from these."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([torch.tensor(device, dtype=torch.uint8) for device in state["cuda"]])
