"""Statistics over groups of rows: one scatter each, no loop over rows or groups. Sums are float64."""

from __future__ import annotations

import torch


def per_group(values: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Σ over the rows of each group: [B, …] → [number of groups, …]; `groups` [B] int64 numbers them from 0."""
    number = int(groups.max()) + 1 if groups.numel() else 0
    shape = (number, *values.shape[1:])
    return torch.zeros(shape, dtype=values.dtype, device=values.device).index_add_(0, groups, values)


class Groups:
    """The judged rows of each group: their number, and each row's score less the group's mean.

    scores [B]; groups [B]; scored [B] bool or None. Rows without a judgement are in no statistic and have 0 everywhere.
    """

    def __init__(self, scores: torch.Tensor, groups: torch.Tensor, scored: torch.Tensor | None) -> None:
        self.groups = groups
        self.judged = torch.ones_like(groups, dtype=torch.bool) if scored is None else scored.bool()
        self.scores = torch.where(self.judged, scores.double(), 0.0)
        self._count = per_group(self.judged.double(), groups)
        self.count = self._count[groups]
        """[B] judged rows in the row's group."""
        mean = per_group(self.scores, groups) / self._count.clamp(min=1)
        self.centred = torch.where(self.judged, self.scores - mean[groups], 0.0)
        """[B] s − μ."""

    @property
    def alone(self) -> torch.Tensor:
        """[B] bool: nobody to be compared with."""
        return self.count <= 1

    def deviation(self) -> torch.Tensor:
        """[B] the group's unbiased (n−1) deviation; 0 for one row."""
        return (per_group(self.centred.square(), self.groups) / (self._count - 1).clamp(min=1)).sqrt()[self.groups]

    def unless_alone(self, values: torch.Tensor, singleton: str) -> torch.Tensor:
        """`values`, with 0 (`zero`) or the raw score (`verl`) for rows that are alone in their group."""
        if singleton not in ("zero", "verl"):
            raise ValueError(f"singleton is 'zero' or 'verl'; found {singleton!r}")
        raw = self.scores if singleton == "verl" else torch.zeros_like(self.scores)
        return torch.where(self.alone, raw, values)
