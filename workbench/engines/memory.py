"""Memory: an estimate before work starts, and one error for running out of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from workbench.errors import OutOfMemory, message

_ADVICE = "lower micro_batch_tokens, switch on gradient_checkpointing, or take a smaller model"


def available(device: torch.device) -> int:
    """Free bytes on a device; for the CPU what the kernel says is available."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    with open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 1 << 62


def learning_estimate(model: Any, micro_batch_tokens: int, checkpointing: bool) -> dict[str, int]:
    """Bytes that learning will add: gradients, Adam's two moments, activations of one micro-batch.

    Activations are about 34·hidden bytes·(dtype/2) a token and layer without attention maps (Korthikanti
    et al. 2022, https://arxiv.org/abs/2205.05198, eq. 2), one hidden state a layer when checkpointed.
    """
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    config = model.config
    size = next(model.parameters()).element_size()
    per_token = config.hidden_size * size * (1 if checkpointing else 17) * config.num_hidden_layers
    return {"gradients": weights, "optimizer": 2 * weights, "activations": per_token * micro_batch_tokens}


def preflight(model: Any, micro_batch_tokens: int, checkpointing: bool) -> None:
    """Refuse to learn where the estimate does not fit."""
    parts = learning_estimate(model, micro_batch_tokens, checkpointing)
    free = available(model.device)
    if sum(parts.values()) > free:
        found = ", ".join(f"{name} {gib(size)}" for name, size in parts.items())
        raise OutOfMemory(
            message(
                f"learning would need about {gib(sum(parts.values()))} more on {model.device}",
                expected=f"at most {gib(free)} that are free",
                found=found,
                do=_ADVICE,
            )
        )


def gib(size: int) -> str:
    """`1.25 GiB`, or MiB below a tenth of one."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 // 10 else f"{size / 2**20:.1f} MiB"


@contextmanager
def memory_errors(phase: str, shape: str, setting: str = "micro_batch_tokens") -> Iterator[None]:
    """Whatever torch raises for lack of memory becomes `OutOfMemory`: phase, shapes, which setting to turn."""
    try:
        yield
    except (torch.cuda.OutOfMemoryError, MemoryError, RuntimeError) as cause:
        text = str(cause)
        cpu = "DefaultCPUAllocator" in text or "can't allocate memory" in text
        if isinstance(cause, OutOfMemory) or not (cpu or isinstance(cause, torch.cuda.OutOfMemoryError | MemoryError)):
            raise
        first = text.splitlines()[0] if text else "no message"
        raise OutOfMemory(
            message(f"out of memory in {phase} with {shape}", found=first, do=f"lower {setting}")
        ) from cause
