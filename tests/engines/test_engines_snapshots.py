"""What a local engine's snapshots hold, where, and that a way back by any of them is exact."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb
from workbench.base.errors import EngineError
from workbench.engines.local_engine import learning
from workbench.engines.local_engine.learning import park_moments
from workbench.engines.local_engine.states import LocalSnapshot, StateFiles, Stored
from workbench.engines.protocol import Snapshot
from workbench.stages.rollout import columns_of
from workbench.testing.engines import CHAT, LikelihoodLoss


@pytest.fixture
def folder(tiny: str, tmp_path: Path) -> Path:
    """A copy of the tiny model's folder, to be changed."""
    return Path(shutil.copytree(tiny, tmp_path / "model"))


def opened(path: str | Path, **settings: Any) -> Any:
    return wb.engines.local(path, lr=1e-3, device="cpu", **settings)


def rows(engine: Any) -> wb.DataProto:
    """Two made-up responses to each of two prompts: nothing has to be sampled."""
    prompts = [CHAT[0], CHAT[0], CHAT[1], CHAT[1]]
    samples = [wb.engines.Sample((5 + n, 6, 7), (-1.0, -1.0, -1.0), "length", 0) for n in range(4)]
    columns = columns_of(prompts, samples, 0)
    return wb.DataProto.from_single_dict({**columns, "row": torch.arange(4), "weight": torch.linspace(-1, 1, 4)})


def learn(engine: Any, batch: wb.DataProto) -> None:
    engine.learn(batch, LikelihoodLoss(), wb.engines.LossCounts(float(batch["response_mask"].sum()), 4.0))


