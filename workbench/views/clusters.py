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
from workbench.views.curves import bare, cell_figure, colour, label, legend, png

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from workbench.base.activity import QueuedRequest
    from workbench.cluster.fitting import Fit
    from workbench.cluster.pools import Node, Plan
    from workbench.cluster.ranks import RayRanks
    from workbench.cluster.session import Cluster
    from workbench.cluster.simulating import Simulated, Simulation
    from workbench.cluster.status import ClusterStatus, Logs, Profile
    from workbench.cluster.timeline import Timeline


def _labels(nodes: Sequence[Node]) -> dict[str, str]:
    """Map each node's id to its host name, with the end of the id where several nodes have the same host name."""
    hosts = [node.host for node in nodes]
    return {node.id: node.host if hosts.count(node.host) == 1 else f"{node.host}/{node.id[-6:]}" for node in nodes}


def cluster(cluster: Cluster) -> doc.Part:
    """Build the display of a `Cluster`: its title, this session's pools and groups of workers, notes."""
    known = cluster.environment.variables or cluster.environment.ray
    pairs = [("environment", repr(cluster.environment))] if known else []
    pairs += [("pool", repr(pool)) for pool in cluster.pools.values()]
    pairs += [("group", f"{group.name}: {group.size} workers") for group in cluster.groups]
    pairs += [("note", note) for note in cluster.notes]
    doors = "status(), plan(…), fits(…), hold(…), ranks(…), timeline, close()"
    pairs.append(("state", "closed") if cluster.closed else ("go on", doors))
    return doc.line(doc.bold(f"Cluster: {cluster.title}")), doc.pairs(pairs)


# --- plans ----------------------------------------------------------------------------

_COLOURS = ("56,139,253", "46,160,67", "210,153,34", "163,113,247", "207,80,60", "57,197,207")
_FRAME = "display:inline-block;vertical-align:top;margin:4px;padding:4px 8px;border:1px solid rgba(128,128,128,0.5);border-radius:6px"
_BOX = "display:inline-block;margin:2px;padding:3px 8px;border-radius:4px"


def plan(plan: Plan) -> doc.Part:
    """Build the display of a `Plan`: a frame for each node with the processes placed on it, coloured by pool in HTML."""
    each = f"{plan.cpus:g} CPUs" + (f" and {plan.gpus:g} GPUs" if plan.gpus else "")
    title = f"Plan: {len(plan.seats)} processes with {each} each on {len(plan.nodes)} nodes; nothing has started"
    styles = {name: f"{_BOX};background:rgba({rgb},0.3)" for name, rgb in zip(plan.spec, cycle(_COLOURS), strict=False)}
    labels, lines, frames = _labels(plan.nodes), [], []
    for node in plan.nodes:
        has = f"{node.free_cpus:g} of {node.cpus:g} CPUs, {node.free_gpus:g} of {node.gpus:g} GPUs free"
        ranks = {name: [str(seat.rank) for seat in plan.of(name) if seat.node == node.id] for name in plan.spec}
        seats = [_seat(plan, name, ", ".join(seated)) for name, seated in ranks.items() if seated]
        lines += _boxed(f" {labels[node.id]} ({has}) ", seats or ["nobody"])
        boxes = [
            doc.line(f"{name} {rank}", style=styles[name], title=_seat(plan, name, rank))
            for name, seated in ranks.items()
            for rank in seated
        ]
        head = doc.bold(labels[node.id]), doc.BREAK, doc.small(has), doc.BREAK
        frames.append(doc.line(head, boxes or "nobody", style=_FRAME))
    roles = [f"{name}: {', '.join(tasks)}" for name, tasks in plan.roles.items()]
    return doc.line(doc.bold(title)), doc.Either(lines, (doc.line(frames), roles))


def _seat(plan: Plan, name: str, ranks: str) -> str:
    roles = ", ".join(plan.roles.get(name, ()))
    return f"{name}: rank {ranks}{f' ({roles})' if roles else ''}"


def _boxed(head: str, inside: Sequence[str]) -> list[str]:
    width = max(len(head), *(len(one) + 2 for one in inside))
    framed = (f"  │ {one.ljust(width - 1)}│" for one in inside)
    return [f"  ┌{head.ljust(width, '─')}┐", *framed, f"  └{'─' * width}┘"]


# --- the state of a cluster ------------------------------------------------------------------------------

_NODES = ("node", "address", "state", "CPUs free", "GPUs free", "memory", "object store used")
_WORKERS = ("group", "rank", "pid", "host", "pool", "GPUs", "memory", "GPU memory", "doing", "for", "waiting")


