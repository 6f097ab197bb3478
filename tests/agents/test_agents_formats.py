"""Every format of calls: 200 generated turns read back, 1,000 mangled ones that never raise, and beside vLLM's own parsers."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest
from formats_written import FORMS, TOOLS, Call, mangled

from workbench.agents.parsers import MAX_CALLS, calls_of, parser_names, read_json, tool_parser
from workbench.agents.protocol import FunctionCall

TURNS, MANGLED = 200, 1000


def read(name: str, text: str, **how: Any) -> list[Call]:
    found = calls_of(tool_parser(name), text, TOOLS, **how)
    return [(one.name, json.loads(one.arguments)) for one in found]


def same(found: list[Call], calls: list[Call]) -> bool:
    """Equal, and of the same types: 1 is not true."""
    return json.dumps(found, sort_keys=True) == json.dumps(calls, sort_keys=True)


def test_every_parser_has_a_form_here() -> None:
    here = {type(tool_parser(form.parser)) for form in FORMS.values()}
    assert {type(tool_parser(name)) for name in parser_names() if "test" not in name} - here == set()


@pytest.mark.parametrize("name", FORMS)
def test_generated_turns_are_read_back(name: str) -> None:
    form, random = FORMS[name], Random(name)
    for _ in range(TURNS):
        calls = form.calls(random)
        turn = form.turn(random, calls)
        assert same(read(form.parser, turn), calls), turn


@pytest.mark.parametrize("name", FORMS)
def test_a_turn_that_is_cut_has_only_calls_that_were_whole(name: str) -> None:
    form, random = FORMS[name], Random(name)
    for _ in range(TURNS):
        calls = form.calls(random)
        turn = form.turn(random, calls)
        found = read(form.parser, turn[: random.randint(0, len(turn))], cut=True)
        assert same(found, calls[: len(found)]), turn


@pytest.mark.parametrize("name", FORMS)
def test_mangled_turns_never_raise(name: str) -> None:
    form, random = FORMS[name], Random(name)
    other = ""
    for _ in range(MANGLED):
        turn = form.turn(random, form.calls(random))
        text, other = mangled(random, turn, other), turn
        content, calls = tool_parser(form.parser).extract_tool_calls(text, TOOLS)
        assert calls or content == text
        assert len(calls) <= MAX_CALLS and all(isinstance(one, FunctionCall) for one in calls)
        for one in calls_of(tool_parser(form.parser), text, TOOLS, cut=True):
            assert isinstance(read_json(one.arguments), dict | list | str | int | float), (text, one)
