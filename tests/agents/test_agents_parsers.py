"""Parsers: well-formed calls round-trip, stated slips are mended, and no text makes one raise."""

from __future__ import annotations

import contextlib
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.patience import cost, examples

from workbench.agents.formats import parser_of
from workbench.agents.parsers import (
    MAX_CALLS,
    MAX_DEPTH,
    calls_of,
    loose_json,
    parser_names,
    register_parser,
    tool_parser,
)
from workbench.agents.protocol import FunctionCall
from workbench.base.errors import SettingError


def schema(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}


TOOLS = [
    schema("calculator", expression={"type": "string"}),
    schema("add", a={"type": "integer"}, b={"type": "number"}, exact={"type": "boolean"}),
    schema("search", query_list={"type": "array", "items": {"type": "string"}}, topk={"type": ["integer", "null"]}),
]
names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.-]{0,20}", fullmatch=True)
plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
arguments = st.dictionaries(st.text(), plain, max_size=4)
PIECES = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<function=", ">", "</function>", "<parameter=a>", "</parameter>", "\n"),
        *(
            "<tool>",
            "</tool>",
            "<args>",
            "</args>",
            "Action:",
            "Action Input:",
            "Observation:",
            "Final Answer:",
            "```json",
        ),
        *(
            "<|python_tag|>",
            "[TOOL_CALLS]",
            "[ARGS]",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁sep｜>",
            "<arg_key>",
            "<arg_value>",
        ),
        *("</arg_value>", '<invoke name="add">', "</invoke>", "<|channel|>commentary to=functions.add", "<|message|>"),
        *("<|channel|>analysis", "<|end|>", "[add(", "a=", ")", "<|tool_call|>"),
        *("<think>", "</think>", "[THINK]", "◁/think▷", "<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
        *("<|tool_call_argument_begin|>", "<|tool_call_end|>", "functions.add:0"),
        *(
            '{"name": "add", ',
            '"arguments": ',
            "{",
            "}",
            "[",
            "]",
            '"',
            "'",
            ",",
            ":",
            "\\",
            "\\u12",
            "add",
            "1e9",
            "-",
            "NaN",
        ),
    ]
)
texts = st.text() | st.lists(PIECES | st.text(max_size=5), max_size=30).map("".join)


@settings(deadline=None, max_examples=examples(80))
@given(texts)
def test_no_text_makes_a_parser_raise_and_without_calls_the_text_stays(text: str) -> None:
    for name in parser_names():
        content, calls = tool_parser(name).extract_tool_calls(text, TOOLS)
        assert len(calls) <= MAX_CALLS and all(isinstance(one, FunctionCall) for one in calls)
        assert all(isinstance(one.name, str) and isinstance(one.arguments, str) for one in calls)
        assert calls or content == text
        for reasoning, cut in itertools.product(("", "<think>", "[THINK]"), (False, True)):
            some = calls_of(tool_parser(name), text, TOOLS, reasoning=reasoning, cut=cut)
            assert cut or reasoning or some == calls


@pytest.mark.slow
@settings(deadline=None, max_examples=examples(80))
@given(
    st.lists(st.tuples(names, arguments), min_size=1, max_size=4), st.text().filter(lambda text: "<tool" not in text)
)
def test_hermes_calls_round_trip(written: list[tuple[str, dict[str, Any]]], around: str) -> None:
    calls = [json.dumps({"name": name, "arguments": given}) for name, given in written]
    text = around + "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in calls)
    content, found = tool_parser("hermes").extract_tool_calls(text, TOOLS)
    assert [(one.name, json.loads(one.arguments)) for one in found] == written
    assert content == around + "\n" * (len(calls) - 1)


values = st.text().filter(
    lambda text: "</parameter>" not in text and "<parameter=" not in text and "<function=" not in text
)


