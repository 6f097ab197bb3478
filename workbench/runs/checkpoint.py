"""Writes and verifies checkpoints: a checkpoint is complete or absent, never overwritten, and has no pickle.

    checkpoints/step_000010/{actor/ (a Hugging Face folder), actor_state/, critic/, …, state.json, manifest.json}

With rollouts one step ahead `pending/` is the next step's trace as far as it was sampled; the weights that sampled its
rows (`policy_version`) are in no checkpoint any more. Of a stream (`max_lag`) it holds the groups that wait, and which were under way.

A checkpoint is written to a staging folder beside its target. `manifest.json`, written last, holds the size and
crc32 of every file (and of its own text) and is the commit record; then everything is fsynced, the folder renamed, and only then
are older ones pruned. A folder that differs from its manifest is refused with the file's name. A save reads each file once,
for its crc32: what this process wrote or verified is not read again as long as no file was touched since.
"""

from __future__ import annotations

import json
import logging
import math
import os
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from workbench.base.config import require
from workbench.base.errors import CheckpointError, RunError, first_line
from workbench.base.files import (
    FORMAT,
    MANIFEST,
    check_file,
    check_format,
    fsync,
    listed,
    record_of,
    unsealed,
    write_manifest,
)
from workbench.runs.folder import PRUNED, discard, read_json, size_of, step_folder, step_folders

log = logging.getLogger("workbench")

PENDING = "pending"
"""Folder with rows that were sampled one step ahead or in a stream, and not used yet."""
Fill = Callable[[Path], None]
_STAGING = ".staging-"
_sound: dict[Path, dict[str, tuple[int, ...]]] = {}
"""Checkpoint folders whose content this process has checked → their files' `_stamps` then."""


def write(
    checkpoints: Path, step: int, fill: Fill, state: dict[str, Any], *, keep: int = 2, spared: Sequence[int | None] = ()
) -> Path:
    """Write one checkpoint and return its folder: `fill` writes the weights into a staging folder, `state` becomes
    state.json.

    Afterwards all checkpoints but the newest `keep` (≥ 2) good ones and those of the steps in `spared` are deleted.
    Raises `CheckpointError` where the step has a checkpoint already or where writing fails (a full disk, say); earlier
    checkpoints are untouched then.
    """
    require(keep >= 2, "number of checkpoints to keep", expected="≥ 2", found=keep)
    target = step_folder(checkpoints, step)
    if target.exists():
        raise CheckpointError(f"step {step} has a checkpoint, which is never overwritten", found=target)
    staging = checkpoints / f"{_STAGING}{target.name}"
    shutil.rmtree(staging, ignore_errors=True)
    try:
        staging.mkdir(parents=True)
        fill(staging)
        (staging / "state.json").write_text(json.dumps({"format": FORMAT, **state}, allow_nan=False, indent=1))
        _commit(staging, step, state.get("settings_hash"))
        os.rename(staging, target)
        fsync(checkpoints)
    except Exception as cause:  # libraries name a full disk in their own ways: safetensors' error is no OSError
        error = _failed(checkpoints, staging, step, cause)
        shutil.rmtree(staging, ignore_errors=True)
        raise error from cause
    _sound[target.absolute()] = _stamps(target)
    prune(checkpoints, keep, spared)
    return target


def _stamps(checkpoint: Path) -> dict[str, tuple[int, ...]]:
    """Return path → (inode, size, time of the last change of content, time of the last change of anything) for every
    file of a checkpoint: equal stamps mean that no file was touched.
    """
    found = ((path, path.stat()) for path in checkpoint.rglob("*") if path.is_file())
    return {str(path): (one.st_ino, one.st_size, one.st_mtime_ns, one.st_ctime_ns) for path, one in found}


