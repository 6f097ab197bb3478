"""Token discipline with the original tokenizers and chat templates of model families (`fetch_tokenizers.py`)."""

from __future__ import annotations

import os
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from agents_parts import schema
from hypothesis import given, settings
from hypothesis import strategies as st
from support.patience import examples

from workbench.agents import TurnTokens
from workbench.agents.formats import parser_of
from workbench.agents.parsers import tool_parser, tools_text
from workbench.base.errors import SettingError
from workbench.datasets.rendering import render
from workbench.engines.local_engine.loading import auto_tokenizer

FOLDER = os.environ.get("WORKBENCH_TOKENIZERS", "")
TOOLS = [schema("add", a="integer", note="string")]
ROLES = {
    "qwen2_5": ("tool", "user"),
    "qwen3": ("tool", "user"),
    "deepseek_v3": ("tool", "user"),
    "mistral_nemo": ("tool",),
    "llama3": ("user",),
    "llama3_1": ("user",),
    "gemma3": ("user",),
    "command_r_plus": ("user",),
}
"""Family → the roles whose turns its template can append."""
UNTOLD = ("deepseek_v3", "llama3", "llama3_1")
"""Families whose templates, as they are kept here, write no tools."""
REFUSED = [
    ("gemma3", "tool", "alternate"),
    ("command_r_plus", "tool", "alternate"),
    ("mistral_nemo", "user", "answers begin differently"),  # the tools stand before the last user's message
]
PARSERS = {
    "qwen2_5": "hermes",
    "qwen3": "hermes",
    "deepseek_v3": "deepseek_v3",
    "mistral_nemo": "mistral",
}
words = st.text(st.characters(codec="utf-8", exclude_characters="<|>[]"), min_size=1, max_size=20).map(
    lambda text: unicodedata.normalize("NFC", text).strip() or "x"
)
_LOADED: dict[str, Any] = {}


def tokenizer_of(name: str) -> Any:
    place = Path(FOLDER, name)
    if not FOLDER or not place.is_dir():
        pytest.skip(f"no tokenizer of {name}: run tests/agents/fetch_tokenizers.py and set WORKBENCH_TOKENIZERS")
    if name not in _LOADED:
        _LOADED[name] = auto_tokenizer(place)
    return _LOADED[name]


@pytest.mark.parametrize("name", [*ROLES, "gptoss"])
def test_a_tokenizer_gives_a_text_back(name: str) -> None:
    """DeepSeek's lost its spaces."""
    text = "Is 12345 really 6?\n\n  def f(x):\n\treturn x  # naïve, 中文, привет 🙂"
    tokenizer = tokenizer_of(name)
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@pytest.mark.parametrize("name", PARSERS)
def test_the_template_says_which_parser(name: str) -> None:
    assert parser_of(tokenizer_of(name).chat_template) == PARSERS[name]


@pytest.mark.parametrize(("name", "role", "why"), REFUSED)
def test_a_role_that_a_template_cannot_append_is_refused(name: str, role: str, why: str) -> None:
    with pytest.raises(SettingError, match=f"(?s)role '{role}'.*{why}"):
        TurnTokens(tokenizer_of(name), tools=TOOLS, roles=(role,))


@pytest.mark.parametrize(("name", "role"), [(name, role) for name, roles in ROLES.items() for role in roles])
def test_an_episode_keeps_what_the_model_wrote_and_is_the_templates_text(name: str, role: str) -> None:
    tokenizer = tokenizer_of(name)
    tools = TOOLS if role == "tool" and name not in UNTOLD else []
    tokens = TurnTokens(tokenizer, tools=tools, roles=(role,))

    @given(words, st.lists(st.tuples(words, words), min_size=1, max_size=3))
    @settings(max_examples=examples(20), deadline=None)
    def kept(question: str, spoken: list[tuple[str, str]]) -> None:
        chat: list[dict[str, Any]] = [{"role": "user", "content": question}]
        ids, wrote_at = list(tokens.prompt(chat)), []
        for answer, reply in spoken if role == "user" else spoken[:1]:
            # tokens of single letters: not what the tokenizer would write
            odd = [one for letter in answer for one in tokenizer(letter, add_special_tokens=False)["input_ids"]]
            wrote, before = [*odd, tokenizer.eos_token_id], list(ids)
            wrote_at.append((len(ids), wrote))
            new = {"role": role, "content": reply, **({"tool_call_id": "abcdefghi"} if role == "tool" else {})}
            ids += [*wrote, *tokens.delta([new], wrote)]
            assert ids[: len(before)] == before
            chat += [{"role": "assistant", "content": answer}, new]
        assert all(ids[place : place + len(wrote)] == wrote for place, wrote in wrote_at)
        if not GAPS.get(name):
            whole = render(tokenizer, [chat], add_generation_prompt=True, **({"tools": tools} if tools else {}))[0]
            assert squeezed(tokenizer.decode(ids), tokenizer) == squeezed(whole, tokenizer)

    kept()


