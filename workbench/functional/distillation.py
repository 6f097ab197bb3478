"""Divergences between a student's and a teacher's next-token distributions."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def divergence(student: Tensor, teacher: Tensor, beta: float = 1.0) -> Tensor:
    """Generalised Jensen–Shannon divergence of distributions given as log-probs [..., V] → [...] float32, in nats.

    `beta=1` is the reverse KL(student‖teacher), `beta=0` the forward KL(teacher‖student), and between them β·KL(teacher‖m) +
    (1 − β)·KL(student‖m) with m = β·teacher + (1 − β)·student. A token of probability 0 adds 0 where the limit is 0. Raises
    `ValueError` for another β. Agarwal et al. 2023, https://arxiv.org/abs/2306.13649, eq. 1; the β is TRL's.
    """
    if not 0 <= beta <= 1:
        raise ValueError(f"beta must be in [0, 1]; found {beta}")
    log_q, log_p = student.float(), teacher.float()
    if beta == 1:
        return _kl(log_q, log_p)
    if beta == 0:
        return _kl(log_p, log_q)
    parts = (log_p + math.log(beta), log_q + math.log1p(-beta))
    mixture = torch.logaddexp(*(one.clamp(min=-1e4) for one in parts))  # of two −inf the gradient is NaN
    return beta * _kl(log_p, mixture) + (1 - beta) * _kl(log_q, mixture)


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p‖q), [..., V] → [...]; a token of probability 0 under p adds 0."""
    never = log_p.isneginf()
    if never.any():
        log_q, log_p = log_q.masked_fill(never, 0.0), log_p.masked_fill(never, 0.0)
        return (log_p.exp().masked_fill(never, 0.0) * (log_p - log_q)).sum(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


LEAST_TAIL = 1e-7
"""Smallest probability of the tokens outside the likeliest, float32's rounding of a sum near 1."""


def with_tail(log_probs: Tensor) -> Tensor:
    """Append to the log-probs [..., K] of some tokens that of all others together: [..., K + 1], a whole distribution.

    The divergence of two such distributions is at most that of the whole vocabulary, and never negative.
    """
    rest = (1 - log_probs.exp().sum(-1, keepdim=True)).clamp(min=LEAST_TAIL)
    return torch.cat([log_probs, rest.log()], -1)
