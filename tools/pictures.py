"""`make pictures`: a screenshot of every screen, in two themes and at three widths, and its structure beside the last kept one.

The structure of a screen is a line for each of its visible boxes with a class, and for each text: place, size and words. It is
small, it is kept in `tests/widgets/structure`, and a difference says which box moved or which text changed. Pictures go to
`build/pictures` and are for people.

    make pictures                      all screens; fails where a text is cut, pale, covered or wider than its page
    make pictures ARGS="--only samples stepper"
    make pictures ARGS=--keep          what is drawn now is what the next comparison begins from
"""

from __future__ import annotations

import argparse
import difflib
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support.lab import watched_page  # noqa: E402
from support.screens import CONTRAST, THEMES, first_click, screens, show  # noqa: E402
from support.structure import FAULTS, OUTLINE, WIDTHS  # noqa: E402

KEPT = ROOT / "tests" / "widgets" / "structure"


def main() -> int:
    """Draw the screens that were asked for; the number of screens with a fault or another structure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="names of screens, or beginnings of names")
    parser.add_argument("--keep", action="store_true", help="write the structures that the next run compares with")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "pictures")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    wrong = 0
    folder = Path(tempfile.gettempdir()) / "workbench-pictures"  # a run's page shows its path: one name, one width
    shutil.rmtree(folder, ignore_errors=True)
    with watched_page() as (page, _, _):
        page.set_default_timeout(20_000)
        page.on("console", lambda message: print(message.text) if message.type == "error" else None)
        for name, screen in screens(folder, options.only).items():
            outline, faults = _drawn(page, name, screen, options.output)
            wrong += _compared(name, outline, options.keep) + bool(faults)
            print(f"{name}: {len(faults)} faults", *faults, sep="\n  ")
    return wrong


def _drawn(page: Any, name: str, screen: Any, output: Path) -> tuple[list[str], list[str]]:
    """A screen's pictures; its outline at every width, and what is wrong with it in any theme or width."""
    outline, faults = list[str](), list[str]()
    for width in WIDTHS:
        for theme in THEMES:
            show(page, screen, theme, width)
            first_click(page)
            where = f"{width} {theme}"
            page.screenshot(
                path=str(output / f"{name.replace(', ', '_').replace(' ', '_')}_{width}_{theme}.png"), full_page=True
            )
            faults += [f"{where}: pale: {one}" for one in page.evaluate(CONTRAST, "#screen")]
            faults += [f"{where}: {one}" for one in page.evaluate(FAULTS, "#screen")]
        outline += [f"{width}", *page.evaluate(OUTLINE, "#screen")]
    return outline, faults


def _compared(name: str, outline: list[str], keep: bool) -> bool:
    """Print how a screen's structure differs from the kept one; whether it does."""
    file = KEPT / f"{name.replace(', ', '_').replace(' ', '_')}.txt"
    before = file.read_text().splitlines() if file.is_file() else []
    if keep:
        file.parent.mkdir(exist_ok=True)
        file.write_text("\n".join(outline) + "\n")
    differs = list(difflib.unified_diff(before, outline, "kept", "now", n=0, lineterm=""))
    if differs:
        print(name, *differs[:40], sep="\n")
    return bool(differs) and not keep


if __name__ == "__main__":
    sys.exit(min(main(), 100))
