"""Which states a stepper keeps, what they may take, and that it comes back exactly from each kind of them."""

from __future__ import annotations

import logging
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb
from workbench.base.errors import OutOfMemory, SettingError, VersionMismatch
from workbench.engines.local_engine.states import LocalSnapshot, StateFiles, Stored
from workbench.engines.protocol import SnapshotCost
from workbench.steps.stepper import Snapshots, SnapshotSettings

KIB = 1 / 2**20
"""GiB of a KiB."""


@dataclass(eq=False)
class Small:
    """A learner whose state is 1 KiB, of which the first half never changes and is shared by its snapshots."""

    version: int = 0
    frozen: torch.Tensor = field(default_factory=lambda: torch.zeros(128))
    asked: list[tuple[str, Any]] = field(default_factory=list)

    @property
    def state_id(self) -> str:
        return str(self.version)

    def snapshot(self, kind: str = "memory", folder: Any = None) -> LocalSnapshot:
        self.asked.append((kind, folder))
        mine = torch.full((128,), float(self.version))
        held: dict[str, Any] = {"weights/a": self.frozen, "weights/b": mine}
        if kind == "disk":
            held = {"weights/b": Stored(StateFiles.written({"b": mine}, folder), "b", mine.dtype)}
        return LocalSnapshot(held, version=self.version, state_id=self.state_id, steps=0)

    def restore(self, snapshot: Any) -> None:
        self.version = snapshot.version

    def snapshot_cost(self, kind: str = "memory") -> SnapshotCost:
        return {"memory": SnapshotCost(1024), "disk": SnapshotCost(disk=1024)}.get(kind, SnapshotCost())

    def memory_needed(self, tokens: int | None = None) -> tuple[torch.device, dict[str, int]]:
        return torch.device("cpu"), {}

    def memory_free(self) -> int:
        return 1 << 62

    size: int = 0

    def checkpoint_bytes(self) -> int:
        return self.size


@dataclass(eq=False)
class Wants:
    """A stepper's side: the states that it can go back to."""

    states: set[str]

    def wanted_states(self) -> set[str]:
        return self.states


def kept(settings: dict[str, Any], versions: int = 3) -> tuple[Snapshots, Small, Wants]:
    """What is kept after so many updates by somebody who wants all states."""
    learner, wants = Small(), Wants(set("0123456"))
    held = Snapshots(SnapshotSettings(**settings))
    held.shared_with(wants)
    for version in range(versions):
        learner.version = version
        held.take(learner)
    return held, learner, wants


def there(held: Snapshots, learner: Small) -> set[str]:
    """The states to which it goes back."""
    found = set()
    for state in "0123456":
        try:
            held.align("actor", learner, state)
            found.add(state)
        except VersionMismatch:
            continue
    return found


def test_shared_tensors_are_counted_once() -> None:
    held, _, _ = kept({})
    assert held.nbytes == 512 + 3 * 512 and "3 kept states" in repr(held) and "memory" in repr(held)


def test_the_oldest_goes_beyond_the_number() -> None:
    assert there(*kept({"keep_snapshots": 2})[:2]) == {"1", "2"}


def test_the_oldest_goes_where_bytes_do_not_fit(caplog: pytest.LogCaptureFixture) -> None:
    """1 KiB and half a KiB more fit into 2 KiB with the next price of 1 KiB only after one is dropped."""
    with caplog.at_level(logging.INFO, "workbench"):
        held, learner, _ = kept({"snapshot_memory": 2 * KIB})
    assert held.nbytes == 1536 and there(held, learner) == {"1", "2"}
    assert "takes 0.0 MiB of 0.0 MiB free" in caplog.text and "the oldest kept state is dropped" in caplog.text


def test_no_room_is_said_before_with_what_to_set(tmp_path: Path) -> None:
    with pytest.raises(
        OutOfMemory, match=r"keep the weights of 'learner'.*snapshots='disk' or 'replay', or snapshot_folder"
    ):
        kept({"snapshot_memory": 0.5 * KIB})
    folder = str(tmp_path)
    _, learner, _ = kept({"snapshot_memory": 1.5 * KIB, "snapshot_folder": folder})
    assert learner.asked == [("memory", None), ("disk", folder), ("disk", folder)], (
        "nothing is dropped that can be spilled"
    )
    _, learner, _ = kept({"snapshots": "disk"}, versions=1)
    assert learner.asked == [("disk", tempfile.gettempdir())]


