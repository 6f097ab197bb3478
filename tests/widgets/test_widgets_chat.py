"""A chat in a real JupyterLab, by keyboard: text appears while it is sampled, and the saved notebook has the conversation."""

from __future__ import annotations

import json
from typing import Any

from nbformat import v4
from support.lab import contents, in_chromium, page_after_run_all, put, run_cell, save, shot, until

CELLS = [
    """import time
import workbench as wb
from workbench.engines.local_engine.sampling import HeldRows

fast = HeldRows.advance
def slow(self, *logits):
    time.sleep(0.05)  # a model of a few hundred million parameters
    return fast(self, *logits)
HeldRows.advance = slow""",
    """def right(response, ground_truth):
    return float(str(ground_truth) in response)

model = wb.engines.local("../data/tiny-arith")
chat = wb.chat(model, base=model, reward=wb.rewards.Reward(right, in_process=True), max_tokens=400, ignore_eos=True)
chat""",
]
QUESTION = "What is 3 + 4?"


@in_chromium
def test_a_chat_by_keyboard(lab: str) -> None:
    document = v4.new_notebook(cells=[v4.new_code_cell(cell) for cell in CELLS])
    document.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    put(lab, "chat.ipynb", document)
    with page_after_run_all(lab, "chat.ipynb") as page:
        face = page.locator(".wb-chat")
        face.wait_for()
        until(page, lambda: page.locator(".workbench-static").is_hidden())
        text = face.get_by_label("message", exact=True)
        text.focus()
        page.keyboard.type(QUESTION)
        page.keyboard.press("Enter")
        grows_and_stops(page, face)
        assert text.input_value() == ""
        page.set_viewport_size({"width": 500, "height": 1000})
        answers(page, face, text)
        shot(page, "driven_chat_narrow")
        page.set_viewport_size({"width": 1400, "height": 1000})
        shot(page, "driven_chat")
        # a later cell goes on with the same chat, and the view follows
        run_cell(page, "chat.ask('And 5?', max_tokens=4) and print(len(chat.turns))")
        until(page, lambda: face.first.locator(".wb-exchange").count() == 3)
        save(page, lab, "chat.ipynb")
        kept = json.dumps(contents(lab, "chat.ipynb")["cells"][1]["outputs"])
        assert "workbench-static" in kept and QUESTION in kept and "stopped" in kept and "1 row kept" in kept


def grows_and_stops(page: Any, face: Any) -> None:
    """The first answer is longer each time one looks; Stop keeps it, and the other side is not asked."""
    first = face.locator(".wb-said").first
    until(page, lambda: len(first.inner_text()) > 5)
    before = len(first.inner_text())
    until(page, lambda: len(first.inner_text()) > before)
    until(page, lambda: "answering" in face.inner_text() and face.get_by_role("button", name="send").is_disabled())
    shot(page, "driven_chat_streaming")
    face.get_by_role("button", name="Stop").focus()
    page.keyboard.press("Enter")
    until(page, lambda: "stopped" in face.inner_text() and face.get_by_role("button", name="send").is_enabled())
    assert len(first.inner_text()) >= before and "no answer" in face.inner_text()


def answers(page: Any, face: Any, text: Any) -> None:
    """Other settings, a whole answer, its tokens, its score, a row."""
    face.get_by_label("max tokens").focus()
    page.keyboard.press("Control+a")
    page.keyboard.type("8")
    text.focus()
    page.keyboard.type(QUESTION)
    page.keyboard.press("Enter")
    until(page, lambda: face.get_by_role("button", name="keep it").count() == 2)
    assert face.locator(".wb-exchange").count() == 2 and "8 tokens · length" in face.inner_text()
    assert f"chat.ask({QUESTION!r}, max_tokens=8)" in face.inner_text()
    shown = face.get_by_role("button", name="tokens", exact=True).last
    shown.focus()
    page.keyboard.press("Enter")
    until(page, lambda: face.locator(".wb-said span[style*=background]").count() >= 8)
    assert face.locator(".wb-said span[title*=log_prob]").first.is_visible()
    face.get_by_label("right answer").focus()
    page.keyboard.type("3")
    page.keyboard.press("Enter")
    until(page, lambda: "reward" in face.locator(".wb-foot").last.inner_text())
    assert shown.get_attribute("aria-pressed") == "true", "what was opened stays open"
    keep = face.get_by_role("button", name="keep it").last
    keep.focus()
    page.keyboard.press("Enter")
    until(page, lambda: "1 kept" in face.inner_text())
