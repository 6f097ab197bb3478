"""Scores code by test cases run in a sandbox: what passed is decided here, never where the model's code runs."""

from __future__ import annotations

import ast
import asyncio
import builtins
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from workbench.base.config import require
from workbench.base.errors import DataError, describe
from workbench.rewards import case_harness
from workbench.rewards.score import Score, Status, failed
from workbench.sandbox.protocol import Program, Result, Sandbox

_FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+#-]*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
_SHOWN = 300
_HARNESS = Path(case_harness.__file__).read_text(encoding="utf-8")
_NO_VALUE = "the program ended before its function returned"


def extract_code(text: str) -> str | None:
    """The code in a response: the last ```python block after any `</think>`, else the last fenced block, or None."""
    blocks = _FENCE.findall(text.rsplit("</think>", 1)[-1])
    python = [body for language, body in blocks if language.lower() in ("python", "py", "python3")]
    return (python or [body for _, body in blocks] or [None])[-1]


class Case(NamedTuple):
    """One test case of a program: its kind, its input and the expected result."""

    kind: str
    """`stdin`, `call` or `assert`."""
    given: Any
    """The text for stdin; for the other kinds what `case.json` tells the sandbox: which calls to make."""
    expected: Any
    """The right output or return value; for `assert` the assertion's code with `_value_0`, … in place of its calls."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of one test case; `passed` is None where the sandbox could not run the case."""

    passed: bool | None
    why: str
    seconds: float = 0.0
    limit: str | None = None
    got: Any = None
    """The start of what the program printed or returned."""
    status: Status = Status.SCORED
    """How the program failed: crashed, or over its time."""


class Code:
    """`rewards.code(sandbox)`: the share of test cases that the response's program passes.

    The row's `ground_truth` (or `extra_info["test_cases"]`) has the tests: a dict, or its JSON, with `inputs` and `outputs`
    (stdin and stdout; with `fn_name` arguments and return values), or with `assert_case`, a list of assertions. `timeout`
    is in seconds per case. With `continuous=False` the score is 1 only if all cases pass, and where the first one fails the
    others do not run. `compare` is how printed output is compared (see `same_output`); `max_cases` keeps the first cases.
    The score's part `passed` is the share; its extra `cases` has a record of each case.

    A row without a code block is *no_answer*; a program that passes nothing is *crashed* or *timeout* where that is the
    reason. Tests that cannot be read are *not_applicable*; a case that the sandbox could not run makes the row *infra_error*.

    Example:
        >>> reward = rewards.code(sandbox.local(), timeout=5.0)  # doctest: +SKIP
    """

    in_process = True
    """It waits for the sandbox; model code does not run in this process."""
    row_timeout = 86_400.0
    """Seconds (a day): every program has its own limit, and a row waits for its turn in the sandbox as long as that takes."""

    def __init__(
        self,
        sandbox: Sandbox,
        *,
        continuous: bool = True,
        timeout: float = 10.0,
        memory_limit_mb: int = -1,
        compare: str = "lines",
        max_cases: int | None = None,
    ) -> None:
        require(compare in ("lines", "exact", "tokens"), "compare", expected="lines, exact or tokens", found=compare)
        require(timeout > 0, "timeout", expected="seconds > 0", found=timeout)
        self.sandbox = sandbox
        self.continuous = continuous
        self.timeout = timeout
        self.memory_limit_mb = memory_limit_mb
        self.compare = compare
        self.max_cases = max_cases
        self.__name__ = "code"

    async def __call__(self, response: str, ground_truth: Any, extra_info: Any = None) -> Score:
        """Score one response by the test cases in `ground_truth`, or else in `extra_info["test_cases"]`."""
        program = extract_code(response)
        if program is None:
            return Score(status=Status.NO_ANSWER, why="no code block in the response", parts={"passed": 0.0})
        tests = ground_truth if ground_truth else (extra_info or {}).get("test_cases")
        try:
            cases = read_cases(tests)[: self.max_cases]
        except DataError as error:
            return Score(status=Status.NOT_APPLICABLE, why=f"invalid tests: {error}", answer=program)
        # where only all of them count, the first case may decide
        outcomes = await self._outcomes(program, cases if self.continuous else cases[:1])
        if not self.continuous and outcomes[0].passed and len(cases) > 1:
            outcomes += await self._outcomes(program, cases[1:])
        return self._score(program, outcomes)

    def _score(self, program: str, outcomes: Sequence[Outcome]) -> Score:
        broken = next((one for one in outcomes if one.passed is None), None)
        if broken is not None:
            return failed(broken.why)
        right = sum(bool(one.passed) for one in outcomes)
        share = right / len(outcomes)
        value = share if self.continuous else float(share == 1.0)
        why, status = f"{right} of {len(outcomes)} cases passed", Status.SCORED
        wrong = next((one for one in outcomes if not one.passed), None)
        if wrong is not None:
            why, status = f"{why}; first failure: {wrong.why}", status if value > 0 else wrong.status
        records = [{name: fact for name, fact in vars(one).items() if name != "status"} for one in outcomes]
        extra = {"cases": records}
        return Score(value=value, parts={"passed": share}, answer=program, why=why, status=status, extra=extra)

    async def _outcomes(self, program: str, cases: Sequence[Case]) -> list[Outcome]:
        kind = cases[0].kind
        if kind == "stdin":
            results = await self._run([self._program(program, stdin=case.given) for case in cases])
            return [self._printed(case, result) for case, result in zip(cases, results, strict=True)]
        results = await self._run([self._harness(case.given, program) for case in cases])
        values = [_from_harness(result, "values") for result in results]
        returned = [(case.expected, found) for case, found in zip(cases, values, strict=True) if found is not None]
        verdicts = iter(map(_met, returned) if kind == "call" else await self._verdicts(returned))
        return [
            _unanswered(result) if found is None else _outcome(result, *next(verdicts), _got(found))
            for result, found in zip(results, values, strict=True)
        ]

    async def _verdicts(self, returned: Sequence[tuple[str, list[Any]]]) -> list[tuple[bool | None, str]]:
        """Of the rest of each assertion, run in one process that has the values and not the program."""
        assertions = [
            {"text": text, "values": {f"_value_{number}": value for number, value in enumerate(found)}}
            for text, found in returned
        ]
        if not assertions:
            return []
        (judged,) = await self._run([self._harness({"role": "verdicts", "assertions": assertions}, None)])
        verdicts = _from_harness(judged, "verdicts") or []
        if len(verdicts) != len(assertions):
            return [(None, f"the assertions could not be judged: {judged.why}")] * len(assertions)
        return verdicts

    def _program(self, code: str, **fields: Any) -> Program:
        return Program(code=code, run_timeout=self.timeout, memory_limit_mb=self.memory_limit_mb, **fields)

    def _harness(self, record: dict[str, Any], program: str | None) -> Program:
        files = {"case.json": json.dumps(record).encode()}
        if program is not None:
            files["solution.py"] = program.encode("utf-8", "surrogatepass")
        return self._program(_HARNESS, files=files, fetch_files=("result.json",))

    async def _run(self, programs: Sequence[Program]) -> list[Result]:
        return list(await asyncio.gather(*map(self.sandbox.execute, programs)))

    def _printed(self, case: Case, result: Result) -> Outcome:
        if result.status != "Success" or result.truncated:
            return _unanswered(result)
        right = same_output(result.stdout, case.expected, self.compare)
        return _outcome(result, right, "the output differs", result.stdout)


