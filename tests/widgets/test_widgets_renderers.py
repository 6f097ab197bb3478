"""One of two outputs is seen, the static form or the widget, on the page of every renderer; and what a widget does when its kernel is gone.

nbconvert is itself; JupyterLab is in `tests/browser`; the others choose here as their sources, or what is known of them, say.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import nbformat
import pytest
import torch
from nbconvert.exporters import HTMLExporter
from nbformat import v4
from tests_lab import in_chromium, watched_page
from traitlets.config import Config

import workbench as wb
from workbench.cluster.status import Status
from workbench.rewards import Score
from workbench.testing.rewards import answered
from workbench.views.curves import Live
from workbench.widgets import layer
from workbench.widgets.layer import ClusterTable, Cover, EpisodeFace, Layer, SamplesTable, StepperFace, TokenView
from workbench.widgets.plots import CurvePlots

VIEW, HTML, TEXT = "application/vnd.jupyter.widget-view+json", "text/html", "text/plain"


def judged() -> wb.DataProto:
    more = {"reward": torch.tensor([1.0, 0.0]), "score": [Score(value=value, answer="1") for value in (1.0, 0.0)]}
    return answered(["**one** $x$", "two"]).with_columns({**more, "advantages": torch.ones(2, 11)})


@pytest.fixture
def outputs(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What a cell that ends in a view leaves in its notebook."""
    found: list[dict[str, Any]] = []

    def show(bundle: dict[str, Any], raw: bool, metadata: dict[str, Any] | None = None) -> None:
        found.append(v4.new_output("display_data", data=bundle, metadata=metadata or {}))

    monkeypatch.setattr(layer, "display", show)
    monkeypatch.setattr(layer, "in_notebook", lambda: True)
    wb.views.samples(judged())._ipython_display_()
    return found


# --- which form of an output a renderer takes ------------------------------------------------------


def lab(data: dict[str, Any], manager: bool) -> str:
    """JupyterLab: the first of its factories by rank; that of widgets is there where their extension is."""
    return next(kind for kind in ((VIEW,) if manager else ()) + (HTML, "image/png", TEXT) if kind in data)


def vscode(data: dict[str, Any], kernel: bool) -> str:
    """vscode-jupyter: sorts by its own list; its renderer of widgets passes on to the next where the kernel has no such model."""
    order = ("application/vnd.", HTML, "image/png", TEXT)
    kinds = sorted(data, key=lambda kind: next(place for place, one in enumerate(order) if kind.startswith(one)))
    return next(kind for kind in kinds if kind != VIEW or kernel)


def colab(data: dict[str, Any], manager: bool) -> str:
    """Colab, whose page is not public: widgets of others need the manager that their metadata names."""
    return VIEW if VIEW in data and manager else next(kind for kind in (HTML, "image/png", TEXT) if kind in data)


PAGES: dict[str, tuple[Callable[[dict[str, Any], bool], str], bool]] = {
    f"{one.__name__}, {words[there]}": (one, there)
    for one, words in (
        (lab, ("no manager", "manager")),
        (vscode, ("no kernel", "kernel")),
        (colab, ("no manager", "manager")),
    )
    for there in (False, True)
}


@pytest.mark.parametrize("name", PAGES)
def test_a_renderer_without_the_widget_shows_the_static_form_alone(outputs: list[dict[str, Any]], name: str) -> None:
    choose, live = PAGES[name]
    static, widget = (output["data"] for output in outputs)
    assert choose(static, live) == HTML and "workbench-static" in static[HTML]
    # where the widget is drawn its script hides the other, as below
    assert choose(widget, live) == (VIEW if live else HTML) and widget[HTML] == widget[TEXT] == ""


def test_colab_is_told_of_the_manager_of_widgets(monkeypatch: pytest.MonkeyPatch) -> None:
    import anywidget.widget

    found: list[dict[str, Any]] = []
    monkeypatch.setattr(layer, "display", lambda bundle, raw, metadata=None: found.append(metadata))
    monkeypatch.setattr(layer, "in_notebook", lambda: True)
    monkeypatch.setattr(
        anywidget.widget,
        "repr_mimebundle",
        lambda model_id, repr_text: ({VIEW: {"model_id": model_id}}, {VIEW: {"colab": {}}}),
    )
    wb.views.samples(judged())._ipython_display_()
    assert found == [None, {VIEW: {"colab": {}}}]