def _failed(checkpoints: Path, staging: Path, step: int, cause: Exception) -> CheckpointError:
    """Make the `CheckpointError` of a failed write: it says why, how much was written, and how much disk space is left."""
    before = [size_of(path) for path in step_folders(checkpoints).values()]
    free = shutil.disk_usage(next(path for path in (checkpoints, *checkpoints.parents) if path.exists())).free
    needed = f", the one before takes {_mib(before[-1])}" if before else ""
    what = f"the checkpoint of step {step} could not be written; earlier ones are untouched"
    found = f"{first_line(cause)} ({_mib(size_of(staging))} of it written, {_mib(free)} free{needed})"
    do = "free space on the disk, or keep fewer checkpoints" if free < 2 * max([1 << 20, *before]) else None
    return CheckpointError(what, found=found, do=do)


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def _commit(staging: Path, step: int, settings: str | None) -> None:
    """Sync every file of a staging folder to disk, then write `manifest.json` over them. Files that a model folder's
    manifest lists are taken from there and not read again.
    """
    models = [one.parent for one in staging.rglob(MANIFEST)]
    known = {model / name: one for model in models for name, one in listed(model, CheckpointError, "").items()}
    files = {}
    for path in sorted(staging.rglob("*")):
        fsync(path)
        if path.is_file():
            files[str(path.relative_to(staging))] = known.get(path) or record_of(path)
    write_manifest(staging, files, format=FORMAT, step=step, settings=settings)
    fsync(staging)


def verify(checkpoint: Path) -> None:
    """Check every file of a checkpoint folder against its manifest. Raises `CheckpointError` for the first file that is
    missing, short, changed, or not in the manifest."""
    files = _manifest(checkpoint)["files"]
    for name, record in files.items():
        check_file(checkpoint / name, record, f"checkpoint {checkpoint.name}: file {name}", CheckpointError)
    present = {str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file()}
    if strange := sorted(present - files.keys() - {MANIFEST}):
        raise CheckpointError(f"checkpoint {checkpoint.name}: file {strange[0]} is not in its {MANIFEST}")


def _manifest(checkpoint: Path) -> dict[str, Any]:
    """Read a checkpoint's `manifest.json` and check that it is complete, of a known format, and of the folder's step."""
    path, what = checkpoint / MANIFEST, f"checkpoint {checkpoint.name}"
    if not path.is_file():
        raise CheckpointError(f"{what} is incomplete", found=f"no {MANIFEST} in it")
    try:
        text = path.read_text()
        document = json.loads(text)
        number = document["format"]
    except (ValueError, KeyError, TypeError) as cause:
        raise CheckpointError(f"{what}: {MANIFEST} cannot be read", found=first_line(cause)) from cause
    check_format(number, what, CheckpointError)
    unsealed(text, f"{what}: {MANIFEST}", CheckpointError, "resume from another checkpoint", required=True)
    if step_folder(checkpoint.parent, document["step"]).name != checkpoint.name:
        raise CheckpointError(f"{what}: {MANIFEST} is of another step", found=f"step {document['step']}")
    return document


def verified(run: Path, step: int | None = None) -> Path:
    """Verify a run's checkpoint (the newest by default) and return its folder.

    Raises `RunError` where there is none, `CheckpointError` where it is damaged: no other one is taken instead.
    """
    checkpoints = run / "checkpoints"
    there = steps(checkpoints)
    wanted = there[-1] if step is None and there else step
    if wanted is None or wanted not in there:
        what = "no checkpoint" if wanted is None else f"no checkpoint of step {wanted}"
        raise RunError(f"{what} in {run}", expected=f"one of the steps {there}" if there else None)
    path = step_folder(checkpoints, wanted)
    if damage := _damage(path):
        good = latest(checkpoints)
        hint = f"the newest good one is that of step {good.step}" if good.path else "there is no good one"
        raise CheckpointError(str(damage), do=hint) from damage
    return path


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Read a checkpoint's `state.json`. Raises `RunError` for a damaged file, `CheckpointError` for another format."""
    state: dict[str, Any] = read_json(checkpoint / "state.json")
    check_format(state.get("format"), f"checkpoint {checkpoint.name}", CheckpointError)
    return state


def steps(checkpoints: Path) -> list[int]:
    """Steps with a checkpoint folder (good or not), ascending."""
    return list(step_folders(checkpoints))


@dataclass(frozen=True)
class Found:
    """Result of `latest`: the newest good checkpoint of a run, and which ones are damaged."""

    step: int
    path: Path | None
    """Folder of the newest good checkpoint; None (and `step` 0) where no checkpoint is good."""
    notes: tuple[str, ...]
    """Sentences about what was refused or cleaned up."""
    refused: tuple[int, ...] = ()
    """Steps whose checkpoints are damaged."""


