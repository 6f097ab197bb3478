"""A notebook of one's own as a job: plain parameters, no `run` and no `resume`, no kernelspec; what is refused leaves nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import workbench as wb
from workbench import cli
from workbench.base.errors import SettingError
from workbench.jobs.parameters import declared_parameters, resolve, table
from workbench.jobs.runner import FAILED, OK, REFUSED, job_of, run_notebook

PLAIN = """steps = 2  # training steps
lr = 1e-3
greedy = False
names = ["a", "b"]
sizes = {"a": 1}
mark = "####"  # of the answer
nothing = []
below = -1"""
CELL = """import workbench as wb
engine = wb.engines.local("data/tiny-arith", lr=lr, device="cpu")
pipe = wb.recipes.grpo(engine, lambda response: wanted * len(response), group_size=2, max_tokens=6, kl_coef=0)
rows = wb.rows("data/arith/train.parquet", max_prompt_length=256, limit=4)
result = await wb.train(pipe, rows, steps=steps, batch_size=2, save_freq=1, display=None, trackers=())
len(result.rows)"""
TINY = "steps = 1\nlr = 1e-3\nwanted = 0.1"


def without_kernel(path: Path) -> Path:
    document = json.loads(path.read_text())
    document["metadata"] = {}
    path.write_text(json.dumps(document))
    return path


# --- D4, one by one -----------------------------------------------------------------------------


def test_a_plain_assignment_is_a_parameter_of_its_literals_type(make_notebook: Any) -> None:
    path = make_notebook(parameters=PLAIN)
    found = {one.name: one for one in declared_parameters(path)}
    kinds = {"steps": int, "lr": float, "greedy": bool, "names": list[str], "sizes": dict[str, int]}
    kinds |= {"mark": str, "nothing": list, "below": int}
    assert {name: one.kind for name, one in found.items()} == kinds
    assert found["steps"].help == "training steps" and found["mark"].default == "####" and found["lr"].help == ""
    given = {"steps": "4", "lr": "1e-6", "greedy": "true", "names": "c", "sizes": "{'b': 2}", "nothing": "[1, 'x']"}
    values = {"steps": 4, "lr": 1e-6, "greedy": True, "names": ["c"], "sizes": {"b": 2}, "nothing": [1, "x"]}
    assert resolve(path, given) == values
    assert "*" in table(path, values) and "training steps" in table(path, values)


def test_papermill_sees_the_same_parameters(make_notebook: Any) -> None:
    import papermill

    path = make_notebook(parameters=PLAIN)
    assert [*papermill.inspect_notebook(str(path))] == [one.name for one in declared_parameters(path)]


@pytest.mark.parametrize(
    ("cell", "given", "match"),
    [
        ("steps = 4", {"steps": "1.5"}, "whole number.*its type is that of `steps = 4`.*`steps: float = …`"),
        ("stop = None", {}, "the type of parameter 'stop'.*Optional\\[int\\] = None.*from typing import Optional"),
        ("pair = (1, 2)", {}, "the type of parameter 'pair'; expected a number, a text"),
        ("a = b = 3", {}, "name = value"),
        ("a, b = 3, 4", {}, "name = value"),
        ("a += 3", {}, "name = value"),
        ("lr = 1 / 3", {}, "a literal"),
        ("odd = [None]", {}, "the type of parameter 'odd'"),
    ],
)
def test_what_has_no_type_is_refused_with_the_line_that_works(
    make_notebook: Any, cell: str, given: dict[str, str], match: str
) -> None:
    with pytest.raises(SettingError, match=match):
        resolve(make_notebook(parameters=cell), given)


@pytest.mark.long
@pytest.mark.slow
def test_a_notebook_without_run_resume_and_kernelspec_is_a_job(
    make_notebook: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, run = without_kernel(make_notebook(CELL, parameters=TINY)), tmp_path / "mine"
    assert cli.main(["train", str(path), "-p", f"run={run}"]) == OK, capsys.readouterr().out
    job = json.loads((run / "job.json").read_text())
    assert job["all"] == {"steps": 1, "lr": 1e-3, "wanted": 0.1, "run": str(run)}
    assert wb.load_run(run).checkpoints == [1]
    assert job_of(run)[1] == {"run": str(run), "resume": "auto"}
    # D4: `--resume` was refused without a parameter `resume`
    assert cli.main(["train", "--resume", str(run), "-p", "steps=2"]) == OK, capsys.readouterr().out
    assert [row["training/global_step"] for row in wb.load_run(run).rows] == [1, 2]
    assert json.loads((run / "job.json").read_text())["parameters"]["steps"] == 2
    # a refused change leaves the job as it was; one that starts anew is refused as well
    assert cli.main(["train", "--resume", str(run), "-p", "steps=3", "-p", "lr=1.0"]) == FAILED
    assert json.loads((run / "job.json").read_text())["parameters"]["steps"] == 2
    assert cli.main(["train", str(path), "-p", f"run={run}", "-p", "resume=never"]) == FAILED
    assert "there is a run in" in capsys.readouterr().out
    # D5: the notebook's own parameter, which is in no setting
    assert cli.main(["train", str(path), "-p", f"run={tmp_path / 'more'}", "-p", "wanted=0.2", "-p", "lr=1e-4"]) == OK
    frame = wb.list_runs(tmp_path)
    assert frame["wanted"].to_dict() == {"mine": 0.1, "more": 0.2} and "actor.lr" in frame and "lr" not in frame
    assert not list(Path("runs").glob("n-*"))


@pytest.mark.slow
def test_a_run_that_its_cell_names_itself_is_gone_on_with_too(make_notebook: Any, tmp_path: Path) -> None:
    run = tmp_path / "chosen"
    cell = CELL.replace("steps=steps,", f"steps=steps, run={str(run)!r},")
    result = run_notebook(make_notebook(cell, parameters=TINY), {"run": str(tmp_path / "job")})
    assert result.code == OK, result.error
    notebook, values, _ = job_of(run)
    assert run_notebook(notebook, {**values, "steps": 2}).code == OK
    assert wb.load_run(run).summary["steps"] == 2


def test_what_is_refused_leaves_no_folder(
    make_notebook: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_notebook("1", parameters=TINY)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.ipynb").write_text("hello")
    (tmp_path / "list.ipynb").write_text("[]")
    elsewhere = json.loads(path.read_text())
    elsewhere["metadata"]["kernelspec"]["name"] = "julia-9"
    (tmp_path / "other.ipynb").write_text(json.dumps(elsewhere))
    before = sorted(tmp_path.rglob("*"))
    for words, match in (
        (["train", "other.ipynb"], "other.ipynb asks for the kernel 'julia-9'.*-k python3"),
        (["check", "other.ipynb"], "asks for the kernel 'julia-9'"),
        (["train", str(path), "-k", "nope"], "option -k nope; expected a kernel of this machine"),
        (["train", str(path), "-p", "stpes=3"], "did you mean 'steps'"),
        (["train", str(path), "-p", "steps=x"], "whole number"),
        (["train", "text.ipynb"], "text.ipynb is not a notebook; expected JSON"),
        (["train", "list.ipynb"], "list.ipynb is not a notebook"),
        (["train", "nowhere.ipynb"], "no notebook at"),
    ):
        assert cli.main(words) == REFUSED
        with pytest.raises(AssertionError, match=match):
            raise AssertionError(capsys.readouterr().err)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("given", "expected"), [({"epochs": 1}, 2), ({"epochs": 1.5}, 3), ({"epochs": 0.1}, 1), ({"steps": 3}, 3)]
)
def test_a_training_is_as_long_as_its_epochs(tiny: str, tmp_path: Path, given: Any, expected: int) -> None:
    from workbench.runs.settings import TrainSettings

    rows = wb.rows("data/arith/train.parquet", limit=5)
    assert TrainSettings(**given, batch_size=2).planned(rows).steps == expected


def test_steps_and_epochs_are_one_or_the_other(tiny: str, tmp_path: Path) -> None:
    pipe = wb.recipes.grpo(wb.engines.local(tiny, device="cpu"), kl_coef=0)
    rows = wb.rows("data/arith/train.parquet", limit=4)
    for given, match in (({}, "neither"), ({"steps": 1, "epochs": 1}, "steps=1 and epochs=1"), ({"epochs": 0}, "> 0")):
        with pytest.raises(SettingError, match=match):
            wb.train_blocking(pipe, rows, batch_size=2, run=tmp_path / "r", **given)
    assert not (tmp_path / "r").exists()