@pytest.mark.parametrize("template", ["lab", "classic"])
@pytest.mark.parametrize("sanitised", [False, True])
def test_nbconvert_nbviewer_and_a_forge_show_the_static_form_once(
    outputs: list[dict[str, Any]], template: str, sanitised: bool
) -> None:
    """nbviewer is nbconvert's `lab`; GitHub's own messages name nbconvert, and it sanitises."""
    notebook = v4.new_notebook(cells=[v4.new_code_cell("wb.views.samples(s)", outputs=outputs)])
    nbformat.validate(notebook)
    exporter = HTMLExporter(template_name=template, config=Config(HTMLExporter={"sanitize_html": sanitised}))
    page, _ = exporter.from_notebook_node(notebook)
    assert page.count("worst first") == 1 and 'type="application/vnd.jupyter.widget-view+json">' not in page


# --- which of two outputs is seen ------------------------------------------------------------------

STATIC = '<div class="workbench-static"><table><tr><td>static form</td></tr></table></div>'
PICTURE = '<img src="data:image/png;base64,iVBORw0KGgo=" style="width:9px;height:9px" class="workbench-static">'
PLACES = {
    "JupyterLab": '<div class="jp-Cell"><div class="jp-OutputArea"><div class="jp-OutputArea-child"><div class="jp-OutputPrompt"></div>'
    '<div class="jp-OutputArea-output">S</div></div><div class="jp-OutputArea-child"><div class="jp-OutputPrompt"></div>'
    '<div class="jp-OutputArea-output"><div class="lm-Panel"><div>W</div></div></div></div></div></div>',
    "VS Code": '<div class="cell_container"><div class="output_container"><div class="output"><div>S</div></div></div>'
    '<div class="output_container"><div class="output"><style>.x {}</style><div>W</div></div></div></div>',
    "Colab": '<div id="output-area"><span id="output-header-grey"></span><div id="output-body"><div class="display_data output_subarea">S</div>'
    '<div class="display_data output_subarea"><div>W</div></div></div></div>',
    "a plain page": "S<div>W</div>",
}
"""Where the static form S and the widget W stand, below a cell that has a static form of its own."""
BOX = '<div class="widget-box"><div id="widget"></div><div class="wb">step 3/9</div></div>'
"""The training cell: the widget is the first of its parts."""
OTHER = '<div class="other"><div class="workbench-static">of another cell</div></div>'


def placed(page: Any, widget: Layer, place: str, form: str = STATIC, mute: bool = False) -> None:
    """Draw a widget at its place in a page; `mute`: no kernel answers. `window.restart()` is what a front end does after a restart."""
    page.goto("about:blank")
    if not getattr(page, "_answers", False):
        page._answers = {}
        page.expose_function("reply", lambda message: page._answers["now"].answer(message))
    page._answers["now"] = widget
    state = {
        name: getattr(widget, name)
        for name in widget.keys
        if not name.startswith("_") and name not in ("layout", "tabbable", "tooltip")
    }
    html = OTHER + PLACES[place].replace("S", form, 1).replace(
        "W", BOX if isinstance(widget, Cover) else '<div id="widget"></div>'
    )
    page.evaluate(
        """async ([code, css, state, html, mute]) => {
          const own = JSON.parse(state), on = {};
          const model = {
            get: (name) => own[name], set: (name, value) => { own[name] = value; }, save_changes: () => {},
            on: (name, listener) => { (on[name] = on[name] || []).push(listener); }, off: () => {},
            send: async (message) => {
              if (mute) return;
              const said = await window.reply(message);
              on["msg:custom"].forEach((listener) => listener({ ...said, asked: message.asked }));
            },
          };
          document.body.innerHTML = html;
          document.head.append(Object.assign(document.createElement("style"), { textContent: css }));
          window.restart = () => on.comm_live_update.forEach((listener) => listener());
          const url = URL.createObjectURL(new Blob([code], { type: "text/javascript" }));
          window.end = (await import(url)).default.render({ model, el: document.getElementById("widget") });
        }""",
        [widget._esm, widget._css, json.dumps(state), html, mute],
    )


def seen(page: Any) -> tuple[bool, bool]:
    """Whether the static form is seen, and whether the widget is."""
    assert page.get_by_text("of another cell").is_visible(), "what belongs to another cell stays"
    return page.locator(".workbench-static").nth(1).is_visible(), page.locator(
        "#widget > .wb, #widget ~ .wb"
    ).is_visible()


