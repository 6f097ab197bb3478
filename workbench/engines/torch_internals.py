"""torch's private names, all of them here: each says what public way is missing (seen in torch 2.11 to 2.15).

What travels to a process without this package has its own: `cluster/actor.py` (profiling all threads) and
`engines/vllm_server/process.py` (CUDA IPC, the deadline of an NCCL group).
"""

from __future__ import annotations

from functools import partial
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


def has_flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether `flash_forward` computes attention of queries [b, H, q, D] over keys and values [b, K, k, D] on this device.

    The public `scaled_dot_product_attention` returns no log-sum-exp, the public `flex_attention` does only where it is compiled.
    """
    if query.device.type != "cuda":
        return query.device.type == "cpu"
    shape = torch.backends.cuda.SDPAParams(query, key, value, None, 0.0, False, query.shape[1] != key.shape[1])
    return query.shape[-1] % 8 == 0 and torch.backends.cuda.can_use_flash_attention(shape)


def flash_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(attention [b, H, q, D], log-sum-exp of the scores [b, H, q] float32) by torch's flash kernels. `mask` is added to the
    scores, on a CPU only."""
    aten: Any = torch.ops.aten
    if query.device.type != "cuda":
        mask = None if mask is None else mask.to(query.dtype)  # the kernel misreads float32 beside float64 (torch 2.13)
        flash = partial(aten._scaled_dot_product_flash_attention_for_cpu, attn_mask=mask)
    else:
        flash = aten._scaled_dot_product_flash_attention
    out, total = flash(query, key, value, 0.0, causal, scale=scale)[:2]
    return out, total


def flash_backward(
    slope: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    total: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
) -> list[torch.Tensor]:
    """Gradients of queries, keys and values, of an attention `out` with log-sum-exp `total` whose gradient is `slope`."""
    aten: Any = torch.ops.aten
    states = (slope, query, key, value, out, total)
    if query.device.type != "cuda":
        # this kernel takes up to four times as long in half precision (torch 2.13): its products are small
        wide = [state.to(torch.promote_types(state.dtype, torch.float32)) for state in states]
        mask = None if mask is None else mask.to(wide[1].dtype)
        kernel = aten._scaled_dot_product_flash_attention_for_cpu_backward
        gradients = kernel(*wide, 0.0, causal, attn_mask=mask, scale=scale)
    else:  # without dropout no random numbers are read, and only packed rows of many lengths need their bounds
        none, rows = torch.zeros((), dtype=torch.uint64, device=query.device), [state.contiguous() for state in states]
        lengths, kernel = (query.shape[2], key.shape[2]), aten._scaled_dot_product_flash_attention_backward
        gradients = kernel(*rows, None, None, *lengths, 0.0, causal, none, none, scale=scale)
    return [one.to(query.dtype) for one in gradients]


def onednn_product(left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """left·rightᵀ + bias of tensors [..., K], [N, K] (plain, or from `onednn_layout`) and [N] of one type on a CPU, by oneDNN.
    No public operation multiplies plain tensors by it."""
    found: torch.Tensor = torch.ops.mkldnn._linear_pointwise(left, right, bias, "none", [], "")
    return found


def onednn_layout(weight: torch.Tensor) -> torch.Tensor:
    """A copy of a weight [N, K] in the order in which oneDNN reads it; a plain one is so copied at each product. The public
    `torch.utils.mkldnn` turns whole modules."""
    found: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
    return found


def mkl_product(
    left: torch.Tensor, right: torch.Tensor, plain: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """left·rightᵀ + bias of float32 tensors [n, ..., K] with n rows in all, [N, K] from `mkl_layout` for n rows, and [N]; `plain`
    is the weight itself. No public operation reads MKL's order."""
    found: torch.Tensor = torch.ops.mkl._mkl_linear(left, right, plain, bias, len(left))
    return found


def mkl_layout(weight: torch.Tensor, rows: int) -> torch.Tensor:
    """A copy of a float32 weight [N, K] in the order in which MKL reads it for a product with so many rows."""
    found: torch.Tensor = torch.ops.mkl._mkl_reorder_linear_weight(weight, rows)
    return found
