"""Notebooks in a real JupyterLab in headless Chromium: run all cells, look at what a person would see."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
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


def run_all(lab: str, notebook: str, timeout: float) -> tuple[Any, Any, Any]:
    from playwright.sync_api import sync_playwright

    address, token = lab.split("|")
    driver = sync_playwright().start()
    browser = driver.chromium.launch(executable_path=CHROMIUM, headless=True, args=FLAGS)
    page = browser.new_page(viewport={"width": 1400, "height": 1000})
    workspace = secrets.token_hex(4)
    page.goto(f"{address}/doc/workspaces/{workspace}/tree/notebooks/{notebook}?token={token}")
    page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=90_000)
    page.get_by_text("| Idle").first.wait_for(timeout=90_000)
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
    page.wait_for_function(
        """() => { const cells = [...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')].map(e => e.textContent.trim());
        return cells.length && cells.every(t => /^\\[\\d+\\]:$/.test(t)); }""",
        timeout=timeout * 1000,
    )
    return driver, browser, page


def shot(page: Any, name: str) -> None:
    folder = os.environ.get("WORKBENCH_SCREENSHOTS")
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        page.screenshot(path=str(Path(folder) / f"{name}.png"))


def test_101_in_a_real_lab(lab: str) -> None:
    driver, browser, page = run_all(lab, "101_one_step.ipynb", 180)
    try:
        assert page.locator(".jp-OutputArea-output[data-mime-type='application/vnd.jupyter.stderr']").count() == 0
        text = page.locator(".jp-Notebook").inner_text()
        assert "0.7071" in text and "update_actor" in text and "mean reward" in text
        for number, words in enumerate(("samples, worst first", "Trace of step 1", "advantages changed sign")):
            page.get_by_text(words).first.scroll_into_view_if_needed()
            shot(page, f"101_{number}")
        fold = page.locator("details summary").nth(1)
        fold.scroll_into_view_if_needed()
        fold.click()
        assert page.locator("details[open]").count() >= 1
    finally:
        browser.close()
        driver.stop()


def test_201_trains_in_a_real_lab(lab: str) -> None:
    import json

    home_notebook = "201_small.ipynb"
    address, token = lab.split("|")
    document = json.loads((ROOT / "notebooks" / "201_train_grpo.ipynb").read_text())
    small = {
        "steps: int = 60": "steps: int = 4",
        "batch_size: int = 16": "batch_size: int = 4",
        "heldout_rows: int = 256": "heldout_rows: int = 16",
    }
    for cell in document["cells"]:
        text = "".join(cell["source"])
        for old, new in small.items():
            text = text.replace(old, new)
        cell["source"] = text
    body = json.dumps({"type": "notebook", "format": "json", "content": document}).encode()
    request = urllib.request.Request(
        f"{address}/api/contents/notebooks/{home_notebook}?token={token}", data=body, method="PUT",
        headers={"Content-Type": "application/json", "Authorization": f"token {token}"},
    )  # fmt: skip
    urllib.request.urlopen(request, timeout=30).read()
    driver, browser, page = run_all(lab, home_notebook, 240)
    try:
        text = page.locator(".jp-Notebook").inner_text()
        assert "step 4/4" in text and "held-out reward after" in text
        images = page.locator(".jp-OutputArea-output img")
        assert images.count() >= 2
        images.first.scroll_into_view_if_needed()
        shot(page, "201_curves")
        assert images.first.evaluate("image => image.naturalWidth") > 500
    finally:
        browser.close()
        driver.stop()
