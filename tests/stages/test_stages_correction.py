"""Rollout correction in stages: the columns it writes, what trains on them, and bypass mode in the loss."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import workbench as wb
from workbench.base.errors import PipelineError, SettingError
from workbench.base.metrics import join, reduce
from workbench.engines.protocol import LossCounts
from workbench.replay.rebuild import rebuilt
from workbench.runs import updates
from workbench.runs.settings import written_down
from workbench.stages import CorrectionSettings, PolicyLoss, RolloutCorrection, Update, ValueLoss
from workbench.stages.update import loss_mask
from workbench.steps.trace import perform


@pytest.fixture(scope="module")
def batch() -> wb.DataProto:
    return wb.Trace.load("data/arith-batch").batch


@pytest.fixture
def engine(tiny: str) -> Any:
    return wb.engines.local(tiny, lr=1e-3, device="cpu")


def apart(batch: wb.DataProto) -> wb.DataProto:
    """The first eight rows were sampled by a policy half a nat away; one token of the ninth by one two nats away."""
    gap = 0.5 * (torch.arange(len(batch)) < 8)[:, None] * torch.ones_like(batch["rollout_log_probs"])
    gap[8, 1] = 2.0
    return batch.with_columns({"rollout_log_probs": batch["rollout_log_probs"] - gap})


def short(response: str) -> float:
    return sum(letter.isdigit() for letter in response) / 10


# --- the stage ------------------------------------------------------------------------------------


def test_correction_only_measures_unless_told(batch: wb.DataProto) -> None:
    phase = perform(RolloutCorrection(), batch)
    assert phase.batch.columns == batch.columns and abs(phase.metrics["rollout_corr/kl"]) < 1e-5
    assert {"rollout_corr/k3_kl", "rollout_corr/ppl_ratio", "rollout_corr/chi2_token"} <= set(phase.metrics)


def test_rejection_has_a_mask_of_its_own(batch: wb.DataProto) -> None:
    off = apart(batch)
    stage = RolloutCorrection(
        rollout_is="token", rollout_is_threshold=10, rollout_rs={"seq_mean_k1": 1.3, "token_k2": 0.5}
    )
    assert stage.writes == ("rollout_is_weights", "loss_mask")
    made = perform(stage, off).batch
    assert torch.equal(made["response_mask"], batch["response_mask"])
    assert (made["loss_mask"][:8] == 0).all() and made["loss_mask"][8, 1] == 0
    kept = batch["response_mask"].clone()
    kept[:8], kept[8, 1] = 0, 0
    assert torch.equal(made["loss_mask"], kept) and made["loss_mask"].dtype == kept.dtype
    # weights first, on the whole mask
    inside = batch["response_mask"][:8].bool()
    torch.testing.assert_close(
        made["rollout_is_weights"][:8][inside], torch.full((int(inside.sum()),), math.exp(0.5)), rtol=2e-3, atol=0
    )
    assert json.dumps(stage.settings()) and stage.settings()["rollout_rs_threshold"] == f"{1 / 1.3}_1.3,0.5"


def test_bypass_writes_the_samplers_log_probs_and_nothing_else(batch: wb.DataProto) -> None:
    bypassed = RolloutCorrection(bypass_mode=True)
    assert bypassed.writes == ("old_log_probs",) and "old_log_probs" not in bypassed.reads
    made = perform(bypassed, batch)
    assert torch.equal(made.batch["old_log_probs"], batch["rollout_log_probs"])
    assert not made.metrics  # the gap of the sampler to itself would be 0
    for inert in ({"rollout_is": "token"}, {"rollout_rs": {"token_k1": 1.2}}):
        with pytest.raises(SettingError, match="with_rollout_correction"):
            RolloutCorrection(bypass_mode=True, **inert)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"rollout_is": "row"}, "token, sequence or None"),
        *(({"rollout_is": "token", "rollout_is_threshold": bad}, "rollout_is_threshold")
          for bad in (True, math.nan, math.inf, -1.0, 0, (5.0, 0.5), (0.5,), (0.5, 1, 2), None, "", "two", "-1_2", 10**400)),
        ({"rollout_is_batch_normalize": 1}, "rollout_is_batch_normalize"),
        ({"rollout_rs": {"seq_mean_k": 1.0}}, "did you mean 'seq_mean_k"),
        ({"rollout_rs": {"token_k2": (0.5, 1)}}, "one upper bound"),
        *(({"rollout_rs": {"token_k1": bad}}, "rollout_rs_threshold of token_k1")
          for bad in (-1.0, True, math.nan, 0.5, (1.4, 0.6), "x", None)),
        ({"rollout_rs": {"token_k1": 2.0}, "rollout_rs_threshold": 2.0}, "beside a mapping"),
        ({"rollout_rs": 5}, "kinds separated by commas"),
        ({"rollout_rs": {1: 2.0}}, "'1' is not a kind of rejection"),
        ({"rollout_rs_threshold": 2.0}, "without rollout_rs"),
        ({"rollout_is": np.array(["token", "sequence"])}, "token, sequence or None"),
        ({"rollout_rs": " , "}, "kinds separated by commas"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": True}, "rollout_rs_threshold of token_k1"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_are_refused_where_they_are_given(given: dict[str, Any], match: str) -> None:
    with pytest.raises(SettingError, match=match):
        RolloutCorrection(**given)


def test_verls_texts_and_pairs_mean_the_same() -> None:
    said = CorrectionSettings(rollout_is="token", rollout_is_threshold="0.5_5.0", rollout_rs="token_k1,seq_max_k3,token_k1",
                              rollout_rs_threshold="0.5_2.0, 0.01")  # fmt: skip
    pairs = CorrectionSettings(rollout_is="token", rollout_is_threshold=(0.5, 5.0),
                               rollout_rs={"token_k1": (0.5, 2.0), "seq_max_k3": 0.01})  # fmt: skip
    assert said.arguments() == pairs.arguments() == pairs.replace(rollout_is="token").arguments()
    assert said.rejections == {"token_k1": (0.5, 2.0), "seq_max_k3": (None, 0.01)} and said.weights == (0.5, 5.0)
    one = CorrectionSettings(rollout_rs="token_k1,seq_sum_k1", rollout_rs_threshold=2)
    assert one.rejections == dict.fromkeys(("token_k1", "seq_sum_k1"), (0.5, 2.0))
    assert CorrectionSettings(rollout_rs={}).rollout_rs is None
    odd = CorrectionSettings(
        rollout_is_threshold=Fraction(3, 2), rollout_rs="token_k1", rollout_rs_threshold=(0.5, 2.0)
    )
    assert json.dumps(odd.to_dict()) and (odd.rollout_is_threshold, odd.rollout_rs_threshold) == (1.5, "0.5_2.0")


# --- what trains on it ----------------------------------------------------------------------------


@pytest.mark.slow
def test_weights_reach_the_loss(engine: Any, batch: wb.DataProto) -> None:
    weighed = RolloutCorrection(rollout_is="token")(batch).batch
    double = weighed.with_columns({"rollout_is_weights": weighed["rollout_is_weights"] * 0 + 2.0})
    losses = []
    start = engine.snapshot()
    for given, loss in ((batch, {}), (double, {"rollout_is": True})):
        engine.restore(start)
        phase = perform(Update(engine, PolicyLoss(**loss), allow_stale=True), given)
        losses.append(phase.metrics["actor/pg_loss"])
    assert losses[1] == pytest.approx(2 * losses[0], rel=1e-4)


@pytest.mark.slow
def test_what_is_rejected_trains_nothing_and_is_not_counted(engine: Any, batch: wb.DataProto) -> None:
    made = RolloutCorrection(rollout_rs="token_k2,seq_mean_k1", rollout_rs_threshold="0.5,1.3")(apart(batch)).batch
    start = engine.snapshot()
    weights = []
    # as if the rejected were not the model's own tokens: what rejection did before it had a column of its own
    smaller = made.with_columns({"response_mask": made["loss_mask"]}).without("loss_mask")
    for given in (made, smaller):
        engine.restore(start)
        phase = perform(Update(engine, PolicyLoss(), allow_stale=True), given)
        weights.append((engine.snapshot()["weights"], phase.metrics["actor/pg_loss"], phase.batch))
    (one, loss, after), (two, same, _) = weights
    assert loss == pytest.approx(same, rel=1e-4)
    apart_by, moved = (
        torch.cat([(one[name] - other[name]).flatten() for name in one]).norm() for other in (two, start["weights"])
    )
    assert apart_by < 0.02 * moved, "a first step of Adam turns rounding of a gradient near 0 into a whole step"
    # the rejected tokens keep their log-probs, and are clipped nowhere
    assert (after["new_log_probs"][:8][made["response_mask"][:8].bool()] != 0).any() and not after["clipped"][:8].any()


def test_the_loss_mask_is_the_product_of_what_the_rows_have() -> None:
    columns = {"response_mask": torch.tensor([[1, 1, 0], [1, 1, 1]])}
    rows = wb.DataProto(columns)
    assert loss_mask(rows).tolist() == [[1, 1, 0], [1, 1, 1]]
    rejected = rows.with_columns({"loss_mask": torch.tensor([[1, 0, 0], [1, 1, 1]])})
    assert loss_mask(rejected).tolist() == [[1, 0, 0], [1, 1, 1]]
    unscored = rejected.with_columns({"scored": torch.tensor([True, False])})
    assert loss_mask(unscored).tolist() == [[1, 0, 0], [0, 0, 0]]
    values = ValueLoss()(
        {"values": torch.ones(2, 3)},
        unscored.with_columns({"values": torch.ones(2, 3), "returns": torch.tensor([[2.0, 9, 9], [9, 9, 9]])}),
        LossCounts(tokens=1, sequences=1),
    )
    assert float(values.loss) == 0.5


@pytest.mark.slow
@pytest.mark.parametrize("bypass", [False, True])
def test_a_corrected_runs_weights_are_made_again(bypass: bool, engine: Any, tmp_path: Path) -> None:
    """What was rejected is recorded with an update; bounds as tight as float32 reject many tokens of one engine's own."""
    pipe = wb.recipes.grpo(engine, short, group_size=2, max_tokens=6, kl_coef=0)
    block = {"rollout_is": "token", "rollout_rs": {"token_k1": 1 + 2e-7}, "bypass_mode": bypass}
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256, limit=8)
    settings: dict[str, Any] = {"steps": 2, "batch_size": 4, "run": tmp_path / "r", "trace_freq": 1}
    run = wb.train_blocking(wb.recipes.with_rollout_correction(pipe, block), rows, **settings)
    batch = run.traces[2].batch
    lost = (batch["response_mask"] - batch["loss_mask"]).sum() / batch["response_mask"].sum()
    assert 0 < lost < 1
    assert ("loss_mask" in updates.read(run.path / "updates", 2).inputs) != bypass
    made, now = run.engine(2).snapshot()["weights"], engine.snapshot()["weights"]
    assert all(torch.equal(made[name], now[name]) for name in now)
    again = run.stepper(2).run().batch
    assert all(torch.equal(again[name], batch[name]) for name in batch.batch)


