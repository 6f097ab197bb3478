"""Rows D of the scorecard: bad data and bad numbers; each test injects its fault. The names say which row."""

from __future__ import annotations

import json
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
import torch

import workbench as wb
from workbench import functional as F
from workbench.base.config import Settings, coerce
from workbench.base.errors import DataError, NonFinite, RewardError, SettingError, WorkbenchError
from workbench.datasets import files
from workbench.engines import SamplingSettings


def make(tiny: str, reward: Any = None, **settings: Any) -> tuple[wb.Pipeline, wb.datasets.Rows]:
    engine = wb.engines.local(tiny, lr=1e-3, device="cpu")
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256, limit=8)
    return wb.recipes.grpo(engine, reward, **{"group_size": 2, "max_tokens": 8, **settings}), rows


def weights_hash(pipe: wb.Pipeline) -> int:
    tensors = pipe.learners()["actor"].snapshot()["weights"]
    return sum(zlib.crc32(tensors[name].numpy().tobytes()) for name in sorted(tensors))


# --- D1: numbers that are none --------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_D1_a_reward_that_is_no_number_is_that_rows_failure_and_names_function_and_row(tiny: str, bad: float) -> None:
    calls: list[int] = []

    def breaks(response: str) -> float:
        calls.append(1)
        return bad if len(calls) == 3 else 0.5

    pipe, rows = make(tiny, wb.rewards.Reward(breaks, in_process=True))
    batch = wb.Stepper(pipe, rows.batch(4)).run().batch
    assert batch["scored"].tolist() == [True, True, False, *[True] * 5] and batch["reward"].tolist().count(0.5) == 7
    assert "breaks, row 2; expected a finite number" in batch["score"][2].why
    calls.clear()
    pipe, rows = make(tiny, wb.rewards.Reward(breaks, in_process=True, on_failure="raise"))
    before = weights_hash(pipe)
    with pytest.raises(RewardError, match=r"breaks, row 2; expected a finite number"):
        wb.Stepper(pipe, rows.batch(4)).run()
    assert weights_hash(pipe) == before


