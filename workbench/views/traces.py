"""Traces, their phases, steppers and comparisons as text and HTML."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from workbench.definitions import outdated
from workbench.views.batches import kind_of
from workbench.views.fields import fields_html, fields_text
from workbench.views.html import escape, fold, table, terminal

if TYPE_CHECKING:
    from workbench.dataproto import DataProto
    from workbench.stepper import Stepper
    from workbench.trace import Phase, Trace

HEADLINES = {
    "rollout": ("response_length/mean", "tokens a response"),
    "reward": ("critic/score/mean", "mean reward"),
    "old_log_prob": ("actor/entropy", "nats entropy"),
    "values": ("critic/values/mean", "mean value"),
    "advantage": ("critic/advantages/max", "largest advantage"),
    "update_critic": ("critic/vf_loss", "value loss"),
    "update_actor": ("actor/grad_norm", "gradient norm"),
}
"""Stage → the one metric that says most about it, and what it is."""


def number(value: float) -> str:
    """Four significant digits, no needless zeros."""
    if math.isnan(value):
        return "–"
    return f"{value:.4g}"


def headline(phase: Phase) -> str:
    """The phase's most telling metric as `0.4062 mean reward`; empty where there is none."""
    key, what = HEADLINES.get(phase.stage, (None, ""))
    if key is None:
        key = next(iter(phase.metrics), None)
        what = key or ""
    said = f"{number(phase.metrics[key])} {what}" if key in phase.metrics else ""
    return "; ".join(part for part in (said, _warning(phase)) if part)


def _warning(phase: Phase) -> str:
    """What makes a step teach nothing."""
    if phase.metrics.get("reward/scored_ratio") == 0:
        return "no row was judged"
    if phase.metrics.get("advantage/zero_share") == 1:
        return "every advantage is 0: nothing to learn"
    return ""


def _seconds(phase: Phase) -> str:
    return "reused" if phase.reused else f"{phase.seconds:.2f} s"


def _wrote(phase: Phase) -> str:
    return ", ".join(f"{name} {kind_of(phase.batch, name)}" for name in phase.wrote)


# --- traces -------------------------------------------------------------------------------


def _title(trace: Trace) -> str:
    step = f" of step {trace.step}" if trace.step is not None else ""
    return f"Trace{step}: {len(trace)} phases, {len(trace.batch)} rows, {trace.metrics['timing_s/step']:.2f} s"


def trace_text(trace: Trace) -> str:
    """One line a phase: seconds, headline metric, columns written."""
    lines = [_title(trace)]
    for phase in trace:
        lines.append(f"  {phase.stage:<14} {_seconds(phase):>8}  {headline(phase)}")
        lines.append(f"  {'':<14} {'':>8}  → {_wrote(phase)}")
    return terminal(lines)


def trace_html(trace: Trace) -> str:
    """A table of phases, each with all its metrics and settings folded beneath."""
    return f"<div><b>{escape(_title(trace))}</b></div>" + _phase_table(trace)


def _phase_table(trace: Trace) -> str:
    rows = [
        [
            f"<b>{escape(phase.stage)}</b>",
            escape(_seconds(phase)).replace(" ", "&nbsp;"),
            escape(headline(phase)),
            escape(_wrote(phase)),
            f'<div style="white-space:nowrap">{fold(f"{len(phase.metrics)} metrics", _pairs(phase.metrics))}'
            f"{fold('settings', _settings(phase))}</div>",
        ]
        for phase in trace
    ]
    return table(["phase", "time", "headline", "wrote", ""], rows)


def _pairs(metrics: dict[str, float]) -> str:
    return table(["metric", "value"], [[escape(key), number(value)] for key, value in metrics.items()])


def _settings(phase: Phase) -> str:
    rows = [[escape(name), escape(str(value))] for name, value in phase.settings.items()]
    sources = "".join(
        fold(f"source of {escape(name)}", f"<pre>{escape(text)}</pre>") for name, text in phase.source.items()
    )
    return table(["setting", "value"], rows) + sources


# --- steppers -----------------------------------------------------------------------------


def _strip(stepper: Stepper) -> list[tuple[str, str]]:
    """Every phase with its mark: ● done, ○ to come, ▶ next."""
    marks = []
    for position, name in enumerate(stepper.pipeline.names):
        mark = "●" if position < stepper.position else "▶" if position == stepper.position else "○"
        marks.append((mark, name))
    return marks


def stepper_text(stepper: Stepper) -> str:
    """The strip of phases, and what the last one wrote, before and after."""
    lines = ["  ".join(f"{mark} {name}" for mark, name in _strip(stepper)), *outdated(stepper.pipeline)]
    if not len(stepper.trace):
        return terminal([*lines, f"nothing has run yet; {len(stepper.batch)} prompts are waiting"])
    phase = stepper.trace.phases[-1]
    return terminal([*lines, *_phase_lines(phase, stepper.trace.before(phase.stage))])


def stepper_html(stepper: Stepper) -> str:
    """The strip of phases (done, the last one framed, to come); beneath it what the last one wrote, before and after."""
    trace = stepper.trace
    boxes = "".join(_box(stepper, place, mark, name) for place, (mark, name) in enumerate(_strip(stepper)))
    boxes += "".join(f"<div><b>{escape(said)}</b></div>" for said in outdated(stepper.pipeline))
    if not len(trace):
        return f"<div>{boxes}</div>" + escape(stepper_text(stepper).splitlines()[-1])
    phase = trace.phases[-1]
    earlier = fold(f"all {len(trace)} phases: metrics and settings", _phase_table(trace))
    return f"<div>{boxes}</div>{phase_html(phase, trace.before(phase.stage))}{earlier}"


def _box(stepper: Stepper, place: int, mark: str, name: str) -> str:
    colour = {"●": "rgba(46,160,67,0.20)", "▶": "rgba(56,139,253,0.25)", "○": "rgba(128,128,128,0.12)"}[mark]
    below = ""
    if mark == "●":
        phase = stepper.trace.phases[place]
        below = f"<br><small>{escape(_seconds(phase))}<br>{escape(headline(phase))}</small>"
    frame = "2px solid rgba(46,160,67,0.75)" if place == stepper.position - 1 else "2px solid rgba(0,0,0,0)"
    return (
        f'<div style="display:inline-block;padding:3px 9px;margin:2px;border-radius:5px;text-align:center;'
        f'vertical-align:top;border:{frame};background:{colour}">{mark} {escape(name)}{below}</div>'
    )


# --- phases -------------------------------------------------------------------------------


def _phase_lines(phase: Phase, before: DataProto | None) -> list[str]:
    said = ", ".join(part for part in (headline(phase), "wrote") if part)
    return [f"{phase.stage} ({_seconds(phase)}): {said}", *fields_text(phase, before).splitlines()]


def phase_text(phase: Phase, before: DataProto | None = None) -> str:
    """Its headline, and each column that it wrote: kind, histogram, mean ± deviation, range."""
    return terminal(_phase_lines(phase, before))


def phase_html(phase: Phase, before: DataProto | None = None) -> str:
    """The same as a table, with metrics and settings folded."""
    title = f"<div><b>{escape(phase.stage)}</b> · {escape(_seconds(phase))} · {escape(headline(phase))}</div>"
    return (
        title
        + fields_html(phase, before)
        + fold(f"{len(phase.metrics)} metrics", _pairs(phase.metrics))
        + fold("settings", _settings(phase))
    )
