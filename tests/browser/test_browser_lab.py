"""Notebooks in a real JupyterLab in headless Chromium: run all cells, look at what a person would see."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from nbformat import v4
from support.driving import DRIVEN, restart
from support.lab import (
    DONE,
    ROOT,
    contents,
    needs_chromium,
    page_after_run_all,
    page_running_all,
    put,
    save,
    shot,
    until,
    with_parameters,
)
from support.patience import patience

from workbench.engines.vllm_server.engine import VllmSettings, importable, interpreter

pytestmark = needs_chromium


NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SAMPLER = "vllm" if importable(interpreter(VllmSettings())) else "local"
SMALL = {
    "102_rewards": {"steps": 4},
    "103_algorithms": {"updates": 2},
    "104_what_if": {"updates": 2},
    "106_agents": {"steps": 4, "batch_size": 4, "num_eval_rows": 16},
    "107_reward_models": {"steps": 2, "policy_steps": 2, "batch_size": 8, "num_pairs": 8},
    "109_distillation": {"teacher_steps": 12, "steps": 4, "num_eval_rows": 16},
    "110_in_and_out": {"steps": 4, "num_eval_rows": 16},
    "111_real_model": {
        "model": "data/tiny-arith",
        "rule": "no_commas",
        "steps": 4,
        "num_eval_rows": 16,
        "test_freq": 4,
    },
    "201_train_grpo": {"steps": 4, "batch_size": 4, "num_eval_rows": 16},
    "202_train_ppo": {"steps": 4, "batch_size": 4, "num_eval_rows": 16},
    "203_compare": {"seeds": [0, 1], "steps": 2, "batch_size": 4, "num_eval_rows": 8},
    "301_on_a_cluster": {"steps": 2, "sampler": SAMPLER},
}
"""Parameters of those that would take minutes; the rest run as they are."""
SHOWN: dict[str, tuple[str, ...]] = {
    "101_one_step": ("0.7071", "update_actor", "samples, worst first", "Trace of step 1", "advantages changed sign"),
    "102_rewards": (
        "rows that the scorers score differently",
        "No such file or directory",
        "advantages changed sign",
        "step 4/4",
    ),
    "103_algorithms": ("reinforce_plus_plus_baseline", "cosine of the two updates", "influence"),
    "104_what_if": ("first divergence", "not run again", "cosine of the two updates", "the pin gets"),
    "105_replay_a_run": ("kept because", "not run again", "identical: 6 phases"),
    "106_agents": (
        "next: the tool, calculator(",
        "num_tool_calls",
        "step 4/4",
        "held-out reward after",
        "advantages changed sign",
        "equal nodes joined",
    ),
    "108_harness": (
        "tokens are trained on",
        "largest difference: ",
        "held-out reward after",
        "not sampled by the model",
    ),
    "109_distillation": (
        "teacher_log_prob",
        "probability, teacher",
        "cosine of the two updates",
        "step 4/4",
        "DPO on the pairs",
    ),
    "110_in_and_out": ("send", "step 4/4", "reward 1: the answer is right", "assistant"),
    "111_real_model": ("update_actor", "step 4/4", "reward before", "sampled"),
    "201_train_grpo": ("step 4/4", "held-out reward after"),
    "202_train_ppo": ("step 4/4", "critic/vf_explained_var", "held-out reward after"),
    "203_compare": ("rloo 1 done", "finished", "minus grpo, by seed"),
    "301_on_a_cluster": ("nothing has started", "rollout-0", "WorkerLost", "step 2/2", "advantage"),
}
"""What a person must be able to read when all cells have run."""
IMAGES = {
    "102_rewards": 2,
    "103_algorithms": 2,
    "106_agents": 2,
    "108_harness": 2,
    "109_distillation": 2,
    "110_in_and_out": 1,
    "111_real_model": 2,
    "201_train_grpo": 2,
    "202_train_ppo": 4,
    "203_compare": 1,
    "301_on_a_cluster": 3,
}
"""Live curves, and those drawn from the run folder."""


SHORT = ("101_one_step",)
"""What a browser shows that a job does not: buttons, tables, steppers; the others run in it with all tests."""


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=path.stem, marks=[] if path.stem in SHORT else pytest.mark.long) for path in NOTEBOOKS],
)
def test_all_cells_run_and_can_be_read_in_a_real_lab(lab: str, path: Path) -> None:
    put(lab, path.name, with_parameters(path, SMALL.get(path.stem, {})))
    with page_after_run_all(lab, path.name) as page:
        for kind in ("error", "stderr"):
            assert page.locator(f"[data-mime-type='application/vnd.jupyter.{kind}']").all_inner_texts() == []
        text = page.locator(".jp-Notebook").inner_text()
        for number, words in enumerate(SHOWN.get(path.stem, ())):
            assert words in text, words
            page.get_by_text(words).locator("visible=true").first.scroll_into_view_if_needed()
            shot(page, f"{path.stem}_{number}")
        images = page.locator(".jp-OutputArea-output img")
        for number in range(images.count()):
            # one that lies under its widget is there, and hidden
            images.nth(number).evaluate("image => image.scrollIntoView()")
            shot(page, f"{path.stem}_image_{number}")
            assert images.nth(number).evaluate("image => image.naturalWidth") > 100
        assert images.count() >= IMAGES.get(path.stem, 0)
        open_ = page.locator(".jp-OutputArea-output details[open]")
        closed = page.locator(".jp-OutputArea-output details:not([open])").locator("visible=true")
        if closed.count():  # folding works with what the sanitiser leaves
            opened = open_.count()
            closed.first.locator("summary").first.scroll_into_view_if_needed()
            closed.first.locator("summary").first.click()
            assert open_.count() == opened + 1
            shot(page, f"{path.stem}_fold")
        if path.stem in DRIVEN:
            DRIVEN[path.stem](lab, page, path.name)


def step_shown(page: Any) -> int:
    """The step that the training cell shows; 0 before the first."""
    lines = page.locator(".jp-OutputArea-output").get_by_text(re.compile(r"^step \d+/")).locator("visible=true")
    found = [re.match(r"step (\d+)/", line) for line in lines.all_inner_texts()]
    return max((int(one[1]) for one in found if one), default=0)


def training_cell(document: Any) -> dict[str, Any]:
    return next(cell for cell in document["cells"] if "wb.train(" in "".join(cell["source"]))


@pytest.mark.long
def test_pause_go_on_reload_and_stop_a_training_cell(lab: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    values = {"steps": 400, "batch_size": 4, "group_size": 4, "num_eval_rows": 8, "test_freq": 0, "save_freq": 0}
    document = with_parameters(ROOT / "notebooks" / "201_train_grpo.ipynb", {**values, "run": str(run)})
    put(lab, "buttons.ipynb", document)
    with page_running_all(lab, "buttons.ipynb") as page:
        pause = page.get_by_role("button", name="pause")
        pause.wait_for()
        until(page, lambda: step_shown(page) >= 2)
        pause.scroll_into_view_if_needed()
        pause.click()
        go_on = page.get_by_role("button", name="go on")
        go_on.wait_for()
        until(page, lambda: "· paused" in page.locator(".jp-Notebook").inner_text().replace("\xa0", " "))
        rows = len((run / "metrics.jsonl").read_text().splitlines())
        page.wait_for_timeout(1500)
        assert len((run / "metrics.jsonl").read_text().splitlines()) == rows, "it trained on while paused"
        page.locator(
            ".wb-readout", has_text=re.compile(r"^step \d+ · reward")
        ).wait_for()  # curves to point at, while it trains
        shot(page, "buttons_paused")
        go_on.click()
        held = step_shown(page)
        until(page, lambda: step_shown(page) >= held + 2)
        save(page, lab, "buttons.ipynb")  # what Lab does by itself every two minutes
        page.reload()
        stop = page.get_by_role("button", name="stop", exact=True)
        stop.wait_for()
        began = step_shown(page)
        until(page, lambda: step_shown(page) >= began + 2)
        shot(page, "buttons_after_reload")
        stop.click()
        until(page, lambda: (run / "summary.json").exists())
        until(page, lambda: "stopped by hand after step" in page.locator(".jp-Notebook").inner_text())
        shot(page, "buttons_stopped")
        summary = json.loads((run / "summary.json").read_text())
        assert summary["checkpoints"] == [summary["steps"]] and 4 <= summary["steps"] < 400
        save(page, lab, "buttons.ipynb")
        cell = page.locator(".jp-CodeCell", has_text="wb.train(").last
        static = cell.locator(".workbench-static").first
        assert static.is_hidden() and cell.locator(".wb-curves").is_visible(), "one of the two"
        restart(page)
        cell.get_by_text("the kernel was restarted: continue with wb.train(…, run=").locator("visible=true").wait_for()
        assert static.is_visible() and cell.locator(".wb-curves").is_hidden() and not stop.is_visible()
        static.scroll_into_view_if_needed()
        shot(page, "buttons_restarted")
    saved = contents(lab, "buttons.ipynb")
    cell = training_cell(saved)
    shown = [output for output in cell["outputs"] if "data" in output]
    assert shown and all("text/html" in output["data"] for output in shown)
    assert "step" in "".join("".join(output["data"]["text/html"]) for output in shown)


WORDS = """() => {
  window.words = [];
  new MutationObserver(() => document.querySelectorAll(".wb-note, .wb-problem").forEach((node) => {
    if (node.textContent && !window.words.includes(node.textContent)) window.words.push(node.textContent);
  })).observe(document.body, { subtree: true, childList: true, characterData: true });
}"""
VIEWS = (
    """import json, os, time
