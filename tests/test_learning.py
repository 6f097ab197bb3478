"""The tiny world really learns: a short run of GRPO, and of PPO with a critic, on the real model."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field

import workbench as wb

pytestmark = pytest.mark.slow


def eval_rows(number: int = 256) -> wb.datasets.Rows:
    return wb.rows("data/arith/test.parquet", max_prompt_length=256, limit=number)


def test_the_model_starts_where_it_should() -> None:
    found = wb.evaluate("data/tiny-arith", eval_rows(512), max_tokens=64, batch_size=512)
    assert 0.24 <= found.mean <= 0.45  # 0.26 where it was made; another CPU rounds a few draws otherwise


@pytest.mark.parametrize(
    ("steps", "seed"), [(10, 0), *(pytest.param(25, seed, marks=pytest.mark.long) for seed in (0, 1, 2))]
)
@pytest.mark.parametrize("recipe", ["grpo", pytest.param("ppo", marks=pytest.mark.long)])
def test_it_learns(recipe: str, steps: int, seed: int, tmp_path: Path) -> None:
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256)
    short = steps < 25
    engine = wb.engines.local("data/tiny-arith", lr=3e-4 if short else 2e-4)
    if recipe == "grpo":
        pipe = wb.recipes.grpo(engine, group_size=8, kl_coef=0.001, max_tokens=64)
    else:
        pipe = wb.recipes.ppo(
            engine, group_size=8, kl_coef=0.001, max_tokens=64, critic_lr=1e-3, critic_warmup=3, lam=0.95
        )
    run = wb.train_blocking(
        pipe,
        rows,
        steps=steps,
        batch_size=8 if short else 16,
        seed=seed,
        run=tmp_path / "run",
        eval_rows=eval_rows(64 if short else 256),
    )
    assert run.summary["reward_after"] > run.summary["reward_before"] + 0.2
    if recipe == "ppo":
        losses = run.metrics["critic/vf_loss"].dropna()
        assert losses.iloc[-3:].mean() < losses.iloc[:2].mean()


@pytest.mark.long
def test_it_learns_from_targets(tmp_path: Path) -> None:
    """Supervised fine-tuning: the loss of held-out targets falls, and greedy answers become right."""
    engine = wb.engines.local("data/tiny-arith", lr=1e-3)
    before = wb.evaluate(engine, eval_rows(), temperature=0, max_tokens=64).mean
    pipe = wb.recipes.sft(engine, target="extra_info.answer", max_tokens=64)
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256)
    how = {"run": tmp_path / "run", "eval_rows": eval_rows(), "trackers": ()}
    run = wb.train_blocking(pipe, rows, steps=25, batch_size=32, **how)
    held = run.metrics["val/nll"].dropna()
    after = wb.evaluate(run, eval_rows(), temperature=0, max_tokens=64).mean
    assert held.iloc[-1] < held.iloc[0] / 4 and after > 0.9 and after > before + 0.15


class Preference(BaseModel):
    """What the tiny pair judge writes."""

    reason: str = Field(description="the sums")
    better: Literal["A", "B"] = Field(description="A or B")


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_a_judge_learns_to_judge(seed: int, tmp_path: Path) -> None:
    """GRPO of a judge that prefers what stands first: held-out accuracy and swap consistency rise together."""
    judge = wb.rewards.reasoning(Preference, template="{prompt}\nA: {answer_a}\nB: {answer_b}\n{instructions}")
    engine = wb.engines.local("data/tiny-pair-judge", lr=1e-4)
    held = wb.datasets.samples("data/arith-pairs/test.parquet")[:64]

    def report() -> Any:
        asked = judge.judge(wb.engines.chat(engine), max_tokens=64, attempts=1)
        return wb.rewards.judge_report(asked, held, seeds=1).figures

    before = report()
    rows = judge.rows(wb.datasets.samples("data/arith-pairs/train.parquet"), engine=engine)
    settings: dict[str, Any] = {"group_size": 8, "kl_coef": 0.001, "max_tokens": 64, "ppo_mini_batch_size": 8}
    pipe = wb.recipes.grpo(engine, judge.reward(), **settings)
    wb.train_blocking(pipe, rows, steps=60, batch_size=16, seed=seed, run=tmp_path / "run", trackers=())
    after = report()
    for name in ("accuracy", "swap consistency"):
        assert after[name].value > before[name].value + 0.15, name
    assert after["accuracy"].low > 0.5
