"""Answers as MATH writes and compares them, as text: the string rules of Hendrycks et al. 2021."""

from __future__ import annotations

_REMOVED = ("\\left", "\\right", "^{\\circ}", "^\\circ", "\\$")


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
    text = fractions(roots(text).replace(" ", ""))
    return _slash("\\frac{1}{2}" if text == "0.5" else text)


def roots(text: str) -> str:
    """`\\sqrt3` → `\\sqrt{3}`."""
    first, *rest = text.split("\\sqrt")
    for part in rest:
        if not part:
            raise ValueError("the answer has a \\sqrt of nothing")
        first += "\\sqrt" + (part if part[0] == "{" else f"{{{part[0]}}}{part[1:]}")
    return first


def fractions(text: str) -> str:
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
