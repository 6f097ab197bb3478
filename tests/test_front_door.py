"""The front-door page of the design, line for line, as far as it is built; the README's code is run by test_docs.py."""

from __future__ import annotations

import asyncio
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb
from workbench.base import errors
from workbench.base.errors import WorkbenchError, hinted
from workbench.base.shown import Hinting
from workbench.datasets.rows import Rows
from workbench.engines.local_engine.engine import LocalEngine
from workbench.engines.vllm_server.engine import VllmSettings, importable, interpreter
from workbench.replay.run import Run
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


@pytest.mark.parametrize("kind", [wb.Stepper, wb.Pipeline, Rows, Comparison, LocalEngine, Run])
def test_names_that_people_try_are_answered(kind: type[Hinting]) -> None:
    thing = object.__new__(kind)
    for name in kind.elsewhere:
        assert not any(name in vars(base) for base in kind.__mro__)
        with pytest.raises(AttributeError, match=f"^{kind.__name__} has no '{name}'; [a-z]+ .*"):
            getattr(thing, name)


@pytest.fixture(scope="module")
def doors(tiny: str) -> dict[str, Any]:
    engine, rows = wb.engines.local(tiny), wb.rows([{"prompt": f"{n}+1?", "answer": str(n + 1)} for n in range(4)])
    pipe = wb.recipes.grpo(engine, other_reward, group_size=2, max_tokens=4)
    stepper = wb.Stepper(pipe, rows.batch(2)).run(until="advantage")
    return {"wb": wb, "tiny": tiny, "engine": engine, "rows": rows, "pipe": pipe, "s": stepper, "torch": torch}


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        ("wb.engines.local(tiny, dtype='bf16')", "did you mean 'bfloat16'"),
        ("wb.engines.local(tiny, dtype=torch.float16)", "did you mean 'float16'"),
        ("wb.engines.local(tiny, torch_dtype='bfloat16')", "in workbench it is dtype"),
        ("wb.engines.local(tiny, device_map='auto')", "in workbench it is device"),
        ("wb.engines.local(tiny, max_length=8)", "it is max_tokens of the recipe: recipes.grpo(engine, max_tokens=…)"),
        ("wb.rows([{'prompt': 'a'}], n=1)", "in workbench it is limit"),
        ("rows.batch(batch_size=2)", "batch has no setting 'batch_size'; in workbench it is size"),
        ("engine('1+1?')", "ask the model: engine.generate(text)"),
        ("engine.generate('1+1?', max_new_tokens=4)", "in workbench it is max_tokens"),
        ("engine.generate('1+1?', do_sample=True)", "in workbench it is temperature (0 is greedy)"),
        ("wb.SamplingSettings(max_new_tokens=4)", "in workbench it is max_tokens"),
        ("wb.recipes.grpo(engine, num_generations=4)", "in workbench it is group_size"),
        ("wb.recipes.grpo(engine, beta=0.1)", "in workbench it is kl_coef"),
        ("wb.recipes.grpo(engine, batch_size=8)", "it is batch_size of the training: train(pipe, rows, batch_size=…)"),
        ("s.what_if(lr=1e-3)", "it is lr of the engine: engines.local(path, lr=…)"),
        ("s.run(to='reward')", "in workbench it is until"),
        ("s.back(until='reward')", "in workbench it is to"),
        ("wb.views.samples(s, sort='worst')", "in workbench it is order"),
        ("wb.views.samples(s, n=3)", "in workbench it is rows"),
        ("wb.views.tokens(s, 0, color='advantage')", "did you mean 'colour'"),
        ("wb.evaluate(engine, rows, reward_fn=len)", "in workbench it is reward"),
        ("wb.evaluate(engine, rows, n=4)", "in workbench it is samples"),
        ("wb.chat(engine, system_prompt='x')", "it is system of the chat: chat(model, system=…)"),
        ("wb.tune(pipe, rows, bs=4)", "in workbench it is batch_size"),
        ("wb.grpo(engine)", "call wb.recipes.grpo"),
        ("wb.GRPOTrainer(engine)", "call wb.recipes.grpo"),
        ("wb.samples(s)", "call wb.views.samples"),
        ("rows.samples(sort='worst', n=3)", "show a step's samples: wb.views.samples(stepper)"),
    ],
)
def test_what_a_person_types_by_guess_is_answered_with_what_to_type(
    doors: dict[str, Any], typed: str, answer: str
) -> None:
    with pytest.raises((TypeError, AttributeError), match=re.escape(answer)) as found:
        eval(typed, doors)  # noqa: S307 - the statements above
    assert found.value.__context__ is None


def test_an_error_inside_a_function_is_not_taken_for_a_wrong_argument() -> None:
    def reward(response: str) -> float:
        return float(wb.rows([{"prompt": response}])[0]["prompt"])

    with pytest.raises(TypeError, match="unexpected keyword argument 'answer'") as found:
        hinted(lambda: reward(answer="x"))()  # type: ignore[call-arg]
    assert not isinstance(found.value, WorkbenchError)


def test_each_setting_of_the_table_is_taken_by_the_call_that_it_names() -> None:
    calls: dict[str, Any] = {
        "engines.local": wb.engines.local,
        "recipes.grpo": wb.recipes.grpo,
        "train": wb.train,
        "chat": wb.chat,
    }
    for place, names in errors._PLACES.items():
        call = place.split(": ")[1].split("(")[0]
        assert set(names.split()) <= set(inspect.signature(calls[call]).parameters), place
