"""Clusters, plans, worker groups, logs, memory estimates and the calls of workers over time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from itertools import accumulate, cycle
from statistics import median
from typing import TYPE_CHECKING

from workbench.base.memory import gib
from workbench.views import document as doc
from workbench.views.curve_axes import bare, colour, label, legend
from workbench.views.curves import cell_figure, png

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from workbench.base.activity import Asked
    from workbench.cluster.fitting import Fit
    from workbench.cluster.pools import Node, Plan
    from workbench.cluster.profiling import Profile
    from workbench.cluster.ranks import RayRanks
    from workbench.cluster.session import Cluster
    from workbench.cluster.simulating import Simulated, Simulation
    from workbench.cluster.status import Logs, Status
    from workbench.cluster.timeline import Timeline


def _labels(nodes: Sequence[Node]) -> dict[str, str]:
    """Node id → its host name, with the end of the id where nodes share one."""
    hosts = [node.host for node in nodes]
    return {node.id: node.host if hosts.count(node.host) == 1 else f"{node.host}/{node.id[-6:]}" for node in nodes}


def cluster(made: Cluster) -> doc.Part:
    """The view of a `Cluster`: its title, this session's pools and groups of workers, notes."""
    known = made.environment.variables or made.environment.ray
    pairs = [("environment", repr(made.environment))] if known else []
    pairs += [("pool", repr(pool)) for pool in made.pools.values()]
    pairs += [("group", f"{group.name}: {group.size} workers") for group in made.groups]
    pairs += [("note", note) for note in made.notes]
    doors = "status(), plan(…), fits(…), hold(…), ranks(…), timeline, close()"
    pairs.append(("state", "closed") if made.closed else ("go on", doors))
    return doc.line(doc.bold(f"Cluster: {made.title}")), doc.pairs(pairs)


# --- plans ----------------------------------------------------------------------------

_COLOURS = ("56,139,253", "46,160,67", "210,153,34", "163,113,247", "207,80,60", "57,197,207")
_FRAME = "display:inline-block;vertical-align:top;margin:4px;padding:4px 8px;border:1px solid rgba(128,128,128,0.5);border-radius:6px"
_BOX = "display:inline-block;margin:2px;padding:3px 8px;border-radius:4px"


def plan(made: Plan) -> doc.Part:
    """The view of a `Plan`: a frame for each node with the processes placed on it, coloured by pool in HTML."""
    each = f"{made.cpus:g} CPUs" + (f" and {made.gpus:g} GPUs" if made.gpus else "")
    title = f"Plan: {len(made.seats)} processes with {each} each on {len(made.nodes)} nodes; nothing has started"
    styles = {name: f"{_BOX};background:rgba({rgb},0.3)" for name, rgb in zip(made.spec, cycle(_COLOURS), strict=False)}
    labels, lines, frames = _labels(made.nodes), [], []
    for node in made.nodes:
        has = f"{node.free_cpus:g} of {node.cpus:g} CPUs, {node.free_gpus:g} of {node.gpus:g} GPUs free"
        ranks = {name: [str(seat.rank) for seat in made.of(name) if seat.node == node.id] for name in made.spec}
        seats = [_seat(made, name, ", ".join(found)) for name, found in ranks.items() if found]
        lines += _boxed(f" {labels[node.id]} ({has}) ", seats or ["nobody"])
        boxes = [
            doc.line(f"{name} {rank}", style=styles[name], title=_seat(made, name, rank))
            for name, found in ranks.items()
            for rank in found
        ]
        head = doc.bold(labels[node.id]), doc.BREAK, doc.small(has), doc.BREAK
        frames.append(doc.line(head, boxes or "nobody", style=_FRAME))
    roles = [f"{name}: {', '.join(said)}" for name, said in made.roles.items()]
    return doc.line(doc.bold(title)), doc.Either(lines, (doc.line(frames), roles))


def _seat(made: Plan, name: str, ranks: str) -> str:
    roles = ", ".join(made.roles.get(name, ()))
    return f"{name}: rank {ranks}{f' ({roles})' if roles else ''}"


def _boxed(head: str, inside: Sequence[str]) -> list[str]:
    width = max(len(head), *(len(one) + 2 for one in inside))
    framed = (f"  │ {one.ljust(width - 1)}│" for one in inside)
    return [f"  ┌{head.ljust(width, '─')}┐", *framed, f"  └{'─' * width}┘"]


# --- the state of a cluster ------------------------------------------------------------------------------

_NODES = ("node", "address", "state", "CPUs free", "GPUs free", "memory", "object store used")
_WORKERS = ("group", "rank", "pid", "host", "pool", "GPUs", "memory", "GPU memory", "doing", "for", "waiting")


