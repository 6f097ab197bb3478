"""README's moving picture and the pictures of the guide, from a real JupyterLab in headless Chromium.

    python tools/guide_pictures.py                 all of docs/images, in some ten minutes
    python tools/guide_pictures.py moving agents   those of these notebooks alone: moving, step, training, agents, cluster

A notebook is written and run cell by cell, as a person would; a picture is one cell with its output. The moving picture is
a GIF: what the window shows after each press, with a drawn pointer, because a headless browser has none.
"""

from __future__ import annotations

import argparse
import io
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nbformat import v4
from PIL import Image

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support.lab import laboratory, opened_page, put, until  # noqa: E402

IMAGES = ROOT / "docs" / "images"
KERNEL = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
START = "import workbench as wb\n\nwb.prepare_notebook()"
POINTER = """() => {
  const arrow = document.createElement("div");
  arrow.innerHTML = '<svg width="20" height="24"><path d="M2 2v17l4.5-4 3 7 3-1.3-3-6.7h6z" fill="black" stroke="white" stroke-width="1.5"/></svg>';
  Object.assign(arrow.style, { position: "fixed", zIndex: 99999, pointerEvents: "none", left: "-30px" });
  document.body.append(arrow);
  document.addEventListener("mousemove", (event) => Object.assign(arrow.style, { left: `${event.clientX}px`, top: `${event.clientY}px` }), true);
}"""


def flat(pictures: list[Image.Image]) -> list[Image.Image]:
    """Pictures of few colours: those of most pixels, and as many that are apart, because a small dot has a meaning."""
    wide, high = pictures[0].size
    every = Image.new("RGB", (wide, high * len(pictures)))
    for place, one in enumerate(pictures):
        every.paste(one, (0, high * place))
    palette = Image.new("P", (1, 1))
    kinds = Image.Quantize.MEDIANCUT, Image.Quantize.MAXCOVERAGE
    parts = [part for kind in kinds for part in (every.quantize(127, kind).getpalette() or [])[: 3 * 127]]
    palette.putpalette([255 if part > 245 else part for part in [255] * 3 + parts])  # the page's white stays white
    return [one.quantize(palette=palette, dither=Image.Dither.NONE) for one in pictures]


class Notebook:
    """An open notebook: its cells are written and run one after another."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.frames: list[tuple[Image.Image, int]] = []
        self.cell("", START, "")

    def cell(self, name: str, code: str, ready: str, width: int = 1000, *, watched: bool = False) -> Any:
        """Write a cell and run it until its output has what the selector `ready` names; the cell.

        `width` is that of the window; a `name` makes a picture of the cell, `watched` frames of the writing.
        """
        page = self.page
        before = page.locator(".jp-CodeCell").count()
        if code != START:
            page.locator(".jp-Notebook .jp-CodeCell .jp-InputArea-editor").last.click()
            page.keyboard.press("Escape")
            page.keyboard.press("b")
            until(page, lambda: page.locator(".jp-CodeCell").count() == before + 1)
        cell = page.locator(".jp-CodeCell").last
        cell.locator(".jp-InputArea-editor").click()
        for line in code.splitlines(keepends=True) if watched else [code]:
            page.keyboard.insert_text(line)
            if watched:
                self.frame(260)
        page.keyboard.press("Control+Enter")
        if ready:
            cell.locator(ready).locator("visible=true").first.wait_for()
        until(page, lambda: cell.locator(".jp-InputPrompt").first.inner_text().strip() not in ("[*]:", "[ ]:"))
        if watched:
            cell.evaluate("cell => cell.scrollIntoView()")
            self.frame(900)
        if name:
            self.picture(name, cell, width)
        return cell

    def picture(self, name: str, cell: Any, width: int = 1000, height: int = 1800) -> None:
        """Write docs/images/NAME.png: a cell in a window of this width."""
        self.page.set_viewport_size({"width": width, "height": height})
        self.page.locator(".jp-InputPrompt").first.click()  # another cell is the active one, without its bar
        self.page.mouse.move(0, 0)
        cell.evaluate("cell => cell.scrollIntoView()")
        self.page.wait_for_timeout(800)
        [colours] = flat([Image.open(io.BytesIO(cell.screenshot())).convert("RGB")])
        colours.save(IMAGES / f"{name}.png", optimize=True)
        print(name, colours.size, (IMAGES / f"{name}.png").stat().st_size, flush=True)

    def frame(self, milliseconds: int, wait: int = 150) -> None:
        """Keep what the window shows, for so long in the moving picture."""
        self.page.wait_for_timeout(wait)
        self.frames.append((Image.open(io.BytesIO(self.page.screenshot())).convert("RGB"), milliseconds))

    def press(self, button: Any, shown: Callable[[], bool], milliseconds: int = 900) -> None:
        """Point at a button, press it, and keep what stands there when `shown` is true."""
        button.hover()
        self.frame(450)
        button.click()
        until(self.page, shown)
        self.frame(milliseconds, 350)

    def save(self, path: Path) -> None:
        """Write the frames as a GIF of one palette; of each frame it has what differs from the frame before."""
        first, *rest = flat([one for one, _ in self.frames])
        first.save(path, save_all=True, append_images=rest, duration=[time for _, time in self.frames], loop=0)
        print(path.name, len(self.frames), "frames", path.stat().st_size, flush=True)


GRPO = """engine = wb.engines.local("data/tiny-arith", lr=2e-4)
rows = wb.rows("data/arith/train.parquet", max_prompt_length=256)
pipe = wb.recipes.grpo(engine, group_size=8, kl_coef=0.001, max_tokens=64)"""
HELD_OUT = '\nheld_out = wb.rows("data/arith/test.parquet", max_prompt_length=256)[:32]'
STEPPER = "s = wb.Stepper(pipe, rows.batch(8))\ns"
ANOTHER = """def short_and_right(solution_str, ground_truth, **_):
    right = wb.rewards.gsm8k.compute_score(solution_str, ground_truth)
    return {"score": right * (1.0 if len(solution_str) < 20 else 0.3), "right": right}


