"""Words that were renamed since a folder was written are found under their present names, and newer folders are refused.

A table of made-up renames stands for any that may come: what 0.6.0 wrote is then read as if it had been written in them, and
what was written by us is left as it is.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests_recorded import OUT, train

import workbench as wb
from workbench.base import formats
from workbench.base.errors import BatchError, CheckpointError, RunError, WorkbenchError
from workbench.replay.rebuild import opened
from workbench.runs import checkpoint, updates
from workbench.runs.folder import read_settings, step_folder, write_json
from workbench.runs.kept_traces import read_kept

ROOT = Path(__file__).parents[2]
ROWS = [
    ("stage", "advantage", "estimate"),
    ("stage", "ref_log_prob", "reference"),
    ("class", "AdaptiveKL", "FollowingKL"),
    ("setting", "lam", "lambda_"),
    ("setting", "Advantage.kl_kind", "kl_type"),
    ("setting", "advantage.kl_kind", "kl_type"),
    ("setting", "engines.lr", "learning_rate"),
    ("setting", "train.keep_traces", "traces_kept"),
    ("value", "loss_mode=vanilla", "ppo"),
    ("function", "workbench.functional.returns", "workbench.functional.estimators"),
    ("metric", "critic/score/mean", "reward/average"),
    ("column", "token_level_scores", "scores"),
    ("column", "returns", "value_targets"),
    ("fact", "heldout", "eval_rows"),
    ("fact", "epoch", "round"),
    ("symptom", "the gradient jumps", "a jump"),
]


@pytest.fixture
def renamed(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, old, new in ROWS:
        monkeypatch.setitem(formats.RENAMED[kind], old, new)


@pytest.fixture
def ppo(tmp_path: Path) -> Path:
    return Path(shutil.copytree(ROOT / OUT / "ppo", tmp_path / "ppo"))


GONE = {
    "workbench.agents.classes:placed",
    "workbench.agents.classes:read_yaml",
    "workbench.agents.interactions:checked_reply",
    "workbench.agents.loop:known_name",
    "workbench.agents.stepping:Place",
    "workbench.agents.tools.functions:normalised",
    "workbench.compat.dump_files:Records",
    "workbench.compat.dump_files:absent",
    "workbench.compat.dump_files:plain",
    "workbench.datasets.gsm8k:to_row",
    "workbench.datasets.report:has_answer",
    "workbench.rewards.base:Policy",
    "workbench.rewards.cases:calls_of",
    "workbench.rewards.pin_files:line_of",
    "workbench.rewards.pin_files:read_lines",
    "workbench.rewards.pin_files:write_lines",
    "workbench.stages.episodes:refuse_all_broken",
    "workbench.stages.stage:refuse_other_steps",
    "workbench.stages.update:seeded",
    "workbench.agents.interactions:chosen_interaction",
    "workbench.agents.protocol:AgentLoop",
    "workbench.agents.tool_agent:Standing",
    "workbench.datasets.render_worker:end_with_parent",
    "workbench.rewards.templates:bounds",
    "workbench.rewards.templates:choices",
    "workbench.rewards.score:no_truth",
    "workbench.rewards.signatures:check_arguments",
    "workbench.rewards.templates:without_thinking",
    "workbench.rewards.worker:call",
    "workbench.functional.balancing:imbalance",
    "workbench.functional.passes:expected_best",
    "workbench.rewards.worker:end_with_parent",
    "workbench.rewards.worker:limit_memory",
    "workbench.rewards.worker:read_frame",
    "workbench.rewards.worker:write_frame",
}
"""Functions and classes of 0.6.0 that have no successor: helpers that no setting of a run names."""


def test_every_public_function_of_0_6_0_is_found_at_its_present_place_or_listed_as_gone() -> None:
    places = (ROOT / OUT / "places.txt").read_text().split()
    missing = set()
    for place in places:
        module, _, name = formats.function(place).partition(":")
        with contextlib.suppress(ImportError, AttributeError):
            if getattr(importlib.import_module(module), name).__module__ == module:
                continue
        missing.add(place)
    assert len(places) > 300 and missing == GONE


def test_a_run_is_read_in_the_words_of_now(ppo: Path, renamed: None) -> None:
    settings = read_settings(ppo)
    assert settings["stages"]["estimate"]["lambda_"] == 0.95 and settings["stages"]["estimate"]["kl_type"] == "k1"
    assert settings["stages"]["update_actor"]["loss_mode"] == "ppo" and "estimate" in settings["sources"]
    assert settings["engines"]["actor"]["learning_rate"] == 1e-3 and settings["train"]["traces_kept"] == 9
    assert settings["eval_rows"] is None and "heldout" not in settings
    made = {record["name"]: record for record in settings["pipeline"]}
    estimate = made["estimate"]["arguments"]
    assert estimate["estimator"] == {"function": "workbench.functional.estimators:gae"} and estimate["lambda_"] == 0.95
    assert estimate["kl_controller"]["controller"] == "FollowingKL" and estimate["kl_type"] == "k1"
    assert made["reference"]["arguments"]["name"] == "reference"
    assert made["reference"]["arguments"]["model"]["frozen"]["learning_rate"] == 1e-3
    assert "scores" in made["reward"]["writes"] and "value_targets" in made["estimate"]["writes"]
    loss = made["update_actor"]["arguments"]["loss"]
    assert loss["settings"] == "PolicyLoss" and loss["values"]["loss_mode"] == "ppo"


def test_rows_traces_checkpoints_and_updates_are_read_in_the_words_of_now(ppo: Path, renamed: None) -> None:
    run = wb.load_run(ppo)
    assert {"reward/average", "timing_s/estimate", "timing_s/reference"} <= run.rows[-1].keys()
    assert not {"critic/score/mean", "timing_s/advantage"} & run.rows[-1].keys()
    trace = run.traces[2]
    assert (
        "estimate" in trace.names
        and "lambda_" in trace["estimate"].settings
        and "estimator" in trace["estimate"].source
    )
    assert trace["estimate"].wrote[-1] == "value_targets" and "reward/average" in trace["reward"].metrics
    batch = trace.batch
    assert batch["scores"].shape == batch["response_mask"].shape and "token_level_scores" not in batch
    assert batch.origins["value_targets"].stage == "estimate" and batch.meta_info["round"] == 0
    assert torch.equal(batch["scores"].sum(1).gt(0), batch["reward"].gt(0))
    assert list(checkpoint.read_state(step_folder(ppo / "checkpoints", 3))["controllers"]) == ["estimate"]
    update = updates.read(ppo / "updates", 3)
    assert "value_targets" in update.inputs and list(update.controllers) == ["estimate"]
    kept = read_kept(step_folder(ppo / "traces", 2))
    assert kept.before is not None and list(kept.before) == ["estimate"]


def test_a_moved_function_and_a_renamed_stage_are_made_again(ppo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a move: the record names what is no more, and a row of the table is all that is needed."""
    path = ppo / "settings.json"
    old = path.read_text().replace("workbench.functional.returns:gae", "workbench.old.place:general")
    path.write_text(old.replace('"LogProb"', '"Scoring"').replace('"AdaptiveKL"', '"KLFollower"'))
    s = wb.load_run(ppo).stepper(2, at="advantage")
    assert any("advantage" in note and "general" in note for note in s.notes)
    for kind, was, now in (
        ("function", "workbench.old.place:general", "workbench.functional.returns:gae"),
        ("class", "Scoring", "LogProb"),
        ("class", "KLFollower", "AdaptiveKL"),
    ):
        monkeypatch.setitem(formats.RENAMED[kind], was, now)
    s = wb.load_run(ppo).stepper(2, at="advantage")
    assert not any(
        "cannot be run again" in note or "recorded outputs" in note for note in s.notes if "reward" not in note
    )
    advantages = [one.batch["advantages"] for one in (s.next(), wb.load_run(ppo).traces[2])]
    torch.testing.assert_close(*advantages, atol=2e-6, rtol=0)  # recorded by a version that summed in another order