from pathlib import Path
os.chdir(Path.cwd().parent)
import workbench as wb
engine = wb.engines.local("data/tiny-arith", lr=2e-4)
rows = wb.rows("data/arith/train.parquet", max_prompt_length=256)
pipe = wb.recipes.grpo(engine, group_size=2, kl_coef=0.001, max_tokens=16)
s = wb.Stepper(pipe, rows.batch(2)).run(until="old_log_prob")
s""",
    "s.run(until='advantage')\nwb.views.samples(s, rows=4)",
    "wb.views.tokens(s, 0, 'entropy')",
    "time.sleep(SECONDS)",
    "t = s.fork().back(to='reward').run(until='advantage')\nwb.views.tokens(s, 1, 'advantage', against=t)",
    "s.compare(t)",
    """run = Path("waits_SECONDS")
run.mkdir()
(run / "settings.json").write_text('{"format": 4, "train": {"steps": 3}}')
(run / "metrics.jsonl").write_text("".join(json.dumps({"training/global_step": n, "critic/score/mean": n / 4}) + "\\n" for n in (1, 2, 3)))
wb.load_run(run).curves()""",
    "time.sleep(SECONDS);",
)


@pytest.mark.parametrize(
    ("seconds", "burning"), [pytest.param(7, 0, id="short"), pytest.param(40, 2, id="busy", marks=pytest.mark.long)]
)
def test_every_view_is_live_when_the_kernel_is_idle_and_none_says_that_it_is_gone(
    lab: str, seconds: int, burning: int
) -> None:
    cells = [v4.new_code_cell(source.replace("SECONDS", str(seconds))) for source in VIEWS]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    name = f"waits_{seconds}.ipynb"
    put(lab, name, v4.new_notebook(cells=cells, metadata=kernel))
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(burning)]
    try:
        with page_running_all(lab, name) as page:
            page.evaluate(WORDS)
            under = page.locator(".wb-under")
            until(page, lambda: under.count() > 1 and page.locator(".wb-note", has_text="waiting").count() > 1)
            page.locator(".wb-note", has_text="waiting").first.scroll_into_view_if_needed()
            shot(page, f"waits_{seconds}_during")
            page.wait_for_function(DONE)
            idle = time.monotonic()
            until(page, lambda: page.locator(".wb").count() == 5 and not under.count())
            assert time.monotonic() - idle < patience(5)
            until(page, lambda: "▶ update_actor" in page.locator(".wb").first.inner_text())  # a later cell moved it
            words = page.evaluate("window.words")
            assert set(words) == {"waiting for the kernel: a cell is running, and this view loads when it ends"}
            assert not any(one.is_visible() for one in page.locator(".wb-note").all())
            page.locator(".wb").first.scroll_into_view_if_needed()
            shot(page, f"waits_{seconds}_after")
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


MIDDLE = (
    """import time
