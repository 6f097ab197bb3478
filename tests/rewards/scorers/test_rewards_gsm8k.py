"""GSM8K exactly as verl scores it, quirks and all."""

from __future__ import annotations

import pytest

from workbench.rewards import Status
from workbench.rewards.scorers.gsm8k import compute_score, extract_answer, gsm8k, reference_answer


@pytest.mark.parametrize(
    ("text", "truth", "strict"),
    [
        ("#### 18", "18", 1.0),
        ("so #### 18 it is", "18", 1.0),
        ("#### 17\n#### 18", "18", 1.0),  # the last one counts
        ("#### 1,234", "1234", 1.0),
        ("#### 18,", "18", 1.0),
        ("#### -3", "-3", 1.0),
        ("#### 18.", "18", 0.0),
        ("#### 18.0", "18", 0.0),
        ("####18", "18", 0.0),
        ("####  18", "18", 0.0),
        ("#### $18", "18", 0.0),
        ("#### +18", "18", 0.0),
        ("#### **18**", "18", 0.0),
        (r"\boxed{18}", "18", 0.0),
        ("#### −3", "-3", 0.0),
        ("#### 1/2", "1", 1.0),
        ("#### 1e3", "1", 1.0),
        ("#### 5%", "5", 1.0),
        ("#### 18" + "x" * 300, "18", 0.0),  # pushed out of the window
        ("", "18", 0.0),
    ],
)
def test_strict(text: str, truth: str, strict: float) -> None:
    assert compute_score(text, truth) == strict
    assert gsm8k(text, truth).value == strict


@pytest.mark.parametrize(
    ("text", "truth", "value"),
    [
        ("it is 18", "18", 1.0),
        ("1,000", "1000", 0.0),
        ("18.", "18", 0.0),
        ("−3", "3", 1.0),
        ("none", "3", 0.0),
        ("4 . ", "4", 1.0),
    ],
)
def test_flexible(text: str, truth: str, value: float) -> None:
    assert compute_score(text, truth, method="flexible") == value


def test_the_plain_number_and_the_scorer_read_a_truth_that_is_a_number() -> None:
    assert compute_score("#### 18", 18) == 1.0 and gsm8k("#### 18", 18).value == 1.0


def test_format_score_is_for_wrong_answers_alone() -> None:
    assert compute_score("#### 3", "4", format_score=0.1) == 0.1
    assert compute_score("3", "4", format_score=0.1) == 0.0
    assert compute_score("#### 4", "4", score=2.0) == 2.0


def test_records_say_what_and_why() -> None:
    right, wrong, none = gsm8k("#### 4", "4"), gsm8k("#### 5", "4"), gsm8k("four", "4")
    assert (right.answer, right.status) == ("4", Status.SCORED) and "right" in right.why
    assert wrong.answer == "5" and wrong.why == "the answer is 4" and wrong.scored
    assert none.status is Status.NO_ANSWER and none.scored and none.answer is None


def test_reference_answers_and_methods() -> None:
    assert reference_answer("a\n#### 1,000\n#### 3") == "1000"
    assert extract_answer("#### 2", "strict") == "2"
    with pytest.raises(ValueError, match="'strict' or 'flexible'"):
        extract_answer("1", "loose")
