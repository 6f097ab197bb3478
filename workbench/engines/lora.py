"""LoRA through peft: adapters in the model's own layers, the base frozen; a reference is the base with them switched off.

An adapter's folder is peft's (`adapter_config.json`, `adapter_model.safetensors`), so that others open it too. Hu et al. 2021,
https://arxiv.org/abs/2106.09685.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from workbench.errors import EngineError, boundary, message

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX, _OURS = "base_model.model.", ".default."


def config_of(settings: Any, base: str) -> dict[str, Any]:
    """peft's configuration as plain values."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": settings.lora_rank,
        "lora_alpha": settings.lora_alpha,
        "lora_dropout": settings.lora_dropout,
        "target_modules": list(settings.lora_targets),
        "bias": "none",
    }


def add(model: Any, config: Mapping[str, Any]) -> None:
    """Put adapters that start as nothing (B = 0) into the target layers, and freeze everything else.

    Raises `EngineError` where peft is not installed, or no layer has such a name.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as cause:
        raise EngineError(message("LoRA needs peft", do="pip install peft")) from cause
    known = {key: config[key] for key in ("r", "lora_alpha", "lora_dropout", "target_modules", "bias")}
    with torch.random.fork_rng(devices=[]), boundary("adding LoRA adapters", EngineError):
        torch.manual_seed(0)  # A is drawn: the same adapter for the same model, whatever drew before
        inject_adapter_in_model(LoraConfig(**known, task_type="CAUSAL_LM"), model)
    model.workbench_lora = dict(config)


def config_in(model: Any) -> dict[str, Any] | None:
    """The configuration of a model's adapters; None for a plain model."""
    return getattr(model, "workbench_lora", None)


def tensors(model: Any) -> dict[str, torch.Tensor]:
    """Adapter weights by name in the model."""
    return {name: tensor for name, tensor in model.state_dict().items() if "lora_" in name}


@contextmanager
def switched_off(model: Any) -> Iterator[None]:
    """Inside, the model is its base; what learns is marked as before, also meanwhile (FSDP looks at it in a forward)."""
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
    """peft's folder: other libraries load it on the base model."""
    from safetensors.torch import save_file

    path.mkdir(parents=True, exist_ok=True)
    named = {_PREFIX + name.replace(_OURS, "."): tensor.contiguous() for name, tensor in tensors(model).items()}
    save_file(named, str(path / WEIGHTS))
    (path / CONFIG).write_text(json.dumps(config_in(model), indent=1))


def stored(path: Path) -> dict[str, torch.Tensor]:
    """Adapter weights of a folder by their names in a model."""
    from safetensors.torch import load_file

    def ours(name: str) -> str:
        owner, _, leaf = name.removeprefix(_PREFIX).rpartition(".")
        return f"{owner}{_OURS}{leaf}"

    return {ours(name): tensor for name, tensor in load_file(str(path / WEIGHTS)).items()}


@torch.no_grad()
def load(model: Any, path: Path) -> None:
    """Adapter weights from a folder into a model that has such adapters. Raises `EngineError` where they do not fit."""
    from safetensors.torch import load_file

    stored = load_file(str(path / WEIGHTS))
    for name, tensor in tensors(model).items():
        key = _PREFIX + name.replace(_OURS, ".")
        if key not in stored or stored[key].shape != tensor.shape:
            raise EngineError(message(f"adapter {path}", expected=f"{key} of {tuple(tensor.shape)}", found="none such"))
        tensor.copy_(stored[key])


def merged(model: Any) -> Any:
    """A plain copy of the model with the adapters worked into its weights."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    plain = copy.deepcopy(model)
    for name, layer in list(plain.named_modules()):
        if isinstance(layer, BaseTunerLayer):
            layer.merge()
            parent, _, child = name.rpartition(".")
            setattr(plain.get_submodule(parent), child, layer.get_base_layer())
    for attribute in ("workbench_lora", "peft_config", "_hf_peft_config_loaded"):
        vars(plain).pop(attribute, None)
    return plain


@torch.no_grad()
def worked_in(model: Any, held: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights of a model with adapters (`held`, whole, by its names) as those of a plain one: base + scale·B·A.

    Of the model only its structure is looked at. Raises `EngineError` for adapters of other than linear layers.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    plain = {name.replace(".base_layer.", "."): value for name, value in held.items() if "lora_" not in name}
    for name, layer in model.named_modules():
        if isinstance(layer, BaseTunerLayer):
            one: Any = layer
            if f"{name}.lora_A{_OURS}weight" not in held:
                raise EngineError(message(f"adapter of {name}", expected="a linear layer", found=type(one).__name__))
            a, b = (held[f"{name}.lora_{letter}{_OURS}weight"] for letter in "AB")
            delta = (b @ a) * one.scaling["default"]
            plain[f"{name}.weight"] = held[f"{name}.base_layer.weight"] + (delta.T if one.fan_in_fan_out else delta)
    return plain


def base_of(folder: Path) -> str | None:
    """The base model that an adapter's folder names; None where it is no adapter's."""
    file = folder / CONFIG
    if not file.is_file():
        return None
    return str(json.loads(file.read_text(encoding="utf-8"))["base_model_name_or_path"])
