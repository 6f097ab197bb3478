"""Returns and generalised advantage estimation over the tokens of a response."""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.functional.masking import by_rows, kept, masked_whiten, precise

_ELEMENTS = 2**21
"""Numbers in a block of a recurrence: each of its steps works on one column, which must be long."""

LONG = 2**15
"""Positions beyond which a sum is taken in float64: in float32 one of a million tokens is 1 % off."""


@precise
def discounted_returns(rewards: Tensor, mask: Tensor, gamma: float = 1.0) -> Tensor:
    """Discounted return (reward-to-go) of every token, Gₜ = rₜ + γ·Gₜ₊₁: [B, T], 0 outside the mask.

    A position outside the mask (tool text) passes G through: its reward is ignored, and nothing is discounted there.
    """

    def formula(rewards: Tensor, mask: Tensor) -> tuple[Tensor]:
        steps = _by_time(kept(_exact(rewards), mask))
        if gamma == 1:
            return (kept(_backwards(steps, None).t().to(rewards.dtype).contiguous(), mask),)
        inside = _by_time(mask.to(steps.dtype))
        found = _backwards(steps, gamma * inside + (1 - inside))
        return ((found * inside).t().to(rewards.dtype),)

    return by_rows(formula, rewards, mask, elements=_ELEMENTS)[0]


def _exact(rows: Tensor) -> Tensor:
    """Convert rows of more than `LONG` positions to float64, so that sums over them keep their digits."""
    return rows.double() if rows.shape[-1] > LONG else rows


def _by_time(rows: Tensor) -> Tensor:
    """Transpose [R, T] → [T, R] contiguous, so that the values of all rows at one time lie together."""
    return rows.t().contiguous()


def _backwards(steps: Tensor, factors: Tensor | None) -> Tensor:
    """Compute yₜ = stepsₜ + factorsₜ·yₜ₊₁ from the last time to the first: all [T, R]; factors None are 1.

    The steps are overwritten where no gradient flows.
    """
    if torch.is_grad_enabled() and (steps.requires_grad or (factors is not None and factors.requires_grad)):
        factors = torch.ones_like(steps) if factors is None else factors
        carried, sums = torch.zeros_like(steps[0]), []
        for step, factor in zip(reversed(steps.unbind()), reversed(factors.unbind()), strict=True):
            carried = torch.addcmul(step, factor, carried)
            sums.append(carried)
        return torch.stack(sums[::-1])
    written = steps.unbind()
    if factors is None:
        for now, later in zip(written[-2::-1], written[:0:-1], strict=True):
            now.add_(later)
        return steps
    times = [*zip(written, factors.unbind(), strict=True)]
    for (now, factor), (later, _) in zip(times[-2::-1], times[:0:-1], strict=True):
        now.addcmul_(factor, later)
    return steps


@precise
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

    def formula(rewards: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        value = _by_time(kept(_exact(values), mask))
        inside = _by_time(mask.to(value.dtype))
        outside = 1 - inside
        following = torch.zeros_like(value)  # the value of the next position of the mask
        gaps = bool((inside[1:] > inside[:-1]).any())
        following[:-1] = (_backwards(value.clone(), outside) if gaps else value)[1:]
        delta = (_by_time(kept(rewards, mask)) + gamma * following - value) * inside
        advantages = _backwards(delta, gamma * lam * inside + outside)
        return advantages.t().to(values.dtype), ((advantages + value) * inside).t().to(values.dtype)

    advantages, returns = by_rows(formula, token_level_rewards, values, mask, elements=_ELEMENTS)
    if whiten and mask.sum() > 1:
        return masked_whiten(advantages, mask, zero_masked=zero_masked), returns
    return (advantages * mask if zero_masked else advantages), returns


@precise
def decoupled_gae(
    token_level_rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    gamma: float = 1.0,
    lam: float = 1.0,
    critic_lam: float = 1.0,
    *,
    scored: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`gae` whose returns, which the critic learns, have a λ of their own, `critic_lam`: (advantages, returns), both [B, T].

    With `critic_lam` = `lam` it is `gae`; with 1 the returns do not depend on the critic's own values. Yuan et al. 2025
    (VC-PPO), https://arxiv.org/abs/2503.01491.
    """
    rows = (token_level_rewards, values, mask, gamma)
    return gae(*rows, lam, scored=scored)[0], gae(*rows, critic_lam, whiten=False, scored=scored)[1]


def length_adaptive_lam(lengths: Tensor, alpha: float) -> Tensor:
    """VAPO's λ of rows of these lengths, max(0, 1 − 1/(α·l)): floats of the same shape, 0 for a row without tokens."""
    return (1 - 1 / (alpha * lengths.clamp(min=1))).clamp(min=0)


@precise
def length_adaptive_gae(
    token_level_rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    gamma: float = 1.0,
    alpha: float = 0.05,
    critic_lam: float = 1.0,
    *,
    scored: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """GAE with a λ for each row's length l, 1 − 1/(α·l), and another λ for the critic: (advantages, returns), both [B, T].

    A row of l ≤ 1/α tokens (20 by default) has λ = 0. Advantages are whitened over the mask; returns are those of
    `critic_lam`. token_level_rewards, values and mask [B, T]. Yue et al. 2025 (VAPO), https://arxiv.org/abs/2504.05118,
    §4.2; the critic's own λ: Yuan et al. 2025 (VC-PPO), https://arxiv.org/abs/2503.01491. Raises `ValueError` for α ≤ 0.
    """
    if alpha <= 0:
        raise ValueError(f"alpha of length_adaptive_gae; expected > 0; found {alpha}")
    counted = mask if scored is None else mask * scored.to(mask.dtype)[:, None]
    lengths = counted.sum(-1)
    returns = gae(token_level_rewards, values, counted, gamma, critic_lam, whiten=False)[1]
    advantages = torch.zeros_like(returns)
    for length in lengths[lengths > 0].unique().tolist():
        at, lam = lengths == length, max(0.0, 1 - 1 / (alpha * length))
        advantages[at] = gae(token_level_rewards[at], values[at], counted[at], gamma, lam, whiten=False)[0]
    return (masked_whiten(advantages, counted, zero_masked=True) if counted.sum() > 1 else advantages), returns


@precise
def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """1 − Var(returns − values) / (Var(returns) + 1e-5) over the mask, a scalar: 1 is a perfect critic.

    0 is a critic as good as a constant; below 0 a worse one. NaN for fewer than two positions.
    """
    inside = mask.bool()
    residual, target = (returns - values)[inside], returns[inside]
    if target.numel() < 2:
        return returns.new_full((), float("nan"))
    return 1 - residual.var() / (target.var() + 1e-5)
