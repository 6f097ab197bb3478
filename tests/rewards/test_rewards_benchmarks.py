"""What programs for MBPP, APPS, TACO, LiveCodeBench and code_contests rely on: a right program scores 1, a wrong program 0."""

from __future__ import annotations

import re
from typing import Any

import pytest
from support.patience import patience

from workbench.rewards import Code, as_reward
from workbench.sandbox import LocalSandbox
from workbench.testing.rewards import answered


def streams(inputs: list[Any], outputs: list[Any]) -> dict[str, Any]:
    return {"inputs": inputs, "outputs": outputs}


def method(name: str, inputs: list[Any], outputs: list[Any]) -> dict[str, Any]:
    return {"fn_name": name, "inputs": inputs, "outputs": outputs}


BIG = "9" * 6000

CASES: dict[str, tuple[str, Any]] = {
    "mbpp named test_": (
        "def test_dup(a): return len(set(a))!=len(a)",
        {"test_list": ["assert test_dup([1,1])==True", "assert test_dup([1])==False"]},
    ),
    "mbpp named check": (
        "def check(n): return n==73",
        {"test_list": ["assert check(70) == False", "assert check(73) == True"]},
    ),
    "mbpp plain named check": ("def check(n): return n==73", ["assert check(70) == False", "assert check(73) == True"]),
    "mbpp set(f())": ("def f(a,b): return tuple(set(a)&set(b))", ["assert set(f((3,4),(4,3))) == set((3,4))"]),
    "mbpp isclose": (
        "def f(): return 0.1+0.2",
        {"test_list": ["assert math.isclose(f(), 0.3, rel_tol=0.001)"], "test_imports": ["import math"]},
    ),
    "big stdin": ("print(int(input())+0)", streams([BIG], [BIG])),
    "stdin.buffer": ("import sys\nprint(sum(map(int,sys.stdin.buffer.read().split())))", streams(["1 2\n3"], ["6"])),
    "buffer.readline": (
        "import sys\ninput=sys.stdin.buffer.readline\nn=int(input());print(n)",
        streams(["5\n"], ["5"]),
    ),
    "stdin.readline alias": (
        "import sys\ninput=lambda: sys.stdin.readline().rstrip()\nprint(input()[::-1])",
        streams(["abc\n"], ["cba"]),
    ),
    "open(0)": ("print(sum(map(int,open(0).read().split())))", streams(["1 2"], ["3"])),
    "stdin iter": ("import sys\nfor l in sys.stdin: print(l.strip())", streams(["a\nb"], ["a\nb"])),
    "os.read": ("import os\nprint(os.read(0,99).decode().strip())", streams(["a"], ["a"])),
    "fileinput": ("import fileinput\nprint(len(list(fileinput.input())))", streams(["a\nb"], ["2"])),
    "recursion": ("def f(n): return 0 if n==0 else 1+f(n-1)\nprint(f(int(input())))", streams(["20000"], ["20000"])),
    "threading stack": (
        "import sys,threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(1<<26)\ndef m(): print(input())\nt=threading.Thread(target=m);t.start();t.join()",
        streams(["a"], ["a"]),
    ),
    "__main__": ("def main(): print(input())\nif __name__ == '__main__': main()", streams(["a"], ["a"])),
    "sys.exit": ("import sys\nprint(input());sys.exit()", streams(["a"], ["a"])),
    "exit(0)": ("print(input());exit(0)", streams(["a"], ["a"])),
    "quit": ("print(input());quit()", streams(["a"], ["a"])),
    "floats 0.50": ("print(0.5)", streams([""], ["0.50"])),
    "floats 1e-9": ("print(0.30000000000000004)", streams([""], ["0.3"])),
    "trailing ws": ("print('a ');print('b');print()", streams([""], ["a\nb"])),
    "list lines": ("print(1);print(2)", streams([["a", "b"]], [["1", "2"]])),
    "Solution List": (
        "class Solution:\n    def f(self, a: List[int]) -> Optional[int]: return max(a)",
        method("f", [[[1, 2]]], [2]),
    ),
    "Solution nested": (
        "class Solution:\n    def f(self, a: 'List[int]'): \n        @lru_cache(None)\n        def g(i): return 0 if i==len(a) else a[i]+g(i+1)\n        return g(0)",
        method("f", [[[1, 2]]], [3]),
    ),
    "Solution @cache inf": (
        "class Solution:\n    def f(self, a: List[int]):\n        d=defaultdict(int); d[1]+=1\n        h=[]; heappush(h,1)\n        return Counter(a)[1]+bisect_left(a,1)+(inf>1)+len(list(accumulate(a)))",
        method("f", [[[1, 2]]], [4]),
    ),
    "Solution tuple": ("class Solution:\n    def f(self, a): return (1,2)", method("f", [[1]], [[1, 2]])),
    "APPS output wrapped": ("def f(a): return a+1", method("f", [[1]], [[2]])),
    "Solution big": ("class Solution:\n    def f(self, a): return 10**5000", method("f", [[1]], [10**5000])),
    "text of digits": (
        "class Solution:\n    def f(self, a): return a",
        {"fn_name": "f", "inputs": [BIG[:5000]], "outputs": [BIG[:5000]]},
    ),
    "Decimal/Fraction": (
        "from fractions import Fraction\nfrom decimal import Decimal\nprint(Fraction(1,2)+0, Decimal('1.5'))",
        streams([""], ["1/2 1.5"]),
    ),
    "stdin no import": ("n=int(sys.stdin.readline());print(math.sqrt(n))", streams(["4"], ["2.0"])),
    "stdin heapq names": ("h=[];heapq.heappush(h,1);print(deque([1])[0], gcd(4,6))", streams([""], ["1 2"])),
    "crlf": ("print(input())", streams(["a\r\n"], ["a\r\n"])),
    "unicode": ("print(input()[::-1])", streams(["äö→"], ["→öä"])),
    "upper yes": ("print('YES')", streams([""], ["YES\n"])),
    "code_contests": ("print(int(input())*2)", {"input": ["1", "2"], "output": ["2", "4"]}),
    "MBPP a generator": ("def f(n):\n    yield from range(n)", "assert list(f(3)) == [0, 1, 2]"),
    "MBPP an iterator is no list": (
        "def f(n):\n    return map(str, range(n))",
        "assert f(1) != ['0'] and next(f(1)) == '0'",
    ),
    "MBPP a builtin's name": ("def sum(a, b):\n    return a * b", ["assert sum(2, 3) == 6", "assert sum(1, 4) == 4"]),
    "MBPP a match": ("import re\ndef f(t):\n    return re.match('a', t)", "assert f('abc') and f('b') is None"),
    "KodCode import": ("def add(a,b): return a+b", "from solution import add\ndef test_a():\n    assert add(1,2)==3"),
}


@pytest.mark.slow
def test_tests_that_call_nothing_of_the_response_do_not_pass(box: LocalSandbox) -> None:
    (score,) = as_reward(Code(box, timeout=patience(5.0))).score(
        answered(["```python\ndef f(): return 1\n```"], [["assert sum([1, 2]) == 3"]])
    )
    assert score.value == 0 and "does not define 'sum'" in score.why


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_right_program_scores_1_and_a_wrong_program_0(box: LocalSandbox, case: str) -> None:
    program, tests = CASES[case]
    names = re.findall(r"def (\w+)", program)
    wrong = "\n".join([f"def {name}(*inputs): return 'no'" for name in names] + ["print('no')"])
    rows = answered([f"```python\n{text}\n```" for text in (program, wrong)], [tests, tests])
    right, other = as_reward(Code(box, timeout=patience(5.0))).score(rows)
    assert right.scored and right.value == 1, right.why
    assert other.scored and other.value == 0, other.why
