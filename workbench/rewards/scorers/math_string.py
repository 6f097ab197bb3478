r"""MATH by string normalisation: exactly verl's `math_reward`, quirks and all.

The last `\boxed{…}` (or `\boxed …` up to a dollar sign) and the ground truth are normalised as strings and
compared. Nothing is computed: `\frac14` is not `0.25`, though `0.5` is `\frac12`, by a rule of its own. For
equivalence as mathematics see `math_verify`. The rules are those of Hendrycks et al. 2021 (MATH).
"""

from __future__ import annotations

from workbench.rewards.score import Score, compared, no_answer
from workbench.rewards.truths import rule

_REMOVED = ("\\left", "\\right", "^{\\circ}", "^\\circ", "\\$")


def box(text: str) -> str | None:
    r"""The answer as verl finds it: in the last `\boxed{…}`, or after `\boxed ` up to a `$`; None where there is none."""
    if "\\boxed " in text:
        return text.rsplit("\\boxed ", 1)[1].split("$", 1)[0]
    start = text.rfind("\\boxed")
    # whatever begins there decides, be it `\boxedx{6}`: an earlier good box is hidden by it
    return last_box(text[start:]) if start >= 0 and text.startswith("\\boxed{", start) else None


def normalise(answer: str) -> str:
    """Normalise an answer by MATH's string rules. Raises `ValueError` for one that the rules cannot read."""
    text = answer.replace("\n", "").replace("\\!", "").replace("\\\\", "\\")
    text = text.replace("tfrac", "frac").replace("dfrac", "frac")
    for part in _REMOVED:
        text = text.replace(part, "")
    text, *units = text.split("\\text{ ")
    if len(units) > 1:
        raise ValueError("the answer has more than one \\text{ …} unit")
    text = text.replace("\\\\%", "").replace("\\%", "").replace(" .", " 0.").replace("{.", "{0.")
    if not text:
        return text
    text = "0" + text if text.startswith(".") else text
    sides = text.split("=")
    if len(sides) == 2 and len(sides[0]) <= 2:
        text = sides[1]
    text = _fractions(_roots(text).replace(" ", ""))
    return _slash("\\frac{1}{2}" if text == "0.5" else text)


def _roots(text: str) -> str:
    """`\\sqrt3` → `\\sqrt{3}`."""
    first, *rest = text.split("\\sqrt")
    for part in rest:
        if not part:
            raise ValueError("the answer has a \\sqrt of nothing")
        first += "\\sqrt" + (part if part[0] == "{" else f"{{{part[0]}}}{part[1:]}")
    return first


def _fractions(text: str) -> str:
    """`\\frac12` → `\\frac{1}{2}`, `\\frac1{72}` → `\\frac{1}{72}`."""
    made, *rest = text.split("\\frac")
    for part in rest:
        made += "\\frac"
        if not part:
            raise ValueError("the answer has a \\frac of nothing")
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
    """`1/2` → `\\frac{1}{2}`, for whole numbers as Python prints them."""
    sides = text.split("/")
    if len(sides) != 2:
        return text
    try:
        top, bottom = int(sides[0]), int(sides[1])
        return f"\\frac{{{top}}}{{{bottom}}}" if text == f"{top}/{bottom}" else text
    except ValueError:
        return text


def same(one: str, other: str) -> bool:
    """Whether two answers are equal after `normalise`, or as they are where one cannot be normalised."""
    try:
        return normalise(one) == normalise(other)
    except ValueError:
        return one == other


def compute_score(solution_str: str, ground_truth: str) -> float:
    """verl's `math_reward`: 1.0 where the last `\\boxed{…}` equals the ground truth as a normalised string, else 0.0."""
    answer = box(solution_str)
    return float(answer is not None and same(answer, ground_truth))


@rule(lambda truth: f"\\boxed{{{truth}}}", lambda response, truth: compute_score(response, truth) == 1.0)
def math_string(response: str, ground_truth: str) -> Score:
    """Score 1 where the last `\\boxed{…}` equals the ground truth as a normalised string (verl's `math_reward`), else 0."""
    answer = box(response)
    if answer is None:
        return no_answer("no closed \\boxed{…} in the response")
    return compared(same(answer, ground_truth), answer, ground_truth, "the box")


def last_box(text: str) -> str | None:
    r"""The text in the last `\boxed{…}`, up to its matching brace; None without one, or where it is never closed."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    inside = start + len("\\boxed{")
    depth = 1
    for place in range(inside, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[inside:place]
    return None
