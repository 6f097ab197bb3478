"""The way back of placed engines: updates done again over ranks, what a state costs at 7B, and states that outlive workers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import make_random_model
from support.shards import counts, difference

import workbench as wb
from workbench.base.errors import EngineError
from workbench.dataproto import DataProto
from workbench.engines.fsdp_engine.engine import FsdpEngine, fsdp
from workbench.engines.fsdp_engine.group import Group, local_group
from workbench.engines.local_engine.states import MOST_UPDATES, Replay
from workbench.engines.protocol import SnapshotCost
from workbench.engines.settings import FsdpSettings
from workbench.stages.update import PolicyLoss, Update
from workbench.testing.engines import LikelihoodLoss

pytestmark = pytest.mark.slow

GB = 1e9


def learn(engine: Any, batch: DataProto, times: int = 1) -> None:
    for _ in range(times):
        engine.learn(batch, LikelihoodLoss(), counts(batch))


def test_updates_over_ranks_are_done_again_bit_for_bit_also_on_new_workers(batch: DataProto, tmp_path: Path) -> None:
    group = local_group(2, device="cpu", threads=1)
    engine = fsdp("data/tiny-arith", on=group, device="cpu", lr=1e-3, scratch=tmp_path)
    assert engine.snapshot_cost("replay") == SnapshotCost(), "as loaded: it will be loaded again"
    loaded, first = engine.snapshot("replay"), engine.full_weights()
    assert loaded["steps"] == 0 and not list(tmp_path.iterdir())
    del loaded  # it holds nothing: the engine keeps it
    learn(engine, batch)
    assert engine.snapshot_cost("replay").updates == 1
    one, second = engine.snapshot("replay"), engine.full_weights()
    learn(engine, batch)
    two, third = engine.snapshot("replay"), engine.full_weights()
    assert [len(kept.updates) for kept in (one, two)] == [1, 2] and two["steps"] == 2 and two.base is one.base
    assert not list(tmp_path.iterdir()), "nothing is written"
    assert difference(first, second) > 0 < difference(second, third)
    for kept, wanted in ((one, second), (two, third), (one.base, first), (two, third)):
        engine.restore(kept)
        assert difference(engine.full_weights(), wanted) == 0
        assert (engine.state_id, engine.version) == (kept.state_id, kept.version)
    learn(engine, batch)
    undisturbed = engine.full_weights()
    group.close()
    assert engine.lost
    engine.restore(two)
    assert difference(engine.full_weights(), third) == 0
    learn(engine, batch)
    assert difference(engine.full_weights(), undisturbed) == 0
    group.close()


def test_a_stepper_on_ranks_goes_back_by_the_last_state(two: Group, batch: DataProto, tmp_path: Path) -> None:
    """Three steppers one after another, as in a notebook: the third goes back over its update by doing two others again."""
    engine = fsdp("data/tiny-arith", on=two, device="cpu", lr=1e-3, scratch=tmp_path)
    ones = torch.ones_like(batch["response_mask"], dtype=torch.float32)
    named = {"old_log_probs": -ones, "advantages": ones, "scored": torch.ones(len(batch), dtype=torch.bool)}
    rows = batch.with_columns({**named, "uid": [str(row) for row in range(len(batch))]})
    for steps in range(3):
        s = wb.Stepper([Update(engine, PolicyLoss())], rows, snapshots="replay")
        before = engine.full_weights()
        told = repr(s)
        assert ("going back does" in told) == (steps > 0), told
        s.run()
    after = engine.full_weights()
    assert "0.0 MiB" in repr(s.snapshots) or "replay" in repr(s.snapshots)
    assert not list(tmp_path.iterdir()) and s.snapshots.disk_bytes == 0
    s.back()
    assert difference(engine.full_weights(), before) == 0
    s.run()
    assert difference(engine.full_weights(), after) == 0


def test_after_many_updates_a_state_is_held_anew(two: Group, batch: DataProto, tmp_path: Path) -> None:
    engine = fsdp("data/tiny-arith", on=two, device="cpu", lr=1e-3, scratch=tmp_path)
    start = engine.snapshot("replay")
    learn(engine, batch, MOST_UPDATES)
    assert engine.snapshot_cost("replay").updates == MOST_UPDATES
    learn(engine, batch)
    cost = engine.snapshot_cost("replay")
    assert cost == SnapshotCost(disk=engine.checkpoint_bytes(), folder=str(tmp_path))
    held = engine.snapshot("replay")
    assert not isinstance(held, Replay) and held.kind == "disk" and held["steps"] == MOST_UPDATES + 1
    (size,) = held.on_disk().values()
    assert size == pytest.approx(cost.disk, rel=0.05)
    del start, held
    learn(engine, batch)
    assert engine._since is None and not list(tmp_path.iterdir())


def test_with_lora_a_state_on_ranks_is_the_adapters_and_their_moments(
    two: Group, batch: DataProto, tmp_path: Path
) -> None:
    engine = fsdp("data/tiny-arith", on=two, device="cpu", lr=1e-3, lora_rank=4, scratch=tmp_path)
    learn(engine, batch)
    kept = engine.snapshot()
    (size,) = kept.on_disk().values()
    trained = sum(one.nbytes for one in engine._model.parameters() if one.requires_grad)
    every = sum(one.nbytes for one in engine._model.parameters())
    assert engine.snapshot_cost("disk").disk == 3 * trained < 0.2 * every
    # beside the numbers: names, shapes and places of the tensors
    assert 3 * trained <= size < 3 * trained + 64_000


def test_a_model_that_was_written_to_since_is_not_loaded_again(two: Group, batch: DataProto, tmp_path: Path) -> None:
    folder = make_random_model(tmp_path / "model")
    engine = fsdp(folder, on=two, device="cpu", scratch=tmp_path)
    kept, name = engine.snapshot("memory"), engine.state_id
    assert not kept.folder
    os.utime(folder / "model.safetensors", (1, 1))
    with pytest.raises(EngineError, match="was written to since"):
        engine.restore(kept)
    assert engine.state_id == name
    assert engine.snapshot("memory").folder, "it is copied, as it could not be loaded again"


class NoRanks(Group):
    """A group of eight that answers nothing: for what is computed from shapes."""

    def __init__(self) -> None:
        super().__init__(lambda: pytest.fail("no worker is needed"))
        self._ranks: Any = self

    size = 8

    def call(self, method: str, *shared: Any, **named: Any) -> list[Any]:
        return [None] * 8


def seven_billion(folder: Path, **settings: Any) -> FsdpEngine:
    """Qwen2.5-7B's shape (https://huggingface.co/Qwen/Qwen2.5-7B/blob/main/config.json), without weights."""
    from transformers import Qwen2Config

    make_random_model(folder, vocabulary=64)
    (folder / "model.safetensors").unlink()
    shape: dict[str, Any] = {"hidden_size": 3584, "intermediate_size": 18_944, "vocab_size": 152_064}
    shape |= {"num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4}
    Qwen2Config(**shape, tie_word_embeddings=False, eos_token_id=2, pad_token_id=0, bos_token_id=None).save_pretrained(
        folder
    )
    return FsdpEngine(str(folder), NoRanks(), FsdpSettings(**settings))


def test_what_going_back_over_an_update_of_a_7b_takes(tmp_path: Path, batch: DataProto) -> None:
    """7.616e9 parameters: 12 bytes each for a copy; as loaded nothing; by replay a batch; with LoRA r=32 0.24 GB."""
    engine = seven_billion(tmp_path / "full")
    assert engine.snapshot_cost("memory") == engine.snapshot_cost("replay") == SnapshotCost()
    assert engine.snapshot_cost("disk").disk / GB == pytest.approx(12 * 7.615616512)
    loaded = engine.snapshot("replay")
    engine._trained = True
    for kind in ("memory", "disk"):
        assert engine.snapshot_cost(kind).disk / GB == pytest.approx(91.387, abs=0.001)
    engine._record(batch, LikelihoodLoss(), counts(batch), 1.0, (torch.get_rng_state(),))
    assert engine.snapshot_cost("replay") == SnapshotCost(updates=1)
    kept = engine.snapshot("replay")
    assert kept.base is loaded and kept.on_disk() == {}
    assert kept.nbytes == sum(one.nbytes for one in batch.batch.values()) < 1e5
    adapted = seven_billion(tmp_path / "lora", lora_rank=32)
    adapted._trained = True
    # r·(in + out) of q, k, v and o in 28 layers: 32·28·(7168 + 4096 + 4096 + 7168) parameters
    assert adapted.snapshot_cost("memory").disk == 12 * 32 * 28 * (7168 + 4096 + 4096 + 7168) == 242_221_056
