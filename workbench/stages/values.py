"""Values: the critic's estimate of the return from every response token."""

from __future__ import annotations

from typing import Any

from workbench.dataproto import DataProto
from workbench.engines.protocol import LogProbModel
from workbench.stages.log_prob import SCORED_COLUMNS
from workbench.stages.stage import BaseStage, Outcome, spread


class Values(BaseStage):
    """Ask the critic."""

    name = "values"
    reads = SCORED_COLUMNS
    writes = ("values",)

    def __init__(self, critic: LogProbModel) -> None:
        self._critic = critic

    def learners(self) -> tuple[Any, ...]:
        """The critic."""
        return (self._critic,)

    def __call__(self, batch: DataProto) -> Outcome:
        """B rows in, B rows with `values` out."""
        values = self._critic.score(batch.select(list(SCORED_COLUMNS)), ("values",))["values"]
        metrics = spread("critic/values", values[batch["response_mask"].bool()])
        return Outcome(self.written(batch, {"values": values}), metrics)
