"""MATH, DAPO and numeric answers: the reference's rows as tables, beside verl where it is installed, and hostile text."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.patience import LONG

from workbench.rewards import Status, math_dapo, math_string, math_verify, numeric
from workbench.rewards.scorers import math_dapo as dapo
from workbench.rewards.scorers import math_string as strings
from workbench.rewards.scorers.equivalence import normalise
from workbench.rewards.scorers.numeric import extract_answer, number, same_answer
from workbench.testing.rewards import answered


@pytest.mark.parametrize(
    ("box", "truth", "value"),
    [
        (".5", "0.5", 1), ("1/2", "0.5", 1), ("x=5", "5", 1), (r"5\text{ cm}", "5", 1), (r"50\%", "50", 1), (r"\$5", "5", 1),
        (r"\frac12", r"\frac{1}{2}", 1), (r"\dfrac{1}{2}", r"\frac12", 1), (r"\sqrt3", r"\sqrt{3}", 1), (r"\left(1, 2\right)", "(1,2)", 1), (r"90^\circ", "90", 1),
        ("0.50", "0.5", 0), ("2/4", "1/2", 0), (r"5\text{cm}", "5", 0), ("1,000", "1000", 0), ("50%", "50", 0),
        ("2, 1", "1, 2", 0), (r"\text{A}", "A", 0), ("10^{3}", "1000", 0), ("0.25", r"\frac14", 0),
    ],
)  # fmt: skip
def test_math_as_verl_scores_strings(box: str, truth: str, value: int) -> None:
    assert strings.compute_score(f"so \\boxed{{{box}}}.", truth) == value
    assert math_string(f"so \\boxed{{{box}}}.", truth).value == value


def test_which_box_counts() -> None:
    assert (
        strings.compute_score(r"\boxed{5} \boxed", "5") == 0
        and strings.compute_score(r"\boxed{5} \boxedx{6}", "5") == 0
    )
    assert normalise("5\\\\%") == normalise("5\\%") == "5"
    assert dapo.compute_score("\\boxed{5}\nAnswer: [INVALID]", "5")["score"] == 1
    assert strings.compute_score(r"\boxed{1} then \boxed{2}", "2") == 1
    assert strings.compute_score(r"\boxed{2} and \boxed{3", "2") == 0  # a later unclosed box hides the good one
    assert strings.compute_score(r"so $\boxed 7$ it is", "7") == 1
    assert strings.compute_score(r"\fbox{7}", "7") == 0
    nothing = math_string("it is 7", "7")
    assert nothing.status is Status.NO_ANSWER and "no closed" in nothing.why and nothing.scored


@pytest.mark.parametrize(
    ("text", "truth", "value"),
    [
        ("Answer: 34", "34", 1), ("answer:\n34", "34", 1), ("Answer: x=7", "7", 1), ("Answer: 1,000", "1000", 1),
        (r"Answer: $\frac12$", r"\frac{1}{2}", 1), (r"Answer: \boxed{34}", "34", 1), ("Answer: 5 cm", "5", 1),
        (r"\boxed{34}", "34", 1), ("**Answer:** 34", "34", -1), ("Answer: 34.", "34", -1), (r"\boxed{034}", "34", -1),
        ("34", "34", -1), ("Answer: 1\nAnswer: 2", "2", 1), ("Answer: 34" + " " * 300, "34", -1),
    ],
)  # fmt: skip
def test_dapos_answer_line(text: str, truth: str, value: int) -> None:
    result = dapo.compute_score(text, truth)
    assert result["score"] == value and result["acc"] is (value == 1)
    score = math_dapo(text, truth)
    assert score.value == value and score.parts["acc"] == float(value == 1)


def test_dapos_boxes_alone() -> None:
    assert dapo.compute_score(r"Answer: 3 \boxed{4}", "4", strict_box_verify=True)["score"] == 1
    assert dapo.compute_score("Answer: 4", "4", strict_box_verify=True)["pred"] is None


@pytest.mark.parametrize(
    ("text", "truth", "value"),
    [
        ("The answer is 0.5.", "1/2", 1), ("so the answer is 1,234", "1234", 1), (r"\boxed{\frac{3}{4}}", "0.75", 1),
        ("answer: 50%", "0.5", 1), ("answer: 50", "0.5", 0), (r"\boxed{(1, \frac{1}{2})}", "(1, 0.5)", 1),
        ("answer: [0, 1)", "[0, 1]", 0), (r"\boxed{2\sqrt{2}}", "2.8284271", 1), (r"\boxed{2\pi}", "6.2831853", 1),
        ("answer: (1, 2, 3)", "(1, 2)", 0), ("answer: −3", "-3", 1), ("nothing here", "3", 0),
        ("<think>the answer is 4</think> The final answer is 5", "5", 1),
    ],
)  # fmt: skip
def test_numeric_answers(text: str, truth: str, value: int) -> None:
    assert numeric(text, truth).value == value


def test_verls_lenience_is_a_choice() -> None:
    for answer in ("50", "0.5", "0.005"):
        assert same_answer(answer, "0.5", lenient=True) and same_answer(answer, "0.5") is (answer == "0.5")
    assert number("1e400") is None and number("9" * 80) is None and number("1/0") is None


@pytest.mark.parametrize(
    ("answer", "truth", "value"),
    [
        (r"\boxed{0.5}", r"\frac{1}{2}", 1), ("1,000", "1000", 1), (r"\boxed{5\text{ cm}}", "5", 1), (r"\boxed{x=5}", "5", 1),
        (r"\boxed{0.333333}", r"\frac{1}{3}", 1), (r"\boxed{0.3333}", r"\frac{1}{3}", 0), (r"\boxed{\sqrt{2}}", "1.41421356", 1),
        (r"\boxed{3} or \boxed{7}", r"\{3,7\}", 1), (r"\boxed{3} or \boxed{7}", "7", 0), ("so it is 7", "7", 1),
        (r"<think>\boxed{9}</think>\boxed{7}", "7", 1), ("<think>it is 7", "7", 0), ("hello", "7", 0),
    ],
)  # fmt: skip
@pytest.mark.slow
def test_equivalence_as_mathematics(answer: str, truth: str, value: int, verifier: Any) -> None:
    score = verifier.score(answered([answer], [truth]))[0]
    assert score.scored and score.value == value, score


@pytest.fixture(scope="module")
def verifier() -> Any:
    made = math_verify(workers=1, timeout=LONG)
    yield made
    made.close()


@pytest.mark.slow
def test_a_tower_of_powers_is_wrong_and_an_unreadable_truth_says_so() -> None:
    """It was *infra_error*: a response that hangs its judge was never punished."""
    reward = math_verify(workers=1, timeout=1.0)
    rows = answered([r"\boxed{10^{10^{10^{10}}}}", r"\boxed{4}", r"\boxed{5}"], ["5", "4", ""])
    scores = reward.score(rows)
    assert [score.scored for score in scores] == [True, True, False] and [score.value for score in scores] == [0, 1, 0]
    assert scores[2].status is Status.NOT_APPLICABLE and "cannot be read as mathematics" in scores[2].why
    strict = math_verify(strict=True, workers=1, timeout=LONG)
    boxed, plain = strict.score(answered([r"\boxed{7}", "so it is 7"], ["7", "7"]))
    assert boxed.value == 1 and plain.value == 0 and plain.status is Status.NO_ANSWER


# --- hostile text -------------------------------------------------------------------------------


def hostile(marker: Path) -> list[str]:
    call = f"__import__('pathlib').Path({str(marker)!r}).touch()"
    return [
        call, f"().__class__.__base__.__subclasses__() or {call}", f"\\pi + {call}", f"\\begin{{pmatrix}}{call}\\end{{pmatrix}}",
        "9**9**9**9", "(" * 100_000, "\\frac" * 50_000, "{" * 100_000, "\\sqrt{" * 20_000, "," * 100_000, "9" * 100_000,
    ]  # fmt: skip


@pytest.mark.slow
def test_no_scorer_runs_an_answer_or_lingers_over_it(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    for text in hostile(marker):
        for wrapped in (text, f"\\boxed{{{text}}}", f"Answer: {text}", f"the answer is ({text}, 2)"):
            for scorer in (math_string, math_dapo, numeric):
                began = time.process_time()
                assert scorer(wrapped, "7").value <= 0, text[:40]
                assert time.process_time() - began < 4
    assert not marker.exists()


# --- beside verl ----------------------------------------------------------------------------------

PIECES = [
    "\\boxed{", "\\boxed ", "\\fbox{", "}", "{", "$", "Answer:", "answer : ", "\n", "12", "3", "0.5", ".", ",", "=", "x", "k=",
    "\\frac", "\\dfrac", "\\sqrt", "\\text{ cm}", "\\text{", "\\%", "\\$", "^\\circ", "\\left(", "\\right)", "/", " ", "-",
    "1/2", "1,000", "cents", "\\!", "\\\\", "a ", "\\boxed", "[INVALID]", "\\\\\\%", "\\", "%",
]  # fmt: skip


@given(st.lists(st.sampled_from(PIECES), max_size=14), st.lists(st.sampled_from(PIECES[9:]), min_size=1, max_size=4))
def test_beside_verl(parts: list[str], truth: list[str]) -> None:
    verls = pytest.importorskip("verl.utils.reward_score.math_reward")
    verl_dapo = pytest.importorskip("verl.utils.reward_score.math_dapo")
    text, wanted = "".join(parts), "".join(truth)
    assert strings.compute_score(text, wanted) == verls.compute_score(text, wanted)
    theirs = verl_dapo.compute_score(text, wanted)
    ours = dapo.compute_score(text, wanted)
    assert (ours["score"], ours["acc"]) == (theirs["score"], theirs["acc"])


def test_extraction_prefers_markers_to_boxes_and_answers_to_thinking() -> None:
    assert extract_answer(r"\boxed{1} so the answer is 2.") == "2"
    assert extract_answer(r"the answer is \boxed{3}") == "3"
    assert extract_answer("no such thing") is None
