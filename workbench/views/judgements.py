"""Rewards and what they say: a Score, a Rubric, and the Outcome of any stage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench.metrics import reduce
from workbench.views.batches import batch_html, batch_text
from workbench.views.html import bar, escape, fold, pairs_table, table, terminal, text_block
from workbench.views.samples import shown

if TYPE_CHECKING:
    from workbench.rewards import Rubric, Score
    from workbench.stages import Outcome


def score_text(score: Score) -> str:
    """`Score(1, answer '4': the answer is right; parts right 1, short 0.5)`."""
    parts = ", ".join(f"{name} {value:g}" for name, value in score.parts.items())
    return terminal([f"Score({score}{f'; parts {parts}' if parts else ''})"])


def score_html(score: Score) -> str:
    """The value or that there is none, why, what was extracted, parts; extras and a traceback folded."""
    value = f"{score.value:g}" if score.scored else "no judgement"
    facts = [("reward", value), ("status", score.status.value)]
    facts += [("why", score.why)] if score.why else []
    facts += [("answer", score.answer)] if score.answer is not None else []
    facts += [(f"part {name}", f"{part:g}") for name, part in score.parts.items()]
    more = "".join(fold(name, text_block(shown(one))) for name, one in score.extra.items())
    return pairs_table(facts) + more + (fold("traceback", text_block(score.error)) if score.error else "")


def rubric_text(rubric: Rubric) -> str:
    """`Rubric(1·right + 0.1·short, gated by safe ≥ 0.5)`."""
    terms = " + ".join(f"{rubric.weights[part]:g}·{part}" for part in rubric.parts if rubric.weights[part])
    gates = f", gated by {', '.join(f'{part} ≥ {low:g}' for part, low in rubric.gates.items())}" if rubric.gates else ""
    return terminal([f"Rubric({terms}{gates})"])


def rubric_html(rubric: Rubric) -> str:
    """A line a part: its weight as a bar, its gate, what it is; its settings folded."""
    top = max((abs(weight) for weight in rubric.weights.values()), default=0.0) or 1.0
    rows = []
    for part, reward in rubric.parts.items():
        weight = rubric.weights[part]
        settings = [(name, str(value)) for name, value in reward.settings().items()]
        rows.append(
            [
                f"<b>{escape(part)}</b><br><small>column reward/{escape(part)}</small>",
                bar(abs(weight) / top, f"{weight:g}", good=weight >= 0) if weight else "–",
                f"≥ {rubric.gates[part]:g}, else {rubric.gated:g}" if part in rubric.gates else "",
                f"{escape(type(reward).__name__)} {escape(reward.name, 80)}",
                fold("settings", pairs_table(settings)),
            ]
        )
    what = "weighted mean" if rubric.normalise else "weighted sum"
    return f"<div><b>Rubric</b> · {what} of {len(rubric.parts)} parts</div>" + table(
        ["part", "weight", "gate", "judged by", ""], rows
    )


def outcome_text(outcome: Outcome) -> str:
    """The batch, and the stage's metrics."""
    metrics = [f"  {name} {value:.4g}" for name, value in reduce([outcome.metrics]).items()]
    return terminal([*batch_text(outcome.batch).splitlines(), f"{len(metrics)} metrics", *metrics])


def outcome_html(outcome: Outcome) -> str:
    """The same, the metrics folded."""
    metrics = [(name, f"{value:.4g}") for name, value in reduce([outcome.metrics]).items()]
    moved = "" if outcome.rows is None else f"<small>{len(outcome.rows)} rows made of the batch's</small>"
    return batch_html(outcome.batch) + moved + fold(f"{len(metrics)} metrics", pairs_table(metrics))
