"""Reward: every row gets a judgement, or a stated reason why it has none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from workbench.dataproto import DataProto
from workbench.errors import RewardError, message
from workbench.metrics import Count, Mean, Metric
from workbench.rewards import BaseReward, Score, as_reward
from workbench.rewards.score import extra_columns
from workbench.stages.stage import BaseStage, Outcome, spread


class Reward(BaseStage):
    """Score the responses with a reward function, a `rewards.Reward`, or by `data_source` (None).

    The scalar sits on the last valid response token. A row that was not scored has reward 0 and
    `scored` False, and leaves every mean and loss after it. An empty response has no token to carry
    its reward: its scalar stays in `reward` and the row is counted in `reward/empty_responses`.
    """

    name = "reward"

    def __init__(self, function: Any = None, **options: Any) -> None:
        self._reward = as_reward(function, **options)
        self._options = options
        self._early: Callable[[], list[Score]] | None = None
        self.function = self._reward
        self.reads = ("responses", "response_mask", "response_text", "raw_prompt", *self._reward.reads)
        self.writes = ("token_level_scores", "reward", "scored", "score")

    def settings(self) -> dict[str, Any]:
        """The function, and how it is run."""
        return {"function": self._reward, **self._reward.settings()}

    def with_function(self, function: Callable[..., Any]) -> Reward:
        """The same stage around another reward function."""
        return Reward(function) if isinstance(function, BaseReward) else Reward(function, **self._options)

    def check_columns(self, columns: Sequence[str]) -> None:
        """Raises `RewardError` where the function asks for what none of these columns has, saying what it may ask for."""
        self._reward.check_signature(columns)

    @contextmanager
    def given(self, early: Callable[[], list[Score]]) -> Iterator[None]:
        """Inside the block the stage takes the records that were made while the rollout went on."""
        self._early = early
        try:
            yield
        finally:
            self._early = None

    def __call__(self, batch: DataProto) -> Outcome:
        """B rows in, B judged rows out."""
        scores = self._reward.score(batch) if self._early is None else self._reward.settle(self._early())
        if len(scores) != len(batch):
            raise RewardError(message(f"reward {self._reward.name!r}", expected=len(batch), found=len(scores)))
        mask = batch["response_mask"]
        reward = torch.tensor([score.value if score.scored else 0.0 for score in scores], dtype=torch.float32)
        columns: dict[str, Any] = {
            "token_level_scores": on_last_token(reward, mask),
            "reward": reward,
            "scored": torch.tensor([score.scored for score in scores]),
            "score": list(scores),
            **part_columns(scores),
            **extra_columns(scores),
        }
        return Outcome(self.written(batch, columns), self._metrics(columns, scores, mask))

    def _metrics(self, columns: dict[str, Any], scores: Sequence[Score], mask: torch.Tensor) -> dict[str, Metric]:
        scored = columns["scored"]
        statuses = Counter(str(score.status.value).replace(" ", "_") for score in scores)
        metrics: dict[str, Metric] = {f"reward/status/{name}": Count(number) for name, number in statuses.items()}
        metrics["reward/empty_responses"] = Count(int((mask.sum(-1) == 0).sum()))
        metrics["reward/scored_ratio"] = Mean.of(scored.double().mean().item(), len(scores))
        for name, column in columns.items():
            if name.startswith("reward/"):
                metrics.update(spread(name, column[~column.isnan()]))
        judged = columns["reward"][scored].double()
        if len(judged):  # min and max say little of rewards that are 0 or 1
            metrics["critic/score/std"] = Mean.of(judged.std(correction=0).item(), len(judged))
        return {**spread("critic/score", columns["reward"][scored]), **metrics}


def on_last_token(reward: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[B] rewards on the last 1 of each row of a [B, T] mask; nowhere in a row without a 1."""
    placed = torch.zeros(mask.shape, dtype=torch.float32)
    positions = torch.arange(mask.shape[1]).expand_as(mask).masked_fill(mask == 0, -1).amax(-1)
    rows = (positions >= 0).nonzero().squeeze(-1)
    placed[rows, positions[rows]] = reward[rows]
    return placed


def part_columns(scores: Sequence[Score]) -> dict[str, torch.Tensor]:
    """`reward/<part>` → [B] float32: the union of the parts' names, NaN where a row has none."""
    names = dict.fromkeys(name for score in scores for name in score.parts)
    return {
        f"reward/{name}": torch.tensor([float(score.parts.get(name, float("nan"))) for score in scores])
        for name in names
    }