def test_the_disk_has_a_budget_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A state is half a KiB and a header in a file; the price says 1 KiB before it is written."""
    given = {"snapshots": "disk", "snapshot_folder": str(tmp_path)}
    with caplog.at_level(logging.INFO, "workbench"):
        held, learner, _ = kept({**given, "snapshot_disk": 2 * KIB})
    one = held.disk_bytes // 2
    assert 512 < one < 1024 and there(held, learner) == {"1", "2"} and held.nbytes == 0
    assert f"on the disk of {tmp_path}: the oldest kept state is dropped" in caplog.text
    assert "on the disk" in repr(held)
    wanted = rf"no room to keep the weights of 'learner' on the disk of {tmp_path}; expected at most .*'replay'.*snapshot_disk"
    with pytest.raises(OutOfMemory, match=wanted):
        kept({**given, "snapshot_disk": 0.5 * KIB})


def test_what_is_large_beside_the_free_memory_is_on_the_disk_or_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four whole states of 1 KiB fit into a quarter of 16 KiB, and not into a quarter of 15."""
    for free, disk, kind in ((16384, 0, "memory"), (15360, 16384, "disk"), (15360, 15360, "replay")):
        monkeypatch.setattr("workbench.base.memory.available", lambda free=free: free)
        monkeypatch.setattr(Snapshots, "_free_disk", lambda self, folder, disk=disk: disk)
        held, learner = Snapshots(), Small(size=1024)
        held.take(learner)
        assert [kinds for kinds, _ in learner.asked] == [kind]
        monkeypatch.setattr("workbench.base.memory.available", lambda: 2048)
        learner.version = 1
        held.take(learner)
        assert [kinds for kinds, _ in learner.asked[1:]] == [kind], (
            "a replay needs a state from which updates were recorded"
        )


def test_states_that_nobody_can_go_back_to_are_dropped() -> None:
    held, learner, wants = kept({})
    wants.states = {"2"}
    learner.version = 3
    held.take(learner)
    assert there(held, learner) == {"2", "3"}
    held.align("actor", learner, "2")
    learner.version = 4  # made by an update that failed: no stepper has it, and it is not kept
    before = len(learner.asked)
    held.align("actor", learner, "2")
    assert len(learner.asked) == before
    learner.version = 5
    with held.lending({"actor": "5"}):
        held.align("actor", learner, "2")
        held.align("actor", learner, "5")
    assert learner.version == 5


def test_settings_are_checked() -> None:
    for wrong in ({"keep_snapshots": 0}, {"snapshot_memory": -1.0}):
        with pytest.raises(SettingError):
            SnapshotSettings(**wrong)


def mib(engine: Any) -> str:
    """The size of weights and moments, tied ones once."""
    return f"{sum({one.data_ptr(): one.nbytes for one in engine._state().values()}.values()) / 2**20:.1f} MiB"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["memory", "disk", "replay"])
def test_a_stepper_comes_back_exactly(tiny: str, tmp_path: Path, kind: str) -> None:
    engine = wb.engines.local(tiny, lr=1e-3, device="cpu")
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256)
    pipe = wb.recipes.grpo(engine, group_size=2, max_tokens=4, reward=lambda response: float(len(response)))
    earlier = wb.Stepper(pipe, rows.batch(2)).run()
    s = wb.Stepper(pipe, rows.batch(2, step=2), snapshots=kind, snapshot_folder=str(tmp_path)).run(until="advantage")
    assert earlier.snapshots.nbytes == 0, "the state before the first update is the model's folder"
    before = {name: tensor.clone() for name, tensor in engine._state().items()}
    said = f"weights of 'actor' kept for back(): {mib(engine)} of"
    assert said in repr(s) and (f"free on the disk of {tmp_path}" in repr(s)) == (kind == "disk")
    s.run()
    after = {name: tensor.clone() for name, tensor in engine._state().items()}
    assert (s.snapshots.nbytes > 0) == (kind != "disk") and not list(tmp_path.iterdir())
    base = s.snapshots.nbytes
    t = s.fork().back()
    assert all(torch.equal(one, before[name]) for name, one in engine._state().items()) and engine.version == 1
    assert "2 kept states" in repr(s.snapshots) and ("replay" in repr(s.snapshots)) == (kind == "replay")
    # a second state of as many bytes, nothing, or an update's batch
    assert (s.snapshots.nbytes - base) / (base or 1) == pytest.approx(
        {"memory": 1, "disk": 0, "replay": 0}[kind], abs=0.01
    )
    t.run()
    assert all(torch.equal(one, after[name]) for name, one in engine._state().items())
    with pytest.raises(SettingError, match="keep_snapshot"):
        wb.Stepper(pipe, rows.batch(2), keep_snapshot=2)
