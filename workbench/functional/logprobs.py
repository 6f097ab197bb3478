"""Log-probs and entropy from logits, in float32 and nats."""

from __future__ import annotations

import torch


def log_probs_from_logits(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """log softmax(logits)[label]: [..., V] and [...] → [...] float32.

    Written as logit − logsumexp so that no second [..., V] tensor is kept.
    """
    logits = logits.float()
    picked = logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return picked - torch.logsumexp(logits, dim=-1)


def entropy_from_logits(logits: torch.Tensor) -> torch.Tensor:
    """H = logsumexp(z) − Σ softmax(z)·z: [..., V] → [...] float32.

    A logit of −inf (a token ruled out) counts 0, its limit.
    """
    logits = logits.float()
    probabilities = torch.softmax(logits, dim=-1)
    expected = torch.where(probabilities > 0, probabilities * logits, torch.zeros_like(logits)).sum(-1)
    return torch.logsumexp(logits, dim=-1) - expected