@in_chromium
def test_one_of_the_two_is_seen_on_every_renderers_page() -> None:
    table = SamplesTable(wb.views.samples(judged()))
    with watched_page() as (page, _, _):
        for place in PLACES:
            placed(page, table, place, mute=True)
            assert seen(page) == (True, False), place
            page.get_by_text("waiting for the kernel").wait_for()
            assert seen(page) == (True, False), f"{place}: nothing to show yet"
            placed(page, table, place)
            page.locator(".wb-scroll tbody tr").first.wait_for()
            assert seen(page) == (False, True), place
            page.evaluate("window.end()")
            assert seen(page)[0], f"{place}: closed"


@pytest.fixture(scope="module")
def widgets(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Layer]:
    batch, path = judged(), tmp_path_factory.mktemp("curves") / "run"
    path.mkdir()
    (path / "settings.json").write_text('{"train": {"steps": 3}}')
    rows = [{"training/global_step": step, "critic/score/mean": step / 4} for step in (1, 2, 3)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    figure = wb.load_run(path).curves()
    assert isinstance(figure, Live)
    engine = wb.engines.local(tiny, device="cpu", lr=1e-3)
    data = wb.rows("data/arith/train.parquet", max_prompt_length=256)
    stepper = wb.Stepper(wb.recipes.grpo(engine, group_size=2, max_tokens=8), data.batch(1))
    agent = wb.agents.ToolAgent(max_assistant_turns=1, max_tokens_per_turn=8)
    episode = (
        wb.Stepper(wb.recipes.grpo(engine, agent=agent, group_size=2, max_tokens=16), data.batch(1)).episode(0).next()
    )
    return {
        "samples": SamplesTable(wb.views.samples(batch)),
        "tokens": TokenView(wb.views.tokens(batch, 0, tokenizer=Letters())),
        "stepper": StepperFace(stepper),
        "episode": EpisodeFace(episode),
        "cluster": ClusterTable(Status("here", (), (), (), (), (), 0.0, None)),
        "curves": CurvePlots(figure),
        "training cell": Cover(None),
    }


class Letters:
    """A tokenizer whose every token is a letter."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "x" * len(ids)


@in_chromium
def test_after_a_restart_every_widget_says_so_and_its_static_form_is_there_again(widgets: dict[str, Layer]) -> None:
    known = {one.__name__ for kind in (Layer, layer.Face) for one in kind.__subclasses__()} - {"Face"}
    assert {type(widget).__name__ for widget in widgets.values()} == known, "every widget is here"
    with watched_page() as (page, _, _):
        for name, widget in widgets.items():
            form = PICTURE if name == "curves" else STATIC
            placed(page, widget, "JupyterLab", form)
            page.locator("#widget > .wb, #widget ~ .wb").wait_for()
            page.wait_for_function("!document.querySelector('.wb-under')")
            assert seen(page) == (False, True), name
            page.evaluate("window.restart()")
            assert seen(page) == (True, False), name
            note = page.locator("#widget > .wb-note")
            assert note.is_visible() and note.inner_text() == "the kernel was restarted: run this cell again", name
            assert all(node.is_disabled() for node in page.locator("#widget button").all()), name


@in_chromium
def test_a_question_that_fails_at_once_is_said_beside_the_static_form(monkeypatch: pytest.MonkeyPatch) -> None:
    table = SamplesTable(wb.views.samples(judged()))
    monkeypatch.setattr(table, "answer", lambda asked: {"kind": "error", "text": "no such file"})
    with watched_page() as (page, _, _):
        placed(page, table, "JupyterLab")
        page.locator(".wb-note", has_text="no such file").wait_for()
        assert seen(page) == (True, False)


@in_chromium
def test_an_episodes_texts_are_drawn_at_a_press(widgets: dict[str, Layer]) -> None:
    with watched_page() as (page, _, _):
        placed(page, widgets["episode"], "a plain page")
        button = page.get_by_role("button", name="rendered")
        button.click()
        page.wait_for_function("document.querySelector('[title^=Markdown]').ariaPressed === 'true'")
        page.locator("#widget").press("r")
        page.wait_for_function("document.querySelector('[title^=Markdown]').ariaPressed === 'false'")
        assert widgets["episode"].rendered is False
