"""MATH by equivalence: `math-verify` (sympy and a LaTeX grammar) in worker processes, because comparing some answers never ends.

`equivalence` is pickled by value and needs nothing of workbench in the worker. Parsed expressions are never printed: printing
a tower of powers does not end.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from workbench.rewards.reward import Reward

__by_value__ = True


def equivalence(response: str, ground_truth: Any, strict: bool = False) -> dict[str, Any]:
    """Compare an answer with the ground truth as mathematics: LaTeX or plain expressions; with `strict` only in a box."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    gold = parse(f"\\boxed{{{ground_truth}}}", [LatexExtractionConfig()], parsing_timeout=None)
    if not gold:
        raise ValueError(f"the ground truth {str(ground_truth)[:100]!r} cannot be read as mathematics")
    # thinking that never ended is no answer
    text = str(response).rsplit("</think>", 1)[-1].split("<think>", 1)[0]
    if strict and "\\boxed" not in text:
        return {"score": 0.0, "status": "no_answer", "why": "no \\boxed{…} in the response"}
    boxes = LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False)
    ways = [boxes] if strict else [ExprExtractionConfig(), LatexExtractionConfig()]
    found = parse(text, ways, parsing_timeout=None)
    if not found:
        return {"score": 0.0, "status": "no_answer", "why": "nothing that reads as mathematics"}
    # parse gives expressions and the string that they were read from
    answer = next((part[:200] for part in found if isinstance(part, str) and part), None)
    right = bool(verify(gold, found, timeout_seconds=None))
    why = "equivalent" if right else f"not equivalent to {str(ground_truth)[:100]}"
    return {"score": float(right), "answer": answer, "why": why}


def math_verify(*, strict: bool = False, timeout: float = 5.0, workers: int = 2, **options: Any) -> Reward:
    """A reward that is 1 where the answer is equivalent to the ground truth: `\\frac14` is `0.25`, `1,000` is `1000`.

    `strict` reads only a `\\boxed{…}`. A row that takes more than `timeout` seconds (a tower of powers) is *infra_error*.
    Needs the package math-verify, which is installed with workbench.
    """
    function = partial(equivalence, strict=True) if strict else equivalence
    options = {"memory_limit_mb": 4096, "name": "math_verify", **options}
    return Reward(function, timeout=timeout, workers=workers, **options)
