"""Geometry3k: nine tenths for the boxed answer, one tenth for thinking in tags before it."""

from __future__ import annotations

from typing import Any

from workbench.config import require
from workbench.rewards.score import Score, Status, bounded, no_truth
from workbench.rewards.scorers.boxes import last_box
from workbench.rewards.scorers.numeric import same_answer


def has_format(text: str) -> bool:
    r"""`<think>` at the start, `</think>`, and after it a `\boxed{…}`."""
    if not text.startswith("<think>") or "</think>" not in text:
        return False
    return last_box(text.split("</think>", 1)[1]) is not None


@bounded
def geometry3k(response: str, ground_truth: Any, *, format_score: float = 0.1) -> Score:
    """(1 − `format_score`)·accuracy + `format_score`·format. Without a box the accuracy is 0, whatever is expected."""
    if ground_truth is None:
        return no_truth()
    require(0 <= format_score <= 1, "format_score", expected="a number in [0, 1]", found=format_score)
    answer = last_box(response)
    accuracy = float(answer is not None and same_answer(answer, str(ground_truth)))
    form = float(has_format(response))
    value = (1 - format_score) * accuracy + format_score * form
    why = (
        "no \\boxed{…}" if answer is None else "the box is right" if accuracy else f"expected {str(ground_truth)[:100]}"
    )
    status = Status.MODEL_FAILED if answer is None else Status.SCORED
    return Score(value=value, parts={"accuracy": accuracy, "format": form}, answer=answer, why=why, status=status)
