"""Advantages of tree-structured groups: a prompt's responses share turns, and a turn is judged by all that came of it.

Rows are leaves: whole responses, scores [B], groups [B] int64 (one number per prompt), mask [B, T]. `nodes` [B, T] int64 says the
tree: the number of the node that a token belongs to, from 1 in each group, 0 outside the response. A node is a stretch of a
response between two places where it was branched; rows that share it have its number. L(n) is the number of scored leaves
below node n, V(n) their mean score, V(root) the group's. All return (advantages, returns) [B, T], 0 outside the mask and in
rows that were not scored; a node without a sibling in any of its leaves' scores has nothing to be compared with and gets 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.functional.advantages import Groups, Pair


def node_numbers(sources: Tensor, starts: Tensor, lengths: Tensor, groups: Tensor) -> Tensor:
    """Number the nodes of trees: [B, T] int64, from 1 within each group, 0 outside the responses.

    sources [B] int64: the row from which a row was branched, one before it; itself for a row that was sampled whole. starts
    [B]: index of the first token that it does not share with its source (0 for a whole row). lengths [B] in tokens. The rows
    of a group are neighbours.
    """
    rows, width = len(sources), int(lengths.max()) if len(lengths) else 0
    owner = torch.arange(rows)[:, None].repeat(1, width)
    cuts = torch.zeros(rows, width, dtype=torch.long)
    for row, (source, start) in enumerate(zip(sources.tolist(), starts.tolist(), strict=True)):
        if source != row and start < width:
            owner[row, :start] = owner[source, :start]
            cuts[owner[source, start], start] = 1
    inside = torch.arange(width) < lengths[:, None]
    names = owner * (width + 1) + cuts.cumsum(-1).gather(0, owner)
    numbers = torch.zeros(rows, width, dtype=torch.long)
    numbers[inside] = torch.unique(names[inside], return_inverse=True)[1]
    lowest = torch.where(inside, numbers, rows * (width + 1)).amin(-1) if width else groups
    first = lowest.clone().scatter_reduce(0, groups, lowest, "amin", include_self=False)
    return torch.where(inside, numbers - first[groups][:, None] + 1, 0)


class Tree:
    """The nodes of a batch's trees: `of` [B, T] is each token's node (0: none), `parent`, `group` and `count` are
    numbers of each node.

    Its arguments are those of the estimators.
    """

    def __init__(self, scores: Tensor, groups: Tensor, nodes: Tensor, scored: Tensor | None) -> None:
        self.leaves = Groups(scores, groups, scored)
        names = torch.where(nodes > 0, groups[:, None] * (int(nodes.max()) + 1 if nodes.numel() else 1) + nodes, -1)
        before = torch.cat([torch.full_like(names[:, :1], -1), names[:, :-1]], 1)
        known, found = torch.unique(torch.cat([names.new_full((1,), -1), names.reshape(-1)]), return_inverse=True)
        self.of = found[1:].reshape(names.shape)
        row, place = ((names != before) & (names >= 0)).nonzero(as_tuple=True)
        node, above = self.of[row, place], torch.where(place > 0, self.of[row, (place - 1).clamp(min=0)], 0)
        self._row, self._node = row, node
        self.parent = torch.zeros(len(known), dtype=torch.long).scatter(0, node, above)
        """The node before it in its rows; 0 for the first of a response."""
        self.group = torch.zeros(len(known), dtype=torch.long).scatter(0, node, groups[row])
        self.count = self._sums(self.leaves.scored.double())
        """L(n)."""

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean, below each node, of values [B] of the scored leaves; 0 where a node has none."""
        return self._sums(torch.where(self.leaves.scored, values.double(), 0.0)) / self.count.clamp(min=1)

    def above(self, of_nodes: Tensor, of_groups: Tensor) -> Tensor:
        """Return for each node the number of its parent, from `of_nodes`; where the parent is the root, the number of
        its group.
        """
        return torch.where(self.parent > 0, of_nodes[self.parent], of_groups[self.group])

    def spread(self, values: Tensor, scores: Tensor, mask: Tensor) -> Pair:
        """Put each node's value on its tokens within the mask, in rows that were scored; returns that as advantages and
        as returns.
        """
        dtype = scores.dtype if scores.is_floating_point() else torch.float32
        found = values[self.of].to(dtype) * mask * self.leaves.scored[:, None] * (self.of > 0)
        return found, found

    def _sums(self, values: Tensor) -> Tensor:
        """Sum [B] values over the leaves below each node."""
        return torch.zeros(len(self.parent), dtype=torch.float64).index_add(0, self._node, values[self._row])


