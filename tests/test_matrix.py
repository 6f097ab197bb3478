"""`tools/matrix.py`: what its table says of cells that passed, failed, or were not run; and Colab's versions."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
SHARED = ROOT.parent / "shared" / "data" / "matrix" / "colab-gpu-2026-08-19.txt"


@pytest.fixture
def matrix(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("matrix")


def columns(table: str, cell: int) -> list[str]:
    return [line.split(" | ")[cell].strip(" |") for line in table.splitlines() if line.startswith("| ")]


def test_a_cell_that_was_not_run_is_never_green(matrix: ModuleType) -> None:
    ended = dict.fromkeys(matrix.CHECKS, "passed")
    cells = {
        "a": matrix.Cell("one", ended=ended, versions={"numpy": "2.0"}, date="2026-01-02"),
        "b": matrix.Cell("two", versions={"numpy": "1.0"}, date="2026-01-02", reason="no Python"),
        "c": matrix.Cell("three", ended={**ended, "job": "FAILED"}, date="2026-01-02"),
    }
    table = matrix.table(cells, ["numpy"])
    assert columns(table, 1) == ["one, 3.11", "2026-01-02", *["passed"] * len(ended), "2.0"]
    assert columns(table, 2) == ["two, 3.11", *["not run"] * (1 + len(ended)), "–"]
    assert "- two, 3.11: not run, for no Python" in table
    assert "- three, 3.11: failed: notebook 101 as a job" in table and "- one" not in table


def test_what_pip_would_change_and_bring_is_read_from_its_report(matrix: ModuleType) -> None:
    wanted = [("rl_workbench", "0.1"), ("Papermill", "2.7"), ("numpy", "2.5"), ("prometheus_client", "1")]
    report = {"install": [{"metadata": {"name": name, "version": version}} for name, version in wanted]}
    there = {"numpy": "2.0", "prometheus-client": "0.9", "torch": "2.13"}
    changes, new = matrix.brought(report, there)
    assert changes == ["numpy 2.0 to 2.5", "prometheus-client 0.9 to 1"] and new == ["papermill"]


def test_what_pip_brings_stands_below_the_table_and_its_row_is_colabs_alone(matrix: ModuleType) -> None:
    ended = dict.fromkeys(matrix.CHECKS, "passed")
    others = {name: end for name, end in ended.items() if name != "pip"}
    cells = {
        "a": matrix.Cell("one", ended=others, date="2026-01-02"),
        "b": matrix.Cell("two", ended=ended, date="2026-01-02", brought="`x` changes 0 of 3 packages and brings y"),
        "c": matrix.Cell("three", brought="from an earlier run"),
    }
    table = matrix.table(cells, [])
    row = next(line for line in table.splitlines() if matrix.CHECKS["pip"] in line)
    assert row.endswith("| – | passed | not run |")
    assert "- two, 3.11: `x` changes 0 of 3 packages and brings y" in table and "earlier" not in table
    assert [name for name, cell in matrix.CELLS.items() if cell.beside] == ["colab"]


@pytest.mark.slow
@pytest.mark.long
def test_pip_changes_nothing_beside_colabs_versions(
    matrix: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An environment of `tools/colab.txt`, and a wheel of this checkout."""
    if importlib.util.find_spec("uv") is None:
        pytest.skip("uv is not installed here: tools/install.py brings it")
    monkeypatch.setattr(matrix, "BUILD", tmp_path)
    cell = matrix.CELLS["colab"]
    torch = matrix.pins((ROOT / "requirements.lock").read_text())["torch"]
    try:
        python = matrix.interpreter(cell, tmp_path)
        assert matrix.beside(cell, tmp_path, python, matrix.built_wheel(), f"{torch}+cpu"), cell.brought
    except matrix.CellNotSetUp as why:
        pytest.skip(f"Colab's versions cannot be installed here: {why}")
    assert "`rl-workbench` changes 0 of" in cell.brought and "`rl-workbench[jobs]` changes 0 of" in cell.brought


def test_the_guides_table_has_every_cell_and_check(matrix: ModuleType) -> None:
    inside = matrix.PAGE.read_text().partition("<!-- matrix -->")[2].partition("<!-- /matrix -->")[0]
    header = next(line for line in inside.splitlines() if line.startswith("| "))
    assert header == "|  | " + " | ".join(f"{cell.title}, {cell.python}" for cell in matrix.CELLS.values()) + " |"
    assert all(f"| {title} |" in inside for title in matrix.CHECKS.values())


def test_colabs_versions_are_those_of_its_list(matrix: ModuleType) -> None:
    ours = matrix.pins(matrix.COLAB.read_text())
    assert ours["traitlets"] == "5.7.1" and len(ours) > 100
    if not SHARED.is_file():
        pytest.skip("the whole list of Colab's versions, ../shared/data/matrix, is absent")
    assert ours.items() <= matrix.pins(SHARED.read_text()).items()
