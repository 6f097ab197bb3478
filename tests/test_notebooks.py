"""The notebooks: clean sources, listed parameters, and each executed through the runner that trains."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from support.lint import lint

import workbench as wb
from workbench.engines.vllm_server.engine import VllmSettings, importable, interpreter
from workbench.jobs.parameters import declared_parameters
from workbench.jobs.runner import OK, run_notebook

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SAMPLER = "vllm" if importable(interpreter(VllmSettings())) else "local"
SMALL = {
    "101_one_step": {"prompts": 4, "group_size": 4},
    "102_rewards": {"prompts": 4, "group_size": 4, "steps": 2},
    "103_algorithms": {"updates": 1},
    "104_what_if": {"updates": 2},
    "105_replay_a_run": {"steps": 3, "batch_size": 4, "step": 3},
    "106_agents": {
        "steps": 3,
        "batch_size": 4,
        "group_size": 4,
        "num_eval_rows": 16,
        "test_freq": 2,
        "save_freq": 2,
    },
    "107_reward_models": {"steps": 3, "policy_steps": 4, "batch_size": 4, "group_size": 4, "num_pairs": 4},
    "108_harness": {"steps": 3, "batch_size": 2, "group_size": 4, "num_eval_rows": 4, "num_tasks": 2},
    "109_distillation": {
        "teacher_steps": 3,
        "steps": 3,
        "batch_size": 4,
        "group_size": 4,
        "test_freq": 2,
        "num_eval_rows": 8,
    },
    "110_in_and_out": {"steps": 3, "batch_size": 4, "group_size": 4, "num_eval_rows": 8},
    "111_real_model": {
        "model": "data/tiny-arith",
        "rule": "no_commas",  # which the tiny model keeps now and then
        "steps": 3,
        "batch_size": 2,
        "group_size": 4,
        "num_eval_rows": 8,
        "test_freq": 2,
    },
    "201_train_grpo": {
        "steps": 3,
        "batch_size": 4,
        "group_size": 4,
        "num_eval_rows": 16,
        "test_freq": 2,
        "save_freq": 2,
    },
    "202_train_ppo": {
        "steps": 3,
        "batch_size": 4,
        "group_size": 2,
        "num_eval_rows": 16,
        "critic_warmup": 1,
        "save_freq": 2,
    },
    "203_compare": {
        "recipes": ["remax", "ppo"],
        "seeds": [0, 1],
        "steps": 2,
        "batch_size": 4,
        "group_size": 2,
        "num_eval_rows": 8,
    },
    "301_on_a_cluster": {"steps": 3, "sampler": SAMPLER},
}
RUNS = {
    "101_one_step": 0,
    "103_algorithms": 0,
    "104_what_if": 0,
    "107_reward_models": 3,
    "109_distillation": 6,
    "203_compare": 4,
}
"""How many run folders a notebook's job writes; one where it is not named."""
SHORT = ("105_replay_a_run", "111_real_model")
"""Run as jobs in `make test`; so does 201, three times over, below, and 101 in a browser."""
REAL = os.environ.get("WORKBENCH_REAL_MODEL", "")
"""Folder or hub name of a pretrained instruct model, for notebook 111: `tools/real_model.py` writes one."""


def source(cell: dict[str, Any]) -> str:
    return cell["source"] if isinstance(cell["source"], str) else "".join(cell["source"])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_sources_are_clean(path: Path) -> None:
    document = json.loads(path.read_text())
    assert re.fullmatch(r"\d{3}_[a-z0-9_]+", path.stem) and document["metadata"]["kernelspec"]["name"] == "python3"
    assert "papermill" not in document["metadata"]
    code = [cell for cell in document["cells"] if cell["cell_type"] == "code"]
    prose = [cell for cell in document["cells"] if cell["cell_type"] == "markdown"]
    assert document["cells"][0]["cell_type"] == "markdown" and len(prose) >= 0.75 * len(code)
    for cell in code:
        assert not cell["outputs"] and cell["execution_count"] is None
        most = 32 if "parameters" in cell["metadata"].get("tags", []) else 20  # that one is a table
        assert len(source(cell).splitlines()) <= most and source(cell).strip()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_parameter_is_typed_explained_and_seen_by_papermill(path: Path) -> None:
    import papermill

    declared = declared_parameters(path)
    seen = papermill.inspect_notebook(str(path))
    assert declared and {parameter.name for parameter in declared} == set(seen)
    assert all(parameter.help and parameter.kind for parameter in declared)


