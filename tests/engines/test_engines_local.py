"""The local engine keeps the contract, and what is its own: loading, stop texts, memory, schedules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import make_random_model

from workbench.base.errors import EngineError, OutOfMemory, SettingError
from workbench.dataproto import DataProto
from workbench.engines import Request, SamplingSettings, local
from workbench.engines.local_engine import memory as memory_module
from workbench.engines.local_engine.learning import learning_rate
from workbench.engines.local_engine.loading import auto_tokenizer
from workbench.engines.local_engine.memory import memory_errors
from workbench.engines.local_engine.scoring import micro_batches
from workbench.testing.engines import EngineContract, LikelihoodLoss


class TestLocalEngine(EngineContract):
    @pytest.fixture(autouse=True)
    def _folder(self, folder: Path) -> None:
        self.folder = folder

    def make_engine(self, **settings: Any) -> Any:
        return local(self.folder, device="cpu", **settings)


class TestLocalEngineInHalf(TestLocalEngine):
    """The same in float16, with a scaled loss."""

    rounding = 100.0

    def make_engine(self, **settings: Any) -> Any:
        return local(self.folder, device="cpu", **{"dtype": "float16", **settings})


def test_the_tiny_model_loads_by_plain_transformers(tiny: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny), AutoTokenizer.from_pretrained(tiny)
    assert model.config.model_type == "qwen2" and model.config.hidden_size // model.config.num_attention_heads == 32
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hi 12"}], tokenize=False, enable_thinking=True)
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert 500_000 < sum(parameter.numel() for parameter in model.parameters()) < 2_000_000


def test_bad_models_are_refused_by_name(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(EngineError, match="no model at"):
        local(tmp_path / "nowhere")
    with pytest.raises(EngineError, match=r"config\.json"):
        local(tmp_path)
    with pytest.raises(SettingError, match="did you mean 'lr'"):
        local(folder, lrr=1)
    with pytest.raises(SettingError, match="total_steps"):
        local(folder, schedule="cosine")


def test_a_tokenizer_is_what_its_file_says_whatever_class_its_configuration_names(tmp_path: Path) -> None:
    """DeepSeek's names `LlamaTokenizerFast`, by which transformers 5 loses the spaces and all that is not Latin."""
    import json

    import transformers
    from packaging.version import Version
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoTokenizer

    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=letters, special_tokens=["<end>"])
    made.train_from_iterator(["two words, é 中文 and 12"], trainer)
    made.save(str(tmp_path / "tokenizer.json"))
    told = {"tokenizer_class": "LlamaTokenizerFast", "eos_token": "<end>", "chat_template": "{{ messages }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(told))
    text = "two words, é 中文"
    wrong, right = AutoTokenizer.from_pretrained(tmp_path), auto_tokenizer(tmp_path)
    reads = Version(transformers.__version__) >= Version("5.24")  # auto_tokenizer goes when the floor is such a version
    assert (wrong.decode(wrong.encode(text)) == text) is reads
    assert right.decode(right.encode(text)) == text and right.encode(text) == made.encode(text).ids
    assert (right.eos_token, right.chat_template) == ("<end>", "{{ messages }}")


def test_tokenizer_and_model_must_fit(tmp_path: Path) -> None:
    import shutil

    small = make_random_model(tmp_path / "small", vocabulary=16)
    large = make_random_model(tmp_path / "large", vocabulary=32)
    shutil.copy(large / "tokenizer.json", small / "tokenizer.json")
    with pytest.raises(EngineError, match="do not fit.*16 token ids.*32 in the tokenizer"):
        local(small)


@pytest.mark.slow
def test_stop_texts_end_a_response(folder: Path) -> None:
    engine = local(folder)
    free = engine.sample_many([Request((1, 5), SamplingSettings(max_tokens=12, ignore_eos=True), 3)])[0]
    word = engine.tokenizer.decode([free.ids[4]])
    settings = SamplingSettings(max_tokens=12, ignore_eos=True, stop=(word,))
    cut = engine.sample_many([Request((1, 5), settings, 3)])[0]
    assert cut.finish_reason == "stop" and cut.ids == free.ids[: len(cut.ids)]
    assert engine.tokenizer.decode([cut.ids[-1]]) == word


def test_several_eos_ids_are_read_from_the_models_own_files(folder: Path, tmp_path: Path) -> None:
    import json
    import shutil

    copy = shutil.copytree(folder, tmp_path / "copy")
    config = json.loads((copy / "generation_config.json").read_text())
    (copy / "generation_config.json").write_text(json.dumps({**config, "eos_token_id": [2, 9]}))
    assert local(copy)._eos == {2, 9}


@pytest.mark.slow
def test_samples_follow_the_distribution(folder: Path) -> None:
    engine = local(folder)
    requests = [Request((1, 5, 9), SamplingSettings(max_tokens=1), seed) for seed in range(3000)]
    tokens = torch.tensor([sample.ids[0] for sample in engine.sample_many(requests)])
    with torch.no_grad():
        expected = torch.softmax(engine._model(input_ids=torch.tensor([[1, 5, 9]])).logits[0, -1], -1)
    found = torch.bincount(tokens, minlength=len(expected)) / len(tokens)
    assert (found - expected).abs().max() < 0.02


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [("learning_rate", "it is lr"), ("load_in_4bit", "base_dtype='nf4' with lora_rank"), ("lora_r", "it is lora_rank")],
)
def test_a_name_of_another_library_is_answered_with_the_one_here(theirs: str, ours: str) -> None:
    with pytest.raises(SettingError, match=ours):
        local("data/tiny-arith", **{theirs: 1})


