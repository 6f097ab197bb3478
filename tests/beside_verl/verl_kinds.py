"""Random batches by kind, the same on every machine: what a batch may look like when it reaches an estimator or a loss."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

WIDTH = 7


@dataclass
class Batch:
    """A batch as verl gets it; `tokens` [B, T] and `rows` [B] are read as attributes."""

    kind: str
    seed: int
    mask: Tensor
    groups: Tensor
    tokens: dict[str, Tensor]
    rows: dict[str, Tensor]
    ours: Callable[[Batch], Batch] = field(default=lambda batch: batch)
    """What only our side sees: verl cannot read it, or answers NaN."""
    close: float = 1.0
    """How much wider than in float32 two answers may lie apart."""

    def __getattr__(self, name: str) -> Tensor:
        for columns in (self.__dict__.get("tokens", {}), self.__dict__.get("rows", {})):
            if name in columns:
                return columns[name]
        raise AttributeError(name)

    @property
    def scores(self) -> Tensor:
        """[B] the sum of a row's token rewards."""
        return self.rewards.sum(-1)

    @property
    def uid(self) -> Any:
        """Names of the groups, whose order is not their numbers'."""
        return np.array([f"prompt {(7 * int(group)) % 10}" for group in self.groups], dtype=object)

    def leaf(self, name: str = "new") -> Tensor:
        """A column whose gradient is asked for."""
        return getattr(self, name).clone().requires_grad_()


def made(
    kind: str, seed: int, lengths: list[int], sizes: list[int], width: int = WIDTH, far: float = 0.5, **more: Any
) -> Batch:
    """Rows of these lengths in groups of these sizes; old, new, rollout and reference lie at most `far` nats apart."""
    draw = random.Random(f"{kind} {seed}")
    count = len(lengths)

    def tokens(low: float = 0.0, high: float = 1.0) -> Tensor:
        return torch.tensor([[draw.uniform(low, high) for _ in range(width)] for _ in range(count)])

    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    old = tokens(-max(far, 3), 0)
    near = {name: (old + tokens(-far, far)).clamp(max=-1e-3) for name in ("new", "ref", "rollout")}
    rewards = torch.zeros(count, width)
    for row, length in enumerate(lengths):
        rewards[row, max(length - 1, 0)] = round(draw.uniform(-1, 4)) / 4 * bool(length)
    columns = {
        "old": old,
        **near,
        "rewards": rewards,
        "values": tokens(),
        "new_values": tokens(-0.5, 1.5),
        "returns": tokens(-1, 1),
        "squared": old.exp() ** 2 + tokens() * (1 - old.exp()) ** 2,
        "advantages": tokens(-1.5, 1.5),
        "entropy": tokens(0, 3),
        "weights": tokens(0, 2),
    }
    groups = torch.tensor([group for group, size in enumerate(sizes) for _ in range(size)])
    rows = {"baselines": torch.tensor([draw.random() for _ in range(count)]), "more": torch.tensor([draw.random() for _ in range(count)])}  # fmt: skip
    return Batch(kind, seed, mask, groups, columns, rows, **more)


def _lengths(draw: random.Random, count: int = 12, least: int = 1) -> list[int]:
    return [draw.randint(least, WIDTH) for _ in range(count)]


def _ragged(kind: str, seed: int, **more: Any) -> Batch:
    draw = random.Random(f"lengths of {kind} {seed}")
    more = {"sizes": [3, 3, 3, 3], "lengths": _lengths(draw), **more}
    return made(kind, seed, **more)


def _with_rewards(batch: Batch, rewards: Callable[[int], float]) -> Batch:
    """Every row's reward on its last token."""
    placed = torch.zeros_like(batch.rewards)
    for row, length in enumerate(batch.mask.sum(-1).tolist()):
        placed[row, max(length - 1, 0)] = rewards(row) if length else 0.0
    return replace(batch, tokens={**batch.tokens, "rewards": placed})


def _holes(kind: str, seed: int) -> Batch:
    """Tool text between the model's tokens, and after them; the reward is on the model's last token."""
    batch = _ragged(kind, seed)
    draw = random.Random(f"holes {seed}")
    mask = batch.mask.clone()
    for row in mask:
        for place in row.nonzero()[1:, 0].tolist():
            row[place] = draw.random() < 0.6
    scores = batch.scores.tolist()
    placed = torch.zeros_like(batch.rewards)
    for number, row in enumerate(mask):
        placed[number, int(row.nonzero()[-1])] = scores[number]
    return replace(batch, mask=mask, tokens={**batch.tokens, "rewards": placed})


def _empty_rows(kind: str, seed: int) -> Batch:
    draw = random.Random(f"empty {seed}")
    lengths = [0 if draw.random() < 0.3 else draw.randint(1, WIDTH) for _ in range(11)]
    return made(kind, seed, [*lengths, 3], [3, 3, 3, 3])


def _shuffled(kind: str, seed: int) -> Batch:
    batch = _ragged(kind, seed, sizes=[2, 5, 3, 2])
    order = list(range(12))
    random.Random(seed).shuffle(order)
    return replace(batch, groups=batch.groups[order])


