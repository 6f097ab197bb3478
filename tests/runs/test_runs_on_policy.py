"""Training without a pass for old log-probs: the same weights stepped, by hand, resumed and replayed, and the same record."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb
from workbench.replay.audit import audit_trace
from workbench.steps.trace import Trace

ROOT = Path(__file__).parents[2]
STEPS, SEED = 2, 5


def length(response: str) -> float:
    return float(len(response) % 3)


def pipeline(**settings: Any) -> wb.Pipeline:
    engine = wb.engines.local(ROOT / "data/tiny-arith", lr=1e-2, device="cpu")
    reward = wb.rewards.Reward(length, in_process=True)
    return wb.recipes.grpo(engine, reward, **{"group_size": 3, "max_tokens": 6, "entropy_coeff": 0.01, **settings})


def rows() -> Any:
    return wb.rows(ROOT / "data/arith/train.parquet", max_prompt_length=128, limit=8)


def weights(pipe: wb.Pipeline) -> dict[str, torch.Tensor]:
    return dict(pipe.learners()["actor"].snapshot()["weights"])


def equal(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], two[name]) for name in one)


class Counted:
    """Calls of an engine's scoring passes and forward passes of its model."""

    def __init__(self, pipe: wb.Pipeline) -> None:
        engine: Any = pipe.learners()["actor"]
        self.scored = self.forwards = 0
        compute = engine.compute_log_probs

        def scoring(*args: Any, **options: Any) -> Any:
            self.scored += 1
            return compute(*args, **options)

        engine.compute_log_probs = scoring
        engine._model.get_input_embeddings().register_forward_hook(self._forward)

    def _forward(self, *_: Any) -> None:
        self.forwards += 1


def train(pipe: wb.Pipeline, folder: Path, **plan: Any) -> wb.Run:
    given = {"steps": STEPS, "batch_size": 2, "seed": SEED, "trace_freq": 1, "save_freq": 1, **plan}
    return wb.train_blocking(pipe, rows(), run=folder, display=None, trackers=(), **given)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[wb.Run, dict[str, torch.Tensor], Counted]:
    counted = Counted(pipe := pipeline())
    run = train(pipe, tmp_path_factory.mktemp("on_policy") / "run")
    return run, weights(pipe), counted


@pytest.mark.slow
def test_by_hand_stepped_and_trained_give_the_same_weights(trained: Any) -> None:
    run, after, _ = trained
    stepped, by_hand, without = pipeline(), pipeline(), pipeline()
    for step in range(1, STEPS + 1):
        s = wb.Stepper(stepped, rows().batch(2, step=step, seed=SEED)).run()
        for pipe, left in ((by_hand, ()), (without, ("old_log_prob",))):
            batch = rows().batch(2, step=step, seed=SEED)
            for stage in pipe:
                batch = batch if stage.name in left else stage(batch).batch
        assert torch.equal(batch["new_log_probs"], s.batch["new_log_probs"])
    for pipe in (stepped, by_hand, without):
        assert equal(weights(pipe), after)
    found = wb.diverge(s.trace, run.traces[STEPS])
    assert found.identical and not found.notes, found
    assert s.compare(run.traces[STEPS]).identical
    assert "old_log_probs" in s.trace["old_log_prob"].wrote, "the stepper ran the stage for the eye"


@pytest.mark.slow
def test_training_makes_no_second_pass(trained: Any, tmp_path: Path) -> None:
    run, after, counted = trained
    second = Counted(pipe := pipeline(recompute_old_log_probs=True))
    other = train(pipe, tmp_path / "run")
    assert (counted.scored, second.scored) == (0, STEPS) and second.forwards - counted.forwards >= STEPS
    # a pass for scores and one for learning may differ in their last bits
    assert all(torch.allclose(after[name], one, atol=1e-5) for name, one in weights(pipe).items())
    assert wb.diverge(run.traces[1], other.traces[1], atol=1e-5, rtol=1e-4).identical
    assert other.settings["stages"]["update_actor"]["recompute_old_log_probs"] is True
    assert other.traces[1].batch.origins["old_log_probs"].stage == "old_log_prob"


def test_a_trained_step_shows_the_columns_and_metrics_as_ever(trained: Any) -> None:
    run, *_ = trained
    trace = run.traces[STEPS]
    stage, update = trace["old_log_prob"], trace["update_actor"]
    assert trace.names == tuple(one["name"] for one in run.settings["pipeline"])
    assert stage.wrote == ("old_log_probs", "entropys", "sampler_logprob_diff") and stage.seconds < update.seconds
    assert stage.settings["computed_by"] == "update_actor" and update.wrote == ("new_log_probs", "clipped")
    for name in stage.wrote:
        made = trace["advantage"].batch.origins[name]
        assert (made.stage, made.policy_version) == ("update_actor", STEPS - 1)
    assert torch.equal(trace.batch["old_log_probs"], trace.batch["new_log_probs"])
    row = run.rows[-1]
    assert row["actor/ppo_kl"] == 0.0 and row["actor/entropy"] > 0 and row["training/rollout_log_probs_diff_max"] < 1e-3
    assert row["training/policy_lag/max"] == 0 and "timing_s/old_log_prob" in row
    assert "entropys" in trace._repr_html_() and "update_actor" in stage._repr_html_()


