"""The policy losses of TRL 1.16's `GRPOTrainer` and the measures that its settings add to them, per token.

Read from `trl/trainer/grpo_trainer.py`, `_compute_loss` and `_generate_and_score_completions`, and held beside them by
`tests/beside_trl`. ρ = exp(clamp(new − old, ±20)), where TRL does not clamp. All tensors [B, T]; values outside the mask,
NaN included, touch neither loss nor gradient; a log-prob inside it that is not finite makes the token's loss NaN.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from workbench.functional.advantages import Groups, Pair
from workbench.functional.losses import Surrogate
from workbench.functional.masking import kept, precise

LOSS_TYPES: Mapping[str, str] = {
    **dict.fromkeys(("grpo", "sapo"), "rows of token means"),
    **dict.fromkeys(("bnpo", "dapo", "cispo", "vespo"), "tokens"),
    "dr_grpo": "rows times longest",
    "luspo": "rows",
}
"""TRL's `loss_type` → what the sum of its token losses is divided by (`divided`)."""
LEVELS = ("token", "sequence")
"""TRL's `importance_sampling_level`."""


def divided(values: Tensor, mask: Tensor, by: str, *, tokens: float, rows: float, longest: float) -> Tensor:
    """Reduce token losses [B, T] to one number as TRL does: a divisor of `LOSS_TYPES`.

    `tokens` and `rows` are those of the whole mini-batch, rows without a token included; `longest` is
    `max_completion_length`.
    """
    sums = (kept(values, mask) * mask).sum(-1)
    if by == "rows of token means":
        sums = sums / mask.sum(-1).clamp(min=1)
    return sums.sum() / max({"tokens": tokens, "rows times longest": rows * longest}.get(by, rows), 1.0)


def log_ratios(old_log_probs: Tensor, log_probs: Tensor, mask: Tensor, level: str = "token") -> Tensor:
    """Compute log ρ, with gradient: of each token [B, T], or with `level` "sequence" the mean over a row's tokens [B, 1]."""
    gap = kept(log_probs, mask) - kept(old_log_probs, mask)
    gap = gap + (gap - gap).detach()  # NaN where it is infinite: no clip may hide a token of probability 0
    if level == "sequence":
        gap = (gap * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    return gap.clamp(-20, 20)


@precise
def trl_loss(
    old_log_probs: Tensor,
    log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    loss_type: str = "dapo",
    importance_sampling_level: str = "token",
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    delta: float | None = None,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
    vespo_pos: tuple[float, float] = (2.0, 3.0),
    vespo_neg: tuple[float, float] = (3.0, 2.0),
    weights: Tensor | None = None,
) -> Surrogate:
    """Compute TRL's policy loss of each token, with A the advantage and ρ the ratio of the token or its sequence:

    - `grpo`, `bnpo`, `dapo`, `dr_grpo`, `luspo`: −min(min(ρ, δ)·A, clip(ρ, 1 − low, 1 + high)·A), δ = `delta` (None: no
      bound); two-sided clip: INTELLECT-2, https://arxiv.org/abs/2505.07291. LUSPO: https://arxiv.org/abs/2602.05261.
    - `cispo`: −sg(min(ρ, high))·A·log π: `clip_ratio_high` is the cap itself. https://arxiv.org/abs/2506.13585.
    - `sapo`: −A·σ(τ(ρ − 1))·4/τ, τ = `tau_pos` for A > 0, else `tau_neg`. https://arxiv.org/abs/2511.20347.
    - `vespo`: −sg(φ(w))·A·log π, φ(w) = e^λ·w^k·e^(−λw), w the product of a row's ratios and of `weights` (those against
      the sampler), (k, λ) = `vespo_pos` for A ≥ 0, else `vespo_neg`. https://arxiv.org/abs/2602.10693.

    `weights` [B, T] multiply the loss of all others. Raises `ValueError` for another loss or level.
    """
    if loss_type not in LOSS_TYPES or importance_sampling_level not in LEVELS:
        raise ValueError(f"no loss_type {loss_type!r} with importance_sampling_level {importance_sampling_level!r}")
    logs = log_ratios(old_log_probs, log_probs, mask, importance_sampling_level)
    ratio, new, gain = logs.exp(), kept(log_probs, mask), kept(advantages, mask)
    clipped = torch.zeros_like(mask, dtype=torch.bool)
    if loss_type == "vespo":
        tokens = log_ratios(old_log_probs, log_probs, mask)
        factor = _gamma_weights(tokens, gain, mask, weights, (vespo_pos, vespo_neg))
        loss, weights = -factor * gain * new, None
    elif loss_type == "cispo":
        loss = -ratio.detach().clamp(max=clip_ratio_high) * gain * new
        clipped = (ratio > clip_ratio_high) & mask.bool()
    elif loss_type == "sapo":
        tau = torch.where(gain > 0, tau_pos, tau_neg)
        loss = -torch.sigmoid(tau * (ratio - 1)) * 4 / tau * gain
    else:
        free = (ratio if delta is None else ratio.clamp(max=delta)) * gain
        bounded = ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high) * gain
        loss = -torch.minimum(free, bounded)
        clipped = (-bounded > -ratio * gain) & mask.bool()
    lower = clipped & False
    if delta is not None and loss_type not in ("cispo", "sapo", "vespo"):
        lower = (ratio > delta) & (gain < 0) & mask.bool()
    loss = kept(loss if weights is None else loss * weights, mask)
    metrics = {"pg_clipfrac": clipped, "pg_clipfrac_lower": lower, "ppo_kl": -logs.detach().expand_as(mask)}
    return Surrogate(loss, ratio.detach().expand_as(mask), clipped, lower, metrics=metrics)


