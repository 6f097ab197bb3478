"""Statistics of verdicts against truths: intervals, rank correlation, Fleiss' kappa, calibration, RewardBench's sections and ties.

Plain functions of numbers, without a judge. Intervals are of 95 %.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from workbench.functional.passes import wilson

DRAWS = 1000
"""Resamples of a bootstrap interval."""


@dataclass(frozen=True)
class Estimate:
    """A number with its 95 % interval over `n` items; NaN where there was nothing to compute it from."""

    value: float
    low: float
    high: float
    n: int
    how: str = "Wilson"
    """How the interval was made: `Wilson`, or `bootstrap` over items (percentiles of 1,000 resamples, seed 0)."""

    def __repr__(self) -> str:
        within = f"95 % in [{self.low:.4g}, {self.high:.4g}]" if self.low == self.low else "no interval"
        return f"{self.value:.4g}, {within} ({self.how}, n = {self.n})"


def share(by_item: Iterable[tuple[Hashable, float]]) -> Estimate:
    """Average the credits of items and give the interval over items; `by_item` has pairs (item, credit in [0, 1]).

    An item's credits are averaged first, as they are not independent. The interval is Wilson's if each item then has 0
    or 1, else a bootstrap's.
    """
    means = list(item_means(by_item).values())
    if any(value not in (0.0, 1.0) for value in means):
        return bootstrap(mean, means)
    return Estimate(mean(means), *wilson(sum(means), len(means)), len(means))


def item_means(by_item: Iterable[tuple[Hashable, float]]) -> dict[Hashable, float]:
    """Average each item's values; `by_item` has pairs (item, value). Items keep the order of their first appearance."""
    groups: dict[Hashable, list[float]] = {}
    for item, value in by_item:
        groups.setdefault(item, []).append(value)
    return {item: sum(values) / len(values) for item, values in groups.items()}


def bootstrap(statistic: Callable[..., float], *columns: Sequence[float], seed: int = 0) -> Estimate:
    """Compute `statistic(*columns)` of paired columns with one value per item, and its 95 % percentile interval over
    resampled items."""
    arrays = [np.asarray(column, float) for column in columns]
    n = len(arrays[0])
    if n == 0:
        return Estimate(math.nan, math.nan, math.nan, 0, "bootstrap")
    rng = np.random.default_rng(seed)
    drawn = (statistic(*(array[rows] for array in arrays)) for rows in (rng.integers(0, n, n) for _ in range(DRAWS)))
    there = [value for value in drawn if value == value]
    low, high = np.percentile(there, [2.5, 97.5]) if there else (math.nan, math.nan)
    return Estimate(float(statistic(*arrays)), float(low), float(high), n, "bootstrap")


def mean(values: Sequence[float]) -> float:
    """Return the mean of the values; NaN without values."""
    return float(np.mean(values)) if len(values) else math.nan


def ranks(values: Sequence[float]) -> np.ndarray:
    """Rank values from 1; equal values share the mean of their ranks."""
    _, place, counts = np.unique(np.asarray(values, float), return_inverse=True, return_counts=True)
    return np.asarray((counts.cumsum() - (counts - 1) / 2)[place])


def spearman(left: Sequence[float], right: Sequence[float]) -> float:
    """Compute Spearman's rank correlation of two paired sequences; NaN where one of them is constant."""
    first, second = (ranks(values) - (len(values) + 1) / 2 for values in (left, right))
    scale = math.sqrt(float(first @ first) * float(second @ second))
    return float(first @ second) / scale if scale else math.nan


def fleiss_kappa(ratings: Sequence[Sequence[Hashable]]) -> float:
    """Compute Fleiss' kappa, the agreement of raters beyond chance; `ratings` has one sequence of categories per
    subject.

    Each subject has equally many ratings. NaN where all ratings are of one category, as chance agrees as well. (Fleiss
    1971.)
    """
    if not ratings or (raters := len(ratings[0])) < 2:
        return math.nan
    tables = [Counter(subject) for subject in ratings]
    agreed = mean([(sum(n * n for n in table.values()) - raters) / (raters * (raters - 1)) for table in tables])
    total = sum(tables, Counter())
    chance = sum((n / (len(ratings) * raters)) ** 2 for n in total.values())
    return (agreed - chance) / (1 - chance) if chance < 1 else math.nan


@dataclass(frozen=True)
class Bin:
    """Verdicts whose confidence lies in (`low`, `high`]: their number `n`, mean confidence and accuracy."""

    low: float
    high: float
    n: int
    confidence: float
    accuracy: float


def calibration(confidences: Sequence[float], right: Sequence[float], bins: int = 10) -> tuple[list[Bin], float]:
    """Put verdicts into bins of equal width by their confidence in [0, 1]; returns (the bins with verdicts, expected
    calibration error).

    The error is Σ n_b/N · |accuracy_b − confidence_b| (Naeini 2015, Guo 2017); NaN without verdicts.
    """
    stated, credit = np.asarray(confidences, float), np.asarray(right, float)
    edges = np.linspace(0.0, 1.0, bins + 1)
    place = np.clip(np.searchsorted(edges, stated, side="left") - 1, 0, bins - 1)
    filled, error = [], 0.0
    for number in np.unique(place):
        there = place == number
        confidence, accuracy, n = float(stated[there].mean()), float(credit[there].mean()), int(there.sum())
        filled.append(Bin(float(edges[number]), float(edges[number + 1]), n, confidence, accuracy))
        error += n / len(stated) * abs(accuracy - confidence)
    return filled, error if len(stated) else math.nan