def status(made: Status) -> doc.Part:
    """The view of a cluster's `Status`: tables of nodes, pools, workers and running calls; usage is bars in HTML."""
    at = f", {datetime.fromtimestamp(made.at, UTC):%Y-%m-%d %H:%M:%S} UTC" if made.at else ""
    pools = [[name, str(size), where] for name, size, where in made.pools]
    calls = [[one.method, one.group, one.stage or "–", f"{one.seconds:.0f} s"] for one in made.calls]
    tables: list[tuple[Sequence[str], Sequence[Sequence[doc.Part]]]] = [
        (("pool", "processes", "where"), pools),
        (_WORKERS, _workers(made)),
        (("call out", "of", "for stage", "since"), calls),
    ]
    return (
        doc.line(doc.bold(f"Cluster: {made.title}{at}")),
        doc.Table(_NODES, _nodes(made.nodes)),
        [(doc.Either(""), doc.Table(header, rows)) for header, rows in tables if rows],
        [doc.Either(f"  note: {note}", note) for note in made.notes],
    )


def _nodes(nodes: Sequence[Node]) -> list[list[doc.Part]]:
    labels, rows = _labels(nodes), list[list[doc.Part]]()
    for one in nodes:
        free: list[doc.Part] = [
            doc.bar((total - left) / total, f"{left:g} of {total:g}") if total else doc.Either(f"{left:g} of 0", "–")
            for left, total in ((one.free_cpus, one.cpus), (one.free_gpus, one.gpus))
        ]
        state, store = "alive" if one.alive else "dead", _used(one.store_used, one.store, 0.8)
        rows.append([labels[one.id], one.address, state, *free, gib(one.memory), store])
    return rows


def _used(used: int, total: int, most: float) -> doc.Part:
    """A bar of bytes in use, red from `most` of the whole on."""
    said = f"{gib(used)} of {gib(total)}"
    return doc.bar(used / total, said, used < most * total) if total else said


def _workers(made: Status) -> list[list[doc.Part]]:
    rows: list[list[doc.Part]] = []
    for one in made.workers:
        gpu = _used(*one.gpu, 0.95) if one.gpu is not None else "–"
        resident = gib(one.resident) if one.resident is not None else "–"
        doing = one.state if one.state == "idle" else doc.bold(one.state)
        since = f"{one.seconds:.0f} s" if one.seconds is not None else "–"
        where = [one.host, one.pool or "–", one.gpus or "–"]
        rows.append([one.group, str(one.rank), str(one.pid), *where, resident, gpu, doing, since, str(one.waiting)])
    return rows


def logs(made: Logs) -> doc.Part:
    """The view of `Logs`: each worker's lines under its name; in HTML folded, unless there is only one worker."""
    said = [[f"--- {where}", *(text.splitlines() or ["(it wrote nothing)"])] for where, text in made.parts]
    alone = len(made.parts) == 1
    folds = [doc.Fold(f"{where}: {len(text.splitlines())} lines", doc.block(text), alone) for where, text in made.parts]
    return doc.Either(said, folds)


def profile(made: Profile) -> doc.Part:
    """The view of a `Profile`: the trace files that the profiler wrote, one per line."""
    when = f"of steps {', '.join(map(str, sorted(made.steps)))}" if made.steps else "of a block"
    return doc.line(doc.bold(f"Profile {when}, {len(made.files)} traces")), [str(file) for file in made.files]


def group(made: RayRanks) -> doc.Part:
    """The view of a group of Ray workers: its state, and for each worker rank, pid, host and GPUs."""
    pool = f" on pool {made.pool.name!r}" if made.pool is not None else ""
    title = f"Group {made.name!r}: {made.size} workers{pool}, {', '.join(made.out) or 'idle'}"
    if made.closed is not None:
        title = f"Group {made.name!r} of {made.size} workers, gone: {made.closed}"
    rows = [[str(rank), str(one["pid"]), one["host"], one["gpus"] or "–"] for rank, one in enumerate(made.facts)]
    return doc.line(doc.bold(title)), doc.Table(["rank", "pid", "host", "GPUs"], rows)


