"""Programs that a hostile answer may hold: none is told what is right, judges itself, or escapes its 0."""

from __future__ import annotations

import json
from typing import Any

import pytest

from workbench.base.errors import DataError, SandboxError
from workbench.rewards import Code, Score, Status, as_reward
from workbench.rewards.case_harness import encode
from workbench.rewards.cases import read_cases
from workbench.rewards.code import extract_code, same_output
from workbench.sandbox import LocalSandbox, Result
from workbench.testing.rewards import answered


@pytest.fixture(scope="module")
def box() -> LocalSandbox:
    try:
        return LocalSandbox(memory_limit_mb=128)
    except SandboxError as error:
        pytest.skip(str(error))


def judged(box: Any, program: str, tests: Any, **options: Any) -> Score:
    reward = as_reward(Code(box, **{"timeout": 5.0, **options}))
    return reward.score(answered([f"```python\n{program}\n```"], [tests]))[0]


class Says:
    """A sandbox in which every program has written this."""

    languages = ("python",)

    def __init__(self, body: bytes) -> None:
        self.body = body

    async def execute(self, program: Any) -> Result:
        return Result(status="Success", files={"result.json": self.body})

    def describe(self) -> str:
        return "says"


# --- what the program is told ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "f(3).startswith('EXP')", "f(3).__eq__('EXP')", "not f(3).__ne__('EXP') is False", "f(1).get('EXP') == 1", "f(3)[0].count('EXP')",
        "Solution().g(3).index('EXP') == 0", "Solution.g(3).index('EXP') == 0", "f(3).strip().endswith('EXP')", "f(3)['EXP'].x()",
        "f(3).equals('EXP')", "Solution().g(3).equals('EXP')", "Stack().push(1).contains('EXP')", "f(3).strip().same(of='EXP')",
        "math.isclose(f(1), len('EXP'))", "close(f(1), 'EXP')", "close(got=f(1), want='EXP') is True", "any([close('EXP', f(1))])",
        "not np.allclose(f(1), 'EXP') == False", "distance(f(1), 'EXP') < 1", "f(1) == 'EXP' or close(f(1), 'EXP')", "f(1) in {'EXP'}",
        "all(f(x) == y for x, y in [(1, 'EXP')])", "all(map(lambda x, y: f(x).startswith(y), [1], ['EXP']))",
    ],
)  # fmt: skip
def test_a_program_is_not_told_what_is_right(text: str) -> None:
    try:
        (case,) = read_cases([f"assert {text}"])
    except DataError as error:
        assert "test case 0" in str(error) and "the program's own" in str(error)
    else:
        assert case.kind == "script" or "EXP" not in json.dumps(case.given)  # a script's process has no program in it


@pytest.mark.parametrize(
    ("text", "calls", "rest"),
    [
        ("f(3).strip().startswith('a')", ["f(3).strip()"], "_value_0.startswith('a')"),
        ("Solution().g(3)[0].count('a') == f(1)", ["Solution().g(3)", "f(1)"], "_value_0[0].count('a') == _value_1"),
        ("decode(encode('a', 3), 3) == 'a'", ["decode(encode('a', 3), 3)"], "_value_0 == 'a'"),
        ("add(add(1, 1), 2) == 4", ["add(add(1, 1), 2)"], "_value_0 == 4"), ("adder(3)(4) == 7", ["adder(3)(4)"], "_value_0 == 7"),
        ("Stack(1).push(2).size() == 2", ["Stack(1).push(2).size()"], "_value_0 == 2"),
        ("same(Node(1), 2)", ["same(Node(1), 2)"], "_value_0"), ("is_prime(7) and not is_prime(8)", ["is_prime(7)", "is_prime(8)"], "_value_0 and (not _value_1)"),
        ("sorted(f(3), key=lambda s: s.lower()) == ['a']", ["f(3)"], "sorted(_value_0, key=lambda s: s.lower()) == ['a']"),
        ("all(x > 0 for x in f(3))", ["f(3)"], "all((x > 0 for x in _value_0))"), ("f(3).get(g(1), 0) == 2", ["f(3)", "g(1)"], "_value_0.get(_value_1, 0) == 2"),
    ],
)  # fmt: skip
def test_only_calls_are_made_where_the_program_is(text: str, calls: list[str], rest: str) -> None:
    (case,) = read_cases([f"assert {text}"])
    assert case.given["calls"] == calls and case.expected == f"assert {rest}"


METHODS = """
class Yes(str):
    def __getattr__(self, name): return lambda *a, **k: True
    def startswith(self, *a): return True
    def __eq__(self, other): return True
    __hash__ = str.__hash__
def f(x): return Yes("x")
"""


@pytest.mark.slow
def test_what_is_done_with_a_value_is_done_on_plain_data(box: LocalSandbox) -> None:
    tests = ["assert f(3).startswith('ab')", "assert all(f(x) == y for x, y in [(1, 'ab1')])"]
    for text in tests:
        assert judged(box, METHODS, [text]).value == 0
    assert judged(box, "def f(x): return f'ab{x}'", [tests[0]]).value == 1
    many = "assert all(f(x) == y for x, y in [(n, n * n) for n in range(20)])"
    assert judged(box, "def f(x): return x * x", [many]).value == 1


# --- ends that are early, or late -----------------------------------------------------------------