def status(status: ClusterStatus) -> doc.Part:
    """Build the display of a cluster's `ClusterStatus`: tables of nodes, pools, workers and running calls; usage is bars in
    HTML.
    """
    at = f", {datetime.fromtimestamp(status.at, UTC):%Y-%m-%d %H:%M:%S} UTC" if status.at else ""
    pools = [[name, str(size), where] for name, size, where in status.pools]
    calls = [[one.method, one.group, one.stage or "–", f"{one.seconds:.0f} s"] for one in status.calls]
    tables: list[tuple[Sequence[str], Sequence[Sequence[doc.Part]]]] = [
        (("pool", "processes", "where"), pools),
        (_WORKERS, _workers(status)),
        (("call out", "of", "for stage", "since"), calls),
    ]
    return (
        doc.line(doc.bold(f"Cluster: {status.title}{at}")),
        doc.Table(_NODES, _nodes(status.nodes)),
        [(doc.Either(""), doc.Table(header, rows)) for header, rows in tables if rows],
        [doc.Either(f"  note: {note}", note) for note in status.notes],
    )


def _nodes(nodes: Sequence[Node]) -> list[list[doc.Part]]:
    labels, rows = _labels(nodes), list[list[doc.Part]]()
    for node in nodes:
        free: list[doc.Part] = [
            doc.bar((total - left) / total, f"{left:g} of {total:g}") if total else doc.Either(f"{left:g} of 0", "–")
            for left, total in ((node.free_cpus, node.cpus), (node.free_gpus, node.gpus))
        ]
        state, store = "alive" if node.alive else "dead", _used(node.store_used, node.store, 0.8)
        rows.append([labels[node.id], node.address, state, *free, gib(node.memory), store])
    return rows


def _used(used: int, total: int, most: float) -> doc.Part:
    """Return a bar of the bytes in use, red where they are more than the share `most` of the whole."""
    text = f"{gib(used)} of {gib(total)}"
    return doc.bar(used / total, text, used < most * total) if total else text


def _workers(status: ClusterStatus) -> list[list[doc.Part]]:
    rows: list[list[doc.Part]] = []
    for line in status.workers:
        gpu = _used(*line.gpu, 0.95) if line.gpu is not None else "–"
        resident = gib(line.resident) if line.resident is not None else "–"
        doing = line.state if line.state == "idle" else doc.bold(line.state)
        since = f"{line.seconds:.0f} s" if line.seconds is not None else "–"
        where = [line.host, line.pool or "–", line.gpus or "–"]
        rows.append([line.group, str(line.rank), str(line.pid), *where, resident, gpu, doing, since, str(line.waiting)])
    return rows


def logs(logs: Logs) -> doc.Part:
    """Build the display of `Logs`: each worker's lines under its name; in HTML folded, unless there is only one worker."""
    lines = [[f"--- {where}", *(text.splitlines() or ["(no output)"])] for where, text in logs.parts]
    alone = len(logs.parts) == 1
    folds = [doc.Fold(f"{where}: {len(text.splitlines())} lines", doc.block(text), alone) for where, text in logs.parts]
    return doc.Either(lines, folds)


def profile(profile: Profile) -> doc.Part:
    """Build the display of a `Profile`: the trace files that the profiler wrote, one per line."""
    when = f"of steps {', '.join(map(str, sorted(profile.steps)))}" if profile.steps else "of a block"
    return doc.line(doc.bold(f"Profile {when}, {len(profile.files)} traces")), [str(file) for file in profile.files]


def group(workers: RayRanks) -> doc.Part:
    """Build the display of a group of Ray workers: its state, and for each worker rank, pid, host and GPUs."""
    pool = f" on pool {workers.pool.name!r}" if workers.pool is not None else ""
    title = f"Group {workers.name!r}: {workers.size} workers{pool}, {', '.join(workers.out) or 'idle'}"
    if workers.closed is not None:
        title = f"Group {workers.name!r} of {workers.size} workers, closed: {workers.closed}"
    rows = [[str(rank), str(one["pid"]), one["host"], one["gpus"] or "–"] for rank, one in enumerate(workers.facts)]
    return doc.line(doc.bold(title)), doc.Table(["rank", "pid", "host", "GPUs"], rows)