def _from_harness(result: Result, name: str) -> list[Any] | None:
    """A list that the harness wrote; None where the program ended before that, or wrote into the file itself."""
    try:
        found = json.loads(result.files["result.json"])[name] if result.status == "Success" else None
    except (KeyError, TypeError, ValueError, RecursionError):
        return None
    return found if isinstance(found, list) else None


def _decoded(values: list[Any]) -> list[Any] | None:
    try:
        return [case_harness.decode(value) for value in values]
    except (ValueError, KeyError, TypeError, IndexError, RecursionError, OverflowError):
        return None  # not written by the harness


def _got(values: list[Any]) -> Any:
    found = _decoded(values)
    return found[0] if found and len(found) == 1 else found


def _met(returned: tuple[Any, list[Any]]) -> tuple[bool, str]:
    """(whether a call's value is the expected one, what is wrong where it is not)."""
    expected, values = returned
    found = _decoded(values)
    if not found:
        return False, "what came back is not the function's value"
    return same_value(found[0], expected), "the value differs"


def _outcome(result: Result, right: bool | None, why: str, got: Any) -> Outcome:
    seconds = result.run.seconds if result.run else 0.0
    return Outcome(passed=right, why="passed" if right else why, seconds=seconds, got=_cut(got))


def _unanswered(result: Result) -> Outcome:
    """Of a program that failed, or ended without an answer; or of a sandbox that could not run it."""
    if result.status == "SandboxError":
        return Outcome(passed=None, why=result.why)
    why = result.why if result.status != "Success" or result.truncated else _NO_VALUE
    status = Status.TIMEOUT if result.limit == "time" else Status.CRASHED
    return replace(_outcome(result, False, why, result.stdout), limit=result.limit, status=status)


def _cut(value: Any) -> str:
    try:
        text = value if isinstance(value, str) else repr(value)
    except ValueError:  # an integer with more digits than Python prints
        text = "a very large number"
    return text[:_SHOWN]


code = Code


