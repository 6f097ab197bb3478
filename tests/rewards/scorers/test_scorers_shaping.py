"""Rewards for form: the reference's rows by hand, TRL's and DAPO's formulas, and what must hold for any response."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.base.errors import SettingError
from workbench.rewards import Reward, Score, Status, as_reward, shaping
from workbench.testing.rewards import answered


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<think>a</think><answer>b</answer>", 1),
        (" \n<think>a</think>\n\n<answer>b</answer>\n", 1),
        ("<think></think><answer></answer>", 1),
        ("<think>思\n考</think><answer>é</answer>", 1),
        ("<think>a</think>x<answer>b</answer>", 0),
        ("x<think>a</think><answer>b</answer>", 0),
        ("<think>a</think><answer>b</answer>x", 0),
        ("<answer>b</answer><think>a</think>", 0),
        ("<think>a<answer>b</answer></think>", 0),
        ("<think><think>a</think><answer>b</answer>", 0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0),
        ("<think>a</think><answer>b", 0),
        ("<think>a</think>", 0),
        ("<Think>a</Think><Answer>b</Answer>", 0),
        ("", 0),
    ],
)
def test_think_and_answer(text: str, value: float) -> None:
    score = shaping.think_answer_format(text)
    assert score.value == value and score.status is Status.SCORED and score.why


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r"so \boxed{1}.", 1),
        (r"\boxed{}", 1),
        (r"\boxed{\frac{1}{2}}", 1),
        (r"\boxed{東京}", 1),
        (r"\boxed{1", 0),
        (r"\boxed{{1}", 0),
        (r"\boxed{1} and \boxed{", 0),  # the last one is what would be read
        (r"\boxed 1$", 0),
        (r"\fbox{1}", 0),
        ("boxed{1}", 0),
        ("", 0),
    ],
)
def test_box(text: str, value: float) -> None:
    assert shaping.boxed_format(text).value == value


@pytest.mark.parametrize(
    ("pattern", "full", "text", "value"),
    [
        (r"\d+", False, "abc 12", 1),
        (r"\d+", True, "abc 12", 0),
        (r"\d+", True, "12", 1),
        (r"a.b", False, "a\nb", 1),
        (r"^é", False, "été", 1),
        (r"x", False, "", 0),
        (r"x", False, " " * 19_999 + "x", 1),
        (r"x", False, " " * 20_000 + "x", 0),  # beyond what is looked at
    ],
)
def test_matches(pattern: str, full: bool, text: str, value: float) -> None:
    rows = as_reward(shaping.matches(pattern, full=full), workers=1)
    score = rows.score(answered([text]))[0]
    rows.close()
    assert score.value == value and score.why


def test_a_response_that_a_pattern_never_ends_on_is_wrong() -> None:
    """It was *infra_error* after half a minute: a response that hangs its judge was never punished."""
    reward = Reward(shaping.matches("(a+)+$"), workers=1)
    stuck, fine = reward.score(answered(["a" * 40 + "b", "aaa"]))
    reward.close()
    assert stuck.scored and stuck.value == 0 and stuck.status is Status.TIMEOUT and fine.value == 1
    assert "1 s of processor time" in stuck.why


def test_a_full_match_is_of_the_whole_response() -> None:
    assert shaping.matches("a*", full=True)("a" * 20_000 + "b")["score"] == 0  # type: ignore[index]


def test_a_broken_pattern_is_refused_at_once() -> None:
    with pytest.raises((re.error, SettingError)):
        shaping.matches("(")


@pytest.mark.parametrize(
    ("length", "value"),
    [(0, -0.1), (9, -0.01), (10, 0.0), (500, 0.0), (1000, 0.0), (1001, -0.01), (1100, -1.0)],
)
def test_length_penalty_with_the_references_settings(length: int, value: float) -> None:
    assert shaping.length_penalty()("x" * length).value == pytest.approx(value)
    assert shaping.length_penalty()("東" * length).value == pytest.approx(value)  # characters, not bytes


@pytest.mark.parametrize(
    ("length", "dapo", "trl"),
    [
        (0, 0.0, 0.0),
        (79, 0.0, 0.0),
        (80, 0.0, 0.0),  # expected = 100 − 20
        (81, -0.05, -0.05),
        (90, -0.5, -0.5),
        (100, -1.0, -1.0),
        (101, -1.05, -1.0),
        (140, -3.0, -1.0),
    ],
)
def test_overlong(length: int, dapo: float, trl: float) -> None:
    ids = list(range(length))
    score = shaping.overlong(max_response_length=100, buffer=20)(ids)
    assert score.value == pytest.approx(dapo) and score.parts["overlong"] == float(dapo < 0)
    assert shaping.overlong(max_response_length=100, buffer=20, floor=-1.0)(ids).value == pytest.approx(trl)
    assert shaping.overlong(max_response_length=100, buffer=20, factor=0.5)(ids).value == pytest.approx(dapo / 2)


@given(st.integers(1, 200), st.integers(0, 200), st.floats(0, 4), st.integers(0, 500))
def test_overlong_never_rises_with_length(buffer: int, more: int, factor: float, length: int) -> None:
    scorer = shaping.overlong(max_response_length=buffer + more, buffer=buffer, factor=factor)
    shorter, longer = scorer(range(length)).value, scorer(range(length + 1)).value
    assert longer <= shorter <= 0
    assert length > more or shorter == 0
    assert scorer(range(buffer + more)).value == pytest.approx(-factor)


def test_overlong_is_a_reward() -> None:
    reward = as_reward(shaping.overlong(max_response_length=4, buffer=2))
    values = [score.value for score in reward.score(answered(["a", "b"]))]
    assert all(value <= 0 for value in values) and len(values) == 2


@pytest.mark.parametrize("wrong", [{"factor": -1.0}, {"factor": math.nan}, {"floor": 0.5}])
def test_overlong_refuses_what_is_no_penalty(wrong: dict[str, float]) -> None:
    with pytest.raises(SettingError):
        shaping.overlong(max_response_length=100, buffer=20, **wrong)


@pytest.mark.parametrize(
    ("length", "at_zero", "at_max", "value"),
    [
        (0, 1.0, 0.5, 1.0),  # right: short is better (TRL: 0.5 to 1)
        (50, 1.0, 0.5, 0.75),
        (100, 1.0, 0.5, 0.5),
        (25, 1.0, 0.5, 0.5 + 0.25 * (1 + math.sqrt(0.5))),
        (0, -1.0, -0.5, -1.0),  # wrong: long is better (TRL: −1 to −0.5)
        (50, -1.0, -0.5, -0.75),
        (100, -1.0, -0.5, -0.5),
        (75, -1.0, -0.5, -0.5 - 0.25 * (1 - math.sqrt(0.5))),
        (101, 1.0, 0.5, 0.5),  # clamped: a cosine would rise again
        (200, 1.0, 0.5, 0.5),
        (-5, 1.0, 0.5, 1.0),
    ],
)
def test_cosine(length: int, at_zero: float, at_max: float, value: float) -> None:
    assert shaping.cosine_length(length, 100, at_zero, at_max) == pytest.approx(value)


@given(st.integers(0, 300), st.integers(1, 200), st.floats(-2, 2), st.floats(-2, 2))
def test_cosine_goes_one_way_and_stays_between(length: int, most: int, at_zero: float, at_max: float) -> None:
    here, there = (shaping.cosine_length(n, most, at_zero, at_max) for n in (length, length + 1))
    assert min(at_zero, at_max) - 1e-9 <= here <= max(at_zero, at_max) + 1e-9
    assert (there - here) * (at_max - at_zero) >= -1e-9


@pytest.mark.parametrize(
    ("text", "n", "most", "value"),
    [
        ("a b c d", 3, -1.0, 0.0),
        ("a a a a", 3, -1.0, -0.5),  # aaa aaa: 1 of 2
        ("a a a a a a", 3, -1.0, -0.75),  # 1 of 4
        ("a b a b a b", 2, -1.0, -0.6),  # ab ba ab ba ab: 2 of 5
        ("A a a A", 1, -2.0, -1.5),  # case does not count: 1 of 4
        ("a b c a b c", 3, -1.0, -0.25),  # abc bca cab abc: 3 of 4
        ("a\na\u00a0a", 1, -1.0, -2 / 3),
        ("東京 東京", 1, -1.0, -0.5),
        ("a a", 3, -1.0, 0.0),  # no n-gram at all
        ("", 3, -1.0, 0.0),
        ("a a a a", 3, 0.0, 0.0),
    ],
)
def test_repetition(text: str, n: int, most: float, value: float) -> None:
    assert shaping.repetition(n=n, max_penalty=most)(text).value == pytest.approx(value)


@given(st.lists(st.sampled_from(["a", "b", "ß", "東"]), max_size=30), st.integers(1, 5), st.floats(-3, 0))
def test_repetition_stays_above_its_penalty(words: list[str], n: int, most: float) -> None:
    value = shaping.repetition(n=n, max_penalty=most)(" ".join(words)).value
    assert most <= value <= 0
    assert shaping.repetition(n=n, max_penalty=most)(" ".join(map(str, range(len(words))))).value == 0


@given(st.text())
def test_any_text_is_judged_with_a_sentence(text: str) -> None:
    for scorer in (shaping.think_answer_format, shaping.boxed_format, shaping.length_penalty(), shaping.repetition()):
        score: Score = scorer(text)
        assert score.scored and math.isfinite(score.value) and score.why


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: shaping.length_penalty(minimum=5, maximum=3),
        lambda: shaping.length_penalty(minimum=-1),
        lambda: shaping.overlong(max_response_length=10, buffer=0),
        lambda: shaping.overlong(max_response_length=10, buffer=11),
        lambda: shaping.repetition(n=0),
        lambda: shaping.repetition(max_penalty=0.5),
        lambda: shaping.cosine_length(1, 0, 1.0, 0.0),
    ],
)
def test_settings_that_cannot_work_are_refused(wrong: Callable[[], Any]) -> None:
    with pytest.raises(SettingError):
        wrong()
