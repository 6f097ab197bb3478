"""PPO's policy loss and its variants per token, by verl's names, the value loss, the KL to a reference, and aggregations.

All policy losses take old_log_probs, log_probs, advantages, mask [B, T] and settings of their own, and return a
`Surrogate`. ρ is exp(clamp(new − old, ±20)), sg(·) stops the gradient. Values outside the mask, NaN included, touch
neither loss nor gradient. Inside it a log-prob that is NaN or infinite makes the token's loss NaN, which engines
refuse by its rows. Half precision is computed in float32. On a batch that the present policy sampled (ρ = 1) all but
`gpg`-like ones have the same gradient: compare them after some updates.

KL(policy‖reference) is estimated from the log-probs of sampled tokens by k1, k2 and k3 (Schulman 2020,
http://joschu.net/blog/kl-approx.html). With Δ = log π(a) − log π_ref(a): k1 = Δ (unbiased, may be negative), k2 =
Δ²/2, k3 = e^−Δ + Δ − 1 (unbiased, never negative). The controllers of its weight: Ziegler et al. 2019,
https://arxiv.org/abs/1909.08593, §2.2.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Concatenate, ParamSpec

import torch
from torch import Tensor

from workbench.functional.masking import ELEMENTS, by_rows, kept, masked_mean, masked_sum, precise, sloped

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
        """Multiply the loss [B, T] by importance weights [B, T]. A loss of one number per row gets the geometric mean
        of the row's weights.

        The geometric mean is exp(mean over the row's mask of log(w + 1e-10)), as verl's `geo_mean` computes it.
        """
        if self.per_row:
            weights = masked_mean((weights + 1e-10).log(), mask, dim=-1).exp()[:, None]
        return self.loss * weights


Parts = dict[str, Tensor]
"""What the formula of a policy loss makes: see `Inside.parts`."""


class Inside:
    """Inputs of a policy loss, each [B, T] with zeros outside the mask, and the ratio ρ = exp(clamp(new − old, ±20)).

    A formula computes from it the loss and its slope ∂loss/∂log π of each token. It computes each row from that row
    alone, because large tensors are passed to it a few rows at a time.
    """

    def __init__(self, old_log_probs: Tensor, log_probs: Tensor, advantages: Tensor, mask: Tensor) -> None:
        self.mask, self._given = mask.to(log_probs.dtype), mask
        columns = (old_log_probs, log_probs, advantages)
        self.old, self.new, self.advantages = (kept(one, self.mask) for one in columns)
        gap = self.new - self.old
        self.gap = gap + (gap - gap)  # NaN where it is infinite: no clip may hide a token of probability 0
        self.log_ratio = self.gap.clamp(-20, 20)
        self.ratio = self.log_ratio.exp()
        self.push = -self.advantages

    @functools.cached_property
    def inside(self) -> Tensor:
        """The mask as bool, [B, T]."""
        return self._given.bool()

    @property
    def steep(self) -> Tensor:
        """The derivative ∂ρ/∂log π: ρ, or 0 where new − old is clamped."""
        return torch.ops.aten.hardtanh_backward(self.ratio, self.gap, -20, 20)

    def two_sided(self, ratio: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
        """Apply PPO's clip: returns max(−Aρ, −A·clip(ρ, 1 − low, 1 + high)), and as bool where the clipped term is
        larger; both [B, T].
        """
        plain, bounded = self.push * ratio, self.push * ratio.clamp(1 - low, 1 + high)
        return torch.maximum(plain, bounded), bounded > plain

    def parts(
        self,
        loss: Tensor,
        slope: Tensor,
        clipped: Tensor | None = None,
        *,
        lower: Tensor | None = None,
        ratio: Tensor | None = None,
        **metrics: Tensor,
    ) -> Parts:
        """Collect what a formula computes: the loss, its slope, where it is clipped (None: nowhere), the ratio (None:
        each token's ρ).

        `metrics` are added to, or replace, `pg_clipfrac` (clipped), `pg_clipfrac_lower` and `ppo_kl` (−log ρ).
        """
        parts = {"loss": loss, "slope": slope, "ratio": self.ratio if ratio is None else ratio}
        if clipped is not None:
            parts["clipped"] = clipped & self.inside
        if lower is not None:
            parts["clipped_lower"] = lower & self.inside
        return parts | ({"ppo_kl": -self.log_ratio} if "ppo_kl" not in metrics else {}) | metrics


def _whole(
    formula: Callable[[Inside], Parts],
    *inputs: Tensor,
    aggregation: str | None = None,
    per_row: bool = False,
    change: Callable[[Parts], None] = lambda parts: None,
) -> Surrogate:
    """Compute the `Surrogate` of a formula; `inputs` are the arguments of `Inside`. Only the log-probs get a gradient.

    `change` modifies the result where the formula needs all rows, as when few tokens are chosen among all.
    """
    names: list[str] = []

    def tensors(*rows: Tensor) -> list[Tensor]:
        parts = formula(Inside(*rows))
        names[:] = parts
        return [*parts.values()]

    found = by_rows(tensors, *(one.detach() for one in inputs))
    parts = dict(zip(names, found, strict=True))
    change(parts)
    loss, ratio = sloped(parts.pop("loss"), parts.pop("slope"), inputs[1]), parts.pop("ratio")
    if per_row:  # on the row's first token
        first = inputs[3].bool().byte().argmax(-1, keepdim=True)
        loss = torch.zeros_like(ratio).scatter(1, first, loss)
    nowhere = torch.zeros((), dtype=torch.bool, device=ratio.device).expand(ratio.shape)
    clipped, lower = parts.pop("clipped", nowhere), parts.pop("clipped_lower", nowhere)
    metrics = {"pg_clipfrac": clipped, "pg_clipfrac_lower": lower} | parts
    return Surrogate(loss, ratio, clipped, lower, aggregation, metrics, per_row)


def _policy_loss(
    formula: Callable[Concatenate[Inside, P], Parts], aggregation: str | None = None, per_row: bool = False
) -> Callable[Concatenate[Tensor, Tensor, Tensor, Tensor, P], Surrogate]:
    """Decorator that makes a policy loss from its formula: the loss takes the arguments of `Inside`, then the formula's
    settings.
    """

    @precise
    @functools.wraps(formula)
    def loss(
        old_log_probs: Tensor, log_probs: Tensor, advantages: Tensor, mask: Tensor, *none: P.args, **settings: P.kwargs
    ) -> Surrogate:
        own, given = functools.partial(formula, **settings), (old_log_probs, log_probs, advantages, mask)
        return _whole(own, *given, aggregation=aggregation, per_row=per_row)

    own = [*inspect.signature(Inside).parameters.values(), *inspect.signature(formula).parameters.values()]
    own = [one for one in own if one.name != "x"]
    loss.__signature__ = inspect.Signature(own, return_annotation="Surrogate")  # type: ignore[attr-defined]
    return loss


@_policy_loss
def ppo_clip(
    x: Inside, *, clip_ratio_low: float = 0.2, clip_ratio_high: float = 0.2, clip_ratio_c: float = 3.0
) -> Parts:
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
    most = x.advantages.abs() * clip_ratio_c  # of A > 0 the loss is below 0, and so below this
    lower = upper > most
    slope = x.push * x.steep * ~(clipped | lower)
    return x.parts(torch.minimum(upper, most), slope, clipped, lower=lower)


@_policy_loss
def gspo(x: Inside, *, clip_ratio_low: float = 0.2, clip_ratio_high: float = 0.2) -> Parts:
    """GSPO: PPO's clip on the sequence's ratio s = exp(mean of log ρ over the row), with each token's own gradient.

    log s_t = sg(log s) + new − sg(new), at most 10; sg stops the gradient. The paper's ranges are far smaller (3e-4,
    4e-4) and its aggregation is seq-mean-token-mean. Zheng et al. 2025, https://arxiv.org/abs/2507.18071.
    """
    lengths = x.mask.sum(-1, keepdim=True).clamp(min=1)
    sequence = x.gap.sum(-1, keepdim=True) / lengths
    ratio = sequence.clamp(max=10).exp()
    loss, clipped = x.two_sided(ratio, clip_ratio_low, clip_ratio_high)
    slope = x.push * (ratio * (sequence <= 10)) * ~clipped
    return x.parts(loss, slope, clipped, ratio=torch.where(x.inside, ratio, 1.0), ppo_kl=-x.gap)


@functools.partial(_policy_loss, aggregation="seq-mean-token-mean")
def sapo(x: Inside, *, tau_pos: float = 1.0, tau_neg: float = 1.05) -> Parts:
    """SAPO: a sigmoid gate in place of PPO's clip, −A·σ(τ(ρ − 1))·4/τ with τ = `tau_pos` for A > 0, else `tau_neg`.

    A is the advantage, ρ the ratio. Aggregated seq-mean-token-mean. Gao et al. 2025, https://arxiv.org/abs/2511.20347.
    """
    if tau_pos <= 0 or tau_neg <= 0:
        raise ValueError(f"tau_pos and tau_neg must be > 0; found {tau_pos} and {tau_neg}")
    positive = x.advantages.sign().clamp(min=0)
    tau = tau_pos * positive + tau_neg * (1 - positive)
    gate, push = torch.sigmoid(tau * (x.ratio - 1)), 4 * x.push
    return x.parts(push * gate / tau, push * gate * (1 - gate) * x.steep)


@_policy_loss
def gpg(x: Inside) -> Parts:
    """GPG: −A·log π, the plain policy gradient without ratio or clip. Chu et al. 2025, https://arxiv.org/abs/2504.02546.

    Times importance weights it is REINFORCE off-policy, the `reinforce` of verl's bypass mode.
    """
    return x.parts(x.push * x.new, x.push, ppo_kl=-x.gap)


@_policy_loss
def cispo(x: Inside, *, clip_ratio_low: float = 0.2, clip_ratio_high: float = 0.2) -> Parts:
    """CISPO: −A·sg(clip(ρ, 1 − low, 1 + high))·log π; the weight is clipped, and every token keeps its gradient.

    A is the advantage, ρ the ratio; sg stops the gradient. `clipped` marks tokens whose weight was cut. MiniMax 2025,
    https://arxiv.org/abs/2506.13585.
    """
    weight = x.ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    slope = x.push * weight
    return x.parts(slope * x.new, slope, weight != x.ratio)


@_policy_loss
def dppo_tv(
    x: Inside, *, clip_ratio_low: float = 0.2, clip_ratio_high: float = 0.2, clip_ratio_c: float = 3.0
) -> Parts:
    """DPPO, total variation: −A·sg(min(ρ, c))·log π, without tokens whose probability π has already moved too far.

    Left out, and marked in `clipped`: tokens of advantage A > 0 with π_new − π_old > `clip_ratio_high`, and the others with
    π_old − π_new > `clip_ratio_low`. c = `clip_ratio_c`; `clipped_lower` marks ρ > c among those kept. sg stops the
    gradient. https://arxiv.org/abs/2602.04879.
    """
    moved = x.new.exp() - x.old.exp()
    return _within(x, moved > clip_ratio_high, -moved > clip_ratio_low, clip_ratio_c)


@_policy_loss
def dppo_kl(
    x: Inside, *, clip_ratio_low: float = 0.2, clip_ratio_high: float = 0.2, clip_ratio_c: float = 3.0
) -> Parts:
    """DPPO, KL: as `dppo_tv`, but the KL in nats between old and new π (sampled token against all others) is limited."""
    p, q = x.old.exp(), x.new.exp()
    divergence = -p * x.gap + (1 - p) * ((1 - p + 1e-8) / (1 - q + 1e-8)).log()
    up, down = (q > p) & (divergence > clip_ratio_high), (q < p) & (divergence > clip_ratio_low)
    return _within(x, up, down, clip_ratio_c)


def _within(x: Inside, up: Tensor, down: Tensor, clip_ratio_c: float) -> Parts:
    """Make DPPO's loss without tokens that moved too far: those in `up` with an advantage above 0, those in `down` with
    one of 0 or less.
    """
    positive = x.advantages > 0
    out = (positive & up) | (~positive & down)
    slope = x.push * x.ratio.clamp(max=clip_ratio_c) * ~out
    return x.parts(slope * x.new, slope, out, lower=(x.ratio > clip_ratio_c) & ~out)


@_policy_loss
def dro(x: Inside, *, dro_beta: float = 0.1) -> Parts:
    """DRO's policy loss: a quadratic penalty in place of PPO's clip. Richemond et al. 2024, https://arxiv.org/abs/2405.19107.

    −(A·log π − ½β(log π − log π_old)²) with the advantage A and β = `dro_beta`.
    """
    if dro_beta <= 0:
        raise ValueError(f"dro_beta must be > 0; found {dro_beta}")
    loss = 0.5 * dro_beta * x.gap.square() + x.push * x.new
    return x.parts(loss, dro_beta * x.gap + x.push, ppo_kl=-x.gap)


@functools.partial(_policy_loss, aggregation="seq-mean-token-sum", per_row=True)
def geo_mean(x: Inside, *, clip_ratio_low: float = 0.2, clip_ratio_high: float = 0.2) -> Parts:
    """GMPO: −Ā·(geometric mean of the clipped ratios of a row), with the row's mean advantage Ā.

    log ρ is clipped to [−low, high] on the side to which the advantage pulls it. There is one number per row, on its first
    token; they are aggregated as the mean over rows that have a token (verl divides by empty rows, too). Zhao et al. 2025,
    https://arxiv.org/abs/2507.20673.
    """
    sign = x.advantages.sign()
    bounded = x.log_ratio.clamp(-clip_ratio_low, clip_ratio_high)
    free, bound = sign * x.log_ratio, sign * bounded
    lengths = x.mask.sum(-1, keepdim=True) + 1e-8
    ratio = ((sign * torch.minimum(free, bound)).sum(-1, keepdim=True) / lengths).exp()
    per_row = -(x.advantages.sum(-1, keepdim=True) / lengths) * ratio
    moves = sign.abs() * (free <= bound) * x.steep.sign()
    outside = x.log_ratio != bounded
    return x.parts(
        per_row,
        per_row / lengths * moves,
        outside & (x.advantages > 0),
        lower=outside & (x.advantages < 0),
        ratio=torch.where(x.inside, ratio, 1.0),
        ppo_kl=-x.gap,
    )


def _covariance(log_probs: Tensor, advantages: Tensor, mask: Tensor) -> Callable[[Inside], Tensor]:
    """Compute (A − mean A)·(log π − mean log π) of each token, with means over the whole mask; no gradient."""
    new, mean = masked_mean(log_probs.detach(), mask), masked_mean(advantages.detach(), mask)
    return lambda x: (x.advantages - mean) * (x.new - new)


def _highest(values: Tensor, number: int) -> Tensor:
    """Return the flat indices of the `number` highest values. The tensor is read part by part, and values that the best
    so far exceed are not sorted.
    """
    flat = values.flatten()
    best, places = flat[:0], torch.zeros(0, dtype=torch.long, device=flat.device)
    for start in range(0, flat.numel() if number else 0, ELEMENTS):
        part = flat[start : start + ELEMENTS]
        above = (
            (part > best[-1]).nonzero()[:, 0] if len(best) == number else torch.arange(len(part), device=places.device)
        )
        ranked, places = torch.cat([best, part[above]]), torch.cat([places, above + start])
        best, order = ranked.topk(min(number, len(ranked)))
        places = places[order]
    return places


@precise
def clip_cov(
    old_log_probs: Tensor,
    log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
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
    covariance = _covariance(log_probs, advantages, mask)

    def formula(x: Inside) -> Parts:
        loss, clipped = x.two_sided(x.ratio, clip_ratio_low, clip_ratio_high)
        found, slope = covariance(x), x.push * x.steep * ~clipped
        band = (found > clip_cov_lb) & (found < clip_cov_ub) & x.inside & ~clipped
        return x.parts(loss, slope, clipped, pg_clipfrac=band, ppo_clipfrac=clipped & x.inside, ppo_kl=-x.gap)

    def chosen(parts: Parts) -> None:
        candidates = parts["pg_clipfrac"].nonzero()
        number = min(max(int(clip_cov_ratio * float(mask.sum())), 1), len(candidates))
        drawn = candidates[torch.randperm(len(candidates))[:number].to(candidates.device)]
        parts["pg_clipfrac"].zero_()
        for name, value in (("loss", 0), ("slope", 0), ("clipped", True), ("pg_clipfrac", True)):
            parts[name][drawn.unbind(1)] = value

    return _whole(formula, old_log_probs, log_probs, advantages, mask, change=chosen)


@precise
def kl_cov(
    old_log_probs: Tensor,
    log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    kl_cov_ratio: float = 0.0002,
    ppo_kl_coef: float = 0.1,
) -> Surrogate:
    """KL-Cov: −Aρ, plus `ppo_kl_coef`·|log ρ| on the share of tokens with the highest covariance of A and log π.

    A is the advantage, ρ the ratio. `clipped` marks those tokens, a share `kl_cov_ratio` chosen per micro-batch as in
    verl; they are the metric `kl_cov_frac`, and `ppo_kl` is the mean of |new − old|, as in verl. Cui et al. 2025,
    https://arxiv.org/abs/2505.22617.
    """
    covariance = _covariance(log_probs, advantages, mask)

    def formula(x: Inside) -> Parts:
        # covariances become the marks of those that are high
        ranks = covariance(x).masked_fill_(~x.inside, float("-inf"))
        return x.parts(x.push * x.ratio, x.push * x.steep, kl_cov_frac=ranks, ppo_kl=x.gap.abs())

    def chosen(parts: Parts) -> None:
        tokens = float(mask.sum())
        places = _highest(parts["kl_cov_frac"], max(1, int(tokens * kl_cov_ratio)) if tokens else 0)
        high = torch.unravel_index(places, mask.shape)
        gap = log_probs.detach()[high] - old_log_probs.detach()[high]
        parts["loss"][high] += ppo_kl_coef * gap.clamp(-20, 20).abs()
        parts["slope"][high] += ppo_kl_coef * gap.sign() * (gap.abs() < 20)
        parts["clipped"] = torch.zeros_like(mask, dtype=torch.bool)
        parts["clipped"][high] = True
        parts |= {"kl_cov_frac": parts["clipped"], "pg_clipfrac": torch.zeros_like(parts["clipped"])}

    return _whole(formula, old_log_probs, log_probs, advantages, mask, change=chosen)


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


@precise
def value_loss(values: Tensor, returns: Tensor, old_values: Tensor, mask: Tensor, *, clip: float = 0.5) -> ValueLoss:
    """PPO's clipped value loss ½·max((v − R)², (clip(v, old ± clip) − R)²), with values v and returns R.

    All inputs [B, T]; values outside the mask, NaN included, touch neither loss nor gradient.
    Schulman et al. 2017's reference implementation; whether the clip helps is doubted: Andrychowicz et al. 2021,
    https://arxiv.org/abs/2006.05990, §3.3.
    """

    def formula(*rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        v, target, old = (kept(one, rows[-1]) for one in rows[:-1])
        near = torch.minimum(torch.maximum(v, old - clip), old + clip)
        plain, bounded = (v - target).square(), (near - target).square()
        clipped = bounded > plain
        return 0.5 * torch.maximum(plain, bounded), (v - target) * ~clipped, clipped

    loss, slope, clipped = by_rows(formula, values.detach(), returns.detach(), old_values.detach(), mask)
    return ValueLoss(sloped(loss, slope, values), clipped)


@precise
def bradley_terry(
    chosen: Tensor, rejected: Tensor, margin: Tensor | float = 0.0, center_rewards_coefficient: float = 0.0
) -> Tensor:
    """Compute the loss of preference pairs [N]: −log σ(r⁺ − r⁻ − margin) + c·(r⁺ + r⁻)², with the rewards [N] of the
    chosen and the rejected answers and c = `center_rewards_coefficient`. Its mean over pairs is TRL's loss of reward
    models.
    """
    loss = -torch.nn.functional.logsigmoid(chosen - rejected - margin)
    return loss + center_rewards_coefficient * (chosen + rejected).square() if center_rewards_coefficient else loss


AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
"""Modes of `aggregate`."""


@precise
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
    per_row, lengths = masked_sum(loss, mask, dim=-1), mask.sum(-1)
    tokens = float(lengths.sum()) if tokens is None else tokens
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


# --- KL to a reference ------------------------------------------------------------------------------

_KINDS = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}


@precise
def kl_penalty(log_probs: Tensor, ref_log_probs: Tensor, kind: str) -> Tensor:
    """Estimate KL(policy‖reference) per token from the log-probs of the sampled tokens: [B, T], like both inputs.

    `kind`, with Δ = log_probs − ref_log_probs: `k1`/`kl` is Δ, `abs` |Δ|, `k2`/`mse` Δ²/2, `k3`/`low_var_kl` e^−Δ + Δ − 1
    (never negative; verl's clamps: ±20 on Δ, 10 on the result). A `+` after the kind keeps its value but takes the
    gradient of k2, the true gradient of the KL (straight-through). Raises `ValueError` for any other kind.
    """
    base, plus = kind.removesuffix("+"), kind.endswith("+")
    if base not in _KINDS:
        raise ValueError(f"KL estimator {kind!r}; expected one of {', '.join(_KINDS)}, each with or without '+'")
    known = _KINDS[base]

    def formula(new: Tensor, ref: Tensor) -> tuple[Tensor, Tensor]:
        value, slope = _value(new - ref, known)
        return value, (new - ref if plus else slope)

    value, slope = by_rows(formula, log_probs.detach(), ref_log_probs.detach())
    alone = log_probs.shape == value.shape and not ref_log_probs.requires_grad
    return sloped(value, slope, log_probs if alone else log_probs - ref_log_probs)


def _value(delta: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Return the KL estimate of a kind, and its derivative."""
    if kind == "k1":
        return delta, torch.ones_like(delta)
    if kind == "abs":
        return delta.abs(), delta.sign()
    if kind == "k2":
        return 0.5 * delta.square(), delta
    negative = (-delta).clamp(-20, 20)
    # exp(d) − d − 1 loses all its digits near 0, where a policy starts, and can come out negative
    growth = negative.expm1()
    value = growth - negative
    return value.clamp(0, 10), kept(-growth, 10 - value)


def full_kl(logits: Tensor, ref_logits: Tensor) -> Tensor:
    """Exact KL(π‖ref) = Σ_v π_v·(log π_v − log ref_v) over the vocabulary: both logits [..., V] → [...] float32, nats, ≥ 0.

    The estimators k1, k2 and k3 (`kl_penalty`) see one sampled token only. A token of probability 0 under π adds 0.
    """
    log_p, log_q = (torch.log_softmax(one.float(), dim=-1) for one in (logits, ref_logits))
    gap = torch.where(log_p.isneginf(), 0.0, log_p - log_q)
    return (log_p.exp() * gap).sum(-1).clamp(min=0)


class FixedKL:
    """KL controller with a constant weight β = `coef` of the KL penalty."""

    def __init__(self, coef: float = 0.001) -> None:
        self.value = coef

    def update(self, current_kl: float, n_steps: int) -> None:
        """Do nothing: β is constant."""

    def state(self) -> dict[str, float]:
        """Return the state for a checkpoint: empty, because β is a setting."""
        return {}

    def load_state(self, state: dict[str, float]) -> None:
        """Do nothing: there is no state."""

    def __repr__(self) -> str:
        return f"FixedKL(coef={self.value})"


class AdaptiveKL:
    """KL controller: β ← β·(1 + clip(kl/target − 1, ±0.2)·n/horizon), so that β grows while the KL is above `target`."""

    def __init__(self, coef: float = 0.001, target: float = 0.1, horizon: int = 10_000) -> None:
        if horizon <= 0 or target <= 0:
            raise ValueError(f"target and horizon of an adaptive KL must be positive; found {target} and {horizon}")
        self.initial, self.target, self.horizon = coef, target, horizon
        self.value = coef

    def update(self, current_kl: float, n_steps: int) -> None:
        """Adapt β to a batch of `n_steps` sequences, whose mean KL is `current_kl` (nats per token)."""
        error = min(max(current_kl / self.target - 1, -0.2), 0.2)
        self.value *= 1 + error * n_steps / self.horizon

    def state(self) -> dict[str, float]:
        """Return the state for a checkpoint: the current β."""
        return {"value": self.value}

    def load_state(self, state: dict[str, float]) -> None:
        """Restore β from a dict that `state` returned."""
        self.value = state["value"]

    def __repr__(self) -> str:
        return f"AdaptiveKL(coef={self.initial}, target={self.target}, horizon={self.horizon})"
