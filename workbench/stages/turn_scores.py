"""Scores of single turns on the tokens that earned them: reward per turn rather than per episode."""

from __future__ import annotations

from typing import Any

import torch

from workbench.dataproto import DataProto
from workbench.stages.stage import BaseStage, Outcome, spread


class TurnScores(BaseStage):
    """Add each turn's own score, and its calls' rewards, at the turn's last token. Stands after `reward`.

    `turn_weight` multiplies a simulated user's scores, `tool_weight` the tools' rewards, `final_weight` what `reward` placed on
    the last token. `reward` and `score` stay as they were judged; estimators read `token_level_scores`::

        pipeline = recipes.reinforce_plus_plus(engine, reward, agent=agent).insert_after("reward", TurnScores())

    Places matter to estimators that add up rewards from a token on: `gae`, `reinforce_plus_plus`, `remax` and the token
    baselines. With `grpo`, and whatever else compares whole rows (`rloo`, `opo`, `gpg`, …), an advantage is one number a
    row: the same sum wherever the parts stand.
    """

    name = "turn_scores"
    reads = ("token_level_scores", "response_mask", "turns")
    writes = ("token_level_scores",)

    def __init__(self, *, turn_weight: float = 1.0, tool_weight: float = 0.0, final_weight: float = 1.0) -> None:
        self.turn_weight = turn_weight
        self.tool_weight = tool_weight
        self.final_weight = final_weight

    def __call__(self, batch: DataProto) -> Outcome:
        """B rows in, the same rows out."""
        placed = place_turn_scores(batch, turn_weight=self.turn_weight, tool_weight=self.tool_weight)
        total = self.final_weight * batch["token_level_scores"] + placed
        if "scored" in batch:  # a row without a judgement has no score anywhere
            total = total * batch["scored"][:, None]
        columns: dict[str, Any] = {"token_level_scores": total}
        return Outcome(self.written(batch, columns), spread("turn_scores", placed.sum(-1)))


def place_turn_scores(batch: DataProto, *, turn_weight: float = 1.0, tool_weight: float = 0.0) -> torch.Tensor:
    """[B, T] float32: each assistant turn's score on its last token, 0 elsewhere; the final reward is not among them.

    A turn that has no token of the model's own carries nothing.
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
