"""Sharing rows out, resampling, and several samples as one number."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workbench.functional import balancing, passes


def sums(loads: list[int] | list[float], parts: list[list[int]]) -> list[float]:
    return [sum(loads[row] for row in part) for part in parts]


@given(st.lists(st.integers(1, 500), min_size=1, max_size=40), st.integers(1, 8))
def test_every_row_is_in_one_part_and_loads_are_near(lengths: list[int], parts: int) -> None:
    if parts > len(lengths):
        with pytest.raises(ValueError, match="cannot be shared out"):
            balancing.balanced(lengths, parts)
        return
    found = balancing.balanced(lengths, parts)
    assert sorted(itertools.chain(*found)) == list(range(len(lengths))) and len(found) == parts
    assert all(part == sorted(part) for part in found)
    loads = sums(lengths, found)
    assert max(loads) - min(loads) <= max(lengths)
    assert found == balancing.balanced(lengths, parts)


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 99))
def test_parts_of_equal_size(parts: int, each: int, seed: int) -> None:
    lengths = torch.randint(1, 300, (parts * each,), generator=torch.Generator().manual_seed(seed)).tolist()
    found = balancing.balanced(lengths, parts, equal_size=True)
    assert [len(part) for part in found] == [each] * parts
    assert sorted(itertools.chain(*found)) == list(range(parts * each))
    with pytest.raises(ValueError, match="do not divide"):
        balancing.balanced([1] * (parts * 2 + 1), 2, equal_size=True)


def test_it_beats_dealing_out_in_order() -> None:
    lengths = [1000, 10, 10, 10, 900, 10, 10, 10, 800, 700, 10, 10]
    loads = [balancing.workload(length) for length in lengths]
    dealt = [list(range(part, 12, 4)) for part in range(4)]
    found = balancing.balanced(loads, 4)
    assert max(sums(loads, found)) < max(sums(loads, dealt))


def test_resampling_follows_the_weights() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.tensor([0.0, 1.0, -2.0, 0.0] * 1000)
    drawn = balancing.resampled(scores, generator=generator)
    values = scores[drawn]
    assert (values == 0).sum() == 0 and 0.75 < float((values == -2).float().mean()) < 0.85  # 4 of 5
    ends = scores[balancing.resampled(scores, method="max_min", generator=generator)]
    assert set(ends.tolist()) == {1.0, -2.0}
    best = scores[balancing.resampled(scores, method="max_random", generator=generator)]
    assert 0.5 < float((best == 1).float().mean()) < 0.65  # .4 of .7
    assert sorted(set(balancing.resampled(torch.zeros(50), generator=generator).tolist()))[-1] > 10
    with pytest.raises(ValueError, match="expected pow"):
        balancing.resampled(scores, method="none")


@given(st.lists(st.integers(1, 40), min_size=4, max_size=16), st.data())
def test_groups_stay_together(lengths: list[int], data: st.DataObject) -> None:
    groups = data.draw(st.lists(st.sampled_from("abcd"), min_size=len(lengths), max_size=len(lengths)))
    number = len(set(groups))
    parts = data.draw(st.integers(1, number))
    found = balancing.balanced_groups(lengths, groups, parts)
    assert sorted(row for rows in found for row in rows) == list(range(len(lengths)))
    assert all(rows == sorted(rows) and rows for rows in found)
    assert sum(len({groups[row] for row in rows}) for rows in found) == number
    if number % parts == 0:
        same = balancing.balanced_groups(lengths, groups, parts, equal_size=True)
        assert {len({groups[row] for row in rows}) for rows in same} == {number // parts}
    with pytest.raises(ValueError, match="cannot be shared out"):
        balancing.balanced_groups(lengths, groups, number + 1)


@given(st.integers(1, 8), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(samples: int, data: st.DataObject) -> None:
    correct, k = data.draw(st.integers(0, samples)), data.draw(st.integers(1, samples))
    right = [number < correct for number in range(samples)]
    subsets = list(itertools.combinations(right, k))
    assert passes.pass_at_k(correct, samples, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))
    with pytest.raises(ValueError, match="pass@"):
        passes.pass_at_k(correct, samples, samples + 1)


@given(st.lists(st.floats(-2, 2), min_size=1, max_size=4), st.integers(1, 4))
def test_best_and_worst_are_the_mean_over_all_draws(values: list[float], n: int) -> None:
    tensor = torch.tensor(values, dtype=torch.float64)
    draws = list(itertools.product(values, repeat=n))
    for worst, chosen in ((False, max), (True, min)):
        found = torch.tensor([chosen(draw) for draw in draws], dtype=torch.float64)
        expected = (float(found.mean()), float(found.std(correction=0)))
        assert passes.best_of(tensor, n, worst=worst) == pytest.approx(expected, abs=1e-7)


def test_the_majority_wins() -> None:
    values = torch.tensor([1.0, 1.0, 1.0, 0.0])
    assert passes.majority(["7", "7", "7", "8"], values, 64) == (1.0, 0.0)
    assert passes.majority([None, None], torch.zeros(2), 4) == (0.0, 0.0)
    mean, deviation = passes.majority(["7", "8"], torch.tensor([1.0, 0.0]), 1)
    assert mean == pytest.approx(0.5, abs=0.05) and deviation == pytest.approx((mean * (1 - mean)) ** 0.5)
    assert passes.sizes(1) == [] and passes.sizes(8) == [2, 4, 8] and passes.sizes(6) == [2, 4, 6]
