"""How a model is cut over ranks by FSDP2, and how weights are read for it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from workbench.dataproto import DataProto
from workbench.engines import lora
from workbench.engines.loading import load_model, resolve
from workbench.engines.scoring import outputs, response_hidden
from workbench.errors import first_line


def empty_model(path: str | Path, settings: Any) -> Any:
    """The causal model's structure on the meta device: shapes and configuration, no memory; with adapters where asked for."""
    from transformers import AutoConfig, AutoModelForCausalLM

    base = lora.base_of(Path(path))
    if base is not None:
        model = empty_model(resolve(base), settings.replace(lora_rank=0))
        with torch.device("meta"):
            lora.add(model, json.loads((Path(path) / lora.CONFIG).read_text(encoding="utf-8")))
        return model
    config = AutoConfig.from_pretrained(str(path), trust_remote_code=settings.trust_remote_code)
    extra = {"attn_implementation": settings.attn_implementation} if settings.attn_implementation else {}
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, trust_remote_code=settings.trust_remote_code, **extra
        )
        if settings.lora_rank:
            lora.add(model, lora.config_of(settings, str(path)))
    return model.eval()


class Whole(torch.nn.Module):
    """Model and value head behind one forward: FSDP's root, because the root must be what is called."""

    def __init__(self, causal: Any, head: torch.nn.Module | None) -> None:
        super().__init__()
        self.causal = causal
        self.value_head = head

    def forward(
        self, rows: DataProto, want: Sequence[str], temperature: float, packed: bool
    ) -> dict[str, torch.Tensor]:
        """As `scoring.outputs`; or `hidden` [N, H], the states that predict the N response tokens, of no gradient."""
        if "hidden" in want:
            return {"hidden": response_hidden(self.causal, rows, packed)}
        return outputs(self.causal, self.value_head, rows, want, temperature, packed)


def build(path: str, settings: Any, mesh: Any, head: bool) -> Whole:
    """The model cut over a mesh, with uninitialised weights on this rank's device."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    model = empty_model(path, settings)
    value = None
    if head:
        with torch.device("meta"):
            value = torch.nn.Linear(model.config.hidden_size, 1)
    whole = Whole(model, value)
    device = mesh.device_type
    half = settings.dtype == "bfloat16" or (settings.dtype == "auto" and device == "cuda")
    dtype = torch.bfloat16 if half else None
    offload = CPUOffloadPolicy(pin_memory=device == "cuda") if settings.offload == "all" else OffloadPolicy()
    shared: dict[str, Any] = {"mesh": mesh, "offload_policy": offload}
    mixed = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if half else None)
    blocks = set(getattr(model, "_no_split_modules", None) or ())
    for layer in [module for module in model.modules() if type(module).__name__ in blocks]:
        fully_shard(layer, mp_policy=mixed, reshard_after_forward=settings.reshard_after_forward, **shared)
    if value is not None:
        fully_shard(value, **shared)
    fully_shard(whole, mp_policy=mixed, **shared)
    # the loss is divided by global counts already: ranks are summed, and 1.0 divides nothing
    module: Any
    for module in whole.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
    _materialise(whole, "cpu" if settings.offload == "all" else device)
    if settings.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return whole.eval()


def _materialise(whole: torch.nn.Module, device: str) -> None:
    """Memory for what is on the meta device; weights that were one tensor under two names stay one."""
    names: dict[int, str] = {}
    ties = {}
    for name, parameter in whole.named_parameters(remove_duplicate=False):
        if names.setdefault(id(parameter), name) != name:
            ties[name] = names[id(parameter)]
    whole.to_empty(device=device)
    for name, first in ties.items():
        owner, _, leaf = name.rpartition(".")
        setattr(whole.get_submodule(owner), leaf, whole.get_parameter(first))


def read_plain(folder: str, settings: Any, head: bool) -> tuple[dict[str, torch.Tensor] | None, str | None]:
    """(weights and buffers by name, None), or (None, why they cannot be read)."""
    try:
        model = load_model(folder, settings.replace(device="cpu"))
        if settings.lora_rank and lora.config_in(model) is None:
            lora.add(model, lora.config_of(settings, folder))  # as a local engine draws them
        held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        if head:
            held |= _head_of(Path(folder), model.config.hidden_size)
        return held, None
    except Exception as error:  # noqa: BLE001 - all ranks raise it
        return None, first_line(error)


def read_adapters(folder: str, head: int | None) -> tuple[dict[str, torch.Tensor] | None, str | None]:
    """As `read_plain`, of a peft folder: what learns alone. `head`: the width of a value head, where there is one."""
    try:
        held = lora.stored(Path(folder))
        return held | (_head_of(Path(folder), head) if head else {}), None
    except Exception as error:  # noqa: BLE001 - all ranks raise it
        return None, first_line(error)


def _head_of(folder: Path, hidden: int) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    path = folder / "value_head.safetensors"
    start = {"weight": torch.zeros(1, hidden), "bias": torch.zeros(1)}
    return {f"value_head.{name}": tensor for name, tensor in (load_file(path) if path.is_file() else start).items()}
