"""Log-probs of the sampled tokens: used twice, for the policy before its update and for the reference."""

from __future__ import annotations

from typing import Any

from workbench.dataproto import DataProto
from workbench.engines.protocol import LogProbModel
from workbench.functional import masked_mean
from workbench.metrics import Mean, Metric
from workbench.stages.off_policy import sampler_gap, version_lag
from workbench.stages.stage import BaseStage, Outcome

SCORED_COLUMNS = ("input_ids", "attention_mask", "position_ids", "response_mask")
"""What any scoring pass reads."""


class LogProb(BaseStage):
    """Score every response token under a model, at the temperature that it was sampled with.

    With `entropy=True` it writes `entropys` as well, and the metric `actor/entropy`; with `sum_pi_squared=True` the column
    that the optimal token baselines ask for. Where the rollout's own log-probs are there, how far they are is measured, the
    largest difference of each row is the column `sampler_gap`, and how many versions the rows are behind: see `OffPolicy`.
    """

    def __init__(
        self,
        model: LogProbModel,
        *,
        name: str = "old_log_prob",
        column: str = "old_log_probs",
        entropy: bool = False,
        temperature: float = 1.0,
        sum_pi_squared: bool = False,
    ) -> None:
        self._model = model
        self.name = name
        self.column = column
        self.entropy = entropy
        self.temperature = temperature
        self.reads = SCORED_COLUMNS
        self.sum_pi_squared = sum_pi_squared
        self.writes = (column, *(("entropys",) * entropy), *(("sum_pi_squared",) * sum_pi_squared))

    def learners(self) -> tuple[Any, ...]:
        """The policy, when that is what scores; a frozen reference owns no version."""
        return (self._model,) if hasattr(self._model, "state_id") else ()

    def __call__(self, batch: DataProto) -> Outcome:
        """B rows in, B rows with log-probs out."""
        want = ("log_probs", *(("entropy",) * self.entropy), *(("sum_pi_squared",) * self.sum_pi_squared))
        scores = self._model.score(batch.select(list(SCORED_COLUMNS)), want, self.temperature)
        columns = {self.column: scores["log_probs"]}
        if self.sum_pi_squared:
            columns["sum_pi_squared"] = scores["sum_pi_squared"]
        metrics: dict[str, Metric] = {}
        if self.entropy:
            mask = batch["response_mask"]
            columns["entropys"] = scores["entropy"]
            metrics["actor/entropy"] = Mean.of(masked_mean(scores["entropy"], mask).item(), mask.sum().item())
            if "rollout_log_probs" in batch and mask.any():
                metrics |= sampler_gap(scores["log_probs"], batch["rollout_log_probs"], mask)
                gaps = (scores["log_probs"] - batch["rollout_log_probs"]).abs().masked_fill(mask == 0, 0.0)
                columns["sampler_gap"] = gaps.amax(-1)
        if "policy_version" in batch and self.learners() and hasattr(self._model, "version"):
            metrics |= version_lag(self._model.version, batch["policy_version"])
        return Outcome(self.written(batch, columns), metrics)
