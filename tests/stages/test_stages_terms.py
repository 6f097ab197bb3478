"""Sums of losses in one update: gradients add up, one term alone is the loss itself, masks reach what tools wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb
from workbench.base.errors import PipelineError, SettingError
from workbench.rewards import Reward
from workbench.stages import CrossEntropy, PolicyLoss, Term, Update
from workbench.stages.terms import counts_of
from workbench.steps.trace import perform


def varied(response: str) -> float:
    return (sum(map(ord, response)) % 5) / 4


def rows() -> Any:
    return wb.rows("data/arith/train.parquet", max_prompt_length=256, limit=16)


@pytest.fixture
def engine(tiny: str) -> Any:
    return wb.engines.local(tiny, device="cpu", lr=1e-3, self_check=False)


def stepped(engine: Any) -> tuple[wb.Pipeline, wb.DataProto]:
    pipe = wb.recipes.grpo(engine, Reward(varied, in_process=True), group_size=4, max_tokens=12, kl_coef=0.0)
    return pipe, wb.Stepper(pipe, rows().batch(4)).run(until="advantage").batch


def gradient(engine: Any, update: Update, batch: wb.DataProto) -> dict[str, torch.Tensor]:
    """The weights' gradient of the loss that the update gives its learner."""
    seen: list[Any] = []
    before = engine.snapshot()
    learn = engine.learn
    engine.learn = lambda *given: (seen.append(engine.gradient(*given)), learn(*given))[1]
    try:
        perform(update, batch)
    finally:
        del engine.learn
        engine.restore(before)
    return dict(seen[0])


def test_gradients_and_metrics_of_terms_add_up(engine: Any) -> None:
    _, batch = stepped(engine)
    policy, sft = PolicyLoss(), CrossEntropy(loss_agg_mode="seq-mean-token-mean")
    parts = [gradient(engine, Update(engine, one), batch) for one in (policy, sft)]
    both = Update(engine, policy, terms={"ce": Term(loss=sft, weight=0.25)})
    summed = gradient(engine, both, batch)
    for name, value in summed.items():
        assert torch.allclose(value, parts[0][name] + 0.25 * parts[1][name], atol=1e-6)
    found = perform(both, batch).metrics
    assert found["actor/loss"] == pytest.approx(found["actor/pg_loss"] + 0.25 * found["actor/ce"], rel=1e-5)
    assert found["actor/ce_nll"] > 0 and both.settings()["ce.weight"] == 0.25
    assert both.settings()["ce.loss_agg_mode"] == "seq-mean-token-mean"


def test_a_term_of_weight_0_moves_nothing(engine: Any) -> None:
    _, batch = stepped(engine)
    before, ends = engine.snapshot(), []
    for terms in (None, {"ce": Term(loss=CrossEntropy(), weight=0.0)}):
        perform(Update(engine, PolicyLoss(), terms=terms), batch)
        ends.append({name: one.clone() for name, one in engine.snapshot()["weights"].items()})
        engine.restore(before)
    assert all(torch.equal(one, ends[1][name]) for name, one in ends[0].items())


def test_a_mask_reaches_tokens_that_the_model_did_not_write(engine: Any) -> None:
    """Cross-entropy on observations: the loss of exactly those tokens, and the policy's columns stay within its own."""
    _, batch = stepped(engine)
    whole = batch["response_mask"]
    own = whole * (torch.arange(whole.shape[1]) % 3 != 1).long()
    held = batch.with_columns({"response_mask": own, "observed": whole - own})
    wanted = engine.compute_log_probs(held.with_columns({"response_mask": whole - own}))["log_probs"]
    for mask in ("observations", "observed"):
        update = Update(engine, PolicyLoss(), terms={"echo": Term(loss=CrossEntropy(), mask=mask)}, allow_stale=True)
        before = engine.snapshot()
        done = perform(update, held)
        engine.restore(before)
        assert done.metrics["actor/echo"] == pytest.approx(-float(wanted.sum() / (whole - own).sum()), rel=1e-5)
        assert not (done.batch["new_log_probs"] * (1 - own)).any() and torch.equal(done.batch["response_mask"], own)
    assert counts_of(held).tokens == float(own.sum())


def test_terms_are_changed_looked_ahead_recorded_and_audited(engine: Any, tiny: str, tmp_path: Path) -> None:
    pipe, _ = stepped(engine)
    pipe = pipe.with_stage("update_actor", terms={"ce": Term(loss=CrossEntropy(), weight=0.5)})
    assert pipe.with_stage("update_actor", **{"ce.weight": 2.0})["update_actor"].settings()["ce.weight"] == 2.0
    s = wb.Stepper(pipe, rows().batch(4)).run(until="advantage")
    ahead = s.what_if(**{"ce.weight": 0.0}, updates=2)
    assert ahead.changes == {"ce.weight": "0.0"} and ahead.cosine < 1
    with pytest.raises(PipelineError, match="weigth"):
        s.what_if(**{"ce.weigth": 0.0})
    first = s.run().trace.metrics
    again = s.back(to="rollout").run().trace.metrics
    assert all(again[name] == one for name, one in first.items() if not name.startswith("timing"))
    how = {"batch_size": 4, "trackers": (), "trace_freq": 1}
    run = wb.train_blocking(pipe, rows(), steps=2, run=tmp_path / "r", **how)
    wanted = engine.snapshot()["weights"]
    found = run.engine(2).snapshot()["weights"]
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    audit = run.audit()
    assert audit.agrees and not audit.unaudited, audit
    assert run.stepper(step=2).pipeline["update_actor"].settings()["ce.weight"] == 0.5


def test_what_is_no_term_is_refused_by_name(engine: Any) -> None:
    for name in ("loss", "two words"):
        with pytest.raises(SettingError, match="name of a term"):
            Update(engine, PolicyLoss(), terms={name: CrossEntropy()})
    with pytest.raises(SettingError, match="weight of a Term"):
        Term(loss=CrossEntropy(), weight=float("nan"))
    with pytest.raises(SettingError, match="loss of a Term"):
        Term(loss="ce")
    with pytest.raises(SettingError, match="all of a policy, or all of a critic"):
        Update(engine, PolicyLoss(), terms={"value": wb.stages.ValueLoss()})
