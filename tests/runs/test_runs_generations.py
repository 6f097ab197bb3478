"""Generations on disk: what validation keeps, and that a file scored again gives the same numbers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import workbench as wb
from workbench.base.errors import DataError, RunError, SettingError
from workbench.compat.dumps import read_dump
from workbench.rewards import Reward, Score, Status
from workbench.rewards.scorers.gsm8k import compute_score

evaluate_file: Any = wb.rewards.evaluate_file


def judged(response: str, response_ids: list[int], tags: list[str], extra_info: dict[str, Any]) -> Any:
    """Third of an even length: not exact in float32. It reads what a file must bring back unchanged."""
    if not response:
        return Score(status=Status.NO_ANSWER, why="nothing said")
    if len(response_ids) % 7 == 0:
        return None
    assert tags in (["a"], ["b", "c"]) and extra_info["index"] >= 0
    return {"score": len(response) / 3 + len(tags), "words": float(len(response.split())), "why": "counted"}


@pytest.fixture(scope="module")
def run(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> wb.Run:
    rows = wb.rows("data/arith/train.parquet", limit=12)
    held = wb.datasets.Rows([{**row, "tags": ["a"] if n % 2 else ["b", "c"]} for n, row in enumerate(rows)])
    held = wb.datasets.Rows(
        [{**row, "data_source": f"s{n % 2}", "extra_info": {**row["extra_info"], **({"odd": n} if n % 2 else {})}}
         for n, row in enumerate(held)]
    )  # fmt: skip
    pipe = wb.recipes.grpo(wb.engines.local(tiny), Reward(judged, in_process=True), group_size=2, max_tokens=16)
    plan: dict[str, Any] = {"test_freq": 1, "val_samples": 3, "keep_val": 2, "trackers": ["jsonl"], "display": None}
    return wb.train_blocking(
        pipe, held, eval_rows=held[:6], steps=2, batch_size=2, run=tmp_path_factory.mktemp("runs") / "r", **plan
    )


@pytest.mark.slow
def test_a_validation_scored_again_gives_the_runs_numbers_bit_for_bit(run: wb.Run) -> None:
    assert sorted(path.name for path in (run.path / "val").iterdir()) == ["step_000001.parquet", "step_000002.parquet"]
    for row in run.rows[1:]:
        path = run.path / "val" / f"step_{row['training/global_step']:06d}.parquet"
        sampled = evaluate_file(path, reward=Reward(judged, in_process=True))
        greedy = evaluate_file(path, reward=wb.stages.Reward(judged, in_process=True), greedy=True)
        assert (sampled.mean, *sampled.interval) == (row["val/reward"], row["val/reward_low"], row["val/reward_high"])
        assert greedy.mean == row["val/greedy"] and greedy.greedy and not sampled.greedy
        assert sampled.unscored + greedy.unscored == row["val/unscored"]
        assert (sampled.prompts, sampled.samples, len(sampled.batch), len(greedy.batch)) == (6, 3, 18, 6)
        assert list(sampled.by_source) == ["s0", "s1"] and not sampled.pass_at_k


def test_the_samples_of_a_validation_are_a_table_and_a_batch(run: wb.Run) -> None:
    frame = pd.read_parquet(run.path / "val" / "step_000002.parquet")
    asked = ["prompt", "response", "score", "score/status", "score/why", "score/answer", "reward/words", "uid"]
    assert list(frame)[:8] == asked and {"data_source", "sample", "greedy", "reward_model", "tags"} <= {*frame}
    assert list(frame["sample"][:4]) == [0, 1, 2, 0] and list(frame["greedy"]) == [False] * 18 + [True] * 6
    batch = run.val()
    assert list(batch["response_text"]) == list(frame["response"]) and batch["greedy"].sum() == 6
    assert [one.value if one.scored else None for one in batch["score"]] == [
        None if math.isnan(value) else value for value in frame["score"]
    ]
    assert batch["extra_info"][0].keys() != batch["extra_info"][3].keys()  # as they were, not one struct for all
    assert "counted" in repr(wb.views.samples(run.val(1)))
    with pytest.raises(RunError, match=r"step 0 in .*expected one of the steps \[1, 2\]"):
        run.val(0)
    assert str(run.path / "val") == run.summary["paths"]["val"]


@pytest.mark.slow
def test_an_evaluation_is_saved_and_scored_again(tiny: str, tmp_path: Path) -> None:
    rows = wb.rows("data/arith/train.parquet", limit=8)
    found = wb.evaluate(tiny, rows, samples=4, max_tokens=48)
    path = found.save(tmp_path / "gen.parquet")
    again = evaluate_file(path)
    assert (
        again.mean == found.mean and again.pass_at_k == found.pass_at_k and list(found.pass_at_k) == ["workbench/arith"]
    )
    assert list(found.pass_at_k["workbench/arith"]) == [1, 2, 4] and "pass@4" in repr(again)
    assert found.pass_at_k["workbench/arith"][1] == pytest.approx(found.mean)
    with pytest.raises(DataError, match="no greedy response"):
        evaluate_file(path, greedy=True)
    with pytest.raises(SettingError, match=r"ending in \.parquet"):
        found.save(tmp_path / "gen.csv")
    wb.evaluate(tiny, rows, max_tokens=4, temperature=0).save(path)  # over the old one
    assert evaluate_file(path).greedy


# --- files of others ------------------------------------------------------------------------------


def generations(responses: list[Any], **more: Any) -> pd.DataFrame:
    """As verl's main_generation writes them: the data's rows, and a list of responses."""
    number = len(responses)
    return pd.DataFrame(
        {
            "data_source": ["openai/gsm8k"] * number,
            "prompt": [[{"role": "user", "content": "Same question?"}]] * number,
            "reward_model": [{"style": "rule", "ground_truth": str(n)} for n in range(number)],
            "responses": responses,
            **more,
        }
    )


def test_verls_generations_have_the_mean_of_scoring_their_rows_by_hand(tmp_path: Path) -> None:
    responses = [["#### 0", "#### 1", "#### 0"], ["#### 0", "none", "#### 2"]]
    generations(responses).to_parquet(tmp_path / "gen.parquet")
    found = evaluate_file(tmp_path / "gen.parquet")
    hand = [[compute_score(text, str(n)) for text in texts] for n, texts in enumerate(responses)]
    assert hand == [[1, 0, 1], [0, 0, 0]]
    assert found.mean == sum(sum(values) / 3 for values in hand) / 2 and (found.prompts, found.samples) == (2, 3)
    assert found.pass_at_k["openai/gsm8k"] == {1: pytest.approx(1 / 3), 2: 0.5, 3: 0.5}
    batch = read_dump(tmp_path / "gen.parquet")
    assert (
        list(batch["sample"]) == [0, 1, 2] * 2
        and len(set(batch["uid"])) == 2
        and batch.meta_info["dump"] == "generations"
    )


def test_trls_completions_are_scored_by_any_reward() -> None:
    table = pd.DataFrame(
        {"step": [1] * 4, "prompt": ["a", "a", "b", "b"], "completion": ["x", "xx", "x", "xxx"], "own": [9.0] * 4,
         "advantage": [0.0] * 4}
    )  # fmt: skip
    found = evaluate_file(table, reward=Reward(lambda completion: len(completion), in_process=True, name="length"))
    assert found.mean == (1.5 + 2) / 2 and (found.prompts, found.samples) == (2, 2)
    assert "reward/own" not in found.batch


def test_what_can_never_be_scored_is_refused_before_anything_is(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"responses of row 1; expected a list of 2 texts, as in row 0"):
        evaluate_file(generations([["a", "b"], ["c"]]))
    with pytest.raises(DataError, match="responses of row 0"):
        evaluate_file(generations([[], []]))

    calls: list[str] = []

    def counted(response: str, ground_truth: Any) -> float:
        calls.append(response)
        return 1.0

    table = generations([["#### 1"], ["#### 1"]], data_source=["openai/gsm8k", "unknown"])
    with pytest.raises(DataError, match="'unknown' is not a data_source with a scorer"):
        evaluate_file(table, reward=wb.rewards.by_data_source({"openai/gsm8k": counted}))
    assert not calls
    with pytest.raises(DataError, match="ground truth"):
        evaluate_file(generations([["#### 1"]] * 2, reward_model=[{"ground_truth": None}] * 2))
    found = evaluate_file(generations([["#### 1"]] * 2, reward_model=[{"ground_truth": None}, {"ground_truth": "1"}]))
    assert found.mean == 1 and found.unscored == 1  # one missing truth is not a zero


def test_a_damaged_file_of_ours_is_named(run: wb.Run, tmp_path: Path) -> None:
    frame = pd.read_parquet(run.path / "val" / "step_000002.parquet")
    frame.assign(**{"score/status": "perfect"}).to_parquet(tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"reading the scores of .*a\.parquet raised ValueError: 'perfect'"):
        read_dump(tmp_path / "a.parquet")