@settings(deadline=None, max_examples=examples(100))
@given(values.filter(lambda text: "</function>" not in text), st.integers(), st.floats(-1e9, 1e9), st.booleans())
def test_qwen3_coder_calls_round_trip_by_their_schema(text: str, whole: int, real: float, flag: bool) -> None:
    written = (
        f"<tool_call>\n<function=calculator>\n<parameter=expression>\n{text}\n</parameter>\n</function>\n</tool_call>\n"
        f"<tool_call>\n<function=add>\n<parameter=a>\n{whole}\n</parameter>\n<parameter=b>\n{real!r}\n</parameter>\n"
        f"<parameter=exact>\n{flag}\n</parameter>\n</function>\n</tool_call>"
    )
    content, found = tool_parser("qwen3_coder").extract_tool_calls(written, TOOLS)
    assert [json.loads(one.arguments) for one in found] == [
        {"expression": text},
        {"a": whole, "b": real, "exact": flag},
    ]
    assert content.strip() == ""


@settings(deadline=None, max_examples=examples(100))
@given(arguments)
def test_react_calls_round_trip(given_arguments: dict[str, Any]) -> None:
    text = (
        f"Thought: hm\nAction: search\nAction Input: {json.dumps(given_arguments)}\nObservation: made up\nAction: add\n"
    )
    content, found = tool_parser("react").extract_tool_calls(text, TOOLS)
    assert [(one.name, json.loads(one.arguments)) for one in found] == [("search", given_arguments)]
    assert content == "Thought: hm\nObservation: made up\nAction: add\n"


CALL = {"name": "calculator", "arguments": {"expression": "1 + 1"}}


@pytest.mark.parametrize(
    "written",
    [
        '<tool_call>{"name": "calculator", "arguments": {"expression": "1 + 1"}',  # two braces and the tag
        '<tool_call>{"name": "calculator", "arguments": {"expression": "1 + 1"}}',
        '<tool_call>{"name": "calculator", "arguments": {"expression": "1 + 1"</tool_call>',
        '<tool_call>{"name": "calculator", "arguments": {"expression": "1 + 1",},}</tool_call>',
        "<tool_call>{'name': 'calculator', 'arguments': {'expression': '1 + 1'}}</tool_call>",
        "<tool_call>{name: 'calculator', arguments: {expression: '1 + 1'}}</tool_call>",
        '<tool_call>```json\n{"name": "calculator", "arguments": {"expression": "1 + 1"}}\n```</tool_call>',
        '<tool_call>{"name": "calculator", "arguments": "{\\"expression\\": \\"1 + 1\\"}"}</tool_call>',
        '<tool_call>{"name": "calculator", "parameters": {"expression": "1 + 1"}}</tool_call>',
        '<tool_call>{"type": "function", "function": {"name": "calculator", "arguments": {"expression": "1 + 1"}}}',
        '<tool_call>{"name": "calculator", "arguments": {"expression": "1 + 1"}}}</tool_call>',  # a brace too many
    ],
)
def test_the_stated_slips_are_mended(written: str) -> None:
    _, found = tool_parser("hermes").extract_tool_calls(written, TOOLS)
    assert [(one.name, json.loads(one.arguments)) for one in found] == [(CALL["name"], CALL["arguments"])]


def test_a_missing_close_tag_ends_at_the_next_call() -> None:
    text = 'so <tool_call>{"name": "add", "arguments": {"a": 1}} <tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>!'
    content, found = tool_parser("qwen").extract_tool_calls(text, TOOLS)
    assert [json.loads(one.arguments) for one in found] == [{"a": 1}, {"a": 2}] and content == "so  !"


def test_a_close_tag_inside_a_string_closes_nothing() -> None:
    call = json.dumps({"name": "calculator", "arguments": {"expression": "</tool_call><tool_call>"}})
    content, found = tool_parser("hermes").extract_tool_calls(f"<tool_call>{call}</tool_call>", TOOLS)
    assert content == "" and json.loads(found[0].arguments) == {"expression": "</tool_call><tool_call>"}


@pytest.mark.parametrize(
    ("written", "name", "arguments_text"),
    [
        ('<tool_call>{"name": "add", "arguments": 1 + 1}</tool_call>', "add", '{"name": "add", "arguments": 1 + 1}'),
        ("<tool_call>add(1, 1)</tool_call>", "", "add(1, 1)"),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "add", "[1]"),
        ('<tool_call>{"name": "add"}</tool_call>', "add", "{}"),
        ("<tool_call></tool_call>", "", ""),
    ],
)
def test_what_cannot_be_mended_is_a_call_all_the_same(written: str, name: str, arguments_text: str) -> None:
    _, found = tool_parser("hermes").extract_tool_calls(written, TOOLS)
    assert found == [FunctionCall(name, arguments_text)]


