"""The inputs of every update since the oldest kept checkpoint: what makes any step's weights again, exactly.

    updates/step_000012/{start/, inputs/, update.json}

`start` is the batch as it came from the data, `inputs` what the update stages read (ids, masks, old and reference
log-probs, advantages, returns), in narrow integers. `update.json`, written last, has a crc32 of every file and the
controllers' state after the step. About 30 bytes a token; what is older than the oldest kept checkpoint is deleted,
and the oldest first where all together are above `keep_updates` MiB.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from workbench.dataproto import DataProto
from workbench.errors import CheckpointError, message
from workbench.runs.checkpoint import folder_of
from workbench.runs.folder import crc32_of, discard, read_json, step_folders
from workbench.stages import Pipeline
from workbench.trace import Trace

FORMAT = 1
PRUNED = ".pruned-"


@dataclass(frozen=True)
class Update:
    """One recorded step."""

    step: int
    start: DataProto
    """The batch before the first phase."""
    inputs: DataProto
    """What the update stages read, and `uid`."""
    controllers: dict[str, dict[str, float]]
    """Stage name → its controllers' state after the step."""


def write(folder: Path, step: int, trace: Trace, pipeline: Pipeline) -> Path:
    """Record a step: complete or not there at all; what was there of it before is replaced."""
    updating = [stage for stage in pipeline if stage.updates]
    batch = trace.before(updating[0].name)
    later = {name for stage in updating for name in stage.writes}
    reads = dict.fromkeys(name for stage in updating for name in stage.reads if name not in later)
    narrowed, kinds = _narrow({name: batch[name] for name in reads})
    target = folder_of(folder, step)
    staging = folder / f".{target.name}.part"
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    DataProto(narrowed, {"uid": list(batch["uid"])}, dict(batch.meta_info)).save(staging / "inputs")
    trace.start.save(staging / "start")
    files = {str(path.relative_to(staging)): crc32_of(path) for path in sorted(staging.rglob("*")) if path.is_file()}
    record = {"format": FORMAT, "step": step, "dtypes": kinds, "controllers": pipeline.state(), "files": files}
    (staging / "update.json").write_text(json.dumps(record, allow_nan=False))
    if target.exists():
        discard(target, PRUNED)
    staging.rename(target)
    return target


def _narrow(columns: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Integers in as few bytes as their values need, and the dtypes that they had."""
    kinds = {name: str(values.dtype).removeprefix("torch.") for name, values in columns.items()}
    found = {}
    for name, values in columns.items():
        if values.dtype == torch.int64 and values.numel():
            low, high = int(values.min()), int(values.max())
            if low >= 0 and high < 2**8:
                values = values.to(torch.uint8)
            elif low >= -(2**31) and high < 2**31:
                values = values.to(torch.int32)
        found[name] = values
    return found, kinds


def steps(folder: Path) -> list[int]:
    """Recorded steps, ascending."""
    return [step for step, path in step_folders(folder).items() if (path / "update.json").is_file()]


def read(folder: Path, step: int) -> Update:
    """A recorded step, verified. Raises `CheckpointError` naming the file where one is missing or changed."""
    path = folder_of(folder, step)
    what = f"the recorded update of step {step}"
    if not (path / "update.json").is_file():
        raise CheckpointError(message(f"{what} is not there", found=f"steps {ranges(steps(folder))}"))
    record = read_json(path / "update.json")
    if record["format"] != FORMAT:
        raise CheckpointError(message(what, expected=f"format {FORMAT}", found=record["format"]))
    for name, value in record["files"].items():
        if ".." in Path(name).parts or Path(name).is_absolute():
            raise CheckpointError(message(f"{what}: file {name}", expected="a file of its folder"))
        if not (path / name).is_file() or crc32_of(path / name) != value:
            raise CheckpointError(message(f"{what}: file {name}", found="it is missing or its content changed"))
    inputs = DataProto.load(path / "inputs")
    widened = {name: inputs[name].to(getattr(torch, kind)) for name, kind in record["dtypes"].items()}
    return Update(step, DataProto.load(path / "start"), inputs.with_columns(widened), record["controllers"])


def prune(folder: Path, oldest_checkpoint: int, limit: int, sizes: dict[int, int] | None = None) -> None:
    """Delete what lies before the oldest kept checkpoint, and the oldest of what is above `limit` bytes in all.

    `sizes` (step → bytes) is filled and asked first: a writer that calls this every step measures each step once.
    """
    sizes = {} if sizes is None else sizes
    held = 0
    for step, path in reversed(step_folders(folder).items()):
        if step not in sizes:
            sizes[step] = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        held += sizes[step]
        if step <= oldest_checkpoint or held > limit:
            discard(path, PRUNED)


def ranges(numbers: list[int]) -> str:
    """`12–20, 31` for 12, …, 20, 31."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ", ".join("–".join(map(str, part)) for part in parts) or "none"
