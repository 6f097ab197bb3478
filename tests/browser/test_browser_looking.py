"""The inspector, the token view and the stepper's buttons in a real JupyterLab; and what is left without a kernel."""

from __future__ import annotations

from typing import Any

from tests_lab import contents, needs_chromium, page_after_run_all, put, run_cell, shot, until

pytestmark = needs_chromium

CELLS = [
    """import workbench as wb
engine = wb.engines.local("../data/tiny-arith", lr=2e-4)
rows = wb.datasets.load("../data/arith/train.parquet", max_prompt_length=256)
s = wb.Stepper(wb.recipes.grpo(engine, group_size=4, kl_coef=0.001, max_tokens=48), rows.batch(6))
s.run(until="advantage")""",
    "v = wb.views.samples(s, rows=5)\nv",
    "k = wb.views.tokens(s, 2, against_row=3)\nk",
]


def notebook(*cells: str) -> dict[str, Any]:
    return {
        "cells": [
            {"cell_type": "code", "source": text, "metadata": {}, "outputs": [], "execution_count": None, "id": f"c{n}"}
            for n, text in enumerate(cells)
        ],
        "metadata": {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def test_look_sort_filter_pick_colour_step_and_what_is_left_without_a_kernel(lab: str) -> None:
    put(lab, "looking.ipynb", notebook(*CELLS))
    with page_after_run_all(lab, "looking.ipynb", 120) as page:
        inspector(page)
        tokens(page)
        stepping(page)
        without_a_kernel(lab, page)
    saved = contents(lab, "looking.ipynb")
    widgets = sum(
        "application/vnd.jupyter.widget-view+json" in o.get("data", {}) for c in saved["cells"] for o in c["outputs"]
    )
    assert widgets >= 3


def inspector(page: Any) -> None:
    table = page.locator(".wb-scroll").first
    table.locator("tbody tr").first.wait_for(timeout=20_000)
    assert table.locator("tbody tr").count() == 24
    shot(page, "looking_inspector")
    # the static form stands above, hidden
    assert page.locator(".workbench-static").nth(1).is_hidden()
    table.locator("th", has_text="tokens").first.click()
    until(page, lambda: column(table, "tokens") == sorted(column(table, "tokens"), reverse=True), 10)
    table.locator("th", has_text="tokens").first.click()
    until(page, lambda: column(table, "tokens") == sorted(column(table, "tokens")), 10)
    low = page.get_by_placeholder("reward ≥")
    low.fill("1")
    until(page, lambda: set(column(table, "reward")) <= {1.0} and table.locator("tbody tr").count() < 24, 10)
    low.fill("")
    page.get_by_placeholder("search texts").fill("no such words")
    until(page, lambda: table.locator("tbody tr").count() == 0, 10)
    page.get_by_placeholder("search texts").fill("Quick")
    until(page, lambda: 0 < table.locator("tbody tr").count() < 24, 10)
    table.locator("tbody tr").nth(1).click()
    card = page.locator(".wb-detail").first
    card.get_by_text("other samples").wait_for(timeout=10_000)
    row = int(table.locator("tbody tr").nth(1).locator("td").first.inner_text())
    assert f"row {row}" in card.inner_text() and "status" in card.inner_text()
    shot(page, "looking_card")
    said = run_cell(page, "print('picked', v.picked, 'of', len(v.frame))")
    assert f"picked {row} of {table.locator('tbody tr').count()}" in said


def column(table: Any, name: str) -> list[float]:
    return [float(text) for text in table.locator(f"td.wb-c-{name}").all_inner_texts()]


def tokens(page: Any) -> None:
    box = page.locator(".wb-tokens").first
    box.scroll_into_view_if_needed()
    until(page, lambda: box.locator("span").count() > 5, 10)
    choose = page.locator(".wb-bar select").filter(has_text="sampler_difference").first
    choose.select_option("entropy")
    page.get_by_text("entropy of the next-token distribution").locator("visible=true").first.wait_for(timeout=10_000)
    box.locator("span").nth(3).hover()
    until(page, lambda: "token 2, id" in page.locator(".wb-values").first.inner_text(), 10)
    assert "entropy" in page.locator(".wb-values").first.inner_text()
    colours = {box.locator("span").nth(n).evaluate("span => span.style.background") for n in range(1, 8)}
    assert len(colours) > 2
    shot(page, "looking_tokens")
    assert "entropy" in run_cell(page, "print(k.colour)")


def stepping(page: Any) -> None:
    page.locator(".wb-bar").first.scroll_into_view_if_needed()
    face = page.locator(".wb").first
    face.get_by_role("button", name="next").click()
    until(page, lambda: "s.next()" in face.inner_text() and "● update_actor" in face.inner_text(), 60)
    assert face.get_by_role("button", name="next").is_disabled()
    shot(page, "looking_stepper")
    face.locator("select").select_option("reward")
    face.get_by_role("button", name="run until").click()
    until(page, lambda: 's.back(to="reward")' in face.inner_text() and "▶ reward" in face.inner_text(), 30)
    assert "reward" in run_cell(page, "print(s.upcoming)")


def without_a_kernel(lab: str, page: Any) -> None:
    """Saved, the kernel shut down, the page loaded anew: tables and tokens are there to read."""
    page.keyboard.press("Control+s")
    page.wait_for_timeout(2000)
    page.get_by_role("menuitem", name="Kernel", exact=True).click()
    page.get_by_role("menuitem", name="Shut Down Kernel", exact=True).click()
    page.wait_for_timeout(1500)
    page.reload()
    static = page.locator(".workbench-static")
    static.first.wait_for(timeout=60_000)
    page.wait_for_timeout(4000)
    for number in range(static.count()):
        static.nth(number).scroll_into_view_if_needed()
        shot(page, f"looking_without_kernel_{number}")
    assert static.count() == 3 and all(static.nth(number).is_visible() for number in range(3))
