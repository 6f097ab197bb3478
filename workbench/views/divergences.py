"""Where two traces part: the place in one line, a few tokens around it, what follows from it, what may explain it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from workbench.views.html import escape, fold, table, terminal, text_block

if TYPE_CHECKING:
    from workbench.divergence import Beside, Divergence, Spread

_TEXT = 60
_MARK = "rgba(207,80,60,0.30)"


def divergence_text(found: Divergence, rows: int = 12) -> str:
    """The first line says where; then tokens around it, what follows, and notes. What follows is read for it."""
    lines = [title(found)]
    if found.beside:
        lines.append(f"  {'token':>7}  {'id':<15} {'first':>14} {'second':>14}")
    for one in found.beside:
        first, second = apart(one.first, one.second)
        mark = "→" if one.here else "*" if one.differs else " "
        lines.append(f"{mark} {one.token:>7}  {_ids(one):<15} {first:>14} {second:>14}")
    if len(found.later) > 1:
        lines.append(f"what differs from there on: {len(found.later)} columns and metrics")
        width = max(len(spread.column or "") for spread in found.later[:rows])
        for spread in found.later[:rows]:
            lines.append(f"  {spread.phase or '':<14} {spread.column or '':<{width}}  {_extent(spread)}")
    if len(found.later) > rows:
        lines.append(f"  … and {len(found.later) - rows} more")
    if found.notes:
        lines += ["notes", *(f"  {note}" for note in found.notes)]
    return terminal(lines)


def divergence_html(found: Divergence) -> str:
    """The same as tables, texts in full in a fold."""
    parts = [f"<div><b>{escape(title(found))}</b></div>"]
    if found.beside:
        parts.append(table(["token", "id", "first", "second"], [_row(one) for one in found.beside]))
    if found.character is not None:
        both = table(["first", "second"], [[text_block(found.first), text_block(found.second)]])
        parts.append(fold("both texts", both))
    if len(found.later) > 1:
        body = [
            [escape(spread.phase or ""), escape(spread.column or ""), escape(_extent(spread))] for spread in found.later
        ]
        parts.append(
            fold(f"what differs from there on: {len(body)}", table(["phase", "column", "by"], body), opened=True)
        )
    if found.notes:
        parts.append(table(["notes"], [[escape(note, 400)] for note in found.notes]))
    return "".join(parts)


def title(found: Divergence) -> str:
    """`first divergence: phase old_log_prob, column old_log_probs, row 3 (uid …), token 17: -0.4213 against -0.4209`."""
    if found.identical:
        return f"identical: {_amount(found)} compared" if any(found.compared) else "nothing was compared"
    before = f" (the same before: {_amount(found)})" if any(found.compared) else ""
    return f"first divergence: {_place(found)}: {_what(found)}{before}"


def _amount(found: Divergence) -> str:
    words = ("phase", "column", "metric")
    counts = zip(found.compared, words, strict=True)
    return ", ".join(f"{count} {word}{'' if count == 1 else 's'}" for count, word in counts if count)


def _place(found: Divergence) -> str:
    parts = [f"phase {found.phase}"] if found.phase else []
    if found.column is not None:
        parts.append(f"{'metric' if found.why == 'metric' else 'column'} {found.column}")
    if found.row is not None:
        other = "" if found.other_row in (None, found.row) else f" (row {found.other_row} of the second)"
        parts.append(f"row {found.row}{other}" + (f" (uid {found.uid})" if found.uid is not None else ""))
    if found.token is not None:
        parts.append(f"token {found.token}")
    if found.inside and found.why == "values":
        parts.append(found.inside)
    if found.character is not None:
        parts.append(f"character {found.character}")
    return ", ".join(parts)


def _what(found: Divergence) -> str:
    if found.why == "phase" or found.why == "column":
        return f"only the {'first' if found.second is None else 'second'} has it"
    if found.why == "rows":
        counts = f" ({found.inside})" if found.inside else ""
        return f"other rows, {_said(found.first)} against {_said(found.second)}{counts}"
    if found.character is not None:
        return " against ".join(_excerpt(text, found.character) for text in (found.first, found.second))
    if found.why == "order":
        return f"the phases stand in another order, {found.first} against {found.second}"
    kinds = {"shape": "shape ", "dtype": "dtype "}
    first, second = apart(found.first, found.second)
    ids = found.token_ids
    token = f", token id {_side(ids[0])} against {_side(ids[1])}" if ids and ids[0] != ids[1] else ""
    token = "" if ids == (found.first, found.second) else token
    return f"{kinds.get(str(found.why), '')}{first} against {second}{token}"


def apart(first: Any, second: Any) -> tuple[str, str]:
    """Both values in as few digits as show that they are not the same, four at least."""
    if isinstance(first, float) and isinstance(second, float) and first != second:
        for digits in range(4, 17):
            pair = f"{first:.{digits}g}", f"{second:.{digits}g}"
            if pair[0] != pair[1]:
                return pair
    return _said(first), _said(second)


def _said(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value) if isinstance(value, str | int | tuple) else repr(value)
    return text if len(text) <= _TEXT else text[: _TEXT - 1] + "…"


def _excerpt(text: str, character: int) -> str:
    """A text around the first character that differs."""
    start, end = max(character - _TEXT // 2, 0), character + _TEXT // 2
    return f"{'…' if start else ''}{text[start:end]!r}{'…' if end < len(text) else ''}"


def _ids(one: Beside) -> str:
    if one.ids == (None, None):
        return ""
    return str(one.ids[0]) if one.ids[0] == one.ids[1] else f"{_side(one.ids[0])} | {_side(one.ids[1])}"


def _side(token: int | None) -> str:
    return "–" if token is None else str(token)


def _row(one: Beside) -> list[str]:
    cells = [str(one.token), escape(_ids(one)), *map(escape, apart(one.first, one.second))]
    if not one.differs:
        return cells
    cells = [f'<span style="background:{_MARK}">{cell}</span>' for cell in cells]
    return [f"<b>{cell}</b>" for cell in cells] if one.here else cells


def _extent(spread: Spread) -> str:
    rows = f"{spread.rows} row{'' if spread.rows == 1 else 's'}" if spread.rows else ""
    largest = "" if spread.largest is None else f"by up to {spread.largest:.3g}" if rows else f"by {spread.largest:.3g}"
    if spread.largest is not None and math.isinf(spread.largest):
        largest = "a side has no number"
    return ", ".join(part for part in (rows, largest) if part)
