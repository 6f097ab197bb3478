"""A model's weights on their way from a learner to a sampler: plain tensors under Hugging Face names, nothing pickled."""

from __future__ import annotations

import json
import os
import struct
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from workbench.errors import EngineError, message

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""How a safetensors file calls them."""
_HEAD, _EMBEDDINGS = "lm_head.weight", "embed_tokens.weight"


def weights_of(learner: Any) -> dict[str, torch.Tensor]:
    """All weights of a learner by their Hugging Face names, adapters merged, a tied head under its own name, too.

    A learner with `full_weights()` is asked for them; any other saves a plain folder, which is read back.
    """
    if hasattr(learner, "full_weights"):
        return dict(learner.full_weights())
    with tempfile.TemporaryDirectory(prefix="workbench-weights-") as folder:
        save = getattr(learner, "save_merged", learner.save)
        save(Path(folder))
        return read_weights(Path(folder))


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of a Hugging Face folder, a tied head under its own name, too."""
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        found |= load_file(str(file))
    if not found:
        raise EngineError(message(f"weights of {folder}", expected="model*.safetensors", found="no such file"))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tied = config.get("tie_word_embeddings", config.get("text_config", {}).get("tie_word_embeddings", False))
    if tied and _HEAD not in found:
        found[_HEAD] = next(tensor for name, tensor in found.items() if name.endswith(_EMBEDDINGS))
    return found


@contextmanager
def in_memory(weights: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None) -> Iterator[str]:
    """Inside, a safetensors file of the weights that lies in memory alone; its path is good for processes of this user.

    Floating tensors are written as `dtype`. It is no file of any folder (`memfd`), so that neither a small /dev/shm limits
    it nor a killed driver leaves it behind. Tensors are written one by one: a second copy of a model is never held.
    """
    with os.fdopen(os.memfd_create("workbench-weights"), "wb", buffering=0) as file:
        write_to(file, weights, dtype)
        yield f"/proc/{os.getpid()}/fd/{file.fileno()}"


def write_to(file: Any, weights: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None) -> None:
    """The weights as a safetensors file, tensor by tensor; floating ones are written as `dtype`."""
    header, begin = {}, 0
    for name, tensor in weights.items():
        kind = _written_as(tensor, dtype)
        end = begin + tensor.numel() * kind.itemsize
        header[name] = {"dtype": _NAMES[kind], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begin = end
    told = json.dumps(header).encode()
    file.write(struct.pack("<Q", len(told)) + told)
    for tensor in weights.values():
        if tensor.numel():
            plain = tensor.detach().to("cpu", _written_as(tensor, dtype)).contiguous()
            _write(file, plain.flatten().view(torch.uint8).numpy().data)


def _written_as(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def _write(file: Any, data: memoryview) -> None:
    while data:  # one call writes 2 GiB at most
        data = data[file.write(data) :]
