"""Ground truths: how a rule reads them, which of them no answer can match, and the count of those before a run."""

from __future__ import annotations

import functools
import math
import numbers
from collections import Counter
from collections.abc import Callable, Iterable
from decimal import Decimal
from typing import Any, TypeVar

from workbench.base.errors import DataError, describe
from workbench.rewards.score import Score, Status, bounded

F = TypeVar("F", bound=Callable[..., Any])
_BLANK = ("", "nan", "NaN", "<NA>", "NaT")
"""Texts that are no truth: pandas writes a missing one so."""
_KINDS = {"int": "integers", "float": "floats", "str": "texts", "NoneType": "missing", "list": "lists", "dict": "dicts"}


def as_text(truth: Any) -> str | None:
    """A ground truth as text: a text as it stands, a number (numpy's too) as Python prints it, `4.0` as `4`.

    None where nothing can be read: a missing or blank one, NaN (also as text), infinity, bytes, a list, a dict, any other
    object.
    """
    if getattr(truth, "ndim", None) == 0 and callable(getattr(truth, "item", None)):
        truth = truth.item()  # a scalar of numpy or torch
    if isinstance(truth, str):
        return None if truth.strip() in _BLANK else truth
    try:
        if isinstance(truth, numbers.Rational):
            return str(truth)
        if not isinstance(truth, numbers.Real | Decimal) or not math.isfinite(truth):
            return None
        whole = math.trunc(truth)
        return str(whole) if whole == truth else format(Decimal(str(truth)), "f")
    except (ValueError, OverflowError):  # more digits than Python prints
        return None


def no_truth(truth: Any = None) -> Score:
    """The score of a row whose ground truth is missing, or is such that no answer can match it: not applicable."""
    if truth is None:
        return Score(status=Status.NOT_APPLICABLE, why="the row has no ground truth")
    why = f"no answer can match the ground truth {describe(truth)} ({type(truth).__name__})"
    return Score(status=Status.NOT_APPLICABLE, why=why)


def rule(
    right: Callable[[Any], str], matches: Callable[[str, Any], bool], read: Callable[[Any], Any] = as_text
) -> Callable[[F], F]:
    """Decorator: makes a bounded scorer of `function(response, ground_truth, …)`, whose truths have been read.

    `right(truth)` is a right response to a truth, and `matches(response, truth)` the rule's own comparison. A truth that
    `read` returns None for, or that its own right response does not match, is *not_applicable*. The scorer's attribute
    `unscorable` says that, too, without a response (see `lint`).
    """

    @functools.lru_cache(maxsize=4096)
    def matchable(truth: Any) -> bool:
        return matches(right(truth), truth)

    def decorated(function: F) -> F:
        @functools.wraps(function)
        def scorer(response: str, ground_truth: Any, *args: Any, **options: Any) -> Score:
            truth = read(ground_truth)
            if truth is None or not matchable(truth):
                return no_truth(ground_truth)
            return function(response, truth, *args, **options)

        def unscorable(ground_truth: Any, **_: Any) -> str:
            truth = read(ground_truth)
            return no_truth(ground_truth).why if truth is None or not matchable(truth) else ""

        scorer.unscorable = unscorable  # type: ignore[attr-defined]
        return bounded(scorer)  # type: ignore[return-value]

    return decorated


class Unreadable(str):
    """Why no response to a row can be scored, where something in the row is written wrong: such rows are refused by number."""


def lint(calls: Iterable[Any], unscorable: Callable[..., str], name: str) -> str:
    """Count the rows that a scorer can never score, whatever the response: "" or a sentence, for the check before a run.

    `calls` are the scorer's arguments for each row, `unscorable(**arguments)` says why it cannot score one. Raises
    `DataError` where it can score none, and for rows that are `Unreadable`.
    """
    rows, kinds, first, wrong = 0, Counter[str](), "", list[str]()
    for rows, arguments in enumerate(calls, 1):
        why = unscorable(**arguments)
        if why:
            truth = arguments.get("ground_truth")
            kinds["empty" if isinstance(truth, str) and not truth.strip() else type(truth).__name__] += 1
            first = first or f"row {rows - 1}: {why}"
            wrong += [f"row {rows - 1}: {why}"] if isinstance(why, Unreadable) else []
    if wrong:
        found = "; ".join(wrong[:5]) + (f"; and {len(wrong) - 5:,} more" if len(wrong) > 5 else "")
        what, do = f"{len(wrong):,} of {rows:,} rows cannot be read by {name}", "mend these rows, or leave them out"
        raise DataError(what, found=found, do=do)
    bad = kinds.total()
    if not bad:
        return ""
    are = ", ".join(f"{count:,} {_KINDS.get(kind, kind)}" for kind, count in kinds.most_common(4))
    if bad == rows:
        do = "write them in the scorer's form, or pass the reward that fits these rows"
        raise DataError(f"0 of {rows:,} truths can ever score 1 by {name}", found=f"{are}; {first}", do=do)
    return f"{rows - bad:,} of {rows:,} truths can score 1 by {name}; not {are}; {first}"


def unscorable_of(scorer: Any) -> Callable[..., str] | None:
    """The attribute `unscorable` of a scorer or of the function inside a `functools.partial`; None where it has none."""
    return getattr(scorer.func if isinstance(scorer, functools.partial) else scorer, "unscorable", None)
