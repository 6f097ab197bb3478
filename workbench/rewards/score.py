"""`Score`: one row's reward as a record: value, parts, extracted answer, reason, and whether the row was scored at all."""

from __future__ import annotations

import functools
import inspect
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum
from typing import Any, TypeVar

from workbench.base.config import check_nesting
from workbench.base.errors import RewardError, describe
from workbench.base.shown import Shown, encodable, plain
from workbench.dataproto.io import register_codec

F = TypeVar("F", bound=Callable[..., Any])


def bounded(function: F) -> F:
    """Decorator: marks a scorer whose run time is bounded, so that `as_reward` runs it in this process.

    A scorer that another function returns (`shaping.repetition`, say) gets that function's name. A response that is no
    text is refused with `RewardError`.
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
"""Rewards are float32: a larger one would be infinite there."""


def finite(value: Any, what: str, do: str | None = None) -> float:
    """A number as float. Raises `RewardError` for what is no number, NaN, or beyond `LARGEST`."""
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except OverflowError:
        number, value = math.nan, "a whole number beyond every float"
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
    """The response has no answer to extract. It counts as scored, mostly with 0."""
    CRASHED = "crashed"
    """The response's code failed. It counts as scored."""
    TIMEOUT = "timeout"
    """The response's code ran over its time limit. It counts as scored."""
    INFRA_ERROR = "infra_error"
    """The row could not be scored: the function raised, hung or lost its worker. Never counted as 0."""
    COUNTED = "counted"
    """The row could not be scored and counts as x, by the policy `on_failure="value=x"`; `why` has the failure."""
    NOT_APPLICABLE = "not_applicable"
    """The function returned None: it does not score this row."""

    @property
    def failed_by_model(self) -> bool:
        """Whether the response itself failed: no answer, a crash or a timeout of its code."""
        return self in (Status.NO_ANSWER, Status.CRASHED, Status.TIMEOUT)


@dataclass(frozen=True, repr=False, kw_only=True)
class Score(Shown):
    """One row's reward: value, parts, reason and status. Raises `RewardError` for a value that is no number, NaN, or infinite in
    float32, which rewards are."""

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
    """Whatever else a function returned."""
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
        """Whether the row waits for a setting that its user left open (`left_open`). A response can bring such a row about, so
        the policies that pass over failures do not pass over it: the first one of a run stops it, and the setting answers
        the question for all. `value=x` is an answer, too."""
        return (self.error or "").startswith(_LEFT_OPEN)

    def timed(self, seconds: float) -> Score:
        """A copy with this wall time of scoring."""
        return replace(self, seconds=seconds)

    def with_value(self, value: float, **parts: float) -> Score:
        """A copy with this value, and with these parts added."""
        return replace(self, value=value, parts={**self.parts, **parts})

    def with_extra(self, extra: Mapping[str, Any]) -> Score:
        """A copy with these extras added."""
        return replace(self, extra={**self.extra, **extra})

    def to_json(self) -> dict[str, Any]:
        """The score as a dict of plain values, to be saved."""
        return {**vars(self), "parts": dict(self.parts), "extra": dict(self.extra), "status": self.status.value}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Score:
        """The score of a dict that `to_json` made. Raises where a field is missing or of another type."""
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
    """Marks, in a column of extras, a row whose function did not return that key. Its one value is `MISSING`."""

    MISSING = "MISSING"

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return "MISSING"

    __str__ = __repr__


MISSING = Missing.MISSING
register_codec("Missing", Missing, lambda _: None, lambda _: MISSING)


def extra_columns(scores: Sequence[Score]) -> dict[str, list[Any]]:
    """The extras of scores as columns `reward_extra/<key>`, one value per row: `MISSING` where a row lacks the key."""
    names = dict.fromkeys(name for score in scores for name in score.extra)
    return {f"reward_extra/{name}": [score.extra.get(name, MISSING) for score in scores] for name in names}


def compared(right: bool, answer: str, ground_truth: Any, what: str = "the answer") -> Score:
    """The score of an extracted answer: 1 where it is right, else 0, with the reason; long texts are cut."""
    why = f"{what} is right" if right else f"expected {str(ground_truth)[:100]}"
    return Score(value=float(right), answer=answer[:200], why=why)


def no_answer(why: str, value: float = 0.0) -> Score:
    """The score of a response without an answer to extract: *no_answer*."""
    return Score(value=value, status=Status.NO_ANSWER, why=why)


def failed(why: str, error: str | None = None, seconds: float = 0.0) -> Score:
    """The score of a row that could not be scored: *infra_error*."""
    return Score(status=Status.INFRA_ERROR, why=why, error=error, seconds=seconds)


_LEFT_OPEN = "left open: "


def left_open(why: str, settings: str) -> Score:
    """The score of a row that cannot be judged before its user has chosen among `settings`: *infra_error*, `undecided`."""
    return failed(f"{why}; choose {settings}", f"{_LEFT_OPEN}choose {settings}")
