"""LoRA: adapters alone learn, are saved and come back; the reference is the base; merged weights are the adapted model."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb
from workbench.base.errors import EngineError, SettingError
from workbench.engines.local_engine import loading
from workbench.rewards import Reward
from workbench.testing.engines import LikelihoodLoss

pytest.importorskip("peft", reason="peft is not installed (the extra `peft`)")


def varied(response: str) -> float:
    return (sum(map(ord, response)) % 5) / 4


def make(tiny: str, **settings: Any) -> tuple[wb.Pipeline, wb.datasets.Rows, Any]:
    engine = wb.engines.local(tiny, lr=1e-2, device="cpu", lora_rank=4, **settings)
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256, limit=8)
    pipe = wb.recipes.grpo(engine, Reward(varied, in_process=True), group_size=2, max_tokens=12)
    return pipe, rows, engine


@pytest.mark.slow
def test_it_starts_as_the_base_and_only_adapters_learn(tiny: str) -> None:
    pipe, rows, engine = make(tiny)
    base = wb.engines.local(tiny, device="cpu")
    batch = wb.Stepper(pipe, rows.batch(4)).run(until="rollout").batch
    plain = base.compute_log_probs(batch)["log_probs"]
    torch.testing.assert_close(engine.compute_log_probs(batch)["log_probs"], plain, atol=1e-5, rtol=1e-5)
    frozen = {name: t.clone() for name, t in engine._model.state_dict().items() if "lora_" not in name}
    s = wb.Stepper(pipe, rows.batch(4)).run()
    assert s.trace.metrics["actor/grad_norm"] > 0
    assert all(torch.equal(engine._model.state_dict()[name], t) for name, t in frozen.items())
    assert set(engine.snapshot()["weights"]) == {name for name in engine._model.state_dict() if "lora_" in name}
    assert not torch.equal(engine.compute_log_probs(batch)["log_probs"], plain)
    # the reference is the base still, without a copy of it
    reference = pipe["ref_log_prob"]._model
    assert reference._engine is engine
    torch.testing.assert_close(reference.compute_log_probs(batch)["log_probs"], plain, atol=1e-5, rtol=1e-5)
    assert all(p.requires_grad == ("lora_" in name) for name, p in engine._model.named_parameters())


@pytest.mark.slow
def test_an_adapter_is_saved_and_loaded_and_merged(tiny: str, tmp_path: Path) -> None:
    pipe, rows, engine = make(tiny)
    batch = wb.Stepper(pipe, rows.batch(4)).run().batch
    now = engine.compute_log_probs(batch)["log_probs"]
    engine.save(tmp_path / "adapter")
    files = {path.name for path in (tmp_path / "adapter").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= files and "model.safetensors" not in files
    again = wb.engines.local(tmp_path / "adapter", device="cpu")
    assert torch.equal(again.compute_log_probs(batch)["log_probs"], now)
    merged = wb.engines.local(engine.save_merged(tmp_path / "merged"), device="cpu")
    torch.testing.assert_close(merged.compute_log_probs(batch)["log_probs"], now, atol=1e-4, rtol=1e-4)
    assert not [name for name in merged.snapshot()["weights"] if "lora" in name or "base_layer" in name]
    whole = engine.full_weights()
    assert whole.keys() == merged.full_weights().keys()
    assert all(torch.equal(tensor, merged.full_weights()[name]) for name, tensor in whole.items())
    with pytest.raises(EngineError, match="load_weights.*base_layer"):
        again.load_weights(whole, 1)
    # and by peft itself, from the same folder
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny), tmp_path / "adapter").eval()
    ids = batch["input_ids"][:1][:, batch["attention_mask"][0].bool()]
    ours = engine._model(input_ids=ids).logits
    torch.testing.assert_close(theirs(input_ids=ids).logits, ours, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_a_run_with_lora_resumes_and_replays_exactly(tiny: str, tmp_path: Path) -> None:
    pipe, rows, engine = make(tiny)
    quiet = wb.train_blocking(pipe, rows, steps=4, batch_size=4, run=tmp_path / "quiet", trackers=())
    first, rows, _ = make(tiny)
    wb.train_blocking(first, rows, steps=2, batch_size=4, run=tmp_path / "r", trackers=())
    second, rows, other = make(tiny)
    run = wb.train_blocking(second, rows, steps=4, batch_size=4, run=tmp_path / "r", trackers=(), resume="auto")
    one, two = engine.snapshot()["weights"], other.snapshot()["weights"]
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert run.rows[-1]["actor/pg_loss"] == quiet.rows[-1]["actor/pg_loss"]
    size = sum(
        path.stat().st_size for path in (run.path / "checkpoints" / "step_000004" / "actor").glob("*.safetensors")
    )
    assert size < 200_000  # the model has 3.4 MB
    replayed = quiet.engine(3).snapshot()["weights"]
    again = run.engine(3).snapshot()["weights"]
    assert all(torch.equal(replayed[name], again[name]) for name in replayed)
    assert wb.evaluate(run, rows, max_tokens=8).prompts == 8


def test_layers_that_are_not_there(tiny: str) -> None:
    with pytest.raises(EngineError, match="adding LoRA adapters"):
        wb.engines.local(tiny, device="cpu", lora_rank=4, lora_targets=("nothing",))


def test_an_adapter_on_an_embedding_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="names of linear layers.*found 'embed_tokens', a table of embeddings"):
        wb.engines.local("data/tiny-arith", lora_rank=2, lora_targets=("q_proj", "embed_tokens"))


def test_a_frozen_base_in_bfloat16_takes_half_and_gives_the_numbers_of_autocast(tiny: str) -> None:
    pipe, rows, _ = make(tiny)
    batch = wb.Stepper(pipe, rows.batch(4)).run(until="rollout").batch
    count, counts = len(batch), wb.engines.LossCounts(float(batch["response_mask"].sum()), float(len(batch)))
    batch = batch.union(wb.DataProto({"weight": torch.linspace(-1, 1, count), "row": torch.arange(count)}))
    adapters: dict[str, Any] = {"lora_rank": 4}
    for more in (adapters, {}):
        whole, half = (
            wb.engines.local(tiny, device="cpu", dtype=kind, base_dtype=base, lr=1e-2, **more)
            for kind, base in (("bfloat16", "float32"), ("auto", "bfloat16"))
        )
        frozen = [engine if more else engine.reference()._engine for engine in (whole, half)]
        sizes = [
            sum(p.nbytes for p in one._model.parameters() if p.dim() > 1 and not p.requires_grad) for one in frozen
        ]
        rows = half._model.get_input_embeddings().weight.nbytes
        assert sizes[1] - rows == (sizes[0] - rows) // 2
        for _ in range(2):
            found = [engine.learn(batch, LikelihoodLoss(), counts).metrics for engine in (whole, half)]
            assert found[0] == found[1]
        for one, other in ((whole, half), (whole.reference(), half.reference())):
            assert torch.equal(one.compute_log_probs(batch)["log_probs"], other.compute_log_probs(batch)["log_probs"])
    assert half.describe()["base_dtype"] == "bfloat16" and "base_dtype" not in whole.describe()
    with pytest.raises(
        SettingError, match="base_dtype='bfloat16'; expected dtype 'auto' or 'bfloat16'; found 'float32'"
    ):
        wb.engines.LocalSettings(base_dtype="bfloat16", dtype="float32")


@pytest.mark.parametrize("base_dtype", ["bfloat16", "float16"])
def test_a_base_is_halved_before_it_goes_to_its_device(
    tiny: str, monkeypatch: pytest.MonkeyPatch, base_dtype: str
) -> None:
    """28 GB of a 7B model in float32 do not fit a card of 24 GB, not even for a moment."""
    plain, kinds = torch.nn.Module.to, list[set[torch.dtype]]()

    def moved(module: torch.nn.Module, *given: Any, **named: Any) -> Any:
        if hasattr(module, "get_input_embeddings"):
            kinds.append({one.dtype for name, one in module.named_parameters() if "base_layer.weight" in name})
        return plain(module, *given, **named)

    monkeypatch.setattr(torch.nn.Module, "to", moved)
    wb.engines.local(tiny, device="cpu", lora_rank=4, base_dtype=base_dtype, self_check=False)
    assert kinds and all(one == {getattr(torch, base_dtype)} for one in kinds)


@pytest.mark.parametrize("base_dtype", ["bfloat16", "float16"])
def test_the_base_of_a_folder_of_adapters_is_never_in_float32(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base_dtype: str
) -> None:
    opened = partial(wb.engines.local, device="cpu", base_dtype=base_dtype, self_check=False)
    opened(tiny, lora_rank=4).save(tmp_path / "adapters")
    with monkeypatch.context() as patch:
        patch.setattr(loading, "_streamed", lambda *given: None)
        expected = opened(tmp_path / "adapters")._model.state_dict()
    monkeypatch.setattr(loading, "pretrained", None)  # reads a whole model
    found = opened(tmp_path / "adapters")._model.state_dict()
    assert found.keys() == expected.keys()
    for name, one in found.items():
        assert one.dtype == expected[name].dtype and torch.equal(one, expected[name]), name