@pytest.mark.parametrize("column", ["advantages", "old_log_probs", "ref_log_prob"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_D1_a_poisoned_column_names_itself_and_its_rows_and_no_step_is_taken(
    tiny: str, column: str, bad: float
) -> None:
    pipe, rows = make(tiny)
    batch = wb.Stepper(pipe, rows.batch(4)).run(until="advantage").batch
    before = weights_hash(pipe)
    poisoned = batch[column].clone()
    poisoned[3, 0] = bad
    with pytest.raises(NonFinite) as caught:
        pipe["update_actor"](batch.with_columns({column: poisoned}))
    told = str(caught.value)
    assert column in told and str(batch["uid"][3]) in told and "row 3" in told, told
    assert weights_hash(pipe) == before and pipe.learners()["actor"].version == 0


def test_D1_a_kl_that_is_no_number_never_reaches_the_controller(tiny: str) -> None:
    engine = wb.engines.local(tiny, lr=1e-3, device="cpu")
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256, limit=8)
    pipe = wb.recipes.ppo(engine, group_size=2, max_tokens=8, kl_coef=0.1, kl_target=0.1)
    batch = wb.Stepper(pipe, rows.batch(4)).run(until="values").batch
    before = pipe["advantage"].state()
    bad = batch["ref_log_prob"].clone()
    bad[5, 0] = float("nan")
    with pytest.raises(NonFinite, match=f"KL to the reference is NaN or infinite; found rows 5 .uid {batch['uid'][5]}"):
        pipe["advantage"](batch.with_columns({"ref_log_prob": bad}))
    assert pipe["advantage"].state() == before
    outside = batch["ref_log_prob"].masked_fill(batch["response_mask"] == 0, float("nan"))
    assert pipe["advantage"](batch.with_columns({"ref_log_prob": outside})).batch["advantages"].isfinite().all()


def test_D1_an_estimator_that_breaks_is_named_with_its_rows(tiny: str) -> None:
    def broken(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return scores[:, None] * mask / 0.0

    pipe, rows = make(tiny)
    with pytest.raises(
        WorkbenchError, match=r"advantages of broken; expected finite numbers; found NaN or inf in rows \["
    ):
        wb.Stepper(pipe.with_stage("advantage", broken), rows.batch(4)).run()


@pytest.mark.slow
def test_D1_a_gradient_that_is_no_number_leaves_everything(tiny: str) -> None:
    """The loss is finite, its gradient is not: sqrt at 0, in one row."""

    class Steep(wb.stages.PolicyLoss):
        def __call__(self, outputs: Any, rows: Any, loss_counts: Any) -> Any:
            made = super().__call__(outputs, rows, loss_counts)
            poisoned = (rows["advantages"] == 7.5).any(-1)
            zero = (outputs["log_probs"] * 0).abs().sum(-1) + ~poisoned
            return type(made)(made.loss + zero.sqrt().sum(), made.metrics, made.columns)

    pipe, rows = make(tiny)
    update = wb.stages.Update(pipe.learners()["actor"], Steep(kl_coef=0.001))
    batch = wb.Stepper(pipe, rows.batch(4)).run(until="advantage").batch
    advantages = batch["advantages"].clone()
    advantages[3, 0] = 7.5
    before = weights_hash(pipe)
    with pytest.raises(NonFinite, match="gradient norm is NaN or infinite; no step was taken") as caught:
        update(batch.with_columns({"advantages": advantages}))
    named = [name for name, _ in pipe.learners()["actor"]._model.named_parameters()]
    told = str(caught.value)
    assert f"nan: the gradients of {len(named)} parameters are not finite, next to the loss {named[-1]}" in told
    assert caught.value.__notes__ == [
        f"mini-batch rows whose own gradient is not finite: [3], uids ['{batch['uid'][3]}']"
    ]
    assert weights_hash(pipe) == before
    pipe["update_actor"](batch)  # and the next, good one works
    assert weights_hash(pipe) != before


# --- D2: defined results where there is nothing to learn from ------------------------------------


def test_D2_estimators_have_defined_results() -> None:
    cases = {
        "a group of one": ([1.0], [0], [[1, 1]]),
        "equal rewards": ([0.3, 0.3, 0.3], [0, 0, 0], [[1, 1]] * 3),
        "an empty response": ([1.0, 0.0], [0, 0], [[0, 0], [1, 1]]),
        "no token at all": ([1.0, 0.0], [0, 0], [[0, 0], [0, 0]]),
        "nobody judged": ([0.0, 0.0], [0, 0], [[1, 1], [1, 1]]),
    }
    for name, (rewards, uids, masks) in cases.items():
        scores, groups, mask = torch.tensor(rewards), torch.tensor(uids), torch.tensor(masks)
        scored = torch.tensor([name != "nobody judged"] * len(rewards))
        tokens = torch.zeros(mask.shape)
        tokens[:, -1] = scores
        for estimator in (F.grpo, F.grpo_passk, F.rloo, F.opo, F.gpg, F.reinforce_plus_plus_baseline):
            advantages, _ = estimator(scores, groups, mask, scored=scored)
            assert advantages.isfinite().all(), (name, estimator)
            if name != "an empty response":
                assert (advantages == 0).all(), (name, estimator)
        for pair in (
            F.reinforce_plus_plus(tokens, mask, scored=scored),
            F.remax(tokens, scores, mask, scored=scored),
            F.gdpo(scores[:, None], groups, mask, scored=scored),
            F.gae(tokens, torch.zeros(mask.shape), mask),
        ):
            assert all(one.isfinite().all() for one in pair), name


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_D2_a_step_in_which_all_rewards_are_equal_is_a_step(tiny: str, value: float) -> None:
    pipe, rows = make(tiny, wb.rewards.Reward(lambda response: value, in_process=True), kl_coef=0.0)
    s = wb.Stepper(pipe, rows.batch(4)).run()
    assert (s.batch["advantages"] == 0).all() and s.trace.metrics["actor/grad_norm"] == 0.0
    assert all(value == value for value in s.trace.metrics.values())


@pytest.mark.slow
def test_F10_a_step_in_which_nobody_is_judged_changes_no_weight_and_says_why(tiny: str, tmp_path: Path) -> None:
    pipe, rows = make(tiny, wb.rewards.Reward(lambda response: None, in_process=True), kl_coef=0.0)
    s = wb.Stepper(pipe, rows.batch(4)).run(until="advantage")
    assert not s.batch["scored"].any() and (s.batch["advantages"] == 0).all()
    why = "none of 8 rows was scored.*8 × not_applicable: the reward function returned None.*give the rows truths"
    with pytest.raises(RewardError, match=why):
        s.run()
    assert pipe["update_actor"].learners()[0].version == 0
    with pytest.raises(RewardError, match=why):
        wb.train_blocking(pipe, rows, steps=2, batch_size=4, run=tmp_path / "run")


@pytest.mark.slow
def test_F10_a_mini_batch_in_which_nobody_is_judged_is_left_out(tiny: str) -> None:
    """Weight decay and momentum would move the weights without a gradient."""
    first_prompt = wb.rewards.Reward(lambda uid, response: 1.0 if uid == "a" else None, in_process=True)
    pipe, rows = make(tiny, first_prompt, kl_coef=0.0, ppo_mini_batch_size=1)
    batch = rows.batch(2).with_columns({"uid": ["a", "b"]})
    s = wb.Stepper(pipe, batch).run()
    alone = wb.Stepper(make(tiny, first_prompt, kl_coef=0.0)[0], batch[:1]).run()
    assert s.trace.metrics["actor/empty_mini_batches"] == 1
    assert weights_hash(s.pipeline) == weights_hash(alone.pipeline)
    unlearnt = s.batch[4:]
    assert torch.equal(unlearnt["new_log_probs"], unlearnt["old_log_probs"]) and not unlearnt["clipped"].any()


@pytest.mark.slow
def test_D2_all_prompts_filtered_is_said(tiny: str) -> None:
    pipe, rows = make(tiny)
    short = wb.datasets.Rows(list(rows), max_prompt_length=2)
    with pytest.raises(DataError, match="every prompt is too long; expected at most 2 tokens; found the shortest has"):
        short.fitting(pipe["rollout"].sampler.tokenizer, overlong="drop")


# --- D3: prompts and ids --------------------------------------------------------------------------


def test_D3_a_prompt_over_the_limit_is_refused_by_row(tiny: str) -> None:
    pipe, rows = make(tiny)
    long = list(rows)
    long[5]["prompt"] = [{"role": "user", "content": "one " * 300}]
    with pytest.raises(DataError, match=r"1 of 8 prompts are too long; expected at most 256 tokens; found rows \[5\]"):
        wb.datasets.Rows(long, max_prompt_length=256).fitting(pipe["rollout"].sampler.tokenizer)


def test_D3_a_token_id_beyond_the_vocabulary_is_refused_by_row(tiny: str) -> None:
    pipe, rows = make(tiny)
    engine = pipe.learners()["actor"]
    batch = wb.Stepper(pipe, rows.batch(4)).run(until="rollout").batch
    ids = batch["input_ids"].clone()
    ids[2, -1] = 100_000
    with pytest.raises(WorkbenchError, match=r"token id 100000.*row 2|row 2.*100000"):
        engine.compute_log_probs(batch.with_columns({"input_ids": ids}))


# --- D4: parquet ----------------------------------------------------------------------------------


def rows_of(number: int) -> list[dict[str, Any]]:
    return [
        {
            "prompt": [{"role": "user", "content": f"What is {n} + 1?"}],
            "data_source": "workbench/arith",
            "reward_model": {"style": "rule", "ground_truth": str(n + 1)},
        }
        for n in range(number)
    ]


def test_D4_missing_columns_wrong_types_null_answers_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"

    def written(rows: list[dict[str, Any]]) -> Path:
        pd.DataFrame(rows).to_parquet(path)
        return path

    with pytest.raises(DataError, match="no column of .*x.parquet is known as a prompt"):
        wb.rows(written([{"data_source": "x"}] * 3))
    with pytest.raises(DataError, match="prompt of row 0 .*expected a chat .* or a text; found 7"):
        wb.rows(written([{**row, "prompt": 7} for row in rows_of(2)]))
    rows = rows_of(4)
    rows[2]["reward_model"] = {"style": "rule", "ground_truth": None}
    assert wb.rows(written(rows)).report().missing_answers == (2,)
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), path)
    with pytest.raises(DataError, match="no rows in .*x.parquet"):
        wb.rows(path)


