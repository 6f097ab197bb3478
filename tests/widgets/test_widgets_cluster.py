"""The cluster's live table in a cell: what is left without a kernel, and in a real Lab, moving while another cell runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests_lab import DONE, contents, in_chromium, laboratory, page_running_all, put, run_cell, shot, until

from workbench.cluster.status import Status
from workbench.widgets import layer
from workbench.widgets.cluster import ClusterTable

FIRST = """import itertools, threading, time
from workbench.cluster.status import Status, WorkerLine
from workbench.errors import EngineError
numbers = itertools.count(1)
is_closed = False
def look():
    if is_closed:
        raise EngineError("closed")
    line = WorkerLine("actor", 0, 7, "host", "", "", 1 << 30, f"call number {next(numbers)}", 0, None, 1.0)
    return Status("<b>here</b>", (), (), (line,), (), (), time.time(), look)"""
SLEEP = "time.sleep(8)"
END = """is_closed = True
time.sleep(4)
print([one.name for one in threading.enumerate() if one.name == "workbench-cluster-table"])"""


def notebook(*cells: str) -> dict[str, Any]:
    made = [
        {"cell_type": "code", "id": f"c{n}", "source": text, "metadata": {}, "execution_count": None, "outputs": []}
        for n, text in enumerate(cells)
    ]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return {"cells": made, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def test_in_a_job_it_is_the_static_table(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[dict[str, Any]] = []
    monkeypatch.setattr(layer, "display", lambda bundle, raw: shown.append(bundle))
    monkeypatch.setattr(layer, "in_notebook", lambda: True)
    status = Status("here", (), (), (), ("a note",))
    status._ipython_display_()
    assert "a note" in shown[0]["text/html"] and "application/vnd.jupyter.widget-view+json" in shown[1]
    table = layer._alive.pop()
    assert isinstance(table, ClusterTable)
    table.close()
    shown.clear()
    monkeypatch.setenv("WORKBENCH_JOB", "1")
    status._ipython_display_()
    assert [list(one) for one in shown] == [["text/html", "text/plain"]]


@in_chromium
def test_the_table_moves_while_a_cell_runs_and_ends_with_its_cluster(tmp_path: Path) -> None:
    with laboratory(tmp_path) as lab:
        put(lab, "table.ipynb", notebook(FIRST, "look()", SLEEP))
        with page_running_all(lab, "table.ipynb") as page:
            table = page.locator(".wb")
            table.first.wait_for(timeout=60_000)
            until(page, lambda: page.locator(".jp-InputPrompt").nth(2).inner_text() == "[*]:", 30)
            seen = {table.first.inner_text()}
            until(page, lambda: seen.add(table.first.inner_text()) or len(seen) >= 3, 8)
            assert page.locator(".jp-InputPrompt").nth(2).inner_text() == "[*]:", "the kernel was busy all the time"
            assert table.count() == 1 and "<b>here</b>" in table.first.inner_text()
            assert not page.locator(".workbench-static").first.is_visible()
            shot(page, "cluster_table")
            page.wait_for_function(DONE, timeout=60_000)
            assert run_cell(page, END).strip() == "[]", "the thread has ended"
            until(page, lambda: "the cluster is closed" in table.first.inner_text(), 10)
            page.keyboard.press("Control+s")
            until(page, lambda: len(contents(lab, "table.ipynb")["cells"]) == 4, 20)
            kept = contents(lab, "table.ipynb")["cells"][1]["outputs"][0]["data"]
            assert "call number 1" in "".join(kept["text/html"]) and "text/plain" in kept
