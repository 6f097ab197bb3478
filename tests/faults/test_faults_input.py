"""Bad input is refused before training starts, with what, where and what to do; nothing is written, nothing lost."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from support.models import make_random_model

import workbench as wb
from workbench.base.errors import DataError, WorkbenchError
from workbench.runs.preflight import preflight
from workbench.runs.settings import TrainPlan

Case = tuple[Any, str]


def parquet(folder: Path, rows: list[dict[str, Any]]) -> str:
    path = folder / "rows.parquet"
    pd.DataFrame(rows).to_parquet(path)
    return str(path)


def row(**changes: Any) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "prompt": [{"role": "user", "content": "What is 1 + 1?"}],
        "data_source": "workbench/arith",
        "reward_model": {"style": "rule", "ground_truth": "2"},
    }
    return {**plain, **changes}


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in row().items() if key != name}


def text_file(folder: Path) -> str:
    (folder / "rows.parquet").write_text("question,answer\n1,2\n")
    return str(folder / "rows.parquet")


def no_truths(folder: Path) -> str:
    path = folder / "rows.jsonl"
    lines = [row(reward_model={"style": "rule"})] * 4
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return str(path)


DATA: dict[str, Case] = {
    "missing file": (lambda folder: str(folder / "none.parquet"), "none.parquet"),
    "not parquet": (text_file, "rows.parquet"),
    "missing prompt column": (
        lambda folder: parquet(folder, [without("prompt")] * 4),
        "no column of .* is known as a prompt",
    ),
    "no row has a ground truth": (no_truths, "0 of 4 truths can ever score 1 by workbench/arith; found 4 missing"),
    "all prompts over the limit": (
        lambda folder: parquet(folder, [row(prompt=[{"role": "user", "content": "one two " * 200}])] * 4),
        "every prompt is too long; expected at most 256 tokens; found the shortest has",
    ),
    "unknown data_source": (
        lambda folder: parquet(folder, [row(data_source="workbench/arit")] * 4),
        "'workbench/arit' is not a data_source with a scorer.*did you mean 'workbench/arith'.*pass your own",
    ),
}


@pytest.mark.parametrize("name", DATA)
def test_data(tiny: str, tmp_path: Path, name: str) -> None:
    make, match = DATA[name]
    pipe = wb.recipes.grpo(wb.engines.local(tiny, device="cpu"), group_size=2, max_tokens=8)
    with pytest.raises(WorkbenchError, match=match):
        rows = wb.rows(make(tmp_path), max_prompt_length=256)
        wb.train_blocking(pipe, rows, steps=1, batch_size=2, run=tmp_path / "r")
    assert not (tmp_path / "r").exists()


def asks_for_what_no_row_has(response: str, grond_truth: str) -> float:
    return 0.0


def of_the_wrong_count(completions: list[Any], **_: Any) -> list[float]:
    return [1.0]


def not_a_number(response: str) -> float:
    return float("nan")


def infinite(response: str) -> float:
    return float("-inf")


def of_the_wrong_type(response: str) -> Any:
    return "good"


def always_raises(response: str) -> float:
    raise ZeroDivisionError("oh")


REWARDS: dict[Any, str] = {
    asks_for_what_no_row_has: "'grond_truth' is not a value that a row has.*did you mean 'ground_truth'",
    of_the_wrong_count: "of_the_wrong_count; expected a list of 2 rewards; found 1",
    not_a_number: "not_a_number.*nan",
    infinite: "infinite.*inf",
    of_the_wrong_type: "of_the_wrong_type.*good",
    always_raises: "always_raises.*oh",
}


@pytest.mark.slow
@pytest.mark.parametrize("function", REWARDS, ids=lambda one: one.__name__)
def test_reward_functions(tiny: str, tmp_path: Path, function: Any) -> None:
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256, limit=8)
    pipe = wb.recipes.grpo(wb.engines.local(tiny, device="cpu"), function, group_size=2, max_tokens=8)
    with pytest.raises(WorkbenchError, match=REWARDS[function]):
        wb.train_blocking(pipe, rows, steps=1, batch_size=4, run=tmp_path / "r")
    assert not (tmp_path / "r").exists()


@pytest.mark.slow
def test_a_good_function_is_tried_and_its_counter_in_this_process_is_not(tiny: str, tmp_path: Path) -> None:
    calls: list[str] = []

    def counted(response: str) -> float:
        calls.append(response)
        return 0.5

    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256, limit=8)
    reward = wb.rewards.Reward(counted, in_process=True)
    pipe = wb.recipes.grpo(wb.engines.local(tiny, device="cpu"), reward, group_size=2, max_tokens=8)
    wb.train_blocking(pipe, rows, steps=1, batch_size=4, run=tmp_path / "r")
    assert len(calls) == 8


@pytest.mark.slow
def test_the_check_says_what_each_argument_gets(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def mine(response: str, ground_truth: str, ability: str = "none") -> float:
        return 0.0

    monkeypatch.setenv("WORKBENCH_CHECK", "1")
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256, limit=8)
    rubric = wb.rewards.Rubric({"part": wb.rewards.Reward(mine, in_process=True)})
    pipe = wb.recipes.grpo(wb.engines.local(tiny, device="cpu"), rubric, group_size=2, max_tokens=8)
    said = r"arguments +part.response ← the response, part.ground_truth ← reward_model.ground_truth, part.ability ← default 'none'"
    with pytest.raises(WorkbenchError, match=said):
        wb.train_blocking(pipe, rows, steps=1, batch_size=4, run=tmp_path / "r")


PLANS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "more prompts than rows": ({}, {"batch_size": 9}, "batch size; expected 1 to 8, the number of rows; found 9"),
    "a mini-batch larger than the batch": (
        {"ppo_mini_batch_size": 6},
        {"batch_size": 4},
        "ppo_mini_batch_size of update_actor; expected ≤ 4, the prompts of a step; found 6",
    ),
    "longer than the model": ({"max_tokens": 500}, {}, "do not fit into the model; expected at most 512 positions"),
    "no steps": ({}, {"steps": 0}, "steps; expected ≥ 1; found 0"),
}


@pytest.mark.parametrize("name", PLANS)
def test_batch_plans(tiny: str, tmp_path: Path, name: str) -> None:
    recipe, plan, match = PLANS[name]
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256, limit=8)
    pipe = wb.recipes.grpo(wb.engines.local(tiny, device="cpu"), **{"group_size": 2, "max_tokens": 8, **recipe})
    with pytest.raises(WorkbenchError, match=match):
        wb.train_blocking(pipe, rows, **{"steps": 1, "batch_size": 4, **plan}, run=tmp_path / "r")
    assert not (tmp_path / "r").exists()


def test_models(tiny: str, tmp_path: Path) -> None:
    with pytest.raises(WorkbenchError, match="no model at .*check the path"):
        wb.engines.local(tmp_path / "none")
    odd = make_random_model(tmp_path / "odd", vocabulary=16)
    for path in Path(tiny).glob("*token*"):
        shutil.copy(path, odd / path.name)
    with pytest.raises(WorkbenchError, match=r"tokenizer .*expected|expected .*16"):
        wb.engines.local(odd, device="cpu")


def test_too_little_memory_is_said_before_the_first_token(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workbench.engines.local_engine.memory.available", lambda device: 1 << 20)
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256, limit=8)
    pipe = wb.recipes.ppo(wb.engines.local(tiny, device="cpu"), group_size=2, max_tokens=8)
    with pytest.raises(
        MemoryError, match=r"would need about .* more on cpu.*1\.0 MiB.*critic.*actor.*lower micro_batch_tokens"
    ):
        wb.train_blocking(pipe, rows, steps=1, batch_size=4, run=tmp_path / "r")
    assert not (tmp_path / "r").exists()
    asked = wb.recipes.ppo(wb.engines.local(tiny, device="cpu", check_memory=False), group_size=2, max_tokens=8)
    wb.train_blocking(asked, rows, steps=1, batch_size=4, run=tmp_path / "r")
    assert (tmp_path / "r").exists()


@pytest.mark.slow
def test_a_refusal_loses_nothing_of_an_earlier_run(tiny: str, tmp_path: Path) -> None:
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256, limit=8)

    def pipe(**settings: Any) -> wb.Pipeline:
        return wb.recipes.grpo(wb.engines.local(tiny, device="cpu"), **{"group_size": 2, "max_tokens": 8, **settings})

    wb.train_blocking(pipe(), rows, steps=1, batch_size=4, run=tmp_path / "r")
    before = {path: path.read_bytes() for path in (tmp_path / "r").rglob("*") if path.is_file()}
    for settings, plan in (({}, {"batch_size": 9}), ({"max_tokens": 9}, {}), ({"max_tokens": 500}, {})):
        with pytest.raises(WorkbenchError):
            wb.train_blocking(
                pipe(**settings), rows, **{"steps": 2, "batch_size": 4, **plan}, run=tmp_path / "r", resume="auto"
            )
    assert {path: path.read_bytes() for path in (tmp_path / "r").rglob("*") if path.is_file()} == before


@pytest.mark.slow
def test_truths_that_no_answer_can_match_are_counted_before_a_run(
    tiny: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """R2: rows whose truths the scorer cannot read were scored 0, one and all."""
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256, limit=8)

    def changed(number: int) -> wb.datasets.Rows:
        judged = [{"ground_truth": ["x"] if at < number else "4"} for at in range(len(rows))]
        return wb.datasets.Rows([{**row, "reward_model": one} for row, one in zip(rows, judged, strict=True)])

    engine = wb.engines.local(tiny, device="cpu")
    pipe = wb.recipes.grpo(engine, group_size=2, max_tokens=8)
    with pytest.raises(DataError, match="0 of 8 truths can ever score 1 by workbench/arith; found 8 lists; row 0"):
        wb.train_blocking(pipe, changed(8), steps=1, batch_size=4, run=tmp_path / "r")
    assert not (tmp_path / "r").exists()
    with pytest.raises(DataError, match="0 of 8 truths"):
        wb.evaluate(engine, changed(8))
    plan = TrainPlan(steps=1, batch_size=4, run=tmp_path / "r")
    found = preflight(pipe, changed(3), plan)
    assert "5 of 8 truths can score 1" in dict(found.findings)["truths"] and "5 of 8 truths" in caplog.text
    assert "truths" not in dict(preflight(pipe, rows, plan).findings)
