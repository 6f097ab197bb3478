"""Batches on their way: tensors travel as numpy views through the object store and are copied where somebody looks at them.

A worker sees a batch whose columns are still in shared memory. Looking at one copies it, so nobody can change what another
reads; a column that nobody looks at costs nothing. Torch's own pickling would copy everything twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from workbench.dataproto import DataProto, Origin
from workbench.dataproto.core import Lazy


class Shared(Lazy):
    """A column in shared memory: looking at it, or at a part of it, copies."""

    def __init__(self, packed: Any) -> None:
        array, dtype, shape = packed

        def part(start: int, stop: int) -> torch.Tensor:
            return _own((array[start:stop], dtype, ())) if array.shape == shape else _own(packed)[start:stop]

        super().__init__(lambda: _own(packed), shape, dtype, part)
        self.packed = packed


class Parcel:
    """A batch, packed: unpickles as a `DataProto` whose columns are read when looked at."""

    def __init__(self, batch: DataProto) -> None:
        self.batch = batch

    def __reduce__(self) -> tuple[Any, ...]:
        batch = self.batch
        raw = batch.batch.raw()
        # a column that nobody has looked at goes on as it came
        tensors = {
            name: value.packed if isinstance(value, Shared) else _array(batch.batch[name])
            for name, value in raw.items()
        }
        objects = {name: batch.non_tensor_batch[name] for name in batch.non_tensor_batch}
        return _open, (tensors, objects, dict(batch.meta_info), dict(batch.origins))


class TensorParcel:
    """A tensor, packed: unpickles as a tensor of the receiver's own."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __reduce__(self) -> tuple[Any, ...]:
        return _own, (_array(self.tensor),)


def pack(value: Any) -> Any:
    """The value with every batch and tensor in it (through plain tuples, lists and dicts) packed."""
    if isinstance(value, DataProto):
        return Parcel(value)
    if type(value) is torch.Tensor:
        return TensorParcel(value)
    if type(value) in (tuple, list):
        return type(value)(pack(one) for one in value)
    if type(value) is dict:
        return {key: pack(one) for key, one in value.items()}
    return value


def read(value: Any) -> Any:
    """Look at every column of every batch in a value, so that nothing of it stays in the object store."""
    if isinstance(value, DataProto):
        for name in value.batch:
            value.batch[name]
    elif isinstance(value, Mapping):
        for one in value.values():
            read(one)
    elif isinstance(value, tuple | list):
        for one in value:
            read(one)
    return value


def _array(tensor: torch.Tensor) -> Any:
    """(bytes as numpy, dtype) of a tensor, without a copy where it is contiguous and on the CPU."""
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16 or tensor.is_complex():
        flat = tensor.contiguous().flatten().view(torch.uint8).numpy() if tensor.numel() else np.empty(0, np.uint8)
        return flat, tensor.dtype, tuple(tensor.shape)
    return np.ascontiguousarray(tensor.numpy()), tensor.dtype, tuple(tensor.shape)


def _own(packed: tuple[np.ndarray, torch.dtype, tuple[int, ...]]) -> torch.Tensor:
    array, dtype, shape = packed
    # arrays from shared memory are read-only; a tensor over them would be a writable alias
    tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
    return tensor.view(dtype).view(shape) if tensor.dtype != dtype else tensor


def _open(
    tensors: dict[str, Any], objects: dict[str, Any], meta: dict[str, Any], origins: dict[str, Origin]
) -> DataProto:
    new = object.__new__(DataProto)
    new._set({name: Shared(packed) for name, packed in tensors.items()}, objects, meta, origins)
    return new
