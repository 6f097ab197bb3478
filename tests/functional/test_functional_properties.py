"""The maths by hand and by property: masks, log-probs, KL, returns, groups, aggregation."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.patience import examples

import workbench.functional as F
from workbench.functional import (
    AGGREGATIONS,
    AdaptiveKL,
    FixedKL,
    aggregate,
    discounted_returns,
    entropy_from_logits,
    explained_variance,
    gae,
    grpo,
    kl_penalty,
    log_probs_from_logits,
    masked_mean,
    masked_sum,
    masked_var,
    masked_whiten,
    ppo_clip,
    response_lengths,
    value_loss,
)
from workbench.functional.passes import interval_over_prompts

NAN = float("nan")


def test_masked_means_ignore_what_is_outside_nan_too() -> None:
    x, mask = torch.tensor([[1.0, 3.0, NAN]]), torch.tensor([[1, 1, 0]])
    assert masked_sum(x, mask) == 4 and masked_mean(x, mask) == 2
    assert masked_mean(x, mask, dim=-1).tolist() == [2] and masked_mean(x, torch.zeros(1, 3)) == 0
    assert masked_var(x, mask) == 2 and masked_var(x, mask, unbiased=False) == 1
    assert response_lengths(mask).tolist() == [2]
    with pytest.raises(ValueError, match="at least two positions; the mask has 1"):
        masked_var(x, torch.tensor([[1, 0, 0]]))


def test_nan_outside_the_mask_reaches_no_gradient_and_no_return() -> None:
    mask = torch.tensor([[1, 1, 0]])
    x = torch.tensor([[1.0, 3.0, NAN]], requires_grad=True)
    masked_var(x, mask).backward()
    assert x.grad is not None and x.grad.tolist() == [[-2, 2, 0]]
    for loss in (
        lambda new, nan: ppo_clip(nan, new, nan, mask).loss,
        lambda new, nan: value_loss(new, nan, nan, mask).loss,
    ):
        new = torch.tensor([[0.1, 0.2, NAN]], requires_grad=True)
        aggregate(loss(new, torch.tensor([[0.5, 0.5, NAN]])), mask).backward()
        assert new.grad is not None and new.grad[0, 2] == 0 and new.grad[0, :2].abs().min() > 0
    for standing in (gae(x.detach(), x.detach(), mask), (discounted_returns(x.detach(), mask),)):
        assert all(part.isfinite().all() for part in standing)


def test_whitening_by_hand() -> None:
    x, mask = torch.tensor([[1.0, 3.0, 9.0]]), torch.tensor([[1, 1, 0]])
    white = masked_whiten(x, mask)
    assert white[0, :2].tolist() == pytest.approx([-0.70711, 0.70711], abs=1e-4)
    assert white[0, 2] == pytest.approx(7 / math.sqrt(2), abs=1e-4)  # transformed, not zeroed
    assert masked_whiten(x, mask, shift_mean=False)[0, 0] == pytest.approx(2 - 0.70711, abs=1e-4)


def test_log_probs_and_entropy_by_hand() -> None:
    logits = torch.tensor([[0.0, math.log(3.0)]])
    assert log_probs_from_logits(logits, torch.tensor([1]))[0] == pytest.approx(math.log(0.75))
    expected = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert entropy_from_logits(logits)[0] == pytest.approx(expected)
    ruled_out = torch.tensor([[0.0, float("-inf"), 0.0]])
    assert entropy_from_logits(ruled_out)[0] == pytest.approx(math.log(2))


@settings(max_examples=examples(25), deadline=None)
@given(st.integers(2, 9), st.integers(0, 100))
def test_log_probs_agree_with_torch_and_have_its_gradient(width: int, seed: int) -> None:
    torch.manual_seed(seed)
    ours = (3 * torch.randn(4, width)).requires_grad_()
    theirs = ours.detach().clone().requires_grad_()
    labels = torch.randint(width, (4,))
    log_probs_from_logits(ours, labels).sum().backward()
    torch.log_softmax(theirs, -1).gather(-1, labels[:, None]).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


@settings(max_examples=examples(25), deadline=None)
@given(st.integers(2, 9), st.integers(0, 100))
def test_entropy_agrees_with_torch_and_has_its_gradient(width: int, seed: int) -> None:
    torch.manual_seed(seed)
    ours = (3 * torch.randn(4, width)).requires_grad_()
    theirs = ours.detach().clone().requires_grad_()
    weights = torch.randn(4)
    found = entropy_from_logits(ours)
    expected = torch.distributions.Categorical(logits=theirs).entropy()
    torch.testing.assert_close(found, expected)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-5, rtol=1e-4)


def test_entropy_with_a_token_ruled_out_has_a_gradient_and_keeps_its_dtype() -> None:
    logits = torch.tensor([[0.0, float("-inf"), 1.0]], dtype=torch.bfloat16, requires_grad=True)
    entropy = entropy_from_logits(logits)
    entropy.sum().backward()
    assert entropy.dtype == torch.float32 and logits.grad is not None and logits.grad.dtype == torch.bfloat16
    p = 1 / (1 + math.exp(-1))  # of the last token; ∂H/∂z = −p·(log p + H)
    slope = -p * (math.log(p) - p * math.log(p) - (1 - p) * math.log(1 - p))
    assert logits.grad[0].tolist() == pytest.approx([-slope, 0, slope], abs=2e-3)


def test_straight_through_kl_keeps_its_value_and_takes_k2s_gradient() -> None:
    for kind in ("k1+", "low_var_kl+", "abs+"):
        x = torch.tensor([0.3], requires_grad=True)
        value = kl_penalty(x, torch.tensor([0.1]), kind)
        value.sum().backward()
        assert value.item() == pytest.approx(kl_penalty(x.detach(), torch.tensor([0.1]), kind[:-1]).item())
        assert x.grad is not None and x.grad.item() == pytest.approx(0.2)  # d/dx ½(x − r)² = x − r
    with pytest.raises(ValueError, match="'full'.*low_var_kl"):
        kl_penalty(torch.zeros(1), torch.zeros(1), "full")


@pytest.mark.parametrize("ours", [0.0, -1.0])
def test_k3_keeps_its_digits_where_policies_are_near(ours: float) -> None:
    delta = 2.0**-13
    for sign in (1, -1):
        found = kl_penalty(torch.tensor(ours), torch.tensor(ours + sign * delta), "k3").item()
        assert found == pytest.approx(delta**2 / 2, rel=2e-3)


@given(st.floats(-30, 30), st.floats(-30, 30))
def test_k3_is_never_negative_and_zero_where_equal(a: float, b: float) -> None:
    value = kl_penalty(torch.tensor(a), torch.tensor(b), "k3").item()
    assert 0 <= value <= 10 and kl_penalty(torch.tensor(a), torch.tensor(a), "k3").item() == 0


def test_controllers() -> None:
    fixed, adaptive = FixedKL(0.5), AdaptiveKL(0.5, target=0.1, horizon=10)
    for controller in (fixed, adaptive):
        controller.update(100.0, 1)
    assert fixed.value == 0.5 and fixed.state() == {} and adaptive.value == pytest.approx(0.5 * 1.02)
    other = AdaptiveKL(0.5, target=0.1, horizon=10)
    other.load_state(adaptive.state())
    assert other.value == adaptive.value
    with pytest.raises(ValueError, match="positive; found 0.1 and 0"):
        AdaptiveKL(0.1, 0.1, 0)


def test_returns_skip_masked_tokens() -> None:
    rewards, mask = torch.tensor([[1.0, 5.0, 2.0]]), torch.tensor([[1, 0, 1]])
    assert discounted_returns(rewards, mask, 0.5).tolist() == [[2.0, 0.0, 2.0]]


def test_lambda_by_length_by_hand() -> None:
    """λ is 0 for 20 tokens or fewer, 0.5 for 40; the critic's returns have their own."""
    rewards, values = torch.zeros(2, 40, dtype=torch.float64), torch.rand(2, 40, dtype=torch.float64)
    mask = torch.ones(2, 40, dtype=torch.float64)
    mask[0, 10:] = 0
    rewards[0, 9] = rewards[1, 39] = 1
    advantages, returns = F.length_adaptive_gae(rewards, values, mask)
    each = [F.gae(rewards, values, mask, lam=lam, whiten=False)[0] for lam in (0.0, 0.5)]
    apart = torch.stack([each[0][0], each[1][1]])
    assert torch.allclose(advantages, masked_whiten(apart, mask, zero_masked=True))
    assert apart[0, 9].item() == pytest.approx(1 - values[0, 9].item())  # one step of λ = 0: δ alone
    assert apart[0, 0].item() == pytest.approx(float(values[0, 1] - values[0, 0]))
    assert torch.allclose(returns, F.gae(rewards, values, mask, lam=1.0)[1])
    assert torch.allclose(
        F.length_adaptive_gae(rewards, values, mask, critic_lam=0.0)[1], F.gae(rewards, values, mask, lam=0.0)[1]
    )
    large = F.length_adaptive_gae(rewards, values, mask, alpha=1e12)[0]
    assert torch.allclose(large, F.gae(rewards, values, mask)[0])
    left_out = F.length_adaptive_gae(rewards, values, mask, scored=torch.tensor([False, True]))[0]
    assert left_out[0].abs().sum() == 0 and left_out[1].abs().sum() > 0
    assert F.length_adaptive_gae(rewards, values, mask * 0)[0].abs().sum() == 0
    with pytest.raises(ValueError, match="alpha"):
        F.length_adaptive_gae(rewards, values, mask, alpha=0.0)


