"""The run folder: strict rows, torn lines, locks, what is moved aside; trackers; settings compared."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from workbench.errors import RunError, SettingError
from workbench.runs.folder import RunFolder, read_metrics
from workbench.runs.recorder import progress_line
from workbench.runs.resume import differences
from workbench.runs.run import load_run
from workbench.runs.trackers import make_trackers


def rows(folder: RunFolder, *steps: int) -> None:
    for step in steps:
        folder.append_metrics({"training/global_step": step, "x": float("nan") if step == 2 else step * 0.1})


def test_rows_are_strict_json_and_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    rows(folder, 1, 2)
    with folder.metrics.open("a") as file:
        file.write('{"training/global_step": 3, "x"')
    found = read_metrics(folder.metrics)
    assert [row["training/global_step"] for row in found] == [1, 2] and found[1]["x"] is None
    folder.metrics.write_text('{"a": 1}\n{broken\n{"a": 2}\n')
    with pytest.raises(RunError, match="line 2"):
        read_metrics(folder.metrics)


def test_a_second_writer_is_refused_also_in_the_same_process(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with pytest.raises(RunError, match=f"is being written; found pid {os.getpid()} on .* since 20"):
        RunFolder(tmp_path)
    folder.release()
    assert not (tmp_path / "lock.json").exists()
    again = RunFolder(tmp_path)
    assert again.lock.note == ""
    again.release()
    again.release()


@pytest.mark.parametrize(
    ("left", "note"),
    [('{"pid": 7, "host": "elsewhere", "started": "yesterday"}', "pid 7 on elsewhere since yesterday"), ("{", "pid ?")],
)
def test_a_lock_whose_holder_died_is_taken_and_explained(tmp_path: Path, left: str, note: str) -> None:
    (tmp_path / "lock.json").write_text(left)
    folder = RunFolder(tmp_path)
    assert folder.lock.note.startswith(f"took over the lock of {note}") and "no longer runs" in folder.lock.note
    assert json.loads((tmp_path / "lock.json").read_text())["pid"] == os.getpid()
    folder.release()


def test_what_is_past_the_checkpoint_is_moved_not_lost(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    rows(folder, 0, 1, 2, 3)
    for step in (1, 3):
        folder.trace_path(step).mkdir(parents=True)
        (folder.trace_path(step) / "trace.json").write_text("{}")
    (tmp_path / "tensorboard").mkdir()
    notes = folder.supersede(1)
    assert [row["training/global_step"] for row in read_metrics(folder.metrics)] == [0, 1]
    aside = next((tmp_path / "superseded").iterdir())
    assert [row["training/global_step"] for row in read_metrics(aside / "metrics.jsonl")] == [0, 1, 2, 3]
    assert (aside / "traces" / "step_000003").exists() and folder.trace_path(1).exists()
    assert (aside / "tensorboard").exists() and any("2 metrics rows" in note for note in notes)
    assert folder.supersede(1) == []


def test_trackers_by_name(tmp_path: Path) -> None:
    tracker = make_trackers(["tensorboard"], tmp_path)[0]
    tracker.log({"a": 1.0, "b": float("nan")}, 1)
    tracker.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["a"] and events.Scalars("a")[0].value == 1.0
    with pytest.raises(SettingError, match="did you mean 'wandb'"):
        make_trackers(["wandbb"], tmp_path)


def test_settings_are_compared_by_name() -> None:
    assert differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}, "d": 4}) == ["a.c: 2 → 3", "d: None → 4"]


def test_no_run_there(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"settings\.json"):
        load_run(tmp_path)


def test_progress_lines() -> None:
    row = {"training/global_step": 3, "critic/score/mean": 0.5, "actor/kl_loss": 0.002, "timing_s/step": 1.26}
    assert progress_line(row, 10, 62) == "step 3/10  reward 0.500  kl 0.00200  1.3 s  eta 01:02"
