"""Tools: schemas, functions, what is shipped, yaml files, and what a failure leaves behind."""

from __future__ import annotations

import asyncio
import json
import math
import threading
import time
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from agents_parts import Running
from hypothesis import given, settings
from hypothesis import strategies as st
from support.patience import LONG, examples, patience

from workbench.agents.protocol import Tool, ToolResponse
from workbench.agents.tools import (
    BaseTool,
    CalculationError,
    Calculator,
    Corpus,
    FunctionTool,
    Gsm8kAnswer,
    PythonTool,
    Search,
    by_name,
    calculate,
    check_arguments,
    function_tool,
    load_tools,
    tool_schema,
)
from workbench.agents.tools.shipped import shown
from workbench.base.errors import DataError, SettingError
from workbench.sandbox.protocol import ProcessOutcome, Program, Result

HERE = Path(__file__).parent


def ask(tool: Any, parameters: Any, **create: Any) -> tuple[ToolResponse, float | None, dict[str, Any]]:
    async def once() -> Any:
        instance, _ = await tool.create(**create)
        try:
            return await tool.execute(instance, parameters)
        finally:
            await tool.release(instance)
            await tool.release(instance)

    return asyncio.run(once())


# --- the base and the schema -----------------------------------------------------------------------


def test_the_base_has_verls_names_and_a_release_that_is_safe_twice() -> None:
    class Echo(BaseTool):
        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
            return ToolResponse(text=f"{self.instances[instance_id]} {parameters}"), 0.5, {}

    echo = Echo({"a": 1}, {"type": "function", "function": {"name": "echo", "parameters": {}}})
    assert isinstance(echo, Tool) and echo.name == "echo" and echo.config == {"a": 1}
    assert echo.get_openai_tool_schema() == {
        "type": "function",
        "function": {
            "name": "echo",
            "description": "",
            "parameters": {"type": "object", "properties": {}, "required": []},
        },
    }
    assert ask(echo, {"x": 1}, create_kwargs={"seed": 3})[:2] == (ToolResponse(text="{'seed': 3} {'x': 1}"), 0.5)
    assert echo.instances == {}
    with pytest.raises(SettingError, match="has no schema"):
        Echo()
    with pytest.raises(SettingError, match="a tool's name"):
        Echo({}, {"name": "two words"})
    with pytest.raises(SettingError, match="type of 'a' of tool 'f'.*found 'text'"):
        tool_schema({"name": "f", "parameters": {"a": {"type": "text"}}})


SCHEMA = tool_schema(
    {
        "name": "find",
        "parameters": {
            "type": "object",
            "properties": {
                "words": {"type": "array", "items": {"type": "string"}},
                "kind": {"type": "string", "enum": ["a", "b"]},
                "limit": {"type": ["integer", "null"]},
                "near": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]},
            },
            "required": ["words"],
        },
    }
)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"words": ["x"], "kind": "a", "limit": None, "near": {"x": 1}}, None),
        ({"words": [], "limit": 3.0}, None),
        ([], "must be a JSON object, not an array"),
        ({}, "missing the argument 'words'. Its arguments: words, kind (optional)"),
        ({"words": [], "word": 1}, "no argument 'word'. Did you mean 'words'?"),
        ({"words": "x"}, "words must be an array, not a string"),
        ({"words": ["x", 1]}, r"words[1] must be a string, not an integer"),
        ({"words": [], "limit": True}, "limit must be an integer or null, not a boolean"),
        ({"words": [], "kind": "c"}, "kind must be one of 'a', 'b', not 'c'"),
        ({"words": [], "near": {}}, "near is missing 'x'"),
        ({"words": [], "near": {"x": "far"}}, "near.x must be a number, not a string"),
        ({"words": [], "near": {"x": math.inf}}, "near.x must be a finite number"),
    ],
)
def test_arguments_are_asked_of_the_schema_and_the_model_is_told(arguments: Any, told: str | None) -> None:
    found = check_arguments(SCHEMA, arguments)
    assert (found is None) if told is None else (found is not None and told in found)


@pytest.mark.slow
@settings(deadline=None, max_examples=examples(100))
@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    )
)
def test_no_arguments_make_the_check_raise(arguments: Any) -> None:
    assert isinstance(check_arguments(SCHEMA, arguments), str)


# --- functions ----------------------------------------------------------------------------------------


