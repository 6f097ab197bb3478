"""Rows A and C of the scorecard: checkpoints, resume, jobs; each test injects its fault. The names say which row."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support import warm_starts
from support.patience import LONG, within

import workbench as wb
from workbench.base.errors import CheckpointError, NonFinite, PipelineError, RunError, VersionMismatch
from workbench.base.files import FORMAT
from workbench.runs import checkpoint
from workbench.runs.folder import room

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PLAN: dict[str, Any] = {"batch_size": 4, "trackers": ()}


def make(tiny: str, reward: Any = None, rows: int = 12, **settings: Any) -> tuple[wb.Pipeline, wb.datasets.Rows]:
    engine = wb.engines.local(tiny, lr=1e-3, device="cpu")
    data = wb.rows("data/arith/train.parquet", max_prompt_length=256, limit=rows)
    return wb.recipes.grpo(engine, reward, group_size=2, max_tokens=8, **settings), data


def weights(pipe: wb.Pipeline) -> dict[str, torch.Tensor]:
    return pipe.learners()["actor"].snapshot()["weights"]


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def numbers(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    skip = ("timing_", "perf/")
    return [{key: value for key, value in row.items() if not key.startswith(skip)} for row in rows]


# --- A: checkpoints and resume --------------------------------------------------------------------


def files_of_a_checkpoint(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("damage", ["flip", "truncate", pytest.param("delete", marks=pytest.mark.long)])
def test_A3_A4_damage_to_any_file_of_the_newest_is_named_and_the_one_before_is_taken(
    tiny: str, tmp_path: Path, damage: str
) -> None:
    pipe, rows = make(tiny)
    run = wb.train_blocking(pipe, rows, steps=2, run=tmp_path / "r", save_freq=1, **PLAN)
    newest = run.checkpoint(2)
    for path in files_of_a_checkpoint(newest):
        content = path.read_bytes()
        if damage == "delete":
            path.unlink()
        elif damage == "truncate":
            path.write_bytes(content[: len(content) // 2])
        else:
            position = random.Random(path.name).randrange(len(content))
            path.write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
        found = checkpoint.latest(run.path / "checkpoints")
        assert found.step == 1 and found.refused == (2,), path
        assert path.name in found.notes[0], found.notes
        with pytest.raises(CheckpointError, match="the newest good one is that of step 1"):
            run.checkpoint()
        path.write_bytes(content)
    assert checkpoint.latest(run.path / "checkpoints").step == 2


def test_A4_never_from_scratch_without_being_told(tiny: str, tmp_path: Path) -> None:
    pipe, rows = make(tiny)
    run = wb.train_blocking(pipe, rows, steps=1, run=tmp_path / "r", **PLAN)
    (run.checkpoint(1) / "state.json").unlink()
    with pytest.raises(CheckpointError, match="starting over would lose the run"):
        wb.train_blocking(*make(tiny), steps=2, run=run.path, resume="auto", **PLAN)
    assert len(run.rows) == 1


POINTERS: dict[str, Any] = {
    "empty": lambda path: path.write_text(""),
    "stale": lambda path: path.write_text("1"),
    "at a step that is not there": lambda path: path.write_text("global_step_9000"),
    "garbage": lambda path: path.write_bytes(b"\xff\x00{"),
    "a folder": lambda path: path.mkdir(),
    "a link to the one before": lambda path: path.symlink_to("step_000001"),
    "a link to nothing": lambda path: path.symlink_to("step_009000"),
    "a link to itself": lambda path: path.symlink_to(path.name),
}
NAMES = ("latest", "latest_checkpointed_iteration.txt", "latest_checkpoint.txt", "last.ckpt", "tracker.json")


def test_A5_nothing_that_points_to_a_checkpoint_is_believed(tiny: str, tmp_path: Path) -> None:
    """We write no pointer: whatever other trainers, or somebody by hand, put there, the manifests decide. A folder that only
    has a later step's name is no checkpoint of it."""
    run = wb.train_blocking(*make(tiny), steps=2, run=tmp_path / "r", save_freq=1, **PLAN)
    places = run.path / "checkpoints", run.path
    for number, (how, make_one) in enumerate(POINTERS.items()):
        for place in places:
            make_one(place / f"{NAMES[number % len(NAMES)]}{'' if number < len(NAMES) else number}")
        found = checkpoint.latest(places[0])
        assert (found.step, found.notes, run.checkpoints) == (2, (), [1, 2]), how
    (places[0] / "step_000007").symlink_to("step_009000")
    (places[0] / "step_000008").symlink_to("step_000001")
    (places[0] / "step_000009").mkdir()
    found = checkpoint.latest(places[0])
    assert found.step == 2 and found.refused == (9, 8)
    assert "step_000009: checkpoint step_000009 is incomplete" in found.notes[0] and "of another step" in found.notes[1]
    resumed = wb.train_blocking(*make(tiny), steps=3, run=run.path, resume="auto", **PLAN)
    assert any("resumed after step 2" in note for note in resumed.notes) and len(resumed.rows) == 3


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("mount") is None, reason="needs root, to mount a small disk")
def test_A6_a_full_disk_stops_loudly_and_hurts_nothing(tiny: str, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=44m", "tmpfs", str(disk)], check=False).returncode:
        pytest.skip("this machine does not let us mount a small disk")
    try:
        pipe, rows = make(tiny)
        run = disk / "r"
        wb.train_blocking(pipe, rows, steps=1, run=run, save_freq=1, **PLAN)
        before = weights(pipe)

        class Fills:
            """Somebody else's file, after the check before the start."""

            def on_start(self, start: int, steps: int) -> None:
                free = shutil.disk_usage(disk).free
                (disk / "other").write_bytes(bytes(free - (5 << 20)))

            def on_step(self, report: Any) -> None: ...

            def on_end(self, error: BaseException | None) -> None: ...

        pipe, rows = make(tiny)
        with pytest.raises(
            CheckpointError,
            match=r"checkpoint of step 2 could not be written; earlier ones are untouched.*MiB free.*takes",
        ):
            wb.train_blocking(pipe, rows, steps=2, run=run, resume="auto", observers=[Fills()], **PLAN)
        found = checkpoint.latest(run / "checkpoints")
        assert found.step == 1 and found.refused == ()
        (disk / "other").unlink()
        pipe, rows = make(tiny)
        wb.train_blocking(pipe, rows, steps=2, run=run, resume="auto", **PLAN)
        assert wb.load_run(run).checkpoints[-1] == 2 and not same(before, weights(pipe))
        # whatever `train` writes when there is no room left at all
        with pytest.raises(RunError, match=r"the disk of run .* is full.*No space left.*free disk space"), room(run):
            (disk / "other").write_bytes(bytes(64 << 20))
        assert checkpoint.latest(run / "checkpoints").step == 2
        (disk / "other").unlink()
        # and a disk that cannot hold it from the start is said before anything runs
        (disk / "other").write_bytes(bytes(shutil.disk_usage(disk).free - (1 << 20)))
        with pytest.raises(RunError, match="no room for the checkpoints; expected about .*; found .* free"):
            wb.train_blocking(*make(tiny), steps=2, run=disk / "s", **PLAN)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize(("first", "steps"), [(2, 3), pytest.param(4, 5, marks=pytest.mark.long)])
def test_A7_an_epochs_end_loses_and_repeats_nothing(tiny: str, tmp_path: Path, first: int, steps: int) -> None:
    """Eight rows, four a step: epochs end at 2 and 4. Stopped and resumed there, at the end, and past it."""
    plan: dict[str, Any] = {"trace_freq": 1, "keep_traces": 9, **PLAN}
    quiet = wb.train_blocking(*make(tiny, rows=8), steps=steps, run=tmp_path / "quiet", **plan)
    run = tmp_path / "r"
    wb.train_blocking(*make(tiny, rows=8), steps=first, run=run, **plan)
    resumed = wb.train_blocking(*make(tiny, rows=8), steps=steps, run=run, resume="auto", **plan)
    assert numbers(resumed.rows) == numbers(quiet.rows)
    assert [row["training/epoch"] for row in resumed.rows] == [0, 0, 1, 1, 2][:steps]
    for step in range(1, steps + 1):
        assert list(resumed.traces[step].batch["uid"]) == list(quiet.traces[step].batch["uid"])
    over = wb.train_blocking(*make(tiny, rows=8), steps=steps, run=run, resume="auto", **PLAN)
    assert over.notes == (f"nothing left to do: {steps} of {steps} steps are done",) and len(over.rows) == steps


def test_A12_two_writers_and_a_stale_lock(tiny: str, tmp_path: Path) -> None:
    class Second:
        told = ""

        def on_start(self, start: int, steps: int) -> None: ...

        def on_step(self, report: Any) -> None:
            try:
                wb.train_blocking(*make(tiny), steps=1, run=tmp_path / "r", resume="auto", **PLAN)
            except RunError as error:
                self.told = str(error)

        def on_end(self, error: BaseException | None) -> None: ...

    second = Second()
    wb.train_blocking(*make(tiny), steps=1, run=tmp_path / "r", observers=[second], **PLAN)
    assert "is being written" in second.told and f"pid {os.getpid()}" in second.told
    (tmp_path / "r" / "lock.json").write_text(json.dumps({"pid": 1, "host": "elsewhere", "started": "yesterday"}))
    run = wb.train_blocking(*make(tiny), steps=2, run=tmp_path / "r", resume="auto", **PLAN)
    assert any("took over the lock of pid 1 on elsewhere since yesterday" in note for note in run.notes)


def test_A14_another_format_is_refused_by_version(tiny: str, tmp_path: Path) -> None:
    run = wb.train_blocking(*make(tiny), steps=1, run=tmp_path / "r", **PLAN)
    path = run.path / "checkpoints" / "step_000001" / "manifest.json"
    path.write_text(path.read_text().replace(f'"format": {FORMAT}', '"format": 99'))
    with pytest.raises(CheckpointError, match="expected format 4; found 99; open it with the version that wrote it"):
        run.checkpoint()


# --- C: notebooks and jobs ------------------------------------------------------------------------


def test_C4_a_stage_refuses_columns_of_another_steps_batch(tiny: str) -> None:
    pipe, rows = make(tiny)
    sixth = wb.Stepper(pipe, rows.batch(4, step=1)).run(until="advantage").batch
    seventh = wb.Stepper(pipe, rows.batch(4, step=2)).run(until="rollout").batch
    stale = seventh.with_columns(
        {name: sixth[name] for name in ("reward", "token_level_scores", "scored")},
        origin=sixth.origins["reward"],
    )
    with pytest.raises(
        PipelineError,
        match=r"'advantage' reads 'token_level_scores'; expected values of step 2.*found values of step 1",
    ):
        pipe["advantage"](stale)


def test_C4_a_batch_is_learnt_from_once(tiny: str) -> None:
    pipe, rows = make(tiny)
    batch = wb.Stepper(pipe, rows.batch(4)).run(until="advantage").batch
    pipe["update_actor"](batch)
    after = weights(pipe)
    with pytest.raises(VersionMismatch, match="the batch has been used already, or is stale.*allow_stale=True"):
        pipe["update_actor"](batch)
    assert same(after, weights(pipe))
    again = wb.stages.Update(pipe.learners()["actor"], wb.stages.PolicyLoss(), allow_stale=True)
    again(batch)
    assert not same(after, weights(pipe))


def test_C4_a_cell_run_twice_in_a_stepper_does_nothing_twice(tiny: str) -> None:
    pipe, rows = make(tiny)
    s = wb.Stepper(pipe, rows.batch(4)).run()
    after = weights(pipe)
    s.run()
    with pytest.raises(PipelineError, match="this step is over"):
        s.next()
    assert same(after, weights(pipe))


class Cancels:
    """Cancels the task that trains, in the middle of a step."""

    def __init__(self, step: int) -> None:
        self._step, self.task = step, None

    def judge(self, response: str) -> float:
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls == 8 * (self._step - 1) + 1:
            self.task.get_loop().call_soon_threadsafe(self.task.cancel)
            time.sleep(0.2)
        return float(len(response) % 3)


def test_an_interrupt_lets_a_short_step_end_and_leaves_its_checkpoint(tiny: str, tmp_path: Path) -> None:
    cancels = Cancels(2)
    pipe, rows = make(tiny, wb.rewards.Reward(cancels.judge, in_process=True))

    async def go() -> None:
        cancels.task = asyncio.current_task()
        await wb.train(pipe, rows, steps=4, run=tmp_path / "r", **PLAN)

    with pytest.raises(
        asyncio.CancelledError, match="interrupted after step 2; checkpoint 2, go on with resume='auto'"
    ):
        asyncio.run(go())
    run = wb.load_run(tmp_path / "r")
    assert run.checkpoints == [2] and list(run.traces) == [2] and len(run.rows) == 2 and run.state == "stopped"
    assert same(weights(pipe), run.engine(2).snapshot()["weights"])


def test_an_interrupt_of_a_long_step_takes_it_back(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step is dropped at its next safe place; the checkpoint is that of the step before, and it is exact."""
    monkeypatch.setattr("workbench.base.runtime.GRACE", 0.0)
    cancels = Cancels(2)
    pipe, rows = make(tiny, wb.rewards.Reward(cancels.judge, in_process=True))

    async def go() -> None:
        cancels.task = asyncio.current_task()
        await wb.train(pipe, rows, steps=4, run=tmp_path / "r", **PLAN)

    with pytest.raises(asyncio.CancelledError, match="interrupted after step 1; checkpoint 1"):
        asyncio.run(go())
    cancels._step = 100
    resumed = wb.train_blocking(pipe, rows, steps=4, run=tmp_path / "r", resume="auto", **PLAN)
    other = Cancels(100)
    quiet_pipe, rows = make(tiny, wb.rewards.Reward(other.judge, in_process=True))
    quiet = wb.train_blocking(quiet_pipe, rows, steps=4, run=tmp_path / "quiet", **PLAN)
    assert numbers(resumed.rows) == numbers(quiet.rows) and same(weights(pipe), weights(quiet_pipe))


def job(run: Path, env: dict[str, str] | None = None, **values: Any) -> subprocess.Popen[str]:
    small = {
        "steps": 40,
        "batch_size": 4,
        "group_size": 4,
        "num_eval_rows": 8,
        "test_freq": 0,
        "save_freq": 2,
        "run": run,
    }
    command = [sys.executable, "-m", "workbench.cli", "train", "notebooks/201_train_grpo.ipynb", "--skip-look"]
    command += [word for name, value in {**small, **values}.items() for word in ("-p", f"{name}={value}")]
    env = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, cwd=ROOT)


def rows_in(run: Path) -> int:
    """Whole lines of metrics, counted without reading what they say."""
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for_rows(run: Path, number: int) -> None:
    assert within(lambda: rows_in(run) > number), "the job does not train"


def group_of(pid: int) -> set[int]:
    """The process and everything under it."""
    found, stack = {pid}, [pid]
    while stack:
        for children in Path(f"/proc/{stack.pop()}/task").glob("*/children"):
            new = {int(child) for child in children.read_text().split()} - found
            found |= new
            stack += new
    return found


def alive(pids: set[int]) -> set[int]:
    return {pid for pid in pids if Path(f"/proc/{pid}").exists() and "\nState:\tZ" not in _status(pid)}


def wait_until_gone(pids: set[int]) -> None:
    assert within(lambda: not alive(pids), LONG, 0.2), f"left running: {alive(pids)}"


def _status(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return "\nState:\tZ"


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> wb.Run:
    """The job of six steps that nobody disturbed."""
    run = tmp_path_factory.mktemp("quiet") / "r"
    done = job(run, steps=6)
    assert done.communicate(timeout=LONG)[0] and done.returncode == 0
    return wb.load_run(run)


@pytest.mark.long
def test_C6_sigterm_ends_the_step_checkpoints_marks_the_notebook_and_is_gone_on_with(
    quiet: wb.Run, tmp_path: Path
) -> None:
    run = tmp_path / "r"
    going = job(run, steps=6, save_freq=0)
    wait_for_rows(run, 2)
    everybody = group_of(going.pid)
    going.send_signal(signal.SIGTERM)
    said, _ = going.communicate(timeout=LONG)
    assert going.returncode == 143, said
    stopped = wb.load_run(run)
    last = stopped.rows[-1]["training/global_step"]
    assert stopped.checkpoints == [last] and f"interrupted after step {last}" in stopped.summary["stopped"]
    cells = [cell for cell in json.loads((run / "notebook.ipynb").read_text())["cells"] if cell["cell_type"] == "code"]
    marks = [cell["metadata"]["papermill"]["status"] for cell in cells]
    assert marks.count("failed") == 1 and set(marks[marks.index("failed") + 1 :]) == {"skipped"}
    assert "go on with resume='auto'" in json.dumps(cells[marks.index("failed")]["outputs"])
    wait_until_gone(everybody)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "workbench.cli", "train", "--resume", str(run), "--skip-look", "-p", "save_freq=2"]
    assert subprocess.run(command, cwd=ROOT, env=env, capture_output=True, check=False).returncode == 0
    assert_same_run(wb.load_run(run), quiet)


def test_C7_sigkill_of_the_job_loses_nothing_and_leaves_nobody(quiet: wb.Run, tmp_path: Path) -> None:
    run = tmp_path / "r"
    going = job(run, {warm_starts.WHERE: ""}, steps=6)  # its kernel is its own child
    wait_for_rows(run, 3)
    everybody = group_of(going.pid)
    assert len(everybody) >= 2
    going.kill()
    going.communicate()
    wait_until_gone(everybody)
    rows = wb.load_run(run).rows
    assert [row["training/global_step"] for row in rows] == list(range(len(rows)))
    assert json.loads((run / "notebook.ipynb").read_text())["cells"] and wb.load_run(run).state == "died"
    done = job(run, steps=6)
    assert done.communicate(timeout=LONG)[0] and done.returncode == 0
    assert_same_run(wb.load_run(run), quiet)


def assert_same_run(one: wb.Run, two: wb.Run) -> None:
    assert numbers(one.rows) == numbers(two.rows)
    files = [run.checkpoint(6) / "actor" / "model.safetensors" for run in (one, two)]
    assert files[0].read_bytes() == files[1].read_bytes()


# --- D1, as a run sees it -------------------------------------------------------------------------


class Poison:
    """Puts a NaN into the advantages of chosen steps."""

    def __init__(self, *steps: int) -> None:
        self._steps = steps

    def __call__(self, pipe: wb.Pipeline, **update: Any) -> wb.Pipeline:
        steps = self._steps

        class Poisoned(wb.stages.Update):
            def _learn_or_skip(self, rows: Any, loss: Any) -> Any:
                if rows.meta_info["step"] in steps:
                    bad = rows["advantages"].clone()
                    bad[0, 0] = float("nan")
                    rows = rows.with_columns({"advantages": bad})
                return super()._learn_or_skip(rows, loss)

        poisoned = Poisoned(pipe.learners()["actor"], wb.stages.PolicyLoss(), **update)
        return wb.Pipeline([*list(pipe)[:-1], poisoned])


def test_D1_a_step_that_is_not_finite_stops_with_its_batch_and_a_checkpoint(tiny: str, tmp_path: Path) -> None:
    pipe, rows = make(tiny, kl_coef=0.0)
    pipe = Poison(3)(pipe)
    with pytest.raises(NonFinite) as caught:
        wb.train_blocking(pipe, rows, steps=5, run=tmp_path / "r", **PLAN)
    run = wb.load_run(tmp_path / "r")
    assert run.checkpoints == [2] and same(weights(pipe), run.engine(2).snapshot()["weights"])
    failed = wb.Trace.load(run.path / "failed" / "step_000003")
    assert failed.names[-1] == "advantage" and failed.step == 3
    assert any("failed" in note for note in caught.value.__notes__)
    line = f"wb.train(…, run={str(run.path)!r}, resume='auto')"
    assert caught.value.__notes__[-1] == f"checkpoint 2 is safe; to go on from it: {line}"
    assert caught.value.__context__ is None or "event loop" not in str(caught.value.__context__)
    assert f"resume: {line}, from checkpoint 2" in repr(run)
    assert "NonFinite" in run.summary["stopped"] and "checkpoint 2" in run.summary["stopped"]


def test_D1_some_may_be_skipped_and_so_many_in_a_row_stop(tiny: str, tmp_path: Path) -> None:
    pipe, rows = make(tiny, kl_coef=0.0)
    pipe = Poison(2, 4, 5, 6)(pipe, skip_nonfinite=2)
    with pytest.raises(NonFinite):
        wb.train_blocking(pipe, rows, steps=6, run=tmp_path / "r", **PLAN)
    run = wb.load_run(tmp_path / "r")
    assert [row["actor/nonfinite"] for row in run.rows] == [0, 1, 0, 1, 1]
    # 1 and 3 changed the weights, no other
    assert pipe.learners()["actor"].version == 2 and all(tensor.isfinite().all() for tensor in weights(pipe).values())
