"""PPO's policy loss and its variants per token, by verl's names, the value loss, and the ways to aggregate them to one number.

All policy losses take old_log_probs, log_probs, advantages, mask [B, T] and settings of their own, and return a `Surrogate`.
ρ is exp(clamp(new − old, ±20)), sg(·) stops the gradient. Values outside the mask, NaN included, touch neither loss nor
gradient. On a batch that the present policy sampled (ρ = 1) all but `gpg`-like ones have the same gradient: compare
them after some updates.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Concatenate, ParamSpec

import torch
from torch import Tensor

from workbench.functional.masking import masked_mean, masked_sum

P = ParamSpec("P")


@dataclass(frozen=True)
class Surrogate:
    """Result of a policy loss, per token: the surrogate loss, the ratio, and which tokens were clipped."""

    loss: Tensor
    """[B, T], with gradient; 0 outside the mask."""
    ratio: Tensor
    """exp(new − old), [B, T]; 1 outside the mask."""
    clipped: Tensor
    """[B, T] bool: the clipped term is the larger one there."""
    clipped_lower: Tensor
    """[B, T] bool: tokens whose loss the dual clip bounds (negative advantage, ratio beyond `clip_ratio_c`)."""
    aggregation: str | None = None
    """The aggregation mode that the loss is defined with; None: the caller chooses."""
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    """Name → [B, T], of which the mean over the mask is the metric `actor/<name>`: verl's names mean what they do there."""
    per_row: bool = False
    """Whether the loss is one number a row, on its first token."""

    def weighted(self, weights: Tensor, mask: Tensor) -> Tensor:
        """The loss [B, T] times importance weights [B, T]; one number a row times the geometric mean of its weights.

        The geometric mean is exp(mean over the row's mask of log(w + 1e-10)), as verl's `geo_mean` takes it.
        """
        if self.per_row:
            weights = masked_mean((weights + 1e-10).log(), mask, dim=-1).exp()[:, None]
        return self.loss * weights


