"""Model folders by slices: what is read is what transformers loads, what is written is what it saves, and what does not fit is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.architectures import ARCHITECTURES, make

from workbench.base.errors import EngineError
from workbench.engines.fsdp_engine.folders import WeightReader, adapters_of, begin_folder, planned, reverted
from workbench.engines.local_engine import lora
from workbench.engines.local_engine.loading import load_model
from workbench.engines.settings import LocalSettings

CPU = LocalSettings(device="cpu")
SHORT = ("qwen2", "qwen3_moe", "gemma3", "gpt2")
"""Tied, fused of experts, renamed, and with another layout of linear layers."""
EVERY = [pytest.param(name, marks=() if name in SHORT else pytest.mark.long) for name in ARCHITECTURES]


def middle(shape: torch.Size) -> tuple[slice, ...]:
    """A part of a tensor that begins and ends inside it."""
    return tuple(slice(size // 3, size // 3 * 2 + 1) for size in shape)


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    return {name: one for file in sorted(folder.glob("*.safetensors")) for name, one in load_file(file).items()}


@pytest.mark.parametrize("name", EVERY)
def test_folders_are_read_and_written_as_transformers_does(name: str, tmp_path: Path) -> None:
    folder = make(name, tmp_path / "model")
    real, reader = load_model(folder, CPU), WeightReader.of(str(folder), CPU)
    for tensor, value in real.state_dict().items():
        box = middle(value.shape)
        assert torch.equal(reader.read(tensor, box).float(), value[box].float()), tensor
    assert all(torch.equal(reader.buffer(one), value) for one, value in real.named_buffers())
    # written by two ranks, a file each in turn
    meta = load_model(folder, CPU, empty=True)
    whole, parts = real.state_dict(), planned(meta, 20_000)
    assert parts is not None and len(parts) > 2
    begin_folder(meta, tmp_path / "parts", parts)
    for rank in (0, 1):
        for number, part in enumerate(parts):
            told = part.write(
                tmp_path / "parts", lambda tensor: reverted(meta, {tensor: whole[tensor]}), number % 2 == rank
            )
            assert told is None
    real.save_pretrained(tmp_path / "whole")
    ours, theirs = tensors_in(tmp_path / "parts"), tensors_in(tmp_path / "whole")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[one], theirs[one]) for one in theirs)
    assert (tmp_path / "parts/config.json").read_text() == (tmp_path / "whole/config.json").read_text()
    again = load_model(tmp_path / "parts", CPU).state_dict()
    assert all(torch.equal(again[one], whole[one]) for one in whole)
    assert all(torch.equal(WeightReader.of(str(tmp_path / "parts"), CPU).read(one, middle(again[one].shape)), again[one][middle(again[one].shape)])
               for one in list(again)[:5])  # fmt: skip


def changed(folder: Path, change: Any) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_what_does_not_fit_is_told_by_name(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    folder = changed(make("llama", tmp_path / "a"), lambda tensors: tensors.pop(name))
    with pytest.raises(EngineError, match=f"the files lack {name}"):
        WeightReader.of(str(folder), CPU)
    folder = changed(make("llama", tmp_path / "b"), lambda tensors: tensors.update({name: torch.zeros(3, 2)}))
    with pytest.raises(EngineError, match=rf"the files have {name} of shape \(3, 2\) in place of"):
        WeightReader.of(str(folder), CPU)
    more = {"model.layers.9.mlp.down_proj.weight": torch.zeros(2)}
    folder = changed(make("llama", tmp_path / "c"), lambda tensors: tensors.update(more))
    with pytest.raises(EngineError, match=r"with no place in the model, model.layers.9"):
        WeightReader.of(str(folder), CPU)
    (folder / "model.safetensors").unlink()
    with pytest.raises(EngineError, match="no weights at"):
        WeightReader.of(str(folder), CPU)


def test_older_files_are_mapped_and_sliced(tmp_path: Path) -> None:
    folder = make("qwen2", tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    halves = {"pytorch_model-1.bin": names[::2], "pytorch_model-2.bin": names[1::2]}
    for file, some in halves.items():
        torch.save({name: tensors[name] for name in some}, folder / file)
    places = {name: file for file, some in halves.items() for name in some}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    reader = WeightReader.of(str(folder), CPU)
    assert all(
        torch.equal(reader.read(name, middle(one.shape)), one[middle(one.shape)]) for name, one in tensors.items()
    )


def test_new_adapters_are_those_of_a_model_that_is_loaded_whole() -> None:
    settings = CPU.replace(lora_rank=3)
    real = lora.tensors(load_model("data/tiny-arith", settings))
    made = adapters_of("data/tiny-arith", settings)
    assert made.keys() == real.keys() and all(torch.equal(made[name], real[name]) for name in real)
    assert adapters_of("data/tiny-arith", CPU) == {}
