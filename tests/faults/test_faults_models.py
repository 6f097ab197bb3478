"""Models that are not whole: tensors that a folder lacks or has too many of, NaN weights, and pushes that leave one out."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import workbench as wb
from workbench.base.errors import EngineError, NonFinite
from workbench.engines.pausing import Pausing
from workbench.engines.weights import weights_of

Weights = dict[str, torch.Tensor]
A_TENSOR = "model.layers.0.mlp.down_proj.weight"


def changed(source: str, folder: Path, change: Callable[[Weights], Weights]) -> Path:
    """A copy of a model with other tensors in its file."""
    shutil.copytree(source, folder)
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def without(name: str) -> Callable[[Weights], Weights]:
    return lambda weights: {key: one for key, one in weights.items() if key != name}


def test_F1_a_model_that_lacks_a_tensor_is_refused_by_name(tiny: str, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=f"expected every tensor of the model.*the files lack {A_TENSOR}"):
        wb.engines.local(changed(tiny, tmp_path / "a", without(A_TENSOR)))
    smaller = changed(tiny, tmp_path / "b", lambda weights: weights | {A_TENSOR: weights[A_TENSOR][:-1].clone()})
    with pytest.raises(EngineError, match=rf"{A_TENSOR} of shape \(127, 384\) in place of \(128, 384\)"):
        wb.engines.local(smaller)


def test_F1_tensors_that_the_configuration_leaves_out_are_refused_and_other_heads_are_not(
    tiny: str, tmp_path: Path
) -> None:
    bias = {"model.layers.0.mlp.down_proj.bias": torch.ones(128)}  # the files are of an architecture with biases
    with pytest.raises(EngineError, match="with no place in the model, model.layers.0.mlp.down_proj.bias"):
        wb.engines.local(changed(tiny, tmp_path / "a", lambda weights: weights | bias))
    head = {"v_head.summary.weight": torch.ones(1, 128)}  # a critic of another library
    assert wb.engines.local(changed(tiny, tmp_path / "b", lambda weights: weights | head))


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gpt_neox", "gemma2"])
def test_F1_other_architectures_open_as_transformers_saves_them(kind: str, tiny: str, tmp_path: Path) -> None:
    """Tied and untied heads, buffers, fused projections: what transformers itself has written is whole."""
    small = {"vocab_size": 512, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    more = {"n_positions": 64} if kind == "gpt2" else {"intermediate_size": 16, "num_key_value_heads": 2, "head_dim": 8}
    for tied in (True, False):
        folder = tmp_path / str(tied)
        config = AutoConfig.for_model(kind, **small, **more, tie_word_embeddings=tied, pad_token_id=0, eos_token_id=1)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(Path(tiny) / name, folder / name)
        assert wb.engines.local(folder).version == 0


def test_F1_a_reward_model_without_its_head_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="the files lack score.weight"):
        wb.engines.classifier(changed("data/tiny-reward-model", tmp_path / "a", without("score.weight")))


@pytest.mark.slow
def test_F1_a_checkpoint_that_lacks_a_tensor_is_refused_though_its_manifest_agrees(tiny: str, tmp_path: Path) -> None:
    engine = wb.engines.local(tiny)
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    engine.save(whole)
    engine.save_state(tmp_path / "state")
    with pytest.raises(EngineError, match=A_TENSOR):
        engine.load_state(changed(str(whole), torn, without(A_TENSOR)), tmp_path / "state")
    value = wb.engines.local(tiny).critic()
    value.save_state(tmp_path / "values")
    value.save(tmp_path / "critic")
    (tmp_path / "critic" / "value_head.safetensors").unlink()
    with pytest.raises(EngineError, match="expected value_head.safetensors"):
        value.load_state(tmp_path / "critic", tmp_path / "values")


@pytest.mark.slow
def test_F2_a_model_of_nan_gets_no_score(tiny: str, tmp_path: Path) -> None:
    broken = changed(tiny, tmp_path / "nan", lambda weights: weights | {A_TENSOR: weights[A_TENSOR] * float("nan")})
    rows = wb.rows("data/arith/train.parquet", limit=2)
    for temperature in (0.0, 1.0):
        with pytest.raises(NonFinite, match="log-probs are NaN or infinite; found in 2 of 2 rows"):
            wb.evaluate(broken, rows, temperature=temperature, max_tokens=4)


class Sampler(Pausing):
    """What vLLM and HTTP samplers share before a push."""

    def __init__(self, folder: str) -> None:
        self._folder, self._settings = folder, wb.engines.LocalSettings()


def test_C7_a_push_without_a_tensor_is_refused_before_it_is_sent(tiny: str) -> None:
    sampler, weights = Sampler(tiny), weights_of(wb.engines.local(tiny))
    shapes = {name: one.shape for name, one in weights.items()}
    sampler.check_whole(shapes)
    sampler.check_whole(without("lm_head.weight")(shapes))  # tied: the embeddings are it
    with pytest.raises(EngineError, match=f"the weights to push; expected a tensor {A_TENSOR} of shape .*no tensor"):
        sampler.check_whole(without(A_TENSOR)(shapes))
    with pytest.raises(EngineError, match=r"found shape \(127, 384\)"):
        sampler.check_whole(shapes | {A_TENSOR: weights[A_TENSOR][:-1].shape})


@pytest.mark.slow
def test_F4_a_resumed_run_says_which_rows_of_its_metrics_are_gone(tiny: str, tmp_path: Path) -> None:
    def trained(steps: int) -> wb.Run:
        pipe = wb.recipes.grpo(wb.engines.local(tiny), lambda response: len(response) / 9, group_size=2, max_tokens=4)
        rows = wb.rows("data/arith/train.parquet")
        return wb.train_blocking(
            pipe, rows, steps=steps, batch_size=2, run=tmp_path / "run", save_freq=1, resume="auto"
        )

    trained(4)
    file = tmp_path / "run" / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(line for line in lines if json.loads(line)["training/global_step"] not in (1, 3, 4)))
    assert any("lacks the rows of steps 1, 3–4" in note for note in trained(5).notes)
    file.unlink()
    assert any("lacks the rows of steps 1–5" in note for note in trained(6).notes)
