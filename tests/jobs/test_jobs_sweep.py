"""A sweep: its grid, how many jobs run at a time, what a second call leaves alone, a kill in the middle, the table."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import workbench as wb
from workbench import cli
from workbench.base.errors import SettingError
from workbench.jobs import sweep as module
from workbench.jobs.runner import FAILED, OK, STOPPED, TERMINATED
from workbench.jobs.sweep import jobs_of, sweep, values_of

GRID = "lr: float = 1e-3\nseed: int = 0\nsizes: list[int] = [1]\nname: str = 'x'"


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1e-4,3e-4", ["1e-4", "3e-4"]),
        ("0..2", [0, 1, 2]),
        ("-1..1,7", [-1, 0, 1, "7"]),
        ("[1,2]", ["[1,2]"]),
        ("[1,2],[3]", ["[1,2]", "[3]"]),
        ("{'a': 1, 'b': 2}", ["{'a': 1, 'b': 2}"]),
        ("'a,b', c", ["a,b", "c"]),
        ("", [""]),
        ("data/a.parquet", ["data/a.parquet"]),
    ],
)
def test_a_text_has_one_value_or_several(text: str, values: list[Any]) -> None:
    assert values_of(text) == values


@pytest.mark.parametrize("text", ["[1,2", "1,,2", "'a", "3..1", "0..100000", "1,"])
def test_a_broken_text_is_refused(text: str) -> None:
    with pytest.raises(SettingError, match="grid"):
        values_of(text)


def test_a_grid_is_every_combination_named_by_what_differs(make_notebook: Any) -> None:
    path = make_notebook(parameters=GRID)
    found = jobs_of(path, {"lr": "1e-4,3e-4", "seed": "0..2", "sizes": "[1,2]"})
    assert list(found)[:2] == ["lr=0.0001,seed=0", "lr=0.0001,seed=1"] and len(found) == 6
    assert found["lr=0.0003,seed=2"] == {"lr": 3e-4, "seed": 2, "sizes": [1, 2]}
    assert list(jobs_of(path, {"lr": "1e-4"})) == ["n"] and list(jobs_of(path, {})) == ["n"]
    assert list(jobs_of(path, {"lr": [1e-4, 2e-4]})) == ["lr=0.0001", "lr=0.0002"]
    names = list(jobs_of(path, {"name": "a/b,a_b", "sizes": "[1],[1,2]"}))
    assert len({*names}) == 4 and not any("/" in name for name in names)
    for grid, match in (
        ({"lr": "1e-4,x"}, "a number"),
        ({"lrr": "1"}, "did you mean 'lr'"),
        ({"lr": "1e-4,0.0001"}, "two jobs of a sweep are the same"),
        ({"run": "a,b"}, "'run' of a sweep"),
        ({"seed": "0..9999", "lr": "1,2"}, "1 to 10000"),
        ({"lr": []}, "1 to 10000"),
    ):
        with pytest.raises(SettingError, match=match):
            jobs_of(path, grid)


CHILD = """
import json, os, pathlib, signal, sys, time
job = json.loads(sys.argv[1])
values, folder = job["values"], pathlib.Path(job["values"]["run"])
folder.mkdir(exist_ok=True)
with (folder.parent / "log").open("a") as log:
    log.write(f"+{values['seed']} {os.environ['OMP_NUM_THREADS']}\\n")
    log.flush()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    time.sleep(60 if values.get("lr") == 1 else 0.2)
    log.write(f"-{values['seed']}\\n")
