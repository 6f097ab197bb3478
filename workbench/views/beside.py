"""Two samples beside each other: what was said, word by word, and each number of the one with that of the other."""

from __future__ import annotations

import re
from difflib import SequenceMatcher
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.views import document as doc
from workbench.views.sample_table import samples_table, some_rows
from workbench.views.samples import SampleIndex

if TYPE_CHECKING:
    from workbench.steps.compare import Comparison

LEFT_OUT, MARK_NEW = "background:rgba(207,80,60,0.20)", "background:rgba(46,160,67,0.25);font-weight:inherit"
_PIECES = 80
"""Pieces of a difference by words; one of more is told by lines."""
_TEXT = 8000
"""Characters of a response that are compared."""
_FACTS = ("reward", "status", "why", "answer", "truth", "advantage", "tokens", "finish")


def words(first: str, second: str) -> doc.Part:
    """A text turned into another: what was left out is struck through, what is new is marked."""
    for pattern in (r"\s+|[^\s\w]|\w+", r"[^\n]*\n?"):
        one, two = (re.findall(pattern, text) for text in (first, second))
        steps = SequenceMatcher(None, one, two, autojunk=False).get_opcodes()
        if len(steps) <= _PIECES:
            break
    found: list[doc.Part] = []
    for kind, a, b, c, d in steps:
        if kind == "equal":
            found.append("".join(one[a:b]))
            continue
        left, came = "".join(one[a:b]), "".join(two[c:d])
        found += [doc.Either(f"[-{left}-]", doc.Span(left, LEFT_OUT, "s"))] if left else []
        found += [doc.Either(f"{{+{came}+}}", doc.Span(came, MARK_NEW, "b"))] if came else []
    return doc.wrapped(*found)


class SideBySide(doc.View):
    """Two samples: a line for each number or word of their scores, those that differ in bold, and the text difference.

    Each side is a name and a line of a samples table (`samples(x).frame.loc[7]`). `brief`: only lines that differ, shorter texts.
    """

    def __init__(self, first: tuple[str, Any], second: tuple[str, Any], *, brief: bool = False) -> None:
        self.brief = brief
        self.names, self.rows = (first[0], second[0]), (first[1], second[1])

    def document(self) -> doc.Part:
        """The view's content."""
        one, two = (_facts(row) for row in self.rows)
        names = sorted({*one, *two}, key=lambda name: (_FACTS.index(name.partition("/")[0]), name))
        said = [(name, one.get(name, "–"), two.get(name, "–")) for name in names]
        said = [(name, a, b) for name, a, b in said if a != b or not self.brief]
        limit = doc.CELL if self.brief else _TEXT
        text = [f"  {name}: {a}" + f" → {b}" * (a != b) for name, a, b in said]
        page = [[doc.faint(name), *((doc.bold(a), doc.bold(b)) if a != b else (a, b))] for name, a, b in said]
        first, second = ("" if row.get("response") is None else doc.cut(row["response"], limit) for row in self.rows)
        spoken = words(first, second) if first != second else (doc.faint("one response"), doc.block(first))
        title = doc.line(doc.bold(" → ".join(self.names)))
        return title, doc.Either(text, doc.Table(["", *self.names], page, most=len(page))), spoken


def _facts(row: Any) -> dict[str, str]:
    """What is known of a sample, as text: names of columns of a samples table, reward parts among them."""
    known = {name: row[name] for name in row.index if name.partition("/")[0] in _FACTS}
    return {name: _said(value) for name, value in known.items() if value is not None and value == value and value != ""}


def _said(value: Any) -> str:
    return f"{float(value):.4g}" if isinstance(value, float | np.floating) else doc.cut(value, doc.CELL)


def difference(index: SampleIndex, row: int, other: int) -> SideBySide:
    """Two samples of one batch."""
    return SideBySide(*((f"row {one}", index.frame.iloc[one]) for one in (row, other)))


def compared_row(found: Comparison, row: int, *, brief: bool = False) -> SideBySide:
    """The view of one row on both sides of a `Comparison`. Raises `IndexError` for a row that does not exist."""
    batches = [trace.batch for trace in found.traces]
    if not 0 <= row < len(batches[0]):
        raise IndexError(f"row {row} does not exist: this comparison has rows 0 to {len(batches[0]) - 1}")
    one, two = (samples_table(some_rows(batch, [row])).iloc[0] for batch in batches)
    return SideBySide((f"row {row}, first", one), ("second", two), brief=brief)
