"""The golden numbers of verl 0.9.1 (its CPU results for one small batch)."""

from __future__ import annotations

import pytest
import torch

from workbench import functional as F
from workbench.functional import AdaptiveKL, aggregate, gae, grpo, kl_penalty, masked_mean, ppo_clip, value_loss

MASK = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 1], [1, 0, 0]])
GROUPS = torch.tensor([0, 0, 1, 1])
REWARDS = torch.tensor([[0, 0, 1.0], [0, 0, 0], [0, 0, 0.5], [-0.5, 0, 0]])
VALUES = torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.1, 0], [0, 0.2, 0.4], [-0.1, 0, 0]])
OLD = torch.tensor([[-1, -0.5, -2], [-0.2, -1.5, 0], [-0.7, -0.1, -0.3], [-2.5, 0, 0]])
NEW = torch.tensor([[-0.8, -0.9, -1.5], [-0.25, -1, 0], [-0.7, -0.4, -0.2], [-2, 0, 0]])
REF = torch.tensor([[-1.2, -0.6, -1], [-0.2, -1.1, 0], [-0.9, -0.1, -0.6], [-2, 0, 0]])
ADVANTAGES = torch.tensor([1, -1, 0.5, -0.5])[:, None].expand(4, 3)
INSIDE = MASK.bool()


def close(found: torch.Tensor, *expected: float) -> None:
    torch.testing.assert_close(found.flatten(), torch.tensor(expected), atol=2e-5, rtol=0)


def test_grpo() -> None:
    advantages, returns = grpo(REWARDS.sum(-1), GROUPS, MASK)
    close(advantages[:, 0], 0.70711, -0.70711, 0.70711, -0.70711)
    assert (advantages[~INSIDE] == 0).all() and torch.equal(advantages, returns)


SCORES = REWARDS.sum(-1)
SUM_PI_SQUARED = torch.tensor([[0.5, 0.6, 0.3], [0.7, 0.4, 0], [0.5, 0.8, 0.6], [0.2, 0, 0]])
BASELINES = torch.tensor([0.25, 0.25, -0.25, -0.25])


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (F.grpo_passk(SCORES, GROUPS, MASK), (1.41421, 0, 1.41421, 0)),
        (F.reinforce_plus_plus(REWARDS, MASK), (1.05409, -0.84327, 0.10541, -1.79196)),
        (F.reinforce_plus_plus_baseline(SCORES, GROUPS, MASK), (0.66667, -1.33333, 0.66667, -1.33333)),
        (F.gdpo(SCORES[:, None], GROUPS, MASK), (0.66667, -1.33333, 0.66667, -1.33333)),
        (F.rloo(SCORES, GROUPS, MASK), (1.0, -1, 1, -1)),
        (F.opo(SCORES, GROUPS, MASK), (0.4, -0.6, 0.25, -0.75)),
        (F.gpg(SCORES, GROUPS, MASK), (0.66667, -0.66667, 0.66667, -0.66667)),
        (F.remax(REWARDS, BASELINES, MASK), (0.75, -0.25, 0.75, -0.25)),
    ],
    ids=["passk", "r++", "r++ baseline", "gdpo", "rloo", "opo", "gpg", "remax"],
)
def test_estimators(found: tuple[torch.Tensor, torch.Tensor], expected: tuple[float, ...]) -> None:
    advantages, _ = found
    close(advantages[:, 0], *expected)
    assert torch.equal(advantages, advantages[:, :1] * MASK)


@pytest.mark.parametrize("estimator", [F.optimal_token_baseline, F.tir_optimal_token_baseline])
def test_token_baselines(estimator: object) -> None:
    advantages, returns = estimator(REWARDS, GROUPS, MASK, OLD, SUM_PI_SQUARED)  # type: ignore[operator]
    close(advantages[INSIDE], 0.07564, 0.46888, 1, -0.92436, -0.53112, 0.67146, 0.5, 0.5, -0.32854)
    assert (advantages[~INSIDE] == 0).all() and torch.equal(returns[:, 0], SCORES)


