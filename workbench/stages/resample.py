"""Resample: PF-PPO's policy filtration, rows drawn again by how telling their reward is."""

from __future__ import annotations

import torch

from workbench.config import require
from workbench.dataproto import DataProto
from workbench.functional.balancing import resampled
from workbench.metrics import Mean
from workbench.seeds import derive
from workbench.stages.stage import BaseStage, Outcome


class Resample(BaseStage):
    """Draw the batch's rows again, with replacement, by weight: |reward|^p (`pow`), the best and the worst alone
    (`max_min`), or mostly the best (`max_random`).

    Comes after the advantages: groups are not whole any more after it. verl's `algorithm.use_pf_ppo`.
    Shen et al. 2024, https://arxiv.org/abs/2409.06957.
    """

    name = "resample"
    reads = ("reward", "advantages")

    def __init__(self, *, reweight_method: str = "pow", weight_pow: float = 2.0) -> None:
        kinds = ("pow", "max_min", "max_random")
        require(
            reweight_method in kinds, "reweight_method", expected=f"one of {', '.join(kinds)}", found=reweight_method
        )
        self.reweight_method = reweight_method
        self.weight_pow = weight_pow

    def __call__(self, batch: DataProto) -> Outcome:
        """B rows in, B rows out, some of them several times; the draw is seeded by run and step."""
        meta = batch.meta_info
        generator = torch.Generator().manual_seed(derive(meta.get("seed", 0), self.name, meta.get("step", 0)))
        rows = resampled(batch["reward"], method=self.reweight_method, weight_pow=self.weight_pow, generator=generator)
        share = len(rows.unique()) / max(len(rows), 1)
        return Outcome(batch.select_idxs(rows), {"resample/distinct": Mean.of(share, len(rows))}, rows)
