"""A counterfactual: what a run's updates would have been without some rows of one of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench.views.html import escape, fold, table

if TYPE_CHECKING:
    from workbench.runs.replay import Counterfactual

_SHOWN = ("actor/pg_loss", "actor/grad_norm", "actor/ppo_kl", "actor/pg_clipfrac", "actor/kl_loss", "critic/vf_loss")


def _rows(made: Counterfactual) -> list[tuple[str, str, str, str]]:
    found = []
    for step, pairs in made.metrics.items():
        for name in _SHOWN:
            if name in pairs:
                was, would = pairs[name]
                found.append((str(step), name, f"{was:.6g}", f"{would:.6g}"))
    return found


def _headline(made: Counterfactual) -> str:
    moved = ", ".join(f"{role} {share:.1%}" for role, share in made.distance.items())
    return (
        f"Update of step {made.step} without {len(made.left_out)} rows, then as recorded to step {made.until}: "
        f"the weights end apart by this share of the way that training went since: {moved}"
    )


def counterfactual_text(made: Counterfactual) -> str:
    """Headline, and step, metric, as it was, as it would have been."""
    lines = [_headline(made), f"{'step':>6}  {'metric':<18} {'was':>12} {'would be':>12}"]
    return "\n".join(
        [*lines, *(f"{step:>6}  {name:<18} {was:>12} {would:>12}" for step, name, was, would in _rows(made))]
    )


def counterfactual_html(made: Counterfactual) -> str:
    """The same as a table; the rows that were left out are folded."""
    cells = [[escape(cell) for cell in row] for row in _rows(made)]
    left_out = fold(f"{len(made.left_out)} rows left out", escape(", ".join(map(str, made.left_out))))
    return f"<div><b>{escape(_headline(made))}</b></div>{left_out}{table(('step', 'metric', 'was', 'would be'), cells)}"
