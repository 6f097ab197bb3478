"""Token discipline: a conversation that only grows is what the chat template would have written."""

from __future__ import annotations

import unicodedata
from typing import Any

import pytest
from agents_parts import schema, tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from support.patience import examples

from workbench.agents import TurnTokens
from workbench.base.errors import SettingError
from workbench.datasets.rendering import render

NAMES = ("own", "qwen", "llama", "no system")
TOOLS = [schema("add", numbers="array"), schema("look up", query="string")]
# composed (NFC), since tokenizers compose what they read; and trimmed: what a template strips from the model's words stays in our tokens, on purpose
words = st.text(st.characters(codec="utf-8", exclude_characters="<|>"), min_size=1, max_size=20).map(
    lambda text: unicodedata.normalize("NFC", text).strip() or "x"
)
turns = st.lists(
    st.tuples(words, st.sampled_from(("tool", "user")), st.lists(words, min_size=1, max_size=3)), min_size=1, max_size=4
)


@pytest.fixture(scope="module")
def made(request: pytest.FixtureRequest) -> dict[str, Any]:
    return tokenizers(request.getfixturevalue("tiny"))


@pytest.mark.slow
@given(st.sampled_from(NAMES), words, turns, st.booleans(), st.booleans())
@settings(max_examples=examples(60))
def test_prompt_and_deltas_are_what_the_template_would_write(
    made: dict[str, Any], name: str, question: str, spoken: Any, with_tools: bool, with_system: bool
) -> None:
    tokenizer = made[name]
    tools = TOOLS if with_tools else []
    tokens = TurnTokens(tokenizer, tools=tools, roles=("tool", "user"))
    chat = [{"role": "user", "content": question}]
    if with_system and name != "no system":
        chat.insert(0, {"role": "system", "content": "Be brief."})
    ids = list(tokens.prompt(chat))
    for answer, role, contents in spoken:
        wrote = [*tokenizer(answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        new = [{"role": role, "content": text} for text in (contents if role == "tool" else contents[:1])]
        ids += [*wrote, *tokens.delta(new, wrote)]
        chat += [{"role": "assistant", "content": answer}, *new]
    text = render(tokenizer, [chat], add_generation_prompt=True, **({"tools": tools} if tools else {}))[0]
    assert tokenizer.decode(ids) == text
    # every text stands between special tokens, so that its tokens do not depend on its neighbours
    assert ids == tokenizer(text, add_special_tokens=False)["input_ids"]


@given(st.sampled_from(NAMES), words)
@settings(max_examples=examples(20))
def test_an_answer_that_did_not_end_itself_is_closed(made: dict[str, Any], name: str, answer: str) -> None:
    tokenizer = made[name]
    tokens = TurnTokens(tokenizer, roles=("user",))
    chat = [{"role": "user", "content": "go"}]
    wrote = tokenizer(answer, add_special_tokens=False)["input_ids"]
    new = {"role": "user", "content": "on"}
    ids = [*tokens.prompt(chat), *wrote, *tokens.delta([new], wrote)]
    told = [*chat, {"role": "assistant", "content": answer}, new]
    whole = render(tokenizer, [told], add_generation_prompt=True)[0]
    assert tokenizer.decode(ids) == whole


def test_the_model_is_not_read_again(made: dict[str, Any]) -> None:
    """Ids that no tokenizer would write, spaces that a template strips, thinking that one leaves out: all stay."""
    tokenizer = made["llama"]
    tokens = TurnTokens(tokenizer, roles=("tool",))
    odd = [*[tokenizer.convert_tokens_to_ids(letter) for letter in "user"], 223, tokenizer.eos_token_id]
    assert tokenizer("user ", add_special_tokens=False)["input_ids"] != odd[:-1]
    delta = tokens.delta([{"role": "tool", "content": "4"}], odd)
    expected = (
        "<|start_header_id|>ipython<|end_header_id|>\n\n4<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    assert tokenizer.decode(delta) == expected


def test_another_end_token_does_not_close_the_turn(made: dict[str, Any]) -> None:
    tokenizer = made["own"]
    tokens = TurnTokens(tokenizer, roles=("user",))
    new = [{"role": "user", "content": "<|im_end|> is said here"}]
    other = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    assert tokenizer.decode(tokens.delta(new, [20, other])).startswith("<|im_end|>\n<|im_start|>user\n<|im_end|> is")
    assert tokenizer.decode(tokens.delta(new, [20, tokenizer.eos_token_id])).startswith(
        "\n<|im_start|>user\n<|im_end|>"
    )


def test_switches_and_thinking_prompts(made: dict[str, Any]) -> None:
    tokens = TurnTokens(made["own"], roles=("user",), enable_thinking=True)
    assert made["own"].decode(tokens.delta([{"role": "user", "content": "b"}], [2])).endswith("assistant\n<think>\n")


def test_without_a_template_contents_are_lines(made: dict[str, Any]) -> None:
    from transformers import AutoTokenizer

    plain = AutoTokenizer.from_pretrained(made["own"].name_or_path)
    plain.chat_template = None
    tokens = TurnTokens(plain, roles=("tool",))
    assert plain.decode(tokens.prompt([{"role": "user", "content": "2+2?"}])) == "2+2?\n"
    assert plain.decode(tokens.delta([{"role": "tool", "content": "4"}], [20])) == "\n4\n"


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}", "leaves the new turn out"),
        ("{{ messages | length }}{% for m in messages %}{{ m.content }}{{ messages | length }};{% endfor %}", "longer"),
        ("{% for m in messages %}{{ m.content | upper }}{% endfor %}", "0 times|leaves the new turn out"),
        (
            "{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}{% if add_generation_prompt %}A:{% endif %}",
            "begins an answer differently",
        ),
        ("{% if messages[-1].role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}", "no tools here"),
    ],
)
def test_a_template_without_a_delta_is_refused_by_name(tiny: str, template: str, why: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny)
    tokenizer.chat_template = template
    with pytest.raises(SettingError, match=f"(?s)tiny-arith.*role 'tool'.*({why})"):
        TurnTokens(tokenizer, roles=("tool",))