sys.exit(values["seed"] if not (folder.parent / "mended").exists() else 0)
"""


@pytest.mark.slow
def test_so_many_run_at_a_time_and_what_is_done_is_left_alone(
    make_notebook: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CHILD", CHILD)
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    path, run, said = make_notebook(parameters=GRID), tmp_path / "s", list[str]()
    first = sweep(path, {"seed": "0..3"}, run=run, jobs=2, say=said.append)
    assert first.code == FAILED and said[0] == f"4 jobs in {run}, 0 of them done already"
    assert first.table["job"].tolist() == ["done", "exit code 1", "exit code 2", "exit code 3"]
    assert first.table["seed"].tolist() == [0, 1, 2, 3] and "lr" not in first.table
    lines = (run / "log").read_text().split("\n")
    running = most = 0
    for line in filter(None, lines):
        running += 1 if line[0] == "+" else -1
        most = max(most, running)
        assert line[0] == "-" or line.endswith(" 4"), "half of the threads each"
    assert most == 2
    (run / "mended").touch()
    (run / "log").unlink()
    second = sweep(path, {"seed": "0..3"}, run=run, jobs=4, say=said.append)
    assert second.code == OK and "+0" not in (run / "log").read_text() and (run / "log").read_text().count("+") == 3
    path.write_text(path.read_text().replace('"x"', '"y"').replace("'x'", "'y'"))
    (run / "log").unlink()
    assert sweep(path, {"seed": "0..1"}, run=run).code == OK
    assert (run / "log").read_text().count("+") == 2, "another notebook is another job"
    (run / "mended").unlink()
    assert sweep(path, {"seed": "3"}, run=tmp_path / "t").code == STOPPED


@pytest.mark.slow
def test_a_stopped_sweep_stops_its_jobs_and_begins_no_other(
    make_notebook: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CHILD", CHILD)
    run = tmp_path / "s"

    def say(line: str) -> None:
        if line.endswith("began"):
            while "+" not in ((run / "log").read_text() if (run / "log").exists() else ""):
                time.sleep(0.02)
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGTERM)

    ended = sweep(make_notebook(parameters=GRID), {"lr": "1", "seed": "0..1"}, run=run, say=say)
    assert ended.code == TERMINATED and ended.table["job"].tolist() == ["exit code 143", "not run"]


def test_what_is_refused_writes_nothing(make_notebook: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, run = make_notebook(parameters=GRID), tmp_path / "s"
    for words in (["-p", "lr=1,x"], ["-p", "lr=1", "--jobs", "0"], ["-k", "nope"], ["-p", "seed=2..1"]):
        assert cli.main(["sweep", str(path), "--run", str(run), *words]) == 2, capsys.readouterr()
    assert not run.exists()


TRAINS = """import workbench as wb
engine = wb.engines.local("data/tiny-arith", lr=lr, device="cpu")
pipe = wb.recipes.grpo(engine, lambda response: wanted * len(response), group_size=2, max_tokens=8, kl_coef=0)
rows = wb.rows("data/arith/train.parquet", max_prompt_length=256, limit=4)
run = await wb.train(pipe, rows, steps=2, batch_size=2, save_freq=1, trackers=(), break_if=slow)
run"""
SLOW = """import os, time
asked = []
def slow(metrics):
    asked.append(metrics)
    if len(asked) == 2 and os.environ.get("WORKBENCH_TEST_SLOW"):
        open(os.environ["WORKBENCH_TEST_SLOW"], "a").write(str(wanted))
        time.sleep(120)
    return False"""


@pytest.mark.slow
@pytest.mark.long
def test_a_killed_sweep_goes_on_with_the_same_numbers(
    make_notebook: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_notebook(SLOW, TRAINS, parameters="lr = 1e-3\nwanted = 0.1")
    words = ["sweep", str(path), "-p", "wanted=0.1,0.2", "--jobs", "2", "--run"]
    assert cli.main([*words, str(tmp_path / "whole")]) == OK, capsys.readouterr().out
    table = capsys.readouterr().out
    assert "wanted=0.1" in table and "2/2" in table and "finished" in table
    marker = tmp_path / "second step"
    command = [sys.executable, "-m", "workbench.cli", *words, str(tmp_path / "cut")]
    process = subprocess.Popen(command, env={**os.environ, "WORKBENCH_TEST_SLOW": str(marker)})
    until = time.monotonic() + 300
    while not (marker.exists() and len(marker.read_text()) == 6):  # both jobs are in their second step
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.1)
    process.kill()
    process.wait()
    assert cli.main([*words, str(tmp_path / "cut")]) == OK, capsys.readouterr().out
    for name in ("wanted=0.1", "wanted=0.2"):
        a, b = (wb.load_run(tmp_path / folder / name) for folder in ("whole", "cut"))
        kept = [
            {k: v for k, v in row.items() if not k.startswith(("timing", "perf"))} for run in (a, b) for row in run.rows
        ]
        assert kept[:2] == kept[2:], "the first step was not done again, the second is the same"
    log = (tmp_path / "cut" / "wanted=0.1.log").read_text()
    assert log.count("step 1/2") == 1 and log.count("step 2/2") == 2, "it goes on after the step that was saved"
    capsys.readouterr()
    assert cli.main([*words, str(tmp_path / "cut")]) == OK
    assert "2 of them done already" in capsys.readouterr().out
    assert json.loads((tmp_path / "cut" / "sweep.json").read_text())["jobs"]["wanted=0.1"]["code"] == OK
