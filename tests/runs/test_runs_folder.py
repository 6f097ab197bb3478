"""The run folder: strict rows, torn lines, locks, what is moved aside; trackers; settings compared."""

from __future__ import annotations

import errno
import fcntl
import importlib
import json
import os
import signal
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from workbench.base.errors import RunError, SettingError
from workbench.base.metrics import reduce
from workbench.dataproto import DataProto
from workbench.replay.run import load_run
from workbench.runs.batch_metrics import devices_of, timing_metrics
from workbench.runs.folder import (
    STEP,
    RunFolder,
    held,
    prune_traces,
    read_json,
    read_metrics,
    room,
    step_folder,
    step_folders,
    write_json,
)
from workbench.runs.resume import differences
from workbench.runs.trackers import TABLE_ROWS, TRACKERS, check_trackers, progress_line, shown_samples
from workbench.stages.measures import data_metrics


def rows(folder: RunFolder, *steps: int) -> None:
    for step in steps:
        folder.append_metrics({"training/global_step": step, "x": float("nan") if step == 2 else step * 0.1})


def test_rows_are_strict_json_and_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert read_metrics(folder.metrics) == []
    rows(folder, 1, 2)
    assert folder.append_metrics({STEP: 3, "x": float("-inf"), "y": None, "z": 1.5}) == ["x"]
    with folder.metrics.open("a") as file:
        file.write('{"training/global_step": 4}')  # whole, but its newline is missing: the next row would join it
    found = read_metrics(folder.metrics)
    assert (
        [row[STEP] for row in found] == [1, 2, 3]
        and found[1]["x"] is None
        and found[2]
        == {
            STEP: 3,
            "x": None,
            "y": None,
            "z": 1.5,
        }
    )
    folder.metrics.write_text('{"a": 1}\n{broken\n{"a": 2}\n')
    with pytest.raises(RunError, match="line 2"):
        read_metrics(folder.metrics)


@pytest.mark.parametrize("torn", ['{"trai', '{"training/global_step": 1}\n{"training/gl', "\x00\x00"])
def test_a_torn_line_is_set_aside_before_the_next_row_is_written(tmp_path: Path, torn: str) -> None:
    folder = RunFolder(tmp_path)
    folder.metrics.write_text(torn)
    assert folder.supersede(1) == ["a torn metrics line"]
    rows(folder, 2)
    assert [row[STEP] for row in read_metrics(folder.metrics)] == [1, 2][torn.count("\n") == 0 :]
    assert next((tmp_path / "superseded").iterdir()).joinpath("metrics.jsonl").read_text() == torn


def test_documents_are_strict_and_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_json(path, {"a": float("nan"), "b": [1.0, float("inf"), (2, {"c": float("-inf")})], "d": Path("x")})
    assert read_json(path) == {"a": None, "b": [1.0, None, [2, {"c": None}]], "d": "x"}
    write_json(path, {"a": 1})
    assert read_json(path) == {"a": 1} and [one.name for one in tmp_path.iterdir()] == ["summary.json"]


