"""An HTTP server of this machine's own, for one block of code."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MAX_REQUEST = 64 << 20
"""Bytes of a request body."""


@contextmanager
def serving(answer: Callable[[str, str, bytes], tuple[int, Any]], *, name: str, port: int = 0) -> Iterator[str]:
    """Context manager: serves HTTP at 127.0.0.1 while the block runs, and yields `127.0.0.1:port`.

    `answer` gets method, path and body (`b""` of a GET) in the connection's thread, and gives (HTTP status, value sent as JSON).
    Anybody who can log in to this machine can reach the server: it is for one's own notebooks, not a public service. What a page
    in a browser sends is refused (403): it has an `Origin`, or the `Host` of a name that was bound to loopback; so is a body of
    more than `MAX_REQUEST` bytes (413). `name` is the thread's.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if not self._from_a_page():
                self._send(*answer("GET", self.path, b""))

        def do_POST(self) -> None:
            if self._from_a_page():
                return
            length = self.headers.get("Content-Length") or "0"
            size = int(length) if length.isdecimal() else -1
            if size < 0:
                return self._refuse(400, "Content-Length is no number of bytes")
            if size > MAX_REQUEST:
                return self._refuse(413, f"the request has {size} bytes; expected at most {MAX_REQUEST}")
            self._send(*answer("POST", self.path, self.rfile.read(size)))

        def _from_a_page(self) -> bool:
            """Whether a page in a browser asks: then it is refused, unread, and the connection ends."""
            host = self.headers.get("Host") or ""
            marks = [one for one in ("Origin", "Sec-Fetch-Site") if one in self.headers]
            marks += [] if host.partition(":")[0] in ("127.0.0.1", "localhost") else [f"Host {host[:80]!r}"]
            if marks:
                self._refuse(403, f"not for pages of a browser: {', '.join(marks)}")
            return bool(marks)

        def _refuse(self, status: int, why: str) -> None:
            self.close_connection = True  # its body is not read
            self._send(status, {"detail": why})

        def _send(self, status: int, reply: Any) -> None:
            body = json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Requests are not printed into the notebook."""

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever, name=name, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
