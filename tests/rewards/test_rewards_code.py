"""Code by test cases: what passes, what cannot cheat, and what it is called when it does not pass."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import pytest
from support.patience import patience

from workbench.base.errors import DataError, RewardError, SandboxError, SettingError
from workbench.rewards import Code, Reward, Rubric, Score, Status, as_reward, by_data_source, dry_run
from workbench.rewards.base import row_views
from workbench.rewards.case_harness import decode, encode
from workbench.rewards.cases import read_cases
from workbench.rewards.code import extract_code, same_output, same_value
from workbench.sandbox import LocalSandbox
from workbench.testing import VALUES, answer
from workbench.testing.rewards import RewardContract, answered


def judged(box: LocalSandbox, program: str, tests: Any, **options: Any) -> Score:
    options = {"timeout": 5.0, **options}
    return as_reward(Code(box, **options)).score(answered([f"```python\n{program}\n```"], [tests]))[0]


class TestCode(RewardContract):
    def make_reward(self) -> Reward:
        try:
            return as_reward(Code(LocalSandbox()))  # type: ignore[return-value]
        except SandboxError as error:
            pytest.skip(str(error))


ADD = {"assert_case": ["assert add(1, 2) == 3", "assert add(2, 2) == 4"]}
ADD_CALL = {"fn_name": "add", "inputs": ["1\n2", [3, 4]], "outputs": ["3", 7]}
DOUBLE = {"inputs": ["1\n", "4\n"], "outputs": ["2\n", "8"]}


SUM = {"fn_name": "f", "inputs": [[[1, 2, 3]]], "outputs": [6]}
NINE = {"inputs": ["3\n"], "outputs": ["9"]}
DEEP = "def down(n): return 0 if n == 0 else 1 + down(n - 1)\n"
HUGE = "1" + "0" * 6000
HELPED = {
    "prompt": 'from typing import List\n\ndef helper(x):\n    return x + 1\n\ndef f(xs: List[int]) -> int:\n    """Add."""\n',
    "test": "def check(candidate):\n    assert candidate([1]) == 2\n",
    "entry_point": "f",
}
MATHS = {"test_list": ["assert f(9) == 3.0"], "test_imports": ["import math"]}


@pytest.mark.parametrize(
    ("program", "tests", "value"),
    [
        # LiveCodeBench, APPS and TACO: imports, recursion, digits; in calls as in programs that read and print
        ("class Solution:\n    def f(self, xs: List[int]) -> int: return sum(Counter(xs).elements())", SUM, 1),
        ("def g(xs: List[int]) -> int: return sum(xs)\nprint(g([int(input()), 6]))", NINE, 1),
        ("from __future__ import annotations\nprint(Counter([1] * 9)[1])", NINE, 1),
        (f"{DEEP}def f(xs): return 6 + down(20_000) - 20_000", SUM, 1),
        (f"{DEEP}print(9 + down(20_000) - 20_000)", NINE, 1),
        ("print(10**6000)", {"inputs": [""], "outputs": [HUGE]}, 1),
        ("def f(n): return 10**n", f'{{"fn_name": "f", "inputs": [[6000]], "outputs": [{HUGE}]}}', 1),
        ("def f(n): return n % 10", f'{{"fn_name": "f", "inputs": [[{HUGE[:-1]}7]], "outputs": [7]}}', 1),
        # an annotation is read in both kinds of tests, as it is in a file by itself
        ("def g(x: nothing): return x\ndef f(xs): return 6", SUM, 0),
        ("def g(x: nothing): return x\nprint(9)", NINE, 0),
        # what the preamble brings is no answer
        ("x = 1", {"fn_name": "gcd", "inputs": [[4, 6]], "outputs": [2]}, 0),
        ("y = Counter", {"fn_name": "gcd", "inputs": [[4, 6]], "outputs": [2]}, 0),
        # HumanEval: the prompt's code; its stub is no answer. MBPP: the row's imports
        ("def f(xs: List[int]) -> int: return helper(xs[0])", HELPED, 1),
        ("def g(xs): return helper(xs[0])", HELPED, 0),
        ("root = math.sqrt(9)\ndef f(x): return root", MATHS, 1),
        ("def f(n): return str(10**n)", {"test_list": ["assert f(6000) == '1' + '0' * 6000"]}, 1),
    ],
)
def test_a_program_has_what_the_sets_own_grader_gives_it(
    box: LocalSandbox, program: str, tests: Any, value: float
) -> None:
    found = judged(box, program, tests)
    assert found.scored and found.value == value, found.why


@pytest.mark.slow
def test_the_three_kinds_of_cases(box: LocalSandbox) -> None:
    good = judged(box, "print(int(input()) * 2)", DOUBLE)
    assert good.value == 1 and good.status is Status.SCORED and good.answer == "print(int(input()) * 2)\n"
    assert [case["passed"] for case in good.extra["cases"]] == [True, True]
    half = judged(box, "print(2)", json.dumps(DOUBLE))
    assert half.value == 0.5 and half.parts["passed"] == 0.5 and "the output differs" in half.why
    assert judged(box, "print(2)", DOUBLE, continuous=False).value == 0
    assert judged(box, "def add(a, b): return a + b", ADD_CALL).value == 1
    assert judged(box, "class Solution:\n    def add(self, a, b): return a + b", ADD_CALL).value == 1
    assert judged(box, "def add(a, b): return a + b", ADD).value == 1
    assert judged(box, "def add(a, b): return 3", ADD).value == 0.5
    rich = [
        "import math\nassert math.isclose(f(2), 2 ** 0.5)",
        "assert sorted(set(g())) == [1, 2] and g() != [], 'why'",
        "assert h() == {(1, 2): {3.0}}",
        "assert not f(-1)",
    ]
    program = "def f(x): return x ** 0.5 if x > 0 else None\ndef g(): return [2, 1, 1]\ndef h(): return {(1, 2): {3.0}}"
    assert judged(box, program, {"assert_case": rich}).value == 1


def test_all_three_lists_of_codecontests_count() -> None:
    """Most of its tests are the generated ones; they were left out without a word."""
    lists = ("public_tests", "private_tests", "generated_tests")
    cases = read_cases({name: {"input": [str(at)], "output": ["x"]} for at, name in enumerate(lists)})
    assert [case.given for case in cases] == ["0", "1", "2"]


CHEATS = {
    "leaves early with 0": "import os; os._exit(0)",
    "leaves with an exception that says 0": "raise SystemExit(0)",
    "equals everything": "class E:\n    def __eq__(self, other): return True\n    def __hash__(self): return 1\ndef add(a, b): return E()",
    "is an int that equals everything": "class E(int):\n    def __eq__(self, other): return True\ndef add(a, b): return E(0)",
    "forges the result file": "import atexit, json\natexit.register(lambda: json.dump({'verdicts': [[True, '']] * 9, 'passed': True}, open('result.json', 'w')))\nimport os\ndef add(a, b): os._exit(0)",
    "forges values that are none": "import json, os\ndef add(a, b):\n    json.dump({'values': [{'k': 'E', 'v': 1}]}, open('result.json', 'w')); os._exit(0)",
    "forges deep values": "import os\ndef add(a, b):\n    open('result.json', 'w').write('{\"values\": [' + '[' * 100000); os._exit(0)",
    "prints a verdict": "print('PASSED 2/2'); print('{\"verdicts\": [[true, \"\"]]}')",
    "walks the stack": "import sys\ndef add(a, b):\n    frame = sys._getframe()\n    while frame:\n        for value in list(frame.f_locals.values()) + list(frame.f_globals.values()):\n            if isinstance(value, dict) and 'expected' in value: return value['expected']\n            if isinstance(value, dict) and 'outputs' in value: return value['outputs'][0]\n        frame = frame.f_back\n    raise KeyError",
    "looks for the tests in files": "import glob\ndef add(a, b):\n    text = ''.join(open(p).read() for p in glob.glob('/box/*') if 'solution' not in p)\n    return 3 if '3' in text and 'outputs' in text else None",
    "patches the harness": "import builtins, json\njson.dump = lambda *a, **k: None\nbuiltins.AssertionError = Exception\nimport __main__\n__main__.encode = lambda v, d=0: {'k': 'bool', 'v': True}\ndef add(a, b): return None",
    "patches equality of what it returns": "import __main__\n__main__.encode = lambda v, d=0: {'k': 'object', 'v': 'x'}\ndef add(a, b): return 1",
    "forks bombs": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "floods": "import sys\nwhile True: sys.stdout.write('3\\n' * 10000)",
    "eats memory": "x = [0] * 10 ** 9",
    "reads the environment": "import os\ndef add(a, b): return int(os.environ['ANSWER'])",
    "never ends": "def add(a, b):\n    while True: pass",
    "does not compile": "def add(a, b: return 3",
}  # fmt: skip


@pytest.mark.parametrize("kind", ["assert", "call", "stdin"])
@pytest.mark.parametrize("name", CHEATS)
@pytest.mark.slow
def test_no_cheat_scores(box: LocalSandbox, name: str, kind: str) -> None:
    tests = {"assert": ADD, "call": ADD_CALL, "stdin": DOUBLE}[kind]
    score = judged(box, CHEATS[name], tests, timeout=2.0, continuous=False)
    assert score.value == 0 and score.status in (Status.SCORED, Status.CRASHED, Status.TIMEOUT), score
    assert score.why


@pytest.mark.slow
def test_one_row_cannot_spoil_the_next(box: LocalSandbox) -> None:
    """E3: a program that patches what judges it changes nothing for the others, whichever comes first."""
    patch = CHEATS["patches the harness"]
    rows = answered(
        [
            f"```python\n{text}\n```"
            for text in (patch, "def add(a, b): return a + b", patch, "def add(a, b): return a + b")
        ],
        [ADD] * 4,
    )
    assert [score.value for score in as_reward(Code(box)).score(rows)] == [0, 1, 0, 1]


def test_expected_outputs_never_enter_the_models_process(box: LocalSandbox) -> None:
    """Everything that the program's sandbox is given, looked through for the answer."""
    asked = []
    original = box.execute

    async def watched(program: Any) -> Any:
        asked.append(program)
        return await original(program)

    box.execute = watched  # type: ignore[method-assign]
    try:
        program = "def add(a, b): return a * 1000 + b"
        for tests in (
            {"assert_case": ["assert add(1, 2) == 918273"]},
            {"fn_name": "add", "inputs": ["1\n2"], "outputs": ["918273"]},
            {"inputs": ["1"], "outputs": ["918273"]},
        ):
            assert judged(box, program, tests).value == 0
    finally:
        del box.execute  # type: ignore[method-assign]
    with_code = [one for one in asked if program in one.code or program.encode() in b"".join(one.files.values())]
    assert len(with_code) == 3
    for one in with_code:
        assert "918273" not in one.code + (one.stdin or "") and b"918273" not in b"".join(one.files.values())