def test_a_second_writer_is_refused_also_in_the_same_process(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with pytest.raises(RunError, match=f"is being written; found pid {os.getpid()} on .* since 20"):
        RunFolder(tmp_path)
    folder.lock.release()
    assert not (tmp_path / "lock.json").exists()
    again = RunFolder(tmp_path)
    assert again.lock.note == ""
    again.lock.release()
    again.lock.release()


@pytest.mark.slow
def test_a_removed_lock_file_lets_nobody_in(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    (tmp_path / "lock.json").unlink()
    with pytest.raises(
        RunError, match="is being written; found a process that has locked the folder; its lock.json was"
    ):
        RunFolder(tmp_path)
    assert held(tmp_path / "lock.json")
    child = os.fork()
    if not child:
        try:
            RunFolder(tmp_path)
        except RunError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    folder.lock.release()
    assert not held(tmp_path / "lock.json")
    RunFolder(tmp_path).lock.release()


def test_where_a_folder_cannot_be_locked_the_files_lock_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder on NFS: EBADF."""
    plain = fcntl.flock

    def of_files_alone(handle: Any, how: int) -> None:
        if isinstance(handle, int) and stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EBADF, "Bad file descriptor")
        plain(handle, how)

    monkeypatch.setattr(fcntl, "flock", of_files_alone)
    folder = RunFolder(tmp_path)
    assert held(tmp_path / "lock.json")
    with pytest.raises(RunError, match=f"is being written; found pid {os.getpid()}"):
        RunFolder(tmp_path)
    folder.lock.release()
    assert not held(tmp_path / "lock.json")


def test_a_row_that_was_edited_is_named_with_its_step(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for step in range(3):
        folder.append_metrics({STEP: step, "loss": step / 7})
    folder.lock.release()
    assert read_metrics(folder.metrics)[2] == {STEP: 2, "loss": 2 / 7}
    text = folder.metrics.read_text()
    folder.metrics.write_text(text.replace('"loss": 0.14', '"loss": 0.15'))
    with pytest.raises(
        RunError, match=r"metrics.jsonl line 2 \(step 1\) has changed.*expected crc32 \d+; found crc32 \d+"
    ):
        read_metrics(folder.metrics)
    folder.metrics.write_text(text.replace(text.splitlines()[1], json.dumps({STEP: 1, "loss": 5})))
    assert (
        read_metrics(folder.metrics)[1]["loss"] == 5
    )  # by hand, with the checksum taken out; as older versions wrote it


@pytest.mark.parametrize(
    ("left", "note"),
    [('{"pid": 7, "host": "elsewhere", "started": "yesterday"}', "pid 7 on elsewhere since yesterday"), ("{", "pid ?")],
)
def test_a_lock_whose_holder_died_is_taken_and_explained(tmp_path: Path, left: str, note: str) -> None:
    (tmp_path / "lock.json").write_text(left)
    folder = RunFolder(tmp_path)
    assert folder.lock.note.startswith(f"took over the lock of {note}") and "no longer runs" in folder.lock.note
    assert json.loads((tmp_path / "lock.json").read_text())["pid"] == os.getpid()
    folder.lock.release()


@pytest.mark.slow
def test_a_killed_holder_lets_go(tmp_path: Path) -> None:
    child = os.fork()
    if not child:
        RunFolder(tmp_path)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    folder = RunFolder(tmp_path)
    assert folder.lock.note.startswith(f"took over the lock of pid {child} on ")
    folder.lock.release()


def test_what_is_past_the_checkpoint_is_moved_not_lost(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    rows(folder, 0, 1, 2, 3)
    for step in (1, 3):
        step_folder(folder.traces, step).mkdir(parents=True)
        (step_folder(folder.traces, step) / "trace.json").write_text("{}")
    (step_folder(folder.traces, 1) / "trace.json").write_text("{}")
    step_folder(folder.traces, 0).mkdir()  # cut off while it was written
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "summary.json").write_text("{}")
    (folder.checkpoints / "step_000002").mkdir(parents=True)
    folder.val.mkdir()
    for name in ("step_000001.parquet", "step_000003.parquet", ".step_000003.parquet.part"):
        (folder.val / name).touch()
    notes = folder.supersede(1)
    assert [row[STEP] for row in read_metrics(folder.metrics)] == [0, 1]
    aside = tmp_path / "superseded" / "001-after-1"
    assert [row[STEP] for row in read_metrics(aside / "metrics.jsonl")] == [0, 1, 2, 3]
    moved = ["traces/step_000000", "traces/step_000003", "checkpoints/step_000002", "val/step_000003.parquet"]
    moved += ["tensorboard", "summary.json"]
    assert notes == ["2 metrics rows", *moved]
    assert all((aside / name).exists() and not (tmp_path / name).exists() for name in moved)
    assert step_folder(folder.traces, 1).exists()
    assert [path.name for path in folder.val.iterdir()] == ["step_000001.parquet"]
    assert folder.supersede(1) == [] and len(list((tmp_path / "superseded").iterdir())) == 1


@pytest.mark.parametrize("at", range(1, 5))
def test_moving_aside_that_was_cut_off_is_finished_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    folder = RunFolder(tmp_path)
    rows(folder, 0, 1, 2, 3)
    for step in (2, 3):
        step_folder(folder.traces, step).mkdir(parents=True)
    (tmp_path / "tensorboard").mkdir()
    calls, real = [], {name: getattr(os, name) for name in ("rename", "replace")}

    def dying(name: str) -> Any:
        def move(*args: Any) -> Any:
            calls.append(name)
            if len(calls) == at:
                raise KeyboardInterrupt
            return real[name](*args)

        return move

    for name in real:
        monkeypatch.setattr(os, name, dying(name))
    with pytest.raises(KeyboardInterrupt):
        folder.supersede(1)
    for name in real:
        monkeypatch.setattr(os, name, real[name])
    folder.supersede(1)
    assert [row[STEP] for row in read_metrics(folder.metrics)] == [0, 1]
    assert not list(folder.traces.iterdir()) and not (tmp_path / "tensorboard").exists()
    assert len(list((tmp_path / "superseded").glob("*/traces/*"))) == 2
    assert len(list((tmp_path / "superseded").glob("*/tensorboard"))) == 1


def test_only_the_last_traces_are_kept_each_whole(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for step in (1, 2, 10):
        step_folder(folder.traces, step).mkdir(parents=True)
    (folder.traces / "notes").mkdir()
    prune_traces(folder.traces, 2)
    assert sorted(path.name for path in folder.traces.iterdir()) == ["notes", "step_000002", "step_000010"]
    assert list(step_folders(folder.traces)) == [2, 10]


def test_tensorboard_gets_what_is_finite_and_unknown_names_are_refused(tmp_path: Path) -> None:
    tracker = TRACKERS["tensorboard"](tmp_path, "p", "e")
    tracker.log({"a": 1.0, "b": float("nan")}, 1)
    tracker.table(SAMPLES, 1)  # it has no tables
    tracker.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["a"] and events.Scalars("a")[0].value == 1.0
    with pytest.raises(SettingError, match="did you mean 'wandb'"):
        check_trackers(["wandbb"])
    with pytest.raises(SettingError, match=r"trackers=\['console'\]"):
        check_trackers("console")
    check_trackers(["console", "jsonl", "tensorboard"])


SAMPLES: dict[str, list[Any]] = {"prompt": ["2 + 2?"], "response": ["4"], "score": [None]}
STANDIN = """
calls = []
def init(**given):
    calls.append(("init", given))
    return Run()
class Table:
    def __init__(self, columns, data):
        self.columns, self.data = columns, data
class Run:
    def log(self, metrics, step):
        calls.append((step, metrics))
    def finish(self):
        calls.append("finish")
class Info:
    run_id, experiment_id = "r1", "e1"
class MlflowClient:
    def create_run(self, experiment_id, run_name):
        calls.append(("init", {"name": run_name}))
        self.info = Info
        return self
    def set_terminated(self, run_id):
        calls.append("finish")
def set_experiment(name):
    calls.append(("project", name))
    return Info
def log_metrics(metrics, step, run_id):
    calls.append((step, metrics))
def log_table(data, artifact_file, run_id):
    calls.append((artifact_file, data))
"""


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_other_trackers_through_the_same_protocol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Neither is a dependency: a stand-in with the calls that ours makes."""
    (tmp_path / f"{name}.py").write_text(STANDIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, name, raising=False)
    check_trackers([name])
    tracker = TRACKERS[name](tmp_path / "my-run", "math", "first")
    tracker.log({"val-core/a,b/reward/mean@1": 0.5}, 3)
    tracker.table(SAMPLES, 3)
    tracker.close()
    calls = importlib.import_module(name).calls
    monkeypatch.delitem(sys.modules, name)
    if name == "mlflow":
        assert calls[:2] == [("project", "math"), ("init", {"name": "first"})]
        assert calls[2:] == [
            (3, {"val-core/a_b/reward/mean_at_1": 0.5}), ("val/step_000003.json", SAMPLES), "finish",
        ]  # fmt: skip
        return
    assert calls[0][1] | {"dir": None} == {
        "project": "math", "name": "first", "dir": None, "reinit": "finish_previous",
    }  # fmt: skip
    sent = calls[2][1]["val/samples"]
    assert calls[1] == (3, {"val-core/a,b/reward/mean@1": 0.5}) and calls[2][0] == 3 and calls[3] == "finish"
    assert sent.columns == list(SAMPLES) and sent.data == [["2 + 2?", "4", None]]


def test_the_console_gets_a_line_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tracker = TRACKERS["console"](tmp_path, "math", "first")
    tracker.log({STEP: 3, "reward/mean": 0.5, "actor/lr": 1e-6}, 3)
    assert capsys.readouterr().out == "first step:3 - reward/mean:0.5 - actor/lr:1e-06\n"


def test_trackers_get_the_first_samples_with_the_prompt_as_text() -> None:
    chats = [[{"role": "system", "content": "Be short."}, {"role": "user", "content": f"{n}?"}] for n in range(100)]
    found = shown_samples({"prompt": chats, "response": ["x"] * 100, "score": [1.0] * 100, "reward_model": [{}] * 100})
    assert list(found) == ["prompt", "response", "score"] and found["prompt"][:2] == ["0?", "1?"]
    assert {len(cells) for cells in found.values()} == {TABLE_ROWS}


def test_a_tracker_that_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SettingError, match="'wandb' is not installed; pip install wandb"):
        check_trackers(["wandb"])


def test_batch_metrics_by_hand() -> None:
    """Three rows: tool text between the model's tokens, nothing, and three tokens; the first two fill their prompts."""
    own = torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 1]])
    there = torch.tensor([[1, 1, 1], [0, 0, 0], [1, 1, 1]])
    prompts = torch.tensor([[1, 1], [1, 1], [0, 1]])
    batch = DataProto(
        {"response_mask": own, "prompt_mask": prompts, "attention_mask": torch.cat([prompts, there], 1)},
        {"num_turns": [4, 1, 2], "num_tool_calls": [2, 0, 0]},
        {"max_prompt_length": 2, "max_response_length": 3},
    )
    assert reduce([data_metrics(batch)]) == {
        "response/aborted_ratio": pytest.approx(1 / 3),
        **{"response_length/mean": 2.0, "response_length/max": 3.0, "response_length/min": 0.0},
        "response_length/clip_ratio": pytest.approx(2 / 3),
        **{f"response_length_non_aborted/{name}": 3.0 for name in ("mean", "max", "min")},
        "response_length_non_aborted/clip_ratio": 1.0,
        **{"prompt_length/mean": pytest.approx(5 / 3), "prompt_length/max": 2.0, "prompt_length/min": 1.0},
        "prompt_length/clip_ratio": pytest.approx(2 / 3),
        **{"num_turns/mean": pytest.approx(7 / 3), "num_turns/max": 4.0, "num_turns/min": 1.0},
        **{"tool_call_counts/mean": pytest.approx(2 / 3), "tool_call_counts/max": 2.0, "tool_call_counts/min": 0.0},
        **{"model_tokens/mean": pytest.approx(5 / 3), "model_tokens/max": 3.0, "model_tokens/min": 0.0},
    }
    seconds = {"timing_s/step": 2.0, "timing_s/rollout": 1.0, "timing_s/update_actor": 0.5, "timing_s/reward": 0.1}
    found = timing_metrics(seconds, batch, devices=4)
    assert 0.05 < found.pop("perf/max_rss_gb") < 100
    assert found == {
        "timing_s/gen": 1.0,
        "timing_per_token_ms/gen": pytest.approx(1000 / 6),  # 1 s over 6 response tokens, tool text included
        "timing_per_token_ms/update_actor": pytest.approx(500 / 11),  # 0.5 s over 11 tokens in all
        "perf/total_num_tokens": 11.0,
        "perf/time_per_step": 2.0,
        "perf/throughput": pytest.approx(11 / 2 / 4),  # tokens per second and device
    }
    bare = DataProto({"x": own})
    assert data_metrics(bare) == {} and timing_metrics(seconds, bare) == {"timing_s/gen": 1.0}


