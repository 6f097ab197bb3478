"""Several samples of a prompt as one number: best, worst and majority of n, the unbiased pass@k; and 95 % intervals of means."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def pass_at_k(correct: int, samples: int, k: int) -> float:
    """Unbiased pass@k, 1 − C(n − c, k) / C(n, k): the chance that any of k samples is correct, given c correct of n.

    Raises `ValueError` where k is not between 1 and n. Chen et al. 2021, https://arxiv.org/abs/2107.03374, eq. 1.
    """
    if not 1 <= k <= samples or not 0 <= correct <= samples:
        raise ValueError(f"pass@{k} of {samples} samples, {correct} of them correct; expected k from 1 to {samples}")
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def best_of(values: Tensor, n: int, *, worst: bool = False) -> tuple[float, float]:
    """Mean and standard deviation of the maximum (or minimum) of n draws with replacement from the values [N].

    Exact, where verl draws 1000 times: the i-th of the sorted values is the maximum with probability
    (i/N)ⁿ − ((i − 1)/N)ⁿ.
    """
    ranked = values.double().sort(descending=worst).values
    shares = ((torch.arange(len(ranked) + 1, dtype=torch.float64) / len(ranked)) ** n).diff()
    mean = (ranked * shares).sum()
    return float(mean), float(((ranked - mean).square() * shares).sum().sqrt())


def majority(
    answers: Sequence[Any], values: Tensor, n: int, *, draws: int = 1000, seed: int = 42
) -> tuple[float, float]:
    """Mean and standard deviation of the value of the most frequent answer among n draws with replacement.

    None (no answer) votes for nobody; draws without any answer are worth 0. A tie goes to the answer that came first in the
    draw, as in verl.
    """
    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(0, len(answers), (draws, n), generator=generator).tolist()
    winning = torch.zeros(draws, dtype=torch.float64)
    for draw, pick in enumerate(picks):
        votes = Counter(answers[place] for place in pick if answers[place] is not None)
        if votes:
            winner = votes.most_common(1)[0][0]
            winning[draw] = float(values[next(place for place in pick if answers[place] == winner)])
    return float(winning.mean()), float(winning.std(correction=0))


def sizes(samples: int) -> list[int]:
    """The n for which best@n is reported: 2, 4, 8, … below `samples`, and `samples` itself; [] for one sample."""
    powers = [2**power for power in range(1, samples.bit_length()) if 2**power < samples]
    return [*powers, samples] if samples > 1 else []


Z = 1.959963984540054
"""Standard deviations of a two-sided 95 % interval."""


def t95(freedom: int) -> float:
    """Return t such that a Student variable with so many degrees of freedom is within ±t with probability 0.95."""
    if freedom > 1000:  # of the expansion in 1/freedom the next term is below 1e-5
        return Z + (Z**3 + Z) / (4 * freedom)
    low, high = 0.0, 64.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < 0.95 else (low, middle)
    return high


def _within(t: float, freedom: int) -> float:
    """Compute P(|T| ≤ t) of a Student variable, by the finite sum that exists for whole degrees of freedom."""
    angle = math.atan(t / math.sqrt(freedom))
    odd = freedom % 2
    term, total = (math.cos(angle) if odd else 1.0), 0.0
    for number in range(odd + 1, freedom, 2):  # of each term the exponent of the cosine, plus one
        total += term
        term *= math.cos(angle) ** 2 * number / (number + 1)
    return 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total


def wilson(hits: float, n: float, z: float = Z) -> tuple[float, float]:
    """Wilson's score interval of the share hits/n, z standard deviations wide; (NaN, NaN) for n = 0."""
    if n == 0:
        return math.nan, math.nan
    share, square = hits / n, z * z / n
    centre, half = share + square / 2, z * math.sqrt(max(share * (1 - share), 0.0) / n + square / n / 4)
    return max((centre - half) / (1 + square), 0.0), min((centre + half) / (1 + square), 1.0)


def half_width(values: Sequence[float]) -> float:
    """Return half of the 95 % interval of the mean of values, by Student's t; NaN for fewer than two."""
    number = len(values)
    if number < 2:
        return math.nan
    mean = math.fsum(values) / number
    return t95(number - 1) * math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (number - 1) / number)


def interval_over_prompts(scores: Sequence[Sequence[float]]) -> tuple[float, float]:
    """95 % interval of the mean over prompts of their mean scores; `scores` are each prompt's samples.

    Of scores 0 and 1 it is Wilson's with Student's t, for as many independent samples as would give the means over prompts
    their variance (Korn and Graubard 1998): it has a width where all are equal. Of others it is Student's t over prompts, cut to
    [0, 1] where all scores are in it; (NaN, NaN) where the prompts' means are all equal. (NaN, NaN) for fewer than two prompts.
    """
    means, number = [sum(samples) / len(samples) for samples in scores], len(scores)
    if number < 2:
        return math.nan, math.nan
    mean, t = sum(means) / number, t95(number - 1)
    spread = min(means) < max(means)  # of equal means rounding would leave a little
    squared_error = sum((one - mean) ** 2 for one in means) / (number - 1) / number if spread else 0.0
    every = {value for samples in scores for value in samples}
    if every <= {0.0, 1.0}:
        independent = mean * (1 - mean) / squared_error if squared_error else number
        independent = min(independent, sum(map(len, scores)))
        return wilson(mean * independent, independent, t)
    if not squared_error:
        return math.nan, math.nan
    low, high = mean - t * math.sqrt(squared_error), mean + t * math.sqrt(squared_error)
    return (max(low, 0.0), min(high, 1.0)) if min(every) >= 0 and max(every) <= 1 else (low, high)
