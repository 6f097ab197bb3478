"""Scores code by test cases run in a sandbox: what passed is decided here, never where the model's code runs."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from workbench.base import runtime
from workbench.base.config import require
from workbench.base.errors import DataError, RewardError
from workbench.base.shown import encodable
from workbench.datasets.records import has_answer
from workbench.rewards import case_harness
from workbench.rewards.cases import Case, read_cases
from workbench.rewards.score import Score, Status, Unreadable, failed, left_open
from workbench.sandbox.protocol import MAX_SECONDS, Program, Result, Sandbox

_FENCE = re.compile(r"^[ \t]*+```[ \t]*+([\w+#-]*+)[^\n]*+\n(.*?)(?:^[ \t]*+```|\Z)", re.DOTALL | re.MULTILINE)
_SHOWN = 300
_LARGEST = 2 << 20
"""Bytes of what a program's process writes that are read in this process, on the event loop."""
_HARNESS = Path(case_harness.__file__).read_text(encoding="utf-8")
_ROUNDS = 16
"""Rounds of tests whose calls depend on others' results: a program decides how often a loop of the tests calls it."""
_NO_VALUE = "the program ended before its function returned"
_NOT_READ = f"what the function returned is not a plain value, or more than {_LARGEST >> 20} MB"
_JUDGING = "the tests could not go on with what the program returned: "


def extract_code(text: str) -> str | None:
    """Extract the code from a response: the last ```python block after any `</think>`, else the last fenced block, else
    None."""
    blocks = _FENCE.findall(text.rsplit("</think>", 1)[-1])
    python = [body for language, body in blocks if language.lower() in ("python", "py", "python3")]
    return (python or [body for _, body in blocks] or [None])[-1]