def test_rows_without_code_or_with_tests_that_are_none(box: LocalSandbox) -> None:
    reward = as_reward(Code(box))
    bare = reward.score(answered(["print(2)"], [DOUBLE]))[0]
    assert bare.status is Status.NO_ANSWER and "no code block" in bare.why
    for tests in ({}, {"inputs": [], "outputs": []}, {"inputs": ["1"], "outputs": []}, "not json", None,
                  {"assert_case": ["assert 1 == 1"]}, {"assert_case": ["assert ("]}):  # fmt: skip
        score = judged(box, "def add(a, b): return 3", tests)
        assert score.status is Status.NOT_APPLICABLE and "invalid tests" in score.why and not score.scored


def test_a_sandbox_that_cannot_run_is_machinery(box: LocalSandbox) -> None:
    class Broken:
        languages = ("python",)

        async def execute(self, program: Any) -> Any:
            from workbench.sandbox import Result

            return Result(status="SandboxError", message="out of machines")

        def describe(self) -> str:
            return "broken"

    for tests in (ADD, ADD_CALL, DOUBLE):
        score = Reward(Code(Broken()), in_process=True, on_failure="value=-9").score(
            answered(["```python\nx\n```"], [tests])
        )[0]
        assert score.value == -9 and "out of machines" in score.why