def _roots(tree: Tree) -> tuple[Tensor, Tensor]:
    """Return the mean score and the standard deviation (n − 1) of each group's scored leaves."""
    leaves = tree.leaves
    number = int(leaves.groups.max()) + 1 if len(leaves.groups) else 1
    total, count = (
        torch.zeros(number, dtype=torch.float64).index_add(0, leaves.groups, one)
        for one in (leaves.scores, leaves.scored.double())
    )
    deviation = torch.zeros(number, dtype=torch.float64).scatter(0, leaves.groups, leaves.deviation())
    return total / count.clamp(min=1), deviation


def tree_turn(
    scores: Tensor,
    groups: Tensor,
    mask: Tensor,
    nodes: Tensor,
    *,
    scored: Tensor | None = None,
    norm_by_std: bool = True,
    eps: float = 1e-6,
) -> Pair:
    """Turn-level GRPO: (V(n) − V(parent)) / (σ + eps), what a node's turns changed; σ is the deviation of the group's leaves.

    A response that nobody shares is one node, and gets GRPO's advantage. `norm_by_std=False` leaves the difference.
    scores, groups [B]; mask, nodes [B, T]; returns (advantages, returns) [B, T].
    """
    tree = Tree(scores, groups, nodes, scored)
    value, (root, deviation) = tree.mean(scores), _roots(tree)
    gained = torch.where(tree.count > 0, value - tree.above(value, root), 0.0)
    return tree.spread(gained / (deviation[tree.group] + eps) if norm_by_std else gained, scores, mask)


def tree_rl(scores: Tensor, groups: Tensor, mask: Tensor, nodes: Tensor, *, scored: Tensor | None = None) -> Pair:
    """TreeRL: ((V(n) − V(root)) + (V(n) − V(parent))) / √L(n), the global and the local advantage of a node.

    The root of √ weighs a node less that is learnt in each of its L(n) leaves. scores, groups [B]; mask, nodes [B, T]; returns
    (advantages, returns) [B, T]. Hou et al. 2025, https://arxiv.org/abs/2506.11902.
    """
    tree = Tree(scores, groups, nodes, scored)
    value, root = tree.mean(scores), _roots(tree)[0]
    gained = 2 * value - root[tree.group] - tree.above(value, root)
    return tree.spread(torch.where(tree.count > 0, gained, 0.0) / tree.count.clamp(min=1).sqrt(), scores, mask)


def arpo(
    scores: Tensor,
    groups: Tensor,
    mask: Tensor,
    nodes: Tensor,
    *,
    scored: Tensor | None = None,
    norm_by_std: bool = True,
    eps: float = 1e-6,
) -> Pair:
    """ARPO: GRPO's advantage of each leaf; tokens that several leaves share have the mean of these leaves' advantages.

    scores, groups [B]; mask, nodes [B, T]; returns (advantages, returns) [B, T]. Dong et al. 2025,
    https://arxiv.org/abs/2507.19849 (hard advantage estimation).
    """
    tree = Tree(scores, groups, nodes, scored)
    return tree.spread(tree.mean(_relative(tree.leaves, norm_by_std, eps)), scores, mask)


def tree_grpo(
    scores: Tensor,
    groups: Tensor,
    mask: Tensor,
    nodes: Tensor,
    *,
    scored: Tensor | None = None,
    norm_by_std: bool = True,
    eps: float = 1e-6,
) -> Pair:
    """Tree-GRPO: GRPO's advantage of each leaf among its own tree's leaves, plus that among all leaves of its prompt.

    A prompt may have several trees: leaves with the same first node are of one. Shared tokens have the mean of their leaves'.
    scores, groups [B]; mask, nodes [B, T]; returns (advantages, returns) [B, T]. Ji et al. 2025, https://arxiv.org/abs/2509.21240.
    """
    tree = Tree(scores, groups, nodes, scored)
    own = torch.unique(tree.of[:, 0], return_inverse=True)[1] if nodes.shape[1] else groups
    inside = _relative(Groups(scores, own, scored), norm_by_std, eps)
    return tree.spread(tree.mean(inside + _relative(tree.leaves, norm_by_std, eps)), scores, mask)


def _relative(found: Groups, norm_by_std: bool, eps: float) -> Tensor:
    """Compute GRPO's advantage of each row: [B]."""
    return found.unless_alone(found.centred / (found.deviation() + eps) if norm_by_std else found.centred, "zero")


def learnt_once(mask: Tensor, nodes: Tensor, groups: Tensor, scored: Tensor) -> Tensor:
    """Return the mask [B, T] with each node's tokens in one row only: the first scored row that has the node."""
    tree = Tree(torch.zeros(len(mask)), groups, nodes, scored)
    rows = torch.where(tree.leaves.scored[tree._row], tree._row, len(mask))
    first = torch.full_like(tree.parent, len(mask)).scatter_reduce(0, tree._node, rows, "amin")
    return mask * (first[tree.of] == torch.arange(len(mask))[:, None])
