"""What would have been: another way to learn from a batch, and what a run's updates would have been without some rows of one of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from workbench.views.html import escape, fold, table, terminal

if TYPE_CHECKING:
    import torch

    from workbench.runs.replay import Counterfactual
    from workbench.what_if import WhatIf

_SHOWN = ("actor/pg_loss", "actor/grad_norm", "actor/ppo_kl", "actor/pg_clipfrac", "actor/kl_loss", "critic/vf_loss")


def notes_text(notes: Sequence[str]) -> str:
    """One line a note: where a replayed step comes from, what of it is recorded."""
    return terminal(f"  · {note}" for note in notes)


def notes_html(notes: Sequence[str]) -> str:
    """The same, small."""
    return "".join(f'<div style="font-size:90%;opacity:0.75">· {escape(note)}</div>' for note in notes)


def _table(made: Counterfactual) -> tuple[list[str], list[list[str]]]:
    """(header, a line a step): each metric as it was → as it would have been, one number where it is the same."""
    names = [name for name in _SHOWN if any(name in pairs for pairs in made.metrics.values())]
    lines = [[str(step), *(_was_would(pairs.get(name)) for name in names)] for step, pairs in made.metrics.items()]
    return ["step", *(name.split("/")[-1] for name in names)], lines


def _was_would(pair: tuple[float, float] | None) -> str:
    if pair is None:
        return "–"
    was, would = (f"{value:.4g}" for value in pair)
    return was if was == would else f"{was} → {would}"


def _headline(made: Counterfactual) -> str:
    moved = ", ".join(f"{role} by {share:.1%}" for role, share in made.distance.items())
    return (
        f"Step {made.step} without {len(made.left_out)} rows, the later updates as recorded to step {made.until}: the final "
        f"weights differ ({moved} of the distance trained since then)"
    )


def counterfactual_text(made: Counterfactual) -> str:
    """Headline, and a line a step: metrics as they were → as they would have been."""
    header, lines = _table(made)
    widths = [max(len(line[place]) for line in (header, *lines)) for place in range(len(header))]
    shown = [
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in (header, *lines)
    ]
    return terminal([_headline(made), *shown])


def counterfactual_html(made: Counterfactual) -> str:
    """The same as a table; the rows that were left out are folded."""
    header, lines = _table(made)
    cells = [[escape(cell) for cell in line] for line in lines]
    left_out = fold(f"{len(made.left_out)} rows left out", escape(", ".join(map(str, made.left_out))))
    return f"<div><b>{escape(_headline(made))}</b></div>{left_out}{table(header, cells)}"


def _pairs(made: WhatIf) -> list[tuple[str, str, str]]:
    """(what, as it is, otherwise): the last update's metrics, then the probe."""
    found = [("updates", str(len(made.actual.metrics)), str(len(made.other.metrics)))]
    names = dict.fromkeys([*made.actual.metrics[-1], *made.other.metrics[-1]])
    for name in names:
        found.append((name, _short(made.actual.metrics[-1].get(name)), _short(made.other.metrics[-1].get(name))))
    ratios = [_ratio(made, side.new_log_probs) for side in (made.actual, made.other)]
    found.append(("mean ratio after", f"{ratios[0]:.5g}", f"{ratios[1]:.5g}"))
    for name, value in made.before.items():
        was, would = (f"{value:.5g} → {side.probe[name]:.5g}" for side in (made.actual, made.other))
        found.append((f"held-out {name}", was, would))
    return found


def _short(value: float | None) -> str:
    return "–" if value is None else f"{value:.5g}"


def _ratio(made: WhatIf, after: torch.Tensor) -> float:
    mask = made.batch["response_mask"].bool()
    ratio = (after - made.batch["old_log_probs"])[mask].exp()
    return float(ratio.mean()) if len(ratio) else float("nan")


def _movers(made: WhatIf) -> list[tuple[str, str, str, str]]:
    apart = made.difference.abs()
    return [
        (
            str(row),
            f"{float(made.batch['reward'][row]):g}" if "reward" in made.batch else "",
            f"{float(made.difference[row].sum()):+.4f}",
            f"token {int(apart[row].argmax())} ({float(made.difference[row][int(apart[row].argmax())]):+.4f})",
        )
        for row in made.rows()
    ]


def what_if_text(made: WhatIf) -> str:
    """Both sides beside each other, the angle between the updates, the rows that part most."""
    lines = [f"What if {made.other.name}: cosine between the updates {made.cosine:.4f}"]
    lines += [
        f"  {what:<28} {was:>22} {would:>22}" for what, was, would in (("", "as it is", "otherwise"), *_pairs(made))
    ]
    lines += ["  rows that part most (row, reward, Δ log-prob of the row, of its most moved token):"]
    lines += [f"    {row:>4}  {reward:>6}  {change:>9}  {token}" for row, reward, change, token in _movers(made)]
    return terminal(lines)


def what_if_html(made: WhatIf) -> str:
    """The same as tables."""
    title = f"What if {made.other.name}: cosine between the updates {made.cosine:.4f}"
    metrics = table(("", "as it is", "otherwise"), [[escape(cell) for cell in row] for row in _pairs(made)])
    movers = table(
        ("row", "reward", "Δ log-prob", "most moved token"), [[escape(cell) for cell in row] for row in _movers(made)]
    )
    return f"<div><b>{escape(title)}</b></div>{metrics}{fold('rows that part most', movers, opened=True)}"