@pytest.mark.slow
def test_rows_wait_for_their_turn_in_the_sandbox_as_long_as_it_takes() -> None:
    """A row's limit is its programs'; forty rows of half a second on one place are no forty failures."""
    try:
        narrow = LocalSandbox(max_concurrent=1)
    except SandboxError as error:
        pytest.skip(str(error))
    reward = as_reward(Code(narrow, timeout=patience(3.0)))
    assert reward.timeout > 3600  # type: ignore[attr-defined]
    rows = answered(
        ["```python\nimport time; time.sleep(0.2); print(1)\n```"] * 10, [{"inputs": [""], "outputs": ["1"]}] * 10
    )
    assert [score.value for score in reward.score(rows)] == [1.0] * 10


@pytest.mark.slow
def test_a_failure_ends_all_or_nothing_early(box: LocalSandbox) -> None:
    tests = {"inputs": [""] * 50, "outputs": ["x"] * 50}
    score = judged(box, "import time; time.sleep(9)", tests, continuous=False, timeout=0.5)
    assert len(score.extra["cases"]) == 1 and score.extra["cases"][0]["limit"] == "time"
    assert len(judged(box, "print('x')", tests, max_cases=3).extra["cases"]) == 3


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\na\n```", "a\n"), ("```py\na\n```\nthen\n```python\nb\n```", "b\n"), ("```\na\n```", "a\n"),
        ("```cpp\na\n```\n```python\nb\n```\n```text\nc\n```", "b\n"), ("```python\ncut off", "cut off"),
        ("<think>```python\nno\n```</think>```python\nyes\n```", "yes\n"), ("no fence", None), ("", None),
    ],
)  # fmt: skip
def test_extracting_code(text: str, code: str | None) -> None:
    assert extract_code(text) == code


