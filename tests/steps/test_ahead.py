"""Rows drawn one step ahead: whose weights wrote them, what the loss knows of it, and how it ends."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.patience import LONG

import workbench as wb
from workbench.base import runtime
from workbench.base.errors import EngineError, SettingError, VersionMismatch, WorkbenchError
from workbench.engines import Request, SamplingSettings
from workbench.rewards import Reward
from workbench.runs.preflight import preflight
from workbench.steps import execute
from workbench.steps.trace import Trace


def digits(response: str) -> float:
    return sum(letter.isdigit() for letter in response) / 10


def two(tiny: str, **settings: Any) -> Any:
    learner = wb.engines.local(tiny, lr=1e-3, device="cpu", **settings)
    return wb.engines.paired(learner, wb.engines.local(tiny, device="cpu"))


def make(tiny: str, reward: Any = None, **settings: Any) -> tuple[wb.Pipeline, wb.datasets.Rows]:
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256, limit=12)
    reward = reward or Reward(digits, in_process=True)
    pipe = wb.recipes.grpo(two(tiny), reward, group_size=2, max_tokens=12, **settings)
    return wb.recipes.with_rollout_correction(pipe, "decoupled_token_is"), rows


def train(pipe: Any, rows: Any, run: Path, **settings: Any) -> wb.Run:
    chosen: dict[str, Any] = {"steps": 4, "batch_size": 4, "trace_freq": 1, "keep_traces": 9, "ahead": 1, "seed": 3}
    return wb.train_blocking(pipe, rows, run=run, **{**chosen, **settings})


def numbers(run: wb.Run) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if not k.startswith(("timing_", "perf/"))} for row in run.rows]


@pytest.fixture(scope="module")
def quiet(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> wb.Run:
    return train(*make(tiny), tmp_path_factory.mktemp("ahead") / "run")


# --- which rows -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_each_step_learns_from_rows_that_are_one_version_old(quiet: wb.Run, tiny: str, tmp_path: Path) -> None:
    in_turn = train(*make(tiny), tmp_path / "in-turn", ahead=0)
    for step in range(1, 5):
        mine, theirs = quiet.traces[step], in_turn.traces[step]
        assert list(mine.batch["uid"]) == list(theirs.batch["uid"]) and mine.names == theirs.names
        assert mine.batch["policy_version"].unique().tolist() == [max(step - 2, 0)]
        assert mine.batch.origins["responses"].policy_version == max(step - 2, 0)
        assert mine.batch.origins["old_log_probs"].policy_version == step - 1
        assert theirs.batch["policy_version"].unique().tolist() == [step - 1]
        assert mine["rollout"].settings.get("drawn_ahead") == (1 if step > 1 else None)
    assert [row["training/policy_lag/mean"] for row in quiet.rows] == [0, 1, 1, 1]
    assert [row["training/policy_lag/max"] for row in quiet.rows] == [0, 1, 1, 1]
    assert [row["training/policy_lag/max"] for row in in_turn.rows] == [0, 0, 0, 0]
    assert quiet.settings["train"]["ahead"] == 1 and in_turn.settings["train"]["ahead"] == 0


@pytest.mark.slow
def test_their_tokens_are_those_that_the_older_weights_write(quiet: wb.Run, tiny: str) -> None:
    rows = make(tiny)[1]
    rollout = wb.stages.Rollout(
        wb.engines.local(tiny, device="cpu"), group_size=2, sampling=SamplingSettings(max_tokens=12)
    )
    for step in (1, 2):  # both of the weights that the run began with
        drawn = rollout(rows.batch(4, step=step, seed=3)).batch
        assert torch.equal(drawn["responses"], quiet.traces[step].batch["responses"])
    rollout = wb.stages.Rollout(quiet.engine(1), group_size=2, sampling=SamplingSettings(max_tokens=12))
    drawn = rollout(rows.batch(4, step=3, seed=3)).batch
    assert torch.equal(drawn["responses"], quiet.traces[3].batch["responses"])


@pytest.mark.slow
def test_a_run_can_be_done_again(quiet: wb.Run, tiny: str, tmp_path: Path) -> None:
    again = train(*make(tiny), tmp_path / "again", save_freq=2)
    assert numbers(again) == numbers(quiet)


@pytest.mark.slow
def test_validation_between_draws_changes_nothing(quiet: wb.Run, tiny: str, tmp_path: Path) -> None:
    pipe, rows = make(tiny)
    run = train(pipe, rows, tmp_path / "r", eval_rows=rows[:4], test_freq=1)
    trained = [{k: v for k, v in row.items() if k in numbers(quiet)[1]} for row in numbers(run)[1:]]
    assert trained == numbers(quiet)
    assert [row["training/global_step"] for row in run.rows if "val/reward" in row] == [0, 1, 2, 3, 4]


@pytest.mark.slow
def test_validation_and_a_draw_never_ask_the_reward_at_once(tiny: str, tmp_path: Path) -> None:
    """Also where no update has moved the weights, so that the sampler need not be waited for."""
    inside = threading.Lock()

    def alone(response: str) -> float:
        assert inside.acquire(blocking=False), "two threads judge"
        time.sleep(0.005)
        inside.release()
        return digits(response)

    pipe, rows = make(tiny, Reward(alone, in_process=True))
    still = pipe.with_stage("update_actor", from_step=99)
    run = train(still, rows, tmp_path / "r", steps=3, eval_rows=rows[:4], test_freq=1)
    assert [row["training/policy_lag/max"] for row in run.rows[1:]] == [0, 0, 0]
    assert [row["reward/scored_ratio"] for row in run.rows[1:]] == [1, 1, 1] and run.rows[3]["val/unscored"] == 0


@pytest.mark.slow
def test_filtered_and_baselined_groups_are_drawn_whole(tiny: str, tmp_path: Path) -> None:
    rows = make(tiny)[1]
    pipe = wb.recipes.dapo(two(tiny), Reward(digits, in_process=True), rows=rows, group_size=2, max_tokens=8)
    assert execute.drawn_stages(pipe).names == ("rollout", "reward", "filter_groups")
    run = train(
        wb.recipes.with_rollout_correction(pipe, "decoupled_token_is").streaming_rewards(),
        rows,
        tmp_path / "r",
        steps=3,
    )
    assert [row["training/policy_lag/max"] for row in run.rows] == [0, 1, 1]
    assert run.traces[3].batch["policy_version"].unique().tolist() == [1]
    remax = wb.recipes.remax(two(tiny), Reward(digits, in_process=True))
    assert execute.drawn_stages(remax).names == ("rollout", "reward", "baseline")


def test_the_step_counts_the_seconds_that_it_waited(quiet: wb.Run) -> None:
    for step in (2, 3, 4):
        trace = quiet.traces[step]
        own = sum(phase.seconds for phase in trace if "drawn_ahead" not in phase.settings)
        drawn = sum(phase.seconds for phase in trace if "drawn_ahead" in phase.settings)
        waited = drawn - trace.metrics["timing_s/overlapped"]
        assert waited >= 0 and trace.metrics["timing_s/step"] == pytest.approx(own + waited)
    assert "timing_s/overlapped" not in quiet.traces[1].metrics


@pytest.mark.slow
def test_the_next_rows_are_drawn_and_judged_while_a_step_is_learnt_from(tiny: str, tmp_path: Path) -> None:
    """Step 1's update ends only after step 2's reward has begun, and the other way round in the draw's thread."""
    judging, steps = threading.Event(), []

    def judged(response: str, extra_info: Any) -> float:
        if threading.current_thread().name == "workbench-ahead":
            judging.set()
        return digits(response)

    pipe, rows = make(tiny, Reward(judged, in_process=True))
    engine = pipe["rollout"].sampler  # type: ignore[attr-defined]
    plain = engine.learner.learn

    def learn(*args: Any, **kwargs: Any) -> Any:
        steps.append(judging.wait(LONG))
        return plain(*args, **kwargs)

    engine.learner.learn = learn
    train(pipe, rows, tmp_path / "r", steps=2, trace_freq=0)
    assert steps == [True, True]


