"""One of two outputs is seen, the static form or the widget, on the page of every renderer; and what a widget does when its kernel is gone.

nbconvert is itself; JupyterLab is in `tests/browser`; the others choose here as their sources, or what is known of them, say.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import anywidget
import nbformat
import pytest
import torch
from IPython.core.formatters import DisplayFormatter
from nbconvert.exporters import HTMLExporter
from nbformat import v4
from support.lab import in_chromium, watched_page
from traitlets.config import Config

import workbench as wb
from workbench.cluster.status import ClusterStatus
from workbench.rewards import Score
from workbench.testing.rewards import answered
from workbench.views.curves import LiveFigure
from workbench.widgets import layer
from workbench.widgets.chat import ChatFace
from workbench.widgets.layer import (
    ClusterTable,
    Cover,
    CurvePlots,
    EpisodeFace,
    Layer,
    SamplesTable,
    StepperFace,
    TokenView,
)

VIEW, HTML, TEXT = "application/vnd.jupyter.widget-view+json", "text/html", "text/plain"


def judged() -> wb.DataProto:
    more = {"reward": torch.tensor([1.0, 0.0]), "score": [Score(value=value, answer="1") for value in (1.0, 0.0)]}
    return answered(["**one** $x$", "two"]).with_columns({**more, "advantages": torch.ones(2, 11)})


@pytest.fixture
def outputs(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What a cell that ends in a view leaves in its notebook."""
    found: list[dict[str, Any]] = []

    def show(
        bundle: dict[str, Any], raw: bool, metadata: dict[str, Any] | None = None, display_id: bool = False
    ) -> None:
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


# --- no widget -------------------------------------------------------------------------------------


VIEWS = ("samples", "tokens", "stepper", "episode", "cluster", "curves", "chat")
"""Every view that has a widget."""
PIP = "pip install 'rl-workbench[widgets]'"
COLAB = "from google.colab import output; output.enable_custom_widget_manager()"