def latest(checkpoints: Path, *, clean: bool = False, most: float = math.inf) -> Found:
    """Find the newest checkpoint, up to step `most`, that passes `verify`; `notes` names the damaged ones.

    `clean=True`, only for the process that writes the run, also removes what interrupted writes and deletions left.
    """
    notes: list[str] = []
    refused: list[int] = []
    if clean:
        for leftover in sorted((*checkpoints.glob(f"{_STAGING}*"), *checkpoints.glob(f"{PRUNED}*"))):
            shutil.rmtree(leftover, ignore_errors=True)
            what = "a write" if leftover.name.startswith(_STAGING) else "a deletion"
            notes.append(f"removed {leftover.name}: {what} that was cut off")
    for step, path in reversed(step_folders(checkpoints).items()):
        if step > most:
            continue
        damage = _damage(path)
        if damage is None:
            return Found(step, path, tuple(notes), tuple(refused))
        notes.append(f"refused {path.name}: {damage}")
        refused.append(step)
    return Found(0, None, tuple(notes), tuple(refused))


def _damage(checkpoint: Path) -> CheckpointError | None:
    """Verify a checkpoint and return the error of `verify`, or None for a good checkpoint."""
    try:
        verify(checkpoint)
    except CheckpointError as error:
        return error
    return None


def prune(checkpoints: Path, keep: int, spared: Sequence[int | None] = ()) -> None:
    """Delete the checkpoints that are older than the newest `keep` good ones, except those of the steps in `spared`.

    Damaged and spared checkpoints do not count towards `keep`. A damaged one stays as long as it is newer than those
    that are kept.
    """
    good = 0
    for step, path in reversed(step_folders(checkpoints).items()):
        if step in spared:
            continue
        known = path.absolute()
        if good == keep:
            discard(path)
            _sound.pop(known, None)
            continue
        stamps = _stamps(path)
        damage = None if _sound.get(known) == stamps else _damage(path)
        if damage:
            log.warning("%s; it is not counted among the %d checkpoints to keep", damage, keep)
        else:
            _sound[known] = stamps
            good += 1


# --- random state -------------------------------------------------------------------------------


def rng_state() -> dict[str, Any]:
    """Return the state of the global random generators of Python, NumPy and torch (also CUDA's, where it is in use) as
    JSON values.
    """
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    return {
        "python": [version, list(internal), gauss],
        "numpy": [name, np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state().tolist(),
        "cuda": [device.tolist() for device in devices],
    }


def restore_rng(state: dict[str, Any], dry: bool = False) -> None:
    """Restore the random generators' states that `rng_state` returned. Call it last: building models and iterators uses
    them.

    Each GPU gets the state that was saved under its number. Where the number of GPUs differs, a warning is logged and
    GPUs without a saved state keep theirs. `dry=True` only checks the states, on throw-away generators. Raises
    `CheckpointError` where a part of `state` is missing or is not a generator's state.
    """
    try:
        version, internal, gauss = state["python"]
        (random.Random() if dry else random).setstate((version, tuple(internal), gauss))
        name, keys, position, has_gauss, cached = state["numpy"]
        numpys = np.random.RandomState() if dry else np.random
        numpys.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
        (torch.Generator() if dry else torch.default_generator).set_state(
            torch.tensor(state["torch"], dtype=torch.uint8)
        )
        devices = [torch.tensor(device, dtype=torch.uint8) for device in state["cuda"]]
    except (LookupError, TypeError, ValueError, RuntimeError, OverflowError) as cause:
        what, expected = "the random generators in a checkpoint's state.json", "states of python, numpy, torch and cuda"
        raise CheckpointError(
            what, expected=expected, found=first_line(cause), do="resume from another checkpoint"
        ) from cause
    if devices and not dry and torch.cuda.is_available():
        count = torch.cuda.device_count()
        for gpu, device in enumerate(devices[:count]):
            torch.cuda.set_rng_state(device, gpu)
        if count != len(devices):
            found = "the checkpoint has random states of %d GPUs, this machine has %d: those with the same number are restored"
            log.warning(found, len(devices), count)