def test_gae_by_hand_and_through_tool_text() -> None:
    rewards, values = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.5, 0.7, 0.6]])
    advantages, returns = gae(rewards, values, torch.ones(1, 3), gamma=1.0, lam=1.0, whiten=False)
    assert returns[0].tolist() == pytest.approx([1, 1, 1]) and advantages[0].tolist() == pytest.approx([0.5, 0.3, 0.4])
    masked, _ = gae(rewards, values, torch.tensor([[1, 0, 1]]), whiten=False)
    # the tool's token is not there: δ₀ = V₂ − V₀ = 0.1, δ₂ = 1 − V₂ = 0.4
    assert masked[0].tolist() == pytest.approx([0.5, 0, 0.4])
    zero, _ = gae(rewards, values, torch.tensor([[1, 0, 1]]), gamma=1.0, lam=0.0, whiten=False)
    assert zero[0].tolist() == pytest.approx([0.1, 0, 0.4])


def test_explained_variance() -> None:
    returns, mask = torch.tensor([[1.0, 2.0, 3.0]]), torch.ones(1, 3)
    assert explained_variance(returns, returns, mask) == pytest.approx(1)
    assert explained_variance(torch.zeros(1, 3), returns, mask) == pytest.approx(0, abs=1e-4)
    assert explained_variance(returns, returns, torch.tensor([[1, 0, 0]])).isnan()


