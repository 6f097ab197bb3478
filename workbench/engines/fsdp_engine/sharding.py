"""Sharding a model over ranks by FSDP2, reading weights for it, and writing them as a plain folder again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from workbench.dataproto.core import DataProto
from workbench.engines.fsdp_engine import context_parallel, expert_parallel, tensor_parallel
from workbench.engines.fsdp_engine.meshes import Mesh
from workbench.engines.local_engine import lora
from workbench.engines.local_engine.head import head_of, hidden_size
from workbench.engines.local_engine.loading import HEAD, load_model, load_tokenizer, resolve, save_model, seal_model
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
        """The outputs `want` of `scoring.outputs`; the model's own `logits` [b, s, V]; or `hidden` [N, H], the states that predict the N response tokens."""
        if "logits" in want:
            return {"logits": self.causal(input_ids=rows["input_ids"], use_cache=False).logits}
        if "hidden" in want:
            return {"hidden": layout(self.causal, rows, packed).states(self.causal, head_of(self.causal))}
        return outputs(self.causal, self.value_head, rows, want, temperature, packed)


def build(path: str, settings: Any, mesh: Mesh, head: bool) -> Whole:
    """Build a model cut and sharded over a mesh, its weights uninitialised; `head` adds a value head."""
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    model = load_model(path, settings, empty=True)
    value = None
    if head:
        with torch.device("meta"):
            value = torch.nn.Linear(hidden_size(model), 1)
    if mesh.sizes.tp > 1:
        tensor_parallel.apply(model, mesh["tp"])
    if mesh.sizes.ep > 1:
        expert_parallel.apply(model, mesh["ep"])
    if mesh.sizes.cp > 1:
        context_parallel.apply(model, mesh["cp"])
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


def read_plain(folder: str, settings: Any) -> dict[str, torch.Tensor]:
    """Read the weights and buffers of a model folder, by name, to the CPU."""
    model = load_model(folder, settings.replace(device="cpu"))
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


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
    from transformers import GenerationConfig

    adapted = any("lora_" in name for name in weights)
    base = lora.base_of(Path(source))
    plain_source = source if adapted or base is None else str(resolve(base))
    plainly = settings.replace(attn_implementation=None)  # it runs no forward, and may be without the kernels
    model = load_model(plain_source, plainly if adapted else plainly.replace(lora_rank=0), empty=True)
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
    seal_model(Path(path))


def export(state: str | Path, path: str | Path, *, model: str | Path | None = None) -> Path:
    """Turn a distributed checkpoint (`FsdpEngine.save_sharded`) into a Hugging Face folder: `export("state", "model")`.

    Works in this process, without ranks; adapters become a peft folder. Configuration and tokenizer are those of the model that
    was trained, or of `model`. Raises `CheckpointError` where the checkpoint is incomplete or has no weights.
    """
    record = read_record(state)
    settings = FsdpSettings.from_parameters(record["settings"])
    write_plain(read_weights(state), str(resolve(model or record["path"])), str(path), settings, record["path"])
    return Path(path)