import workbench as wb
def slow(response):
    time.sleep(0.5)
    return 1.0
rows = wb.rows("../data/arith/train.parquet", max_prompt_length=256)
pipe = wb.recipes.grpo(wb.engines.local("../data/tiny-arith"), slow, group_size=8, max_tokens=8)
s = wb.Stepper(pipe, rows.batch(16)).run(until="rollout")
s""",
    "s.next()",
)


def test_a_restart_in_the_middle_of_a_step_is_said_where_it_ran(lab: str) -> None:
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    cells = [v4.new_code_cell(source) for source in MIDDLE]
    put(lab, "middle.ipynb", v4.new_notebook(cells=cells, metadata=kernel))
    with page_running_all(lab, "middle.ipynb") as page:
        first, second = page.locator(".jp-CodeCell").all()[:2]
        until(page, lambda: re.search("reward · .* of 128 rows .* · ■ stops it", second.inner_text()))
        restart(page)
        until(page, lambda: "the kernel was restarted: run this cell again" in first.inner_text())
        until(page, lambda: "broken off: the kernel was restarted; run the cells above" in second.inner_text())
        assert "stops it" not in second.inner_text() and " left" not in second.inner_text()
        assert "▶ reward" in first.inner_text(), "what was done before is still seen"
        shot(page, "restarted_in_a_step")
