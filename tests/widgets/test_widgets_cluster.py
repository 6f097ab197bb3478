"""The cluster's live table in a cell: what is left without a kernel, and in a real Lab, moving while another cell runs."""

from __future__ import annotations

from typing import Any

import pytest
from support.lab import DONE, contents, in_chromium, page_running_all, put, run_cell, save, shot, until

from workbench.cluster.status import ClusterStatus
from workbench.widgets import layer
from workbench.widgets.layer import ClusterTable

FIRST = """import itertools, pathlib, threading, time
from workbench.cluster.status import ClusterStatus, WorkerLine
from workbench.base.errors import EngineError
numbers = itertools.count(1)
is_closed = False
def look():
    if is_closed:
        raise EngineError("closed")
    line = WorkerLine("actor", 0, 7, "host", "", "", 1 << 30, f"call number {next(numbers)}", 0, None, 1.0)
    return ClusterStatus("<b>here</b>", (), (), (line,), (), (), time.time(), look)"""
BUSY = "while not pathlib.Path('enough.ipynb').exists(): time.sleep(0.1)"
END = """is_closed = True
end = time.monotonic() + 300
while any(one.name == "workbench-cluster-table" for one in threading.enumerate()) and time.monotonic() < end: time.sleep(0.1)
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
    status = ClusterStatus("here", (), (), (), ("a note",))
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
@pytest.mark.long
def test_the_table_moves_while_a_cell_runs_and_ends_with_its_cluster(lab: str) -> None:
    put(lab, "table.ipynb", notebook(FIRST, "look()", BUSY))
    with page_running_all(lab, "table.ipynb") as page:
        table = page.locator(".wb")
        table.first.wait_for()
        until(page, lambda: page.locator(".jp-InputPrompt").nth(2).inner_text() == "[*]:")
        seen = {table.first.inner_text()}
        until(page, lambda: seen.add(table.first.inner_text()) or len(seen) >= 3)
        assert page.locator(".jp-InputPrompt").nth(2).inner_text() == "[*]:", "the kernel was busy all the time"
        put(lab, "enough.ipynb", notebook())
        assert table.count() == 1 and "<b>here</b>" in table.first.inner_text()
        assert not page.locator(".workbench-static").first.is_visible()
        shot(page, "cluster_table")
        page.wait_for_function(DONE)
        assert run_cell(page, END).strip() == "[]", "the thread has ended"
        until(page, lambda: "the cluster is closed" in table.first.inner_text())
        save(page, lab, "table.ipynb")
        kept = contents(lab, "table.ipynb")["cells"][1]["outputs"][0]["data"]
        assert "call number 1" in "".join(kept["text/html"]) and "text/plain" in kept