def test_react_takes_plain_input_for_the_only_argument_and_nothing_after_a_final_answer() -> None:
    parse = tool_parser("react").extract_tool_calls
    _, found = parse("Thought: sum\nAction: `calculator`\nAction Input: `23 * 45`\n", TOOLS)
    assert found == [FunctionCall("calculator", '{"expression": "23 * 45"}')]
    _, found = parse("Action: add\nAction Input: 23\n", TOOLS)
    assert found == [FunctionCall("add", "23")]
    assert parse("Final Answer: 4\nAction: calculator\nAction Input: 1", TOOLS)[1] == []
    two = "Action: add\nAction Input: {'a': 1}\nAction: add\nAction Input: {'a': 2}\n"
    assert [one.arguments for one in parse(two, TOOLS)[1]] == ['{"a": 1}', '{"a": 2}']


def test_react_reads_tags_of_reasoning_as_they_are_written() -> None:
    parse = tool_parser("react").extract_tool_calls
    _, found = parse("Action: calculator\nAction Input: 1 <THINKING> 2", TOOLS)
    assert found == [FunctionCall("calculator", '{"expression": "1 <THINKING> 2"}')]
    assert parse("Action: calculator\nAction Input: 1 <thinking> 2", TOOLS)[1][0].arguments == '{"expression": "1"}'
    assert parse("x</THINK>Action: calculator\nAction Input: 1", TOOLS)[1] == []


def test_the_guides_own_form() -> None:
    content, found = tool_parser("tool_args").extract_tool_calls(
        'a<tool>calculator</tool><args>{"expr": "1+1"}</args>b', []
    )
    assert content == "ab" and found == [FunctionCall("calculator", '{"expr": "1+1"}')]


def test_qwen3_coder_without_the_outer_tag_and_with_types_that_do_not_fit() -> None:
    parse = tool_parser("qwen3_coder").extract_tool_calls
    text = "<function=add><parameter=a>many</parameter><parameter=b>2</parameter><parameter=exact>true</parameter>"
    assert json.loads(parse(text, TOOLS)[1][0].arguments) == {"a": "many", "b": 2, "exact": True}
    text = "<function=search>\n<parameter=query_list>\n['a', 'b',]\n</parameter>\n<parameter=topk>None</parameter></function>"
    assert json.loads(parse(text, TOOLS)[1][0].arguments) == {"query_list": ["a", "b"], "topk": None}


def test_names_are_found_and_refused_with_the_nearest() -> None:
    assert type(tool_parser("function_calling")) is type(tool_parser("hermes"))
    with pytest.raises(SettingError, match="'hermesx' is not a tool parser.*did you mean 'hermes'"):
        tool_parser("hermesx")
    with pytest.raises(SettingError, match="registered already"):
        register_parser("hermes")(object)