def test_devices_are_those_of_the_learner_and_of_samplers_that_have_their_own() -> None:
    class Engine:
        share_device = False

        def __init__(self, **record: Any) -> None:
            self.record = record

        def describe(self) -> dict[str, Any]:
            return self.record

    sampler = {"tensor_parallel_size": 2, "replicas": 3}
    assert devices_of([object()]) == 1 and devices_of([Engine(ranks=4), Engine(ranks=4)]) == 4
    apart = Engine(ranks=4, sampler=sampler)
    assert devices_of([apart, Engine(ranks=4)]) == 10
    apart.share_device = True
    assert devices_of([apart]) == 4


def test_settings_are_compared_by_name() -> None:
    assert differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}, "d": 4}) == ["a.c: 2 → 3", "d: None → 4"]


def test_of_texts_the_first_other_line_is_shown() -> None:
    old, new = "def f():\n    return 1\n", "def f():\n    return 2\n"
    assert differences({"f": old}, {"f": new}) == ["f: return 1 → return 2"]
    assert differences({"f": old}, {"f": old + "    # more\n"}) == ["f:  → # more"]


def test_no_run_there(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"settings\.json"):
        load_run(tmp_path)


def test_progress_lines() -> None:
    row = {"training/global_step": 3, "critic/score/mean": 0.5, "actor/kl_loss": 0.002, "timing_s/step": 1.26}
    assert progress_line(row, 10, 62) == "step 3/10  reward 0.500  kl 0.00200  1.3 s  eta 01:02"
    assert progress_line(row, 3, 0) == "step 3/3  reward 0.500  kl 0.00200  1.3 s", "nothing is left to wait for"
    validated = {"training/global_step": 0, "critic/score/mean": None, "val/reward": 0.25, "val/greedy": 0.5}
    assert progress_line(validated, 10, 0) == "step 0/10  held-out 0.250 (greedy 0.500)"


def test_only_failures_of_the_folder_and_of_the_machine_are_said_as_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "r"
    raised = {
        "cannot open more files.*ulimit -n": OSError(errno.EMFILE, "Too many open files", "data/model"),
        "the disk of run .* is full.*free disk": RuntimeError("SafetensorError: No space left on device (os error 28)"),
        "metrics.jsonl failed.*repair the folder": OSError(
            errno.EROFS, "Read-only file system", str(run / "metrics.jsonl")
        ),
    }
    for match, error in raised.items():
        with pytest.raises(RunError, match=f"(?s){match}.*resume='auto'") as caught, room(run):
            raise error
        assert caught.value.__cause__ is error and "workbench train" not in str(caught.value)
    monkeypatch.setenv("WORKBENCH_JOB", "1")
    with pytest.raises(RunError, match="workbench train --resume"), room(run):
        raise OSError(errno.EMFILE, "Too many open files")
    for other in (PermissionError(errno.EACCES, "Permission denied", "elsewhere/rows.parquet"), KeyError("x")):
        with pytest.raises(type(other)), room(run):
            raise other
