"""Sharded checkpoints: torch's distributed checkpoint (DCP) with safetensors as its storage, so nothing is unpickled.

    folder/{shard-0000r-….safetensors, one a rank (weights/…, optimizer/…), engine.json}

Each rank writes its own part (`sharded_saving`); any number of ranks reads it again, each its own part. `engine.json`, written
last by rank 0, lists the files with their sizes. DCP's own file storage keeps its plan in a pickle, which is code to whoever opens it.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from workbench.engines import lora
from workbench.engines.fsdp_settings import FsdpSettings
from workbench.engines.loading import load_tokenizer, resolve, save_model
from workbench.engines.sharding import empty_model
from workbench.errors import CheckpointError, message

if TYPE_CHECKING:
    from workbench.engines.sharded import ShardedModel

RECORD = "engine.json"
WHOLE = "optimizer.safetensors"
"""What a local engine's state has in the place of shards."""
FORMAT = 1


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """`engine.json` over the shards that are there, on disk when this returns."""
    sizes = {file.name: file.stat().st_size for file in sorted(path.glob("*.safetensors"))}
    whole = {"format": FORMAT, **record, "files": sizes}
    with open(path / RECORD, "w") as file:
        file.write(json.dumps(whole, default=str, indent=1))
        file.flush()
        os.fsync(file.fileno())


def read_record(folder: str | Path) -> dict[str, Any]:
    """`engine.json`. Raises `CheckpointError` where it, or a file that it lists, is missing or of another size."""
    path = Path(folder)
    if not (path / RECORD).is_file():
        raise CheckpointError(message(f"no sharded state at {path}", expected=f"{RECORD} and safetensors"))
    record: dict[str, Any] = json.loads((path / RECORD).read_text())
    if (path / WHOLE).is_file():  # a local engine's: every rank takes its part of it
        return {**record, "weights": False, "files": {}, "adam_steps": {}, "whole": True}
    if record.get("format") != FORMAT or "adam_steps" not in record:
        found = f"format {record.get('format')}"
        raise CheckpointError(message(f"{path} is no sharded state", expected=f"format {FORMAT}", found=found))
    for name, size in record["files"].items():
        file = path / name
        if not file.is_file() or file.stat().st_size != size:
            found = f"{file.stat().st_size} bytes" if file.is_file() else "it is missing"
            raise CheckpointError(message(f"sharded state at {path}: {name}", expected=f"{size} bytes", found=found))
    return record


@torch.no_grad()
def load_shards(model: ShardedModel, folder: str) -> None:
    """All ranks, as many as there are now: what `sharded_saving` wrote, back into a model."""
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    record, reader = read_record(folder), HuggingFaceStorageReader(folder)
    if record.get("whole"):
        return _load_whole(model, Path(folder), record["steps"])
    there = reader.read_metadata().state_dict_metadata if record["files"] else {}
    tensors: dict[str, Any] = {}
    state: dict[str, dict[str, Any]] = {}
    if record["weights"]:
        tensors |= {f"weights/{name}": value.detach() for name, value in model.stored.items()}
        for name in [name for name in tensors if name.startswith("weights/value_head.") and name not in there]:
            tensors.pop(name).zero_()  # a policy's state, into a critic
    for name, step in record["adam_steps"].items():
        parameter = model.named[name]
        moments = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
        tensors |= {f"optimizer/{name}|{key}": value for key, value in moments.items()}
        state[name] = {"step": torch.tensor(step), **moments}
    if tensors:
        try:
            dcp.load(tensors, storage_reader=reader)
        except dcp.api.CheckpointException as cause:  # no Exception: it would end the worker
            raise CheckpointError(f"the sharded state at {folder} could not be read: {cause}") from cause
    model.forget()
    if record["steps"]:
        model.optimizer.put(state, record["steps"])


def _load_whole(model: ShardedModel, folder: Path, steps: int) -> None:
    """A local engine's optimizer, cut as the parameters are."""
    from safetensors.torch import load_file
    from torch.distributed.tensor import distribute_tensor

    state: dict[str, dict[str, Any]] = {}
    for key, value in load_file(str(folder / WHOLE)).items():
        name, kind = key.split("|")
        like: Any = model.named[name]
        if kind != "step":
            value = distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
        state.setdefault(name, {})[kind] = value
    model.forget()
    if steps:
        model.optimizer.put(state, steps)


def read_weights(folder: str | Path) -> dict[str, torch.Tensor]:
    """All weights of a sharded state, whole, in this process; no ranks are needed."""
    if not read_record(folder)["weights"]:
        raise CheckpointError(
            message(f"the sharded state at {folder} has no weights", do="they are in the model folder")
        )
    return _put_together(folder, "weights/")


def read_optimizer(folder: str | Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """A sharded state's optimizer as a local engine's: `<parameter>|exp_avg` …, whole; and the record."""
    record = read_record(folder)
    steps = {f"{name}|step": torch.tensor(step) for name, step in record["adam_steps"].items()}
    return {**_put_together(folder, "optimizer/"), **steps}, record


def _put_together(folder: str | Path, prefix: str) -> dict[str, torch.Tensor]:
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    if not read_record(folder)["files"]:  # it has not learnt yet
        return {}
    reader = HuggingFaceStorageReader(str(folder))
    found = reader.read_metadata().state_dict_metadata
    tensors: dict[str, Any] = {
        name: torch.empty(one.size, dtype=one.properties.dtype)  # type: ignore[union-attr]
        for name, one in found.items()
        if name.startswith(prefix)
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # that is what is meant
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def write_plain(weights: Mapping[str, torch.Tensor], source: str, path: str, settings: Any, shown: str = "") -> None:
    """A plain Hugging Face folder of whole weights, or of adapters a peft one, as a local engine's `save` writes it.

    Configuration and tokenizer are those of `source`; adapters name `shown` as their base.
    """
    from transformers import GenerationConfig

    adapted = any("lora_" in name for name in weights)
    base = lora.base_of(Path(source))
    plain_source = source if adapted or base is None else str(resolve(base))
    model = empty_model(plain_source, settings if adapted else settings.replace(lora_rank=0))
    if adapted and base is None:
        model.workbench_lora["base_model_name_or_path"] = shown or source
    head = None
    if "value_head.weight" in weights:
        head = torch.nn.Linear(weights["value_head.weight"].shape[1], 1)
        head.load_state_dict({key: weights[f"value_head.{key}"] for key in ("weight", "bias")})
    plain = {name: tensor for name, tensor in weights.items() if not name.startswith("value_head.")}
    model.load_state_dict(plain, strict=False, assign=True)
    if not adapted:
        model.tie_weights()
    if (Path(plain_source) / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(plain_source)
    save_model(model, head, load_tokenizer(source, model, settings), Path(path))


def export(state: str | Path, path: str | Path, *, model: str | Path | None = None) -> Path:
    """A distributed checkpoint (`FsdpEngine.save_sharded`) as a plain Hugging Face folder (of adapters a peft one), in this process,
    without ranks.

    Configuration and tokenizer are those of the model that it was trained from, or of `model`.
    """
    record = read_record(state)
    settings = FsdpSettings.from_parameters(record["settings"])
    write_plain(read_weights(state), str(resolve(model or record["path"])), str(path), settings, record["path"])
    return Path(path)
