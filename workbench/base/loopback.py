"""An HTTP server on this machine that runs while a block of code runs."""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import select
import socket
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain
from pathlib import Path
from typing import Any

from workbench.base.errors import first_line

log = logging.getLogger("workbench")
MAX_REQUEST = 64 << 20
"""Most bytes of a request body."""
PATIENCE = 10.0
"""Seconds that a connection may be silent while the server waits for a request, or for an answer to be taken."""
CONNECTIONS = 64
"""Most open connections of a server for a browser; a further connection ends the one that has been idle longest."""
WORKING = 512
"""Most open connections of a server that a whole batch of episodes uses at once."""


@dataclass(frozen=True)
class HttpRequest:
    """An HTTP request to a server of this process."""

    method: str
    """`GET` or `POST`."""
    path: str
    headers: Mapping[str, str]
    """Values by header name; upper and lower case do not differ."""
    body: bytes
    """The body; `b""` of a GET request."""
    gone: Callable[[], bool]
    """Whether the client has closed the connection, so that nobody will read the answer."""
    stranger: Callable[[], bool] = lambda: False
    """Whether the request comes from a process of another user of this machine; reads the system's table of connections."""


@dataclass(frozen=True)
class Text:
    """An HTTP answer that is not JSON, such as a page or a script."""

    body: str
    kind: str
    """The answer's media type, such as `text/html`."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Further headers of the answer."""


Answer = Callable[[HttpRequest], tuple[int, Any]]
LOCAL = ("127.0.0.1", "localhost", "[::1]")
"""Names by which a machine addresses itself."""


def is_named(host: str, names: Collection[str]) -> bool:
    """Return whether a `Host` header is one of `names`, alone or with a port. `localhost:evil.com` has no port and is
    another name.
    """
    return re.sub(r":[0-9]+\Z", "", host) in names


def from_a_page(request: HttpRequest) -> str:
    """Return why a request is refused as coming from a web page: it has an `Origin` or another `Host` than this
    machine's; else "".
    """
    host = request.headers.get("Host") or ""
    marks = [one for one in ("Origin", "Sec-Fetch-Site") if one in request.headers]
    marks += [] if is_named(host, LOCAL) else [f"Host {host[:80]!r}"]
    return f"not for pages of a browser: {', '.join(marks)}" if marks else ""


def from_another_user(request: HttpRequest) -> str:
    """Return why a request is refused: as `from_a_page`, and also if another user of this machine sent it. Servers that
    run programs or use a GPU have this guard.
    """
    if request.stranger():
        return f"not for other users: this server belongs to user {os.geteuid()}"
    return from_a_page(request)


def from_another_page(request: HttpRequest) -> str:
    """Return why a request is refused: as `from_a_page`, except that a person may open the address, or follow a link of
    the server's pages.
    """
    headers = request.headers
    own = headers.get("Sec-Fetch-Site") in ("none", "same-origin")
    return from_a_page(replace(request, headers={"Host": headers.get("Host", "")}) if own else request)


STILL = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; img-src data:; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
}
"""Headers of a page that runs no script and loads nothing."""


def _detail(status: int, why: str) -> Any:
    return {"detail": why}


@contextmanager
def serving(
    answer: Answer,
    *,
    name: str,
    port: int = 0,
    host: str = "127.0.0.1",
    guard: Callable[[HttpRequest], str] = from_a_page,
    refusal: Callable[[int, str], Any] = _detail,
    connections: int = CONNECTIONS,
) -> Iterator[str]:
    """Context manager that serves HTTP at 127.0.0.1 (or `host`) while the block runs, and yields `127.0.0.1:port`.

    `answer` gets each request in the connection's thread and returns (HTTP status, a `Text` or a value that is sent as
    JSON). An iterator of JSON values is sent as server-sent events, followed by `[DONE]`. An exception becomes a 500
    with its first line.

    `guard` returns why a request is refused (403, the body unread), or "". By default requests from web pages are
    refused, and with `from_another_user` also those of other users. Anybody who can log in to this machine can
    otherwise reach the server: it is for a user's notebooks, not a public service. A body of more than `MAX_REQUEST`
    bytes is refused (413). `refusal(status, reason)` returns what is sent then. `name` is the name of the server's
    thread.

    A connection that is silent for `PATIENCE` seconds is closed. There are at most `connections`: a further one closes
    the one that has waited longest without a whole request, or is refused (503) where all are being answered.
    """
    server = _Server((host, port), answer, guard, refusal, connections)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), name=name, daemon=True)
    thread.start()
    try:
        yield f"{host}:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    request_queue_size = 1024  # a batch's episodes all come at once

    def __init__(
        self,
        at: tuple[str, int],
        answer: Answer,
        guard: Callable[[HttpRequest], str],
        refusal: Callable[[int, str], Any],
        connections: int,
    ) -> None:
        super().__init__(at, _Handler)
        self.answer, self.guard, self.refusal = answer, guard, refusal
        self._most = connections
        self._open: dict[socket.socket, bool] = {}
        """Connection → whether a request of it is being answered; the one that has waited longest comes first."""
        self._lock = threading.RLock()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection in a new thread, or refuse it."""
        with self._lock:
            if len(self._open) >= self._most:
                waiting = next((one for one, busy in self._open.items() if not busy), None)
                if waiting is None:
                    request.sendall(_BUSY)
                    return self.shutdown_request(request)
                del self._open[waiting]
                waiting.shutdown(socket.SHUT_RDWR)  # its thread reads the end, and closes it
            self._open[request] = False
        super().process_request(request, client_address)

    def busy(self, connection: socket.socket, answering: bool) -> None:
        """Note whether a request of a connection is being answered, or the connection waits for its next request."""
        with self._lock:
            if self._open.pop(connection, None) is not None:
                self._open[connection] = answering

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Handle an exception of a connection: a closed or silent one is ignored, any other error is one line in the
        log.
        """
        error = sys.exc_info()[1]
        if error is not None and not isinstance(error, OSError):
            log.warning("a request to a server of this machine failed: %s", first_line(error))


