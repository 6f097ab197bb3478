"""The last lines that a worker wrote, wherever it ran."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from workbench.cluster.waiting import quietly

TAIL_BYTES = 64 << 10
PATIENCE = 5.0


class Logs(str):
    """The last lines of one or more workers: a text, and in a cell a fold a worker."""

    parts: tuple[tuple[str, str], ...]
    """(`rank 1 (pid 4711 on host)`, its lines)."""

    @staticmethod
    def of(parts: Sequence[tuple[str, str]]) -> Logs:
        """The lines of one worker as they are; of more, each under its name."""
        texts = [text for _, text in parts] if len(parts) == 1 else [f"--- {where}\n{text}" for where, text in parts]
        made = Logs("\n".join(texts))
        made.parts = tuple(parts)
        return made

    def __repr__(self) -> str:
        from workbench.views.clusters import logs_text

        return logs_text(self)

    def _repr_html_(self) -> str:
        from workbench.views.clusters import logs_html

        return logs_html(self)


def tail(paths: Sequence[str], lines: int, most: int = TAIL_BYTES) -> str:
    """The last lines of each file that is there, outputs first, errors after."""
    parts = []
    for path in paths:
        text = ""
        with suppress(OSError), open(path, "rb") as file:
            file.seek(0, 2)
            file.seek(max(file.tell() - most, 0))
            text = file.read().decode("utf-8", errors="replace")
        # Ray marks its own lines for its log monitor
        kept = [
            line
            for line in text.splitlines()
            if line.strip() and not line.startswith((":job_id:", ":actor_name:", ":task_name:"))
        ]
        parts += kept[-lines:]
    return "\n".join(parts)


def read_log(facts: Mapping[str, Any], lines: int) -> str:
    """The tail of a worker's logs by what it said of itself; says so where its node does not answer."""
    paths = [path for path in facts["logs"] if path.startswith("/") and Path(path).suffix in (".out", ".err")]
    if facts["host"] == socket.gethostname() or not paths:
        return tail(paths, lines)
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(facts["node"], soft=False)
    ref = ray.remote(num_cpus=0, max_retries=0)(tail).options(scheduling_strategy=there).remote(paths, lines)
    return str(quietly(ref, PATIENCE, f"(the log is on {facts['host']}, which does not answer)"))