# --- the pair -------------------------------------------------------------------------------------


def test_held_weights_stay_until_they_are_let_go(tiny: str) -> None:
    engine = two(tiny)
    ask = Request(tuple(engine.tokenizer.encode("1+1=")), SamplingSettings(max_tokens=4), 7)
    held = engine.hold()
    assert held.version == 0
    engine.learner.commit()
    with held.drawing():
        assert engine.version == 0 and engine.sample_many([ask])[0].version == 0
    assert engine.version == 1
    with pytest.raises(EngineError, match="rows are being sampled with the held weights of version 0"):
        engine.push()
    newer = asyncio.run_coroutine_threadsafe(engine.sample(ask), runtime.loop())
    time.sleep(0.1)
    assert not newer.done()  # it needs other weights than those that are held
    held.release()
    held.release()
    assert newer.result(timeout=LONG).version == 1
    second = engine.hold()
    engine._restartable = SimpleNamespace(starts=5)  # as after a restart: the weights are gone, and may not be guessed
    with second.drawing(), pytest.raises(EngineError, match="of version 1.* are lost"):
        engine.sample_many([ask])
    second.release()


# --- refused before work --------------------------------------------------------------------------


@pytest.mark.slow
def test_what_cannot_be_is_refused_before_anything_is_written(tiny: str, tmp_path: Path) -> None:
    rows = make(tiny)[1]
    single = wb.recipes.grpo(wb.engines.local(tiny, device="cpu"), Reward(digits, in_process=True), group_size=2)
    with pytest.raises(SettingError, match=r"ahead=1.*LocalEngine, which samples with the weights.*engines.paired"):
        train(single, rows, tmp_path / "r")
    shared = two(tiny)
    shared.share_device = True
    pipe = wb.recipes.grpo(shared, Reward(digits, in_process=True), group_size=2)
    with pytest.raises(SettingError, match="share_device=True"):
        train(pipe, rows, tmp_path / "r")
    with pytest.raises(EngineError, match="share_device=True"):
        shared.hold()
    for wrong in (2, -1, True, 0.5):
        with pytest.raises(SettingError, match="ahead"):
            train(pipe, rows, tmp_path / "r", ahead=wrong)
    assert not (tmp_path / "r").exists()


