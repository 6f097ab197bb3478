"""Device memory: an estimate before learning starts, and `OutOfMemory` for whatever torch raises when it runs out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch

from workbench.base import memory
from workbench.base.errors import OutOfMemory
from workbench.base.memory import estimated, gib
from workbench.dataproto.core import DataProto
from workbench.engines.settings import LocalSettings
from workbench.functional.logprobs import CHUNK_BYTES

ADVICE = (
    "lower micro_batch_tokens, switch on gradient_checkpointing, or take a smaller model; where it would fit after all, open "
    "the engine with check_memory=False"
)
SHARED = "of a sampler beside this learner, paired(…, share_device=True) has it sleep while the learner works"
OTHERS = "other processes and CUDA itself"
PASS = 3 << 28
"""Bytes of activations beyond which a pass on a CPU is no faster (measured)."""
LEAST = 256
"""Tokens of a pass below which it is slower (measured)."""
GPU_CHUNKS = 8
"""Times `CHUNK_BYTES` of logits on a GPU, where many small products take longer to launch than to compute (measured)."""
AS_ON_GPU: ContextVar[bool] = ContextVar("workbench_as_on_gpu", default=False)
"""Whether a CPU computes logits in a GPU's chunks and by torch's products, so that a GPU's memory can be measured."""
SURE = 2
"""Times its need by `learning_estimate` that must be free, or the need is measured."""


Needed = Callable[[bool], Mapping[str, int]]
"""Bytes by part that learning needs: estimated (False), or measured (True)."""


def chunk_bytes(kind: str) -> int:
    """Bytes of the logits that exist at one time on a kind of device (`cpu`, `cuda`)."""
    return CHUNK_BYTES * (GPU_CHUNKS if kind == "cuda" or AS_ON_GPU.get() else 1)