def fit(fit: Fit) -> doc.Part:
    """Build the display of a `Fit`: whether a placement fits in memory, the bytes of each phase, role and kind, and
    what would help.
    """
    rows, verdict = list[list[doc.Part]](), "fits" if fit.fits else "does not fit"
    where, room = fit.placement, max(fit.available, 1)
    for phase in fit.phases:
        rows += [
            [phase.name, part.role, part.what, doc.bar(part.size / room, gib(part.size), fit.fits)]
            for part in phase.parts
            if part.size
        ]
        rows.append([phase.name, "together", "", gib(phase.size)])
    title = f"{fit.name} {verdict}: {gib(fit.needed)} of {gib(fit.available)} ({fit.source}) per process, in its largest phase"
    how = f"  {fit.parameters:,} parameters, learner " + (
        "in one process" if where.alone else f"over {where.ranks} ranks"
    )
    if fit.cached is not None:
        sequences = fit.cached // fit.asked["tokens"]
        how += f"; a sampler's KV cache holds {fit.cached:,} tokens, {sequences} sequences of {fit.asked['tokens']:,}"
    lines: list[doc.Part] = [
        doc.line(doc.bold(title)),
        doc.line(how),
        doc.Table(["phase", "role", "part", "bytes per process"], rows),
    ]
    if not fit:
        rated = [[one.name, f"{'−' if one.saved >= 0 else '+'}{gib(abs(one.saved))}", one.cost] for one in fit.choices]
        lines.append(doc.Table(["setting", "memory in the largest phase", "cost"], rated))
        lines.append(doc.line(f"  this fits: {fit.advice}" if fit.advice else "  no setting makes it fit: add GPUs"))
    return tuple(lines)


# --- over time ----------------------------------------------------------------------------------

LANE = 60
"""Width of a worker's lane in the text of a timeline, in characters."""
WORKERS = 64
"""Most workers that the picture shows; a saved trace has all."""
METHODS = 12
"""Most method names in the picture's legend."""
FINE = 2000
"""Bars of one method less than this fraction of the whole apart are drawn as one bar."""
Span = tuple[str, float, float]
"""(name, began, ended), in seconds since the first call."""
_FAILED, _STAGE, _ANSWERED = "#c8553d", "#9aa3ad", "#4c9f70"


def timeline(timeline: Timeline) -> doc.Part:
    """Build the display of a `Timeline`: for each worker a lane of its calls with seconds per method, and for each
    sampler a lane of its requests with their waits; in HTML a picture.
    """
    if not len(timeline) and not timeline.requests:
        return doc.line(doc.bold("Timeline: nothing has run"))
    whole, lanes, stages = _times(timeline)
    requests = _by_sampler(timeline)
    width = max(len(name) for name in (*lanes, *requests))
    drawn = [(name, _lane(spans, whole), _totals(spans)) for name, spans in lanes.items()]
    drawn += [(name, _levels(found, timeline.start, whole), _waits(found)) for name, found in requests.items()]
    lines = [f"  {name.ljust(width)} │{lane}│ {totals}" for name, lane, totals in drawn]
    lines += [f"  stages: {_totals(span for spans in stages.values() for span in spans)}"] if stages else []
    counts = [doc.counted(len(timeline), "call")] if len(timeline) or not timeline.requests else []
    counts += [doc.counted(len(timeline.requests), "request")] if timeline.requests else []
    counts += [f"{timeline.left_out} older requests are left out"] if timeline.left_out else []
    title = f"Timeline: {', '.join(counts)} in {whole:.2f} s; .save(path) writes a Chrome trace"
    return doc.line(doc.bold(title)), doc.Either(lines, doc.Image(lambda: png(timeline_figure(timeline)), title))


def _lane(spans: Iterable[Span], whole: float) -> str:
    return "".join("█" if count else " " for count in _counts(((a, b) for _, a, b in spans), whole))


def _counts(spans: Iterable[tuple[float, float]], whole: float) -> list[int]:
    """Count how many of the (began, ended) intervals are open at each of `LANE` evenly spaced moments."""
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


def _by_sampler(timeline: Timeline) -> dict[str, list[QueuedRequest]]:
    """Group a timeline's requests by sampler: `requests to <sampler>` → its requests."""
    queues: dict[str, list[QueuedRequest]] = defaultdict(list)
    for one in timeline.requests:
        queues[f"requests to {one.queue}"].append(one)
    return queues