def weather(city: str, days: int = 1, unit: Literal["C", "F"] = "C", rain: list[float] | None = None) -> str:
    """Tells the weather,
    more or less.

    Args:
        city: Where. The name of a
            city in full.
        days (int): How many.
        unit: Of the temperature.

    Returns:
        Words.
    """
    return f"{city} {days} {unit} {rain}"


def test_a_typed_function_becomes_a_tool_with_the_schema_of_its_hints_and_docstring() -> None:
    tool = function_tool(weather)
    assert isinstance(tool, Tool) and tool("Ulm") == "Ulm 1 C None"
    assert tool.get_openai_tool_schema()["function"] == {
        "name": "weather",
        "description": "Tells the weather, more or less.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Where. The name of a city in full."},
                "days": {"type": "integer", "description": "How many."},
                "unit": {"type": "string", "enum": ["C", "F"], "description": "Of the temperature."},
                "rain": {"anyOf": [{"type": "array", "items": {"type": "number"}}, {"type": "null"}]},
            },
            "required": ["city"],
        },
    }
    assert ask(tool, {"city": "Ulm", "days": 2, "rain": [1.5]})[0].text == "Ulm 2 C [1.5]"
    wrong = ask(tool, {"city": "Ulm", "unit": "K"})
    assert "unit must be one of 'C', 'F'" in str(wrong[0].text) and wrong[1:2] == (0.0,)
    assert wrong[2]["status"] == "no_answer"


def test_settings_of_the_decorator_and_the_types_of_json() -> None:
    @function_tool(name="half", description="Halves.")
    async def f(x: float, table: dict[str, int], anything: Any = None, *, flag: bool | int = False) -> dict[str, Any]:
        return {"half": x / 2, "kind": type(x).__name__}

    assert f.name == "half" and f.tool_schema["function"]["description"] == "Halves."
    properties = f.tool_schema["function"]["parameters"]["properties"]
    assert properties["table"] == {"type": "object", "additionalProperties": {"type": "integer"}}
    assert properties["anything"] == {} and properties["flag"] == {"type": ["boolean", "integer"]}
    assert ask(f, {"x": 3, "table": {}})[0].text == '{"half": 1.5, "kind": "float"}'  # a whole number is a float, too
    assert "table.a must be an integer" in str(ask(f, {"x": 3, "table": {"a": "b"}})[0].text)


def test_a_parameter_that_cannot_be_told_is_refused_by_name() -> None:
    def no_hint(a: int, b) -> str:  # type: ignore[no-untyped-def]
        return ""

    def strange(a: int, when: set[int]) -> str:
        return ""

    def open_ended(*numbers: int) -> str:
        return ""

    def unknown(a: NotThere) -> str:  # type: ignore[name-defined]  # noqa: F821
        return ""

    for function, told in ((no_hint, "'b'.*a type hint"), (strange, "'when' of strange"), (open_ended, "'numbers'")):
        with pytest.raises(SettingError, match=told):
            function_tool(function)
    with pytest.raises(SettingError, match="type hints of unknown.*NotThere"):
        function_tool(unknown)
    with pytest.raises(SettingError, match="two tools are named 'weather'"):
        by_name([function_tool(weather), function_tool(weather)])


@pytest.mark.parametrize(
    ("returned", "text", "reward", "record"),
    [
        ("four", "four", None, {}),
        ({"a": 1}, '{"a": 1}', None, {}),
        ({"text": "t"}, "t", None, {}),
        ([1, 2], "[1, 2]", None, {}),
        (4, "4", None, {}),
        (ToolResponse(text="t"), "t", None, {}),
        (("four",), "four", None, {}),
        (("four", 0.5), "four", 0.5, {}),
        (({"a": "ä"}, 1, {"k": 2}), '{"a": "ä"}', 1.0, {"k": 2}),
        ((ToolResponse(text="t"), None, {"k": 2}), "t", None, {"k": 2}),
    ],
)
def test_results_are_taken_in_every_shape(
    returned: Any, text: str, reward: float | None, record: dict[str, Any]
) -> None:
    def f() -> Any:
        return returned

    assert ask(function_tool(f), {}) == (ToolResponse(text=text), reward, {"status": "scored", **record})


