"""Two traces beside each other: what a change would have changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench.views.html import escape, fold, table, terminal, text_block
from workbench.views.traces import number

if TYPE_CHECKING:
    from workbench.compare import Comparison, RowChange

HEADLINES = {
    "critic/score/mean": "mean reward",
    "actor/pg_loss": "policy loss",
    "actor/pg_clipfrac": "clip fraction",
    "actor/ppo_kl": "KL from before the update",
    "actor/kl_loss": "KL to the reference",
    "actor/grad_norm": "gradient norm",
    "actor/entropy": "entropy",
    "critic/vf_loss": "value loss",
}
"""The numbers that people ask for first, in this order, and their names."""


def _sides(pair: tuple[float, float] | None) -> str:
    return "–" if pair is None else f"{number(pair[0])} → {number(pair[1])}"


def _title(comparison: Comparison) -> str:
    moved = sum(row.reward is not None and row.reward[0] != row.reward[1] for row in comparison.rows)
    return (
        f"Comparison: {_many(len(comparison.columns), 'column differs', 'columns differ')}, "
        f"{_many(len(comparison.rows), 'row', 'rows')} changed ({moved} in reward), "
        f"{_many(comparison.sign_flips, 'advantage', 'advantages')} changed sign"
    )


def _many(number: int, one: str, more: str) -> str:
    return f"{number} {one if number == 1 else more}"


def _headlines(comparison: Comparison) -> list[tuple[str, float, float]]:
    return [(what, *comparison.metrics[key]) for key, what in HEADLINES.items() if key in comparison.metrics]


def _reused(comparison: Comparison) -> str:
    """Which phases of the second side were taken over from the first."""
    first, second = comparison.traces
    shared = [id(phase) for phase in first]
    names = [phase.stage for phase in second if phase.reused or id(phase) in shared]
    return f"not run again: {', '.join(names)}" if names else ""


def comparison_text(comparison: Comparison, rows: int = 8) -> str:
    """What differs: the main numbers, columns, the rows that changed most, other metrics."""
    if comparison.identical:
        return "Comparison: nothing differs"
    lines = [_title(comparison)]
    lines += [f"  {what:<26} {_sides((a, b))}" for what, a, b in _headlines(comparison)]
    for change in comparison.columns:
        largest = "" if change.largest is None else f", by up to {number(change.largest)}"
        lines.append(f"  column {change.name:<20} {change.rows} rows{largest}")
    for side, names in zip(("first", "second"), comparison.only, strict=True):
        if names:
            lines.append(f"  only in the {side}: {', '.join(names)}")
    for row in comparison.rows[:rows]:
        flip = "  sign flipped" if row.flipped else ""
        lines.append(f"  row {row.row:<4} reward {_sides(row.reward):<18} advantage {_sides(row.advantage)}{flip}")
    for key, pair in [item for item in comparison.metrics.items() if item[0] not in HEADLINES][:rows]:
        lines.append(f"  {key:<34} {_sides(pair)}")
    return terminal([*lines, *([_reused(comparison)] if _reused(comparison) else [])])


def comparison_html(comparison: Comparison, rows: int = 12) -> str:
    """The same as tables: the main numbers, then rows that changed most, with prompt, response and both verdicts folded."""
    if comparison.identical:
        return "<div>Nothing differs.</div>"
    metrics = [[escape(key), number(a), number(b)] for key, (a, b) in comparison.metrics.items()]
    columns = [
        [escape(change.name), str(change.rows), "" if change.largest is None else number(change.largest)]
        for change in comparison.columns
    ]
    main = [[escape(what), number(a), number(b), _change(a, b)] for what, a, b in _headlines(comparison)]
    changed = [_row(comparison, row) for row in comparison.rows[:rows]]
    only = [
        f"<div>only in the {side}: {escape(', '.join(names))}</div>"
        for side, names in zip(("first", "second"), comparison.only, strict=True)
        if names
    ]
    left = len(comparison.rows) - rows
    return (
        f"<div><b>{escape(_title(comparison))}</b></div>"
        + f"<small>{escape(_reused(comparison))}</small>"
        + (table(["", "first", "second", "change"], main) if main else "")
        + (table(["row", "reward", "advantage", ""], changed) if changed else "")
        + (f"<small>and {left} more rows: .rows has them</small>" if left > 0 else "")
        + "".join(only)
        + fold("columns that differ", table(["column", "rows", "largest difference"], columns))
        + fold("metrics that differ", table(["metric", "first", "second"], metrics))
    )


def _change(a: float, b: float) -> str:
    share = f" ({(b - a) / abs(a):+.1%})" if a else ""
    return f"{b - a:+.4g}{share}"


def _row(comparison: Comparison, row: RowChange) -> list[str]:
    flip = "background:rgba(207,80,60,0.18);padding:0 4px" if row.flipped else ""
    said = []
    batches = [trace.batch for trace in comparison.traces]
    if "response_text" in batches[0]:
        said.append(text_block(batches[0].non_tensor_batch.part("response_text", row.row, row.row + 1)[0]))
    for side, batch in zip(("first", "second"), batches, strict=True):
        if "score" in batch:
            score = batch.non_tensor_batch.part("score", row.row, row.row + 1)[0]
            said.append(f"<div><b>{side}</b> {escape(str(score), 400)}</div>")
    flipped = " sign flipped" if row.flipped else ""
    return [
        str(row.row),
        _sides(row.reward),
        f'<span style="{flip}">{_sides(row.advantage)}{flipped}</span>',
        fold("response and verdicts", "".join(said)) if said else "",
    ]
