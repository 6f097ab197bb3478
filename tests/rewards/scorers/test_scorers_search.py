"""Search-R1's question answering and geometry3k: every row of the reference by hand, and search beside verl itself."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.base.errors import SettingError
from workbench.rewards import Status, geometry3k, search_em, search_f1
from workbench.rewards.scorers import search
from workbench.rewards.scorers.numeric import same_answer


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("The Beatles!", "beatles"),
        ("A  man, a plan", "man plan"),
        ("theatre an anthem", "theatre anthem"),  # articles are whole words
        ("U.S.A.", "usa"),
        ("O'Neill-Smith", "oneillsmith"),  # punctuation leaves no space
        ("a.b", "ab"),  # punctuation goes before articles
        ("tab\tand\u00a0no-break", "tab and nobreak"),
        ("Éva «x» — 東京", "éva «x» — 東京"),  # other punctuation than ASCII's stays
        ("İ", "i̇"),
        ("a", ""),
        ("The, an. A!", ""),
        ("", ""),
    ],
)
def test_normalise(text: str, plain: str) -> None:
    assert search.normalise(text) == plain


@given(st.text())
def test_normalise_leaves_single_spaces_and_no_punctuation(text: str) -> None:
    plain = search.normalise(text)
    assert plain == " ".join(plain.split()) and not set(plain) & set(search.string.punctuation)


def many(opened: int, closed: int) -> str:
    """A response that ends in the answer `x` and has that many tags in all."""
    return "<answer>" * (opened - 1) + "</answer>" * (closed - 1) + "<answer>x</answer>"


EXACT: list[tuple[str, Any, float]] = [
    ("<answer>Paris</answer>", "paris", 1.0),
    ("<answer> the PARIS. </answer>", "Paris", 1.0),
    ("<answer>Paris</answer> no: <answer>Rome</answer>", "Rome", 1.0),  # the last pair counts
    ("<answer>Rome</answer> no: <answer>Paris</answer>", "Rome", 0.0),
    ("<answer>Rome</answer> and then <answer>Paris", "Rome", 1.0),  # an open tag is no pair
    ("<answer>x <answer>Rome</answer>", "Rome", 0.0),  # a pair starts at the first open tag
    ("<answer>\nNew\nYork\n</answer>", "new york", 1.0),
    ("<answer>Rome</answer>", ["Paris", "Rome"], 1.0),
    ("<answer>Rome</answer>", [], 0.0),
    ("<answer>Rome, Italy</answer>", "Rome", 0.0),
    ("<answer>ROMÉ</answer>", "romé", 1.0),
    ("<answer>Rome\u0301</answer>", "romé", 0.0),  # two ways to write é are two texts
    ("<answer>東京</answer>", ["東京"], 1.0),
    ("<Answer>Rome</Answer>", "Rome", 0.0),
    ("Rome", "Rome", 0.0),
    ("", "Rome", 0.0),
    ("<answer></answer>", "", 1.0),
    ("<answer>a</answer>", "the", 1.0),  # nothing equals nothing
    ("<answer></answer>", ["Rome", "The!"], 1.0),
    ("<answer></answer>", "Rome", 0.0),
    (many(10, 1), "x", 0.0),  # the ten open tags are part of the answer
    (many(1, 10), "x", 1.0),
    (many(1, 11), "x", 0.25),
    ("<answer>x</answer>" * 10, "x", 1.0),
    ("<answer>x</answer>" * 11, "x", 0.25),
    ("<answer>y</answer>" * 11, "x", 0.0),
]


@pytest.mark.parametrize(("text", "target", "value"), EXACT)
def test_exact_match(text: str, target: Any, value: float) -> None:
    assert search.compute_score(text, {"target": target}) == value
    if target in ("", []):
        return  # not applicable for the scorer: test_search_knows_no_empty_target
    assert search_em(text, {"target": target}).value == value
    assert search_em(text, target).value == value


@pytest.mark.parametrize(
    ("text", "target", "value"),
    [
        ("<answer>in Paris, France</answer>", "paris", 1.0),
        ("<answer>Paris</answer>", "Paris, France", 0.0),  # the target in the answer, not the reverse
        ("<answer>parisian</answer>", "Paris", 1.0),  # letters, not words
        ("<answer>Paris</answer>", "the", 1.0),  # nothing is in everything
        ("<answer>x</answer>" * 11, "x", 1.0),  # the rule of tags is the exact match's alone
        ("Paris", "Paris", 0.0),
    ],
)
def test_substring_match(text: str, target: str, value: float) -> None:
    assert search_em(text, target, substring=True).value == value


def test_format_and_score_settings() -> None:
    assert search.compute_score("<answer>x</answer>", {"target": "y"}, format_score=0.1) == 0.1
    assert search.compute_score("no tags", {"target": "y"}, format_score=0.1) == 0.0
    assert search.compute_score("<answer>x</answer>" * 11, {"target": "x"}, score=2.0) == 0.5
    assert search.compute_score("<answer>y</answer>" * 11, {"target": "x"}, format_score=0.1) == 0.1


def test_records_say_what_and_why() -> None:
    right, wrong, none = (search_em(text, "Rome") for text in ("<answer> Rome </answer>", "<answer>x</answer>", "Rome"))
    assert (right.answer, right.status) == ("Rome", Status.SCORED)
    assert wrong.scored and "Rome" in wrong.why
    assert none.status is Status.NO_ANSWER and none.answer is None and none.why
    assert search_f1("Rome", "Rome").status is Status.NO_ANSWER


@pytest.mark.parametrize(
    ("answer", "target", "value"),
    [
        ("the big cat", "big cat", 1.0),
        ("big cat", "big dog", 0.5),  # 1 shared: 2·1/(2+2)
        ("cat", "big cat", 2 / 3),  # 2·1/(1+2)
        ("cat cat cat", "cat", 0.5),  # repeats count once each: 2·1/(3+1)
        ("cat cat", "cat cat dog", 0.8),  # 2·2/(2+3)
        ("cat big", "big cat", 1.0),  # order does not count
        ("dog", "cat", 0.0),
        ("", "cat", 0.0),
        ("cat", "the", 0.0),
        ("a", "the", 1.0),
        ("東京 tower", "東京", 2 / 3),
        ("a cat", ["dog", "big cat", "very big cat"], 2 / 3),  # the best target
        ("cat", [], 0.0),
    ],
)
def test_f1_by_hand(answer: str, target: Any, value: float) -> None:
    assert search_f1(f"<answer>{answer}</answer>", target).value == pytest.approx(value)
    assert search_f1(f"<answer>{answer}</answer>", {"target": target}).value == pytest.approx(value)


def test_open_tags_cost_no_more_than_their_length() -> None:
    """The scorer is `bounded`: it runs where nothing can stop it."""
    began = time.process_time()
    assert search_em("<answer>" * 12_000, "x").status is Status.NO_ANSWER
    assert time.process_time() - began < 2


def test_a_right_answer_is_called_right_whatever_it_is_worth() -> None:
    right = search_em("<answer>x</answer>" * 11, "x", format_score=0.25)
    wrong = search_em("<answer>y</answer>" * 11, "x", format_score=0.25)
    assert right.value == wrong.value == 0.25 and right.why != wrong.why


def test_verls_arguments_by_place() -> None:
    assert search.compute_score("<answer>x</answer>", {"target": "y"}, "strict", 0.1) == 0.1


WORDS = st.lists(st.sampled_from(["a", "the", "cat", "Big", "big", "東京", "!", "é"]), max_size=8).map(" ".join)


@given(WORDS, WORDS)
def test_f1_is_symmetric_bounded_and_1_for_equal_bags(one: str, other: str) -> None:
    value = search.f1(one, other)
    assert 0 <= value <= 1 and value == search.f1(other, one) and search.f1(one, one) == 1
    bags = [sorted(search.normalise(text).split()) for text in (one, other)]
    assert (value == 1) == (bags[0] == bags[1])
    assert (value == 0) == (bags[0] != bags[1] and not set(bags[0]) & set(bags[1]))


@given(WORDS, st.lists(WORDS, min_size=1, max_size=3))
def test_f1_never_falls_below_exact_match_nor_with_more_targets(answer: str, targets: list[str]) -> None:
    text = f"<answer>{answer}</answer>"
    assert search_f1(text, targets).value >= search_em(text, targets).value
    assert search_f1(text, targets).value >= search_f1(text, targets[:1]).value


PIECES = ["<answer>", "</answer>", "<answer>Rome</answer>", "Rome", "rome!", "the", " ", "\n", "é", "東京", "<answer"]


@given(
    st.lists(st.sampled_from(PIECES), max_size=40).map("".join),
    st.lists(st.sampled_from(["Rome", "an", "x", ""]), min_size=1),
)
def test_beside_verl(text: str, target: list[str]) -> None:
    verl = pytest.importorskip("verl.utils.reward_score.search_r1_like_qa_em", reason="verl is not installed here")
    settings: dict[str, Any] = {"format_score": 0.125, "score": 2.0}
    truth = {"target": target}
    assert search.compute_score(text, truth, **settings) == verl.compute_score(text, truth, **settings)
    ours = search_em(text, truth, substring=True, format_score=0.125).value
    assert ours == verl.compute_score_subem(text, truth, format_score=0.125)


@pytest.mark.parametrize(("text", "target", "value"), EXACT)
def test_the_table_beside_verl(text: str, target: Any, value: float) -> None:
    verl = pytest.importorskip("verl.utils.reward_score.search_r1_like_qa_em", reason="verl is not installed here")
    assert verl.compute_score(text, {"target": target}) == value


@given(st.text())
def test_any_text_normalises_as_verls(text: str) -> None:
    verl = pytest.importorskip("verl.utils.reward_score.search_r1_like_qa_em", reason="verl is not installed here")
    assert search.normalise(text) == verl.normalize_answer(text)


@pytest.mark.parametrize(
    ("text", "truth", "accuracy", "form"),
    [
        (r"<think>hm</think>\boxed{12}", "12", 1, 1),
        (r"<think>hm</think> so \boxed{12}, done" + "\n", "12", 1, 1),
        (r"<think></think>\boxed{12}", "12", 1, 1),
        (r"<think>a</think>b</think>\boxed{12}", "12", 1, 1),
        (r" <think>hm</think>\boxed{12}", "12", 1, 0),  # the match is full: nothing goes before
        (r"so: <think>hm</think>\boxed{12}", "12", 1, 0),
        (r"<think>\boxed{12}</think>", "12", 1, 0),  # the box comes after the thoughts
        (r"</think><think>\boxed{12}", "12", 1, 0),
        (r"<think>hm</think>\boxed{3}", "12", 0, 1),
        (r"\boxed{3}\boxed{12}", "12", 1, 0),  # the last box
        (r"\boxed{12}\boxed{3}", "12", 0, 0),
        (r"<think>hm</think>12", "12", 0, 0),
        (r"<think>hm</think>\boxed{12", "12", 0, 0),
        (r"\boxed{\frac{1}{2}}", "0.5", 1, 0),
        (r"\boxed{0.5}", r"\frac{1}{2}", 1, 0),
        (r"\boxed{1/2}", "0.5", 1, 0),
        (r"\boxed{2\sqrt{3}}", r"\sqrt{12}", 1, 0),
        (r"\boxed{30^\circ}", "30", 1, 0),
        (r"\boxed{1,000}", "1000", 1, 0),
        (r"\boxed{−3}", "-3", 1, 0),
        (r"\boxed{5.0}", "5", 1, 0),
        (r"\boxed{}", "12", 0, 0),
        ("", "12", 0, 0),
        ("no box", "None", 0, 0),  # mathruler's name for "no box" is right there; not here
        (r"<think>hm</think> None", "None", 0, 0),
    ],
)
def test_geometry(text: str, truth: str, accuracy: float, form: float) -> None:
    score = geometry3k(text, truth)
    assert score.parts == {"accuracy": accuracy, "format": form}
    assert score.value == pytest.approx(0.9 * accuracy + 0.1 * form)
    assert score.why and (score.status is Status.NO_ANSWER) == (score.answer is None)


@pytest.mark.parametrize(("answer", "truth"), [("10001", "10000"), ("12346", "12345"), ("99999", "100000")])
def test_other_integers_are_wrong(answer: str, truth: str) -> None:
    assert geometry3k(rf"\boxed{{{answer}}}", truth).value == 0


@pytest.mark.parametrize("weight", [-0.1, 1.1, float("nan")])
def test_geometry_refuses_other_weights(weight: float) -> None:
    with pytest.raises(SettingError):
        geometry3k(r"\boxed{1}", "1", format_score=weight)


@given(
    st.text(alphabet="0123456789./-+\\{}sqrtfacpi,()%$ ^東٣²", max_size=40), st.sampled_from(["12", r"\frac{1}{2}", ""])
)
def test_geometry_judges_whatever_is_in_the_box(inside: str, truth: str) -> None:
    score = geometry3k("\\boxed{" + inside + "}", truth)
    assert 0 <= score.value <= 1 and (score.scored or score.status is Status.NOT_APPLICABLE)


@given(st.integers(-(10**6), 10**6), st.integers(1, 99))
def test_fractions_equal_themselves_however_written(top: int, bottom: int) -> None:
    assert same_answer(f"{top}/{bottom}", rf"\frac{{{top}}}{{{bottom}}}")
    assert not same_answer(f"{top}/{bottom}", f"{top + 2 * abs(top) + bottom}/{bottom}")