def fit(made: Fit) -> doc.Part:
    """The view of a `Fit`: whether a placement fits in memory, the bytes of each phase, role and kind, and what would help."""
    rows, verdict = list[list[doc.Part]](), "fits" if made.fits else "does not fit"
    where, room = made.placement, max(made.available, 1)
    for phase in made.phases:
        rows += [
            [phase.name, part.role, part.what, doc.bar(part.size / room, gib(part.size), made.fits)]
            for part in phase.parts
            if part.size
        ]
        rows.append([phase.name, "together", "", gib(phase.size)])
    title = f"{made.name} {verdict}: {gib(made.needed)} of {gib(made.available)} ({made.source}) a process in its fullest phase"
    how = f"  {made.parameters:,} parameters, learner over {where.ranks} ranks"
    if made.cached is not None:
        sequences = made.cached // made.asked["tokens"]
        how += f"; a sampler has cache for {made.cached:,} tokens, {sequences} sequences of {made.asked['tokens']:,}"
    lines: list[doc.Part] = [
        doc.line(doc.bold(title)),
        doc.line(how),
        doc.Table(["phase", "role", "what", "bytes a process"], rows),
    ]
    if not made:
        told = [[one.name, f"{'−' if one.saved >= 0 else '+'}{gib(abs(one.saved))}", one.cost] for one in made.choices]
        lines.append(doc.Table(["what would help", "in the fullest phase", "cost"], told))
        lines.append(doc.line(f"  this fits: {made.advice}" if made.advice else "  no setting makes it fit: more GPUs"))
    return tuple(lines)


# --- over time ----------------------------------------------------------------------------------

LANE = 60
"""Width of a worker's lane in the text form, in characters."""
WORKERS = 64
"""Workers in the picture; a saved trace has all."""
METHODS = 12
"""Method names in the picture's key."""
FINE = 2000
"""Bars of one method less than this fraction of the whole apart are drawn as one bar."""
Span = tuple[str, float, float]
"""(name, began, ended), in seconds since the first call."""
_FAILED, _STAGE, _ANSWERED = "#c8553d", "#9aa3ad", "#4c9f70"


def timeline(made: Timeline) -> doc.Part:
    """The view of a `Timeline`: a lane of calls for each worker, with seconds per method, and one for each sampler's requests,
    with their waits; in HTML a picture."""
    if not len(made) and not made.requests:
        return doc.line(doc.bold("Timeline: nothing has run"))
    whole, lanes, stages = _times(made)
    asked = _asked(made)
    width = max(len(name) for name in (*lanes, *asked))
    drawn = [(name, _lane(spans, whole), _totals(spans)) for name, spans in lanes.items()]
    drawn += [(name, _levels(found, made.start, whole), _waits(found)) for name, found in asked.items()]
    lines = [f"  {name.ljust(width)} │{lane}│ {said}" for name, lane, said in drawn]
    lines += [f"  stages: {_totals(span for spans in stages.values() for span in spans)}"] if stages else []
    counts = [doc.counted(len(made), "call")] if len(made) or not made.requests else []
    counts += [doc.counted(len(made.requests), "request")] if made.requests else []
    counts += [f"{made.left_out} older requests are left out"] if made.left_out else []
    title = f"Timeline: {', '.join(counts)} in {whole:.2f} s; .save(path) writes a Chrome trace"
    return doc.line(doc.bold(title)), doc.Either(lines, doc.Image(lambda: png(timeline_figure(made)), title))


def _lane(spans: Iterable[Span], whole: float) -> str:
    return "".join("█" if count else " " for count in _counts(((a, b) for _, a, b in spans), whole))


def _counts(spans: Iterable[tuple[float, float]], whole: float) -> list[int]:
    """How many of the (began, ended) are open at each of `LANE` moments."""
    counts = [0] * LANE
    for began, ended in spans:
        first = min(int(began / whole * LANE), LANE - 1)
        for place in range(first, min(max(int(ended / whole * LANE), first + 1), LANE)):
            counts[place] += 1
    return counts


def _totals(spans: Iterable[Span]) -> str:
    totals: dict[str, float] = defaultdict(float)
    for name, began, ended in spans:
        totals[name] += ended - began
    return ", ".join(f"{name} {seconds:.2f} s" for name, seconds in totals.items())


_LEVELS = " ▁▂▃▄▅▆▇█"


def _asked(made: Timeline) -> dict[str, list[Asked]]:
    """`requests to <sampler>` → its requests."""
    found: dict[str, list[Asked]] = defaultdict(list)
    for one in made.requests:
        found[f"requests to {one.queue}"].append(one)
    return found


