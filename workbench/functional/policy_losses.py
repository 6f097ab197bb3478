"""Policy losses per token, by name: PPO's surrogate and everybody's repairs of it.

All take old_log_probs, log_probs, advantages, mask [B, T] and settings of their own, and return a `Surrogate`. ρ is
exp(clamp(new − old, ±20)), sg(·) stops the gradient. What stands outside the mask, NaN among it, touches neither loss nor
gradient. On a batch that the policy has just written (ρ = 1) all but `gpg`-like ones have the same gradient: compare
them after some updates. `POLICY_LOSSES` has them under verl's names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from workbench.functional.losses import Surrogate, ppo_clip
from workbench.functional.masking import masked_mean


class _Inside:
    """Log-probs and advantages with zeros outside the mask, and their ratio."""

    def __init__(self, old: torch.Tensor, new: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor) -> None:
        self.mask = mask
        self.inside = mask.bool()
        self.old = torch.where(self.inside, old, 0.0)
        self.new = torch.where(self.inside, new, 0.0)
        self.advantages = torch.where(self.inside, advantages, 0.0)
        self.log_ratio = (self.new - self.old).clamp(-20, 20)
        self.ratio = self.log_ratio.exp()

    def surrogate(
        self,
        loss: torch.Tensor,
        clipped: torch.Tensor | None = None,
        *,
        lower: torch.Tensor | None = None,
        ratio: torch.Tensor | None = None,
        aggregation: str | None = None,
    ) -> Surrogate:
        nowhere = torch.zeros_like(self.inside)
        return Surrogate(
            loss=torch.where(self.inside, loss, 0.0),
            ratio=(self.ratio if ratio is None else ratio).detach(),
            clipped=nowhere if clipped is None else clipped.detach() & self.inside,
            clipped_lower=nowhere if lower is None else lower.detach() & self.inside,
            aggregation=aggregation,
        )


def _two_sided(x: _Inside, ratio: torch.Tensor, low: float, high: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(max(−Aρ, −A·clip(ρ)), where the clipped one is larger)."""
    plain, bounded = -x.advantages * ratio, -x.advantages * ratio.clamp(1 - low, 1 + high)
    return torch.maximum(plain, bounded), bounded > plain


