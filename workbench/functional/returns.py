"""Returns and generalised advantage estimation over the tokens of a response."""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.functional.masking import masked_whiten


def discounted_returns(rewards: Tensor, mask: Tensor, gamma: float = 1.0) -> Tensor:
    """Discounted return (reward-to-go) of every token, Gₜ = rₜ + γ·Gₜ₊₁: [B, T], 0 outside the mask.

    A position outside the mask (tool text) passes G through: its reward is ignored, and nothing is discounted there.
    """
    result = torch.zeros_like(rewards)
    carried = torch.zeros_like(rewards[:, 0])
    for t in range(rewards.shape[1] - 1, -1, -1):
        inside = mask[:, t].bool()
        carried = torch.where(inside, rewards[:, t] + gamma * carried, carried)
        result[:, t] = carried
    return result * mask


def gae(
    token_level_rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    gamma: float = 1.0,
    lam: float = 1.0,
    whiten: bool = True,
    zero_masked: bool = True,
    *,
    scored: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation: (advantages, returns), both [B, T], 0 outside the mask.

    token_level_rewards, values and mask [B, T].

    δₜ = rₜ + γVₜ₊₁ − Vₜ, Aₜ = δₜ + γλAₜ₊₁; a position outside the mask (tool text) passes V and A
    through unchanged. returns = A + V before whitening; advantages are then whitened over the mask. verl keeps the whitened
    values outside the mask; no loss reads them, and here they are 0 unless `zero_masked=False` asks for verl's. A mask
    with fewer than two positions is not whitened. Rows of which `scored` [B] bool is False get 0 and are in no statistic.
    Schulman et al. 2016, https://arxiv.org/abs/1506.02438.
    """
    mask = mask if scored is None else mask * scored.to(mask.dtype)[:, None]
    next_value = torch.zeros_like(values[:, 0])
    carried = torch.zeros_like(next_value)
    columns = []
    for t in range(values.shape[1] - 1, -1, -1):
        inside = mask[:, t].bool()
        delta = token_level_rewards[:, t] + gamma * next_value - values[:, t]
        carried = torch.where(inside, delta + gamma * lam * carried, carried)
        next_value = torch.where(inside, values[:, t], next_value)
        columns.append(carried)
    advantages = torch.stack(columns[::-1], dim=1)
    returns = torch.where(mask.bool(), advantages + values, 0.0)
    if whiten and mask.sum() > 1:
        advantages = masked_whiten(advantages, mask)
    return (advantages * mask if zero_masked else advantages), returns


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """1 − Var(returns − values) / (Var(returns) + 1e-5) over the mask, a scalar: 1 is a perfect critic.

    0 is a critic as good as a constant; below 0 a worse one. NaN for fewer than two positions.
    """
    inside = mask.bool()
    residual, target = (returns - values)[inside], returns[inside]
    if target.numel() < 2:
        return returns.new_full((), float("nan"))
    return 1 - residual.var() / (target.var() + 1e-5)
