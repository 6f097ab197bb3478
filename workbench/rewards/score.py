"""A score is a record: the number, its parts, what was extracted, why, and whether it is a judgement at all."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, TypeVar

from workbench.dataproto.io import register_codec
from workbench.errors import RewardError, message

F = TypeVar("F", bound=Callable[..., Any])


def bounded(function: F) -> F:
    """Marks a scorer whose time is bounded by its own limits: `as_reward` runs it in this process."""
    function.in_process = True  # type: ignore[attr-defined]
    return function


class Status(StrEnum):
    """What a score says about its row."""

    SCORED = "scored"
    """The response was judged; its value is the judgement."""
    MODEL_FAILED = "model failed"
    """Judged, and found wanting: nothing to parse, code that crashed, over its time. 0.0 is meant."""
    MACHINERY_FAILED = "machinery failed"
    """We could not judge: the function raised, hung or lost its worker. Never a 0."""
    NOT_APPLICABLE = "not applicable"
    """The function said that it does not judge this row (None)."""


@dataclass(frozen=True, repr=False, kw_only=True)
class Score:
    """One row's reward. Raises `RewardError` for a value that is NaN or infinite."""

    value: float = 0.0
    """The reward; meaningful where `scored`."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Named components, each a column `reward/<part>`."""
    answer: str | None = None
    """What was extracted from the response."""
    why: str = ""
    """One sentence."""
    status: Status = Status.SCORED
    """Judgement or not."""
    error: str | None = None
    """Traceback of what failed."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Whatever else a function returned."""
    seconds: float = 0.0
    """Wall time of the judgement."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise RewardError(
                message("a reward", expected="a finite number, or None for 'not applicable'", found=self.value)
            )

    @property
    def scored(self) -> bool:
        """Whether it is a judgement: it counts in means, groups and losses."""
        return self.status in (Status.SCORED, Status.MODEL_FAILED)

    def timed(self, seconds: float) -> Score:
        """The same with its wall time."""
        return replace(self, seconds=seconds)

    def with_value(self, value: float, **parts: float) -> Score:
        """The same judgement with another value, and further parts."""
        return replace(self, value=value, parts={**self.parts, **parts})

    def with_extra(self, extra: Mapping[str, Any]) -> Score:
        """The same judgement with more to look at."""
        return replace(self, extra={**self.extra, **extra})

    def to_json(self) -> dict[str, Any]:
        """Plain values, for disk."""
        return {
            "value": self.value,
            "parts": dict(self.parts),
            "answer": self.answer,
            "why": self.why,
            "status": self.status.value,
            "error": self.error,
            "extra": dict(self.extra),
            "seconds": self.seconds,
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Score:
        """The reverse of `to_json`, of a file that may come from anybody: every part is of its kind, or it raises."""
        texts = {name: str(record[name]) for name in ("answer", "why", "error") if record.get(name) is not None}
        return cls(
            **{**record, **texts, "status": Status(record["status"])}
            | {"parts": {str(name): _real(value) for name, value in record["parts"].items()}}
            | {"extra": dict(record["extra"]), "seconds": _real(record["seconds"])}
        )

    def __str__(self) -> str:
        if not self.scored:
            return f"no judgement ({self.status.value}): {self.why}"
        answer = f", answer {self.answer!r}" if self.answer is not None else ""
        return f"{self.value:g}{answer}: {self.why}" if self.why else f"{self.value:g}{answer}"

    def __repr__(self) -> str:
        from workbench.views.judgements import score_text

        return score_text(self)

    def _repr_html_(self) -> str:
        from workbench.views.judgements import score_html

        return score_html(self)


register_codec("Score", Score, Score.to_json, Score.from_json)


def _real(value: Any) -> Any:
    return value if isinstance(value, numbers.Real) else float(value)


class Missing:
    """Stands in a column of extras for a row whose function did not return that key. There is one, `MISSING`."""

    _one: Missing | None = None

    def __new__(cls) -> Missing:
        """The one there is."""
        if cls._one is None:
            cls._one = super().__new__(cls)
        return cls._one

    def __reduce__(self) -> Any:
        return (Missing, ())

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return "MISSING"


MISSING = Missing()
register_codec("Missing", Missing, lambda _: None, lambda _: MISSING)


def extra_columns(scores: Sequence[Score]) -> dict[str, list[Any]]:
    """`reward_extra/<key>` → one value a row: the union of all rows' keys, `MISSING` where a row has none."""
    names = dict.fromkeys(name for score in scores for name in score.extra)
    return {f"reward_extra/{name}": [score.extra.get(name, MISSING) for score in scores] for name in names}


def no_truth() -> Score:
    """A row without a ground truth; the text `None` must not be one."""
    return Score(status=Status.NOT_APPLICABLE, why="the row has no ground truth")


def failed(why: str, error: str | None = None, seconds: float = 0.0) -> Score:
    """A row that our side could not judge."""
    return Score(status=Status.MACHINERY_FAILED, why=why, error=error, seconds=seconds)
