"""A dry run on saved completions: what was extracted and where, who disagrees, and why rows are what they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from support.lint import lint
from support.rewards import flexible, strict

import workbench as wb
from workbench.base.errors import DataError
from workbench.rewards import dry_run, gsm8k, math_string
from workbench.testing.rewards import answered

SHARED = Path(__file__).parents[3] / "shared" / "data"
RECORDS = [
    {"prompt": "one?", "completion": "so #### 18 it is", "ground_truth": "18"},
    {"prompt": "two?", "completion": "it is 18", "ground_truth": "18"},
    {"prompt": "three?", "completion": "#### 1,234.", "ground_truth": "1234"},
    {"prompt": "four?", "completion": "<script>alert(1)</script> #### 4", "ground_truth": "5"},
]


def fails(response: str) -> float:
    raise KeyError("nothing works")


def test_tables_disagreements_failures_and_spans() -> None:
    run = dry_run(
        {"strict": strict, "flexible": flexible, "broken": wb.rewards.Reward(fails, in_process=True)}, RECORDS
    )
    table = run.table
    assert table["strict"].tolist() == [1, 0, 0, 0] and table["flexible"].tolist() == [1, 1, 0, 0]
    assert table["broken"].isna().all() and table["strict/answer"].fillna("-").tolist() == ["18", "-", "1234.", "4"]
    assert run.judged["strict"][0].span == (8, 10) and run.judged["strict"][2].span is None  # the comma went
    summary = run.summary
    assert summary.loc["strict", "mean"] == 0.25 and summary.loc["strict", "no_answer"] == 1
    assert summary.loc["broken", "infra_error"] == 4 and summary.loc["broken", "judged"] == 0
    assert list(dry_run({"strict": strict, "flexible": flexible}, RECORDS).disagreements.index) == [1]
    assert run.failures.iloc[0]["broken"] == 4 and "nothing works" in run.failures.index[0]
    text, html = repr(run), run._repr_html_()
    assert "4 completions" in text and "strict" in text and "4 × infra_error" in text
    assert "&lt;script&gt;" in html and "<script>" not in html and lint(html) == []
    assert ">18</span>" in html


@pytest.mark.parametrize("form", ["frame", "jsonl", "parquet", "batch", "trace", "verl"])
def test_whatever_completions_come_in(form: str, tmp_path: Path) -> None:
    batch = answered([one["completion"] for one in RECORDS], [one["ground_truth"] for one in RECORDS])
    given: Any = RECORDS
    if form == "frame":
        given = pd.DataFrame(RECORDS)
    elif form == "jsonl":
        given = tmp_path / "saved.jsonl"
        given.write_text("\n".join(map(json.dumps, RECORDS)))
    elif form == "parquet":
        given = tmp_path / "saved.parquet"
        pd.DataFrame(RECORDS).to_parquet(given)
    elif form == "batch":
        given = batch
    elif form == "trace":
        given = wb.Trace(batch)
    elif form == "verl":
        given = [{"input": one["prompt"], "output": one["completion"], "gts": one["ground_truth"]} for one in RECORDS]
    assert dry_run(flexible, given).table["flexible"].tolist() == [1, 1, 0, 0]


def reads_the_chat(response: str, prompt: list[dict[str, str]]) -> float:
    return float(prompt == [{"role": "user", "content": "one\n?"}])


def test_a_reward_reads_a_chat_in_parts_as_texts() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "?"}]
    record = {"prompt": [{"role": "user", "content": parts}], "completion": "x"}
    assert dry_run(reads_the_chat, [record]).table["reads_the_chat"].tolist() == [1]


def test_limits_names_and_refusals() -> None:
    assert len(dry_run([strict, strict], RECORDS, limit=2).table) == 2
    assert list(dry_run([strict, strict], RECORDS).judged) == ["strict", "strict'"]
    with pytest.raises(DataError, match="response of completion 1; expected a text; found None"):
        dry_run(gsm8k, [{"response": "#### 4"}, {"response": float("nan")}])
    with pytest.raises(DataError, match="a column with responses"):
        dry_run(strict, [{"said": "x"}])
    with pytest.raises(DataError, match="reward_model of completion 0 raised JSONDecodeError"):
        dry_run(strict, [{"response": "x", "reward_model": "{"}])
    wanting = dry_run({"wants": lambda response, colour: 1.0}, RECORDS)
    assert "colour" in wanting.failures.index[0], "a function that asks for what no row has is shown"


@pytest.mark.skipif(not (SHARED / "dumps" / "trl").exists(), reason="no TRL dump: ../shared/data is absent")
def test_a_dump_of_trls() -> None:
    run = dry_run({"length": wb.rewards.shaping.length_penalty()}, str(SHARED / "dumps" / "trl" / "*.parquet"))
    assert len(run.rows) == 192 and run.summary.loc["length", "judged"] == 192 and run._repr_html_()


@pytest.mark.slow
@pytest.mark.skipif(not (SHARED / "gsm8k").exists(), reason="no GSM8K: ../shared/data is absent")
def test_gsm8ks_own_solutions() -> None:
    """All 1,319 reference answers: strict and flexible agree but for what flexible does not clean."""
    lines = [json.loads(line) for line in (SHARED / "gsm8k" / "test.jsonl").read_text().splitlines()]
    records = [
        {"prompt": one["question"], "completion": one["answer"], "ground_truth": gsm8k.reference_answer(one["answer"])}
        for one in lines
    ]
    run = dry_run({"strict": strict, "flexible": flexible, "math": math_string}, records)
    assert run.summary.loc["strict", "mean"] == 1.0 and run.summary.loc["math", "judged"] == 1319
    commas = [row for row in records if "," in row["completion"].rsplit("#### ", 1)[1]]
    assert len(commas) == 14 and run.table["flexible"].sum() == 1319 - 14
    assert run.summary.loc["math", "no_answer"] == 1319, "no boxes there"


@pytest.mark.slow
def test_the_samples_view_opens_a_dry_run_and_filters_disagreements() -> None:
    rows = [{"response": f"#### {n}", "ground_truth": "1" if n % 2 else None, "prompt": "q"} for n in range(120)]
    run = wb.rewards.dry_run({"strict": wb.rewards.gsm8k, "one": lambda response: 1.0}, rows)
    shown = wb.views.samples(run, where={"reward/differs": 1})
    assert len(shown.frame) == len(run.disagreements) == 119 and run.as_batch["reward/strict"].isnan().sum() == 60
    assert wb.views.samples(run, rows=3).row(1).values["response"] == "#### 1"
    page = run._repr_html_()
    assert "119 rows" in page and "the first 50" in page and "views.samples" in page
