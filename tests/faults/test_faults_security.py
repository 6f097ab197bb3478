"""Rows E of the scorecard: model text, files and names are hostile; each test makes the attack. The names say which row."""

from __future__ import annotations

import ast
import json
import os
import pickle
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from support.hostile import HOSTILE, HOSTILE_PROSE, every_view
from support.lab import in_chromium, watched_page
from support.lint import lint
from support.patience import LONG

import workbench as wb
from workbench.base.errors import EngineError, WorkbenchError
from workbench.jobs.report import write_report

ROOT = Path(__file__).parents[2]


class Bomb:
    """Whoever unpickles it makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return open, (str(self.marker), "w")


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "marker"


# --- E4: files that would run code ----------------------------------------------------------------


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors", "optimizer.pt"])
def test_E4_a_pickle_in_a_model_folder_never_runs(tiny: str, tmp_path: Path, marker: Path, name: str) -> None:
    folder = Path(shutil.copytree(tiny, tmp_path / "model"))
    if name != "optimizer.pt":
        (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Bomb(marker)))
    if name == "optimizer.pt":
        wb.engines.local(folder, device="cpu")  # nobody looks at it
    else:
        with pytest.raises(EngineError, match="loading the model"):
            wb.engines.local(folder, device="cpu")
    assert not marker.exists()


def small_run(tiny: str, folder: Path, reward: Any = None, steps: int = 1, **settings: Any) -> wb.Run:
    pipe = wb.recipes.grpo(wb.engines.local(tiny, lr=1e-3, device="cpu"), reward, group_size=2, max_tokens=8)
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256, limit=8)
    return wb.train_blocking(pipe, rows, steps=steps, batch_size=4, run=folder, **settings)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.long)])
def test_E4_no_file_of_a_run_is_ever_unpickled(tiny: str, tmp_path: Path, marker: Path, every: bool) -> None:
    """Every file of a run in turn, or one of each kind of a folder, is replaced by a pickle that runs code; everything that
    reads runs is then asked."""
    run = small_run(tiny, tmp_path / "r", trace_freq=1)
    bomb = pickle.dumps(Bomb(marker))
    looks = [
        lambda: wb.load_run(run.path).summary,
        lambda: repr(wb.load_run(run.path)),
        lambda: [column for column in wb.load_run(run.path).traces[1].batch.to_pandas()],
        lambda: wb.load_run(run.path).engine(1),
        lambda: wb.load_run(run.path).stepper(1),
        lambda: wb.engines.local(run.path / "checkpoints" / "step_000001", device="cpu"),
    ]
    files = sorted(one for one in run.path.rglob("*") if one.is_file())
    for path in files if every else {(one.parent, one.suffix): one for one in files}.values():
        content = path.read_bytes()
        path.write_bytes(bomb)
        for look in looks:
            try:
                look()
            except Exception as error:  # noqa: BLE001 - any refusal will do; running the bomb will not
                assert "marker" not in str(error)
        assert not marker.exists(), path
        path.write_bytes(content)


@pytest.mark.slow
def test_E4_the_tree_has_no_door_for_pickles_or_evaluated_text() -> None:
    wrong = []
    for path in sorted((ROOT / "workbench").rglob("*.py")):
        # contract suites unpickle what they have just pickled; the harness runs in sandboxes alone, beside model code
        if path.parent.name == "testing" or path.name == "case_harness.py":
            continue
        place = path.relative_to(ROOT)
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            if called in (
                "eval",
                "exec",
                "compile",
                "__import__",
                "pickle.load",
                "pickle.loads",
                "yaml.load",
                "yaml.unsafe_load",
            ):
                wrong.append(f"{place}:{node.lineno} {called}")
            if called == "torch.load" and "weights_only=True" not in ast.unparse(node):
                wrong.append(f"{place}:{node.lineno} torch.load without weights_only")
            if called == "cloudpickle.loads" and path.name not in ("worker.py", "runner.py", "processes.py"):
                wrong.append(f"{place}:{node.lineno} {called}")
    assert not wrong, wrong


# --- E5: text that is markup, escape codes, or very long ------------------------------------------

ALLOWED = set(
    [
        "a",
        "b",
        "br",
        "code",
        "details",
        "div",
        "em",
        "hr",
        "i",
        "img",
        "li",
        "ol",
        "p",
        "pre",
        "s",
        "small",
        "span",
        "strong",
        "sub",
        "summary",
        "sup",
        "table",
        "tbody",
        "td",
        "th",
        "thead",
        "tr",
        "ul",
        "meter",
        "progress",
        "mark",
    ]
)


class Parsed(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.wrong: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag not in ALLOWED:
            self.wrong.append(tag)
        for name, value in attributes:
            text = (value or "").lower()
            script = "javascript:" in text and name != "title"  # a title is text, which a browser never follows
            if name.startswith("on") or script or (name == "src" and not text.startswith("data:image/")):
                self.wrong.append(f"{tag} {name}={text[:40]}")


@pytest.mark.parametrize("text", [HOSTILE, HOSTILE_PROSE], ids=["markup", "prose"])
def test_E5_whatever_a_model_writes_stays_text_in_every_view(tiny: str, tmp_path: Path, text: str) -> None:
    run = small_run(tiny, tmp_path / "r")
    (run.path / "summary.json").write_text(json.dumps({"stopped": text, "steps": 1}))
    for name, shown in every_view(text, run, tmp_path).items():
        assert "\x1b" not in shown and "\x07" not in shown and "\u202e" not in shown, f"{name} has control characters"
        if name.endswith("as text"):
            continue
        if "dataframe" in shown:  # pandas brings a style block of its own, and escapes cells
            shown = shown[: shown.index("<style")] + shown[shown.index("</style>") + 8 :]
        parsed = Parsed()
        parsed.feed(shown)
        assert parsed.wrong == [] and lint(shown) == [], f"{name}: {parsed.wrong} {lint(shown)}"


@pytest.mark.long
@pytest.mark.slow
def test_E5_ten_megabytes_in_one_line_are_cut(tiny: str, tmp_path: Path) -> None:
    run = small_run(tiny, tmp_path / "r")
    for name, shown in every_view("x" * 10_000_000, run, tmp_path).items():
        assert len(shown) < 1_000_000, f"{name} has {len(shown)} characters"


@in_chromium
def test_E5_in_a_browser_nothing_runs_and_nothing_is_fetched(tiny: str, tmp_path: Path) -> None:
    run = small_run(tiny, tmp_path / "r")
    page_file = tmp_path / "page.html"
    views = [shown for name, shown in every_view(HOSTILE, run, tmp_path).items() if not name.endswith("as text")]
    page_file.write_text("<!doctype html><meta charset=utf-8><body>" + "<hr>".join(views))
    report = write_report(run.path)
    with watched_page() as (page, asked, dialogs):
        for file in (page_file, report):
            page.goto(file.as_uri())
            page.wait_for_timeout(500)
    fetched = [url for url in asked if not url.startswith("data:")]
    assert dialogs == [] and fetched == [page_file.as_uri(), report.as_uri()]


# --- E7: paths of data and traces -----------------------------------------------------------------


def test_E7_data_paths_with_strange_names_are_refused_by_name(tmp_path: Path) -> None:
    for path in ("a\x00b.parquet", "x" * 300 + ".parquet", "../../nothing.parquet"):
        with pytest.raises((WorkbenchError, ValueError)) as caught:
            wb.rows(path)
        assert isinstance(caught.value, WorkbenchError), path


def test_E7_a_trace_stays_in_its_folder(tmp_path: Path) -> None:
    trace = wb.Trace.load("data/arith-batch")
    folder = trace.save(tmp_path / "t")
    document = json.loads((folder / "trace.json").read_text())
    for bad in ("../t/00_rollout", str(tmp_path / "t" / "00_rollout"), ".."):
        document["phases"][0]["folder"] = bad
        (folder / "trace.json").write_text(json.dumps({**document, "text_crc32": "left out by who means harm"}))
        with pytest.raises(WorkbenchError, match="expected the name of a folder in it"):
            wb.Trace.load(folder)
    meta = json.loads((folder / "start" / "meta.json").read_text())
    meta["tensors"]["x"] = ["torch.load", [1]]
    (folder / "start" / "meta.json").write_text(json.dumps({**meta, "text_crc32": "left out"}))
    with pytest.raises(WorkbenchError, match="expected a dtype of torch"):
        wb.DataProto.load(folder / "start")


# --- E9: models that bring code, templates that never end -----------------------------------------


def test_E9_a_models_own_code_is_not_run(tiny: str, tmp_path: Path, marker: Path) -> None:
    folder = Path(shutil.copytree(tiny, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "evil.Evil", "AutoConfig": "evil.EvilConfig"}
    config["model_type"] = "evil"
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass Evil: pass\nclass EvilConfig: pass\n")
    with pytest.raises(EngineError, match=r"loading the model"):
        wb.engines.local(folder, device="cpu")
    assert not marker.exists()


TEMPLATES = {
    "attribute walk": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "a large range": "{% for x in range(10**9) %}{% endfor %}",
    "a large string": "{{ 'a' * 10**10 }}",
    "many loops": "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}{% endfor %}",
    "much text": "{% for a in range(9999) %}{{ 'x' * 100000 }}{% endfor %}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_E9_a_hostile_template_is_refused_in_bounded_time_and_memory(
    tiny: str, tmp_path: Path, cold: None, name: str
) -> None:
    folder = Path(shutil.copytree(tiny, tmp_path / "model"))
    (folder / "chat_template.jinja").write_text(TEMPLATES[name])
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    engine = wb.engines.local(folder, device="cpu")
    assert "range" in engine.tokenizer.chat_template or "a" in engine.tokenizer.chat_template
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256, limit=4)
    with pytest.raises(WorkbenchError, match="chat template"):
        wb.stages.Rollout(engine, group_size=1)(rows.batch(2))


# --- E10: nothing listens -------------------------------------------------------------------------

LISTENS = """
import os, sys
import workbench as wb
if __name__ == "__main__":
    engine = wb.engines.local("data/tiny-arith", device="cpu")
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256, limit=8)
    pipe = wb.recipes.grpo(engine, lambda response: 1.0, group_size=2, max_tokens=8)
    wb.train_blocking(pipe, rows, steps=2, batch_size=4, run=sys.argv[1])
    mine = set()
    for link in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{link}")
        except OSError:
            continue
        if target.startswith("socket:["):
            mine.add(target[8:-1])
    for table in ("tcp", "tcp6"):
        for line in open(f"/proc/net/{table}").read().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in mine:
                print("LISTENS", fields[1])
