"""polgrad's ten algorithms by functions here, on seeded batches of its own kind; `python polgrad_cases.py` records polgrad's answers."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from workbench import functional as F
from workbench.functional.correction import importance_weights
from workbench.functional.losses import POLICY_LOSSES

RECORDED = Path(__file__).with_name("polgrad_answers.json")
NEVER = 1e9
"""No dual clip: polgrad has one only where `ratio_cap` is set."""
LENGTH = 8
ALGORITHMS: dict[str, dict[str, Any]] = {
    "ppo": {"clip_ratio_c": NEVER, "mode": "token-mean"},
    "grpo": {"clip_ratio_c": NEVER, "mode": "seq-mean-token-mean", "kl": 0.04},
    "dr_grpo": {"clip_ratio_c": NEVER, "mode": "seq-mean-token-sum-norm"},
    "dapo": {"clip_ratio_c": NEVER, "clip_ratio_high": 0.28, "mode": "token-mean"},
    "gspo": {"loss": "gspo", "clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4, "mode": "seq-mean-token-mean"},
    "gspo_token": {"loss": "gspo", "clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4, "mode": "seq-mean-token-mean"},
    "cispo": {"loss": "cispo", "clip_ratio_low": 1.0, "mode": "token-mean"},
    "rloo": {"loss": "gpg", "mode": "seq-mean-token-sum"},
    "reinforce_pp": {"clip_ratio_c": NEVER, "mode": "seq-mean-token-mean"},
    "grpo_tis": {"clip_ratio_c": NEVER, "mode": "seq-mean-token-mean", "kl": 0.04, "cap": 10.0},
}
ADVANTAGES: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]] = {
    "grpo": lambda scores, groups, mask: F.grpo(scores, groups, mask, eps=1e-4),
    "dr_grpo": lambda scores, groups, mask: F.grpo(scores, groups, mask, norm_by_std=False),
    "rloo": F.rloo,
}


def batch(seed: int, rows: int = 4, width: int = LENGTH) -> dict[str, torch.Tensor]:
    """A ragged batch of float64, right-padded; log-probs lie within 2 of each other, ratios within e^±2."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    lengths = torch.randint(1, width + 1, (rows,), generator=generator)
    new = random(rows, width) * 7.9 - 8
    old = new + random(rows, width) * 4 - 2
    return {
        "logprobs": new, "old_logprobs": old, "ref_logprobs": new + random(rows, width) * 4 - 2,
        "rollout_logprobs": old + random(rows, width) * 4 - 2, "advantages": random(rows) * 6 - 3,
        "response_mask": torch.arange(width) < lengths[:, None],
    }  # fmt: skip


def loss(name: str, kl: bool = True, **b: Any) -> torch.Tensor:
    """Our loss of one algorithm, from the columns of a batch."""
    how = dict(ALGORITHMS[name])
    coefficient, cap, mode = how.pop("kl", 0.0) * kl, how.pop("cap", None), how.pop("mode")
    mask = b["response_mask"].to(b["logprobs"].dtype)
    gain = b["advantages"][:, None] * mask
    held = POLICY_LOSSES[how.pop("loss", "vanilla")](b["old_logprobs"], b["logprobs"], gain, mask, **how)
    values = held.loss
    if cap is not None and "rollout_logprobs" in b:
        values = held.weighted(importance_weights(b["old_logprobs"], b["rollout_logprobs"], mask, upper=cap), mask)
    total = F.aggregate(values, mask, mode, scale=float(LENGTH) if mode.endswith("norm") else None)
    if coefficient:
        total = total + coefficient * F.aggregate(F.kl_penalty(b["logprobs"], b["ref_logprobs"], "k3"), mask, mode)
    return total


def answered(function: Callable[..., torch.Tensor], seed: int) -> dict[str, Any]:
    """A loss and its gradient by the log-probs."""
    columns = batch(seed)
    new = columns["logprobs"].requires_grad_()
    value = function(**{**columns, "logprobs": new})
    value.backward()
    assert new.grad is not None
    return {"loss": value.item(), "gradient": new.grad.tolist()}


def theirs(name: str) -> Callable[..., torch.Tensor]:
    """polgrad's loss of one algorithm."""
    import polgrad

    config = polgrad.ALGORITHMS[name].loss
    if config.aggregation is polgrad.Aggregation.TOKEN_SUM_NORM:
        config = dataclasses.replace(config, norm_len=LENGTH)
    return lambda **columns: polgrad.policy_loss(config, **columns).loss


def rewards() -> tuple[torch.Tensor, torch.Tensor]:
    """Rewards of three groups of four, one of equal ones."""
    return torch.tensor([0, 1, 0, 0.5, 1, 1, 1, 1, 0.25, 0, 0, 3], dtype=torch.float64), torch.arange(12) // 4


if __name__ == "__main__":
    import polgrad

    scores, groups = rewards()
    norm = {"grpo": polgrad.GroupNormConfig(), "dr_grpo": polgrad.GroupNormConfig(scale="none")}
    gains = {key: polgrad.grpo_advantages(scores, groups, config).tolist() for key, config in norm.items()}
    gains["rloo"] = polgrad.rloo_advantages(scores, groups).tolist()
    losses = {key: [answered(theirs(key), seed) for seed in (1, 2)] for key in polgrad.ALGORITHMS}
    RECORDED.write_text(json.dumps({"version": polgrad.__version__, "losses": losses, "advantages": gains}) + "\n")
