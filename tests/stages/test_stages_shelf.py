"""The stages that algorithms bring: rollout correction, the exact KL, resampling."""

from __future__ import annotations

import pytest
import torch

import workbench as wb
from workbench import functional as F
from workbench.base.errors import PipelineError, SettingError


@pytest.fixture(scope="module")
def batch() -> wb.DataProto:
    return wb.Trace.load("data/arith-batch").batch


@pytest.mark.slow
def test_the_exact_kl_is_what_the_estimates_estimate(tiny: str, batch: wb.DataProto) -> None:
    engine = wb.engines.local(tiny, lr=2e-3, device="cpu")
    reference = engine.reference()
    stage = wb.stages.ExactKL(engine, reference)
    assert float(stage(batch).batch["full_kl"].abs().max()) < 1e-6
    update = wb.stages.Update(engine, wb.stages.PolicyLoss(), allow_stale=True)
    for _ in range(3):
        update(batch)
    found = stage(batch).batch["full_kl"]
    mask = batch["response_mask"].bool()
    assert (found[mask] >= 0).all() and float(found[mask].mean()) > 1e-3 and (found[~mask] == 0).all()
    # the mean of k1 over samples of the policy itself is the exact one, within its noise
    sampled = wb.stages.LogProb(engine)(
        wb.stages.Rollout(engine, group_size=64, sampling=wb.SamplingSettings(max_tokens=1))(
            wb.rows("data/arith/train.parquet", max_prompt_length=256).batch(8)
        ).batch
    ).batch
    ref = reference.compute_log_probs(sampled)["log_probs"]
    k1 = F.kl_penalty(sampled["old_log_probs"], ref, "k1")
    exact = stage(sampled).batch["full_kl"]
    spread = float(k1.std()) / len(k1) ** 0.5
    assert abs(float(k1.mean()) - float(exact.mean())) < 4 * spread + 1e-4
    with pytest.raises(PipelineError, match="one-token estimate"):
        wb.stages.ExactKL(object(), object())


def test_full_kl_by_hand() -> None:
    p, q = torch.tensor([0.5, 0.5]), torch.tensor([0.9, 0.1])
    expected = 0.5 * float((p / q).log().sum())
    assert float(F.full_kl(p.log(), q.log())) == pytest.approx(expected)
    ruled_out = torch.tensor([0.0, float("-inf")])
    assert float(F.full_kl(ruled_out, torch.zeros(2))) == pytest.approx(0.693147, abs=1e-5)


def test_gdpo_compares_parts_of_the_reward(batch: wb.DataProto) -> None:
    short = (batch["response_mask"].sum(-1) < 18).float()
    parted = batch.with_columns({"reward/correct": batch["reward"], "reward/short": short})
    stage = wb.stages.Advantage(F.gdpo, parts=("correct", "short"), weights=[1.0, 0.5])
    assert {"reward/correct", "reward/short"} <= set(stage.reads)
    kept = parted.without("advantages", "returns", "token_level_rewards")
    both = stage(kept).batch["advantages"]
    alone = wb.stages.Advantage(F.gdpo, parts=("correct",))(kept).batch["advantages"]
    assert both.isfinite().all() and not torch.equal(both, alone)
    before = [wb.stages.Rollout(None), wb.stages.Reward(lambda response: 0.0)]
    assert wb.Pipeline([*before, stage])["advantage"] is stage  # the reward's function chooses the names of its parts
    with pytest.raises(PipelineError, match="add the stage 'reward' before 'advantage'"):
        wb.Pipeline([stage])
    with pytest.raises(PipelineError, match="name them: parts="):
        wb.stages.Advantage(F.gdpo)


def test_resampling_draws_the_telling_rows(batch: wb.DataProto) -> None:
    out = wb.stages.Resample()(batch)
    assert len(out.batch) == len(batch) and (out.batch["reward"] > 0).all()  # |0|² is 0
    assert torch.equal(out.batch["responses"], batch["responses"][out.rows])
    again = wb.stages.Resample()(batch)
    assert torch.equal(out.rows, again.rows)
    with pytest.raises(SettingError, match="reweight_method"):
        wb.stages.Resample(reweight_method="none")
