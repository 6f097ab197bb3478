"""A notebook as a job: parameters refused or coerced before anything starts, progress, exit codes."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from workbench import cli
from workbench.errors import SettingError
from workbench.runs.parameters import declared_parameters, resolve, table
from workbench.runs.runner import FAILED, OK, STOPPED, closing_lines, run_notebook

CELL = """run: str = "unset"  # run folder
lr: float = 1e-3  # learning rate
steps: int = 3
on: bool = True
name: Optional[str] = None
sizes: list[int] = [1, 2]"""


def notebook(path: Path, *cells: str, parameters: str | None = CELL) -> Path:
    made: list[dict[str, Any]] = []
    for number, source in enumerate([*([parameters] if parameters is not None else []), *cells]):
        tags = ["parameters"] if parameters is not None and number == 0 else []
        made.append(
            {
                "cell_type": "code",
                "id": f"c{number}",
                "metadata": {"tags": tags},
                "execution_count": None,
                "outputs": [],
                "source": source,
            }
        )
    spec = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    path.write_text(json.dumps({"cells": made, "metadata": spec, "nbformat": 4, "nbformat_minor": 5}))
    return path


def test_parameters_are_read_coerced_and_refused(tmp_path: Path) -> None:
    path = notebook(tmp_path / "n.ipynb")
    found = {parameter.name: parameter for parameter in declared_parameters(path)}
    assert found["lr"].default == 1e-3 and found["lr"].help == "learning rate" and found["sizes"].default == [1, 2]
    given = {"lr": "1e-6", "on": "false", "name": "None", "sizes": "[3]", "steps": "5"}
    assert resolve(path, given) == {"lr": 1e-6, "on": False, "name": None, "sizes": [3], "steps": 5}
    for wrong, match in (
        ({"lrr": 1}, "did you mean 'lr'"),
        ({"x; import os": 1}, "is not a parameter"),
        ({"steps": "many"}, "whole number"),
        ({"sizes": "3 4"}, "list or dict"),
    ):
        with pytest.raises(SettingError, match=match):
            resolve(path, wrong)
    assert " * lr" in table(path, {"lr": 2.0}) and "learning rate" in table(path, {})


@pytest.mark.parametrize(
    ("cell", "match"),
    [
        (None, "tagged 'parameters'"),
        ("x = 3", "name: type"),
        ("x: int = f()", "a literal"),
        ("x: int | None = 3", "papermill reads no other"),
    ],
)
def test_bad_parameter_cells_are_refused(tmp_path: Path, cell: str | None, match: str) -> None:
    with pytest.raises(SettingError, match=match):
        resolve(notebook(tmp_path / "n.ipynb", "1", parameters=cell), {"x": 1})


@pytest.mark.slow
def test_a_job_says_its_progress_while_it_runs(tmp_path: Path) -> None:
    path = notebook(
        tmp_path / "n.ipynb",
        "import os, time\nassert os.environ['WORKBENCH_JOB'] == '1' and lr == 1e-6 and on is False",
        "for i in range(2):\n    open(os.environ['WORKBENCH_PROGRESS'], 'a').write(f'step {i}\\n')\n    time.sleep(1)",
        "os.makedirs(run, exist_ok=True); print(await __import__('asyncio').sleep(0, 'done'))",
    )
    said: list[tuple[float, str]] = []
    result = run_notebook(
        path,
        {"run": str(tmp_path / "r"), "lr": "1e-6", "on": "false"},
        say=lambda line: said.append((time.monotonic(), line)),
    )
    ended = time.monotonic()
    assert result.code == OK and result.output == tmp_path / "r" / "notebook.ipynb" and result.output.is_file()
    steps = [(when, line) for when, line in said if line.startswith("step")]
    assert [line for _, line in steps] == ["step 0", "step 1"] and ended - steps[0][0] > 1.0
    assert "WORKBENCH_JOB" not in __import__("os").environ
    assert any("executed notebook" in line for line in closing_lines(result))


@pytest.mark.slow
def test_failures_have_their_own_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = notebook(tmp_path / "b.ipynb", "1/0", "print('never')")
    result = run_notebook(broken, {"run": str(tmp_path / "b")})
    assert result.code == FAILED and "ZeroDivisionError" in result.error and result.output.is_file()
    stopped = notebook(tmp_path / "s.ipynb", "import workbench as wb\nraise wb.RunStopped('at step 3')")
    assert run_notebook(stopped, {"run": str(tmp_path / "s")}).code == STOPPED
    assert cli.main(["train", str(broken), "-p", "stepps=3"]) == 2
    assert "did you mean 'steps'" in capsys.readouterr().err
    assert cli.main(["train", str(broken), "-p", "steps"]) == 2 and cli.main(["parameters", str(broken)]) == 0
    assert "learning rate" in capsys.readouterr().out
