"""Trees of responses: who shares which node, and the advantages of nodes: by hand, and beside loops over leaves."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.patience import examples

from workbench import functional as F

ESTIMATORS = {"turn": F.tree_turn, "tree_rl": F.tree_rl, "arpo": F.arpo, "tree_grpo": F.tree_grpo}
ONE = torch.zeros(5, dtype=torch.long)
# row 0 is whole, 1 and 2 leave it at token 2, 3 leaves it at token 1, 4 is another whole one
HAND = F.node_numbers(torch.tensor([0, 0, 0, 0, 4]), torch.tensor([0, 2, 2, 1, 0]), torch.tensor([4, 3, 4, 2, 2]), ONE)
SCORES = torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0])
MASK = (HAND > 0).long()


def test_nodes_by_hand() -> None:
    assert HAND.tolist() == [[1, 2, 3, 3], [1, 2, 4, 0], [1, 2, 5, 5], [1, 6, 0, 0], [7, 7, 0, 0]]


def test_each_group_counts_its_own_nodes() -> None:
    groups = torch.tensor([0, 0, 1, 1])
    found = F.node_numbers(torch.tensor([0, 0, 2, 2]), torch.tensor([0, 1, 0, 1]), torch.tensor([2, 2, 2, 2]), groups)
    assert found.tolist() == [[1, 2], [1, 3], [1, 2], [1, 3]]
    assert F.node_numbers(groups[:0], groups[:0], groups[:0], groups[:0]).shape == (0, 0)
    assert F.node_numbers(torch.tensor([0, 1]), groups[:2], torch.tensor([0, 1]), groups[1:3]).tolist() == [[0], [1]]


def test_a_branch_of_a_branch_and_two_at_one_place() -> None:
    sources, starts, lengths = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 2, 1]), torch.tensor([3, 3, 3, 3])
    found = F.node_numbers(sources, starts, lengths, torch.zeros(4, dtype=torch.long))
    assert found.tolist() == [[1, 2, 2], [1, 3, 4], [1, 3, 5], [1, 6, 6]]


class TestByHand:
    """V: node 1 has leaves 0 to 3, mean 1/2; node 2 leaves 0, 1, 2, mean 2/3; the group's mean is 2/5."""

    def test_turns(self) -> None:
        found, _ = F.tree_turn(SCORES, ONE, MASK, HAND, norm_by_std=False)
        v1, v2 = 1 / 2 - 2 / 5, 2 / 3 - 1 / 2
        expected = [[v1, v2, 1 / 3, 1 / 3], [v1, v2, -2 / 3, 0], [v1, v2, 1 / 3, 1 / 3], [v1, -1 / 2, 0, 0],
                    [-2 / 5, -2 / 5, 0, 0]]  # fmt: skip
        torch.testing.assert_close(found, torch.tensor(expected))
        whole, _ = F.tree_turn(SCORES, ONE, MASK, HAND)
        torch.testing.assert_close(whole, found / (statistics.stdev(SCORES.tolist()) + 1e-6))

    def test_tree_rl(self) -> None:
        found, _ = F.tree_rl(SCORES, ONE, MASK, HAND)
        v1, v2 = 2 * (1 / 2 - 2 / 5) / 2, (2 / 3 - 2 / 5 + 2 / 3 - 1 / 2) / 3**0.5
        assert found[0].tolist() == pytest.approx([v1, v2, *[1 - 2 / 5 + 1 - 2 / 3] * 2])
        assert found[3].tolist() == pytest.approx([v1, -2 / 5 - 1 / 2, 0, 0])
        assert found[4].tolist() == pytest.approx([-4 / 5, -4 / 5, 0, 0])

    def test_arpo_and_tree_grpo(self) -> None:
        leaves = F.grpo(SCORES, ONE, MASK[:, :1])[0][:, 0]
        found, _ = F.arpo(SCORES, ONE, MASK, HAND)
        assert found[0].tolist() == pytest.approx(
            [*(float(leaves[:n].mean()) for n in (4, 3)), *[float(leaves[0])] * 2]
        )
        inside = F.grpo(SCORES[:4], ONE[:4], MASK[:4, :1])[0][:, 0]
        both, _ = F.tree_grpo(SCORES, ONE, MASK, HAND)
        assert both[1, 2] == pytest.approx(float(leaves[1] + inside[1]))
        assert both[4, 0] == pytest.approx(float(leaves[4])), "alone in its tree"
        assert both[0, 0] == pytest.approx(float(leaves[:4].mean() + inside.mean()))

    def test_what_was_not_scored_is_in_no_mean(self) -> None:
        scored = torch.tensor([False, True, True, True, True])
        found, _ = F.tree_turn(SCORES, ONE, MASK, HAND, scored=scored, norm_by_std=False)
        assert (found[0] == 0).all() and found[1, 0] == pytest.approx(1 / 3 - 1 / 4)

    def test_learnt_once(self) -> None:
        told = torch.ones(5, dtype=torch.bool)
        assert F.learnt_once(MASK, HAND, ONE, told).tolist() == [
            [1, 1, 1, 1], [0, 0, 1, 0], [0, 0, 1, 1], [0, 1, 0, 0], [1, 1, 0, 0]]  # fmt: skip
        told[0] = False
        assert F.learnt_once(MASK, HAND, ONE, told)[:2].tolist() == [[0, 0, 0, 0], [1, 1, 1, 0]]


