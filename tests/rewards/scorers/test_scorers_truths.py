"""Truths: what every scorer does with any truth and any text, and the count before a run of those that can never score."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import workbench as wb
import workbench.rewards.scorers.math_dapo as dapo
from workbench.base.errors import DataError, RewardError
from workbench.rewards import Reward, Rubric, Status, as_reward, by_data_source, code, episodes, shaping
from workbench.rewards.reward import SCORERS
from workbench.rewards.score import as_text
from workbench.rewards.scorers import math_string as boxes
from workbench.rewards.scorers.gsm8k import gsm8k
from workbench.rewards.scorers.math_dapo import math_dapo
from workbench.rewards.scorers.math_string import math_string
from workbench.rewards.scorers.numeric import geometry3k, number, numeric
from workbench.rewards.scorers.search import search_em, search_f1
from workbench.testing.rewards import ResponseContract, ScorerContract, answered


class TestGsm8k(ScorerContract):
    right = ("#### 4", "4")

    def make_scorer(self) -> Callable[..., Any]:
        return gsm8k


class TestMathString(ScorerContract):
    right = (r"\boxed{4}", "4")

    def make_scorer(self) -> Callable[..., Any]:
        return math_string


class TestMathDapo(ScorerContract):
    right = ("Answer: 4", "4")

    def make_scorer(self) -> Callable[..., Any]:
        return math_dapo


class TestNumeric(ScorerContract):
    right = (r"\boxed{4}", "4")

    def make_scorer(self) -> Callable[..., Any]:
        return numeric


class TestNumina(ScorerContract):
    right = (r"\boxed{4}", "4")

    def make_scorer(self) -> Callable[..., Any]:
        return SCORERS["numina_olympiads"]


class TestGeometry3k(ScorerContract):
    right = (r"<think>so</think>\boxed{4}", "4")

    def make_scorer(self) -> Callable[..., Any]:
        return geometry3k


class TestSearchExact(ScorerContract):
    right, reads_lists = ("<answer>Rome</answer>", "Rome"), True

    def make_scorer(self) -> Callable[..., Any]:
        return search_em


class TestSearchF1(TestSearchExact):
    def make_scorer(self) -> Callable[..., Any]:
        return search_f1


class TestTaskMinusCalls(TestGsm8k):
    def make_scorer(self) -> Callable[..., Any]:
        return episodes.task_minus_calls()


class TestTaskMinusFlat(TestGsm8k):
    def make_scorer(self) -> Callable[..., Any]:
        return episodes.task_minus_flat()


class TestEpisode(TestGsm8k):
    def make_scorer(self) -> Callable[..., Any]:
        return episodes.episode()


class TestCodeThatRan(ScorerContract):
    right = ("", "4")

    def make_scorer(self) -> Callable[..., Any]:
        scorer = episodes.code_that_ran()

        def with_a_call(response: Any, truth: Any) -> Any:
            if not isinstance(response, str):
                raise RewardError("a printed line", expected="text", found=type(response).__name__)
            calls = [{"name": "python", "status": "ok", "result": response or "4"}]
            return scorer(truth, [{"calls": calls}])

        return with_a_call

    def test_only_the_right_response_has_full_marks(self) -> None:
        assert self.scored(*self.right).value == 1 and self.scored("#### 4", "4").value == 0.5


class TestCode(ScorerContract):
    """No text here has a code block, so that nothing is run."""

    right = ("no block", [["1", "2"]])

    def make_scorer(self) -> Callable[..., Any]:
        return code(object())  # type: ignore[arg-type]

    def test_only_the_right_response_has_full_marks(self) -> None:
        assert self.scored(*self.right).status is Status.NO_ANSWER


class TestThinkAnswer(ResponseContract):
    def make_scorer(self) -> Callable[..., Any]:
        return shaping.think_answer_format


class TestBoxed(ResponseContract):
    def make_scorer(self) -> Callable[..., Any]:
        return shaping.boxed_format


class TestLength(ResponseContract):
    def make_scorer(self) -> Callable[..., Any]:
        return shaping.length_penalty()


class TestRepetition(ResponseContract):
    def make_scorer(self) -> Callable[..., Any]:
        return shaping.repetition()


def test_the_contract_holds_for_every_scorer_of_the_table() -> None:
    tried = {kind().make_scorer() for kind in (TestGsm8k, TestMathString, TestMathDapo, TestNumina, TestGeometry3k, TestSearchExact)}  # fmt: skip
    assert set(SCORERS.values()) <= tried


@pytest.mark.parametrize(
    ("truth", "text"),
    [
        (4, "4"), (-3, "-3"), (4.0, "4"), (0.5, "0.5"), (1e-7, "0.0000001"), (np.int64(4), "4"), (np.float32(0.5), "0.5"),
        (np.array(4), "4"), (np.str_("x"), "x"), (Decimal("4.00"), "4"), (Decimal("0.10"), "0.10"), (Fraction(1, 2), "1/2"),
        (10**20, "1" + "0" * 20), (1e20, "1" + "0" * 20), (" 4", " 4"), (None, None), (float("nan"), None), ("", None),
        (" \n", None), ([4], None), ({"a": 4}, None), (b"4", None), (Decimal("NaN"), None), (object(), None),
    ],
)  # fmt: skip
def test_a_truth_as_text(truth: Any, text: str | None) -> None:
    assert as_text(truth) == text and as_text(10**5000) is None


@pytest.mark.parametrize(
    "truth", [1000, 1000.0, np.int64(1000), np.float64(1000), "1,000", "1000.0", " 1000 ", "1,000.00"]
)
def test_gsm8k_reads_a_truth_however_it_is_written(truth: Any) -> None:
    assert [gsm8k(text, truth).value for text in ("#### 1000", "#### 1,000", "#### 100", "1000")] == [1, 1, 0, 0]
    assert gsm8k("it is 1,000", truth, method="flexible").value == float(truth in ("1,000",))


@pytest.mark.parametrize("truth", ["abc", "$18", "１８", "x #### 18", "9" * 400, True, "-", "..."])
def test_a_truth_that_gsm8k_can_never_meet_is_not_applicable(truth: Any) -> None:
    found = gsm8k("#### 18", truth, format_score=0.1)
    assert found.status is Status.NOT_APPLICABLE and "no answer can match" in found.why


@pytest.mark.parametrize("scorer", [math_string, math_dapo, numeric, geometry3k])
@pytest.mark.parametrize("truth", [12, 12.0, np.int32(12), "12"])
def test_numbers_are_truths_for_every_rule(scorer: Any, truth: Any) -> None:
    assert scorer("Answer: 12\n\\boxed{12}" if scorer is not math_dapo else "Answer: 12", truth).value > 0.8


@pytest.mark.parametrize("truth", ["nan", "NaN", " <NA>", "NaT"])
def test_what_pandas_writes_for_a_missing_truth_is_none(truth: str) -> None:
    """`astype(str)` makes it of a missing cell; most rules scored it as a wrong answer."""
    for scorer in (gsm8k, math_string, math_dapo, numeric, geometry3k, search_em, search_f1):
        assert scorer("Answer: 4 #### 4 <answer>4</answer> \\boxed{4}", truth).status is Status.NOT_APPLICABLE, scorer


def test_search_knows_no_empty_target() -> None:
    """An answer of no words would meet each of them."""
    for target in ("", " ", [None, ""], {"target": []}, {"target": float("nan")}, {"other": "x"}):
        for scorer in (search_em, search_f1):
            assert scorer("<answer></answer>", target).status is Status.NOT_APPLICABLE, target
    assert search_em("<answer></answer>", ["Rome", ""]).value == 0


@pytest.mark.parametrize(
    ("answer", "truth", "value"),
    [
        ("x+1", "1+x", 1), ("x+2", "1+x", 0), (r"\frac{x}{2}", "x/2", 1), ("(x, 1+y)", "(x, y+1)", 1), ("2^{3x}", "8^x", 1),
        ("4", "4", 1), ("5", "4", 0), ("4", 4, 1), ("0.5", r"\frac{1}{2}", 1), ("B", "C", 0), (r"\text{even}", "even", 1),
        ("odd", "even", 0), ("listen", "silent", 0), ("hello", "1+x", 0), ("10^{10^{10^{10}}}", "1+x", 0), ("100!", "1+x", 0),
        (r"\sqrt", "1+x", 0), ("x" * 600, "1+x", 0), ("6", "5", 0), ("hello world", "5", 0), (r"\text{I do not know}", "5", 0),
        ("5 apples", "5", 0), ("?!", "5", 0), ("2+3", "5", 1), ("7", r"\begin{pmatrix}1\\2\end{pmatrix}", 0),
        (r"\begin{bmatrix}1\\2\end{bmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}", 1), ("(x+2)^2", "x^2+4x+4", 1),
        ("x^2+y^2+4x-6y+13", "(x + 2)^2 + (y - 3)^2 ", 1), ("2^{2024}-1", "4^{1012}-1", 1), ("3", r"x \text{ and } y", None),
        (r"x \text{ and } y", r"x \text{ and } y", None), ("1+x", "10^{10^{10}}", None),
    ],
)  # fmt: skip
def test_numina_compares_algebra_and_the_truth_alone_decides_what_it_cannot(
    answer: str, truth: Any, value: float | None
) -> None:
    """An answer that was no expression left its row unscored, and so out of all means: nonsense was never punished."""
    (score,) = by_data_source().score(answered([f"\\boxed{{{answer}}}"], [truth], data_source=["numina_cn_k12"]))
    assert (score.value if score.scored else None) == value, score


@pytest.mark.parametrize(
    "answer", ["x+1", "hello", "2,3", "1/0", "[1", "\\pi+1", "5 apples", "?!", "\\text{I do not know}"]
)
def test_what_is_no_number_is_wrong_and_the_truth_decides_whether_it_can_be_compared(answer: str) -> None:
    assert numeric(f"\\boxed{{{answer}}}", "1+x").status is Status.NOT_APPLICABLE
    assert numeric("\\boxed{1+x}", "1+x").status is Status.NOT_APPLICABLE
    for scorer, truth in (
        (geometry3k, "12"),
        (numeric, "12"),
        (numeric, "(1, 2)"),
        (geometry3k, "B"),
        (numeric, "no root"),
    ):
        score = scorer(f"\\boxed{{{answer}}}", truth)
        assert score.scored and score.value == 0, (scorer, truth, score)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r"\frac{7\sqrt{2}}{2}", 7 * 2**0.5 / 2), (r"\frac { 225 } { 7 }", 225 / 7), (r"4 \sqrt 3", 4 * 3**0.5), ("2+3", 5.0),
        (r"1\frac{1}{2}", 1.5), (r"2^{10}", 1024.0), ("2(3)", 6.0), ("007/7", 1.0), ("10.003", 10.003), (r"\left(3\right)", 3.0),
        (r"-\frac12", -0.5), (r"3\cdot 4", 12.0), (r"\frac{15}{\sqrt{3}}", 15 / 3**0.5), ("2 3", None), ("10_2", None),
        ("9**9**9**9", None), ("1//2", None), ("0x10", None), (r"\sqrt{-1}", None), ("x", None), ("()", None), ("1/0", None),
    ],
)  # fmt: skip
def test_arithmetic_is_read_as_a_number(text: str, value: float | None) -> None:
    assert number(text) == (None if value is None else pytest.approx(value, rel=1e-12))


ANYTHING = st.one_of(
    st.text(max_size=40),
    st.lists(st.sampled_from([
        "\\boxed{", "}", "####", " 5", "5", "\\frac", "{", "Answer:", "answer is ", "<answer>", "</answer>", "</think>", "x", "^", "!",
        "\\text{no idea}", "?", "\ud800", "\x00", "9" * 400, "1e999", "nan", "inf", "-", "(", ",", ")", "４", "```python\n", "\n```",
    ]), max_size=8).map("".join),
)  # fmt: skip


@given(ANYTHING)
def test_no_response_decides_that_its_row_is_not_scored(response: str) -> None:
    """With a truth that is understood, whatever the model writes is scored: right, wrong, or no answer."""
    sources = [source for source in SCORERS if not source.startswith("numina_")]
    for text in (
        response,
        f"\\boxed{{{response}}}",
        f"<answer>{response}</answer>",
        f"Answer: {response}",
        f"#### {response}",
    ):
        for source in ("gsm8k", "math", "lighteval/MATH", "hiyouga/geometry3k", "searchR1_nq"):
            assert source in sources
            score = SCORERS[source](text, "5")
            assert score.scored, (source, text, score)
        assert numeric(text, "5").scored and search_f1(text, "5").scored


@pytest.mark.slow
@given(ANYTHING)
@settings(max_examples=40, deadline=None)
def test_no_response_to_numina_decides_that_its_row_is_not_scored(response: str) -> None:
    truths = ["5", "1+x", r"\begin{pmatrix}1\\2\end{pmatrix}"]
    texts = [f"\\boxed{{{response}}}"] * 3
    for score in by_data_source().score(answered(texts, truths, data_source=["numina_cn_k12"] * 3)):
        assert score.scored, (response, score)


@given(st.one_of(st.integers(), st.floats(), st.text(max_size=30), st.none(), st.lists(st.integers(), max_size=2)))
def test_a_truth_is_met_by_its_own_right_response_or_not_applicable(truth: Any) -> None:
    for scorer, response in ((gsm8k, "#### {}"), (math_string, "\\boxed{{{}}}"), (numeric, "\\boxed{{{}}}"), (math_dapo, "Answer: {}")):  # fmt: skip
        score = scorer(response.format(as_text(truth) or ""), truth)
        assert not score.scored or score.value == 1, (scorer, truth, score)


# --- before a run ---------------------------------------------------------------------------------


def rows(truths: list[Any], source: str = "openai/gsm8k", **columns: Any) -> Any:
    prompt = [{"role": "user", "content": "q"}]
    return [
        {"prompt": prompt, "data_source": source, "reward_model": {"ground_truth": truth}, "extra_info": {}, **columns}
        for truth in truths
    ]


def test_rows_that_no_response_can_score_are_counted_before_a_run() -> None:
    reward = by_data_source()
    assert reward.check_rows(rows(["4", 4, "1,000", 4.0])) == ""
    note = reward.check_rows(rows(["4", None, "abc", [4], ""]))
    assert "1 of 5 truths can score 1 by openai/gsm8k" in note and "1 missing" in note and "1 empty" in note
    assert "row 1: the row has no ground truth" in note
    with pytest.raises(DataError, match=r"0 of 4 truths can ever score 1 by math.*4 lists.*row 0: .*\['7'\]"):
        reward.check_rows(rows([["7"]] * 4, "math"))
    with pytest.raises(DataError, match="0 of 2 truths"):
        reward.check_rows([*rows(["4"] * 6), *rows([None, None], "searchR1_nq")])


def test_every_reward_made_of_a_rule_counts_them() -> None:
    from functools import partial

    bad = rows(["abc", None])
    for reward in (
        as_reward(gsm8k), as_reward(wb.rewards.gsm8k), as_reward(episodes.episode()), Rubric({"right": gsm8k}),
        Reward(partial(gsm8k, method="flexible"), in_process=True, name="flexible"), as_reward(episodes.code_that_ran()),
    ):  # fmt: skip
        if "code_that_ran" in reward.name:
            assert "1 of 2" in reward.check_rows(bad)
            continue
        with pytest.raises(DataError, match="0 of 2 truths"):
            reward.check_rows(bad)
    assert as_reward(lambda response: 1.0).check_rows(bad) == ""
    assert "right: 1 of 2" in Rubric({"right": gsm8k}).check_rows(rows(["4", "abc"]))


def test_rows_are_looked_at_without_copies() -> None:
    held = wb.datasets.Rows(rows(["4"] * 3, more={"deep": [1]}))
    views = list(held.views())
    assert views[0]["more"] is next(iter(held.views()))["more"] and dict(views[1]) == held[1]
    with pytest.raises(TypeError):
        views[0]["prompt"] = 1  # type: ignore[index]
    assert by_data_source().check_rows(held.views()) == ""


def test_code_rows_without_readable_tests_are_refused_before_a_run() -> None:
    reward = as_reward(code(object()))  # type: ignore[arg-type]
    assert reward.check_rows(rows([{"inputs": ["1"], "outputs": ["1"]}])) == ""
    with pytest.raises(DataError, match="1 of 2 rows cannot be read by code"):
        reward.check_rows(rows(["not tests", None], "apps"))


@pytest.mark.parametrize("truth", [4, 4.0, np.int64(4), "4"])
def test_the_plain_numbers_of_a_rule_read_numbers(truth: Any) -> None:
    assert wb.rewards.gsm8k.compute_score("#### 4", truth) == 1.0
    assert wb.rewards.gsm8k.compute_score("#### 5", truth, format_score=0.1) == 0.1
    assert boxes.compute_score("\\boxed{4}", truth) == 1.0
    assert dapo.compute_score("Answer: 4", truth)["score"] == 1.0
    assert dapo.compute_score("\\boxed{4}", truth, strict_box_verify=True)["acc"]


def test_verls_texts_are_compared_as_texts() -> None:
    assert wb.rewards.gsm8k.compute_score("#### 4", "4.0") == 0.0
    assert wb.rewards.gsm8k.compute_score("#### 4", None) == 0.0
