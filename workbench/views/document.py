"""A view's content as a tree of lines, pairs, tables and folds, which is rendered as text and as HTML.

A `str` in the tree is text, whoever wrote it: it is made plain and escaped where it is rendered, and no part of the tree
takes markup. A closed fold and a picture are in the HTML only; `Either` holds what the two forms show differently.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape as escape_markup
from typing import TypeAlias

from workbench.base.shown import Shown, plain
from workbench.base.shown import number as number

CELL = 2000
"""Most characters of a cell or value that are shown."""
UP, DOWN, MUCH = "0,158,115", "213,94,0", "139,108,209"
"""Red, green, blue of the scales, as in `widgets/static/tokens.css`: above and below 0 or a mean; of one direction."""
_WRAPPED = "white-space:pre-wrap;word-break:break-word;font-family:monospace;font-size:95%"
_CELL_STYLE, _HEADING = "padding:2px 8px;text-align:", "opacity:0.65;font-size:11px"
_SHORT = 24
"""Characters of a cell that stays on one line: where all cells do, none needs its place in a row."""
_FIGURE = re.compile(r"[-+]?[\d.,]+(e[-+]?\d+)?( s| ms| [GM]iB|%)?|–|nan|inf|")
_TRACK, _BAR = "rgba(128,128,128,.25)", "display:inline-block;width:56px;height:8px;margin-right:6px;border-radius:2px"


@dataclass(frozen=True)
class Span:
    """Content in an HTML element `tag`, with a CSS style, a title on hover and other attributes; only its text in a
    terminal.
    """

    part: Part
    style: str = ""
    tag: str = "span"
    title: str = ""
    attributes: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class Image:
    """A PNG picture, shown only in HTML; `png` is called when the HTML is made."""

    png: Callable[[], bytes]
    title: str = ""


@dataclass(frozen=True)
class Table:
    """A table: rows of cells under a header. In a terminal the columns are aligned, to the right if `right`.

    A table without rows shows nothing. Of more than `most` rows the first ones are shown, and a line says how many are
    left out.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[Part]]
    right: bool = False
    most: int = 200


@dataclass(frozen=True)
class Fold:
    """Content that a click on its summary unfolds in HTML. A terminal shows it only if it is `opened` from the start."""

    summary: str
    part: Part
    opened: bool = False


@dataclass(frozen=True)
class Either:
    """Content that differs between the two forms: `text` for a terminal, `page` for HTML. Either may be empty."""

    text: Part = ()
    page: Part = ()


Node: TypeAlias = Span | Image | Table | Fold | Either
Part: TypeAlias = "str | Node | Sequence[Part] | Callable[[], Part]"
"""A text, a node, several of them, or a function without arguments that makes one when it is rendered."""
BREAK, RULE = Span(" ", tag="br"), Span(" ", tag="hr")
"""A line end or a rule inside a cell; a space in a terminal."""


def line(*parts: Part, style: str = "", title: str = "") -> Span:
    """Make a separate line (HTML `div`) of parts side by side, with a CSS style and a title on hover."""
    return Span(parts, style, "div", title)


def bold(*parts: Part, style: str = "", title: str = "") -> Span:
    """Make parts bold."""
    return Span(parts, style, "b", title)


def small(*parts: Part) -> Span:
    """Make parts small."""
    return Span(parts, tag="small")


def faint(*parts: Part) -> Span:
    """Make parts paler."""
    return Span(parts, "opacity:0.65")


def wrapped(*parts: Part, style: str = "") -> Span:
    """Make a block of monospaced text that keeps its line ends and wraps; parts of it may be styled spans."""
    return Span(parts, f"{_WRAPPED};{style}", "div")


def block(text: object) -> Span:
    """Make a block of monospaced text that keeps its line ends and wraps."""
    return wrapped(str(text), style="margin:2px 0")


