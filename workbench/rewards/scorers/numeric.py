r"""Answers as numbers: the cascade of markers that verl's `prime_math` follows, without its evaluation of model text.

What is read as a number is a small grammar of its own: decimals with thousands commas, `a/b`, `\frac{a}{b}`,
`\sqrt{n}`, multiples of `\pi`, a percent sign. Tuples and intervals are compared part by part; all else as
normalised strings. Two texts that differ and are not both numbers or both single words may still be equal (`1+x`): then
the row is *not applicable*. verl's equality of 50, 0.5 and 0.005 is here a choice, `lenient=True`. Geometry3k's score is
nine tenths such an answer in a box, one tenth thinking in tags before it.
"""

from __future__ import annotations

import asyncio
import functools
import math
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from workbench.base.config import require
from workbench.datasets.boxes import last_box
from workbench.rewards.runner import START_SECONDS, Pool
from workbench.rewards.score import Score, Status, compared, failed, no_answer
from workbench.rewards.scorers.equivalence import equal
from workbench.rewards.scorers.math_text import same
from workbench.rewards.truths import rule

LONGEST = 1000
"""Characters of an answer that are looked at."""
_MARKERS = ("answer:", "answer is", "answers are", "final answer")
_DECIMAL = r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|[-+]?\.\d+"
_WORD = re.compile(r"[A-Za-z]|yes|no|true|false", re.IGNORECASE)
_NUMBER = re.compile(rf"^({_DECIMAL})$")
_SLASH = re.compile(r"^([-+]?)(\d{1,30})\s*/\s*(\d{1,30})$")
_FRAC = re.compile(r"^([-+]?)\\[dt]?frac\s*\{\s*([-+]?\d{1,30})\s*\}\s*\{\s*([-+]?\d{1,30})\s*\}$")
_ROOT = re.compile(r"^([-+]?\d{0,30})\s*\\sqrt\s*\{\s*(\d{1,30})\s*\}$")
_PI = re.compile(r"^([-+]?\d{0,30}(?:\.\d{1,30})?)\s*\\?pi(?:\s*/\s*(\d{1,30}))?$")


def extract_answer(text: str) -> str | None:
    """The answer in a text: what follows the last `answer:` or `answer is` on its line, else the last box, or None."""
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
    """The value of a text that is one number (decimal, fraction, root, multiple of π or percentage); else None."""
    plain = text.strip().strip("$").strip().removeprefix("\\$").replace("\\!", "").replace("−", "-").rstrip(".")
    percent = plain.endswith("%")
    plain = plain.removesuffix("%").removesuffix("\\").strip()
    value = _value(plain)
    return value / 100 if percent and value is not None else value


def _value(plain: str) -> float | None:
    if len(plain) > 60:
        return None
    try:
        if _NUMBER.match(plain):
            return float(plain.replace(",", ""))
        if match := _SLASH.match(plain) or _FRAC.match(plain):
            return _factor(match[1]) * (int(match[2]) / int(match[3]))
        if match := _ROOT.match(plain):
            return _factor(match[1]) * math.sqrt(int(match[2]))
        if match := _PI.match(plain):
            return _factor(match[1]) * math.pi / int(match[2] or 1)
    except ZeroDivisionError:
        return None
    return None


def _factor(text: str) -> float:
    return {"": 1.0, "+": 1.0, "-": -1.0}.get(text) or float(text)


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
    one, other = number(answer), number(truth)
    if one is None or other is None:
        return same(answer, truth)
    wanted = (other, other * 100, other / 100) if lenient else (other,)
    return any(math.isclose(one, each, rel_tol=1e-12 if each.is_integer() else tolerance) for each in wanted)


def understood(answer: str, truth: str) -> bool:
    """Whether two answers can be told apart: both are numbers, tuples of numbers, or single words (`B`, `yes`)."""
    sides = [_parts(text[:LONGEST].strip()) for text in (answer, truth)]
    numbers = all(number(part) is not None for side in sides for part in side)
    return numbers or all(_WORD.fullmatch(text.strip()) for text in (answer, truth))


def judged(answer: str, truth: str, what: str = "the answer", **options: Any) -> Score:
    """The score of an answer by `same_answer`: *not_applicable* where it is not the same and not `understood`."""
    right = same_answer(answer, truth, **options)
    score = compared(right, answer, truth, what)
    if right or understood(answer, truth):
        return score
    return replace(score, status=Status.NOT_APPLICABLE, why=f"not both numbers: {answer[:60]!r} and {truth[:60]!r}")


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


def boxed(truth: str) -> str:
    """A right response to a ground truth."""
    return f"\\boxed{{{truth}}}"


def meets(response: str, truth: str) -> bool:
    """Whether the last box of a response is the ground truth."""
    answer = last_box(response)
    return answer is not None and same_answer(answer, truth)


@rule(boxed, meets)
def numeric(response: str, ground_truth: str, *, tolerance: float = 1e-4, lenient: bool = False) -> Score:
    """Score 1 where the answer (`extract_answer`) equals the ground truth (`same_answer`), 0 where it is another number.

    An answer that is not the ground truth's text and not a number is *not applicable*: see `understood`.
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

    A box that is not the ground truth's text and not a number is *not applicable*.
    """
    require(0 <= format_score <= 1, "format_score", expected="a number in [0, 1]", found=format_score)
    answer, form = last_box(response), float(has_format(response))
    if answer is None or not answer.strip():
        score = no_answer("no \\boxed{…}" if answer is None else "the box is empty")
    else:
        score = judged(answer, ground_truth, "the box")
        if not score.scored:
            return score
    value = (1 - format_score) * score.value + format_score * form
    return score.with_value(value, accuracy=score.value, format=form)


# --- beyond numbers -------------------------------------------------------------------------------

SECONDS = 3.0
"""Time of one comparison of `numina`."""
_TOWER = re.compile(r"\^[^-+*/=,]*\^|\^\s*\{?\s*\d{4}|!")
_COMMAND = re.compile(r"\\(?:text|mathrm|textbf|mbox)\s*\{([^{}]*)\}|\\[A-Za-z]+|\b(?:sin|cos|tan|log|exp|sqrt|inf)\b")
_WORDS = re.compile(r"[^\W\d_][^\W\d_ ]{2,}(?: [^\W\d_]+)*")
_PROSE = re.compile(r"[^\W\d_]{3,}")


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
    """Score 1 where the answer (see `extract_answer`) equals the ground truth as mathematics, else 0.

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
