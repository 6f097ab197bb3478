"""Code by test cases: what passes, what cannot cheat, and what it is called when it does not pass."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests_patience import patience

from workbench.base.errors import DataError, SandboxError, SettingError
from workbench.rewards import Code, Reward, Score, Status, as_reward
from workbench.rewards.case_harness import decode, encode
from workbench.rewards.code import extract_code, read_cases, same_output, same_value
from workbench.sandbox import LocalSandbox
from workbench.testing.rewards import RewardContract, answered


@pytest.fixture(scope="module")
def box() -> LocalSandbox:
    try:
        return LocalSandbox(memory_limit_mb=512)
    except SandboxError as error:
        pytest.skip(str(error))


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
                  {"assert_case": ["x = add(1, 2)\nassert x == 3"]}, {"assert_case": ["assert 1 == 1"]}, {"assert_case": ["assert ("]}):  # fmt: skip
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