def gspo(
    old_log_probs: torch.Tensor,
    log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Surrogate:
    """PPO's clip on the sequence's ratio s = exp(mean of log ρ over the row), with each token's own gradient.

    log s_t = sg(log s) + new − sg(new), at most 10. The paper's ranges are far smaller (3e-4, 4e-4) and its aggregation is
    seq-mean-token-mean. Zheng et al. 2025, https://arxiv.org/abs/2507.18071.
    """
    x = _Inside(old_log_probs, log_probs, advantages, mask)
    lengths = mask.sum(-1, keepdim=True).clamp(min=1)
    sequence = (x.new - x.old).sum(-1, keepdim=True) / lengths
    ratio = (sequence.detach() + x.new - x.new.detach()).clamp(max=10).exp()
    loss, clipped = _two_sided(x, ratio, clip_low, clip_high)
    return x.surrogate(loss, clipped, ratio=torch.where(x.inside, ratio, 1.0))


def sapo(
    old_log_probs: torch.Tensor,
    log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> Surrogate:
    """−A·σ(τ(ρ − 1))·4/τ, τ by the advantage's sign: a soft gate where PPO has a hard edge.

    Always aggregated seq-mean-token-mean. Gao et al. 2025, https://arxiv.org/abs/2511.20347.
    """
    if tau_pos <= 0 or tau_neg <= 0:
        raise ValueError(f"tau_pos and tau_neg are > 0; found {tau_pos} and {tau_neg}")
    x = _Inside(old_log_probs, log_probs, advantages, mask)
    tau = torch.where(x.advantages > 0, tau_pos, tau_neg)
    gate = torch.sigmoid(tau * (x.ratio - 1)) * 4 / tau
    return x.surrogate(-x.advantages * gate, aggregation="seq-mean-token-mean")


def gpg(
    old_log_probs: torch.Tensor, log_probs: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor
) -> Surrogate:
    """−A·log π: the plain policy gradient, without ratio or clip. Chu et al. 2025, https://arxiv.org/abs/2504.02546."""
    x = _Inside(old_log_probs, log_probs, advantages, mask)
    return x.surrogate(-x.advantages * x.new)


def cispo(
    old_log_probs: torch.Tensor,
    log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Surrogate:
    """−A·sg(clip(ρ, 1 − low, 1 + high))·log π: the weight is bounded, every token keeps its gradient.

    `clipped` marks tokens whose weight was cut. MiniMax 2025, https://arxiv.org/abs/2506.13585.
    """
    x = _Inside(old_log_probs, log_probs, advantages, mask)
    weight = x.ratio.clamp(1 - clip_low, 1 + clip_high)
    return x.surrogate(-weight.detach() * x.advantages * x.new, weight != x.ratio)


def dppo_tv(
    old_log_probs: torch.Tensor,
    log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_c: float = 3.0,
) -> Surrogate:
    """−A·sg(min(ρ, c))·log π on tokens whose probability has moved by at most high (A > 0) or low (A < 0) that way.

    The trust region is the total variation of the taken token, |π_new − π_old|, not the ratio: a rare token may change its
    ratio a lot. `clipped` marks those left out. https://arxiv.org/abs/2602.04879.
    """
    x = _Inside(old_log_probs, log_probs, advantages, mask)
    moved = x.new.exp() - x.old.exp()
    out = torch.where(x.advantages > 0, moved > clip_high, -moved > clip_low)
    return _within(x, out.detach(), clip_c)


def dppo_kl(
    old_log_probs: torch.Tensor,
    log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_c: float = 3.0,
) -> Surrogate:
    """As `dppo_tv`, the trust region being the KL of the taken token against all others (two outcomes), in nats."""
    x = _Inside(old_log_probs, log_probs, advantages, mask)
    p, q = (one.exp().clamp(1e-8, 1 - 1e-7) for one in (x.old, x.new))
    divergence = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
    up, down = (x.ratio > 1) & (divergence > clip_high), (x.ratio < 1) & (divergence > clip_low)
    return _within(x, torch.where(x.advantages > 0, up, down).detach(), clip_c)


def _within(x: _Inside, out: torch.Tensor, clip_c: float) -> Surrogate:
    weight = x.ratio.clamp(max=clip_c).detach()
    return x.surrogate(-x.advantages * weight * x.new * (~out), out)


def dro(
    old_log_probs: torch.Tensor,
    log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    dro_beta: float = 0.1,
) -> Surrogate:
    """−(A·log π − ½β(log π − log π_old)²): a quadratic in place of the clip. Richemond et al. 2024,
    https://arxiv.org/abs/2405.19107.
    """
    if dro_beta <= 0:
        raise ValueError(f"dro_beta is > 0; found {dro_beta}")
    x = _Inside(old_log_probs, log_probs, advantages, mask)
    return x.surrogate(-(x.new * x.advantages - 0.5 * dro_beta * (x.new - x.old).square()))


def geo_mean(
    old_log_probs: torch.Tensor,
    log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Surrogate:
    """−Ā·exp(mean of log ρ clipped to (−low, high) where the advantage pulls that way): GMPO's geometric mean of a row.

    One number a row, standing on its first token and aggregated as the mean over rows. Zhao et al. 2025,
    https://arxiv.org/abs/2507.20673.
    """
    x = _Inside(old_log_probs, log_probs, advantages, mask)
    sign = x.advantages.sign()
    bounded = x.log_ratio.clamp(-clip_low, clip_high)
    chosen = sign * torch.minimum(sign * x.log_ratio, sign * bounded)
    lengths = mask.sum(-1) + 1e-8
    ratio = (chosen.sum(-1) / lengths).exp()
    per_row = -(x.advantages.sum(-1) / lengths) * ratio
    first = (mask.cumsum(-1) == 1) & x.inside
    outside = x.log_ratio != bounded
    return x.surrogate(
        torch.where(first, per_row[:, None], 0.0),
        outside & (x.advantages > 0),
        lower=outside & (x.advantages < 0),
        ratio=torch.where(x.inside, ratio[:, None], 1.0),
        aggregation="seq-mean-token-sum",
    )


def _covariance(x: _Inside) -> torch.Tensor:
    """(A − mean A)·(log π − mean log π) per token, means over the mask; no gradient."""
    advantages, new = x.advantages.detach(), x.new.detach()
    return (advantages - masked_mean(advantages, x.mask)) * (new - masked_mean(new, x.mask))


def clip_cov(
    old_log_probs: torch.Tensor,
    log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_cov_ratio: float = 0.0002,
    clip_cov_lb: float = 1.0,
    clip_cov_ub: float = 5.0,
) -> Surrogate:
    """PPO's clip, and a random share (`clip_cov_ratio`, at least one token) of tokens whose covariance of advantage and
    log π lies between lb and ub is left out: those few tokens drive entropy down.

    Chosen with torch's global generator, which an update seeds by step. The choice is made within one mini-batch's part: here
    micro-batches do change it. Cui et al. 2025, https://arxiv.org/abs/2505.22617.
    """
    x = _Inside(old_log_probs, log_probs, advantages, mask)
    loss, clipped = _two_sided(x, x.ratio, clip_low, clip_high)
    covariance = _covariance(x)
    band = (covariance > clip_cov_lb) & (covariance < clip_cov_ub) & x.inside & ~clipped
    candidates = band.flatten().nonzero()[:, 0]
    number = min(max(int(clip_cov_ratio * float(mask.sum())), 1), len(candidates))
    dropped = torch.zeros_like(x.inside).flatten()
    dropped[candidates[torch.randperm(len(candidates))[:number].to(candidates.device)]] = True
    dropped = dropped.view_as(x.inside)
    return x.surrogate(torch.where(dropped, 0.0, loss), clipped | dropped)


def kl_cov(
    old_log_probs: torch.Tensor,
    log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    kl_cov_ratio: float = 0.0002,
    ppo_kl_coef: float = 0.1,
) -> Surrogate:
    """−Aρ, plus `ppo_kl_coef`·|log ρ| on the share of tokens with the highest covariance of advantage and log π.

    `clipped` marks those tokens. Selected within one micro-batch, as in verl. Cui et al. 2025,
    https://arxiv.org/abs/2505.22617.
    """
    x = _Inside(old_log_probs, log_probs, advantages, mask)
    covariance = torch.where(x.inside, _covariance(x), float("-inf")).flatten()
    number = max(1, int(float(mask.sum()) * kl_cov_ratio)) if bool(x.inside.any()) else 0
    chosen = torch.zeros_like(x.inside).flatten()
    chosen[covariance.topk(number).indices] = True
    chosen = chosen.view_as(x.inside)
    loss = -x.advantages * x.ratio
    return x.surrogate(torch.where(chosen, loss + ppo_kl_coef * x.log_ratio.abs(), loss), chosen)


POLICY_LOSSES: Mapping[str, Callable[..., Surrogate]] = {
    "vanilla": ppo_clip,
    "gspo": gspo,
    "sapo": sapo,
    "gpg": gpg,
    "cispo": cispo,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "dro": dro,
    "geo_mean": geo_mean,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
}
"""verl's `loss_mode` → function."""