@pytest.mark.parametrize("returned", [(), (1, 2, 3, 4), object(), ("a", "b"), ("a", 1.0, 3)])
def test_a_result_of_another_shape_is_the_tools_failure(returned: Any) -> None:
    def f() -> Any:
        return returned

    response, reward, record = ask(function_tool(f), {})
    assert "Error when executing tool f" in str(response.text) and reward is None
    assert record["status"] == "infra_error"


def test_what_a_function_raises_is_a_text_and_a_record_and_no_judgement() -> None:
    def f(x: int) -> int:
        raise StopIteration if x else ZeroDivisionError("by hand")

    response, reward, record = ask(function_tool(f), {"x": 0})
    assert response.text == "Error when executing tool f: ZeroDivisionError: by hand" and reward is None
    assert record == {"status": "infra_error", "why": "ZeroDivisionError: by hand"}
    assert "StopIteration" in ask(function_tool(f), {"x": 1})[2]["why"]


@pytest.mark.slow
def test_slow_functions_run_side_by_side_and_a_hanging_one_costs_its_own_time() -> None:
    go = threading.Event()

    def slow() -> str:
        with running:
            time.sleep(0.1)
        return "done"

    running, limit = Running(), patience(0.3)

    def hangs() -> str:
        go.wait(LONG)
        return "late"

    async def all_of_them() -> list[Any]:
        tools = [FunctionTool(slow) for _ in range(64)] + [FunctionTool(hangs, timeout=limit)]
        return list(await asyncio.gather(*(tool.execute("i", {}) for tool in tools)))

    found = asyncio.run(all_of_them())
    assert [one[0].text for one in found[:64]] == ["done"] * 64 and running.most >= 4
    assert found[64][0].text == f"Error when executing tool hangs: no answer within {limit:g} s"
    assert found[64][2]["status"] == "infra_error"

    async def given_up() -> None:
        async with asyncio.timeout(0.1):
            await FunctionTool(hangs).execute("i", {})

    with pytest.raises(TimeoutError):  # the caller's own deadline stays the caller's
        asyncio.run(given_up())
    go.set()


# --- the calculator -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("23 * 45 + 67", "1102"),
        ("-2 ** 2", "-4"),
        ("2 ** -1", "0.5"),
        ("2 ** 3 ** 2", "512"),
        ("-7 // 2", "-4"),
        ("-7 % 3", "2"),
        ("0.1 + 0.2", "0.3"),
        ("1 / 3", "0.333333333333"),
        ("(1 + 2) × −3 ÷ 2", "-4.5"),
        ("sqrt(16) + abs(-2) - min(3, 1, 2) * max(1, 2)", "4"),
        ("sqrt(2)", "1.41421356237"),
        ("round(10 / 3, 2)", "3.33"),
        ("2 ** 0.5 ** 2", "1.189207115"),
        ("1.5e3 / .5", "3000"),
        ("(-1) ** 1000000001", "-1"),
        ("0 ** 0", "1"),
    ],
)
def test_the_calculator_by_hand(expression: str, value: str) -> None:
    assert ask(Calculator(), {"expression": expression}) == (ToolResponse(text=value), None, {"status": "scored"})