"""


@pytest.mark.long
@pytest.mark.slow
def test_E10_training_opens_no_door(tmp_path: Path) -> None:
    script = tmp_path / "listens.py"
    script.write_text(LISTENS)
    command = [sys.executable, str(script), str(tmp_path / "r")]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=LONG, check=False)
    assert done.returncode == 0, done.stderr
    assert "LISTENS" not in done.stdout


# --- E13: secrets ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_E13_a_secret_of_the_environment_is_in_nothing_that_a_run_writes(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    canary = "canary-5f1c9b2e"
    for name in ("HF_TOKEN", "WANDB_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.setenv(name, canary)
    key = canary

    def judge(response: str) -> float:
        return float(len(key) > 0)

    small_run(tiny, tmp_path / "r", judge, steps=2, trace_freq=1, save_freq=1)
    write_report(tmp_path / "r")

    def breaks(response: str) -> float:
        raise ValueError(f"no answer from the judge with {len(key)} signs")

    with pytest.raises(WorkbenchError) as caught:
        small_run(tiny, tmp_path / "s", wb.rewards.Reward(breaks, on_failure="raise"))
    assert canary not in str(caught.value)
    for path in tmp_path.rglob("*"):
        if path.is_file():
            assert canary.encode() not in path.read_bytes(), path


@pytest.mark.slow
def test_E13_no_secret_is_in_the_record_of_a_job(
    make_notebook: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from workbench.jobs.runner import OK, run_notebook

    monkeypatch.setenv("HF_TOKEN", "canary-77aa")
    result = run_notebook(make_notebook("print(run)"), {"run": str(tmp_path / "r")})
    assert result.code == OK
    for path in (tmp_path / "r").rglob("*"):
        if path.is_file():
            assert b"canary-77aa" not in path.read_bytes(), path
