"""Advantage estimators without a critic: each one pure function over rows and groups, vectorised.

Shapes, everywhere: scores [B] (a row's summed reward), groups [B] int64 (one number per prompt), mask [B, T] (1 on the
model's own tokens), scored [B] bool (False: the row has no score), token_level_rewards [B, T]. All return
(advantages, returns) [B, T], 0 outside the mask. In all of them a row that was not scored is in no statistic and gets 0; a
row with an empty mask counts in its group and has no token to carry its advantage; a row that is alone in its group has
nothing to be compared with and gets 0, or its raw score with `singleton="verl"`; equal scores in a group give exactly 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from workbench.functional.masking import by_rows, kept, masked_whiten, precise
from workbench.functional.returns import discounted_returns

Pair = tuple[Tensor, Tensor]


def per_group(values: Tensor, groups: Tensor) -> Tensor:
    """Sum the rows of each group: [B, …] → [number of groups, …]; `groups` [B] int64 has each row's group, from 0."""
    number = int(groups.max()) + 1 if groups.numel() else 0
    shape = (number, *values.shape[1:])
    return torch.zeros(shape, dtype=values.dtype, device=values.device).index_add_(0, groups, values)


class Groups:
    """Statistics of groups for group-relative advantages: the number of scored rows, scores minus the group's mean.

    scores [B]; groups [B] int64, one number per prompt; scored [B] bool (None: every row is scored). Rows that were not
    scored enter no statistic; `scores` and `centred` are 0 for them. Raises `ValueError` for a scored row whose score is NaN or
    infinite.
    """

    def __init__(self, scores: Tensor, groups: Tensor, scored: Tensor | None) -> None:
        self.groups = groups
        self.scored = torch.ones_like(groups, dtype=torch.bool) if scored is None else scored.bool()
        self.scores = torch.where(self.scored, scores.double(), 0.0)
        if not self.scores.isfinite().all():
            rows = (~self.scores.isfinite()).nonzero()[:, 0].tolist()
            found = f"{float(self.scores[rows[0]])} in rows {rows[:8]}"
            raise ValueError(
                f"scores; expected finite numbers; found {found}; scored=… with False there leaves them out"
            )
        self._count = per_group(self.scored.double(), groups)
        self.count = self._count[groups]
        """[B] number of scored rows in each row's group."""
        mean = per_group(self.scores, groups) / self._count.clamp(min=1)
        self.centred = torch.where(self.scored, self.scores - mean[groups], 0.0)
        """[B] each row's score minus the mean score of its group."""

    def deviation(self) -> Tensor:
        """[B] standard deviation (n − 1) of the scores in each row's group; 0 for one row."""
        return (per_group(self.centred.square(), self.groups) / (self._count - 1).clamp(min=1)).sqrt()[self.groups]

    def unless_alone(self, values: Tensor, singleton: str) -> Tensor:
        """Return `values` [B], except for a row that is alone in its group: 0 (singleton "zero") or its raw score
        ("verl").
        """
        if singleton not in ("zero", "verl"):
            raise ValueError(f"singleton must be 'zero' or 'verl'; found {singleton!r}")
        raw = self.scores if singleton == "verl" else torch.zeros_like(self.scores)
        return torch.where(self.count > 1, values, raw)


def _spread(values: Tensor, scores: Tensor, mask: Tensor) -> Pair:
    """Put one value per row [B] on every token of the mask; returns that as advantages and as returns, in the scores'
    precision.
    """
    dtype = scores.dtype if scores.is_floating_point() else torch.float32
    advantages = values.to(torch.promote_types(dtype, torch.float32)).to(dtype)[:, None] * mask.to(dtype)
    return advantages, advantages


def _whitened_rows(values: Tensor, scores: Tensor, mask: Tensor, scored: Tensor | None) -> Pair:
    """Put one value per row [B] on every token and whiten over the tokens, so that a row counts as often as it has
    tokens.
    """
    lengths = mask.sum(-1) if scored is None else mask.sum(-1) * scored.to(mask.dtype)
    many = lengths.sum() > 1
    return _spread(masked_whiten(values, lengths, zero_masked=True) if many else values * (lengths > 0), scores, mask)


def _scored_mask(mask: Tensor, scored: Tensor | None) -> Tensor:
    """Return the mask without rows that were not scored, which are in no batch statistic either."""
    return mask if scored is None else mask * scored.to(mask.dtype)[:, None]


