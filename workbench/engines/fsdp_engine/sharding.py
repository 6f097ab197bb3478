"""Sharding a model over ranks by FSDP2, reading weights for it, and writing them as a plain folder again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from workbench.base.errors import CheckpointError, first_line
from workbench.dataproto.core import DataProto
from workbench.engines.fsdp_engine import context_parallel, expert_parallel, tensor_parallel
from workbench.engines.fsdp_engine.agreement import everyone
from workbench.engines.fsdp_engine.folders import Part, base_folder, begin_folder, planned, reverted
from workbench.engines.fsdp_engine.meshes import Mesh, Sizes
from workbench.engines.local_engine import lora
from workbench.engines.local_engine.forward import head_of, hidden_size, replay
from workbench.engines.local_engine.loading import (
    HEAD,
    load_model,
    load_tokenizer,
    resolve,
    save_head,
    save_model,
    seal_model,
)
from workbench.engines.local_engine.scoring import layout, outputs
from workbench.engines.local_engine.states import read_record, read_weights
from workbench.engines.settings import FsdpSettings


class Whole(torch.nn.Module):
    """FSDP's root module: model and value head behind one `forward`, because FSDP needs its root to be called."""

    def __init__(self, causal: Any, head: torch.nn.Module | None) -> None:
        super().__init__()
        self.causal = causal
        self.value_head = head

    def forward(
        self, rows: DataProto, want: Sequence[str], temperature: float, packed: bool
    ) -> dict[str, torch.Tensor]:
        """The outputs `want` of `scoring.outputs`; the model's `own` logits [b, s, V]; or `hidden` [N, H], the states that predict the N response tokens."""
        if "own" in want:
            replay(self.causal, None)
            return {"own": self.causal(input_ids=rows["input_ids"], use_cache=False).logits}
        if "hidden" in want:
            return {"hidden": layout(self.causal, rows, packed).states(self.causal, head_of(self.causal))}
        return outputs(self.causal, self.value_head, rows, want, temperature, packed)


_HEAD = ("value_head.weight", "value_head.bias")
_PARTS: dict[str, Any] = {"tp": tensor_parallel, "ep": expert_parallel, "cp": context_parallel}
"""What cuts a model over a dimension of a mesh."""


def refuse(model: Any, sizes: Sizes) -> None:
    """Raise, before anything is loaded, where a model (which may be empty) cannot be laid out on a mesh of these sizes."""
    for name, part in _PARTS.items():
        if getattr(sizes, name) > 1:
            part.check(
                model, getattr(sizes, name), *(sizes.tp,) * (name == "cp")
            )  # the heads of cp are cut by tp first


def _cut(model: Any, mesh: Mesh) -> None:
    for name, part in _PARTS.items():
        if getattr(mesh.sizes, name) > 1:
            part.apply(model, mesh[name])


def build(path: str, settings: Any, mesh: Mesh, head: bool) -> Whole:
    """Build a model cut and sharded over a mesh, its weights uninitialised; `head` adds a value head."""
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    model = load_model(path, settings, empty=True)
    value = None
    if head:
        with torch.device("meta"):
            value = torch.nn.Linear(hidden_size(model), 1)
    _cut(model, mesh)
    whole = Whole(model, value)
    device = mesh.device_type
    offload = CPUOffloadPolicy(pin_memory=device == "cuda") if settings.offload == "all" else OffloadPolicy()
    shared: dict[str, Any] = {"mesh": mesh.fsdp, "offload_policy": offload}
    half: dict[str, Any] = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    mixed = MixedPrecisionPolicy(**(half if settings.half(device) else {}))
    if mesh.sizes.ep > 1:
        kept = {"mp_policy": replace(mixed, cast_forward_inputs=False), "offload_policy": offload}  # routers' weights
        expert_parallel.shard(model, mesh.experts, reshard_after_forward=settings.reshard_after_forward, **kept)
    blocks = set(getattr(model, "_no_split_modules", None) or ())
    for layer in reversed(
        [module for module in model.modules() if type(module).__name__ in blocks]
    ):  # inner ones first
        fully_shard(layer, mp_policy=mixed, reshard_after_forward=settings.reshard_after_forward, **shared)
    if value is not None:
        fully_shard(value, **shared)
    fully_shard(whole, mp_policy=mixed, **shared)
    # the loss is divided by global counts already: ranks are summed, and 1.0 divides nothing
    for module in whole.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
    _materialise(whole, "cpu" if settings.offload == "all" else device)
    if settings.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return whole.eval()


def _materialise(whole: torch.nn.Module, device: str) -> None:
    """Allocate what is on the meta device; tied weights (one tensor under two names) stay one."""
    ties = tensor_parallel.tied(whole)
    whole.to_empty(device=device)
    tensor_parallel.tie(whole, ties)


def read_head(folder: str, hidden: int) -> dict[str, torch.Tensor]:
    """Read the value head's weights of a model folder; zeros where it has none, as for a new critic."""
    from safetensors.torch import load_file

    path = Path(folder) / HEAD
    start = {"weight": torch.zeros(1, hidden), "bias": torch.zeros(1)}
    return {f"value_head.{name}": tensor for name, tensor in (load_file(path) if path.is_file() else start).items()}


