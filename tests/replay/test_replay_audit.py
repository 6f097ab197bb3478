"""A second reading of recorded steps: it agrees with every algorithm's run, and sees what was changed."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb
from workbench import functional as F
from workbench.agents import ToolAgent, load_tools
from workbench.base.errors import RunError
from workbench.cli import main
from workbench.dataproto import DataProto
from workbench.replay.audit import Audit, audit_trace
from workbench.rewards.scorers.gsm8k import gsm8k as gsm8k_rule
from workbench.runs.loop import run_step
from workbench.stages import Advantage, ExactKL, LogProb, Resample, TurnScores
from workbench.steps.trace import Phase, Trace

ROOT = Path(__file__).parents[2]
Make = Callable[[Any], wb.Pipeline]


def mixed(response: str) -> Any:
    """Parts, not all of them in every row, and rows that are not scored."""
    length = len(response)
    if length % 7 == 0:
        return None
    return {"score": (length % 5) / 4, "length": length / 10, **({"even": length % 2 == 0} if length % 3 else {})}


def reward(function: Any = mixed) -> wb.rewards.Reward:
    return wb.rewards.Reward(function, in_process=True)


def recipe(name: str, **settings: Any) -> Make:
    return lambda engine: wb.recipes.by_name(name)(engine, reward(), **{"group_size": 4, "max_tokens": 9, **settings})


def grpo_with(estimator: Any, *, settings: dict[str, Any] | None = None, **options: Any) -> Make:
    plain = recipe("grpo", **(settings or {}))
    return lambda engine: plain(engine).with_stage("advantage", Advantage(estimator, **options))


def token_baseline(estimator: Any) -> Make:
    def make(engine: Any) -> wb.Pipeline:
        pipe = recipe("grpo", kl_coef=0.0)(engine)
        pipe = pipe.with_stage("old_log_prob", LogProb(engine, entropy=True, sum_pi_squared=True))
        return pipe.with_stage("advantage", Advantage(estimator))

    return make


def measured(engine: Any) -> wb.Pipeline:
    """Exact KL beside the estimators, and rows drawn again by their reward."""
    plain = recipe("grpo", max_tokens=6)(engine).insert_after("ref_log_prob", ExactKL(engine, engine.reference()))
    return plain.with_stage("reward", wb.stages.Reward(reward(lambda response: float(len(response) % 3)))).insert_after(
        "advantage", Resample()
    )


def corrected(*block: str, base: str = "grpo", **settings: Any) -> Make:
    plain = recipe(base, ppo_mini_batch_size=1)
    return lambda engine: wb.recipes.with_rollout_correction(plain(engine), *block, **settings)


tight = {"clip_ratio_low": 1e-3, "clip_ratio_high": 1e-3, "ppo_mini_batch_size": 1}
PIPELINES: dict[str, Make] = {  # others beside the slips, in test_replay_audit_mutations.py
    "grpo": recipe("grpo", entropy_coeff=0.01),
    "grpo, mini-batches": recipe("grpo", **tight),
    "grpo, epochs": recipe("grpo", ppo_epochs=2, ppo_mini_batch_size=2, clip_ratio_high=0.01),
    "grpo, shuffled": lambda engine: recipe("grpo", ppo_epochs=2, **tight)(engine).with_stage(
        "update_actor", shuffle=True
    ),
    "grpo, three epochs": recipe("grpo", ppo_epochs=3, kl_type="k3", **tight),
    "gspo, epochs": recipe("grpo", ppo_epochs=3, loss_mode="gspo", loss_agg_mode="seq-mean-token-mean"),
    "grpo, KL in the reward": grpo_with(F.grpo, kl_controller=F.AdaptiveKL(0.1, 0.01, 50), kl_type="k3"),
    "grpo, pass@k, sapo": grpo_with(F.grpo_passk, settings={"loss_mode": "sapo"}),
    "grpo, groups of one": grpo_with(F.grpo, settings={"group_size": 1, "loss_mode": "geo_mean"}, singleton="verl"),
    "grpo, dppo_tv": recipe("grpo", loss_mode="dppo_tv", kl_type="abs", **tight),
    "grpo, dppo_kl": recipe("grpo", loss_mode="dppo_kl", **tight),
    "grpo, kl_cov": recipe("grpo", loss_mode="kl_cov", kl_coef=0.0),
    "grpo, dro": recipe("grpo", loss_mode="dro", loss_agg_mode="seq-mean-token-sum", ppo_mini_batch_size=2),
    "ppo": recipe("ppo", group_size=2, critic_lr=1e-2, kl_coef=0.05, kl_target=1e-3, kl_horizon=20, gamma=0.9, lam=0.8),
    "ppo, critic first": recipe("ppo", group_size=1, kl_coef=0.05, critic_warmup=2, ppo_mini_batch_size=2),
    "dapo": recipe("dapo", group_size=2, overlong_buffer=4),
    "rloo": recipe("rloo", kl_type="k2"),
    "opo": recipe("opo", loss_agg_mode="seq-mean-token-mean", max_tokens=30),
    "reinforce++ with a baseline": grpo_with(F.reinforce_plus_plus_baseline, settings={"kl_coef": 0.0}),
    "token baseline of own tokens": token_baseline(F.tir_optimal_token_baseline),
    "exact KL, resampled": measured,
    "gdpo": grpo_with(F.gdpo, parts=("length", "even"), weights=[1.0, 0.5]),
    "a threshold within rounding": corrected(rollout_is="token", rollout_rs={"token_k1": 1 + 1e-7}),
    "a threshold within rounding, in the loss": corrected("bypass_ppo_clip_k3_rs", rollout_rs_threshold=1e-12),
    "everything rejected": corrected(rollout_rs={"token_k2": 1e-30}, base="ppo"),
}


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., wb.Run]:
    """Two steps with every trace kept."""

    def run(
        make: Make, model: str = "data/tiny-arith", data: str = "data/arith/train.parquet", **options: Any
    ) -> wb.Run:
        engine = wb.engines.local(ROOT / model, lr=1e-3, device="cpu")
        rows = wb.rows(ROOT / data, max_prompt_length=256)[:12]
        given = {"steps": 2, "batch_size": 3, "trace_freq": 1, "keep_traces": 9, "keep_updates": 0, **options}
        return wb.train_blocking(make(engine), rows, run=tmp_path_factory.mktemp("run") / "r", **given)

    return run


def two_steps(make: Make) -> Iterator[tuple[Trace, Audit]]:
    """Traces that were never on disk, and what the audit says of them."""
    pipe = make(wb.engines.local(ROOT / "data/tiny-arith", lr=1e-3, device="cpu"))
    rows = wb.rows(ROOT / "data/arith/train.parquet", max_prompt_length=256, limit=12)
    for step in (1, 2):
        before = copy.deepcopy(pipe.state())
        trace = run_step(pipe, rows.batch(3, step=step, seed=0))
        yield trace, audit_trace(trace, before=before, after=pipe.state())


@pytest.mark.slow
@pytest.mark.parametrize("name", PIPELINES)
def test_a_second_reading_of_every_algorithm_agrees(name: str) -> None:
    for _, found in two_steps(PIPELINES[name]):
        assert found.agrees and not found.unaudited, found
        assert len(found.columns) >= 13 and len(found.metrics) >= 45
        assert f"{len(found.columns)} columns, {len(found.metrics)} metrics agree" in repr(found)


def test_mini_batches_in_a_random_order_are_recomputed_in_that_order() -> None:
    for _, found in two_steps(PIPELINES["grpo, shuffled"]):
        assert {"actor/pg_loss", "actor/pg_clipfrac", "actor/ppo_kl"} <= found.metrics, found.left


def rejecting(engine: Any) -> wb.Pipeline:
    """Weights, and every level of rejection, on rows of an older policy."""
    plain = recipe("grpo", group_size=3)(engine)
    return wb.recipes.with_rollout_correction(
        plain, rollout_is="token", rollout_is_batch_normalize=True, rollout_rs="token_k1,seq_max_k2,seq_mean_k3,seq_sum_k1",
        rollout_rs_threshold="0.9_1.05,0.5,0.01,0.5_2.0",
    )  # fmt: skip


def bypassing(engine: Any) -> wb.Pipeline:
    """Weights of whole rows, and rejection, in the loss."""
    plain = recipe("gpg")(engine)
    return wb.recipes.with_rollout_correction(
        plain, rollout_is="sequence", rollout_is_threshold="0.5_2.0", rollout_rs="token_k1", rollout_rs_threshold="0.9_1.05",
        bypass_mode=True, loss_type="reinforce",
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("make", [rejecting, bypassing])
def test_rows_of_an_older_policy_and_their_correction_agree(make: Make, train: Callable[..., wb.Run]) -> None:
    def two(engine: Any) -> wb.Pipeline:
        return make(wb.engines.paired(engine, wb.engines.local(ROOT / "data/tiny-arith", device="cpu")))

    found = train(two, steps=3, ahead=1).audit()
    assert found.agrees and not found.unaudited, found
    assert {"rollout_is_weights", "loss_mask"} <= found.columns
    assert {"training/policy_lag/max", "rollout_corr/rollout_rs_token_k1_mean", "actor/pg_loss"} <= found.metrics
    assert ("rollout_corr/rollout_rs_token_k1_std" in found.left) == (make is bypassing)  # means of micro-batches' own


@pytest.mark.parametrize(
    "inexact", [{"lora_rank": 2, "lora_dropout": 0.3}, pytest.param({"dtype": "bfloat16"}, marks=pytest.mark.long)]
)
def test_passes_with_dropout_or_in_half_precision_are_recomputed(inexact: dict[str, Any], train: Any) -> None:
    """The first does not compute old_log_probs again: its own log-probs are recorded, as those of each pass."""

    def make(_: Any) -> wb.Pipeline:
        engine = wb.engines.local(ROOT / "data/tiny-arith", lr=1e-3, device="cpu", **inexact)
        return recipe("grpo", ppo_epochs=2)(engine)

    found = train(make, steps=1).audit()
    assert found.agrees and "actor/pg_loss" in found.metrics, found


def test_every_pass_of_an_update_is_looked_at() -> None:
    make = recipe("grpo", ppo_epochs=3, kl_coef=0.1, ppo_mini_batch_size=2)
    update = {"actor/pg_loss", "actor/pg_clipfrac", "actor/ppo_kl", "actor/kl_loss", "actor/loss"}
    for trace, found in two_steps(make):
        assert found.agrees and update <= found.metrics and "new_log_probs/2" in trace.batch
        assert "not looked at: gradients, weights, " in found.summary()
        for column in ("new_log_probs/1", "new_log_probs/2"):
            moved = with_column(
                trace, "update_actor", column, lambda b, column=column: b[column] - 0.1 * b["response_mask"]
            )
            assert {"actor/ppo_kl", "actor/kl_loss"} <= names(audit_trace(moved)), column
        before = Trace(trace.start)  # as runs were recorded until now
        for phase in trace:
            passes = [name for name in phase.batch.columns if name.startswith("new_log_probs/")]
            before = before.add(replace(phase, batch=phase.batch.without(*passes)))
        left = audit_trace(before)
        assert "actor/pg_loss" in left.left and "actor/pg_loss" in left.summary() and "clipped" in left.columns


@pytest.mark.slow
def test_episodes_with_tools_agree(train: Callable[..., wb.Run]) -> None:
    def make(engine: Any) -> wb.Pipeline:
        tools = load_tools(ROOT / "data/arith-tools/tools.yaml")
        agent = ToolAgent(list(tools.values()), parser="hermes", max_assistant_turns=3)
        pipe = wb.recipes.grpo(engine, agent=agent, group_size=3, max_tokens=70)
        return pipe.insert_after("reward", TurnScores(tool_weight=0.5))

    run = train(make, "data/tiny-arith-tools", "data/arith-tools/train.parquet")
    found = run.audit()
    assert found.agrees and not found.unaudited, found
    assert {"response_mask", "num_turns", "tool_rewards"} <= found.columns and "model_tokens/mean" in found.metrics
    trace = run.traces[1]
    assert sum(trace.batch["num_tool_calls"]) > 0  # tool text lies inside the responses
    changed = with_column(
        trace, "rollout", "response_mask", lambda b: b["attention_mask"][:, -b["responses"].shape[1] :]
    )
    assert "response_mask" in names(audit_trace(changed))


@pytest.mark.parametrize("credit", ["turn", "arpo", "tree_rl", "tree_grpo"])
def test_trees_of_episodes_agree(train: Callable[..., wb.Run], credit: str) -> None:
    def make(engine: Any) -> wb.Pipeline:
        agent = ToolAgent(load_tools(ROOT / "data/arith-tools/tools.yaml"), parser="hermes", max_assistant_turns=3)
        settings = {"group_size": 4, "branch_turns": "every", "learn_once": credit != "tree_rl"}
        return wb.recipes.tree_grpo(engine, agent=agent, credit=credit, max_tokens=70, **settings)

    run = train(make, "data/tiny-arith-tools", "data/arith-tools/train.parquet")
    found = run.audit()
    assert found.agrees and not found.unaudited, found
    assert {"advantages", "returns"} <= found.columns and "tree/sampled_tokens" in found.metrics
    assert sum(row["tree/branched"] for row in run.rows[1:]) > 0, "something was shared"
    wrong = with_column(run.traces[1], "advantage", "advantages", lambda b: 1.01 * b["advantages"])
    assert "advantages" in names(audit_trace(wrong))
    if credit == "turn":
        assert "loss_mask" in found.columns
        twice = with_column(run.traces[1], "learnt_once", "loss_mask", lambda b: b["response_mask"])
        assert "loss_mask" in names(audit_trace(twice))


@pytest.mark.slow
def test_dynamic_sampling_agrees(train: Callable[..., wb.Run]) -> None:
    """Dynamic sampling draws further prompts."""
    rows = wb.rows(ROOT / "data/arith/train.parquet", max_prompt_length=256, limit=12)
    run = train(lambda engine: wb.recipes.dapo(engine, group_size=2, rows=rows, overlong_buffer=4, max_tokens=30))
    found = run.audit()
    assert found.agrees and not found.unaudited and run.rows[0]["train/num_gen_batches"] > 1, found


# --- what it sees ---------------------------------------------------------------------------------


def with_column(trace: Trace, stage: str, name: str, change: Callable[[DataProto], Any]) -> Trace:
    """The trace as if `stage` had written another column, which all later phases then have."""
    made = Trace(trace.start)
    value = None
    for phase in trace:
        if phase.stage == stage:
            value = change(phase.batch)
        elif value is not None and name in phase.wrote:
            value = None
        made = made.add(phase if value is None else replace(phase, batch=phase.batch.with_columns({name: value})))
    return made


def with_metric(trace: Trace, stage: str, name: str, change: Callable[[float], float]) -> Trace:
    def changed(phase: Phase) -> Phase:
        return replace(phase, metrics={**phase.metrics, name: change(phase.metrics[name])})

    return Trace(trace.start, tuple(changed(one) if one.stage == stage else one for one in trace))


def names(found: Audit) -> set[str]:
    return {one.name for one in found.disagreements}


def shifted(values: torch.Tensor) -> torch.Tensor:
    return torch.roll(values, 1, dims=-1)


def swapped(values: torch.Tensor) -> torch.Tensor:
    """Two rows that differ, exchanged."""
    other = next(row for row in range(1, len(values)) if not torch.equal(values[row], values[0]))
    made = values.clone()
    made[0], made[other] = values[other], values[0]
    return made


def last_dropped(mask: torch.Tensor) -> torch.Tensor:
    made = mask.clone()
    made[0, int(mask[0].nonzero()[-1])] = 0
    return made


COLUMNS = [
    ("rollout", "response_mask", shifted), ("rollout", "response_mask", last_dropped), ("rollout", "attention_mask", last_dropped),
    ("rollout", "attention_mask", shifted), ("rollout", "prompt_mask", shifted), ("rollout", "position_ids", lambda x: x + 1),
    ("rollout", "input_ids", shifted), ("rollout", "rollout_log_probs", shifted), ("reward", "reward", swapped),
    ("reward", "scored", lambda x: ~x), ("reward", "token_level_scores", shifted),
    ("old_log_prob", "sampler_logprob_diff", lambda x: x / 2), ("advantage", "token_level_rewards", lambda x: 1.01 * x),
    ("advantage", "advantages", lambda x: 1.00001 * x), ("advantage", "advantages", shifted), ("advantage", "returns", swapped),
    ("update_actor", "clipped", lambda x: ~x), ("update_actor", "new_log_probs", shifted),
]  # fmt: skip
METRICS = [
    ("rollout", "response_length/mean"), ("rollout", "prompt_length/max"), ("reward", "critic/score/mean"),
    ("reward", "critic/score/std"), ("old_log_prob", "actor/entropy"), ("old_log_prob", "training/rollout_kl"),
    ("advantage", "critic/advantages/max"), ("update_actor", "actor/pg_loss"), ("update_actor", "actor/kl_loss"),
    ("update_actor", "actor/pg_clipfrac"), ("update_actor", "actor/loss"),
]  # fmt: skip


@pytest.fixture(scope="module")
def plain(train: Callable[..., wb.Run]) -> wb.Run:
    return train(recipe("grpo", max_tokens=30, **tight))


@pytest.mark.parametrize(("stage", "name", "change"), COLUMNS)
def test_a_column_that_was_changed_is_seen(stage: str, name: str, change: Any, plain: wb.Run) -> None:
    trace = plain.traces[2]
    assert audit_trace(trace).agrees
    found = audit_trace(with_column(trace, stage, name, lambda batch: change(batch[name])))
    assert names(found) & ({name, "response_mask"} if name == "attention_mask" else {name})


@pytest.mark.parametrize(("stage", "name"), METRICS)
def test_a_metric_that_was_changed_is_seen(stage: str, name: str, plain: wb.Run) -> None:
    found = audit_trace(with_metric(plain.traces[2], stage, name, lambda value: value * 1.001 + 1e-5))
    assert names(found) >= {name} and "DISAGREE" in repr(found)
    told = next(one for one in found.disagreements if one.name == name)
    assert told.stage == stage and told.row is None and f"{stage}, {name}: recorded" in str(told) and told.formula


def test_a_report_names_row_and_token_and_what_it_cannot_read(plain: wb.Run) -> None:
    def nudged(batch: DataProto) -> torch.Tensor:
        made = batch["advantages"].clone()
        made[3, 2] += 1
        return made

    found = audit_trace(with_column(plain.traces[1], "advantage", "advantages", nudged))
    told = next(one for one in found.disagreements if one.name == "advantages")
    assert (told.row, told.token, told.count) == (3, 2, 1) and told.recorded == pytest.approx(told.recomputed + 1)
    assert "row 3, token 2" in repr(found) and "<table" in str(found._repr_html_())
    assert found.left["old_log_probs"].startswith("needs the model") and "advantages" not in found.columns
    new = with_metric(plain.traces[1], "advantage", "critic/rewards/mean", lambda value: value)
    new.phases[4].metrics["my/metric"] = 1.0
    assert audit_trace(new).unaudited == {"my/metric"} and "no formula to recompute my/metric" in repr(audit_trace(new))


def test_a_rule_is_read_again_only_where_the_data_source_chose_it(plain: wb.Run) -> None:
    """A function of the same name has rules of its own."""

    def gsm8k(response: str) -> float:
        return 0.25

    shipped = partial(gsm8k_rule, format_score=0.1)
    for judge, again in ((reward(gsm8k), False), (reward(shipped), False), (wb.rewards.by_data_source(), True)):
        found = audit_trace(plain.stepper(2, at="reward").replace("reward", judge).run(until="reward").trace)
        assert found.agrees and ("strict rule" in found.left["score"]) == again


@pytest.mark.slow
def test_the_rows_of_a_run_are_read_too(plain: wb.Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """metrics.jsonl against the traces, the loop's own metrics, and what runs through the steps."""
    assert main(["audit", str(plain.path)]) == 0 and "metrics agree" in capsys.readouterr().out
    copied = Path(shutil.copytree(plain.path, tmp_path / "r"))
    rows = wb.load_run(copied).rows
    rows[0]["actor/grad_norm"] += 1
    rows[1] |= {"perf/throughput": rows[1]["perf/throughput"] * 1.3, "training/global_step": 2}
    (copied / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert names(wb.load_run(copied).audit()) == {"actor/grad_norm", "perf/throughput"}
    assert wb.load_run(copied).audit(2).steps == (2,)
    (copied / "metrics.jsonl").write_text(json.dumps(rows[1]) + "\n")
    lacking = wb.load_run(copied).audit()
    assert re.search(r"\n +1 +metrics.jsonl +step +recorded 'nothing', recomputed 1 ", repr(lacking))
    for strange in ("2", True, 2.0, 7):
        with pytest.raises(RunError, match=f"no trace of step {strange!r}.*trace_freq=1, keep_traces=…"):
            wb.load_run(copied).audit(strange)
    shutil.rmtree(copied / "traces/step_000002")
    (copied / "traces/step_000001").rename(copied / "traces/step_000002")
    assert "step" in names(wb.load_run(copied).audit()) and main(["audit", str(copied)]) == 1


@pytest.mark.parametrize("name", ["grpo", "ppo", "lora", "agents", "ahead"])
def test_the_columns_of_recorded_runs_agree(name: str) -> None:
    found = wb.load_run(ROOT / "tests/recorded/0.12.0" / name).audit()
    told = found.disagreements
    assert not told and len(found.columns) >= 14 and len(found.metrics) >= 30, told