def _levels(requests: Sequence[Asked], start: float, whole: float) -> str:
    """How many requests are open at each of `LANE` moments, as blocks of that height."""
    counts = _counts(((one.asked - start, (one.ended or start) - start) for one in requests), whole)
    return "".join(_LEVELS[-(-8 * count // max(*counts, 1))] for count in counts)


def _waits(requests: Sequence[Asked]) -> str:
    """Medians of the parts of a request's time that its sampler says, in words."""
    parts = {
        "waits": [one.began - one.asked for one in requests if one.began is not None],
        "first token": [one.first - one.asked for one in requests if one.first is not None],
        "answer": [one.ended - one.asked for one in requests if one.ended is not None and one.outcome == "done"],
    }
    said = [f"{name} {median(times):.2f} s" for name, times in parts.items() if times]
    failed = sum(one.outcome != "done" for one in requests)
    tokens = f"{sum(one.tokens for one in requests):,} tokens"
    return ", ".join([*said, tokens, *([f"{failed} failed"] if failed else [])])


def _times(made: Timeline) -> tuple[float, dict[str, list[Span]], dict[str, list[Span]]]:
    """(seconds of the whole, worker → its calls, stage → its times)."""
    start = made.start
    lanes: dict[tuple[str, int], list[Span]] = defaultdict(list)
    stages: dict[str, list[Span]] = defaultdict(list)
    for one in made.events:
        name = one.name if one.outcome == "done" else f"{one.name} ({one.outcome})"
        lanes[one.group, one.rank].append((name, one.began - start, one.ended - start))
    for stage, began, ended in made.stages():
        stages[stage].append((stage, began - start, ended - start))
    ends = [*(one.ended for one in made.events), *(one.ended or 0.0 for one in made.requests)]
    return (
        max(max(ends, default=0.0) - start, 1e-9),
        {f"{group} {rank}": lanes[group, rank] for group, rank in sorted(lanes)},
        stages,
    )


def timeline_figure(made: Timeline) -> Figure:
    """A figure of worker calls over time: a row per stage, then per worker; colours are methods, red edges failed calls."""
    from matplotlib.patches import Patch

    whole, lanes, stages = _times(made)
    kept = dict(list(lanes.items())[:WORKERS])
    methods = list(dict.fromkeys(one.name for one in made.events))
    colours = {name: colour(place) for place, name in enumerate(methods)}
    asked = _asked(made)
    rows = [*stages, *kept, *asked]
    figure = cell_figure(10.5, 0.27 * max(len(rows), 2) + 1.0, layout="constrained")
    axes = figure.subplots()
    above = dict.fromkeys(stages, _STAGE)
    for place, spans in enumerate([*stages.values(), *kept.values()]):
        _bars(axes, place, _merged(spans, whole), above if place < len(stages) else colours)
    for place, requests in enumerate(asked.values(), len(stages) + len(kept)):
        _concurrency(axes, place, requests, made.start)
    if stages:
        axes.axhline(len(stages) - 0.5, color="#666666", linewidth=0.8)
    _rows(axes, rows)
    axes.set_xlim(0, whole)
    more = f"; {len(lanes) - WORKERS} more workers are left out" if len(lanes) > WORKERS else ""
    axes.set_xlabel(f"seconds since the first call{more}", fontsize=8)
    names = methods[:METHODS]
    patches = [Patch(facecolor=colours[name]) for name in names]
    words = [label(name, 30) for name in names]
    if asked:
        patches += [Patch(facecolor=_STAGE), Patch(facecolor=_ANSWERED)]
        words += ["requests that wait", "requests answered"]
    legend(figure, patches, words, loc="outside upper center", ncols=6, fontsize=8, frameon=False)
    return figure


def _rows(axes: Axes, names: Sequence[str]) -> None:
    """A row for each name, the first on top."""
    axes.set_yticks(range(len(names)), [label(name, 30) for name in names], fontsize=8, parse_math=False)
    axes.set_ylim(max(len(names), 1) - 0.5, -0.5)
    axes.set_axisbelow(True)
    bare(axes, grid="x")


def _concurrency(axes: Axes, row: int, requests: Sequence[Asked], start: float) -> None:
    """How many requests are open over time, as a filled step of at most one row's height, those that still wait above."""
    changes: list[tuple[float, int, int]] = []
    for one in requests:
        begun = one.asked if one.began is None else one.began
        marks = ((one.asked, 1, 1), (begun, 0, -1), (one.ended or one.asked, -1, 0))
        changes += [(when - start, total, wait) for when, total, wait in marks]
    changes.sort()
    times = [when for when, _, _ in changes]
    total, wait = list(accumulate(one for _, one, _ in changes)), list(accumulate(one for _, _, one in changes))
    high = 0.76 / max(*total, 1)
    base = row + 0.38
    answered = [base - high * (all_ - waits) for all_, waits in zip(total, wait, strict=True)]
    axes.fill_between(times, answered, base, step="post", color=_ANSWERED, linewidth=0)
    axes.fill_between(times, [base - high * one for one in total], answered, step="post", color=_STAGE, linewidth=0)


def _bars(axes: Axes, row: int, spans: Sequence[Span], colours: dict[str, str]) -> None:
    known = [colours.get(name) or colours.get(name.rsplit(" (", 1)[0], _STAGE) for name, _, _ in spans]
    edges = ["none" if name in colours else _FAILED for name, _, _ in spans]
    pieces = [(began, max(ended - began, 0.0)) for _, began, ended in spans]
    axes.broken_barh(pieces, (row - 0.38, 0.76), facecolors=known, edgecolors=edges, linewidths=1.4)


def _merged(spans: Sequence[Span], whole: float) -> list[Span]:
    """Join bars that the eye could not tell apart."""
    found: list[Span] = []
    for name, began, ended in spans:
        if found and found[-1][0] == name and began - found[-1][2] < whole / FINE:
            found[-1] = (name, found[-1][1], max(found[-1][2], ended))
        else:
            found.append((name, began, max(ended, began + whole / FINE)))
    return found


# --- what layouts would give ----------------------------------------------------------------------

STEPS = 4
"""Steps in the chart of a simulation."""
REPLICAS = 3
"""Samplers in the chart; the table has the mean of all."""


def simulation(made: Simulation) -> doc.Part:
    """The view of a `Simulation`: a row for each layout, and what its parts do in the first steps."""
    rows = [[str(one["layout"]), *map(_cell, list(one.items())[1:])] for one in made.table()]
    header = [*(name for name in made.table()[0] if name != "layout")]
    lines: list[str] = []
    for one in made.results:
        lanes, whole = _lanes(one)
        width = max(map(len, lanes))
        lines += [f"  {one.layout.title}, the first {whole:.3g} s"]
        lines += [f"    {name.ljust(width)} │{_lane(spans, whole)}│" for name, spans in lanes.items()]
    title = f"Simulation of {made.steps} steps, the same rows in each layout"
    return (
        doc.line(doc.bold(title)),
        doc.Table(["layout", *header], rows),
        doc.Either(lines, doc.Image(lambda: png(simulation_figure(made)), title)),
        [doc.line(doc.faint(note)) for note in made.rates.notes],
    )


def _cell(pair: tuple[str, float | None]) -> doc.Part:
    name, value = pair
    if name in ("samplers", "slots", "learner", "rewards"):
        return "–" if value is None else doc.bar(value, f"{value:.0%}")
    return doc.number(value, ".3g" if name != "tokens/s" else ",.0f")


def _lanes(one: Simulated) -> tuple[dict[str, list[Span]], float]:
    """(lane → its stretches of the first steps, the seconds of these)."""
    learnt = one.spans.get("learner", [])
    whole = max(learnt[min(STEPS, len(learnt)) - 1][2] if learnt else one.whole, 1e-9)
    kept = {name: spans for name, spans in one.spans.items() if spans and _drawn(name)}
    lanes = {name: [(what, a, min(b, whole)) for what, a, b in spans if a < whole] for name, spans in kept.items()}
    return lanes, whole


def _drawn(lane: str) -> bool:
    kind, _, number = lane.partition(" ")
    return kind != "sampler" or int(number) < REPLICAS


def simulation_figure(made: Simulation) -> Figure:
    """A figure with a chart for each layout on one axis of time: samplers, rewards, learner and pushes in the first steps."""
    found = [(one, *_lanes(one)) for one in made.results]
    rows = sum(len(lanes) + 1.6 for _, lanes, _ in found)
    figure = cell_figure(10.5, 0.27 * rows + 0.6, layout="constrained")
    heights = [len(lanes) + 0.5 for _, lanes, _ in found]
    charts = figure.subplots(len(found), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    colours = {"samples": colour(0), "scores": colour(2), "learner": colour(1), "push": _STAGE}
    for axes, (one, lanes, _) in zip(charts, found, strict=True):
        for row, (name, spans) in enumerate(lanes.items()):
            key = name if name in colours else "scores" if name == "rewards" else "samples"
            _bars(axes, row, [(key, began, ended) for _, began, ended in spans], colours)
        _rows(axes, list(lanes))
        title = label(f"{one.layout.title}: {one.seconds:.3g} s a step", 90)
        axes.set_title(title, fontsize=9, loc="left", parse_math=False)
    charts[-1].set_xlim(0, max(whole for _, _, whole in found))
    charts[-1].set_xlabel(f"seconds; the first {STEPS} steps", fontsize=8)
    return figure
