"""A notebook as a job: progress while it runs, where the executed notebook goes, exit codes, the closing lines."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from workbench import __version__, cli
from workbench.jobs.runner import DIED, FAILED, OK, STOPPED, NotebookResult, closing_lines, run_notebook

PROGRESS = """import time
for i in range(2):
    with open(os.environ['WORKBENCH_PROGRESS'], 'a') as file:
        file.write(f'step {i}\\n')
    while not os.path.exists(os.path.join(os.path.dirname(run), f'heard {i}')):
        time.sleep(0.05)"""


@pytest.mark.slow
def test_a_job_says_its_progress_while_it_runs(
    make_notebook: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = make_notebook(
        "import os, sys\nassert os.environ['WORKBENCH_JOB'] == '1' and lr == 1e-6 and on is False",
        PROGRESS,
        "print(await __import__('asyncio').sleep(0, 'done'), sys.prefix)",
    )
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        if line.startswith("step"):  # the cell waits for it
            (tmp_path / line.replace("step", "heard")).touch()

    result = run_notebook(
        path,
        {"run": str(tmp_path / "r"), "lr": "1e-6", "on": "false"},
        say=say,
    )
    assert result.code == OK, result.error
    assert result.output == tmp_path / "r" / "notebook.ipynb" and result.run == tmp_path / "r"
    assert [line for line in said if line.startswith("step")] == ["step 0", "step 1"]
    assert not {"WORKBENCH_JOB", "WORKBENCH_PROGRESS"} & set(os.environ)
    cells = json.loads(result.output.read_text())["cells"]
    assert cells[1]["metadata"]["tags"] == ["injected-parameters"]
    # the kernel is this Python, whatever other kernels the machine has
    assert "".join(cells[-1]["outputs"][0]["text"]).split() == ["done", sys.prefix]
    assert capfd.readouterr().err == "", "a job's terminal has progress, no warnings"


@pytest.mark.slow
def test_failures_have_their_own_exit_codes(
    make_notebook: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = make_notebook("1/0", "print('never')", name="b.ipynb")
    assert cli.main(["train", str(broken), "-p", "run", str(tmp_path / "b")]) == FAILED
    told = capsys.readouterr().out
    assert (
        "cell" in told
        and "ZeroDivisionError: division by zero" in told
        and str(tmp_path / "b" / "notebook.ipynb") in told
    )
    stopped = make_notebook("import workbench as wb\nraise wb.RunStopped('at step 3')", name="s.ipynb")
    result = run_notebook(stopped, {"run": str(tmp_path / "s")})
    assert result.code == STOPPED and "at step 3" in result.error and result.output.is_file()
    killed = make_notebook("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", name="k.ipynb")
    result = run_notebook(killed, {"run": str(tmp_path / "k")})
    assert result.code == DIED and "kernel died in cell " in result.error and result.output.is_file()


@pytest.mark.slow
def test_a_job_without_a_named_run_folder_gets_a_fresh_one(
    make_notebook: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run_notebook(make_notebook("run", parameters='x: int = 3\nrun: str = ""', name="job.ipynb"), {})
    assert result.run is not None and result.run.parent == Path("runs") and result.run.name.startswith("job-")
    last = json.loads(result.output.read_text())["cells"][-1]
    assert last["outputs"][0]["data"]["text/plain"] in (repr(str(result.run)), [repr(str(result.run))])


def test_what_is_refused_starts_nothing(make_notebook: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(make_notebook("1"))
    assert cli.main(["train", path, "-p", "stepps=3"]) == 2
    assert "did you mean 'steps'" in capsys.readouterr().err
    assert cli.main(["train", path, "-p", "steps"]) == 2 and "name=value" in capsys.readouterr().err
    assert cli.main(["train", str(make_notebook("1", parameters=None))]) == 2
    assert [file.name for file in tmp_path.iterdir()] == ["n.ipynb"]


def test_both_ways_to_give_a_parameter(make_notebook: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, str]] = []

    def fake(notebook: str, given: dict[str, str], **_: Any) -> NotebookResult:
        seen.append(given)
        return NotebookResult(OK, Path("out.ipynb"), None)

    monkeypatch.setattr("workbench.jobs.runner.run_notebook", fake)
    assert cli.main(["train", "-p", "lr", "-1e-6", "-p", "name=a=b", "n.ipynb", "--parameter", "steps", "3"]) == OK
    assert seen == [{"lr": "-1e-6", "name": "a=b", "steps": "3"}]


def test_the_command_line_tells_what_there_is(make_notebook: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["parameters", str(make_notebook())]) == 0
    assert "learning rate" in capsys.readouterr().out
    with pytest.raises(SystemExit) as done:
        cli.main(["--version"])
    assert done.value.code == 0 and __version__ in capsys.readouterr().out


def test_the_closing_lines_say_what_came_of_it(tmp_path: Path) -> None:
    summary = {"num_eval_rows": 256, "stopped": None}
    for when, mean in (("before", 0.34), ("after", 0.9)):
        summary |= {f"reward_{when}": mean, f"interval_{when}": [mean - 0.05, mean + 0.05], f"greedy_{when}": mean}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "tensorboard").mkdir()
    lines = closing_lines(NotebookResult(OK, tmp_path / "notebook.ipynb", tmp_path))
    assert "before: 0.34 " in lines[0] and "[0.29, 0.39]" in lines[0] and "after: 0.9 " in lines[1]
    assert "256 prompts" in lines[1] and str(tmp_path / "notebook.ipynb") in lines[2]
    assert str(tmp_path / "metrics.jsonl") in "\n".join(lines) and "curves" not in "\n".join(lines)
    (tmp_path / "summary.json").write_text(json.dumps({"stopped": "break_if at step 4"}))
    assert "stopped: break_if at step 4" in closing_lines(
        NotebookResult(STOPPED, tmp_path / "notebook.ipynb", tmp_path)
    )
