"""The tiny model is a plain Hugging Face folder that transformers and vLLM open, and its words fit the world."""

from __future__ import annotations

import hashlib
from pathlib import Path
from random import Random
from typing import Any

import make_model
import pytest
import torch
from arith_world import careless, make_problem
from make_arith import problems
from safetensors import safe_open

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "data" / "tiny-arith"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(FOLDER)


def test_plain_transformers_open_it() -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(FOLDER)
    config = model.config
    assert type(model).__name__ == "Qwen2ForCausalLM" and config.tie_word_embeddings
    assert config.hidden_size // config.num_attention_heads == 32  # vLLM's CPU kernels take 32 and 64, no smaller
    assert config.num_attention_heads == 2 * config.num_key_value_heads
    assert 800_000 < sum(one.numel() for one in model.parameters()) < 1_200_000
    with safe_open(FOLDER / "model.safetensors", "pt") as stored:
        assert "lm_head.weight" not in stored.keys()  # noqa: SIM118 - not a dict
        assert {stored.get_tensor(name).dtype for name in stored.keys()} == {torch.float32}  # noqa: SIM118


def test_what_ends_a_response(tokenizer: Any) -> None:
    from transformers import GenerationConfig

    settings = GenerationConfig.from_pretrained(FOLDER)
    stop, end = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert settings.eos_token_id == [stop, end] and settings.pad_token_id == end
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (stop, end)


@pytest.mark.slow
def test_its_words_fit_the_world(tokenizer: Any) -> None:
    random = Random(7)
    for _ in range(300):
        problem = make_problem(random)
        chat = [{"role": "user", "content": problem.question}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        answer = tokenizer(problem.solution + "<|im_end|>")["input_ids"]
        assert len(prompt) <= 60 and len(answer) <= 40
        assert all(len(tokenizer(careless(problem, random))["input_ids"]) <= 64 for _ in range(4))
        assert tokenizer.decode(answer, skip_special_tokens=True) == problem.solution
    assert tokenizer.tokenize("1024+3") == ["1", "0", "2", "4", "+", "3"]
    unseen = "Ünïcode 数 \t<tag>"
    assert tokenizer.decode(tokenizer(unseen)["input_ids"]) == unseen


def test_the_template_takes_switches(tokenizer: Any) -> None:
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    plain = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert plain == "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n"
    off = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, enable_thinking=False)
    on = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, enable_thinking=True)
    assert off == plain and on == plain + "<think>\n"


@pytest.mark.slow
def test_the_warm_up_is_a_function_of_its_seed(tokenizer: Any) -> None:
    made = []
    for seed in (0, 0, 1):
        model = make_model.make_model(tokenizer, seed)
        make_model.warm_up(model, tokenizer, steps=2, size=8, seed=seed)
        made.append(model.state_dict())
    first, again, other = made
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["model.norm.weight"], other["model.norm.weight"])


def test_no_held_out_question_is_practised(tokenizer: Any) -> None:
    held_out = frozenset(problem.question for problem in problems(0, 20))
    random = Random(0)  # the very stream that drew them: the first draw is held out
    for _ in range(60):
        ids, start = make_model.example(tokenizer, random, held_out)
        assert not any(question in tokenizer.decode(ids[:start]) for question in held_out)


def test_no_loss_on_prompts_or_padding(tokenizer: Any) -> None:
    ids, labels = make_model.batch([([5, 6, 7, 8], 2), ([5, 9], 1)], pad=0)
    assert ids.tolist() == [[5, 6, 7, 8], [5, 9, 0, 0]]
    assert labels.tolist() == [[-100, -100, 7, 8], [-100, 9, -100, -100]]


def test_the_card_has_the_hash_of_the_weights() -> None:
    digest = hashlib.sha256((FOLDER / "model.safetensors").read_bytes()).hexdigest()
    assert digest in (FOLDER / "README.md").read_text()
