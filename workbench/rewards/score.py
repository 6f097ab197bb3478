"""`Score`: one row's reward as a record: value, parts, extracted answer, reason, and whether the row was scored at all.

Also ground truths: how a rule reads them, which of them no answer can match, and the count of those before a run.
"""

from __future__ import annotations

import functools
import inspect
import math
import numbers
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from enum import Enum, StrEnum
from typing import Any, TypeVar

from workbench.base.config import check_nesting
from workbench.base.errors import DataError, RewardError, describe
from workbench.base.shown import Shown, encodable, plain
from workbench.dataproto.io import register_codec

F = TypeVar("F", bound=Callable[..., Any])


def bounded(function: F) -> F:
    """Decorator that marks a scorer whose run time is bounded, so that `as_reward` runs it in this process.

    A scorer that another function returns (`shaping.repetition`, for example) gets that function's name. Raises
    `RewardError` when the scorer is called with a response that is not text.
    """

    @functools.wraps(function)
    def scorer(*args: Any, **options: Any) -> Any:
        response = args[0] if args else options.get("response", "")
        if first == "response" and not isinstance(response, str):
            raise RewardError(f"response given to {scorer.__name__}", expected="text", found=type(response).__name__)
        return function(*args, **options)

    first = next(iter(inspect.signature(function).parameters), "")
    scorer.in_process = True  # type: ignore[attr-defined]
    scorer.__name__ = function.__qualname__.partition(".")[0]
    return scorer  # type: ignore[return-value]


LARGEST = 3.4e38
"""Largest absolute value of a reward: a larger one is infinite in float32, the type of rewards."""


def finite(value: Any, what: str, do: str | None = None) -> float:
    """Convert a number to float. Raises `RewardError` for what is not a number, for NaN, and for an absolute value
    above `LARGEST`."""
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except OverflowError:
        number, value = math.nan, "an integer too large for a float"
    except (TypeError, ValueError):
        number = math.nan
    if not abs(number) <= LARGEST:
        raise RewardError(what, expected=f"a finite number, at most {LARGEST:g}", found=describe(value), do=do)
    return number


class Status(StrEnum):
    """Whether a row was scored. *no_answer*, *crashed* and *timeout* are faults of the response and count as scored."""

    SCORED = "scored"
    """The response was scored."""
    NO_ANSWER = "no_answer"
    """The response has no answer to extract. The row counts as scored, usually with 0."""
    CRASHED = "crashed"
    """The response's code failed. The row counts as scored."""
    TIMEOUT = "timeout"
    """The response's code exceeded its time limit. The row counts as scored."""
    INFRA_ERROR = "infra_error"
    """The row could not be scored: the function raised, hung or lost its worker. Never counted as 0."""
    COUNTED = "counted"
    """The row could not be scored and counts as x, by the policy `on_failure="value=x"`; `why` has the failure."""
    NOT_APPLICABLE = "not_applicable"
    """The function returned None: it does not score this row."""

    @property
    def failed_by_model(self) -> bool:
        """Whether the response is at fault: it has no answer, or its code crashed or timed out."""
        return self in (Status.NO_ANSWER, Status.CRASHED, Status.TIMEOUT)


