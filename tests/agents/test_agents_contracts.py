"""Every shipped parser, tool and simulated user keeps the promises of its contract."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

import pytest
from formats_written import FORMS as FORMS_WRITTEN
from hypothesis import given, settings
from hypothesis import strategies as st
from support.patience import examples
from test_agents_environments import Echoing, Guessing
from test_agents_interactions import StandInActor
from test_agents_mcp import SERVER

from workbench.agents import (
    Calculator,
    Gsm8kAnswer,
    Gsm8kInteraction,
    GymInteraction,
    HermesParser,
    KimiParser,
    MCPServer,
    MCPTool,
    PythonTool,
    Qwen3CoderParser,
    ReActParser,
    RemoteInteraction,
    Search,
    Terminal,
    ToolArgsParser,
    VerifiersInteraction,
    function_tool,
    parser_names,
    tool_parser,
)
from workbench.agents.files import INTERACTIONS, TOOLS
from workbench.agents.formats import (
    DeepSeekMarkupParser,
    DeepSeekParser,
    GlmParser,
    HarmonyParser,
    JsonListParser,
    LlamaParser,
    MiniMaxParser,
    MistralParser,
    PythonicParser,
    SeedParser,
)
from workbench.agents.interactions import UserReply
from workbench.agents.parsers import REASONING
from workbench.base import runtime
from workbench.base.errors import SandboxError, WorkbenchError
from workbench.runs.settings import MADE_AGAIN
from workbench.sandbox import LocalSandbox
from workbench.sandbox.protocol import ProcessOutcome, Program, Result
from workbench.testing import TEXTS
from workbench.testing.agents import InteractionContract, ParserContract, ToolContract


class TestHermes(ParserContract):
    make_parser = HermesParser

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class TestQwen3Coder(ParserContract):
    make_parser = Qwen3CoderParser

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        given = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
        return f"<tool_call>\n<function={name}>\n{given}</function>\n</tool_call>"


class TestKimi(ParserContract):
    make_parser = KimiParser

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        call = f"functions.{name}:0<|tool_call_argument_begin|>{json.dumps(arguments)}"
        return f"<|tool_calls_section_begin|><|tool_call_begin|>{call}<|tool_call_end|><|tool_calls_section_end|>"


class TestToolArgs(ParserContract):
    make_parser = ToolArgsParser

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        return f"<tool>{name}</tool><args>{json.dumps(arguments)}</args>"


class TestReAct(ParserContract):
    make_parser = ReActParser

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        return f"\nAction: {name}\nAction Input: {json.dumps(arguments)}\n"


class TestDeepSeek(ParserContract):
    make_parser = DeepSeekParser

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        body = f"function<｜tool▁sep｜>{name}\n```json\n{json.dumps(arguments)}\n```"
        return f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{body}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"


class TestDeepSeek31(ParserContract):
    make_parser = DeepSeekParser

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        body = f"{name}<｜tool▁sep｜>{json.dumps(arguments)}"
        return f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{body}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"


class TestDeepSeekMarkup(ParserContract):
    make_parser = DeepSeekMarkupParser

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        given = "".join(
            f'<｜DSML｜parameter name="{key}" string="true">{value}</｜DSML｜parameter>\n'
            for key, value in arguments.items()
        )
        call = f'<｜DSML｜invoke name="{name}">\n{given}</｜DSML｜invoke>'
        return f"<｜DSML｜function_calls>\n{call}\n</｜DSML｜function_calls>"


class TestGptOss(ParserContract):
    make_parser = HarmonyParser

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        body = json.dumps(arguments)
        return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{body}<|call|>"


class TestMistral(ParserContract):
    make_parser = MistralParser

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        return f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}"


class TestMistralList(ParserContract):
    make_parser = MistralParser

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        return f"[TOOL_CALLS][{json.dumps({'name': name, 'arguments': arguments, 'id': 'abcdefghi'})}]"


class TestLlama(ParserContract):
    make_parser = LlamaParser

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        return f"<|python_tag|>{json.dumps({'name': name, 'parameters': arguments})}"


class TestLlamaFunction(ParserContract):
    make_parser = LlamaParser

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        return f"<function={name}>{json.dumps(arguments)}</function>"


class TestGranite(ParserContract):
    make_parser = JsonListParser

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        return f"<|tool_call|>[{json.dumps({'name': name, 'arguments': arguments})}]"


class TestInternLM(ParserContract):
    make_parser = JsonListParser

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        call = json.dumps({"name": name, "parameters": arguments})
        return f"<|action_start|><|plugin|>{call}<|action_end|>"


class TestGlm(ParserContract):
    make_parser = GlmParser

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        given = "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in arguments.items()
        )
        return f"<tool_call>{name}\n{given}</tool_call>"


class TestMiniMax(ParserContract):
    make_parser = MiniMaxParser

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        given = "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in arguments.items())
        return f'<minimax:tool_call>\n<invoke name="{name}">\n{given}</invoke>\n</minimax:tool_call>'


class TestSeed(ParserContract):
    make_parser = SeedParser

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        given = "".join(f"<parameter={key}>{value}</parameter>\n" for key, value in arguments.items())
        return f"<seed:tool_call>\n<function={name}>\n{given}</function>\n</seed:tool_call>"


class TestPythonic(ParserContract):
    make_parser = PythonicParser

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        given = ", ".join(f"{key}={json.dumps(value)}" for key, value in arguments.items())
        return f"[{name}({given})]"


def written_as(name: str) -> type[ParserContract]:
    """The contract of a form that `formats_written` writes."""
    form = FORMS_WRITTEN[name]

    class Held(ParserContract):
        make_parser = type(tool_parser(form.parser))

        def write(self, name: str, arguments: Mapping[str, Any]) -> str:
            return form.write([(name, dict(arguments))])

    Held.__name__ = Held.__qualname__ = f"Test {name}"
    return Held


TestKimi3, TestHunyuan, TestMiniMax3 = map(written_as, ("kimi_k3", "hy_v3", "minimax_m3"))
TestSolar, TestApertus, TestNemotron, TestCommand = map(written_as, ("solar", "apertus", "nemotron", "command"))
TestGemma, TestGemma3, TestGemma4, TestLfm2 = map(written_as, ("functiongemma", "gemma3 block", "gemma4", "lfm2"))


def test_no_parser_is_without_its_contract() -> None:
    held = {one.make_parser for one in ParserContract.__subclasses__()}
    assert {type(tool_parser(name)) for name in parser_names()} <= held


def test_every_shipped_parser_is_made_again_from_a_runs_record() -> None:
    shipped = {type(tool_parser(name)) for name in parser_names()}
    assert {one for one in shipped if one.__module__.startswith("workbench.")} <= set(MADE_AGAIN)


# --- turns of many parts ------------------------------------------------------------------------------

prose = st.text(st.sampled_from("ab 7,.é→\n"), max_size=12)
arguments = (
    # Hypothesis also draws strings of the tested code: a closing tag that stands alone in a value cannot be told from its end
    st.text(max_size=20).filter(lambda text: "</" not in text)
    | st.sampled_from([one for one in TEXTS.values() if len(one) < 100])
    | st.sampled_from([*REASONING])
)
parts = st.lists(
    st.tuples(st.just("call"), arguments) | st.tuples(st.just("think"), prose) | st.tuples(st.just("prose"), prose),
    max_size=6,
)
FORMS = [one() for one in ParserContract.__subclasses__()]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: type(form).__name__)
@settings(deadline=None, max_examples=examples(200))
@given(parts, st.booleans(), st.sampled_from([*REASONING]), st.integers(0, 400))
def test_the_calls_of_a_turn_are_those_that_were_written(
    form: ParserContract, turn: list[tuple[str, str]], opened: bool, tag: str, cut: int
) -> None:
    wanted = [("echo", text) for kind, text in turn if kind == "call"]
    written = [f"{form.forbidden()}\n{next(iter(REASONING.values()))}\n"] if opened else []
    for kind, text in turn:
        considered = f"{tag}{text}{form.forbidden()}{text}{REASONING[tag]}"
        written.append({"call": form.echo(text), "think": considered, "prose": text}[kind])
    whole = "\n".join(written)
    assert form.found(whole, reasoning=opened) == wanted, whole
    calls = form.found(whole[:cut], reasoning=opened, cut=True)
    assert calls == wanted[: len(calls)], whole[:cut]


# --- tools ------------------------------------------------------------------------------------------


def shout(text: str, times: int = 1) -> dict[str, Any]:
    """Says it louder."""
    return {"said": text.upper() * min(times, 3), "cost": Decimal("0.5")}


async def double(numbers: list[float]) -> Any:
    """Doubles numbers."""
    return {2 * number for number in numbers}, 0.5, {"why": "doubled"}


class TestCalculator(ToolContract):
    make_tool = Calculator

    def arguments(self) -> dict[str, Any]:
        return {"expression": "1 + 1"}


class TestFunction(ToolContract):
    def make_tool(self) -> Any:
        return function_tool(shout)

    def arguments(self) -> dict[str, Any]:
        return {"text": "a\ud800", "times": 2}


class TestAsyncFunction(TestFunction):
    def make_tool(self) -> Any:
        return function_tool(double)

    def arguments(self) -> dict[str, Any]:
        return {"numbers": [1.0, 2.5]}


class TestSearch(ToolContract):
    def make_tool(self) -> Any:
        return Search(["Paris is in France", "Rome\nis in Italy"])

    def arguments(self) -> dict[str, Any]:
        return {"query_list": ["Rome"]}


class TestGsm8kAnswer(ToolContract):
    make_tool = Gsm8kAnswer
    create_kwargs = {"ground_truth": "18"}  # noqa: RUF012 - read only

    def arguments(self) -> dict[str, Any]:
        return {"answer": "17"}

    def test_a_truth_that_no_answer_can_match_is_not_scored(self) -> None:
        for truth, status in (
            (18, "ok"),
            ("1,800", "ok"),
            (18.0, "ok"),
            ("", "error"),
            (None, "error"),
            ([1], "error"),
        ):
            self.create_kwargs = {"ground_truth": truth}
            [record] = self.asked(json.dumps({"answer": "1800" if truth == "1,800" else "18"}))
            assert record.status == status and (record.reward == 0.0) is (status == "ok"), (truth, record)


class TestTerminal(ToolContract):
    def make_tool(self) -> Any:
        try:
            return Terminal(LocalSandbox())
        except SandboxError as error:
            pytest.skip(f"no tier of isolation works here: {error}")

    def arguments(self) -> dict[str, Any]:
        return {"command": "echo fine"}


class TestPython(ToolContract):
    def make_tool(self) -> Any:
        return PythonTool(Runs())

    def arguments(self) -> dict[str, Any]:
        return {"code": "print(1)"}


class Runs:
    """A sandbox that prints the program: the real one has tests of its own, and takes a process for each of 100 calls."""

    languages = ("python",)

    async def execute(self, program: Program) -> Result:
        return Result(
            status="Success", run=ProcessOutcome(status="Finished", return_code=0, stdout=program.code, stderr="")
        )


@pytest.mark.skipif(importlib.util.find_spec("mcp") is None, reason="needs the mcp package")
class TestMCP(ToolContract):
    @pytest.fixture(autouse=True, scope="class")
    def connected(self, request: pytest.FixtureRequest) -> Iterator[None]:
        request.cls.server = MCPServer("arith", {"command": sys.executable, "args": [str(SERVER)]}, timeout=30.0)
        request.cls.schema = next(one for one in runtime.run(request.cls.server.tools()) if one["name"] == "add")
        yield
        request.cls.server.close()

    def make_tool(self) -> Any:
        return MCPTool(self.server, self.schema)  # type: ignore[attr-defined]

    def arguments(self) -> dict[str, Any]:
        return {"a": 1, "b": 2}


# --- simulated users --------------------------------------------------------------------------------


class TestGsm8k(InteractionContract):
    make_interaction = Gsm8kInteraction

    def kwargs(self) -> dict[str, Any]:
        return {"ground_truth": "4", "query": "2 + 2"}

    def test_a_truth_that_no_answer_can_match_is_refused(self) -> None:
        for truth in ("", " ", "four", [4], True, float("nan"), b"4"):
            found = asyncio.run(self.talked(self.make_interaction(), "#### 4", ground_truth=truth))
            assert isinstance(found, WorkbenchError) and "ground_truth" in str(found), (truth, found)
        for truth in (4, 4.0, "4", "4.0", " 4 "):
            found = asyncio.run(self.talked(self.make_interaction(), "#### 4", ground_truth=truth))
            assert isinstance(found, UserReply) and found.score == 1.0, (truth, found)


class TestRemote(TestGsm8k):
    def make_interaction(self) -> Any:
        return RemoteInteraction(StandInActor(Gsm8kInteraction()), "gsm8k")


class TestGym(InteractionContract):
    def make_interaction(self) -> Any:
        return GymInteraction(Guessing, action=int)

    def kwargs(self) -> dict[str, Any]:
        return {"seed": 1, "options": {}}

    def said(self) -> str:
        return "4"


class TestVerifiers(InteractionContract):
    def make_interaction(self) -> Any:
        return VerifiersInteraction(Echoing())

    def kwargs(self) -> dict[str, Any]:
        return {
            "prompt": [{"role": "user", "content": "Say it."}],
            "answer": "yes",
            "info": '{"hint": "y"}',
            "task": "echo",
        }


def test_no_shipped_tool_or_user_is_without_its_contract() -> None:
    tools = {type(one().make_tool()) for one in ToolContract.__subclasses__() if one not in (TestMCP, TestTerminal)}
    assert {*TOOLS.values()} <= {*tools, MCPTool, Terminal}
    users = {type(one().make_interaction()) for one in InteractionContract.__subclasses__()}
    assert {*INTERACTIONS.values(), GymInteraction, VerifiersInteraction} <= users
