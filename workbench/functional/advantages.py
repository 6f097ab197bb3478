"""Advantage estimators without a critic: each one pure function over rows and groups, vectorised.

Shapes, everywhere: scores [B] (a row's summed reward), groups [B] int64 (one number per prompt), mask [B, T] (1 on the
model's own tokens), scored [B] bool (False: no judgement), token_level_rewards [B, T]. All return (advantages, returns)
[B, T], 0 outside the mask. What is the same for all: a row without a judgement is in no statistic and gets 0; a row with
an empty mask counts in its group and has no token to carry its advantage; a row that is alone in its group has nothing to
be compared with and gets 0, or its raw score with `singleton="verl"`; equal scores in a group give 0, to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from workbench.functional.groups import Groups, per_group
from workbench.functional.masking import masked_whiten
from workbench.functional.returns import discounted_returns

Pair = tuple[torch.Tensor, torch.Tensor]


def _spread(values: torch.Tensor, scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[B] onto every token of the mask, in the scores' precision."""
    dtype = scores.dtype if scores.is_floating_point() else torch.float32
    return values.to(dtype)[:, None] * mask


def _whitened(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Whitened over the mask, 0 outside; as it is where there are fewer than two positions."""
    return masked_whiten(values, mask) * mask if mask.sum() > 1 else values * mask


def _judged_mask(mask: torch.Tensor, scored: torch.Tensor | None) -> torch.Tensor:
    """The mask without rows that have no judgement: they are in no batch statistic either."""
    return mask if scored is None else mask * scored.to(mask.dtype)[:, None]


def grpo(
    scores: torch.Tensor,
    groups: torch.Tensor,
    mask: torch.Tensor,
    *,
    scored: torch.Tensor | None = None,
    norm_by_std: bool = True,
    eps: float = 1e-6,
    singleton: str = "zero",
) -> Pair:
    """A = (s − μ_g) / (σ_g + eps): samples of one prompt are each other's baseline.

    σ is the unbiased (n−1) deviation; `norm_by_std=False` leaves s − μ (Dr.GRPO, https://arxiv.org/abs/2503.20783). Sums
    are float64, so that rounding of equal scores does not make a spread of 1e-5 that eps then blows up.
    Shao et al. 2024, https://arxiv.org/abs/2402.03300.
    """
    found = Groups(scores, groups, scored)
    values = found.centred / (found.deviation() + eps) if norm_by_std else found.centred
    advantages = _spread(found.unless_alone(values, singleton), scores, mask)
    return advantages, advantages


def grpo_passk(
    scores: torch.Tensor,
    groups: torch.Tensor,
    mask: torch.Tensor,
    *,
    scored: torch.Tensor | None = None,
    norm_by_std: bool = True,
    eps: float = 1e-6,
) -> Pair:
    """The best row of a group gets (s₁ − s₂) / (σ_g + eps), all others 0: only what improves the group's best is pushed.

    s₁ and s₂ are the two highest scores; where they are equal nobody gets anything. verl raises for a group of one; here it
    gets 0. https://arxiv.org/abs/2503.19595, as verl has it.
    """
    found = Groups(scores, groups, scored)
    low = torch.full_like(found.scores, float("-inf"))
    ranked = torch.where(found.judged, found.scores, low)
    first = _group_max(ranked, groups)
    best = found.judged & (ranked == first[groups])
    second = _group_max(torch.where(best, low, ranked), groups)
    sole = per_group(best.double(), groups)[groups] == 1
    gap = torch.where(best & sole & ~found.alone, ranked - second[groups], 0.0)
    values = gap / (found.deviation() + eps) if norm_by_std else gap
    advantages = _spread(values, scores, mask)
    return advantages, advantages


def _group_max(values: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    number = int(groups.max()) + 1 if groups.numel() else 0
    start = torch.full((number,), float("-inf"), dtype=values.dtype, device=values.device)
    return start.scatter_reduce(0, groups, values, "amax")


def rloo(
    scores: torch.Tensor,
    groups: torch.Tensor,
    mask: torch.Tensor,
    *,
    scored: torch.Tensor | None = None,
    singleton: str = "zero",
) -> Pair:
    """A = s − mean of the group's other rows = (s − μ_g)·n/(n − 1): leave one out.

    verl's `rloo` leaves a lone row's score (`singleton="verl"`), its `rloo_vectorized` gives 0, as here.
    Ahmadian et al. 2024, https://arxiv.org/abs/2402.14740.
    """
    found = Groups(scores, groups, scored)
    values = found.centred * found.count / (found.count - 1).clamp(min=1)
    advantages = _spread(found.unless_alone(values, singleton), scores, mask)
    return advantages, advantages


def opo(
    scores: torch.Tensor,
    groups: torch.Tensor,
    mask: torch.Tensor,
    *,
    scored: torch.Tensor | None = None,
    singleton: str = "zero",
) -> Pair:
    """A = s − Σ len·s / Σ len over the group: the baseline of least variance where gradients grow with length.

    Lengths are Σ mask; a group without a token has the plain mean. Hao et al. 2025, https://arxiv.org/abs/2505.23585.
    """
    found = Groups(scores, groups, scored)
    lengths = mask.sum(-1).double() * found.judged
    total = per_group(lengths, groups)
    weighted = per_group(lengths * found.scores, groups) / total.clamp(min=1)
    plain = per_group(found.scores, groups) / per_group(found.judged.double(), groups).clamp(min=1)
    baseline = torch.where(total > 0, weighted, plain)
    values = torch.where(found.judged, found.scores - baseline[groups], 0.0)
    advantages = _spread(found.unless_alone(values, singleton), scores, mask)
    return advantages, advantages


def gpg(
    scores: torch.Tensor,
    groups: torch.Tensor,
    mask: torch.Tensor,
    *,
    scored: torch.Tensor | None = None,
    f_norm: float = 1.0,
    singleton: str = "zero",
) -> Pair:
    """A = α·(s − μ_g) / f_norm, α = rows / rows with a score other than 0: scaled up where few rows have any signal.

    A batch of zeros has α = 1. Goes with the loss `gpg` (−A·log π). Chu et al. 2025, https://arxiv.org/abs/2504.02546.
    """
    found = Groups(scores, groups, scored)
    alpha = found.judged.double().sum() / ((found.scores != 0) & found.judged).sum().clamp(min=1)
    alpha = torch.where((found.scores != 0).any(), alpha, torch.ones_like(alpha))
    advantages = _spread(found.unless_alone(alpha * found.centred / f_norm, singleton), scores, mask)
    return advantages, advantages


def gdpo(
    components: torch.Tensor,
    groups: torch.Tensor,
    mask: torch.Tensor,
    *,
    scored: torch.Tensor | None = None,
    weights: Sequence[float] | None = None,
    eps: float = 1e-6,
    singleton: str = "zero",
) -> Pair:
    """Σ_k w_k·GRPO(component k), whitened over the batch: a part with a wide spread cannot drown the others.

    components [B, K] are named parts of the reward; `weights` K numbers (1 each). NaN (a row without that part) is 0 for
    it. Liu et al. 2026, https://arxiv.org/abs/2601.05242.
    """
    chosen = [1.0] * components.shape[1] if weights is None else list(weights)
    if len(chosen) != components.shape[1]:
        raise ValueError(f"gdpo has {components.shape[1]} components and {len(chosen)} weights")
    total = torch.zeros(mask.shape, dtype=components.dtype, device=components.device)
    for number, weight in enumerate(chosen):
        part = components[:, number]
        present = part.isfinite() if scored is None else part.isfinite() & scored.bool()
        total = total + weight * grpo(part, groups, mask, scored=present, eps=eps, singleton=singleton)[0]
    counted = _judged_mask(mask, scored)
    advantages = _whitened(total, counted)
    return advantages, advantages


def reinforce_plus_plus(
    token_level_rewards: torch.Tensor, mask: torch.Tensor, *, scored: torch.Tensor | None = None, gamma: float = 1.0
) -> Pair:
    """Discounted reward-to-go, whitened over the batch: no critic and no groups.

    A masked (tool) token carries the return through. Returns are the unwhitened ones. With KL in the reward this is
    the paper's algorithm. Hu et al. 2025, https://arxiv.org/abs/2501.03262.
    """
    counted = _judged_mask(mask, scored)
    returns = discounted_returns(token_level_rewards, counted, gamma)
    return _whitened(returns, counted), returns


def reinforce_plus_plus_baseline(
    scores: torch.Tensor,
    groups: torch.Tensor,
    mask: torch.Tensor,
    *,
    scored: torch.Tensor | None = None,
    singleton: str = "zero",
) -> Pair:
    """s − μ_g on every token, then whitened over the batch: the deviation is the batch's, not the group's.

    Hu et al. 2025, https://arxiv.org/abs/2501.03262, the variant for verifiable rewards.
    """
    found = Groups(scores, groups, scored)
    centred = _spread(found.unless_alone(found.centred, singleton), scores, mask)
    advantages = _whitened(centred, _judged_mask(mask, scored))
    return advantages, advantages


def remax(
    token_level_rewards: torch.Tensor,
    baselines: torch.Tensor,
    mask: torch.Tensor,
    *,
    scored: torch.Tensor | None = None,
) -> Pair:
    """Reward-to-go less the reward of the prompt's greedy response: baselines [B], a column that the recipe adds.

    Li et al. 2024, https://arxiv.org/abs/2310.10505.
    """
    counted = _judged_mask(mask, scored)
    returns = discounted_returns(token_level_rewards, counted)
    return (returns - baselines[:, None].to(returns.dtype)) * counted, returns


def optimal_token_baseline(
    token_level_rewards: torch.Tensor,
    groups: torch.Tensor,
    mask: torch.Tensor,
    old_log_probs: torch.Tensor,
    sum_pi_squared: torch.Tensor,
    *,
    scored: torch.Tensor | None = None,
    eps: float = 1e-8,
) -> Pair:
    """A_t = G_t − B_t with B_t = Σ_g G_t·W_t / (Σ_g W_t + eps), W_t = Σ_{u≤t} (1 − 2π_u + Σπ²_u): the least-variance baseline
    of every position.

    G is the reward-to-go, π_u the probability of the token taken, Σπ²_u that of the whole distribution squared
    (sum_pi_squared [B, T]): W_t is the expected squared norm of the logits' gradient so far. Where one row alone of a group
    still has a token the baseline is 0, as in verl. A masked token has no weight and no advantage.
    """
    counted = _judged_mask(mask, scored)
    inside = counted.bool()
    returns = discounted_returns(token_level_rewards, counted)
    energy = torch.where(inside, 1 - 2 * old_log_probs.exp() + sum_pi_squared, 0.0).double().cumsum(-1)
    weight = torch.where(inside, energy, 0.0)
    total = per_group(weight, groups)
    several = per_group(inside.double(), groups) > 1
    baseline = torch.where(several, per_group(returns.double() * weight, groups) / (total + eps), 0.0)
    advantages = torch.where(inside, returns - baseline[groups].to(returns.dtype), 0.0)
    return advantages, returns


def tir_optimal_token_baseline(
    token_level_rewards: torch.Tensor,
    groups: torch.Tensor,
    mask: torch.Tensor,
    old_log_probs: torch.Tensor,
    sum_pi_squared: torch.Tensor,
    *,
    scored: torch.Tensor | None = None,
    eps: float = 1e-8,
) -> Pair:
    """`optimal_token_baseline` over the model's own tokens packed to the left: the n-th token that a row's model wrote is
    compared with the n-th of its siblings, however much tool text stands between.
    """
    order = torch.sort(mask.bool().to(torch.uint8), dim=-1, descending=True, stable=True).indices
    packed = [one.gather(1, order) for one in (token_level_rewards, mask, old_log_probs, sum_pi_squared)]
    advantages, returns = optimal_token_baseline(
        packed[0] * packed[1], groups, packed[1], packed[2], packed[3], scored=scored, eps=eps
    )
    back = torch.argsort(order, dim=-1)
    return advantages.gather(1, back), returns.gather(1, back)
