"""Search answers, geometry, and rewards for form: hand-computed rows and invariants."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.base.errors import SettingError
from workbench.rewards import Status, as_reward, geometry3k, search_em, search_f1, shaping
from workbench.rewards.scorers import search
from workbench.testing.rewards import answered


@pytest.mark.parametrize(
    ("text", "target", "value"),
    [
        ("<answer>The Beatles!</answer>", "beatles", 1), ("<answer>x</answer><answer>Paris</answer>", ["Rome", "Paris"], 1),
        ("Paris", "Paris", 0), ("<answer>Paris is it</answer>", "Paris", 0), ("<answer>a</answer>", "the", 1),
        ("<answer>Paris</answer>" * 11, "Paris", 0.25), ("<answer>Paris</answer>" * 10, "Paris", 1), ("<answer></answer>", "a", 1),
    ],
)  # fmt: skip
def test_search_as_verl_scores_it(text: str, target: Any, value: float) -> None:
    assert search.compute_score(text, {"target": target}) == value
    assert search_em(text, {"target": target}).value == value
    verls = pytest.importorskip("verl.utils.reward_score.search_r1_like_qa_em")
    assert search.compute_score(text, {"target": target}) == verls.compute_score(text, {"target": target})


def test_search_details() -> None:
    assert search_em("Paris", ["Paris"]).status is Status.NO_ANSWER
    assert search_em("<answer>Rome</answer>", "Paris", format_score=0.2).value == 0.2
    assert search_em("<answer>in Paris, France</answer>", "Paris", substring=True).value == 1
    assert search_f1("<answer>the big cat</answer>", ["big dog", "cat"]).value == pytest.approx(2 / 3)
    assert search_f1("no tags", "x").status is Status.NO_ANSWER


@given(st.text(), st.text())
def test_f1_is_symmetric_and_bounded(one: str, other: str) -> None:
    assert (
        0 <= search.f1(one, other) <= 1 and search.f1(one, other) == search.f1(other, one) and search.f1(one, one) == 1
    )


@pytest.mark.parametrize(
    ("text", "truth", "value"),
    [
        (r"<think>hm</think> so \boxed{12}", "12", 1.0), (r"\boxed{12}", "12", 0.9), (r"<think>hm</think>\boxed{3}", "12", 0.1),
        ("<think>hm</think>12", "12", 0.0), ("no box", "None", 0.0), (r"\boxed{0.5}", r"\frac{1}{2}", 0.9),
    ],
)  # fmt: skip
def test_geometry3k(text: str, truth: str, value: float) -> None:
    score = geometry3k(text, truth)
    assert score.value == pytest.approx(value)
    assert score.value == pytest.approx(0.9 * score.parts["accuracy"] + 0.1 * score.parts["format"])


@pytest.mark.slow
def test_formats() -> None:
    good = "<think>a</think>\n<answer>b</answer>"
    assert shaping.think_answer_format(good).value == 1
    for bad in ("", "x" + good, good + "x", good * 2, "<answer>b</answer><think>a</think>", good.replace("\n", "why")):
        assert shaping.think_answer_format(bad).value == 0
    assert shaping.boxed_format(r"\boxed{1}").value == 1 and shaping.boxed_format(r"\boxed{1").value == 0
    rows = answered(["ab12", "no"])
    assert [score.value for score in as_reward(shaping.matches(r"\d+"), workers=1).score(rows)] == [1, 0]


@pytest.mark.parametrize(("length", "value"), [(80, 0.0), (90, -0.5), (100, -1.0), (120, -2.0)])
def test_overlong_by_hand(length: int, value: float) -> None:
    assert shaping.overlong(max_response_length=100, buffer=20)(list(range(length))).value == value
    clamped = shaping.overlong(max_response_length=100, buffer=20, floor=-1.0)(list(range(length))).value
    assert clamped == max(value, -1.0)  # TRL's
    assert shaping.overlong(max_response_length=100, buffer=20, factor=0.5)(list(range(length))).value == value / 2


def test_length_cosine_and_repetition_by_hand() -> None:
    penalty = shaping.length_penalty(minimum=4, maximum=6, per_character=0.5)
    assert [penalty("x" * n).value for n in (2, 4, 6, 9)] == [-1.0, 0, 0, -1.5]
    assert shaping.cosine_length(0, 100, 1.0, 0.0) == 1 and shaping.cosine_length(100, 100, 1.0, 0.0) == 0
    assert shaping.cosine_length(50, 100, 1.0, 0.0) == pytest.approx(0.5)
    assert shaping.cosine_length(25, 100, 2.0, 1.0) == pytest.approx(1 + 0.5 * (1 + math.cos(math.pi / 4)))
    # a b a b a b: bigrams ab ba ab ba ab: 2 of 5 distinct
    assert shaping.repetition(n=2)("a b a b a b").value == pytest.approx(-0.6)
    assert shaping.repetition()("two words").value == 0
    for wrong in (lambda: shaping.repetition(n=0), lambda: shaping.overlong(max_response_length=5, buffer=6)):
        with pytest.raises(SettingError):
            wrong()


@given(st.lists(st.sampled_from(["a", "b", "c"]), max_size=30), st.integers(1, 4))
def test_repetition_is_bounded(words: list[str], n: int) -> None:
    assert -1 <= shaping.repetition(n=n)(" ".join(words)).value <= 0
