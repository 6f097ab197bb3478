"""A reward made of a function: how it is called, where it runs, and what its failures mean."""

from __future__ import annotations

import asyncio
import copy
import inspect
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from workbench import background
from workbench.config import require
from workbench.errors import RewardError, first_line, message
from workbench.rewards.base import BaseReward
from workbench.rewards.rate_limit import RateLimit
from workbench.rewards.runner import Answer, Pool
from workbench.rewards.score import Score, failed
from workbench.rewards.signatures import (
    as_score,
    batch_arguments,
    call_arguments,
    check_arguments,
    read_signature,
    results_of_batch,
)

PER = ("row", "batch", "group")


class Reward(BaseReward):
    """`Reward(function)`: scores a batch, one record a row, order kept.

    The function is called by its own signature: verl's `compute_score(data_source, solution_str, ground_truth,
    extra_info)` or its batch form, TRL's keyword style (`completions`, …), OpenRLHF's `(queries, prompts, labels)`, or any
    names of values and columns. `per="group"` calls it once for the rows of one prompt, with lists, so that it can
    rank or compare them; by default plural names mean one call for the batch, others one call a row.

    It runs in a pool of killable processes with `timeout` seconds a row and `memory_limit_mb` a process, unless
    `in_process=True` says that it may run here: then only an async function can be stopped at its timeout.
    A `rate_limit` holds for all calls of all rewards that share the object.
    What a failure means is `on_failure`:

    - `mask` (default): the row has no judgement; it is counted and left out of means and losses. If every
      row fails that is an error all the same, for then the function is broken.
    - `raise`: the first failure ends the step.
    - `retry(n)`: up to n more tries, then `mask`.
    - `value=x`: the row counts as x; its status still says that it was not judged by the function.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        in_process: bool = False,
        workers: int = 2,
        timeout: float = 30.0,
        memory_limit_mb: int | None = None,
        on_failure: str = "mask",
        per: str | None = None,
        rate_limit: RateLimit | None = None,
        name: str | None = None,
        given: Sequence[str] = (),
        check_rows: Callable[[Iterable[Mapping[str, Any]]], None] | None = None,
    ) -> None:
        require(workers >= 1, "workers", expected="≥ 1", found=workers)
        require(timeout > 0, "timeout", expected="seconds > 0", found=timeout)
        require(per is None or per in PER, "per", expected=f"one of {', '.join(PER)}", found=per)
        super().__init__(name or str(getattr(function, "__name__", type(function).__name__)), on_failure)
        self._function = function
        self._signature = read_signature(function, given)
        self.per = per or ("batch" if self._signature.batched else "row")
        self._signature = self._signature.called(batched=self.per != "row")
        self.streams = self.per == "row"
        self._rate_limit = rate_limit
        pooled: dict[str, Any] = {"timeout": timeout, "memory_mb": memory_limit_mb, "rate_limit": rate_limit}
        self._pool = None if in_process else Pool(function, workers=workers, **pooled)
        self.in_process = in_process
        self.workers = workers
        self.timeout = timeout
        self._check_rows = check_rows

    @property
    def reads(self) -> tuple[str, ...]:  # type: ignore[override]
        """Columns that the function asks for by name and that have no default there."""
        parameters = inspect.signature(self._function).parameters
        empty = inspect.Parameter.empty
        asked = tuple(
            name for name in self._signature.columns() if name in parameters and parameters[name].default is empty
        )
        return (*asked, "uid") if self.per == "group" and "uid" not in asked else asked

    @property
    def source(self) -> str | None:
        """Source text, also of a function defined in a cell; None where there is none to be had."""
        inner = self._function.func if isinstance(self._function, partial) else self._function
        text = getattr(inner, "text", None)
        if isinstance(text, str):
            return text
        try:
            return inspect.getsource(inner)
        except (OSError, TypeError):
            return None

    def settings(self) -> dict[str, Any]:
        """What was chosen at construction; a function from a file says which, and its hash."""
        described = getattr(self._function, "describe", None)
        return {
            "in_process": self.in_process,
            "timeout": self.timeout,
            "on_failure": self.on_failure,
            **({"per": self.per} if self.per == "group" else {}),
            **({"file": described()} if callable(described) and hasattr(self._function, "sha256") else {}),
        }

    def check_signature(self, columns: Sequence[str]) -> None:
        """Refuse, before any work, a function that asks for what a row does not have."""
        check_arguments(self._function, self._signature, columns)

    def check_rows(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Refuse, before any work, a data set that the function cannot judge (unknown sources)."""
        if self._check_rows is not None:
            self._check_rows(rows)

    def close(self) -> None:
        """End the pool's processes."""
        if self._pool is not None:
            self._pool.close()

    def judge(self, rows: Sequence[Mapping[str, Any]]) -> list[Score]:
        """One record a row view, in order."""
        if self.per == "row":
            answers = self._answers([call_arguments(self._signature, row) for row in rows], [self.timeout] * len(rows))
            return [self._record(answer, number) for number, answer in enumerate(answers)]
        together: dict[Any, list[int]] = {}
        for number, row in enumerate(rows):
            together.setdefault(row["uid"] if self.per == "group" else None, []).append(number)
        calls = [batch_arguments(self._signature, [rows[n] for n in numbers]) for numbers in together.values()]
        # its limit is the row limit times the rows
        answers = self._answers(calls, [self.timeout * len(numbers) for numbers in together.values()])
        scores: dict[int, Score] = {}
        for numbers, answer in zip(together.values(), answers, strict=True):
            scores.update(zip(numbers, self._records(answer, len(numbers)), strict=True))
        return [scores[number] for number in range(len(rows))]

    def _record(self, answer: Answer, row: int) -> Score:
        if not answer.ok:
            score = failed(answer.why, answer.traceback, answer.seconds)
        else:
            score = as_score(answer.result, self.name, row).timed(answer.seconds)
        return score.with_extra({"printed": answer.printed}) if answer.printed else score

    def _records(self, answer: Answer, rows: int) -> list[Score]:
        """What one call for several rows gave. Raises `RewardError` for a wrong count."""
        if not answer.ok:
            return [failed(answer.why, answer.traceback, answer.seconds) for _ in range(rows)]
        results = results_of_batch(answer.result)
        if not isinstance(results, Sequence) or isinstance(results, str) or len(results) != rows:
            found = len(results) if hasattr(results, "__len__") else type(results).__name__
            raise RewardError(
                message(f"reward function {self.name}", expected=f"a list of {rows} rewards", found=found)
            )
        each = answer.seconds / max(rows, 1)
        return [as_score(result, self.name, number).timed(each) for number, result in enumerate(results)]

    def _answers(self, calls: Sequence[Mapping[str, Any]], limits: Sequence[float]) -> list[Answer]:
        answers = self._run(calls, limits)
        for _ in range(self.policy.retries):
            again = [number for number, answer in enumerate(answers) if not answer.ok]
            tried = self._run([calls[n] for n in again], [limits[n] for n in again]) if again else []
            for number, answer in zip(again, tried, strict=True):
                answers[number] = answer
        return answers

    def _run(self, calls: Sequence[Mapping[str, Any]], limits: Sequence[float]) -> list[Answer]:
        if self._pool is not None:
            return self._pool.map(calls, limits)
        return _here(self._function, calls, limits, self._rate_limit)

    def __repr__(self) -> str:
        where = "in this process" if self.in_process else f"{self.workers} workers, {self.timeout:g} s a row"
        return f"Reward({self.name}: {where}, on failure {self.on_failure})"


