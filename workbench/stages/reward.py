"""The stages that score responses: a reward for every row, or the reason why it has none; and scores of single turns."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from workbench.base.config import require
from workbench.base.errors import RewardError
from workbench.base.metrics import Count, Mean, Metric
from workbench.dataproto.core import SESSION, DataProto, episodes
from workbench.rewards.base import BaseReward, whole_episodes
from workbench.rewards.reward import as_reward
from workbench.rewards.score import Score, extra_columns
from workbench.stages.measures import score_metrics
from workbench.stages.stage import BaseStage, Outcome, spread

log = logging.getLogger("workbench")


class Reward(BaseStage):
    """Score the responses with a reward function, a `rewards.Reward`, or by the rows' `data_source` (None).

    The scalar is placed on the last valid response token. A row that was not scored has reward 0 and `scored` False, and
    is left out of every later mean and loss. An empty response has no token for its reward: the scalar is in `reward` only,
    and the row is counted in `reward/empty_responses`.

    An episode of several rows (column `session`) is scored once: the function reads its last response, and the turns, calls
    and scores of all its sequences; every row gets the Score. Metrics count it once. With `sessions=None` each row is scored
    by itself.
    """

    name = "reward"

    optional = (SESSION,)

    def __init__(self, function: Any = None, *, sessions: str | None = SESSION, **options: Any) -> None:
        require(sessions in (SESSION, None), "sessions of a reward", expected=f"{SESSION!r} or None", found=sessions)
        self._reward = as_reward(function, **options)
        self.sessions = sessions
        self._options = options
        self._early: Callable[[], list[Score]] | None = None
        self.function = self._reward
        self.reads = ("responses", "response_mask", "response_text", "raw_prompt", *self._reward.reads)
        self.writes = ("token_level_scores", "reward", "scored", "score")

    def settings(self) -> dict[str, Any]:
        """Return the reward function and the settings of how it is run, by name."""
        own = {} if self.sessions else {"sessions": None}
        return {"function": self._reward, **self._reward.settings(), **own}

    def with_function(self, function: Callable[..., Any]) -> Reward:
        """Return a copy of the stage with another reward function."""
        options = {name: value for name, value in self._options.items() if name != "rename"}  # of the other's arguments
        made = {} if isinstance(function, BaseReward) else options
        return Reward(function, sessions=self.sessions, **made)

    def check_columns(self, columns: Sequence[str]) -> None:
        """Raise `RewardError`, listing the available columns, if the reward function has an argument that no column
        provides."""
        self._reward.check_signature(columns)

    @property
    def streams(self) -> bool:
        """Whether an episode can be scored before the other episodes of its batch are finished."""
        return self.function.streams and self.sessions is not None

    @contextmanager
    def given(self, early: Callable[[], list[Score]]) -> Iterator[None]:
        """Context manager: inside it the stage takes its scores from `early()`, which computed them during the rollout."""
        self._early = early
        try:
            yield
        finally:
            self._early = None

    def __call__(self, batch: DataProto) -> Outcome:
        """Return the same B rows with their scores."""
        scored_rows = whole_episodes(batch) if self.sessions else batch
        scores = self._reward.score(scored_rows) if self._early is None else self._reward.settle(self._early())
        if len(scores) != len(scored_rows):
            expected = f"{len(scored_rows)}, one per {'row' if scored_rows is batch else 'episode'}"
            raise RewardError(f"number of scores of reward {self._reward.name!r}", expected=expected, found=len(scores))
        mask, once = batch["response_mask"], score_columns(scores)
        large = {float(score.value) for score in scores if abs(score.value) >= 2**24}
        if len(set(torch.tensor([*large]).tolist())) < len(large):
            log.warning("rewards above 16,777,216 differ, and are equal in float32, which rewards are: divide them")
        columns = once if scored_rows is batch else score_columns(of_rows(batch, scores))
        columns = {"token_level_scores": on_last_token(columns["reward"], mask), **columns}
        written = self.written(batch, columns)
        return Outcome(written, {**score_metrics(written), **self._metrics(once, scores, mask)})

    def _metrics(self, columns: dict[str, Any], scores: Sequence[Score], mask: torch.Tensor) -> dict[str, Metric]:
        scored = columns["scored"]
        statuses = Counter(score.status.value for score in scores)
        metrics: dict[str, Metric] = {f"reward/status/{name}": Count(number) for name, number in statuses.items()}
        metrics["reward/empty_responses"] = Count(int((mask.sum(-1) == 0).sum()))
        metrics["reward/scored_ratio"] = Mean.of(scored.double().mean().item(), len(scores))
        for name, column in columns.items():
            if name.startswith("reward/"):
                metrics.update(spread(name, column[~column.isnan()]))
        return metrics


def of_rows(batch: DataProto, scores: Sequence[Score]) -> list[Score]:
    """Return each row's score, from the scores of the batch's episodes."""
    number = {row: place for place, rows in enumerate(episodes(batch)) for row in rows}
    return [scores[number[row]] for row in range(len(batch))]


def score_columns(scores: Sequence[Score]) -> dict[str, Any]:
    """Build the columns of B scores: `reward` [B] float32 (0 where not scored), `scored`, `score`, `reward/<part>`,
    `reward_extra/<key>`."""
    return {
        "reward": torch.tensor([score.value if score.scored else 0.0 for score in scores], dtype=torch.float32),
        "scored": torch.tensor([score.scored for score in scores]),
        "score": list(scores),
        **part_columns(scores),
        **extra_columns(scores),
    }


def on_last_token(reward: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Place rewards [B] on the last token of each row in the mask [B, T]; returns [B, T], all 0 in a row without such a
    token."""
    placed = torch.zeros(mask.shape, dtype=torch.float32)
    positions = torch.arange(mask.shape[1]).expand_as(mask).masked_fill(mask == 0, -1).amax(-1)
    rows = (positions >= 0).nonzero().squeeze(-1)
    placed[rows, positions[rows]] = reward[rows]
    return placed


