"""Notebooks in a real JupyterLab in headless Chromium: run all cells, look at what a person would see."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
pytestmark = [
    pytest.mark.slow,
    pytest.mark.browser,
    pytest.mark.skipif(
        CHROMIUM is None, reason="no Chromium on this machine (make browser installs one where apt can)"
    ),
]


NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SMALL = {
    "102_rewards": {"steps": 4},
    "201_train_grpo": {"steps": 4, "batch_size": 4, "heldout_rows": 16},
    "202_train_ppo": {"steps": 4, "batch_size": 4, "heldout_rows": 16},
    "203_compare": {"steps": 2, "batch_size": 4, "heldout_rows": 8},
}
"""Parameters of those that would take minutes; the rest run as they are."""
SHOWN: dict[str, tuple[str, ...]] = {
    "101_one_step": ("0.7071", "update_actor", "samples, worst first", "Trace of step 1", "advantages changed sign"),
    "102_rewards": (
        "rows that the scorers judge differently",
        "No such file or directory",
        "advantages changed sign",
        "step 4/4",
    ),
    "103_algorithms": ("reinforce_plus_plus_baseline", "cosine between the updates", "influence"),
    "201_train_grpo": ("step 4/4", "held-out reward after"),
    "202_train_ppo": ("step 4/4", "critic/vf_explained_var", "held-out reward after"),
    "203_compare": ("reinforce_plus_plus done", "finished"),
}
"""What a person must be able to read when all cells have run."""
IMAGES = {"102_rewards": 2, "103_algorithms": 2, "201_train_grpo": 2, "202_train_ppo": 4, "203_compare": 1}
"""Live curves, and those drawn from the run folder."""
SETTINGS: dict[str, dict[str, str]] = {
    # Lab takes cells that are out of sight out of the page; the tests read the whole notebook
    "notebook-extension/tracker": {"windowingMode": "none"},
    "apputils-extension/notification": {"fetchNews": "false"},
}
DONE = """() => {
  const prompts = [...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')].map(e => e.textContent.trim());
  if (document.querySelector("[data-mime-type='application/vnd.jupyter.error']")) return true;
  return prompts.length && prompts.every(text => /^\\[\\d+\\]:$/.test(text));
}"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address with token of a JupyterLab on a copy of the notebooks and the data."""
    home = tmp_path_factory.mktemp("lab")
    for name in ("notebooks", "data"):
        shutil.copytree(ROOT / name, home / "root" / name, ignore=shutil.ignore_patterns("__pycache__"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    token = secrets.token_hex(16)
    env = {**os.environ, "OMP_NUM_THREADS": "1"} | {
        f"JUPYTER_{name}_DIR": str(home / name.lower()) for name in ("CONFIG", "DATA", "RUNTIME")
    }
    env["IPYTHONDIR"] = str(home / "ipython")
    env["JUPYTERLAB_SETTINGS_DIR"] = str(home / "settings")
    for plugin, settings in SETTINGS.items():
        file = home / "settings" / "@jupyterlab" / f"{plugin}.jupyterlab-settings"
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps(settings))
    # the kernel must be this Python, wherever the environment stands
    env["JUPYTER_PATH"] = str(Path(sys.prefix) / "share" / "jupyter")
    command = [
        sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ServerApp.ip=127.0.0.1",
        f"--ServerApp.port={port}", "--ServerApp.port_retries=0", f"--IdentityProvider.token={token}",
        f"--ServerApp.root_dir={home / 'root'}", "--LabApp.extension_manager=readonly", "--LabApp.news_url=",
    ]  # fmt: skip
    server = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(120):
            try:
                urllib.request.urlopen(f"{address}/api/status?token={token}", timeout=2).read()
                break
            except OSError:
                time.sleep(0.5)
        else:
            pytest.fail("JupyterLab did not start")
        yield f"{address}|{token}"
    finally:
        server.terminate()
        server.wait(timeout=20)


@contextmanager
def page_after_run_all(lab: str, notebook: str, timeout: float) -> Iterator[Any]:
    """The page of a notebook in a fresh workspace, when each of its cells has its number."""
    with page_running_all(lab, notebook) as page:
        page.wait_for_function(DONE, timeout=timeout * 1000)
        yield page


@contextmanager
def page_running_all(lab: str, notebook: str) -> Iterator[Any]:
    """The same as soon as all cells have been told to run."""
    from playwright.sync_api import sync_playwright

    address, token = lab.split("|")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, headless=True, args=FLAGS)
        try:
            page = browser.new_page(viewport={"width": 1400, "height": 1000})
            workspace = secrets.token_hex(4)
            page.goto(f"{address}/doc/workspaces/{workspace}/tree/notebooks/{notebook}?token={token}")
            page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=90_000)
            # the toolbar's indicator says idle before the kernel is there, and Run All would be lost
            page.get_by_text("| Idle").first.wait_for(timeout=90_000)
            page.get_by_role("menuitem", name="Run", exact=True).click()
            page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
            yield page
        finally:
            browser.close()


def shot(page: Any, name: str) -> None:
    folder = os.environ.get("WORKBENCH_SCREENSHOTS")
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        page.screenshot(path=str(Path(folder) / f"{name}.png"))


def with_parameters(path: Path, values: dict[str, Any]) -> dict[str, Any]:
    """The notebook with other defaults in its parameters cell."""
    document = json.loads(path.read_text())
    cell = next(cell for cell in document["cells"] if "parameters" in cell["metadata"].get("tags", []))
    text = "".join(cell["source"])
    for name, value in values.items():
        text, count = re.subn(rf"^({name}: \w+ = )\S+", rf"\g<1>{value!r}", text, flags=re.MULTILINE)
        assert count == 1, name
    cell["source"] = text
    return document


