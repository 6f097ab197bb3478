"""A run as one HTML file that shows everything without a kernel, a script or a network."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from workbench.base.distribution import optional
from workbench.base.errors import RunError
from workbench.base.files import write_text
from workbench.replay.remote import is_address
from workbench.replay.run import Run, load_run
from workbench.views.curves import panel, png
from workbench.views.document import Fold, Image, Part, block, html, pairs

with optional("jobs", "a report"):
    import bleach
    import nbformat
    from bleach.css_sanitizer import CSSSanitizer
    from nbconvert.exporters import HTMLExporter
    from nbformat import v4
    from traitlets.config import Config

STATIC = ("text/html", "image/png", "image/jpeg", "text/markdown", "text/plain")
"""The forms of an output that a report can show, the best first: no widget, which needs a kernel or a CDN."""


def write_report(run: str | Path, output: str | Path | None = None) -> Path:
    """Write a run as one HTML file: state, settings, curves, then the executed notebook. Returns the file's path.

    The file is `report.html` in the run folder unless `output` names another one. Text that a model wrote is escaped,
    and scripts are removed, also those in the notebook's own outputs. Raises `RunError` where `run` is not a run
    folder."""
    opened = load_run(run)
    if output is None and is_address(run):
        raise RunError(f"{run} is only read", do="name the report's file with -o")
    notebook = _opening(opened)
    executed = opened.path / "notebook.ipynb"
    if executed.is_file():
        try:
            document = nbformat.read(executed, as_version=4)
        except (ValueError, nbformat.ValidationError) as cause:
            raise RunError(f"the run's executed notebook {executed} cannot be read", found=cause) from cause
        notebook.cells += [_static(cell) for cell in document.cells]
        notebook.metadata.language_info = document.metadata.get("language_info", {"name": "python"})
    target = Path(output) if output is not None else opened.path / "report.html"
    write_text(target, _html(notebook, f"run {opened.path.name}"))
    return target


def _opening(run: Run) -> Any:
    """Make a notebook with the run's state, curves and settings from its folder, which works also for a run of a
    script.
    """
    plain = {key: value for key, value in run.settings.items() if key != "pipeline"}
    document: Part = (
        pairs([("state", run.state), *run.summary.pairs()]),
        Image(lambda: png(panel(run.rows, title=run.path.name)), "curves") if len(run.rows) > 1 else (),
        block(repr(run)),
        Fold("settings", block(json.dumps(plain, indent=1, default=str))),
    )
    output = v4.new_output("display_data", data={"text/html": html(document), "text/plain": repr(run)})
    cell = v4.new_code_cell("", outputs=[output], metadata={"tags": ["no-input"]})
    title = v4.new_markdown_cell(f"# Run `{re.sub(r'[^A-Za-z0-9_.-]', '_', run.path.name)}`")
    return v4.new_notebook(cells=[title, cell])


def _static(cell: Any) -> Any:
    """Reduce a cell's outputs to the forms in `STATIC`, and remove a terminal's colour codes from tracebacks."""
    for output in cell.get("outputs", []):
        if "data" in output:
            output.data = {kind: value for kind, value in output.data.items() if kind in STATIC}
        if output.output_type == "error":
            output.traceback = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in output.traceback]
    return cell


TAGS = (
    "a b blockquote br code dd del details div dl dt em h1 h2 h3 h4 h5 h6 hr i img li mark meter ol p pre progress s small "
    "span strong sub summary sup table tbody td tfoot th thead tr ul"
)
STYLES = (
    "background background-color border border-bottom border-collapse border-left border-radius border-right border-top "
    "box-shadow color cursor display flex float font-family font-size font-style font-weight gap line-height margin "
    "margin-bottom margin-left margin-right margin-top max-height max-width min-width opacity outline overflow padding "
    "text-align vertical-align white-space width word-break"
)
"""The tags and CSS properties that JupyterLab's own sanitiser leaves alone: what a report keeps of a notebook's HTML."""
ATTRIBUTES = "style title class colspan rowspan open alt max value width height"


def clean(text: str) -> str:
    """Sanitise HTML: scripts, event handlers, addresses of images and unknown tags are removed; the text within tags
    stays.
    """
    css, protocols = CSSSanitizer(allowed_css_properties=STYLES.split()), {"data", "http", "https", "mailto"}
    return bleach.clean(text, set(TAGS.split()), _kept, protocols, strip=True, css_sanitizer=css)


def _kept(tag: str, name: str, value: str) -> bool:
    if name in ATTRIBUTES.split():
        return True
    if tag == "img" and name == "src":  # inline pictures alone: another address would be fetched
        return value.startswith(("data:image/png;base64,", "data:image/jpeg;base64,"))
    return tag == "a" and name == "href" and value.startswith(("#", "http://", "https://", "mailto:"))


def _html(notebook: Any, title: str) -> str:
    config = Config()
    # set on the base class: on HTMLExporter the option is accepted and does nothing
    config.NbConvertBase.display_data_priority = list(STATIC)
    config.TagRemovePreprocessor.remove_input_tags = {"no-input"}
    config.TagRemovePreprocessor.enabled = True
    shown = {"sanitize_html": True, "exclude_input_prompt": True, "exclude_output_prompt": True}
    exporter = HTMLExporter(config=config, filters={"clean_html": clean}, **shown)
    body, _ = exporter.from_notebook_node(notebook, resources={"metadata": {"name": title}})
    # what is left of scripts is the template's own: it would fetch libraries for widgets and formulas
    body = re.sub(r"<script\b.*?</script\s*>", "", body, flags=re.DOTALL | re.IGNORECASE)
    return re.sub(r"<link\b[^>]*href=[\"']https?:[^>]*>", "", body, flags=re.IGNORECASE)