def _nan_outside(batch: Batch) -> Batch:
    """What only stands where no token is: padding of another engine, uninitialised memory."""
    outside = batch.mask == 0
    poisoned = {name: column.masked_fill(outside, float("nan")) for name, column in batch.tokens.items()}
    return replace(batch, tokens={**poisoned, "rewards": batch.rewards})


def _cast(batch: Batch, dtype: torch.dtype) -> Batch:
    def cast(columns: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: column.to(dtype) for name, column in columns.items()}

    return replace(batch, tokens=cast(batch.tokens), rows=cast(batch.rows))


def _on_policy(kind: str, seed: int) -> Batch:
    """The update's first mini-batch: nothing has moved, and half of the advantages are 0."""
    batch = _ragged(kind, seed)
    same = dict.fromkeys(("new", "ref", "rollout"), batch.old)
    advantages = batch.advantages * (torch.arange(12) % 2)[:, None]
    return replace(batch, tokens={**batch.tokens, **same, "advantages": advantages})


def _reference(kind: str, seed: int) -> Batch:
    """A batch small enough to compute by hand: four rows, two prompts."""
    batch = made(kind, seed, [3, 2, 3, 1], [2, 2], width=3)
    rows = {
        "rewards": [[0, 0, 1], [0, 0, 0], [0, 0, 0.5], [-0.5, 0, 0]],
        "values": [[0.1, 0.2, 0.3], [0.4, 0.1, 0], [0, 0.2, 0.4], [-0.1, 0, 0]],
        "old": [[-1, -0.5, -2], [-0.2, -1.5, 0], [-0.7, -0.1, -0.3], [-2.5, 0, 0]],
        "new": [[-0.8, -0.9, -1.5], [-0.25, -1, 0], [-0.7, -0.4, -0.2], [-2, 0, 0]],
        "ref": [[-1.2, -0.6, -1], [-0.2, -1.1, 0], [-0.9, -0.1, -0.6], [-2, 0, 0]],
        "squared": [[0.5, 0.6, 0.3], [0.7, 0.4, 0], [0.5, 0.8, 0.6], [0.2, 0, 0]],
        "advantages": [[1.0] * 3, [-1.0] * 3, [0.5] * 3, [-0.5] * 3],
    }
    tokens = {**batch.tokens, **{name: torch.tensor(values).float() for name, values in rows.items()}}
    return replace(batch, tokens=tokens, rows={**batch.rows, "baselines": torch.tensor([0.25, 0.25, -0.25, -0.25])})


def _dense(kind: str, seed: int) -> Batch:
    """A reward on every token: a process reward."""
    batch = _ragged(kind, seed)
    return replace(batch, tokens={**batch.tokens, "rewards": (batch.returns * batch.mask)})


KINDS: dict[str, Callable[[str, int], Batch]] = {
    "reference": _reference,
    "ragged": _ragged,
    "full": lambda kind, seed: made(kind, seed, [WIDTH] * 12, [4, 4, 4]),
    "tool holes": _holes,
    "empty rows": _empty_rows,
    "groups of one": lambda kind, seed: _ragged(kind, seed, sizes=[1, 4, 1, 3, 2, 1]),
    "unequal groups": _shuffled,
    "equal rewards": lambda kind, seed: _with_rewards(_ragged(kind, seed), lambda row: (row // 3 + 1) / 3),
    "no reward": lambda kind, seed: _with_rewards(_ragged(kind, seed), lambda row: 0.0),
    "one of many": lambda kind, seed: _with_rewards(_ragged(kind, seed), lambda row: float(row == 4)),
    "dense rewards": _dense,
    "NaN outside": lambda kind, seed: replace(_ragged(kind, seed), ours=_nan_outside),
    "bool mask": lambda kind, seed: replace(_ragged(kind, seed), ours=lambda b: replace(b, mask=b.mask.bool())),
    "float mask": lambda kind, seed: replace(_ragged(kind, seed), ours=lambda b: replace(b, mask=b.mask.float())),
    "bf16": lambda kind, seed: replace(_cast(_ragged(kind, seed), torch.bfloat16), close=1500.0),
    "float64": lambda kind, seed: _cast(_ragged(kind, seed), torch.float64),
    "far ratios": lambda kind, seed: replace(_ragged(kind, seed, far=40.0), close=5.0),
    "on policy": _on_policy,
    "one row": lambda kind, seed: made(kind, seed, [5], [1]),
    "one token each": lambda kind, seed: made(kind, seed, [1] * 6, [3, 3], width=1),
    "one token": lambda kind, seed: made(kind, seed, [1], [1], width=1),
    "no token": lambda kind, seed: made(kind, seed, [0] * 6, [3, 3]),
}
"""What a batch may be like → a batch of this kind, by seed."""


@cache
def batch(kind: str, seed: int) -> Batch:
    """The batch of a kind that a seed makes; nobody changes it."""
    return KINDS[kind](kind, seed)