def test_D4_a_truncated_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pd.DataFrame(rows_of(50)).to_parquet(path)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(DataError, match=r"x\.parquet"):
        wb.rows(path)


def test_D4_duplicates_are_counted_and_the_content_is_hashed(tmp_path: Path) -> None:
    rows = wb.datasets.Rows(rows_of(3) + rows_of(2))

    assert (
        "repeated prompts: 2 (rows [3, 4])" in repr(rows.report())
        and rows.data_hash != wb.datasets.Rows(rows_of(3)).data_hash
    )
    uids = list(rows.batch(5)["uid"])
    assert len(set(uids)) == 5  # the same question twice is two prompts


@pytest.mark.slow
def test_D4_a_bomb_is_refused_before_it_is_decoded(tmp_path: Path) -> None:
    """A few kilobytes that decode to gigabytes: one wide value, repeated through its dictionary."""
    path = tmp_path / "bomb.parquet"
    wide = "x" * 1_000_000
    codes = pa.DictionaryArray.from_arrays(pa.array(np.zeros(200_000, dtype=np.int32)), pa.array([wide]))
    pq.write_table(pa.table({"prompt": codes}), path, compression="zstd")
    assert path.stat().st_size < 200_000
    with pytest.raises(DataError, match=r"bomb.parquet.*would take about 1\d\d\.. GiB|bomb.parquet.*expected at most"):
        wb.rows(path)