# --- groups -----------------------------------------------------------------------------------


def one(scores: list[float], groups: list[int], **settings_: object) -> list[float]:
    mask = torch.ones(len(scores), 2)
    return grpo(torch.tensor(scores), torch.tensor(groups), mask, **settings_)[0][:, 0].tolist()  # type: ignore[arg-type]


def test_grpo_edges() -> None:
    assert one([1, 1, 1], [0, 0, 0]) == [0, 0, 0]
    assert one([0.7], [0]) == [0] and one([0.7], [0], singleton="verl") == pytest.approx([0.7])
    assert one([1, 0], [0, 0], norm_by_std=False) == [0.5, -0.5]
    scored = torch.tensor([True, True, False])
    assert one([1, 0, 9], [0, 0, 0], scored=scored) == pytest.approx([0.70711, -0.70711, 0], abs=1e-4)
    assert one([1, 0], [0, 0], scored=torch.tensor([True, False])) == [0, 0]
    unscored = one([1, 0, NAN], [0, 0, 0], scored=scored)
    assert unscored == pytest.approx([0.70711, -0.70711, 0], abs=1e-4)
    assert one([0.3, NAN], [0, 0], scored=torch.tensor([True, False]), singleton="verl") == pytest.approx([0.3, 0])
    with pytest.raises(ValueError, match="'zero' or 'verl'"):
        one([1], [0], singleton="none")


@given(st.floats(-1e6, 1e6, width=32), st.integers(1, 9))
def test_equal_scores_have_no_advantage_whatever_they_are(score: float, rows: int) -> None:
    assert one([score] * rows, [0] * rows) == [0] * rows


def test_an_empty_response_counts_in_its_group_and_has_no_advantage_to_carry() -> None:
    mask = torch.tensor([[1, 1], [0, 0]])
    advantages, _ = grpo(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), mask)
    torch.testing.assert_close(advantages, torch.tensor([[0.70711, 0.70711], [0, 0]]), atol=1e-5, rtol=0)


