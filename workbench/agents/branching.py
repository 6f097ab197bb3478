"""Branching: what continuations drawn from an episode's turns say of these turns: values, and credit by counterfactuals."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

import torch

from workbench.agents.protocol import AgentLoopOutput, Sequences, Turn
from workbench.agents.stepping import EpisodeStepper
from workbench.base.errors import PipelineError, SettingError, describe
from workbench.base.shown import Shown, shows
from workbench.dataproto.core import DataProto
from workbench.functional.trees import node_numbers


def only_sequence(outputs: Sequences) -> AgentLoopOutput:
    """The sequence of an episode that has one. Raises `SettingError` for an episode of several: a tree's leaves are rows."""
    if len(outputs) > 1:
        do = "branch an agent without compaction, sub-agents and history='template'"
        raise SettingError("an episode that is branched", expected="one sequence", found=f"{len(outputs)}", do=do)
    return outputs[0]


@dataclass(frozen=True)
class Estimate:
    """A mean reward of continuations, with its standard error."""

    mean: float
    """NaN of none."""
    error: float
    """Standard error of the mean: deviation (n − 1) / √n; 0 for a single recorded reward, NaN for a single draw."""
    count: int
    """How many scored continuations it is of."""

    @classmethod
    def of(cls, rewards: Sequence[float]) -> Estimate:
        """The mean of drawn rewards."""
        count = len(rewards)
        error = stdev(rewards) / math.sqrt(count) if count > 1 else math.nan
        return cls(fmean(rewards) if count else math.nan, error, count)

    def minus(self, other: Estimate) -> Estimate:
        """The difference to an independent estimate."""
        return Estimate(self.mean - other.mean, math.hypot(self.error, other.error), min(self.count, other.count))


@dataclass(frozen=True)
class TreeNode:
    """Some turns of a tree's episodes, from one branching to the next."""

    number: int
    parent: int | None
    """Number of the node before; None for the one that all leaves share."""
    first: int
    """Number of its first turn in the episode."""
    turns: tuple[Turn, ...]
    leaves: tuple[int, ...]
    """The batch's rows below it, the recorded episode among them."""
    value: Estimate
    """Mean reward of what was drawn from its end; of a leaf its reward."""
    credit: Estimate
    """Its value minus the mean reward of the other continuations that were drawn from its first turn; NaN without any."""
    recorded: bool
    """Whether it belongs to the episode that was branched."""

    @property
    def places(self) -> str:
        """Its turns by their numbers: `2` or `2 to 4`; empty where it has none."""
        last = self.first + len(self.turns) - 1
        return f"{self.first} to {last}" if last > self.first else str(self.first) if self.turns else ""


@dataclass(frozen=True, repr=False, eq=False)
class Tree(Shown):
    """An episode with continuations drawn from some of its turns, all scored: `Stepper.branch` returns it.

    The value V before a turn is the mean reward of what was drawn from it; the recorded episode is in no value, because it may
    have been chosen for its reward. What the turns between two branchings were worth is V after − V before (`credit`).
    """

    leaves: tuple[EpisodeStepper, ...]
    """The episodes: first the recorded one, then the continuations in the turns' order. Each can be opened, and branched."""
    starts: tuple[int, ...]
    """The first turn that was drawn for each leaf; −1 for the recorded one."""
    batch: DataProto
    """The leaves as rows of one `uid`, with the columns of rollout and reward and the tree's `nodes`."""

    @classmethod
    def of(cls, recorded: EpisodeStepper, drawn: Mapping[int, Sequence[EpisodeStepper]], batch: DataProto) -> Tree:
        """The tree of an episode and its continuations by turn; `batch` has the scored rows of all, in this order."""
        starts = [(turn, one) for turn in sorted(drawn) for one in drawn[turn]]
        leaves, numbers = (recorded, *(one for _, one in starts)), (-1, *(turn for turn, _ in starts))
        tokens = torch.tensor([0, *(recorded.turns[turn].first for turn, _ in starts)])
        lengths = torch.tensor([len(only_sequence(one.outputs).response_ids) for one in leaves])
        root = torch.zeros(len(leaves), dtype=torch.long)
        nodes = node_numbers(root, tokens, lengths, root)
        wide = torch.zeros(len(leaves), batch["responses"].shape[1], dtype=torch.long)
        wide[:, : nodes.shape[1]] = nodes
        return cls(leaves, numbers, batch.with_columns({"nodes": wide}))

    @property
    def points(self) -> tuple[int, ...]:
        """The turns that were branched from."""
        return tuple(sorted({one for one in self.starts if one >= 0}))

    def value(self, turn: int) -> Estimate:
        """V before turn `turn`: the mean reward of its continuations. Raises `PipelineError` for a turn without any."""
        if turn not in self.points:
            expected = f"one of turns {', '.join(map(str, self.points))}"
            do = f"branch there, too: turns={sorted({*self.points, turn})}" if isinstance(turn, int) else None
            raise PipelineError(
                "this tree was not branched at that turn", expected=expected, found=describe(turn), do=do
            )
        return Estimate.of(self._rewards(self._drawn(turn)))

    @property
    def nodes(self) -> tuple[TreeNode, ...]:
        """All nodes, each before those below it: the shared turns, then what was drawn and the recorded turns."""
        return tuple(self._nodes())

    def credit(self) -> Any:
        """A DataFrame with a line for each stretch of the recorded episode between branchings: what its turns were worth.

        `before` and `after` are values with their standard errors; after the last turn it is the recorded reward, of error 0.
        `advantage` is their difference, `error` its standard error, `n` how many continuations the value before is of.
        """
        return shows(self, "credit")

    def to_pandas(self) -> Any:
        """A DataFrame with a line for each node: parent, turns, leaves, value and credit with their standard errors."""
        return shows(self, "frame")

    # --- inside ---------------------------------------------------------------------------

    def _drawn(self, turn: int) -> list[int]:
        return [row for row, start in enumerate(self.starts) if start == turn]

    def _rewards(self, rows: Sequence[int]) -> list[float]:
        return [float(self.batch["reward"][row]) for row in rows if self.batch["scored"][row]]

    def _recorded(self) -> Estimate:
        rewards = self._rewards([0])
        return Estimate(rewards[0], 0.0, 1) if rewards else Estimate(math.nan, math.nan, 0)

    def _nodes(self) -> Iterator[TreeNode]:
        said, points = self.leaves[0].turns, self.points
        below = [row for row in range(len(self.leaves))]
        nothing = Estimate(math.nan, math.nan, 0)
        trunk, number = 0, 0
        yield TreeNode(0, None, 0, said[: points[0]], tuple(below), self.value(points[0]), nothing, True)
        for point, until in zip(points, (*points[1:], None), strict=True):
            drawn, before = self._drawn(point), self.value(point)
            for row in drawn:
                number += 1
                own = self._rewards([row])
                value = Estimate(own[0], 0.0, 1) if own else nothing
                others = Estimate.of(self._rewards([one for one in drawn if one != row]))
                turns = self.leaves[row].turns[point:]
                yield TreeNode(number, trunk, point, turns, (row,), value, value.minus(others), False)
            number += 1
            value = self._recorded() if until is None else self.value(until)
            below = [0, *(row for row in below if self.starts[row] > point)]
            yield TreeNode(number, trunk, point, said[point:until], tuple(below), value, value.minus(before), True)
            trunk = number
