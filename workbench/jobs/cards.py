"""What the doctor knows of GPUs: what a compute capability has, and which models fit by the estimate of `cluster.fits`.

That a card has no bfloat16, no flash kernel, or little shared memory is a fact and no fault.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from workbench.base.memory import gib
from workbench.cluster.fitting import fits
from workbench.cluster.status import unproven
from workbench.jobs.machine import OK, SKIPPED, CheckResult, half_of

TOKENS = 1024
"""Prompt and response of one sequence for which models are tried."""
SMALL = 100 << 10
"""Bytes of shared memory a block below which large tiles of kernels do not fit (sm_75 has 64 KiB, sm_90 227)."""


def _qwen(hidden: int, inner: int, layers: int, heads: int, keys: int, rows: int, tied: bool) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "vocab_size": rows}
    return {
        **{"model_type": "qwen2", **sizes, "num_attention_heads": heads, "num_key_value_heads": keys},
        "tie_word_embeddings": tied,
    }


SIZES = {
    "0.5B": _qwen(896, 4864, 24, 14, 2, 151_936, True),
    "1.5B": _qwen(1536, 8960, 28, 12, 2, 151_936, True),
    "3B": _qwen(2048, 11_008, 36, 16, 2, 151_936, True),
    "7B": _qwen(3584, 18_944, 28, 28, 4, 152_064, False),
    "8B": _qwen(4096, 14_336, 32, 32, 8, 128_256, False) | {"model_type": "llama"},
}
"""Size → its config: Qwen2.5's four, and Llama 3.1 8B's."""


WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "LoRA": {"lora_rank": 16, "base_dtype": "bfloat16"},
    "with a 4-bit base": {"lora_rank": 16, "base_dtype": "nf4"},
}
"""How a model is trained on one GPU, in words, and the settings of its local engine. Of float16 each takes the same."""


def largest(memory: int) -> str:
    """Name the largest model size of `SIZES` that a GPU of `memory` bytes can train in each of `WAYS` while the same
    engine samples; nothing where none fits.
    """
    found = {
        way: next((size for size in reversed(SIZES) if trains(size, memory, settings)), "none")
        for way, settings in WAYS.items()
    }
    return ", ".join(f"{size} {way}" for way, size in found.items())


def trains(size: str, memory: int, settings: Mapping[str, Any]) -> bool:
    """Whether a GPU of `memory` bytes can train a model size of `SIZES`, by the memory estimate with gradient
    checkpointing.
    """
    asked: dict[str, Any] = {"tokens": TOKENS, "gpus": 1, "memory": memory, "sampler": None, "reference": False}
    asked |= {"dtype": "bfloat16", "gradient_checkpointing": True, **settings}
    return bool(fits(SIZES[size], learner="local", **asked))


def facts(card: Any) -> Iterator[str]:
    """Yield the half precision of a GPU (of `torch.cuda.get_device_properties`), then each feature of newer GPUs that
    it lacks.
    """
    yield half_of((card.major, card.minor))
    if card.major < 8:
        yield "no bfloat16"
        yield "no flash kernel (attention takes torch's memory-efficient one)"
    small = getattr(card, "shared_memory_per_block_optin", SMALL)
    if small < SMALL:
        yield f"{small >> 10} KiB of shared memory a block"


def models() -> CheckResult:
    """Describe each GPU: the features that it lacks, the largest models that fit by the estimate of `cluster.fits`, and
    what no GPU has run yet.
    """
    if not torch.cuda.is_available():
        asks = "`wb.cluster.fits(model, tokens=…, gpus=1, memory=…)` asks for one that is not here"
        return CheckResult(SKIPPED, f"no GPU: {asks}")
    found = []
    for number in range(torch.cuda.device_count()):
        card, memory = torch.cuda.get_device_properties(number), torch.cuda.mem_get_info(number)[1]
        found.append(f"{card.name}, {'; '.join([gib(memory), *facts(card)])}: {largest(memory)}")
    return CheckResult(OK, f"{'; '.join(dict.fromkeys(found))} (sequences of {TOKENS:,} tokens, estimated)", unproven())
