"""Preflight asks for what the pipeline reads, and for nothing else: what steps trains, what trains steps."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import workbench as wb
from workbench.base.errors import DataError, WorkbenchError
from workbench.datasets import Rows
from workbench.runs.preflight import preflight
from workbench.runs.settings import TrainPlan


def plan(folder: Path) -> TrainPlan:
    return TrainPlan(steps=1, batch_size=2, run=folder / "run")


def alone(response: str) -> float:
    return float(len(response))


def with_truth(solution_str: str, ground_truth: Any) -> float:
    return float(str(ground_truth) in solution_str)


def verls(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    return float(len(data_source))


def of_a_column(response: str, level: Any) -> float:
    return float(level or 0)


def trls(completions: Any, prompts: Any, **kwargs: Any) -> list[float]:
    return [float(len(kwargs))] * len(completions)


REWARDS: dict[str, Callable[..., Any] | None] = {
    one.__name__: one for one in (alone, with_truth, verls, of_a_column, trls)
}
REWARDS["by data_source"] = None
CELLS: dict[str, list[Any]] = {
    "data_source": ["mine", "workbench/arith", None],
    "reward_model": [{"ground_truth": "1"}, {"style": "rule"}, {}, None],
    "extra_info": [{"index": 1}, None],
    "level": [3, None],
    "answer": ["#### 4", "4", 4, None],
    "messages": [None],
}
SHAPES = st.fixed_dictionaries(
    {"prompt": st.sampled_from(["2+2?", [{"role": "user", "content": "2+2?"}]])},
    optional={name: st.sampled_from(cells) for name, cells in CELLS.items()},
)


@pytest.fixture(scope="module")
def pipes(tiny: str) -> dict[str, wb.Pipeline]:
    engine = wb.engines.local(tiny)
    in_process = {
        name: wb.rewards.as_reward(one, **({"in_process": True} if one else {})) for name, one in REWARDS.items()
    }
    return {name: wb.recipes.grpo(engine, one, group_size=1, max_tokens=1) for name, one in in_process.items()}


def refusal(act: Callable[[], Any]) -> WorkbenchError | None:
    try:
        act()
    except WorkbenchError as error:
        return error
    return None


@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(records=st.lists(SHAPES, min_size=2, max_size=2), name=st.sampled_from([*REWARDS]), raw=st.booleans())
def test_what_steps_to_the_advantage_passes_and_the_other_way_round(
    pipes: dict[str, wb.Pipeline], tmp_path: Path, records: list[dict[str, Any]], name: str, raw: bool
) -> None:
    raw = raw and all(isinstance(row["prompt"], str) for row in records)
    rows = wb.rows(records, raw=raw)
    stepped = refusal(lambda: wb.Stepper(pipes[name], rows.batch(2)).run(until="advantage"))
    passed = refusal(lambda: preflight(pipes[name], rows, plan(tmp_path)))
    if passed is not None and "truths can ever score" in str(passed):
        return  # it steps, but nothing can be learned from it: every row is "not applicable"
    assert (stepped is None) == (passed is None), f"stepped: {stepped}; preflight: {passed}"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["alone", "trls"])
def test_rows_of_prompts_alone_train(tiny: str, tmp_path: Path, name: str) -> None:
    """D2: they ran the whole Stepper, and then there was no 'reward_model'."""
    rows = Rows([{"prompt": f"Count to {n}."} for n in range(4)])
    pipe = wb.recipes.grpo(wb.engines.local(tiny), reward=REWARDS[name], group_size=2, max_tokens=2)
    assert (
        wb.train_blocking(pipe, rows, steps=1, batch_size=2, run=tmp_path / "run", display=None).summary["steps"] == 1
    )


def test_missing_truths_are_counted_for_a_function_that_reads_them(
    pipes: dict[str, wb.Pipeline], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = Rows([{"prompt": "2+2?", "answer": "4"}, {"prompt": "3+3?"}, {"prompt": "4+4?"}])
    with caplog.at_level(logging.WARNING):
        found = dict(preflight(pipes["with_truth"], rows, plan(tmp_path)).findings)["truths"]
    said = "2 of 3 rows have no ground truth, which with_truth reads as 'ground_truth'; name their column: wb.rows(…, answer="
    assert said in found and said in caplog.text
    assert "truths" not in dict(preflight(pipes["alone"], rows, plan(tmp_path)).findings)
    with pytest.raises(DataError, match="0 of 3 truths can ever score 1 by workbench/arith"):
        unanswered = [{"prompt": "2+2?", "data_source": "workbench/arith"}] * 3
        preflight(pipes["by data_source"], Rows(unanswered), plan(tmp_path))


def test_prompts_that_may_be_too_long_are_rendered_and_those_that_are_refused(
    pipes: dict[str, wb.Pipeline], tmp_path: Path
) -> None:
    texts = [{"prompt": f"{n} " + "word " * (60 if n == 77 else 2)} for n in range(100)]
    rows = wb.rows(texts, max_prompt_length=300)
    said = dict(preflight(pipes["alone"], rows, plan(tmp_path)).findings)["lengths"]
    assert said.startswith("300 prompt tokens + 1 response tokens") and "3 of 102 prompts rendered" in said
    with pytest.raises(
        DataError, match=r"1 of 100 prompts are too long; expected at most 100 tokens; found rows \[77\]"
    ):
        preflight(pipes["alone"], wb.rows(texts, max_prompt_length=100), plan(tmp_path))
    step = next(n for n in itertools.count(1) if "77 word" in str(rows.batch(2, n)["raw_prompt"].tolist()))
    with pytest.raises(DataError, match="length of the prompt of row"):  # the rollout measures what it reads
        pipes["alone"]["rollout"](wb.rows(texts, max_prompt_length=100).batch(2, step))


@pytest.mark.slow
def test_truncated_sampling_is_named(tiny: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Tokens come from the kept sets, ratios are of the full distribution, and nothing corrects for that."""
    rows = wb.rows([{"prompt": "2+2?"}, {"prompt": "3+3?"}])
    engine = wb.engines.local(tiny, device="cpu")

    def told(recipe: Any = wb.recipes.grpo, **sampling: Any) -> dict[str, str]:
        pipe = recipe(engine, alone, sampling=wb.SamplingSettings(max_tokens=8, **sampling))
        caplog.clear()
        found = dict(preflight(pipe, rows, plan(tmp_path)).findings)
        assert [one.getMessage().startswith("sampling") for one in caplog.records].count(True) == ("sampling" in found)
        return found

    for sampling in ({"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}):
        assert "full distribution" in told(**sampling)["sampling"], sampling
    configured = wb.recipes.like_trl(
        {"top_k": 5, "per_device_train_batch_size": 16, "bf16": False, "max_steps": 1, "max_completion_length": 8},
        str(tiny),
        alone,
    )
    assert "full distribution" in dict(preflight(configured, rows, plan(tmp_path)).findings)["sampling"]
    assert "sampling" not in told(wb.recipes.rft, top_p=0.9)
    assert "sampling" not in told(repetition_penalty=1.1)


def test_a_reward_that_fails_on_made_up_responses_says_that_they_are(tiny: str, tmp_path: Path) -> None:
    def short_words(response: str) -> float:
        words = response.split()
        return sum(len(word) <= 4 for word in words) / len(words)

    pipe = wb.recipes.grpo(wb.engines.local(tiny, device="cpu"), short_words, group_size=2, max_tokens=4)
    rows = wb.rows([{"prompt": "What is the sea?"}, {"prompt": "Tell me about snow."}])
    with pytest.raises(wb.WorkbenchError, match=r"made-up responses '' and ''.*division by zero.*number for these"):
        wb.train_blocking(pipe, rows, steps=1, batch_size=2, run=tmp_path / "r", trackers=())
    with pytest.raises(wb.WorkbenchError, match=r"rows to evaluate.*make them: wb\.rows"):
        wb.evaluate(tiny, ["What is the sea?"], short_words)  # type: ignore[arg-type]