@settings(max_examples=examples(50), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.floats(-5, 5, width=32)), min_size=1, max_size=24))
def test_grpo_is_the_loop_over_groups(pairs: list[tuple[int, float]]) -> None:
    numbers = {group: index for index, group in enumerate(dict.fromkeys(group for group, _ in pairs))}
    groups, scores = [numbers[group] for group, _ in pairs], torch.tensor([score for _, score in pairs])
    found = grpo(scores, torch.tensor(groups), torch.ones(len(pairs), 1))[0][:, 0]
    for group in set(groups):
        rows = [row for row, g in enumerate(groups) if g == group]
        mine = scores[rows].double()  # in float32 the loop itself finds a deviation in equal scores
        expected = (mine - mine.mean()) / (mine.std() + 1e-6) if len(rows) > 1 else torch.zeros(1)
        torch.testing.assert_close(found[rows], expected.float(), atol=1e-5, rtol=1e-5)


# --- losses -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("advantage", "log_ratio", "loss", "clipped", "lower"),
    [
        (1.0, 0.0, -1.0, False, False),
        (1.0, math.log(1.5), -1.2, True, False),  # good and already likelier: no further
        (1.0, math.log(0.5), -0.5, False, False),
        (-1.0, math.log(0.5), 0.8, True, False),
        (-1.0, math.log(2.0), 2.0, False, False),
        (-1.0, math.log(5.0), 3.0, False, True),  # dual clip: at most −A·c
    ],
)
def test_the_surrogate_by_hand(advantage: float, log_ratio: float, loss: float, clipped: bool, lower: bool) -> None:
    row = torch.ones(1, 1)
    found = ppo_clip(0 * row, log_ratio * row, advantage * row, row)
    assert found.loss.item() == pytest.approx(loss) and found.ratio.item() == pytest.approx(math.exp(log_ratio))
    assert (found.clipped.item(), found.clipped_lower.item()) == (clipped, lower)


def test_value_loss_takes_the_worse_of_both() -> None:
    found = value_loss(torch.tensor([[2.0]]), torch.tensor([[0.0]]), torch.tensor([[0.0]]), torch.ones(1, 1), clip=0.5)
    assert found.loss.item() == 2.0 and not found.clipped.item()
    found = value_loss(torch.tensor([[2.0]]), torch.tensor([[2.0]]), torch.tensor([[0.0]]), torch.ones(1, 1), clip=0.5)
    assert found.loss.item() == pytest.approx(0.5 * 1.5**2) and found.clipped.item()


@settings(max_examples=examples(50), deadline=None)
@given(st.sampled_from(AGGREGATIONS), st.integers(1, 6), st.integers(0, 99), st.integers(0, 6))
def test_micro_batches_add_up(mode: str, rows: int, seed: int, where: int) -> None:
    torch.manual_seed(seed)
    loss, mask = torch.randn(rows, 4), (torch.rand(rows, 4) > 0.4).float()
    counts = {"tokens": mask.sum().item(), "sequences": float((mask.sum(-1) > 0).sum()), "scale": 4.0}
    whole = aggregate(loss, mask, mode)
    parts = torch.zeros(())
    for part in (slice(0, where), slice(where, None)):
        width = max(mask[part].any(0).nonzero().flatten().tolist(), default=0) + 1  # as an engine trims padding
        parts = parts + aggregate(loss[part, :width], mask[part, :width], mode, **counts)
    torch.testing.assert_close(torch.as_tensor(parts), whole, atol=1e-5, rtol=1e-5)


def test_unknown_modes_are_refused() -> None:
    with pytest.raises(ValueError, match="'mean'.*token-mean"):
        aggregate(torch.zeros(1, 1), torch.ones(1, 1), "mean")
    with pytest.raises(ValueError, match="needs scale"):
        aggregate(torch.zeros(1, 1), torch.ones(1, 1), "seq-mean-token-sum-norm", sequences=2)


@pytest.mark.parametrize("wrong", [{"clip_ratio_low": -0.1}, {"clip_ratio_high": -0.1}, {"clip_ratio_c": 1.0}])
def test_impossible_clip_ranges_are_refused(wrong: dict[str, float]) -> None:
    row = torch.ones(1, 1)
    with pytest.raises(ValueError, match="clip ranges are ≥ 0 and clip_ratio_c > 1"):
        ppo_clip(row, row, row, row, **wrong)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_an_empty_mask_is_a_loss_of_zero(mode: str) -> None:
    loss = torch.full((2, 3), NAN, requires_grad=True)
    found = aggregate(loss, torch.zeros(2, 3), mode)
    found.backward()
    assert found.item() == 0 and loss.grad is not None and not loss.grad.any()


# --- precision ------------------------------------------------------------------------------------

inf, nan = float("inf"), float("nan")
GROUPS = torch.tensor([0, 0, 0, 1, 1, 1])


