r"""The answer that a text has in a box: LaTeX's `\boxed{…}`, as solutions of MATH and responses write it."""

from __future__ import annotations


def last_box(text: str) -> str | None:
    r"""The text in the last `\boxed{…}`, up to its matching brace; None without one, or where it is never closed."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    inside = start + len("\\boxed{")
    depth = 1
    for place in range(inside, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[inside:place]
    return None
