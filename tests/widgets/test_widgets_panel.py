"""The training panel: buttons that set flags, a static form beside the widget, and what is left when training ends."""

from __future__ import annotations

from typing import Any

import IPython.display
import pytest
from support.lint import lint

from workbench.base.runtime import Control
from workbench.widgets import display
from workbench.widgets.display import PanelOutput


class Handle:
    def __init__(self) -> None:
        self.bundles: list[dict[str, Any]] = []

    def update(self, shown: Any) -> None:
        self.bundles.append(shown._repr_mimebundle_())


def rows(number: int) -> list[dict[str, Any]]:
    return [
        {"training/global_step": step, "critic/score/mean": step / 9, "actor/kl_loss": 0.1, "timing_s/step": 1.0}
        for step in range(1, number + 1)
    ]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> tuple[display.TrainingPanel, Control, Handle]:
    handle, control = Handle(), Control()
    monkeypatch.setattr(IPython.display, "display", lambda shown, display_id: handle)
    return display.TrainingPanel(9, rows(2), control, tmp_path / "<b>run"), control, handle


def test_buttons_set_flags_and_nothing_else(made: Any) -> None:
    shown, control, _ = made
    shown._pause.click()
    assert control.paused and shown._pause.description == "go on"
    shown._pause.click()
    assert not control.paused and shown._pause.description == "pause"
    shown._stop.click()
    assert control.stopping and not control.interrupted and shown._stop.disabled and shown._pause.disabled


@pytest.mark.slow
def test_the_bundle_has_a_static_form_in_our_dialect(made: Any) -> None:
    shown, _, handle = made
    for row in rows(4)[2:]:
        shown.on_row(row, 60.0)
    bundle = shown._repr_mimebundle_()
    assert set(bundle) == {"text/html", "text/plain"} and "workbench-static" in bundle["text/html"]
    live = PanelOutput(shown._box.model_id)._repr_mimebundle_()
    assert live["application/vnd.jupyter.widget-view+json"]["model_id"] == shown._box.model_id
    assert live["text/html"] == live["text/plain"] == "", "where it cannot be drawn the static form is there"
    cover = shown._box.children[0]
    assert type(cover).__name__ == "Cover", "which hides the one, or the other"
    assert cover.again.startswith("continue with wb.train(…, run=") and cover.again.endswith("resume='auto')")
    assert "step 3/9" in bundle["text/plain"] or "step 4/9" in bundle["text/plain"]
    assert "data:image/png" in bundle["text/html"] and "&lt;b&gt;run" in bundle["text/html"]
    assert lint(bundle["text/html"]) == []
    # the widget's own parts were updated, and the output itself left alone: it would be drawn anew under the mouse
    said = shown._bar.value
    assert ("step 3/9" in said or "step 4/9" in said) and handle.bundles == []


def test_the_curves_go_on_with_the_steps_and_mark_what_looks_wrong(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shown, _, _ = made
    monkeypatch.setattr(display, "LIVE_EVERY", 0.0)
    monkeypatch.setattr(display, "STEPS_A_SECOND", 1e12)
    curves = shown._curves
    assert curves.alone and shown._box.children[-1] is curves
    before, first = curves.version, curves.reply({"kind": "columns", "asked": 1})
    for number in range(3, 8):
        shown.on_row({**rows(number)[-1], "actor/kl_loss": 3.0}, 60.0)
    then = curves.reply({"kind": "columns", "keys": ["KL"], "asked": 2})
    assert curves.version == before + 5 and first["steps"] == [1, 2] and then["steps"] == list(range(1, 8))
    assert [one["title"] for one in first["plots"]] == ["reward", "KL", "seconds per phase"]
    assert [one["title"] for one in then["plots"]] == ["KL"] and then["marks"][0]["text"].startswith(
        "KL to the reference"
    )
    wrong = curves.reply({"kind": "samples", "run": 0, "step": 2, "asked": 3})
    assert wrong["kind"] == "error" and "step 2 has no trace" in wrong["text"]


@pytest.mark.slow
def test_what_is_left_needs_no_kernel(made: Any) -> None:
    shown, _, handle = made
    shown.on_row(rows(3)[-1], 60.0)
    shown.close("stopped by hand after step 3; checkpoint 3")
    last = handle.bundles[-1]
    assert handle.bundles[-2] == {"text/html": "", "text/plain": ""}, "no widget that a page would look for"
    assert set(last) == {"text/html", "text/plain"} and "stopped by hand after step 3" in last["text/html"]
    assert "data:image/png" in last["text/html"] and lint(last["text/html"]) == []


def test_the_static_form_is_refreshed_now_and_then(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shown, _, handle = made
    monkeypatch.setattr(display, "STATIC_EVERY", -1e9)
    shown.on_row(rows(3)[-1], 60.0)
    assert len(handle.bundles) == 1 and "step 3/9" in handle.bundles[0]["text/plain"] and shown._cover.renewed == 1


@pytest.mark.slow
def test_symptoms_stand_once_in_the_live_form_and_below_the_bar_of_the_static_one(made: Any) -> None:
    shown, _, handle = made
    for number in range(3, 10):
        low = 0.001 if number > 4 else 1.0
        shown.on_row({**rows(number)[-1], "actor/kl_loss": 3.0, "critic/score/max": low}, 60.0)
    shown.close("<b>stopped")
    for html, times in ((shown._bar.value, 0), (handle.bundles[-1]["text/html"], 1)):
        assert html.count("KL to the reference is large") == times and "&lt;b&gt;stopped" in html
        assert lint(html) == []
    marks = shown._curves.reply({"kind": "columns", "asked": 1})["marks"]
    assert [mark["text"].startswith("KL to the reference is large") for mark in marks] == [True]
    text = handle.bundles[-1]["text/plain"].splitlines()
    assert text[1].startswith("1  KL to the reference is large (step ") and text[0].endswith("<b>stopped")
