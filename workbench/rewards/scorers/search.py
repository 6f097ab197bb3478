"""Answers in `<answer>` tags against one or more targets: Search-R1's exact match as verl scores it, and F1."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from workbench.rewards.score import Score, as_text, no_answer, rule

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
MANY_TAGS = 10
"""More opening or closing tags than this divide a right answer's score by four."""


def normalise(text: str) -> str:
    """A text in lower case, without ASCII punctuation and articles, with single spaces (SQuAD's rule)."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def extract_answer(text: str) -> str | None:
    """The text in the last `<answer>…</answer>`; None without one."""
    # each piece ends at a closing tag; a lazy pattern would be quadratic in opening tags that are never closed
    pieces = text.split("</answer>")[:-1]
    return next((piece.split("<answer>", 1)[1].strip() for piece in reversed(pieces) if "<answer>" in piece), None)


def targets(ground_truth: Any) -> list[str]:
    """List the accepted answers of a ground truth, which is `{"target": text or list}`, a list or a text."""
    wanted = ground_truth.get("target") if isinstance(ground_truth, Mapping) else ground_truth
    several = wanted if isinstance(wanted, Iterable) and not isinstance(wanted, str) else [wanted]
    return [str(one) for one in several if one is not None]


def compute_score(
    solution_str: str,
    ground_truth: Any,
    method: str = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
    substring: bool = False,
) -> float:
    """Search-R1's number, as verl computes it: `score` where right (a quarter of it with more than `MANY_TAGS` tags),
    `format_score` where wrong, 0 without an answer; see `is_right`. `method` has no effect, as in verl.

    A quirk of verl is kept: an answer that normalises to nothing equals a target that does.
    """
    answer = extract_answer(solution_str)
    if answer is None or not is_right(answer, ground_truth, substring):
        return 0.0 if answer is None else format_score
    many = max(solution_str.count("<answer>"), solution_str.count("</answer>")) > MANY_TAGS
    return score / 4 if many and not substring else score


def is_right(answer: str, ground_truth: Any, substring: bool = False) -> bool:
    """Whether an answer equals a target after `normalise`, or with `substring` contains one."""
    ours = normalise(answer)
    theirs = [normalise(target) for target in targets(ground_truth)]
    return any(each in ours for each in theirs) if substring else ours in theirs


def _read(ground_truth: Any) -> tuple[str, ...] | None:
    """List the targets that are not blank, as an answer without words would match a blank one; None if there are none."""
    wanted = ground_truth.get("target") if isinstance(ground_truth, Mapping) else ground_truth
    several = wanted if isinstance(wanted, Iterable) and not isinstance(wanted, str | bytes) else [wanted]
    texts = [as_text(one) for one in several if one is not None]
    return tuple(text for text in texts if text is not None) or None


def _right(wanted: Sequence[str]) -> str:
    return f"<answer>{next((text for text in wanted if '</answer>' not in text), '')}</answer>"


def _matches(response: str, wanted: Sequence[str]) -> bool:
    return is_right(extract_answer(response) or "", wanted)


@rule(_right, _matches, _read)
def search_em(response: str, ground_truth: Any, *, substring: bool = False, format_score: float = 0.0) -> Score:
    """Score the text in `<answer>` tags by Search-R1's exact match (see `compute_score`), with the reason.

    A blank target does not count, and a row without another is *not applicable*.
    """
    answer = extract_answer(response)
    if answer is None:
        return no_answer("no <answer>…</answer> in the response")
    value = compute_score(response, ground_truth, format_score=format_score, substring=substring)
    right = is_right(answer, ground_truth, substring)
    return Score(value=value, answer=answer, why="a target is met" if right else f"expected {_some(ground_truth)}")


@rule(_right, _matches, _read)
def search_f1(response: str, ground_truth: Any) -> Score:
    """Score the text in `<answer>` tags by its word F1 with the best target, in [0, 1] (SQuAD's; Rajpurkar et al. 2016)."""
    answer = extract_answer(response)
    if answer is None:
        return no_answer("no <answer>…</answer> in the response")
    value = max(f1(answer, target) for target in targets(ground_truth))
    return Score(value=value, answer=answer, why=f"F1 {value:.2f} with {_some(ground_truth)}")


def f1(answer: str, target: str) -> float:
    """Word F1 of two texts after `normalise`, in [0, 1]; it is 1 for two texts without words."""
    ours, theirs = normalise(answer).split(), normalise(target).split()
    if not ours or not theirs:
        return float(ours == theirs)
    shared = sum((Counter(ours) & Counter(theirs)).values())
    return 2 * shared / (len(ours) + len(theirs))


def _some(ground_truth: Any) -> str:
    return " or ".join(target[:60] for target in targets(ground_truth)[:3])