@dataclass(frozen=True, kw_only=True)
class CaseOutcome:
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

    The row's `ground_truth`, or where that is empty `extra_info["test_cases"]`, has the tests, as they are or as JSON:

    - a dict with `inputs` and `outputs` (stdin and stdout; with `fn_name` arguments and return values): verl's, APPS, TACO;
    - a list of `{input, output}` or of pairs, `public_test_cases` and `private_test_cases` of such (LiveCodeBench, whose
      `functional` cases need `func_name`), `{"test": [{"input": {"stdin": …}, "output": {"stdout": …}}]}` (CommonOJ);
    - a list of assertions, or a dict with one as `assert_case` or `test_list` (MBPP);
    - Python tests: `check(candidate)` with `entry_point` beside it or in `extra_info` (HumanEval), or functions `test_…()`
      (KodCode). They run in a process that has what the program's functions returned, and not the program.

    Programs get what the sets' own graders give them: with inputs and outputs the imports, recursion limit and 50,000 digits of
    LiveCodeBench and APPS (`case_harness.PREAMBLE`), with HumanEval's tests the prompt's code, with MBPP's the row's imports.

    Numbers of which one is a float are equal within 1e-6 (see `same_value`, `same_output`). `timeout` is in seconds per case. With `continuous=False` the score is 1 only if all cases pass, and where the first one fails the
    others do not run. `compare` is how printed output is compared (see `same_output`); `max_cases` keeps the first cases.
    The score's part `passed` is the share; its extra `cases` has a record of each case.

    A row without a code block is *no_answer*; a program that passes nothing is *crashed* or *timeout* where that is the
    reason. Tests that cannot be read are *not_applicable*; a case that the sandbox could not run makes the row *infra_error*.

    A program, or a row's own tests, that imports what is installed here and hidden from programs (numpy, where
    `sandbox.local()` was given no `packages`) has failed by a setting: *infra_error*, and `undecided`, so that a run stops at
    the first one. After `packages=True` such programs run, after `packages=False` the failure is theirs. A policy cannot
    escape a zero so: before the decision nothing is learned from such a row, and after it there are none.

    Example:
        >>> reward = rewards.code(sandbox.local(), timeout=5.0)  # doctest: +SKIP
    """

    in_process = True
    """True: this process only waits for the sandbox, which runs the model's code."""
    reads_answers = True
    """True: a response that ends inside the reasoning that its prompt opened (`<think>`) has no program."""
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
        require(0 < timeout <= MAX_SECONDS, "timeout", expected=f"seconds > 0, at most {MAX_SECONDS:g}", found=timeout)
        self.sandbox = sandbox
        self.continuous = continuous
        self.timeout = timeout
        self.memory_limit_mb = memory_limit_mb
        self.compare = compare
        self.max_cases = max_cases
        self.__name__ = "code"

    async def __call__(self, response: str, ground_truth: Any, extra_info: Any = None) -> Score:
        """Score one response by the test cases in `ground_truth`, or else in `extra_info["test_cases"]`."""
        if not isinstance(response, str):
            raise RewardError("the response given to the reward code", expected="text", found=type(response).__name__)
        program = extract_code(response)
        try:
            cases = read_cases(ground_truth, extra_info)[: self.max_cases]
            if program is None:
                return Score(status=Status.NO_ANSWER, why="no code block in the response", parts={"passed": 0.0})
            # where only all of them count, the first case may decide
            outcomes = await self._outcomes(program, cases if self.continuous else cases[:1])
            if not self.continuous and outcomes[0].passed and len(cases) > 1:
                outcomes += await self._outcomes(program, cases[1:])
        except DataError as error:
            unread = Score(status=Status.NOT_APPLICABLE, why=f"invalid tests: {error}", answer=program)
            return self._hidden([str(error)]) or unread
        return self._hidden([one.why for one in outcomes if not one.passed]) or self._score(program, outcomes)

    def unscorable(self, ground_truth: Any = None, extra_info: Any = None, **_: Any) -> str:
        """Return why no response to a row with these tests can be scored, or "": the tests are missing, or cannot be
        read (`Unreadable`)."""
        try:
            return "" if read_cases(ground_truth, extra_info) else "no tests"
        except DataError as error:
            there = has_answer({"reward_model": {"ground_truth": ground_truth}, "extra_info": extra_info})
            return (Unreadable if there else str)(f"invalid tests: {error}")

    def check_solutions(
        self, rows: Iterable[Mapping[str, Any]], solution: Callable[[Mapping[str, Any]], str]
    ) -> dict[int, Score]:
        """Score the solution of each row, as `solution(row)` returns its code: row number → score, of those that do not
        pass all tests."""
        held = list(rows)
        calls = [
            (f"```python\n{solution(row)}\n```", row.get("reward_model") or {}, row.get("extra_info")) for row in held
        ]
        scores = runtime.run_all(lambda call: self(call[0], call[1].get("ground_truth"), call[2]), calls)
        return {number: score for number, score in enumerate(scores) if not score.scored or score.value < 1}

    def _hidden(self, whys: Iterable[str]) -> Score | None:
        """Return the score of a row that failed because the sandbox hides a package, when no setting has decided on it;
        else None."""
        hides = getattr(self.sandbox, "hides", lambda words: "")
        package = next(filter(None, map(hides, whys)), "")
        why = f"package {package!r} is installed here, and the sandbox's programs do not see it"
        how = "sandbox.local(packages=True) to show it to programs, or packages=False to fail their import"
        return left_open(why, how) if package else None

    def _score(self, program: str, outcomes: Sequence[CaseOutcome]) -> Score:
        broken = next((outcome for outcome in outcomes if outcome.passed is None), None)
        if broken is not None:
            return failed(broken.why)
        right = sum(bool(outcome.passed) for outcome in outcomes)
        share = right / len(outcomes)
        value = share if self.continuous else float(share == 1.0)
        why, status = f"{right} of {len(outcomes)} cases passed", Status.SCORED
        wrong = next((outcome for outcome in outcomes if not outcome.passed), None)
        if wrong is not None:
            why, status = f"{why}; first failure: {wrong.why}", status if value > 0 else wrong.status
        records = [{name: fact for name, fact in vars(outcome).items() if name != "status"} for outcome in outcomes]
        extra = {"cases": records}
        return Score(value=value, parts={"passed": share}, answer=program, why=why, status=status, extra=extra)

    async def _outcomes(self, program: str, cases: Sequence[Case]) -> list[CaseOutcome]:
        kind = cases[0].kind
        if kind == "stdin":
            results = await self._run([self._program(_behind(program), stdin=case.given) for case in cases])
            lacking = [number for number, one in enumerate(results) if "NameError" in one.why]
            whole = _behind(program, case_harness.PREAMBLE)
            again = await self._run([self._program(whole, stdin=cases[number].given) for number in lacking])
            results = [dict(zip(lacking, again, strict=True)).get(number, one) for number, one in enumerate(results)]
            return [self._printed(case, result) for case, result in zip(cases, results, strict=True)]
        if kind == "script":
            tests = [await self._scripted(program, case) for case in cases]
            return [one for outcomes in tests for one in outcomes][: self.max_cases]
        results = await self._run([self._harness(case.given, program) for case in cases])
        if kind == "call":
            return [_outcome_of_call(result, case.expected) for case, result in zip(cases, results, strict=True)]
        return await self._asserted(cases, results)

    async def _asserted(self, cases: Sequence[Case], results: Sequence[Result]) -> list[CaseOutcome]:
        there = [number for number, result in enumerate(results) if _result_file(result) is not None]
        verdicts = await self._verdicts([cases[number] for number in there], [results[number] for number in there])
        judged = dict(zip(there, verdicts, strict=True))
        return [judged.get(number) or _failed_outcome(result) for number, result in enumerate(results)]

    async def _verdicts(self, cases: Sequence[Case], results: Sequence[Result]) -> list[CaseOutcome]:
        """Judge the rest of each assertion in one process that has the returned values and not the program.

        Where that process fails, each assertion is judged in a process alone.
        """
        if not cases:
            return []
        files = {f"returned{number}.json": _result_file(result) or b"" for number, result in enumerate(results)}
        task = {"role": "verdicts", "assertions": [case.expected for case in cases]}
        (judged,) = await self._run([self._harness(task, files=files)])
        verdicts = _from_harness(judged, "verdicts")
        if verdicts is not None and len(verdicts) == len(cases):
            return [_outcome(one, right, why, got) for one, (right, why, got) in zip(results, verdicts, strict=True)]
        if len(cases) == 1 or judged.status == "SandboxError":
            return [_failed_outcome(judged, _JUDGING)] * len(cases)
        alone = [self._verdicts([case], [result]) for case, result in zip(cases, results, strict=True)]
        return [outcome for outcomes in await asyncio.gather(*alone) for outcome in outcomes]

    async def _scripted(self, program: str, case: Case) -> list[CaseOutcome]:
        """Run tests that are a program; one outcome for each assertion that they reach.

        The tests run without the program: first to collect the calls that they make, then with what the program
        returned for these. A call that depends on another call's result is answered in a further round. Raises
        `DataError` for tests that fail by themselves.
        """
        files: dict[str, bytes] = {}
        expected, answers = 0, Result(status="Success")
        for _ in range(_ROUNDS):
            (ran,) = await self._run([self._harness({**case.given, "answered": bool(files)}, files=files)])
            fields, calls = _from_harness(ran, "script"), ran.files.get("calls.json")
            if fields is None or len(fields) != 5 or calls is None:
                if files or ran.status == "SandboxError":
                    return [_failed_outcome(ran, _JUDGING)] * max(expected, 1)
                raise _failing_tests(ran.why)
            count, verdicts, more, ended, error = fields
            if error or not count:
                raise _failing_tests(error or "they call no function of the program")
            if not files:
                expected = len(verdicts)
            elif not more:
                return [_outcome(answers, *one, None) for one in _counted(verdicts, ended, expected)]
            task = {"role": "values", "setup": case.given["setup"]}
            (answers,) = await self._run([self._harness(task, program, {"calls.json": calls})])
            returned = _result_file(answers)
            if returned is None:
                return [_failed_outcome(answers)] * max(expected, 1)
            files = {"calls.json": calls, "returned.json": returned}
        why = f"the tests called the program with its earlier results more than {_ROUNDS} times and have not ended"
        return [CaseOutcome(passed=False, why=why, status=Status.TIMEOUT)] * max(expected, 1)

    def _program(self, code: str, **fields: Any) -> Program:
        return Program(code=code, run_timeout=self.timeout, memory_limit_mb=self.memory_limit_mb, **fields)

    def _harness(
        self, record: dict[str, Any], program: str | None = None, files: Mapping[str, bytes] | None = None
    ) -> Program:
        files = {**(files or {}), "case.json": json.dumps(record).encode()}
        if program is not None:
            files["solution.py"] = program.encode("utf-8", "surrogatepass")
        fetch = ("result.json", "calls.json") if record["role"] == "script" else ("result.json",)
        return self._program(_HARNESS, files=files, fetch_files=fetch)

    async def _run(self, programs: Sequence[Program]) -> list[Result]:
        return list(await asyncio.gather(*map(self.sandbox.execute, programs)))

    def _printed(self, case: Case, result: Result) -> CaseOutcome:
        if result.status != "Success" or result.truncated:
            return _failed_outcome(result)
        right = same_output(result.stdout, case.expected, self.compare)
        return _outcome(result, right, "the output differs", result.stdout)


