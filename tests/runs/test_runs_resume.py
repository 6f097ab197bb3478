"""Going on, or refusing to: what a checkpoint must hold, settings that changed, weights that moved on."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import workbench as wb
from workbench.base.errors import CheckpointError, EngineError, RunError
from workbench.engines import LocalEngine
from workbench.runs import checkpoint
from workbench.runs.updates import kept_until
from workbench.stages import Advantage

PLAN: dict[str, Any] = {"batch_size": 4, "trackers": ()}
KEYS = ("actor/pg_loss", "actor/grad_norm", "critic/vf_loss", "critic/score/mean", "actor/reward_kl_penalty_coeff")


def drawing(response: str) -> float:
    """A reward that draws from all three generators."""
    return len(response) % 3 + random.random() + float(np.random.rand()) + torch.rand(1).item()


def make(tiny: str, reward: Any = None, **settings: Any) -> tuple[Any, wb.datasets.Rows]:
    options = {"lr": 1e-3, "schedule": "cosine", "total_steps": 8, "device": "cpu"}
    engine = wb.engines.local(tiny, **{**options, **settings})
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256, limit=12)
    reward = reward or wb.rewards.Reward(drawing, in_process=True)
    pipe = wb.recipes.ppo(
        engine, reward, group_size=2, max_tokens=8, kl_coef=0.1, kl_target=0.01, kl_horizon=20, critic_lr=1e-3
    )
    return pipe, rows


def seeded() -> None:
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)


@pytest.fixture(scope="module")
def whole(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A run of two steps, to go on from, and the rows of four steps that were never interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    seeded()
    pipe, rows = make(tiny)
    quiet = wb.train_blocking(pipe, rows, steps=4, run=folder / "quiet", **PLAN)
    seeded()
    pipe, rows = make(tiny)
    wb.train_blocking(pipe, rows, steps=2, run=folder / "half", **PLAN)
    return folder / "half", quiet.rows


def gone_on(tiny: str, half: Path, run: Path) -> list[list[float]]:
    shutil.copytree(half, run)
    pipe, rows = make(tiny)
    resumed = wb.train_blocking(pipe, rows, steps=4, run=run, resume="auto", **PLAN)
    return numbers(resumed.rows)


def numbers(rows: list[dict[str, Any]]) -> list[list[float]]:
    return [[row[key] for key in KEYS] for row in rows[-2:]]


@pytest.mark.slow
@pytest.mark.long
def test_with_everything_it_is_exact(tiny: str, whole: Any, tmp_path: Path) -> None:
    assert gone_on(tiny, whole[0], tmp_path / "r") == numbers(whole[1])


def killed_before_a_checkpoint(half: Path, run: Path) -> Path:
    """A copy of a run as a kill after its last update leaves it, before its first checkpoint."""
    shutil.copytree(half, run)
    shutil.rmtree(run / "checkpoints")
    (run / "summary.json").unlink()
    return run


@pytest.mark.slow
def test_without_a_checkpoint_it_goes_on_after_the_recorded_updates_exactly(
    tiny: str, whole: Any, tmp_path: Path
) -> None:
    run = killed_before_a_checkpoint(whole[0], tmp_path / "r")
    shutil.copytree(run, damaged := tmp_path / "damaged")
    assert "after step 1, whose" in kept_until(run) and "resume: " in repr(wb.load_run(run))
    pipe, rows = make(tiny)
    resumed = wb.train_blocking(pipe, rows, steps=4, run=run, resume="auto", **PLAN)
    assert numbers(resumed.rows) == numbers(whole[1]) and len(resumed.rows) == 4
    assert any("resumed after step 2" in note for note in resumed.notes)
    (damaged / "updates" / "step_000002" / "update.json").write_text("{}")
    pipe, rows = make(tiny)
    resumed = wb.train_blocking(pipe, rows, steps=3, run=damaged, resume="auto", **PLAN)
    assert [row["training/global_step"] for row in resumed.rows] == [1, 2, 3]
    assert any(note.startswith("refused") for note in resumed.notes) and "after step 1" in " ".join(resumed.notes)
    shutil.rmtree(damaged / "updates")
    assert "at step 0 again: no checkpoint (save_freq=" in kept_until(
        killed_before_a_checkpoint(damaged, tmp_path / "none")
    )


def forget_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = LocalEngine.load_state

    def loading(self: Any, model: Path, state: Path) -> None:
        plain(self, model, state)
        self._optimizer = None

    monkeypatch.setattr(LocalEngine, "load_state", loading)


def forget_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = LocalEngine.load_state

    def loading(self: Any, model: Path, state: Path) -> None:
        weights = {name: tensor.clone() for name, tensor in self._weights().items()}
        plain(self, model, state)
        for name, tensor in self._weights().items():
            tensor.data.copy_(weights[name])

    monkeypatch.setattr(LocalEngine, "load_state", loading)


def forget_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Advantage, "load_state", lambda self, state: None)


def forget_generator(name: str) -> Any:
    def forget(monkeypatch: pytest.MonkeyPatch) -> None:
        plain = checkpoint.restore_rng
        fresh = checkpoint.rng_state()
        monkeypatch.setattr(checkpoint, "restore_rng", lambda state, **dry: plain({**state, name: fresh[name]}, **dry))

    return forget


@pytest.mark.slow
@pytest.mark.parametrize(
    "forget",
    [
        pytest.param(forget_optimizer, id="optimizer"),
        pytest.param(forget_controller, id="controller"),
        pytest.param(forget_generator("torch"), id="torch"),
        pytest.param(forget_weights, id="weights", marks=pytest.mark.long),
        pytest.param(forget_generator("python"), id="python", marks=pytest.mark.long),
        pytest.param(forget_generator("numpy"), id="numpy", marks=pytest.mark.long),
    ],
)
def test_each_part_of_the_state_matters(
    tiny: str, whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forget: Any
) -> None:
    forget(monkeypatch)
    assert gone_on(tiny, whole[0], tmp_path / "r") != numbers(whole[1])


def reseal(path: Path) -> None:
    """Write the manifest again over what is there: a checkpoint that is whole, and lacks something."""
    (path / "manifest.json").unlink()
    checkpoint._commit(path, int(path.name[-6:]), None)


def lose(part: str) -> Any:
    def losing(path: Path) -> None:
        state = json.loads((path / "state.json").read_text())
        del state[part]
        (path / "state.json").write_text(json.dumps(state))

    return losing


def lose_inside(*keys: str) -> Any:
    """Delete a nested key of state.json."""

    def losing(path: Path) -> None:
        state = json.loads((path / "state.json").read_text())
        inner = state
        for key in keys[:-1]:
            inner = inner[key]
        del inner[keys[-1]]
        (path / "state.json").write_text(json.dumps(state))

    return losing


def lose_tensor(path: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = path / "critic_state" / "optimizer.safetensors"
    tensors = load_file(file)
    del tensors[next(name for name in tensors if name.endswith("|exp_avg"))]
    save_file(tensors, file)


def cut_tensor(path: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = path / "critic_state" / "optimizer.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("|exp_avg"))
    save_file(tensors | {name: tensors[name][:1].clone()}, file)


def lose_from_record(path: Path) -> None:
    file = path / "actor_state" / "engine.json"
    record = json.loads(file.read_text())
    file.write_text(json.dumps({key: one for key, one in record.items() if key != "steps"}))


def lose_controller(path: Path) -> None:
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps({**state, "controllers": {}}))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lose("cursor"), "lacks cursor"),
        (lose("controllers"), "lacks controllers"),
        (lose("rng"), "lacks rng"),
        (lose("versions"), "lacks versions"),
        (lose("step"), "lacks step"),
        (lose_inside("rng", "numpy"), "random generators.*numpy"),
        (lose_inside("versions", "critic"), "lacks the version of critic"),
        (lose_inside("controllers", "advantage", "value"), "lacks value of advantage"),
        (lose_from_record, "engine.json.*'steps'"),
        (lose_tensor, r"optimizer state .*expected the \d+ tensors that were written; found \d+"),
        (cut_tensor, r"optimizer state of .*exp_avg of shape"),
        (lambda path: (path / "critic" / "value_head.safetensors").unlink(), "value_head.safetensors.*no such file"),
        (lose_controller, "lacks the controller of advantage"),
        (lambda path: shutil.rmtree(path / "critic"), "lacks critic"),
        (lambda path: (path / "actor_state" / "optimizer.safetensors").unlink(), "no optimizer state"),
    ],
)
def test_a_checkpoint_that_lacks_something_is_refused(
    tiny: str, whole: Any, tmp_path: Path, damage: Any, match: str
) -> None:
    run = tmp_path / "r"
    shutil.copytree(whole[0], run)
    path = run / "checkpoints" / "step_000002"
    damage(path)
    reseal(path)
    before = (run / "metrics.jsonl").read_text()
    pipe, rows = make(tiny)
    with pytest.raises((CheckpointError, EngineError), match=match):
        wb.train_blocking(pipe, rows, steps=4, run=run, resume="auto", **PLAN)
    assert (run / "metrics.jsonl").read_text() == before and not (run / "superseded").exists()


@pytest.mark.slow
def test_damaged_checkpoints_alone_are_no_reason_to_start_over(tiny: str, whole: Any, tmp_path: Path) -> None:
    run = tmp_path / "r"
    shutil.copytree(whole[0], run)
    (run / "checkpoints" / "step_000002" / "state.json").write_text("{}")
    pipe, rows = make(tiny)
    with pytest.raises(CheckpointError, match=r"starting over would lose the run.*state\.json.*move the folder"):
        wb.train_blocking(pipe, rows, steps=4, run=run, resume="auto", **PLAN)
    shutil.rmtree(run / "checkpoints")
    pipe, rows = make(tiny)
    with pytest.raises(
        RunError, match=r"no checkpoint, and starting over would lose the run.*checkpoints of steps \[2\]"
    ):
        wb.train_blocking(pipe, rows, steps=4, run=run, resume="auto", **PLAN)
    assert len(wb.load_run(run).rows) == 2 and not (run / "superseded").exists()
    (run / "summary.json").unlink()  # as one that was killed before its first checkpoint
    again = wb.train_blocking(pipe, rows, steps=1, run=run, resume="auto", **PLAN)
    assert again.rows[-1]["training/global_step"] == 1
    assert any("2 metrics rows" in note for note in again.notes)


# --- settings ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_changes_are_refused_by_name_unless_allowed_and_then_recorded(tiny: str, whole: Any, tmp_path: Path) -> None:
    run = tmp_path / "r"
    shutil.copytree(whole[0], run)
    name = "engines.actor.micro_batch_tokens"
    pipe, rows = make(tiny, micro_batch_tokens=512)
    with pytest.raises(RunError, match=rf"{name}: None → 512.*allow_changes=\['engines\.critic\..*', '{name}'\]"):
        wb.train_blocking(pipe, rows, steps=3, run=run, resume="auto", **PLAN)
    changes = {"allow_changes": [name, "engines.critic"], "trace_freq": 1, **PLAN}
    resumed = wb.train_blocking(pipe, rows, steps=3, run=run, resume="auto", **changes)
    history = resumed.settings["history"]
    assert [entry["from_step"] for entry in history] == [1, 3] and history[0]["changes"] == []
    assert f"{name}: None → 512" in history[1]["changes"] and "train.trace_freq: 10 → 1" in history[1]["changes"]
    assert history[1]["code"] and history[1]["versions"]["torch"]


def test_other_data_is_refused(tiny: str, whole: Any, tmp_path: Path) -> None:
    run = tmp_path / "r"
    shutil.copytree(whole[0], run)
    pipe, rows = make(tiny)
    with pytest.raises(RunError, match="data_hash"):
        wb.train_blocking(pipe, rows[:8], steps=4, run=run, resume="auto", **PLAN)
    with pytest.raises(RunError, match="eval_rows: None → "):
        wb.train_blocking(pipe, rows, eval_rows=rows[:2], steps=4, run=run, resume="auto", **PLAN)


def test_a_reward_whose_text_changed_is_refused_by_its_first_other_line(tiny: str, whole: Any, tmp_path: Path) -> None:
    def drawing(response: str) -> float:
        """A reward that draws from all three generators."""
        return 7.0

    run = tmp_path / "r"
    shutil.copytree(whole[0], run)
    pipe, rows = make(tiny, wb.rewards.Reward(drawing, in_process=True))
    with pytest.raises(RunError, match="sources.reward"):
        wb.train_blocking(pipe, rows, steps=4, run=run, resume="auto", **PLAN)


@pytest.mark.slow
def test_a_model_made_anew_is_refused_and_one_that_only_moved_is_not(tiny: str, tmp_path: Path) -> None:
    model = Path(shutil.copytree(tiny, tmp_path / "model"))
    pipe, rows = make(str(model))
    wb.train_blocking(pipe, rows, steps=1, run=tmp_path / "r", **PLAN)
    moved = model.rename(tmp_path / "elsewhere")
    pipe, rows = make(str(moved))
    wb.train_blocking(pipe, rows, steps=2, run=tmp_path / "r", resume="auto", **PLAN)
    config = json.loads((moved / "config.json").read_text())
    (moved / "config.json").write_text(json.dumps({**config, "made": "anew"}))
    pipe, rows = make(str(moved))
    with pytest.raises(RunError, match=r"engines\.actor\.files_crc32"):
        wb.train_blocking(pipe, rows, steps=3, run=tmp_path / "r", resume="auto", **PLAN)


# --- weights that have moved on ---------------------------------------------------------------------


class Breaks:
    """Raises after a step, once."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_start(self, start: int, steps: int) -> None: ...

    def on_step(self, report: Any) -> None:
        if report.step == self._step:
            raise KeyboardInterrupt

    def on_end(self, error: BaseException | None) -> None: ...


