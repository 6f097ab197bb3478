"""Cases beside TRL: configurations × kinds of batches, our answer through `trl_settings`, and TRL's, recorded or live."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch

from workbench import functional as F
from workbench.compat.trl import trl_settings
from workbench.dataproto.core import DataProto
from workbench.engines.protocol import LossCounts
from workbench.stages import Advantage, MaskTruncated, RolloutCorrection, TrlLoss
from workbench.stages.update import loss_mask

HERE = Path(__file__).parent
RECORDED = HERE / "trl_answers.json"
TYPES = ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo")
KINDS = ("plain", "holes", "empty", "far")
"""Ragged rows; with a tool's tokens between the model's; with rows without a token; with ratios up to e^6."""
TOKEN_IS = {"vllm_importance_sampling_mode": "token_mask"}
SETTINGS: dict[str, dict[str, Any]] = {
    **{one: {"loss_type": one} for one in TYPES},
    **{f"{one}, kl": {"loss_type": one, "beta": 0.04} for one in TYPES},
    **{f"{one}, sequence": {"loss_type": one, "importance_sampling_level": "sequence", "beta": 0.1} for one in TYPES[:7]},
    **{f"{one}, vllm": {"loss_type": one, "use_vllm": True} for one in TYPES[:7]},
    "vespo, vllm": {"loss_type": "vespo", "use_vllm": True, **TOKEN_IS},
    "token truncated": {"use_vllm": True, "vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 1.2},
    "sequence band": {"use_vllm": True, "vllm_importance_sampling_clip_min": 0.8, "vllm_importance_sampling_clip_max": 1.5},
    "plain kl": {"beta": 0.04, "use_bias_correction_kl": False},
    "delta": {"delta": 1.5},
    "delta within": {"delta": 1.1, "epsilon_high": 0.28},
    "cispo's cap": {"loss_type": "cispo", "epsilon_high": 5.0},
    "sharp gate": {"loss_type": "sapo", "sapo_temperature_pos": 2.0, "sapo_temperature_neg": 3.0},
    "other gammas": {"loss_type": "vespo", "vespo_k_pos": 1.0, "vespo_lambda_pos": 2.0, "vespo_k_neg": 0.5, "vespo_lambda_neg": 4.0},
    "off policy": {"off_policy_mask_threshold": 0.1, "beta": 0.04},
    "off policy, vllm": {"off_policy_mask_threshold": 0.1, "use_vllm": True},
    "top entropy": {"top_entropy_quantile": 0.2, "beta": 0.04},
    "top entropy, sequence": {"top_entropy_quantile": 0.5, "importance_sampling_level": "sequence", "loss_type": "grpo"},
    "entropy": {"entropy_coef": 0.01, "loss_type": "grpo"},
    "entropy of the top": {"entropy_coef": 0.01, "top_entropy_quantile": 0.3},
    "scaled by the batch": {"scale_rewards": "batch"},
    "not scaled": {"scale_rewards": "none"},
}  # fmt: skip
B, T = 8, 6


@cache
def batch(kind: str) -> dict[str, torch.Tensor]:
    """The columns of a batch of a kind, made of a seed."""
    generator = torch.Generator().manual_seed(KINDS.index(kind) + 1)

    def random(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator)

    lengths = torch.randint(1, T + 1, (B,), generator=generator)
    if kind == "empty":
        lengths[2], lengths[5] = 0, 0
    there = (torch.arange(T) < lengths[:, None]).long()
    mask = there * (random(B, T) > 0.3).long() if kind in ("holes", "far") else there.clone()
    old = -random(B, T) * 2 - 0.05
    wide = 12.0 if kind == "far" else 1.0
    return {
        "there": there, "mask": mask, "old": old, "new": old + (random(B, T) - 0.5) * wide, "ref": old + random(B, T) - 0.5,
        "sampled": old + (random(B, T) - 0.5) * 0.4, "entropy": random(B, T) * 2, "rewards": (random(B) * 4).round() / 4,
    }  # fmt: skip


def cases() -> list[tuple[str, str]]:
    """Every (settings, kind)."""
    return [(name, kind) for name in SETTINGS for kind in KINDS]


def ours(name: str, kind: str) -> dict[str, Any]:
    """Loss and gradients by the pieces that `recipes.like_trl` puts together of the configuration."""
    how = trl_settings({**SETTINGS[name], "max_steps": 1, "num_generations": 4, "max_completion_length": T})
    held = batch(kind)
    rows = DataProto.from_single_dict(
        {
            "response_mask": held["mask"], "attention_mask": held["there"], "old_log_probs": held["old"], "ref_log_prob": held["ref"],
            "rollout_log_probs": held["sampled"], "uid": [f"u{row // 4}" for row in range(B)], "reward": held["rewards"],
            "scored": torch.ones(B, dtype=torch.bool), "token_level_scores": torch.zeros(B, T),
            "finish_reason": ["stop"] * B,
        }
    )  # fmt: skip
    rows = rows.with_columns(
        {
            "token_level_scores": torch.nn.functional.one_hot(torch.zeros(B, dtype=torch.long), T)
            * held["rewards"][:, None]
        }
    )
    estimator: Any = F.grpo_batch if how.scale_rewards == "batch" else F.grpo
    scaled: dict[str, Any] = {"norm_by_std": False} if how.scale_rewards == "none" else {"eps": 1e-4}
    if how.correction is not None:
        rows = RolloutCorrection(**how.correction)(rows).batch
    rows = MaskTruncated()(rows).batch
    rows = Advantage(estimator, **scaled)(rows).batch
    new, entropy = (held[key].clone().requires_grad_() for key in ("new", "entropy"))
    mask, loss = loss_mask(rows), TrlLoss(**how.loss)
    counts = LossCounts(float(mask.sum()), float((mask.sum(-1) > 0).sum()), float(T), float(B))
    out = loss({"log_probs": new, "entropy": entropy}, rows, counts)
    out.loss.backward()
    slopes = [torch.zeros(B, T) if one.grad is None else one.grad for one in (new, entropy)]
    return {"loss": out.loss.item(), "log_probs": slopes[0].tolist(), "entropy": slopes[1].tolist()}


def place() -> str | None:
    """The folder that has TRL, "" where it is installed; None where there is none (`tests/benchmarks/trl_env.py` makes it)."""
    if importlib.util.find_spec("trl") is not None:
        return ""
    folders = (os.environ.get("WORKBENCH_TRL", ""), str(HERE.parents[1] / "build" / "trl"))
    return next((one for one in folders if one and Path(one, "trl").is_dir()), None)


@cache
def theirs() -> dict[str, Any]:
    """TRL's answers, made now."""
    asked = [
        {
            "settings": {**SETTINGS[name], "num_generations": 4, "max_completion_length": T, "bf16": False},
            "data": {key: values.tolist() for key, values in batch(kind).items()},
        }
        for name, kind in cases()
    ]
    done = subprocess.run(
        [sys.executable, str(HERE / "trl_driver.py"), place() or ""],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
    )
    assert not done.returncode, done.stderr[-3000:]
    return dict(json.loads(done.stdout[done.stdout.index('{"version"') :]))
