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
    """Whether an operation is traced by fake tensors alone, as `DTensor` does to learn a shape."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def storage_id(storage: Any) -> int:
    """A number of a storage while it lives. The public `data_ptr` is 0 for every one without data."""
    return int(storage._cdata)


def fake_store() -> Any:
    """The store of a process group of torch's backend `fake`, which sends nothing. The backend's name is public, its store is not."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def split_mesh(mesh: Any, sizes: tuple[int, ...], names: tuple[str, ...]) -> Any:
    """A dimension of a device mesh as several. A new public mesh would have process groups of its own."""
    return mesh._unflatten(0, sizes, names)


def joined_mesh(meshes: list[Any]) -> Any:
    """A device mesh with the dimensions of several."""
    return type(meshes[0])._concatenate(meshes)


def local_part(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and first place of the part of a `DTensor` that this rank has; the public `to_local` has no place."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, first = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(shape), tuple(first)