def chunk_rows(kind: str, width: int) -> int:
    """How many rows of `width` float32 logits exist at one time on a kind of device; at least one."""
    return max(chunk_bytes(kind) // (4 * width), 1)


def available(device: torch.device) -> int:
    """Bytes that this process can still allocate on a device; for the CPU the kernel's estimate of available memory.

    Memory that torch's allocator has reserved on a GPU and does not use counts as free, because it is reused first.
    """
    if device.type != "cuda":
        return memory.available()
    reusable = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + reusable


def learning_estimate(model: Any, settings: LocalSettings, tokens: int, kind: str | None = None) -> dict[str, int]:
    """Estimate the bytes that learning will take by part: gradients and Adam's two moments of the trained weights,
    activations, logits.

    `tokens` is the size of a micro-batch, `kind` the kind of device (None: the model's). The activations kept for each
    token and layer are those of `_by_config`; with gradient checkpointing H numbers a layer, and one layer in full.
    Frozen weights keep fewer activations, but do not lower the peak. With offloaded moments, a GPU holds those of one
    parameter at a time.
    """
    sizes = [one.numel() * one.element_size() for one in model.parameters() if one.requires_grad]
    trained, away = sum(sizes), settings.offload == "optimizer" and model.device.type == "cuda"
    moments = moments_of(max(sizes, default=0) if away else trained, settings)
    vocabulary, hidden = model.get_input_embeddings().weight.shape
    layers = estimated("what a layer keeps", lambda: _by_config(model.config), None) or _by_shapes(model)
    kind = kind or model.device.type
    size = 2 if settings.half(kind) else 4
    kept = len(layers) * hidden + max(layers) if settings.gradient_checkpointing else sum(layers)
    # a chunk's logits and what is computed of them, in half precision a copy, too; ranks' heads take a chunk more
    logits = min(4 * vocabulary * tokens, chunk_bytes(kind)) * (6 - size // 2 * (type(settings) is LocalSettings)) // 2
    return {"gradients": trained, "optimizer": moments, "activations": kept * size * tokens, "logits": logits}


def moments_of(trained: int, settings: LocalSettings) -> int:
    """Bytes of Adam's two moments for `trained` bytes of float32 weights: twice `trained`, or in 8 bits one byte per
    value and the largest value of each block."""
    return 2 * trained if settings.optimizer == "adamw" else trained * 65 // 128


def pass_tokens(model: Any, settings: LocalSettings, kind: str, free: int, shards: int = 1) -> int:
    """Compute the token budget of one forward pass on a kind of device (`cpu`, `cuda`) where `micro_batch_tokens` is not
    set: at most `settings.budget`, at least `LEAST`.

    The activations of a pass take at most half of the `free` bytes that gradients and moments (of which this process has
    one of `shards` equal parts) leave, and on a CPU (counted in float32 without checkpointing) at most `PASS` bytes. The
    budget is a power of two, so that a resumed or replayed step, with a little more or less free, makes the same passes.
    """
    most = settings.budget(kind)
    parts = estimated("what a pass keeps", lambda: learning_estimate(model, settings, most), None)
    if parts is None:
        return most
    room = (free - (parts["gradients"] + parts["optimizer"]) // shards) // 2
    tokens = pass_size(most, parts["activations"], room)
    if kind == "cpu":  # longer passes gain nothing with checkpointing or in bfloat16, either
        plain = settings.replace(gradient_checkpointing=False, dtype="float32", base_dtype="float32")
        tokens = min(tokens, pass_size(most, learning_estimate(model, plain, most)["activations"], PASS))
    return tokens


def pass_size(most: int, activations: int, room: int) -> int:
    """Compute the token budget of a pass whose activations take at most `room` bytes, if the activations of `most`
    tokens take `activations` bytes: a power of two, at least `LEAST`, at most `most`."""
    return min(max(1 << max(most * room // activations, 1).bit_length() - 1, LEAST), most)


def _by_config(config: Any) -> list[int]:
    """Count the numbers that the backward pass keeps of a token in each layer: 5H + 3Q + 2K + 4I (H hidden size, Q
    query, K key, I MLP width).

    The formula was counted on Llama's and Qwen2's layers. Sizes that a configuration gives layer by layer are read so.
    """
    text = config.get_text_config()
    kept = []
    for place, layer in enumerate(getattr(text, "per_layer_config", None) or [text] * text.num_hidden_layers):
        heads = getattr(layer, "num_attention_heads", 1)
        each = getattr(layer, "head_dim", None) or layer.hidden_size // heads
        if (getattr(layer, "layer_types", None) or [])[place : place + 1] == ["full_attention"]:
            each = getattr(layer, "global_head_dim", None) or each  # Gemma 4 before transformers' `per_layer_config`
        inner = getattr(layer, "intermediate_size", None) or 4 * layer.hidden_size
        if isinstance(inner, Sequence):
            inner = inner[place]
        if routed := getattr(layer, "num_experts_per_tok", None):
            inner = routed * (getattr(layer, "moe_intermediate_size", None) or inner)
        keys = getattr(layer, "num_key_value_heads", None) or heads
        kept.append(5 * layer.hidden_size + (3 * heads + 2 * keys) * each + 4 * inner)
    return kept


def _by_shapes(model: Any) -> list[int]:
    """Estimate the numbers that the backward pass keeps of a token in each layer from the weights' shapes: inputs and
    outputs of each matrix (where `_by_config` fails)."""
    sizes: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        layer = next((part for part in name.split(".") if part.isdecimal()), "")
        if layer and parameter.dim() > 1:
            sizes[layer] += sum(parameter.shape[-2:])
    return list(sizes.values()) or [0]


def preflight(device: torch.device, free: int, needed: Needed, learners: str = "", refuses: bool = True) -> str:
    """Compare the bytes that learning needs with those that the device has `free`, and describe both. Raises
    `OutOfMemory` where too few are free, unless `refuses` is false.

    `needed(False)` estimates the bytes by part; where less than `SURE` times that is free, `needed(True)` measures
    them. `learners` names the roles of several learners whose needs are added.
    """
    parts, how = needed(False), "about"
    if sum(parts.values()) * SURE > free:
        parts, how = needed(True), "measured"
    need = sum(parts.values())
    if need > free and refuses:
        expected = f"at most the {gib(free)} that are free" + (f", for {learners} together" if learners else "")
        found = ", ".join(f"{name} {gib(size)}" for name, size in parts.items())
        what = f"learning would need about {gib(need)} more on {device}"
        raise OutOfMemory(what, expected=expected, found=found, do=ADVICE)
    return f"{how} {gib(need)} more on {device}, {gib(free)} free"


# --- where it ran out -----------------------------------------------------------------------------


class LiveTensors(NamedTuple):
    """What an engine holds in memory when an allocation fails: its device, bytes by part, and its settings."""

    device: torch.device
    parts: dict[str, int]
    settings: LocalSettings


def live(model: Any, optimizer: Any, settings: LocalSettings) -> LiveTensors:
    """Count the bytes of a model's weights, gradients and Adam moments on its device; of a sharded model those of this
    rank."""
    every = list(model.parameters())
    kept = [*every, *model.buffers()]
    state = optimizer.in_memory().values() if optimizer is not None else ()
    tensors = {"weights": kept, "gradients": [one.grad for one in every if one.grad is not None], "moments": state}
    device = every[0].device
    sizes = {
        name: sum(_here(tensor).nbytes for tensor in held if tensor.device.type == device.type)
        for name, held in tensors.items()
    }
    return LiveTensors(device, sizes, settings)


def _here(tensor: Any) -> Any:
    return getattr(tensor, "to_local", lambda: tensor)()


@contextmanager
def memory_errors(
    phase: str,
    shape: str | DataProto,
    setting: str = "micro_batch_tokens",
    holds: Callable[[], LiveTensors] | None = None,
) -> Iterator[None]:
    """Context manager: turns out-of-memory errors of torch and Python into `OutOfMemory` with the phase, what was live,
    and the settings that help.

    `shape` describes the batch that was computed; `setting` is the setting to lower; `holds()` returns what the engine
    holds.
    """
    if isinstance(shape, DataProto):
        tokens = f" × {shape['input_ids'].shape[1]} tokens" if "input_ids" in shape else ""
        shape = f"{len(shape)} rows{tokens}"
    try:
        yield
    except (torch.cuda.OutOfMemoryError, MemoryError, RuntimeError) as cause:
        text = str(cause)
        cpu = "DefaultCPUAllocator" in text or "can't allocate memory" in text
        if isinstance(cause, OutOfMemory) or not (cpu or isinstance(cause, torch.cuda.OutOfMemoryError | MemoryError)):
            raise
        first = text.splitlines()[0] if text else "no message"
        # while the traceback holds its frames what they made is still there, and is counted
        told, do = _in_words(phase, holds()) if holds is not None else ("", f"lower {setting}")
        what = f"out of memory in {phase} with {shape}{told}"
        raise OutOfMemory(what, found=first, do=do if setting in do else f"lower {setting}, or {do}") from cause


def _in_words(phase: str, held: LiveTensors) -> tuple[str, str]:
    """Describe the memory in use after a failed allocation; returns (what was live, as text; what to do about the
    largest part)."""
    parts, known, gpu = dict(held.parts), sum(held.parts.values()), held.device.type == "cuda"
    passing = "KV cache and activations" if phase == "sampling" else "activations"
    if gpu:
        allocated = torch.cuda.memory_allocated(held.device)
        parts[passing] = max(allocated - known, 0)
        reserved = torch.cuda.memory_reserved(held.device)
        parts["cached blocks"] = reserved - allocated
        free, total = map(int, torch.cuda.mem_get_info(held.device))
        parts[OTHERS] = max(total - free - reserved, 0)
    else:
        free = available(held.device)
        parts[f"{passing} and the rest of the process"] = max(memory.resident() - known, 0)
    told = ", ".join(f"{name} {gib(size)}" for name, size in parts.items() if size)
    return f"; live on {held.device}: {told}, free {gib(free)}", _helps(phase, held.settings, parts, gpu)


def _helps(phase: str, settings: LocalSettings, parts: dict[str, int], gpu: bool) -> str:
    """Name the settings that shrink the largest part in memory, as text, the one that costs least time first."""
    largest = max(parts, key=lambda name: parts[name])
    if largest == OTHERS:
        return f"lower micro_batch_tokens, or free what others hold: {SHARED}; `nvidia-smi` names other processes"
    if largest == "cached blocks":
        return "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: what is cached is in pieces that are too small"
    if largest.startswith("KV cache"):
        return "lower max_wave"
    sole = type(settings) is LocalSettings  # ranks have neither
    adapters = [] if settings.lora_rank else ["lora_rank=32 (gradients and moments of adapters alone)"]
    if largest in ("gradients", "moments"):
        away = ["offload='optimizer'"] if gpu and settings.offload == "none" else []
        eighth = ["optimizer='adamw8bit'"] if sole and settings.optimizer == "adamw" else []
        return " or ".join([*away, *adapters, *eighth, "more ranks: engines.fsdp(…)"])
    if largest == "weights":
        codes = ["base_dtype='nf4' (the base in 4 bits)"] if sole and settings.lora_rank else []
        smaller = codes if settings.base_dtype != "nf4" else []
        return " or ".join([*adapters, *smaller, "more ranks: engines.fsdp(…)", "a smaller model"])
    again = ["set gradient_checkpointing=True"] if phase == "learn" and not settings.gradient_checkpointing else []
    return " or ".join([f"lower micro_batch_tokens (now {settings.budget('cuda' if gpu else 'cpu'):,})", *again])


# --- how much was needed --------------------------------------------------------------------------


def peaks(device: str, begin: bool = False) -> dict[str, int]:
    """Peak memory in bytes since the last call with `begin=True`.

    `host` is this process's memory (0 where the system does not report it), `device` that of tensors on its GPU,
    `total` the GPU's size.
    """
    most = {"host": memory.peak(begin), "device": 0, "total": 0}
    if device == "cuda":
        most |= {"device": torch.cuda.max_memory_allocated(), "total": int(torch.cuda.mem_get_info()[1])}
        if begin:
            torch.cuda.reset_peak_memory_stats()
    return most
