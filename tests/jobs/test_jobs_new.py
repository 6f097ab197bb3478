"""`workbench new`: a notebook to start from, which runs as it stands, here and as a job."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import workbench as wb
from workbench import cli
from workbench.jobs.parameters import declared_parameters
from workbench.jobs.runner import OK, run_notebook
from workbench.jobs.starter import TEMPLATE

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_it_runs_as_it_stands_as_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["new", "sub/mine.ipynb"]) == OK
    assert "workbench train sub/mine.ipynb" in capsys.readouterr().out
    small = {"steps": 2, "batch_size": 2, "group_size": 2, "max_tokens": 8, "held_out": 4}
    result = run_notebook("sub/mine.ipynb", small)
    assert result.code == OK, result.error
    assert result.run is not None and result.run.name.startswith("mine-")
    run = wb.load_run(result.run)
    assert run.summary["steps"] == 2 and run.summary["num_eval_rows"] == 4
    assert run.settings["train"]["batch_size"] == 2 and "my_reward" in str(run.settings["sources"]["reward"])
    for cell in json.loads(result.output.read_text())["cells"]:
        assert all(output["output_type"] != "error" for output in cell.get("outputs", []))


def test_model_and_rows_are_options_and_an_existing_file_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "my own.ipynb"
    assert cli.main(["new", str(path), "--model", 'models/"q"', "--train-file", "rows.jsonl"]) == OK
    found = {one.name: one.default for one in declared_parameters(path)}
    assert found["model"] == 'models/"q"' and found["train_file"] == "rows.jsonl" and found["steps"] == 20
    assert "my own.ipynb" in path.read_text() and "mine.ipynb" not in path.read_text()
    before = path.read_bytes()
    assert cli.main(["new", str(path)]) == 2 and "already" in capsys.readouterr().err
    assert cli.main(["new", str(tmp_path / "mine.py")]) == 2 and ".ipynb" in capsys.readouterr().err
    assert path.read_bytes() == before and [one.name for one in tmp_path.iterdir()] == ["my own.ipynb"]


def test_its_defaults_are_there_from_where_it_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cli.main(["new", "a.ipynb"])
    (tmp_path / "data" / "arith").mkdir(parents=True)
    (tmp_path / "data" / "arith" / "train.parquet").touch()
    cli.main(["new", "b.ipynb"])
    a, b = ({one.name: one.default for one in declared_parameters(name)} for name in ("a.ipynb", "b.ipynb"))
    assert Path(a["model"]).is_dir() and Path(a["train_file"]).is_file()
    assert b["train_file"] == "data/arith/train.parquet" and Path(b["model"]).is_absolute()


def test_the_template_is_clean_and_declares_neither_run_nor_resume() -> None:
    document = json.loads(TEMPLATE.read_text())
    assert json.dumps(document, indent=1, ensure_ascii=False) + "\n" == TEMPLATE.read_text()
    code = [cell for cell in document["cells"] if cell["cell_type"] == "code"]
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in code)
    assert all(len(cell["source"]) <= 12 for cell in code)
    declared = declared_parameters(TEMPLATE)
    assert not {"run", "resume"} & {one.name for one in declared} and all(one.help for one in declared)