# --- correction -----------------------------------------------------------------------------------


def test_the_loss_is_told_how_old_the_rows_are(quiet: wb.Run) -> None:
    for step in (1, 3):
        batch = quiet.traces[step].batch
        ratio = (batch["old_log_probs"] - batch["rollout_log_probs"]).exp().clamp(max=2.0)
        inside = batch["response_mask"].bool()
        assert torch.allclose(batch["rollout_is_weights"][inside], ratio[inside], atol=1e-6)
        moved = (batch["rollout_is_weights"][inside] - 1).abs().max()
        assert moved < 1e-4 if step == 1 else moved > 1e-3


@pytest.mark.slow
def test_an_uncorrected_pipeline_is_warned_of(
    quiet: wb.Run, tiny: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pipe, rows = make(tiny)
    assert execute.correction(pipe) == "token weights, truncated at 2.0"
    assert wb.recipes.with_rollout_correction(pipe, rollout_is="sequence").names == pipe.names  # replaced, not doubled
    plain = wb.recipes.grpo(two(tiny), Reward(digits, in_process=True), group_size=2, max_tokens=12)
    assert execute.correction(plain) is None
    measured = wb.Pipeline([*[*plain][:4], wb.stages.RolloutCorrection(), *[*plain][4:]])
    assert execute.correction(measured) is None  # only measured
    bypass = [one for one in plain if one.name not in ("old_log_prob", "ref_log_prob")]
    bypass.insert(2, wb.stages.RolloutCorrection(bypass_mode=True))
    assert "the sampler's log-probs" in str(
        execute.correction(wb.Pipeline([*bypass[:-1], bypass[-1].with_settings(kl_coef=0.0)]))
    )
    with caplog.at_level(logging.WARNING, logger="workbench"):
        run = train(plain, rows, tmp_path / "r", steps=1)
    assert "sampler and trainer differ" not in [one.name for one in quiet.symptoms]
    assert "NOT corrected" in caplog.text and "recipes.with_rollout_correction" in caplog.text and len(run.rows) == 1


def test_the_preflight_says_where_rows_are_drawn(tiny: str, tmp_path: Path) -> None:
    from workbench.runs.settings import TrainPlan

    plan = TrainPlan(steps=2, batch_size=4, run=tmp_path / "r", ahead=1)
    pipe, rows = make(tiny)
    found = dict(preflight(pipe, rows, plan).findings)["placement"]
    assert found.startswith("rollout, reward one step ahead by LocalEngine") and "corrected: token weights" in found


# --- how it ends ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_error_in_the_draw_is_raised_in_the_step_that_needs_the_rows(
    quiet: wb.Run, tiny: str, tmp_path: Path
) -> None:
    def failing(response: str, uid: str, extra_info: Any) -> float:
        if uid in third:
            raise ValueError("no such judge")
        return digits(response)

    third: set[str] = set()
    pipe, rows = make(tiny, Reward(failing, in_process=True))
    third |= set(rows.batch(4, step=3, seed=3)["uid"])
    with pytest.raises(WorkbenchError, match="no such judge"):
        train(pipe, rows, tmp_path / "r")
    run = wb.load_run(tmp_path / "r")
    assert len(run.rows) == 2 and run.checkpoints == [2]  # step 2 was whole, with its rows drawn before
    failed = Trace.load(tmp_path / "r" / "failed" / "step_000003")
    assert failed.names == ("rollout",) and failed.batch["policy_version"].unique().tolist() == [1]
    third.clear()
    assert not (run.checkpoint(2) / "pending").exists()
    train(pipe, rows, tmp_path / "r", resume="auto")
    assert wb.load_run(tmp_path / "r").rows[2]["training/policy_lag/max"] == 0  # drawn anew, by the weights there are