def part_columns(scores: Sequence[Score]) -> dict[str, torch.Tensor]:
    """Build the column `reward/<part>` [B] float32 for every named part of the scores; NaN where a row lacks the part."""
    names = dict.fromkeys(name for score in scores for name in score.parts)
    values = {name: [float(score.parts.get(name, float("nan"))) for score in scores] for name in names}
    return {f"reward/{name}": torch.tensor(column) for name, column in values.items()}


class TurnScores(BaseStage):
    """Add each turn's own score, and the rewards of its tool calls, to the turn's last token. It belongs after `reward`.

    It changes `token_level_scores`, which estimators read; `reward` and `score` stay unchanged::

        pipeline = recipes.reinforce_plus_plus(engine, reward, agent=agent).insert_after("reward", TurnScores())

    The position matters to estimators that sum rewards from a token on: `gae`, `reinforce_plus_plus`, `remax` and the token
    baselines. With those that compare whole rows (`grpo`, `rloo`, `opo`, `gpg`, …) an advantage is one number per row: the
    same sum wherever the scores are.

    Args:
        turn_weight: multiplies a simulated user's scores.
        tool_weight: multiplies the tools' rewards.
        final_weight: multiplies what `reward` placed on the last token.
    """

    name = "turn_scores"
    reads = ("token_level_scores", "response_mask", "turns")
    writes = ("token_level_scores",)

    def __init__(self, *, turn_weight: float = 1.0, tool_weight: float = 0.0, final_weight: float = 1.0) -> None:
        self.turn_weight = turn_weight
        self.tool_weight = tool_weight
        self.final_weight = final_weight

    def __call__(self, batch: DataProto) -> Outcome:
        """Return the same B rows with the turns' scores added to `token_level_scores`."""
        placed = place_turn_scores(batch, turn_weight=self.turn_weight, tool_weight=self.tool_weight)
        total = self.final_weight * batch["token_level_scores"] + placed
        if "scored" in batch:  # a row that was not scored has no score anywhere
            total = total * batch["scored"][:, None]
        written = self.written(batch, {"token_level_scores": total})
        return Outcome(written, {**score_metrics(written), **spread("turn_scores", placed.sum(-1))})


def place_turn_scores(batch: DataProto, *, turn_weight: float = 1.0, tool_weight: float = 0.0) -> torch.Tensor:
    """Place each assistant turn's score on its last token: [B, T] float32, 0 elsewhere, without the final reward.

    A turn in which the model wrote no token has no place for a score, and is left out.
    """
    mask = batch["response_mask"].bool()
    placed = torch.zeros(mask.shape, dtype=torch.float32)
    for row, turns in enumerate(batch["turns"]):
        for turn in turns:
            score = turn_weight * (turn["score"] or 0.0)
            score += tool_weight * sum(call["reward"] or 0.0 for call in turn["calls"])
            last = turn["last"]
            if turn["role"] == "assistant" and turn["first"] <= last < mask.shape[1] and mask[row, last]:
                placed[row, last] += score
    return placed