@dataclass(frozen=True, repr=False, kw_only=True)
class Score(Shown):
    """One row's reward: value, parts, reason and status. Raises `RewardError` for a value that is not a number, NaN, or
    infinite as float32."""

    value: float = 0.0
    """The reward; meaningful where `scored`."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Named components, each a column `reward/<part>`."""
    answer: str | None = None
    """What was extracted from the response."""
    why: str = ""
    """The reason for the value or the status, in one sentence."""
    status: Status = Status.SCORED
    """Whether the row was scored, and if not, why."""
    error: str | None = None
    """Traceback of what failed."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further values that the function returned, by name."""
    seconds: float = 0.0
    """Wall time of scoring, in seconds."""

    def __post_init__(self) -> None:
        finite(self.value, "the value of a Score")
        for name, part in self.parts.items():
            if not isinstance(part, float) or math.isfinite(part):
                finite(part, f"part {name!r} of a Score")
        check_nesting(self.extra, "the extras of a Score", RewardError)
        for name in ("answer", "why", "error"):  # a file holds no unpaired surrogate
            if isinstance(text := getattr(self, name), str):
                object.__setattr__(self, name, encodable(text))

    @property
    def scored(self) -> bool:
        """Whether the row was scored: only then it counts in means, groups and losses."""
        return self.status not in (Status.INFRA_ERROR, Status.NOT_APPLICABLE)

    @property
    def undecided(self) -> bool:
        """Whether the row cannot be scored until the user has chosen a setting (see `left_open`).

        The policies `mask` and `retry(n)` do not pass over such a row: the first one stops the run, because a response
        could otherwise bring it about to escape a zero. `value=x` does count it as x.
        """
        return (self.error or "").startswith(_LEFT_OPEN)

    def timed(self, seconds: float) -> Score:
        """Return a copy with `seconds` as the wall time of scoring."""
        return replace(self, seconds=seconds)

    def with_value(self, value: float, **parts: float) -> Score:
        """Return a copy with this value, and with these parts added."""
        return replace(self, value=value, parts={**self.parts, **parts})

    def with_extra(self, extra: Mapping[str, Any]) -> Score:
        """Return a copy with these extras added."""
        return replace(self, extra={**self.extra, **extra})

    def to_json(self) -> dict[str, Any]:
        """Return the score as a dict of plain values, to be saved."""
        return {**vars(self), "parts": dict(self.parts), "extra": dict(self.extra), "status": self.status.value}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Score:
        """Make the score of a dict that `to_json` returned. Raises where a field is missing or has another type."""
        texts = {name: str(record[name]) for name in ("answer", "why", "error") if record.get(name) is not None}
        parts = {str(name): _real(value) for name, value in record["parts"].items()}
        kept = {**record, **texts, "parts": parts, "extra": dict(record["extra"]), "seconds": _real(record["seconds"])}
        return cls(**{**kept, "status": Status(record["status"])})

    def __str__(self) -> str:
        if not self.scored:
            return f"no judgement ({self.status.value}): {plain(self.why)}"
        answer = f", answer {self.answer!r}" if self.answer is not None else ""
        return f"{self.value:g}{answer}: {plain(self.why)}" if self.why else f"{self.value:g}{answer}"


register_codec("Score", Score, Score.to_json, Score.from_json)


def _real(value: Any) -> Any:
    return value if isinstance(value, numbers.Real) else float(value)


class Missing(Enum):
    """The type of `MISSING`, which marks, in a column of extras, a row whose function did not return that key."""

    MISSING = "MISSING"

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return "MISSING"

    __str__ = __repr__


MISSING = Missing.MISSING
register_codec("Missing", Missing, lambda _: None, lambda _: MISSING)


def extra_columns(scores: Sequence[Score]) -> dict[str, list[Any]]:
    """Turn the extras of scores into columns `reward_extra/<key>`, one value per row: `MISSING` where a row lacks the
    key."""
    names = dict.fromkeys(name for score in scores for name in score.extra)
    return {f"reward_extra/{name}": [score.extra.get(name, MISSING) for score in scores] for name in names}


def compared(right: bool, answer: str, ground_truth: Any, what: str = "the answer") -> Score:
    """Make the score of an extracted answer: 1 where it is right, else 0, with the reason; long texts are cut."""
    why = f"{what} is right" if right else f"expected {str(ground_truth)[:100]}"
    return Score(value=float(right), answer=answer[:200], why=why)


def no_answer(why: str, value: float = 0.0) -> Score:
    """Make the score of a response without an answer to extract: status *no_answer*."""
    return Score(value=value, status=Status.NO_ANSWER, why=why)


def failed(why: str, error: str | None = None, seconds: float = 0.0) -> Score:
    """Make the score of a row that could not be scored: status *infra_error*."""
    return Score(status=Status.INFRA_ERROR, why=why, error=error, seconds=seconds)


_LEFT_OPEN = "left open: "


def left_open(why: str, settings: str) -> Score:
    """Make the score of a row that cannot be scored before the user has chosen one of `settings`: *infra_error* and
    `undecided`."""
    return failed(f"{why}; choose {settings}", f"{_LEFT_OPEN}choose {settings}")


_BLANK = ("", "nan", "NaN", "<NA>", "NaT")
"""Texts that are not truths: pandas writes a missing one so."""
_KINDS = {"int": "integers", "float": "floats", "str": "texts", "NoneType": "missing", "list": "lists", "dict": "dicts"}


def as_text(truth: Any) -> str | None:
    """Convert a ground truth to text: a text stays as it is, a number (numpy's too) is written as Python prints it,
    `4.0` as `4`.

    None for what cannot be read: a missing or blank value, NaN (also as text), infinity, bytes, a list, a dict, any
    other object.
    """
    if getattr(truth, "ndim", None) == 0 and callable(getattr(truth, "item", None)):
        truth = truth.item()  # a scalar of numpy or torch
    if isinstance(truth, str):
        return None if truth.strip() in _BLANK else truth
    try:
        if isinstance(truth, numbers.Rational):
            return str(truth)
        if not isinstance(truth, numbers.Real | Decimal) or not math.isfinite(truth):
            return None
        whole = math.trunc(truth)
        return str(whole) if whole == truth else format(Decimal(str(truth)), "f")
    except (ValueError, OverflowError):  # more digits than Python prints
        return None


