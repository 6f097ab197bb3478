"""Device memory: an estimate before learning starts, and `OutOfMemory` for whatever torch raises when it runs out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from workbench.base import memory
from workbench.base.errors import OutOfMemory
from workbench.base.memory import gib
from workbench.dataproto.core import DataProto
from workbench.engines.settings import LocalSettings

_ADVICE = "lower micro_batch_tokens, switch on gradient_checkpointing, or take a smaller model"


def available(device: torch.device) -> int:
    """Free bytes on a device; for the CPU those that the kernel estimates to be available."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else memory.available()


def learning_estimate(model: Any, settings: LocalSettings) -> dict[str, int]:
    """Bytes that learning will take by part: gradients, Adam's two moments, activations of one micro-batch.

    Activations are about 34·hidden bytes·(dtype/2) a token and layer without attention maps (Korthikanti
    et al. 2022, https://arxiv.org/abs/2205.05198, eq. 2), one hidden state a layer when checkpointed.
    """
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    config = model.config
    size = next(model.parameters()).element_size()
    per_token = config.hidden_size * size * (1 if settings.gradient_checkpointing else 17) * config.num_hidden_layers
    return {"gradients": weights, "optimizer": 2 * weights, "activations": per_token * settings.micro_batch_tokens}


def preflight(model: Any, settings: LocalSettings) -> None:
    """Raises `OutOfMemory` where `learning_estimate` is more than the device has free."""
    parts = learning_estimate(model, settings)
    free = available(model.device)
    if sum(parts.values()) > free:
        what = f"learning would need about {gib(sum(parts.values()))} more on {model.device}"
        found = ", ".join(f"{name} {gib(size)}" for name, size in parts.items())
        raise OutOfMemory(what, expected=f"at most the {gib(free)} that are free", found=found, do=_ADVICE)


@contextmanager
def memory_errors(phase: str, shape: str | DataProto, setting: str = "micro_batch_tokens") -> Iterator[None]:
    """Context manager: raises torch's out-of-memory errors as `OutOfMemory`, which names the setting to lower."""
    if isinstance(shape, DataProto):
        shape = f"{len(shape)} rows × {shape['input_ids'].shape[1]} tokens"
    try:
        yield
    except (torch.cuda.OutOfMemoryError, MemoryError, RuntimeError) as cause:
        text = str(cause)
        cpu = "DefaultCPUAllocator" in text or "can't allocate memory" in text
        if isinstance(cause, OutOfMemory) or not (cpu or isinstance(cause, torch.cuda.OutOfMemoryError | MemoryError)):
            raise
        first = text.splitlines()[0] if text else "no message"
        raise OutOfMemory(f"out of memory in {phase} with {shape}", found=first, do=f"lower {setting}") from cause
