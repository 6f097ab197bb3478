"""What a person does with the live views of a notebook in a real JupyterLab, and what is left without a kernel."""

from __future__ import annotations

import re
from typing import Any

from support.lab import contents, run_cell, save, shot, until


def step_and_back(lab: str, page: Any, name: str) -> None:
    """101: each face shows what its own cell did, and the last one follows a later cell; the buttons of an earlier one draw it
    anew and move nothing; those of the last go back a phase and on again, and show their line of code; a phase that is pressed is
    shown, and ↶ goes back."""
    faces = page.locator(".wb")
    assert "▶ reward" in faces.first.inner_text() and "● update_actor" not in faces.first.inner_text()
    face = faces.last
    face.scroll_into_view_if_needed()
    until(page, lambda: "● update_actor" in face.inner_text())
    old = faces.first
    old.get_by_role("button", name="next", exact=True).click()
    until(page, lambda: "this view shows it as it is now" in old.inner_text() and "● update_actor" in old.inner_text())
    face.get_by_role("button", name="back", exact=True).click()
    until(page, lambda: ".back()" in face.inner_text() and "▶" in face.inner_text())
    shot(page, "driven_back")
    face.get_by_role("button", name="next").click()
    until(page, lambda: ".next()" in face.inner_text())
    face.get_by_role("button", name="● reward").click()
    until(page, lambda: '.trace["reward"]' in face.inner_text())
    assert "● update_actor" in face.inner_text(), "shown, not moved"
    assert "token_level_scores" in face.locator(".wb-shown").first.inner_text()
    shot(page, "driven_phase")
    face.get_by_role("button", name="back to before advantage").click()
    until(page, lambda: '.back(to="advantage")' in face.inner_text() and "▶ advantage" in face.inner_text())
    face.get_by_role("button", name="run until").click()
    until(page, lambda: "● update_actor" in face.inner_text())


def look_around(lab: str, page: Any, name: str) -> None:
    """104: sort, filter, search, pick; colour, hover; next, back; and the page without a kernel."""
    inspector(page)
    tokens(page)
    stepping(page)
    after_a_restart(page)
    without_a_kernel(lab, page, name)


def restart(page: Any) -> None:
    """Restart the kernel, as a person does."""
    page.get_by_role("menuitem", name="Kernel", exact=True).click()
    page.get_by_role("menuitem", name=re.compile(r"^Restart Kernel(…|\.\.\.)")).click()
    page.get_by_role("button", name="Confirm Kernel Restart").click()
    page.get_by_text("| Idle").first.wait_for()


def after_a_restart(page: Any) -> None:
    """Every view says what to do, and its static form is there again in its place."""
    restart(page)
    said = page.locator(".wb-note", has_text="the kernel was restarted: run this cell again")
    until(page, lambda: said.count() > 1)
    static = page.locator(".workbench-static")
    said.first.scroll_into_view_if_needed()
    assert all(one.is_visible() for one in said.all()) and all(one.is_visible() for one in static.all())
    assert not any(one.is_visible() for one in page.locator(".wb").all())
    shot(page, "driven_restarted")


def turn_by_turn(lab: str, page: Any, name: str) -> None:
    """106: the trained policy calls, its tool answers, the answer is written anew by hand, and the episode run on."""
    # something is printed first: the static form is an output that the widget hides
    run_cell(page, "g = wb.Stepper(pipe, rows.batch(1)).episode(0).next()\nprint('said')\ng")
    until(page, lambda: page.locator(".jp-CodeCell").last.locator(".wb textarea").count() == 1)
    face = page.locator(".jp-CodeCell").last.locator(".wb")
    face.scroll_into_view_if_needed()
    assert "0 · assistant" in face.inner_text()
    said = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "6 * 7"}}\n</tool_call>'
    text = face.locator("textarea")
    face.locator("select").select_option("turn 0, assistant")
    assert text.input_value(), "the turn's own words"
    text.fill(said)
    face.get_by_role("button", name="replace turn 0").click()
    until(page, lambda: "g.replace(0, " in face.inner_text() and "next: the tool, calculator(" in face.inner_text())
    face.get_by_role("button", name="next").click()
    until(page, lambda: "1 · tool" in face.inner_text() and "42" in face.inner_text())
    face.locator("select").select_option("turn 1, tool")
    assert text.input_value() == "42"
    text.fill("<b>43</b>")
    face.get_by_role("button", name="replace turn 1").click()
    until(page, lambda: face.inner_text().count("written by hand") == 2 and "<b>43</b>" in face.inner_text())
    shot(page, "driven_episode")
    face.get_by_role("button", name="run").click()
    until(page, lambda: "over: " in face.inner_text())
    assert face.get_by_role("button", name="next").is_disabled()
    assert run_cell(page, "print(g.turns[1].text, g.next_role)").strip() == "<b>43</b> None"


DRIVEN = {"101_one_step": step_and_back, "104_what_if": look_around, "106_agents": turn_by_turn}


