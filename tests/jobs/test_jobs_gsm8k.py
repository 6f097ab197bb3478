"""`make gsm8k`: its parameters run notebook 201 on a random model with Qwen2's tokenizer, and what is absent is said."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.models import make_shaped_model

import workbench as wb
from workbench import cli

SMALL = {"steps": 2, "batch_size": 2, "group_size": 2, "ppo_mini_batch_size": 2, "max_tokens": 8, "num_eval_rows": 2}


def make(**variables: Any) -> subprocess.CompletedProcess[str]:
    """What `make gsm8k` would do; nothing is done."""
    given = [f"{name}={value}" for name, value in variables.items()]
    return subprocess.run(["make", "-n", "-o", ".venv/.ready", "gsm8k", *given], capture_output=True, text=True, check=False)  # fmt: skip


def commands(printed: str) -> list[list[str]]:
    """Arguments of each `workbench` command."""
    return [shlex.split(line)[1:] for line in printed.replace("\\\n", " ").splitlines() if "workbench " in line]


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """Files as OpenAI publishes them."""
    for split in ("train", "test"):
        lines = [
            json.dumps({"question": f"{split} {n} + 1?", "answer": f"<<{n}+1={n + 1}>>\n#### {n + 1}"})
            for n in range(4)
        ]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(lines))
    return tmp_path


@pytest.mark.slow
def test_the_command_trains_a_random_model_of_the_real_tokenizers_class(published: Path, tmp_path: Path) -> None:
    model = make_shaped_model(tmp_path / "model", "tiny", chat=True)
    small = shlex.join(word for name, value in SMALL.items() for word in ("-p", f"{name}={value}"))
    printed = make(MODEL=model, DATA=published, GSM8K=tmp_path / "out", ARGS=small).stdout
    steps = commands(printed)
    assert [one[0] for one in steps] == ["convert", "convert", "train"]
    assert [cli.main(one) for one in steps] == [0, 0, 0]
    run = wb.load_run(tmp_path / "out" / "run")
    batch = run.traces[2].batch
    assert run.summary["steps"] == 2 and "val/reward" in run.metrics and run.checkpoints
    assert batch["raw_prompt"][0][0]["content"].startswith("train ") and "####" in batch["raw_prompt"][0][0]["content"]
    assert wb.rows(tmp_path / "out" / "test.parquet")[0]["data_source"] == "openai/gsm8k"
    saved = json.loads((run.checkpoint() / "actor" / "tokenizer_config.json").read_text())
    assert saved["tokenizer_class"] == "Qwen2Tokenizer"


def test_both_forms_of_published_files_are_found_and_their_absence_is_said(tmp_path: Path) -> None:
    done = make(DATA=tmp_path)
    assert done.returncode == 2 and "no GSM8K in DATA=" in done.stderr and "train.jsonl" in done.stderr
    (tmp_path / "main").mkdir()
    for split in ("train", "test"):
        (tmp_path / "main" / f"{split}-00000-of-00001.parquet").touch()
    train, test, job = commands(make(DATA=tmp_path).stdout)
    assert train[2].endswith("main/train-00000-of-00001.parquet") and test[2].endswith(
        "main/test-00000-of-00001.parquet"
    )
    given = dict(re.findall(r"(\w+)=(\S+)", " ".join(job)))
    assert given["model"] == "Qwen/Qwen2.5-0.5B-Instruct" and given["num_eval_rows"] == "1319"
    # the page that says what to expect describes this run
    page = Path("docs/gsm8k.md").read_text()
    assert (
        f"{given['batch_size']} prompts × {given['group_size']} samples" in page and f"{given['steps']} steps" in page
    )
    assert int(given["steps"]) * int(given["batch_size"]) == 7424 and f"every {given['test_freq']} steps" in page