@pytest.mark.parametrize("name", UNTOLD)
def test_tools_that_a_template_leaves_out_are_told_in_the_system_message(name: str) -> None:
    with pytest.raises(SettingError, match="does not show the model the tools add; .*tools_in='system'"):
        TurnTokens(tokenizer_of(name), tools=TOOLS, roles=("user",))
    text = tools_text("system", TOOLS, tool_parser("hermes"))
    tokens = TurnTokens(
        tokenizer_of(name), tools=TOOLS, tools_in="system", parser=tool_parser("hermes"), roles=("user",)
    )
    assert text in tokenizer_of(name).decode(tokens.prompt([{"role": "user", "content": "2 and 3?"}]))


GAPS = {
    "llama3": "its template closes turns by <|eot_id|>, the tokenizer's end token is <|end_of_text|>: both are kept",
    "gemma3": "its end token is <eos> or <end_of_turn> by the model's settings, and it strips what was said",
}
"""Family → why an episode's text is not its template's."""


def squeezed(text: str, tokenizer: Any) -> str:
    """A text without the beginning token, which some templates write and some tokenizers add, and without white space, which
    the tokens of single letters of some tokenizers bring along."""
    return "".join(text.replace(tokenizer.bos_token or "\0", "").split())


def test_qwen3_strips_thinking_of_earlier_turns_and_an_episode_keeps_it() -> None:
    """Where the template rewrites history, the episode's ids stay those that the model wrote."""
    tokenizer = tokenizer_of("qwen3")
    tokens = TurnTokens(tokenizer, roles=("user",))
    chat = [{"role": "user", "content": "2 + 2?"}]
    said = "<think>\ntwo and two\n</think>\n\n4"
    wrote = [*tokenizer(said, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    more = {"role": "user", "content": "sure?"}
    ids = [*tokens.prompt(chat), *wrote, *tokens.delta([more], wrote)]
    whole = render(tokenizer, [[*chat, {"role": "assistant", "content": said}, more]], add_generation_prompt=True)[0]
    assert "two and two" in tokenizer.decode(ids) and "two and two" not in whole
    assert tokenizer.decode(ids).replace("<think>\ntwo and two\n</think>\n\n", "") == whole


def test_deepseeks_template_writes_a_second_round_of_outputs_without_their_opening_tag() -> None:
    """A slip of the original: an episode opens each round as the template opens the first."""
    tokenizer = tokenizer_of("deepseek_v3")
    tokens = TurnTokens(tokenizer, roles=("tool",))
    opened = "<｜tool▁outputs▁begin｜>"
    assert tokens.delta_text([{"role": "tool", "content": "4"}]).count(opened) == 1
    chat = [
        {"role": "user", "content": "go"},
        *[{"role": "assistant", "content": "a"}, {"role": "tool", "content": "4"}] * 2,
    ]
    assert render(tokenizer, [chat], add_generation_prompt=True)[0].count(opened) == 1


def test_mistrals_tool_answers_have_ids_of_nine_letters_and_digits() -> None:
    tokens = TurnTokens(tokenizer_of("mistral_nemo"), tools=TOOLS, roles=("tool",))
    for given_id, written in (("abcdefghi", "abcdefghi"), ("call_12", "00call12"), (None, "00000000")):
        message = {"role": "tool", "content": "4", **({"tool_call_id": given_id} if given_id else {})}
        assert f'"call_id": "{written.rjust(9, "0")}"' in tokens.delta_text([message])
