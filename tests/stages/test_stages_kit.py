"""TRL's measures as settings of `PolicyLoss` and of recipes: beside `TrlLoss`, at their degenerate values, and in training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb
from workbench import functional as F
from workbench.base.errors import PipelineError, SettingError
from workbench.dataproto.core import DataProto
from workbench.functional.returns import length_adaptive_lam
from workbench.functional.trl import AdaptiveEntropy
from workbench.rewards import Reward
from workbench.stages import Advantage, PolicyLoss, TrlLoss, Update
from workbench.stages.terms import counts_of

KL = {"kl_coef": 0.3, "kl_type": "k3"}


def batch() -> tuple[DataProto, dict[str, torch.Tensor]]:
    """Ragged rows, with log-probs that moved by up to a nat, and the outputs of a pass, which have gradients."""
    torch.manual_seed(5)
    mask = (torch.arange(9) < torch.tensor([9, 4, 7, 1, 6])[:, None]).float()
    mask[2, 3] = 0  # a tool's token
    old = -2 * torch.rand(5, 9)
    columns = {name: old - 0.5 * torch.randn(5, 9) for name in ("ref_log_prob", "rollout_log_probs")}
    columns |= {"old_log_probs": old, "response_mask": mask}
    columns |= {"advantages": torch.tensor([1.0, -1, -0.5, 0.7, -2])[:, None] * mask}
    outputs = {
        "log_probs": (old + 0.6 * torch.randn(5, 9)).requires_grad_(),
        "entropy": torch.rand(5, 9).requires_grad_(),
    }
    return DataProto.from_single_dict(columns), outputs


def lost(loss: Any) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
    rows, outputs = batch()
    out = loss(outputs, rows, counts_of(rows))
    (slope,) = torch.autograd.grad(out.loss, outputs["log_probs"])
    return out.loss.detach(), slope, {name: float(one.result()) for name, one in out.metrics.items()}


@pytest.mark.parametrize(
    ("ours", "theirs", "metric"),
    [
        ({"clip_ratio_c": 1.4}, {"delta": 1.4}, "pg_clipfrac_lower"),
        ({"use_bias_correction_kl": True, **KL}, {"delta": 3.0, **KL}, "kl_unweighted"),
        ({"off_policy_mask_threshold": 0.1}, {"delta": 3.0, "off_policy_sampler": True, "off_policy_mask_threshold": 0.1}, "off_policy_masked"),
        ({"top_entropy_quantile": 0.3}, {"delta": 3.0, "top_entropy_quantile": 0.3}, "top_entropy_share"),
    ],
)  # fmt: skip
def test_each_measure_is_that_of_the_loss_that_is_held_beside_trl(
    ours: dict[str, Any], theirs: dict[str, Any], metric: str
) -> None:
    """The dual clip at c is the two-sided clip at δ = c, where δ is above 1 + `clip_ratio_high`."""
    mine, expected, plain = lost(PolicyLoss(**ours)), lost(TrlLoss(**theirs)), lost(PolicyLoss(**KL) if "kl_coef" in ours else PolicyLoss())  # fmt: skip
    assert torch.allclose(mine[0], expected[0], atol=1e-6) and torch.allclose(mine[1], expected[1], atol=1e-6)
    assert not torch.allclose(mine[1], plain[1], atol=1e-3)
    assert mine[2][f"actor/{metric}"] > 0


def test_where_a_measure_does_nothing_the_loss_has_the_same_bits() -> None:
    before = lost(PolicyLoss(entropy_coeff=0.01))
    nothing = {
        "off_policy_mask_threshold": 1e9,
        "top_entropy_quantile": 1.0,
        "entropy_target": 0.0,
        "entropy_delta": 0.0,
    }
    after = lost(PolicyLoss(entropy_coeff=0.01, **nothing))
    assert torch.equal(before[0], after[0]) and torch.equal(before[1], after[1])
    assert after[2]["actor/off_policy_masked"] == 0
    assert not {*nothing, "use_bias_correction_kl"} & Update(None, PolicyLoss()).settings().keys()  # type: ignore[arg-type]


def test_what_has_no_meaning_is_refused() -> None:
    for wrong in (
        {"top_entropy_quantile": 1.5},
        {"top_entropy_quantile": 0.5, "loss_mode": "geo_mean"},
        {"entropy_coeff_min": 2.0},
    ):
        with pytest.raises(SettingError, match=next(iter(wrong))):
            PolicyLoss(**wrong)
    with pytest.raises(SettingError, match="clip_ratio_c"):
        wb.recipes.grpo(None, delta=4.0)  # type: ignore[call-arg]


def test_the_weight_of_the_entropy_adapts_by_hand() -> None:
    one = AdaptiveEntropy(0.01, target=0.5, delta=0.004, bounds=(0.008, 0.018))
    assert one.weight == 0  # as TRL 1.16, whose _compute_loss, driven seven times, has each number below
    seen = []
    for entropy in (0.4, 0.5, 0.3, 0.6, 0.7, 0.8, 0.2):
        one.update(entropy)
        seen.append((round(one.value, 6), round(one.weight, 6)))
    assert seen == [(0.014, 0.014), (0.018, 0.018), (0.018, 0.018), (0.014, 0), (0.01, 0), (0.008, 0), (0.012, 0.012)]
    other = AdaptiveEntropy(0.5, target=0.5)
    other.load_state(one.state())
    assert (other.value, other.last) == (one.value, 0.2)
    other.load_state({})
    assert other.value == one.value


def test_a_critic_with_a_lambda_of_its_own() -> None:
    """One row, rewards 0, 0, 1, values 0.5, 0.5, 0.5, γ = 1: δ = 0, 0, 0.5. With λ = 0.5 the advantages are 0.125, 0.25, 0.5;
    the returns of the critic's λ = 1 are 1, 1, 1."""
    rewards, values, mask = torch.tensor([[0.0, 0, 1]]), torch.full((1, 3), 0.5), torch.ones(1, 3)
    advantages, returns = F.decoupled_gae(rewards, values, mask, 1.0, 0.5)
    assert returns.tolist() == [[1, 1, 1]]
    whitened = wb.functional.masked_whiten(torch.tensor([[0.125, 0.25, 0.5]]), mask)
    assert torch.allclose(advantages, whitened, atol=1e-6)
    same, plain = F.decoupled_gae(rewards, values, mask, 1.0, 0.9, 0.9), F.gae(rewards, values, mask, 1.0, 0.9)
    assert torch.equal(same[0], plain[0]) and torch.equal(same[1], plain[1])
    assert length_adaptive_lam(torch.tensor([0.0, 20, 40, 200]), 0.05).tolist() == pytest.approx([0, 0, 0.5, 0.9])


