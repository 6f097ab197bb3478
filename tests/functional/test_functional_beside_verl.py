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
SIZES = {"whole": (3, 3, 3, 3), "ragged": (4, 3, 2, 1, 1, 1)}


def batch(seed: int, kind: str = "whole") -> dict[str, Any]:
    """Twelve rows. `whole`: four groups of three, no row empty, no tool text. `ragged`: groups of four to one, empty rows
    and tool text between the model's tokens and behind them."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator)

    rows, width = 12, 7
    lengths = torch.randint(1 if kind == "whole" else 0, width + 1, (rows, 1), generator=generator)
    mask = (torch.arange(width) < lengths).long()
    if kind == "ragged":
        mask = mask * (random(rows, width) > 0.3).long()
        mask[0, 0] = mask[6, 0] = 1  # verl's opo needs a token in each group of several
        mask[7, 1] = 1
    last = (mask * torch.arange(width)).amax(-1, keepdim=True)
    rewards = torch.zeros(rows, width).scatter_(1, last, (random(rows, 1) * 4).round() / 4) * mask
    groups = torch.arange(len(SIZES[kind])).repeat_interleave(torch.tensor(SIZES[kind]))
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
        "weights": random(rows, width) * 2,
        "parts": (random(rows, 2) * 3).round(),
    }


class Config(dict):  # verl reads its configuration by attribute and by get
    __getattr__ = dict.__getitem__


def pairs(b: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Name → (ours, verl's), each a pair of advantages and returns."""
    rewards, mask, scores, groups = b["rewards"], b["mask"], b["scores"], b["groups"]
    plain = {"token_level_rewards": rewards, "response_mask": mask}
    grouped = {**plain, "index": b["index"]}
    config = Config(gamma=0.9, norm_adv_by_std_in_grpo=True)
    tokens = {**grouped, "old_log_probs": b["old"], "sum_pi_squared": b["squared"]}
    ours = (rewards, groups, mask, b["old"], b["squared"])
    weights = {"rollout_is_weights": b["weights"]}
    alone: dict[str, Any] = {"singleton": "verl"}
    found = {
        "grpo": (F.grpo(scores, groups, mask, **alone), core.compute_grpo_outcome_advantage(**grouped)),
        "grpo_vectorized": (
            F.grpo(scores, groups, mask, **alone),
            core.compute_grpo_vectorized_outcome_advantage(**grouped),
        ),
        "dr_grpo": (
            F.grpo(scores, groups, mask, norm_by_std=False, **alone),
            core.compute_grpo_outcome_advantage(**grouped, norm_adv_by_std_in_grpo=False),
        ),
        "rloo": (F.rloo(scores, groups, mask, **alone), core.compute_rloo_outcome_advantage(**grouped)),
        "rloo_vectorized": (F.rloo(scores, groups, mask), core.compute_rloo_vectorized_outcome_advantage(**grouped)),
        "opo": (F.opo(scores, groups, mask, **alone), core.compute_opo_outcome_advantage(**grouped)),
        "gpg": (
            F.gpg(scores, groups, mask, f_norm=2.0, **alone),
            core.compute_gpg_outcome_advantage(**grouped, f_norm=2.0),
        ),
        "gdpo": (F.gdpo(b["parts"], groups, mask, weights=[1.0, 0.5], **alone), gdpo_of_verl(b)),
        "r++": (
            F.reinforce_plus_plus(rewards, mask, gamma=0.9),
            core.compute_reinforce_plus_plus_outcome_advantage(**plain, config=config),
        ),
        "r++ baseline": (
            F.reinforce_plus_plus_baseline(scores, groups, mask, **alone),
            core.compute_reinforce_plus_plus_baseline_outcome_advantage(**grouped),
        ),
        "remax": (
            F.remax(rewards, b["baselines"], mask),
            core.compute_remax_outcome_advantage(**plain, reward_baselines=b["baselines"]),
        ),
        "gae": (
            F.gae(rewards, b["values"], mask, 0.99, 0.95),
            core.compute_gae_advantage_return(rewards, b["values"], mask, 0.99, 0.95),
        ),
        "otb": (F.optimal_token_baseline(*ours), core.compute_optimal_token_baseline_advantage(**tokens)),
        "otb weighted": (
            F.optimal_token_baseline(*ours, **weights),
            core.compute_optimal_token_baseline_advantage(**tokens, **weights),
        ),
        "tir otb": (
            F.tir_optimal_token_baseline(*ours),
            core.compute_multi_turn_optimal_token_baseline_advantage(**tokens),
        ),
        "tir otb weighted": (
            F.tir_optimal_token_baseline(*ours, **weights),
            core.compute_multi_turn_optimal_token_baseline_advantage(**tokens, **weights),
        ),
    }
    if int(groups.bincount().min()) > 1:  # verl's refuses groups of one
        found["passk"] = (
            F.grpo_passk(scores, groups, mask),
            core.compute_grpo_passk_outcome_advantage(**grouped, config=config),
        )
    return found


def gdpo_of_verl(b: dict[str, Any]) -> Any:
    """verl's steps, without its search for a token to place each part on: an empty row has none."""
    total = 0
    for number, weight in ((0, 1.0), (1, 0.5)):
        scores = torch.zeros_like(b["rewards"])
        scores[:, 0] = b["parts"][:, number]
        grouped = {"token_level_rewards": scores, "response_mask": b["mask"], "index": b["index"]}
        total = total + weight * core.compute_grpo_outcome_advantage(**grouped)[0]
    advantages = core.verl_F.masked_whiten(total, b["mask"]) * b["mask"]
    return advantages, advantages


@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize("name", list(pairs(batch(0))))
def test_estimators(name: str, kind: str) -> None:
    for seed in SEEDS:
        b = batch(seed, kind)
        for ours, theirs in zip(*pairs(b).get(name, ((), ())), strict=True):
            # where scores of a group are all equal verl divides rounding by eps, and outside the mask some are left standing
            torch.testing.assert_close(ours * b["mask"], theirs * b["mask"], atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize("name", list(pairs(batch(0))))
def test_estimators_in_bfloat16(name: str) -> None:
    """Of bfloat16 inputs ours has what verl has of the same numbers in float32, to bfloat16's digits."""
    for seed in SEEDS:
        b = batch(seed)
        low = {
            key: one.bfloat16() if torch.is_tensor(one) and one.is_floating_point() else one for key, one in b.items()
        }
        same = {
            key: one.float() if torch.is_tensor(one) and one.is_floating_point() else one for key, one in low.items()
        }
        for ours, theirs in zip(pairs(low)[name][0], pairs(same)[name][1], strict=True):
            assert ours.dtype == torch.bfloat16
            torch.testing.assert_close(ours.float() * b["mask"], theirs * b["mask"], atol=2e-2, rtol=2e-2)


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
