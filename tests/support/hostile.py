"""Objects full of hostile text, for tests of everything that shows text."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

import workbench as wb
from workbench.rewards import Score, Status
from workbench.rewards.score import bounded
from workbench.stages.stage import BaseStage

HOSTILE = (
    "<script>alert(1)</script><img src=x onerror=alert(2)><svg onload=alert(3)><a href='javascript:alert(4)'>a</a>"
    "\x1b[31mred\x1b]8;;http://evil.example\x07link\x1b]8;;\x07 \u202egnp.exe\u202c </td></table><style>*{display:none}</style>"
)


HOSTILE_PROSE = (
    "[a](javascript:alert(1)) [b](http://evil.example) ![c](http://evil.example/x.png) <http://evil.example> <img src=x onerror=alert(2)>\n\n"
    "[d]: http://evil.example\n\n[d] ![d]\n\n> <script>alert(3)</script>\n\n<style>*{display:none}</style>\n\n"
    "```html onload=alert(4)\n<script>alert(5)</script>\n```\n\n| <svg onload=alert(6)> | `</code><script>alert(7)</script>` |\n|---|---|\n| x | y |\n\n"
    r"$\href{javascript:alert(8)}{x}$ $\style{position:fixed;inset:0}{y}$ $\class{jp-Notebook}{z}$ $\text{<script>alert(9)</script>}$ "
    r"$\hspace{-99em} \rule{9999em}{9999em} \color{url(http://evil.example)}{w}$ \[\text{</math><img src=x onerror=alert(10)>}\]"
)
"""Markdown, LaTeX and code that would run, fetch, or leave their box where a page took them at their word."""


def hostile_batch(text: str = HOSTILE) -> wb.DataProto:
    score = Score(value=1.0, parts={"x": 1.0}, answer=text, why=text, error=text)
    failed = Score(status=Status.INFRA_ERROR, why=text, error=text)
    return wb.DataProto(
        {
            "responses": torch.ones(2, 3, dtype=torch.long),
            "response_mask": torch.ones(2, 3, dtype=torch.long),
            "reward": torch.tensor([1.0, 0.0]),
            "scored": torch.tensor([True, False]),
            "advantages": torch.ones(2, 3),
        },
        {
            "uid": [text[:200], "b"],
            "response_text": [text, "fine"],
            "raw_prompt": [[{"role": text, "content": text}]] * 2,
            "reward_model": [{"ground_truth": text}] * 2,
            "data_source": [text] * 2,
            "extra_info": [{text: text}] * 2,
            "score": [score, failed],
            "finish_reason": ["stop", text],
        },
        {"note": text},
    )


class HostileTokenizer:
    """Each token of it reads as a text that is markup."""

    def __init__(self, text: str) -> None:
        self.text = text

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return self.text * len(ids)


class Hostile(BaseStage):
    """A stage whose name, column and setting are markup."""

    reads = ("raw_prompt",)

    def __init__(self, text: str) -> None:
        self.name = text[:50]
        self.setting = text
        self.writes = (text[:60],)

    def __call__(self, batch: wb.DataProto) -> wb.Outcome:
        return wb.Outcome(self.written(batch, {self.writes[0]: [self.setting] * len(batch)}), {self.name: 1.0})


def every_thing(text: str, run: wb.Run, folder: Path) -> dict[str, Any]:
    """Every object with a face, full of a text."""
    from workbench.compat import read_dump
    from workbench.steps.trace import Phase, Trace
    from workbench.views.document import bar
    from workbench.widgets.display import Block

    batch = hostile_batch(text)
    phase = Phase(
        stage="reward", batch=batch, wrote=("reward", "response_text"), metrics={text[:100]: 1.0, "a": 2.0},
        settings={text[:100]: text}, source={"function": text},
    )  # fmt: skip
    trace = Trace(batch, (phase,))
    other = batch.with_columns({"reward": batch["reward"] * 0.5 - 1, "response_text": ["other", text + "!"]})
    changed = Trace(batch, (dataclasses.replace(phase, batch=other, metrics={text[:100]: 2.0}),))
    rows = wb.datasets.Rows(
        [{"prompt": [{"role": "user", "content": text}], "data_source": text, "reward_model": {"ground_truth": text}}]
    )
    named = bounded(lambda response: {"score": 1.0, text[:100]: 0.5, "why": text})
    named.__name__ = text[:50]
    pipeline = wb.Pipeline([Hostile(text)])
    pins = wb.rewards.pins(folder / "pins.jsonl")
    pins.add(batch, row=0, expected=0.0, note=text[:1000])
    samples = wb.views.samples(batch)
    return {
        "batch": batch,
        "samples": samples,
        "samples by group": wb.views.samples(batch, by_group=True),
        "samples left out": samples.left_out,
        "a sample": samples.row(0),
        "a sample that failed": samples.row(1),
        "a sample, rendered": samples.row(0, rendered=True),
        "a transcript, rendered": wb.views.transcript(batch, 0, tokenizer=HostileTokenizer(text[:2000]), rendered=True),
        "groups": wb.views.groups(batch),
        "tokens": wb.views.tokens(batch, 0, tokenizer=HostileTokenizer(text[:2000])),
        "tokens of two": wb.views.tokens(batch, 0, against=other, tokenizer=HostileTokenizer(text[:2000])),
        "trace": trace,
        "phase": phase,
        "pipeline": pipeline,
        "stepper": wb.Stepper(pipeline, batch).run(),
        "outcome": wb.Outcome(batch, {text[:100]: 1.0}),
        "score": batch["score"][0],
        "rubric": wb.rewards.Rubric({text[:100]: named, "b": named}, gates={"b": 0.1}),
        "dry run": wb.rewards.dry_run({text[:100]: named, "b": wb.rewards.math_string}, batch),
        "compare": wb.compare(trace, changed),
        "a row on both sides": wb.compare(trace, changed).row(0),
        "diverge": wb.diverge(trace, changed),
        "pins": pins,
        "pins checked": pins.check(named),
        "a dump": wb.views.samples(read_dump([{"prompt": text, "completion": text, "step": 1, text[:100]: 0.5}])),
        "rows": rows,
        "report": rows.report(),
        "run": run,
        "traces": run.traces,
        "summary": run.summary,
        "symptoms": run.symptoms,
        "block": Block(bar(0.5, text)),
    }


def every_view(text: str, run: wb.Run, folder: Path) -> dict[str, str]:
    """Every text and HTML that we make, of objects full of a text."""
    shown = {}
    for name, thing in every_thing(text, run, folder).items():
        html = getattr(thing, "_repr_html_", None)
        shown[name] = html() if html is not None else ""
        shown[f"{name} as text"] = repr(thing)
    return shown
