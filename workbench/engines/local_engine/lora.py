"""LoRA through peft: adapters in the model's own layers, the base frozen; the reference is the base with them switched off.

Adapters are saved as a peft folder (`adapter_config.json`, `adapter_model.safetensors`) that other libraries open, too.
Hu et al. 2021, https://arxiv.org/abs/2106.09685.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from workbench.base.distribution import install, require_package
from workbench.base.errors import EngineError, boundary
from workbench.engines.local_engine import quantised

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX, _OURS = "base_model.model.", ".default."


def config_of(settings: Any, base: str) -> dict[str, Any]:
    """Build the content of peft's `adapter_config.json` from an engine's settings and the name of the base model."""
    kind = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base}
    size = {"r": settings.lora_rank, "lora_alpha": settings.lora_alpha, "lora_dropout": settings.lora_dropout}
    return {**kind, **size, "target_modules": list(settings.lora_targets), "bias": "none"}


def add(model: Any, config: Mapping[str, Any]) -> None:
    """Add LoRA adapters to the target layers of a model and freeze all other weights. The model's outputs do not change
    yet (B = 0).

    Raises `EngineError` where peft is not installed, or where no layer has a target's name.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as cause:
        raise EngineError("LoRA needs peft", do=install("peft")) from cause
    require_package("peft", "peft", "LoRA")
    tables = (torch.nn.Embedding,)
    named = [name.rpartition(".")[2] for name, layer in model.named_modules() if isinstance(layer, tables)]
    if wrong := [one for one in config["target_modules"] if one.rpartition(".")[2] in named]:
        expected = "names of linear layers, such as q_proj"
        do = "to train the embedding, too, open it without lora_rank"
        raise EngineError("lora_targets", expected=expected, found=f"{wrong[0]!r}, a table of embeddings", do=do)
    known = {key: config[key] for key in ("r", "lora_alpha", "lora_dropout", "target_modules", "bias")}
    with torch.random.fork_rng(devices=[]), boundary("adding LoRA adapters", EngineError):
        torch.manual_seed(0)  # A is random: the same for the same model, whatever was sampled before
        inject_adapter_in_model(LoraConfig(**known, task_type="CAUSAL_LM"), model)
    for name, parameter in model.named_parameters():
        if "lora_" in name:  # peft makes them of the base's dtype
            parameter.data = parameter.data.float()
    model.workbench_lora = dict(config)


def config_in(model: Any) -> dict[str, Any] | None:
    """The peft configuration of a model's LoRA adapters; None for a plain model."""
    return getattr(model, "workbench_lora", None)


def dropout(model: Any) -> float:
    """The LoRA dropout rate of a model's adapters during learning; 0 without adapters."""
    return float((config_in(model) or {}).get("lora_dropout") or 0)


def tensors(model: Any) -> dict[str, torch.Tensor]:
    """LoRA weights of a model by their names in its `state_dict()`."""
    return {name: tensor for name, tensor in model.state_dict().items() if "lora_" in name}


@contextmanager
def switched_off(model: Any) -> Iterator[None]:
    """Context manager: switches a model's LoRA adapters off inside. `requires_grad` of the parameters stays as it is,
    because FSDP reads it in a forward."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [layer for layer in model.modules() if isinstance(layer, BaseTunerLayer)]
    trainable = {name: p.requires_grad for name, p in model.named_parameters()}

    def turn(on: bool) -> None:
        for layer in layers:
            layer.enable_adapters(enabled=on)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trainable[name])

    try:
        turn(False)
        yield
    finally:
        turn(True)


def save(model: Any, path: Path) -> None:
    """Write the model's adapters to a peft folder (`adapter_config.json`, `adapter_model.safetensors`)."""
    from safetensors.torch import save_file

    path.mkdir(parents=True, exist_ok=True)
    named = {_PREFIX + name.replace(_OURS, "."): tensor.contiguous() for name, tensor in tensors(model).items()}
    save_file(named, str(path / WEIGHTS))
    (path / CONFIG).write_text(json.dumps(config_in(model), indent=1))


def stored(path: Path) -> dict[str, torch.Tensor]:
    """Read the LoRA weights of a peft folder, under the names that they have in a model with adapters (see `add`)."""
    from safetensors.torch import load_file

    def ours(name: str) -> str:
        owner, _, leaf = name.removeprefix(_PREFIX).rpartition(".")
        return f"{owner}{_OURS}{leaf}"

    return {ours(name): tensor for name, tensor in load_file(str(path / WEIGHTS)).items()}


def layers(model: Any) -> dict[str, Any]:
    """Return the layers that have LoRA adapters, by the name that their weight has in a model without adapters."""
    if config_in(model) is None:
        return {}
    from peft.tuners.tuners_utils import BaseTunerLayer

    return {f"{name}.weight": one for name, one in model.named_modules() if isinstance(one, BaseTunerLayer)}


def parts(held: Mapping[str, torch.Tensor], plain: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the base weight, A and B of one adapted layer (named as in `layers`), from the weights `held` of a model
    with adapters.

    Raises `EngineError` where the layer is not linear.
    """
    layer = plain.removesuffix(".weight")
    if f"{layer}.lora_A{_OURS}weight" not in held:
        raise EngineError(f"LoRA adapter of {layer}", expected="a linear layer", found="adapters without lora_A")
    a, b = (held[f"{layer}.lora_{letter}{_OURS}weight"] for letter in "AB")
    return held[f"{layer}.base_layer.weight"], a, b


def by_plain_names(held: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights of a model with adapters, not merged; base weights appear also under their names in a model
    without adapters."""
    return {**held, **{name.replace(".base_layer.", "."): value for name, value in held.items()}}


def delta(layer: Any, a: torch.Tensor, b: torch.Tensor, rows: slice = slice(None)) -> torch.Tensor:
    """Compute what a LoRA adapter adds to the given rows of its layer's weight: scale·B·A."""
    added = a.T[rows] @ b.T if layer.fan_in_fan_out else b[rows] @ a
    return added * layer.scaling["default"]


@torch.no_grad()
def merged(model: Any, held: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """Merge LoRA adapters into the base weights; returns a plain model's weights by name, base + scale·B·A.

    `held` are the weights of the model with adapters; of `model` only the structure is read. With `dtype` they are in it
    and on the CPU, one after the other: those of a base in codes always, by default in float16. Raises `EngineError` where
    an adapted layer is not linear.
    """
    plain, adapted = dict[str, torch.Tensor](), layers(model)
    if dtype is None and isinstance(held, quantised.Weights) and held.coded:
        dtype = torch.float16
    for name in (name for name in held if "lora_" not in name):
        own, value = name.replace(".base_layer.", "."), held[name]
        if own in adapted:
            base, a, b = parts(held, own)
            value = base + delta(adapted[own], a, b)
        plain[own] = value.to("cpu", dtype) if dtype is not None and value.is_floating_point() else value
    return plain


def adapter_of(model: Any) -> dict[str, Any] | None:
    """Return the LoRA `rank` of a model and the name or folder of its `base` model; None for a model without adapters."""
    config = config_in(model)
    return {"rank": int(config["r"]), "base": str(config["base_model_name_or_path"])} if config is not None else None


def base_of(folder: Path) -> str | None:
    """Read the name of the base model from a peft adapter's folder; None where the folder holds no adapter."""
    there = (folder / CONFIG).is_file()
    return str(json.loads((folder / CONFIG).read_text(encoding="utf-8"))["base_model_name_or_path"]) if there else None