@pytest.mark.slow
def test_an_interrupted_cell_run_again_goes_on_exactly_or_says_why_not(tiny: str, whole: Any, tmp_path: Path) -> None:
    run = tmp_path / "r"
    seeded()
    pipe, rows = make(tiny)
    with pytest.raises(KeyboardInterrupt):
        wb.train_blocking(pipe, rows, steps=4, run=run, observers=[Breaks(1)], **PLAN)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["stopped"].startswith("interrupted after step 1; checkpoint 1") and summary["steps"] == 1
    # where there is no checkpoint the engine has moved: it cannot be what the run began with
    shutil.rmtree(run / "checkpoints")
    (run / "summary.json").unlink()
    with pytest.raises(RunError, match="began with weights.*actor: updated since.*load the model again"):
        wb.train_blocking(pipe, rows, steps=4, run=run, resume="auto", **PLAN)
    seeded()
    pipe, rows = make(tiny)
    with pytest.raises(KeyboardInterrupt):
        wb.train_blocking(pipe, rows, steps=4, save_freq=2, run=run, resume="auto", observers=[Breaks(3)], **PLAN)
    # with a checkpoint the same pipeline goes on; one built anew would take its reference from moved weights
    engine = pipe.learners()["actor"]
    anew = wb.recipes.ppo(
        engine,
        wb.rewards.Reward(drawing, in_process=True),
        group_size=2,
        max_tokens=8,
        kl_coef=0.1,
        kl_target=0.01,
        kl_horizon=20,
        critic_lr=1e-3,
    )
    with pytest.raises(RunError, match="actor: 0 → "):
        wb.train_blocking(anew, rows, steps=4, run=run, resume="auto", **PLAN)
    resumed = wb.train_blocking(pipe, rows, steps=4, run=run, resume="auto", **PLAN)
    assert numbers(resumed.rows) == numbers(whole[1])


