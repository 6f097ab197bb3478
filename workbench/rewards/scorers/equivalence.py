"""Whether two answers are equal: as text, by the string rules of MATH (Hendrycks et al. 2021), or as mathematics.

`equivalence` is what worker processes run, by `math-verify`. It is pickled by value and needs nothing of workbench there.
Parsed expressions are never printed: printing a tower of powers does not end.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

__by_value__ = True


def _gold(truth: Any) -> list[Any]:
    """Parse a ground truth as LaTeX expressions; [] for one that cannot be parsed, or not in time."""
    import math
    from numbers import Number

    from math_verify import LatexExtractionConfig, parse

    if not isinstance(truth, str | Number) or (isinstance(truth, float) and not math.isfinite(truth)):
        return []
    try:
        return list(parse(f"\\boxed{{{truth}}}", [LatexExtractionConfig()], parsing_timeout=None))
    except Exception:  # noqa: BLE001 - what the library fails on, or takes too long to read, is not read
        return []


def equivalence(response: str, ground_truth: Any, strict: bool = False) -> dict[str, Any]:
    """Compare an answer with the ground truth as mathematics: LaTeX or plain expressions; with `strict` only in a box."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    gold = _gold(ground_truth)
    if not gold:
        why = f"the ground truth {str(ground_truth)[:100]!r} cannot be read as mathematics"
        return {"score": 0.0, "status": "not_applicable", "why": why}
    # thinking that never ended is no answer
    text = str(response).rsplit("</think>", 1)[-1].split("<think>", 1)[0]
    if strict and "\\boxed" not in text:
        return {"score": 0.0, "status": "no_answer", "why": "no \\boxed{…} in the response"}
    boxes = LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False)
    ways = [boxes] if strict else [ExprExtractionConfig(), LatexExtractionConfig()]
    try:
        expressions = parse(text, ways, parsing_timeout=None)
        right = bool(expressions) and bool(verify(gold, expressions, timeout_seconds=None))
    except TimeoutError:
        raise  # the worker's, of an answer that took too long
    except Exception as error:  # noqa: BLE001 - what the library fails on is the response's, not the machinery's
        return {"score": 0.0, "status": "no_answer", "why": f"nothing that can be compared: {type(error).__name__}"}
    if not expressions:
        return {"score": 0.0, "status": "no_answer", "why": "nothing that reads as mathematics"}
    # parse gives expressions and the string that they were read from
    answer = next((part[:200] for part in expressions if isinstance(part, str) and part), None)
    why = "equivalent" if right else f"not equivalent to {str(ground_truth)[:100]}"
    return {"score": float(right), "answer": answer, "why": why}


def limited(seconds: float, strict: bool = False) -> Callable[..., dict[str, Any]]:
    """Bind `equivalence` for worker processes: an answer that takes more than `seconds` of processor time is *timeout*.

    A worker imports math-verify before the time of any row counts.
    """
    function = functools.partial(equivalence, strict=strict)
    vars(function).update(processor_seconds=seconds, needs=("math_verify",), reads_answers=True)
    return function


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
    r"""Add the braces that a square root lacks: `\\sqrt3` → `\\sqrt{3}`. Raises `ValueError` for a root of nothing."""
    first, *rest = text.split("\\sqrt")
    for part in rest:
        if not part:
            raise ValueError("the answer has a \\sqrt of nothing")
        first += "\\sqrt" + (part if part[0] == "{" else f"{{{part[0]}}}{part[1:]}")
    return first


def fractions(text: str) -> str:
    r"""Add the braces that a fraction lacks: `\\frac12` → `\\frac{1}{2}`, `\\frac1{72}` → `\\frac{1}{72}`."""
    written, *rest = text.split("\\frac")
    for part in rest:
        written += "\\frac"
        if not part:
            raise ValueError("the answer has a \\frac of nothing")
        if part[0] == "{":
            written += part
        elif len(part) < 2:
            return text
        elif part[1] == "{":
            written += f"{{{part[0]}}}{part[1:]}"
        else:
            written += f"{{{part[0]}}}{{{part[1]}}}{part[2:]}"
    return written


def _slash(text: str) -> str:
    r"""Write a fraction of integers as LaTeX: `1/2` → `\\frac{1}{2}`; return any other text unchanged."""
    sides = text.split("/")
    if len(sides) != 2:
        return text
    try:
        top, bottom = int(sides[0]), int(sides[1])
        return f"\\frac{{{top}}}{{{bottom}}}" if text == f"{top}/{bottom}" else text
    except ValueError:
        return text


def same(answer: str, other: str) -> bool:
    """Return whether two answers are equal after `normalise`, or as they stand where one cannot be normalised."""
    try:
        return normalise(answer) == normalise(other)
    except ValueError:
        return answer == other
