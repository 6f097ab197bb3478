"""The parsers beside vLLM's own, on the same generated calls."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import re
from random import Random
from typing import Any

import pytest
from formats_written import FORMS, PLAIN, TOOLS, Call, Form, call
from test_agents_formats import read, same

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
THEIRS = {
    **{name: form.parser for name, form in FORMS.items() if " " not in name},
    "mistral v11": "mistral",
    "llama3 tag": "llama3_json",
    "llama3 alone": "llama3_json",
    "phi4": "phi4_mini_json",
    "gpt_oss": "",
    "react": "",
    "tool_args": "",
    "solar": "",
    "nemotron": "",
    "minimax_m1": "",
    "command": "",
    "hy_v3": "",
}
"""Form → vLLM's name of its parser; empty where it has none of this name, or reads another of the family's formats."""
DIFFERENT = {
    "phi4": "theirs end the list at the first `]`, in a string, too",
    "functiongemma": "theirs read texts alone, and no number, list or object",
    "seed_oss": "theirs take away a line break at the ends of a text, which the family's template does not add",
    "gemma4": "theirs make the text 'null' of a null inside an object",
}


def tokenizer_of(form: Form) -> Any:
    """A tokenizer of bytes in which the format's own tags are tokens, as theirs look for them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.train_from_iterator(["a b"], trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    tags = set(re.findall(r"</?[^<>\s=\"]{3,40}>|\[[A-Z_]+\]|\]<\]minimax\[>\[", form.write([("put", {"text": "a"})])))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<bos>", eos_token="<eos>")
    tokenizer.add_tokens(sorted({*tags, "<|python_tag|>", "<think>", "</think>", *form.reasoning}))
    return tokenizer


@pytest.mark.parametrize("name", [name for name, theirs in THEIRS.items() if theirs])
def test_calls_are_those_that_vllm_reads(name: str) -> None:
    logging.disable(logging.CRITICAL)
    try:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionToolsParam
        from vllm.tool_parsers import ToolParserManager

        kind = ToolParserManager.get_tool_parser(THEIRS[name])
    except (ImportError, KeyError) as error:
        pytest.skip(f"vLLM's parser {THEIRS[name]} cannot be had here: {error}")
    finally:
        logging.disable(logging.NOTSET)
    form, random = FORMS[name], Random(name)
    tools = [ChatCompletionToolsParam(**one) for one in TOOLS]
    request, tokenizer = ChatCompletionRequest(messages=[], model="m", tools=TOOLS), tokenizer_of(form)
    differ: list[str] = []
    for _ in range(100):
        calls = [call(random, PLAIN, form.flat) for _ in range(random.randint(1, 3 if form.many else 1))]
        text = form.write(calls)
        assert same(read(form.parser, text), calls)
        found: list[Call] = []
        with contextlib.suppress(ValueError):  # they hand out JSON that is cut
            answer = kind(tokenizer, tools).extract_tool_calls(text, request)
            found = [(one.function.name, json.loads(one.function.arguments)) for one in answer.tool_calls]
        differ += [] if found == calls else [f"{text}\n{found}"]
    assert bool(differ) == (name in DIFFERENT), differ[:1]
