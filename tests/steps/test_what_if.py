"""`what_if`: another way to learn from the batch in hand, on scratch weights; the real ones stay untouched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.lint import lint

import workbench as wb
from workbench import functional as F
from workbench.base.errors import PipelineError, SettingError
from workbench.rewards import Reward
from workbench.steps import what_if as module
from workbench.steps.what_if import what_if

pytestmark = pytest.mark.slow


def varied(response: str) -> float:
    return (sum(map(ord, response)) % 5) / 4


@pytest.fixture
def stepper(tiny: str) -> wb.Stepper:
    engine = wb.engines.local(tiny, lr=3e-4, device="cpu")
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256, limit=16)
    pipe = wb.recipes.grpo(engine, Reward(varied, in_process=True), group_size=4, max_tokens=12)
    return wb.Stepper(pipe, rows.batch(4)).run(until="advantage")


def state(s: wb.Stepper) -> tuple[Any, ...]:
    learner = s.pipeline.learners()["actor"]
    held = learner.snapshot()
    return learner.version, learner.state_id, held["steps"], [t.clone() for t in held["weights"].values()]


def test_nothing_real_changes_and_the_stepper_goes_on(stepper: wb.Stepper) -> None:
    before = state(stepper)
    made = stepper.what_if(clip_ratio_high=0.5, updates=2)
    after = state(stepper)
    assert before[:3] == after[:3] and all(torch.equal(a, b) for a, b in zip(before[3], after[3], strict=True))
    assert stepper.next_stage == "update_actor" and len(made.actual.metrics) == len(made.other.metrics) == 2
    stepper.run()
    learned = state(stepper)
    again = stepper.what_if(clip_ratio_high=0.5, updates=2)  # the question is asked where the update stood before
    assert again.actual.metrics == made.actual.metrics and stepper.position == len(stepper.pipeline)
    present = state(stepper)  # whoever evaluates the engine now measures what was learned
    assert learned[1] == present[1] and all(torch.equal(a, b) for a, b in zip(learned[3], present[3], strict=True))


def test_the_first_gradient_is_the_same_and_later_ones_part(stepper: wb.Stepper) -> None:
    once = stepper.what_if(clip_ratio_high=0.0, clip_ratio_low=0.0, updates=1)
    assert once.cosine == pytest.approx(1.0, abs=1e-5) and float(once.difference.abs().max()) < 1e-5
    often = stepper.what_if(clip_ratio_high=0.0, clip_ratio_low=0.0, updates=5)
    assert often.cosine < 0.999 and float(often.difference.abs().max()) > 1e-3
    assert often.other.metrics[-1]["actor/pg_clipfrac"] > often.actual.metrics[-1]["actor/pg_clipfrac"]
    assert "cosine" in repr(often) and "actor/pg_clipfrac" in repr(often) and "<table" in often._repr_html_()
    assert lint(often._repr_html_()) == []


def test_another_estimator_loss_and_mask(stepper: wb.Stepper) -> None:
    same = stepper.what_if(advantage=F.grpo, updates=1)
    assert same.cosine == pytest.approx(1.0, abs=1e-6)
    scaled = stepper.what_if(advantage=F.rloo, updates=2)
    assert scaled.other.metrics[0]["actor/grad_norm"] != scaled.actual.metrics[0]["actor/grad_norm"]
    loss = stepper.what_if(loss_mode="cispo", updates=3)
    assert loss.changes == {"loss_mode": "cispo"} and 0.5 < loss.cosine <= 1.0001
    some = stepper.what_if(rows=range(4), updates=2)
    assert some.cosine < 0.99 and set(some.rows(3)) <= set(range(16))
    first = torch.zeros_like(stepper.batch["response_mask"])
    first[:, :2] = 1
    masked = stepper.what_if(mask=first, updates=2)
    assert "mask" in masked.changes and masked.cosine < 0.999
    apart = some.difference.abs().sum(-1)
    assert some.rows(1) == [int(apart.argmax())]


@pytest.mark.long
def test_a_probe_is_watched(stepper: wb.Stepper) -> None:
    eval_rows = wb.rows("data/arith/test.parquet", max_prompt_length=256, limit=4)
    made = stepper.what_if(kl_coef=1.0, updates=2, probe=stepper.batch)
    assert set(made.before) == {"log_prob"} and made.other.probe["log_prob"] != made.before["log_prob"]
    judged = stepper.what_if(kl_coef=1.0, updates=1, probe=eval_rows)
    assert 0 <= judged.before["reward"] <= 1 and "held-out reward" in repr(judged)


def test_what_cannot_be_asked(stepper: wb.Stepper) -> None:
    with pytest.raises(PipelineError, match="a Pipeline with a policy update"):
        what_if(stepper, stepper.batch, clip_ratio_high=0.5)  # type: ignore[arg-type]
    with pytest.raises(PipelineError, match="changes nothing"):
        stepper.what_if()
    with pytest.raises(SettingError, match="did you mean 'clip_ratio_high'"):
        stepper.what_if(clip_hi=0.3)
    after = stepper.fork().run()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SettingError, match="learning_rate.*lr of the"):
        patch.setattr(type(after), "fork", lambda self: pytest.fail("weights are restored before the name is read"))
        after.what_if(learning_rate=1e-4)
    early = stepper.fork().back(to="advantage")
    with pytest.raises(PipelineError, match=r"run\(until='advantage'\) first"):
        early.what_if(clip_ratio_high=0.3)


def test_a_trained_engine_has_its_weights_back(stepper: wb.Stepper) -> None:
    early = stepper.fork().back(to="update_actor")
    engine = stepper.fork().run().pipeline.learners()["actor"]
    trained, changed = engine.state_id, {"clip_ratio_high": 0.5}
    early.what_if(updates=1, **changed)
    assert engine.state_id == trained
    with pytest.raises(PipelineError, match="changes nothing"):
        early.what_if()
    assert engine.state_id == trained


def test_states_in_files_give_the_same_result(stepper: wb.Stepper, monkeypatch: pytest.MonkeyPatch) -> None:
    before = stepper.what_if(clip_ratio_high=0.5, updates=2)
    kept: list[Any] = []
    learner = stepper.pipeline.learners()["actor"]
    take = learner.snapshot
    monkeypatch.setattr(learner, "snapshot", lambda *how: kept.append(take(*how)) or kept[-1])
    monkeypatch.setattr(module, "is_large", bool)
    after = stepper.what_if(clip_ratio_high=0.5, updates=2)
    assert len(kept) == 3 and all(snapshot.kind == "disk" for snapshot in kept)
    assert torch.equal(after.difference, before.difference) and after.cosine == before.cosine
    assert after.actual.moved_norm == before.actual.moved_norm > 0