t = s.fork().back(to="reward").replace("reward", short_and_right).run(until="advantage")
s.compare(t)"""


def moving(book: Notebook) -> None:
    """README's: a batch phase by phase, its samples, tokens of one, another reward, what changed, a training."""
    page = book.page
    page.set_viewport_size({"width": 1000, "height": 660})
    page.evaluate(POINTER)
    book.cell("", GRPO, "", watched=True)
    face = book.cell("", STEPPER, ".wb-chip", watched=True).locator(".wb")
    for phase in ("rollout", "reward", "old_log_prob", "ref_log_prob", "advantage"):
        book.press(face.locator(".wb-main"), lambda name=phase: f"● {name}" in face.inner_text())
    book.press(face.get_by_role("button", name="● reward"), lambda: '.trace["reward"]' in face.inner_text(), 1600)
    table = book.cell("", 'wb.views.samples(s, rows=5, order="surprising")', ".wb-samples tbody td", watched=True)
    card = table.locator(".wb-detail")
    lines = table.locator(".wb-scroll tbody tr:not(.wb-group)")
    book.press(lines.nth(2), lambda: "response" in card.inner_text(), 1600)
    book.press(lines.nth(4), lambda: "response" in card.inner_text(), 1200)
    tokens = book.cell("", 'wb.views.tokens(s, 13, "entropy", against_row=15)', ".wb-tokens span[style]", watched=True)
    for place in (3, 5, 8):
        tokens.locator(".wb-tokens").first.locator("span").nth(place).hover()
        book.frame(800)
    book.cell("", ANOTHER, ".jp-OutputArea-output:has-text('advantages changed sign')", watched=True)
    book.frame(3500)
    cell = book.cell("", "t.run()", ".wb-chip", watched=True)
    book.press(
        cell.get_by_role("button", name="back to before advantage"), lambda: "▶ advantage" in cell.inner_text(), 1800
    )
    book.save(IMAGES / "step.gif")


def step(book: Notebook) -> None:
    """A stepper, the table of its samples with one picked, tokens of two samples."""
    page = book.page
    book.cell("", GRPO, "")
    cell = book.cell("", 's = wb.Stepper(pipe, rows.batch(8)).run(until="advantage")\ns', ".wb-chip")
    cell.locator(".wb-main").click()
    until(page, lambda: "● update_actor" in cell.inner_text())
    book.picture("stepper", cell)
    page.set_viewport_size({"width": 1200, "height": 1800})
    cell = book.cell("", 'samples = wb.views.samples(s, rows=14, order="surprising")\nsamples', ".wb-samples tbody td")
    cell.get_by_placeholder("search texts").fill("Quick")
    page.wait_for_timeout(1000)
    cell.locator(".wb-scroll tbody tr:not(.wb-group)").nth(1).click()
    until(page, lambda: "response" in cell.locator(".wb-detail").inner_text())
    book.picture("samples", cell, 1320)
    code = 'first = int(samples.selected[0])\nwb.views.tokens(s, first, "entropy", against_row=samples.row(first).siblings[-1])'
    cell = book.cell("", code, ".wb-tokens span[style]")
    cell.locator(".wb-tokens").first.locator("span").nth(4).click()
    book.picture("tokens", cell)


