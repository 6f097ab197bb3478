"""A stage is `DataProto → DataProto` plus metrics; a pipeline is a checked list of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, overload, runtime_checkable

import torch

from workbench.columns import declared
from workbench.config import settings_hash
from workbench.dataproto import DataProto, Origin
from workbench.errors import PipelineError, describe, message, unknown
from workbench.metrics import Metric


@dataclass(frozen=True)
class Outcome:
    """What a stage made of a batch."""

    batch: DataProto
    """The batch with the stage's columns."""
    metrics: Mapping[str, Metric | float] = field(default_factory=dict)
    rows: torch.Tensor | None = None
    """For each row of the result the row of the input that it came from, [B] int64; None: the same rows."""


@runtime_checkable
class Stage(Protocol):
    """One phase of a training step.

    All settings are given at construction. The same input and seed give the same output. State
    lives only in engines (weights) and stated controllers.
    """

    @property
    def name(self) -> str:
        """Its name in the pipeline, the trace and `timing_s/<name>`."""

    @property
    def reads(self) -> tuple[str, ...]:
        """Columns it needs, as constructed."""

    @property
    def writes(self) -> tuple[str, ...]:
        """Columns it leaves behind."""

    def __call__(self, batch: DataProto) -> Outcome:
        """Do it."""

    def settings(self) -> dict[str, Any]:
        """Every setting by name: plain values, and functions as they are."""

    def learners(self) -> tuple[Any, ...]:
        """Engines whose weights the stage uses (they own a version)."""

    @property
    def updates(self) -> bool:
        """Whether it changes weights."""

    def state(self) -> dict[str, float]:
        """Controllers (adaptive KL), plain numbers; {} for most."""

    def load_state(self, state: Mapping[str, float]) -> None:
        """Back to what `state` gave."""


class BaseStage:
    """The dull half of a stage: no learners, no state. Leaves override what they have."""

    name: str = ""
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    updates: bool = False

    def settings(self) -> dict[str, Any]:
        """Public attributes that are not engines or the contract itself."""
        skip = {"name", "reads", "writes", "updates"}
        return {
            key: value
            for key, value in vars(self).items()
            if not key.startswith("_") and key not in skip
        }

    def learners(self) -> tuple[Any, ...]:
        """None, unless a leaf says otherwise."""
        return ()

    def state(self) -> dict[str, float]:
        """Nothing to remember."""
        return {}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Nothing to restore; something to restore is a mistake."""
        if state:
            raise PipelineError(message(f"stage {self.name!r} keeps no state", found=describe(dict(state))))

    def origin(self, batch: DataProto) -> Origin:
        """Who writes: this stage, the batch's step, its settings."""
        versions = [learner.version for learner in self.learners()]
        return Origin(
            stage=self.name,
            step=batch.meta_info.get("step"),
            policy_version=max(versions) if versions else None,
            settings=settings_hash(self.settings()),
        )