@pytest.mark.slow
def test_nothing_to_do_changes_nothing_but_brings_back_a_lost_summary(tiny: str, whole: Any, tmp_path: Path) -> None:
    run = tmp_path / "r"
    shutil.copytree(whole[0], run)
    summary = dict(wb.load_run(run).summary)
    for name in ("summary.json", "curves.png"):
        (run / name).unlink()
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    pipe, rows = make(tiny)
    for steps in (2, 1):
        same = wb.train_blocking(pipe, rows, steps=steps, run=run, resume="auto", **PLAN)
        assert same.notes == (f"nothing left to do: 2 of {steps} steps are done",)
    after = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert before.items() <= after.items() and len(after) == len(before) + 2
    again = dict(wb.load_run(run).summary)
    assert {**again, "paths": None} == {**summary, "paths": None} and again["paths"]["curves"] == str(
        run / "curves.png"
    )
    assert pipe.learners()["actor"].version == 2  # and the weights are the run's


@pytest.mark.slow
def test_moments_of_fewer_parameters_are_refused(tiny: str, whole: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    run = tmp_path / "r"
    shutil.copytree(whole[0], run)
    path = run / "checkpoints" / "step_000002"
    file = str(path / "actor_state" / "optimizer.safetensors")
    tensors = load_file(file)
    gone = next(iter(tensors)).partition("|")[0]
    for kept in ({name: one for name, one in tensors.items() if not name.startswith(f"{gone}|")}, {}):
        save_file(kept, file)
        reseal(path)
        pipe, rows = make(tiny)
        with pytest.raises(CheckpointError, match=rf"expected the {len(tensors)} tensors .*; found {len(kept)}"):
            wb.train_blocking(pipe, rows, steps=4, run=run, resume="auto", **PLAN)