STOPS = "def f(x):\n    if x == 1: return 'KNOWN'\n    raise StopIteration"
ZIP = "from solution import f\ndef test_a():\n    for got, want in zip(map(f, {xs}), ['KNOWN', 'b', 'c']):\n        assert got == want\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tests", "most"),
    [
        (ZIP.format(xs=[1, 7, 9]), 0.34), (ZIP.format(xs=[7, 9]), 0.0),
        ("def test_a():\n    assert all(map(lambda x, y: f(x) == y, [1, 7], ['KNOWN', 'b']))", 0.0),
        ("def test_a():\n    for x in f(1):\n        assert x in 'KNOWN'\n    assert f(2) == 'b'", 0.0),
    ],
)  # fmt: skip
def test_assertions_that_are_not_reached_or_come_too_often_are_no_points(
    box: LocalSandbox, tests: Any, most: float
) -> None:
    """A StopIteration ends no loop of the tests, and a longer result is not more tests passed."""
    score = judged(box, STOPS, tests)
    assert score.scored and score.value <= most, score


@pytest.mark.slow
def test_tests_that_only_say_assert_false_pass_where_that_is_not_reached(box: LocalSandbox) -> None:
    tests = "def test_a():\n    try:\n        f(-1)\n        assert False\n    except ValueError:\n        pass"
    assert judged(box, "def f(x): raise ValueError(x)", tests).value == 1
    assert judged(box, "def f(x): return x", tests).value == 0


# --- what comes back ------------------------------------------------------------------------------

FORGED = "import os\ndef f(x):\n    open('result.json', 'w').write(BODY)\n    os._exit(0)"
BODIES = {
    "4 MB of dicts": '\'{"values":[{"k":"list","v":[\' + \'{"":0},\' * 560000 + \'0]}]}\'',
    "as deep as JSON is read": "'{\"values\":[' + '[' * 977 + ']' * 977 + ']}'",
    "deeper": "'{\"values\":[' + '[' * 10 ** 6",
    "tags of no kind": '\'{"values":[{"k":[],"v":{}}]}\'',
    "no list": "'[5]'",
}


@pytest.mark.parametrize("tests", [["assert f(3) == 4"], "def test_a():\n    assert f(3) == 4", {"fn_name": "f", "inputs": [[3]], "outputs": [4]}])  # fmt: skip
@pytest.mark.parametrize("body", BODIES)
def test_a_forged_value_is_a_judged_zero(box: LocalSandbox, body: str, tests: Any) -> None:
    score = judged(box, FORGED.replace("BODY", BODIES[body]), tests)
    assert score.value == 0 and score.scored and score.why, score


@pytest.mark.slow
def test_a_value_that_ends_the_judging_is_that_assertions_failure_alone(box: LocalSandbox) -> None:
    tests = [
        "assert f(1) == 1",
        "assert len('a' * f(2)) and [0] * f(2)",
        "assert list(range(f(3))) == [0, 1, 2]",
        "assert f(4) == 4",
    ]
    score = judged(box, "def f(x): return x if x != 2 else 10 ** 6 * 30", tests)
    assert score.scored and score.value == 0.75, score
    ends = judged(
        box,
        "def f(x): return 10 ** 12",
        "def test_a():\n    assert sum(1 for _ in range(f(1))) == 1",
        timeout=1.5,
    )
    assert ends.value == 0 and ends.status is Status.TIMEOUT and "with what the program returned" in ends.why, ends


@pytest.mark.parametrize(
    ("value", "expected", "right"),
    [
        ({1: "a", "b": {2: [3.0]}}, {"1": "a", "b": {"2": [3]}}, 1), ({}, [], 0), ([], {}, 0), ({1, 2}, [1, 2], 0), (frozenset({1, 2}), {1, 2}, 1),
        ({(1, 2)}, {(1, 2)}, 1), ({frozenset({1})}, {frozenset({1})}, 0), ((1, (2,)), [1, [2]], 1), (10**400, 10**400, 1), (10**400, 1.5, 0),
        (float("nan"), 1.0, 0), ({10**6000: 1}, {"1": 1}, 0), (2**63, 2**63, 1), (b"a", "a", 0), (1 + 0j, 1, 1), (None, [None], 1),
    ],
)  # fmt: skip
def test_returned_values_are_compared_without_their_hashes(value: Any, expected: Any, right: float) -> None:
    body = json.dumps({"values": [encode(value)]}).encode()
    assert judged(Says(body), "x", {"fn_name": "f", "inputs": [[1]], "outputs": [expected]}).value == right


@pytest.mark.slow
def test_work_on_a_programs_text_is_linear() -> None:
    """Each of these took minutes, on the event loop, where time grew with the square of the text."""
    assert extract_code("```python\nx\n```\n```" + "a" * 10**6) == "x\n"
    for text in ("1" * 10**6 + "x", "1" * 10**5 + "e5x", " " * 10**6 + "x"):
        for compare in ("lines", "tokens"):
            assert not same_output(text, "1.0", compare)
    prime = 2**61 - 1  # all of its multiples have one hash
    for kind in ("set", "frozenset", "dict"):
        items = [
            [hexed, 1] if kind == "dict" else hexed
            for hexed in ({"k": "int", "v": hex(n * prime)} for n in range(1, 50_000))
        ]
        body = json.dumps({"values": [{"k": kind, "v": items}]}).encode()
        assert judged(Says(body), "x", {"fn_name": "f", "inputs": [[1]], "outputs": [5]}).value == 0


@pytest.mark.slow
def test_a_score_can_be_shown_and_saved_whatever_the_program_said(box: LocalSandbox) -> None:
    said = "\\x1b]0;owned\\x07\\u202e\\ud800"
    for tests in ({"fn_name": "f", "inputs": [[1]], "outputs": ["a"]}, "def test_a():\n    assert f(1) == 5"):
        for program in (f"def f(x): raise ValueError('{said}')", f"def f(x): return '{said}'"):
            score = judged(box, program, tests)
            assert all(letter.isprintable() or letter == "\n" for letter in str(score) + repr(score)), score
            assert json.dumps([score.why, score.answer, dict(score.extra)], ensure_ascii=False).encode()