@pytest.mark.slow
def test_rows_that_are_too_old_are_never_learnt_from(quiet: wb.Run, tiny: str) -> None:
    pipe, rows = make(tiny)
    source = execute.Ahead(pipe, lambda step: rows.batch(4, step=step, seed=3), last=9, pending=quiet.traces[2])
    for _ in range(2):
        pipe["rollout"].sampler.learner.commit()  # type: ignore[attr-defined]
    with pytest.raises(
        VersionMismatch, match=r"rows of step 2 .* version 2, the learner's, or at most 1 older.*0 to 0"
    ):
        source.take(rows.batch(4, step=2, seed=3))
    assert source.close(1) == ""


@pytest.mark.long
@pytest.mark.slow
def test_break_if_stands_before_the_update_on_the_rows_that_were_drawn(
    quiet: wb.Run, tiny: str, tmp_path: Path
) -> None:
    pipe, rows = make(tiny)
    seen: list[int] = []

    def third(metrics: Any) -> bool:
        seen.append(1)
        return len(seen) == 3

    run = train(pipe, rows, tmp_path / "r", break_if=third)
    s = run.stopped
    assert s is not None and s.next_stage == "update_actor" and run.checkpoints == [2]
    assert torch.equal(s.batch["responses"], quiet.traces[3].batch["responses"])
    assert (run.checkpoint(2) / "pending" / "trace.json").is_file()
    assert s.back(to="rollout").run(until="old_log_prob").trace["rollout"].reused
    again = train(pipe, rows, tmp_path / "r", resume="auto")
    assert numbers(again) == numbers(quiet)
    assert not [one for one in threading.enumerate() if one.name == "workbench-ahead"]


