"""What each worker did when: an event for every call that a rank answered, the requests to samplers, and Chrome's trace format."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.base.activity import HERE, QueuedRequest
from workbench.base.shown import Shown


@dataclass(frozen=True)
class Event:
    """One call of a method on one rank: when it began and ended, and how it ended."""

    group: str
    rank: int
    host: str
    name: str
    """Name of the method that was called."""
    began: float
    """Seconds since the epoch, on the clock of the worker's host."""
    ended: float
    outcome: str = "done"
    """`done`, `raised`, `lost` or `late`."""
    stage: str = ""
    """The stage that made the call: `rollout`, `old_log_prob`, `update_actor`; empty outside of one."""

    @property
    def seconds(self) -> float:
        """Seconds that the call ran."""
        return self.ended - self.began


@dataclass(frozen=True, repr=False)
class Timeline(Shown):
    """The calls of all workers, the earliest first, and the requests to this process's samplers; `save` writes a Chrome
    trace.

    Made by `Cluster.timeline`.
    """

    events: tuple[Event, ...]
    requests: tuple[QueuedRequest, ...] = ()
    """Finished inference requests, in the order in which they were made; each turn of an episode is one request."""
    left_out: int = 0
    """The number of older requests that are no longer kept."""

    @property
    def start(self) -> float:
        """When the first call began or the first request was made, whichever is earlier, in seconds since the epoch; 0 where
        there is none."""
        return min([*(one.began for one in self.events), *(one.asked for one in self.requests)], default=0.0)

    def __len__(self) -> int:
        return len(self.events)

    def stages(self) -> list[tuple[str, float, float]]:
        """Return when each stage ran: (stage, began, ended) in seconds since the epoch; its consecutive calls are one
        entry.
        """
        entries: list[tuple[str, float, float]] = []
        last: dict[str, int] = {}
        before = ""
        for event in (one for one in self.events if one.stage):
            stage, place = event.stage, last.get(event.stage)
            if place is not None and (before == stage or event.began < entries[place][2]):
                entries[place] = (stage, entries[place][1], max(entries[place][2], event.ended))
            else:
                last[stage] = len(entries)
                entries.append((stage, event.began, event.ended))
            before = stage
        return entries

    def chrome(self) -> dict[str, Any]:
        """Return the calls in Chrome's trace format, as a dict: a process per group, a thread per rank, times in
        microseconds.

        The stages that made the calls are a further process, and so are the requests of each sampler: spans that may
        overlap, `request` from asking to the answer, within it `waiting` and the instant `first token`.
        """
        groups = list(dict.fromkeys(event.group for event in self.events))
        lanes = sorted({(groups.index(event.group), event.rank, event.host) for event in self.events})
        start, stages = self.start, self.stages()
        lines = list(dict.fromkeys(name for name, _, _ in stages))
        events = [_meta("process_name", place, 0, group) for place, group in enumerate(groups)]
        events += [_meta("thread_name", place, rank, f"rank {rank} on {host}") for place, rank, host in lanes]
        events += [_meta("process_name", len(groups), 0, "stages")] if stages else []
        for event in self.events:
            where = (groups.index(event.group), event.rank)
            span = _span(event.name, event.outcome, *where, event.began - start, event.seconds)
            events.append(span | ({"args": {"stage": event.stage}} if event.stage else {}))
        for name, began, ended in stages:
            events.append(_span(name, "stage", len(groups), lines.index(name), began - start, ended - began))
        events += self._requests(len(groups) + 1, start)
        other = {"start": start, "requests_left_out": self.left_out}
        return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}

    def _requests(self, process: int, start: float) -> list[dict[str, Any]]:
        """Return the requests as nestable spans of Chrome's format; the first sampler is process number `process`."""
        samplers = list(dict.fromkeys(request.queue for request in self.requests))
        events = [
            _meta("process_name", process + place, 0, f"requests to {name}") for place, name in enumerate(samplers)
        ]
        for number, request in enumerate(self.requests):
            where = {"cat": "request", "id": number, "pid": process + samplers.index(request.queue), "tid": 0}
            args = {"prompt_tokens": request.prompt, "tokens": request.tokens, "outcome": request.outcome}
            marks = [("b", "request", request.asked), ("e", "request", request.ended)]
            if request.began is not None:
                marks[1:1] = [("b", "waiting", request.asked), ("e", "waiting", request.began)]
            if request.first is not None:
                marks[-1:-1] = [("n", "first token", request.first)]
            for phase, name, when in marks:
                events.append({"ph": phase, "name": name, **where, "ts": round(1e6 * ((when or start) - start), 1)})
            events[-1]["args"] = args
        return events

    def save(self, path: str | Path) -> Path:
        """Write the Chrome trace as json, which Perfetto and chrome://tracing open."""
        target = Path(path)
        target.write_text(json.dumps(self.chrome()), encoding="utf-8")
        return target


def _meta(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}


def _span(name: str, kind: str, process: int, thread: int, began: float, seconds: float) -> dict[str, Any]:
    times = {"ts": round(1e6 * began, 1), "dur": round(1e6 * seconds, 1)}
    return {"ph": "X", "name": name, "cat": kind, "pid": process, "tid": thread, **times}


def ordered(events: Sequence[Event], since: float | None = None) -> Timeline:
    """Make a `Timeline` of events, sorted by the time when they began.

    It includes the requests that this process has asked since `since` (epoch seconds); None leaves them out.
    """
    calls = tuple(sorted(events, key=lambda event: (event.began, event.group, event.rank)))
    if since is None:
        return Timeline(calls)
    return Timeline(calls, tuple(sorted(HERE.requests(since), key=lambda one: one.asked)), HERE.left_out)
