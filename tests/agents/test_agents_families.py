"""Calls and turns with the chat templates of model families, as their models have them (`fetch_tokenizers.py`)."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from agents_parts import Script
from formats_written import FORMS, TOOLS, Call
from test_agents_formats import TURNS, same
from test_agents_loops import CHAT, play

from workbench.agents import ToolAgent, TurnTokens, function_tool
from workbench.agents.formats import parser_of
from workbench.agents.parsers import calls_of, tool_parser
from workbench.base.errors import SettingError
from workbench.datasets.rendering import render

FOLDER = Path(os.environ.get("WORKBENCH_TOKENIZERS", "nowhere"), "templates")
IM_END, EOT, DEEPSEEK, MISTRAL, GLM = "<|im_end|>", "<|eot_id|>", "<｜end▁of▁sentence｜>", "</s>", "<|observation|>"
FAMILIES = {
    "Apertus-8B-Instruct": ("apertus", "<|tools_suffix|>", "apertus"),
    "Bielik-11B-v3.0-Instruct": ("hermes", IM_END, "hermes"),
    "ByteDance-Seed-OSS": ("seed_oss", "<seed:eos>", "seed_oss"),
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": ("cohere_command3", "<|END_OF_TURN_TOKEN|>", "command"),
    "GLM-4.6": ("glm45", GLM, "glm45"),
    "GLM-4.7-Flash": ("glm45", GLM, "glm45"),
    "GigaChat3.1-10B-A1.8B": ("gigachat3", "<|message_sep|>", "gigachat3"),
    "Kimi-K3": ("kimi_k3", "<|end_of_msg|>", "kimi_k3"),
    "MiMo-VL": ("hermes", IM_END, "hermes"),
    "MiniMax-M1": ("jamba", "<end_of_sentence>", "minimax_m1"),
    "MiniMax-M2": ("minimax_m2", "[e~[", "minimax_m2"),
    "MiniMax-M3": ("minimax_m3", "[e~[", "minimax_m3"),
    "Mistral-Small-3.2-24B-Instruct-2506": ("mistral", MISTRAL, "mistral v11"),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": ("qwen3_coder", IM_END, "qwen3_coder"),
    "NVIDIA-Nemotron-Nano-v2": ("nemotron_json", "<SPECIAL_12>", "nemotron"),
    "Qwen-QwQ-32B": ("hermes", IM_END, "hermes"),
    "Qwen-Qwen2.5-7B-Instruct": ("hermes", IM_END, "hermes"),
    "Qwen-Qwen3-0.6B": ("hermes", IM_END, "hermes"),
    "Qwen3-Coder": ("qwen3_coder", IM_END, "qwen3_coder"),
    "Qwen3.5-4B": ("qwen3_coder", IM_END, "qwen3_coder"),
    "Spark2.5": ("glm45", "<｜end▁of▁sentence｜>", "glm45"),
    "StepFun3.5-Flash": ("qwen3_coder", IM_END, "qwen3_coder"),
    "deepseek-ai-DeepSeek-V3.1": ("deepseek_v3", DEEPSEEK, "deepseek_v31"),
    "deepseek-ai-DeepSeek-V3.2": ("deepseek_v32", DEEPSEEK, "deepseek_v32"),
    "deepseek-ai-DeepSeek-V4": ("deepseek_v32", DEEPSEEK, "deepseek_v32"),
    "google-gemma-4-31B-it": ("gemma4", "<|tool_response>", "gemma4"),
    "ibm-granite-granite-4.0": ("hermes", "<|end_of_text|>", "hermes"),
    "inclusionai-ling-3.0-flash": ("glm45", "<|role_end|>", "glm45"),
    "meta-llama-Llama-3.1-8B-Instruct": ("llama3_json", EOT, "llama3 tag"),
    "meta-llama-Llama-3.2-3B-Instruct": ("llama3_json", EOT, "llama3 tag"),
    "meta-llama-Llama-3.3-70B-Instruct": ("llama3_json", EOT, "llama3 tag"),
    "mistralai-Ministral-3-14B-Reasoning-2512": ("mistral", MISTRAL, "mistral v11"),
    "mistralai-Mistral-Nemo-Instruct-2407": ("mistral", MISTRAL, "mistral v3"),
    "moonshotai-Kimi-K2": ("kimi_k2", IM_END, "kimi_k2"),
    "openai-gpt-oss-120b": ("gpt_oss", "<|call|>", "gpt_oss"),
    "poolside-Laguna-S-2.1": ("glm45", "</assistant>", "glm45"),
    "tencent-Hy3": ("hy_v3", "<｜hy_eos:opensource｜>", "hy_v3"),
    "unsloth-mistral-Devstral-Small-2507": ("mistral", MISTRAL, "mistral v11"),
    "upstage-Solar-Open-100B": ("solar", "<|calls|>", "solar"),
}
"""Template → the parser that it is read with, the token that ends a turn of calls, the form in which it writes them."""
NAMED = {
    "LFM2-8B-A1B": "lfm2",
    "unsloth-Apriel-1.5": "jamba",
    "ibm-granite-granite-3.3-2B-Instruct": "granite",
    "fireworks-ai-llama-3-firefunction-v2": "phi4_mini_json",
    "meetkai-functionary-medium-v3.1": "llama3_json",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": "hermes",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": "deepseek_v3",
    "Kimi-K2-Instruct": "kimi_k2",
}
"""Templates that tell the parser, and write no calls here: they leave them to the content, or need more than is given."""
NO_PARSER = ("google-gemma-2-2b-it", "llama-cpp-rwkv-world", "microsoft-Phi-3.5-mini-instruct")
REWRITES = {
    "NVIDIA-Nemotron-Nano-v2": "reasoning, or that there was none, is left out of earlier turns",
    "Qwen-QwQ-32B": "reasoning, or that there was none, is left out of earlier turns",
    "deepseek-ai-DeepSeek-V3.2": "reasoning, or that there was none, is written otherwise in earlier turns",
    "google-gemma-4-31B-it": "reasoning, or that there was none, is written otherwise in earlier turns",
}
"""Families whose template does not write an earlier turn as the model wrote it: `ToolAgent(history="template")`."""
ASKED = CHAT[0]


def template_of(name: str) -> str:
    place = FOLDER / f"{name}.jinja"
    if not place.is_file():
        pytest.skip(f"no template of {name}: run tests/agents/fetch_tokenizers.py and set WORKBENCH_TOKENIZERS")
    return place.read_text()


def tokenizer_of(name: str) -> Any:
    """A tokenizer of bytes with the family's template and end token, and with special tokens like the family's."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    template = template_of(name)
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.train_from_iterator(["a b"], trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<bos>", eos_token=FAMILIES[name][1])
    special = set(re.findall(r"<[|｜][\w▁:]{1,40}[|｜]>", template)) - {FAMILIES[name][1]}
    tokenizer.add_special_tokens({"additional_special_tokens": sorted(special)})
    tokenizer.chat_template = template
    return tokenizer


def calling(calls: list[Call], first: str = "000000000", thought: str = "") -> dict[str, Any]:
    """An assistant's message with these calls; `first` is the id of the first, in a form that Mistral's templates want."""
    asked = [
        {
            "id": first if place == 0 else f"{place:09d}",
            "type": "function",
            "function": {"name": name, "arguments": given},
        }
        for place, (name, given) in enumerate(calls)
    ]
    reasoning = {"reasoning_content": thought, "thinking": thought} if thought else {}
    return {"role": "assistant", "content": "", "tool_calls": asked, **reasoning}


@pytest.mark.parametrize(("name", "parser"), [*((name, one[0]) for name, one in FAMILIES.items()), *NAMED.items()])
def test_a_template_says_its_parser(name: str, parser: str) -> None:
    assert parser_of(template_of(name)) == parser


@pytest.mark.parametrize("name", NO_PARSER)
def test_a_template_without_calls_has_no_parser(name: str) -> None:
    with pytest.raises(SettingError, match="one that writes none"):
        parser_of(template_of(name))


@pytest.mark.parametrize("name", FAMILIES)
def test_calls_that_a_template_writes_are_read_back(name: str) -> None:
    """200 turns with calls, written by the template."""
    parser, end, form = FAMILIES[name]
    random, one = Random(name), FORMS[form]
    alone = name.startswith(("meta-llama", "GigaChat", "openai"))
    many = [one.calls(random)[: 1 if alone else None] for _ in range(TURNS)]
    reader: Any = SimpleNamespace(
        get_chat_template=lambda: template_of(name), special_tokens_map={"bos_token": "<bos>", "eos_token": end}
    )
    texts = render(reader, [[ASKED, calling(calls)] for calls in many], add_generation_prompt=False, tools=TOOLS)
    begins = [render(reader, [[ASKED]], add_generation_prompt=opened, tools=TOOLS)[0] for opened in (True, False)]
    for calls, text in zip(many, texts, strict=True):
        turn = text[len(next(filter(text.startswith, begins), "")) :].rstrip().removesuffix(end)
        found = calls_of(tool_parser(parser), turn, TOOLS)
        assert same([(each.name, json.loads(each.arguments)) for each in found], calls), turn


@function_tool
def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: one number.
        b: another.
    """
    return a + b


@pytest.mark.parametrize("name", FAMILIES)
def test_an_episode_is_the_models_tokens_and_the_templates_text(name: str) -> None:
    """Nothing that the model wrote is tokenized again, each context begins with the one before, the mask is the model's own."""
    tokenizer, schemas = tokenizer_of(name), [add.get_openai_tool_schema()]
    switches = {"tools": schemas}
    (head,) = render(tokenizer, [[ASKED]], add_generation_prompt=True, **switches)
    key = "functions.add:0" if FAMILIES[name][0] == "kimi_k2" else "000000000"
    answer = {"role": "tool", "content": "3", "name": "add", "tool_call_id": key}
    kept, said = False, ""
    for thought in ("", "hm"):
        chat = [ASKED, calling([("add", {"a": 1, "b": 2})], key, thought), answer]
        (whole,) = render(tokenizer, [chat], add_generation_prompt=True, **switches)
        delta = TurnTokens(tokenizer, tools=schemas, roles=("tool",)).delta_text([answer])
        assert whole.endswith(delta), f"{delta!r} ends {whole!r}"
        if not kept and whole.startswith(head):
            before_end = max(delta.find(tokenizer.eos_token), 0)  # a line's end, which the model writes, too
            kept, said = True, whole[len(head) : len(whole) - len(delta) + before_end]
            delta = delta[before_end:]
    assert kept == (name not in REWRITES)
    form, opened = FORMS[FAMILIES[name][2]], TurnTokens(tokenizer).reasoning
    said = said or f"{form.reasoning[1] if opened else ''}{form.write([('add', {'a': 1, 'b': 2})])}"
    sampler = Script(tokenizer, [said, said, "It is 3."])
    found = play(ToolAgent([add]), sampler, max_tokens=4000)
    assert [[(one.status, one.result) for one in turn.calls] for turn in found.turns] == [
        [("ok", "3")],
        [],
        [("ok", "3")],
        [],
        [],
    ]
    first, second, third = (list(one.ids) for one in sampler.requests)
    wrote = [*tokenizer.encode(said, add_special_tokens=False), tokenizer.eos_token_id]
    assert second[: len(first) + len(wrote)] == first + wrote and third[: len(second) + len(wrote)] == second + wrote
    own = [one for one, mask in zip(found.response_ids, found.response_mask, strict=True) if mask]
    last = [*tokenizer.encode("It is 3.", add_special_tokens=False), tokenizer.eos_token_id]
    assert own == [*wrote, *wrote, *last] and [*found.prompt_ids, *found.response_ids] == third + last
    assert third[len(second) + len(wrote) :] == second[len(first) + len(wrote) :], (
        "a second answer is written as the first"
    )
    if kept:
        assert tokenizer.decode(second) == head + said + delta
