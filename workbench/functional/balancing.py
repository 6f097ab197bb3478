"""Sharing rows out by length: equal loads for ranks, and resampling by score. Plain Python over lengths, no tensors moved."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor


def workload(length: float) -> float:
    """Compute the cost of a row of L tokens by verl's formula 24576·L + L²: linear layers, and attention."""
    return 24_576 * length + length * length


def balanced_groups(
    loads: Sequence[float], groups: Sequence[Hashable], parts: int, *, equal_size: bool = False
) -> list[list[int]]:
    """Split rows into `parts` lists with nearly equal loads, as `balanced` does, but keep the rows of a group in one
    list.

    `groups` has a value for each row, such as its uid. With `equal_size` all lists have the same number of groups.
    Raises `ValueError` for fewer groups than parts, or where `equal_size` does not divide them evenly.
    """
    members: dict[Hashable, list[int]] = {}
    for row, (_, group) in enumerate(zip(loads, groups, strict=True)):
        members.setdefault(group, []).append(row)
    units = [*members.values()]
    shares = balanced([sum(loads[row] for row in rows) for rows in units], parts, equal_size=equal_size)
    return [sorted(row for unit in share for row in units[unit]) for share in shares]


def balanced(loads: Sequence[float], parts: int, *, equal_size: bool = False) -> list[list[int]]:
    """Split rows into `parts` lists of row numbers with nearly equal loads.

    It uses the largest differencing method (Karmarkar and Karp 1982). Each row is in one list; lists are ascending.
    `equal_size` gives all lists the same length. Raises `ValueError` for fewer rows than parts, or where `equal_size`
    does not divide them evenly.
    """
    if not 1 <= parts <= len(loads):
        raise ValueError(f"{len(loads)} rows cannot be shared out to {parts} parts: each part needs a row")
    if equal_size and len(loads) % parts:
        raise ValueError(f"{len(loads)} rows do not divide into {parts} equal parts")
    order = sorted(range(len(loads)), key=lambda row: -loads[row])
    step = parts if equal_size else 1
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for number in range(0, len(order), step):
        chunk = order[number : number + step]
        start = [(float(loads[row]), [row]) for row in chunk] + [(0.0, []) for _ in range(parts - len(chunk))]
        heapq.heappush(heap, _state(start, number))
    while len(heap) > 1:
        (_, _, one), (_, tie, two) = heapq.heappop(heap), heapq.heappop(heap)
        # the heaviest of one meets the lightest of the other
        merged = [(a + b, rows + more) for (a, rows), (b, more) in zip(one, reversed(two), strict=True)]
        heapq.heappush(heap, _state(merged, tie))
    return [sorted(rows) for _, rows in sorted(heap[0][2], key=lambda part: min(part[1], default=0))]


def _state(parts: list[tuple[float, list[int]]], tie: int) -> tuple[float, int, list[tuple[float, list[int]]]]:
    """Make a heap entry of a partition: (− difference of the largest and the smallest load, tie-breaker, parts from
    heavy to light).
    """
    ranked = sorted(parts, key=lambda part: -part[0])
    return (ranked[-1][0] - ranked[0][0], tie, ranked)


def resampled(
    scores: Tensor, *, method: str = "pow", weight_pow: float = 2.0, generator: torch.Generator | None = None
) -> Tensor:
    """Sample row numbers with replacement, weighted by score (PF-PPO): scores [B] → [B] int64.

    Weights: |score|^weight_pow (`pow`); 1 for the best and the worst score, else 0 (`max_min`); 0.4 for the best, else 0.1
    (`max_random`). If all are 0, rows are sampled uniformly. Shen et al. 2024, https://arxiv.org/abs/2409.06957.
    """
    if method == "pow":
        weights = scores.double().abs() ** weight_pow
    elif method == "max_min":
        weights = ((scores == scores.max()) | (scores == scores.min())).double()
    elif method == "max_random":
        weights = torch.where(scores == scores.max(), 0.4, 0.1).double()
    else:
        raise ValueError(f"resampling method {method!r}; expected pow, max_min or max_random")
    if float(weights.sum()) == 0:
        weights = torch.ones_like(weights)
    return torch.multinomial(weights, len(scores), replacement=True, generator=generator)