def grpo(
    scores: Tensor,
    groups: Tensor,
    mask: Tensor,
    *,
    scored: Tensor | None = None,
    norm_by_std: bool = True,
    eps: float = 1e-6,
    singleton: str = "zero",
) -> Pair:
    """GRPO: (s − μ) / (σ + eps), a row's score s against mean μ and standard deviation σ of its prompt's samples.

    scores [B], groups [B] int64 (one number per prompt), mask [B, T]; returns (advantages, returns), both [B, T].
    σ divides by n − 1; `norm_by_std=False` leaves s − μ (Dr.GRPO, https://arxiv.org/abs/2503.20783). A row alone in its
    group gets 0, or its raw score with `singleton="verl"`. Shao et al. 2024, https://arxiv.org/abs/2402.03300.
    """
    if norm_by_std:
        return _spread(_standardised(scores, groups, scored, eps, singleton), scores, mask)
    found = Groups(scores, groups, scored)
    return _spread(found.unless_alone(found.centred, singleton), scores, mask)


def _standardised(scores: Tensor, groups: Tensor, scored: Tensor | None, eps: float, singleton: str) -> Tensor:
    """Compute GRPO's advantage of each row: [B] float64, because rounding must not give equal scores a spread."""
    found = Groups(scores, groups, scored)
    return found.unless_alone(found.centred / (found.deviation() + eps), singleton)


def grpo_passk(
    scores: Tensor,
    groups: Tensor,
    mask: Tensor,
    *,
    scored: Tensor | None = None,
    norm_by_std: bool = True,
    eps: float = 1e-6,
) -> Pair:
    """Advantage for pass@k: the best row of a group gets (s₁ − s₂) / (σ + eps), all other rows 0.

    s₁ and s₂ are the group's two highest scores (if equal, all rows get 0), σ is its standard deviation. A group of one
    gets 0. scores, groups [B]; mask [B, T]; returns (advantages, returns) [B, T]. https://arxiv.org/abs/2503.19595.
    """
    found = Groups(scores, groups, scored)
    best, second = _leader(found.scores, groups, found.scored)
    gap = torch.where(best & (found.count > 1), found.scores - second, 0.0)
    values = gap / (found.deviation() + eps) if norm_by_std else gap
    return _spread(values, scores, mask)


