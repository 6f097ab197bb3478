"""Advantage estimators over groups: each one function, vectorised over rows."""

from __future__ import annotations

import torch


def grpo(
    scores: torch.Tensor,
    groups: torch.Tensor,
    mask: torch.Tensor,
    *,
    scored: torch.Tensor | None = None,
    norm_by_std: bool = True,
    eps: float = 1e-6,
    singleton: str = "zero",
) -> tuple[torch.Tensor, torch.Tensor]:
    """A = (s − μ_g) / (σ_g + eps) on every token of the mask; returns are the same.

    scores [B]; groups [B] int64, one number per group; mask [B, T]; scored [B] bool: rows without a
    judgement leave μ and σ and get 0. σ is the unbiased (n−1) deviation; `norm_by_std=False` leaves
    s − μ (Dr.GRPO, https://arxiv.org/abs/2503.20783). A group with one judgement has nothing to compare
    it with: its advantage is 0, or with `singleton="verl"` its raw score, as in verl. A group whose
    scores are all equal has advantage 0: sums are float64, so that rounding does not make a spread of
    1e-5 that eps then blows up. A row with an empty mask counts in its group and has no token to carry
    its advantage. Shao et al. 2024, https://arxiv.org/abs/2402.03300.
    """
    if singleton not in ("zero", "verl"):
        raise ValueError(f"singleton is 'zero' or 'verl'; found {singleton!r}")
    judged = torch.ones_like(groups, dtype=torch.bool) if scored is None else scored.bool()
    exact = torch.where(judged, scores.double(), 0.0)
    count = _per_group(judged.double(), groups)
    mean = _per_group(exact, groups) / count.clamp(min=1)
    centred = torch.where(judged, exact - mean[groups], 0.0)
    advantages = centred
    if norm_by_std:
        deviation = (_per_group(centred.square(), groups) / (count - 1).clamp(min=1)).sqrt()
        advantages = centred / (deviation[groups] + eps)
    alone = count[groups] <= 1
    raw = exact if singleton == "verl" else torch.zeros_like(exact)
    dtype = scores.dtype if scores.is_floating_point() else torch.float32
    advantages = torch.where(alone, raw, advantages).to(dtype)[:, None] * mask
    return advantages, advantages


def _per_group(values: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Σ over the rows of each group: [B] → [number of groups]."""
    number = int(groups.max()) + 1 if groups.numel() else 0
    return torch.zeros(number, dtype=values.dtype, device=values.device).index_add_(0, groups, values)