@settings(deadline=None, max_examples=examples(80))
@given(plain.filter(lambda value: isinstance(value, dict | list)))
def test_sound_json_is_read_as_it_is_and_its_truncations_never_raise(value: Any) -> None:
    text = json.dumps(value)
    assert loose_json(text) == value
    for end in range(0, len(text), max(1, len(text) // 8)):
        loose_json(text[:end])


@pytest.mark.slow
def test_depth_is_bounded_and_time_grows_with_the_text_alone() -> None:
    assert loose_json("[" * 10 + "1") == [[[[[[[[[[1]]]]]]]]]]
    assert loose_json("[" * (MAX_DEPTH + 2) + "1") is None and loose_json("[" * 200_000) is None
    hostile = [
        "<tool_call>{",
        "Action: a\nAction Input: ",
        "<function=a><parameter=b>",
        "<tool>a</tool><args>",
        "<tool_call> ",
        "<tool_call>{</think>",
        "<think></think><function=a>",
        "<|tool_calls_section_begin|><|tool_call_begin|>a<|tool_call_argument_begin|>{",
    ]
    parsers = {type(one): one for one in map(tool_parser, parser_names())}
    for piece in hostile:
        for parser in parsers.values():
            little, much = (
                cost(lambda n=n, piece=piece, parser=parser: parser.extract_tool_calls(piece * n, TOOLS))
                for n in (250, 2000)
            )
            assert much < 24 * little, (parser, piece)


# --- beside the parsers of verl and vLLM ---------------------------------------------------------------

RECORDED = json.loads(Path(__file__).with_name("calls_elsewhere.json").read_text())["formats"]
"""Format → case → its text, and the calls that verl's and vLLM's parsers found in it, with the tools `add` and `rm`."""
CONSIDERED = "theirs read calls in reasoning (vLLM serves with another parser before, which takes it away)"
DIFFERENT = {
    "in reasoning": CONSIDERED,
    "reasoning not closed": CONSIDERED,
    "reasoning closed alone": CONSIDERED,
    "cut": "theirs leave it out; so does an agent where the turn was cut, else the model is told that it is not JSON",
    "cut, then another": "theirs lose the second call",
    "call in an argument": "theirs cut the argument, or lose the call",
    "no close tag": "verl wants one; vLLM does not",
    "single quotes": "repaired, as loose_json says; theirs lose the call",
    "a name twice": "theirs take the last; here the model is told",
    "a parameter twice": "theirs take the last; here the model is told",
    "NaN": "theirs hand it to the tool; here the model is told that JSON has none",
    "two in one tag": "theirs lose both; here the model is told",
    "a list": "theirs lose it; here the model is told",
    "an unescaped quote": "theirs lose it; here the model is told",
    "not JSON": "verl calls without arguments; vLLM and we pass on what was written",
    "no arguments": "theirs lose the call of a tool without arguments",
    "no outer tag": "verl 0.9.1 wants the outer tag; vLLM does not",
    "a parameter not closed": "vLLM leaves the argument out; verl does not",
    "unknown tool": "verl guesses Kimi's tool by its arguments; vLLM does not",
    "plain name": "vLLM wants functions.name:0; verl does not",
}
BESIDE = [(form, case) for form, cases in RECORDED.items() for case in cases]
BOTH = [schema("add", a={"type": "integer"}, note={"type": "string"}), schema("rm", path={"type": "string"})]


def as_read(calls: Any) -> list[tuple[str, Any]]:
    read = []
    for name, text in calls:
        with contextlib.suppress(ValueError):
            text = json.loads(text)
        read.append((name, repr(text)))
    return read


def agree(form: str, case: str) -> bool:
    """Whether verl's parser, vLLM's and ours find the same calls."""
    one = RECORDED[form][case]
    ours = as_read((call.name, call.arguments) for call in tool_parser(form).extract_tool_calls(one["text"], BOTH)[1])
    assert "rm" not in {name for name, _ in ours}, "what is only considered, or part of an argument, is never called"
    return as_read(one["verl"]) == as_read(one["vllm"]) == ours


@pytest.mark.parametrize(("form", "case"), BESIDE)
def test_calls_are_those_that_verl_and_vllm_find_or_differ_for_a_reason(form: str, case: str) -> None:
    assert agree(form, case) or case in DIFFERENT


def test_every_difference_is_one() -> None:
    assert set(DIFFERENT) <= {case for form, case in BESIDE if not agree(form, case)}


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('{"name": "add", "parameters": {"a": 1}}<|eom_id|>', [("add", {"a": 1})]),
        ('{"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {"a": "; {"}}', [("add", {"a": 1}), ("add", {"a": "; {"})]),
        ('{"type": "function", "name": "add", "parameters": {"a": 1}}', [("add", {"a": 1})]),
        ('{"name": "Ada", "age": 36}', []),
        ('The call is {"name": "add", "parameters": {"a": 1}}', []),
        ('{"name": "add", "parameters": {"a": 1}}; and so on', []),
        ('{"name": "add", "parameters": {"a": 1}};', []),
        ('{"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {"a": ', []),
        ('{"parameters": {"a": 1}, "name": "add"}', []),
    ],
)  # fmt: skip
def test_llama_calls_without_the_tag_are_all_that_a_turn_says(text: str, calls: list[tuple[str, Any]]) -> None:
    content, found = tool_parser("llama3_json").extract_tool_calls(text, TOOLS)
    assert [(one.name, json.loads(one.arguments)) for one in found] == calls and content == ("" if calls else text)


