"""What `Cluster.place` starts, as one object that is made before anything is: `fits` measures the very thing that is placed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from workbench.base.config import Settings, require
from workbench.base.errors import SettingError, unknown
from workbench.cluster.pools import Node
from workbench.engines.settings import FsdpSettings, LocalSettings, VllmSettings

CPU_RANKS = 2
"""Ranks of a learner where the cluster has no GPU and `ranks` is not given."""
ALONE = 0.9
"""`gpu_memory_utilization` of a sampler in a pool of its own."""
SAMPLERS: dict[str | None, type[Settings]] = {"vllm": VllmSettings, "local": LocalSettings}
"""Engines that can sample for a placed learner, and their settings."""


@dataclass(frozen=True)
class Placement:
    """A learner's settings and ranks, and its samplers: how large each is, and whether they share the learner's devices."""

    learner: FsdpSettings
    ranks: int
    gpus: bool
    """Whether its processes have a GPU each."""
    sampler: str | None = "vllm"
    tensor_parallel_size: int = 1
    apart: bool = False
    """Whether the samplers have a pool of their own."""
    given: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the sampler that were asked for."""

    def __post_init__(self) -> None:
        tp, expected = self.tensor_parallel_size, "sampler='vllm'"
        if self.sampler is not None and self.sampler not in SAMPLERS:
            raise SettingError(unknown("sampler", self.sampler, tuple(filter(None, SAMPLERS))))
        require(tp > 0, "tensor_parallel_size", expected="≥ 1", found=tp)
        require(tp == 1 or self.sampler == "vllm", f"tensor_parallel_size={tp}", expected=expected, found=self.sampler)

    @property
    def shared(self) -> bool:
        """Whether learner and samplers take turns on the same GPUs: the samplers sleep while the learner works."""
        return self.gpus and not self.apart and self.sampler is not None

    @property
    def sampling(self) -> dict[str, Any]:
        """The samplers' settings."""
        usual: dict[str, Any] = {}
        if self.sampler == "vllm":
            usual = {"tensor_parallel_size": self.tensor_parallel_size, "sleep_mode": self.shared}
            usual |= {"gpu_memory_utilization": ALONE} if self.gpus and self.apart else {}
        return usual | dict(self.given)

    @property
    def sampler_settings(self) -> Any:
        """`sampling` as `VllmSettings` or `LocalSettings`; None without samplers."""
        return None if self.sampler is None else SAMPLERS[self.sampler].from_parameters(self.sampling)


def spread(there: Sequence[Node], size: int | None, gpus: int) -> list[int]:
    """Processes on each node, the emptiest first; with no `gpus` each, `CPU_RANKS` of them where `size` is None."""
    room = [int(min(one.free_gpus // gpus, one.free_cpus) if gpus else one.free_cpus) for one in there]
    left = size if size is not None else sum(room) if gpus else min(CPU_RANKS, sum(room))
    counts: list[int] = []
    for free in sorted(room, reverse=True):
        if (taken := min(free, left)) > 0:
            counts.append(taken)
            left -= taken
    counts = counts or [0]
    counts[-1] += left  # more than there is: refused by the plan, in its words
    return counts if counts != [0] else [1]
