"""What a tool agent refuses to be made from."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from agents_parts import Adder, Tags, User

from workbench.agents import BaseInteraction, HermesParser, ReActParser, ToolAgent, function_tool
from workbench.base.errors import SettingError


def double(number: int) -> str:
    """Doubles."""
    return str(2 * number)


TOOLS: list[tuple[Any, str]] = [
    (Adder(), r"tools of an agent; expected a list of tools; found <.*Adder.*; write tools=\[Adder\]"),
    (double, r"tools of an agent; expected a list.*tools=\[double\]"),
    ("calculator", "tools of an agent; expected a list of tools; found 'calculator'"),
    (7, "tools of an agent; expected a list of tools; found 7"),
    (
        [double],
        r"tools\[0\] of an agent; expected a tool; .*decorate it with @function_tool, or give function_tool\(double\)",
    ),
    ([Adder(), Adder], r"tools\[1\] of an agent; expected a tool; .*make an object of it: Adder"),
    (
        ["calculator"],
        r"tools\[0\] of an agent; expected a tool; found 'calculator'; it needs a name and get_openai_tool_schema",
    ),
    ([Adder(), Adder()], "unique names"),
]


@pytest.mark.parametrize(("tools", "told"), TOOLS)
def test_tools_that_are_none(tools: Any, told: str) -> None:
    with pytest.raises(SettingError, match=told):
        ToolAgent(tools, parser=Tags())


def test_tools_by_name_and_parsers_by_name() -> None:
    made = ToolAgent({"a": Adder(), "b": function_tool(double)}, parser="hermes")
    assert repr(made) == "ToolAgent(tool_agent: add, double, HermesParser (function_calling))"
    assert made.describe()["parser"] == "HermesParser" and made.made_with["parser"] == "hermes"
    limited = ToolAgent([Adder()], format="react", max_assistant_turns=3, max_parallel_calls=2, interactions=[User()])
    assert repr(limited) == (
        "ToolAgent(tool_agent: add, wants, ReActParser (react), max_assistant_turns=3, max_parallel_calls=2)"
    )
    assert repr(ToolAgent()) == "ToolAgent(tool_agent: no tools)"


PARSERS: list[tuple[Any, str, str]] = [
    ("hermse", "function_calling", "did you mean 'hermes'"),
    (
        HermesParser,
        "function_calling",
        r"parser of a tool agent; expected a name, or an object with .*HermesParser.*make an object of it: Herm",
    ),
    (object(), "function_calling", "parser of a tool agent; expected a name, or an object with extract_tool_calls"),
    (double, "function_calling", "parser of a tool agent; expected a name, or an object with extract_tool_calls"),
    (HermesParser(), "react", "parser of format='react'; expected a ReActParser"),
    ("hermes", "react", "parser of format='react'; expected a ReActParser"),
]


@pytest.mark.parametrize(("parser", "format", "told"), PARSERS)
def test_parsers_that_are_none(parser: Any, format: str, told: str) -> None:
    with pytest.raises(SettingError, match=told):
        ToolAgent([Adder()], parser=parser, format=format)
    assert ToolAgent([Adder()], parser=ReActParser(), format="react") and ToolAgent([Adder()], parser="react")


class Mute(BaseInteraction):
    """Has nothing to say."""


class Plain(User):
    def generate_response(self, instance_id: str, messages: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        return True, "", 1.0, {}


class Nameless(User):
    name = None  # type: ignore[assignment]


USERS: list[tuple[Any, str]] = [
    (User(), r"interactions; expected a list of simulated users; .*write \[User\]"),
    (User, r"interactions; expected a list of simulated users; .*write \[User\(\)\]"),
    ([User], r"interactions; expected objects, not classes; found the class User; make an object of it: User\(\)"),
    ({"gsm8k": User}, "found the class User"),
    ([Mute()], "interaction Mute has no generate_response of its own; give the class `async def generate_response"),
    ([object()], "interaction object has no generate_response of its own"),
    ([Plain()], "interaction Plain; expected `async def generate_response`; found a method that is not async"),
    ([Nameless()], "name of interaction Nameless; expected a text; found None"),
    ([User(), User()], "unique names"),
    ("gsm8k", "interactions; expected a list"),
]


@pytest.mark.parametrize(("users", "told"), USERS)
def test_users_that_nobody_could_speak_to(users: Any, told: str) -> None:
    with pytest.raises(SettingError, match=told):
        ToolAgent(interactions=users)


def test_a_user_may_be_a_partial_or_have_its_name_from_a_mapping() -> None:
    part = User()
    part.generate_response = functools.partial(Plain().generate_response)  # type: ignore[method-assign,assignment]
    assert ToolAgent(interactions=[part]) and ToolAgent(interactions={"gsm8k": Nameless()})
