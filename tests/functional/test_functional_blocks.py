"""Blocks of rows: whatever their size, results and gradients are those of the plain formula on the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.patience import examples

from workbench import functional as F
from workbench.functional import masking, returns

Batch = dict[str, torch.Tensor]
Result = tuple[torch.Tensor, ...]
COLUMNS = ("rewards", "values", "old", "squared", "new", "advantages")
ESTIMATORS: dict[str, Callable[[Batch], Result]] = {
    "discounted_returns": lambda b: (F.discounted_returns(b["rewards"], b["mask"], 0.9),),
    "gae": lambda b: F.gae(b["rewards"], b["values"], b["mask"], 0.99, 0.95),
    "gae of verl": lambda b: F.gae(b["rewards"], b["values"], b["mask"], 1.0, 0.9, zero_masked=False),
    "reinforce_plus_plus": lambda b: F.reinforce_plus_plus(b["rewards"], b["mask"], gamma=0.9),
    "reinforce_plus_plus_baseline": lambda b: F.reinforce_plus_plus_baseline(b["scores"], b["groups"], b["mask"]),
    "gdpo": lambda b: F.gdpo(b["parts"], b["groups"], b["mask"]),
    "remax": lambda b: F.remax(b["rewards"], b["scores"], b["mask"]),
    "optimal_token_baseline": lambda b: F.optimal_token_baseline(
        b["rewards"], b["groups"], b["mask"], b["old"], b["squared"]
    ),
    "tir_optimal_token_baseline": lambda b: F.tir_optimal_token_baseline(
        b["rewards"], b["groups"], b["mask"], b["old"], b["squared"], rollout_is_weights=b["values"]
    ),
    "masked_whiten": lambda b: (F.masked_whiten(b["kept"], b["mask"]),) if b["mask"].sum() > 1 else (),
    "masked_sum": lambda b: (F.masked_sum(b["new"], b["mask"]), F.masked_mean(b["new"], b["mask"], -1)),
}


def of_loss(name: str) -> Callable[[Batch, torch.Tensor], tuple[torch.Tensor, Result]]:
    def loss(b: Batch, new: torch.Tensor) -> tuple[torch.Tensor, Result]:
        torch.manual_seed(0)  # clip_cov draws
        made = F.POLICY_LOSSES[name](b["old"], new, b["advantages"], b["mask"])
        rest = (made.ratio, made.clipped, made.clipped_lower, *made.metrics.values())
        return F.aggregate(made.loss, b["mask"], made.aggregation or "token-mean"), rest

    return loss


def of_value(b: Batch, new: torch.Tensor) -> tuple[torch.Tensor, Result]:
    made = F.value_loss(new, b["values"], b["old"], b["mask"], clip=0.2)
    return F.aggregate(made.loss, b["mask"]), (made.clipped,)


def of_kl(kind: str) -> Callable[[Batch, torch.Tensor], tuple[torch.Tensor, Result]]:
    return lambda b, new: (F.aggregate(F.kl_penalty(new, b["old"], kind), b["mask"], "seq-mean-token-mean"), ())


LOSSES = (
    {name: of_loss(name) for name in F.POLICY_LOSSES}
    | {"value": of_value}
    | {kind: of_kl(kind) for kind in ("k1", "abs", "k2", "k3", "k3+")}
)


@st.composite
def batches(draw: Any) -> Batch:
    """Rows of up to six tokens, none to eleven rows; tool text between; NaN outside the mask; float32 or float64."""
    rows, width = draw(st.integers(0, 11)), draw(st.sampled_from([1, 2, 6]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))

    def random(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    mask = (random(rows, width) > 0.3).long()
    nan = torch.where(mask.bool(), 0.0, float("nan"))
    old = -3 * random(rows, width)
    far = 50 * (random(rows, width) > 0.9) * (random(rows, width) - 0.5).sign()  # where the log-ratio is clamped
    found = {
        "rewards": random(rows, width),
        "values": random(rows, width),
        "old": old,
        "squared": random(rows, width),
        "new": old + random(rows, width) - 0.5 + far,
        "advantages": 4 * random(rows, width) - 2,
    }
    made = {name: (values + nan).to(dtype) for name, values in found.items()}
    made |= {"kept": found["values"].to(dtype), "scores": random(rows).to(dtype), "parts": random(rows, 2).to(dtype)}
    made |= {"mask": mask, "groups": torch.arange(rows) // 3}
    if draw(st.booleans()):  # columns of a wider tensor
        made |= {name: torch.stack([made[name]] * 2, -1)[..., 0] for name in (*COLUMNS, "mask")}
    return made


@contextmanager
def in_blocks_of(rows: int) -> Iterator[None]:
    """Everything in blocks of so few rows, on huge pages."""
    with pytest.MonkeyPatch.context() as patch:
        whole = masking.by_rows

        def cut(formula: Any, *given_: torch.Tensor, elements: int = 0) -> Any:
            width = max(one[:1].numel() for one in given_)
            return whole(formula, *given_, elements=rows * width if given_[0].dim() > 1 else 2**20)

        for module in ("losses", "masking", "returns", "advantages"):
            patch.setattr(f"workbench.functional.{module}.by_rows", cut)
        patch.setattr(masking, "ELEMENTS", 0)
        patch.setattr(masking, "LARGE", 1)
        yield


def close(found: Result, expected: Result) -> None:
    for one, other in zip(found, expected, strict=True):
        near = {"rtol": 1e-5, "atol": 1e-6} if one.dtype == torch.float32 else {"rtol": 1e-9, "atol": 1e-12}
        torch.testing.assert_close(one, other, **(near if one.is_floating_point() else {"rtol": 0, "atol": 0}))


@pytest.mark.parametrize("name", ESTIMATORS)
@settings(max_examples=examples(20), deadline=None)
@given(batch=batches(), rows=st.integers(1, 4))
def test_estimators_in_blocks_are_those_of_the_whole_and_write_to_no_input(name: str, batch: Batch, rows: int) -> None:
    before = {key: values.clone() for key, values in batch.items()}
    expected = ESTIMATORS[name](batch)
    with in_blocks_of(rows):
        close(ESTIMATORS[name](batch), expected)
    assert all(torch.equal(one.nan_to_num(9), before[key].nan_to_num(9)) for key, one in batch.items())
    assert all(one.isfinite().all() for one in expected)


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=examples(20), deadline=None)
@given(batch=batches(), rows=st.integers(1, 4))
def test_losses_in_blocks_have_the_wholes_values_and_gradients(name: str, batch: Batch, rows: int) -> None:
    before = {key: values.clone() for key, values in batch.items()}

    def learned() -> Result:
        new = batch["new"].clone().requires_grad_()
        loss, rest = LOSSES[name](batch, new)
        loss.backward()
        assert new.grad is not None
        return loss.detach(), new.grad, *rest

    expected = learned()
    with in_blocks_of(rows):
        close(learned(), expected)
    assert all(torch.equal(one.nan_to_num(9), before[key].nan_to_num(9)) for key, one in batch.items())
    assert expected[0].isfinite() and (expected[1][batch["mask"] == 0] == 0).all()


def plain(name: str, old: torch.Tensor, new: torch.Tensor, a: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The losses per token as their papers write them; autograd gives their gradient."""
    gap = new - old
    ratio = gap.clamp(-20, 20).exp()
    held, lengths = ratio.detach(), mask.sum(-1, keepdim=True).clamp(min=1)

    def clip(r: torch.Tensor) -> torch.Tensor:
        return torch.maximum(-a * r, -a * r.clamp(0.8, 1.2))

    if name == "vanilla":
        return torch.where(a < 0, torch.minimum(clip(ratio), -3 * a), clip(ratio))
    if name == "gspo":
        mean = ((gap * mask).sum(-1, keepdim=True) / lengths).detach()
        return clip((mean + new - new.detach()).clamp(max=10).exp())
    if name == "sapo":
        tau = 1.05 - 0.05 * (a > 0).to(a.dtype)
        return -a * torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    if name == "dppo_tv":
        moved = (new.exp() - old.exp()).detach()
        out = torch.where(a > 0, moved > 0.2, -moved > 0.2)
        return -a * held.clamp(max=3) * new * ~out
    if name == "geo_mean":
        chosen = torch.where(a > 0, gap.clamp(-20, 20).clamp(max=0.2), gap.clamp(-20, 20).clamp(min=-0.2)) * mask
        mean = (a * mask).sum(-1, keepdim=True) / lengths
        return -mean * (chosen.sum(-1, keepdim=True) / lengths).exp() * ((mask.cumsum(-1) == 1) & mask.bool())
    return {
        "gpg": -a * new,
        "cispo": -a * held.clamp(0.8, 1.2) * new,
        "dro": -(a * new - 0.05 * gap.square()),
        "value": 0.5 * torch.maximum((new - a).square(), (old + gap.clamp(-0.2, 0.2) - a).square()),
        "k1": gap,
        "abs": gap.abs(),
        "k2": 0.5 * gap.square(),
        "k3": ((-gap).clamp(-20, 20).exp() + gap.clamp(-20, 20) - 1).clamp(0, 10),
    }[name]