_FUTURE = re.compile(r"^from __future__ import [\w, ]+$", re.MULTILINE)


def _behind(program: str, *before: str) -> str:
    """Put the graders' limits, and code of one line, before a program; imports from `__future__` must stay the first."""
    return "; ".join([*_FUTURE.findall(program), case_harness.LIMITS, *before]) + "\n" + _FUTURE.sub("", program)


def _failing_tests(why: str) -> DataError:
    return DataError("the row's tests fail by themselves, whatever the response is", found=why, do="correct the tests")


def _result_file(result: Result) -> bytes | None:
    """Return the harness's file `result.json`; None where the program ended before it was written."""
    return result.files.get("result.json") if result.status == "Success" else None


def _from_harness(result: Result, name: str) -> list[Any] | None:
    """Return the list `name` that the harness wrote; None where it is missing, too large or damaged (the program may
    write to the file)."""
    body = _result_file(result)
    if body is None or len(body) > _LARGEST:
        return None
    try:
        values = json.loads(body)[name]
    except (KeyError, TypeError, ValueError, RecursionError):
        return None
    return values if isinstance(values, list) else None


def _counted(verdicts: Sequence[tuple[bool, str]], ended: bool, expected: int) -> list[tuple[bool, str]]:
    """Complete the verdicts of tests that have `expected` assertions: assertions that were not reached count as failed."""
    left = [(False, "not reached")] * (expected - len(verdicts) if ended else 0)
    counted, most = [*verdicts, *left], max(expected, 1)
    if len(counted) > most:  # a program that makes a loop longer passes no more by it: what fails comes first
        counted = sorted(counted, key=lambda verdict: verdict[0])[:most]
    return counted or [(False, "no assertion was reached")] * most


