"""A reward as stages use it: a function, how it is called, where it runs, and what happens when it fails."""

from __future__ import annotations

import copy
import importlib.util
import inspect
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from workbench import background
from workbench.config import require
from workbench.dataproto import DataProto
from workbench.errors import DataError, RewardError, boundary, first_line, message, unknown
from workbench.rewards.runner import Answer, Pool
from workbench.rewards.score import Score, Status, failed
from workbench.rewards.signatures import (
    as_score,
    batch_arguments,
    call_arguments,
    check_arguments,
    read_signature,
)


class Reward:
    """`Reward(function)`: scores a batch, one record a row, order kept.

    The function is called by its own signature: verl's `compute_score(data_source, solution_str, ground_truth,
    extra_info)` or its batch form, TRL's keyword style (`completions`, …), or any names of values and columns.
    It runs in a pool of killable processes with `timeout` seconds a row, unless `in_process=True` says that it
    may run here (then nothing can stop it). What a failure means is `on_failure`:

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
        on_failure: str = "mask",
        name: str | None = None,
        given: Sequence[str] = (),
        check_rows: Callable[[Iterable[Mapping[str, Any]]], None] | None = None,
    ) -> None:
        require(workers >= 1, "workers", expected="≥ 1", found=workers)
        require(timeout > 0, "timeout", expected="seconds > 0", found=timeout)
        self._function = function
        self._signature = read_signature(function, given)
        self._pool = None if in_process else Pool(function, workers=workers, timeout=timeout)
        self._retries, self._value, self._raises = _policy(on_failure)
        self.in_process = in_process
        self.workers = workers
        self.timeout = timeout
        self.on_failure = on_failure
        self._check_rows = check_rows
        self.name = name or str(getattr(function, "__name__", type(function).__name__))

    @property
    def reads(self) -> tuple[str, ...]:
        """Columns that the function asks for by name and that have no default there."""
        parameters = inspect.signature(self._function).parameters
        empty = inspect.Parameter.empty
        return tuple(
            name for name in self._signature.columns() if name in parameters and parameters[name].default is empty
        )

    @property
    def source(self) -> str | None:
        """Source text, also of a function defined in a cell; None where there is none to be had."""
        inner = self._function.func if isinstance(self._function, partial) else self._function
        try:
            return inspect.getsource(inner)
        except (OSError, TypeError):
            return None

    def settings(self) -> dict[str, Any]:
        """What was chosen at construction."""
        return {
            "in_process": self.in_process,
            "timeout": self.timeout,
            "on_failure": self.on_failure,
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

    def score(self, batch: DataProto) -> list[Score]:
        """One record a row. Raises `RewardError` by policy, for a broken function, or a broken contract."""
        self.check_signature(batch.columns)
        rows = row_views(batch)
        scores = self._score_batch(rows) if self._signature.batched else self._score_rows(rows)
        broken = [score for score in scores if score.status is Status.MACHINERY_FAILED]
        if broken and (self._raises or (len(broken) == len(scores) and self._value is None)):
            what = "a row" if self._raises else f"all {len(scores)} rows"
            raise RewardError(
                message(
                    f"reward {self.name!r} failed on {what}",
                    found=broken[0].why,
                    do=broken[0].error or "mend the function",
                )
            )
        if self._value is not None:
            scores = [self._valued(score) for score in scores]
        return scores

    def _valued(self, score: Score) -> Score:
        if score.status is not Status.MACHINERY_FAILED:
            return score
        why = f"counted as {self._value:g} by policy: {score.why}"
        return Score(
            value=self._value or 0.0, status=Status.MODEL_FAILED, why=why, error=score.error, seconds=score.seconds
        )

    def _score_rows(self, rows: Sequence[Mapping[str, Any]]) -> list[Score]:
        calls = [call_arguments(self._signature, row) for row in rows]
        answers = self._answers(calls, None)
        return [self._record(answer, number) for number, answer in enumerate(answers)]

    def _score_batch(self, rows: Sequence[Mapping[str, Any]]) -> list[Score]:
        """One call for all rows; its limit is the row limit times the rows."""
        answer = self._answers([batch_arguments(self._signature, rows)], self.timeout * max(len(rows), 1))[0]
        if not answer.ok:
            return [failed(answer.why, answer.traceback, answer.seconds) for _ in rows]
        results = answer.result.tolist() if hasattr(answer.result, "tolist") else answer.result
        if not isinstance(results, Sequence) or isinstance(results, str) or len(results) != len(rows):
            found = len(results) if hasattr(results, "__len__") else type(results).__name__
            raise RewardError(
                message(f"reward function {self.name}", expected=f"a list of {len(rows)} rewards", found=found)
            )
        return [as_score(result, self.name, number) for number, result in enumerate(results)]

    def _answers(self, calls: Sequence[Mapping[str, Any]], timeout: float | None) -> list[Answer]:
        answers = self._run(calls, timeout)
        for _ in range(self._retries):
            again = [number for number, answer in enumerate(answers) if not answer.ok]
            for number, answer in zip(again, self._run([calls[n] for n in again], timeout), strict=True):
                answers[number] = answer
        return answers

    def _run(self, calls: Sequence[Mapping[str, Any]], timeout: float | None) -> list[Answer]:
        return self._pool.map(calls, timeout) if self._pool is not None else _here(self._function, calls)

    def _record(self, answer: Answer, row: int) -> Score:
        if not answer.ok:
            return failed(answer.why, answer.traceback, answer.seconds)
        return as_score(answer.result, self.name, row).timed(answer.seconds)

    def __repr__(self) -> str:
        where = "in this process" if self.in_process else f"{self.workers} workers, {self.timeout:g} s a row"
        return f"Reward({self.name}: {where}, on failure {self.on_failure})"


def _policy(text: str) -> tuple[int, float | None, bool]:
    """(retries, value, raises) of `mask`, `raise`, `retry(n)` or `value=x`."""
    if text in ("mask", "raise"):
        return 0, None, text == "raise"
    try:
        if text.startswith("retry(") and text.endswith(")"):
            return int(text[6:-1]), None, False
        if text.startswith("value="):
            return 0, float(text.removeprefix("value=")), False
    except ValueError as cause:
        raise RewardError(message("on_failure", expected="a number in retry(n) or value=x", found=text)) from cause
    raise RewardError(unknown("policy on failure", text, ("mask", "raise", "retry(n)", "value=x")))


def _here(function: Callable[..., Any], calls: Sequence[Mapping[str, Any]]) -> list[Answer]:
    """In this process, one after the other; async functions together on the background loop."""
    answers = []
    for arguments in calls:
        try:
            # copies: a function that writes into what it is given changes no row's data
            result = function(**copy.deepcopy(dict(arguments)))
            if inspect.isawaitable(result):
                result = background.run(_await(result))
            answers.append(Answer(True, result))
        except Exception as error:  # noqa: BLE001 - a row's failure is that row's record
            answers.append(Answer(False, None, first_line(error), traceback.format_exc()))
    return answers


async def _await(result: Any) -> Any:
    return await result


def row_views(batch: DataProto) -> list[dict[str, Any]]:
    """Each row as plain values: what reward functions may ask for by name."""
    objects = {name: list(batch.non_tensor_batch[name]) for name in batch.non_tensor_batch}
    lengths = batch["response_mask"].sum(-1).tolist() if "response_mask" in batch else None
    rows = []
    for number in range(len(batch)):
        columns = {name: values[number] for name, values in objects.items() if name != "score"}
        judged = columns.get("reward_model") or {}
        chat = columns.get("raw_prompt")
        ids = batch["responses"][number][: lengths[number]].tolist() if lengths is not None else []
        rows.append(
            {
                "response": columns["response_text"],
                "response_ids": ids,
                "prompt": chat,
                "prompt_text": chat[-1]["content"] if isinstance(chat, list) and chat else chat,
                "ground_truth": judged.get("ground_truth"),
                "data_source": columns.get("data_source"),
                "extra_info": columns.get("extra_info") or {},
                "columns": columns,
            }
        )
    return rows


def load_function(path: str | Path, name: str = "compute_score", **reward_kwargs: Any) -> Callable[..., Any]:
    """A function from a Python file; `reward_kwargs` are bound and win over what a call gives.

    Raises `DataError` where the file is missing or has no such function (the functions there are, are listed).
    """
    file = Path(path)
    if not file.is_file():
        raise DataError(message(f"no reward file at {str(path)!r}", expected="a Python file", do="check the path"))
    spec = importlib.util.spec_from_file_location(f"workbench_reward_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise DataError(
            message(f"reward file {str(path)!r}", expected="a Python file", found=file.suffix or "no suffix")
        )
    module = importlib.util.module_from_spec(spec)
    with boundary(f"importing the reward file {str(path)!r}", RewardError):
        spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise DataError(f"{str(path)!r}: " + unknown("function of that file", name, functions))
    _by_value(module)
    return partial(function, **reward_kwargs) if reward_kwargs else function


def _by_value(module: Any) -> None:
    """The module is importable nowhere else, so its functions travel to workers by value."""
    import sys

    import cloudpickle

    sys.modules[module.__name__] = module
    cloudpickle.register_pickle_by_value(module)
