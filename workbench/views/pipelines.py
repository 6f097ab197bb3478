"""A pipeline as boxes, the columns that each stage leaves on the arrows between them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench.views.html import escape, fold, table

if TYPE_CHECKING:
    from workbench.stages import Pipeline, Stage

_BOX = "display:inline-block;vertical-align:middle;padding:4px 10px;margin:3px;border-radius:6px;text-align:center"
_ARROW = "display:inline-block;vertical-align:middle;font-size:80%;opacity:0.75;max-width:150px;margin:3px"


def pipeline_html(pipeline: Pipeline) -> str:
    """Boxes joined by arrows; on an arrow the columns that the stage before it writes and a later one reads. Hover a box for
    what it reads; every setting is folded beneath."""
    stages = list(pipeline)
    parts = []
    for place, stage in enumerate(stages):
        parts.append(_box(stage))
        later = {name for one in stages[place + 1 :] for name in one.reads}
        used = [name for name in stage.writes if name in later]
        if place + 1 < len(stages):
            label = "<br>".join(escape(name, 40) for name in used)
            parts.append(f'<div style="{_ARROW}">{label} →</div>')
    rows = [
        [
            f"<b>{escape(stage.name)}</b>",
            escape(", ".join(stage.reads)),
            escape(", ".join(stage.writes)),
            escape(repr(stage)),
        ]
        for stage in stages
    ]
    beside = ", rewards beside the rollout" if pipeline.overlap else ""
    return f"<div>Pipeline of {len(pipeline)} stages{beside}</div><div>{''.join(parts)}</div>" + fold(
        "reads, writes, settings", table(["stage", "reads", "writes", "settings"], rows)
    )


def _box(stage: Stage) -> str:
    colour = "rgba(207,120,40,0.22)" if stage.updates else "rgba(56,139,253,0.16)"
    reads, writes = escape(", ".join(stage.reads)), escape(", ".join(stage.writes))
    return (
        f'<div style="{_BOX};background:{colour}" title="reads {reads}; writes {writes}"><b>{escape(stage.name)}</b>'
        f"<br><small>{escape(type(stage).__name__)}</small></div>"
    )
