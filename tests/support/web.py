"""A small JSON service for tests of HTTP engines."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

CHAT = {
    "choices": [{"message": {"content": "<reason>r</reason><score>6</score>"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 9, "completion_tokens": 4},
}
CLASSIFIED = {"data": [{"index": 0, "label": "LABEL_0", "probs": [-1.5], "num_classes": 1}]}


@contextmanager
def served(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """The address of a server on loopback whose requests go to the handler."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # who hung up is not told on our terminal
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def json_service() -> Iterator[tuple[str, list[Any]]]:
    """(url, requests as (path, headers, body)): chat completions and vLLM's classify."""
    seen: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append((self.path, dict(self.headers), body))
            data = json.dumps(CLASSIFIED if self.path == "/classify" else CHAT).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None: ...

    with served(Handler) as url:
        yield url, seen
