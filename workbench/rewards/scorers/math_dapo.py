r"""DAPO's maths: the last `Answer:` line under Minerva's normalisation, exactly verl's `math_dapo`.

Only the last 300 characters are searched; without such a line a box within the last 100 counts, as it stands.
Right is 1, wrong −1. The normalisation is that of Lewkowycz et al. 2022 (Minerva), appendix D.
"""

from __future__ import annotations

import re
from typing import Any

from workbench.datasets.records import last_box
from workbench.rewards.score import Score, as_written, compared, rule

WINDOW, BOX_WINDOW = 300, 100
"""Characters at the end that are searched for a line, and for a box."""
_NOTHING = "[INVALID]"
_LINE = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")
_REPLACED = (
    ("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text"),
    (",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}"),
)  # fmt: skip
_UNITS = r"""
    square ways integers dollars mph inches hours km units \ldots sue points feet minutes digits cents degrees cm gm pounds
    meters meals edges students childrentickets multiples
"""
_DROPPED = (
    *_UNITS.split(), "\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}", "\\text{}",
    "\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots",
)  # fmt: skip
_LATEX = (
    (re.compile(r"(.*?)(\$)(.*?)(\$)(.*)"), r"$\3$"),
    (re.compile(r"\\text\{(.*?)\}"), r"\1"),
    (re.compile(r"\\textbf\{(.*?)\}"), r"\1"),
    (re.compile(r"\\overline\{(.*?)\}"), r"\1"),
    (re.compile(r"\\boxed\{(.*)\}"), r"\1"),
    (re.compile(r"frac([^{])(.)"), r"frac{\1}{\2}"),
    (re.compile(r"sqrt([^{])"), r"sqrt{\1}"),
)


def normalise(answer: str) -> str:
    """Normalise an answer by Minerva's rules; only the text after its last `=` is kept."""
    text = answer.split("=")[-1]
    for before, after in _REPLACED:
        text = text.replace(before, after)
    for unit in _DROPPED:
        text = text.replace(unit, "")
    for pattern, replacement in _LATEX:
        text = pattern.sub(replacement, text)
    text = text.replace("$", "")
    plain = text.replace(",", "")
    return (plain if plain.isdigit() else text).strip()


def compute_score(solution_str: str, ground_truth: Any, strict_box_verify: bool = False) -> dict[str, Any]:
    """DAPO's score as verl's dict: `score` ±1.0, `acc`, `pred`. With `strict_box_verify` only a `\\boxed{…}` counts."""
    ground_truth = as_written(ground_truth)
    tail = solution_str[-WINDOW:]
    boxed = last_box(tail[-BOX_WINDOW:])
    lines = _LINE.findall(tail)
    pred = boxed
    right = boxed is not None and boxed == ground_truth
    if not strict_box_verify:
        said = normalise(lines[-1]) if lines else _NOTHING
        if said != _NOTHING or boxed is None:  # a box stands in for a line that is not there, or says nothing
            pred, right = said, said == normalise(ground_truth)
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": pred}


def _matches(response: str, truth: str) -> bool:
    return len(truth) <= WINDOW and bool(compute_score(response, truth)["acc"])


@rule(lambda truth: f"Answer: {truth}", _matches)
def math_dapo(response: str, ground_truth: str, *, strict_box_verify: bool = False) -> Score:
    """Score an answer by DAPO's rule: value ±1, part `acc`. A response without an answer scores −1, as in DAPO."""
    result = compute_score(response, ground_truth, strict_box_verify)
    right = bool(result["acc"])
    if result["pred"] in (None, _NOTHING):
        wanted = "box" if strict_box_verify else "line 'Answer: …'"
        score = Score(why=f"no {wanted} near the end")
    else:
        score = compared(right, str(result["pred"]), ground_truth)
    return score.with_value(result["score"], acc=float(right))
