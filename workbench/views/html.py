"""The one place where HTML is made: the dialect that JupyterLab's sanitiser leaves alone, everything escaped.

Survives: details, tables, img with data URIs, `title`, inline styles with rgba. Is removed, and so refused by
`lint`: style and script blocks, inline svg, id, event handlers, `var(`, `hsl(`, `position`, `transform`, …
"""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Iterable, Sequence

_CELL = "padding:2px 8px;text-align:left;vertical-align:top"


def escape(text: object, limit: int | None = None) -> str:
    """Text made safe: markup escaped, control characters and direction overrides made visible, cut to `limit`."""
    raw = str(text)
    if limit is not None and len(raw) > limit:
        raw = raw[: limit - 1] + "…"
    return html.escape(plain(raw))


TEXT_LIMIT = 20_000
"""Characters of one foreign text that are shown; a note says how many were left out."""


def plain(text: str) -> str:
    """Text for a terminal or a page: control characters and direction overrides made visible, lines and tabs kept, cut to
    `TEXT_LIMIT`.
    """
    if len(text) > TEXT_LIMIT:
        text = f"{text[:TEXT_LIMIT]}… ({len(text) - TEXT_LIMIT:,} more characters)"
    return re.sub(
        r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff\ud800-\udfff]",
        lambda found: f"\\x{ord(found[0]):02x}",
        text,
    )


def terminal(lines: Iterable[str]) -> str:
    """Lines for a terminal, each made plain."""
    return "\n".join(plain(line) for line in lines)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table. `header` is text; cells are HTML already (escape what is not)."""
    head = "".join(f'<th style="{_CELL};opacity:0.65">{escape(cell)}</th>' for cell in header)
    body = "".join("<tr>" + "".join(f'<td style="{_CELL}">{cell}</td>' for cell in row) + "</tr>" for row in rows)
    return f'<table style="border-collapse:collapse;font-size:90%"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def pairs_table(pairs: Sequence[tuple[str, str]]) -> str:
    """Two columns: what, and its value; both are text."""
    rows = "".join(
        f'<tr><td style="{_CELL};opacity:0.65">{escape(what)}</td><td style="{_CELL}">{escape(value, 2000)}</td></tr>'
        for what, value in pairs
    )
    return f'<table style="border-collapse:collapse;font-size:90%"><tbody>{rows}</tbody></table>'


def fold(summary: str, body: str, *, opened: bool = False) -> str:
    """A folded section; `summary` is text, `body` HTML."""
    state = " open" if opened else ""
    return f'<details{state}><summary style="cursor:pointer">{escape(summary)}</summary>{body}</details>'


def text_block(text: object) -> str:
    """Foreign text as it stands, wrapped."""
    style = "white-space:pre-wrap;word-break:break-word;margin:2px 0;font-family:monospace;font-size:95%"
    return f'<div style="{style}">{escape(text)}</div>'


def bar(share: float, text: str, *, good: bool = True) -> str:
    """A number over a bar of `share` (0 to 1) of its width."""
    percent = max(0.0, min(share, 1.0)) * 100
    colour = "rgba(46,160,67,0.35)" if good else "rgba(207,80,60,0.35)"
    gradient = f"linear-gradient(90deg, {colour} {percent:.0f}%, rgba(128,128,128,0.08) {percent:.0f}%)"
    return f'<div style="background:{gradient};min-width:60px;padding:0 4px;border-radius:3px">{escape(text)}</div>'


def image(png: bytes, title: str = "") -> str:
    """A PNG inline."""
    data = base64.b64encode(png).decode()
    return f'<img src="data:image/png;base64,{data}" title="{escape(title)}" style="max-width:100%">'


_FORBIDDEN = {
    "<style": r"<\s*style",
    "<script": r"<\s*script",
    "<iframe": r"<\s*iframe",
    "<svg": r"<\s*svg",
    "an event handler": r"<[^>]*\son\w+\s*=",
    "id=": r"<[^>]*\sid\s*=",
    "data-": r"<[^>]*\sdata-\w+\s*=",
    "var(": r"style\s*=\s*\"[^\"]*var\(",
    "hsl(": r"style\s*=\s*\"[^\"]*hsl",
    "position": r"style\s*=\s*\"[^\"]*(?<![-\w])position\s*:",
    "transform": r"style\s*=\s*\"[^\"]*(?<![-\w])transform\s*:",
    "filter": r"style\s*=\s*\"[^\"]*(?<![-\w])filter\s*:",
}


def lint(text: str) -> list[str]:
    """What in a piece of HTML the sanitiser would remove; [] when it stays whole."""
    # what stands in quotes is text, but for styles
    bare = re.sub(r'(\w+)="[^"]*"', lambda found: found[0] if found[1] == "style" else f'{found[1]}=""', text)
    return [name for name, pattern in _FORBIDDEN.items() if re.search(pattern, bare, re.IGNORECASE)]
