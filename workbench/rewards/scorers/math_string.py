r"""MATH by string normalisation: exactly verl's `math_reward`, quirks and all.

The last `\boxed{…}` (or `\boxed …` up to a dollar sign) and the ground truth are normalised as strings and
compared. Nothing is computed: `\frac14` is not `0.25`, though `0.5` is `\frac12`, by a rule of its own. For
equivalence as mathematics see `math_verify`. The rules are those of Hendrycks et al. 2021 (MATH).
"""

from __future__ import annotations

from typing import Any

from workbench.datasets.records import last_box
from workbench.rewards.score import Score, as_written, compared, no_answer, rule
from workbench.rewards.scorers.equivalence import same


def box(text: str) -> str | None:
    r"""The answer as verl finds it: in the last `\boxed{…}`, or after `\boxed ` up to a `$`; None where there is none."""
    if "\\boxed " in text:
        return text.rsplit("\\boxed ", 1)[1].split("$", 1)[0]
    start = text.rfind("\\boxed")
    # whatever begins there decides, be it `\boxedx{6}`: an earlier good box is hidden by it
    return last_box(text[start:]) if start >= 0 and text.startswith("\\boxed{", start) else None


def compute_score(solution_str: str, ground_truth: Any) -> float:
    """verl's `math_reward`: 1.0 where the last `\\boxed{…}` equals the ground truth as a normalised string, else 0.0."""
    answer = box(solution_str)
    return float(answer is not None and same(answer, as_written(ground_truth)))


@rule(lambda truth: f"\\boxed{{{truth}}}", lambda response, truth: compute_score(response, truth) == 1.0)
def math_string(response: str, ground_truth: str) -> Score:
    """Score 1 where the last `\\boxed{…}` equals the ground truth as a normalised string (verl's `math_reward`), else 0."""
    answer = box(response)
    if answer is None:
        return no_answer("no closed \\boxed{…} in the response")
    return compared(same(answer, ground_truth), answer, ground_truth, "the box")
