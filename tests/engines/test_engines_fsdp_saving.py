"""Sharded saves that go on beside the work: nothing partial is ever there, whoever is killed, hung, slow or in a hurry.

Disks are slow by `support.shards.Disk`, and full by the kernel's own limit on the size of a process's files.
"""

from __future__ import annotations

import functools
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from support.architectures import make
from support.patience import LONG, patience, within
from support.shards import Disk, counts, difference

from workbench.base.errors import CheckpointError, SettingError, WorkerLost
from workbench.dataproto import DataProto
from workbench.engines import local
from workbench.engines.fsdp_engine import engine as engine_module
from workbench.engines.fsdp_engine import folders
from workbench.engines.fsdp_engine.engine import FsdpEngine, fsdp
from workbench.engines.fsdp_engine.folders import export
from workbench.engines.fsdp_engine.group import Group, local_group
from workbench.engines.local_engine.states import RECORD, read_record, read_weights
from workbench.runs import checkpoint
from workbench.testing.engines import LikelihoodLoss

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Disk:
    return Disk(tmp_path_factory.mktemp("disk"))


@pytest.fixture(scope="module")
def where(disk: Disk) -> Iterator[Group]:
    group = local_group(2, device="cpu", threads=1, env=disk.env)
    yield group
    disk.go()
    group.close()


def taught(where: Group, batch: DataProto, **settings: Any) -> FsdpEngine:
    engine = fsdp("data/tiny-arith", on=where, device="cpu", **{"lr": 1e-3, **settings})
    engine.learn(batch, LikelihoodLoss(), counts(batch))
    return engine


def pid_of(where: Group, rank: int) -> int:
    where.start()
    return int(where.workers[rank]["pid"])


def nothing_at(path: Path) -> bool:
    return not path.exists() and not list(path.parent.glob(".staging-*"))


def with_our_path() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)}


def wait_for(condition: Any) -> None:
    assert within(condition, every=0.02)


# --- A10: a save that is in flight ----------------------------------------------------------------


@pytest.mark.long
def test_a10_learning_goes_on_beside_a_save_and_the_next_one_waits(
    where: Group, disk: Disk, batch: DataProto, tmp_path: Path
) -> None:
    engine = taught(where, batch)
    then = engine.full_weights()
    disk.stall(pid_of(where, 1))
    engine.save_sharded(tmp_path / "first", wait=False)
    for _ in range(2):
        engine.learn(batch, LikelihoodLoss(), counts(batch))
    assert not (tmp_path / "first").exists() and difference(then, engine.full_weights()) > 0
    released: list[bool] = []

    def release() -> None:
        released.append((tmp_path / "first").exists())
        disk.go()

    timer = threading.Timer(1.0, release)
    timer.start()
    engine.save_sharded(tmp_path / "second", wait=False)  # waits for the first
    assert released == [False] and (tmp_path / "first" / RECORD).is_file()
    timer.join()
    assert difference(read_weights(tmp_path / "first"), then) == 0  # what was, not what was learnt meanwhile
    now = engine.full_weights()
    engine.finish_saving()
    assert difference(read_weights(tmp_path / "second"), now) == 0
    assert not list(tmp_path.glob(".staging-*"))
    engine.load_sharded(tmp_path / "first")
    assert difference(then, engine.full_weights()) == 0
    with pytest.raises(CheckpointError, match="never overwritten"):
        engine.save_sharded(tmp_path / "first", wait=False)


