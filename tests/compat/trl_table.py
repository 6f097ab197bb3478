"""Writes the tables of docs/guide/from-trl.md from `compat.trl`: `python tests/compat/trl_table.py`."""

from __future__ import annotations

import re
from pathlib import Path

from workbench.compat.trl import TABLE
from workbench.compat.verl_command import keys

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "from-trl.md"
ENDS = re.compile(r"(<!-- arguments -->\n).*(<!-- end -->)", re.DOTALL)


def tables() -> str:
    """Every argument: a row for those that are done or may have no other value, one list for those that are irrelevant."""
    rows, rest = ["| TRL's `GRPOConfig` | here | note |", "|---|---|---|"], []
    for line in TABLE.strip().splitlines():
        names, kind, place, note = (cell.strip() for cell in f"{line} |".split("|")[:4])
        named = ", ".join(f"`{name}`" for name in keys(names))
        if kind == "irrelevant":
            rest.append(f"{note}: {named}")
            continue
        word, _, values = kind.partition(" unless ")
        if word == "refused":
            fine = ", ".join(f"`{one}`" for one in values.split())
            note = f"may only be {fine}" + (f"; {note}" if note else "")
        rows.append(f"| {named} | {f'`{place}`' if place else '—'} | {note} |")
    return "\n".join([*rows, "", "The following arguments are accepted, and change no result of a run of workbench. " + ". ".join(one[0].upper() + one[1:] for one in rest) + "."])  # fmt: skip


def page() -> str:
    """The page with its tables as they should be."""
    return ENDS.sub(lambda found: f"{found[1]}\n{tables()}\n\n{found[2]}", PAGE.read_text())


if __name__ == "__main__":
    PAGE.write_text(page())
