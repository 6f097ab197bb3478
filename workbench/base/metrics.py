"""Metrics as values that know how they are joined: Mean, Max, Min, Sum, Count; `reduce` joins dicts of them.

A stage, a micro-batch or a rank returns a dict of metrics. Joining is associative and means carry their weight, so that
cutting a batch differently cannot change a number. A loss may give tensors of one number as the numbers of its metrics: learners
read those of all micro-batches at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import add
from typing import Any, ClassVar, Self

from workbench.base.errors import SettingError


@dataclass(frozen=True)
class Mean:
    """A weighted mean: `total` is Σ weight·value; with a weight of 0 the result is NaN."""

    total: float
    weight: float = 1.0

    @classmethod
    def of(cls, value: float, weight: float = 1.0) -> Mean:
        """Make a `Mean` of one value with this weight."""
        return cls(value * weight if weight else 0.0, weight)

    def join(self, other: Mean) -> Mean:
        """Return the mean of both, each by its weight."""
        return Mean(self.total + other.total, self.weight + other.weight)

    def result(self) -> float:
        """Return the mean Σ weight·value / Σ weight; NaN where the weights sum to 0."""
        return float(self.total / self.weight) if self.weight else float("nan")


@dataclass(frozen=True)
class _Number:
    """Base of metrics that hold a plain number; `_both` computes the joined value of two."""

    value: float
    _both: ClassVar[Callable[..., float]]

    def join(self, other: Self) -> Self:
        """Join this metric with another one of its class; for `Max` the result is the larger."""
        return type(self)(self._both(self.value, other.value))

    def result(self) -> float:
        """Return the plain number as a float."""
        return float(self.value)


class Max(_Number):
    """The largest of the values that are joined."""

    _both: ClassVar[Callable[..., float]] = max


class Min(_Number):
    """The smallest of the values that are joined."""

    _both: ClassVar[Callable[..., float]] = min


class Sum(_Number):
    """The sum of the values that are joined."""

    _both: ClassVar[Callable[..., float]] = add


@dataclass(frozen=True)
class Count(Sum):
    """A number of things: a sum of whole numbers, each 1 by default."""

    value: int = 1


Metric = Mean | _Number
"""A number that can be joined with others of its kind."""


def join(groups: Iterable[Mapping[str, Metric | float]]) -> dict[str, Metric]:
    """Join dicts of metrics into one, key by key; a plain number counts as a `Mean` of weight one.

    Raises `SettingError` where one key has metrics of two kinds.
    """
    joined: dict[str, Metric] = {}
    for group in groups:
        for key, value in group.items():
            metric: Any = value if isinstance(value, Metric) else Mean(float(value))
            before = joined.get(key)
            if before is not None and type(before) is not type(metric):
                kinds, do = f"{type(before).__name__} and {type(metric).__name__}", "use one kind for it everywhere"
                raise SettingError(f"metric {key!r} comes in two kinds", found=kinds, do=do)
            joined[key] = metric if before is None else before.join(metric)
    return joined


def reduce(groups: Iterable[Mapping[str, Metric | float]]) -> dict[str, float]:
    """Join dicts of metrics (of stages, micro-batches or ranks) into one dict of plain floats.

    >>> reduce([{"a": Mean.of(1.0, 3)}, {"a": Mean.of(5.0, 1)}])
    {'a': 2.0}
    """
    return {key: metric.result() for key, metric in join(groups).items()}
