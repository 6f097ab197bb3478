"""Symptoms: each from a run that has it, and none from one that is well."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.lint import lint

import workbench as wb
from workbench.rewards import Score
from workbench.runs.folder import STEP
from workbench.runs.symptoms import Symptoms, Watch, shown_by, symptoms

WELL = {
    "critic/score/mean": 0.5, "critic/score/max": 1.0, "actor/kl_loss": 0.01, "actor/entropy": 1.0, "actor/pg_clipfrac": 0.01,
    "response_length/mean": 40.0, "response_length/clip_ratio": 0.0, "actor/grad_norm": 0.3, "advantage/zero_share": 0.2,
    "training/rollout_probs_diff_mean": 1e-6, "reward/scored_ratio": 1.0,
}  # fmt: skip


def run(number: int = 20, **changed: Any) -> list[dict[str, Any]]:
    """Rows of a run that is well, but for what a function of the step (or a number) says."""
    made = []
    for step in range(1, number + 1):
        values = {key: value(step) if callable(value) else value for key, value in changed.items()}
        made.append({"training/global_step": step, **WELL, **values})
    return made


def names(rows: list[dict[str, Any]], batch: Any = None) -> list[str]:
    return [one.name for one in symptoms(rows, batch)]


def test_a_run_that_is_well_has_none_and_a_short_one_says_nothing() -> None:
    assert names(run()) == [] and names(run(2, **{"critic/score/max": 0.0})) == []
    assert names([{"training/global_step": step} for step in range(1, 9)]) == []
    assert repr(Symptoms()) == "no symptoms" and "no symptoms" in Symptoms()._repr_html_()


@pytest.mark.parametrize("seed", range(20))
def test_runs_that_learn_with_noise_have_none(seed: int) -> None:
    """Reward, groups, cut-offs, length and critic as runs have them that go well; a critic begins worse than a constant."""
    noise = random.Random(seed)

    def learned(first: float, last: float, rough: float) -> Callable[[int], float]:
        return lambda step: max(last + (first - last) * 0.9**step + noise.gauss(0, rough), 0.0)

    changed: dict[str, Any] = {
        "critic/score/mean": learned(0.2, 0.8, 0.08), "advantage/zero_share": learned(0.3, 0.45, 0.08),
        "response/cut_ratio": learned(0.4, 0.02, 0.04), "response_length/mean": learned(200, 150, 12),
        "actor/entropy": learned(1.5, 0.6, 0.05), "critic/vf_loss": learned(0.6, 0.2, 0.05),
        "critic/vf_explained_var": lambda step: 0.6 - 2.0 * 0.9**step + noise.gauss(0, 0.1),
    }  # fmt: skip
    assert names(run(60, **changed)) == [] and names(run(12, **changed)) == []


def test_rows_of_another_program_are_read_as_far_as_they_go() -> None:
    foreign = [{"step": step, "critic/score/mean": "high", "loss": 1.0} for step in range(20)]
    assert names(foreign) == [] and shown_by(foreign) == []
    assert names(run(**{"critic/score/mean": "high", "actor/grad_norm": "", "actor/entropy": [1.0]})) == []


@pytest.mark.parametrize(
    ("changed", "name", "hint"),
    [
        ({"critic/score/max": 0.0}, "reward is flat at 0", "views.samples"),
        ({"critic/score/max": 0.0, "response/cut_ratio": 0.95}, "reward is flat at 0", "raise max_tokens"),
        ({"critic/score/max": 0.0, "reward/scored_ratio": 0.1}, "reward is flat at 0", "reward function fails"),
        ({"advantage/zero_share": 0.9}, "most groups teach nothing", "recipes.dapo"),
        ({"actor/kl_loss": 3.0}, "KL to the reference is large", "raise kl_coef"),
        ({"actor/entropy": lambda step: 1.0 if step < 9 else 0.05}, "entropy has collapsed", "clip_ratio_high"),
        ({"actor/pg_clipfrac": 0.5}, "much of the update is clipped", "lower lr"),
        ({"response_length/mean": lambda step: 40.0 + 5 * step}, "responses change their length", "overlong"),
        ({"training/rollout_probs_diff_mean": 0.1}, "sampler and trainer differ", "RolloutCorrection"),
        ({"critic/score/mean": lambda step: 0.8 if step < 12 else 0.3}, "reward has fallen", "go back to a checkpoint"),
        ({"actor/grad_norm": lambda step: 90.0 if step == 7 else 0.3}, "the gradient jumps", "run.stepper(step)"),
        ({"response/cut_ratio": lambda step: 0.02 * step}, "more and more responses are cut off", "raise max_tokens"),
        ({"advantage/zero_share": lambda step: 0.03 * step}, "most groups teach nothing", "recipes.dapo"),
        (
            {"critic/vf_explained_var": lambda step: 0.3 - 0.04 * step, "critic/vf_loss": lambda step: 0.1 * step},
            "the critic diverges",
            "critic_warmup",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and " " in value else "",
)
def test_each_symptom(changed: dict[str, Any], name: str, hint: str) -> None:
    found = symptoms(run(**changed))
    assert [one.name for one in found] == [name] and hint in found[0].do
    shown = Symptoms(found)
    assert name in repr(shown) and lint(shown._repr_html_()) == []


def test_a_jump_that_later_rows_show_is_reported_once() -> None:
    watch = Watch()
    norms = [0.379, 0.0007, 6.35, 0.00135, 0.2]  # the third is 20 times the usual norm only beside the fourth
    begun = [
        [one.since for one in watch.look({STEP: step, "actor/grad_norm": norm})] for step, norm in enumerate(norms, 1)
    ]
    assert begun == [[], [], [], [3], []] and [one.since for one in watch.marks] == [3]


def test_causes_are_read_from_the_last_batch() -> None:
    scores = [Score(value=0.0, answer=None, why="nothing to parse")] * 4
    batch = wb.DataProto(
        {"reward": torch.zeros(4)},
        {"score": scores, "reward_model": [{"ground_truth": "1"}, {}, None, {"ground_truth": "2"}]},
    )
    found = symptoms(run(**{"critic/score/max": 0.0}), batch)[0]
    assert "2 of 4 rows have no ground truth" in found.do and "no answer could be read out of 4 of 4" in found.do


@pytest.mark.slow
def test_a_real_run_says_them(tiny: str, tmp_path: Path) -> None:
    engine = wb.engines.local(tiny, lr=1e-4, device="cpu")
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256, limit=8)
    reward = wb.rewards.Reward(lambda response: 0.0, in_process=True)
    pipe = wb.recipes.grpo(engine, reward, group_size=2, max_tokens=6)
    found = wb.train_blocking(pipe, rows, steps=3, batch_size=4, run=tmp_path / "r", trackers=()).symptoms
    assert [one.name for one in found][:1] == ["reward is flat at 0"]
    assert "most groups teach nothing" in [one.name for one in found]
