"""Several samples of a prompt, by hand."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import workbench as wb
from workbench.rewards import Score
from workbench.runs.batch_metrics import sample_metrics


def test_two_prompts_of_four_samples_by_hand() -> None:
    rewards, answers = [1.0, 0, 0, 0, 1, 1, 1, 0], ["7", "8", "8", "8", "5", "5", "5", None]
    batch = wb.DataProto(
        {"reward": torch.tensor(rewards), "scored": torch.ones(8).bool()},
        {
            "uid": ["a"] * 4 + ["b"] * 4,
            "data_source": ["s"] * 8,
            "score": [Score(value=v, answer=a) for v, a in zip(rewards, answers, strict=True)],
        },
    )
    found = sample_metrics(batch)
    assert found["val-core/s/reward/mean@4"] == 0.5
    assert found["val-core/s/reward/best@4/mean"] == pytest.approx(((1 - 0.75**4) + (1 - 0.25**4)) / 2)
    assert found["val-aux/s/reward/worst@2/mean"] == pytest.approx((0.25**2 + 0.75**2) / 2)
    assert found["val-aux/s/reward/pass@1"] == 0.5 and found["val-aux/s/reward/pass@2"] == pytest.approx(
        (0.5 + 1.0) / 2
    )
    assert found["val-aux/s/reward/std@4"] == pytest.approx(0.4330127)
    assert (
        found["val-core/s/reward/maj@4/mean"] < 0.3
    )  # 8 mostly wins for a; b, with a row without an answer, has no majority
    deviation = (0.75**4 * (1 - 0.75**4)) ** 0.5 / 2 + (0.25**4 * (1 - 0.25**4)) ** 0.5 / 2
    assert found["val-aux/s/reward/worst@4/std"] == pytest.approx(deviation) == found["val-core/s/reward/best@4/std"]


def test_unjudged_rows_are_left_out_and_other_rewards_have_no_pass() -> None:
    batch = wb.DataProto(
        {"reward": torch.tensor([0.5, 0.0, 0.25]), "scored": torch.tensor([True, False, True])},
        {"uid": ["a", "a", "b"], "data_source": ["s", "s", "t"]},
    )
    assert sample_metrics(batch) == {"val-core/s/reward/mean@1": 0.5, "val-core/t/reward/mean@1": 0.25}


def test_missing_accuracies_are_wrong_ones() -> None:
    """Source s has a part acc, t none; a row of s was not scored, and one has no acc."""
    batch = wb.DataProto(
        {
            "reward": torch.tensor([1.0, 0.5, 0.0, 1.0, 0.25, 0.75]),
            "reward/acc": torch.tensor([1.0, float("nan"), float("nan"), 1.0, float("nan"), float("nan")]),
            "scored": torch.tensor([True, True, False, True, True, True]),
        },
        {"uid": ["a", "a", "a", "b", "c", "c"], "data_source": ["s"] * 4 + ["t"] * 2},
    )
    found = sample_metrics(batch)
    assert found["val-core/s/acc/mean@3"] == pytest.approx(1 / 3) and found["val-aux/s/acc/mean@1"] == 1.0
    assert found["val-aux/s/acc_success_only/mean@1"] == 1.0
    assert found["val-aux/s/reward/mean@2"] == 0.75 and found["val-aux/s/reward/mean@1"] == 1.0
    assert found["val-core/t/reward/mean@2"] == 0.5 and not any("/t/acc" in name for name in found)


@pytest.mark.parametrize("rows", [0, 1, 4])
@pytest.mark.parametrize("scored", [True, False])
def test_a_held_out_metric_is_a_finite_number_or_absent(rows: int, scored: bool) -> None:
    """No rows, one, several; none scored; parts without a value, or that are infinite or huge."""
    parts = torch.tensor([float("nan"), float("inf"), 3e38, -3e38])[:rows]
    batch = wb.DataProto(
        {"reward": torch.tensor([0.0, 1, 3e38, 3e38])[:rows], "reward/x": parts, "scored": torch.full((rows,), scored)},
        {"uid": ["a", "a", "b", "b"][:rows], "data_source": ["s"] * rows},
    )
    found = sample_metrics(batch)
    assert bool(found) == (scored and rows > 0) and all(math.isfinite(value) for value in found.values())


def test_turns_of_held_out_episodes_are_counted() -> None:
    batch = wb.DataProto(
        {"reward": torch.tensor([1.0, 0.0]), "scored": torch.tensor([True, True])},
        {"uid": ["a", "b"], "data_source": ["s", "s"], "num_turns": [2, 5]},
    )
    found = sample_metrics(batch)
    assert [found[f"val-aux/num_turns/{name}"] for name in ("min", "max", "mean")] == [2.0, 5.0, 3.5]


@pytest.mark.slow
def test_a_steps_row_is_of_the_batch_that_was_trained_on(tmp_path: Path) -> None:
    """PF-PPO resamples rows after the advantages: verl measures the batch as it is then, and so does the run's row."""
    folder = Path(__file__).parents[1] / "recorded" / "0.12.0"
    engine = wb.engines.local(str(folder / "model"), device="cpu")
    reward = wb.rewards.as_reward(lambda response_text: float(len(response_text)), in_process=True)
    pipe = wb.recipes.grpo(engine, reward, group_size=4, max_tokens=16)
    pipe = pipe.insert_after("advantage", wb.stages.Resample())
    rows = wb.rows(str(folder / "rows.jsonl"), max_prompt_length=256)
    plan = {"steps": 1, "batch_size": 4, "trace_freq": 1, "trackers": (), "display": None}
    run = wb.train_blocking(pipe, rows, run=str(tmp_path / "run"), **plan)
    trace, row = run.traces[1], run.rows[-1]
    for name, column in (("critic/score/mean", "token_level_scores"), ("response_length/mean", "response_mask")):
        after, before = (
            float(batch[column].double().sum(-1).mean()) for batch in (trace.batch, trace["advantage"].batch)
        )
        assert row[name] == pytest.approx(after) and after != pytest.approx(before)