def test_ids_of_calls_and_calls_of_one_list() -> None:
    listed = '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}, "id": "abcdefghi"}, {"name": "add", "arguments": {"a": 2}}]'
    assert tool_parser("mistral").extract_tool_calls(f"Hm. {listed}</s>", TOOLS) == (
        "Hm. ", [FunctionCall("add", '{"a": 1}', "abcdefghi"), FunctionCall("add", '{"a": 2}')],
    )  # fmt: skip
    apart = '[TOOL_CALLS]add[CALL_ID]abc123def[ARGS]{"a": 1}[TOOL_CALLS]add[ARGS]{"a": 2}'
    assert tool_parser("mistral").extract_tool_calls(apart, TOOLS)[1] == [
        FunctionCall("add", '{"a": 1}', "abc123def"), FunctionCall("add", '{"a": 2}'),
    ]  # fmt: skip
    hundred = json.dumps([{"name": "add", "arguments": {}}] * 100)
    assert len(tool_parser("granite").extract_tool_calls(f"<|tool_call|>{hundred}", TOOLS)[1]) == MAX_CALLS


def test_harmonys_recipient_before_the_channel_and_calls_in_its_analysis() -> None:
    call = "to=functions.add<|channel|>commentary json<|message|>{}<|call|>"
    thought = f"<|channel|>analysis<|message|>I could {call} it"
    found = tool_parser("gpt_oss").extract_tool_calls(f"{thought}<|end|><|start|>assistant {call}", TOOLS)
    assert found == (f"{thought}<|end|>", [FunctionCall("add", "{}")])


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("[add(a=1, b=-2.5e3, exact=True)]", [("add", {"a": 1, "b": -2500.0, "exact": True})]),
        ("[add(a=1), search(query_list=['it\\'s', \"b=(]\"], topk=None)]",
         [("add", {"a": 1}), ("search", {"query_list": ["it's", "b=(]"], "topk": None})]),
        ("<|python_start|>[add()]<|python_end|>", [("add", {})]),
        ("<function_calls>\nadd(a=1)\nadd(a=2)\n</function_calls>", [("add", {"a": 1}), ("add", {"a": 2})]),
        ("```tool_code\nadd(a=1)\n```", [("add", {"a": 1})]),
        ("where [f(x)] is the mean of f, [0, 1]", []),
    ],
)  # fmt: skip
def test_pythonic_calls_are_read_and_not_run(text: str, calls: list[tuple[str, Any]]) -> None:
    content, found = tool_parser("pythonic").extract_tool_calls(text, TOOLS)
    assert [(one.name, json.loads(one.arguments)) for one in found] == calls
    assert content.strip() == ("" if calls else text)


def test_what_is_no_literal_does_not_parse() -> None:
    for written in ("a=__import__('os')", "1, 2", "**{'a': 1}", "a=(1, 2)", "a=b"):
        [call] = tool_parser("pythonic").extract_tool_calls(f"<|python_start|>[add({written})]", TOOLS)[1]
        assert call == FunctionCall("add", written)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("… <tool_call>\n{'name': …", "hermes"),
        ("<tool_call>\n<function=example>", "qwen3_coder"),
        ("<tool_call>{{name}}\n<arg_key>", "glm45"),
        ({"default": "{{ messages }}", "tool_use": "[TOOL_CALLS]"}, "mistral"),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "deepseek_v3"),
    ],
)
def test_a_template_says_which_parser(template: Any, name: str) -> None:
    assert parser_of(template) == name and name in parser_names()


@pytest.mark.parametrize(("template", "found"), [(None, "without a chat template"), ("{{ messages }}", "writes none")])
def test_a_template_that_says_none_is_refused_with_the_names(template: Any, found: str) -> None:
    with pytest.raises(
        SettingError, match=f"known format; found .*{found}; give parser='hermes' or another of agents.parser_names"
    ):
        parser_of(template)


@pytest.mark.parametrize("text", ["<function=list_tool</function>", "<function=look>\n<parameter=cut off\n</function>"])
def test_a_broken_element_is_no_name(text: str) -> None:
    """verl's tests of Qwen3-Coder: markup in a name would be a call of a tool that nobody has."""
    written = f"<tool_call>\n{text}\n</tool_call>"
    assert tool_parser("qwen3_coder").extract_tool_calls(written) == (written, [])
