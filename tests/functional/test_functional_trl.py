"""TRL's measures by hand: each formula at numbers that paper shows, and its degenerate cases."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from workbench import functional as F
from workbench.functional import trl


def one(value: float) -> torch.Tensor:
    return torch.tensor([[value]], dtype=torch.float64)


def lost(gain: float, ratio: float, **settings: Any) -> float:
    """The loss of one token whose probability was 0.4, and is 0.4 · ratio."""
    old = math.log(0.4)
    return trl.trl_loss(one(old), one(old + math.log(ratio)), one(gain), one(1.0), **settings).loss.item()


def test_the_clip_has_no_second_side_unless_delta_says_so() -> None:
    assert lost(1, 1.5) == pytest.approx(-1.2) and lost(1, 0.5) == pytest.approx(-0.5)
    assert lost(-1, 1.5) == pytest.approx(1.5) and lost(-1, 100.0) == pytest.approx(100.0)
    assert lost(-1, 100.0, delta=4.0) == pytest.approx(4.0)
    assert lost(1, 1.5, delta=1.1) == pytest.approx(-1.1)
    found = trl.trl_loss(one(0.0), one(math.log(100)), one(-1.0), one(1.0), delta=4.0)
    assert found.clipped_lower.item() and not trl.trl_loss(one(0.0), one(math.log(100)), one(-1.0), one(1.0)).clipped_lower.item()  # fmt: skip


def test_cispo_sapo_and_vespo() -> None:
    assert lost(2, 1.5, loss_type="cispo", clip_ratio_high=1.25) == pytest.approx(-1.25 * 2 * math.log(0.6))
    assert lost(1, 1.0, loss_type="sapo", tau_pos=2.0) == pytest.approx(-1.0)  # σ(0)·4/2
    assert lost(1, 1.0, loss_type="vespo") == pytest.approx(-math.log(0.4))  # φ(1) = 1
    assert lost(1, 2.0, loss_type="vespo") == pytest.approx(-4 * math.exp(-3) * math.log(0.8))  # e³·2²·e⁻⁶
    assert lost(-1, 2.0, loss_type="vespo") == pytest.approx(8 * math.exp(-2) * math.log(0.8))  # e²·2³·e⁻⁴
    weighted = trl.trl_loss(one(0.0), one(0.0), one(1.0), one(1.0), loss_type="vespo", weights=one(0.0))
    assert weighted.loss.item() == 0  # masked by its sampler


def test_the_kl_times_the_ratio_has_the_kls_own_gradient() -> None:
    """On policy ρ is 1 and the gradient of ρ·k3 is Δ = log π − log ref; of k3 alone 1 − e^−Δ."""
    new, ref = one(math.log(0.5)).requires_grad_(), one(math.log(0.25))
    ratio = trl.log_ratios(new.detach(), new, one(1.0))
    both = trl.reference_kl(new, ref, ratio, one(1.0))
    assert both.item() == pytest.approx(0.5 + math.log(2) - 1)
    assert torch.autograd.grad(both.sum(), new)[0].item() == pytest.approx(math.log(2))
    plain = trl.reference_kl(new, ref, None, one(1.0))
    assert torch.autograd.grad(plain.sum(), new)[0].item() == pytest.approx(0.5)
    off = trl.reference_kl(new.detach(), ref, one(math.log(2)), one(1.0))
    assert off.item() == pytest.approx(2 * (0.5 + math.log(2) - 1))


def test_rows_off_policy_are_dropped_where_their_advantage_is_negative() -> None:
    sampled = torch.tensor([[0.5, 0.1], [0.5, 0.1], [0.2, 0.1], [9.0, 9.0]])
    mask = torch.tensor([[1, 1], [1, 1], [1, 1], [0, 0]])
    gains = torch.tensor([[-1.0], [1.0], [-1.0], [-1.0]]).expand(4, 2) * mask
    kept = trl.on_policy_rows(sampled, torch.zeros(4, 2), gains, mask, 0.2)
    assert kept.tolist() == [[0, 0], [1, 1], [1, 1], [1, 1]]  # means 0.3, 0.3, 0.15, and no token


def test_tokens_of_the_highest_entropy() -> None:
    entropies, mask = torch.tensor([[1.0, 2, 3, 4, 5, 99]]), torch.tensor([[1, 1, 1, 1, 1, 0]])
    assert trl.top_entropy(entropies, mask, 0.2).tolist() == [[0, 0, 0, 0, 1, 0]]  # at or above 4.2
    assert trl.top_entropy(entropies, mask, 0.0).tolist() == [[0, 0, 0, 0, 1, 0]]
    assert trl.top_entropy(entropies, mask, 0.5).tolist() == [[0, 0, 1, 1, 1, 0]]
    assert trl.top_entropy(torch.ones(1, 6), mask, 0.2).tolist() == mask.tolist()
    assert trl.top_entropy(entropies, mask * 0, 0.2).sum() == 0


def test_the_deviation_of_the_batch() -> None:
    """σ of 0, 1, 2, 2 is √(2.75/3)."""
    scores, groups, mask = torch.tensor([0.0, 1, 2, 2]), torch.tensor([0, 0, 1, 1]), torch.ones(4, 1)
    found = F.grpo_batch(scores, groups, mask)[0][:, 0].tolist()
    by_hand = 0.5 / (math.sqrt(2.75 / 3) + 1e-4)
    assert found == pytest.approx([-by_hand, by_hand, 0, 0])
    assert F.grpo_batch(torch.ones(4), groups, mask)[0].abs().sum() == 0
    without = torch.tensor([True, True, True, False])  # the third is then alone, and no deviation has the fourth
    alone = F.grpo_batch(scores, groups, mask, scored=without)[0][:, 0].tolist()
    assert alone == pytest.approx([-0.5 / 1.0001, 0.5 / 1.0001, 0, 0])


def test_what_is_outside_the_mask_touches_nothing() -> None:
    nan = float("nan")
    new = torch.tensor([[0.1, nan]], requires_grad=True)
    mask = torch.tensor([[1.0, 0.0]])
    for loss_type in trl.LOSS_TYPES:
        for level in trl.LEVELS:
            held = trl.trl_loss(
                torch.tensor([[0.0, nan]]), new, torch.tensor([[1.0, nan]]), mask, loss_type=loss_type, importance_sampling_level=level
            )  # fmt: skip
            value = trl.divided(held.loss, mask, trl.LOSS_TYPES[loss_type], tokens=1, rows=1, longest=2)
            (slope,) = torch.autograd.grad(value, new)
            assert value.isfinite() and slope[0, 0].isfinite() and slope[0, 1] == 0


def test_a_token_of_probability_zero_is_not_hidden_by_a_clip() -> None:
    assert math.isnan(trl.trl_loss(one(0.0), one(-math.inf), one(1.0), one(1.0)).loss.item())


def test_half_precision_is_computed_in_float32() -> None:
    rows = [one(x).to(torch.bfloat16) for x in (-1.0, -0.5, 1.0, 1.0)]
    found = trl.trl_loss(*rows, clip_ratio_high=0.28)
    assert found.loss.dtype == torch.bfloat16 and found.loss.item() == pytest.approx(-1.28, rel=4e-3)