def put(lab: str, name: str, document: dict[str, Any]) -> None:
    """Write a notebook where the server sees it."""
    address, token = lab.split("|")
    request = urllib.request.Request(
        f"{address}/api/contents/notebooks/{name}?token={token}",
        data=json.dumps({"type": "notebook", "format": "json", "content": document}).encode(),
        method="PUT",
        headers={"Content-Type": "application/json", "Authorization": f"token {token}"},
    )
    urllib.request.urlopen(request, timeout=30).read()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_all_cells_run_and_can_be_read_in_a_real_lab(lab: str, path: Path) -> None:
    put(lab, path.name, with_parameters(path, SMALL.get(path.stem, {})))
    with page_after_run_all(lab, path.name, 240) as page:
        for kind in ("error", "stderr"):
            assert page.locator(f"[data-mime-type='application/vnd.jupyter.{kind}']").all_inner_texts() == []
        text = page.locator(".jp-Notebook").inner_text()
        for number, words in enumerate(SHOWN.get(path.stem, ())):
            assert words in text, words
            page.get_by_text(words).locator("visible=true").first.scroll_into_view_if_needed()
            shot(page, f"{path.stem}_{number}")
        images = page.locator(".jp-OutputArea-output img")
        for number in range(images.count()):
            images.nth(number).scroll_into_view_if_needed()
            shot(page, f"{path.stem}_image_{number}")
            assert images.nth(number).evaluate("image => image.naturalWidth") > 100
        assert images.count() >= IMAGES.get(path.stem, 0)
        folds = page.locator(".jp-OutputArea-output details")
        closed = page.locator(".jp-OutputArea-output details:not([open])")
        if closed.count():  # folding works with what the sanitiser leaves
            opened = folds.count() - closed.count()
            closed.first.locator("summary").first.scroll_into_view_if_needed()
            closed.first.locator("summary").first.click()
            assert page.locator(".jp-OutputArea-output details[open]").count() == opened + 1
            shot(page, f"{path.stem}_fold")


def step_shown(page: Any) -> int:
    """The step that the training cell shows; 0 before the first."""
    lines = page.locator(".jp-OutputArea-output").get_by_text(re.compile(r"^step \d+/")).locator("visible=true")
    found = [re.match(r"step (\d+)/", line) for line in lines.all_inner_texts()]
    return max((int(one[1]) for one in found if one), default=0)


def until(page: Any, ready: Any, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, page.locator(".jp-Notebook").inner_text()[-1500:]
        page.wait_for_timeout(200)


def test_pause_go_on_reload_and_stop_a_training_cell(lab: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    values = {"steps": 400, "batch_size": 4, "group_size": 4, "heldout_rows": 8, "test_freq": 0, "save_freq": 0}
    document = with_parameters(ROOT / "notebooks" / "201_train_grpo.ipynb", {**values, "run": str(run)})
    put(lab, "buttons.ipynb", document)
    with page_running_all(lab, "buttons.ipynb") as page:
        pause = page.get_by_role("button", name="pause")
        pause.wait_for(timeout=90_000)
        until(page, lambda: step_shown(page) >= 2)
        pause.scroll_into_view_if_needed()
        pause.click()
        go_on = page.get_by_role("button", name="go on")
        go_on.wait_for(timeout=10_000)
        until(page, lambda: "· paused" in page.locator(".jp-Notebook").inner_text().replace("\xa0", " "), 20)
        rows = len((run / "metrics.jsonl").read_text().splitlines())
        page.wait_for_timeout(3000)
        assert len((run / "metrics.jsonl").read_text().splitlines()) == rows, "it trained on while paused"
        shot(page, "buttons_paused")
        go_on.click()
        held = step_shown(page)
        until(page, lambda: step_shown(page) >= held + 2)
        page.keyboard.press("Control+s")  # what Lab does by itself every two minutes
        page.wait_for_timeout(2000)
        page.reload()
        stop = page.get_by_role("button", name="stop", exact=True)
        stop.wait_for(timeout=60_000)
        began = step_shown(page)
        until(page, lambda: step_shown(page) >= began + 2)
        shot(page, "buttons_after_reload")
        stop.click()
        until(page, lambda: (run / "summary.json").exists(), 60)
        until(page, lambda: "stopped by hand after step" in page.locator(".jp-Notebook").inner_text(), 60)
        shot(page, "buttons_stopped")
        summary = json.loads((run / "summary.json").read_text())
        assert summary["checkpoints"] == [summary["steps"]] and 4 <= summary["steps"] < 400
        page.wait_for_timeout(1500)
        page.keyboard.press("Control+s")
        page.wait_for_timeout(2000)
    saved = contents(lab, "buttons.ipynb")
    cell = next(cell for cell in saved["cells"] if "wb.train(" in "".join(cell["source"]))
    shown = [output for output in cell["outputs"] if "data" in output]
    assert shown and all("text/html" in output["data"] for output in shown)
    assert "step" in "".join("".join(output["data"]["text/html"]) for output in shown)


def contents(lab: str, name: str) -> dict[str, Any]:
    address, token = lab.split("|")
    with urllib.request.urlopen(f"{address}/api/contents/notebooks/{name}?token={token}", timeout=30) as answer:
        return json.load(answer)["content"]
