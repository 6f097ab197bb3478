r"""Answers as numbers: the cascade of markers that verl's `prime_math` follows, without its evaluation of model text.

What is read as a number is a small grammar of its own: decimals with thousands commas, `a/b`, `\frac{a}{b}`,
`\sqrt{n}`, multiples of `\pi`, a percent sign. Tuples and intervals are compared part by part; all else as
normalised strings. verl's equality of 50, 0.5 and 0.005 is here a choice, `lenient=True`.
"""

from __future__ import annotations

import math
import re
from typing import Any

from workbench.rewards.score import Score, Status, bounded, no_truth
from workbench.rewards.scorers.boxes import last_box
from workbench.rewards.scorers.math_string import same

LONGEST = 1000
"""Characters of an answer that are looked at."""
_MARKERS = ("answer:", "answer is", "answers are", "final answer")
_DECIMAL = r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|[-+]?\.\d+"
_NUMBER = re.compile(rf"^({_DECIMAL})$")
_SLASH = re.compile(r"^([-+]?\d{1,30})\s*/\s*(\d{1,30})$")
_FRAC = re.compile(r"^([-+]?)\\[dt]?frac\s*\{\s*([-+]?\d{1,30})\s*\}\s*\{\s*([-+]?\d{1,30})\s*\}$")
_ROOT = re.compile(r"^([-+]?\d{0,30})\s*\\sqrt\s*\{\s*(\d{1,30})\s*\}$")
_PI = re.compile(r"^([-+]?\d{0,30}(?:\.\d{1,30})?)\s*\\?pi(?:\s*/\s*(\d{1,30}))?$")


def extract_answer(text: str) -> str | None:
    """What follows the last marker (`answer:`, `answer is`) on its line, else the last box; None without either."""
    answer = text.rsplit("</think>", 1)[-1]
    boxed = last_box(answer)
    lower = answer.lower()
    start = max((lower.rfind(marker) + len(marker) for marker in _MARKERS if marker in lower), default=-1)
    if start >= 0:
        line = answer[start : start + LONGEST].lstrip(" :*\n").split("\n", 1)[0]
        inside = last_box(line)
        found = inside if inside is not None else line.split(". ", 1)[0].strip().strip("*").rstrip(".").strip()
        if found:
            return found
    return boxed[:LONGEST] if boxed is not None else None


def number(text: str) -> float | None:
    """The value of a number of the grammar, or None."""
    plain = text.strip().strip("$").strip().removeprefix("\\$").replace("\\!", "").replace("−", "-").rstrip(".")
    percent = plain.endswith("%")
    plain = plain.removesuffix("%").removesuffix("\\").strip()
    value = _value(plain)
    return value / 100 if percent and value is not None else value


def _value(plain: str) -> float | None:
    if len(plain) > 60:
        return None
    if match := _NUMBER.match(plain):
        return float(match.group(1).replace(",", ""))
    if match := _SLASH.match(plain):
        return _ratio(int(match.group(1)), int(match.group(2)))
    if match := _FRAC.match(plain):
        ratio = _ratio(int(match.group(2)), int(match.group(3)))
        return -ratio if match.group(1) == "-" and ratio is not None else ratio
    if match := _ROOT.match(plain):
        return _factor(match.group(1)) * math.sqrt(int(match.group(2)))
    if match := _PI.match(plain):
        return _factor(match.group(1)) * math.pi / int(match.group(2) or 1) if match.group(2) != "0" else None
    return None


def _factor(text: str) -> float:
    return {"": 1.0, "+": 1.0, "-": -1.0}.get(text) or float(text)


def _ratio(top: int, bottom: int) -> float | None:
    return top / bottom if bottom else None


def same_answer(answer: str, truth: str, *, tolerance: float = 1e-4, lenient: bool = False) -> bool:
    """Equal as numbers (a whole one exactly, others within a relative `tolerance`), part by part in a tuple, or as
    normalised strings."""
    answer, truth = answer[:LONGEST].strip(), truth.strip()
    ours, theirs = _parts(answer), _parts(truth)
    if len(theirs) > 1 or len(ours) > 1:
        brackets = not theirs or (answer[:1], answer[-1:]) == (truth[:1], truth[-1:])
        pairs = zip(ours, theirs, strict=False)
        return (
            len(ours) == len(theirs)
            and brackets
            and all(same_answer(one, other, tolerance=tolerance, lenient=lenient) for one, other in pairs)
        )
    one, other = number(answer), number(truth)
    if one is None or other is None:
        return same(answer, truth)
    wanted = (other, other * 100, other / 100) if lenient else (other,)
    return any(_close(one, each, tolerance) for each in wanted)


def _close(one: float, other: float, tolerance: float) -> bool:
    """A whole number is met exactly (up to a float's rounding): 10001 is not 10000, however near."""
    return math.isclose(one, other, rel_tol=1e-12 if other.is_integer() else tolerance)


def _parts(text: str) -> list[str]:
    """The entries of `(a, b)` or `[a, b)`; the text itself where it is neither."""
    if len(text) < 3 or text[0] not in "([" or text[-1] not in ")]" or "," not in text:
        return [text]
    depth, parts = 0, [""]
    for character in text[1:-1]:
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(character, 0)
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


@bounded
def numeric(response: str, ground_truth: Any, *, tolerance: float = 1e-4, lenient: bool = False) -> Score:
    """1 where the extracted answer equals the ground truth, else 0."""
    if ground_truth is None:
        return no_truth()
    answer = extract_answer(response)
    if answer is None:
        return Score(status=Status.MODEL_FAILED, why="no 'answer is …' and no \\boxed{…} in the response")
    right = same_answer(answer, str(ground_truth), tolerance=tolerance, lenient=lenient)
    return Score(
        value=float(right),
        answer=answer[:200],
        why="the answer is right" if right else f"expected {str(ground_truth)[:100]}",
    )
