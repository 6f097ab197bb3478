"""Rows E6 and E15 of the scorecard: what scripts draw from hostile text, and trace files that are traps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.hostile import HOSTILE, HOSTILE_PROSE, HostileTokenizer, hostile_batch
from support.lab import in_chromium, watched_page

import workbench as wb

ROOT = Path(__file__).parents[2]


def alone(page: Any, widget: Any, traits: tuple[str, ...], late: int = 0) -> None:
    """Draw a widget without Lab: a model of a dozen lines, whose messages `widget.answer` replies to, `late` ms late."""
    page.goto("about:blank")
    if not getattr(page, "_answers", False):
        page._answers = {}
        page.expose_function("reply", lambda message: page._answers["now"].answer(message))
    page._answers["now"] = widget
    state = json.dumps({name: getattr(widget, name) for name in traits})
    page.evaluate(
        """async ([code, state, late]) => {
          const listeners = [];
          const model = {
            get: (name) => model.own[name] ?? JSON.parse(state)[name],
            own: {}, set: (name, value) => { model.own[name] = value; }, save_changes: () => {},
            on: (name, listener) => { if (name === "msg:custom") listeners.push(listener); else window[name] = listener; }, off: () => {},
            send: async (message) => {
              const said = await window.reply(message);
              await new Promise((done) => setTimeout(done, late));
              listeners.forEach((listener) => listener({ ...said, asked: message.asked }));
            },
          };
          const url = URL.createObjectURL(new Blob([code], { type: "text/javascript" }));
          const module = await import(url);
          document.body.replaceChildren();
          module.default.render({ model, el: document.body });
        }""",
        [widget._esm, state, late],
    )


SAMPLES = ("columns", "known", "statuses", "query", "headline", "bins", "strips", "tabs", "picked", "rendered")
"""What the script of `SamplesTable` reads."""


# --- E6: what a script of ours draws ---------------------------------------------------------------

SINKS = (
    "innerHTML",
    "outerHTML",
    "insertAdjacentHTML",
    "document.write",
    "eval(",
    "new Function",
    "DOMParser",
    "srcdoc",
    "setAttribute",
)


def test_E6_scripts_make_text_nodes_and_markup_comes_in_at_one_place() -> None:
    folder = ROOT / "workbench" / "widgets" / "static"
    found = [
        (path.name, line.strip())
        for path in sorted(folder.rglob("*.js"))  # the library that draws curves, too
        for line in path.read_text().splitlines()
        if any(sink in line for sink in SINKS)
    ]
    assert found == [("common.js", "node.innerHTML = html;")]
    callers = [path.name for path in folder.glob("*.js") if "fromViews(" in path.read_text()]
    assert sorted(callers) == [
        "chat.js",
        "cluster.js",
        "common.js",
        "curves.js",
        "episodes.js",
        "samples.js",
        "stepping.js",
        "viewer.js",
    ], "cards, a step's samples, and faces of a stepper and an episode: linted HTML of views"


def strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from strings([*value, *value.values()])
    elif isinstance(value, list):
        for item in value:
            yield from strings(item)


@pytest.mark.slow
def test_E6_what_widgets_are_told_has_no_control_characters_and_a_bounded_size(tiny: str, tmp_path: Path) -> None:
    from workbench.widgets.layer import SamplesTable, TokenView

    for text in (HOSTILE, "x" * 10_000_000):
        batch = hostile_batch(text)
        table = SamplesTable(wb.views.samples(batch))
        tokens = TokenView(wb.views.tokens(batch, 0, tokenizer=HostileTokenizer(text[:2000])))
        replies = [
            table.answer({"kind": "rows", "order": "worst", "start": 0, "count": 50}),
            table.answer({"kind": "pick", "row": 0}),
            table.answer({"kind": "pick", "row": 1}),
            table.answer({"kind": "rows", "order": "worst", "start": 0, "count": 50, "tab": "left"}),
            table.answer({"kind": "pick", "row": 0, "tab": "left"}),
            table.answer({"kind": "diff", "row": 0, "other": 1}),
            tokens.answer({"kind": "tokens"}),
        ]
        for reply in replies:
            assert len(json.dumps(reply)) < 1_000_000
            for one in strings(reply):
                assert not set(one) & set("\x1b\x07\u202e\u202c"), one[:80]
        for widget in (table, tokens):
            assert (
                len(json.dumps(widget.get_state(["known", "tabs", "query"] if widget is table else ["labels"])))
                < 200_000
            )
            assert len(widget._esm) < 30_000


@in_chromium
def test_E6_a_script_that_is_told_markup_draws_text(tmp_path: Path) -> None:
    """The scripts alone in a browser, on a model that answers with markup: nothing runs, nothing is fetched."""
    from workbench.steps.trace import Phase
    from workbench.widgets.layer import SamplesTable, StepperFace, TokenView

    batch = hostile_batch(HOSTILE)
    table = SamplesTable(wb.views.samples(batch))
    tokens = TokenView(wb.views.tokens(batch, 0, tokenizer=HostileTokenizer(HOSTILE)))
    told = {"metrics": {HOSTILE: 1.0}, "settings": {HOSTILE: HOSTILE}}  # a metric's name stands in the phase's button
    batch = batch.with_columns({"token_level_scores": batch["advantages"]})
    trace = wb.Trace(batch).add(Phase(stage="advantage", batch=batch, wrote=("advantages",), **told))
    stage = wb.stages.Advantage(wb.functional.grpo)
    stepper = StepperFace(wb.Stepper(wb.Pipeline([stage], given=stage.reads), batch).from_trace(trace))
    with watched_page() as (page, asked, dialogs):
        alone(page, table, SAMPLES)
        page.locator(".wb-scroll tbody tr").first.wait_for()
        page.locator(".wb-scroll tbody tr").nth(1).click()
        page.locator(".wb-detail").get_by_text("response", exact=True).first.wait_for()
        drawn = page.locator("body").inner_text()
        assert "<script>alert(1)</script>" in drawn
        page.get_by_role("button", name="left out (1)").press("Enter")
        page.locator("th", has_text="left_out").wait_for()
        page.locator(".wb-columns summary").press("Enter")
        page.locator(".wb-columns input[value=why]").press("Space")
        page.locator("th", has_text="of_row").wait_for()
        page.get_by_role("button", name="to pandas").press("Enter")
        page.locator(".wb-code", has_text="left_out).to_pandas()").wait_for()
        assert "<script>alert(1)</script>" in page.locator(".wb-scroll").inner_text()
        wb.views.samples(batch).choose([])
        alone(page, tokens, ("quantities", "labels", "colour"))
        page.locator(".wb-tokens span").nth(2).hover()
        assert "<img src=x" in page.locator(".wb-tokens").first.inner_text()
        assert page.locator("body script, body img, body svg, body a, body style").count() == 0
        alone(page, stepper, ("names", "face"))
        page.locator(".wb-look").first.click()
        page.locator("code", has_text=".trace[").wait_for()
        assert "<script>alert(1)</script>" in page.locator(".wb-look").first.inner_text()
        assert page.locator("body script, body img, body svg, body a, body style").count() == 0
    assert dialogs == [] and [url for url in asked if not url.startswith(("about:", "data:", "blob:"))] == []


@in_chromium
def test_E6_a_response_drawn_as_markdown_runs_nothing_fetches_nothing_and_stays_in_its_box(tmp_path: Path) -> None:
    from workbench.widgets.layer import SamplesTable

    said = HOSTILE_PROSE + "\n\n**bold** and $\\frac{1}{2}$\n\n```python\nreturn 1\n```"
    table = SamplesTable(wb.views.samples(hostile_batch(said)))
    with watched_page() as (page, asked, dialogs):
        alone(page, table, SAMPLES)
        page.locator(".wb-scroll tbody tr:not(.wb-group)").filter(has_text="javascript").first.click()
        switch = page.get_by_role("button", name="rendered")
        switch.wait_for()
        assert switch.get_attribute("aria-pressed") == "false" and "**bold**" in page.locator(".wb-detail").inner_text()
        page.locator(".wb-samples").press("r")
        page.locator(".wb-detail mfrac").first.wait_for()
        detail = page.locator(".wb-detail")
        assert (
            "**bold**" not in detail.locator("b").all_inner_texts() and "bold" in detail.locator("b").all_inner_texts()
        )
        assert detail.locator(".wb-k-keyword").first.inner_text() == "return"
        assert "<script>alert(5)</script>" in detail.inner_text() and "(http://evil.example)" in detail.inner_text()
        assert page.locator("body :is(script, img, svg, a, style, iframe, form, input:not(.wb-bar *))").count() == 0
        width = page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        inside = detail.evaluate(
            "box => [...box.querySelectorAll('math, math *')].every((one) => one.getBoundingClientRect().left >= box.getBoundingClientRect().left - 1)"
        )
        assert width and inside
        switch.focus()
        switch.press("Enter")  # the keyboard reaches it, and stays on it
        page.get_by_text("**bold**").first.wait_for()
        assert switch.get_attribute("aria-pressed") == "false"
        assert page.evaluate("document.activeElement.textContent") == "rendered"
    assert dialogs == [] and [url for url in asked if not url.startswith(("about:", "data:", "blob:"))] == []


@pytest.mark.long
@in_chromium
def test_C1_a_view_waits_for_a_busy_kernel_and_says_so() -> None:
    """A cell runs on after the view was displayed: the answer comes late, and is drawn when it comes."""
    from workbench.widgets.layer import SamplesTable, TokenView

    batch = hostile_batch("plain text")
    table = SamplesTable(wb.views.samples(batch))
    tokens = TokenView(wb.views.tokens(batch, 0, tokenizer=HostileTokenizer("ab ")))
    with watched_page() as (page, _, _):
        alone(page, table, SAMPLES, late=3500)
        page.get_by_text("waiting for the kernel").wait_for()
        page.locator(".wb-scroll tbody tr").nth(1).wait_for()
        assert page.get_by_text("waiting for the kernel").count() == 0
        alone(page, tokens, ("quantities", "labels", "colour"), late=3500)
        page.locator("select").select_option("mask")  # pressed while nothing is there yet
        page.get_by_text("waiting for the kernel").wait_for()
        page.get_by_text("1: sampled by the model; 0: padding, tool or user text").wait_for()
        assert "ab" in page.locator(".wb-tokens").inner_text()
