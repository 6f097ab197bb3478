"""The self-check at load: a way of computing that is wrong is not used, or refused where it is asked for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.architectures import ARCHITECTURES, make
from transformers import AutoModelForCausalLM

from workbench.base.errors import EngineError
from workbench.dataproto import DataProto
from workbench.engines import Request, SamplingSettings, local
from workbench.engines.local_engine import caches, forward, scoring, selfcheck
from workbench.testing.engines import EngineContract, LikelihoodLoss

Folder = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Folder of a small model by the name of its architecture."""
    made: dict[str, Path] = {}

    def find(name: str) -> Path:
        if name not in made:
            made[name] = make(name, tmp_path_factory.mktemp(name))
        return made[name]

    return find


def rows() -> DataProto:
    """Four rows in two groups."""
    prompts = (tuple(range(10, 30)), (5, 6, 7))
    made = [(prompts[number // 2], (30 + number, 40, 41, 42 + number)[: 2 + number]) for number in range(4)]
    return selfcheck.batch_of(made)


def own(path: Path, batch: DataProto) -> torch.Tensor:
    """[B, T] log-probs by the model as transformers opens it, row by row."""
    model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True).eval()
    found = torch.zeros(batch["response_mask"].shape)
    for row, (ids, seen) in enumerate(zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True)):
        count = int(batch["response_mask"][row].sum())
        with torch.no_grad():
            log_probs = torch.log_softmax(model(input_ids=ids[seen][None]).logits[0, -count - 1 : -1], -1)
        found[row, :count] = log_probs.gather(-1, ids[seen][-count:, None])[:, 0]
    return found


@pytest.mark.slow
def test_a_seeded_wrong_scale_is_refused(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(forward._FACTORS, "logits_scaling", lambda value: 1.03 / value)
    with pytest.raises(EngineError, match=r"GraniteForCausalLM.*padded: 0\.\d+.*head='auto'"):
        local(folder("granite"), head="linear")
    engine = local(folder("granite"))
    assert "own head" in repr(engine)
    assert torch.allclose(engine.compute_log_probs(rows())["log_probs"], own(folder("granite"), rows()), atol=1e-4)


def test_what_is_wrong_on_every_path_is_refused(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    right = scoring.outputs

    def wrong(*given: Any) -> dict[str, torch.Tensor]:
        return {name: 1.01 * one for name, one in right(*given).items()}

    monkeypatch.setattr(scoring, "outputs", wrong)
    with pytest.raises(EngineError, match=r"LlamaForCausalLM.*found padded: 0\.\d+; padded, own head: 0\.\d+; set"):
        local(folder("llama"))


@pytest.mark.slow
def test_a_head_of_its_own_is_found(folder: Folder, tmp_path: Path) -> None:
    path = Path(shutil.copytree(folder("llama"), tmp_path / "own"))
    (path / "modeling_own.py").write_text(
        "from transformers import LlamaForCausalLM\n\n\n"
        "class OwnForCausalLM(LlamaForCausalLM):\n"
        "    def forward(self, *given, **named):\n"
        "        found = super().forward(*given, **named)\n"
        "        found.logits = found.logits + found.logits.sin()\n"
        "        return found\n"
    )
    config = json.loads((path / "config.json").read_text())
    mapped = {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    (path / "config.json").write_text(json.dumps({**config, "architectures": ["OwnForCausalLM"], "auto_map": mapped}))
    with pytest.raises(EngineError, match=r"OwnForCausalLM.*padded: \d"):
        local(path, trust_remote_code=True, head="linear")
    engine = local(path, trust_remote_code=True)
    assert engine.selfcheck.paths.own_head
    assert torch.allclose(engine.compute_log_probs(rows())["log_probs"], own(path, rows()), atol=1e-4)


@pytest.mark.slow
def test_a_window_wider_than_the_check_is_seen(folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(shutil.copytree(folder("mistral"), tmp_path / "wide"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "sliding_window": 50}))
    engine = local(path, pack="yes")
    assert engine._model.config.sliding_window == 50
    whole = forward._attention

    def blind(*given: Any, sliding_window: int | None = None, **named: Any) -> Any:
        return whole(*given, **named)

    monkeypatch.setattr(forward, "_attention", blind)
    with pytest.raises(EngineError, match=r"without padding with MistralForCausalLM.*packed: .*pack='auto'"):
        local(path, pack="yes")
    assert not local(path).selfcheck.paths.pack


def test_an_attention_that_nobody_read_is_not_lean(folder: Folder, tmp_path: Path) -> None:
    """All parts of Llama, and queries that are scaled beyond a length that no configuration names."""
    path = Path(shutil.copytree(folder("llama"), tmp_path / "own"))
    (path / "modeling_own.py").write_text(
        "from transformers import LlamaForCausalLM\nfrom transformers.models.llama.modeling_llama import LlamaAttention\n\n\n"
        "class OwnAttention(LlamaAttention):\n"
        "    def forward(self, hidden_states, position_ids, **named):\n"
        "        states = hidden_states * (1 + (position_ids > 30)[..., None])\n"
        "        return super().forward(states, position_ids=position_ids, **named)\n\n\n"
        "class OwnForCausalLM(LlamaForCausalLM):\n"
        "    def __init__(self, config):\n"
        "        super().__init__(config)\n"
        "        for layer in self.model.layers:\n"
        "            layer.self_attn.__class__ = OwnAttention\n"
    )
    config = json.loads((path / "config.json").read_text())
    mapped = {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    (path / "config.json").write_text(json.dumps({**config, "architectures": ["OwnForCausalLM"], "auto_map": mapped}))
    engine = local(path, trust_remote_code=True)
    assert engine.selfcheck.paths.decode == "shared prompts" and "lean" not in engine.selfcheck.found
    asked = Request(tuple(range(5, 45)), SamplingSettings(max_tokens=4, ignore_eos=True), 0)
    (sample,) = engine.sample_many([asked])
    expected = own(path, selfcheck.batch_of([(asked.ids, sample.ids)]))
    assert torch.allclose(torch.tensor([sample.log_probs]), expected, atol=1e-5)


def test_a_model_that_is_sure_hides_nothing(folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ernie's rotary is interleaved, the lean step's is not: near a probability of 1 the model's own tokens do not show it."""
    read = "transformers.models.ernie4_5.modeling_ernie4_5"
    monkeypatch.setattr(caches, "_READ", {*caches._READ, read})
    model = AutoModelForCausalLM.from_pretrained(folder("ernie4_5"))
    for times in (1, 30):
        with torch.no_grad():
            model.lm_head.weight.mul_(times)
        path = Path(shutil.copytree(folder("ernie4_5"), tmp_path / str(times)))
        model.save_pretrained(path)
        check = local(path).selfcheck
        assert check.paths.decode == "shared prompts" and float(check.found["lean"]) > 0.1
        assert check.difference < 1e-5


def test_a_way_that_is_thirty_times_worse_than_its_neighbours_is_not_proven(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its difference would be within what twelve layers may round to."""
    _, shape = ARCHITECTURES["llama"]
    monkeypatch.setitem(ARCHITECTURES, "deep", ("LlamaConfig", {**shape, "num_hidden_layers": 12}))
    path, states = make("deep", tmp_path / "deep"), scoring.RowTree.states
    assert local(path).selfcheck.paths.pack
    monkeypatch.setattr(scoring.RowTree, "states", lambda *given: states(*given) * (1 + 2e-5))
    check = local(path).selfcheck
    assert not check.paths.pack and 30 * check.difference < float(check.found["packed"]) < 12 * selfcheck.TOLERANCE


def test_one_token_that_is_wrong_in_half_precision_is_seen(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    states = scoring.RowTree.states

    def wrong(*given: Any) -> torch.Tensor:
        right = states(*given)
        return torch.cat([-right[:1], right[1:]]) if torch.is_autocast_enabled("cpu") else right

    assert local(folder("llama"), dtype="bfloat16").selfcheck.paths.pack
    monkeypatch.setattr(scoring.RowTree, "states", wrong)
    assert local(folder("llama")).selfcheck.paths.pack
    assert not local(folder("llama"), dtype="bfloat16").selfcheck.paths.pack


@pytest.mark.parametrize("name", ["ministral3", "llama4"])
def test_a_scale_by_position_far_beyond_the_check_is_seen(name: str, folder: Folder, tmp_path: Path) -> None:
    path = Path(shutil.copytree(folder(name), tmp_path / name))
    config = json.loads((path / "config.json").read_text())
    config["max_position_embeddings"] = 262_144
    if name == "llama4":
        config["floor_scale"] = 8192
    else:
        config["rope_parameters"]["original_max_position_embeddings"] = 16_384
    (path / "config.json").write_text(json.dumps(config))
    engine = local(path)
    assert engine.selfcheck.paths.decode == {"ministral3": "shared prompts", "llama4": "no cache"}[name]
    scales = (engine._model.config.rope_parameters or {}).get("original_max_position_embeddings")
    assert (
        scales == 16_384
        or engine._model.config.floor_scale == engine._model.model.layers[1].self_attn.floor_scale == 8192
    )


def _refuses_float32(module: Any, query: Any, key: Any, value: Any, mask: Any, **named: Any) -> Any:
    """As transformers' flash attention: it computes in what autocast has, and not in float32."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if not torch.is_autocast_enabled("cpu") and query.dtype == torch.float32:
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    query, key, value = (one.to(torch.bfloat16) for one in (query, key, value))
    return sdpa_attention_forward(module, query, key, value, mask, **named)


def test_attention_that_has_no_float32_is_checked_in_half_precision(folder: Folder) -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    kind = "refuses_float32"
    AttentionInterface.register(kind, _refuses_float32)
    AttentionMaskInterface.register(kind, sdpa_mask)
    engine = local(folder("qwen2"), dtype="bfloat16", attn_implementation=kind)
    assert "checked to" in repr(engine) and "FlashAttention only support" in str(engine.selfcheck.found["float32"])
    found, expected = engine.compute_log_probs(rows())["log_probs"], own(folder("qwen2"), rows())
    assert float((found - expected).abs().max()) < 0.1 * float(expected.std())
    asked = Request((5, 6, 7), SamplingSettings(max_tokens=2), 0)
    assert engine.sample_many([asked])[0].ids
    assert engine.learn(rows(), LikelihoodLoss(), EngineContract.counts(rows())).metrics["grad_norm"].result() > 0
    told = "self-check of Qwen2ForCausalLM.*FlashAttention only support.*dtype='bfloat16' where its attention"
    with pytest.raises(EngineError, match=told):
        local(folder("qwen2"), attn_implementation=kind)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bloom", "gpt_oss", "mamba", "qwen3_next"])
def test_packing_is_right_or_refused(name: str, folder: Folder) -> None:
    proven = local(folder(name)).selfcheck.paths.pack
    assert proven == (name == "gpt_oss")
    if not proven:
        with pytest.raises(EngineError, match="scoring without padding with"):
            local(folder(name), pack="yes")


@pytest.mark.slow
def test_packed_gradients_are_those_of_padded_rows(folder: Folder) -> None:
    batch = rows()
    counts = EngineContract.counts(batch)
    for name in ("gpt_oss", "gemma2"):
        one, two = (local(folder(name), pack=pack).gradient(batch, LikelihoodLoss(), counts) for pack in ("yes", "no"))
        scale = max(float(gradient.norm()) for gradient in two.values())
        assert all(float((one[key] - two[key]).norm()) < 1e-4 * scale for key in two), name


def test_log_probs_of_a_learning_pass_are_those_of_scoring(folder: Folder) -> None:
    engine, batch = local(folder("gpt2")), rows()
    seen = engine.probe(batch, LikelihoodLoss(), EngineContract.counts(batch)).columns["seen"]
    assert engine._model.config.attn_pdrop == 0.1
    assert torch.allclose(seen, engine.compute_log_probs(batch)["log_probs"], atol=1e-5)


def test_exact_kl_knows_the_soft_cap(folder: Folder, tmp_path: Path) -> None:
    engine, batch = local(folder("gemma2"), lr=3e-2), rows()
    reference = engine.reference()
    engine.learn(batch, LikelihoodLoss(), EngineContract.counts(batch))
    engine.save(tmp_path / "new")
    models = [AutoModelForCausalLM.from_pretrained(path).eval() for path in (tmp_path / "new", folder("gemma2"))]
    found = engine.full_kl(batch, reference)
    for row, (ids, mask) in enumerate(zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True)):
        count = int(batch["response_mask"][row].sum())
        with torch.no_grad():
            p, q = (torch.log_softmax(one(input_ids=ids[mask][None]).logits[0, -count - 1 : -1], -1) for one in models)
        assert torch.allclose(found[row, :count], (p.exp() * (p - q)).sum(-1), atol=1e-5)
    assert float(found.max()) > 0.01


def test_it_can_be_switched_off_and_is_handed_on(folder: Folder) -> None:
    assert "not checked" in repr(local(folder("llama"), self_check=False))
    engine = local(folder("llama"))
    assert engine.selfcheck.difference < 3 * selfcheck.TOLERANCE and "checked to" in repr(engine)
    assert engine.critic().selfcheck is engine.selfcheck


def test_weights_that_are_no_numbers_are_left_to_whoever_uses_them(folder: Folder, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder("llama"))
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    path = Path(shutil.copytree(folder("llama"), tmp_path / "nan"))
    model.save_pretrained(path)
    assert "not checked" in repr(local(path))


def test_a_model_that_reads_more_than_tokens_is_refused(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LlamaForCausalLM

    def forward(self: Any, pixel_values: torch.Tensor, **named: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr(LlamaForCausalLM, "forward", forward)
    with pytest.raises(EngineError, match="LlamaForCausalLM.*pixel_values"):
        local(folder("llama"))


def test_a_wrapper_is_read_by_its_text_configuration(folder: Folder, tmp_path: Path) -> None:
    path = Path(shutil.copytree(folder("gemma3"), tmp_path / "gemma3"))
    (path / "generation_config.json").unlink()
    config = json.loads((path / "config.json").read_text())
    config["text_config"] |= {"eos_token_id": [2, 9], "max_position_embeddings": 50}
    (path / "config.json").write_text(json.dumps({key: one for key, one in config.items() if key != "eos_token_id"}))
    engine = local(path)
    assert engine._eos == {2, 9} and engine.max_length == 50 and engine.memory_needed()[1]["activations"] > 0


@pytest.mark.parametrize("name", ["gemma3", "opt", "bert"])
def test_critics_of_other_heads(name: str, folder: Folder) -> None:
    policy, batch = local(folder(name), lr=1e-2), rows()
    critic = policy.critic()
    want = ("values", "log_probs")
    found = critic.compute_log_probs(batch, want)
    assert not found["values"].any()
    assert torch.allclose(found["log_probs"], policy.compute_log_probs(batch)["log_probs"], atol=1e-6)
    critic.learn(batch, LikelihoodLoss(want=("values",)), EngineContract.counts(batch))
    assert critic.compute_log_probs(batch, want)["values"].any()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma2", "granite", "gpt_oss", "bloom", "mamba", "bert"])
def test_half_precision(name: str, folder: Folder) -> None:
    engine, batch = local(folder(name), dtype="bfloat16"), rows()
    found, expected = engine.compute_log_probs(batch)["log_probs"], own(folder(name), batch)
    assert 1e-6 < float((found - expected).abs().median()) < 0.05 * float(expected.std())
    gradients = [
        local(folder(name), dtype=dtype).gradient(batch, LikelihoodLoss(), EngineContract.counts(batch))
        for dtype in ("bfloat16", "float32")
    ]
    half, whole = (torch.cat([one[key].flatten() for key in sorted(gradients[1])]) for one in gradients)
    assert float(torch.cosine_similarity(half, whole, 0)) > 0.98


def test_states_that_a_model_keeps_are_no_obstacle(folder: Folder) -> None:
    engine, batch = local(folder("recurrent_gemma"), lr=1e-2), rows()
    engine.learn(batch, LikelihoodLoss(), EngineContract.counts(batch))
    reference = engine.reference()
    assert torch.equal(*(one.compute_log_probs(batch)["log_probs"] for one in (engine, reference)))


@pytest.mark.slow
def test_a_row_whose_length_changes_its_neighbours_is_refused(folder: Folder, tmp_path: Path) -> None:
    path = Path(shutil.copytree(folder("phi3"), tmp_path / "long"))
    config = json.loads((path / "config.json").read_text())
    rope = {"rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": 23}
    scales = {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0]}
    config |= {"rope_parameters": {**rope, **scales}, "original_max_position_embeddings": 23}
    (path / "config.json").write_text(json.dumps(config))
    (path / "config.json").write_text(json.dumps(config).replace(": 23", ": 12"))
    assert local(path).selfcheck.paths.pack  # the check's rows are no longer than that
    (path / "config.json").write_text(json.dumps(config))
    engine = local(path)
    assert engine.max_length == 23
    assert torch.allclose(engine.compute_log_probs(rows())["log_probs"][3:], own(path, rows())[3:], atol=1e-5)
    longer = selfcheck.batch_of([(tuple(range(10, 30)), (5, 6, 7, 8)), ((5, 6), (7,))])
    for work in (engine.compute_log_probs, lambda batch: engine.gradient(batch, LikelihoodLoss(), None)):
        with pytest.raises(EngineError, match="a row of 24 tokens.*at most 23"):
            work(longer)
    with pytest.raises(EngineError, match="at most 23.*max_tokens"):
        engine.sample_many([Request((5, 6, 7), SamplingSettings(max_tokens=21), 0)])
