"""Rollout correction by hand, and beside verl (it was 0.9.1) where it is installed: weights, masks and every metric."""

from __future__ import annotations

import inspect
import itertools
import math
from typing import Any

import pytest
import torch

from workbench import functional as F
from workbench.functional import correction
from workbench.stages import CorrectionSettings

KINDS = correction.REJECTIONS


def one(value: Any) -> float:
    return float(value.value)


# --- by hand --------------------------------------------------------------------------------------


def test_weights_truncate_mask_and_normalise() -> None:
    old = torch.tensor([[-1.0, -1.0, -1.0]])
    rollout, mask = torch.tensor([[-1.0, -2.0, 0.0]]), torch.ones(1, 3).long()
    low = math.exp(-1)
    assert correction.importance_weights(old, rollout, mask).tolist()[0] == pytest.approx([1.0, 2.0, low])
    masked = correction.importance_weights(old, rollout, mask, lower=0.5, upper=2.0)
    assert masked.tolist()[0] == [1.0, 0.0, 0.0]
    sequence = correction.importance_weights(old, rollout, mask, level="sequence")
    assert sequence.tolist()[0] == pytest.approx([1.0] * 3)  # the log-ratios add to 0
    normal = correction.importance_weights(old, rollout, mask, batch_normalize=True)
    assert float(normal.mean()) == pytest.approx(1.0)


def test_sequence_weights_are_normalised_over_rows_not_tokens() -> None:
    """N8: rows of 1 and 3 tokens with weights 2 and 1 have the mean 1.5, not 5/4; the empty third row is none."""
    rollout = torch.tensor([[-math.log(2.0), 0, 0], [0, 0, 0], [0, 0, 0]])
    mask = torch.tensor([[1, 0, 0], [1, 1, 1], [0, 0, 0]])
    found = correction.importance_weights(
        torch.zeros(3, 3), rollout, mask, level="sequence", upper=5.0, batch_normalize=True
    )
    expected = [[2 / 1.5, 0, 0], [1 / 1.5] * 3, [0] * 3]
    assert found.tolist() == [pytest.approx(row) for row in expected]


def test_asymmetric_k1_tests_minus_log_r() -> None:
    """N1: of the ratios 1.5 and 0.65 the bounds 0.6 to 1.4 keep the first: 1/1.4 = 0.71 to 1/0.6 = 1.67."""
    old, mask = torch.tensor([[1.5, 0.65]]).log(), torch.ones(1, 2).long()
    rollout = torch.zeros(1, 2)
    out = correction.rejected(old, rollout, mask, "token_k1", lower=0.6, upper=1.4)
    assert out.tolist() == [[False, True]]
    both = correction.rejected(old, rollout, mask, "token_k1", upper=1.4)  # symmetric: the same in both readings
    assert both.tolist() == [[True, True]]


def test_weights_do_not_know_what_is_rejected() -> None:
    """N3: the sequence weight is the product over all tokens, though one of them is rejected."""
    old, mask = torch.tensor([[math.log(1.3), math.log(2.2)]]), torch.ones(1, 2).long()
    how = CorrectionSettings(rollout_is="sequence", rollout_is_threshold=5.0, rollout_rs={"token_k1": 2.0})
    made = correction.corrected(old, torch.zeros(1, 2), mask, **how.arguments())
    assert made.mask.tolist() == [[1, 0]] and made.mask.dtype == mask.dtype
    assert made.weights is not None and made.weights[0].tolist() == pytest.approx([2.86, 2.86])
    assert one(made.metrics["rollout_is_mean"]) == pytest.approx(2.86)
    # a share of rows with any token rejected, as verl counts; not of rows that are gone
    assert one(made.metrics["rollout_rs_seq_masked_fraction"]) == 1
    assert one(made.metrics["rollout_rs_masked_fraction"]) == 0.5


@pytest.mark.parametrize("kind", KINDS)
def test_rejections(kind: str) -> None:
    old = torch.tensor([[-1.0, -1.0], [-1.0, -1.0], [-1.0, -1.0]])
    rollout = torch.tensor([[-1.0, -1.0], [-1.1, -1.0], [-5.0, -1.0]])
    mask = torch.tensor([[1, 1], [1, 1], [1, 0]])
    out = correction.rejected(old, rollout, mask, kind, upper=1.5)
    assert not out[0].any() and out[2, 0] and not out[2, 1] and not out[1].any()
    nan = rollout.clone()
    nan[0, 0] = float("nan")
    assert correction.rejected(old, nan, mask, kind, upper=1.5)[0, 0]


