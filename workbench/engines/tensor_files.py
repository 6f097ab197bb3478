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
from workbench.dataproto.claims import DTYPES


@contextmanager
def in_memory(data: torch.Tensor) -> Iterator[str]:
    """Context manager: yields the path of a file in memory with these bytes (`files.memory_file`)."""
    with memory_file("workbench-weights") as (file, path):
        write_bytes(file, data)
        yield path


def write_bytes(file: Any, tensor: torch.Tensor) -> None:
    """Write the bytes of a contiguous tensor on the CPU to an open file."""
    data = tensor.flatten().view(torch.uint8).numpy().data if tensor.numel() else b""
    while data:  # one call writes 2 GiB at most
        data = data[file.write(data) :]


def write_to(file: Any, weights: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None) -> None:
    """Write weights to an open file as safetensors, tensor by tensor; floating ones as `dtype`."""
    kinds = {name: (dtype or one.dtype) if one.is_floating_point() else one.dtype for name, one in weights.items()}
    file.write(header({name: (one.shape, kinds[name]) for name, one in weights.items()}))
    for name, tensor in weights.items():
        write_bytes(file, tensor.detach().to("cpu", kinds[name]).contiguous())


def header(tensors: Mapping[str, tuple[torch.Size, torch.dtype]], **facts: Any) -> bytes:
    """What a safetensors file of tensors of these shapes and dtypes begins with; `facts` are further entries, before theirs."""
    begin = 0
    for name, (shape, dtype) in tensors.items():
        end = begin + shape.numel() * dtype.itemsize
        facts[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(facts).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors' bytes are aligned
    return struct.pack("<Q", len(text)) + text


def parameters(folder: str | os.PathLike[str]) -> int | None:
    """Number of parameters of a model's folder, by the headers of its safetensors files; None where it has none."""
    total, files = 0, sorted(Path(folder).glob("*.safetensors"))
    for path in files:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        total += sum(math.prod(one["shape"]) for name, one in header.items() if name != "__metadata__")
    return total if files else None