_BUSY = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1  # head and body leave in one packet
    timeout = PATIENCE

    def version_string(self) -> str:
        """Return the value of the header `Server`, which does not tell the version of Python."""
        return "workbench"

    def do_GET(self) -> None:
        if not self._unwanted():
            self._answer("GET", b"")

    def do_POST(self) -> None:
        if self._unwanted():
            return
        length = self.headers.get("Content-Length") or "0"
        size = int(length) if length.isdecimal() else -1
        if size < 0:
            return self._refuse(400, "Content-Length is not a number of bytes")
        if size > MAX_REQUEST:
            return self._refuse(413, f"the request has {size} bytes; expected at most {MAX_REQUEST}")
        self._answer("POST", self.rfile.read(size))

    def _answer(self, method: str, body: bytes) -> None:
        self.server.busy(self.connection, True)
        try:
            status, reply = self.server.answer(self._asked(method, body))
        except Exception as error:  # noqa: BLE001 - whatever it is, who asked is answered, and the server goes on
            status, reply = 500, self.server.refusal(500, first_line(error, 300))
        self._send(status, reply)
        self.server.busy(self.connection, False)

    def _asked(self, method: str, body: bytes) -> HttpRequest:
        ends: Any = (lambda: _closed(self.connection), lambda: self._stranger)
        return HttpRequest(method, self.path, self.headers, body, *ends)  # type: ignore[arg-type]

    @functools.cached_property
    def _stranger(self) -> bool:
        return _of_a_stranger(self.connection)

    def _unwanted(self) -> bool:
        """Refuse a request that the guard objects to, unread, and end its connection; returns whether it was refused."""
        if why := self.server.guard(self._asked(self.command, b"")):
            self._refuse(403, why)
        return bool(why)

    def _refuse(self, status: int, why: str) -> None:
        self.close_connection = True  # its body is not read
        self._send(status, self.server.refusal(status, why))

    def _send(self, status: int, reply: Any) -> None:
        streams = isinstance(reply, Iterator)
        text = reply if isinstance(reply, Text) else Text("" if streams else json.dumps(reply), "application/json")
        body = text.body.encode("utf-8", "replace")
        try:
            self.send_response(status)
            self.send_header("Content-Type", "text/event-stream" if streams else text.kind)
            for header in (*text.headers.items(), *([("Connection", "close")] if self.close_connection else [])):
                self.send_header(*header)
            self.send_header(*(("Transfer-Encoding", "chunked") if streams else ("Content-Length", str(len(body)))))
            self.end_headers()
            self.wfile.write(body)
            if streams:
                for event in chain(map(json.dumps, reply), ["[DONE]"]):  # each as it comes
                    self._chunk(f"data: {event}\n\n")
                self._chunk("")
            self.wfile.flush()
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True  # whoever asked has left

    def _chunk(self, text: str) -> None:
        body = text.encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(body), body))
        self.wfile.flush()

    def log_message(self, format: str, *args: Any) -> None:
        """Do nothing, so that requests are not printed into the notebook."""


def _closed(connection: socket.socket) -> bool:
    waits = select.poll()
    try:
        waits.register(connection, select.POLLIN)
        return bool(waits.poll(0)) and connection.recv(1, socket.MSG_PEEK) == b""
    except (OSError, ValueError):
        return True


_ESTABLISHED = "01"


def _of_a_stranger(connection: socket.socket) -> bool:
    """Return whether the other end of a loopback connection belongs to another user than this one or root.

    False where the system has no table of connections. An end that was closed meanwhile belongs to nobody and counts as
    a stranger's.
    """
    here, there = (_in_table(*one) for one in (connection.getsockname(), connection.getpeername()))
    try:
        # a client's socket of IPv6 is in the other table, under an address that ends with its IPv4 one
        lines = [line for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text("ascii").splitlines()]
    except OSError:
        return False
    rows = [line.split() for line in lines]
    ends = {(row[1][-13:], row[2][-13:]): row[7] for row in rows if row[3] == _ESTABLISHED}
    return (here, there) in ends and ends.get((there, here)) not in ("0", str(os.geteuid()))


def _in_table(address: str, port: int) -> str:
    return f"{int.from_bytes(socket.inet_aton(address), sys.byteorder):08X}:{port:04X}"
