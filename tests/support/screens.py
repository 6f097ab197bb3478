"""Every screen in a page without Lab, with Lab's colours: for tests of contrast and keyboard, benchmarks and pictures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import workbench as wb
from workbench.cluster.status import ClusterStatus, WorkerLine
from workbench.jobs.pages import Pages, rendered
from workbench.views.document import bar
from workbench.widgets.chat import ChatFace
from workbench.widgets.display import Block
from workbench.widgets.layer import ClusterTable, CurvePlots, EpisodeFace, SamplesTable, StepperFace, TokenView

THEMES = {
    "light": {"back": "#ffffff", "ink": "rgba(0,0,0,.87)", "brand": "#1976d2", "inverse": "#ffffff"},
    "dark": {"back": "#111111", "ink": "#ffffff", "brand": "#64b5f6", "inverse": "#000000"},
}
"""What JupyterLab's two themes give the outputs of a cell."""


@dataclass(frozen=True)
class Screen:
    """A widget with what its first drawing has to have before it counts as drawn; or a view's HTML alone."""

    widget: Any = None
    drawn: str = "body"
    html: str = ""

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        """The widget's reply; its errors are replies, as in a kernel."""
        sent: list[dict[str, Any]] = []
        self.widget.send = sent.append
        self.widget._on_message(None, message, None)
        return sent[-1]

    @property
    def state(self) -> dict[str, Any]:
        """What the widget's script reads of it."""
        names = [name for name in self.widget.traits(sync=True) if not name.startswith("_") and name != "layout"]
        return {name: getattr(self.widget, name) for name in names}


DRAW = """async ([code, state, html]) => {
  const listeners = [];
  const model = {
    own: state, get: (name) => model.own[name], set: (name, value) => { model.own[name] = value; }, save_changes: () => {},
    on: (name, listener) => { if (name === "msg:custom") listeners.push(listener); }, off: () => {},
    send: async (message) => {
      const said = await window.reply(message);
      listeners.forEach((listener) => listener({ ...said, asked: message.asked }));
    },
  };
  const el = document.querySelector("#screen");
  if (!code) { el.innerHTML = html; el.style.overflowX = "auto"; return; }  // as an output of a cell
  const module = await import(URL.createObjectURL(new Blob([code], { type: "text/javascript" })));
  module.default.render({ model, el });
}"""


def show(page: Any, screen: Screen, theme: str, width: int = 1400, height: int = 900) -> None:
    """Draw a screen in a page of the width and with the colours of a theme."""
    page.set_viewport_size({"width": width, "height": height})
    page.emulate_media(color_scheme=theme)
    if screen.html.startswith("<!doctype"):
        page.set_content(screen.html)
        page.evaluate("document.querySelector('main').id = 'screen'")
        return
    back, ink, brand, inverse = THEMES[theme].values()
    page.goto("about:blank")
    page.set_content(
        f'<!doctype html><html lang="en"><title>screen</title><body data-jp-theme-light="{str(theme == "light").lower()}">'
        f'<main id="screen"></main><style>'
        f":root {{ color-scheme: {theme}; --jp-layout-color1: {back}; --jp-content-font-color1: {ink};"
        f"--jp-brand-color1: {brand}; --jp-ui-inverse-font-color1: {inverse}; }}"
        f"body {{ margin: 8px; background: {back}; color: {ink}; font: 13px/1.4 sans-serif; }}</style></body></html>"
    )
    if screen.widget is not None:
        page.add_style_tag(content=screen.widget._css)
        if not getattr(page, "_screen", None):
            page.expose_function("reply", lambda message: page._screen.answer(message))
        page._screen = screen
    code = screen.widget._esm if screen.widget is not None else ""
    page.evaluate(DRAW, [code, json.loads(json.dumps(screen.state)) if code else {}, screen.html])
    page.locator(screen.drawn).first.wait_for(state="attached")
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def first_click(page: Any) -> None:
    """Pick the second sample, the fourth token or a step's first answer, where there are some: what is known of it is
    shown.
    """
    if page.locator(".wb-samples tbody tr").count():
        page.locator(".wb-samples tbody tr:not(.wb-group)").nth(1).click()
        page.locator(".wb-detail button").first.wait_for()
    if page.locator(".wb-tokens span").count():
        page.locator(".wb-tokens span:not(.wb-off, .wb-pair)").nth(3).click()
    if page.locator(".wb-answer").count():
        page.locator(".wb-answer").first.click()
        page.locator(".wb-groups [aria-pressed=true]").wait_for()
    page.mouse.move(0, 0)