def bar(share: float, text: str, good: bool = True, signed: bool = False) -> Span:
    """Show `text`; in HTML beside a bar that is filled to `share` (0 to 1), green if `good`, else orange.

    A `signed` bar begins in its middle: to the right up to a share of 1, to the left down to −1.
    """
    end = max(-1.0, min(share, 1.0))
    first, last = sorted((50.0, 50 + 50 * end)) if signed else (0.0, 100 * max(end, 0.0))
    ends = f"{_TRACK} {first:.0f}%,rgba({UP if good else DOWN},.75) {first:.0f}% {last:.0f}%,{_TRACK} {last:.0f}%"
    return line(Span("", f"{_BAR};background:linear-gradient(90deg,{ends})"), text, style="white-space:nowrap")


def chip(text: str, value: float = 0.0, title: str = "") -> Span:
    """Show a short text on the colour of a number's sign: green above 0, orange below, grey for 0."""
    shade = UP if value > 0 else DOWN if value < 0 else "128,128,128"
    return Span(text, f"background:rgba({shade},.18);padding:0 5px;border-radius:3px;white-space:nowrap", title=title)


def pairs(facts: Sequence[tuple[str, Part]]) -> Either:
    """Show (name, value) pairs: one per line in a terminal, a table in HTML."""
    rows: list[list[Part]] = [[faint(what), value] for what, value in facts]
    return Either([line(f"  {what}: ", value) for what, value in facts], Table((), rows, most=len(rows)))


def filled(header: Sequence[str], rows: Sequence[Sequence[Part]]) -> Part:
    """Make a table without the columns that are `–` in all rows; a line under it names them."""
    columns = dict(zip(header, zip(*rows, strict=True), strict=False))
    kept = {name: cells for name, cells in columns.items() if any(cell != "–" for cell in cells)}
    empty = ", ".join(name for name in columns if name not in kept)
    return Table([*kept], [*zip(*kept.values(), strict=True)]), line(small(faint(f"  no {empty}"))) if empty else ()


def stacked(parts: Sequence[Part]) -> Part:
    """Put parts under each other within a line or a cell; side by side in a terminal."""
    return [(BREAK, part) if place else part for place, part in enumerate(parts)]


# --- the two forms --------------------------------------------------------------------------------


def text(document: Part) -> str:
    """Render a document as text for a terminal, one line for each block."""
    return "\n".join(map(plain, _lines(document)))


def html(document: Part) -> str:
    """Render a document as HTML that needs no script and no kernel; all text in it is escaped."""
    return "".join(f"<div>{escape(one)}</div>" if isinstance(one, str) else _element(one) for one in _flat(document))


def _flat(part: Part) -> list[str | Node]:
    if isinstance(part, str | Node):
        return [part]
    return _flat(part()) if callable(part) else [one for inner in part for one in _flat(inner)]


def _lines(part: Part) -> list[str]:
    """Return a document's lines for a terminal, before control characters are made visible."""
    return [line for one in _flat(part) for line in ([one] if isinstance(one, str) else _text_lines(one))]


def _text_lines(node: Node) -> list[str]:
    match node:
        case Span(part):
            return ["".join(_lines(part))]
        case Table():
            return _columns(node)
        case Fold(summary, part, opened):
            return [summary, *_lines(part)] if opened else []
        case Either(part):
            return _lines(part)
    return []


def _columns(table: Table) -> list[str]:
    rows = table.rows[: table.most]
    cells = [["".join(_lines(cell)).replace("\n", " ⏎ ")[:CELL] for cell in row] for row in rows]
    cells = [list(table.header), *cells] if cells and any(table.header) else cells
    # the last column is never padded
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)][:-1]
    aligned = str.rjust if table.right else str.ljust
    padded = [[*map(aligned, row, widths), row[-1]] for row in cells]
    return [f"  {'  '.join(row)}".rstrip() for row in padded] + [f"  {note}" for note in _left(table)]


def _left(table: Table) -> list[str]:
    left = len(table.rows) - table.most
    return [f"… and {left} more"] if left > 0 else []


