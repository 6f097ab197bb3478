"""Clusters, plans, worker groups, logs and memory estimates as text and HTML."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from workbench.engines.memory import gib
from workbench.views.html import bar, escape, fold, pairs_table, table, terminal, text_block

if TYPE_CHECKING:
    from workbench.cluster.fits import Fit
    from workbench.cluster.logs import Logs
    from workbench.cluster.pools import Node, Plan
    from workbench.cluster.profiling import Profile
    from workbench.cluster.ranks import RayRanks
    from workbench.cluster.session import Cluster
    from workbench.cluster.status import CallLine, Status

SHOWN = 200
"""Lines of a table; a note says how many more there are."""


def _lined(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as their widest cell."""
    cells = [tuple(header), *rows[:SHOWN]]
    widths = [max(len(row[place]) for row in cells) for place in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    return [f"  {line}" for line in lines] + ([f"  … {len(rows) - SHOWN} more"] if len(rows) > SHOWN else [])


def _tabled(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    more = f"<div>… {len(rows) - SHOWN} more</div>" if len(rows) > SHOWN else ""
    return table(header, [[escape(cell, 2000) for cell in row] for row in rows[:SHOWN]]) + more


def _title(text: str) -> str:
    return f"<div><b>{escape(text)}</b></div>"


def _labels(nodes: Sequence[Node]) -> dict[str, str]:
    """Node id → its host, with the id's end where two nodes share one."""
    hosts = [node.host for node in nodes]
    return {node.id: node.host if hosts.count(node.host) == 1 else f"{node.host}/{node.id[-6:]}" for node in nodes}


# --- sessions -------------------------------------------------------------------------------


def _pairs(cluster: Cluster) -> list[tuple[str, str]]:
    pairs = (
        [("environment", repr(cluster.environment))] if cluster.environment.variables or cluster.environment.ray else []
    )
    pairs += [("pool", repr(pool)) for pool in cluster.pools.values()]
    pairs += [("group", f"{group.name}: {group.size} workers") for group in cluster.groups]
    pairs += [("note", note) for note in cluster.notes]
    end = "closed" if cluster.closed else "status(), plan(…), fits(…), hold(…), ranks(…), timeline, close()"
    return [*pairs, ("go on" if not cluster.closed else "state", end)]


def cluster_text(cluster: Cluster) -> str:
    """Where it is, what this session has on it, notes."""
    return terminal([f"Cluster: {cluster.title}", *(f"  {what}: {value}" for what, value in _pairs(cluster))])


def cluster_html(cluster: Cluster) -> str:
    """The same as a table."""
    return _title(f"Cluster: {cluster.title}") + pairs_table(_pairs(cluster))


# --- who sits where ----------------------------------------------------------------------------


def _nodes_of(plan: Plan) -> list[tuple[str, str, list[tuple[str, str]]]]:
    """(node, what it has, [(pool, its seats)])."""
    labels, found = _labels(plan.nodes), []
    for node in plan.nodes:
        has = f"{node.free_cpus:g} of {node.cpus:g} CPUs, {node.free_gpus:g} of {node.gpus:g} GPUs free"
        seats = [
            (name, ", ".join(str(seat.rank) for seat in plan.of(name) if seat.node == node.id)) for name in plan.spec
        ]
        found.append((labels[node.id], has, [(name, ranks) for name, ranks in seats if ranks]))
    return found


def _seat(plan: Plan, name: str, ranks: str) -> str:
    roles = ", ".join(plan.roles.get(name, ()))
    return f"{name}: rank {ranks}{f' ({roles})' if roles else ''}"


def _plan_title(plan: Plan) -> str:
    each = f"{plan.cpus:g} CPUs" + (f" and {plan.gpus:g} GPUs" if plan.gpus else "")
    return f"Plan: {len(plan.seats)} processes with {each} each on {len(plan.nodes)} nodes; nothing has started"


def plan_text(plan: Plan) -> str:
    """A box a node, a line a pool in it."""
    lines = [_plan_title(plan)]
    for label, has, seats in _nodes_of(plan):
        inside = [_seat(plan, name, ranks) for name, ranks in seats] or ["nobody"]
        head = f" {label} ({has}) "
        width = max(len(head), *(len(one) + 2 for one in inside))
        lines += [
            f"  ┌{head.ljust(width, '─')}┐",
            *(f"  │ {one.ljust(width - 1)}│" for one in inside),
            f"  └{'─' * width}┘",
        ]
    return terminal(lines)


_COLOURS = ("56,139,253", "46,160,67", "210,153,34", "163,113,247", "207,80,60", "57,197,207")


def plan_html(plan: Plan) -> str:
    """A frame a node, a coloured box a process."""
    colours = {name: _COLOURS[place % len(_COLOURS)] for place, name in enumerate(plan.spec)}
    frames = []
    for label, has, seats in _nodes_of(plan):
        boxes = "".join(
            f'<div style="display:inline-block;margin:2px;padding:3px 8px;border-radius:4px;background:rgba({colours[name]},0.3)" '
            f'title="{escape(_seat(plan, name, rank))}">{escape(name)} {escape(rank)}</div>'
            for name, ranks in seats
            for rank in ranks.split(", ")
        )
        frames.append(
            '<div style="display:inline-block;vertical-align:top;margin:4px;padding:4px 8px;border:1px solid rgba(128,128,128,0.5);'
            f'border-radius:6px"><b>{escape(label)}</b><br><small>{escape(has)}</small><br>{boxes or "nobody"}</div>'
        )
    roles = "".join(f"<div>{escape(name)}: {escape(', '.join(said))}</div>" for name, said in plan.roles.items())
    return f"{_title(_plan_title(plan))}<div>{''.join(frames)}</div>{roles}"


# --- status -------------------------------------------------------------------------------------

_NODES = ("node", "address", "state", "CPUs free", "GPUs free", "memory", "object store used")
_WORKERS = ("group", "rank", "pid", "host", "pool", "GPUs", "memory", "GPU memory", "doing", "for", "waiting")
_CALLS = ("call out", "of", "for stage", "since")


def _node_rows(nodes: Sequence[Node]) -> list[tuple[str, ...]]:
    labels = _labels(nodes)
    return [
        (
            labels[one.id],
            one.address,
            "alive" if one.alive else "dead",
            f"{one.free_cpus:g} of {one.cpus:g}",
            f"{one.free_gpus:g} of {one.gpus:g}",
            gib(one.memory),
            f"{gib(one.store_used)} of {gib(one.store)}",
        )
        for one in nodes
    ]


def _worker_rows(status: Status) -> list[tuple[str, ...]]:
    return [
        (
            one.group,
            str(one.rank),
            str(one.pid),
            one.host,
            one.pool or "–",
            one.gpus or "–",
            gib(one.resident) if one.resident is not None else "–",
            f"{gib(one.gpu[0])} of {gib(one.gpu[1])}" if one.gpu is not None else "–",
            one.state,
            f"{one.seconds:.0f} s" if one.seconds is not None else "–",
            str(one.waiting),
        )
        for one in status.workers
    ]


def _call_rows(calls: Sequence[CallLine]) -> list[tuple[str, ...]]:
    return [(one.method, one.group, one.stage or "–", f"{one.seconds:.0f} s") for one in calls]


def _status_title(status: Status) -> str:
    at = f", {datetime.fromtimestamp(status.at, UTC):%Y-%m-%d %H:%M:%S} UTC" if status.at else ""
    return f"Cluster: {status.title}{at}"


def status_text(status: Status) -> str:
    """Tables of nodes, pools, workers and calls that are out."""
    lines = [_status_title(status), *_lined(_NODES, _node_rows(status.nodes))]
    if status.pools:
        lines += [
            "",
            *_lined(("pool", "processes", "where"), [(name, str(size), where) for name, size, where in status.pools]),
        ]
    if status.workers:
        lines += ["", *_lined(_WORKERS, _worker_rows(status))]
    if status.calls:
        lines += ["", *_lined(_CALLS, _call_rows(status.calls))]
    return terminal([*lines, *(f"  note: {note}" for note in status.notes)])


def status_html(status: Status) -> str:
    """The same as tables, with bars for what is used."""
    rows = []
    for one, cells in zip(status.nodes, _node_rows(status.nodes), strict=True):
        shown = [escape(cell) for cell in cells]
        for place, (free, total) in ((3, (one.free_cpus, one.cpus)), (4, (one.free_gpus, one.gpus))):
            shown[place] = bar((total - free) / total, cells[place]) if total else "–"
        shown[6] = (
            bar(one.store_used / one.store, cells[6], good=one.store_used < 0.8 * one.store) if one.store else "–"
        )
        rows.append(shown)
    parts = [_title(_status_title(status)), table(_NODES, rows)]
    if status.pools:
        parts.append(
            _tabled(("pool", "processes", "where"), [(name, str(size), where) for name, size, where in status.pools])
        )
    if status.workers:
        parts.append(_workers_table(status))
    if status.calls:
        parts.append(_tabled(_CALLS, _call_rows(status.calls)))
    return "".join(parts) + "".join(f"<div>{escape(note)}</div>" for note in status.notes)


def _workers_table(status: Status) -> str:
    rows = []
    for one, cells in zip(status.workers[:SHOWN], _worker_rows(status)[:SHOWN], strict=True):
        shown = [escape(cell, 2000) for cell in cells]
        if one.gpu is not None and one.gpu[1]:
            shown[7] = bar(one.gpu[0] / one.gpu[1], cells[7], good=one.gpu[0] < 0.95 * one.gpu[1])
        if one.state != "idle":
            shown[8] = f"<b>{shown[8]}</b>"
        rows.append(shown)
    more = f"<div>… {len(status.workers) - SHOWN} more</div>" if len(status.workers) > SHOWN else ""
    return table(_WORKERS, rows) + more


# --- logs ---------------------------------------------------------------------------------------


def logs_text(logs: Logs) -> str:
    """Each worker's lines under its name."""
    lines: list[str] = []
    for where, text in logs.parts:
        lines += [f"--- {where}", *(text.splitlines() or ["(it wrote nothing)"])]
    return terminal(lines)


def logs_html(logs: Logs) -> str:
    """A fold a worker, the only one open."""
    return "".join(
        fold(escape(f"{where}: {len(text.splitlines())} lines"), text_block(text), opened=len(logs.parts) == 1)
        for where, text in logs.parts
    )


# --- profiles -----------------------------------------------------------------------------------


def _profile_lines(profile: Profile) -> list[str]:
    when = f"of steps {', '.join(map(str, sorted(profile.steps)))}" if profile.steps else "of a block"
    return [f"Profile {when}, {len(profile.files)} traces", *(str(file) for file in profile.files)]


def profile_text(profile: Profile) -> str:
    """A line a file."""
    return terminal(_profile_lines(profile))


def profile_html(profile: Profile) -> str:
    """The same."""
    title, *files = _profile_lines(profile)
    return _title(title) + "".join(f"<div>{escape(file)}</div>" for file in files)


# --- groups -------------------------------------------------------------------------------------

_RANKS = ("rank", "pid", "host", "GPUs")


def _rank_rows(group: RayRanks) -> list[tuple[str, ...]]:
    return [(str(rank), str(one["pid"]), one["host"], one["gpus"] or "–") for rank, one in enumerate(group.facts)]


def _group_title(group: RayRanks) -> str:
    if group.closed is not None:
        return f"Group {group.name!r} of {group.size} workers, gone: {group.closed}"
    pool = f" on pool {group.pool.name!r}" if group.pool is not None else ""
    return f"Group {group.name!r}: {group.size} workers{pool}, {', '.join(group.out) or 'idle'}"


def group_text(group: RayRanks) -> str:
    """A line a rank."""
    return terminal([_group_title(group), *_lined(_RANKS, _rank_rows(group))])


def group_html(group: RayRanks) -> str:
    """The same as a table."""
    return _title(_group_title(group)) + _tabled(_RANKS, _rank_rows(group))


# --- memory -----------------------------------------------------------------------------------------

_MEMORY = ("role", "what", "bytes a process")


def _fit_title(fit: Fit) -> str:
    verdict = "fits" if fit.fits else "does not fit"
    how = "all roles in one process" if fit.colocated else "each role in processes of its own"
    return f"{fit.model} {verdict}: {gib(fit.needed)} of {gib(fit.available)} ({fit.source}), {how}"


def _fit_rows(fit: Fit) -> list[tuple[str, str, str]]:
    rows = [(part.role, part.what, gib(part.size)) for part in fit.parts]
    return [*rows, *((role, "together", gib(size)) for role, size in fit.by_role.items())]


def _model(fit: Fit) -> str:
    shape = fit.shape
    return f"{shape.parameters:,} parameters ({shape.counted}), {shape.layers} layers of {shape.hidden}, learner over {fit.ranks} ranks"


def fit_text(fit: Fit) -> str:
    """The verdict, and a line for each kind of memory."""
    return terminal([_fit_title(fit), f"  {_model(fit)}", *_lined(_MEMORY, _fit_rows(fit))])


def fit_html(fit: Fit) -> str:
    """The same, with bars for shares of what a process has."""
    rows = [
        [escape(part.role), escape(part.what), bar(part.size / max(fit.available, 1), gib(part.size), good=fit.fits)]
        for part in fit.parts
    ]
    totals = table(["role", "together"], [[escape(role), escape(gib(size))] for role, size in fit.by_role.items()])
    return f"{_title(_fit_title(fit))}<div>{escape(_model(fit))}</div>{table(_MEMORY, rows)}{fold('by role', totals)}"
