"""Several samples of a prompt as one number: best, worst and majority of n, and the unbiased pass@k."""

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
    found = torch.zeros(draws, dtype=torch.float64)
    for draw, pick in enumerate(picks):
        votes = Counter(answers[one] for one in pick if answers[one] is not None)
        if votes:
            winner = votes.most_common(1)[0][0]
            found[draw] = float(values[next(one for one in pick if answers[one] == winner)])
    return float(found.mean()), float(found.std(correction=0))


def sizes(samples: int) -> list[int]:
    """The n for which best@n is reported: 2, 4, 8, … below `samples`, and `samples` itself; [] for one sample."""
    powers = [2**power for power in range(1, samples.bit_length()) if 2**power < samples]
    return [*powers, samples] if samples > 1 else []
