"""Several policies in one episode: a stage that works on the rows of one policy, and leaves the others' as they are."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from workbench.base.errors import PipelineError, SettingError, describe
from workbench.dataproto.columns import REWARD_PREFIX
from workbench.dataproto.core import POLICY, DataProto
from workbench.dataproto.value import unchanged
from workbench.rewards.score import MISSING, Score, Status
from workbench.stages.stage import BaseStage, Outcome, Stage

_MOVING = ("filter_groups", "baseline", "resample")


class OfPolicy(BaseStage):
    """Runs a stage on the rows of one policy only, in episodes with several policies; the column `policy` says whose
    tokens a row holds.

    It reads, writes and measures as the stage does on these rows alone: advantages compare within (uid, policy), and an
    update's gradient comes from these rows. Other rows keep what their own stages wrote; until then a number is 0, and
    `scored` is False. Stages and metrics of any policy but the first have the policy's name in theirs
    (`reward_verifier`, `update_verifier`; `verifier/critic/score/mean`).

    Args:
        stage: the stage; one that drops, adds or reorders rows cannot be used.
        policy: the policy's name.
        first: whether stages and metrics keep their names.
    """

    def __init__(self, stage: Stage, policy: str, first: bool = False) -> None:
        if stage.name in _MOVING:
            expected = f"none of {', '.join(_MOVING)}, which drop or repeat rows"
            raise SettingError(f"stage {stage.name!r} for one policy", expected=expected)
        self.stage, self.policy, self.first = stage, policy, first
        end = "" if first else f"_{policy}"
        self.name = stage.name if first or stage.updates else stage.name + end
        self.reads = (*stage.reads, POLICY)
        self.optional = (*getattr(stage, "optional", ()), *stage.writes)
        self.writes, self.updates = stage.writes, stage.updates

    def settings(self) -> dict[str, Any]:
        """Return the wrapped stage's settings, and the policy's name, by name."""
        return {**self.stage.settings(), POLICY: self.policy}

    def learners(self) -> tuple[Any, ...]:
        """Return the wrapped stage's engines."""
        return self.stage.learners()

    def state(self) -> dict[str, float]:
        """Return the wrapped stage's state for a checkpoint."""
        return self.stage.state()

    def load_state(self, state: Mapping[str, float]) -> None:
        """Restore the wrapped stage's state from a dict that `state` returned."""
        self.stage.load_state(state)

    def with_function(self, function: Callable[..., Any]) -> OfPolicy:
        """Return a copy whose wrapped stage has another function (such as a reward or an estimator)."""
        return OfPolicy(self.stage.with_function(function), self.policy, self.first)

    def with_settings(self, **changes: Any) -> OfPolicy:
        """Return a copy whose wrapped stage has some of its settings changed."""
        return OfPolicy(self.stage.with_settings(**changes), self.policy, self.first)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "stage":
            raise AttributeError(name)
        return getattr(self.stage, name)

    def __call__(self, batch: DataProto) -> Outcome:
        """Run the stage on the policy's rows; returns all B rows, with the stage's columns on those."""
        rows = torch.tensor([value == self.policy for value in batch[POLICY]]).nonzero()[:, 0]
        if not len(rows):
            found = f"rows of {', '.join(sorted({str(value) for value in batch[POLICY]}))}"
            do = "let the agent loop return a sequence of this policy in each episode"
            raise PipelineError(f"stage {self.name!r}: no row of policy {self.policy!r}", found=found, do=do)
        selected = batch.select_idxs(rows)
        outcome = self.stage(selected)
        if outcome.rows is not None or len(outcome.batch) != len(selected):
            what = f"stage {self.stage.name!r} drops or repeats rows, which cannot be done for one policy"
            raise PipelineError(what, expected="a stage that keeps all rows", found=describe(self.stage))
        changed = {
            name: outcome.batch[name] for name in outcome.batch.columns if not unchanged(name, selected, outcome.batch)
        }
        columns = {name: _merged(batch, rows, name, values) for name, values in changed.items()}
        prefix = "" if self.first else f"{self.policy}/"
        metrics = {
            prefix + name.removeprefix("actor/").removeprefix(prefix): value for name, value in outcome.metrics.items()
        }
        return Outcome(self.written(batch, columns), outcome.metrics if self.first else metrics)


def _merged(batch: DataProto, rows: torch.Tensor, name: str, values: Any) -> Any:
    """Build a column of all rows: the given `rows` get `values`, others keep what they had, or get an empty value."""
    if isinstance(values, torch.Tensor):
        empty = math.nan if name.startswith(REWARD_PREFIX) else 0
        whole = batch[name].clone() if name in batch else values.new_full((len(batch), *values.shape[1:]), empty)
        whole[rows] = values
        return whole
    other = Score(status=Status.NOT_APPLICABLE, why="of another policy") if name == "score" else MISSING
    cells = list(batch[name]) if name in batch else [other] * len(batch)
    for row, value in zip(rows.tolist(), values, strict=True):
        cells[row] = value
    return cells