def by_name() -> dict[str, Any]:
    """Public functions of [B, T] tensors, called with (x, y, z, mask)."""
    estimators = (F.grpo, F.grpo_passk, F.rloo, F.opo, F.gpg, F.reinforce_plus_plus_baseline)
    return {
        "masked_sum": lambda x, y, z, m: F.masked_sum(x, m),
        "masked_sum of rows": lambda x, y, z, m: F.masked_sum(x, m, -1),
        "masked_mean": lambda x, y, z, m: F.masked_mean(x, m),
        "masked_var": lambda x, y, z, m: F.masked_var(x, m),
        "masked_whiten": lambda x, y, z, m: F.masked_whiten(x, m),
        "discounted_returns": lambda x, y, z, m: F.discounted_returns(x, m, 0.99),
        "gae": lambda x, y, z, m: F.gae(x, y, m, 0.99, 0.95),
        "explained_variance": lambda x, y, z, m: F.explained_variance(x, y, m),
        "value_loss": lambda x, y, z, m: F.value_loss(x, y, z, m).loss,
        "bradley_terry": lambda x, y, z, m: F.bradley_terry(x, y, 0.1, 0.01),
        "reinforce_plus_plus": lambda x, y, z, m: F.reinforce_plus_plus(x, m),
        "remax": lambda x, y, z, m: F.remax(x, y[:, 0], m),
        "gdpo": lambda x, y, z, m: F.gdpo(x[:, :3], GROUPS, m),
        "optimal_token_baseline": lambda x, y, z, m: F.optimal_token_baseline(x, GROUPS, m, -y.abs(), z.abs()),
        **{one.__name__: lambda x, y, z, m, one=one: one(x[:, 0], GROUPS, m) for one in estimators},
        **{
            f"kl {kind}": lambda x, y, z, m, kind=kind: F.kl_penalty(x, y, kind)
            for kind in ("k1", "abs", "k2", "k3", "k3+")
        },
        **{f"aggregate {mode}": lambda x, y, z, m, mode=mode: F.aggregate(x, m, mode) for mode in AGGREGATIONS},
        **{
            f"loss {name}": lambda x, y, z, m, one=one: (
                one(-y.abs(), -x.abs(), z, m).loss,
                one(-y.abs(), -x.abs(), z, m).ratio,
            )
            for name, one in F.POLICY_LOSSES.items()
            if name not in ("clip_cov", "kl_cov")
        },
    }


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", by_name())
def test_half_precision_is_the_float32_result_rounded(name: str, dtype: torch.dtype) -> None:
    function, generator = by_name()[name], torch.Generator().manual_seed(7)
    x, y, z = (torch.randn(6, 40, generator=generator).to(dtype) for _ in range(3))
    for mask in (torch.ones(6, 40), (torch.rand(6, 40, generator=generator) > 0.3).float(), torch.eye(6, 40)):
        wanted = function(x.float(), y.float(), z.float(), mask)
        found = function(x, y, z, mask.to(dtype))
        pairs = zip(found, wanted, strict=True) if isinstance(found, tuple) else [(found, wanted)]
        for half, single in pairs:
            assert half.dtype is dtype and torch.equal(half, single.to(dtype)), name


def test_sums_over_many_tokens_keep_their_digits() -> None:
    """By hand: 4,096 × 0.01 = 40.96 was 4.0 in bf16; 70,000 ones have mean 1, which was inf in fp16; 10⁶ × 0.1 was 1 % off."""
    rewards, ones = torch.full((1, 4096), 0.01, dtype=torch.bfloat16), torch.ones(1, 4096)
    assert float(F.discounted_returns(rewards, ones)[0, 0]) == pytest.approx(40.96, rel=4e-3)
    assert float(F.gae(rewards, rewards * 0, ones, whiten=False)[1][0, 0]) == pytest.approx(40.96, rel=4e-3)
    many = torch.ones(1, 70_000, dtype=torch.float16)
    assert float(masked_mean(many, many)) == 1.0
    whitened = masked_whiten(torch.tensor([[300.0, -300.0, 200.0, -200.0]], dtype=torch.float16), torch.ones(1, 4))
    assert whitened[0].tolist() == pytest.approx([1.019, -1.019, 0.679, -0.679], abs=1e-3)  # ÷ √(260,000/3) = 294.4
    tenths, ones = torch.full((1, 40_000), 0.1), torch.ones(1, 40_000)
    assert float(F.discounted_returns(tenths, ones)[0, 0]) == pytest.approx(4000, rel=1e-6)
    assert float(F.gae(tenths, tenths * 0, ones, whiten=False)[0][0, 0]) == pytest.approx(4000, rel=1e-6)


