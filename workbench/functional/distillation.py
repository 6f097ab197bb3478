"""Divergences between a student's and a teacher's next-token distributions."""

from __future__ import annotations

import math
from typing import Any

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


class LogitsDivergence:
    """The `divergence` of softmax(logits) [n, V] from a teacher's distributions, with an analytic gradient.

    Each call uses the memory of the one before, so that its gradient must be computed before the next call: fresh pages of a
    large vocabulary cost more than what is written to them, and leave holes in a process's memory. The teacher's log-probs are
    overwritten. Second derivatives are not supported.
    """

    def __init__(self, beta: float) -> None:
        self.beta = beta
        self._space: list[Tensor] = []

    def __call__(self, logits: Tensor, teacher: Tensor) -> Tensor:
        """Logits and the teacher's log-probs, each [n, V] float32 → [n], in nats."""
        if not self._space or len(self._space[0]) < len(logits):
            count = 1 if self.beta == 1 else 2 if self.beta == 0 else 3
            self._space = [torch.empty_like(logits) for _ in range(count)]
        values: Tensor = _OfLogits.apply(logits, teacher, self.beta, [one[: len(logits)] for one in self._space])
        return values


class _OfLogits(torch.autograd.Function):
    """Autograd function of `LogitsDivergence`, which computes the gradient with the values, in place.

    With q the student, p the teacher and t = p for the reverse KL, else their mixture, ∂KL(q‖t)/∂zᵢ = qᵢ·(log qᵢ − log tᵢ −
    KL(q‖t)), and that of the mixture's two terms is (1 − β) times this; ∂KL(p‖q)/∂zᵢ = qᵢ − pᵢ.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, log_p: Tensor, beta: float, space: list[Tensor]) -> Tensor:
        log_q = torch.log_softmax(logits, -1, out=space[0])
        if beta == 0:
            p = torch.exp(log_p, out=space[1])
            values = _weighted(p, log_p.sub_(log_q))
            ctx.slope = log_q.exp_().sub_(p)
            return values
        values, target = log_q.new_zeros(len(log_q)), log_p
        if beta < 1:
            target, p = torch.add(log_q, math.log1p(-beta), out=space[1]), torch.exp(log_p, out=space[2])
            torch.logaddexp(target, log_p.add_(math.log(beta)), out=target)
            values = beta * _weighted(p, log_p.sub_(target).sub_(math.log(beta)))
        gap = torch.sub(log_q, target, out=log_p)
        q, share = log_q.exp_(), 1.0 if beta == 1 else 1 - beta
        kl = _weighted(q, gap)
        ctx.slope = gap.sub_(kl[:, None]).mul_(q).mul_(share)
        return values + share * kl

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.slope.mul_(gradient[:, None]), None, None, None


def _weighted(probs: Tensor, gaps: Tensor) -> Tensor:
    """Σ p·gap, [n, V] → [n]; a gap of a token of probability 0 counts 0, and is overwritten where it is not finite."""
    total = torch.einsum("nv,nv->n", probs, gaps)
    if total.isfinite().all():
        return total
    return torch.einsum("nv,nv->n", probs, gaps.masked_fill_(probs == 0, 0.0))


LEAST_TAIL = 1e-7
"""Smallest probability of the tokens outside the likeliest, float32's rounding of a sum near 1."""


def with_tail(log_probs: Tensor) -> Tensor:
    """Append to the log-probs [..., K] of some tokens that of all others together: [..., K + 1], a whole distribution.

    The divergence of two such distributions is at most that of the whole vocabulary, and never negative.
    """
    rest = (1 - log_probs.exp().sum(-1, keepdim=True)).clamp(min=LEAST_TAIL)
    return torch.cat([log_probs, rest.log()], -1)
