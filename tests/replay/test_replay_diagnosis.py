"""Diagnosis: twelve runs broken on purpose, each named by its cause first; a healthy run has nothing beyond hints."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import workbench as wb
from workbench import functional as F
from workbench.rewards.scorers import gsm8k

TRAIN = "data/arith/train.parquet"


@cache
def questions() -> list[dict[str, Any]]:
    """Twenty-four questions with their answers as texts."""
    rows = wb.rows(TRAIN, limit=24)
    return [
        {"question": row["prompt"][0]["content"], "answer": row["reward_model"]["ground_truth"]} for row in rows.views()
    ]


def own(change: Callable[[dict[str, Any]], dict[str, Any]], number: int = 24) -> Any:
    return wb.rows([{**row, **change(row)} for row in questions()[:number]], prompt="question", answer="answer")


def right(response: str, ground_truth: Any) -> Any:
    return gsm8k.gsm8k(response, ground_truth, method="flexible")


def long(response: str) -> float:
    return len(response) / 100


def formatted(response: str) -> float:
    return float("####" in response)


def constant(response: str) -> float:
    return 0.5


def last_word(response: str, ground_truth: Any) -> float:
    return float((response.split() or [""])[-1] == ground_truth)


def failing(response: str, ground_truth: Any) -> Any:
    if response.startswith("Quick"):
        raise ConnectionError("the grader's server is not there")
    return right(response, ground_truth)


def flipped(scores: Any, groups: Any, mask: Any) -> Any:
    advantages, returns = F.grpo(scores, groups, mask)
    return -advantages, returns


def made(
    folder: Path, reward: Any = right, rows: Any = None, lr: float = 2e-4, change: Any = None, **settings: Any
) -> Any:
    """A run of six steps of 4 × 4 responses."""
    engine = wb.engines.local("data/tiny-arith", lr=lr)
    settings = {"group_size": 4, "kl_coef": 0.001, "max_tokens": 48, **settings}
    pipe = wb.recipes.grpo(engine, reward, **settings)
    if change is not None:
        pipe = change(pipe)
    rows = wb.rows(TRAIN, limit=64) if rows is None else rows
    return wb.train_blocking(
        pipe, rows, steps=6, batch_size=4, run=folder / "run", trace_freq=1, max_rollout_kl=None, display=None
    )


def other_sampler(pipe: Any) -> Any:
    """Samples come from a copy of the model, which no update reaches."""
    sampler = wb.engines.local("data/tiny-arith")
    return pipe.replace("rollout", wb.stages.Rollout(sampler, group_size=4, sampling=pipe["rollout"].sampling))


def other_sign(pipe: Any) -> Any:
    return pipe.replace("advantage", wb.stages.Advantage(flipped))


ENDLESS = wb.SamplingSettings(max_tokens=24, ignore_eos=True)
GALLERY: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no stop": (lambda folder: made(folder, max_tokens=None, sampling=ENDLESS), "responses never stop: the end token is ignored"),
    "stale sampler": (lambda folder: made(folder, lr=1e-3, change=other_sampler), "the sampler has old weights"),
    "flipped sign": (lambda folder: made(folder, change=other_sign), "the sign of the advantage is flipped"),
    "leaked answer": (
        lambda folder: made(folder, rows=own(lambda row: {"question": f"{row['question']} (answer: {row['answer']})"})),
        "the answer stands in the prompt",
    ),
    "length hack": (lambda folder: made(folder, long), "the reward pays for long responses"),
    "format only": (lambda folder: made(folder, formatted), "the reward does not look at the answer"),
    "constant reward": (lambda folder: made(folder, constant), "the reward is a constant"),
    "no learning rate": (lambda folder: made(folder, lr=0.0), "the learning rate is 0"),
    "high learning rate": (lambda folder: made(folder, lr=3e-2), "the learning rate is too high"),
    "huge KL": (lambda folder: made(folder, kl_coef=300.0), "the KL term holds the policy where it was"),
    "truths of the wrong type": (
        lambda folder: made(folder, last_word, own(lambda row: {"answer": int(row["answer"])})),
        "truths are of the wrong type: int",
    ),
    "failing reward": (lambda folder: made(folder, failing), "the reward function fails"),
    "repeated prompts": (
        lambda folder: made(folder, rows=own(lambda row: questions()[0])),
        "prompts are repeated within a step",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", GALLERY)
def test_the_gallery(name: str, tmp_path: Path) -> None:
    make, cause = GALLERY[name]
    found = make(tmp_path).diagnose()
    print(found)
    assert found.findings, found.looked
    assert found.findings[0].cause == cause
    assert found.findings[0].sure in ("sure", "likely")


@pytest.mark.slow
@pytest.mark.parametrize("reward", [None, right])
def test_a_healthy_run_has_nothing_beyond_hints(reward: Any, tmp_path: Path) -> None:
    run = made(tmp_path, reward)
    found = run.diagnose()
    assert all(one.sure == "hint" for one in found.findings), str(found)
    assert "3 recorded steps" not in str(found) and "samples: 48 of the recorded steps [4, 5, 6]" in str(found)
