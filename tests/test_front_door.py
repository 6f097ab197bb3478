"""The front-door page of the design, line for line, as far as it is built; the README's code is run by test_docs.py."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import workbench as wb
from workbench.base.shown import Hinting
from workbench.datasets.rows import Rows
from workbench.engines.local_engine.engine import LocalEngine
from workbench.engines.vllm_server.engine import VllmSettings, importable, interpreter
from workbench.steps.compare import Comparison

pytestmark = pytest.mark.slow


def my_reward(solution_str: str, ground_truth: str, **_: object) -> float:
    return wb.rewards.gsm8k.compute_score(solution_str, ground_truth)


def other_reward(response: str) -> float:
    return float("####" in response)


def test_the_front_door(tmp_path: Path) -> None:
    eval_rows = wb.rows("data/arith/test.parquet", max_prompt_length=256, limit=16)

    engine = wb.engines.local("data/tiny-arith")
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256)
    pipe = wb.recipes.grpo(engine, reward=my_reward, group_size=8, kl_coef=0.001)

    s = wb.Stepper(pipe, rows.batch(8)).run(until="advantage")
    s.batch
    s.batch.to_pandas()
    t = s.fork().back(to="reward").replace("reward", other_reward).run(until="advantage")
    assert s.compare(t).columns
    assert s.what_if(clip_ratio_high=0.28, updates=2, probe=eval_rows[:4]).changes  # on scratch weights

    run = asyncio.run(
        wb.train(
            s.pipeline, rows, steps=2, batch_size=4, run=tmp_path / "mine", break_if=lambda m: m["actor/ppo_kl"] > 0.1
        )
    )
    run = wb.load_run(tmp_path / "mine")
    assert run.curves() and run.traces
    p = run.stepper(step=2).replace("reward", other_reward).run()
    assert p.compare(run.traces[2]).columns
    assert wb.diverge(p.trace, run.traces[2]).phase == "reward"
    assert wb.evaluate(run.checkpoint(2), eval_rows).prompts == 16


@pytest.mark.long
def test_the_front_door_on_a_cluster() -> None:
    """With CPUs for GPUs, and the tiny model for a 7B; vLLM where it is installed."""
    sampler = "vllm" if importable(interpreter(VllmSettings())) else "local"
    with wb.cluster(cpus=2) as c:
        assert c.fits("data/tiny-arith", tokens=4096)
        pipe8 = wb.recipes.grpo(
            c.place("data/tiny-arith", learner="fsdp", sampler=sampler, tensor_parallel_size=1), reward=my_reward
        )
        rows = wb.rows("data/arith/train.parquet", max_prompt_length=256)
        s = wb.Stepper(pipe8, rows.batch(2)).run()
        assert s.trace.metrics["actor/grad_norm"] > 0 and pipe8[0].learners()[0].version == 1


@pytest.mark.parametrize("kind", [wb.Stepper, wb.Pipeline, Rows, Comparison, LocalEngine])
def test_names_that_people_try_are_answered(kind: type[Hinting]) -> None:
    thing = object.__new__(kind)
    for name in kind.elsewhere:
        assert not any(name in vars(base) for base in kind.__mro__)
        with pytest.raises(AttributeError, match=f"^{kind.__name__} has no '{name}'; [a-z]+ .*"):
            getattr(thing, name)