def test_comparing() -> None:
    assert same_output("1 \n2\n\n", "1\n2", "lines") and not same_output("1 \n2", "1\n2", "exact")
    assert same_output("1\n", "1\n\n", "exact") and same_output("0.30000001 a", "0.3\na", "tokens")
    assert not same_output("A", "a", "lines") and not same_output("1 2", "1", "tokens")
    assert same_value((1, (2,)), [1, [2]]) and same_value(3, [3]) and not same_value([3], 3)
    assert same_value({1: "a"}, {"1": "a"})
    with pytest.raises(SettingError, match="compare"):
        Code(object(), compare="near")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "value", [None, True, -(10**30), 1.5, float("inf"), "é\ud800", b"\x00", [1, (2, {3})], {(1,): frozenset({2})}, 1j, bytearray(b"x")]
)  # fmt: skip
def test_values_cross_unchanged(value: Any) -> None:
    assert decode(json.loads(json.dumps(encode(value)))) == value and type(decode(encode(value))) is type(value)


def test_what_has_behaviour_does_not_cross() -> None:
    for value in (object(), lambda: 1, type("S", (str,), {})("x")):
        with pytest.raises(TypeError, match="not plain data"):
            encode(value)
    nested: list[Any] = []
    for _ in range(100):
        nested = [nested]
    with pytest.raises(TypeError, match="too deeply"):
        encode(nested)
    with pytest.raises(DataError, match="expected JSON"):
        read_cases("{")


# --- the forms of data sets -----------------------------------------------------------------------

PRIME = [{"input": "2", "output": "True"}, {"input": "4", "output": "False"}, {"input": "17", "output": "True"}]
IS_PRIME = "n = int(input())\nprint(n > 1 and all(n % d for d in range(2, n)))"


@pytest.mark.slow
def test_the_seeds_own_rows(box: LocalSandbox) -> None:
    """D2: a null ground truth, and a list of {input, output} in extra_info: 1, 2/3 and 0 for right, constant and no code."""
    reward = by_data_source(sandbox=box)
    answers = [f"```python\n{IS_PRIME}\n```", "```python\nprint(True)\n```", "it is prime"]
    sources = {"data_source": ["codecontests"] * 3, "extra_info": [{"test_cases": PRIME}] * 3}
    rows = answered(answers, ["x"] * 3, **sources).with_columns({"reward_model": [{"ground_truth": None}] * 3})
    scores = reward.score(rows)
    assert [score.value for score in scores] == [1, pytest.approx(2 / 3), 0] and scores[2].status is Status.NO_ANSWER


