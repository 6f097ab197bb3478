"""Runs at addresses: in memory, as `file://`, and in a folder that a real HTTP server lists; what is copied, and when."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import pytest

import workbench as wb
from workbench import cli
from workbench.base.errors import RunError
from workbench.replay import remote
from workbench.runs.folder import check_place


@pytest.fixture(scope="module")
def folder(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run `deep/a` of three recorded steps and two checkpoints."""
    path = tmp_path_factory.mktemp("remote") / "runs"
    pipe = wb.recipes.grpo(wb.engines.local(tiny, lr=1e-3, device="cpu"), group_size=2, max_tokens=12)
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256, limit=8)
    held = wb.rows("data/arith/train.parquet", max_prompt_length=256, limit=2)
    more: dict[str, Any] = {"trace_freq": 1, "save_freq": 2, "eval_rows": held, "test_freq": 3}
    wb.train_blocking(pipe, rows, steps=3, batch_size=4, run=path / "deep" / "a", **more)
    return path


class Handler(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def web(folder: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder)))
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def memory(folder: Path) -> str:
    fsspec.filesystem("memory").put(f"{folder}/", "/bucket", recursive=True)
    return "memory://bucket"


@pytest.fixture(params=["memory", "file", "http"])
def address(request: pytest.FixtureRequest, folder: Path) -> str:
    if request.param == "file":
        return f"file://{folder}"
    return str(request.getfixturevalue({"memory": "memory", "http": "web"}[request.param]))


def copied(run: wb.Run, *suffixes: str) -> list[str]:
    return sorted(str(one.relative_to(run.path)) for one in run.path.rglob("*") if one.suffix in suffixes)


def test_a_run_at_an_address_is_the_run(address: str, folder: Path) -> None:
    here, there = wb.load_run(folder / "deep" / "a"), wb.load_run(f"{address}/deep/a")
    assert there.rows == here.rows and there.settings == here.settings and there.summary == here.summary
    assert list(there.traces) == list(here.traces) == [1, 2, 3] and there.checkpoints == here.checkpoints
    assert there.state == "finished" and there.restorable_steps == here.restorable_steps
    assert copied(there, ".safetensors") == []  # nothing of a step was read yet
    assert wb.views.samples(there.traces[2]).text() == wb.views.samples(here.traces[2]).text()
    assert {name.split("/")[1] for name in copied(there, ".safetensors")} == {"step_000002"}
    assert wb.views.samples(there.val()).text() == wb.views.samples(here.val()).text()
    assert repr(there).startswith(f"Run {address}/deep/a: finished, step 3 of 3")
    assert there.curves("reward").plots.columns()["steps"] == [0, 1, 2, 3]


def test_any_step_again_from_an_address(memory: str, folder: Path) -> None:
    there = wb.load_run(f"{memory}/deep/a")
    assert there.audit(2).agrees and repr(there.diagnose()) == repr(wb.load_run(folder / "deep" / "a").diagnose())
    again = there.stepper(3, at="reward").run(until="advantage")
    assert again.compare(there.traces[3]).only[0] == ()
    assert not any(name.startswith("checkpoints") for name in copied(there, ".safetensors"))
    replayed = there.stepper(3).run()
    assert wb.diverge(replayed.trace, there.traces[3]).identical
    assert there.checkpoint().name == "step_000003"
    assert wb.load_run(there.fetch()).summary == there.summary


def test_runs_are_listed_and_compared_over_seeds(address: str, folder: Path) -> None:
    there, here = wb.list_runs(address), wb.list_runs(folder)
    assert list(there.index) == ["deep/a"] and there.drop(columns="changed").equals(here.drop(columns="changed"))
    seeds = wb.views.seeds({"grpo": [f"{address}/deep/a"]}, last=2)
    assert seeds.text() == wb.views.seeds({"grpo": [folder / "deep" / "a"]}, last=2).text()


def test_what_a_run_that_goes_on_writes_is_seen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "FRESH", 0.0)
    monkeypatch.setattr(remote, "LISTED", 0.0)
    files = fsspec.filesystem("memory")
    files.put(f"{folder / 'deep' / 'a'}/", "/live", recursive=True)
    text = files.cat("/live/metrics.jsonl")
    first = text[: text.index(b"\n") + 1]
    files.pipe("/live/metrics.jsonl", first)
    files.pipe("/live/lock.json", b"{}")
    files.rm("/live/summary.json")
    files.rm("/live/traces/step_000003", recursive=True)
    run = wb.load_run("memory://live")
    assert run.state == "running" and len(run.rows) == 1 and list(run.traces) == [1, 2] and not run.summary
    files.pipe("/live/metrics.jsonl", text)
    files.put(f"{folder / 'deep' / 'a'}/traces/step_000003/", "/live/traces/step_000003", recursive=True)
    files.rm("/live/lock.json")
    assert run.state == "died" and len(run.rows) == len(text.splitlines()) and list(run.traces) == [1, 2, 3]


def test_a_missing_run_library_or_host_is_named(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunError, match="no run at 'memory://bucket/deep'.*settings.json"):
        wb.load_run(f"{memory}/deep")
    with pytest.raises(RunError, match=r"s3://b/a cannot be read here.*Install s3fs"):
        wb.load_run("s3://b/a")
    with pytest.raises(RunError, match=r"nonsense://b/a cannot be read.*Protocol not known: nonsense"):
        wb.load_run("nonsense://b/a")
    with pytest.raises(RunError, match=r"http://127.0.0.1:9/a cannot be read"):
        wb.load_run("http://127.0.0.1:9/a")
    assert wb.list_runs("memory://nothing").empty


def test_names_that_lead_out_of_the_copy_are_left_out(folder: Path) -> None:
    files = fsspec.filesystem("memory")
    files.put(f"{folder / 'deep' / 'a'}/", "/sly", recursive=True)
    files.store["/sly/val/../../../out.json"] = files.store["/sly/settings.json"]
    run = wb.load_run("memory://sly")
    copy = run.fetch()
    assert len(run.traces) == 3 and (copy / "val").is_dir()
    assert not (copy / "val" / "../../../out.json").exists()


@pytest.mark.parametrize("place", ["s3://b/a", "memory://b/a", "https://host/a"])
def test_nothing_is_written_to_an_address(place: str) -> None:
    with pytest.raises(RunError, match="only read.*copy it there"):
        check_place(Path(place))


def test_the_commands_take_an_address(memory: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["runs", memory]) == 0 and "deep/a" in capsys.readouterr().out
    assert cli.main(["show", f"{memory}/deep/a", "--step", "2"]) == 0 and "8 samples" in capsys.readouterr().out
    assert cli.main(["report", f"{memory}/deep/a"]) == 2 and "only read" in capsys.readouterr().err
    assert cli.main(["report", f"{memory}/deep/a", "-o", str(tmp_path / "r.html")]) == 0