class Inside:
    """Inputs of a policy loss, each [B, T] with zeros outside the mask, and the ratio exp(clamp(new − old, ±20))."""

    def __init__(self, old_log_probs: Tensor, log_probs: Tensor, advantages: Tensor, mask: Tensor) -> None:
        self.mask, self.inside = mask, mask.bool()
        columns = (old_log_probs, log_probs, advantages)
        self.old, self.new, self.advantages = (torch.where(self.inside, one, 0.0) for one in columns)
        self.gap = self.new - self.old
        self.log_ratio = self.gap.clamp(-20, 20)
        self.ratio = self.log_ratio.exp()

    def two_sided(self, ratio: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
        """PPO's clip: (max(−Aρ, −A·clip(ρ, 1 − low, 1 + high)), where the clipped term is larger: bool), both [B, T]."""
        plain, bounded = -self.advantages * ratio, -self.advantages * ratio.clamp(1 - low, 1 + high)
        return torch.maximum(plain, bounded), bounded > plain

    def surrogate(
        self,
        loss: Tensor,
        clipped: Tensor | None = None,
        *,
        lower: Tensor | None = None,
        ratio: Tensor | None = None,
        aggregation: str | None = None,
        per_row: bool = False,
        **metrics: Tensor,
    ) -> Surrogate:
        """A `Surrogate` of these parts, 0 or False outside the mask; `ratio` defaults to the ratio of each token.

        `metrics` stand beside, or in place of, `pg_clipfrac` (clipped), `pg_clipfrac_lower` and `ppo_kl` (−log ρ).
        """
        nowhere = torch.zeros_like(self.inside)
        high = nowhere if clipped is None else clipped.detach() & self.inside
        low = nowhere if lower is None else lower.detach() & self.inside
        measured = {"pg_clipfrac": high, "pg_clipfrac_lower": low, "ppo_kl": -self.log_ratio} | metrics
        return Surrogate(
            loss=torch.where(self.inside, loss, 0.0),
            ratio=(self.ratio if ratio is None else ratio).detach(),
            clipped=high,
            clipped_lower=low,
            aggregation=aggregation,
            metrics={name: values.detach() for name, values in measured.items()},
            per_row=per_row,
        )


def _policy_loss(
    formula: Callable[Concatenate[Inside, P], Surrogate],
) -> Callable[Concatenate[Tensor, Tensor, Tensor, Tensor, P], Surrogate]:
    """A policy loss from its formula: its arguments are those of `Inside`, then the formula's settings."""

    @functools.wraps(formula)
    def loss(
        old_log_probs: Tensor, log_probs: Tensor, advantages: Tensor, mask: Tensor, *none: P.args, **settings: P.kwargs
    ) -> Surrogate:
        return formula(Inside(old_log_probs, log_probs, advantages, mask), *none, **settings)

    own = [*inspect.signature(Inside).parameters.values(), *inspect.signature(formula).parameters.values()]
    loss.__signature__ = inspect.Signature([one for one in own if one.name != "x"], return_annotation="Surrogate")  # type: ignore[attr-defined]
    return loss


@_policy_loss
def ppo_clip(
    x: Inside, *, clip_ratio_low: float = 0.2, clip_ratio_high: float = 0.2, clip_ratio_c: float = 3.0
) -> Surrogate:
    """PPO's clipped surrogate with dual clip: max(−Aρ, −A·clip(ρ, 1−low, 1+high)), and for A < 0 at most −A·c.

    A is the advantage, ρ = exp(clamp(new − old, ±20)), c = `clip_ratio_c`. All inputs [B, T]; values outside the mask,
    NaN included, touch neither loss nor gradient. Raises `ValueError` for a negative clip range or `clip_ratio_c` ≤ 1.
    Schulman et al. 2017, https://arxiv.org/abs/1707.06347; dual clip: Ye et al. 2020, https://arxiv.org/abs/1912.09729.
    """
    if clip_ratio_low < 0 or clip_ratio_high < 0 or clip_ratio_c <= 1:
        raise ValueError(
            f"clip ranges are ≥ 0 and clip_ratio_c > 1; found low {clip_ratio_low}, high {clip_ratio_high} and clip_ratio_c {clip_ratio_c}"
        )
    upper, clipped = x.two_sided(x.ratio, clip_ratio_low, clip_ratio_high)
    floor, negative = -x.advantages * clip_ratio_c, x.advantages < 0
    loss = torch.where(negative, torch.minimum(upper, floor), upper)
    return x.surrogate(loss, clipped, lower=negative & (upper > floor))


@_policy_loss
def gspo(x: Inside, *, clip_ratio_low: float = 0.2, clip_ratio_high: float = 0.2) -> Surrogate:
    """GSPO: PPO's clip on the sequence's ratio s = exp(mean of log ρ over the row), with each token's own gradient.

    log s_t = sg(log s) + new − sg(new), at most 10; sg stops the gradient. The paper's ranges are far smaller (3e-4,
    4e-4) and its aggregation is seq-mean-token-mean. Zheng et al. 2025, https://arxiv.org/abs/2507.18071.
    """
    lengths = x.mask.sum(-1, keepdim=True).clamp(min=1)
    sequence = x.gap.sum(-1, keepdim=True) / lengths
    ratio = (sequence.detach() + x.new - x.new.detach()).clamp(max=10).exp()
    loss, clipped = x.two_sided(ratio, clip_ratio_low, clip_ratio_high)
    return x.surrogate(loss, clipped, ratio=torch.where(x.inside, ratio, 1.0), ppo_kl=-x.gap)


@_policy_loss
def sapo(x: Inside, *, tau_pos: float = 1.0, tau_neg: float = 1.05) -> Surrogate:
    """SAPO: a sigmoid gate in place of PPO's clip, −A·σ(τ(ρ − 1))·4/τ with τ = `tau_pos` for A > 0, else `tau_neg`.

    A is the advantage, ρ the ratio. Aggregated seq-mean-token-mean. Gao et al. 2025, https://arxiv.org/abs/2511.20347.
    """
    if tau_pos <= 0 or tau_neg <= 0:
        raise ValueError(f"tau_pos and tau_neg must be > 0; found {tau_pos} and {tau_neg}")
    tau = torch.where(x.advantages > 0, tau_pos, tau_neg)
    gate = torch.sigmoid(tau * (x.ratio - 1)) * 4 / tau
    return x.surrogate(-x.advantages * gate, aggregation="seq-mean-token-mean")


@_policy_loss
def gpg(x: Inside) -> Surrogate:
    """GPG: −A·log π, the plain policy gradient without ratio or clip. Chu et al. 2025, https://arxiv.org/abs/2504.02546.

    Times importance weights it is REINFORCE off-policy, the `reinforce` of verl's bypass mode.
    """
    return x.surrogate(-x.advantages * x.new, ppo_kl=-x.gap)


@_policy_loss
def cispo(x: Inside, *, clip_ratio_low: float = 0.2, clip_ratio_high: float = 0.2) -> Surrogate:
    """CISPO: −A·sg(clip(ρ, 1 − low, 1 + high))·log π; the weight is clipped, and every token keeps its gradient.

    A is the advantage, ρ the ratio; sg stops the gradient. `clipped` marks tokens whose weight was cut. MiniMax 2025,
    https://arxiv.org/abs/2506.13585.
    """
    weight = x.ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    return x.surrogate(-weight.detach() * x.advantages * x.new, weight != x.ratio)


@_policy_loss
def dppo_tv(
    x: Inside, *, clip_ratio_low: float = 0.2, clip_ratio_high: float = 0.2, clip_ratio_c: float = 3.0
) -> Surrogate:
    """DPPO, total variation: −A·sg(min(ρ, c))·log π, without tokens whose probability π has already moved too far.

    Left out, and marked in `clipped`: tokens of advantage A > 0 with π_new − π_old > `clip_ratio_high`, and the others with
    π_old − π_new > `clip_ratio_low`. c = `clip_ratio_c`; `clipped_lower` marks ρ > c among those kept. sg stops the
    gradient. https://arxiv.org/abs/2602.04879.
    """
    moved = x.new.exp() - x.old.exp()
    out = torch.where(x.advantages > 0, moved > clip_ratio_high, -moved > clip_ratio_low)
    return _within(x, out.detach(), clip_ratio_c)


@_policy_loss
def dppo_kl(
    x: Inside, *, clip_ratio_low: float = 0.2, clip_ratio_high: float = 0.2, clip_ratio_c: float = 3.0
) -> Surrogate:
    """DPPO, KL: as `dppo_tv`, but the KL in nats between old and new π (sampled token against all others) is limited."""
    p, q = x.old.exp(), x.new.exp()
    divergence = -p * x.gap + (1 - p) * ((1 - p + 1e-8) / (1 - q + 1e-8)).log()
    up, down = (q > p) & (divergence > clip_ratio_high), (q < p) & (divergence > clip_ratio_low)
    return _within(x, torch.where(x.advantages > 0, up, down).detach(), clip_ratio_c)


def _within(x: Inside, out: Tensor, clip_ratio_c: float) -> Surrogate:
    weight = x.ratio.clamp(max=clip_ratio_c).detach()
    return x.surrogate(-x.advantages * weight * x.new * (~out), out, lower=(x.ratio > clip_ratio_c) & ~out)


@_policy_loss
def dro(x: Inside, *, dro_beta: float = 0.1) -> Surrogate:
    """DRO's policy loss: a quadratic penalty in place of PPO's clip. Richemond et al. 2024, https://arxiv.org/abs/2405.19107.

    −(A·log π − ½β(log π − log π_old)²) with the advantage A and β = `dro_beta`.
    """
    if dro_beta <= 0:
        raise ValueError(f"dro_beta must be > 0; found {dro_beta}")
    return x.surrogate(-(x.new * x.advantages - 0.5 * dro_beta * x.gap.square()), ppo_kl=-x.gap)


@_policy_loss
def geo_mean(x: Inside, *, clip_ratio_low: float = 0.2, clip_ratio_high: float = 0.2) -> Surrogate:
    """GMPO: −Ā·(geometric mean of the clipped ratios of a row), with the row's mean advantage Ā.

    log ρ is clipped to [−low, high] on the side to which the advantage pulls it. There is one number per row, on its first
    token; they are aggregated as the mean over rows that have a token (verl divides by empty rows, too). Zhao et al. 2025,
    https://arxiv.org/abs/2507.20673.
    """
    sign = x.advantages.sign()
    bounded = x.log_ratio.clamp(-clip_ratio_low, clip_ratio_high)
    chosen = sign * torch.minimum(sign * x.log_ratio, sign * bounded)
    lengths = x.mask.sum(-1) + 1e-8
    ratio = (chosen.sum(-1) / lengths).exp()
    per_row = -(x.advantages.sum(-1) / lengths) * ratio
    first = (x.mask.cumsum(-1) == 1) & x.inside
    outside = x.log_ratio != bounded
    return x.surrogate(
        torch.where(first, per_row[:, None], 0.0),
        outside & (x.advantages > 0),
        lower=outside & (x.advantages < 0),
        ratio=torch.where(x.inside, ratio[:, None], 1.0),
        aggregation="seq-mean-token-sum",
        per_row=True,
        ppo_kl=-x.gap,
    )


def _covariance(x: Inside) -> Tensor:
    """(A − mean A)·(log π − mean log π) per token, means over the mask; no gradient."""
    advantages, new = x.advantages.detach(), x.new.detach()
    return (advantages - masked_mean(advantages, x.mask)) * (new - masked_mean(new, x.mask))


@_policy_loss
def clip_cov(
    x: Inside,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_cov_ratio: float = 0.0002,
    clip_cov_lb: float = 1.0,
    clip_cov_ub: float = 5.0,
) -> Surrogate:
    """Clip-Cov: PPO's clip, without a few random tokens of high covariance of advantage and log π.

    Such tokens lower the entropy most. A share `clip_cov_ratio` of all tokens is left out, chosen per micro-batch among
    those with a covariance between lb and ub, by torch's generator. They are `pg_clipfrac`, as in verl; PPO's own clip is
    `ppo_clipfrac`, and `clipped` marks both. Cui et al. 2025, https://arxiv.org/abs/2505.22617.
    """
    loss, clipped = x.two_sided(x.ratio, clip_ratio_low, clip_ratio_high)
    covariance = _covariance(x)
    band = (covariance > clip_cov_lb) & (covariance < clip_cov_ub) & x.inside & ~clipped
    candidates = band.flatten().nonzero()[:, 0]
    number = min(max(int(clip_cov_ratio * float(x.mask.sum())), 1), len(candidates))
    dropped = torch.zeros_like(x.inside).flatten()
    dropped[candidates[torch.randperm(len(candidates))[:number].to(candidates.device)]] = True
    dropped = dropped.view_as(x.inside)
    kept, either = torch.where(dropped, 0.0, loss), clipped | dropped
    return x.surrogate(kept, either, pg_clipfrac=dropped, ppo_clipfrac=clipped & x.inside, ppo_kl=-x.gap)


@_policy_loss
def kl_cov(x: Inside, *, kl_cov_ratio: float = 0.0002, ppo_kl_coef: float = 0.1) -> Surrogate:
    """KL-Cov: −Aρ, plus `ppo_kl_coef`·|log ρ| on the share of tokens with the highest covariance of A and log π.

    A is the advantage, ρ the ratio. `clipped` marks those tokens, a share `kl_cov_ratio` chosen per micro-batch as in
    verl; they are the metric `kl_cov_frac`, and `ppo_kl` is the mean of |new − old|, as in verl. Cui et al. 2025,
    https://arxiv.org/abs/2505.22617.
    """
    covariance = torch.where(x.inside, _covariance(x), float("-inf")).flatten()
    number = max(1, int(float(x.mask.sum()) * kl_cov_ratio)) if bool(x.inside.any()) else 0
    chosen = torch.zeros_like(x.inside).flatten()
    chosen[covariance.topk(number).indices] = True
    chosen = chosen.view_as(x.inside)
    loss = -x.advantages * x.ratio
    loss = torch.where(chosen, loss + ppo_kl_coef * x.log_ratio.abs(), loss)
    none = torch.zeros_like(chosen)
    return x.surrogate(loss, chosen, pg_clipfrac=none, kl_cov_frac=chosen, ppo_kl=x.gap.abs())


_VARIANTS = (gspo, sapo, gpg, cispo, dppo_tv, dppo_kl, dro, geo_mean, clip_cov, kl_cov)
POLICY_LOSSES: Mapping[str, Callable[..., Surrogate]] = {"vanilla": ppo_clip} | {one.__name__: one for one in _VARIANTS}
"""verl's `loss_mode` → function."""


@dataclass(frozen=True)
class ValueLoss:
    """Result of `value_loss`, per token: the loss, and where it was clipped."""

    loss: Tensor
    """[B, T], with gradient; 0 outside the mask."""
    clipped: Tensor
    """[B, T] bool: the clipped term is the larger one there."""


def value_loss(values: Tensor, returns: Tensor, old_values: Tensor, mask: Tensor, *, clip: float = 0.5) -> ValueLoss:
    """PPO's clipped value loss ½·max((v − R)², (clip(v, old ± clip) − R)²), with values v and returns R.

    All inputs [B, T]; values outside the mask, NaN included, touch neither loss nor gradient.
    Schulman et al. 2017's reference implementation; whether the clip helps is doubted: Andrychowicz et al. 2021,
    https://arxiv.org/abs/2006.05990, §3.3.
    """
    inside = mask.bool()
    values, returns, old_values = (torch.where(inside, x, 0.0) for x in (values, returns, old_values))
    near = torch.minimum(torch.maximum(values, old_values - clip), old_values + clip)
    plain, bounded = (values - returns).square(), (near - returns).square()
    return ValueLoss(0.5 * torch.maximum(plain, bounded), (bounded > plain).detach() & inside)


AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
"""Modes of `aggregate`."""


def aggregate(
    loss: Tensor,
    mask: Tensor,
    mode: str = "token-mean",
    *,
    tokens: float | None = None,
    sequences: float | None = None,
    scale: float | None = None,
) -> Tensor:
    """Reduce token losses [B, T] to one scalar.

    `token-mean` Σ/tokens · `token-sum` Σ · `seq-mean-token-sum` Σ/sequences · `seq-mean-token-mean` the mean over
    sequences of their token means · `seq-mean-token-sum-norm` Σ/sequences/`scale` (T by default). `tokens` and
    `sequences` are the global counts of the mini-batch: with them, the losses of its micro-batches add up to its own;
    `seq-mean-token-sum-norm` then needs `scale`, because T may differ between micro-batches. Rows without a token are
    left out; an empty mask gives 0. Values outside it, NaN included, are ignored. Raises `ValueError` for another mode.
    """
    if mode not in AGGREGATIONS:
        raise ValueError(f"aggregation mode {mode!r}; expected one of {', '.join(AGGREGATIONS)}")
    if mode == "seq-mean-token-sum-norm" and scale is None:
        if sequences is not None:
            raise ValueError(f"aggregation mode {mode!r} with sequences= needs scale=: micro-batches differ in width")
        scale = loss.shape[-1]
    tokens = float(mask.sum()) if tokens is None else tokens
    per_row = masked_sum(loss, mask, dim=-1)
    lengths = mask.sum(-1)
    sequences = float((lengths > 0).sum()) if sequences is None else sequences
    if mode == "token-mean":
        return per_row.sum() / max(tokens, 1)
    if mode == "token-sum":
        return per_row.sum()
    if mode == "seq-mean-token-sum":
        return per_row.sum() / max(sequences, 1)
    if mode == "seq-mean-token-mean":
        return (per_row / lengths.clamp(min=1)).sum() / max(sequences, 1)
    return per_row.sum() / max(sequences, 1) / (scale or 1)