HUMAN_EVAL = {
    "entry_point": "add",
    "prompt": "def helper(x):\n    return x + 1\n\ndef add(a, b):\n    'adds'\n",
    "test": """
METADATA = {'author': 'x'}

def check(candidate):
    assert True, "This prints if this assert fails 1"
    assert candidate(1, 2) == 3, "small"
    for a in range(3):
        b = a * 2
        assert candidate(a, b) == a + b
    assert abs(candidate(0.1, 0.2) - 0.3) < 1e-6
    assert candidate(candidate(1, 1), helper(1)) == 4
    items = [candidate(n, n) for n in (1, 2)]
    first, second = items
    assert first == 2 and second == 4
""",
}
KOD_CODE = """
from solution import *
import math

def test_small():
    assert add(1, 2) == 3

def test_more():
    result = add([1], [2])
    assert isinstance(result, list)
    assert result == [1, 2]
    try:
        add(1, None)
        raised = False
    except TypeError:
        raised = True
    assert raised
"""
MBPP = ["assert add(1, 2) == 3", "assert add(2, 2) == 4", "assert True"]
LIVE = {
    "public_test_cases": json.dumps([{"input": "[1]\n[2]", "output": "[1, 2]", "testtype": "functional"}]),
    "private_test_cases": [{"input": "1\n2", "output": "3", "testtype": "functional"}],
    "metadata": json.dumps({"func_name": "add"}),
}
FORMS: dict[str, tuple[Any, Any]] = {
    "HumanEval": (HUMAN_EVAL, None),
    "HumanEval as text": (HUMAN_EVAL["test"].replace("helper(1)", "2"), {"entry_point": "add"}),
    "HumanEval that calls itself": (HUMAN_EVAL["test"].replace("helper(1)", "2") + "\ncheck(add)\n", None),
    "KodCode": (KOD_CODE, None),
    "MBPP": (MBPP, None),
    "MBPP's record": ({"test_list": MBPP, "test_setup_code": "import math", "test_imports": []}, None),
    "statements": (["x = add(1, 2)\nassert x == 3", "assert add(2, 2) == 4"], None),
    "LiveCodeBench": (LIVE, None),
    "LiveCodeBench, the name in extra_info": ([LIVE["private_test_cases"][0]], {"metadata": LIVE["metadata"]}),
    "pairs": ([[[1, 2], 3], [["a", "b"], "ab"]], {"fn_name": "add"}),
    "pairs of text": ([["1\n2", "3"], ["'a'\n'b'", "'ab'"]], {"fn_name": "add"}),
    "Python's literals": ({"fn_name": "add", "inputs": ["True\n1", "(1,)\n(2,)"], "outputs": ["2", "(1, 2)"]}, None),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_functions_in_every_form(box: LocalSandbox, form: str) -> None:
    """R7: the canonical solution gets 1, another does not, whether the tests are values or JSON."""
    tests, extra = FORMS[form]
    reward = as_reward(Code(box, timeout=patience(5.0)))
    answers = [f"```python\ndef {one}\n```" for one in ("add(a, b): return a + b", "add(a, b): return 99")]
    rows = answered(answers, [tests, json.dumps(tests)], extra_info=[extra or {}] * 2)
    right, constant = reward.judge(row_views(rows))
    assert right.value == 1 and right.status is Status.SCORED, right
    assert constant.scored and 0 <= constant.value < 1, constant


@pytest.mark.slow
def test_a_function_that_is_not_there_is_a_crash(box: LocalSandbox) -> None:
    for form in ("KodCode", "MBPP", "pairs"):
        tests, extra = FORMS[form]
        rows = answered(["```python\ndef other(a, b): return a + b\n```"], [tests], extra_info=[extra or {}])
        (missing,) = as_reward(Code(box)).judge(row_views(rows))
        assert missing.value == 0 and missing.status is Status.CRASHED and "add" in missing.why, missing


STDIN: dict[str, Any] = {
    "CommonOJ": {"test": [{"input": {"stdin": "3\n"}, "output": {"stdout": "6\n"}}]},
    "LiveCodeBench": [{"input": "3\n", "output": "6\n", "testtype": "stdin"}, {"input": "4", "output": "8"}],
    "CodeContests": {"input": ["3", "4"], "output": ["6", "8"]},
    "pairs": [["3", "6"], [4, 8]],
    "JSON of each": [json.dumps({"input": "3", "output": "6"}), json.dumps(["4", "8"])],
    "one": {"input": "3", "output": 6},
}


@pytest.mark.parametrize("form", STDIN)
def test_programs_in_every_form(form: str) -> None:
    for tests in (STDIN[form], json.dumps(STDIN[form]), np.array(STDIN[form], object)):
        cases = read_cases(tests)
        assert {case.kind for case in cases} == {"stdin"}
        assert all(int(case.expected) == 2 * int(case.given) for case in cases) and len(cases) == len({*cases})


@pytest.mark.parametrize(
    ("tests", "extra", "why"),
    [
        ([["1", "2"], ["1", "2", "3"]], {}, "test case 1.*a pair.*3 values"), ([["1", "2"], "assert f(1)"], {}, "test case 1"),
        ([{"input": "1", "output": "2"}, {"in": "1"}], {}, r"test case 1.*keys \['in'\]"), ([1, 2], {}, "test case 0"),
        (["assert f(1) == 1", "assert ("], {}, "test case 1"), (["assert True"], {}, "assertions that call a function of the response"),
        ([{"input": "1", "output": "1", "testtype": "functional"}], {}, "test case 0.*func_name"),
        ([{"input": "1", "output": "1"}, {"input": "1", "output": "1", "testtype": "stdin"}], {"fn_name": "f"}, "test case 1 is a stdin"),
        ("def check(candidate):\n    assert candidate(1) == 1", {}, "entry_point"), ([{"input": "1", "output": None}], {}, "test case 0: output"),
        ("def test_a(tmp_path):\n    assert f(tmp_path)", {}, "fixtures"), ("def f(): pass", {}, "assertions"), (b"[]", {}, "test cases"),
        ("def test_a():\n    assert 1 == 1", {}, "calls of the response's functions"), (5, {}, "found 5"), ("5", {}, "found 5"),
        ({"inputs": [{"a": 1}], "outputs": [1], "fn_name": "f"}, {}, "test case 0: arguments of f"), (None, {"test_cases": []}, "test cases"),
    ],
)  # fmt: skip
def test_tests_that_cannot_be_read_are_named(tests: Any, extra: dict[str, Any], why: str) -> None:
    with pytest.raises(DataError, match=why):
        read_cases(tests, extra)


@pytest.mark.slow
def test_any_tests_are_read_or_refused() -> None:
    for value in VALUES.values():
        for tests in (value, [value, value], {"inputs": value, "outputs": value}, {"test_cases": value}, {"assert_case": [value]},
                      {"fn_name": "f", "inputs": [value], "outputs": [value]}, [{"input": value, "output": value}], {"test": value}):  # fmt: skip
            found = answer(lambda: read_cases(tests, {}))  # noqa: B023
            assert isinstance(found, DataError) or found
        for extra in (value, {"test_cases": value}, {"fn_name": value}, {"metadata": value}):
            found = answer(lambda: read_cases([["1", "2"]] if extra != {"test_cases": value} else None, extra))  # noqa: B023
            assert isinstance(found, DataError) or found


def test_a_loop_of_the_tests_that_a_program_never_ends_is_the_programs_fault(
    box: LocalSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was *not_applicable*: what a program returned decided that its row was not scored."""
    monkeypatch.setattr(sys.modules["workbench.rewards.code"], "_ROUNDS", 3)
    tests = {
        "test": "def check(candidate):\n    x = candidate(1)\n    while x != 2:\n        x = candidate(x)\n    assert x == 2",
        "entry_point": "f",
    }
    right = judged(box, "def f(x): return 2", tests)
    for program in ("def f(x): return [x]", "def f(x): return x - 1"):
        wrong = judged(box, program, tests)
        assert wrong.scored and wrong.value == 0 and wrong.status is Status.TIMEOUT and "more than 3 times" in wrong.why
    assert right.value == 1


@pytest.mark.slow
def test_scripts_that_fail_by_themselves_are_no_zero(box: LocalSandbox) -> None:
    for tests in (
        "import no_such_module\nassert add(1, 2) == 3",
        "def test_a():\n    while True: pass\n    assert add(1) == 1",
    ):
        score = judged(box, "def add(a, b): return a + b", tests, timeout=1.0)
        assert score.status is Status.NOT_APPLICABLE and "fail by themselves" in score.why
    partly = judged(box, "def add(a, b):\n    if a == 2: raise KeyError('no')\n    return a + b",
                    "def test_a():\n    assert add(1, 1) == 2\n    x = add(2, 2)\n    assert x == 4\n    assert add(3, 3) == 6")  # fmt: skip
    assert partly.value == pytest.approx(1 / 3) and "KeyError" in partly.why


@pytest.mark.parametrize("name", ["equals everything", "forges the result file", "forges deep values", "patches the harness", "walks the stack", "leaves early with 0"])  # fmt: skip
def test_no_cheat_scores_by_scripts(box: LocalSandbox, name: str) -> None:
    score = judged(box, CHEATS[name], "def test_a():\n    assert add(1, 2) == 3", timeout=2.0)
    assert score.value == 0 and score.scored, score


@pytest.mark.parametrize(
    ("got", "wanted", "same"),
    [
        (0.1 + 0.2, 0.3, True), ([0.1 + 0.2, {"a": (1.0,)}], [0.3, {"a": [1]}], True), (3, 3.0000001, True), (1e-9, 0.0, True),
        (0.3, 0.31, False), (10**7 + 1, 10**7, False), (10**400, 1.5, False), (float("nan"), float("nan"), True), (True, 1.0000001, False),
        (float("inf"), float("inf"), True), ("0.30000001", "0.3", False), ([1.0], 1.0, False), (1.0, [1.0], True),
    ],
)  # fmt: skip
def test_floats_are_equal_within_a_millionth(got: Any, wanted: Any, same: bool) -> None:
    assert same_value(got, wanted) is same


def test_printed_floats_are_equal_within_a_millionth() -> None:
    for compare in ("lines", "tokens"):
        assert same_output("0.3333333333\n", "0.3333333\n", compare) and same_output("YES 1.0", "YES 1.00", compare)
        assert not same_output("10000001", "10000000", compare) and not same_output("0.34", "0.33", compare)
        assert not same_output("nan", "NaN", compare) and not same_output("1_0.0", "10.0", compare)
    assert not same_output("1.0", "1.00", "exact") and not same_output("1.0  2", "1.00 2", "lines")


@pytest.mark.slow
def test_canonical_solutions_are_tried_on_their_rows(box: LocalSandbox) -> None:
    right = {"reward_model": {"ground_truth": ADD}, "extra_info": {"solution": "def add(a, b): return a + b"}}
    wrong = {**right, "extra_info": {"solution": "def add(a, b): return a"}}
    unreadable = {**right, "reward_model": {"ground_truth": "?"}}
    failing = Code(box).check_solutions([right, wrong, unreadable], lambda row: row["extra_info"]["solution"])
    assert sorted(failing) == [1, 2] and failing[1].value == 0 and failing[2].status is Status.NOT_APPLICABLE


USES_NUMPY = {
    "a program": ("import numpy\nprint(int(input()) * 2)", DOUBLE, None),
    "a program's function": ("def add(a, b):\n    import numpy\n    return a + b", ADD_CALL, None),
    "a function under a test": ("def add(a, b):\n    import numpy\n    return a + b", "def test_a():\n    assert add(1, 2) == 3", None),
    "an assertion": ("def add(a, b): return a + b", ["import numpy as np\nassert np.isclose(add(1, 2), 3)"], None),
    "a test": ("def add(a, b): return a + b", "import numpy as np\ndef check(f):\n    assert np.isclose(f(1, 2), 3)", {"entry_point": "add"}),
}  # fmt: skip


@pytest.mark.parametrize("where", USES_NUMPY)
def test_a_package_that_is_hidden_by_a_setting_left_open_is_no_fault_of_the_program(
    box: LocalSandbox, where: str
) -> None:
    program, tests, extra = USES_NUMPY[where]
    row = {"response": f"```python\n{program}\n```", "ground_truth": tests, "extra_info": extra}
    sandboxes = {"open": box, "shown": LocalSandbox(packages=True), "denied": LocalSandbox(packages=False)}
    table = dry_run({name: Code(one) for name, one in sandboxes.items()}, [row]).table.iloc[0]
    assert table["open/status"] == "infra_error" and "sandbox.local(packages=True)" in table["open/why"]
    assert table["shown"] == 1.0
    assert table["denied/status"] == ("not_applicable" if where == "a test" else table["denied/status"])
    assert where == "a test" or table["denied"] == 0.0


def test_no_response_escapes_a_zero_by_an_import(box: LocalSandbox) -> None:
    programs = ["print(int(input()) * 2)", "import numpy", "import foo_bar_baz"]
    batch = answered([f"```python\n{program}\n```" for program in programs], [DOUBLE] * 3)
    for reward in (
        as_reward(Code(box)),
        Rubric({"code": Code(box)}),
        Reward(Code(box), in_process=True, on_failure="retry(1)"),
    ):
        with pytest.raises(RewardError, match=r"failed on a row; found .*numpy.*packages=True.*packages=False"):
            reward.score(batch)
    counted = Reward(Code(box), in_process=True, on_failure="value=0").score(batch)
    assert [score.status for score in counted] == [Status.SCORED, Status.COUNTED, Status.CRASHED]
    denied = as_reward(Code(LocalSandbox(packages=False))).score(batch)
    assert [(score.value, score.status.value) for score in denied] == [(1, "scored"), (0, "crashed"), (0, "crashed")]
