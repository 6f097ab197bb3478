"""Statistics of verdicts: published and hand-computed numbers, invariants, and rewardbench's own results."""

from __future__ import annotations

import math
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.rewards import judge_stats as stats
from workbench.rewards.judge_stats import Rated

SHARES = st.lists(st.floats(0, 1), min_size=1, max_size=40)


@pytest.mark.parametrize(
    ("hits", "n", "low", "high"),
    [(0, 10, 0.0, 0.27753), (10, 10, 0.72247, 1.0), (81, 263, 0.25527, 0.36621), (15, 148, 0.06238, 0.16044), (5, 10, 0.23659, 0.76341)],
)  # fmt: skip
def test_wilson_is_newcombes(hits: int, n: int, low: float, high: float) -> None:
    """81/263 and 15/148 are Newcombe's examples (1998, method 3): .2553 to .3662 and .0624 to .1605."""
    assert stats.wilson(hits, n) == pytest.approx((low, high), abs=6e-5)


@given(SHARES)
def test_an_interval_holds_its_share(credits: list[float]) -> None:
    found = stats.share(enumerate(credits))
    assert (
        0 <= found.low <= found.value + 1e-9
        and found.value <= found.high + 1e-9 <= 1 + 1e-8
        and found.n == len(credits)
    )


def test_an_items_credits_are_one_observation() -> None:
    once, thrice = stats.share([("a", 1.0), ("b", 0.0)]), stats.share([("a", 1.0), ("b", 0.0)] * 3)
    assert once == thrice and once.n == 2
    assert math.isnan(stats.share([]).value) and stats.share([]).n == 0


def test_fleiss_1971() -> None:
    """The worked example of ten subjects, fourteen raters and five categories: κ = .210 (.209931)."""
    table = [
        (0, 0, 0, 0, 14), (0, 2, 6, 4, 2), (0, 0, 3, 5, 6), (0, 3, 9, 2, 0), (2, 2, 8, 1, 1),
        (7, 7, 0, 0, 0), (3, 2, 6, 3, 0), (2, 5, 3, 2, 2), (6, 5, 2, 1, 0), (0, 2, 2, 3, 7),
    ]  # fmt: skip
    ratings = [[name for name, n in enumerate(row) for _ in range(n)] for row in table]
    assert stats.fleiss_kappa(ratings) == pytest.approx(0.20993070442195, abs=1e-12)


def test_kappa_at_its_ends() -> None:
    assert stats.fleiss_kappa([["a", "a"], ["b", "b"]]) == 1.0
    assert stats.fleiss_kappa([["a", "b"], ["b", "a"]]) == -1.0
    assert math.isnan(stats.fleiss_kappa([["a", "a"], ["a", "a"]])) and math.isnan(stats.fleiss_kappa([]))


def test_spearman_shares_ranks_of_equal_values() -> None:
    assert list(stats.ranks([10, 20, 20, 5])) == [2, 3.5, 3.5, 1]
    # scipy.stats.spearmanr([1, 2, 2, 4, 5], [2, 1, 3, 3, 9]): .8157894736842105
    assert stats.spearman([1, 2, 2, 4, 5], [2, 1, 3, 3, 9]) == pytest.approx(0.7631578947368421, abs=1e-12)
    assert math.isnan(stats.spearman([1, 1, 1], [1, 2, 3]))


@given(st.lists(st.tuples(st.integers(-5, 5), st.integers(-5, 5)), min_size=3, max_size=30))
def test_spearman_is_symmetric_and_blind_to_monotone_changes(pairs: list[tuple[int, int]]) -> None:
    one, other = np.array(pairs, float).T
    found = stats.spearman(one, other)
    if found == found:
        assert -1 - 1e-9 <= found <= 1 + 1e-9
        assert stats.spearman(other, np.exp(one)) == pytest.approx(found) and stats.spearman(
            -one, other
        ) == pytest.approx(-found)


def test_calibration_by_hand() -> None:
    """Ten verdicts: four at .95 of which three are right, six at .55 of which three are: ECE = .4·|.75−.95| + .6·|.5−.55| = .11."""
    bins, error = stats.calibration([0.95] * 4 + [0.55] * 6, [1, 1, 1, 0, 1, 1, 1, 0, 0, 0])
    assert [(one.n, round(one.low, 9), round(one.high, 9)) for one in bins] == [(6, 0.5, 0.6), (4, 0.9, 1.0)]
    assert error == pytest.approx(0.11)
    assert math.isnan(stats.calibration([], [])[1])


