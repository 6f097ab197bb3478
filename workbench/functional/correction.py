"""Rollout correction: the sampler's and the trainer's probabilities differ; weights, rejections and diagnostics for it.

r = exp(clamp(old − rollout, ±20)) per token: trainer over sampler. verl's names and defaults
(`algorithm.rollout_correction`). All tensors [B, T]; values outside the mask are ignored.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.functional.masking import masked_mean, masked_sum

REJECTIONS = (
    "token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3", "seq_mean_k1", "seq_mean_k2",
    "seq_mean_k3", "seq_max_k2", "seq_max_k3",
)  # fmt: skip
"""Kinds of `rejected`: a token's or a row's divergence, by k1 (−log r), k2 (½·log² r) or k3 (r − 1 − log r)."""


def log_ratio(old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> Tensor:
    """Log ratio of trainer to sampler per token, old − rollout: [B, T], clamped to ±20, 0 outside the mask."""
    return torch.where(mask.bool(), old_log_probs - rollout_log_probs, 0.0).clamp(-20, 20)


def importance_weights(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    *,
    level: str = "token",
    upper: float = 2.0,
    lower: float | None = None,
    batch_normalize: bool = False,
) -> Tensor:
    """Importance weights [B, T]: trainer's over sampler's probability r of each token, or of its row (`level="sequence"`).

    A row's r is the product over its tokens. Without `lower` weights are truncated at `upper` (TIS); with it, weights
    outside [lower, upper] are 0 (masked IS, IcePop). `batch_normalize` divides them by their mean over the mask.
    No gradient flows through them. Yao et al. 2025 (TIS); verl's `rollout_is`.
    """
    if level not in ("token", "sequence"):
        raise ValueError(f"level of importance weights; expected 'token' or 'sequence'; found {level!r}")
    logs = log_ratio(old_log_probs, rollout_log_probs, mask).detach()
    if level == "sequence":
        logs = logs.sum(-1, keepdim=True).clamp(-20, 20).expand_as(logs)
    raw = logs.exp()
    if lower is None:
        weights = raw.clamp(max=upper)
    else:
        weights = torch.where((raw >= lower) & (raw <= upper), raw, 0.0)
    weights = weights * mask
    return weights / masked_mean(weights, mask).clamp(min=1e-8) if batch_normalize else weights


def rejected(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    kind: str,
    *,
    upper: float,
    lower: float | None = None,
) -> Tensor:
    """Mark tokens (kinds `token_*`) or rows (`seq_*`) on which trainer and sampler differ too much: [B, T] bool.

    `kind` is one of `REJECTIONS`. With r the trainer's over the sampler's probability, k1 kinds compare r (of a row: its
    product or geometric mean) with [lower, upper], `lower` None meaning 1/upper; k2 and k3 kinds compare ½·log² r and
    r − 1 − log r (of a row: sum, mean or maximum) with `upper`. Raises `ValueError` for another kind.
    """
    if kind not in REJECTIONS:
        raise ValueError(f"kind of rejection {kind!r}; expected one of {', '.join(REJECTIONS)}")
    logs = log_ratio(old_log_probs, rollout_log_probs, mask).detach()
    inside = mask.bool()
    over, _, estimator = kind.rpartition("_")
    values = {"k1": logs, "k2": 0.5 * logs.square(), "k3": logs.exp() - 1 - logs}[estimator]
    if over == "seq_sum":
        values = masked_sum(values, mask, dim=-1)[:, None]
    elif over == "seq_mean":
        values = masked_mean(values, mask, dim=-1)[:, None]
    elif over == "seq_max":
        values = torch.where(inside, values, float("-inf")).amax(-1, keepdim=True)
    if estimator == "k1":
        ratio = values.clamp(-20, 20).exp()
        out = (ratio > upper) | (ratio < (1 / upper if lower is None else lower))
    else:
        out = values > upper
    return out.expand_as(inside) & inside


def effective_sample_size(weights: Tensor, mask: Tensor) -> float:
    """Effective sample size of weights w [B, T] over the mask, as a share of its tokens: 1 / mean((w / mean w)²) ≤ 1."""
    mean = masked_mean(weights, mask).clamp(min=1e-8)
    return float(1 / masked_mean((weights / mean).square(), mask).clamp(min=1e-8))


def off_policy(old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> dict[str, float]:
    """Metrics of the gap between the trainer's (old) and the sampler's (rollout) log-probs [B, T]: verl's names → values.

    `kl` = mean(rollout − old) estimates KL(sampler‖trainer) in nats, `k3_kl` does so without negative values. Perplexities
    are means over rows of exp(−mean log-prob of the row); `log_ppl_diff` is trainer minus sampler. {} for an empty mask.
    """
    rows = mask.sum(-1) > 0
    logs = log_ratio(old_log_probs, rollout_log_probs, mask)
    trainer, sampler = (-masked_mean(x, mask, dim=-1)[rows] for x in (old_log_probs, rollout_log_probs))
    gap = trainer - sampler
    if not rows.any():
        return {}
    per_row = logs.sum(-1)[rows].clamp(-20, 20)
    return {
        "training_ppl": float(trainer.exp().mean()),
        "training_log_ppl": float(trainer.mean()),
        "rollout_ppl": float(sampler.exp().mean()),
        "rollout_log_ppl": float(sampler.mean()),
        "kl": float(masked_mean(-logs, mask)),
        "k3_kl": float(masked_mean(logs.exp() - 1 - logs, mask)),
        "log_ppl_diff": float(gap.mean()),
        "log_ppl_abs_diff": float(gap.abs().mean()),
        "log_ppl_diff_max": float(gap.max()),
        "log_ppl_diff_min": float(gap.min()),
        "ppl_ratio": float(gap.exp().mean()),
        "chi2_token": float(masked_mean((2 * logs).clamp(-20, 20).exp(), mask) - 1),
        "chi2_seq": float((2 * per_row).clamp(-20, 20).exp().mean() - 1),
    }