class _Set:
    """A set that a program returned, held as a list: hashing values that the program chose could take quadratic time."""

    def __init__(self, held: list[Any]) -> None:
        self.held = held

    def __repr__(self) -> str:
        return f"{{{repr(self.held)[1:-1]}}}"

    def __eq__(self, other: object) -> bool:
        # as large as the row's own: no cost of the program's choice
        return isinstance(other, set | frozenset) and len(self.held) == len(other) and set(self.held) == other

    __hash__ = None  # type: ignore[assignment]


class _Dict:
    """A dict that a program returned, held as a list of pairs, so that none of its keys is hashed."""

    def __init__(self, held: list[Any]) -> None:
        self.held = held

    def __repr__(self) -> str:
        return f"{{{', '.join(f'{key!r}: {value!r}' for key, value in self.held)}}}"

    def items(self) -> list[Any]:
        return self.held


_MADE = {"list": list, "tuple": tuple, "set": _Set, "frozenset": _Set, "dict": _Dict}


def _outcome_of_call(result: Result, expected: Sequence[Any]) -> CaseOutcome:
    """Return the outcome of a function call: passed where the returned value is one of the `expected` ones."""
    values = _from_harness(result, "values")
    if values is None:
        return _failed_outcome(result)
    try:
        (value,) = [case_harness.decode(value, kinds=_MADE) for value in values]
    except (ValueError, KeyError, TypeError, IndexError, OverflowError):
        return _outcome(result, False, "the sandbox's result file has no valid value of the function", None)
    try:
        right = any(same_value(value, one) for one in expected)
    except TypeError:  # a set that holds sets or dicts
        right = False
    return _outcome(result, right, "the value differs", value)


