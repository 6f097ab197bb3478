"""The scorecard is current: its tests are there, and its page is what the table says."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from scorecard import PAGE, ROWS, STARS, page, without_run

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("row", ROWS)
def test_every_row_has_its_tests(row: str) -> None:
    assert ROWS[row].tests
    for place in ROWS[row].tests:
        path, name = place.split("::")
        tree = ast.parse((TESTS / path).read_text())
        assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, place


def test_every_row_of_the_list_is_there() -> None:
    counts = {"A": 15, "B": 18, "C": 10, "D": 8, "E": 15}
    assert list(ROWS) == [f"{part}{number}" for part, most in counts.items() for number in range(1, most + 1)]
    assert len(STARS) == 27


def test_the_page_is_what_the_table_says() -> None:
    assert without_run(PAGE.read_text(encoding="utf-8")) == without_run(page({})), "make scorecard writes it anew"


def test_a_row_says_what_was_skipped_failed_or_not_run() -> None:
    first, *others = ROWS["A3"].tests
    lines = page({first: {"a": "passed", "b": "FAILED"}, others[0]: {"": "skipped: no Chromium"}}).splitlines()
    row = next(line for line in lines if line.startswith("| A3"))
    whole = len(ROWS["A3"].tests)
    assert row.endswith(f"| 0 of {whole} passed; FAILED; skipped: no Chromium; {whole - 2} not run |")
    assert next(line for line in lines if line.startswith("| A4")).count("of") >= 1
    assert next(line for line in lines if line.startswith("| A1")).endswith("| not run |")
