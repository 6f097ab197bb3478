"""Tensors as files: safetensors written tensor by tensor, so that no second copy of a model is held, and files in memory."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from workbench.base.files import memory_file

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""Names of dtypes in a safetensors file."""


@contextmanager
def in_memory(data: torch.Tensor) -> Iterator[str]:
    """Context manager: yields the path of a file in memory with these bytes (`files.memory_file`)."""
    with memory_file("workbench-weights") as (file, path):
        _write(file, data)
        yield path


def _write(file: Any, tensor: torch.Tensor) -> None:
    data = tensor.flatten().view(torch.uint8).numpy().data if tensor.numel() else b""
    while data:  # one call writes 2 GiB at most
        data = data[file.write(data) :]


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
        _write(file, tensor.detach().to("cpu", kinds[name]).contiguous())


def parameters(folder: str | os.PathLike[str]) -> int | None:
    """Number of parameters of a model's folder, by the headers of its safetensors files; None where it has none."""
    total, files = 0, sorted(Path(folder).glob("*.safetensors"))
    for path in files:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        total += sum(math.prod(one["shape"]) for name, one in header.items() if name != "__metadata__")
    return total if files else None
