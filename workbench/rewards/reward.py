"""`Reward`: a reward made of a function; and functions that make rewards by `data_source`, from a file, or from any
scorer.

Several rewards are one, each part a column of its own: `Rubric` by weighted sum and gates, `Ensemble` by mean or worst case.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from statistics import fmean, pstdev
from types import ModuleType
from typing import Any

from workbench.base import runtime
from workbench.base.config import helpers, require, source_of
from workbench.base.errors import DataError, RewardError, check_name, describe, first_line, nearest
from workbench.base.shown import Shown
from workbench.dataproto.columns import declared
from workbench.datasets.records import has_user, truth_of
from workbench.engines.generating import Generates
from workbench.rewards.base import (
    BaseReward,
    Signature,
    batch_arguments,
    call_arguments,
    read_signature,
    row_view,
    scores_of,
)
from workbench.rewards.code import Code
from workbench.rewards.runner import CallResult, FileFunction, RateLimit, WorkerPool, called, load_function
from workbench.rewards.score import Score, Status, failed, lint, unscorable_of
from workbench.rewards.scorers.gsm8k import gsm8k
from workbench.rewards.scorers.math_dapo import math_dapo
from workbench.rewards.scorers.math_string import math_string
from workbench.rewards.scorers.numeric import geometry3k, numina
from workbench.rewards.scorers.search import search_em
from workbench.rewards.worker import with_logs
from workbench.sandbox.protocol import Sandbox


class Reward(BaseReward, Shown):
    """`Reward(function)`: scores a batch by a function, one `Score` per row, in order.

    The function is called by its own signature: verl's `compute_score(data_source, solution_str, ground_truth,
    extra_info)` or its batch form, TRL's keyword style (`completions`, …), OpenRLHF's `(queries, prompts, labels)`, AReaL's,
    EasyR1's, slime's `(args, sample)` with `args` bound, or any arguments named like values or columns of a row.
    An argument is filled from the value that its name means (`base.ALIASES`), or from a column of its name; one with a
    default from such a value alone. `rename={"argument": "value or column"}` fills any argument, one with a default too.
    TRL's functions with `**kwargs` get every column by its name, over a default too, as TRL calls them. `binding` says what
    each argument gets. Constants are bound by `functools.partial`. `completion` is a text; for functions of verifiers,
    `rename={"completion": "completion_messages"}` makes it a list of messages.
    `per="group"` calls it once for the rows of one prompt, with lists, so that it can rank or compare them; by default plural
    names mean one call for the batch, others one call per row.

    It runs in a pool of `workers` processes with `timeout` seconds per row and `memory_limit_mb` per process, or with
    `in_process=True` in this process, where only an async function can be stopped at its timeout.
    A `rate_limit` holds for all calls of all rewards that share the object. `check_rows` is called with a data set's rows
    before a run. `on_failure` is the policy for rows that could not be scored (the function raised, hung, lost its worker, or
    returned NaN or what is not a reward; of a batch or group all rows, where the number of results is wrong):

    - `mask` (default): the row is not scored: it is counted and left out of means and losses. If every row fails,
      that is a `RewardError` all the same, because then the function is broken.
    - `raise`: the first failure raises `RewardError`.
    - `retry(n)`: up to n more tries, of a group or batch all its rows, then `mask`.
    - `value=x`: the row counts as x; its `why` still says that the function did not score it.
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
        rename: Mapping[str, str] | None = None,
        check_rows: Callable[[Iterable[Mapping[str, Any]]], str | None] | None = None,
    ) -> None:
        require(workers >= 1, "workers", expected="≥ 1", found=workers)
        require(timeout > 0, "timeout", expected="seconds > 0", found=timeout)
        require(per in (None, "row", "batch", "group"), "per", expected="one of row, batch, group", found=per)
        super().__init__(name or called(function), on_failure)
        self.function = function
        self._file = function.func if isinstance(function, partial) else function
        self._columns: Sequence[str] | None = None
        signature = read_signature(function, rename)
        self.per = per or ("batch" if signature.batched else "row")
        self._signature = replace(signature, batched=self.per != "row")
        self.reads = self._signature.columns()
        if self.per == "group":
            self.reads = tuple(dict.fromkeys((*self.reads, "uid")))
        # a row that streams comes without its prompt's tokens
        self.streams = self.per == "row" and "prompt_ids" not in map(signature.wanted, signature.defaults)
        self.in_process = in_process
        self.workers = workers
        self.timeout = timeout
        self._rate_limit = rate_limit
        self._check_rows = check_rows
        self._pool = None if in_process else WorkerPool(function, workers, timeout, memory_limit_mb, rate_limit)
        # what workers have is the function as it was sent, with the helpers that it had then
        self._sent = () if in_process else (source_of(self._file), *helpers(self._file))

    @property
    def source(self) -> str | None:
        """The function's source text, also of one defined in a notebook cell; None where it cannot be found."""
        if isinstance(self._file, FileFunction):
            return self._file.text
        return self._sent[0] if self._sent else source_of(self._file)

    @property
    def binding(self) -> Mapping[str, str]:
        """Argument of the function → a description of what fills it: exact once `check_signature` has seen the rows'
        columns."""
        return self._signature.binding(self._columns)

    def settings(self) -> dict[str, Any]:
        """Return the reward's settings as plain values; for a function from a file also its name and the file's hash."""
        record = {"in_process": self.in_process, "timeout": self.timeout, **super().settings()}
        if self.per == "group":
            record["per"] = self.per
        if self._signature.rename:
            record["rename"] = dict(self._signature.rename)
        if isinstance(self._file, FileFunction):
            record["file"] = self._file.describe()
        return record

    def check_signature(self, columns: Sequence[str]) -> None:
        """Raise `RewardError`, before any row is scored, if the function needs an argument that rows of these columns
        cannot fill."""
        # a function gets a row's objects, not its tensors
        self._columns = [name for name in columns if (column := declared(name)) is None or not column.is_tensor]
        self._signature.check(self._columns)

    def check_rows(self, rows: Iterable[Mapping[str, Any]]) -> str:
        """Return "" or a sentence on the rows that the function can never score. Raises `DataError` if it can score
        none of them."""
        if self._check_rows is not None:
            return self._check_rows(rows) or ""
        return _lint(self.function, self._signature, rows, self.name)

    def close(self) -> None:
        """End the worker processes."""
        if self._pool is not None:
            self._pool.close()

    def judge(self, rows: Sequence[Mapping[str, Any]]) -> list[Score]:
        """Score rows (dicts from `row_views`) by calls of the function: one `Score` each, in order."""
        reads = getattr(self.function, "reads_answers", False)
        cut = [reads and bool(row["columns"].get("in_reasoning")) for row in rows]
        rows = [{**row, "response": ""} if lost else row for row, lost in zip(rows, cut, strict=True)]
        calls: dict[Any, list[int]] = {}
        for number, row in enumerate(rows):
            call = number if self.per == "row" else row["uid"] if self.per == "group" else None
            calls.setdefault(call, []).append(number)
        together = list(calls.values())
        arguments = [self._arguments([rows[number] for number in numbers]) for numbers in together]
        # a call's time limit is the row limit times its rows
        ask = self._in_this_process if self._pool is None else self._pool.map
        answers = ask(arguments, [self.timeout * len(numbers) for numbers in together])
        scores: dict[int, Score] = {}
        for numbers, answer in zip(together, answers, strict=True):
            scores.update(zip(numbers, self._scores(answer, numbers), strict=True))
        for number in (number for number, lost in enumerate(cut) if lost):
            scores[number] = replace(scores[number], why=f"{scores[number].why}; {_UNENDED}")
        return [scores[number] for number in range(len(rows))]

    def _arguments(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        if self._signature.batched:
            return batch_arguments(self._signature, rows)
        return call_arguments(self._signature, rows[0])

    def _scores(self, answer: CallResult, numbers: Sequence[int]) -> list[Score]:
        """Convert the answer of one call to a `Score` for each of the rows `numbers` that it was for."""
        judged = [failed(answer.why, answer.traceback)] * len(numbers)
        if answer.ok:
            judged = scores_of(answer.result, self.name, numbers, self.per != "row")
        scores = [score.timed(answer.seconds / len(numbers)) for score in judged]
        if self.per == "row" and answer.printed:
            return [scores[0].with_extra({"printed": answer.printed})]
        return scores

    def _in_this_process(self, calls: Sequence[Mapping[str, Any]], limits: Sequence[float]) -> list[CallResult]:
        """Make the calls in this process, one after the other; the results of async functions are awaited together,
        each within its limit."""
        known: dict[int, Any] = {}
        logs: dict[int, Any] = {}
        for number, arguments in enumerate(calls):
            began = time.perf_counter()
            try:
                # copies: a function that writes into what it is given changes no row's data
                copied, logs[number] = with_logs(copy.deepcopy(dict(arguments)))
                result = self.function(**copied)
                waits = inspect.isawaitable(result)
                known[number] = result if waits else CallResult(True, result, seconds=time.perf_counter() - began)
            except Exception as error:  # noqa: BLE001 - a row's failure is that row's record
                known[number] = _failure(error, began)
        waiting = [number for number, one in known.items() if not isinstance(one, CallResult)]
        if waiting:
            answers = runtime.run_all(lambda number: _awaited(known[number], limits[number], self._rate_limit), waiting)
            known.update(zip(waiting, answers, strict=True))
        for number, logged in logs.items():
            if logged and known[number].ok:
                result = {"rewards": known[number].result, "extra_logs": logged}
                known[number] = replace(known[number], result=result)
        return list(known.values())


_UNENDED = "the response ends inside the reasoning that its prompt opened, so it has no answer"


async def _awaited(awaitable: Any, limit: float, rate_limit: RateLimit | None) -> CallResult:
    """Await the result of an async function within `limit` seconds, which count from when the rate limit lets the call
    start."""
    async with (rate_limit or RateLimit()).slot():
        began = time.perf_counter()
        try:
            async with asyncio.timeout(limit) as waiting:
                return CallResult(True, await awaitable, seconds=time.perf_counter() - began)
        except Exception as error:  # noqa: BLE001 - a row's failure is that row's record
            if waiting.expired():
                return CallResult(False, None, f"the function gave no answer within {limit:g} s", None, limit)
            return _failure(error, began)


def _failure(error: BaseException, began: float) -> CallResult:
    text = "".join(traceback.format_exception(error))
    return CallResult(False, None, first_line(error), text, time.perf_counter() - began)


def _lint(scorer: Any, signature: Signature | None, rows: Iterable[Mapping[str, Any]], name: str) -> str:
    """Apply `lint` to rows with a scorer's attribute `unscorable`, which takes the scorer's arguments; "" for a scorer
    without it.

    `signature` is by default the scorer's own.
    """
    unscorable = unscorable_of(scorer)
    if unscorable is None:
        return ""
    how = signature or read_signature(scorer)
    views = (row_view({**row, "raw_prompt": row.get("prompt")}, "", ()) for row in rows)
    return lint((call_arguments(how, view) for view in views), unscorable, name)


_MATH = ("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500")
_DAPO = ("math_dapo", "math", "math_dapo_reasoning", "aime", "aime24", "aime25")
_NUMINA = ("aops_forum", "synthetic_math", "amc_aime", "synthetic_amc", "cn_k12", "olympiads")
_SEARCH = ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")

SCORERS: Mapping[str, Callable[..., Any]] = {
    "openai/gsm8k": gsm8k,
    "gsm8k": gsm8k,
    "workbench/arith": gsm8k,
    **dict.fromkeys(_MATH, math_string),
    **dict.fromkeys(_DAPO, math_dapo),
    **{f"numina_{name}": numina for name in _NUMINA},
    "hiyouga/geometry3k": geometry3k,
    **{f"searchR1_{name}": search_em for name in _SEARCH},
}
"""`data_source` → scorer, as verl routes. `gsm8k` without its owner is what many data sets write; verl refuses it."""
CODE_SOURCES = ("codecontests", "apps", "codeforces", "taco", "livecodebench", "humaneval", "mbpp")
"""Sources whose rows are scored by running the response's code: they need a sandbox."""


def scorer_for(
    data_source: Any, table: Mapping[str, Callable[..., Any]] = SCORERS, aliases: Mapping[str, str] | None = None
) -> Callable[..., Any]:
    """Return the scorer of a `data_source` in `table`; `aliases` maps other names to names in it. Raises `DataError`
    for other sources."""
    name = (aliases or {}).get(data_source, data_source)
    if isinstance(name, str) and name.startswith("aime") and name not in table:
        name = "aime"  # verl's rule: every year's
    if name in table:
        return table[name]
    if name in CODE_SOURCES:
        do = "pass reward=rewards.by_data_source(sandbox=wb.sandbox.local()), or sandbox.remote(url)"
        raise DataError(f"rows of {data_source!r} are scored by running code", expected="a sandbox", do=do)
    names = (*table, *CODE_SOURCES, *(aliases or {}))
    close = nearest(str(data_source), names)
    do = (f"did you mean {close!r}? Else " if close else "") + "pass your own: reward=my_function"
    expected = f"reward=my_function, or a source of {', '.join(names)} (by_data_source(aliases={{…}}) adds names)"
    raise DataError(f"{str(data_source)!r} is not a data_source with a scorer", expected=expected, do=do)


def check_sources(
    sources: Iterable[Any], table: Mapping[str, Callable[..., Any]] = SCORERS, aliases: Mapping[str, str] | None = None
) -> None:
    """Raise `DataError` if one of `sources` (a data set's values of `data_source`) has no scorer; called before a run."""
    for source in dict.fromkeys(sources):
        scorer_for(source, table, aliases)


def by_data_source(
    table: Mapping[str, Callable[..., Any]] = SCORERS,
    *,
    aliases: Mapping[str, str] | None = None,
    sandbox: Sandbox | None = None,
    **options: Any,
) -> Reward:
    """Make a reward that chooses the scorer by each row's `data_source`, as verl does; `table` maps sources to scorers.

    A row without a ground truth whose turns a simulated user scored gets the score of the last turn, and one of an
    environment (`agents.environment_rows`) the sum of all. The scorers' run
    time is bounded, so they run in this process. Code runs in `sandbox`; without one, sources that need it are refused
    before the run. `options` are those of `Reward`.
    """
    plain = table is SCORERS and not aliases and sandbox is None
    if sandbox is not None:
        table = {**dict.fromkeys(CODE_SOURCES, Code(sandbox)), **table}

    def no_text(truth: Any) -> bool:
        return truth is None or (isinstance(truth, str) and not truth)

    def scored(response: str, ground_truth: Any, data_source: Any, extra_info: Any = None) -> Any:
        if no_text(ground_truth) and (by_user := _of_user(extra_info)) is not None:
            return by_user
        scorer = scorer_for(data_source, table, aliases)
        further = (extra_info,) if isinstance(scorer, Code) else ()
        return scorer(response, ground_truth, *further)

    def check(rows: Iterable[Mapping[str, Any]]) -> str:
        by_source: dict[Any, list[Mapping[str, Any]]] = {}
        for row in rows:
            if not no_text(truth_of(row)) or not has_user(row):  # else its simulated user scores it
                by_source.setdefault(row.get("data_source"), []).append(row)
        check_sources(by_source, table, aliases)
        scorers = {source: scorer_for(source, table, aliases) for source in by_source}
        notes = [_lint(scorers[source], None, held, str(source)) for source, held in by_source.items()]
        return "; ".join(filter(None, notes))

    scored.reads_answers = all(getattr(one, "reads_answers", False) for one in table.values())  # type: ignore[attr-defined]
    chosen = {"in_process": True, "on_failure": "raise", "timeout": Code.row_timeout if sandbox else 30.0, **options}
    # replay rebuilds the plain one by its name; a table, aliases and a sandbox are not recorded
    name = "by data_source" if plain else "by data_source, its own table"
    return Reward(scored, name=name, check_rows=check, **chosen)


def _of_user(extra_info: Any) -> Score | None:
    """Return the score that a simulated user gave the last turn of an episode, of an environment's row the sum over its
    turns; None where there is none."""
    extra = extra_info if isinstance(extra_info, Mapping) else {}
    scores, summed = extra.get("turn_scores"), extra.get("score_by") == "sum of turns"
    if scores is None or not (len(scores) or summed):
        return None
    if summed:
        return Score(value=float(sum(scores)), why=f"the sum of the environment's rewards in {len(scores)} turns")
    return Score(value=float(scores[-1]), why=f"the simulated user's score of the last of {len(scores)} turns")


def as_reward(function: Any = None, **options: Any) -> BaseReward:
    """Make a reward of whatever scores responses; `options` are those of `Reward`.

    None gives `by_data_source()`. A reward (`Reward`, `Rubric`, `Judge`, …) is returned unchanged. `"file.py"` or
    `"file.py:function"` is loaded. A callable, or a module with a `compute_score` as verl's are (`rewards.gsm8k`), is
    wrapped in `Reward`; scorers of workbench whose run time is bounded run in this process. Raises `DataError` for
    `options` beside a finished reward.
    """
    if function is None:
        return by_data_source(**options)
    if isinstance(function, BaseReward):
        if options:
            raise DataError(f"options for the finished reward {function!r}", expected="none", found=sorted(options))
        return function
    if isinstance(function, str):
        path, _, name = function.partition(":")
        return Reward(load_function(path, name or "compute_score"), **options)
    if isinstance(function, ModuleType) and hasattr(function, "compute_score"):
        name = function.__name__.rpartition(".")[2]
        options = {"name": name, **options}
        # ours says more under the module's own name: what it extracted, and why
        function = getattr(function, name, function.compute_score)
    maker = _made_by(function)
    if maker is not None:
        parameters = inspect.signature(function).parameters.values()
        if any(one.default is one.empty and one.kind is not one.VAR_KEYWORD for one in parameters):
            do = f"call it: {function.__name__}(…)"
            raise DataError(f"{function.__name__} makes a reward", expected="a reward", found="the function", do=do)
        return as_reward(function(**options))
    if not callable(function) or isinstance(function, Generates):
        several = isinstance(function, list | tuple)
        advice = 'combine them: wb.rewards.Rubric({"right": f, "short": g})' if several else None
        raise DataError("the reward", expected="a function, a file or a reward", found=describe(function), do=advice)
    if getattr(function, "in_process", False) is True:
        return Reward(function, **{"in_process": True, "timeout": getattr(function, "row_timeout", 30.0), **options})
    return Reward(function, **options)


def _made_by(function: Any) -> Any:
    """The kind of reward that a function (`math_verify`) or class (`Judge`, `code`) makes; None for what scores."""
    if inspect.isfunction(function):
        kind_name = function.__annotations__.get("return")
        function = function.__globals__.get(kind_name) if isinstance(kind_name, str) else kind_name
    kind = function if isinstance(function, type) else object
    scores = issubclass(kind, BaseReward) or any("__call__" in vars(one) for one in kind.__mro__)
    return kind if scores else None


class Rubric(BaseReward, Shown):
    """Several rewards as one: `Rubric({"correct": gsm8k, "safe": safe}, weights={"correct": 2.0}, gates={"safe": 0.5})`.

    The value is Σ weight · part over the parts that scored the row (weight 1 unless given); `normalise=True` divides it by
    the sum of their weights. Where a part is below its threshold in `gates` the value is `gated` instead; a part with a
    gate has weight 0 unless given. A part that is *not_applicable* is left out of the sum; a part that is *infra_error*
    after its own policy makes the row *infra_error*, because a sum without it would be another reward. Parts run
    concurrently; the score's extra `parts` has each part's score by name.

    Parts are whatever `as_reward` takes: functions, files, `Reward`, `Judge`, `RewardModel`, `code(sandbox)`, rubrics.
    """

    def __init__(
        self,
        parts: Mapping[str, Any],
        *,
        weights: Mapping[str, float] | None = None,
        gates: Mapping[str, float] | None = None,
        gated: float = 0.0,
        normalise: bool = False,
        on_failure: str = "mask",
        name: str = "rubric",
    ) -> None:
        require(bool(parts), "parts", expected="at least one reward", found=dict(parts))
        super().__init__(name, on_failure)
        for label, numbers in (("weights", weights or {}), ("gates", gates or {})):
            for part in numbers:
                check_name(f"part of this rubric (in {label})", part, parts, RewardError)
        self.parts = {part: as_reward(reward) for part, reward in parts.items()}
        self.gates = dict(gates or {})
        self.weights = {part: float((weights or {}).get(part, 0.0 if part in self.gates else 1.0)) for part in parts}
        self.gated = gated
        self.normalise = normalise
        self.streams = all(reward.streams for reward in self.parts.values())
        self.reads = tuple(dict.fromkeys(column for reward in self.parts.values() for column in reward.reads))

    @property
    def source(self) -> str:
        """The `source` of every part, one after the other, each under its name."""
        return "\n\n".join(f"# {part}\n{reward.source}" for part, reward in self.parts.items() if reward.source)

    @property
    def binding(self) -> Mapping[str, str]:
        """The bindings of all parts: `part.argument` → a description of what fills it."""
        each = self.parts.items()
        return {f"{part}.{name}": source for part, reward in each for name, source in reward.binding.items()}

    def settings(self) -> dict[str, Any]:
        """Return the rubric's settings as plain values: policy, weights, gates, and the settings of each part."""
        about = {name: getattr(self, name) for name in ("weights", "gates", "gated", "normalise")}
        parts = {part: reward.settings() for part, reward in self.parts.items()}
        return {**super().settings(), **about, "parts": parts}

    def check_signature(self, columns: Sequence[str]) -> None:
        """Raise `RewardError`, before any row is scored, if a part needs a column that is not among the names in
        `columns`."""
        for reward in self.parts.values():
            reward.check_signature(columns)

    def check_rows(self, rows: Iterable[Mapping[str, Any]]) -> str:
        """Return the parts' sentences on rows that they can never score, each after its part's name; "" where no part
        has one. Raises `DataError` if a part can score none of the rows."""
        held = list(rows)
        notes = {part: reward.check_rows(held) for part, reward in self.parts.items()}
        return "; ".join(f"{part}: {note}" for part, note in notes.items() if note)

    def check_sampler(self, tokenizer: Any, switches: Mapping[str, Any]) -> None:
        """Raise, before any row is scored, if a model with this tokenizer and these switches cannot write the responses
        that a part expects."""
        for reward in self.parts.values():
            reward.check_sampler(tokenizer, switches)

    def close(self) -> None:
        """End the worker processes and connections of every part."""
        for reward in self.parts.values():
            reward.close()

    def judge(self, rows: Sequence[Mapping[str, Any]]) -> list[Score]:
        """Score the rows: one `Score` each, in order; the parts run concurrently in threads."""
        threads = ThreadPoolExecutor(len(self.parts), thread_name_prefix="workbench-rubric")
        try:
            futures = {part: threads.submit(_score_part, reward, rows) for part, reward in self.parts.items()}
            settled = {part: future.result() for part, future in futures.items()}
        finally:
            threads.shutdown(wait=False)  # an interrupt does not wait for the slowest part
        return [self._joined({part: scores[row] for part, scores in settled.items()}) for row in range(len(rows))]

    def _joined(self, scores: Mapping[str, Score]) -> Score:
        columns = {part: score.value for part, score in scores.items() if score.scored}
        for part, score in scores.items():
            columns.update({f"{part}.{name}": value for name, value in score.parts.items() if name != part})
        return replace(
            self._judged(scores),
            parts=columns,
            extra={"parts": {part: _summary(score) for part, score in scores.items()}},
            answer=next((score.answer for score in scores.values() if score.answer is not None), None),
            seconds=max(score.seconds for score in scores.values()),
        )

    def _divisor(self, parts: Iterable[str]) -> float:
        """Return the sum of the weights of the parts that scored a row if the rubric is normalised, else 1."""
        total = sum(self.weights[part] for part in parts) if self.normalise else 1.0
        if not total:
            raise RewardError("weights of a normalised rubric", expected="a sum ≠ 0 in each row", found=self.weights)
        return total

    def _judged(self, scores: Mapping[str, Score]) -> Score:
        """Combine the scores of a row's parts into one `Score` with value, status and reason."""
        lost = [part for part, score in scores.items() if score.status is Status.INFRA_ERROR]
        if lost:
            broken = next((part for part in lost if scores[part].undecided), lost[0])
            return failed(f"{broken}: {scores[broken].why}", scores[broken].error)
        shut = [part for part, low in self.gates.items() if scores[part].scored and scores[part].value < low]
        if shut:
            return Score(value=self.gated, why=f"gated by {', '.join(shut)}: {scores[shut[0]].why}")
        judged = {part: score for part, score in scores.items() if score.scored and self.weights[part]}
        if not judged:
            return Score(status=Status.NOT_APPLICABLE, why="no part applies to this row")
        value = sum(self.weights[part] * score.value for part, score in judged.items()) / self._divisor(judged)
        statuses = {score.status for score in judged.values()}
        why = "; ".join(f"{part} {score.value:g}: {score.why}" for part, score in judged.items())
        return Score(value=value, why=why, status=statuses.pop() if len(statuses) == 1 else _joint_status(statuses))


COMBINED = ("mean", "worst", "uncertainty")
"""Ways in which an `Ensemble` makes one value of its members'."""


class Ensemble(Rubric):
    """Several reward models as one: `Ensemble([RewardModel(a), RewardModel(b), RewardModel(c)], combine="worst")`.

    The value of a row is the `mean` of its members' values, their minimum (`worst`), or with `uncertainty` the mean
    less `coef` times their variance, so that a policy that exploits one member's error is held back by the others
    (Coste et al. 2023, https://arxiv.org/abs/2310.02743). The part `disagreement` is the members' population standard
    deviation; the other parts are their values by name. Everything else works as in a `Rubric`. Members should give
    values on one scale, as models that were trained alike do.

    Args:
        members: whatever `as_reward` takes, two or more; a mapping names them, else they are `member_1`, `member_2`, …
        combine: `mean`, `worst` or `uncertainty`.
        coef: weight of the variance; with `uncertainty` alone.
    """

    def __init__(
        self,
        members: Mapping[str, Any] | Sequence[Any],
        *,
        combine: str = "mean",
        coef: float = 1.0,
        on_failure: str = "mask",
        name: str = "ensemble",
    ) -> None:
        named = members if isinstance(members, Mapping) else {f"member_{n}": one for n, one in enumerate(members, 1)}
        require(len(named) > 1, "members of an ensemble", expected="two or more", found=len(named))
        require(combine in COMBINED, "combine", expected=f"one of {', '.join(COMBINED)}", found=combine)
        require(coef >= 0, "coef", expected="≥ 0", found=coef)
        super().__init__(named, normalise=True, on_failure=on_failure, name=name)
        self.combine = combine
        self.coef = coef

    def settings(self) -> dict[str, Any]:
        """Return the ensemble's settings as plain values: policy, how values are combined, and the settings of each
        member."""
        inherited = super().settings()
        about = {"combine": self.combine, **({"coef": self.coef} if self.combine == "uncertainty" else {})}
        return {"on_failure": inherited["on_failure"], **about, "parts": inherited["parts"]}

    def _joined(self, scores: Mapping[str, Score]) -> Score:
        joined = super()._joined(scores)
        values = [score.value for score in scores.values() if score.scored]
        if not (joined.scored and values):
            return joined
        spread = pstdev(values)
        value = {"mean": fmean(values), "worst": min(values), "uncertainty": fmean(values) - self.coef * spread**2}
        return replace(joined, value=value[self.combine], parts={**joined.parts, "disagreement": spread})


def _score_part(reward: BaseReward, rows: Sequence[Mapping[str, Any]]) -> list[Score]:
    """Score rows by a part of a rubric, under the part's policy; if all rows fail, the rubric's policy decides, not the
    part's."""
    scores = reward.tried(rows)
    return reward.settle(scores) if reward.on_failure == "raise" or reward.failed_value is not None else scores


def _summary(score: Score) -> dict[str, Any]:
    facts = score.to_json()
    shown = {name: facts[name] for name in ("value", "status", "answer", "why")}
    return {**shown, "extra": facts["extra"]} if score.extra else shown


def _joint_status(statuses: Collection[Status]) -> Status:
    """Combine different statuses of a row's parts: *counted* if any part is, *no_answer* if the response failed in all
    parts, else *scored*."""
    if Status.COUNTED in statuses:
        return Status.COUNTED
    return Status.NO_ANSWER if all(one.failed_by_model for one in statuses) else Status.SCORED