def write_plain(weights: Mapping[str, torch.Tensor], source: str, path: str, settings: Any, shown: str = "") -> None:
    """Write whole weights as a Hugging Face folder, adapters as a peft folder, like a local engine's `save`.

    Configuration and tokenizer are those of `source`; a peft folder names `shown` as its base model.
    """
    adapted = any("lora_" in name for name in weights)
    model = _shell(source, settings, adapted)
    if adapted and lora.base_of(Path(source)) is None:
        model.workbench_lora["base_model_name_or_path"] = shown or source
    plain = {name: tensor for name, tensor in weights.items() if not name.startswith("value_head.")}
    model.load_state_dict(plain, strict=False, assign=True)
    if not adapted:
        model.tie_weights()
    save_model(model, _head(weights), load_tokenizer(source, model, settings), Path(path))
    seal_model(Path(path))


def write_together(
    whole: Callable[[str], torch.Tensor], head: Mapping[str, torch.Tensor], source: str, path: str, settings: Any
) -> bool:
    """Write a model without adapters as a Hugging Face folder, by all ranks; returns whether that can be.

    `whole(name)` gives a whole tensor to all ranks together: they are gathered one at a time, and each rank writes some of the
    files. `head` is a value head, whole. It cannot be where transformers makes one tensor of the files out of several of the model's.
    """
    model, folder = _shell(source, settings, False), Path(path)
    parts = planned(model)
    if parts is None:
        return False
    first = distributed.get_rank() == 0
    everyone(_error(lambda: begin_folder(model, folder, parts)) if first else None)
    made = lambda name: reverted(model, {name: whole(name)})  # noqa: E731
    ranks = [number % distributed.get_world_size() for number in range(len(parts))]
    told = [part.write(folder, made, rank == distributed.get_rank()) for part, rank in zip(parts, ranks, strict=True)]
    everyone(next(filter(None, told), None))

    everyone(_error(lambda: _end_folder(model, head, source, folder, settings)) if first else None)
    return True


def _end_folder(model: Any, head: Mapping[str, torch.Tensor], source: str, folder: Path, settings: Any) -> None:
    """Write what a model folder has beside what `begin_folder` and the files' parts wrote, and seal it."""
    if (layer := _head(head)) is not None:
        save_head(layer, folder)
    load_tokenizer(source, model, settings).save_pretrained(folder)
    seal_model(folder)


def _error(work: Callable[[], None]) -> str | None:
    """What work of one rank raised, for all ranks to raise."""
    try:
        work()
    except Exception as error:  # noqa: BLE001 - all ranks raise it
        return first_line(error, 1000)
    return None


def _shell(source: str, settings: Any, adapted: bool) -> Any:
    """The model of a folder or hub name on the meta device, with its generation settings; without adapters unless `adapted`."""
    from transformers import GenerationConfig

    plain = settings.replace(attn_implementation=None)  # it runs no forward, and may be without the kernels
    folder = source if adapted else base_folder(source)
    model = load_model(folder, plain if adapted else plain.replace(lora_rank=0), empty=True)
    if (Path(folder) / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def _head(weights: Mapping[str, torch.Tensor]) -> torch.nn.Linear | None:
    """The value head among whole weights, as a layer."""
    if _HEAD[0] not in weights:
        return None
    head = torch.nn.Linear(weights[_HEAD[0]].shape[1], 1)
    head.load_state_dict({key: weights[f"value_head.{key}"] for key in ("weight", "bias")})
    return head


def export(state: str | Path, path: str | Path, *, model: str | Path | None = None) -> Path:
    """Turn a distributed checkpoint (`FsdpEngine.save_sharded`) into a Hugging Face folder: `export("state", "model")`.

    Works in this process, without ranks, and holds the weights of one file of the folder (5 GiB) at a time; adapters become a peft folder. Configuration and tokenizer are those of the model that
    was trained, or of `model`. Raises `CheckpointError` where the checkpoint is incomplete or has no weights.
    """
    record = read_record(state)
    settings = FsdpSettings.from_parameters(record["settings"])
    source = str(resolve(model or record["path"]))
    shell = None if settings.lora_rank or lora.base_of(Path(source)) else _shell(source, settings, False)
    parts = planned(shell) if shell is not None else None
    if parts is None:
        write_plain(read_weights(state), source, str(path), settings, record["path"])
    else:
        begin_folder(shell, Path(path), parts)
        for part in parts:
            _write_part(part, shell, state, Path(path))
        _end_folder(shell, read_weights(state, _HEAD), source, Path(path), settings)
    return Path(path)


def _write_part(part: Part, shell: Any, state: str | Path, folder: Path) -> None:
    """Write one file of a model folder out of a saved state. Raises `CheckpointError` where that lacks a weight, or the disk fails."""
    held = read_weights(state, part.tensors)
    for name in part.tensors:
        if name not in held:
            what, do = f"the sharded state at {state}", "name the model that was trained: export(…, model=…)"
            raise CheckpointError(what, expected=f"weight {name}", found="no tensor of that name", do=do)
    if told := part.write(folder, lambda name: reverted(shell, {name: held[name]}), True):
        raise CheckpointError(f"{folder / part.file} could not be written: {told}")
