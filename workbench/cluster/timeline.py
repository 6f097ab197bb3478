"""What each worker did when: events recorded with every answer, and Chrome's trace format for them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Event:
    """One call on one rank."""

    group: str
    rank: int
    host: str
    name: str
    """The method."""
    began: float
    """Seconds since the epoch, on the worker's clock: across hosts as good as their clocks agree."""
    ended: float
    outcome: str = "done"
    """`done`, `raised`, `lost` or `late`."""

    @property
    def seconds(self) -> float:
        """How long it ran."""
        return self.ended - self.began


@dataclass(frozen=True)
class Timeline:
    """Events of all workers, the earliest first."""

    events: tuple[Event, ...]

    def __len__(self) -> int:
        return len(self.events)

    def chrome(self) -> dict[str, Any]:
        """Chrome's trace format (chrome://tracing, Perfetto): a process per group, a thread per rank, microseconds."""
        groups = list(dict.fromkeys(event.group for event in self.events))
        lanes = sorted({(groups.index(event.group), event.rank, event.host) for event in self.events})
        named: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": place, "args": {"name": group}}
            for place, group in enumerate(groups)
        ]
        named += [
            {"ph": "M", "name": "thread_name", "pid": place, "tid": rank, "args": {"name": f"rank {rank} on {host}"}}
            for place, rank, host in lanes
        ]
        start = min((event.began for event in self.events), default=0.0)
        spans = [
            {
                "ph": "X",
                "name": event.name,
                "cat": event.outcome,
                "pid": groups.index(event.group),
                "tid": event.rank,
                "ts": round(1e6 * (event.began - start), 1),
                "dur": round(1e6 * event.seconds, 1),
            }
            for event in self.events
        ]
        return {"traceEvents": [*named, *spans], "displayTimeUnit": "ms", "otherData": {"start": start}}

    def save(self, path: str | Path) -> Path:
        """Write the trace as json; a viewer opens it without more."""
        target = Path(path)
        target.write_text(json.dumps(self.chrome()), encoding="utf-8")
        return target

    def __repr__(self) -> str:
        from workbench.views.clusters import timeline_text

        return timeline_text(self)

    def _repr_html_(self) -> str:
        from workbench.views.clusters import timeline_html

        return timeline_html(self)


def ordered(events: Sequence[Event]) -> Timeline:
    """A timeline of these."""
    return Timeline(tuple(sorted(events, key=lambda event: (event.began, event.group, event.rank))))