def check_outputs(path: Path) -> int:
    """No output is blank without a kernel, and our HTML survives JupyterLab's sanitiser; how many there were."""
    count = 0
    for cell in json.loads(path.read_text())["cells"]:
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            count += 1
            if "application/vnd.jupyter.widget-view+json" in data:
                assert "text/html" in data or "image/png" in data
            rich = {"text/html", "image/png"} & set(data)
            plain = "".join(data.get("text/plain", ""))
            assert rich or not re.fullmatch(r"<.* at 0x[0-9a-f]+>|<Figure .*>", plain), f"{source(cell)} shows {plain}"
            text = data.get("text/html", "")
            html = text if isinstance(text, str) else "".join(text)
            if "dataframe" not in html:  # pandas brings its own style block, which is removed without harm
                assert lint(html) == [], source(cell)
            assert output["output_type"] != "error"
    return count


def check_runs(folder: Path) -> int:
    """A second reading of every run under a folder confirms all that it can read, and knows every name; their number."""
    runs = [path.parent for path in folder.rglob("metrics.jsonl")]
    for path in runs:
        run = wb.load_run(path)
        audit = run.audit()
        assert audit.agrees and not audit.unaudited, [*audit.disagreements, *audit.unaudited]
        assert set(audit.steps) == set(run.traces) != set()
        last = run.traces[max(run.traces)].batch
        of_rl = (14, 70 if "ref_log_prob" in last else 60)
        columns, metrics = of_rl if "advantages" in last else (6, 23)
        assert len(audit.columns) >= columns and len(audit.metrics) >= metrics, audit.summary()
    return len(runs)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=path.stem, marks=[] if path.stem in SHORT else pytest.mark.long) for path in NOTEBOOKS],
)
def test_it_runs_as_a_job(path: Path, tmp_path: Path) -> None:
    parameters: dict[str, Any] = dict(SMALL[path.stem])
    for name in ("run", "folder"):
        if any(parameter.name == name for parameter in declared_parameters(path)):
            parameters[name] = str(tmp_path / "run")
    result = run_notebook(path, parameters, output=tmp_path / path.name)
    assert result.code == OK, result.error
    assert check_outputs(result.output) >= 4
    assert check_runs(tmp_path) == RUNS.get(path.stem, 1)
    if "run" in parameters:
        run = wb.load_run(tmp_path / "run")
        assert run.summary["steps"] == 3 and run.checkpoints
        assert ("val/reward" in run.metrics) == ("num_eval_rows" in parameters)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(not REAL, reason="WORKBENCH_REAL_MODEL names no pretrained model (tools/real_model.py writes one)")
def test_a_pretrained_model_learns_its_rule(tmp_path: Path) -> None:
    """Five minutes: six steps are enough for an interval of the gain above 0."""
    path = ROOT / "notebooks" / "111_real_model.ipynb"
    small = {"model": REAL, "steps": 6, "test_freq": 6, "run": str(tmp_path / "run")}
    result = run_notebook(path, small, output=tmp_path / path.name)
    assert result.code == OK, result.error
    assert check_outputs(result.output) >= 4 and check_runs(tmp_path) == 1
    run = wb.load_run(tmp_path / "run")
    before, after = (run.val(step)["reward"][~run.val(step)["greedy"]].double() for step in (0, 6))
    gain = after - before
    assert len(gain) == 200 and gain.mean() - 1.97 * gain.std() / len(gain) ** 0.5 > 0


