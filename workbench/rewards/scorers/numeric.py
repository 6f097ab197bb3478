r"""Answers as numbers: the cascade of markers that verl's `prime_math` follows, without its evaluation of model text.

What is read as a number is arithmetic of numbers: decimals with thousands commas, `a/b`, `\frac{a}{b}`, `\sqrt{n}`, powers,
`\pi`, sums and products of these, a percent sign. Tuples and intervals are compared part by part; all else as normalised
strings. Whether a row is *not applicable* is decided by its ground truth alone: a truth that is neither numbers nor words
(`1+x`) may equal another text, and no row that has one is scored. To a truth that is understood every other answer is wrong.
verl's equality of 50, 0.5 and 0.005 is here a choice, `lenient=True`. Geometry3k's score is nine tenths such an answer in a
box, one tenth thinking in tags before it.
"""

from __future__ import annotations

import ast
import asyncio
import functools
import math
import operator
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from workbench.base.config import require
from workbench.datasets.records import last_box
from workbench.rewards.runner import START_SECONDS, WorkerPool
from workbench.rewards.score import Score, Status, compared, failed, no_answer, rule
from workbench.rewards.scorers.equivalence import fractions, limited, roots, same

LONGEST = 1000
"""Characters of an answer that are looked at."""
_MARKERS = ("answer:", "answer is", "answers are", "final answer")
_DECIMAL = r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|[-+]?\.\d+"
_WORD = re.compile(r"[A-Za-z]|yes|no|true|false", re.IGNORECASE)
_WORDS = re.compile(r"(?=.*[^\W\d_]{3})[^\W\d_]+(?: [^\W\d_]+)*")
_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mbox)\s*\{([^{}]*)\}")
_NUMBER = re.compile(rf"^({_DECIMAL})$")
_LATEX = [(re.compile(pattern), written) for pattern, written in (
    (r"\\left|\\right", ""), (r"\s*([{}])\s*", r"\1"), (r"\\[dt]?(frac|sqrt)\s*", r"\\\1"), (r"\\cdot|\\times", "*"),
    (r"\\div", "/"), (r"\\?\bpi\b|\\?pi\b|π", f"({math.pi!r})"), (r"(?<![\d.)])(\d+)\\frac\{(\d+)\}\{(\d+)\}", r"(\1+\2/\3)"),
    (r"\\frac\{([^{}]*)\}\{([^{}]*)\}", r"((\1)/(\2))"), (r"\\sqrt\{([^{}]*)\}", r"((\1)^0.5)"), (r"\^\{([^{}]*)\}", r"^(\1)"),
)]  # fmt: skip
"""LaTeX → arithmetic with brackets; innermost first, until nothing changes."""
_PRODUCT = re.compile(r"(?<=[\d.)])\s*(?=\()|(?<=\))\s*(?=[\d.])")
_ARITHMETIC = re.compile(r"[-+*/^().\d\s]+")
_OPERATIONS: dict[type, Callable[..., float]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv, ast.Pow: operator.pow,
    ast.USub: operator.neg, ast.UAdd: operator.pos,
}  # fmt: skip


def extract_answer(text: str) -> str | None:
    """Extract the answer from a text: what follows the last `answer:` or `answer is` on its line, else the last box,
    else None."""
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
    """Return the value of a text that is one number (a decimal, a percentage, arithmetic of numbers, roots and π); else
    None."""
    plain = text.strip().strip("$").strip().removeprefix("\\$").replace("\\!", "").replace("−", "-").rstrip(".")
    percent = plain.endswith("%")
    plain = plain.removesuffix("%").removesuffix("\\").strip()
    value = _value(plain)
    return value / 100 if percent and value is not None else value