def test_without_branches_it_is_grpo() -> None:
    scores, groups = torch.tensor([1.0, 0.0, 2.0, 5.0, 5.5]), torch.tensor([0, 0, 0, 1, 1])
    mask = torch.ones(5, 3, dtype=torch.long)
    nodes = F.node_numbers(torch.arange(5), torch.zeros(5).long(), torch.full((5,), 3), groups)
    expected = F.grpo(scores, groups, mask)[0]
    for estimator in (F.tree_turn, F.arpo, F.tree_grpo):
        torch.testing.assert_close(estimator(scores, groups, mask, nodes)[0], expected)
    plain = F.grpo(scores, groups, mask, norm_by_std=False)[0]
    torch.testing.assert_close(F.tree_rl(scores, groups, mask, nodes)[0], 2 * plain)
    assert torch.equal(F.learnt_once(mask, nodes, groups, torch.ones(5, dtype=torch.bool)), mask)


# --- beside loops over leaves -------------------------------------------------------------------------


@st.composite
def trees(draw: Any) -> dict[str, Any]:
    """Up to three groups of up to six rows, each whole or a branch of an earlier one, tool text between, some not scored."""
    sources, starts, lengths, groups = [], [], [], []
    for group in range(draw(st.integers(1, 3))):
        first = len(groups)
        for row in range(first, first + draw(st.integers(1, 6))):
            source = draw(st.integers(first, row))
            start = draw(st.integers(0, lengths[source] - 1)) if source != row and lengths[source] else 0
            sources.append(source if start else row)
            starts.append(start)
            lengths.append(draw(st.integers(start + 1 if start else 0, start + 4)))
            groups.append(group)
    rows, generator = len(groups), torch.Generator().manual_seed(draw(st.integers(0, 999)))
    given = [torch.tensor(one) for one in (sources, starts, lengths, groups)]
    nodes = F.node_numbers(*given)
    mask = (nodes > 0) * (torch.rand(nodes.shape, generator=generator) > 0.2)
    scores = torch.randint(0, 3, (rows,), generator=generator).double()
    told = torch.rand(rows, generator=generator) > 0.2
    return {"made": given, "scores": scores, "groups": given[3], "mask": mask.long(), "nodes": nodes, "scored": told}


@settings(max_examples=examples(80))
@given(tree=trees())
def test_rows_share_a_node_where_they_share_the_way_to_it(tree: dict[str, Any]) -> None:
    sources, starts, lengths, groups = (one.tolist() for one in tree["made"])
    nodes = tree["nodes"].tolist()

    def origin(row: int, token: int) -> int:
        while token < starts[row]:
            row = sources[row]
        return row

    rows = range(len(groups))
    for row in rows:
        assert [one > 0 for one in nodes[row]] == [token < lengths[row] for token in range(len(nodes[row]))]
        for other in (one for one in rows if groups[one] == groups[row]):
            for token in range(min(lengths[row], lengths[other])):
                assert (nodes[row][token] == nodes[other][token]) == (origin(row, token) == origin(other, token))
        for token in range(1, lengths[row]):
            sharing = [{one for one in rows if groups[one] == groups[row] and nodes[one][at : at + 1] == [nodes[row][at]]}
                       for at in (token - 1, token)]  # fmt: skip
            assert nodes[row][token - 1] != nodes[row][token] or sharing[0] == sharing[1], (
                "a node has one set of leaves"
            )
    for group in set(groups):
        known = sorted({one for row in rows if groups[row] == group for one in nodes[row]} - {0})
        assert known == list(range(1, len(known) + 1))


def naive(name: str, b: dict[str, Any]) -> torch.Tensor:
    """Leaves below each token, found by comparing rows; the formulas over lists."""
    rows, nodes = range(len(b["scores"])), b["nodes"].tolist()
    groups, scored, scores = b["groups"].tolist(), b["scored"].tolist(), b["scores"].tolist()

    def grpo(row: int, mates: list[int]) -> float:
        values = [scores[one] for one in mates]
        if len(values) < 2:
            return 0.0
        return (scores[row] - statistics.mean(values)) / (statistics.stdev(values) + 1e-6)

    found = torch.zeros(b["mask"].shape, dtype=torch.float64)
    for row in (one for one in rows if scored[one]):
        group = [one for one in rows if groups[one] == groups[row] and scored[one]]
        line = nodes[row]
        for token in range(len(line)):
            if not b["mask"][row, token]:
                continue
            below = [one for one in group if line[token] in nodes[one]]
            begins = line.index(line[token])
            above = [one for one in group if line[begins - 1] in nodes[one]] if begins else group
            mean = [statistics.mean(scores[one] for one in leaves) for leaves in (below, above, group)]
            tree = {leaf: [one for one in group if nodes[one][0] == nodes[leaf][0]] for leaf in below}
            deviation = statistics.stdev([scores[one] for one in group]) if len(group) > 1 else 0.0
            found[row, token] = {
                "turn": lambda m=mean, d=deviation: (m[0] - m[1]) / (d + 1e-6),
                "tree_rl": lambda m=mean, of=below: (2 * m[0] - m[1] - m[2]) / len(of) ** 0.5,
                "arpo": lambda of=below, g=group: statistics.mean(grpo(one, g) for one in of),
                "tree_grpo": lambda t=tree, g=group: statistics.mean(grpo(one, g) + grpo(one, t[one]) for one in t),
            }[name]()
    return found


@pytest.mark.parametrize("name", ESTIMATORS)
@settings(max_examples=examples(60))
@given(tree=trees())
def test_estimators_are_their_formulas(name: str, tree: dict[str, Any]) -> None:
    given = [tree[one] for one in ("scores", "groups", "mask", "nodes")]
    found, returns = ESTIMATORS[name](*given, scored=tree["scored"])
    torch.testing.assert_close(found, naive(name, tree), atol=1e-9, rtol=1e-9)
    assert found is returns
