"""Weights that go from a learner to a sampler: plain tensors under Hugging Face names, as safetensors and never pickled."""

from __future__ import annotations

import json
import os
import struct
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from workbench.engines.local_engine.loading import check_fit, load_model
from workbench.engines.protocol import Learner, SampleMany, WeightSource
from workbench.engines.settings import LocalSettings

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""Names of dtypes in a safetensors file."""


def weights_of(learner: Learner) -> dict[str, torch.Tensor]:
    """All weights of a learner by Hugging Face names: its `full_weights()`, or else a model folder saved and read back."""
    if isinstance(learner, WeightSource):
        return dict(learner.full_weights())
    with tempfile.TemporaryDirectory(prefix="workbench-weights-") as folder:
        learner.save(Path(folder))
        return dict(load_model(folder, LocalSettings(device="cpu")).state_dict())


@lru_cache(maxsize=4)
def _parameters(folder: str, trust: bool) -> dict[str, torch.Tensor]:
    """The model's tensors without their values, tied ones once."""
    return dict(load_model(folder, LocalSettings(device="cpu", trust_remote_code=trust), empty=True).named_parameters())


class Pushed(SampleMany):
    """Base class of samplers that take weights from a learner: adds `sync`."""

    _folder: str | Path
    _settings: Any

    def check_whole(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Raise `EngineError` where a tensor of the model is not among the `weights`, or is there in another shape.

        vLLM and SGLang leave the old values of a tensor that a push lacks, and go on.
        """
        check_fit("the weights to push", weights, _parameters(str(self._folder), self._settings.trust_remote_code))

    def sync(self: Any, learner: Learner) -> float:
        """Load a learner's weights into the sampler, LoRA adapters merged, under its version; returns the seconds taken."""
        return float(self.load_weights(weights_of(learner), learner.version))


@contextmanager
def in_memory(weights: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None) -> Iterator[str]:
    """Context manager: yields the path of a safetensors file in memory with the weights, readable by this user's processes.

    Floating tensors are written as `dtype`. The file is in no folder (`memfd`): a small /dev/shm does not limit it, and a
    killed driver leaves nothing behind. Tensors are written one by one, so that no second copy of the model is held.
    """
    with os.fdopen(os.memfd_create("workbench-weights"), "wb", buffering=0) as file:
        write_to(file, weights, dtype)
        yield f"/proc/{os.getpid()}/fd/{file.fileno()}"


def write_to(file: Any, weights: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None) -> None:
    """Write weights to an open file as safetensors, tensor by tensor; floating ones as `dtype`."""
    kinds = {name: (dtype or one.dtype) if one.is_floating_point() else one.dtype for name, one in weights.items()}
    header, begin = {}, 0
    for name, tensor in weights.items():
        end = begin + tensor.numel() * kinds[name].itemsize
        header[name] = {"dtype": DTYPES[kinds[name]], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header).encode()
    file.write(struct.pack("<Q", len(text)) + text)
    for name, tensor in weights.items():
        plain = tensor.detach().to("cpu", kinds[name]).contiguous()
        data = plain.flatten().view(torch.uint8).numpy().data if tensor.numel() else b""
        while data:  # one call writes 2 GiB at most
            data = data[file.write(data) :]
