"""Our sandbox behind SandboxFusion's HTTP API, so that one client serves both."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from workbench import background
from workbench.errors import SettingError
from workbench.sandbox.protocol import Program, Sandbox

MAX_REQUEST = 64 << 20
"""Bytes of a request body."""


def answer(sandbox: Sandbox, body: bytes) -> tuple[int, dict[str, Any]]:
    """(HTTP status, reply) to the body of a `POST /run_code`: 200 for whatever ran, 422 for a bad request."""
    try:
        request = json.loads(body)
        if not isinstance(request, dict):
            raise SettingError("a /run_code request is a JSON object")
        program = Program.from_request(request)
    except (ValueError, RecursionError) as error:
        return 422, {"detail": [{"type": "invalid", "loc": ["body"], "msg": str(error)}]}
    return 200, background.run(sandbox.execute(program)).to_reply()


@contextmanager
def serve(sandbox: Sandbox, *, port: int = 0) -> Iterator[str]:
    """Serve `/run_code` and `/v1/ping` on the loopback address while the block runs; gives the URL.

    Anybody who can log in to this machine can reach it: it is for one's own notebooks, not a public service.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._send(*((200, "pong") if self.path == "/v1/ping" else (404, {"detail": "Not Found"})))

        def do_POST(self) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            if self.path != "/run_code" or size > MAX_REQUEST:
                return self._send(404 if size <= MAX_REQUEST else 413, {"detail": "not /run_code, or too large"})
            return self._send(*answer(sandbox, self.rfile.read(size)))

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
    thread = threading.Thread(target=server.serve_forever, name="workbench-sandbox", daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
