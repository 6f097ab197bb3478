"""Code by test cases, run in a sandbox: what passed is decided here, never where the model's code runs."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from workbench.config import require
from workbench.errors import DataError
from workbench.rewards import case_harness
from workbench.rewards.cases import Case, Outcome, calls_of, read_cases, same_output, same_value
from workbench.rewards.score import Score, Status, failed
from workbench.sandbox.protocol import Program, Result, Sandbox

_FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+#-]*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
_SHOWN = 300


def extract_code(text: str) -> str | None:
    """The last ```python block after any thinking, else the last block of another kind; None without a fence."""
    answer = text.rsplit("</think>", 1)[-1]
    blocks = _FENCE.findall(answer)
    python = [body for language, body in blocks if language.lower() in ("python", "py", "python3")]
    return (python or [body for _, body in blocks] or [None])[-1]


class Code:
    """`rewards.code(sandbox)`: the share of test cases that the response's program passes.

    The row's `ground_truth` (or `extra_info["test_cases"]`) has the tests, see `cases.read_cases`. With
    `continuous=False` only all of them count, and the first failure ends the row. `compare` is how printed output
    is compared: `lines`, `exact` or `tokens`. Parts: `passed`, the share. Extra: `cases`, one record each.

    A row without a code block, or with a program that passes nothing, is *model failed*; tests that cannot be
    run are *not applicable*; a sandbox that could not run one is *machinery failed*, whatever the others say.
    """

    in_process = True
    """It waits for the sandbox; model code does not run here."""
    row_timeout = 86_400.0
    """Seconds: a day. Every program has its own limit; a row waits for its turn in the sandbox as long as that takes."""

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
        """One row's score."""
        program = extract_code(response)
        if program is None:
            return Score(status=Status.MODEL_FAILED, why="no code block in the response", parts={"passed": 0.0})
        tests = ground_truth if ground_truth else (extra_info or {}).get("test_cases")
        try:
            cases = read_cases(tests)[: self.max_cases]
        except DataError as error:
            return Score(status=Status.NOT_APPLICABLE, why=f"invalid tests: {error}", answer=program)
        return _score(program, await self.judge(program, cases), self.continuous)

    async def judge(self, program: str, cases: Sequence[Case]) -> list[Outcome]:
        """What becomes of each case; fewer than there are where a failure already decides."""
        if self.continuous or len(cases) == 1:
            return await self._wave(program, cases)
        first = await self._wave(program, cases[:1])
        return [*first, *(await self._wave(program, cases[1:]))] if first[0].passed else first

    async def _wave(self, program: str, cases: Sequence[Case]) -> list[Outcome]:
        if cases[0].kind == "stdin":
            results = await self._run([self._program(program, stdin=case.given) for case in cases])
            return [self._printed(case, result) for case, result in zip(cases, results, strict=True)]
        asked = [self._harness(record, program) for record in calls_of(cases)]
        results = await self._run(asked)
        found = [_values(result) for result in results]
        if cases[0].kind == "call":
            return [_called(case, *pair) for case, pair in zip(cases, zip(results, found, strict=True), strict=True)]
        return await self._asserted(cases, results, found)

    async def _asserted(
        self, cases: Sequence[Case], results: Sequence[Result], found: Sequence[list[Any] | str]
    ) -> list[Outcome]:
        """The rest of each assertion, in one process that has the values and not the program."""
        ready = [number for number, values in enumerate(found) if not isinstance(values, str)]
        verdicts: dict[int, list[Any]] = {}
        if ready:
            assertions = [
                {"text": cases[number].verdict, "values": {f"_value_{i}": v for i, v in enumerate(found[number])}}
                for number in ready
            ]
            judged = (await self._run([self._harness({"role": "verdicts", "assertions": assertions}, None)]))[0]
            record = _result(judged)
            if not isinstance(record, dict) or len(record.get("verdicts", ())) != len(ready):
                why = f"the assertions could not be judged: {judged.why}"
                return [Outcome(None, why, got=judged.why) for _ in cases]
            verdicts = dict(zip(ready, record["verdicts"], strict=True))
        return [
            _outcome(result, verdicts[number][0], verdicts[number][1], _decoded(found[number]))
            if number in verdicts
            else _unanswered(result, str(found[number]))
            for number, result in enumerate(results)
        ]

    def _program(self, code: str, **fields: Any) -> Program:
        return Program(code=code, run_timeout=self.timeout, memory_limit_mb=self.memory_limit_mb, **fields)

    def _harness(self, record: dict[str, Any], program: str | None) -> Program:
        files = {"case.json": json.dumps(record).encode()}
        if program is not None:
            files["solution.py"] = program.encode("utf-8", "surrogatepass")
        return self._program(_harness_text(), files=files, fetch_files=("result.json",))

    async def _run(self, programs: Sequence[Program]) -> list[Result]:
        return list(await asyncio.gather(*(self.sandbox.execute(program) for program in programs)))

    def _printed(self, case: Case, result: Result) -> Outcome:
        if result.status != "Success" or result.truncated:
            return _unanswered(result, "")
        right = same_output(result.stdout, case.expected, self.compare)
        return _outcome(result, right, "the output differs", result.stdout)


@lru_cache(1)
def _harness_text() -> str:
    return Path(case_harness.__file__).read_text(encoding="utf-8")


def _result(result: Result) -> Any:
    try:
        return json.loads(result.files["result.json"]) if result.status == "Success" else None
    except (KeyError, ValueError, RecursionError):
        return None  # the program ended before the harness wrote it, or wrote into it itself


def _values(result: Result) -> list[Any] | str:
    """Encoded values, or why there are none."""
    record = _result(result)
    values = record.get("values") if isinstance(record, dict) else None
    return values if isinstance(values, list) else "the program ended before its function returned"


def _decoded(values: list[Any] | str) -> Any:
    if isinstance(values, str):
        return None
    try:
        return [case_harness.decode(value) for value in values]
    except (ValueError, KeyError, TypeError, IndexError, RecursionError, OverflowError):
        return None  # not written by the harness


def _called(case: Case, result: Result, found: list[Any] | str) -> Outcome:
    if isinstance(found, str):
        return _unanswered(result, found)
    values = _decoded(found)
    if not values:
        return Outcome(False, "what came back is not the function's value", result.run.seconds if result.run else 0.0)
    return _outcome(result, same_value(values[0], case.expected), "the value differs", values[0])


def _outcome(result: Result, right: bool, why: str, got: Any) -> Outcome:
    seconds = result.run.seconds if result.run else 0.0
    return Outcome(right, "passed" if right else why, seconds, got=_cut(got))


def _cut(value: Any) -> str:
    try:
        text = value if isinstance(value, str) else repr(value)
    except ValueError:  # an integer with more digits than Python prints
        text = "a very large number"
    return text[:_SHOWN]


def _unanswered(result: Result, why: str) -> Outcome:
    if result.status == "SandboxError":
        return Outcome(None, result.why)
    told = result.why if result.status != "Success" or result.truncated else why
    seconds = result.run.seconds if result.run else 0.0
    return Outcome(False, told, seconds, result.limit, _cut(result.stdout))


def _score(program: str, outcomes: Sequence[Outcome], continuous: bool) -> Score:
    records = [
        {"passed": one.passed, "why": one.why, "seconds": one.seconds, "limit": one.limit, "got": one.got}
        for one in outcomes
    ]
    unknown = next((one for one in outcomes if one.passed is None), None)
    if unknown is not None:
        return failed(unknown.why)
    share = sum(bool(one.passed) for one in outcomes) / len(outcomes)
    value = share if continuous else float(share == 1.0)
    wrong = next((one for one in outcomes if not one.passed), None)
    why = f"{sum(bool(one.passed) for one in outcomes)} of {len(outcomes)} cases passed"
    return Score(
        value=value,
        parts={"passed": share},
        answer=program,
        why=why if wrong is None else f"{why}; first failure: {wrong.why}",
        status=Status.SCORED if value > 0 else Status.MODEL_FAILED,
        extra={"cases": records},
    )


code = Code
