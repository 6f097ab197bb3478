"""A run's model taken home: merged, as an adapter, as GGUF; other libraries open it and answer as the engine does."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb
from workbench.base import progress
from workbench.base.errors import EngineError, RunError, SettingError
from workbench.engines import exporting
from workbench.engines.local_engine import lora, quantised
from workbench.rewards import Reward

PROMPTS = ["12+30?", "7+5?", "40+2?", "1+1?"]
QWEN2 = next(key[0] for key, name in exporting.SPLITTERS.items() if name == "qwen2")


def varied(response: str) -> float:
    return (sum(map(ord, response)) % 5) / 4


def trained(model: str | Path, folder: Path, **settings: Any) -> wb.Run:
    """A run of three steps whose updates are large enough to change answers; the first step has no checkpoint."""
    engine = wb.engines.local(model, lr=1e-2, device="cpu", **settings)
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256, limit=8)
    pipe = wb.recipes.grpo(engine, Reward(varied, in_process=True), group_size=2, max_tokens=8)
    plan: dict[str, Any] = {"steps": 3, "batch_size": 4, "save_freq": 0, "trace_freq": 1, "trackers": ()}
    return wb.train_blocking(pipe, rows, run=folder, **plan)


@pytest.fixture(scope="module")
def full(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> wb.Run:
    return trained(tiny, tmp_path_factory.mktemp("full") / "run")


@pytest.fixture(scope="module")
def adapted(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> wb.Run:
    pytest.importorskip("peft", reason="peft is not installed (the extra `peft`)")
    return trained(tiny, tmp_path_factory.mktemp("adapted") / "run", lora_rank=4)


def answers(engine: Any) -> list[str]:
    return list(engine.generate(PROMPTS, max_tokens=8))


def by_transformers(model: Any, tokenizer: Any) -> list[str]:
    """Greedy answers of a transformers model, by its own tokenizer."""
    texts = []
    for prompt in PROMPTS:
        chat = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        said = model.eval().generate(
            ids["input_ids"], do_sample=False, max_new_tokens=8, eos_token_id=tokenizer.eos_token_id
        )
        texts.append(tokenizer.decode(said[0, ids["input_ids"].shape[1] :], skip_special_tokens=True))
    return texts


def opened(folder: Path, **how: Any) -> list[str]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **how)
    return by_transformers(model, AutoTokenizer.from_pretrained(folder, **how))


@pytest.mark.slow
def test_merged_weights_are_base_and_adapter_and_open_in_transformers(
    adapted: wb.Run, tiny: str, tmp_path: Path
) -> None:
    engine = adapted.engine(3)
    folder = adapted.save(tmp_path / "new" / "merged")
    there = wb.engines.local(folder, device="cpu").full_weights()
    assert all(torch.equal(one, there[name]) for name, one in engine.full_weights().items())
    assert opened(folder) == answers(engine) != answers(wb.engines.local(tiny, device="cpu"))
    half = wb.engines.local(adapted.save(tmp_path / "half", dtype="bfloat16"), device="cpu").full_weights()
    assert all(torch.equal(half[name], one.bfloat16().float()) for name, one in there.items())
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    assert not list(tmp_path.glob("**/.*")), "nothing is left half-written"


@pytest.mark.slow
@pytest.mark.parametrize(("base", "dtype"), [("bfloat16", torch.float32), ("nf4", torch.float16)])
def test_a_base_kept_in_fewer_bits_is_merged_as_it_was_trained(
    base: str, dtype: torch.dtype, tiny: str, tmp_path: Path
) -> None:
    pytest.importorskip("peft", reason="peft is not installed (the extra `peft`)")
    from safetensors.torch import load_file

    run = trained(tiny, tmp_path / "run", lora_rank=4, base_dtype=base)
    engine = run.engine(3)
    mine = lora.merged(engine._model, quantised.Weights(engine._model), torch.float32)
    for folder in (run.save(tmp_path / "merged"), engine.save_merged(tmp_path / "same")):
        saved = load_file(folder / "model.safetensors")
        assert {one.dtype for one in saved.values()} == {dtype} and "lm_head.weight" not in saved, "tied: kept once"
        assert all(torch.equal(one, mine[name].to(dtype)) for name, one in saved.items())
        assert json.loads((folder / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    assert opened(tmp_path / "merged") == answers(engine)


@pytest.mark.slow
def test_an_adapter_opens_in_peft_and_any_step_is_saved(adapted: wb.Run, tiny: str, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert adapted.checkpoints == [3]
    for step in (1, None):
        folder = adapted.save(tmp_path / f"step {step}", "adapter", step=step)
        theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny), folder)
        assert by_transformers(theirs, AutoTokenizer.from_pretrained(folder)) == answers(adapted.engine(step or 3))
    names = {path.name for path in (tmp_path / "step 1").iterdir()}
    assert {
        "adapter_config.json",
        "adapter_model.safetensors",
        "tokenizer.json",
    } <= names and "model.safetensors" not in names


@pytest.mark.slow
def test_a_whole_model_is_its_checkpoint(full: wb.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "AFTER", 0.0)
    lines = list[str]()
    with progress.shown_by(lambda *line: lines.append(line[0])):
        saved = full.save(tmp_path / "a") / "model.safetensors"
    assert lines[0].startswith("saving the model"), "weights of gigabytes are not written in silence"
    kept = full.checkpoint() / "actor" / "model.safetensors"
    assert hashlib.sha256(saved.read_bytes()).digest() == hashlib.sha256(kept.read_bytes()).digest()
    assert opened(full.save(tmp_path / "first", step=1)) == answers(full.engine(1))
    with pytest.raises(EngineError, match="form='merged'"):
        full.save(tmp_path / "b", "adapter")
    assert not (tmp_path / "b").exists() and not list(tmp_path.glob(".*"))


def test_what_cannot_be_saved_is_refused_before_anything_is_written(full: wb.Run, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "notes").write_text("mine")
    refused: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (SettingError, "did you mean 'merged'", {"form": "merge"}),
        (
            SettingError,
            "not a dtype of form 'gguf'; expected one of f32, f16, bf16, q8_0",
            {"form": "gguf", "dtype": "q4_k"},
        ),
        (SettingError, "float32, bfloat16, float16", {"dtype": "q8_0"}),
        (RunError, "restor", {"step": 77}),
    ]
    for error, said, asked in refused:
        with pytest.raises(error, match=said):
            full.save(tmp_path / "new", **asked)
    with pytest.raises(RunError, match="exists; expected a new or an empty folder"):
        full.save(tmp_path / "there")
    assert [path.name for path in tmp_path.rglob("*")] == ["there", "notes"]


def test_numbers_that_float16_cannot_hold_are_refused() -> None:
    large = torch.tensor([1.0, -7e4])
    with pytest.raises(EngineError, match=r"w in float16; expected numbers up to 65504; found 70000; take bfloat16"):
        exporting._cast("w", large, "float16")
    assert exporting._cast("w", large, "bfloat16").dtype == torch.bfloat16


# --- GGUF ------------------------------------------------------------------------------------------


def splitting_as_qwen(source: Path, folder: Path) -> Path:
    """A copy of the tiny model whose tokenizer splits texts in a way that GGUF has a name for."""
    shutil.copytree(source, folder)
    table = json.loads((folder / "tokenizer.json").read_text())
    table["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = QWEN2
    (folder / "tokenizer.json").write_text(json.dumps(table))
    return folder


def of_kind(kind: str, source: Path, folder: Path) -> Path:
    """A model of random weights of an architecture, with the tokenizer of `source`."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": 484, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 128 if kind == "qwen3" else 16, "max_position_embeddings": 128, "eos_token_id": 2, "initializer_range": 0.4,
    }  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(source)
    torch.manual_seed(3)
    made = {"llama": (LlamaForCausalLM, LlamaConfig), "qwen3": (Qwen3ForCausalLM, Qwen3Config)}[kind]
    made[0](made[1](**sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen2", "llama", "qwen3"])
def test_gguf_has_our_weights_and_gives_our_answers(kind: str, tiny: str, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="gguf is not installed (the extra `gguf`)")
    model = splitting_as_qwen(Path(tiny), tmp_path / "qwen2")
    if kind != "qwen2":
        model = of_kind(kind, model, tmp_path / kind)
    engine = wb.engines.local(model, device="cpu")
    arch = gguf.MODEL_ARCH[exporting.ARCHITECTURES[kind]]
    names = gguf.get_tensor_name_map(arch, 4)
    ours = {names.get_name(name, (".weight", ".bias")): one for name, one in engine.full_weights().items()}
    for dtype, distance in {"f32": 0.0, "f16": 2**-11, "bf16": 2**-8, "q8_0": 1 / 254 + 2**-11}.items():
        exporting.write_form(model, tmp_path / dtype, "gguf", dtype, "m", "float32")
        (file,) = (tmp_path / dtype).iterdir()
        read = gguf.GGUFReader(file)
        assert {one.name for one in read.tensors} <= ours.keys() and file.name == f"m-{dtype.upper()}.gguf"
        for one in read.tensors:
            values = torch.from_numpy(gguf.quants.dequantize(one.data, one.tensor_type).copy())
            mine = ours[one.name]
            assert values.shape == mine.shape and (one.tensor_type.name == "F32") == (mine.dim() == 1 or dtype == "f32")
            if kind == "llama" and one.name.endswith(("attn_q.weight", "attn_k.weight")):
                heads = 4 if "attn_q" in one.name else 2
                mine = mine.view(heads, 2, -1, mine.shape[-1]).transpose(1, 2).reshape(mine.shape)
            assert (values - mine).abs().max() <= distance * mine.abs().max() * 1.001, one.name
        if dtype == "f32" or (kind == "qwen2" and dtype != "bf16"):  # random weights have answers that rounding changes
            assert opened(tmp_path / dtype, gguf_file=file.name) == answers(engine), dtype


@pytest.mark.slow
def test_a_run_is_saved_as_gguf_with_its_tokenizer(tiny: str, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="gguf is not installed (the extra `gguf`)")
    run = trained(splitting_as_qwen(Path(tiny), tmp_path / "base"), tmp_path / "run", lora_rank=4)
    file = run.save(tmp_path / "mine", "gguf", dtype="f16", step=1)
    assert file == tmp_path / "mine" / "mine-F16.gguf" and list(file.parent.iterdir()) == [file]
    read = gguf.GGUFReader(file)
    table = json.loads((tmp_path / "base" / "tokenizer.json").read_text())["model"]
    value = {name: field.contents() for name, field in read.fields.items()}
    assert value["tokenizer.ggml.pre"] == "qwen2" and value["tokenizer.ggml.eos_token_id"] == 2
    assert value["tokenizer.ggml.merges"] == [" ".join(pair) for pair in table["merges"]]
    assert [value["tokenizer.ggml.tokens"].index(one) for one in ("<|im_end|>", "an")] == [2, table["vocab"]["an"]]
    assert value["tokenizer.chat_template"] == (tmp_path / "base" / "chat_template.jinja").read_text()
    assert opened(file.parent, gguf_file=file.name) == answers(run.engine(1))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "gemma2"}, "expected llama, qwen2, qwen3, without sliding-window attention; found gemma2"),
        ({"use_sliding_window": True}, "without sliding-window attention; found qwen2 with use_sliding_window"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "found dynamic"),
    ],
)
def test_what_gguf_cannot_hold_is_refused(change: dict[str, Any], said: str, tiny: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="gguf is not installed (the extra `gguf`)")
    with pytest.raises(
        EngineError, match="the tokenizer in a GGUF file; expected byte-level BPE that splits texts as gpt-2, "
    ):
        exporting.write_gguf(Path(tiny), tmp_path / "m.gguf", "f16")
    model = splitting_as_qwen(Path(tiny), tmp_path / "m")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(EngineError, match=said):
        exporting.write_gguf(model, tmp_path / "m.gguf", "f16")


@pytest.mark.slow
@pytest.mark.skipif("WORKBENCH_REAL_MODEL" not in os.environ, reason="WORKBENCH_REAL_MODEL names no folder of a model")
def test_the_real_model_keeps_its_answers_as_gguf(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="gguf is not installed (the extra `gguf`)")
    real_model = Path(os.environ["WORKBENCH_REAL_MODEL"])
    engine = wb.engines.local(real_model, device="cpu")
    for dtype in ("f16", "q8_0"):
        exporting.write_form(real_model, tmp_path / dtype, "gguf", dtype, "m", "float32")
        assert opened(tmp_path / dtype, gguf_file=f"m-{dtype.upper()}.gguf") == answers(engine)
