"""Stepping, rewinding, forking, comparing; traces on disk; on the real tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb
from workbench.base.errors import BatchError, PipelineError, RunError, VersionMismatch
from workbench.runs.loop import run_step
from workbench.steps.trace import Trace

pytestmark = pytest.mark.slow


def make(tiny: str, **settings: Any) -> tuple[wb.Stepper, Any]:
    engine = wb.engines.local(tiny, lr=1e-3, device="cpu")
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256)
    pipe = wb.recipes.grpo(engine, group_size=2, max_tokens=24, **settings)
    return wb.Stepper(pipe, rows.batch(3)), engine


def short(response: str) -> float:
    return float(len(response) < 25)


def equal(a: wb.DataProto, b: wb.DataProto) -> bool:
    return a.columns == b.columns and all(
        torch.equal(a[name], b[name])
        if isinstance(a[name], torch.Tensor)
        else list(map(str, a[name])) == list(map(str, b[name]))
        for name in a.columns
    )


def test_calls_chain_and_the_repr_shows_what_happened(tiny: str) -> None:
    s, _ = make(tiny)
    assert "▶ rollout" in repr(s) and "nothing has run" in repr(s)
    assert s.run(until="reward") is s and s.next_stage == "old_log_prob"
    assert "● reward" in repr(s) and "6 samples · " in repr(s) and "wrote" in repr(s)
    s.run()
    assert s.next_stage is None
    with pytest.raises(PipelineError, match=r"this step is over.*rows\.batch"):
        s.next()
    with pytest.raises(PipelineError, match="did you mean 'reward'"):
        s.back(to="rewards")


def test_back_and_on_reuses_what_did_not_change(tiny: str) -> None:
    s, engine = make(tiny)
    s.run(until="advantage")
    responses, log_probs = s.batch["responses"], s.batch["old_log_probs"]
    s.back(to="reward").replace("reward", short).run(until="advantage")
    assert s.batch["responses"] is responses and s.batch["old_log_probs"] is log_probs
    assert [phase.reused for phase in s.trace] == [False, False, True, True, False]
    assert engine.version == 0 and "short" in s.trace["reward"].source["function"]
    s.back(to="advantage").replace("advantage", lambda scores, mask: scores[:, None] * mask).run(until="advantage")
    assert torch.equal(s.batch["advantages"][:, 0], s.batch["reward"])


def test_back_over_the_update_restores_everything_exactly(tiny: str) -> None:
    s, engine = make(tiny)
    before = engine.snapshot()
    s.run()
    first = engine.snapshot()
    metrics = s.trace["update_actor"].metrics
    assert first["version"] == 1 and first["state_id"] != before["state_id"]
    s.back(to="update_actor")
    assert engine.version == 0 and engine.state_id == before["state_id"]
    assert all(torch.equal(tensor, before["weights"][name]) for name, tensor in engine.snapshot()["weights"].items())
    s.run()
    again = engine.snapshot()
    assert s.trace["update_actor"].metrics == metrics
    assert all(torch.equal(tensor, first["weights"][name]) for name, tensor in again["weights"].items())


def test_forks_own_their_versions(tiny: str) -> None:
    s, engine = make(tiny)
    s.run(until="advantage")
    t = s.fork().back(to="reward").replace("reward", short).run()
    theirs = engine.state_id
    assert engine.version == 1 and s.trace.names[-1] == "advantage"
    s.run()
    ours = engine.state_id
    assert ours != theirs
    t.back(to="update_actor")
    assert engine.version == 0
    t.run()
    assert engine.version == 1


def test_weights_that_moved_on_elsewhere_are_refused(tiny: str) -> None:
    s, engine = make(tiny)
    s.run(until="advantage")
    engine.learn(
        s.batch,
        wb.stages.PolicyLoss(),
        wb.engines.LossCounts(float(s.batch["response_mask"].sum()), float(len(s.batch))),
    )
    with pytest.raises(VersionMismatch, match="'actor' have changed"):
        s.next()


def test_an_update_that_fails_leaves_the_weights(tiny: str) -> None:
    s, engine = make(tiny)
    s.run(until="advantage")
    s.replace("update_actor", Failing(engine))
    state = engine.state_id
    with pytest.raises(Exception, match="half-way"):
        s.next()
    assert engine.state_id == state and s.next_stage == "update_actor"


class Failing(wb.stages.Update):
    def __init__(self, engine: Any) -> None:
        super().__init__(engine, wb.stages.PolicyLoss())

    def __call__(self, batch: wb.DataProto) -> wb.Outcome:
        super().__call__(batch)
        raise RuntimeError("half-way")


def test_stages_that_have_run_cannot_be_replaced(tiny: str) -> None:
    s, _ = make(tiny)
    s.run(until="reward")
    with pytest.raises(PipelineError, match="back\\(to='reward'\\)"):
        s.replace("reward", short)
    with pytest.raises(PipelineError, match="cannot go back to advantage"):
        s.back(to="advantage")


def test_comparing(tiny: str) -> None:
    s, _ = make(tiny)
    s.run(until="advantage")
    assert s.compare(s).identical and "nothing differs" in repr(s.compare(s))
    t = s.fork().back(to="reward").replace("reward", short).run(until="advantage")
    found = s.compare(t)
    names = {change.name for change in found.columns}
    assert {"reward", "token_level_scores"} <= names and "responses" not in names
    assert found.rows[0].size == max(row.size for row in found.rows) and "columns differ" in repr(found)
    assert "critic/score/mean" in found.metrics and "<table" in found._repr_html_()
    with pytest.raises(BatchError, match="different rows"):
        s.compare(make(tiny)[0])


def test_a_stepped_batch_is_what_the_loop_runs_bit_for_bit(tiny: str) -> None:
    s, one = make(tiny)
    t, two = make(tiny)
    stepped = s.next().next().run().trace
    looped = run_step(t.pipeline, t.batch)
    assert equal(stepped.batch, looped.batch)
    plain = [{k: v for k, v in trace.metrics.items() if not k.startswith("timing")} for trace in (stepped, looped)]
    assert plain[0] == plain[1]
    weights = one.snapshot()["weights"], two.snapshot()["weights"]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_traces_round_trip_and_keep_each_column_once(tiny: str, tmp_path: Path) -> None:
    s, _ = make(tiny)
    s.run()
    again = Trace.load(s.trace.save(tmp_path / "t"))
    assert again.names == s.trace.names and again.metrics == s.trace.metrics
    for name in again.names:
        assert equal(again[name].batch, s.trace[name].batch) and again[name].settings == s.trace[name].settings
        assert again[name].wrote == s.trace[name].wrote
    assert equal(again.before("reward"), s.trace["rollout"].batch) and again.step == 1
    reward = wb.DataProto.load(tmp_path / "t" / "01_reward")
    assert "responses" not in reward and "uid" not in wb.DataProto.load(tmp_path / "t" / "00_rollout")
    assert "rollout" in repr(again) and "<table" in again._repr_html_()
    with pytest.raises(RunError, match="never overwritten"):
        s.trace.save(tmp_path / "t")
    with pytest.raises(RunError, match="no trace"):
        Trace.load(tmp_path)
    with pytest.raises(PipelineError, match="phase of this trace"):
        again["values"]


def test_controllers_go_back_with_the_stepper(tiny: str) -> None:
    engine = wb.engines.local(tiny, device="cpu")
    rows = wb.rows("data/arith/train.parquet")
    pipe = wb.recipes.ppo(engine, group_size=2, max_tokens=16, kl_coef=0.1, kl_target=0.01, kl_horizon=100)
    s = wb.Stepper(pipe, rows.batch(2)).run(until="values")
    assert pipe.state() == {"advantage": {"value": 0.1}}
    s.next()
    moved = pipe.state()["advantage"]["value"]
    assert moved != 0.1
    s.back(to="advantage")
    assert pipe.state()["advantage"]["value"] == 0.1
    assert s.next().pipeline.state()["advantage"]["value"] == moved


def test_a_setting_of_a_stage_is_replaced_by_name(tiny: str) -> None:
    s, _ = make(tiny)
    s.run(until="advantage")
    t = s.fork().replace("update_actor", clip_ratio_high=0.5, ppo_epochs=2)
    assert t.pipeline["update_actor"].settings()["clip_ratio_high"] == 0.5
    assert t.pipeline["update_actor"].settings()["ppo_epochs"] == 2
    assert (
        t.pipeline["update_actor"].settings()["clip_ratio_low"]
        == s.pipeline["update_actor"].settings()["clip_ratio_low"]
    )
    cold = s.fork().back(to="rollout").replace("rollout", temperature=0.0).run(until="reward")
    texts = list(cold.batch["response_text"])
    assert texts[0::2] == texts[1::2], "greedy samples of one prompt are one text"
    kept = s.fork().back(to="advantage").replace("advantage", norm_by_std=False).run(until="advantage")
    assert kept.trace["rollout"] is s.trace["rollout"]
    assert kept.pipeline["advantage"].settings()["norm_by_std"] is False
    with pytest.raises(wb.WorkbenchError, match=r"clip_hihg.*clip_ratio_high"):
        s.fork().replace("update_actor", clip_hihg=0.5)
    with pytest.raises(wb.WorkbenchError, match="a stage, a function or settings"):
        s.fork().replace("update_actor")


def test_another_temperature_is_also_that_of_the_log_probs(tiny: str) -> None:
    s, _ = make(tiny, kl_coef=0.01)
    s.replace("rollout", temperature=0.5).run(until="ref_log_prob")
    heats = {stage.name: stage.temperature for stage in s.pipeline if hasattr(stage, "temperature")}
    assert heats == {"old_log_prob": 0.5, "ref_log_prob": 0.5, "update_actor": 0.5}
    assert torch.allclose(s.batch.rollout_log_probs, s.batch.old_log_probs, atol=1e-4)
    greedy = s.pipeline.with_stage("rollout", temperature=0.0)
    assert greedy["old_log_prob"].temperature == 1.0
    own = greedy.replace("old_log_prob", temperature=2.0).replace("rollout", temperature=0.7)
    assert own["old_log_prob"].temperature == 2.0, "one that was set apart stays"


def test_settings_that_nobody_takes_are_refused_when_they_are_given(tiny: str) -> None:
    s, _ = make(tiny)
    with pytest.raises(wb.WorkbenchError, match=r"'norm_by_stdd'.*setting of 'grpo'.*mean 'norm_by_std'"):
        s.replace("advantage", norm_by_stdd=False)
    both = s.pipeline.with_stage("update_actor", clip_ratio_high=0.3, loss=wb.stages.PolicyLoss(kl_coef=0.5))
    assert both["update_actor"].settings()["clip_ratio_high"] == 0.3
    assert both["update_actor"].settings()["kl_coef"] == 0.5
