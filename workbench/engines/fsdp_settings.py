"""Settings of an engine whose weights are cut over ranks."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.config import require
from workbench.engines.local_settings import LocalSettings


@dataclass(frozen=True, kw_only=True)
class FsdpSettings(LocalSettings):
    """A local engine's settings, and what only shards have; `max_wave` has no meaning."""

    offload: str = "none"
    """What waits in host memory while a GPU computes: `none`, `optimizer` (Adam's moments between steps), or `all` (weights,
    gradients and moments; the step is done on the CPU)."""
    reshard_after_forward: bool = True
    """Free a layer's gathered weights after its forward and gather them again on the way back: less memory, more traffic."""
    deadline: float = 1_800.0
    """Seconds that any one call on the ranks may take: past it the group is ended and the error says where each rank was."""

    save_deadline: float = 600.0
    """Seconds that a sharded save may take: past it nothing of it is published."""
    failed_save: str = "raise"
    """A save that went on beside the work (`wait=False`) and failed is raised by the next call (`raise`), or logged (`warn`)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        kinds: tuple[str, ...] = ("none", "optimizer", "all")
        require(self.offload in kinds, "offload", expected=f"one of {', '.join(kinds)}", found=self.offload)
        require(self.deadline > 0, "deadline", expected="seconds > 0", found=self.deadline)
        require(self.save_deadline > 0, "save_deadline", expected="seconds > 0", found=self.save_deadline)
        kinds = ("raise", "warn")
        require(self.failed_save in kinds, "failed_save", expected=f"one of {', '.join(kinds)}", found=self.failed_save)