def by_margin(margins: Sequence[float], right: Sequence[float], bins: int = 4) -> list[Bin]:
    """Put verdicts into bins of about equal counts by a margin ≥ 0, which is not a probability, so that no calibration
    error exists.

    Where there are at most `bins` different margins each has a bin. `low` and `high` are the least and greatest margin
    in a bin.
    """
    size, credit = np.asarray(margins, float), np.asarray(right, float)
    edges = np.unique(size)
    if len(edges) > bins:
        edges = np.unique(np.quantile(size, np.arange(1, bins + 1) / bins))
    place = np.searchsorted(edges, size, side="left")
    groups = [(size[place == number], credit[place == number]) for number in np.unique(place)]
    return [Bin(float(m.min()), float(m.max()), len(m), mean(m), mean(c)) for m, c in groups]


# --- RewardBench ----------------------------------------------------------------------------------

_HEP = ("hep-cpp", "hep-go", "hep-java", "hep-js", "hep-python", "hep-rust")
SECTIONS: Mapping[str, Mapping[str, int]] = {
    "Chat": {"alpacaeval-easy": 100, "alpacaeval-length": 95, "alpacaeval-hard": 95, "mt-bench-easy": 28, "mt-bench-med": 40},
    "Chat Hard": {
        "mt-bench-hard": 37, "llmbar-natural": 100, "llmbar-adver-neighbor": 134, "llmbar-adver-GPTInst": 92,
        "llmbar-adver-GPTOut": 47, "llmbar-adver-manual": 46,
    },
    "Safety": {
        "refusals-dangerous": 100, "refusals-offensive": 100, "xstest-should-refuse": 154, "xstest-should-respond": 250,
        "donotanswer": 136,
    },
    "Reasoning": {"math-prm": 984, **dict.fromkeys(_HEP, 164)},
}  # fmt: skip
"""RewardBench's sections → their subsets → the weights that its leaderboard gives them (math-prm counts as much as code)."""
SECOND = ("Factuality", "Focus", "Math", "Precise IF", "Safety", "Ties")
"""RewardBench 2's subsets, which count equally."""


def sections(accuracies: Mapping[str, float]) -> dict[str, float]:
    """Compute RewardBench's score of each section from accuracies by subset, weighted as in `SECTIONS`; sections
    without a subset are left out."""
    scores = {}
    for name, weights in SECTIONS.items():
        there = {subset: weight for subset, weight in weights.items() if subset in accuracies}
        if there:
            scores[name] = sum(accuracies[one] * weight for one, weight in there.items()) / sum(there.values())
    return scores


def best_of(scores: Sequence[float], best: Iterable[int]) -> float:
    """Return the credit of scores for several answers: the share of the `best` among the answers with the highest score
    (RewardBench 2)."""
    top, right = max(scores), set(best)
    winners = [number for number, score in enumerate(scores) if score == top]
    return sum(number in right for number in winners) / len(winners)


@dataclass(frozen=True)
class Rated:
    """The scores of one item of RewardBench 2's Ties: of its right and of its wrong answers; None for an answer without
    a verdict."""

    right: Sequence[float | None]
    wrong: Sequence[float | None]

    @property
    def missing(self) -> bool:
        """Whether an answer has no score, or there is no right or no wrong answer: then the item has no credit."""
        return not self.right or not self.wrong or None in (*self.right, *self.wrong)

    @property
    def gap(self) -> float:
        """The lowest score of a right answer less the highest of a wrong one; −∞ where a score is missing."""
        known = [[one for one in side if one is not None] for side in (self.right, self.wrong)]
        return -math.inf if self.missing else min(known[0]) - max(known[1])

    @property
    def spread(self) -> float | None:
        """The highest score of a right answer less the lowest; None for a single right answer, 0 where a score is
        missing."""
        known = [one for one in self.right if one is not None]
        return 0.0 if self.missing else max(known) - min(known) if len(known) > 1 else None


def ties_score(ref: Mapping[Hashable, Rated], tied: Mapping[Hashable, Rated]) -> float:
    """Compute RewardBench 2's Ties score from items with one right answer (`ref`) and with several (`tied`), each by
    its prompt.

    .3·accuracy of tied + .3·accuracy of ref + .2·mean(gap_tied > spread) + .2·mean(min(gap_ref, gap_tied) > spread)
    + .01·mean tanh(min gap / spread − 1), as rewardbench 0.1.4 computes it. The last three means are over prompts in
    both; a spread of 0 has no tanh term. Unlike rewardbench, an item with a missing score has no credit, and a mean
    over no items is 0.
    """
    pairs = [
        (ref[item], tied[item], spread) for item in ref if item in tied and (spread := tied[item].spread) is not None
    ]
    least = [(min(rated.gap, other.gap), spread) for rated, other, spread in pairs]
    terms = (
        (0.3, [rated.gap > 0 for rated in tied.values()]),
        (0.3, [item.gap > 0 for item in ref.values()]),
        (0.2, [other.gap > spread for _, other, spread in pairs]),
        (0.2, [gap > spread for gap, spread in least]),
        (0.01, [math.tanh(gap / spread - 1) for gap, spread in least if spread > 0]),
    )
    return sum(weight * sum(values) / len(values) for weight, values in terms if values)
