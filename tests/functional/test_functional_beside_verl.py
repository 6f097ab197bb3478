"""Beside verl itself, where it is installed (it was 0.9.1): random batches, every estimator, loss, KL and aggregation.

Where it is not, the golden numbers of `test_functional_golden`, which verl made, stand for it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from workbench import functional as F

core = pytest.importorskip(
    "verl.trainer.ppo.core_algos", reason="verl is not installed here: the golden numbers stand for it"
)

SEEDS = range(6)


def batch(seed: int) -> dict[str, Any]:
    """Twelve rows in four groups of three; contiguous masks, as verl's baselines of tokens need."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator)

    rows, width = 12, 7
    lengths = torch.randint(1, width + 1, (rows, 1), generator=generator)
    mask = (torch.arange(width) < lengths).long()
    rewards = torch.zeros(rows, width).scatter_(1, lengths - 1, (random(rows, 1) * 4).round() / 4)
    groups = torch.arange(rows) // 3
    old = -random(rows, width) * 3
    return {
        "mask": mask,
        "rewards": rewards,
        "scores": rewards.sum(-1),
        "groups": groups,
        "index": np.array([str(int(group)) for group in groups], dtype=object),
        "values": random(rows, width) * mask,
        "baselines": random(rows),
        "old": old,
        "new": (old + random(rows, width) - 0.5).clamp(max=-1e-3),
        "ref": (old + random(rows, width) - 0.5).clamp(max=-1e-3),
        "squared": old.exp() ** 2 + random(rows, width) * (1 - old.exp()) ** 2,
        "advantages": (random(rows, width) - 0.5) * 2,
    }


class Config(dict):  # verl reads its configuration by attribute and by get
    __getattr__ = dict.__getitem__


def pairs(b: dict[str, Any]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Name → (ours, verl's)."""
    rewards, mask, scores, groups = b["rewards"], b["mask"], b["scores"], b["groups"]
    plain = {"token_level_rewards": rewards, "response_mask": mask}
    grouped = {**plain, "index": b["index"]}
    config = Config(gamma=0.9, norm_adv_by_std_in_grpo=True)
    tokens = {**grouped, "old_log_probs": b["old"], "sum_pi_squared": b["squared"]}
    return {
        "grpo": (F.grpo(scores, groups, mask)[0], core.compute_grpo_outcome_advantage(**grouped)[0]),
        "dr_grpo": (
            F.grpo(scores, groups, mask, norm_by_std=False)[0],
            core.compute_grpo_outcome_advantage(**grouped, norm_adv_by_std_in_grpo=False)[0],
        ),
        "passk": (
            F.grpo_passk(scores, groups, mask)[0],
            core.compute_grpo_passk_outcome_advantage(**grouped, config=config)[0],
        ),
        "rloo": (F.rloo(scores, groups, mask)[0], core.compute_rloo_outcome_advantage(**grouped)[0]),
        "opo": (F.opo(scores, groups, mask)[0], core.compute_opo_outcome_advantage(**grouped)[0]),
        "gpg": (F.gpg(scores, groups, mask)[0], core.compute_gpg_outcome_advantage(**grouped)[0]),
        "r++": (
            F.reinforce_plus_plus(rewards, mask, gamma=0.9)[0],
            core.compute_reinforce_plus_plus_outcome_advantage(**plain, config=config)[0],
        ),
        "r++ baseline": (
            F.reinforce_plus_plus_baseline(scores, groups, mask)[0],
            core.compute_reinforce_plus_plus_baseline_outcome_advantage(**grouped)[0],
        ),
        "remax": (
            F.remax(rewards, b["baselines"], mask)[0],
            core.compute_remax_outcome_advantage(**plain, reward_baselines=b["baselines"])[0],
        ),
        "gae": (
            F.gae(rewards, b["values"], mask, 0.99, 0.95)[0],
            core.compute_gae_advantage_return(rewards, b["values"], mask, 0.99, 0.95)[0],
        ),
        "otb": (
            F.optimal_token_baseline(rewards, groups, mask, b["old"], b["squared"])[0],
            core.compute_optimal_token_baseline_advantage(**tokens)[0],
        ),
        "tir otb": (
            F.tir_optimal_token_baseline(rewards, groups, mask, b["old"], b["squared"])[0],
            core.compute_multi_turn_optimal_token_baseline_advantage(**tokens)[0],
        ),
    }


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", list(pairs(batch(0))))
def test_estimators(name: str, seed: int) -> None:
    b = batch(seed)
    ours, theirs = pairs(b)[name]
    # where scores of a group are all equal verl divides rounding by eps, and outside the mask some are left standing
    torch.testing.assert_close(ours, theirs * b["mask"], atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", sorted(set(F.POLICY_LOSSES) - {"clip_cov"}))
def test_policy_losses_and_their_gradients(name: str, seed: int) -> None:
    workers = pytest.importorskip("verl.workers.config")
    b = batch(seed)
    more = {"policy_loss": workers.PolicyLossConfig(loss_mode=name)} if hasattr(workers, "PolicyLossConfig") else {}
    if name == "dro":
        pytest.skip("verl's dro reads a setting that this version's configuration has no place for")
    config = workers.ActorConfig(strategy="fsdp", ppo_micro_batch_size_per_gpu=1, rollout_n=1, **more)
    theirs_new, ours_new = (b["new"].clone().requires_grad_() for _ in range(2))
    theirs, _ = core.get_policy_loss_fn(name)(
        old_log_prob=b["old"], log_prob=theirs_new, advantages=b["advantages"], response_mask=b["mask"],
        loss_agg_mode="token-mean", config=config,
    )  # fmt: skip
    theirs.backward()
    made = F.POLICY_LOSSES[name](b["old"], ours_new, b["advantages"], b["mask"])
    ours = F.aggregate(made.loss, b["mask"], made.aggregation or "token-mean")
    ours.backward()
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-4, abs=1e-6)
    torch.testing.assert_close(ours_new.grad, theirs_new.grad * b["mask"], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("kind", ["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"])
def test_kl(kind: str) -> None:
    b = batch(1)
    torch.testing.assert_close(F.kl_penalty(b["new"], b["ref"], kind), core.kl_penalty(b["new"], b["ref"], kind))


@pytest.mark.parametrize("mode", F.AGGREGATIONS)
def test_aggregations(mode: str) -> None:
    b = batch(2)
    ours = F.aggregate(b["advantages"], b["mask"], mode)
    assert ours.item() == pytest.approx(core.agg_loss(b["advantages"], b["mask"], mode).item(), rel=1e-5)
