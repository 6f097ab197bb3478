"""Clusters, plans, worker groups, logs, memory estimates and the calls of workers over time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import cycle, groupby
from statistics import median
from typing import TYPE_CHECKING

from workbench.base.activity import QueuedRequest
from workbench.base.memory import gib
from workbench.views import document as doc
from workbench.views.curves import colour

if TYPE_CHECKING:
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
_BOX = "display:inline-block;margin:2px;padding:3px 8px;border-radius:4px;background:rgba("


def plan(plan: Plan) -> doc.Part:
    """Build the display of a `Plan`: for each node what is free and the processes placed on it, coloured by pool in HTML."""
    each = f"{plan.cpus:g} CPUs" + (f" and {plan.gpus:g} GPUs" if plan.gpus else "")
    title = f"Plan: {len(plan.seats)} processes with {each} each on {len(plan.nodes)} nodes; nothing has started"
    colours = dict(zip(plan.spec, cycle(_COLOURS), strict=False))
    roles = {name: f" ({', '.join(tasks)})" for name, tasks in plan.roles.items()}
    labels, rows = _labels(plan.nodes), list[list[doc.Part]]()
    for node in plan.nodes:
        free = f"{node.free_cpus:g} of {node.cpus:g} CPUs, {node.free_gpus:g} of {node.gpus:g} GPUs"
        ranks = {name: [seat.rank for seat in plan.of(name) if seat.node == node.id] for name in colours}
        words, boxes = list[str](), list[doc.Part]()
        for name, seated in ranks.items():
            words += [f"{name}: rank {', '.join(map(str, seated))}{roles.get(name, '')}"] if seated else []
            style = f"{_BOX}{colours[name]},0.3)"
            boxes += [doc.Span(f"{name} {rank}", style, title=f"{name}{roles.get(name, '')}") for rank in seated]
        rows.append([doc.bold(labels[node.id]), free, doc.Either("; ".join(words) or "nobody", boxes or "nobody")])
    tasks = doc.Either(page=[doc.line(name, words) for name, words in roles.items()])
    return doc.line(doc.bold(title)), doc.Table(["node", "free", "processes"], rows, most=len(rows)), tasks


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
        doc.filled(_NODES, _nodes(status.nodes)),
        [(doc.Either("", doc.BREAK), doc.filled(header, rows)) for header, rows in tables if rows],
        [doc.Either(f"  note: {note}", note) for note in status.notes],
    )


def _nodes(nodes: Sequence[Node]) -> list[list[doc.Part]]:
    labels, rows = _labels(nodes), list[list[doc.Part]]()
    for node in nodes:
        free: list[doc.Part] = [
            doc.bar((total - left) / total, f"{left:g} of {total:g}") if total else "–"
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

LANE, PIECES = 60, 160
"""Moments at which a lane is drawn: characters in a terminal, pieces on a page."""
MOST = 64
"""Most lanes of a timeline that are shown; a saved trace has all."""
Span = tuple[str, float, float]
"""(what, began, ended), in seconds since the first call."""


def lanes(lanes: Mapping[str, Sequence[Span]], whole: float, notes: Mapping[str, str] | None = None) -> doc.Table:
    """Draw what happened in lanes of one axis of time, 0 to `whole` seconds, each with its seconds by name or its note.

    How much of a lane happens at once is a height in a terminal; on a page it is the strength of the colour, which is that
    of what began last. What has no colour of its own has failed.
    """
    names = dict.fromkeys(name for spans in lanes.values() for name, _, _ in spans if not name.endswith(_FAILED))
    rows, shades = list[list[doc.Part]](), {name: _rgb(place) for place, name in enumerate(names)}
    for lane, spans in lanes.items():
        moments, most = _at_once(spans, whole, LANE)
        drawn = doc.Either(f"│{doc.heights(list(map(len, moments)), most)}│", _strip(spans, whole, shades))
        seconds: dict[str, float] = defaultdict(float)
        for name, began, ended in spans:
            seconds[name] += ended - began
        each = list[doc.Part]()
        for name, total in seconds.items():
            swatch = doc.Either(page=doc.Span("■ ", f"color:rgb({shades.get(name, doc.DOWN)})"))
            each += [swatch, f"{doc.cut(name, 60)} {total:.2f} s  "]
        rows.append([doc.cut(lane, 60), drawn, (notes or {}).get(lane) or each])
    return doc.Table(["", f"0 to {doc.number(whole)} s", ""], rows, most=MOST)


def _rgb(place: int) -> str:
    return ",".join(map(str, bytes.fromhex(colour(place)[1:])))


def _at_once(spans: Iterable[Span], whole: float, pieces: int) -> tuple[list[list[str]], int]:
    """Return what is under way at each of evenly spaced moments, [pieces], and the most at one moment."""
    moments: list[list[str]] = [[] for _ in range(pieces)]
    for name, began, ended in spans:
        first = min(int(began / whole * pieces), pieces - 1)
        for moment in moments[first : max(int(ended / whole * pieces), first + 1)]:
            moment.append(name)
    return moments, max(map(len, moments)) or 1


def _strip(spans: Iterable[Span], whole: float, shades: Mapping[str, str]) -> doc.Span:
    moments, most = _at_once(spans, whole, PIECES)
    pieces = [f"rgba({shades.get(m[-1], doc.DOWN)},{len(m) / most:.2g})" if m else "transparent" for m in moments]
    stops, place = list[str](), 0
    for paint, run in groupby(pieces):
        first, place = place, place + len(list(run))
        stops.append(f"{paint} {100 * first / PIECES:.4g}% {100 * place / PIECES:.4g}%")
    return doc.Span(
        "", f"display:block;width:480px;max-width:50vw;height:12px;background:linear-gradient(90deg,{','.join(stops)})"
    )


_FAILED = ("(raised)", "(lost)", "(late)")
"""How the names of calls end that did not end well."""


def timeline(timeline: Timeline) -> doc.Part:
    """Build the display of a `Timeline`: a lane for each stage, for each sampler's requests with their waits, and for each
    worker's calls.
    """
    if not len(timeline) and not timeline.requests:
        return doc.line(doc.bold("Timeline: nothing has run"))
    start, drawn, queues = (
        timeline.start,
        defaultdict[str, list[Span]](list),
        defaultdict[str, list[QueuedRequest]](list),
    )
    for stage, began, ended in timeline.stages():
        drawn[f"stage {stage}"].append((stage, began - start, ended - start))
    for asked in timeline.requests:
        queues[f"requests to {asked.queue}"].append(asked)
        drawn[f"requests to {asked.queue}"].append(("request", asked.asked - start, (asked.ended or start) - start))
        if asked.began is not None:
            drawn[f"waiting for {asked.queue}"].append(("waiting", asked.asked - start, asked.began - start))
    for call in sorted(timeline.events, key=lambda event: (event.group, event.rank)):
        name = call.name if call.outcome == "done" else f"{call.name} ({call.outcome})"
        drawn[f"{call.group} {call.rank}"].append((name, call.began - start, call.ended - start))
    whole = max(1e-9, *(ended for spans in drawn.values() for _, _, ended in spans))
    counts = [doc.counted(len(timeline), "call")] if len(timeline) or not timeline.requests else []
    counts += [doc.counted(len(timeline.requests), "request")] if timeline.requests else []
    counts += [f"{timeline.left_out} older requests are left out"] if timeline.left_out else []
    title = f"Timeline: {', '.join(counts)} in {whole:.2f} s; .save(path) writes a Chrome trace"
    return doc.line(doc.bold(title)), lanes(drawn, whole, {name: _waits(one) for name, one in queues.items()})


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


# --- what layouts would give ----------------------------------------------------------------------

STEPS = 4
"""Steps in the chart of a simulation."""
REPLICAS = 3
"""Samplers in the chart; the table has the mean of all."""


def simulation(simulation: Simulation) -> doc.Part:
    """Build the display of a `Simulation`: a table row for each layout, and what its parts do in the first steps, all on
    one axis of time.
    """
    rows = [[str(row["layout"]), *map(_cell, list(row.items())[1:])] for row in simulation.table()]
    header = [*(name for name in simulation.table()[0] if name != "layout")]
    charts = [(result, *_first_steps(result)) for result in simulation.results]
    whole = max(end for _, _, end in charts)
    return (
        doc.line(doc.bold(f"Simulation of {simulation.steps} steps, the same rows in each layout")),
        doc.Table(["layout", *header], rows),
        [(doc.line(doc.bold(result.layout.title)), lanes(drawn, whole)) for result, drawn, _ in charts],
        [doc.line(doc.faint(note)) for note in simulation.rates.notes],
    )


def _cell(pair: tuple[str, float | None]) -> doc.Part:
    name, value = pair
    if name in ("samplers", "slots", "learner", "rewards"):
        return "–" if value is None else doc.bar(value, f"{value:.0%}")
    return doc.number(value, ",.0f" if name == "tokens/s" else "")


def _first_steps(result: Simulated) -> tuple[dict[str, list[Span]], float]:
    """Return (lane → what it does, named by its kind, in the first steps; the seconds that these steps take)."""
    learnt = result.spans.get("learner", [])[:STEPS]
    drawn, end = dict[str, list[Span]](), max(learnt[-1][2] if learnt else result.whole, 1e-9)
    for lane, spans in result.spans.items():
        kind, _, number = lane.partition(" ")
        if spans and (kind != "sampler" or int(number) < REPLICAS):
            drawn[lane] = [(kind, began, min(ended, end)) for _, began, ended in spans if began < end]
    return drawn, end
