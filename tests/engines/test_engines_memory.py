"""Estimates of memory and disk before learning, by hand: what is trained, the tokens that are asked, the logits that exist."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.architectures import make

import workbench as wb
from workbench.base.errors import OutOfMemory, SettingError
from workbench.engines.local_engine import memory
from workbench.functional.logprobs import CHUNK_BYTES
from workbench.runs import preflight
from workbench.steps.stepper import Snapshots
from workbench.testing.engines import LikelihoodLoss

LAYER = 5 * 128 + (3 * 4 + 2 * 2) * 32 + 4 * 384
"""Numbers that a layer of the tiny model keeps of a token: H = 128, 4 query and 2 key heads of 32, an MLP of 384."""
ROWS = wb.DataProto.from_single_dict(
    {
        "input_ids": torch.full((2, 6), 5),
        "attention_mask": torch.ones(2, 6, dtype=torch.long),
        "position_ids": torch.arange(6).repeat(2, 1),
        "responses": torch.full((2, 2), 5),
        "response_mask": torch.ones(2, 2, dtype=torch.long),
    }
)
COUNTS = wb.engines.LossCounts(4.0, 2.0)


def opened(tiny: str, **settings: Any) -> Any:
    return wb.engines.local(tiny, device="cpu", **settings)


def test_all_weights_are_counted_where_all_are_trained(tiny: str) -> None:
    engine = opened(tiny)
    weights = 4 * 854_144
    _, parts = engine.memory_needed(100)
    assert parts["gradients"] == weights and parts["optimizer"] == 2 * weights
    assert parts["activations"] == 4 * LAYER * 4 * 100 and parts["logits"] == 2 * 4 * 512 * 100
    assert engine.checkpoint_bytes() == 3 * weights


def test_lora_counts_its_adapters_alone(tiny: str) -> None:
    engine = opened(tiny, lora_rank=8)
    # A and B of q, k, v, o in 4 layers: rank × (in + out)
    adapters = 4 * 4 * 8 * ((128 + 128) + 2 * (128 + 64) + (128 + 128))
    _, parts = engine.memory_needed(100)
    assert parts["gradients"] == adapters and parts["optimizer"] == 2 * adapters
    assert parts["activations"] == 4 * LAYER * 4 * 100
    assert engine.checkpoint_bytes() == 3 * adapters


def test_offloaded_moments_count_on_a_gpu_one_parameter_at_a_time(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, away = opened(tiny), opened(tiny, offload="optimizer")
    assert away.memory_needed(100) == engine.memory_needed(100)  # on the CPU there is nowhere else
    monkeypatch.setattr(type(away._model), "device", property(lambda _: torch.device("cuda")))
    (_, parts), (_, fewer) = engine.memory_needed(100), away.memory_needed(100)
    assert fewer == {**parts, "optimizer": 2 * 4 * 512 * 128}


@pytest.mark.slow
def test_a_micro_batch_has_no_more_tokens_than_the_batch(tiny: str) -> None:
    engine = opened(tiny, micro_batch_tokens=1000)
    few, budget, more = (engine.memory_needed(tokens)[1]["activations"] for tokens in (10, None, 5000))
    assert budget == more == 100 * few
    whole = opened(tiny, gradient_checkpointing=True).memory_needed(10)[1]["activations"]
    assert whole == (4 * 128 + LAYER) * 4 * 10
    assert engine.memory_needed(10**9)[1]["logits"] < engine.memory_needed(10**9)[1]["activations"]


def test_a_micro_batch_is_larger_on_a_gpu_unless_it_is_set() -> None:
    settings = wb.engines.LocalSettings()
    assert (settings.budget("cpu"), settings.budget("cuda")) == (4_096, 16_384)
    assert wb.engines.LocalSettings(micro_batch_tokens=7).budget("cuda") == 7
    with pytest.raises(SettingError, match=r"micro_batch_tokens; expected ≥ 1, or None; found 0"):
        wb.engines.LocalSettings(micro_batch_tokens=0)


def test_a_pass_is_as_large_as_memory_allows(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of what is free beside gradients and moments, as a power of two; on a CPU at most `PASS` bytes; from the first
    pass on the same."""
    engine, each = opened(tiny), 4 * LAYER * 4
    state = 3 * 4 * 854_144
    model, settings = engine._model, engine._settings
    sizes = [memory.pass_tokens(model, settings, "cuda", state + 2 * each * tokens + 2) for tokens in (0, 2000, 10**6)]
    assert sizes[0] == memory.LEAST and sizes[2] == 16_384 and sizes[1] in (1024, 2048)
    for free in (1.1, 0.95):  # a little more or less makes the same passes
        assert memory.pass_tokens(model, settings, "cuda", int(state + 2 * each * 1500 * free)) == 1024
    assert memory.pass_tokens(model, settings, "cuda", state // 4 + 2 * each * 2000 + 2, shards=4) == sizes[1]
    monkeypatch.setattr(memory, "PASS", 1000 * each)
    again = settings.replace(gradient_checkpointing=True, dtype="bfloat16")
    assert [memory.pass_tokens(model, kind, "cpu", 1 << 40) for kind in (settings, again)] == [512, 512]
    monkeypatch.setattr(memory, "available", lambda device: state + 2 * each * 600)
    assert engine._budget == 512 and engine.describe()["micro_batch_tokens"] is None  # another machine may have more
    monkeypatch.setattr(memory, "available", lambda device: 1 << 40)
    assert engine._budget == 512
    assert opened(tiny, micro_batch_tokens=77)._budget == 77


def test_logits_are_counted_a_chunk_at_a_time(tiny: str) -> None:
    engine = opened(tiny, micro_batch_tokens=10**6)
    assert engine.memory_needed()[1]["logits"] == 2 * CHUNK_BYTES


@pytest.mark.slow
def test_learning_asks_for_the_batch_that_it_has(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full micro-batch would not fit into what is free; this batch does, and one of too many tokens is refused by parts."""
    engine = opened(tiny, micro_batch_tokens=16_384)
    rows, counts = ROWS, COUNTS
    needed = sum(engine.memory_needed(12, measured=True)[1].values())
    assert needed < sum(engine.memory_needed()[1].values()) / 20
    monkeypatch.setattr(memory, "available", lambda device: needed - 1)
    told = r"gradients 3\.3 MiB, optimizer 6\.5 MiB, activations .* check_memory=False"
    with pytest.raises(OutOfMemory, match=told):
        engine.probe(rows, LikelihoodLoss(), counts)
    opened(tiny, micro_batch_tokens=16_384, check_memory=False).probe(rows, LikelihoodLoss(), counts)
    monkeypatch.setattr(memory, "available", lambda device: needed)
    engine.learn(rows, LikelihoodLoss(), counts)
    assert "optimizer" not in engine.memory_needed(12)[1]


def test_what_the_allocator_keeps_for_reuse_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a rollout a GPU's blocks are reserved and not allocated: learning takes them first."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 60 << 30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 15 << 30)
    assert memory.available(torch.device("cuda")) == 48 << 30


def test_an_estimate_alone_refuses_nothing() -> None:
    asked: list[bool] = []

    def needed(measured: bool) -> dict[str, int]:
        asked.append(measured)
        return {"activations": 90 if measured else 900}

    assert memory.preflight(torch.device("cpu"), 100, needed).startswith("measured 0.0 MiB more on cpu")
    assert asked == [False, True]
    assert memory.preflight(torch.device("cpu"), 10_000, needed).startswith("about")
    assert asked == [False, True, False]  # sure without measuring
    assert memory.preflight(torch.device("cpu"), 80, needed, refuses=False).startswith("measured")
    with pytest.raises(OutOfMemory, match=r"that are free, for actor, critic together; found activations"):
        memory.preflight(torch.device("cpu"), 80, needed, "actor, critic")


# --- estimates that cannot be made --------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        # 5 × 32 + (3 × 4 + 2 × 2) × 8 + 4 × 48; the last layer's MLP has 64
        ("gemma3n", 3 * 480 + 544),
        # heads of 16 in every other layer
        ("gemma4", 2 * 480 + 2 * 608),
    ],
)
def test_sizes_that_differ_by_layer_are_added_up(name: str, kept: int, tmp_path: Path) -> None:
    engine = wb.engines.local(make(name, tmp_path / name), device="cpu")
    assert engine.memory_needed(100)[1]["activations"] == kept * 4 * 100
    assert engine.learn(ROWS, LikelihoodLoss(), COUNTS).metrics["grad_norm"].result() > 0
    assert Snapshots().price(engine, 100).free.memory > 0


def test_what_a_configuration_does_not_say_is_read_off_the_weights(tiny: str) -> None:
    engine = opened(tiny)
    vars(engine._model.config)["intermediate_size"] = "wide"
    # inputs and outputs of q, k, v, o, gate, up and down
    layer = 256 + 192 + 192 + 256 + 3 * 512
    assert engine.memory_needed(100)[1]["activations"] == 4 * layer * 4 * 100
    engine.learn(ROWS, LikelihoodLoss(), COUNTS)


def test_an_estimate_that_raises_stops_nothing(
    tiny: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not learning, not what a stepper keeps, not the checks before a run."""
    engine = opened(tiny)

    def unknown(self: Any, *given: Any, **named: Any) -> Any:
        raise ZeroDivisionError("no such size")

    for name in ("memory_needed", "checkpoint_bytes", "snapshot_cost"):
        monkeypatch.setattr(type(engine), name, unknown)
    kept = Snapshots()
    kept.price(engine, 10)
    kept.take(engine)
    engine.learn(ROWS, LikelihoodLoss(), COUNTS)
    pipeline: Any = SimpleNamespace(learners=lambda: {"policy": engine})
    assert preflight._memory(pipeline, 100) == "unknown"
    assert (
        "the memory that learning takes is not known, and the work goes on: ZeroDivisionError: no such size"
        in caplog.text
    )