def _value(plain: str) -> float | None:
    if len(plain) > 60:
        return None
    if _NUMBER.match(plain):
        return float(plain.replace(",", ""))
    before = ""
    try:
        while plain != before:
            before = plain
            for pattern, written in _LATEX:
                plain = pattern.sub(written, plain)
            plain = fractions(roots(plain))
        text = re.sub(r"(?<![\d.])0+(?=\d)", "", _PRODUCT.sub("*", plain)).strip()
        known = _ARITHMETIC.fullmatch(text)
        value = _computed(ast.parse(text.replace("^", "**"), mode="eval").body) if known else math.inf
    except (SyntaxError, ValueError, KeyError, TypeError, ArithmeticError):
        return None
    return value if math.isfinite(value) else None


def _computed(node: ast.AST) -> float:
    """Compute parsed arithmetic in floats alone, so that no power of integers grows without bound."""
    if isinstance(node, ast.Constant):
        return float(node.value)  # type: ignore[arg-type]
    parts = [_computed(one) for one in ast.iter_child_nodes(node) if isinstance(one, ast.expr)]
    return float(_OPERATIONS[type(getattr(node, "op", None))](*parts))


def same_answer(answer: str, truth: str, *, tolerance: float = 1e-4, lenient: bool = False) -> bool:
    """Whether two answers are equal: as numbers, entry by entry for tuples, else as normalised strings.

    A whole number must be met exactly (10001 is not 10000), another within a relative `tolerance`. `lenient` also
    accepts 100 times the number, or a hundredth of it.
    """
    answer, truth = answer[:LONGEST].strip(), truth.strip()
    ours, theirs = _parts(answer), _parts(truth)
    if len(theirs) > 1 or len(ours) > 1:
        alike = len(ours) == len(theirs) and (answer[0], answer[-1]) == (truth[0], truth[-1])
        options: dict[str, Any] = {"tolerance": tolerance, "lenient": lenient}
        return alike and all(same_answer(*pair, **options) for pair in zip(ours, theirs, strict=True))
    value, other = number(answer), number(truth)
    if value is None or other is None:
        return same(answer, truth)
    wanted = (other, other * 100, other / 100) if lenient else (other,)
    return any(math.isclose(value, each, rel_tol=1e-12 if each.is_integer() else tolerance) for each in wanted)


def understood(truth: str) -> bool:
    """Return whether answers can be compared with a ground truth: it is a number, numbers in brackets, or words (`B`,
    `no root`)."""
    parts = _parts(truth[:LONGEST].strip())
    return all(number(part) is not None for part in parts) or _words(truth) is not None


def _words(text: str) -> str | None:
    """Return a text of words alone in lower case, and a single letter as it is; None for any other text."""
    plain = _TEXT.sub(r"\1", text[:LONGEST]).strip(" ().$")
    if _WORD.fullmatch(plain):
        return plain
    return plain.casefold() if _WORDS.fullmatch(plain) else None


def judged(answer: str, truth: str, what: str = "the answer", **options: Any) -> Score:
    """Make the score of an answer to a ground truth that is `understood`: 1 where it is the same number, text or words,
    else 0."""
    words = _words(truth)
    right = same_answer(answer, truth, **options) or (words is not None and _words(answer) == words)
    return compared(right, answer, truth, what)


def _parts(text: str) -> list[str]:
    """Return the entries of `(a, b)` or `[a, b)`; for any other text a list of that text."""
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


def boxed(truth: str) -> str:
    r"""Write a response that is right for a ground truth: the ground truth in `\\boxed{…}`."""
    return f"\\boxed{{{truth}}}"


def meets(response: str, truth: str) -> bool:
    """Return whether the last box of a response equals the ground truth, and the ground truth is `understood`."""
    answer = last_box(response)
    return answer is not None and same_answer(answer, truth) and understood(truth)


@rule(boxed, meets)
def numeric(response: str, ground_truth: str, *, tolerance: float = 1e-4, lenient: bool = False) -> Score:
    """Score 1 where the answer (`extract_answer`) equals the ground truth (`same_answer`), else 0.

    A row whose ground truth is neither numbers nor words is *not applicable*: see `understood`.
    """
    answer = extract_answer(response)
    if answer is None:
        return no_answer("no 'answer is …' and no \\boxed{…} in the response")
    return judged(answer, ground_truth, tolerance=tolerance, lenient=lenient)


