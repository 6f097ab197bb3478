"""What workers did when, as text and as a picture: a row a worker, a bar a call, the stages above."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from workbench.views.html import escape, image, terminal

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from workbench.cluster.timeline import Timeline

LANE = 60
"""Characters of a lane in text."""
WORKERS = 64
"""Rows of a picture; a saved trace has all."""
METHODS = 12
"""Names in the picture's key."""
FINE = 2000
"""Bars of one method closer than this part of the whole are one bar: nobody could tell."""
Span = tuple[str, float, float]
"""(name, began, ended), in seconds since the first call."""
_FAILED = "#c8553d"


def _began(timeline: Timeline) -> float:
    return min((one.began for one in timeline.events), default=0.0)


def _seconds(timeline: Timeline) -> float:
    return max((one.ended for one in timeline.events), default=0.0) - _began(timeline)


def _lanes(timeline: Timeline) -> dict[str, list[Span]]:
    """Worker → its calls."""
    start = _began(timeline)
    lanes: dict[tuple[str, int], list[Span]] = {}
    for one in timeline.events:
        name = one.name if one.outcome == "done" else f"{one.name} ({one.outcome})"
        lanes.setdefault((one.group, one.rank), []).append((name, one.began - start, one.ended - start))
    return {f"{group} {rank}": lanes[group, rank] for group, rank in sorted(lanes)}


def _title(timeline: Timeline) -> str:
    if not len(timeline):
        return "Timeline: nothing has run"
    return f"Timeline: {len(timeline)} calls in {_seconds(timeline):.2f} s; .save(path) writes a Chrome trace"


def timeline_text(timeline: Timeline) -> str:
    """A lane a worker, and how long each of its methods took together."""
    lines = [_title(timeline)]
    lanes, whole = _lanes(timeline), max(_seconds(timeline), 1e-9)
    width = max((len(name) for name in lanes), default=0)
    for name, spans in lanes.items():
        drawn = [" "] * LANE
        totals: dict[str, float] = {}
        for method, began, ended in spans:
            first = int(began / whole * LANE)
            for place in range(first, min(max(int(ended / whole * LANE), first + 1), LANE)):
                drawn[place] = "█"
            totals[method] = totals.get(method, 0.0) + ended - began
        said = ", ".join(f"{method} {seconds:.2f} s" for method, seconds in totals.items())
        lines.append(f"  {name.ljust(width)} │{''.join(drawn)}│ {said}")
    stages: dict[str, float] = {}
    for stage, began, ended in timeline.stages():
        stages[stage] = stages.get(stage, 0.0) + ended - began
    if stages:
        lines.append(f"  stages: {', '.join(f'{stage} {seconds:.2f} s' for stage, seconds in stages.items())}")
    return terminal(lines)


def timeline_html(timeline: Timeline) -> str:
    """The picture under its title."""
    from workbench.views.curves import png

    title = f"<div><b>{escape(_title(timeline))}</b></div>"
    if not len(timeline):
        return title
    return title + image(png(timeline_figure(timeline)), timeline_text(timeline).split("\n")[0])


def timeline_figure(timeline: Timeline) -> Figure:
    """A row a worker, bars coloured by method, with a red edge where a call failed; above, the stages that made the calls."""
    from workbench.views.curve_parts import colour, label
    from workbench.views.curves import cell_figure

    start, lanes = _began(timeline), _lanes(timeline)
    kept = dict(list(lanes.items())[:WORKERS])
    stages: dict[str, list[Span]] = {}
    for stage, began, ended in timeline.stages():
        stages.setdefault(stage, []).append((stage, began - start, ended - start))
    methods = list(dict.fromkeys(one.name for one in timeline.events))
    colours = {name: colour(place) for place, name in enumerate(methods)}
    rows = [*stages, *kept]
    figure = cell_figure(10.5, 0.27 * max(len(rows), 2) + 1.0, layout="constrained")
    axes = figure.subplots()
    whole = max(_seconds(timeline), 1e-9)
    for place, spans in enumerate(stages.values()):
        _bars(axes, place, _merged(spans, whole), dict.fromkeys(stages, "#9aa3ad"))
    for place, spans in enumerate(kept.values(), len(stages)):
        _bars(axes, place, _merged(spans, whole), colours)
    if stages:
        axes.axhline(len(stages) - 0.5, color="#666666", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [label(row, 30) for row in rows], fontsize=8, parse_math=False)
    axes.set_ylim(max(len(rows), 1) - 0.5, -0.5)
    axes.set_xlim(0, whole)
    more = f"; {len(lanes) - WORKERS} more workers are not drawn" if len(lanes) > WORKERS else ""
    axes.set_xlabel(f"seconds since the first call{more}", fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    _key(figure, methods, colours)
    return figure


def _bars(axes: Axes, row: int, spans: Sequence[Span], colours: dict[str, str]) -> None:
    known = [colours.get(name) or colours.get(name.rsplit(" (", 1)[0], "#9aa3ad") for name, _, _ in spans]
    edges = ["none" if name in colours else _FAILED for name, _, _ in spans]
    pieces = [(began, max(ended - began, 0.0)) for _, began, ended in spans]
    axes.broken_barh(pieces, (row - 0.38, 0.76), facecolors=known, edgecolors=edges, linewidths=1.4)


def _merged(spans: Sequence[Span], whole: float) -> list[Span]:
    """Bars that the eye could not tell apart are one."""
    found: list[Span] = []
    for name, began, ended in spans:
        if found and found[-1][0] == name and began - found[-1][2] < whole / FINE:
            found[-1] = (name, found[-1][1], max(found[-1][2], ended))
        else:
            found.append((name, began, max(ended, began + whole / FINE)))
    return found


def _key(figure: Figure, methods: Sequence[str], colours: dict[str, str]) -> None:
    from matplotlib.patches import Patch

    from workbench.views.curve_parts import label

    patches = [Patch(facecolor=colours[name], label=label(name, 30)) for name in methods[:METHODS]]
    legend = figure.legend(handles=patches, loc="outside upper center", ncols=6, fontsize=8, frameon=False)
    for text in legend.get_texts():
        text.set_parse_math(False)
