"""Log-probs and entropy from logits, in float32 and nats."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def log_probs_from_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """Log-probs of given tokens, log softmax(logits)[label]: logits [..., V] and labels [...] → [...] float32, in nats.

    Written as logit − logsumexp so that no second [..., V] tensor is kept.
    """
    logits = logits.float()
    picked = logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return picked - torch.logsumexp(logits, dim=-1)


def entropy_from_logits(logits: Tensor) -> Tensor:
    """Entropy H = −Σ p·log p of p = softmax(logits): [..., V] → [...] float32, in nats, ≥ 0 up to rounding.

    A logit of −inf (a token of probability 0) adds 0 and gets no gradient. Only the logits are kept for the backward pass,
    ∂H/∂zᵢ = −pᵢ·(log pᵢ + H); second derivatives are not supported.
    """
    return _Entropy.apply(logits)


class _Entropy(torch.autograd.Function):
    """Autograd of the plain formula keeps three [..., V] tensors, and is NaN behind a logit of −inf."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        log_p = _log_p(logits)
        entropy = -(log_p.exp() * log_p).sum(-1)
        ctx.save_for_backward(logits, entropy)
        return entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        logits, entropy = ctx.saved_tensors
        log_p = _log_p(logits)
        slope = log_p.exp().mul_(log_p.add_(entropy.unsqueeze(-1))).mul_(-gradient.unsqueeze(-1))
        return slope.to(logits.dtype)


def _log_p(logits: Tensor) -> Tensor:
    """log softmax in float32, with the smallest number for −inf, so that 0·log 0 is 0."""
    log_p = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    return log_p.clamp_(min=torch.finfo(torch.float32).min)
