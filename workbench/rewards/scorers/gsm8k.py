"""GSM8K: the number behind `####`, exactly as verl scores it.

Only the last 300 characters are searched. *strict* wants `#### ` (one space), an optional ASCII minus, then digits, dots
and commas; the last one counts, its commas go, and it must equal the ground truth as a string: `18.0` is not `18`.
*flexible* takes the last number anywhere, commas and all. Nothing found scores 0, a wrong answer `format_score`.

The scorer `gsm8k` reads more truths than verl, which compares texts: numbers (`18`, `18.0`), and texts with commas or a
`.0` (`1,000`). A truth that is no number is *not applicable*.
"""

from __future__ import annotations

import re
from typing import Any

from workbench.base.errors import RewardError
from workbench.rewards.score import Score, as_text, as_written, no_answer, rule

WINDOW = 300
"""Characters at the end of a response that are searched."""
_STRICT = re.compile(r"#### (\-?[0-9\.\,]+)")
_FLEXIBLE = re.compile(r"(\-?[0-9\.\,]+)")


def extract_answer(solution: str, method: str = "strict") -> str | None:
    """The number after the last `####` (`flexible`: the last number) as text, or None. `ValueError` for other methods."""
    tail = solution[-WINDOW:]
    if method == "strict":
        found = _STRICT.findall(tail)
        return found[-1].replace(",", "") if found else None
    if method == "flexible":
        numbers = [text for text in _FLEXIBLE.findall(tail) if text not in ("", ".")]
        return numbers[-1] if numbers else None
    raise ValueError(f"gsm8k has no method {method!r}; expected 'strict' or 'flexible'")


def reference_answer(worked: str) -> str:
    """Extract the ground truth from a worked solution: the number after the first `#### `, without commas. Raises
    `RewardError` without one."""
    match = _STRICT.search(worked)
    if match is None:
        raise RewardError("the end of a reference answer", expected="a line '#### <number>'", found=repr(worked[-60:]))
    return match[1].replace(",", "")


def compute_score(
    solution_str: str, ground_truth: Any, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """GSM8K's number, as verl computes it: `score` where right, `format_score` where wrong, 0 without an answer.

    A truth that is a number counts as its text (`4.0` as `4`), where verl's comparison is false.
    """
    answer = extract_answer(solution_str, method)
    return 0.0 if answer is None else score if answer == as_written(ground_truth) else format_score


def accepted(truth: str) -> tuple[str, str]:
    """Return the texts that an answer may equal: the ground truth as it stands, and without commas and a final `.0`."""
    plain = truth.strip()
    return plain, re.sub(r"(?<=\d)\.0*$", "", plain.replace(",", ""))


def _matches(response: str, truth: str) -> bool:
    return re.search(r"[0-9]", truth) is not None and extract_answer(response) in accepted(truth)


@rule(lambda truth: f"#### {accepted(truth)[1]}", _matches)
def gsm8k(
    response: str, ground_truth: str, *, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> Score:
    """Score a response by GSM8K's rule (see `compute_score`), with the extracted answer and the reason."""
    answer = extract_answer(response, method)
    if answer is None:
        wanted = "no '#### <number>'" if method == "strict" else "no number"
        return no_answer(f"{wanted} in the last {WINDOW} characters")
    right = answer in accepted(ground_truth)
    why = "the answer is right" if right else f"the answer is {ground_truth}"
    return Score(value=score if right else format_score, answer=answer, why=why)


def written_truth(truth: Any) -> str | None:
    """Write a row's ground truth as GSM8K's answers are, without commas and a final `.0`; None if no answer can match
    it."""
    return None if gsm8k.unscorable(truth) else accepted(as_text(truth) or "")[1]  # type: ignore[attr-defined]
