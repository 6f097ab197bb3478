"""Folders of the present format open where they lack what came later, and folders of another format are refused."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.recorded import OUT, train

import workbench as wb
from workbench.base.errors import BatchError, CheckpointError, DataError, RunError, WorkbenchError
from workbench.engines.local_engine.states import read_record
from workbench.replay.rebuild import opened
from workbench.runs import checkpoint, updates
from workbench.runs.folder import read_kept, read_settings, step_folders, write_json

ROOT = Path(__file__).parents[2]


@pytest.fixture
def ppo(tmp_path: Path) -> Path:
    return Path(shutil.copytree(ROOT / OUT / "ppo", tmp_path / "ppo"))


@pytest.fixture
def lora(tmp_path: Path) -> Path:
    return Path(shutil.copytree(ROOT / OUT / "lora", tmp_path / "lora"))


def change_settings(run: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a run's recorded settings, and the copies in its checkpoints, as if it had been started with them."""
    checkpoints = step_folders(run / "checkpoints")
    for folder in (run, *checkpoints.values()):
        document = read_settings(folder)
        change(document)
        write_json(folder / "settings.json", document)
    for step, folder in checkpoints.items():
        (folder / "manifest.json").unlink()
        checkpoint._commit(folder, step, None)


def test_a_run_without_the_keys_that_came_later_opens_and_goes_on(lora: Path) -> None:
    """As a version wrote it that had no such settings yet: they count as their defaults."""

    def change(settings: dict[str, Any]) -> None:
        for record in settings["engines"].values():
            del record["head"], record["check_memory"]
        for record in settings["pipeline"]:
            del record["optional"]
        del settings["prompts"]

    change_settings(lora, change)
    run = wb.load_run(lora)
    # another processor's kernels sum in another order
    assert len(run.stepper(2).run().batch) == len(run.traces[2].batch)
    again = run.stepper(2, at="old_log_prob").run().batch["old_log_probs"]
    torch.testing.assert_close(again, run.traces[2].batch["old_log_probs"], rtol=1e-5, atol=1e-5)
    run = train("lora", lora, steps=3, resume="auto")
    assert [row["training/global_step"] for row in run.rows] == [1, 2, 3]
    assert read_settings(lora)["engines"]["actor"]["head"] == "auto"


def test_a_run_goes_on_after_our_texts_have_changed(lora: Path) -> None:
    def change(settings: dict[str, Any]) -> None:
        settings["sources"]["advantage"]["estimator"] += "\n    # as it was written then"
        settings["sources"]["reward"]["function"] += "\n    # as it was written then"

    change_settings(lora, change)
    assert len(train("lora", lora, steps=3, resume="auto").rows) == 3


@pytest.mark.slow
def test_another_function_in_the_place_of_ours_is_refused(lora: Path) -> None:
    def change(settings: dict[str, Any]) -> None:
        (advantage,) = (one for one in settings["pipeline"] if one["name"] == "advantage")
        place = advantage["arguments"]["estimator"]["function"]
        advantage["arguments"]["estimator"]["function"] = place.replace(":grpo", ":rloo")

    change_settings(lora, change)
    with pytest.raises(RunError, match=r"sources.advantage.estimator.*rloo.*grpo"):
        train("lora", lora, steps=3, resume="auto")


def test_a_setting_that_no_engine_has_is_refused_and_not_left_out(lora: Path) -> None:
    settings = json.loads((lora / "settings.json").read_text())
    record = {**settings["engines"]["actor"], "lora_rang": 2}
    with pytest.raises(RunError, match="'lora_rang' is not a setting of a recorded engine.*did you mean 'lora_rank'"):
        opened(record["path"], record)
    settings["engines"]["actor"] = record
    write_json(lora / "settings.json", settings)
    with pytest.raises(RunError, match="lora_rang"):
        wb.load_run(lora).engine(2)


@pytest.mark.parametrize(
    ("number", "found"),
    [(3, "3"), (5, "5"), (None, "no number"), ("4", "'4'"), (True, "True"), (4.0, "4.0")],
    ids=["older", "newer", "none", "a text", "a truth", "a float"],
)
def test_another_format_is_refused_with_what_to_do(
    ppo: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, number: Any, found: str
) -> None:
    def other(path: Path) -> Path:
        document = json.loads(path.read_text())
        document.pop("text_crc32", None)
        path.write_text(json.dumps({**document, "format": number}))
        return path.parent

    refused = (
        rf"unknown file format.* expected format 4; found {re.escape(found)}; open it with the version that wrote it"
    )
    checkpoint_3 = ppo / "checkpoints" / "step_000003"
    pinned = Path(shutil.copy(OUT / "pins.jsonl", tmp_path))
    pinned.write_text(pinned.read_text().splitlines()[0])
    cases: list[tuple[Any, Path, type[WorkbenchError]]] = [
        (checkpoint.verify, checkpoint_3 / "manifest.json", CheckpointError),
        (checkpoint.read_state, checkpoint_3 / "state.json", CheckpointError),
        (read_record, checkpoint_3 / "actor_state" / "engine.json", CheckpointError),
        (updates.read_record, ppo / "updates" / "step_000003" / "update.json", CheckpointError),
        (wb.DataProto.load, ppo / "traces" / "step_000002" / "start" / "meta.json", BatchError),
        (wb.Trace.load, ppo / "traces" / "step_000001" / "trace.json", RunError),
        (lambda folder: list(wb.rewards.pins(folder / pinned.name)), pinned, DataError),
        (wb.load_run, ppo / "settings.json", RunError),
    ]
    for read, path, error in cases:
        with pytest.raises(error, match=refused):
            read(other(path))
    assert read_kept(other(ppo / "traces" / "step_000002" / "kept.json")).due == "recorded"
    assert re.search(refused, caplog.text)


def test_a_list_of_runs_has_a_line_for_one_of_another_format(ppo: Path) -> None:
    settings = {**read_settings(ppo), "format": 3}
    write_json(ppo / "settings.json", settings)
    (state,) = wb.list_runs(ppo.parent)["state"]
    assert "expected format 4; found 3" in state
