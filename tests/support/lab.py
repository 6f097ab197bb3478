"""A real JupyterLab in headless Chromium, for tests: the server, a page that runs a notebook, screenshots."""

from __future__ import annotations

import contextlib
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

from support.patience import LONG, within

ROOT = Path(__file__).parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
needs_chromium = [
    pytest.mark.slow,
    pytest.mark.browser,
    pytest.mark.skipif(
        CHROMIUM is None, reason="no Chromium on this machine (make browser installs one where apt can)"
    ),
]


def in_chromium(test: Any) -> Any:
    """Marks of a test that needs a browser."""
    for mark in needs_chromium:
        test = mark(test)
    return test


SETTINGS: dict[str, dict[str, str]] = {
    # Lab takes cells that are out of sight out of the page; the tests read the whole notebook
    "notebook-extension/tracker": {"windowingMode": "none"},
    "apputils-extension/notification": {"fetchNews": "false"},
}
_FOLDERS: dict[str, Path] = {}
"""The root folder of each JupyterLab that is running."""
DONE = """() => {
  const prompts = [...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')].map(e => e.textContent.trim());
  if (document.querySelector("[data-mime-type='application/vnd.jupyter.error']")) return true;
  return prompts.length && prompts.every(text => /^\\[\\d+\\]:$/.test(text));
}"""


@contextmanager
def laboratory(home: Path) -> Iterator[str]:
    """Address with token of a JupyterLab on a copy of the notebooks and the data."""
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
        assert within(lambda: _answers(f"{address}/api/status?token={token}"), every=0.2), "JupyterLab did not start"
        _FOLDERS[f"{address}|{token}"] = home / "root"
        yield f"{address}|{token}"
    finally:
        server.terminate()
        server.wait(timeout=LONG)


def _answers(url: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=LONG):
        return True
    return False


@contextmanager
def page_after_run_all(lab: str, notebook: str) -> Iterator[Any]:
    """The page of a notebook in a fresh workspace, when each of its cells has its number."""
    with page_running_all(lab, notebook) as page:
        page.wait_for_function(DONE)
        yield page


@contextmanager
def page_running_all(lab: str, notebook: str) -> Iterator[Any]:
    """The same as soon as all cells have been told to run."""
    with opened_page(lab, notebook) as page:
        page.get_by_role("menuitem", name="Run", exact=True).click()
        page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
        yield page


@contextmanager
def opened_page(lab: str, notebook: str) -> Iterator[Any]:
    """The page of a notebook in a fresh workspace, as soon as its kernel is there."""
    from playwright.sync_api import sync_playwright

    address, token = lab.split("|")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, headless=True, args=FLAGS)
        try:
            page = browser.new_page(viewport={"width": 1400, "height": 1000})
            page.set_default_timeout(1000 * LONG)
            workspace = secrets.token_hex(4)
            page.goto(f"{address}/doc/workspaces/{workspace}/tree/notebooks/{notebook}?token={token}")
            page.wait_for_selector(".jp-Notebook .jp-Cell")
            # the toolbar's indicator says idle before the kernel is there, and Run All would be lost
            page.get_by_text("| Idle").first.wait_for()
            yield page
        finally:
            browser.close()


@contextmanager
def watched_page() -> Iterator[tuple[Any, list[str], list[str]]]:
    """An empty page without Lab: (page, addresses that it asked for, dialogs that were opened)."""
    from playwright.sync_api import sync_playwright

    asked: list[str] = []
    dialogs: list[str] = []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, headless=True, args=FLAGS)
        try:
            page = browser.new_page()
            page.set_default_timeout(1000 * LONG)
            page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
            page.on("request", lambda request: asked.append(request.url))
            yield page, asked, dialogs
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
        text, count = re.subn(rf"^({name}: [\w\[\]]+ = ).*?(?=  #)", rf"\g<1>{value!r}", text, flags=re.MULTILINE)
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
    urllib.request.urlopen(request, timeout=LONG).read()


def until(page: Any, ready: Any) -> None:
    end = time.monotonic() + LONG
    while not ready():
        assert time.monotonic() < end, page.locator(".jp-Notebook").inner_text()[-1500:]
        page.wait_for_timeout(200)


def contents(lab: str, name: str) -> dict[str, Any]:
    """A saved notebook, from the disk: a server that is asked while it writes restores the file of before (and answers 400)."""
    path = _FOLDERS[lab] / "notebooks" / name
    while True:
        with contextlib.suppress(json.JSONDecodeError):  # half written
            return json.loads(path.read_text())
        time.sleep(0.1)


def save(page: Any, lab: str, name: str) -> None:
    """Save the open notebook, and wait until it is on the disk."""
    path = _FOLDERS[lab] / "notebooks" / name
    before = path.stat().st_mtime_ns
    page.keyboard.press("Control+s")
    until(page, lambda: path.stat().st_mtime_ns > before)


def run_cell(page: Any, code: str) -> str:
    """Run one more cell at the notebook's end; what it printed."""
    before = page.locator(".jp-CodeCell").count()
    page.locator(".jp-Notebook .jp-CodeCell .jp-InputArea-editor").last.click()
    page.keyboard.press("Escape")
    page.keyboard.press("b")
    until(page, lambda: page.locator(".jp-CodeCell").count() == before + 1)
    page.keyboard.press("Enter")
    page.keyboard.insert_text(code)
    page.keyboard.press("Control+Enter")
    output = page.locator(".jp-CodeCell").last.locator(".jp-OutputArea-output")
    output.first.wait_for()
    return str(output.first.inner_text())
