"""A check for HTML that JupyterLab's sanitiser would change.

The sanitiser keeps details, tables, img with data URIs, `title`, inline styles with rgba. It removes, and `lint` therefore
refuses, style and script blocks, inline svg, id, event handlers, `var(`, `hsl(`, `position`, `transform`, …
"""

from __future__ import annotations

import re

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
    """Names of what JupyterLab's sanitiser would remove from a piece of HTML; [] where it removes nothing."""
    # attributes in quotes are text, except styles
    bare = re.sub(r'(\w+)="[^"]*"', lambda found: found[0] if found[1] == "style" else f'{found[1]}=""', text)
    return [name for name, pattern in _FORBIDDEN.items() if re.search(pattern, bare, re.IGNORECASE)]
