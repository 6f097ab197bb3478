"""KL(policy‖reference) from the log-probs of sampled tokens, and the controllers of its weight.

The estimators k1, k2 and k3: Schulman 2020, http://joschu.net/blog/kl-approx.html. With
Δ = log π(a) − log π_ref(a): k1 = Δ (unbiased, may be negative), k2 = Δ²/2, k3 = e^−Δ + Δ − 1 (unbiased,
never negative). The controllers: Ziegler et al. 2019, https://arxiv.org/abs/1909.08593, §2.2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.functional.blocks import by_rows, kept, precise, sloped

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
    """The estimate, and its derivative."""
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
        """Does nothing: β is constant."""

    def state(self) -> dict[str, float]:
        """State for a checkpoint: empty, because β is a setting."""
        return {}

    def load_state(self, state: dict[str, float]) -> None:
        """Does nothing: there is no state."""

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
        """State for a checkpoint: the current β."""
        return {"value": self.value}

    def load_state(self, state: dict[str, float]) -> None:
        """Restore β from a dict that `state` returned."""
        self.value = state["value"]

    def __repr__(self) -> str:
        return f"AdaptiveKL(coef={self.initial}, target={self.target}, horizon={self.horizon})"