def _levels(requests: Sequence[QueuedRequest], start: float, whole: float) -> str:
    """Draw how many requests are open at each of `LANE` moments, as blocks of that height."""
    counts = _counts(((one.asked - start, (one.ended or start) - start) for one in requests), whole)
    return "".join(_LEVELS[-(-8 * count // max(*counts, 1))] for count in counts)


def _waits(requests: Sequence[QueuedRequest]) -> str:
    """Describe the medians of the parts of a request's time, as far as the sampler reports them: waiting, first token,
    answer.
    """
    parts = {
        "waits": [r.began - r.asked for r in requests if r.began is not None],
        "first token": [r.first - r.asked for r in requests if r.first is not None],
        "answer": [r.ended - r.asked for r in requests if r.ended is not None and r.outcome == "done"],
    }
    words = [f"{name} {median(times):.2f} s" for name, times in parts.items() if times]
    failed = sum(request.outcome != "done" for request in requests)
    tokens = f"{sum(request.tokens for request in requests):,} tokens"
    return ", ".join([*words, tokens, *([f"{failed} failed"] if failed else [])])


def _times(timeline: Timeline) -> tuple[float, dict[str, list[Span]], dict[str, list[Span]]]:
    """Return (seconds of the whole timeline, worker → its calls, stage → its times)."""
    start = timeline.start
    lanes: dict[tuple[str, int], list[Span]] = defaultdict(list)
    stages: dict[str, list[Span]] = defaultdict(list)
    for call in timeline.events:
        name = call.name if call.outcome == "done" else f"{call.name} ({call.outcome})"
        lanes[call.group, call.rank].append((name, call.began - start, call.ended - start))
    for stage, began, ended in timeline.stages():
        stages[stage].append((stage, began - start, ended - start))
    ends = [*(end.ended for end in timeline.events), *(end.ended or 0.0 for end in timeline.requests)]
    return (
        max(max(ends, default=0.0) - start, 1e-9),
        {f"{group} {rank}": lanes[group, rank] for group, rank in sorted(lanes)},
        stages,
    )


def timeline_figure(timeline: Timeline) -> Figure:
    """Draw a timeline as a figure: a row per stage, then one per worker; colours are methods, red edges failed calls."""
    from matplotlib.patches import Patch

    whole, lanes, stages = _times(timeline)
    kept = dict(list(lanes.items())[:WORKERS])
    methods = list(dict.fromkeys(one.name for one in timeline.events))
    colours = {name: colour(place) for place, name in enumerate(methods)}
    queues = _by_sampler(timeline)
    rows = [*stages, *kept, *queues]
    figure = cell_figure(10.5, 0.27 * max(len(rows), 2) + 1.0, layout="constrained")
    axes = figure.subplots()
    above = dict.fromkeys(stages, _STAGE)
    for place, spans in enumerate([*stages.values(), *kept.values()]):
        _bars(axes, place, _merged(spans, whole), above if place < len(stages) else colours)
    for place, requests in enumerate(queues.values(), len(stages) + len(kept)):
        _concurrency(axes, place, requests, timeline.start)
    if stages:
        axes.axhline(len(stages) - 0.5, color="#666666", linewidth=0.8)
    _rows(axes, rows)
    axes.set_xlim(0, whole)
    more = f"; {len(lanes) - WORKERS} more workers are left out" if len(lanes) > WORKERS else ""
    axes.set_xlabel(f"seconds since the first call{more}", fontsize=8)
    names = methods[:METHODS]
    patches = [Patch(facecolor=colours[name]) for name in names]
    words = [label(name, 30) for name in names]
    if queues:
        patches += [Patch(facecolor=_STAGE), Patch(facecolor=_ANSWERED)]
        words += ["requests that wait", "requests answered"]
    legend(figure, patches, words, loc="outside upper center", ncols=6, fontsize=8, frameon=False)
    return figure


def _rows(axes: Axes, names: Sequence[str]) -> None:
    """Label a row for each name, the first on top."""
    axes.set_yticks(range(len(names)), [label(name, 30) for name in names], fontsize=8, parse_math=False)
    axes.set_ylim(max(len(names), 1) - 0.5, -0.5)
    axes.set_axisbelow(True)
    bare(axes, grid="x")


def _concurrency(axes: Axes, row: int, requests: Sequence[QueuedRequest], start: float) -> None:
    """Draw the number of open requests over time as a filled step of one row's height, those that still wait on top."""
    changes: list[tuple[float, int, int]] = []
    for request in requests:
        begun = request.asked if request.began is None else request.began
        marks = ((request.asked, 1, 1), (begun, 0, -1), (request.ended or request.asked, -1, 0))
        changes += [(when - start, total, wait) for when, total, wait in marks]
    changes.sort()
    times = [when for when, _, _ in changes]
    total, wait = list(accumulate(count for _, count, _ in changes)), list(accumulate(count for _, _, count in changes))
    high = 0.76 / max(*total, 1)
    base = row + 0.38
    answered = [base - high * (all_ - waits) for all_, waits in zip(total, wait, strict=True)]
    axes.fill_between(times, answered, base, step="post", color=_ANSWERED, linewidth=0)
    axes.fill_between(times, [base - high * level for level in total], answered, step="post", color=_STAGE, linewidth=0)


def _bars(axes: Axes, row: int, spans: Sequence[Span], colours: dict[str, str]) -> None:
    known = [colours.get(name) or colours.get(name.rsplit(" (", 1)[0], _STAGE) for name, _, _ in spans]
    edges = ["none" if name in colours else _FAILED for name, _, _ in spans]
    pieces = [(began, max(ended - began, 0.0)) for _, began, ended in spans]
    axes.broken_barh(pieces, (row - 0.38, 0.76), facecolors=known, edgecolors=edges, linewidths=1.4)


def _merged(spans: Sequence[Span], whole: float) -> list[Span]:
    """Join neighbouring bars that are too close to be seen apart."""
    bars: list[Span] = []
    for name, began, ended in spans:
        if bars and bars[-1][0] == name and began - bars[-1][2] < whole / FINE:
            bars[-1] = (name, bars[-1][1], max(bars[-1][2], ended))
        else:
            bars.append((name, began, max(ended, began + whole / FINE)))
    return bars


# --- what layouts would give ----------------------------------------------------------------------

STEPS = 4
"""Steps in the chart of a simulation."""
REPLICAS = 3
"""Samplers in the chart; the table has the mean of all."""


def simulation(simulation: Simulation) -> doc.Part:
    """Build the display of a `Simulation`: a table row for each layout, and what its parts do in the first steps."""
    rows = [[str(row["layout"]), *map(_cell, list(row.items())[1:])] for row in simulation.table()]
    header = [*(name for name in simulation.table()[0] if name != "layout")]
    lines: list[str] = []
    for result in simulation.results:
        lanes, whole = _lanes(result)
        width = max(map(len, lanes))
        lines += [f"  {result.layout.title}, the first {whole:.3g} s"]
        lines += [f"    {name.ljust(width)} │{_lane(spans, whole)}│" for name, spans in lanes.items()]
    title = f"Simulation of {simulation.steps} steps, the same rows in each layout"
    return (
        doc.line(doc.bold(title)),
        doc.Table(["layout", *header], rows),
        doc.Either(lines, doc.Image(lambda: png(simulation_figure(simulation)), title)),
        [doc.line(doc.faint(note)) for note in simulation.rates.notes],
    )


def _cell(pair: tuple[str, float | None]) -> doc.Part:
    name, value = pair
    if name in ("samplers", "slots", "learner", "rewards"):
        return "–" if value is None else doc.bar(value, f"{value:.0%}")
    return doc.number(value, ".3g" if name != "tokens/s" else ",.0f")


def _lanes(result: Simulated) -> tuple[dict[str, list[Span]], float]:
    """Return (lane → its stretches in the first steps, the seconds that these steps take)."""
    learnt = result.spans.get("learner", [])
    whole = max(learnt[min(STEPS, len(learnt)) - 1][2] if learnt else result.whole, 1e-9)
    kept = {name: spans for name, spans in result.spans.items() if spans and _drawn(name)}
    lanes = {name: [(what, a, min(b, whole)) for what, a, b in spans if a < whole] for name, spans in kept.items()}
    return lanes, whole


def _drawn(lane: str) -> bool:
    kind, _, number = lane.partition(" ")
    return kind != "sampler" or int(number) < REPLICAS


def simulation_figure(simulation: Simulation) -> Figure:
    """Draw a simulation as a figure: for each layout a chart of samplers, rewards, learner and pushes, all on one axis
    of time.
    """
    simulated = [(result, *_lanes(result)) for result in simulation.results]
    rows = sum(len(lanes) + 1.6 for _, lanes, _ in simulated)
    figure = cell_figure(10.5, 0.27 * rows + 0.6, layout="constrained")
    heights = [len(lanes) + 0.5 for _, lanes, _ in simulated]
    charts = figure.subplots(len(simulated), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    colours = {"samples": colour(0), "scores": colour(2), "learner": colour(1), "push": _STAGE}
    for axes, (result, lanes, _) in zip(charts, simulated, strict=True):
        for row, (name, spans) in enumerate(lanes.items()):
            key = name if name in colours else "scores" if name == "rewards" else "samples"
            _bars(axes, row, [(key, began, ended) for _, began, ended in spans], colours)
        _rows(axes, list(lanes))
        title = label(f"{result.layout.title}: {result.seconds:.3g} s a step", 90)
        axes.set_title(title, fontsize=9, loc="left", parse_math=False)
    charts[-1].set_xlim(0, max(whole for _, _, whole in simulated))
    charts[-1].set_xlabel(f"seconds; the first {STEPS} steps", fontsize=8)
    return figure