def has_format(text: str) -> bool:
    r"""Whether a text starts with `<think>` and has a closed `\boxed{…}` after its first `</think>`."""
    if not text.startswith("<think>") or "</think>" not in text:
        return False
    return last_box(text.split("</think>", 1)[1]) is not None


@rule(boxed, meets)
def geometry3k(response: str, ground_truth: str, *, format_score: float = 0.1) -> Score:
    """Geometry3k's score: (1 − `format_score`)·accuracy + `format_score`·format; see `has_format`. No box: accuracy 0.

    A row whose ground truth is neither numbers nor words is *not applicable*: see `understood`.
    """
    require(0 <= format_score <= 1, "format_score", expected="a number in [0, 1]", found=format_score)
    answer, form = last_box(response), float(has_format(response))
    if answer is None or not answer.strip():
        score = no_answer("no \\boxed{…}" if answer is None else "the box is empty")
    else:
        score = judged(answer, ground_truth, "the box")
    value = (1 - format_score) * score.value + format_score * form
    return score.with_value(value, accuracy=score.value, format=form)


# --- beyond numbers -------------------------------------------------------------------------------

SECONDS = 3.0
"""Processor time of one comparison of `numina`."""
_TOWER = re.compile(r"\^[^-+*/=,]*\^|\^\s*\{?\s*\d{5}|(?:\d{4}|[^\d\s])\s*!")
_COMMAND = re.compile(r"\\(?:begin|end)\s*\{\w+\*?\}|\\[A-Za-z]+|\b(?:sin|cos|tan|log|exp|sqrt|inf)\b")
_PROSE = re.compile(r"[^\W\d_]{3,}")


@functools.cache
def _workers() -> tuple[WorkerPool, ThreadPoolExecutor]:
    """Return the pool with the process in which `numina` compares, and the threads that wait for it; both end with this
    process."""
    pool = WorkerPool(limited(SECONDS, strict=True), workers=1, timeout=START_SECONDS, memory_mb=4096)
    return pool, ThreadPoolExecutor(2, "workbench-equivalence")


def _short(text: str) -> bool:
    """Return whether a text is a short expression. Prose would be read as a product of letters, and a tower of powers
    never ends."""
    prose = _PROSE.search(_COMMAND.sub("", _TEXT.sub(r"\1", text)))
    return not (prose or _TOWER.search(text) or len(text) > 500)


def _expression(response: str, truth: str) -> bool:
    """Return whether `numina` can compare answers with a ground truth: it is `understood`, or a short expression."""
    return understood(truth) or _short(truth)


@rule(boxed, _expression)
async def numina(response: str, ground_truth: str) -> Score:
    """Score 1 where the answer (see `extract_answer`) equals the ground truth as mathematics, else 0.

    Numbers, tuples and equal texts are compared at once, other expressions by math-verify in a worker (`1+x` is `x+1`). An answer
    that is no expression, or takes more than `SECONDS`, is wrong; a row whose ground truth is no expression is
    *not applicable*.
    """
    answer = extract_answer(response)
    if answer is None or not answer.strip():
        return no_answer("no 'answer is …' and no \\boxed{…} in the response")
    score, known, short = judged(answer, ground_truth), understood(ground_truth), _short(answer)
    if score.value or (known and (understood(answer) or _words(ground_truth) or not short)):
        return score
    pool, threads = _workers()
    question = {"response": boxed(answer) if short else "", "ground_truth": ground_truth}
    (reply,) = await asyncio.get_running_loop().run_in_executor(threads, pool.map, [question])
    if not reply.ok:
        return failed(f"math-verify could not be asked: {reply.why}", reply.traceback)
    record = reply.result
    status = Status(record.get("status", "scored"))
    worker = Score(value=record["score"], answer=record.get("answer"), why=record["why"], status=status)
    if not worker.scored and not known:
        return worker  # the truth is no expression
    return replace(worker, answer=answer[:200]) if worker.scored and short else score