def state(engine: Any) -> dict[str, torch.Tensor]:
    """Weights and moments, copied, without a snapshot."""
    return {name: tensor.clone() for name, tensor in engine._state().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.slow
def test_weights_as_loaded_cost_nothing(tiny: str) -> None:
    engine = opened(tiny)
    before, loaded = state(engine), engine.snapshot()
    assert (
        loaded.nbytes == 0 == engine.snapshot_cost().memory and loaded.kind == "disk" and isinstance(loaded, Snapshot)
    )
    batch = rows(engine)
    learn(engine, batch)
    assert not same(state(engine), before)
    engine.restore(loaded)
    assert same(state(engine), before) and engine.state_id == loaded.state_id and engine.version == 0
    assert all(torch.equal(one, before[f"weights/{name}"]) for name, one in loaded["weights"].items())


@pytest.mark.slow
def test_bits_that_the_files_lack_are_copied_whatever_the_engine_believes(tiny: str) -> None:
    """Not the version or the state's name decides, but the weights: here they are changed behind the engine's back."""
    engine = opened(tiny)
    with torch.no_grad():
        norm = engine._model.model.norm.weight
        norm.data[3] = -0.0
        mine = state(engine)
    changed = engine.snapshot()
    assert changed.nbytes == norm.nbytes and changed.kind == "memory and disk"
    norm.data[3] = 0.0  # equal to -0, but not the same bits
    assert engine.snapshot().tensors().keys() != changed.tensors().keys()
    engine.restore(changed)
    assert same(state(engine), mine) and torch.signbit(norm[3])


@pytest.mark.slow
def test_steps_share_what_did_not_change_and_hold_a_tied_head_once(tiny: str) -> None:
    engine = opened(tiny)
    batch = rows(engine)
    learn(engine, batch)
    one = engine.snapshot()
    again = engine.snapshot()
    assert one.tensors().keys() == again.tensors().keys() and one.nbytes == again.nbytes
    live = {tensor.data_ptr(): tensor.nbytes for tensor in engine._state().values()}
    assert one.nbytes <= sum(live.values()) == engine.snapshot_cost().memory
    assert len({*map(id, one.held.values())}) < len(one.held)  # embeddings and head
    learn(engine, batch)
    assert not one.tensors().keys() & engine.snapshot().tensors().keys()


@pytest.mark.slow
def test_a_way_back_on_disk_and_by_replay_is_exact(tiny: str, tmp_path: Path) -> None:
    engine = opened(tiny, lora_rank=4, lora_dropout=0.2)
    batch = rows(engine)
    learn(engine, batch)
    first = state(engine)
    on_disk, start = engine.snapshot("disk", tmp_path), engine.snapshot("replay")
    assert on_disk.nbytes == 0 and on_disk.kind == "disk" and not list(tmp_path.iterdir())  # the file has no name
    learn(engine, batch)
    engine.commit()
    torch.manual_seed(1)  # dropout takes other numbers, unless a replay sets the generator again
    later, second = engine.snapshot("replay"), state(engine)
    assert later.kind == "replay" and len(later.updates) == 1 and later.base is start
    for kept, wanted in ((on_disk, first), (later, second), (start, first), (later, second)):
        with torch.random.fork_rng([]):
            before = torch.get_rng_state()
            engine.restore(kept)
            assert torch.equal(before, torch.get_rng_state())
        assert same(state(engine), wanted) and (engine.state_id, engine.version) == (kept.state_id, kept.version)
    with pytest.raises(EngineError, match="restore"):
        later["weights"]


@pytest.mark.slow
def test_updates_are_done_again_with_the_settings_that_they_had(tiny: str) -> None:
    """How a mini-batch is cut changes rounding: a way back from inside `trying` is exact all the same."""
    engine = opened(tiny)
    batch = rows(engine)
    start = engine.snapshot("replay")
    learn(engine, batch)
    kept, wanted = engine.snapshot("replay"), state(engine)
    with engine.trying(micro_batch_tokens=1, pack="no"):
        engine.restore(start)
        learn(engine, batch)
        assert not same(state(engine), wanted), "cut otherwise it rounds otherwise"
        engine.restore(kept)
        assert same(state(engine), wanted) and engine._budget == 1
    assert engine._budget == 4096


@pytest.mark.slow
def test_looking_at_weights_ends_no_record(tiny: str) -> None:
    engine = opened(tiny)
    batch = rows(engine)
    start = engine.snapshot("replay")
    learn(engine, batch)
    wanted = {name: one.clone() for name, one in engine.snapshot()["weights"].items()}
    learn(engine, batch)
    kept = engine.snapshot("replay")
    assert kept.base is start and len(kept.updates) == 2
    engine.restore(start)
    learn(engine, batch)
    assert same(dict(engine.snapshot()["weights"]), wanted)


@pytest.mark.slow
def test_a_step_that_stops_half_way_is_not_recorded(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = opened(tiny)
    batch = rows(engine)
    start = engine.snapshot("replay")
    before = state(engine)

    def step(self: Any) -> None:
        with torch.no_grad():
            next(iter(self.named.values())).add_(1.0)
        raise KeyboardInterrupt

    monkeypatch.setattr("workbench.engines.local_engine.learning.Optimizer.step", step)
    with pytest.raises(KeyboardInterrupt):
        learn(engine, batch)
    monkeypatch.undo()
    assert engine.snapshot("replay").kind != "replay", "nobody knows how to come there again"
    engine.restore(start)
    assert same(state(engine), before)


@pytest.mark.slow
def test_updates_are_recorded_only_as_long_as_somebody_can_go_back(tiny: str) -> None:
    engine = opened(tiny)
    batch = rows(engine)
    learn(engine, batch)
    kept = engine.snapshot("replay")
    learn(engine, batch)
    assert len(engine._since) == 1 and kept.kind == "memory"
    del kept
    learn(engine, batch)
    assert engine._since is None


@pytest.mark.slow
def test_lora_snapshots_hold_adapters_and_their_moments_alone(tiny: str) -> None:
    engine = opened(tiny, lora_rank=4)
    learn(engine, rows(engine))
    adapters = sum(one.nbytes for one in engine._parameters().values())
    kept = engine.snapshot()
    steps = 4 * len(engine._parameters())
    assert 0 < kept.nbytes <= 3 * adapters + steps and set(kept["weights"]) == set(engine._weights())
    assert kept.nbytes < 0.2 * sum(one.nbytes for one in engine._model.parameters())


@pytest.mark.slow
def test_a_folder_that_is_deleted_is_not_missed(folder: Path) -> None:
    engine = opened(folder)
    loaded, before = engine.snapshot(), state(engine)
    learn(engine, rows(engine))
    shutil.rmtree(folder)  # the engine has the file open
    engine.restore(loaded)
    assert same(state(engine), before)


@pytest.mark.slow
def test_a_file_written_in_place_is_refused(folder: Path) -> None:
    engine = opened(folder)
    loaded = engine.snapshot()
    learn(engine, rows(engine))
    mine, name = state(engine), engine.state_id
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\1\2\3\4")
    with pytest.raises(EngineError, match="was written to since"):
        engine.restore(loaded)
    assert same(state(engine), mine) and engine.state_id == name
    assert engine.snapshot().kind == "memory", "a file that has changed is not looked at any more"


@pytest.mark.slow
def test_a_snapshot_of_another_model_is_refused(tiny: str) -> None:
    engine, other = opened(tiny), opened(tiny, lora_rank=4)
    name = engine.state_id
    with pytest.raises(EngineError, match="another model"):
        engine.restore(other.snapshot())
    assert engine.state_id == name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_files_have_every_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    values = torch.tensor([[0.0, 1.0, 2.0], [0.5, -3.0, 4.0]]).to(dtype)
    files = StateFiles.written({"a": values, "none": values[:0], "one": values[0, 1]}, tmp_path)
    assert torch.equal(files.read("a"), values) and torch.equal(files.read("a", 2), values.view(-1)[:2])
    assert files.read("none").shape == (0, 3) and torch.equal(files.read("one"), values[0, 1])
    assert files.shape("b") is None and Stored(files, "a", dtype).same(values)
    other = values.clone()
    other[1, 2] = not other[1, 2]
    assert not Stored(files, "a", dtype).same(other)


def test_a_state_of_no_bytes_has_a_face() -> None:
    assert "memory, 0 bytes" in repr(LocalSnapshot({}, version=3, state_id="x", steps=0))


def test_moments_that_are_kept_in_a_file_come_back_bit_for_bit(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engines = [opened(tiny), opened(tiny)]
    batch = rows(engines[0])
    for engine in engines:
        learn(engine, batch)
    park_moments()
    assert engines[0]._optimizer._adam.state, "the moments of a tiny model stay in memory"
    monkeypatch.setattr(learning, "is_large", bool)
    engines[0]._optimizer.park()
    engines[0]._optimizer.park()  # a second time does nothing
    assert not engines[0]._optimizer._adam.state and engines[1]._optimizer._adam.state
    assert engines[0]._live().parts["moments"] == 0 < engines[1]._live().parts["moments"], "a report reads nothing back"
    assert engines[0]._optimizer._parked is not None
    for engine in engines:
        learn(engine, batch)
    assert same(state(engines[0]), state(engines[1]))
    engines[0]._optimizer.park()
    assert same(state(engines[0]), state(engines[1])), "a snapshot reads them back"
    engines[0]._optimizer.park()
    engines[0].restore(kept := engines[1].snapshot())
    assert engines[0]._optimizer._parked is None and engines[0].state_id == kept.state_id
    assert same(state(engines[0]), state(engines[1]))