def as_written(truth: Any) -> Any:
    """A ground truth as rules that compare texts need it: a number as text (`as_text`), anything else as it is."""
    number = not isinstance(truth, str) and as_text(truth)
    return number or truth


def no_truth(truth: Any = None) -> Score:
    """Make the score of a row whose ground truth is missing, or cannot be matched by any answer: *not_applicable*."""
    if truth is None:
        return Score(status=Status.NOT_APPLICABLE, why="the row has no ground truth")
    why = f"no answer can match the ground truth {describe(truth)} ({type(truth).__name__})"
    return Score(status=Status.NOT_APPLICABLE, why=why)


def rule(
    right: Callable[[Any], str], matches: Callable[[str, Any], bool], read: Callable[[Any], Any] = as_text
) -> Callable[[F], F]:
    """Decorator that makes a bounded scorer of `function(response, ground_truth, …)`; its ground truths are converted
    by `read` first.

    `right(truth)` writes a response that is right, and `matches(response, truth)` compares as the rule does. A ground
    truth that `read` turns into None, or that its own right response does not match, is *not_applicable*. The scorer
    gets an attribute `unscorable`, which tells this of a ground truth without a response (see `lint`).
    """

    @functools.lru_cache(maxsize=4096)
    def matchable(truth: Any) -> bool:
        return matches(right(truth), truth)

    def decorated(function: F) -> F:
        @functools.wraps(function)
        def scorer(response: str, ground_truth: Any, *args: Any, **options: Any) -> Score:
            truth = read(ground_truth)
            if truth is None or not matchable(truth):
                return no_truth(ground_truth)
            return function(response, truth, *args, **options)

        def unscorable(ground_truth: Any, **_: Any) -> str:
            truth = read(ground_truth)
            return no_truth(ground_truth).why if truth is None or not matchable(truth) else ""

        scorer.unscorable = unscorable  # type: ignore[attr-defined]
        scorer.reads_answers = True  # type: ignore[attr-defined]
        return bounded(scorer)  # type: ignore[return-value]

    return decorated


class Unreadable(str):
    """A reason why a row can never be scored: something in the row is written wrong. `lint` raises for such rows, with
    their numbers."""


def lint(calls: Iterable[Any], unscorable: Callable[..., str], name: str) -> str:
    """Count the rows that a scorer can never score, whatever the response is; return "" or a sentence, for the check
    before a run.

    `calls` has the scorer's arguments for each row, and `unscorable(**arguments)` returns why a row cannot be scored,
    or "". Raises `DataError` if no row can be scored, and for rows whose reason is `Unreadable`.
    """
    rows, kinds, first, wrong = 0, Counter[str](), "", list[str]()
    for rows, arguments in enumerate(calls, 1):
        why = unscorable(**arguments)
        if why:
            truth = arguments.get("ground_truth")
            kinds["empty" if isinstance(truth, str) and not truth.strip() else type(truth).__name__] += 1
            first = first or f"row {rows - 1}: {why}"
            wrong += [f"row {rows - 1}: {why}"] if isinstance(why, Unreadable) else []
    if wrong:
        found = "; ".join(wrong[:5]) + (f"; and {len(wrong) - 5:,} more" if len(wrong) > 5 else "")
        what, do = f"{len(wrong):,} of {rows:,} rows cannot be read by {name}", "correct these rows, or leave them out"
        raise DataError(what, found=found, do=do)
    bad = kinds.total()
    if not bad:
        return ""
    are = ", ".join(f"{count:,} {_KINDS.get(kind, kind)}" for kind, count in kinds.most_common(4))
    if bad == rows:
        do = "write them in the scorer's form, or pass the reward that fits these rows"
        raise DataError(f"0 of {rows:,} truths can ever score 1 by {name}", found=f"{are}; {first}", do=do)
    return f"{rows - bad:,} of {rows:,} truths can score 1 by {name}; not {are}; {first}"


def unscorable_of(scorer: Any) -> Callable[..., str] | None:
    """Return the attribute `unscorable` of a scorer, or of the function inside a `functools.partial`; None where it has
    none."""
    return getattr(scorer.func if isinstance(scorer, functools.partial) else scorer, "unscorable", None)