def varied(response: str) -> float:
    return (sum(map(ord, response)) % 5) / 4


@pytest.mark.slow
def test_grpo_with_the_kit_trains_resumes_and_is_audited(tiny: str, tmp_path: Path) -> None:
    """The entropy's weight after a resume is that of a run that was never stopped."""
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256, limit=16)
    kit: dict[str, Any] = {"entropy_target": 50.0, "off_policy_mask_threshold": 0.5, "top_entropy_quantile": 0.5}
    kit |= {"mask_truncated": True, "use_bias_correction_kl": True, "kl_coef": 0.01, "clip_ratio_c": 4.0}

    def pipe() -> Any:
        engine = wb.engines.local(tiny, device="cpu", lr=1e-4, self_check=False)
        return wb.recipes.grpo(engine, Reward(varied, in_process=True), group_size=4, max_tokens=24, **kit)

    how: dict[str, Any] = {"batch_size": 2, "display": None, "save_freq": 1, "trace_freq": 1}
    whole = pipe()
    run = wb.train_blocking(whole, rows, steps=3, run=tmp_path / "a", **how)
    assert [row["actor/entropy_coeff"] for row in run.rows] == pytest.approx([0, 0.005, 0.01])
    assert {"mask_truncated/share", "actor/off_policy_masked", "actor/top_entropy_share", "actor/kl_unweighted"} <= {*run.rows[-1]}  # fmt: skip
    assert "mask_truncated" in whole.names and run.audit().agrees
    wb.train_blocking(pipe(), rows, steps=2, run=tmp_path / "b", **how)
    again = pipe()
    resumed = wb.train_blocking(
        again, rows, steps=3, run=tmp_path / "b", resume="auto", allow_changes=["train.steps"], **how
    )
    assert again.state() == whole.state() and resumed.rows[-1]["actor/loss"] == run.rows[-1]["actor/loss"]
    step = wb.load_run(tmp_path / "a").stepper(3).run()
    assert step.trace.metrics["actor/entropy_coeff"] == run.rows[2]["actor/entropy_coeff"]