def _element(node: Node) -> str:
    match node:
        case Span(tag=("br" | "hr") as tag):
            return f"<{tag}>"
        case Span(part, style, tag, title, attributes):
            further = ((name, escape(value)) for name, value in attributes)
            options = ("style", style), ("title", escape(title)), *further
            attached = "".join(f' {name}="{value}"' for name, value in options if value)
            return f"<{tag}{attached}>{_inline(part)}</{tag}>"
        case Image(png, title):
            data = base64.b64encode(png()).decode()
            return f'<img src="data:image/png;base64,{data}" title="{escape(title)}" style="max-width:100%">'
        case Table(header, rows, most=most) if rows:
            shown = rows[:most]
            short = all(isinstance(cell, str) and len(cell) < _SHORT for row in shown for cell in row)
            place = _CELL_STYLE if short else f"vertical-align:top;{_CELL_STYLE}"
            styles = [place + _side(column) for column in zip(*shown, strict=True)]
            styles[0] += ";padding-left:0"
            titled = zip(styles, header, strict=False)
            head = "".join(f'<th style="{style};{_HEADING}">{escape(cell)}</th>' for style, cell in titled)
            cells = (
                "".join(f'<td style="{s}">{_cell(c)}</td>' for s, c in zip(styles, row, strict=True)) for row in shown
            )
            body = "".join(f"<tr>{row}</tr>" for row in cells)
            opening = '<table style="border-collapse:collapse;font-size:13px">'
            above = f"<thead><tr>{head}</tr></thead>" if any(header) else ""
            return f"{opening}{above}<tbody>{body}</tbody></table>{html(_left(node))}"
        case Fold(summary, part, opened):
            state, style = " open" if opened else "", "cursor:pointer"
            return f'<details{state}><summary style="{style}">{escape(summary)}</summary>{html(part)}</details>'
        case Either(_, page):
            return html(page)
    return ""


def _inline(part: Part) -> str:
    return "".join(escape(one) if isinstance(one, str) else _element(one) for one in _flat(part))


def _side(column: Sequence[Part]) -> str:
    """Return how a column is aligned: numbers alone stand right-aligned under each other."""
    return "right" if all(isinstance(cell, str) and _FIGURE.fullmatch(cell) for cell in column) else "left"


def _cell(part: Part) -> str:
    return escape(cut(part, CELL)) if isinstance(part, str) else _inline(part)


class View(Shown):
    """Base of the objects that functions of `workbench.views` return: `repr` is their text, a notebook shows their
    HTML.
    """

    def document(self) -> Part:
        """Build the view's content as a tree of parts, from which `text` and `html` are rendered."""
        raise NotImplementedError(f"{type(self).__name__} has no method `document`")

    def text(self) -> str:
        """Return the view as text, for a terminal."""
        return text(self.document())

    def html(self) -> str:
        """Return the view as HTML, which is kept in an executed notebook."""
        return html(self.document())

    __repr__ = text
    _repr_html_ = html


# --- words ----------------------------------------------------------------------------------------


def escape(text: object) -> str:
    """Turn a text into HTML: control characters are made visible, and markup is escaped."""
    return escape_markup(plain(str(text)))


def counted(count: int, one: str, many: str = "") -> str:
    """Format a number with its noun: `1 row`, `2 rows`. `many` is the plural where it is not `one` with an s."""
    return f"{count} {one if count == 1 else many or one + 's'}"


def heights(counts: Sequence[float], most: float) -> str:
    """Draw counts as blocks of their height, from a blank for 0 to a full block for `most`."""
    return "".join(" ▁▂▃▄▅▆▇█"[math.ceil(8 * count / most)] for count in counts)


def cut(text: object, limit: int) -> str:
    """Cut a text to at most `limit` characters; where it is cut the last one is `…`."""
    whole = str(text)
    return whole if len(whole) <= limit else whole[: limit - 1] + "…"


def one_line(text: object, limit: int = 110) -> str:
    """Put a text on one line: cut to `limit` characters, line ends and control characters made visible."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in cut(text, limit))
