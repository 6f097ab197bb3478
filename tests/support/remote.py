"""A small server that speaks as vLLM and SGLang do, with a toy model, for what no real server does on demand."""

from __future__ import annotations

import json
import math
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

LOGITS = [-0.4 * n for n in range(20)]
"""Of token ids 60 to 79 after any prompt."""
FIRST = 60
Fault = Callable[[Any, dict[str, Any]], bytes | tuple[int, bytes]]
"""Of a reply and its request's body: the bytes, or a status and bytes, that are sent in its place."""


class Server:
    """One server; whatever is set on it holds from the next request on."""

    def __init__(self, kind: str = "sglang") -> None:
        self.kind = self.owner = kind
        self.models: list[dict[str, Any]] = [{"id": "data/tiny-arith", "root": "", "max_model_len": 256}]
        self.mode = "exact"  # or "raw", "filtered", "nonsense"
        self.seeded = True
        self.tag: str | None = "default"
        self.refuse_weights = ""
        self.faults: list[Fault] = []
        """One for each of the next samples."""
        self.seen: list[tuple[str, dict[str, str], Any]] = []
        self.folders: list[dict[str, int]] = []
        """Of each push the files, and their sizes."""
        self.gate = threading.Event()
        self.gate.set()
        self.url = ""
        self.tokenizer = AutoTokenizer.from_pretrained("data/tiny-arith")

    def asked(self, path: str) -> list[Any]:
        return [body for found, _, body in self.seen if found == path]

    def draw(self, s: dict[str, Any], seed: int, count: int) -> tuple[list[int], list[float], list[dict[int, float]]]:
        cold = s["temperature"] or 1.0
        scaled = _log_softmax([value / cold for value in LOGITS])
        keep = 1 if not s["temperature"] else s["top_k"] if s["top_k"] > 0 else len(LOGITS)
        mass, kept = 0.0, []
        for place, value in enumerate(scaled[:keep]):
            if mass < s["top_p"] and math.exp(value - scaled[0]) >= s["min_p"]:
                kept.append(place)
                mass += math.exp(value)
        shown = {
            "exact": scaled,
            "raw": _log_softmax(LOGITS),
            "nonsense": _log_softmax([value / cold**3 for value in LOGITS]),
        }.get(self.mode, [value - math.log(mass) for value in scaled])
        dice = random.Random(seed if self.seeded else None)
        places = dice.choices(kept, [math.exp(scaled[place]) for place in kept], k=count)
        tops = {FIRST + place: shown[place] for place in range(5)}
        return [FIRST + place for place in places], [shown[place] for place in places], [tops] * count

    def sglang(self, body: dict[str, Any]) -> dict[str, Any]:
        s = body["sampling_params"]
        ids, log_probs, tops = self.draw(s, s["sampling_seed"], s["max_new_tokens"])
        about = {
            "finish_reason": {"type": "length", "length": len(ids)},
            "output_token_logprobs": [[value, token, None] for value, token in zip(log_probs, ids, strict=True)],
            "output_top_logprobs": [[[value, token, None] for token, value in place.items()] for place in tops],
            "weight_version": self.tag,
        }
        return {"text": self.tokenizer.decode(ids), "output_ids": ids, "meta_info": about}

    def vllm(self, body: dict[str, Any]) -> dict[str, Any]:
        ids, log_probs, tops = self.draw(body, body["seed"], body["max_tokens"])
        held = {
            "token_logprobs": log_probs,
            "top_logprobs": [{f"token_id:{token}": value for token, value in place.items()} for place in tops],
        }
        choice = {"text": "", "token_ids": ids, "prompt_token_ids": body["prompt"], "logprobs": held}
        return {"choices": [{**choice, "finish_reason": "length"}]}

    def answer(self, path: str, body: Any) -> Any:
        if path == "/v1/models":
            return {"data": [{"owned_by": self.owner, **one} for one in self.models]}
        if path in ("/version", "/get_server_info"):
            return {"version": "0.0"}
        if path == "/tokenize":
            return {"tokens": self.tokenizer.encode(body["prompt"], add_special_tokens=False)}
        if path in ("/generate", "/v1/completions"):
            self.gate.wait(20)
            reply = self.sglang(body) if path == "/generate" else self.vllm(body)
            return self.faults.pop(0)(reply, body) if self.faults else reply
        if path == "/update_weights_from_disk":
            if self.refuse_weights:
                return 400, json.dumps({"success": False, "message": self.refuse_weights}).encode()
            folder = Path(body["model_path"])
            self.folders.append({file.name: file.stat().st_size for file in folder.iterdir()})
            self.tag = body["weight_version"]
            return {"success": True, "message": "Succeeded to update model weights."}
        return 404, b'{"detail":"Not Found"}'


def _log_softmax(values: list[float]) -> list[float]:
    total = math.log(sum(math.exp(value) for value in values))
    return [value - total for value in values]


@contextmanager
def serving(server: Server) -> Iterator[Server]:
    """The server at `server.url`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.do_POST()

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"null")
            server.seen.append((self.path, dict(self.headers), body))
            found = server.answer(self.path, body)
            status, data = found if isinstance(found, tuple) else (200, found)
            data = data if isinstance(data, bytes) else json.dumps(data).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def handle(self) -> None:
            try:
                super().handle()
            except ConnectionError:  # who asked was interrupted
                return

        def log_message(self, format: str, *args: Any) -> None: ...

    held = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    held.handle_error = lambda *_: None  # who hung up is not told on our terminal
    server.url = f"http://127.0.0.1:{held.server_address[1]}"
    threading.Thread(target=held.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.gate.set()
        held.shutdown()
        held.server_close()
