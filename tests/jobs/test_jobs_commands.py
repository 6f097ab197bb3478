"""The commands: going on with a job, the table of runs, the report that needs no network, the check before work."""

from __future__ import annotations

import importlib
import json
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import workbench as wb
from workbench import cli
from workbench.base.config import read_yaml
from workbench.base.errors import RunError, SettingError
from workbench.jobs.parameters import resolve
from workbench.jobs.report import write_report
from workbench.jobs.runner import job_of
from workbench.runs.folder import check_place

SMALL = {
    "steps": 2,
    "batch_size": 4,
    "group_size": 2,
    "num_eval_rows": 4,
    "max_tokens": 12,
    "test_freq": 0,
    "save_freq": 1,
}
NOTEBOOK = "notebooks/201_train_grpo.ipynb"


def flags(**values: Any) -> list[str]:
    return [word for name, value in values.items() for word in ("-p", f"{name}={value}")]


def small_run(tiny: str, folder: Path, *, lr: float = 1e-3, steps: int = 2, **settings: Any) -> wb.Run:
    pipe = wb.recipes.grpo(wb.engines.local(tiny, lr=lr, device="cpu"), group_size=2, max_tokens=12)
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256, limit=8)
    return wb.train_blocking(pipe, rows, steps=steps, batch_size=4, run=folder, **settings)


# --- parameters from a file -----------------------------------------------------------------------


def test_a_file_is_typed_by_the_notebook_and_the_command_line_comes_after(make_notebook: Any, tmp_path: Path) -> None:
    path = make_notebook("1")
    (tmp_path / "p.yaml").write_text("lr: 1e-6\nsteps: 3.0\non: false\n".replace("on:", '"on":'))
    assert resolve(path, read_yaml(tmp_path / "p.yaml")) == {"lr": 1e-6, "steps": 3, "on": False}
    (tmp_path / "p.json").write_text(json.dumps({"lr": 0.5, "name": None}))
    assert resolve(path, read_yaml(tmp_path / "p.json")) == {"lr": 0.5, "name": None}


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("stepps: 3", "did you mean 'steps'"),
        ("on: false", "line 1; found the key 'on', which YAML takes for no text; quote it"),
        ("name: x\nnested:\n  a: {off: 1}", "line 3; found the key 'off'"),
        ("lr: 0.1\nsteps: 1\nlr: 0.2", "line 3; found the key 'lr' a second time; leave one of them out"),
        ("x: {a: {b: 1, c: 2, b: 3}}", "the key 'b' a second time"),
        ('{"lr": 0.1, "lr": 0.2}', "the key 'lr' a second time"),
        ("steps: 010", "line 1; found 010, a whole number of another base; write it in plain digits"),
        ("steps: 1:30", "found 1:30, a whole number of another base"),
        ("a: &x [1, 1]\nb: [*x, *x]", r"^YAML file '[^']*', line 2; expected no aliases \(\*name\); found \*x"),
        ("a: &a [x,x]\nb: &b [*a,*a]\nc: &c [*b,*b]\nd: [*c,*c]", "expected no aliases"),
        ("base: &base {lr: 1}\njob: {<<: *base}", "expected no aliases"),
        ("steps: [1", "cannot be read"),
        ("- 1\n- 2", "expected lines `name: value`"),
        ("", "expected lines `name: value`"),
        ("steps: !!python/object/apply:os.system ['true']", "cannot be read"),
        ("steps: many", "'steps'; expected a whole number"),
        ("lr: 1e-6x", "'lr'; expected a number"),
        ("lr: .nan", "'lr'; expected a number"),
        ("x: " + "y" * (1 << 20), "at most"),
        ("[" * 1500, "cannot be read"),
        ("a: '\x00'", "cannot be read"),
    ],
)
def test_a_bad_file_is_refused(make_notebook: Any, tmp_path: Path, text: str, match: str) -> None:
    (tmp_path / "p.yaml").write_text(text)
    with pytest.raises(SettingError, match=match):
        resolve(make_notebook("1"), read_yaml(tmp_path / "p.yaml"))


def test_names_are_checked_before_anything_is_injected(make_notebook: Any, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    for name in (f"lr = 0; open({str(marker)!r}, 'w')\nx", "lr\nimport os", "lr "):
        with pytest.raises(SettingError, match="is not a parameter of n.ipynb"):
            resolve(make_notebook("1"), {name: 1})
    value = f"'''; open({str(marker)!r}, 'w') #"
    assert resolve(make_notebook("1"), {"name": value}) == {"name": value} and not marker.exists()


# --- where a run may stand ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("../../x", r"'\.\.' in it"),
        ("a\x00b", "control character"),
        ("a\nb", "control character"),
        ("x" * 300, "at most 200 bytes"),
        ("file", "a file of that name"),
        ("link", "is a link to"),
        ("link/inside", "is a link to"),
    ],
)
def test_E7_a_run_stays_where_its_name_says(tiny: str, tmp_path: Path, name: str, match: str) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "outside").mkdir()
    (root / "file").touch()
    (root / "link").symlink_to(tmp_path / "outside")
    with pytest.raises(RunError, match=match):
        small_run(tiny, root / name)
    assert list((tmp_path / "outside").iterdir()) == [] and sorted(one.name for one in root.iterdir()) == [
        "file",
        "link",
    ]
    check_place(root / "fine")