def ours(name: str, old: torch.Tensor, new: torch.Tensor, a: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    if name == "value":
        return F.value_loss(new, a, old, mask, clip=0.2).loss
    return F.POLICY_LOSSES[name](old, new, a, mask).loss if name in F.POLICY_LOSSES else F.kl_penalty(new, old, name)


FORMULAS = ("vanilla", "gspo", "sapo", "gpg", "cispo", "dppo_tv", "dro", "geo_mean", "value", "k1", "abs", "k2", "k3")


@pytest.mark.parametrize("name", FORMULAS)
@settings(max_examples=examples(30), deadline=None)
@given(seed=st.integers(0, 10_000))
def test_a_slope_is_the_derivative_that_autograd_finds(name: str, seed: int) -> None:
    """And what comes back for each token is multiplied with it."""
    generator = torch.Generator().manual_seed(seed)
    old, step, a, back = (torch.rand(4, 5, generator=generator, dtype=torch.float64) for _ in range(4))
    mask = (torch.rand(4, 5, generator=generator) > 0.2).long()
    old, a = -1 - 3 * old, 4 * a - 2
    new = old + 1.6 * step - 0.8 + 25 * (step > 0.9) - 25 * (step < 0.05)
    pair = [new.clone().requires_grad_() for _ in range(2)]
    found, expected = ours(name, old, pair[0], a, mask), plain(name, old, pair[1], a, mask)
    for loss, leaf in ((found, pair[0]), (expected, pair[1])):
        (loss * back * mask).sum().backward()
        leaf.grad = leaf.grad * mask  # type: ignore[operator]
    near = 1e-6 if name == "geo_mean" else 1e-9  # it divides by its length + 1e-8, as verl does
    torch.testing.assert_close(found * mask, expected * mask, rtol=near, atol=1e-12)
    torch.testing.assert_close(pair[0].grad, pair[1].grad, rtol=near, atol=1e-12)


@pytest.mark.parametrize("name", ["k1", "abs", "k2", "k3", "k3+"])
def test_the_reference_of_a_kl_has_the_opposite_gradient(name: str) -> None:
    new, ref = (torch.tensor([[-1.0, -2.0]], requires_grad=True), torch.tensor([[-1.5, -1.0]], requires_grad=True))
    F.kl_penalty(new, ref, name).sum().backward()
    assert new.grad is not None and ref.grad is not None and torch.equal(new.grad, -ref.grad)


def test_sums_and_whitening_have_their_gradient() -> None:
    x = torch.rand(4, 3, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 1, 1], [1, 0, 0]])
    with in_blocks_of(1):
        for function in (F.masked_mean, F.masked_var, F.masked_whiten, lambda x, m: F.masked_sum(x, m, -1)):
            assert torch.autograd.gradcheck(lambda x, f=function: f(x, mask), x)
        assert torch.autograd.gradcheck(lambda x: F.discounted_returns(x, mask, 0.9), x)
        assert torch.autograd.gradcheck(lambda x: F.gae(x * 2, x, mask, 0.9, 0.8), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_long_rows_neither_vanish_nor_overflow(dtype: torch.dtype) -> None:
    rewards = torch.zeros(2, 8_000, dtype=dtype)
    rewards[:, -1] = 1.0
    mask = torch.ones(2, 8_000).long()
    found = F.discounted_returns(rewards, mask, 0.99)
    assert (
        found.isfinite().all() and found[0, 0] < 1e-30 and found[0, -101].item() == pytest.approx(0.99**100, rel=1e-5)
    )
    advantages, targets = F.gae(rewards, torch.zeros_like(rewards), mask, 0.99, 0.95, whiten=False)
    assert advantages.isfinite().all() and targets[0, -11].item() == pytest.approx((0.99 * 0.95) ** 10, rel=1e-5)


def test_only_what_flows_back_through_a_token_that_counts_reaches_the_log_probs() -> None:
    new = torch.tensor([[-1.0, float("nan")]], requires_grad=True)
    made = F.ppo_clip(torch.tensor([[-1.0, 0.0]]), new, torch.ones(1, 2), torch.tensor([[1, 0]]))
    (made.loss * torch.tensor([[1.0, float("nan")]])).sum().backward()
    assert new.grad is not None and new.grad.tolist() == [[-1.0, 0.0]]


def test_blocks_are_larger_where_a_step_works_on_columns() -> None:
    assert returns._ELEMENTS > masking.ELEMENTS
