"""torch's private names, all of them here: each says what public way is missing (seen in torch 2.11 to 2.15).

What travels to a process without this package has its own: `cluster/actor.py` (profiling all threads) and
`engines/vllm_server/process.py` (CUDA IPC, the deadline of an NCCL group).
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, is_fake
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["FakeTensor", "FakeTensorMode", "TorchDispatchMode", "is_fake", "tree_leaves"]


def asks_for_shapes() -> bool:
    """Whether the present operation runs on fake tensors only, as when `DTensor` works out a result's shape."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def storage_id(storage: Any) -> int:
    """Return a number that identifies a storage while it lives. The public `data_ptr` is 0 for every storage without
    data."""
    return int(storage._cdata)


def fake_store() -> Any:
    """Make the store for a process group of torch's backend `fake`, which sends nothing. The backend's name is public,
    its store is not."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def split_mesh(mesh: Any, sizes: tuple[int, ...], names: tuple[str, ...]) -> Any:
    """Split the first dimension of a device mesh into several. A new public mesh would create process groups of its
    own."""
    return mesh._unflatten(0, sizes, names)


def joined_mesh(meshes: list[Any]) -> Any:
    """Return a device mesh with the dimensions of several meshes together."""
    return type(meshes[0])._concatenate(meshes)


def local_part(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return shape and start indices of the part of a `DTensor` that this rank holds; the public `to_local` does not
    tell the start."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, first = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(shape), tuple(first)