def displayed(thing: Any, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The outputs of a cell that ends in an object, as a front end gets them."""
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(layer, "display", lambda bundle, raw, **_: found.append(bundle))
    monkeypatch.setattr(layer, "in_notebook", lambda: True)
    bundle, _ = DisplayFormatter().format(thing)
    return [*found, *([bundle] if bundle else [])]


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("package", ["anywidget", "ipywidgets", "traitlets"])
def test_without_widgets_a_view_shows_its_static_form_and_one_line_that_enables_them(
    name: str,
    package: str,
    views: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    thing = views[name]
    for module in [one for one in sys.modules if one.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, module)
    for module in ("anywidget", "anywidget.widget", "workbench.widgets.layer"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, package, None)  # type: ignore[arg-type] # its import raises ModuleNotFoundError
    (shown,) = displayed(thing, monkeypatch)
    assert {HTML, "image/png"} & set(shown) and VIEW not in shown
    (line,) = caplog.messages
    assert f"expected the package {package}; {PIP}" in line and "\n" not in line
    caplog.clear()
    monkeypatch.setenv("WORKBENCH_JOB", "1")  # where none is missed
    assert len(displayed(thing, monkeypatch)) == 1 and not caplog.messages


@pytest.mark.parametrize("name", VIEWS)
def test_in_colab_a_view_enables_widgets_or_shows_its_static_form_and_the_line_that_does(
    name: str, views: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[bool] = []

    def enable() -> None:
        asked.append(True)
        if refuses:
            raise RuntimeError("no frontend")

    output = SimpleNamespace(
        enable_custom_widget_manager=enable, _widgets=SimpleNamespace(_installed_url="https://here")
    )
    monkeypatch.setitem(sys.modules, "google.colab", SimpleNamespace(output=output))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "google.colab.output", output)  # type: ignore[arg-type]
    for refuses in (True, False):
        anywidget._util.enable_custom_widget_manager_once.cache_clear()
        outputs = displayed(views[name], monkeypatch)
        static = outputs[0]
        assert {HTML, "image/png"} & set(static) and VIEW not in static and asked
        if refuses:
            assert len(outputs) == 1 and len(caplog.messages) == 1
            assert "no frontend" in caplog.text and caplog.messages[0].endswith(COLAB)
            caplog.clear()
        else:
            assert len(outputs) == 2 and VIEW in outputs[1] and not caplog.messages


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


def placed(page: Any, widget: Layer, place: str, form: str = STATIC, mute: bool = False, early: bool = False) -> None:
    """Draw a widget at its place in a page, `early`: before it stands there; `mute`: no kernel answers, until `window.mute` is false. `window.restart()` is what a
    front end does after a restart, `window.dead` makes sending fail, as it does where a kernel was killed; `window.sent` has what
    was sent, `window.words` every text of a wait or a problem."""
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
        """async ([code, css, state, html, mute, early]) => {
          const own = JSON.parse(state), on = {};
          const model = {
            get: (name) => own[name], set: (name, value) => { own[name] = value; }, save_changes: () => {},
            on: (name, listener) => { (on[name] = on[name] || []).push(listener); }, off: () => {},
            send: (message) => {
              if (window.dead) throw new Error("Cannot send");
              window.sent.push(message);
              if (!window.mute) window.reply(message).then((said) => window.heard({ ...said, asked: message.asked }));
            },
          };
          Object.assign(window, { mute, dead: false, sent: [], words: [] });
          window.heard = (said) => on["msg:custom"].forEach((listener) => listener(said));
          new MutationObserver(() => document.querySelectorAll(".wb-note, .wb-problem").forEach((node) => {
            if (node.textContent && !window.words.includes(node.textContent)) window.words.push(node.textContent);
          })).observe(document.body, { subtree: true, childList: true, characterData: true });
          document.body.innerHTML = html;
          document.head.append(Object.assign(document.createElement("style"), { textContent: css }));
          window.restart = () => on.comm_live_update.forEach((listener) => listener());
          const url = URL.createObjectURL(new Blob([code], { type: "text/javascript" }));
          const el = document.getElementById("widget"), place = el.parentElement, next = el.nextSibling;
          if (early) el.remove();
          window.end = (await import(url)).default.render({ model, el });
          if (early) await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
          if (early) place.insertBefore(el, next);
        }""",
        [widget._esm, widget._css, json.dumps(state), html, mute, early],
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
def views(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    batch, path = judged(), tmp_path_factory.mktemp("curves") / "run"
    path.mkdir()
    (path / "settings.json").write_text('{"format": 4, "train": {"steps": 3}}')
    rows = [{"training/global_step": step, "critic/score/mean": step / 4} for step in (1, 2, 3)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    figure = wb.load_run(path).curves()
    assert isinstance(figure, LiveFigure)
    engine = wb.engines.local(tiny, device="cpu", lr=1e-3)
    data = wb.rows("data/arith/train.parquet", max_prompt_length=256)
    stepper = wb.Stepper(wb.recipes.grpo(engine, group_size=2, max_tokens=8), data.batch(1))
    agent = wb.agents.ToolAgent(max_assistant_turns=1, max_tokens_per_turn=8)
    episode = (
        wb.Stepper(wb.recipes.grpo(engine, agent=agent, group_size=2, max_tokens=16), data.batch(1)).episode(0).next()
    )
    return {
        "samples": wb.views.samples(batch),
        "tokens": wb.views.tokens(batch, 0, tokenizer=Letters()),
        "stepper": stepper,
        "episode": episode,
        "cluster": ClusterStatus("here", (), (), (), (), (), 0.0, None),
        "curves": figure,
        "chat": wb.chat(engine).ask("2 + 2?", max_tokens=4),
    }


@pytest.fixture(scope="module")
def widgets(views: dict[str, Any]) -> dict[str, Layer]:
    kinds = (SamplesTable, TokenView, StepperFace, EpisodeFace, ClusterTable, CurvePlots, ChatFace)
    made = {name: kind(view) for (name, view), kind in zip(views.items(), kinds, strict=True)}
    return {**made, "training cell": Cover(None)}


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
def test_a_view_that_is_drawn_before_it_stands_in_the_page_is_live(widgets: dict[str, Layer]) -> None:
    with watched_page() as (page, _, _):
        for name, widget in widgets.items():
            if name != "training cell":  # its box is in the page
                placed(page, widget, "JupyterLab", PICTURE if name == "curves" else STATIC, early=True)
                page.wait_for_function(
                    "document.querySelector('#widget > .wb') && !document.querySelector('.wb-under')"
                )
                page.locator(".workbench-static").nth(1).wait_for(state="hidden")
                assert seen(page) == (False, True), name


def false_words(words: list[str]) -> list[str]:
    return [text for text in words if "gone" in text or "again" in text]


@in_chromium
def test_a_view_asks_again_until_it_is_answered_and_calls_a_wait_a_wait(widgets: dict[str, Layer]) -> None:
    with watched_page() as (page, _, _):
        page.clock.install()
        for name in ("samples", "tokens", "curves"):
            placed(page, widgets[name], "JupyterLab", PICTURE if name == "curves" else STATIC, mute=True)
            page.clock.run_for(20 * 60_000)  # a cell of twenty minutes
            assert seen(page) == (True, False), name
            sent = page.evaluate("window.sent")
            assert 20 < len(sent) < 60 and len({one["asked"] for one in sent}) == 1, "one question, in copies"
            page.evaluate("window.mute = false")
            page.clock.run_for(60_000)
            page.wait_for_function("!document.querySelector('.wb-under')")
            assert seen(page) == (False, True), name
            words = page.evaluate("window.words")
            assert words == ["waiting for the kernel: a cell is running, and this view loads when it ends"], name
            copies = len(page.evaluate("window.sent"))
            page.clock.run_for(600_000)
            assert len(page.evaluate("window.sent")) <= copies + 1, "nothing is asked again that has its answer"


@in_chromium
def test_a_stepper_says_what_it_runs_and_for_how_long(widgets: dict[str, Layer]) -> None:
    with watched_page() as (page, _, _):
        page.clock.install()
        placed(page, widgets["stepper"], "JupyterLab", mute=True)
        page.clock.run_for(100)
        page.get_by_role("button", name="next", exact=True).click()
        problem = page.locator(".wb-problem")
        page.clock.run_for(5000)
        assert problem.inner_text() == "waiting for the kernel: a cell is running"
        asked = page.evaluate("window.sent[0].asked")
        page.evaluate("asked => window.heard({ kind: 'running', text: 'rollout', asked })", asked)
        page.clock.run_for(34_000)
        assert problem.inner_text() == "running rollout: 34 s" and seen(page) == (False, True)
        face = {**widgets["stepper"].face, "kind": "face", "note": "", "asked": asked}
        page.evaluate("face => window.heard(face)", face)
        assert problem.inner_text() == "" and page.get_by_role("button", name="next", exact=True).is_enabled()
        page.evaluate("face => window.heard({ ...face, note: 'late' })", face)
        assert problem.inner_text() == "", "a second answer to one question is dropped"
        assert false_words(page.evaluate("window.words")) == []


@in_chromium
def test_an_answer_that_is_late_is_not_shown_in_place_of_a_newer_one(widgets: dict[str, Layer]) -> None:
    with watched_page() as (page, _, _):
        placed(page, widgets["samples"], "JupyterLab")
        rows = page.locator(".wb-scroll tbody tr:not(.wb-group)")
        rows.nth(1).wait_for()
        page.evaluate("window.mute = true")
        rows.nth(0).click()
        rows.nth(1).click()
        first, second = [one for one in page.evaluate("window.sent") if one["kind"] == "pick"]
        for question in (second, first):
            reply = widgets["samples"].reply(question)
            page.evaluate("said => window.heard(said)", {**reply, "asked": question["asked"]})
        assert page.locator(".wb-detail button").first.inner_text() == f"row {second['row']}"


@in_chromium
def test_a_kernel_that_was_killed_or_never_there_is_said(widgets: dict[str, Layer]) -> None:
    with watched_page() as (page, _, _):
        page.clock.install()
        placed(page, widgets["samples"], "JupyterLab", mute=True)
        page.clock.run_for(8000)
        page.evaluate("window.dead = true")
        page.clock.run_for(8000)
        note = page.locator("#widget > .wb-note")
        assert note.inner_text() == "the kernel was restarted: run this cell again" and seen(page) == (True, False)
        placed(page, widgets["tokens"], "JupyterLab", mute=True)
        page.evaluate("document.getElementById('widget').classList.add('jupyter-widgets-disconnected')")
        page.clock.run_for(3000)
        assert note.inner_text() == "no kernel is connected: run this cell again to make this view live"
        assert seen(page) == (True, False)


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