def training(book: Notebook) -> None:
    """A training whose page was loaded anew, and stop pressed after some forty steps; then its curves."""
    page = book.page
    book.cell(
        "", GRPO.replace("2e-4", "4e-5").replace("max_tokens=64", "ppo_mini_batch_size=1, max_tokens=64") + HELD_OUT, ""
    )
    code = """run = await wb.train(
    pipe, rows, steps=400, batch_size=8, run="runs/mine", eval_rows=held_out, test_freq=10, trace_freq=5
)"""
    page.locator(".jp-CodeCell .jp-InputArea-editor").last.click()
    page.keyboard.press("Escape")
    page.keyboard.press("b")
    page.keyboard.press("Enter")
    page.keyboard.insert_text(code)
    page.keyboard.press("Control+Enter")
    page.get_by_text(re.compile(r"step ([3-9]|\d\d)/400")).locator("visible=true").first.wait_for()
    page.keyboard.press("Control+s")
    page.wait_for_timeout(2000)
    page.reload()
    page.get_by_text(re.compile(r"step [4-9]\d/400")).locator("visible=true").first.wait_for(timeout=400_000)
    page.get_by_role("button", name="stop", exact=True).click()
    page.get_by_text("stopped by hand").locator("visible=true").first.wait_for()
    book.picture("training", page.locator(".jp-CodeCell").last)
    book.cell("curves", 'wb.load_run("runs/mine").curves()', ".wb-canvas canvas")


def agents(book: Notebook) -> None:
    """An episode with two turns written by hand, and one drawn again from each of its turns."""
    page = book.page
    code = """from workbench.agents import ToolAgent
from workbench.agents.tools import load_tools

tools = load_tools("data/arith-tools/tools.yaml")
agent = ToolAgent(list(tools.values()), parser="hermes", max_assistant_turns=4)
engine = wb.engines.local("data/tiny-arith-tools", lr=3e-4)
rows = wb.rows("data/arith-tools/train.parquet", max_prompt_length=256)
pipe = wb.recipes.grpo(engine, agent=agent, group_size=8, max_tokens=96)
s = wb.Stepper(pipe, rows.batch(8)).run(until="reward")"""
    book.cell("", code, "")
    cell = book.cell("", "g = s.episode(0)\ng", ".wb textarea")
    face, text = cell.locator(".wb"), cell.locator("textarea")
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "6 * 7"}}\n</tool_call>'
    for turn, words in (("turn 0, assistant", call), ("turn 1, tool", "43")):
        face.locator("select").select_option(turn)
        text.fill(words)
        face.get_by_role("button", name=re.compile("replace turn|write the")).click()
        until(page, lambda: "written by hand" in face.inner_text())
        if turn.startswith("turn 0"):
            face.get_by_role("button", name="next").click()
            until(page, lambda: "1 · tool" in face.inner_text())
    book.picture("episode", cell)
    code = 'most = int(s.batch.to_pandas()["num_tool_calls"].idxmax())\ns.branch(most, turns="all", n=16)'
    book.cell("tree", code, "text=continuations", 1320)


def cluster(book: Notebook) -> None:
    """The status of a cluster on this machine, and the time line of a step there."""
    code = """c = wb.cluster(cpus=4)
policy = c.place("data/tiny-arith", learner="fsdp", sampler="local", ranks=2, lr=2e-4)
rows = wb.rows("data/arith/train.parquet", max_prompt_length=256)
s = wb.Stepper(wb.recipes.grpo(policy, group_size=4, max_tokens=48), rows.batch(8)).run()"""
    book.cell("", code, "")
    book.cell("cluster", "from IPython.display import display\n\ndisplay(c.status(), c.timeline)", "text=Timeline")
    book.cell("", "c.close()", "")


NOTEBOOKS = {one.__name__: one for one in (moving, step, training, agents, cluster)}


def main() -> None:
    """Make the pictures of the notebooks that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only", nargs="*", choices=[[], *NOTEBOOKS], help="names of notebooks")
    chosen = parser.parse_args().only or list(NOTEBOOKS)
    with tempfile.TemporaryDirectory() as folder, laboratory(Path(folder)) as lab:
        for name in chosen:
            put(lab, f"{name}.ipynb", v4.new_notebook(cells=[v4.new_code_cell("")], metadata=KERNEL))
            with opened_page(lab, f"{name}.ipynb") as page:
                NOTEBOOKS[name](Notebook(page))


if __name__ == "__main__":
    main()
