"""Learning measured on tensors without data: bytes by hand, real peaks of ranks, and what it leaves as it was."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.architectures import ARCHITECTURES, make
from support.models import make_shaped_model
from torch import distributed

import workbench as wb
from workbench.base.errors import EngineError
from workbench.engines.fsdp_engine.group import Group
from workbench.engines.rehearsal import Counting, Shape, sharded
from workbench.engines.settings import FsdpSettings


def test_storages_are_counted_while_they_live() -> None:
    with Counting(gpu=False) as seen:
        one = torch.zeros(10)
        view = one[2:]
        two = one @ torch.zeros(10, 4)
        assert seen.live == 40 + 16 and max(seen.series) == 40 + 160 + 16
        del one
        assert seen.live == 40 + 16  # the view holds it
        del view
        assert seen.live == 16
        two.untyped_storage().resize_(0)
        assert seen.live == 0
        ids = torch.arange(5)
        assert ids.tolist() == [0, 1, 2, 3, 4] and seen.live == 40  # whole numbers are real
        assert two.sum().item() == 1.0
    assert not seen.live - 40


def test_shared_heads_are_counted_once_for_each_query_on_a_gpu() -> None:
    lived = []
    for gpu in (False, True):
        with Counting(gpu) as seen:
            query, key, value = (torch.zeros(1, heads, 8, 2) for heads in (4, 1, 1))
            out = torch.nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)
            lived.append(seen.live)
            assert out.shape == query.shape
    assert lived[1] - lived[0] == 2 * 3 * 8 * 2 * 4  # keys and values, three heads more, tokens, width, bytes


def test_micro_batches_have_the_tokens_of_the_rows() -> None:
    assert Shape.of(1000, 300) == Shape(3, 300, True)
    assert Shape.of(1000, 300, 600) == Shape(2, 300, False)
    assert Shape.of(100, 300) == Shape(1, 300, True)


@pytest.mark.slow
def test_layers_that_need_others_are_measured_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 3n's last layers take keys of earlier ones: three or four of six are no model."""
    _, shape = ARCHITECTURES["gemma3n"]
    deep = {"num_hidden_layers": 6, "intermediate_size": [48] * 6, "activation_sparsity_pattern": [0.5] + [0.0] * 5}
    deep |= {"num_kv_shared_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 3}
    monkeypatch.setitem(ARCHITECTURES, "deep", ("Gemma3nTextConfig", {**shape, **deep}))
    engine = wb.engines.local(make("deep", tmp_path / "deep"), device="cpu")
    weights = sum(one.nbytes for one in engine._model.parameters())
    found = sharded(tmp_path / "deep", FsdpSettings(), 1, Shape(1, 8), gpu=False)
    assert found.weights >= weights == found.gradients and found.optimizer >= 2 * weights


@pytest.mark.long
@pytest.mark.slow
def test_a_deep_model_is_that_of_two_shallow_ones(tiny: str) -> None:
    """Twelve layers, continued from three and four, are what twelve layers take; sizes by hand. Nothing is left behind."""
    config: dict[str, Any] = {
        **{"model_type": "llama", "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 12},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128, "tie_word_embeddings": False},
    }
    state, hook = torch.get_rng_state(), sys.excepthook
    settings, shape = FsdpSettings(micro_batch_tokens=256), Shape.of(256, 64)
    found = sharded(config, settings, 2, shape, gpu=True)
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 256 + 2 * 64
    assert found.parameters == 12 * layer + 64 + 2 * 128 * 64
    assert found.gradients == found.parameters * 4 // 2
    import workbench.engines.rehearsal as module

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SHALLOW", (3, 12))
        module._sharded.cache_clear()
        whole = sharded(config, settings, 2, shape, gpu=True)
    assert found.learning == pytest.approx(whole.learning, rel=0.01) and found.scoring == pytest.approx(
        whole.scoring, rel=0.01
    )
    away = sharded(config, settings.replace(offload="optimizer"), 2, shape, gpu=True)
    assert away.learning == found.learning - found.optimizer and away.optimizer == 0
    assert torch.equal(torch.get_rng_state(), state) and not distributed.is_initialized()
    assert sys.excepthook is hook


def test_a_process_group_in_use_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    with pytest.raises(EngineError, match="in use in this process"):
        sharded({"model_type": "llama"}, FsdpSettings(lr=0.5), 3, Shape.of(64, 64), gpu=False)


@pytest.mark.slow
def test_a_local_engine_is_measured_as_it_is(tiny: str) -> None:
    """Tied weights count once; trained ones alone have gradients; the engine's own numbers do not change."""
    engine = wb.engines.local(tiny, device="cpu", micro_batch_tokens=256)
    _, parts = engine.memory_needed(256, measured=True)
    assert parts["gradients"] == 4 * 854_144
    assert 0 <= parts["optimizer"] - 2 * 4 * 854_144 < 1024
    _, estimate = engine.memory_needed(256)
    assert 0.5 < parts["activations"] / (estimate["activations"] + estimate["logits"]) < 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "float32"},
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "gradient_checkpointing": True, "offload": "optimizer"},
        {"dtype": "bfloat16", "lora_rank": 16},
        {"dtype": "bfloat16", "lora_rank": 16, "base_dtype": "bfloat16", "gradient_checkpointing": True},
    ],
    ids=str,
)
def test_the_estimate_of_a_card_is_what_a_rehearsal_measures(settings: dict[str, Any]) -> None:
    """Wide layers of four; the whole table of sizes is in `tests/benchmarks/fitting.py`."""
    said, took = bench().beside_a_rehearsal({**bench().WIDE, "num_hidden_layers": 4}, 2048, **settings)
    assert said.weights == pytest.approx(took.weights, rel=0.001)
    assert said.gradients == took.gradients and said.optimizer == pytest.approx(took.optimizer, rel=0.001)
    assert said.learning == pytest.approx(took.learning, rel=0.1)
    assert said.scoring == pytest.approx(took.scoring, rel=0.15)


def test_attention_kernels_are_asked_for_where_the_engine_runs(tiny: str) -> None:
    """A head node without flash attention can drive: it comes as far as its workers."""

    def start() -> Any:
        raise EngineError("there is no worker here")

    with pytest.raises(EngineError, match="no worker here"):
        wb.engines.fsdp(tiny, on=Group(start), attn_implementation="flash_attention_2")


def bench() -> Any:
    place = Path(__file__).parents[1] / "benchmarks" / "fitting.py"
    spec = importlib.util.spec_from_file_location("benchmark_fitting", place)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.long
def test_real_ranks_take_what_was_measured(tmp_path: Path) -> None:
    """Within a tenth: a 63M model, trained whole on two ranks, and an adapter with layers recomputed on one."""
    fitting = bench()
    model = make_shaped_model(tmp_path / "model", "60m")
    for name in ("full, 2 ranks", "adapter, recomputed, 1 rank"):
        said, took = fitting.measured(model, 128, 4, **fitting.CASES[name])[:2]
        assert said == pytest.approx(took, rel=0.1), name
