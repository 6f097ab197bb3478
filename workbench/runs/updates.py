"""Records the inputs of every update since the oldest kept checkpoint, from which any step's weights are recomputed.

    updates/step_000012/{start/, inputs/, update.json}

`start` is the batch as it came from the data, `inputs` what the update stages read (ids, masks, old and reference
log-probs, advantages, returns), in narrow integers. `update.json`, written last, has a crc32 of every file and of its own
text, the controllers' state after the step and that of the random generators. About 30 bytes a token and 40 kB. What is older than
the oldest kept checkpoint is deleted unless a kept trace needs it, and the oldest first where all together are above `keep_updates` MiB.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch

from workbench.base.errors import CheckpointError
from workbench.base.files import FORMAT, check_file, check_format, crc32_of, sealed
from workbench.base.progress import working
from workbench.dataproto.core import DataProto
from workbench.runs import checkpoint
from workbench.runs.folder import discard, read_json, read_settings, size_of, step_folder, step_folders, written
from workbench.stages.pipeline import Pipeline
from workbench.stages.stage import used
from workbench.steps.trace import Phase, Trace, perform


@dataclass(frozen=True)
class RecordedUpdate:
    """A recorded training step: everything that its update stages need to run again."""

    step: int
    start: DataProto
    """The batch before the first phase."""
    inputs: DataProto
    """The columns that the update stages read, and `uid`."""
    controllers: dict[str, dict[str, float]]
    """Stage name → state of its controllers after the step."""
    rng: dict[str, Any] | None = None
    """States of the random generators after the step; None where an earlier version recorded it."""


def write(folder: Path, step: int, trace: Trace, pipeline: Pipeline, rng: Mapping[str, Any]) -> Path:
    """Record the inputs of a step's update stages, completely or not at all; replaces an earlier record of the step.
    `rng` are the states of the random generators after it.
    """
    updating = [stage for stage in pipeline if stage.updates]
    batch = trace.before(updating[0].name)
    after = [(stage.name, trace[stage.name].batch.origins.items()) for stage in updating]
    own = {name for stage, origins in after for name, made in origins if made.stage == stage}
    reads = dict.fromkeys(name for stage in updating for name in used(stage, batch) if name not in own)
    narrowed, kinds = _narrow({name: batch[name] for name in reads if name in batch.batch})
    objects = {name: batch[name] for name in ("uid", *reads) if name in batch.non_tensor_batch}

    def fill(staging: Path) -> None:
        staging.mkdir(parents=True)
        DataProto(narrowed, objects, dict(batch.meta_info)).save(staging / "inputs")
        trace.start.save(staging / "start")
        paths = [path for path in sorted(staging.rglob("*")) if path.is_file()]
        files = {str(path.relative_to(staging)): crc32_of(path) for path in paths}
        record = {"format": FORMAT, "step": step, "dtypes": kinds, "controllers": pipeline.state(), "rng": rng}
        (staging / "update.json").write_text(sealed(json.dumps({**record, "files": files}, allow_nan=False)))

    return written(step_folder(folder, step), fill)


def _narrow(columns: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Store each integer column in the smallest of uint8, int32 and int64 that holds its values; returns the columns,
    and the names of their original dtypes.
    """
    kinds = {name: str(values.dtype).removeprefix("torch.") for name, values in columns.items()}
    narrowed = dict(columns)
    for name, values in columns.items():
        if values.dtype == torch.int64 and values.numel():
            fits = (kind for kind in (torch.uint8, torch.int32) if _fits(values, torch.iinfo(kind)))
            narrowed[name] = values.to(next(fits, torch.int64))
    return narrowed, kinds


def _fits(values: torch.Tensor, limits: torch.iinfo) -> bool:
    return limits.min <= int(values.min()) and int(values.max()) <= limits.max


def steps(folder: Path) -> list[int]:
    """The steps that have a recorded update in `folder`, ascending."""
    return [step for step, path in step_folders(folder).items() if (path / "update.json").is_file()]


