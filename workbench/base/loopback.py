"""An HTTP server of this machine's own, for one block of code."""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MAX_REQUEST = 64 << 20
"""Bytes of a request body."""


@dataclass(frozen=True)
class Asked:
    """A request to a server of this machine."""

    method: str
    """`GET` or `POST`."""
    path: str
    headers: Mapping[str, str]
    """Values by name, whatever the case of the name."""
    body: bytes
    """`b""` of a GET."""
    gone: Callable[[], bool]
    """Whether whoever asked has closed the connection: nobody will read the answer."""


Answer = Callable[[Asked], tuple[int, Any]]


@dataclass(frozen=True)
class Page:
    """A reply that is sent as it is."""

    body: bytes
    kind: str = "text/html; charset=utf-8"
    """Its content type."""


_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; img-src data:; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
}
"""Of a `Page`: it runs no script and loads nothing."""


def _detail(status: int, why: str) -> Any:
    return {"detail": why}


@contextmanager
def serving(
    answer: Answer, *, name: str, port: int = 0, refusal: Callable[[int, str], Any] = _detail, looked_at: bool = False
) -> Iterator[str]:
    """Context manager: serves HTTP at 127.0.0.1 while the block runs, and yields `127.0.0.1:port`.

    `answer` gets the request in the connection's thread, and gives (HTTP status, value sent as JSON); an iterator of
    JSON values is sent as server-sent events, and `[DONE]` after them; a `Page` is sent as it is. Anybody who can log in
    to this machine can reach the server: it is for one's own notebooks, not a public service. What a page in a browser sends is refused (403): it has an `Origin`, or
    the `Host` of a name that was bound to loopback; so is a body of more than `MAX_REQUEST` bytes (413). With `looked_at` a
    person may open its addresses in a browser, by hand or from its own pages. `refusal` gives
    what is then sent, from status and reason. `name` is the thread's.
    """
    server = _Server(port, answer, refusal, looked_at)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), name=name, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    request_queue_size = 1024  # a batch's episodes all come at once

    def __init__(self, port: int, answer: Answer, refusal: Callable[[int, str], Any], looked_at: bool) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.answer, self.refusal, self.looked_at = answer, refusal, looked_at

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Who closes a connection is no news."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1  # head and body leave in one packet

    def do_GET(self) -> None:
        if not self._from_a_page():
            self._send(*self.server.answer(self._asked("GET", b"")))

    def do_POST(self) -> None:
        if self._from_a_page():
            return
        length = self.headers.get("Content-Length") or "0"
        size = int(length) if length.isdecimal() else -1
        if size < 0:
            return self._refuse(400, "Content-Length is no number of bytes")
        if size > MAX_REQUEST:
            return self._refuse(413, f"the request has {size} bytes; expected at most {MAX_REQUEST}")
        self._send(*self.server.answer(self._asked("POST", self.rfile.read(size))))

    def _asked(self, method: str, body: bytes) -> Asked:
        return Asked(method, self.path, self.headers, body, lambda: _closed(self.connection))  # type: ignore[arg-type]

    def _from_a_page(self) -> bool:
        """Whether a page in a browser asks: then it is refused, unread, and the connection ends."""
        host = self.headers.get("Host") or ""
        marks = [one for one in ("Origin", "Sec-Fetch-Site") if one in self.headers]
        if self.server.looked_at and self.headers.get("Sec-Fetch-Site") in ("none", "same-origin"):
            marks = []
        marks += [] if host.partition(":")[0] in ("127.0.0.1", "localhost") else [f"Host {host[:80]!r}"]
        if marks:
            self._refuse(403, f"not for pages of a browser: {', '.join(marks)}")
        return bool(marks)

    def _refuse(self, status: int, why: str) -> None:
        self.close_connection = True  # its body is not read
        self._send(status, self.server.refusal(status, why))

    def _send(self, status: int, reply: Any) -> None:
        streams = isinstance(reply, Iterator)
        page = reply if isinstance(reply, Page) else None
        body = b"" if streams else page.body if page else json.dumps(reply).encode()
        try:
            self.send_response(status)
            kind = "text/event-stream" if streams else page.kind if page else "application/json"
            for name, value in {"Content-Type": kind, **(_PAGE_HEADERS if page else {})}.items():
                self.send_header(name, value)
            self.send_header(*(("Transfer-Encoding", "chunked") if streams else ("Content-Length", str(len(body)))))
            self.end_headers()
            self.wfile.write(body)
            if streams:
                for event in (*map(json.dumps, reply), "[DONE]"):
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
        """Requests are not printed into the notebook."""


def _closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
