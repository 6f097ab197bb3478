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


def expected_best(values: Tensor, n: int, *, worst: bool = False) -> float:
    """Expected maximum (or minimum) of n draws with replacement from the values [N]: exact, where verl draws 1000 times.

    Σ_i v_(i)·((i/N)ⁿ − ((i − 1)/N)ⁿ) over the sorted values.
    """
    ranked = values.double().sort(descending=worst).values
    shares = (torch.arange(len(ranked) + 1, dtype=torch.float64) / len(ranked)) ** n
    return float((ranked * shares.diff()).sum())


def majority(answers: Sequence[Any], values: Tensor, n: int, *, draws: int = 1000, seed: int = 42) -> float:
    """Mean value of the most frequent answer among n draws with replacement; None (no answer) votes for nobody.

    A tie goes to the answer that came first in the draw, as in verl; draws without any answer are worth 0.
    """
    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(0, len(answers), (draws, n), generator=generator).tolist()
    total = 0.0
    for pick in picks:
        votes = Counter(answers[one] for one in pick if answers[one] is not None)
        if votes:
            winner = votes.most_common(1)[0][0]
            total += float(values[next(one for one in pick if answers[one] == winner)])
    return total / draws


def sizes(samples: int) -> list[int]:
    """The n for which best@n is reported: 2, 4, 8, … below `samples`, and `samples` itself; [] for one sample."""
    powers = [2**power for power in range(1, samples.bit_length()) if 2**power < samples]
    return [*powers, samples] if samples > 1 else []
