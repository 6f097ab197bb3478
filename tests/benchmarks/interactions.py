"""How long each control of each screen takes from the press to the picture: the script, the kernel's answer, and the drawing.

A real Chromium draws the widgets; their messages are answered by this process, as a kernel would. Small is the recorded batch of 64
rows and 40 steps of curves, large 10,000 rows × 1,024 tokens and 10,000 steps. `tests/benchmarks/README.md` has the last figures.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path += [str(Path(__file__).parents[1])]
from looking import synthetic
from support.lab import watched_page
from support.screens import Screen, curves, show, stepped

import workbench as wb
from workbench.widgets.layer import SamplesTable, StepperFace, TokenView

ROOT = Path(__file__).parents[2]
WATCH = """() => {
  window.pressed = () => {  // milliseconds from now to the picture after the last change, when 400 ms brought no other
    const began = performance.now();
    let last = 0, timer = null, calm = null;
    const done = new Promise((found) => { calm = () => { watch.disconnect(); found(last); }; });
    const painted = () => requestAnimationFrame(() => setTimeout(() => { last = performance.now() - began; }));
    const watch = new MutationObserver(() => { painted(); clearTimeout(timer); timer = setTimeout(calm, 400); });
    watch.observe(document.querySelector("#screen"), { subtree: true, childList: true, characterData: true, attributes: true });
    timer = setTimeout(calm, 4000);
    return done;
  };
}"""
PRESS = "([text, value]) => { const done = window.pressed(); (new Function('value', text))(value); return done; }"
Controls = list[tuple[str, str, Any]]
"""(what is done, the script that does it, its argument): in the order in which they are done."""

CLICK = "document.querySelector(value).click()"
ROW = "document.querySelectorAll('.wb-samples tbody tr')[value].click()"
CHOOSE = """const box = [...document.querySelectorAll("select")].find((one) => one.ariaLabel === value[0]);
  box.selectedIndex = value[1]; box.dispatchEvent(new Event("change"))"""
BUTTON = "[...document.querySelectorAll('button')].find((one) => one.textContent === value).click()"
WRITE = """const box = document.querySelector(value[0]); box.value = value[1]; box.dispatchEvent(new Event("input"))"""
KEY = "document.querySelector(value[0]).dispatchEvent(new KeyboardEvent('keydown', { key: value[1], bubbles: true }))"
MOVE = """const box = document.querySelector(value[0]), at = box.getBoundingClientRect();
  for (const kind of ["mouseenter", "mouseover", "mousemove"])
    box.dispatchEvent(new MouseEvent(kind, { bubbles: true, clientX: at.left + value[1] * at.width, clientY: at.top + 5 }))"""

SAMPLES: Controls = [
    ("sort by tokens", CLICK, "th.wb-c-tokens"),
    ("order: surprising", CHOOSE, ["order", 2]),
    ("a count of the headline", CLICK, ".wb-link"),
    ("the same count again", CLICK, ".wb-link"),
    ("by prompt", CLICK, "input[type=checkbox]"),
    ("by prompt, off", CLICK, "input[type=checkbox]"),
    ("search", WRITE, ["input[type=search]", "12"]),
    ("search, emptied", WRITE, ["input[type=search]", ""]),
    ("further rows", "document.querySelector('.wb-scroll').scrollTop = 1e6", None),
    ("open a row", ROW, 3),
    ("the next row, by key", KEY, [".wb-scroll", "ArrowDown"]),
    ("tokens", BUTTON, "tokens"),
    ("diff with another", CHOOSE, ["diff with another sample", 1]),
    ("pin", BUTTON, "pin"),
]
TOKENS: Controls = [
    ("point at a token", MOVE, [".wb-tokens span:nth-child(9)", 0.5]),
    ("the next token, by key", KEY, [".wb-tokens", "ArrowRight"]),
    ("another colour", CHOOSE, ["colour by", 0]),
]
CURVES: Controls = [
    ("the pointer over a plot", MOVE, [".u-over", 0.5]),
    ("the next step, by key", KEY, [".wb-canvas", "ArrowRight"]),
    ("smoothing", WRITE, ["input[type=range]", "2.5"]),
    ("a run hidden", CLICK, "input[type=checkbox]"),
    ("log scale", "[...document.querySelectorAll('input[type=checkbox]')].pop().click()", None),
    ("zoom, by key", KEY, [".wb-canvas", "+"]),
    ("all steps", BUTTON, "all steps"),
]
STEPPER: Controls = [
    ("show the first phase", "document.querySelector('.wb-look').click()", None),
    ("show a phase", "document.querySelectorAll('.wb-look')[1].click()", None),
    ("back to before a phase", "[...document.querySelectorAll('.wb-undo')].pop().click()", None),
]


class Phases(list[Any]):
    """An empty pipeline with names of phases."""

    names: tuple[str, ...] = ()


class Stands:
    """What the step page reads of a stepper, from a recorded step: phases of 10,000 rows without running them."""

    def __init__(self, trace: wb.Trace) -> None:
        columns, phases = dict[str, Any](), list[Any]()
        for phase in trace.phases:  # in memory, as a stepper has them
            columns |= {
                name: phase.batch[name] for name in phase.batch.columns if name not in columns or name in phase.wrote
            }
            tensors = {name: column for name, column in columns.items() if isinstance(column, torch.Tensor)}
            objects = {name: column for name, column in columns.items() if name not in tensors}
            phases.append(replace(phase, batch=wb.DataProto(tensors, objects)))
        self.trace = replace(trace, phases=tuple(phases))
        self.batch, self.position, self.next_stage = trace.batch, len(trace), None
        self.pipeline = Phases()
        self.pipeline.names = tuple(trace.names)

    def prices(self) -> dict[str, str]:
        """Nothing is kept for going back."""
        return {}


def measured(page: Any, screen: Screen, controls: Controls, repeats: int) -> Iterator[tuple[str, float]]:
    """(what is done, median milliseconds from the press to the picture)."""
    spent: dict[str, list[float]] = {}
    for _ in range(repeats):
        show(page, screen, "light")
        page.evaluate(WATCH)
        for name, script, value in controls:
            spent.setdefault(name, []).append(page.evaluate(PRESS, [script, value]))
    yield from ((name, median(found)) for name, found in spent.items())


def sides(options: argparse.Namespace, folder: Path) -> Iterator[tuple[str, Screen, Controls]]:
    """Each screen, small and large, with its controls."""
    traces = {"64 rows": wb.Trace.load(ROOT / "data" / "arith-batch")}
    if options.rows:
        large = options.trace or folder / "large"
        if not large.exists():
            synthetic(options.rows, options.tokens).save(large)
        traces[f"{options.rows:,} rows × {options.tokens:,} tokens"] = wb.Trace.load(large)
    for name, trace in traces.items():
        yield f"samples, {name}", Screen(SamplesTable(wb.views.samples(trace)), "#screen tbody tr"), SAMPLES
        widget = TokenView(wb.views.tokens(trace, 0, "advantage", against_row=1))
        yield f"tokens, {name}", Screen(widget, ".wb-tokens span[style]"), TOKENS
    for steps in (40, options.steps):
        yield (
            f"curves, {steps:,} steps of two runs",
            Screen(curves(folder / str(steps), steps), ".wb-canvas canvas"),
            CURVES,
        )
    for name, trace in traces.items():
        yield f"step, {name}", Screen(StepperFace(Stands(trace)), ".wb-chip"), STEPPER[:2]
    yield "stepper", Screen(StepperFace(stepped("data/tiny-arith")), ".wb-chip"), STEPPER


def main() -> None:
    """All screens, or those whose name begins with one of `--only`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[""], help="beginnings of names")
    parser.add_argument("--rows", type=int, default=10_000, help="0: the small ones alone")
    parser.add_argument("--tokens", type=int, default=1_024)
    parser.add_argument("--trace", type=Path, help="keep the large step in this folder, or use the one that is there")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, watched_page() as (page, _, _):
        for name, screen, controls in sides(options, Path(folder)):
            if not name.startswith(tuple(options.only)):
                continue
            print(name)
            here = Path.cwd()
            os.chdir(folder)  # a pin is written where one works
            for what, spent in measured(page, screen, controls, options.repeats):
                print(f"  {what:<28} {spent:7.0f} ms{'   !' if spent > 100 else ''}", flush=True)
            os.chdir(here)


if __name__ == "__main__":
    main()