def _leader(values: Tensor, groups: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
    """Return, both [B] and among counted rows: whether a row alone has its group's greatest value, and the group's next
    smaller value.
    """
    low = torch.full_like(values, float("-inf"))
    ranked = torch.where(counted, values, low)
    best = counted & (ranked == _group_max(ranked, groups)[groups])
    second = _group_max(torch.where(best, low, ranked), groups)
    return best & (per_group(best.double(), groups)[groups] == 1), second[groups]


def _group_max(values: Tensor, groups: Tensor) -> Tensor:
    number = int(groups.max()) + 1 if groups.numel() else 0
    start = torch.full((number,), float("-inf"), dtype=values.dtype, device=values.device)
    return start.scatter_reduce(0, groups, values, "amax")


def rloo(
    scores: Tensor, groups: Tensor, mask: Tensor, *, scored: Tensor | None = None, singleton: str = "zero"
) -> Pair:
    """RLOO (leave one out): a row's score minus the mean score of its group's other rows, (s − μ)·n / (n − 1).

    A row alone in its group gets 0 as in verl's `rloo_vectorized`; with `singleton="verl"` its score, as in verl's `rloo`.
    scores, groups [B]; mask [B, T]; returns (advantages, returns) [B, T]. https://arxiv.org/abs/2402.14740.
    """
    found = Groups(scores, groups, scored)
    values = found.centred * found.count / (found.count - 1).clamp(min=1)
    return _spread(found.unless_alone(values, singleton), scores, mask)


@precise
def opo(scores: Tensor, groups: Tensor, mask: Tensor, *, scored: Tensor | None = None, singleton: str = "zero") -> Pair:
    """OPO: a row's score minus its group's length-weighted mean score, Σ len·s / Σ len.

    This baseline has the least variance where gradients grow with length. len is Σ mask; a group without a token uses the
    plain mean. scores, groups [B]; mask [B, T]; returns (advantages, returns) [B, T]. https://arxiv.org/abs/2505.23585.
    """
    found = Groups(scores, groups, scored)
    lengths = mask.sum(-1).double() * found.scored
    total = per_group(lengths, groups)
    weighted = per_group(lengths * found.scores, groups) / total.clamp(min=1)
    plain = per_group(found.scores, groups) / per_group(found.scored.double(), groups).clamp(min=1)
    baseline = torch.where(total > 0, weighted, plain)
    values = torch.where(found.scored, found.scores - baseline[groups], 0.0)
    return _spread(found.unless_alone(values, singleton), scores, mask)


def gpg(
    scores: Tensor,
    groups: Tensor,
    mask: Tensor,
    *,
    scored: Tensor | None = None,
    f_norm: float = 1.0,
    singleton: str = "zero",
) -> Pair:
    """GPG: α·(s − μ) / f_norm, a row's score s minus its group's mean μ; α = rows / rows whose score is not 0.

    α scales up batches in which few rows score; it is 1 where all scores are 0. Meant for the policy loss `gpg` (−A·log π).
    scores, groups [B]; mask [B, T]; returns (advantages, returns) [B, T]. https://arxiv.org/abs/2504.02546.
    """
    found = Groups(scores, groups, scored)
    alpha = found.scored.double().sum() / ((found.scores != 0) & found.scored).sum().clamp(min=1)
    alpha = torch.where((found.scores != 0).any(), alpha, torch.ones_like(alpha))
    return _spread(alpha / f_norm * found.unless_alone(found.centred, singleton), scores, mask)


def maxrl(
    scores: Tensor, groups: Tensor, mask: Tensor, *, scored: Tensor | None = None, singleton: str = "zero"
) -> Pair:
    """MaxRL (maximum likelihood RL): (s − μ) / μ, a row's score s against its group's mean μ; 0 where μ is 0.

    For rewards of 0 and 1: the fewer of a prompt's samples succeed, the more each success weighs. A row alone in its group
    gets 0, or its raw score with `singleton="verl"`. Raises `ValueError` for a score below 0, which would turn the
    gradient round. scores, groups [B]; mask [B, T]; returns (advantages, returns) [B, T].
    Tajwar et al. 2026, https://arxiv.org/abs/2602.02710, algorithm 1 (where the mean over samples is the loss's).
    """
    found = Groups(scores, groups, scored)
    if (found.scores < 0).any():
        raise ValueError(
            f"scores of maxrl; expected ≥ 0, best 0 and 1; found {float(found.scores.min()):g}; use grpo for others"
        )
    mean = found.scores - found.centred
    return _spread(found.unless_alone(found.centred / torch.where(mean > 0, mean, 1.0), singleton), scores, mask)


@precise
def gdpo(
    components: Tensor,
    groups: Tensor,
    mask: Tensor,
    *,
    scored: Tensor | None = None,
    weights: Sequence[float] | None = None,
    eps: float = 1e-6,
    singleton: str = "zero",
) -> Pair:
    """GDPO: GRPO's advantage of each part of the reward, weighted, summed and whitened over the batch.

    So a part with a wide spread cannot drown the others. components [B, K] are the parts, NaN where a row lacks one (it
    adds 0 there); `weights` are K numbers (None: 1 each). Liu et al. 2026, https://arxiv.org/abs/2601.05242.
    """
    chosen = [1.0] * components.shape[1] if weights is None else list(weights)
    if len(chosen) != components.shape[1]:
        raise ValueError(f"weights of gdpo; expected {components.shape[1]}, one per component; found {len(chosen)}")
    total = torch.zeros(len(mask), dtype=torch.float64, device=components.device)
    for number, weight in enumerate(chosen):
        part = components[:, number]
        present = part.isfinite() if scored is None else part.isfinite() & scored.bool()
        total = total + weight * _standardised(part, groups, present, eps, singleton)
    return _whitened_rows(total, components, mask, scored)


@precise
def reinforce_plus_plus(
    token_level_rewards: Tensor, mask: Tensor, *, scored: Tensor | None = None, gamma: float = 1.0
) -> Pair:
    """REINFORCE++: the discounted reward-to-go of every token, whitened over the batch; no critic and no groups.

    Returns (advantages, unwhitened returns), both [B, T]. A token outside the mask (tool text) passes the return through
    undiscounted. With KL in the reward this is the paper's algorithm. Hu et al. 2025, https://arxiv.org/abs/2501.03262.
    """
    counted = _scored_mask(mask, scored)
    returns = discounted_returns(token_level_rewards, counted, gamma)
    return (masked_whiten(returns, counted, zero_masked=True) if counted.sum() > 1 else returns), returns


@precise
def reinforce_plus_plus_baseline(
    scores: Tensor, groups: Tensor, mask: Tensor, *, scored: Tensor | None = None, singleton: str = "zero"
) -> Pair:
    """REINFORCE++ with a baseline: a row's score minus its group's mean on every token, then whitened over the whole batch.

    The deviation is the batch's, not the group's. scores, groups [B]; mask [B, T]; returns (advantages, returns) [B, T].
    Hu et al. 2025, https://arxiv.org/abs/2501.03262, the variant for verifiable rewards.
    """
    found = Groups(scores, groups, scored)
    return _whitened_rows(found.unless_alone(found.centred, singleton), scores, mask, scored)


@precise
def remax(token_level_rewards: Tensor, baselines: Tensor, mask: Tensor, *, scored: Tensor | None = None) -> Pair:
    """ReMax: the reward-to-go of every token minus the reward of the prompt's greedy response (baselines [B]).

    Returns (advantages, returns), both [B, T], 0 outside the mask. Li et al. 2024, https://arxiv.org/abs/2310.10505.
    """
    counted = _scored_mask(mask, scored)
    returns = discounted_returns(token_level_rewards, counted)
    baseline = baselines[:, None].to(returns.dtype)
    return by_rows(lambda one, base, inside: (kept(one - base, inside),), returns, baseline, counted)[0], returns


@precise
def optimal_token_baseline(
    token_level_rewards: Tensor,
    groups: Tensor,
    mask: Tensor,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    *,
    rollout_is_weights: Tensor | None = None,
    scored: Tensor | None = None,
    eps: float = 1e-8,
) -> Pair:
    """A_t = G_t − B_t: a token's reward-to-go G minus, at every position t, the group's baseline of least variance.

    B_t = Σ_g G_t·W_t / (Σ_g W_t + eps) over the rows g of a group; W_t = Σ_{u≤t} ρ²_u (1 − 2π_u + Σπ²_u) is the expected
    squared norm of the logits' gradient up to t. π_u is the sampled token's probability, Σπ²_u the sum of all tokens'
    squared ones (sum_pi_squared [B, T]), ρ_u the importance weight (rollout_is_weights [B, T]; None: 1). A token outside the
    mask has weight and advantage 0. groups [B], all else [B, T]; returns (advantages, returns) [B, T].

    In the row with the most tokens of its group the baseline is 0 from position n on, where the second most is n tokens:
    nothing is left to compare with. As in verl, n counts tokens, so that with tool text between them it comes too early;
    `tir_optimal_token_baseline` is made for that.
    """
    given = (token_level_rewards, groups, mask, old_log_probs, sum_pi_squared, rollout_is_weights)
    return _token_baseline(*given, scored=scored, eps=eps, compact=False)


@precise
def tir_optimal_token_baseline(
    token_level_rewards: Tensor,
    groups: Tensor,
    mask: Tensor,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    *,
    rollout_is_weights: Tensor | None = None,
    scored: Tensor | None = None,
    eps: float = 1e-8,
) -> Pair:
    """`optimal_token_baseline` for tool use: positions are counted over the model's own tokens (mask 1) only. The n-th
    token that the model wrote is compared with the n-th of the group's other rows, however much tool text lies between."""
    given = (token_level_rewards, groups, mask, old_log_probs, sum_pi_squared, rollout_is_weights)
    return _token_baseline(*given, scored=scored, eps=eps, compact=True)


def _token_baseline(
    rewards: Tensor,
    groups: Tensor,
    mask: Tensor,
    old: Tensor,
    squared: Tensor,
    rollout: Tensor | None,
    *,
    scored: Tensor | None,
    eps: float,
    compact: bool,
) -> Pair:
    """Compute the optimal token baseline of both public functions. With `compact` a token's position is its number
    among the row's own tokens, not its column.
    """
    counted = _scored_mask(mask, scored)
    returns = discounted_returns(rewards, counted)
    rows = torch.ones_like(groups, dtype=torch.bool) if scored is None else scored.bool()
    longest, second = _leader(counted.sum(-1).double(), groups, rows)
    limit = torch.where(longest, second, float("inf"))[:, None]
    ratios = old.new_ones(()).expand_as(old) if rollout is None else rollout
    number = int(groups.max()) + 1 if groups.numel() else 0
    over, under = torch.zeros(2, number, mask.shape[1], dtype=torch.float64, device=mask.device)
    columns = torch.arange(mask.shape[1], device=mask.device)

    def position(inside: Tensor) -> Tensor:
        return (inside.cumsum(-1) - 1).clamp(min=0).long() if compact else columns.expand_as(inside)

    def add_up(of: Tensor, returns: Tensor, inside: Tensor, old: Tensor, squared: Tensor, ratio: Tensor) -> tuple[()]:
        energy = kept((1 - 2 * old.exp() + squared) * ratio.square(), inside).double()
        weight = energy.cumsum(-1) * inside
        for total, part in ((over, returns * weight), (under, weight)):
            placed = torch.zeros_like(part).scatter_add_(1, position(inside), part) if compact else part
            total.index_add_(0, of[:, 0], placed)
        return ()

    def advantage(of: Tensor, limit: Tensor, returns: Tensor, inside: Tensor) -> tuple[Tensor]:
        at, base = position(inside), baseline[of[:, 0]]
        base = base.gather(1, at) if compact else base
        return (returns - kept(base, inside * (at < limit)),)

    by_rows(add_up, groups[:, None], returns, counted, old, squared, ratios)
    baseline = (over / (under + eps)).to(returns.dtype)
    return by_rows(advantage, groups[:, None], limit, returns, counted)[0], returns
