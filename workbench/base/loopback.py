"""An HTTP server of this machine's own, for one block of code."""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
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


@dataclass(frozen=True)
class Text:
    """An answer that is no JSON: a page, a script."""

    body: str
    kind: str
    """Its media type, such as `text/html`."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Further headers."""


Answer = Callable[[Asked], tuple[int, Any]]
LOCAL = ("127.0.0.1", "localhost", "[::1]")
"""What a machine calls itself."""


def from_a_page(asked: Asked) -> str:
    """Why a request is refused as one of a page in a browser: it has an `Origin`, or the `Host` of another name; else empty."""
    host = asked.headers.get("Host") or ""
    marks = [one for one in ("Origin", "Sec-Fetch-Site") if one in asked.headers]
    marks += [] if host.partition(":")[0] in LOCAL else [f"Host {host[:80]!r}"]
    return f"not for pages of a browser: {', '.join(marks)}" if marks else ""


def from_another_page(asked: Asked) -> str:
    """As `from_a_page`, but that a person may open the addresses in a browser, by hand or from the server's own pages."""
    headers = asked.headers
    own = headers.get("Sec-Fetch-Site") in ("none", "same-origin")
    return from_a_page(replace(asked, headers={"Host": headers.get("Host", "")}) if own else asked)


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
    guard: Callable[[Asked], str] = from_a_page,
    refusal: Callable[[int, str], Any] = _detail,
) -> Iterator[str]:
    """Context manager: serves HTTP at 127.0.0.1 (or `host`) while the block runs, and yields `127.0.0.1:port`.

    `answer` gets the request in the connection's thread, and gives (HTTP status, a `Text` or a value sent as JSON); an iterator
    of JSON values is sent as server-sent events, and `[DONE]` after them. Anybody who can log in to this machine can reach the
    server: it is for one's own notebooks, not a public service. What `guard` has a reason against (the request's body unread)
    is refused (403), by default what a page in a browser sends; so is a body of more than `MAX_REQUEST` bytes (413).
    `refusal` gives what is then sent, from status and reason. `name` is the thread's.
    """
    server = _Server((host, port), answer, guard, refusal)
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
        self, at: tuple[str, int], answer: Answer, guard: Callable[[Asked], str], refusal: Callable[[int, str], Any]
    ) -> None:
        super().__init__(at, _Handler)
        self.answer, self.guard, self.refusal = answer, guard, refusal

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
        if not self._unwanted():
            self._send(*self.server.answer(self._asked("GET", b"")))

    def do_POST(self) -> None:
        if self._unwanted():
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

    def _unwanted(self) -> bool:
        """Whether the guard has a reason against a request: then it is refused, unread, and the connection ends."""
        if why := self.server.guard(self._asked(self.command, b"")):
            self._refuse(403, why)
        return bool(why)

    def _refuse(self, status: int, why: str) -> None:
        self.close_connection = True  # its body is not read
        self._send(status, self.server.refusal(status, why))

    def _send(self, status: int, reply: Any) -> None:
        streams = isinstance(reply, Iterator)
        said = reply if isinstance(reply, Text) else Text("" if streams else json.dumps(reply), "application/json")
        body = said.body.encode("utf-8", "replace")
        try:
            self.send_response(status)
            self.send_header("Content-Type", "text/event-stream" if streams else said.kind)
            for header in (*said.headers.items(), *([("Connection", "close")] if self.close_connection else [])):
                self.send_header(*header)
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