@pytest.mark.slow
def test_each_measure_can_be_tried_on_one_batch(tiny: str) -> None:
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256, limit=4)
    engine = wb.engines.local(tiny, device="cpu", lr=1e-2, self_check=False)
    reward = Reward(varied, in_process=True)
    pipe = wb.recipes.grpo(engine, reward, group_size=4, max_tokens=24, kl_coef=0.5, entropy_coeff=0.01)
    batch = wb.Stepper(pipe, rows.batch(4)).run(until="advantage").batch
    kit: dict[str, Any] = {"clip_ratio_c": 1.01, "use_bias_correction_kl": True, "off_policy_mask_threshold": 0.001}
    kit |= {"top_entropy_quantile": 0.2, "entropy_target": 50.0, "mask_truncated": True}
    kit["advantage"] = Advantage(F.grpo_batch)
    for name, value in kit.items():
        found = wb.what_if(pipe, batch, updates=2, **{name: value})
        assert found.cosine < 1 - 1e-6 or found.changed.moved_norm == 0, name
    strict: dict[str, Any] = {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2.0", "bypass_mode": True}
    with pytest.raises(SettingError, match="mask_truncated"):  # that loss computes its `loss_mask` itself
        wb.what_if(wb.recipes.with_rollout_correction(pipe, **strict), batch, mask_truncated=True)
    masked = wb.recipes.grpo(engine, reward, group_size=4, mask_truncated=True)
    with pytest.raises(PipelineError, match="'update_actor' computes loss_mask anew.*no stage 'mask_truncated'"):
        wb.recipes.with_rollout_correction(masked, **strict)


@pytest.mark.slow
def test_a_reference_follows_the_policy_and_is_resumed_and_replayed(tiny: str, tmp_path: Path) -> None:
    """α = 0 leaves each number of a frozen reference; with α = ½ after step 2 its weights are half of each."""
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256, limit=16)
    how: dict[str, Any] = {"batch_size": 2, "display": None, "save_freq": 1, "trace_freq": 1}

    def pipe(**kit: Any) -> Any:
        engine = wb.engines.local(tiny, device="cpu", lr=1e-3, self_check=False)
        return wb.recipes.grpo(engine, Reward(varied, in_process=True), group_size=4, max_tokens=12, kl_coef=0.1, **kit)

    def weights(pipeline: Any, role: str) -> dict[str, torch.Tensor]:
        return {name: one.clone() for name, one in pipeline.learners()[role].snapshot()["weights"].items()}

    frozen = wb.train_blocking(pipe(), rows, steps=3, run=tmp_path / "frozen", **how)
    still = wb.train_blocking(pipe(ref_sync_steps=2, ref_mixup_alpha=0.0), rows, steps=3, run=tmp_path / "still", **how)
    assert [row["actor/loss"] for row in still.rows] == [row["actor/loss"] for row in frozen.rows]

    moving = pipe(ref_sync_steps=2, ref_mixup_alpha=0.5)
    began = weights(moving, "reference")
    wb.train_blocking(moving, rows, steps=2, run=tmp_path / "moved", **how)
    policy, reference = weights(moving, "actor"), weights(moving, "reference")
    for name, mixed in reference.items():
        assert torch.allclose(mixed, 0.5 * (began[name] + policy[name]), atol=1e-7)
    assert any(not torch.equal(one, began[name]) for name, one in reference.items())

    again = pipe(ref_sync_steps=2, ref_mixup_alpha=0.5)
    run = wb.train_blocking(
        again, rows, steps=3, run=tmp_path / "moved", resume="auto", allow_changes=["train.steps"], **how
    )
    assert [row["reference/synced"] for row in run.rows] == [0, 1, 0]
    whole = wb.train_blocking(pipe(ref_sync_steps=2, ref_mixup_alpha=0.5), rows, steps=3, run=tmp_path / "whole", **how)
    assert [row["actor/kl_loss"] for row in whole.rows] == [row["actor/kl_loss"] for row in run.rows]
    assert whole.rows[-1]["actor/kl_loss"] != frozen.rows[-1]["actor/kl_loss"]
    assert whole.audit().agrees, whole.audit()
    step = wb.load_run(tmp_path / "whole").stepper(3).run()
    assert step.trace.metrics["actor/kl_loss"] == whole.rows[-1]["actor/kl_loss"]
    assert "training/policy_lag/max" not in step.trace["ref_log_prob"].metrics
    with pytest.raises(SettingError, match="ref_sync_steps"):
        pipe(ref_sync_steps=2, reference=moving.learners()["reference"])
