"""The shelf of estimators and losses: what must hold for all of them, and beside verl where it is installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.patience import examples

from workbench import functional as F

Batch = dict[str, torch.Tensor]
ESTIMATORS: dict[str, Callable[[Batch], Any]] = {
    "grpo": lambda b: F.grpo(b["scores"], b["groups"], b["mask"], scored=b["scored"]),
    "dr_grpo": lambda b: F.grpo(b["scores"], b["groups"], b["mask"], scored=b["scored"], norm_by_std=False),
    "grpo_passk": lambda b: F.grpo_passk(b["scores"], b["groups"], b["mask"], scored=b["scored"]),
    "rloo": lambda b: F.rloo(b["scores"], b["groups"], b["mask"], scored=b["scored"]),
    "opo": lambda b: F.opo(b["scores"], b["groups"], b["mask"], scored=b["scored"]),
    "gpg": lambda b: F.gpg(b["scores"], b["groups"], b["mask"], scored=b["scored"]),
    "gdpo": lambda b: F.gdpo(b["parts"], b["groups"], b["mask"], scored=b["scored"], weights=[1.0, 0.5]),
    "reinforce_plus_plus": lambda b: F.reinforce_plus_plus(b["rewards"], b["mask"], scored=b["scored"], gamma=0.9),
    "reinforce_plus_plus_baseline": lambda b: F.reinforce_plus_plus_baseline(
        b["scores"], b["groups"], b["mask"], scored=b["scored"]
    ),
    "remax": lambda b: F.remax(b["rewards"], b["baselines"], b["mask"], scored=b["scored"]),
    "optimal_token_baseline": lambda b: F.optimal_token_baseline(
        b["rewards"], b["groups"], b["mask"], b["old"], b["squared"], scored=b["scored"]
    ),
    "tir_optimal_token_baseline": lambda b: F.tir_optimal_token_baseline(
        b["rewards"], b["groups"], b["mask"], b["old"], b["squared"], scored=b["scored"]
    ),
}


@st.composite
def batches(draw: Any, contiguous: bool = False) -> Batch:
    """Rows of up to six tokens in up to four groups, some unjudged, some empty, some with tool text between."""
    rows, width = draw(st.integers(2, 9)), draw(st.integers(1, 6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))

    def random(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    lengths = torch.randint(0, width + 1, (rows,), generator=generator)
    mask = (torch.arange(width) < lengths[:, None]).long()
    if not contiguous:
        mask = mask * (random(rows, width) > 0.2).long()
    rewards = (random(rows, width) * 4).round() / 4 * mask
    old = -random(rows, width) * 3
    return {
        "mask": mask,
        "groups": torch.randint(0, 4, (rows,), generator=generator),
        "scored": random(rows) > 0.15,
        "rewards": rewards,
        "scores": rewards.sum(-1),
        "parts": (random(rows, 2) * 3).round(),
        "baselines": random(rows),
        "old": old,
        "squared": old.exp() ** 2 + random(rows, width) * (1 - old.exp()) ** 2,
        "new": old + (random(rows, width) - 0.5),
        "advantages": (random(rows, width) - 0.5) * 2,
    }


def some(groups: torch.Tensor) -> torch.Tensor:
    """Groups numbered from 0 without gaps, as `group_numbers` gives them."""
    return torch.unique(groups, return_inverse=True)[1]


def dense(batch: Batch) -> Batch:
    return {**batch, "groups": some(batch["groups"])}


@pytest.mark.parametrize("name", ESTIMATORS)
@settings(max_examples=examples(40))
@given(batch=batches(), seed=st.integers(0, 99))
def test_estimators_do_not_care_for_order_padding_or_names(name: str, batch: Batch, seed: int) -> None:
    batch = dense(batch)
    advantages, returns = ESTIMATORS[name](batch)
    mask = batch["mask"]
    assert advantages.isfinite().all() and returns.isfinite().all()
    assert (advantages * (1 - mask) == 0).all() and (advantages[~batch["scored"]] == 0).all()
    order = torch.randperm(len(mask), generator=torch.Generator().manual_seed(seed))
    moved, _ = ESTIMATORS[name]({key: values[order] for key, values in batch.items()})
    torch.testing.assert_close(moved, advantages[order], atol=1e-9, rtol=1e-9)
    renamed, _ = ESTIMATORS[name]({**batch, "groups": batch["groups"].max() - batch["groups"]})
    torch.testing.assert_close(renamed, advantages, atol=1e-9, rtol=1e-9)
    pad = torch.zeros(len(mask), 2, dtype=mask.dtype)
    wide = {
        key: torch.cat([values, pad.to(values.dtype) + (7 if key in ("old", "squared") else 0)], 1)
        if values.dim() == 2 and key != "parts"
        else values
        for key, values in batch.items()
    }
    padded, _ = ESTIMATORS[name](wide)
    torch.testing.assert_close(padded[:, : mask.shape[1]], advantages, atol=1e-9, rtol=1e-9)
    assert (padded[:, mask.shape[1] :] == 0).all()


def naive(name: str, b: Batch) -> torch.Tensor:
    """The formulas with loops, as one would write them on paper."""
    rows = range(len(b["scores"]))
    judged = [row for row in rows if b["scored"][row]]
    found = torch.zeros(b["mask"].shape, dtype=torch.float64)
    nonzero = sum(1 for row in judged if b["scores"][row] != 0)
    for row in judged:
        mates = [other for other in judged if b["groups"][other] == b["groups"][row]]
        values = [float(b["scores"][other]) for other in mates]
        s, n, mean = float(b["scores"][row]), len(mates), sum(values) / len(values)
        if n == 1:
            continue
        deviation = (sum((value - mean) ** 2 for value in values) / (n - 1)) ** 0.5
        lengths = [int(b["mask"][other].sum()) for other in mates]
        weighted = sum(a * c for a, c in zip(lengths, values, strict=True)) / sum(lengths) if sum(lengths) else mean
        advantage = {
            "grpo": (s - mean) / (deviation + 1e-6),
            "dr_grpo": s - mean,
            "rloo": s - (sum(values) - s) / (n - 1),
            "opo": s - weighted,
            "gpg": (len(judged) / nonzero if nonzero else 1.0) * (s - mean),
        }[name]
        found[row] = advantage * b["mask"][row].double()
    return found


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "opo", "gpg"])
@settings(max_examples=examples(60))
@given(batch=batches())
def test_estimators_are_their_formulas_in_float64(name: str, batch: Batch) -> None:
    batch = dense(batch)
    # scores of one group that are equal give 0 by ours and rounding / eps by the formula
    torch.testing.assert_close(ESTIMATORS[name](batch)[0], naive(name, batch), atol=1e-9, rtol=1e-12)


def test_normalisations_are_trls() -> None:
    loss, mask = torch.tensor([[1.0, 2.0, 9.0], [4.0, 9.0, 9.0]]), torch.tensor([[1, 1, 0], [1, 0, 0]])
    # TRL's grpo; its dapo and bnpo; its dr_grpo
    expected = {"seq-mean-token-mean": (1.5 + 4) / 2, "token-mean": 7 / 3, "seq-mean-token-sum-norm": 7 / 2 / 10}
    for mode, number in expected.items():
        found = F.aggregate(loss, mask, mode, tokens=3.0, sequences=2.0, scale=10.0)
        assert float(found) == pytest.approx(number), mode


@pytest.mark.parametrize("name", ["grpo", "rloo", "opo", "gpg", "grpo_passk"])
def test_equal_scores_are_worth_nothing_to_the_last_bit(name: str) -> None:
    batch = {
        "scores": torch.full((6,), 0.1),
        "groups": torch.tensor([0, 0, 0, 1, 1, 1]),
        "mask": torch.ones(6, 2).long(),
    }
    found, _ = ESTIMATORS[name]({**batch, "scored": torch.ones(6).bool()})
    assert (found.abs() < 1e-7).all()


def test_rloo_is_the_mean_of_the_others_by_hand() -> None:
    scores, groups = torch.tensor([1.0, 2.0, 6.0, 5.0]), torch.tensor([0, 0, 0, 1])
    found, _ = F.rloo(scores, groups, torch.ones(4, 1).long())
    assert found[:, 0].tolist() == [1 - 4, 2 - 3.5, 6 - 1.5, 0]
    raw, _ = F.rloo(scores, groups, torch.ones(4, 1).long(), singleton="verl")
    assert raw[3, 0] == 5


def test_passk_pushes_the_best_alone_and_nobody_in_a_tie() -> None:
    mask = torch.ones(6, 1).long()
    found, _ = F.grpo_passk(
        torch.tensor([0, 1.0, 3, 2, 2, 0]), torch.tensor([0, 0, 0, 1, 1, 1]), mask, norm_by_std=False
    )
    assert found[:, 0].tolist() == [0, 0, 2, 0, 0, 0]


# --- losses ---------------------------------------------------------------------------------------

PER_BATCH = {"clip_cov", "kl_cov"}
"""Covariances are means over what they are given: parts of a mini-batch select otherwise."""
HOLDS_BACK = {"dro", "kl_cov"}
"""They pull towards the old policy whatever the advantage."""


def gradient(name: str, batch: Batch, rows: slice = slice(None), **settings_: Any) -> torch.Tensor:
    torch.manual_seed(0)  # clip_cov draws
    new = batch["new"].clone().requires_grad_()
    made = F.POLICY_LOSSES[name](
        batch["old"][rows], new[rows], batch["advantages"][rows], batch["mask"][rows], **settings_
    )
    mask = batch["mask"]
    counts = {"tokens": float(mask.sum()), "sequences": float((mask.sum(-1) > 0).sum())}
    F.aggregate(made.loss, mask[rows], made.aggregation or "token-mean", **counts).backward()
    assert new.grad is not None
    return new.grad


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(F.POLICY_LOSSES))
@settings(max_examples=examples(30))
@given(batch=batches())
def test_losses_ignore_what_is_outside_and_add_up(name: str, batch: Batch) -> None:
    whole = gradient(name, batch)
    assert whole.isfinite().all() and (whole * (1 - batch["mask"]) == 0).all()
    nan = torch.where(batch["mask"].bool(), 0.0, float("nan"))
    poisoned = {**batch, **{key: batch[key] + nan for key in ("old", "advantages")}}
    torch.testing.assert_close(gradient(name, poisoned), whole)
    if name not in PER_BATCH:
        parts = gradient(name, batch, slice(0, 1)) + gradient(name, batch, slice(1, None))
        torch.testing.assert_close(parts, whole, atol=1e-12, rtol=1e-9)
    if name not in HOLDS_BACK:
        still = gradient(name, {**batch, "advantages": torch.zeros_like(batch["advantages"])})
        assert (still == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vanilla", "sapo", "gpg", "dro", "geo_mean", "clip_cov", "kl_cov"])
@settings(max_examples=examples(15))
@given(batch=batches())
def test_gradients_agree_with_finite_differences(name: str, batch: Batch) -> None:
    """Where nothing is held fixed inside. Kinks are avoided by a step far below the distances drawn."""

    def value(new: torch.Tensor) -> tuple[float, torch.Tensor]:
        torch.manual_seed(0)
        made = F.POLICY_LOSSES[name](batch["old"], new, batch["advantages"], batch["mask"])
        return float(F.aggregate(made.loss, batch["mask"], made.aggregation or "token-mean")), made.clipped

    found, step = gradient(name, batch), 1e-7
    _, here = value(batch["new"])
    for row, token in batch["mask"].nonzero()[:6].tolist():
        up, down = batch["new"].clone(), batch["new"].clone()
        up[row, token] += step
        down[row, token] -= step
        (above, chosen), (below, chosen_too) = value(up), value(down)
        if not (torch.equal(chosen, here) and torch.equal(chosen_too, here)):  # the covariances' selection jumps there
            continue
        measured = (above - below) / (2 * step)
        assert float(found[row, token]) == pytest.approx(measured, abs=2e-6)


def test_gradients_with_a_part_held_fixed_by_hand() -> None:
    old, new = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-0.9, -1.0]])
    advantages, mask = torch.tensor([[2.0, 2.0]]), torch.ones(1, 2).long()
    batch = {"old": old, "new": new, "advantages": advantages, "mask": mask}
    ratio = (new - old).exp()
    # token-mean: each token's share is a half
    assert gradient("cispo", batch)[0].tolist() == pytest.approx([-float(ratio[0, 0]), -1.2])
    assert gradient("dppo_tv", batch)[0].tolist() == pytest.approx([-float(ratio[0, 0]), 0.0])  # 0.37 − 0.14 > 0.2
    assert gradient("dppo_kl", batch)[0].tolist() == pytest.approx([-float(ratio[0, 0]), -float(ratio[0, 1])])
    assert gradient("dppo_kl", batch, clip_ratio_high=0.1)[0].tolist() == pytest.approx(
        [-float(ratio[0, 0]), 0.0]
    )  # 0.16 nats
    wide = gradient("gspo", batch, clip_ratio_high=10.0)[0].tolist()
    assert wide == pytest.approx([-float((new - old).mean().exp())] * 2)
    assert gradient("gspo", batch)[0].tolist() == [0.0, 0.0]  # the whole row is beyond 1.2


def test_unknown_settings_and_impossible_ones() -> None:
    ones = torch.ones(1, 1)
    for name, bad in (("sapo", {"tau_pos": 0}), ("dro", {"dro_beta": 0}), ("vanilla", {"clip_ratio_c": 1})):
        with pytest.raises(ValueError, match="found"):
            F.POLICY_LOSSES[name](ones, ones, ones, ones.long(), **bad)