# --- bypass: the loss computes it -----------------------------------------------------------------

REINFORCE = {"loss_mode": "gpg", "rollout_is": True}


def rows_of(seed: int, rows: int = 6, width: int = 5) -> tuple[torch.Tensor, wb.DataProto]:
    drawn = torch.Generator().manual_seed(seed)
    mask = (torch.rand(rows, width, generator=drawn) > 0.25).long()
    mask[-1] = 0
    rollout = -torch.rand(rows, width, generator=drawn) * 2
    new = rollout + (torch.rand(rows, width, generator=drawn) - 0.5) * 1.2
    columns = {"response_mask": mask, "rollout_log_probs": rollout, "old_log_probs": rollout * float("nan")}
    advantages, scored = torch.randn(rows, width, generator=drawn), torch.ones(rows, dtype=torch.bool)
    return new, wb.DataProto({**columns, "advantages": advantages, "scored": scored})


def test_bypass_rejects_by_the_present_log_probs() -> None:
    """N2: with old := rollout measured against itself nothing was ever rejected, and every weight was 1."""
    new, rows = rows_of(0)
    mask = rows["response_mask"]
    how = CorrectionSettings(rollout_is="token", rollout_rs="token_k1", rollout_rs_threshold=1.2)
    out = PolicyLoss(bypass=how)({"log_probs": new}, rows, LossCounts(tokens=float(mask.sum()), sequences=5))
    logs = new - rows["rollout_log_probs"]
    assert torch.equal(out.columns["loss_mask"], mask * (logs.abs() <= math.log(1.2)))
    torch.testing.assert_close(out.columns["rollout_is_weights"], logs.exp().clamp(max=2.0) * mask)
    found = reduce([out.metrics])
    assert found["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(
        1 - float(out.columns["loss_mask"].sum() / mask.sum())
    )
    assert 0 < found["rollout_corr/rollout_rs_masked_fraction"] < 1 and found["rollout_corr/kl"] != 0


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
@pytest.mark.parametrize("more", [{}, REINFORCE])
def test_a_cut_into_micro_batches_changes_nothing(more: dict[str, Any], mode: str) -> None:
    new, rows = rows_of(1)
    mask = rows["response_mask"]
    how = CorrectionSettings(rollout_is="sequence", rollout_rs="token_k1,seq_max_k2", rollout_rs_threshold="1.5,0.12")
    loss = PolicyLoss(bypass=how, loss_agg_mode=mode, kl_coef=0.1, entropy_coeff=0.01, **more)
    rows = rows.with_columns({"ref_log_prob": rows["rollout_log_probs"] - 0.1})
    counts = LossCounts(tokens=float(mask.sum()), sequences=float((mask.sum(-1) > 0).sum()), width=5.0)

    def run(*parts: slice) -> tuple[float, torch.Tensor, dict[str, float]]:
        leaf = new.clone().requires_grad_()
        outs = []
        for part in parts:
            outputs = {"log_probs": leaf[part], "entropy": leaf[part] * -0.3}
            outs.append(loss(outputs, rows[part], counts))
            outs[-1].loss.backward()
        assert leaf.grad is not None
        return sum(out.loss.item() for out in outs), leaf.grad, reduce([join(out.metrics for out in outs)])

    whole, gradient, metrics = run(slice(0, 6))
    cut, pieces, joined = run(slice(0, 2), slice(2, 3), slice(3, 6))
    assert cut == pytest.approx(whole, rel=1e-5)
    torch.testing.assert_close(pieces, gradient)
    assert joined.keys() == metrics.keys()
    for name, value in metrics.items():
        if not name.endswith(("_std", "eff_sample_size")):  # of a part, not of parts
            assert joined[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


@pytest.mark.slow
def test_bypass_through_an_engine(engine: Any, batch: wb.DataProto) -> None:
    off = apart(batch)
    how = CorrectionSettings(rollout_is="sequence", rollout_is_threshold=5, rollout_rs={"seq_mean_k1": 1.3})
    stage = Update(engine, PolicyLoss(bypass=how, **REINFORCE), ppo_epochs=2, ppo_mini_batch_size=4, allow_stale=True)
    assert (
        set(stage.writes) == {"new_log_probs", "clipped", "rollout_is_weights", "loss_mask"}
        and "loss_mask" not in stage.optional
    )
    done = perform(stage, RolloutCorrection(bypass_mode=True)(off).batch)
    assert (done.batch["loss_mask"][:8] == 0).all() and done.batch["loss_mask"][9:].any()
    assert torch.equal(done.batch["response_mask"], batch["response_mask"])
    assert done.metrics["rollout_corr/rollout_rs_seq_masked_fraction"] > 0.1
    # the columns of an earlier pass are not taken for a rejection before this one
    again = perform(stage, done.batch.with_columns({"loss_mask": torch.zeros_like(batch["response_mask"])}))
    assert again.batch["loss_mask"].any() and again.metrics["actor/grad_norm"] > 0
    warm = Update(engine, PolicyLoss(bypass=how, **REINFORCE), from_step=10**9, allow_stale=True)
    skipped = perform(warm, off).batch
    assert torch.equal(skipped["loss_mask"], batch["response_mask"]) and skipped["rollout_is_weights"].max() == 1
    settings = stage.settings()
    assert settings["bypass.rollout_is"] == "sequence" and "bypass" not in settings and json.dumps(settings)


@pytest.mark.slow
def test_other_settings_of_the_correction_run_what_uses_its_mask_again(engine: Any) -> None:
    pipe = wb.recipes.grpo(engine, short, group_size=2, max_tokens=6, kl_coef=0)
    tight = wb.recipes.with_rollout_correction(pipe, rollout_rs={"token_k1": 1 + 2e-7})
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256, limit=4)
    s = wb.Stepper(tight, rows.batch(4)).run(until="advantage")
    t = (
        s.fork()
        .back(to="rollout_correction")
        .replace("rollout_correction", rollout_rs={"token_k1": 50.0})
        .run(until="advantage")
    )
    assert not torch.equal(s.batch["loss_mask"], t.batch["loss_mask"])
    assert torch.equal(t.batch["loss_mask"], t.batch["response_mask"])
    assert not t.trace["advantage"].reused
    weighed = wb.recipes.with_rollout_correction(pipe, rollout_is="token")
    with pytest.raises(PipelineError, match="change the settings of 'rollout_correction', which does not write it now"):
        weighed.with_stage("rollout_correction", rollout_is=None)


