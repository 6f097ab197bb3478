"""A run as a card, and its recorded steps as a list with their headline numbers; no trace is opened for either."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from workbench.runs.folder import STEP
from workbench.runs.recorder import KL
from workbench.runs.symptoms import shown_by
from workbench.views.html import escape, fold, pairs_table, table, terminal
from workbench.views.traces import number

if TYPE_CHECKING:
    from workbench.runs.run import Run, Traces

HEADLINES: Mapping[str, tuple[str, ...]] = {
    "reward": ("critic/score/mean",),
    "KL": KL,
    "entropy": ("actor/entropy",),
    "tokens": ("response_length/mean",),
    "clipped": ("actor/pg_clipfrac",),
    "grad norm": ("actor/grad_norm",),
    "seconds": ("timing_s/step",),
}
"""Title → the metrics that can stand there; the first that a step has does."""


def _headlines(row: Mapping[str, Any]) -> list[str]:
    found = []
    for keys in HEADLINES.values():
        value = next((row[key] for key in keys if row.get(key) is not None), None)
        found.append("–" if value is None else number(value))
    return found


def _lines(traces: Traces) -> list[tuple[str, ...]]:
    rows = {row[STEP]: row for row in traces.rows}
    return [(str(step), *_headlines(rows.get(step, {})), str(kept)) for step, kept in traces.reasons().items()]


def _header() -> tuple[str, ...]:
    return ("step", *HEADLINES, "kept because")


def traces_text(traces: Traces) -> str:
    """One line a recorded step: headline numbers, and why its trace is there."""
    lines = _lines(traces)
    if not lines:
        return "no recorded steps"
    cells = [_header(), *lines]
    widths = [max(len(line[place]) for line in cells) for place in range(len(cells[0]) - 1)]
    shown = [
        "  ".join([*(cell.rjust(width) for cell, width in zip(line, widths, strict=False)), line[-1]]) for line in cells
    ]
    return terminal(
        [f"{len(lines)} recorded steps; run.traces[step] opens one, run.stepper(step, at=…) steps it", *shown]
    )


def traces_html(traces: Traces) -> str:
    """The same as a table."""
    lines = _lines(traces)
    if not lines:
        return "<div>no recorded steps</div>"
    title = f"{len(lines)} recorded steps; run.traces[step] opens one, run.stepper(step, at=…) steps it"
    return f"<div>{escape(title)}</div>" + table(_header(), [[escape(cell) for cell in line] for line in lines])


# --- the card -------------------------------------------------------------------------------------


def _title(run: Run, rows: Sequence[Mapping[str, Any]]) -> str:
    step = rows[-1][STEP] if rows else 0
    return f"Run {run.path}: {run.state}, step {step} of {run.settings.get('train', {}).get('steps')}"


def _facts(run: Run, rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """(what, value): numbers, what is on disk, what looks wrong, how to go on."""
    found = [*run.summary.pairs(), *_trained(rows)]
    steps = run.checkpoints
    found.append(("checkpoints", f"of steps {', '.join(map(str, steps))}" if steps else "none"))
    found.append(("exact weights", f"of steps {run.reachable}"))
    kept = [f"{step} ({why})" for step, why in run.traces.reasons().items()]
    found.append(("traces", ", ".join(kept) or "none"))
    if run.stopped is not None:
        found.append(("stopped", f"before the update of step {run.stopped.trace.step}: look at .stopped"))
    found += [("symptom", str(one)) for one in shown_by(rows)]
    found += [("note", note) for note in run.notes]
    return [*found, ("go on", _next(run))]


def _trained(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    values = [row["critic/score/mean"] for row in rows if row.get("critic/score/mean") is not None]
    return [("training reward", f"{number(values[0])} → {number(values[-1])}")] if values else []


def _next(run: Run) -> str:
    steps = list(run.traces)
    opened = [f'run.stepper(step={steps[-1]}, at="reward")'] if steps else []
    return ", ".join(["run.curves()", "run.traces", *opened, *(["run.checkpoint()"] if run.checkpoints else [])])


def run_text(run: Run) -> str:
    """The card as text."""
    rows = run.rows
    return terminal([_title(run, rows), *(f"  {what}: {value}" for what, value in _facts(run, rows))])


def run_html(run: Run) -> str:
    """The card as a table, with the recorded steps folded beneath."""
    rows = run.rows
    steps = fold("recorded steps", traces_html(run.traces)) if len(run.traces) else ""
    return f"<div><b>{escape(_title(run, rows))}</b></div>{pairs_table(_facts(run, rows))}{steps}"
