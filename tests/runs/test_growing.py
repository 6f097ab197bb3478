"""Data that grows and adapts: a run that is killed at any moment and resumed draws what it would have drawn."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from support.patience import LONG
from test_resume import numbers

import workbench as wb
from workbench.base.errors import DataError, RunError
from workbench.datasets import Rows
from workbench.runs.batch_metrics import sample_metrics

DRIVER = Path(__file__).with_name("growing_driver.py")
STEPS = 6
FILES = ("grown.jsonl", "difficulty.jsonl")


def drive(run: Path, kill: str | None = None) -> int:
    command = [sys.executable, str(DRIVER), str(run), str(STEPS), *([kill] if kill else [])]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONG, check=False, env=env)
    assert done.returncode in (0, -9), done.stderr
    return done.returncode


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("quiet") / "run"
    assert drive(run) == 0
    return run


def long(*kills: str) -> list[Any]:
    return [pytest.param(kill, marks=pytest.mark.long) for kill in kills]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("kill", ["line:8", *long("step:1", "step:3", "inside:4", "line:3", "line:10", "rename:2")])
def test_growth_that_is_killed_and_resumed_is_that_of_the_run_that_was_not(
    quiet: Path, tmp_path: Path, kill: str
) -> None:
    run = tmp_path / "run"
    assert drive(run, kill) == -9
    assert drive(run) == 0
    assert numbers(run) == numbers(quiet)
    for name in FILES:
        assert (run / name).read_text() == (quiet / name).read_text(), name
    ours, theirs = (wb.load_run(one).traces for one in (run, quiet))
    for step in range(1, STEPS + 1):
        assert list(ours[step].start["uid"]) == list(theirs[step].start["uid"])
        assert torch.equal(ours[step].batch["responses"], theirs[step].batch["responses"])


@pytest.mark.slow
def test_a_step_of_grown_data_is_replayed_bit_for_bit(quiet: Path) -> None:
    run = wb.load_run(quiet)
    assert run.rows[-1]["data/grown"] > 0 and {row["data/stage"] for row in run.rows} == {0, 1}
    grown = wb.rows(quiet / "grown.jsonl", without=["data_step"])
    assert len(grown) == run.rows[-1]["data/grown"] == len({str(row["prompt"]) for row in grown})
    prompts = {str(row["prompt"]) for row in grown}
    drawn = [step for step in run.traces if prompts & set(map(str, run.traces[step].start["raw_prompt"]))]
    assert drawn  # what one step made, a later one has
    stepper = run.stepper(drawn[-1])
    assert list(stepper.batch["uid"]) == list(run.traces[drawn[-1]].start["uid"])
    stepper.run(until="old_log_prob" if "old_log_prob" in stepper.pipeline.names else "rollout")
    assert torch.equal(stepper.batch["responses"], run.traces[drawn[-1]].batch["responses"])


def resumed(run: Path, rows: Rows, **settings: Any) -> Any:
    engine = wb.engines.local("data/tiny-arith", lr=1e-3, device="cpu")
    pipeline = wb.recipes.grpo(engine, reward, group_size=2, max_tokens=8)
    settings = {"steps": 2, "batch_size": 4, "trackers": [], "display": None, "save_freq": 1, **settings}
    return wb.train_blocking(pipeline, rows, run=run, **settings)


def reward(response: str) -> dict[str, Any]:
    new = {"prompt": f"say {response} again", "reward_model": {"ground_truth": "1"}}
    return {"score": len(response) / 9, "new_row": [new, {"question": 1}]}


reward.in_process = True  # type: ignore[attr-defined]


def data() -> Rows:
    return wb.datasets.growing(wb.rows("data/arith/train.parquet", limit=20))


@pytest.mark.slow
@pytest.mark.long
def test_an_edited_file_is_refused_on_resume_and_a_new_run_refuses_another_ones(tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = resumed(run, data())
    assert (
        first.rows[0]["data/new_rows_refused"] == 8
        and first.rows[0]["data/grown"] == first.rows[0]["data/new_rows"] > 0
    )
    file = run / "grown.jsonl"
    kept = file.read_text()
    file.write_text(kept.replace("say", "Say", 1))
    with pytest.raises(DataError, match=r"grown\.jsonl:1 has changed since it was written"):
        resumed(run, data(), steps=3, resume="auto")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps({k: v for k, v in one.items() if k != "text_crc32"}) + "\n" for one in lines))
    with pytest.raises(RunError, match=r"grown\.jsonl\.hash"):
        resumed(run, data(), steps=3, resume="auto")
    assert len(resumed(run, data(), steps=3, resume="auto", allow_changes=["data_hash"]).rows) == 3
    other = tmp_path / "other"
    other.mkdir()
    shutil.copy(file, other)
    with pytest.raises(RunError, match="a file of another run"):
        resumed(other, data())
    with pytest.raises(DataError, match="in the run's folder"):
        resumed(tmp_path / "third", wb.datasets.growing(wb.rows("data/arith/train.parquet", limit=20), str(file)))


def test_held_out_metrics_are_those_of_the_parts() -> None:
    rows = wb.rows("data/arith/train.parquet")
    batch = wb.datasets.mix({"a": rows[:4], "b": rows[4:8]}).batch(8)
    score = {"reward": torch.tensor([float(part == "a") for part in batch["data_part"]])}
    found = sample_metrics(batch.with_columns({**score, "scored": torch.ones(8, dtype=torch.bool)}))
    assert (found["val-core/a/reward/mean@1"], found["val-core/b/reward/mean@1"]) == (1, 0)


@pytest.mark.slow
def test_one_run_goes_through_its_stages(tmp_path: Path) -> None:
    rows = wb.rows("data/arith/train.parquet")
    easy, hard = wb.datasets.mix([rows[:8], rows[8:12]], weights=[3, 1]), rows[12:20]
    with pytest.raises(DataError, match="the stages end after step 2"):
        resumed(tmp_path / "short", wb.datasets.stages([(easy, 1), (hard, 1)]), steps=3)
    run = resumed(tmp_path / "run", wb.datasets.stages([(easy, 2), (hard, None)]), steps=3)
    assert [row["data/stage"] for row in run.rows] == [0, 0, 1]
    assert [row.get("data/0/prompts") for row in run.rows] == [3, 3, None]
    hard_prompts = set(map(str, hard.values("prompt")))
    assert [set(map(str, run.traces[3].start["raw_prompt"])) <= hard_prompts] == [True]


@pytest.mark.slow
def test_dynamic_sampling_draws_further_prompts_of_a_mix_and_takes_their_new_rows(tmp_path: Path) -> None:
    rows = wb.rows("data/arith/train.parquet")
    mixed = wb.datasets.growing(wb.datasets.mix({"a": rows[:10], "b": rows[10:30]}, weights=[1, 1]))
    engine = wb.engines.local("data/tiny-arith", lr=1e-3, device="cpu")

    def fair(response: str) -> dict[str, Any]:
        some = {"new_row": {"prompt": response, "reward_model": {"ground_truth": "1"}}} if len(response) % 2 else {}
        return {"score": float("1" in response), **some}

    fair.in_process = True  # type: ignore[attr-defined]
    pipeline = wb.recipes.dapo(engine, fair, group_size=2, max_tokens=8, rows=mixed)
    how: dict[str, Any] = {"steps": 2, "batch_size": 4, "trackers": [], "display": None, "trace_freq": 1}
    run = wb.train_blocking(pipeline, mixed, run=tmp_path / "run", **how)
    assert max(row["train/num_gen_batches"] for row in run.rows) > 1 and run.rows[-1]["data/grown"] > 0
    assert all(row["data/a/prompts"] + row["data/b/prompts"] == 4 for row in run.rows)
    assert set(Counter(run.traces[2].batch["data_part"])) <= {"a", "b"}


def test_a_new_row_is_read_as_any_other_row_is() -> None:
    """The forms that `wb.rows` reads: whatever became the prompt or the truth need not be a column of the other rows."""
    rows = wb.datasets.growing(wb.rows("data/arith/train.parquet")[:4])
    for record in (
        {"prompt": "2 + 2?", "answer": "4"},
        {"question": "2 + 2?", "target": 4},
        {"prompt": [{"role": "user", "content": "2 + 2?"}], "reward_model": {"ground_truth": "4"}},
    ):
        row = rows._check_new_row(record, {"data_source": "mine"}, "a new_row")  # type: ignore[attr-defined]
        assert row["prompt"] == [{"role": "user", "content": "2 + 2?"}] and row["data_source"] == "mine"
        assert str(row["reward_model"]["ground_truth"]) == "4" and set(row) <= {
            *rows.columns,
            "extra_info",
            "reward_model",
        }
    with pytest.raises(DataError, match="columns of a new_row; expected .*found solution"):
        rows._check_new_row({"prompt": "2?", "answer": "4", "solution": "so"}, {}, "a new_row")  # type: ignore[attr-defined]