@pytest.mark.slow
@pytest.mark.long
def test_where_the_work_is_done_is_two_parameters(tmp_path: Path) -> None:
    """101 on FSDP ranks of a Ray cluster, with vLLM where it is installed: the same cells, the same tables."""
    where = {"engine": "ray", "sampler": SAMPLER}
    result = run_notebook(
        ROOT / "notebooks" / "101_one_step.ipynb", {**SMALL["101_one_step"], **where}, output=tmp_path / "101.ipynb"
    )
    assert result.code == OK, result.error
    assert check_outputs(result.output) >= 4


def small_pipeline() -> tuple[wb.Pipeline, wb.datasets.Rows]:
    """What 201 builds with `SMALL`."""
    engine = wb.engines.local("data/tiny-arith", lr=4e-5)
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256)
    settings: dict[str, Any] = {"group_size": 4, "kl_coef": 0.001, "clip_ratio_high": 0.2, "max_tokens": 64}
    return wb.recipes.grpo(engine, ppo_mini_batch_size=1, **settings), rows


def numbers(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if not key.startswith(("timing", "perf"))}


@pytest.mark.slow
def test_stepped_by_hand_trained_and_run_by_papermill_are_the_same_numbers(tmp_path: Path) -> None:
    """Bit-identical metrics, columns and weights: by the Stepper, by `train`, by plain papermill, by our engine."""
    import papermill
    import torch

    small, notebook = SMALL["201_train_grpo"], ROOT / "notebooks" / "201_train_grpo.ipynb"
    papermill.execute_notebook(
        str(notebook),
        str(tmp_path / "out.ipynb"),
        {**small, "run": str(tmp_path / "plain")},
        progress_bar=False,
        cwd=str(ROOT),
    )
    assert check_outputs(tmp_path / "out.ipynb") > 8  # with the panel of a person, which plain papermill shows
    assert run_notebook(notebook, {**small, "run": str(tmp_path / "job")}, skip_look=True).code == OK
    pipe, rows = small_pipeline()
    eval_rows = wb.rows("data/arith/test.parquet", max_prompt_length=256, limit=16)
    here = wb.train_blocking(
        pipe, rows, steps=3, batch_size=4, run=tmp_path / "here", eval_rows=eval_rows, test_freq=2, save_freq=2
    )
    assert check_runs(tmp_path) == 3
    jobs = [wb.load_run(tmp_path / name) for name in ("plain", "job")]
    for job in jobs:
        assert [numbers(row) for row in job.rows] == [numbers(row) for row in here.rows]
        assert job.checkpoints == here.checkpoints
        files = [run.checkpoint(3) / "actor" / "model.safetensors" for run in (job, here)]
        assert files[0].read_bytes() == files[1].read_bytes()
    pipe, rows = small_pipeline()
    for step in (1, 2, 3):
        trace = wb.Stepper(pipe, rows.batch(4, step=step)).run().trace
        for key, value in numbers(trace.metrics).items():
            assert here.rows[step][key] == value, (step, key)
    for run in (*jobs, here):
        recorded = run.traces[3].batch
        assert sorted(recorded.columns) == sorted(trace.batch.columns)
        assert all(torch.equal(recorded[name], trace.batch[name]) for name in trace.batch.batch)
        assert list(recorded["response_text"]) == list(trace.batch["response_text"])


@pytest.mark.parametrize("path", [ROOT / "README.md", *NOTEBOOKS], ids=lambda path: path.stem)
def test_the_reward_that_is_changed_changes_something(path: Path) -> None:
    """The tiny model's answers are 11 to 76 characters long: a bound beyond them would show that nothing changed."""
    bounds = [int(bound) for bound in re.findall(r"len\(solution_str\) < (\d+)", path.read_text())]
    assert all(11 < bound < 40 for bound in bounds)
    assert bounds or path.stem not in ("README", "101_one_step", "104_what_if", "105_replay_a_run")
