"""A learner's state on disk: `engine.json`, and tensors in one file (local engine) or in one file a rank (FSDP engine).

    whole     optimizer.safetensors (`<parameter>|exp_avg` …), engine.json; the weights are in the model's folder
    sharded   shard-0000r-….safetensors, one a rank (weights/…, optimizer/…), engine.json

Both kinds of engine read both. Shards are torch's distributed checkpoint (DCP) with safetensors as its storage: DCP's own file
storage keeps its plan in a pickle, which is code to whoever opens it. `engine.json` of shards is written last, by rank 0, and
lists the files with their sizes.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from workbench.base.errors import CheckpointError, describe
from workbench.base.formats import FORMAT, check_format

RECORD, WHOLE = "engine.json", "optimizer.safetensors"


def write_whole(path: Path, tensors: Mapping[str, torch.Tensor], record: Mapping[str, Any]) -> None:
    """Write an optimizer's tensors to one safetensors file in a folder, and `record` to its `engine.json`."""
    from safetensors.torch import save_file

    path.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), str(path / WHOLE))
    (path / RECORD).write_text(json.dumps({"format": FORMAT, **record, "tensors": len(tensors)}, default=str))


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Write `engine.json` for the shards in the folder; it is on disk when this returns."""
    sizes = {file.name: file.stat().st_size for file in sorted(path.glob("*.safetensors"))}
    with open(path / RECORD, "w") as file:
        file.write(json.dumps({"format": FORMAT, **record, "files": sizes}, default=str, indent=1))
        file.flush()
        os.fsync(file.fileno())


def read_record(folder: str | Path) -> dict[str, Any]:
    """Read the `engine.json` of a learner's saved state; its `whole` is true where the optimizer is in one file.

    Raises `CheckpointError` where `engine.json`, or a file that it lists, is missing or of another size.
    """
    path = Path(folder)
    if not (path / RECORD).is_file():
        raise CheckpointError(f"no optimizer state at {path}", expected=f"{RECORD} there", found="no such file")
    record: dict[str, Any] = json.loads((path / RECORD).read_text())
    check_format(record.get("format"), f"the optimizer state at {path}", CheckpointError)
    for key in ("version", "steps"):
        if type(record.get(key)) is not int:
            what, found = f"{RECORD} of the optimizer state at {path}", describe(record.get(key))
            raise CheckpointError(what, expected=f"a whole number {key!r}", found=found, do="load another checkpoint")
    if (path / WHOLE).is_file():
        return {**record, "weights": False, "files": {}, "adam_steps": {}, "whole": True}
    if "adam_steps" not in record:
        expected, found = f"{WHOLE}, or the key adam_steps in {RECORD}", f"the keys {', '.join(record)}"
        raise CheckpointError(f"no optimizer state at {path}", expected=expected, found=found)
    for name, size in record["files"].items():
        file = path / name
        if not file.is_file() or file.stat().st_size != size:
            found = f"{file.stat().st_size} bytes" if file.is_file() else "no such file"
            raise CheckpointError(f"a file of the sharded state, {path / name}", expected=f"{size} bytes", found=found)
    return {**record, "whole": False}


def read_optimizer(folder: str | Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Read an optimizer's whole tensors (`<parameter>|exp_avg`, `|exp_avg_sq`, `|step`), and its record (`read_record`)."""
    from safetensors.torch import load_file

    record = read_record(folder)
    if record["whole"]:
        tensors = load_file(str(Path(folder) / WHOLE))
        if len(tensors) != record.get("tensors", len(tensors)):
            expected = f"the {record['tensors']} tensors that were written"
            raise CheckpointError(f"the optimizer state {Path(folder) / WHOLE}", expected=expected, found=len(tensors))
        return tensors, record
    steps = {f"{name}|step": torch.tensor(step) for name, step in record["adam_steps"].items()}
    return {**_put_together(folder, record, "optimizer/"), **steps}, record


def read_weights(folder: str | Path, names: Collection[str] | None = None) -> dict[str, torch.Tensor]:
    """Read weights of a sharded state as whole tensors by name, without starting ranks: all, or those of `names` that it has."""
    record = read_record(folder)
    if not record["weights"]:
        raise CheckpointError(f"the sharded state at {folder} has no weights", do="read them from the model folder")
    return _put_together(folder, record, "weights/", names)


def _put_together(
    folder: str | Path, record: Mapping[str, Any], prefix: str, names: Collection[str] | None = None
) -> dict[str, torch.Tensor]:
    from torch.distributed import checkpoint as dcp  # half a second of imports
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    if not record["files"]:  # no step was taken yet
        return {}
    reader = HuggingFaceStorageReader(str(folder))
    found: Mapping[str, Any] = reader.read_metadata().state_dict_metadata
    kept = {name: one for name, one in found.items() if name.startswith(prefix)}
    if names is not None:
        kept = {name: one for name, one in kept.items() if name.removeprefix(prefix) in names}
    tensors: dict[str, Any] = {name: torch.empty(one.size, dtype=one.properties.dtype) for name, one in kept.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # that is what is meant
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