def _here(
    function: Callable[..., Any],
    calls: Sequence[Mapping[str, Any]],
    limits: Sequence[float],
    rate_limit: RateLimit | None,
) -> list[Answer]:
    """In this process: one after the other; what async functions return is awaited together, each to its limit."""
    answers: list[Answer | None] = []
    waiting: dict[int, Any] = {}
    for number, arguments in enumerate(calls):
        began = time.perf_counter()
        try:
            # copies: a function that writes into what it is given changes no row's data
            result = function(**{name: _copied(value) for name, value in arguments.items()})
        except Exception as error:  # noqa: BLE001 - a row's failure is that row's record
            answers.append(_failure(error, began))
            continue
        if inspect.isawaitable(result):
            waiting[number] = result
            answers.append(None)
        else:
            answers.append(Answer(True, result, seconds=time.perf_counter() - began))
    if waiting:
        chosen = [limits[number] for number in waiting]
        found = background.run(_together(list(waiting.values()), chosen, rate_limit))
        for number, answer in zip(waiting, found, strict=True):
            answers[number] = answer
    return [answer for answer in answers if answer is not None]


def _copied(value: Any) -> Any:
    return value if isinstance(value, str | int | float | None) else copy.deepcopy(value)


async def _together(awaitables: Sequence[Any], limits: Sequence[float], rate_limit: RateLimit | None) -> list[Answer]:
    pairs = zip(awaitables, limits, strict=True)
    return list(await asyncio.gather(*(_one(each, limit, rate_limit) for each, limit in pairs)))


async def _one(awaitable: Any, limit: float, rate_limit: RateLimit | None) -> Answer:
    if rate_limit is not None:
        async with rate_limit.slot():  # a row's own time starts when it may
            return await _one(awaitable, limit, None)
    began = time.perf_counter()
    try:
        return Answer(True, await asyncio.wait_for(awaitable, limit), seconds=time.perf_counter() - began)
    except TimeoutError as error:
        if time.perf_counter() - began < limit:
            return _failure(error, began)
        return Answer(False, None, f"no answer within {limit:g} s and was cancelled", None, limit)
    except Exception as error:  # noqa: BLE001 - a row's failure is that row's record
        return _failure(error, began)


def _failure(error: BaseException, began: float) -> Answer:
    text = "".join(traceback.format_exception(error))
    return Answer(False, None, first_line(error), text, time.perf_counter() - began)