@pytest.mark.parametrize(
    ("expression", "told"),
    [
        ("1 / 0", "division by zero"),
        ("5 % (3 - 3)", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("9 ** 9 ** 9", "too large"),
        ("2 ** 99999999999", "too large"),
        ("1e999", "too large"),
        ("9" * 400, "too large"),
        ("-" * 60 + "1", "nested"),
        ("1+" * 300 + "1", "601 characters"),
        ("(1", "the expression"),
        ("1 2", "the expression"),
        ("", "the expression"),
        ("2 ^ 3", "powers are written **"),
        ("__import__('os')", "unexpected"),
        ("x + 1", "known functions: sqrt"),
        ("sqrt(-1)", "not real"),
        ("(-8) ** (1 / 3)", "not real"),
        ("sqrt(1, 2)", "takes 1 argument"),
        ("1,000 + 1", "unexpected ','"),
    ],
)
def test_an_expression_without_a_value_is_a_text_for_the_model(expression: str, told: str) -> None:
    response, reward, record = ask(Calculator(), {"expression": expression})
    assert told in str(response.text) and str(response.text).startswith("Error: ")
    assert reward == 0.0 and record["status"] == "no_answer"


numbers = st.integers(0, 99) | st.decimals(0, 99, places=2).map(str)
sums = st.recursive(
    numbers.map(str),
    lambda inner: (
        st.builds("({} {} {})".format, inner, st.sampled_from(["+", "-", "*", "/", "//", "%"]), inner)
        | inner.map("-{}".format)
    ),
    max_leaves=10,
)


@settings(deadline=None, max_examples=examples(150))
@given(sums)
def test_the_calculator_agrees_with_python_in_rational_numbers(text: str) -> None:
    import re

    exact = re.sub(r"\d+(?:\.\d+)?", lambda found: f"Fraction('{found[0]}')", text)
    try:
        wanted = eval(exact, {"Fraction": Fraction})  # noqa: S307 - our own text, in a test, against which ours is held
    except ZeroDivisionError:
        with pytest.raises(CalculationError, match="zero"):
            calculate(text)
        return
    assert calculate(text) == wanted and math.isclose(float(shown(Fraction(wanted))), float(wanted), rel_tol=1e-11)


@settings(deadline=None, max_examples=examples(200))
@given(st.text(max_size=40) | st.text("0123456789.+-*/%()esqrtabmin, ", max_size=60))
def test_no_text_makes_the_calculator_raise_anything_else(text: str) -> None:
    try:
        shown(calculate(text))
    except CalculationError as error:
        assert str(error)


# --- python ---------------------------------------------------------------------------------------------


class StandInSandbox:
    """Answers with what it is given; the real one's tests are in tests/sandbox."""

    languages = ("python",)

    def __init__(self, result: Result | Exception) -> None:
        self.result = result
        self.programs: list[Program] = []

    async def execute(self, program: Program) -> Result:
        self.programs.append(program)
        if isinstance(self.result, Exception):
            raise self.result
        return self.result

    def describe(self) -> str:
        return "stand-in"


def test_python_tells_output_limits_and_outages_apart() -> None:
    ran = Result(
        status="Success", run=ProcessOutcome(status="Finished", return_code=0, stdout="4\n", stderr="hm\n", seconds=0.1)
    )
    box = StandInSandbox(ran)
    tool = PythonTool(box, timeout=3)
    response, reward, record = ask(tool, {"code": "print(4)"})
    assert response.text == "4\nhm\n" and reward is None and record["ran"] and record["status"] == "scored"
    assert box.programs[0].run_timeout == 3 and box.programs[0].code == "print(4)"
    for deep in ("1+" * 900 + "1", "-" * 2000 + "1"):  # too deep to be written again: it runs as it is
        assert ask(tool, {"code": deep})[2]["status"] == "scored" and box.programs[-1].code == deep
    crashed = ProcessOutcome(
        status="Finished", return_code=1, stderr="Traceback…\nZeroDivisionError: division by zero\n"
    )
    response, _, record = ask(PythonTool(StandInSandbox(Result(status="Failed", run=crashed))), {"code": "1/0"})
    assert "ZeroDivisionError" in str(response.text) and (record["ran"], record["status"]) == (False, "crashed")
    late = ProcessOutcome(status="TimeLimitExceeded", stdout="so far", limit="time")
    response, _, record = ask(PythonTool(StandInSandbox(Result(status="Failed", run=late))), {"code": "…"})
    assert response.text == "so far\n[ended: time limit while running (10 s)]" and record["limit"] == "time"
    silent = Result(status="Success", run=ProcessOutcome(status="Finished", return_code=0))
    assert "print" in str(ask(PythonTool(StandInSandbox(silent)), {"code": "4"})[0].text)
    for outage in (Result(status="SandboxError", message="no room"), OSError("no room")):
        response, reward, record = ask(PythonTool(StandInSandbox(outage)), {"code": "4"})
        assert (reward, record["ran"], record["status"]) == (None, False, "infra_error") and "no room" in record["why"]
    assert "missing the argument 'code'" in str(ask(tool, {})[0].text)


@pytest.mark.slow
def test_python_in_the_real_sandbox() -> None:
    from workbench import sandbox

    tool = PythonTool(sandbox.local(max_concurrent=1), timeout=patience(5))
    assert ask(tool, {"code": "print(sum(range(5)))"})[0].text == "10\n"


# --- the answer checker and the search --------------------------------------------------------------------


def test_gsm8k_answer_by_hand() -> None:
    tool = Gsm8kAnswer()

    async def play() -> list[Any]:
        first, _ = await tool.create(ground_truth="12")
        other, _ = await tool.create(create_kwargs={"ground_truth": "5"})
        answers = ["11", "#### 12", "12", 12, "13"]
        found = [await tool.execute(first, {"answer": answer}) for answer in answers]
        assert await tool.calc_reward(first) == 0.0 and await tool.calc_reward(other) == 0.0
        assert (await tool.execute(other, {"answer": "5"}))[1] == 0.0 and await tool.calc_reward(other) == 1.0
        await tool.release(first)
        lost = await tool.execute(first, {"answer": "12"})
        assert lost[2]["status"] == "infra_error" and lost[1] is None
        return found

    found = asyncio.run(play())
    assert [one[1] for one in found] == [
        -0.05,
        0.0,
        -0.05,
        -0.05,
        -0.05,
    ]  # only what is better than the one before is free
    assert [one[2]["score"] for one in found] == [0.0, 1.0, 1.0, 1.0, 0.0]
    assert found[0][0].text == "Current parsed answer='11' reward=0.0"


def test_bm25_by_hand() -> None:
    corpus = Corpus(["a b", "a a", "c"])
    # three documents of 2, 2 and 1 words; 'a' stands in two: idf = ln(1 + 1.5 / 2.5)
    idf, norm = math.log(1 + 1.5 / 2.5), 1.2 * (1 - 0.75 + 0.75 * 2 / (5 / 3))
    found = corpus.best("A!", topk=5)
    assert [text for _, text in found] == ["a a", "a b"]
    assert found[0][0] == pytest.approx(idf * 2 * 2.2 / (2 + norm)) and found[1][0] == pytest.approx(
        idf * 2.2 / (1 + norm)
    )
    assert corpus.best("nothing here") == [] and corpus.best("") == []
    with pytest.raises(DataError, match="document 1"):
        Corpus(["a", {"id": 3}])


def test_search_takes_files_and_answers_several_queries(tmp_path: Path) -> None:
    records = [
        {"id": "0", "contents": "Ulm\nA city on the Danube."},
        {"id": "1", "contents": "Danube\nA river through Ulm and Vienna."},
        {"id": "2", "contents": "Oslo\nA city on a fjord."},
    ]
    (tmp_path / "corpus.jsonl").write_text("\n".join(map(json.dumps, records)))
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "corpus.parquet")
    texts = [ask(Search(tmp_path / name, topk=1), {"query_list": ["fjord", "river vienna", "xyz"]}) for name in
             ("corpus.jsonl", "corpus.parquet")]  # fmt: skip
    assert texts[0] == texts[1]
    assert texts[0][0].text == (
        "Doc 1 (Title: Oslo)\nA city on a fjord.\n---\n"
        "Doc 1 (Title: Danube)\nA river through Ulm and Vienna.\n---\nNo document found."
    )
    assert texts[0][2]["found"] == [1, 1, 0]
    with pytest.raises(SettingError, match="has no corpus"):
        Search()


