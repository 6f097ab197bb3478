"""What a loop tells those who watch it: a report per step, and how it ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from workbench.stepper import Stepper
from workbench.trace import Trace


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One step, done."""

    step: int
    epoch: int
    metrics: dict[str, float]
    trace: Trace


class Observer(Protocol):
    """Watches a loop. What it raises ends the loop."""

    def on_start(self, start: int, steps: int) -> None:
        """Before step `start`; the last will be `steps`."""

    def on_step(self, report: StepReport) -> None:
        """After every step."""

    def on_end(self, error: BaseException | None) -> None:
        """Once, however it ended."""


@dataclass(frozen=True)
class Ending:
    """How a loop ended: after its last step, or stopped before the update of one."""

    step: int
    """The last step that is part of the weights."""
    stopped: Stepper | None = None
    """Stands before the update of the step that met `break_if`."""


Condition = Callable[[Mapping[str, float]], bool]
"""Metrics of a step, to whether the loop stops before its update."""