def test_a_run_goes_on_after_its_words_and_our_texts_have_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(ROOT / OUT / "grpo", tmp_path / "grpo"))
    path = folder / "settings.json"
    settings = json.loads(path.read_text())
    settings["sources"]["advantage"]["estimator"] += "\n    # as it was written then"
    settings["sources"]["reward"]["function"] += "\n    # as it was written then"
    for record in settings["engines"].values():
        record["rate"] = record.pop("lr")
    settings["train"]["traces_kept"] = settings["train"].pop("keep_traces")
    path.write_text(json.dumps(settings))
    monkeypatch.setitem(formats.RENAMED["setting"], "engines.rate", "lr")
    monkeypatch.setitem(formats.RENAMED["setting"], "train.traces_kept", "keep_traces")
    monkeypatch.setitem(formats.RENAMED["metric"], "actor/old_word", "actor/entropy")
    metrics = folder / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace("actor/entropy", "actor/old_word"))
    before = metrics.read_text()
    run = train("grpo", folder, steps=4, resume="auto")
    assert [row["training/global_step"] for row in run.rows] == [0, 1, 2, 3, 4]
    assert all("actor/entropy" in row and "actor/old_word" not in row for row in run.rows[1:])
    assert metrics.read_text().startswith(before)  # nothing is written again
    now = json.loads(path.read_text())
    assert now["format"] == formats.FORMAT and now["engines"]["actor"]["lr"] == 1e-3