def test_impossible_bounds_and_names_are_refused() -> None:
    ones, mask = torch.ones(1, 1), torch.ones(1, 1).long()
    for given in ({"upper": -1.0}, {"upper": math.nan}, {"upper": math.inf}, {"lower": 5.0, "upper": 0.5}):
        with pytest.raises(ValueError, match="expected 0 < lower"):
            correction.importance_weights(ones, ones, mask, **given)
        with pytest.raises(ValueError, match="expected 0 < lower"):
            correction.rejected(ones, ones, mask, "token_k1", **given)
    with pytest.raises(ValueError, match="an upper one alone but for k1"):
        correction.rejected(ones, ones, mask, "token_k2", lower=0.5, upper=1.0)
    with pytest.raises(ValueError, match="kind of rejection"):
        correction.rejected(ones, ones, mask, "token_k9", upper=1.0)
    with pytest.raises(ValueError, match="'token' or 'sequence'"):
        correction.importance_weights(ones, ones, mask, level="row")


def test_effective_sample_size() -> None:
    mask = torch.ones(1, 4)
    assert correction.effective_sample_size(torch.ones(1, 4), mask) == pytest.approx(1.0)
    assert correction.effective_sample_size(torch.tensor([[1.0, 0, 0, 0]]), mask) == pytest.approx(0.25)
    assert correction.effective_sample_size(torch.zeros(1, 4), mask) == 0  # all weights out of their band


def test_equal_policies_are_no_distance_apart() -> None:
    logs, mask = -torch.rand(3, 4), torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
    found = correction.off_policy(logs, logs, mask)
    assert all(one(found[name]) == 0 for name in ("kl", "k3_kl", "chi2_token")) and one(found["ppl_ratio"]) == 1
    assert correction.off_policy(logs, logs, torch.zeros_like(mask)) == {}
    how = CorrectionSettings(rollout_is="token", rollout_rs="token_k1,seq_max_k2", rollout_rs_threshold="2.0,1.0")
    empty = correction.corrected(logs, logs, torch.zeros_like(mask), **how.arguments())
    assert set(empty.metrics) == set() and empty.weights is not None and not empty.weights.any()


def test_geo_mean_takes_the_geometric_mean_of_a_rows_weights() -> None:
    """N6: its loss stands on the first token, whose own weight alone had been taken, 0.5 here."""
    old, new = torch.zeros(1, 3), torch.tensor([[0.1, -0.1, 0.0]])
    advantages, mask = torch.full((1, 3), -1.0), torch.ones(1, 3).long()
    weights = torch.tensor([[0.5, 2.0, 1.5]])
    made = F.POLICY_LOSSES["geo_mean"](old, new, advantages, mask)
    found = F.aggregate(made.weighted(weights, mask), mask, made.aggregation or "")
    assert found.item() == pytest.approx(made.loss[0, 0].item() * 1.5 ** (1 / 3), rel=1e-5)
    plain = F.POLICY_LOSSES["gpg"](old, new, advantages, mask)
    torch.testing.assert_close(plain.weighted(weights, mask), plain.loss * weights)


def test_metrics_of_losses_mean_what_verl_means() -> None:
    """N7: dropped tokens alone for clip_cov, |new − old| for kl_cov, the truncated among those kept for dppo."""
    old, mask = torch.tensor([[-1.0, -1.0, -2.0, -3.0]]), torch.ones(1, 4).long()
    new, advantages = torch.tensor([[-0.2, -1.2, -2.0, -0.9]]), torch.tensor([[1.0, 1.0, 1.0, -1.0]])
    given = (old, new, advantages, mask)
    found = {name: F.POLICY_LOSSES[name](*given).metrics for name in ("clip_cov", "kl_cov", "dppo_tv", "dppo_kl")}
    means = {name: {key: float(x.double().mean()) for key, x in of.items()} for name, of in found.items()}
    assert means["clip_cov"]["pg_clipfrac"] == 0 and means["clip_cov"]["ppo_clipfrac"] == 0.25
    assert means["kl_cov"]["ppo_kl"] == pytest.approx((0.8 + 0.2 + 2.1) / 4)
    assert means["kl_cov"]["pg_clipfrac"] == 0 and means["kl_cov"]["kl_cov_frac"] == 0.25
    assert means["dppo_tv"]["pg_clipfrac_lower"] == means["dppo_kl"]["pg_clipfrac_lower"] == 0.25  # the last: e^2.1 > 3