def curves(folder: Path, steps: int = 40) -> CurvePlots:
    """Two runs over each other, one of them with symptoms, on disk as a job leaves them."""
    runs = []
    for name, slope in (("first", 1.0), ("second", 0.6)):
        (folder / name).mkdir(parents=True)
        rows = [
            {
                "training/global_step": step, "critic/score/mean": slope * step / steps, "critic/score/max": 1.0,
                "actor/kl_loss": 0.001 * step * step, "actor/entropy": 1.5 / step, "response_length/mean": 20.0 + step % 5,
                "actor/grad_norm": 0.2 if step < steps // 2 else 40.0 * step,
            }
            for step in range(1, steps + 1)
        ]  # fmt: skip
        (folder / name / "settings.json").write_text(json.dumps({"format": 4, "train": {"steps": steps}}))
        (folder / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        runs.append(wb.load_run(folder / name))
    return CurvePlots(runs[0].curves(second=runs[1]))


def one_run(folder: Path) -> CurvePlots:
    """A run with spreads beside its means, and one metric that never changes."""
    rows = [
        {
            "training/global_step": step, "critic/score/mean": 0.2 + step / 60 + 0.05 * (step % 3), "critic/score/std": 0.25,
            "actor/entropy": 1.5 / step**0.3, "response_length/mean": 20.0 + step % 5, "response_length/min": 4.0,
            "response_length/max": 60.0, "actor/lr": 1e-4, "actor/grad_norm": 0.3 + 0.02 * (step % 4),
        }
        for step in range(1, 31)
    ]  # fmt: skip
    folder.mkdir(parents=True)
    (folder / "settings.json").write_text(json.dumps({"format": 4, "train": {"steps": 30}}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return CurvePlots(wb.load_run(folder).curves())


def cluster() -> ClusterTable:
    """The status of two workers, one of which does not answer; it is not read again."""
    workers = (
        WorkerLine("actor", 0, 41, "here", "", "", 1 << 30, "learn", 2, None, 1.5),
        WorkerLine("actor", 1, 42, "here", "", "", None, "does not answer", 0),
    )
    table = ClusterTable(ClusterStatus("a cluster", (), (("actor", 2, "here"),), workers, ("a note",)))
    table.close()
    return table


def shorter(solution_str: str, ground_truth: str, **_: Any) -> float:
    """Right, and less the longer."""
    return float(ground_truth in solution_str) - len(solution_str) / 100


PROSE = """# A sum

**Five**, `x`, a [link](https://example.com) and $\\frac{1}{2}$:

> quoted

```python
def f(x):  # a comment
    return "a" + str(len(x) + 1)
```

| a | b |
|---|---|
| 1 | 2 |
"""


def prose() -> SamplesTable:
    """Samples that are read as Markdown, with code in colours."""
    row = {"step": 1, "prompt": "2 + 3?", "completion": PROSE, "answer": "5", "accuracy": 1.0}
    table = SamplesTable(wb.views.samples(wb.compat.read_dump([row, row])))
    table.rendered = True
    return table


def stepped(model: str) -> wb.Stepper:
    """A stepper that stands before its update."""
    engine = wb.engines.local(model, lr=2e-4)
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256)
    pipe = wb.recipes.grpo(engine, group_size=4, kl_coef=0.001, max_tokens=24)
    return wb.Stepper(pipe, rows.batch(4)).run(until="advantage")


def trained(folder: Path) -> Path:
    """A folder with a run of four steps as a training leaves it."""
    pipe = wb.recipes.grpo(wb.engines.local("data/tiny-arith", lr=2e-4), group_size=2, max_tokens=16)
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256)
    settings = {"steps": 4, "batch_size": 2, "trace_freq": 2, "save_freq": 2, "run": folder / "trained", "trackers": ()}
    with ThreadPoolExecutor() as own:  # a browser's driver has an event loop in this thread
        own.submit(lambda: wb.train_blocking(pipe, rows, **settings)).result()
    return folder


def episode(model: str) -> Any:
    """An episode of notebook 106's agent: two calls of its calculator, and the answer."""
    from workbench.agents import ToolAgent
    from workbench.agents.tools import load_tools

    engine = wb.engines.local(model, lr=2e-4)
    rows = wb.rows("data/arith-tools/train.parquet", max_prompt_length=256)
    agent = ToolAgent(list(load_tools("data/arith-tools/tools.yaml").values()), parser="hermes", max_assistant_turns=4)
    pipe = wb.recipes.grpo(engine, agent=agent, group_size=2, max_tokens=200)
    found = wb.Stepper(pipe, rows.batch(1)).episode(0)
    for place, expression in ((0, "5 + 4"), (2, "9 - 5")):
        called = (found.back(to=place).next(attempt) for attempt in range(40))
        next(one for one in called if one.asked and expression in one.asked[0].arguments)
        found.next()
    return found.run()


def chatted() -> Any:
    """A chat of two models, scored, with a row kept and a note."""
    engine = wb.engines.local("data/tiny-arith", device="cpu")
    chat = wb.chat(engine, base=engine, reward=wb.rewards.Reward(shorter, in_process=True), max_tokens=24)
    chat.notes = ("the run's agent is not here (calculator): wb.chat(run, agent=…)",)
    chat.ask("Gus has 6 shells and finds 10 more. How many shells does Gus have?").ask("And without these?").score(
        "6"
    ).keep()
    return chat


def screens(folder: Path, only: Sequence[str] = ()) -> dict[str, Screen]:
    """All of them, or those whose names begin as in `only`, with the tiny models; runs are written into the folder."""
    found = _screens(folder)
    return {name: one for name, one in found.items() if not only or name.startswith(tuple(only))}


def _screens(folder: Path) -> dict[str, Screen]:
    trace = wb.Trace.load("data/arith-batch")
    words = wb.engines.local("data/tiny-arith").tokenizer
    s = stepped("data/tiny-arith")
    reward = wb.rewards.Reward(shorter, in_process=True)
    t = s.fork().back(to="reward").replace("reward", reward).run(until="advantage")
    samples = wb.views.samples(trace)
    tokens = wb.views.tokens(trace, 0, "log_prob", against_row=9, tokenizer=words)
    chat = chatted()
    live = {
        "samples": Screen(SamplesTable(samples), "#screen tbody tr"),
        "rendered": Screen(prose(), "#screen tbody tr"),
        "tokens": Screen(TokenView(tokens), ".wb-tokens span[style]"),
        "stepper": Screen(StepperFace(s), ".wb-chip"),
        "episode": Screen(EpisodeFace(episode("data/tiny-arith-tools")), ".wb textarea"),
        "curves": Screen(curves(folder), ".wb-canvas canvas"),
        "curves of one run": Screen(one_run(folder / "one"), ".wb-canvas canvas"),
        "cluster": Screen(cluster(), ".wb table"),
        "chat": Screen(ChatFace(chat), ".wb-exchange"),
    }
    training = Block(bar(0.3, "step 12/40  ·  reward 0.61  ·  KL 0.002"), ["1  the gradient norm jumped"])
    fixed = {
        "samples": samples, "tokens": tokens, "row": samples.row(0), "trace": trace, "comparison": s.compare(t),
        "divergence": wb.diverge(s, t), "pipeline": s.pipeline, "training": training, "stepper": s,
        "chat": chat,
    }  # fmt: skip
    pages = Pages(trained(folder / "runs"))
    whole = {"run page": "trained/index.html", "page of runs": "index.html"}
    return (
        live
        | {f"{name}, static": Screen(html=one._repr_html_()) for name, one in fixed.items()}
        | {name: Screen(html=rendered(pages.page(path))) for name, path in whole.items()}
    )


# --- contrast -------------------------------------------------------------------------------------

CONTRAST = """(within) => {
  const parts = (text) => { const found = (text.match(/[\\d.]+/g) || []).map(Number); return [...found.slice(0, 3), found[3] ?? 1]; };
  const over = (under, [red, green, blue, alpha]) => [red, green, blue].map((part, at) => part * alpha + under[at] * (1 - alpha));
  const light = (colour) => {
    const [red, green, blue] = colour.map((part) => part / 255).map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  const ratio = (one, other) => { const [low, high] = [light(one), light(other)].sort((a, b) => a - b); return (high + 0.05) / (low + 0.05); };
  // what a chain of boxes paints under its innermost text, and that text; a gradient is each of its colours
  function painted(chain, ink, under) {
    const [box, ...inner] = chain, style = getComputedStyle(box);
    const colours = style.backgroundImage.includes("gradient") ? style.backgroundImage.match(/rgba?\\([^)]*\\)/g).map(parts) : [];
    const fills = [over(under, parts(style.backgroundColor))].flatMap((fill) => (colours.length ? colours.map((one) => over(fill, one)) : [fill]));
    return fills.flatMap((fill) => (inner.length ? painted(inner, ink, fill) : [[fill, over(fill, ink)]]))
      .map((pair) => pair.map((colour) => over(under, [...colour, Number(style.opacity)])));
  }
  const found = [];
  for (const box of document.querySelectorAll(within + " *")) {
    const field = ["INPUT", "SELECT", "TEXTAREA"].includes(box.tagName) && box.type !== "checkbox" && box.type !== "range";
    const text = field ? box.value || box.placeholder : [...box.childNodes].filter((one) => one.nodeType === 3).map((one) => one.data).join("").trim();
    if (!text || box.tagName === "OPTION" || box.closest(":disabled") || !box.checkVisibility({ visibilityProperty: true })) continue;
    const style = getComputedStyle(box, field && !box.value ? "::placeholder" : null);
    const chain = [];
    for (let one = box; one; one = one.parentElement) chain.unshift(one);
    const large = parseFloat(style.fontSize) >= 24 || (parseFloat(style.fontSize) >= 18.66 && Number(style.fontWeight) >= 700);
    const ink = parts(style.color);
    if (field && !box.value) ink[3] *= Number(style.opacity);
    const picture = /^[▁-█\\s]+$/.test(text);  // a histogram
    const worst = Math.min(...painted(chain, ink, [255, 255, 255]).map(([fill, drawn]) => ratio(fill, drawn)));
    if (worst < (large || picture ? 3 : 4.5)) found.push(`${worst.toFixed(2)} ${box.tagName.toLowerCase()}.${box.className} "${text.slice(0, 40)}" ${style.color}`);
  }
  return [...new Set(found)];
}"""
"""The texts whose contrast to what is painted under them is below WCAG's AA: 4.5, of large letters and of pictures 3."""