def test_gae() -> None:
    advantages, returns = gae(REWARDS, VALUES, MASK, gamma=1.0, lam=0.95)
    close(advantages[INSIDE], 1.19788, 1.06908, 0.9335, -1.35043, -0.73512, 0.47515, 0.08876, -0.31797, -1.36086)
    close(returns[INSIDE], 0.92675, 0.965, 1, 0.005, 0, 0.48025, 0.495, 0.5, -0.5)
    assert (advantages[~INSIDE] == 0).all()
    standing, _ = gae(REWARDS, VALUES, MASK, gamma=1.0, lam=0.95, zero_masked=False)
    assert torch.equal(standing[INSIDE], advantages[INSIDE])
    close(standing[1, 2], -0.52654)  # verl leaves it there


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("kl", (0.4, -0.3, -0.5, -0.05, 0.1, 0.2, -0.3, 0.4, 0)),
        ("mse", (0.08, 0.045, 0.125, 0.00125, 0.005, 0.02, 0.045, 0.08, 0)),
        ("low_var_kl", (0.07032, 0.04986, 0.14872, 0.00127, 0.00484, 0.01873, 0.04986, 0.07032, 0)),
        ("low_var_kl+", (0.07032, 0.04986, 0.14872, 0.00127, 0.00484, 0.01873, 0.04986, 0.07032, 0)),
        ("k2+", (0.08, 0.045, 0.125, 0.00125, 0.005, 0.02, 0.045, 0.08, 0)),
        ("abs", (0.4, 0.3, 0.5, 0.05, 0.1, 0.2, 0.3, 0.4, 0)),
    ],
)
def test_kl(kind: str, expected: tuple[float, ...]) -> None:
    close(kl_penalty(NEW, REF, kind)[INSIDE], *expected)


def test_vanilla_policy_loss() -> None:
    new = NEW.clone().requires_grad_()
    surrogate = ppo_clip(OLD, new, ADVANTAGES, MASK)
    loss = aggregate(surrogate.loss, MASK, "token-mean")
    loss.backward()
    assert loss.item() == pytest.approx(-0.118778, abs=1e-6)
    assert masked_mean(surrogate.clipped.float(), MASK).item() == pytest.approx(0.22222, abs=1e-5)
    assert masked_mean(OLD - NEW, MASK).item() == pytest.approx(-0.11667, abs=1e-5)
    assert new.grad is not None and new.grad[0, 0] == 0 and new.grad[0, 2] == 0 and new.grad[0, 1] != 0


@pytest.mark.parametrize(
    ("name", "settings", "expected", "clipped", "lower"),
    [
        ("vanilla", {}, -0.118778, 0.22222, 0.0),
        ("dppo_tv", {}, 0.125214, 0.0, 0.0),
        ("dppo_kl", {}, 0.125214, 0.0, 0.0),
        ("gspo", {}, -0.154419, None, 0.0),
        ("sapo", {}, 0.077351, 0.0, 0.0),
        ("gpg", {}, 0.177778, 0.0, 0.0),
        ("geo_mean", {}, 0.152232, 0.33333, 0.22222),
        ("dro", {"dro_beta": 0.1}, 0.183625, 0.0, 0.0),
        ("cispo", {}, 0.162523, 0.66667, 0.0),
        ("kl_cov", {"ppo_kl_coef": 0.1}, -0.165459, None, 0.0),
        ("clip_cov", {}, -0.118778, None, 0.0),
    ],
)
def test_policy_losses(
    name: str, settings: dict[str, float], expected: float, clipped: float | None, lower: float
) -> None:
    new = NEW.clone().requires_grad_()
    made = F.POLICY_LOSSES[name](OLD, new, ADVANTAGES, MASK, **settings)
    loss = aggregate(made.loss, MASK, made.aggregation or "token-mean")
    assert loss.item() == pytest.approx(expected, abs=1e-6)
    if clipped is not None:
        assert masked_mean(made.clipped.float(), MASK).item() == pytest.approx(clipped, abs=1e-5)
    assert masked_mean(made.clipped_lower.float(), MASK).item() == pytest.approx(lower, abs=1e-5)
    loss.backward()
    assert new.grad is not None and new.grad.isfinite().all() and (new.grad[~INSIDE] == 0).all()


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 5.44444),
        ("token-sum", 49),
        ("seq-mean-token-sum", 12.25),
        ("seq-mean-token-sum-norm", 4.08333),
        ("seq-mean-token-mean", 6.125),
    ],
)
def test_aggregation(mode: str, expected: float) -> None:
    assert aggregate(torch.arange(1.0, 13).reshape(4, 3), MASK, mode).item() == pytest.approx(expected, abs=1e-5)


def test_value_loss() -> None:
    returns = REWARDS.cumsum(-1)
    result = value_loss(VALUES + 0.7, returns, VALUES, MASK, clip=0.5)
    assert aggregate(result.loss, MASK).item() == pytest.approx(0.345, abs=1e-6)
    assert masked_mean(result.clipped.float(), MASK).item() == pytest.approx(0.11111, abs=1e-5)


def test_adaptive_controller() -> None:
    controller = AdaptiveKL(0.001, target=0.1, horizon=10_000)
    controller.update(0.5, 1024)
    assert controller.value == pytest.approx(0.00102048)
    controller.update(0.0, 1024)
    assert controller.value == pytest.approx(0.0009995806, abs=1e-9)