def test_a_step_that_loses_all_its_tokens_spoils_no_metric(engine: Any, batch: wb.DataProto) -> None:
    gone = batch.with_columns({"loss_mask": batch["response_mask"] * (torch.arange(len(batch)) >= 32)[:, None]})
    found = perform(Update(engine, PolicyLoss(), ppo_mini_batch_size=4, allow_stale=True), gone).metrics
    assert math.isfinite(found["actor/ppo_kl"]) and math.isfinite(found["actor/pg_loss"])


def test_weights_on_a_ratio_against_the_sampler_would_count_it_twice() -> None:
    with pytest.raises(SettingError, match="count it twice"):
        PolicyLoss(bypass=CorrectionSettings(rollout_is="token"), rollout_is=True)
    with pytest.raises(SettingError, match="asks for weights"):
        PolicyLoss(bypass=CorrectionSettings(), **REINFORCE)
    with pytest.raises(SettingError, match="a CorrectionSettings or None"):
        PolicyLoss(bypass={"rollout_is": "token"})  # type: ignore[arg-type]


def test_a_corrected_pipeline_is_made_again_from_its_record(engine: Any) -> None:
    plain = wb.recipes.grpo(engine, wb.rewards.gsm8k, group_size=2, kl_coef=0)
    for block in ("bypass_pg_geo_rs_seq_tis", "decoupled_seq_is_rs", {"rollout_rs": {"token_k1": (0.6, 1.4)}}):
        made = wb.recipes.with_rollout_correction(plain, block)
        records = json.loads(json.dumps(written_down(made)))
        again = rebuilt(records, {"actor": engine}, lambda record: engine)
        assert again["update_actor"].settings() == made["update_actor"].settings()
        assert again["rollout_correction"].settings() == made["rollout_correction"].settings()
    with pytest.raises(PipelineError):  # nobody writes the trainer's log-probs any more
        wb.recipes.with_rollout_correction(
            wb.recipes.with_rollout_correction(plain, "bypass_pg_is"), "decoupled_seq_is"
        )
