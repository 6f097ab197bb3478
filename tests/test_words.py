"""Words that are not used in what a user reads: plain ones and the field's terms stand in their place."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOT_USED = {
    r"in hand": "present",
    r"part most": "differ most",
    r"told from": "distinguished from, tell … from",
    r"knows? better": "say what the setting skips",
    r"(to|for) who": "to anyone who",
    r"people ask for": "say what is shown",
    r"(the|a) \w+'s affair": "is up to, chooses",
    r"leads? out and": "a link out of the folder",
    r"no answer for half a minute": "waiting for the kernel",
    r"kernel is gone": "the kernel was restarted, has ended",
    r"as much harmful": "the most harmful",
    r"shall": "has to, is",
    r"thus|hence|whence|thereof|herein|hereby|whilst|amongst|upon": "so, of it, while, among, on",
    r"amiss|betimes|lest|yonder|afresh|forthwith|nought|heed|reckon|gainsay": "wrong, early, so that not, again, at once, 0",
    r"what to turn|turn: \{": "what to change",
    r"mend the": "repair, correct",
    r"goes? otherwise|begins? otherwise|ends? a turn of calls otherwise": "differently",
    r"the very (step|machine|process|token)": "this, the same",
    r"holds the policy where|stands in the prompt|for want of|laid over it|in (his|her|their) head": "say it in the field's words",
    r"leverag\w+|utiliz\w+|seamless\w*|effortless\w*|blazing\w*|delv\w+": "use, or a number",
    r"simply|obviously|of course|just works": "leave it out",
}
"""Pattern of a word or phrase → what to write. A word joins where a reader stumbled over it, or marketing would write it."""


def texts(path: Path) -> Iterator[str]:
    """What a reader sees of a file: prose of pages and notebooks, strings and docstrings of Python, a script as it is."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        for cell in json.loads(text)["cells"]:
            yield "".join(cell["source"])
    elif path.suffix == ".py":
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
    else:
        yield text


def read() -> Iterator[Path]:
    for folder, kind in (
        ("workbench", "*.py"),
        ("workbench/widgets/static", "*.js"),
        ("docs/guide", "*.md"),
        ("notebooks", "*.ipynb"),
    ):
        yield from sorted(path for path in (ROOT / folder).rglob(kind) if "uplot" not in path.parts)
    yield from (ROOT / "README.md", ROOT / "docs" / "index.md")


@pytest.mark.slow
def test_no_text_that_a_user_reads_has_a_word_that_is_not_used() -> None:
    pattern = re.compile("|".join(rf"\b(?:{word})\b" for word in NOT_USED), re.IGNORECASE)
    found = []
    for path in read():
        for text in texts(path):
            found += [
                f"{path.relative_to(ROOT)}: …{text[max(m.start() - 30, 0) : m.end() + 30]!r}"
                for m in pattern.finditer(text)
            ]
    assert found == [], "\n".join(found)


def test_the_rule_sees_what_it_forbids() -> None:
    for text in ("after the step in hand", "rows that part most", "to who has it", "We utilize it", "it shall be"):
        assert any(re.search(rf"\b(?:{word})\b", text, re.IGNORECASE) for word in NOT_USED), text
