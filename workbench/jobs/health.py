"""The health page of a training: `/health` for people, `/health.json` and its status code for machines, `/metrics` for Prometheus.

At 127.0.0.1 while the training runs: from elsewhere through `ssh -L 9464:localhost:9464`. Status 200 says that it goes on, is
paused or done; 503 that nothing has ended for five times its median step, or that it failed. `/timeline.json` has the last
requests to its samplers and the calls of a cluster's workers, in Chrome's trace format.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from workbench.base.config import require
from workbench.base.errors import SettingError, WorkbenchError, first_line
from workbench.base.loopback import STILL, Asked, Text, from_another_page, serving
from workbench.cluster import session
from workbench.cluster.timeline import ordered
from workbench.runs.folder import strict
from workbench.runs.health import Doing, Health, Watcher, exposition
from workbench.runs.trackers import append_line
from workbench.views.document import escape, html
from workbench.views.health import health

log = logging.getLogger("workbench")
PORT = 9464
"""Where `health=True` serves: the port that Prometheus exporters of this kind use."""
REFRESH = 5
"""Seconds after which a browser asks for the page again; workers of a cluster are asked no more often."""


def port_of(health: bool | int | None) -> int | None:
    """The port that an argument `health` means; None for no page. None: what WORKBENCH_HEALTH says, which a job sets."""
    if health is None and (said := os.environ.get("WORKBENCH_HEALTH", "")):
        require(said.isdecimal(), "WORKBENCH_HEALTH", expected="a port, or 0 for any free one", found=said)
        health = int(said)
    if health is None or isinstance(health, bool):
        return PORT if health else None
    is_port = isinstance(health, int) and 0 <= health < 65536
    require(is_port, "argument health", expected="a port, True or None", found=health)
    return health


def check_port(health: int | None) -> None:
    """Raise `SettingError` where a health page cannot be served at this port now."""
    with health_page(False if health is None else health):
        pass


@contextmanager
def health_page(health: bool | int | None) -> Iterator[HealthPage | None]:
    """Context manager: serves the page of a training, or nothing (yields None) where `health` asks for none.

    Raises `SettingError` where the port is in use.
    """
    port = port_of(health)
    if port is None:
        yield None
        return
    page = HealthPage()
    with ExitStack() as stack:
        try:
            served = serving(page.answer, name="workbench-health", port=port, guard=from_another_page)
            page.url = f"http://{stack.enter_context(served)}"
        except OSError as cause:
            if cause.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
            do = "another training may serve there: choose another port, or health=0 for any free one"
            raise SettingError(f"port {port} of 127.0.0.1 for the health page", found=cause.strerror, do=do) from cause
        append_line(f"health page: {page.url}/health, Prometheus: {page.url}/metrics")
        log.info("health page: %s/health", page.url)
        yield page


class HealthPage:
    """Answers what is asked of a training's health; made by `health_page`, before the training has begun."""

    def __init__(self) -> None:
        self.url = ""
        self._watcher: Watcher | None = None
        self._lock = threading.Lock()
        self._workers: tuple[float, Sequence[Doing]] = (0.0, ())

    def watching(self, watcher: Watcher) -> Watcher:
        """Show this training from now on; returns the observer that the loop is given."""
        watcher.workers = self._doing
        self._watcher = watcher
        return watcher

    def _doing(self) -> Sequence[Doing]:
        """What the workers of the open cluster do; they are asked every `REFRESH` seconds at most, by one thread."""
        with self._lock:
            when, known = self._workers
            if session.opened() is None or (time.monotonic() - when < REFRESH and known):
                return known
            try:
                lines = session.opened().status().workers  # type: ignore[union-attr]
            except WorkbenchError:  # it was closed meanwhile
                return known
            found = [Doing(one.group, one.rank, one.state, one.seconds, one.resident) for one in lines]
            self._workers = time.monotonic(), found
            return found

    def answer(self, asked: Asked) -> tuple[int, Any]:
        """What `serving` sends."""
        pages: dict[str, Callable[[Health], Any]] = {
            "/health": _page,
            "/health.json": lambda look: strict(look.to_dict()),
            "/metrics": lambda look: Text(exposition(look).decode(), "text/plain; version=0.0.4; charset=utf-8", STILL),
        }
        path = asked.path.partition("?")[0].rstrip("/") or "/health"
        if asked.method != "GET" or path not in (*pages, "/timeline.json"):
            return 404, {"detail": f"expected GET {', '.join(pages)} or /timeline.json"}
        if self._watcher is None:
            return 200, {"state": "starting", "ok": True}
        try:
            if path == "/timeline.json":
                there = session.opened()
                return 200, (there.timeline if there is not None else ordered((), 0.0)).chrome()
            look = self._watcher.look()
            return 200 if look.ok or path == "/metrics" else 503, pages[path](look)
        except Exception as error:  # noqa: BLE001 - who asks is told, and the training goes on
            return 500, {"detail": first_line(error)}


def _page(look: Health) -> Text:
    """The page of a moment: no script, no address but its own, which the browser asks for again by itself."""
    head = f'<meta charset="utf-8"><meta http-equiv="refresh" content="{REFRESH}"><meta name="viewport" content="width=device-width">'
    style = "body{font-family:system-ui,sans-serif;margin:1.5em auto;max-width:70em;padding:0 1em}table{margin:.8em 0}td,th{overflow-wrap:break-word}"
    title = escape(f"{look.state}: {look.run}, step {look.step} of {look.steps}")
    head += f"<title>{title}</title><style>:root{{color-scheme:light dark}}{style}</style>"
    links = '<p><small><a href="/health.json">health.json</a> · <a href="/metrics">metrics</a> · <a href="/timeline.json">timeline.json</a></small></p>'
    body = f'<!doctype html><html lang="en"><head>{head}</head><body>{html(health(look))}{links}</body></html>'
    return Text(body, "text/html; charset=utf-8", STILL)