def test_the_audit_reads_it_and_sees_what_was_changed(trained: Any, tmp_path: Path) -> None:
    run, *_ = trained
    found = run.audit()
    assert found.agrees and not found.unaudited, found
    trace = run.traces[1]
    mask = trace.batch["response_mask"]

    def changed(name: str, phase: str, by: float) -> Trace:
        phases = [
            replace(
                one, batch=one.batch.with_columns({name: one.batch[name] + by * mask}, origin=one.batch.origins[name])
            )
            if name in one.batch and trace.names.index(one.stage) >= trace.names.index(phase)
            else one
            for one in trace
        ]
        return Trace(trace.start, tuple(phases))

    for name, phase in (("old_log_probs", "old_log_prob"), ("new_log_probs", "update_actor")):
        wrong = audit_trace(changed(name, phase, -1e-4))
        assert "new_log_probs" in {one.name for one in wrong.disagreements}, wrong
    assert audit_trace(changed("old_log_probs", "old_log_prob", 0.0)).agrees


@pytest.mark.slow
def test_any_step_again(trained: Any) -> None:
    run, after, _ = trained
    again = run.stepper(STEPS).replace("reward", wb.rewards.Reward(length, in_process=True)).run()
    assert equal(weights(again.pipeline), after)
    found = wb.diverge(again.trace, run.traces[STEPS])
    assert found.identical, found
    late = run.stepper(STEPS, at="advantage")
    assert torch.equal(late.batch["old_log_probs"], run.traces[STEPS].batch["old_log_probs"])
    late.run(until="advantage")
    assert any("no engine is open" in note for note in late.notes)
    late.run()
    assert equal(weights(late.pipeline), after) and equal(dict(run.engine(STEPS).snapshot()["weights"]), after)
    inputs = wb.replay.rebuild.updates.read(run.path / "updates", STEPS).inputs
    assert "old_log_probs" not in inputs and "ref_log_prob" in inputs


@pytest.mark.slow
def test_a_resumed_run_goes_on_exactly(trained: Any, tmp_path: Path) -> None:
    run, after, _ = trained
    train(pipeline(), tmp_path / "run", steps=1)
    resumed = train(pipe := pipeline(), tmp_path / "run", resume="auto")
    assert equal(weights(pipe), after) and wb.diverge(resumed.traces[STEPS], run.traces[STEPS]).identical


def off_policy(metrics: Any) -> bool:
    return bool(metrics["training/rollout_kl"] > -1 and metrics["training/policy_lag/max"] == 0)


@pytest.mark.slow
def test_a_break_looks_at_the_pass_before_the_weights_move(trained: Any, tmp_path: Path) -> None:
    run, after, _ = trained
    before = weights(stopping := pipeline())
    stopped = train(stopping, tmp_path / "stopped", break_if=off_policy).stopped
    assert stopped is not None and stopped.next_stage == "update_actor" and equal(weights(stopping), before)
    assert stopped.trace["old_log_prob"].wrote and stopped.batch.origins["old_log_probs"].stage == "old_log_prob"
    counted = Counted(going := pipeline())
    other = train(going, tmp_path / "going", break_if=lambda metrics: metrics["actor/ppo_kl"] > 0.1)
    assert counted.scored == STEPS and equal(weights(going), after)
    assert wb.diverge(other.traces[STEPS], run.traces[STEPS]).identical and other.audit().agrees
    assert equal(dict(other.engine(STEPS).snapshot()["weights"]), after)


Make = Callable[[], wb.Pipeline]
SAME: dict[str, Make] = {
    "mini-batches of the whole batch": lambda: pipeline(ppo_mini_batch_size=2),
    "rewards beside the rollout": lambda: pipeline().streaming_rewards(),
    "no log-prob stage": lambda: wb.Pipeline([one for one in pipeline() if one.name != "old_log_prob"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", SAME)
def test_other_ways_to_the_same_weights(case: str, trained: Any, tmp_path: Path) -> None:
    _, after, _ = trained
    counted = Counted(pipe := SAME[case]())
    run = train(pipe, tmp_path / "run")
    assert counted.scored == 0 and equal(weights(pipe), after)
    audit = run.audit()
    assert audit.agrees and not audit.unaudited and {"actor/entropy", "training/rollout_kl"} <= audit.metrics, audit