def inspector(page: Any) -> None:
    table = page.locator(".wb-scroll").first
    samples = table.locator("tbody tr:not(.wb-group)")
    samples.first.wait_for()
    every = samples.count()
    assert every == 50, "a page of 64"
    shot(page, "driven_inspector")
    # the static form stands above, hidden
    assert page.locator(".workbench-static").nth(1).is_hidden()
    page.get_by_label("by prompt").first.check()
    heads = table.locator("tr.wb-group b")
    until(page, lambda: len(set(heads.all_inner_texts())) == heads.count() == 7)
    assert "right" in table.locator("tr.wb-group").first.inner_text()
    page.get_by_label("by prompt").first.uncheck()
    table.locator("th", has_text="tokens").first.click()
    until(page, lambda: column(table, "tokens") == sorted(column(table, "tokens"), reverse=True))
    table.locator("th", has_text="tokens").first.click()
    until(page, lambda: column(table, "tokens") == sorted(column(table, "tokens")))
    low = page.get_by_placeholder("reward ≥")
    low.fill("1")
    until(page, lambda: set(column(table, "reward")) <= {1.0} and samples.count() < every)
    low.fill("")
    page.get_by_placeholder("search texts").fill("no such words")
    until(page, lambda: samples.count() == 0)
    page.get_by_placeholder("search texts").fill("Quick")
    until(page, lambda: 0 < samples.count() < every)
    page.get_by_placeholder("search texts").fill("")
    until(page, lambda: samples.count() == every)
    page.locator(".wb-link", has_text="right").click()
    until(page, lambda: set(column(table, "reward")) == {1.0})
    page.locator(".wb-link", has_text="right").click()
    until(page, lambda: samples.count() == every)
    page.get_by_placeholder("search texts").fill("Quick")
    until(page, lambda: 0 < samples.count() < every)
    samples.nth(1).click()
    card = page.locator(".wb-detail").first
    card.get_by_text("the prompt's samples").wait_for()
    row = int(samples.nth(1).locator("td").first.inner_text())
    assert f"row {row}" in card.inner_text() and "status" in card.inner_text()
    shot(page, "driven_card")
    card.locator("select").first.select_option(index=1)
    until(page, lambda: "→ row" in card.inner_text())
    shot(page, "driven_difference")
    card.get_by_role("button", name="tokens", exact=True).click()
    until(page, lambda: "how much better" in card.inner_text() or "tokens" in card.inner_text())
    said = run_cell(page, "print('picked', samples.picked, 'of', len(samples.frame))")
    assert f"picked {row} of {table.locator('tbody tr').count()}" in said


def column(table: Any, name: str) -> list[float]:
    return [float(text) for text in table.locator(f"td.wb-c-{name}").all_inner_texts()]


def tokens(page: Any) -> None:
    """Two rows of one prompt stand above each other: each token's colour is its own, an advantage's that of its row."""
    box = page.locator(".wb-tokens").first
    box.scroll_into_view_if_needed()
    pieces = box.locator(".wb-pair span")
    until(page, lambda: pieces.count() > 5)

    def colours() -> list[str]:
        return [span.evaluate("span => span.style.background") for span in pieces.all()]

    until(page, lambda: len(set(colours())) > 2)
    entropy = colours()
    page.get_by_label("colour by", exact=True).first.select_option("advantage")
    page.get_by_text("advantage: how much better than expected").locator("visible=true").first.wait_for()
    page.get_by_text("the same for all tokens of a row").locator("visible=true").first.wait_for()
    until(page, lambda: colours() != entropy and len(set(colours())) <= 2)
    pieces.first.hover()
    until(page, lambda: "token 0 " in page.locator(".wb-values").first.inner_text())
    assert "entropy" in page.locator(".wb-values").first.inner_text(), "all numbers, whatever colours"
    shot(page, "driven_tokens")


def stepping(page: Any) -> None:
    page.locator(".wb-bar").first.scroll_into_view_if_needed()
    face = page.locator(".wb").first
    face.get_by_role("button", name="next").click()
    until(page, lambda: "s.next()" in face.inner_text() and "● update_actor" in face.inner_text())
    assert face.get_by_role("button", name="next").is_disabled()
    shot(page, "driven_stepper")
    face.locator("select").select_option("reward")
    face.get_by_role("button", name="back to", exact=True).click()
    until(page, lambda: 's.back(to="reward")' in face.inner_text() and "▶ reward" in face.inner_text())
    assert "reward" in run_cell(page, "print(s.next_stage)")


def without_a_kernel(lab: str, page: Any, name: str) -> None:
    """Saved, the kernel shut down, the page loaded anew: tables and tokens are there to read."""
    save(page, lab, name)
    page.get_by_role("menuitem", name="Kernel", exact=True).click()
    page.get_by_role("menuitem", name="Shut Down Kernel", exact=True).click()
    page.wait_for_timeout(1500)
    page.reload()
    static = page.locator(".workbench-static")
    static.first.wait_for()
    page.wait_for_timeout(4000)
    for number in range(static.count()):
        assert static.nth(number).is_visible()
    for number in range(3):
        static.nth(number).scroll_into_view_if_needed()
        shot(page, f"driven_without_kernel_{number}")
    saved = contents(lab, name)
    outputs = [output.get("data", {}) for cell in saved["cells"] for output in cell.get("outputs", [])]
    assert static.count() == sum("application/vnd.jupyter.widget-view+json" in data for data in outputs) >= 4