@pytest.mark.parametrize("slow", ["draw", "step"])
@pytest.mark.slow
def test_an_interrupt_ends_the_draw_and_the_run_goes_on(
    quiet: wb.Run, tiny: str, tmp_path: Path, slow: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draw that takes longer than the grace is thrown away; one that is done goes into the checkpoint."""
    if slow == "draw":
        monkeypatch.setattr(runtime, "GRACE", 2.0)
    pipe, rows = make(tiny)
    engine = pipe["rollout"].sampler  # type: ignore[attr-defined]
    plain, learn, stuck, reached = engine.sampler._decode, engine.learner.learn, [True], threading.Event()

    def crawling(wave: Any) -> Any:
        while stuck and engine.sampler.version == 1 and slow == "draw":  # the rows of step 3
            reached.set()
            runtime.check()
            time.sleep(0.01)
        return plain(wave)

    def learning(*args: Any, **kwargs: Any) -> Any:
        if stuck and engine.learner.version == 1 and slow == "step":
            reached.set()
            time.sleep(0.5)
        return learn(*args, **kwargs)

    engine.sampler._waves._answer = crawling
    engine.learner.learn = learning

    async def interrupted() -> None:
        job = asyncio.ensure_future(
            wb.train(pipe, rows, run=tmp_path / "r", steps=4, batch_size=4, ahead=1, seed=3, trace_freq=1)
        )
        await asyncio.to_thread(reached.wait, LONG)
        job.cancel()
        await job

    with pytest.raises(asyncio.CancelledError) as told:
        asyncio.run(interrupted())
    assert not [one for one in threading.enumerate() if one.name == "workbench-ahead"]
    run = wb.load_run(tmp_path / "r")
    assert run.checkpoints == [2] and (run.checkpoint(2) / "pending").is_dir() == (slow == "step")
    assert ("rows of step 3 were not finished" in str(told.value)) == (slow == "draw")
    stuck.clear()
    again = train(pipe, rows, tmp_path / "r", resume="auto")
    assert len(again.rows) == 4 and again.rows[2]["training/policy_lag/max"] == (0 if slow == "draw" else 1)
    if slow == "step":
        assert numbers(again) == numbers(quiet)


@pytest.mark.slow
@pytest.mark.long
def test_a_run_is_sampled_ahead_from_a_resume_on_where_that_is_allowed(tiny: str, tmp_path: Path) -> None:
    pipe, rows = make(tiny)
    run = train(pipe, rows, tmp_path / "r", ahead=0, steps=1)
    assert len(train(pipe, rows, run.path, ahead=0, steps=2, resume="auto").rows) == 2
    with pytest.raises(WorkbenchError, match="train.ahead: 0 → 1"):
        train(pipe, rows, run.path, ahead=1, steps=3, resume="auto")
    allowed = train(pipe, rows, run.path, ahead=1, steps=4, resume="auto", allow_changes=["train.ahead"])
    assert [row["training/policy_lag/max"] for row in allowed.rows] == [0, 0, 0, 1]


# --- looking back ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_recorded_step_keeps_the_rows_that_its_own_weights_did_not_write(quiet: wb.Run) -> None:
    s = quiet.stepper(3)
    assert "sampled one step ahead, by the weights after step 1; as recorded" in repr(s)
    s.run()
    recorded = quiet.traces[3]
    assert s.trace["rollout"].reused and not s.trace["old_log_prob"].reused and s.notes[-1].endswith("as recorded")
    for name in ("responses", "old_log_probs", "rollout_is_weights", "advantages", "new_log_probs"):
        assert torch.equal(s.batch[name], recorded.batch[name]), name
    assert s.trace.metrics["timing_s/step"] > 0
    other = quiet.stepper(3, at="rollout")
    assert "those after step 2, which are here, sample other tokens" in repr(other)
    assert "sampled one step ahead" in repr(quiet.stepper(3, at="advantage"))
    assert "sampled one step ahead" not in repr(quiet.stepper(1))


@pytest.mark.slow
@pytest.mark.long
def test_it_learns_one_step_ahead(tmp_path: Path, tiny: str) -> None:
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256)
    held = wb.rows("data/arith/test.parquet", max_prompt_length=256, limit=128)
    engine = wb.engines.paired(wb.engines.local(tiny, lr=2e-4), wb.engines.local(tiny))
    pipe = wb.recipes.with_rollout_correction(
        wb.recipes.grpo(engine, group_size=8, kl_coef=0.001, max_tokens=64), "decoupled_token_is"
    )
    run = wb.train_blocking(pipe, rows, steps=25, batch_size=16, ahead=1, run=tmp_path / "run", eval_rows=held)
    assert run.summary["reward_after"] > run.summary["reward_before"] + 0.2
