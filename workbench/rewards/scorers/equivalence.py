"""Answers compared as mathematics by `math-verify`: what worker processes run. It is pickled by value and needs nothing of
workbench there. Parsed expressions are never printed: printing a tower of powers does not end.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

__by_value__ = True


def _gold(truth: Any) -> list[Any]:
    """A ground truth as expressions; [] for one that cannot be read, or not in time."""
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
        found = parse(text, ways, parsing_timeout=None)
        right = bool(found) and bool(verify(gold, found, timeout_seconds=None))
    except TimeoutError:
        raise  # the worker's, of an answer that took too long
    except Exception as error:  # noqa: BLE001 - what the library fails on is the response's, not the machinery's
        return {"score": 0.0, "status": "no_answer", "why": f"nothing that can be compared: {type(error).__name__}"}
    if not found:
        return {"score": 0.0, "status": "no_answer", "why": "nothing that reads as mathematics"}
    # parse gives expressions and the string that they were read from
    answer = next((part[:200] for part in found if isinstance(part, str) and part), None)
    why = "equivalent" if right else f"not equivalent to {str(ground_truth)[:100]}"
    return {"score": float(right), "answer": answer, "why": why}


def limited(seconds: float, strict: bool = False) -> Callable[..., dict[str, Any]]:
    """`equivalence` for a worker, which imports what it needs before any row's time counts: an answer that takes more than
    `seconds` of processor time is *timeout*."""
    function = functools.partial(equivalence, strict=strict)
    vars(function).update(processor_seconds=seconds, needs=("math_verify",))
    return function