def read(folder: Path, step: int) -> RecordedUpdate:
    """Read and verify the recorded update of a step. Raises `CheckpointError`, which names the file, where one is
    missing or changed.
    """
    path = step_folder(folder, step)
    what = f"the recorded update of step {step}"
    if not (path / "update.json").is_file():
        found = f"steps {ranges(steps(folder))}"
        raise CheckpointError(f"{what} is not in the run folder", found=found, do="choose one of these steps")
    record = read_record(path)
    for name, value in record["files"].items():
        if ".." in Path(name).parts or Path(name).is_absolute():
            raise CheckpointError(f"{what} names a file outside its folder", found=name)
        check_file(path / name, {"crc32": value}, f"{what}: file {name}", CheckpointError, "choose another step")
    inputs = DataProto.load(path / "inputs")
    widened = {name: inputs[name].to(getattr(torch, kind)) for name, kind in record["dtypes"].items()}
    states = record["controllers"], record.get("rng")
    return RecordedUpdate(step, DataProto.load(path / "start"), inputs.with_columns(widened), *states)


def apply(pipeline: Pipeline, update: RecordedUpdate, inputs: DataProto | None = None) -> list[Phase]:
    """Run only the update stages of a pipeline, on a recorded step's inputs or on `inputs` instead; returns their
    phases.
    """
    batch = update.inputs if inputs is None else inputs
    return [perform(stage, batch) for stage in pipeline if stage.updates]


def repeated(folder: Path, pipeline: Pipeline, steps: range) -> Iterator[RecordedUpdate]:
    """Apply the recorded updates of consecutive steps to a pipeline that stands before the first; yields each when it is
    done.
    """
    with working("recorded updates", len(steps), "steps") as work:
        for step in steps:
            apply(pipeline, update := read(folder, step))
            pipeline.load_state(update.controllers)
            work.passed(1)
            yield update


def read_record(path: Path) -> dict[str, Any]:
    """Read `update.json` from a recorded update's folder. Raises `CheckpointError` where its format is not known."""
    record: dict[str, Any] = read_json(path / "update.json", "choose another step")
    check_format(record.get("format"), f"the recorded update {path.name}", CheckpointError)
    return record


def prune(
    folder: Path, oldest_checkpoint: int, limit: int, sizes: dict[int, int] | None = None, traces: Iterable[int] = ()
) -> None:
    """Delete recorded updates up to the oldest kept checkpoint, and further the oldest ones while all together exceed
    `limit` bytes.

    Those from which a step of `traces` (the kept ones) can be opened stay: the weights before a step that no
    checkpoint reaches are made from the model that the run began with and every update since.
    `sizes` (step → bytes) is a cache that this function fills, so that a writer that calls it every step measures each
    step once.
    """
    sizes = {} if sizes is None else sizes
    held, there = 0, step_folders(folder)
    needed = max((step - 1 for step in traces if step <= oldest_checkpoint), default=0) if 1 in there else 0
    for step, path in reversed(there.items()):
        if step not in sizes:
            sizes[step] = size_of(path)
        held += sizes[step]
        if needed < step <= oldest_checkpoint or held > limit:
            discard(path)


def remade(run: Path, settings: Mapping[str, Any]) -> int:
    """Return the last step whose weights are made again by all recorded updates from the run's beginning; 0 where there
    is none, and where rows were sampled before the update of an earlier step (`ahead`, `max_lag`).
    """
    train, recorded = settings.get("train", {}), steps(run / "updates")
    if train.get("ahead") or train.get("max_lag"):
        return 0
    return next(step for step in count() if step + 1 not in recorded)


def kept_until(run: Path) -> str:
    """Return what a run that ended early goes on from: `from checkpoint 10`, `after step 5, …`, or that it begins again."""
    if saved := checkpoint.steps(run / "checkpoints"):
        return f"from checkpoint {saved[-1]}"
    train = (settings := read_settings(run)).get("train", {})
    if (step := min(remade(run, settings), train.get("steps", 1) - 1)) > 0:
        return f"after step {step}, whose updates are recorded (no checkpoint)"
    return f"at step 0 again: no checkpoint (save_freq={train.get('save_freq')})"


def ranges(numbers: list[int]) -> str:
    """Format ascending numbers as ranges, such as `12–20, 31`; `none` for no numbers."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ", ".join("–".join(map(str, part)) for part in parts) or "none"