# --- yaml ----------------------------------------------------------------------------------------------

GUIDES = """
tools:
  - name: calculator
    description: "执行数学计算"
    parameters:
      expression:
        type: string
        description: "数学表达式，如 '23 * 45 + 67'"

  - name: python
    description: "执行 Python 代码"
    parameters:
      code:
        type: string
        description: "Python 代码"
"""
VERLS = """
tools:
  - class_name: "verl.tools.gsm8k_tool.Gsm8kTool"
    config:
      type: native
    tool_schema:
      type: "function"
      function:
        name: "calc_gsm8k_reward"
        description: "A tool for calculating the reward of gsm8k"
        parameters:
          type: "object"
          properties:
            answer: {type: "string", description: "The model's answer"}
          required: ["answer"]
  - class_name: verl.tools.sandbox_fusion_tools.SandboxFusionTool
    config: {sandbox_fusion_url: "https://example.invalid", default_timeout: 7, default_language: python, type: native}
    tool_schema: {type: function, function: {name: code_interpreter, description: Runs code., parameters: {type: object,
      properties: {code: {type: string}}, required: [code]}}}
"""


def test_the_guides_yaml_and_verls_load_as_they_are_written(tmp_path: Path) -> None:
    path, box = tmp_path / "tools.yaml", StandInSandbox(Result(status="Success"))
    path.write_text(GUIDES)
    found = load_tools(path, sandbox=box)
    assert list(found) == ["calculator", "python"]
    assert found["calculator"].tool_schema["function"]["description"] == "执行数学计算"
    assert found["calculator"].tool_schema["function"]["parameters"]["required"] == ["expression"]
    assert ask(found["calculator"], {"expression": "23 * 45 + 67"})[0].text == "1102"
    path.write_text(VERLS)
    found = load_tools(path, sandbox=box)
    assert list(found) == ["calc_gsm8k_reward", "code_interpreter"]
    assert isinstance(found["calc_gsm8k_reward"], Gsm8kAnswer)
    assert isinstance(found["code_interpreter"], PythonTool) and found["code_interpreter"].timeout == 7


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("tools: []", "a list under 'tools'"),
        ("tools: [{name: calculatr}]", "did you mean 'calculator'"),
        ("tools: [{name: python}]", "pass sandbox="),
        ("tools: [{name: search}]", "has no corpus"),
        ("tools: [{name: calculator}, {name: calculator}]", "two tools are named 'calculator'"),
        ("tools: [{name: calculator, parameters: {expr: {type: string}}}]", r"arguments \['expression'\].*\['expr'\]"),
        ("tools: [{name: calculator, config: {type: remote}}]", "native or mcp"),
        ("tools: [{class_name: subprocess.Popen}]", "outside the folders"),
        ("tools: [{class_name: verl.tools.mcp_base_tool.MCPBaseTool}]", "mcp_servers_config_path"),
        ("tools: [3]", "tool 0 of"),
        ("tools: [{name: calculator, confg: {}}]", "'confg' is not a key of a tool.*did you mean 'config'"),
        ("tools: [{name: calculator, name: python}]", "the key 'name' a second time"),
        ("a: &a [x]\ntools: [*a, *a]", "expected no aliases"),
        (
            "tools: [{name: gsm8k_answer}, {name: search, config: {corpus: not.there}}]",
            "tool 1 of.*no data file",
        ),
    ],
)
def test_a_tool_file_that_cannot_be_used_says_why(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "tools.yaml"
    path.write_text(text)
    with pytest.raises(SettingError, match=told):
        load_tools(path)


def test_a_class_of_your_own_from_an_allowed_folder(tmp_path: Path) -> None:
    (tmp_path / "own_g2_tools.py").write_text(
        "from workbench.agents.protocol import ToolResponse\n"
        "from workbench.agents.tools import BaseTool\n"
        "class Shout(BaseTool):\n"
        "    async def execute(self, instance_id, parameters, **kwargs):\n"
        "        return ToolResponse(text=parameters['text'].upper() + self.config['end']), None, {}\n"
    )
    path = tmp_path / "tools.yaml"
    path.write_text(
        "tools: [{class_name: own_g2_tools.Shout, config: {type: native, end: '!'}, tool_schema: "
        "{type: function, function: {name: shout, parameters: {type: object, properties: {text: {type: string}}}}}}]"
    )
    with pytest.raises(SettingError, match="is not found"):
        load_tools(path)
    assert ask(load_tools(path, roots=[tmp_path])["shout"], {"text": "hey"})[0].text == "HEY!"


# --- what has no end -------------------------------------------------------------------------------


def endless() -> list[Any]:
    held: list[Any] = []
    held.append(held)
    return held


def test_what_a_tool_returns_of_itself_is_an_error_for_the_model() -> None:
    def look() -> Any:
        """Look."""
        return endless()

    answer, _, record = ask(function_tool(look), {})
    assert "contains itself" in str(answer.text) or "contains itself" in json.dumps(record)


def test_arguments_that_are_nested_without_end_are_an_error_for_the_model() -> None:
    deep: list[Any] = []
    for _ in range(900):
        deep = [deep]
    named = {"type": "object", "properties": {"held": {"type": "array"}}, "required": ["held"]}
    schema = tool_schema({"type": "function", "function": {"name": "look", "description": "", "parameters": named}})
    for held in (deep, endless()):
        assert "nested too deep" in str(check_arguments(schema, {"held": held}))


def test_a_function_that_wraps_itself_is_no_tool() -> None:
    def look(place: str) -> str:
        """Look."""
        return place

    look.__wrapped__ = look  # type: ignore[attr-defined]
    with pytest.raises(SettingError, match="function look has no readable signature"):
        function_tool(look)