def test_a_confidence_on_an_edge_is_in_the_bin_below_it() -> None:
    """(0, ½] holds 0 and ½: |1 − ¼| · ⅔ + |0 − 1| · ⅓ = ⅚."""
    bins, error = stats.calibration([0.0, 0.5, 1.0], [1, 1, 0], bins=2)
    assert [(one.low, one.high, one.n) for one in bins] == [(0, 0.5, 2), (0.5, 1, 1)]
    assert error == pytest.approx(5 / 6)


@given(st.lists(st.tuples(st.floats(0, 1), st.sampled_from([0.0, 0.5, 1.0])), min_size=1, max_size=50))
def test_bins_hold_each_verdict_once(pairs: list[tuple[float, float]]) -> None:
    sure, right = zip(*pairs, strict=True)
    bins, error = stats.calibration(sure, right)
    assert sum(one.n for one in bins) == sum(one.n for one in stats.by_margin(sure, right)) == len(pairs)
    assert 0 <= error <= 1


def test_margins_have_bins_of_their_own() -> None:
    few = stats.by_margin([0, 0, 1, 1, 1, 2], [0.5, 0.5, 1, 0, 1, 1])
    assert [(one.low, one.high, one.n, one.accuracy) for one in few] == [
        (0, 0, 2, 0.5),
        (1, 1, 3, pytest.approx(2 / 3)),
        (2, 2, 1, 1.0),
    ]
    many = stats.by_margin(list(range(100)), [float(one >= 50) for one in range(100)])
    assert [one.n for one in many] == [25] * 4 and [one.accuracy for one in many] == [0, 0, 1, 1]
    assert (many[0].low, many[0].high, many[3].high) == (0, 24, 99) and stats.by_margin([], []) == []


def test_bootstrap_is_the_same_each_time_and_near_the_normal() -> None:
    values = [Random(one).gauss(5, 2) for one in range(400)]
    found = stats.bootstrap(stats.mean, values)
    half = 1.96 * float(np.std(values)) / 20
    assert found == stats.bootstrap(stats.mean, values)
    assert found.high - found.low == pytest.approx(2 * half, rel=0.1) and found.low < found.value < found.high
    assert math.isnan(stats.bootstrap(stats.mean, []).value)


# --- RewardBench ----------------------------------------------------------------------------------


def test_sections_are_weighted_as_on_the_leaderboard() -> None:
    """math-prm weighs as much as the six code subsets together; 358 chat examples, 456 hard ones, 740 of safety."""
    totals = {name: sum(weights.values()) for name, weights in stats.SECTIONS.items()}
    assert totals == {"Chat": 358, "Chat Hard": 456, "Safety": 740, "Reasoning": 1968}
    found = stats.sections({"math-prm": 0.5, "hep-cpp": 1.0, "hep-go": 1.0, "donotanswer": 0.25, "mine": 1.0})
    assert found == pytest.approx({"Safety": 0.25, "Reasoning": (0.5 * 984 + 328) / 1312})


def test_of_the_highest_scores_each_has_its_share() -> None:
    assert stats.best_of([3, 1, 2, 0], [0]) == 1.0 and stats.best_of([3, 3, 2, 0], [0]) == 0.5
    assert stats.best_of([1, 1, 1, 1], [0]) == 0.25 and stats.best_of([0, 3, 0, 0], [0]) == 0.0


REF = {0: Rated([5], [1, 2]), 1: Rated([3], [3, 1]), 2: Rated([9], [4])}
TIED = {0: Rated([6, 7], [2, 3]), 1: Rated([8, 2], [3]), 2: Rated([4], [1])}


def test_ties_by_hand() -> None:
    """.3·2/3 + .3·2/3 + .2·1/2 + .2·1/2 + .01·(tanh(3/1 − 1) + tanh(−1/6 − 1))/2: prompt 2 has one right answer, no spread."""
    expected = 0.4 + 0.2 + 0.005 * (math.tanh(2.0) + math.tanh(-1 / 6 - 1))
    assert stats.ties_score(REF, TIED) == pytest.approx(expected, abs=1e-12)
    # rewardbench 0.1.4, process_single_model on these scores
    assert expected == pytest.approx(0.6007041346724497, abs=1e-12)


def test_a_missing_score_has_no_credit() -> None:
    full = stats.ties_score({0: Rated([5], [1])}, {0: Rated([6, 6.5], [2])})
    assert full == pytest.approx(1 + 0.01 * math.tanh(4 / 0.5 - 1))
    assert stats.ties_score({0: Rated([5], [None])}, {0: Rated([6, 6.5], [2])}) == pytest.approx(
        0.3 + 0.2 - 0.0 * 0.2 - 0.01
    )
    assert stats.ties_score({0: Rated([5], [1])}, {0: Rated([6, None], [2])}) == pytest.approx(0.3)
    assert stats.ties_score({}, {}) == 0.0
