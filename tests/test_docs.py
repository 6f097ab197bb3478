"""The guide: the site builds with every link right, and what its pages say to type runs as it stands."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.lab import in_chromium, watched_page
from support.patience import LONG
from support.screens import CONTRAST, THEMES

import workbench as wb

ROOT = Path(__file__).parents[1]
GUIDE = sorted((ROOT / "docs" / "guide").glob("*.md"))
RUN = [page for page in GUIDE if "```python" in page.read_text()]
LONGER = ("cluster", "jobs")
"""Pages that start a cluster, or a notebook as a job: half a minute each."""
ALL = """
import contextlib, io, runpy, sys
for page in sys.argv[1:]:
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            runpy.run_path(page, run_name="__main__")
    except BaseException:
        sys.stderr.write(f"{page}, after it had printed:\\n{said.getvalue()[-2000:]}\\n")
        raise
"""


def blocks(path: Path) -> str:
    """A page's blocks of Python as one script, with fewer steps, tokens and seconds; a script's training needs no `await`."""
    text = "\n".join(re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL))
    body = text.replace("await wb.train(", "wb.train_blocking(").replace("steps=40", "steps=2")
    body = body.replace("max_tokens=64", "max_tokens=16").replace("max_tokens=200", "max_tokens=48")
    body = body.replace("group_size=8", "group_size=4").replace("seconds=5)", "seconds=1)")
    return "if __name__ == '__main__':\n" + "\n".join("    " + line for line in body.splitlines()) + "\n"


def run(pages: list[Path], folder: Path) -> None:
    """Run pages one after the other, from a folder with the repository's data and notebooks."""
    for name in ("data", "notebooks"):
        (folder / name).symlink_to(ROOT / name)
    scripts = [folder / f"{page.stem}.py" for page in pages]
    for page, script in zip(pages, scripts, strict=True):
        script.write_text(blocks(page) if page.suffix == ".md" else page.read_text())
    (folder / "pages.py").write_text(ALL)
    command = [sys.executable, "pages.py", *map(str, scripts)]
    found = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=found, capture_output=True, text=True, timeout=LONG, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_readme_and_the_pages_run(tmp_path: Path) -> None:
    by_hand = ROOT / "docs" / "guide" / "grpo_by_hand.py"
    run([ROOT / "README.md", by_hand, *(page for page in RUN if page.stem not in LONGER)], tmp_path)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", LONGER)
def test_a_page_that_takes_longer_runs(name: str, tmp_path: Path) -> None:
    run([ROOT / "docs" / "guide" / f"{name}.md"], tmp_path)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, with outputs in notebook 101 as if it had been executed: views, pictures, warnings."""
    pytest.importorskip("mkdocs")
    build = tmp_path_factory.mktemp("site")
    document = json.loads((ROOT / "notebooks" / "101_one_step.ipynb").read_text())
    trace = wb.Trace.load(ROOT / "data" / "arith-batch")
    samples = wb.views.samples(trace, rows=2)
    shown = [trace, samples, samples.row(0), wb.views.tokens(trace, 0, "advantage", against_row=9)]
    outputs = [
        {"output_type": "display_data", "metadata": {}, "data": {"text/html": one._repr_html_()}} for one in shown
    ]
    warning = {"output_type": "stream", "name": "stderr", "text": "a warning\n"}
    frame = {"output_type": "display_data", "metadata": {}, "data": {"text/html": wb.views.groups(trace)._repr_html_()}}
    next(cell for cell in document["cells"] if cell["cell_type"] == "code")["outputs"] = [*outputs, frame, warning]
    (build / "notebooks").mkdir()
    (build / "notebooks" / "101_one_step.ipynb").write_text(json.dumps(document))
    command = [sys.executable, str(ROOT / "tools" / "site.py"), "--build", str(build)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONG, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return build / "site"


@pytest.mark.slow
def test_the_site_builds_with_every_link_right(site: Path) -> None:
    """Links, anchors, pages left out of the navigation and names that the reference does not find are errors."""
    recipes = (site / "reference" / "recipes.html").read_text()
    assert 'id="workbench.recipes.grpo"' in recipes and "norm_adv_by_std" in recipes
    assert "rollout_log_probs" in (site / "reference" / "glossary.html").read_text()
    assert (site / "notebooks" / "101_one_step.html").exists()
    loaded = re.findall(r'(?:src|href)="(https?://[^"]+)"', (site / "index.html").read_text())
    assert [one for one in loaded if "squidfunk" not in one] == []  # offline: only the theme's own credit is a link


@in_chromium
@pytest.mark.parametrize("theme", THEMES)
def test_a_notebook_on_the_site_has_the_contrast_of_wcag_aa_and_fits(site: Path, theme: str) -> None:
    with watched_page() as (first, _, _):
        page = first.context.browser.new_context(color_scheme=theme).new_page()
        page.set_default_timeout(1000 * LONG)
        for width in (1400, 500):
            page.set_viewport_size({"width": width, "height": 1000})
            page.goto((site / "notebooks" / "101_one_step.html").as_uri())
            assert page.evaluate("() => document.documentElement.scrollWidth") <= width
            assert page.evaluate(CONTRAST, ".md-content") == []
        assert (
            page.evaluate("() => document.body.dataset.mdColorScheme") == {"light": "default", "dark": "slate"}[theme]
        )


def test_every_page_is_in_the_navigation_and_short() -> None:
    listed = (ROOT / "mkdocs.yml").read_text()
    for page in GUIDE:
        assert f"guide/{page.name}" in listed and len(page.read_text().splitlines()) < 120
    assert len((ROOT / "README.md").read_text().splitlines()) <= 70
    assert (ROOT / "docs" / "images" / "step.gif").stat().st_size <= 2_000_000, "its moving picture"
