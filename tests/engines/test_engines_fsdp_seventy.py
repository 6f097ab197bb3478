"""A model of 70 billion parameters on 64 ranks, without a number of it: no rank holds, reads, gathers or sends the whole."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

from workbench.engines.fsdp_engine import folders, meshes, parallel, sharded
from workbench.engines.fsdp_engine.meshes import Mesh, sizes_of
from workbench.engines.local_engine.loading import load_model, tied
from workbench.engines.settings import FsdpSettings
from workbench.engines.weights import buckets_of, layout_of

LLAMA_70B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
PARAMETERS = 70_553_706_496
BUCKET = 4 << 30
LARGEST = 128256 * 8192
"""Embeddings, and the language head: 1.5 % of the model."""


class NoFiles:
    """The files of a model as their shapes alone; notes how many numbers were read."""

    def __init__(self, model: Any) -> None:
        self.shapes = {name: tuple(one.shape) for name, one in model.state_dict().items()}
        self.read_sizes: list[int] = []

    def read(self, name: str, box: Any = None) -> torch.Tensor:
        found = torch.empty(self.shapes[name], device="meta")[box or ...]
        self.read_sizes.append(found.numel())
        return found


@contextmanager
def rank_of_64(rank: int) -> Iterator[None]:
    hook = sys.excepthook
    with ExitStack() as ends:
        distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=64)  # type: ignore[no-untyped-call]
        ends.callback(setattr, sys, "excepthook", hook)
        ends.callback(distributed.destroy_process_group)
        yield


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    return str(tmp_path)


def test_no_rank_holds_a_whole_model(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = {"dp": 8, "tp": 8}
    settings = FsdpSettings(device="cpu", mesh=mesh)
    sizes = sizes_of(mesh, 64)
    meta = load_model(folder, settings, empty=True)
    assert sum(one.numel() for one in meta.parameters()) == PARAMETERS
    files, gathered = NoFiles(meta), list[int]()
    full = sharded._full

    def noted(value: Any) -> torch.Tensor:
        gathered.append(value.numel())
        return full(value)

    monkeypatch.setattr(parallel, "_materialise", lambda whole, device: None)
    monkeypatch.setattr(folders, "StoredTensors", lambda path: files)
    monkeypatch.setattr(meshes, "everyone", lambda told, kind: pytest.fail(told) if told else None)
    monkeypatch.setattr(sharded, "_full", noted)
    monkeypatch.setattr(
        sharded, "mapped", lambda file, nbytes, write: torch.empty(nbytes, dtype=torch.uint8, device="meta")
    )
    with rank_of_64(63):
        model = sharded.ShardedModel(folder, settings, Mesh("cpu", sizes), False, {})
        mine = sum(one.to_local().numel() for one in model.named.values())
        assert PARAMETERS / 64 < mine < 1.001 * PARAMETERS / 64  # norms are on every rank of tp
        # loading: it reads what it holds, and no more
        model.load(folder)
        assert sum(files.read_sizes) == mine and max(files.read_sizes) <= LARGEST / 32
        # pushing into shared memory: nothing is gathered
        sent = 0
        for pieces, nbytes in buckets_of(layout_of(meta), "bfloat16", BUCKET, split=True):
            model.send_weights(pieces, {"file": "", "nbytes": nbytes})
            sent += 1
        assert not gathered and sent > PARAMETERS * 2 / BUCKET
        # saving: one tensor at a time, none larger than the embeddings
        whole, parts = model.gathering(), folders.planned(meta)
        assert parts is not None and len(parts) > 50 and not tied(meta)
        for part in parts:
            for name in part.tensors:
                assert whole(name).shape == meta.get_parameter(name).shape
        assert max(gathered) == LARGEST and sum(gathered) == PARAMETERS
