r"""MATH by string normalisation: exactly verl's `math_reward`, quirks and all.

The last `\boxed{…}` (or `\boxed …` up to a dollar sign) and the ground truth are normalised as strings and
compared. Nothing is computed: `\frac14` is not `0.25`, though `0.5` is `\frac12`, by a rule of its own. For
equivalence as mathematics see `math_verify`. The rules are those of Hendrycks et al. 2021 (MATH).
"""

from __future__ import annotations

from typing import Any

from workbench.rewards.score import Score, Status, bounded, no_truth
from workbench.rewards.scorers.boxes import last_box

_REMOVED = ("\\left", "\\right", "^{\\circ}", "^\\circ", "\\$")


def box(text: str) -> str | None:
    r"""The answer as verl finds it: the last box decides, even where it is unclosed or an `\fbox`."""
    if "\\boxed " in text:
        return text.rsplit("\\boxed ", 1)[1].split("$", 1)[0]
    start = text.rfind("\\boxed")
    # whatever begins there decides, be it `\boxedx{6}`: an earlier good box is hidden by it
    return last_box(text[start:]) if start >= 0 and text.startswith("\\boxed{", start) else None


def normalise(answer: str) -> str:
    """The string that is compared. Raises `ValueError` for what the rules cannot read; then strings count as they are."""
    text = answer.replace("\n", "").replace("\\!", "").replace("\\\\", "\\")
    text = text.replace("tfrac", "frac").replace("dfrac", "frac")
    for part in _REMOVED:
        text = text.replace(part, "")
    text = _without_unit(text).replace("\\\\%", "").replace("\\%", "").replace(" .", " 0.").replace("{.", "{0.")
    if not text:
        return text
    if text.startswith("."):
        text = "0" + text
    sides = text.split("=")
    if len(sides) == 2 and len(sides[0]) <= 2:
        text = sides[1]
    text = _fractions(_roots(text).replace(" ", ""))
    return _slash("\\frac{1}{2}" if text == "0.5" else text)


def _without_unit(text: str) -> str:
    parts = text.split("\\text{ ")
    if len(parts) > 2:
        raise ValueError("two units")
    return parts[0]


def _roots(text: str) -> str:
    """`\\sqrt3` → `\\sqrt{3}`."""
    first, *rest = text.split("\\sqrt")
    for part in rest:
        if not part:
            raise ValueError("a root of nothing")
        first += "\\sqrt" + (part if part[0] == "{" else f"{{{part[0]}}}{part[1:]}")
    return first


def _fractions(text: str) -> str:
    """`\\frac12` → `\\frac{1}{2}`, `\\frac1{72}` → `\\frac{1}{72}`."""
    made, *rest = text.split("\\frac")
    for part in rest:
        made += "\\frac"
        if not part:
            raise ValueError("a fraction of nothing")
        if part[0] == "{":
            made += part
        elif len(part) < 2:
            return text
        elif part[1] == "{":
            made += f"{{{part[0]}}}{part[1:]}"
        else:
            made += f"{{{part[0]}}}{{{part[1]}}}{part[2:]}"
    return made


def _slash(text: str) -> str:
    """`1/2` → `\\frac{1}{2}`, for whole numbers as they are printed."""
    sides = text.split("/")
    if len(sides) != 2:
        return text
    try:
        top, bottom = int(sides[0]), int(sides[1])
        return f"\\frac{{{top}}}{{{bottom}}}" if text == f"{top}/{bottom}" else text
    except ValueError:
        return text


def same(one: str, other: str) -> bool:
    """Equal after normalisation; as they are where that fails."""
    try:
        return normalise(one) == normalise(other)
    except ValueError:
        return one == other


def compute_score(solution_str: str, ground_truth: str) -> float:
    """verl's number: 1.0 or 0.0."""
    answer = box(solution_str)
    return float(answer is not None and same(answer, ground_truth))


@bounded
def math_string(response: str, ground_truth: Any) -> Score:
    """The same number as a record."""
    if ground_truth is None:
        return no_truth()
    answer = box(response)
    if answer is None:
        return Score(status=Status.MODEL_FAILED, why="no closed \\boxed{…} in the response")
    right = same(answer, str(ground_truth))
    return Score(
        value=float(right),
        answer=answer[:200],
        why="the box is right" if right else f"expected {str(ground_truth)[:100]}",
    )
