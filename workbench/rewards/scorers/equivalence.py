"""Answers compared as mathematics by `math-verify`, in worker processes: `equivalence` is what a worker runs, and `numina`
a scorer that asks one where numbers and texts do not decide.

`equivalence` and `equal` are pickled by value and need nothing of workbench in the worker. Parsed expressions are never
printed: printing a tower of powers does not end.
"""

from __future__ import annotations

import asyncio
import functools
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from workbench.rewards.runner import START_SECONDS, Pool
from workbench.rewards.score import Score, Status, compared, failed, no_answer
from workbench.rewards.scorers.numeric import boxed, extract_answer, meets, same_answer, understood
from workbench.rewards.truths import rule

__by_value__ = True
SECONDS = 3.0
"""Time of one comparison of `numina`."""
_TOWER = re.compile(r"\^[^-+*/=,]*\^|\^\s*\{?\s*\d{4}|!")
_COMMAND = re.compile(r"\\(?:text|mathrm|textbf|mbox)\s*\{([^{}]*)\}|\\[A-Za-z]+|\b(?:sin|cos|tan|log|exp|sqrt|inf)\b")
_WORDS = re.compile(r"[^\W\d_][^\W\d_ ]{2,}(?: [^\W\d_]+)*")
_PROSE = re.compile(r"[^\W\d_]{3,}")


def equivalence(response: str, ground_truth: Any, strict: bool = False) -> dict[str, Any]:
    """Compare an answer with the ground truth as mathematics: LaTeX or plain expressions; with `strict` only in a box."""
    import math
    from numbers import Number

    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    finite = not isinstance(ground_truth, float) or math.isfinite(ground_truth)
    read = isinstance(ground_truth, str | Number) and finite
    gold = [] if not read else parse(f"\\boxed{{{ground_truth}}}", [LatexExtractionConfig()], parsing_timeout=None)
    if not gold:
        why = f"the ground truth {str(ground_truth)[:100]!r} cannot be read as mathematics"
        return {"score": 0.0, "status": "not_applicable", "why": why}
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


def equal(answer: str, truth: str) -> bool | None:
    """Whether two expressions are equal as mathematics; None where one of them cannot be read as an expression."""
    from math_verify import LatexExtractionConfig, parse, verify

    way = [LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False)]
    try:
        ours, theirs = (parse(f"\\boxed{{{text}}}", way, parsing_timeout=None) for text in (answer, truth))
        if any(all(isinstance(part, str) for part in side) for side in (ours, theirs)):
            return None
        return bool(verify(theirs, ours, timeout_seconds=None))
    except Exception:  # noqa: BLE001 - what the library fails on is not read
        return None


@functools.cache
def _workers() -> tuple[Pool, ThreadPoolExecutor]:
    """Two processes for all comparisons of `numina`, and the threads that wait for them; both end with this process."""
    return Pool(equal, workers=1, timeout=SECONDS, memory_mb=4096), ThreadPoolExecutor(2, "workbench-equivalence")


async def _asked(answer: str, truth: str) -> Score:
    """The score of an answer by `equal`."""
    nothing = Score(status=Status.NOT_APPLICABLE, answer=answer[:200], why=f"not compared with {truth[:60]!r}")
    ours, theirs = (_COMMAND.sub(r"\1", text).strip(" ().$").casefold() for text in (answer, truth))
    if _WORDS.fullmatch(ours) and _WORDS.fullmatch(theirs) and (ours == theirs or sorted(ours) != sorted(theirs)):
        return compared(ours == theirs, answer, truth)  # `cba` may be the product `abc`
    for text in (answer, truth):
        # letters of prose would be read as a product, and a tower of powers never ends
        if _TOWER.search(text) or _PROSE.search(_COMMAND.sub(r"\1", text)) or len(text) > 500:
            return replace(nothing, why=f"{nothing.why}: not both are short expressions")
    pool, threads = _workers()
    call = asyncio.get_running_loop().run_in_executor(threads, pool.map, [{"answer": answer, "truth": truth}])
    (found,) = await call
    if found.traceback or found.seconds >= START_SECONDS:
        return failed(f"math-verify could not be asked: {found.why}", found.traceback)
    if found.result is None:
        return replace(nothing, why=f"{nothing.why}: {found.why or 'not both are expressions'}")
    return compared(found.result, answer, truth)


@rule(boxed, meets)
async def numina(response: str, ground_truth: str) -> Score:
    """Score 1 where the answer (see `numeric.extract_answer`) equals the ground truth as mathematics, else 0.

    Numbers, tuples and equal texts are compared at once, other expressions by math-verify in a worker (`1+x` is `x+1`). What
    is no expression, or takes more than `SECONDS`, is *not applicable*.
    """
    answer = extract_answer(response)
    if answer is None or not answer.strip():
        return no_answer("no 'answer is …' and no \\boxed{…} in the response")
    right = same_answer(answer, ground_truth)
    if right or understood(answer, ground_truth):
        return compared(right, answer, ground_truth)
    return await _asked(answer, ground_truth)
