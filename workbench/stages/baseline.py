"""Baseline: ReMax's greedy rows become a column of the rows that they are the baseline of."""

from __future__ import annotations

import torch

from workbench.dataproto import DataProto
from workbench.metrics import Count, Mean, Metric
from workbench.stages.stage import BaseStage, Outcome


class Baseline(BaseStage):
    """Fold each prompt's greedy row (`Rollout(…, greedy_baseline=True)`) into `reward_baselines` of its samples.

    A prompt whose greedy response has no judgement has no baseline: its rows lose theirs too (`scored` False), and are
    counted. Li et al. 2024, https://arxiv.org/abs/2310.10505.
    """

    name = "baseline"
    reads = ("uid", "greedy", "reward", "scored")
    writes = ("reward_baselines", "scored")

    def __call__(self, batch: DataProto) -> Outcome:
        """P·(G + 1) rows in, P·G rows out."""
        greedy, scored = batch["greedy"], batch["scored"]
        found = {batch["uid"][row]: row for row in greedy.nonzero()[:, 0].tolist()}
        rows = (~greedy).nonzero()[:, 0]
        of = torch.tensor([found[batch["uid"][row]] for row in rows.tolist()], dtype=torch.long)
        kept = batch.select_idxs(rows).with_meta(group_size=max(batch.meta_info.get("group_size", 2) - 1, 1))
        columns = {"reward_baselines": batch["reward"][of], "scored": scored[rows] & scored[of]}
        metrics: dict[str, Metric] = {
            "reward/greedy_baseline": Mean.of(
                batch["reward"][greedy & scored].double().mean().item(), int(greedy.sum())
            ),
            "reward/without_baseline": Count(int((~scored[greedy]).sum())),
        }
        return Outcome(self.written(kept, columns), metrics, rows)