@pytest.mark.slow
def test_D4_a_bomb_behind_small_rows_is_refused_where_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rows tell nothing of the rest; no more is decoded than may be kept."""
    monkeypatch.setattr(files, "SIZE_LIMIT", 50 << 20)
    for name, write in (("bomb.parquet", pq.write_table), ("bomb.arrow", feather.write_feather)):
        table = pa.table({"prompt": ["1+1="] * 100 + ["x" * 1_000_000] * 100})
        write(table, tmp_path / name, compression="zstd")
        assert (tmp_path / name).stat().st_size < 2_000_000
        with pytest.raises(DataError, match=rf"{name}.*would take about.*expected at most"):
            wb.rows(tmp_path / name)


# --- D5: jsonl ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "match"),
    [
        (b'{"prompt": NaN}', "x.jsonl:2 is not JSON; found NaN is not a finite number"),
        (b'{"prompt": 1e999}', "x.jsonl:2 is not JSON; found 1e999 is not a finite number"),
        (b"[" * 100_000 + b"]" * 100_000, "x.jsonl:2 is not JSON"),
        (b'{"prompt": "\xff\xfe"}', "x.jsonl.*line 2|x.jsonl:2"),
        (b'{"prompt": ' + b"1" * 5000 + b"}", "x.jsonl:2 is not JSON"),
    ],
    ids=["nan", "1e999", "deep", "utf-8", "digits"],
)
def test_D5_a_bad_line_is_named_with_its_reason(tmp_path: Path, line: bytes, match: str) -> None:
    path = tmp_path / "x.jsonl"
    good = json.dumps(rows_of(1)[0]).encode()
    path.write_bytes(good + b"\n" + line + b"\n" + good + b"\n")
    with pytest.raises(DataError, match=match):
        wb.rows(path)


def test_D5_a_line_without_end_is_refused_in_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LINE_LIMIT", 10_000)
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps(rows_of(1)[0]) + "\n" + '{"prompt": "' + "x" * 50_000 + '"}\n')
    with pytest.raises(DataError, match=r"x.jsonl:2.*expected at most 10000 bytes"):
        wb.rows(path)


# --- D6: settings ---------------------------------------------------------------------------------


def test_D6_settings_are_typed_and_unknown_names_have_a_nearest() -> None:
    assert SamplingSettings.from_parameters({"temperature": "1e-1", "max_tokens": "64"}).temperature == 0.1
    with pytest.raises(SettingError, match="did you mean 'temperature'"):
        SamplingSettings.from_parameters({"temprature": 1.0})
    for bad in ({"max_tokens": "many"}, {"max_tokens": 1.5}, {"ignore_eos": "maybe"}, {"top_p": True}):
        with pytest.raises(SettingError):
            SamplingSettings.from_parameters(bad)
    assert issubclass(SamplingSettings, Settings)
    assert coerce("seed", "9007199254740993", int) == 9007199254740993 and coerce("x", {"a": "1"}, dict[str, int]) == {
        "a": 1
    }
    for value, kind in (("nan", float), (10**400, float), ("3", list[int]), ([1], dict[str, int]), (["x"], list[int])):
        with pytest.raises(SettingError):
            coerce("x", value, kind)


# --- D8: rewards that break their contract -------------------------------------------------------


def batch_of(number: int) -> wb.DataProto:
    return wb.DataProto(
        {
            "responses": torch.ones(number, 2, dtype=torch.long),
            "response_mask": torch.ones(number, 2, dtype=torch.long),
        },
        {
            "response_text": [f"r{n}" for n in range(number)],
            "raw_prompt": [[{"role": "user", "content": "q"}]] * number,
            "extra_info": [{"n": n} for n in range(number)],
            "reward_model": [{"ground_truth": "1"}] * number,
            "data_source": ["x"] * number,
            "uid": [str(n) for n in range(number)],
        },
    )


def test_D8_a_wrong_count_a_non_number_and_extra_keys() -> None:
    def short(completions: list[Any], **_: Any) -> list[float]:
        return [1.0] * (len(completions) - 1)

    def words(response: str) -> Any:
        return "good" if response == "r1" else 1.0

    def more(response: str) -> Any:
        return {"score": 0.5, "format": 1.0, "note": "fine", "deep": {"a": [1]}}

    with pytest.raises(RewardError, match="short; expected a list of 3 rewards; found 2"):
        wb.rewards.Reward(short, in_process=True).score(batch_of(3))
    first, second, third = wb.rewards.Reward(words, in_process=True).score(batch_of(3))
    assert first.value == third.value == 1.0 and second.status is wb.Status.INFRA_ERROR
    assert re.search("words, row 1; expected a number.*found 'good'", second.why)
    score = wb.rewards.Reward(more, in_process=True).score(batch_of(1))[0]
    assert score.value == 0.5 and score.parts == {"format": 1.0} and score.extra["note"] == "fine"


@pytest.mark.parametrize("in_process", [True, False])
def test_D8_a_function_that_writes_into_its_input_changes_nobody_elses(in_process: bool) -> None:
    def writes(response: str, extra_info: dict[str, Any]) -> float:
        extra_info["n"] = "changed"
        extra_info.clear()
        return 1.0

    batch = batch_of(3)
    reward = wb.rewards.Reward(writes, in_process=in_process)
    assert [one.value for one in reward.score(batch)] == [1.0] * 3
    reward.close()
    assert [info["n"] for info in batch["extra_info"]] == [0, 1, 2]