def test_a10_a_rank_that_cannot_write_fails_loudly_at_the_next_call(
    where: Group, disk: Disk, batch: DataProto, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine, patient = taught(where, batch), taught(where, batch, failed_save="warn")
    before = engine.full_weights()
    worker = psutil.Process(pid_of(where, 1))
    worker.rlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    try:
        with pytest.raises(CheckpointError, match="rank 1 could not write.*nothing of it was kept"):
            engine.save_sharded(tmp_path / "state")
        assert nothing_at(tmp_path / "state")
        disk.stall(pid_of(where, 0))
        engine.save_sharded(tmp_path / "state", wait=False)
        disk.go()
        with pytest.raises(CheckpointError, match="rank 1 could not write"):
            engine.finish_saving()
        patient.save_sharded(tmp_path / "state", wait=False)
        wait_for(lambda: nothing_at(tmp_path / "state"))
        time.sleep(0.2)
        patient.learn(batch, LikelihoodLoss(), counts(batch))
        assert "could not be saved" in caplog.text and nothing_at(tmp_path / "state")
    finally:
        worker.rlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert difference(before, engine.full_weights()) == 0 and worker.is_running()
    engine.save_sharded(tmp_path / "state")
    assert read_record(tmp_path / "state")["steps"] == 1


ENDING = """
from support import warm_starts
warm_starts.install()  # this process is an ordinary one, its workers need not be
import os, sys, threading, time
from pathlib import Path
from workbench.engines.fsdp_engine.engine import fsdp
from support.shards import Disk
from workbench.engines.fsdp_engine.group import local_group

if __name__ == "__main__":
    folder, how = Path(sys.argv[1]), sys.argv[2]
    disk = Disk(folder)
    group = local_group(2, device="cpu", threads=1, env=disk.env)
    engine = fsdp("data/tiny-arith", on=group, device="cpu")
    for worker in group.workers:
        disk.stall(worker["pid"])
    engine.save_sharded(folder / "state", wait=False)
    assert not (folder / "state").exists()
    (folder / "pids").write_text(" ".join(str(worker["pid"]) for worker in group.workers))
    if how == "hang":
        time.sleep(3600)
    threading.Timer(1.0, disk.go).start()
    if how == "raise":
        raise KeyError("the cell's own mistake")
    if how == "forget":
        del engine
"""


@pytest.mark.long
@pytest.mark.parametrize("how", ["forget", pytest.param("raise", marks=pytest.mark.long)])
def test_a10_the_interpreters_end_waits_for_it(tmp_path: Path, how: str) -> None:
    (tmp_path / "ending.py").write_text(ENDING)
    done = subprocess.run(
        [sys.executable, tmp_path / "ending.py", tmp_path, how],
        capture_output=True,
        text=True,
        timeout=LONG,
        env=with_our_path(),
    )
    assert done.returncode == (1 if how == "raise" else 0), done.stderr
    assert ("the cell's own mistake" in done.stderr) == (how == "raise")
    assert not list(tmp_path.glob(".staging-*"))
    export(tmp_path / "state", tmp_path / "exported")
    assert (tmp_path / "exported" / "model.safetensors").is_file()
    pids = (tmp_path / "pids").read_text().split()
    wait_for(lambda: not [pid for pid in pids if psutil.pid_exists(int(pid))])


@pytest.mark.long
def test_a10_a_killed_driver_leaves_nothing_that_looks_whole(tmp_path: Path, where: Group, batch: DataProto) -> None:
    (tmp_path / "hanging.py").write_text(ENDING)
    command = [sys.executable, tmp_path / "hanging.py", tmp_path, "hang"]
    driver = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=with_our_path())
    wait_for(lambda: (tmp_path / "pids").is_file() and (tmp_path / "pids").read_text())
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    wait_for(lambda: not [pid for pid in pids if psutil.pid_exists(pid)])
    assert not (tmp_path / "state").exists() and (tmp_path / ".staging-state").is_dir()
    taught(where, batch).save_sharded(tmp_path / "state")  # what it left is cleaned
    assert read_record(tmp_path / "state")["steps"] == 1 and not list(tmp_path.glob(".staging-*"))


def test_a10_close_waits_for_it(disk: Disk, tmp_path: Path) -> None:
    group = local_group(2, device="cpu", threads=1, env=disk.env)
    engine = fsdp("data/tiny-arith", on=group, device="cpu")
    disk.stall(pid_of(group, 0))
    engine.save_sharded(tmp_path / "state", wait=False)
    threading.Timer(0.5, disk.go).start()
    engine.close()
    assert not read_record(tmp_path / "state")["steps"] and not group.alive