# --- beside verl ----------------------------------------------------------------------------------


def batch(seed: int) -> dict[str, torch.Tensor]:
    """Rows with holes as tools leave them, of one token and of none; NaN outside the mask."""
    generator = torch.Generator().manual_seed(seed)
    rows, width = 8, 9
    lengths = torch.randint(1, width + 1, (rows, 1), generator=generator)
    mask = ((torch.arange(width) < lengths) & (torch.rand(rows, width, generator=generator) > 0.2)).long()
    mask[seed % rows] = 0
    rollout = -torch.rand(rows, width, generator=generator) * 3
    old = rollout + (torch.rand(rows, width, generator=generator) - 0.5) * [0.05, 0.8, 3.0][seed % 3]
    nan = torch.where(mask.bool(), 0.0, float("nan"))
    return {"old": old + nan, "rollout": rollout + nan, "mask": mask}


BLOCKS: list[dict[str, Any]] = [
    *({"rollout_is": level, "rollout_is_threshold": threshold, "rollout_is_batch_normalize": normal}
      for level, threshold, normal in itertools.product(("token", "sequence"), (1.5, "0.7_1.6"), (False, True))),
    *({"rollout_rs": kind, "rollout_rs_threshold": "0.6_1.4" if kind.endswith("k1") else 0.02} for kind in KINDS),
    {"rollout_is": "sequence", "rollout_rs": "token_k1, seq_max_k2,token_k1", "rollout_rs_threshold": "1.3,0.3"},
    {"rollout_is": "token", "rollout_rs": "token_k1,seq_mean_k1", "rollout_rs_threshold": "2.0"},
]  # fmt: skip


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: "-".join(map(str, block.values())))
def test_everything_is_verls(block: dict[str, Any], seed: int) -> None:
    helper = pytest.importorskip("verl.trainer.ppo.rollout_corr_helper", reason="verl is not installed here")
    b = batch(seed)
    made = correction.corrected(b["old"], b["rollout"], b["mask"], **CorrectionSettings(**block).arguments())
    if made.weights is not None and not made.weights.any():  # where verl divides by 0
        assert one(made.metrics["rollout_is_eff_sample_size"]) == 0 and made.weights.isfinite().all()
        return
    weights, mask, theirs = helper.compute_rollout_correction_and_rejection_mask(
        b["old"], b["rollout"], b["mask"], **block
    )
    torch.testing.assert_close(made.mask, mask)
    if weights is not None:
        assert made.weights is not None
        # verl leaves NaN outside the mask where a token's own ratio is NaN
        torch.testing.assert_close(made.weights, weights.batch["rollout_is_weights"].nan_to_num(), rtol=1e-5, atol=1e-6)
    ours = {f"rollout_corr/{name}": one(value) for name, value in made.metrics.items()}
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        # verl's deviations are differences of squares in float32
        rounding = 4e-4 if name.endswith("_std") else 2e-6
        assert ours[name] == pytest.approx(value, rel=2e-5, abs=rounding), name


@pytest.mark.parametrize("seed", range(3))
def test_half_precision_is_computed_in_float32(seed: int) -> None:
    b = batch(seed)
    half = {name: b[name].bfloat16() for name in ("old", "rollout")}
    for block in BLOCKS:
        how = CorrectionSettings(**block).arguments()
        found = correction.corrected(half["old"], half["rollout"], b["mask"], **how)
        same = correction.corrected(half["old"].float(), half["rollout"].float(), b["mask"], **how)
        assert torch.equal(found.mask, same.mask) and found.metrics == same.metrics
        assert found.weights is None or (same.weights is not None and torch.equal(found.weights, same.weights))