# --- a table of runs ------------------------------------------------------------------------------


@pytest.mark.slow
def test_runs_stand_side_by_side_with_the_settings_that_differ(
    tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    eval_rows = wb.rows("data/arith/test.parquet", limit=4)
    small_run(tiny, tmp_path / "runs" / "a", eval_rows=eval_rows)
    small_run(tiny, tmp_path / "runs" / "group" / "b", lr=5e-4, steps=1)
    (tmp_path / "runs" / "broken").mkdir()
    (tmp_path / "runs" / "broken" / "settings.json").write_text("{")
    frame = wb.list_runs(tmp_path / "runs")
    assert sorted(frame.index) == ["a", "broken", "group/b"]
    assert frame.loc["a", "state"] == "finished" and frame.loc["a", "steps"] == "2/2"
    assert frame.loc["a", "reward after"] == wb.load_run(tmp_path / "runs" / "a").summary["reward_after"]
    assert "cannot be read" in frame.loc["broken", "state"]
    assert frame.loc["a", "actor.lr"] == 1e-3 and frame.loc["group/b", "actor.lr"] == 5e-4
    assert "rollout.temperature" not in frame or frame["rollout.temperature"].nunique() <= 1
    assert cli.main(["runs", str(tmp_path / "runs")]) == 0 and "group/b" in capsys.readouterr().out
    assert cli.main(["runs", str(tmp_path / "none")]) == 2


@pytest.mark.slow
def test_a_run_without_an_end_that_nobody_writes_has_died(tiny: str, tmp_path: Path) -> None:
    run = small_run(tiny, tmp_path / "r")
    assert run.state == "finished"
    (run.path / "summary.json").unlink()
    assert run.state == "died" and "died after its last step, step " in repr(run)
    assert wb.list_runs(tmp_path).loc["r", "state"] == "died: goes on from checkpoint 2"
    found = run.diagnose().findings[0]
    assert found.cause == "the run died" and found.turn.endswith("resume='auto'), from checkpoint 2")
    from workbench.runs.folder import Lock

    lock = Lock(run.path / "lock.json")
    assert run.state == "running" and wb.list_runs(tmp_path).loc["r", "state"] == "running"
    lock.release()


# --- the report -----------------------------------------------------------------------------------


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.wrong: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag in ("script", "iframe", "object", "embed", "base", "form"):
            self.wrong.append(tag)
        for name, value in attributes:
            fetched = name in ("src", "action", "data") and outside(value or "")
            if name.startswith("on") or fetched or "javascript:" in (value or ""):
                self.wrong.append(f"{tag} {name}={value}")


def outside(value: str) -> bool:
    return value.lower().lstrip().startswith(("http:", "https:", "//", "javascript:"))


@pytest.mark.slow
def test_a_report_has_everything_and_needs_nothing(tiny: str, tmp_path: Path) -> None:
    import nbformat

    run = small_run(tiny, tmp_path / "r")
    hostile = "<script>alert(1)</script><img src=x onerror=alert(2)><a href='javascript:alert(3)'>x</a>"
    v4 = nbformat.v4
    outputs = [
        v4.new_output("display_data", data={"text/html": f"<b>shown</b>{hostile}", "text/plain": "t"}),
        v4.new_output(
            "display_data",
            data={"application/vnd.jupyter.widget-view+json": {"model_id": "m"}, "text/html": "<i>static form</i>"},
        ),
        v4.new_output("display_data", data={"application/javascript": "alert(4)", "text/plain": "no script"}),
        v4.new_output("display_data", data={"text/html": "<details open><summary>fold</summary>inside</details>"}),
        v4.new_output("stream", text=hostile),
        v4.new_output("error", ename="E", evalue=hostile, traceback=["\x1b[31mred\x1b[0m " + hostile]),
    ]
    cells = [v4.new_markdown_cell("# Title\n" + hostile), v4.new_code_cell("x = 1", outputs=outputs)]
    nbformat.write(v4.new_notebook(cells=cells), run.path / "notebook.ipynb")
    path = write_report(run.path)
    text = path.read_text()
    found = Tags()
    found.feed(text)
    assert found.wrong == []
    for tag in ("<details", "<h1", "<img", "<b>shown</b>", "<td style=", "<summary"):
        assert tag in text, tag
    for words in ("shown", "static form", "no script", "step 2 of 2", "data:image/png;base64", "settings", "Title"):
        assert words in text, words
    assert "\x1b" not in text and path == run.path / "report.html"


@pytest.mark.slow
def test_a_report_of_a_run_without_a_notebook(tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_run(tiny, tmp_path / "r")
    assert cli.main(["report", str(tmp_path / "r"), "-o", str(tmp_path / "x.html")]) == 0
    assert "finished" in (tmp_path / "x.html").read_text() and "x.html" in capsys.readouterr().out
    assert cli.main(["report", str(tmp_path / "none")]) == 2


# --- going on, and checking -----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.long
def test_a_job_is_gone_on_with_by_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "r"
    assert cli.main(["train", NOTEBOOK, "--skip-look", *flags(**SMALL, run=run)]) == 0
    job = (run / "job.json").read_text()
    # refused settings do not become the job's
    assert cli.main(["train", "--resume", str(run), "--skip-look", *flags(lr=1.0, steps=3)]) == 1
    assert "started with other settings" in capsys.readouterr().out and (run / "job.json").read_text() == job
    assert cli.main(["train", "--resume", str(run), "--skip-look", *flags(steps=3)]) == 0
    assert wb.load_run(run).summary["steps"] == 3
    assert json.loads((run / "job.json").read_text())["parameters"]["steps"] == 3
    assert len(list(run.glob("notebook*.ipynb"))) == 3
    assert cli.main(["train", "--resume", str(run), "--skip-look"]) == 0
    assert "nothing left to do: 3 of 3" in capsys.readouterr().out


def test_a_job_does_without_the_grammar_of_iris(monkeypatch: pytest.MonkeyPatch) -> None:
    """jsonschema, behind papermill, would import a package that compiles a grammar for over a second."""
    monkeypatch.delitem(sys.modules, "rfc3987_syntax", raising=False)
    assert cli.main(["train"]) == 2
    with pytest.raises(ModuleNotFoundError, match="import of rfc3987_syntax halted"):
        importlib.import_module("rfc3987_syntax")


def test_what_cannot_be_gone_on_with(make_notebook: Any, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no job at"):
        job_of(tmp_path)
    assert cli.main(["train"]) == 2
    (tmp_path / "job.json").write_text(json.dumps({"notebook": "gone.ipynb", "crc32": 0, "parameters": {}}))
    with pytest.raises(RunError, match="notebook does not exist any more"):
        job_of(tmp_path)
    path = make_notebook("1")
    (tmp_path / "job.json").write_text(json.dumps({"notebook": str(path), "crc32": 0, "parameters": {"lr": 1.0}}))
    _, values, note = job_of(tmp_path)
    assert values == {"lr": 1.0, "run": str(tmp_path), "resume": "auto"} and "has changed since" in note


@pytest.mark.long
@pytest.mark.slow
def test_the_check_says_what_a_job_will_see_and_refuses_as_it_would(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "r"
    assert cli.main(["check", NOTEBOOK, *flags(**SMALL, run=run)]) == 0
    told = capsys.readouterr().out
    for words in ("4096 rows", "workbench/arith × 4096", "4 prompts × 2 samples", "256 prompt tokens", "GiB free"):
        assert words in told, words
    for wrong, words in (
        ({"batch_size": 9000}, "batch size; expected 1 to 4096"),
        ({"model": "data/none"}, "no model at 'data/none'"),
    ):
        assert cli.main(["check", NOTEBOOK, *flags(**{**SMALL, **wrong}, run=run)]) == 2
        assert words in capsys.readouterr().out
    assert not run.exists()


# --- in a terminal --------------------------------------------------------------------------------


def test_a_run_and_its_samples_are_read_in_a_terminal(
    tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small_run(tiny, tmp_path / "run", trace_freq=1)
    run = str(tmp_path / "run")

    def said(*words: str, code: int = 0) -> str:
        assert cli.main(["show", *words]) == code
        captured = capsys.readouterr()
        return captured.err if code else captured.out

    text = wb.load_run(run).traces[2].batch["response_text"][3]
    assert "finished" in said(run) and "step" in said(run)
    assert said(run, "--step", "2", "--rows", "3").count("\nrow ") + 1 >= 3
    card = said(run, "--row", "3")  # of the last recorded step
    assert str(wb.views.samples(wb.load_run(run).traces[2]).row(3)) in card and text.split()[0] in card
    assert "advantage" in said(run, "--step", "2", "--row", "0", "--tokens", "advantage")
    assert "no trace of step 7" in said(run, "--step", "7", code=2) and "1, 2" in said(run, "--step", "7", code=2)
    assert "IndexError" not in said(run, "--row", "99", code=2)
    assert "advantge" in said(run, "--row", "0", "--tokens", "advantge", code=2)

    (tmp_path / "1.jsonl").write_text(
        json.dumps({"input": "2 + 3?", "output": "five", "gts": "5", "score": 0.0, "step": 1})
    )
    assert "five" in said(str(tmp_path / "1.jsonl"))
