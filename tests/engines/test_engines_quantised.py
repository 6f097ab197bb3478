"""A LoRA base in 4 or 8 bits: bitsandbytes' codes and values, the gradients of a decoded base, and all that an engine does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import workbench as wb
from workbench.base.errors import CheckpointError, EngineError, SettingError
from workbench.engines import FsdpSettings, LocalSettings, local
from workbench.engines.local_engine import learning, loading, lora, quantised
from workbench.engines.local_engine.learning import Optimizer
from workbench.engines.rehearsal import unmeasured
from workbench.testing.engines import EngineContract, LikelihoodLoss

pytest.importorskip("peft", reason="peft is not installed (the extra `peft`)")
CONTRACT = EngineContract()
KINDS = pytest.mark.parametrize("kind", quantised.KINDS)


class TestQuantisedBase(EngineContract):
    """The contract of engines, with adapters on a base in 4 bits."""

    @pytest.fixture(autouse=True)
    def _folder(self, folder: Path) -> None:
        self.folder = folder

    def make_engine(self, **settings: Any) -> Any:
        return local(self.folder, device="cpu", lora_rank=4, base_dtype="nf4", **settings)


@pytest.mark.parametrize("shape", [(48, 128), (64, 96), (33, 70), (2, 3)])
@KINDS
def test_codes_and_weights_are_those_of_bitsandbytes(kind: str, shape: tuple[int, int]) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    torch.manual_seed(0)
    layer = torch.nn.Linear(shape[1], shape[0])
    weight = layer.weight.detach().clone()
    weight[0, 0] = 0.0
    layer.weight.data.copy_(weight)
    model: Any = torch.nn.Sequential(layer)
    model.get_output_embeddings = lambda: None
    quantised.quantise(model, kind, "cpu")
    mine: Any = model[0]
    if kind == "int8":
        codes, scales, _ = bitsandbytes.functional.int8_vectorwise_quant(weight.half())
        assert torch.equal(mine.codes, codes) and torch.equal(mine.scales, scales)
        theirs = bitsandbytes.functional.int8_vectorwise_dequant(codes, scales)
    else:
        codes, state = bitsandbytes.functional.quantize_4bit(weight, quant_type="nf4", blocksize=quantised.BLOCK)
        assert torch.equal(mine.codes, codes.flatten()) and torch.equal(mine.scales, state.absmax)
        # its CPU kernel reads other blocks where a row is not whole blocks: as one row it is right
        flat = torch.ops.bitsandbytes.dequantize_4bit(
            codes, state.absmax, 64, "nf4", (1, weight.numel()), torch.float32
        )
        theirs = flat.view(shape)
    assert torch.equal(mine.weight, theirs)
    assert (mine.weight - weight).abs().max() < (0.16 if kind == "nf4" else 0.005) * weight.abs().max()


@KINDS
def test_gradients_are_those_of_a_base_of_decoded_weights(kind: str, folder: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, inject_adapter_in_model
    from transformers import AutoModelForCausalLM

    engine = local(folder, device="cpu", lora_rank=4, base_dtype=kind, lr=1e-2)
    batch = CONTRACT.batch(engine)
    for _ in range(2):  # B is 0 at first
        engine.learn(batch, LikelihoodLoss(), CONTRACT.counts(batch))
    plain: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, value in quantised.Weights(engine._model).items():
        if "lora_" not in name:
            plain.get_parameter(name.replace(".base_layer.", ".")).data.copy_(value)
    inject_adapter_in_model(LoraConfig(r=4, lora_alpha=32.0, target_modules=list(engine._settings.lora_targets)), plain)
    held = dict(plain.named_parameters())
    for name, value in lora.tensors(engine._model).items():
        held[name].data.copy_(value)
    loss = torch.zeros(())
    for row in range(len(batch)):
        seen, mask = batch["attention_mask"][row].bool(), batch["response_mask"][row].bool()
        ids = batch["input_ids"][row][seen]
        log_probs = torch.log_softmax(plain(ids[None]).logits[0, :-1], -1).gather(-1, ids[1:, None])[:, 0]
        loss = loss - batch["weight"][row] * log_probs[-int(mask.sum()) :].sum() / CONTRACT.counts(batch).tokens
    loss.backward()
    for name, found in engine.gradient(batch, LikelihoodLoss(), CONTRACT.counts(batch)).items():
        torch.testing.assert_close(found, held[name].grad, atol=2e-6, rtol=2e-4)
    merged = local(engine.save_merged(tmp_path / "merged"), device="cpu")
    found, expected = (one.compute_log_probs(batch)["log_probs"] for one in (merged, engine))
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=0)  # 16 bits
    sizes = {one.suffix: one.stat().st_size for one in (tmp_path / "merged").iterdir()}
    assert sizes[".safetensors"] < 3 * sum(one.numel() for one in merged._model.parameters())


@pytest.mark.slow
@KINDS
def test_what_an_engine_does_with_it(kind: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"device": "cpu", "lora_rank": 4, "base_dtype": kind, "lr": 1e-2}
    engine, plain = local(folder, **settings), local(folder, device="cpu", lora_rank=4)
    assert sum(one.nbytes for one in engine._model.buffers()) * (6 if kind == "nf4" else 3) < sum(
        one.nbytes for one in plain._model.parameters()
    )
    with monkeypatch.context() as patch:
        patch.setattr(loading, "_streamed", lambda *given: None)  # the whole model first
        state = local(folder, **settings)._model.state_dict()
    assert all(torch.equal(one, state[name]) for name, one in engine._model.state_dict().items())
    assert str(quantised.parameters(plain._model)) in repr(engine).replace(",", "")
    assert engine.describe()["base_dtype"] == kind and engine.weight_layout() == plain.weight_layout()
    batch = CONTRACT.batch(engine)
    reference, start = engine.reference(), engine.snapshot("replay")
    first = reference.compute_log_probs(batch)["log_probs"]
    codes = {name: one.clone() for name, one in engine._model.named_buffers()}
    learned = [engine.learn(batch, LikelihoodLoss(), CONTRACT.counts(batch)).metrics for _ in range(2)]
    assert torch.equal(reference.compute_log_probs(batch)["log_probs"], first)
    assert not torch.equal(engine.compute_log_probs(batch)["log_probs"], first)
    assert all(torch.equal(one, codes[name]) for name, one in engine._model.named_buffers())
    engine.restore(start)
    assert [engine.learn(batch, LikelihoodLoss(), CONTRACT.counts(batch)).metrics for _ in range(2)] == learned
    engine.save(tmp_path / "adapter")
    again = local(tmp_path / "adapter", device="cpu", base_dtype=kind)  # its rank is in the folder
    assert torch.equal(again.compute_log_probs(batch)["log_probs"], engine.compute_log_probs(batch)["log_probs"])
    sampler = local(folder, device="cpu")
    pair = wb.engines.paired(engine, sampler)
    pair.push()
    torch.testing.assert_close(
        sampler.compute_log_probs(batch)["log_probs"], engine.compute_log_probs(batch)["log_probs"], atol=1e-4, rtol=0
    )
    needed = [sum(one.memory_needed(4096, measured=True)[1].values()) for one in (engine, plain)]
    assert 0.8 < needed[0] / needed[1] < 1.25


@pytest.mark.slow
def test_adam_in_8_bits_is_bitsandbytes_and_goes_on_from_its_state_bit_for_bit(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    torch.manual_seed(0)
    named = {"large": torch.nn.Parameter(torch.randn(80, 64)), "small": torch.nn.Parameter(torch.randn(9))}
    theirs = [torch.nn.Parameter(one.detach().clone()) for one in named.values()]
    offloaded = {name: torch.nn.Parameter(one.detach().clone()) for name, one in named.items()}
    chosen: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "optimizer": "adamw8bit"}
    adam = bitsandbytes.optim.AdamW8bit(theirs, lr=1e-2, weight_decay=0.1)
    mine = Optimizer(named, LocalSettings(**chosen))
    away = Optimizer(offloaded, LocalSettings(**chosen, offload="optimizer"))
    monkeypatch.setattr(learning, "is_large", lambda size: True)
    for number in range(6):
        for one, *others in zip(named.values(), theirs, offloaded.values(), strict=True):
            one.grad = torch.sin(torch.arange(one.numel()).reshape(one.shape) * (number + 1.0))
            for other in others:
                other.grad = one.grad.clone()
        for optimizer in (adam, mine, away):
            optimizer.step()
        if number == 2:
            state, again = mine.tensors(), Optimizer(named, LocalSettings(**chosen))
            again.load({name: one.clone() for name, one in state.items()}, 3)
            mine = again
        if number == 3:
            mine.park()
            assert not mine.in_memory()
    for one, *others in zip(named.values(), theirs, offloaded.values(), strict=True):
        assert all(torch.equal(one, other) for other in others)
    assert {name for name, one in state.items() if one.dtype == torch.uint8} == {"large|state1", "large|state2"}
    with pytest.raises(CheckpointError, match="absmax2"):
        mine.check({name: one for name, one in state.items() if name != "large|absmax2"})
    with pytest.raises(CheckpointError, match=r"exp_avg of shape"):
        Optimizer(named, LocalSettings()).check(state)

    settings: dict[str, Any] = {
        "device": "cpu",
        "lora_rank": 16,
        "base_dtype": "nf4",
        "lr": 1e-2,
        "optimizer": "adamw8bit",
    }
    settings["lora_targets"] = ("q_proj", "up_proj", "down_proj")
    engine = local(folder, **settings)
    batch = CONTRACT.batch(engine)
    counts = CONTRACT.counts(batch)
    start = engine.snapshot("replay")
    engine.learn(batch, LikelihoodLoss(), counts)
    engine.save(tmp_path / "m")
    engine.save_state(tmp_path / "s")
    middle = engine.snapshot("disk", tmp_path)
    then = [engine.learn(batch, LikelihoodLoss(), counts).metrics for _ in range(2)]
    end, other = lora.tensors(engine._model), local(folder, **settings)
    kept = {name: one.clone() for name, one in end.items()}
    other.load_state(tmp_path / "m", tmp_path / "s")
    assert [other.learn(batch, LikelihoodLoss(), counts).metrics for _ in range(2)] == then
    engine.restore(start)
    engine.learn(batch, LikelihoodLoss(), counts)
    engine.restore(middle)
    assert [engine.learn(batch, LikelihoodLoss(), counts).metrics for _ in range(2)] == then
    for model in (engine._model, other._model):
        assert all(torch.equal(one, kept[name]) for name, one in lora.tensors(model).items())
    with pytest.raises(SettingError, match="optimizer of an FSDP engine"):
        FsdpSettings(optimizer="adamw8bit")


def test_it_is_refused_without_adapters_and_over_ranks(folder: Path) -> None:
    with pytest.raises(SettingError, match="base_dtype='nf4' without LoRA.*lora_rank=16"):
        local(folder, device="cpu", base_dtype="nf4")
    with pytest.raises(SettingError, match="base_dtype of an FSDP engine"):
        FsdpSettings(base_dtype="int8", lora_rank=4)
    with pytest.raises(EngineError, match="merged weights to vLLM with quantization='bitsandbytes'"):
        raise_in_vllm()


def raise_in_vllm() -> None:
    import asyncio

    from workbench.engines import VllmSettings
    from workbench.engines.vllm_server.engine import VllmEngine

    engine = object.__new__(VllmEngine)
    engine._settings = VllmSettings(engine_args={"quantization": "bitsandbytes"})
    asyncio.run(engine._step("begin"))


def test_experts_of_three_dimensions_stay_in_16_bits_and_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "num_hidden_layers": 2}
    config = AutoConfig.for_model("qwen3_moe", **sizes, **heads, num_experts=4, num_experts_per_tok=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    settings = LocalSettings(device="cpu", dtype="bfloat16", base_dtype="nf4", lora_rank=4)
    model = loading.load_model(tmp_path, settings)
    assert "mlp.experts.gate_up_proj" in caplog.text and "16 bits" in caplog.text
    codes = [one for name, one in model.named_buffers() if name.endswith(("codes", "scales"))]
    held = sum(one.nbytes for one in [*model.parameters(), *codes])
    assert unmeasured(config.to_dict(), settings, 64, "cpu").weights == pytest.approx(held, rel=0.02)