def _outcome(result: Result, right: bool | None, why: str, got: Any) -> CaseOutcome:
    seconds = result.run.seconds if result.run else 0.0
    shown = encodable(_text(got)[:_SHOWN])
    return CaseOutcome(passed=right, why="passed" if right else encodable(why), seconds=seconds, got=shown)


def _failed_outcome(result: Result, doing: str = "") -> CaseOutcome:
    """Make the outcome of a program that failed or ended without a result, or of a sandbox that could not run it.

    `doing` is put before the reason.
    """
    if result.status == "SandboxError":
        return CaseOutcome(passed=None, why=result.why)
    written = _NO_VALUE if _result_file(result) is None else _NOT_READ
    why = doing + (result.why if result.status != "Success" or result.truncated else written)
    status = Status.TIMEOUT if result.limit == "time" else Status.CRASHED
    return replace(_outcome(result, False, why, result.stdout), limit=result.limit, status=status)


def _text(value: Any) -> str:
    try:
        return str(value)
    except ValueError:  # an integer with more digits than Python prints
        return "a very large number"


code = Code


_TOLERANCE = 1e-6
"""Numbers are equal within this, relative or absolute, where one of them is a float; whole numbers only exactly."""
_NUMBER = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?")


def same_output(got: str, wanted: str, compare: str) -> bool:
    """Whether a program's printed output equals the expected output.

    `compare` is `exact`: newlines at the end are ignored (as in verl's sandbox); `lines`: spaces around lines and around
    the text are ignored; or `tokens`: word by word. In `lines` and `tokens` two numbers of which one is written with a point
    or an exponent are equal within 1e-6, relative or absolute.
    """
    if compare == "exact":
        return got.rstrip("\n") == wanted.rstrip("\n")
    if compare == "tokens":
        return _all_close(got.split(), wanted.split())
    ours, theirs = ([line.strip() for line in text.strip().splitlines()] for text in (got, wanted))
    if len(ours) != len(theirs):
        return False
    return all(a == b or _all_close(a.split(" "), b.split(" ")) for a, b in zip(ours, theirs, strict=True))


def _all_close(ours: Sequence[str], theirs: Sequence[str]) -> bool:
    return len(ours) == len(theirs) and all(map(_close, ours, theirs))


def _close(ours: str, other: str) -> bool:
    if ours == other:
        return True
    both = _NUMBER.fullmatch(ours) and _NUMBER.fullmatch(other)
    return bool(both) and set(ours + other) & set(".eE") != set() and _is_near(float(ours), float(other))


def _is_near(ours: float, theirs: float) -> bool:
    return ours == theirs or math.isclose(ours, theirs, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)


def same_value(got: Any, wanted: Any) -> bool:
    """Return whether a returned value equals the expected one.

    Tuples count as lists, because expected values are JSON; a list of one expected value also stands for that value, as
    some data sets write it. Two numbers of which one is a float are equal within 1e-6, relative or absolute, also
    inside lists and dicts; NaN equals NaN.
    """
    return _equal(got, wanted) or (isinstance(wanted, list) and len(wanted) == 1 and _equal(got, wanted[0]))


def _equal(got: Any, wanted: Any) -> bool:
    if isinstance(got, tuple | list) and isinstance(wanted, tuple | list):
        return len(got) == len(wanted) and all(map(_equal, got, wanted))
    if isinstance(got, dict | _Dict) and isinstance(wanted, dict):  # as text: its hash is no program's choice
        ours, theirs = ({_text(key): value for key, value in one.items()} for one in (got, wanted))
        return ours.keys() == theirs.keys() and all(_equal(ours[key], theirs[key]) for key in theirs)
    if float in (type(got), type(wanted)) and {type(got), type(wanted)} <= {int, float}:
        return _same_number(got, wanted)
    return bool(got == wanted)


def _same_number(got: float, wanted: float) -> bool:
    try:
        return _is_near(float(got), float(wanted)) or (math.isnan(got) and math.isnan(wanted))
    except OverflowError:  # a whole number beyond the floats
        return False
