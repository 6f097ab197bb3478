"""A run in a repository of the hub: read as data at one commit, through the hub's cache; its reward runs only when it is passed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from support.hub import FakeHub, fake_hub

import workbench as wb
from workbench.base.errors import RunError
from workbench.replay import remote

REWARD = """open({marker!r}, "a").write("x")
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(len(solution_str))
"""


def score(response: str) -> float:
    return float(len(response))


@pytest.fixture(scope="module")
def recorded(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run of two steps with a reward in a file, and the file that the reward writes when it is loaded."""
    folder = tmp_path_factory.mktemp("theirs")
    marker = folder / "marker"
    (folder / "rew.py").write_text(REWARD.format(marker=str(marker)))
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setenv("WORKBENCH_CODE_ROOTS", str(folder))
    engine = wb.engines.local(tiny, lr=1e-3, device="cpu")
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256, limit=8)
    pipe = wb.recipes.grpo(engine, reward=str(folder / "rew.py"), group_size=2, max_tokens=8)
    plan: dict[str, Any] = {"steps": 2, "batch_size": 2, "trace_freq": 1, "trackers": (), "eval_rows": rows[:2]}
    wb.train_blocking(pipe, rows, run=folder / "run", **plan)
    monkeypatch.undo()
    (folder / "rew.py").unlink()  # it is on their machine alone
    return folder / "run", marker


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, recorded: tuple[Path, Path]) -> Iterator[FakeHub]:
    folder = recorded[0]
    files = {one.relative_to(folder).as_posix(): one.read_bytes() for one in folder.rglob("*") if one.is_file()}
    with fake_hub(monkeypatch, tmp_path / "home") as found:
        found.add("model", "she/run", files)
        found.add("dataset", "she/runs", {f"a/{name}": data for name, data in files.items()})
        yield found


@pytest.mark.slow
def test_a_run_on_the_hub_is_the_run_at_one_commit(hub: FakeHub, recorded: tuple[Path, Path]) -> None:
    here, there = wb.load_run(recorded[0]), wb.load_run("hf://she/run")
    commit = hub.repos["model", "she/run"].refs["main"]
    assert there.address == f"hf://she/run@{commit}" and wb.load_run(there.address).rows == here.rows
    assert there.settings == here.settings and there.summary == here.summary and list(there.traces) == [1, 2]
    assert not hub.asked(r"resolve/.*\.(safetensors|parquet)"), "nothing of a step was read yet"
    assert [*there.traces[2].batch["response_text"]] == [*here.traces[2].batch["response_text"]]
    assert len(there.val()) == len(here.val()) and there.checkpoint().name == here.checkpoint().name
    assert there.best(held_out=True)[0]["extra_info"]["from_run"][0]["run"] == there.address
    assert [*wb.list_runs("hf://datasets/she/runs").index] == ["a"]
    assert wb.load_run("hf://datasets/she/runs/a").rows == here.rows


@pytest.mark.slow
def test_it_opens_offline_from_the_cache(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    there = wb.load_run("hf://she/run")
    texts = [*there.traces[1].batch["response_text"]]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.seen.clear()
    again = wb.load_run("hf://she/run")
    assert again.rows == there.rows and [*again.traces[1].batch["response_text"]] == texts and not hub.seen
    with pytest.raises(RunError, match=r"no repository 'she/runn'.*did you mean she/run\?"):
        wb.load_run("hf://she/runn")


@pytest.mark.slow
def test_a_foreign_reward_runs_only_when_it_is_passed(hub: FakeHub, recorded: tuple[Path, Path]) -> None:
    recorded[1].unlink()
    there = wb.load_run("hf://she/run")
    stepper = there.stepper(2, at="reward")
    assert type(stepper.pipeline["reward"]).__name__ == "MissingStage"
    stepper = stepper.replace("reward", wb.rewards.Reward(score, in_process=True)).run(until="advantage")
    assert stepper.batch["reward"].tolist() == [float(len(one)) for one in stepper.batch["response_text"]]
    assert not recorded[1].exists(), "their code ran"


def test_what_is_no_run_is_refused_and_sizes_are_bounded(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("model", "she/model", {"config.json": b"{}"})
    for address, said in {
        "hf://she/model": "no run at 'hf://she/model@",
        "hf://she": "expected hf://owner/name",
        "hf://she/other": "no repository 'she/other'",
        "hf://she/run@v7": "no revision 'v7'",
    }.items():
        with pytest.raises(RunError, match=said):
            wb.load_run(address)
    monkeypatch.setattr(remote, "TEXT_LIMIT", 10)
    with pytest.raises(RunError, match="at most"):
        wb.load_run("hf://she/run")


@pytest.mark.parametrize("name", ["../../evil.json", "traces/../../evil.json", "/evil.json"])
def test_no_name_leads_out_of_the_copy(hub: FakeHub, name: str, tmp_path: Path) -> None:
    files = dict(hub.repos["model", "she/run"].files)
    hub.add("model", "she/run", {**files, name: b"{}"})
    run = wb.load_run("hf://she/run")
    assert run.rows and list(run.traces) == [1, 2]
    run.fetch()
    assert not [one for one in Path(run.path).parents[1].rglob("evil.json") if os.path.lexists(one)]


def test_a_copy_is_never_written_back_into_the_cache(hub: FakeHub) -> None:
    run = wb.load_run("hf://she/run")
    assert run.val() is not None and run.fetch() == run.path
    for blob in Path(constants.HF_HUB_CACHE).rglob("blobs/*"):
        assert not blob.is_file() or blob.stat().st_size
