"""Metrics as values that know how they are joined: Mean, Max, Min, Sum, Count, and one reduction.

A stage, a micro-batch or a rank returns a dict of them; `reduce` joins any number of such
dicts into plain floats. Joining is associative, so that cutting a batch differently cannot
change a number (means carry their weight).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, Self, runtime_checkable

from workbench.errors import SettingError, message


@runtime_checkable
class Metric(Protocol):
    """A number that can be joined with others of its kind."""

    def join(self, other: Self) -> Self:
        """Both together."""

    def result(self) -> float:
        """The plain number."""


@dataclass(frozen=True)
class Mean:
    """A weighted mean: `total` is Σ weight·value; 0 weight gives NaN."""

    total: float
    weight: float = 1.0

    @classmethod
    def of(cls, value: float, weight: float = 1.0) -> Mean:
        """The mean `value` of something that counts `weight` times."""
        return cls(value * weight if weight else 0.0, weight)

    def join(self, other: Mean) -> Mean:
        """Both together."""
        return Mean(self.total + other.total, self.weight + other.weight)

    def result(self) -> float:
        """Σ weight·value / Σ weight."""
        return self.total / self.weight if self.weight else float("nan")


@dataclass(frozen=True)
class Max:
    """The largest."""

    value: float

    def join(self, other: Max) -> Max:
        """Both together."""
        return Max(max(self.value, other.value))

    def result(self) -> float:
        """The largest value."""
        return self.value


@dataclass(frozen=True)
class Min:
    """The smallest."""

    value: float

    def join(self, other: Min) -> Min:
        """Both together."""
        return Min(min(self.value, other.value))

    def result(self) -> float:
        """The smallest value."""
        return self.value


@dataclass(frozen=True)
class Sum:
    """A total."""

    value: float

    def join(self, other: Sum) -> Sum:
        """Both together."""
        return Sum(self.value + other.value)

    def result(self) -> float:
        """The total."""
        return self.value


@dataclass(frozen=True)
class Count:
    """How many."""

    value: int = 1

    def join(self, other: Count) -> Count:
        """Both together."""
        return Count(self.value + other.value)

    def result(self) -> float:
        """The number, as a float like every other metric."""
        return float(self.value)


def as_metric(value: Metric | float) -> Metric:
    """A plain number counts as a mean of weight one."""
    return value if isinstance(value, Metric) else Mean(float(value))


def join(groups: Iterable[Mapping[str, Metric | float]]) -> dict[str, Metric]:
    """Dicts of metrics into one dict of metrics, key by key."""
    joined: dict[str, Metric] = {}
    for group in groups:
        for key, value in group.items():
            metric = as_metric(value)
            if key not in joined:
                joined[key] = metric
                continue
            if type(joined[key]) is not type(metric):
                kinds = (type(joined[key]).__name__, type(metric).__name__)
                raise SettingError(message(f"metric {key!r} comes in two kinds", found=" and ".join(kinds)))
            joined[key] = joined[key].join(metric)
    return joined


def reduce(groups: Iterable[Mapping[str, Metric | float]]) -> dict[str, float]:
    """Dicts of metrics into one dict of plain floats: the one reduction.

    >>> reduce([{"a": Mean.of(1.0, 3)}, {"a": Mean.of(5.0, 1)}])
    {'a': 2.0}
    """
    return {key: metric.result() for key, metric in join(groups).items()}