@torch.no_grad()
def _gamma_weights(logs: Tensor, gain: Tensor, mask: Tensor, weights: Tensor | None, by_sign: Sequence[Any]) -> Tensor:
    """Compute VESPO's φ(w) for the sign of each token's advantage: [B, T]. log w is clamped to [log 1e-8, 20]."""
    least = -18.420680743952367
    sums = (logs * mask).sum(-1, keepdim=True)
    if weights is not None:  # outside the mask TRL's weights are 1
        sums = sums + kept(weights.log().clamp(least, 20), mask).sum(-1, keepdim=True)
    log_w = sums.clamp(least, 20)
    power, decay = (torch.where(gain >= 0, up, down) for up, down in zip(*by_sign, strict=True))
    decay = decay.clamp(min=1e-4)
    return (decay + power * log_w - decay * log_w.exp()).exp().nan_to_num(0.0, 0.0, 0.0)


def reference_kl(log_probs: Tensor, ref_log_probs: Tensor, log_ratio: Tensor | None, mask: Tensor) -> Tensor:
    """Compute k3, e^−Δ + Δ − 1 with Δ = new − ref, times ρ where `log_ratio` [B, T] or [B, 1] is given: [B, T].

    E_old[ρ·k3] has the gradient of KL(π‖reference), also on policy, where ρ = 1 changes no value: DeepSeek-V3.2,
    https://arxiv.org/abs/2512.02556, eq. 7. With ρ of a whole sequence that holds only in part.
    """
    gap = kept(ref_log_probs, mask) - kept(log_probs, mask)
    values = gap.expm1() - gap
    return kept(values if log_ratio is None else values * log_ratio.exp(), mask)


def on_policy_rows(
    sampled_log_probs: Tensor, log_probs: Tensor, advantages: Tensor, mask: Tensor, threshold: float
) -> Tensor:
    """Return 1 for tokens to keep and 0 for those of rows that are too far off policy and have a negative advantage: [B, T].

    A row is too far where the mean of sampled − new log-probs over its tokens is above `threshold` (nats). A row without
    tokens, or with an advantage ≥ 0, is kept. DeepSeek-V3.2, https://arxiv.org/abs/2512.02556, eq. 9.
    """
    gap = kept(sampled_log_probs.detach() - log_probs.detach(), mask).nan_to_num(0.0)
    far = (gap * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1) > threshold
    return (~(far & (kept(advantages, mask) < 0))).to(log_probs.dtype)


def top_entropy(entropies: Tensor, mask: Tensor, quantile: float) -> Tensor:
    """Return 1 for the tokens whose entropy [B, T] is at or above the (1 − `quantile`)-quantile of those in the mask: [B, T].

    Of an empty mask none; where all entropies are equal all. Beyond the 80/20 rule, https://arxiv.org/abs/2506.01939, §5.
    """
    inside = mask.bool()
    if not inside.any():
        return torch.zeros_like(mask)
    values = entropies.detach().float()
    return ((values >= torch.quantile(values[inside], 1 - quantile)) & inside).to(mask.dtype)


class AdaptiveEntropy:
    """Weight c of the entropy bonus that adapts to a `target` entropy H* (nats per token), starting from `coef`.

    After each optimizer step with the entropy H: c ← min(c + delta, most) where H ≤ H*, else max(c − delta, least). The
    bonus is only applied while the last H was ≤ H*, so that there is none in the first step. He et al. 2025 (Skywork-OR1),
    https://arxiv.org/abs/2505.22312, as TRL's `use_adaptive_entropy` computes it.
    """

    def __init__(
        self, coef: float, target: float, delta: float = 0.005, bounds: tuple[float, float] = (0.0, 1.0)
    ) -> None:
        self.value, self.target, self.delta, self.bounds = coef, target, delta, bounds
        self.last = float("inf")

    @property
    def weight(self) -> float:
        """What the entropy of the next step is multiplied by: c, or 0 while the last entropy is above the target."""
        return self.value if self.last <= self.target else 0.0

    def update(self, entropy: float) -> None:
        """Adapt c to the mean entropy per token of an optimizer step."""
        least, most = self.bounds
        up = entropy <= self.target
        self.value = min(self.value + self.delta, most) if up else max(self.value - self.delta, least)
        self.last = entropy

    def state(self) -> dict[str, float]:
        """Return the state for a checkpoint: c, and, after a first step, the last entropy."""
        last = {"last_entropy": self.last} if self.last < float("inf") else {}
        return {"entropy_coeff": self.value, **last}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Restore c and the last entropy from a dict that `state` returned; one without c changes nothing."""
        if "entropy_coeff" in state:
            self.value, self.last = state["entropy_coeff"], state.get("last_entropy", float("inf"))


def grpo_batch(
    scores: Tensor, groups: Tensor, mask: Tensor, *, scored: Tensor | None = None, eps: float = 1e-4
) -> Pair:
    """GRPO's advantage with the deviation of the whole batch: (s − μ_group) / (σ_batch + eps).

    scores [B], groups [B] int64, mask [B, T] → (advantages, returns) [B, T]. σ divides by n − 1 over the scored rows; of
    equal scores, or a row alone in its group, the advantage is 0. TRL's `scale_rewards="batch"`; Liu et al. 2025 (Lite
    PPO), https://arxiv.org/abs/2508.08221.
    """
    stats = Groups(scores, groups, scored)
    every = stats.scores[stats.scored]
    deviation = every.std() if len(every) > 1 else every.new_zeros(())
    values = (stats.centred / (deviation + eps)).float()[:, None] * mask
    return values, values