def test_another_function_in_the_place_of_ours_is_refused(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(ROOT / OUT / "lora", tmp_path / "lora"))
    path = folder / "settings.json"
    path.write_text(
        path.read_text().replace("workbench.functional.advantages:grpo", "workbench.functional.advantages:rloo")
    )
    with pytest.raises(RunError, match=r"sources.advantage.estimator.*rloo.*grpo"):
        train("lora", folder, steps=3, resume="auto")


def test_a_setting_that_no_engine_has_is_refused_and_not_left_out(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(ROOT / OUT / "lora", tmp_path / "lora"))
    settings = json.loads((folder / "settings.json").read_text())
    record = {**settings["engines"]["actor"], "lora_rang": 2}
    with pytest.raises(RunError, match="'lora_rang' is not a setting of a recorded engine.*did you mean 'lora_rank'"):
        opened(record["path"], record)
    settings["engines"]["actor"] = record
    write_json(folder / "settings.json", settings)
    with pytest.raises(RunError, match="lora_rang"):
        wb.load_run(folder).engine(2)


def test_what_became_of_a_row_and_what_a_pin_has_are_read_in_the_words_of_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(formats.RENAMED["status"], "failed_model", wb.Status.NO_ANSWER.value)
    monkeypatch.setitem(formats.RENAMED["column"], "remark", "hint")
    record = wb.Score(value=0.0, status=wb.Status.NO_ANSWER).to_json()
    assert wb.Score.from_json({**record, "status": "failed_model"}).status is wb.Status.NO_ANSWER
    path = tmp_path / "pins.jsonl"
    pin = {"expected": 1.0, "note": "", "prompt": "p", "response": "r", "columns": {"remark": "x"}}
    path.write_text(json.dumps({"format": 1, **pin}) + "\n")
    assert dict(next(iter(wb.rewards.pins(path))).columns) == {"hint": "x"}
    path.write_text(json.dumps({"format": formats.FORMAT, **pin}) + "\n")
    assert dict(next(iter(wb.rewards.pins(path))).columns) == {"remark": "x"}


def test_a_newer_format_is_refused(ppo: Path, tmp_path: Path) -> None:
    def newer(path: Path) -> Path:
        document = json.loads(path.read_text())
        path.write_text(json.dumps({**document, "format": formats.FORMAT + 1}))
        return path.parent

    said = r"a format up to 4; found 5; open it with the version that wrote it"
    cases: list[tuple[Any, Path, type[WorkbenchError]]] = [
        (checkpoint.verify, ppo / "checkpoints" / "step_000003" / "manifest.json", CheckpointError),
        (checkpoint.read_state, ppo / "checkpoints" / "step_000003" / "state.json", CheckpointError),
        (lambda path: updates.read_record(path), ppo / "updates" / "step_000003" / "update.json", CheckpointError),
        (wb.DataProto.load, ppo / "traces" / "step_000002" / "start" / "meta.json", BatchError),
        (wb.Trace.load, ppo / "traces" / "step_000001" / "trace.json", RunError),
        (wb.load_run, ppo / "settings.json", RunError),
    ]
    for read, path, error in cases:
        with pytest.raises(error, match=said):
            read(newer(path))
    for number in (0, "2", True, None, 1.0):
        with pytest.raises(RunError, match="a format up to"):
            formats.older(number, "a thing", RunError)