def test_an_exported_state_is_read_one_file_at_a_time(
    where: Group, batch: DataProto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    critic = fsdp("data/tiny-arith", on=where, device="cpu", lr=1e-3).critic()
    critic.learn(batch, LikelihoodLoss(want=("values",)), counts(batch))
    critic.save_sharded(tmp_path / "state")
    limit, held = 300_000, []

    def read(*given: Any) -> dict[str, torch.Tensor]:
        held.append(read_weights(*given))
        return held[-1]

    monkeypatch.setattr(folders, "planned", functools.partial(folders.planned, limit=limit))
    monkeypatch.setattr(folders, "read_weights", read)
    opened = local(export(tmp_path / "state", tmp_path / "model"), device="cpu").critic()
    assert len([*(tmp_path / "model").glob("model-*.safetensors")]) == len(held) - 1 > 4
    largest = max(one.nbytes for one in critic.full_weights().values())
    assert max(sum(one.nbytes for one in found.values()) for found in held) <= max(limit, largest)
    weights = critic.full_weights()
    assert difference({n: one for n, one in weights.items() if "value_head" not in n}, opened.full_weights()) == 0
    head = load_file(tmp_path / "model" / "value_head.safetensors")
    assert all(torch.equal(one, weights[f"value_head.{name}"]) for name, one in head.items()) and len(head) == 2
    with pytest.raises(
        CheckpointError, match=r"state; expected weight .*; found no tensor of that name; name the model"
    ):
        export(tmp_path / "state", tmp_path / "other", model=make("llama", tmp_path / "llama"))


# --- A15: a rank that is gone, hung or too slow ---------------------------------------------------


def test_a15_a_disk_that_hangs_ends_the_save_at_its_deadline_and_the_run_goes_on(
    where: Group, disk: Disk, batch: DataProto, tmp_path: Path
) -> None:
    deadline = patience(1.0)
    engine = taught(where, batch, save_deadline=deadline)
    for rank in range(2):
        disk.stall(pid_of(where, rank))
        engine.save_sharded(tmp_path / f"{rank}", wait=False)
        with pytest.raises(CheckpointError, match=rf"ranks \[{rank}\] of 2 had not written after {deadline:g} seconds"):
            engine.finish_saving()
        learned = engine.learn(batch, LikelihoodLoss(), counts(batch))
        assert learned.metrics["grad_norm"].result() > 0
        disk.go()
        time.sleep(0.3)
        assert not (tmp_path / f"{rank}").exists()  # not later, either
    engine.save_sharded(tmp_path / "after")
    assert read_record(tmp_path / "after")["steps"] == 3


@pytest.mark.long
@pytest.mark.parametrize("wait", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a15_a_stopped_rank(
    disk: Disk, batch: DataProto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait: bool
) -> None:
    monkeypatch.setattr(engine_module, "GRACE", patience(0.5))
    group = local_group(2, device="cpu", threads=1, env=disk.env)
    engine = taught(group, batch, save_deadline=patience(1.0))
    pids = [pid_of(group, rank) for rank in range(2)]
    engine.save_sharded(tmp_path / "good")
    kept = read_weights(tmp_path / "good")
    engine.learn(batch, LikelihoodLoss(), counts(batch))
    disk.stall(pids[1])
    threading.Timer(1.0, os.kill, (pids[1], signal.SIGSTOP)).start()
    with pytest.raises(TimeoutError, match=r"ranks \[(0, )?1\] of 2(.|\n)*\[1\] are stopped \(SIGSTOP\)"):
        engine.save_sharded(tmp_path / "state", wait=wait)
        engine.finish_saving()
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    disk.go()
    assert not (tmp_path / "state").exists() and difference(kept, read_weights(tmp_path / "good")) == 0
    engine.load_sharded(tmp_path / "good")  # new workers; what the old ones left is cleaned
    engine.save_sharded(tmp_path / "state")
    assert difference(kept, read_weights(tmp_path / "state")) == 0 and not list(tmp_path.glob(".staging-*"))
    group.close()


@pytest.mark.long
def test_a15_a_killed_rank(disk: Disk, batch: DataProto, tmp_path: Path) -> None:
    group = local_group(2, device="cpu", threads=1, env=disk.env)
    engine = taught(group, batch)
    engine.save_sharded(tmp_path / "good")
    disk.stall(pid_of(group, 1))
    engine.save_sharded(tmp_path / "state", wait=False)
    os.kill(pid_of(group, 1), signal.SIGKILL)
    with pytest.raises(WorkerLost, match="rank 1(.|\n)*SIGKILL") as caught:
        engine.learn(batch, LikelihoodLoss(), counts(batch))
    assert "was not finished and is not there" in caught.value.__notes__[0]
    disk.go()
    assert not (tmp_path / "state").exists()
    engine.load_sharded(tmp_path / "good")
    engine.learn(batch, LikelihoodLoss(), counts(batch))
    group.close()


@pytest.mark.long
def test_a15_a_runs_checkpoint_is_whole_or_not_there(
    disk: Disk, batch: DataProto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "GRACE", patience(0.5))
    group = local_group(2, device="cpu", threads=1, env=disk.env)
    engine = taught(group, batch, save_deadline=patience(1.0))

    def fill(staging: Path) -> None:
        engine.save(staging / "actor")
        engine.save_state(staging / "actor_state")

    checkpoint.write(tmp_path, 1, fill, {"step": 1})
    engine.learn(batch, LikelihoodLoss(), counts(batch))
    disk.stall(pid_of(group, 1))
    with pytest.raises(CheckpointError, match="step 2 could not be written(.|\n)*ranks .1. of 2 had not written"):
        checkpoint.write(tmp_path, 2, fill, {"step": 2})
    assert group.alive  # the disk hung, not the rank: when it comes to itself the run can go on
    disk.go()
    found = checkpoint.latest(tmp_path)
    assert found.step == 1 and found.path is not None and not found.notes and not list(tmp_path.glob(".staging-*"))
    engine.load_state(found.path / "actor", found.path / "actor_state")
    checkpoint.write(tmp_path, 2, fill, {"step": 2})
    group.close()


def test_settings_of_saves(where: Group) -> None:
    with pytest.raises(SettingError, match="save_deadline"):
        fsdp("data/tiny-arith", on=where, save_deadline=0)
    with pytest.raises(SettingError, match="failed_save"):
        fsdp("data/tiny-arith", on=where, failed_save="ignore")
    assert json.dumps(fsdp("data/tiny-arith", on=where, device="cpu").describe(), default=str)