def test_learning_rates() -> None:
    assert [learning_rate(1.0, step, "constant", 4, None) for step in (0, 3, 4, 99)] == [0.25, 1, 1, 1]
    assert learning_rate(1.0, 6, "cosine", 2, 10) == pytest.approx(0.5)
    assert learning_rate(1.0, 10, "cosine", 2, 10) == pytest.approx(0.0)


def test_micro_batches_cover_every_row_once() -> None:
    mask = torch.tril(torch.ones(6, 6, dtype=torch.long)).flip(0)
    batch = DataProto({"attention_mask": mask})
    for budget in (1, 7, 100):
        groups = micro_batches(None, batch, budget, packed=False)
        assert sorted(row for group in groups for row in group.tolist()) == list(range(6))
    assert len(micro_batches(None, batch, 1, packed=False)) == 6


@pytest.mark.slow
def test_too_little_memory_is_said_before_learning(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_module, "available", lambda device: 1000)
    with pytest.raises(OutOfMemory, match="activations.*lower micro_batch_tokens"):
        local(folder)._ready()


def test_torchs_own_memory_errors_are_translated() -> None:
    with (
        pytest.raises(OutOfMemory, match=r"learn with 4 rows.*lower micro_batch_tokens"),
        memory_errors("learn", "4 rows"),
    ):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
    with pytest.raises(RuntimeError, match="something else"), memory_errors("learn", "4 rows"):
        raise RuntimeError("something else")


@pytest.mark.slow
def test_gradient_checkpointing_changes_no_number(folder: Path) -> None:
    from workbench.testing.engines import LikelihoodLoss

    plain = TestLocalEngine()
    plain.folder = folder
    batch = plain.batch(local(folder))
    losses = [
        local(folder, gradient_checkpointing=flag).probe(batch, LikelihoodLoss(), plain.counts(batch)).metrics
        for flag in (False, True)
    ]
    assert losses[0]["grad_norm"].result() == pytest.approx(losses[1]["grad_norm"].result(), rel=1e-5)


@pytest.mark.slow
def test_an_engine_opens_checkpoints_and_runs(folder: Path, tmp_path: Path) -> None:
    engine = local(folder)
    engine.save(tmp_path / "run" / "checkpoints" / "step_000002" / "actor")
    assert "step_000002" not in repr(engine)
    for path in (tmp_path / "run", tmp_path / "run" / "checkpoints" / "step_000002"):
        assert local(path).sample_many([Request((1,), SamplingSettings(max_tokens=2), 0)])


@pytest.mark.slow
def test_weights_go_from_one_engine_to_another(folder: Path) -> None:
    one, two = local(folder, lr=1e-2), local(folder, lr=1e-2)
    batch = EngineContract().batch(one)
    for engine in (one, two):
        engine.learn(batch, LikelihoodLoss(), EngineContract.counts(batch))
    one.learn(batch, LikelihoodLoss(), EngineContract.counts(batch))
    weights, state = one.full_weights(), two.state_id
    assert torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])  # tied
    two.load_weights(weights, 7)
    assert two.version == 7 and two.state_id != state
    assert torch.equal(one.compute_log_probs(batch)["log_probs"], two.compute_log_probs(batch)["log_probs"])
    one.learn(batch, LikelihoodLoss(), EngineContract.counts(batch))
    assert torch.equal(weights["lm_head.weight"], two.full_weights()["lm_head.weight"])  # copies
    with pytest.raises(EngineError, match="load_weights; expected a tensor model.norm.weight of"):
        two.load_weights({name: tensor for name, tensor in weights.items() if name != "model.norm.weight"}, 8)


def test_a_reference_with_the_weights_of_its_files_is_there_once(tiny: str) -> None:
    engine, other = (local(tiny, device="cpu", lr=1e-2) for _ in range(2))
    reference = engine.reference()
    assert reference is engine.reference() is other.reference()
    assert local(tiny, device="cpu", lr=1e-3).reference() is not reference
    taught = other.snapshot()
    other.restore(taught)
    other.commit()  # from here on its weights may be others
    assert other.reference() is not reference and reference is engine.reference()