def read_cases(tests: Any) -> list[Case]:
    """Parse a row's test cases, in one of the forms that `Code` lists. Raises `DataError` for any other."""
    if isinstance(tests, str):
        try:
            tests = json.loads(tests)
        except ValueError as cause:
            raise DataError("the row's test cases", expected="JSON", found=describe(tests)) from cause
    if not isinstance(tests, Mapping):
        raise DataError("the row's test cases", expected="a dict with inputs and outputs", found=describe(tests))
    if tests.get("assert_case"):
        return [_assertion(str(text)) for text in tests["assert_case"]]
    inputs, outputs = list(tests.get("inputs") or ()), list(tests.get("outputs") or ())
    if not inputs or len(inputs) != len(outputs):
        found = f"{len(inputs)} inputs, {len(outputs)} outputs"
        raise DataError("the row's test cases", expected="as many outputs as inputs, at least one", found=found)
    name, pairs = tests.get("fn_name"), zip(inputs, outputs, strict=True)
    return [_call(str(name), *pair) if name else Case("stdin", *map(_text, pair)) for pair in pairs]


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _call(name: str, given: Any, wanted: Any) -> Case:
    """Arguments are a list, or text with one JSON value a line; the output a value or its JSON."""
    try:
        arguments = [json.loads(line) for line in given.splitlines()] if isinstance(given, str) else list(given)
        expected = json.loads(wanted) if isinstance(wanted, str) else wanted
    except ValueError:
        arguments, expected = [given] if isinstance(given, str) else list(given), wanted
    return Case("call", {"role": "values", "function": name, "arguments": arguments}, expected)


def _assertion(text: str) -> Case:
    """Raises `DataError` where the calls of the model's program cannot be taken out of it."""
    what = f"assertion {describe(text)} in assert_case"
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as cause:
        raise DataError(what, expected="valid Python", found=cause) from cause
    imports = [node for node in body if isinstance(node, ast.Import | ast.ImportFrom)]
    asserts = [node for node in body if isinstance(node, ast.Assert)]
    if not asserts or len(imports) + len(asserts) != len(body):
        raise DataError(what, expected="only imports and assertions", do="write the test as inputs and outputs")
    imported = {(alias.asname or alias.name).split(".")[0] for node in imports for alias in node.names}
    split = _Split({*imported, *vars(builtins)})
    rest = [ast.unparse(split.visit(node)) for node in asserts]
    if not split.calls:
        raise DataError(what, expected="a call of the response's own function", found="none")
    brought = "\n".join(map(ast.unparse, imports))
    asked = {"role": "values", "imports": brought, "calls": split.calls}
    return Case("assert", asked, "\n".join([brought, *rest]).strip())


class _Split(ast.NodeTransformer):
    """Takes out the outermost calls of names that the test does not bring itself."""

    def __init__(self, known: set[str]) -> None:
        self.known = known
        self.calls: list[str] = []

    def visit_Call(self, node: ast.Call) -> ast.AST:
        root: ast.AST = node.func
        while isinstance(root, ast.Attribute | ast.Call | ast.Subscript):
            root = root.func if isinstance(root, ast.Call) else root.value
        if not isinstance(root, ast.Name) or root.id in self.known:
            return self.generic_visit(node)
        self.calls.append(ast.unparse(node))
        return ast.copy_location(ast.Name(f"_value_{len(self.calls) - 1}", ast.Load()), node)


def same_output(got: str, wanted: str, compare: str) -> bool:
    """Whether a program's printed output equals the expected output.

    `compare` is `exact`: newlines at the end are ignored (as in verl's sandbox); `lines`: spaces around lines and around
    the text are ignored; or `tokens`: word by word, and numbers may differ by 1e-6.
    """
    if compare == "exact":
        return got.rstrip("\n") == wanted.rstrip("\n")
    if compare == "lines":
        ours, theirs = ([line.strip() for line in text.strip().splitlines()] for text in (got, wanted))
        return ours == theirs
    ours, theirs = got.split(), wanted.split()
    return len(ours) == len(theirs) and all(map(_close, ours, theirs))


def _close(one: str, other: str) -> bool:
    if one == other:
        return True
    try:
        return math.isclose(float(one), float(other), rel_tol=1e-6, abs_tol=1e-6)
    except ValueError:
        return False


def same_value(got: Any, wanted: Any) -> bool:
    """Whether a returned value equals the expected one. Tuples count as lists, because expected values are JSON; a list of
    one expected value also stands for that value, as some data sets write it."""
    plain = _plain(got)
    return bool(plain == wanted) or (isinstance(wanted, list) and len(wanted) == 1 and bool(plain == wanted[0]))


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return {str(key): _plain(item) for key, item in value.items()} if isinstance(value, dict) else value