@pytest.mark.parametrize("name", F.POLICY_LOSSES)
def test_no_clip_hides_a_token_of_probability_zero(name: str) -> None:
    """gspo's loss and gradient of the row were 0, vanilla's a plain clip; engines refuse a loss that is not finite, by its rows."""
    old = torch.full((3, 3), -1.0)
    for new_value, old_value in ((-inf, -1.0), (-1.0, -inf), (-inf, -inf), (nan, -1.0)):
        before, now = old.clone(), old.clone()
        before[1, 1], now[1, 1] = old_value, new_value
        if name == "gpg" and new_value == -1.0:
            continue  # it reads no old log-prob
        loss = F.POLICY_LOSSES[name](before, now, torch.ones(3, 3), torch.ones(3, 3)).loss
        assert not loss[1].isfinite().all() and loss[[0, 2]].isfinite().all()
        hidden = F.POLICY_LOSSES[name](before, now, torch.ones(3, 3), (now == -1.0).float() * (before == -1.0)).loss
        assert hidden.isfinite().all()


@pytest.mark.parametrize("bad", [nan, inf, -inf])
def test_a_score_that_is_no_number_is_refused_with_its_row(bad: float) -> None:
    scores, groups, mask = torch.tensor([1.0, bad, 0.0, 1.0]), torch.tensor([0, 0, 1, 1]), torch.ones(4, 2)
    for estimator in (F.grpo, F.grpo_passk, F.rloo, F.opo, F.gpg, F.maxrl, F.reinforce_plus_plus_baseline):
        with pytest.raises(ValueError, match=r"finite numbers; found .* in rows \[1\]; scored="):
            estimator(scores, groups, mask)
        left_out = estimator(scores, groups, mask, scored=torch.tensor([True, False, True, True]))[0]
        assert left_out.isfinite().all() and left_out[1].tolist() == [0, 0]


# --- intervals ------------------------------------------------------------------------------------


def test_intervals_over_prompts_by_hand() -> None:
    # means 1, 0, ½, ½: mean ½, squared error (¼ + ¼)/3/4 = 1/24, so ¼·24 = 6 independent samples; t of 3 is 3.1824
    low, high = interval_over_prompts([[1, 1], [0, 0], [1, 0], [0, 1]])
    square = 3.1824**2 / 6
    half = 3.1824 * (0.25 / 6 + square / 24) ** 0.5 / (1 + square)
    assert (low, high) == pytest.approx((0.5 - half, 0.5 + half), abs=1e-4)
    # no spread: as many samples as prompts, Wilson's (0, t²/n / (1 + t²/n)) with t of 4, 2.7764
    assert interval_over_prompts([[0.0] * 8] * 5) == pytest.approx((0.0, 2.7764**2 / 5 / (1 + 2.7764**2 / 5)), abs=1e-4)
    assert interval_over_prompts([[1.0] * 8] * 5)[1] == 1.0
    # other scores: Student's t over prompts, 3 ± 4.3027·√(1/3)
    assert interval_over_prompts([[2.0], [3.0], [4.0]]) == pytest.approx((3 - 2.4841, 3 + 2.4841), abs=1e-3)
    assert interval_over_prompts([[0.1], [0.0], [0.3]])[0] == 0.0
    for none in ([], [[1.0, 0.0]], [[0.5], [0.5]], [[2.0]] * 3):
        assert all(map(math.isnan, interval_over_prompts(none)))


@pytest.mark.parametrize(
    ("prompts", "samples", "alpha", "beta"),
    [(5, 8, 1, 1), (8, 8, 1, 1), (16, 4, 0.3, 2), (16, 4, 0.1, 3.2), (64, 8, 0.5, 0.5), (30, 1, 0.2, 4)],
)
def test_intervals_hold_the_truth_as_often_as_they_say(prompts: int, samples: int, alpha: float, beta: float) -> None:
    """The normal approximation held it in 77 to 95 of 100; prompts' own success rates are drawn from a beta distribution."""
    rng, held, draws = np.random.default_rng(3), 0, 600
    rates = rng.beta(alpha, beta, (draws, prompts))
    right = rng.random((draws, prompts, samples)) < rates[..., None]
    for one in right.astype(float).tolist():
        low, high = interval_over_prompts(one)
        assert 0 <= low < high <= 1
        held += low <= alpha / (alpha + beta) <= high
    assert held / draws > 0.92