@pytest.mark.parametrize("level", correction.LEVELS)
def test_ratios_beyond_exp_20(level: str) -> None:
    """Verl adds up a row's log-ratios as they are, and bounds the sum."""
    helper = pytest.importorskip("verl.trainer.ppo.rollout_corr_helper", reason="verl is not installed here")
    old, rollout = torch.tensor([[-1.0, -60.0], [-30.0, -1.0]]), torch.tensor([[-50.0, -1.0], [-1.0, -1.0]])
    mask = torch.ones(2, 2).long()
    settings = {"rollout_is": level, "rollout_is_threshold": 1e9, "rollout_rs": "seq_sum_k1", "rollout_rs_threshold": 9}
    weights, kept, theirs = helper.compute_rollout_correction_and_rejection_mask(old, rollout, mask, **settings)
    made = correction.corrected(old, rollout, mask, **CorrectionSettings(**settings).arguments())
    torch.testing.assert_close(made.weights, weights.batch["rollout_is_weights"])
    assert torch.equal(made.mask, kept)
    for name, value in made.metrics.items():
        # verl adds 1e-8 to a mean weight of 2e-5
        wanted = pytest.approx(theirs[f"rollout_corr/{name}"], rel=2e-3 if "eff" in name else 1e-4, abs=1e-6)
        assert one(value) == wanted, name


@pytest.mark.parametrize("weigh", [False, True])
@pytest.mark.parametrize("name", sorted(F.POLICY_LOSSES))
def test_losses_with_weights_gradients_and_metrics_are_verls(name: str, weigh: bool) -> None:
    core = pytest.importorskip("verl.trainer.ppo.core_algos", reason="verl is not installed here")
    workers = pytest.importorskip("verl.workers.config")
    held = {"clip_cov_lb": 0.01, "clip_cov_ratio": 0.2, "kl_cov_ratio": 0.2, "ppo_kl_coef": 0.1, "dro_beta": 0.1}
    policy = workers.PolicyLossConfig(loss_mode=name, **held)
    config = workers.ActorConfig(
        strategy="fsdp", ppo_micro_batch_size_per_gpu=1, rollout_n=1, policy_loss=policy, clip_ratio_c=1.3
    )
    for seed in range(4):
        b = batch(seed)
        keep = b["mask"].sum(-1) > 0 if name == "geo_mean" else slice(None)  # verl's geo_mean counts empty rows
        mask, old = b["mask"][keep], b["rollout"].nan_to_num(-1.0)[keep]
        drawn = torch.Generator().manual_seed(seed + 10)
        advantages = torch.randn(old.shape, generator=drawn)
        weights = correction.importance_weights(b["old"], b["rollout"], b["mask"])[keep] if weigh else None
        new, theirs_new = (b["old"].nan_to_num(-1.0)[keep].clamp(max=-1e-3).requires_grad_() for _ in range(2))
        torch.manual_seed(seed)  # clip_cov draws
        theirs, measured = core.get_policy_loss_fn(name)(
            old_log_prob=old, log_prob=theirs_new, advantages=advantages, response_mask=mask,
            loss_agg_mode="token-mean", config=config, rollout_is_weights=weights,
        )  # fmt: skip
        theirs.backward()
        known = inspect.signature(F.POLICY_LOSSES[name]).parameters
        taken = {key: value for key, value in {**held, "clip_ratio_c": 1.3}.items() if key in known}
        torch.manual_seed(seed)
        made = F.POLICY_LOSSES[name](old, new, advantages, mask, **taken)
        values = made.loss if weights is None else made.weighted(weights, mask)
        ours = F.aggregate(values, mask, made.aggregation or "token-mean")
        ours.backward()
        assert ours.item() == pytest.approx(theirs.item(), rel=1e-4, abs=1e-6)
        torch.testing.assert_close(new.grad, theirs_new.grad * mask, atol=1e-6, rtol=1e-4)
        found = {key: float(F.masked_mean(one.float(), mask)) for key, one in made.metrics.items()}
        for key, value in measured.items():
            assert found[key.removeprefix("actor/")] == pytest.approx(value, rel=1e-4, abs=1e-6), key
