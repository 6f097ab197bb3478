"""Every screen can be read and used by everybody: contrast in both themes, each control by the keyboard, each with a name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.lab import in_chromium, watched_page
from support.screens import CONTRAST, THEMES, Screen, screens, show

import workbench as wb
from workbench.widgets.layer import SamplesTable

FOCUSED = """() => {
  const box = document.activeElement;
  if (!box || box === document.body) return null;
  const style = getComputedStyle(box);
  if (!box.dataset.seen) box.dataset.seen = document.querySelectorAll("[data-seen]").length + 1;
  return [Number(box.dataset.seen), box.outerHTML.slice(0, 80), parseFloat(style.outlineWidth), style.outlineStyle];
}"""
LEFT = """() => [...document.querySelectorAll("#screen :is(button, input, select, textarea, summary, th[title], [tabindex])")]
  .filter((box) => !box.dataset.seen && !box.matches(":disabled") && box.checkVisibility()).map((box) => box.outerHTML.slice(0, 80))"""
NAMELESS = """() => [...document.querySelectorAll("#screen :is(button, input, select, textarea, [tabindex])")]
  .filter((box) => !(box.ariaLabel || box.labels?.length || (box.tagName === "BUTTON" && box.innerText.trim()) || box.tagName === "TH"))
  .map((box) => box.outerHTML.slice(0, 80))"""


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, dict[str, Screen]]]:
    with watched_page() as (page, _, _):
        yield page, screens(tmp_path_factory.mktemp("screens"))


def opened(page: Any, screen: Screen, theme: str, width: int = 1400) -> None:
    """The screen with what a first click shows."""
    show(page, screen, theme, width)
    if page.locator(".wb-samples tbody tr").count():
        page.locator(".wb-samples tbody tr").nth(1).click()
        page.locator(".wb-detail button").first.wait_for()
    for fold in page.locator("details:not([open]) > summary").all():
        if fold.is_visible():
            fold.click()


@in_chromium
@pytest.mark.parametrize("theme", THEMES)
def test_text_has_the_contrast_of_wcag_aa(drawn: tuple[Any, dict[str, Screen]], theme: str) -> None:
    page, found = drawn
    pale = {}
    for name, screen in found.items():
        opened(page, screen, theme)
        pale[name] = page.evaluate(CONTRAST, "#screen")
    assert {name: said for name, said in pale.items() if said} == {}


@in_chromium
def test_the_tabulator_reaches_every_control_and_one_sees_where_it_is(drawn: tuple[Any, dict[str, Screen]]) -> None:
    page, found = drawn
    for name, screen in found.items():
        opened(page, screen, "light")
        page.evaluate(
            "() => { document.activeElement.blur(); document.querySelector('#screen').tabIndex = -1; document.querySelector('#screen').focus(); }"
        )
        seen: list[int] = []
        while True:
            page.keyboard.press("Tab")
            at = page.evaluate(FOCUSED)
            if at is None or at[0] in seen:
                break
            seen.append(at[0])
            assert at[2] >= 1 and at[3] != "none", f"{name}: the focus is not visible at {at[1]}"
        assert page.evaluate(LEFT) == [], name
        assert page.evaluate(NAMELESS) == [], name


@in_chromium
def test_nothing_is_wider_than_a_narrow_page(drawn: tuple[Any, dict[str, Screen]]) -> None:
    page, found = drawn
    wide = {}
    for name, screen in found.items():
        if screen.widget is not None:
            opened(page, screen, "light", 500)
            wide[name] = page.evaluate("() => document.documentElement.scrollWidth")
    assert {name: width for name, width in wide.items() if width > 500} == {}


@in_chromium
def test_a_narrow_page_folds_the_filters_of_samples(drawn: tuple[Any, dict[str, Screen]]) -> None:
    page, all_of_them = drawn
    order, fold = page.get_by_label("order", exact=True), page.get_by_role("button", name="filters")
    show(page, all_of_them["samples"], "light", 900)
    assert order.is_visible() and not fold.is_visible()
    show(page, all_of_them["samples"], "light", 360)
    assert page.get_by_label("search texts").is_visible() and not order.is_visible()
    fold.click()
    assert order.is_visible() and page.get_by_label("by prompt").is_visible()
    fold.click()
    assert not order.is_visible()


@in_chromium
def test_a_live_table_is_as_many_rows_high_as_it_is_told_and_scrolls_through_all(drawn: tuple[Any, Any]) -> None:
    page, high = drawn[0], {}
    for rows in (2, 4, 500):
        view = wb.views.samples(wb.Trace.load("data/arith-batch"), rows=rows)
        show(page, Screen(SamplesTable(view), "tbody tr"), "light")
        box = page.locator(".wb-scroll").bounding_box()
        inside = "(box) => [...box.querySelectorAll('tr:has(.wb-c-row):not(thead *)')].filter((row) => row.getBoundingClientRect().bottom <= box.querySelector('tfoot td').getBoundingClientRect().top + 1).length"
        high[rows] = page.locator(".wb-scroll").evaluate(inside)
        assert box["height"] <= 0.8 * 900 + 1
    assert high[2] == 2 and high[4] == 4 and high[500] > 8
    assert f" of {len(view.frame)}" in page.locator(".wb-count").first.inner_text(), "all can be reached"


@in_chromium
def test_keys_sort_samples_and_point_at_tokens(drawn: tuple[Any, dict[str, Screen]]) -> None:
    page, found = drawn
    show(page, found["samples"], "light")
    page.locator("th.wb-c-tokens").press("Enter")
    page.wait_for_function("() => document.querySelector('.wb-bar select').value === '-tokens'")
    page.locator(".wb-scroll").press("ArrowDown")
    page.locator(".wb-detail button").first.wait_for()
    assert page.locator("tbody tr:not(.wb-group)").first.get_attribute("class") == "wb-picked"
    show(page, found["tokens"], "light")
    for key, token in (("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("Home", 0)):
        page.locator(".wb-tokens").first.press(key)
        assert f"token {token} " in page.locator(".wb-values").inner_text()


@in_chromium
def test_a_count_of_the_headline_filters_and_a_response_keeps_its_end(drawn: tuple[Any, Any]) -> None:
    """What a scorer reads stands at the end of a response, and is seen in a narrow row, too."""
    page, view = drawn[0], wb.views.samples(wb.Trace.load("data/arith-batch"))
    missed, every = int((view.index.frame["status"] == "no_answer").sum()), len(view.index.frame)
    last = str(view.frame["response"].iloc[0])[-4:].replace("\n", " ⏎ ")
    show(page, Screen(SamplesTable(view), "#screen tbody tr"), "light", 720)
    tail = page.locator("tbody tr:not(.wb-group)").first.locator(".wb-tail span").last
    assert tail.inner_text().endswith(last) and tail.evaluate("node => node.scrollWidth <= node.clientWidth + 1")
    for shown in (missed, every):  # pressed again, all are back
        page.get_by_role("button", name=f"{missed} no answer").click()
        page.get_by_text(f"{shown} of {every} samples").wait_for()
