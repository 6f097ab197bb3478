"""Meshes of ranks: how many replicas and shards, and into how many parts sequences and tensors are cut; which rank has what.

Ranks are numbered row by row over (replicate, dp, cp, tp), so that the ranks of one tensor are neighbours. Parameters
are sharded over dp·cp (`shard`), copied `replicate` times, and cut over `tp`. Experts are spread over `ep` of the
dp·cp ranks.

What ranks must agree on, so that none waits for ever in a collective, is at the end; every rank must call each of
these.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import distributed

from workbench.base.errors import EngineError, SettingError, check_name, first_line
from workbench.engines.torch_internals import joined_mesh, local_part, split_mesh


@dataclass(frozen=True)
class Sizes:
    """Sizes of the dimensions of a mesh of ranks; their product `ranks` is the number of ranks."""

    replicate: int = 1
    """Copies of all shards (HSDP): gradients are summed over them."""
    dp: int = 1
    """Shards of the weights, each with rows of its own (FSDP)."""
    cp: int = 1
    """Parts of each sequence (context parallel)."""
    tp: int = 1
    """Parts of each tensor (tensor parallel)."""
    ep: int = 1
    """Parts of the experts (expert parallel), over the dp·cp ranks."""

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.replicate * self.dp * self.cp * self.tp

    @property
    def shards(self) -> int:
        """Number of ranks that weights are sharded over by FSDP, dp·cp; tensor parallelism cuts them further."""
        return self.dp * self.cp

    @property
    def blocks(self) -> int:
        """Number of shares that a batch's rows are split into, replicate·dp."""
        return self.replicate * self.dp

    @property
    def block(self) -> int:
        """Number of neighbouring ranks that compute the same rows together, cp·tp."""
        return self.cp * self.tp


def sizes_of(mesh: Mapping[str, int] | None, ranks: int) -> Sizes:
    """Return the mesh sizes that the setting `mesh` means for this number of ranks; None shards over all ranks (FSDP).
    Raises `SettingError` where the two do not fit."""
    if mesh is None:
        return Sizes(dp=ranks)
    sizes = parsed(mesh)
    if sizes.ranks != ranks:
        found = f"{ranks} ranks"
        expected = f"replicate·dp·cp·tp = {sizes.ranks} ranks"
        raise SettingError(f"mesh {dict(mesh)}", expected=expected, found=found, do=f"give ranks={sizes.ranks}")
    return sizes


def ranks_of(mesh: Mapping[str, int] | None, ranks: int | None) -> int | None:
    """Return the number of ranks that the setting `mesh` needs; without a mesh, `ranks` unchanged. Raises
    `SettingError` as `sizes_of` does."""
    if mesh is None:
        return ranks
    return parsed(mesh).ranks if ranks is None else sizes_of(mesh, ranks).ranks


def parsed(mesh: Mapping[str, int]) -> Sizes:
    """Read a `mesh` setting as `Sizes`; dimensions that it leaves out are 1. Raises `SettingError` for an unknown name
    or a size below 1."""
    names = tuple(asdict(Sizes()))
    for name, size in mesh.items():
        check_name("dimension of a mesh", name, names)
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise SettingError(f"mesh dimension {name!r}", expected="a whole number ≥ 1", found=repr(size))
    sizes = Sizes(**mesh)
    if sizes.shards % sizes.ep:
        what, expected = f"mesh {dict(mesh)}", "an ep that divides dp·cp: experts are spread over these ranks"
        raise SettingError(what, expected=expected, found=f"ep={sizes.ep}, dp·cp={sizes.shards}")
    return sizes


