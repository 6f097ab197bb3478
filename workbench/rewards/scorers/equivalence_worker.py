"""Equivalence as mathematics, by math-verify: runs in a worker that can be killed, for some answers never end.

The file travels to the worker by value and imports nothing of ours. Parsed expressions are never printed:
printing a tower of powers is what hangs.
"""

from __future__ import annotations

from typing import Any

__by_value__ = True


def equivalence(response: str, ground_truth: Any, strict: bool = False) -> dict[str, Any]:
    """Gold is read as LaTeX; the answer as LaTeX or a plain expression, or with `strict` from a box alone."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    gold = parse(f"\\boxed{{{ground_truth}}}", [LatexExtractionConfig()], parsing_timeout=None)
    if not gold:
        raise ValueError(f"the ground truth {str(ground_truth)[:100]!r} cannot be read as mathematics")
    text = str(response).rsplit("</think>", 1)[-1]
    if "<think>" in text:
        text = text.split("<think>", 1)[0]  # thinking that never ended is no answer
    if strict:
        ways: list[Any] = [LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False)]
        if "\\boxed" not in text:
            return {"score": 0.0, "status": "model failed", "why": "no \\boxed{…} in the response"}
    else:
        ways = [ExprExtractionConfig(), LatexExtractionConfig()]
    found = parse(text, ways, parsing_timeout=None)
    if not found:
        return {"score": 0.0, "status": "model failed", "why": "nothing that reads as mathematics"}
    # parse gives expressions and the string that they were read from
    answer = next((part for part in found if isinstance(part, str)), None)
    right = bool(verify(gold, found, timeout_seconds=None))
    return {
        "score": float(right),
        "answer": answer[:200] if answer else None,
        "why": "equivalent" if right else f"not equivalent to {str(ground_truth)[:100]}",
    }