class Mesh:
    """All ranks of the process group as a device mesh; `mesh["tp"]` is torch's `DeviceMesh` of one dimension.

    Dimensions: `replicate`, `shard` (dp and cp flattened), `dp`, `cp`, `tp`, `ep`. All ranks must create it together.
    """

    def __init__(self, kind: str, sizes: Sizes) -> None:
        self.device_type, self.sizes = kind, sizes
        shape = {"replicate": sizes.replicate, "shard": sizes.shards, "tp": sizes.tp}
        kept = {name: size for name, size in shape.items() if size > 1 or name == "shard"}
        root = distributed.init_device_mesh(kind, tuple(kept.values()), mesh_dim_names=tuple(kept))
        self._parts: dict[str, Any] = {name: root[name] for name in kept}
        self.fsdp: Any = root["replicate", "shard"] if sizes.replicate > 1 else root["shard"]
        """What `fully_shard` gets: (replicate, shard) for HSDP, else (shard,)."""
        if sizes.cp > 1:
            split = split_mesh(root["shard"], (sizes.dp, sizes.cp), ("dp", "cp"))
            self._parts |= {"dp": split["dp"], "cp": split["cp"]}
        if sizes.ep > 1:
            names = ("expert_shard", "ep")
            split = split_mesh(root["shard"], (sizes.shards // sizes.ep, sizes.ep), names)
            self._parts |= {name: split[name] for name in names}
            copies = [self._parts["replicate"]] if sizes.replicate > 1 else []
            self.experts: Any = split["expert_shard"] if not copies else joined_mesh([*copies, split["expert_shard"]])
            """What `fully_shard` gets for experts: as `fsdp`, with those of the shards' ranks that have the same experts."""

    def __getitem__(self, name: str) -> Any:
        return self._parts[name]

    def counts(self, tensor: Any) -> bool:
        """Whether this rank's part of a tensor enters a sum over all ranks: where several ranks hold the same part,
        only the first one's does."""
        if not hasattr(tensor, "placements"):
            return distributed.get_rank() == 0
        mesh: Any = tensor.device_mesh
        here = mesh.get_coordinate()
        copies = [place for place, one in zip(here, tensor.placements, strict=True) if one.is_replicate()]
        inside = set(mesh.mesh_dim_names or ())
        return not any(copies) and ("tp" in inside or coordinates(self.sizes, distributed.get_rank())["tp"] == 0)


def coordinates(sizes: Sizes, rank: int) -> dict[str, int]:
    """Return a rank's coordinates in the mesh: its index in each of the dimensions replicate, dp, cp and tp."""
    numbers = {}
    for name in ("tp", "cp", "dp", "replicate"):
        rank, numbers[name] = divmod(rank, getattr(sizes, name))
    return numbers


def box(tensor: Any) -> tuple[slice, ...]:
    """Return which part of a whole tensor this rank holds, as one slice for each dimension; of a tensor that is not a
    `DTensor`, all of it."""
    if not hasattr(tensor, "placements"):
        return tuple(slice(0, size) for size in tensor.shape)
    shape, first = local_part(tensor)
    return tuple(slice(at, at + size) for at, size in zip(first, shape, strict=True))


def local(tensor: Any) -> torch.Tensor:
    """Return this rank's part of a tensor; a tensor that is not a `DTensor` is returned whole, as each rank has it."""
    found: torch.Tensor = tensor.to_local() if hasattr(tensor, "placements") else tensor
    return found


def placed(whole: torch.Tensor, like: Any) -> Any:
    """Turn a tensor that every rank holds whole into a `DTensor` sharded as `like` is; this rank keeps its part."""
    from torch.distributed.tensor import DTensor

    part = whole[box(like)].to(like.to_local().device).contiguous()
    given = {"shape": like.shape, "stride": like.stride(), "run_check": False}
    return DTensor.from_local(part, like.device_mesh, like.placements, **given)


def largest(mine: float) -> float:
    """Return the maximum over all ranks of their numbers `mine`."""
    number = torch.tensor(float(mine))
    distributed.all_reduce(number, distributed.ReduceOp.MAX)
    return float(number)


def agreed(mine: bool) -> bool:
    """Return whether `mine` is true on any rank."""
    return largest(mine) > 0


def everyone(failure: str | None, kind: type[Exception] = EngineError) -> None:
    """Raise an error of the class `kind` on all ranks if any rank passes a `failure` text; the message is that of the
    lowest such rank."""
    texts: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(texts, failure)
    for text in texts:
        if text is not None:
            raise kind(text)


@contextmanager
def together(kind: type[Exception] = EngineError) -> Iterator[None]:
    """Context manager: an exception inside on any rank is raised on all ranks, as the class `kind` with the message of
    the lowest such rank."""
    failure = None
    try:
        yield
    except Exception as error:  # noqa: BLE001 - all ranks raise it
        failure = first_line(error, 1000)
    everyone(failure, kind)
